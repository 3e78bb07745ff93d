//! The weights of a model directory: one safetensors file, or shards with an index, mapped into memory.
//!
//! Opening reads and checks the headers; numbers are read when they are asked for. Which parameter a tensor belongs to
//! is not known here: that is [`crate::load()`].

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use serde::Deserialize;

use crate::directory::{parse_json, read_limited};
use crate::safetensors::{Header, TensorInfo, UniqueMap, for_each_f32};
use crate::{CheckpointError, atomic};

pub(crate) const SINGLE_FILE: &str = "model.safetensors";
pub(crate) const INDEX_FILE: &str = "model.safetensors.index.json";

/// The largest index that is read: about half a million tensors.
pub(crate) const INDEX_LIMIT: u64 = 64 << 20;

/// Tensors by name, mapped into memory.
///
/// The files must not be changed in place while they are open. [`crate::save()`] never does: it writes new files and
/// renames them, and an open mapping keeps the old ones alive.
#[derive(Debug)]
pub struct Weights {
    path: PathBuf,
    files: Vec<Mmap>,
    tensors: BTreeMap<String, Located>,
}

#[derive(Debug)]
struct Located {
    info: TensorInfo,
    file: usize,
    bytes: Range<usize>,
}

impl Weights {
    /// Opens a model directory's `model.safetensors`, or else the shards of its `model.safetensors.index.json`.
    pub fn open(directory: &Path) -> Result<Self, CheckpointError> {
        atomic::recover(directory)?;
        let metadata = std::fs::metadata(directory).map_err(CheckpointError::io("open", directory))?;
        if !metadata.is_dir() {
            return Err(CheckpointError::NotADirectory { path: directory.to_owned() });
        }
        if directory.join(SINGLE_FILE).exists() {
            let mut weights = Self::open_file(&directory.join(SINGLE_FILE))?;
            weights.path = directory.to_owned();
            Ok(weights)
        } else if directory.join(INDEX_FILE).exists() {
            Self::open_shards(directory)
        } else {
            Err(foreign_format(directory).unwrap_or(CheckpointError::NoWeights { directory: directory.to_owned() }))
        }
    }

    /// Opens one safetensors file.
    pub fn open_file(path: &Path) -> Result<Self, CheckpointError> {
        let mut weights = Self { path: path.to_owned(), files: Vec::new(), tensors: BTreeMap::new() };
        let header = weights.map(path)?;
        weights.add(header);
        Ok(weights)
    }

    /// Where they come from: the directory, or the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// What a tensor is, if there is one of this name.
    pub fn get(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name).map(|located| &located.info)
    }

    /// A tensor's numbers, rounded to f32 where they are F64.
    pub fn read_f32(&self, name: &str) -> Result<Vec<f32>, CheckpointError> {
        // The header was checked against the file's size, so that this is bounded by it.
        let elements = self.get(name).map_or(0, |info| info.shape.iter().product());
        let mut numbers = Vec::with_capacity(elements);
        self.for_each(name, |chunk| numbers.extend_from_slice(chunk))?;
        Ok(numbers)
    }

    /// Gives a tensor's numbers piece by piece, without a copy of all of them.
    pub(crate) fn for_each(&self, name: &str, each: impl FnMut(&[f32])) -> Result<(), CheckpointError> {
        let Some(located) = self.tensors.get(name) else {
            return Err(CheckpointError::NoTensor { path: self.path.clone(), name: name.to_owned() });
        };
        let dtype = located.info.dtype;
        if !for_each_f32(dtype, &self.files[located.file][located.bytes.clone()], each) {
            return Err(CheckpointError::NotFloat { path: self.path.clone(), name: name.to_owned(), dtype });
        }
        Ok(())
    }

    fn open_shards(directory: &Path) -> Result<Self, CheckpointError> {
        let index = directory.join(INDEX_FILE);
        let weight_map = parse_index(&index, &read_limited(&index, INDEX_LIMIT)?)?;
        let mut weights = Self { path: directory.to_owned(), files: Vec::new(), tensors: BTreeMap::new() };
        for shard in shards(&weight_map) {
            let path = directory.join(shard);
            if !path.exists() {
                return Err(CheckpointError::MissingShard { index, shard: shard.to_owned() });
            }
            let header = weights.map(&path)?;
            let mismatch =
                |problem| CheckpointError::IndexMismatch { index: index.clone(), shard: shard.to_owned(), problem };
            for name in header.tensors.keys() {
                match weight_map.get(name) {
                    Some(named) if named == shard => {}
                    Some(named) => {
                        return Err(mismatch(format!("the shard holds {name}, the index has it in {named}")));
                    }
                    None => return Err(mismatch(format!("the shard holds {name}, the index does not know it"))),
                }
            }
            let promised = weight_map.iter().filter(|(_, named)| *named == shard);
            for (name, _) in promised {
                if !header.tensors.contains_key(name) {
                    return Err(mismatch(format!("the index has {name} in this shard, the shard does not hold it")));
                }
            }
            weights.add(header);
        }
        Ok(weights)
    }

    /// Maps a file, to be followed by [`Weights::add`] with its header.
    fn map(&mut self, path: &Path) -> Result<Header, CheckpointError> {
        let io = || CheckpointError::io("open", path);
        // Asked before opening: a pipe would block there.
        if !std::fs::metadata(path).map_err(io())?.is_file() {
            return Err(CheckpointError::NotAFile { path: path.to_owned() });
        }
        let file = File::open(path).map_err(io())?;
        // SAFETY: The mapping is private to this process and only read. Its bytes would change below us only if someone
        // wrote to the file in place, or cut it, while it is open; nothing in henson does, `Weights` says that nobody
        // else may, and every reader that maps files lives with the same condition.
        let map = unsafe { Mmap::map(&file) }.map_err(CheckpointError::io("map", path))?;
        let header =
            Header::parse(&map).map_err(|problem| CheckpointError::Safetensors { path: path.to_owned(), problem })?;
        self.files.push(map);
        Ok(header)
    }

    fn add(&mut self, header: Header) {
        let file = self.files.len() - 1;
        let tensors = header.tensors.into_iter();
        self.tensors.extend(tensors.map(|(name, (info, bytes))| (name, Located { info, file, bytes })));
    }
}

