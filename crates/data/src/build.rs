//! Documents into a corpus: read, cut into sentences, tokenized by several threads, written as shards.
//!
//! ```text
//! files ─ reader ──────────────► workers ──────────────► writer ─► shards
//!         documents, duplicates  sentences, pieces       in the order of reading
//! ```
//!
//! One thread reads and drops duplicates, so that the first of them stays; workers take batches as they come; the caller's
//! thread puts their results back into order. So the bytes of a corpus do not depend on the number of threads. So many
//! batches are on the way at most, and shards are written as they fill: memory does not grow with the text, except for
//! [`Seen`].

use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufWriter;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use henson_kernels::philox::philox;
use henson_text::{Encoder, Tokenizer};
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::documents::{self, Documents, Format, Found, Reading};
use crate::lines::Meter;
use crate::manifest::{FileEntry, MANIFEST, Manifest, ShardEntry, SourceEntry, TOKENIZER, VOCABULARY};
use crate::seen::Seen;
use crate::sentences;
use crate::shard::{Counts, ShardWriter, hex};
use crate::staging::{SHARD, Staging};
use crate::{DataError, Sentences, Split, Vocabulary};

/// Text of a batch, about: enough that handing it over costs nothing, little enough that all threads end together.
const BATCH: usize = 1 << 17;

/// How long to wait for a batch before the caller is asked again whether to go on.
const PATIENCE: Duration = Duration::from_millis(100);

/// The largest shard: places within it have 32 bits, and the last document comes on top.
const LARGEST_SHARD: u64 = 2 << 30;

/// Files that belong together.
#[derive(Clone, Debug, PartialEq)]
pub struct SourceFiles {
    /// A name for people.
    pub name: String,
    /// How many times its documents are seen where those of weight 1 are seen once.
    pub weight: f64,
    /// Files, directories (all files in them whose names are known, sorted), or `-` for standard input.
    pub paths: Vec<PathBuf>,
}

/// What to build and how.
#[derive(Clone, Debug)]
pub struct BuildOptions {
    /// What to read, in this order.
    pub sources: Vec<SourceFiles>,
    /// Files whose documents are all held out. They are read first, so that a document that is in both is held out.
    pub held_out_files: Vec<PathBuf>,
    /// The share of the other documents to hold out, in [0, 1).
    pub held_out: f64,
    /// Decides, with a document's text, whether it is held out.
    pub seed: u64,
    /// What all files hold; none: what their names and first bytes say.
    pub format: Option<Format>,
    /// What a document is in a text file.
    pub documents: Documents,
    /// The key of the text in JSON.
    pub field: String,
    /// The column of the text in parquet.
    pub column: String,
    /// What a sentence is; none: a line where empty lines end documents, else what punctuation says.
    pub sentences: Option<Sentences>,
    /// Whether bytes that are not UTF-8 become U+FFFD; else they are an error.
    pub lossy: bool,
    /// How many threads tokenize. The result does not depend on it.
    pub threads: usize,
    /// The size of a shard in bytes, about.
    pub shard_size: u64,
    /// Whether to replace a corpus that is there.
    pub overwrite: bool,
}

impl Default for BuildOptions {
    fn default() -> Self {
        Self {
            sources: Vec::new(),
            held_out_files: Vec::new(),
            held_out: 0.0,
            seed: 0,
            format: None,
            documents: Documents::default(),
            field: "text".to_owned(),
            column: "text".to_owned(),
            sentences: None,
            lossy: false,
            threads: 1,
            shard_size: 64 << 20,
            overwrite: false,
        }
    }
}

/// How far a build is.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BuildProgress {
    /// Bytes of files that were read, as they lie on the disk.
    pub file_bytes: u64,
    /// How many there are in all; none where standard input is read.
    pub file_total: Option<u64>,
    /// Bytes of text that were read, uncompressed.
    pub bytes: u64,
    /// What was written.
    pub written: Counts,
}

