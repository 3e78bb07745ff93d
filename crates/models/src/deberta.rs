//! DeBERTa-v2 and v3 (He et al. 2021): BERT's blocks with disentangled attention. Relative positions come from one table, which
//! each layer projects; usually there are no absolute ones and no segments. Not v1 (`deberta`), whose projections lie otherwise,
//! and not the convolution of v2-xlarge.
//!
//! Legend: H hidden, V vocabulary.

use henson_tensor::{Activation, Builder, LogBuckets};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::bert::{BLOCK, PREDICTIONS, fiftieth, tenth};
use crate::config::{FamilyConfig, check_dropouts, check_epsilon, check_only, check_sizes, own_config};
use crate::encoder::{EncoderSettings, PostNormEncoder, RelativeTable, initial_weights};
use crate::heads::{Classifier, HeadParts, VocabularyHead, VocabularyNames};
use crate::layers::{BlockNames, BlockSettings, Linear, PositionScores};
use crate::{ConfigError, Family, Head, HiddenActivation, Model, ModelConfig, Naming, Sizes};

/// DeBERTa-v2 as the table of families has it.
pub(crate) static FAMILY: Family = Family {
    types: &[("deberta-v2", "DebertaV2")],
    naming: Naming {
        base_prefix: "deberta.",
        encoder: &["embeddings.", "encoder."],
        old_endings: &[],
        tied: &[
            ("cls.predictions.decoder.weight", "deberta.embeddings.word_embeddings.weight"),
            ("cls.predictions.decoder.bias", "cls.predictions.bias"),
        ],
        // v3's files bring the heads of its pre-training along, which work with another network than this one.
        ignored_endings: &[
            "embeddings.position_ids",
            "embeddings.position_embeddings.weight",
            "lm_predictions.lm_head.bias",
            "lm_predictions.lm_head.dense.weight",
            "lm_predictions.lm_head.dense.bias",
            "lm_predictions.lm_head.LayerNorm.weight",
            "lm_predictions.lm_head.LayerNorm.bias",
            "mask_predictions.dense.weight",
            "mask_predictions.dense.bias",
            "mask_predictions.LayerNorm.weight",
            "mask_predictions.LayerNorm.bias",
            "mask_predictions.classifier.weight",
            "mask_predictions.classifier.bias",
        ],
    },
    heads: heads!(Encoder, MaskedLm),
    causal: None,
    endings: &[],
    sizes: &[
        ("deberta-v3-tiny", || of_size(2, 128, 2)),
        ("deberta-v3-xsmall", || of_size(12, 384, 6)),
        ("deberta-v3-small", || of_size(6, 768, 12)),
        ("deberta-v3-base", || of_size(12, 768, 12)),
        ("deberta-v3-large", || of_size(24, 1024, 16)),
    ],
    parse: |value| Ok(ModelConfig::DebertaV2(serde_json::from_value(value)?)),
};

const NAMES: BlockNames = BlockNames {
    query_key_value: ["attention.self.query_proj", "attention.self.key_proj", "attention.self.value_proj"],
    ..BLOCK
};

