//! Weights in HDF5 as the first ELMo models have them: superblock 0, groups of symbol tables, contiguous arrays of f32.
//!
//! Deliberately not an HDF5 library: chunks, compression, other superblocks and other numbers are errors that name what was found.
//! It follows the "HDF5 File Format Specification", version 1.0 of the superblock's parts. Every address is compared with the file's
//! size before it is read, nothing is visited twice, and what is kept is no larger than the file.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// What a file begins with.
const SIGNATURE: [u8; 8] = *b"\x89HDF\r\n\x1a\n";
/// An address that leads nowhere.
const UNDEFINED: u64 = u64::MAX;
/// Groups inside of groups.
const DEPTH_LIMIT: usize = 32;
/// Groups, nodes and arrays of a file; real ones have about a hundred.
const OBJECT_LIMIT: usize = 1 << 16;
/// Bytes of an object's header; real ones have a few hundred.
const HEADER_LIMIT: u64 = 1 << 16;
/// Bytes of a name.
const NAME_LIMIT: usize = 1 << 12;

/// Why a file of HDF5 cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Hdf5Error {
    /// It begins like no HDF5 file.
    #[error("it is not an HDF5 file: fetch it again (a small text file in its place is a pointer of Git LFS)")]
    NotHdf5,
    /// The file ends too early, or an address is wrong.
    #[error("it is cut short or damaged: {what} should lie at byte {at}, but it has {size}; fetch it again")]
    Cut {
        /// What is not there.
        what: &'static str,
        /// Where it should be.
        at: u64,
        /// The bytes of the file.
        size: u64,
    },
    /// Something contradicts the format.
    #[error("it is wrong at byte {at}: {problem}; fetch it again")]
    Wrong {
        /// Where.
        at: u64,
        /// What is wrong there.
        problem: &'static str,
    },
    /// A part of the format that is not read.
    #[error("{name} has {what}; only what ELMo's files have is read: save the array again without it")]
    Unsupported {
        /// The array, or the file.
        name: String,
        /// What is not known.
        what: String,
    },
    /// There is more of something than any real file has.
    #[error("it has more than {limit} {what}, too many for a file of weights: is it the right file?")]
    Limit {
        /// What is counted.
        what: &'static str,
        /// The most that are read.
        limit: usize,
    },
    /// The file cannot be read.
    #[error(transparent)]
    Read(#[from] Box<crate::CheckpointError>),
}

type Result<T, E = Hdf5Error> = std::result::Result<T, E>;

/// Bytes at an address.
pub trait Bytes {
    /// How many there are.
    fn size(&self) -> u64;
    /// Some of them, which are within the size.
    fn read_exact(&self, at: u64, bytes: &mut [u8]) -> Result<()>;
}

/// An array of f32: its sizes, and which bytes of the file are its numbers.
#[derive(Debug)]
pub struct Array {
    /// The outermost first.
    pub shape: Vec<usize>,
    /// Four for each number, the lowest first.
    pub bytes: Range<u64>,
}

/// All arrays of a file by their path, without a slash before it.
pub fn read(file: &dyn Bytes) -> Result<BTreeMap<String, Array>> {
    let mut reader = Reader { file, seen: BTreeSet::new(), arrays: BTreeMap::new() };
    let root = reader.superblock()?;
    reader.object("", root, 0)?;
    Ok(reader.arrays)
}

struct Reader<'a> {
    file: &'a dyn Bytes,
    seen: BTreeSet<u64>,
    arrays: BTreeMap<String, Array>,
}

/// What an object's header says.
#[derive(Default)]
struct Header {
    /// The addresses of a group's tree and of its names.
    group: Option<(u64, u64)>,
    shape: Option<Vec<usize>>,
    /// Whether numbers are f32; otherwise what they are.
    numbers: Option<std::result::Result<(), String>>,
    layout: Option<std::result::Result<(u64, u64), String>>,
    filtered: bool,
}

