//! What a fine-tuning run does, as TOML: a table of settings whose unknown keys are errors, saved with every default
//! written out beside the model.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use henson_train::{
    MOST_BELOW_1, OptimizerKind, OptimizerSettings, Precision, Result, ScheduleKind, TrainError, check_counts,
    check_ranges, to_toml,
};
use serde::{Deserialize, Serialize};

use crate::read::Files;
use crate::task::{Task, TaskKind};

/// A fine-tuning run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FineTuneRecipe {
    /// What is learnt: a name of [`crate::TASKS`].
    pub task: String,
    /// The directory of the model to start from, or a name of it.
    pub model: String,
    /// That directory, where `model` is a name. It is never saved: another machine has it elsewhere.
    #[serde(skip)]
    pub found_at: Option<PathBuf>,
    /// The file to train on.
    pub train: String,
    /// The file to choose the best model by; empty: none.
    pub dev: String,
    /// Without a dev file: rows of the training file that are held out to choose the best model by; 0 for none.
    pub dev_rows: usize,
    /// Without a dev file: parts that the training file is divided into. Each is scored by a model that was trained on the
    /// others, which estimates how good the model is that is then trained on all; 0 for none.
    pub folds: usize,
    /// The seed that draws which rows are held out, or the folds. It is another than `seed`, so that runs with several seeds
    /// are scored on the same rows.
    pub split_seed: u64,
    /// The seed of the new head, of the order of examples and of dropout.
    pub seed: u64,
    /// What the model computes in.
    pub dtype: Precision,

    /// Examples of an update; for questions, windows.
    pub batch_size: usize,
    /// Parts that a batch is computed in, one after the other, to save memory. Of texts that are alike, each part is told from
    /// itself alone and has two pairs at least: so at most half of `batch_size`, and fewer parts in the last batch of an
    /// epoch where it is too small.
    pub accumulation: usize,
    /// Walks over the training file.
    pub epochs: f64,
    /// Train on so many examples alone, evenly spaced; for a quick look.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<usize>,
    /// Tokens of a sequence, special ones included; longer texts are cut, or divided where `windows` says so. 128, or 384
    /// for questions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_length: Option<usize>,
    /// Whether longer texts are divided into overlapping windows. Those of a document to classify all have its label; in
    /// evaluation their logits are averaged. Words to tag and passages always are.
    pub windows: bool,
    /// Words to tag: whether each sentence is read amid the others of its document, as many as fit into `max_length`.
    pub document_context: bool,
    /// Questions: from the beginning of one window over the passage to that of the next.
    pub stride: usize,
    /// Questions: the most pieces of a question.
    pub max_question: usize,

    /// The rule of the updates: `adamw` with bias correction, or `paper` without it.
    pub optimizer: OptimizerKind,
    /// The highest learning rate.
    pub learning_rate: f64,
    /// Its course.
    pub schedule: ScheduleKind,
    /// The share of the updates in which it rises.
    pub warmup: f64,
    /// Decoupled decay of matrices and tables.
    pub weight_decay: f64,
    /// β₁.
    pub beta1: f64,
    /// β₂.
    pub beta2: f64,
    /// ε.
    pub epsilon: f64,
    /// The most that the norm of all gradients together may be; 0 for no bound.
    pub clip: f64,
    /// Dropout of the hidden states, of attention and before the classifier; the model's own where nothing is said.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dropout: Option<f64>,
    /// The factor on the learning rate from one layer to the one below it; 1 for the same everywhere.
    pub layer_decay: f64,
    /// Whether the encoder stays as it is, and only what stands on it is trained.
    pub freeze: bool,
    /// Texts that are alike: what cosines are divided by before the softmax. Lower looks harder at the nearest of the others.
    pub temperature: f64,
    /// Texts that are alike: the least score of a row to learn from, where the training file has scores. Without it, the scores
    /// themselves are learnt, as cosines.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_score: Option<f64>,
    /// Whether rare labels count more, such that all labels weigh the same together; of labels of which a text may have
    /// several, yes and no to each.
    pub class_weights: bool,

    /// Evaluations in an epoch, each with a checkpoint.
    pub evals_per_epoch: u64,
    /// Stop after so many evaluations without a better one; 0 never.
    pub patience: u64,
    /// Steps between lines of the log.
    pub log_every: u64,

    /// How both files are written, where they are not as the task's own are.
    #[serde(skip_serializing_if = "Files::is_usual")]
    pub files: Files,

    /// Keys that nobody set: [`Plan::new`](super::Plan::new) chooses their values by the size of data and model. Never saved,
    /// since a saved recipe has all values.
    #[serde(skip)]
    pub by_size: BTreeSet<&'static str>,
}