/// The sizes and settings of a DeBERTa-v2. Where a key is missing, the default is that of the class in `transformers`, which is
/// not always that of the published models.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DebertaV2Config {
    /// V: tokens of the vocabulary.
    pub vocab_size: usize,
    /// H.
    pub hidden_size: usize,
    /// Blocks of the encoder.
    pub num_hidden_layers: usize,
    /// Attention heads; divide H.
    pub num_attention_heads: usize,
    /// Columns inside of the feed-forward layers.
    pub intermediate_size: usize,
    /// The activation of feed-forward layers and of the masked-LM head.
    #[serde(default)]
    pub hidden_act: HiddenActivation,
    /// Dropout on embeddings, on relative positions and on the output of each half of a block.
    #[serde(default = "tenth")]
    pub hidden_dropout_prob: f64,
    /// Dropout on attention's probabilities.
    #[serde(default = "tenth")]
    pub attention_probs_dropout_prob: f64,
    /// Maximum length of a sequence.
    #[serde(default = "positions")]
    pub max_position_embeddings: usize,
    /// Segments; 0 where the network knows none.
    #[serde(default)]
    pub type_vocab_size: usize,
    /// The standard deviation of initial weights.
    #[serde(default = "fiftieth")]
    pub initializer_range: f64,
    /// Added to the variance in LayerNorm.
    #[serde(default = "epsilon")]
    pub layer_norm_eps: f64,
    /// Whether there are relative positions; we know no other models.
    #[serde(default)]
    pub relative_attention: bool,
    /// The distance that the last bucket begins with; below 1, `max_position_embeddings`.
    #[serde(default = "minus_one")]
    pub max_relative_positions: i64,
    /// Buckets of a side of distances; below 1, each distance has its own.
    #[serde(default = "minus_one")]
    pub position_buckets: i64,
    /// Whether there is a table of absolute positions, too.
    #[serde(default = "yes")]
    pub position_biased_input: bool,
    /// Whether contents' projections serve positions as well.
    #[serde(default)]
    pub share_att_key: bool,
    /// What is scored besides contents: `c2p`, queries against positions, and `p2c`, keys against positions.
    #[serde(default)]
    pub pos_att_type: Option<AttentionTypes>,
    /// `layer_norm` where the table of relative positions is normalised.
    #[serde(default = "none")]
    pub norm_rel_ebd: String,
    /// Dropout before the hidden layer of a sequence head.
    #[serde(default)]
    pub pooler_dropout: f64,
    /// Its activation.
    #[serde(default)]
    pub pooler_hidden_act: HiddenActivation,
    /// Dropout before its last layer, where it differs from `hidden_dropout_prob`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cls_dropout: Option<f64>,
    /// Whether the masked-LM head has BERT's names.
    #[serde(default = "yes")]
    pub legacy: bool,
    /// `deberta-v2`.
    pub model_type: String,
    /// Keys that we do not know, kept as they are.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// `"p2c|c2p"` or a list, as it was read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum AttentionTypes {
    /// Names with `|` between them.
    Text(String),
    /// Names.
    List(Vec<String>),
}

impl AttentionTypes {
    fn names(&self) -> Vec<String> {
        match self {
            Self::Text(text) => text.to_lowercase().split('|').map(|name| name.trim().to_owned()).collect(),
            Self::List(names) => names.clone(),
        }
    }
}

fn positions() -> usize {
    512
}
fn epsilon() -> f64 {
    1e-7
}
fn minus_one() -> i64 {
    -1
}
fn yes() -> bool {
    true
}
fn none() -> String {
    "none".to_owned()
}

/// With the vocabulary and the settings of microsoft/deberta-v3-base.
fn of_size(layers: usize, hidden: usize, heads: usize) -> ModelConfig {
    ModelConfig::DebertaV2(DebertaV2Config {
        vocab_size: 128_100,
        hidden_size: hidden,
        num_hidden_layers: layers,
        num_attention_heads: heads,
        intermediate_size: 4 * hidden,
        hidden_act: HiddenActivation::Gelu,
        hidden_dropout_prob: 0.1,
        attention_probs_dropout_prob: 0.1,
        max_position_embeddings: 512,
        type_vocab_size: 0,
        initializer_range: 0.02,
        layer_norm_eps: 1e-7,
        relative_attention: true,
        max_relative_positions: -1,
        position_buckets: 256,
        position_biased_input: false,
        share_att_key: true,
        pos_att_type: Some(AttentionTypes::List(vec!["p2c".to_owned(), "c2p".to_owned()])),
        norm_rel_ebd: "layer_norm".to_owned(),
        pooler_dropout: 0.0,
        pooler_hidden_act: HiddenActivation::Gelu,
        cls_dropout: None,
        legacy: true,
        model_type: "deberta-v2".to_owned(),
        other: Map::from_iter([("pad_token_id".to_owned(), Value::from(0))]),
    })
}

impl DebertaV2Config {
    /// How distances become buckets, and the rows of the table.
    fn table(&self) -> (LogBuckets, usize) {
        let below = |number: i64| usize::try_from(number).ok().filter(|number| *number > 0);
        let most = below(self.max_relative_positions).unwrap_or(self.max_position_embeddings);
        let count = below(self.position_buckets);
        let buckets = LogBuckets { count: count.unwrap_or(0) as u32, max_distance: most as u32 };
        (buckets, 2 * count.unwrap_or(most))
    }

    fn has(&self, kind: &str) -> bool {
        self.pos_att_type.as_ref().is_some_and(|types| types.names().iter().any(|name| name == kind))
    }

