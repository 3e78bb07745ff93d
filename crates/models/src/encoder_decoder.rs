//! Networks of two stacks: an encoder that reads a source, and a decoder that reads what was written for it so far and attends to
//! the source. Families differ in their stacks; what is done with them is the same.
//!
//! Legend: T tokens in the flat batch, M tokens of sources, N new tokens, H hidden.

use std::fmt::Debug;

use henson_tensor::{Cache, Layout, Param, Parameters, Pass, Result, Tensor, TensorError, Var};

use crate::blocks::{AttentionLayer, Memory, Stream};
use crate::decoder::{CacheSizes, Decoder, DecoderCache, NewTokens};
use crate::{Batch, Capture, Encoded, Network};

/// The first dropout site of a decoder, beyond those of any encoder.
pub(crate) const DECODER_SITES: u32 = 0x4000;

/// An encoder or a decoder.
pub(crate) trait Stack: Debug + Send + Sync {
    /// What its first block reads, where `words` is the table of words: T×H. Positions are those of `layout`, unless others are given.
    fn embed(
        &self,
        pass: &mut Pass<'_>,
        words: Param,
        ids: &Tensor,
        layout: &Layout,
        positions: Option<&Tensor>,
    ) -> Result<Var>;

    /// How many blocks it has.
    fn layers(&self) -> usize;

    /// What a block gives; probabilities of the attention to its own tokens on request.
    fn block(
        &self,
        pass: &mut Pass<'_>,
        i: usize,
        flow: &mut Flow<'_>,
        memory: &mut Memory<'_>,
        want_maps: bool,
    ) -> Result<Option<Tensor>>;

    /// What the stack gives: T×H.
    fn finish(&self, pass: &mut Pass<'_>, flow: Flow<'_>) -> Result<Var>;

    /// A block's attention to the source, of a decoder.
    fn cross(&self, i: usize) -> Option<&AttentionLayer>;
}

/// What flows from block to block: a stream of residuals, which post-norm blocks replace and pre-norm blocks add to.
pub(crate) type Flow<'a> = Stream<'a>;

/// Two stacks over one table of words; or the first alone.
#[derive(Debug)]
pub(crate) struct EncoderDecoder<S> {
    pub(crate) words: Param,
    pub(crate) encoder: S,
    pub(crate) decoder: Option<S>,
    /// Whether the decoder reads a source that has no target; see [`Batch::target_is_source`].
    pub(crate) reads_source: bool,
    /// What a cache holds for the decoder.
    pub(crate) cache: CacheSizes,
}

impl<S: Stack> EncoderDecoder<S> {
    /// A whole stack over a flat batch.
    fn run(
        &self,
        pass: &mut Pass<'_>,
        stack: &S,
        batch: &Batch,
        memory: Option<(&Var, &Layout)>,
        capture: Capture,
    ) -> Result<Encoded> {
        let x = stack.embed(pass, self.words, &batch.ids, &batch.layout, None)?;
        let mut flow = Flow::new(x, &batch.layout);
        let (mut hidden_states, mut attention_maps) = (Vec::new(), Vec::new());
        let mut memory = memory.map_or(Memory::None, |(states, layout)| Memory::Source(states, layout));
        for i in 0..stack.layers() {
            if capture.hidden_states {
                hidden_states.push(flow.value(pass)?);
            }
            attention_maps.extend(stack.block(pass, i, &mut flow, &mut memory, capture.attention_maps)?);
        }
        let last = stack.finish(pass, flow)?;
        if capture.hidden_states {
            hidden_states.push(last.clone());
        }
        Ok(Encoded { last, hidden_states, attention_maps, states: Vec::new() })
    }
}

impl<S: Stack + 'static> Network for EncoderDecoder<S> {
    /// Of a batch with targets, what the decoder gives for them; of one without, what the encoder gives, unless its decoder reads the
    /// source.
    fn encode(&self, pass: &mut Pass<'_>, batch: &Batch, capture: Capture) -> Result<Encoded> {
        let target = batch.target.as_ref().filter(|_| self.reads_source || !batch.target_is_source);
        let Some(target) = target else { return self.run(pass, &self.encoder, batch, None, capture) };
        let why = "the batch has targets, and the model was built without its decoder";
        let decoder = self.decoder.as_ref().ok_or(TensorError::Unsupported { operation: "encode", why })?;
        let memory = self.run(pass, &self.encoder, batch, None, Capture::default())?.last;
        self.run(pass, decoder, target, Some((&memory, &batch.layout)), capture)
    }

    fn encode_rows(&self, pass: &mut Pass<'_>, batch: &Batch, rows: &Tensor) -> Result<Var> {
        let last = self.encode(pass, batch, Capture::default())?.last;
        pass.gather(&last, rows)
    }

    fn average_in_last_layer(&self, _parameters: &mut Parameters) -> Result<()> {
        let why = "a layer of an encoder-decoder cannot be one that averages";
        Err(TensorError::Unsupported { operation: "average", why })
    }

    fn word_table(&self) -> Param {
        self.words
    }

    fn decoder(&self) -> Option<&dyn Decoder> {
        self.decoder.is_some().then_some(self)
    }
}

impl<S: Stack + 'static> Decoder for EncoderDecoder<S> {
    fn cache_sizes(&self) -> CacheSizes {
        self.cache
    }

    fn read_sources(&self, pass: &mut Pass<'_>, sources: &Batch, cache: &mut DecoderCache) -> Result<()> {
        let memory = self.run(pass, &self.encoder, sources, None, Capture::default())?.last;
        let (decoder, source) = (self.writer()?, source_of(&mut cache.source)?);
        for i in 0..decoder.layers() {
            if let Some(attention) = decoder.cross(i) {
                attention.keep(pass, (&memory, &sources.layout), (source, i))?;
            }
        }
        Ok(())
    }

    fn step(&self, pass: &mut Pass<'_>, new: &NewTokens, cache: &mut DecoderCache) -> Result<Var> {
        let decoder = self.writer()?;
        let x = decoder.embed(pass, self.words, &new.ids, &new.layout, Some(&new.positions))?;
        let mut flow = Flow::new(x, &new.layout);
        let (written, source) = (&mut cache.written, source_of(&mut cache.source)?);
        for layer in 0..decoder.layers() {
            let mut memory = Memory::Cache { written, source, layer };
            decoder.block(pass, layer, &mut flow, &mut memory, false)?;
        }
        decoder.finish(pass, flow)
    }
}

impl<S: Stack> EncoderDecoder<S> {
    fn writer(&self) -> Result<&S> {
        let why = "the model was built without its decoder";
        self.decoder.as_ref().ok_or(TensorError::Unsupported { operation: "decode", why })
    }
}

pub(crate) fn source_of(source: &mut Option<Cache>) -> Result<&mut Cache> {
    let why = "the cache was made for a network that reads no source";
    source.as_mut().ok_or(TensorError::Unsupported { operation: "decode", why })
}
