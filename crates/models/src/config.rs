//! The network's part of a config.json: an enum picked by `model_type`, in Hugging Face's words. Keys that change nothing in
//! the computation are kept and written back; a key that would change it in a way we do not follow is an error.
//!
//! Labels, lengths and thresholds belong to tasks and are not here.

use henson_tensor::{Activation, Builder, LogBuckets};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::characters::CharacterSettings;
use crate::streams::MemorySettings;
use crate::{Family, Head, Model, ModelConfig};

/// What every family's config can say and be told. The rest is between a family and its own config.
pub(crate) trait FamilyConfig {
    fn family(&self) -> &'static Family;
    fn model_type(&self) -> &str;
    fn to_json(&self) -> Result<Value, serde_json::Error>;
    fn check(&self) -> Result<(), ConfigError>;
    fn sizes(&self) -> Sizes;
    fn set_vocab_size(&mut self, size: usize);
    /// Takes over the ids of a tokenizer's special tokens, where the family writes texts and so must know them.
    fn set_special_ids(&mut self, _ids: SpecialIds) {}
    fn set_layers(&mut self, layers: usize);
    fn set_dropout(&mut self, p: f64);
    /// Whether a token sees only what stands before it; an error where the family cannot.
    fn set_causal(&mut self, causal: bool) -> Result<(), ConfigError> {
        let other = "a family with left-to-right models, such as bert";
        if causal { Err(ConfigError::value("model_type", self.model_type(), other)) } else { Ok(()) }
    }
    /// Whether [`Model::average`] works: with a layer more whose weights are its own.
    fn can_average(&self) -> bool {
        true
    }
    /// Multiply-adds of all layers for a token of a sequence of so many: matrices, and what it attends to.
    fn multiply_adds(&self, length: usize) -> f64 {
        let Sizes { hidden_size, intermediate_size, num_hidden_layers, .. } = self.sizes();
        let (h, i) = (hidden_size as f64, intermediate_size as f64);
        num_hidden_layers as f64 * (4.0 * h * h + 2.0 * h * i + 2.0 * length as f64 * h)
    }
    /// How distances become rows of the table of relative positions, and how many it has, where there is one.
    fn relative_positions(&self) -> Option<(LogBuckets, usize)> {
        None
    }
    /// Whether the network scores distances and segments, and predicts tokens in an order by a second stream.
    fn has_streams(&self) -> bool {
        false
    }
    /// How much of a sequence is remembered for the next, where the network can.
    fn memory(&self) -> Option<MemorySettings> {
        None
    }
    /// Notes that so many tokens at the beginning of each sequence are remembered in training, where the network can.
    fn set_remembered(&mut self, _tokens: usize) {}
    /// How words are read as characters, where tokens are the bytes of words.
    fn characters(&self) -> Option<CharacterSettings> {
        None
    }
    /// How the texts of words are read as characters, where tokens are whole words.
    fn spelled_words(&self) -> Option<CharacterSettings> {
        None
    }
    /// How many words a language model over words predicts, where tokens are the bytes of words; none: it has no such head yet.
    fn predicted_words(&self) -> Option<usize> {
        None
    }
    /// Sets it, where there is such a number.
    fn set_predicted_words(&mut self, _words: usize) {}
    /// Whether its states can be carried from one part of a text to the next in training.
    fn carries_states(&self) -> bool {
        false
    }
    /// Whether recurrent layers read its tokens, and how.
    fn recurrence(&self) -> Recurrence {
        Recurrence::None
    }
    /// How models with a head are fine-tuned where nobody says otherwise.
    fn fine_tuning(&self, _head: Head) -> FineTuning {
        FineTuning::BERT
    }
    /// How targets are read, where the family is one of encoder-decoders.
    fn targets(&self) -> Option<TargetReading> {
        None
    }
    /// Whether a token head's labels are scored together, by a conditional random field.
    fn scores_jointly(&self) -> bool {
        false
    }
    /// Whether `transformers` has classes for it, so that what is saved opens there.
    fn in_transformers(&self) -> bool {
        true
    }
    /// What words are read with, where the family reads whole words and so a task's own vocabulary.
    fn word_vocabulary(&self) -> Option<WordVocabulary> {
        None
    }
    /// Lays out the parameters of a model; `head` is one of the family's.
    fn build(&self, b: &mut Builder, head: Head) -> Model;
    /// The generator that a discriminator of this config is trained with, where the family has such pairs: so many times its width,
    /// and layers.
    fn generator(&self, _width: Option<f64>, _layers: Option<usize>) -> Option<ModelConfig> {
        None
    }
    /// Lays out a discriminator and a generator over its tables, where the family has such pairs and the two fit.
    fn build_pair(&self, _b: &mut Builder, _generator: &ModelConfig) -> Option<Model> {
        None
    }
}

