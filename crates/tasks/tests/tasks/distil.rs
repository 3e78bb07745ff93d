//! Runs with teachers: that a student is held against what its teacher says, whatever the task; the same bits on the fly, from a cache
//! and after an interruption; phases; and what is refused. The losses themselves are held against PyTorch in src/distil.rs.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use henson_tasks::{DistilSettings, Ended, FineTuneRecipe, Paths, Plan, VectorDistance};
use henson_train::{Event, Task as _};
use serde_json::json;
use tempfile::TempDir;

use crate::finetune::{data, device, finished, model, plan, recipe, run, run_together, watched_together};

/// A model that was fine-tuned for a task.
fn teacher(place: &Path, task: &str, head: &str, file: &str, sets: &[&str]) -> PathBuf {
    let out = place.join(format!("teacher-{task}"));
    let sets = [&["epochs=2", "learning_rate=1e-3", "max_length=40", "dropout=0.0"], sets].concat();
    finished(run(&plan(recipe(task, model(head, &json!({})).path(), file, &sets)), &out, None).unwrap());
    out
}

fn taught_by(teacher: &Path, recipe: FineTuneRecipe) -> FineTuneRecipe {
    let distil = recipe.distil.clone().unwrap_or_default();
    let teachers = vec![teacher.display().to_string()];
    FineTuneRecipe { distil: Some(DistilSettings { teachers, ..distil }), ..recipe }
}

/// What updates of a recipe give: their losses, and the weights.
fn updates(recipe: FineTuneRecipe, count: u64) -> (Vec<f64>, Vec<f32>) {
    let plan = plan(recipe);
    let (mut engine, mut learner) = (plan.engine(&device()).unwrap(), plan.learner().unwrap());
    let mut losses = Vec::new();
    for step in 0..count {
        engine.gradients.zero();
        losses.push(learner.step(&mut engine, step).unwrap().wait().unwrap().total);
        let (rate, _) = learner.rate(step);
        engine.updater.step(&mut engine.parameters, &engine.gradients, rate).unwrap().wait().unwrap();
    }
    let weights = (0..engine.parameters.entries().len()).flat_map(|i| engine.parameters.read(i).unwrap()).collect();
    (losses, weights)
}

const LISTS: &str = r#"{"query": "who was jim?", "documents": ["jim henson", "the old sea", "a dog ran"], "labels": [1, 0, 0]}
{"query": "the cat", "documents": ["dogs walked", "the cat sat"], "labels": [0, 1]}
{"query": "a woman", "positive": "the woman ran", "negatives": ["a man", "puppets"]}
"#;

/// A tokenizer that knows letters alone.
fn letters(place: &Path) -> PathBuf {
    let directory = place.join("letters");
    fs::create_dir_all(&directory).unwrap();
    let marks = ".,?!':".chars().map(|c| c.to_string());
    let letters = ('a'..='z').flat_map(|c| [c.to_string(), format!("##{c}")]);
    let specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"].map(str::to_owned);
    let all: String = specials.into_iter().chain(marks).chain(letters).map(|piece| format!("{piece}\n")).collect();
    fs::write(directory.join("vocab.txt"), all).unwrap();
    directory
}

