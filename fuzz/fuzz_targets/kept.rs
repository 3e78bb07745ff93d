//! Bytes as a file of teachers' outputs and as a cache of vectors: whatever is accepted holds what it says, within bounds.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    henson_tasks::fuzzing::teacher_outputs(bytes);
    henson_tasks::fuzzing::vector_cache(bytes);
});
