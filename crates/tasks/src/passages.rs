//! Folders and files as passages to search: overlapping windows of words with the lines that they stand on, or rows of a table with
//! their ids.

use std::collections::{BTreeSet, HashSet};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::{fs, io};

use henson_checkpoint::read_limited;
use henson_data::DataError;

use crate::error::TaskError;
use crate::retrieval::read_passages;

/// Files of a folder that are read: text, and tables of texts.
const TEXTS: [&str; 9] = ["md", "markdown", "txt", "text", "rst", "org", "adoc", "tex", "html"];
const TABLES: [&str; 3] = ["jsonl", "ndjson", "parquet"];

/// The largest text file.
const FILE_LIMIT: u64 = 256 << 20;

/// A text file of a folder with a zero in so many of its first bytes is no text, or none in UTF-8.
const SNIFFED: usize = 8 << 10;

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

/// A file or folder in a folder that could not be read, and was left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SkippedPath {
    /// Which.
    pub path: PathBuf,
    /// Its name again, the line where there is one, and what is wrong there.
    pub reason: String,
}

/// What there is to search.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FoundPassages {
    /// The passages, by the names of their files; at least one.
    pub passages: Vec<SourcedPassage>,
    /// What of a folder was left out, by name.
    pub skipped: Vec<SkippedPath>,
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
/// tables by their names, are not looked at. What of a folder cannot be read is left out and reported; a file that is named itself
/// is an error then.
pub fn passages_of(path: &Path, length: PassageLength) -> Result<FoundPassages, TaskError> {
    let mut found = FoundPassages::default();
    if path.is_dir() {
        for file in list(path, &mut found.skipped) {
            match read(&file, length, true) {
                Ok(passages) => found.passages.extend(passages),
                Err(error) => found.skipped.push(SkippedPath::new(&file, &error)),
            }
        }
        found.skipped.sort_by(|a, b| a.path.cmp(&b.path));
    } else {
        found.passages = read(path, length, false)?;
    }
    if found.passages.is_empty() {
        let known = TEXTS.iter().chain(&TABLES).map(|ending| format!(".{ending}")).collect::<Vec<_>>().join(", ");
        let mut reason = format!("there is no text: expected a file with text, or a folder with files such as {known}");
        if let Some(first) = found.skipped.first() {
            reason = format!("{reason}; {} left out, the first for this: {}", found.skipped.len(), first.reason);
        }
        return Err(TaskError::Empty { path: path.to_owned(), task: "search", reason });
    }
    Ok(found)
}

impl SkippedPath {
    fn new(path: &Path, error: &dyn Error) -> Self {
        let (mut reason, mut cause) = (error.to_string(), error.source());
        while let Some(inner) = cause {
            let text = inner.to_string();
            // Some errors end with their cause.
            if !reason.ends_with(&text) {
                reason = format!("{reason}: {text}");
            }
            cause = inner.source();
        }
        Self { path: path.to_owned(), reason }
    }

    fn unreadable(path: &Path, source: io::Error) -> Self {
        Self::new(path, &DataError::Io { action: "read", path: path.to_owned(), source })
    }
}

/// The passages of a file. `sniff`: whether it is refused when it begins like a binary file.
fn read(file: &Path, length: PassageLength, sniff: bool) -> Result<Vec<SourcedPassage>, TaskError> {
    if has_ending(file, &TABLES) {
        let of_row = |passage: crate::Passage| SourcedPassage {
            path: file.to_owned(),
            place: PassagePlace::Id(passage.id),
            text: passage.text,
        };
        return Ok(read_passages(file)?.into_iter().map(of_row).collect());
    }
    let bytes = read_limited(file, FILE_LIMIT).map_err(henson_train::TrainError::from)?;
    if sniff && let Some(zero) = bytes.iter().take(SNIFFED).position(|byte| *byte == 0) {
        let problem = "expected text in UTF-8, found a zero, as binary files and UTF-16 have it";
        return Err(TaskError::row(file, format!("byte {}", zero + 1), problem));
    }
    let mut all = Vec::new();
    cut(file, &String::from_utf8_lossy(&bytes), length, &mut all);
    Ok(all)
}

