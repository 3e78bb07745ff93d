//! Commands without `--model`: the models beside the program are used, and where there are none, the message says where they
//! were looked for and what to do. A program of its own is put into an empty directory, and HENSON_MODELS is set, so that
//! what lies in the source tree does not matter.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;

/// An installed henson: `bin/henson`, and whatever models are put beside it.
struct Installed(TempDir);

impl Installed {
    fn new() -> Self {
        let root = TempDir::new().unwrap();
        std::fs::create_dir(root.path().join("bin")).unwrap();
        let (built, own) = (env!("CARGO_BIN_EXE_henson"), root.path().join("bin/henson"));
        std::fs::hard_link(built, &own).or_else(|_| std::fs::copy(built, &own).map(drop)).unwrap();
        Self(root)
    }

    fn at(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }

    /// The golden weights of a head with a vocabulary of its 71 pieces, as a model beside the program.
    fn put(&self, head: &str, place: &str) {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/bert-golden").join(head);
        let directory = self.at(place);
        std::fs::create_dir_all(&directory).unwrap();
        for file in ["config.json", "model.safetensors"] {
            std::fs::copy(golden.join(file), directory.join(file)).unwrap();
        }
        let mut pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"].map(str::to_owned).to_vec();
        pieces.extend((pieces.len()..71).map(|i| format!("word{i}")));
        std::fs::write(directory.join("vocab.txt"), pieces.join("\n") + "\n").unwrap();
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.at("bin/henson"));
        command
            .args(arguments)
            .env("HF_HOME", "nowhere")
            .env("HENSON_MODELS", "nowhere")
            .env("HOME", self.0.path())
            .current_dir(self.0.path());
        command.stdin(Stdio::null());
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    #[track_caller]
    fn line(&self, arguments: &[&str]) -> Value {
        let output = self.run(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    #[track_caller]
    fn fails(&self, arguments: &[&str], parts: &[&str]) {
        let output = self.run(arguments);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {message}");
        for part in parts {
            assert!(message.contains(part), "{arguments:?}: expected `{part}` in: {message}");
        }
    }
}

#[test]
fn without_models_the_message_says_what_to_do() {
    let henson = Installed::new();
    let (beside, share) = (henson.at("bin/models/henson-12m"), henson.at("share/henson/models/henson-12m"));
    let parts = [beside.to_str().unwrap(), share.to_str().unwrap(), "--model DIR", "henson demo"];
    std::fs::write(henson.at("text.txt"), "a\n").unwrap();
    for arguments in [
        &["fill", "[MASK]"][..],
        &["features", "a"],
        &["classify", "a"],
        &["tag", "a"],
        &["answer", "--question", "a", "--passage", "b"],
        &["choose", "--context", "a", "b"],
        &["tokenizer", "encode", "a"],
        &["tokenizer", "info"],
        &["eval", "--task", "perplexity", "--data", "text.txt"],
        &["finetune", "--task", "classify", "--train", "text.txt", "--out", "run"],
        &["data", "build", "--tokenizer", "henson-12m", "--out", "corpus", "text.txt"],
        &["bench", "gemm", "--model", "henson-12m"],
        &["serve", "--port", "0"],
        &["fill", "--model", "henson-12m", "[MASK]"],
    ] {
        henson.fails(arguments, &parts);
    }
    henson.fails(&["embed", "a"], &["henson-12m-sentences", "--model DIR"]);
    henson
        .fails(&["predict", "--task", "sst2", "--data", "text.txt", "--out", "o"], &["--task sst2 needs --model DIR"]);
    henson.fails(&["serve", "--port", "0", "--runs", "nowhere"], &["--runs nowhere", "no such directory"]);
    // To ask what there is is no mistake.
    let facts = henson.line(&["info", "--json"]);
    assert_eq!(facts["model"], Value::Null);
    assert!(facts["built_in"][0]["problem"].as_str().unwrap().contains("was not found"), "{facts}");
    let output = henson.run(&["info"]);
    let shown = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && shown.contains("henson-12m, which comes with henson, was not found"), "{shown}");
    // Scores of labels need a model that was made for them, or predictions.
    henson.fails(&["eval", "--task", "sst2", "--data", "text.txt"], &["--model DIR", "--predictions"]);
}

#[test]
fn models_beside_the_program_are_used() {
    let henson = Installed::new();
    henson.put("mlm", "share/henson/models/henson-12m");
    let filled = henson.line(&["fill", "--json", "-k", "1", "[MASK] word40"]);
    let named = henson.line(&["fill", "--model", "henson-12m", "--json", "-k", "1", "[MASK] word40"]);
    let by_path =
        henson.line(&["fill", "--model", "share/henson/models/henson-12m", "--json", "-k", "1", "[MASK] word40"]);
    assert!(filled == named && filled == by_path, "{filled}");
    assert_eq!(henson.line(&["tokenizer", "info", "--json"])["model"], "henson-12m");
    // Without one for sentences, the general one does, and says so.
    let output = henson.run(&["embed", "--json", "word40"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains(
        "warning: henson-12m is used, which was not tuned for this: henson-12m-sentences, which comes with henson, was not found"
    ));
    let general: Value = serde_json::from_slice(&output.stdout).unwrap();
    henson.put("pretraining-gelu-new", "bin/models/henson-12m-sentences");
    let tuned = henson.line(&["embed", "--json", "word40"]);
    assert!(tuned["embedding"].is_array() && tuned != general);
    // Texts are compared by the one that was tuned for it.
    std::fs::write(henson.at("pairs.jsonl"), pairs()).unwrap();
    let score = |model: &[&str]| {
        let mut score = henson.line(&[&["eval", "--task", "embed", "--data", "pairs.jsonl", "--json"], model].concat());
        score.as_object_mut().unwrap().remove("model").unwrap();
        score
    };
    assert_eq!(score(&[]), score(&["--model", "henson-12m-sentences"]));
    assert_ne!(score(&[]), score(&["--model", "henson-12m"]));
    let predicted = henson.run(&["predict", "--task", "embed", "--data", "pairs.jsonl", "--out", "predicted"]);
    assert!(predicted.status.success(), "{}", String::from_utf8_lossy(&predicted.stderr));
    let facts = henson.line(&["info", "--json"]);
    assert_eq!(facts["model"], "henson-12m");
    for (i, place) in ["share/henson/models/henson-12m", "bin/models/henson-12m-sentences"].iter().enumerate() {
        assert_eq!(facts["built_in"][i]["path"], henson.at(place).to_str().unwrap());
    }
    // Its name stands for it wherever a directory does, and in a recipe, which other machines read, it stays.
    std::fs::write(henson.at("text.txt"), "word40 word41 word42\n\nword43 word44 word45\n".repeat(20)).unwrap();
    henson.line(&["data", "build", "--tokenizer", "henson-12m", "--out", "corpus", "--json", "text.txt"]);
    let pretrain = ["pretrain", "--model", "henson-12m", "--data", "corpus", "--out", "run", "--json"];
    let output = henson.run(&[&pretrain[..], &["--set", "steps=1", "--set", "sequence_length=16"]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let recipe = std::fs::read_to_string(henson.at("run/recipe.toml")).unwrap();
    assert!(recipe.contains("model = \"henson-12m\""), "{recipe}");
    // A directory of that name in the way is not what comes with henson.
    std::fs::create_dir(henson.at("henson-12m")).unwrap();
    assert_eq!(henson.line(&["info", "--json"])["layers"], facts["layers"]);
    henson.fails(&["info", "henson-12m"], &["config.json"]);
    std::fs::remove_dir(henson.at("henson-12m")).unwrap();
    henson.fails(&["classify", "word40"], &["henson-12m", "a masked language model", "classifier", "henson finetune"]);
}

/// What a run leaves has the name of the model and not where it is here, and resumes by the name as by the recipe.
#[test]
fn recipes_of_fine_tuning_keep_the_name() {
    let henson = Installed::new();
    henson.put("mlm", "share/henson/models/henson-12m");
    henson.put("pretraining-gelu-new", "bin/models/henson-12m-sentences");
    std::fs::write(henson.at("pairs.jsonl"), pairs()).unwrap();
    std::fs::write(henson.at("tags.conll"), "word40 A\nword41 B\n\nword42 B\nword43 A\n\n".repeat(3)).unwrap();
    let classes: String = (40..52).map(|i| format!("word{i}\t{}\n", i % 2)).collect();
    std::fs::write(henson.at("classes.tsv"), format!("text\tlabel\n{classes}")).unwrap();
    let is_the_run = |arguments: &[&str]| {
        let output = henson.run(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    };
    for (task, file, name, more) in [
        ("classify", "classes.tsv", "henson-12m", &[][..]),
        ("embed", "pairs.jsonl", "henson-12m-sentences", &[]),
        ("tag", "tags.conll", "henson-12m", &["--frozen", "--layers", "last"]),
        ("classify", "classes.tsv", "henson-12m", &["--restarts", "2"]),
    ] {
        let out = format!("{task}-{}", more.len());
        let run = ["finetune", "--task", task, "--train", file, "--dev", file, "--out", &out, "--set", "epochs=1"];
        let run = [&run[..], more].concat();
        is_the_run(&run);
        let mut files = std::fs::read_dir(henson.at(&out)).unwrap().map(|entry| entry.unwrap().path());
        let here = henson.0.path().to_str().unwrap().as_bytes();
        let says =
            |path: &PathBuf| path.is_file() && std::fs::read(path).unwrap().windows(here.len()).any(|w| w == here);
        assert_eq!(files.find(says), None);
        let recipe = format!("{out}/recipe.toml");
        let saved = std::fs::read_to_string(henson.at(&recipe)).unwrap();
        assert!(saved.contains(&format!("model = \"{name}\"")), "{saved}");
        is_the_run(&[&run[..], &["--model", name]].concat());
        // A search's recipe is that of its best run, whose seed may be another.
        let again = ["finetune", &recipe, "--out", &out, "--seed", "0"];
        is_the_run(&[&again[..], more].concat());
    }
}

/// Texts with how alike they are said to be.
fn pairs() -> String {
    let line = |i: usize| {
        let (first, second) = (format!("word{} word{}", 10 + i, 30 + i), format!("word{} word{}", 50 - i, 11 + 3 * i));
        serde_json::json!({"sentence1": first, "sentence2": second, "score": i}).to_string() + "\n"
    };
    (0..12).map(line).collect()
}

#[test]
fn a_server_without_models_named_has_those_that_are_there() {
    let henson = Installed::new();
    henson.put("mlm", "bin/models/henson-12m");
    henson.put("pretraining-gelu-new", "bin/models/henson-12m-sentences");
    // As sentence-transformers mark their directories: the encoder alone is used.
    let sentences = henson.at("bin/models/henson-12m-sentences");
    let module = |class: &str, path: &str| serde_json::json!({"type": class, "path": path});
    let modules = [
        module("sentence_transformers.models.Transformer", ""),
        module("sentence_transformers.models.Pooling", "1_Pooling"),
    ];
    std::fs::write(sentences.join("modules.json"), serde_json::to_vec(&modules).unwrap()).unwrap();
    std::fs::create_dir(sentences.join("1_Pooling")).unwrap();
    std::fs::write(sentences.join("1_Pooling/config.json"), r#"{"pooling_mode_mean_tokens": true}"#).unwrap();
    let mut child = henson
        .command(&["serve", "--port", "0", "--json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let address: Value = serde_json::from_str(&line).unwrap();
    let address = address["address"].as_str().unwrap().trim_start_matches("http://").to_owned();
    let ask = |method: &str, path: &str, body: &str| -> (u16, Value) {
        let mut stream = std::net::TcpStream::connect(&address).unwrap();
        let length = body.len();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n\
             Content-Length: {length}\r\n\r\n{body}"
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let status = answer[9..12].parse().unwrap();
        (status, serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap())
    };
    let begin = std::time::Instant::now();
    while ask("GET", "/health", "").0 != 200 {
        assert!(begin.elapsed().as_secs() < 60, "the models are not loaded");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    // Each route takes the first model that can do it: vectors those tuned for it, blanks the other.
    let embed = ask("POST", "/embed", r#"{"inputs": "word40"}"#);
    let tuned = ask("POST", "/models/henson-12m-sentences/embed", r#"{"inputs": "word40"}"#);
    let general = ask("POST", "/models/henson-12m/embed", r#"{"inputs": "word40"}"#);
    let filled = ask("POST", "/fill", r#"{"inputs": "[MASK] word40"}"#);
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!((embed.0, &embed.1), (200, &tuned.1));
    assert_ne!(embed.1, general.1);
    assert_eq!(filled.0, 200, "{}", filled.1);
}

/// As with `CARGO_TARGET_DIR`: the program is nowhere near the tree that it was built from.
#[test]
fn a_program_elsewhere_finds_its_source_or_what_henson_models_names() {
    let henson = Installed::new();
    let fill = ["fill", "--json", "The keys to the cabinet [MASK] on the table."];
    let token = |output: &Output| {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let line: Value = serde_json::from_slice(&output.stdout).unwrap();
        line["masks"][0]["predictions"][0]["token"].as_str().unwrap().to_owned()
    };
    assert_eq!(token(&henson.command(&fill).env_remove("HENSON_MODELS").output().unwrap()), "are");
    // An empty variable counts as not set.
    assert_eq!(token(&henson.command(&fill).env("HENSON_MODELS", "").output().unwrap()), "are");
    henson.put("mlm", "mine/henson-12m");
    let fill = ["fill", "--json", "[MASK] word40"];
    assert!(token(&henson.command(&fill).env("HENSON_MODELS", "mine").output().unwrap()).starts_with("word"));
    henson.fails(&fill, &["HENSON_MODELS", "nowhere/henson-12m"]);
}

/// The models in the repository: whole, and good enough to tell agreement and meaning.
#[test]
fn the_models_in_the_box_know_their_trade() {
    // By their paths: where the program is built may be elsewhere.
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models");
    let henson = |command: &str, model: &str, texts: &[&str]| -> Vec<Value> {
        let mut henson = Command::new(env!("CARGO_BIN_EXE_henson"));
        let output = henson.args([command, "--json", "--model"]).arg(models.join(model)).args(texts).output().unwrap();
        assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let best = |text: &str| {
        let filled = henson("fill", "henson-12m", &[text]);
        filled[0]["masks"][0]["predictions"][0]["token"].as_str().unwrap().to_owned()
    };
    assert_eq!(best("The keys to the cabinet [MASK] on the table."), "are");
    assert_eq!(best("The key to the cabinets [MASK] on the table."), "is");
    let texts = ["A man is playing the guitar.", "Someone is making music.", "The stock market fell today."];
    let vectors: Vec<Vec<f64>> = henson("embed", "henson-12m-sentences", &texts)
        .iter()
        .map(|line| line["embedding"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect())
        .collect();
    let cosine = |i: usize, j: usize| vectors[i].iter().zip(&vectors[j]).map(|(x, y)| x * y).sum::<f64>();
    assert!(cosine(0, 1) > cosine(0, 2) + 0.2, "{} {}", cosine(0, 1), cosine(0, 2));
    for name in ["henson-12m", "henson-12m-sentences"] {
        let weights = models.join(name).join("model.safetensors");
        assert!(weights.metadata().unwrap().len() <= 24_000_000, "{} is too large", weights.display());
    }
}
