//! What can be typed. The texts here are the help and the reference at once.
#![allow(rustdoc::broken_intra_doc_links, reason = "[MASK] and [default: …] are meant for the terminal")]

pub(crate) mod ablate;
pub(crate) mod data;
pub(crate) mod demo;
pub(crate) mod distil;
pub(crate) mod eval;
pub(crate) mod finetune;
pub(crate) mod generate;
pub(crate) mod labelled;
pub(crate) mod plan;
pub(crate) mod pretrain;
pub(crate) mod probe;
pub(crate) mod ranks;
pub(crate) mod report;
pub(crate) mod search;
pub(crate) mod serve;
pub(crate) mod settings;
pub(crate) mod tasks;
pub(crate) mod tokenizer;

use std::fmt;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand, ValueEnum};
use henson_checkpoint::SaveDType;
use henson_infer::{Length, Model, Pooling};
use henson_tensor::{DType, Device, Isa};

use crate::built_in::BuiltIn;
use crate::launch::Together;

/// The BERT family of language models in one program: train tokenizers, pre-train, fine-tune, evaluate, ask and serve.
#[derive(Parser, Debug)]
#[command(name = "henson", version, max_term_width = 100, arg_required_else_help = true)]
#[command(after_help = "Results go to standard output, messages and progress to standard error.\n\
Exit codes: 0 done, 1 failed with a message, 2 wrong usage, 75 another process of the\n\
same training was lost, 130 interrupted: after a checkpoint, or by a second signal at once.")]
pub(crate) struct Flags {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// Run an end-to-end demo on embedded text: tokenizer, pre-training, fine-tuning, in minutes on two cores
    Demo(demo::Demo),
    /// Train a tokenizer, look at what it does
    Tokenizer(tokenizer::Tokenizer),
    /// Turn text into shards for pre-training, look at instances
    Data(data::Data),
    /// Pre-train a model on shards: masked LM, next sentence, left to right, or as T5 and BART
    #[command(
        after_help = "Examples:\n  henson pretrain --model bert-mini --data shards --out run --set steps=10000\n  \
henson pretrain recipes/bert-base.toml --data shards --out run --dry-run\n  \
henson pretrain --model DIR --data my-domain --out run --epochs 3    (continues from a checkpoint)\n\n\
The same command resumes where the run was stopped, killed or interrupted. Keys of a recipe: steps, epochs, \
batch_size, sequence_length, accumulation, objective (mlm-nsp, mlm-sop, mlm, causal, replaced-tokens), masking (pieces, whole-words, spans, ngrams), \
learning_rate, schedule, warmup_steps, weight_decay, dropout, checkpoint_every, eval_every, …; `henson help settings` \
lists all."
    )]
    Pretrain(pretrain::Pretrain),
    /// Predict what more processes or GPUs would do for a pre-training run: time, memory, communication, and where it stops paying
    Plan(plan::Plan),
    /// Fine-tune a model on labelled data: GLUE, SQuAD, entities, multiple choice, or your own tables
    Finetune(finetune::Finetune),
    /// Distil fine-tuned models into a smaller one, on labelled data, on plain text, or by masked language modelling
    Distil(distil::Distil),
    /// Run fine-tuned models on a file and write predictions in the benchmark's format
    Predict(finetune::Predict),
    /// Score a model or its predictions: GLUE, SQuAD and other labelled data, perplexity of a text, minimal pairs
    Eval(eval::Eval),
    /// Probe what the layers of an encoder know: parts of speech, chunks, entities, dependencies, any labelled spans
    Probe(probe::Probe),
    /// Show training runs as one page, side by side
    Report(report::Report),
    /// Run a set of recipes and tabulate what they gave
    #[command(
        after_help = "Example:\n  henson ablate recipes/ablations/masking --data shards --out masking --seeds 0,1,2\n\n\
The same command resumes an interrupted set; finished variants are not run again."
    )]
    Ablate(ablate::Ablate),
    /// Fill the [MASK]s of a text with the likeliest words
    #[command(
        after_help = "Write the model's own mask token, such as <mask> for RoBERTa; `henson info` shows it.\n\nExamples:\n  henson fill 'The capital of France is [MASK].'\n  \
henson fill --model DIR --json --file sentences.txt > words.jsonl\n\n\
Offsets count characters (Unicode code points) from 0, the end not included."
    )]
    Fill(Fill),
    /// Continue texts, or write what an encoder-decoder was trained to write: greedy, beam search, sampling
    Generate(generate::Generate),
    /// Classify texts or text pairs
    Classify(tasks::Classify),
    /// Find the entities in a text, or the parts of speech of its words
    Tag(tasks::Tag),
    /// Answer a question from a passage
    Answer(tasks::Answer),
    /// Pick the best of several choices for a context
    Choose(tasks::Choose),
    /// Rank texts by their relevance to a query, with a cross-encoder
    Rerank(tasks::Rerank),
    /// Search a folder, a text file or a table by meaning
    Search(search::Search),
    /// Find hard negatives for pairs of texts, to train sentence models on
    Mine(search::Mine),
    /// Turn texts into vectors, one each
    #[command(after_help = "Examples:\n  henson embed 'A sentence.' 'Another one.'\n  \
