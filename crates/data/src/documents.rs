//! Files into documents: text, JSON lines and parquet, plain or compressed.
//!
//! Files are read as streams, one document at a time. A document longer than [`LARGEST`] is cut into several, at a line's
//! end or else at white space, so that a file without any separator needs no more memory than others.
//!
//! What is deliberately absent: cleaning. Documents come as they are, but for white space at the ends of lines.

use std::collections::BTreeSet;
use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use parquet::basic::Type as PhysicalType;
use parquet::column::reader::ColumnReader;
use parquet::data_type::ByteArray;
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use serde::de::{DeserializeSeed, Error as _, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Serialize};

use crate::lines::{Line, Lines, Meter, open};
use crate::{DataError, Sentences};

/// The largest document in bytes: some three novels.
pub(crate) const LARGEST: usize = 8 << 20;

/// The longest line of JSON: it must be in memory as a whole.
pub(crate) const LARGEST_OBJECT: usize = 64 << 20;

/// Rows of a parquet file that are read at a time.
const ROWS: usize = 256;

/// What a file holds. Compression is seen by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Format {
    /// Lines of text, which [`Documents`] divides.
    Text,
    /// A JSON object a line, with the document under a key.
    JsonLines,
    /// A table with the documents in a column.
    Parquet,
}

impl Format {
    /// What a file's name says, and nothing where it says nothing.
    pub fn of(path: &Path) -> Option<Self> {
        match ending(path)?.as_str() {
            "txt" | "text" => Some(Self::Text),
            "jsonl" | "ndjson" | "json" => Some(Self::JsonLines),
            "parquet" => Some(Self::Parquet),
            _ => None,
        }
    }

    /// Whether a file's name says that it is a table of a kind that documents are not read from: as text, all of its cells
    /// and commas would be.
    pub fn is_other_table(path: &Path) -> bool {
        matches!(ending(path).as_deref(), Some("csv" | "tsv"))
    }
}

/// What a document is in a file of text. In other formats it is an object or a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Documents {
    /// What stands between empty lines.
    #[default]
    BetweenEmptyLines,
    /// Each line.
    Lines,
    /// The whole file.
    Files,
}

impl Documents {
    /// Whether a file in a directory is read. Where files are documents, Markdown is text like other text; elsewhere it is
    /// what describes a data set.
    fn known(self, path: &Path) -> bool {
        let markdown = || matches!(ending(path).as_deref(), Some("md" | "markdown"));
        Format::of(path).is_some() || (self == Self::Files && markdown())
    }
}

/// How a name ends, that of its compression aside, in lower case.
fn ending(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_string_lossy().to_lowercase();
    let plain = [".gz", ".zst", ".gzip", ".zstd"].iter().find_map(|ending| name.strip_suffix(ending));
    Some(plain.unwrap_or(&name).rsplit_once('.')?.1.to_owned())
}

/// How files are read.
#[derive(Clone, Debug)]
pub(crate) struct Reading<'a> {
    /// What all files hold; none: what their names and first bytes say.
    pub(crate) format: Option<Format>,
    /// What a document is in a text.
    pub(crate) documents: Documents,
    /// The key or the column with the text.
    pub(crate) field: &'a str,
    pub(crate) column: &'a str,
    /// Whether bytes that are not UTF-8 become U+FFFD; else they are an error.
    pub(crate) lossy: bool,
}

/// A document as it stands in a file.
pub(crate) struct Found<'a> {
    pub(crate) text: &'a str,
    /// The line where it begins, or its row; from 1.
    pub(crate) line: u64,
    /// What a sentence is where nobody says otherwise.
    pub(crate) sentences: Sentences,
    /// Whether it is not the first part of a document that was cut.
    pub(crate) continued: bool,
}

