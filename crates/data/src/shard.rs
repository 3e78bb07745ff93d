//! A shard: some documents of a corpus in one file, read block by block.
//!
//! All numbers are little-endian. W is the width of an id: 2 bytes where the vocabulary fits, else 4.
//!
//! | part | bytes | what |
//! |---|---|---|
//! | header | 8 | `HENSONSH` |
//! | | 4 | version, 2 |
//! | | 4 | W |
//! | ids | W · pieces | the ids of all documents, one after the other; then zeros up to a multiple of 4 |
//! | sentence ends | 4 · sentences | for each sentence, where it ends among its document's pieces |
//! | documents | 8 · documents | for each document, where its pieces end in the shard, and where its sentences end |
//! | sums | 8 · blocks | the XXH3 of every 64 KiB of all parts before, the last block as long as it is |
//! | footer | 8, 8, 8 | pieces, sentences, documents |
//! | | 4, 4 | the vocabulary's size, 0 |
//! | | 16 | the first half of SHA-256 over header, sums, and the fields of the footer before it |
//!
//! The counts stand at the end so that a shard is written in one stream. The SHA-256 of the whole file is in the corpus's
//! manifest. Version 1 has no sums; it is read, and no longer written.
//!
//! Opening checks header, sums, footer and sizes, and reads one byte for 8 KiB of the shard. Blocks are compared with their
//! sums when they are first read ([`crate::blocks`]); offsets and ids are checked whenever they are used, since a sum can be
//! right and a shard still be wrong. So a damaged shard is an error, and never a panic.

use std::fs::File;
use std::io::{self, Write};
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sha2::{Digest, Sha256};
use twox_hash::XxHash3_64;

use crate::DataError;
use crate::blocks::{BLOCK, Blocks, Budget, FileBlocks, Sums, read_exact_at};
use crate::corpus::Reader;

#[cfg(target_endian = "big")]
compile_error!("shards are written in place, which needs a little-endian machine");

const MAGIC: &[u8; 8] = b"HENSONSH";
/// The version of the format.
pub(crate) const VERSION: u32 = 2;
/// The first version, whose shards have no sums.
pub(crate) const WITHOUT_SUMS: u32 = 1;
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
    sums: Sums,
    vocabulary_size: u32,
    counts: Counts,
    ends: Vec<u32>,
    documents: Vec<[u32; 2]>,
    buffer: Vec<u8>,
}

impl<W: Write> ShardWriter<W> {
    pub(crate) fn new(out: W, vocabulary_size: u32) -> io::Result<Self> {
        let (counts, ends, documents, buffer) = (Counts::default(), Vec::new(), Vec::new(), Vec::new());
        let (hash, sums) = (Sha256::new(), Sums::default());
        let mut writer = Self { out, hash, sums, vocabulary_size, counts, ends, documents, buffer };
        writer.write(&header(VERSION, vocabulary_size))?;
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
        let place = |count: u64| u32::try_from(count).map_err(|_| io::Error::other("more than 2^32 tokens in a shard"));
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
        let covered = HEADER as u64 + ids + 4 * self.counts.sentences + 8 * self.counts.documents;
        covered + 8 * covered.div_ceil(BLOCK as u64) + FOOTER as u64
    }

    pub(crate) fn counts(&self) -> Counts {
        self.counts
    }

    /// Writes the offsets, the sums and the footer; gives back what was written to, and the SHA-256 of the file.
    pub(crate) fn finish(mut self) -> io::Result<(W, String)> {
        let ids = self.counts.pieces as usize * id_width(self.vocabulary_size);
        self.write(&[0; 4][..ids.next_multiple_of(4) - ids])?;
        let (ends, documents) = (std::mem::take(&mut self.ends), std::mem::take(&mut self.documents));
        self.write(bytemuck::cast_slice(&ends))?;
        self.write(bytemuck::cast_slice(&documents))?;
        let sums = std::mem::take(&mut self.sums).finish();
        self.write(bytemuck::cast_slice(&sums))?;
        self.write(&footer(VERSION, &sums, self.counts, self.vocabulary_size))?;
        Ok((self.out, hex(&self.hash.finalize())))
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.hash.update(bytes);
        self.sums.add(bytes);
        self.out.write_all(bytes)
    }
}

