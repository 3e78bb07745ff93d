//! Saves that succeed, saves that are refused, and saves that are interrupted: the old directory or the new one, whole.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use henson_checkpoint::{
    CheckpointError, Existing, LoadOptions, ModelDirectory, SaveDType, SaveOptions, Weights, load, save, write_atomic,
};
use henson_models::Head;
use henson_tensor::{Builder, Init, Parameters};
use serde_json::json;

use crate::{bert, child, child_argument, finish, golden, naming, numbers, tiny};

const REPLACE: SaveOptions = SaveOptions { existing: Existing::Replace, shard_size: u64::MAX, allow_non_finite: false };
const MERGE: SaveOptions = SaveOptions { existing: Existing::Merge, ..REPLACE };

fn tokenizer() -> Vec<(String, Vec<u8>)> {
    vec![("vocab.txt".into(), b"[PAD]\n".to_vec()), ("1_Pooling/config.json".into(), b"{}".to_vec())]
}

fn save_tiny(directory: &Path, seed: u64, options: &SaveOptions) -> Result<(), CheckpointError> {
    let config = json!({"seed": seed});
    save(directory, &tokenizer(), &config, &tiny(seed), SaveDType::F32, options)
}

/// The seed of what [`save_tiny`] saved, having checked that all of it is there and of that seed.
fn seed_of(directory: &Path) -> u64 {
    let model = ModelDirectory::open(directory).unwrap();
    let seed = model.config().unwrap()["seed"].as_u64().unwrap();
    let mut parameters = tiny(seed + 1);
    load(&model.weights().unwrap(), naming(), &mut parameters, &LoadOptions::strict()).unwrap();
    assert_eq!(numbers(&parameters), numbers(&tiny(seed)));
    assert!(model.has("vocab.txt") && model.has("1_Pooling/config.json"));
    seed
}

/// All files below a directory with their bytes.
fn files(directory: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut result = BTreeMap::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        if entry.file_type().unwrap().is_dir() {
            result.extend(files(&entry.path()).into_iter().map(|(inner, bytes)| (format!("{name}/{inner}"), bytes)));
        } else {
            result.insert(name, std::fs::read(entry.path()).unwrap());
        }
    }
    result
}

#[test]
fn the_same_bytes_as_transformers() {
    let directory = tempfile::tempdir().unwrap();
    for (name, head, dtype) in [
        ("pretraining", Head::PreTraining, SaveDType::F32),
        ("model", Head::Pooler, SaveDType::F32),
        ("variants/f16", Head::PreTraining, SaveDType::F16),
        ("variants/bf16", Head::PreTraining, SaveDType::Bf16),
    ] {
        let source = golden(name);
        let mut parameters = bert(&source, head, 0);
        load(&Weights::open(&source).unwrap(), naming(), &mut parameters, &LoadOptions::strict()).unwrap();
        let config = ModelDirectory::open(&source).unwrap().config().unwrap();
        let saved = directory.path().join(name);
        save(&saved, &[], &config, &parameters, dtype, &SaveOptions::default()).unwrap();
        for file in ["config.json", "model.safetensors"] {
            assert!(
                std::fs::read(source.join(file)).unwrap() == std::fs::read(saved.join(file)).unwrap(),
                "{name}/{file}"
            );
        }
    }
}

#[test]
fn there_and_back() {
    let directory = tempfile::tempdir().unwrap();
    for (dtype, name, step) in [
        (SaveDType::F32, "float32", 0.0),
        (SaveDType::F16, "float16", 2f32.powi(-11)),
        (SaveDType::Bf16, "bfloat16", 2f32.powi(-8)),
    ] {
        let path = directory.path().join(name);
        let parameters = tiny(1);
        let config = json!({"hidden_size": 3, "torch_dtype": "float64"});
        save(&path, &tokenizer(), &config, &parameters, dtype, &SaveOptions::default()).unwrap();
        let model = ModelDirectory::open(&path).unwrap();
        assert_eq!(model.config().unwrap(), json!({"hidden_size": 3, "dtype": name}));
        let mut loaded = tiny(2);
        let report = load(&model.weights().unwrap(), naming(), &mut loaded, &LoadOptions::strict()).unwrap();
        assert!(report.is_clean());
        for ((name, expected), (_, got)) in numbers(&parameters).iter().zip(numbers(&loaded)) {
            for (x, y) in expected.iter().zip(got) {
                assert!((x - y).abs() <= x.abs() * step, "{name}: {x} {y}");
            }
        }
        let names: Vec<String> = files(&path).into_keys().collect();
        assert_eq!(names, ["1_Pooling/config.json", "config.json", "model.safetensors", "vocab.txt"]);
    }
}

