//! DistilBERT (Sanh et al. 2019): BERT's blocks under names of its own, without segments and without a pooler.
//!
//! Legend: H hidden (`dim`), V vocabulary.

use henson_tensor::{Activation, Builder};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::bert::{fiftieth, tenth};
use crate::config::{FamilyConfig, check_dropouts, check_heads, check_only, check_sizes, own_config};
use crate::encoder::{EncoderSettings, PostNormEncoder, initial_weights};
use crate::heads::{Classifier, HeadParts, VocabularyHead, VocabularyNames};
use crate::layers::{BlockNames, BlockSettings, Linear};
use crate::{ConfigError, Family, Head, HiddenActivation, Model, ModelConfig, Naming, Network, Sizes};

/// DistilBERT as the table of families has it.
pub(crate) static FAMILY: Family = Family {
    types: &[("distilbert", "DistilBert")],
    naming: Naming {
        base_prefix: "distilbert.",
        encoder: &["embeddings.", "transformer."],
        old_endings: &[],
        tied: &[("vocab_projector.weight", "distilbert.embeddings.word_embeddings.weight")],
        ignored_endings: &["embeddings.position_ids"],
    },
    heads: heads!(Encoder, MaskedLm),
    causal: None,
    endings: &[],
    sizes: &[("distilbert-base", of_size)],
    parse: |value| Ok(ModelConfig::DistilBert(serde_json::from_value(value)?)),
};

const BLOCK: BlockNames = BlockNames {
    query_key_value: ["attention.q_lin", "attention.k_lin", "attention.v_lin"],
    attention_output: "attention.out_lin",
    attention_norm: "sa_layer_norm",
    up: "ffn.lin1",
    down: "ffn.lin2",
    norm: "output_layer_norm",
};

/// LayerNorm's epsilon has no key.
const EPSILON: f32 = 1e-12;

/// The sizes and settings of a DistilBERT. Its own names of sizes are written; BERT's are read as well.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DistilBertConfig {
    /// V: tokens of the vocabulary.
    pub vocab_size: usize,
    /// Maximum length of a sequence.
    pub max_position_embeddings: usize,
    /// H.
    #[serde(alias = "hidden_size")]
    pub dim: usize,
    /// Blocks of the encoder.
    #[serde(alias = "num_hidden_layers")]
    pub n_layers: usize,
    /// Attention heads; divide H.
    #[serde(alias = "num_attention_heads")]
    pub n_heads: usize,
    /// Columns inside of the feed-forward layers.
    #[serde(alias = "intermediate_size")]
    pub hidden_dim: usize,
    /// The activation of feed-forward layers and of the masked-LM head.
    #[serde(default, alias = "hidden_act")]
    pub activation: HiddenActivation,
    /// Dropout on embeddings and on the output of feed-forward layers.
    #[serde(default = "tenth")]
    pub dropout: f64,
    /// Dropout on attention's probabilities.
    #[serde(default = "tenth")]
    pub attention_dropout: f64,
    /// Dropout before a span head.
    #[serde(default = "tenth")]
    pub qa_dropout: f64,
    /// Dropout before the last layer of a sequence head and of a choice head.
    #[serde(default = "fifth")]
    pub seq_classif_dropout: f64,
    /// The standard deviation of initial weights.
    #[serde(default = "fiftieth")]
    pub initializer_range: f64,
    /// `distilbert`.
    pub model_type: String,
    /// Keys that we do not know, kept as they are.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

fn fifth() -> f64 {
    0.2
}

/// distilbert-base-uncased.
fn of_size() -> ModelConfig {
    ModelConfig::DistilBert(DistilBertConfig {
        vocab_size: 30522,
        max_position_embeddings: 512,
        dim: 768,
        n_layers: 6,
        n_heads: 12,
        hidden_dim: 3072,
        activation: HiddenActivation::Gelu,
        dropout: 0.1,
        attention_dropout: 0.1,
        qa_dropout: 0.1,
        seq_classif_dropout: 0.2,
        initializer_range: 0.02,
        model_type: "distilbert".to_owned(),
        other: Map::new(),
    })
}

