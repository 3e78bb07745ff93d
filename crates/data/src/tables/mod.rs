//! Labelled files as rows: tables (tsv, csv, JSON lines and arrays, fastText's lines, parquet), sentences of CoNLL columns, and whole JSON documents.
//!
//! Everything is read as a stream but JSON documents, and all of it may be compressed with gzip or zstd, which is known by
//! the first bytes. A row that cannot be read is handed out as the error that it is, with file and line, and reading goes
//! on: whether that ends the work or is counted is for the caller to say. [`DataError::is_row`] tells such errors from
//! those of the whole file.
//!
//! What is deliberately absent: what a row means. That is the business of whoever knows the task.

mod columns;
mod delimited;
mod fasttext;
mod json;
mod parquet;

use std::io::BufReader;
use std::path::Path;
use std::sync::Arc;

use henson_text::check_regular;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

pub use columns::{Sentence, read_sentences};
pub use json::read_json;

use crate::DataError;
use crate::lines::{self, Counted, Lines, Meter, bad_row, text_of};

/// Opens a labelled file, and nothing else: opening a FIFO would wait for somebody who writes to it, and a device may have no
/// end. Standard input is asked for by its name, `-`.
fn open(path: &Path, meter: &Arc<Meter>) -> Result<(BufReader<Counted>, Vec<u8>), DataError> {
    if path.as_os_str() != "-" {
        check_regular(path).map_err(DataError::io("open", path))?;
    }
    lines::open(path, meter)
}

/// How a table is written. Compression is seen by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TableFormat {
    /// Cells between tabs, a row a line. Quotes are ordinary characters, as in GLUE's files.
    Tsv,
    /// Cells between commas. Quotes go around cells with commas, quotes (doubled) or line breaks in them.
    Csv,
    /// A JSON object per line, or one array of them.
    #[serde(rename = "jsonl")]
    JsonLines,
    /// fastText's lines: labels that begin with `__label__`, then the text.
    #[serde(rename = "fasttext")]
    FastText,
    /// A parquet file.
    Parquet,
}

impl TableFormat {
    /// What a file's name says, and nothing where it says nothing.
    pub fn of(path: &Path) -> Option<Self> {
        let name = path.file_name()?.to_str()?.to_lowercase();
        let plain = [".gz", ".zst", ".gzip", ".zstd"].iter().find_map(|ending| name.strip_suffix(ending));
        match plain.unwrap_or(&name).rsplit_once('.')?.1 {
            "tsv" | "txt" | "tab" => Some(Self::Tsv),
            "csv" => Some(Self::Csv),
            "jsonl" | "ndjson" | "json" => Some(Self::JsonLines),
            "parquet" => Some(Self::Parquet),
            _ => None,
        }
    }
}

/// How a table is read.
#[derive(Clone, Debug, Default)]
pub struct TableOptions {
    /// What the file holds; none: what its name says, and tsv where that says nothing.
    pub format: Option<TableFormat>,
    /// Whether quotes go around cells; none: in csv, and not in tsv.
    pub quotes: Option<bool>,
    /// Whether the first row of a tsv or csv names the columns.
    pub header: Header,
}

/// Whether the first row of a table names its columns.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Header {
    /// It does.
    #[default]
    Present,
    /// It is a row like others.
    Absent,
    /// It does where one of these names stands in it.
    IfNamed(Vec<String>),
}

/// A column of a table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected the name of a column, or its number from 0")]
pub enum Column {
    /// By its number, from 0.
    Number(usize),
    /// By its name in the header, or its key.
    Name(String),
}

impl std::fmt::Display for Column {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Name(name) => write!(formatter, "{name:?}"),
            Self::Number(number) => write!(formatter, "number {number} (from 0)"),
        }
    }
}

/// A row of a table. Cells of tsv and csv are strings.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The line where it begins, or in parquet its number; from 1.
    pub line: u64,
    cells: Cells,
    classes: Classes,
}

