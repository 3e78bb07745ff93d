//! Files to examples. What a benchmark's files look like is told by its [`Task`]; what differs from that, by [`Reading`].
//!
//! A row that is wrong is the error, with its file and line; with `skip_bad` it is counted instead.

mod files;
pub(crate) mod rows;
mod several;
pub(crate) mod spans;

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::Path;

use henson_data::DataError;
use henson_data::tables::{Column, Row, TableFormat};
use serde_json::Value;

use crate::error::TaskError;
use crate::example::{Example, Set, Target};
use crate::sentences::SentenceLoss;
use crate::task::Task;

pub use files::{Files, Trained};
pub use several::Paths;
pub(crate) use several::sort_labels;

/// Problems whose messages are kept when bad rows are skipped.
const KEPT_PROBLEMS: usize = 5;

/// How a labelled file is read.
#[derive(Clone, Debug)]
pub struct Reading {
    /// What it is read as.
    pub task: &'static Task,
    /// What differs from the task's own files.
    pub files: Files,
    /// Whether the labels among `files` are a model's own, whose order says nothing about the numbers in a file.
    pub labels_of_model: bool,
    /// Whether every answer must say where in the passage it stands, as training needs it.
    pub places_needed: bool,
    /// Whether the labels of texts are read; predictions need none, and a table may hold others than the model's.
    pub labels_wanted: bool,
    /// What stands before every source that a model writes for.
    pub prefix: String,
    /// What vectors are learned by from the file, where a recipe says so: it says what labels are.
    pub loss: Option<SentenceLoss>,
}

impl Reading {
    /// As the task has it; nothing is skipped.
    pub fn new(task: &'static Task) -> Self {
        Self {
            task,
            files: Files::default(),
            labels_of_model: false,
            places_needed: true,
            labels_wanted: true,
            prefix: String::new(),
            loss: None,
        }
    }

    /// Whether a file has rows with keys.
    pub(crate) fn has_rows(&self, path: &Path) -> bool {
        let format = self.files.format.or_else(|| TableFormat::of(path));
        matches!(format, Some(TableFormat::JsonLines | TableFormat::Parquet))
    }
}

/// Reads a labelled file, or one without labels. Standard input where the path is `-`.
pub fn read(path: &Path, reading: &Reading) -> Result<Set, TaskError> {
    reading.task.form.read(path, Collector::new(path, reading))
}

/// Whether a file is one JSON document by its name.
pub(crate) fn is_document(path: &Path) -> bool {
    path.file_name().is_some_and(|name| {
        let name = name.to_string_lossy().to_lowercase();
        [".json", ".json.gz", ".json.zst"].iter().any(|ending| name.ends_with(ending))
    })
}

/// Gathers examples, counts what is wrong, and numbers the labels.
pub(crate) struct Collector<'r> {
    pub(crate) path: &'r Path,
    pub(crate) reading: &'r Reading,
    /// What was read so far.
    pub(crate) set: Set,
    /// Whether the first example had a label; all others must be alike.
    labelled: Option<bool>,
    numbers: HashMap<String, u32>,
}

impl<'r> Collector<'r> {
    fn new(path: &'r Path, reading: &'r Reading) -> Self {
        let labels: Vec<String> = match reading.files.labels.is_empty() {
            true => reading.task.labels.iter().map(|label| (*label).to_owned()).collect(),
            false => reading.files.labels.clone(),
        };
        let numbers = labels.iter().cloned().zip(0..).collect();
        let labels_are_final = !labels.is_empty();
        let set = Set { path: path.to_owned(), labels_are_final, ..Set::new(reading.task, labels, Vec::new()) };
        Self { path, reading, set, labelled: None, numbers }
    }

