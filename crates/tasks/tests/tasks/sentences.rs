//! Losses of sentence vectors in training: what files give to them, that each learns, and that cached gradients are those of the whole
//! batch. The losses themselves are held against sentence-transformers in src/sentences.rs.

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use henson_data::tables::Column;
use henson_infer::{EmbedSettings, Model, Pooling, Prompts, Want};
use henson_tasks::{
    Files, FineTuneRecipe, Plan, PredictSettings, Prediction, Reading, SentenceLoss, predict, read, score,
};
use henson_tensor::DType;
use henson_train::Task as _;
use serde_json::json;
use tempfile::TempDir;

use crate::finetune::{data, device, finished, model, plan, recipe, run};
use crate::support::{short, task};

const TRIPLETS: &str = r#"{"anchor": "the cat sat", "positive": "a cat", "negative": "the old sea", "scores": [3.0, 1.0], "label": 1, "kind": "same"}
{"anchor": "a woman ran", "positive": "the woman", "negative": "jim henson", "scores": [2.0, 0.5], "label": 0, "kind": "other"}
{"anchor": "who was jim?", "positive": "jim henson", "negative": "dogs ran", "scores": [2.5, -1.0], "label": 1, "kind": "same"}
{"anchor": "the dog walked", "positive": "dogs", "negative": "a small child", "scores": [1.0, 1.5], "label": 0, "kind": "none"}
{"anchor": "the old man", "positive": "a man", "negative": "puppets", "scores": [4.0, 0.0], "label": 1, "kind": "same"}
"#;

/// What five updates of a recipe give: their losses, and the weights.
fn updates(recipe: FineTuneRecipe) -> (Vec<f64>, Vec<f32>) {
    let plan = plan(recipe);
    let (mut engine, mut learner) = (plan.engine(&device()).unwrap(), plan.learner().unwrap());
    let mut losses = Vec::new();
    for step in 0..5 {
        engine.gradients.zero();
        losses.push(learner.step(&mut engine, step).unwrap().wait().unwrap().total);
        let (rate, _) = learner.rate(step);
        engine.updater.step(&mut engine.parameters, &engine.gradients, rate).unwrap().wait().unwrap();
    }
    let weights = (0..engine.parameters.entries().len()).flat_map(|i| engine.parameters.read(i).unwrap()).collect();
    (losses, weights)
}

fn far(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).fold(0.0, |far: f32, (a, b)| far.max((a - b).abs()))
}

fn on(from: &Path, file: &Path, batch_size: usize, sets: &[&str]) -> FineTuneRecipe {
    let train = file.display().to_string();
    let sets = [&["learning_rate=1e-3", "max_length=12", "warmup=0.0"], sets].concat();
    FineTuneRecipe { train: train.into(), batch_size, ..recipe("embed", from, "embed-scores.jsonl", &sets) }
}

/// The loss on the host is the one on the device, and cached gradients are those of the whole batch, dropout and all.
#[test]
fn parts_of_a_batch_give_what_the_whole_gives() {
    let from = model("sequence", &json!({}));
    let file = data("finetune/embed-unlike.jsonl");
    let of = |sets: &[&str]| updates(on(from.path(), &file, 6, &[&["dropout=0.1", "epochs=5"], sets].concat()));
    let (losses, weights) = of(&[]);
    for sets in [
        &["loss=ranking"][..],
        &["cached_gradients=true"],
        &["loss=ranking", "cached_gradients=true", "accumulation=2"],
        &["loss=ranking", "cached_gradients=true", "accumulation=5"],
    ] {
        let (others, other_weights) = of(sets);
        assert!(losses.iter().zip(&others).all(|(a, b)| (a - b).abs() < 1e-5), "{sets:?}: {losses:?} {others:?}");
        assert!(far(&weights, &other_weights) < 2e-5, "{sets:?}: {}", far(&weights, &other_weights));
    }
    // Parts that are told apart in themselves are something else.
    let (others, _) = of(&["loss=ranking", "accumulation=2"]);
    assert!((losses[0] - others[0]).abs() > 0.05, "{losses:?} {others:?}");
    let (others, _) = of(&["symmetric=true"]);
    assert!((losses[0] - others[0]).abs() > 1e-3, "{losses:?} {others:?}");
    // Losses of single examples are means, whatever parts they are in.
    let scores = data("finetune/embed-scores.jsonl");
    let of = |sets: &[&str]| updates(on(from.path(), &scores, 6, &[&["dropout=0.0", "epochs=5"], sets].concat()));
    let (losses, weights) = of(&[]);
    for sets in [&["loss=cosine"][..], &["loss=cosine", "accumulation=3"]] {
        let (others, other_weights) = of(sets);
        assert!(losses.iter().zip(&others).all(|(a, b)| (a - b).abs() < 1e-5), "{sets:?}: {losses:?} {others:?}");
        assert!(far(&weights, &other_weights) < 2e-5, "{sets:?}");
    }
}

