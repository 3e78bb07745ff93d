//! Fine-tuning as a task for the loop: shuffled batches of instances under any head, and the official scores on dev data.
//!
//! Sequences are never padded, and so never sorted by length either: a batch is one flat stream of whatever was drawn.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use henson_infer::Pooling;
use henson_kernels::philox::Stream;
use henson_models::{Batch, Capture, Head, Model, ModelConfig};
use henson_ranks::Ranks;
use henson_tensor::{Bits, Device, Layout, Parameters, Pass, Reading, Tensor, Var};
use henson_text::{Features, Tokenizer};
use henson_train::objective::Objective;
use henson_train::{Engine, Evaluation, LossNames, Result, Schedule, Task, TrainError, Underway, Watch, metrics};
use serde_json::Value;

use crate::error::TaskError;
use crate::example::Set;
use crate::forms::{Loss, Part, TokenLoss};
use crate::forward::{forward, gather_scores};
use crate::predict::predictions_of;
use crate::predictions::Prediction;
use crate::prepare::{Instance, Lengths, Prepared, prepare_all};
use crate::read::listed;
use crate::score::{Score, score};
use crate::write::{self, Resampling, Writing};

use super::mixture::Mixture;
use super::vectors::HostObjective;

/// Numbers the stream of shuffles among all uses of the seed.
const SHUFFLE: u32 = 0x5bff;

/// What instances are learnt with.
#[derive(Clone, Debug)]
pub struct LearnerSettings {
    /// What is learned.
    pub task: &'static crate::Task,
    /// Instances of an update.
    pub batch_size: usize,
    /// Parts of a batch.
    pub accumulation: usize,
    /// The learning rate.
    pub schedule: Schedule,
    /// The seed of the order.
    pub seed: u64,
    /// Whether the encoder runs without dropout and is not trained.
    pub freeze: bool,
    /// Whether questions may be left without an answer: not where training saw none of that kind.
    pub may_decline: bool,
    /// What cosines are divided by, where texts that are alike are learned from.
    pub temperature: f32,
    /// What each label counts; of several labels a text, where it is right. Empty: all the same.
    pub class_weights: Vec<f32>,
    /// The score that the best model is chosen by; none: the task's own.
    pub metric: Option<String>,
    /// The weight of the language model's loss on what is read; 0 for none.
    pub auxiliary_lm: f32,
    /// Whether an instance is a pair of texts in both orders, whose last vectors are added.
    pub both_orders: bool,
    /// The share of a target that is spread evenly over all classes, where texts are learned.
    pub label_smoothing: f32,
    /// How texts are written for the dev scores, where that is what is learned.
    pub writing: Option<Writing>,
    /// Draws how words are cut in every epoch, where texts are learned.
    pub resampling: Option<Arc<Resampling>>,
    /// How tokens' vectors become one, where those are what is learned.
    pub poolings: Vec<Pooling>,
    /// What is learned by losses that are computed elsewhere than on the device: none, one, or one for each data set.
    pub host: Vec<HostObjective>,
}

/// Dev examples with what the model reads of them.
pub struct Dev {
    set: Set,
    prepared: Vec<Prepared>,
}

impl Dev {
    /// Lays out all examples, on several threads.
    pub fn new(set: Set, tokenizer: &Tokenizer, lengths: &Lengths, threads: usize) -> Result<Self> {
        let prepared = prepare_all(set.task, &set.labels, tokenizer, &set.examples, lengths, threads)?;
        Ok(Self { set, prepared })
    }
}

/// What the last evaluation found.
pub(crate) struct Found {
    pub(crate) step: u64,
    pub(crate) score: Score,
    pub(crate) degenerate: Option<String>,
}

impl Found {
    fn nothing(step: u64) -> Self {
        Self { step, score: Score::default(), degenerate: None }
    }
}

/// Instances that are shuffled among themselves.
#[derive(Clone, Debug)]
pub(super) struct Shuffled {
    range: Range<usize>,
    batch_size: usize,
    /// The order of an epoch.
    order: Option<(u64, Vec<u32>)>,
}

impl Shuffled {
    pub(super) fn new(range: Range<usize>, batch_size: usize) -> Self {
        Self { range, batch_size, order: None }
    }

