//! Tables of texts with labels, numbers or choices.

use std::path::Path;

use henson_data::tables::{self, Column, Header, Row, TableFormat, TableOptions};
use serde_json::Value;

use super::{Collector, listed, reading_with, text, texts};
use crate::error::TaskError;
use crate::example::{Example, Input, Set, Target};
use crate::task::TaskKind;

/// What SNLI and MultiNLI have for a label where their annotators disagreed.
const UNDECIDED: &str = "-";

pub(super) fn read(path: &Path, mut collector: Collector<'_>) -> Result<Set, TaskError> {
    let mut number = 0;
    each_row(path, &mut collector, |collector, row| {
        let (id, row) = (number, row?);
        number += 1;
        example(collector, &row, id)
    })?;
    collector.finish(None)
}

/// Reads rows, and gives what `make` makes of them to the collector.
pub(super) fn each_row(
    path: &Path,
    collector: &mut Collector<'_>,
    mut make: impl FnMut(&mut Collector<'_>, Result<Row, TaskError>) -> Result<Option<Example>, TaskError>,
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
            Ok(None) => Ok(()),
            Ok(Some(example)) => collector.take(Ok(example)),
            Err(problem) => collector.take(Err(problem)),
        },
    )
}

/// Where a row stands, for messages.
pub(super) fn place(path: &Path, row: &Row) -> String {
    match TableFormat::of(path) {
        Some(TableFormat::Parquet) => format!("row {}", row.line),
        _ => format!("line {}", row.line),
    }
}

/// What a column is for, and what it may be called.
pub(super) struct Role {
    pub(super) what: &'static str,
    pub(super) flag: &'static str,
    pub(super) names: &'static [&'static str],
}

/// The column with something: the one that the user named, or the first of the usual names that is there and is not
/// `taken` for something else.
pub(super) fn find<'r>(
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
pub(super) fn need<'r>(
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

/// The text of a cell, which must not be empty.
pub(super) fn text_in(path: &Path, row: &Row, column: &Column, value: &Value) -> Result<String, TaskError> {
    let wrong = |problem: String| TaskError::row(path, place(path, row), format!("column {column}: {problem}"));
    match text(value).map_err(wrong)? {
        Some(text) if !text.trim().is_empty() => Ok(text),
        _ => Err(wrong("the text is empty".to_owned())),
    }
}

/// What predictions for a row are known by.
pub(super) fn id_of(collector: &Collector<'_>, row: &Row, number: u64) -> String {
    let reading = collector.reading;
    let found = find(row, reading.files.id_column.as_ref(), reading.task.columns.id, None);
    let id = found.and_then(|(_, value)| text(value).ok().flatten()).filter(|id| !id.is_empty());
    id.unwrap_or_else(|| number.to_string())
}

