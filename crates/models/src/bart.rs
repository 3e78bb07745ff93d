//! BART (Lewis et al. 2020): a post-norm encoder-decoder with biases everywhere and learned positions, whose first two rows are
//! never used. One table of words serves both stacks and the output.
//!
//! Legend: T tokens in the flat batch, H hidden (`d_model`), A heads, V vocabulary.

use henson_tensor::{
    Attention, Builder, EmbeddingTables, FeedForwardLayers, Group, Init, Layout, Norm, Param, Pass, Result as Computed,
    Tensor, Var, Window,
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::blocks::{AttentionLayer, Memory};
use crate::config::{FamilyConfig, check_dropouts, check_heads, check_only, check_sizes};
use crate::decoder::CacheSizes;
use crate::encoder_decoder::{DECODER_SITES, EncoderDecoder, Flow, Stack};
use crate::heads::{Classifier, HeadParts, VocabularyBias, VocabularyHead};
use crate::layers::{Linear, layer_norm};
use crate::{
    ConfigError, Family, FineTuning, Head, HiddenActivation, Model, ModelConfig, Naming, Sizes, SpecialIds,
    TargetReading,
};

/// BART as the table of families has it.
pub(crate) static FAMILY: Family = Family {
    types: &[("bart", "Bart")],
    naming: Naming {
        base_prefix: "model.",
        encoder: &["shared.", "encoder.", "decoder."],
        old_endings: &[],
        tied: &[
            ("model.encoder.embed_tokens.weight", "model.shared.weight"),
            ("model.decoder.embed_tokens.weight", "model.shared.weight"),
            ("lm_head.weight", "model.shared.weight"),
        ],
        ignored_endings: &["encoder.version", "decoder.version"],
    },
    heads: &[Head::Encoder, Head::Seq2Seq, Head::Sequence { labels: 0 }, Head::Span],
    causal: None,
    endings: &[],
    sizes: &[
        ("bart-mini", || of_size(4, 256, 4, 1024)),
        ("bart-base", || of_size(6, 768, 12, 3072)),
        ("bart-large", || of_size(12, 1024, 16, 4096)),
    ],
    parse: |value| Ok(ModelConfig::Bart(serde_json::from_value(value)?)),
};

/// The row of the first position: the two before it are fairseq's, for padding.
const FIRST_POSITION: usize = 2;

/// LayerNorm's epsilon has no key.
const EPSILON: f32 = 1e-5;

/// The sizes and settings of a BART. A key that is missing has the default of `transformers`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct BartConfig {
    /// V: tokens of the vocabulary.
    pub vocab_size: usize,
    /// Maximum length of a source, and of a target.
    pub max_position_embeddings: usize,
    /// H.
    pub d_model: usize,
    /// Blocks of the encoder.
    pub encoder_layers: usize,
    /// A of the encoder; divides H.
    pub encoder_attention_heads: usize,
    /// Columns inside of the encoder's feed-forward layers.
    pub encoder_ffn_dim: usize,
    /// Blocks of the decoder.
    pub decoder_layers: usize,
    /// A of the decoder; divides H.
    pub decoder_attention_heads: usize,
    /// Columns inside of the decoder's feed-forward layers.
    pub decoder_ffn_dim: usize,
    /// The activation of feed-forward layers.
    pub activation_function: HiddenActivation,
    /// Dropout of embeddings and of what the halves of blocks give.
    pub dropout: f64,
    /// Dropout of attention's probabilities.
    pub attention_dropout: f64,
    /// Dropout inside of the feed-forward layers.
    pub activation_dropout: f64,
    /// Dropout on both sides of the hidden layer of a sequence head.
    pub classifier_dropout: f64,
    /// The standard deviation of initial weights.
    pub init_std: f64,
    /// Whether vectors of words are multiplied with √H.
    pub scale_embedding: bool,
    /// Padding.
    pub pad_token_id: u32,
    /// What begins a text.
    pub bos_token_id: u32,
    /// What ends a text.
    pub eos_token_id: u32,
    /// What stands before a target.
    pub decoder_start_token_id: u32,
    /// `bart`.
    pub model_type: String,
    /// Keys that we do not know, kept as they are.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

impl Default for BartConfig {
    fn default() -> Self {
        Self {
            vocab_size: 50265,
            max_position_embeddings: 1024,
            d_model: 1024,
            encoder_layers: 12,
            encoder_attention_heads: 16,
            encoder_ffn_dim: 4096,
            decoder_layers: 12,
            decoder_attention_heads: 16,
            decoder_ffn_dim: 4096,
            activation_function: HiddenActivation::Gelu,
            dropout: 0.1,
            attention_dropout: 0.0,
            activation_dropout: 0.0,
            classifier_dropout: 0.0,
            init_std: 0.02,
            scale_embedding: false,
            pad_token_id: 1,
            bos_token_id: 0,
            eos_token_id: 2,
            decoder_start_token_id: 2,
            model_type: "bart".to_owned(),
            other: Map::new(),
        }
    }
}

/// Layers of each stack, H, A and columns of feed-forward layers. Dropout is that of `transformers`' bart-large.
fn of_size(layers: usize, d_model: usize, heads: usize, inner: usize) -> ModelConfig {
    ModelConfig::Bart(BartConfig {
        d_model,
        encoder_layers: layers,
        decoder_layers: layers,
        encoder_attention_heads: heads,
        decoder_attention_heads: heads,
        encoder_ffn_dim: inner,
        decoder_ffn_dim: inner,
        ..BartConfig::default()
    })
}

impl FamilyConfig for BartConfig {
    fn family(&self) -> &'static Family {
        &FAMILY
    }

    fn model_type(&self) -> &str {
        &self.model_type
    }

    fn to_json(&self) -> Result<Value, serde_json::Error> {
        serde_json::to_value(self)
    }

    fn check(&self) -> Result<(), ConfigError> {
        check_sizes(&[
            ("vocab_size", self.vocab_size, 1 << 24),
            ("max_position_embeddings", self.max_position_embeddings, 1 << 20),
            ("d_model", self.d_model, 1 << 16),
            ("encoder_layers", self.encoder_layers, 1 << 10),
            ("encoder_attention_heads", self.encoder_attention_heads, 1 << 12),
            ("encoder_ffn_dim", self.encoder_ffn_dim, 1 << 20),
            ("decoder_layers", self.decoder_layers, 1 << 10),
            ("decoder_attention_heads", self.decoder_attention_heads, 1 << 12),
            ("decoder_ffn_dim", self.decoder_ffn_dim, 1 << 20),
        ])?;
        check_heads("encoder_attention_heads", self.encoder_attention_heads, self.d_model)?;
        check_heads("decoder_attention_heads", self.decoder_attention_heads, self.d_model)?;
        check_dropouts(&[
            ("dropout", self.dropout),
            ("attention_dropout", self.attention_dropout),
            ("activation_dropout", self.activation_dropout),
            ("classifier_dropout", self.classifier_dropout),
        ])?;
        let ids = [("eos_token_id", self.eos_token_id), ("decoder_start_token_id", self.decoder_start_token_id)];
        if let Some((key, id)) = ids.into_iter().find(|(_, id)| *id as usize >= self.vocab_size) {
            return Err(ConfigError::value(key, id, format!("less than vocab_size, {}", self.vocab_size)));
        }
        let no = Value::from(false);
        check_only(
            &self.other,
            &[
                ("is_encoder_decoder", Value::from(true)),
                ("is_decoder", no.clone()),
                ("tie_word_embeddings", Value::from(true)),
                // Of the first files, and of mBART and Pegasus, which are other types today.
                ("normalize_before", no.clone()),
                ("add_final_layer_norm", no.clone()),
                ("normalize_embedding", Value::from(true)),
                ("static_position_embeddings", no.clone()),
                ("add_bias_logits", no),
                ("extra_pos_embeddings", Value::from(FIRST_POSITION)),
            ],
        )
    }

    fn sizes(&self) -> Sizes {
        Sizes {
            vocab_size: self.vocab_size,
            hidden_size: self.d_model,
            num_hidden_layers: self.encoder_layers,
            num_attention_heads: self.encoder_attention_heads,
            intermediate_size: self.encoder_ffn_dim,
            max_tokens: self.max_position_embeddings,
            segments: 1,
            hidden_act: self.activation_function,
            dropout: self.dropout,
            attention_dropout: self.attention_dropout,
            causal: false,
        }
    }

    fn set_vocab_size(&mut self, size: usize) {
        self.vocab_size = size;
    }

    /// A target begins with the end of a text, as BART's do.
    fn set_special_ids(&mut self, ids: SpecialIds) {
        (self.bos_token_id, self.eos_token_id, self.decoder_start_token_id) = (ids.begin, ids.end, ids.end);
        self.pad_token_id = ids.padding.unwrap_or(ids.end);
        self.other.insert("forced_eos_token_id".to_owned(), Value::from(ids.end));
    }

    fn set_layers(&mut self, layers: usize) {
        (self.encoder_layers, self.decoder_layers) = (layers, layers);
    }

    fn set_dropout(&mut self, p: f64) {
        (self.dropout, self.attention_dropout, self.activation_dropout, self.classifier_dropout) = (p, p, p, p);
    }

    fn set_causal(&mut self, causal: bool) -> Result<(), ConfigError> {
        match causal {
            true => Err(ConfigError::value("model_type", &self.model_type, "a family with left-to-right models")),
            false => Ok(()),
        }
    }

    fn can_average(&self) -> bool {
        false
    }

    /// The mean of a token of a source and one of a target of the same length.
    fn multiply_adds(&self, length: usize) -> f64 {
        let (h, length) = (self.d_model as f64, length as f64);
        let attention = 4.0 * h * h + 2.0 * length * h;
        let encoder = self.encoder_layers as f64 * (attention + 2.0 * h * self.encoder_ffn_dim as f64);
        let decoder = self.decoder_layers as f64 * (2.0 * attention + 2.0 * h * self.decoder_ffn_dim as f64);
        (encoder + decoder) / 2.0
    }

    /// fairseq's: GLUE at 5·10⁻⁶ to 2·10⁻⁵ for the large model, summaries at 3·10⁻⁵.
    fn fine_tuning(&self, head: Head) -> FineTuning {
        let learning_rates = if head == Head::Seq2Seq { [5e-5, 3e-5] } else { [3e-5, 1e-5] };
        FineTuning { learning_rates, warmup: 0.06, beta2: 0.98, ..FineTuning::BERT }
    }

    fn targets(&self) -> Option<TargetReading> {
        let (start, end) = (self.decoder_start_token_id, self.eos_token_id);
        Some(TargetReading { start, end, from_source: true })
    }

    fn build(&self, b: &mut Builder, head: Head) -> Model {
        build(b, self, head)
    }
}

