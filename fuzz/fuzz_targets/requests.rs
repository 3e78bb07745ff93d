//! Bytes as the body of every kind of request: whatever they are, they are parsed or refused.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| henson_serve::fuzzing::requests(bytes));