/// What a build did.
#[derive(Clone, Debug)]
pub struct BuildReport {
    /// Bytes of text that were read, uncompressed.
    pub bytes: u64,
    /// Files that were read.
    pub files: usize,
    /// Files in directories that were not, because of their names.
    pub skipped: Vec<PathBuf>,
    /// Documents that were read.
    pub documents: u64,
    /// Those that had been read before and were dropped.
    pub duplicates: u64,
    /// Those of which no piece was left.
    pub empty: u64,
    /// Parts of documents that were too large to stay whole, beside the first of each.
    pub cut: u64,
    /// What was written to train on.
    pub train: Counts,
    /// What was held out.
    pub held_out: Counts,
    /// How many shards.
    pub shards: usize,
    /// The corpus's digest.
    pub digest: String,
}

/// Builds a corpus at `out`, which appears when it is complete. `progress` is called every now and then; where it returns
/// false, the build stops and leaves nothing.
pub fn build(
    tokenizer: &Tokenizer,
    out: &Path,
    options: &BuildOptions,
    progress: &mut dyn FnMut(&BuildProgress) -> bool,
) -> Result<BuildReport, DataError> {
    options.check()?;
    let vocabulary = Vocabulary::of(tokenizer)?;
    let inputs = Inputs::of(options)?;
    let staging = Staging::new(out, options.overwrite)?;
    let files = write_tokenizer(tokenizer, &vocabulary, &staging)?;

    let meter = Arc::new(Meter::default());
    let mut writer = Writer::new(&staging, vocabulary.size, inputs.sources.len(), options.shard_size);
    let read = run(tokenizer, options, &inputs, &meter, &mut writer, progress)?;
    let Writer { shards, counts, empty, .. } = writer.finish()?;

    let entries = inputs.sources.iter().zip(&counts);
    let entries = entries.map(|(source, &[train, held_out])| SourceEntry {
        name: source.name.clone(),
        weight: source.weight,
        train,
        held_out,
    });
    let manifest = Manifest::new(options.record(&inputs), entries.collect(), shards, files);
    let (train, held_out) = (manifest.counts(Split::Train), manifest.counts(Split::HeldOut));
    if train.documents == 0 {
        let reason = match held_out.documents {
            0 if inputs.files.is_empty() => format!(
                "none of the {} files in the directories has a name that is known (.txt, .text, .jsonl, .ndjson, .json, .parquet, \
                 also as .gz or .zst; with one document per file .md and .markdown, too)",
                inputs.skipped.len()
            ),
            0 if read.documents == 0 => "the files hold no text".to_owned(),
            0 => format!("no token was left of any of the {} documents", read.documents),
            held => format!("all {held} were held out; hold out fewer, or give more text"),
        };
        return Err(DataError::NoDocuments { reason });
    }
    let json = manifest.to_json().map_err(DataError::io("write", staging.shown(MANIFEST)))?;
    staging.write(MANIFEST, &json)?;
    staging.publish()?;
    Ok(BuildReport {
        bytes: meter.text.load(Relaxed),
        files: inputs.files.len(),
        skipped: inputs.skipped,
        documents: read.documents,
        duplicates: read.duplicates,
        empty,
        cut: read.cut,
        train,
        held_out,
        shards: manifest.shards.len(),
        digest: manifest.digest(),
    })
}

impl BuildOptions {
    fn check(&self) -> Result<(), DataError> {
        let setting = |name, expected, got: String| Err(DataError::Setting { name, expected, got });
        if !(0.0..1.0).contains(&self.held_out) {
            return setting("held_out", "a share from 0 to below 1", self.held_out.to_string());
        }
        if !(1..=LARGEST_SHARD).contains(&self.shard_size) {
            return setting("shard_size", "1 byte to 2 GiB", self.shard_size.to_string());
        }
        if self.threads == 0 {
            return setting("threads", "at least 1", "0".to_owned());
        }
        for (i, source) in self.sources.iter().enumerate() {
            if !(source.weight.is_finite() && source.weight > 0.0) {
                return setting("the weight of a source", "a number above 0", source.weight.to_string());
            }
            if self.sources[..i].iter().any(|other| other.name == source.name) || source.name.is_empty() {
                return setting("the name of a source", "a name of its own for each", format!("{:?}", source.name));
            }
        }
        Ok(())
    }

