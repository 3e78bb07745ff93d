//! A run's log, `metrics.jsonl`: one JSON object a line, tagged by its `kind`.
//!
//! The log belongs to its checkpoints. [`MetricsLog::open`] cuts back what was logged after the checkpoint that a run
//! resumes from, so that no step stands in it twice, and drops the last line where a kill tore it. Numbers that are not
//! finite are written as `null`, which JSON has, and read back as NaN. Damaged lines are skipped and reported: no training
//! ends because of its log.
//!
//! Deliberately not here: what is shown of it (`report`), and what other programs want (`tensorboard`).

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

use henson_checkpoint::{CheckpointError, open_regular, write_atomic};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The longest line that is read. A real one has some hundred bytes, one with samples a few kB.
const LINE_LIMIT: usize = 16 << 20;

/// The largest log that is read: one of ten million steps has less.
const LOG_LIMIT: u64 = 4 << 30;

/// One line of the log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Line {
    /// What a step, or the mean of some, gave.
    Train(Train),
    /// What held-out data gave.
    Eval(Eval),
    /// What the model fills into texts at this point.
    Samples(Samples),
    /// Something that happened.
    Note(Note),
}

/// What a step, or the mean of some, gave.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Train {
    /// The step, from 1.
    pub step: u64,
    /// The phase of the recipe, from 0.
    #[serde(default)]
    pub phase: u32,
    /// The whole loss.
    #[serde(deserialize_with = "number")]
    pub loss: f64,
    /// Its parts, where they have names, such as `mlm_loss` and `nsp_loss`: keys of the line that end in `_loss`.
    #[serde(flatten, serialize_with = "write_losses", deserialize_with = "read_losses")]
    pub losses: Vec<(String, f64)>,
    /// The learning rate of the step.
    #[serde(deserialize_with = "number")]
    pub learning_rate: f64,
    /// The norm of all gradients before clipping.
    #[serde(deserialize_with = "number")]
    pub gradient_norm: f64,
    /// Tokens a second since the last such line.
    #[serde(deserialize_with = "number")]
    pub tokens_per_s: f64,
    /// Tokens that the run has consumed.
    pub tokens: u64,
    /// Seconds that the run has trained.
    #[serde(deserialize_with = "number")]
    pub seconds: f64,
}

/// What held-out data gave.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Eval {
    /// After how many steps.
    pub step: u64,
    /// By name: `loss`, `perplexity`, `accuracy`, …
    #[serde(deserialize_with = "numbers")]
    pub metrics: BTreeMap<String, f64>,
}

/// What the model fills into texts at this point.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Samples {
    /// After how many steps.
    pub step: u64,
    /// The texts, the same and in the same order all along.
    pub texts: Vec<Sample>,
}

/// One text with its blanks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// The text, with its mask tokens.
    pub text: String,
    /// For each mask the likeliest tokens, the best first.
    pub blanks: Vec<Vec<Prediction>>,
}

/// A token that might fill a blank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Prediction {
    /// The token as people read it.
    pub token: String,
    /// How likely the model finds it.
    #[serde(deserialize_with = "probability")]
    pub probability: f32,
}

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Note {
    /// After how many steps.
    pub step: u64,
    /// What.
    pub text: String,
}

impl Train {
    /// What is drawn of it, by name: the loss, its parts, and what tells how training goes.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = (&str, f64)> {
        let parts = self.losses.iter().map(|(name, loss)| (name.as_str(), *loss));
        let others = [
            ("learning_rate", self.learning_rate),
            ("gradient_norm", self.gradient_norm),
            ("tokens_per_s", self.tokens_per_s),
        ];
        [("loss", self.loss)].into_iter().chain(parts).chain(others)
    }
}

impl Line {
    /// The step that the line belongs to.
    pub fn step(&self) -> u64 {
        match self {
            Self::Train(line) => line.step,
            Self::Eval(line) => line.step,
            Self::Samples(line) => line.step,
            Self::Note(line) => line.step,
        }
    }
}

