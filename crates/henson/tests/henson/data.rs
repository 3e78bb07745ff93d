//! `henson data build` and `stats` as a user meets them, and builds that are killed.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;

/// A directory with a tokenizer that writes every word letter by letter.
fn place() -> TempDir {
    let directory = TempDir::new().unwrap();
    let mut pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", ","].map(str::to_owned).to_vec();
    pieces.extend(('a'..='z').chain('0'..='9').flat_map(|letter| [letter.to_string(), format!("##{letter}")]));
    std::fs::create_dir(directory.path().join("tokenizer")).unwrap();
    std::fs::write(directory.path().join("tokenizer/vocab.txt"), pieces.join("\n") + "\n").unwrap();
    directory
}

fn command(directory: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_henson"));
    command.current_dir(directory).args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn run(directory: &Path, arguments: &[&str], input: &[u8]) -> Output {
    let mut child = command(directory, arguments).stdin(Stdio::piped()).spawn().unwrap();
    // It may end before it has read everything; that is its right.
    let _ = child.stdin.take().unwrap().write_all(input);
    child.wait_with_output().unwrap()
}

/// The JSON objects that it prints.
#[track_caller]
fn lines(directory: &Path, arguments: &[&str], input: &[u8]) -> Vec<Value> {
    let output = run(directory, arguments, input);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[track_caller]
fn fails(directory: &Path, code: i32, arguments: &[&str], parts: &[&str]) {
    let output = run(directory, arguments, b"");
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{message}");
    assert!(output.stdout.is_empty() && !message.contains("panicked"), "{message}");
    for part in parts {
        assert!(message.contains(part), "expected `{part}` in: {message}");
    }
}

/// Everything in the directory but what was there from the beginning.
fn left(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name != "tokenizer" && !name.ends_with(".txt")).collect()
}

const BUILD: [&str; 6] = ["data", "build", "--tokenizer", "tokenizer", "--out", "corpus"];

#[test]
fn build_and_stats() {
    let directory = place();
    let place = directory.path();
    let build = [&BUILD[..], &["--json", "--threads", "2", "-"]].concat();
    let text = "One sentence.\nAnother, longer one.\n\nA second document.\n\nA second document.\n";
    let [built] = &lines(place, &build, text.as_bytes())[..] else { panic!("one line") };
    assert_eq!(
        (&built["documents"], &built["duplicates"], &built["bytes"]),
        (&3.into(), &1.into(), &text.len().into())
    );
    assert_eq!(built["train"]["sentences"], 3);
    assert!(built["mb_per_s"].as_f64().unwrap() > 0.0 && built["peak_mib"].as_f64().unwrap() > 1.0);
    assert_eq!(left(place), ["corpus"]);

    let stats = lines(place, &["data", "stats", "corpus", "--json", "--verify"], b"");
    let [train, held_out] = &stats[..] else { panic!("a line for each part") };
    assert_eq!((&train["split"], &held_out["split"]), (&"train".into(), &"held-out".into()));
    assert_eq!(train["digest"], built["digest"]);
    assert_eq!((&train["counts"], &held_out["counts"]["documents"]), (&built["train"], &0.into()));
    assert_eq!(train["unknown"], 0);
    assert_eq!(train["packing"].as_array().unwrap().len(), 8);

    // For people.
    let output = run(place, &["data", "stats", "corpus", "--verify"], b"");
    let shown = String::from_utf8(output.stdout).unwrap();
    for part in
        ["To train on", "tokens of a sentence: mean", "Held out", "nothing", "█", "pairs", "checksums are right"]
    {
        assert!(shown.contains(part), "expected `{part}` in: {shown}");
    }
    let output = run(place, &[&BUILD[..], &["--overwrite", "-"]].concat(), text.as_bytes());
    let (shown, warned) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert!(
        shown.contains("3, of which 1 duplicates") && shown.contains("MB/s") && warned.contains("held out"),
        "{shown}"
    );

    // Damage is found when it is looked for.
    let shard = place.join("corpus/train-00000.shard");
    let mut bytes = std::fs::read(&shard).unwrap();
    bytes[20] ^= 1;
    std::fs::write(&shard, bytes).unwrap();
    fails(place, 1, &["data", "stats", "corpus", "--verify"], &["train-00000.shard", "damaged", "SHA-256"]);
}

#[test]
fn sources_and_held_out_files() {
    let directory = place();
    let place = directory.path();
    for (name, text) in [("wiki.txt", "a\n\nb\n"), ("web.txt", "c\n"), ("more.txt", "d\n"), ("kept.txt", "e\n\nb\n")] {
        std::fs::write(place.join(name), text).unwrap();
    }
    let sources = ["--source", "wiki=2:wiki.txt", "--source", "web=0.5:web.txt", "--source", "wiki=2:more.txt"];
    lines(place, &[&BUILD[..], &sources, &["--held-out-files", "kept.txt", "--json"]].concat(), b"");
    let stats = lines(place, &["data", "stats", "corpus", "--json"], b"");
    let source = |line: &Value| -> Vec<(String, f64, u64)> {
        let sources = line["sources"].as_array().unwrap();
        let fact = |s: &Value| {
            let (name, weight) = (s["name"].as_str().unwrap().to_owned(), s["weight"].as_f64().unwrap());
            (name, weight, s["counts"]["documents"].as_u64().unwrap())
        };
        sources.iter().map(fact).collect()
    };
    assert_eq!(source(&stats[0]), [("wiki".to_owned(), 2.0, 2), ("web".to_owned(), 0.5, 1)]);
    assert_eq!(source(&stats[1]), [("held-out".to_owned(), 1.0, 2)]);
}

#[test]
fn wrong_usage_and_wrong_files() {
    let directory = place();
    let place = directory.path();
    let with = |more: &[&'static str]| [&BUILD[..], more].concat();
    std::fs::write(place.join("a.txt"), "good\nb\u{e9}\n").unwrap();
    std::fs::write(place.join("bad.txt"), b"good\n\xff\n").unwrap();
    fails(place, 2, &with(&[]), &["FILES"]);
    for source in ["wiki", "wiki=2", "=1:x", "wiki=0:x", "wiki=x:y", "wiki=1:"] {
        fails(place, 2, &[&BUILD[..], &["--source", source]].concat(), &["--source"]);
    }
    fails(place, 2, &with(&["a.txt", "--shard-size", "0"]), &["1 to 2048"]);
    fails(place, 1, &with(&["a.txt", "--held-out", "1"]), &["held_out", "below 1"]);
    fails(place, 1, &with(&["--source", "x=1:a.txt", "--source", "x=2:a.txt"]), &["two weights"]);
    fails(place, 1, &with(&["none.txt"]), &["none.txt"]);
    fails(place, 1, &with(&["table.csv"]), &["table.csv is a table", "--format text"]);
    fails(place, 1, &with(&["bad.txt"]), &["bad.txt", "line 2", "--lossy"]);
    fails(place, 1, &["data", "build", "--tokenizer", "none", "--out", "x", "a.txt"], &["tokenizer", "none"]);
    fails(place, 1, &["data", "stats", "tokenizer"], &["not a corpus"]);
    assert_eq!(left(place), [""; 0]);
    assert!(run(place, &with(&["a.txt", "--held-out", "0"]), b"").status.success());
    fails(place, 1, &with(&["a.txt"]), &["exists already", "--overwrite"]);
}

/// A text that takes some hundred milliseconds, in a file.
fn long_text(place: &Path) -> PathBuf {
    let path = place.join("long.txt");
    let mut text = String::new();
    for i in 0..60_000_u64 {
        // Words that do not come twice, so that each is tokenized.
        let word = i.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        text.push_str(&format!("document {i} has a word {word:x} and {:x} in it.\n\n", word.rotate_left(31)));
    }
    std::fs::write(&path, text).unwrap();
    path
}

/// Killed at any moment, a build leaves no corpus, or all of it; the next one sweeps what is left.
#[test]
fn killed_builds() {
    let directory = place();
    let place = directory.path();
    long_text(place);
    let build = [&BUILD[..], &["long.txt", "--threads", "1", "--shard-size", "1"]].concat();
    let mut unfinished = 0;
    for delay in [0, 20, 60, 120, 200, 300] {
        let mut child = command(place, &build).stdin(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(delay));
        let _ = child.kill();
        child.wait_with_output().unwrap();
        unfinished += usize::from(!place.join("corpus").exists());
        if place.join("corpus").exists() {
            lines(place, &["data", "stats", "corpus", "--verify", "--json"], b"");
            std::fs::remove_dir_all(place.join("corpus")).unwrap();
        }
    }
    assert!(unfinished > 0, "at least the first was killed in time");

    // A file that cannot grow, as on a full disk: the system kills it, or it says so.
    let limited = format!("ulimit -f 1; exec {} {}", env!("CARGO_BIN_EXE_henson"), build.join(" "));
    let output = Command::new("sh").arg("-c").arg(limited).current_dir(place).output().unwrap();
    assert!(!output.status.success());
    assert!(!place.join("corpus").exists());

    assert!(run(place, &build, b"").status.success());
    assert_eq!(left(place), ["corpus"]);
    lines(place, &["data", "stats", "corpus", "--verify", "--json"], b"");
}

/// Asked to stop, it deletes what it has, and says so with its exit code.
#[test]
fn interrupted_builds() {
    let directory = place();
    let place = directory.path();
    long_text(place);
    // A pipe that stays open: it cannot finish before it is asked.
    let build = [&BUILD[..], &["long.txt", "-", "--threads", "1"]].concat();
    let mut child = command(place, &build).stdin(Stdio::piped()).spawn().unwrap();
    while left(place).is_empty() {
        std::thread::sleep(Duration::from_millis(5));
    }
    std::thread::sleep(Duration::from_millis(50));
    let signalled = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(signalled.success());
    // While it reads standard input it can only stop between two reads.
    std::thread::sleep(Duration::from_millis(300));
    drop(child.stdin.take());
    let output = child.wait_with_output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(130), "{message}");
    assert!(message.contains("nothing was written"), "{message}");
    assert_eq!(left(place), [""; 0]);
}

#[test]
fn a_folder_of_notes_is_a_corpus_of_files() {
    let directory = place();
    std::fs::create_dir_all(directory.path().join("notes/old")).unwrap();
    for (name, text) in [("a.md", "one.\n\ntwo."), ("old/b.txt", "three\n\nfour"), ("c.png", "no")] {
        std::fs::write(directory.path().join("notes").join(name), text).unwrap();
    }
    let build =
        ["data", "build", "--tokenizer", "tokenizer", "--out", "out", "--held-out", "0", "--overwrite", "--json"];
    let counts = |more: &[&str]| {
        let report = lines(directory.path(), &[&build[..], more, &["notes"]].concat(), b"").remove(0);
        ["files", "documents", "skipped_files"].map(|key| report[key].as_u64().unwrap())
    };
    assert_eq!(counts(&["--document-per-file"]), [2, 2, 1]);
    assert_eq!(counts(&[]), [1, 2, 2]);
    let output = run(directory.path(), &[&build[..], &["notes"]].concat(), b"");
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(
        message.contains("2 files in directories were skipped") && message.contains("--document-per-file"),
        "{message}"
    );
    fails(
        directory.path(),
        2,
        &[&build[..], &["--document-per-file", "--document-per-line", "notes"]].concat(),
        &["cannot"],
    );
}