    fn check_positions(&self) -> Result<(), ConfigError> {
        if !self.relative_attention {
            let why = "true: models of this type without relative positions are not supported";
            return Err(ConfigError::value("relative_attention", false, why));
        }
        for (key, number) in
            [("position_buckets", self.position_buckets), ("max_relative_positions", self.max_relative_positions)]
        {
            if !(-1..=1 << 20).contains(&number) || key == "position_buckets" && number == 1 {
                return Err(ConfigError::value(key, number, format!("-1, or 2 to {}", 1 << 20)));
            }
        }
        let (buckets, _) = self.table();
        if buckets.count > 0 && buckets.max_distance <= buckets.count / 2 + 1 {
            let (key, got) = ("position_buckets", self.position_buckets);
            let expected = format!("less than twice the longest distance, {}", buckets.max_distance);
            return Err(ConfigError::value(key, got, expected));
        }
        let names = self.pos_att_type.as_ref().map(AttentionTypes::names).unwrap_or_default();
        if names.is_empty() || names.iter().any(|name| name != "c2p" && name != "p2c") {
            return Err(ConfigError::value("pos_att_type", names.join("|"), "c2p, p2c or both"));
        }
        match self.norm_rel_ebd.as_str() {
            "layer_norm" | "none" => Ok(()),
            other => Err(ConfigError::value("norm_rel_ebd", other, "layer_norm or none")),
        }
    }
}

impl FamilyConfig for DebertaV2Config {
    own_config!();

    fn check(&self) -> Result<(), ConfigError> {
        self.sizes().check()?;
        check_sizes(&[
            ("max_position_embeddings", self.max_position_embeddings, 1 << 20),
            ("type_vocab_size", self.type_vocab_size.saturating_add(1), 1 << 16),
        ])?;
        check_dropouts(&[
            ("hidden_dropout_prob", self.hidden_dropout_prob),
            ("attention_probs_dropout_prob", self.attention_probs_dropout_prob),
            ("pooler_dropout", self.pooler_dropout),
            ("cls_dropout", self.cls_dropout.unwrap_or(0.0)),
        ])?;
        check_epsilon("layer_norm_eps", self.layer_norm_eps)?;
        self.check_positions()?;
        check_only(
            &self.other,
            &[
                ("conv_kernel_size", Value::from(0)),
                ("embedding_size", Value::from(self.hidden_size)),
                ("pooler_hidden_size", Value::from(self.hidden_size)),
                ("attention_head_size", Value::from(self.hidden_size / self.num_attention_heads)),
                ("is_decoder", Value::from(false)),
                ("add_cross_attention", Value::from(false)),
            ],
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
            // The tokenizers mark the second text of a pair; a network without segments takes no notice.
            segments: if self.type_vocab_size == 0 { 2 } else { self.type_vocab_size },
            hidden_act: self.hidden_act,
            dropout: self.hidden_dropout_prob,
            attention_dropout: self.attention_probs_dropout_prob,
            causal: false,
        }
    }

    fn set_vocab_size(&mut self, size: usize) {
        self.vocab_size = size;
    }

    fn set_layers(&mut self, layers: usize) {
        self.num_hidden_layers = layers;
    }

    fn set_dropout(&mut self, p: f64) {
        (self.hidden_dropout_prob, self.attention_probs_dropout_prob, self.cls_dropout) = (p, p, None);
        // It is 0 in all models; who asks for none means it.
        self.pooler_dropout = self.pooler_dropout.min(p);
    }

    fn relative_positions(&self) -> Option<(LogBuckets, usize)> {
        Some(self.table())
    }
}

fn encoder_settings(own: &DebertaV2Config) -> EncoderSettings {
    let dropout = own.hidden_dropout_prob as f32;
    let positions = if own.position_biased_input { own.max_position_embeddings } else { 0 };
    let block = BlockSettings {
        hidden: own.hidden_size,
        intermediate: own.intermediate_size,
        heads: own.num_attention_heads,
        activation: own.hidden_act.into(),
        causal: false,
        dropout,
        attention_output_dropout: dropout,
        attention_dropout: own.attention_probs_dropout_prob as f32,
        epsilon: own.layer_norm_eps as f32,
        init: initial_weights(own.initializer_range).0,
    };
    EncoderSettings {
        segments: (own.type_vocab_size > 0).then_some(own.type_vocab_size),
        relative_table: Some(RelativeTable {
            name: "encoder.rel_embeddings.weight",
            rows: own.table().1,
            norm: (own.norm_rel_ebd == "layer_norm").then_some("encoder.LayerNorm"),
            scores: PositionScores {
                of_queries: own.has("c2p"),
                of_keys: own.has("p2c"),
                own: (!own.share_att_key).then_some(["attention.self.pos_key_proj", "attention.self.pos_query_proj"]),
                dropout,
            },
        }),
        ..EncoderSettings::new([own.vocab_size, positions, own.num_hidden_layers], NAMES, block)
    }
}

