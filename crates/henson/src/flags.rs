//! What can be typed. The texts here are the help and the reference at once.

use clap::{Args, Parser, Subcommand, ValueEnum};
use henson_tensor::{DType, Device, Isa};

/// Pre-trains, fine-tunes, distils, evaluates and serves the BERT family of language models.
#[derive(Parser, Debug)]
#[command(name = "henson", version, max_term_width = 100, arg_required_else_help = true)]
#[command(after_help = "Results go to standard output, messages and progress to standard error.\n\
Exit codes: 0 done, 1 failed with a message, 2 wrong usage, 130 interrupted after a checkpoint.")]
pub(crate) struct Flags {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// Measure speed: training steps, inference, matrix products
    #[command(subcommand)]
    Bench(Bench),
}

/// Where and how to compute.
#[derive(Args, Debug, Clone)]
pub(crate) struct Compute {
    /// The device to compute on
    #[arg(long, value_enum, default_value = "cpu")]
    pub(crate) device: DeviceName,

    /// The number type to compute in: f32, or bf16 with f32 sums and statistics
    #[arg(long, default_value = "f32", value_parser = parse_dtype)]
    pub(crate) dtype: DType,

    /// Threads to use [default: all cores]
    #[arg(long)]
    pub(crate) threads: Option<usize>,

    /// The kernel set to use: portable, avx2, avx512, avx512bf16 [default: the best of this machine]
    #[arg(long, env = "HENSON_KERNELS", value_name = "SET")]
    pub(crate) kernels: Option<String>,
}

#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeviceName {
    /// The processor
    Cpu,
    /// An NVIDIA GPU
    Cuda,
}

fn parse_dtype(name: &str) -> Result<DType, String> {
    name.parse()
}

impl Compute {
    /// The device that the flags mean.
    pub(crate) fn device(&self) -> anyhow::Result<Device> {
        anyhow::ensure!(
            self.device == DeviceName::Cpu,
            "this version of henson has no CUDA engine yet: use --device cpu"
        );
        anyhow::ensure!(self.threads != Some(0), "--threads 0: at least one thread is needed");
        let isa = self.kernels.as_deref().map(str::parse::<Isa>).transpose()?;
        Ok(Device::cpu(isa, self.threads)?)
    }
}

#[derive(Subcommand, Debug)]
pub(crate) enum Bench {
    /// Whole training steps of masked LM and next sentence: forward, backward, clipping, AdamW
    Train(BenchModel),
    /// The encoder's forward pass
    Infer(BenchModel),
    /// Matrix products of the shapes that a model has
    Gemm(BenchGemm),
}

#[derive(Args, Debug)]
pub(crate) struct BenchModel {
    /// A size (bert-tiny, bert-mini, bert-small, bert-medium, bert-base, bert-large) or a model directory
    #[arg(long, default_value = "bert-mini")]
    pub(crate) model: String,

    /// Sequences in a batch
    #[arg(long, default_value_t = 16)]
    pub(crate) batch: usize,

    /// Tokens in a sequence
    #[arg(long, default_value_t = 128)]
    pub(crate) seq: usize,

    /// Steps to measure; the median counts
    #[arg(long, default_value_t = 5)]
    pub(crate) steps: usize,

    /// Steps before measuring
    #[arg(long, default_value_t = 3)]
    pub(crate) warmup: usize,

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
    #[arg(long, default_value_t = 2048)]
    pub(crate) tokens: usize,

    /// Print one JSON object a product
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) compute: Compute,
}
