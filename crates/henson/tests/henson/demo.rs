//! `henson demo`, made short: interrupted, gone on with, and refused where something else is.
#![cfg(unix)]

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

fn demo(out: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_henson"));
    command.args(["demo", "--set", "steps=60", "--set", "eval_sequences=8", "--out"]).arg(out);
    command.env_remove("HENSON_KERNELS").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

fn interrupt(child: &Child) {
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
}

#[track_caller]
fn is_refused(output: &Output, part: &str) {
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && message.contains(part), "{message}");
}

#[test]
fn an_interrupted_demo_goes_on() {
    let place = TempDir::new().unwrap();
    let out = place.path().join("demo");
    let child = demo(&out).spawn().unwrap();
    let begin = Instant::now();
    // Written right before the first step.
    while !out.join("before.json").exists() {
        assert!(begin.elapsed().as_secs() < 60, "pre-training does not begin");
        std::thread::sleep(Duration::from_millis(5));
    }
    interrupt(&child);
    let interrupted = child.wait_with_output().unwrap();
    let message = String::from_utf8_lossy(&interrupted.stderr);
    assert!(interrupted.status.code() == Some(130) && message.contains("the same command resumes"), "{message}");
    assert!(!out.join("model/model.safetensors").exists(), "it was interrupted before it was done");
    let before = std::fs::read(out.join("before.json")).unwrap();

    // It is pre-trained to the end. After that, an interruption ends it at once.
    let mut child = demo(&out).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.next().unwrap().contains("was interrupted; it resumes"));
    assert!(lines.any(|line| line.starts_with("4. a classifier")), "it came to its next part");
    interrupt(&child);
    assert_eq!(child.wait().unwrap().signal(), Some(2));
    assert!(out.join("model/model.safetensors").exists() && !out.join("results.json").exists());
    assert_eq!(std::fs::read(out.join("before.json")).unwrap(), before);

    std::fs::write(out.join("results.json"), "{}").unwrap();
    is_refused(&demo(&out).output().unwrap(), "has a finished demo already");
}

#[test]
fn a_directory_with_something_else_is_left_alone() {
    let place = TempDir::new().unwrap();
    std::fs::write(place.path().join("train.txt"), "mine").unwrap();
    is_refused(&demo(place.path()).output().unwrap(), "give another --out");
    assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 1);
}
