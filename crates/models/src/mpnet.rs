//! MPNet (Song et al. 2020): BERT's blocks with one bias by distance for all layers and RoBERTa's positions, without segments.
//!
//! Legend: H hidden, V vocabulary.

use henson_tensor::{Buckets, Builder};
use serde_json::{Map, Value};

use crate::bert::{BertConfig, encoder_settings};
use crate::config::{FamilyConfig, as_bert, check_only};
use crate::encoder::EncoderSettings;
use crate::layers::BlockNames;
use crate::roberta::network_and_head;
use crate::{ConfigError, Family, Head, Model, ModelConfig, Naming, Sizes};

/// MPNet as the table of families has it.
pub(crate) static FAMILY: Family = Family {
    types: &[("mpnet", "MPNet")],
    naming: Naming {
        base_prefix: "mpnet.",
        encoder: &["embeddings.", "encoder."],
        old_endings: &[],
        tied: &[
            ("lm_head.decoder.weight", "mpnet.embeddings.word_embeddings.weight"),
            ("lm_head.decoder.bias", "lm_head.bias"),
        ],
        ignored_endings: &["embeddings.position_ids"],
    },
    heads: heads!(Pooler, Encoder, MaskedLm),
    causal: None,
    endings: &[],
    sizes: &[("mpnet-base", of_size)],
    parse: |value| Ok(ModelConfig::MpNet(MpNetConfig(serde_json::from_value(value)?))),
};

const BLOCK: BlockNames = BlockNames {
    query_key_value: ["attention.attn.q", "attention.attn.k", "attention.attn.v"],
    attention_output: "attention.attn.o",
    attention_norm: "attention.LayerNorm",
    up: "intermediate.dense",
    down: "output.dense",
    norm: "output.LayerNorm",
};

/// Distances as in T5. The config's number of buckets only sizes the table: `transformers` always computes with these.
const BUCKETS: Buckets = Buckets { count: 32, max_distance: 128, bidirectional: true };

/// The row of a sequence's first token in the table of positions, whatever the padding's id.
const FIRST_POSITION: usize = 2;

/// BERT's keys without segments.
#[derive(Clone, Debug, PartialEq)]
pub struct MpNetConfig(BertConfig);

impl FamilyConfig for MpNetConfig {
    as_bert!();

    fn check(&self) -> Result<(), ConfigError> {
        self.0.check()?;
        self.0.check_bidirectional()?;
        check_only(&self.0.other, &[("relative_attention_num_buckets", Value::from(BUCKETS.count))])?;
        if self.0.max_position_embeddings <= FIRST_POSITION {
            let (key, found) = ("max_position_embeddings", self.0.max_position_embeddings);
            return Err(ConfigError::value(key, found, "more than the two that belong to padding"));
        }
        Ok(())
    }

    fn sizes(&self) -> Sizes {
        Sizes { max_tokens: self.0.max_position_embeddings - FIRST_POSITION, ..self.0.sizes() }
    }

    fn set_dropout(&mut self, p: f64) {
        self.0.set_dropout(p);
    }
}

/// microsoft/mpnet-base.
fn of_size() -> ModelConfig {
    let other = [("bos_token_id", 0), ("pad_token_id", 1), ("eos_token_id", 2), ("relative_attention_num_buckets", 32)];
    ModelConfig::MpNet(MpNetConfig(BertConfig {
        vocab_size: 30527,
        max_position_embeddings: 514,
        layer_norm_eps: 1e-5,
        model_type: "mpnet".to_owned(),
        other: Map::from_iter(other.map(|(key, number)| (key.to_owned(), Value::from(number)))),
        ..BertConfig::of_size(12, 768, 12)
    }))
}

fn build(b: &mut Builder, own: &MpNetConfig, head: Head) -> Model {
    let settings = EncoderSettings {
        segments: None,
        names: BLOCK,
        relative_bias: Some(("encoder.relative_attention_bias.weight", BUCKETS)),
        ..encoder_settings(&own.0, FIRST_POSITION)
    };
    let dropout = own.0.hidden_dropout_prob as f32;
    let (network, parts) = network_and_head(b, "mpnet", &own.0, &settings, head, dropout);
    Model::new(ModelConfig::MpNet(own.clone()), head, network, parts)
}
