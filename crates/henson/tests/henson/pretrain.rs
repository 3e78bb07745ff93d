//! `henson pretrain` as a user meets it: from raw text to a model, killed and resumed, refused with a clear word.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_henson"));
    command.args(arguments).env_remove("HENSON_KERNELS").stdin(Stdio::null());
    command
}

fn henson(arguments: &[&str]) -> Output {
    command(arguments).output().unwrap()
}

#[track_caller]
fn works(arguments: &[&str]) -> String {
    let output = henson(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[track_caller]
fn fails(code: i32, arguments: &[&str], parts: &[&str]) {
    let output = henson(arguments);
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {message}");
    assert!(!message.contains("panicked"), "{message}");
    for part in parts {
        assert!(message.contains(part), "{arguments:?}: expected `{part}` in: {message}");
    }
}

/// Shards of a real text, made once for all tests.
fn shards() -> &'static str {
    &both_shards()[0]
}

/// The same text as bytes, for models that read words as characters.
fn shards_of_bytes() -> &'static str {
    &both_shards()[1]
}

fn both_shards() -> &'static [String; 2] {
    static SHARDS: OnceLock<(TempDir, [String; 2])> = OnceLock::new();
    let (_, paths) = SHARDS.get_or_init(|| {
        let directory = TempDir::new().unwrap();
        let at = |name: &str| directory.path().join(name).display().to_string();
        let text = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/text/novels.txt");
        // More documents than the text has chapters, so that some can be held out.
        let text = std::fs::read_to_string(text).unwrap();
        let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
        let documents: Vec<String> = lines.chunks(40).map(|document| document.join("\n")).collect();
        std::fs::write(at("text.txt"), documents.join("\n\n")).unwrap();
        works(&[
            "tokenizer",
            "train",
            "--kind",
            "wordpiece",
            "--vocab-size",
            "600",
            "--out",
            &at("tok"),
            &at("text.txt"),
        ]);
        works(&[
            "data",
            "build",
            "--tokenizer",
            &at("tok"),
            "--out",
            &at("data"),
            "--held-out",
            "0.1",
            &at("text.txt"),
        ]);
        let text = at("text.txt");
        works(&["data", "build", "--tokenizer", "bytes", "--out", &at("bytes"), "--held-out", "0.1", &text]);
        let paths = [at("data"), at("bytes")];
        (directory, paths)
    });
    paths
}

/// A run of some seconds, with checkpoints often enough to be killed between them.
fn arguments(out: &Path) -> Vec<String> {
    let out = out.display().to_string();
    let mut arguments: Vec<String> =
        ["pretrain", "--model", "bert-tiny", "--data", shards(), "--out", &out].map(str::to_owned).to_vec();
    let sets = [
        "steps=40",
        "batch_size=8",
        "sequence_length=32",
        "learning_rate=1e-3",
        "checkpoint_every=3",
        "eval_every=20",
        "eval_sequences=8",
        "config.hidden_size=64",
        "config.max_position_embeddings=64",
    ];
    for set in sets {
        arguments.extend(["--set".to_owned(), set.to_owned()]);
    }
    arguments
}

fn borrowed(arguments: &[String]) -> Vec<&str> {
    arguments.iter().map(String::as_str).collect()
}

fn weights(out: &Path) -> Vec<u8> {
    std::fs::read(out.join("model.safetensors")).unwrap()
}

