//! Marian's translation models (Junczys-Dowmunt et al. 2018), among them all of OPUS-MT: the transformer of Vaswani et al. (2017),
//! with one vocabulary for both languages and one table of words for both stacks and the output. Positions are sines and cosines,
//! which newer files leave out.
//!
//! Legend: H hidden (`d_model`), A heads, V vocabulary.

use henson_tensor::Builder;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::config::{FamilyConfig, check_only, check_sizes, own_config};
use crate::post_norm::{Positions, PostNormSettings};
use crate::{
    ConfigError, Family, FineTuning, Head, HiddenActivation, Model, ModelConfig, Naming, Sizes, SpecialIds,
    TargetReading,
};

/// Marian as the table of families has it.
pub(crate) static FAMILY: Family = Family {
    types: &[("marian", "Marian")],
    naming: Naming {
        base_prefix: "model.",
        encoder: &["shared.", "encoder.", "decoder."],
        old_endings: &[],
        tied: &[
            ("model.encoder.embed_tokens.weight", "model.shared.weight"),
            ("model.decoder.embed_tokens.weight", "model.shared.weight"),
            ("lm_head.weight", "model.shared.weight"),
        ],
        ignored_endings: &["embed_positions.weight"],
    },
    heads: &[Head::Encoder, Head::Seq2Seq],
    causal: None,
    endings: &[(Head::Seq2Seq, "MTModel")],
    // A small one, then those of Vaswani et al. (2017), table 3.
    sizes: &[
        ("transformer-mini", || of_size(4, 256, 4, 1024, 0.1)),
        ("transformer-base", || of_size(6, 512, 8, 2048, 0.1)),
        ("transformer-big", || of_size(6, 1024, 16, 4096, 0.3)),
    ],
    parse: |value| Ok(ModelConfig::Marian(serde_json::from_value(value)?)),
};

/// Rows of sines and cosines at most: they are made, so no file bounds them.
const MOST_POSITIONS: usize = 1 << 14;

/// The sizes and settings of a Marian. A key that is missing has the default of `transformers`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct MarianConfig {
    /// V: tokens of the vocabulary.
    pub vocab_size: usize,
    /// V once more; another one is that of a model with two vocabularies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decoder_vocab_size: Option<usize>,
    /// Whether source and target have one table of words.
    pub share_encoder_decoder_embeddings: bool,
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
    /// The standard deviation of initial weights.
    pub init_std: f64,
    /// Whether vectors of words are multiplied with √H.
    pub scale_embedding: bool,
    /// Padding.
    pub pad_token_id: u32,
    /// What ends a text.
    pub eos_token_id: u32,
    /// What stands before a target: usually padding.
    pub decoder_start_token_id: u32,
    /// `marian`.
    pub model_type: String,
    /// Keys that we do not know, kept as they are.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

impl Default for MarianConfig {
    fn default() -> Self {
        Self {
            vocab_size: 58101,
            decoder_vocab_size: None,
            share_encoder_decoder_embeddings: true,
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
            init_std: 0.02,
            scale_embedding: false,
            pad_token_id: 58100,
            eos_token_id: 0,
            decoder_start_token_id: 58100,
            model_type: "marian".to_owned(),
            other: Map::new(),
        }
    }
}

/// Layers of each stack, H, A, columns of feed-forward layers and dropout, with a vocabulary of 37,000 as for English and German, whose
/// first tokens are those of padding and of the end.
fn of_size(layers: usize, d_model: usize, heads: usize, inner: usize, dropout: f64) -> ModelConfig {
    ModelConfig::Marian(MarianConfig {
        vocab_size: 37_000,
        d_model,
        encoder_layers: layers,
        decoder_layers: layers,
        encoder_attention_heads: heads,
        decoder_attention_heads: heads,
        encoder_ffn_dim: inner,
        decoder_ffn_dim: inner,
        activation_function: HiddenActivation::Relu,
        dropout,
        // So that words count as much as positions, which are of size 1.
        init_std: 1.0 / (d_model as f64).sqrt(),
        scale_embedding: true,
        pad_token_id: 0,
        eos_token_id: 1,
        decoder_start_token_id: 0,
        ..MarianConfig::default()
    })
}