/// The teacher itself is as near to the teacher as can be, in every task, in one part or several, alone or twice. A student with another
/// tokenizer and another width gets nearer.
#[test]
fn students_come_near_to_what_their_teacher_says() {
    let place = TempDir::new().unwrap();
    let lists = place.path().join("lists.jsonl");
    fs::write(&lists, LISTS).unwrap();
    let cases = [
        ("classify", "sequence", "classify.jsonl", &[][..]),
        ("pair", "sequence", "pair.jsonl", &[]),
        ("regress", "regression", "regress.jsonl", &[]),
        ("multilabel", "multilabel", "multilabel.jsonl", &[]),
        ("tag", "token", "tag.conll", &[]),
        ("qa", "qa", "qa.json", &["stride=9"]),
        ("choice", "choice", "choice.jsonl", &[]),
        ("embed", "sequence", "embed.jsonl", &[]),
        ("rerank", "regression", "", &[]),
    ];
    for (task, head, file, sets) in cases {
        let file = if file.is_empty() {
            lists.display().to_string()
        } else {
            data("finetune").join(file).display().to_string()
        };
        let teacher = teacher(place.path(), task, head, &file, sets);
        let of = |from: &Path, more: &[&str]| {
            let common = ["learning_rate=1e-2", "warmup=0.0", "max_length=40", "dropout=0.0", "epochs=20"];
            let sets = [&common, sets, more].concat();
            let recipe = recipe(task, from, &file, &sets);
            FineTuneRecipe { batch_size: 100, ..taught_by(&teacher, FineTuneRecipe { dev: String::new(), ..recipe }) }
        };
        let (losses, _) = updates(of(&teacher, &["distil.alpha=1.0"]), 1);
        assert!(losses[0].abs() < 1e-6, "{task}: {losses:?}");
        let twice = of(&teacher, &["distil.alpha=1.0", "accumulation=2"]);
        let teachers = vec![teacher.display().to_string(); 2];
        let twice = FineTuneRecipe { distil: Some(DistilSettings { teachers, ..twice.distil.unwrap() }), ..twice };
        let (losses, _) = updates(twice, 1);
        assert!(losses[0].abs() < 1e-6, "{task}, two teachers: {losses:?}");

        let mut student =
            of(Path::new("bert-tiny"), &["config.hidden_size=16", "config.num_hidden_layers=1", "max_length=120"]);
        student.config.insert("intermediate_size".to_owned(), 32.into());
        student.tokenizer = letters(place.path()).display().to_string();
        let (losses, _) = updates(student.clone(), 20);
        assert!(losses.iter().all(|loss| loss.is_finite() && *loss >= 0.0), "{task}: {losses:?}");
        assert!(losses[19] < 0.95 * losses[0], "{task}: {losses:?}");
        // Texts without labels, in two parts as in one.
        let transfer = Paths(vec![file.clone()]);
        let unlabelled = |accumulation| {
            let distil = DistilSettings { transfer: transfer.clone(), alpha: None, ..student.distil.clone().unwrap() };
            let train = Paths::default();
            updates(FineTuneRecipe { distil: Some(distil), train, accumulation, ..student.clone() }, 3)
        };
        let (whole, parts) = (unlabelled(1), unlabelled(2));
        let far = whole.1.iter().zip(&parts.1).fold(0.0, |far: f32, (a, b)| far.max((a - b).abs()));
        assert!(
            (whole.0[0] - parts.0[0]).abs() < 1e-6 && far < 2e-3,
            "{task}: {whole:?} {parts:?}",
            whole = whole.0,
            parts = parts.0
        );
        if task == "embed" {
            let distil = DistilSettings { vectors: VectorDistance::Cosine, ..student.distil.clone().unwrap() };
            let (losses, _) = updates(FineTuneRecipe { distil: Some(distil), ..student }, 20);
            assert!(losses[19] < 0.95 * losses[0], "cosine: {losses:?}");
            check_poolings(place.path(), &file);
        }
    }
}

/// A student reads its own vectors as it is saved to, whatever the teacher's pooling is: the teacher itself is at no distance, and one with
/// two poolings side by side comes nearer.
fn check_poolings(place: &Path, file: &str) {
    let place = place.join("pooled");
    let teacher = teacher(&place, "embed", "sequence", file, &["pooling=max"]);
    let student = |from: &Path, pooling: &str| {
        let sets = ["learning_rate=1e-2", "warmup=0.0", "max_length=40", "dropout=0.0", "epochs=20", pooling];
        let recipe = FineTuneRecipe { dev: String::new(), ..recipe("embed", from, file, &sets) };
        FineTuneRecipe { batch_size: 100, ..taught_by(&teacher, recipe) }
    };
    let (losses, _) = updates(student(&teacher, "pooling=max"), 1);
    assert!(losses[0].abs() < 1e-6, "{losses:?}");
    let (losses, _) = updates(student(&teacher, "pooling=cls"), 1);
    assert!(losses[0] > 1e-4, "{losses:?}");
    let (losses, _) = updates(student(&teacher, "pooling=[\"mean\", \"cls\"]"), 20);
    assert!(losses[19] < 0.95 * losses[0], "{losses:?}");
}

fn same_files(a: &Path, b: &Path) {
    for name in ["model.safetensors", "config.json", "vocab.txt"] {
        assert_eq!(fs::read(a.join(name)).unwrap(), fs::read(b.join(name)).unwrap(), "{name}");
    }
}

