//! Event files for TensorBoard: numbers and texts by tag and step.
//!
//! A file is a sequence of records (length, its checksum, data, its checksum), each with one `Event` of TensorFlow's
//! `event.proto`. Only what those few messages need of protocol buffers is written here, and nothing is read. The truth
//! about a run is its `metrics.jsonl`: an event file is a copy for other people's tools.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::metrics::{Line, LogError, Samples};

const PREFIX: &str = "events.out.tfevents.";

/// Writes one event file.
#[derive(Debug)]
pub struct EventWriter {
    path: PathBuf,
    out: BufWriter<File>,
    event: Vec<u8>,
}

impl EventWriter {
    /// Begins a file in `directory`, which is made if it is not there, for a run that resumes from the checkpoint of a
    /// step, or starts from scratch (`None`). TensorBoard then forgets what older files there say about later steps, or all.
    pub fn create(
        directory: &Path,
        start_time: SystemTime,
        checkpoint: impl Into<Option<u64>>,
    ) -> Result<Self, LogError> {
        let io = || LogError::io("create", directory);
        fs::create_dir_all(directory).map_err(io())?;
        // TensorBoard reads the files in the order of their names and never goes back: the new name must be the last,
        // even where the clock was set back, or where two files begin within a second.
        let (mut time, mut files) = (seconds(start_time) as u64, 0);
        for entry in fs::read_dir(directory).map_err(io())? {
            let name = entry.map_err(io())?.file_name();
            if let Some(rest) = name.to_str().and_then(|name| name.strip_prefix(PREFIX)) {
                files += 1;
                time = time.max(rest.split('.').next().and_then(|time| time.parse().ok()).unwrap_or(0));
            }
        }
        let path = directory.join(format!("{PREFIX}{time:010}.{files:06}.henson"));
        let file = File::create_new(&path).map_err(LogError::io("create", &path))?;
        let mut writer = Self { path, out: BufWriter::new(file), event: Vec::new() };
        writer.begin(start_time, 0);
        bytes_field(&mut writer.event, field::EVENT_FILE_VERSION, b"brain.Event:2");
        writer.record()?;
        // A session that starts: what was logged for its step or a later one is void. The checkpoint's own step is not.
        writer.begin(start_time, checkpoint.into().map_or(0, |step| step.saturating_add(1)));
        message_field(&mut writer.event, field::EVENT_SESSION_LOG, |log| varint_field(log, field::STATUS, 1));
        writer.record()?;
        writer.flush()?;
        Ok(writer)
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes all that a line of the log says, numbers as `train/…` and `eval/…`, samples and notes as texts, and hands
    /// it to the system.
    pub fn log(&mut self, line: &Line, time: SystemTime) -> Result<(), LogError> {
        match line {
            Line::Train(train) => {
                for (name, number) in train.numbers() {
                    self.scalar(&format!("train/{name}"), train.step, time, number)?;
                }
            }
            Line::Eval(eval) => {
                for (name, number) in &eval.metrics {
                    self.scalar(&format!("eval/{name}"), eval.step, time, *number)?;
                }
            }
            Line::Samples(samples) => self.text("samples", samples.step, time, &as_markdown(samples))?,
            Line::Note(note) => self.text("notes", note.step, time, &plain(&note.text))?,
        }
        self.flush()
    }

    /// Writes a number.
    pub fn scalar(&mut self, tag: &str, step: u64, time: SystemTime, value: f64) -> Result<(), LogError> {
        self.summary(tag, step, time, |summary| {
            // Event files hold single precision.
            tag_and_type(summary, field::SIMPLE_VALUE, wire::FOUR_BYTES);
            summary.extend_from_slice(&(value as f32).to_le_bytes());
        })
    }

    /// Writes a text, which TensorBoard shows as Markdown.
    pub fn text(&mut self, tag: &str, step: u64, time: SystemTime, text: &str) -> Result<(), LogError> {
        self.summary(tag, step, time, |summary| {
            message_field(summary, field::TENSOR, |tensor| {
                varint_field(tensor, field::DTYPE, 7); // DT_STRING
                message_field(tensor, field::SHAPE, |_| ()); // no dimensions: one text
                bytes_field(tensor, field::STRING_VALUE, text.as_bytes());
            });
            message_field(summary, field::METADATA, |metadata| {
                message_field(metadata, field::PLUGIN_DATA, |plugin| bytes_field(plugin, field::PLUGIN_NAME, b"text"));
                varint_field(metadata, field::DATA_CLASS, 2); // DATA_CLASS_TENSOR
            });
        })
    }

    /// Hands everything written so far to the system.
    pub fn flush(&mut self) -> Result<(), LogError> {
        self.out.flush().map_err(LogError::io("write", &self.path))
    }

    /// An event with one value of a summary.
    fn summary(
        &mut self,
        tag: &str,
        step: u64,
        time: SystemTime,
        value: impl FnOnce(&mut Vec<u8>),
    ) -> Result<(), LogError> {
        self.begin(time, step);
        message_field(&mut self.event, field::EVENT_SUMMARY, |summary| {
            message_field(summary, field::VALUE, |summary| {
                bytes_field(summary, field::TAG, tag.as_bytes());
                value(summary);
            });
        });
        self.record()
    }

    /// The beginning of every event.
    fn begin(&mut self, time: SystemTime, step: u64) {
        self.event.clear();
        tag_and_type(&mut self.event, field::EVENT_WALL_TIME, wire::EIGHT_BYTES);
        self.event.extend_from_slice(&seconds(time).to_le_bytes());
        if step > 0 {
            varint_field(&mut self.event, field::EVENT_STEP, step);
        }
    }

    /// Writes the event as a record.
    fn record(&mut self) -> Result<(), LogError> {
        let length = (self.event.len() as u64).to_le_bytes();
        let parts = [&length[..], &checksum(&length), &self.event, &checksum(&self.event)];
        parts.iter().try_for_each(|part| self.out.write_all(part)).map_err(LogError::io("write", &self.path))
    }
}

/// One table for all texts: the blanks and what fills them.
fn as_markdown(samples: &Samples) -> String {
    let mut out = String::from("| text | blank | predictions |\n|---|---|---|\n");
    for sample in &samples.texts {
        for (i, blank) in sample.blanks.iter().enumerate() {
            let words = blank.iter().map(|p| format!("{} {:.1}%", plain(&p.token), 100.0 * p.probability));
            let words: Vec<String> = words.collect();
            let _ = writeln!(out, "| {} | {} | {} |", plain(&sample.text), i + 1, words.join(", "));
        }
    }
    out
}

/// A text is data, not Markdown: each sign that means something there is made to stand for itself.
fn plain(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            c if "\\`*_{}[]()>#+-.!|".contains(c) => out.extend(['\\', c]),
            c if c.is_control() => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

/// Seconds since 1970, as TensorBoard counts; clocks before that are taken for it.
fn seconds(time: SystemTime) -> f64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// The numbers of fields in `event.proto`, `summary.proto`, `tensor.proto`.
mod field {
    pub(super) const EVENT_WALL_TIME: u64 = 1;
    pub(super) const EVENT_STEP: u64 = 2;
    pub(super) const EVENT_FILE_VERSION: u64 = 3;
    pub(super) const EVENT_SUMMARY: u64 = 5;
    pub(super) const EVENT_SESSION_LOG: u64 = 7;
    pub(super) const STATUS: u64 = 1;
    pub(super) const VALUE: u64 = 1;
    pub(super) const TAG: u64 = 1;
    pub(super) const SIMPLE_VALUE: u64 = 2;
    pub(super) const TENSOR: u64 = 8;
    pub(super) const METADATA: u64 = 9;
    pub(super) const PLUGIN_DATA: u64 = 1;
    pub(super) const PLUGIN_NAME: u64 = 1;
    pub(super) const DATA_CLASS: u64 = 4;
    pub(super) const DTYPE: u64 = 1;
    pub(super) const SHAPE: u64 = 2;
    pub(super) const STRING_VALUE: u64 = 8;
}

/// How a field of a protocol buffer is stored.
mod wire {
    pub(super) const VARINT: u64 = 0;
    pub(super) const EIGHT_BYTES: u64 = 1;
    pub(super) const LENGTH: u64 = 2;
    pub(super) const FOUR_BYTES: u64 = 5;
}

fn varint(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

fn tag_and_type(out: &mut Vec<u8>, field: u64, wire: u64) {
    varint(out, field << 3 | wire);
}

fn varint_field(out: &mut Vec<u8>, field: u64, number: u64) {
    tag_and_type(out, field, wire::VARINT);
    varint(out, number);
}

fn bytes_field(out: &mut Vec<u8>, field: u64, bytes: &[u8]) {
    tag_and_type(out, field, wire::LENGTH);
    varint(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

fn message_field(out: &mut Vec<u8>, field: u64, fill: impl FnOnce(&mut Vec<u8>)) {
    let mut message = Vec::new();
    fill(&mut message);
    bytes_field(out, field, &message);
}

/// CRC-32C, rotated and shifted: checksums of data that holds checksums would be weak otherwise.
fn checksum(bytes: &[u8]) -> [u8; 4] {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}

/// CRC with Castagnoli's polynomial, lowest bit first.
fn crc32c(bytes: &[u8]) -> u32 {
    const TABLE: [u32; 256] = {
        let mut table = [0; 256];
        let mut i = 0;
        while i < 256 {
            let (mut crc, mut bit) = (i as u32, 0);
            while bit < 8 {
                crc = if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
                bit += 1;
            }
            table[i] = crc;
            i += 1;
        }
        table
    };
    !bytes.iter().fold(!0, |crc, byte| crc >> 8 ^ TABLE[(crc as u8 ^ byte) as usize])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The vectors of RFC 3720, B.4, and the usual one.
    #[test]
    fn crc32c_of_known_bytes() {
        let ascending: Vec<u8> = (0..32).collect();
        let descending: Vec<u8> = (0..32).rev().collect();
        let vectors: [(&[u8], u32); 6] = [
            (b"", 0),
            (b"123456789", 0xe306_9283),
            (&[0; 32], 0x8a91_36aa),
            (&[0xff; 32], 0x62a8_ab43),
            (&ascending, 0x46dd_794e),
            (&descending, 0x113f_db5c),
        ];
        for (bytes, expected) in vectors {
            assert_eq!(crc32c(bytes), expected, "{bytes:?}");
        }
    }
}
