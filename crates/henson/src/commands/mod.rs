//! One file a command: flags → settings → one call.

mod bench;

use crate::flags::{Command, Flags};

pub(crate) fn run(flags: Flags) -> anyhow::Result<()> {
    match flags.command {
        Command::Bench(bench) => bench::run(bench),
    }
}
