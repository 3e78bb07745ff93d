//! What the training of a tagger on a frozen encoder does, as TOML. Keys that `finetune` has, too, mean the same here.

use std::path::{Path, PathBuf};

use henson_infer::Layers;
use henson_train::{Precision, Result, RunRecipe, ScheduleKind, TrainError, check_counts, check_ranges, to_toml};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::layers::FeatureLayers;
use crate::read::{Files, Paths};

/// What stands on the vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum TaggerHead {
    /// A linear layer.
    Linear,
    /// A bidirectional LSTM and a linear layer.
    Bilstm,
}

/// A run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TaggerRecipe {
    /// The task: `ner`, `pos` or `tag` (`--task`).
    pub task: String,
    /// The encoder: a directory, or the name of one (`--model`).
    pub model: String,
    /// That directory, where `model` is a name. It is never saved: another machine has it elsewhere.
    #[serde(skip)]
    pub found_at: Option<PathBuf>,
    /// The file to train on (`--train`), or a list of several. A `*` in a file's name stands for anything.
    pub train: Paths,
    /// The file to choose the best tagger by (`--dev`).
    pub dev: String,
    /// Seed of the initial weights, of the order of sentences and of dropout (`--seed`).
    pub seed: u64,
    /// Number type of the encoder; the tagger is f32 (`--dtype`).
    pub dtype: Precision,

    /// Layers that the tagger reads, such as `last`, `sum-last-4`, `concat-last-4`, `mix-all` (`--layers`).
    #[schemars(with = "String")]
    pub layers: FeatureLayers,
    /// Network on top of them (`--head`).
    pub head: TaggerHead,
    /// Score the tags of a sentence together, by a conditional random field (`--crf`).
    pub crf: bool,
    /// Size of the BiLSTM's output, half of it of each direction; by default the encoder's, as the 768 of Devlin et
    /// al. (2019).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hidden_size: Option<usize>,
    /// Layers of the BiLSTM.
    pub lstm_layers: usize,
    /// Dropout between the layers and before the linear layer.
    pub dropout: f64,
    /// Maximum sequence length in tokens for the encoder; longer sentences are divided into windows.
    pub max_length: usize,
    /// Read each sentence together with the sentences around it, as many as fit into `max_length`.
    pub document_context: bool,

    /// Sentences per update (`--batch-size`).
    pub batch_size: usize,
    /// Number of epochs (`--epochs`).
    pub epochs: u64,
    /// Train on this many sentences, evenly spaced, for a quick look.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<usize>,
    /// Peak learning rate (`--learning-rate`).
    pub learning_rate: f64,
    /// Learning-rate schedule after the linear warm-up.
    pub schedule: ScheduleKind,
    /// Share of the updates in which the learning rate rises from 0 to its peak.
    pub warmup: f64,
    /// Decoupled weight decay of matrices.
    pub weight_decay: f64,
    /// Maximum norm of all gradients together; 0 turns clipping off.
    pub clip: f64,
    /// Stop after this many epochs without an improvement; 0 never.
    pub patience: u64,

    /// How both files are written, where they are not as the task's own are.
    #[serde(skip_serializing_if = "Files::is_usual")]
    pub files: Files,
}

impl Default for TaggerRecipe {
    fn default() -> Self {
        Self {
            task: String::new(),
            model: String::new(),
            found_at: None,
            train: Paths::default(),
            dev: String::new(),
            seed: 0,
            dtype: Precision::F32,
            layers: FeatureLayers::Fixed(Layers::ConcatLast(4)),
            head: TaggerHead::Bilstm,
            crf: false,
            hidden_size: None,
            lstm_layers: 2,
            dropout: 0.3,
            max_length: 128,
            document_context: false,
            batch_size: 32,
            epochs: 10,
            limit: None,
            learning_rate: 1e-3,
            schedule: ScheduleKind::Linear,
            warmup: 0.05,
            weight_decay: 0.01,
            clip: 1.0,
            patience: 0,
            files: Files::default(),
        }
    }
}

impl RunRecipe for TaggerRecipe {
    const MAY_CHANGE: &'static [&'static str] = &["train", "dev", "files"];
}

impl TaggerRecipe {
    /// Checks what the single values cannot.
    pub fn check(&self) -> Result<()> {
        self.schedule.check_task()?;
        check_ranges(&[
            ("learning_rate", self.learning_rate, 0.0, 10.0),
            ("weight_decay", self.weight_decay, 0.0, 10.0),
            ("clip", self.clip, 0.0, 1e9),
            ("warmup", self.warmup, 0.0, 1.0),
            ("dropout", self.dropout, 0.0, 0.99),
        ])?;
        check_counts(&[
            ("batch_size", self.batch_size as u64, 1 << 20),
            ("epochs", self.epochs, 1 << 20),
            ("lstm_layers", self.lstm_layers as u64, 16),
            ("max_length", self.max_length as u64, 1 << 20),
            ("limit", self.limit.map_or(1, |n| n as u64), 1 << 40),
            ("hidden_size", self.hidden_size.map_or(1, |n| n as u64), 1 << 14),
        ])?;
        if self.hidden_size.is_some_and(|size| size % 2 == 1) {
            return Err(TrainError::setting(
                "hidden_size",
                self.hidden_size.unwrap_or(0),
                "an even number: two directions",
            ));
        }
        Ok(())
    }

    /// Whether a text is such a recipe, and not one of [`crate::FineTuneRecipe`]: it alone names layers. What is not TOML is
    /// reported by whoever parses all of it.
    pub fn is_written_in(text: &str) -> bool {
        text.parse::<toml::Table>().is_ok_and(|table| table.contains_key("layers"))
    }

    /// The directory of the model.
    pub fn directory(&self) -> &Path {
        self.found_at.as_deref().unwrap_or(Path::new(&self.model))
    }

    /// The recipe as TOML, with all defaults.
    pub fn to_toml(&self) -> Result<String> {
        to_toml(self)
    }
}
