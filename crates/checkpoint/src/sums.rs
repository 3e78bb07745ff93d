//! Checksums of files: XXH3, which finds damage and costs next to nothing. It is no protection against malice.

use std::collections::BTreeMap;
use std::hash::Hasher;
use std::io::{self, Read, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use crate::CheckpointError;
use crate::directory::open_regular;

/// The checksums of a directory's files, by their names in it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Sums(BTreeMap<String, String>);

impl Sums {
    /// The checksum of bytes, as it is written down.
    pub fn of(bytes: &[u8]) -> String {
        written(XxHash3_64::oneshot(bytes))
    }

    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    pub(crate) fn insert(&mut self, name: &str, hash: &XxHash3_64) {
        self.0.insert(name.to_owned(), written(hash.finish()));
    }

    /// Those of the files in a directory within, by their names there.
    pub fn within(&self, directory: &str) -> Self {
        let own = self.0.iter().filter_map(|(name, sum)| {
            let name = name.strip_prefix(directory)?.strip_prefix('/')?;
            Some((name.to_owned(), sum.clone()))
        });
        Self(own.collect())
    }

    /// Reads the files for which `is_meant` is true and compares them.
    pub fn check(&self, directory: &Path, is_meant: impl Fn(&str) -> bool) -> Result<(), CheckpointError> {
        for (name, expected) in self.0.iter().filter(|(name, _)| is_meant(name)) {
            let path = directory.join(name);
            compare(&path, expected, &hash_of(&path)?)?;
        }
        Ok(())
    }

    /// The checksum of a file.
    pub fn of_file(path: &Path) -> Result<String, CheckpointError> {
        Ok(written(hash_of(path)?.finish()))
    }
}

fn hash_of(path: &Path) -> Result<XxHash3_64, CheckpointError> {
    let mut file = open_regular(path, "read")?;
    let (mut hash, mut buffer) = (XxHash3_64::new(), vec![0; 1 << 16]);
    loop {
        match file.read(&mut buffer).map_err(CheckpointError::io("read", path))? {
            0 => return Ok(hash),
            read => hash.write(&buffer[..read]),
        }
    }
}

/// An error where a file's bytes are not those that the checksum was made of.
pub(crate) fn compare(path: &Path, expected: &str, hash: &XxHash3_64) -> Result<(), CheckpointError> {
    let found = written(hash.finish());
    match found == expected {
        true => Ok(()),
        false => Err(CheckpointError::Checksum { path: path.to_owned(), expected: expected.to_owned(), found }),
    }
}

fn written(sum: u64) -> String {
    format!("{sum:016x}")
}

/// Passes bytes on and takes their checksum on the way.
pub(crate) struct Summed<W> {
    pub(crate) out: W,
    pub(crate) hash: XxHash3_64,
}

impl<W> Summed<W> {
    pub(crate) fn new(out: W) -> Self {
        Self { out, hash: XxHash3_64::new() }
    }
}

impl<W: Write> Write for Summed<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes)?;
        self.hash.write(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
