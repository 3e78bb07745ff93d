//! `henson convert`: a model directory in, the same model out in today's names and files.

use std::path::Path;

use anyhow::Context;
use henson_checkpoint::{Existing, SaveOptions, read_json, save};
use henson_infer::{EmbedSettings, Model, Want};
use henson_tasks::Tagger;
use henson_tensor::{DType, Device};
use serde_json::Value;

use crate::flags::Convert;
use crate::{models, output};

pub(crate) fn run(flags: &Convert) -> anyhow::Result<()> {
    let path = models::resolve(&flags.source, flags.download)?;
    let model = Model::open(&path, &Device::cpu(None, None)?, DType::F32, Want::AsSaved)?;
    let report = model.report();
    if !report.is_clean() {
        output::message(&report.to_string());
    }
    let mut config = model.config().clone();
    let head = model.network().head();
    if config.head() != Some(head) {
        config.set_head(head);
    }
    let mut files = model.tokenizer().files(Some(model.most_tokens()))?;
    files.extend(sentence_transformer_files(&path)?);
    let tagger = tagger_files(&path)?;
    if !tagger.is_empty() {
        output::message(&format!("the tagger on the encoder ({}) is copied unchanged", Tagger::FILES.join(", ")));
    }
    files.extend(tagger);
    let existing = if flags.overwrite { Existing::Replace } else { Existing::Refuse };
    let options = SaveOptions { existing, ..SaveOptions::default() };
    save(&flags.destination, &files, &config.to_json()?, model.parameters(), flags.dtype, &options)?;
    let count = model.parameters().count();
    output::line(&format!(
        "wrote {} ({}, {count} parameters) to {}",
        path.display(),
        config.model.class(head),
        flags.destination.display()
    ))
}

/// What sentence-transformers keeps beside a model, so that its embeddings stay the same; nothing for other models.
fn sentence_transformer_files(directory: &Path) -> anyhow::Result<Vec<(String, Vec<u8>)>> {
    if !directory.join("modules.json").is_file() {
        return Ok(Vec::new());
    }
    // Opened for its checks: paths that lead elsewhere are refused there.
    EmbedSettings::of_directory(directory)?;
    let modules: Vec<Value> = read_json(&directory.join("modules.json"), LIMIT)?;
    let folders = modules.iter().filter_map(|module| module.get("path")?.as_str()).filter(|path| !path.is_empty());
    let mut names: Vec<String> = folders.map(|folder| format!("{folder}/config.json")).collect();
    names.extend(["modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"].map(str::to_owned));
    let mut files = Vec::new();
    // The weights of dense layers, byte for byte.
    let weights = modules.iter().filter_map(|module| module.get("path")?.as_str()).filter(|path| !path.is_empty());
    for name in weights.map(|folder| format!("{folder}/model.safetensors")) {
        let path = directory.join(&name);
        if path.is_file() {
            let bytes = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
            files.push((name, bytes));
        }
    }
    for name in names {
        let path = directory.join(&name);
        if path.is_file() {
            let value: Value = read_json(&path, LIMIT)?;
            files.push((name, serde_json::to_vec_pretty(&value)?));
        }
    }
    Ok(files)
}

/// The files of a tagger on a frozen encoder, byte for byte; nothing for other models.
fn tagger_files(directory: &Path) -> anyhow::Result<Vec<(String, Vec<u8>)>> {
    if !Tagger::is_in(directory) {
        return Ok(Vec::new());
    }
    let read = |name: &str| {
        let path = directory.join(name);
        let bytes = std::fs::read(&path).with_context(|| format!("cannot read {} of the tagger", path.display()))?;
        Ok((name.to_owned(), bytes))
    };
    Tagger::FILES.into_iter().map(read).collect()
}

/// These files have a few hundred bytes.
const LIMIT: u64 = 1 << 20;
