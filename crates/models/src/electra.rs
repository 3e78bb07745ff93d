//! ELECTRA (Clark et al. 2020): BERT's network with tables of a width of their own, as a discriminator that says of each token
//! whether it was replaced, or as a generator, which is a masked language model.
//!
//! Legend: E columns of the tables, H hidden, V vocabulary.

use henson_tensor::{Activation, Builder};
use serde_json::{Map, Value};

use crate::bert::{BertConfig, encoder_settings};
use crate::config::{FamilyConfig, as_bert, check_dropouts, check_only, check_sizes, number, probability};
use crate::encoder::{EncoderSettings, PostNormEncoder, initial_weights};
use crate::heads::{Classifier, HeadParts, VocabularyHead, VocabularyNames};
use crate::layers::Linear;
use crate::{ConfigError, Family, Head, Model, ModelConfig, Naming, Network, Sizes};

/// ELECTRA as the table of families has it.
pub(crate) static FAMILY: Family = Family {
    types: &[("electra", "Electra")],
    naming: Naming {
        base_prefix: "electra.",
        encoder: &["embeddings.", "embeddings_project.", "encoder."],
        old_endings: &[("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")],
        tied: &[("generator_lm_head.weight", "electra.embeddings.word_embeddings.weight")],
        ignored_endings: &["embeddings.position_ids", "embeddings.token_type_ids"],
    },
    heads: heads!(Encoder, ReplacedTokens, MaskedLm),
    causal: Some("ForCausalLM"),
    endings: &[],
    sizes: &[
        ("electra-small", || of_size(128, 12, 256, 4)),
        ("electra-base", || of_size(768, 12, 768, 12)),
        ("electra-large", || of_size(1024, 24, 1024, 16)),
    ],
    parse: |value| Ok(ModelConfig::Electra(ElectraConfig(serde_json::from_value(value)?))),
};

const WIDTH: &str = "embedding_size";
const SUMMARY_DROPOUT: &str = "summary_last_dropout";

/// BERT's keys, and `embedding_size`.
#[derive(Clone, Debug, PartialEq)]
pub struct ElectraConfig(BertConfig);

impl ElectraConfig {
    /// E, 128 where nothing is said.
    fn width(&self) -> usize {
        number(&self.0.other, WIDTH, 128)
    }

    fn summary_dropout(&self) -> f64 {
        probability(&self.0.other, SUMMARY_DROPOUT, 0.1)
    }
}

impl FamilyConfig for ElectraConfig {
    as_bert!();

    fn set_causal(&mut self, causal: bool) -> Result<(), ConfigError> {
        self.0.set_causal(causal)
    }

    /// As in the original code: the width is rounded, heads are 64 wide, feed-forward layers four times as wide as the model, and the
    /// tables are the discriminator's.
    fn generator(&self, width: Option<f64>, layers: Option<usize>) -> Option<ModelConfig> {
        // A third of base, a quarter of small and large (Clark et al. 2020, table 6).
        let usual = if self.0.hidden_size == 768 { 1.0 / 3.0 } else { 0.25 };
        let hidden_size = (self.0.hidden_size as f64 * width.unwrap_or(usual)).round() as usize;
        let mut other = self.0.other.clone();
        other.insert(WIDTH.to_owned(), Value::from(self.width()));
        Some(ModelConfig::Electra(ElectraConfig(BertConfig {
            hidden_size,
            intermediate_size: hidden_size.saturating_mul(4),
            num_attention_heads: (hidden_size / 64).max(1),
            num_hidden_layers: layers.unwrap_or(self.0.num_hidden_layers),
            other,
            ..self.0.clone()
        })))
    }

    fn build_pair(&self, b: &mut Builder, generator: &ModelConfig) -> Option<Model> {
        let ModelConfig::Electra(generator) = generator else { return None };
        // The tables and their LayerNorm are one set.
        let tables = |own: &Self| {
            let BertConfig { vocab_size, max_position_embeddings, type_vocab_size, layer_norm_eps, .. } = own.0;
            (vocab_size, max_position_embeddings, type_vocab_size, layer_norm_eps.to_bits(), own.width())
        };
        if tables(self) != tables(generator) {
            return None;
        }
        let network = encoder(b, self, "electra", None);
        let lender = network.clone();
        let discriminator = with_head(b, self, Head::ReplacedTokens, network);
        let prefix = Model::GENERATOR.trim_end_matches('.');
        Some(discriminator.with_generator(b.at(prefix, |b| {
            let network = encoder(b, generator, "electra", Some(&lender));
            with_head(b, generator, Head::MaskedLm, network)
        })))
    }