    /// What decides the result, for the manifest.
    fn record(&self, inputs: &Inputs) -> serde_json::Value {
        let mut record = json!({
            "files": inputs.files.iter().map(|input| input.path.to_string_lossy()).collect::<Vec<_>>(),
            "held_out": self.held_out,
            "seed": self.seed,
            "format": self.format,
            "document_per_line": self.documents == Documents::Lines,
            "field": self.field,
            "column": self.column,
            "sentences": self.sentences,
            "lossy": self.lossy,
            "shard_size": self.shard_size,
        });
        if self.documents == Documents::Files {
            record["document_per_file"] = true.into();
        }
        record
    }
}

/// All that is read, in order.
struct Inputs {
    sources: Vec<SourceFiles>,
    files: Vec<InputFile>,
    skipped: Vec<PathBuf>,
    total: Option<u64>,
}

struct InputFile {
    path: Arc<Path>,
    source: usize,
    held_out: bool,
}

/// The source of held-out files.
const HELD_OUT: &str = "held-out";

impl Inputs {
    fn of(options: &BuildOptions) -> Result<Self, DataError> {
        let mut inputs = Self { sources: Vec::new(), files: Vec::new(), skipped: Vec::new(), total: Some(0) };
        if !options.held_out_files.is_empty() {
            let free = |name: &String| options.sources.iter().all(|source| source.name != *name);
            let names = (0..).map(|i| if i == 0 { HELD_OUT.to_owned() } else { format!("{HELD_OUT}-{i}") });
            let name = names.into_iter().find(free).unwrap_or_default();
            inputs.add(
                &SourceFiles { name, weight: 1.0, paths: options.held_out_files.clone() },
                true,
                options.documents,
            )?;
        }
        for source in &options.sources {
            inputs.add(source, false, options.documents)?;
        }
        Ok(inputs)
    }

    fn add(&mut self, source: &SourceFiles, held_out: bool, documents: Documents) -> Result<(), DataError> {
        let (files, skipped) = documents::expand(&source.paths, documents)?;
        for path in files {
            // That a file can be opened is seen now and not after an hour. A pipe is opened only once.
            let mut size = None;
            if path.as_os_str() != "-" && std::fs::metadata(&path).map_err(DataError::io("open", &path))?.is_file() {
                let metadata = File::open(&path).and_then(|file| file.metadata());
                size = Some(metadata.map_err(DataError::io("open", &path))?.len());
            }
            self.total = self.total.zip(size).map(|(total, size)| total + size);
            self.files.push(InputFile { path: path.into(), source: self.sources.len(), held_out });
        }
        self.skipped.extend(skipped);
        self.sources.push(source.clone());
        Ok(())
    }
}

/// Copies the tokenizer's files, so that a corpus is all that pre-training needs.
fn write_tokenizer(
    tokenizer: &Tokenizer,
    vocabulary: &Vocabulary,
    staging: &Staging,
) -> Result<Vec<FileEntry>, DataError> {
    let facts = serde_json::to_vec(vocabulary).map_err(|error| DataError::io("write", VOCABULARY)(error.into()))?;
    let mut files = vec![(VOCABULARY.to_owned(), facts)];
    files.extend(tokenizer.files(None)?.into_iter().map(|(name, bytes)| (format!("{TOKENIZER}/{name}"), bytes)));
    let mut entries = Vec::new();
    for (file, bytes) in files {
        staging.write(&file, &bytes)?;
        entries.push(FileEntry { file, bytes: bytes.len() as u64, sha256: hex(&Sha256::digest(&bytes)) });
    }
    Ok(entries)
}

