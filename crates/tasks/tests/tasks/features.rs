//! Taggers on a frozen encoder: the same bits for any number of threads, what was saved says what was trained, and what is refused.

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use henson_infer::{Model, TagInput, Want};
use henson_tasks::{Ended, Reading, Results, Tagger, TaggerPlan, TaggerRecipe, TaskError, read, score, train_tagger};
use henson_tensor::{DType, Device};
use henson_train::{Watch, parse_settings};
use tempfile::TempDir;

use crate::finetune;
use crate::support::{DOCUMENTS, illegal_tags, task};

pub(crate) fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data").join(name)
}

/// A golden model with the golden vocabulary.
pub(crate) fn encoder() -> TempDir {
    let directory = TempDir::new().unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(data("bert-golden/model").join(name), directory.path().join(name)).unwrap();
    }
    fs::copy(data("likelihood/vocab.txt"), directory.path().join("vocab.txt")).unwrap();
    directory
}

fn recipe(from: &Path, sets: &[&str]) -> TaggerRecipe {
    let common = ["hidden_size=12", "batch_size=2", "epochs=80", "learning_rate=2e-2", "dropout=0.1", "layers=mix-all"];
    let sets: Vec<String> = common.into_iter().chain(sets.iter().copied()).map(str::to_owned).collect();
    let file = data("finetune/tag.conll").display().to_string();
    let recipe: TaggerRecipe = parse_settings(&[("", "test")], &sets).unwrap();
    let model = from.display().to_string();
    TaggerRecipe { task: "ner".to_owned(), model, train: file.clone().into(), dev: file, ..recipe }
}

fn run(recipe: &TaggerRecipe, threads: usize, out: &Path, stop_at: Option<u64>) -> Result<Ended, TaskError> {
    let device = Device::cpu(None, Some(threads)).unwrap();
    let plan = TaggerPlan::new(recipe.clone())?;
    let stop = AtomicBool::new(false);
    train_tagger(&plan, &device, out, stop_at, &mut |_, _| {}, &mut Watch { on: &mut |_| {}, stop: &stop })
}

fn train(recipe: &TaggerRecipe, threads: usize, out: &Path) -> Result<Results, TaskError> {
    match run(recipe, threads, out, None)? {
        Ended::Finished(results) => Ok(*results),
        ended => panic!("{ended:?}"),
    }
}

#[test]
fn what_was_saved_says_what_was_trained() {
    let (from, out) = (encoder(), TempDir::new().unwrap());
    for (i, sets) in
        [&["crf=true"][..], &["head=linear", "layers=concat-last-2"], &["layers=embeddings", "max_length=5"]]
            .into_iter()
            .enumerate()
    {
        let recipe = recipe(from.path(), sets);
        let (one, two) = (out.path().join(format!("{i}-1")), out.path().join(format!("{i}-2")));
        let results = train(&recipe, 1, &one).unwrap();
        assert!(results.value.unwrap() > 0.5, "{sets:?}: {results:?}");
        let again = train(&recipe, 2, &two).unwrap();
        assert_eq!((again.value, again.best_step), (results.value, results.best_step));
        for name in ["tagger.safetensors", "tagger.json", "model.safetensors"] {
            assert_eq!(fs::read(one.join(name)).unwrap(), fs::read(two.join(name)).unwrap(), "{name} of {sets:?}");
        }
        // Finished: nothing is done again.
        let before = fs::metadata(one.join("tagger.safetensors")).unwrap().modified().unwrap();
        assert_eq!(train(&recipe, 1, &one).unwrap().value, results.value);
        assert_eq!(fs::metadata(one.join("tagger.safetensors")).unwrap().modified().unwrap(), before);

        assert!(Tagger::is_in(&one) && !Tagger::is_in(from.path()));
        let tagger = Tagger::open(&one, &Device::cpu(None, Some(1)).unwrap(), DType::F32).unwrap();
        let set = read(&data("finetune/tag.conll"), &tagger.reading(Reading::new(task("ner")))).unwrap();
        let predictions = tagger.predict(&set, None, |_| ControlFlow::Continue(())).unwrap();
        assert_eq!(score(&set, &predictions, None, 0).unwrap().get("f1"), results.value, "{sets:?}");
        let tagged = tagger.tag(&[TagInput::Text("jim henson was in newland."), TagInput::Words(&[])], None).unwrap();
        assert_eq!(tagged[0].words.len(), 6);
        assert!(tagged[0].words.iter().all(|word| word.label.is_some() && word.score > 0.0 && word.score <= 1.0));
        assert!(tagged[1].words.is_empty());
    }
}

