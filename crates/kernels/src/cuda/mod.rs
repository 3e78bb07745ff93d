//! The CUDA kernels of henson: device pointers in, device pointers out, each operation as on the CPU.
//!
//! The functions mirror those of [`crate::cpu`], which hold their definitions: where there a slice goes in, here it
//! is a [`View`] of device memory. A wrong length is a bug of the caller, so it panics; a bad *value* in device memory,
//! such as an id outside of its table, gives NaN there and an error from [`Gpu::check_faults`].
//!
//! Nothing here needs CUDA to be built: libraries are looked for at run time, and kernels are sources in the binary that
//! NVRTC compiles for the GPU at hand. Results are the same bits from run to run on one kind of GPU: sums are divided by
//! sizes alone, and no floating-point number is added atomically.

pub mod activation;
pub mod adafactor;
pub mod additive;
pub mod attention;
pub mod cast;
pub mod characters;
pub mod compile;
pub mod crf;
pub mod embedding;
pub mod error;
pub mod gpu;
pub mod layer_norm;
pub mod library;
pub mod loss;
pub mod matmul;
pub mod memory;
pub mod mix;
pub mod nccl;
pub mod optimizer;
pub mod product_hopper;
pub mod recurrent;
pub mod reduce;
pub mod replace;
pub mod rotary;
pub mod rows;

pub use error::{CudaError, Result};
pub use gpu::{Buffer, DType, Dropout, Event, Gpu, Graph, Native, Options, Scalar, Step, View};
pub use library::{Library, Search};
pub use memory::{Block, Pinned, Pool};

use compile::Source;

/// Every kernel source, to be compiled ahead or checked without a GPU.
pub static SOURCES: [&Source; 27] = [
    &activation::SOURCE,
    &adafactor::SOURCE,
    &additive::SOURCE,
    &attention::SOURCE,
    &attention::HOPPER,
    &attention::backward_hopper::SOURCE,
    &attention::cache::SOURCE,
    &attention::disentangled::SOURCE,
    &attention::general::SOURCE,
    &attention::hopper::FORWARD,
    &attention::general::TILED,
    &attention::general::PLAIN,
    &attention::xl::SOURCE,
    &characters::SOURCE,
    &crf::SOURCE,
    &layer_norm::SOURCE,
    &loss::SOURCE,
    &mix::SOURCE,
    &optimizer::SOURCE,
    &product_hopper::SOURCE,
    &recurrent::SOURCE,
    &reduce::SOURCE,
    &replace::SOURCE,
    &rotary::SOURCE,
    &activation::STRIPS,
    &rows::SOURCE,
    &rows::SORT,
];
