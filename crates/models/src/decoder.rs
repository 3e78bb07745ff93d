//! Networks that write token by token, and what they keep between steps: keys and values of what was written, and of the source
//! where there is one.

use henson_tensor::{Cache, CachedSequence, DType, Device, Layout, Pass, Result, Tensor, TensorError, Var};

use crate::{Batch, InputError, ModelConfig};

/// A network that can go on from tokens that it has seen. See [`Network::decoder`](crate::Network::decoder).
pub trait Decoder {
    /// What a cache for it holds.
    fn cache_sizes(&self) -> CacheSizes;

    /// Encodes sources and keeps the keys and values that the layers attend to; the cache was extended for them
    /// ([`Cache::extend`]). Only of networks whose [`CacheSizes::source`] is true.
    fn read_sources(&self, _pass: &mut Pass<'_>, _sources: &Batch, _cache: &mut DecoderCache) -> Result<()> {
        let why = "this family of models has no source to read";
        Err(TensorError::Unsupported { operation: "read_sources", why })
    }

    /// Whether a step depends on nothing that is on the host but the sizes of its new tokens' tensors, so that a GPU can record it.
    fn is_recordable(&self) -> bool {
        true
    }

    /// The last hidden states of new tokens (N×H), whose keys and values join the cache.
    fn step(&self, pass: &mut Pass<'_>, new: &NewTokens, cache: &mut DecoderCache) -> Result<Var>;
}

/// What a cache holds for a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheSizes {
    /// Layers with keys and values.
    pub layers: usize,
    /// Columns of a layer's keys, and of its values.
    pub width: usize,
    /// Whether there are as many for the tokens of a source.
    pub source: bool,
}

/// Keys and values of the sequences that are being written.
#[derive(Debug)]
pub struct DecoderCache {
    /// Of the tokens written, prompts included.
    pub written: Cache,
    /// Of the sources, where the network reads one.
    pub source: Option<Cache>,
}

/// A sequence in a [`DecoderCache`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Writing {
    /// Its place among what is written.
    pub written: CachedSequence,
    /// Its source's place. Several may share a source.
    pub source: Option<CachedSequence>,
}

impl DecoderCache {
    /// Room for `written` and `source` pages of `page_size` tokens.
    pub fn new(
        device: &Device,
        dtype: DType,
        sizes: CacheSizes,
        (written, source): (usize, usize),
        page_size: usize,
    ) -> Result<Self> {
        let cache = |pages| Cache::new(device, dtype, sizes.layers, sizes.width, (pages, page_size));
        let source = if sizes.source { Some(cache(source)?) } else { None };
        Ok(Self { written: cache(written)?, source })
    }
}

/// New tokens of some sequences, one or more of each: a prompt, or what was drawn last.
#[derive(Clone, Debug)]
pub struct NewTokens {
    /// N token ids.
    pub ids: Tensor,
    /// N: their places in their sequences.
    pub positions: Tensor,
    /// How the N tokens are divided among the sequences.
    pub layout: Layout,
}

impl NewTokens {
    /// Lays out new tokens of sequences and makes room for them in the cache; the step that follows fills it. Sequences that get a token
    /// each are [rounded](Device::rounded_streams): tokens behind theirs belong to nobody.
    pub fn new(
        device: &Device,
        config: &ModelConfig,
        cache: &mut DecoderCache,
        sequences: &[Writing],
        tokens: &[&[u32]],
    ) -> std::result::Result<Self, InputError> {
        let sizes = config.sizes();
        let (mut ids, mut positions) = (vec![], vec![]);
        for (sequence, (writing, new)) in sequences.iter().zip(tokens).enumerate() {
            let first = cache.written.tokens(writing.written);
            let (got, most) = (first + new.len(), sizes.max_tokens);
            if got > most {
                return Err(InputError::TooLong { sequence, got, most });
            }
            if let Some(&got) = new.iter().find(|id| **id as usize >= sizes.vocab_size) {
                return Err(InputError::Id { sequence, got, end: sizes.vocab_size });
            }
            ids.extend_from_slice(new);
            positions.extend((first..got).map(|position| position as u32));
        }
        let mut lengths: Vec<usize> = tokens.iter().map(|new| new.len()).collect();
        lengths.resize(device.rounded_streams(lengths.len()), 1);
        let layout = Layout::new(device, &lengths, 0)?;
        let written: Vec<CachedSequence> = sequences.iter().map(|writing| writing.written).collect();
        cache.written.extend(&written, &layout)?;
        if let Some(source) = &mut cache.source {
            let sources: Vec<CachedSequence> = sequences.iter().filter_map(|writing| writing.source).collect();
            source.select(&sources)?;
        }
        // What fills the batch up, if anything.
        ids.resize(layout.tokens(), 0);
        positions.resize(layout.tokens(), 0);
        Ok(Self {
            ids: Tensor::from_slice(device, [ids.len()], &ids)?,
            positions: Tensor::from_slice(device, [positions.len()], &positions)?,
            layout,
        })
    }
}