#[test]
fn bits_are_the_same_on_the_fly_from_a_cache_and_after_an_interruption() {
    let place = TempDir::new().unwrap();
    let teacher = teacher(place.path(), "classify", "sequence", "classify.jsonl", &[]);
    let student = model("sequence", &json!({"id2label": {"0": "x", "1": "y"}, "label2id": {"x": 0, "y": 1}}));
    let sets = ["epochs=3", "learning_rate=1e-3", "max_length=40", "dropout=0.1", "accumulation=2", "seed=7"];
    let cache = place.path().join("cache");
    let with = |more: &[&str]| {
        let recipe = recipe("classify", student.path(), "classify.jsonl", &[&sets[..], more].concat());
        plan(taught_by(&teacher, recipe))
    };
    let kept = format!("distil.cache={}", cache.display());
    let out = |name: &str| place.path().join(name);
    let expected = finished(run(&with(&[]), &out("whole"), None).unwrap());
    let names = fs::read_to_string(out("whole").join("metrics.jsonl")).unwrap();
    assert!(names.contains("\"teacher_loss\"") && names.contains("\"label_loss\""), "{names}");
    let card = fs::read_to_string(out("whole").join("README.md")).unwrap();
    assert!(card.contains("distilled from `teacher-classify`, which have 0.5 of the loss (temperature 2)"), "{card}");

    for stop_at in [2, 3] {
        assert!(
            matches!(run(&with(&[]), &out("parts"), Some(stop_at)).unwrap(), Ended::Paused(step) if step == stop_at)
        );
    }
    assert_eq!(finished(run(&with(&[]), &out("parts"), None).unwrap()), expected);
    same_files(&out("whole"), &out("parts"));
    // Asked once, and then not at all: a teacher whose answers are known need not be there, unless something else is asked.
    assert_eq!(finished(run(&with(&[&kept]), &out("kept"), None).unwrap()), expected);
    same_files(&out("whole"), &out("kept"));
    let files = || -> Vec<PathBuf> { fs::read_dir(&cache).unwrap().map(|entry| entry.unwrap().path()).collect() };
    assert_eq!(files().len(), 1);
    let time = fs::metadata(&files()[0]).unwrap().modified().unwrap();
    assert_eq!(finished(run(&with(&[&kept]), &out("again"), None).unwrap()), expected);
    same_files(&out("whole"), &out("again"));
    assert_eq!(fs::metadata(&files()[0]).unwrap().modified().unwrap(), time);
    // Another temperature is another question; a damaged file is made again.
    finished(run(&with(&[&kept, "distil.temperature=3.0"]), &out("warmer"), None).unwrap());
    assert_eq!(files().len(), 2);
    for path in files() {
        let mut bytes = fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&path, bytes).unwrap();
    }
    assert_eq!(finished(run(&with(&[&kept]), &out("mended"), None).unwrap()), expected);
    same_files(&out("whole"), &out("mended"));
    // Another teacher is other data for a run, wherever it stopped.
    run(&with(&[]), &out("other"), Some(2)).unwrap();
    let path = teacher.join("config.json");
    let config = fs::read_to_string(&path).unwrap().replace("0.02", "0.03");
    fs::write(&path, config).unwrap();
    let error = run(&with(&[]), &out("other"), None).unwrap_err().to_string();
    assert!(error.contains("different data"), "{error}");
}

#[test]
fn texts_without_labels_come_first_and_then_those_with_labels() {
    let place = TempDir::new().unwrap();
    let teacher = teacher(place.path(), "classify", "sequence", "classify.jsonl", &[]);
    let texts = place.path().join("texts.csv");
    fs::write(&texts, "text,label\nthe old sea,unknown\na cat ran,\n\"who, jim?\",17\n").unwrap();
    let sets = ["epochs=4", "distil.epochs=5", "learning_rate=1e-3", "max_length=40", "distil.learning_rate=2e-3"];
    let with = || {
        let mut recipe = taught_by(&teacher, recipe("classify", Path::new("bert-tiny"), "classify.jsonl", &sets));
        recipe.config.insert("hidden_size".to_owned(), 16.into());
        recipe.config.insert("intermediate_size".to_owned(), 32.into());
        recipe.distil.as_mut().unwrap().transfer = Paths(vec![texts.display().to_string()]);
        plan(recipe)
    };
    let (whole, parts) = (place.path().join("whole"), place.path().join("parts"));
    let results = finished(run(&with(), &whole, None).unwrap());
    let first = fs::read_to_string(whole.join("distilled/recipe.toml")).unwrap();
    assert!(first.contains("epochs = 5.0") && first.contains("learning_rate = 0.002"), "{first}");
    let log = fs::read_to_string(whole.join("metrics.jsonl")).unwrap();
    assert!(!log.contains("teacher_loss"), "{log}");
    let card = fs::read_to_string(whole.join("README.md")).unwrap();
    assert!(
        card.contains("before that distilled from `teacher-classify` on `texts.csv`, 3 texts without labels"),
        "{card}"
    );
    // Stopped in the first phase, in the second, and not at all.
    for stop_at in [3, 6, 11] {
        run(&with(), &parts, Some(stop_at)).unwrap();
    }
    assert!(!parts.join("results.json").exists() && parts.join("distilled/results.json").exists());
    assert_eq!(finished(run(&with(), &parts, None).unwrap()), results);
    same_files(&whole, &parts);
}