/// Which shard holds each tensor, from the bytes of an index; `path` is for errors alone.
pub(crate) fn parse_index(path: &Path, bytes: &[u8]) -> Result<BTreeMap<String, String>, CheckpointError> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: UniqueMap<String>,
    }
    let Index { weight_map: UniqueMap(weight_map) } = parse_json(path, bytes)?;
    for shard in shards(&weight_map) {
        // An index comes from strangers and must not reach other directories. Backslashes and drives count on Windows.
        if shard.is_empty() || shard.starts_with('.') || shard.contains(['/', '\\', ':', '\0']) {
            return Err(CheckpointError::ShardName { index: path.to_owned(), shard: shard.to_owned() });
        }
    }
    Ok(weight_map)
}

/// The shards that an index names, each once.
pub(crate) fn shards(weight_map: &BTreeMap<String, String>) -> BTreeSet<&str> {
    weight_map.values().map(String::as_str).collect()
}

/// The error for a directory whose weights are of a format that is not read.
fn foreign_format(directory: &Path) -> Option<CheckpointError> {
    let names: BTreeSet<String> =
        std::fs::read_dir(directory).ok()?.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
    let find = |matches: &dyn Fn(&str) -> bool| names.iter().find(|name| matches(name)).cloned();
    let foreign = |found, format, conversion| {
        Some(CheckpointError::ForeignFormat { directory: directory.to_owned(), found, format, conversion })
    };
    if let Some(found) = find(&|name| name.starts_with("pytorch_model") && name.ends_with(".bin")) {
        return foreign(
            found,
            "a pickle of PyTorch",
            "python -c 'import torch, safetensors.torch as s; w = torch.load(\"pytorch_model.bin\", \
             map_location=\"cpu\", weights_only=True); s.save_file({k: v.clone().contiguous() for k, v in w.items()}, \
             \"model.safetensors\", metadata={\"format\": \"pt\"})'",
        );
    }
    if let Some(found) = find(&|name| name.contains(".ckpt") || name == "tf_model.h5") {
        return foreign(
            found,
            "a checkpoint of TensorFlow",
            "with transformers 4 and TensorFlow installed, BertForPreTraining.from_pretrained(DIRECTORY, \
             from_tf=True).save_pretrained(NEW_DIRECTORY)",
        );
    }
    if let Some(found) = find(&|name| name == "flax_model.msgpack") {
        return foreign(
            found,
            "a checkpoint of Flax",
            "with transformers 4 and Flax installed, AutoModel.from_pretrained(DIRECTORY, \
             from_flax=True).save_pretrained(NEW_DIRECTORY)",
        );
    }
    let onnx = |name: &str| name.ends_with(".onnx") || name == "onnx";
    foreign(
        find(&onnx)?,
        "a graph for ONNX Runtime",
        "such a graph does not keep its parameters' names, so start from the checkpoint that it was exported from",
    )
}
