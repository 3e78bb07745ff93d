//! A model directory out: config.json, the weights and the files that belong to them, all at once or not at all.
//!
//! Equal weights give equal bytes: tensors are sorted by name, and nothing depends on time, machine or insertion order.
//! Weights are streamed tensor by tensor; there is never a second copy of all of them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use henson_tensor::{Entry, Group, Parameters};
use serde_json::{Value, json};

use crate::CheckpointError;
use crate::atomic::{Existing, Staging, is_plain, is_weights};
use crate::safetensors::{self, SaveDType};
use crate::sums::Sums;
use crate::weights::{INDEX_FILE, SINGLE_FILE};

/// How a model is saved.
#[derive(Clone, Debug)]
pub struct SaveOptions {
    /// What to do when the destination is there already.
    pub existing: Existing,
    /// Weights beyond this many bytes are divided among several files. A tensor larger than this has one of its own.
    pub shard_size: u64,
    /// Save weights that are not finite. They cannot be loaded again without asking for it, so the default is to refuse
    /// and to leave what was there before.
    pub allow_non_finite: bool,
}

impl Default for SaveOptions {
    /// Refuses an existing destination and numbers that are not finite; 5 GB a file, as in `transformers`.
    fn default() -> Self {
        Self { existing: Existing::Refuse, shard_size: 5_000_000_000, allow_non_finite: false }
    }
}

/// A further file of f32 tensors beside a model, such as an optimizer's moments.
pub struct TensorFile<'a> {
    /// The file's name.
    pub name: &'a str,
    /// The tensors, by name and shape.
    pub tensors: Vec<(String, Vec<usize>)>,
    /// Gives the numbers of one of them, by its place in the list.
    pub read: &'a dyn Fn(usize) -> henson_tensor::Result<Vec<f32>>,
}

/// Makes a file from the checksums of all others.
pub type LastFile<'a> = &'a dyn Fn(&Sums) -> Vec<u8>;

/// What a parameter is called in a model, where it is one of its own.
pub type NameOf<'a> = &'a dyn Fn(&Entry) -> Option<String>;

/// A further model in a directory of its own within another's, whose parameters lie in the same buffer. It gets the same files.
pub struct ModelBeside<'a> {
    /// The directory.
    pub directory: &'a str,
    /// Its config.
    pub config: &'a Value,
    /// Its parameters, by the names that they have there.
    pub name: NameOf<'a>,
}

/// Further files beside a model.
#[derive(Default)]
pub struct Beside<'a> {
    /// The model's own parameters, where not all are.
    pub own: Option<NameOf<'a>>,
    /// Further models.
    pub models: Vec<ModelBeside<'a>>,
    /// Files of tensors.
    pub tensors: Vec<TensorFile<'a>>,
    /// The name of a file that is written after all others and made from their checksums.
    pub last: Option<(&'a str, LastFile<'a>)>,
}

/// Writes a model directory that `transformers` reads.
///
/// `files` are further files by name, such as those of the tokenizer; a name may have directories in it. The weights'
/// precision is noted in the config as `dtype`.
///
/// Everything is written beside the destination, synced and then renamed: an error, a full disk or a kill leaves what
/// was there before. Where a kill falls between two renames, the next [`Weights::open`](crate::Weights::open),
/// [`ModelDirectory::open`](crate::ModelDirectory::open) or save puts things right. The parent directory is created
/// where it is missing.
pub fn save(
    directory: &Path,
    files: &[(String, Vec<u8>)],
    config: &Value,
    parameters: &Parameters,
    dtype: SaveDType,
    options: &SaveOptions,
) -> Result<(), CheckpointError> {
    save_with(directory, files, &Beside::default(), config, parameters, dtype, options)
}

