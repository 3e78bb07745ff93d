//! Texts that models write: for dev scores in training and for predictions alike; and how words are segmented differently in every epoch of a
//! training on texts.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use henson_infer::{EventKind, FinishReason, GenerateSettings, InferError, Job, Writer};
use henson_kernels::threads::in_threads;
use henson_models::{Batch, Capture, Model, Sequence};
use henson_tensor::{Parameters, Pass, Tape, Tensor};
use henson_text::{Features, Kind, Regularisation, Tokenizer};
use henson_train::{Result as TrainResult, TrainError};

use crate::error::TaskError;
use crate::example::{Input, Set, Target};
use crate::forms::{rows_of_targets, source_from, target_from, wrong_kind};
use crate::predict::PredictSettings;
use crate::predictions::Prediction;
use crate::prepare::{Instance, Lengths, Prepared, prepare_all};

/// Tokens of a batch that is scored.
const TOKENS: usize = 4096;

/// Sources that are written for at a time.
const STREAMS: usize = 64;

/// Bytes of keys and values that are kept of all of them.
const CACHE_BYTES: usize = 1 << 29;

/// How texts are written.
#[derive(Clone, Debug)]
pub struct Writing {
    /// What turns tokens into texts.
    pub tokenizer: Arc<Tokenizer>,
    /// How tokens are chosen.
    pub settings: GenerateSettings,
}

/// Writes a text for every source, each different one once. `go_on` is told how many are done, and may end it.
pub(crate) fn write_all(
    model: &Model,
    parameters: &Parameters,
    tokenizer: &Tokenizer,
    sources: &[&Features],
    settings: &GenerateSettings,
    mut go_on: impl FnMut(usize) -> bool,
) -> Result<Vec<String>, TaskError> {
    let mut numbers: HashMap<&[u32], usize> = HashMap::new();
    let mut different: Vec<&[u32]> = Vec::new();
    let mut which = Vec::with_capacity(sources.len());
    for source in sources {
        let number = *numbers.entry(&source.ids).or_insert(different.len());
        if number == different.len() {
            different.push(&source.ids);
        }
        which.push(number);
    }
    let lengths = different.iter().map(|ids| ids.len());
    let limits = Writer::limits_for(model, parameters, lengths, settings, (STREAMS, CACHE_BYTES))?;
    let mut writer = Writer::new(model, parameters, limits)?;
    let mut tickets = HashMap::new();
    for (number, ids) in different.iter().enumerate() {
        let job = Job { prompt: ids.to_vec(), start: Vec::new(), settings: settings.clone(), stop: None };
        tickets.insert(writer.enter(job)?, number);
    }
    let mut texts: Vec<Option<String>> = vec![None; different.len()];
    let mut done = 0;
    while !writer.is_idle() {
        if !go_on(done * sources.len() / different.len().max(1)) {
            return Err(TaskError::Stopped);
        }
        for event in writer.step()? {
            let (Some(number), EventKind::Finished(written)) = (tickets.get(&event.ticket), event.kind) else {
                continue;
            };
            if written.why == FinishReason::NotFinite {
                let text = which.iter().position(|which| which == number).unwrap_or(0) + 1;
                return Err(InferError::NotFinite { text }.into());
            }
            if event.sequence == 0 {
                texts[*number] = Some(tokenizer.decode(&written.ids, true).map_err(TrainError::from)?);
                done += 1;
            }
        }
    }
    Ok(which.into_iter().map(|number| texts[number].clone().unwrap_or_default()).collect())
}

/// Asks a model that writes about all examples; see [`crate::predict()`].
pub(crate) fn predict_set(
    models: &[henson_infer::Model],
    set: &Set,
    settings: &PredictSettings,
    each: &mut dyn FnMut(usize) -> ControlFlow<()>,
) -> Result<Vec<Prediction>, TaskError> {
    let [model] = models else { return Err(TaskError::OneWriter) };
    if model.network().head() != set.task.form.head_for(&model.config().model, 0) {
        return Err(TaskError::OtherLabels {
            path: model.path().to_owned(),
            model: format!("of another kind ({})", model.config().model.class(model.network().head())),
            data: format!("those of task {}", set.task.name),
        });
    }
    if settings.windows == Some(true) {
        let expected = format!("false: task {} reads an example as a whole", set.task.name);
        return Err(TrainError::setting("windows", "true", expected).into());
    }
    let own = Lengths::of_model(model, set.task);
    let most = settings.max_length.map_or(own.most, |most| most.min(model.most_tokens()));
    let lengths = Lengths { most, ..own };
    let lengths = if own.continues { lengths.in_one(model.most_tokens()) } else { lengths };
    let threads = model.parameters().device().threads();
    let generate = model.generate_settings()?;
    let mut predictions = Vec::with_capacity(set.examples.len());
    for examples in set.examples.chunks(crate::predict::TOGETHER) {
        let prepared = prepare_all(set.task, &set.labels, model.tokenizer(), examples, &lengths, threads)
            .map_err(TrainError::from)?;
        let sources: Vec<&Features> = prepared.iter().flat_map(Prepared::sequences).collect();
        let done = predictions.len();
        let go_on = |more| each(done + more).is_continue();
        let texts = write_all(model.network(), model.parameters(), model.tokenizer(), &sources, &generate, go_on)?;
        let read = examples.iter().zip(texts).map(|(example, text)| set.task.form.read_written(set, example, text));
        predictions.extend(read);
    }
    Ok(predictions)
}