    /// Updates of an epoch over them, which are some of `instances`.
    pub(super) fn steps_per_epoch(&self, instances: &[Instance]) -> u64 {
        Learner::steps_per_epoch(&instances[self.range.clone()], self.batch_size)
    }

    /// Draws the order of an epoch, unless it is there; `number` is that of the data set.
    fn reorder(&mut self, seed: u64, number: usize, epoch: u64) -> bool {
        if self.order.as_ref().is_some_and(|(of, _)| *of == epoch) {
            return false;
        }
        let mut order: Vec<u32> = (0..self.range.len() as u32).collect();
        let mut draws = Stream::new(seed, SHUFFLE, epoch | (number as u64) << 40);
        for i in (1..order.len()).rev() {
            order.swap(i, draws.below(i as u32 + 1) as usize);
        }
        self.order = Some((epoch, order));
        true
    }

    /// Those of a step among so many of the epoch.
    fn rows(&self, step: u64, steps: u64) -> impl Iterator<Item = usize> + '_ {
        let order = self.order.as_ref().map(|(_, order)| order.as_slice()).unwrap_or_default();
        let start = step as usize * self.batch_size;
        let end = if step == steps - 1 { order.len() } else { start + self.batch_size };
        order[start..end].iter().map(|row| self.range.start + *row as usize)
    }
}

/// Fine-tuning as a task.
pub struct Learner {
    train: Vec<Instance>,
    dev: Option<Dev>,
    settings: LearnerSettings,
    /// What is shuffled among itself.
    shuffled: Vec<Shuffled>,
    /// In which order batches of several data sets follow each other.
    mixture: Option<Mixture>,
    /// The last evaluation.
    pub(crate) found: Option<Found>,
}

impl Learner {
    /// A task on these instances; the order of each epoch is drawn by the seed.
    pub fn new(train: Vec<Instance>, dev: Option<Dev>, settings: LearnerSettings) -> Result<Self> {
        let all = vec![Shuffled::new(0..train.len(), settings.batch_size)];
        Self::of_several(train, dev, settings, all, None)
    }

    /// A task on the instances of several data sets, each shuffled among itself and with an objective of its own.
    pub(super) fn of_several(
        train: Vec<Instance>,
        dev: Option<Dev>,
        settings: LearnerSettings,
        shuffled: Vec<Shuffled>,
        mixture: Option<Mixture>,
    ) -> Result<Self> {
        if train.is_empty() {
            return Err(TrainError::setting("train", "empty", "at least one labelled example"));
        }
        if shuffled.iter().any(|set| set.batch_size == 0) {
            return Err(TrainError::setting("batch_size", 0, "at least 1"));
        }
        Ok(Self { train, dev, settings, shuffled, mixture, found: None })
    }

    /// Updates of an epoch. Its last batch may be smaller; none spans two epochs. A pair of texts that are alike would learn
    /// nothing alone, since its partner is told from others: where one is left over, it joins the batch before.
    pub fn steps_per_epoch(instances: &[Instance], batch_size: usize) -> u64 {
        let (count, size) = (instances.len(), batch_size.max(1));
        let left_over =
            instances.first().is_some_and(Instance::is_contrast) && size > 1 && count > size && count % size == 1;
        (count.div_ceil(size) - usize::from(left_over)) as u64
    }

    /// The instances of a step, and which data set they are of.
    fn batch(&mut self, step: u64) -> Result<(usize, Vec<&Instance>)> {
        let (set, own_step) = self.mixture.as_mut().map_or((0, step), |mixture| mixture.at(step));
        let steps = self.shuffled[set].steps_per_epoch(&self.train);
        if self.shuffled[set].reorder(self.settings.seed, set, own_step / steps)
            && let Some(resampling) = &self.settings.resampling
        {
            self.train = resampling.epoch(own_step / steps)?;
        }
        let rows = self.shuffled[set].rows(own_step % steps, steps);
        Ok((set, rows.map(|row| &self.train[row]).collect()))
    }

