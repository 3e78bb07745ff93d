//! HDF5 files: whatever is accepted lies within the file.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| drop(henson_checkpoint::fuzzing::hdf5(bytes)));