#[test]
fn every_loss_learns_and_leaves_a_sentence_model() {
    let (from, place) = (model("sequence", &json!({})), TempDir::new().unwrap());
    let file = place.path().join("train.jsonl");
    fs::write(&file, TRIPLETS).unwrap();
    let vectors = place.path().join("vectors.jsonl");
    let vector = |i: usize| (0..24).map(|k| ((i * 7 + k) as f64).sin()).collect::<Vec<_>>();
    let rows = ["the cat sat", "jim", "a dog"].iter().enumerate();
    let rows = rows.map(|(i, text)| json!({"text": text, "embedding": vector(i)}).to_string() + "\n");
    fs::write(&vectors, rows.collect::<String>()).unwrap();
    let cases: &[(SentenceLoss, &Path, &[&str], bool)] = &[
        (SentenceLoss::Ranking, &file, &[], true),
        (SentenceLoss::Cosine, &file, &[], true),
        (SentenceLoss::Cosent, &file, &["matryoshka=[8,4]"], true),
        (SentenceLoss::Contrastive, &file, &[], true),
        (SentenceLoss::Triplet, &file, &[], false),
        (SentenceLoss::Triplet, &file, &["distance=cosine", "margin=0.5", "normalize=true"], true),
        (SentenceLoss::MarginMse, &file, &[], false),
        (SentenceLoss::Mse, &vectors, &[], false),
        (SentenceLoss::Softmax, &file, &["files.label_column=kind"], false),
    ];
    for (number, (loss, file, sets, normalised)) in cases.iter().enumerate() {
        let name = serde_json::to_value(loss).unwrap();
        let own = format!("loss={}", name.as_str().unwrap());
        let sets = [&[own.as_str(), "epochs=15", "evals_per_epoch=0.1", "log_every=1", "dropout=0.0"], *sets].concat();
        let plan = plan(on(from.path(), file, 5, &sets));
        let out = place.path().join(number.to_string());
        finished(run(&plan, &out, None).unwrap());
        let log = fs::read_to_string(out.join("metrics.jsonl")).unwrap();
        let lines = log.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        let losses: Vec<f64> =
            lines.filter(|line| line["kind"] == "train").map(|l| l["loss"].as_f64().unwrap()).collect();
        assert!(losses.last().unwrap() < &(0.85 * losses[0]), "{loss:?} {sets:?}: {losses:?}");
        let settings = EmbedSettings::of_directory(&out).unwrap();
        assert_eq!(settings.normalise, *normalised, "{loss:?}");
        let weights = fs::read(out.join("model.safetensors")).unwrap();
        let head = weights.windows(15).any(|bytes| bytes == b"pair_classifier");
        assert!(!head, "the layer on pairs is no part of the model");
        // Interrupted, with the same bits.
        if matches!(loss, SentenceLoss::Softmax | SentenceLoss::Triplet) {
            let parts = place.path().join(format!("{number}-parts"));
            for stop_at in [Some(3), Some(7), None] {
                run(&plan, &parts, stop_at).unwrap();
            }
            assert_eq!(fs::read(parts.join("model.safetensors")).unwrap(), weights);
        }
    }
}

