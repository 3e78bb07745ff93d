//! Every format and compression gives the same documents, and each broken file a message that names the place.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use henson_data::{BuildOptions, BuildReport, DataError, Documents, Format, Sentences, Split};
use parquet::basic::{Compression, GzipLevel, ZstdLevel};
use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;

use crate::support::{built, names, options, run, texts, write};

/// Two documents, as each format has them.
const TEXT: &str = "\u{feff}\n\n one. Two\r\nthree! \n \t\n\n\nfour?\n";
const LINES: &str = "one. Two three!\n\n  four? \n";
const JSON: &str = concat!(
    "{\"id\": 1, \"text\": \"one. Two\\nthree!\", \"meta\": {\"text\": [1]}}\n\n",
    "{\"text\": null}\n{\"text\": \"\"}\r\n{\"text\": \" f\\u006fur? \"}"
);

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(bytes, 1).unwrap()
}

/// A table with an id and a text, in row groups of two rows.
fn parquet(rows: &[Option<&[u8]>], compression: Compression) -> Vec<u8> {
    let schema = "message table { required int64 id; optional group inner { optional binary text (UTF8); } optional binary text (UTF8); }";
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let properties = Arc::new(WriterProperties::builder().set_compression(compression).build());
    let mut bytes = Vec::new();
    let mut writer = SerializedFileWriter::new(&mut bytes, schema, properties).unwrap();
    for rows in rows.chunks(2) {
        let mut group = writer.next_row_group().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        let ids: Vec<i64> = (0..rows.len() as i64).collect();
        column.typed::<Int64Type>().write_batch(&ids, None, None).unwrap();
        column.close().unwrap();
        for levels in [2, 1] {
            let mut column = group.next_column().unwrap().unwrap();
            let values: Vec<ByteArray> = rows.iter().flatten().map(|row| row.to_vec().into()).collect();
            let present: Vec<i16> = rows.iter().map(|row| if row.is_some() { levels } else { 0 }).collect();
            column.typed::<ByteArrayType>().write_batch(&values, Some(&present), None).unwrap();
            column.close().unwrap();
        }
        group.close().unwrap();
    }
    writer.close().unwrap();
    bytes
}

const ROWS: [Option<&[u8]>; 5] = [Some(b"one. Two\nthree!"), None, Some(b""), None, Some(b" four? ")];

fn table() -> Vec<u8> {
    parquet(&ROWS, Compression::UNCOMPRESSED)
}

#[test]
fn all_formats_give_the_same_documents() {
    let lines = [vec!["one. two", "three!"], vec!["four?"]];
    let split = [vec!["one.", "two three!"], vec!["four?"]];
    let zipped_twice = [gzip(&TEXT.as_bytes()[..9]), gzip(&TEXT.as_bytes()[9..])].concat();
    let framed_twice = [zstd(&JSON.as_bytes()[..9]), zstd(&JSON.as_bytes()[9..])].concat();
    for (name, bytes, expected) in [
        ("a.txt", TEXT.as_bytes().to_vec(), &lines),
        ("no-ending", TEXT.as_bytes().to_vec(), &lines),
        ("a.txt.gz", gzip(TEXT.as_bytes()), &lines),
        ("a.txt.gz", zipped_twice, &lines),
        ("a.txt.zst", zstd(TEXT.as_bytes()), &lines),
        // What it is counts, not what it is called.
        ("a.txt", zstd(TEXT.as_bytes()), &lines),
    ] {
        assert_eq!(built(name, &bytes, |_| ()).unwrap(), *expected, "{name}");
    }
    // JSON and parquet keep line breaks, which end sentences where lines are short.
    let broken = [vec!["one.", "two", "three!"], vec!["four?"]];
    for (name, bytes) in [
        ("a.jsonl", JSON.as_bytes().to_vec()),
        ("a.NDJSON", JSON.as_bytes().to_vec()),
        ("a.jsonl.gz", gzip(JSON.as_bytes())),
        ("a.jsonl.zst", framed_twice),
        ("a.parquet", table()),
        ("by-its-first-bytes", table()),
        ("a.parquet", parquet(&ROWS, Compression::SNAPPY)),
        ("a.parquet", parquet(&ROWS, Compression::ZSTD(ZstdLevel::default()))),
        ("a.parquet", parquet(&ROWS, Compression::GZIP(GzipLevel::default()))),
    ] {
        assert_eq!(built(name, &bytes, |_| ()).unwrap(), broken, "{name}");
    }
    let per_line = built("a.txt", LINES.as_bytes(), |options| options.documents = Documents::Lines);
    assert_eq!(per_line.unwrap(), split);
    let forced = built("a.txt", JSON.as_bytes(), |options| options.format = Some(Format::JsonLines));
    assert_eq!(forced.unwrap(), broken);
    let split_text = built("a.txt", TEXT.as_bytes(), |options| options.sentences = Some(Sentences::Split));
    assert_eq!(split_text.unwrap(), broken);
    let json_lines = built("a.jsonl", JSON.as_bytes(), |options| options.sentences = Some(Sentences::Lines));
    assert_eq!(json_lines.unwrap(), lines);
}

