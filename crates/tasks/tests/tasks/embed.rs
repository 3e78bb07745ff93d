//! Tuning for sentence vectors: what is read, learned, written and found again. Its losses are golden (see finetune.rs).

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use henson_infer::{EmbedSettings, Model, Pooling, Want};
use henson_tasks::{
    Files, FineTuneRecipe, Plan, PredictSettings, Prediction, Reading, Search, SearchEnded, TaskError, predict,
    prediction_files, read, read_predictions, score, search,
};
use henson_tensor::DType;
use henson_train::Watch;
use serde_json::json;
use tempfile::TempDir;

use crate::finetune::{data, device, finished, model, plan, recipe, run};
use crate::support::{short, task, written};

#[test]
fn pairs_are_read_with_what_they_have() {
    let place = TempDir::new().unwrap();
    let check = |name: &str, text: &str, files: Files, expected: &[&str]| {
        let path = place.path().join(name);
        fs::write(&path, text).unwrap();
        let set = read(&path, &written("embed", files));
        let got: Vec<String> = match &set {
            Ok(set) => set.examples.iter().map(|example| short(set, example)).collect(),
            Err(error) => vec![error.to_string()],
        };
        assert!(got.len() == expected.len(), "{got:?}");
        assert!(got.iter().zip(expected).all(|(got, expected)| got.contains(expected)), "{got:?}");
    };
    let usual = Files::default;
    check(
        "a.tsv",
        "sentence1\tsentence2\tscore\na b\tc\t2.5\nd\te\t0\n",
        usual(),
        &["0: a b ~ c -> 2.5", "1: d ~ e -> 0"],
    );
    check("b.jsonl", "{\"query\": \"a\", \"answer\": \"b\", \"label\": \"x\"}\n", usual(), &["0: a ~ b -> ?"]);
    check("c.csv", "anchor,positive,negative\na,b,c\nd,e,\n", usual(), &["0: a ~ b / c -> ?", "1: d ~ e -> ?"]);
    let column = |name: &str| Some(henson_data::tables::Column::Name(name.to_owned()));
    let columns =
        Files { text_column: column("x"), second_column: column("y"), negative_column: column("z"), ..usual() };
    check("d.csv", "x,y,z\na,b,c\n", columns.clone(), &["0: a ~ b / c -> ?"]);
    check("e.csv", "x,y\na,b\n", columns, &["--negative-column"]);
    let itself = Files { text_column: column("x"), second_column: column("x"), ..usual() };
    check("i.csv", "x\na\n", itself, &["0: a ~ a -> ?"]);
    check("f.csv", "anchor,negative\na,b\n", usual(), &["the second text"]);
    check("g.csv", "anchor,positive\na,\n", usual(), &["line 2: column \"positive\": the text is empty"]);
    check("h.csv", "sentence1,sentence2,score\na,b,high\n", usual(), &["expected a number, found \"high\""]);
    check("h.csv", "sentence1,sentence2,score\na,b,1e40\n", usual(), &["up to 3e38, found \"1e40\""]);
}

/// What the directory alone says about the plan's dev file, as a score; and that it is as trained.
fn found_again(plan: &Plan, out: &Path, metric: &str) -> f64 {
    let settings = EmbedSettings::of_directory(out).unwrap();
    assert_eq!(settings, EmbedSettings { normalise: true, most_tokens: Some(12), ..EmbedSettings::default() });
    let opened = Model::open(out, &device(), DType::F32, Want::AsSaved).unwrap();
    let set = plan.dev.as_ref().unwrap();
    let predictions = predict(&[opened], set, &PredictSettings::default(), |_| ControlFlow::Continue(())).unwrap();
    score(set, &predictions, None, 0).unwrap().get(metric).unwrap()
}

