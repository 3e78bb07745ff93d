//! A corpus is the same for every number of threads, and it is there whole or not at all.

use std::fs::File;
use std::path::Path;

use henson_data::{BuildProgress, Corpus, DataError, Split, Vocabulary, build};
use henson_text::Tokenizer;

use crate::support::{TOKENIZER, contents, document, letters, names, options, run, some_documents, texts, write};

#[test]
fn the_same_bytes_for_every_number_of_threads() {
    let directory = tempfile::tempdir().unwrap();
    // Several batches, and documents of very different sizes between them.
    let mut text = some_documents(8000);
    text.push_str(&"a very long document, ".repeat(30_000));
    text.push_str("\n\n");
    text.push_str(&some_documents(9000)[text.len() / 3..]);
    let file = write(directory.path(), "text.txt", text.as_bytes());
    let mut reference = None;
    for threads in [1, 2, 7] {
        let mut options = options(&[&file]);
        (options.threads, options.held_out, options.shard_size) = (threads, 0.05, 1 << 18);
        let out = directory.path().join(format!("out-{threads}"));
        run(&out, &options).unwrap();
        let found = contents(&out);
        assert!(found.keys().filter(|name| name.starts_with("train-")).count() > 3);
        match &reference {
            None => reference = Some(found),
            Some(reference) => assert!(found == *reference, "{threads} threads"),
        }
    }
    // The size of shards changes files and digest, but no document.
    let mut options = options(&[&file]);
    options.held_out = 0.05;
    let out = directory.path().join("large");
    run(&out, &options).unwrap();
    for split in [Split::Train, Split::HeldOut] {
        assert!(texts(&out, split) == texts(&directory.path().join("out-1"), split));
    }
    assert_eq!(
        names(&out),
        ["corpus.json", "held-out-00000.shard", "tokenizer", "train-00000.shard", "vocabulary.json"]
    );
}

#[test]
fn the_tokenizer_comes_along() {
    let directory = tempfile::tempdir().unwrap();
    let file = write(directory.path(), "a.txt", b"a b.\n");
    let out = directory.path().join("out");
    run(&out, &options(&[&file])).unwrap();
    let corpus = Corpus::open(&out, Split::Train).unwrap();
    let tokenizer = Tokenizer::open(corpus.tokenizer_directory().unwrap()).unwrap();
    assert_eq!(&Vocabulary::of(&tokenizer).unwrap(), corpus.vocabulary());
    assert_eq!(tokenizer.files(None).unwrap(), TOKENIZER.files(None).unwrap());
}

/// Where a space is part of the token after it, sentences that follow another get theirs.
#[test]
fn spaces_between_sentences_of_byte_level_bpe() {
    let directory = tempfile::tempdir().unwrap();
    let special = ["<s>", "</s>", "<mask>"].map(str::to_owned);
    let vocabulary = ('\u{100}'..'\u{144}').map(String::from).chain(special);
    let bytes = (b'!'..=b'~').chain(0xa1..=0xac).chain(0xae..=0xff).map(|byte| char::from(byte).to_string());
    let all: std::collections::BTreeSet<String> = vocabulary.chain(bytes).collect();
    let ids: Vec<String> = all.iter().enumerate().map(|(id, token)| format!("{token:?}: {id}")).collect();
    let files = ["vocab.json", "merges.txt"].map(|name| directory.path().join(name));
    std::fs::write(&files[0], format!("{{{}}}", ids.join(", "))).unwrap();
    std::fs::write(&files[1], "").unwrap();
    let tokenizer = Tokenizer::from_byte_pair_files(&files[0], &files[1], &Default::default()).unwrap();
    let file = write(directory.path(), "a.txt", b"a.\nb.\na.\n\nb.\n");
    let out = directory.path().join("out");
    build(&tokenizer, &out, &options(&[&file]), &mut |_| true).unwrap();
    let corpus = Corpus::open(&out, Split::Train).unwrap();
    let mut reader = corpus.reader();
    for (number, (length, expected)) in [(8, "a. b. a."), (2, "b.")].into_iter().enumerate() {
        let (document, mut ids) = (reader.document(number).unwrap(), Vec::new());
        reader.read(&document, 0..length, &mut ids).unwrap();
        assert_eq!(ids, tokenizer.encode_ids(expected).unwrap());
    }
}

/// A vocabulary beyond 16 bits has wider ids.
#[test]
fn large_vocabularies() {
    let tokenizer = letters(70_000);
    let directory = tempfile::tempdir().unwrap();
    let file = write(directory.path(), "a.txt", b"word69999 a\n");
    let out = directory.path().join("out");
    build(&tokenizer, &out, &options(&[&file]), &mut |_| true).unwrap();
    let corpus = Corpus::open(&out, Split::Train).unwrap();
    let mut ids = Vec::new();
    let mut reader = corpus.reader();
    let document = reader.document(0).unwrap();
    reader.read(&document, 0..2, &mut ids).unwrap();
    assert_eq!(ids, tokenizer.encode_ids("word69999 a").unwrap());
    assert!(ids[0] > 1 << 16);
    corpus.verify().unwrap();
}