/// Documents on their way to a worker.
#[derive(Default)]
struct Batch {
    number: u64,
    text: String,
    documents: Vec<Entry>,
}

/// A document of a batch.
struct Entry {
    text: Range<usize>,
    sentences: Sentences,
    split: Split,
    source: usize,
    file: Arc<Path>,
    line: u64,
}

/// What became of a batch.
struct Encoded {
    number: u64,
    ids: Vec<u32>,
    ends: Vec<u32>,
    /// For each document, how many ids and sentences it has.
    documents: Vec<(Split, usize, Range<usize>, Range<usize>)>,
}

/// What the reader saw.
#[derive(Clone, Copy, Debug, Default)]
struct Read {
    documents: u64,
    duplicates: u64,
    cut: u64,
}

/// Runs all threads until everything is written.
fn run(
    tokenizer: &Tokenizer,
    options: &BuildOptions,
    inputs: &Inputs,
    meter: &Arc<Meter>,
    writer: &mut Writer<'_>,
    progress: &mut dyn FnMut(&BuildProgress) -> bool,
) -> Result<Read, DataError> {
    // Batches on the way, from the reader to the writer: one that takes long holds up those behind it.
    let most = 4 * options.threads;
    let (permit, permits) = sync_channel(most);
    for _ in 0..most {
        // There is room for all of them, and the other end is there.
        let _ = permit.send(());
    }
    let (job, jobs) = sync_channel(most);
    let (result, results) = sync_channel(most);
    let jobs = Arc::new(Mutex::new(jobs));
    std::thread::scope(|scope| {
        let named = |name: &str| std::thread::Builder::new().name(format!("henson-{name}"));
        let reader = named("reader")
            .spawn_scoped(scope, move || Reader::new(options, inputs, job, permits).run(meter))
            .map_err(|source| DataError::Threads { source })?;
        let mut started = Ok(());
        for number in 0..options.threads {
            let (jobs, result) = (Arc::clone(&jobs), result.clone());
            let worker = named("worker").spawn_scoped(scope, move || work(tokenizer, &jobs, &result));
            // With fewer workers than wanted (a limit of the system) the shards are the same, only later.
            if let (Err(source), 0) = (worker, number) {
                started = Err(DataError::Threads { source });
            }
        }
        // Each end of a channel goes away with its thread, so that none waits for another that gave up.
        drop((jobs, result));
        if started.is_err() {
            drop((results, permit));
            return started.map(|()| Read::default());
        }
        let mut report = |written| {
            let (file_bytes, bytes) = (meter.file.load(Relaxed), meter.text.load(Relaxed));
            progress(&BuildProgress { file_bytes, file_total: inputs.total, bytes, written })
        };
        let written = write_in_order(results, permit, writer, &mut report);
        let read = reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        // Where both failed, the reader did because the writer was gone.
        written.and(read)
    })
}

struct Reader<'a> {
    options: &'a BuildOptions,
    inputs: &'a Inputs,
    seen: Seen,
    batch: Batch,
    read: Read,
    jobs: SyncSender<Batch>,
    permits: Receiver<()>,
}

impl<'a> Reader<'a> {
    fn new(options: &'a BuildOptions, inputs: &'a Inputs, jobs: SyncSender<Batch>, permits: Receiver<()>) -> Self {
        let (seen, batch, read) = (Seen::default(), Batch::default(), Read::default());
        Self { options, inputs, seen, batch, read, jobs, permits }
    }

    fn run(mut self, meter: &Arc<Meter>) -> Result<Read, DataError> {
        let (options, inputs) = (self.options, self.inputs);
        let reading = Reading {
            format: options.format,
            documents: options.documents,
            field: &options.field,
            column: &options.column,
            lossy: options.lossy,
        };
        for file in &inputs.files {
            documents::read(&file.path, &reading, meter, &mut |found| self.take(file, &found))?;
        }
        self.send()?;
        Ok(self.read)
    }

