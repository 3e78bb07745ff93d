//! The flags of `henson classify`, `tag`, `answer` and `choose`.

use std::path::PathBuf;

use clap::Args;
use henson_infer::Aggregation;

use super::{AskTexts, Compute, ModelName, Values, among, parse_count};

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  henson classify --model DIR 'A film to remember.'\n  \
henson classify --model DIR --pair 'A man sleeps.' 'Somebody is asleep.'\n  \
henson classify --model DIR --json --file reviews.txt > classes.jsonl\n\n\
The labels and what they mean (one of them, any of them, or a number) are the model's: id2label and problem_type in \
its config.json. With --labels they are yours, and the model is one of natural language inference (zero-shot \
classification): each text is a premise, and each label makes a hypothesis:\n  \
henson classify --model NLI --labels 'sport,politics,weather' 'The match ended in a draw.'")]
pub(crate) struct Classify {
    /// Classify pairs: two arguments each, or two texts per line with a tab between them
    #[arg(long)]
    pub(crate) pair: bool,

    /// Labels of your own, with commas between them, for a model of natural language inference
    #[arg(long, value_name = "A,B,…", value_delimiter = ',', conflicts_with = "pair")]
    pub(crate) labels: Vec<String>,

    /// With --labels: the sentence that each of them makes, with {} where it goes
    #[arg(long, value_name = "TEXT", default_value = henson_infer::ZeroShot::HYPOTHESIS, requires = "labels")]
    pub(crate) hypothesis: String,

    /// With --labels: any number of them may hold, each with a probability of its own
    #[arg(long, requires = "labels")]
    pub(crate) multi_label: bool,

    /// For multi-label models: the probability from which a label is assigned
    #[arg(long, default_value_t = 0.5, value_parser = parse_probability)]
    pub(crate) threshold: f32,

    #[command(flatten)]
    pub(crate) ask: AskTexts,
}

/// The aggregation strategies of transformers.
const AGGREGATIONS: Values<Aggregation> = &[
    ("none", "Every token with its tag", Aggregation::None),
    ("simple", "Adjacent tokens with the same tag", Aggregation::Simple),
    ("first", "Words by their first token", Aggregation::First),
    ("average", "Words by the mean over their tokens", Aggregation::Average),
    ("max", "Words by the token that is surest", Aggregation::Max),
];

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  henson tag --model DIR 'Jim Henson was born in Greenville.'\n  \
henson tag --model DIR --json --windows --file notes.txt > entities.jsonl\n\n\
Tags with prefixes (BIO, IOB1, BIOES) are joined to entities; others, such as parts of speech, are given word by word. \
Offsets count characters (Unicode code points) from 0, the end not included.")]
pub(crate) struct Tag {
    /// The texts are words with spaces between them already, as in a corpus: split nowhere else
    #[arg(long)]
    pub(crate) pre_tokenized: bool,

    /// Give every word with its tag, not only entities
    #[arg(long, conflicts_with = "aggregation")]
    pub(crate) each_word: bool,

    /// Group tokens as transformers' pipeline does [default: whole words by their first token, joined by what the tags mean]
    #[arg(long, value_parser = among(AGGREGATIONS), value_name = "STRATEGY")]
    pub(crate) aggregation: Option<Aggregation>,

    #[command(flatten)]
    pub(crate) ask: AskTexts,
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
henson rerank --model DIR --query 'Who made the Muppets?' 'It rains.' 'Jim Henson did.'\n  \
henson rerank --model DIR --query 'Who made the Muppets?' --file passages.txt --top 10 --json\n\n\
Scores go through the activation that the model's files name, otherwise through the sigmoid; --raw-scores gives logits. \
All texts are read before the first is printed.")]
pub(crate) struct Rerank {
    /// The query
    #[arg(long, value_name = "TEXT")]
    pub(crate) query: String,

    /// How many of the best to print [default: all]
    #[arg(long, short = 'k', value_name = "N", value_parser = parse_count)]
    pub(crate) top: Option<usize>,

    /// Logits instead of scores
    #[arg(long)]
    pub(crate) raw_scores: bool,

