//! Bytes as a file of word vectors: whatever is accepted has as many numbers as it says, all of them finite.
#![no_main]

use std::path::Path;

use henson_text::WordVectors;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let mut seen = 0;
    let Ok(vectors) = WordVectors::from_reader(bytes, Path::new("input"), &mut |_, _| {
        seen += 1;
        seen % 3 != 0
    }) else {
        return;
    };
    assert_eq!(vectors.numbers.len(), vectors.words.len() * vectors.width);
    assert!(vectors.numbers.iter().all(|number| number.is_finite()));
});
