//! The safetensors format over bytes: eight bytes with the header's length, a JSON header, then the numbers.
//!
//! Deliberately not the `safetensors` crate: that one lets a repeated name win silently, and its errors do not name the
//! tensor. This one accepts what it accepts, less the repeated names. It knows no files, and never allocates more than
//! a small multiple of the bytes that are really there, whatever the header claims.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Write;
use std::marker::PhantomData;
use std::ops::Range;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor};

/// The bytes before the header, which say how long it is.
pub(crate) const LENGTH: usize = 8;

/// The longest header that is read, as in the reference implementation.
pub const HEADER_LIMIT: u64 = 100_000_000;

/// The most dimensions that a tensor may have: more than any framework has, few enough to store without thought.
pub(crate) const DIMENSION_LIMIT: usize = 32;

/// The header's length is rounded up to this, so that the numbers begin aligned for readers that map the file.
const HEADER_ALIGNMENT: usize = 8;

/// Numbers that are converted at once: small enough for the first-level cache.
pub(crate) const CHUNK: usize = 2048;

/// Why bytes are not a safetensors file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// Not even the header's length is there.
    #[error("it has {size} bytes, and a safetensors file has at least 10")]
    TooShort {
        /// How many bytes there are.
        size: usize,
    },
    /// The header's length is absurd, as it is when the file is of another format.
    #[error(
        "it claims a header of {length} bytes, more than the {HEADER_LIMIT} that are allowed: it is not a safetensors file"
    )]
    HeaderTooLong {
        /// The length that it claims.
        length: u64,
    },
    /// The file ends within its header.
    #[error("it is cut short: its header should have {length} bytes, but only {available} are there")]
    HeaderCut {
        /// The header's length.
        length: u64,
        /// The bytes after it.
        available: usize,
    },
    /// The header is not the JSON that it should be.
    #[error("its header is wrong at line {line}, column {column}: {problem}")]
    Header {
        /// The line, from 1.
        line: usize,
        /// The column, from 1.
        column: usize,
        /// What is wrong there.
        problem: String,
    },
    /// A dtype that the format does not have.
    #[error("its tensor {name} has the unknown dtype {dtype:?}")]
    UnknownDType {
        /// The tensor.
        name: String,
        /// What the header says.
        dtype: String,
    },
    /// Dtype and shape do not give the number of bytes that the offsets give.
    #[error("its tensor {name} of {dtype} {shape:?} is at bytes {start}..{end}, which is not its size")]
    Size {
        /// The tensor.
        name: String,
        /// Its dtype.
        dtype: StoredDType,
        /// Its shape.
        shape: Vec<usize>,
        /// Its first byte after the header.
        start: u64,
        /// The byte after its last.
        end: u64,
    },
    /// Tensors overlap or leave a hole.
    #[error(
        "its tensor {name} begins at byte {start} of the data, where {expected} was expected: tensors overlap or leave a hole"
    )]
    Gap {
        /// The tensor.
        name: String,
        /// Where it begins.
        start: usize,
        /// Where the one before ends.
        expected: usize,
    },
    /// There are fewer numbers than the header promises.
    #[error("it is cut short: the header promises {expected} bytes of data, but only {got} are there")]
    DataCut {
        /// The bytes of all tensors.
        expected: usize,
        /// The bytes after the header.
        got: usize,
    },
    /// There are more bytes than the header knows of.
    #[error("{extra} bytes follow after the last tensor")]
    Trailing {
        /// How many.
        extra: usize,
    },
}

