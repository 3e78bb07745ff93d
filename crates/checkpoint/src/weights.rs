//! The weights of a model directory: one file, or shards with an index; safetensors, or else what PyTorch writes, or what the authors of
//! a family published.
//!
//! Opening reads and checks what stands beside the numbers; they are read when they are asked for, with positioned reads. Nothing is mapped
//! into memory: a file that is cut while it is open gives an error and no signal. Which parameter a tensor belongs to is not
//! known here: that is [`crate::load()`].

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::hash::Hasher;
use std::io::ErrorKind;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use henson_models::{Arrays, ORIGINALS, Original};
use serde::Deserialize;
use twox_hash::XxHash3_64;

use crate::directory::{open_regular, parse_json, read_limited};
use crate::hdf5::{self, Hdf5Error};
use crate::safetensors::{Header, LENGTH, StoredDType, TensorInfo, UniqueMap, for_each_f32};
use crate::sums::{self, Sums};
use crate::torch::{self, TorchError, for_each_strided};
use crate::{CheckpointError, atomic};

/// A format of weights, with the names of its files in a model directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    Safetensors,
    Torch,
}

impl Format {
    /// The first that is there is taken.
    pub(crate) const ALL: [Self; 2] = [Self::Safetensors, Self::Torch];

    pub(crate) fn single_file(self) -> &'static str {
        match self {
            Self::Safetensors => SINGLE_FILE,
            Self::Torch => "pytorch_model.bin",
        }
    }

    pub(crate) fn index_file(self) -> &'static str {
        match self {
            Self::Safetensors => INDEX_FILE,
            Self::Torch => "pytorch_model.bin.index.json",
        }
    }
}

pub(crate) const SINGLE_FILE: &str = "model.safetensors";
pub(crate) const INDEX_FILE: &str = "model.safetensors.index.json";

/// The largest index that is read: about half a million tensors.
pub(crate) const INDEX_LIMIT: u64 = 64 << 20;

/// Bytes that are read at once: few calls of the system, and still in the cache when they are converted. Numbers of all
/// sizes fill it evenly.
const PART: usize = 1 << 17;

/// Tensors by name.
///
/// The files should not be changed in place while they are open; [`Weights::verify`] notices it. [`crate::save()`] never
/// does: it writes new files and renames them, and open ones stay what they were.
#[derive(Debug)]
pub struct Weights {
    path: PathBuf,
    files: Vec<Source>,
    tensors: BTreeMap<String, Located>,
    /// Keys of state dicts with something else than a tensor.
    others: Vec<String>,
}

/// An open file.
#[derive(Debug)]
struct Source {
    path: PathBuf,
    file: File,
    size: u64,
    /// When it was last written to before it was opened.
    modified: (i64, i64),
    /// The length of what comes before all numbers.
    start: u64,
    reading: Mutex<Reading>,
}

#[derive(Debug, Default)]
struct Reading {
    buffer: Vec<u8>,
    check: Option<Check>,
}

/// A checksum that is taken while the file is read, as far as that is done in the order of its bytes.
struct Check {
    expected: String,
    hash: XxHash3_64,
    hashed: u64,
}

impl std::fmt::Debug for Check {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} of {} bytes", self.expected, self.hashed)
    }
}

#[derive(Debug)]
struct Located {
    info: TensorInfo,
    file: usize,
    bytes: Range<usize>,
    /// Where the numbers do not lie in the order of the shape.
    strides: Option<Vec<usize>>,
    /// The CRC-32 of the bytes, where the file has it.
    crc: Option<u32>,
    /// The numbers, where the file has them in another form.
    converted: Option<Vec<f32>>,
}

impl Weights {
    /// Opens a model directory's `model.safetensors`, or else the shards of its `model.safetensors.index.json`, or else
    /// `pytorch_model.bin` or the shards of its index, of which nothing is executed.
    pub fn open(directory: &Path) -> Result<Self, CheckpointError> {
        atomic::recover(directory)?;
        let metadata = std::fs::metadata(directory).map_err(CheckpointError::io("open", directory))?;
        if !metadata.is_dir() {
            return Err(CheckpointError::NotADirectory { path: directory.to_owned() });
        }
        for format in Format::ALL {
            if directory.join(format.single_file()).exists() {
                let mut weights = Self::open_single(&directory.join(format.single_file()), format)?;
                weights.path = directory.to_owned();
                return Ok(weights);
            }
            if directory.join(format.index_file()).exists() {
                return Self::open_shards(directory, format);
            }
        }
        if let Some((original, path)) = original_weights(directory)? {
            return Self::open_original(directory, original, &path);
        }
        Err(foreign_format(directory).unwrap_or(CheckpointError::NoWeights { directory: directory.to_owned() }))
    }