    /// Asks teachers about all examples beforehand, where their answers are kept.
    pub(crate) fn ask_teachers(
        &self,
        device: &Device,
        ranks: Option<&Ranks>,
        watch: &mut Watch<'_>,
    ) -> std::result::Result<(), TaskError> {
        for objective in &self.settings.host {
            if let HostObjective::Taught(objective) = objective {
                objective.teaching.keep(device, ranks, watch)?;
            }
        }
        Ok(())
    }

    /// What the model says about the dev examples, and how right that is. Of several ranks that all look, each reads a share of them.
    pub(crate) fn look(&mut self, engine: &Engine, step: u64, ranks: Option<&Ranks>) -> Result<Option<&Found>> {
        let Engine { model, parameters, .. } = engine;
        if let Some(found) = self.score(model, parameters, step, ranks)? {
            self.found = Some(found);
            return Ok(self.found.as_ref());
        }
        Ok(None)
    }

    /// What a model writes for the dev examples, how right that is, and how likely the right texts are to it. A model that was not
    /// trained yet may write without end, so that its texts are not asked for.
    fn score_written(&self, model: &Model, parameters: &Parameters, writing: &Writing, step: u64) -> Result<Found> {
        let task = |error: crate::TaskError| TrainError::Task(error.into());
        let Some(Dev { set, prepared }) = &self.dev else { return Ok(Found::nothing(step)) };
        let loss = ("loss", write::mean_loss(model, parameters, prepared)?);
        if step == 0 {
            return Ok(Found { score: Score { metrics: vec![loss], ..Score::default() }, ..Found::nothing(step) });
        }
        let sources: Vec<&Features> = prepared.iter().flat_map(Prepared::sequences).collect();
        let Writing { tokenizer, settings } = writing;
        let texts = write::write_all(model, parameters, tokenizer, &sources, settings, |_| true).map_err(task)?;
        let read = |(example, text)| set.task.form.read_written(set, example, text);
        let predictions: Vec<Prediction> = set.examples.iter().zip(texts).map(read).collect();
        let mut scored = score(set, &predictions, None, usize::MAX).map_err(task)?;
        scored.metrics.push(loss);
        let degenerate = degenerate(set, &predictions, &scored);
        Ok(Found { step, score: scored, degenerate })
    }

    /// What any model with the task's head says about the dev examples, and how right that is.
    pub(crate) fn score(
        &self,
        model: &Model,
        parameters: &Parameters,
        step: u64,
        ranks: Option<&Ranks>,
    ) -> Result<Option<Found>> {
        let Some(Dev { set, prepared }) = &self.dev else { return Ok(None) };
        if let (true, Some(writing)) = (set.task.form.writes, &self.settings.writing) {
            return self.score_written(model, parameters, writing, step).map(Some);
        }
        let own = ranks.map_or(0..prepared.len(), |ranks| ranks.share(prepared.len(), ranks.rank()));
        let mut scores = forward(model, parameters, set.task, &prepared[own], &self.settings.poolings, |_| true)
            .map_err(|e| TrainError::Task(e.into()))?;
        if let Some(ranks) = ranks {
            scores = gather_scores(ranks, &scores).ok_or_else(|| {
                TrainError::Ranks("scores of other ranks make no sense: are all of the same version?".to_owned())
            })?;
        }
        // All answers first; then those whose odds are against them are taken back, as far as that is best.
        let (most, threshold) = match set.task.may_be_unanswerable {
            // A model that never saw a question without an answer gives one to all.
            true if !self.settings.may_decline => (Some(f64::MAX), Some(f64::MAX)),
            true => (Some(f64::MAX), Some(0.0)),
            false => (None, None),
        };
        let predictions = predictions_of(set, &set.examples, prepared, scores, most);
        let scored = score(set, &predictions, threshold, usize::MAX).map_err(|error| TrainError::Task(error.into()))?;
        let degenerate = degenerate(set, &predictions, &scored);
        Ok(Some(Found { step, score: scored, degenerate }))
    }
}

