//! RoBERTa (Liu et al. 2019), XLM-R and CamemBERT: BERT's network with positions that begin behind the padding's, usually a
//! single segment, and heads of its own.
//!
//! Legend: H hidden, V vocabulary.

use henson_tensor::{Activation, Builder, Group};
use serde_json::{Map, Value};

use crate::bert::{BertConfig, encoder_settings};
use crate::config::{FamilyConfig, FineTuning, as_bert};
use crate::encoder::{EncoderSettings, PostNormEncoder, initial_weights};
use crate::heads::{Classifier, HeadParts, VocabularyHead, VocabularyNames};
use crate::layers::Linear;
use crate::{ConfigError, Family, Head, Model, ModelConfig, Naming, Sizes};

/// RoBERTa as the table of families has it.
pub(crate) static FAMILY: Family = Family {
    types: &[("roberta", "Roberta"), ("xlm-roberta", "XLMRoberta"), ("camembert", "Camembert")],
    naming: Naming {
        base_prefix: "roberta.",
        encoder: &["embeddings.", "encoder."],
        old_endings: &[("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")],
        tied: &[
            ("lm_head.decoder.weight", "roberta.embeddings.word_embeddings.weight"),
            ("lm_head.decoder.bias", "lm_head.bias"),
        ],
        ignored_endings: &["embeddings.position_ids", "embeddings.token_type_ids"],
    },
    heads: heads!(Pooler, Encoder, MaskedLm),
    causal: Some("ForCausalLM"),
    endings: &[],
    sizes: &[("roberta-base", || of_size(12, 768, 12)), ("roberta-large", || of_size(24, 1024, 16))],
    parse: |value| Ok(ModelConfig::Roberta(RobertaConfig(serde_json::from_value(value)?))),
};

const PAD: &str = "pad_token_id";

/// BERT's keys, with the same defaults in `transformers`; the published models say 514 positions, one segment and an epsilon
/// of 1e-5 in their files. `pad_token_id` counts here.
#[derive(Clone, Debug, PartialEq)]
pub struct RobertaConfig(BertConfig);

impl RobertaConfig {
    /// The row of a sequence's first token in the table of positions: the one behind the padding's.
    fn first_position(&self) -> usize {
        self.0
            .other
            .get(PAD)
            .and_then(Value::as_u64)
            .map_or(2, |pad| usize::try_from(pad).unwrap_or(usize::MAX).saturating_add(1))
    }
}

impl FamilyConfig for RobertaConfig {
    as_bert!();

    fn set_causal(&mut self, causal: bool) -> Result<(), ConfigError> {
        self.0.set_causal(causal)
    }

    fn check(&self) -> Result<(), ConfigError> {
        self.0.check()?;
        let (positions, first) = (self.0.max_position_embeddings, self.first_position());
        if first >= positions {
            return Err(ConfigError::value(PAD, first - 1, format!("less than {positions} positions leave room for")));
        }
        Ok(())
    }

    fn sizes(&self) -> Sizes {
        Sizes { max_tokens: self.0.max_position_embeddings - self.first_position(), ..self.0.sizes() }
    }

    fn set_dropout(&mut self, p: f64) {
        self.0.set_dropout(p);
    }

    fn fine_tuning(&self, head: Head) -> FineTuning {
        match head {
            // Vectors are no task of the paper's.
            Head::Encoder => FineTuning::BERT,
            Head::Span => FineTuning { learning_rates: [1.5e-5; 2], epochs: 2.0, weight_decay: 0.01, ..PUBLISHED },
            Head::Choice => FineTuning { epochs: 4.0, ..PUBLISHED },
            _ => PUBLISHED,
        }
    }
}

/// RoBERTa's own for GLUE (Liu et al. 2019, appendix; fairseq's examples/roberta), within their rates of 1e-5 to 3e-5.
const PUBLISHED: FineTuning = FineTuning {
    learning_rates: [2e-5, 1e-5],
    epochs: 10.0,
    warmup: 0.06,
    weight_decay: 0.1,
    beta2: 0.98,
    clip: 0.0,
    ..FineTuning::BERT
};

