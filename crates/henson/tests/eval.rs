//! `henson eval` as a user meets it: perplexity and minimal pairs, plain and compressed files, choices of texts, and a
//! clear word for what is wrong. That the scores are right is tested where they are computed (crates/infer).

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};
use tempfile::TempDir;

/// A model and files for it.
struct Place(TempDir);

impl Place {
    /// The golden masked LM with the vocabulary of the golden likelihoods; with `causal` as one that reads left to right.
    fn new(causal: bool) -> Self {
        let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data");
        let place = Self(TempDir::new().unwrap());
        std::fs::copy(data.join("bert-golden/mlm/model.safetensors"), place.at("model.safetensors")).unwrap();
        std::fs::copy(data.join("likelihood/vocab.txt"), place.at("vocab.txt")).unwrap();
        let config = std::fs::read_to_string(data.join("bert-golden/mlm/config.json")).unwrap();
        let config = if causal { config.replace("\"is_decoder\": false", "\"is_decoder\": true") } else { config };
        std::fs::write(place.at("config.json"), config).unwrap();
        place
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A file with these bytes; gives its path.
    fn file(&self, name: &str, bytes: &[u8]) -> String {
        std::fs::write(self.at(name), bytes).unwrap();
        self.at(name).to_str().unwrap().to_owned()
    }

    fn eval(&self, task: &str, data: &str, more: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_henson"))
            .args(["eval", "--task", task, "--model", self.0.path().to_str().unwrap(), "--data", data])
            .args(more)
            .env_remove("HENSON_KERNELS")
            .output()
            .unwrap()
    }

    #[track_caller]
    fn json(&self, task: &str, data: &str, more: &[&str]) -> Value {
        let output = self.eval(task, data, &[more, &["--json"]].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    #[track_caller]
    fn fails(&self, code: i32, task: &str, data: &str, more: &[&str], parts: &[&str]) {
        let output = self.eval(task, data, more);
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{message}");
        assert!(output.stdout.is_empty() && !message.contains("panicked"), "{message}");
        for part in parts {
            assert!(message.contains(part), "expected `{part}` in: {message}");
        }
    }
}

fn golden() -> Vec<Value> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/likelihood/golden.json");
    let golden: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    golden["texts"].as_array().unwrap().clone()
}

/// The sum of a golden text's logarithms, its pieces, and how many were predicted right.
fn totals(entries: &[&Value], scoring: &str) -> (f64, f64, f64) {
    let logs = entries.iter().flat_map(|entry| entry[scoring]["logs"].as_array().unwrap());
    let logs: Vec<f64> = logs.map(|log| log.as_f64().unwrap()).collect();
    let correct: u64 = entries.iter().map(|entry| entry[scoring]["correct"].as_u64().unwrap()).sum();
    (logs.iter().sum(), logs.len() as f64, correct as f64)
}

#[track_caller]
fn near(value: &Value, expected: f64) {
    let got = value.as_f64().unwrap();
    assert!((got / expected - 1.0).abs() < 1e-5, "{got} not {expected}");
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    std::io::Write::write_all(&mut encoder, bytes).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn perplexity_is_the_golden_one() {
    let golden = golden();
    let entries: Vec<&Value> = golden.iter().collect();
    let texts: Vec<&str> = golden.iter().map(|entry| entry["text"].as_str().unwrap()).collect();
    // The empty text among them is a blank line.
    let text = texts.join("\n") + "\n \n";
    for (causal, more, name, key) in [
        (false, &[][..], "piece", "piece"),
        (false, &["--scoring", "word"], "word", "word"),
        (true, &[], "left-to-right", "left_to_right"),
    ] {
        let place = Place::new(causal);
        let result = place.json("perplexity", &place.file("texts.txt", text.as_bytes()), more);
        let (sum, pieces, correct) = totals(&entries, key);
        near(&result["loss"], -sum / pieces);
        near(&result["perplexity"], (-sum / pieces).exp());
        near(&result["accuracy"], correct / pieces);
        let words = text.split_whitespace().count();
        near(&result["word_perplexity"], (-sum / words as f64).exp());
        let expected = json!([name, texts.len() - 1, words, pieces as usize]);
        let got = json!([result["scoring"], result["texts"], result["words"], result["pieces"]]);
        assert_eq!(got, expected);
        assert!(result["tokens_per_s"].as_f64().unwrap() > 0.0 && result["seconds"].as_f64().unwrap() > 0.0);
    }
}

#[test]
fn compressed_files_are_known_by_their_bytes() {
    let place = Place::new(false);
    let text = b"The cat sat.\r\n\nThe dogs ran.\n";
    let loss = |data: &str| place.json("perplexity", data, &[])["loss"].clone();
    let plain = loss(&place.file("a.txt", text));
    assert_eq!(loss(&place.file("a.gz", &gzip(text))), plain);
    assert_eq!(loss(&place.file("a.zst", &zstd::encode_all(&text[..], 0).unwrap())), plain);
    // Compressed in parts, under a name that does not say so.
    let parts = [gzip(&text[..7]), gzip(&text[7..])].concat();
    assert_eq!(loss(&place.file("b.txt", &parts)), plain);
    let mut broken = zstd::encode_all(&text[..], 0).unwrap();
    broken.truncate(broken.len() - 3);
    place.fails(1, "perplexity", &place.file("c.zst", &broken), &[], &["cannot read", "c.zst"]);
}

#[test]
fn limits_take_the_first_or_some_of_all() {
    let golden = golden();
    let place = Place::new(false);
    let lines = [0, 4, 5, 6, 8, 10];
    let text: Vec<&str> = lines.iter().map(|i| golden[*i]["text"].as_str().unwrap()).collect();
    let data = place.file("texts.txt", text.join("\n\n").as_bytes());
    for (more, taken) in [
        (&["--limit", "2"][..], &[0, 4][..]),
        (&["--limit", "2", "--sample"], &[5, 10]),
        (&["--limit", "99", "--sample"], &lines),
    ] {
        let entries: Vec<&Value> = taken.iter().map(|i| &golden[*i]).collect();
        let (sum, pieces, _) = totals(&entries, "piece");
        let result = place.json("perplexity", &data, more);
        near(&result["loss"], -sum / pieces);
        assert_eq!(result["texts"], taken.len());
    }
}

/// Lines of minimal pairs: (good, bad, paradigm, phenomenon, field).
fn pairs(rows: &[[&str; 5]]) -> String {
    let line = |row: &[&str; 5]| {
        let keys = ["sentence_good", "sentence_bad", "UID", "linguistics_term", "field"];
        let object: serde_json::Map<String, Value> =
            keys.iter().map(|k| k.to_string()).zip(row.map(Value::from)).collect();
        Value::Object(object).to_string() + "\n"
    };
    rows.iter().map(line).collect()
}

#[test]
fn pairs_are_counted_by_paradigm_phenomenon_and_field() {
    let place = Place::new(false);
    // By the golden values: −24.7 against −22.2, −5.1 against −2.9, and two that are the same to the tokenizer.
    let (lower, higher) = ("The cat sat on the puppet.", "the cat sat on the puppet");
    let rows = [
        [higher, lower, "first", "one", "syntax"],
        [lower, higher, "first", "one", "syntax"],
        ["a", "?", "first", "one", "syntax"],
        [higher, lower, "second", "one", "syntax"],
        ["a cat", "A  CAT", "third", "two", "semantics"],
    ];
    let data = place.file("pairs.jsonl.zst", &zstd::encode_all(pairs(&rows).as_bytes(), 0).unwrap());
    let result = place.json("blimp", &data, &[]);
    let tally = |correct: usize, ties: usize, pairs: usize| json!({"accuracy": correct as f64 / pairs as f64, "correct": correct, "ties": ties, "pairs": pairs});
    assert_eq!(
        result["paradigms"],
        json!({"first": tally(2, 0, 3), "second": tally(1, 0, 1), "third": tally(0, 1, 1)})
    );
    assert_eq!(result["phenomena"], json!({"one": tally(3, 0, 4), "two": tally(0, 1, 1)}));
    assert_eq!(result["fields"], json!({"syntax": tally(3, 0, 4), "semantics": tally(0, 1, 1)}));
    near(&result["accuracy"], 0.6);
    assert_eq!((&result["pairs"], &result["ties"], &result["scoring"]), (&json!(5), &json!(1), &json!("piece")));

    let first = place.json("blimp", &data, &["--limit", "1"]);
    assert_eq!(first["paradigms"]["first"], tally(1, 0, 1));
    assert_eq!(first["pairs"], 3);
    let sampled = place.json("blimp", &data, &["--limit", "2", "--sample"]);
    assert_eq!(sampled["paradigms"]["first"], tally(1, 0, 2), "the second and the third");

    let output = place.eval("blimp", &data, &[]);
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && table.contains("1 ties") && table.contains("60.00%"), "{table}");
    let (best, worst) = (table.find("second").unwrap(), table.find("third").unwrap());
    assert!(best < table.find("first").unwrap() && table.find("first").unwrap() < worst, "sorted: {table}");
}

#[test]
fn every_mistake_gets_a_clear_word() {
    let place = Place::new(false);
    let good = pairs(&[["a", "?", "p", "t", "f"]]);
    let file = |name: &str, text: &str| place.file(name, text.as_bytes());
    let missing = file("missing.jsonl", &(good.clone() + "\n" + &good.replace("UID", "uid")));
    place.fails(1, "blimp", &missing, &[], &["missing.jsonl, line 3", "`UID` is missing", "`sentence_good`"]);
    let number = file("number.jsonl", &good.replace("\"?\"", "7"));
    place.fails(1, "blimp", &number, &[], &["line 1", "`sentence_bad` is not a string"]);
    place.fails(
        1,
        "blimp",
        &file("text.jsonl", "a text\n"),
        &[],
        &["text.jsonl, line 1", "JSON object with the keys `sentence_good`"],
    );
    for task in ["blimp", "perplexity"] {
        place.fails(1, task, &file("empty", " \n\n"), &[], &["empty has no"]);
        place.fails(1, task, "nowhere.txt", &[], &["cannot open nowhere.txt"]);
    }
    let text = file("text.txt", "the cat\n");
    place.fails(2, "glue", &text, &[], &["glue", "perplexity", "blimp"]);
    place.fails(2, "perplexity", &text, &["--sample"], &["--limit"]);
    place.fails(2, "perplexity", &text, &["--limit", "0"], &["from 1 to"]);
    place.fails(1, "perplexity", "-", &["--limit", "1", "--sample"], &["standard input", "name a file"]);
    std::fs::write(place.at("latin"), b"fine\ncaf\xe9\n").unwrap();
    place.fails(1, "perplexity", place.at("latin").to_str().unwrap(), &[], &["line 2", "UTF-8"]);
    let causal = Place::new(true);
    causal.fails(1, "perplexity", &text, &["--scoring", "word"], &["left to right", "leave --scoring out"]);

    let encoder = Place::new(false);
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/bert-golden/model");
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(golden.join(name), encoder.at(name)).unwrap();
    }
    encoder.fails(1, "perplexity", &text, &[], &["masked-LM head is needed", "cls.predictions"]);
}
