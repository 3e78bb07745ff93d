//! A model directory as a place: its config and its other small files, read with a limit. What the config means is the
//! business of `models`, what the tokenizer's files mean that of `text`.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use henson_models::ORIGINALS;
use serde::de::DeserializeOwned;

use crate::safetensors::without_position;
use crate::{CheckpointError, Weights, atomic};

/// The largest config.json that is read. Real ones have a few kB; one with a hundred thousand labels has a few MB.
const CONFIG_LIMIT: u64 = 64 << 20;

/// A directory with config.json and weights.
#[derive(Clone, Debug)]
pub struct ModelDirectory {
    path: PathBuf,
}

impl ModelDirectory {
    /// Finds the directory, and finishes or takes back a save that was interrupted there (see [`crate::save()`]).
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, CheckpointError> {
        let path = path.into();
        atomic::recover(&path)?;
        let metadata = std::fs::metadata(&path).map_err(CheckpointError::io("open", &path))?;
        if !metadata.is_dir() {
            return Err(CheckpointError::NotADirectory { path });
        }
        Ok(Self { path })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its config.json; or the config that the authors of a family published, with the `model_type` that it lacks.
    pub fn config(&self) -> Result<serde_json::Value, CheckpointError> {
        if self.path.join("config.json").exists() {
            return self.read_json("config.json");
        }
        let Some(original) = ORIGINALS.iter().find(|original| self.has(original.config)) else {
            return Err(CheckpointError::NoConfig { path: self.path.clone() });
        };
        let mut config: serde_json::Map<String, serde_json::Value> = self.read_json(original.config)?;
        config.entry("model_type").or_insert_with(|| original.model_type.into());
        Ok(config.into())
    }

    /// Another of its JSON files.
    pub fn read_json<T: DeserializeOwned>(&self, name: &str) -> Result<T, CheckpointError> {
        read_json(&self.path.join(name), CONFIG_LIMIT)
    }

    /// Whether it has a file of this name.
    pub fn has(&self, name: &str) -> bool {
        self.path.join(name).is_file()
    }

    /// Its weights.
    pub fn weights(&self) -> Result<Weights, CheckpointError> {
        Weights::open(&self.path)
    }
}

/// Reads a JSON file of at most `limit` bytes. An error says the file, line and column.
pub fn read_json<T: DeserializeOwned>(path: &Path, limit: u64) -> Result<T, CheckpointError> {
    parse_json(path, &read_limited(path, limit)?)
}

/// [`read_json`] after the file has been read; `path` is for the error alone.
pub fn parse_json<T: DeserializeOwned>(path: &Path, bytes: &[u8]) -> Result<T, CheckpointError> {
    serde_json::from_slice(bytes).map_err(|error| CheckpointError::Json {
        path: path.to_owned(),
        line: error.line(),
        column: error.column(),
        problem: without_position(&error),
    })
}

/// Reads a regular file of at most `limit` bytes.
pub fn read_limited(path: &Path, limit: u64) -> Result<Vec<u8>, CheckpointError> {
    let mut bytes = Vec::new();
    // The limit holds for what is read and not for what the file says of itself: it may grow.
    let mut file = open_regular(path, "read")?.take(limit.saturating_add(1));
    file.read_to_end(&mut bytes).map_err(CheckpointError::io("read", path))?;
    if bytes.len() as u64 > limit {
        return Err(CheckpointError::TooLarge { path: path.to_owned(), limit });
    }
    Ok(bytes)
}

/// Opens a file, and nothing else: opening a FIFO would wait for somebody who writes to it, and a device may have no end.
/// `action` is for the error alone. (`henson_text::check_regular` is the same for crates below, which have errors of their own.)
pub fn open_regular(path: &Path, action: &'static str) -> Result<File, CheckpointError> {
    let io = || CheckpointError::io(action, path);
    if !std::fs::metadata(path).map_err(io())?.is_file() {
        return Err(CheckpointError::NotAFile { path: path.to_owned() });
    }
    File::open(path).map_err(io())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_errors_say_where() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("config.json");
        let check = |content: &str, expected: &str| {
            std::fs::write(&path, content).unwrap();
            let error = read_json::<serde_json::Value>(&path, 40).unwrap_err().to_string();
            assert!(error.starts_with(path.to_str().unwrap()), "{error}");
            assert!(error.contains(expected), "{error}");
        };
        check("{\n  \"a\": 1,\n  \"b\" 2\n}", "line 3, column 7: expected `:`");
        check("", "line 1, column 0: EOF");
        check(&"[".repeat(41), "more than 40 bytes");
        check("\u{feff}{}", "line 1, column 1");
        std::fs::write(&path, "[".repeat(1_000_000)).unwrap();
        let error = read_json::<serde_json::Value>(&path, 1 << 20).unwrap_err().to_string();
        assert!(error.contains("recursion limit"), "{error}");
        assert!(matches!(read_json::<serde_json::Value>(directory.path(), 40), Err(CheckpointError::NotAFile { .. })));
        assert!(matches!(
            read_json::<serde_json::Value>(&directory.path().join("none"), 40),
            Err(CheckpointError::Io { action: "read", .. })
        ));
        let model = ModelDirectory::open(directory.path()).unwrap();
        assert!(matches!(model.config(), Err(CheckpointError::Json { .. })));
        std::fs::remove_file(&path).unwrap();
        assert!(model.config().unwrap_err().to_string().contains("holds no model: it has no config.json"));
    }
}