/// The mean loss of a token of all targets, in nats and without label smoothing.
pub(crate) fn mean_loss(model: &Model, parameters: &Parameters, prepared: &[Prepared]) -> TrainResult<f64> {
    let pairs: Vec<(&Features, &[u32])> = prepared
        .iter()
        .filter_map(|prepared| match prepared {
            Prepared::Written(source, targets, _) => Some((source, targets)),
            _ => None,
        })
        .flat_map(|(source, targets)| targets.iter().map(move |target| (source, target.as_slice())))
        .collect();
    let (device, mut tape) = (parameters.device().clone(), Tape::new());
    let (mut sum, mut tokens, mut rest) = (0.0, 0, pairs.as_slice());
    while !rest.is_empty() {
        let mut size = 0;
        let fits = |(source, target): &&(&Features, &[u32])| {
            size += source.len() + target.len();
            size <= TOKENS
        };
        let count = rest.iter().take_while(fits).count().max(1);
        let (some, others) = rest.split_at(count);
        rest = others;
        let sources: Vec<Sequence<'_>> =
            some.iter().map(|(source, _)| Sequence { ids: &source.ids, segments: &source.segments }).collect();
        let targets: Vec<&[u32]> = some.iter().map(|(_, target)| *target).collect();
        let batch = Batch::pairs(&device, model.config(), &sources, &targets, 0)?;
        let layout = batch.output_layout();
        let mut ids = targets.concat();
        let mut weights = vec![1.0_f32; ids.len()];
        tokens += ids.len();
        let of_pairs = some.iter().map(|(source, target)| (source.len(), target.len()));
        let rows = rows_of_targets(model.head(), layout.tokens(), of_pairs);
        ids.resize(rows.len(), 0);
        weights.resize(rows.len(), 0.0);
        let rows = Tensor::from_slice(&device, [rows.len()], &rows)?;
        let ids = Tensor::from_slice(&device, [ids.len()], &ids)?;
        let weights = Tensor::from_slice(&device, [rows.shape().elements()], &weights)?;
        let mut pass = Pass::inference(&mut tape, parameters);
        let last = model.encode(&mut pass, &batch, Capture::default())?.last;
        let logits = model.logits_of(&mut pass, last, layout, Some(&rows))?;
        let vocabulary = model.config().sizes().vocab_size;
        let loss = pass.cross_entropy(logits, vocabulary, &ids, Some(&weights), 1.0)?.0;
        sum += loss.to_f32()?.first().copied().map_or(f64::NAN, f64::from);
    }
    Ok(sum / tokens.max(1) as f64)
}

/// Segments the words of a training set differently in every epoch.
#[derive(Debug)]
pub struct Resampling {
    tokenizer: Arc<Tokenizer>,
    regularisation: Regularisation,
    /// A source and one of its targets.
    pairs: Vec<(String, String)>,
    lengths: Lengths,
    seed: u64,
    threads: usize,
}

impl Resampling {
    /// Of a set, in the order of its instances. `strength` is a power or a probability, as the tokenizer's kind has it.
    pub(crate) fn new(
        set: &Set,
        tokenizer: &Arc<Tokenizer>,
        strength: f64,
        lengths: Lengths,
        (seed, threads): (u64, usize),
    ) -> Result<Self, TaskError> {
        let regularisation = match tokenizer.kind() {
            Kind::Unigram => Regularisation::Sampling { alpha: strength },
            _ => Regularisation::Dropout { probability: strength },
        };
        // Refused before anything is computed.
        tokenizer.sampler(seed, regularisation).map_err(TrainError::from)?;
        let mut pairs = Vec::new();
        for example in &set.examples {
            let (Input::One(source), Target::Texts(targets)) = (&example.input, &example.target) else {
                return Err(wrong_kind(set, example));
            };
            pairs.extend(targets.iter().map(|target| (source.clone(), target.clone())));
        }
        let tokenizer = Arc::clone(tokenizer);
        Ok(Self { tokenizer, regularisation, pairs, lengths, seed, threads })
    }

    /// The instances of an epoch.
    pub(crate) fn epoch(&self, epoch: u64) -> TrainResult<Vec<Instance>> {
        let sampler = self.tokenizer.sampler(self.seed, self.regularisation)?;
        let (template, count) = (self.tokenizer.template(), self.pairs.len() as u64);
        let each = self.pairs.len().div_ceil(self.threads.max(1)).max(1);
        let part = |(number, pairs): (usize, &[(String, String)])| -> TrainResult<Vec<Instance>> {
            let mut instances = Vec::with_capacity(pairs.len());
            for (i, (source, target)) in pairs.iter().enumerate() {
                // Two draws for each pair of each epoch.
                let draw = 2 * (epoch * count + (number * each + i) as u64);
                let source = source_from(template, &sampler.encode(source, draw)?, &self.lengths)?;
                let target = target_from(template, &sampler.encode(target, draw + 1)?, &self.lengths)?.0;
                instances.push(Instance::pair(&source, target));
            }
            Ok(instances)
        };
        let mut all = Vec::with_capacity(self.pairs.len());
        for part in in_threads(self.threads, self.pairs.chunks(each).enumerate(), part) {
            all.extend(part?);
        }
        Ok(all)
    }
}
