//! Tables of cells between tabs or commas, with quotes or without.

use std::sync::Arc;

use serde_json::Value;

use super::{Cells, Classes, EachRow, Header, Row, TableOptions, bad_row, text_of};
use crate::DataError;
use crate::documents::LARGEST;
use crate::lines::{Line, Lines};

/// Reads all rows. A quote that is never closed ends the reading whatever `each` says: nobody can tell what it swallowed.
pub(super) fn read(
    lines: &mut Lines,
    separator: u8,
    quotes: bool,
    options: &TableOptions,
    each: EachRow<'_>,
) -> Result<(), DataError> {
    let path = &*Arc::clone(&lines.path);
    let mut names: Arc<[String]> = Arc::new([]);
    let mut first = true;
    while let Some((line, record)) = next_record(lines, separator, quotes)? {
        let record = match record {
            Ok(text) if text.trim_matches([' ', '\r', '\n']).is_empty() => continue,
            Ok(text) => text,
            Err(problem) => {
                first = false;
                each(Err(problem))?;
                continue;
            }
        };
        let mut cells = split(&record, separator, quotes);
        if std::mem::take(&mut first) {
            let is_header = match &options.header {
                Header::Present => true,
                Header::Absent => false,
                Header::IfNamed(expected) => cells.iter().any(|cell| expected.iter().any(|name| name == cell.trim())),
            };
            if is_header {
                names = cells.iter().map(|cell| cell.trim().to_owned()).collect();
                continue;
            }
        }
        if !names.is_empty() {
            // Some programs end every line with separators.
            while cells.len() > names.len() && cells.last().is_some_and(String::is_empty) {
                cells.pop();
            }
            if cells.len() != names.len() {
                let problem = format!("it has {} columns, the header has {}", cells.len(), names.len());
                each(Err(bad_row(path, line, problem)))?;
                continue;
            }
        }
        let values = cells.into_iter().map(Value::String).collect();
        each(Ok(Row { line, cells: Cells::List { names: Arc::clone(&names), values }, classes: Classes::default() }))?;
    }
    Ok(())
}

type Record = (u64, Result<String, DataError>);

/// The next row's text and the line where it begins: one line, or several where a quote holds them together.
fn next_record(lines: &mut Lines, separator: u8, quotes: bool) -> Result<Option<Record>, DataError> {
    let path = &*Arc::clone(&lines.path);
    let (mut record, mut state) = (String::new(), Quote::CellBegins);
    let mut begin = None;
    while let Some(Line { bytes, number, unfinished, .. }) = lines.next(LARGEST)? {
        let line = *begin.get_or_insert(number);
        if unfinished {
            // The rest of it would look like a row of its own.
            while lines.next(LARGEST)?.is_some_and(|part| part.unfinished) {}
            let problem = format!("it is longer than {} MiB", LARGEST >> 20);
            return Ok(Some((line, Err(bad_row(path, line, problem)))));
        }
        let text = match text_of(bytes, path, number) {
            Ok(text) => text,
            Err(problem) => return Ok(Some((number, Err(problem)))),
        };
        if number > line {
            record.push('\n');
        }
        record.push_str(text);
        state = text.bytes().fold(state, |state, byte| state.after(byte, separator));
        if !quotes || state != Quote::Within {
            return Ok(Some((line, Ok(record))));
        }
        if record.len() > LARGEST {
            break;
        }
    }
    match begin {
        None => Ok(None),
        Some(line) => Err(DataError::OpenQuote { path: path.to_owned(), line }),
    }
}

/// The cells of a row. A quote that does not stand at a cell's beginning is an ordinary character.
fn split(record: &str, separator: u8, quotes: bool) -> Vec<String> {
    if !quotes {
        return record.split(char::from(separator)).map(str::to_owned).collect();
    }
    let (mut cells, mut cell, mut state) = (Vec::new(), Vec::new(), Quote::CellBegins);
    for byte in record.bytes() {
        let before = state;
        state = state.after(byte, separator);
        match (before, state) {
            (_, Quote::CellBegins) => cells.push(std::mem::take(&mut cell)),
            // The opening quote, and one that may close the cell or be the first of two.
            (Quote::CellBegins, Quote::Within) | (Quote::Within, Quote::MayEnd) => {}
            _ => cell.push(byte),
        }
    }
    cells.push(cell);
    // Cut at ASCII bytes alone, so that each is UTF-8 as the whole was.
    cells.into_iter().map(|cell| String::from_utf8_lossy(&cell).into_owned()).collect()
}

/// Where in a row with quotes one is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Quote {
    CellBegins,
    Plain,
    Within,
    /// After a quote within a quoted cell.
    MayEnd,
}

impl Quote {
    fn after(self, byte: u8, separator: u8) -> Self {
        match (self, byte) {
            (Self::CellBegins, b'"') | (Self::MayEnd, b'"') => Self::Within,
            (Self::Within, b'"') => Self::MayEnd,
            (Self::Within, _) => Self::Within,
            (_, byte) if byte == separator => Self::CellBegins,
            _ => Self::Plain,
        }
    }
}