fn build(b: &mut Builder, own: &BartConfig, head: Head) -> Model {
    let (h, v, init) = (own.d_model, own.vocab_size, Init::Normal(own.init_std as f32));
    let base = if head == Head::Encoder { "" } else { "model" };
    let (words, encoder, decoder) = b.at(base, |b| {
        let words = b.group(Group::Embeddings, |b| b.padded_table("shared.weight", v, h, init));
        let encoder = b.at("encoder", |b| BartStack::build(b, own, false));
        (words, encoder, b.at("decoder", |b| BartStack::build(b, own, true)))
    });
    let mut parts = HeadParts::default();
    if head == Head::Seq2Seq {
        b.mark_output(words);
        let bias = b.group(Group::Embeddings, |b| b.padded_constants("final_logits_bias", v));
        parts.vocabulary = Some(VocabularyHead::scaled(None, 1.0, VocabularyBias::Constant(bias)));
    }
    parts.classifier = match head {
        Head::Sequence { labels } => Some(Classifier::at_end(b, (h, labels), own.classifier_dropout as f32, init)),
        Head::Span => Some(Classifier::plain(0.0, Linear::build(b, "qa_outputs", h, 2, init))),
        _ => None,
    };
    let cache = CacheSizes { layers: own.decoder_layers, width: h, source: true };
    let network = EncoderDecoder { words, encoder, decoder: Some(decoder), reads_source: true, cache };
    Model::new(ModelConfig::Bart(own.clone()), head, network, parts)
}