/// The files of a folder and of all folders below it that are to be read, by name. Each folder and each file is there once, whatever
/// links lead to it, so that those that lead back have an end.
fn list(root: &Path, skipped: &mut Vec<SkippedPath>) -> Vec<PathBuf> {
    // Links come last: what they lead to keeps the name that it has without them.
    let mut folders = BTreeSet::from([(false, root.to_owned())]);
    let mut links: BTreeSet<PathBuf> = BTreeSet::new();
    let mut files: Vec<PathBuf> = Vec::new();
    let (mut visited, mut known) = (HashSet::<PathBuf>::new(), HashSet::<PathBuf>::new());
    while let Some((_, folder)) = folders.pop_first() {
        let opened = fs::canonicalize(&folder).and_then(|canonical| Ok((canonical, fs::read_dir(&folder)?)));
        let (canonical, entries) = match opened {
            Ok(opened) => opened,
            Err(source) => {
                skipped.push(SkippedPath::unreadable(&folder, source));
                continue;
            }
        };
        if !visited.insert(canonical.clone()) {
            continue;
        }
        for entry in entries {
            let (path, name) = match entry {
                Ok(entry) => (entry.path(), entry.file_name()),
                Err(source) => {
                    skipped.push(SkippedPath::unreadable(&folder, source));
                    break;
                }
            };
            if name.to_string_lossy().starts_with('.') {
                continue;
            }
            let (is_link, is_wanted) = (path.is_symlink(), has_ending(&path, &TEXTS) || has_ending(&path, &TABLES));
            match fs::metadata(&path) {
                Ok(found) if found.is_dir() => {
                    folders.insert((is_link, path));
                }
                Ok(found) if !found.is_file() || !is_wanted => {}
                Ok(_) if is_link => {
                    links.insert(path);
                }
                Ok(_) => {
                    known.insert(canonical.join(name));
                    files.push(path);
                }
                // A link to nowhere matters only if its name is that of a text.
                Err(_) if is_link && !is_wanted => {}
                Err(source) => skipped.push(SkippedPath::unreadable(&path, source)),
            }
        }
    }
    for link in links {
        match fs::canonicalize(&link) {
            Ok(canonical) if known.contains(&canonical) => {}
            Ok(canonical) => {
                known.insert(canonical);
                files.push(link);
            }
            Err(source) => skipped.push(SkippedPath::unreadable(&link, source)),
        }
    }
    files.sort();
    files
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
        let FoundPassages { passages: found, skipped } = passages_of(place.path(), PassageLength::default()).unwrap();
        assert!(skipped.is_empty(), "{skipped:?}");
        assert_eq!(found.iter().map(|p| p.text.as_str()).collect::<Vec<_>>(), ["one", "two", "three"]);
        assert_eq!(found[0].place, PassagePlace::Id("x".to_owned()));
        let error = passages_of(&at("empty.txt"), PassageLength::default()).unwrap_err().to_string();
        assert!(error.contains("there is no text"), "{error}");
        assert!(passages_of(&at("missing"), PassageLength::default()).is_err());
    }
    /// The names of the files that passages are from, below a folder.
    fn names(found: &FoundPassages, folder: &Path) -> Vec<String> {
        let name = |p: &SourcedPassage| p.path.strip_prefix(folder).unwrap().display().to_string();
        found.passages.iter().map(name).collect()
    }

    #[test]
    fn what_cannot_be_read_is_left_out_of_a_folder() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name);
        let bad = |name: &str, content: &[u8]| fs::write(at(name), content).unwrap();
        fs::create_dir(at("sub")).unwrap();
        bad("broken.jsonl", b"{\"text\": \"a\"}\n{\"text\": \"b\"\n");
        bad("numbers.jsonl", b"{\"n\": 1}\n");
        bad("sub/picture.txt", b"\x89PNG\0\0");
        bad("sub/wide.md", b"\xff\xfea\0b\0");
        let read = |path: &Path| passages_of(path, PassageLength::default());
        let error = read(place.path()).unwrap_err().to_string();
        let expected = ["there is no text", "4 left out", "broken.jsonl, line 2"];
        assert!(expected.iter().all(|part| error.contains(part)), "{error}");
        bad("good.md", b"one");
        // Further on, a zero is a character as any other.
        bad("late.txt", &[&[b'x'; SNIFFED][..], b"\0"].concat());
        let found = read(place.path()).unwrap();
        assert_eq!(names(&found, place.path()), ["good.md", "late.txt"]);
        let expected = [
            "broken.jsonl, line 2: ",
            "numbers.jsonl, line 1: it has no text",
            "picture.txt, byte 5: ",
            "wide.md, byte 4: ",
        ];
        assert_eq!(found.skipped.len(), expected.len());
        for (skipped, expected) in found.skipped.iter().zip(expected) {
            assert!(skipped.reason.contains(expected), "{expected}: {skipped:?}");
        }
        // A file that is named itself is not left out.
        for (name, expected) in [("broken.jsonl", "line 2"), ("numbers.jsonl", "line 1: it has no text")] {
            let error = read(&at(name)).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn folders_and_files_are_read_once_whatever_links_lead_to_them() {
        use std::os::unix::fs::symlink;

        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name);
        let deep = format!("two/{}", "d/".repeat(40));
        for folder in [deep.as_str(), "outside"] {
            fs::create_dir_all(at(folder)).unwrap();
        }
        for name in ["two/b.txt", &format!("{deep}c.txt"), "outside/e.txt"] {
            fs::write(at(name), "hello").unwrap();
        }
        let links = [
            (".", "l1"),
            (".", "l2"),
            ("..", "d/up"),
            ("b.txt", "a.txt"),
            ("../outside", "out"),
            ("../outside", "same"),
            ("../outside/e.txt", "alias.txt"),
            ("nowhere", "gone.md"),
            ("nowhere", "gone"),
        ];
        for (to, name) in links {
            symlink(to, at("two").join(name)).unwrap();
        }
        let found = passages_of(&at("two"), PassageLength::default()).unwrap();
        let expected = ["b.txt".to_owned(), format!("{}c.txt", "d/".repeat(40)), "out/e.txt".to_owned()];
        assert_eq!(names(&found, &at("two")), expected);
        let skipped: Vec<PathBuf> = found.skipped.into_iter().map(|skipped| skipped.path).collect();
        assert_eq!(skipped, [at("two/gone.md")]);
    }
}
