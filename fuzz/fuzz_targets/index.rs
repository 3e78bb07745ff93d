//! Bytes as a model.safetensors.index.json: whatever is accepted names files in its own directory.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| henson_checkpoint::fuzzing::index(bytes));
