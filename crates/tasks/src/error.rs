//! What can go wrong with labelled files and predictions. Each message says which file and place, what was expected and
//! found, and what to do next.

use std::path::{Path, PathBuf};

use henson_data::DataError;

/// Every error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TaskError {
    /// A file cannot be read at all.
    #[error(transparent)]
    Data(DataError),

    /// A row, sentence or question is not as it should be; others can still be used.
    #[error("{}, {place}: {problem}", path.display())]
    Row {
        /// The file.
        path: PathBuf,
        /// The line, row or question.
        place: String,
        /// What is wrong there, and what was expected.
        problem: String,
    },

    /// A table has no column for something that the task needs.
    #[error(
        "{} has no column for {role}: expected {expected}, found {found}; name the column by {flag}, or by its \
         number and with --header=false where the first row is no header",
        path.display()
    )]
    NoColumn {
        /// The file.
        path: PathBuf,
        /// What is missing, such as `the second text`.
        role: &'static str,
        /// The names that were looked for.
        expected: String,
        /// Those that there are.
        found: String,
        /// The flag that names it.
        flag: &'static str,
    },

    /// A file without anything to use.
    #[error("{} has no examples for task {task}: {reason}", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
        /// The task.
        task: &'static str,
        /// What became of what was read, and what was expected.
        reason: String,
    },

    /// A directory lacks a task's file.
    #[error("no {split} file of task {task} in {}: looked for {looked}; name the file itself", directory.display())]
    NoFile {
        /// The directory.
        directory: PathBuf,
        /// Which part of the set.
        split: &'static str,
        /// The task.
        task: &'static str,
        /// The names that were tried.
        looked: String,
    },

    /// A directory has several files that could be meant.
    #[error("{} has several {split} files ({found}): name the one that is meant", directory.display())]
    SeveralFiles {
        /// The directory.
        directory: PathBuf,
        /// Which part of the set.
        split: &'static str,
        /// Their names.
        found: String,
    },

    /// Labels are needed where there are none.
    #[error("{} has no labels: {needed}", path.display())]
    NoLabels {
        /// The file.
        path: PathBuf,
        /// What needs them.
        needed: &'static str,
    },

    /// Predictions and examples do not belong together.
    #[error("{} does not fit the data: {problem}", path.display())]
    Mismatch {
        /// The file with the predictions.
        path: PathBuf,
        /// What does not fit.
        problem: String,
    },

    /// Predictions of another kind than the task's. An error of the caller.
    #[error("example {id} of task {task} has a prediction of another kind")]
    WrongKind {
        /// The example.
        id: String,
        /// The task.
        task: &'static str,
    },

    /// As many predictions as examples are needed. An error of the caller.
    #[error("{predictions} predictions for {examples} examples")]
    WrongCount {
        /// How many predictions there are.
        predictions: usize,
        /// How many examples there are.
        examples: usize,
    },
}

impl TaskError {
    /// Whether one row is wrong, and not all of the file.
    pub fn is_row(&self) -> bool {
        matches!(self, Self::Row { .. })
    }

    pub(crate) fn row(path: &Path, place: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Row { path: path.to_owned(), place: place.into(), problem: problem.into() }
    }

    pub(crate) fn mismatch(path: &Path, problem: impl Into<String>) -> Self {
        Self::Mismatch { path: path.to_owned(), problem: problem.into() }
    }
}

impl From<DataError> for TaskError {
    fn from(error: DataError) -> Self {
        match error {
            DataError::Row { path, line, problem } => Self::Row { path, place: format!("line {line}"), problem },
            other => Self::Data(other),
        }
    }
}
