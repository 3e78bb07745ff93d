//! fastText's lines: `__label__` and a label, once or several times, then the text.

use std::sync::Arc;

use serde_json::Value;

use super::{Cells, Classes, EachRow, Row, bad_row, text_of};
use crate::DataError;
use crate::documents::LARGEST;
use crate::lines::Lines;

/// What labels begin with.
pub(super) const LABEL: &str = "__label__";

/// Reads rows with the columns `label` (a text, a list where there are several, null where there is none) and `text`.
pub(super) fn read(lines: &mut Lines, each: EachRow<'_>) -> Result<(), DataError> {
    let path = &*Arc::clone(&lines.path);
    let names: Arc<[String]> = Arc::new(["label".to_owned(), "text".to_owned()]);
    while let Some(line) = lines.next(LARGEST)? {
        let number = line.number;
        if line.unfinished {
            while lines.next(LARGEST)?.is_some_and(|part| part.unfinished) {}
            each(Err(bad_row(path, number, format!("it is longer than {} MiB", LARGEST >> 20))))?;
            continue;
        }
        if line.bytes.trim_ascii().is_empty() {
            continue;
        }
        let row = text_of(line.bytes, path, number).map(|text| {
            let (mut rest, mut labels) = (text.trim(), Vec::new());
            while let Some(label) = rest.strip_prefix(LABEL) {
                let (label, after) = label.split_once(char::is_whitespace).unwrap_or((label, ""));
                labels.push(Value::from(label));
                rest = after.trim_start();
            }
            let label = match labels.len() {
                0 => Value::Null,
                1 => labels.remove(0),
                _ => Value::Array(labels),
            };
            let values = vec![label, Value::from(rest)];
            Row { line: number, cells: Cells::List { names: Arc::clone(&names), values }, classes: Classes::default() }
        });
        each(row)?;
    }
    Ok(())
}
