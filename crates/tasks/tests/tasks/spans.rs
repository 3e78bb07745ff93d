//! Marked spans against PyTorch (tools/golden/span_form.py), and the other forms of SuperGLUE: trained, saved, found again.

use std::collections::BTreeMap;
use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use henson_infer::{Model, Task as Ability, Want};
use henson_tasks::{
    FineTuneRecipe, PredictSettings, Prediction, Reading, Trained, instances, predict, read, reading_for, score,
};
use henson_tensor::DType;
use henson_train::Task as _;
use serde::Deserialize;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::finetune::{data, device, finished, model, plan, recipe, run};
use crate::support::task;

const SETTINGS: [&str; 5] = ["dropout=0.0", "learning_rate=1e-3", "warmup=0.0", "max_length=40", "epochs=5"];

#[test]
fn losses_of_spans_are_those_of_pytorch() {
    #[derive(Deserialize)]
    struct Golden {
        weight: Vec<f32>,
        bias: Vec<f32>,
        losses: BTreeMap<String, Vec<f64>>,
    }
    let golden: Golden = serde_json::from_slice(&fs::read(data("finetune/span-golden.json")).unwrap()).unwrap();
    assert_eq!(golden.losses.len(), 2);
    // Two parts of a batch add up to the whole, too.
    for ((name, losses), accumulation) in golden.losses.iter().zip([1, 2]) {
        let from = model("token", &json!({}));
        let parts = format!("accumulation={accumulation}");
        let sets: Vec<&str> = SETTINGS.into_iter().chain([parts.as_str()]).collect();
        let recipe = recipe(name, from.path(), &format!("{name}.jsonl"), &sets);
        let plan = plan(FineTuneRecipe { batch_size: 100, ..recipe });
        let (mut engine, mut learner) = (plan.engine(&device()).unwrap(), plan.learner().unwrap());
        for (key, numbers) in [("classifier.weight", &golden.weight), ("classifier.bias", &golden.bias)] {
            let entry = engine.parameters.entries().iter().position(|entry| entry.name == key).unwrap();
            engine.parameters.write(entry, numbers).unwrap();
        }
        engine.parameters.refresh().unwrap();
        for (step, expected) in losses.iter().enumerate() {
            engine.gradients.zero();
            let loss = learner.step(&mut engine, step as u64).unwrap().wait().unwrap().total;
            let (rate, _) = learner.rate(step as u64);
            engine.updater.step(&mut engine.parameters, &engine.gradients, rate).unwrap().wait().unwrap();
            assert!((loss - expected).abs() < 1e-4, "{name}, step {step}: {loss}, PyTorch has {expected}");
        }
    }
}

const MULTIRC: &str = "{\"idx\": 0, \"passage\": {\"text\": \"jim sat by the sea. the old man sang and the puppets ran and the dog sat with the cat in the walk\", \"questions\": [\
{\"question\": \"who sat?\", \"idx\": 0, \"answers\": [{\"text\": \"jim\", \"idx\": 0, \"label\": 1}, {\"text\": \"a woman\", \"idx\": 1, \"label\": 0}]}, \
{\"question\": \"who sang by the sea?\", \"idx\": 1, \"answers\": [{\"text\": \"the old man\", \"idx\": 2, \"label\": 1}, {\"text\": \"the dog\", \"idx\": 3, \"label\": 0}]}]}}\n\
{\"idx\": 1, \"passage\": {\"text\": \"a cat ran.\", \"questions\": [{\"question\": \"what ran?\", \"idx\": 2, \"answers\": [{\"text\": \"a cat\", \"idx\": 4, \"label\": 1}, {\"text\": \"jim\", \"idx\": 5, \"label\": 0}]}]}}\n";

const RECORD: &str = "{\"idx\": 0, \"passage\": {\"text\": \"jim saw the man. a dog ran\\n@highlight\\nthe man sang\", \"entities\": [{\"start\": 0, \"end\": 2}, {\"start\": 8, \"end\": 14}, {\"start\": 17, \"end\": 21}]}, \"qas\": [\
{\"query\": \"@placeholder sings\", \"idx\": 0, \"answers\": [{\"start\": 8, \"end\": 14, \"text\": \"the man\"}]}, \
{\"query\": \"@placeholder sees\", \"idx\": 1, \"answers\": [{\"start\": 0, \"end\": 2, \"text\": \"jim\"}, {\"start\": 17, \"end\": 21, \"text\": \"a dog\"}]}]}\n";

