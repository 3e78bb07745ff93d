//! Tables of texts with labels, numbers or choices.

use std::path::Path;

use henson_data::tables::{self, Column, Header, Row, TableFormat, TableOptions};
use serde::Deserialize;
use serde_json::Value;

use super::{Collector, Files, listed, reading_with, text};
use crate::error::TaskError;
use crate::example::{Example, Set, Target};
use crate::forms::SecondText;
use crate::sentences::SentenceLoss;

/// What SNLI and MultiNLI have for a label where their annotators disagreed.
const UNDECIDED: &str = "-";

/// A row, and where in it is what.
pub(crate) struct Cells<'a> {
    pub(crate) path: &'a Path,
    pub(crate) row: &'a Row,
    pub(crate) files: &'a Files,
    place: String,
    pub(crate) first: String,
    pub(crate) second: Option<(Column, &'a Value)>,
    /// Those that the user names.
    pub(crate) label_columns: Vec<Column>,
    /// The label, where it is in one column.
    pub(crate) label: Option<(Column, &'a Value)>,
}

/// Reads rows of texts.
pub(crate) fn read(path: &Path, mut collector: Collector<'_>) -> Result<Set, TaskError> {
    let (mut number, form) = (0, collector.reading.task.form);
    each_row(path, &mut collector, |collector, row| {
        let (id, row) = (number, row?);
        number += 1;
        let second = match collector.reading.loss {
            Some(SentenceLoss::Mse) => SecondText::Usual,
            _ => form.second_text,
        };
        let cells = Cells::find(collector, &row, second)?;
        let inputs = form.inputs(&cells)?;
        let labels = collector.reading.task.labels;
        if matches!(&cells.label, Some((_, Value::String(label))) if !labels.is_empty() && label.trim() == UNDECIDED) {
            collector.set.undecided += 1;
            return Ok(Vec::new());
        }
        let target = match collector.reading.labels_wanted {
            true => form.target(&cells, collector)?,
            false => Target::None,
        };
        let (id, place) = (id_of(collector, &row, id), cells.place);
        let each = inputs.into_iter().enumerate().map(|(number, input)| {
            // A row with several partners for a text gives a pair each.
            let id = if number == 0 { id.clone() } else { format!("{id}-{number}") };
            Example { id, place: place.clone(), input, target: target.clone() }
        });
        Ok(each.collect())
    })?;
    collector.finish(None)
}

/// Reads rows, and gives what `make` makes of them to the collector.
pub(crate) fn each_row<I: IntoIterator<Item = Example>>(
    path: &Path,
    collector: &mut Collector<'_>,
    mut make: impl FnMut(&mut Collector<'_>, Result<Row, TaskError>) -> Result<I, TaskError>,
) -> Result<(), TaskError> {
    let reading = collector.reading;
    let task = &reading.task.columns;
    let header = match reading.files.header {
        Some(true) => Header::Present,
        Some(false) => Header::Absent,
        None if task.without_header.is_some() => {
            let user = [&reading.files.text_column, &reading.files.id_column].into_iter().flatten();
            let user = user.filter_map(|column| match column {
                Column::Name(name) => Some(name.clone()),
                Column::Number(_) => None,
            });
            Header::IfNamed(user.chain(task.first.iter().map(|name| (*name).to_owned())).collect())
        }
        None => Header::Present,
    };
    let options = TableOptions { format: reading.files.format, quotes: reading.files.quotes, header };
    reading_with(
        |each| tables::read_rows(path, &options, each),
        |row| match make(collector, row) {
            Ok(examples) => examples.into_iter().try_for_each(|example| collector.take(Ok(example))),
            Err(problem) => collector.take(Err(problem)),
        },
    )
}

/// Where a row stands, for messages.
pub(crate) fn place(path: &Path, row: &Row) -> String {
    match TableFormat::of(path) {
        Some(TableFormat::Parquet) => format!("row {}", row.line),
        _ => format!("line {}", row.line),
    }
}

/// What a column is for, and what it may be called.
pub(crate) struct Role {
    pub(crate) what: &'static str,
    pub(crate) flag: &'static str,
    pub(crate) names: &'static [&'static str],
}

/// The column with something: the one that the user named, or the first of the usual names that is there and is not
/// `taken` for something else.
pub(crate) fn find<'r>(
    row: &'r Row,
    user: Option<&Column>,
    names: &[&str],
    taken: Option<&Column>,
) -> Option<(Column, &'r Value)> {
    if let Some(column) = user {
        return row.get(column).map(|value| (column.clone(), value));
    }
    names.iter().find_map(|name| {
        let column = Column::Name((*name).to_owned());
        let value = row.get(&column).filter(|_| taken != Some(&column))?;
        Some((column, value))
    })
}

/// A column that must be there, and in tables is then there in every row.
pub(crate) fn need<'r>(
    path: &Path,
    row: &'r Row,
    user: Option<&Column>,
    role: &Role,
    taken: Option<&Column>,
) -> Result<(Column, &'r Value), TaskError> {
    find(row, user, role.names, taken).ok_or_else(|| {
        let expected = user.map_or_else(|| listed(role.names), Column::to_string);
        let found = match row.names()[..] {
            [] => format!("{} columns without names", row.width()),
            ref names => listed(names) + other_separator(names),
        };
        if row.is_object() {
            let problem = format!("no key for {}: expected {expected}, found {found}", role.what);
            return TaskError::row(path, place(path, row), problem);
        }
        TaskError::NoColumn { path: path.to_owned(), role: role.what, expected, found, flag: role.flag }
    })
}

