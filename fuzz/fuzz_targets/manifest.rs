//! Bytes as a corpus.json: whatever is accepted names files below its own directory.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| henson_data::fuzzing::manifest(bytes));
