//! A probe as a task for the loop: shuffled batches of texts, and the micro-averaged F1 on dev data.

use std::collections::BTreeMap;

use henson_models::probe::{EdgeInputs, EdgeProbe};
use henson_tensor::{Bits, Device, Pass, Tape, Tensor};
use henson_train::{Engine, Evaluation, Result, Schedule, Task, TrainError, Underway, metrics};
use serde_json::Value;

use super::encoded::Encoded;
use crate::batches::ShuffledBatches;
use crate::metrics::Counts;

/// Texts that are scored at a time.
const TOGETHER: usize = 64;

/// The labels of all targets of all texts of a set, by their numbers.
pub(super) type Labels = Vec<Vec<Vec<u32>>>;

/// A set as a probe sees it.
#[derive(Clone, Copy)]
pub(super) struct Seen<'a> {
    pub(super) encoded: &'a Encoded<'a>,
    pub(super) labels: &'a Labels,
}

/// The training of a probe.
pub(super) struct ProbeLearner<'a> {
    pub(super) train: Seen<'a>,
    pub(super) dev: Seen<'a>,
    /// K.
    pub(super) label_count: usize,
    /// How many layers it reads.
    pub(super) layers: usize,
    pub(super) batches: ShuffledBatches,
    pub(super) schedule: Schedule,
    /// What was found last on dev data, for each label: after so many updates.
    pub(super) found: Option<(u64, Vec<Counts>)>,
}

impl ProbeLearner<'_> {
    /// What a probe predicts for the dev targets, and how right that is, for each label.
    pub(super) fn look(&mut self, engine: &Engine<EdgeProbe>, step: u64) -> Result<&[Counts]> {
        let Seen { encoded, labels } = self.dev;
        let mut counts = vec![Counts::default(); self.label_count];
        // Targets without tokens are expected all the same.
        for label in labels.iter().flatten().flatten() {
            counts[*label as usize].expected += 1;
        }
        let all: Vec<usize> = (0..encoded.len()).filter(|text| !encoded.targets(*text).is_empty()).collect();
        for some in all.chunks(TOGETHER) {
            let batch = Batch::new(engine.parameters.device(), self.dev, some, self.layers, self.label_count)?;
            let mut tape = Tape::new();
            let mut pass = Pass::inference(&mut tape, &engine.parameters);
            let logits = engine.model.logits(&mut pass, &batch.inputs)?.tensor().to_vec::<f32>()?;
            let right = batch.targets.to_vec::<f32>()?;
            for (row, right) in logits.chunks_exact(self.label_count).zip(right.chunks_exact(self.label_count)) {
                for ((logit, right), counts) in row.iter().zip(right).zip(&mut counts) {
                    // A share of one half or more.
                    let predicted = *logit >= 0.0;
                    counts.predicted += u64::from(predicted);
                    counts.right += u64::from(predicted && *right > 0.5);
                }
            }
        }
        Ok(&self.found.insert((step, counts)).1)
    }
}

