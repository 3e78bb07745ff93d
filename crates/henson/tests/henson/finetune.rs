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
    fails(&place.henson(&ask), 1, &["exists already", "--overwrite"]);
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
    fails(&place.finetune("tag", "tag.conll", "bad", &["--grid", "nothing=1"]), 1, &["unknown setting `nothing`"]);
}

/// Without a dev file: folds for few rows, a part of many, nothing for who wants nothing; and it is reported.
#[test]
fn a_score_without_a_dev_file() {
    let place = Place::new("sequence");
    let (file, model) = (data("finetune/classify.jsonl"), place.model.to_str().unwrap().to_owned());
    let tune = |train: &str, out: &str, more: &[&str]| {
        let (out, common) =
            (place.at(out), ["--set", "epochs=1", "--set", "learning_rate=1e-3", "--set", "batch_size=3"]);
        let files = ["finetune", "--task", "classify", "--model", &model, "--train", train, "--out", &out];
        place.henson(&[&files[..], &common, more].concat())
    };
    // Six rows: three folds of two.
    let output = tune(&file, "folds", &[]);
    fails(&output, 0, &["no dev file, 6 rows: 3 folds estimate the score", "fold 3 of 3", "estimated by 3 folds"]);
    assert!(text(&output.stderr).contains('±'), "{}", text(&output.stderr));
    let results: Value =
        serde_json::from_str(&std::fs::read_to_string(place.at("folds/results.json")).unwrap()).unwrap();
    assert_eq!(results["folds"]["values"].as_array().unwrap().len(), 3);
    assert_eq!(results["value"], results["folds"]["mean"]);
    fails(&tune(&file, "two", &["--folds", "2"]), 0, &["estimated by 2 folds"]);
    fails(&tune(&file, "none", &["--dev", "none"]), 0, &["no dev data: the last model is kept, without a score"]);
    fails(&tune(&file, "both", &["--dev", &file, "--folds", "2"]), 2, &["--folds"]);
    fails(&tune(&file, "nine", &["--folds", "9"]), 1, &["`folds` is 9", "2 to 6"]);
    let recipe = |run: &str| std::fs::read_to_string(format!("{}/recipe.toml", place.at(run))).unwrap();
    assert!(recipe("folds").contains("folds = 3") && recipe("none").contains("folds = 0"));
    // Five hundred rows.
    let many = place.at("many.jsonl");
    let row = |i: usize| format!("{{\"text\": \"a cat {i}\", \"label\": \"{}\"}}\n", ["yes", "no"][i % 2]);
    std::fs::write(&many, (0..500).map(row).collect::<String>()).unwrap();
    let output = tune(&many, "split", &["--json"]);
    fails(&output, 0, &["100 of 500 rows are held out", "--dev none"]);
    assert_eq!(lines(&output).last().unwrap()["dev_rows"], 100);
    assert!(recipe("split").contains("dev_rows = 100"));
    // The same command again knows that it is finished, and a dev file is another run.
    assert_eq!(lines(&tune(&many, "split", &["--json"])).len(), 1);
    fails(&tune(&many, "split", &["--dev", &file]), 1, &["dev_rows: was 100, now 0"]);
    // A search without a dev file chooses by the same.
    let table = lines(&tune(&file, "search", &["--restarts", "2", "--json"])).pop().unwrap();
    assert!(table["cells"].as_array().unwrap().iter().all(|cell| cell["value"].is_number()), "{table}");
}

