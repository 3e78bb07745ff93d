//! T5 (Raffel et al. 2020), T5 v1.1, Flan-T5 and mT5: pre-norm encoder-decoders without biases, whose attention knows positions
//! by a bias for each distance. The first version's feed-forward layers have a ReLU and its output is the table of words; later ones
//! have a gate and a table of their own.
//!
//! Legend: T tokens in the flat batch, H hidden (`d_model`), A heads, D head size (`d_kv`), V vocabulary.

use henson_tensor::{
    Builder, EmbeddingTables, Group, Init, Layout, Norm, Param, Pass, Result as Computed, Tensor, Var,
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::blocks::{AttentionLayer, Memory, T5_SITES, T5Block, T5Settings, norm_without_bias};
use crate::config::{FamilyConfig, check_dropouts, check_epsilon, check_only, check_sizes};
use crate::decoder::CacheSizes;
use crate::encoder_decoder::{DECODER_SITES, EncoderDecoder, Flow, Stack};
use crate::heads::{Classifier, HeadParts, VocabularyBias, VocabularyHead};
use crate::layers::Linear;
use crate::{
    ConfigError, Family, FineTuning, Head, HiddenActivation, Model, ModelConfig, Naming, Sizes, SpecialIds,
    TargetReading,
};

/// T5 as the table of families has it.
pub(crate) static FAMILY: Family = Family {
    types: &[("t5", "T5"), ("mt5", "MT5")],
    naming: Naming {
        // Of classifiers alone.
        base_prefix: "transformer.",
        encoder: &["shared.", "encoder."],
        old_endings: &[],
        tied: &[
            ("encoder.embed_tokens.weight", "shared.weight"),
            ("decoder.embed_tokens.weight", "shared.weight"),
            ("lm_head.weight", "shared.weight"),
        ],
        // A table that the first files have and nothing ever used.
        ignored_endings: &["EncDecAttention.relative_attention_bias.weight"],
    },
    heads: &[Head::Encoder, Head::Seq2Seq, Head::Sequence { labels: 0 }, Head::Token { labels: 0 }, Head::Span],
    causal: None,
    endings: &[(Head::Encoder, "EncoderModel")],
    // Small ones to train from scratch, the paper's, and those of version 1.1, which are Flan-T5's as well.
    sizes: &[
        ("t5-mini", || of_size("t5", [256, 1024, 64, 4, 4])),
        ("t5-v1_1-mini", || of_size("t5-v1_1", [256, 512, 64, 4, 4])),
        ("t5-small", || of_size("t5", [512, 2048, 64, 6, 8])),
        ("t5-base", || of_size("t5", [768, 3072, 64, 12, 12])),
        ("t5-large", || of_size("t5", [1024, 4096, 64, 24, 16])),
        ("t5-3b", || of_size("t5", [1024, 16384, 128, 24, 32])),
        ("t5-11b", || of_size("t5", [1024, 65536, 128, 24, 128])),
        ("t5-v1_1-small", || of_size("t5-v1_1", [512, 1024, 64, 8, 6])),
        ("t5-v1_1-base", || of_size("t5-v1_1", [768, 2048, 64, 12, 12])),
        ("t5-v1_1-large", || of_size("t5-v1_1", [1024, 2816, 64, 24, 16])),
        ("t5-v1_1-xl", || of_size("t5-v1_1", [2048, 5120, 64, 24, 32])),
        ("t5-v1_1-xxl", || of_size("t5-v1_1", [4096, 10240, 64, 24, 64])),
        ("mt5-small", || of_size("mt5", [512, 1024, 64, 8, 6])),
        ("mt5-base", || of_size("mt5", [768, 2048, 64, 12, 12])),
        ("mt5-large", || of_size("mt5", [1024, 2816, 64, 24, 16])),
    ],
    parse: |value| Ok(ModelConfig::T5(serde_json::from_value(with_defaults(value))?)),
};

/// Positions have no table: no length is too long but for memory. `n_positions` in older files is the length of pre-training.
const MAX_TOKENS: usize = 4096;

/// The sizes and settings of a T5. A key that is missing has the default of `transformers`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct T5Config {
    /// V: tokens of the vocabulary.
    pub vocab_size: usize,
    /// H.
    pub d_model: usize,
    /// D; A·D need not be H.
    pub d_kv: usize,
    /// Columns inside of the feed-forward layers.
    pub d_ff: usize,
    /// Blocks of the encoder.
    pub num_layers: usize,
    /// Blocks of the decoder; as many where it is not there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_decoder_layers: Option<usize>,
    /// A.
    pub num_heads: usize,
    /// Rows of the tables of biases.
    pub relative_attention_num_buckets: usize,
    /// The distance from which on all share a row.
    pub relative_attention_max_distance: usize,
    /// All dropout.
    pub dropout_rate: f64,
    /// Dropout of classifiers: of a token's vector, and on both sides of the hidden layer for sequences.
    pub classifier_dropout: f64,
    /// Added to the mean square in RMSNorm.
    pub layer_norm_epsilon: f64,
    /// A factor on the standard deviations of initial weights.
    pub initializer_factor: f64,
    /// The activation, behind `gated-` where the layer has a gate.
    pub feed_forward_proj: String,
    /// Whether the output's table is that of the words; newer files always say so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tie_word_embeddings: Option<bool>,
    /// The same in newer files: what goes to the words' table is scaled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scale_decoder_outputs: Option<bool>,
    /// What stands before a target.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decoder_start_token_id: Option<u32>,
    /// Padding.
    pub pad_token_id: u32,
    /// What ends a text.
    pub eos_token_id: u32,
    /// `t5` or `mt5`.
    pub model_type: String,
    /// Keys that we do not know, kept as they are.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

impl Default for T5Config {
    fn default() -> Self {
        Self {
            vocab_size: 32128,
            d_model: 512,
            d_kv: 64,
            d_ff: 2048,
            num_layers: 6,
            num_decoder_layers: None,
            num_heads: 8,
            relative_attention_num_buckets: 32,
            relative_attention_max_distance: 128,
            dropout_rate: 0.1,
            classifier_dropout: 0.0,
            layer_norm_epsilon: 1e-6,
            initializer_factor: 1.0,
            feed_forward_proj: "relu".to_owned(),
            tie_word_embeddings: None,
            scale_decoder_outputs: None,
            decoder_start_token_id: None,
            pad_token_id: 0,
            eos_token_id: 1,
            model_type: "t5".to_owned(),
            other: Map::new(),
        }
    }
}

/// mT5's defaults, where keys are missing; T5's are those of [`T5Config`].
fn with_defaults(mut value: Value) -> Value {
    if let Some(keys) = value.as_object_mut().filter(|keys| keys.get("model_type") == Some(&Value::from("mt5"))) {
        let sizes = [("vocab_size", 250_112), ("d_ff", 1024), ("num_layers", 8), ("num_heads", 6)];
        for (key, size) in sizes {
            keys.entry(key).or_insert(Value::from(size));
        }
        keys.entry("feed_forward_proj").or_insert(Value::from("gated-gelu"));
    }
    value
}

/// A version with H, columns of feed-forward layers, D, layers of each stack and A.
fn of_size(version: &str, [d_model, d_ff, d_kv, num_layers, num_heads]: [usize; 5]) -> ModelConfig {
    let first = T5Config { d_model, d_ff, d_kv, num_layers, num_heads, ..T5Config::default() };
    let first = T5Config {
        num_decoder_layers: Some(num_layers),
        tie_word_embeddings: Some(version == "t5"),
        decoder_start_token_id: Some(0),
        ..first
    };
    let gated = T5Config { feed_forward_proj: "gated-gelu".to_owned(), ..first.clone() };
    ModelConfig::T5(match version {
        "t5" => first,
        "mt5" => T5Config { vocab_size: 250_112, model_type: version.to_owned(), ..gated },
        _ => gated,
    })
}

impl T5Config {
    fn decoder_layers(&self) -> usize {
        self.num_decoder_layers.unwrap_or(self.num_layers)
    }

    /// Whether the output's table is that of the words: a later version has its own, and no factor.
    fn is_tied(&self) -> bool {
        let says = self.scale_decoder_outputs.unwrap_or(self.tie_word_embeddings != Some(false));
        self.model_type == "t5" && says
    }

    /// The activation of the feed-forward layers, and whether there is a gate.
    fn feed_forward(&self) -> Result<(HiddenActivation, bool), ConfigError> {
        let (name, gated) = match self.feed_forward_proj.strip_prefix("gated-") {
            // As in `transformers`: the gate's GELU is the tanh form.
            Some("gelu") => ("gelu_new", true),
            Some(name) => (name, true),
            None => (self.feed_forward_proj.as_str(), false),
        };
        let known = serde_json::from_value(Value::from(name)).map_err(|_| {
            let expected = "relu, gelu, gelu_new, silu or tanh, alone or behind `gated-`";
            ConfigError::value("feed_forward_proj", &self.feed_forward_proj, expected)
        })?;
        Ok((known, gated))
    }
}

impl FamilyConfig for T5Config {
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
            ("d_model", self.d_model, 1 << 16),
            ("d_kv", self.d_kv, 1 << 12),
            ("d_ff", self.d_ff, 1 << 20),
            ("num_layers", self.num_layers, 1 << 10),
            ("num_decoder_layers", self.decoder_layers(), 1 << 10),
            ("num_heads", self.num_heads, 1 << 12),
            ("relative_attention_num_buckets", self.relative_attention_num_buckets, 1 << 12),
            ("relative_attention_max_distance", self.relative_attention_max_distance, 1 << 20),
        ])?;
        let (buckets, reach) = (self.relative_attention_num_buckets, self.relative_attention_max_distance);
        // Half of a side's buckets are for one distance each; the logarithms of the rest need a longer reach.
        if !buckets.is_multiple_of(4) {
            return Err(ConfigError::value("relative_attention_num_buckets", buckets, "a multiple of 4"));
        }
        if reach <= buckets / 2 {
            let expected = format!("more than half of relative_attention_num_buckets, {}", buckets / 2);
            return Err(ConfigError::value("relative_attention_max_distance", reach, expected));
        }
        self.feed_forward()?;
        check_dropouts(&[("dropout_rate", self.dropout_rate), ("classifier_dropout", self.classifier_dropout)])?;
        check_epsilon("layer_norm_epsilon", self.layer_norm_epsilon)?;
        let ids = [("pad_token_id", self.pad_token_id), ("eos_token_id", self.eos_token_id)];
        let start = self.decoder_start_token_id.map(|id| ("decoder_start_token_id", id));
        if let Some((key, id)) = ids.into_iter().chain(start).find(|(_, id)| *id as usize >= self.vocab_size) {
            return Err(ConfigError::value(key, id, format!("less than vocab_size, {}", self.vocab_size)));
        }
        check_only(&self.other, &[("is_decoder", Value::from(false))])
    }

    fn sizes(&self) -> Sizes {
        Sizes {
            vocab_size: self.vocab_size,
            hidden_size: self.d_model,
            num_hidden_layers: self.num_layers,
            num_attention_heads: self.num_heads,
            intermediate_size: self.d_ff,
            max_tokens: MAX_TOKENS,
            segments: 1,
            hidden_act: self.feed_forward().map_or(HiddenActivation::Relu, |(activation, _)| activation),
            dropout: self.dropout_rate,
            attention_dropout: self.dropout_rate,
            causal: false,
        }
    }

    fn set_vocab_size(&mut self, size: usize) {
        self.vocab_size = size;
    }

    /// A target begins with padding, or with its end where there is none.
    fn set_special_ids(&mut self, ids: SpecialIds) {
        self.eos_token_id = ids.end;
        self.pad_token_id = ids.padding.unwrap_or(ids.end);
        self.decoder_start_token_id = Some(self.pad_token_id);
    }

    fn set_layers(&mut self, layers: usize) {
        (self.num_layers, self.num_decoder_layers) = (layers, Some(layers));
    }

    fn set_dropout(&mut self, p: f64) {
        (self.dropout_rate, self.classifier_dropout) = (p, p);
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
        let [h, i, length] = [self.d_model, self.d_ff, length].map(|size| size as f64);
        let inner = (self.num_heads * self.d_kv) as f64;
        let gates = if self.feed_forward().is_ok_and(|(_, gated)| gated) { 3.0 } else { 2.0 };
        let (attention, rest) = (4.0 * h * inner + 2.0 * length * inner, gates * h * i);
        let layers = [self.num_layers, self.decoder_layers()].map(|layers| layers as f64);
        (layers[0] * (attention + rest) + layers[1] * (2.0 * attention + rest)) / 2.0
    }

    /// With AdamW; T5's authors used Adafactor at a constant 10⁻³.
    fn fine_tuning(&self, _head: Head) -> FineTuning {
        FineTuning {
            learning_rates: [3e-4, 1e-4],
            warmup: 0.05,
            weight_decay: 0.0,
            text_to_text: true,
            ..FineTuning::BERT
        }
    }

    fn targets(&self) -> Option<TargetReading> {
        let start = self.decoder_start_token_id.unwrap_or(self.pad_token_id);
        Some(TargetReading { start, end: self.eos_token_id, from_source: true })
    }

    fn build(&self, b: &mut Builder, head: Head) -> Model {
        build(b, self, head)
    }
}