#[test]
fn equal_weights_give_equal_bytes() {
    let build = |reversed: bool| -> Parameters {
        let mut builder = Builder::new();
        let mut names = ["a.bias", "b", "a.weight", "é\"\\"];
        if reversed {
            names.reverse();
        }
        for name in names {
            builder.vector(name, 5, Init::Ones);
        }
        finish(builder, 0)
    };
    let directory = tempfile::tempdir().unwrap();
    let [a, b] = [("a", false), ("b", true)].map(|(name, reversed)| {
        let path = directory.path().join(name);
        save(&path, &tokenizer(), &json!({}), &build(reversed), SaveDType::F32, &SaveOptions::default()).unwrap();
        files(&path)
    });
    assert!(a == b);
    let bytes = &a["model.safetensors"];
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    assert_eq!((header % 8, bytes.len()), (0, 8 + header + 4 * 5 * 4));
    let weights = Weights::open(&directory.path().join("a")).unwrap();
    assert_eq!(weights.names().collect::<Vec<_>>(), ["a.bias", "a.weight", "b", "é\"\\"]);
}

#[test]
fn shards() {
    let directory = tempfile::tempdir().unwrap();
    let source = golden("pretraining");
    let mut parameters = bert(&source, Head::PreTraining, 0);
    load(&Weights::open(&source).unwrap(), naming(), &mut parameters, &LoadOptions::strict()).unwrap();
    let config = ModelDirectory::open(&source).unwrap().config().unwrap();
    let sharded = golden("variants/sharded");
    // As it was made: see tools/golden.
    let options = SaveOptions { shard_size: 30_000, ..SaveOptions::default() };
    let saved = directory.path().join("two");
    save(&saved, &[], &config, &parameters, SaveDType::F32, &options).unwrap();
    assert_eq!(files(&saved).keys().collect::<Vec<_>>(), files(&sharded).keys().collect::<Vec<_>>());

    for (shard_size, count) in [(1, 46), (5000, 12), (55_492, 1), (55_491, 2)] {
        let saved = directory.path().join(shard_size.to_string());
        let options = SaveOptions { shard_size, ..SaveOptions::default() };
        save(&saved, &[], &config, &parameters, SaveDType::F32, &options).unwrap();
        let names: Vec<String> = files(&saved).into_keys().filter(|name| name.ends_with(".safetensors")).collect();
        assert_eq!(names.len(), count, "{names:?}");
        if count > 1 {
            let index: serde_json::Value =
                henson_checkpoint::read_json(&saved.join("model.safetensors.index.json"), 1 << 20).unwrap();
            assert_eq!(index["metadata"], json!({"total_parameters": 13873, "total_size": 55492}));
        }
        let mut loaded = bert(&source, Head::PreTraining, 1);
        let report = load(&Weights::open(&saved).unwrap(), naming(), &mut loaded, &LoadOptions::strict()).unwrap();
        assert!(report.is_clean());
        assert_eq!(numbers(&loaded), numbers(&parameters));
    }
}

#[test]
fn an_existing_directory_is_replaced_on_request_alone() {
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("runs/out");
    save_tiny(&out, 1, &SaveOptions::default()).unwrap();
    let error = save_tiny(&out, 2, &SaveOptions::default()).unwrap_err();
    assert!(matches!(error, CheckpointError::Exists { .. }), "{error}");
    assert!(error.to_string().contains("runs/out exists already and was not touched"), "{error}");
    assert_eq!(seed_of(&out), 1);
    save_tiny(&out, 3, &REPLACE).unwrap();
    assert_eq!(seed_of(&out), 3);
    // Nothing is left beside it.
    assert_eq!(std::fs::read_dir(directory.path().join("runs")).unwrap().count(), 1);

    std::fs::write(out.join("notes.md"), "mine").unwrap();
    std::fs::create_dir(out.join("checkpoints")).unwrap();
    let before = files(&out);
    let error = save_tiny(&out, 4, &REPLACE).unwrap_err();
    assert!(error.to_string().contains("would delete checkpoints, notes.md"), "{error}");
    assert!(files(&out) == before);

    // An empty directory holds nothing that could be lost.
    let empty = directory.path().join("empty");
    std::fs::create_dir(&empty).unwrap();
    save_tiny(&empty, 5, &SaveOptions::default()).unwrap();
    assert_eq!(seed_of(&empty), 5);

    // Replacing follows links and leaves them.
    let link = directory.path().join("link");
    std::os::unix::fs::symlink(&empty, &link).unwrap();
    save_tiny(&link, 6, &REPLACE).unwrap();
    assert!(link.is_symlink());
    assert_eq!((seed_of(&link), seed_of(&empty)), (6, 6));
}