    /// Takes an example, or the reason why there is none.
    pub(crate) fn take(&mut self, example: Result<Example, TaskError>) -> Result<(), TaskError> {
        let example = example.and_then(|example| {
            let has_label = example.target != Target::None;
            match *self.labelled.get_or_insert(has_label) == has_label {
                true => Ok(example),
                false => {
                    let problem = match has_label {
                        true => "it has a label, while those before have none",
                        false => "it has no label, while those before have one",
                    };
                    Err(TaskError::row(self.path, example.place, problem))
                }
            }
        });
        match example {
            Ok(example) => self.set.examples.push(example),
            Err(problem) if problem.is_row() && self.reading.files.skip_bad => {
                self.set.skipped += 1;
                if self.set.problems.len() < KEPT_PROBLEMS {
                    self.set.problems.push(problem.to_string());
                }
            }
            Err(problem) => return Err(problem),
        }
        Ok(())
    }

    /// A label's number.
    pub(crate) fn number_of(&mut self, label: &str) -> Result<u32, String> {
        if let Some(number) = self.numbers.get(label) {
            return Ok(*number);
        }
        // The words that config.json has for the benchmark's own.
        let task = self.reading.task;
        if self.reading.files.labels.is_empty()
            && let Some(number) = task.meanings.iter().position(|meaning| *meaning == label)
        {
            return Ok(number as u32);
        }
        if self.set.labels_are_final {
            return Err(format!("unknown label {label:?}: expected {}", listed(&self.set.labels)));
        }
        let number = self.set.labels.len() as u32;
        self.set.labels.push(label.to_owned());
        self.numbers.insert(label.to_owned(), number);
        Ok(number)
    }

    /// A cell with the names of what its numbers stand for: those of the file's schema, or the labels that were given. Where
    /// none of the names is a label here, the labels are the numbers themselves, as they are of models that were trained so.
    pub(crate) fn named<'v>(&self, row: &Row, column: &Column, value: &'v Value) -> Cow<'v, Value> {
        let given =
            Some(&self.reading.files.labels[..]).filter(|names| !names.is_empty() && !self.reading.labels_of_model);
        let Some(names) = row.class_names(column).or(given) else { return Cow::Borrowed(value) };
        if self.set.labels_are_final && !names.iter().any(|name| self.is_label(name)) {
            return Cow::Borrowed(value);
        }
        Cow::Owned(self.with_names(value, names))
    }

    fn with_names(&self, value: &Value, names: &[String]) -> Value {
        match value {
            Value::Array(values) => values.iter().map(|value| self.with_names(value, names)).collect(),
            // How the `datasets` library writes that there is none.
            Value::Number(number) if number.as_i64() == Some(-1) => Value::Null,
            Value::Number(number) if !self.is_label(&number.to_string()) => {
                let name = number.as_u64().and_then(|number| names.get(usize::try_from(number).ok()?));
                name.map_or_else(|| value.clone(), |name| Value::String(name.clone()))
            }
            other => other.clone(),
        }
    }

    fn is_label(&self, name: &str) -> bool {
        let meanings = self.reading.task.meanings;
        self.numbers.contains_key(name) || (self.reading.files.labels.is_empty() && meanings.contains(&name))
    }

    /// Takes the classes that a file's schema names as its labels, in the order of their numbers and whether they occur or
    /// not, unless the labels are known already.
    pub(crate) fn adopt(&mut self, row: &Row, column: &Column) {
        if let Some(names) =
            row.class_names(column).filter(|_| !self.set.labels_are_final && self.set.labels.is_empty())
        {
            self.set.labels = names.to_vec();
            self.numbers = self.set.labels.iter().cloned().zip(0..).collect();
            self.set.labels_are_final = true;
        }
    }

    /// The number of a class in a cell: its label, or in typed tables its number by the official order.
    pub(crate) fn class(&mut self, value: &Value) -> Result<Option<u32>, String> {
        let Some(label) = text(value)?.map(|label| label.trim().to_owned()) else { return Ok(None) };
        if let (Value::Number(number), true) = (value, self.set.labels_are_final) {
            match number.as_i64() {
                // How the `datasets` library writes that there is none.
                Some(-1) => return Ok(None),
                Some(class) if !self.numbers.contains_key(&label) => {
                    let known = usize::try_from(class).is_ok_and(|class| class < self.set.labels.len());
                    let problem = || format!("there is no label number {class}: expected {}", listed(&self.set.labels));
                    return if known { Ok(Some(class as u32)) } else { Err(problem()) };
                }
                _ => {}
            }
        }
        match label.is_empty() {
            true => Ok(None),
            false => self.number_of(&label).map(Some),
        }
    }

    /// The set. Labels that were learned are sorted: by their values where all are whole numbers, else by their letters.
    pub(crate) fn finish(mut self, scheme: Option<crate::Scheme>) -> Result<Set, TaskError> {
        if self.set.examples.is_empty() {
            let reason = match self.set.skipped {
                0 => "it is empty".to_owned(),
                skipped => format!("all {skipped} are wrong, first: {}", self.set.problems.join("; ")),
            };
            return Err(TaskError::Empty { path: self.path.to_owned(), task: self.reading.task.name, reason });
        }
        if !self.set.labels_are_final {
            self.sort_labels();
        }
        Ok(Set { scheme, ..self.set })
    }

    fn sort_labels(&mut self) {
        let mut order: Vec<usize> = (0..self.set.labels.len()).collect();
        let values: Option<Vec<i64>> = self.set.labels.iter().map(|label| label.parse().ok()).collect();
        match values {
            Some(values) => order.sort_by_key(|&i| (values[i], &self.set.labels[i])),
            None => order.sort_by_key(|&i| &self.set.labels[i]),
        }
        let mut new_numbers = vec![0; order.len()];
        for (new, &old) in order.iter().enumerate() {
            new_numbers[old] = new as u32;
        }
        self.set.labels = order.iter().map(|&old| std::mem::take(&mut self.set.labels[old])).collect();
        for target in self.set.examples.iter_mut().map(|example| &mut example.target) {
            if !new_numbers.is_empty() {
                target.labels_mut().iter_mut().for_each(|label| *label = new_numbers[*label as usize]);
            }
            if let Target::Classes(classes) = target {
                classes.sort_unstable();
            }
        }
    }
}

