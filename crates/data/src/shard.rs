//! A shard: some documents of a corpus in one file, read in place from a memory map.
//!
//! All numbers are little-endian. W is the width of an id: 2 bytes where the vocabulary fits, else 4.
//!
//! | part | bytes | what |
//! |---|---|---|
//! | header | 8 | `HENSONSH` |
//! | | 4 | version, 1 |
//! | | 4 | W |
//! | ids | W · pieces | the ids of all documents, one after the other; then zeros up to a multiple of 4 |
//! | sentence ends | 4 · sentences | for each sentence, where it ends among its document's pieces |
//! | documents | 8 · documents | for each document, where its pieces end in the shard, and where its sentences end |
//! | footer | 8, 8, 8 | pieces, sentences, documents |
//! | | 4, 4 | the vocabulary's size, 0 |
//! | | 16 | the first half of SHA-256 over header and the fields of the footer before it |
//!
//! The counts stand at the end so that a shard is written in one stream. The checksum of the whole file is in the
//! corpus's manifest.
//!
//! Opening checks header, footer and sizes, in a time that does not depend on the size of the shard. Offsets are
//! checked each time that a document is looked up, by one pass over those of that document alone; one whose offsets make
//! no sense is given out as empty. Ids beyond the vocabulary are given out as its last one. So a damaged body never reads
//! outside the file and never panics, and [`crate::Corpus::verify`] tells that it is damaged.

use std::fs::File;
use std::io::{self, Write};
use std::ops::Range;
use std::path::Path;

use memmap2::Mmap;
use sha2::{Digest, Sha256};

use crate::DataError;

#[cfg(target_endian = "big")]
compile_error!("shards are read in place, which needs a little-endian machine");

const MAGIC: &[u8; 8] = b"HENSONSH";
/// The version of the format.
pub(crate) const VERSION: u32 = 1;
const HEADER: usize = 16;
const FOOTER: usize = 48;
/// Where the checksum stands in the footer.
const CHECK: usize = 32;

/// The bytes of an id: two where the vocabulary fits.
pub(crate) fn id_width(vocabulary_size: u32) -> usize {
    if vocabulary_size <= 1 << 16 { 2 } else { 4 }
}

/// How much is in a shard, or in several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Counts {
    /// Documents.
    pub documents: u64,
    /// Sentences.
    pub sentences: u64,
    /// Pieces: tokens without the special ones around them.
    pub pieces: u64,
}

impl Counts {
    /// Adds others; as damaged files may say anything, without overflow.
    pub(crate) fn add(&mut self, other: Counts) {
        self.documents = self.documents.saturating_add(other.documents);
        self.sentences = self.sentences.saturating_add(other.sentences);
        self.pieces = self.pieces.saturating_add(other.pieces);
    }
}

/// Writes a shard in one stream; only offsets are kept in memory until the end.
pub(crate) struct ShardWriter<W> {
    out: W,
    hash: Sha256,
    vocabulary_size: u32,
    counts: Counts,
    ends: Vec<u32>,
    documents: Vec<[u32; 2]>,
    buffer: Vec<u8>,
}

impl<W: Write> ShardWriter<W> {
    pub(crate) fn new(out: W, vocabulary_size: u32) -> io::Result<Self> {
        let (counts, ends, documents, buffer) = (Counts::default(), Vec::new(), Vec::new(), Vec::new());
        let mut writer = Self { out, hash: Sha256::new(), vocabulary_size, counts, ends, documents, buffer };
        writer.write(&header(vocabulary_size))?;
        Ok(writer)
    }

    /// Adds a document: its ids, all within the vocabulary, and where its sentences end among them.
    pub(crate) fn push(&mut self, ids: &[u32], ends: &[u32]) -> io::Result<()> {
        debug_assert!(ids.iter().all(|&id| id < self.vocabulary_size));
        debug_assert!(ends.is_sorted() && ends.last().map_or(0, |&end| end as usize) == ids.len());
        if self.ends.capacity() - self.ends.len() < ends.len() {
            // Step by step, where a vector by itself would take up to twice what it needs.
            self.ends.reserve_exact(ends.len().max(1 << 16));
        }
        self.ends.extend_from_slice(ends);
        let added = Counts { documents: 1, sentences: ends.len() as u64, pieces: ids.len() as u64 };
        self.counts.add(added);
        let place = |count: u64| u32::try_from(count).map_err(|_| io::Error::other("more than 2^32 pieces in a shard"));
        self.documents.push([place(self.counts.pieces)?, place(self.counts.sentences)?]);
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.clear();
        match id_width(self.vocabulary_size) {
            2 => buffer.extend(ids.iter().flat_map(|&id| (id as u16).to_le_bytes())),
            _ => buffer.extend(ids.iter().flat_map(|id| id.to_le_bytes())),
        }
        let written = self.write(&buffer);
        self.buffer = buffer;
        written
    }