henson embed --model DIR --json --file sentences.txt > vectors.jsonl\n\n\
A directory of sentence-transformers defines how to pool, whether to normalise and how long texts may be; \
flags overrule it. Other models give the mean of their tokens. One call takes one kind of text: embed queries and passages \
in two calls where their prefixes differ.")]
    Embed(Embed),
    /// Write a vector for every token of a text, from the layers of your choice
    #[command(after_help = "Layers: last, embeddings (or 0), 1 … L, -1 (the last), -2, sum-last-N, mean-last-N, \
concat-last-N, sum-all, mean-all, all. Offsets count characters.\n\n\
Examples:\n  henson features --model DIR --layers concat-last-4 'Jim Henson was a puppeteer.' > tokens.jsonl\n  \
henson features --model DIR --file notes.txt --format npy --out notes.npy")]
    Features(Features),
    /// Serve models over HTTP: embeddings, fill, classify, tag, answer; compatible with the Text Embeddings Inference and OpenAI APIs
    Serve(serve::Serve),
    /// Show what a model is: architecture, parameters by group, memory for training and inference
    Info(Info),
    /// Load a model directory and write it again as transformers expects it today
    #[command(after_help = "Reads old names, sharded files and half precision. What a file has beyond the model, or \
lacks, is reported.\n\nExample:\n  henson convert SRC DST --dtype bf16")]
    Convert(Convert),
    /// Measure speed: training steps, inference, matrix multiplication, exchange between processes
    #[command(subcommand)]
    Bench(Bench),
    /// List every setting of recipes and --set: key, default, meaning
    Settings(settings::Settings),
    /// Print a script that completes commands and flags in a shell
    Completions(settings::Completions),
}

/// Which model.
#[derive(Args, Debug, Clone)]
pub(crate) struct ModelName {
    /// A model directory, or org/name from the local Hugging Face cache [default: the model that comes with henson]
    #[arg(long, value_name = "DIR")]
    pub(crate) model: Option<String>,

    /// Fetch org/name from the Hugging Face Hub if it is not in the cache
    #[arg(long)]
    pub(crate) download: bool,
}

impl ModelName {
    /// What it is called in results.
    pub(crate) fn shown(&self) -> &str {
        self.model.as_deref().unwrap_or(BuiltIn::General.name())
    }
}

/// Which texts.
#[derive(Args, Debug, Clone)]
pub(crate) struct Texts {
    /// The texts; without any, one per line from --file or standard input
    #[arg(value_name = "TEXT")]
    pub(crate) texts: Vec<String>,

    /// A file with one text per line, plain or as .gz or .zst; blank lines are skipped, - is standard input
    #[arg(long, value_name = "FILE", conflicts_with = "texts")]
    pub(crate) file: Option<std::path::PathBuf>,
}

/// What to do with long texts.
#[derive(Args, Debug, Clone, Copy)]
pub(crate) struct LengthFlags {
    /// Maximum sequence length in tokens, special tokens included [default: the length used in fine-tuning, otherwise the
    /// model's maximum]
    #[arg(long, value_name = "TOKENS", value_parser = parse_count)]
    pub(crate) max_length: Option<usize>,