#[test]
fn merging_leaves_other_files() {
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("out");
    save_tiny(&out, 1, &SaveOptions { shard_size: 1, ..MERGE }).unwrap();
    std::fs::write(out.join("metrics.jsonl"), "{}").unwrap();
    std::fs::create_dir_all(out.join("checkpoints/step-1")).unwrap();
    save_tiny(&out, 2, &MERGE).unwrap();
    assert_eq!(seed_of(&out), 2);
    // The old shards and their index are gone with the weights that they held.
    let names: Vec<String> = files(&out).into_keys().collect();
    assert_eq!(names, ["1_Pooling/config.json", "config.json", "metrics.jsonl", "model.safetensors", "vocab.txt"]);
    assert!(out.join("checkpoints/step-1").is_dir());
    save_tiny(&out, 3, &SaveOptions { shard_size: 1, ..MERGE }).unwrap();
    assert_eq!(seed_of(&out), 3);
    assert!(!out.join("model.safetensors").exists());
}

#[test]
fn places_that_cannot_be_written() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    std::fs::write(&file, "mine").unwrap();
    for existing in [Existing::Refuse, Existing::Replace, Existing::Merge] {
        let options = SaveOptions { existing, ..REPLACE };
        assert!(matches!(save_tiny(&file, 1, &options), Err(CheckpointError::NotADirectory { .. })));
        assert!(matches!(save_tiny(&file.join("out"), 1, &options), Err(CheckpointError::Io { .. })));
        // Nobody can create anything there, root neither.
        assert!(matches!(save_tiny(Path::new("/proc/henson"), 1, &options), Err(CheckpointError::Io { .. })));
    }
    assert_eq!(std::fs::read(&file).unwrap(), b"mine");
    let dangling = directory.path().join("dangling");
    std::os::unix::fs::symlink(directory.path().join("none"), &dangling).unwrap();
    assert!(matches!(save_tiny(&dangling, 1, &REPLACE), Err(CheckpointError::Io { .. })));
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 2);
}

#[test]
fn names_of_further_files() {
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("out");
    for names in [
        &["../x"][..],
        &["/x"],
        &[""],
        &["a/../b"],
        &["./a"],
        &["a//b"],
        &["a/"],
        &["config.json"],
        &["model.safetensors"],
        &["model-00001-of-00002.safetensors"],
        &["model.safetensors.index.json"],
        &[".henson-commit/x"],
        &["a", "a"],
    ] {
        let files: Vec<(String, Vec<u8>)> = names.iter().map(|name| ((*name).to_owned(), vec![1])).collect();
        let result = save(&out, &files, &json!({}), &tiny(0), SaveDType::F32, &SaveOptions::default());
        assert!(matches!(result, Err(CheckpointError::FileName { .. })), "{names:?}");
    }
    // A file that is also a directory shows only when it is written.
    let files = ["a", "a/b"].map(|name| (name.to_owned(), vec![1]));
    let result = save(&out, &files, &json!({}), &tiny(0), SaveDType::F32, &SaveOptions::default());
    assert!(matches!(result, Err(CheckpointError::Io { .. })));
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn numbers_that_are_not_finite_are_not_saved() {
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("out");
    save_tiny(&out, 1, &REPLACE).unwrap();
    for (value, dtype, saved) in [
        (f32::NAN, SaveDType::F32, false),
        (f32::INFINITY, SaveDType::Bf16, false),
        (f32::MAX, SaveDType::Bf16, false),
        (1e5, SaveDType::F16, false),
        (6e4, SaveDType::F16, true),
        (1e5, SaveDType::Bf16, true),
        (f32::MAX, SaveDType::F32, true),
    ] {
        let mut parameters = tiny(2);
        parameters.write(1, &[0.0, 1.0, value, 2.0, 3.0]).unwrap();
        let before = files(&out);
        match save(&out, &tokenizer(), &json!({"seed": 2}), &parameters, dtype, &REPLACE) {
            Ok(()) => assert!(saved, "{value}"),
            Err(CheckpointError::NotFinite { name, count: 1, .. }) => {
                assert!(!saved && name == "cls.predictions.bias", "{value}");
                assert!(files(&out) == before);
            }
            Err(error) => panic!("{error}"),
        }
        let allowed = SaveOptions { allow_non_finite: true, ..REPLACE };
        save(&out, &tokenizer(), &json!({"seed": 2}), &parameters, dtype, &allowed).unwrap();
    }
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
}

#[test]
fn leftovers_are_swept() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    for name in [".out.henson-tmp-1-0", ".out.henson-tmp-1-1", ".other.henson-tmp-1-0"] {
        std::fs::create_dir(path(name)).unwrap();
        std::fs::write(path(name).join("config.json"), "{").unwrap();
    }
    // Held by a process that is at work.
    let working = std::fs::File::open(path(".out.henson-tmp-1-1")).unwrap();
    working.lock().unwrap();
    save_tiny(&path("out"), 1, &SaveOptions::default()).unwrap();
    assert!(!path(".out.henson-tmp-1-0").exists());
    assert!(path(".out.henson-tmp-1-1").exists() && path(".other.henson-tmp-1-0").exists());
    drop(working);
    save_tiny(&path("out"), 2, &REPLACE).unwrap();
    assert!(!path(".out.henson-tmp-1-1").exists());

    std::fs::create_dir(path("out/.henson-tmp-1-0")).unwrap();
    save_tiny(&path("out"), 3, &MERGE).unwrap();
    assert!(!path("out/.henson-tmp-1-0").exists());
    assert_eq!(seed_of(&path("out")), 3);
}

