//! Post-norm encoder-decoders: BART's network, and the transformer of Vaswani et al. (2017), which is Marian's. Biases everywhere,
//! one table of words for both stacks and the output. The two differ in their positions and in a norm behind the embeddings.
//!
//! Legend: T tokens in the flat batch, H hidden, A heads, V vocabulary.

use henson_tensor::{
    Attention, Builder, EmbeddingTables, FeedForwardLayers, Group, Init, Layout, Norm, Param, Pass, Result, Tensor,
    Var, Window,
};

use crate::blocks::{AttentionLayer, Memory};
use crate::config::{check_dropouts, check_heads, check_sizes};
use crate::decoder::CacheSizes;
use crate::encoder_decoder::{DECODER_SITES, EncoderDecoder, Flow, Stack};
use crate::heads::{HeadParts, VocabularyBias, VocabularyHead};
use crate::layers::{Linear, layer_norm};
use crate::{ConfigError, Head, HiddenActivation, Sizes};

/// The row of the first learned position: the two before it are fairseq's, for padding.
pub(crate) const FIRST_POSITION: usize = 2;

/// LayerNorm's epsilon has no key.
const EPSILON: f32 = 1e-5;

/// What both stacks are built with; of pairs, the first is the encoder's.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PostNormSettings {
    pub(crate) vocabulary: usize,
    pub(crate) hidden: usize,
    pub(crate) layers: [usize; 2],
    pub(crate) heads: [usize; 2],
    pub(crate) inner: [usize; 2],
    pub(crate) positions: Positions,
    /// Whether vectors of words are multiplied with √H.
    pub(crate) scale: bool,
    pub(crate) activation: HiddenActivation,
    pub(crate) dropout: f64,
    pub(crate) attention_dropout: f64,
    pub(crate) activation_dropout: f64,
    /// The standard deviation of initial weights.
    pub(crate) init: f64,
    /// Whether the decoder reads a source that has no target.
    pub(crate) reads_source: bool,
}

/// How tokens know their places.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Positions {
    /// By tables of so many rows, one for each stack, with a norm behind the sum.
    Learned(usize),
    /// By sines and cosines, so many rows, without a norm.
    Sinusoids(usize),
}

impl PostNormSettings {
    /// Checks what configs of such networks have under the same keys.
    pub(crate) fn check(&self) -> std::result::Result<(), ConfigError> {
        check_sizes(&[
            ("vocab_size", self.vocabulary, 1 << 24),
            ("d_model", self.hidden, 1 << 16),
            ("encoder_layers", self.layers[0], 1 << 10),
            ("encoder_attention_heads", self.heads[0], 1 << 12),
            ("encoder_ffn_dim", self.inner[0], 1 << 20),
            ("decoder_layers", self.layers[1], 1 << 10),
            ("decoder_attention_heads", self.heads[1], 1 << 12),
            ("decoder_ffn_dim", self.inner[1], 1 << 20),
        ])?;
        check_heads("encoder_attention_heads", self.heads[0], self.hidden)?;
        check_heads("decoder_attention_heads", self.heads[1], self.hidden)?;
        check_dropouts(&[
            ("dropout", self.dropout),
            ("attention_dropout", self.attention_dropout),
            ("activation_dropout", self.activation_dropout),
        ])
    }

    /// What other crates need to know.
    pub(crate) fn sizes(&self, max_tokens: usize) -> Sizes {
        Sizes {
            vocab_size: self.vocabulary,
            hidden_size: self.hidden,
            num_hidden_layers: self.layers[0],
            num_attention_heads: self.heads[0],
            intermediate_size: self.inner[0],
            max_tokens,
            segments: 1,
            hidden_act: self.activation,
            dropout: self.dropout,
            attention_dropout: self.attention_dropout,
            causal: false,
        }
    }

    /// The mean of a token of a source and one of a target of the same length.
    pub(crate) fn multiply_adds(&self, length: usize) -> f64 {
        let (h, length) = (self.hidden as f64, length as f64);
        let attention = 4.0 * h * h + 2.0 * length * h;
        let [encoder, decoder] = [(0, 1.0), (1, 2.0)].map(|(stack, attentions)| {
            self.layers[stack] as f64 * (attentions * attention + 2.0 * h * self.inner[stack] as f64)
        });
        (encoder + decoder) / 2.0
    }

