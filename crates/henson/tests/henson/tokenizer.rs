//! `henson tokenizer` as a user meets it.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::{run_with, text};

const NOVELS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests-data/text/novels.txt");

fn henson(arguments: &[&str], input: &[u8]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_henson"));
    command.arg("tokenizer").args(arguments).env("HF_HOME", "nowhere");
    run_with(&mut command, input)
}

/// What it printed, and what it said on standard error.
#[track_caller]
fn succeeds(arguments: &[&str], input: &[u8]) -> (String, String) {
    let output = henson(arguments, input);
    assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
    (text(&output.stdout), text(&output.stderr))
}

#[track_caller]
fn json_line(arguments: &[&str], input: &[u8]) -> Value {
    let (printed, _) = succeeds(arguments, input);
    assert_eq!(printed.lines().count(), 1);
    serde_json::from_str(&printed).unwrap()
}

/// It fails with `code`, says all of `parts` on standard error and nothing on standard output, and never panics.
#[track_caller]
fn fails(code: i32, arguments: &[&str], input: &[u8], parts: &[&str]) {
    let output = henson(arguments, input);
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {message}");
    assert!(output.stdout.is_empty() && !message.contains("panicked"), "{arguments:?}: {message}");
    for part in parts {
        assert!(message.contains(part), "{arguments:?}: expected `{part}` in: {message}");
    }
}

fn name(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// All files of a directory, by name.
fn contents(directory: &Path) -> Vec<(String, Vec<u8>)> {
    let mut files: Vec<(String, Vec<u8>)> = std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap())
        .map(|entry| (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap()))
        .collect();
    files.sort();
    files
}

fn trained(kind: &str, size: &str, directory: &TempDir) -> PathBuf {
    let out = directory.path().join(kind);
    succeeds(&["train", "--kind", kind, "--vocab-size", size, "--out", name(&out), NOVELS], b"");
    out
}

#[test]
fn the_same_text_gives_the_same_files_however_it_is_packed() {
    let directory = TempDir::new().unwrap();
    let path = |name: &str| directory.path().join(name);
    let novels = std::fs::read(NOVELS).unwrap();
    let half = novels[..novels.len() / 2].iter().rposition(|&byte| byte == b'\n').unwrap() + 1;
    let (first, second) = novels.split_at(half);

    let gz = std::fs::File::create(path("first.gz")).unwrap();
    let mut gz = flate2::write::GzEncoder::new(gz, flate2::Compression::fast());
    gz.write_all(first).unwrap();
    gz.finish().unwrap();
    std::fs::write(path("second.txt.zst"), zstd::encode_all(second, 1).unwrap()).unwrap();
    let jsonl: String = text(&novels).lines().map(|line| json!({"id": 1, "body": line}).to_string() + "\n").collect();
    std::fs::write(path("lines.jsonl"), jsonl).unwrap();

    let base = ["train", "--kind", "wordpiece", "--vocab-size", "800", "--json", "--out"];
    let run = |out: &str, more: &[&str], input: &[u8]| {
        let out = path(out);
        let summary = json_line(&[&base[..], &[name(&out)], more].concat(), input);
        assert_eq!(summary["vocabulary_size"], 800);
        assert_eq!(summary["bytes"], novels.len());
        contents(&out)
    };
    let expected = run("plain", &[NOVELS], b"");
    let names: Vec<&str> = expected.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["special_tokens_map.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt"]);
    assert_eq!(expected, run("threads", &["--threads", "3", NOVELS], b""));
    assert_eq!(expected, run("packed", &[name(&path("first.gz")), name(&path("second.txt.zst"))], b""));
    assert_eq!(expected, run("stdin", &["-", "--threads", "1"], &novels));
    assert_eq!(expected, run("json", &["--field", "body", name(&path("lines.jsonl"))], b""));
    // The order of the files does not matter for counts either.
    assert_eq!(expected, run("turned", &[name(&path("second.txt.zst")), name(&path("first.gz"))], b""));
}