/// BART's encoder or decoder.
#[derive(Debug)]
struct BartStack {
    positions: Param,
    norm: Norm,
    /// What vectors of words are multiplied with.
    scale: f32,
    blocks: Vec<BartBlock>,
    dropout: f32,
    /// The first of its dropout sites.
    site: u32,
}

impl BartStack {
    fn build(b: &mut Builder, own: &BartConfig, decoder: bool) -> Self {
        let (h, init) = (own.d_model, Init::Normal(own.init_std as f32));
        let (layers, first, site) =
            if decoder { (own.decoder_layers, own.encoder_layers, DECODER_SITES) } else { (own.encoder_layers, 0, 0) };
        let (positions, norm) = b.group(Group::Embeddings, |b| {
            let rows = own.max_position_embeddings + FIRST_POSITION;
            let positions = b.matrix("embed_positions.weight", rows, h, init);
            (positions, layer_norm(b, "layernorm_embedding", h, EPSILON))
        });
        let block = |i: usize| {
            let (name, own_site) = (format!("layers.{i}"), site + 1 + i as u32 * BLOCK_SITES);
            b.group(Group::Layer(first + i), |b| b.at(&name, |b| BartBlock::build(b, own, decoder, own_site)))
        };
        let blocks = (0..layers).map(block).collect();
        let scale = if own.scale_embedding { (h as f32).sqrt() } else { 1.0 };
        Self { positions, norm, scale, blocks, dropout: own.dropout as f32, site }
    }
}

