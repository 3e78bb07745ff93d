//! Decoders that learn to classify as GPT did: its tokens around texts, both orders of a pair, and the language model's loss beside
//! the task's, against PyTorch (tools/golden/gpt_finetuning.py).

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use henson_infer::{Input, Length, Model, Want};
use henson_tasks::{FineTuneRecipe, Plan, PredictSettings, Prediction, Reading, predict, read, reading_for, score};
use henson_tensor::DType;
use henson_train::Task as _;
use serde::Deserialize;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::finetune::{data, device, finished, plan, recipe, run};
use crate::support::task;

/// f32 against f32; measured is some 10⁻⁶.
const LOSS_TOLERANCE: f64 = 1e-4;

const TASK_TOKENS: [&str; 3] = ["_start_", "_delimiter_", "_classify_"];

/// A golden decoder, with the golden vocabulary and `more` tokens behind it.
fn decoder(name: &str, more: &[&str], keys: &Value) -> TempDir {
    let directory = TempDir::new().unwrap();
    let golden = data("gpt-finetuning").join(name);
    fs::copy(golden.join("model.safetensors"), directory.path().join("model.safetensors")).unwrap();
    let words = fs::read_to_string(data("likelihood/vocab.txt")).unwrap();
    let more: String = more.iter().map(|token| format!("{token}\n")).collect();
    fs::write(directory.path().join("vocab.txt"), words.trim_end().to_owned() + "\n" + &more).unwrap();
    let mut config: Value = serde_json::from_slice(&fs::read(golden.join("config.json")).unwrap()).unwrap();
    for (key, value) in keys.as_object().unwrap() {
        config[key] = value.clone();
    }
    fs::write(directory.path().join("config.json"), config.to_string()).unwrap();
    directory
}

/// A recipe whose values for the model's family are chosen, as the command does it.
fn chosen(name: &str, from: &Path, file: &str, sets: &[&str]) -> FineTuneRecipe {
    let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
    let parsed = FineTuneRecipe::parse(&[("", "test")], &sets).unwrap();
    let FineTuneRecipe { train, dev, .. } = recipe(name, from, file, &[]);
    FineTuneRecipe { task: name.to_owned(), model: from.display().to_string(), train, dev, ..parsed }
}

#[test]
fn losses_are_those_of_gpt() {
    #[derive(Deserialize)]
    struct Case {
        model: String,
        task: String,
        file: String,
        /// All, the task's, the language model's.
        losses: Vec<[f64; 3]>,
    }
    let cases: Vec<Case> = serde_json::from_slice(&fs::read(data("gpt-finetuning/golden.json")).unwrap()).unwrap();
    assert_eq!(cases.len(), 3);
    for case in cases {
        let from = decoder(&case.model, &TASK_TOKENS, &json!({}));
        let common =
            ["dropout=0.0", "learning_rate=1e-3", "warmup=0.0", "weight_decay=0.0", "max_length=80", "epochs=5"];
        for accumulation in ["accumulation=1", "accumulation=4"] {
            let sets: Vec<&str> = common.into_iter().chain(["batch_size=100", accumulation, "epsilon=1e-6"]).collect();
            let plan = plan(chosen(&case.task, from.path(), &case.file, &sets));
            assert!(plan.recipe.task_tokens && plan.recipe.auxiliary_lm == 0.5, "{:?}", plan.recipe);
            assert_eq!((plan.steps(), plan.cut, plan.recipe.both_orders), (5, 0, case.task == "regress"));
            let (mut engine, mut learner) = (plan.engine(&device()).unwrap(), plan.learner().unwrap());
            for (step, [expected, ..]) in case.losses.iter().enumerate() {
                engine.gradients.zero();
                let loss = learner.step(&mut engine, step as u64).unwrap().wait().unwrap().total;
                let (rate, _) = learner.rate(step as u64);
                engine.updater.step(&mut engine.parameters, &engine.gradients, rate).unwrap().wait().unwrap();
                let name = format!("{}, {accumulation}, step {step}", case.task);
                assert!((loss - expected).abs() < LOSS_TOLERANCE, "{name}: {loss}, PyTorch has {expected}");
            }
        }
    }
}

