//! What training and inference cost, before anything is computed.

use henson_models::Sizes;
use henson_tensor::DType;

/// Bytes of memory, estimated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrainingMemory {
    /// With gradients, moments and what a step keeps.
    pub training: u64,
    /// The forward pass alone.
    pub inference: u64,
}

/// Memory for batches of `tokens` (those of one part, where a batch is accumulated), of which a share is predicted. With
/// `recompute` the inner numbers of feed-forward layers are not kept.
///
/// Weights, gradients and two moments in f32, the bf16 copy, and what a step keeps for the backward pass: per token and
/// layer 8·H numbers (projections, attention's output, two sums, two outputs) and twice the inner 4·H, three times that
/// at work in the backward pass, and the predicted tokens' logits.
pub fn memory(
    sizes: &Sizes,
    parameters: usize,
    tokens: usize,
    predicted: f64,
    dtype: DType,
    recompute: bool,
) -> TrainingMemory {
    let (h, i, l) = (sizes.hidden_size as f64, sizes.intermediate_size as f64, sizes.num_hidden_layers as f64);
    let (p, t) = (parameters as f64, tokens as f64);
    let (size, copy) = if dtype == DType::Bf16 { (2.0, 2.0) } else { (4.0, 0.0) };
    let kept = l * (8.0 * h + if recompute { 0.0 } else { 2.0 * i }) + 2.0 * h;
    let logits = predicted * sizes.vocab_size as f64;
    TrainingMemory {
        training: (p * (16.0 + copy) + t * size * (kept + logits + 3.0 * i)) as u64,
        inference: (p * (4.0 + copy) + t * size * (6.0 * h + i)) as u64,
    }
}