const COPA: &str = "{\"premise\": \"the man sat.\", \"choice1\": \"jim sang.\", \"choice2\": \"who?\", \"question\": \"effect\", \"label\": 0, \"idx\": 0}\n\
{\"premise\": \"a dog ran.\", \"choice1\": \"play\", \"choice2\": \"a cat ran.\", \"question\": \"cause\", \"label\": 1, \"idx\": 1}\n";

/// A recipe on a file of the test's own.
fn recipe_on(name: &str, from: &Path, file: &Path, sets: &[&str]) -> FineTuneRecipe {
    let file = file.display().to_string();
    FineTuneRecipe { train: file.clone().into(), dev: file, ..recipe(name, from, "", sets) }
}

#[test]
fn every_form_of_superglue_trains_and_is_found_again() {
    let place = TempDir::new().unwrap();
    let at = |name: &str| place.path().join(name);
    for (name, text) in [("multirc", MULTIRC), ("record", RECORD), ("copa", COPA)] {
        fs::write(at(&format!("{name}.jsonl")), text).unwrap();
    }
    // task, file, a word of config.json, what the model can be asked elsewhere
    let cases = [
        ("wic", data("finetune/wic.jsonl"), "span2:true", None),
        ("wsc", data("finetune/wsc.jsonl"), "\"spans\": 2", None),
        ("multirc", at("multirc.jsonl"), "\"pairs\": true", Some(Ability::Classify)),
        ("record", at("record.jsonl"), "BertForMultipleChoice", Some(Ability::Choose)),
        ("copa", at("copa.jsonl"), "BertForMultipleChoice", Some(Ability::Choose)),
    ];
    for (name, file, word, ability) in cases {
        let from = model("sequence", &json!({}));
        let sets = ["epochs=40", "learning_rate=3e-3", "max_length=40", "dropout=0.0", "evals_per_epoch=0.2"];
        let plan = plan(recipe_on(name, from.path(), &file, &sets));
        let out = at(name);
        let results = finished(run(&plan, &out, None).unwrap());
        assert_eq!(results.value, Some(1.0), "{name}: {results:?}");
        let config = fs::read_to_string(out.join("config.json")).unwrap();
        assert!(config.contains(word), "{name}: {config}");
        assert!(fs::read_to_string(out.join("README.md")).unwrap().contains("## Use"), "{name}");
        // What was trained is what is scored, from the directory alone.
        let opened = Model::open(&out, &device(), DType::F32, Want::AsSaved).unwrap();
        assert_eq!(opened.task(), ability, "{name}");
        assert_eq!(Trained::of_directory(&out).unwrap().task.unwrap().name, name);
        let set = read(&file, &reading_for(&opened, Reading::new(task(name)))).unwrap();
        let settings = PredictSettings::default();
        let said = predict(std::slice::from_ref(&opened), &set, &settings, |_| ControlFlow::Continue(())).unwrap();
        assert_eq!(score(&set, &said, None, 0).unwrap().get(plan.metric()), Some(1.0), "{name}");
        // A model and itself say the same as the model.
        let twice = Model::open(&out, &device(), DType::F32, Want::AsSaved).unwrap();
        let both = predict(&[opened, twice], &set, &settings, |_| ControlFlow::Continue(())).unwrap();
        for (one, both) in said.iter().zip(&both) {
            match (one, both) {
                (Prediction::Class { scores: one, .. }, Prediction::Class { scores: both, .. }) => {
                    assert!(one.iter().zip(both).all(|(a, b)| (a - b).abs() < 1e-6), "{name}: {one:?} {both:?}");
                }
                (one, both) => assert_eq!(one, both, "{name}"),
            }
        }
    }
}

