//! What training and inference cost, before anything is computed: estimates in bytes.

use henson_models::{CacheSizes, Model, Sizes};
use henson_tensor::{DType, Entry, Method};

/// A model as it lies in memory.
#[derive(Clone, Debug)]
pub struct Footprint {
    entries: Vec<Entry>,
    sizes: Sizes,
    /// What a prediction is one of.
    classes: usize,
    /// What a cache holds for it, where it can write.
    cache: Option<CacheSizes>,
}

/// Tokens that are computed with at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenCounts {
    /// Of what is read; those of one part, where a batch is accumulated.
    pub sources: usize,
    /// Of what the decoder of an encoder-decoder writes.
    pub targets: usize,
    /// Those with logits of the vocabulary.
    pub predicted: usize,
}

/// Bytes of a number.
fn size(dtype: DType) -> f64 {
    if dtype == DType::Bf16 { 2.0 } else { 4.0 }
}

impl Footprint {
    /// Of a model, with its parameters as they were laid out.
    pub fn new(model: &Model, entries: &[Entry]) -> Self {
        let cache = model.decoder().map(|decoder| decoder.cache_sizes());
        let (sizes, classes) = (model.config().sizes(), model.config().predicted_classes());
        Self { entries: entries.to_vec(), sizes, classes, cache }
    }

    /// Numbers of the model.
    pub fn parameters(&self) -> usize {
        self.entries.iter().map(|entry| entry.shape.elements()).sum()
    }

    /// Bytes of a training step: weights and gradients in f32 and what the optimizer keeps, the bf16 copy, and what the backward pass
    /// needs. With `recompute` the inner numbers of feed-forward layers are not kept.
    pub fn training(&self, counts: TokenCounts, method: Method, dtype: DType, recompute: bool) -> u64 {
        let numbers = 2 * self.parameters() as u64 + self.state(method);
        4 * numbers + self.copy(dtype) + self.step(counts, dtype, recompute)
    }

    /// What a step keeps for the backward pass, in bytes.
    ///
    /// Per token and layer 8·H numbers (projections, attention's output, two sums, two outputs) and twice the inner 4·H, three times that
    /// at work in the backward pass, and the predicted tokens' logits. A decoder's layers that attend to a source have 4·H more (queries,
    /// attention's output, a sum, an output), and keys and values of each of its tokens.
    pub fn step(&self, counts: TokenCounts, dtype: DType, recompute: bool) -> u64 {
        let (h, i) = (self.sizes.hidden_size as f64, self.sizes.intermediate_size as f64);
        let (layers, written) = (self.sizes.num_hidden_layers as f64, self.decoder_layers() as f64);
        let inner = if recompute { 0.0 } else { 2.0 * i };
        let source = layers * (8.0 * h + inner) + 2.0 * h + written * 2.0 * h;
        let target = written * (12.0 * h + inner) + 2.0 * h;
        let (sources, targets) = (counts.sources as f64, counts.targets as f64);
        let logits = counts.predicted as f64 * self.classes as f64;
        let kept = sources * source + targets * target + logits + 3.0 * i * sources.max(targets);
        (size(dtype) * kept) as u64
    }

    /// Bytes of a forward pass: weights, and one layer's work.
    pub fn inference(&self, counts: TokenCounts, dtype: DType) -> u64 {
        let Sizes { hidden_size, intermediate_size, .. } = self.sizes;
        let tokens = counts.sources.max(counts.targets) as f64;
        let work = tokens * (6 * hidden_size + intermediate_size) as f64;
        4 * self.parameters() as u64 + self.copy(dtype) + (size(dtype) * work) as u64
    }

    /// Bytes of keys and values that writing keeps, where the model can write: of what it reads, and of what it writes.
    pub fn cache(&self, counts: TokenCounts, dtype: DType) -> Option<u64> {
        let CacheSizes { layers, width, .. } = self.cache?;
        Some((size(dtype) * (2 * layers * width) as f64 * (counts.sources + counts.targets) as f64) as u64)
    }

    /// Those that attend to a source; an encoder's are counted elsewhere.
    fn decoder_layers(&self) -> usize {
        self.cache.filter(|cache| cache.source).map_or(0, |cache| cache.layers)
    }

    /// Numbers that an optimizer keeps.
    pub(crate) fn state(&self, method: Method) -> u64 {
        method.state(&self.entries) as u64
    }

    /// The bf16 copy that is computed with.
    pub(crate) fn copy(&self, dtype: DType) -> u64 {
        if dtype == DType::Bf16 { 2 * self.parameters() as u64 } else { 0 }
    }
}
