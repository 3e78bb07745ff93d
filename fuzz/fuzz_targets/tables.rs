//! Bytes as a labelled file in every format: whatever is accepted has as many cells as names, and lines in order.
#![no_main]

use std::path::PathBuf;
use std::sync::LazyLock;

use henson_data::tables::{Header, TableFormat, TableOptions, read_rows, read_sentences};

/// Files are opened by their path: one per process, in memory where the system has such a place.
static FILE: LazyLock<PathBuf> = LazyLock::new(|| {
    let memory = PathBuf::from("/dev/shm");
    let parent = if memory.is_dir() { memory } else { std::env::temp_dir() };
    parent.join(format!("henson-fuzz-{}.table", std::process::id()))
});

libfuzzer_sys::fuzz_target!(
    init: {
        // henson-data catches the panics of the parquet library and makes errors of them. libFuzzer's own hook would end the
        // process at once; without it, a panic that nobody catches still does.
        std::panic::set_hook(Box::new(|_| {}));
    },
    |bytes: &[u8]| {
        std::fs::write(&*FILE, bytes).expect("the input is written");
        let formats = [TableFormat::Tsv, TableFormat::Csv, TableFormat::JsonLines, TableFormat::FastText, TableFormat::Parquet];
        for format in formats.map(Some).into_iter().chain([None]) {
            for (quotes, header) in [(None, Header::Present), (Some(true), Header::Absent)] {
                let options = TableOptions { format, quotes, header };
                let mut last = 0;
                let _ = read_rows(&FILE, &options, &mut |row| {
                    let Ok(row) = row else { return Ok(()) };
                    assert!(row.line > last, "line {} after {last}", row.line);
                    last = row.line;
                    let names = row.names().len();
                    assert!(names == 0 || names == row.width(), "{names} names of {}", row.width());
                    Ok(())
                });
            }
        }
        for comments in [false, true] {
            let _ = read_sentences(&FILE, comments, &mut |sentence| {
                let Ok(sentence) = sentence else { return Ok(()) };
                assert!(!sentence.words.is_empty() && sentence.words.iter().all(|(_, columns)| !columns.is_empty()));
                assert!(sentence.words.is_sorted_by_key(|(line, _)| *line));
                Ok(())
            });
        }
    }
);
