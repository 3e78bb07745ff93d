//! A small ModernBERT with the tokenizer that `transformers` saved for it, from raw text to answers.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;

const TESTS_DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests-data");
const TOKENIZER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../text/tests/data/transformers/modernbert");

fn henson(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_henson"));
    command.args(arguments).env_remove("HENSON_KERNELS").stdin(Stdio::null()).output().unwrap()
}

#[track_caller]
fn works(arguments: &[&str]) -> Vec<Value> {
    let output = henson(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

/// A run of pre-training with StableAdamW, windows of eight tokens and sequences of several of them.
fn pretrain(data: &str, out: &str, more: &[&str]) -> Vec<Value> {
    let sets = [
        "steps=16",
        "batch_size=8",
        "sequence_length=64",
        "objective=mlm",
        "packing=blocks",
        "mask_probability=0.3",
        "optimizer=stable-adamw",
        "schedule=warmup-stable-sqrt",
        "learning_rate=3e-3",
        "beta2=0.98",
        "clip=0",
        "warmup_steps=2",
        "decay_steps=5",
        "checkpoint_every=4",
        "eval_every=16",
        "eval_sequences=8",
        "config.hidden_size=32",
        "config.intermediate_size=48",
        "config.num_hidden_layers=4",
        "config.num_attention_heads=2",
        "config.local_attention=8",
        "config.max_position_embeddings=512",
    ];
    let mut arguments = vec!["pretrain", "--model", "modernbert-mini", "--data", data, "--out", out];
    arguments.extend(sets.iter().flat_map(|set| ["--set", set]));
    arguments.extend(more);
    works(&arguments)
}

#[test]
fn from_text_to_answers() {
    let directory = TempDir::new().unwrap();
    let at = |name: &str| directory.path().join(name).display().to_string();
    let text = std::fs::read_to_string(format!("{TESTS_DATA}/text/novels.txt")).unwrap();
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).take(600).collect();
    let documents: Vec<String> = lines.chunks(6).map(|document| document.join("\n")).collect();
    std::fs::write(at("text.txt"), documents.join("\n\n")).unwrap();
    let (data, run) = (at("data"), at("run"));
    works(&["data", "build", "--tokenizer", TOKENIZER, "--out", &data, "--held-out", "0.2", &at("text.txt")]);

    // Stopped and resumed, it ends with the same bits.
    pretrain(&data, &run, &[]);
    pretrain(&data, &at("legs"), &["--stop-at", "6"]);
    assert!(!Path::new(&at("legs")).join("model.safetensors").exists(), "it was stopped");
    pretrain(&data, &at("legs"), &[]);
    let weights = |run: &str| std::fs::read(format!("{run}/model.safetensors")).unwrap();
    assert!(weights(&run) == weights(&at("legs")));
    let log = std::fs::read_to_string(format!("{run}/metrics.jsonl")).unwrap();
    let log: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let evaluated: Vec<f64> =
        log.iter().filter(|line| line["kind"] == "eval").filter_map(|line| line["metrics"]["loss"].as_f64()).collect();
    let (first, last) = (evaluated[0], evaluated[evaluated.len() - 1]);
    assert!(last < first - 0.5, "{evaluated:?}");

    let info = &works(&["info", &run, "--json"])[0];
    assert_eq!(info["architecture"], "ModernBertForMaskedLM");
    assert_eq!(info["max_position_embeddings"], 512);
    // The mask is the tokenizer's own, with the space before it.
    let filled = &works(&["fill", "--model", &run, "--json", "the [MASK] of the house"])[0];
    assert_eq!((&filled["masks"][0]["start"], &filled["masks"][0]["end"]), (&Value::from(3), &Value::from(10)));
    assert_eq!(filled["masks"][0]["predictions"].as_array().map(Vec::len), Some(5), "{filled}");
    let vector = &works(&["embed", "--model", &run, "--json", "a text"])[0];
    assert_eq!(vector["embedding"].as_array().map(Vec::len), Some(32), "{vector}");
    let features = &works(&["features", "--model", &run, "--layers", "concat-last-4", "a text"])[0];
    assert_eq!(features["width"], 4 * 32, "{features}");

    // A head of each kind: on the mean of all tokens, on tokens, on pairs with spans.
    let tuned = |task: &str, file: &str| {
        let (file, out) = (format!("{TESTS_DATA}/finetune/{file}"), at(task));
        let given = ["finetune", "--task", task, "--model", &run, "--train", &file, "--dev", &file, "--out", &out];
        let sets = ["--epochs", "1", "--learning-rate", "1e-3", "--batch-size", "8", "--json"];
        works(&[&given[..], &sets].concat());
        out
    };
    let model = tuned("classify", "classify.jsonl");
    let config: Value =
        serde_json::from_str(&std::fs::read_to_string(format!("{model}/config.json")).unwrap()).unwrap();
    assert_eq!(config["architectures"][0], "ModernBertForSequenceClassification");
    assert_eq!(config["classifier_pooling"], "mean");
    assert!(works(&["classify", "--model", &model, "--json", "good"])[0]["label"].is_string());
    let model = tuned("tag", "tag.conll");
    assert!(works(&["tag", "--model", &model, "--json", "Jim Henson"])[0]["entities"].is_array());
    let model = tuned("qa", "qa.json");
    let asked =
        ["answer", "--model", &model, "--json", "--question", "who?", "--passage", "Jim Henson was a puppeteer."];
    assert!(works(&asked)[0]["candidates"].is_array());
}