impl FamilyConfig for DistilBertConfig {
    own_config!();

    fn check(&self) -> Result<(), ConfigError> {
        check_sizes(&[
            ("vocab_size", self.vocab_size, 1 << 24),
            ("max_position_embeddings", self.max_position_embeddings, 1 << 20),
            ("dim", self.dim, 1 << 16),
            ("n_layers", self.n_layers, 1 << 10),
            ("n_heads", self.n_heads, 1 << 12),
            ("hidden_dim", self.hidden_dim, 1 << 20),
        ])?;
        check_heads("n_heads", self.n_heads, self.dim)?;
        check_dropouts(&[
            ("dropout", self.dropout),
            ("attention_dropout", self.attention_dropout),
            ("qa_dropout", self.qa_dropout),
            ("seq_classif_dropout", self.seq_classif_dropout),
        ])?;
        check_only(&self.other, &[("is_decoder", Value::from(false)), ("add_cross_attention", Value::from(false))])
    }

    fn sizes(&self) -> Sizes {
        Sizes {
            vocab_size: self.vocab_size,
            hidden_size: self.dim,
            num_hidden_layers: self.n_layers,
            num_attention_heads: self.n_heads,
            intermediate_size: self.hidden_dim,
            max_tokens: self.max_position_embeddings,
            // BERT's tokenizers mark the second text of a pair; the network takes no notice.
            segments: 2,
            hidden_act: self.activation,
            dropout: self.dropout,
            attention_dropout: self.attention_dropout,
            causal: false,
        }
    }

    fn set_vocab_size(&mut self, size: usize) {
        self.vocab_size = size;
    }

    fn set_layers(&mut self, layers: usize) {
        self.n_layers = layers;
    }

    fn set_dropout(&mut self, p: f64) {
        (self.dropout, self.attention_dropout, self.qa_dropout, self.seq_classif_dropout) = (p, p, p, p);
    }
}

fn build(b: &mut Builder, own: &DistilBertConfig, head: Head) -> Model {
    let h = own.dim;
    let (init, task) = initial_weights(own.initializer_range);
    let block = BlockSettings {
        hidden: h,
        intermediate: own.hidden_dim,
        heads: own.n_heads,
        activation: own.activation.into(),
        causal: false,
        dropout: own.dropout as f32,
        attention_output_dropout: 0.0,
        attention_dropout: own.attention_dropout as f32,
        epsilon: EPSILON,
        init,
    };
    let settings = EncoderSettings {
        layer_name: ["transformer.layer.", ""],
        ..EncoderSettings::new([own.vocab_size, own.max_position_embeddings, own.n_layers], BLOCK, block)
    };
    let base = if head == Head::Encoder { "" } else { "distilbert" };
    let network = b.at(base, |b| PostNormEncoder::build(b, &settings));
    let mut parts = HeadParts::default();
    if head == Head::MaskedLm {
        let names =
            VocabularyNames { transform: "vocab_transform", norm: "vocab_layer_norm", bias: "vocab_projector.bias" };
        let sizes = (own.vocab_size, h, h);
        b.mark_output(network.word_table());
        parts.vocabulary = Some(VocabularyHead::build(b, &names, sizes, own.activation.into(), EPSILON, init));
    }
    parts.classifier = match head {
        Head::Sequence { .. } | Head::Choice => {
            let labels = if let Head::Sequence { labels } = head { labels } else { 1 };
            let dense = Linear::build(b, "pre_classifier", h, h, task);
            let out = Linear::build(b, "classifier", h, labels, task);
            let hidden = Some((dense, Activation::Relu));
            Some(Classifier { hidden, ..Classifier::plain(own.seq_classif_dropout as f32, out) })
        }
        Head::Token { labels } => {
            Some(Classifier::plain(own.dropout as f32, Linear::build(b, "classifier", h, labels, task)))
        }
        Head::Span => Some(Classifier::plain(own.qa_dropout as f32, Linear::build(b, "qa_outputs", h, 2, task))),
        _ => None,
    };
    Model::new(ModelConfig::DistilBert(own.clone()), head, network, parts)
}