    /// Opens one safetensors file.
    pub fn open_file(path: &Path) -> Result<Self, CheckpointError> {
        Self::open_single(path, Format::Safetensors)
    }

    /// Compares the files with the checksums that were noted when they were written, while they are read;
    /// [`Weights::verify`] gives the result.
    pub fn expect(&mut self, sums: &Sums) -> Result<(), CheckpointError> {
        for source in &mut self.files {
            let name = source.path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let Some(expected) = sums.get(name).map(str::to_owned) else { continue };
            let check = Check { expected, hash: XxHash3_64::new(), hashed: 0 };
            source.reading.get_mut().unwrap_or_else(PoisonError::into_inner).check = Some(check);
            source.read(0..source.start, |_| {})?;
        }
        Ok(())
    }

    /// Adds the tensors of other files, with something in front of their names.
    pub fn attach(&mut self, prefix: &str, other: Self) {
        let files = self.files.len();
        self.files.extend(other.files);
        let moved = other.tensors.into_iter();
        let moved =
            moved.map(|(name, located)| (prefix.to_owned() + &name, Located { file: files + located.file, ..located }));
        self.tensors.extend(moved);
    }

    /// Whether all files are still what they were when they were opened, and have the checksums that were expected. Reads
    /// what was not read yet, or not in the order of the file.
    pub fn verify(&self) -> Result<(), CheckpointError> {
        self.files.iter().try_for_each(Source::verify)
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

    /// Keys of a state dict under which there is something else than a tensor.
    pub(crate) fn others(&self) -> &[String] {
        &self.others
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
    pub(crate) fn for_each(&self, name: &str, mut each: impl FnMut(&[f32])) -> Result<(), CheckpointError> {
        let Some(located) = self.tensors.get(name) else {
            return Err(CheckpointError::NoTensor { path: self.path.clone(), name: name.to_owned() });
        };
        if let Some(numbers) = &located.converted {
            each(numbers);
            return Ok(());
        }
        let dtype = located.info.dtype;
        if !dtype.is_readable() {
            return Err(CheckpointError::NotFloat { path: self.path.clone(), name: name.to_owned(), dtype });
        }
        let bytes = located.bytes.start as u64..located.bytes.end as u64;
        let source = &self.files[located.file];
        let mut hash = located.crc.map(|_| crc32fast::Hasher::new());
        let mut sum = |part: &[u8]| hash.iter_mut().for_each(|hash| hash.update(part));
        match &located.strides {
            None => source.read(bytes, |part| {
                sum(part);
                for_each_f32(dtype, part, &mut each);
            })?,
            Some(strides) => {
                // Within the file, so that this is bounded by it.
                let mut all = Vec::with_capacity(located.bytes.len());
                source.read(bytes, |part| {
                    sum(part);
                    all.extend_from_slice(part);
                })?;
                for_each_strided(&located.info, strides, &all, &mut each);
            }
        }
        match hash.map(crc32fast::Hasher::finalize) == located.crc {
            true => Ok(()),
            false => {
                let problem = TorchError::Tensor { name: name.to_owned(), problem: torch::DAMAGED.to_owned() };
                Err(CheckpointError::Torch { path: source.path.clone(), problem })
            }
        }
    }

    /// Where a tensor's numbers lie: to read all tensors in the order of the files.
    pub(crate) fn place(&self, name: &str) -> Option<(usize, usize)> {
        self.tensors.get(name).map(|located| (located.file, located.bytes.start))
    }

    fn empty(path: &Path) -> Self {
        Self { path: path.to_owned(), files: Vec::new(), tensors: BTreeMap::new(), others: Vec::new() }
    }

    fn open_single(path: &Path, format: Format) -> Result<Self, CheckpointError> {
        let mut weights = Self::empty(path);
        let tensors = weights.read_header(path, format)?;
        weights.tensors.extend(tensors);
        Ok(weights)
    }

    fn open_shards(directory: &Path, format: Format) -> Result<Self, CheckpointError> {
        let index = directory.join(format.index_file());
        let weight_map = parse_index(&index, &read_limited(&index, INDEX_LIMIT)?)?;
        let mut weights = Self::empty(directory);
        for shard in shards(&weight_map) {
            let path = directory.join(shard);
            if !path.exists() {
                return Err(CheckpointError::MissingShard { index, shard: shard.to_owned() });
            }
            let tensors = weights.read_header(&path, format)?;
            let mismatch =
                |problem| CheckpointError::IndexMismatch { index: index.clone(), shard: shard.to_owned(), problem };
            for name in tensors.keys() {
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
                if !tensors.contains_key(name) {
                    return Err(mismatch(format!("the index has {name} in this shard, the shard does not hold it")));
                }
            }
            weights.tensors.extend(tensors);
        }
        Ok(weights)
    }

    /// Reads the arrays of a model as its authors published it, all at once, because their form is another.
    fn open_original(directory: &Path, original: &Original, path: &Path) -> Result<Self, CheckpointError> {
        let mut weights = Self::empty(directory);
        let source = Source::open(path)?;
        let wrong = |problem| CheckpointError::Hdf5 { path: path.to_owned(), problem };
        let unread = |error| match error {
            Hdf5Error::Read(error) => *error,
            problem => wrong(problem),
        };
        let mut arrays = Arrays::new();
        for (name, hdf5::Array { shape, bytes }) in hdf5::read(&source).map_err(unread)? {
            // Within the file, so that this is bounded by it.
            let mut numbers = Vec::with_capacity(shape.iter().product());
            source.read(bytes, |part| {
                for_each_f32(StoredDType::F32, part, |some| numbers.extend_from_slice(some));
            })?;
            arrays.insert(name, (shape, numbers));
        }
        let converted = (original.convert)(arrays)
            .map_err(|problem| CheckpointError::Original { path: path.to_owned(), problem })?;
        weights.tensors = converted
            .into_iter()
            .map(|(name, (shape, numbers))| {
                let info = TensorInfo { dtype: StoredDType::F32, shape };
                (name, Located { info, file: 0, bytes: 0..0, strides: None, crc: None, converted: Some(numbers) })
            })
            .collect();
        weights.files.push(source);
        Ok(weights)
    }

    /// Opens one more file; its tensors are not added yet.
    fn read_header(&mut self, path: &Path, format: Format) -> Result<BTreeMap<String, Located>, CheckpointError> {
        let mut source = Source::open(path)?;
        let file = self.files.len();
        let tensors = match format {
            Format::Safetensors => source.read_safetensors(file)?,
            Format::Torch => {
                let (tensors, others) = source.read_torch(file)?;
                self.others.extend(others);
                tensors
            }
        };
        self.files.push(source);
        Ok(tensors)
    }
}

impl Source {
    fn open(path: &Path) -> Result<Self, CheckpointError> {
        let file = open_regular(path, "open")?;
        let metadata = file.metadata().map_err(CheckpointError::io("open", path))?;
        let (size, modified) = (metadata.len(), (metadata.mtime(), metadata.mtime_nsec()));
        Ok(Self { path: path.to_owned(), file, size, modified, start: 0, reading: Mutex::default() })
    }

    /// The tensors of a safetensors file, which becomes the file of this number.
    fn read_safetensors(&mut self, file: usize) -> Result<BTreeMap<String, Located>, CheckpointError> {
        let size = self.size;
        let wrong = |problem| CheckpointError::Safetensors { path: self.path.clone(), problem };
        let mut start = [0; LENGTH];
        let start = &mut start[..size.min(LENGTH as u64) as usize];
        self.read_exact(0, start)?;
        let length = Header::length(start, size as usize).map_err(wrong)?;
        let mut bytes = vec![0; length];
        self.read_exact(LENGTH as u64, &mut bytes)?;
        let header = Header::parse_json(&bytes, size as usize).map_err(wrong)?;
        self.start = (LENGTH + length) as u64;
        let located = |(info, bytes)| Located { info, file, bytes, strides: None, crc: None, converted: None };
        Ok(header.tensors.into_iter().map(|(name, tensor)| (name, located(tensor))).collect())
    }

    /// The tensors of a file of PyTorch, and the keys of what else is in its state dict.
    fn read_torch(&self, file: usize) -> Result<(BTreeMap<String, Located>, Vec<String>), CheckpointError> {
        let contents = torch::read(self).map_err(|problem| match problem {
            TorchError::Read(error) => *error,
            problem => CheckpointError::Torch { path: self.path.clone(), problem },
        })?;
        let located =
            |torch::Tensor { info, bytes, strides, crc }| Located { info, file, bytes, strides, crc, converted: None };
        let tensors = contents.tensors.into_iter().map(|(name, tensor)| (name, located(tensor))).collect();
        Ok((tensors, contents.others))
    }

    /// Reads bytes part by part.
    fn read(&self, bytes: Range<u64>, mut each: impl FnMut(&[u8])) -> Result<(), CheckpointError> {
        let mut reading = self.reading.lock().unwrap_or_else(PoisonError::into_inner);
        let Reading { buffer, check } = &mut *reading;
        buffer.resize(PART, 0);
        let mut at = bytes.start;
        while at < bytes.end {
            let part = &mut buffer[..(bytes.end - at).min(PART as u64) as usize];
            self.read_exact(at, part)?;
            if let Some(check) = check.as_mut().filter(|check| check.hashed == at) {
                check.hash.write(part);
                check.hashed += part.len() as u64;
            }
            each(part);
            at += part.len() as u64;
        }
        Ok(())
    }

    fn read_exact(&self, at: u64, bytes: &mut [u8]) -> Result<(), CheckpointError> {
        self.file.read_exact_at(bytes, at).map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof => CheckpointError::Changed { path: self.path.clone() },
            _ => CheckpointError::io("read", &self.path)(error),
        })
    }

