//! Bytes as each of sentence-transformers' files: they are read or refused, and folders stay inside of the directory.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| henson_infer::fuzz_sentence_files(bytes));