    fn check(&self) -> Result<(), ConfigError> {
        self.0.check()?;
        check_sizes(&[(WIDTH, self.width(), 1 << 16)])?;
        check_dropouts(&[(SUMMARY_DROPOUT, self.summary_dropout())])?;
        check_only(
            &self.0.other,
            &[
                ("summary_type", Value::from("first")),
                ("summary_use_proj", Value::from(true)),
                ("summary_activation", Value::from("gelu")),
            ],
        )
    }

    fn sizes(&self) -> Sizes {
        self.0.sizes()
    }

    fn set_dropout(&mut self, p: f64) {
        self.0.set_dropout(p);
        self.0.other.insert(SUMMARY_DROPOUT.to_owned(), Value::from(p));
    }
}

/// A discriminator with bert-base-uncased's vocabulary.
fn of_size(width: usize, layers: usize, hidden: usize, heads: usize) -> ModelConfig {
    ModelConfig::Electra(ElectraConfig(BertConfig {
        model_type: "electra".to_owned(),
        other: Map::from_iter([(WIDTH.to_owned(), Value::from(width))]),
        ..BertConfig::of_size(layers, hidden, heads)
    }))
}

fn build(b: &mut Builder, own: &ElectraConfig, head: Head) -> Model {
    let network = encoder(b, own, if head == Head::Encoder { "" } else { "electra" }, None);
    with_head(b, own, head, network)
}

/// The encoder below a name, on the tables of another where that lends them.
fn encoder(b: &mut Builder, own: &ElectraConfig, base: &str, lender: Option<&PostNormEncoder>) -> PostNormEncoder {
    let width = own.width();
    let projection = (width != own.0.hidden_size).then_some((width, "embeddings_project"));
    let settings = EncoderSettings { projection, ..encoder_settings(&own.0, 0) };
    b.at(base, |b| PostNormEncoder::build_on(b, &settings, lender))
}

fn with_head(b: &mut Builder, own: &ElectraConfig, head: Head, network: PostNormEncoder) -> Model {
    let (h, width) = (own.0.hidden_size, own.width());
    let (init, task) = initial_weights(own.0.initializer_range);
    let mut parts = HeadParts::default();
    if head == Head::MaskedLm {
        let names = VocabularyNames {
            transform: "generator_predictions.dense",
            norm: "generator_predictions.LayerNorm",
            bias: "generator_lm_head.bias",
        };
        let (sizes, epsilon) = ((own.0.vocab_size, h, width), own.0.layer_norm_eps as f32);
        b.mark_output(network.word_table());
        parts.vocabulary = Some(VocabularyHead::build(b, &names, sizes, Activation::Gelu, epsilon, init));
    }
    let dropout = own.0.classifier_dropout.unwrap_or(own.0.hidden_dropout_prob) as f32;
    parts.classifier = match head {
        Head::ReplacedTokens => {
            let dense = Linear::build(b, "discriminator_predictions.dense", h, h, init);
            let out = Linear::build(b, "discriminator_predictions.dense_prediction", h, 1, init);
            let hidden = Some((dense, own.0.hidden_act.into()));
            Some(Classifier { hidden, ..Classifier::plain(0.0, out) })
        }
        Head::Sequence { labels } => Some(Classifier::with_dense(b, (h, labels), Activation::Gelu, dropout, task)),
        Head::Token { labels } => Some(Classifier::plain(dropout, Linear::build(b, "classifier", h, labels, task))),
        Head::Span => Some(Classifier::plain(0.0, Linear::build(b, "qa_outputs", h, 2, task))),
        Head::Choice => {
            let summary = Linear::build(b, "sequence_summary.summary", h, h, task);
            let out = Linear::build(b, "classifier", h, 1, task);
            let hidden = Some((summary, Activation::Gelu));
            Some(Classifier { hidden, ..Classifier::plain(own.summary_dropout() as f32, out) })
        }
        _ => None,
    };
    Model::new(ModelConfig::Electra(own.clone()), head, network, parts)
}