    fn verify(&self) -> Result<(), CheckpointError> {
        let hashed = |reading: &Mutex<Reading>| {
            let reading = reading.lock().unwrap_or_else(PoisonError::into_inner);
            reading.check.as_ref().map(|check| check.hashed)
        };
        if let Some(hashed) = hashed(&self.reading) {
            self.read(hashed..self.size, |_| {})?;
        }
        if let Some(check) = &self.reading.lock().unwrap_or_else(PoisonError::into_inner).check {
            sums::compare(&self.path, &check.expected, &check.hash)?;
        }
        let metadata = self.file.metadata().map_err(CheckpointError::io("read", &self.path))?;
        match (metadata.len(), (metadata.mtime(), metadata.mtime_nsec())) == (self.size, self.modified) {
            true => Ok(()),
            false => Err(CheckpointError::Changed { path: self.path.clone() }),
        }
    }
}

impl torch::Bytes for Source {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_exact(&self, at: u64, bytes: &mut [u8]) -> Result<(), TorchError> {
        Ok(Source::read_exact(self, at, bytes).map_err(Box::new)?)
    }
}

impl hdf5::Bytes for Source {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_exact(&self, at: u64, bytes: &mut [u8]) -> Result<(), Hdf5Error> {
        Ok(Source::read_exact(self, at, bytes).map_err(Box::new)?)
    }
}

/// The authors' weights in a directory, if they are what it has: those of the one file with the right ending.
fn original_weights(directory: &Path) -> Result<Option<(&'static Original, PathBuf)>, CheckpointError> {
    for original in ORIGINALS.iter().filter(|original| directory.join(original.config).is_file()) {
        let names = std::fs::read_dir(directory).map_err(CheckpointError::io("read", directory))?;
        let mut found: Vec<PathBuf> = names
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| path.to_str().is_some_and(|name| name.ends_with(original.weights)))
            .collect();
        found.sort();
        match &found[..] {
            [] => {}
            [path] => return Ok(Some((original, path.clone()))),
            [path, ..] => {
                let problem = format!("{} files here end like that: keep one of them", found.len());
                return Err(CheckpointError::Original { path: path.clone(), problem });
            }
        }
    }
    Ok(None)
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
    for (format, start, end) in
        [(Format::Safetensors, "model-", ".safetensors"), (Format::Torch, "pytorch_model-", ".bin")]
    {
        if let Some(shard) = find(&|name| name.starts_with(start) && name.contains("-of-") && name.ends_with(end)) {
            let index = format.index_file();
            return Some(CheckpointError::NoIndex { directory: directory.to_owned(), shard, index });
        }
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
