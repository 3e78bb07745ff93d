//! Damaged files are errors, at opening or when they are read; old versions stay readable.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use henson_data::tables::{TableOptions, read_json, read_rows};
use henson_data::{Corpus, DataError, InstanceSettings, Instances, Loader, Place, Split, Vocabulary, WordMarks};
use henson_text::Template;
use proptest::prelude::*;

use crate::support::{contents, options, run, some_documents, texts, write};

/// A corpus of two shards, and the way to the first.
fn corpus(directory: &Path) -> (PathBuf, PathBuf) {
    let file = write(directory, "a.txt", some_documents(40).as_bytes());
    let out = directory.join("out");
    let mut options = options(&[&file]);
    options.shard_size = 3000;
    run(&out, &options).unwrap();
    (out.clone(), out.join("train-00000.shard"))
}

/// Reads all of a corpus in every way: nothing panics, nothing is out of bounds.
fn walk(corpus: &Corpus) -> Result<(), DataError> {
    let mut reader = corpus.reader();
    let mut ids = Vec::new();
    for number in 0..corpus.documents() {
        let document = reader.document(number)?;
        let mut end = 0;
        for sentence in 0..document.sentences() {
            let range = reader.sentence(&document, sentence)?;
            assert!(range.start == end && range.end >= end && range.end <= document.len());
            end = range.end;
            reader.read(&document, range, &mut ids)?;
        }
        reader.read(&document, document.len()..usize::MAX, &mut ids)?;
    }
    assert!(ids.iter().all(|&id| id < corpus.vocabulary().size));
    assert!(ids.len() as u64 <= corpus.pieces());
    Ok(())
}

#[test]
fn damaged_shards() {
    let directory = tempfile::tempdir().unwrap();
    let (out, shard) = corpus(directory.path());
    let whole = std::fs::read(&shard).unwrap();
    let open = || Corpus::open(&out, Split::Train);
    walk(&open().unwrap()).unwrap();
    let (header, footer) = (16, whole.len() - 48 - 8);
    // Each byte of the header and of the footer with its checksums, and some of the body.
    let body = (header..footer).step_by(29);
    for place in (0..header).chain(body).chain(footer..whole.len()) {
        for bit in [place % 8, (place + 3) % 8] {
            let mut bytes = whole.clone();
            bytes[place] ^= 1 << bit;
            std::fs::write(&shard, bytes).unwrap();
            match open() {
                Ok(corpus) => {
                    assert!((header..footer).contains(&place), "byte {place}, bit {bit}");
                    let error = walk(&corpus).unwrap_err().to_string();
                    assert!(error.contains("train-00000.shard is damaged: its bytes 0 to"), "{error}");
                    let error = corpus.verify().unwrap_err();
                    assert!(matches!(error, DataError::Damaged { .. }) && error.to_string().contains("SHA-256"));
                }
                Err(DataError::Version { .. }) => assert!((8..12).contains(&place)),
                Err(error) => assert!(matches!(error, DataError::Damaged { .. }), "{error}"),
            }
        }
    }
    for length in (0..whole.len()).step_by(61).chain([whole.len() - 1]) {
        std::fs::write(&shard, &whole[..length]).unwrap();
        assert!(matches!(open(), Err(DataError::Damaged { .. })), "{length} bytes");
    }
    std::fs::write(&shard, [&whole[..], b"x"].concat()).unwrap();
    assert!(matches!(open(), Err(DataError::Damaged { .. })));
    // A shard of another corpus.
    std::fs::copy(out.join("train-00001.shard"), &shard).unwrap();
    assert!(open().is_err());
    std::fs::remove_file(&shard).unwrap();
    let error = open().unwrap_err();
    assert!(matches!(error, DataError::Io { .. }) && error.to_string().contains("train-00000.shard"), "{error}");
    std::fs::create_dir(&shard).unwrap();
    assert!(open().is_err());
}