    /// Split longer texts into overlapping windows instead of truncating them [default: as in fine-tuning, otherwise no]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) windows: Option<bool>,
}

impl LengthFlags {
    /// What is meant where no head matters.
    pub(crate) fn length(self) -> Length {
        Length { most: self.max_length, windows: self.windows.unwrap_or(false) }
    }

    /// What is meant for the task of a model's head.
    pub(crate) fn of_task(self, model: &Model) -> Length {
        let own = model.task_length();
        Length { most: self.max_length.or(own.most), windows: self.windows.unwrap_or(own.windows) }
    }
}

/// What commands take that ask a model about each of some texts.
#[derive(Args, Debug)]
pub(crate) struct AskTexts {
    #[command(flatten)]
    pub(crate) model: ModelName,

    #[command(flatten)]
    pub(crate) texts: Texts,

    #[command(flatten)]
    pub(crate) length: LengthFlags,

    /// Print one JSON object per text
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) compute: Compute,
}

#[derive(Args, Debug)]
pub(crate) struct Fill {
    /// How many words to show for each [MASK]
    #[arg(long, short = 'k', default_value_t = 5, value_parser = parse_count)]
    pub(crate) top: usize,

    #[command(flatten)]
    pub(crate) ask: AskTexts,
}

const POOLINGS: Values<Pooling> = &[
    ("mean", "The mean of all tokens", Pooling::Mean),
    ("cls", "The first token, [CLS]", Pooling::First),
    ("max", "The largest value of each column", Pooling::Max),
    ("lasttoken", "The last token", Pooling::Last),
    ("weightedmean", "The mean, later tokens weighing more", Pooling::WeightedMean),
    ("mean_sqrt_len_tokens", "The sum over the square root of the number of tokens", Pooling::MeanSqrtLength),
];

#[derive(Args, Debug)]
pub(crate) struct Embed {
    /// How token vectors are pooled [default: as in the directory, otherwise mean]
    #[arg(long, value_parser = among(POOLINGS))]
    pub(crate) pooling: Option<Pooling>,

    /// Scale every vector to length 1 [default: as in the directory, otherwise no]
    #[arg(long, visible_alias = "normalize", value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) normalise: Option<bool>,

    /// What to put before each text, such as 'query: '; docs/families.md lists what popular models expect [default: the
    /// default prompt of the directory, if it has one]
    #[arg(long, visible_aliases = ["query-prefix", "passage-prefix"], value_name = "TEXT", conflicts_with = "prompt_name")]
    pub(crate) prompt: Option<String>,

    /// One of the directory's own prompts, by name; `henson info` lists them
    #[arg(long, value_name = "NAME")]
    pub(crate) prompt_name: Option<String>,

    #[command(flatten)]
    pub(crate) ask: AskTexts,
}

#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FeatureFormat {
    /// One JSON object per text: tokens, offsets, vectors
    Jsonl,
    /// NumPy: all tokens of all texts, one row each; FILE.tokens.jsonl maps rows to tokens
    Npy,
    /// One tensor per text, named 0, 1, …; FILE.tokens.jsonl maps rows to tokens
    Safetensors,
}

#[derive(Args, Debug)]
pub(crate) struct Features {
    #[command(flatten)]
    pub(crate) model: ModelName,

    #[command(flatten)]
    pub(crate) texts: Texts,

    /// Which layers, see below
    #[arg(long, default_value = "last", allow_hyphen_values = true)]
    pub(crate) layers: henson_infer::Layers,

    /// Begin every text with the states that the one before it ended with, as ELMo's authors did; of recurrent models
    #[arg(long)]
    pub(crate) carry_states: bool,

    /// What to write
    #[arg(long, value_enum, default_value = "jsonl")]
    pub(crate) format: FeatureFormat,

    /// Print one JSON object per text; the same as --format jsonl
    #[arg(long, conflicts_with = "format")]
    pub(crate) json: bool,

    /// Where to write; needed for npy and safetensors [default: standard output]
    #[arg(long, value_name = "FILE", required_if_eq_any([("format", "npy"), ("format", "safetensors")]))]
    pub(crate) out: Option<std::path::PathBuf>,

    /// Replace FILE if it exists
    #[arg(long)]
    pub(crate) overwrite: bool,

