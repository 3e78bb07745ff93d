//! What can go wrong with data. Each message says which file and place, what was expected and found, and what to do
//! next; the binary only adds the chain of causes.

use std::path::{Path, PathBuf};

use henson_text::TextError;

/// Every error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// The operating system refused to read or write.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// What was tried, such as `read`.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },

    /// The tokenizer's files cannot be read or written.
    #[error("the tokenizer cannot be used")]
    Tokenizer(#[from] TextError),

    /// A vocabulary lacks a piece that every instance needs.
    #[error(
        "the tokenizer has no {role}: pre-training puts one around every sequence; name one in its tokenizer_config.json, \
         or train a tokenizer that has it (henson tokenizer train)"
    )]
    MissingSpecial {
        /// The role, such as `cls_token`.
        role: &'static str,
    },

    /// Spans need more sentinels than the vocabulary has.
    #[error(
        "span corruption needs {needed} sentinels (<extra_id_0>, <extra_id_1>, …) and the corpus' tokenizer has {found}: train one \
         with `henson tokenizer train --specials t5 --sentinels {needed}` or more and build the corpus with it, or use shorter sequences"
    )]
    TooFewSentinels {
        /// Spans of the longest sequence.
        needed: usize,
        /// Sentinels of the vocabulary.
        found: usize,
    },

    /// A directory is not a corpus.
    #[error(
        "{} is not a corpus: it has no corpus.json; give the directory that `henson data build` wrote",
        directory.display()
    )]
    NotACorpus {
        /// The directory that was given.
        directory: PathBuf,
    },

    /// A corpus of a version that this henson does not know.
    #[error(
        "{} has version {found}, this henson reads version {supported}: build the corpus again, or use a newer henson",
        path.display()
    )]
    Version {
        /// The file.
        path: PathBuf,
        /// The version it has.
        found: u32,
        /// The version that is read.
        supported: u32,
    },

    /// A file of a corpus is not as it was written.
    #[error("{} is damaged: {problem}; copy it again, or build the corpus again", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },

    /// A file of a corpus is shorter than it was when it was opened.
    #[error(
        "{} was changed or truncated while it was being read: leave the corpus alone while it is in use; copy the file \
         again, or build the corpus again",
        path.display()
    )]
    Changed {
        /// The file.
        path: PathBuf,
    },

    /// A setting of instances or batches that makes no sense.
    #[error("{name} = {value}: {problem}")]
    InstanceSetting {
        /// Its name in recipes.
        name: &'static str,
        /// What was given.
        value: String,
        /// What is wrong with it.
        problem: String,
    },

    /// A vocabulary without a piece to hide others behind.
    #[error(
        "the tokenizer has no mask_token, which masked tokens are replaced with: name one in its tokenizer_config.json, \
         or use objective = \"causal\""
    )]
    NoMask,

    /// A vocabulary of special pieces only.
    #[error("the vocabulary has only special tokens: train a tokenizer on text (henson tokenizer train)")]
    NoPieces,

    /// A template of another tokenizer than the corpus was built with.
    #[error(
        "the tokenizer's template inserts the token {id}, and the corpus was built with a vocabulary of {size} tokens: \
         expected the tokenizer that the corpus was built with"
    )]
    ForeignTemplate {
        /// The token.
        id: u32,
        /// How many tokens the corpus knows.
        size: u32,
    },

    /// A corpus that has too few documents for what is to be learnt.
    #[error(
        "the corpus has {documents} documents with text and a weight above 0, {needed} are needed (random next sentences \
         come from another document): build it with blank lines between documents, or use objective = \"mlm\""
    )]
    TooFewDocuments {
        /// How many it has.
        documents: usize,
        /// How many it takes.
        needed: usize,
    },

    /// Fractional weights left too little of a corpus.
    #[error("epoch {epoch} has {documents} documents, {needed} are needed: give the sources larger weights")]
    EpochTooSmall {
        /// The epoch.
        epoch: u64,
        /// How many documents, or blocks of documents, it has.
        documents: u64,
        /// How many it takes.
        needed: u64,
    },

    /// All sentences were dropped.
    #[error(
        "no sentence fits into a sequence, which has room for {room} tokens of text: raise sequence_length, or set \
         long_sentences to \"split\" or \"cut\""
    )]
    NothingFits {
        /// How many tokens would.
        room: usize,
    },

    /// A place beyond the end of its epoch.
    #[error(
        "there is no instance {} in epoch {}, which has {count}: was the position saved with other data or settings?",
        place.index,
        place.epoch
    )]
    NoSuchPlace {
        /// The place.
        place: crate::Place,
        /// How many instances its epoch has.
        count: u64,
    },

    /// The system gave no more threads.
    #[error("cannot start a thread: lower the number of threads, or raise the limit of the system (`ulimit -u`)")]
    Threads {
        /// The system's reason.
        source: std::io::Error,
    },

    /// A thread that made batches ended early.
    #[error("the threads that make batches have stopped: this is a bug in henson, please report it")]
    LoaderStopped,

    /// A text is not UTF-8.
    #[error(
        "{}, {place}, byte {byte}: not UTF-8; convert the file first (iconv can), or replace what is not with --lossy",
        path.display()
    )]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// The line or row.
        place: String,
        /// The byte in it, from 1.
        byte: usize,
    },

    /// A line is not the JSON object that it should be.
    #[error("{}, line {line}: {problem}; each line must be an object with the text under the key of --field", path.display())]
    Record {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: u64,
        /// What is wrong there.
        problem: String,
    },

    /// A row of a labelled file is not as it should be; others can still be read.
    #[error("{}, line {line}: {problem}", path.display())]
    Row {
        /// The file.
        path: PathBuf,
        /// The line where it begins, or in parquet its number; from 1.
        line: u64,
        /// What is wrong there, and what was expected.
        problem: String,
    },

    /// A table's quote that is never closed.
    #[error(
        "{}, line {line}: a quote opens in this row and is not closed, so that the rest of the file would be one cell; \
         where quotes are ordinary characters, read the file without them (--quotes=false)",
        path.display()
    )]
    OpenQuote {
        /// The file.
        path: PathBuf,
        /// The line where the row begins, from 1.
        line: u64,
    },

    /// A file is not the JSON document that it should be.
    #[error("{} cannot be read as JSON: {problem}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What is wrong, and where.
        problem: String,
    },

    /// A parquet file cannot be read.
    #[error("{} cannot be read as parquet: {problem}", path.display())]
    Parquet {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },

    /// A parquet file has no such column.
    #[error("{} has no column {column:?}: name another with --column; it has {names}", path.display())]
    NoColumn {
        /// The file.
        path: PathBuf,
        /// The column that was asked for.
        column: String,
        /// Those that it has.
        names: String,
    },

    /// A document cannot be tokenized.
    #[error("{}, the document at line or row {line}: it cannot be tokenized", path.display())]
    Encode {
        /// The file.
        path: PathBuf,
        /// Where the document begins, from 1.
        line: u64,
        /// The tokenizer's reason.
        source: TextError,
    },

    /// A setting makes no sense.
    #[error("{name} is {got}: expected {expected}")]
    Setting {
        /// The setting.
        name: &'static str,
        /// What belongs there.
        expected: &'static str,
        /// What it is.
        got: String,
    },

    /// There is nothing to train on.
    #[error("no documents to train on: {reason}")]
    NoDocuments {
        /// What became of those that were read.
        reason: String,
    },

    /// The destination of a build is there already.
    #[error("{} exists already: choose another directory, or replace it with --overwrite", path.display())]
    Exists {
        /// The destination.
        path: PathBuf,
    },

    /// The destination of a build is there and is not a corpus.
    #[error("{} is not replaced: {problem}", path.display())]
    NotReplaced {
        /// The destination.
        path: PathBuf,
        /// What is in the way.
        problem: String,
    },

    /// The caller stopped it.
    #[error("stopped; nothing was written")]
    Stopped,
}

impl DataError {
    /// Whether one row of a labelled file is wrong, and not all of it.
    pub fn is_row(&self) -> bool {
        matches!(self, Self::Row { .. })
    }

    /// For `map_err`: what was tried with which file.
    pub(crate) fn io(action: &'static str, path: impl AsRef<Path>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.as_ref().to_owned();
        move |source| Self::Io { action, path, source }
    }

    pub(crate) fn parquet(path: &Path, problem: impl Into<String>) -> Self {
        Self::Parquet { path: path.to_owned(), problem: problem.into() }
    }

    pub(crate) fn damaged(path: impl AsRef<Path>, problem: impl Into<String>) -> Self {
        Self::Damaged { path: path.as_ref().to_owned(), problem: problem.into() }
    }
}