/// The score that chooses the best model: `metric`, else the task's own; for questions that may be unanswerable, with the best
/// threshold.
pub(crate) fn chosen_by(set: &Set, score: &Score, metric: Option<&str>) -> (String, f64) {
    if let Some(name) = metric {
        return (name.to_owned(), score.get(name).unwrap_or(f64::NAN));
    }
    let names = if set.task.may_be_unanswerable { ["best_f1", set.task.metric] } else { [set.task.metric; 2] };
    let found = names.into_iter().find_map(|name| Some((name, score.get(name)?)));
    // A tag set without entities has no F1.
    let (name, value) = found.or(score.metrics.first().copied()).unwrap_or((set.task.metric, f64::NAN));
    (name.to_owned(), value)
}

/// A score to choose by as it is written in results: in small letters, with `_` for `-` but in labels. What the task does not
/// have is an error that names what it has.
pub(crate) fn check_metric(metric: &str, task: &crate::Task, labels: &[String]) -> Result<String> {
    let form = task.form;
    let (name, label) = metric.split_once(':').map_or((metric, None), |(name, label)| (name, Some(label)));
    let name = name.trim().to_lowercase().replace('-', "_");
    let mut known = labels.to_vec();
    known.sort_unstable();
    known.dedup();
    let has_labels = form.fewest_labels > 0;
    let fits = match label {
        None => form.metrics.contains(&name.as_str()),
        Some(label) => {
            let of_labels = ["f1", "precision", "recall"].contains(&name.as_str());
            has_labels && of_labels && known.iter().any(|other| other == label)
        }
    };
    if fits {
        return Ok(label.map_or(name.clone(), |label| format!("{name}:{label}")));
    }
    let mut expected = format!("one of the scores of task {}: {}", task.name, form.metrics.join(", "));
    if has_labels {
        expected += &format!("; or f1:LABEL, precision:LABEL, recall:LABEL of one of {}", listed(&known));
    }
    Err(TrainError::setting("metric", metric, expected))
}

/// Why a model is no better than none, if so.
pub(crate) fn degenerate(set: &Set, predictions: &[Prediction], score: &Score) -> Option<String> {
    let first = predictions.first()?;
    if predictions.len() > 1 && predictions.iter().all(|prediction| prediction.says_the_same(first)) {
        return Some("predicts the same for every example".to_owned());
    }
    set.task.form.degenerate(set, predictions, score)
}

impl Task for Learner {
    fn step(&mut self, engine: &mut Engine, step: u64) -> Result<Underway> {
        let LearnerSettings { task, freeze, accumulation, temperature, .. } = self.settings;
        let class_weights = self.settings.class_weights.clone();
        if !self.settings.host.is_empty() {
            let host = self.settings.host.clone();
            let (set, instances) = self.batch(step)?;
            let objective = &host[set];
            let tokens = instances.iter().map(|instance| instance.tokens()).sum();
            let parts = if objective.is_cached() { vec![instances] } else { divided(instances, accumulation) };
            let parts = objective.learn(engine, step, parts, accumulation)?;
            let (losses, weights) = objective.names();
            return Ok(Underway { parts, losses, weights, tokens });
        }
        let (smoothing, auxiliary_lm) = (self.settings.label_smoothing, self.settings.auxiliary_lm);
        let both_orders = self.settings.both_orders;
        let (_, instances) = self.batch(step)?;
        let total: f32 = instances.iter().map(|instance| weight(instance, &class_weights)).sum();
        let scale = if total > 0.0 { 1.0 / total } else { 0.0 };
        let objective = FineTuning {
            task,
            head: engine.model.head(),
            scale: scale.into(),
            temperature: temperature.into(),
            smoothing: smoothing.into(),
            auxiliary_lm: auxiliary_lm.into(),
            both_orders,
        };
        let sequences: usize = instances.iter().map(|instance| instance.sequences.len()).sum();
        let language = auxiliary_lm / sequences.max(1) as f32;
        let tokens = instances.iter().map(|instance| instance.tokens()).sum();
        let passes = numbered(divided(instances, accumulation));
        let parts = in_passes(engine, step, passes.len(), accumulation, |engine, i| {
            let (instances, number) = &passes[i];
            let part = PartOfBatch { instances, class_weights: &class_weights, number: *number, language };
            if freeze { learn_head(engine, step, objective, part) } else { engine.learn_part(step, objective, part) }
        })?;
        let mut weights = henson_train::EQUAL;
        if auxiliary_lm > 0.0 {
            weights[1] = f64::from(auxiliary_lm);
        }
        Ok(Underway { parts, losses: objective.names(), weights, tokens })
    }