/// With roberta-base's vocabulary.
fn of_size(layers: usize, hidden: usize, heads: usize) -> ModelConfig {
    let other = [("bos_token_id", 0), (PAD, 1), ("eos_token_id", 2)].map(|(key, id)| (key.to_owned(), Value::from(id)));
    ModelConfig::Roberta(RobertaConfig(BertConfig {
        vocab_size: 50265,
        max_position_embeddings: 514,
        type_vocab_size: 1,
        layer_norm_eps: 1e-5,
        model_type: "roberta".to_owned(),
        other: Map::from_iter(other),
        ..BertConfig::of_size(layers, hidden, heads)
    }))
}

fn build(b: &mut Builder, own: &RobertaConfig, head: Head) -> Model {
    let settings = encoder_settings(&own.0, own.first_position());
    let dropout = own.0.classifier_dropout.unwrap_or(own.0.hidden_dropout_prob) as f32;
    let (network, parts) = network_and_head(b, "roberta", &own.0, &settings, head, dropout);
    Model::new(ModelConfig::Roberta(own.clone()), head, network, parts)
}

/// An encoder with RoBERTa's heads, which MPNet has as well. `dropout` is that of classifiers of texts and tokens.
pub(crate) fn network_and_head(
    b: &mut Builder,
    base: &str,
    own: &BertConfig,
    settings: &EncoderSettings,
    head: Head,
    dropout: f32,
) -> (PostNormEncoder, HeadParts) {
    let h = own.hidden_size;
    let (init, task) = initial_weights(own.initializer_range);
    let base = if matches!(head, Head::Encoder | Head::Pooler) { "" } else { base };
    let (network, pooler) = b.at(base, |b| {
        let network = PostNormEncoder::build(b, settings);
        let pooler = |b: &mut Builder| Linear::build(b, "pooler.dense", h, h, init);
        (network, matches!(head, Head::Pooler | Head::Choice).then(|| b.group(Group::Pooler, pooler)))
    });
    let mut parts = HeadParts { pooler, ..HeadParts::default() };
    if head == Head::MaskedLm {
        let names = VocabularyNames { transform: "lm_head.dense", norm: "lm_head.layer_norm", bias: "lm_head.bias" };
        let (sizes, epsilon) = ((own.vocab_size, h, h), own.layer_norm_eps as f32);
        // GELU with the error function whatever `hidden_act` says.
        parts.vocabulary = Some(VocabularyHead::build(b, &names, sizes, Activation::Gelu, epsilon, init));
    }
    parts.classifier = match head {
        Head::Sequence { labels } => Some(Classifier::with_dense(b, (h, labels), Activation::Tanh, dropout, task)),
        Head::Token { labels } => Some(Classifier::plain(dropout, Linear::build(b, "classifier", h, labels, task))),
        Head::Span => Some(Classifier::plain(0.0, Linear::build(b, "qa_outputs", h, 2, task))),
        Head::Choice => {
            let out = Linear::build(b, "classifier", h, 1, task);
            let hidden = pooler.map(|pooler| (pooler, Activation::Tanh));
            Some(Classifier { hidden, ..Classifier::plain(own.hidden_dropout_prob as f32, out) })
        }
        _ => None,
    };
    (network, parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_begin_behind_the_padding() {
        let mut json = Family::config_of_size("roberta-base").unwrap().to_json().unwrap();
        let tokens = |json: &Value| ModelConfig::from_value(json.clone()).map(|config| config.sizes().max_tokens);
        assert_eq!(tokens(&json).unwrap(), 512);
        json[PAD] = Value::from(0);
        assert_eq!(tokens(&json).unwrap(), 513);
        json[PAD] = Value::from(513);
        assert!(tokens(&json).unwrap_err().to_string().contains("`pad_token_id` is 513"));
        json[PAD] = Value::from(u64::MAX);
        assert!(tokens(&json).is_err());
    }
}