/// Stopped or failed at any moment, nothing is left; progress tells the truth.
#[test]
fn an_interrupted_build_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let text = some_documents(20_000);
    let file = write(directory.path(), "a.txt", text.as_bytes());
    let bad = write(directory.path(), "b.txt", b"good\n\nb\xffd\n");
    let out = directory.path().join("out");
    let before = names(directory.path());
    for calls in [0, 1, 3] {
        let mut left = calls;
        let stopped = build(&TOKENIZER, &out, &options(&[&file]), &mut |_| {
            left -= 1;
            left >= 0
        });
        assert!(matches!(stopped, Err(DataError::Stopped)), "{stopped:?}");
        assert_eq!(names(directory.path()), before);
    }
    let mut options = options(&[&file, &bad]);
    options.threads = 3;
    let failed = run(&out, &options).unwrap_err();
    assert!(matches!(failed, DataError::NotUtf8 { .. }), "{failed}");
    assert_eq!(names(directory.path()), before);

    options.sources[0].paths.pop();
    let mut last = BuildProgress::default();
    let report = build(&TOKENIZER, &out, &options, &mut |progress| {
        assert!(progress.bytes >= last.bytes && progress.written.pieces >= last.written.pieces);
        last = *progress;
        true
    });
    let report = report.unwrap();
    assert_eq!((last.file_bytes, last.file_total), (text.len() as u64, Some(text.len() as u64)));
    assert_eq!((report.bytes, last.bytes), (text.len() as u64, text.len() as u64));
    assert_eq!((last.written, report.train.documents), (report.train, 20_000));
}

/// What a killed build left goes away with the next one; what another is writing stays.
#[test]
fn leftovers_are_swept() {
    let directory = tempfile::tempdir().unwrap();
    let file = write(directory.path(), "a.txt", b"a\n");
    write(directory.path(), ".out.henson-tmp-1-0/train-00000.shard", b"half");
    write(directory.path(), ".out.henson-tmp-2-0/train-00000.shard", b"busy");
    write(directory.path(), ".other.henson-tmp-1-0/train-00000.shard", b"of another");
    let busy = File::open(directory.path().join(".out.henson-tmp-2-0")).unwrap();
    busy.try_lock().unwrap();
    run(&directory.path().join("out"), &options(&[&file])).unwrap();
    assert_eq!(names(directory.path()), [".other.henson-tmp-1-0", ".out.henson-tmp-2-0", "a.txt", "out"]);
}

#[test]
fn nothing_is_overwritten_unasked() {
    let directory = tempfile::tempdir().unwrap();
    let [one, two] = ["1.txt", "2.txt"].map(|name| write(directory.path(), name, &name.as_bytes()[..1]));
    let out = directory.path().join("out");
    std::fs::create_dir(&out).unwrap();
    run(&out, &options(&[&one])).unwrap();
    let refused = run(&out, &options(&[&two])).unwrap_err();
    assert!(matches!(refused, DataError::Exists { .. }) && refused.to_string().contains("--overwrite"));

    // An open corpus stays as it was.
    let open = Corpus::open(&out, Split::Train).unwrap();
    let mut again = options(&[&two]);
    again.overwrite = true;
    run(&out, &again).unwrap();
    assert_eq!(document(&open, 0), ["1"]);
    assert_eq!(texts(&out, Split::Train), [["2"]]);
    assert_eq!(names(directory.path()), ["1.txt", "2.txt", "out"]);

    // A directory with anything else in it is not ours to delete.
    write(&out, "notes", b"mine");
    let refused = run(&out, &again).unwrap_err();
    assert!(refused.to_string().contains("notes"), "{refused}");
    let foreign = directory.path().join("foreign");
    write(&foreign, "thesis.txt", b"mine");
    let refused = run(&foreign, &again).unwrap_err();
    assert!(refused.to_string().contains("not a corpus"), "{refused}");
    assert_eq!(names(&foreign), ["thesis.txt"]);
    let file = run(&one, &again).unwrap_err();
    assert!(matches!(file, DataError::Io { .. }));

    // Through a link, what it leads to is replaced.
    std::fs::remove_file(out.join("notes")).unwrap();
    let link = directory.path().join("link");
    std::os::unix::fs::symlink(&out, &link).unwrap();
    again.sources[0].paths = vec![one];
    run(&link, &again).unwrap();
    assert_eq!(texts(&out, Split::Train), [["1"]]);
    assert!(link.is_symlink());
}

#[test]
fn not_a_corpus() {
    let directory = tempfile::tempdir().unwrap();
    for place in [directory.path(), Path::new("nowhere")] {
        let error = Corpus::open(place, Split::Train).unwrap_err();
        assert!(matches!(error, DataError::NotACorpus { .. }) && error.to_string().contains("henson data build"));
    }
}

/// A vocabulary without an unknown piece cannot write every text: the document is named.
#[test]
fn what_cannot_be_tokenized_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let json = r#"{"version":"1.0","added_tokens":[],"normalizer":null,"pre_tokenizer":{"type":"Whitespace"},
        "post_processor":null,"decoder":null,
        "model":{"type":"WordLevel","vocab":{"[CLS]":0,"[SEP]":1,"a":2},"unk_token":"[UNK]"}}"#;
    write(directory.path(), "tokenizer/tokenizer.json", json.as_bytes());
    let tokenizer = Tokenizer::open(&directory.path().join("tokenizer")).unwrap();
    let file = write(directory.path(), "a.txt", b"a\n\na a\nb\n");
    let out = directory.path().join("out");
    let error = build(&tokenizer, &out, &options(&[&file]), &mut |_| true).unwrap_err();
    assert!(matches!(&error, DataError::Encode { line: 3, path, .. } if *path == file), "{error}");
    assert!(!out.exists());
}
