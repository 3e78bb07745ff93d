//! A tokenized corpus: documents of sentences of pieces, memory-mapped from shards or held in memory.

use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::manifest::{Manifest, TOKENIZER, VOCABULARY, checksum, read_limited};
use crate::shard::{Counts, Ids, Shard, ShardWriter, hex};
use crate::{DataError, Vocabulary};

/// The largest `vocabulary.json` that is read: tokenizers have at most 2²⁴ ids.
const VOCABULARY_LIMIT: u64 = 256 << 20;

/// The two parts of a corpus.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Split {
    /// What is trained on.
    Train,
    /// What is kept back to evaluate on.
    HeldOut,
}

/// Documents that come from one place. Their numbers follow each other.
#[derive(Clone, Debug, PartialEq)]
pub struct Source {
    /// Its name.
    pub name: String,
    /// How many times its documents are seen where those of weight 1 are seen once.
    pub weight: f64,
    /// The numbers of its documents.
    pub documents: Range<usize>,
}

/// A tokenized corpus, or one part of it.
///
/// The files must not be changed in place while they are open. [`crate::build()`] never does: it writes a new directory
/// and renames it, and an open corpus keeps the old files alive.
#[derive(Debug)]
pub struct Corpus {
    vocabulary: Vocabulary,
    shards: Vec<Shard>,
    /// The number of each shard's first document.
    first: Vec<usize>,
    counts: Counts,
    sources: Vec<Source>,
    digest: String,
    files: Option<Files>,
}

/// Where a corpus was opened.
#[derive(Debug)]
struct Files {
    directory: PathBuf,
    tokenizer: PathBuf,
    manifest: Manifest,
    split: Split,
}

/// One document of a corpus.
#[derive(Clone, Copy, Debug)]
pub struct Document<'a> {
    ids: Ids<'a>,
    /// Where sentences end among the document's pieces.
    ends: &'a [u32],
    /// All ids are below this.
    limit: u32,
}

impl Corpus {
    /// Opens a part of a corpus that [`crate::build()`] wrote. A part may have no documents.
    ///
    /// Headers and sizes are checked, in a time that does not grow with the documents; see [`verify`](Self::verify).
    pub fn open(directory: &Path, split: Split) -> Result<Self, DataError> {
        let manifest = Manifest::read(directory)?;
        let path = directory.join(VOCABULARY);
        let vocabulary: Vocabulary = serde_json::from_slice(&read_limited(&path, VOCABULARY_LIMIT)?)
            .map_err(|error| DataError::damaged(&path, error.to_string()))?;
        vocabulary.check().map_err(|problem| DataError::damaged(&path, problem))?;
        let mut shards = Vec::new();
        for entry in manifest.shards.iter().filter(|entry| entry.split == split) {
            shards.push(Shard::open(&directory.join(&entry.file), vocabulary.size, entry.counts, entry.bytes)?);
        }
        let (mut sources, mut next) = (Vec::new(), 0);
        for source in &manifest.sources {
            let documents = next..next + source.counts(split).documents as usize;
            next = documents.end;
            if !documents.is_empty() {
                sources.push(Source { name: source.name.clone(), weight: source.weight, documents });
            }
        }
        let digest = manifest.digest();
        let (directory, tokenizer) = (directory.to_owned(), directory.join(TOKENIZER));
        let files = Some(Files { directory, tokenizer, manifest, split });
        Ok(Self::new(vocabulary, shards, sources, digest, files))
    }

    /// A corpus in memory, for small texts and for tests: documents of sentences of ids. It has one source, of weight 1.
    ///
    /// Panics where an id is not in the vocabulary.
    pub fn from_documents(vocabulary: Vocabulary, documents: &[Vec<Vec<u32>>]) -> Self {
        let write = || -> Result<(Shard, String), DataError> {
            let memory = Path::new("memory");
            let mut writer = ShardWriter::new(Vec::new(), vocabulary.size).map_err(DataError::io("write", memory))?;
            for sentences in documents {
                let end = |end: &mut u32, sentence: &Vec<u32>| {
                    *end += sentence.len() as u32;
                    Some(*end)
                };
                let ends: Vec<u32> = sentences.iter().scan(0, end).collect();
                let ids = sentences.concat();
                assert!(ids.iter().all(|&id| id < vocabulary.size), "an id that is not in the vocabulary");
                writer.push(&ids, &ends).map_err(DataError::io("write", memory))?;
            }
            let (bytes, sha256) = writer.finish().map_err(DataError::io("write", memory))?;
            Ok((Shard::from_bytes(memory, &bytes, vocabulary.size)?, sha256))
        };
        let (shard, sha256) = write().expect("memory can be written, and what was written can be read");
        let digest = hex(&Sha256::digest(format!("{vocabulary:?} {sha256}")));
        let source = Source { name: "documents".to_owned(), weight: 1.0, documents: 0..documents.len() };
        Self::new(vocabulary, vec![shard], vec![source], digest, None)
    }

