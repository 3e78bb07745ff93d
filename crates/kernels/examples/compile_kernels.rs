//! Compiles every kernel source for every target that matters, without a GPU, and says how large each came out.
//!
//! Usage: `compile_all [--libraries DIR]... [--cache DIR] [--verbose] [ARCH]...`; the default targets are 8.0, 9.0 and, where
//! the compiler knows it, 10.0. `--verbose` also prints each kernel's registers and spills.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program that talks to people")]

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use henson_kernels::cuda::compile::{Architecture, Compiler};
use henson_kernels::cuda::{CudaError, SOURCES, Search};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), CudaError> {
    let (mut search, mut cache, mut verbose, mut wanted) = (Search::default(), None, false, Vec::new());
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--libraries" => search.extra.extend(arguments.next().map(PathBuf::from)),
            "--cache" => cache = arguments.next().map(PathBuf::from),
            "--verbose" => verbose = true,
            other => wanted.extend(other.split_once('.').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)))),
        }
    }
    let compiler = Compiler::new(&search, cache)?;
    let known = compiler.architectures();
    let wanted: Vec<(i32, i32)> = if wanted.is_empty() { vec![(8, 0), (9, 0), (10, 0)] } else { wanted };
    for architecture in wanted.into_iter().map(|(major, minor)| Architecture::of(major, minor)) {
        if !known.contains(&architecture) {
            println!("{}: not known to NVRTC {}", architecture.name(), compiler.version());
            continue;
        }
        for source in SOURCES {
            for variant in source.all_variants() {
                let start = Instant::now();
                let code = compiler.machine_code(source, &variant, &architecture)?;
                let (seconds, target) = (start.elapsed().as_secs_f64(), architecture.name());
                println!("{target} {:<16} {:>6} bytes in {seconds:.2} s  {variant}", source.name, code.len());
                if verbose {
                    println!("{}", compiler.resources(source, &variant, &architecture)?);
                }
            }
        }
    }
    Ok(())
}
