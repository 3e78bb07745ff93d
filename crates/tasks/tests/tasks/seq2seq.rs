//! A text for a text: files, losses against `transformers` (tools/golden/seq2seq.py), and runs whose best model is chosen by what
//! it writes.

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use henson_infer::{Model, Want};
use henson_tasks::{
    Ended, Files, FineTuneRecipe, Plan, PredictSettings, Prediction, Reading, predict, read, read_predictions,
    reading_for, score,
};
use henson_tensor::DType;
use henson_text::{Tokenizer, WordUnit};
use henson_train::Task as _;
use serde::Deserialize;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::finetune::{data, device, finished, plan, recipe, run};
use crate::support::{Place, read_as, shorts, task, written};

/// f32 against f32; measured is some 10⁻⁶.
const LOSS_TOLERANCE: f64 = 1e-4;

pub(crate) const T5_SPECIAL: [&str; 4] = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"];
pub(crate) const BART_SPECIAL: [&str; 4] = ["[CLS]", "[PAD]", "[SEP]", "[UNK]"];

/// A golden encoder-decoder with a vocabulary of words; `keys` are set in its config.
pub(crate) fn writer(name: &str, special: &[&str], keys: &Value) -> TempDir {
    let directory = TempDir::new().unwrap();
    let golden = data("writers").join(name);
    fs::copy(golden.join("model.safetensors"), directory.path().join("model.safetensors")).unwrap();
    let words = fs::read_to_string(data("seq2seq/words.txt")).unwrap();
    fs::write(directory.path().join("vocab.txt"), format!("{}\n{words}", special.join("\n"))).unwrap();
    let mut config: Value = serde_json::from_slice(&fs::read(golden.join("config.json")).unwrap()).unwrap();
    for (key, value) in keys.as_object().unwrap() {
        config[key] = value.clone();
    }
    fs::write(directory.path().join("config.json"), config.to_string()).unwrap();
    directory
}

/// A recipe on the golden pairs.
fn pairs(from: &Path, sets: &[&str]) -> FineTuneRecipe {
    let file = data("seq2seq/pairs.jsonl").display().to_string();
    FineTuneRecipe { train: file.clone().into(), dev: file, ..recipe("seq2seq", from, "", sets) }
}

#[test]
fn losses_are_those_of_transformers() {
    #[derive(Deserialize)]
    struct Case {
        model: String,
        special: Vec<String>,
        smoothing: f64,
        losses: Vec<f64>,
    }
    let cases: Vec<Case> = serde_json::from_slice(&fs::read(data("seq2seq/golden.json")).unwrap()).unwrap();
    assert_eq!(cases.len(), 8);
    for case in cases {
        let special: Vec<&str> = case.special.iter().map(String::as_str).collect();
        let from = writer(&case.model, &special, &json!({}));
        let smoothing = format!("label_smoothing={:.2}", case.smoothing);
        let common = ["dropout=0.0", "learning_rate=1e-3", "warmup=0.0", "weight_decay=0.0", "epochs=5", &smoothing];
        // In one part and in three, of pairs with unequal lengths.
        for accumulation in [1, 3] {
            let recipe = FineTuneRecipe { batch_size: 100, accumulation, ..pairs(from.path(), &common) };
            let plan = plan(recipe);
            assert_eq!((plan.steps(), plan.instances(), plan.cut), (5, 6, 0));
            let (mut engine, mut learner) = (plan.engine(&device()).unwrap(), plan.learner().unwrap());
            for (step, expected) in case.losses.iter().enumerate() {
                engine.gradients.zero();
                let loss = learner.step(&mut engine, step as u64).unwrap().wait().unwrap().total;
                let (rate, _) = learner.rate(step as u64);
                engine.updater.step(&mut engine.parameters, &engine.gradients, rate).unwrap().wait().unwrap();
                let name = format!("{}, smoothing {}, step {step}", case.model, case.smoothing);
                assert!((loss - expected).abs() < LOSS_TOLERANCE, "{name}: {loss}, transformers has {expected}");
            }
        }
    }
}

