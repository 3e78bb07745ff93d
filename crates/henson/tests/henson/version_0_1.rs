//! What version 0.1 wrote is opened, resumed and repeated by this one, to the same bits.

use std::path::Path;
use std::process::{Command, Stdio};

use sha2::{Digest, Sha256};
use tempfile::TempDir;

/// What version 0.1 itself ended with, with portable kernels.
const PRE_TRAINED: &str = "f14b526549cc090c5aa932c563bd4711811fe5e38e7eb64dbd0b50c6b5c7057a";
const FINE_TUNED: &str = "081c80abc82e9d4e5bca1c0b187ab4bd934434b4e6b7635550de62f5d24197c5";

/// A copy of the fixture, which runs may write to.
fn fixture() -> TempDir {
    let directory = TempDir::new().unwrap();
    copy(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/version-0.1"), directory.path());
    directory
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// Runs henson inside of a directory; what it printed on standard error.
#[track_caller]
fn works(directory: &Path, arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_henson"));
    command.args(arguments).current_dir(directory).env("HENSON_KERNELS", "portable").stdin(Stdio::null());
    let output = command.output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{arguments:?}: {message}");
    message
}

fn hash(path: &Path) -> String {
    Sha256::digest(std::fs::read(path).unwrap()).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn a_pre_training_resumes_and_its_recipe_repeats_it() {
    let directory = fixture();
    let at = |name: &str| directory.path().join(name);
    let resumed = works(directory.path(), &["pretrain", "run/recipe.toml", "--out", "run"]);
    assert!(resumed.contains("step 5"), "{resumed}");
    assert_eq!(hash(&at("run/model.safetensors")), PRE_TRAINED);
    works(directory.path(), &["pretrain", "run/recipe.toml", "--out", "again"]);
    assert_eq!(hash(&at("again/model.safetensors")), PRE_TRAINED);
}

#[test]
fn a_fine_tuning_resumes_and_its_recipe_repeats_it() {
    let directory = fixture();
    let at = |name: &str| directory.path().join(name);
    works(directory.path(), &["finetune", "tune/recipe.toml", "--out", "tune"]);
    assert_eq!(hash(&at("tune/model.safetensors")), FINE_TUNED);
    works(directory.path(), &["finetune", "tune/recipe.toml", "--out", "again"]);
    assert_eq!(hash(&at("again/model.safetensors")), FINE_TUNED);
}
