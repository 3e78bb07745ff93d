//! Classification of whole sequences as a task for the loop: shuffled batches of labelled sequences, accuracy on others.

use std::collections::BTreeMap;

use henson_kernels::philox::Stream;
use henson_models::{Batch, BertConfig, Capture, Sequence};
use henson_tensor::{Device, Tensor};
use serde_json::Value;

use crate::error::{Result, TrainError};
use crate::metrics;
use crate::objective::{self, SequenceLabels};
use crate::schedule::Schedule;
use crate::trainer::{Engine, Evaluation, Losses, Task, Underway};

/// Numbers the stream of shuffles among all uses of the seed.
const SHUFFLE: u32 = 0x5bff;

/// Sequences of a batch in evaluation.
const EVALUATION_SEQUENCES: usize = 64;

/// A sequence with its class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Labelled {
    /// Piece ids, with the special ones.
    pub ids: Vec<u32>,
    /// 0 for sentence A, 1 for B.
    pub segments: Vec<u32>,
    /// The class.
    pub label: u32,
}

/// Classification as a task.
pub struct Classification {
    train: Vec<Labelled>,
    held_out: Vec<Labelled>,
    batch_size: usize,
    schedule: Schedule,
    seed: u64,
}

impl Classification {
    /// A task on these examples; the order of each epoch is drawn by the seed.
    pub fn new(
        train: Vec<Labelled>,
        held_out: Vec<Labelled>,
        batch_size: usize,
        schedule: Schedule,
        seed: u64,
    ) -> Result<Self> {
        if train.is_empty() {
            return Err(TrainError::setting("train", "empty", "at least one labelled example"));
        }
        if batch_size == 0 {
            return Err(TrainError::setting("batch_size", 0, "at least 1"));
        }
        Ok(Self { train, held_out, batch_size, schedule, seed })
    }

    /// The examples of a step. An epoch's last batch may be smaller; none spans two epochs.
    fn batch(&self, step: u64) -> Vec<&Labelled> {
        let steps = self.train.len().div_ceil(self.batch_size) as u64;
        let mut order: Vec<usize> = (0..self.train.len()).collect();
        let mut draws = Stream::new(self.seed, SHUFFLE, step / steps);
        for i in (1..order.len()).rev() {
            order.swap(i, draws.below(i as u32 + 1) as usize);
        }
        let start = (step % steps) as usize * self.batch_size;
        order[start..order.len().min(start + self.batch_size)].iter().map(|i| &self.train[*i]).collect()
    }
}

impl Task for Classification {
    fn step(&mut self, engine: &mut Engine, step: u64) -> Result<Underway> {
        let examples = self.batch(step);
        let scale = 1.0 / examples.len() as f32;
        let part = engine.learn(
            step,
            &[u64::from(scale.to_bits())],
            |device, config| inputs(device, config, &examples),
            |model, pass, (batch, labels)| {
                let labels = SequenceLabels::Classes(labels.clone(), None);
                Ok(vec![objective::sequence(model, pass, batch, &labels, scale)?])
            },
        )?;
        let tokens = examples.iter().map(|example| example.ids.len()).sum();
        Ok(Underway { parts: vec![part], losses: Losses::One, tokens })
    }

    fn evaluate(&mut self, engine: &mut Engine, _step: u64) -> Result<Option<Evaluation>> {
        if self.held_out.is_empty() {
            return Ok(None);
        }
        let examples: Vec<&Labelled> = self.held_out.iter().collect();
        let mut readings = Vec::new();
        for examples in examples.chunks(EVALUATION_SEQUENCES) {
            readings.push(engine.look(
                &[],
                |device, config| inputs(device, config, examples),
                |model, pass, (batch, labels)| {
                    let last = model.encode(pass, batch, Capture::default())?.last;
                    let logits = model.sequence_logits(pass, &last, &batch.layout)?;
                    let classes = logits.tensor().columns();
                    let right = pass.count_correct(&logits, classes, labels, None)?;
                    Ok(vec![pass.cross_entropy(logits, classes, labels, None, 1.0)?.0, right])
                },
            )?);
        }
        let (mut loss, mut right) = (0.0, 0.0);
        for reading in readings {
            let numbers = reading.wait()?;
            loss += numbers[0];
            right += numbers[1];
        }
        let n = self.held_out.len() as f64;
        let accuracy = right / n;
        let metrics = BTreeMap::from([("loss".to_owned(), loss / n), ("accuracy".to_owned(), accuracy)]);
        Ok(Some(Evaluation { metrics, score: -accuracy }))
    }

    fn samples(&mut self, _engine: &mut Engine) -> Result<Vec<metrics::Sample>> {
        Ok(Vec::new())
    }

    fn rate(&self, step: u64) -> (f64, u32) {
        (self.schedule.rate(step), 0)
    }

    fn place(&self) -> Result<Value> {
        // The step says it all.
        Ok(Value::Null)
    }
}

fn inputs(device: &Device, config: &BertConfig, examples: &[&Labelled]) -> Result<(Batch, Tensor)> {
    let sequences: Vec<Sequence<'_>> =
        examples.iter().map(|e| Sequence { ids: &e.ids, segments: &e.segments }).collect();
    let batch = Batch::new(device, config, &sequences, 0)?;
    let labels: Vec<u32> = examples.iter().map(|e| e.label).collect();
    Ok((batch, Tensor::from_slice(device, [labels.len()], &labels)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ScheduleKind;

    #[test]
    fn every_epoch_sees_every_example_once_in_another_order() {
        let example = |label| Labelled { ids: vec![1], segments: vec![0], label };
        let schedule = Schedule { kind: ScheduleKind::Linear, peak: 1.0, warmup_steps: 0, decay_steps: 0, steps: 10 };
        let task = Classification::new((0..10).map(example).collect(), Vec::new(), 4, schedule, 3).unwrap();
        let epoch = |e: u64| -> Vec<u32> {
            (0..3).flat_map(|s| task.batch(3 * e + s).iter().map(|x| x.label).collect::<Vec<_>>()).collect()
        };
        let (first, second) = (epoch(0), epoch(1));
        assert_ne!(first, second);
        assert_eq!(first, epoch(0));
        for mut order in [first, second] {
            order.sort_unstable();
            assert_eq!(order, (0..10).collect::<Vec<_>>());
        }
    }
}
