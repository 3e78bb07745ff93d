//! Bytes as a shard and as the body of one: whatever is accepted can be read to its end, within bounds.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| henson_data::fuzzing::shard(bytes));
