//! What can go wrong between files, text and pieces. Each message says what, where, what was expected and found, and
//! what to do next; the binary only adds the chain of causes.

use std::path::PathBuf;

/// Every error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// A directory holds none of the files that make a tokenizer.
    #[error(
        "no tokenizer in {}: looked for tokenizer.json, for vocab.txt, for vocab.json with merges.txt, and for SentencePiece's \
         spm.model, spiece.model, sentencepiece.bpe.model and tokenizer.model; {hint}",
        directory.display()
    )]
    NoTokenizer {
        /// The directory that was searched.
        directory: PathBuf,
        /// What to do next.
        hint: String,
    },

    /// One of two files that belong together is missing.
    #[error("{} has {found} but no {missing}: byte-level BPE needs both; copy {missing} next to it", directory.display())]
    MissingCompanion {
        /// The directory that was searched.
        directory: PathBuf,
        /// The file that is there.
        found: &'static str,
        /// The file that is not.
        missing: &'static str,
    },

    /// The path of a tokenizer is not a directory.
    #[error(
        "{} is not a directory: a tokenizer is opened by the directory that holds its tokenizer.json or vocab.txt, or by \
         a SentencePiece file, whose name ends in .model",
        path.display()
    )]
    NotADirectory {
        /// The path that was given.
        path: PathBuf,
    },

    /// The operating system refused to read or write a file.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// `read` or `write`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },

    /// A file is larger than any real one of its kind.
    #[error(
        "{} has {size} bytes, more than the {limit} that a file of this kind may have: is it really a tokenizer's file?",
        path.display()
    )]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its size in bytes.
        size: u64,
        /// The most that is read.
        limit: u64,
    },

    /// A text file is not UTF-8.
    #[error(
        "{} is not UTF-8 at line {line}, byte {column}: convert the file to UTF-8, or check that it is the right file",
        path.display()
    )]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// The line of the first bad byte, from 1.
        line: usize,
        /// The byte in that line, from 1.
        column: usize,
    },

    /// A file is not JSON, or not the JSON that belongs there.
    #[error(
        "{} cannot be parsed at line {line}, column {column}: {reason}; is it the right file, and complete?",
        path.display()
    )]
    Json {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The column, from 1.
        column: usize,
        /// The parser's words.
        reason: String,
    },

    /// A file can be read, but a value in it makes no sense.
    #[error("{}: {place}: expected {expected}, got {got}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The key, line or entry.
        place: String,
        /// What belongs there.
        expected: String,
        /// What is there.
        got: String,
    },

    /// A vocabulary without tokens.
    #[error("{} has no tokens: the vocabulary is empty; copy the model's own file again", path.display())]
    EmptyVocabulary {
        /// The file.
        path: PathBuf,
    },

    /// A vocabulary has the same token twice, so that one of the two ids could never be reached.
    #[error(
        "{}: token {token:?} has two ids, {first} and {second} (in vocab.txt the line is the id + 1): \
         remove one, or give one another name so that the ids after it stay",
        path.display()
    )]
    DuplicateToken {
        /// The file.
        path: PathBuf,
        /// The token.
        token: String,
        /// Its first id.
        first: u32,
        /// Its second id.
        second: u32,
    },

    /// A piece cannot be added to a vocabulary.
    #[error("cannot add {piece:?} to the vocabulary: {problem}")]
    Piece {
        /// The piece.
        piece: String,
        /// Why not.
        problem: String,
    },

    /// Two tokens of a vocabulary have the same id.
    #[error("{}: tokens {first:?} and {second:?} both have id {id}: every token needs an id of its own", path.display())]
    DuplicateId {
        /// The file.
        path: PathBuf,
        /// The id.
        id: u32,
        /// One of the tokens.
        first: String,
        /// The other.
        second: String,
    },

    /// A special token is named by a file but is not in the vocabulary, so that no model can have an embedding for it.
    #[error("{} names {token:?} as {role}, but the vocabulary has no such token: correct the name or add the token", path.display())]
    UnknownSpecialToken {
        /// The file that names it.
        path: PathBuf,
        /// The role, such as `mask_token`.
        role: String,
        /// The name.
        token: String,
    },

    /// A token outside the model's vocabulary would get another id than its file says.
    #[error(
        "{}: added token {token:?} should have id {expected}, but it would be given {got}: \
         added tokens follow the vocabulary without gaps; save the tokenizer again with the program that made it",
        path.display()
    )]
    MovedToken {
        /// The file.
        path: PathBuf,
        /// The token.
        token: String,
        /// The id in the file.
        expected: u32,
        /// The id that encoding would use, or "none".
        got: String,
    },

    /// The directory's tokenizer class is one whose plain files have another meaning than ours.
    #[error(
        "{} names the tokenizer {class}, whose {file} cannot be read on its own: make a tokenizer.json with \
         transformers (AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)) and open that",
        path.display()
    )]
    UnknownClass {
        /// tokenizer_config.json.
        path: PathBuf,
        /// The class it names.
        class: String,
        /// The plain file that was found.
        file: &'static str,
    },

    /// A SentencePiece file whose family is not known: the file does not say which ids and special tokens the model has.
    #[error(
        "{} says nothing of the special tokens around it, and {stated}: known are {known}; name one of these in \
         tokenizer_config.json ({{\"tokenizer_class\": \"AlbertTokenizer\"}}), or make a tokenizer.json with transformers \
         (AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR))",
        path.display()
    )]
    UnknownConvention {
        /// The model file.
        path: PathBuf,
        /// What the directory's configurations say.
        stated: String,
        /// The tokenizer classes that are known.
        known: String,
    },

    /// The `tokenizers` crate refused a file.
    #[error("{} is not a tokenizer that can be used: {reason}", path.display())]
    Refused {
        /// The file.
        path: PathBuf,
        /// The crate's words.
        reason: String,
    },

    /// The `tokenizers` crate failed on a text or on ids.
    #[error("the tokenizer failed to {action}: {reason}")]
    Failed {
        /// `encode`, `decode`, `split` or `save`.
        action: &'static str,
        /// The crate's words.
        reason: String,
    },

    /// A tokenizer that would make too much of a text: of its length, or of the time that it takes.
    #[error(
        "the tokenizer's {component} does too much work for this text: {what}; shorten the text, or use a tokenizer.json \
         without this component"
    )]
    TooMuchWork {
        /// Its place in tokenizer.json.
        component: String,
        /// What it does, and the limit.
        what: String,
    },

    /// Ids whose text would be too long.
    #[error("the text of {ids} ids has more than {limit} bytes: decode fewer at a time")]
    TooLong {
        /// How many ids.
        ids: usize,
        /// The most bytes.
        limit: usize,
    },

    /// An id that no token has.
    #[error(
        "no token has id {id}: the tokenizer's ids are below {vocabulary_size}; does the model belong to this tokenizer?"
    )]
    UnknownId {
        /// The id.
        id: u32,
        /// The largest id + 1.
        vocabulary_size: usize,
    },

    /// A length limit leaves no room for what must be in every sequence.
    #[error("max_length {max_length} is too small: {needed} positions are needed at least ({reason})")]
    MaxLengthTooSmall {
        /// The limit that was given.
        max_length: usize,
        /// The smallest that works.
        needed: usize,
        /// What takes the positions.
        reason: &'static str,
    },

    /// Windows that do not move.
    #[error("stride 0: expected at least 1, the number of tokens from the start of a window to the start of the next")]
    ZeroStride,

    /// Windows that would not move, since they are all overlap.
    #[error(
        "windows cannot overlap by {overlap} tokens: each has room for {room}; choose a smaller overlap or a larger max_length"
    )]
    Overlap {
        /// The overlap that was asked for.
        overlap: usize,
        /// The pieces of the text that a window holds.
        room: usize,
    },

    /// A template without the text it is for.
    #[error("the template for {form} needs {expected}, got {got}")]
    BadTemplate {
        /// `one text` or `two texts`.
        form: &'static str,
        /// What it must hold.
        expected: &'static str,
        /// What it holds.
        got: String,
    },

    /// A setting of training that makes no sense.
    #[error("{setting}: expected {expected}, got {got}")]
    BadTraining {
        /// The setting.
        setting: &'static str,
        /// What belongs there.
        expected: String,
        /// What is there.
        got: String,
    },

    /// A kind of random encoding that the tokenizer does not have.
    #[error("cannot encode at random: expected {expected}, got {got}")]
    BadSampling {
        /// What works.
        expected: &'static str,
        /// What was asked for.
        got: String,
    },

    /// A text to train on that has no words.
    #[error("there is nothing to learn from: the text has no words; are these the right files, and the right field?")]
    NoWords,

    /// A vocabulary that cannot even hold single characters.
    #[error(
        "a vocabulary of {asked} is too small: {specials} special tokens and {alphabet} single characters (each as it \
         begins and as it continues a word) are needed at least; ask for {} or more, or lower the alphabet's limit",
        specials + alphabet
    )]
    VocabularyTooSmall {
        /// The size that was asked for.
        asked: usize,
        /// How many special tokens there are.
        specials: usize,
        /// How many pieces the single characters take.
        alphabet: usize,
    },

    /// The caller asked to stop.
    #[error("training was stopped before it finished; nothing is kept")]
    Stopped,
}
