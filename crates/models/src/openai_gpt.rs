//! GPT (Radford et al. 2018): GPT-2's network with norms behind each half of a block and none at the end.

use henson_tensor::{Builder, Init};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::bert::{fiftieth, tenth};
use crate::config::{FamilyConfig, FineTuning};
use crate::gpt::{
    BUFFERS, FINE_TUNING, Gpt, GptSettings, HeadDropouts, PREFIX, head_parts, only_causal, set_special_ids,
};
use crate::{ConfigError, Family, Head, HiddenActivation, Model, ModelConfig, Naming, Network, Sizes, SpecialIds};

/// GPT as the table of families has it.
pub(crate) static FAMILY: Family = Family {
    types: &[("openai-gpt", "OpenAIGPT")],
    naming: Naming {
        base_prefix: "transformer.",
        encoder: &["tokens_embed.", "positions_embed.", "h."],
        old_endings: &[],
        tied: &[("lm_head.weight", "transformer.tokens_embed.weight")],
        ignored_endings: BUFFERS,
    },
    heads: &[Head::Encoder, Head::MaskedLm, Head::Sequence { labels: 0 }, Head::Choice],
    causal: Some("LMHeadModel"),
    endings: &[(Head::MaskedLm, "LMHeadModel"), (Head::Choice, "DoubleHeadsModel")],
    sizes: &[("openai-gpt", || ModelConfig::OpenAiGpt(OpenAiGptConfig::default()))],
    parse,
};

/// The sizes and settings of a GPT. A key that is missing has the default of `transformers`; BERT's names of sizes are read as
/// well.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct OpenAiGptConfig {
    /// V: tokens of the vocabulary.
    pub vocab_size: usize,
    /// Maximum length of a sequence; `n_ctx` in some old files.
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
    /// The activation of feed-forward layers.
    pub afn: GptActivation,
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
    /// Whether the vocabulary's logits come from the word embeddings, and not from a table of their own.
    pub tie_word_embeddings: bool,
    /// `openai-gpt`.
    pub model_type: String,
    /// Keys that we do not know, kept as they are.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// The activation by GPT's own names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum GptActivation {
    /// GELU with tanh, under the name that has the error function elsewhere.
    #[default]
    #[serde(rename = "gelu")]
    Gelu,
    /// max(x, 0).
    #[serde(rename = "relu")]
    Relu,
    /// x·σ(x).
    #[serde(rename = "silu", alias = "swish")]
    Silu,
}

impl From<GptActivation> for HiddenActivation {
    fn from(name: GptActivation) -> Self {
        match name {
            GptActivation::Gelu => HiddenActivation::GeluNew,
            GptActivation::Relu => HiddenActivation::Relu,
            GptActivation::Silu => HiddenActivation::Silu,
        }
    }
}

impl Default for OpenAiGptConfig {
    fn default() -> Self {
        Self {
            vocab_size: 40478,
            n_positions: 512,
            n_embd: 768,
            n_layer: 12,
            n_head: 12,
            afn: GptActivation::Gelu,
            resid_pdrop: tenth(),
            embd_pdrop: tenth(),
            attn_pdrop: tenth(),
            layer_norm_epsilon: 1e-5,
            initializer_range: fiftieth(),
            summary_first_dropout: tenth(),
            tie_word_embeddings: true,
            model_type: "openai-gpt".to_owned(),
            other: Map::new(),
        }
    }
}

fn parse(mut value: Value) -> Result<ModelConfig, ConfigError> {
    let length = value.get("n_ctx").filter(|length| !length.is_null()).cloned();
    if let (Some(length), Some(keys)) = (length, value.as_object_mut()) {
        keys.entry("n_positions").or_insert(length);
    }
    Ok(ModelConfig::OpenAiGpt(serde_json::from_value(value)?))
}

impl OpenAiGptConfig {
    fn settings(&self) -> GptSettings {
        let init = Init::Normal(self.initializer_range as f32);
        GptSettings {
            vocabulary: self.vocab_size,
            positions: self.n_positions,
            hidden: self.n_embd,
            inner: self.n_embd.saturating_mul(4),
            layers: self.n_layer,
            heads: self.n_head,
            activation: HiddenActivation::from(self.afn).into(),
            epsilon: self.layer_norm_epsilon as f32,
            embedding_dropout: self.embd_pdrop as f32,
            residual_dropout: self.resid_pdrop as f32,
            attention_dropout: self.attn_pdrop as f32,
            tables: ["tokens_embed", "positions_embed"],
            final_norm: None,
            scaled: true,
            scaled_by_layer: false,
            init,
            output_init: init,
        }
    }
}

impl FamilyConfig for OpenAiGptConfig {
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
        ];
        self.settings().check(&dropouts, self.layer_norm_epsilon, &self.other)
    }

    fn sizes(&self) -> Sizes {
        self.settings().sizes(self.afn.into(), self.resid_pdrop, self.attn_pdrop)
    }

    fn set_vocab_size(&mut self, size: usize) {
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
    }

    fn set_causal(&mut self, causal: bool) -> Result<(), ConfigError> {
        only_causal("openai-gpt", causal)
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
        let dropouts = HeadDropouts { token: 0.0, choice: self.summary_first_dropout as f32 };
        let parts = head_parts(b, head, &settings, (network.word_table(), self.tie_word_embeddings), dropouts);
        Model::new(ModelConfig::OpenAiGpt(self.clone()), head, network, parts)
    }
}
