//! What can go wrong with tensors. Operations check shapes and dtypes, so that a mistake in a model is an error with
//! the operation's name and not a panic in a kernel.

use crate::{DType, Shape};

/// An operation could not be done.
#[derive(Debug, thiserror::Error)]
pub enum TensorError {
    /// A tensor has another shape than the operation needs.
    #[error("{operation}: {what} has the shape {got}, expected {expected}")]
    Shape {
        /// The operation.
        operation: &'static str,
        /// Which operand.
        what: &'static str,
        /// What it should be.
        expected: Shape,
        /// What it is.
        got: Shape,
    },
    /// A tensor has another dtype than the operation needs.
    #[error("{operation}: {what} is {got}, expected {expected}")]
    DType {
        /// The operation.
        operation: &'static str,
        /// Which operand.
        what: &'static str,
        /// What it should be.
        expected: DType,
        /// What it is.
        got: DType,
    },
    /// An index points outside of what it indexes.
    #[error("{operation}: {what} {index} is outside of 0..{end}")]
    Index {
        /// The operation.
        operation: &'static str,
        /// What the index is.
        what: &'static str,
        /// Its value.
        index: usize,
        /// The first that would be too large.
        end: usize,
    },
    /// A batch cannot be laid out.
    #[error("{0}")]
    Layout(String),
    /// There is not enough memory.
    #[error(
        "out of memory: {wanted} MiB more were asked for with {held} MiB in use; lower the batch size or the sequence \
         length, raise the accumulation, or use bf16"
    )]
    OutOfMemory {
        /// MiB that could not be had.
        wanted: usize,
        /// MiB held by this device's tensors.
        held: usize,
    },
    /// The GPU or its libraries refused.
    #[error(transparent)]
    Cuda(#[from] henson_kernels::cuda::CudaError),
    /// The operation needs something that this pass does not have.
    #[error("{operation}: {why}")]
    Unsupported {
        /// The operation.
        operation: &'static str,
        /// What is missing.
        why: &'static str,
    },
}