impl Stack for BartStack {
    fn embed(
        &self,
        pass: &mut Pass<'_>,
        words: Param,
        ids: &Tensor,
        layout: &Layout,
        positions: Option<&Tensor>,
    ) -> Computed<Var> {
        let dropout = (self.dropout, self.site);
        let (position, position_offset) = (Some(self.positions), FIRST_POSITION);
        let tables = EmbeddingTables { word: words, position, position_offset, segment: None };
        if positions.is_none() && self.scale == 1.0 {
            return pass.embeddings_norm(tables, ids, None, layout, &self.norm, dropout);
        }
        let positions = positions.unwrap_or(layout.positions());
        let x = match self.scale == 1.0 {
            true => pass.embeddings(tables, ids, positions, None)?,
            false => {
                let alone =
                    |word, position_offset| EmbeddingTables { word, position: None, position_offset, segment: None };
                let words = pass.embeddings(alone(words, 0), ids, positions, None)?;
                let words = pass.scale(&words, self.scale)?;
                let places = alone(self.positions.from_row(FIRST_POSITION), 0);
                let places = pass.embeddings(places, positions, positions, None)?;
                pass.add_residual(words, &places, layout, (0.0, 0))?
            }
        };
        pass.norm_dropout(x, &self.norm, layout, dropout)
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
    ) -> Computed<Option<Tensor>> {
        let x = flow.value(pass)?;
        let (y, maps) = self.blocks[i].forward(pass, x, flow.layout(), memory, want_maps)?;
        flow.replace(y);
        Ok(maps)
    }

    fn finish(&self, pass: &mut Pass<'_>, mut flow: Flow<'_>) -> Computed<Var> {
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
struct BartBlock {
    self_attention: AttentionLayer,
    self_norm: Norm,
    cross: Option<(AttentionLayer, Norm)>,
    layers: FeedForwardLayers,
    norm: Norm,
    dropout: f32,
    activation_dropout: f32,
    site: u32,
}

impl BartBlock {
    fn build(b: &mut Builder, own: &BartConfig, decoder: bool, site: u32) -> Self {
        const NAMES: [&str; 4] = ["q_proj", "k_proj", "v_proj", "out_proj"];
        let (h, init) = (own.d_model, Init::Normal(own.init_std as f32));
        let (heads, inner) = match decoder {
            true => (own.decoder_attention_heads, own.decoder_ffn_dim),
            false => (own.encoder_attention_heads, own.encoder_ffn_dim),
        };
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
            activation: own.activation_function.into(),
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
    ) -> Computed<(Var, Option<Tensor>)> {
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
