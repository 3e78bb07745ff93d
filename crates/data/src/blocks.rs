//! The bytes of a shard, read in blocks by as many threads as there are.
//!
//! Files are read with positioned reads and never mapped into memory: one that is cut while it is open gives an error and
//! no signal. A block is compared with its checksum when it is first touched. The first blocks that a corpus touches stay
//! in memory, up to [`KEPT`]; among them are all offsets, which counting an epoch reads first. Of the others only the
//! bytes that are asked for are read again, from the system's own cache where it has them.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use twox_hash::XxHash3_64;

use crate::DataError;

/// The bytes of a block: what a checksum covers.
pub(crate) const BLOCK: usize = 1 << 16;

/// The bytes of blocks that a corpus keeps in memory.
const KEPT: u64 = 256 << 20;

/// How much more a corpus may keep in memory.
#[derive(Debug)]
pub(crate) struct Budget(AtomicU64);

impl Budget {
    pub(crate) fn new() -> Arc<Self> {
        Self::of(KEPT)
    }

    pub(crate) fn of(bytes: u64) -> Arc<Self> {
        Arc::new(Self(AtomicU64::new(bytes)))
    }

    fn take(&self, bytes: u64) -> bool {
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(bytes)).is_ok()
    }

    fn give_back(&self, bytes: u64) {
        self.0.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// A file, or the same bytes in memory.
pub(crate) enum Blocks {
    Memory(Vec<u8>),
    File(FileBlocks),
}

pub(crate) struct FileBlocks {
    path: PathBuf,
    file: File,
    /// How many bytes the blocks cover, from the beginning of the file.
    covered: u64,
    blocks: Vec<Block>,
    /// One for each block, or none at all.
    sums: Vec<u64>,
    budget: Arc<Budget>,
}

#[derive(Default)]
struct Block {
    bytes: OnceLock<Box<[u8]>>,
    checked: AtomicBool,
}

impl std::fmt::Debug for Blocks {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Blocks::Memory(bytes) => write!(formatter, "{} bytes in memory", bytes.len()),
            Blocks::File(file) => write!(formatter, "{}", file.path.display()),
        }
    }
}

impl Blocks {
    /// Reads bytes, part by part. They must lie in what the blocks cover.
    #[inline]
    pub(crate) fn for_each_part(
        &self,
        at: usize,
        size: usize,
        buffer: &mut Vec<u8>,
        mut each: impl FnMut(&[u8]),
    ) -> Result<(), DataError> {
        let Blocks::File(file) = self else {
            let (_, bytes) = self.around(at)?.unwrap_or_default();
            each(&bytes[at..at + size]);
            return Ok(());
        };
        let (mut at, end) = (at, at + size);
        while at < end {
            let (number, offset) = (at / BLOCK, at % BLOCK);
            let part = (end - at).min(BLOCK - offset);
            match file.kept(number)? {
                Some(bytes) => each(&bytes[offset..offset + part]),
                None => {
                    buffer.resize(part, 0);
                    file.read_from_disk(number, offset, buffer)?;
                    each(buffer);
                }
            }
            at += part;
        }
        Ok(())
    }

    /// The bytes around a place that are in memory, and where they begin; none where they are not kept there.
    pub(crate) fn around(&self, at: usize) -> Result<Option<(usize, &[u8])>, DataError> {
        match self {
            Blocks::Memory(bytes) => Ok(Some((0, bytes))),
            Blocks::File(file) => {
                let number = at / BLOCK;
                Ok(file.kept(number)?.map(|bytes| (number * BLOCK, bytes)))
            }
        }
    }
}

impl FileBlocks {
    /// The first bytes of a file, with the checksum of each block; without any where there are none.
    pub(crate) fn new(path: &Path, file: File, covered: u64, sums: Vec<u64>, budget: &Arc<Budget>) -> Self {
        let blocks = (0..covered.div_ceil(BLOCK as u64)).map(|_| Block::default()).collect();
        Self { path: path.to_owned(), file, covered, blocks, sums, budget: Arc::clone(budget) }
    }

    /// A block that is in memory, or for which there is room.
    #[inline]
    fn kept(&self, number: usize) -> Result<Option<&[u8]>, DataError> {
        match self.blocks[number].bytes.get() {
            Some(bytes) => Ok(Some(bytes)),
            None => self.keep(number),
        }
    }

    #[cold]
    fn keep(&self, number: usize) -> Result<Option<&[u8]>, DataError> {
        let size = self.size(number);
        if !self.budget.take(size) {
            return Ok(None);
        }
        let block = &self.blocks[number].bytes;
        // Another thread may have read it meanwhile.
        let kept = self.read_block(number).map(|bytes| block.set(bytes).is_ok());
        if !matches!(kept, Ok(true)) {
            self.budget.give_back(size);
        }
        kept.map(|_| block.get().map(|bytes| &bytes[..]))
    }

    /// Reads a part of a block that is not in memory.
    fn read_from_disk(&self, number: usize, offset: usize, out: &mut [u8]) -> Result<(), DataError> {
        if !self.blocks[number].checked.load(Ordering::Relaxed) {
            out.copy_from_slice(&self.read_block(number)?[offset..offset + out.len()]);
            return Ok(());
        }
        read_exact_at(&self.path, &self.file, (number * BLOCK + offset) as u64, out)
    }