/// How recurrent layers read the tokens of a batch: what a GPU must know before a pass over it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Recurrence {
    /// Not at all.
    None,
    /// One after the other, as they lie: the batch's layout has the steps.
    Layers,
    /// In steps that the network makes while it runs, so that its passes cannot be recorded.
    Fed,
}

/// The tokens of a tokenizer that a model which writes must know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpecialIds {
    /// What begins a text; where nothing does, what ends one.
    pub begin: u32,
    /// What ends a text.
    pub end: u32,
    /// Padding, where there is such a token.
    pub padding: Option<u32>,
}

/// What a family that reads whole words needs of a vocabulary, which is made from the texts of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WordVocabulary {
    /// Numbers of a word's vector.
    pub width: usize,
}

/// How an encoder-decoder reads what it writes: a token behind the one that it shall give.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TargetReading {
    /// `decoder_start_token_id`: what stands before the first token of a target.
    pub start: u32,
    /// `eos_token_id`: what ends a target.
    pub end: u32,
    /// Whether there are heads for which the decoder reads a source without a target as well, behind the start token, as BART's
    /// and T5's classifiers do; of others, the encoder's output is the network's.
    pub from_source: bool,
}

/// How models of base and large sizes are fine-tuned where nobody says otherwise, as their authors did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FineTuning {
    /// Peak learning rates of models up to 768 wide, and of wider ones.
    pub learning_rates: [f64; 2],
    /// Epochs.
    pub epochs: f64,
    /// The share of updates in which the rate rises.
    pub warmup: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Adam's β₂.
    pub beta2: f64,
    /// The norm that gradients are clipped to; 0 for none.
    pub clip: f64,
    /// The factor on the learning rate of each layer further down.
    pub layer_decay: f64,
    /// Sequences of an update.
    pub batch_size: usize,
    /// Whether texts stand between tokens of their own that fine-tuning adds, and the vector of the last one is read.
    pub task_tokens: bool,
    /// The weight of the language model's loss on the same texts.
    pub auxiliary_lm: f64,
    /// Whether classes and numbers are written as texts.
    pub text_to_text: bool,
}

impl FineTuning {
    /// BERT's (Devlin et al. 2019, appendix A.3).
    pub const BERT: Self = Self {
        learning_rates: [5e-5, 3e-5],
        epochs: 3.0,
        warmup: 0.1,
        weight_decay: 0.01,
        beta2: 0.999,
        clip: 1.0,
        layer_decay: 1.0,
        batch_size: 16,
        task_tokens: false,
        auxiliary_lm: 0.0,
        text_to_text: false,
    };
}

/// A probability among keys that a family reads itself; one that is no number fails the check of dropouts.
pub(crate) fn probability(other: &Map<String, Value>, key: &str, default: f64) -> f64 {
    let given = other.get(key).filter(|given| !given.is_null());
    given.map_or(default, |given| given.as_f64().unwrap_or(f64::NAN))
}

/// A number among keys that a family reads itself; one that is no size fails the check of sizes.
pub(crate) fn number(other: &Map<String, Value>, key: &str, default: usize) -> usize {
    let given = other.get(key).filter(|given| !given.is_null());
    given.map_or(default, |given| given.as_u64().and_then(|number| usize::try_from(number).ok()).unwrap_or(0))
}

/// What configs with a struct of their own have in common.
macro_rules! own_config {
    () => {
        fn family(&self) -> &'static Family {
            &FAMILY
        }

        fn model_type(&self) -> &str {
            &self.model_type
        }

        fn to_json(&self) -> Result<serde_json::Value, serde_json::Error> {
            serde_json::to_value(self)
        }

        fn build(&self, b: &mut Builder, head: Head) -> Model {
            build(b, self, head)
        }
    };
}
pub(crate) use own_config;

/// What a config that is BERT's with some keys more (`struct Own(BertConfig)`) has in common with BERT's.
macro_rules! as_bert {
    () => {
        fn family(&self) -> &'static Family {
            &FAMILY
        }

        fn model_type(&self) -> &str {
            self.0.model_type()
        }

        fn to_json(&self) -> Result<serde_json::Value, serde_json::Error> {
            self.0.to_json()
        }

        fn set_vocab_size(&mut self, size: usize) {
            self.0.set_vocab_size(size);
        }

        fn set_layers(&mut self, layers: usize) {
            self.0.set_layers(layers);
        }

        fn build(&self, b: &mut Builder, head: Head) -> Model {
            build(b, self, head)
        }
    };
}
pub(crate) use as_bert;

