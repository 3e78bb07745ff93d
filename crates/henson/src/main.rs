//! henson: one binary that pre-trains, fine-tunes, evaluates and serves the BERT family.
//!
//! Only this crate prints, reads the environment or exits. Flags are read in two stages: what was typed ([`flags`]),
//! then what it means, built once by each command.
#![forbid(unsafe_code)]

mod built_in;
mod commands;
mod flags;
mod gpu;
mod input;
mod launch;
mod models;
mod output;
mod signals;

use clap::{CommandFactory, FromArgMatches};

fn main() -> std::process::ExitCode {
    // The settings of recipes are known from their types alone.
    let command =
        flags::Flags::command().mut_subcommand("settings", |settings| settings.after_help(commands::settings::help()));
    let parsed = command.try_get_matches().and_then(|matches| flags::Flags::from_arg_matches(&matches));
    let flags = match parsed {
        Ok(flags) => flags,
        Err(error) => return output::report_usage(&error),
    };
    match commands::run(flags) {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => output::report_error(&error),
    }
}
