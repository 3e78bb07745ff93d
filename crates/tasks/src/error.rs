//! What can go wrong with labelled files and predictions. Each message says which file and place, what was expected and
//! found, and what to do next.

use std::path::{Path, PathBuf};

use henson_data::DataError;
use henson_infer::InferError;
use henson_train::TrainError;

use crate::task::TASKS;

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
         number and with --header=false where the first row is not a header",
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

    /// Tags that are numbers alone: whether they are entities, and of what kind, nobody knows.
    #[error(
        "{} has numbers for tags, and nothing defines what they stand for: name them in the order of their numbers by --labels \
         O,B-PER,…, write the names into the file, or give a parquet that keeps them (the ClassLabel of `datasets`); --task pos \
         takes tags that are not entities as they are",
        path.display()
    )]
    NumbersForTags {
        /// The file.
        path: PathBuf,
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

    /// A task that is only there to be scored.
    #[error(
        "task {task} has no {split} file: fine-tune a model with --task {other}, then `henson eval --task {task} --model RUN --data FILE`, or predict"
    )]
    OnlyScored {
        /// The task.
        task: &'static str,
        /// Which part of the set.
        split: &'static str,
        /// The task whose models are asked.
        other: &'static str,
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

    /// No file has a name that fits a pattern.
    #[error(
        "no file fits {pattern:?}: expected a name in which `*` stands for anything, in the last part of the path alone"
    )]
    NoMatch {
        /// The pattern.
        pattern: String,
    },

    /// There is no task of this name.
    #[error("there is no task `{name}`: expected one of {names}", names = task_names())]
    NoTask {
        /// The name.
        name: String,
    },

    /// A file to train on has nothing that a model could tell apart.
    #[error("{} has {found}: expected at least two different labels", path.display())]
    FewLabels {
        /// The file.
        path: PathBuf,
        /// What it has.
        found: String,
    },

    /// A model's labels are not those of the data.
    #[error(
        "{} has the labels {model}, and the data {data}: they do not belong together; name the data's labels in the \
         model's order by --labels",
        path.display()
    )]
    OtherLabels {
        /// The model.
        path: PathBuf,
        /// Its labels.
        model: String,
        /// Those of the data.
        data: String,
    },

    /// A model that looks for the ends of answers only for the starts that it likes best, where others' scores would be needed.
    #[error(
        "{} scores an answer's end for its own best starts alone (beam_head), so that it can be neither averaged with other models \
         nor be a teacher: ask it alone, or train a model without beam_head", path.display()
    )]
    Beams {
        /// The model.
        path: PathBuf,
    },

    /// Models of an ensemble that cannot be averaged.
    #[error("{} cannot be averaged with {}: their labels differ, or they split texts differently (tokenizer, maximum length, windows)", second.display(), first.display())]
    Ensemble {
        /// The first model.
        first: PathBuf,
        /// The one that differs.
        second: PathBuf,
    },

    /// Texts cannot be averaged.
    #[error("several models were given, and each writes a text of its own, which cannot be averaged: name one --model")]
    OneWriter,

    /// A model that cannot be trained for a task.
    #[error("{} is a model of type {model_type}, which cannot learn task {task}: expected one of type {expected}{advice}", path.display())]
    NoHead {
        /// The model.
        path: PathBuf,
        /// Its type.
        model_type: String,
        /// The task.
        task: &'static str,
        /// The types of models that can.
        expected: String,
        /// What else can be done.
        advice: &'static str,
    },

    /// A directory that holds another search.
    #[error("{} holds a different search, or none: choose another --out, or delete it\n{differences}", path.display())]
    OtherSearch {
        /// The directory.
        path: PathBuf,
        /// In what it differs.
        differences: String,
    },

    /// A search without a dev file.
    #[error("a search chooses the best run by its dev file, and there is none: give --dev FILE")]
    NothingToChooseBy,

    /// A model directory for inference.
    #[error(transparent)]
    Infer(#[from] InferError),

    /// Training.
    #[error(transparent)]
    Train(#[from] TrainError),

    /// Stopped from outside.
    #[error("stopped before all examples were done")]
    Stopped,

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
    #[error("example {id} of task {task} has a prediction of a different kind")]
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

    /// The same, with the numbers that the caller's texts have; see [`InferError::numbered`].
    #[must_use]
    pub fn numbered(self, numbers: &[usize]) -> Self {
        match self {
            Self::Infer(error) => Self::Infer(error.numbered(numbers)),
            other => other,
        }
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

fn task_names() -> String {
    TASKS.iter().map(|task| task.name).collect::<Vec<_>>().join(", ")
}