/// A shard that is cut after it was opened is an error that names it.
#[test]
fn truncated_shards() {
    let directory = tempfile::tempdir().unwrap();
    let (out, shard) = corpus(directory.path());
    let size = std::fs::metadata(&shard).unwrap().len();
    for length in [0, 1, size / 2, size - 60] {
        let whole = std::fs::read(&shard).unwrap();
        let corpus = Corpus::open(&out, Split::Train).unwrap();
        std::fs::File::options().write(true).open(&shard).unwrap().set_len(length).unwrap();
        let error = walk(&corpus).unwrap_err();
        assert!(matches!(error, DataError::Changed { .. }), "{error}");
        assert!(error.to_string().contains("train-00000.shard was changed or truncated while it was being read"));
        std::fs::write(&shard, whole).unwrap();
    }
}

/// A loader hands out the steps before, then an error that names the shard; it neither hangs nor ends the process.
#[test]
fn truncated_while_a_loader_reads() {
    let directory = tempfile::tempdir().unwrap();
    let mut text = String::new();
    for document in 0..300 {
        for line in 0..60 {
            text.push_str(&format!("{} {document} {line}\n", "abcdefghij klmnopqrst ".repeat(2)));
        }
        text.push('\n');
    }
    let file = write(directory.path(), "a.txt", text.as_bytes());
    let out = directory.path().join("out");
    run(&out, &options(&[&file])).unwrap();
    let corpus = Arc::new(Corpus::open(&out, Split::Train).unwrap());
    let shard = out.join("train-00000.shard");
    assert!(std::fs::metadata(&shard).unwrap().len() > 1 << 20, "many blocks");
    let instances = Arc::new(Instances::new(corpus, Template::bert(0, 1), InstanceSettings::default(), 1).unwrap());
    for threads in [1, 3] {
        let mut loader = Loader::new(Arc::clone(&instances), Place::default(), 1, 1, threads, 2).unwrap();
        assert!(threads == 3 || loader.next().is_ok());
        std::fs::File::options().write(true).open(&shard).unwrap().set_len(20).unwrap();
        let error = (0..1000).find_map(|_| loader.next().err()).unwrap();
        assert!(matches!(&error, DataError::Changed { path } if *path == shard), "{error}");
        assert!(loader.next().is_err());
    }
}

#[test]
fn damaged_manifests_and_vocabularies() {
    let directory = tempfile::tempdir().unwrap();
    let (out, _) = corpus(directory.path());
    for name in ["corpus.json", "vocabulary.json"] {
        let path = out.join(name);
        let whole = std::fs::read(&path).unwrap();
        let try_bytes = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            if let Ok(corpus) = Corpus::open(&out, Split::Train) {
                let _ = walk(&corpus);
            }
        };
        for place in 0..whole.len() {
            for (i, replacement) in [b'0', b'9', b'"', whole[place] ^ 4].into_iter().enumerate() {
                let mut bytes = whole.clone();
                bytes[place] = replacement;
                henson_data::fuzzing::manifest(&bytes);
                // Through the files, only a sample of them.
                if (place + i).is_multiple_of(31) {
                    try_bytes(&bytes);
                }
            }
        }
        for length in (0..whole.len()).step_by(37).chain([whole.len() - 1]) {
            std::fs::write(&path, &whole[..length]).unwrap();
            // The line break at the end is no loss.
            assert!(Corpus::open(&out, Split::Train).is_err() || whole[length..] == *b"\n");
        }
        std::fs::write(&path, &whole).unwrap();
    }
    let path = out.join("corpus.json");
    let whole = std::fs::read_to_string(&path).unwrap();
    for (from, to) in [
        ("train-00000.shard", "../x.shard"),
        ("train-00000.shard", "/etc/passwd"),
        ("train-00000.shard", "train-00001.shard"),
        ("train-00000.shard", ""),
        ("\"weight\": 1.0", "\"weight\": -1.0"),
        ("\"weight\": 1.0", "\"weight\": 1e999"),
        ("henson corpus", "another corpus"),
        ("\"sources\": [", "\"sources\": 1, \"sources\": ["),
        ("\"seed\": 0", "\"seed\": 0}, \"more\": {"),
    ] {
        assert!(whole.contains(from));
        std::fs::write(&path, whole.replacen(from, to, 1)).unwrap();
        let error = Corpus::open(&out, Split::Train).unwrap_err();
        assert!(matches!(error, DataError::Damaged { .. }) && error.to_string().contains("corpus.json"), "{error}");
    }
    // Documents that the sources have and the shards do not.
    let numbers = whole.replacen("\"documents\": 40", "\"documents\": 41", 1);
    assert!(numbers != whole);
    std::fs::write(&path, numbers).unwrap();
    assert!(matches!(Corpus::open(&out, Split::Train), Err(DataError::Damaged { .. })));
}