impl Reader<'_> {
    fn bytes<const N: usize>(&self, what: &'static str, at: u64) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.fill(what, at, &mut bytes)?;
        Ok(bytes)
    }

    fn fill(&self, what: &'static str, at: u64, bytes: &mut [u8]) -> Result<()> {
        let size = self.file.size();
        match at.checked_add(bytes.len() as u64) {
            Some(end) if end <= size => self.file.read_exact(at, bytes),
            _ => Err(Hdf5Error::Cut { what, at, size }),
        }
    }

    /// Counts what is visited, and refuses to come by again.
    fn visit(&mut self, at: u64) -> Result<()> {
        if self.seen.len() >= OBJECT_LIMIT {
            return Err(Hdf5Error::Limit { what: "objects", limit: OBJECT_LIMIT });
        }
        match self.seen.insert(at) {
            true => Ok(()),
            false => Err(Hdf5Error::Wrong { at, problem: "it is a part of two others, or of itself" }),
        }
    }

    /// The address of the root group's header.
    fn superblock(&self) -> Result<u64> {
        if self.file.size() < 8 || self.bytes::<8>("the signature", 0)? != SIGNATURE {
            return Err(Hdf5Error::NotHdf5);
        }
        let start: [u8; 96] = self.bytes("the superblock", 0)?;
        let unsupported = |what: String| Hdf5Error::Unsupported { name: "the file".to_owned(), what };
        if start[8] != 0 {
            return Err(unsupported(format!("a superblock of version {}", start[8])));
        }
        if start[13..15] != [8, 8] {
            return Err(unsupported(format!("addresses of {} and sizes of {} bytes", start[13], start[14])));
        }
        if number(&start, 24) != 0 {
            return Err(unsupported("something before its own beginning".to_owned()));
        }
        Ok(number(&start, 64))
    }

    /// A group, with all that is in it, or an array.
    fn object(&mut self, path: &str, at: u64, depth: usize) -> Result<()> {
        if depth > DEPTH_LIMIT {
            return Err(Hdf5Error::Limit { what: "groups inside of each other", limit: DEPTH_LIMIT });
        }
        self.visit(at)?;
        let header = self.header(at)?;
        if let Some((tree, names)) = header.group {
            let names = self.names(names)?;
            return self.tree(path, (tree, names), depth, 0);
        }
        let unsupported = |what: String| Hdf5Error::Unsupported { name: path.to_owned(), what };
        if header.filtered {
            return Err(unsupported("compressed numbers".to_owned()));
        }
        let (Some(shape), Some(numbers), Some(layout)) = (header.shape, header.numbers, header.layout) else {
            return Err(Hdf5Error::Wrong { at, problem: "an object is neither a group nor a whole array" });
        };
        numbers.map_err(unsupported)?;
        let (start, length) = layout.map_err(unsupported)?;
        let expected = shape.iter().try_fold(4u64, |size, n| size.checked_mul(*n as u64));
        if expected != Some(length) {
            return Err(Hdf5Error::Wrong { at, problem: "an array has another size than its shape" });
        }
        let size = self.file.size();
        let start = if length == 0 { 0 } else { start };
        match start.checked_add(length).filter(|end| *end <= size) {
            Some(end) => self.arrays.insert(path.to_owned(), Array { shape, bytes: start..end }),
            None => return Err(Hdf5Error::Cut { what: "an array", at: start, size }),
        };
        Ok(())
    }

    /// Where the names of a group begin, and how many bytes they have.
    fn names(&self, at: u64) -> Result<(u64, u64)> {
        let heap: [u8; 32] = self.bytes("the names of a group", at)?;
        match &heap[..4] == b"HEAP" && heap[4] == 0 {
            true => Ok((number(&heap, 24), number(&heap, 8))),
            false => Err(Hdf5Error::Wrong { at, problem: "there should be the names of a group" }),
        }
    }

    fn name(&self, (start, length): (u64, u64), offset: u64) -> Result<String> {
        let room = length.saturating_sub(offset).min(NAME_LIMIT as u64) as usize;
        let at = start.saturating_add(offset);
        let room = room.min(self.file.size().saturating_sub(at) as usize);
        let mut bytes = vec![0; room];
        self.fill("a name", at, &mut bytes)?;
        let end = bytes.iter().position(|byte| *byte == 0);
        let name = end.and_then(|end| std::str::from_utf8(&bytes[..end]).ok()).filter(|name| !name.is_empty());
        name.map(str::to_owned).ok_or(Hdf5Error::Wrong { at, problem: "there should be a name" })
    }

    /// A node of a group's tree, or a table of what is in it.
    fn tree(&mut self, path: &str, (at, names): (u64, (u64, u64)), depth: usize, level: usize) -> Result<()> {
        if level > DEPTH_LIMIT {
            return Err(Hdf5Error::Limit { what: "levels of a group's tree", limit: DEPTH_LIMIT });
        }
        self.visit(at)?;
        let start: [u8; 8] = self.bytes("a node of a group", at)?;
        let count = u64::from(u16::from_le_bytes([start[6], start[7]]));
        match &start[..5] {
            b"TREE\0" => {
                for i in 0..count {
                    // Behind 24 bytes, a key of eight bytes stands before every child.
                    let child = u64::from_le_bytes(self.bytes("a node of a group", at + 24 + 16 * i + 8)?);
                    self.tree(path, (child, names), depth, level + 1)?;
                }
            }
            b"SNOD\x01" => {
                for i in 0..count {
                    let entry: [u8; 40] = self.bytes("the table of a group", at + 8 + 40 * i)?;
                    let name = self.name(names, number(&entry, 0))?;
                    if entry[16..20] == [2, 0, 0, 0] {
                        return Err(Hdf5Error::Unsupported { name, what: "only a link to something else".to_owned() });
                    }
                    let path = if path.is_empty() { name } else { format!("{path}/{name}") };
                    self.object(&path, number(&entry, 8), depth + 1)?;
                }
            }
            _ => return Err(Hdf5Error::Wrong { at, problem: "there should be a node of a group" }),
        }
        Ok(())
    }

    fn header(&mut self, at: u64) -> Result<Header> {
        let start: [u8; 16] = self.bytes("the header of an object", at)?;
        if start[0] != 1 {
            return Err(Hdf5Error::Wrong { at, problem: "there should be the header of an object, of version 1" });
        }
        let mut left = u16::from_le_bytes([start[2], start[3]]);
        let first = u64::from(u32::from_le_bytes([start[8], start[9], start[10], start[11]]));
        let (mut header, mut parts, mut all) = (Header::default(), vec![(at + 16, first)], 0u64);
        while let Some((mut at, length)) = parts.pop() {
            all = length.saturating_add(all);
            if all > HEADER_LIMIT {
                return Err(Hdf5Error::Limit { what: "bytes in a header", limit: HEADER_LIMIT as usize });
            }
            let end = at.saturating_add(length);
            while left > 0 && at.saturating_add(8) <= end {
                let start: [u8; 8] = self.bytes("a message of a header", at)?;
                let (kind, size) = (u16::from_le_bytes([start[0], start[1]]), u16::from_le_bytes([start[2], start[3]]));
                let mut data = vec![0; size.into()];
                self.fill("a message of a header", at + 8, &mut data)?;
                if kind == 0x10 && data.len() >= 16 {
                    let next = number(&data, 0);
                    self.visit(next)?;
                    parts.push((next, number(&data, 8)));
                } else {
                    header.take(kind, &data, at)?;
                }
                at += 8 + u64::from(size);
                left -= 1;
            }
        }
        Ok(header)
    }
}

