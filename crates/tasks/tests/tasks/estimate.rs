//! Scores without a dev file: rows that are held out, folds, and the promises of a run with them.

use std::cell::Cell as Counter;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use henson_tasks::{Ended, FineTuneRecipe, Plan, Results, Search, SearchEnded, TaskError, finetune, search};
use henson_train::{Event, Watch};
use serde_json::json;
use tempfile::TempDir;

use crate::finetune::{data, device, finished, model, plan, recipe, run};
use crate::support::Place;

/// A recipe without a dev file.
fn without_dev(name: &str, from: &Path, file: &str, sets: &[&str]) -> FineTuneRecipe {
    let short = ["epochs=2", "learning_rate=1e-3", "max_length=40", "stride=9"];
    FineTuneRecipe { dev: String::new(), ..recipe(name, from, file, &[&short, sets].concat()) }
}

/// Runs to its end, or is stopped after so many updates, those of folds included.
fn run_for(plan: &Plan, out: &Path, updates: u64) -> Result<Option<Results>, TaskError> {
    let (stop, left) = (AtomicBool::new(false), Counter::new(updates));
    let mut on = |event: Event<'_>| {
        if let Event::Step { .. } = event {
            left.set(left.get().saturating_sub(1));
            stop.store(left.get() == 0, Ordering::Relaxed);
        }
    };
    Ok(match finetune(plan, &device(), out, None, &mut Watch { on: &mut on, stop: &stop })? {
        Ended::Finished(results) => Some(Results { seconds: 0.0, ..*results }),
        Ended::Interrupted(_) => None,
        ended => panic!("{ended:?}"),
    })
}

#[test]
fn folds_score_every_kind_of_task() {
    let cases = [
        ("classify", "sequence", "classify.jsonl"),
        ("pair", "multilabel", "pair.jsonl"),
        ("regress", "sequence", "regress.jsonl"),
        ("multilabel", "sequence", "multilabel.jsonl"),
        ("tag", "sequence", "tag.conll"),
        ("squad2", "token", "qa.json"),
        ("choice", "sequence", "choice.jsonl"),
        ("embed", "sequence", "embed.jsonl"),
    ];
    let place = TempDir::new().unwrap();
    for (name, head, file) in cases {
        let from = model(head, &json!({}));
        let plan = plan(without_dev(name, from.path(), file, &["folds=2", "split_seed=1"]));
        let out = place.path().join(name);
        let results = finished(run(&plan, &out, None).unwrap());
        let folds = results.folds.as_ref().unwrap_or_else(|| panic!("{name}"));
        assert_eq!(folds.values.len(), 2, "{name}");
        assert_eq!(results.value, folds.mean, "{name}");
        // All rows are trained on, and a part of them in each fold.
        let of_fold = |number: u32| -> Results {
            let path = out.join(format!("folds/{number}/results.json"));
            serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
        };
        let parts = [of_fold(1), of_fold(2)];
        assert_eq!(parts.iter().map(|fold| fold.train_examples).sum::<usize>(), plan.train.examples.len(), "{name}");
        assert_eq!(results.train_examples, plan.train.examples.len(), "{name}");
        if let [Some(a), Some(b)] = folds.values[..] {
            assert!((results.value.unwrap() - (a + b) / 2.0).abs() < 1e-12, "{name}");
            // A fold whose questions all have answers has no best threshold.
            if parts[0].metric == parts[1].metric {
                assert_eq!(results.scores[&parts[0].metric].as_f64(), results.value, "{name}");
            }
        }
        let card = fs::read_to_string(out.join("README.md")).unwrap();
        assert!(card.contains("Estimated by 2 folds"), "{card}");
        assert!(!out.join("folds/1/model.safetensors").exists() && out.join("model.safetensors").exists(), "{name}");
        // Finished is finished, for folds as well.
        assert_eq!(finished(run(&plan, &out, None).unwrap()), results, "{name}");
    }
}

