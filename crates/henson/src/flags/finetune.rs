//! The flags of `henson finetune` and `henson predict`.

use std::path::PathBuf;

use clap::Args;
use henson_tasks::{FeatureLayers, TaggerHead};
use henson_tensor::DType;

use super::labelled::{Labelled, task_names};
use super::ranks::RankFlags;
use super::settings::RecipeFlags;
use super::{Compute, LengthFlags, Machine, parse_count, parse_dtype};

#[derive(Args, Debug)]
#[command(after_help = "\
DIR is where a benchmark was unpacked (GLUE's or SuperGLUE's own layout), or has train.tsv and dev.tsv (or .csv, .jsonl, .parquet, CoNLL \
columns, SQuAD's JSON); --train and --dev name files themselves, also JSON arrays, fastText's lines and spans of Prodigy, doccano \
and spaCy. Without a dev file a part of the training rows is split off \
(from 500 rows on; by label, by passage or document where rows belong together), or folds estimate the score. Labels are the official ones, or taken from the files.\n\n\
The same command resumes where the run was stopped, killed or interrupted. Epochs, learning rate and \
batch size are chosen by the size of data and model where they are not set, and printed with the reason; below 500 rows a linear \
head on the frozen model is fitted as well, and the better model is kept. Keys for --set and recipes: batch_size, \
epochs, learning_rate, max_length, windows, warmup, schedule, optimizer (adamw, paper, stable-adamw, lamb), dropout, layer_decay, freeze, \
class_weights, evals_per_epoch, patience, limit, …; `henson help settings` lists all.\n\n\
Examples:\n  henson finetune --task mrpc --data glue --out mrpc\n  \
henson finetune --task classify --model DIR --train notes.csv --dev more.csv --text-column body --label-column urgent --out m\n  \
henson finetune --task ner --model DIR --data conll2003 --out ner --epochs 4 --set layer_decay=0.9\n  \
henson finetune --task ner --model DIR --data conll2003 --out tagger --frozen --layers concat-last-4 --head bilstm --crf\n  \
henson finetune --task ner --model bilstm-cnn-crf --word-vectors glove.6B.100d.txt --data conll2003 --out tagger\n  \
henson finetune --task squad2 --model DIR --data squad --out answers --dtype bf16\n  \
henson finetune --task embed --model DIR --train pairs.jsonl --dev STS-B/dev.tsv --out sentences --batch-size 128\n  \
henson finetune --task seq2seq --model DIR --train pairs.csv --source-column en --target-column de --prefix 'translate English to German: ' --out m\n  \
henson finetune --task rte --model DIR --data glue --out rte --restarts 5\n  \
henson finetune --task rte --model DIR --data glue --out rte-grid --grid learning_rate=5e-5,3e-5 epochs=3,5 --restarts 3")]
pub(crate) struct Finetune {
    /// A recipe (TOML); if omitted, defaults and flags are used
    #[arg(value_name = "RECIPE")]
    pub(crate) recipe: Option<PathBuf>,

    /// What to learn: a benchmark, or classify, pair, regress, multilabel, span, tag, qa, choice, embed, seq2seq
    #[arg(long, value_name = "TASK", value_parser = task_names(&[]), required_unless_present = "recipe")]
    pub(crate) task: Option<String>,

    /// The model to start from: a directory, or org/name from the local Hugging Face cache; bilstm, bilstm-crf, bilstm-cnn or
    /// bilstm-cnn-crf for a BiLSTM from random weights over the words (cnn: and their characters) of the training data [default: the recipe's, otherwise the model that comes with henson; for
    /// embed, its sentence model]
    #[arg(long, value_name = "DIR")]
    pub(crate) model: Option<String>,

    /// Start from random weights, with the tokenizer of this directory; --model is then the name of a size, such as bert-L2-H128
    #[arg(long, value_name = "DIR", requires = "model")]
    pub(crate) tokenizer: Option<String>,

    /// --model bilstm and its kin: a file of word vectors to begin with, GloVe's text or word2vec's text or binary
    #[arg(long, value_name = "FILE")]
    pub(crate) word_vectors: Option<String>,

    /// Fetch org/name from the Hugging Face Hub if it is not in the cache
    #[arg(long)]
    pub(crate) download: bool,

    /// The directory with the task's files
    #[arg(long, value_name = "DIR")]
    pub(crate) data: Option<PathBuf>,

    /// The file to train on; given several times, all of them. A quoted pattern such as 'part-*.csv' stands for all files that it
    /// fits [default: the one in --data]
    #[arg(long, value_name = "FILE")]
    pub(crate) train: Vec<String>,

    /// The file to choose the best model by; `none` trains on all rows without a score [default: the one in --data; without
    /// one, a tenth of the training rows is held out, or --folds estimates the score where there are fewer than 500]
    #[arg(long, value_name = "FILE")]
    pub(crate) dev: Option<PathBuf>,

    /// Estimate the score by K folds instead of a dev file: K models are trained, each without one part of the rows, and scored
    /// on it; the model itself trains on all rows. 0 for none [default: 5 below 500 rows without a dev file]
    #[arg(long, value_name = "K", conflicts_with = "dev")]
    pub(crate) folds: Option<usize>,

    /// The score that chooses the best checkpoint and is shown first: accuracy, macro_f1, f1, spearman, …, or f1:LABEL,
    /// precision:LABEL, recall:LABEL of one label [default: the task's own]
    #[arg(long, value_name = "NAME", conflicts_with_all = ["layers", "head", "crf"])]
    pub(crate) metric: Option<String>,

    /// The run's directory: the finished model, with README.md, results.json, metrics.jsonl and report.html next to it
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,

    #[command(flatten)]
    pub(crate) settings: RecipeFlags,

    /// seq2seq: text before every source, such as 'translate English to German: '; the model keeps it
    #[arg(long, value_name = "TEXT")]
    pub(crate) prefix: Option<String>,

    /// Freeze the encoder and train only the head
    #[arg(long)]
    pub(crate) frozen: bool,

    #[command(flatten)]
    pub(crate) features: Features,

    /// The seed of the new head, of the examples' order and of dropout [default: the recipe's, else 0]
    #[arg(long)]
    pub(crate) seed: Option<u64>,

    /// Train N times, with this seed and the ones after it, and keep the best model
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub(crate) restarts: Option<usize>,

    /// Try all combinations of some values and keep the best model [without values: the batch sizes, learning rates and epochs of Devlin et al. (2019)]
    #[arg(long, value_name = "KEY=VALUE,…", num_args = 0..)]
    pub(crate) grid: Option<Vec<String>>,

    /// Write all mistakes on the dev data into FILE, one JSON object per line. Nothing else quotes the files: the model's
    /// directory holds no text of theirs
    #[arg(long, value_name = "FILE", conflicts_with_all = ["restarts", "grid"])]
    pub(crate) mistakes: Option<PathBuf>,

    /// Stop after this step with a checkpoint; the same command without it resumes
    #[arg(long, value_name = "STEP", conflicts_with_all = ["restarts", "grid"])]
    pub(crate) stop_at: Option<u64>,

    /// Print one JSON object for every evaluation, and one with the results
    #[arg(long)]
    pub(crate) json: bool,

    /// The number type to compute in: f32, or bf16 with f32 sums and statistics [default: the recipe's, else f32]
    #[arg(long, value_parser = parse_dtype)]
    pub(crate) dtype: Option<DType>,

    #[command(flatten)]
    pub(crate) machine: Machine,

    #[command(flatten)]
    pub(crate) together: RankFlags,

    #[command(flatten)]
    pub(crate) labelled: Labelled,
}

/// Named at each of its flags: a heading of the whole would go on to those that follow.
const TAGGER: &str = "A tagger on a frozen encoder (ner, pos, tag)";

// The feature-based approach: a tagger on vectors of chosen layers. (A doc comment would become the command's own.)
#[derive(Args, Debug)]
pub(crate) struct Features {
    /// Which layers it reads: last, -2, embeddings, sum-last-4, mean-last-4, concat-last-4, sum-all, mean-all, all, or
    /// mix-last-4, mix-all and mix-whole (with the embeddings) with learned weights
    #[arg(long, help_heading = TAGGER, value_name = "LAYERS", allow_hyphen_values = true, requires = "frozen")]
    pub(crate) layers: Option<FeatureLayers>,

    /// The tagger on top: linear, or bilstm for a two-layer bidirectional LSTM
    #[arg(long, help_heading = TAGGER, value_name = "HEAD", value_parser = parse_head, requires = "frozen")]
    pub(crate) head: Option<TaggerHead>,

    /// Score the tags of a sentence jointly with a conditional random field (CRF)
    #[arg(long, help_heading = TAGGER, requires = "frozen")]
    pub(crate) crf: bool,
}

impl Finetune {
    /// Whether the command line names dev data, itself or by a directory.
    pub(crate) fn names_dev(&self) -> bool {
        self.dev.is_some() || self.data.is_some()
    }
}

impl Features {
    /// Whether any of it is wanted.
    pub(crate) fn are_wanted(&self) -> bool {
        self.layers.is_some() || self.head.is_some() || self.crf
    }
}

fn parse_head(text: &str) -> Result<TaggerHead, String> {
    match text {
        "linear" => Ok(TaggerHead::Linear),
        "bilstm" => Ok(TaggerHead::Bilstm),
        _ => Err("expected linear or bilstm".to_owned()),
    }
}

#[derive(Args, Debug)]
#[command(after_help = "\
The files are named as the benchmark names them: MRPC.tsv and so on for GLUE, BoolQ.jsonl and so on for SuperGLUE, predictions.json (with nbest_predictions.json \
and null_odds.json) for SQuAD, predictions.conll, predictions.csv for choices, predictions.txt with one line per source for seq2seq, \
predictions.jsonl for everything else. \
`henson eval --predictions` scores them.\n\n\
Examples:\n  henson predict --task mrpc --model run --data glue/MRPC/test.tsv --out submission\n  \
henson predict --task squad2 --model run1,run2,run3 --data dev-v2.0.json --out answers\n  \
henson predict --model run --data new.csv --out labels")]
pub(crate) struct Predict {
    /// The task that the models were trained for [default: from the first one's recipe.toml]
    #[arg(long, value_name = "TASK", value_parser = task_names(&[]))]
    pub(crate) task: Option<String>,

    /// The model; several, separated by commas, are averaged [default: for embed, the one for sentences that comes with
    /// henson]
    #[arg(long, value_name = "DIR,…", value_delimiter = ',')]
    pub(crate) model: Vec<String>,

    /// The file to predict, with or without labels; - is standard input
    #[arg(long, value_name = "FILE")]
    pub(crate) data: PathBuf,

    /// The directory to write to
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,

    /// Replace prediction files that are there
    #[arg(long)]
    pub(crate) overwrite: bool,

    /// Questions without an answer: margin by which "no answer" must beat the best answer [default: the model's own]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub(crate) no_answer: Option<f64>,

    #[command(flatten)]
    pub(crate) length: LengthFlags,

    #[command(flatten)]
    pub(crate) compute: Compute,

    #[command(flatten)]
    pub(crate) labelled: Labelled,
}