fn build(b: &mut Builder, own: &T5Config, head: Head) -> Model {
    let (h, v, factor) = (own.d_model, own.vocab_size, own.initializer_factor as f32);
    // The config was checked.
    let (activation, gated) = own.feed_forward().unwrap_or((HiddenActivation::Relu, false));
    let settings = T5Settings {
        hidden: h,
        intermediate: own.d_ff,
        heads: own.num_heads,
        head_size: own.d_kv,
        buckets: own.relative_attention_num_buckets as u32,
        max_distance: own.relative_attention_max_distance as u32,
        activation: activation.into(),
        gated,
        epsilon: own.layer_norm_epsilon as f32,
        dropout: own.dropout_rate as f32,
        initializer_factor: factor,
    };
    let (n, m) = (own.num_layers, own.decoder_layers());
    let base = if matches!(head, Head::Sequence { .. } | Head::Token { .. }) { "transformer" } else { "" };
    let has_decoder = matches!(head, Head::Seq2Seq | Head::Sequence { .. } | Head::Span);
    let (words, encoder, decoder) = b.at(base, |b| {
        let words = b.group(Group::Embeddings, |b| b.padded_table("shared.weight", v, h, Init::Normal(factor)));
        let encoder = b.at("encoder", |b| T5Stack::build(b, settings, false, (n, 0), 0));
        let decoder = |b: &mut Builder| T5Stack::build(b, settings, true, (m, n), DECODER_SITES);
        (words, encoder, has_decoder.then(|| b.at("decoder", decoder)))
    });
    let mut parts = HeadParts::default();
    if head == Head::Seq2Seq {
        let root = (h as f32).sqrt();
        let (table, scale) = if own.is_tied() {
            b.mark_output(words);
            (None, 1.0 / root)
        } else {
            // Without the factor, so that logits start as they do with it. Newer `transformers` ties it when it makes a model.
            let table = b.padded_table("lm_head.weight", v, h, Init::Normal(factor / root));
            b.otherwise(table, words);
            (Some(table), 1.0)
        };
        parts.vocabulary = Some(VocabularyHead::scaled(table, scale, VocabularyBias::None));
    }
    // As `transformers` starts them.
    let (init, dropout) = (Init::Normal(factor / (h as f32).sqrt()), own.classifier_dropout as f32);
    parts.classifier = match head {
        Head::Sequence { labels } => Some(Classifier::at_end(b, (h, labels), dropout, init)),
        Head::Token { labels } => Some(Classifier::plain(dropout, Linear::build(b, "classifier", h, labels, init))),
        Head::Span => Some(Classifier::plain(0.0, Linear::build(b, "qa_outputs", h, 2, init))),
        _ => None,
    };
    let cache = CacheSizes { layers: m, width: own.num_heads * own.d_kv, source: true };
    let reads_source = matches!(head, Head::Sequence { .. } | Head::Span);
    let network = EncoderDecoder { words, encoder, decoder, reads_source, cache };
    Model::new(ModelConfig::T5(own.clone()), head, network, parts)
}