#[test]
fn other_keys_and_columns() {
    let json = r#"{"text": "no", "body": "yes"}"#;
    assert_eq!(built("a.jsonl", json.as_bytes(), |options| options.field = "body".into()).unwrap(), [["yes"]]);
    let inner = built("a.parquet", &table(), |options| options.column = "inner.text".into());
    assert_eq!(inner.unwrap().len(), 2);
}

#[test]
fn directories_are_read_in_order() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().join("in");
    for (name, text) in
        [("b.txt", "two"), ("a/z.jsonl", r#"{"text":"one"}"#), ("c.txt.gz", "three"), ("d/e/f.text", "four")]
    {
        write(&place, name, text.as_bytes());
    }
    for name in ["README.md", ".hidden.txt", "d/notes"] {
        write(&place, name, b"not me");
    }
    std::os::unix::fs::symlink(&place, place.join("d/loop")).unwrap();
    let out = directory.path().join("out");
    let report = run(&out, &options(&[&place])).unwrap();
    assert_eq!(texts(&out, Split::Train), [["one"], ["two"], ["three"], ["four"]]);
    let skipped: Vec<_> = report.skipped.iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect();
    assert_eq!((report.files, skipped), (4, vec!["README.md", "loop", "notes"]));
}

#[test]
fn each_file_may_be_a_document() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().join("in");
    let files = [
        ("b/note.md", "# One\n\nIt was late. We went home.\n"),
        ("a.txt", "First line.\n\n\nSecond line.\n"),
        ("c.jsonl", "{\"text\": \"three\"}\n{\"text\": \"four\"}\n"),
        ("d.txt", " \n\n"),
        ("e.csv", "not,me\n"),
    ];
    for (name, text) in files {
        write(&place, name, text.as_bytes());
    }
    let out = directory.path().join("out");
    let whole = |documents: Documents| BuildOptions { documents, overwrite: true, ..options(&[&place]) };
    let report = run(&out, &whole(Documents::Files)).unwrap();
    // Sentences end where they do in running text, and at empty lines.
    let expected: [&[&str]; 4] =
        [&["first line.", "second line."], &["# one", "it was late.", "we went home."], &["three"], &["four"]];
    assert_eq!(texts(&out, Split::Train), expected);
    let names = |report: &BuildReport| {
        report.skipped.iter().map(|path| path.file_name().unwrap().to_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!((report.files, report.documents, names(&report)), (4, 4, vec!["e.csv".to_owned()]));
    let report = run(&out, &whole(Documents::BetweenEmptyLines)).unwrap();
    assert_eq!((report.files, report.documents, names(&report).join(" ")), (3, 4, "note.md e.csv".to_owned()));
    // A directory without any known file says which those would be.
    let error = run(&directory.path().join("none"), &options(&[&place.join("b")])).unwrap_err().to_string();
    assert!(error.contains("none of the 1 files") && error.contains(".parquet"), "{error}");
}

#[test]
fn broken_files_are_named() {
    #[track_caller]
    fn check(name: &str, bytes: &[u8], parts: &[&str]) {
        let error = built(name, bytes, |_| ()).unwrap_err();
        let mut message = error.to_string();
        if let Some(source) = std::error::Error::source(&error) {
            message = format!("{message}: {source}");
        }
        for part in parts.iter().chain([&name]) {
            assert!(message.contains(part), "expected {part:?} in {message:?}");
        }
    }
    check("bad.txt", b"good\nab\xffcd\n", &["line 2", "byte 3", "UTF-8", "--lossy"]);
    check("bad.jsonl", b"{\"text\": \"good\"}\n{\"text\": \"b\xff\"}\n", &["line 2", "UTF-8", "--lossy"]);
    check("half.jsonl", br#"{"text": "\ud800"}"#, &["line 1", "UTF-8", "--lossy"]);
    check("no.jsonl", b"{\"text\": \"a\"}\n{\"txt\": \"a\"}\n", &["line 2", "no key \"text\"", "--field"]);
    check("number.jsonl", b"{\"text\": 5}", &["line 1", "a text"]);
    check("list.jsonl", b"[1, 2]", &["line 1", "an object"]);
    check("cut.jsonl", b"{\"text\": \"a", &["line 1"]);
    check("two.jsonl", b"{\"text\": \"a\"} {\"text\": \"b\"}", &["line 1", "trailing"]);
    check("cut.txt.gz", &gzip(TEXT.as_bytes())[..20], &["read"]);
    check("cut.txt.zst", &zstd(TEXT.as_bytes())[..20], &["read"]);
    check("rows.parquet", &parquet(&[Some(b"a"), None, Some(b"\xff")], Compression::SNAPPY), &["row 3", "UTF-8"]);
    check("none.parquet", b"PAR1 and nothing", &["parquet"]);
    let error = built("x.parquet", &table(), |options| options.column = "body".into()).unwrap_err().to_string();
    assert!(error.contains("--column") && error.contains("id, inner.text, text"), "{error}");
    let error = built("x.parquet", &table(), |options| options.column = "id".into()).unwrap_err().to_string();
    assert!(error.contains("does not hold texts"), "{error}");
    let missing = run(Path::new("nowhere/out"), &options(&[Path::new("nowhere/file.txt")])).unwrap_err();
    assert!(missing.to_string().contains("nowhere/file.txt") && !Path::new("nowhere").exists());
}

#[test]
fn broken_parquet_files_are_errors() {
    let bytes = parquet(&ROWS, Compression::SNAPPY);
    for cut in (0..bytes.len()).step_by(101) {
        let _ = built("a.parquet", &bytes[..cut], |_| ());
    }
    for place in (0..bytes.len()).step_by(37) {
        let mut bytes = bytes.clone();
        bytes[place] ^= 1 << (place % 8);
        let _ = built("a.parquet", &bytes, |options| options.lossy = true);
    }
}

#[test]
fn lossy_reads_on() {
    for (name, bytes) in [
        ("a.txt", b"ab\xff cd\n".to_vec()),
        ("a.jsonl", b"{\"text\": \"ab\xff cd\"}".to_vec()),
        ("a.jsonl", br#"{"text": "ab\ud800 cd"}"#.to_vec()),
        ("a.parquet", parquet(&[Some(b"ab\xff cd")], Compression::UNCOMPRESSED)),
    ] {
        assert_eq!(built(name, &bytes, |options| options.lossy = true).unwrap(), [["ab cd"]], "{name}");
    }
}

#[test]
fn nothing_to_write_is_an_error() {
    for (name, text, part) in [
        ("a.txt", "", "no text"),
        ("a.txt", "\n \n\r\n", "no text"),
        ("a.jsonl", "{\"text\": \"\"}\n", "no text"),
        // Nothing is left of a zero-width space.
        ("a.txt", "\u{200b}\n", "no token was left"),
    ] {
        let error = built(name, text.as_bytes(), |_| ()).unwrap_err();
        assert!(matches!(&error, DataError::NoDocuments { reason } if reason.contains(part)), "{error}");
    }
    // Unknown words are pieces.
    assert_eq!(built("a.txt", "中\n\n \u{200b} \n\nb".as_bytes(), |_| ()).unwrap(), [["[UNK]"], ["b"]]);
}

/// A line or a document without end is cut, in bounded memory; nothing of it is lost.
#[test]
fn endless_documents_are_cut() {
    const SIZE: usize = (8 << 20) + (1 << 16);
    let words = "a b c d e f\n".repeat(SIZE / 12);
    let line = words.replace('\n', " ");
    let object = format!("{{\"text\": {line:?}}}");
    let solid = "x".repeat(SIZE);
    for (name, text, documents) in [
        ("a.txt", &words, Documents::BetweenEmptyLines),
        ("a.txt", &words, Documents::Files),
        ("a.txt", &line, Documents::Lines),
        ("a.jsonl", &object, Documents::BetweenEmptyLines),
        ("a.txt", &solid, Documents::Lines),
        ("a.txt", &solid, Documents::Files),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let file = write(directory.path(), name, text.as_bytes());
        let out = directory.path().join("out");
        let mut options = options(&[&file]);
        options.documents = documents;
        let report = run(&out, &options).unwrap();
        assert_eq!((report.documents, report.cut), (2, 1), "{name} {documents:?}");
        assert_eq!(report.bytes, if name == "a.jsonl" { object.len() } else { text.len() } as u64);
        if text != &solid {
            assert_eq!(report.train.pieces, 6 * (SIZE as u64 / 12));
        }
        assert_eq!(names(directory.path()).len(), 2);
    }
}