fn start(arguments: &[String]) -> Child {
    command(&borrowed(arguments)).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

/// Networks that carry their states from step to step: an LSTM over tokens in two parts, ELMo over words, the memory of an XLNet.
fn unrolled(model: &str, data: &str, sets: &[&str], out: &Path) -> Vec<String> {
    let out = out.display().to_string();
    let mut arguments: Vec<String> =
        ["pretrain", "--model", model, "--data", data, "--out", &out].map(str::to_owned).to_vec();
    let common = ["steps=40", "batch_size=4", "packing=stream", "checkpoint_every=3", "eval_every=20"];
    for set in common.iter().chain(sets).chain(&["eval_sequences=8", "warmup_steps=0", "weight_decay=0.0"]) {
        arguments.extend(["--set".to_owned(), (*set).to_owned()]);
    }
    arguments
}

const LSTM: [&str; 10] = [
    "objective=causal",
    "sequence_length=8",
    "accumulation=2",
    "optimizer=sgd",
    "learning_rate=1.0",
    "schedule=by-epoch",
    "constant_epochs=1",
    "clip=5.0",
    "dropout=0.2",
    "config.hidden_size=40",
];

const ELMO: [&str; 7] = [
    "objective=bidirectional",
    "sequence_length=10",
    "optimizer=adagrad",
    "learning_rate=0.2",
    "schedule=constant",
    "clip=10.0",
    "config.n_tokens_vocab=300",
];

const XLNET: [&str; 10] = [
    "objective=permutation",
    "sequence_length=16",
    "accumulation=2",
    "mask_probability=0.1666667",
    "learning_rate=1e-3",
    "config.d_model=32",
    "config.n_layer=2",
    "config.d_inner=64",
    "config.mem_len=20",
    "dropout=0.1",
];

#[test]
fn killed_at_any_moment_states_that_are_carried_are_kept() {
    killed_run_ends_with_the_same_bits(2, |out| unrolled("lstm-small", shards(), &LSTM, out));
    killed_run_ends_with_the_same_bits(2, |out| unrolled("elmo-tiny", shards_of_bytes(), &ELMO, out));
    killed_run_ends_with_the_same_bits(2, |out| unrolled("xlnet-tiny", shards(), &XLNET, out));
}

/// An LSTM that was trained on running text with carried states writes: here it has learned to count, and continues what it is given, alone and
/// with beams.
#[test]
fn an_lstm_that_was_trained_on_running_text_writes() {
    let directory = TempDir::new().unwrap();
    let at = |name: &str| directory.path().join(name).display().to_string();
    let numbers = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"];
    // Documents of other lengths, so that none is there twice.
    let document = |i: usize| (0..30 + i).map(|place| numbers[(i + place) % 10]).collect::<Vec<_>>().join(" ");
    std::fs::write(at("text.txt"), (0..60).map(document).collect::<Vec<_>>().join("\n\n")).unwrap();
    let text = at("text.txt");
    works(&["tokenizer", "train", "--kind", "wordpiece", "--vocab-size", "80", "--out", &at("tok"), &text]);
    works(&["data", "build", "--tokenizer", &at("tok"), "--out", &at("data"), "--held-out", "0.1", &text]);
    let mut arguments = unrolled("lstm-small", &at("data"), &LSTM, &directory.path().join("lstm"));
    arguments.extend(["--set", "steps=150", "--set", "checkpoint_every=150"].map(str::to_owned));
    works(&borrowed(&arguments));
    let (path, prompt) = (at("lstm"), "three four five six seven");
    for beams in ["1", "3"] {
        let common = ["generate", "--model", &path, "--json", "--max-new-tokens", "7", "--beams", beams, prompt];
        let written: Value = serde_json::from_str(works(&common).lines().next().unwrap()).unwrap();
        let expected = "eight nine ten one two three four";
        assert!(written.to_string().contains(expected), "{beams} beams: {written}");
    }
}

/// An ELMo that was pre-trained here gives features and is fine-tuned, and says what it cannot do.
#[test]
fn an_elmo_that_was_pretrained_is_used() {
    let directory = TempDir::new().unwrap();
    let (out, tagger) = (directory.path().join("elmo"), directory.path().join("tagger"));
    let mut arguments = unrolled("elmo-tiny", shards_of_bytes(), &ELMO, &out);
    arguments.extend(["--set", "steps=12", "--json"].map(str::to_owned));
    let log = works(&borrowed(&arguments));
    let mut lines = log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let last = lines.rfind(|line| line["kind"] == "eval").unwrap();
    let metric = |name: &str| last["metrics"][name].as_f64().unwrap();
    assert!(metric("forward_perplexity") < 300.0 && metric("backward_perplexity") < 300.0, "{last}");
    assert_eq!(metric("perplexity"), (metric("forward_perplexity") + metric("backward_perplexity")) / 2.0);
    let words = std::fs::read_to_string(out.join("words.txt")).unwrap();
    assert!(words.starts_with("</S>\n<S>\n<UNK>\n") && words.lines().count() == 300, "{words}");
    let path = out.display().to_string();
    let features = works(&["features", "--model", &path, "--layers", "all", "The cat sat ."]);
    let features: Value = serde_json::from_str(&features).unwrap();
    assert_eq!(features["tokens"], serde_json::json!(["<S>", "The", "cat", "sat", ".", "</S>"]));
    for command in ["fill", "generate"] {
        fails(1, &[command, "--model", &path, "a"], &["a language model over words (ElmoBidirectionalLM)"]);
    }
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/finetune/tag.conll").display().to_string();
    let tagger = tagger.display().to_string();
    let common = ["finetune", "--task", "ner", "--model", &path, "--train", &data, "--dev", &data, "--out", &tagger];
    works(&[&common[..], &["--set", "epochs=2"]].concat());
    works(&["tag", "--model", &tagger, "Jim sat ."]);
}

#[test]
fn steps_on_the_command_line_are_used_instead_of_a_recipes_epochs() {
    let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes/lstm-small.toml").display().to_string();
    let run = |more: &[&str]| henson(&[&["pretrain", &recipe, "--data", shards(), "--dry-run"], more].concat());
    let output = run(&["--set", "steps=3"]);
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{message}");
    assert!(message.contains("steps=3 is used instead of epochs = 13 in"), "{message}");
    let quiet = run(&["--epochs", "2"]);
    assert!(!String::from_utf8_lossy(&quiet.stderr).contains("instead"), "{quiet:?}");
    let both = ["pretrain", &recipe, "--data", shards(), "--dry-run", "--epochs", "2", "--set", "steps=3"];
    fails(1, &both, &["either `steps` or `epochs`"]);
}

#[test]
fn running_text_is_refused_where_it_makes_no_sense() {
    let directory = TempDir::new().unwrap();
    let out = directory.path().join("run");
    let cases: [(&str, &str, &[&str], &str); 7] = [
        ("bert-tiny", shards(), &["objective=causal"], "has no states to carry"),
        ("lstm-small", shards(), &["objective=mlm"], "running text is for"),
        ("lstm-small", shards(), &["objective=bidirectional"], "does not read words as characters"),
        ("elmo-tiny", shards_of_bytes(), &["objective=causal"], "predicts words from both sides"),
        ("elmo-tiny", shards(), &["objective=bidirectional"], "--tokenizer bytes"),
        ("lstm-small", shards(), &["objective=causal", "batch_size=100000"], "the text has"),
        ("xlnet-tiny", shards(), &["objective=permutation"], "config.mem_len=384"),
    ];
    for (model, data, sets, expected) in cases {
        let arguments = unrolled(model, data, sets, &out);
        fails(1, &borrowed(&arguments), &[expected]);
        assert!(!out.join("recipe.toml").exists(), "{model}");
    }
}

/// HENSON_KILLS sets how often the run is killed; the soak test of a release has hundreds.
#[test]
fn killed_at_any_moment_a_run_goes_on_and_ends_with_the_same_bits() {
    killed_run_ends_with_the_same_bits(4, arguments);
}

fn killed_run_ends_with_the_same_bits(usually: u32, arguments: impl Fn(&Path) -> Vec<String>) {
    let directory = TempDir::new().unwrap();
    let (whole, killed) = (directory.path().join("whole"), directory.path().join("killed"));
    let started = std::time::Instant::now();
    works(&borrowed(&arguments(&whole)));
    let time = started.elapsed();
    let kills: u32 = std::env::var("HENSON_KILLS").ok().and_then(|n| n.parse().ok()).unwrap_or(usually);
    // What is left by a kill before the first rename.
    std::fs::create_dir(&killed).unwrap();
    std::fs::write(killed.join("run.lock"), "").unwrap();
    std::fs::write(killed.join(".recipe.toml.henson-tmp-4711-0"), "steps").unwrap();
    let mut finished = false;
    for kill in 0..kills {
        let mut child = start(&arguments(&killed));
        // Moments that differ from kill to kill, all within the run.
        let share = f64::from((kill * 7919 + u32::from(started.elapsed().subsec_micros() as u16)) % 1000) / 1000.0;
        std::thread::sleep(Duration::from_secs_f64(time.as_secs_f64() * 0.6 * share));
        finished |= child.try_wait().unwrap().is_some_and(|status| status.success());
        child.kill().unwrap();
        child.wait().unwrap();
    }
    works(&borrowed(&arguments(&killed)));
    assert_eq!(weights(&whole), weights(&killed), "(finished early: {finished})");
    let log = |out: &Path| -> Vec<(u64, f64)> {
        let text = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let train = lines.filter(|line| line["kind"] == "train");
        train.map(|line| (line["step"].as_u64().unwrap(), line["learning_rate"].as_f64().unwrap())).collect()
    };
    assert_eq!(log(&whole), log(&killed));
    // Nothing half-made is left.
    let names = |path: &Path| -> Vec<String> {
        let entries = std::fs::read_dir(path).unwrap();
        let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    let left: Vec<String> = names(&killed).into_iter().filter(|name| name.starts_with('.')).collect();
    assert_eq!(left, [""; 0]);
    assert_eq!(names(&whole.join("checkpoints")), names(&killed.join("checkpoints")));

    // Started again, it reports that it is finished; with more steps it resumes.
    let again = henson(&borrowed(&arguments(&killed)));
    assert!(again.status.success() && String::from_utf8_lossy(&again.stderr).contains("is finished"));
    let mut more = arguments(&killed);
    more.extend(["--set".to_owned(), "steps=42".to_owned()]);
    works(&borrowed(&more));
    assert_ne!(weights(&whole), weights(&killed));
}

#[test]
fn a_signal_leaves_a_checkpoint_and_exit_code_130() {
    let directory = TempDir::new().unwrap();
    let out = directory.path().join("run");
    let mut arguments = arguments(&out);
    arguments.extend([
        "--set".to_owned(),
        "steps=100000".to_owned(),
        "--set".to_owned(),
        "checkpoint_every=0".to_owned(),
    ]);
    let mut child = start(&arguments);
    let log = out.join("metrics.jsonl");
    for _ in 0..600 {
        std::thread::sleep(Duration::from_millis(50));
        if std::fs::read_to_string(&log).is_ok_and(|text| text.contains("\"train\"")) {
            break;
        }
    }
    let status = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(status.success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let checkpoints: Vec<PathBuf> =
        std::fs::read_dir(out.join("checkpoints")).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(checkpoints.len(), 1);
    assert!(checkpoints[0].join("state.json").is_file());
}

#[test]
fn what_would_run_is_said_and_mistakes_are_named() {
    let directory = TempDir::new().unwrap();
    let out = directory.path().join("run");
    let out_text = out.display().to_string();
    let facts: Value = serde_json::from_str(&works(&[
        "pretrain",
        "--data",
        shards(),
        "--dry-run",
        "--json",
        "--model",
        "bert-tiny",
        "--set",
        "steps=5",
        "--set",
        "batch_size=4",
    ]))
    .unwrap();
    assert_eq!(facts["steps"], 5);
    assert!(facts["tokens_per_s"].as_f64().unwrap() > 0.0 && facts["parameters"].as_u64().unwrap() > 100_000);
    // What does not fit is planned as well, without a time.
    let large = ["--set", "batch_size=1000000", "--set", "steps=5"];
    let plan = henson(&[&["pretrain", "--data", shards(), "--dry-run", "--json"][..], &large].concat());
    assert!(plan.status.success() && String::from_utf8_lossy(&plan.stderr).contains("GiB are free"));
    let facts: Value = serde_json::from_slice(&plan.stdout).unwrap();
    assert!(facts["memory_mib"].as_f64().unwrap() > 1e5 && facts["seconds"].is_null(), "{facts}");

    let with = |set: &'static str| {
        ["pretrain", "--data", shards(), "--out", &out_text, "--set", "steps=5", "--set", set].map(str::to_owned)
    };
    let cases: [(&'static str, i32, &[&str]); 8] = [
        ("config.vocab_size=10", 1, &["config.vocab_size", "tokens of the data's tokenizer"]),
        ("phase.0.steps=3", 1, &["there is no list `phase`", "[[phase]]"]),
        ("stepz=3", 1, &["unknown setting `stepz`", "steps"]),
        ("objective=magic", 1, &["magic", "mlm-nsp"]),
        ("sequence_length=4096", 1, &["sequence_length", "512"]),
        ("accumulation=5", 1, &["accumulation", "divisor of 32"]),
        ("model=/no/such/model", 1, &["model", "bert-mini"]),
        ("batch_size=1000000", 1, &["GiB", "accumulation"]),
    ];
    for (set, code, parts) in cases {
        fails(code, &borrowed(&with(set)), parts);
    }
    assert!(!out.exists(), "nothing was begun");
    fails(1, &["pretrain", "--data", "/no/such/data", "--out", &out_text, "--set", "steps=5"], &["/no/such/data"]);
    fails(2, &["pretrain", "--data", "x"], &["--out"]);

    // Another recipe in the same directory.
    let small = |more: &[&str]| {
        let mut all: Vec<String> = arguments(&out);
        all.extend(more.iter().flat_map(|set| ["--set".to_owned(), (*set).to_owned()]));
        all
    };
    let begun = henson(&borrowed(&small(&["steps=2", "warmup_steps=9"])));
    assert!(begun.status.success() && String::from_utf8_lossy(&begun.stderr).contains("never reaches its peak"));
    // A checkpoint that was damaged.
    let weights = out.join("checkpoints/step-2/model.safetensors");
    let whole = std::fs::read(&weights).unwrap();
    std::fs::write(&weights, &whole[..whole.len() / 2]).unwrap();
    fails(
        1,
        &borrowed(&small(&["steps=3", "warmup_steps=9"])),
        &["step-2", "delete this directory to train from scratch"],
    );
    std::fs::write(&weights, whole).unwrap();
    fails(
        1,
        &borrowed(&small(&["steps=2", "warmup_steps=9", "learning_rate=0.5"])),
        &["a different recipe", "learning_rate: was 0.001, now 0.5"],
    );
    std::fs::write(out.join("recipe.toml"), "patience = 3\n").unwrap();
    fails(1, &borrowed(&small(&["steps=2"])), &["holds a run of another command", "patience"]);
}

#[test]
fn a_set_is_read_before_it_runs_and_overwrites_nothing() {
    let place = TempDir::new().unwrap();
    let at = |name: &str| place.path().join(name).display().to_string();
    let set = place.path().join("set");
    std::fs::create_dir(&set).unwrap();
    let base = "model = \"bert-tiny\"\nsteps = 2\nbatch_size = 2\nsequence_length = 16\neval_sequences = 2\n";
    std::fs::write(set.join("base.toml"), base).unwrap();
    std::fs::write(set.join("a.toml"), "seed = 0\n").unwrap();
    std::fs::write(set.join("b.toml"), "sequence_length = 5000\n").unwrap();
    let (set, out) = (at("set"), at("out"));
    let ablate = |out: &str, more: &[&str]| -> Vec<String> {
        let common = ["ablate", &set, "--data", shards(), "--threads", "1", "--out", out];
        common.iter().chain(more).map(|argument| (*argument).to_owned()).collect()
    };
    fails(1, &borrowed(&ablate(&out, &[])), &["the variant b", "sequence_length", "512"]);
    std::fs::write(place.path().join("set/b.toml"), "sequence_length = 32\n").unwrap();
    fails(1, &borrowed(&ablate(&out, &["--blimp", "nowhere.jsonl"])), &["cannot open nowhere.jsonl"]);
    fails(1, &borrowed(&ablate(&out, &["--seeds", "3,3"])), &["--seeds", "3"]);
    assert!(!Path::new(&out).exists(), "nothing was begun");
    // What is left by a kill before the first rename.
    std::fs::create_dir_all(place.path().join("out/a")).unwrap();
    std::fs::create_dir_all(place.path().join("out/b")).unwrap();
    for name in ["out/a/run.lock", "out/a/.recipe.toml.henson-tmp-4711-0", "out/.table.md.henson-tmp-4711-1"] {
        std::fs::write(place.path().join(name), "").unwrap();
    }
    works(&borrowed(&ablate(&out, &[])));
    // The same set again has nothing to do; other directories are not touched.
    works(&borrowed(&ablate(&out, &[])));
    std::fs::create_dir(place.path().join("own")).unwrap();
    std::fs::write(place.path().join("own/results.json"), "mine").unwrap();
    for other in ["own", "set", "out/a"] {
        fails(1, &borrowed(&ablate(&at(other), &[])), &["holds other things than the runs of a set"]);
    }
    assert_eq!(std::fs::read(place.path().join("own/results.json")).unwrap(), b"mine");
}

#[test]
fn words_are_added_to_a_vocabulary_and_pre_training_goes_on_with_them() {
    let directory = TempDir::new().unwrap();
    let at = |name: &str| directory.path().join(name).display().to_string();
    works(&borrowed(
        &arguments(&directory.path().join("first"))
            .iter()
            .map(|a| a.replace("steps=40", "steps=2"))
            .collect::<Vec<_>>(),
    ));
    std::fs::write(at("words.txt"), "Zzyzx\nthe\n##zzyzx\n\n").unwrap();
    let first = at("first");
    let said = works(&["tokenizer", "extend", "--model", &first, "--pieces", &at("words.txt"), "--out", &at("tok")]);
    assert!(said.contains("602 tokens") && said.contains("2 new ones, 1 existed already"), "{said}");
    std::fs::write(at("bad.txt"), "two words\n").unwrap();
    fails(
        1,
        &["tokenizer", "extend", "--model", &first, "--pieces", &at("bad.txt"), "--out", &at("no")],
        &["two words", "expected one"],
    );
    let encoded: Value =
        serde_json::from_str(&works(&["tokenizer", "encode", "--model", &at("tok"), "--json", "ZZYZX"])).unwrap();
    assert_eq!(encoded["ids"], serde_json::json!([600]));
    std::fs::write(
        at("text.txt"),
        "the zzyzx road is long .\nthe road is long .\n\nzzyzx lies on the road .\nit is long .\n",
    )
    .unwrap();
    works(&["data", "build", "--tokenizer", &at("tok"), "--out", &at("data"), "--held-out", "0", &at("text.txt")]);
    works(&[
        "pretrain",
        "--model",
        &first,
        "--data",
        &at("data"),
        "--out",
        &at("second"),
        "--set",
        "steps=2",
        "--set",
        "batch_size=2",
        "--set",
        "sequence_length=32",
    ]);
    let info: Value = serde_json::from_str(&works(&["info", &at("second"), "--json"])).unwrap();
    assert_eq!(info["vocab_size"], 602);
}

/// From text to a discriminator and its generator, and from there on.
#[test]
fn electra_is_pre_trained_filled_and_fine_tuned() {
    let place = TempDir::new().unwrap();
    let at = |name: &str| place.path().join(name).display().to_string();
    let run = |out: &str, model: &str, more: &[&str]| {
        let arguments: Vec<String> =
            arguments(Path::new(out)).iter().map(|a| a.replace("steps=40", "steps=6")).collect();
        let arguments: Vec<&str> =
            arguments.iter().map(|a| if a == "bert-tiny" { model } else { a.as_str() }).collect();
        henson(&[&arguments[..], &["--set", "objective=replaced-tokens"], more].concat())
    };
    let small =
        ["--set", "config.num_hidden_layers=2", "--set", "config.embedding_size=32", "--set", "generator.layers=1"];
    let output = run(&at("run"), "electra-small", &small);
    let shown = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && shown.contains("replaced-token loss"), "{shown}");
    let info: Value = serde_json::from_str(&works(&["info", &at("run"), "--json"])).unwrap();
    assert_eq!(
        (info["architecture"].as_str(), info["files"]["generator"].as_bool()),
        (Some("ElectraForPreTraining"), Some(true))
    );
    let info: Value = serde_json::from_str(&works(&["info", &at("run/generator"), "--json"])).unwrap();
    assert_eq!((info["architecture"].as_str(), info["layers"].as_u64()), (Some("ElectraForMaskedLM"), Some(1)));
    works(&["fill", "--model", &at("run/generator"), "the [MASK] ."]);

    std::fs::write(at("rows.tsv"), "text\tlabel\n".to_owned() + &"good\tyes\nbad\tno\n".repeat(8)).unwrap();
    let (model, rows, out) = (at("run"), at("rows.tsv"), at("tuned"));
    let tune = ["finetune", "--task", "classify", "--model", &model, "--train", &rows, "--dev", "none", "--out", &out];
    works(&[&tune[..], &["--epochs", "1", "--set", "layer_decay=0.8", "--set", "layer_decay_start=2"]].concat());

    // Going on with both, and what is refused.
    let output = run(&at("second"), &at("run"), &["--set", "generator.layers=2"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("generator.layers"));
    for (model, more, part) in [
        ("bert-tiny", &[][..], "electra-small"),
        ("electra-small", &["--set", "generator.temperature=0"][..], "generator.temperature"),
        ("electra-small", &["--set", "mask_split=[0.5,0.5,0.0]"][..], "generator.mask_share"),
        ("electra-small", &["--set", "objective=mlm", "--set", "generator.size=0.5"][..], "replaced-tokens"),
    ] {
        let output = run(&at("no"), model, more);
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && message.contains(part), "{more:?}: {message}");
    }
}

#[test]
fn a_run_from_the_recipe_of_another_has_the_same_bits() {
    let place = TempDir::new().unwrap();
    let (first, second) = (place.path().join("first"), place.path().join("second"));
    let more = ["--seed", "5", "--set", "dropout=0.1", "--set", "masking=whole-words", "--set", "warmup_steps=3"];
    works(&[&borrowed(&arguments(&first))[..], &more].concat());
    let recipe = first.join("recipe.toml");
    works(&["pretrain", recipe.to_str().unwrap(), "--out", second.to_str().unwrap()]);
    assert!(weights(&first) == weights(&second), "the weights differ");
    assert_eq!(std::fs::read(&recipe).unwrap(), std::fs::read(second.join("recipe.toml")).unwrap());
}

#[test]
fn no_held_out_text_is_left_with_the_model_unless_asked_for() {
    const SECRET: &str = "zqxwvk";
    let place = TempDir::new().unwrap();
    let at = |name: &str| place.path().join(name).display().to_string();
    // A vocabulary of another text, so that it cannot hold the word.
    let tokenizer = format!("{}/tokenizer", shards());
    let document = |n: usize| {
        let line = |i: usize| format!("they have said {n} that {SECRET} was {i}");
        (0..4).map(line).collect::<Vec<_>>().join("\n")
    };
    std::fs::write(at("text.txt"), (0..40).map(document).collect::<Vec<_>>().join("\n\n")).unwrap();
    works(&["data", "build", "--tokenizer", &tokenizer, "--out", &at("data"), "--held-out", "0.3", &at("text.txt")]);
    let run = |name: &str, more: &[&str]| {
        let out = at(name);
        let common = ["pretrain", "--model", "bert-tiny", "--data", &at("data"), "--out", &out, "--set", "steps=4"];
        let short = ["--set", "batch_size=2", "--set", "sequence_length=32", "--set", "eval_every=2"];
        let output = henson(&[&common[..], &short, &["--set", "config.hidden_size=64"], more].concat());
        let shown = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{shown}");
        let found = Command::new("grep").args(["-rl", SECRET, &out]).output().unwrap();
        let found = String::from_utf8(found.stdout).unwrap();
        let names: Vec<String> =
            found.lines().map(|path| path.strip_prefix(&format!("{out}/")).unwrap().to_owned()).collect();
        (shown, names)
    };
    let (shown, found) = run("private", &[]);
    assert_eq!(found, [""; 0]);
    assert!(shown.contains(SECRET), "the terminal shows samples: {shown}");
    let (_, found) = run("asked", &["--samples-in-report"]);
    assert!(["metrics.jsonl", "report.html"].iter().all(|name| found.contains(&(*name).to_owned())), "{found:?}");
    assert!(found.iter().any(|name| name.starts_with("tensorboard/")), "{found:?}");
    // What stands in the recipe is no secret to the directory, which has the recipe.
    let (_, found) = run("own", &["--set", "samples=['they zqxwvk [MASK]']"]);
    assert!(["recipe.toml", "report.html"].iter().all(|name| found.contains(&(*name).to_owned())), "{found:?}");
}

/// Models of two families, fine-tuned on two tasks: one table, the same after an interruption, and nothing done twice.
#[test]
fn a_set_is_fine_tuned_and_resumes() {
    let place = TempDir::new().unwrap();
    let at = |name: &str| place.path().join(name).display().to_string();
    for directory in ["set", "glue", "glue/RTE", "squad"] {
        std::fs::create_dir(at(directory)).unwrap();
    }
    let base = "steps = 2\nbatch_size = 2\nsequence_length = 16\neval_sequences = 2\n";
    std::fs::write(at("set/base.toml"), base).unwrap();
    std::fs::write(at("set/bert.toml"), "model = \"bert-tiny\"\n").unwrap();
    let small = "model = \"distilbert-base\"\nconfig = { n_layers = 1, dim = 32, n_heads = 2, hidden_dim = 64 }\n";
    std::fs::write(at("set/distil.toml"), format!("{small}objective = \"mlm\"\n")).unwrap();
    let rows: String = (0..8)
        .map(|i| format!("{i}\tthe house is {i}\tit is old\t{}entailment\n", if i % 2 == 0 { "" } else { "not_" }))
        .collect();
    for name in ["train", "dev"] {
        std::fs::write(at(&format!("glue/RTE/{name}.tsv")), format!("index\tsentence1\tsentence2\tlabel\n{rows}"))
            .unwrap();
        let qas = r#"[{"id": "a", "question": "who sang?", "answers": [{"text": "the man", "answer_start": 0}]}]"#;
        let squad = format!(r#"{{"data": [{{"paragraphs": [{{"context": "the man sang.", "qas": {qas}}}]}}]}}"#);
        std::fs::write(at(&format!("squad/{name}-v1.1.json")), squad).unwrap();
    }
    let ablate = |out: &str, restarts: &str, more: &[&str]| -> Vec<String> {
        let (set, glue, squad, out) = (at("set"), at("glue"), at("squad"), at(out));
        let common = ["ablate", &set, "--data", shards(), "--threads", "1", "--out", &out, "--restarts", restarts];
        let tasks = ["--finetune", "rte,squad1", "--finetune-data", &glue, "--finetune-data", &squad];
        let sets =
            ["--finetune-set", "epochs=1", "--finetune-set", "rte.limit=4", "--finetune-set", "linear_head=false"];
        common.iter().chain(&tasks).chain(&sets).chain(more).map(|argument| (*argument).to_owned()).collect()
    };
    fails(1, &borrowed(&ablate("out", "1", &["--finetune", "cola"])), &["training file of task cola", "CoLA"]);
    fails(1, &borrowed(&ablate("out", "1", &["--finetune-set", "mrpc.epochs=1"])), &["does not have the task mrpc"]);
    fails(1, &borrowed(&ablate("out", "1", &["--finetune-set", "epoch=1"])), &["epoch"]);
    assert!(!Path::new(&at("out")).exists(), "nothing was begun");
    let table = works(&borrowed(&ablate("out", "2", &[])));
    for part in ["rte accuracy", "squad1 f1", "average", "| bert ", "| distil ", " ± "] {
        assert!(table.contains(part), "{part}: {table}");
    }
    let results = |out: &str| -> Value {
        serde_json::from_slice(&std::fs::read(at(&format!("{out}/results.json"))).unwrap()).unwrap()
    };
    let scores = |out: &str| -> Vec<Value> {
        results(out).as_array().unwrap().iter().map(|row| row["finetune"].clone()).collect()
    };
    let first = results("out");
    assert_eq!(first[0]["finetune"][0]["values"].as_array().unwrap().len(), 2);
    assert!(std::fs::read_to_string(at("out/report.html")).unwrap().contains("squad1 f1"));
    // A part that is missing is made again, what is there stays as it is.
    let kept = at("out/finetune/bert/rte/runs/seed-0/results.json");
    let before = std::fs::metadata(&kept).unwrap().modified().unwrap();
    std::fs::remove_dir_all(at("out/finetune/distil/rte/runs/seed-1")).unwrap();
    std::fs::remove_file(at("out/results.json")).unwrap();
    assert_eq!(works(&borrowed(&ablate("out", "2", &[]))), table);
    assert_eq!(results("out"), first);
    assert_eq!(std::fs::metadata(&kept).unwrap().modified().unwrap(), before);
    // One run of each first, then the second ones: the same scores.
    works(&borrowed(&ablate("other", "1", &[])));
    works(&borrowed(&ablate("other", "2", &[])));
    assert_eq!(scores("other"), scores("out"));
    // A model that is not the one that was fine-tuned.
    std::fs::write(at("out/finetune/bert/model.sum"), "0123456789abcdef").unwrap();
    fails(1, &borrowed(&ablate("out", "2", &[])), &["finetune/bert", "another model"]);
}