#[test]
fn sentencepiece_files_and_directories_of_nothing_else() {
    let directory = TempDir::new().unwrap();
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../text/tests/data/sentencepiece/albert.model");
    let info = json_line(&["info", "--model", model, "--json"], b"");
    assert_eq!((&info["kind"], &info["special_tokens"]["cls_token"]), (&json!("unigram"), &json!(null)));
    let line = json_line(&["encode", "--model", model, "--json", "The old  bridge"], b"");
    assert_eq!(line["offsets"].as_array().unwrap().last().unwrap()[1], json!(15));

    std::fs::copy(model, directory.path().join("spiece.model")).unwrap();
    std::fs::write(directory.path().join("config.json"), r#"{"model_type": "albert"}"#).unwrap();
    let info = json_line(&["info", "--model", name(directory.path()), "--json"], b"");
    assert_eq!((&info["lowercase"], &info["special_tokens"]["cls_token"]["id"]), (&json!(true), &json!(2)));
    let lower = json_line(&["encode", "--model", name(directory.path()), "--json", "the old bridge"], b"");
    let upper = json_line(&["encode", "--model", name(directory.path()), "--json", "THE OLD BRIDGE"], b"");
    assert_eq!(lower["ids"], upper["ids"]);
}

#[test]
fn every_kind_can_be_trained_and_looked_at() {
    let directory = TempDir::new().unwrap();
    for (kind, piece) in [("wordpiece", "the"), ("bpe", "the</w>"), ("byte-bpe", "The"), ("unigram", "\u{2581}the")] {
        let out = trained(kind, "700", &directory);
        let info = json_line(&["info", "--model", name(&out), "--json", NOVELS], b"");
        assert_eq!((&info["kind"], &info["vocabulary_size"]), (&json!(kind), &json!(700)));
        assert_eq!(info["lowercase"], json!(kind != "byte-bpe"));
        assert!(info["special_tokens"]["mask_token"]["id"].is_u64());
        assert_eq!(info["longest_pieces"].as_array().unwrap().len(), 10);
        let fit = &info["text"];
        assert_eq!((&fit["unknown_rate"], &fit["coverage"]), (&json!(0.0), &json!(1.0)), "it was trained on it");
        let per_word = fit["pieces_per_word"].as_f64().unwrap();
        assert!((1.0..2.5).contains(&per_word), "{kind}: {per_word}");
        assert!((0.3..1.0).contains(&fit["whole_words"].as_f64().unwrap()));
        assert!(fit["tokens_used"].as_u64().unwrap() > 300);

        let line = json_line(&["encode", "--model", name(&out), "--json", "The running dog \u{2603}."], b"");
        let pieces: Vec<&str> =
            line["pieces"].as_array().unwrap().iter().map(|piece| piece.as_str().unwrap()).collect();
        assert!(pieces.contains(&piece), "{pieces:?}");
        for list in ["ids", "offsets", "words"] {
            assert_eq!(line[list].as_array().unwrap().len(), pieces.len());
        }
        // Characters, not bytes: the text has 18 of one and 20 of the other.
        assert_eq!(line["offsets"].as_array().unwrap().last(), Some(&json!([17, 18])));
        let sampled = |seed: &str| {
            json_line(
                &["encode", "--model", name(&out), "--json", "--sample", seed, &"gardeners running ".repeat(9)],
                b"",
            )
        };
        assert_eq!(sampled("1"), sampled("1"));
        assert_ne!(sampled("1"), sampled("2"));
    }
    // The words of people.
    let wordpiece = directory.path().join("wordpiece");
    let (printed, _) = succeeds(&["encode", "--model", name(&wordpiece), "the the"], b"");
    assert!(printed.starts_with("the the\n") && printed.contains("4 to 7     \"the\""), "{printed}");
    let (printed, _) = succeeds(&["info", "--model", name(&wordpiece), "-"], "the \u{2603} the\n".as_bytes());
    for part in ["wordpiece", "700 tokens", "lower-cased", "[MASK] (4)", "3, 66.67%", "\"\u{2603}\" 1"] {
        assert!(printed.contains(part), "expected `{part}` in: {printed}");
    }
    let cased = directory.path().join("cased");
    succeeds(&["train", "--cased", "--vocab-size", "700", "--max-length", "64", "--out", name(&cased), NOVELS], b"");
    let info = json_line(&["info", "--model", name(&cased), "--json"], b"");
    assert_eq!((&info["lowercase"], &info["max_length"], &info["text"]), (&json!(false), &json!(64), &Value::Null));
}

#[test]
fn nothing_is_overwritten_or_left_half_made() {
    let directory = TempDir::new().unwrap();
    let out = trained("bpe", "500", &directory);
    let before = contents(&out);
    let arguments = ["train", "--vocab-size", "600", "--out", name(&out), NOVELS];
    fails(1, &arguments, b"", &["exists already", "--overwrite"]);
    assert_eq!(contents(&out), before);
    succeeds(&[&arguments[..], &["--overwrite"]].concat(), b"");
    assert_eq!(
        contents(&out).last().map(|(name, _)| name.as_str()),
        Some("vocab.txt"),
        "the old kind's files are gone"
    );

    // Files that are none of a tokenizer's are not deleted, and a model keeps its own tokenizer.
    std::fs::write(out.join("notes.md"), "mine").unwrap();
    fails(1, &[&arguments[..], &["--overwrite"]].concat(), b"", &["notes.md"]);
    std::fs::write(out.join("config.json"), "{}").unwrap();
    fails(1, &[&arguments[..], &["--overwrite"]].concat(), b"", &["config.json", "model's directory"]);

    // Whatever goes wrong while reading, no directory appears.
    let bad = directory.path().join("bad.txt");
    std::fs::write(&bad, b"fine\nnot \xff fine\n").unwrap();
    let cut = directory.path().join("cut.zst");
    let packed = zstd::encode_all(&std::fs::read(NOVELS).unwrap()[..], 1).unwrap();
    std::fs::write(&cut, &packed[..packed.len() / 2]).unwrap();
    let lines = directory.path().join("lines.jsonl");
    std::fs::write(&lines, "{\"text\": \"a\"}\n{\"body\": 3}\n").unwrap();
    let new = directory.path().join("new");
    let train = |more: &[&str], parts: &[&str]| {
        fails(1, &[&["train", "--vocab-size", "600", "--out", name(&new)][..], more].concat(), b"", parts);
    };
    train(&[NOVELS, name(&bad)], &["bad.txt, line 2: byte 5 is not UTF-8", "UTF-8"]);
    train(&[NOVELS, name(&cut)], &["cannot read", "cut.zst"]);
    train(&[NOVELS, "no-such-file"], &["cannot open no-such-file"]);
    train(&["--field", "text", name(&lines)], &["lines.jsonl, line 2", "no \"text\" in it; it has: body"]);
    train(&["--field", "body", NOVELS], &["line 1", "not a JSON object"]);
    train(&["/dev/null"], &["nothing to learn from"]);
    fails(1, &["train", "--vocab-size", "20", "--out", name(&new), NOVELS], b"", &["vocabulary of 20 is too small"]);
    let mut left: Vec<_> =
        std::fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["bad.txt", "bpe", "cut.zst", "lines.jsonl"]);
}

