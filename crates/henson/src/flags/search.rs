//! The flags of `henson search` and `henson mine`.

use std::path::PathBuf;

use clap::Args;

use super::labelled::Labelled;
use super::tasks::parse_finite;
use super::{Compute, ModelName, parse_count};

#[derive(Args, Debug)]
#[command(
    after_help = "PATH is a folder, a file with text, or a table (jsonl, parquet) with `text` and perhaps `id` and `title`. In folders, \
files that are text by their names (.md, .txt, .rst, .html, …) and tables are read, hidden ones are not. Texts are cut into overlapping \
passages. Their vectors are kept in PATH/.henson-search (or next to a file, with that ending), by their content: a second search embeds \
only what is new.\n\n\
Examples:\n  henson search notes 'how do I reset my password?'\n  \
henson search notes.jsonl 'opening hours' --top 3 --json\n  \
henson search notes 'opening hours' --model E5 --query-prefix 'query: ' --passage-prefix 'passage: ' --rerank RANKER"
)]
pub(crate) struct Search {
    /// What to search: a folder, a text file, or a table
    #[arg(value_name = "PATH")]
    pub(crate) path: PathBuf,

    /// What to look for; several are several searches
    #[arg(value_name = "QUERY", required = true)]
    pub(crate) queries: Vec<String>,

    #[command(flatten)]
    pub(crate) model: ModelName,

    /// How many passages to show
    #[arg(long, short = 'k', value_name = "N", default_value_t = 5, value_parser = parse_count)]
    pub(crate) top: usize,

    /// A cross-encoder that puts the best passages in order
    #[arg(long, value_name = "DIR")]
    pub(crate) rerank: Option<String>,

    /// With --rerank: how many passages it reads
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = parse_count, requires = "rerank")]
    pub(crate) candidates: usize,

    /// Words of a passage
    #[arg(long, value_name = "N", default_value_t = 80, value_parser = parse_count)]
    pub(crate) words: usize,

    /// Words that a passage has in common with the one before
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub(crate) overlap: usize,

    /// What to put before each query [default: the model's own prompt `query`, if it has one]
    #[arg(long, value_name = "TEXT")]
    pub(crate) query_prefix: Option<String>,

    /// What to put before each passage [default: the model's own prompt `passage` or `document`, if it has one]
    #[arg(long, value_name = "TEXT")]
    pub(crate) passage_prefix: Option<String>,

    /// Neither read nor write kept vectors
    #[arg(long)]
    pub(crate) no_cache: bool,

    /// Print one JSON object per passage
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) compute: Compute,
}

#[derive(Args, Debug)]
#[command(
    after_help = "FILE has pairs of texts that belong together, as `finetune --task embed` reads them. For each pair, the texts of the \
corpus that are near to its first text and are not its own become negatives. The result has the keys anchor, positive, negatives and, with \
--cross-encoder, scores (of the positive, then of each negative), and can be trained on with loss=ranking, triplet or margin-mse.\n\n\
A near text may be right without anybody having said so: --skip passes over the nearest, --margin and --relative-margin leave out those \
that are nearly as near as the pair's own, and a cross-encoder looks at each.\n\n\
Examples:\n  henson mine --train pairs.jsonl --out mined.jsonl --negatives 3\n  \
henson mine --train pairs.jsonl --corpus passages.jsonl --out mined.jsonl --model DIR --skip 10 --among 100 --relative-margin 0.95 \
--cross-encoder RANKER"
)]
pub(crate) struct Mine {
    /// The pairs
    #[arg(long, value_name = "FILE")]
    pub(crate) train: PathBuf,

    /// The texts to look among: a table with `text` [default: all second texts of the pairs]
    #[arg(long, value_name = "FILE")]
    pub(crate) corpus: Option<PathBuf>,

    /// Where to write (jsonl); must not exist
    #[arg(long, value_name = "FILE")]
    pub(crate) out: PathBuf,

    #[command(flatten)]
    pub(crate) model: ModelName,

    /// Negatives of a pair
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = parse_count)]
    pub(crate) negatives: usize,

    /// How many of the nearest texts to pass over
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) skip: usize,

    /// Among how many of the nearest to look
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = parse_count)]
    pub(crate) among: usize,

    /// How much less near than the pair's own text a negative must be
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = parse_finite)]
    pub(crate) margin: Option<f64>,

    /// The share of the own text's nearness that a negative must stay below, such as 0.95
    #[arg(long, value_name = "X", value_parser = parse_finite)]
    pub(crate) relative_margin: Option<f64>,

    /// The highest score of a negative
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = parse_finite)]
    pub(crate) max_score: Option<f64>,

    /// The lowest score of a negative
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = parse_finite)]
    pub(crate) min_score: Option<f64>,

    /// Draw negatives at random, by this seed, instead of taking the nearest
    #[arg(long, value_name = "SEED")]
    pub(crate) random: Option<u64>,

    /// A cross-encoder whose score of a negative must be below that of the pair's own text
    #[arg(long, value_name = "DIR")]
    pub(crate) cross_encoder: Option<String>,

    /// With --cross-encoder: by how much
    #[arg(long, value_name = "X", default_value_t = 0.0, requires = "cross_encoder", allow_negative_numbers = true, value_parser = parse_finite)]
    pub(crate) cross_margin: f64,

    /// What to put before each query [default: the model's own prompt `query`, if it has one]
    #[arg(long, value_name = "TEXT")]
    pub(crate) query_prefix: Option<String>,

    /// What to put before each text of the corpus [default: the model's own prompt `passage` or `document`, if it has one]
    #[arg(long, value_name = "TEXT")]
    pub(crate) passage_prefix: Option<String>,

    #[command(flatten)]
    pub(crate) compute: Compute,

    #[command(flatten)]
    pub(crate) labelled: Labelled,
}
