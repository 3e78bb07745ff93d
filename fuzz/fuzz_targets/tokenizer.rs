//! Bytes as a tokenizer.json: whatever is accepted encodes and decodes, and its offsets lie within the text.
#![no_main]

use std::path::PathBuf;
use std::sync::LazyLock;

use henson_text::Tokenizer;

/// Files are opened by their directory: one per process, in memory where the system has such a place.
static DIRECTORY: LazyLock<PathBuf> = LazyLock::new(|| {
    let memory = PathBuf::from("/dev/shm");
    let parent = if memory.is_dir() { memory } else { std::env::temp_dir() };
    let directory = parent.join(format!("henson-fuzz-{}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("a directory for the input");
    directory
});

libfuzzer_sys::fuzz_target!(
    init: {
        // henson-text catches the panics of the library below it and makes errors of them. libFuzzer's own hook would end
        // the process at once; without it, a panic that nobody catches still does.
        std::panic::set_hook(Box::new(|_| {}));
    },
    |bytes: &[u8]| {
        std::fs::write(DIRECTORY.join("tokenizer.json"), bytes).expect("the input is written");
        let Ok(tokenizer) = Tokenizer::open(&DIRECTORY) else { return };
        for text in ["", "Jim Henson was a puppeteer", " naïve\u{301} 中文 [MASK] \u{0} \u{1f600}\n"] {
            let Ok(pieces) = tokenizer.encode(text) else { continue };
            assert!(pieces.offsets.iter().all(|&(start, end)| text.get(start..end).is_some()));
            let _ = tokenizer.decode(&pieces.ids, true);
        }
    }
);