    fn evaluate(&mut self, engine: &mut Engine, step: u64) -> Result<Option<Evaluation>> {
        let ranks = engine.ranks().cloned();
        if self.look(engine, step, ranks.as_deref())?.is_none() {
            return Ok(None);
        }
        let (Some(Dev { set, .. }), Some(found)) = (&self.dev, &self.found) else { return Ok(None) };
        let own = self.settings.metric.as_deref();
        let (name, value) = chosen_by(set, &found.score, own);
        let is_untrained = step == 0 && set.task.form.writes;
        let all = found.score.metrics.iter().map(|(name, value)| ((*name).to_owned(), *value));
        let mut metrics: BTreeMap<String, f64> = all.collect();
        if is_untrained {
            return Ok(Some(Evaluation { metrics, score: f64::NAN, loss: None }));
        }
        if own.is_some() && found.score.get(&name).is_none() {
            let known = metrics.keys().cloned().collect::<Vec<_>>().join(", ");
            return Err(TrainError::setting("metric", &name, format!("one of the scores of this dev data: {known}")));
        }
        metrics.insert(name, value);
        let loss = found.score.get("loss");
        Ok(Some(Evaluation { metrics, score: value, loss }))
    }

    fn samples(&mut self, _engine: &mut Engine) -> Result<Vec<metrics::Sample>> {
        Ok(Vec::new())
    }

    fn rate(&self, step: u64) -> (f64, u32) {
        (self.settings.schedule.rate(step), 0)
    }

    fn place(&self) -> Result<Value> {
        // The step says it all; null would be a run that has not begun.
        Ok(Value::Bool(true))
    }
}

/// Fine-tuning as an objective: the loss of the task's form, with the numbers that it reads.
#[derive(Clone, Copy, Hash)]
struct FineTuning {
    task: &'static crate::Task,
    head: Head,
    scale: Bits,
    temperature: Bits,
    smoothing: Bits,
    auxiliary_lm: Bits,
    both_orders: bool,
}

#[derive(Clone, Copy)]
struct PartOfBatch<'p> {
    instances: &'p [&'p Instance],
    class_weights: &'p [f32],
    /// That of its first sequence in the whole batch.
    number: u32,
    /// What the language model's loss on a sequence counts: its weight, over all sequences of the step.
    language: f32,
}

impl Objective for FineTuning {
    type Part<'p> = PartOfBatch<'p>;
    type Inputs = Inputs;

    fn names(&self) -> LossNames {
        if self.auxiliary_lm.get() > 0.0 { &["task_loss", "lm_loss"] } else { &[] }
    }

    fn inputs(&self, device: &Device, config: &ModelConfig, part: PartOfBatch<'_>) -> Result<Inputs> {
        let PartOfBatch { instances, class_weights, number, language } = part;
        let batch = self.task.form.batch(device, config, instances, number)?;
        let (scale, temperature, tokens) = (self.scale.get(), self.temperature.get(), batch.output_layout().tokens());
        let (smoothing, together) = (self.smoothing.get(), config.scores_jointly());
        let (head, layout) = (self.head, batch.output_layout());
        let part = Part { instances, class_weights, scale, temperature, tokens, smoothing, together, head, layout };
        let orders = match self.both_orders {
            true => Some(Orders::new(device, instances.len(), number)?),
            false => None,
        };
        let language = match self.auxiliary_lm.get() > 0.0 {
            true => Some(language_loss(device, instances, language)?),
            false => None,
        };
        let loss = self.task.form.loss(device, &part)?;
        Ok(Inputs { loss, orders, language, batch })
    }

    fn losses(&self, model: &Model, pass: &mut Pass<'_>, inputs: &Inputs) -> Result<Vec<Tensor>> {
        let last = model.encode(pass, &inputs.batch, Capture::default())?.last;
        let layout = inputs.batch.output_layout();
        let Some(language) = &inputs.language else { return inputs.task_losses(model, pass, last) };
        let mut losses = inputs.task_losses(model, pass, last.clone())?;
        losses.extend(language.of(model, pass, last, layout)?);
        Ok(losses)
    }
}

