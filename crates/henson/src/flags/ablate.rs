//! The flags of `henson ablate`.

use std::path::PathBuf;

use clap::Args;

use super::Machine;
use super::settings::RecipeFlags;

#[derive(Args, Debug)]
pub(crate) struct Ablate {
    /// A directory of recipes: base.toml holds what they share, every other .toml is a variant
    #[arg(value_name = "SET")]
    pub(crate) set: PathBuf,

    /// The directory that `henson data build` made
    #[arg(long, value_name = "DIR")]
    pub(crate) data: String,

    /// Where the runs go, one directory each, with results.json, table.md and report.html
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,

    #[command(flatten)]
    pub(crate) settings: RecipeFlags,

    /// Run every variant with each of these seeds
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "0")]
    pub(crate) seeds: Vec<u64>,

    /// Score every model on minimal pairs, too: BLiMP's jsonl, plain, .gz or .zst
    #[arg(long, value_name = "FILE")]
    pub(crate) blimp: Option<PathBuf>,

    /// Pairs of each of BLiMP's paradigms; all without it
    #[arg(long, value_name = "N", requires = "blimp", value_parser = super::parse_count)]
    pub(crate) blimp_limit: Option<usize>,

    /// Print one JSON object per variant
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) machine: Machine,
}