impl Task<EdgeProbe> for ProbeLearner<'_> {
    fn step(&mut self, engine: &mut Engine<EdgeProbe>, step: u64) -> Result<Underway> {
        let Self { train, batches, layers, label_count, .. } = self;
        let has_targets = |text: &usize| !train.encoded.targets(*text).is_empty();
        let texts: Vec<usize> = batches.of_step(step).iter().copied().filter(has_targets).collect();
        let tokens = texts.iter().map(|text| train.encoded.tokens(*text)).sum();
        let parts = if texts.is_empty() {
            engine.learn_nothing(step)?;
            Vec::new()
        } else {
            let targets: usize = texts.iter().map(|text| train.encoded.targets(*text).len()).sum();
            let scale = Bits::from(1.0 / (targets * *label_count) as f32);
            let fill = |device: &Device, _: &EdgeProbe| {
                // The targets of two batches are hardly ever as many.
                device.do_not_record();
                Batch::new(device, *train, &texts, *layers, *label_count)
            };
            vec![engine.learn_from(step, scale, fill, loss)?]
        };
        Ok(Underway { parts, losses: &[], weights: henson_train::EQUAL, tokens })
    }

    fn evaluate(&mut self, engine: &mut Engine<EdgeProbe>, step: u64) -> Result<Option<Evaluation>> {
        let all = total(self.look(engine, step)?);
        let named = [("f1", all.f1()), ("precision", all.precision()), ("recall", all.recall())];
        let metrics: BTreeMap<String, f64> = named.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        Ok(Some(Evaluation { metrics, score: all.f1(), loss: None }))
    }

    fn samples(&mut self, _engine: &mut Engine<EdgeProbe>) -> Result<Vec<metrics::Sample>> {
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

/// Of all labels together.
pub(super) fn total(counts: &[Counts]) -> Counts {
    counts.iter().fold(Counts::default(), |mut all, counts| {
        all += *counts;
        all
    })
}

/// A batch on the device.
struct Batch {
    inputs: EdgeInputs,
    /// N·K: 1 where a target has a label.
    targets: Tensor,
}

impl Batch {
    fn new(device: &Device, seen: Seen<'_>, texts: &[usize], layers: usize, label_count: usize) -> Result<Self> {
        let Seen { encoded, labels } = seen;
        let vectors = encoded.vectors(texts, layers).map_err(|error| TrainError::Task(error.into()))?;
        let (mut spans, mut targets, mut counts, mut start) = (Vec::<Vec<_>>::new(), Vec::new(), Vec::new(), 0);
        for &text in texts {
            let readable = encoded.targets(text);
            for target in readable {
                spans.resize(target.spans.len(), Vec::new());
                for (span, all) in target.spans.iter().zip(&mut spans) {
                    all.push(start + span.start..start + span.end);
                }
                let first = targets.len();
                targets.resize(first + label_count, 0.0_f32);
                labels[text][target.number].iter().for_each(|label| targets[first + *label as usize] = 1.0);
            }
            counts.push(readable.len());
            start += encoded.tokens(text);
        }
        let targets = Tensor::from_slice(device, [targets.len()], &targets)?;
        Ok(Self { inputs: EdgeInputs::new(device, &vectors, start, &spans, &counts)?, targets })
    }
}

/// The mean binary cross-entropy of all logits.
fn loss(scale: &Bits, probe: &EdgeProbe, pass: &mut Pass<'_>, batch: &Batch) -> Result<Vec<Tensor>> {
    let logits = probe.logits(pass, &batch.inputs)?;
    Ok(vec![pass.binary_cross_entropy(logits, &batch.targets, None, scale.get())?])
}

#[cfg(test)]
mod tests {
    use super::*;
    use henson_models::probe::EdgeProbeSettings;
    use henson_tensor::{Builder, DType, Parameters};
    use henson_train::{Clip, OptimizerSettings};
    use serde::Deserialize;

    /// Two spans.
    type Pair = [(usize, usize); 2];

    /// What tools/golden/edge_probe.py wrote.
    #[derive(Deserialize)]
    struct Golden {
        layers: usize,
        width: usize,
        projection: usize,
        hidden: usize,
        labels: usize,
        texts: Vec<(usize, Vec<Pair>)>,
        cases: Vec<Case>,
    }

    #[derive(Deserialize)]
    struct Case {
        spans: usize,
        vectors: Vec<f32>,
        targets: Vec<f32>,
        parameters: Vec<f32>,
        logits: Vec<f32>,
        gradients: Vec<f32>,
        losses: Vec<f64>,
        parameters_after: Vec<f32>,
    }

    /// The order of the script's flat lists.
    fn names(spans: usize) -> Vec<String> {
        let pools = (1..=spans).flat_map(|i| {
            ["projection{}.weight", "projection{}.bias", "attention{}.weight"]
                .map(|name| name.replace("{}", &i.to_string()))
        });
        let last = ["hidden", "norm", "output"].into_iter();
        let last = last.flat_map(|name| ["weight", "bias"].map(|part| format!("{name}.{part}")));
        ["mix.weights", "mix.gamma"].map(str::to_owned).into_iter().chain(pools).chain(last).collect()
    }

    fn close(name: &str, got: &[f32], expected: &[f32], tolerance: f32) {
        assert_eq!(got.len(), expected.len(), "{name}");
        for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
            assert!((got - expected).abs() < tolerance, "{name} {i}: {got} instead of {expected}");
        }
    }

    fn flat(parameters: &Parameters, names: &[String], read: impl Fn(usize) -> Vec<f32>) -> Vec<f32> {
        let place = |name: &String| parameters.entries().iter().position(|entry| entry.name == *name).unwrap();
        names.iter().flat_map(|name| read(place(name))).collect()
    }

    #[test]
    fn logits_gradients_and_updates_of_pytorch() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests-data/edge-probe/golden.json");
        let golden: Golden = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        assert_eq!(golden.cases.len(), 2);
        golden.cases.iter().for_each(|case| check(&golden, case));
    }

    fn check(golden: &Golden, case: &Case) {
        let settings = EdgeProbeSettings {
            layers: golden.layers,
            width: golden.width,
            projection: golden.projection,
            hidden: golden.hidden,
            labels: golden.labels,
            pairs: case.spans == 2,
            dropout: 0.0,
        };
        let (mut builder, device) = (Builder::new(), Device::cpu(None, Some(2)).unwrap());
        let probe = EdgeProbe::build(&mut builder, settings);
        let mut parameters = builder.finish(&device, DType::F32).unwrap();
        let (names, mut rest) = (names(case.spans), &case.parameters[..]);
        for name in &names {
            let place = parameters.entries().iter().position(|entry| entry.name == *name).unwrap();
            let (own, others) = rest.split_at(parameters.entries()[place].shape.elements());
            parameters.write(place, own).unwrap();
            rest = others;
        }
        assert!(rest.is_empty() && parameters.entries().len() == names.len());
        parameters.refresh().unwrap();
        let (mut spans, mut counts, mut start) = (vec![Vec::new(); case.spans], Vec::new(), 0);
        for (tokens, targets) in &golden.texts {
            for target in targets {
                target.iter().zip(&mut spans).for_each(|((from, to), all)| all.push(start + from..start + to));
            }
            counts.push(targets.len());
            start += tokens;
        }
        let batch = || {
            let inputs = EdgeInputs::new(&device, &case.vectors, start, &spans, &counts)?;
            Ok(Batch { inputs, targets: Tensor::from_slice(&device, [case.targets.len()], &case.targets)? })
        };
        let optimizer =
            OptimizerSettings { epsilon: 1e-8, weight_decay: 0.0, clip: Clip::GlobalNorm(0.1), ..Default::default() };
        let mut engine = Engine::new(probe, parameters, optimizer, 0).unwrap();
        let mut tape = Tape::new();
        let mut pass = Pass::inference(&mut tape, &engine.parameters);
        let logits = engine.model.logits(&mut pass, &batch().unwrap().inputs).unwrap();
        close("logit", &logits.tensor().to_vec::<f32>().unwrap(), &case.logits, 2e-6);
        drop(pass);
        for (step, expected) in case.losses.iter().enumerate() {
            engine.gradients.zero();
            let scale = Bits::from(1.0 / case.targets.len() as f32);
            let reading = engine.learn_from(step as u64, scale, |_, _| batch(), loss).unwrap();
            let loss: f64 = reading.wait().unwrap().iter().sum();
            assert!((loss - expected).abs() < 1e-6, "step {step}: {loss} instead of {expected}");
            let Engine { parameters, gradients, updater, .. } = &mut engine;
            if step == 0 {
                let got = flat(parameters, &names, |place| gradients.read(parameters, place).unwrap());
                close("gradient", &got, &case.gradients, 1e-6);
            }
            let norm: f64 = updater.step(parameters, gradients, 1e-2).unwrap().wait().unwrap().iter().sum();
            assert!(norm > 0.1, "nothing is clipped");
        }
        let after = flat(&engine.parameters, &names, |place| engine.parameters.read(place).unwrap());
        close("parameter", &after, &case.parameters_after, 1e-5);
    }
}