/// What to do about a table that seems to have a single column, because its cells are separated by something else.
fn other_separator(names: &[&str]) -> &'static str {
    match names {
        [one] if one.contains('\t') => " (one cell with tabs in it: --format tsv divides there)",
        [one] if one.contains(',') => " (one cell with commas in it: --format csv divides there)",
        [one] if one.contains(';') => " (one cell with semicolons in it: write commas or tabs instead)",
        _ => "",
    }
}

/// What a cell with an object or a list holds; all that is not asked for is left alone.
pub(crate) fn object_in<'v, T: Deserialize<'v>>(name: &str, value: &'v Value) -> Result<T, String> {
    T::deserialize(value).map_err(|error| format!("{name:?}: {error}"))
}

/// The text of a cell, which must not be empty.
pub(crate) fn text_in(path: &Path, row: &Row, column: &Column, value: &Value) -> Result<String, TaskError> {
    let wrong = |problem: String| TaskError::row(path, place(path, row), format!("column {column}: {problem}"));
    match text(value).map_err(wrong)? {
        Some(text) if !text.trim().is_empty() => Ok(text),
        _ => Err(wrong("the text is empty".to_owned())),
    }
}

/// What predictions for a row are known by.
pub(crate) fn id_of(collector: &Collector<'_>, row: &Row, number: u64) -> String {
    let reading = collector.reading;
    let found = find(row, reading.files.id_column.as_ref(), reading.task.columns.id, None);
    let id = found.and_then(|(_, value)| text(value).ok().flatten()).filter(|id| !id.is_empty());
    id.unwrap_or_else(|| number.to_string())
}

impl<'a> Cells<'a> {
    fn find(collector: &Collector<'a>, row: &'a Row, second_text: SecondText) -> Result<Self, TaskError> {
        let (path, reading) = (collector.path, collector.reading);
        let (columns, files, place) = (&reading.task.columns, &reading.files, place(path, row));
        // Files without a header have their columns by number.
        let by_number = columns.without_header.filter(|_| row.names().is_empty() && !row.is_object());
        if let Some((.., width)) = by_number
            && row.width() < width
        {
            return Err(TaskError::row(path, place, format!("it has {} columns, expected {width}", row.width())));
        }
        let text_column = files.text_column.clone().or(by_number.map(|(text, ..)| Column::Number(text)));
        let mut label_columns = files.label_column.clone();
        if let (true, Some((_, label, _))) = (label_columns.is_empty(), by_number) {
            label_columns.push(Column::Number(label));
        }
        let role = Role { what: "the text", flag: "--text-column", names: columns.first };
        let (first, value) = need(path, row, text_column.as_ref(), &role, None)?;
        let first_text = text_in(path, row, &first, value)?;
        let names = if second_text == SecondText::Named { &[] } else { columns.second };
        let role = Role { what: "the second text", flag: "--second-column", names };
        let own = files.second_column.as_ref();
        let second = match own.is_some() || second_text == SecondText::Needed {
            true => Some(need(path, row, own, &role, Some(&first))?),
            false => find(row, None, names, Some(&first)),
        };
        let label = match &label_columns[..] {
            [] => find(row, None, columns.label, Some(&first)),
            // A column that only the training needed.
            [column] if !reading.labels_wanted => find(row, Some(column), &[], None),
            [column] => {
                let role = Role { what: "the label", flag: "--label-column", names: &[] };
                Some(need(path, row, Some(column), &role, None)?)
            }
            _ => None,
        };
        Ok(Self { path, row, files, place, first: first_text, second, label_columns, label })
    }

    /// The second text, where there is one.
    pub(crate) fn second_text(&self) -> Result<Option<String>, TaskError> {
        let second = self.second.as_ref();
        second.map(|(column, value)| text_in(self.path, self.row, column, value)).transpose()
    }

    /// A number for a label.
    pub(crate) fn number(&self) -> Result<Target, TaskError> {
        let Some((_, value)) = &self.label else { return Ok(Target::None) };
        let text = text(value).map_err(|problem| self.in_label(&problem))?.filter(|text| !text.trim().is_empty());
        let Some(text) = text else { return Ok(Target::None) };
        match text.trim().parse::<f64>() {
            // It becomes an f32.
            Ok(number) if (number as f32).is_finite() => Ok(Target::Number(number)),
            Ok(_) => Err(self.in_label(&format!("expected a number up to 3e38, found {text:?}"))),
            Err(_) => Err(self.in_label(&format!("expected a number, found {text:?}"))),
        }
    }

    pub(crate) fn wrong(&self, problem: String) -> TaskError {
        TaskError::row(self.path, self.place.clone(), problem)
    }

    /// A problem with the label.
    pub(crate) fn in_label(&self, problem: &str) -> TaskError {
        match &self.label {
            Some((column, _)) => self.wrong(format!("column {column}: {problem}")),
            None => self.wrong(problem.to_owned()),
        }
    }
}