/// What [`save()`] does, with further files beside the model's.
pub fn save_with(
    directory: &Path,
    files: &[(String, Vec<u8>)],
    beside: &Beside<'_>,
    config: &Value,
    parameters: &Parameters,
    dtype: SaveDType,
    options: &SaveOptions,
) -> Result<(), CheckpointError> {
    check_names(files)?;
    let is_ours = |name: &str| {
        is_model_file(name)
            || files.iter().any(|(file, _)| file.split('/').next() == Some(name))
            || beside.tensors.iter().any(|file| file.name == name)
            || beside.models.iter().any(|model| model.directory == name)
            || beside.last.is_some_and(|(last, _)| last == name)
    };
    let mut staging = Staging::new(directory, options.existing, is_ours)?;
    let mut write_bytes = |name: &str, bytes: &[u8]| staging.write(name, |out, io| out.write_all(bytes).map_err(io));
    write_bytes("config.json", &pretty(&with_dtype(config, dtype)))?;
    for (name, bytes) in files {
        write_bytes(name, bytes)?;
    }
    let all = |entry: &Entry| Some(entry.name.clone());
    write_weights(&mut staging, "", parameters, beside.own.unwrap_or(&all), dtype, options)?;
    for ModelBeside { directory, config, name } in &beside.models {
        let below = format!("{directory}/");
        let mut write_bytes = |name: &str, bytes: &[u8]| {
            staging.write(&(below.clone() + name), |out, io| out.write_all(bytes).map_err(io))
        };
        write_bytes("config.json", &pretty(&with_dtype(config, dtype)))?;
        for (name, bytes) in files {
            write_bytes(name, bytes)?;
        }
        write_weights(&mut staging, &below, parameters, name, dtype, options)?;
    }
    for file in &beside.tensors {
        write_tensors(&mut staging, file, options)?;
    }
    if let Some((name, make)) = beside.last {
        let bytes = make(staging.sums());
        staging.write(name, |out, io| out.write_all(&bytes).map_err(io))?;
    }
    staging.publish()
}

/// Writes a directory of files without a model, such as a tokenizer, with the promises of [`save()`]. Replacing an old
/// one may delete what has the name of a new file or is `replaceable`, and nothing else.
pub fn save_files(
    directory: &Path,
    files: &[(String, Vec<u8>)],
    existing: Existing,
    replaceable: &[&str],
) -> Result<(), CheckpointError> {
    check_names(files)?;
    let is_ours = |name: &str| replaceable.contains(&name) || files.iter().any(|(file, _)| file == name);
    let mut staging = Staging::new(directory, existing, is_ours)?;
    for (name, bytes) in files {
        staging.write(name, |out, io| out.write_all(bytes).map_err(io))?;
    }
    staging.publish()
}

fn write_tensors(staging: &mut Staging, file: &TensorFile<'_>, options: &SaveOptions) -> Result<(), CheckpointError> {
    let dtype = SaveDType::F32;
    staging.write(file.name, |out, io| {
        let tensors = file.tensors.iter().map(|(name, shape)| (name.as_str(), shape.as_slice()));
        out.write_all(&safetensors::header(dtype, tensors)).map_err(io)?;
        for (i, (name, _)) in file.tensors.iter().enumerate() {
            let not_finite = safetensors::write_numbers(out, dtype, &(file.read)(i)?).map_err(io)?;
            if not_finite > 0 && !options.allow_non_finite {
                return Err(not_finite_error(name.clone(), not_finite, dtype));
            }
        }
        Ok(())
    })
}

/// The entries of a shard, by name and by their place in the parameters.
type Shard = Vec<(String, usize)>;

/// Writes those parameters that have a name, into files whose names have `below` in front.
fn write_weights(
    staging: &mut Staging,
    below: &str,
    parameters: &Parameters,
    name: NameOf<'_>,
    dtype: SaveDType,
    options: &SaveOptions,
) -> Result<(), CheckpointError> {
    let shards = plan_shards(parameters, name, dtype, options.shard_size)?;
    let count = shards.len();
    let elements: usize = shards.iter().flatten().map(|(_, entry)| parameters.entries()[*entry].shape.elements()).sum();
    let mut weight_map = BTreeMap::new();
    for (i, shard) in shards.iter().enumerate() {
        let file = match count {
            1 => SINGLE_FILE.to_owned(),
            _ => format!("model-{:05}-of-{count:05}.safetensors", i + 1),
        };
        staging.write(&format!("{below}{file}"), |out, io| {
            let shapes: Vec<_> = shard.iter().map(|(_, i)| parameters.entries()[*i].stored_shape()).collect();
            let entries = shard.iter().zip(&shapes).map(|((name, _), shape)| (name.as_str(), shape.sizes()));
            out.write_all(&safetensors::header(dtype, entries)).map_err(io)?;
            for (name, entry) in shard {
                let numbers = parameters.entries()[*entry].to_stored(parameters.read(*entry)?);
                let not_finite = safetensors::write_numbers(out, dtype, &numbers).map_err(io)?;
                if not_finite > 0 && !options.allow_non_finite {
                    return Err(not_finite_error(name.clone(), not_finite, dtype));
                }
            }
            Ok(())
        })?;
        weight_map.extend(shard.iter().map(|(name, _)| (name.as_str(), file.clone())));
    }
    if count > 1 {
        let index = json!({
            "metadata": {
                "total_parameters": elements,
                "total_size": elements * dtype.bytes(),
            },
            "weight_map": weight_map,
        });
        staging.write(&format!("{below}{INDEX_FILE}"), |out, io| out.write_all(&pretty(&index)).map_err(io))?;
    }
    Ok(())
}

