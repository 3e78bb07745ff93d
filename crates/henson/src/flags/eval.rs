//! The flags of `henson eval`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::{Compute, ModelName, parse_count};

#[derive(Args, Debug)]
#[command(after_help = "\
perplexity  FILE has one text a line (blank lines are passed over). The loss is the mean of -ln P over all pieces.\n\
blimp       FILE has a JSON object a line with sentence_good, sentence_bad, UID, linguistics_term and field, as in \
BLiMP's own files. A pair is right where sentence_good is the likelier one; a tie is wrong.\n\n\
A masked LM scores a text by its pseudo-log-likelihood, each piece masked in turn; a left-to-right model (is_decoder in \
its config) by its log-likelihood. FILE may be compressed with gzip or zstd.\n\n\
Examples:\n  henson eval --task perplexity --model DIR --data heldout.txt --limit 1000 --sample\n  \
henson eval --task blimp --model DIR --data blimp.jsonl.zst --limit 50 --json")]
pub(crate) struct Eval {
    /// What to measure, see below
    #[arg(long, value_enum)]
    pub(crate) task: Task,

    #[command(flatten)]
    pub(crate) model: ModelName,

    /// The benchmark's own file; - is standard input
    #[arg(long, value_name = "FILE")]
    pub(crate) data: PathBuf,

    /// Take only so many texts, or so many pairs of each paradigm: the first, or with --sample others
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub(crate) limit: Option<usize>,

    /// Take them evenly spaced over all that there are
    #[arg(long, requires = "limit")]
    pub(crate) sample: bool,

    /// What a masked LM sees when it predicts a piece [default: piece]
    #[arg(long, value_enum)]
    pub(crate) scoring: Option<ScoringName>,

    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) compute: Compute,
}

#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Task {
    /// How well a model predicts text
    Perplexity,
    /// Minimal pairs: which of two sentences is English
    Blimp,
}

#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ScoringName {
    /// All other pieces
    Piece,
    /// All other pieces but the later ones of the same word
    Word,
}