type Each<'a> = &'a mut dyn FnMut(Found<'_>) -> Result<(), DataError>;

/// The files that paths mean: directories give those in them whose names are known, in the order of their names. Also
/// those that were skipped.
pub(crate) fn expand(paths: &[PathBuf], documents: Documents) -> Result<(Vec<PathBuf>, Vec<PathBuf>), DataError> {
    let (mut files, mut skipped) = (Vec::new(), Vec::new());
    for path in paths {
        if path.as_os_str() != "-" && path.is_dir() {
            walk(path, documents, &mut files, &mut skipped)?;
        } else {
            files.push(path.clone());
        }
    }
    Ok((files, skipped))
}

fn walk(
    directory: &Path,
    documents: Documents,
    files: &mut Vec<PathBuf>,
    skipped: &mut Vec<PathBuf>,
) -> Result<(), DataError> {
    let io = || DataError::io("read", directory);
    let mut paths = BTreeSet::new();
    for entry in std::fs::read_dir(directory).map_err(io())? {
        let entry = entry.map_err(io())?;
        if !entry.file_name().as_encoded_bytes().starts_with(b".") {
            paths.insert(entry.path());
        }
    }
    for path in paths {
        // A link to a directory is not followed: it may lead back here.
        match path.is_dir() {
            true if path.is_symlink() => skipped.push(path),
            true => walk(&path, documents, files, skipped)?,
            false if documents.known(&path) => files.push(path),
            false => skipped.push(path),
        }
    }
    Ok(())
}

/// Reads all documents of a file, or of standard input where the path is `-`.
pub(crate) fn read(path: &Path, reading: &Reading<'_>, meter: &Arc<Meter>, each: Each<'_>) -> Result<(), DataError> {
    let stdin = path.as_os_str() == "-";
    let (source, start) = open(path, meter)?;
    let named = reading.format.or_else(|| Format::of(path));
    if named == Some(Format::Parquet) || (named.is_none() && start.starts_with(b"PAR1")) {
        if stdin {
            return Err(DataError::parquet(path, "it cannot be read from standard input, because its end comes first"));
        }
        return read_parquet(path, reading, meter, each);
    }
    let mut lines = Lines::new(source, &start, path, meter)?;
    match named {
        Some(Format::JsonLines) => read_json(&mut lines, reading, each),
        _ if reading.documents == Documents::Lines => read_text_lines(&mut lines, reading, each),
        _ => read_text(&mut lines, reading, each),
    }
}

/// Text as UTF-8; in `scratch` where bytes had to be replaced.
fn utf8<'a>(
    bytes: &'a [u8],
    lossy: bool,
    scratch: &'a mut String,
    path: &Path,
    place: impl FnOnce() -> String,
) -> Result<&'a str, DataError> {
    match std::str::from_utf8(bytes) {
        Ok(text) => Ok(text),
        Err(_) if lossy => {
            *scratch = String::from_utf8_lossy(bytes).into_owned();
            Ok(scratch)
        }
        Err(error) => Err(DataError::NotUtf8 { path: path.to_owned(), place: place(), byte: error.valid_up_to() + 1 }),
    }
}

fn read_text(lines: &mut Lines, reading: &Reading<'_>, each: Each<'_>) -> Result<(), DataError> {
    let (mut document, mut begin, mut continued, mut scratch) = (String::new(), 0, false, String::new());
    let (path, whole) = (Arc::clone(&lines.path), reading.documents == Documents::Files);
    // Whoever writes documents one after the other writes a sentence a line; whoever writes a file, running text.
    let sentences = if whole { Sentences::Split } else { Sentences::Lines };
    let mut gap = false;
    while let Some(Line { bytes, number, unfinished, .. }) = lines.next(LARGEST)? {
        let text = utf8(bytes, reading.lossy, &mut scratch, &path, || format!("line {number}"))?.trim();
        let empty = text.is_empty() && !unfinished;
        let ends = empty && !whole;
        gap |= empty;
        if !document.is_empty() && (ends || document.len() + text.len() >= LARGEST) {
            each(Found { text: &document, line: begin, sentences, continued })?;
            document.clear();
            continued = true;
        }
        if ends {
            continued = false;
        }
        if text.is_empty() {
            continue;
        }
        if document.is_empty() {
            begin = number;
        } else {
            document.push_str(if gap { "\n\n" } else { "\n" });
        }
        gap = false;
        document.push_str(text);
    }
    if !document.is_empty() {
        each(Found { text: &document, line: begin, sentences, continued })?;
    }
    Ok(())
}