#[test]
fn rows_give_what_losses_need_or_an_error_with_their_line() {
    let (from, place) = (model("sequence", &json!({})), TempDir::new().unwrap());
    let check = |text: &str, sets: &[&str], expected: &str| {
        let path = place.path().join("x.jsonl");
        fs::write(&path, text).unwrap();
        let message = match Plan::new(on(from.path(), &path, 4, sets), 1) {
            Ok(plan) => plan.train.examples.iter().map(|e| short(&plan.train, e)).collect::<Vec<_>>().join("; "),
            Err(error) => error.to_string(),
        };
        assert!(message.contains(expected), "{sets:?}: expected {expected}: {message}");
    };
    let lists = "{\"query\": \"a\", \"pos\": [\"b\", \"c\"], \"neg\": [\"d\", \"e\"]}\n{\"query\": \"f\", \"pos\": [\"g\"], \"neg\": []}\n";
    check(lists, &["loss=ranking"], "0: a ~ b / d / e -> ?; 0-1: a ~ c / d / e -> ?; 1: f ~ g -> ?");
    check(lists, &["loss=triplet"], "line 2: it has no negative text");
    check("{\"query\": \"a\", \"pos\": []}\n", &["loss=ranking"], "line 1: column \"pos\": the list is empty");
    let numbered = "{\"anchor\": \"a\", \"positive\": \"b\", \"negative_1\": \"c\", \"negative_2\": \"d\", \"score\": [3, 1, 0.5]}\n";
    check(&numbered.repeat(2), &["loss=margin-mse"], "0: a ~ b / c / d -> [2.0, 2.5]");
    check(
        &numbered.replace("[3, 1, 0.5]", "[1]").repeat(2),
        &["loss=margin-mse"],
        "line 1: expected a margin for each negative",
    );
    let labelled = "{\"sentence1\": \"a\", \"sentence2\": \"b\", \"label\": 1}\n{\"sentence1\": \"c\", \"sentence2\": \"d\", \"label\": 2}\n";
    check(labelled, &["loss=contrastive"], "line 2: its label is neither 1 (near) nor 0 (apart)");
    check(&labelled.replace("\"label\": 2", "\"label\": 1"), &["loss=cosent"], "all rows have the same label");
    check(labelled, &["loss=cosent"], "0: a ~ b -> 1; 1: c ~ d -> 2");
    check(labelled, &["loss=softmax"], "0: a ~ b -> 0 1; 1: c ~ d -> 1 2");
    check(labelled, &["loss=mse"], "line 1: column \"label\": expected a list of numbers");
    check(
        "{\"text\": \"a\", \"label\": [1, 2]}\n{\"text\": \"b\", \"label\": [1, 2]}\n",
        &["loss=mse"],
        "vectors of 24 numbers",
    );
    check(labelled, &["loss=cosine", "margin=1"], "`margin` is set");
    check(labelled, &["loss=cosine", "cached_gradients=true"], "`cached_gradients` is set");
    check(labelled, &["loss=cosine", "matryoshka=[100]"], "`matryoshka` is 100, expected 1 to 24");
    check("{\"sentence1\": \"a\", \"sentence2\": \"b\"}\n", &["loss=cosent"], "line 1: it has no label");
    // Without a loss, rows are read as before.
    let path = place.path().join("plain.jsonl");
    fs::write(&path, labelled).unwrap();
    let set = read(&path, &Reading::new(task("embed"))).unwrap();
    assert_eq!(short(&set, &set.examples[1]), "1: c ~ d -> ?");
}