/// Columns whose numbers stand for classes, with the names of these.
type Classes = Arc<[(String, Arc<[String]>)]>;

#[derive(Clone, Debug, PartialEq)]
enum Cells {
    /// As many names as values, or none at all.
    List {
        names: Arc<[String]>,
        values: Vec<Value>,
    },
    Object(Map<String, Value>),
}

impl Row {
    /// The value of a column; none where there is no such column. Columns of JSON objects have no numbers.
    pub fn get(&self, column: &Column) -> Option<&Value> {
        match (&self.cells, column) {
            (Cells::List { names, values }, Column::Name(name)) => values.get(names.iter().position(|n| n == name)?),
            (Cells::List { values, .. }, Column::Number(number)) => values.get(*number),
            (Cells::Object(object), Column::Name(name)) => object.get(name),
            (Cells::Object(_), Column::Number(_)) => None,
        }
    }

    /// The names of the classes that numbers in a column stand for, where the file has such.
    pub fn class_names(&self, column: &Column) -> Option<&[String]> {
        let name = match (column, &self.cells) {
            (Column::Name(name), _) => name,
            (Column::Number(number), Cells::List { names, .. }) => names.get(*number)?,
            (Column::Number(_), Cells::Object(_)) => return None,
        };
        self.classes.iter().find(|(other, _)| other == name).map(|(_, names)| &**names)
    }

    /// The names of its columns; none where nothing names them.
    pub fn names(&self) -> Vec<&str> {
        match &self.cells {
            Cells::List { names, .. } => names.iter().map(String::as_str).collect(),
            Cells::Object(object) => object.keys().map(String::as_str).collect(),
        }
    }

    /// Whether it is an object with keys of its own; else all rows of its table have the same columns.
    pub fn is_object(&self) -> bool {
        matches!(self.cells, Cells::Object(_))
    }

    /// How many cells it has.
    pub fn width(&self) -> usize {
        match &self.cells {
            Cells::List { values, .. } => values.len(),
            Cells::Object(object) => object.len(),
        }
    }
}

/// What is done with each row, or with the error that stands in its place. An error that it returns ends the reading.
pub type EachRow<'a> = &'a mut dyn FnMut(Result<Row, DataError>) -> Result<(), DataError>;

/// Reads all rows of a file, or of standard input where the path is `-`.
pub fn read_rows(path: &Path, options: &TableOptions, each: EachRow<'_>) -> Result<(), DataError> {
    let meter = Arc::new(Meter::default());
    let (source, start) = open(path, &meter)?;
    let format = options.format.or_else(|| TableFormat::of(path));
    if format == Some(TableFormat::Parquet) || (options.format.is_none() && start.starts_with(b"PAR1")) {
        return parquet::read(path, each);
    }
    let mut lines = Lines::new(source, &start, path, &meter)?;
    let may_be_fasttext = options.format.is_none() && matches!(format, None | Some(TableFormat::Tsv));
    let is_fasttext = may_be_fasttext && lines.begins_with(fasttext::LABEL.as_bytes())?;
    match format {
        Some(TableFormat::JsonLines) if lines.begins_with(b"[")? => json::read_array(&mut lines, each),
        Some(TableFormat::FastText) => fasttext::read(&mut lines, each),
        _ if is_fasttext => fasttext::read(&mut lines, each),
        Some(TableFormat::JsonLines) => json::read_lines(&mut lines, each),
        Some(TableFormat::Csv) => delimited::read(&mut lines, b',', options.quotes != Some(false), options, each),
        _ => delimited::read(&mut lines, b'\t', options.quotes == Some(true), options, each),
    }
}

/// Whether a file is a JSON array.
pub fn is_array(path: &Path) -> Result<bool, DataError> {
    let meter = Arc::new(Meter::default());
    let (source, start) = open(path, &meter)?;
    Lines::new(source, &start, path, &meter)?.begins_with(b"[")
}
