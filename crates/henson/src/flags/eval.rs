//! The flags of `henson eval`.

use std::path::PathBuf;

use clap::Args;
use clap::builder::TypedValueParser;
use henson_infer::Scoring;

use super::labelled::{Labelled, task_names};
use super::{Compute, LengthFlags, ModelName, Values, among, parse_count};

#[derive(Args, Debug)]
#[command(after_help = "\
perplexity  FILE has one text per line (blank lines are skipped). The loss is the mean of -ln P over all tokens.\n\
blimp       FILE has one JSON object per line with sentence_good, sentence_bad, UID, linguistics_term and field, as in \
BLiMP's own files. A pair is right where sentence_good is the likelier one; a tie is wrong.\n\
diagnostics FILE is CPRAG-102, ROLE-88 or a part of NEG-136 (Ettinger 2020), a tsv as in github.com/aetting/lm-diagnostics: how often a masked LM \
has the word that people expect among its first 1 and 5 predictions, and finds it likelier than others.\n\
retrieval   FILE is a directory as BEIR has it: corpus.jsonl, queries.jsonl, qrels/test.tsv. Passages are ranked by the vectors of a \
sentence model, or with --bm25 by words; with --rerank, a cross-encoder puts the best in order.\n\
paraphrases FILE is a directory with sentences.jsonl (or tsv, csv, parquet; id, text) and duplicates.tsv (id1, id2): which of all pairs \
of sentences mean the same.\n\
others      FILE is the benchmark's own, with labels; for classify, pair, regress, multilabel, tag, qa and choice it is \
a table (tsv, csv, jsonl, parquet), CoNLL columns, or SQuAD's JSON; for embed, pairs of texts, with or without scores; for seq2seq, \
sources with one or several references (BLEU and chrF as sacreBLEU has them, ROUGE as rouge-score, wer, per). \
--predictions, or what a fine-tuned --model predicts, is \
scored by the official definitions; several models with commas between them are averaged.\n\n\
Without --model, perplexity, blimp and diagnostics measure henson-12m, and embed henson-12m-sentences; the others need --model or \
--predictions.\n\n\
A masked LM scores a text by its pseudo-log-likelihood, each token masked in turn; a left-to-right model (is_decoder in \
its config) by its log-likelihood. FILE may be compressed with gzip or zstd.\n\n\
Examples:\n  henson eval --task retrieval --model DIR --data scifact --rerank RANKER\n  henson eval --task perplexity --model DIR --data heldout.txt --limit 1000 --sample\n  \
henson eval --task blimp --model DIR --data blimp.jsonl.zst --limit 50 --json\n  \
henson eval --model run --data notes.csv\n  henson eval --task rte --model run1,run2 --data RTE/dev.tsv\n  \
henson eval --task mrpc --predictions MRPC.tsv --data MRPC/dev.tsv\n  \
henson eval --task seq2seq --predictions hypotheses.txt --data pairs.tsv --json\n  \
henson eval --task squad2 --predictions predictions.json --null-odds null_odds.json --data dev-v2.0.json\n  \
henson eval --task classify --predictions out.jsonl --data notes.csv --text-column body --label-column urgent")]
pub(crate) struct Eval {
    /// What to measure, see below [default: what --model was fine-tuned for]
    #[arg(long, value_name = "TASK", value_parser = task_names(&["perplexity", "blimp", "diagnostics", "retrieval", "paraphrases"]).map(|name| Task::named(&name)))]
    pub(crate) task: Option<Task>,

    #[command(flatten)]
    pub(crate) model: ModelName,

    /// The benchmark's own file; - is standard input
    #[arg(long, value_name = "FILE")]
    pub(crate) data: PathBuf,

    /// Score this file of predictions: a GLUE submission, SQuAD's predictions.json, CoNLL columns, csv, jsonl
    #[arg(long, value_name = "FILE", conflicts_with = "model")]
    pub(crate) predictions: Option<PathBuf>,

    /// SQuAD 2.0: how much likelier no answer is than the best, for each question
    #[arg(long, value_name = "FILE", requires = "predictions")]
    pub(crate) null_odds: Option<PathBuf>,

    /// SQuAD 2.0: treat answers whose no-answer odds are above this as no answer [default: the model's own; without it, none]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub(crate) threshold: Option<f64>,

    /// How many of the worst mistakes to show [default: 5, with --json none]
    #[arg(long, value_name = "N")]
    pub(crate) mistakes: Option<usize>,

    /// Use only N texts, or N pairs of each paradigm: the first ones, or with --sample others
    #[arg(long, value_name = "N", value_parser = parse_count, conflicts_with = "predictions")]
    pub(crate) limit: Option<usize>,

    /// Take them evenly spaced over all that there are
    #[arg(long, requires = "limit")]
    pub(crate) sample: bool,

    /// What a masked LM sees when it predicts a token [default: piece]
    #[arg(long, value_parser = among(SCORINGS), conflicts_with = "predictions")]
    pub(crate) scoring: Option<Scoring>,

    /// retrieval: the judgments [default: qrels/test.tsv of the directory, or the only .tsv there]
    #[arg(long, value_name = "FILE")]
    pub(crate) qrels: Option<PathBuf>,

    /// retrieval: rank passages by BM25, by the words that they share with a query, instead of by a model's vectors
    #[arg(long, conflicts_with = "model")]
    pub(crate) bm25: bool,

    /// retrieval: a cross-encoder that puts the best passages of each query in order
    #[arg(long, value_name = "DIR")]
    pub(crate) rerank: Option<String>,

    /// retrieval, with --rerank: how many passages it reads for each query
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = parse_count, requires = "rerank")]
    pub(crate) candidates: usize,

    /// retrieval: what to put before each query [default: the model's own prompt `query`, if it has one]
    #[arg(long, value_name = "TEXT")]
    pub(crate) query_prefix: Option<String>,

    /// retrieval: what to put before each passage [default: the model's own prompt `passage` or `document`, if it has one]
    #[arg(long, value_name = "TEXT")]
    pub(crate) passage_prefix: Option<String>,

    #[command(flatten)]
    pub(crate) length: LengthFlags,

    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) compute: Compute,

    #[command(flatten)]
    pub(crate) labelled: Labelled,
}

const SCORINGS: Values<Scoring> = &[
    ("piece", "All other tokens", Scoring::Piece),
    ("word", "All other tokens except the later ones of the same word", Scoring::Word),
];

/// What to measure.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Task {
    /// How well a model predicts text
    Perplexity,
    /// Minimal pairs: which of two sentences is English
    Blimp,
    /// What is expected at the end of a sentence: common sense, roles, negation
    Diagnostics,
    /// How well an encoder finds what is relevant
    Retrieval,
    /// How well an encoder finds sentences that mean the same
    Paraphrases,
    /// How well labels are predicted
    Labelled(&'static henson_tasks::Task),
}

impl Task {
    /// By a name that the parser let through.
    fn named(name: &str) -> Self {
        match henson_tasks::Task::named(name) {
            Some(task) => Self::Labelled(task),
            None if name == "blimp" => Self::Blimp,
            None if name == "diagnostics" => Self::Diagnostics,
            None if name == "retrieval" => Self::Retrieval,
            None if name == "paraphrases" => Self::Paraphrases,
            None => Self::Perplexity,
        }
    }
}
