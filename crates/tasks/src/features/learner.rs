//! Tagging vectors of words as a task for the loop: shuffled batches of sentences, and the official score on dev data.

use std::collections::BTreeMap;

use henson_models::recurrent::WordTagger;
use henson_tensor::{Bits, DType, Device, Layout, Parameters, Pass, Tape, Tensor};
use henson_train::{Engine, Evaluation, Result, Schedule, Task, TrainError, Underway, metrics};
use serde_json::Value;

use super::layers::Vectors;
use super::train::TaggerPlan;
use crate::batches::ShuffledBatches;
use crate::example::{Set, Target};
use crate::finetune::{Found, chosen_by, degenerate};
use crate::predictions::Prediction;
use crate::score::score;

/// Sentences that are evaluated at a time.
const TOGETHER: usize = 64;

/// The training of a tagger as a task.
pub(super) struct TaggerLearner<'a> {
    train: Vec<Vectors>,
    /// The tags of the words that have vectors.
    tags: Vec<Vec<u32>>,
    dev: Option<(&'a Set, Vec<Vectors>)>,
    batches: ShuffledBatches,
    schedule: Schedule,
    /// The last evaluation.
    pub(super) found: Option<Found>,
}

impl<'a> TaggerLearner<'a> {
    pub(super) fn new(plan: &'a TaggerPlan, train: Vec<Vectors>, dev: Option<Vec<Vectors>>) -> Self {
        let tags = plan.train.examples.iter().zip(&train).map(|(example, own)| tags_of(&example.target, own)).collect();
        let batches = ShuffledBatches::new(plan.recipe.seed, train.len(), plan.recipe.batch_size);
        Self { train, tags, dev: plan.dev.as_ref().zip(dev), batches, schedule: plan.schedule(), found: None }
    }

    /// The sentences of a step, without those that have no word to be tagged.
    fn batch(&mut self, step: u64) -> Vec<usize> {
        self.batches.of_step(step).iter().copied().filter(|i| !self.tags[*i].is_empty()).collect()
    }

    /// What a tagger says about the dev sentences, and how right that is.
    pub(super) fn look(&mut self, engine: &Engine<WordTagger>, step: u64) -> Result<Option<&Found>> {
        let Some((set, vectors)) = &self.dev else { return Ok(None) };
        let outside = set.labels.iter().position(|label| label == "O").unwrap_or(0) as u32;
        let mut predictions = Vec::with_capacity(set.examples.len());
        for some in vectors.chunks(TOGETHER) {
            let told = tell(&engine.model, &engine.parameters, some)?;
            for ((tags, _), vectors) in told.iter().zip(some) {
                let Target::Tags(right) = &set.examples[predictions.len()].target else { continue };
                let mut of_words = vec![outside; right.len()];
                vectors.words.iter().zip(tags).for_each(|(word, tag)| of_words[*word] = *tag);
                predictions.push(Prediction::Tags(of_words));
            }
        }
        let score = score(set, &predictions, None, usize::MAX).map_err(|error| TrainError::Task(error.into()))?;
        let degenerate = degenerate(set, &predictions, &score);
        self.found = Some(Found { step, score, degenerate });
        Ok(self.found.as_ref())
    }
}

impl Task<WordTagger> for TaggerLearner<'_> {
    fn step(&mut self, engine: &mut Engine<WordTagger>, step: u64) -> Result<Underway> {
        let batch = self.batch(step);
        let tokens = batch.iter().map(|i| self.tags[*i].len()).sum();
        let parts = if batch.is_empty() {
            engine.learn_nothing(step)?;
            Vec::new()
        } else {
            let scale = Bits::from(1.0 / tokens as f32);
            let fill = |device: &Device, _: &WordTagger| {
                let rows: Vec<f32> = batch.iter().flat_map(|i| &self.train[*i].rows).copied().collect();
                let tags: Vec<u32> = batch.iter().flat_map(|i| &self.tags[*i]).copied().collect();
                let lengths: Vec<usize> = batch.iter().map(|i| self.tags[*i].len()).collect();
                Inputs::new(device, &rows, &tags, &lengths)
            };
            vec![engine.learn_from(step, scale, fill, loss)?]
        };
        Ok(Underway { parts, losses: &[], weights: henson_train::EQUAL, tokens })
    }

    fn evaluate(&mut self, engine: &mut Engine<WordTagger>, step: u64) -> Result<Option<Evaluation>> {
        self.look(engine, step)?;
        let (Some((set, _)), Some(found)) = (&self.dev, &self.found) else { return Ok(None) };
        let (_, value) = chosen_by(set, &found.score, None);
        let metrics: BTreeMap<String, f64> =
            found.score.metrics.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
        Ok(Some(Evaluation { metrics, score: value, loss: None }))
    }

    fn samples(&mut self, _engine: &mut Engine<WordTagger>) -> Result<Vec<metrics::Sample>> {
        Ok(Vec::new())
    }

    fn rate(&self, step: u64) -> (f64, u32) {
        (self.schedule.rate(step), 0)
    }

    fn place(&self) -> Result<Value> {
        // The step says it all; null would be a run that has not begun.
        Ok(Value::Bool(true))
    }
}