/// Fills a slice with the bytes of a shard from an offset on.
type ReadAt<'a> = &'a dyn Fn(u64, &mut [u8]) -> Result<(), DataError>;

/// A shard to read.
#[derive(Debug)]
pub(crate) struct Shard {
    path: PathBuf,
    blocks: Blocks,
    vocabulary_size: u32,
    counts: Counts,
    /// Where the last two of the three parts begin.
    ends: usize,
    documents: usize,
}

/// What a shard says of itself in its header and footer.
struct Frame {
    counts: Counts,
    /// Where the parts after the ids begin, and where the last one ends.
    ends: u64,
    documents: u64,
    covered: u64,
    sums: Vec<u64>,
}

impl Shard {
    /// Opens a shard and checks that it is what the manifest says.
    pub(crate) fn open(
        path: &Path,
        vocabulary_size: u32,
        counts: Counts,
        size: u64,
        budget: &Arc<Budget>,
    ) -> Result<Self, DataError> {
        // Asked before opening: a pipe would block there.
        let metadata = std::fs::metadata(path).map_err(DataError::io("open", path))?;
        if !metadata.is_file() || metadata.len() != size {
            let problem = format!("it has {} bytes, the manifest lists {size}", metadata.len());
            return Err(DataError::damaged(path, problem));
        }
        let file = File::open(path).map_err(DataError::io("open", path))?;
        let read = |at, out: &mut [u8]| read_exact_at(path, &file, at, out);
        let frame = Frame::read(path, size, vocabulary_size, &read)?;
        if frame.counts != counts {
            let problem = format!("it has {:?}, the manifest lists {counts:?}", frame.counts);
            return Err(DataError::damaged(path, problem));
        }
        let Frame { ends, documents, covered, sums, .. } = frame;
        let blocks = Blocks::File(FileBlocks::new(path, file, covered, sums, budget));
        let (ends, documents) = (ends as usize, documents as usize);
        Ok(Self { path: path.to_owned(), blocks, vocabulary_size, counts, ends, documents })
    }

    /// A shard in memory, whose sums are checked at once. `path` is for messages.
    pub(crate) fn from_bytes(path: &Path, bytes: Vec<u8>, vocabulary_size: u32) -> Result<Self, DataError> {
        let read = |at: u64, out: &mut [u8]| {
            out.copy_from_slice(&bytes[at as usize..at as usize + out.len()]);
            Ok(())
        };
        let Frame { counts, ends, documents, covered, sums } =
            Frame::read(path, bytes.len() as u64, vocabulary_size, &read)?;
        let blocks = bytes[..covered as usize].chunks(BLOCK);
        if blocks.zip(&sums).any(|(block, sum)| XxHash3_64::oneshot(block) != *sum) {
            return Err(DataError::damaged(path, "its checksums do not match"));
        }
        let (ends, documents) = (ends as usize, documents as usize);
        Ok(Self { path: path.to_owned(), blocks: Blocks::Memory(bytes), vocabulary_size, counts, ends, documents })
    }

    pub(crate) fn counts(&self) -> Counts {
        self.counts
    }

    pub(crate) fn vocabulary_size(&self) -> u32 {
        self.vocabulary_size
    }

    /// An error that names the shard.
    #[cold]
    pub(crate) fn damaged(&self, problem: impl Into<String>) -> DataError {
        DataError::damaged(&self.path, problem)
    }

