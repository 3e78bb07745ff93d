//! The flags of `henson generate` and `henson bench generate`.

use std::path::PathBuf;

use clap::Args;
use henson_infer::EarlyStopping;

use super::{Compute, ModelName, Texts, Values, among, parse_count};

const EARLY_STOPPING: Values<EarlyStopping> = &[
    ("true", "As soon as as many sequences are finished as there are beams", EarlyStopping::Yes),
    ("false", "When the best running sequence scores no better than the worst finished one", EarlyStopping::No),
    ("never", "When no running sequence can score better, however long it gets", EarlyStopping::Never),
];

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  henson generate --model DIR 'Once upon a time'\n  \
henson generate --model DIR --temperature 0.8 --top-p 0.95 --seed 7 --max-new-tokens 100 'Once upon a time'\n  \
henson generate --model DIR --beams 4 --json --file english.txt > german.jsonl\n\n\
A decoder continues the text, an encoder-decoder writes what it was trained to write for it. Settings have the meaning that \
transformers gives them; those that are not given are the model's (generation_config.json, or config.json in older \
directories), otherwise transformers' defaults: the likeliest token, 20 times. --temperature, --top-k, --top-p, --min-p and \
--seed draw tokens instead; a seed gives the same text whatever else is in the file.\n\n\
JSON: one object per sequence with prompt (or prompt_ids), sequence, ids, text, score (the sum of the tokens' log-probabilities over \
their number to the power of the length penalty) and finish_reason (end, length or stop).")]
pub(crate) struct Generate {
    #[command(flatten)]
    pub(crate) model: ModelName,

    #[command(flatten)]
    pub(crate) texts: Texts,

    /// The texts are token ids with spaces between them
    #[arg(long)]
    pub(crate) ids: bool,

    /// The most new tokens
    #[arg(long, value_name = "TOKENS", value_parser = parse_count)]
    pub(crate) max_new_tokens: Option<usize>,

    /// No end before so many new tokens
    #[arg(long, value_name = "TOKENS")]
    pub(crate) min_new_tokens: Option<usize>,

    /// Follow so many sequences at once (beam search)
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub(crate) beams: Option<usize>,

    /// The exponent of the number of tokens that a score is divided by; larger prefers longer sequences
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    pub(crate) length_penalty: Option<f32>,

    /// When a beam search stops
    #[arg(long, value_parser = among(EARLY_STOPPING))]
    pub(crate) early_stopping: Option<EarlyStopping>,

    /// Draw tokens instead of taking the likeliest [default: as the model's files say]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) sample: Option<bool>,

    /// Draw with logits divided by this: below 1 likelier tokens, above 1 more of the others
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    pub(crate) temperature: Option<f32>,

    /// Draw from the likeliest K tokens; 0 for all
    #[arg(long, value_name = "K")]
    pub(crate) top_k: Option<usize>,

    /// Draw from the likeliest tokens that together have this probability
    #[arg(long, value_name = "P")]
    pub(crate) top_p: Option<f32>,

    /// Draw from tokens with at least this share of the likeliest one's probability
    #[arg(long, value_name = "P")]
    pub(crate) min_p: Option<f32>,

    /// The seed of draws
    #[arg(long)]
    pub(crate) seed: Option<u64>,

    /// Make tokens that are there already less likely: above 1
    #[arg(long, value_name = "X")]
    pub(crate) repetition_penalty: Option<f32>,

    /// Let no N tokens in a row occur twice
    #[arg(long, value_name = "N")]
    pub(crate) no_repeat_ngram: Option<usize>,

    /// Sequences for each text: drawn, or the best beams
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub(crate) return_sequences: Option<usize>,

    /// End before this text; may be given several times
    #[arg(long, value_name = "TEXT")]
    pub(crate) stop: Vec<String>,

    /// With --json: for each token its log-probability, and the N likeliest tokens with theirs
    #[arg(long, value_name = "N", requires = "json")]
    pub(crate) logprobs: Option<usize>,

    /// Print one JSON object per sequence
    #[arg(long)]
    pub(crate) json: bool,

    /// Where to write [default: standard output]
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,

    /// Replace FILE if it exists
    #[arg(long)]
    pub(crate) overwrite: bool,

    #[command(flatten)]
    pub(crate) compute: Compute,
}

#[derive(Args, Debug)]
pub(crate) struct BenchGenerate {
    /// A size (gpt2, t5-small, bart-base, …) or a model directory, whose weights are not needed
    #[arg(long)]
    pub(crate) model: String,

    /// Sequences that are written at once
    #[arg(long, default_value_t = 1, value_parser = parse_count)]
    pub(crate) streams: usize,

    /// Tokens of each prompt or source
    #[arg(long, value_name = "TOKENS", default_value_t = 32, value_parser = parse_count)]
    pub(crate) prompt_length: usize,

    /// A file with the token ids of one prompt per line, instead of --streams and --prompt-length
    #[arg(long, value_name = "FILE")]
    pub(crate) prompts: Option<PathBuf>,

    /// New tokens of each sequence; none ends before
    #[arg(long, value_name = "TOKENS", default_value_t = 128, value_parser = parse_count)]
    pub(crate) new_tokens: usize,

    /// Beams of each prompt
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = parse_count)]
    pub(crate) beams: usize,

    /// Runs to measure; the median counts
    #[arg(long, default_value_t = 3, value_parser = parse_count)]
    pub(crate) rounds: usize,

    /// Show the time of each kind of operation
    #[arg(long)]
    pub(crate) profile: bool,

    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) compute: Compute,
}
