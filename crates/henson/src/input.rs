//! Where texts come from: arguments, a file or standard input, one a line. Lines are read as they are needed, so that
//! a file may be larger than the memory. What is compressed with gzip or zstd is known by its first bytes.

use std::io::{self, IsTerminal};
use std::path::Path;

use anyhow::Context;

use crate::flags::Texts;
use crate::output::{self, Progress};

/// The longest line that is taken: longer ones are hardly meant, and pieces with their offsets take a hundred times as
/// much memory.
const LONGEST: usize = 8 << 20;

/// Texts that are worked on at a time.
const TOGETHER: usize = 256;

/// Calls `each` with some texts at a time and their numbers, counted from 1: those of their lines in a file. Blank lines are
/// no texts, which is said once at the end; an argument is one whatever it is.
pub(crate) fn for_each(
    texts: &Texts,
    mut each: impl FnMut(&[&str], &[usize]) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    for_each_telling(texts, |texts, numbers, _| each(texts, numbers))
}

/// The same where some texts take long: `each` is given a function that it tells how many of them are done.
pub(crate) fn for_each_telling(
    texts: &Texts,
    mut each: impl FnMut(&[&str], &[usize], &mut dyn FnMut(usize)) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    if !texts.texts.is_empty() {
        let texts: Vec<&str> = texts.texts.iter().map(String::as_str).collect();
        return each(&texts, &(1..=texts.len()).collect::<Vec<_>>(), &mut |_| ());
    }
    let mut lines = Lines::open(texts.file.as_deref())?;
    let mut progress = Progress::new("texts", lines.bytes);
    let (mut done, mut read) = (0, 0);
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
        let new = lines.read() - read;
        let mut told = |some_done: usize| {
            progress.at(read + new * some_done as u64 / texts.len() as u64, done + some_done);
        };
        each(&texts, &numbers, &mut told).with_context(place)?;
        done += some.len();
        read += new;
        progress.at(read, done);
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
    lines: henson_data::Lines,
    /// The number of the last line, counted from 1.
    pub(crate) number: usize,
    /// Bytes of the file, where that is known.
    pub(crate) bytes: Option<u64>,
}

impl Lines {
    /// Standard input where there is no path, or `-`.
    pub(crate) fn open(path: Option<&Path>) -> anyhow::Result<Self> {
        let path = path.unwrap_or(Path::new("-"));
        let stdin = path == Path::new("-");
        if stdin && io::stdin().is_terminal() {
            output::message("reading one text per line from the terminal; end with ctrl-D");
        }
        let name = if stdin { "standard input".to_owned() } else { path.display().to_string() };
        let file = path.metadata().ok().filter(|file| !stdin && file.is_file());
        let lines = henson_data::Lines::open(path)?;
        Ok(Self { name, lines, number: 0, bytes: file.map(|file| file.len()) })
    }

    /// Bytes taken from the file so far.
    pub(crate) fn read(&self) -> u64 {
        self.lines.bytes_read()
    }

    /// The next line without its end; none after the last.
    pub(crate) fn next_line(&mut self) -> anyhow::Result<Option<String>> {
        let line = self.lines.next_text(LONGEST)?.map(str::to_owned);
        self.number = self.lines.number() as usize;
        Ok(line)
    }
}