/// A vocabulary of JSON's or a table's syntax is none: names say what files hold, as they do for `data build`.
#[test]
fn files_are_read_as_their_names_say() {
    let directory = TempDir::new().unwrap();
    let path = |name: &str| directory.path().join(name);
    let novels = text(&std::fs::read(NOVELS).unwrap());
    let train = |out: &str, files: &[&Path], input: &[u8]| {
        let mut arguments = vec!["train", "--vocab-size", "600", "--out", out];
        arguments.extend(files.iter().map(|path| name(path)));
        henson(&arguments, input)
    };
    let expected = path("expected");
    assert!(train(name(&expected), &[Path::new(NOVELS)], b"").status.success());
    // JSON lines have their text under `text` unless told; lines without one are no text, nor are empty ones.
    let jsonl: String = novels.lines().map(|line| json!({"key": "value", "text": line}).to_string() + "\n").collect();
    let jsonl = jsonl + "\n{\"text\": null}\n";
    std::fs::write(path("packed.jsonl.gzip"), zstd::encode_all(jsonl.as_bytes(), 1).unwrap()).unwrap();
    for file in ["lines.jsonl", "lines.ndjson", "lines.JSON", "packed.jsonl.gzip"] {
        if file != "packed.jsonl.gzip" {
            std::fs::write(path(file), &jsonl).unwrap();
        }
        let out = path(&format!("from-{file}"));
        let output = train(name(&out), &[&path(file)], b"");
        assert!(output.status.success(), "{file}: {}", text(&output.stderr));
        assert!(contents(&out) == contents(&expected), "{file}");
    }
    // Tables are refused before anything is read.
    let out = path("none");
    for (file, said) in [
        ("table.csv", "table.csv is a table"),
        ("table.TSV", "table.TSV is a table"),
        ("table.csv.gz", "table.csv.gz is a table"),
        ("texts.parquet", "texts.parquet is parquet"),
    ] {
        std::fs::write(path(file), &novels).unwrap();
        let output = train(name(&out), &[Path::new(NOVELS), &path(file)], b"");
        assert_eq!(output.status.code(), Some(1), "{file}");
        assert!(text(&output.stderr).contains(said), "{file}: {}", text(&output.stderr));
        fails(1, &["info", "--model", name(&expected), name(&path(file))], b"", &[said]);
    }
    let output = train(name(&out), &[Path::new("-")], novels.as_bytes());
    assert!(output.status.success() && contents(&out) == contents(&expected), "{}", text(&output.stderr));
}