    /// Reads the ids of so many pieces, part by part as bytes.
    #[inline]
    pub(crate) fn read_ids(
        &self,
        first: usize,
        count: usize,
        buffer: &mut Vec<u8>,
        each: impl FnMut(&[u8]),
    ) -> Result<(), DataError> {
        let width = id_width(self.vocabulary_size);
        self.blocks.for_each_part(HEADER + first * width, count * width, buffer, each)
    }

    /// Where sentences end, each within its document.
    pub(crate) fn ends(&self) -> Numbers<'_, u32> {
        Numbers { blocks: &self.blocks, begin: self.ends, count: self.counts.sentences as usize, of: PhantomData }
    }

    /// Where the pieces and the sentences of documents end.
    pub(crate) fn documents(&self) -> Numbers<'_, [u32; 2]> {
        Numbers { blocks: &self.blocks, begin: self.documents, count: self.counts.documents as usize, of: PhantomData }
    }

    /// Whether everything in the body makes sense: a pass over all of it.
    pub(crate) fn check(&self) -> Result<(), DataError> {
        let mut reader = Reader::of_shard(self);
        let (mut totals, mut ids) = (Counts::default(), Vec::new());
        for number in 0..self.counts.documents as usize {
            let document = reader.document(number)?;
            let mut end = 0;
            for sentence in 0..document.sentences() {
                end = reader.sentence(&document, sentence)?.end;
            }
            if end != document.len() {
                return Err(self.damaged(format!("the sentences of document {number} do not end where it does")));
            }
            ids.clear();
            reader.read(&document, 0..end, &mut ids)?;
            let (sentences, pieces) = (document.sentences() as u64, document.len() as u64);
            totals.add(Counts { documents: 1, sentences, pieces });
        }
        match totals == self.counts {
            true => Ok(()),
            false => Err(self.damaged(format!("its documents have {totals:?}, its footer has {:?}", self.counts))),
        }
    }
}

/// One of the tables of a shard.
pub(crate) struct Numbers<'a, T> {
    blocks: &'a Blocks,
    /// Where it begins in the file.
    begin: usize,
    count: usize,
    of: PhantomData<T>,
}

impl<'a, T: bytemuck::Pod> Numbers<'a, T> {
    /// Those around a place that are in memory, with the place of the first.
    pub(crate) fn around(&self, place: usize) -> Result<Option<(usize, &'a [T])>, DataError> {
        let size = size_of::<T>();
        let Some((start, bytes)) = self.blocks.around(self.begin + place * size)? else { return Ok(None) };
        let end = (start + bytes.len()).min(self.begin + self.count * size);
        let first = start.saturating_sub(self.begin).div_ceil(size);
        let last = (end - self.begin) / size;
        // One may lie on the border of two blocks; and bytes in memory are nearly always aligned.
        if !(first..last).contains(&place) {
            return Ok(None);
        }
        let bytes = &bytes[self.begin + first * size - start..self.begin + last * size - start];
        Ok(bytemuck::try_cast_slice(bytes).ok().map(|numbers| (first, numbers)))
    }

    /// Reads some from a place on, as many as there are up to `most`.
    pub(crate) fn read(&self, place: usize, most: usize, out: &mut Vec<T>) -> Result<(), DataError> {
        out.clear();
        out.resize(most.min(self.count - place), T::zeroed());
        let (mut rest, mut buffer) = (bytemuck::cast_slice_mut::<T, u8>(out), Vec::new());
        let (at, size) = (self.begin + place * size_of::<T>(), rest.len());
        let result = self.blocks.for_each_part(at, size, &mut buffer, |part| {
            let (here, after) = std::mem::take(&mut rest).split_at_mut(part.len());
            here.copy_from_slice(part);
            rest = after;
        });
        if result.is_err() {
            out.clear();
        }
        result
    }
}

