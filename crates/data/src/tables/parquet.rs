//! Parquet files as rows, nested lists and groups with them.

use std::collections::HashSet;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use parquet::errors::ParquetError;
use parquet::file::metadata::KeyValue;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::Field;
use serde_json::{Map, Value};

use super::{Cells, Classes, EachRow, Row};
use crate::DataError;
use crate::documents::guarded;

pub(super) fn read(path: &Path, each: EachRow<'_>) -> Result<(), DataError> {
    if path.as_os_str() == "-" {
        return Err(DataError::parquet(path, "it cannot be read from standard input, because its end comes first"));
    }
    let problem = |error: ParquetError| DataError::parquet(path, error.to_string());
    let file = File::open(path).map_err(DataError::io("open", path))?;
    let reader = guarded(path, || SerializedFileReader::new(file).map_err(problem))?;
    let mut rows = guarded(path, || reader.get_row_iter(None).map_err(problem))?;
    let classes = classes_of(reader.metadata().file_metadata().key_value_metadata());
    let mut names: Arc<[String]> = Arc::new([]);
    let mut line = 0;
    while let Some(row) = guarded(path, || rows.next().transpose().map_err(problem))? {
        line += 1;
        let columns = row.into_columns();
        if !names.iter().eq(columns.iter().map(|(name, _)| name)) {
            names = columns.iter().map(|(name, _)| name.clone()).collect();
        }
        let values = guarded(path, || Ok(columns.iter().map(|(_, field)| value(field)).collect()))?;
        let cells = Cells::List { names: Arc::clone(&names), values };
        each(Ok(Row { line, cells, classes: Arc::clone(&classes) }))?;
    }
    Ok(())
}

/// The names of classes, from what the `datasets` library of Hugging Face writes into a file's metadata: its features, among
/// which each `ClassLabel` has names. Whatever else stands there is not for us.
fn classes_of(metadata: Option<&Vec<KeyValue>>) -> Classes {
    let written = metadata.into_iter().flatten().find(|entry| entry.key == "huggingface");
    let written = written.and_then(|entry| serde_json::from_str::<Value>(entry.value.as_deref()?).ok());
    let features = written.as_ref().and_then(|written| written.pointer("/info/features")?.as_object());
    let named = |(column, feature): (&String, &Value)| Some((column.clone(), class_names(feature)?));
    features.into_iter().flatten().filter_map(named).collect()
}

/// The names of a `ClassLabel`, or of the one that a list is made of.
fn class_names(feature: &Value) -> Option<Arc<[String]>> {
    // A list is written as a list of its one feature by some versions, and under a key by others.
    let inner = feature.get(0).or_else(|| feature.get("feature"));
    if let Some(inner) = inner {
        return class_names(inner);
    }
    let names = feature.get("names").filter(|_| feature.get("_type").is_some_and(|kind| kind == "ClassLabel"))?;
    let names: Option<Vec<String>> = names.as_array()?.iter().map(|name| name.as_str().map(str::to_owned)).collect();
    let is_unique = |names: &Vec<String>| names.iter().collect::<HashSet<_>>().len() == names.len();
    names.filter(is_unique).map(Arc::from)
}

fn value(field: &Field) -> Value {
    match field {
        Field::Null => Value::Null,
        Field::Bool(truth) => Value::Bool(*truth),
        Field::Byte(number) => Value::from(*number),
        Field::Short(number) => Value::from(*number),
        Field::Int(number) => Value::from(*number),
        Field::Long(number) => Value::from(*number),
        Field::UByte(number) => Value::from(*number),
        Field::UShort(number) => Value::from(*number),
        Field::UInt(number) => Value::from(*number),
        Field::ULong(number) => Value::from(*number),
        Field::Float16(number) => Value::from(f32::from(*number)),
        Field::Float(number) => Value::from(*number),
        Field::Double(number) => Value::from(*number),
        Field::Str(text) => Value::String(text.clone()),
        Field::Bytes(bytes) => Value::String(String::from_utf8_lossy(bytes.data()).into_owned()),
        Field::ListInternal(list) => list.elements().iter().map(value).collect(),
        Field::Group(group) => {
            let pairs = group.get_column_iter().map(|(name, field)| (name.clone(), value(field)));
            Value::Object(pairs.collect::<Map<_, _>>())
        }
        Field::MapInternal(map) => {
            let name = |key: &Field| match value(key) {
                Value::String(text) => text,
                other => other.to_string(),
            };
            let pairs = map.entries().iter().map(|(key, field)| (name(key), value(field)));
            Value::Object(pairs.collect::<Map<_, _>>())
        }
        // Times and decimals, as people would write them.
        other => Value::String(other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_classes_however_they_are_nested() {
        let names = |features: &str| {
            let value = format!("{{\"info\": {{\"features\": {{\"x\": {features}}}}}}}");
            let entry = KeyValue { key: "huggingface".to_owned(), value: Some(value) };
            classes_of(Some(&vec![entry]))
                .iter()
                .map(|(column, names)| format!("{column}: {}", names.join(" ")))
                .collect::<Vec<_>>()
        };
        let class = r#"{"num_classes": 2, "names": ["a", "b"], "id": null, "_type": "ClassLabel"}"#;
        assert_eq!(names(class), ["x: a b"]);
        assert_eq!(names(&format!("[{class}]")), ["x: a b"]);
        for kind in ["Sequence", "List", "LargeList"] {
            let list = format!(r#"{{"feature": {class}, "length": -1, "_type": "{kind}"}}"#);
            assert_eq!(names(&list), ["x: a b"], "{kind}");
            assert_eq!(names(&format!(r#"{{"feature": {list}, "_type": "{kind}"}}"#)), ["x: a b"], "{kind}");
        }
        for other in [
            r#"{"dtype": "int64", "_type": "Value"}"#,
            r#"{"names": ["a", "a"], "_type": "ClassLabel"}"#,
            r#"{"names": ["a", 1], "_type": "ClassLabel"}"#,
            r#"{"names": "a", "_type": "ClassLabel"}"#,
            r#"{"_type": "ClassLabel"}"#,
            "[]",
            "7",
        ] {
            assert_eq!(names(other), [""; 0], "{other}");
        }
        assert!(classes_of(None).is_empty());
        let broken = KeyValue { key: "huggingface".to_owned(), value: Some("{".to_owned()) };
        assert!(classes_of(Some(&vec![broken])).is_empty());
    }
}