#[test]
fn what_was_left_out_is_said() {
    let directory = TempDir::new().unwrap();
    let out = directory.path().join("out");
    let arguments = ["train", "--vocab-size", "5000", "--alphabet", "4", "--max-words", "3", "--out", name(&out), "-"];
    let (_, said) = succeeds(&arguments, b"aaa aaa bbb ccc ccc ccc d e\nd\n");
    for part in ["only", "not 5000", "were dropped", "--max-words", "--min-frequency"] {
        assert!(said.contains(part), "expected `{part}` in: {said}");
    }
    let arguments = ["train", "--vocab-size", "500", "--alphabet", "3", "--overwrite", "--out", name(&out), "-"];
    let (_, said) = succeeds(&arguments, "ααα ααα βββ βββ γγγ γγγ δ ε\n".as_bytes());
    assert!(said.contains("2 of 5 different characters"), "{said}");
}

#[test]
fn wrong_usage_is_refused() {
    let directory = TempDir::new().unwrap();
    let unigram = trained("unigram", "400", &directory);
    fails(2, &["train", "--vocab-size", "0", "--out", "x", NOVELS], b"", &["--vocab-size"]);
    fails(2, &["train", "--vocab-size", "100", "--out", "x"], b"", &["FILES"]);
    fails(2, &["train", "--kind", "words", "--vocab-size", "9", "--out", "x", NOVELS], b"", &["byte-bpe", "unigram"]);
    fails(2, &["encode", "--model", name(&unigram), "--alpha", "0.1", "a"], b"", &["--sample"]);
    fails(
        1,
        &["encode", "--model", name(&unigram), "--sample", "1", "--dropout", "0.1", "a"],
        b"",
        &["unigram", "alpha"],
    );
    fails(1, &["encode", "--model", name(&unigram), "--sample", "1", "--alpha=-1", "a"], b"", &["at least 0"]);
    fails(1, &["encode", "--model", name(directory.path()), "a"], b"", &["no tokenizer in"]);
    fails(1, &["info", "--model", name(&unigram), "/dev/null"], b"", &["no words"]);
    let extend = ["extend", "--model", name(&unigram), "--pieces", "-", "--out", "x"];
    fails(1, &extend, b"\n", &["standard input has no tokens", "one per line"]);
}