/// Opening a FIFO would wait for somebody who writes to it.
#[test]
fn what_is_no_file_is_refused_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let (out, _) = corpus(directory.path());
    let refused = |name: &str, read: fn(&Path) -> Result<(), DataError>| {
        let path = out.join(name);
        let _ = std::fs::remove_file(&path);
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        let (done, result) = std::sync::mpsc::channel();
        let file = path.clone();
        std::thread::spawn(move || done.send(read(&file)));
        let error = result.recv_timeout(std::time::Duration::from_secs(10)).expect("it waits").unwrap_err();
        let DataError::Io { source, path: named, .. } = &error else { panic!("{name}: {error}") };
        assert!(*named == path && source.to_string().contains("found a FIFO"), "{name}: {source}");
    };
    let table = |path: &Path| read_rows(path, &TableOptions::default(), &mut |_| Ok(()));
    for name in ["rows.csv", "rows.jsonl", "rows.parquet"] {
        refused(name, table);
    }
    refused("squad.json", |path| read_json::<serde_json::Value>(path).map(drop));
    // The vocabulary first: it is read after the manifest.
    refused("vocabulary.json", |path| Corpus::open(path.parent().unwrap(), Split::Train).map(drop));
    refused("corpus.json", |path| Corpus::open(path.parent().unwrap(), Split::Train).map(drop));
}

#[test]
fn changed_tokenizers_are_noticed() {
    let directory = tempfile::tempdir().unwrap();
    let (out, _) = corpus(directory.path());
    let corpus = Corpus::open(&out, Split::Train).unwrap();
    corpus.verify().unwrap();
    write(&out, "tokenizer/vocab.txt", b"[UNK]\n");
    let error = corpus.verify().unwrap_err();
    assert!(error.to_string().contains("vocab.txt"), "{error}");
}

#[test]
fn later_versions_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let (out, shard) = corpus(directory.path());
    let path = out.join("corpus.json");
    let manifest = std::fs::read_to_string(&path).unwrap();
    // A later one may have any fields.
    std::fs::write(&path, r#"{"format": "henson corpus", "version": 2, "new": []}"#).unwrap();
    let error = Corpus::open(&out, Split::Train).unwrap_err();
    assert!(matches!(error, DataError::Version { found: 2, supported: 1, .. }), "{error}");
    std::fs::write(&path, manifest).unwrap();
    let mut bytes = std::fs::read(&shard).unwrap();
    bytes[8] = 7;
    std::fs::write(&shard, bytes).unwrap();
    let error = Corpus::open(&out, Split::Train).unwrap_err();
    assert!(matches!(error, DataError::Version { found: 7, supported: 2, .. }), "{error}");
}

