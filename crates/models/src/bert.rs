//! BERT (Devlin et al. 2019): a bidirectional encoder with post-norm blocks, and its heads. Losses are not here.
//!
//! Legend: H hidden, A heads, L layers, V vocabulary.

use henson_tensor::{Activation, Builder, Group};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::boundary::BoundaryHead;
use crate::config::{FamilyConfig, check_dropouts, check_epsilon, check_only, check_sizes, own_config};
use crate::encoder::{EncoderSettings, PostNormEncoder, initial_weights};
use crate::heads::{Classifier, HeadParts, VocabularyHead, VocabularyNames};
use crate::layers::{BlockNames, BlockSettings, Linear};
use crate::{ConfigError, Family, Head, HiddenActivation, Model, ModelConfig, Naming, Sizes};

/// BERT as the table of families has it.
pub(crate) static FAMILY: Family = Family {
    types: &[("bert", "Bert")],
    naming: Naming {
        base_prefix: "bert.",
        encoder: &["embeddings.", "encoder."],
        old_endings: &[("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")],
        tied: &[
            ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
            ("cls.predictions.decoder.bias", "cls.predictions.bias"),
        ],
        ignored_endings: &["embeddings.position_ids", "embeddings.token_type_ids"],
    },
    heads: heads!(Pooler, Encoder, PreTraining, MaskedLm, SpanBoundary),
    causal: Some("LMHeadModel"),
    endings: &[],
    // The paper's sizes with the smaller ones that have names; then all 24 of Turc et al. (2019) by layers and width, a head
    // for every 64 columns.
    sizes: &[
        ("bert-tiny", || of_size(2, 128, 2)),
        ("bert-mini", || of_size(4, 256, 4)),
        ("bert-small", || of_size(4, 512, 8)),
        ("bert-medium", || of_size(8, 512, 8)),
        ("bert-base", || of_size(12, 768, 12)),
        ("bert-large", || of_size(24, 1024, 16)),
        ("bert-L2-H128", || of_size(2, 128, 2)),
        ("bert-L2-H256", || of_size(2, 256, 4)),
        ("bert-L2-H512", || of_size(2, 512, 8)),
        ("bert-L2-H768", || of_size(2, 768, 12)),
        ("bert-L4-H128", || of_size(4, 128, 2)),
        ("bert-L4-H256", || of_size(4, 256, 4)),
        ("bert-L4-H512", || of_size(4, 512, 8)),
        ("bert-L4-H768", || of_size(4, 768, 12)),
        ("bert-L6-H128", || of_size(6, 128, 2)),
        ("bert-L6-H256", || of_size(6, 256, 4)),
        ("bert-L6-H512", || of_size(6, 512, 8)),
        ("bert-L6-H768", || of_size(6, 768, 12)),
        ("bert-L8-H128", || of_size(8, 128, 2)),
        ("bert-L8-H256", || of_size(8, 256, 4)),
        ("bert-L8-H512", || of_size(8, 512, 8)),
        ("bert-L8-H768", || of_size(8, 768, 12)),
        ("bert-L10-H128", || of_size(10, 128, 2)),
        ("bert-L10-H256", || of_size(10, 256, 4)),
        ("bert-L10-H512", || of_size(10, 512, 8)),
        ("bert-L10-H768", || of_size(10, 768, 12)),
        ("bert-L12-H128", || of_size(12, 128, 2)),
        ("bert-L12-H256", || of_size(12, 256, 4)),
        ("bert-L12-H512", || of_size(12, 512, 8)),
        ("bert-L12-H768", || of_size(12, 768, 12)),
    ],
    parse: |value| Ok(ModelConfig::Bert(serde_json::from_value(value)?)),
};

/// The names of a block.
pub(crate) const BLOCK: BlockNames = BlockNames {
    query_key_value: ["attention.self.query", "attention.self.key", "attention.self.value"],
    attention_output: "attention.output.dense",
    attention_norm: "attention.output.LayerNorm",
    up: "intermediate.dense",
    down: "output.dense",
    norm: "output.LayerNorm",
};

/// The names of the masked-LM head.
pub(crate) const PREDICTIONS: VocabularyNames = VocabularyNames {
    transform: "cls.predictions.transform.dense",
    norm: "cls.predictions.transform.LayerNorm",
    bias: "cls.predictions.bias",
};

