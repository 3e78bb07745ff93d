//! A tokenized corpus: documents of sentences of pieces, read from shards as they are needed, or held in memory.

use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::blocks::Budget;
use crate::manifest::{Manifest, TOKENIZER, VOCABULARY, checksum, read_limited};
use crate::shard::{Counts, Numbers, Shard, ShardWriter, hex, id_width};
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
/// It is read by a [`Reader`] for each thread. The files should not be changed in place while they are open, which is noticed
/// where it can be. [`crate::build()`] never does: it writes a new directory and renames it, and an open corpus keeps the
/// old files alive.
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

/// One document of a corpus: how much it has, and where that lies. [`Reader`] reads it.
#[derive(Clone, Copy, Debug)]
pub struct Document {
    shard: usize,
    first_piece: usize,
    pieces: usize,
    first_sentence: usize,
    sentences: usize,
}

/// Reads documents, for one thread. It remembers some offsets around those that it read last, so that documents that follow
/// each other take few reads.
#[derive(Debug)]
pub struct Reader<'a> {
    shards: &'a [Shard],
    /// The number of each shard's first document.
    first: &'a [usize],
    documents: usize,
    /// Of one shard, the ends of some documents' pieces and sentences.
    table: Window<'a, [u32; 2]>,
    /// Of one shard, the ends of some sentences.
    ends: Window<'a, u32>,
    buffer: Vec<u8>,
}

/// Some numbers of a shard that follow each other: a part of what is in memory, or a copy.
#[derive(Debug)]
struct Window<'a, T> {
    shard: usize,
    first: usize,
    kept: &'a [T],
    copy: Vec<T>,
}

/// Documents and sentences whose offsets are copied at a time.
const TABLE_WINDOW: usize = 64;
const ENDS_WINDOW: usize = 512;

impl Corpus {
    /// Opens a part of a corpus that [`crate::build()`] wrote. A part may have no documents.
    ///
    /// Headers and sizes are checked now, everything else when it is first read; see [`verify`](Self::verify).
    pub fn open(directory: &Path, split: Split) -> Result<Self, DataError> {
        let manifest = Manifest::read(directory)?;
        let path = directory.join(VOCABULARY);
        let vocabulary: Vocabulary = serde_json::from_slice(&read_limited(&path, VOCABULARY_LIMIT)?)
            .map_err(|error| DataError::damaged(&path, error.to_string()))?;
        vocabulary.check().map_err(|problem| DataError::damaged(&path, problem))?;
        let (mut shards, budget) = (Vec::new(), Budget::new());
        for entry in manifest.shards.iter().filter(|entry| entry.split == split) {
            let path = directory.join(&entry.file);
            shards.push(Shard::open(&path, vocabulary.size, entry.counts, entry.bytes, &budget)?);
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
            Ok((Shard::from_bytes(memory, bytes, vocabulary.size)?, sha256))
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

    /// Reads its documents.
    pub fn reader(&self) -> Reader<'_> {
        Reader::new(&self.shards, &self.first, self.documents())
    }

    /// The error for files that are no longer what they were.
    pub(crate) fn changed(&self) -> DataError {
        let path = self.files.as_ref().map_or_else(|| PathBuf::from("memory"), |files| files.directory.clone());
        DataError::Changed { path }
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
                    format!("its SHA-256 is {found} over {size} bytes, the manifest lists {sha256} over {bytes}");
                return Err(DataError::damaged(path, problem));
            }
        }
        self.shards.iter().try_for_each(Shard::check)
    }
}

impl Document {
    /// How many sentences.
    pub fn sentences(&self) -> usize {
        self.sentences
    }

    /// How many pieces.
    pub fn len(&self) -> usize {
        self.pieces
    }

    /// Whether it has no pieces at all.
    pub fn is_empty(&self) -> bool {
        self.pieces == 0
    }
}

impl<'a> Reader<'a> {
    fn new(shards: &'a [Shard], first: &'a [usize], documents: usize) -> Self {
        Self { shards, first, documents, table: Window::new(), ends: Window::new(), buffer: Vec::new() }
    }

    /// Reads the documents of one shard.
    pub(crate) fn of_shard(shard: &'a Shard) -> Self {
        Self::new(std::slice::from_ref(shard), &[0], shard.counts().documents as usize)
    }

    /// A document by its number. Panics if there is none of this number.
    pub fn document(&mut self, number: usize) -> Result<Document, DataError> {
        assert!(number < self.documents, "document {number} of {}", self.documents);
        let shard = self.first.partition_point(|&first| first <= number) - 1;
        let here = number - self.first[shard];
        let [[first_piece, first_sentence], [piece, sentence]] = self.borders(shard, here)?;
        let from = &self.shards[shard];
        let counts = from.counts();
        let fits = first_piece <= piece
            && first_sentence <= sentence
            && u64::from(piece) <= counts.pieces
            && u64::from(sentence) <= counts.sentences
            // Pieces are those of sentences.
            && (first_piece == piece || first_sentence < sentence);
        if !fits {
            return Err(from.damaged(format!("the offsets of document {here} are invalid")));
        }
        let (first_piece, first_sentence) = (first_piece as usize, first_sentence as usize);
        let (pieces, sentences) = (piece as usize - first_piece, sentence as usize - first_sentence);
        Ok(Document { shard, first_piece, pieces, first_sentence, sentences })
    }

    /// The pieces of a sentence, as positions in the document. Panics if there is no such sentence.
    pub fn sentence(&mut self, document: &Document, number: usize) -> Result<Range<usize>, DataError> {
        let begin = if number == 0 { 0 } else { self.sentence_end(document, number - 1)? };
        let end = self.sentence_end(document, number)?;
        match begin <= end {
            true => Ok(begin..end),
            false => Err(self.shards[document.shard].damaged("a sentence ends before it begins")),
        }
    }