/// A batch on the device: T words of its sentences.
struct Inputs {
    /// T×W.
    vectors: Tensor,
    /// T.
    tags: Tensor,
    /// T: 1, and 0 for what fills the batch up on a GPU, if anything.
    weights: Tensor,
    layout: Layout,
}

impl Inputs {
    fn new(device: &Device, rows: &[f32], tags: &[u32], lengths: &[usize]) -> Result<Self> {
        let layout = Layout::new(device, lengths, 0)?.for_steps(device)?;
        let (words, width, t) = (tags.len(), rows.len() / tags.len().max(1), layout.tokens());
        let filled = |numbers: &[f32], len: usize| {
            let mut numbers = numbers.to_vec();
            numbers.resize(len, 0.0);
            numbers
        };
        let mut tags = tags.to_vec();
        tags.resize(t, 0);
        Ok(Self {
            vectors: Tensor::from_slice(device, [t, width], &filled(rows, t * width))?,
            tags: Tensor::from_slice(device, [t], &tags)?,
            weights: Tensor::from_slice(device, [t], &filled(&vec![1.0; words], t))?,
            layout,
        })
    }
}

/// The loss of a batch: each word for itself, or all of a sentence by the field.
fn loss(scale: &Bits, tagger: &WordTagger, pass: &mut Pass<'_>, inputs: &Inputs) -> Result<Vec<Tensor>> {
    let Inputs { vectors, tags, weights, layout } = inputs;
    let logits = tagger.logits(pass, vectors, layout)?;
    let loss = match tagger.crf() {
        Some(crf) => pass.crf_loss(logits, crf, layout, tags, scale.get())?,
        None => pass.cross_entropy(logits, tagger.settings().labels, tags, Some(weights), scale.get())?.0,
    };
    Ok(vec![loss])
}

/// Tags, and how likely each label is, of the words that have vectors.
pub(super) fn tell(
    tagger: &WordTagger,
    parameters: &Parameters,
    some: &[Vectors],
) -> Result<Vec<(Vec<u32>, Vec<f32>)>> {
    let (k, device) = (tagger.settings().labels, parameters.device());
    let lengths: Vec<usize> = some.iter().map(|vectors| vectors.words.len()).filter(|length| *length > 0).collect();
    if lengths.is_empty() {
        return Ok(some.iter().map(|_| Default::default()).collect());
    }
    let rows: Vec<f32> = some.iter().flat_map(|vectors| &vectors.rows).copied().collect();
    let words = lengths.iter().sum();
    let vectors = Tensor::from_slice(device, [words, rows.len() / words], &rows)?;
    let layout = Layout::new(device, &lengths, 0)?;
    let mut tape = Tape::new();
    let mut pass = Pass::inference(&mut tape, parameters);
    let logits = tagger.logits(&mut pass, &vectors, &layout)?;
    let (tags, shares) = match tagger.crf() {
        Some(crf) => {
            let shares = pass.crf_probabilities(&logits, crf, &layout)?.to_vec::<f32>()?;
            (pass.crf_best(&logits, crf, &layout, tagger.legal_steps())?, shares)
        }
        None => {
            let shares = pass.softmax(&logits, k)?.to_vec::<f32>()?;
            let better = |row: &[f32]| (0..k).reduce(|best, i| if row[i] > row[best] { i } else { best }).unwrap_or(0);
            (shares.chunks_exact(k).map(|row| better(row) as u32).collect(), shares)
        }
    };
    let mut start = 0;
    let of_sentence = some.iter().map(|vectors| {
        let own = start..start + vectors.words.len();
        start = own.end;
        (tags[own.clone()].to_vec(), shares[own.start * k..own.end * k].to_vec())
    });
    Ok(of_sentence.collect())
}

/// What a tagger computes in, whatever its encoder does.
pub(super) const DTYPE: DType = DType::F32;