    /// What the file would have, finished now.
    pub(crate) fn bytes(&self) -> u64 {
        let ids = (self.counts.pieces * id_width(self.vocabulary_size) as u64).next_multiple_of(4);
        (HEADER + FOOTER) as u64 + ids + 4 * self.counts.sentences + 8 * self.counts.documents
    }

    pub(crate) fn counts(&self) -> Counts {
        self.counts
    }

    /// Writes the offsets and the footer; gives back what was written to, and the SHA-256 of the file.
    pub(crate) fn finish(mut self) -> io::Result<(W, String)> {
        let ids = self.counts.pieces as usize * id_width(self.vocabulary_size);
        self.write(&[0; 4][..ids.next_multiple_of(4) - ids])?;
        let (ends, documents) = (std::mem::take(&mut self.ends), std::mem::take(&mut self.documents));
        self.write(bytemuck::cast_slice(&ends))?;
        self.write(bytemuck::cast_slice(&documents))?;
        self.write(&footer(self.counts, self.vocabulary_size))?;
        Ok((self.out, hex(&self.hash.finalize())))
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.hash.update(bytes);
        self.out.write_all(bytes)
    }
}

/// A shard to read.
#[derive(Debug)]
pub(crate) struct Shard {
    bytes: Bytes,
    vocabulary_size: u32,
    counts: Counts,
    /// Where the three parts lie. Each is aligned for its numbers.
    ids: Range<usize>,
    ends: Range<usize>,
    documents: Range<usize>,
}

/// A file mapped into memory, or the same bytes in memory, aligned as a map is.
enum Bytes {
    Map(Mmap),
    Memory(Vec<u64>, usize),
}

impl std::fmt::Debug for Bytes {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{} bytes", self.len())
    }
}

impl std::ops::Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Bytes::Map(map) => map,
            Bytes::Memory(words, length) => &bytemuck::cast_slice(words)[..*length],
        }
    }
}