    #[command(flatten)]
    pub(crate) ask: AskTexts,
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
henson answer --model DIR --question 'Who was Jim Henson?' --passage 'Jim Henson was a puppeteer.'\n  \
henson answer --model DIR --question 'Who was born?' --passage-file article.txt --top 3\n  \
henson answer --model DIR --json --file questions.jsonl > answers.jsonl\n\n\
Lines of --file or of standard input are passages, where --question is given; otherwise they hold both: a question, a tab \
and a passage, or a JSON object with `question` and `context`. Passages may have any length. Offsets count characters \
(Unicode code points) from 0, the end not included.")]
pub(crate) struct Answer {
    #[command(flatten)]
    pub(crate) model: ModelName,

    /// A question; may be given several times
    #[arg(long, value_name = "TEXT")]
    pub(crate) question: Vec<String>,

    /// The passage to answer it from
    #[arg(long, alias = "context", value_name = "TEXT", requires = "question")]
    pub(crate) passage: Option<String>,

    /// A file whose whole text is the passage
    #[arg(long, value_name = "FILE", requires = "question", conflicts_with = "passage")]
    pub(crate) passage_file: Option<PathBuf>,

    /// A file with one passage, or one question and passage, per line; - is standard input
    #[arg(long, value_name = "FILE", conflicts_with_all = ["passage", "passage_file"])]
    pub(crate) file: Option<PathBuf>,

    /// How many answers to show
    #[arg(long, short = 'k', default_value_t = 1, value_parser = parse_count)]
    pub(crate) top: usize,

    /// Allow "no answer": the margin by which it must beat the best answer [default: from the model's config;
    /// without it, always answer]
    #[arg(long, value_name = "THRESHOLD", allow_negative_numbers = true, value_parser = parse_finite)]
    pub(crate) no_answer: Option<f64>,

    /// Maximum length of an answer in tokens
    #[arg(long, value_name = "TOKENS", default_value_t = 30, value_parser = parse_count)]
    pub(crate) longest: usize,

    /// Maximum length of a window in tokens, question included [default: the length used in fine-tuning, otherwise 384]
    #[arg(long, value_name = "TOKENS", value_parser = parse_count)]
    pub(crate) max_length: Option<usize>,

    /// From the beginning of one window of the passage to the next, as in Devlin et al. (2019) [default: the stride used in
    /// fine-tuning, otherwise 128]
    #[arg(long, value_name = "PIECES", value_parser = parse_count)]
    pub(crate) stride: Option<usize>,

    /// What windows have in common, instead of --stride: transformers' doc_stride
    #[arg(long, value_name = "PIECES", conflicts_with = "stride")]
    pub(crate) overlap: Option<usize>,

    /// Print one JSON object per question
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) compute: Compute,
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
henson choose --model DIR --context 'She opened the door and' 'went in.' 'ate it.' 'was a door.'\n  \
henson choose --model DIR --json --file questions.tsv > choices.jsonl\n\n\
Lines of --file or of standard input hold a context and its choices with tabs between them, or a JSON object with \
`context` and `choices`.")]
pub(crate) struct Choose {
    #[command(flatten)]
    pub(crate) model: ModelName,

    /// What the choices follow
    #[arg(long, value_name = "TEXT", requires = "choices")]
    pub(crate) context: Option<String>,

    /// The choices
    #[arg(value_name = "CHOICE", requires = "context")]
    pub(crate) choices: Vec<String>,

    /// A file with one context and its choices per line; - is standard input
    #[arg(long, value_name = "FILE", conflicts_with = "context")]
    pub(crate) file: Option<PathBuf>,

    /// Maximum sequence length in tokens, special tokens included [default: the length used in fine-tuning, otherwise the
    /// model's maximum]
    #[arg(long, value_name = "TOKENS", value_parser = parse_count)]
    pub(crate) max_length: Option<usize>,

    /// Print one JSON object per context
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) compute: Compute,
}

fn parse_probability(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(p) if (0.0..=1.0).contains(&p) => Ok(p),
        _ => Err("expected a number from 0 to 1".to_owned()),
    }
}

pub(super) fn parse_finite(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(x) if x.is_finite() => Ok(x),
        _ => Err("expected a number".to_owned()),
    }
}
