//! `henson report` as a user meets it.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn henson(directory: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_henson")).arg("report").args(arguments).current_dir(directory).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// A directory with some runs, all of them the same.
fn runs(names: &[&str]) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    for name in names {
        let run = directory.path().join(name);
        fs::create_dir_all(&run).unwrap();
        let mut log = String::new();
        for step in 1..=9 {
            log += &format!(
                "{{\"kind\":\"train\",\"step\":{step},\"loss\":{},\"learning_rate\":0.1,\"gradient_norm\":1,\
                 \"tokens_per_s\":100,\"tokens\":{},\"seconds\":{step}}}\n",
                10 - step,
                step * 1000
            );
        }
        for (step, loss) in [(4, 2.0), (9, 2.5)] {
            log += &format!("{{\"kind\":\"eval\",\"step\":{step},\"metrics\":{{\"loss\":{loss}}}}}\n");
        }
        // Killed while it wrote.
        log += "{\"kind\":\"note\",\"st";
        fs::write(run.join("metrics.jsonl"), log).unwrap();
    }
    directory
}

#[track_caller]
fn works(directory: &Path, arguments: &[&str]) -> (String, String) {
    let output = henson(directory, arguments);
    assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
    (text(&output.stdout), text(&output.stderr))
}

#[track_caller]
fn fails(directory: &Path, code: i32, arguments: &[&str], part: &str) {
    let output = henson(directory, arguments);
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {message}");
    assert!(output.stdout.is_empty() && message.contains(part) && !message.contains("panicked"), "{message}");
}

#[test]
fn one_run_gets_its_page_and_a_table() {
    let directory = runs(&["mini"]);
    let (table, message) = works(directory.path(), &["mini"]);
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines[0], "run   held-out loss  training loss  steps  tokens   time  tokens/s");
    assert_eq!(lines[1], "mini          2.500          1.000      9  9.00 k  9.0 s    1.00 k");
    assert_eq!((lines.len(), message.as_str()), (2, "wrote mini/report.html\n"));
    let page = fs::read_to_string(directory.path().join("mini/report.html")).unwrap();
    assert!(page.starts_with("<!doctype html>") && page.contains("<h1 dir=\"auto\">mini</h1>"));
    // The run's own page is made again without a question.
    works(&directory.path().join("mini"), &["."]);
    assert_eq!(page, fs::read_to_string(directory.path().join("mini/report.html")).unwrap());
}

#[test]
fn programs_get_one_object_a_run() {
    let directory = runs(&["a/run", "b/run", "c"]);
    let (out, message) = works(directory.path(), &["--json", "a/run", "b/run", "c"]);
    let lines: Vec<Value> = out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let names: Vec<&str> = lines.iter().map(|line| line["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["a/run", "b/run", "c"], "runs of the same name are called by their paths");
    assert_eq!((&lines[0]["steps"], &lines[0]["tokens"]), (&Value::from(9), &Value::from(9000)));
    assert_eq!(lines[0]["final"]["loss"], 2.5);
    assert_eq!(lines[0]["best"]["loss"], serde_json::json!({"step": 4, "value": 2.0}));
    assert_eq!(message, "wrote report.html\n");
    let page = fs::read_to_string(directory.path().join("report.html")).unwrap();
    assert!(page.contains("3 runs compared") && page.contains("a/run"));
}

#[test]
fn only_reports_are_overwritten() {
    let directory = runs(&["a", "b"]);
    let own = directory.path().join("report.html");
    fs::write(&own, "my own page").unwrap();
    fails(
        directory.path(),
        1,
        &["a", "b"],
        "report.html exists already, is not a report of henson and was not touched",
    );
    assert_eq!(fs::read(&own).unwrap(), b"my own page");
    works(directory.path(), &["a", "b", "--overwrite"]);
    works(directory.path(), &["a", "b"]);
    works(directory.path(), &["a", "b", "--out", "other.html"]);
    assert_eq!(fs::read(&own).unwrap(), fs::read(directory.path().join("other.html")).unwrap());
    works(directory.path(), &["a", "--out", "b"]);
    assert!(directory.path().join("b/report.html").is_file(), "a directory gets a report.html");
}

#[test]
fn what_is_wrong_is_told() {
    let directory = runs(&["a"]);
    fails(directory.path(), 2, &[], "DIR");
    fails(directory.path(), 1, &["none"], "none is not a directory: expected the --out of a run");
    fs::create_dir(directory.path().join("empty")).unwrap();
    fails(directory.path(), 1, &["a", "empty"], "empty holds no run (no metrics.jsonl)");
    fails(directory.path(), 1, &["a", "--out", "no/such/place.html"], "no/such");
    assert!(!directory.path().join("report.html").exists() && !directory.path().join("a/report.html").exists());
    let log = directory.path().join("a/metrics.jsonl");
    fs::write(&log, [b"{}\n", &fs::read(&log).unwrap()[..]].concat()).unwrap();
    let (_, message) = works(directory.path(), &["a"]);
    assert!(message.contains("warning: a/metrics.jsonl, line 1: missing field `kind`"), "{message}");
}