/// A language model over source and target: it learns, what was saved writes what was trained, and `generate` ends a source as training
/// did, whether the tokenizer ends texts or not. A decoder that was trained before, and an LSTM from random weights.
#[test]
fn language_models_continue_sources_with_targets() {
    let out = TempDir::new().unwrap();
    let ended = writer("gpt2", &T5_SPECIAL, &json!({}));
    let plain = writer("gpt2", &T5_SPECIAL, &json!({}));
    fs::remove_file(plain.path().join("vocab.txt")).unwrap();
    let words = fs::read_to_string(data("seq2seq/words.txt")).unwrap();
    let tokenizer = Tokenizer::of_words(words.lines().chain(["</s>"]), false, WordUnit::Words).unwrap();
    tokenizer.save(plain.path(), None).unwrap();
    let cases = [
        (ended.path(), "", "GPT2LMHeadModel", "[SEP]"),
        (plain.path(), "", "GPT2LMHeadModel", "</s>"),
        (Path::new("lstm-small"), ended.path().to_str().unwrap(), "LstmLMHeadModel", "[SEP]"),
    ];
    for (i, (from, tokenizer, class, end)) in cases.into_iter().enumerate() {
        let mut sets = vec!["learning_rate=1e-2", "dropout=0.0", "epochs=150", "evals_per_epoch=0.02", "warmup=0.0"];
        sets.extend(["metric=chrf", "max_target_length=14", "beams=2"]);
        if !tokenizer.is_empty() {
            sets.extend([
                "config.hidden_size=48",
                "config.num_hidden_layers=1",
                "config.initializer_range=0.3",
                "epochs=250",
            ]);
        }
        let recipe = FineTuneRecipe { batch_size: 6, tokenizer: tokenizer.to_owned(), ..pairs(from, &sets) };
        let path = out.path().join(i.to_string());
        let results = finished(run(&plan(recipe), &path, None).unwrap());
        assert!(results.value.unwrap() > 80.0, "{class}, {end}: {results:?}");
        let config: Value = serde_json::from_slice(&fs::read(path.join("config.json")).unwrap()).unwrap();
        assert_eq!(config["architectures"], json!([class]));
        let model = Model::open(&path, &device(), DType::F32, Want::AsSaved).unwrap();
        let set = read(&data("seq2seq/pairs.jsonl"), &reading_for(&model, Reading::new(task("seq2seq")))).unwrap();
        let models = std::slice::from_ref(&model);
        let predictions = predict(models, &set, &PredictSettings::default(), |_| ControlFlow::Continue(())).unwrap();
        assert_eq!(score(&set, &predictions, None, 0).unwrap().get(&results.metric), results.value, "{class}, {end}");
        let prompt = model.prompt("the cat sat on the dog").unwrap();
        assert_eq!(prompt.last().copied(), model.tokenizer().id(end));
        let settings = model.generate_settings().unwrap();
        let written = model.generate(&[prompt], &settings, |_| ControlFlow::Continue(())).unwrap();
        assert_eq!(predictions[0], Prediction::Text(written[0][0].text.clone()), "{class}, {end}");
        let card = fs::read_to_string(path.join("README.md")).unwrap();
        assert!(!card.contains("Seq2Seq") && card.contains("pipeline_tag: text-generation"), "{card}");
    }
}