/// The ids of a document, as wide as they are stored.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Ids<'a> {
    Two(&'a [u16]),
    Four(&'a [u32]),
}

impl Shard {
    /// Maps a shard into memory and checks that it is what the manifest says.
    pub(crate) fn open(path: &Path, vocabulary_size: u32, counts: Counts, size: u64) -> Result<Self, DataError> {
        let file = File::open(path).map_err(DataError::io("open", path))?;
        let metadata = file.metadata().map_err(DataError::io("open", path))?;
        if !metadata.is_file() || metadata.len() != size {
            let problem = format!("it has {} bytes, the manifest says {size}", metadata.len());
            return Err(DataError::damaged(path, problem));
        }
        if size < (HEADER + FOOTER) as u64 {
            return Err(DataError::damaged(path, format!("it has {size} bytes, too few for a shard")));
        }
        // SAFETY: the map is private to this struct and only read. Corpora are written under other names and renamed, so
        // that henson never changes a file that is mapped; that nobody else does is the promise that `Corpus` asks for.
        let map = unsafe { Mmap::map(&file) }.map_err(DataError::io("map", path))?;
        let shard = Self::parse(path, Bytes::Map(map), vocabulary_size)?;
        if shard.counts != counts {
            let problem = format!("it says {:?}, the manifest {counts:?}", shard.counts);
            return Err(DataError::damaged(path, problem));
        }
        Ok(shard)
    }

    /// A shard in memory. `path` is for messages.
    pub(crate) fn from_bytes(path: &Path, bytes: &[u8], vocabulary_size: u32) -> Result<Self, DataError> {
        let mut words = vec![0_u64; bytes.len().div_ceil(8)];
        bytemuck::cast_slice_mut(&mut words)[..bytes.len()].copy_from_slice(bytes);
        Self::parse(path, Bytes::Memory(words, bytes.len()), vocabulary_size)
    }

    fn parse(path: &Path, bytes: Bytes, vocabulary_size: u32) -> Result<Self, DataError> {
        let damaged = |problem: &str| DataError::damaged(path, problem);
        if bytes.len() < HEADER + FOOTER || &bytes[..8] != MAGIC {
            return Err(damaged("it does not begin as a shard does"));
        }
        let foot = &bytes[bytes.len() - FOOTER..];
        let version = u32_at(&bytes, 8);
        if version != VERSION {
            return Err(DataError::Version { path: path.to_owned(), found: version, supported: VERSION });
        }
        let counts = Counts { pieces: u64_at(foot, 0), sentences: u64_at(foot, 8), documents: u64_at(foot, 16) };
        if bytes[..HEADER] != header(vocabulary_size) || foot != footer(counts, vocabulary_size) {
            return Err(damaged("its header or footer is not that of a shard of this vocabulary, or has changed"));
        }
        // The checksum vouches for the counts; that they belong to a file of this size is still to be seen.
        let width = id_width(vocabulary_size) as u64;
        let layout = || {
            let ids = counts.pieces.checked_mul(width)?;
            let ends = ids.checked_next_multiple_of(4)?.checked_add(HEADER as u64)?;
            let documents = ends.checked_add(counts.sentences.checked_mul(4)?)?;
            let end = documents.checked_add(counts.documents.checked_mul(8)?)?;
            (end.checked_add(FOOTER as u64)? == bytes.len() as u64).then_some([ids, ends, documents, end])
        };
        let Some([ids, ends, documents, end]) = layout() else {
            return Err(damaged("its size is not that of its documents"));
        };
        Ok(Self {
            vocabulary_size,
            counts,
            ids: HEADER..HEADER + ids as usize,
            ends: ends as usize..documents as usize,
            documents: documents as usize..end as usize,
            bytes,
        })
    }

    pub(crate) fn counts(&self) -> Counts {
        self.counts
    }

    pub(crate) fn vocabulary_size(&self) -> u32 {
        self.vocabulary_size
    }

    /// A document's ids, and where its sentences end among them: not decreasing, the last at the end of the ids.
    /// `None` where the offsets make no sense. Panics if there is no such document.
    pub(crate) fn document(&self, number: usize) -> Option<(Ids<'_>, &[u32])> {
        let table: &[[u32; 2]] = bytemuck::cast_slice(&self.bytes[self.documents.clone()]);
        let [first_piece, first_sentence] = if number == 0 { [0, 0] } else { table[number - 1] };
        let [last_piece, last_sentence] = table[number];
        let ends: &[u32] = bytemuck::cast_slice(&self.bytes[self.ends.clone()]);
        let ends = ends.get(first_sentence as usize..last_sentence as usize)?;
        let pieces = first_piece as usize..last_piece as usize;
        let ids = &self.bytes[self.ids.clone()];
        let ids = match id_width(self.vocabulary_size) {
            2 => Ids::Two(bytemuck::cast_slice(ids).get(pieces)?),
            _ => Ids::Four(bytemuck::cast_slice(ids).get(pieces)?),
        };
        // Without an early end, so that it runs over several sentences at a time.
        let sorted = ends.windows(2).fold(true, |sorted, pair| sorted & (pair[0] <= pair[1]));
        (sorted && ends.last().map_or(0, |&end| end as usize) == ids.len()).then_some((ids, ends))
    }

    /// Whether everything in the body makes sense: a pass over all of it.
    pub(crate) fn check(&self) -> Result<(), String> {
        let mut totals = Counts::default();
        for number in 0..self.counts.documents as usize {
            let Some((ids, ends)) = self.document(number) else {
                return Err(format!("the offsets of document {number} make no sense"));
            };
            if ids.largest().is_some_and(|id| id >= self.vocabulary_size) {
                return Err(format!("document {number} has an id beyond the vocabulary"));
            }
            totals.add(Counts { documents: 1, sentences: ends.len() as u64, pieces: ids.len() as u64 });
        }
        if totals != self.counts {
            return Err(format!("its documents have {totals:?}, its footer says {:?}", self.counts));
        }
        Ok(())
    }
}

impl Ids<'_> {
    pub(crate) fn len(&self) -> usize {
        match self {
            Ids::Two(ids) => ids.len(),
            Ids::Four(ids) => ids.len(),
        }
    }

    /// Appends the ids at these positions, or those of them that are there; none is `limit` or beyond.
    pub(crate) fn read(&self, positions: Range<usize>, limit: u32, out: &mut Vec<u32>) {
        let end = positions.end.min(self.len());
        let positions = positions.start.min(end)..end;
        let last = limit.saturating_sub(1);
        match self {
            Ids::Two(ids) => out.extend(ids[positions].iter().map(|&id| u32::from(id).min(last))),
            Ids::Four(ids) => out.extend(ids[positions].iter().map(|&id| id.min(last))),
        }
    }

    fn largest(&self) -> Option<u32> {
        match self {
            Ids::Two(ids) => ids.iter().copied().max().map(u32::from),
            Ids::Four(ids) => ids.iter().copied().max(),
        }
    }
}

/// A shard with this body, right or wrong, for the fuzz targets.
pub(crate) fn frame(body: &[u8], counts: Counts, vocabulary_size: u32) -> Vec<u8> {
    [&header(vocabulary_size)[..], body, &footer(counts, vocabulary_size)].concat()
}

/// The lower-case digits of a hash.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn header(vocabulary_size: u32) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..8].copy_from_slice(MAGIC);
    header[8..12].copy_from_slice(&VERSION.to_le_bytes());
    header[12..].copy_from_slice(&(id_width(vocabulary_size) as u32).to_le_bytes());
    header
}

fn footer(counts: Counts, vocabulary_size: u32) -> [u8; FOOTER] {
    let mut footer = [0; FOOTER];
    for (place, count) in footer.chunks_mut(8).zip([counts.pieces, counts.sentences, counts.documents]) {
        place.copy_from_slice(&count.to_le_bytes());
    }
    footer[24..28].copy_from_slice(&vocabulary_size.to_le_bytes());
    let check = Sha256::new().chain_update(header(vocabulary_size)).chain_update(&footer[..CHECK]).finalize();
    footer[CHECK..].copy_from_slice(&check[..FOOTER - CHECK]);
    footer
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..].first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}
