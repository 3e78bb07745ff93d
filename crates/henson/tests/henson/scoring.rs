//! `henson eval --predictions`: what is printed, and how mistakes end.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn file(&self, name: &str, content: &str) -> String {
        let path = self.0.path().join(name);
        std::fs::write(&path, content).unwrap();
        path.to_str().unwrap().to_owned()
    }
}

fn eval(task: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_henson"));
    command.args(["eval", "--task", task]).args(arguments).output().unwrap()
}

#[track_caller]
fn json(task: &str, arguments: &[&str]) -> Value {
    let output = eval(task, &[arguments, &["--json"]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[track_caller]
fn fails(code: i32, task: &str, arguments: &[&str], parts: &[&str]) {
    let output = eval(task, arguments);
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{message}");
    assert!(output.stdout.is_empty() && !message.contains("panicked"), "{message}");
    for part in parts {
        assert!(message.contains(part), "expected `{part}` in: {message}");
    }
}

fn squad(name: &str) -> String {
    let path: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/tasks/squad").join(name);
    path.to_str().unwrap().to_owned()
}

#[test]
fn squad_by_its_official_numbers() {
    let scores: Value = serde_json::from_slice(&std::fs::read(squad("scores.json")).unwrap()).unwrap();
    let (data, predictions, odds) =
        (squad("dev-v2.0.json"), squad("predictions-2.0.json"), squad("null_odds-2.0.json"));
    let result = json("squad2", &["--data", &data, "--predictions", &predictions, "--null-odds", &odds]);
    for (name, expected) in scores["2.0 with odds"].as_object().unwrap() {
        let (got, expected) = (result[name].as_f64().unwrap(), expected.as_f64().unwrap());
        assert!((got - expected).abs() < 1e-10, "{name}: {got}, not {expected}");
    }
    let more = ["--data", &data, "--predictions", &predictions, "--null-odds", &odds, "--threshold", "0.5"];
    assert_eq!(json("squad2", &more)["exact_match"], scores["2.0 at 0.5"]["exact_match"]);
}

#[test]
fn tables_for_people() {
    let place = Place::new();
    let data = place.file("dev.tsv", "sentence\tlabel\nfine\t1\nawful\t0\nnot bad\t1\nwell\t1\n");
    let said = place.file("said.txt", "1\n0\n0\n1\n");
    let output = eval("sst2", &["--data", &data, "--predictions", &said]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success());
    for part in [
        "4 examples",
        "accuracy",
        "75.00%",
        "of \"positive\"",
        "line 4: not bad",
        "expected positive, predicted negative",
    ] {
        assert!(text.contains(part), "expected `{part}` in: {text}");
    }
    let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    assert!(rows.contains(&vec!["positive", "1", "2"]) && rows.contains(&vec!["negative", "1", "0"]), "{text}");
    let result = json("sst2", &["--data", &data, "--predictions", &said, "--mistakes", "9"]);
    assert_eq!(result["mistakes"][0]["place"], "line 4");
    assert_eq!((&result["accuracy"], &result["examples"]), (&0.75.into(), &4.into()));
}

#[test]
fn columns_by_flags_and_bad_rows() {
    let place = Place::new();
    let data = place.file("notes.csv", "key,body,urgent\na,\"x, y\",yes\nb,z,\nc,w,no\n");
    let said =
        place.file("said.jsonl", "{\"id\": \"c\", \"prediction\": \"no\"}\n{\"id\": \"a\", \"prediction\": \"yes\"}\n");
    let flags = [
        "--data",
        &data,
        "--predictions",
        &said,
        "--text-column",
        "body",
        "--label-column",
        "urgent",
        "--id-column",
        "key",
    ];
    fails(1, "classify", &flags, &["notes.csv, line 3", "no label"]);
    let result = json("classify", &[&flags[..], &["--skip-bad"]].concat());
    assert_eq!((&result["accuracy"], &result["skipped"]), (&1.0.into(), &1.into()));
    // Numbers are columns, too; a constant has no correlation.
    let numbers = place.file("n.tsv", "a\t1\nb\t2\n");
    let said = place.file("n.txt", "3\n3\n");
    let flags =
        ["--data", &numbers, "--predictions", &said, "--header=false", "--text-column", "0", "--label-column", "1"];
    assert_eq!(json("regress", &flags)["pearson"], Value::Null);
}

#[test]
fn every_mistake_gets_a_clear_word() {
    let place = Place::new();
    let data = place.file("dev.tsv", "sentence\tlabel\nfine\t1\n");
    let said = place.file("said.txt", "1\n");
    fails(1, "sst2", &["--data", &data], &["--model"]);
    fails(1, "sst2", &["--data", &data, "--model", "x"], &["no directory \"x\"", "--download"]);
    fails(1, "sst2", &["--data", &data, "--predictions", "nowhere.tsv"], &["cannot open nowhere.tsv"]);
    fails(
        1,
        "mrpc",
        &["--data", &data, "--predictions", &said],
        &["no column for the text", "#1 String", "--text-column"],
    );
    fails(1, "perplexity", &["--data", &data, "--predictions", &said], &["--model"]);
    fails(2, "sst2", &["--data", &data, "--predictions", &said, "--model", "x"], &["--model", "cannot be used"]);
    fails(1, "perplexity", &["--data", &data, "--model", "x", "--skip-bad"], &["labelled files"]);
    fails(2, "sst2", &["--data", &data, "--predictions", &said, "--limit", "1"], &["--limit", "cannot be used"]);
    fails(2, "sst-2", &["--data", &data, "--predictions", &said], &["sst2", "squad1"]);
    fails(1, "sst2", &["--data", &data, "--predictions", &said, "--threshold", "1"], &["--null-odds"]);
    let two = place.file("two.txt", "1\n0\n");
    fails(1, "sst2", &["--data", &data, "--predictions", &two], &["two.txt does not fit", "1 of 1 examples"]);
}
