//! `corpus.json`: what a corpus is made of, with the size and checksum of each of its files.
//!
//! The digest of a corpus covers what a training run depends on (sources, shards, vocabulary, tokenizer) and nothing
//! else: the same shards built by another version of henson are the same data.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;
use std::path::{Component, Path};

use henson_text::check_regular;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::DataError;
use crate::corpus::Split;
use crate::shard::{Counts, hex};

/// The manifest's name.
pub(crate) const MANIFEST: &str = "corpus.json";
/// The vocabulary's facts.
pub(crate) const VOCABULARY: &str = "vocabulary.json";
/// The directory of the tokenizer's files.
pub(crate) const TOKENIZER: &str = "tokenizer";

const FORMAT: &str = "henson corpus";
const VERSION: u32 = 1;

/// The largest manifest that is read: some hundred thousand shards.
const LIMIT: u64 = 64 << 20;

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Manifest {
    /// Says what the file is.
    pub(crate) format: String,
    pub(crate) version: u32,
    /// The program that wrote it, for people.
    pub(crate) henson: String,
    /// How it was built, for people.
    pub(crate) settings: serde_json::Value,
    pub(crate) sources: Vec<SourceEntry>,
    pub(crate) shards: Vec<ShardEntry>,
    /// All files but the shards and the manifest itself.
    pub(crate) files: Vec<FileEntry>,
}

/// A source, and how much of it is where.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SourceEntry {
    pub(crate) name: String,
    pub(crate) weight: f64,
    pub(crate) train: Counts,
    pub(crate) held_out: Counts,
}

impl SourceEntry {
    pub(crate) fn counts(&self, split: Split) -> Counts {
        match split {
            Split::Train => self.train,
            Split::HeldOut => self.held_out,
        }
    }
}

/// A shard of a split. The documents of a split are numbered through its shards, in this order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ShardEntry {
    pub(crate) split: Split,
    pub(crate) file: String,
    pub(crate) bytes: u64,
    pub(crate) sha256: String,
    pub(crate) counts: Counts,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FileEntry {
    pub(crate) file: String,
    pub(crate) bytes: u64,
    pub(crate) sha256: String,
}

impl Manifest {
    pub(crate) fn new(
        settings: serde_json::Value,
        sources: Vec<SourceEntry>,
        shards: Vec<ShardEntry>,
        files: Vec<FileEntry>,
    ) -> Self {
        let henson = env!("CARGO_PKG_VERSION").to_owned();
        Self { format: FORMAT.to_owned(), version: VERSION, henson, settings, sources, shards, files }
    }

    pub(crate) fn to_json(&self) -> Result<Vec<u8>, std::io::Error> {
        let mut bytes = serde_json::to_vec_pretty(self)?;
        bytes.push(b'\n');
        Ok(bytes)
    }

    /// Reads the manifest of a directory, and checks what can be checked without the other files.
    pub(crate) fn read(directory: &Path) -> Result<Self, DataError> {
        let path = directory.join(MANIFEST);
        if !path.exists() {
            return Err(DataError::NotACorpus { directory: directory.to_owned() });
        }
        Self::parse(&path, &read_limited(&path, LIMIT)?)
    }

    pub(crate) fn parse(path: &Path, bytes: &[u8]) -> Result<Self, DataError> {
        // The version first: a later one may have other fields.
        #[derive(Deserialize)]
        struct Version {
            format: String,
            version: u32,
        }
        let malformed = |error: serde_json::Error| DataError::damaged(path, error.to_string());
        let Version { format, version } = serde_json::from_slice(bytes).map_err(malformed)?;
        if format != FORMAT {
            return Err(DataError::damaged(path, format!("its format is {format:?}, not {FORMAT:?}")));
        }
        if version != VERSION {
            return Err(DataError::Version { path: path.to_owned(), found: version, supported: VERSION });
        }
        let manifest: Self = serde_json::from_slice(bytes).map_err(malformed)?;
        manifest.check().map_err(|problem| DataError::damaged(path, problem))?;
        Ok(manifest)
    }

    /// Names the data for a run that is resumed.
    pub(crate) fn digest(&self) -> String {
        let essence = (VERSION, &self.sources, &self.shards, &self.files);
        // Numbers, texts and lists of them can always be written.
        hex(&Sha256::digest(serde_json::to_vec(&essence).unwrap_or_default()))
    }

    /// The total of a split.
    pub(crate) fn counts(&self, split: Split) -> Counts {
        let mut total = Counts::default();
        self.sources.iter().for_each(|source| total.add(source.counts(split)));
        total
    }

    fn check(&self) -> Result<(), String> {
        let names = self.shards.iter().map(|shard| &shard.file).chain(self.files.iter().map(|file| &file.file));
        let mut seen = BTreeSet::from([MANIFEST]);
        for name in names {
            // It comes from strangers, and names are joined to the directory.
            let plain = !name.contains('\\') && Path::new(name).components().all(|c| matches!(c, Component::Normal(_)));
            if !plain || name.is_empty() || !seen.insert(name) {
                return Err(format!("the name {name:?} leads outside of the directory, or is listed twice"));
            }
        }
        for source in &self.sources {
            if !(source.weight.is_finite() && source.weight > 0.0) {
                return Err(format!("source {:?} has the weight {}", source.name, source.weight));
            }
        }
        for split in [Split::Train, Split::HeldOut] {
            let mut total = Counts::default();
            self.shards.iter().filter(|shard| shard.split == split).for_each(|shard| total.add(shard.counts));
            if total != self.counts(split) {
                return Err(format!("its sources have {:?} in {split:?}, its shards {total:?}", self.counts(split)));
            }
            if usize::try_from(total.documents).is_err() {
                return Err(format!("{} documents are too many for this machine", total.documents));
            }
        }
        Ok(())
    }
}

/// Reads a file that should be small.
pub(crate) fn read_limited(path: &Path, limit: u64) -> Result<Vec<u8>, DataError> {
    let file = check_regular(path).and_then(|()| File::open(path)).map_err(DataError::io("open", path))?;
    let mut bytes = Vec::new();
    file.take(limit + 1).read_to_end(&mut bytes).map_err(DataError::io("read", path))?;
    if bytes.len() as u64 > limit {
        return Err(DataError::damaged(path, format!("it has more than {limit} bytes")));
    }
    Ok(bytes)
}

/// The SHA-256 of a file, and its size.
pub(crate) fn checksum(path: &Path) -> Result<(u64, String), DataError> {
    let mut file = check_regular(path).and_then(|()| File::open(path)).map_err(DataError::io("open", path))?;
    let (mut hash, mut size, mut buffer) = (Sha256::new(), 0, vec![0; 1 << 18]);
    loop {
        let read = file.read(&mut buffer).map_err(DataError::io("read", path))?;
        if read == 0 {
            return Ok((size, hex(&hash.finalize())));
        }
        hash.update(&buffer[..read]);
        size += read as u64;
    }
}
