//! A tokenizer that writes every word of ASCII letter by letter, and corpora as the texts that they came from.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use henson_data::{BuildOptions, BuildReport, Corpus, DataError, SourceFiles, Split, build};
use henson_text::{Tokenizer, WordPieceOptions};

pub(crate) static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| letters(0));

/// A vocabulary of letters, digits and punctuation, and so many words more.
pub(crate) fn letters(more: usize) -> Tokenizer {
    let mut pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"].map(str::to_owned).to_vec();
    for letter in ('a'..='z').chain('0'..='9') {
        pieces.extend([letter.to_string(), format!("##{letter}")]);
    }
    pieces.extend(('!'..='/').chain(':'..='@').map(String::from));
    pieces.extend((0..more).map(|i| format!("word{i}")));
    Tokenizer::from_vocabulary(&pieces, &WordPieceOptions::default()).unwrap()
}

/// The options for some files: nothing held out, one thread.
pub(crate) fn options(paths: &[&Path]) -> BuildOptions {
    let paths = paths.iter().map(|path| path.to_path_buf()).collect();
    let sources = vec![SourceFiles { name: "files".to_owned(), weight: 1.0, paths }];
    BuildOptions { sources, ..BuildOptions::default() }
}

pub(crate) fn run(out: &Path, options: &BuildOptions) -> Result<BuildReport, DataError> {
    build(&TOKENIZER, out, options, &mut |_| true)
}

/// The sentences of all documents.
pub(crate) fn texts(directory: &Path, split: Split) -> Vec<Vec<String>> {
    let corpus = Corpus::open(directory, split).unwrap();
    corpus.verify().unwrap();
    (0..corpus.documents()).map(|number| document(&corpus, number)).collect()
}

pub(crate) fn document(corpus: &Corpus, number: usize) -> Vec<String> {
    let mut reader = corpus.reader();
    let document = reader.document(number).unwrap();
    let mut text = |sentence| {
        let mut ids = Vec::new();
        let range = reader.sentence(&document, sentence).unwrap();
        reader.read(&document, range, &mut ids).unwrap();
        TOKENIZER.decode(&ids, false).unwrap()
    };
    (0..document.sentences()).map(&mut text).collect()
}

/// Builds from one file and gives the sentences of all documents.
pub(crate) fn built(
    name: &str,
    bytes: &[u8],
    change: impl FnOnce(&mut BuildOptions),
) -> Result<Vec<Vec<String>>, DataError> {
    let directory = tempfile::tempdir().unwrap();
    let file = write(directory.path(), name, bytes);
    let mut options = options(&[&file]);
    change(&mut options);
    let out = directory.path().join("out");
    let result = run(&out, &options).map(|_| texts(&out, Split::Train));
    assert_eq!(result.is_ok(), out.exists());
    assert_eq!(names(directory.path()).len(), 1 + usize::from(result.is_ok()), "nothing else is left");
    result
}

pub(crate) fn write(directory: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let path = directory.join(name);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(&path, bytes).unwrap();
    path
}

/// What is in a directory, hidden names too.
pub(crate) fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).unwrap();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// All files below a directory.
pub(crate) fn contents(directory: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::new();
    for name in names(directory) {
        let path = directory.join(&name);
        if path.is_dir() {
            files.extend(contents(&path).into_iter().map(|(inner, bytes)| (format!("{name}/{inner}"), bytes)));
        } else {
            files.insert(name, std::fs::read(path).unwrap());
        }
    }
    files
}

/// Documents of some sentences each, all different, and how they stand in a text file.
pub(crate) fn some_documents(count: usize) -> String {
    let mut text = String::new();
    for document in 0..count {
        for sentence in 0..1 + document % 4 {
            text.push_str(&format!("document {document} has a sentence {}.\n", "and more ".repeat(sentence % 3)));
        }
        text.push('\n');
    }
    text
}