    #[command(flatten)]
    pub(crate) length: LengthFlags,

    #[command(flatten)]
    pub(crate) compute: Compute,
}

#[derive(Args, Debug)]
pub(crate) struct Info {
    /// A size (bert-tiny … bert-large), a model directory, or org/name from the cache [default: what comes with henson]
    pub(crate) model: Option<String>,

    /// List what this machine can compute on
    #[arg(long, conflicts_with = "model")]
    pub(crate) devices: bool,

    /// Sequences in a batch, for the memory estimate
    #[arg(long, default_value_t = 16, value_parser = parse_count)]
    pub(crate) batch: usize,

    /// Tokens in a sequence, for the memory estimate
    #[arg(long, default_value_t = 128, value_parser = parse_count)]
    pub(crate) seq: usize,

    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

const SAVED_DTYPES: Values<SaveDType> = &[
    ("f32", "Single precision", SaveDType::F32),
    ("bf16", "The upper half of an f32", SaveDType::Bf16),
    ("f16", "IEEE half precision", SaveDType::F16),
];

#[derive(Args, Debug)]
pub(crate) struct Convert {
    /// A model directory, or org/name from the cache
    #[arg(value_name = "SRC")]
    pub(crate) source: String,

    /// The directory to write
    #[arg(value_name = "DST")]
    pub(crate) destination: std::path::PathBuf,

    /// The precision to save in
    #[arg(long, value_parser = among(SAVED_DTYPES), default_value = "f32")]
    pub(crate) dtype: SaveDType,

    /// Replace DST if it is a model directory already
    #[arg(long)]
    pub(crate) overwrite: bool,

    /// Fetch org/name from the Hugging Face Hub if it is not in the cache
    #[arg(long)]
    pub(crate) download: bool,
}

/// Where and how to compute.
#[derive(Args, Debug, Clone)]
pub(crate) struct Compute {
    /// What to compute in
    #[arg(long, value_enum, default_value = "f32")]
    pub(crate) dtype: Arithmetic,

    #[command(flatten)]
    pub(crate) machine: Machine,
}

/// What to compute in.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Arithmetic {
    /// Single precision throughout
    F32,
    /// f32 whose factors are rounded to TF32 (10 bits after the binary point) in matmuls; on a GPU only
    Tf32,
    /// bf16 with f32 sums and statistics
    Bf16,
}

impl fmt::Display for Arithmetic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Arithmetic::F32 => "f32",
            Arithmetic::Tf32 => "tf32",
            Arithmetic::Bf16 => "bf16",
        })
    }
}

/// Where to compute.
#[derive(Args, Debug, Clone)]
pub(crate) struct Machine {
    /// The device to compute on: cpu; cuda, an NVIDIA GPU (the first; of several processes on a machine each takes its own); or cuda:N,
    /// the one with number N
    #[arg(long, default_value = "cpu", value_name = "DEVICE")]
    pub(crate) device: DeviceName,

    /// Threads to use [default: one per physical core that this process may use, within a container's CPU quota]
    #[arg(long, value_parser = parse_threads)]
    pub(crate) threads: Option<usize>,

    /// The kernel set to use: portable, avx2, avx512, avx512bf16, amx, neon, neonbf16 [default: by processor; `henson info --devices` shows which and why]
    #[arg(long, env = "HENSON_KERNELS", value_name = "SET", value_parser = parse_kernels)]
    pub(crate) kernels: Option<Isa>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeviceName {
    /// The processor.
    Cpu,
    /// An NVIDIA GPU, with its number where somebody said it.
    Cuda(Option<usize>),
}

impl std::str::FromStr for DeviceName {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name.split_once(':') {
            None if name == "cpu" => Ok(Self::Cpu),
            None if name == "cuda" => Ok(Self::Cuda(None)),
            Some(("cuda", number)) => match number.parse() {
                Ok(number) => Ok(Self::Cuda(Some(number))),
                Err(_) => Err(format!("`{number}` is not the number of a GPU: expected cuda:0, cuda:1, …")),
            },
            _ => Err("expected cpu, cuda or cuda:N".to_owned()),
        }
    }
}

