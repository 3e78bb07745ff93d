//! Bytes as a SentencePiece model: whatever is accepted encodes and decodes, its offsets lie within the text, and where it can
//! be saved, the same comes back.
#![no_main]

use std::path::PathBuf;
use std::sync::LazyLock;

use henson_text::Tokenizer;

/// Files are opened by their path: one per process, in memory where the system has such a place.
static FILE: LazyLock<PathBuf> = LazyLock::new(|| {
    let memory = PathBuf::from("/dev/shm");
    let parent = if memory.is_dir() { memory } else { std::env::temp_dir() };
    parent.join(format!("henson-fuzz-{}.model", std::process::id()))
});

libfuzzer_sys::fuzz_target!(
    init: {
        // henson-text catches the panics of the library below it and makes errors of them. libFuzzer's own hook would end
        // the process at once; without it, a panic that nobody catches still does.
        std::panic::set_hook(Box::new(|_| {}));
    },
    |bytes: &[u8]| {
        std::fs::write(&*FILE, bytes).expect("the input is written");
        let Ok(tokenizer) = Tokenizer::open(&FILE) else { return };
        for text in ["", "Jim Henson was a puppeteer", "  nai\u{308}ve\u{301} \u{fb01} \u{4e2d}\u{6587} \u{1100}\u{1161} \u{0} \u{1f600}\n"] {
            let Ok(pieces) = tokenizer.encode(text) else { continue };
            assert!(pieces.offsets.iter().all(|&(start, end)| text.get(start..end).is_some()));
            let _ = tokenizer.decode(&pieces.ids, true);
        }
        if let Ok(files) = tokenizer.files(None) {
            assert!(files.iter().any(|(_, saved)| saved == bytes));
        }
    }
);
