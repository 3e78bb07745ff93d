//! The flags of `henson ablate`.

use std::path::PathBuf;

use clap::Args;

use super::Machine;
use super::labelled::task_names;
use super::settings::RecipeFlags;

#[derive(Args, Debug)]
#[command(after_help = "\
The same command resumes a set that was interrupted; what is finished is not run again.\n\n\
Examples:\n  henson ablate recipes/ablations/masking --data corpus --out masking\n  \
henson ablate families --data corpus --out families --seeds 0,1 --finetune cola,sst2,mrpc,stsb,rte,qqp,squad1 \
--finetune-data glue --finetune-data squad --finetune-set qqp.limit=20000 --restarts 3")]
pub(crate) struct Ablate {
    /// A directory of recipes: base.toml holds what they share, every other .toml is a variant
    #[arg(value_name = "SET")]
    pub(crate) set: PathBuf,

    /// The directory that `henson data build` made; for variants with a `data` of their own, the one that holds theirs
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

    /// Fine-tune every model on these tasks as well, and tabulate their dev scores
    #[arg(long, value_name = "TASK,…", value_delimiter = ',', value_parser = task_names(&[]), requires = "finetune_data")]
    pub(crate) finetune: Vec<String>,

    /// A directory with files of these tasks, as for `finetune --data`; given several times, the first one that has a task's
    #[arg(long, value_name = "DIR", requires = "finetune")]
    pub(crate) finetune_data: Vec<PathBuf>,

    /// Fine-tune N times on each task, with the seeds from 0 on [default: 1]
    #[arg(long, value_name = "N", requires = "finetune", value_parser = super::parse_count)]
    pub(crate) restarts: Option<usize>,

    /// Set a value of the fine-tuning, such as epochs=3; TASK.KEY=VALUE sets it for one task, such as qqp.limit=20000
    #[arg(long, value_name = "KEY=VALUE", requires = "finetune")]
    pub(crate) finetune_set: Vec<String>,

    /// Print one JSON object per variant
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) machine: Machine,
}
