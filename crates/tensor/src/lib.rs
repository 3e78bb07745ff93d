//! Shapes, dtypes, devices, storage, the tape of coarse operations and flat parameters.
//!
//! The way a training step takes: a [`Pass`] over [`Parameters`] runs operations and records them on a [`Tape`];
//! [`Pass::backward`] walks the tape back and adds to [`Gradients`]; an optimizer updates the parameters. Every buffer
//! comes from the device's [`Memory`] and goes back to it, so that steps after the first allocate nothing.
//!
//! Dispatch on the device is by enum, here and nowhere above: a model does not know where it runs.

pub mod bench;
pub mod cuda;
mod device;
mod dtype;
mod error;
mod layout;
mod memory;
mod ops;
mod optimizer;
mod parameters;
mod parts;
mod profile;
mod recording;
mod sharing;
mod tape;
mod tensor;
mod turns;
mod wires;

pub use cuda::Reading;
pub use device::Device;
pub use dtype::{DType, Native};
pub use error::TensorError;
pub use henson_kernels::bf16;
pub use henson_kernels::cores::Cores;
pub use henson_kernels::cpu::activation::Activation;
pub use henson_kernels::cpu::attention::disentangled::Disentangled;
pub use henson_kernels::cpu::attention::xl::{Relations, UNSEEN, Xl};
pub use henson_kernels::cpu::attention::{Attention, Bias, Buckets, LogBuckets, Window};
pub use henson_kernels::cpu::recurrent::Cell;
pub use henson_kernels::cpu::rotary::{Pairing, Rotary};
pub use henson_kernels::cpu::{Choice, Isa, UnsupportedIsa};
pub use henson_kernels::philox;
pub use layout::Layout;
pub use memory::Memory;
pub use ops::{
    BiasValues, Cache, CachedSequence, CrfParams, Directions, EmbeddingTables, FeedForwardLayers, Filters, LegalSteps,
    LogSums, MixParams, Norm, Pooling, PositionTables, QueryKeyValue, RecurrentLayer, RecurrentOutput, RecurrentState,
    RelativePositions, RotaryTable, Sinusoids, XlRelations, XlTables,
};
pub use optimizer::{Adafactor, Method, Optimizer, Update};
pub use parameters::{Angles, Builder, Entry, Gradients, Group, Init, Param, Parameters};
pub use parts::PartSums;
pub use profile::{Kind, Spent};
pub use recording::{Bits, Recordings, Signature, Trace};
pub use tape::{Pass, Tape, Training, Var};
pub use tensor::{Shape, Tensor};
pub use turns::Turn;

/// What every fallible function here returns.
pub type Result<T, E = TensorError> = std::result::Result<T, E>;
