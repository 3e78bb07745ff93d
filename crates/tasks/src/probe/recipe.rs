//! What a probing does, as TOML. Keys that `finetune` has, too, mean the same here.

use std::path::{Path, PathBuf};

use henson_train::{Precision, Result, RunRecipe, ScheduleKind, check_counts, check_ranges};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::data::ProbeTask;
use crate::read::Files;

/// A probing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ProbeRecipe {
    /// What is probed for (`--task`).
    pub task: ProbeTask,
    /// The encoder: a directory, or the name of one (`--model`).
    pub model: String,
    /// That directory, where `model` is a name. It is never saved: another machine has it elsewhere.
    #[serde(skip)]
    pub found_at: Option<PathBuf>,
    /// The file that probes are trained on (`--train`).
    pub train: String,
    /// The file that they are scored on, and the best epoch is chosen by (`--dev`).
    pub dev: String,
    /// Seed of the initial weights, of the order of texts, of dropout and of the control task's labels (`--seed`).
    pub seed: u64,
    /// Number type of the encoder; probes are f32 (`--dtype`).
    pub dtype: Precision,

    /// Train a probe for each layer 0..L on the layers up to it: cumulative scores and the expected layer.
    pub cumulative: bool,
    /// Train a probe on a control task, whose labels are random but fixed for the words of a span (Hewitt and Liang 2019).
    pub control: bool,
    /// Train a probe on an encoder of the same shape with random weights (`--random-encoder`).
    pub random_encoder: bool,
    /// Numbers that each token's vector is projected to.
    pub projection_size: usize,
    /// Units of the hidden layer.
    pub hidden_size: usize,
    /// Dropout before the last matrix.
    pub dropout: f64,
    /// Maximum sequence length in tokens for the encoder; longer texts are divided into windows.
    pub max_length: usize,
    /// Most MiB of the encoder's vectors that are kept in memory; beyond that, texts are read again in each epoch, with the same
    /// results.
    pub cache_mib: usize,

    /// Texts per update (`--batch-size`).
    pub batch_size: usize,
    /// Number of epochs (`--epochs`).
    pub epochs: u64,
    /// Train on this many texts, evenly spaced (`--limit`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<usize>,
    /// Score on this many texts, evenly spaced.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dev_limit: Option<usize>,
    /// Peak learning rate (`--learning-rate`).
    pub learning_rate: f64,
    /// Learning-rate schedule after the linear warm-up.
    pub schedule: ScheduleKind,
    /// Share of the updates in which the learning rate rises from 0 to its peak.
    pub warmup: f64,
    /// Maximum norm of all gradients together; 0 turns clipping off.
    pub clip: f64,
    /// Stop after this many epochs without an improvement; 0 never.
    pub patience: u64,

    /// How files with tags are written, where they are not as the task's own are.
    #[serde(skip_serializing_if = "Files::is_usual")]
    pub files: Files,
}

impl Default for ProbeRecipe {
    fn default() -> Self {
        Self {
            task: ProbeTask::Edges,
            model: String::new(),
            found_at: None,
            train: String::new(),
            dev: String::new(),
            seed: 0,
            dtype: Precision::F32,
            cumulative: true,
            control: true,
            random_encoder: false,
            projection_size: 256,
            hidden_size: 256,
            dropout: 0.3,
            max_length: 128,
            cache_mib: 4096,
            batch_size: 32,
            epochs: 5,
            limit: None,
            dev_limit: None,
            learning_rate: 1e-3,
            schedule: ScheduleKind::Linear,
            warmup: 0.05,
            clip: 5.0,
            patience: 0,
            files: Files::default(),
        }
    }
}

impl RunRecipe for ProbeRecipe {
    const MAY_CHANGE: &'static [&'static str] = &["train", "dev", "files", "cache_mib"];
}

impl ProbeRecipe {
    /// Checks what the single values cannot.
    pub fn check(&self) -> Result<()> {
        self.schedule.check_task()?;
        check_ranges(&[
            ("learning_rate", self.learning_rate, 0.0, 10.0),
            ("clip", self.clip, 0.0, 1e9),
            ("warmup", self.warmup, 0.0, 1.0),
            ("dropout", self.dropout, 0.0, 0.99),
        ])?;
        check_counts(&[
            ("batch_size", self.batch_size as u64, 1 << 20),
            ("epochs", self.epochs, 1 << 20),
            ("max_length", self.max_length as u64, 1 << 20),
            ("projection_size", self.projection_size as u64, 1 << 14),
            ("hidden_size", self.hidden_size as u64, 1 << 14),
            ("limit", self.limit.map_or(1, |n| n as u64), 1 << 40),
            ("dev_limit", self.dev_limit.map_or(1, |n| n as u64), 1 << 40),
        ])
    }

    /// The directory of the model.
    pub fn directory(&self) -> &Path {
        self.found_at.as_deref().unwrap_or(Path::new(&self.model))
    }
}