/// Files end at 4 KiB in the child, which is what a full disk does, but for the error's text.
#[test]
fn a_full_disk_keeps_the_old() {
    if let Some(out) = child_argument() {
        let mut builder = Builder::new();
        builder.matrix("large", 100, 100, Init::Ones);
        let large = finish(builder, 0);
        for existing in [Existing::Refuse, Existing::Replace, Existing::Merge] {
            let options = SaveOptions { existing, ..REPLACE };
            let target = if existing == Existing::Refuse { out.with_file_name("new") } else { out.clone() };
            let error = save(&target, &tokenizer(), &json!({"seed": 2}), &large, SaveDType::F32, &options).unwrap_err();
            let CheckpointError::Io { action: "write", path, .. } = &error else { panic!("{error}") };
            assert_eq!(path, &target.join("model.safetensors"));
        }
        assert!(write_atomic(&out.join("config.json"), &[b' '; 10_000]).is_err());
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("out");
    save_tiny(&out, 1, &REPLACE).unwrap();
    let before = files(&out);
    let test = "save::a_full_disk_keeps_the_old";
    // With the signal ignored a write fails; without, it kills.
    let failed = child("ulimit -f 8; trap '' XFSZ; exec \"$@\"", test, &out).status().unwrap();
    assert!(failed.success(), "{failed}");
    assert!(files(&out) == before);
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
    let killed = child("ulimit -c 0 -f 8; exec \"$@\"", test, &out).status().unwrap();
    assert!(!killed.success());
    assert!(files(&out) == before);
    save_tiny(&directory.path().join("new"), 2, &REPLACE).unwrap();
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 2);
}

/// A process that saves again and again is killed at any time: what is there is whole.
#[test]
fn a_kill_at_any_time() {
    if let Some(out) = child_argument() {
        for seed in 10.. {
            // A merge also changes the files' names: one file and four by turns.
            let shard_size = if seed % 2 == 0 { 1 } else { u64::MAX };
            let merge = out.ends_with("merge");
            let options = if merge { SaveOptions { shard_size, ..MERGE } } else { REPLACE };
            save_tiny(&out, seed, &options).unwrap();
        }
    }
    let directory = tempfile::tempdir().unwrap();
    for name in ["replace", "merge"] {
        let out = directory.path().join(name);
        save_tiny(&out, 1, &REPLACE).unwrap();
        for i in 0..12 {
            let mut child = child("exec \"$@\"", "save::a_kill_at_any_time", &out).spawn().unwrap();
            std::thread::sleep(Duration::from_millis(25 + 7 * i));
            child.kill().unwrap();
            child.wait().unwrap();
            seed_of(&out);
        }
        save_tiny(&out, 2, if name == "merge" { &MERGE } else { &REPLACE }).unwrap();
        assert_eq!(seed_of(&out), 2);
        assert_eq!(std::fs::read_dir(&out).unwrap().count(), 4);
    }
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 2);
}

#[test]
fn single_files() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("state.json");
    for content in ["one", "the second", ""] {
        write_atomic(&path, content.as_bytes()).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), content);
    }
    std::fs::write(directory.path().join(".state.json.henson-tmp-1-0"), "x").unwrap();
    write_atomic(&path, b"last").unwrap();
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
    assert!(matches!(write_atomic(&path.join("x"), b""), Err(CheckpointError::Io { .. })));
    std::fs::create_dir(directory.path().join("taken")).unwrap();
    assert!(matches!(write_atomic(&directory.path().join("taken"), b""), Err(CheckpointError::Io { .. })));
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 2);
}
