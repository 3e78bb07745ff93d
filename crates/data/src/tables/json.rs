//! JSON lines and arrays as rows, and whole JSON documents.

use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{Cells, Classes, EachRow, Row, bad_row, open};
use crate::DataError;
use crate::documents::LARGEST_OBJECT;
use crate::lines::{Lines, Meter, decompress};

/// The largest JSON document: it must be in memory as a whole. SQuAD's training file has 42 MB.
const LARGEST_DOCUMENT: u64 = 1 << 30;

pub(super) fn read_lines(lines: &mut Lines, each: EachRow<'_>) -> Result<(), DataError> {
    let path = &*Arc::clone(&lines.path);
    while let Some(line) = lines.next(LARGEST_OBJECT)? {
        let number = line.number;
        if line.unfinished {
            while lines.next(LARGEST_OBJECT)?.is_some_and(|part| part.unfinished) {}
            let problem =
                format!("it is longer than {} MiB: does this file have one object per line?", LARGEST_OBJECT >> 20);
            each(Err(bad_row(path, number, problem)))?;
            continue;
        }
        if line.bytes.trim_ascii().is_empty() {
            continue;
        }
        each(row_of(line.bytes, path, number))?;
    }
    Ok(())
}

/// The row on a line.
fn row_of(bytes: &[u8], path: &Path, number: u64) -> Result<Row, DataError> {
    let problem = match serde_json::from_slice(bytes) {
        Ok(Value::Object(object)) => {
            return Ok(Row { line: number, cells: Cells::Object(object), classes: Classes::default() });
        }
        Ok(other) => format!("expected a JSON object, found {}", kind(&other)),
        Err(error) => {
            format!("broken JSON: {} (column {}); expected one object per line", reason(&error), error.column())
        }
    };
    Err(bad_row(path, number, problem))
}

/// The rows of one array, whose items are objects, or lists of cells. It must be in memory as a whole.
pub(super) fn read_array(lines: &mut Lines, each: EachRow<'_>) -> Result<(), DataError> {
    let (path, mut bytes) = (&*Arc::clone(&lines.path), Vec::new());
    while let Some(line) = lines.next(LARGEST_OBJECT)? {
        bytes.extend_from_slice(line.bytes);
        if bytes.len() as u64 > LARGEST_DOCUMENT {
            return Err(too_large(path));
        }
    }
    // A list on the first of several lines is a bad line.
    let mut split = bytes.splitn(2, |byte| *byte == b'\n');
    let (first, rest) = (split.next().unwrap_or_default(), split.next().unwrap_or_default());
    if !rest.trim_ascii().is_empty() && serde_json::from_slice::<Value>(first).is_ok() {
        let lines = (1..).zip(bytes.split(|byte| *byte == b'\n')).filter(|(_, line)| !line.trim_ascii().is_empty());
        return lines.into_iter().try_for_each(|(number, line)| each(row_of(line, path, number)));
    }
    let (mut at, mut counted, mut line) = (0, 0, 1);
    let mut line_at = |place: usize| {
        line += bytes[counted..place].iter().filter(|byte| **byte == b'\n').count() as u64;
        counted = place;
        line
    };
    let space = |at: usize| bytes[at..].iter().take_while(|byte| byte.is_ascii_whitespace()).count();
    let mut before = b'[';
    loop {
        // What stands before an item, or the end.
        at += space(at);
        let found = bytes.get(at).copied();
        if found == Some(b']') && before == b',' {
            break;
        }
        if found != Some(before) {
            let problem = format!("broken JSON: expected {:?} or the end of the array", char::from(before));
            return each(Err(bad_row(path, line_at(at), problem)));
        }
        at += 1 + space(at + 1);
        if before == b'[' && bytes.get(at) == Some(&b']') {
            break;
        }
        before = b',';
        let number = line_at(at);
        let mut items = serde_json::Deserializer::from_slice(&bytes[at..]).into_iter::<Value>();
        let cells = match items.next() {
            Some(Ok(Value::Object(object))) => Ok(Cells::Object(object)),
            Some(Ok(Value::Array(values))) => Ok(Cells::List { names: Arc::new([]), values }),
            Some(Ok(other)) => Err(format!("expected a JSON object in the array, found {}", kind(&other))),
            Some(Err(error)) => {
                // Nobody can tell where the next one begins.
                let problem = format!("broken JSON: {}; expected an array of objects", reason(&error));
                return each(Err(bad_row(path, number, problem)));
            }
            None => return each(Err(bad_row(path, number, "broken JSON: the array does not end"))),
        };
        at += items.byte_offset();
        let row = cells.map(|cells| Row { line: number, cells, classes: Classes::default() });
        each(row.map_err(|problem| bad_row(path, number, problem)))?;
    }
    match bytes[at + 1..].trim_ascii().is_empty() {
        true => Ok(()),
        false => each(Err(bad_row(path, line_at(at), "something follows the end of the array"))),
    }
}

/// What is wrong; the line is ours to say.
fn reason(error: &serde_json::Error) -> String {
    let whole = error.to_string();
    whole.split(" at line ").next().unwrap_or(&whole).to_owned()
}

fn too_large(path: &Path) -> DataError {
    let problem = format!("it is larger than {} MiB", LARGEST_DOCUMENT >> 20);
    DataError::Json { path: path.to_owned(), problem }
}

/// Reads a file that is one JSON document.
pub fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, DataError> {
    let meter = Arc::new(Meter::default());
    let (source, start) = open(path, &meter)?;
    let mut bytes = Vec::new();
    let mut reader = decompress(source, &start, path)?.take(LARGEST_DOCUMENT + 1);
    reader.read_to_end(&mut bytes).map_err(DataError::io("read", path))?;
    if bytes.len() as u64 > LARGEST_DOCUMENT {
        return Err(too_large(path));
    }
    let text = bytes.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(&bytes);
    serde_json::from_slice(text).map_err(|error| DataError::Json { path: path.to_owned(), problem: error.to_string() })
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
