//! Vectors of texts, kept in a file by the content of the texts and by what made them, so that a corpus is embedded once.
//!
//! The file, behind what [`crate::framed`] puts before it: the width (u32) and the number of vectors (u64), then for each the first 16 bytes
//! of the SHA-256 of its key and its numbers (f32), all little-endian. Whatever is not exactly that is no cache: it is reported and made
//! again.

use std::collections::HashMap;
use std::path::Path;

use henson_checkpoint::{read_limited, write_atomic};
use sha2::{Digest, Sha256};

use crate::framed::{body, framed};

/// How the file begins.
const MAGIC: &[u8] = b"henson vectors 1\n";

/// The largest file that is read.
const LIMIT: u64 = 16 << 30;

/// Bytes of a key.
const KEY: usize = 16;

/// Vectors by the texts that they are of.
#[derive(Debug, Default)]
pub struct VectorCache {
    /// What made them: the model and its settings.
    maker: String,
    width: usize,
    vectors: HashMap<[u8; KEY], Vec<f32>>,
}

impl VectorCache {
    /// Reads a file, if it is there; else, or where it is damaged, there are no vectors yet. The second is what is wrong with it.
    pub fn open(path: &Path, maker: &str) -> (Self, Option<String>) {
        let empty = Self { maker: maker.to_owned(), ..Self::default() };
        if !path.exists() {
            return (empty, None);
        }
        let read = read_limited(path, LIMIT).map_err(|error| error.to_string());
        match read.and_then(|bytes| parse(&bytes).ok_or_else(|| format!("{} is damaged", path.display()))) {
            Ok((width, vectors)) => (Self { width, vectors, ..empty }, None),
            Err(problem) => (empty, Some(format!("{problem}: vectors are made again"))),
        }
    }

    /// The vector of a text.
    pub fn get(&self, text: &str) -> Option<&[f32]> {
        self.vectors.get(&self.key(text)).map(Vec::as_slice)
    }

    /// Keeps a vector. Those of another width than this one are forgotten.
    pub fn insert(&mut self, text: &str, vector: Vec<f32>) {
        if vector.len() != self.width {
            self.vectors.clear();
            self.width = vector.len();
        }
        self.vectors.insert(self.key(text), vector);
    }

    /// Forgets all but the vectors of these texts.
    pub fn keep_only<'t>(&mut self, texts: impl Iterator<Item = &'t str>) {
        let keys: std::collections::HashSet<[u8; KEY]> = texts.map(|text| self.key(text)).collect();
        self.vectors.retain(|key, _| keys.contains(key));
    }

    /// Writes the file, whole or not at all. The same vectors give the same bytes.
    pub fn save(&self, path: &Path) -> Result<(), henson_checkpoint::CheckpointError> {
        write_atomic(path, &framed(MAGIC, &self.body()))
    }

    fn body(&self) -> Vec<u8> {
        let mut body = Vec::with_capacity(self.vectors.len() * (KEY + 4 * self.width) + 12);
        body.extend((self.width as u32).to_le_bytes());
        body.extend((self.vectors.len() as u64).to_le_bytes());
        let mut sorted: Vec<(&[u8; KEY], &Vec<f32>)> = self.vectors.iter().collect();
        sorted.sort_by_key(|(key, _)| **key);
        for (key, vector) in sorted {
            body.extend(key);
            vector.iter().for_each(|x| body.extend(x.to_le_bytes()));
        }
        body
    }

    fn key(&self, text: &str) -> [u8; KEY] {
        let mut hash = Sha256::new();
        hash.update((self.maker.len() as u64).to_le_bytes());
        hash.update(&self.maker);
        hash.update(text);
        let mut key = [0; KEY];
        key.copy_from_slice(&hash.finalize()[..KEY]);
        key
    }
}

type Vectors = (usize, HashMap<[u8; KEY], Vec<f32>>);

fn parse(bytes: &[u8]) -> Option<Vectors> {
    let (width, rest) = body(MAGIC, bytes)?.split_first_chunk::<4>()?;
    let (count, rest) = rest.split_first_chunk::<8>()?;
    let (width, count) = (u32::from_le_bytes(*width) as usize, u64::from_le_bytes(*count));
    let size = KEY + 4 * width;
    if rest.len() as u64 != count.checked_mul(size as u64)? {
        return None;
    }
    let mut vectors = HashMap::with_capacity(rest.len() / size);
    for entry in rest.chunks_exact(size) {
        let (key, numbers) = entry.split_first_chunk::<KEY>()?;
        let (numbers, _) = numbers.as_chunks::<4>();
        vectors.insert(*key, numbers.iter().map(|x| f32::from_le_bytes(*x)).collect());
    }
    Some((width, vectors))
}

/// Bytes as a whole file, and as a body in a right frame: what is accepted has vectors of one width, no more than there are bytes for. For
/// `fuzz/` alone.
pub fn fuzz(bytes: &[u8]) {
    for file in [bytes.to_vec(), framed(MAGIC, bytes)] {
        let Some((width, vectors)) = parse(&file) else { continue };
        assert!(vectors.values().all(|vector| vector.len() == width), "{width}");
        assert!(vectors.len() * (KEY + 4 * width) <= file.len(), "{}", vectors.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_are_found_again_or_made_again() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("cache");
        let (mut cache, problem) = VectorCache::open(&path, "model");
        assert_eq!((cache.get("a"), problem), (None, None));
        cache.insert("a", vec![1.0, f32::MIN_POSITIVE]);
        cache.insert("b", vec![3.0, -0.0]);
        cache.insert("c", vec![5.0, 6.0]);
        cache.keep_only(["a", "b"].into_iter());
        cache.save(&path).unwrap();
        let (again, problem) = VectorCache::open(&path, "model");
        assert_eq!((again.get("a"), again.get("c"), problem), (Some(&[1.0, f32::MIN_POSITIVE][..]), None, None));
        // Another model's vectors are others.
        assert_eq!(VectorCache::open(&path, "another").0.get("a"), None);
        let bytes = std::fs::read(&path).unwrap();
        again.save(&path).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), bytes);
        // Any bit, any cut.
        for i in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[i] ^= 1;
            assert!(parse(&damaged).is_none(), "byte {i}");
            assert!(parse(&bytes[..i]).is_none(), "cut at {i}");
        }
        std::fs::write(&path, &bytes[..40]).unwrap();
        let (empty, problem) = VectorCache::open(&path, "model");
        assert!(empty.get("a").is_none() && problem.unwrap().contains("is damaged"));
    }
}
