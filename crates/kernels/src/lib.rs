//! Slices in, slices out: the numeric kernels, each beside its naive reference.
//!
//! This crate knows no tensor, no model and no file. A kernel checks the lengths of its slices (a wrong length is a
//! bug of the caller, so it panics) and gives the same bits for any number of threads: output elements are divided
//! among threads, sums never are, or only in chunks whose borders depend on the sizes alone.

pub mod cores;
pub mod cpu;
pub mod cuda;
pub mod memory;
pub mod philox;
pub mod threads;

pub use half::bf16;
