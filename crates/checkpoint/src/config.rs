//! config.json as a whole: the network's part, which `models` understands, and the part that belongs to tasks: labels, how
//! texts were read in training, thresholds. Both stand side by side in one file, as `transformers` has it.

use std::collections::BTreeMap;

use henson_models::{ConfigError, Head, ModelConfig};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// What a config.json says.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The network.
    pub model: ModelConfig,
    /// What its head is for.
    pub task: TaskConfig,
    /// The class that `transformers` loads the weights into.
    pub architectures: Vec<String>,
}

/// The keys of config.json that belong to tasks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TaskConfig {
    /// The names of labels by their number, written as text.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "names")]
    pub id2label: BTreeMap<String, String>,
    /// The numbers of labels by their name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub label2id: BTreeMap<String, usize>,
    /// How many labels there are, in files that say so without naming them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub num_labels: Option<usize>,
    /// What a sequence classifier's loss is: see `transformers`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem_type: Option<String>,
    /// How a fine-tuned model read its texts in training, which is how it reads them afterwards unless told otherwise. A key
    /// of our own, which `transformers` keeps and does not read.
    #[serde(rename = "henson_reading", default, skip_serializing_if = "Option::is_none")]
    pub reading: Option<TrainedReading>,
    /// For question answering: by how much the score of "no answer" must exceed the best answer's, if the model may say
    /// so at all. A key of our own, too.
    #[serde(rename = "henson_no_answer_threshold", default, skip_serializing_if = "Option::is_none")]
    pub no_answer_threshold: Option<f64>,
    /// What stands before every source of a model that writes, such as `translate English to German: `. A key that
    /// `transformers`' pipelines have read since 2020.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefix: Option<String>,
}

/// The keys of [`TaskConfig`].
const TASK_KEYS: [&str; 7] =
    ["id2label", "label2id", "num_labels", "problem_type", "henson_reading", "henson_no_answer_threshold", "prefix"];

const ARCHITECTURES: &str = "architectures";

/// Names of labels; some files have numbers there.
fn names<'de, D: serde::Deserializer<'de>>(from: D) -> Result<BTreeMap<String, String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "expected names of labels, texts or numbers")]
    enum Name {
        Text(String),
        Number(serde_json::Number),
    }
    let text = |name| match name {
        Name::Text(text) => text,
        Name::Number(number) => number.to_string(),
    };
    Ok(BTreeMap::<String, Name>::deserialize(from)?.into_iter().map(|(id, name)| (id, text(name))).collect())
}

/// How texts became sequences when a model was fine-tuned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainedReading {
    /// Maximum length of a sequence in tokens, special tokens included.
    pub max_length: usize,
    /// Whether longer texts were divided into windows that overlap, instead of cut.
    pub windows: bool,
    /// Questions: from the beginning of one window over the passage to that of the next, in tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stride: Option<usize>,
    /// Questions: maximum length of a question in tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_question: Option<usize>,
    /// Words with tags: whether the sentences around them, of the same document, were read along with them.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub document_context: bool,
    /// Texts with classes or numbers: whether they came in pairs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pairs: Option<bool>,
    /// Marked spans: how many an example has. Labels are then pairs of a role and a class.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spans: Option<usize>,
    /// Models that write: maximum length of a target in tokens, the end token included.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_target: Option<usize>,
    /// Pairs of texts: whether both orders are read, and their logits added.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub both_orders: bool,
}

impl Config {
    /// A network without labels or a head.
    pub fn new(model: ModelConfig) -> Self {
        Self { model, task: TaskConfig::default(), architectures: Vec::new() }
    }