fn read_text_lines(lines: &mut Lines, reading: &Reading<'_>, each: Each<'_>) -> Result<(), DataError> {
    let (path, mut scratch) = (Arc::clone(&lines.path), String::new());
    while let Some(Line { bytes, number, continued, .. }) = lines.next(LARGEST)? {
        let text = utf8(bytes, reading.lossy, &mut scratch, &path, || format!("line {number}"))?.trim();
        if !text.is_empty() {
            each(Found { text, line: number, sentences: Sentences::Split, continued })?;
        }
    }
    Ok(())
}

fn read_json(lines: &mut Lines, reading: &Reading<'_>, each: Each<'_>) -> Result<(), DataError> {
    let (path, mut tidied, mut scratch) = (Arc::clone(&lines.path), String::new(), String::new());
    while let Some(line) = lines.next(LARGEST_OBJECT)? {
        let number = line.number;
        let problem = |problem: String| DataError::Record { path: path.to_path_buf(), line: number, problem };
        if line.unfinished {
            return Err(problem(format!(
                "it has more than {} MiB; does it have one object per line?",
                LARGEST_OBJECT >> 20
            )));
        }
        if line.bytes.trim_ascii().is_empty() {
            continue;
        }
        let mut deserializer = serde_json::Deserializer::from_slice(line.bytes);
        let value = Field(reading.field).deserialize(&mut deserializer).and_then(|value| {
            deserializer.end()?;
            Ok(value)
        });
        let value = value.map_err(|error| {
            let whole = error.to_string();
            // The line is ours to say; it always has 1.
            let reason = whole.split(" at line ").next().unwrap_or(&whole);
            problem(format!("{reason} (column {})", error.column()))
        })?;
        let text = utf8(&value, reading.lossy, &mut scratch, &path, || format!("line {number}, {:?}", reading.field))?;
        whole(text, number, &mut tidied, each)?;
    }
    Ok(())
}

/// Takes one key's text out of an object, as bytes: they may be no UTF-8, and escapes may be halves of a character.
struct Field<'a>(&'a str);

impl<'de> DeserializeSeed<'de> for Field<'_> {
    type Value = Vec<u8>;

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<Vec<u8>, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Field<'_> {
    type Value = Vec<u8>;

    fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "an object with a text under {:?}", self.0)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Vec<u8>, A::Error> {
        let mut found = None;
        while let Some(Text(key)) = map.next_key()? {
            if key == self.0.as_bytes() {
                found = Some(map.next_value::<Option<Text>>()?.unwrap_or(Text(Vec::new())));
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        found.map(|Text(bytes)| bytes).ok_or_else(|| A::Error::custom(format!("no key {:?}", self.0)))
    }
}

struct Text(Vec<u8>);

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Bytes;
        impl Visitor<'_> for Bytes {
            type Value = Text;

            fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                formatter.write_str("a text")
            }

            fn visit_bytes<E>(self, bytes: &[u8]) -> Result<Text, E> {
                Ok(Text(bytes.to_vec()))
            }
        }
        deserializer.deserialize_bytes(Bytes)
    }
}

