//! Bytes as a safetensors file: whatever is accepted can be read to its end.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| henson_checkpoint::fuzzing::safetensors(bytes));