/// What other crates need to know of a network.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sizes {
    /// V: tokens of the vocabulary.
    pub vocab_size: usize,
    /// H.
    pub hidden_size: usize,
    /// L: layers of the encoder.
    pub num_hidden_layers: usize,
    /// A; divides H.
    pub num_attention_heads: usize,
    /// Columns inside of the feed-forward layers.
    pub intermediate_size: usize,
    /// Maximum length of a sequence in tokens, special tokens included.
    pub max_tokens: usize,
    /// Segments that a token can belong to; 1 where the network knows none.
    pub segments: usize,
    /// The activation of feed-forward layers.
    pub hidden_act: HiddenActivation,
    /// Dropout of hidden states.
    pub dropout: f64,
    /// Dropout of attention's probabilities.
    pub attention_dropout: f64,
    /// Whether a token sees only what stands before it.
    pub causal: bool,
}

impl Sizes {
    /// Checks what configs have under the same names.
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        check_sizes(&[
            ("vocab_size", self.vocab_size, 1 << 24),
            ("hidden_size", self.hidden_size, 1 << 16),
            ("num_hidden_layers", self.num_hidden_layers, 1 << 10),
            ("num_attention_heads", self.num_attention_heads, 1 << 12),
            ("intermediate_size", self.intermediate_size, 1 << 20),
        ])?;
        check_heads("num_attention_heads", self.num_attention_heads, self.hidden_size)
    }
}

impl ModelConfig {
    /// Reads a config.json that was parsed already.
    pub fn from_value(value: Value) -> Result<Self, ConfigError> {
        let model_type = value.get("model_type").and_then(Value::as_str).unwrap_or("bert");
        let family = Family::of_type(model_type).ok_or_else(|| ConfigError::Family(model_type.to_owned()))?;
        let config = match (family.parse)(value.clone()) {
            Err(ConfigError::Json(error)) => return Err(ConfigError::of_key(family, value, error)),
            other => other?,
        };
        config.check()?;
        Ok(config)
    }

    /// The config as `transformers` writes it.
    pub fn to_json(&self) -> Result<Value, ConfigError> {
        Ok(self.own().to_json()?)
    }