/// T5's encoder or decoder.
#[derive(Debug)]
struct T5Stack {
    blocks: Vec<T5Block>,
    norm: Norm,
    dropout: f32,
    /// The first of its dropout sites.
    site: u32,
}

impl T5Stack {
    /// So many blocks, the first of which is the layer of this number in the whole model.
    fn build(b: &mut Builder, settings: T5Settings, decoder: bool, (layers, first): (usize, usize), site: u32) -> Self {
        let mut blocks: Vec<T5Block> = Vec::with_capacity(layers);
        for i in 0..layers {
            let bias = blocks.first().and_then(T5Block::bias);
            let own = site + 2 + i as u32 * T5_SITES;
            let name = format!("block.{i}");
            let build = |b: &mut Builder| b.at(&name, |b| T5Block::build(b, settings, decoder, bias, own));
            blocks.push(b.group(Group::Layer(first + i), build));
        }
        let last = Group::Layer((first + layers).saturating_sub(1));
        let norm = |b: &mut Builder| norm_without_bias(b, "final_layer_norm", settings.hidden, settings.epsilon, false);
        Self { blocks, norm: b.group(last, norm), dropout: settings.dropout, site }
    }
}

impl Stack for T5Stack {
    fn embed(
        &self,
        pass: &mut Pass<'_>,
        words: Param,
        ids: &Tensor,
        layout: &Layout,
        _positions: Option<&Tensor>,
    ) -> Computed<Var> {
        let tables = EmbeddingTables { word: words, position: None, position_offset: 0, segment: None };
        let x = pass.embeddings(tables, ids, layout.positions(), None)?;
        pass.dropout_tokens(x, layout, (self.dropout, self.site))
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
        self.blocks[i].apply(pass, flow, memory, want_maps)
    }

    fn finish(&self, pass: &mut Pass<'_>, flow: Flow<'_>) -> Computed<Var> {
        flow.finish(pass, &self.norm, (self.dropout, self.site + 1))
    }

    fn cross(&self, i: usize) -> Option<&AttentionLayer> {
        self.blocks.get(i).and_then(T5Block::cross)
    }
}