/// The values of a flag by their names, each with its help.
pub(crate) type Values<T> = &'static [(&'static str, &'static str, T)];

/// Reads one of them.
pub(crate) fn among<T: Copy + Send + Sync>(values: Values<T>) -> impl TypedValueParser<Value = T> {
    let names = values.iter().map(|(name, help, _)| PossibleValue::new(*name).help(*help));
    let value = move |name: String| values.iter().find(|(known, ..)| *known == name).map(|(.., value)| *value);
    PossibleValuesParser::new(names).try_map(move |name| value(name).ok_or("unknown value"))
}

pub(crate) fn parse_dtype(name: &str) -> Result<DType, String> {
    name.parse()
}

/// An empty variable counts as not set.
fn parse_kernels(name: &str) -> Result<Isa, String> {
    if name.is_empty() {
        return Ok(Isa::best());
    }
    name.parse().map_err(|error: henson_tensor::UnsupportedIsa| error.to_string())
}

fn parse_threads(text: &str) -> Result<usize, String> {
    parse_within(text, 1024)
}

/// Sizes and counts of things: at least one, and no more than memory could ever hold.
pub(crate) fn parse_count(text: &str) -> Result<usize, String> {
    parse_within(text, 1 << 24)
}

fn parse_within(text: &str, most: usize) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(n) if (1..=most).contains(&n) => Ok(n),
        _ => Err(format!("expected a whole number from 1 to {most}")),
    }
}

impl Compute {
    /// The device that the flags mean.
    pub(crate) fn device(&self) -> anyhow::Result<Device> {
        self.device_of(None)
    }

    /// The same for one of several processes.
    pub(crate) fn device_of(&self, together: Option<&Together>) -> anyhow::Result<Device> {
        let device = self.machine.device_of(together)?;
        if self.dtype == Arithmetic::Tf32 {
            device.allow_tf32()?;
        }
        Ok(device)
    }

    /// What numbers are stored as.
    pub(crate) fn dtype(&self) -> DType {
        match self.dtype {
            Arithmetic::F32 | Arithmetic::Tf32 => DType::F32,
            Arithmetic::Bf16 => DType::Bf16,
        }
    }
}

impl Machine {
    /// The same for one of several processes, which share the machine's threads.
    pub(crate) fn device_of(&self, together: Option<&Together>) -> anyhow::Result<Device> {
        match (together, self.device, self.threads) {
            (Some(together), DeviceName::Cpu, None) => Ok(Device::cpu(self.kernels, Some(together.threads()))?),
            (Some(together), DeviceName::Cuda(number), _) => together.gpu(number),
            _ => self.device(),
        }
    }

    /// The device that the flags mean.
    pub(crate) fn device(&self) -> anyhow::Result<Device> {
        match self.device {
            DeviceName::Cpu => Ok(Device::cpu(self.kernels, self.threads)?),
            DeviceName::Cuda(number) => crate::gpu::open(number.unwrap_or(0)),
        }
    }
}

#[derive(Subcommand, Debug)]
pub(crate) enum Bench {
    /// Whole training steps of a family's pre-training (masked LM and next sentence, the next token, a target for each source, ELECTRA with
    /// its generator): forward, backward, clipping, the optimizer
    Train(BenchTrain),
    /// The encoder's forward pass
    Infer(BenchModel),
    /// Tokens that a model writes per second
    Generate(generate::BenchGenerate),
    /// Matrix multiplications of the shapes that a model has
    Gemm(BenchGemm),
    /// Batches of pre-training, made from shards without a model behind them
    Data(BenchData),
    /// Tokenize texts, one thread
    Tokenize(BenchTokenize),
    /// What several processes send each other in an update: all-to-all, all-gather and the shared update itself
    #[command(after_help = "Examples:\n  henson bench exchange --model bert-base --ranks 2\n  \
mpirun -n 4 henson bench exchange --model bert-base --json > exchange.json\n\n\
`henson plan --rates exchange.json` predicts by it what more processes would do.")]
    Exchange(BenchExchange),
}

#[derive(Args, Debug)]
pub(crate) struct BenchExchange {
    /// The model whose gradients and weights are exchanged: a size, or a model directory
    #[arg(long, default_value = "bert-mini")]
    pub(crate) model: String,

