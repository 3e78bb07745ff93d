//! BERT's config.json: a struct that builds the model, in Hugging Face's words. Keys that change nothing in the
//! computation are kept and written back; a key that would change it in a way we do not follow is an error.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use henson_tensor::Activation;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The sizes and settings of a BERT.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BertConfig {
    /// V: pieces of the vocabulary.
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
    /// The most tokens of a sequence.
    pub max_position_embeddings: usize,
    /// Segments: sentence A and sentence B.
    #[serde(default = "two")]
    pub type_vocab_size: usize,
    /// The deviation of initial weights.
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
    /// The names of labels by their number, written as text.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub id2label: BTreeMap<String, String>,
    /// The numbers of labels by their name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub label2id: BTreeMap<String, usize>,
    /// What a sequence classifier's loss is: see `transformers`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem_type: Option<String>,
    /// The class that `transformers` loads the weights into.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub architectures: Vec<String>,
    /// How a fine-tuned model read its texts in training, which is how it reads them afterwards unless told otherwise. A key
    /// of our own, which `transformers` keeps and does not read.
    #[serde(rename = "henson_reading", default, skip_serializing_if = "Option::is_none")]
    pub reading: Option<TrainedReading>,
    /// `bert`.
    #[serde(default = "bert")]
    pub model_type: String,
    /// Keys that we do not know, kept as they are.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// How texts became sequences when a model was fine-tuned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainedReading {
    /// The most tokens of a sequence, special ones included.
    pub max_length: usize,
    /// Whether longer texts were divided into windows that overlap, instead of cut.
    pub windows: bool,
    /// Questions: from the beginning of one window over the passage to that of the next, in pieces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stride: Option<usize>,
    /// Questions: the most pieces of a question.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_question: Option<usize>,
    /// Words with tags: whether the sentences around them, of the same document, were read along with them.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub document_context: bool,
    /// Texts with classes or numbers: whether they came in pairs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pairs: Option<bool>,
}

const NO_ANSWER_THRESHOLD: &str = "henson_no_answer_threshold";

fn tenth() -> f64 {
    0.1
}
fn fiftieth() -> f64 {
    0.02
}
fn tiny() -> f64 {
    1e-12
}
fn two() -> usize {
    2
}
fn bert() -> String {
    "bert".to_owned()
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
}

impl From<HiddenActivation> for Activation {
    fn from(name: HiddenActivation) -> Self {
        match name {
            HiddenActivation::Gelu => Activation::Gelu,
            HiddenActivation::GeluNew | HiddenActivation::GeluPytorchTanh => Activation::GeluTanh,
            HiddenActivation::Relu => Activation::Relu,
            HiddenActivation::Tanh => Activation::Tanh,
        }
    }
}

/// A config does not describe a model that we can build.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// Keys are missing or have the wrong type.
    #[error("config.json: {0}")]
    Json(#[from] serde_json::Error),
    /// Another kind of model.
    #[error("config.json: model_type is `{0}`; this version of henson knows: bert")]
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
    #[error("unknown size `{0}`: expected one of {names}", names = Size::names())]
    Size(String),
}

