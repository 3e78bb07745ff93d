//! henson: one binary that pre-trains, fine-tunes, distils, evaluates and serves the BERT family.
//!
//! Only this crate prints, reads the environment or exits. Flags are read in two stages: what was typed ([`flags`]),
//! then what it means, built once by each command.
#![forbid(unsafe_code)]

mod built_in;
mod commands;
mod flags;
mod gpu;
mod input;
mod models;
mod output;
mod signals;

use clap::Parser;

fn main() -> std::process::ExitCode {
    let flags = match flags::Flags::try_parse() {
        Ok(flags) => flags,
        Err(error) => return output::report_usage(&error),
    };
    match commands::run(flags) {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => output::report_error(&error),
    }
}