fn example(collector: &mut Collector<'_>, row: &Row, number: u64) -> Result<Option<Example>, TaskError> {
    let (path, reading) = (collector.path, collector.reading);
    let (task, columns) = (reading.task, &reading.files);
    let place = place(path, row);
    let wrong = |problem: String| TaskError::row(path, place.clone(), problem);

    // Files without a header have their columns by number.
    let by_number = task.columns.without_header.filter(|_| row.names().is_empty() && !row.is_object());
    if let Some((.., width)) = by_number
        && row.width() < width
    {
        return Err(wrong(format!("it has {} columns, expected {width}", row.width())));
    }
    let own_text = columns.text_column.clone().or(by_number.map(|(text, ..)| Column::Number(text)));
    let mut own_labels = columns.label_column.clone();
    if let (true, Some((_, label, _))) = (own_labels.is_empty(), by_number) {
        own_labels.push(Column::Number(label));
    }

    let first_role = Role { what: "the text", flag: "--text-column", names: task.columns.first };
    let (first, value) = need(path, row, own_text.as_ref(), &first_role, None)?;
    let first_text = text_in(path, row, &first, value)?;
    let second_names = if task.kind == TaskKind::Classify { &[] } else { task.columns.second };
    let second_role = Role { what: "the second text", flag: "--second-column", names: second_names };
    let second = match task.kind {
        TaskKind::Pair | TaskKind::Embed => {
            Some(need(path, row, columns.second_column.as_ref(), &second_role, Some(&first))?)
        }
        _ if columns.second_column.is_some() => {
            Some(need(path, row, columns.second_column.as_ref(), &second_role, None)?)
        }
        _ => find(row, None, second_names, Some(&first)),
    };

    let single = match &own_labels[..] {
        [] => find(row, None, task.columns.label, Some(&first)),
        // A column that only the training needed.
        [column] if !reading.labels_wanted => find(row, Some(column), &[], None),
        [column] => {
            let role = Role { what: "the label", flag: "--label-column", names: &[] };
            Some(need(path, row, Some(column), &role, None)?)
        }
        _ => None,
    };
    let in_label = |problem: String| match &single {
        Some((column, _)) => wrong(format!("column {column}: {problem}")),
        None => wrong(problem),
    };

    let (input, target) = match task.kind {
        TaskKind::Choice => {
            let beginning = second.map(|(column, value)| (column, text(value)));
            let (column, endings) = choices(path, row, &columns.choice_columns)?;
            let mut texts = Vec::with_capacity(endings.len());
            for (name, ending) in &endings {
                if ending.trim().is_empty() {
                    return Err(wrong(format!("choice {name:?} of {column} is empty")));
                }
                let text = match &beginning {
                    Some((_, Ok(Some(beginning)))) if !beginning.trim().is_empty() => {
                        format!("{} {ending}", beginning.trim_end())
                    }
                    Some((column, Err(problem))) => return Err(wrong(format!("column {column}: {problem}"))),
                    _ => ending.clone(),
                };
                texts.push(text);
            }
            if texts.len() < 2 {
                return Err(wrong(format!("{} choices in {column}: expected at least 2", texts.len())));
            }
            let names: Vec<&str> = endings.iter().map(|(name, _)| name.as_str()).collect();
            let label = single.as_ref().filter(|_| collector.reading.labels_wanted);
            let label = label.map(|(_, value)| text(value)).transpose().map_err(&in_label)?.flatten();
            let target = match label.map(|label| label.trim().to_owned()).filter(|label| !label.is_empty()) {
                None => Target::None,
                Some(label) => Target::Class(chosen(&label, &names).map_err(&in_label)?),
            };
            (Input::Choices { context: first_text, endings: texts }, target)
        }
        kind => {
            let input = match second {
                None => Input::One(first_text),
                Some((column, value)) if kind == TaskKind::Embed => {
                    let second = text_in(path, row, &column, value)?;
                    let unlike = unlike(path, row, columns.negative_column.as_ref())?;
                    Input::Alike { first: first_text, second, unlike }
                }
                Some((column, value)) => Input::Pair(first_text, text_in(path, row, &column, value)?),
            };
            let target = match (&single, kind) {
                (Some((_, Value::String(label))), _) if !task.labels.is_empty() && label.trim() == UNDECIDED => {
                    collector.undecided += 1;
                    return Ok(None);
                }
                _ if !collector.reading.labels_wanted => Target::None,
                (None, TaskKind::Multilabel) if own_labels.len() > 1 => {
                    let mut classes = Vec::new();
                    for column in &own_labels {
                        let role = Role { what: "a label", flag: "--label-column", names: &[] };
                        let (_, value) = need(path, row, Some(column), &role, None)?;
                        let name = match column {
                            Column::Name(name) => name.clone(),
                            Column::Number(number) => number.to_string(),
                        };
                        let class = collector.number_of(&name).map_err(&wrong)?;
                        match text(value).map_err(&wrong)?.as_deref().map(str::trim) {
                            Some("1" | "1.0" | "true" | "True") => classes.push(class),
                            Some("0" | "0.0" | "false" | "False") => {}
                            _ => return Err(wrong(format!("column {column}: expected 0 or 1, found {value}"))),
                        }
                    }
                    classes.sort_unstable();
                    Target::Classes(classes)
                }
                (None, _) => Target::None,
                (Some((column, value)), TaskKind::Multilabel) => {
                    collector.adopt(row, column);
                    let value = collector.named(row, column, value);
                    let names = match &*value {
                        Value::Null => None,
                        Value::Array(_) => Some(texts(&value).map_err(&in_label)?),
                        value => text(value).map_err(&in_label)?.map(|names| {
                            names.split([',', ';', '|']).map(|name| name.trim().to_owned()).collect::<Vec<_>>()
                        }),
                    };
                    match names {
                        None => Target::None,
                        Some(names) => {
                            let names = names.iter().filter(|name| !name.is_empty());
                            let classes: Result<Vec<u32>, String> =
                                names.map(|name| collector.number_of(name)).collect();
                            let mut classes = classes.map_err(&in_label)?;
                            classes.sort_unstable();
                            classes.dedup();
                            Target::Classes(classes)
                        }
                    }
                }
                (Some((_, value)), TaskKind::Regress | TaskKind::Embed) => {
                    match text(value).map_err(&in_label)?.filter(|text| !text.trim().is_empty()) {
                        None => Target::None,
                        Some(text) => match text.trim().parse::<f64>() {
                            // It becomes an f32.
                            Ok(number) if (number as f32).is_finite() => Target::Number(number),
                            Ok(_) => return Err(in_label(format!("expected a number up to 3e38, found {text:?}"))),
                            Err(_) => return Err(in_label(format!("expected a number, found {text:?}"))),
                        },
                    }
                }
                (Some((column, value)), _) => {
                    collector.adopt(row, column);
                    let value = collector.named(row, column, value);
                    collector.class(&value).map_err(&in_label)?.map_or(Target::None, Target::Class)
                }
            };
            (input, target)
        }
    };
    let id = id_of(collector, row, number);
    Ok(Some(Example { id, place, input, target }))
}