/// A log, or something that is made from it, could not be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LogError {
    /// The operating system refused to read or write.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// Where.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A log is larger than any real one.
    #[error("{} has more than {limit} bytes, too many for a log: is it the right file?", path.display())]
    TooLarge {
        /// The log.
        path: PathBuf,
        /// The most that is read.
        limit: u64,
    },
    /// A directory is not that of a run.
    #[error(
        "{} holds no run (no metrics.jsonl): give a directory that `henson pretrain --out DIR` wrote to",
        directory.display()
    )]
    NotARun {
        /// The directory.
        directory: PathBuf,
    },
    /// Another file of the run's directory.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
}

impl LogError {
    /// For `map_err` on file operations.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { action, path, source }
    }
}

/// Appends lines to a run's log.
#[derive(Debug)]
pub struct MetricsLog {
    path: PathBuf,
    file: File,
    buffer: Vec<u8>,
    skipped: Vec<String>,
}

/// A log as it was read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Log {
    /// Its lines.
    pub lines: Vec<Line>,
    /// Which lines are damaged and were skipped, for people: each with the file, its number and what is wrong.
    pub skipped: Vec<String>,
}

impl MetricsLog {
    /// Opens the log of a run that resumes from the checkpoint of a step: lines after `keep_through_step` are dropped,
    /// and so are damaged ones and a torn last line. `None` is a run that starts from scratch, which keeps no line: what was killed
    /// before its first checkpoint is logged again. At every moment the old or the new log is there, complete.
    pub fn open(path: impl Into<PathBuf>, keep_through_step: Option<u64>) -> Result<Self, LogError> {
        #[derive(Deserialize)]
        struct Step {
            step: u64,
        }
        let path = path.into();
        let mut skipped = Vec::new();
        match fs::metadata(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(LogError::io("open", &path)(error)),
            Ok(metadata) => {
                // The bytes of the lines that stay, so that a newer henson's fields survive an older one's cut.
                let mut kept = Vec::new();
                if let Some(last) = keep_through_step {
                    skipped = for_each_line::<Step>(&path, |Step { step }, bytes| {
                        if step <= last {
                            kept.extend_from_slice(bytes);
                            kept.push(b'\n');
                        }
                    })?;
                }
                // Lines can only be left out, so the same length is the same log. (A last line that lacks nothing but
                // its end makes it longer.)
                if kept.len() as u64 != metadata.len() {
                    write_atomic(&path, &kept)?;
                }
            }
        }
        let file = File::options().append(true).create(true).open(&path).map_err(LogError::io("open", &path))?;
        Ok(Self { path, file, buffer: Vec::new(), skipped })
    }

    /// Which lines were damaged when it was opened, for people.
    pub fn skipped(&self) -> &[String] {
        &self.skipped
    }

    /// Writes a line, whole, and hands it to the system.
    pub fn append(&mut self, line: &Line) -> Result<(), LogError> {
        self.buffer.clear();
        let written = serde_json::to_writer(&mut self.buffer, line).map_err(std::io::Error::from);
        self.buffer.push(b'\n');
        written.and_then(|()| self.file.write_all(&self.buffer)).map_err(LogError::io("write", &self.path))
    }
}

/// Reads a log. A torn last line, from a kill or of a run that is writing it right now, is left out.
pub fn read(path: &Path) -> Result<Log, LogError> {
    let mut lines = Vec::new();
    let skipped = for_each_line(path, |line, _| lines.push(line))?;
    Ok(Log { lines, skipped })
}