#[test]
fn sources_and_references_are_read() {
    let place = Place::new();
    let lists = place.file(
        "lists.jsonl",
        "{\"source\": [\"One.\", \"Two.\"], \"target\": [\"a\", \"b\"], \"id\": \"x\"}\n{\"source\": \"Three.\", \"target\": \"c\"}\n",
    );
    assert_eq!(shorts(&read_as("seq2seq", &lists).unwrap()), ["x: One. Two. -> a / b", "1: Three. -> c"]);
    // No header, and as many references as there are: all columns but the first.
    let ragged = place.file("words.tsv", "cat\tK AE1 T\nread\tR EH1 D\tR IY1 D\n");
    let nameless = Files { header: Some(false), ..Files::default() };
    let set = read(&ragged, &written("seq2seq", nameless)).unwrap();
    assert_eq!(shorts(&set), ["0: cat -> K AE1 T", "1: read -> R EH1 D / R IY1 D"]);
    // Named columns, and a prefix.
    let named = place.file("named.csv", "en,de,fr\nGo.,Geh.,Va.\n");
    let columns = |names: &[&str]| names.iter().map(|name| toml_column(name)).collect::<Vec<_>>();
    let files =
        Files { text_column: Some(toml_column("en")), label_column: columns(&["de", "fr"]), ..Files::default() };
    let reading = henson_tasks::Reading { prefix: "translate: ".to_owned(), ..written("seq2seq", files) };
    assert_eq!(shorts(&read(&named, &reading).unwrap()), ["0: translate: Go. -> Geh. / Va."]);
}

fn toml_column(name: &str) -> henson_data::tables::Column {
    henson_data::tables::Column::Name(name.to_owned())
}

#[test]
fn bad_pairs_are_named_by_file_and_line() {
    let place = Place::new();
    let nameless = || Files { header: Some(false), ..Files::default() };
    let cases: [(&str, &str, Files, &str); 7] = [
        (
            "a.jsonl",
            "{\"source\": \"a\", \"target\": \"b\"}\n{\"source\": \" \", \"target\": \"b\"}\n",
            Files::default(),
            "a.jsonl, line 2: column \"source\": the source is empty",
        ),
        (
            "b.jsonl",
            "{\"source\": \"a\", \"target\": \"\"}\n",
            Files::default(),
            "b.jsonl, line 1: column \"target\": the target is empty",
        ),
        (
            "c.jsonl",
            "{\"source\": \"a\", \"target\": []}\n",
            Files::default(),
            "c.jsonl, line 1: column \"target\": the target is empty",
        ),
        (
            "d.jsonl",
            "{\"source\": \"a\", \"target\": \"b\"}\n{\"target\": \"b\"}\n",
            Files::default(),
            "d.jsonl, line 2: no key for the source",
        ),
        (
            "e.jsonl",
            "{\"source\": \"a\", \"target\": \"b\"}\n{\"source\": \"b\"}\n",
            Files::default(),
            "e.jsonl, line 2: it has no label",
        ),
        ("f.tsv", "a\tb\nc\t\n", nameless(), "f.tsv, line 2: column number 1 (from 0): the target is empty"),
        ("g.tsv", "english\tgerman\na\tb\n", Files::default(), "name the column by --source-column"),
    ];
    for (name, text, files, expected) in cases {
        let path = place.file(name, text);
        let message = read(&path, &written("seq2seq", files)).unwrap_err().to_string();
        assert!(message.contains(expected), "{name}: {message}");
    }
}

#[test]
fn a_source_counts_once_with_all_its_references() {
    let place = Place::new();
    let rows = "{\"source\": \"a\", \"target\": \"x y\"}\n{\"source\": \"b\", \"target\": \"z\"}\n{\"source\": \"a\", \"target\": \"y x\"}\n";
    let mut set = read_as("seq2seq", &place.file("rows.jsonl", rows)).unwrap();
    let metrics = |score: &henson_tasks::Score| {
        [score.get("exact_match").unwrap(), score.get("wer").unwrap(), score.get("per").unwrap()]
    };
    // A line for each row, or for each source.
    for lines in ["y x\nq\ny x\n", "y x\nq\n"] {
        let predictions = read_predictions(&place.file("out.txt", lines), &mut set).unwrap();
        let scored = score(&set, &predictions, None, 10).unwrap();
        assert_eq!(metrics(&scored), [0.5, 0.5, 1.0 / 3.0]);
        assert_eq!((scored.sources, scored.mistakes.len()), (Some(2), 1));
        let json = scored.to_json();
        assert_eq!(json["signatures"]["bleu"], "nrefs:var|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0");
    }
    let table = place.file("out.jsonl", "{\"id\": \"1\", \"prediction\": \"z\"}\n{\"id\": \"0\", \"prediction\": \"\"}\n{\"id\": \"2\", \"prediction\": \"?\"}\n");
    let predictions = read_predictions(&table, &mut set).unwrap();
    assert_eq!(predictions[1], Prediction::Text("z".to_owned()));
    let message = read_predictions(&place.file("few.txt", "x\n"), &mut set).unwrap_err().to_string();
    assert!(message.contains("it has 1 lines, expected one for each of 3 rows or of 2 different sources"), "{message}");
}