/// Each of several ranks asks about its own parts, or about all where the answers are counted; and about a share of all examples where
/// they are kept.
#[test]
fn several_ranks_give_the_bits_of_one() {
    let place = TempDir::new().unwrap();
    let at = |name: &str| place.path().join(name);
    fs::write(at("lists.jsonl"), LISTS).unwrap();
    fs::write(at("texts.csv"), "text\nthe old sea\na cat ran\nwho\njim\nno dog\n").unwrap();
    let (classes, lists) = (data("finetune").join("classify.jsonl"), at("lists.jsonl"));
    let cases = [
        ("classify", "sequence", classes, true),
        ("tag", "token", data("finetune").join("tag.conll"), false),
        ("rerank", "regression", lists, false),
        ("embed", "model", data("finetune").join("embed-scores.jsonl"), false),
    ];
    for (task, head, file, two_phases) in cases {
        // Parts of unlike sizes, where no part needs two.
        let batch_size = if task == "embed" { 8 } else { 5 };
        let file = file.display().to_string();
        let teacher = teacher(place.path(), task, head, &file, &[]);
        let sets =
            ["epochs=4", "learning_rate=1e-3", "max_length=40", "accumulation=4", "dropout=0.1", "linear_head=false"];
        let with = |cache: Option<&str>| {
            let recipe = FineTuneRecipe { batch_size, ..recipe(task, Path::new("bert-tiny"), &file, &sets) };
            let mut recipe = taught_by(&teacher, recipe);
            recipe.config.insert("hidden_size".to_owned(), 16.into());
            recipe.config.insert("intermediate_size".to_owned(), 32.into());
            let distil = recipe.distil.as_mut().unwrap();
            if two_phases {
                distil.transfer = Paths(vec![at("texts.csv").display().to_string()]);
            }
            distil.cache = cache.map(|cache| at(cache).display().to_string()).unwrap_or_default();
            recipe
        };
        let one = at(&format!("{task}-1"));
        let expected = finished(run(&plan(with(None)), &one, None).unwrap());
        for (ranks, cache, stops) in [(2, None, &[][..]), (4, Some("cache"), &[1, 3]), (2, Some("cache"), &[])] {
            let out = at(&format!("{task}-{ranks}-{}", cache.is_some()));
            for stop in stops {
                // By another number of ranks.
                let ended = run_together(&with(cache), ranks / 2, &out, Some(*stop)).unwrap();
                assert!(matches!(ended, Ended::Paused(_)), "{task}: {ended:?}");
            }
            let found = finished(run_together(&with(cache), ranks, &out, None).unwrap());
            assert_eq!(found, expected, "{task} on {ranks} ranks");
            same_files(&one, &out);
        }
    }
    // The same without a teacher: what documents are worth is learned within each query.
    let sets =
        ["epochs=2", "learning_rate=1e-3", "max_length=40", "accumulation=4", "dropout=0.1", "linear_head=false"];
    let student = model("regression", &json!({}));
    let recipe = recipe("rerank", student.path(), &at("lists.jsonl").display().to_string(), &sets);
    let expected = finished(run(&plan(recipe.clone()), &at("lists-1"), None).unwrap());
    assert_eq!(finished(run_together(&recipe, 2, &at("lists-2"), None).unwrap()), expected);
    same_files(&at("lists-1"), &at("lists-2"));
}