impl Frame {
    /// Reads and checks header, sums and footer of a file of so many bytes.
    fn read(path: &Path, size: u64, vocabulary_size: u32, read: ReadAt<'_>) -> Result<Self, DataError> {
        let damaged = |problem: &str| DataError::damaged(path, problem);
        if size < (HEADER + FOOTER) as u64 {
            return Err(DataError::damaged(path, format!("it has {size} bytes, too few for a shard")));
        }
        let (mut head, mut foot) = ([0; HEADER], [0; FOOTER]);
        read(0, &mut head)?;
        read(size - FOOTER as u64, &mut foot)?;
        if &head[..8] != MAGIC {
            return Err(damaged("it does not begin as a shard does"));
        }
        let version = u32_at(&head, 8);
        if ![WITHOUT_SUMS, VERSION].contains(&version) {
            return Err(DataError::Version { path: path.to_owned(), found: version, supported: VERSION });
        }
        let counts = Counts { pieces: u64_at(&foot, 0), sentences: u64_at(&foot, 8), documents: u64_at(&foot, 16) };
        let width = id_width(vocabulary_size) as u64;
        let layout = || {
            let ids = counts.pieces.checked_mul(width)?;
            let ends = ids.checked_next_multiple_of(4)?.checked_add(HEADER as u64)?;
            let documents = ends.checked_add(counts.sentences.checked_mul(4)?)?;
            let covered = documents.checked_add(counts.documents.checked_mul(8)?)?;
            let sums = if version == WITHOUT_SUMS { 0 } else { covered.div_ceil(BLOCK as u64) };
            let end = covered.checked_add(sums.checked_mul(8)?)?.checked_add(FOOTER as u64)?;
            (end == size).then_some([ends, documents, covered, sums])
        };
        let Some([ends, documents, covered, blocks]) = layout() else {
            return Err(damaged("its size is not that of its documents"));
        };
        // Their number is bounded by the size of the file.
        let mut sums = vec![0_u64; blocks as usize];
        read(covered, bytemuck::cast_slice_mut(&mut sums))?;
        if head != header(version, vocabulary_size) || foot != footer(version, &sums, counts, vocabulary_size) {
            return Err(damaged(
                "its header, checksums or footer are not those of a shard of this vocabulary, or changed",
            ));
        }
        Ok(Self { counts, ends, documents, covered, sums })
    }
}

/// A shard with this body, right or wrong, for the fuzz targets.
pub(crate) fn frame(version: u32, body: &[u8], counts: Counts, vocabulary_size: u32) -> Vec<u8> {
    let mut bytes = [&header(version, vocabulary_size)[..], body].concat();
    let mut sums = Sums::default();
    if version != WITHOUT_SUMS {
        sums.add(&bytes);
    }
    let sums = sums.finish();
    bytes.extend_from_slice(bytemuck::cast_slice(&sums));
    bytes.extend_from_slice(&footer(version, &sums, counts, vocabulary_size));
    bytes
}

/// The lower-case digits of a hash.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn header(version: u32, vocabulary_size: u32) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..8].copy_from_slice(MAGIC);
    header[8..12].copy_from_slice(&version.to_le_bytes());
    header[12..].copy_from_slice(&(id_width(vocabulary_size) as u32).to_le_bytes());
    header
}

fn footer(version: u32, sums: &[u64], counts: Counts, vocabulary_size: u32) -> [u8; FOOTER] {
    let mut footer = [0; FOOTER];
    for (place, count) in footer.chunks_mut(8).zip([counts.pieces, counts.sentences, counts.documents]) {
        place.copy_from_slice(&count.to_le_bytes());
    }
    footer[24..28].copy_from_slice(&vocabulary_size.to_le_bytes());
    let check = Sha256::new()
        .chain_update(header(version, vocabulary_size))
        .chain_update(bytemuck::cast_slice::<u64, u8>(sums))
        .chain_update(&footer[..CHECK])
        .finalize();
    footer[CHECK..].copy_from_slice(&check[..FOOTER - CHECK]);
    footer
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..].first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}
