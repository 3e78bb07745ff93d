//! From what the user calls a model to its directory. Only here is the environment asked where the cache is.

use std::env;
use std::path::{Path, PathBuf};

use henson_checkpoint::{DownloadProgress, Hub, resolve_model};
use henson_models::Family;

use crate::built_in::BuiltIn;
use crate::flags::ModelName;
use crate::output::{self, Progress};

/// The directory of the model that flags name, or of one that comes with henson.
pub(crate) fn find(named: &ModelName, otherwise: BuiltIn) -> anyhow::Result<PathBuf> {
    match &named.model {
        Some(model) => resolve(model, named.download),
        None => Ok(built_in(otherwise)?.1),
    }
}

/// Where the tokenizer of the model that flags name is: its directory, or a SentencePiece file that they name instead.
pub(crate) fn find_tokenizer(named: &ModelName) -> anyhow::Result<PathBuf> {
    let file = named.model.as_deref().map(Path::new);
    let is_file = |path: &&Path| path.extension().is_some_and(|extension| extension == "model") && path.is_file();
    file.filter(is_file).map_or_else(|| find(named, BuiltIn::General), |path| Ok(path.to_owned()))
}

/// A model that comes with henson, and its directory. Where only the general one is there, it does for all.
pub(crate) fn built_in(model: BuiltIn) -> anyhow::Result<(BuiltIn, PathBuf)> {
    let error = match model.directory() {
        Err(error) if model != BuiltIn::General => error,
        found => return Ok((model, found?)),
    };
    match BuiltIn::General.directory() {
        Ok(general) => {
            warn_of_stand_in(&error);
            Ok((BuiltIn::General, general))
        }
        Err(_) => Err(error),
    }
}

/// Says that the general model is used, because the one for this is not there or cannot be unpacked.
pub(crate) fn warn_of_stand_in(error: &anyhow::Error) {
    output::warn(&format!("{} is used, which was not tuned for this: {error:#}", BuiltIn::General.name()));
}

/// A path as it is, or the directory of the model that comes with henson and has this name.
pub(crate) fn directory(name: &Path) -> anyhow::Result<PathBuf> {
    match name.to_str().and_then(BuiltIn::named) {
        Some(built_in) if !name.exists() => built_in.directory(),
        _ => Ok(name.to_owned()),
    }
}

/// The directory of a model that is named by a path, as org/name, or by the name of one that comes with henson.
pub(crate) fn resolve(model: &str, download: bool) -> anyhow::Result<PathBuf> {
    if let (Some(built_in), false) = (BuiltIn::named(model), Path::new(model).exists()) {
        return built_in.directory();
    }
    if Family::config_of_size(model).is_ok() && !Path::new(model).exists() {
        anyhow::bail!(
            "{model} is a size, which has no weights yet. Pre-train one first (`henson pretrain --model {model} --data SHARDS \
             --out DIR`; docs/tutorial.md shows each step) and give --model DIR, give the directory of any other model, or \
             leave --model out to use the one that comes with henson"
        );
    }
    let cache = cache();
    let endpoint = env::var("HF_ENDPOINT").ok();
    let token = env::var("HF_TOKEN").ok();
    let proxy = env::var("HTTPS_PROXY").or_else(|_| env::var("https_proxy")).ok();
    let progress = std::cell::RefCell::new(Progress::new("MB", None));
    let show = |p: &DownloadProgress<'_>| progress.borrow_mut().at(p.received, (p.received >> 20) as usize);
    let mut hub = Hub::new(&cache);
    if let Some(endpoint) = &endpoint {
        hub.endpoint = endpoint;
    }
    (hub.download, hub.token, hub.proxy) = (download, token.as_deref(), proxy.as_deref());
    hub.progress = Some(&show);
    let path = resolve_model(model, &hub)?;
    progress.borrow().finish();
    Ok(path)
}

/// Where Hugging Face's programs keep downloads, by their own rules.
fn cache() -> PathBuf {
    if let Some(cache) = set("HF_HUB_CACHE") {
        return cache;
    }
    if let Some(home) = set("HF_HOME") {
        return home.join("hub");
    }
    caches().unwrap_or_else(|| PathBuf::from(".cache")).join("huggingface/hub")
}

/// Where henson keeps what it can make again; none where there is no home.
#[cfg(feature = "embedded-model")]
pub(crate) fn own_cache() -> Option<PathBuf> {
    caches().map(|caches| caches.join("henson"))
}

/// Where programs keep their caches.
fn caches() -> Option<PathBuf> {
    set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")))
}

/// A variable as a path; an empty one counts as not set.
pub(crate) fn set(name: &str) -> Option<PathBuf> {
    env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}
