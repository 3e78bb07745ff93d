//! Weights as PyTorch writes them (`torch.save`, pytorch_model.bin): a zip archive with one member per storage, or the older
//! form without zip. A state dict is a pickle that names tensors over storages; both are described in torch/serialization.py.
//!
//! Deliberately not an unpickler: nothing is imported, called or built. The machine in `pickle` knows tensors, storages,
//! ordered dictionaries and plain values; any other global is an error that names it. It never allocates more than a few
//! times what is really in the file, whatever that claims.

mod pickle;
mod zip;

use std::collections::BTreeMap;
use std::ops::Range;

use crate::safetensors::{CHUNK, StoredDType, TensorInfo, for_each_f32};
use pickle::{Input, Pickle, Storage, Value};
use zip::Archive;

/// What older files begin with, as a pickled number of its own.
const MAGIC: i128 = 0x1950_a86a_20f9_469c_fc6c;

/// The version that stands after it.
const LEGACY_PROTOCOL: i64 = 1001;

/// Under these keys training scripts keep a state dict among other things.
const WRAPPERS: [&str; 4] = ["state_dict", "model_state_dict", "model", "module"];

/// How often a state dict may be wrapped.
const WRAPPER_LIMIT: usize = 4;

/// Why a file of PyTorch cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TorchError {
    /// It begins and ends like no file of `torch.save`.
    #[error(
        "it is neither a zip archive nor an older file of torch.save: fetch it again (a small text file in its place is a \
         pointer of Git LFS)"
    )]
    NotTorch,
    /// The file ends too early.
    #[error("it is cut short: {what} should end at byte {end}, but it has {size}; fetch it again")]
    Cut {
        /// What is not all there.
        what: String,
        /// Where it should end.
        end: u64,
        /// The bytes of the file.
        size: u64,
    },
    /// Something that only running Python could give.
    #[error(
        "it wants to call {name} of Python, and nothing in a file is run here; if you trust where it comes from, make a \
         model.safetensors of it: {CONVERSION}"
    )]
    Global {
        /// Module and name.
        name: String,
    },
    /// A pickle that uses more of Python than state dicts do.
    #[error(
        "its pickle has {what} at byte {at}, which state dicts do not have, and nothing in a file is run here; if you trust \
         where it comes from, make a model.safetensors of it: {CONVERSION}"
    )]
    Unsupported {
        /// What is not known.
        what: String,
        /// Where.
        at: u64,
    },
    /// A pickle that contradicts itself.
    #[error("its pickle is wrong at byte {at}: {problem}; fetch it again")]
    Pickle {
        /// Where.
        at: u64,
        /// What is wrong there.
        problem: &'static str,
    },
    /// There is more of something than any real file has.
    #[error("it has more than {limit} {what}, too many for a file of weights: is it the right file?")]
    Limit {
        /// What is counted.
        what: &'static str,
        /// The most that are read.
        limit: u64,
    },
    /// The archive contradicts itself.
    #[error("its archive is wrong: {problem}; fetch it again")]
    Archive {
        /// What is wrong.
        problem: String,
    },
    /// A member of the archive cannot be used.
    #[error("its member {name} {problem}")]
    Member {
        /// The member.
        name: String,
        /// Why not.
        problem: String,
    },
    /// The numbers are stored with the highest byte first.
    #[error(
        "its numbers are stored as {order}-endian; only little-endian files are read: save it again on such a machine"
    )]
    ByteOrder {
        /// What the file says.
        order: String,
    },
    /// The file holds something else than a state dict.
    #[error("it holds {found} instead of a state dict: save model.state_dict(), or make a model.safetensors of it")]
    NoStateDict {
        /// What it holds.
        found: String,
    },
    /// A tensor does not fit its storage, or is none that can be read.
    #[error("its tensor {name} {problem}")]
    Tensor {
        /// The tensor.
        name: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The file could not be read.
    #[error(transparent)]
    Read(#[from] Box<crate::CheckpointError>),
}

/// What makes safetensors of a file that is not read here. PyTorch itself knows more kinds of tensors without running anything.
pub(crate) const CONVERSION: &str = "python -c 'import torch, safetensors.torch as s; w = torch.load(\"pytorch_model.bin\", \
     map_location=\"cpu\", weights_only=True); s.save_file({k: v.clone().contiguous() for k, v in w.items()}, \
     \"model.safetensors\", metadata={\"format\": \"pt\"})'";

/// What is said of bytes that have changed since they were written.
pub(crate) const DAMAGED: &str = "has another checksum than was written; fetch the file again";

/// A file or bytes in memory.
pub(crate) trait Bytes {
    fn size(&self) -> u64;

    /// Reads bytes that lie within the size.
    fn read_exact(&self, at: u64, bytes: &mut [u8]) -> Result<(), TorchError>;
}

/// What a file holds.
#[derive(Debug, Default)]
pub(crate) struct Contents {
    pub(crate) tensors: BTreeMap<String, Tensor>,
    /// Keys of the state dict with something else than a tensor.
    pub(crate) others: Vec<String>,
}

/// A tensor in a file, found to lie within it.
#[derive(Debug)]
pub(crate) struct Tensor {
    pub(crate) info: TensorInfo,
    /// From its first number to its last in the file.
    pub(crate) bytes: Range<usize>,
    /// How far apart the neighbours of each dimension are, where the numbers do not lie in the order of the shape.
    pub(crate) strides: Option<Vec<usize>>,
    /// The checksum of these bytes, where they have one: tensors that are all of their storage.
    pub(crate) crc: Option<u32>,
}

/// Where a storage's numbers are.
struct Stored {
    bytes: Range<u64>,
    crc: Option<u32>,
}

/// Reads what a file holds; numbers are left where they are.
pub(crate) fn read(bytes: &dyn Bytes) -> Result<Contents, TorchError> {
    let mut start = [0; 4];
    if bytes.size() < start.len() as u64 {
        return Err(TorchError::NotTorch);
    }
    bytes.read_exact(0, &mut start)?;
    match start {
        zip::LOCAL_SIGNATURE => read_zip(bytes),
        // A pickle of protocol 2 that begins with a long number.
        [0x80, 2, 0x8a, _] => read_legacy(bytes),
        _ => Err(TorchError::NotTorch),
    }
}

/// Puts the numbers of a tensor with strides into the order of its shape, part by part; `numbers` has all from its first to
/// its last.
pub(crate) fn for_each_in_order(shape: &[usize], strides: &[usize], numbers: &[f32], mut each: impl FnMut(&[f32])) {
    let elements: usize = shape.iter().product();
    let mut position = vec![0; shape.len()];
    let (mut at, mut part) = (0, Vec::with_capacity(elements.min(CHUNK)));
    for _ in 0..elements {
        part.push(numbers[at]);
        if part.len() == CHUNK {
            each(&part);
            part.clear();
        }
        for dimension in (0..shape.len()).rev() {
            position[dimension] += 1;
            at += strides[dimension];
            if position[dimension] < shape[dimension] {
                break;
            }
            at -= strides[dimension] * shape[dimension];
            position[dimension] = 0;
        }
    }
    each(&part);
}

/// The numbers of a tensor with strides, given its bytes.
pub(crate) fn for_each_strided(info: &TensorInfo, strides: &[usize], bytes: &[u8], each: impl FnMut(&[f32])) {
    let mut numbers = Vec::with_capacity(bytes.len() * 8 / info.dtype.bits());
    if for_each_f32(info.dtype, bytes, |chunk| numbers.extend_from_slice(chunk)) {
        for_each_in_order(&info.shape, strides, &numbers, each);
    }
}

fn read_zip(bytes: &dyn Bytes) -> Result<Contents, TorchError> {
    let archive = Archive::open(bytes)?;
    let names: Vec<&str> = archive.names().filter(|name| *name == "data.pkl" || name.ends_with("/data.pkl")).collect();
    let [pickle_name] = names[..] else {
        let problem = format!("it has {} members called data.pkl, and a file of torch.save has one", names.len());
        return Err(TorchError::Archive { problem });
    };
    let folder = pickle_name.strip_suffix("data.pkl").unwrap_or_default().to_owned();
    // Missing in files of older versions, which were written on little-endian machines.
    let byte_order = format!("{folder}byteorder");
    if archive.has(&byte_order) {
        let order = archive.read_small(&byte_order)?;
        if order != b"little" {
            return Err(TorchError::ByteOrder { order: zip::shown(&String::from_utf8_lossy(&order)) });
        }
    }
    let member = archive.checked(pickle_name, pickle::PICKLE_LIMIT)?;
    let pickle = Pickle::read(&mut Input::new(bytes, member.bytes))?;

    let mut used = vec![member.extent];
    let mut storages = BTreeMap::new();
    for (key, storage) in by_key(&pickle)? {
        let name = format!("{folder}data/{key}");
        let member = archive.member(&name)?;
        let expected = size_of(storage);
        let found = member.bytes.end - member.bytes.start;
        if expected != Some(found) {
            let Storage { elements, dtype, .. } = storage;
            let problem =
                format!("has {found} bytes, not those of {elements} numbers of {dtype}; fetch the file again");
            return Err(TorchError::Member { name: zip::shown(&name), problem });
        }
        used.push(member.extent);
        storages.insert(key, Stored { bytes: member.bytes, crc: member.crc });
    }
    zip::refuse_overlaps(used)?;
    contents(&pickle, &storages)
}

/// Magic number, version, what machine wrote it, the object, the keys of its storages; then for each its count and numbers.
fn read_legacy(bytes: &dyn Bytes) -> Result<Contents, TorchError> {
    let mut input = Input::new(bytes, 0..bytes.size());
    if !matches!(Pickle::read(&mut input)?.root, Value::Magic) {
        return Err(TorchError::NotTorch);
    }
    let at = input.position();
    if !matches!(Pickle::read(&mut input)?.root, Value::Int(LEGACY_PROTOCOL)) {
        return Err(TorchError::Unsupported { what: "another version than 1001".to_owned(), at });
    }
    let machine = Pickle::read(&mut input)?;
    let little = machine
        .entries(machine.root)
        .into_iter()
        .flatten()
        .find(|(key, _)| machine.text(*key) == Some("little_endian"));
    if !matches!(little, Some((_, Value::Bool(true)))) {
        return Err(TorchError::ByteOrder { order: "not little".to_owned() });
    }
    let pickle = Pickle::read(&mut input)?;
    let at = input.position();
    let keys = Pickle::read(&mut input)?;
    let by_key = by_key(&pickle)?;
    let mut storages = BTreeMap::new();
    let mut place = input.position();
    for key in keys.items(keys.root).unwrap_or_default() {
        let wrong = |problem| TorchError::Pickle { at, problem };
        let key = keys.text(*key).ok_or_else(|| wrong("the key of a storage is not a string"))?;
        let (key, storage) = by_key.get_key_value(key).ok_or_else(|| wrong("a storage belongs to nothing"))?;
        let cut = |end| TorchError::Cut { what: format!("storage {}", zip::shown(key)), end, size: bytes.size() };
        let end = size_of(*storage).and_then(|size| place.checked_add(8)?.checked_add(size)).unwrap_or(u64::MAX);
        if end > bytes.size() {
            return Err(cut(end));
        }
        let mut count = [0; 8];
        bytes.read_exact(place, &mut count)?;
        if u64::from_le_bytes(count) != storage.elements {
            return Err(wrong("a storage has another number of elements than its tensors know of"));
        }
        if storages.insert(*key, Stored { bytes: place + 8..end, crc: None }).is_some() {
            return Err(wrong("a storage is there twice"));
        }
        place = end;
    }
    if place < bytes.size() {
        let problem = format!("{} bytes follow after the last storage", bytes.size() - place);
        return Err(TorchError::Archive { problem });
    }
    contents(&pickle, &storages)
}

/// A pickle's storages by their keys.
fn by_key(pickle: &Pickle) -> Result<BTreeMap<&str, Storage>, TorchError> {
    let mut storages = BTreeMap::new();
    for storage in &pickle.storages {
        let key = pickle.text(storage.key).unwrap_or_default();
        match storages.insert(key, *storage) {
            Some(other) if (other.dtype, other.elements) != (storage.dtype, storage.elements) => {
                let key = zip::shown(key);
                let problem = format!("storage {key} is described in two different ways; fetch the file again");
                return Err(TorchError::Archive { problem });
            }
            _ => {}
        }
    }
    Ok(storages)
}

fn size_of(storage: Storage) -> Option<u64> {
    // Storages hold whole bytes: half a byte has no class in PyTorch.
    storage.elements.checked_mul(storage.dtype.bits() as u64 / 8)
}

/// The state dict's tensors, each within its storage.
fn contents(pickle: &Pickle, storages: &BTreeMap<&str, Stored>) -> Result<Contents, TorchError> {
    let mut contents = Contents::default();
    for (key, value) in state_dict(pickle)? {
        let Some(name) = pickle.text(*key) else {
            return Err(TorchError::NoStateDict { found: "a dictionary whose keys are not strings".to_owned() });
        };
        let Value::Tensor(tensor) = value else {
            contents.others.push(name.to_owned());
            continue;
        };
        let tensor = &pickle.tensors[*tensor];
        let storage = pickle.storages[tensor.storage];
        let wrong = |problem: &str| TorchError::Tensor { name: zip::shown(name), problem: problem.to_owned() };
        let Some(stored) = pickle.text(storage.key).and_then(|key| storages.get(key)) else {
            return Err(wrong("has a storage that is not in the file; fetch the file again"));
        };
        let Some(numbers) = extent(tensor).filter(|numbers| numbers.end <= storage.elements) else {
            return Err(wrong("lies outside of its storage; fetch the file again"));
        };
        let elements = tensor.shape.iter().product::<usize>() as u64;
        if elements > storage.elements {
            return Err(wrong(
                "repeats numbers of a smaller storage (it was expanded); save a copy of it: tensor.clone()",
            ));
        }
        let size = storage.dtype.bits() as u64 / 8;
        let bytes = stored.bytes.start + numbers.start * size..stored.bytes.start + numbers.end * size;
        let crc = stored.crc.filter(|_| bytes == stored.bytes);
        let strides = (!is_in_order(&tensor.shape, &tensor.strides)).then(|| tensor.strides.clone());
        let info = TensorInfo { dtype: storage.dtype, shape: tensor.shape.clone() };
        let bytes = bytes.start as usize..bytes.end as usize;
        if contents.tensors.insert(name.to_owned(), Tensor { info, bytes, strides, crc }).is_some() {
            return Err(wrong("is there twice"));
        }
    }
    Ok(contents)
}

/// The entries of the state dict, which may lie in other dictionaries.
fn state_dict(pickle: &Pickle) -> Result<&[(Value, Value)], TorchError> {
    let mut value = pickle.root;
    for _ in 0..=WRAPPER_LIMIT {
        let Some(entries) = pickle.entries(value) else {
            return Err(TorchError::NoStateDict { found: value.kind().to_owned() });
        };
        let is_wrapped = |(key, value): &&(Value, Value)| {
            pickle.text(*key).is_some_and(|key| WRAPPERS.contains(&key)) && matches!(value, Value::Dict(_))
        };
        let wrapped: Vec<&(Value, Value)> = entries.iter().filter(is_wrapped).collect();
        match wrapped[..] {
            [] if entries.is_empty() || entries.iter().any(|(_, value)| matches!(value, Value::Tensor(_))) => {
                return Ok(entries);
            }
            [] => {
                let keys: Vec<&str> = entries.iter().filter_map(|(key, _)| pickle.text(*key)).take(5).collect();
                return Err(TorchError::NoStateDict {
                    found: format!("no tensors, but {}", zip::shown(&keys.join(", "))),
                });
            }
            [(_, inner)] => value = *inner,
            _ => {
                let keys: Vec<&str> = wrapped.iter().filter_map(|(key, _)| pickle.text(*key)).collect();
                return Err(TorchError::NoStateDict { found: format!("several ({})", keys.join(", ")) });
            }
        }
    }
    Err(TorchError::NoStateDict { found: "dictionaries in dictionaries".to_owned() })
}

/// The numbers of a storage from a tensor's first to its last.
fn extent(tensor: &pickle::Tensor) -> Option<Range<u64>> {
    let start = tensor.offset;
    // Without overflow, so that the product is one number for everybody.
    let elements = tensor.shape.iter().try_fold(1usize, |all, size| all.checked_mul(*size))?;
    if elements == 0 {
        return Some(start..start);
    }
    let mut last = start;
    for (size, stride) in tensor.shape.iter().zip(&tensor.strides) {
        last = last.checked_add((*size as u64 - 1).checked_mul(*stride as u64)?)?;
    }
    Some(start..last.checked_add(1)?)
}

/// Whether numbers lie in the order of the shape, without gaps.
fn is_in_order(shape: &[usize], strides: &[usize]) -> bool {
    let mut expected = 1;
    shape.contains(&0)
        || shape.iter().zip(strides).rev().all(|(size, stride)| {
            let fits = *size == 1 || *stride == expected;
            expected *= size;
            fits
        })
}

/// Storage classes by their names in `torch`.
fn storage_dtype(class: &str) -> Option<StoredDType> {
    Some(match class {
        "FloatStorage" => StoredDType::F32,
        "HalfStorage" => StoredDType::F16,
        "BFloat16Storage" => StoredDType::Bf16,
        "DoubleStorage" => StoredDType::F64,
        "LongStorage" => StoredDType::I64,
        "IntStorage" => StoredDType::I32,
        "ShortStorage" => StoredDType::I16,
        "CharStorage" => StoredDType::I8,
        "ByteStorage" => StoredDType::U8,
        "BoolStorage" => StoredDType::Bool,
        _ => return None,
    })
}
