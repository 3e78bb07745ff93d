//! Settings that are chosen by size, and the linear head that is kept where it scores better than fine-tuning.

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use henson_infer::{Model, Want};
use henson_tasks::{FineTuneRecipe, Plan, PredictSettings, Reading, Results, predict, read, reading_for, score};
use henson_tensor::DType;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::finetune::{device, finished, model, plan, recipe, run};
use crate::support::{Place, task};

/// What a recipe with these settings alone becomes, on so many rows.
fn chosen(rows: usize, name: &str, from: &Path, sets: &[&str]) -> FineTuneRecipe {
    let place = Place::new();
    let row = |i: usize| match name {
        "embed" => json!({ "sentence1": format!("a cat {i}"), "sentence2": format!("a dog {i}") }),
        _ => json!({ "text": format!("a cat {i}"), "label": i % 2 }),
    };
    let file = place.file("rows.jsonl", (0..rows).map(|i| format!("{}\n", row(i))).collect::<String>());
    let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
    let recipe = FineTuneRecipe::parse(&[("", "test")], &sets).unwrap();
    let (name, model) = (name.to_owned(), from.display().to_string());
    plan(FineTuneRecipe { task: name, model, train: file.display().to_string().into(), ..recipe }).recipe
}

#[test]
fn few_rows_have_enough_updates_and_what_is_given_stays() {
    let from = model("sequence", &json!({}));
    let short = |recipe: &FineTuneRecipe| {
        (recipe.batch_size, recipe.epochs, recipe.learning_rate, recipe.linear_head, recipe.folds)
    };
    // 24 is as narrow as any.
    let of = |rows, sets: &[&str]| chosen(rows, "classify", from.path(), sets);
    assert_eq!(short(&of(10, &[])), (8, 100.0, 1e-4, true, 5));
    let few = of(96, &[]);
    assert_eq!(short(&few), (16, 34.0, 1e-4, true, 5));
    assert!((few.evals_per_epoch - 10.0 / 34.0).abs() < 1e-9);
    assert_eq!(short(&of(600, &[])), (16, 7.0, 1e-4, false, 0));
    // What is given is never changed; who sets the rate or the epochs gets no other model than a fine-tuned one.
    let given = of(96, &["epochs=3", "learning_rate=5e-5", "batch_size=32", "evals_per_epoch=2"]);
    assert_eq!((short(&given), given.evals_per_epoch), ((32, 3.0, 5e-5, false, 5), 2.0));
    assert_eq!(short(&of(96, &["batch_size=32"])), (32, 67.0, 1e-4, true, 5));
    assert!(!of(96, &["linear_head=false"]).linear_head && !of(96, &["freeze=true"]).linear_head);
    assert!(!of(96, &["dev=none"]).linear_head, "nothing to compare by");
    // Vectors are good before they are tuned.
    assert_eq!(short(&chosen(96, "embed", from.path(), &[])), (16, 5.0, 1e-4, false, 5));
    // A recipe in code has all its values.
    let code = plan(recipe("classify", from.path(), "classify.jsonl", &[])).recipe;
    assert_eq!((short(&code), code.evals_per_epoch), ((2, 3.0, 5e-5, false, 0), 1.0));
}

#[test]
fn rates_are_by_width() {
    for (width, expected) in [(512, 1e-4), (768, 5e-5), (1024, 3e-5)] {
        let (head, inner) = (width / 64, 4 * width);
        let keys = json!({ "hidden_size": width, "num_attention_heads": head, "intermediate_size": inner });
        // Nothing is loaded before a run begins, so the config is enough.
        let rate = chosen(20, "classify", model("sequence", &keys).path(), &[]).learning_rate;
        assert_eq!(rate, expected, "{width}");
    }
}

/// RoBERTa's published values, for its base and large sizes; what is given stays, and BERT's are what they were.
#[test]
fn families_have_their_own() {
    let of = |kind: &str, width: usize, task: &str, sets: &[&str]| {
        let (head, inner) = (width / 64, 4 * width);
        let keys = json!({
            "model_type": kind, "hidden_size": width, "num_attention_heads": head, "intermediate_size": inner
        });
        let recipe = chosen(20_000, task, model("sequence", &keys).path(), sets);
        let FineTuneRecipe { learning_rate, epochs, warmup, weight_decay, beta2, clip, .. } = recipe;
        [learning_rate, epochs, warmup, weight_decay, beta2, clip]
    };
    let berts = [5e-5, 3.0, 0.1, 0.01, 0.999, 1.0];
    assert_eq!(of("bert", 768, "classify", &[]), berts);
    assert_eq!(of("roberta", 768, "classify", &[]), [2e-5, 10.0, 0.06, 0.1, 0.98, 0.0]);
    assert_eq!(of("xlm-roberta", 1024, "classify", &[]), [1e-5, 10.0, 0.06, 0.1, 0.98, 0.0]);
    assert_eq!(of("roberta", 768, "embed", &[]), berts);
    assert_eq!(of("roberta", 512, "classify", &[]), [1e-4, 3.0, 0.1, 0.01, 0.999, 1.0]);
    let given = ["weight_decay=0.01", "beta2=0.999", "epochs=3", "clip=1"];
    assert_eq!(of("roberta", 768, "classify", &given), [2e-5, 3.0, 0.06, 0.01, 0.999, 1.0]);
}