fn build(b: &mut Builder, own: &DebertaV2Config, head: Head) -> Model {
    let h = own.hidden_size;
    let (init, task) = initial_weights(own.initializer_range);
    let base = if head == Head::Encoder { "" } else { "deberta" };
    let network = b.at(base, |b| PostNormEncoder::build(b, &encoder_settings(own)));
    let mut parts = HeadParts::default();
    if head == Head::MaskedLm {
        let names = match own.legacy {
            true => PREDICTIONS,
            false => VocabularyNames {
                transform: "lm_predictions.lm_head.dense",
                norm: "lm_predictions.lm_head.LayerNorm",
                bias: "lm_predictions.lm_head.bias",
            },
        };
        let (sizes, act, epsilon) = ((own.vocab_size, h, h), own.hidden_act.into(), own.layer_norm_eps as f32);
        parts.vocabulary = Some(VocabularyHead::build(b, &names, sizes, act, epsilon, init));
    }
    let dropout = own.hidden_dropout_prob as f32;
    parts.classifier = match head {
        Head::Sequence { .. } | Head::Choice => {
            let labels = if let Head::Sequence { labels } = head { labels } else { 1 };
            let dense = Linear::build(b, "pooler.dense", h, h, task);
            let hidden: Option<(Linear, Activation)> = Some((dense, own.pooler_hidden_act.into()));
            let out = Linear::build(b, "classifier", h, labels, task);
            let dropout = own.cls_dropout.map_or(dropout, |p| p as f32);
            Some(Classifier { input_dropout: own.pooler_dropout as f32, hidden, ..Classifier::plain(dropout, out) })
        }
        Head::Token { labels } => Some(Classifier::plain(dropout, Linear::build(b, "classifier", h, labels, task))),
        Head::Span => Some(Classifier::plain(0.0, Linear::build(b, "qa_outputs", h, 2, task))),
        _ => None,
    };
    Model::new(ModelConfig::DebertaV2(own.clone()), head, network, parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_networks_of_the_type_are_refused() {
        let json = Family::config_of_size("deberta-v3-tiny").unwrap().to_json().unwrap();
        let cases = [
            ("conv_kernel_size", Value::from(3), "`conv_kernel_size` is 3"),
            ("embedding_size", Value::from(64), "`embedding_size` is 64"),
            ("pooler_hidden_size", Value::from(64), "`pooler_hidden_size` is 64"),
            ("relative_attention", Value::from(false), "`relative_attention` is false"),
            ("position_buckets", Value::from(1), "`position_buckets` is 1"),
            ("position_buckets", Value::from(1024), "less than twice the longest distance, 512"),
            ("position_buckets", Value::from(i64::MAX), "`position_buckets` is"),
            ("max_relative_positions", Value::from(i64::MIN), "`max_relative_positions` is"),
            ("pos_att_type", Value::from("c2p|p2p"), "c2p, p2c or both"),
            ("pos_att_type", Value::Null, "c2p, p2c or both"),
            ("norm_rel_ebd", Value::from("batch_norm"), "layer_norm or none"),
            ("type_vocab_size", Value::from(u64::MAX), ""),
            ("model_type", Value::from("deberta"), "model_type is `deberta`"),
            ("pooler_dropout", Value::from(1.5), "`pooler_dropout` is 1.5"),
        ];
        for (key, value, expected) in cases {
            let mut json = json.clone();
            json[key] = value;
            let error = ModelConfig::from_value(json).unwrap_err().to_string();
            assert!(error.contains(expected), "{key}: {error}");
        }
        // Published files write both kinds as one text.
        let mut json = json;
        json["pos_att_type"] = Value::from("p2c|c2p");
        let config = ModelConfig::from_value(json.clone()).unwrap();
        assert_eq!(config.to_json().unwrap(), json);
        assert_eq!(config.relative_positions(), Some((LogBuckets { count: 256, max_distance: 512 }, 512)));
    }
}