impl MarianConfig {
    fn settings(&self) -> PostNormSettings {
        PostNormSettings {
            vocabulary: self.vocab_size,
            hidden: self.d_model,
            layers: [self.encoder_layers, self.decoder_layers],
            heads: [self.encoder_attention_heads, self.decoder_attention_heads],
            inner: [self.encoder_ffn_dim, self.decoder_ffn_dim],
            positions: Positions::Sinusoids(self.max_position_embeddings),
            scale: self.scale_embedding,
            activation: self.activation_function,
            dropout: self.dropout,
            attention_dropout: self.attention_dropout,
            activation_dropout: self.activation_dropout,
            init: self.init_std,
            reads_source: false,
        }
    }
}

impl FamilyConfig for MarianConfig {
    own_config!();

    fn check(&self) -> Result<(), ConfigError> {
        check_sizes(&[("max_position_embeddings", self.max_position_embeddings, MOST_POSITIONS)])?;
        self.settings().check()?;
        if !self.share_encoder_decoder_embeddings {
            let expected = "true: models with two vocabularies are not supported";
            return Err(ConfigError::value("share_encoder_decoder_embeddings", false, expected));
        }
        if let Some(other) = self.decoder_vocab_size.filter(|other| *other != self.vocab_size) {
            return Err(ConfigError::value("decoder_vocab_size", other, format!("vocab_size, {}", self.vocab_size)));
        }
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
                // Of older files.
                ("normalize_before", no.clone()),
                ("add_final_layer_norm", no.clone()),
                ("normalize_embedding", no.clone()),
                ("static_position_embeddings", Value::from(true)),
                ("add_bias_logits", no),
                ("extra_pos_embeddings", Value::from(0)),
            ],
        )
    }

    fn sizes(&self) -> Sizes {
        self.settings().sizes(self.max_position_embeddings)
    }

    fn set_vocab_size(&mut self, size: usize) {
        self.vocab_size = size;
        self.decoder_vocab_size = self.decoder_vocab_size.map(|_| size);
    }

    /// A target begins with padding, or with its end where there is none.
    fn set_special_ids(&mut self, ids: SpecialIds) {
        (self.eos_token_id, self.pad_token_id) = (ids.end, ids.padding.unwrap_or(ids.end));
        self.decoder_start_token_id = self.pad_token_id;
        self.other.insert("forced_eos_token_id".to_owned(), Value::from(ids.end));
    }

    fn set_layers(&mut self, layers: usize) {
        (self.encoder_layers, self.decoder_layers) = (layers, layers);
    }

    fn set_dropout(&mut self, p: f64) {
        (self.dropout, self.attention_dropout, self.activation_dropout) = (p, p, p);
    }

    fn can_average(&self) -> bool {
        false
    }

    /// The mean of a token of a source and one of a target of the same length.
    fn multiply_adds(&self, length: usize) -> f64 {
        self.settings().multiply_adds(length)
    }

    fn fine_tuning(&self, _head: Head) -> FineTuning {
        FineTuning { learning_rates: [5e-5, 3e-5], warmup: 0.06, beta2: 0.98, ..FineTuning::BERT }
    }

    fn targets(&self) -> Option<TargetReading> {
        let (start, end) = (self.decoder_start_token_id, self.eos_token_id);
        Some(TargetReading { start, end, from_source: false })
    }
}

fn build(b: &mut Builder, own: &MarianConfig, head: Head) -> Model {
    let (network, parts) = own.settings().build(b, head);
    Model::new(ModelConfig::Marian(own.clone()), head, network, parts)
}