    /// The network, and the parts of a head that writes.
    pub(crate) fn build(&self, b: &mut Builder, head: Head) -> (EncoderDecoder<PostNormStack>, HeadParts) {
        let (h, v) = (self.hidden, self.vocabulary);
        let base = if head == Head::Encoder { "" } else { "model" };
        let sinusoids = match self.positions {
            Positions::Learned(_) => None,
            Positions::Sinusoids(rows) => Some(b.sinusoids(rows, h)),
        };
        let (words, encoder, decoder) = b.at(base, |b| {
            let words = b.group(Group::Embeddings, |b| b.padded_table("shared.weight", v, h, self.init()));
            let encoder = b.at("encoder", |b| PostNormStack::build(b, self, sinusoids, false));
            (words, encoder, b.at("decoder", |b| PostNormStack::build(b, self, sinusoids, true)))
        });
        let mut parts = HeadParts::default();
        if head == Head::Seq2Seq {
            b.mark_output(words);
            let bias = b.group(Group::Embeddings, |b| b.padded_constants("final_logits_bias", v));
            parts.vocabulary = Some(VocabularyHead::scaled(None, 1.0, VocabularyBias::Constant(bias)));
        }
        let cache = CacheSizes { layers: self.layers[1], width: h, source: true };
        let (decoder, reads_source) = (Some(decoder), self.reads_source);
        (EncoderDecoder { words, encoder, decoder, reads_source, cache }, parts)
    }

    fn init(&self) -> Init {
        Init::Normal(self.init as f32)
    }
}

/// An encoder or a decoder.
#[derive(Debug)]
pub(crate) struct PostNormStack {
    /// From the row of the first position on.
    positions: Param,
    /// Behind the embeddings.
    norm: Option<Norm>,
    /// What vectors of words are multiplied with.
    scale: f32,
    blocks: Vec<PostNormBlock>,
    dropout: f32,
    /// The first of its dropout sites.
    site: u32,
}

impl PostNormStack {
    fn build(b: &mut Builder, own: &PostNormSettings, sinusoids: Option<Param>, decoder: bool) -> Self {
        let h = own.hidden;
        let (layers, first, site) =
            if decoder { (own.layers[1], own.layers[0], DECODER_SITES) } else { (own.layers[0], 0, 0) };
        let (positions, norm) = match (own.positions, sinusoids) {
            (Positions::Learned(rows), _) => b.group(Group::Embeddings, |b| {
                let positions = b.matrix("embed_positions.weight", rows + FIRST_POSITION, h, own.init());
                (positions.from_row(FIRST_POSITION), Some(layer_norm(b, "layernorm_embedding", h, EPSILON)))
            }),
            (Positions::Sinusoids(_), Some(table)) => (table, None),
            (Positions::Sinusoids(rows), None) => (b.sinusoids(rows, h), None),
        };
        let block = |i: usize| {
            let (name, own_site) = (format!("layers.{i}"), site + 1 + i as u32 * BLOCK_SITES);
            b.group(Group::Layer(first + i), |b| b.at(&name, |b| PostNormBlock::build(b, own, decoder, own_site)))
        };
        let blocks = (0..layers).map(block).collect();
        let scale = if own.scale { (h as f32).sqrt() } else { 1.0 };
        Self { positions, norm, scale, blocks, dropout: own.dropout as f32, site }
    }
}

impl Stack for PostNormStack {
    fn embed(
        &self,
        pass: &mut Pass<'_>,
        words: Param,
        ids: &Tensor,
        layout: &Layout,
        positions: Option<&Tensor>,
    ) -> Result<Var> {
        let dropout = (self.dropout, self.site);
        let tables = EmbeddingTables { word: words, position: Some(self.positions), position_offset: 0, segment: None };
        if let (None, 1.0, Some(norm)) = (positions, self.scale, &self.norm) {
            return pass.embeddings_norm(tables, ids, None, layout, norm, dropout);
        }
        let positions = positions.unwrap_or(layout.positions());
        let x = if self.scale == 1.0 {
            pass.embeddings(tables, ids, positions, None)?
        } else {
            let alone = |word| EmbeddingTables { word, position: None, ..tables };
            let words = pass.embeddings(alone(words), ids, positions, None)?;
            let words = pass.scale(&words, self.scale)?;
            let places = pass.embeddings(alone(self.positions), positions, positions, None)?;
            pass.add_residual(words, &places, layout, (0.0, 0))?
        };
        match &self.norm {
            Some(norm) => pass.norm_dropout(x, norm, layout, dropout),
            None => pass.dropout_tokens(x, layout, dropout),
        }
    }

