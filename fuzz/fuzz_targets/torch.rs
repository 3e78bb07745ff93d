//! Bytes as a file of torch.save: whatever is accepted can be read to its end.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| drop(henson_checkpoint::fuzzing::torch(bytes)));
