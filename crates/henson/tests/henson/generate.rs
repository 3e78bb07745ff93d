//! `generate` as a user meets it, on tiny models whose texts `transformers` wrote as well.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

use crate::common::{run_with, text};

fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/generation")
}

fn model(name: &str) -> TempDir {
    let directory = TempDir::new().unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(data().join(name).join(file), directory.path().join(file)).unwrap();
    }
    std::fs::copy(data().join("tokenizer.json"), directory.path().join("tokenizer.json")).unwrap();
    directory
}

fn henson(arguments: &[&str], input: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_henson"));
    command.args(arguments).env_remove("HENSON_KERNELS");
    run_with(&mut command, input.as_bytes())
}

#[track_caller]
fn done(arguments: &[&str], input: &str) -> String {
    let output = henson(arguments, input);
    assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

#[track_caller]
fn lines(arguments: &[&str], input: &str) -> Vec<Value> {
    done(arguments, input).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[track_caller]
fn fails(code: i32, arguments: &[&str], parts: &[&str]) {
    let output = henson(arguments, "");
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {message}");
    assert!(output.stdout.is_empty() && !message.contains("panicked"), "{arguments:?}: {message}");
    for part in parts {
        assert!(message.contains(part), "{arguments:?}: expected `{part}` in: {message}");
    }
}

fn shown(ids: &Value) -> String {
    ids.as_array().unwrap().iter().map(Value::to_string).collect::<Vec<_>>().join(" ")
}

/// Ids in, ids out: those of `transformers`, for a file of prompts of unequal lengths.
#[test]
fn ids_are_those_of_transformers() {
    for name in ["gpt2", "t5", "bart"] {
        let model = model(name);
        let golden: Value =
            serde_json::from_slice(&std::fs::read(data().join(name).join("golden.json")).unwrap()).unwrap();
        let cases = golden["cases"].as_array().unwrap();
        let prompts: String = cases.iter().map(|case| shown(&case["source"]) + "\n").collect();
        let common = [
            "generate",
            "--model",
            model.path().to_str().unwrap(),
            "--ids",
            "--json",
            "--max-new-tokens",
            "64",
            "--threads",
            "2",
        ];
        // The model's own end is one that random texts may have: it is kept away.
        for (tag, more) in [("greedy", &["--min-new-tokens", "64"][..])] {
            let found = lines(&[&common[..], more].concat(), &prompts);
            assert_eq!(found.len(), cases.len());
            for (found, case) in found.iter().zip(cases) {
                let golden = case["generated"].as_array().unwrap().iter().find(|golden| golden["tag"] == tag).unwrap();
                let expected = &golden["ids"][0];
                if !expected.as_array().unwrap().contains(&Value::from(2)) {
                    assert_eq!(&found["ids"], expected, "{name}");
                }
                assert_eq!(found["prompt_ids"], case["source"]);
                assert_eq!((&found["sequence"], &found["finish_reason"]), (&Value::from(0), &Value::from("length")));
                assert!(
                    found["score"].as_f64().unwrap() < 0.0 && found["text"].is_string() && found["prompt"].is_null()
                );
            }
        }
    }
}

#[test]
fn texts_files_and_draws() {
    let model = model("gpt2");
    let directory = model.path().to_str().unwrap();
    let common = ["generate", "--model", directory, "--max-new-tokens", "12"];
    let with = |more: &[&str]| [&common[..], more].concat().into_iter().map(str::to_owned).collect::<Vec<_>>();
    let run = |more: &[&str], input: &str| done(&with(more).iter().map(String::as_str).collect::<Vec<_>>(), input);
    let json = |more: &[&str], input: &str| -> Vec<Value> {
        run(&[&["--json"], more].concat(), input).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let plain = json(&["hello", "a b"], "");
    assert_eq!((plain.len(), &plain[1]["prompt"]), (2, &Value::from("a b")));
    assert_eq!(plain, json(&[], "hello\n\na b\n"));
    // One text is printed as it is; several take a line each.
    assert_eq!(run(&["hello"], ""), format!("{}\n", plain[0]["text"].as_str().unwrap()));
    let both = run(&["hello", "a b"], "");
    assert_eq!(both.lines().count(), 2);

    // A seed gives the same text alone and among others, and another one another text.
    let draw = ["--temperature", "1.5", "--top-k", "0", "--seed"];
    let seven = json(&[&draw[..], &["7", "hello", "a b"]].concat(), "");
    assert_eq!(seven[1], json(&[&draw[..], &["7", "a b"]].concat(), "")[0]);
    assert_ne!(seven[0]["ids"], json(&[&draw[..], &["8", "hello"]].concat(), "")[0]["ids"]);
    let several = json(&[&draw[..], &["7", "--return-sequences", "3", "--logprobs", "2", "a b"]].concat(), "");
    assert_eq!((several.len(), &several[2]["sequence"]), (3, &Value::from(2)));
    assert_eq!(several[0]["ids"], seven[1]["ids"]);
    assert_ne!(several[0]["ids"], several[1]["ids"]);
    let tokens = several[0]["logprobs"].as_array().unwrap();
    assert!(
        tokens.len() == several[0]["ids"].as_array().unwrap().len() && tokens[0]["top"].as_array().unwrap().len() == 2
    );
    let beams = json(&["--beams", "3", "--return-sequences", "2", "--length-penalty", "-1.5", "hello"], "");
    assert!(beams[0]["score"].as_f64() >= beams[1]["score"].as_f64() && beams.len() == 2);

    let out = model.path().join("out.jsonl");
    let out = out.to_str().unwrap();
    assert_eq!(run(&["--json", "--out", out], "hello\na b\n"), "");
    let written = std::fs::read_to_string(out).unwrap();
    assert_eq!(written.lines().map(|line| serde_json::from_str(line).unwrap()).collect::<Vec<Value>>(), plain);
    fails(1, &[&common[..], &["--out", out, "hello"]].concat(), &["exists: --overwrite replaces it"]);
    run(&["--out", out, "--overwrite", "hello", "a b"], "");
    assert_eq!(std::fs::read_to_string(out).unwrap(), both);

    let first: String = plain[0]["text"].as_str().unwrap().chars().skip(4).take(2).collect();
    let stopped = &json(&["--stop", &first, "hello"], "")[0];
    assert_eq!(stopped["finish_reason"], "stop");
    assert!(!stopped["text"].as_str().unwrap().contains(&first));
}

#[test]
fn errors_and_what_is_listed() {
    let t5 = model("t5");
    let parts = ["has no head that predicts single tokens", "an encoder-decoder that writes", "henson generate"];
    fails(1, &["fill", "--model", t5.path().to_str().unwrap(), "w1"], &parts);
    let model = model("gpt2");
    let directory = model.path().to_str().unwrap();
    let at = |more: &'static [&'static str]| [&["generate", "--model", directory], more].concat();
    fails(1, &["generate", "hello"], &["generate needs --model"]);
    fails(1, &at(&["--temperature", "0", "a"]), &["temperature is 0, expected a number above 0"]);
    fails(1, &at(&["--temperature", "NaN", "a"]), &["temperature is NaN"]);
    fails(1, &at(&["--beams", "2", "--top-k", "3", "a"]), &["--beams follows the likeliest sequences"]);
    fails(1, &at(&["--sample=false", "--seed", "3", "a"]), &["--sample=false takes the likeliest token"]);
    fails(1, &at(&["--return-sequences", "2", "a"]), &["return_sequences is 2"]);
    fails(1, &at(&["--beams", "100000", "--return-sequences", "100000", "a"]), &["beams is 100000"]);
    fails(1, &at(&["--ids", "1 x"]), &["text 1", "expected token ids"]);
    fails(1, &at(&["--ids", "1 64"]), &["token id 64 is not in the model's vocabulary of 64"]);
    let long = "a".repeat(200);
    fails(1, &[&at(&["b"])[..], &[&long]].concat(), &["text 2 has 200 tokens, and the model takes 96"]);
    let bert = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/bert-golden/mlm");
    fails(
        1,
        &["generate", "--model", bert.to_str().unwrap(), "a"],
        &["it is a masked language model (BertForMaskedLM)"],
    );

    let info = &lines(&["info", directory, "--json"], "")[0];
    assert!(info.to_string().contains("\"generate\""), "{info}");
    let bench =
        ["bench", "generate", "--model", directory, "--streams", "3", "--prompt-length", "5", "--new-tokens", "9"];
    let measured = &lines(&[&bench[..], &["--json", "--rounds", "1", "--threads", "1"]].concat(), "")[0];
    assert!(measured["tokens_per_s"].as_f64().unwrap() > 0.0 && measured["mb_per_token"].as_f64().unwrap() > 0.0);
    assert_eq!((&measured["streams"], &measured["prompt_tokens"]), (&Value::from(3), &Value::from(15)));
    assert!(done(&[&bench[..], &["--profile", "--rounds", "1"]].concat(), "").contains("attention"));
    // What would never be written is not measured.
    for (model, begun) in [(directory, 32), ("bart-mini", 1)] {
        let too_many = ["bench", "generate", "--model", model, "--new-tokens", "99999"];
        fails(1, &too_many, &[&format!("too few for 99999 new ones after {begun}"), "--new-tokens"]);
    }
}