    fn take(&mut self, file: &InputFile, found: &Found<'_>) -> Result<(), DataError> {
        self.read.documents += 1;
        self.read.cut += u64::from(found.continued);
        let hash = hash(found.text);
        if !self.seen.insert(hash) {
            self.read.duplicates += 1;
            return Ok(());
        }
        let held_out = file.held_out || is_held_out(hash, self.options.seed, self.options.held_out);
        let begin = self.batch.text.len();
        self.batch.text.push_str(found.text);
        self.batch.documents.push(Entry {
            text: begin..self.batch.text.len(),
            sentences: self.options.sentences.unwrap_or(found.sentences),
            split: if held_out { Split::HeldOut } else { Split::Train },
            source: file.source,
            file: Arc::clone(&file.path),
            line: found.line,
        });
        if self.batch.text.len() >= BATCH { self.send() } else { Ok(()) }
    }

    fn send(&mut self) -> Result<(), DataError> {
        // Either fails where the writer has given up, and says why itself.
        self.permits.recv().map_err(|_| DataError::Stopped)?;
        let next = Batch { number: self.batch.number + 1, ..Batch::default() };
        self.jobs.send(std::mem::replace(&mut self.batch, next)).map_err(|_| DataError::Stopped)
    }
}

/// Names a document by its text.
fn hash(text: &str) -> u128 {
    Sha256::digest(text).first_chunk().map_or(0, |bytes| u128::from_le_bytes(*bytes))
}

/// A pure function of a document's text and the seed: whatever else is built with it, it stays on its side.
fn is_held_out(hash: u128, seed: u64, share: f64) -> bool {
    let word = |i: u32| (hash >> (32 * i)) as u32;
    let [low, high, ..] = philox(seed, [word(0), word(1), word(2), word(3)]);
    let draw = (u64::from(high) << 32 | u64::from(low)) >> 11;
    (draw as f64) < share * (1_u64 << 53) as f64
}

/// A worker: batches in, ids out, until there are no more or nobody wants them.
fn work(tokenizer: &Tokenizer, jobs: &Mutex<Receiver<Batch>>, results: &SyncSender<Result<Encoded, DataError>>) {
    let (mut encoder, mut buffer) = (tokenizer.encoder(), String::new());
    loop {
        let next = jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(batch) = next else { return };
        let encoded = encode(&mut encoder, &batch, &mut buffer);
        if results.send(encoded).is_err() {
            return;
        }
    }
}

fn encode(encoder: &mut Encoder<'_>, batch: &Batch, buffer: &mut String) -> Result<Encoded, DataError> {
    let mut encoded = Encoded { number: batch.number, ids: Vec::new(), ends: Vec::new(), documents: Vec::new() };
    let (spaced, mut following) = (encoder.tokenizer().heeds_leading_space(), String::new());
    for document in &batch.documents {
        let (first_id, first_end) = (encoded.ids.len(), encoded.ends.len());
        let mut result = Ok(());
        sentences::for_each(&batch.text[document.text.clone()], document.sentences, buffer, &mut |sentence| {
            if result.is_err() {
                return;
            }
            let before = encoded.ids.len();
            // In running text a sentence follows the one before it after a space, and models are asked about running text:
            // where the space is part of a token, it is put back. fairseq's lines, encoded one by one, are paragraphs.
            let continues = spaced && encoded.ends.len() > first_end;
            result = match continues && !sentence.starts_with(char::is_whitespace) {
                true => {
                    following.clear();
                    following.extend([" ", sentence]);
                    encoder.encode(&following, &mut encoded.ids)
                }
                false => encoder.encode(sentence, &mut encoded.ids),
            };
            if encoded.ids.len() > before {
                encoded.ends.push((encoded.ids.len() - first_id) as u32);
            }
        });
        let place = |source| DataError::Encode { path: document.file.to_path_buf(), line: document.line, source };
        result.map_err(place)?;
        let (ids, ends) = (first_id..encoded.ids.len(), first_end..encoded.ends.len());
        encoded.documents.push((document.split, document.source, ids, ends));
    }
    Ok(encoded)
}