/// Calls a reader of `data` with a callback that fails in this crate's way.
pub(crate) fn reading_with<T>(
    read: impl FnOnce(&mut dyn FnMut(Result<T, DataError>) -> Result<(), DataError>) -> Result<(), DataError>,
    mut each: impl FnMut(Result<T, TaskError>) -> Result<(), TaskError>,
) -> Result<(), TaskError> {
    let mut failure = None;
    let outcome = read(&mut |row| {
        each(row.map_err(TaskError::from)).map_err(|error| {
            failure = Some(error);
            DataError::Stopped
        })
    });
    match failure {
        Some(failure) => Err(failure),
        None => Ok(outcome?),
    }
}

/// A cell's text; none where it is null.
pub(crate) fn text(value: &Value) -> Result<Option<String>, String> {
    match value {
        Value::Null => Ok(None),
        Value::String(text) => Ok(Some(text.clone())),
        Value::Number(number) => Ok(Some(number.to_string())),
        Value::Bool(truth) => Ok(Some(truth.to_string())),
        Value::Array(_) => Err("expected a text, found a list".to_owned()),
        Value::Object(_) => Err("expected a text, found an object".to_owned()),
    }
}

/// A list of texts.
pub(crate) fn texts(value: &Value) -> Result<Vec<String>, String> {
    let Value::Array(values) = value else { return Err("expected a list of texts".to_owned()) };
    values.iter().map(|value| text(value)?.ok_or_else(|| "expected a text, found null in a list".to_owned())).collect()
}

/// Some names, for messages.
pub(crate) fn listed<T: AsRef<str>>(names: &[T]) -> String {
    let shown: Vec<String> = names.iter().take(20).map(|name| format!("{:?}", name.as_ref())).collect();
    let more = if names.len() > 20 { format!(" and {} more", names.len() - 20) } else { String::new() };
    shown.join(", ") + &more
}
