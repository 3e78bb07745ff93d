//! `finetune`, `predict` and `eval --model` as a user meets them, on the golden models and the files of tests-data/finetune.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

fn data(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data").join(name).to_str().unwrap().to_owned()
}

struct Place {
    directory: TempDir,
    model: PathBuf,
}

impl Place {
    /// A directory with a golden model in it.
    fn new(head: &str) -> Self {
        let directory = TempDir::new().unwrap();
        let model = directory.path().join("model");
        std::fs::create_dir(&model).unwrap();
        for name in ["model.safetensors", "config.json"] {
            std::fs::copy(data(&format!("bert-golden/{head}/{name}")), model.join(name)).unwrap();
        }
        std::fs::copy(data("likelihood/vocab.txt"), model.join("vocab.txt")).unwrap();
        Self { directory, model }
    }

    fn at(&self, name: &str) -> String {
        self.directory.path().join(name).to_str().unwrap().to_owned()
    }

    fn henson(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_henson"));
        command.args(arguments).args(["--threads", "1"]).env_remove("HENSON_KERNELS").output().unwrap()
    }

    /// `finetune` with files and a few settings that make it short.
    fn finetune(&self, task: &str, file: &str, out: &str, more: &[&str]) -> Output {
        let (file, out, model) = (data(&format!("finetune/{file}")), self.at(out), self.model.to_str().unwrap());
        let common =
            ["finetune", "--task", task, "--model", model, "--train", &file, "--dev", &file, "--out", &out, "--set"];
        let settings = ["batch_size=3", "--set", "epochs=3", "--set", "max_length=40", "--set", "learning_rate=1e-3"];
        self.henson(&[&common[..], &settings, more].concat())
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[track_caller]
fn lines(output: &Output) -> Vec<Value> {
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[track_caller]
fn fails(output: &Output, code: i32, parts: &[&str]) {
    let message = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{message}");
    assert!(!message.contains("panicked"), "{message}");
    for part in parts {
        assert!(message.contains(part), "expected `{part}` in: {message}");
    }
}

#[test]
fn sentences_from_pairs_to_vectors() {
    let place = Place::new("sequence");
    let (train, dev) = (data("finetune/embed-unlike.jsonl"), data("finetune/embed-scores.jsonl"));
    let (model, out) = (place.model.to_str().unwrap(), place.at("run"));
    let tune = ["finetune", "--task", "embed", "--model", model, "--train", &train, "--dev", &dev, "--out", &out];
    let results =
        lines(&place.henson(&[&tune[..], &["--set", "batch_size=4", "--set", "epochs=2", "--json"]].concat()));
    fails(&place.finetune("embed", "embed.jsonl", "other", &["--frozen"]), 1, &["`freeze` is true"]);
    let results = results.last().unwrap();
    assert_eq!(results["metric"], "spearman");
    let run = place.at("run");
    let eval = lines(&place.henson(&["eval", "--task", "embed", "--model", &run, "--data", &dev, "--json"])).remove(0);
    assert_eq!(eval["spearman"], results["value"]);
    let vectors = lines(&place.henson(&["embed", "--model", &run, "--json", "the cat sat", "a dog"]));
    let vector = |i: usize| -> Vec<f64> {
        let numbers = vectors[i]["embedding"].as_array().unwrap();
        numbers.iter().map(|number| number.as_f64().unwrap()).collect()
    };
    assert!((vector(0).iter().map(|x| x * x).sum::<f64>() - 1.0).abs() < 1e-5);
    assert_ne!(vector(0), vector(1));
}

#[test]
fn one_run_from_tables_to_scores() {
    let place = Place::new("sequence");
    let output = place.finetune("classify", "classify.jsonl", "run", &["--json"]);
    let found = lines(&output);
    // Before the first step, and after each of three epochs; then the results.
    assert_eq!(found.len(), 5);
    let results = &found[4];
    assert_eq!((&results["metric"], &results["steps"]), (&Value::from("accuracy"), &Value::from(6)));
    let file = data("finetune/classify.jsonl");
    let run = place.at("run");
    let eval = |model: &str| {
        let arguments =
            ["eval", "--task", "classify", "--model", model, "--data", &file, "--max-length", "40", "--json"];
        lines(&place.henson(&arguments)).remove(0)
    };
    assert_eq!(eval(&run)["accuracy"], results["value"]);
    assert_eq!(eval(&format!("{run},{run}"))["accuracy"], results["value"]);
    // A file without labels gives predictions that can be scored.
    let bare = place.at("bare.jsonl");
    let texts: String = std::fs::read_to_string(&file)
        .unwrap()
        .lines()
        .map(|line| {
            let row: Value = serde_json::from_str(line).unwrap();
            format!("{}\n", serde_json::json!({ "text": row["text"] }))
        })
        .collect();
    std::fs::write(&bare, texts).unwrap();
    let said = place.at("said");
    let ask = ["predict", "--task", "classify", "--model", &run, "--data", &bare, "--out", &said, "--max-length", "40"];
    lines(&place.henson(&ask));
    fails(&place.henson(&ask), 1, &["is there already", "--overwrite"]);
    let predictions = format!("{said}/predictions.jsonl");
    let scored = ["eval", "--task", "classify", "--predictions", &predictions, "--data", &file, "--json"];
    assert_eq!(lines(&place.henson(&scored)).remove(0)["accuracy"], results["value"]);
    // So does one with labels that the model does not know, or only here and there.
    let strange = place.at("strange.jsonl");
    let text = std::fs::read_to_string(&file).unwrap();
    let text = text.replace("\"good\"", "\"unheard of\"").replace("\"bad\"", "\"\"");
    assert!(text.contains("unheard of") && text.contains("\"\""));
    std::fs::write(&strange, text).unwrap();
    let again = place.at("again");
    let ask =
        ["predict", "--task", "classify", "--model", &run, "--data", &strange, "--out", &again, "--max-length", "40"];
    lines(&place.henson(&ask));
    let bytes = |said: &str| std::fs::read(format!("{said}/predictions.jsonl")).unwrap();
    assert_eq!(bytes(&again), bytes(&said));
    // It knows that it was trained on single texts.
    let pair = place.henson(&["classify", "--model", &run, "--pair", "a cat", "a dog"]);
    fails(&pair, 0, &["trained on single texts"]);
    // Again: it is finished, and says the same.
    assert_eq!(&lines(&place.finetune("classify", "classify.jsonl", "run", &["--json"]))[0], results);
    fails(&place.finetune("classify", "classify.jsonl", "run", &["--seed", "4"]), 1, &["seed: was 0, now 4"]);
    fails(&place.finetune("classify", "classify.jsonl", "model", &[]), 1, &["holds no run"]);
}

#[test]
fn a_run_in_legs_and_a_search() {
    let place = Place::new("token");
    let stopped = place.finetune("tag", "tag.conll", "legs", &["--stop-at", "1"]);
    fails(&stopped, 0, &["stopped at step 1"]);
    lines(&place.finetune("tag", "tag.conll", "legs", &["--json"]));
    lines(&place.finetune("tag", "tag.conll", "whole", &["--json"]));
    let weights = |run: &str| std::fs::read(format!("{}/model.safetensors", place.at(run))).unwrap();
    assert_eq!(weights("legs"), weights("whole"));
    let grid = ["--grid", "learning_rate=1e-3,2e-3", "epochs=1", "--restarts", "2", "--json"];
    let table = lines(&place.finetune("tag", "tag.conll", "search", &grid)).pop().unwrap();
    assert_eq!((table["cells"].as_array().unwrap().len(), table["rows"].as_array().unwrap().len()), (4, 2));
    assert!(Path::new(&place.at("search")).join("model.safetensors").is_file());
    fails(
        &place.finetune("tag", "tag.conll", "bad", &["--grid", "learning_rate"]),
        1,
        &["expected a key and its values"],
    );
    fails(&place.finetune("tag", "tag.conll", "bad", &["--grid", "nothing=1"]), 1, &["unknown field `nothing`"]);
}

#[test]
fn answers_keep_their_threshold() {
    let place = Place::new("qa");
    let file = data("finetune/qa.json");
    let results = lines(&place.finetune("qa", "qa.json", "run", &["--set", "epochs=12", "--json"])).pop().unwrap();
    assert_eq!(results["metric"], "best_f1");
    let run = place.at("run");
    let eval = ["eval", "--task", "qa", "--model", &run, "--data", &file, "--max-length", "40", "--json"];
    let scores = lines(&place.henson(&eval)).remove(0);
    let same = |name: &str| (scores[name].as_f64().unwrap() - results["value"].as_f64().unwrap()).abs() < 1e-9;
    assert!(same("f1") && same("best_f1"), "{scores} {results}");
}

#[test]
fn mistakes_are_told() {
    let place = Place::new("sequence");
    fails(&place.finetune("classify", "pair.jsonl", "out", &["--text-column", "no_such"]), 1, &["no_such"]);
    fails(&place.finetune("classify", "classify.jsonl", "out", &["--set", "epoch=3"]), 1, &["unknown field `epoch`"]);
    fails(&place.finetune("magic", "classify.jsonl", "out", &[]), 2, &["magic", "classify"]);
    fails(&place.finetune("classify", "classify.jsonl", "out", &["--set", "max_length=2"]), 1, &["`max_length` is 2"]);
    let longer = place.finetune("classify", "classify.jsonl", "longer", &["--set", "max_length=999", "--stop-at", "0"]);
    fails(&longer, 0, &["warning: a length of 999 was asked for, and the model takes no more than 40"]);
    fails(&place.finetune("classify", "classify.jsonl", "model/vocab.txt", &[]), 1, &["vocab.txt is a file"]);
    let labels = ["--labels", "bad,fair,good,better", "--stop-at", "0"];
    fails(&place.finetune("classify", "classify.jsonl", "labels", &labels), 0, &["has \"better\"", "not learnt"]);
    // The directory of another command's run.
    std::fs::write(place.at("longer/recipe.toml"), "checkpoint_every = 3\n").unwrap();
    let other = place.finetune("classify", "classify.jsonl", "longer", &[]);
    fails(&other, 1, &["longer holds a run of another command", "checkpoint_every"]);
    let model = place.model.to_str().unwrap();
    let finetune = |arguments: &[&str], parts: &[&str]| {
        let common = ["finetune", "--model", model, "--out", &place.at("out")];
        fails(&place.henson(&[&common[..], arguments].concat()), 1, parts);
    };
    let table = place.at("table.tsv");
    std::fs::write(&table, "text,label\na cat,1\na dog,0\n").unwrap();
    finetune(&["--task", "classify", "--train", &table], &["found \"text,label\"", "--format csv divides there"]);
    finetune(&["--task", "classify", "--data", &table], &["table.tsv is no directory", "--train"]);
    finetune(&["--task", "qa", "--train", &table], &["table.tsv", "a JSON document as SQuAD's", ".jsonl"]);
    std::fs::write(&table, "word\tA\n".repeat(50)).unwrap();
    let tagged = ["--task", "tag", "--train", &table];
    finetune(&tagged, &["table.tsv has the labels \"A\""]);
    std::fs::write(&table, "word\tA\nword\tB\n".repeat(25)).unwrap();
    let one = place.henson(&[&["finetune", "--model", model, "--out", &place.at("one")], &tagged[..]].concat());
    fails(&one, 0, &["warning", "all 50 lines are one sentence"]);
    let recipe = place.at("recipe.toml");
    std::fs::write(&recipe, "epochs = 1\n").unwrap();
    finetune(&[&recipe, "--train", &table], &["recipe.toml names no task", "--task"]);
    let no_data = ["finetune", "--task", "rte", "--model", model, "--out", &place.at("out")];
    fails(&place.henson(&no_data), 1, &["--data DIR or --train FILE is missing"]);
    let eval = ["eval", "--task", "ner", "--model", model, "--data", &data("finetune/tag.conll")];
    fails(&place.henson(&eval), 1, &["cannot tag", "henson finetune --task tag"]);
    let eval = ["eval", "--task", "mrpc", "--model", model, "--data", &data("finetune/pair.jsonl")];
    fails(&place.henson(&eval), 1, &["unknown label"]);
    assert!(!Path::new(&place.at("out")).exists());
}