fn read_parquet(path: &Path, reading: &Reading<'_>, meter: &Meter, each: Each<'_>) -> Result<(), DataError> {
    let problem = |error: ParquetError| DataError::parquet(path, error.to_string());
    let file = File::open(path).map_err(DataError::io("open", path))?;
    // Other columns are jumped over, so the share of row groups says how far it is. The first bytes were counted.
    let size = file.metadata().map_err(DataError::io("open", path))?.len();
    let begin = meter.file.load(Relaxed).saturating_sub(size.min(1 << 17));
    let (reader, column) = guarded(path, || {
        let reader = SerializedFileReader::new(file).map_err(problem)?;
        let schema = reader.metadata().file_metadata().schema_descr_ptr();
        let names = schema.columns().iter().map(|column| column.path().string());
        let Some(column) = names.clone().position(|name| name == reading.column) else {
            let (column, names) = (reading.column.to_owned(), names.collect::<Vec<_>>().join(", "));
            return Err(DataError::NoColumn { path: path.to_owned(), column, names });
        };
        let described = schema.column(column);
        if described.physical_type() != PhysicalType::BYTE_ARRAY || described.max_rep_level() > 0 {
            return Err(DataError::parquet(path, format!("its column {:?} does not hold texts", reading.column)));
        }
        Ok((reader, column))
    })?;
    let (mut row, mut tidied, mut scratch) = (0, String::new(), String::new());
    for group in 0..reader.num_row_groups() {
        let mut values = guarded(path, || {
            let group = reader.get_row_group(group).map_err(problem)?;
            match group.get_column_reader(column).map_err(problem)? {
                ColumnReader::ByteArrayColumnReader(values) => Ok(values),
                _ => Err(DataError::parquet(path, "its column changes its type")),
            }
        })?;
        loop {
            let (mut levels, mut texts): (Vec<i16>, Vec<ByteArray>) = (Vec::new(), Vec::new());
            let (rows, ..) =
                guarded(path, || values.read_records(ROWS, Some(&mut levels), None, &mut texts).map_err(problem))?;
            if rows == 0 {
                break;
            }
            // Rows without a value have none here; they would be empty documents.
            for (number, text) in texts.iter().enumerate() {
                let line = row + number as u64 + 1;
                let value = guarded(path, || Ok(text.data()))?;
                meter.text.fetch_add(value.len() as u64, Relaxed);
                let text = utf8(value, reading.lossy, &mut scratch, path, || format!("row {line}"))?;
                whole(text, line, &mut tidied, each)?;
            }
            row += rows as u64;
        }
        meter.file.store(begin + size * (group as u64 + 1) / reader.num_row_groups() as u64, Relaxed);
    }
    Ok(())
}

/// The parquet crate panics on some broken files.
pub(crate) fn guarded<T>(path: &Path, call: impl FnOnce() -> Result<T, DataError>) -> Result<T, DataError> {
    // What the call had borrowed is not used again after a panic: the error ends the build.
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|_| Err(DataError::parquet(path, "it broke its reader")))
}

/// Gives a document that came as one text: lines trimmed, at most one empty one between others.
fn whole(text: &str, line: u64, tidied: &mut String, each: Each<'_>) -> Result<(), DataError> {
    tidied.clear();
    let mut gap = false;
    for text in text.lines().map(str::trim) {
        if text.is_empty() {
            gap = !tidied.is_empty();
            continue;
        }
        if !tidied.is_empty() {
            tidied.push_str(if gap { "\n\n" } else { "\n" });
        }
        gap = false;
        tidied.push_str(text);
    }
    let (mut rest, mut continued) = (tidied.as_str(), false);
    while !rest.is_empty() {
        let part = if rest.len() <= LARGEST { rest } else { &rest[..end_of_document(rest)] };
        each(Found { text: part.trim(), line, sentences: Sentences::Split, continued })?;
        rest = rest[part.len()..].trim_start();
        continued = true;
    }
    Ok(())
}

/// Where a document that is too large is cut: after a line, else after a space, else between two characters.
fn end_of_document(text: &str) -> usize {
    let most = text.floor_char_boundary(LARGEST);
    let window = &text[..most];
    let place = window.rfind('\n').or_else(|| window.rfind(' ')).filter(|&place| place > 0);
    place.unwrap_or(most)
}