/// Parses each line of a log. The callback also gets the line's bytes, without its end. Returns what is to be said about
/// lines that were skipped.
fn for_each_line<T: serde::de::DeserializeOwned>(
    path: &Path,
    mut each: impl FnMut(T, &[u8]),
) -> Result<Vec<String>, LogError> {
    let io = || LogError::io("read", path);
    let mut reader = BufReader::with_capacity(1 << 16, open_regular(path, "read")?);
    let (mut bytes, mut total, mut number) = (Vec::new(), 0_u64, 0);
    let mut skipped = Skipped { path, messages: Vec::new(), more: 0 };
    loop {
        bytes.clear();
        let limited = &mut reader.by_ref().take(LINE_LIMIT as u64 + 1);
        let mut length = limited.read_until(b'\n', &mut bytes).map_err(io())?;
        if length == 0 {
            return Ok(skipped.finish());
        }
        number += 1;
        let ended = bytes.last() == Some(&b'\n');
        let too_long = length > LINE_LIMIT;
        if too_long && !ended {
            length += reader.skip_until(b'\n').map_err(io())?;
        }
        total += length as u64;
        if total > LOG_LIMIT {
            return Err(LogError::TooLarge { path: path.to_owned(), limit: LOG_LIMIT });
        }
        if too_long {
            skipped.add(number, &format!("longer than {} MiB, too long for a line of a log", LINE_LIMIT >> 20));
            continue;
        }
        if ended {
            bytes.pop();
        }
        let parse = |bytes| {
            let text = std::str::from_utf8(bytes).map_err(|error| format!("{error}"))?;
            serde_json::from_str(text).map_err(|error| format!("{} (column {})", without_place(&error), error.column()))
        };
        match parse(&bytes) {
            Ok(line) => each(line, &bytes),
            // Every line is written with its end: without it, it is the last one, and torn.
            Err(_) if !ended => return Ok(skipped.finish()),
            Err(problem) => skipped.add(number, &problem),
        }
    }
}

/// What is said about damaged lines: some of them one by one, the others by their number.
struct Skipped<'a> {
    path: &'a Path,
    messages: Vec<String>,
    more: usize,
}

impl Skipped<'_> {
    /// Lines that are named one by one.
    const NAMED: usize = 5;

    fn add(&mut self, line: usize, problem: &str) {
        if self.messages.len() < Self::NAMED {
            self.messages.push(format!("{}, line {line}: {problem}; the line is skipped", self.path.display()));
        } else {
            self.more += 1;
        }
    }

    fn finish(mut self) -> Vec<String> {
        if self.more > 0 {
            self.messages.push(format!("{}: {} more damaged lines are skipped", self.path.display(), self.more));
        }
        self.messages
    }
}

/// What `serde_json` says, without its line, which would be that within our line.
fn without_place(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.rsplit_once(" at line ").map_or(text.clone(), |(problem, _)| problem.to_owned())
}

/// Version 0.1 wrote this key into every line, as `null` where there was no such loss.
const ALWAYS: &str = "nsp_loss";

fn write_losses<S: Serializer>(losses: &[(String, f64)], serializer: S) -> Result<S::Ok, S::Error> {
    let mut map = serializer.serialize_map(None)?;
    losses.iter().try_for_each(|(name, loss)| map.serialize_entry(name, loss))?;
    if losses.iter().all(|(name, _)| name != ALWAYS) {
        map.serialize_entry(ALWAYS, &None::<f64>)?;
    }
    map.end()
}

/// The keys that a line has beside those of its fields. What is neither a loss nor a number is a newer henson's.
fn read_losses<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<(String, f64)>, D::Error> {
    let others = BTreeMap::<String, serde_json::Value>::deserialize(deserializer)?;
    let losses = others.into_iter().filter(|(name, _)| name.ends_with("_loss"));
    Ok(losses.filter_map(|(name, loss)| Some((name, loss.as_f64()?))).collect())
}

fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

fn probability<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f32, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f32::NAN))
}

fn numbers<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, f64>, D::Error> {
    let numbers = BTreeMap::<String, Option<f64>>::deserialize(deserializer)?;
    Ok(numbers.into_iter().map(|(name, number)| (name, number.unwrap_or(f64::NAN))).collect())
}