/// What is left by a kill before the first rename is no foreign directory, for each kind of run.
#[test]
fn killed_in_the_first_moment() {
    let place = Place::new("token");
    let leave = |directory: &str, names: &[&str]| {
        std::fs::create_dir_all(place.at(directory)).unwrap();
        for name in names {
            std::fs::write(Path::new(&place.at(directory)).join(name), "half").unwrap();
        }
    };
    let left = ["run.lock", ".recipe.toml.henson-tmp-4711-0"];
    let short = ["--set", "epochs=1"];
    leave("run", &left);
    fails(&place.finetune("tag", "tag.conll", "run", &short), 0, &[]);
    leave("frozen", &left);
    let frozen = ["--frozen", "--layers", "last"];
    let files = data("finetune/tag.conll");
    let (model, out) = (place.model.to_str().unwrap(), place.at("frozen"));
    let common = ["finetune", "--task", "tag", "--model", model, "--train", &files, "--dev", &files, "--out", &out];
    fails(&place.henson(&[&common[..], &frozen, &short].concat()), 0, &[]);
    leave("search", &[".search.toml.henson-tmp-4711-0"]);
    let search = [&short[..], &["--restarts", "2"]].concat();
    fails(&place.finetune("tag", "tag.conll", "search", &search), 0, &[]);
    // And a run of the search.
    let first = std::fs::read_dir(place.at("search/runs")).unwrap().next().unwrap().unwrap().file_name();
    let first = format!("search/runs/{}", first.to_str().unwrap());
    std::fs::remove_dir_all(place.at(&first)).unwrap();
    leave(&first, &left);
    fails(&place.finetune("tag", "tag.conll", "search", &search), 0, &[]);
    for run in ["run", "frozen", "search", &first] {
        assert!(Path::new(&place.at(run)).join("results.json").is_file(), "{run}");
        let left = std::fs::read_dir(place.at(run)).unwrap().map(|entry| entry.unwrap().file_name());
        assert_eq!(left.filter(|name| name.to_string_lossy().contains("henson-tmp")).count(), 0, "{run}");
    }
    leave("thesis", &["thesis.tex"]);
    fails(&place.finetune("tag", "tag.conll", "thesis", &short), 1, &["holds no run of henson"]);
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
    fails(
        &place.finetune("classify", "classify.jsonl", "out", &["--set", "epoch=3"]),
        1,
        &["unknown setting `epoch`", "did you mean `epochs`"],
    );
    fails(&place.finetune("magic", "classify.jsonl", "out", &[]), 2, &["magic", "classify"]);
    fails(&place.finetune("classify", "classify.jsonl", "out", &["--set", "max_length=2"]), 1, &["`max_length` is 2"]);
    let longer = place.finetune("classify", "classify.jsonl", "longer", &["--set", "max_length=999", "--stop-at", "0"]);
    fails(&longer, 0, &["warning: a length of 999 was asked for, and the model takes no more than 40"]);
    fails(&place.finetune("classify", "classify.jsonl", "model/vocab.txt", &[]), 1, &["vocab.txt is a file"]);
    let labels = ["--labels", "bad,fair,good,better", "--stop-at", "0"];
    fails(&place.finetune("classify", "classify.jsonl", "labels", &labels), 0, &["has \"better\"", "not learned"]);
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
    finetune(&["--task", "classify", "--data", &table], &["table.tsv is not a directory", "--train"]);
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

/// Files with columns of their own: a task, a file's name and text, and the flags that describe it.
type OwnFile = (&'static str, &'static str, &'static str, &'static [&'static str]);

const OWN_FILES: [OwnFile; 7] = [
    (
        "classify",
        "notes.dat",
        "nr,body,urgent\n7,the cat sat,yes\n8,a dog,no\n9,\"a man, old\",yes\n10,who sings,no\n",
        &[
            "--format",
            "csv",
            "--text-column",
            "body",
            "--label-column",
            "urgent",
            "--id-column",
            "nr",
            "--labels",
            "yes,no",
        ],
    ),
    (
        "multilabel",
        "marks.csv",
        "the cat sat,1,0\na dog,0,1\na man,1,1\nwho sings,0,0\n",
        &["--header", "false", "--text-column", "0", "--label-column", "1,2"],
    ),
    (
        "ner",
        "words.jsonl",
        "{\"w\": [\"jim\", \"sat\"], \"t\": [\"B-PER\", \"O\"]}\n{\"w\": [\"a\", \"man\", \"henson\"], \"t\": [\"O\", \"O\", \"B-PER\"]}\n",
        &["--text-column", "w", "--label-column", "t"],
    ),
    (
        "ner",
        "tagger.txt",
        "B-PER jim x\nO sat x\n\nO a y\nB-PER man y\n",
        &["--text-column", "1", "--label-column", "0", "--frozen", "--layers", "last", "--head", "linear"],
    ),
    (
        "qa",
        "asked.jsonl",
        "{\"q\": \"who sat?\", \"p\": \"the cat sat\", \"a\": {\"text\": [\"cat\"], \"answer_start\": [4]}}\n\
         {\"q\": \"who ran?\", \"p\": \"a dog ran\", \"a\": {\"text\": [\"dog\"], \"answer_start\": [2]}}\n",
        &["--text-column", "q", "--second-column", "p", "--label-column", "a"],
    ),
    (
        "choice",
        "ends.csv",
        "start,a,b,best\nthe man sat on,the dog,walked,0\nwho sings,new,the puppets,1\n",
        &["--text-column", "start", "--choice-columns", "a,b", "--label-column", "best"],
    ),
    (
        "embed",
        "pairs.csv",
        "x,y,z\nthe cat sat,cats are dogs,the sea\na woman ran,the man walked,\nwho was jim,jim,old\n",
        &["--text-column", "x", "--second-column", "y", "--negative-column", "z"],
    ),
];

#[test]
fn a_run_from_the_recipe_of_another_has_the_same_bits() {
    for (task, name, content, flags) in OWN_FILES {
        let place = Place::new("sequence");
        let (file, first, second) = (place.at(name), place.at("first"), place.at("second"));
        std::fs::write(&file, content).unwrap();
        let tune = ["finetune", "--task", task, "--model", place.model.to_str().unwrap(), "--train", &file];
        let more = ["--dev", &file, "--out", &first, "--set", "epochs=2", "--set", "batch_size=2", "--seed", "3"];
        let results = lines(&place.henson(&[&tune[..], &more, &["--json"], flags].concat())).pop().unwrap();
        let recipe = format!("{first}/recipe.toml");
        lines(&place.henson(&["finetune", &recipe, "--out", &second, "--json"]));
        for weights in ["model.safetensors", "tagger.safetensors", "recipe.toml", "results.json"] {
            let bytes = |run: &str| std::fs::read(Path::new(run).join(weights)).unwrap_or_default();
            let (ours, theirs) = (bytes(&first), bytes(&second));
            if weights == "results.json" {
                let scores = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).unwrap()["scores"].clone();
                assert_eq!(scores(&ours), scores(&theirs), "{name}");
            } else {
                assert!(ours == theirs, "{name}: {weights} differs");
            }
        }
        // The model knows what it was trained for, and how its files are written.
        let eval = lines(&place.henson(&["eval", "--model", &first, "--data", &file, "--json"])).remove(0);
        let metric = results["metric"].as_str().unwrap();
        assert_eq!((&eval["task"], &eval[metric]), (&Value::from(task), &results["value"]), "{name}");
        lines(&place.henson(&["predict", "--model", &first, "--data", &file, "--out", &place.at("said")]));
    }
}

#[test]
fn columns_of_the_training_hold_until_flags_name_others() {
    let (task, name, content, flags) = OWN_FILES[0];
    let place = Place::new("sequence");
    let (file, run, model) = (place.at(name), place.at("run"), place.model.to_str().unwrap());
    std::fs::write(&file, content).unwrap();
    let tune = ["finetune", "--task", task, "--model", model, "--train", &file, "--out", &run, "--set", "epochs=1"];
    lines(&place.henson(&[&tune[..], flags].concat()));
    // Predictions need no labels, and ids come from the same column. A name says more about a format than the recipe does.
    let bare = place.at("new.tsv");
    std::fs::write(&bare, "nr\tbody\n41\ta cat\n").unwrap();
    lines(&place.henson(&["predict", "--model", &run, "--data", &bare, "--out", &place.at("said")]));
    let said = std::fs::read_to_string(place.at("said/predictions.jsonl")).unwrap();
    assert!(said.contains("\"41\""), "{said}");
    // Other columns are an error that says where the names are from; flags overrule them.
    let other = place.at("other.csv");
    std::fs::write(&other, "text,label\na cat,yes\na dog,no\n").unwrap();
    let eval = ["eval", "--model", &run, "--data", &other];
    fails(&place.henson(&eval), 1, &["expected \"body\"", "those of the training", "recipe.toml", "--text-column"]);
    let named = ["--text-column", "text", "--label-column", "label", "--json"];
    assert_eq!(lines(&place.henson(&[&eval[..], &named].concat()))[0]["examples"], 2);
    // Keys of the recipe are checked as others are, and a run of version 0.1 has none of them.
    let recipe = format!("{run}/recipe.toml");
    let text = std::fs::read_to_string(&recipe).unwrap();
    let again = place.at("again");
    for (wrong, expected) in [("text_colum = \"x\"", "`text_colum`"), ("text_column = 1.5", "name of a column")] {
        std::fs::write(&recipe, text.replace("text_column = \"body\"", wrong)).unwrap();
        fails(&place.henson(&["finetune", &recipe, "--out", &again]), 1, &[expected]);
        fails(&place.henson(&eval), 1, &["recipe.toml", expected]);
    }
    std::fs::write(&recipe, text.split("\n[files]").next().unwrap()).unwrap();
    assert_eq!(lines(&place.henson(&[&eval[..], &["--json"]].concat()))[0]["examples"], 2);
    std::fs::remove_file(&recipe).unwrap();
    fails(&place.henson(&eval), 1, &["--task is missing", "recipe.toml"]);
}

/// All files under a directory that hold a text.
fn files_with(directory: &str, text: &str) -> Vec<PathBuf> {
    let (mut found, mut places, mut seen) = (Vec::new(), vec![PathBuf::from(directory)], 0);
    while let Some(place) = places.pop() {
        for entry in std::fs::read_dir(&place).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                places.push(path);
                continue;
            }
            seen += 1;
            if std::fs::read(&path).unwrap().windows(text.len()).any(|bytes| bytes == text.as_bytes()) {
                found.push(path);
            }
        }
    }
    assert!(seen > 5, "{directory} has {seen} files");
    found
}