#[test]
fn other_models_are_refused_by_name() {
    let from = crate::finetune::model("sequence", &json!({}));
    let message = Plan::new(pairs(from.path(), &[]), 1).err().unwrap().to_string();
    assert!(
        message.contains("of type bert, which cannot learn task seq2seq: expected one of type t5, mt5"),
        "{message}"
    );
}

/// Settings with which the golden T5 learns its pairs by heart.
pub(crate) const BY_HEART: [&str; 8] = [
    "epochs=60",
    "learning_rate=2e-2",
    "schedule=constant",
    "warmup=0.0",
    "weight_decay=0.0",
    "dropout=0.0",
    "evals_per_epoch=0.1",
    "max_target_length=16",
];

#[test]
fn what_is_learned_by_heart_is_written_and_chosen_by() {
    let (from, place) = (writer("t5", &T5_SPECIAL, &json!({})), TempDir::new().unwrap());
    let out = place.path().join("run");
    let plan = plan(FineTuneRecipe { prefix: "translate : ".to_owned(), ..pairs(from.path(), &BY_HEART) });
    let results = finished(run(&plan, &out, None).unwrap());
    assert_eq!(results.metric, "bleu");
    assert!(results.value.unwrap() > 60.0, "{results:?}");
    assert!(results.scores["loss"].as_f64().unwrap() < 0.5, "{:?}", results.scores);
    // What is saved says how it writes, and a model that was opened writes the same.
    let generation: Value = serde_json::from_slice(&fs::read(out.join("generation_config.json")).unwrap()).unwrap();
    let expected = json!({
        "decoder_start_token_id": 0, "eos_token_id": 2, "pad_token_id": 0, "max_new_tokens": 16, "num_beams": 1,
    });
    assert_eq!(generation, expected);
    let opened = Model::open(&out, &device(), DType::F32, Want::AsSaved).unwrap();
    assert_eq!(opened.config().task.prefix.as_deref(), Some("translate : "));
    let reading = reading_for(&opened, Reading::new(task("seq2seq")));
    let set = read(&data("seq2seq/pairs.jsonl"), &reading).unwrap();
    let predictions =
        predict(std::slice::from_ref(&opened), &set, &PredictSettings::default(), |_| ControlFlow::Continue(()))
            .unwrap();
    let scored = score(&set, &predictions, None, 10).unwrap();
    assert_eq!(scored.get("bleu"), results.value);
    let card = fs::read_to_string(out.join("README.md")).unwrap();
    assert!(card.contains("AutoModelForSeq2SeqLM") && card.contains("henson generate --model DIR"), "{card}");
    // The command's way, with the prefix of the training.
    let prompt = opened.prompt("sea").unwrap();
    assert_eq!(opened.tokenizer().decode(&prompt, true).unwrap(), "translate : sea");
    let written =
        opened.generate(&[prompt], &opened.generate_settings().unwrap(), |_| ControlFlow::Continue(())).unwrap();
    let Prediction::Text(predicted) = &predictions[4] else { panic!("{predictions:?}") };
    assert_eq!(&written[0][0].text, predicted);
}