impl BertConfig {
    /// Reads the text of a config.json.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        Self::from_value(serde_json::from_str(text)?)
    }

    /// Reads a config.json that was parsed already.
    pub fn from_value(value: Value) -> Result<Self, ConfigError> {
        let family = value.get("model_type").and_then(Value::as_str).unwrap_or("bert");
        if family != "bert" {
            return Err(ConfigError::Family(family.to_owned()));
        }
        let config: Self = serde_json::from_value(value)?;
        config.check()?;
        Ok(config)
    }

    /// The config as `transformers` writes it.
    pub fn to_json(&self) -> Result<Value, ConfigError> {
        Ok(serde_json::to_value(self)?)
    }

    /// A model of one of the paper's sizes, with bert-base-uncased's vocabulary.
    pub fn of_size(size: Size) -> Self {
        let (layers, hidden, heads) = size.shape();
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
            id2label: BTreeMap::new(),
            label2id: BTreeMap::new(),
            problem_type: None,
            architectures: Vec::new(),
            reading: None,
            model_type: bert(),
            other: Map::new(),
        }
    }

    /// How many labels a classifier has: `transformers` assumes two where none are named.
    pub fn labels(&self) -> usize {
        let count = self.other.get("num_labels").and_then(Value::as_u64);
        count.map_or(if self.id2label.is_empty() { 2 } else { self.id2label.len() }, |n| n as usize)
    }

    /// The labels' names by number; where one has none, the name that `transformers` would give it.
    pub fn label_names(&self) -> Vec<String> {
        let name = |i: usize| self.id2label.get(&i.to_string()).cloned().unwrap_or_else(|| format!("LABEL_{i}"));
        (0..self.labels()).map(name).collect()
    }

    /// For question answering: by how much the score of "no answer" must exceed the best answer's, if the model may say
    /// so at all. A key of our own, which `transformers` keeps and does not read.
    pub fn no_answer_threshold(&self) -> Option<f64> {
        self.other.get(NO_ANSWER_THRESHOLD).and_then(Value::as_f64)
    }

    /// Sets [`no_answer_threshold`](Self::no_answer_threshold).
    pub fn set_no_answer_threshold(&mut self, threshold: Option<f64>) {
        match threshold {
            Some(threshold) => self.other.insert(NO_ANSWER_THRESHOLD.to_owned(), threshold.into()),
            None => self.other.remove(NO_ANSWER_THRESHOLD),
        };
    }

    /// Checks what the single fields cannot.
    pub fn check(&self) -> Result<(), ConfigError> {
        let sizes = [
            ("vocab_size", self.vocab_size, 1 << 24),
            ("hidden_size", self.hidden_size, 1 << 16),
            ("num_hidden_layers", self.num_hidden_layers, 1 << 10),
            ("num_attention_heads", self.num_attention_heads, 1 << 12),
            ("intermediate_size", self.intermediate_size, 1 << 20),
            ("max_position_embeddings", self.max_position_embeddings, 1 << 20),
            ("type_vocab_size", self.type_vocab_size, 1 << 16),
            ("henson_reading.stride", self.reading.and_then(|reading| reading.stride).unwrap_or(1), 1 << 20),
            (
                "henson_reading.max_question",
                self.reading.and_then(|reading| reading.max_question).unwrap_or(1),
                1 << 20,
            ),
        ];
        for (key, got, most) in sizes {
            if got == 0 || got > most {
                return Err(ConfigError::Value { key, got: got.to_string(), expected: format!("1 to {most}") });
            }
        }
        // Two special tokens, and a piece between them.
        let lengths = 3..=self.max_position_embeddings;
        if let Some(got) = self.reading.map(|reading| reading.max_length).filter(|length| !lengths.contains(length)) {
            let (key, expected) = ("henson_reading.max_length", format!("3 to {}", self.max_position_embeddings));
            return Err(ConfigError::Value { key, got: got.to_string(), expected });
        }
        if !self.hidden_size.is_multiple_of(self.num_attention_heads) {
            return Err(ConfigError::Value {
                key: "num_attention_heads",
                got: self.num_attention_heads.to_string(),
                expected: format!("a divisor of hidden_size, {}", self.hidden_size),
            });
        }
        let rates = [
            ("hidden_dropout_prob", Some(self.hidden_dropout_prob)),
            ("attention_probs_dropout_prob", Some(self.attention_probs_dropout_prob)),
            ("classifier_dropout", self.classifier_dropout),
        ];
        for (key, got) in rates {
            if let Some(got) = got.filter(|p| !(0.0..1.0).contains(p)) {
                return Err(ConfigError::Value { key, got: got.to_string(), expected: "0 to below 1".to_owned() });
            }
        }
        if !(self.layer_norm_eps > 0.0 && self.layer_norm_eps < 1.0) {
            let (key, got) = ("layer_norm_eps", self.layer_norm_eps.to_string());
            return Err(ConfigError::Value { key, got, expected: "a small positive number".to_owned() });
        }
        let only = [("position_embedding_type", Value::from("absolute")), ("add_cross_attention", Value::from(false))];
        for (key, expected) in only {
            if let Some(got) = self.other.get(key).filter(|got| **got != expected && !got.is_null()) {
                return Err(ConfigError::Value { key, got: got.to_string(), expected: expected.to_string() });
            }
        }
        Ok(())
    }
}

/// The paper's sizes, and the smaller ones of Turc et al. 2019.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// 2 layers of 128.
    Tiny,
    /// 4 layers of 256.
    Mini,
    /// 4 layers of 512.
    Small,
    /// 8 layers of 512.
    Medium,
    /// 12 layers of 768.
    Base,
    /// 24 layers of 1024.
    Large,
}

