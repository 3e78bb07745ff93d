//! The flags of `henson plan`.

use std::path::PathBuf;

use clap::{ArgGroup, Args};
use henson_tensor::DType;

use super::settings::RecipeFlags;
use super::{parse_count, parse_dtype};

#[derive(Args, Debug)]
#[command(group(ArgGroup::new("machines").required(true).args(["ranks", "gpus"])))]
#[command(after_help = "Examples:\n  \
henson bench train --model bert-base --profile --json > rates.jsonl\n  \
mpirun -n 2 henson bench exchange --model bert-base --json >> rates.jsonl\n  \
henson plan recipe.toml --ranks 64 --rates rates.jsonl\n  \
henson plan recipes/bert-base.toml --gpus 1024\n\n\
A model of the run, not a measurement: every number that it rests on is listed as measured or assumed.")]
pub(crate) struct Plan {
    /// A recipe of `henson pretrain` (TOML); if omitted, defaults and flags are used
    #[arg(value_name = "RECIPE")]
    pub(crate) recipe: Option<PathBuf>,

    /// Numbers of processes on CPUs, over MPI: one number stands for the powers of two up to it, several for themselves
    #[arg(long, value_name = "N,…", value_delimiter = ',', value_parser = parse_count)]
    pub(crate) ranks: Vec<usize>,

    /// The same for GPUs, one process each. A prediction for a version that trains on several: this one does not
    #[arg(long, value_name = "N,…", value_delimiter = ',', value_parser = parse_count)]
    pub(crate) gpus: Vec<usize>,

    /// A file of what `bench train --json` (with --profile also the optimizer's share) and `bench exchange --json` printed on
    /// machines like those; may be given several times
    #[arg(long, value_name = "FILE")]
    pub(crate) rates: Vec<PathBuf>,

    /// Tokens that forward and backward of one process take per second, instead of what --rates has
    #[arg(long, value_name = "TOKENS", value_parser = parse_rate)]
    pub(crate) tokens_per_second: Option<f64>,

    /// Processes or GPUs of a machine [default: 8 GPUs; as many processes as `bench exchange` had on one, otherwise 1]
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub(crate) per_node: Option<usize>,

    /// GB/s that each sends, and receives at the same time, within a machine [default: what `bench exchange` measured on one]
    #[arg(long, value_name = "GB/S", value_parser = parse_rate)]
    pub(crate) inside: Option<f64>,

    /// The same between machines [default: what `bench exchange` measured on several]
    #[arg(long, value_name = "GB/S", value_parser = parse_rate)]
    pub(crate) network: Option<f64>,

    /// A size or a model to continue from, as in `henson pretrain`
    #[arg(long, value_name = "M")]
    pub(crate) model: Option<String>,

    /// The directory that `henson data build` made. Only a recipe in epochs needs it; without it, the vocabulary is that of the
    /// model's size
    #[arg(long, value_name = "DIR")]
    pub(crate) data: Option<String>,

    #[command(flatten)]
    pub(crate) settings: RecipeFlags,

    /// The number type to compute in: f32, or bf16 with f32 sums and statistics [default: the recipe's, else f32]
    #[arg(long, value_parser = parse_dtype)]
    pub(crate) dtype: Option<DType>,

    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

fn parse_rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate > 0.0 && rate <= 1e12 => Ok(rate),
        _ => Err("expected a number above 0, and at most 1e12".to_owned()),
    }
}
