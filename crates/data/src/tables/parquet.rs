//! Parquet files as rows, nested lists and groups with them.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::Field;
use serde_json::{Map, Value};

use super::{Cells, EachRow, Row};
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
    let mut names: Arc<[String]> = Arc::new([]);
    let mut line = 0;
    while let Some(row) = guarded(path, || rows.next().transpose().map_err(problem))? {
        line += 1;
        let columns = row.into_columns();
        if !names.iter().eq(columns.iter().map(|(name, _)| name)) {
            names = columns.iter().map(|(name, _)| name.clone()).collect();
        }
        let values = guarded(path, || Ok(columns.iter().map(|(_, field)| value(field)).collect()))?;
        each(Ok(Row { line, cells: Cells::List { names: Arc::clone(&names), values } }))?;
    }
    Ok(())
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
