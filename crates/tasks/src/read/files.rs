//! How labelled files are written where they are not as the task's own are: the table `files` of a recipe, and so known from a
//! model's directory to whoever reads a file for that model.

use std::path::Path;

use henson_checkpoint::read_limited;
use henson_data::tables::{Column, TableFormat};
use henson_train::TrainError;
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::TaskError;
use crate::task::Task;

/// The largest recipe that is read.
const RECIPE_LIMIT: u64 = 16 << 20;

/// How labelled files are written. What is not set is as the task has it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Files {
    /// How tables are written; none: what the file's name says.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub format: Option<TableFormat>,
    /// Whether quotes go around cells; none: in csv, and not in tsv.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quotes: Option<bool>,
    /// Whether the first row names the columns; none: as the task has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub header: Option<bool>,
    /// The text, the first of two, the question, the context, or the words.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub text_column: Option<Column>,
    /// The second text, or the passage.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub second_column: Option<Column>,
    /// The label, number, answer or tags. Several: each is 0 or 1 for the label that it is named after.
    #[serde(with = "one_or_several", skip_serializing_if = "Vec::is_empty")]
    #[schemars(with = "Vec<String>")]
    pub label_column: Vec<Column>,
    /// The choices.
    #[serde(with = "one_or_several", skip_serializing_if = "Vec::is_empty")]
    #[schemars(with = "Vec<String>")]
    pub choice_columns: Vec<Column>,
    /// A text that means something else than the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub negative_column: Option<Column>,
    /// What predictions are known by.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub id_column: Option<Column>,
    /// The labels, in the order of their numbers; empty: the official ones, or those of the file, sorted. Any other in the
    /// file is then an error.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub labels: Vec<String>,
    /// Whether rows that are wrong are counted instead of being an error.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub skip_bad: bool,
}

impl Files {
    /// Whether all is as the task has it.
    pub fn is_usual(&self) -> bool {
        *self == Self::default()
    }

    /// These, but for what `other` sets.
    #[must_use]
    pub fn overruled_by(self, other: Self) -> Self {
        fn either<T>(list: Vec<T>, other: Vec<T>) -> Vec<T> {
            if other.is_empty() { list } else { other }
        }
        Self {
            format: other.format.or(self.format),
            quotes: other.quotes.or(self.quotes),
            header: other.header.or(self.header),
            text_column: other.text_column.or(self.text_column),
            second_column: other.second_column.or(self.second_column),
            label_column: either(self.label_column, other.label_column),
            choice_columns: either(self.choice_columns, other.choice_columns),
            negative_column: other.negative_column.or(self.negative_column),
            id_column: other.id_column.or(self.id_column),
            labels: either(self.labels, other.labels),
            skip_bad: self.skip_bad || other.skip_bad,
        }
    }
}

/// What a model's directory says about the files that it was trained on.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trained {
    /// What it was trained for, where henson fine-tuned it.
    pub task: Option<&'static Task>,
    /// How its files were written.
    pub files: Files,
}

impl Trained {
    /// Reads the `recipe.toml` of a directory. A directory without one, or with that of a pre-training, says nothing.
    pub fn of_directory(directory: &Path) -> Result<Self, TaskError> {
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct Known {
            task: String,
            text_to_text: bool,
            files: Files,
        }
        let path = directory.join("recipe.toml");
        if !path.exists() {
            return Ok(Self::default());
        }
        let problem = |problem: String| TrainError::Recipe { place: path.display().to_string(), problem };
        let bytes = read_limited(&path, RECIPE_LIMIT).map_err(TrainError::from)?;
        let text = String::from_utf8(bytes).map_err(|error| problem(error.to_string()))?;
        let known: Known = toml::from_str(&text).map_err(|error| problem(error.to_string().trim_end().to_owned()))?;
        let task = Task::named(&known.task);
        let written = task.filter(|_| known.text_to_text).and_then(Task::as_text);
        Ok(Self { task: written.or(task), files: known.files })
    }

    /// How a file is to be read for the model: `given` first. What it is called says more about a file's format than that of
    /// another, and whether bad rows may be skipped is for each file to say.
    pub fn files_for(self, data: &Path, given: Files) -> Files {
        let format = self.files.format.filter(|_| TableFormat::of(data).is_none());
        Files { format, skip_bad: false, ..self.files }.overruled_by(given)
    }
}

/// A list that is written without brackets where it has one item.
mod one_or_several {
    use super::{Column, Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Deserialize)]
    #[serde(untagged, expecting = "expected the name or the number of a column, or a list of them")]
    enum Written {
        One(Column),
        Several(Vec<Column>),
    }

    pub(super) fn serialize<S: Serializer>(columns: &[Column], serializer: S) -> Result<S::Ok, S::Error> {
        match columns {
            [one] => one.serialize(serializer),
            several => several.serialize(serializer),
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Column>, D::Error> {
        Ok(match Written::deserialize(deserializer)? {
            Written::One(column) => vec![column],
            Written::Several(columns) => columns,
        })
    }
}