    fn layers(&self) -> usize {
        self.blocks.len()
    }

    fn block(
        &self,
        pass: &mut Pass<'_>,
        i: usize,
        flow: &mut Flow<'_>,
        memory: &mut Memory<'_>,
        want_maps: bool,
    ) -> Result<Option<Tensor>> {
        let x = flow.value(pass)?;
        let (y, maps) = self.blocks[i].forward(pass, x, flow.layout(), memory, want_maps)?;
        flow.replace(y);
        Ok(maps)
    }

    fn finish(&self, pass: &mut Pass<'_>, mut flow: Flow<'_>) -> Result<Var> {
        flow.value(pass)
    }

    fn cross(&self, i: usize) -> Option<&AttentionLayer> {
        self.blocks.get(i)?.cross.as_ref().map(|(attention, _)| attention)
    }
}

/// Dropout sites that a block uses.
const BLOCK_SITES: u32 = 6;

/// A block of the encoder, or, with attention to the source, of the decoder.
#[derive(Debug)]
struct PostNormBlock {
    self_attention: AttentionLayer,
    self_norm: Norm,
    cross: Option<(AttentionLayer, Norm)>,
    layers: FeedForwardLayers,
    norm: Norm,
    dropout: f32,
    activation_dropout: f32,
    site: u32,
}

impl PostNormBlock {
    fn build(b: &mut Builder, own: &PostNormSettings, decoder: bool, site: u32) -> Self {
        const NAMES: [&str; 4] = ["q_proj", "k_proj", "v_proj", "out_proj"];
        let (h, init, stack) = (own.hidden, own.init(), usize::from(decoder));
        let (heads, inner) = (own.heads[stack], own.inner[stack]);
        let plain = Attention::new(heads, h / heads.max(1));
        let window = if decoder { Window::CAUSAL } else { Window::FULL };
        let attention = |b: &mut Builder, name: &str, attention: Attention, cross: bool, site: u32| {
            let dropout = (own.attention_dropout as f32, site);
            b.at(name, |b| AttentionLayer::with_biases(b, NAMES, (h, attention), cross, dropout, init))
        };
        let self_attention = attention(b, "self_attn", Attention { window, ..plain }, false, site);
        let self_norm = layer_norm(b, "self_attn_layer_norm", h, EPSILON);
        let cross = decoder.then(|| {
            (attention(b, "encoder_attn", plain, true, site + 2), layer_norm(b, "encoder_attn_layer_norm", h, EPSILON))
        });
        let up = Linear::build(b, "fc1", h, inner, init);
        let down = Linear::build(b, "fc2", inner, h, init);
        let layers = FeedForwardLayers {
            up: up.weight,
            up_bias: up.bias,
            activation: own.activation.into(),
            gated: false,
            down: down.weight,
            down_bias: down.bias,
        };
        let norm = layer_norm(b, "final_layer_norm", h, EPSILON);
        let (dropout, activation_dropout) = (own.dropout as f32, own.activation_dropout as f32);
        Self { self_attention, self_norm, cross, layers, norm, dropout, activation_dropout, site }
    }

    fn forward(
        &self,
        pass: &mut Pass<'_>,
        x: Var,
        layout: &Layout,
        memory: &mut Memory<'_>,
        want_maps: bool,
    ) -> Result<(Var, Option<Tensor>)> {
        let dropout = |i: u32| (self.dropout, self.site + i);
        let (y, maps) = memory.own(pass, &self.self_attention, (&x, layout), want_maps)?;
        let mut x = pass.add_norm(y, &x, &self.self_norm, layout, dropout(1))?;
        if let Some((attention, norm)) = &self.cross
            && let Some(y) = memory.other(pass, attention, (&x, layout))?
        {
            x = pass.add_norm(y, &x, norm, layout, dropout(3))?;
        }
        let inner = (self.activation_dropout > 0.0).then_some((layout, (self.activation_dropout, self.site + 4)));
        let y = pass.feed_forward(&x, &self.layers, inner)?;
        Ok((pass.add_norm(y, &x, &self.norm, layout, dropout(5))?, maps))
    }
}