/// Puts batches back into order and writes them.
fn write_in_order(
    results: Receiver<Result<Encoded, DataError>>,
    permits: SyncSender<()>,
    writer: &mut Writer<'_>,
    report: &mut dyn FnMut(Counts) -> bool,
) -> Result<(), DataError> {
    let (mut waiting, mut next) = (BTreeMap::new(), 0);
    loop {
        match results.recv_timeout(PATIENCE) {
            Ok(encoded) => {
                let encoded = encoded?;
                waiting.insert(encoded.number, encoded);
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
        while let Some(encoded) = waiting.remove(&next) {
            writer.write(&encoded)?;
            next += 1;
            // The reader may have read everything.
            let _ = permits.send(());
        }
        if !report(writer.written) {
            return Err(DataError::Stopped);
        }
    }
}

/// Writes shards, each split's after each other.
struct Writer<'a> {
    staging: &'a Staging,
    vocabulary_size: u32,
    shard_size: u64,
    open: [Option<ShardWriter<BufWriter<File>>>; 2],
    shards: Vec<ShardEntry>,
    /// How many shards of each split are finished.
    finished: [usize; 2],
    /// For each source, what is in each split.
    counts: Vec<[Counts; 2]>,
    written: Counts,
    empty: u64,
}

impl<'a> Writer<'a> {
    fn new(staging: &'a Staging, vocabulary_size: u32, sources: usize, shard_size: u64) -> Self {
        let (open, shards, counts) = ([None, None], Vec::new(), vec![[Counts::default(); 2]; sources]);
        let (finished, written, empty) = ([0; 2], Counts::default(), 0);
        Self { staging, vocabulary_size, shard_size, open, shards, finished, counts, written, empty }
    }

    fn write(&mut self, encoded: &Encoded) -> Result<(), DataError> {
        for (split, source, ids, ends) in &encoded.documents {
            if ids.is_empty() {
                self.empty += 1;
                continue;
            }
            let index = *split as usize;
            let name = shard_name(*split, self.finished[index]);
            let failed = |error| DataError::io("write", self.staging.shown(&name))(error);
            let shard = match &mut self.open[index] {
                Some(shard) => shard,
                none => {
                    let file = File::create_new(self.staging.path(&name)).map_err(failed)?;
                    let out = BufWriter::with_capacity(1 << 18, file);
                    none.insert(ShardWriter::new(out, self.vocabulary_size).map_err(failed)?)
                }
            };
            shard.push(&encoded.ids[ids.clone()], &encoded.ends[ends.clone()]).map_err(failed)?;
            let added = Counts { documents: 1, sentences: ends.len() as u64, pieces: ids.len() as u64 };
            self.counts[*source][index].add(added);
            self.written.add(added);
            if shard.bytes() >= self.shard_size {
                self.close(*split)?;
            }
        }
        Ok(())
    }

    fn close(&mut self, split: Split) -> Result<(), DataError> {
        let Some(shard) = self.open[split as usize].take() else { return Ok(()) };
        let file = shard_name(split, self.finished[split as usize]);
        let (bytes, counts) = (shard.bytes(), shard.counts());
        let finish = || {
            let (out, sha256) = shard.finish()?;
            out.into_inner()?.sync_all()?;
            Ok(sha256)
        };
        let sha256 = finish().map_err(DataError::io("write", self.staging.shown(&file)))?;
        self.shards.push(ShardEntry { split, file, bytes, sha256, counts });
        self.finished[split as usize] += 1;
        Ok(())
    }

    fn finish(mut self) -> Result<Self, DataError> {
        self.close(Split::Train)?;
        self.close(Split::HeldOut)?;
        Ok(self)
    }
}

fn shard_name(split: Split, number: usize) -> String {
    let split = match split {
        Split::Train => "train",
        Split::HeldOut => "held-out",
    };
    format!("{split}-{number:05}{SHARD}")
}
