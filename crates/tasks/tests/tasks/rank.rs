//! Cross-encoders: what is read, that every loss learns, and that parts of a batch give what the whole gives.

use std::fs;
use std::path::Path;

use henson_infer::{Model, Task as Ability, Want};
use henson_tasks::{FineTuneRecipe, Plan, Reading, read};
use henson_tensor::DType;
use henson_train::Task as _;
use serde_json::json;
use tempfile::TempDir;

use crate::finetune::{device, finished, model, plan, recipe, run};
use crate::support::{short, task};

const LISTS: &str = r#"{"query": "who was jim?", "documents": ["jim henson", "the old sea", "a dog ran"], "labels": [1, 0, 0]}
{"query": "the cat", "documents": ["dogs walked", "the cat sat"], "labels": [0, 1]}
{"query": "a woman", "positive": "the woman ran", "negatives": ["a man", "puppets"]}
{"query": "old", "documents": ["the old man", "a small child", "jim"], "labels": [1, 0, 0.5]}
"#;

fn on(from: &Path, file: &Path, sets: &[&str]) -> FineTuneRecipe {
    let path = file.display().to_string();
    let sets = [&["learning_rate=1e-3", "max_length=24", "warmup=0.0", "dropout=0.0"], sets].concat();
    FineTuneRecipe { train: path.clone().into(), dev: path, batch_size: 4, ..recipe("rerank", from, "", &sets) }
}

#[test]
fn every_loss_learns_and_parts_are_the_whole() {
    let (from, place) = (model("sequence", &json!({})), TempDir::new().unwrap());
    let file = place.path().join("lists.jsonl");
    fs::write(&file, LISTS).unwrap();
    for loss in ["bce", "mse", "ranknet", "listnet", "lambda", "listmle", "plistmle", "margin-mse"] {
        let own = format!("rank_loss={loss}");
        let first = |accumulation: &str| {
            let plan = plan(on(from.path(), &file, &[&own, accumulation]));
            let (mut engine, mut learner) = (plan.engine(&device()).unwrap(), plan.learner().unwrap());
            engine.gradients.zero();
            let loss = learner.step(&mut engine, 0).unwrap().wait().unwrap().total;
            let names = 0..engine.parameters.entries().len();
            let gradients = names.flat_map(|i| engine.gradients.read(&engine.parameters, i).unwrap());
            (loss, gradients.collect::<Vec<f32>>())
        };
        let (whole, parts) = (first("accumulation=1"), first("accumulation=4"));
        let far = whole.1.iter().zip(&parts.1).fold(0.0, |far: f32, (a, b)| far.max((a - b).abs()));
        let most = whole.1.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
        assert!(
            (whole.0 - parts.0).abs() < 1e-6 && far < 1e-5 * most.max(1e-3),
            "{loss}: {} {} {far}",
            whole.0,
            parts.0
        );
        let plan = plan(on(from.path(), &file, &[&own, "epochs=60", "evals_per_epoch=0.2"]));
        let out = place.path().join(loss);
        let results = finished(run(&plan, &out, None).unwrap());
        assert!(results.metric == "ndcg" && results.value.unwrap() > 0.95, "{loss}: {results:?}");
        assert_eq!(results.degenerate, None, "{loss}");
        let opened = Model::open(&out, &device(), DType::F32, Want::Task(Ability::Classify)).unwrap();
        let ranked = opened.rerank("who was jim?", &["the old sea", "jim henson"], opened.rerank_length()).unwrap();
        assert!(ranked[1].logit > ranked[0].logit, "{loss}: {ranked:?}");
    }
}

#[test]
fn rows_are_lists_of_documents_or_errors_with_their_line() {
    let (from, place) = (model("sequence", &json!({})), TempDir::new().unwrap());
    let check = |text: &str, sets: &[&str], expected: &str| {
        let path = place.path().join("x.jsonl");
        fs::write(&path, text).unwrap();
        let message = match Plan::new(on(from.path(), &path, sets), 1) {
            Ok(plan) => plan.train.examples.iter().map(|e| short(&plan.train, e)).collect::<Vec<_>>().join("; "),
            Err(error) => error.to_string(),
        };
        assert!(message.contains(expected), "{sets:?}: expected {expected}: {message}");
    };
    check(LISTS, &[], "2: a woman | the woman ran / a man / puppets -> [1.0, 0.0, 0.0]");
    let rows =
        "{\"query\": \"a\", \"passage\": \"b\", \"score\": 1}\n{\"query\": \"a\", \"passage\": \"c\", \"score\": 0}\n";
    check(rows, &[], "0: a | b -> [1.0]; 1: a | c -> [0.0]");
    check(rows, &["rank_loss=ranknet"], "every row has one document");
    check(&rows.replace("\"score\": 0", "\"score\": 1"), &[], "equally relevant");
    check(&rows.replace("\"score\": 0", "\"score\": 3"), &[], "line 2: a relevance of 3");
    check(&rows.replace("\"score\": 0", "\"score\": 3"), &["rank_loss=mse"], "1: a | c -> [3.0]");
    check(&rows.replace("\"score\": 0", "\"score\": \"high\""), &[], "line 2: column \"score\": expected a number");
    check(&rows.replace("\"c\"", "\" \""), &[], "line 2: column \"passage\": a document is empty");
    check(
        "{\"query\": \"a\", \"documents\": [\"b\", \"c\"], \"labels\": [1]}\n",
        &[],
        "line 1: 1 numbers for 2 documents",
    );
    check("{\"query\": \"a\", \"words\": \"b\"}\n", &[], "no key for the documents");
    check(rows, &["windows=true"], "`windows` is true");
    // What `henson mine` writes with a cross-encoder's scores.
    let mined =
        "{\"anchor\": \"a\", \"positive\": \"b\", \"negatives\": [\"c\", \"d\"], \"scores\": [0.9, 0.2, 0.1]}\n";
    check(mined, &["rank_loss=mse"], "0: a | b / c / d -> [0.9, 0.2, 0.1]");
    // It found nothing for a pair: its own text is relevant all the same.
    let found_nothing = "{\"anchor\": \"a\", \"positive\": \"b\", \"negatives\": [\"c\"]}\n\
                         {\"anchor\": \"d\", \"positive\": \"e\", \"negatives\": []}\n";
    check(found_nothing, &[], "1: d | e -> [1.0]");
    // Rows of a query count together.
    let path = place.path().join("rows.jsonl");
    fs::write(&path, rows).unwrap();
    let set = read(&path, &Reading::new(task("rerank"))).unwrap();
    let said = |first: f32, second: f32| {
        let class = |score: f32| henson_tasks::Prediction::Ranks(vec![score]);
        henson_tasks::score(&set, &[class(first), class(second)], None, 0).unwrap().get("mrr").unwrap()
    };
    assert_eq!([said(2.0, 1.0), said(1.0, 2.0), said(1.0, 1.0)], [1.0, 0.5, 0.5]);
}