#[test]
fn a_run_stopped_amid_folds_ends_with_the_same_bits() {
    let (from, place) = (model("sequence", &json!({})), TempDir::new().unwrap());
    let plan = plan(without_dev("classify", from.path(), "classify.jsonl", &["folds=3", "seed=7"]));
    let (whole, parts) = (place.path().join("whole"), place.path().join("parts"));
    let expected = run_for(&plan, &whole, u64::MAX).unwrap().unwrap();
    let mut interruptions = 0;
    let results = loop {
        match run_for(&plan, &parts, 3).unwrap() {
            Some(results) => break results,
            None => interruptions += 1,
        }
    };
    assert!(interruptions > 3, "{interruptions}");
    // Mistakes quote the files and are not kept, so folds that were finished before have none.
    assert_eq!(results, Results { mistakes: None, ..expected });
    for name in ["model.safetensors", "config.json", "recipe.toml"] {
        assert_eq!(fs::read(whole.join(name)).unwrap(), fs::read(parts.join(name)).unwrap(), "{name}");
    }
    // Other folds are another run.
    let other = self::plan(FineTuneRecipe { folds: 2, ..plan.recipe.clone() });
    let message = run(&other, &whole, None).unwrap_err().to_string();
    assert!(message.contains("folds: was 3, now 2"), "{message}");
}

/// The model of folds is the one that all rows give without them.
#[test]
fn folds_do_not_change_the_model() {
    let (from, place) = (model("sequence", &json!({})), TempDir::new().unwrap());
    let weights = |sets: &[&str], name: &str| {
        let out = place.path().join(name);
        finished(run(&plan(without_dev("classify", from.path(), "classify.jsonl", sets)), &out, None).unwrap());
        fs::read(out.join("model.safetensors")).unwrap()
    };
    assert_eq!(weights(&["folds=2"], "folds"), weights(&[], "none"));
}

/// Rows with a label, as JSON lines.
fn many(place: &Place, name: &str, rows: usize) -> String {
    let (subjects, verbs) = (["the cat", "the dog", "a man", "a woman", "the child"], ["sat", "sings", "saw"]);
    let row = |i: usize| {
        let (subject, verb) = (subjects[i % 5], verbs[i / 5 % 3]);
        format!("{}\n", json!({ "text": format!("{subject} {verb} {i}"), "label": subject }))
    };
    place.file(name, (0..rows).map(row).collect::<String>()).display().to_string()
}

#[test]
fn what_is_held_out_is_chosen_by_size_and_kept_in_the_recipe() {
    let (from, place, runs) = (model("sequence", &json!({})), Place::new(), TempDir::new().unwrap());
    let short = ["epochs=1", "learning_rate=1e-3", "max_length=12", "batch_size=16"];
    let parse = |text: &str, more: &[&str]| {
        let sets: Vec<String> = short.iter().chain(more).map(|set| (*set).to_owned()).collect();
        FineTuneRecipe::parse(&[(text, "test")], &sets).unwrap()
    };
    let of = |recipe: FineTuneRecipe, train: &str| FineTuneRecipe {
        task: "classify".to_owned(),
        model: from.path().display().to_string(),
        train: train.into(),
        ..recipe
    };
    let (large, small) = (many(&place, "large.jsonl", 500), many(&place, "small.jsonl", 60));
    let sizes = |recipe: FineTuneRecipe, train: &str| {
        let plan = plan(of(recipe, train));
        let dev = plan.dev.as_ref().map_or(0, |dev| dev.examples.len());
        (plan.recipe.dev_rows, plan.recipe.folds, plan.train.examples.len(), dev)
    };
    assert_eq!(sizes(parse("", &[]), &large), (100, 0, 400, 100));
    assert_eq!(sizes(parse("", &[]), &small), (0, 5, 60, 0));
    assert_eq!(sizes(parse("", &["limit=60"]), &large), (0, 5, 60, 0));
    // What is given is never changed, and nothing is chosen for who wants none.
    assert_eq!(sizes(parse("dev_rows = 50", &[]), &large), (50, 0, 450, 50));
    assert_eq!(sizes(parse("", &["folds=3"]), &large), (0, 3, 500, 0));
    for none in ["dev = \"\"", "dev = \"none\"", "dev_rows = 0\nfolds = 0"] {
        assert_eq!(sizes(parse(none, &[]), &large), (0, 0, 500, 0), "{none}");
    }
    assert_eq!(sizes(FineTuneRecipe::default(), &small), (0, 0, 60, 0), "a recipe in code has all its values");

    // A run from a run's recipe holds the same rows out, and gives the same bits.
    let plan = plan(of(parse("", &[]), &large));
    let (first, second) = (runs.path().join("first"), runs.path().join("second"));
    let results = finished(run(&plan, &first, None).unwrap());
    assert_eq!((results.dev_rows, results.value.is_some()), (Some(100), true));
    let saved = fs::read_to_string(first.join("recipe.toml")).unwrap();
    let again = self::plan(FineTuneRecipe::parse(&[(&saved, "saved")], &[]).unwrap());
    assert_eq!(finished(run(&again, &second, None).unwrap()), results);
    assert_eq!(fs::read(first.join("model.safetensors")).unwrap(), fs::read(second.join("model.safetensors")).unwrap());
    // A run resumes with what was chosen when it began, and one of version 0.1 with what that did.
    let mut resumed = of(parse("", &["folds=0"]), &large);
    fs::write(first.join("recipe.toml"), saved.replace("dev_rows = 100", "dev_rows = 70")).unwrap();
    resumed.resume_from(&first).unwrap();
    assert_eq!((resumed.dev_rows, resumed.folds), (70, 0));
    let old = saved.lines().filter(|line| !["dev_rows", "folds", "split_seed"].iter().any(|key| line.starts_with(key)));
    fs::write(first.join("recipe.toml"), old.collect::<Vec<_>>().join("\n")).unwrap();
    let mut resumed = of(parse("", &[]), &large);
    resumed.resume_from(&first).unwrap();
    assert_eq!(sizes(resumed, &large), (0, 0, 500, 0));
}