/// The sizes and settings of a BERT.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BertConfig {
    /// V: tokens of the vocabulary.
    pub vocab_size: usize,
    /// H.
    pub hidden_size: usize,
    /// L: blocks of the encoder.
    pub num_hidden_layers: usize,
    /// A; divides H.
    pub num_attention_heads: usize,
    /// Columns inside of the feed-forward layers, 4·H in the paper.
    pub intermediate_size: usize,
    /// The activation of feed-forward layers and of the masked-LM head.
    #[serde(default)]
    pub hidden_act: HiddenActivation,
    /// Dropout on embeddings and on the output of each half of a block.
    #[serde(default = "tenth")]
    pub hidden_dropout_prob: f64,
    /// Dropout on attention's probabilities.
    #[serde(default = "tenth")]
    pub attention_probs_dropout_prob: f64,
    /// Maximum length of a sequence.
    pub max_position_embeddings: usize,
    /// Segments: sentence A and sentence B.
    #[serde(default = "two")]
    pub type_vocab_size: usize,
    /// The standard deviation of initial weights.
    #[serde(default = "fiftieth")]
    pub initializer_range: f64,
    /// Added to the variance in LayerNorm.
    #[serde(default = "tiny")]
    pub layer_norm_eps: f64,
    /// Whether a token sees only what stands before it; the paper's left-to-right ablation.
    #[serde(default)]
    pub is_decoder: bool,
    /// Dropout before a classifier, where it differs from `hidden_dropout_prob`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub classifier_dropout: Option<f64>,
    /// `bert`.
    #[serde(default = "bert")]
    pub model_type: String,
    /// Keys that we do not know, kept as they are.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

pub(crate) fn tenth() -> f64 {
    0.1
}
pub(crate) fn fiftieth() -> f64 {
    0.02
}
pub(crate) fn tiny() -> f64 {
    1e-12
}
pub(crate) fn two() -> usize {
    2
}
fn bert() -> String {
    "bert".to_owned()
}

fn of_size(layers: usize, hidden: usize, heads: usize) -> ModelConfig {
    ModelConfig::Bert(BertConfig::of_size(layers, hidden, heads))
}

impl BertConfig {
    /// For relatives that have no left-to-right models.
    pub(crate) fn check_bidirectional(&self) -> Result<(), ConfigError> {
        if self.is_decoder { Err(ConfigError::value("is_decoder", true, "false")) } else { Ok(()) }
    }

    /// With bert-base-uncased's vocabulary.
    pub(crate) fn of_size(layers: usize, hidden: usize, heads: usize) -> Self {
        Self {
            vocab_size: 30522,
            hidden_size: hidden,
            num_hidden_layers: layers,
            num_attention_heads: heads,
            intermediate_size: 4 * hidden,
            hidden_act: HiddenActivation::Gelu,
            hidden_dropout_prob: 0.1,
            attention_probs_dropout_prob: 0.1,
            max_position_embeddings: 512,
            type_vocab_size: 2,
            initializer_range: 0.02,
            layer_norm_eps: 1e-12,
            is_decoder: false,
            classifier_dropout: None,
            model_type: bert(),
            other: Map::new(),
        }
    }
}

impl FamilyConfig for BertConfig {
    own_config!();

    fn check(&self) -> Result<(), ConfigError> {
        self.sizes().check()?;
        check_sizes(&[
            ("max_position_embeddings", self.max_position_embeddings, 1 << 20),
            ("type_vocab_size", self.type_vocab_size, 1 << 16),
        ])?;
        check_dropouts(&[
            ("hidden_dropout_prob", self.hidden_dropout_prob),
            ("attention_probs_dropout_prob", self.attention_probs_dropout_prob),
            ("classifier_dropout", self.classifier_dropout.unwrap_or(0.0)),
        ])?;
        check_epsilon("layer_norm_eps", self.layer_norm_eps)?;
        check_only(
            &self.other,
            &[("position_embedding_type", Value::from("absolute")), ("add_cross_attention", Value::from(false))],
        )
    }

