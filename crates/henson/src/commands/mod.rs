//! One file a command: flags → settings → one call.

mod bench;
mod convert;
mod embed;
mod features;
mod fill;
mod info;

use crate::flags::{Command, Flags};

pub(crate) fn run(flags: Flags) -> anyhow::Result<()> {
    match flags.command {
        Command::Fill(flags) => fill::run(&flags),
        Command::Embed(flags) => embed::run(&flags),
        Command::Features(flags) => features::run(&flags),
        Command::Info(flags) => info::run(&flags),
        Command::Convert(flags) => convert::run(&flags),
        Command::Bench(bench) => bench::run(bench),
    }
}