impl Default for FineTuneRecipe {
    fn default() -> Self {
        Self {
            task: String::new(),
            model: String::new(),
            found_at: None,
            train: String::new(),
            dev: String::new(),
            dev_rows: 0,
            folds: 0,
            split_seed: 0,
            by_size: BTreeSet::new(),
            seed: 0,
            dtype: Precision::F32,
            batch_size: 16,
            accumulation: 1,
            epochs: 3.0,
            limit: None,
            max_length: None,
            windows: false,
            document_context: false,
            stride: 128,
            max_question: 64,
            optimizer: OptimizerKind::Adamw,
            learning_rate: 5e-5,
            schedule: ScheduleKind::Linear,
            warmup: 0.1,
            weight_decay: 0.01,
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-6,
            clip: 1.0,
            dropout: None,
            layer_decay: 1.0,
            freeze: false,
            temperature: 0.05,
            min_score: None,
            class_weights: false,
            evals_per_epoch: 1,
            patience: 0,
            log_every: 10,
            files: Files::default(),
        }
    }
}

impl FineTuneRecipe {
    /// What only watches a run, or says where its data lies (which is compared by its content).
    pub(crate) const MAY_CHANGE: [&'static str; 4] = ["train", "dev", "files", "log_every"];

    /// Checks what the single values cannot.
    pub fn check(&self) -> Result<()> {
        check_ranges(&[
            ("learning_rate", self.learning_rate, 0.0, 10.0),
            ("weight_decay", self.weight_decay, 0.0, 10.0),
            ("epsilon", self.epsilon, 1e-30, 1.0),
            ("clip", self.clip, 0.0, 1e9),
            ("warmup", self.warmup, 0.0, 1.0),
            ("layer_decay", self.layer_decay, 0.0, 1.0),
            ("epochs", self.epochs, 1e-6, 1e6),
            ("beta1", self.beta1, 0.0, MOST_BELOW_1),
            ("beta2", self.beta2, 0.0, MOST_BELOW_1),
            ("temperature", self.temperature, 1e-4, 1e3),
            ("dropout", self.dropout.unwrap_or(0.0), 0.0, 0.99),
        ])?;
        if let Some(short) = self.max_length.filter(|length| *length < 3) {
            let expected = "at least 3, since two tokens stand around a text";
            return Err(TrainError::setting("max_length", short, expected));
        }
        let counts = [
            ("batch_size", self.batch_size as u64),
            ("accumulation", self.accumulation as u64),
            ("limit", self.limit.map_or(1, |n| n as u64)),
            ("max_length", self.max_length.map_or(3, |n| n as u64)),
            ("stride", self.stride as u64),
            ("evals_per_epoch", self.evals_per_epoch),
            ("log_every", self.log_every),
        ];
        check_counts(&counts.map(|(key, got)| (key, got, 1 << 20)))
    }

    /// The directory of the model.
    pub fn directory(&self) -> &Path {
        self.found_at.as_deref().unwrap_or(Path::new(&self.model))
    }

    /// The recipe as TOML, with all defaults.
    pub fn to_toml(&self) -> Result<String> {
        to_toml(self)
    }

    /// Tokens of a sequence for a task, within what the model takes.
    pub(crate) fn length(&self, task: &Task, most: usize) -> usize {
        let usual = if task.kind == TaskKind::Qa { 384 } else { 128 };
        self.max_length.unwrap_or(usual).min(most)
    }

    pub(crate) fn optimizer(&self) -> OptimizerSettings {
        self.optimizer.with([self.beta1, self.beta2], self.epsilon, self.weight_decay, self.clip)
    }
}