/// Divides the entries of a model, sorted by name, among files: each is filled in turn up to the size. What an objective alone
/// needs is no part of a model.
fn plan_shards(
    parameters: &Parameters,
    name: NameOf<'_>,
    dtype: SaveDType,
    size: u64,
) -> Result<Vec<Shard>, CheckpointError> {
    let entries = parameters.entries();
    let of_model = entries.iter().enumerate().filter(|(_, entry)| entry.group != Group::Objective);
    let mut order: Shard = of_model.filter_map(|(i, entry)| Some((name(entry)?, i))).collect();
    order.sort();
    if let Some(pair) = order.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        let name = pair[0].0.clone();
        return Err(CheckpointError::FileName { name, problem: "two parameters have this name" });
    }
    let mut shards = vec![Shard::new()];
    let mut filled = 0;
    for (name, entry) in order {
        let bytes = (entries[entry].shape.elements() * dtype.bytes()) as u64;
        if filled > 0 && filled + bytes > size {
            shards.push(Shard::new());
            filled = 0;
        }
        filled += bytes;
        if let Some(shard) = shards.last_mut() {
            shard.push((name, entry));
        }
    }
    Ok(shards)
}

fn not_finite_error(name: String, count: usize, dtype: SaveDType) -> CheckpointError {
    let hint = match dtype {
        SaveDType::F16 => "they are NaN, infinite, or beyond the 65504 of f16: save as bf16 or f32",
        _ => "the training has diverged: go back to an earlier checkpoint and lower the learning rate",
    };
    CheckpointError::NotFinite { name, count, dtype: dtype.stored(), hint }
}

fn check_names(files: &[(String, Vec<u8>)]) -> Result<(), CheckpointError> {
    let mut seen = BTreeSet::new();
    for (name, _) in files {
        let problem = if !is_plain(name) {
            "a name must be that of a file within the directory"
        } else if name == "config.json" || name == "manifest.json" || is_weights(name) {
            "that is the name of a file that is written anyway"
        } else if !seen.insert(name) {
            "it is there twice"
        } else {
            continue;
        };
        return Err(CheckpointError::FileName { name: name.clone(), problem });
    }
    Ok(())
}

/// Whether a model directory has such a file or directory: replacing one may delete these and no others.
fn is_model_file(name: &str) -> bool {
    const NAMES: [&str; 16] = [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.txt",
        "vocab.json",
        "merges.txt",
        "sentencepiece.bpe.model",
        "spiece.model",
        "spm.model",
        "tokenizer.model",
        "modules.json",
        "sentence_bert_config.json",
        "config_sentence_transformers.json",
    ];
    // The modules of sentence-transformers: 1_Pooling, 2_Normalize.
    let module = |name: &str| {
        let ending = name.trim_start_matches(|c: char| c.is_ascii_digit());
        ending.len() < name.len() && ending.starts_with('_')
    };
    NAMES.contains(&name) || is_weights(name) || module(name)
}

/// `transformers` loads weights in the precision that the config names, so it must be the one that they have.
fn with_dtype(config: &Value, dtype: SaveDType) -> Value {
    let mut config = config.clone();
    if let Some(fields) = config.as_object_mut() {
        // The name before transformers 4.56.
        fields.remove("torch_dtype");
        let name = match dtype {
            SaveDType::F32 => "float32",
            SaveDType::Bf16 => "bfloat16",
            SaveDType::F16 => "float16",
        };
        fields.insert("dtype".to_owned(), name.into());
    }
    config
}

fn pretty(value: &Value) -> Vec<u8> {
    format!("{value:#}\n").into_bytes()
}