#[test]
fn vectors_learn_which_texts_are_alike_and_are_found_again() {
    let (from, place) = (model("sequence", &json!({})), TempDir::new().unwrap());
    let sets = ["epochs=25", "learning_rate=1e-3", "max_length=12", "dropout=0.1", "evals_per_epoch=1"];
    let base = FineTuneRecipe { batch_size: 4, ..recipe("embed", from.path(), "embed.jsonl", &sets) };
    // Partners are to be found without scores.
    let (plan_of, out) = (plan(base.clone()), place.path().join("pairs"));
    assert!(plan_of.cut > 0, "some texts are longer than 12 tokens");
    let results = finished(run(&plan_of, &out, None).unwrap());
    assert_eq!((results.metric.as_str(), results.value, results.degenerate), ("accuracy", Some(1.0), None));
    let first: serde_json::Value = {
        let log = fs::read_to_string(out.join("metrics.jsonl")).unwrap();
        serde_json::from_str(log.lines().find(|line| line.contains("\"accuracy\"")).unwrap()).unwrap()
    };
    assert!(first["metrics"]["accuracy"].as_f64().unwrap() < 1.0, "there was something to learn: {first}");
    assert_eq!(found_again(&plan_of, &out, "accuracy"), 1.0);
    let card = fs::read_to_string(out.join("README.md")).unwrap();
    assert!(
        card.contains("library_name: sentence-transformers") && card.contains("SentenceTransformer(DIR)"),
        "{card}"
    );

    // Scores are learned as cosines.
    let dev = data("finetune/embed-scores.jsonl").display().to_string();
    let (plan_of, out) = (
        plan(FineTuneRecipe { train: dev.clone().into(), dev: dev.clone(), ..base.clone() }),
        place.path().join("cosines"),
    );
    let results = finished(run(&plan_of, &out, None).unwrap());
    assert!(results.value.unwrap() > 0.9 && results.metric == "spearman", "{results:?}");

    // With scores by their order; interrupted, with the same bits.
    let (plan_of, out) = (plan(FineTuneRecipe { dev, epochs: 3.0, ..base }), place.path().join("scores"));
    let results = finished(run(&plan_of, &out, None).unwrap());
    assert_eq!(results.metric, "spearman");
    assert!((results.value.unwrap() - found_again(&plan_of, &out, "spearman")).abs() < 1e-9);
    let parts = place.path().join("parts");
    for stop_at in [1, 3] {
        run(&plan_of, &parts, Some(stop_at)).unwrap();
    }
    assert_eq!(finished(run(&plan_of, &parts, None).unwrap()), results);
    assert_eq!(fs::read(out.join("model.safetensors")).unwrap(), fs::read(parts.join("model.safetensors")).unwrap());
}

#[test]
fn the_best_of_a_search_is_whole() {
    let (from, place) = (model("sequence", &json!({})), TempDir::new().unwrap());
    let recipe = recipe("embed", from.path(), "embed-unlike.jsonl", &["epochs=1", "max_length=12"]);
    let grid = vec![("temperature".to_owned(), vec!["0.05".to_owned(), "0.2".to_owned()])];
    let (wanted, stop) = (Search { restarts: 1, grid, recipe }, AtomicBool::new(false));
    let mut watch = Watch { on: &mut |_| {}, stop: &stop };
    let out = place.path().join("out");
    let ended = search(&wanted, &device(), &out, &mut |_, _, _, _| {}, &mut |_| {}, &mut watch).unwrap();
    assert!(matches!(ended, SearchEnded::Finished(table) if table.best.is_some()));
    assert!(EmbedSettings::of_directory(&out).unwrap().normalise);
    assert!(!out.join("tensorboard").exists() && out.join("model.safetensors").exists());
}

#[test]
fn cosines_are_written_and_scored_again() {
    let from = model("sequence", &json!({}));
    let path = data("finetune/embed-scores.jsonl");
    let mut set = read(&path, &Reading::new(task("embed"))).unwrap();
    let open = || Model::open(from.path(), &device(), DType::F32, Want::Encoder).unwrap();
    let ask = |models: &[Model]| predict(models, &set, &PredictSettings::default(), |_| ControlFlow::Continue(()));
    let (one, both) = (ask(&[open()]).unwrap(), ask(&[open(), open()]).unwrap());
    for (one, both) in one.iter().zip(&both) {
        let (
            Prediction::Similarity { cosine, vectors: Some(_), .. },
            Prediction::Similarity { cosine: mean, vectors: None, .. },
        ) = (one, both)
        else {
            panic!("{one:?} {both:?}");
        };
        assert!((cosine - mean).abs() < 1e-12 && (-1.0..=1.0).contains(cosine));
    }
    let expected = score(&set, &one, None, 0).unwrap();
    let place = TempDir::new().unwrap();
    let (name, bytes) = prediction_files(&set, &one).unwrap().remove(0);
    fs::write(place.path().join(&name), bytes).unwrap();
    let again = read_predictions(&place.path().join(&name), &mut set).unwrap();
    assert_eq!(score(&set, &again, None, 0).unwrap().metrics, expected.metrics);
    assert_eq!(expected.metrics.iter().map(|(name, _)| *name).collect::<Vec<_>>(), ["spearman", "pearson"]);
    // Without scores, cosines are not enough.
    set.examples.iter_mut().for_each(|example| example.target = henson_tasks::Target::None);
    assert!(score(&set, &one, None, 0).unwrap().get("accuracy").is_some());
    assert!(matches!(score(&set, &again, None, 0), Err(TaskError::NoLabels { .. })));
}