/// A run that stops and resumes, twice and with other threads, gives the same bits as one that does not.
#[test]
fn runs_resume_where_they_stopped() {
    let (from, out) = (encoder(), TempDir::new().unwrap());
    for (i, sets) in [["crf=true", "epochs=6"], ["head=linear", "epochs=6"]].into_iter().enumerate() {
        let mut recipe = recipe(from.path(), &sets);
        // With a dev file and without.
        if i == 1 {
            recipe.dev = String::new();
        }
        let (whole, parts) = (out.path().join(format!("whole-{i}")), out.path().join(format!("parts-{i}")));
        let expected = train(&recipe, 1, &whole).unwrap();
        for (stop_at, threads) in [(2, 1), (5, 2)] {
            let Ended::Paused(step) = run(&recipe, threads, &parts, Some(stop_at)).unwrap() else { panic!("{sets:?}") };
            assert_eq!(step, stop_at);
            let checkpoint = parts.join(format!("checkpoints/step-{step}"));
            assert!(checkpoint.join("state.json").is_file() && !parts.join("tagger.json").exists());
        }
        let results = train(&recipe, 2, &parts).unwrap();
        assert_eq!((results.value, results.best_step), (expected.value, expected.best_step));
        for name in ["tagger.safetensors", "tagger.json", "model.safetensors"] {
            assert_eq!(fs::read(whole.join(name)).unwrap(), fs::read(parts.join(name)).unwrap(), "{name}, {sets:?}");
        }
        assert!(!parts.join("checkpoints").exists());
        // Other data under the same names is refused while there is something to resume.
        let broken = out.path().join(format!("broken-{i}"));
        run(&recipe, 1, &broken, Some(2)).unwrap();
        let other = TaggerRecipe { limit: Some(2), ..recipe.clone() };
        assert!(run(&other, 1, &broken, None).is_err());
        // A damaged checkpoint is not resumed from.
        let weights = broken.join("checkpoints/step-2/model.safetensors");
        let mut bytes = fs::read(&weights).unwrap();
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        fs::write(&weights, bytes).unwrap();
        let error = run(&recipe, 1, &broken, None).unwrap_err().to_string();
        assert!(error.contains("no checkpoint can be used"), "{error}");
    }
}

/// Entities are continued by their own kind alone, however little a tagger has learned.
#[test]
fn tags_that_cannot_follow_each_other_never_do() {
    let (from, out) = (encoder(), TempDir::new().unwrap());
    for seed in ["seed=1", "seed=2", "seed=3"] {
        let path = out.path().join(seed);
        let results =
            train(&recipe(from.path(), &["crf=true", "epochs=2", "learning_rate=5e-3", seed]), 1, &path).unwrap();
        let tagger = Tagger::open(&path, &Device::cpu(None, Some(1)).unwrap(), DType::F32).unwrap();
        let set = read(&data("finetune/tag.conll"), &tagger.reading(Reading::new(task("ner")))).unwrap();
        let predictions = tagger.predict(&set, None, |_| ControlFlow::Continue(())).unwrap();
        assert_eq!(score(&set, &predictions, None, 0).unwrap().get("f1"), results.value, "{seed}");
        let known = ["jim", "henson", "newland", "the", "old", "sea", "puppets", "and", "."];
        let words: Vec<&str> = (0..300).map(|i: usize| known[i * i % 83 % 9]).collect();
        let tagged = tagger.tag(&[TagInput::Words(&words)], None).unwrap().remove(0);
        let tags: Vec<&str> = tagged.words.iter().map(|word| tagger.labels()[word.label.unwrap()].as_str()).collect();
        assert_eq!((illegal_tags(&tags), tags.len()), (0, 300), "{seed}: {tags:?}");
    }
}