#[test]
fn a_search_chooses_by_folds() {
    let (from, place) = (model("sequence", &json!({})), TempDir::new().unwrap());
    let values = ["0.0", "1e-2"].map(str::to_owned).to_vec();
    let wanted = Search {
        restarts: 1,
        grid: vec![("learning_rate".to_owned(), values)],
        recipe: without_dev("classify", from.path(), "classify.jsonl", &["folds=3", "epochs=20"]),
    };
    let (stop, mut on) = (AtomicBool::new(false), |_: Event<'_>| {});
    let mut watch = Watch { on: &mut on, stop: &stop };
    let out = place.path().join("search");
    let ended = search(&wanted, &device(), &out, &mut |_, _, _, _| {}, &mut |_| {}, &mut watch).unwrap();
    let SearchEnded::Finished(table) = ended else { panic!("{ended:?}") };
    let of_cell = |directory: &str| -> Results {
        serde_json::from_slice(&fs::read(out.join(directory).join("results.json")).unwrap()).unwrap()
    };
    for cell in &table.cells {
        assert_eq!(cell.value, of_cell(&cell.directory).folds.unwrap().mean);
    }
    let best = table.cells.iter().filter_map(|cell| cell.value).fold(0.0, f64::max);
    assert_eq!(of_cell(table.best.as_ref().unwrap()).value, Some(best));
    assert!(out.join("model.safetensors").exists() && !out.join("folds").exists());
}

#[test]
fn what_cannot_be_divided_is_refused() {
    let from = model("sequence", &json!({}));
    let file = data("finetune/classify.jsonl").display().to_string();
    let base = |sets: &[&str]| without_dev("classify", from.path(), "classify.jsonl", sets);
    for (recipe, expected) in [
        (base(&["folds=1"]), "`folds` is 1"),
        (base(&["folds=7"]), "2 to 6"),
        (base(&["dev_rows=6"]), "`dev_rows` is 6"),
        (base(&["dev_rows=2", "folds=2"]), "there are folds"),
        (FineTuneRecipe { dev: file, ..base(&["dev_rows=2"]) }, "is the dev file"),
    ] {
        let message = Plan::new(recipe, 1).err().unwrap().to_string();
        assert!(message.contains(expected), "{expected}: {message}");
    }
}