/// The text that means something else, where the row has one.
fn unlike(path: &Path, row: &Row, user: Option<&Column>) -> Result<Option<String>, TaskError> {
    let role = Role { what: "the text that means something else", flag: "--negative-column", names: &["negative"] };
    let found = match user {
        Some(_) => Some(need(path, row, user, &role, None)?),
        None => find(row, None, role.names, None),
    };
    let Some((column, value)) = found else { return Ok(None) };
    let wrong = |problem: String| TaskError::row(path, place(path, row), format!("column {column}: {problem}"));
    Ok(text(value).map_err(wrong)?.filter(|text| !text.trim().is_empty()))
}

type NamedTexts = Vec<(String, String)>;

/// The choices of a row, each with its name, and where they were found.
fn choices(path: &Path, row: &Row, user: &[Column]) -> Result<(String, NamedTexts), TaskError> {
    let wrong = |problem: String| TaskError::row(path, place(path, row), problem);
    let role = Role { what: "the choices", flag: "--choice-columns", names: &["ending0", "A", "choice0", "choices"] };
    let mut columns: Vec<Column> = user.to_vec();
    if columns.is_empty() {
        columns = usual_choices(row);
    }
    if let [column] = &columns[..] {
        return Ok((
            format!("column {column}"),
            listed_choices(need(path, row, Some(column), &role, None)?.1).map_err(wrong)?,
        ));
    }
    if columns.is_empty() {
        need(path, row, None, &role, None)?;
    }
    let mut found = NamedTexts::new();
    for column in &columns {
        let (_, value) = need(path, row, Some(column), &role, None)?;
        let name = match column {
            Column::Name(name) => name.clone(),
            Column::Number(number) => number.to_string(),
        };
        found.push((name, text(value).map_err(wrong)?.unwrap_or_default()));
    }
    // A table must have the same columns for questions with fewer choices.
    while found.last().is_some_and(|(_, ending)| ending.trim().is_empty()) {
        found.pop();
    }
    let names: Vec<String> = columns.iter().map(Column::to_string).collect();
    Ok((format!("columns {}", names.join(", ")), found))
}

/// `ending0`, `ending1`, …, or `A`, `B`, …, or one column with a list.
fn usual_choices(row: &Row) -> Vec<Column> {
    for stem in ["ending", "choice", "option", ""] {
        for first in ['0', '1', 'A'] {
            let names = (0..26).map(|i| match first {
                'A' => format!("{stem}{}", char::from(b'A' + i)),
                first => format!("{stem}{}", i + u8::from(first == '1')),
            });
            let columns: Vec<Column> = names.map(Column::Name).take_while(|column| row.get(column).is_some()).collect();
            if columns.len() > 1 {
                return columns;
            }
        }
    }
    let lists = ["endings", "choices", "options"].iter().map(|name| Column::Name((*name).to_owned()));
    lists.filter(|column| row.get(column).is_some()).take(1).collect()
}

/// A list of choices, or two lists as ARC has them: their texts and their names.
fn listed_choices(value: &Value) -> Result<NamedTexts, String> {
    if let (Some(names), Some(endings)) = (value.get("label"), value.get("text")) {
        let (names, endings) = (texts(names)?, texts(endings)?);
        return match names.len() == endings.len() {
            true => Ok(names.into_iter().zip(endings).collect()),
            false => Err(format!("{} choices have {} names", endings.len(), names.len())),
        };
    }
    let endings = texts(value)?;
    Ok(endings.into_iter().enumerate().map(|(i, ending)| (i.to_string(), ending)).collect())
}

/// Which choice a label means: by its name, by its number from 0, or by its letter.
fn chosen(label: &str, names: &[&str]) -> Result<u32, String> {
    let by_name = names.iter().position(|name| *name == label);
    let by_number = || label.parse::<f64>().ok().filter(|number| number.fract() == 0.0 && *number >= 0.0);
    let by_letter = || match label.as_bytes() {
        [letter] if letter.is_ascii_alphabetic() => Some(usize::from(letter.to_ascii_uppercase() - b'A')),
        _ => None,
    };
    let found = by_name.or_else(|| by_number().map(|number| number as usize)).or_else(by_letter);
    let expected = || format!("{label:?} is none of the {} choices: expected one of {}", names.len(), listed(names));
    found.filter(|choice| *choice < names.len()).map(|choice| choice as u32).ok_or_else(expected)
}