    /// Reads the text of a config.json.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        Self::from_value(serde_json::from_str(text)?)
    }

    /// Reads a config.json that was parsed already.
    pub fn from_value(value: Value) -> Result<Self, ConfigError> {
        let mut keys: Map<String, Value> = serde_json::from_value(value)?;
        let task = TASK_KEYS.iter().filter_map(|key| keys.remove_entry(*key)).collect();
        let architectures = keys.remove(ARCHITECTURES).filter(|names| !names.is_null());
        let config = Self {
            task: serde_json::from_value(Value::Object(task))?,
            architectures: architectures.map(serde_json::from_value).transpose()?.unwrap_or_default(),
            model: ModelConfig::from_value(Value::Object(keys))?,
        };
        config.check()?;
        Ok(config)
    }

    /// The config as `transformers` writes it.
    pub fn to_json(&self) -> Result<Value, ConfigError> {
        let mut json = self.model.to_json()?;
        if !self.architectures.is_empty() {
            json[ARCHITECTURES] = Value::from(self.architectures.clone());
        }
        if let Value::Object(task) = serde_json::to_value(&self.task)? {
            task.into_iter().for_each(|(key, value)| json[key] = value);
        }
        Ok(json)
    }

    /// Checks what the single fields cannot.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.model.check()?;
        let Some(reading) = self.task.reading else { return Ok(()) };
        // Two special tokens, and one between them.
        let most = self.model.sizes().max_tokens;
        if !(3..=most).contains(&reading.max_length) {
            return Err(ConfigError::value("henson_reading.max_length", reading.max_length, format!("3 to {most}")));
        }
        let sizes = [
            ("henson_reading.stride", reading.stride),
            ("henson_reading.max_question", reading.max_question),
            ("henson_reading.max_target", reading.max_target),
        ];
        match sizes.into_iter().find(|(_, size)| size.is_some_and(|size| size == 0 || size > 1 << 20)) {
            Some((key, size)) => Err(ConfigError::value(key, size.unwrap_or(0), format!("1 to {}", 1 << 20))),
            None => Ok(()),
        }
    }

    /// The head that `architectures` names, if it is one of the family's.
    pub fn head(&self) -> Option<Head> {
        self.model.family().head_of_class(self.architectures.first()?, self.task.labels())
    }

    /// Names the class of a head.
    pub fn set_head(&mut self, head: Head) {
        self.architectures = vec![self.model.class(head)];
    }
}

impl TaskConfig {
    /// How many labels a classifier has: `transformers` assumes two where none are named.
    pub fn labels(&self) -> usize {
        self.num_labels.unwrap_or(if self.id2label.is_empty() { 2 } else { self.id2label.len() })
    }

    /// The labels' names by number; where one has none, the name that `transformers` would give it.
    pub fn label_names(&self) -> Vec<String> {
        let name = |i: usize| self.id2label.get(&i.to_string()).cloned().unwrap_or_else(|| format!("LABEL_{i}"));
        (0..self.labels()).map(name).collect()
    }
}

#[cfg(test)]
mod tests {
    use henson_models::Family;
    use serde_json::json;

    use super::*;

    #[test]
    fn both_parts_survive_and_wrong_readings_are_named() {
        let mut json = Family::config_of_size("bert-tiny").unwrap().to_json().unwrap();
        json["my_key"] = Value::from(7);
        json["architectures"] = json!(["BertForSequenceClassification"]);
        let mut config = Config::from_json(&json.to_string()).unwrap();
        assert_eq!(config.to_json().unwrap(), json);
        assert_eq!(config.head(), Some(Head::Sequence { labels: 2 }));
        assert_eq!(config.task.label_names(), ["LABEL_0", "LABEL_1"]);

        let reading = TrainedReading {
            max_length: 128,
            windows: true,
            stride: None,
            max_question: None,
            document_context: false,
            pairs: None,
            spans: None,
            max_target: None,
            both_orders: false,
        };
        config.task.reading = Some(reading);
        config.task.no_answer_threshold = Some(-1.5);
        config.task.id2label = BTreeMap::from([("0".to_owned(), "yes".to_owned())]);
        let written = config.to_json().unwrap();
        assert_eq!(written["henson_reading"], json!({"max_length": 128, "windows": true}));
        assert_eq!(Config::from_value(written).unwrap(), config);
        assert_eq!(config.head(), Some(Head::Sequence { labels: 1 }));
        let mut numbers = json.clone();
        numbers["id2label"] = json!({"0": 3, "1": "four"});
        assert_eq!(Config::from_value(numbers.clone()).unwrap().task.label_names(), ["3", "four"]);
        numbers["id2label"] = json!({"0": [3]});
        let error = Config::from_value(numbers).unwrap_err().to_string();
        assert!(error.contains("expected names of labels"), "{error}");

        let cases = [
            (json!({"max_length": 0, "windows": false}), "`henson_reading.max_length` is 0"),
            (json!({"max_length": 2, "windows": false}), "`henson_reading.max_length` is 2"),
            (json!({"max_length": 513, "windows": false}), "3 to 512"),
            (json!({"max_length": 128, "windows": true, "max_question": 0}), "`henson_reading.max_question` is 0"),
            (json!(128), "invalid type"),
        ];
        for (value, expected) in cases {
            let mut json = json.clone();
            json["henson_reading"] = value;
            let error = Config::from_value(json).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        assert!(Config::from_json("[]").is_err());
    }
}
