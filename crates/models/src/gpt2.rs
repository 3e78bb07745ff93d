//! GPT-2 (Radford et al. 2019), distilgpt2 and their relatives: pre-norm blocks with a norm behind the last.

use henson_tensor::{Builder, Init};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::bert::{fiftieth, tenth};
use crate::config::{FamilyConfig, FineTuning, probability};
use crate::gpt::{
    BUFFERS, FINE_TUNING, Gpt, GptSettings, HeadDropouts, PREFIX, head_parts, only_causal, set_special_ids,
};
use crate::{ConfigError, Family, Head, HiddenActivation, Model, ModelConfig, Naming, Network, Sizes, SpecialIds};

/// GPT-2 as the table of families has it.
pub(crate) static FAMILY: Family = Family {
    types: &[("gpt2", "GPT2")],
    naming: Naming {
        base_prefix: "transformer.",
        encoder: &["wte.", "wpe.", "h.", "ln_f."],
        old_endings: &[],
        tied: &[("lm_head.weight", "transformer.wte.weight")],
        ignored_endings: BUFFERS,
    },
    heads: &[
        Head::Encoder,
        Head::MaskedLm,
        Head::Sequence { labels: 0 },
        Head::Token { labels: 0 },
        Head::Span,
        Head::Choice,
    ],
    causal: Some("LMHeadModel"),
    endings: &[(Head::MaskedLm, "LMHeadModel"), (Head::Choice, "DoubleHeadsModel")],
    // Two small ones to train from scratch, then the published ones.
    sizes: &[
        ("gpt2-tiny", || of_size(2, 128, 2)),
        ("gpt2-mini", || of_size(4, 256, 4)),
        ("distilgpt2", || of_size(6, 768, 12)),
        ("gpt2", || of_size(12, 768, 12)),
        ("gpt2-medium", || of_size(24, 1024, 16)),
        ("gpt2-large", || of_size(36, 1280, 20)),
        ("gpt2-xl", || of_size(48, 1600, 25)),
    ],
    parse: |value| Ok(ModelConfig::Gpt2(serde_json::from_value(value)?)),
};

const IDS: [&str; 3] = ["bos_token_id", "eos_token_id", "pad_token_id"];

/// The sizes and settings of a GPT-2. A key that is missing has the default of `transformers`; BERT's names of sizes are read as
/// well.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Gpt2Config {
    /// V: tokens of the vocabulary.
    pub vocab_size: usize,
    /// Maximum length of a sequence.
    #[serde(alias = "max_position_embeddings")]
    pub n_positions: usize,
    /// H.
    #[serde(alias = "hidden_size")]
    pub n_embd: usize,
    /// Blocks.
    #[serde(alias = "num_hidden_layers")]
    pub n_layer: usize,
    /// Attention heads; divide H.
    #[serde(alias = "num_attention_heads")]
    pub n_head: usize,
    /// Columns inside of the feed-forward layers, where they are not 4·H.
    pub n_inner: Option<usize>,
    /// The activation of feed-forward layers.
    pub activation_function: HiddenActivation,
    /// Dropout of what each half of a block gives.
    pub resid_pdrop: f64,
    /// Dropout on embeddings.
    pub embd_pdrop: f64,
    /// Dropout on attention's probabilities.
    pub attn_pdrop: f64,
    /// Added to the variance in LayerNorm.
    pub layer_norm_epsilon: f64,
    /// The standard deviation of initial weights.
    pub initializer_range: f64,
    /// Dropout before the head for choices.
    pub summary_first_dropout: f64,
    /// Whether scores are divided by √D.
    pub scale_attn_weights: bool,
    /// Whether they are divided by the layer's number, from 1, too.
    pub scale_attn_by_inverse_layer_idx: bool,
    /// Whether the vocabulary's logits come from the word embeddings, and not from a table of their own.
    pub tie_word_embeddings: bool,
    /// `gpt2`.
    pub model_type: String,
    /// Keys that we do not know, kept as they are.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

impl Default for Gpt2Config {
    fn default() -> Self {
        Self {
            vocab_size: 50257,
            n_positions: 1024,
            n_embd: 768,
            n_layer: 12,
            n_head: 12,
            n_inner: None,
            activation_function: HiddenActivation::GeluNew,
            resid_pdrop: tenth(),
            embd_pdrop: tenth(),
            attn_pdrop: tenth(),
            layer_norm_epsilon: 1e-5,
            initializer_range: fiftieth(),
            summary_first_dropout: tenth(),
            scale_attn_weights: true,
            scale_attn_by_inverse_layer_idx: false,
            tie_word_embeddings: true,
            model_type: "gpt2".to_owned(),
            other: Map::new(),
        }
    }
}

