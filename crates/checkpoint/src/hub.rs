//! From what a user calls a model to its directory: a path, or a name on a Hugging Face hub whose files are in the local
//! cache, which is shared with `transformers` and laid out as its `huggingface_hub` does.
//!
//! Nothing is fetched unless asked. Only the newest revision (`main`) is known. The environment is not read: the binary
//! passes the places and the token.

use std::path::{Path, PathBuf};

use crate::directory::read_limited;
use crate::weights::{Format, INDEX_LIMIT, parse_index, shards};
use crate::{CheckpointError, atomic};

/// Where models come from.
#[derive(Clone, Copy)]
pub struct Hub<'a> {
    /// The cache: `$HF_HOME/hub`, by default `~/.cache/huggingface/hub`.
    pub cache: &'a Path,
    /// Whether files may be fetched.
    pub download: bool,
    /// Where from.
    pub endpoint: &'a str,
    /// Proves to the endpoint who is asking, for models that are private or gated. Not sent anywhere else.
    pub token: Option<&'a str>,
    /// The address of a proxy.
    pub proxy: Option<&'a str>,
    /// Is told of every piece that arrives.
    pub progress: Option<&'a dyn Fn(&DownloadProgress<'_>)>,
}

impl<'a> Hub<'a> {
    /// A cache, and no downloads.
    pub fn new(cache: &'a Path) -> Self {
        let endpoint = "https://huggingface.co";
        Self { cache, download: false, endpoint, token: None, proxy: None, progress: None }
    }
}

/// How far a file has come.
#[derive(Clone, Copy, Debug)]
pub struct DownloadProgress<'a> {
    /// Its name in the model directory.
    pub file: &'a str,
    /// Bytes that have arrived.
    pub received: u64,
    /// Bytes that it has, where the server says so.
    pub total: Option<u64>,
}

/// The directory of a model: `model` itself if it is one, or else the files of a name like `organisation/name` in the
/// cache. What is not in the cache is fetched if the hub's `download` allows it.
pub fn resolve_model(model: impl AsRef<Path>, hub: &Hub<'_>) -> Result<PathBuf, CheckpointError> {
    let model = model.as_ref();
    atomic::recover(model)?;
    if model.is_dir() {
        return Ok(model.to_owned());
    }
    if model.exists() {
        return Err(CheckpointError::NotADirectory { path: model.to_owned() });
    }
    let name = model.to_string_lossy().into_owned();
    if !is_repository(&name) {
        return Err(CheckpointError::ModelName { name });
    }
    let repository = hub.cache.join(format!("models--{}", name.replace('/', "--")));
    let snapshot = snapshot(&repository)?;
    if let Some(snapshot) = &snapshot
        && is_complete(snapshot)?
    {
        return Ok(snapshot.clone());
    }
    if !hub.download {
        // Weights of a format that is not read are no reason to fetch: opening them says how to convert them.
        return match snapshot.filter(|snapshot| has_foreign_weights(snapshot)) {
            Some(snapshot) => Ok(snapshot),
            None => Err(CheckpointError::ModelNotFound { name, expected: repository }),
        };
    }
    #[cfg(feature = "download")]
    return crate::download::fetch(&name, &repository, hub);
    #[cfg(not(feature = "download"))]
    Err(CheckpointError::DownloadNotBuilt { name })
}

/// Whether a snapshot has its config and all of its weights.
pub(crate) fn is_complete(snapshot: &Path) -> Result<bool, CheckpointError> {
    if !snapshot.join("config.json").is_file() {
        return Ok(false);
    }
    for format in Format::ALL {
        if snapshot.join(format.single_file()).is_file() {
            return Ok(true);
        }
        let index = snapshot.join(format.index_file());
        if index.is_file() {
            let weight_map = parse_index(&index, &read_limited(&index, INDEX_LIMIT)?)?;
            return Ok(shards(&weight_map).into_iter().all(|shard| snapshot.join(shard).is_file()));
        }
    }
    Ok(false)
}

/// Whether this can be the name of a model on a hub: `name` or `organisation/name`, and nothing that a path or an
/// address could take for something else.
fn is_repository(name: &str) -> bool {
    let part = |part: &str| {
        let inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        let ends = |c: char| c.is_ascii_alphanumeric() || c == '_';
        !part.is_empty()
            && part.len() <= 96
            && part.chars().all(inner)
            && part.starts_with(ends)
            && part.ends_with(ends)
            // The cache's layout uses `--` for `/`.
            && !part.contains("--")
            && !part.contains("..")
    };
    match name.split_once('/') {
        Some((organisation, name)) => part(organisation) && part(name),
        None => part(name),
    }
}

/// The cached revision that `main` stood for when it was fetched.
fn snapshot(repository: &Path) -> Result<Option<PathBuf>, CheckpointError> {
    let reference = repository.join("refs/main");
    if !reference.is_file() {
        return Ok(None);
    }
    let revision = read_limited(&reference, 1 << 10)?;
    let revision = String::from_utf8_lossy(&revision).trim().to_owned();
    // Anything else would lead out of the cache.
    if !is_revision(&revision) {
        return Ok(None);
    }
    let snapshot = repository.join("snapshots").join(revision);
    atomic::recover(&snapshot)?;
    Ok(snapshot.is_dir().then_some(snapshot))
}

/// Whether this can be the name of a revision: a commit, or a word where a mirror does not tell its commits.
pub(crate) fn is_revision(revision: &str) -> bool {
    !revision.is_empty() && revision.len() <= 96 && revision.chars().all(|c| c.is_ascii_alphanumeric())
}

fn has_foreign_weights(snapshot: &Path) -> bool {
    let foreign = |name: &str| name.ends_with(".h5") || name.ends_with(".msgpack");
    let entries = std::fs::read_dir(snapshot).into_iter().flatten().flatten();
    snapshot.join("config.json").is_file()
        && entries.into_iter().any(|entry| entry.file_name().to_str().is_some_and(foreign))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_are_names() {
        for name in ["bert-base-uncased", "google-bert/bert-base-uncased", "a/b", "_x/y_1.0", "a.b/c"] {
            assert!(is_repository(name), "{name}");
        }
        let long = "a".repeat(97);
        for name in [
            "", "/", "a/", "/a", "a/b/c", "./a", "../a", "a/..", "a/.b", "a b", "a/b?x", "a--b/c", "ä/b", "a\\b",
            "a:b", "-a/b", &long,
        ] {
            assert!(!is_repository(name), "{name}");
        }
    }
}