/// One part of an update in which the encoder only computes.
fn learn_head(engine: &mut Engine, step: u64, objective: FineTuning, part: PartOfBatch<'_>) -> Result<Reading> {
    let training = engine.training(step);
    let Engine { model, parameters, gradients, tape, .. } = engine;
    let device = parameters.device().clone();
    let inputs = objective.inputs(&device, model.config(), part)?;
    let last = model.encode(&mut Pass::inference(tape, parameters), &inputs.batch, Capture::default())?.last;
    let mut pass = Pass::training(tape, parameters, training);
    let losses = inputs.task_losses(model, &mut pass, last)?;
    pass.backward(gradients)?;
    Ok(device.read_later(&losses.iter().collect::<Vec<_>>())?)
}

/// What an instance counts in the mean of a step.
fn weight(instance: &Instance, class_weights: &[f32]) -> f32 {
    let of = |label: &u32| class_weights.get(*label as usize).copied().unwrap_or(1.0);
    match (instance.labels.is_empty(), instance.is_contrast()) {
        (false, _) => instance.labels.iter().flatten().map(of).sum(),
        (true, false) => instance.numbers.len() as f32,
        (true, true) => 1.0,
    }
}

/// A batch in parts: so many as wanted, and such that all choices of a part have as many sequences.
fn divided(mut instances: Vec<&Instance>, accumulation: usize) -> Vec<Vec<&Instance>> {
    let count = instances.len();
    // Texts that are alike are told from all others, of how many sequences these may be. There must be some: the parts are as
    // equal as can be, and fewer where a part would have a single pair.
    if instances.first().is_some_and(|instance| instance.is_contrast()) {
        let parts = accumulation.min(count / 2).max(1);
        let borders: Vec<usize> = (0..=parts).map(|part| (part * count).div_ceil(parts)).collect();
        return borders.windows(2).map(|border| instances[border[0]..border[1]].to_vec()).collect();
    }
    let most = count.div_ceil(accumulation.max(1)).max(1);
    instances.sort_by_key(|instance| instance.sequences.len());
    let alike = instances.chunk_by(|a, b| a.sequences.len() == b.sequences.len());
    alike.flat_map(|alike| alike.chunks(most)).map(<[&Instance]>::to_vec).collect()
}

/// The passes of a batch, each with the number of its first sequence.
pub(super) fn numbered(passes: Vec<Vec<&Instance>>) -> Vec<(Vec<&Instance>, u32)> {
    let mut number = 0;
    let numbered = passes.into_iter().map(|instances| {
        let first = number;
        number += instances.iter().map(|instance| instance.sequences.len() as u32).sum::<u32>();
        (instances, first)
    });
    numbered.collect()
}

/// Runs the passes of a batch, by their numbers, in so many parts. Gives the losses of each pass.
pub(super) fn in_passes(
    engine: &mut Engine,
    step: u64,
    passes: usize,
    parts: usize,
    mut learn: impl FnMut(&mut Engine, usize) -> Result<Reading>,
) -> Result<Vec<Reading>> {
    let parts = parts.max(1);
    engine.in_parts(step, parts, |engine, part| passes_of(part, parts, passes).map(|i| learn(engine, i)).collect())
}

/// Which of the passes of a batch belong to one of its parts: each has one, the last ones perhaps none. Where there are more, since
/// choices differ in number, they are shared out in order.
fn passes_of(part: usize, parts: usize, passes: usize) -> std::ops::Range<usize> {
    match passes <= parts {
        true => part.min(passes)..(part + 1).min(passes),
        false => part * passes / parts..(part + 1) * passes / parts,
    }
}

/// The loss of the next token at every place of all sequences, each a mean over its own that counts `weight`.
fn language_loss(device: &Device, instances: &[&Instance], weight: f32) -> Result<TokenLoss> {
    let (mut rows, mut targets, mut weights) = (Vec::new(), Vec::new(), Vec::new());
    let mut first = 0;
    for (ids, _) in instances.iter().flat_map(|instance| &instance.sequences) {
        let predicted = ids.len().saturating_sub(1);
        rows.extend(first..first + predicted as u32);
        targets.extend_from_slice(&ids[ids.len() - predicted..]);
        weights.resize(rows.len(), weight / predicted.max(1) as f32);
        first += ids.len() as u32;
    }
    if rows.is_empty() {
        (rows, targets, weights) = (vec![0], vec![0], vec![0.0]);
    }
    let rounded = device.rounded(rows.len());
    rows.resize(rounded, Device::NOWHERE);
    targets.resize(rounded, 0);
    weights.resize(rounded, 0.0);
    TokenLoss::at(device, (&rows, &targets, &weights), 0.0)
}

