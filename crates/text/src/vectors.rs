//! Files of word vectors: GloVe's text (a word and its numbers on each line) and word2vec's text and binary forms (the same behind a
//! line with the number of words and of columns). Read once, from front to back, and only what is asked for is kept: such files
//! are sorted by frequency and often far larger than a vocabulary.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use crate::error::TextError;
use crate::guard::check_regular;

/// The most columns. Published vectors have up to 1,024.
const MOST_COLUMNS: usize = 4096;

/// The longest word in bytes; longer ones are skipped in a text, and an error in a binary file, where the rest could not be found.
const LONGEST_WORD: usize = 1 << 12;

/// The longest line, with some room for numbers with many digits.
const LONGEST_LINE: usize = LONGEST_WORD + MOST_COLUMNS * 48;

/// Vectors of words.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct WordVectors {
    /// Columns.
    pub width: usize,
    /// The words that were kept, in the file's order.
    pub words: Vec<String>,
    /// Their vectors, one after the other.
    pub numbers: Vec<f32>,
    /// Words that were passed by because they are not UTF-8 or too long.
    pub skipped: usize,
}

impl WordVectors {
    /// Reads a file and keeps the words that `wants` says yes to; it gets a word and how many came before it.
    pub fn read(path: &Path, wants: &mut dyn FnMut(&str, usize) -> bool) -> Result<Self, TextError> {
        let io = |source| TextError::Io { action: "read", path: path.to_owned(), source };
        check_regular(path).map_err(io)?;
        Self::from_reader(BufReader::new(std::fs::File::open(path).map_err(io)?), path, wants)
    }

    /// The same from any reader; `path` is for messages.
    pub fn from_reader(
        reader: impl BufRead,
        path: &Path,
        wants: &mut dyn FnMut(&str, usize) -> bool,
    ) -> Result<Self, TextError> {
        let mut file = File { reader, path, line: 0, buffer: Vec::new() };
        let mut vectors = Self::default();
        if !file.next_line()? {
            return Err(file.malformed("a word and its vector, or the number of words and of columns", "an empty file"));
        }
        let header = file.header()?;
        if let Some((words, width)) = header {
            vectors.width = width;
            if words > 0 && file.is_binary(width)? {
                return file.read_binary(words, vectors, wants);
            }
        } else {
            vectors.width = file.first_width()?;
            file.add_line(&mut vectors, wants)?;
        }
        while file.next_line()? {
            if !file.buffer.is_empty() {
                file.add_line(&mut vectors, wants)?;
            }
        }
        Ok(vectors)
    }

    /// The vector of a kept word, by its number.
    pub fn vector(&self, word: usize) -> &[f32] {
        &self.numbers[word * self.width..(word + 1) * self.width]
    }
}

/// A file that is being read.
struct File<'a, R> {
    reader: R,
    path: &'a Path,
    /// The number of the line in the buffer, from 1.
    line: usize,
    /// A line without its end.
    buffer: Vec<u8>,
}

