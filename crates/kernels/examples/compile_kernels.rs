//! Compiles every kernel source for every target that matters, without a GPU, and says how large each came out.
//!
//! Usage: `compile_kernels [--libraries DIR]... [--cache DIR] [--verbose|--quiet] [--only SOURCE] [ARCH]...`; the default targets are 8.0, 9.0 and, where
//! the compiler knows it, 10.0. `--verbose` also prints each kernel's registers and spills,
//! `--quiet` one line for each target.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program that talks to people")]

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
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
    let (mut search, mut cache, mut verbose, mut quiet) = (Search::default(), None, false, false);
    let (mut wanted, mut only) = (Vec::new(), None);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--libraries" => search.extra.extend(arguments.next().map(PathBuf::from)),
            "--cache" => cache = arguments.next().map(PathBuf::from),
            "--verbose" => verbose = true,
            "--quiet" => quiet = true,
            "--only" => only = arguments.next(),
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
        let start = Instant::now();
        let sources = SOURCES.into_iter().filter(|s| only.as_ref().is_none_or(|only| only == s.name));
        let jobs: Vec<_> = sources.clone().flat_map(|s| s.all_variants().into_iter().map(move |v| (s, v))).collect();
        let next = AtomicUsize::new(0);
        let work = || -> Result<(), CudaError> {
            while let Some((source, variant)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                let start = Instant::now();
                let code = compiler.machine_code(source, variant, &architecture)?;
                if !quiet {
                    let (seconds, target) = (start.elapsed().as_secs_f64(), architecture.name());
                    println!("{target} {:<16} {:>6} bytes in {seconds:.2} s  {variant}", source.name, code.len());
                }
                if verbose {
                    println!("{}", compiler.resources(source, variant, &architecture)?);
                }
            }
            Ok(())
        };
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            workers
                .into_iter()
                .try_for_each(|worker| worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        })?;
        println!("{}: {} kernels in {:.1} s", architecture.name(), jobs.len(), start.elapsed().as_secs_f64());
    }
    Ok(())
}