#[test]
fn passages_are_cut_and_questions_are_not() {
    let place = TempDir::new().unwrap();
    let path = place.path().join("x.jsonl");
    fs::write(&path, MULTIRC).unwrap();
    let from = model("sequence", &json!({}));
    let tokenizer = henson_text::Tokenizer::open(from.path()).unwrap();
    let set = read(&path, &Reading::new(task("multirc"))).unwrap();
    let (found, cut) = instances(&set, &tokenizer, &henson_tasks::Lengths::new(16), 1).unwrap();
    let words = |i: usize| tokenizer.decode(&found[i].sequences[0].0, false).unwrap();
    assert_eq!((found.len(), cut), (6, 4));
    assert_eq!(words(2), "[CLS] jim sat by the who [UNK] by the [UNK]? [SEP] the old man [SEP]");
    assert_eq!(words(4), "[CLS] a cat ran. what ran? [SEP] a cat [SEP]");
    assert_eq!(found[4].sequences[0].1, [0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1]);
}

/// Of several right entities each is learned against the wrong ones.
#[test]
fn right_entities_do_not_compete() {
    let place = TempDir::new().unwrap();
    let path = place.path().join("x.jsonl");
    fs::write(&path, RECORD).unwrap();
    let from = model("choice", &json!({}));
    let tokenizer = henson_text::Tokenizer::open(from.path()).unwrap();
    let set = read(&path, &Reading::new(task("record"))).unwrap();
    let (found, _) = instances(&set, &tokenizer, &henson_tasks::Lengths::new(40), 1).unwrap();
    let shapes: Vec<_> = found.iter().map(|instance| (instance.sequences.len(), instance.labels[0])).collect();
    assert_eq!(shapes, [(3, Some(1)), (2, Some(0)), (2, Some(1))]);
}

/// A model of another number of spans, one of tags, and files that do not go together.
#[test]
fn what_does_not_go_together_is_refused() {
    let place = TempDir::new().unwrap();
    let at = |name: &str| place.path().join(name);
    let one = "{\"text\": \"a cat ran\", \"span1\": [2, 5], \"label\": \"x\"}\n{\"text\": \"jim\", \"span1\": [0, 3], \"label\": \"y\"}\n";
    let two = one.replace("\"label\"", "\"span2\": [0, 1], \"label\"");
    fs::write(at("one.jsonl"), one).unwrap();
    fs::write(at("two.jsonl"), two).unwrap();
    let from = model("sequence", &json!({}));
    let sets = ["epochs=1", "max_length=40"];
    let recipe = recipe_on("span", from.path(), &at("one.jsonl"), &sets);
    let other = FineTuneRecipe { dev: at("two.jsonl").display().to_string(), ..recipe.clone() };
    let message = henson_tasks::Plan::new(other, 1).err().unwrap().to_string();
    assert!(message.contains("two.jsonl") && message.contains("2 marked spans, while others have 1"), "{message}");
    let refused = recipe_on("choice", from.path(), &data("finetune/choice.jsonl"), &["windows=true"]);
    assert!(henson_tasks::Plan::new(refused, 1).err().unwrap().to_string().contains("`windows` is true"));
    let other = FineTuneRecipe { windows: true, ..recipe.clone() };
    let message = henson_tasks::Plan::new(other, 1).err().unwrap().to_string();
    assert!(message.contains("windows") && message.contains("as a whole"), "{message}");
    let out = at("out");
    finished(run(&plan(recipe), &out, None).unwrap());
    let opened = || Model::open(&out, &device(), DType::F32, Want::AsSaved).unwrap();
    assert_eq!(opened().task(), None, "it has no tags");
    let said = |opened: Model, file: &str| {
        let set = read(&at(file), &reading_for(&opened, Reading::new(task("span")))).unwrap();
        predict(&[opened], &set, &PredictSettings::default(), |_| ControlFlow::Continue(())).map_err(|e| e.to_string())
    };
    assert_eq!(said(opened(), "one.jsonl").unwrap().len(), 2);
    let message = said(opened(), "two.jsonl").unwrap_err();
    assert!(message.contains("of 1 marked spans, and the examples have 2"), "{message}");
    // The same without the key is a tagger.
    let mut config: Value = serde_json::from_slice(&fs::read(out.join("config.json")).unwrap()).unwrap();
    config["henson_reading"].as_object_mut().unwrap().remove("spans");
    fs::write(out.join("config.json"), config.to_string()).unwrap();
    let message = said(opened(), "one.jsonl").unwrap_err();
    assert!(message.contains("knows no marked spans"), "{message}");
}
