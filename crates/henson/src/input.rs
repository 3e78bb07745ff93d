//! Where texts come from: arguments, a file or standard input, one a line. Lines are read as they are needed, so that
//! a file may be larger than the memory. What is compressed with gzip or zstd is known by its first bytes.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, BufRead, BufReader, IsTerminal, Read};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use anyhow::Context;
use flate2::bufread::MultiGzDecoder;

use crate::flags::Texts;
use crate::output::{self, Progress};

/// The longest line that is taken: longer ones are hardly meant, and pieces with their offsets take a hundred times as
/// much memory.
const LONGEST: u64 = 8 << 20;

/// Texts that are worked on at a time.
const TOGETHER: usize = 256;

/// Calls `each` with some texts at a time and their numbers, counted from 1: those of their lines in a file. Blank lines are
/// no texts, which is said once at the end; an argument is one whatever it is.
pub(crate) fn for_each(
    texts: &Texts,
    mut each: impl FnMut(&[&str], &[usize]) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    if !texts.texts.is_empty() {
        let texts: Vec<&str> = texts.texts.iter().map(String::as_str).collect();
        return each(&texts, &(1..=texts.len()).collect::<Vec<_>>());
    }
    let mut lines = Lines::open(texts.file.as_deref())?;
    let mut progress = Progress::new("texts", lines.bytes);
    let mut done = 0;
    loop {
        let (mut some, mut numbers) = (Vec::with_capacity(TOGETHER), Vec::with_capacity(TOGETHER));
        while some.len() < TOGETHER {
            match lines.next_line()? {
                Some(line) if line.trim().is_empty() => {}
                Some(line) => {
                    some.push(line);
                    numbers.push(lines.number);
                }
                None => break,
            }
        }
        let Some(first) = numbers.first() else { break };
        let texts: Vec<&str> = some.iter().map(String::as_str).collect();
        // A text's own number is in the message; this names where it stands.
        let place = || format!("in {}, texts from line {first}", lines.name);
        each(&texts, &numbers).with_context(place)?;
        done += some.len();
        progress.at(lines.read(), done);
    }
    progress.finish();
    anyhow::ensure!(done > 0, "{} has no text: expected one per line", lines.name);
    match lines.number - done {
        0 => {}
        1 => output::warn(&format!("a blank line of {} was skipped", lines.name)),
        blank => output::warn(&format!("{blank} blank lines of {} were skipped", lines.name)),
    }
    Ok(())
}

/// Lines of UTF-8.
pub(crate) struct Lines {
    pub(crate) name: String,
    reader: Box<dyn BufRead>,
    /// The number of the last line, counted from 1.
    pub(crate) number: usize,
    /// Bytes taken from the file so far.
    read: Rc<Cell<u64>>,
    /// Bytes of the file, where that is known.
    pub(crate) bytes: Option<u64>,
}

/// Counts what goes through: progress is measured where the size is known, before anything is decompressed.
struct Counted {
    inner: Box<dyn Read>,
    read: Rc<Cell<u64>>,
}

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.inner.read(buffer)?;
        self.read.set(self.read.get() + length as u64);
        Ok(length)
    }
}

impl Lines {
    /// Standard input where there is no path, or `-`.
    pub(crate) fn open(path: Option<&Path>) -> anyhow::Result<Self> {
        let stdin = PathBuf::from("-");
        let path = path.unwrap_or(&stdin);
        let (name, inner, bytes): (_, Box<dyn Read>, _) = if path == stdin {
            if io::stdin().is_terminal() {
                output::message("reading one text per line from the terminal; end with ctrl-D");
            }
            ("standard input".to_owned(), Box::new(io::stdin()), None)
        } else {
            let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
            let bytes = file.metadata().ok().filter(|m| m.is_file()).map(|m| m.len());
            (path.display().to_string(), Box::new(file), bytes)
        };
        let read = Rc::new(Cell::new(0));
        let counted = Counted { inner, read: Rc::clone(&read) };
        let reader = decompressed(BufReader::with_capacity(1 << 16, counted));
        let reader = reader.with_context(|| format!("cannot read {name}"))?;
        Ok(Self { name, reader, number: 0, read, bytes })
    }

    /// Bytes taken from the file so far.
    pub(crate) fn read(&self) -> u64 {
        self.read.get()
    }

    /// The next line without its end; none after the last.
    pub(crate) fn next_line(&mut self) -> anyhow::Result<Option<String>> {
        let mut line = Vec::new();
        let mut limited = Read::take(&mut self.reader, LONGEST + 1);
        let length = limited.read_until(b'\n', &mut line).with_context(|| format!("cannot read {}", self.name))?;
        if length == 0 {
            return Ok(None);
        }
        self.number += 1;
        anyhow::ensure!(
            line.len() as u64 <= LONGEST,
            "{}, line {}: longer than {} MiB; is this a text with one entry per line?",
            self.name,
            self.number,
            LONGEST >> 20
        );
        while line.last().is_some_and(|byte| matches!(byte, b'\n' | b'\r')) {
            line.pop();
        }
        let text = String::from_utf8(line).map_err(|error| {
            let byte = error.utf8_error().valid_up_to() + 1;
            anyhow::anyhow!(
                "{}, line {}, byte {byte}: not UTF-8; convert the file first (iconv can)",
                self.name,
                self.number
            )
        })?;
        Ok(Some(text))
    }
}

fn decompressed<R: Read + 'static>(mut reader: BufReader<R>) -> io::Result<Box<dyn BufRead>> {
    Ok(match reader.fill_buf()? {
        [0x1f, 0x8b, ..] => Box::new(BufReader::with_capacity(1 << 16, MultiGzDecoder::new(reader))),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => {
            Box::new(BufReader::with_capacity(1 << 16, zstd::Decoder::with_buffer(reader)?))
        }
        _ => Box::new(reader),
    })
}
