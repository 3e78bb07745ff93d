//! Test data: vocabularies unpacked into a temporary directory, tokenizers opened from it once.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use henson_text::{BytePairOptions, Tokenizer, WordPieceOptions};
use tempfile::TempDir;

pub(crate) fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

pub(crate) fn unpacked(name: &str) -> Vec<u8> {
    let file = std::fs::File::open(data(&format!("{name}.gz"))).unwrap_or_else(|error| panic!("{name}: {error}"));
    let mut bytes = Vec::new();
    flate2::read::GzDecoder::new(file).read_to_end(&mut bytes).unwrap();
    bytes
}

/// A directory with the given files.
pub(crate) fn directory(files: &[(&str, &[u8])]) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        std::fs::write(directory.path().join(name), bytes).unwrap();
    }
    directory
}

pub(crate) static UNCASED: LazyLock<Tokenizer> = LazyLock::new(|| word_piece("bert-base-uncased.vocab.txt"));
pub(crate) static CASED: LazyLock<Tokenizer> = LazyLock::new(|| word_piece("bert-base-cased.vocab.txt"));
pub(crate) static GPT2: LazyLock<Tokenizer> = LazyLock::new(|| byte_pair("gpt2.vocab.json"));
/// GPT-2 with special strings cut like any text. A static, because copying the vocabulary takes longer than encoding.
pub(crate) static PLAIN_GPT2: LazyLock<Tokenizer> = LazyLock::new(|| GPT2.clone().recognise_special_strings(false));
pub(crate) static ROBERTA: LazyLock<Tokenizer> = LazyLock::new(|| byte_pair("roberta-base.vocab.json"));

fn word_piece(name: &str) -> Tokenizer {
    let directory = directory(&[("vocab.txt", &unpacked(name))]);
    Tokenizer::from_vocab_txt(&directory.path().join("vocab.txt"), &WordPieceOptions::default()).unwrap()
}

fn byte_pair(name: &str) -> Tokenizer {
    let directory = directory(&[("vocab.json", &unpacked(name)), ("merges.txt", &unpacked("byte-pair.merges.txt"))]);
    let (vocabulary, merges) = (directory.path().join("vocab.json"), directory.path().join("merges.txt"));
    Tokenizer::from_byte_pair_files(&vocabulary, &merges, &BytePairOptions::default()).unwrap()
}

/// A WordPiece vocabulary small enough to follow by eye: ids 0 to 4 are special, then words.
pub(crate) const SMALL: &str = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\njim\nhen\n##son\nwas\na\npupp\n##et\n##eer\n.\n";

pub(crate) fn small() -> Tokenizer {
    Tokenizer::from_vocabulary(&SMALL.lines().collect::<Vec<_>>(), &WordPieceOptions::default()).unwrap()
}

/// The error's message, which must hold every one of `parts`: what, where, and what to do next.
#[track_caller]
pub(crate) fn assert_error<T: std::fmt::Debug>(result: Result<T, henson_text::TextError>, parts: &[&str]) {
    let message = result.expect_err("this must fail").to_string();
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in the message {message:?}");
    }
}
