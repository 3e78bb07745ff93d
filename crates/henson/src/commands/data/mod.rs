//! `henson data`: documents into shards, and a look at them.

mod build;
mod export;
mod show;
mod stats;

use std::path::Path;
use std::sync::Arc;

use henson_data::{Corpus, Instances, Split};

use crate::flags::data::{Data, DataAction, InstanceFlags};

pub(crate) fn run(flags: &Data) -> anyhow::Result<()> {
    match &flags.action {
        DataAction::Build(flags) => build::run(flags),
        DataAction::Stats(flags) => stats::run(flags),
        DataAction::Show(flags) => show::run(flags),
        DataAction::Export(flags) => export::run(flags),
    }
}

/// The instances of a corpus.
fn instances(data: &Path, flags: &InstanceFlags) -> anyhow::Result<Arc<Instances>> {
    let corpus = Corpus::open(data, if flags.held_out { Split::HeldOut } else { Split::Train })?;
    Ok(Arc::new(Instances::new(Arc::new(corpus), flags.settings(), flags.seed)?))
}

fn all_cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}