/// A corpus that version 1 wrote. It must stay readable, and keep its name.
#[test]
fn version_1() {
    let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/build/version-1");
    assert_eq!(texts(&kept, Split::Train), [vec!["jim henson was", "a puppeteer."], vec!["one", "two"]]);
    assert_eq!(texts(&kept, Split::HeldOut), [["kept back."]]);
    let corpus = Corpus::open(&kept, Split::Train).unwrap();
    assert_eq!(&corpus.digest()[..16], "c7473dfcc47be79b");

    // Its shards have no checksums: damage is found where offsets or ids make no sense, and harmless where not.
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("out");
    for (name, bytes) in contents(&kept) {
        write(&out, &name, &bytes);
    }
    let shard = out.join("train-00000.shard");
    let whole = std::fs::read(&shard).unwrap();
    let mut found = 0;
    for place in 16..whole.len() - 48 {
        for replacement in [whole[place] ^ 1, whole[place] ^ 0x80, 0, 0xff] {
            let mut bytes = whole.clone();
            bytes[place] = replacement;
            std::fs::write(&shard, &bytes).unwrap();
            let corpus = Corpus::open(&out, Split::Train).unwrap();
            found += usize::from(walk(&corpus).is_err());
            assert_eq!(corpus.verify().is_ok(), bytes == whole);
        }
    }
    assert!(found > 100, "{found}");
}

/// The same text gives the same bytes, of this version: they are part of the names of runs' data.
#[test]
fn version_2() {
    let directory = tempfile::tempdir().unwrap();
    let train = write(directory.path(), "train.txt", b"Jim Henson was\na puppeteer.\n\none\ntwo\n");
    let held_out = write(directory.path(), "held-out.txt", b"kept back.\n");
    let mut options = options(&[&train]);
    options.held_out_files = vec![held_out];
    let out = directory.path().join("out");
    run(&out, &options).unwrap();
    let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/build/version-2");
    for name in ["train-00000.shard", "held-out-00000.shard", "vocabulary.json"] {
        assert!(std::fs::read(out.join(name)).unwrap() == std::fs::read(kept.join(name)).unwrap(), "{name}");
    }
}

fn vocabulary(size: u32) -> Vocabulary {
    let words = WordMarks::Begin(vec![true; size as usize]);
    Vocabulary { size, cls: 0, sep: 1, mask: Some(2), special: vec![0, 1, 2], words, sentinels: Vec::new() }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// What goes in comes out, for both widths of ids; empty sentences and documents too.
    #[test]
    fn documents_come_back(
        documents in prop::collection::vec(prop::collection::vec(prop::collection::vec(0_u32..100, 0..6), 0..5), 0..5),
        wide in any::<bool>(),
    ) {
        let (size, shift) = if wide { (70_000, 69_900) } else { (100, 0) };
        let documents: Vec<Vec<Vec<u32>>> = documents
            .into_iter()
            .map(|d| d.into_iter().map(|s| s.into_iter().map(|id| id + shift).collect()).collect())
            .collect();
        let corpus = Corpus::from_documents(vocabulary(size), &documents);
        walk(&corpus).unwrap();
        let mut reader = corpus.reader();
        prop_assert_eq!(corpus.documents(), documents.len());
        prop_assert_eq!(corpus.pieces(), documents.iter().flatten().flatten().count() as u64);
        for (number, expected) in documents.iter().enumerate() {
            let document = reader.document(number).unwrap();
            let mut all = Vec::new();
            reader.read(&document, 0..document.len(), &mut all).unwrap();
            prop_assert_eq!(&all, &expected.concat());
            let lengths = (0..document.sentences()).map(|s| reader.sentence(&document, s).unwrap().len());
            let sentences: Vec<usize> = lengths.collect();
            prop_assert_eq!(sentences, expected.iter().map(Vec::len).collect::<Vec<_>>());
        }
        // The digest names the data.
        let mut other = documents.clone();
        other.push(vec![vec![shift]]);
        let digest = |documents: &[Vec<Vec<u32>>]| Corpus::from_documents(vocabulary(size), documents).digest().to_owned();
        prop_assert_eq!(digest(&documents), corpus.digest());
        prop_assert_ne!(&digest(&other), corpus.digest());
    }

    /// What the fuzz targets assert, on short noise.
    #[test]
    fn noise_is_harmless(bytes in prop::collection::vec(prop_oneof![Just(0_u8), Just(1), any::<u8>()], 0..200)) {
        henson_data::fuzzing::shard(&bytes);
        henson_data::fuzzing::manifest(&bytes);
    }
}