/// A part of a step on the device.
struct Inputs {
    batch: Batch,
    loss: Box<dyn Loss>,
    orders: Option<Orders>,
    language: Option<TokenLoss>,
}

impl Inputs {
    fn task_losses(&self, model: &Model, pass: &mut Pass<'_>, last: Var) -> Result<Vec<Tensor>> {
        let layout = self.batch.output_layout();
        let Some(Orders { pairs, single }) = &self.orders else { return self.loss.of(model, pass, last, layout) };
        // The last vectors of both orders, added: what the head reads of a sequence of one token.
        let ends = pass.last_tokens(&last, layout)?;
        let means = pass.means(&ends, pairs)?;
        let sums = pass.scale(&means, 2.0)?;
        self.loss.of(model, pass, sums, single)
    }
}

/// How the vectors of pairs in both orders lie.
struct Orders {
    /// Two of each pair.
    pairs: Layout,
    /// Their sum.
    single: Layout,
}

impl Orders {
    fn new(device: &Device, pairs: usize, number: u32) -> Result<Self> {
        let layout = |length| Layout::new(device, &vec![length; pairs], number);
        Ok(Self { pairs: layout(2)?, single: layout(1)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::example::{Example, Input, Target};
    use henson_train::ScheduleKind;

    fn settings(task: &str, batch_size: usize, accumulation: usize) -> LearnerSettings {
        LearnerSettings {
            task: crate::Task::named(task).unwrap(),
            batch_size,
            accumulation,
            schedule: Schedule::of_task(ScheduleKind::Linear, 1.0, 0.0, 10),
            seed: 3,
            freeze: false,
            may_decline: false,
            temperature: 0.05,
            class_weights: Vec::new(),
            metric: None,
            auxiliary_lm: 0.0,
            both_orders: false,
            label_smoothing: 0.0,
            writing: None,
            resampling: None,
            poolings: vec![Pooling::Mean],
            host: Vec::new(),
        }
    }

    #[test]
    fn models_that_learned_nothing_are_reported() {
        let example = |class| Example {
            id: String::new(),
            place: String::new(),
            input: Input::One(String::new()),
            target: Target::Class(class),
        };
        let task = crate::Task::named("classify").unwrap();
        let labels = vec!["a".to_owned(), "b".to_owned()];
        let set = Set::new(task, labels, [0, 0, 0, 1].map(example).to_vec());
        let check = |classes: [u32; 4]| {
            let predictions = classes.map(|class| Prediction::Class { class, scores: Vec::new() });
            let score = score(&set, &predictions, None, 0).unwrap();
            degenerate(&set, &predictions, &score).unwrap_or_default()
        };
        assert!(check([0, 0, 0, 0]).contains("the same for every example"));
        assert!(check([1, 1, 1, 1]).contains("the same for every example"));
        assert!(check([0, 0, 1, 0]).contains("has an accuracy of 50.0%, below the 75.0%"));
        assert_eq!(check([0, 0, 1, 1]), "");
    }

    #[test]
    fn numbers_that_have_nothing_to_do_with_the_right_ones_are_reported() {
        let check = |right: [f64; 4], numbers: [f64; 4]| {
            let example = |number| Example {
                id: String::new(),
                place: String::new(),
                input: Input::One(String::new()),
                target: Target::Number(number),
            };
            let set = Set::new(crate::Task::named("regress").unwrap(), Vec::new(), right.map(example).to_vec());
            let predictions = numbers.map(Prediction::Number);
            let score = score(&set, &predictions, None, 0).unwrap();
            degenerate(&set, &predictions, &score).unwrap_or_default()
        };
        let right = [0.0, 1.0, 2.0, 3.0];
        assert!(check(right, [1.5; 4]).contains("the same for every example"));
        // Not the same to everything, and of no use.
        assert!(check(right, [1.0, 2.0, 2.0, 1.0]).contains("a correlation of 0.000"));
        assert!(check(right, [3.0, 1.5, 1.4, 0.0]).contains("a correlation of -0."));
        assert!(check([2.0; 4], right).contains("all numbers are the same"));
        assert_eq!(check(right, [10.0, 10.1, 10.1, 10.2]), "");
    }

    #[test]
    fn every_epoch_sees_every_instance_once_in_another_order() {
        let instance =
            |class| Instance { sequences: vec![(vec![1], vec![0])], labels: vec![Some(class)], ..Instance::default() };
        let settings = settings("classify", 4, 1);
        let mut learner = Learner::new((0..10).map(instance).collect(), None, settings).unwrap();
        let mut epoch = |e: u64| -> Vec<Option<u32>> {
            (0..3)
                .flat_map(|s| learner.batch(3 * e + s).unwrap().1.iter().map(|x| x.labels[0]).collect::<Vec<_>>())
                .collect()
        };
        let (first, second) = (epoch(0), epoch(1));
        assert_ne!(first, second);
        assert_eq!(first, epoch(0));
        for order in [first, second] {
            assert!((0..10).all(|class| order.contains(&Some(class))) && order.len() == 10);
        }
    }

    #[test]
    fn parts_are_alike_and_not_too_large() {
        let instance = |choices: usize| Instance {
            sequences: vec![(vec![1], vec![0]); choices],
            labels: vec![Some(0)],
            ..Instance::default()
        };
        let all: Vec<Instance> = [4, 3, 4, 5, 4, 4].into_iter().map(instance).collect();
        let sizes = |accumulation| -> Vec<(usize, usize)> {
            let parts = divided(all.iter().collect(), accumulation);
            parts.iter().map(|part| (part[0].sequences.len(), part.len())).collect()
        };
        assert_eq!(sizes(1), [(3, 1), (4, 4), (5, 1)]);
        assert_eq!(sizes(2), [(3, 1), (4, 3), (4, 1), (5, 1)]);
    }

    /// Pairs with negatives are never alone, in no part of any batch; and each is learned from once an epoch.
    #[test]
    fn no_pair_is_alone() {
        let pair = |i| Instance { sequences: vec![(vec![i], vec![0]); 2], ..Instance::default() };
        let epoch = |pairs: u32, batch_size, accumulation| -> Vec<Vec<Vec<u32>>> {
            let settings = settings("embed", batch_size, accumulation);
            let mut learner = Learner::new((0..pairs).map(pair).collect(), None, settings).unwrap();
            let steps = Learner::steps_per_epoch(&learner.train, batch_size);
            let numbers = |part: &Vec<&Instance>| part.iter().map(|pair| pair.sequences[0].0[0]).collect();
            let mut parts = |step| divided(learner.batch(step).unwrap().1, accumulation).iter().map(numbers).collect();
            (0..steps).map(&mut parts).collect()
        };
        let sizes = |pairs, batch_size, accumulation| -> Vec<Vec<usize>> {
            let sizes_of = |parts: &Vec<Vec<u32>>| parts.iter().map(Vec::len).collect();
            epoch(pairs, batch_size, accumulation).iter().map(sizes_of).collect()
        };
        assert_eq!(sizes(10, 5, 3), [[3, 2], [3, 2]]);
        assert_eq!(sizes(9, 4, 1), [[4], [5]]);
        assert_eq!(sizes(24, 10, 4), [vec![3, 2, 3, 2], vec![3, 2, 3, 2], vec![2, 2]]);
        for (pairs, batch_size, accumulation) in [(2, 2, 1), (3, 2, 1), (5, 2, 1), (17, 8, 4), (19, 8, 4), (40, 13, 6)]
        {
            let parts = epoch(pairs, batch_size, accumulation).concat();
            let mut all = parts.concat();
            all.sort_unstable();
            let right = parts.iter().all(|part| part.len() >= 2) && all.into_iter().eq(0..pairs);
            assert!(right, "{pairs} {batch_size} {accumulation}: {parts:?}");
        }
    }
}
