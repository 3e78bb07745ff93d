//! Encoder-decoders on tasks with classes and numbers: as texts that they write, and by a classifier on the decoder's last state.

use std::fs;
use std::ops::ControlFlow;
use std::path::PathBuf;

use henson_infer::{Model, Want};
use henson_tasks::{
    FineTuneRecipe, Plan, PredictSettings, Prediction, Reading, Set, Trained, predict, prediction_files, read,
    reading_for, score,
};
use henson_tensor::DType;
use serde_json::json;
use tempfile::TempDir;

use crate::finetune::{device, finished, plan, recipe, run};
use crate::seq2seq::{BART_SPECIAL, BY_HEART, T5_SPECIAL, writer};
use crate::support::{Place, read_as, task};

const ROWS: &str = "{\"text\": \"the cat sat\", \"label\": \"small\"}\n{\"text\": \"a dog ran\", \"label\": \"old\"}\n\
    {\"text\": \"the cat and the child\", \"label\": \"small\"}\n{\"text\": \"a dog is not a cat\", \"label\": \"old\"}\n";

fn rows(place: &Place) -> PathBuf {
    place.file("rows.jsonl", ROWS)
}

fn on(file: &std::path::Path, name: &str, from: &TempDir, sets: &[&str]) -> FineTuneRecipe {
    let file = file.display().to_string();
    FineTuneRecipe { train: file.clone().into(), dev: file, ..recipe(name, from.path(), "", sets) }
}

fn predicted(
    out: &std::path::Path,
    data: &std::path::Path,
    name: &'static henson_tasks::Task,
) -> (Set, Vec<Prediction>) {
    let opened = Model::open(out, &device(), DType::F32, Want::AsSaved).unwrap();
    let set = read(data, &reading_for(&opened, Reading::new(name))).unwrap();
    let go_on = |_| ControlFlow::Continue(());
    let predictions = predict(std::slice::from_ref(&opened), &set, &PredictSettings::default(), go_on).unwrap();
    (set, predictions)
}

#[test]
fn labels_are_written_where_there_is_no_classifier() {
    let (files, place) = (Place::new(), TempDir::new().unwrap());
    let (from, rows, out) = (writer("t5", &T5_SPECIAL, &json!({})), rows(&files), place.path().join("run"));
    let sets: Vec<&str> = BY_HEART.into_iter().filter(|set| !set.starts_with("epochs")).chain(["epochs=300"]).collect();
    let plan = plan(FineTuneRecipe { text_to_text: true, ..on(&rows, "classify", &from, &sets) });
    let results = finished(run(&plan, &out, None).unwrap());
    assert_eq!((results.metric.as_str(), results.value), ("accuracy", Some(1.0)), "{results:?}");
    // What the directory says about itself is enough to ask it.
    let trained = Trained::of_directory(&out).unwrap().task.unwrap();
    assert!(trained.writes() && !task("classify").writes());
    let (set, predictions) = predicted(&out, &rows, trained);
    assert_eq!(score(&set, &predictions, None, 0).unwrap().get("accuracy"), Some(1.0));
    let (_, lines) = &prediction_files(&set, &predictions).unwrap()[0];
    assert_eq!(std::str::from_utf8(lines).unwrap().lines().next().unwrap(), "{\"id\":\"0\",\"prediction\":\"small\"}");
}

#[test]
fn a_text_that_is_no_label_counts_as_wrong() {
    let files = Place::new();
    let set = Set { task: task("classify").as_text().unwrap(), ..read_as("classify", &rows(&files)).unwrap() };
    // old is 0, small is 1.
    let class = |class| Prediction::Class { class, scores: Vec::new() };
    let predictions = [class(1), class(0), Prediction::None, class(0)];
    let scored = score(&set, &predictions, None, 10).unwrap();
    assert_eq!((scored.get("accuracy"), scored.missing), (Some(0.75), 1));
    assert_eq!(scored.get("f1:small"), Some(2.0 / 3.0));
    assert_eq!((scored.mistakes[0].expected.as_str(), scored.mistakes[0].predicted.as_str()), ("small", "(no label)"));
    // A benchmark's file must have a label.
    assert_eq!(prediction_files(&set, &predictions).unwrap()[0].0, "predictions.jsonl");
    assert!(task("squad1").as_text().is_none() && task("ner").as_text().is_none());
    let from = writer("t5", &T5_SPECIAL, &json!({}));
    let message =
        Plan::new(on(&rows(&files), "multilabel", &from, &["text_to_text=true"]), 1).err().unwrap().to_string();
    assert!(message.contains("`text_to_text` is true, expected false"), "{message}");
    // A family that learns all tasks so does it where nobody says otherwise.
    let parsed = FineTuneRecipe::parse(&[("", "test")], &[]).unwrap();
    let FineTuneRecipe { task, model, train, dev, .. } = on(&rows(&files), "classify", &from, &[]);
    let unset = FineTuneRecipe { task, model, train, dev, ..parsed };
    assert!(plan(unset.clone()).task.writes());
    assert!(!plan(FineTuneRecipe { by_size: Default::default(), ..unset }).task.writes());
}

#[test]
fn a_classifier_reads_the_last_state_of_the_decoder() {
    let (files, place) = (Place::new(), TempDir::new().unwrap());
    let (from, rows, out) = (writer("bart", &BART_SPECIAL, &json!({})), rows(&files), place.path().join("run"));
    let plan =
        plan(on(&rows, "classify", &from, &["epochs=30", "learning_rate=1e-2", "dropout=0.0", "evals_per_epoch=0.1"]));
    assert!(!plan.recipe.text_to_text);
    let results = finished(run(&plan, &out, None).unwrap());
    assert_eq!((results.metric.as_str(), results.value), ("accuracy", Some(1.0)), "{results:?}");
    let config = fs::read_to_string(out.join("config.json")).unwrap();
    assert!(config.contains("BartForSequenceClassification"), "{config}");
    let (set, predictions) = predicted(&out, &rows, task("classify"));
    assert_eq!(score(&set, &predictions, None, 0).unwrap().get("accuracy"), Some(1.0));
    // The same model may write its labels instead.
    let written = plan_with(&rows, &from);
    assert!(written.recipe.text_to_text && written.task.writes());
}

fn plan_with(rows: &std::path::Path, from: &TempDir) -> Plan {
    plan(on(rows, "classify", from, &["text_to_text=true"]))
}
