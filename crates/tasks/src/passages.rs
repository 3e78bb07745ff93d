//! Folders and files as passages to search: overlapping windows of words with the lines that they stand on, or rows of a table with
//! their ids.

use std::fs;
use std::path::{Path, PathBuf};

use henson_checkpoint::read_limited;
use henson_data::DataError;

use crate::error::TaskError;
use crate::retrieval::read_passages;

/// Files of a folder that are read: text, and tables of texts.
const TEXTS: [&str; 9] = ["md", "markdown", "txt", "text", "rst", "org", "adoc", "tex", "html"];
const TABLES: [&str; 3] = ["jsonl", "ndjson", "parquet"];

/// The largest text file.
const FILE_LIMIT: u64 = 256 << 20;

/// How deep folders may lie in each other: a link that leads back would have no end.
const DEPTH: usize = 32;

/// A passage, and where it is from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourcedPassage {
    /// Its file.
    pub path: PathBuf,
    /// Where in it.
    pub place: PassagePlace,
    /// Its text.
    pub text: String,
}

/// Where in a file a passage is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PassagePlace {
    /// From the first to the last of its lines, counted from 1.
    Lines(usize, usize),
    /// A row with an id.
    Id(String),
}

/// How long passages are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassageLength {
    /// Words of a passage.
    pub words: usize,
    /// Words that it has in common with the one before.
    pub overlap: usize,
}

impl Default for PassageLength {
    fn default() -> Self {
        Self { words: 80, overlap: 20 }
    }
}

/// All passages of a file, or of the files in a folder and its folders, by name. Hidden ones, and files that are neither text nor
/// tables by their names, are left out.
pub fn passages_of(path: &Path, length: PassageLength) -> Result<Vec<SourcedPassage>, TaskError> {
    let mut files = Vec::new();
    if path.is_dir() {
        list(path, 0, &mut files)?;
    } else {
        files.push(path.to_owned());
    }
    let mut all = Vec::new();
    for file in &files {
        if has_ending(file, &TABLES) {
            let of_row = |passage: crate::Passage| SourcedPassage {
                path: file.clone(),
                place: PassagePlace::Id(passage.id),
                text: passage.text,
            };
            all.extend(read_passages(file)?.into_iter().map(of_row));
        } else {
            let bytes = read_limited(file, FILE_LIMIT).map_err(henson_train::TrainError::from)?;
            cut(file, &String::from_utf8_lossy(&bytes), length, &mut all);
        }
    }
    if all.is_empty() {
        let known = TEXTS.iter().chain(&TABLES).map(|ending| format!(".{ending}")).collect::<Vec<_>>().join(", ");
        let reason = format!("there is no text: expected a file with text, or a folder with files such as {known}");
        return Err(TaskError::Empty { path: path.to_owned(), task: "search", reason });
    }
    Ok(all)
}

fn list(folder: &Path, depth: usize, files: &mut Vec<PathBuf>) -> Result<(), TaskError> {
    let entries = fs::read_dir(folder)
        .map_err(|source| DataError::Io { action: "read", path: folder.to_owned(), source })
        .map_err(TaskError::Data)?;
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    for path in paths {
        let hidden = path.file_name().is_none_or(|name| name.to_string_lossy().starts_with('.'));
        if hidden {
            continue;
        }
        if path.is_dir() && depth < DEPTH {
            list(&path, depth + 1, files)?;
        } else if path.is_file() && (has_ending(&path, &TEXTS) || has_ending(&path, &TABLES)) {
            files.push(path);
        }
    }
    Ok(())
}

fn has_ending(path: &Path, endings: &[&str]) -> bool {
    let ending = path.extension().map(|ending| ending.to_string_lossy().to_lowercase());
    ending.is_some_and(|ending| endings.contains(&ending.as_str()))
}

/// Windows of words over a text. What would be left over at the end belongs to the last one.
fn cut(path: &Path, text: &str, length: PassageLength, all: &mut Vec<SourcedPassage>) {
    let (words, step) = (length.words.max(1), length.words.saturating_sub(length.overlap).max(1));
    // The bytes of each word, and its line.
    let mut found: Vec<(usize, usize, usize)> = Vec::new();
    let mut begin = 0;
    for (number, line) in text.split('\n').enumerate() {
        for word in line.split_whitespace() {
            let start = begin + (word.as_ptr() as usize - line.as_ptr() as usize);
            found.push((start, start + word.len(), number + 1));
        }
        begin += line.len() + 1;
    }
    let mut start = 0;
    while start < found.len() {
        let rest = found.len() - start;
        let end = if rest <= words + length.overlap { found.len() } else { start + words };
        let (first, last) = (found[start], found[end - 1]);
        let text = text[first.0..last.1].to_owned();
        all.push(SourcedPassage { path: path.to_owned(), place: PassagePlace::Lines(first.2, last.2), text });
        if end == found.len() {
            break;
        }
        start += step;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_overlap_and_know_their_lines() {
        let text = "a b c\n\nd  e f\ng h\r\ni";
        let of = |words, overlap| {
            let mut all = Vec::new();
            cut(Path::new("x"), text, PassageLength { words, overlap }, &mut all);
            all.into_iter().map(|p| (p.text, p.place)).collect::<Vec<_>>()
        };
        let lines = PassagePlace::Lines;
        let expected = [("a b c\n\nd", lines(1, 3)), ("d  e f\ng", lines(3, 4)), ("g h\r\ni", lines(4, 5))];
        assert_eq!(of(4, 1), expected.map(|(text, place)| (text.to_owned(), place)));
        // A rest that is no longer than the overlap joins the last.
        assert_eq!(of(4, 0).last().unwrap().0, "i");
        assert_eq!(of(8, 1), [(text.to_owned(), lines(1, 5))]);
        // Degenerate lengths still go forward.
        assert_eq!(of(1, 5).len(), 4);
        assert_eq!(of(0, 0).len(), 9);
    }

    #[test]
    fn folders_are_read_by_name() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name);
        fs::create_dir(at("sub")).unwrap();
        fs::write(at("b.md"), "two\n").unwrap();
        fs::write(at("sub/a.TXT"), "three").unwrap();
        fs::write(at("a.jsonl"), "{\"id\": \"x\", \"text\": \"one\"}\n").unwrap();
        fs::write(at(".hidden.md"), "no").unwrap();
        fs::write(at("picture.png"), "no").unwrap();
        fs::write(at("empty.txt"), " \n").unwrap();
        let found = passages_of(place.path(), PassageLength::default()).unwrap();
        assert_eq!(found.iter().map(|p| p.text.as_str()).collect::<Vec<_>>(), ["one", "two", "three"]);
        assert_eq!(found[0].place, PassagePlace::Id("x".to_owned()));
        let error = passages_of(&at("empty.txt"), PassageLength::default()).unwrap_err().to_string();
        assert!(error.contains("there is no text"), "{error}");
        assert!(passages_of(&at("missing"), PassageLength::default()).is_err());
    }
}
