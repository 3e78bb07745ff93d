//! The one door for all checks: `cargo xtask ci` is what a contributor, the README and the CI machine run alike.
//!
//! Each step is a function of the [`Workspace`] and can be run alone. The checks themselves belong to cargo; only what
//! cargo does not know stands here: the direction of dependencies, the model that tests need, the documents' commands.
#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a tool for the terminal")]

mod arm;
mod baseline;
mod emulator;
mod faults;
mod granite;
mod kernels;
mod layers;
mod licences;
mod minilm;
mod netfaults;
mod ranks;
mod readme;
mod strace;
mod unsound;
mod wheel;
mod workspace;

use std::process::ExitCode;
use std::time::Instant;

use workspace::Workspace;

/// What a step returns: an error is one message, complete with what to do about it.
type Result<T = (), E = String> = std::result::Result<T, E>;

struct Step {
    name: &'static str,
    /// One line for the help text.
    what: &'static str,
    run: Run,
}

/// How a step is run.
enum Run {
    Plain(fn(&Workspace) -> Result),
    /// With what stands after its name; in `ci`, nothing.
    WithOptions(fn(&Workspace, &[String]) -> Result),
}
use Run::{Plain, WithOptions};

/// The steps of `ci`, those that fail fastest first.
const CI: [Step; 10] = [
    Step { name: "fmt", what: "the code is formatted", run: Plain(fmt) },
    Step { name: "layers", what: "crates depend on each other only in the allowed direction", run: Plain(layers::run) },
    Step { name: "licences", what: "dependencies' licences, sources and bans", run: Plain(licences::run) },
    Step { name: "clippy", what: "no lint warns", run: Plain(clippy) },
    Step { name: "test", what: "all tests pass; fetches MiniLM and granite first", run: Plain(test) },
    Step { name: "kernels", what: "the CUDA kernels compile; fetches NVRTC first", run: Plain(kernels::run) },
    Step { name: "doc", what: "the API documentation builds without a warning", run: Plain(doc) },
    Step {
        name: "readme",
        what: "the documents' links lead somewhere and their commands work",
        run: Plain(readme::run),
    },
    Step { name: "faults", what: faults::WHAT, run: WithOptions(faults::run) },
    Step { name: "ranks", what: ranks::WHAT, run: WithOptions(ranks::run) },
];

/// Steps that are part of another one in `ci`, and those that need more than the CI machine has.
const ALONE: [Step; 8] = [
    Step { name: "minilm", what: "fetches all-MiniLM-L6-v2 and prints its directory", run: Plain(minilm::run) },
    Step {
        name: "granite",
        what: "fetches granite-embedding-30m-english and prints its directory",
        run: Plain(granite::run),
    },
    Step { name: "emulator", what: emulator::WHAT, run: WithOptions(emulator::run) },
    Step { name: "sanitize", what: "AddressSanitizer on the kernels' tests", run: Plain(unsound::sanitize) },
    Step { name: "arm", what: arm::WHAT, run: Plain(arm::run) },
    Step { name: "miri", what: "Miri on the thread pool and on readers of files", run: Plain(unsound::miri) },
    Step { name: "netfaults", what: netfaults::WHAT, run: WithOptions(netfaults::run) },
    Step { name: "baseline", what: baseline::WHAT, run: WithOptions(baseline::run) },
];

impl Step {
    fn run(&self, workspace: &Workspace, options: &[String]) -> Result {
        match self.run {
            Plain(run) if options.is_empty() => run(workspace),
            Plain(_) => Err(format!("{} takes no options", self.name)),
            WithOptions(run) => run(workspace, options),
        }
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some((name, options)) = arguments.split_first() else {
        return usage();
    };
    if matches!(name.as_str(), "help" | "-h" | "--help") {
        print!("{}", help());
        return ExitCode::SUCCESS;
    }
    let step = CI.iter().chain(&ALONE).find(|step| step.name == name);
    if step.is_none() && (name != "ci" || !options.is_empty()) {
        return usage();
    }
    let workspace = match Workspace::find() {
        Ok(workspace) => workspace,
        Err(error) => return failed(&error),
    };
    let Some(step) = step else {
        return ci(&workspace);
    };
    step.run(&workspace, options).map_or_else(|error| failed(&error), |()| ExitCode::SUCCESS)
}

/// Runs all steps up to the first that fails. The last line counts them.
fn ci(workspace: &Workspace) -> ExitCode {
    let begin = Instant::now();
    for (passed, step) in CI.iter().enumerate() {
        println!("== {}: {}", step.name, step.what);
        let start = Instant::now();
        if let Err(error) = step.run(workspace, &[]) {
            let code = failed(&format!("{error}\n`cargo xtask {}` runs this step alone", step.name));
            println!("{passed} passed, 1 failed");
            return code;
        }
        println!("== {} passed in {:.1} s", step.name, start.elapsed().as_secs_f64());
    }
    println!("== all of it took {:.0} s", begin.elapsed().as_secs_f64());
    println!("{} passed, 0 failed", CI.len());
    ExitCode::SUCCESS
}

fn fmt(workspace: &Workspace) -> Result {
    let mut cargo = workspace.cargo(&["fmt", "--all", "--check"]);
    workspace::succeed(&mut cargo).map_err(|error| format!("{error}; `cargo fmt --all` mends it"))
}

fn clippy(workspace: &Workspace) -> Result {
    workspace::succeed(&mut workspace.cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]))
}

fn test(workspace: &Workspace) -> Result {
    minilm::run(workspace)?;
    granite::run(workspace)?;
    workspace::succeed(&mut workspace.cargo(&["test", "--workspace"]))?;
    // The models inside of the program, which the default build has beside it.
    workspace::succeed(&mut workspace.cargo(&["test", "-p", "henson", "--bins", "--features", "embedded-model"]))
}

fn doc(workspace: &Workspace) -> Result {
    let flags = std::env::var("RUSTDOCFLAGS").unwrap_or_default();
    let mut cargo = workspace.cargo(&["doc", "--workspace", "--no-deps"]);
    workspace::succeed(cargo.env("RUSTDOCFLAGS", format!("{flags} -D warnings")))
}

fn help() -> String {
    let mut text = "Usage: cargo xtask <STEP> [OPTIONS]\n\n  ci        all of these, in this order:\n".to_owned();
    for step in CI {
        text += &format!("    {:<9} {}\n", step.name, step.what);
    }
    for step in ALONE {
        text += &format!("  {:<9} {}\n", step.name, step.what);
    }
    text
}

fn usage() -> ExitCode {
    eprint!("{}", help());
    ExitCode::from(2)
}

fn failed(error: &str) -> ExitCode {
    eprintln!("error: {error}");
    ExitCode::FAILURE
}
