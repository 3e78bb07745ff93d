//! The losses of BERT's pre-training and of its heads. Each is scale·Σ over its predictions; the scale is one over their
//! number in the whole step (or 1e-5 more, as in Google's code), which the caller knows.
//!
//! Legend: B sequences, T tokens, P predicted tokens.

use std::hash::Hash;

use henson_models::{Batch, Capture, Model, ModelConfig};
use henson_tensor::{Device, Layout, Pass, Result, Tensor, Var};

use crate::losses::LossNames;

/// What is learned from the parts of a batch: their inputs on the device, then losses by name, whose sum is trained.
///
/// An objective is all that its losses read from the host beside their inputs, and so the key of a recorded pass: plain numbers
/// ([`henson_tensor::Bits`]), never what differs from step to step if that can be an input.
pub trait Objective: Hash + Copy + 'static {
    /// A part of a batch as it was read.
    type Part<'p>: Copy;
    /// The same on the device.
    type Inputs;

    /// The names of its losses.
    fn names(&self) -> LossNames;

    /// Puts a part on the device.
    fn inputs(&self, device: &Device, config: &ModelConfig, part: Self::Part<'_>) -> crate::Result<Self::Inputs>;

    /// The losses, in the order of their names.
    fn losses(&self, model: &Model, pass: &mut Pass<'_>, inputs: &Self::Inputs) -> crate::Result<Vec<Tensor>>;
}

/// What masked-LM pre-training predicts in a batch.
#[derive(Clone, Debug)]
pub struct Masked {
    /// P rows of the flat batch.
    pub rows: Tensor,
    /// P piece ids that stood there.
    pub targets: Tensor,
    /// P factors on their losses, where they differ.
    pub weights: Option<Tensor>,
}

impl Masked {
    /// Puts rows and targets on the device, each with this weight, filled up to what the device wants with such that count
    /// nothing. Where there is none, the first row counts nothing.
    pub(crate) fn new(device: &Device, rows: &[u32], targets: &[u32], weight: f32) -> Result<Self> {
        let (mut rows, mut targets) = (rows.to_vec(), targets.to_vec());
        let mut weights = vec![weight; rows.len()];
        if rows.is_empty() {
            (rows, targets, weights) = (vec![0], vec![0], vec![0.0]);
        }
        let rounded = device.rounded(rows.len());
        rows.resize(rounded, Device::NOWHERE);
        targets.resize(rounded, 0);
        weights.resize(rounded, 0.0);
        Ok(Self {
            rows: Tensor::from_slice(device, [rounded], &rows)?,
            targets: Tensor::from_slice(device, [rounded], &targets)?,
            weights: Some(Tensor::from_slice(device, [rounded], &weights)?),
        })
    }
}

/// The two losses of BERT's pre-training; their plain sum is trained.
#[derive(Debug)]
pub struct PreTrainingLoss {
    /// Masked LM.
    pub masked: Tensor,
    /// Next sentence, where there are labels for it.
    pub next_sentence: Option<Tensor>,
}

/// One over the number of predictions of a whole step.
#[derive(Clone, Copy, Debug)]
pub struct Scales {
    /// For masked tokens.
    pub masked: f32,
    /// For sequences.
    pub sequence: f32,
}

/// Masked LM, and next sentence (label 0 next, 1 random) where labels are given.
pub fn pre_training(
    model: &Model,
    pass: &mut Pass<'_>,
    batch: &Batch,
    masked: &Masked,
    next_sentence: Option<&Tensor>,
    scales: Scales,
) -> Result<PreTrainingLoss> {
    smoothed_pre_training(model, pass, batch, masked, next_sentence, scales, 0.0)
}

/// The same with label smoothing of tokens: a share of each target is spread evenly over the vocabulary, as in PyTorch.
pub(crate) fn smoothed_pre_training(
    model: &Model,
    pass: &mut Pass<'_>,
    batch: &Batch,
    masked: &Masked,
    next_sentence: Option<&Tensor>,
    scales: Scales,
    smoothing: f32,
) -> Result<PreTrainingLoss> {
    let last = model.encode(pass, batch, Capture::default())?.last;
    let next_sentence = match next_sentence {
        Some(labels) => {
            let logits = model.logits_of(pass, last.clone(), &batch.layout, None)?;
            Some(pass.cross_entropy(logits, 2, labels, None, scales.sequence)?.0)
        }
        None => None,
    };
    let logits = model.logits_of(pass, last, &batch.layout, Some(&masked.rows))?;
    let (vocabulary, weights) = (model.config().sizes().vocab_size, masked.weights.as_ref());
    let (masked, _) =
        pass.smoothed_cross_entropy(logits, vocabulary, &masked.targets, weights, smoothing, scales.masked)?;
    Ok(PreTrainingLoss { masked, next_sentence })
}

/// What the logits of a task's head are held against.
#[derive(Clone, Debug)]
pub enum Targets {
    /// Class numbers of sequences or tokens, with a weight each on request; 0 leaves one out. Of multiple choice, where a sequence
    /// has one logit, which of an example's sequences.
    Classes(Tensor, Option<Tensor>),
    /// B numbers to come close to.
    Numbers(Tensor),
    /// B×labels of 0 or 1, with a weight each on request.
    Several(Tensor, Option<Tensor>),
    /// The first and last token of each answer within its sequence (B×2), with weights (B×2); 0 leaves one out.
    Spans(Tensor, Tensor),
}

impl Targets {
    /// The loss of a head's logits.
    pub fn loss(&self, pass: &mut Pass<'_>, mut logits: Var, layout: &Layout, scale: f32) -> Result<Tensor> {
        match self {
            Self::Classes(labels, weights) => {
                if logits.tensor().columns() == 1 {
                    let (examples, all) = (labels.shape().elements(), logits.tensor().shape().elements());
                    logits = logits.reshape([examples, all / examples.max(1)])?;
                }
                let classes = logits.tensor().columns();
                Ok(pass.cross_entropy(logits, classes, labels, weights.as_ref(), scale)?.0)
            }
            Self::Numbers(numbers) => pass.squared_error(logits, numbers, scale),
            Self::Several(targets, weights) => pass.binary_cross_entropy(logits, targets, weights.as_ref(), scale),
            Self::Spans(targets, weights) => pass.span_cross_entropy(logits, layout, targets, weights, scale),
        }
    }
}
