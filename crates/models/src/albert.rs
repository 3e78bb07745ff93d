//! ALBERT (Lan et al. 2020): BERT with one block for all layers, and tables of a width of their own.
//!
//! Legend: E columns of the tables, H hidden, V vocabulary.

use henson_tensor::Builder;
use serde_json::{Map, Value};

use crate::bert::{BertConfig, HeadSettings, encoder_settings, network_and_head};
use crate::config::{FamilyConfig, as_bert, check_dropouts, check_only, check_sizes, number, probability};
use crate::encoder::EncoderSettings;
use crate::heads::VocabularyNames;
use crate::layers::{BlockNames, BlockSettings};
use crate::{ConfigError, Family, Head, HiddenActivation, Model, ModelConfig, Naming, Sizes};

/// ALBERT as the table of families has it.
pub(crate) static FAMILY: Family = Family {
    types: &[("albert", "Albert")],
    naming: Naming {
        base_prefix: "albert.",
        encoder: &["embeddings.", "encoder."],
        old_endings: &[("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")],
        tied: &[
            ("predictions.decoder.weight", "albert.embeddings.word_embeddings.weight"),
            ("predictions.decoder.bias", "predictions.bias"),
        ],
        ignored_endings: &["embeddings.position_ids", "embeddings.token_type_ids"],
    },
    heads: heads!(Pooler, Encoder, PreTraining, MaskedLm),
    causal: None,
    endings: &[],
    sizes: &[
        ("albert-base", || of_size(12, 768, 12)),
        ("albert-large", || of_size(24, 1024, 16)),
        ("albert-xlarge", || of_size(24, 2048, 16)),
        ("albert-xxlarge", || of_size(12, 4096, 64)),
    ],
    parse,
};

const BLOCK: BlockNames = BlockNames {
    query_key_value: ["attention.query", "attention.key", "attention.value"],
    attention_output: "attention.dense",
    attention_norm: "attention.LayerNorm",
    up: "ffn",
    down: "ffn_output",
    norm: "full_layer_layer_norm",
};

const WIDTH: &str = "embedding_size";
const GROUPS: &str = "num_hidden_groups";
const CLASSIFIER_DROPOUT: &str = "classifier_dropout_prob";

/// BERT's keys with other defaults, and some of its own.
#[derive(Clone, Debug, PartialEq)]
pub struct AlbertConfig(BertConfig);

/// Where a file says nothing, `transformers` takes other values than for BERT.
fn parse(mut value: Value) -> Result<ModelConfig, ConfigError> {
    if let Value::Object(keys) = &mut value {
        keys.entry("hidden_act").or_insert_with(|| Value::from("gelu_new"));
        for key in ["hidden_dropout_prob", "attention_probs_dropout_prob"] {
            keys.entry(key).or_insert_with(|| Value::from(0.0));
        }
    }
    Ok(ModelConfig::Albert(AlbertConfig(serde_json::from_value(value)?)))
}

impl AlbertConfig {
    /// E, 128 where nothing is said.
    fn width(&self) -> usize {
        number(&self.0.other, WIDTH, 128)
    }

    /// How many blocks there are.
    fn groups(&self) -> usize {
        number(&self.0.other, GROUPS, 1)
    }

    fn classifier_dropout(&self) -> f64 {
        probability(&self.0.other, CLASSIFIER_DROPOUT, 0.1)
    }
}

impl FamilyConfig for AlbertConfig {
    as_bert!();

    fn check(&self) -> Result<(), ConfigError> {
        self.0.check()?;
        check_sizes(&[(WIDTH, self.width(), 1 << 16), (GROUPS, self.groups(), self.0.num_hidden_layers)])?;
        check_dropouts(&[(CLASSIFIER_DROPOUT, self.classifier_dropout())])?;
        self.0.check_bidirectional()?;
        check_only(&self.0.other, &[("inner_group_num", Value::from(1))])
    }

    fn sizes(&self) -> Sizes {
        self.0.sizes()
    }

    fn can_average(&self) -> bool {
        false
    }

    fn set_dropout(&mut self, p: f64) {
        self.0.set_dropout(p);
        self.0.other.insert(CLASSIFIER_DROPOUT.to_owned(), Value::from(p));
    }
}

/// Version 2, which was trained without dropout.
fn of_size(layers: usize, hidden: usize, heads: usize) -> ModelConfig {
    let numbers = [
        (WIDTH, 128),
        (GROUPS, 1),
        ("inner_group_num", 1),
        ("pad_token_id", 0),
        ("bos_token_id", 2),
        ("eos_token_id", 3),
    ];
    ModelConfig::Albert(AlbertConfig(BertConfig {
        vocab_size: 30000,
        hidden_act: HiddenActivation::GeluNew,
        hidden_dropout_prob: 0.0,
        attention_probs_dropout_prob: 0.0,
        model_type: "albert".to_owned(),
        other: Map::from_iter(numbers.map(|(key, number)| (key.to_owned(), Value::from(number)))),
        ..BertConfig::of_size(layers, hidden, heads)
    }))
}

fn build(b: &mut Builder, own: &AlbertConfig, head: Head) -> Model {
    let plain = encoder_settings(&own.0, 0);
    let settings = EncoderSettings {
        projection: Some((own.width(), "encoder.embedding_hidden_mapping_in")),
        layer_name: ["encoder.albert_layer_groups.", ".albert_layers.0"],
        layer_groups: Some(own.groups()),
        names: BLOCK,
        // The feed-forward half has no dropout.
        block: BlockSettings { dropout: 0.0, ..plain.block },
        ..plain
    };
    let dropout = own.classifier_dropout() as f32;
    let names =
        VocabularyNames { transform: "predictions.dense", norm: "predictions.LayerNorm", bias: "predictions.bias" };
    let heads = HeadSettings {
        base: "albert",
        pooler: "pooler",
        vocabulary: (names, own.width()),
        sentences: ("sop_classifier.classifier", dropout),
        dropout,
    };
    let (network, parts) = network_and_head(b, &own.0, &settings, head, &heads);
    Model::new(ModelConfig::Albert(own.clone()), head, network, parts)
}