#[test]
fn new_tokens_join_tokenizer_and_table_and_are_saved() {
    // The table has as many rows as the vocabulary: three are added.
    let from = decoder("regression", &["one", "two", "three"], &json!({}));
    let place = TempDir::new().unwrap();
    let out = place.path().join("run");
    let plan =
        plan(chosen("regress", from.path(), "regress.jsonl", &["epochs=2", "max_length=60", "folds=0", "dev_rows=0"]));
    assert_eq!(plan.config.model.sizes().vocab_size, 77);
    let engine = plan.engine(&device()).unwrap();
    let table =
        engine.parameters.entries().iter().position(|entry| entry.name.ends_with("tokens_embed.weight")).unwrap();
    let rows = engine.parameters.read(table).unwrap();
    let original = original_table(&from);
    assert_eq!(rows[..original.len()], original[..]);
    let fresh = &rows[original.len()..];
    let deviation = (fresh.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / fresh.len() as f64).sqrt();
    assert!(fresh.len() == 24 && (0.01..0.03).contains(&deviation), "{deviation}");

    let results = finished(run(&plan, &out, None).unwrap());
    let opened = Model::open(&out, &device(), DType::F32, Want::AsSaved).unwrap();
    let ids = |tokens: &[&str]| tokens.iter().map(|token| opened.tokenizer().id(token).unwrap()).collect::<Vec<_>>();
    assert_eq!(ids(&TASK_TOKENS), [74, 75, 76]);
    // Both orders: the order of a pair does not matter, for the command as for predictions.
    let of = |a, b| opened.classify(&[Input::Pair(a, b)], Length::CUT).unwrap()[0].logits[0];
    let (one, other) = (of("the cat sat", "a dog"), of("a dog", "the cat sat"));
    assert!((one - other).abs() < 1e-6, "{one} {other}");
    let set = read(&data("finetune/regress.jsonl"), &reading_for(&opened, Reading::new(task("regress")))).unwrap();
    let predictions =
        predict(std::slice::from_ref(&opened), &set, &PredictSettings::default(), |_| ControlFlow::Continue(()))
            .unwrap();
    let scored = score(&set, &predictions, None, 0).unwrap();
    assert_eq!(scored.get("pearson"), results.value);
    let Prediction::Number(first) = predictions[0] else { panic!("{predictions:?}") };
    let (a, b) = ("the cat sat on the dog.", "cats are dogs");
    assert!((first - f64::from(of(a, b))).abs() < 1e-6);
}

/// The table of tokens in a directory's file.
fn original_table(from: &TempDir) -> Vec<f32> {
    let bytes = fs::read(from.path().join("model.safetensors")).unwrap();
    let (length, rest) = bytes.split_at(8);
    let (header, numbers) = rest.split_at(u64::from_le_bytes(length.try_into().unwrap()) as usize);
    let header: Value = serde_json::from_slice(header).unwrap();
    let place = |i: usize| header["transformer.tokens_embed.weight"]["data_offsets"][i].as_u64().unwrap() as usize;
    let table = numbers[place(0)..place(1)].chunks_exact(4);
    table.map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

#[test]
fn what_only_decoders_can_do_is_refused_elsewhere() {
    let from = crate::finetune::model("sequence", &json!({}));
    for (set, expected) in
        [("task_tokens=true", "task_tokens"), ("auxiliary_lm=0.5", "auxiliary_lm"), ("both_orders=true", "both_orders")]
    {
        let message = Plan::new(recipe("pair", from.path(), "pair.jsonl", &[set]), 1).err().unwrap().to_string();
        assert!(message.contains(expected) && message.contains("decoder"), "{message}");
    }
}
