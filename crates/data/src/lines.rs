//! Lines of files, plain or compressed: the only reader of lines here, for corpora, labelled files and texts, one per
//! line.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::DataError;

/// How much was read, for those who watch.
#[derive(Debug, Default)]
pub(crate) struct Meter {
    /// Bytes of files, as they lie on the disk.
    pub(crate) file: AtomicU64,
    /// Bytes of text, as they come out of them.
    pub(crate) text: AtomicU64,
}

/// Opens a file, or standard input where the path is `-`, and looks at its first bytes.
pub(crate) fn open(path: &Path, meter: &Arc<Meter>) -> Result<(BufReader<Counted>, Vec<u8>), DataError> {
    let source: Box<dyn Read> = match path.as_os_str() == "-" {
        true => Box::new(io::stdin()),
        false => Box::new(File::open(path).map_err(DataError::io("open", path))?),
    };
    let mut source = BufReader::with_capacity(1 << 17, Counted { source, meter: Arc::clone(meter) });
    let start = peek(&mut source).map_err(DataError::io("read", path))?;
    Ok((source, start))
}

/// Counts what is read.
pub(crate) struct Counted {
    source: Box<dyn Read>,
    meter: Arc<Meter>,
}

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.source.read(buffer)?;
        self.meter.file.fetch_add(read as u64, Relaxed);
        Ok(read)
    }
}