impl Size {
    /// All, the smallest first.
    pub const ALL: [Size; 6] = [Size::Tiny, Size::Mini, Size::Small, Size::Medium, Size::Base, Size::Large];

    /// (L, H, A).
    pub fn shape(self) -> (usize, usize, usize) {
        match self {
            Size::Tiny => (2, 128, 2),
            Size::Mini => (4, 256, 4),
            Size::Small => (4, 512, 8),
            Size::Medium => (8, 512, 8),
            Size::Base => (12, 768, 12),
            Size::Large => (24, 1024, 16),
        }
    }

    /// All names, for messages.
    pub fn names() -> String {
        Self::ALL.map(|size| size.to_string()).join(", ")
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Size::Tiny => "bert-tiny",
            Size::Mini => "bert-mini",
            Size::Small => "bert-small",
            Size::Medium => "bert-medium",
            Size::Base => "bert-base",
            Size::Large => "bert-large",
        })
    }
}

impl FromStr for Size {
    type Err = ConfigError;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let size = Self::ALL.into_iter().find(|size| size.to_string() == name);
        size.ok_or_else(|| ConfigError::Size(name.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_sizes() {
        for size in Size::ALL {
            assert_eq!(size.to_string().parse::<Size>().unwrap(), size);
            BertConfig::of_size(size).check().unwrap();
        }
        let error = "bert-huge".parse::<Size>().unwrap_err().to_string();
        assert!(error.contains("bert-tiny") && error.contains("bert-huge"), "{error}");
    }

    #[test]
    fn unknown_keys_survive_and_contradictions_are_named() {
        let mut json = BertConfig::of_size(Size::Tiny).to_json().unwrap();
        json["my_key"] = Value::from(7);
        let config = BertConfig::from_json(&json.to_string()).unwrap();
        assert_eq!(config.to_json().unwrap(), json);

        let mut config = config;
        assert_eq!(
            (config.no_answer_threshold(), config.label_names()),
            (None, vec!["LABEL_0".into(), "LABEL_1".into()])
        );
        config.set_no_answer_threshold(Some(-1.5));
        let again = BertConfig::from_value(config.to_json().unwrap()).unwrap();
        assert_eq!(again.no_answer_threshold(), Some(-1.5));
        config.set_no_answer_threshold(None);
        assert_eq!(config.to_json().unwrap(), json);

        let reading = TrainedReading {
            max_length: 128,
            windows: true,
            stride: None,
            max_question: None,
            document_context: false,
            pairs: None,
        };
        config.reading = Some(reading);
        let written = config.to_json().unwrap();
        assert_eq!(written["henson_reading"], serde_json::json!({"max_length": 128, "windows": true}));
        assert_eq!(BertConfig::from_value(written).unwrap().reading, Some(reading));

        let of_length = |n: usize| serde_json::json!({"max_length": n, "windows": false});
        let cases = [
            ("henson_reading", of_length(0), "`henson_reading.max_length` is 0"),
            ("henson_reading", of_length(2), "`henson_reading.max_length` is 2"),
            ("henson_reading", of_length(513), "3 to 512"),
            (
                "henson_reading",
                serde_json::json!({"max_length": 128, "windows": true, "max_question": 0}),
                "`henson_reading.max_question` is 0",
            ),
            ("henson_reading", Value::from(128), "invalid type"),
            ("num_attention_heads", Value::from(3), "divisor of hidden_size"),
            ("hidden_size", Value::from(0), "`hidden_size` is 0"),
            ("vocab_size", Value::from(1u64 << 40), "`vocab_size` is"),
            ("vocab_size", Value::from("many"), "invalid type"),
            ("hidden_dropout_prob", Value::from(1.0), "below 1"),
            ("position_embedding_type", Value::from("relative_key"), "absolute"),
            ("add_cross_attention", Value::from(true), "add_cross_attention"),
            ("model_type", Value::from("gpt2"), "gpt2"),
            ("hidden_act", Value::from("swish"), "gelu_new"),
        ];
        for (key, value, expected) in cases {
            let mut json = json.clone();
            json[key] = value;
            let error = BertConfig::from_json(&json.to_string()).unwrap_err().to_string();
            assert!(error.contains(expected), "{key}: {error}");
        }
    }
}
