//! LSTM language models (Zaremba et al. 2014): vectors of tokens, LSTM layers from left to right, and a table for the next token.
//! Dropout falls on what goes in and out of layers, never on what they say to themselves. No class of `transformers` is like it; layers
//! have the names of `torch.nn.LSTM`.
//!
//! Legend: T tokens in the flat batch, H hidden, N new tokens, V vocabulary.

use henson_tensor::{
    Builder, Cell, EmbeddingTables, Group, Init, Layout, Param, Parameters, Pass, Result, Tensor, TensorError, Var,
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::config::{FamilyConfig, Recurrence, check_dropouts, check_sizes, own_config};
use crate::gpt::{only_causal, set_special_ids};
use crate::heads::{HeadParts, VocabularyBias, VocabularyHead};
use crate::recurrent::{RecurrentSettings, RecurrentStack};
use crate::{
    Batch, CacheSizes, Capture, ConfigError, Decoder, DecoderCache, Encoded, Family, Head, HiddenActivation, Model,
    ModelConfig, Naming, Network, NewTokens, Sizes, SpecialIds,
};

/// LSTM language models as the table of families has them.
pub(crate) static FAMILY: Family = Family {
    types: &[("lstm-lm", "Lstm")],
    naming: Naming {
        base_prefix: "lstm.",
        encoder: &["embeddings.", "layers."],
        old_endings: &[],
        tied: &[("lm_head.weight", "lstm.embeddings.weight")],
        ignored_endings: &[],
    },
    heads: &[Head::Encoder, Head::MaskedLm],
    causal: Some("LMHeadModel"),
    endings: &[(Head::MaskedLm, "LMHeadModel")],
    // Zaremba et al. (2014), section 4.1: units, dropout, and the bound of initial weights.
    sizes: &[
        ("lstm-small", || of_size(200, 0.0, 0.1)),
        ("lstm-medium", || of_size(650, 0.5, 0.05)),
        ("lstm-large", || of_size(1500, 0.65, 0.04)),
    ],
    parse: |value| Ok(ModelConfig::LstmLm(serde_json::from_value(value)?)),
};

/// Dropout sites: that of tokens' vectors, the first of those between layers, and that of the last layer's output.
const TOKEN_SITE: u32 = 0;
const LAYER_SITES: u32 = 1;
const OUTPUT_SITE: u32 = 0x100;

/// The sizes and settings of an LSTM language model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LstmLmConfig {
    /// V: tokens of the vocabulary.
    pub vocab_size: usize,
    /// H: units of a layer, and numbers of a token's vector.
    pub hidden_size: usize,
    /// Layers.
    pub num_hidden_layers: usize,
    /// Maximum length of a sequence; the network itself has no limit.
    pub max_position_embeddings: usize,
    /// Dropout of tokens' vectors, between layers and of the last one's output.
    pub dropout: f64,
    /// Initial weights lie evenly between this number and its negative.
    pub initializer_range: f64,
    /// Whether the table for the next token is that of tokens' vectors.
    pub tie_word_embeddings: bool,
    /// `lstm-lm`.
    pub model_type: String,
    /// Keys that we do not know, kept as they are.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

impl Default for LstmLmConfig {
    fn default() -> Self {
        Self {
            vocab_size: 10_000,
            hidden_size: 200,
            num_hidden_layers: 2,
            max_position_embeddings: 4096,
            dropout: 0.0,
            initializer_range: 0.1,
            tie_word_embeddings: false,
            model_type: "lstm-lm".to_owned(),
            other: Map::new(),
        }
    }
}

fn of_size(hidden_size: usize, dropout: f64, initializer_range: f64) -> ModelConfig {
    ModelConfig::LstmLm(LstmLmConfig { hidden_size, dropout, initializer_range, ..LstmLmConfig::default() })
}

impl FamilyConfig for LstmLmConfig {
    own_config!();

    fn check(&self) -> std::result::Result<(), ConfigError> {
        check_sizes(&[
            ("vocab_size", self.vocab_size, 1 << 24),
            ("hidden_size", self.hidden_size, 1 << 14),
            ("num_hidden_layers", self.num_hidden_layers, 1 << 6),
            ("max_position_embeddings", self.max_position_embeddings, 1 << 20),
        ])?;
        check_dropouts(&[("dropout", self.dropout)])?;
        match self.initializer_range > 0.0 && self.initializer_range <= 10.0 {
            true => Ok(()),
            false => Err(ConfigError::value("initializer_range", self.initializer_range, "above 0 and at most 10")),
        }
    }

    fn sizes(&self) -> Sizes {
        Sizes {
            vocab_size: self.vocab_size,
            hidden_size: self.hidden_size,
            num_hidden_layers: self.num_hidden_layers,
            num_attention_heads: 1,
            intermediate_size: 4 * self.hidden_size,
            max_tokens: self.max_position_embeddings,
            // A tokenizer may mark the second text of a pair; the network takes no notice.
            segments: 2,
            hidden_act: HiddenActivation::Tanh,
            dropout: self.dropout,
            attention_dropout: 0.0,
            causal: true,
        }
    }

    fn set_vocab_size(&mut self, size: usize) {
        self.vocab_size = size;
    }

    fn set_special_ids(&mut self, ids: SpecialIds) {
        set_special_ids(&mut self.other, ids);
    }

    fn set_layers(&mut self, layers: usize) {
        self.num_hidden_layers = layers;
    }

    fn set_dropout(&mut self, p: f64) {
        self.dropout = p;
    }

    fn set_causal(&mut self, causal: bool) -> std::result::Result<(), ConfigError> {
        only_causal(&self.model_type, causal)
    }

    fn can_average(&self) -> bool {
        false
    }

    /// Those of the gates, by what tokens say and by what states do.
    fn multiply_adds(&self, _length: usize) -> f64 {
        let h = self.hidden_size as f64;
        self.num_hidden_layers as f64 * 8.0 * h * h
    }

    fn in_transformers(&self) -> bool {
        false
    }

    fn recurrence(&self) -> Recurrence {
        Recurrence::Layers
    }

    fn carries_states(&self) -> bool {
        true
    }
}

fn build(b: &mut Builder, own: &LstmLmConfig, head: Head) -> Model {
    let base = if head == Head::Encoder { "" } else { "lstm" };
    let network = b.at(base, |b| LstmLm::build(b, own));
    let mut parts = HeadParts::default();
    if head == Head::MaskedLm {
        let init = Init::Uniform(own.initializer_range as f32);
        let table =
            (!own.tie_word_embeddings).then(|| b.padded_table("lm_head.weight", own.vocab_size, own.hidden_size, init));
        if table.is_none() {
            b.mark_output(network.words);
        }
        let bias = b.padded_vector("lm_head.bias", own.vocab_size, Init::Zeros);
        parts.vocabulary = Some(VocabularyHead::scaled(table, 1.0, VocabularyBias::Trained(bias)));
    }
    Model::new(ModelConfig::LstmLm(own.clone()), head, network, parts)
}

/// Views into the parameters.
#[derive(Debug)]
struct LstmLm {
    words: Param,
    layers: RecurrentStack,
    dropout: f32,
    sizes: CacheSizes,
}

impl LstmLm {
    fn build(b: &mut Builder, own: &LstmLmConfig) -> Self {
        let (h, dropout, init) = (own.hidden_size, own.dropout as f32, Init::Uniform(own.initializer_range as f32));
        let words =
            b.group(Group::Embeddings, |b| b.at("embeddings", |b| b.padded_table("weight", own.vocab_size, h, init)));
        let settings = RecurrentSettings {
            dropout,
            site: LAYER_SITES,
            init: Some(init),
            ..RecurrentSettings::new(Cell::Lstm, h, h, own.num_hidden_layers)
        };
        let layers = b.at("layers", |b| RecurrentStack::build(b, settings));
        Self { words, layers, dropout, sizes: CacheSizes { layers: own.num_hidden_layers, width: h, source: false } }
    }

    /// Vectors of tokens.
    fn embed(&self, pass: &mut Pass<'_>, ids: &Tensor, layout: &Layout) -> Result<Var> {
        let tables = EmbeddingTables { word: self.words, position: None, position_offset: 0, segment: None };
        let x = pass.embeddings(tables, ids, layout.positions(), None)?;
        pass.dropout_tokens(x, layout, (self.dropout, TOKEN_SITE))
    }
}

impl Network for LstmLm {
    fn encode(&self, pass: &mut Pass<'_>, batch: &Batch, capture: Capture) -> Result<Encoded> {
        if capture.attention_maps {
            let why = "a recurrent network attends to nothing";
            return Err(TensorError::Unsupported { operation: "encode", why });
        }
        let x = self.embed(pass, &batch.ids, &batch.layout)?;
        let mut hidden_states = Vec::new();
        if capture.hidden_states {
            hidden_states.push(x.clone());
        }
        let (outputs, states) = self.layers.layers_from(pass, x, &batch.layout, &batch.states)?;
        let last = outputs.last().cloned();
        if capture.hidden_states {
            hidden_states.extend(outputs);
        }
        let why = "a network without layers";
        let last = last.ok_or(TensorError::Unsupported { operation: "encode", why })?;
        let last = pass.dropout_tokens(last, &batch.layout, (self.dropout, OUTPUT_SITE))?;
        Ok(Encoded { last, hidden_states, attention_maps: Vec::new(), states })
    }

    fn encode_rows(&self, pass: &mut Pass<'_>, batch: &Batch, rows: &Tensor) -> Result<Var> {
        let last = self.encode(pass, batch, Capture::default())?.last;
        pass.gather(&last, rows)
    }

    fn average_in_last_layer(&self, _: &mut Parameters) -> Result<()> {
        let why = "a recurrent layer cannot be one that averages";
        Err(TensorError::Unsupported { operation: "average", why })
    }

    fn word_table(&self) -> Param {
        self.words
    }

    fn decoder(&self) -> Option<&dyn Decoder> {
        Some(self)
    }
}

impl Decoder for LstmLm {
    /// The states of layers have the place of keys, their cells that of values; only a sequence's last ones are read.
    fn cache_sizes(&self) -> CacheSizes {
        self.sizes
    }

    /// Where states are kept in the cache is found on the host.
    fn is_recordable(&self) -> bool {
        false
    }

    fn step(&self, pass: &mut Pass<'_>, new: &NewTokens, cache: &mut DecoderCache) -> Result<Var> {
        let x = self.embed(pass, &new.ids, &new.layout)?;
        let states = (0..self.sizes.layers).map(|i| pass.kept_state(&cache.written, i, Some(&new.layout), true));
        let states = states.collect::<Result<Vec<_>>>()?;
        let (out, states) = self.layers.forward_from(pass, x, &new.layout, &states)?;
        for (i, state) in states.iter().enumerate() {
            pass.keep_state(&mut cache.written, i, state)?;
        }
        Ok(out)
    }
}