/// Labels of 0 and 1 are told by a threshold, triplets by which text is nearer; a model and its dev scores agree.
#[test]
fn pairs_with_labels_and_triplets_have_their_scores() {
    let (from, place) = (model("sequence", &json!({})), TempDir::new().unwrap());
    let path = place.path().join("labelled.jsonl");
    let rows =
        [("the cat sat", "the cat", 1), ("a woman ran", "a woman", 1), ("jim", "dogs walked", 0), ("man", "sea", 0)];
    let rows = rows.map(|(a, b, score)| json!({"sentence1": a, "sentence2": b, "score": score}).to_string() + "\n");
    fs::write(&path, rows.concat()).unwrap();
    let triplets = place.path().join("triplets.jsonl");
    fs::write(&triplets, TRIPLETS.replace("scores", "x").replace("label", "y")).unwrap();
    let scores = |path: &Path| {
        let opened = Model::open(from.path(), &device(), DType::F32, Want::Encoder).unwrap();
        let set = read(path, &Reading::new(task("embed"))).unwrap();
        let said = predict(&[opened], &set, &PredictSettings::default(), |_| ControlFlow::Continue(())).unwrap();
        (score(&set, &said, None, 0).unwrap(), said)
    };
    let (labelled, said) = scores(&path);
    let cosine = |i: usize| if let Prediction::Similarity { cosine, .. } = said[i] { cosine } else { f64::NAN };
    let right = [0, 1].iter().all(|i| cosine(*i) > cosine(2).max(cosine(3)));
    let ap = labelled.get("average_precision").unwrap();
    assert!((0.25..=1.0).contains(&ap) && (ap == 1.0) == right, "{labelled:?}");
    assert!(labelled.get("best_accuracy").unwrap() >= 0.5 && labelled.get("best_f1").unwrap() > 0.6);
    let (three, said) = scores(&triplets);
    let nearer = said.iter().filter(|said| match said {
        Prediction::Similarity { cosine, negative: Some(negative), .. } => cosine > negative,
        _ => panic!("{said:?}"),
    });
    assert_eq!(three.get("triplet_accuracy"), Some(nearer.count() as f64 / 5.0));
    // Without a negative in every row there are no triplets.
    let set = data("finetune/embed-unlike.jsonl");
    assert_eq!(scores(&set).0.get("triplet_accuracy"), None);
}

