//! What can go wrong in training.

use std::path::PathBuf;

use henson_checkpoint::CheckpointError;
use henson_data::DataError;
use henson_models::{ConfigError, InputError};
use henson_tensor::TensorError;
use henson_text::TextError;

/// A result of this crate.
pub type Result<T, E = TrainError> = std::result::Result<T, E>;

/// A run could not be started or resumed.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// A recipe is not valid TOML, has a key that does not exist, or a value of the wrong kind.
    #[error("{place}: {problem}")]
    Recipe {
        /// The file, or the `--set`.
        place: String,
        /// What is wrong.
        problem: String,
    },
    /// A setting is out of range, or settings contradict each other.
    #[error("`{key}` is {got}, expected {expected}")]
    Setting {
        /// The key.
        key: &'static str,
        /// Its value.
        got: String,
        /// What it may be.
        expected: String,
    },
    /// Ranks do not understand each other.
    #[error("{0}")]
    Ranks(String),
    /// A directory is occupied by something that is no run.
    #[error("{path} exists already and holds no run of henson (no recipe.toml): choose another --out, or delete it")]
    NotARun {
        /// The directory.
        path: PathBuf,
    },
    /// A directory holds a run whose recipe is none of this command.
    #[error("{path} holds a run of another command: choose another --out, or delete it\n{problem}")]
    OtherKind {
        /// The directory.
        path: PathBuf,
        /// What its recipe has.
        problem: String,
    },
    /// Another process trains into the same directory.
    #[error("another henson process is training in {path}: wait for it, or choose another --out")]
    Busy {
        /// The directory.
        path: PathBuf,
    },
    /// A run was begun with other settings.
    #[error(
        "{path} was started with a different recipe; it differs in:\n{}\nrevert these settings, or choose another --out \
         (what only watches a run may change)",
        differences.join("\n")
    )]
    OtherRecipe {
        /// The directory.
        path: PathBuf,
        /// One line a difference.
        differences: Vec<String>,
    },
    /// A run was started with different data.
    #[error("{path} was started with different data: give the same data, or choose another --out")]
    OtherData {
        /// The directory.
        path: PathBuf,
    },
    /// A checkpoint's state cannot be used.
    #[error("{path}: {problem}")]
    State {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// A checkpoint of another henson.
    #[error("{path}: its version is {found}, this henson reads {supported}: resume with the henson that wrote it")]
    StateVersion {
        /// The file.
        path: PathBuf,
        /// The version it has.
        found: u32,
        /// The version that is read.
        supported: u32,
    },
    /// The loss or the gradients are no numbers any more.
    #[error(
        "step {step}: {what} is not finite; {kept}. Try a lower learning_rate, more warmup_steps, a lower clip, or \
         dtype = \"f32\""
    )]
    NotFinite {
        /// The step.
        step: u64,
        /// The loss or the gradient norm.
        what: &'static str,
        /// Which checkpoint is there.
        kept: String,
    },
    /// The loss grows without bound.
    #[error(
        "step {step}: the loss has risen to {loss:.3} after {lowest:.3}; {kept}. Try a lower learning_rate, more \
         warmup_steps, or a lower clip"
    )]
    Exploding {
        /// The step.
        step: u64,
        /// The mean of the last steps.
        loss: f64,
        /// The lowest such mean before.
        lowest: f64,
        /// Which checkpoint is there.
        kept: String,
    },
    /// A model and a tokenizer do not go together.
    #[error("{0}")]
    Vocabulary(String),
    /// A file could not be read or written.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// Where.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// What a task of another crate met.
    #[error(transparent)]
    Task(Box<dyn std::error::Error + Send + Sync>),
    /// A run's log.
    #[error(transparent)]
    Log(#[from] crate::metrics::LogError),
    /// A model's config.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Data.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A model directory.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A tokenizer.
    #[error(transparent)]
    Text(#[from] TextError),
    /// A batch that does not fit the model.
    #[error(transparent)]
    Input(#[from] InputError),
    /// An operation.
    #[error(transparent)]
    Tensor(#[from] TensorError),
}

impl TrainError {
    /// For `map_err` on file operations.
    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }

    /// Whether it is a checkpoint's files that are wrong, as when they are damaged or missing.
    pub fn is_of_the_checkpoint(&self) -> bool {
        match self {
            Self::State { .. } => true,
            Self::Checkpoint(error) => error.is_of_the_files(),
            _ => false,
        }
    }

    /// A setting that is out of range.
    pub fn setting(key: &'static str, got: impl ToString, expected: impl Into<String>) -> Self {
        Self::Setting { key, got: got.to_string(), expected: expected.into() }
    }
}