    /// Rounds to measure; the median counts
    #[arg(long, default_value_t = 5, value_parser = parse_count)]
    pub(crate) steps: usize,

    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) compute: Compute,

    #[command(flatten)]
    pub(crate) together: ranks::RankFlags,
}

#[derive(Args, Debug)]
pub(crate) struct BenchData {
    /// The directory that `henson data build` made
    #[arg(value_name = "DIR")]
    pub(crate) data: std::path::PathBuf,

    /// Sequences in a batch
    #[arg(long, default_value_t = 32, value_parser = parse_count)]
    pub(crate) batch: usize,

    /// Tokens in a sequence
    #[arg(long, default_value_t = 128, value_parser = parse_count)]
    pub(crate) seq: usize,

    /// Batches to make
    #[arg(long, default_value_t = 2000, value_parser = parse_count)]
    pub(crate) steps: usize,

    /// Threads that make them
    #[arg(long, default_value_t = 1, value_parser = parse_threads)]
    pub(crate) threads: usize,

    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct BenchTokenize {
    #[command(flatten)]
    pub(crate) model: ModelName,

    /// A file with one text per line, plain or as .gz or .zst
    #[arg(value_name = "FILE")]
    pub(crate) file: std::path::PathBuf,

    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct BenchTrain {
    #[command(flatten)]
    pub(crate) model: BenchModel,

    /// Batches of a step, each computed alone, whose gradients are added: as `accumulation` parts of a batch are
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = parse_count)]
    pub(crate) parts: usize,

    #[command(flatten)]
    pub(crate) work: BenchWork,

    #[command(flatten)]
    pub(crate) together: ranks::RankFlags,
}

/// What a training step works on.
#[derive(Args, Debug, Default)]
pub(crate) struct BenchWork {
    /// Encoder-decoders: tokens of each target; --seq are those of its source [default: as many]
    #[arg(long, value_name = "TOKENS", value_parser = parse_count)]
    pub(crate) target: Option<usize>,

    /// A file with the length of one sequence per line, which batches of --batch sequences take in their order, instead of --seq
    #[arg(long, value_name = "FILE", conflicts_with = "seq", conflicts_with = "target")]
    pub(crate) lengths: Option<std::path::PathBuf>,

    /// The optimizer: adamw, adamw-paper, stable-adamw, lamb, sgd, adagrad, adafactor
    #[arg(long, default_value = "adamw", value_parser = parse_optimizer)]
    pub(crate) optimizer: henson_train::OptimizerKind,
}

fn parse_optimizer(text: &str) -> Result<henson_train::OptimizerKind, String> {
    serde_json::from_value(text.into()).map_err(|error| error.to_string())
}

#[derive(Args, Debug)]
pub(crate) struct BenchModel {
    /// A size (bert-tiny, bert-mini, bert-small, bert-medium, bert-base, bert-large, electra-base, …) or a model directory
    #[arg(long, default_value = "bert-mini")]
    pub(crate) model: String,

    /// Sequences in a batch; of several processes, in each one's part of it
    #[arg(long, default_value_t = 16, value_parser = parse_count)]
    pub(crate) batch: usize,

    /// Tokens in a sequence
    #[arg(long, default_value_t = 128, value_parser = parse_count)]
    pub(crate) seq: usize,

    /// Steps to measure; the median counts
    #[arg(long, default_value_t = 5, value_parser = parse_count)]
    pub(crate) steps: usize,

    /// Steps before measuring
    #[arg(long, default_value_t = 3)]
    pub(crate) warmup: usize,

    /// Show the time of each kind of operation in one step next to its lower bound from FLOPs and bytes
    #[arg(long)]
    pub(crate) profile: bool,

    /// The seed of weights, tokens and dropout
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,

    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) compute: Compute,
}

#[derive(Args, Debug)]
pub(crate) struct BenchGemm {
    /// The model whose shapes to multiply
    #[arg(long, default_value = "bert-base")]
    pub(crate) model: String,

    /// Tokens: the rows of the left operand
    #[arg(long, default_value_t = 2048, value_parser = parse_count)]
    pub(crate) tokens: usize,

    /// Print one JSON object per product
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) compute: Compute,
}