impl<R: BufRead> File<'_, R> {
    fn malformed(&self, expected: &str, got: impl Into<String>) -> TextError {
        let place = format!("line {}", self.line.max(1));
        TextError::Malformed { path: self.path.to_owned(), place, expected: expected.to_owned(), got: got.into() }
    }

    fn io(&self, source: std::io::Error) -> TextError {
        TextError::Io { action: "read", path: self.path.to_owned(), source }
    }

    /// Reads up to a byte, or so many bytes; false at the end of the file.
    fn read_until(&mut self, end: u8, most: usize) -> Result<bool, TextError> {
        self.buffer.clear();
        let taken = Read::take(&mut self.reader, most as u64 + 1).read_until(end, &mut self.buffer);
        Ok(taken.map_err(|error| self.io(error))? > 0)
    }

    fn next_line(&mut self) -> Result<bool, TextError> {
        let found = self.read_until(b'\n', LONGEST_LINE)?;
        self.line += 1;
        if self.buffer.len() > LONGEST_LINE {
            let expected = format!("a line of at most {LONGEST_LINE} bytes");
            return Err(self.malformed(&expected, "a longer one: is this a file of word vectors?"));
        }
        while matches!(self.buffer.last(), Some(b'\n' | b'\r' | b' ' | b'\t')) {
            self.buffer.pop();
        }
        Ok(found)
    }

    /// The number of words and of columns, if that is what the first line says.
    fn header(&self) -> Result<Option<(usize, usize)>, TextError> {
        let Ok(line) = std::str::from_utf8(&self.buffer) else { return Ok(None) };
        let numbers: Vec<Option<usize>> = line.split_ascii_whitespace().map(|field| field.parse().ok()).collect();
        let [Some(words), Some(width)] = numbers[..] else { return Ok(None) };
        if width == 0 || width > MOST_COLUMNS {
            return Err(self.malformed(&format!("1 to {MOST_COLUMNS} columns"), width.to_string()));
        }
        Ok(Some((words, width)))
    }

    /// Columns of a file without a header, by its first line. The word may have spaces, so the numbers are counted from the end.
    fn first_width(&self) -> Result<usize, TextError> {
        let line = String::from_utf8_lossy(&self.buffer);
        let fields: Vec<&str> = line.split([' ', '\t']).filter(|field| !field.is_empty()).collect();
        let numbers = fields.iter().skip(1).rev().take_while(|field| field.parse::<f32>().is_ok()).count();
        match numbers {
            1..=MOST_COLUMNS => Ok(numbers),
            0 => Err(self.malformed("a word and its vector, such as `the 0.418 0.24968 …`", shown(&line))),
            _ => Err(self.malformed(&format!("at most {MOST_COLUMNS} columns"), numbers.to_string())),
        }
    }

    /// Whether what follows the header is no line of text with a word and its numbers. Only what the reader holds already is looked
    /// at, which is more than a word and its first numbers.
    fn is_binary(&mut self, width: usize) -> Result<bool, TextError> {
        let path = self.path;
        let ahead = self.reader.fill_buf().map_err(|source| {
            let path = path.to_owned();
            TextError::Io { action: "read", path, source }
        })?;
        let line = ahead.split(|byte| *byte == b'\n').next().unwrap_or_default();
        let Some(space) = line.iter().position(|byte| *byte == b' ' || *byte == b'\t') else { return Ok(true) };
        let Ok(rest) = std::str::from_utf8(&line[space..]) else { return Ok(true) };
        let mut fields: Vec<&str> = rest.split_ascii_whitespace().collect();
        // The last one may go on behind what was looked at.
        if line.len() == ahead.len() {
            fields.pop();
        }
        // A word with spaces has fields that are no numbers; its last ones are.
        let numbers = fields.iter().rev().take_while(|field| field.parse::<f32>().is_ok()).count();
        Ok(numbers == 0 || (line.len() < ahead.len() && numbers < width))
    }

    /// Adds the word of a line, if it is wanted.
    fn add_line(
        &mut self,
        vectors: &mut WordVectors,
        wants: &mut dyn FnMut(&str, usize) -> bool,
    ) -> Result<(), TextError> {
        let width = vectors.width;
        // The numbers stand at the end: words may hold spaces.
        let mut end = self.buffer.len();
        let mut starts = Vec::with_capacity(width);
        for _ in 0..width {
            let space = self.buffer[..end].iter().rposition(|byte| matches!(byte, b' ' | b'\t'));
            let Some(space) = space.filter(|space| *space > 0) else {
                let line = String::from_utf8_lossy(&self.buffer).into_owned();
                return Err(self.malformed(&format!("a word and {width} numbers"), shown(&line)));
            };
            starts.push((space + 1, end));
            end = space;
            while end > 0 && matches!(self.buffer[end - 1], b' ' | b'\t') {
                end -= 1;
            }
        }
        let word = match std::str::from_utf8(&self.buffer[..end]) {
            Ok(word) if word.len() <= LONGEST_WORD => word,
            _ => {
                vectors.skipped += 1;
                return Ok(());
            }
        };
        if !wants(word, self.line.saturating_sub(1)) {
            return Ok(());
        }
        for (start, end) in starts.into_iter().rev() {
            let field = String::from_utf8_lossy(&self.buffer[start..end]);
            match field.parse::<f32>() {
                Ok(number) if number.is_finite() => vectors.numbers.push(number),
                _ => return Err(self.malformed("a number", shown(&field))),
            }
        }
        vectors.words.push(word.to_owned());
        Ok(())
    }

    /// Words up to a space, then their numbers as f32; some writers put a line end behind each.
    fn read_binary(
        mut self,
        words: usize,
        mut vectors: WordVectors,
        wants: &mut dyn FnMut(&str, usize) -> bool,
    ) -> Result<WordVectors, TextError> {
        let mut bytes = vec![0; vectors.width * 4];
        for number in 0..words {
            self.line = number + 1;
            let cut = |file: &Self, got: &str| {
                let place = format!("word {} of {words}", number + 1);
                let expected = format!("a word, a space and {} bytes of numbers", vectors.width * 4);
                TextError::Malformed { path: file.path.to_owned(), place, expected, got: got.to_owned() }
            };
            if !self.read_until(b' ', LONGEST_WORD)? {
                return Err(cut(&self, "the file's end"));
            }
            if self.buffer.pop() != Some(b' ') {
                let got = if self.buffer.len() < LONGEST_WORD { "the file's end" } else { "a word without an end" };
                return Err(cut(&self, got));
            }
            if let Err(error) = self.reader.read_exact(&mut bytes) {
                return Err(match error.kind() {
                    std::io::ErrorKind::UnexpectedEof => cut(&self, "the file's end"),
                    _ => self.io(error),
                });
            }
            let start = self.buffer.iter().take_while(|byte| matches!(byte, b'\n' | b'\r')).count();
            let Ok(word) = std::str::from_utf8(&self.buffer[start..]) else {
                vectors.skipped += 1;
                continue;
            };
            if word.is_empty() || !wants(word, number) {
                continue;
            }
            let row = bytes.chunks_exact(4).map(|four| f32::from_le_bytes([four[0], four[1], four[2], four[3]]));
            if row.clone().any(|number| !number.is_finite()) {
                return Err(cut(&self, "a number that is not finite"));
            }
            vectors.numbers.extend(row);
            vectors.words.push(word.to_owned());
        }
        Ok(vectors)
    }
}