fn of_size(layers: usize, hidden: usize, heads: usize) -> ModelConfig {
    let other = [("bos_token_id", 50256), ("eos_token_id", 50256)].map(|(key, id)| (key.to_owned(), Value::from(id)));
    ModelConfig::Gpt2(Gpt2Config {
        n_layer: layers,
        n_embd: hidden,
        n_head: heads,
        other: Map::from_iter(other),
        ..Gpt2Config::default()
    })
}

impl Gpt2Config {
    fn inner(&self) -> usize {
        self.n_inner.unwrap_or(self.n_embd.saturating_mul(4))
    }

    /// As `transformers` looks for it.
    fn token_dropout(&self) -> f64 {
        let hidden = probability(&self.other, "hidden_dropout", 0.1);
        probability(&self.other, "classifier_dropout", hidden)
    }

    fn settings(&self) -> GptSettings {
        let range = self.initializer_range;
        GptSettings {
            vocabulary: self.vocab_size,
            positions: self.n_positions,
            hidden: self.n_embd,
            inner: self.inner(),
            layers: self.n_layer,
            heads: self.n_head,
            activation: self.activation_function.into(),
            epsilon: self.layer_norm_epsilon as f32,
            embedding_dropout: self.embd_pdrop as f32,
            residual_dropout: self.resid_pdrop as f32,
            attention_dropout: self.attn_pdrop as f32,
            tables: ["wte", "wpe"],
            final_norm: Some("ln_f"),
            scaled: self.scale_attn_weights,
            scaled_by_layer: self.scale_attn_by_inverse_layer_idx,
            init: Init::Normal(range as f32),
            output_init: Init::Normal((range / (2.0 * self.n_layer as f64).sqrt()) as f32),
        }
    }
}

impl FamilyConfig for Gpt2Config {
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
        let dropouts = [
            ("resid_pdrop", self.resid_pdrop),
            ("embd_pdrop", self.embd_pdrop),
            ("attn_pdrop", self.attn_pdrop),
            ("summary_first_dropout", self.summary_first_dropout),
            ("classifier_dropout", self.token_dropout()),
        ];
        self.settings().check(&dropouts, self.layer_norm_epsilon, &self.other)
    }

    fn sizes(&self) -> Sizes {
        self.settings().sizes(self.activation_function, self.resid_pdrop, self.attn_pdrop)
    }

    fn set_vocab_size(&mut self, size: usize) {
        if size != self.vocab_size {
            // They are another vocabulary's. Without the key, `transformers` takes gpt2's.
            IDS.iter().for_each(|key| drop(self.other.insert((*key).to_owned(), Value::Null)));
        }
        self.vocab_size = size;
    }

    fn set_special_ids(&mut self, ids: SpecialIds) {
        set_special_ids(&mut self.other, ids);
    }

    fn set_layers(&mut self, layers: usize) {
        self.n_layer = layers;
    }

    fn set_dropout(&mut self, p: f64) {
        (self.resid_pdrop, self.embd_pdrop, self.attn_pdrop, self.summary_first_dropout) = (p, p, p, p);
        self.other.insert("classifier_dropout".to_owned(), Value::from(p));
    }

    fn set_causal(&mut self, causal: bool) -> Result<(), ConfigError> {
        only_causal("gpt2", causal)
    }

    fn can_average(&self) -> bool {
        false
    }

    fn fine_tuning(&self, _: Head) -> FineTuning {
        FINE_TUNING
    }

    fn build(&self, b: &mut Builder, head: Head) -> Model {
        let settings = self.settings();
        let base = if head == Head::Encoder { "" } else { PREFIX };
        let network = b.at(base, |b| Gpt::build(b, &settings));
        let dropouts = HeadDropouts { token: self.token_dropout() as f32, choice: self.summary_first_dropout as f32 };
        let parts = head_parts(b, head, &settings, (network.word_table(), self.tie_word_embeddings), dropouts);
        Model::new(ModelConfig::Gpt2(self.clone()), head, network, parts)
    }
}