    /// The family.
    pub fn family(&self) -> &'static Family {
        self.own().family()
    }

    /// `model_type` in config.json.
    pub fn model_type(&self) -> &str {
        self.own().model_type()
    }

    /// The class of `transformers` that a model with this head is loaded into.
    pub fn class(&self, head: Head) -> String {
        self.family().class(self.own().model_type(), head, self.sizes().causal)
    }

    /// Lays out the parameters of a model; `head` is one of the family's.
    pub(crate) fn build(&self, b: &mut Builder, head: Head) -> Model {
        self.own().build(b, head)
    }

    pub(crate) fn build_pair(&self, b: &mut Builder, generator: &ModelConfig) -> Option<Model> {
        self.own().build_pair(b, generator)
    }

    /// The generator that a discriminator of this config is trained with: so many times its width (by default what was published
    /// with its size) and so many layers (by default as many). An error where the family has no such pairs, or it is none.
    pub fn generator(&self, width: Option<f64>, layers: Option<usize>) -> Result<Self, ConfigError> {
        let generator = self
            .own()
            .generator(width, layers)
            .ok_or_else(|| ConfigError::NoGenerator(self.model_type().to_owned()))?;
        generator.check()?;
        Ok(generator)
    }

    /// What other crates need to know.
    pub fn sizes(&self) -> Sizes {
        self.own().sizes()
    }

    /// How distances become rows of the table of relative positions, and how many it has, where there is one.
    pub(crate) fn relative_positions(&self) -> Option<(LogBuckets, usize)> {
        self.own().relative_positions()
    }

    /// Whether tokens can be predicted in an order, by a second stream that does not see them: [`Batch::in_order`](crate::Batch).
    pub fn has_streams(&self) -> bool {
        self.own().has_streams()
    }

    /// How much of a sequence is remembered for the next, where the network can.
    pub fn memory(&self) -> Option<MemorySettings> {
        self.own().memory()
    }

    /// Notes that so many tokens at the beginning of each sequence are remembered in training, where the network can.
    pub fn set_remembered(&mut self, tokens: usize) {
        self.own_mut().set_remembered(tokens);
    }

    /// Whether a token head's labels are scored together, by a conditional random field.
    pub fn scores_jointly(&self) -> bool {
        self.own().scores_jointly()
    }

    /// Whether `transformers` has classes for it; a family of our own has defaults of its own for all sizes.
    pub fn in_transformers(&self) -> bool {
        self.own().in_transformers()
    }

    /// What words are read with, where the family reads whole words: such a model is made together with the vocabulary of a task.
    pub fn word_vocabulary(&self) -> Option<WordVocabulary> {
        self.own().word_vocabulary()
    }

    /// How words are read as characters, where tokens are the bytes of words: all of a word's have its vector.
    pub fn characters(&self) -> Option<CharacterSettings> {
        self.own().characters()
    }

    /// Whether tokens are whole words that are read as characters besides: a batch then needs their texts, see
    /// [`Batch::spelled`](crate::Batch).
    pub fn spells_words(&self) -> bool {
        self.own().spelled_words().is_some()
    }

    /// How many classes the head for tokens has: those of the vocabulary, or of the words that are predicted where tokens are bytes.
    pub fn predicted_classes(&self) -> usize {
        self.own().predicted_words().unwrap_or_else(|| self.sizes().vocab_size)
    }

    /// How many words a language model over words predicts, where tokens are the bytes of words.
    pub fn predicted_words(&self) -> Option<usize> {
        self.own().predicted_words()
    }

    /// Sets it, where there is such a number.
    pub fn set_predicted_words(&mut self, words: usize) {
        self.own_mut().set_predicted_words(words);
    }

    /// Whether its states can be carried from one part of a text to the next: [`Batch::continuing`](crate::Batch).
    pub fn carries_states(&self) -> bool {
        self.own().carries_states()
    }

    /// So many tokens of a usual tokenizer in this network's own: where tokens are bytes, eight for each.
    pub fn own_length(&self, length: usize) -> usize {
        if self.characters().is_some() { length.saturating_mul(8) } else { length }
    }

    /// How targets are read, where it is an encoder-decoder.
    pub fn targets(&self) -> Option<TargetReading> {
        self.own().targets()
    }

    /// Checks what the single fields cannot.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.own().check()
    }

    /// Sets the number of tokens in the vocabulary.
    pub fn set_vocab_size(&mut self, size: usize) {
        self.own_mut().set_vocab_size(size);
    }

    /// Takes over the ids of a tokenizer's special tokens, where the family writes texts and so must know them.
    pub fn set_special_ids(&mut self, ids: SpecialIds) {
        self.own_mut().set_special_ids(ids);
    }

    /// The same with so many tokens, of which the first are those that it had: what it says of single tokens stays true.
    pub fn with_more_tokens(&self, size: usize) -> Result<Self, ConfigError> {
        let mut json = self.to_json()?;
        json["vocab_size"] = size.into();
        Self::from_value(json)
    }

    /// Sets the number of layers.
    pub fn set_layers(&mut self, layers: usize) {
        self.own_mut().set_layers(layers);
    }

    /// How models with a head are fine-tuned where nobody says otherwise.
    pub fn fine_tuning(&self, head: Head) -> FineTuning {
        self.own().fine_tuning(head)
    }

    /// Whether [`Model::average`] works for models with a layer more.
    pub fn can_average(&self) -> bool {
        self.own().can_average()
    }

    /// Multiply-adds of all layers for a token of a sequence of so many: those of matrix multiplications and of attention.
    pub fn multiply_adds(&self, length: usize) -> f64 {
        self.own().multiply_adds(length)
    }

    /// Sets every dropout.
    pub fn set_dropout(&mut self, p: f64) {
        self.own_mut().set_dropout(p);
    }

    /// Lets a token see only what stands before it, or everything; an error where the family cannot.
    pub fn set_causal(&mut self, causal: bool) -> Result<(), ConfigError> {
        self.own_mut().set_causal(causal)
    }
}

/// The activation by the name that configs use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum HiddenActivation {
    /// GELU with the error function: Google's first releases, and the default.
    #[default]
    #[serde(rename = "gelu")]
    Gelu,
    /// GELU with tanh: Google's newest code.
    #[serde(rename = "gelu_new")]
    GeluNew,
    /// The same under PyTorch's name.
    #[serde(rename = "gelu_pytorch_tanh")]
    GeluPytorchTanh,
    /// max(x, 0).
    #[serde(rename = "relu")]
    Relu,
    /// tanh.
    #[serde(rename = "tanh")]
    Tanh,
    /// x·σ(x).
    #[serde(rename = "silu", alias = "swish")]
    Silu,
}