macro_rules! stored_dtypes {
    ($($(#[$doc:meta])* $variant:ident = $name:literal, $bits:literal;)*) => {
        /// What a tensor in a file holds.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum StoredDType {
            $($(#[$doc])* $variant,)*
        }

        impl StoredDType {
            /// Its name in the header.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// The size of one element.
            pub fn bits(self) -> usize {
                match self { $(Self::$variant => $bits,)* }
            }

            fn from_name(name: &str) -> Option<Self> {
                match name { $($name => Some(Self::$variant),)* _ => None }
            }
        }
    };
}

stored_dtypes! {
    /// Truth values, one a byte.
    Bool = "BOOL", 8;
    /// 4-bit floats.
    F4 = "F4", 4;
    /// 6-bit floats.
    F6E2M3 = "F6_E2M3", 6;
    /// 6-bit floats.
    F6E3M2 = "F6_E3M2", 6;
    /// Unsigned bytes.
    U8 = "U8", 8;
    /// Signed bytes.
    I8 = "I8", 8;
    /// 8-bit floats.
    F8E5M2 = "F8_E5M2", 8;
    /// 8-bit floats.
    F8E4M3 = "F8_E4M3", 8;
    /// 8-bit exponents.
    F8E8M0 = "F8_E8M0", 8;
    /// 8-bit floats.
    F8E4M3Fnuz = "F8_E4M3FNUZ", 8;
    /// 8-bit floats.
    F8E5M2Fnuz = "F8_E5M2FNUZ", 8;
    /// Signed 16-bit integers.
    I16 = "I16", 16;
    /// Unsigned 16-bit integers.
    U16 = "U16", 16;
    /// IEEE half precision.
    F16 = "F16", 16;
    /// The upper half of an f32.
    Bf16 = "BF16", 16;
    /// Signed 32-bit integers.
    I32 = "I32", 32;
    /// Unsigned 32-bit integers.
    U32 = "U32", 32;
    /// Single precision.
    F32 = "F32", 32;
    /// Pairs of f32.
    C64 = "C64", 64;
    /// Double precision.
    F64 = "F64", 64;
    /// Signed 64-bit integers.
    I64 = "I64", 64;
    /// Unsigned 64-bit integers.
    U64 = "U64", 64;
}

impl StoredDType {
    /// Whether [`for_each_f32`] can read it.
    pub(crate) fn is_readable(self) -> bool {
        matches!(self, Self::F32 | Self::F16 | Self::Bf16 | Self::F64)
    }
}

impl fmt::Display for StoredDType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a file says about a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// What it holds.
    pub dtype: StoredDType,
    /// Its sizes, the outermost first.
    pub shape: Vec<usize>,
}

/// A file's header, found to agree with the file's size.
#[derive(Debug)]
pub struct Header {
    /// By name: what each tensor is, and which bytes of the file are its numbers.
    pub tensors: BTreeMap<String, (TensorInfo, Range<usize>)>,
    /// What else the writer noted.
    pub metadata: BTreeMap<String, String>,
}

impl Header {
    /// Reads the header at the beginning of a file's bytes and checks that its tensors cover the rest of them exactly.
    pub fn parse(bytes: &[u8]) -> Result<Self, FormatError> {
        let length = Self::length(bytes, bytes.len())?;
        Self::parse_json(&bytes[LENGTH..LENGTH + length], bytes.len())
    }

    /// How long the header is, by a file's first bytes; it lies within the file's size.
    pub(crate) fn length(start: &[u8], size: usize) -> Result<usize, FormatError> {
        // Two bytes of header are an empty object: less cannot be a file of ours.
        let Some(length) = start.first_chunk().filter(|_| size >= LENGTH + 2) else {
            return Err(FormatError::TooShort { size });
        };
        let (length, available) = (u64::from_le_bytes(*length), size - LENGTH);
        if length > HEADER_LIMIT {
            return Err(FormatError::HeaderTooLong { length });
        }
        if length > available as u64 {
            return Err(FormatError::HeaderCut { length, available });
        }
        Ok(length as usize)
    }

    /// Reads a header that follows its length, of a file of so many bytes.
    pub(crate) fn parse_json(header: &[u8], size: usize) -> Result<Self, FormatError> {
        let RawHeader { tensors, metadata } = serde_json::from_slice(header).map_err(|error| FormatError::Header {
            line: error.line(),
            column: error.column(),
            problem: without_position(&error),
        })?;

        let data_start = LENGTH + header.len();
        let data = size - data_start;
        let mut by_place = Vec::with_capacity(tensors.len());
        for (name, raw) in tensors {
            let Some(dtype) = StoredDType::from_name(&raw.dtype) else {
                return Err(FormatError::UnknownDType { name, dtype: raw.dtype });
            };
            let (start, end) = raw.data_offsets;
            let shape = raw.shape.0;
            let range = size_in_bytes(dtype, &shape)
                .filter(|&size| end.checked_sub(start) == Some(size as u64))
                .and_then(|_| Some(usize::try_from(start).ok()?..usize::try_from(end).ok()?));
            let Some(range) = range else {
                return Err(FormatError::Size { name, dtype, shape, start, end });
            };
            by_place.push((range, name, TensorInfo { dtype, shape }));
        }
        by_place.sort_by_key(|(range, ..)| (range.start, range.end));

        let mut expected = 0;
        for (range, name, _) in &by_place {
            if range.start != expected {
                return Err(FormatError::Gap { name: name.clone(), start: range.start, expected });
            }
            expected = range.end;
        }
        if expected > data {
            return Err(FormatError::DataCut { expected, got: data });
        }
        if expected < data {
            return Err(FormatError::Trailing { extra: data - expected });
        }
        // Ranges end within the data now, so that adding the header's length cannot overflow.
        let tensors = by_place
            .into_iter()
            .map(|(range, name, info)| (name, (info, range.start + data_start..range.end + data_start)))
            .collect();
        Ok(Self { tensors, metadata })
    }
}

/// Gives a tensor's bytes, converted to f32, piece by piece; `false` if its dtype is none that can be converted.
pub(crate) fn for_each_f32(dtype: StoredDType, bytes: &[u8], mut each: impl FnMut(&[f32])) -> bool {
    // Bytes of a file need not be aligned: each chunk is copied to where it is.
    let mut numbers = [0.0f32; CHUNK];
    match dtype {
        StoredDType::F32 => {
            for chunk in bytes.chunks(CHUNK * 4) {
                let numbers = &mut numbers[..chunk.len() / 4];
                for (number, bytes) in numbers.iter_mut().zip(chunk.as_chunks().0) {
                    *number = f32::from_le_bytes(*bytes);
                }
                each(numbers);
            }
        }
        StoredDType::F64 => {
            for chunk in bytes.chunks(CHUNK * 8) {
                let numbers = &mut numbers[..chunk.len() / 8];
                for (number, bytes) in numbers.iter_mut().zip(chunk.as_chunks().0) {
                    *number = f64::from_le_bytes(*bytes) as f32;
                }
                each(numbers);
            }
        }
        StoredDType::F16 => {
            let mut halves = [f16::ZERO; CHUNK];
            for chunk in bytes.chunks(CHUNK * 2) {
                let halves = &mut halves[..chunk.len() / 2];
                for (half, bytes) in halves.iter_mut().zip(chunk.as_chunks().0) {
                    *half = f16::from_le_bytes(*bytes);
                }
                let numbers = &mut numbers[..halves.len()];
                halves.convert_to_f32_slice(numbers);
                each(numbers);
            }
        }
        StoredDType::Bf16 => {
            for chunk in bytes.chunks(CHUNK * 2) {
                let numbers = &mut numbers[..chunk.len() / 2];
                for (number, bytes) in numbers.iter_mut().zip(chunk.as_chunks().0) {
                    *number = bf16::from_le_bytes(*bytes).to_f32();
                }
                each(numbers);
            }
        }
        _ => return false,
    }
    true
}

/// The precision of weights that are saved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SaveDType {
    /// Single precision: nothing is lost.
    #[default]
    F32,
    /// The upper half of an f32: all of its range, three digits.
    Bf16,
    /// IEEE half precision: four digits, numbers up to 65504.
    F16,
}

impl SaveDType {
    /// The same among all that a file may hold.
    pub fn stored(self) -> StoredDType {
        match self {
            Self::F32 => StoredDType::F32,
            Self::Bf16 => StoredDType::Bf16,
            Self::F16 => StoredDType::F16,
        }
    }

    /// Bytes of one number.
    pub(crate) fn bytes(self) -> usize {
        self.stored().bits() / 8
    }
}

/// A file's first bytes, up to its numbers, for tensors that follow each other in this order.
///
/// The reference implementation writes the same bytes for tensors of one dtype in the order of their names.
pub(crate) fn header<'a>(dtype: SaveDType, tensors: impl Iterator<Item = (&'a str, &'a [usize])>) -> Vec<u8> {
    let mut json = r#"{"__metadata__":{"format":"pt"}"#.to_owned();
    let mut start = 0;
    for (name, shape) in tensors {
        let end = start + shape.iter().product::<usize>() * dtype.bytes();
        let name = serde_json::Value::from(name);
        let shape = serde_json::Value::from(shape);
        json += &format!(r#",{name}:{{"dtype":"{}","shape":{shape},"data_offsets":[{start},{end}]}}"#, dtype.stored());
        start = end;
    }
    json.push('}');
    while !json.len().is_multiple_of(HEADER_ALIGNMENT) {
        json.push(' ');
    }
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(json.as_bytes());
    bytes
}

/// Writes numbers as a file holds them and counts those that are not finite after rounding.
pub(crate) fn write_numbers(out: &mut dyn Write, dtype: SaveDType, numbers: &[f32]) -> std::io::Result<usize> {
    let mut bytes = [0u8; CHUNK * 4];
    let mut not_finite = 0;
    for chunk in numbers.chunks(CHUNK) {
        let bytes = &mut bytes[..chunk.len() * dtype.bytes()];
        match dtype {
            SaveDType::F32 => {
                for (number, bytes) in chunk.iter().zip(bytes.as_chunks_mut().0) {
                    not_finite += usize::from(!number.is_finite());
                    *bytes = number.to_le_bytes();
                }
            }
            SaveDType::Bf16 => {
                for (number, bytes) in chunk.iter().zip(bytes.as_chunks_mut().0) {
                    let rounded = bf16::from_f32(*number);
                    not_finite += usize::from(!rounded.is_finite());
                    *bytes = rounded.to_le_bytes();
                }
            }
            SaveDType::F16 => {
                let mut halves = [f16::ZERO; CHUNK];
                let halves = &mut halves[..chunk.len()];
                halves.convert_from_f32_slice(chunk);
                for (rounded, bytes) in halves.iter().zip(bytes.as_chunks_mut().0) {
                    not_finite += usize::from(!rounded.is_finite());
                    *bytes = rounded.to_le_bytes();
                }
            }
        }
        out.write_all(bytes)?;
    }
    Ok(not_finite)
}

/// `None` if it does not fit a `usize`, or is no whole number of bytes.
fn size_in_bytes(dtype: StoredDType, shape: &[usize]) -> Option<usize> {
    let elements = shape.iter().try_fold(1usize, |product, &size| product.checked_mul(size))?;
    let bits = elements.checked_mul(dtype.bits())?;
    bits.is_multiple_of(8).then_some(bits / 8)
}

/// serde_json puts the position at the end of its message; ours stands at the beginning.
pub(crate) fn without_position(error: &serde_json::Error) -> String {
    let message = error.to_string();
    let position = format!(" at line {} column {}", error.line(), error.column());
    message.strip_suffix(&position).map(str::to_owned).unwrap_or(message)
}

#[derive(Deserialize)]
struct RawTensor {
    dtype: String,
    shape: Dimensions,
    data_offsets: (u64, u64),
}

struct Dimensions(Vec<usize>);

impl<'de> Deserialize<'de> for Dimensions {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Sizes;
        impl<'de> Visitor<'de> for Sizes {
            type Value = Dimensions;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "at most {DIMENSION_LIMIT} sizes")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Self::Value, A::Error> {
                let mut sizes = Vec::new();
                while let Some(size) = sequence.next_element()? {
                    if sizes.len() == DIMENSION_LIMIT {
                        return Err(serde::de::Error::invalid_length(DIMENSION_LIMIT + 1, &self));
                    }
                    sizes.push(size);
                }
                Ok(Dimensions(sizes))
            }
        }
        deserializer.deserialize_seq(Sizes)
    }
}