/// The first bytes of a stream, without taking them.
fn peek(source: &mut BufReader<Counted>) -> io::Result<Vec<u8>> {
    loop {
        match source.fill_buf() {
            Ok(buffer) => return Ok(buffer[..buffer.len().min(4)].to_vec()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Sees by the first bytes whether a stream is compressed; names lie, and standard input has none.
pub(crate) fn decompress(source: BufReader<Counted>, start: &[u8], path: &Path) -> Result<Box<dyn BufRead>, DataError> {
    if start.starts_with(&[0x1f, 0x8b]) {
        return Ok(Box::new(BufReader::with_capacity(1 << 17, flate2::bufread::MultiGzDecoder::new(source))));
    }
    if start == [0x28, 0xb5, 0x2f, 0xfd] {
        let decoder = zstd::Decoder::with_buffer(source).map_err(DataError::io("read", path))?;
        return Ok(Box::new(BufReader::with_capacity(1 << 17, decoder)));
    }
    Ok(Box::new(source))
}

/// Lines of a file or of standard input, of bounded length; decompressed where the first bytes say so, and without a
/// byte order mark.
pub struct Lines {
    /// For messages.
    pub(crate) path: Arc<Path>,
    reader: Box<dyn BufRead>,
    meter: Arc<Meter>,
    buffer: Vec<u8>,
    /// How much of the buffer was given out.
    used: usize,
    /// The number of the last line, from 1, and whether the rest of it is still to come.
    number: u64,
    unfinished: bool,
}

/// A line, or a part of one that is too long.
pub(crate) struct Line<'a> {
    pub(crate) bytes: &'a [u8],
    pub(crate) number: u64,
    /// Whether the line began in the part before.
    pub(crate) continued: bool,
    /// Whether it goes on.
    pub(crate) unfinished: bool,
}

impl Lines {
    /// Opens a file, or standard input where the path is `-`.
    pub fn open(path: &Path) -> Result<Self, DataError> {
        let meter = Arc::new(Meter::default());
        let (source, start) = open(path, &meter)?;
        Self::new(source, &start, path, &meter)
    }

    /// The lines of a source that begins with `start`.
    pub(crate) fn new(
        source: BufReader<Counted>,
        start: &[u8],
        path: &Path,
        meter: &Arc<Meter>,
    ) -> Result<Self, DataError> {
        let path = Path::new(if path.as_os_str() == "-" { "standard input".as_ref() } else { path.as_os_str() });
        let (reader, meter) = (decompress(source, start, path)?, Arc::clone(meter));
        Ok(Self { path: path.into(), reader, meter, buffer: Vec::new(), used: 0, number: 0, unfinished: false })
    }

    /// Whether the text begins with these bytes. To be asked before anything is read.
    pub(crate) fn begins_with(&mut self, bytes: &[u8]) -> Result<bool, DataError> {
        let start = self.reader.fill_buf().map_err(DataError::io("read", &self.path))?;
        Ok(start.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(start).trim_ascii_start().starts_with(bytes))
    }

    /// The text of the next line without its end. An error where it has more than `limit` bytes or is not UTF-8.
    pub fn next_text(&mut self, limit: usize) -> Result<Option<&str>, DataError> {
        let path = Arc::clone(&self.path);
        let Some(Line { bytes, number, unfinished, .. }) = self.next(limit)? else { return Ok(None) };
        if unfinished {
            let problem = format!("it is longer than {} MiB: is this a text with one entry per line?", limit >> 20);
            return Err(bad_row(&path, number, problem));
        }
        text_of(bytes, &path, number).map(Some)
    }

    /// The number of the line that came last, from 1; 0 before the first.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The file and the line that came last.
    pub fn place(&self) -> String {
        format!("{}, line {}", self.path.display(), self.number)
    }

    /// How many bytes of the file were read so far, as they lie on the disk.
    pub fn bytes_read(&self) -> u64 {
        self.meter.file.load(Relaxed)
    }

    /// The next line with its end; one of more than `limit` bytes comes in parts.
    pub(crate) fn next(&mut self, limit: usize) -> Result<Option<Line<'_>>, DataError> {
        // What is left is the rest of a long line.
        self.buffer.drain(..self.used);
        self.used = 0;
        let continued = self.unfinished;
        let room = limit.saturating_sub(self.buffer.len()) as u64 + 1;
        let mut reader = self.reader.by_ref().take(room);
        reader.read_until(b'\n', &mut self.buffer).map_err(DataError::io("read", &self.path))?;
        if self.number == 0 && self.buffer.starts_with(b"\xEF\xBB\xBF") {
            // A byte order mark.
            self.buffer.drain(..3);
        }
        if self.buffer.is_empty() {
            return Ok(None);
        }
        self.number += u64::from(!continued);
        self.unfinished = self.buffer.len() > limit && !self.buffer.ends_with(b"\n");
        self.used = if self.unfinished { end_of_part(&self.buffer) } else { self.buffer.len() };
        self.meter.text.fetch_add(self.used as u64, Relaxed);
        let bytes = &self.buffer[..self.used];
        Ok(Some(Line { bytes, number: self.number, continued, unfinished: self.unfinished }))
    }
}

/// Where a long line is cut: after its last space, or else before its last character.
fn end_of_part(bytes: &[u8]) -> usize {
    let half = bytes.len() / 2;
    if let Some(space) = bytes[half..].iter().rposition(|&byte| byte == b' ') {
        return half + space + 1;
    }
    // A character has up to three bytes after its first; where there are more, it is not UTF-8 anyway.
    let tail = bytes.iter().rev().take(3).take_while(|&&byte| byte & 0b1100_0000 == 0b1000_0000).count();
    (bytes.len() - tail).saturating_sub(1).max(1)
}

/// What is wrong with a line.
pub(crate) fn bad_row(path: &Path, line: u64, problem: impl Into<String>) -> DataError {
    DataError::Row { path: path.to_owned(), line, problem: problem.into() }
}

/// A line's text without its end.
pub(crate) fn text_of<'a>(bytes: &'a [u8], path: &Path, line: u64) -> Result<&'a str, DataError> {
    let text = std::str::from_utf8(bytes).map_err(|error| {
        let byte = error.valid_up_to() + 1;
        bad_row(path, line, format!("byte {byte} is not UTF-8: convert the file first (iconv can)"))
    })?;
    let text = text.strip_suffix('\n').unwrap_or(text);
    Ok(text.strip_suffix('\r').unwrap_or(text))
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn texts(bytes: &[u8], limit: usize) -> (Vec<String>, Option<String>, u64) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.txt");
        std::fs::write(&path, bytes).unwrap();
        let mut lines = Lines::open(&path).unwrap();
        assert_eq!((lines.number(), lines.place()), (0, format!("{}, line 0", path.display())));
        let mut texts = Vec::new();
        let problem = loop {
            match lines.next_text(limit) {
                Ok(Some(text)) => texts.push(text.to_owned()),
                Ok(None) => break None,
                Err(error) => break Some(error.to_string().replace(path.to_str().unwrap(), "a.txt")),
            }
            assert_eq!(lines.number(), texts.len() as u64);
        };
        assert!(lines.bytes_read() == bytes.len() as u64 || problem.is_some());
        (texts, problem, lines.number())
    }

    #[test]
    fn texts_have_no_ends_and_no_byte_order_mark() {
        let expected = ["one", "", " two ", "three"].map(str::to_owned);
        let plain = b"one\n\n two \nthree";
        let windows = b"\xEF\xBB\xBFone\r\n\r\n two \r\nthree\r\n";
        let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gz.write_all(windows).unwrap();
        let zstd = zstd::encode_all(&windows[..], 1).unwrap();
        for bytes in [&plain[..], windows, &gz.finish().unwrap(), &zstd] {
            assert_eq!(texts(bytes, 100), (expected.to_vec(), None, 4));
        }
        assert_eq!(texts(b"", 100), (vec![], None, 0));
        assert_eq!(texts(b"\xEF\xBB\xBF", 100), (vec![], None, 0));
    }

    #[test]
    fn what_is_no_text_is_named() {
        let (texts_before, problem, number) = texts(b"a\nb \xff c\n", 100);
        assert_eq!((texts_before.len(), number), (1, 2));
        assert_eq!(problem.unwrap(), "a.txt, line 2: byte 3 is not UTF-8: convert the file first (iconv can)");
        let (texts_before, problem, number) = texts(&[b"a\n", &[b'b'; 3 << 20][..]].concat(), 2 << 20);
        assert_eq!((texts_before.len(), number), (1, 2));
        assert!(problem.unwrap().starts_with("a.txt, line 2: it is longer than 2 MiB: "));
    }
}