/// What no file of a model may hold: it stands in every text, id and answer of the files below.
const SECRET: &str = "zqxsecret";

#[test]
fn no_text_of_the_files_is_left_with_the_model() {
    let marked = OWN_FILES.map(|(task, name, content, flags)| {
        let content = content.replace("sat", SECRET).replace("a dog", &format!("a {SECRET} dog"));
        let content = content.replace("cat", SECRET).replace("man", SECRET).replace("\n7,", &format!("\n{SECRET},"));
        // The answers are moved along.
        (task, name, content.replace("[2]", &format!("[{}]", SECRET.len() + 3)), flags)
    });
    let cases = marked.iter().map(|(task, name, content, flags)| (*task, *name, content, flags.to_vec()));
    let (task, name, content, flags) = &marked[0];
    let more = [&["--frozen"][..], &["--restarts", "2"]].map(|more| (*task, *name, content, [flags, more].concat()));
    for (task, name, content, flags) in cases.chain(more) {
        let place = Place::new("sequence");
        let (file, out, model) = (place.at(name), place.at("run"), place.model.to_str().unwrap());
        std::fs::write(&file, content).unwrap();
        assert!(content.matches(SECRET).count() > 1, "{content}");
        let tune = ["finetune", "--task", task, "--model", model, "--train", &file, "--dev", &file, "--out", &out];
        let output = place.henson(&[&tune[..], &["--set", "epochs=1", "--set", "learning_rate=1e-6"], &flags].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert_eq!(files_with(&out, SECRET), Vec::<PathBuf>::new(), "{task} {flags:?}");
        // The terminal shows mistakes, and a file has them where it is asked for.
        if flags.contains(&"--restarts") {
            continue;
        }
        let (again, wrong) = (place.at("again"), place.at("wrong.jsonl"));
        let recipe = format!("{out}/recipe.toml");
        let output = place.henson(&["finetune", &recipe, "--out", &again, "--mistakes", &wrong]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let mistakes = std::fs::read_to_string(&wrong).unwrap();
        assert_eq!(text(&output.stderr).contains("mistakes on examples"), !mistakes.is_empty(), "{task} {flags:?}");
        assert_eq!(text(&output.stderr).contains(SECRET), mistakes.contains(SECRET), "{task}: {mistakes}");
        if task == "classify" {
            assert!(mistakes.contains(SECRET), "{mistakes}");
            fails(&place.henson(&["finetune", &recipe, "--out", &again, "--mistakes", &wrong]), 1, &["exists already"]);
            std::fs::remove_file(&wrong).unwrap();
            let finished = place.henson(&["finetune", &recipe, "--out", &again, "--mistakes", &wrong]);
            fails(&finished, 1, &["was finished before", "henson eval"]);
        }
    }
}

#[test]
fn names_of_classes_come_from_the_schema_and_numbers_alone_are_refused() {
    let place = Place::new("sequence");
    let tune = |task: &str, file: &str, out: &str| {
        let (file, out, model) = (data(&format!("tasks/{file}")), place.at(out), place.model.to_str().unwrap());
        let files = ["finetune", "--task", task, "--model", model, "--train", &file, "--dev", &file, "--out", &out];
        place.henson(&[&files[..], &["--set", "epochs=1", "--json"]].concat())
    };
    let results = lines(&tune("ner", "tags-named.parquet", "tags")).pop().unwrap();
    assert_eq!(results["metric"], "f1");
    lines(&tune("classify", "topics-named.parquet", "topics"));
    let config = std::fs::read_to_string(place.at("topics/config.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    assert_eq!(config["id2label"], serde_json::json!({"0": "sport", "1": "arts", "2": "news"}));
    fails(&tune("ner", "tags-nameless.parquet", "none"), 1, &["has numbers for tags", "--labels", "--task pos"]);
    assert!(!Path::new(&place.at("none")).exists());
}
