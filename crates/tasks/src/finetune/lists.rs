//! Learning from the logits of a query's documents by losses that are computed on the host ([`crate::ranking`]).

use henson_models::{Batch, Capture, Sequence};
use henson_tensor::{Pass, Reading, Tensor};
use henson_train::{Engine, Result};

use super::learner::in_passes;
use crate::prepare::Instance;
use crate::ranking::RankLoss;

/// What is learned from lists of documents.
#[derive(Clone, Copy, Debug)]
pub struct ListObjective {
    pub(crate) loss: RankLoss,
}

impl ListObjective {
    /// Adds the gradients of a step's parts; gives the loss of each. All that they count is counted together.
    pub(crate) fn learn(
        self,
        engine: &mut Engine,
        step: u64,
        passes: &[(Vec<&Instance>, u32)],
        parts: usize,
    ) -> Result<Vec<Reading>> {
        let counts = passes.iter().flat_map(|(pass, _)| pass).map(|instance| self.loss.count(&instance.numbers));
        let scale = 1.0 / counts.sum::<usize>().max(1) as f64;
        in_passes(engine, step, passes.len(), parts, |engine, i| {
            let (part, number) = &passes[i];
            let sequences: Vec<Sequence<'_>> = part
                .iter()
                .flat_map(|instance| &instance.sequences)
                .map(|(ids, segments)| Sequence { ids, segments })
                .collect();
            let loss = self.learn_part(engine, step, part, &sequences, *number, scale)?;
            let device = engine.parameters.device().clone();
            Ok(device.read_later(&[&Tensor::from_slice(&device, [1], &[loss as f32])?])?)
        })
    }

    fn learn_part(
        self,
        engine: &mut Engine,
        step: u64,
        part: &[&Instance],
        sequences: &[Sequence<'_>],
        number: u32,
        scale: f64,
    ) -> Result<f64> {
        let training = engine.training(step);
        let Engine { model, parameters, gradients, tape, .. } = engine;
        let device = parameters.device().clone();
        let batch = Batch::new(&device, model.config(), sequences, number)?;
        let mut pass = Pass::training(tape, parameters, training);
        let last = model.encode(&mut pass, &batch, Capture::default())?.last;
        let logits = model.logits_of(&mut pass, last, &batch.layout, None)?;
        let values = logits.tensor().to_f32()?;
        let (mut loss, mut start, mut gradient) = (0.0, 0, vec![0.0; values.len()]);
        for instance in part {
            let range = start..start + instance.numbers.len();
            start = range.end;
            loss += self.loss.of(&values[range.clone()], &instance.numbers, scale, &mut gradient[range]);
        }
        pass.seed_gradient(&logits, &gradient)?;
        pass.backward(gradients)?;
        Ok(loss * scale)
    }
}
