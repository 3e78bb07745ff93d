//! The flags of `henson demo`.

use std::path::PathBuf;

use clap::Args;

use super::Machine;

#[derive(Args, Debug)]
pub(crate) struct Demo {
    /// Where everything goes: tokenizer, shards, the pre-trained model with its report; an interrupted demo resumes there
    #[arg(long, value_name = "DIR", default_value = "henson-demo")]
    pub(crate) out: PathBuf,

    /// Set a value of the demo's recipe, as in `henson pretrain`: steps=500 makes it shorter, and worse
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub(crate) sets: Vec<String>,

    /// Print one JSON object with all results
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) machine: Machine,
}