#[test]
fn a_stopped_run_ends_with_the_same_bits() {
    // Words are cut at random as well: the cuts of an epoch are drawn by its number.
    let (from, place) = (writer("bart", &BART_SPECIAL, &json!({})), TempDir::new().unwrap());
    let sets = [
        "epochs=4",
        "learning_rate=1e-3",
        "seed=7",
        "label_smoothing=0.1",
        "subword_regularisation=0.3",
        "beams=2",
        "metric=\"per\"",
    ];
    let plan = plan(pairs(from.path(), &sets));
    let (whole, parts) = (place.path().join("whole"), place.path().join("parts"));
    let expected = finished(run(&plan, &whole, None).unwrap());
    for stop_at in [1, 5, 7] {
        assert!(matches!(run(&plan, &parts, Some(stop_at)).unwrap(), Ended::Paused(step) if step == stop_at));
    }
    assert_eq!(finished(run(&plan, &parts, None).unwrap()), expected);
    let bytes = |run: &Path| fs::read(run.join("model.safetensors")).unwrap();
    assert_eq!(bytes(&whole), bytes(&parts));
    // Lower is better: the best evaluation has the lowest rate.
    let log = fs::read_to_string(whole.join("metrics.jsonl")).unwrap();
    let rates = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).unwrap()["metrics"]["per"].as_f64());
    let lowest = rates.fold(f64::MAX, f64::min);
    assert_eq!(expected.value, Some(lowest));
}

/// A model that starts from random weights learns, and the mean of its last checkpoints is what is saved.
#[test]
fn from_scratch_with_averaged_checkpoints() {
    let (tokenizer, place) = (writer("bart", &BART_SPECIAL, &json!({})), TempDir::new().unwrap());
    let sizes = [
        "config.d_model=16",
        "config.encoder_layers=1",
        "config.decoder_layers=1",
        "config.encoder_ffn_dim=32",
        "config.decoder_ffn_dim=32",
        "config.encoder_attention_heads=2",
        "config.decoder_attention_heads=2",
        "config.max_position_embeddings=40",
    ];
    let run_with = |name: &str, epochs: &str, more: &[&str]| {
        let common = [epochs, "learning_rate=3e-3", "dropout=0.0", "max_target_length=12", "warmup=0.0"];
        let sets = [&sizes[..], &common, &["schedule=\"constant\"", "metric=\"loss\""], more].concat();
        let from = tokenizer.path().display().to_string();
        let recipe = FineTuneRecipe { tokenizer: from, ..pairs(Path::new("transformer-mini"), &sets) };
        let plan = plan(FineTuneRecipe { model: "transformer-mini".to_owned(), ..recipe });
        let out = place.path().join(name);
        let results = finished(run(&plan, &out, None).unwrap());
        assert_eq!(results.best_step, results.steps, "{results:?}");
        // The end of a text is [SEP], and a target begins with padding.
        let config: Value = serde_json::from_slice(&fs::read(out.join("config.json")).unwrap()).unwrap();
        let ids =
            ["eos_token_id", "pad_token_id", "decoder_start_token_id", "vocab_size"].map(|key| config[key].as_u64());
        assert_eq!(ids, [Some(2), Some(1), Some(1), Some(59)]);
        let opened = Model::open(&out, &device(), DType::F32, Want::AsSaved).unwrap();
        let all = (0..opened.parameters().entries().len()).flat_map(|i| opened.parameters().read(i).unwrap());
        all.collect::<Vec<f32>>()
    };
    // Of one checkpoint for each epoch, the mean of the last two: each is the last one of a run that ends there.
    let mean = run_with("mean", "epochs=4", &["average_checkpoints=2"]);
    let (last, before) = (run_with("last", "epochs=4", &[]), run_with("before", "epochs=3", &[]));
    assert_ne!(mean, last);
    for ((mean, last), before) in mean.iter().zip(&last).zip(&before) {
        assert!((mean - (last + before) / 2.0).abs() < 1e-6, "{mean}: {last} and {before}");
    }
}

/// Every file in `recipes/finetune` is a recipe.
#[test]
fn recipes_are_read() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes/finetune");
    let files: Vec<_> = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(!files.is_empty());
    for path in files {
        let text = fs::read_to_string(&path).unwrap();
        let recipe = FineTuneRecipe::parse(&[(&text, &path.display().to_string())], &[]).unwrap();
        recipe.check().unwrap();
    }
}
