//! Checks the CUDA kernels on the GPU at hand against the CPU's references, with HENSON_TEST_CUDA set as for all tests of a GPU; and
//! measures them against what the memory and the matrix units can do.
//!
//! Usage: `cargo test --release -p henson-kernels --test cuda -- [suite|bench|all] [--only NAME] [--small] [--libraries DIR]...
//! [--cache DIR] [--choices FILE]`, by default the suite. `--small` leaves out the large shapes, for tools that slow everything down.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program that talks to people")]

mod adafactor;
mod additive;
mod attention;
mod bench;
mod characters;
mod check;
mod crf;
mod described;
mod disentangled;
mod elements;
mod normalisation;
mod product_hopper;
mod products;
mod recurrent;
mod training;
mod xl;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use check::Checks;
use henson_kernels::cuda::{Gpu, Options, Result};

/// What the command line says.
#[derive(Default)]
struct Settings {
    mode: String,
    only: Option<String>,
    small: bool,
    options: Options,
    choices: Option<PathBuf>,
}

fn settings() -> Settings {
    let mut settings = Settings { mode: "suite".into(), ..Settings::default() };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--only" => settings.only = arguments.next(),
            "--small" => settings.small = true,
            "--libraries" => settings.options.search.extra.extend(arguments.next().map(PathBuf::from)),
            "--cache" => settings.options.cache = arguments.next().map(PathBuf::from),
            "--choices" => settings.choices = arguments.next().map(PathBuf::from),
            mode => settings.mode = mode.into(),
        }
    }
    settings
}

fn main() -> ExitCode {
    if std::env::var_os("HENSON_TEST_CUDA").is_none() {
        println!("no kernel of a GPU is tested: HENSON_TEST_CUDA is not set");
        return ExitCode::SUCCESS;
    }
    match run(&settings()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(settings: &Settings) -> Result<bool> {
    let start = Instant::now();
    let gpu = Gpu::new(&settings.options)?;
    println!("{gpu}, {}, ready in {:.2} s", gpu.architecture().name(), start.elapsed().as_secs_f64());
    let mut good = true;
    if settings.mode != "bench" {
        good = suite(&gpu, settings)?;
    }
    if settings.mode != "suite" {
        let only = settings.only.as_deref();
        if only != Some("product_hopper") && only != Some("attention_f32") {
            bench::run(&gpu, only, settings.choices.as_deref())?;
        }
        if only.is_none_or(|only| only == "product_hopper") {
            product_hopper::bench(&gpu)?;
        }
        if only.is_none_or(|only| only == "attention") {
            attention::bench(&gpu)?;
        }
        if only == Some("attention_f32") {
            attention::bench_f32(&gpu)?;
        }
        if only.is_none_or(|only| only == "described") {
            described::bench(&gpu)?;
        }
        if only.is_none_or(|only| only == "backward") {
            described::backward_bench(&gpu)?;
        }
        if only.is_none_or(|only| only == "disentangled") {
            disentangled::bench(&gpu)?;
        }
        if only.is_none_or(|only| only == "xl") {
            xl::bench(&gpu)?;
        }
        if only.is_none_or(|only| only == "recurrent") {
            recurrent::bench(&gpu)?;
        }
    }
    Ok(good)
}

/// A group of checks.
type Group = fn(&mut Checks<'_>) -> Result<()>;

const GROUPS: [(&str, Group); 35] = [
    ("memory", training::memory),
    ("dropout", normalisation::dropout),
    ("activation", elements::activation),
    ("cast", elements::cast),
    ("plain", elements::plain),
    ("reduce", elements::reduce),
    ("layer_norm", normalisation::layer_norm),
    ("embedding", normalisation::embedding),
    ("rotary", normalisation::rotary),
    ("rows", normalisation::rows),
    ("sort", normalisation::sort),
    ("cross_entropy", training::cross_entropy),
    ("heads", training::heads),
    ("sample", training::sample),
    ("replace", training::replace),
    ("optimizer", training::optimizer),
    ("adafactor", adafactor::all),
    ("shards", training::shards),
    ("faults", training::faults),
    ("products", products::products),
    ("choices", products::choices),
    ("product_hopper", product_hopper::product_hopper),
    ("graph", training::graph),
    ("attention", attention::attention),
    ("attention_f32", attention::attention_f32),
    ("described", described::described),
    ("long", described::long),
    ("described_f32", described::described_f32),
    ("cache", described::cache),
    ("disentangled", disentangled::disentangled),
    ("xl", xl::xl),
    ("recurrent", recurrent::recurrent),
    ("characters", characters::characters),
    ("crf", crf::crf),
    ("additive", additive::additive),
];

fn suite(gpu: &Gpu, settings: &Settings) -> Result<bool> {
    let (mut count, mut failures) = (0, Vec::new());
    for (name, group) in GROUPS {
        if settings.only.as_ref().is_some_and(|only| only != name) {
            continue;
        }
        let start = Instant::now();
        let mut checks = Checks::new(gpu, settings.small);
        let outcome = group(&mut checks);
        println!(
            "{name:<14} {:>5} checks, {} failed, worst error f32 {:.1e}, bf16 {:.1e}, {:.2} s",
            checks.count,
            checks.failures.len(),
            checks.worst[0],
            checks.worst[1],
            start.elapsed().as_secs_f64(),
        );
        checks.failures.iter().take(12).for_each(|failure| println!("    {failure}"));
        count += checks.count;
        failures.append(&mut checks.failures);
        if let Err(error) = outcome {
            // A broken context fails every later call too, so nothing more can be learnt.
            println!("    {name} stopped: {error}");
            return Ok(false);
        }
    }
    println!("suite: {count} checks, {} failed", failures.len());
    Ok(failures.is_empty())
}