    /// Whether any sentence of a document has pieces.
    pub(crate) fn has_text(&mut self, document: &Document) -> Result<bool, DataError> {
        for number in 0..document.sentences {
            if !self.sentence(document, number)?.is_empty() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Where a sentence ends among its document's pieces. Panics if there is no such sentence.
    pub(crate) fn sentence_end(&mut self, document: &Document, number: usize) -> Result<usize, DataError> {
        let end = self.ends(document, number)?[0] as usize;
        self.check(document, end)?;
        Ok(end)
    }

    /// Where sentences from `number` on end among their document's pieces: as many as are at hand, at least one. Whoever
    /// uses one of them [checks](Self::check) it. Panics if there is no such sentence.
    #[inline]
    pub(crate) fn ends(&mut self, document: &Document, number: usize) -> Result<&[u32], DataError> {
        assert!(number < document.sentences, "sentence {number} of {}", document.sentences);
        let (place, most) = (document.first_sentence + number, document.sentences - number);
        if self.ends.from(document.shard, place).is_empty() {
            self.ends.fill(document.shard, place, &self.shards[document.shard].ends(), ENDS_WINDOW)?;
        }
        let ends = self.ends.from(document.shard, place);
        Ok(&ends[..ends.len().min(most)])
    }

    /// Whether a sentence can end there: only in a damaged shard one ends after its document.
    #[inline]
    pub(crate) fn check(&self, document: &Document, end: usize) -> Result<(), DataError> {
        match end <= document.pieces {
            true => Ok(()),
            false => Err(self.shards[document.shard].damaged("a sentence ends after its document")),
        }
    }

    /// Appends the ids at these positions, those of them that the document has.
    pub fn read(&mut self, document: &Document, positions: Range<usize>, ids: &mut Vec<u32>) -> Result<(), DataError> {
        let shard = &self.shards[document.shard];
        let end = positions.end.min(document.pieces);
        let start = positions.start.min(end);
        let before = ids.len();
        let (first, count) = (document.first_piece + start, end - start);
        match id_width(shard.vocabulary_size()) {
            2 => shard.read_ids(first, count, &mut self.buffer, |part| {
                ids.extend(part.as_chunks().0.iter().map(|id| u32::from(u16::from_le_bytes(*id))));
            })?,
            _ => shard.read_ids(first, count, &mut self.buffer, |part| {
                ids.extend(part.as_chunks().0.iter().map(|id| u32::from_le_bytes(*id)));
            })?,
        }
        let largest = ids[before..].iter().copied().max();
        match largest.is_none_or(|id| id < shard.vocabulary_size()) {
            true => Ok(()),
            false => Err(shard.damaged("it has an id outside of the vocabulary")),
        }
    }

    /// The id at a position of the whole corpus, whose documents lie in a row; an error where there is none.
    pub(crate) fn piece(&mut self, position: u64) -> Result<u32, DataError> {
        let (mut shard, mut first_piece) = (0, position);
        while let Some(passed) = self.shards.get(shard).filter(|shard| shard.counts().pieces <= first_piece) {
            first_piece -= passed.counts().pieces;
            shard += 1;
        }
        let Some(from) = self.shards.get(shard) else { return Err(DataError::NoPieces) };
        let first_piece = first_piece as usize;
        let document = Document { shard, first_piece, pieces: 1, first_sentence: 0, sentences: 0 };
        let mut found = Vec::with_capacity(1);
        self.read(&document, 0..1, &mut found)?;
        found.pop().ok_or_else(|| from.damaged("it ends too early"))
    }

    /// Where the pieces and sentences of the documents before this one of a shard end, and those of itself.
    #[inline]
    fn borders(&mut self, shard: usize, here: usize) -> Result<[[u32; 2]; 2], DataError> {
        let Some(before) = here.checked_sub(1) else { return Ok([[0, 0], self.entry(shard, here)?]) };
        match self.table.from(shard, before) {
            [first, last, ..] => Ok([*first, *last]),
            _ => Ok([self.entry(shard, before)?, self.entry(shard, here)?]),
        }
    }

    #[cold]
    fn entry(&mut self, shard: usize, place: usize) -> Result<[u32; 2], DataError> {
        if self.table.from(shard, place).is_empty() {
            self.table.fill(shard, place, &self.shards[shard].documents(), TABLE_WINDOW)?;
        }
        Ok(self.table.from(shard, place)[0])
    }
}

impl<'a, T: bytemuck::Pod> Window<'a, T> {
    fn new() -> Self {
        Self { shard: 0, first: 0, kept: &[], copy: Vec::new() }
    }

    /// Those from a place on; none where it lies outside.
    #[inline]
    fn from(&self, shard: usize, place: usize) -> &[T] {
        let numbers = if self.copy.is_empty() { self.kept } else { &self.copy };
        let inside = self.shard == shard && place >= self.first;
        numbers.get(place.wrapping_sub(self.first)..).filter(|_| inside).unwrap_or_default()
    }

    /// Moves it so that it has the number at this place.
    #[cold]
    fn fill(&mut self, shard: usize, place: usize, numbers: &Numbers<'a, T>, size: usize) -> Result<(), DataError> {
        // Empty, should the read fail.
        self.copy.clear();
        (self.shard, self.first, self.kept) = (shard, place, &[]);
        match numbers.around(place)? {
            Some((first, kept)) => (self.first, self.kept) = (first, kept),
            None => numbers.read(place, size, &mut self.copy)?,
        }
        Ok(())
    }
}