impl Header {
    /// What one message says; of most there is nothing to know.
    fn take(&mut self, kind: u16, data: &[u8], at: u64) -> Result<()> {
        let wrong = |problem| Hdf5Error::Wrong { at, problem };
        match kind {
            0x01 => self.shape = Some(shape(data).ok_or(wrong("the shape of an array is not one"))?),
            0x03 => self.numbers = Some(is_f32(data).ok_or(wrong("the type of an array is not one"))?),
            0x08 => self.layout = Some(layout(data).ok_or(wrong("the place of an array is not one"))?),
            0x0b => self.filtered = true,
            0x11 if data.len() >= 16 => self.group = Some((number(data, 0), number(data, 8))),
            _ => {}
        }
        Ok(())
    }
}

fn shape(data: &[u8]) -> Option<Vec<usize>> {
    let (version, dimensions) = (*data.first()?, usize::from(*data.get(1)?));
    let start = match version {
        1 => 8,
        2 => 4,
        _ => return None,
    };
    let sizes = data.get(start..start + 8 * dimensions)?;
    // Beyond this, no file is large enough.
    let size = |bytes: &[u8]| usize::try_from(number(bytes, 0)).ok().filter(|size| *size < 1 << 40);
    sizes.chunks_exact(8).map(size).collect()
}

fn is_f32(data: &[u8]) -> Option<std::result::Result<(), String>> {
    let start = data.get(..8)?;
    let (class, size) = (start[0] & 15, u32::from_le_bytes([start[4], start[5], start[6], start[7]]));
    if class != 1 {
        return Some(Err(format!("something else than floating-point numbers (class {class})")));
    }
    // Lowest byte first; 23 bits of mantissa, then eight of exponent.
    let format = [0, 0, 32, 0, 23, 8, 0, 23, 127, 0, 0, 0];
    let plain = size == 4 && start[1] & 1 == 0 && data.get(8..20)? == format;
    Some(if plain { Ok(()) } else { Err(format!("numbers of {size} bytes in another form than f32")) })
}

/// Where an array's numbers lie, and how many bytes they have.
fn layout(data: &[u8]) -> Option<std::result::Result<(u64, u64), String>> {
    match (*data.first()?, *data.get(1)?) {
        (3, 1) => {
            let (at, length) = (number(data.get(..18)?, 2), number(data, 10));
            Some(match at {
                UNDEFINED if length > 0 => Err("no numbers: nothing was ever written to it".to_owned()),
                at => Ok((at, length)),
            })
        }
        (3, 0) => Some(Err("its numbers in its header".to_owned())),
        (3, 2) => Some(Err("its numbers in chunks".to_owned())),
        (version, _) => Some(Err(format!("a layout of version {version}"))),
    }
}

/// Eight bytes, the lowest first; the caller knows that they are there.
fn number(bytes: &[u8], at: usize) -> u64 {
    bytes[at..at + 8].iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
}