/// A model that fine-tuning does not change loses against a linear head: the head is then the model, in a plain directory.
#[test]
fn a_linear_head_is_kept_where_it_is_better() {
    let place = TempDir::new().unwrap();
    for (name, head, file) in [
        ("classify", "sequence", "classify.jsonl"),
        ("pair", "multilabel", "pair.jsonl"),
        ("multilabel", "sequence", "multilabel.jsonl"),
        ("regress", "sequence", "regress.jsonl"),
    ] {
        let from = model(head, &json!({}));
        let sets = ["epochs=1", "learning_rate=0.0", "max_length=40", "linear_head=true"];
        let plan = plan(recipe(name, from.path(), file, &sets));
        let out = place.path().join(name);
        let results = finished(run(&plan, &out, None).unwrap());
        let linear = results.linear_head.as_ref().unwrap();
        assert_eq!(linear.kept, linear.value > linear.fine_tuned, "{name}: {linear:?}");
        // Of labels that few texts have, as of those six, even a head that was never trained may find more.
        if name == "multilabel" && !linear.kept {
            continue;
        }
        assert!(linear.kept, "{name}: {linear:?}");
        assert_eq!((results.value, results.best_step), (linear.value, 0), "{name}");
        // The directory alone gives the same scores, with one layer more that averages.
        let opened = Model::open(&out, &device(), DType::F32, Want::AsSaved).unwrap();
        let layers = opened.config().model.sizes().num_hidden_layers;
        assert_eq!(layers, plan.config.model.sizes().num_hidden_layers + 1, "{name}");
        let set = read(Path::new(&plan.recipe.dev), &reading_for(&opened, Reading::new(task(name)))).unwrap();
        let settings = PredictSettings::default();
        let said = predict(std::slice::from_ref(&opened), &set, &settings, |_| ControlFlow::Continue(())).unwrap();
        assert_eq!(score(&set, &said, None, 0).unwrap().get(&results.metric), results.value, "{name}");
        let card = fs::read_to_string(out.join("README.md")).unwrap();
        assert!(card.contains("a linear head on the mean of its vectors"), "{card}");
    }
}

/// Folds choose between the two, and a run that they choose the linear head for trains nothing else.
#[test]
fn folds_choose_a_linear_head() {
    let (from, place) = (model("sequence", &json!({})), TempDir::new().unwrap());
    let rows = Place::new();
    let text = fs::read_to_string(crate::finetune::data("finetune/classify.jsonl")).unwrap();
    // Every text four times with a word more, so that a fold has seen its like.
    let more = |line: &str| -> String {
        let row: Value = serde_json::from_str(line).unwrap();
        let with = |word: &str| {
            let text = format!("{} {word}", row["text"].as_str().unwrap());
            format!("{}\n", json!({ "text": text, "label": row["label"] }))
        };
        ["the", "a", "cat", "dog"].map(with).concat()
    };
    let file = rows.file("rows.jsonl", text.lines().map(more).collect::<String>()).display().to_string();
    let of = |rate: &str| {
        let sets = ["epochs=1", rate, "max_length=40", "linear_head=true", "folds=3"];
        let recipe = recipe("classify", from.path(), "classify.jsonl", &sets);
        plan(FineTuneRecipe { train: file.clone().into(), dev: String::new(), ..recipe })
    };
    let run_in = |plan: &Plan, name: &str| -> Results { finished(run(plan, &place.path().join(name), None).unwrap()) };
    let results = run_in(&of("learning_rate=0.0"), "linear");
    let linear = results.linear_head.as_ref().unwrap();
    assert!(linear.kept && results.steps == 0, "{results:?}");
    assert_eq!((results.folds.as_ref().unwrap().mean, results.value), (linear.value, linear.value));
    // The same bits from the same rows.
    run_in(&of("learning_rate=0.0"), "again");
    let bytes = |name: &str| fs::read(place.path().join(name).join("model.safetensors")).unwrap();
    assert_eq!(bytes("linear"), bytes("again"));
}

#[test]
fn a_linear_head_is_refused_where_it_cannot_be() {
    let from = model("sequence", &json!({}));
    let message = |recipe| Plan::new(recipe, 1).err().unwrap().to_string();
    let tag = message(recipe("tag", from.path(), "tag.conll", &["linear_head=true"]));
    assert!(tag.contains("`linear_head` is true"), "{tag}");
    let recipe = recipe("classify", from.path(), "classify.jsonl", &["linear_head=true"]);
    let blind = message(FineTuneRecipe { dev: String::new(), ..recipe });
    assert!(blind.contains("folds to compare by"), "{blind}");
}