#[test]
fn what_cannot_be_tuned_is_said() {
    let (from, cls) = (model("sequence", &json!({})), model("sequence", &json!({})));
    let files = EmbedSettings { pooling: vec![Pooling::First], normalise: true, ..EmbedSettings::default() }.files(8);
    fs::create_dir(cls.path().join("1_Pooling")).unwrap();
    files.iter().for_each(|(name, bytes)| fs::write(cls.path().join(name), bytes).unwrap());
    let check = |file: &str, sets: &[&str], path: &Path, expected: &str| {
        let recipe = recipe("embed", path, file, sets);
        let message = match Plan::new(recipe, 1) {
            Ok(plan) => format!("{} pairs", plan.train.examples.len()),
            Err(error) => error.to_string(),
        };
        assert!(message.contains(expected), "expected {expected}: {message}");
    };
    check("embed.jsonl", &[], from.path(), "6 pairs");
    check("embed.jsonl", &["freeze=true"], from.path(), "`freeze` is true");
    check("embed.jsonl", &["windows=true"], from.path(), "`windows` is true");
    check("embed.jsonl", &["temperature=0"], from.path(), "`temperature` is 0");
    check("embed.jsonl", &["min_score=1"], from.path(), "`min_score` is 1");
    check("embed.jsonl", &["limit=1"], from.path(), "`limit` is 1");
    check("embed.jsonl", &["class_weights=true"], from.path(), "`class_weights` is true");
    // The model's own pooling is kept, unless another is asked for.
    check("embed.jsonl", &[], cls.path(), "6 pairs");
    check("embed.jsonl", &["pooling=[]"], from.path(), "`pooling` is []");
    check("embed-scores.jsonl", &[], from.path(), "6 pairs");
    check("embed-scores.jsonl", &["min_score=3"], from.path(), "3 pairs");
    check("embed-scores.jsonl", &["min_score=0", "limit=4"], from.path(), "4 pairs");
    check("embed-scores.jsonl", &["min_score=5"], from.path(), "1 similar pairs");
    let one = FineTuneRecipe { batch_size: 1, ..recipe("embed", from.path(), "embed.jsonl", &[]) };
    let message = Plan::new(one, 1).err().unwrap().to_string();
    assert!(message.contains("`batch_size` is 1"), "{message}");
    // A part of a batch needs two pairs, unless scores are learned.
    check(
        "embed.jsonl",
        &["accumulation=2"],
        from.path(),
        "`accumulation` is 2, expected at most 1, half of batch_size (2)",
    );
    check("embed-scores.jsonl", &["accumulation=2"], from.path(), "6 pairs");
    for (batch_size, refused) in [(3, true), (4, false)] {
        let parts = recipe("embed", from.path(), "embed.jsonl", &["accumulation=2"]);
        let plan = Plan::new(FineTuneRecipe { batch_size, ..parts }, 1);
        assert_eq!(plan.is_err(), refused);
    }
    // A text with itself needs dropout.
    let path = from.path().join("same.jsonl");
    fs::write(&path, "{\"anchor\": \"jim\", \"positive\": \"jim\"}\n".repeat(2)).unwrap();
    for (dropout, refused) in [("dropout=0.0", true), ("dropout=0.1", false)] {
        let mut recipe = recipe("embed", from.path(), "embed.jsonl", &[dropout]);
        recipe.train = path.display().to_string().into();
        let error = Plan::new(recipe, 1).err().map(|error| error.to_string());
        assert_eq!(error.as_ref().is_some_and(|error| error.contains("--set dropout=0.1")), refused, "{error:?}");
        assert_eq!(error.is_some(), refused, "{error:?}");
    }
}
