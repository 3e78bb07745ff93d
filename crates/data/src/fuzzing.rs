//! Doors for the fuzz targets: what readers of files from strangers promise, as assertions.

use std::path::{Component, Path};

use crate::corpus::Reader;
use crate::manifest::Manifest;
use crate::shard::{Counts, Shard, VERSION, WITHOUT_SUMS, frame};

/// Bytes as a shard, and as the body of one whose header and footer are right: whatever is accepted can be read to its
/// end, and all that comes out is within bounds.
pub fn shard(bytes: &[u8]) {
    if let Ok(shard) = Shard::from_bytes(Path::new("fuzz"), bytes.to_vec(), 1000) {
        walk(&shard);
    }
    let [first, second, body @ ..] = bytes else { return };
    // Both widths of ids.
    let vocabulary_size = if first & 1 == 0 { 1000 } else { 100_000 };
    let width = if first & 1 == 0 { 2 } else { 4 };
    let counts = Counts { documents: u64::from(first >> 1), sentences: u64::from(*second), pieces: 0 };
    let offsets = (8 * counts.documents + 4 * counts.sentences) as usize;
    let pieces = body.len().saturating_sub(offsets) / 4 * 4 / width;
    let counts = Counts { pieces: pieces as u64, ..counts };
    for version in [WITHOUT_SUMS, VERSION] {
        let framed = frame(version, &body[..body.len().min(pieces * width + offsets)], counts, vocabulary_size);
        if let Ok(shard) = Shard::from_bytes(Path::new("fuzz"), framed, vocabulary_size) {
            walk(&shard);
        }
    }
}

/// Bytes as a manifest: whatever is accepted names files below its own directory.
pub fn manifest(bytes: &[u8]) {
    let Ok(manifest) = Manifest::parse(Path::new("fuzz"), bytes) else { return };
    for name in manifest.shards.iter().map(|shard| &shard.file).chain(manifest.files.iter().map(|file| &file.file)) {
        assert!(Path::new(name).components().all(|part| matches!(part, Component::Normal(_))), "{name:?}");
    }
    assert_eq!(manifest.digest().len(), 64);
}

fn walk(shard: &Shard) {
    let mut reader = Reader::of_shard(shard);
    let mut ids = Vec::new();
    for number in 0..shard.counts().documents as usize {
        let Ok(document) = reader.document(number) else { continue };
        for sentence in 0..document.sentences() {
            let Ok(range) = reader.sentence(&document, sentence) else { continue };
            assert!(range.start <= range.end && range.end <= document.len());
            if reader.read(&document, range.clone(), &mut ids).is_ok() {
                assert_eq!(ids.len(), range.len());
                assert!(ids.iter().all(|&id| id < shard.vocabulary_size()));
            }
            ids.clear();
        }
    }
    let _ = shard.check();
}
