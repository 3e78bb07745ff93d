//! The kernels and models on a 64-bit ARM processor, which QEMU plays: the kernels' tests, golden values of all families, and
//! what `embed` and `fill` answer there compared with what they answer here. Not part of `ci`: it builds everything once more, and
//! QEMU takes some twenty times as long.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::workspace::{Workspace, output, succeed};
use crate::{Result, minilm};

/// For the list of steps.
pub(crate) const WHAT: &str = "the kernels' tests, golden values and commands on a 64-bit ARM, played by QEMU";

const TARGET: &str = "aarch64-unknown-linux-gnu";
const LINKER: &str = "aarch64-linux-gnu-gcc";
const EMULATOR: &str = "qemu-aarch64";
/// Where Debian keeps ARM's libraries for cross-compilers.
const LIBRARIES: &str = "/usr/aarch64-linux-gnu";

/// A processor with all that QEMU knows, the bf16 dot product among it, and one with the base line alone.
const PROCESSORS: [&str; 2] = ["max", "cortex-a72"];

/// Tests that run, each as arguments of `cargo test`.
const TESTS: [&[&str]; 2] =
    [&["-p", "henson-kernels", "--tests"], &["-p", "henson-train", "--test", "train", "--", "golden::"]];

/// What is not a kernel is built with less optimisation, which takes less time than it costs here.
const PROFILE: [&str; 4] =
    ["--config", "profile.dev.opt-level=1", "--config", "profile.dev.package.henson-kernels.opt-level=2"];

/// What both processors are asked, besides a model.
const QUESTIONS: [&[&str]; 3] = [
    &["embed", "--json", "The cat sat on the mat.", "Where is it?"],
    &["embed", "--json", "--kernels", "portable", "The cat sat on the mat."],
    &["fill", "--json", "The capital of France is [MASK].", "She [MASK] the door."],
];

/// How far numbers of the two may be apart: f32 in another order.
const TOLERANCE: f64 = 1e-5;

pub(crate) fn run(workspace: &Workspace) -> Result {
    if output(Command::new(LINKER).arg("--version")).is_err()
        || output(Command::new(EMULATOR).arg("--version")).is_err()
    {
        return Err(format!(
            "{LINKER} and {EMULATOR} are needed: on Debian, apt install gcc-aarch64-linux-gnu g++-aarch64-linux-gnu \
             qemu-user"
        ));
    }
    let model = minilm::directory(workspace);
    minilm::run(workspace)?;
    for tests in TESTS {
        succeed(build(workspace, PROCESSORS[0], &["test"]).args(tests))?;
    }
    succeed(build(workspace, PROCESSORS[1], &["test"]).args([
        "-p",
        "henson-kernels",
        "--test",
        "kernels",
        "--",
        "gemm",
    ]))?;
    succeed(&mut build(workspace, PROCESSORS[0], &["build", "-p", "henson"]))?;
    succeed(&mut workspace.cargo(&["build", "-p", "henson"]))?;
    let there = target(workspace).join(TARGET).join("debug/henson");
    let here = workspace.target.join("debug/henson");
    for processor in PROCESSORS {
        for question in QUESTIONS {
            let asked = ask(&mut emulated(processor, &there), question, &model)?;
            let expected = ask(&mut Command::new(&here), question, &model)?;
            let apart = distance(&asked, &expected).map_err(|what| format!("{question:?} on {processor}: {what}"))?;
            println!("{} on {processor}: numbers at most {apart:.1e} apart", question[0]);
            if apart > TOLERANCE {
                return Err(format!("{question:?} on {processor}: {apart:e} apart, more than {TOLERANCE:e}"));
            }
        }
    }
    Ok(())
}

fn target(workspace: &Workspace) -> PathBuf {
    workspace.target.join("arm")
}

/// Cargo for ARM; tests run on QEMU.
fn build(workspace: &Workspace, processor: &str, arguments: &[&str]) -> Command {
    let mut cargo = workspace.cargo(arguments);
    let runner = format!("{EMULATOR} -cpu {processor} -L {LIBRARIES}");
    cargo.args(PROFILE).args(["--target", TARGET, "--target-dir"]).arg(target(workspace));
    cargo.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", LINKER);
    cargo.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", runner);
    cargo
}

fn emulated(processor: &str, program: &Path) -> Command {
    let mut command = Command::new(EMULATOR);
    command.args(["-cpu", processor, "-L", LIBRARIES]).arg(program);
    command
}

/// The lines of JSON that a command prints. `fill` has a model of its own, in the box.
fn ask(command: &mut Command, question: &[&str], model: &Path) -> Result<Vec<Value>> {
    command.args(&question[..1]).env_remove("HENSON_KERNELS");
    if question[0] == "embed" {
        command.arg("--model").arg(model);
    }
    let text = output(command.args(&question[1..]))?;
    let parse = |line: &str| serde_json::from_str(line).map_err(|error| format!("{line}: {error}"));
    text.lines().map(parse).collect()
}

/// The largest difference of numbers in the same places; an error where anything else differs.
fn distance(a: &[Value], b: &[Value]) -> Result<f64> {
    if a.len() != b.len() || a.is_empty() {
        return Err(format!("{} answers instead of {}", a.len(), b.len()));
    }
    a.iter().zip(b).try_fold(0.0, |most: f64, (a, b)| Ok(most.max(between(a, b)?)))
}

fn between(a: &Value, b: &Value) -> Result<f64> {
    let differ = || format!("{a} instead of {b}");
    match (a, b) {
        (Value::Number(x), Value::Number(y)) => {
            let (x, y) = x.as_f64().zip(y.as_f64()).ok_or_else(differ)?;
            Ok((x - y).abs())
        }
        (Value::Array(x), Value::Array(y)) if !x.is_empty() || y.is_empty() => {
            if x.is_empty() {
                Ok(0.0)
            } else {
                distance(x, y)
            }
        }
        (Value::Object(x), Value::Object(y)) if x.len() == y.len() => {
            x.iter().try_fold(0.0, |most: f64, (key, x)| Ok(most.max(between(x, y.get(key).ok_or_else(differ)?)?)))
        }
        _ if a == b => Ok(0.0),
        _ => Err(differ()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn answers_are_compared() {
        let a = [json!({"text": "x", "vector": [1.0, 2.0], "none": []})];
        let close = [json!({"text": "x", "vector": [1.0, 2.5], "none": []})];
        assert_eq!(distance(&a, &a), Ok(0.0));
        assert_eq!(distance(&a, &close), Ok(0.5));
        let others = [
            json!({"text": "y", "vector": [1.0, 2.0], "none": []}),
            json!({"text": "x", "vector": [1.0], "none": []}),
            json!({"text": "x", "vector": [1.0, 2.0], "other": []}),
        ];
        for other in others {
            assert!(distance(&a, &[other]).is_err());
        }
        assert!(distance(&a, &[]).is_err());
    }
}