/// What is kept is the file of one process, however many ranks ask, with less to ask about in the last round than there are ranks.
#[test]
fn ranks_take_turns_at_asking_and_stop_together() {
    let place = TempDir::new().unwrap();
    let at = |name: &str| place.path().join(name);
    let teacher = teacher(place.path(), "classify", "sequence", "classify.jsonl", &[]);
    let texts = (0..300).map(|i| format!("the old sea {i}\n")).fold("text\n".to_owned(), |all, row| all + &row);
    fs::write(at("texts.csv"), texts).unwrap();
    let with = |cache: &str| {
        let sets = ["epochs=1", "max_length=40", "accumulation=4"];
        let recipe = recipe("classify", &teacher, "classify.jsonl", &sets);
        let mut recipe = taught_by(&teacher, FineTuneRecipe { batch_size: 150, ..recipe });
        (recipe.train, recipe.dev) = (Paths::default(), String::new());
        let distil = recipe.distil.as_mut().unwrap();
        distil.transfer = Paths(vec![at("texts.csv").display().to_string()]);
        distil.cache = at(cache).display().to_string();
        recipe
    };
    let kept = |cache: &str| -> Vec<Vec<u8>> {
        fs::read_dir(at(cache)).unwrap().map(|entry| fs::read(entry.unwrap().path()).unwrap()).collect()
    };
    finished(run(&plan(with("kept-1")), &at("out-1"), None).unwrap());
    for ranks in [2, 4] {
        let (cache, out) = (format!("kept-{ranks}"), at(&format!("out-{ranks}")));
        finished(run_together(&with(&cache), ranks, &out, None).unwrap());
        assert!(kept(&cache) == kept("kept-1"), "{ranks} ranks keep other answers than one");
        same_files(&at("out-1"), &out);
    }
    let rounds = AtomicU64::new(0);
    let asked = |rank, event: &Event<'_>| {
        let is_round = matches!(event, Event::Teaching { .. });
        rounds.fetch_add(u64::from(is_round && rank == 0), Ordering::Relaxed);
        is_round && rank == 1
    };
    let ended = watched_together(&with("kept"), 2, &at("out"), None, asked);
    assert!(ended.iter().all(|ended| matches!(ended, Ok(Ended::Interrupted(0)))), "{ended:?}");
    assert_eq!((rounds.load(Ordering::Relaxed), kept("kept").len()), (1, 0));
}

/// Few rows with labels and more texts without have other sizes of batches, and each keeps its own.
#[test]
fn what_was_chosen_for_each_phase_is_kept() {
    let place = TempDir::new().unwrap();
    let teacher = teacher(place.path(), "classify", "sequence", "classify.jsonl", &[]);
    let texts = place.path().join("texts.csv");
    fs::write(&texts, (0..80).map(|i| format!("the old sea {i}\n")).fold("text\n".to_owned(), |all, row| all + &row))
        .unwrap();
    let recipe_in = |out: &Path, chosen: &[&'static str], more: &[&str]| {
        let sets = [&["distil.epochs=2", "max_length=40"], more].concat();
        let mut recipe = taught_by(&teacher, recipe("classify", Path::new("bert-tiny"), "classify.jsonl", &sets));
        recipe.config.insert("hidden_size".to_owned(), 16.into());
        recipe.config.insert("intermediate_size".to_owned(), 32.into());
        recipe.distil.as_mut().unwrap().transfer = Paths(vec![texts.display().to_string()]);
        recipe.by_size = chosen.iter().copied().collect();
        recipe.resume_from(out).unwrap();
        recipe
    };
    let with = |out: &Path| plan(recipe_in(out, &["batch_size", "epochs", "learning_rate"], &[]));
    let (whole, parts) = (place.path().join("whole"), place.path().join("parts"));
    let results = finished(run(&with(&whole), &whole, None).unwrap());
    let size = |phase: &str| {
        let text = fs::read_to_string(whole.join(phase).join("recipe.toml")).unwrap();
        text.lines().find(|line| line.starts_with("batch_size")).unwrap().to_owned()
    };
    assert_ne!(size("distilled"), size(""));
    for stop_at in [3, 6, 12] {
        run(&with(&parts), &parts, Some(stop_at)).unwrap();
    }
    assert_eq!(finished(run(&with(&parts), &parts, None).unwrap()), results);
    same_files(&whole, &parts);

    // In how many parts a batch is computed is set later, once it is known how many ranks there are.
    let in_parts = |out: &Path| FineTuneRecipe {
        accumulation: 2,
        ..recipe_in(out, &["batch_size"], &["epochs=2", "dropout=0.1"])
    };
    let (one, two) = (place.path().join("one"), place.path().join("two"));
    let results = finished(run(&plan(in_parts(&one)), &one, None).unwrap());
    run_together(&in_parts(&two), 2, &two, Some(3)).unwrap();
    // The second finds it finished.
    for _ in 0..2 {
        assert_eq!(finished(run_together(&in_parts(&two), 2, &two, None).unwrap()), results);
    }
    same_files(&one, &two);
}

