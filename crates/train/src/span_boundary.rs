//! SpanBERT's objective (Joshi et al. 2020): masked LM, and the tokens of each masked span from its boundaries. Their losses are
//! means over all masked tokens of a step, and over all targets of boundaries and one more, as in SpanBERT's code.
//!
//! Legend: P targets of boundaries.

use henson_data::{Boundaries, Part};
use henson_models::{Batch, Capture, Model, ModelConfig};
use henson_tensor::{Device, Pass, Tensor};

use crate::error::Result;
use crate::losses::LossNames;
use crate::objective::{Masked, Objective};
use crate::pretraining::Inputs;

/// What the boundaries of a batch's spans shall predict.
#[derive(Clone, Debug)]
pub struct BoundaryTargets {
    /// 2·P rows of the flat batch: before and behind the span of each target.
    pub ends: Tensor,
    /// P places within spans.
    pub places: Tensor,
    /// P token ids.
    pub targets: Tensor,
    /// P factors on their losses, where they differ.
    pub weights: Option<Tensor>,
}

/// Masked LM, and the boundaries of spans; each is its scale times the sum over its targets.
pub fn span_boundary(
    model: &Model,
    pass: &mut Pass<'_>,
    batch: &Batch,
    masked: &Masked,
    boundary: &BoundaryTargets,
    [of_masked, of_boundary]: [f32; 2],
) -> henson_tensor::Result<[Tensor; 2]> {
    let vocabulary = model.config().sizes().vocab_size;
    let last = model.encode(pass, batch, Capture::default())?.last;
    let logits = model.boundary_logits(pass, &last, &batch.layout, &boundary.ends, &boundary.places)?;
    let weights = boundary.weights.as_ref();
    let (boundary, _) = pass.cross_entropy(logits, vocabulary, &boundary.targets, weights, of_boundary)?;
    let logits = model.logits_of(pass, last, &batch.layout, Some(&masked.rows))?;
    let weights = masked.weights.as_ref();
    let (masked, _) = pass.cross_entropy(logits, vocabulary, &masked.targets, weights, of_masked)?;
    Ok([masked, boundary])
}

/// A part of a batch with what its boundaries predict, and what each masked token and each of those counts.
pub(crate) struct PartWithBoundaries<'a> {
    part: &'a Part,
    boundaries: Boundaries,
    scales: [f32; 2],
}

impl<'a> PartWithBoundaries<'a> {
    /// All parts of a step; `masked` is what a masked token counts.
    pub(crate) fn of_step(parts: &'a [Part], masked: f32, boundaries: impl Fn(&Part) -> Boundaries) -> Vec<Self> {
        let found: Vec<Boundaries> = parts.iter().map(boundaries).collect();
        let targets: usize = found.iter().map(|boundaries| boundaries.targets.len()).sum();
        let scales = [masked, 1.0 / (targets + 1) as f32];
        parts.iter().zip(found).map(|(part, boundaries)| Self { part, boundaries, scales }).collect()
    }
}

/// The objective. What targets count is in the inputs: it differs from step to step.
#[derive(Clone, Copy, Hash)]
pub(crate) struct MaskedAndBoundary;

/// A part of a step on the device.
pub(crate) struct BoundaryInputs {
    masked: Inputs,
    boundary: BoundaryTargets,
}

impl Objective for MaskedAndBoundary {
    type Part<'p> = &'p PartWithBoundaries<'p>;
    type Inputs = BoundaryInputs;

    fn names(&self) -> LossNames {
        &["mlm_loss", "sbo_loss"]
    }

    fn inputs(&self, device: &Device, config: &ModelConfig, part: &PartWithBoundaries<'_>) -> Result<BoundaryInputs> {
        let PartWithBoundaries { part, boundaries, scales } = part;
        let masked = Inputs::new(device, config, part, scales[0])?;
        // Places stand where rows of masked tokens do; what fills them up counts nothing and has a place like any other.
        let Masked { rows: _, targets, weights } =
            Masked::new(device, &boundaries.places, &boundaries.targets, scales[1])?;
        let rounded = targets.shape().elements();
        let (mut ends, mut places) = (boundaries.ends.clone(), boundaries.places.clone());
        places.resize(rounded, 0);
        if ends.is_empty() {
            ends = vec![0, 0];
        }
        ends.resize(2 * rounded, Device::NOWHERE);
        let ends = Tensor::from_slice(device, [ends.len()], &ends)?;
        let places = Tensor::from_slice(device, [rounded], &places)?;
        Ok(BoundaryInputs { masked, boundary: BoundaryTargets { ends, places, targets, weights } })
    }

    fn losses(&self, model: &Model, pass: &mut Pass<'_>, inputs: &BoundaryInputs) -> Result<Vec<Tensor>> {
        let Inputs { batch, masked, .. } = &inputs.masked;
        Ok(span_boundary(model, pass, batch, masked, &inputs.boundary, [1.0, 1.0])?.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The targets of all parts count together, and one more.
    #[test]
    fn targets_of_a_step_share_a_denominator() {
        let boundaries = |part: &Part| {
            let count = part.rows.len();
            Boundaries { ends: vec![0; 2 * count], places: vec![0; count], targets: vec![0; count] }
        };
        let parts = [3, 4].map(|count| Part { rows: vec![0; count], ..Part::default() });
        let found = PartWithBoundaries::of_step(&parts, 0.5, boundaries);
        assert!(found.iter().all(|part| part.scales == [0.5, 0.125]));
    }
}