struct RawHeader {
    tensors: BTreeMap<String, RawTensor>,
    metadata: BTreeMap<String, String>,
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut tensors = BTreeMap::new();
                let mut metadata = None;
                while let Some(name) = map.next_key::<String>()? {
                    let repeated = if name == "__metadata__" {
                        // Writers without metadata may leave null.
                        metadata.replace(map.next_value::<Option<UniqueMap<String>>>()?.unwrap_or_default().0).is_some()
                    } else {
                        let tensor = map.next_value()?;
                        tensors.insert(name.clone(), tensor).is_some()
                    };
                    if repeated {
                        return Err(serde::de::Error::custom(format!("{name} is there twice")));
                    }
                }
                Ok(RawHeader { tensors, metadata: metadata.unwrap_or_default() })
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// A JSON object in which no key is repeated: with a repeated one, two readers could see two different files.
pub(crate) struct UniqueMap<V>(pub(crate) BTreeMap<String, V>);

impl<V> Default for UniqueMap<V> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<'de, V: Deserialize<'de>> Deserialize<'de> for UniqueMap<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries<V>(PhantomData<V>);
        impl<'de, V: Deserialize<'de>> Visitor<'de> for Entries<V> {
            type Value = UniqueMap<V>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut entries = BTreeMap::new();
                while let Some(key) = map.next_key::<String>()? {
                    let value = map.next_value()?;
                    if entries.contains_key(&key) {
                        return Err(serde::de::Error::custom(format!("{key} is there twice")));
                    }
                    entries.insert(key, value);
                }
                Ok(UniqueMap(entries))
            }
        }
        deserializer.deserialize_map(Entries(PhantomData))
    }
}