/// The tags of the words that have vectors.
fn tags_of(target: &Target, vectors: &Vectors) -> Vec<u32> {
    let Target::Tags(tags) = target else { return vec![0; vectors.words.len()] };
    vectors.words.iter().map(|word| tags.get(*word).copied().unwrap_or(0)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use henson_models::recurrent::WordTaggerSettings;
    use henson_tensor::Builder;
    use henson_train::{Clip, OptimizerSettings};
    use serde::Deserialize;

    /// What tools/golden/feature_tagger.py wrote.
    #[derive(Deserialize)]
    struct Golden {
        layers: usize,
        width: usize,
        hidden: usize,
        labels: usize,
        lengths: Vec<usize>,
        vectors: Vec<f32>,
        tags: Vec<u32>,
        parameters: Vec<f32>,
        logits: Vec<f32>,
        gradients: Vec<f32>,
        losses: Vec<f64>,
        parameters_after: Vec<f32>,
    }

    /// The order of the script's flat lists.
    fn names() -> Vec<String> {
        let of_lstm = (0..2).flat_map(|layer| {
            let sides = ["", "_reverse"].into_iter();
            sides.flat_map(move |side| {
                ["weight_ih", "weight_hh", "bias_ih", "bias_hh"].map(|what| format!("lstm.{what}_l{layer}{side}"))
            })
        });
        let around = |names: [&str; 2]| names.map(str::to_owned);
        let first = around(["mix.weights", "mix.gamma"]).into_iter();
        first.chain(of_lstm).chain(around(["classifier.weight", "classifier.bias"])).collect()
    }

    fn close(name: &str, got: &[f32], expected: &[f32], tolerance: f32) {
        assert_eq!(got.len(), expected.len(), "{name}");
        for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
            assert!((got - expected).abs() < tolerance, "{name} {i}: {got} instead of {expected}");
        }
    }

    /// The numbers of all parameters in the order of the names.
    fn flat(parameters: &Parameters, read: impl Fn(usize) -> Vec<f32>) -> Vec<f32> {
        let place = |name: &String| parameters.entries().iter().position(|entry| entry.name == *name).unwrap();
        names().iter().flat_map(|name| read(place(name))).collect()
    }

    #[test]
    fn logits_gradients_and_updates_of_pytorch() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests-data/feature-tagger/golden.json");
        let golden: Golden = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let settings = WordTaggerSettings {
            mixed: golden.layers,
            width: golden.width,
            lstm_layers: 2,
            hidden: golden.hidden,
            labels: golden.labels,
            crf: false,
            dropout: 0.0,
        };
        let (mut builder, device) = (Builder::new(), Device::cpu(None, Some(2)).unwrap());
        let tagger = WordTagger::build(&mut builder, settings);
        let mut parameters = builder.finish(&device, DTYPE).unwrap();
        let mut rest = &golden.parameters[..];
        for name in names() {
            let place = parameters.entries().iter().position(|entry| entry.name == name).unwrap();
            let (own, others) = rest.split_at(parameters.entries()[place].shape.elements());
            parameters.write(place, own).unwrap();
            rest = others;
        }
        assert!(rest.is_empty() && parameters.entries().len() == names().len());
        parameters.refresh().unwrap();
        let optimizer = OptimizerSettings { epsilon: 1e-8, clip: Clip::GlobalNorm(0.1), ..Default::default() };
        let mut engine = Engine::new(tagger, parameters, optimizer, 0).unwrap();
        let inputs = || Inputs::new(&device, &golden.vectors, &golden.tags, &golden.lengths);
        let Inputs { vectors, layout, .. } = inputs().unwrap();
        let (mut tape, words) = (Tape::new(), golden.tags.len());
        let mut pass = Pass::inference(&mut tape, &engine.parameters);
        let logits = engine.model.logits(&mut pass, &vectors, &layout).unwrap();
        close("logit", &logits.tensor().to_vec::<f32>().unwrap(), &golden.logits, 1e-6);
        drop(pass);
        for (step, expected) in golden.losses.iter().enumerate() {
            engine.gradients.zero();
            let scale = Bits::from(1.0 / words as f32);
            let reading = engine.learn_from(step as u64, scale, |_, _| inputs(), loss).unwrap();
            let loss: f64 = reading.wait().unwrap().iter().sum();
            assert!((loss - expected).abs() < 1e-6, "step {step}: {loss} instead of {expected}");
            let Engine { parameters, gradients, updater, .. } = &mut engine;
            if step == 0 {
                let got = flat(parameters, |place| gradients.read(parameters, place).unwrap());
                close("gradient", &got, &golden.gradients, 1e-6);
            }
            let norm: f64 = updater.step(parameters, gradients, 1e-2).unwrap().wait().unwrap().iter().sum();
            assert!(norm > 0.1, "nothing is clipped");
        }
        let parameters = &engine.parameters;
        close("parameter", &flat(parameters, |place| parameters.read(place).unwrap()), &golden.parameters_after, 1e-5);
    }
}