#[test]
fn what_cannot_be_learned_is_refused() {
    let place = TempDir::new().unwrap();
    let teacher_path = teacher(place.path(), "classify", "sequence", "classify.jsonl", &[]);
    let file = |name: &str, text: &str| {
        fs::write(place.path().join(name), text).unwrap();
        place.path().join(name).display().to_string()
    };
    let labelled = data("finetune/classify.jsonl").display().to_string();
    let check = |task: &str, teacher: &Path, train: &str, sets: &[&str], expected: &[&str]| {
        let recipe = recipe(task, teacher_path.as_path(), "classify.jsonl", sets);
        let recipe = FineTuneRecipe { train: train.into(), dev: String::new(), ..taught_by(teacher, recipe) };
        let made = Plan::new(recipe, 1);
        let error = match made.and_then(|plan| run(&plan, &place.path().join("nothing"), None)) {
            Ok(_) => panic!("{expected:?}: no error"),
            Err(error) => {
                let mut text = error.to_string();
                let mut cause: Option<&dyn std::error::Error> = std::error::Error::source(&error);
                while let Some(inner) = cause {
                    text += &format!(": {inner}");
                    cause = inner.source();
                }
                text
            }
        };
        assert!(expected.iter().all(|part| error.contains(part)), "expected {expected:?}: {error}");
    };
    let missing = place.path().join("missing");
    check("classify", &missing, &labelled, &[], &["missing"]);
    // A directory without weights, and one whose model is of another kind.
    let empty = place.path().join("empty");
    fs::create_dir_all(&empty).unwrap();
    fs::copy(teacher_path.join("config.json"), empty.join("config.json")).unwrap();
    check("classify", &empty, &labelled, &[], &["empty", "safetensors"]);
    let tagger = teacher(place.path(), "tag", "token", "tag.conll", &[]);
    check(
        "classify",
        &tagger,
        &labelled,
        &[],
        &["teacher-tag", "fine-tuned for classify", "BertForTokenClassification"],
    );
    let vectors = teacher(place.path(), "embed", "sequence", "embed.jsonl", &[]);
    check("classify", &vectors, &labelled, &[], &["teacher-embed", "fine-tuned for classify", "BertModel"]);
    let numbers = teacher(place.path(), "regress", "regression", "regress.jsonl", &[]);
    check(
        "classify",
        &numbers,
        &labelled,
        &["files.labels=[\"good\", \"bad\", \"fair\"]"],
        &["teacher-regress", "labels"],
    );
    // Labels that the teacher does not have, empty texts, nothing at all.
    let unknown = file("unknown.csv", "text,label\na cat,good\nthe sea,excellent\n");
    check("classify", &teacher_path, &unknown, &[], &["unknown.csv, line 3", "\"excellent\"", "\"good\""]);
    let blank = file("blank.csv", "text,label\na cat,good\n  ,bad\n");
    check("classify", &teacher_path, &blank, &[], &["blank.csv, line 3", "empty"]);
    let nothing = file("nothing.csv", "text,label\n");
    check("classify", &teacher_path, &nothing, &[], &["nothing.csv"]);
    let bare = file("bare.csv", "text\na cat\n");
    check("classify", &teacher_path, &bare, &[], &["bare.csv", "labels"]);
    let single = file("single.jsonl", "{\"query\": \"a\", \"documents\": [\"b\"], \"labels\": [1]}\n");
    check("rerank", &numbers, &single, &[], &["single.jsonl", "every row has one document"]);
    check("seq2seq", &teacher_path, &labelled, &[], &["seq2seq", "one that can be distilled", "classify"]);
    check("classify", &teacher_path, &labelled, &["distil.temperature=0.0"], &["distil.temperature"]);
    check("classify", &teacher_path, &labelled, &["distil.alpha=0.0"], &["distil.alpha"]);
    let embed = data("finetune/embed.jsonl").display().to_string();
    check("embed", &teacher_path, &embed, &["distil.alpha=0.5"], &["distil.alpha", "no labels"]);
    assert!(!place.path().join("nothing/model.safetensors").exists());
}