/// The beginning of a line, for messages.
fn shown(line: &str) -> String {
    let start: String = line.chars().take(60).collect();
    if start.len() < line.len() { format!("{start:?}…") } else { format!("{start:?}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(bytes: &[u8]) -> Result<WordVectors, String> {
        let read = WordVectors::from_reader(bytes, Path::new("v"), &mut |_, _| true);
        read.map_err(|error| error.to_string())
    }

    fn binary(words: &[(&[u8], [f32; 2])], line_ends: bool) -> Vec<u8> {
        let mut bytes = format!("{} 2\n", words.len()).into_bytes();
        for (word, numbers) in words {
            bytes.extend_from_slice(word);
            bytes.push(b' ');
            bytes.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
            if line_ends {
                bytes.push(b'\n');
            }
        }
        bytes
    }

    #[test]
    fn the_three_forms_say_the_same() {
        let expected = WordVectors {
            width: 2,
            words: vec!["the".to_owned(), "caf\u{e9}".to_owned()],
            numbers: vec![0.5, -1.0, 2.0, 0.25],
            skipped: 0,
        };
        let glove = "the 0.5 -1\ncaf\u{e9} 2e0 0.25\n";
        assert_eq!(all(glove.as_bytes()).unwrap(), expected);
        assert_eq!(all(format!("2 2\r\n{}", glove.replace('\n', " \r\n")).as_bytes()).unwrap(), expected);
        for line_ends in [false, true] {
            let words: [(&[u8], _); 2] = [(b"the", [0.5, -1.0]), ("caf\u{e9}".as_bytes(), [2.0, 0.25])];
            assert_eq!(all(&binary(&words, line_ends)).unwrap(), expected, "{line_ends}");
        }
        assert_eq!(expected.vector(1), [2.0, 0.25]);
    }

    #[test]
    fn words_that_are_not_wanted_or_not_readable_are_left_out() {
        // A word with spaces, as in GloVe's largest file, and one that is not UTF-8.
        let text = b"a b 1 2 3\n. . . 4 5 6\n\xff 7 8 9\nd 1 1 1\n".to_vec();
        let mut seen = Vec::new();
        let vectors = WordVectors::from_reader(&text[..], Path::new("v"), &mut |word, number| {
            seen.push((word.to_owned(), number));
            word != "d"
        });
        let vectors = vectors.unwrap();
        assert_eq!((vectors.words, vectors.skipped, vectors.width), (vec!["a b".into(), ". . .".into()], 1, 3));
        assert_eq!(seen.last(), Some(&("d".to_owned(), 3)));
        let words: [(&[u8], _); 2] = [(b"\xff", [1.0, 1.0]), (b"d", [3.0, 4.0])];
        let vectors = all(&binary(&words, true)).unwrap();
        assert_eq!((vectors.words, vectors.skipped), (vec!["d".to_owned()], 1));
    }

    #[test]
    fn broken_files_are_errors_with_their_place() {
        let mut cut = binary(&[(b"the", [0.5, -1.0]), (b"of", [1.0, 2.0])], true);
        cut.truncate(cut.len() - 3);
        let wide = format!("1 {}\nthe 1\n", MOST_COLUMNS + 1);
        let infinite = binary(&[(b"the", [f32::NAN, 1.0])], false);
        let mut endless = b"3 2\n".to_vec();
        endless.resize(LONGEST_WORD + 10, b'x');
        let cases: [(&[u8], &str); 9] = [
            (b"", "v: line 1: expected a word and its vector"),
            (b"\n", "line 1: expected a word and its vector"),
            (b"the cat sat\n", "line 1: expected a word and its vector"),
            (b"the 1 2\nof 1\n", "line 2: expected a word and 2 numbers, got \"of 1\""),
            (b"the 1 2\nof 1 inf\n", "line 2: expected a number, got \"inf\""),
            (wide.as_bytes(), "line 1: expected 1 to 4096 columns, got 4097"),
            (&cut, "word 2 of 2: expected a word, a space and 8 bytes of numbers, got the file's end"),
            (
                &infinite,
                "word 1 of 1: expected a word, a space and 8 bytes of numbers, got a number that is not finite",
            ),
            (&endless, "word 1 of 3"),
        ];
        for (bytes, expected) in cases {
            let error = all(bytes).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }

    /// What is cut off, changed or repeated anywhere is read or refused, and never more than the file has.
    #[test]
    fn changed_files_do_not_panic() {
        let text = b"3 2\nthe 0.5 -1\nof 1 2\nand 3 4\n".to_vec();
        let words: [(&[u8], _); 2] = [(b"the", [0.5, -1.0]), (b"of", [1.0, 2.0])];
        for original in [text[4..].to_vec(), text, binary(&words, true)] {
            for at in 0..original.len() {
                let _ = all(&original[..at]);
                for byte in [0, b' ', b'\n', b'9', 0xff] {
                    let mut changed = original.clone();
                    changed[at] = byte;
                    if let Ok(vectors) = all(&changed) {
                        assert_eq!(vectors.numbers.len(), vectors.words.len() * vectors.width);
                    }
                }
            }
        }
    }
}
