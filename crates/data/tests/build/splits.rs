//! Duplicates, sources, and what is held out.

use std::collections::BTreeSet;

use henson_data::{Corpus, DataError, Source, SourceFiles, Split};

use crate::support::{names, options, run, some_documents, texts, write};

#[test]
fn duplicates_are_dropped() {
    let directory = tempfile::tempdir().unwrap();
    let one = write(directory.path(), "1.txt", b"a\nb\n\nc\n\na\nb\n\na\n");
    // The same document in another format, and with white space around its lines.
    let two =
        write(directory.path(), "2.jsonl", b"{\"text\": \" a \\n b\\n\"}\n{\"text\": \"d\"}\n{\"text\": \"c\"}\n");
    let out = directory.path().join("out");
    let report = run(&out, &options(&[&one, &two])).unwrap();
    assert_eq!(texts(&out, Split::Train), [vec!["a", "b"], vec!["c"], vec!["a"], vec!["d"]]);
    assert_eq!((report.documents, report.duplicates, report.empty), (7, 3, 0));
}

#[test]
fn sources_follow_each_other() {
    let directory = tempfile::tempdir().unwrap();
    let mut options = options(&[]);
    options.sources = [("wiki", 2.0, "a\n\nb\n"), ("empty", 1.0, "a\n"), ("web", 0.5, "a\n\nc\n\nd\n")]
        .map(|(name, weight, text)| {
            let paths = vec![write(directory.path(), &format!("{name}.txt"), text.as_bytes())];
            SourceFiles { name: name.to_owned(), weight, paths }
        })
        .to_vec();
    let out = directory.path().join("out");
    run(&out, &options).unwrap();
    let corpus = Corpus::open(&out, Split::Train).unwrap();
    let source = |name: &str, weight, documents| Source { name: name.to_owned(), weight, documents };
    assert_eq!(corpus.sources(), [source("wiki", 2.0, 0..2), source("web", 0.5, 2..4)]);
    assert_eq!((corpus.documents(), corpus.sentences(), corpus.pieces()), (4, 4, 4));

    // The weight is a part of what the data is.
    options.sources[0].weight = 3.0;
    let other = directory.path().join("other");
    run(&other, &options).unwrap();
    assert_ne!(Corpus::open(&other, Split::Train).unwrap().digest(), corpus.digest());

    for (change, part) in [("wiki", "name"), ("", "name")] {
        options.sources[1].name = change.to_owned();
        let error = run(&directory.path().join("third"), &options).unwrap_err();
        assert!(matches!(&error, DataError::Setting { .. }) && error.to_string().contains(part), "{error}");
    }
    options.sources[1].name = "x".to_owned();
    options.sources[1].weight = f64::NAN;
    assert!(matches!(run(&directory.path().join("third"), &options), Err(DataError::Setting { .. })));
}

fn set(texts: Vec<Vec<String>>) -> BTreeSet<Vec<String>> {
    texts.into_iter().collect()
}

/// Which side a document is on depends on its text and the seed alone.
#[test]
fn held_out_by_text() {
    const DOCUMENTS: usize = 2000;
    let directory = tempfile::tempdir().unwrap();
    let text = some_documents(DOCUMENTS);
    let all = write(directory.path(), "all.txt", text.as_bytes());
    // Half of them in another order, in another file, with others between them.
    let documents: Vec<&str> = text.rsplit("\n\n").step_by(2).collect();
    let half = write(directory.path(), "half.txt", documents.join("\n\nx y z\n\n").as_bytes());
    let split = |name: &str, file, seed, threads| {
        let mut options = options(&[file]);
        (options.held_out, options.seed, options.threads) = (0.1, seed, threads);
        let out = directory.path().join(name);
        let report = run(&out, &options).unwrap();
        let (train, held_out) = (set(texts(&out, Split::Train)), set(texts(&out, Split::HeldOut)));
        assert!(train.is_disjoint(&held_out));
        assert_eq!(report.train.documents, train.len() as u64);
        assert_eq!(report.held_out.documents, held_out.len() as u64);
        (train, held_out)
    };
    let (train, held_out) = split("one", &all, 7, 1);
    assert_eq!(train.len() + held_out.len(), DOCUMENTS);
    // 200 expected; five standard deviations are 67.
    assert!((133..=267).contains(&held_out.len()), "{}", held_out.len());
    let (some_train, some_held_out) = split("two", &half, 7, 2);
    assert!(some_train.is_disjoint(&held_out) && some_held_out.is_disjoint(&train));
    assert!(some_held_out.len() > 50);
    let (_, others) = split("three", &all, 8, 1);
    assert_ne!(others, held_out);
}

#[test]
fn held_out_by_file() {
    let directory = tempfile::tempdir().unwrap();
    let train = write(directory.path(), "train.txt", b"a\n\nb\n\nc\n");
    let kept = write(directory.path(), "kept.txt", b"x\n\nb\n");
    let mut options = options(&[&train]);
    options.held_out_files = vec![kept.clone()];
    let out = directory.path().join("out");
    run(&out, &options).unwrap();
    // What is in both is held out.
    assert_eq!(texts(&out, Split::HeldOut), [["x"], ["b"]]);
    assert_eq!(texts(&out, Split::Train), [["a"], ["c"]]);
    let corpus = Corpus::open(&out, Split::HeldOut).unwrap();
    assert_eq!((corpus.sources()[0].name.as_str(), corpus.sources().len()), ("held-out", 1));
    assert_eq!(corpus.digest(), Corpus::open(&out, Split::Train).unwrap().digest());

    // A name of one's own does not clash.
    options.sources[0].name = "held-out".to_owned();
    options.overwrite = true;
    run(&out, &options).unwrap();
    assert_eq!(Corpus::open(&out, Split::HeldOut).unwrap().sources()[0].name, "held-out-1");

    // Nothing is left to train on.
    options.held_out_files = vec![train];
    let error = run(&directory.path().join("none"), &options).unwrap_err();
    assert!(error.to_string().contains("all 3 were held out"), "{error}");
    assert_eq!(names(directory.path()), ["kept.txt", "out", "train.txt"]);
    for share in [-0.1, 1.0, f64::NAN] {
        options.held_out = share;
        assert!(matches!(run(&directory.path().join("none"), &options), Err(DataError::Setting { .. })));
    }
}