    fn sizes(&self) -> Sizes {
        Sizes {
            vocab_size: self.vocab_size,
            hidden_size: self.hidden_size,
            num_hidden_layers: self.num_hidden_layers,
            num_attention_heads: self.num_attention_heads,
            intermediate_size: self.intermediate_size,
            max_tokens: self.max_position_embeddings,
            segments: self.type_vocab_size,
            hidden_act: self.hidden_act,
            dropout: self.hidden_dropout_prob,
            attention_dropout: self.attention_probs_dropout_prob,
            causal: self.is_decoder,
        }
    }

    fn set_vocab_size(&mut self, size: usize) {
        self.vocab_size = size;
    }

    fn set_layers(&mut self, layers: usize) {
        self.num_hidden_layers = layers;
    }

    fn set_dropout(&mut self, p: f64) {
        (self.hidden_dropout_prob, self.attention_probs_dropout_prob, self.classifier_dropout) = (p, p, None);
    }

    fn set_causal(&mut self, causal: bool) -> Result<(), ConfigError> {
        self.is_decoder = causal;
        Ok(())
    }
}

/// What [`PostNormEncoder`] is built with for a config in BERT's words.
pub(crate) fn encoder_settings(config: &BertConfig, first_position: usize) -> EncoderSettings {
    let block = BlockSettings {
        hidden: config.hidden_size,
        intermediate: config.intermediate_size,
        heads: config.num_attention_heads,
        activation: config.hidden_act.into(),
        causal: config.is_decoder,
        dropout: config.hidden_dropout_prob as f32,
        attention_output_dropout: config.hidden_dropout_prob as f32,
        attention_dropout: config.attention_probs_dropout_prob as f32,
        epsilon: config.layer_norm_eps as f32,
        init: initial_weights(config.initializer_range).0,
    };
    let sizes = [config.vocab_size, config.max_position_embeddings, config.num_hidden_layers];
    let segments = Some(config.type_vocab_size);
    EncoderSettings { first_position, segments, ..EncoderSettings::new(sizes, BLOCK, block) }
}

fn build(b: &mut Builder, own: &BertConfig, head: Head) -> Model {
    let heads = HeadSettings {
        base: "bert",
        pooler: "pooler.dense",
        vocabulary: (PREDICTIONS, own.hidden_size),
        sentences: ("cls.seq_relationship", 0.0),
        dropout: own.classifier_dropout.unwrap_or(own.hidden_dropout_prob) as f32,
    };
    let (network, parts) = network_and_head(b, own, &encoder_settings(own, 0), head, &heads);
    Model::new(ModelConfig::Bert(own.clone()), head, network, parts)
}