    fn new(
        vocabulary: Vocabulary,
        shards: Vec<Shard>,
        sources: Vec<Source>,
        digest: String,
        files: Option<Files>,
    ) -> Self {
        let (mut first, mut counts) = (Vec::new(), Counts::default());
        for shard in &shards {
            first.push(counts.documents as usize);
            counts.add(shard.counts());
        }
        Self { vocabulary, shards, first, counts, sources, digest, files }
    }

    /// What it was tokenized with.
    pub fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    /// How many documents.
    pub fn documents(&self) -> usize {
        self.counts.documents as usize
    }

    /// How many sentences.
    pub fn sentences(&self) -> u64 {
        self.counts.sentences
    }

    /// How many pieces.
    pub fn pieces(&self) -> u64 {
        self.counts.pieces
    }

    /// A document by its number. Panics if there is none of this number.
    ///
    /// Where a shard is damaged, a document may be empty or have other pieces; see [`verify`](Self::verify).
    pub fn document(&self, number: usize) -> Document<'_> {
        let after = self.first.partition_point(|&first| first <= number);
        assert!(number < self.documents(), "document {number} of {}", self.documents());
        let shard = &self.shards[after - 1];
        let (ids, ends) = shard.document(number - self.first[after - 1]).unwrap_or((Ids::Two(&[]), &[]));
        Document { ids, ends, limit: shard.vocabulary_size() }
    }

    /// Where documents come from, in the order of their numbers; only sources that have any here.
    pub fn sources(&self) -> &[Source] {
        &self.sources
    }

    /// Names the data: the same for the same shards, sources and tokenizer, both parts together.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// The directory with the tokenizer's files; none for a corpus in memory.
    pub fn tokenizer_directory(&self) -> Option<&Path> {
        self.files.as_ref().map(|files| files.tokenizer.as_path())
    }

    /// Reads every file of this part, compares checksums, and checks every offset and id.
    pub fn verify(&self) -> Result<(), DataError> {
        let Some(files) = &self.files else { return Ok(()) };
        let manifest = &files.manifest;
        let shards = manifest.shards.iter().filter(|shard| shard.split == files.split);
        let shards = shards.map(|shard| (&shard.file, shard.bytes, &shard.sha256));
        for (name, bytes, sha256) in
            shards.chain(manifest.files.iter().map(|file| (&file.file, file.bytes, &file.sha256)))
        {
            let path = files.directory.join(name);
            let (size, found) = checksum(&path)?;
            if (size, &found) != (bytes, sha256) {
                let problem =
                    format!("its SHA-256 is {found} over {size} bytes, the manifest says {sha256} over {bytes}");
                return Err(DataError::damaged(path, problem));
            }
        }
        let names = manifest.shards.iter().filter(|shard| shard.split == files.split);
        for (shard, entry) in self.shards.iter().zip(names) {
            shard.check().map_err(|problem| DataError::damaged(files.directory.join(&entry.file), problem))?;
        }
        Ok(())
    }
}

impl Document<'_> {
    /// How many sentences.
    pub fn sentences(&self) -> usize {
        self.ends.len()
    }

    /// How many pieces.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether it has no pieces at all.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The pieces of a sentence, as positions in the document. Panics if there is no such sentence.
    pub fn sentence(&self, number: usize) -> Range<usize> {
        let begin = if number == 0 { 0 } else { self.ends[number - 1] as usize };
        begin..self.ends[number] as usize
    }

    /// Appends the ids at these positions, those of them that the document has.
    pub fn read(&self, positions: Range<usize>, ids: &mut Vec<u32>) {
        self.ids.read(positions, self.limit, ids);
    }
}
