//! JSON lines as rows, and whole JSON documents.

use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{Cells, Classes, EachRow, Row, bad_row, open};
use crate::DataError;
use crate::documents::{LARGEST_OBJECT, Lines, Meter, decompress};

/// The largest JSON document: it must be in memory as a whole. SQuAD's training file has 42 MB.
const LARGEST_DOCUMENT: u64 = 1 << 30;

pub(super) fn read_lines(lines: &mut Lines<'_>, each: EachRow<'_>) -> Result<(), DataError> {
    let path = lines.path;
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
        let row = match serde_json::from_slice(line.bytes) {
            Ok(Value::Object(object)) => {
                Ok(Row { line: number, cells: Cells::Object(object), classes: Classes::default() })
            }
            Ok(other) => Err(bad_row(path, number, format!("expected a JSON object, found {}", kind(&other)))),
            Err(error) => {
                let whole = error.to_string();
                // The line is ours to say; it always has 1.
                let reason = whole.split(" at line ").next().unwrap_or(&whole);
                let problem =
                    format!("broken JSON: {reason} (column {}); expected one object per line", error.column());
                Err(bad_row(path, number, problem))
            }
        };
        each(row)?;
    }
    Ok(())
}

/// Reads a file that is one JSON document.
pub fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T, DataError> {
    let meter = Arc::new(Meter::default());
    let (source, start) = open(path, &meter)?;
    let mut bytes = Vec::new();
    let mut reader = decompress(source, &start, path)?.take(LARGEST_DOCUMENT + 1);
    reader.read_to_end(&mut bytes).map_err(DataError::io("read", path))?;
    let problem = |problem| DataError::Json { path: path.to_owned(), problem };
    if bytes.len() as u64 > LARGEST_DOCUMENT {
        return Err(problem(format!("it is larger than {} MiB", LARGEST_DOCUMENT >> 20)));
    }
    let text = bytes.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(&bytes);
    serde_json::from_slice(text).map_err(|error| problem(error.to_string()))
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
