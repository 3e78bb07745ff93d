//! One file a command: flags → settings → one call.

mod ablate;
mod answer;
mod bench;
mod bench_exchange;
mod bench_generate;
mod choose;
mod classify;
mod convert;
mod data;
mod demo;
mod embed;
pub(crate) mod eval;
mod features;
mod fill;
mod finetune;
mod generate;
pub(crate) mod info;
mod mine;
mod plan;
mod predict;
pub(crate) mod pretrain;
mod probe;
mod report;
mod rerank;
mod search;
mod serve;
pub(crate) mod settings;
mod tag;
mod tokenizer;
mod vectors;

use crate::flags::{Command, Flags};
use crate::output;

pub(crate) fn run(flags: Flags) -> anyhow::Result<()> {
    match flags.command {
        Command::Demo(flags) => demo::run(&flags),
        Command::Tokenizer(flags) => tokenizer::run(&flags),
        Command::Data(flags) => data::run(&flags),
        Command::Pretrain(flags) => pretrain::run(&flags),
        Command::Plan(flags) => plan::run(&flags),
        Command::Finetune(flags) => finetune::run(&flags),
        Command::Distil(flags) => finetune::distil::run(&flags),
        Command::Predict(flags) => predict::run(&flags),
        Command::Eval(flags) => eval::run(&flags),
        Command::Probe(flags) => probe::run(&flags),
        Command::Report(flags) => report::run(&flags),
        Command::Ablate(flags) => ablate::run(&flags),
        Command::Fill(flags) => fill::run(&flags),
        Command::Generate(flags) => generate::run(&flags),
        Command::Classify(flags) => classify::run(&flags),
        Command::Tag(flags) => tag::run(&flags),
        Command::Answer(flags) => answer::run(&flags),
        Command::Choose(flags) => choose::run(&flags),
        Command::Rerank(flags) => rerank::run(&flags),
        Command::Search(flags) => search::run(&flags),
        Command::Mine(flags) => mine::run(&flags),
        Command::Embed(flags) => embed::run(&flags),
        Command::Features(flags) => features::run(&flags),
        Command::Serve(flags) => serve::run(&flags),
        Command::Info(flags) => info::run(&flags),
        Command::Convert(flags) => convert::run(&flags),
        Command::Bench(bench) => bench::run(bench),
        Command::Settings(flags) => settings::run(&flags),
        Command::Completions(flags) => output::completions(flags.shell),
    }
}
