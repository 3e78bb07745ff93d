//! `henson data`: documents into shards, and a look at them.

mod build;
mod export;
mod show;
mod stats;

use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use henson_data::{Corpus, Instances, Split};
use henson_text::Tokenizer;

use crate::flags::data::{Data, DataAction, InstanceFlags};

pub(crate) fn run(flags: &Data) -> anyhow::Result<()> {
    match &flags.action {
        DataAction::Build(flags) => build::run(flags),
        DataAction::Stats(flags) => stats::run(flags),
        DataAction::Show(flags) => show::run(flags),
        DataAction::Export(flags) => export::run(flags),
    }
}

/// The instances of a corpus, and its tokenizer.
fn instances(data: &Path, flags: &InstanceFlags) -> anyhow::Result<(Arc<Instances>, Tokenizer)> {
    let corpus = Corpus::open(data, if flags.held_out { Split::HeldOut } else { Split::Train })?;
    let tokenizer = tokenizer(&corpus)?;
    let template = tokenizer.template().clone();
    Ok((Arc::new(Instances::new(Arc::new(corpus), template, flags.settings(), flags.seed)?), tokenizer))
}

/// The tokenizer that a corpus was built with.
pub(crate) fn tokenizer(corpus: &Corpus) -> anyhow::Result<Tokenizer> {
    Ok(Tokenizer::open(corpus.tokenizer_directory().context("the corpus has no tokenizer")?)?)
}

fn all_cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}