/// What tells apart heads that are BERT's otherwise.
pub(crate) struct HeadSettings {
    /// What stands before the encoder's names.
    pub(crate) base: &'static str,
    pub(crate) pooler: &'static str,
    /// The masked-LM head's names, and the columns of the word table.
    pub(crate) vocabulary: (VocabularyNames, usize),
    /// The name of the layer that classifies pairs in pre-training, and its dropout.
    pub(crate) sentences: (&'static str, f32),
    /// Dropout of the classifiers of tasks.
    pub(crate) dropout: f32,
}

/// An encoder with BERT's heads.
pub(crate) fn network_and_head(
    b: &mut Builder,
    own: &BertConfig,
    settings: &EncoderSettings,
    head: Head,
    heads: &HeadSettings,
) -> (PostNormEncoder, HeadParts) {
    let h = own.hidden_size;
    let (init, task) = initial_weights(own.initializer_range);
    let has_pooler = matches!(head, Head::Pooler | Head::PreTraining | Head::Sequence { .. } | Head::Choice);
    let base = if matches!(head, Head::Encoder | Head::Pooler) { "" } else { heads.base };
    let (network, pooler) = b.at(base, |b| {
        let network = PostNormEncoder::build(b, settings);
        let pooler = |b: &mut Builder| Linear::build(b, heads.pooler, h, h, init);
        (network, has_pooler.then(|| b.group(Group::Pooler, pooler)))
    });
    let mut parts = HeadParts { pooler, ..HeadParts::default() };
    if matches!(head, Head::PreTraining | Head::MaskedLm | Head::SpanBoundary) {
        let (names, width) = &heads.vocabulary;
        let (sizes, act, epsilon) = ((own.vocab_size, h, *width), own.hidden_act.into(), own.layer_norm_eps as f32);
        parts.vocabulary = Some(VocabularyHead::build(b, names, sizes, act, epsilon, init));
    }
    if head == Head::SpanBoundary {
        let build = |b: &mut Builder| BoundaryHead::build(b, "cls.pair_target_predictions", (own.vocab_size, h), init);
        parts.boundary = Some(b.group(Group::Objective, build));
    }
    let hidden = pooler.map(|pooler| (pooler, Activation::Tanh));
    let classifier = |dropout, out| Some(Classifier { hidden, ..Classifier::plain(dropout, out) });
    parts.classifier = match head {
        Head::PreTraining => classifier(heads.sentences.1, Linear::build(b, heads.sentences.0, h, 2, init)),
        Head::Sequence { labels } | Head::Token { labels } => {
            classifier(heads.dropout, Linear::build(b, "classifier", h, labels, task))
        }
        Head::Span => classifier(0.0, Linear::build(b, "qa_outputs", h, 2, task)),
        Head::Choice => classifier(heads.dropout, Linear::build(b, "classifier", h, 1, task)),
        _ => None,
    };
    (network, parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// google-research's table of its 24 models, in millions of parameters (with the heads of pre-training); those that have names are the same.
    #[test]
    fn miniatures_are_those_of_turc_et_al() {
        let table = [
            (2, [4.4, 9.7, 22.8, 39.2]),
            (4, [4.8, 11.3, 29.1, 53.4]),
            (6, [5.2, 12.8, 35.4, 67.5]),
            (8, [5.6, 14.4, 41.7, 81.7]),
            (10, [6.0, 16.0, 48.0, 95.9]),
            (12, [6.4, 17.6, 54.3, 110.1]),
        ];
        for (layers, row) in table {
            for (hidden, millions) in [128, 256, 512, 768].into_iter().zip(row) {
                let name = format!("bert-L{layers}-H{hidden}");
                let config = Family::config_of_size(&name).unwrap();
                let mut b = Builder::new();
                Model::build(&mut b, &config, Head::PreTraining).unwrap();
                let count: usize = b.entries().iter().map(|entry| entry.stored_shape().elements()).sum();
                assert!((count as f64 / 1e6 - millions).abs() < 0.1, "{name}: {count}");
                assert_eq!(config.sizes().num_attention_heads, hidden / 64, "{name}");
            }
        }
        for (name, same) in [
            ("bert-tiny", "bert-L2-H128"),
            ("bert-mini", "bert-L4-H256"),
            ("bert-small", "bert-L4-H512"),
            ("bert-medium", "bert-L8-H512"),
            ("bert-base", "bert-L12-H768"),
        ] {
            assert_eq!(Family::config_of_size(name).unwrap(), Family::config_of_size(same).unwrap());
        }
    }

    #[test]
    fn unknown_keys_survive_and_contradictions_are_named() {
        let mut json = Family::config_of_size("bert-tiny").unwrap().to_json().unwrap();
        json["my_key"] = Value::from(7);
        let config = ModelConfig::from_value(json.clone()).unwrap();
        assert_eq!(config.to_json().unwrap(), json);
        let cases = [
            ("num_attention_heads", Value::from(3), "divisor of hidden_size"),
            ("hidden_size", Value::from(0), "`hidden_size` is 0"),
            ("vocab_size", Value::from(1u64 << 40), "`vocab_size` is"),
            ("vocab_size", Value::from("many"), "invalid type"),
            ("hidden_dropout_prob", Value::from(1.0), "below 1"),
            ("position_embedding_type", Value::from("relative_key"), "absolute"),
            ("add_cross_attention", Value::from(true), "add_cross_attention"),
            ("model_type", Value::from("llama"), "llama"),
            ("hidden_act", Value::from("mish"), "gelu_new"),
        ];
        for (key, value, expected) in cases {
            let mut json = json.clone();
            json[key] = value;
            let error = ModelConfig::from_value(json).unwrap_err().to_string();
            assert!(error.contains(expected), "{key}: {error}");
        }
    }
}
