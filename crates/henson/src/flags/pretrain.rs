//! The flags of `henson pretrain`.

use std::path::PathBuf;

use clap::Args;

use henson_tensor::DType;

use super::ranks::RankFlags;
use super::settings::RecipeFlags;
use super::{Machine, parse_count, parse_dtype};

#[derive(Args, Debug)]
pub(crate) struct Pretrain {
    /// A recipe (TOML); if omitted, defaults and flags are used
    #[arg(value_name = "RECIPE")]
    pub(crate) recipe: Option<PathBuf>,

    /// The run's directory: the finished model, with recipe.toml, metrics.jsonl, report.html and checkpoints/ next to it
    #[arg(long, value_name = "DIR", required_unless_present = "dry_run")]
    pub(crate) out: Option<PathBuf>,

    /// A size (bert-tiny, bert-mini, bert-small, bert-medium, bert-base, bert-large, or one of another family such as
    /// electra-small), or a model to continue from: its directory, or henson-12m, which comes with henson
    #[arg(long, value_name = "M")]
    pub(crate) model: Option<String>,

    /// The directory that `henson data build` made
    #[arg(long, value_name = "DIR")]
    pub(crate) data: Option<String>,

    #[command(flatten)]
    pub(crate) settings: RecipeFlags,

    /// The seed of initial weights, instances and dropout [default: the recipe's, else 0]
    #[arg(long)]
    pub(crate) seed: Option<u64>,

    /// Show what would run, with estimates of memory and time on this machine, and write nothing
    #[arg(long)]
    pub(crate) dry_run: bool,

    /// Put the sample texts that are drawn from held-out text into metrics.jsonl, tensorboard/ and report.html, too
    #[arg(long)]
    pub(crate) samples_in_report: bool,

    /// Stop after this step with a checkpoint; the same command without it resumes
    #[arg(long, value_name = "STEP")]
    pub(crate) stop_at: Option<u64>,

    /// Threads that make batches [default: 1]
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = parse_count)]
    pub(crate) loader_threads: usize,

    /// On a GPU, use the matmul algorithms of an earlier run, for the same bits: the cuda-products.txt in its directory
    #[arg(long, value_name = "FILE", alias = "products")]
    pub(crate) matmul_choices: Option<PathBuf>,

    /// Print one JSON object for every line of the log
    #[arg(long)]
    pub(crate) json: bool,

    /// The number type to compute in: f32, or bf16 with f32 sums and statistics [default: the recipe's, else f32]
    #[arg(long, value_parser = parse_dtype)]
    pub(crate) dtype: Option<DType>,

    #[command(flatten)]
    pub(crate) machine: Machine,

    #[command(flatten)]
    pub(crate) together: RankFlags,
}