/// A golden model of a family with as much of the golden vocabulary as it has rows.
fn relative(family: &str) -> TempDir {
    let directory = TempDir::new().unwrap();
    let golden = data("relatives-golden").join(family).join("sequence");
    for name in ["config.json", "model.safetensors"] {
        fs::copy(golden.join(name), directory.path().join(name)).unwrap();
    }
    let vocabulary = fs::read_to_string(data("likelihood/vocab.txt")).unwrap();
    let config = fs::read(golden.join("config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
    let words: Vec<&str> = vocabulary.lines().take(config["vocab_size"].as_u64().unwrap() as usize).collect();
    fs::write(directory.path().join("vocab.txt"), words.join("\n") + "\n").unwrap();
    directory
}

/// Every pooling learns, in every family of encoders, and the directory alone gives the vectors of training: its dev score is found
/// again.
#[test]
fn every_pooling_and_every_family_learns_and_is_saved() {
    let place = TempDir::new().unwrap();
    let bert = model("sequence", &json!({}));
    let mut cases: Vec<(TempDir, &str)> = Vec::new();
    for family in ["roberta", "xlm-roberta", "distilbert", "mpnet", "albert", "electra", "modernbert", "deberta-v2"] {
        cases.push((relative(family), "mean"));
    }
    cases.push((relative("xlnet"), "lasttoken"));
    let of_bert = ["cls", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"];
    let several = ["[\"mean\", \"max\"]"];
    let paths = cases.iter().map(|(from, pooling)| (from.path(), *pooling));
    let all = paths.chain(of_bert.iter().chain(&several).map(|pooling| (bert.path(), *pooling)));
    for (number, (from, pooling)) in all.enumerate() {
        let own = format!("pooling={pooling}");
        let sets = ["loss=ranking", "epochs=6", "evals_per_epoch=0.2", "log_every=1", "dropout=0.0", &own];
        let recipe = on(from, &data("finetune/embed.jsonl"), 6, &sets);
        let plan = plan(recipe);
        let out = place.path().join(number.to_string());
        let results = finished(run(&plan, &out, None).unwrap());
        let log = fs::read_to_string(out.join("metrics.jsonl")).unwrap();
        let lines = log.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        let losses: Vec<f64> =
            lines.filter(|line| line["kind"] == "train").map(|l| l["loss"].as_f64().unwrap()).collect();
        assert!(losses.last().unwrap() < &losses[0], "{number} {pooling}: {losses:?}");
        let settings = EmbedSettings::of_directory(&out).unwrap();
        let names: Vec<&str> = settings.pooling.iter().map(|pooling| pooling.name()).collect();
        assert!(names.iter().all(|name| pooling.contains(name)) && settings.normalise, "{names:?}");
        let set = plan.dev.as_ref().unwrap();
        let opened = Model::open(&out, &device(), DType::F32, Want::AsSaved).unwrap();
        let said = predict(&[opened], set, &PredictSettings::default(), |_| ControlFlow::Continue(())).unwrap();
        let again = score(set, &said, None, 0).unwrap().get("spearman").unwrap();
        assert!((again - results.value.unwrap()).abs() < 1e-9, "{number} {pooling}: {again} {results:?}");
    }
    // What a model's own directory says holds for training, too, and its prompts stay.
    let from = model("sequence", &json!({}));
    fs::create_dir(from.path().join("1_Pooling")).unwrap();
    let own = EmbedSettings { pooling: vec![Pooling::First], normalise: true, ..EmbedSettings::default() };
    own.files(24).iter().for_each(|(name, bytes)| fs::write(from.path().join(name), bytes).unwrap());
    let prompts = json!({"prompts": {"query": "jim "}, "default_prompt_name": null}).to_string();
    fs::write(from.path().join("config_sentence_transformers.json"), prompts).unwrap();
    let out = place.path().join("cls");
    finished(run(&plan(on(from.path(), &data("finetune/embed.jsonl"), 6, &["epochs=1"])), &out, None).unwrap());
    assert_eq!(EmbedSettings::of_directory(&out).unwrap().pooling, [Pooling::First]);
    assert_eq!(Prompts::of_directory(&out).unwrap().texts["query"], "jim ");
}

/// Cached gradients are those of the whole batch by any pooling.
#[test]
fn pooled_parts_give_what_the_whole_gives() {
    let from = model("sequence", &json!({}));
    for pooling in ["pooling=cls", "pooling=[\"max\", \"weightedmean\"]"] {
        let of = |more: &[&str]| {
            let sets = [&["dropout=0.1", "epochs=5", pooling, "loss=ranking"], more].concat();
            updates(on(from.path(), &data("finetune/embed-unlike.jsonl"), 6, &sets))
        };
        let ((losses, weights), (others, other_weights)) = (of(&[]), of(&["cached_gradients=true", "accumulation=3"]));
        assert!(losses.iter().zip(&others).all(|(a, b)| (a - b).abs() < 1e-5), "{losses:?} {others:?}");
        assert!(far(&weights, &other_weights) < 2e-5, "{}", far(&weights, &other_weights));
    }
}

/// Several data sets, each with its own loss and files: all are learned from, in any order of resuming, and what is wrong is said.
#[test]
fn several_data_sets_have_their_own_losses_and_shares() {
    let (from, place) = (model("sequence", &json!({})), TempDir::new().unwrap());
    let at = |name: &str| place.path().join(name).display().to_string();
    fs::write(at("triplets.jsonl"), TRIPLETS).unwrap();
    fs::write(at("classes.csv"), "a,b,kind\nthe cat,a cat,same\njim,the sea,other\ndogs,a dog,same\n").unwrap();
    let (pairs, scores) = (data("finetune/embed.jsonl"), data("finetune/embed-scores.jsonl"));
    let recipe_of = |more: &[&str], datasets: &str| {
        let common = ["epochs=4", "learning_rate=1e-3", "max_length=12", "dropout=0.1", "evals_per_epoch=0.25"];
        let mut recipe = recipe("embed", from.path(), "embed-scores.jsonl", &[&common, more].concat());
        recipe.train = Default::default();
        let text = format!("{datasets}\n");
        let read: FineTuneRecipe = henson_train::parse_settings(&[(&text, "test")], &[]).unwrap();
        FineTuneRecipe { datasets: read.datasets, batch_size: 3, ..recipe }
    };
    let sets = format!(
        "[[datasets]]\ntrain = {:?}\nloss = \"ranking\"\nweight = 0.5\nsymmetric = true\n[[datasets]]\ntrain = {:?}\nloss = \"cosent\"\n\
         [[datasets]]\ntrain = {:?}\nloss = \"softmax\"\nbatch_size = 2\n\
         files = {{ text_column = \"a\", second_column = \"b\", label_column = \"kind\" }}\n\
         [[datasets]]\ntrain = {:?}\nloss = \"triplet\"\ndistance = \"cosine\"\nmargin = 0.3\n",
        pairs,
        scores,
        at("classes.csv"),
        at("triplets.jsonl")
    );
    // 6 pairs in 2 batches of 3, half of them; 6 scores in 2; 3 classes in 2 batches of 2; 5 triplets in 2.
    let plan_of = plan(recipe_of(&["log_every=1"], &sets));
    assert_eq!((plan_of.steps_per_epoch(), plan_of.steps(), plan_of.train.examples.len()), (7, 28, 20));
    let in_turn = plan(recipe_of(&["mixing=round-robin"], &sets));
    assert_eq!(in_turn.steps_per_epoch(), 7);
    let out = place.path().join("whole");
    let results = finished(run(&plan_of, &out, None).unwrap());
    assert_eq!(results.metric, "spearman");
    // Softmax and triplet learn vectors as they are.
    assert!(!EmbedSettings::of_directory(&out).unwrap().normalise);
    let weights = fs::read(out.join("model.safetensors")).unwrap();
    let parts = place.path().join("parts");
    for stop_at in [Some(2), Some(9), None] {
        run(&plan_of, &parts, stop_at).unwrap();
    }
    assert_eq!(fs::read(parts.join("model.safetensors")).unwrap(), weights);
    let card = fs::read_to_string(out.join("README.md")).unwrap();
    assert!(card.contains("classes.csv") && card.contains("triplets.jsonl"), "{card}");
    // One set by itself is the plain run on it.
    let alone = format!("[[datasets]]\ntrain = {pairs:?}\nloss = \"ranking\"\n");
    let (mixed, mixed_weights) = updates(recipe_of(&["epochs=5"], &alone));
    let mut plain = recipe_of(&["epochs=5", "loss=ranking", "normalize=true"], "");
    plain.train = pairs.display().to_string().into();
    assert_eq!((mixed, mixed_weights), updates(plain));

    let refused = |recipe: FineTuneRecipe, expected: &str| {
        let message = Plan::new(recipe, 1).map(drop).unwrap_err().to_string();
        assert!(message.contains(expected), "expected {expected}: {message}");
    };
    refused(recipe_of(&["dev_rows=2"], &alone), "`dev_rows` is 2, expected 0 with `datasets`");
    refused(recipe_of(&[], "[[datasets]]\nloss = \"ranking\"\n"), "in set 1");
    refused(recipe_of(&[], &alone.replace("ranking", "triplet")), "line 1: it has no negative text");
    refused(recipe_of(&[], &format!("{alone}weight = 0\n")), "`datasets.weight` is 0");
    refused(recipe_of(&[], &format!("{alone}margin = 1\n")), "`margin` is set");
    refused(FineTuneRecipe { train: "x".into(), ..recipe_of(&[], &alone) }, "`train` is x, expected nothing");
    refused(FineTuneRecipe { task: "classify".to_owned(), ..recipe_of(&[], &alone) }, "the tasks embed and rerank");
}

/// Every kind of row in every kind of table.
#[test]
fn rows_are_the_same_in_all_tables() {
    let place = TempDir::new().unwrap();
    let pairs = [("a b", "c", "d", 2.5), ("e", "f, g", "h", 0.0)];
    type Kind<'a> = (&'a str, &'a [&'a str], Option<SentenceLoss>, [&'a str; 2]);
    let kinds: [Kind<'_>; 4] = [
        ("pairs", &["anchor", "positive"], None, ["0: a b ~ c -> ?", "1: e ~ f, g -> ?"]),
        ("triplets", &["anchor", "positive", "negative"], None, ["0: a b ~ c / d -> ?", "1: e ~ f, g / h -> ?"]),
        ("scores", &["sentence1", "sentence2", "score"], None, ["0: a b ~ c -> 2.5", "1: e ~ f, g -> 0"]),
        (
            "labels",
            &["text1", "text2", "label"],
            Some(SentenceLoss::Softmax),
            ["0: a b ~ c -> 1 d", "1: e ~ f, g -> 2 h"],
        ),
    ];
    for (kind, columns, loss, expected) in kinds {
        let cells = |(a, b, c, score): &(&str, &str, &str, f64)| -> Vec<String> {
            let third = if kind == "scores" { score.to_string() } else { (*c).to_owned() };
            [(*a).to_owned(), (*b).to_owned(), third].into_iter().take(columns.len()).collect()
        };
        let rows: Vec<Vec<String>> = pairs.iter().map(cells).collect();
        let quoted = |row: &Vec<String>| row.iter().map(|cell| format!("\"{cell}\"")).collect::<Vec<_>>().join(",");
        let object = |row: &Vec<String>| {
            let keys = columns.iter().zip(row).map(|(key, cell)| ((*key).to_owned(), json!(cell)));
            serde_json::Value::Object(keys.collect()).to_string()
        };
        let tables = [
            ("tsv", columns.join("\t"), rows.iter().map(|row| row.join("\t")).collect::<Vec<_>>()),
            ("csv", columns.join(","), rows.iter().map(quoted).collect()),
            ("jsonl", String::new(), rows.iter().map(object).collect()),
        ];
        for (ending, header, lines) in tables {
            let path = place.path().join(format!("{kind}.{ending}"));
            let header = if header.is_empty() { header } else { header + "\n" };
            fs::write(&path, header + &lines.join("\n") + "\n").unwrap();
            let names = ["text1", "text2"].map(|name| Some(Column::Name(name.to_owned())));
            let [text_column, second_column] = if kind == "labels" { names } else { [None, None] };
            let labels = if kind == "labels" { &["x", "d", "h"][..] } else { &[] };
            let labels = labels.iter().map(|label| (*label).to_owned()).collect();
            let files = Files { text_column, second_column, labels, ..Files::default() };
            let set = read(&path, &Reading { files, loss, ..Reading::new(task("embed")) }).unwrap();
            let got: Vec<String> = set.examples.iter().map(|example| short(&set, example)).collect();
            assert_eq!(got, expected, "{kind}.{ending}");
        }
    }
}

/// Rows that are there twice, or at odds, are reported with their lines, and learned from.
#[test]
fn twins_are_reported() {
    let (from, place) = (model("sequence", &json!({})), TempDir::new().unwrap());
    let path = place.path().join("x.jsonl");
    let row = |a: &str, score: f64| json!({"sentence1": a, "sentence2": "b", "score": score}).to_string() + "\n";
    fs::write(&path, row("a", 1.0) + &row("c", 0.0) + &row("a", 1.0) + &row("c", 0.5) + &row("a", 1.0)).unwrap();
    let problems = plan(on(from.path(), &path, 4, &["loss=cosent"])).train.problems.join("; ");
    assert!(problems.contains("2 rows are the same as earlier ones, first line 3, after line 1"), "{problems}");
    assert!(
        problems.contains("1 rows are about the same texts") && problems.contains("first line 4, after line 2"),
        "{problems}"
    );
    assert!(plan(on(from.path(), &data("finetune/embed.jsonl"), 4, &[])).train.problems.is_empty());
}