impl From<HiddenActivation> for Activation {
    fn from(name: HiddenActivation) -> Self {
        match name {
            HiddenActivation::Gelu => Activation::Gelu,
            HiddenActivation::GeluNew | HiddenActivation::GeluPytorchTanh => Activation::GeluTanh,
            HiddenActivation::Relu => Activation::Relu,
            HiddenActivation::Tanh => Activation::Tanh,
            HiddenActivation::Silu => Activation::Silu,
        }
    }
}

/// A config does not describe a model that we can build.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// Keys are missing or have the wrong type.
    #[error("config.json: {0}")]
    Json(#[from] serde_json::Error),
    /// A key has the wrong type.
    #[error("config.json: `{key}`: {error}")]
    Key {
        /// The key.
        key: String,
        /// What is wrong with it.
        error: serde_json::Error,
    },
    /// Another kind of model.
    #[error("config.json: model_type is `{0}`; this version of henson knows: {names}", names = Family::type_names())]
    Family(String),
    /// A value is out of range, or values contradict each other.
    #[error("config.json: `{key}` is {got}, expected {expected}")]
    Value {
        /// The key.
        key: &'static str,
        /// Its value.
        got: String,
        /// What it may be.
        expected: String,
    },
    /// A name of a size is unknown.
    #[error("unknown size `{0}`: expected one of {names}", names = Family::size_names())]
    Size(String),
    /// A model that is not trained with a generator.
    #[error("{0} has no generator: replaced tokens are detected by models of the sizes {names}", names = Family::detector_names())]
    NoGenerator(String),
}

impl ConfigError {
    /// A value that is not what it may be.
    pub fn value(key: &'static str, got: impl ToString, expected: impl Into<String>) -> Self {
        ConfigError::Value { key, got: got.to_string(), expected: expected.into() }
    }

    /// The error of a config that a family cannot read, with the key that it is about: the one without which it is another or none.
    fn of_key(family: &Family, value: Value, error: serde_json::Error) -> Self {
        let Value::Object(keys) = value else { return ConfigError::Json(error) };
        let is_about = |key: &&String| {
            let mut rest = keys.clone();
            rest.remove(*key);
            match (family.parse)(Value::Object(rest)) {
                Err(ConfigError::Json(other)) => other.to_string() != error.to_string(),
                _ => true,
            }
        };
        match keys.keys().find(is_about).cloned() {
            Some(key) => ConfigError::Key { key, error },
            None => ConfigError::Json(error),
        }
    }
}

/// Sizes must be at least 1 and not absurd.
pub(crate) fn check_sizes(sizes: &[(&'static str, usize, usize)]) -> Result<(), ConfigError> {
    match sizes.iter().find(|(_, got, most)| *got == 0 || got > most) {
        Some((key, got, most)) => Err(ConfigError::value(key, got, format!("1 to {most}"))),
        None => Ok(()),
    }
}

/// Heads must divide the hidden size.
pub(crate) fn check_heads(key: &'static str, heads: usize, hidden: usize) -> Result<(), ConfigError> {
    match hidden.is_multiple_of(heads) {
        true => Ok(()),
        false => Err(ConfigError::value(key, heads, format!("a divisor of hidden_size, {hidden}"))),
    }
}

/// Probabilities of dropout.
pub(crate) fn check_dropouts(rates: &[(&'static str, f64)]) -> Result<(), ConfigError> {
    match rates.iter().find(|(_, p)| !(0.0..1.0).contains(p)) {
        Some((key, got)) => Err(ConfigError::value(key, got, "0 to below 1")),
        None => Ok(()),
    }
}

/// What is added to a variance.
pub(crate) fn check_epsilon(key: &'static str, got: f64) -> Result<(), ConfigError> {
    match got > 0.0 && got < 1.0 {
        true => Ok(()),
        false => Err(ConfigError::value(key, got, "a small positive number")),
    }
}

/// Keys that may be there, but only with a value under which the network is the one that we build.
pub(crate) fn check_only(other: &Map<String, Value>, only: &[(&'static str, Value)]) -> Result<(), ConfigError> {
    for (key, expected) in only {
        if let Some(got) = other.get(*key).filter(|got| *got != expected && !got.is_null()) {
            return Err(ConfigError::value(key, got, expected.to_string()));
        }
    }
    Ok(())
}