    /// Reads a block and compares it with its checksum.
    fn read_block(&self, number: usize) -> Result<Box<[u8]>, DataError> {
        let mut bytes = vec![0; self.size(number) as usize].into_boxed_slice();
        read_exact_at(&self.path, &self.file, (number * BLOCK) as u64, &mut bytes)?;
        self.check(number, &bytes)?;
        self.blocks[number].checked.store(true, Ordering::Relaxed);
        Ok(bytes)
    }

    fn size(&self, number: usize) -> u64 {
        (self.covered - (number * BLOCK) as u64).min(BLOCK as u64)
    }

    fn check(&self, number: usize, bytes: &[u8]) -> Result<(), DataError> {
        match self.sums.get(number) {
            Some(sum) if *sum != XxHash3_64::oneshot(bytes) => {
                let start = number * BLOCK;
                let problem = format!("its bytes {start} to {} do not match their checksum", start + bytes.len());
                Err(DataError::damaged(&self.path, problem))
            }
            _ => Ok(()),
        }
    }
}

/// Reads bytes of a file whose size was checked when it was opened.
pub(crate) fn read_exact_at(path: &Path, file: &File, at: u64, out: &mut [u8]) -> Result<(), DataError> {
    file.read_exact_at(out, at).map_err(|error: io::Error| match error.kind() {
        ErrorKind::UnexpectedEof => DataError::Changed { path: path.to_owned() },
        _ => DataError::io("read", path)(error),
    })
}

/// The checksums of blocks, of a stream of bytes.
#[derive(Default)]
pub(crate) struct Sums {
    block: XxHash3_64,
    filled: usize,
    finished: Vec<u64>,
}

impl Sums {
    pub(crate) fn add(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let (part, rest) = bytes.split_at(bytes.len().min(BLOCK - self.filled));
            std::hash::Hasher::write(&mut self.block, part);
            self.filled += part.len();
            if self.filled == BLOCK {
                self.close();
            }
            bytes = rest;
        }
    }

    pub(crate) fn finish(mut self) -> Vec<u64> {
        if self.filled > 0 {
            self.close();
        }
        self.finished
    }

    fn close(&mut self) {
        self.finished.push(std::hash::Hasher::finish(&self.block));
        (self.block, self.filled) = (XxHash3_64::new(), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Blocks of a file with their sums: right ones, or one for all that is wrong.
    fn blocks(path: &Path, bytes: &[u8], sums: Option<u64>, kept: u64) -> Blocks {
        std::fs::write(path, bytes).unwrap();
        let mut right = Sums::default();
        // In pieces that end anywhere.
        bytes.chunks(7001).for_each(|part| right.add(part));
        let right = right.finish();
        let sums = sums.map_or(right.clone(), |sum| vec![sum; right.len()]);
        let covered = bytes.len() as u64;
        Blocks::File(FileBlocks::new(path, File::open(path).unwrap(), covered, sums, &Budget::of(kept)))
    }

    fn read(blocks: &Blocks, at: usize, size: usize) -> Result<Vec<u8>, DataError> {
        let mut found = Vec::new();
        blocks.for_each_part(at, size, &mut Vec::new(), |part| found.extend_from_slice(part)).map(|()| found)
    }

    fn bytes() -> Vec<u8> {
        (0..3 * BLOCK + 1000).map(|i| (i * 7 + i / 251) as u8).collect()
    }

    #[test]
    fn all_bytes_come_back_whatever_is_kept() {
        let directory = tempfile::tempdir().unwrap();
        let (path, bytes) = (directory.path().join("a.shard"), bytes());
        for kept in [0, BLOCK as u64, 2 * BLOCK as u64 + 1, u64::MAX] {
            let blocks = blocks(&path, &bytes, None, kept);
            // Twice: the second time some are in memory.
            for at in (0..bytes.len()).step_by(9973).chain((0..bytes.len()).step_by(9973)) {
                let size = (bytes.len() - at).min(70_000);
                let found = read(&blocks, at, size).unwrap();
                assert!(found == bytes[at..at + size], "{at}, {kept} bytes kept");
            }
        }
    }

    #[test]
    fn damaged_blocks_are_errors_each_time() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.shard");
        for kept in [0, u64::MAX] {
            let blocks = blocks(&path, &bytes(), Some(4711), kept);
            for _ in 0..2 {
                let error = read(&blocks, BLOCK + 5, 3).unwrap_err().to_string();
                assert!(error.contains("a.shard is damaged: its bytes 65536 to 131072 do not match"), "{error}");
            }
        }
    }

    /// What is in memory is still there; what is not is an error that names the file, and no signal.
    #[test]
    fn truncated_while_it_is_open() {
        let directory = tempfile::tempdir().unwrap();
        let (path, bytes) = (directory.path().join("a.shard"), bytes());
        for kept in [0, u64::MAX] {
            let blocks = blocks(&path, &bytes, None, kept);
            read(&blocks, 0, 3).unwrap();
            File::options().write(true).open(&path).unwrap().set_len(1).unwrap();
            assert_eq!(read(&blocks, 10, 3).ok(), (kept > 0).then(|| bytes[10..13].to_vec()));
            let error = read(&blocks, BLOCK, 3).unwrap_err();
            assert!(matches!(&error, DataError::Changed { path: of } if *of == path), "{error}");
        }
    }
}