#[test]
fn the_encoder_reads_sentences_amid_their_documents() {
    let (from, out) = (encoder(), TempDir::new().unwrap());
    let file = out.path().join("documents.conll");
    fs::write(&file, DOCUMENTS).unwrap();
    let name = file.display().to_string();
    let of =
        |sets: &[&str]| TaggerRecipe { train: name.clone().into(), dev: name.clone(), ..recipe(from.path(), sets) };
    let (alone, amid) = (out.path().join("alone"), out.path().join("amid"));
    train(&of(&["epochs=40"]), 1, &alone).unwrap();
    let results = train(&of(&["epochs=40", "document_context=true", "max_length=14"]), 1, &amid).unwrap();
    // Forty epochs of five sentences: 0.67 to 0.91 with the first four seeds.
    assert!(results.value.unwrap() > 0.5, "{results:?}");
    let weights = |run: &Path| fs::read(run.join("tagger.safetensors")).unwrap();
    assert_ne!(weights(&alone), weights(&amid));
    let tagger = Tagger::open(&amid, &Device::cpu(None, Some(1)).unwrap(), DType::F32).unwrap();
    let set = read(&file, &tagger.reading(Reading::new(task("ner")))).unwrap();
    let predictions = tagger.predict(&set, None, |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(score(&set, &predictions, None, 0).unwrap().get("f1"), results.value);
    let error = train(&recipe(from.path(), &["document_context=true"]), 1, &out.path().join("none")).unwrap_err();
    assert!(error.to_string().contains("-DOCSTART-"), "{error}");
}

#[test]
fn other_runs_and_broken_files_are_refused() {
    let (from, out) = (encoder(), TempDir::new().unwrap());
    let place = out.path().join("run");
    let own = recipe(from.path(), &["epochs=1"]);
    train(&own, 1, &place).unwrap();
    let other = TaggerRecipe { crf: true, ..own.clone() };
    let error = train(&other, 1, &place).unwrap_err().to_string();
    assert!(error.contains("crf: was false, now true"), "{error}");
    let error = train(&TaggerRecipe { task: "mrpc".to_owned(), ..own.clone() }, 1, &place).unwrap_err().to_string();
    assert!(error.contains("words with tags"), "{error}");
    let many = recipe(from.path(), &["layers=sum-last-9"]);
    let error = train(&many, 1, &out.path().join("many")).unwrap_err().to_string();
    assert!(error.contains("no 9 last layers"), "{error}");
    assert!(!out.path().join("many/recipe.toml").exists());

    let device = Device::cpu(None, Some(1)).unwrap();
    let description = fs::read_to_string(place.join("tagger.json")).unwrap();
    for (from, to, expected) in [
        ("\"hidden_size\": 12", "\"hidden_size\": 14", "lstm.weight_ih_l0"),
        ("\"crf\": false", "\"crf\": true", "crf.start_transitions"),
        ("\"lstm_layers\": 2", "\"lstm_layers\": 1", "not described in"),
        ("\"format\": 1", "\"format\": 2", "format"),
        ("\"crf\"", "\"crg\"", "crg"),
    ] {
        assert!(description.contains(from), "{description}");
        fs::write(place.join("tagger.json"), description.replace(from, to)).unwrap();
        let Err(error) = Tagger::open(&place, &device, DType::F32) else { panic!("{to} was read") };
        let error = format!("{error}");
        assert!(error.contains(expected), "{to}: {error}");
    }
}

/// An ELMo as its authors published it: a tagger on a mixture of its layers, on words as they stand in the corpus.
#[test]
fn taggers_stand_on_elmo() {
    let (from, out) = (data("elmo/skip"), TempDir::new().unwrap());
    let recipe = recipe(&from, &["layers=mix-whole"]);
    let (one, two) = (out.path().join("1"), out.path().join("2"));
    let results = train(&recipe, 1, &one).unwrap();
    assert!(results.value.unwrap() > 0.5, "{results:?}");
    assert_eq!(train(&recipe, 2, &two).unwrap().value, results.value);
    let bytes = |run: &Path| fs::read(run.join("tagger.safetensors")).unwrap();
    assert_eq!(bytes(&one), bytes(&two));
    // What is saved is safetensors, and reads as before.
    assert!(one.join("model.safetensors").is_file() && one.join("tokenizer.json").is_file());
    let tagger = Tagger::open(&one, &Device::cpu(None, Some(1)).unwrap(), DType::F32).unwrap();
    let set = read(&data("finetune/tag.conll"), &tagger.reading(Reading::new(task("ner")))).unwrap();
    let predictions = tagger.predict(&set, None, |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(score(&set, &predictions, None, 0).unwrap().get("f1"), results.value);
}

/// All of it learns, for texts and for words; a run that stops resumes with the same bits.
#[test]
fn elmo_is_fine_tuned() {
    let out = TempDir::new().unwrap();
    for (name, file) in [("classify", "classify.jsonl"), ("ner", "tag.conll")] {
        let sets = ["epochs=60", "learning_rate=5e-3", "dropout=0.1"];
        let plan = finetune::plan(finetune::recipe(name, &data("elmo/skip"), file, &sets));
        // Eight bytes for each token of usual lengths.
        assert_eq!(plan.config.task.reading.unwrap().max_length % 1024, 0);
        let (whole, parts) = (out.path().join(format!("{name}-whole")), out.path().join(format!("{name}-parts")));
        let expected = finetune::finished(finetune::run(&plan, &whole, None).unwrap());
        assert!(expected.value.unwrap() > 0.6, "{name}: {expected:?}");
        assert!(matches!(finetune::run(&plan, &parts, Some(7)).unwrap(), Ended::Paused(7)));
        assert_eq!(finetune::finished(finetune::run(&plan, &parts, None).unwrap()).value, expected.value);
        let weights = |run: &Path| fs::read(run.join("model.safetensors")).unwrap();
        assert!(weights(&whole) == weights(&parts), "{name}");
        Model::open(&whole, &Device::cpu(None, Some(1)).unwrap(), DType::F32, Want::AsSaved).unwrap();
    }
}
