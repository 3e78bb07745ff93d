//! What the training of a tagger on a frozen encoder does, as TOML. Keys that `finetune` has, too, mean the same here.

use std::path::{Path, PathBuf};

use henson_infer::Layers;
use henson_train::{Precision, Result, ScheduleKind, TrainError, check_counts, check_ranges, to_toml};
use serde::{Deserialize, Serialize};

use super::layers::FeatureLayers;
use crate::read::Files;

/// What stands on the vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TaggerHead {
    /// One matrix.
    Linear,
    /// Two layers that read in both directions, and a matrix on them.
    Bilstm,
}

/// A run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TaggerRecipe {
    /// What is learnt: a task of words with tags.
    pub task: String,
    /// The directory of the encoder, or a name of it.
    pub model: String,
    /// That directory, where `model` is a name. It is never saved: another machine has it elsewhere.
    #[serde(skip)]
    pub found_at: Option<PathBuf>,
    /// The file to train on.
    pub train: String,
    /// The file to choose the best tagger by; empty: none, and the last one is it.
    pub dev: String,
    /// The seed of the first weights, of the order of sentences and of dropout.
    pub seed: u64,
    /// What the encoder computes in; the tagger is f32.
    pub dtype: Precision,

    /// Which layers.
    pub layers: FeatureLayers,
    /// What stands on them.
    pub head: TaggerHead,
    /// Whether the tags of a sentence are scored together.
    pub crf: bool,
    /// Numbers of the BiLSTM's output, half of them of each direction; the encoder's own where nothing is said, as the 768 of
    /// the paper.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hidden_size: Option<usize>,
    /// Layers of the BiLSTM.
    pub lstm_layers: usize,
    /// Dropout between the layers and before the matrix.
    pub dropout: f64,
    /// Tokens of a sequence for the encoder; longer sentences are divided into windows. 128.
    pub max_length: usize,
    /// Whether the encoder reads each sentence amid the others of its document, as many as fit into `max_length`.
    pub document_context: bool,

    /// Sentences of an update.
    pub batch_size: usize,
    /// Walks over the training file.
    pub epochs: u64,
    /// Train on so many sentences alone, evenly spaced; for a quick look.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<usize>,
    /// The highest learning rate.
    pub learning_rate: f64,
    /// Its course.
    pub schedule: ScheduleKind,
    /// The share of the updates in which it rises.
    pub warmup: f64,
    /// Decoupled decay of matrices.
    pub weight_decay: f64,
    /// The most that the norm of all gradients together may be; 0 for no bound.
    pub clip: f64,
    /// Stop after so many epochs without a better score; 0 never.
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
            train: String::new(),
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

impl TaggerRecipe {
    /// What says where the data lies, which is compared by its content.
    pub(super) const MAY_CHANGE: [&'static str; 3] = ["train", "dev", "files"];

    /// Checks what the single values cannot.
    pub fn check(&self) -> Result<()> {
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
