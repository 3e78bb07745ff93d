//! The losses of BERT's pre-training and of its heads. Each is scale·Σ over its predictions; the scale is one over their
//! number in the whole step (or 1e-5 more, as in Google's code), which the caller knows.
//!
//! Legend: B sequences, T tokens, P predicted tokens.

use henson_models::{Batch, Capture, Model};
use henson_tensor::{Pass, Result, Tensor};

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
    let (masked, _) = pass.cross_entropy(logits, vocabulary, &masked.targets, weights, scales.masked)?;
    Ok(PreTrainingLoss { masked, next_sentence })
}

/// Labels of whole sequences.
#[derive(Clone, Debug)]
pub enum SequenceLabels {
    /// B class numbers, with a weight each on request.
    Classes(Tensor, Option<Tensor>),
    /// B numbers to come close to.
    Numbers(Tensor),
    /// B×labels of 0 or 1.
    Several(Tensor),
}

/// Classification, regression or several labels at once, by the pooled first token.
pub fn sequence(
    model: &Model,
    pass: &mut Pass<'_>,
    batch: &Batch,
    labels: &SequenceLabels,
    scale: f32,
) -> Result<Tensor> {
    let logits = model.logits(pass, batch, None)?;
    match labels {
        SequenceLabels::Classes(labels, weights) => {
            let classes = logits.tensor().columns();
            Ok(pass.cross_entropy(logits, classes, labels, weights.as_ref(), scale)?.0)
        }
        SequenceLabels::Numbers(numbers) => pass.squared_error(logits, numbers, scale),
        SequenceLabels::Several(targets) => pass.binary_cross_entropy(logits, targets, None, scale),
    }
}

/// Tagging: T class numbers with T weights; 0 where a token carries no label.
pub fn tokens(
    model: &Model,
    pass: &mut Pass<'_>,
    batch: &Batch,
    labels: &Tensor,
    weights: &Tensor,
    scale: f32,
) -> Result<Tensor> {
    let logits = model.logits(pass, batch, None)?;
    let classes = logits.tensor().columns();
    Ok(pass.cross_entropy(logits, classes, labels, Some(weights), scale)?.0)
}

/// Span answers: the first and last token of each answer within its sequence (B×2); a weight (B×2) of 0 leaves one out.
pub fn spans(
    model: &Model,
    pass: &mut Pass<'_>,
    batch: &Batch,
    targets: &Tensor,
    weights: &Tensor,
    scale: f32,
) -> Result<Tensor> {
    let logits = model.logits(pass, batch, None)?;
    pass.span_cross_entropy(logits, &batch.layout, targets, weights, scale)
}

/// Multiple choice: `choices` sequences an example, in order; one class number an example.
pub fn choice(
    model: &Model,
    pass: &mut Pass<'_>,
    batch: &Batch,
    choices: usize,
    labels: &Tensor,
    scale: f32,
) -> Result<Tensor> {
    let logits = model.logits(pass, batch, None)?;
    let examples = batch.layout.sequences() / choices.max(1);
    let logits = logits.reshape([examples, choices])?;
    Ok(pass.cross_entropy(logits, choices, labels, None, scale)?.0)
}
