//! BART (Lewis et al. 2020): a post-norm encoder-decoder with biases everywhere and learned positions, whose first two rows are
//! never used. One table of words serves both stacks and the output.
//!
//! Legend: H hidden (`d_model`), A heads, V vocabulary.

use henson_tensor::{Builder, Init};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::config::{FamilyConfig, check_dropouts, check_only, check_sizes};
use crate::heads::Classifier;
use crate::layers::Linear;
use crate::post_norm::{FIRST_POSITION, Positions, PostNormSettings};
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

impl BartConfig {
    fn settings(&self) -> PostNormSettings {
        PostNormSettings {
            vocabulary: self.vocab_size,
            hidden: self.d_model,
            layers: [self.encoder_layers, self.decoder_layers],
            heads: [self.encoder_attention_heads, self.decoder_attention_heads],
            inner: [self.encoder_ffn_dim, self.decoder_ffn_dim],
            positions: Positions::Learned(self.max_position_embeddings),
            scale: self.scale_embedding,
            activation: self.activation_function,
            dropout: self.dropout,
            attention_dropout: self.attention_dropout,
            activation_dropout: self.activation_dropout,
            init: self.init_std,
            reads_source: true,
        }
    }
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
        check_sizes(&[("max_position_embeddings", self.max_position_embeddings, 1 << 20)])?;
        check_dropouts(&[("classifier_dropout", self.classifier_dropout)])?;
        self.settings().check()?;
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
        self.settings().sizes(self.max_position_embeddings)
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
        self.settings().multiply_adds(length)
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
    let (h, init) = (own.d_model, Init::Normal(own.init_std as f32));
    let (network, mut parts) = own.settings().build(b, head);
    parts.classifier = match head {
        Head::Sequence { labels } => Some(Classifier::at_end(b, (h, labels), own.classifier_dropout as f32, init)),
        Head::Span => Some(Classifier::plain(0.0, Linear::build(b, "qa_outputs", h, 2, init))),
        _ => None,
    };
    Model::new(ModelConfig::Bart(own.clone()), head, network, parts)
}
