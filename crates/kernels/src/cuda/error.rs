//! What can go wrong between here and the GPU. Each message says what was tried, what the library answered, and what to
//! do next.

use std::path::PathBuf;

/// Every error of the CUDA layer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// A shared library is on none of the paths where it was looked for.
    #[error(
        "{what} was not found: looked for {names} on the system's library path and in {} directories ({places}). \
         {advice}",
        .searched.len()
    )]
    NoLibrary {
        /// What is missing, such as `the CUDA driver`.
        what: &'static str,
        /// The file names that would do.
        names: String,
        /// Where they were looked for.
        searched: Vec<PathBuf>,
        /// The first few of them, for the message.
        places: String,
        /// How to get it.
        advice: &'static str,
    },

    /// There is no GPU with this number.
    #[error("there is no GPU number {wanted}: the CUDA driver sees {count}{}", visible(*.count))]
    NoDevice {
        /// The number that was asked for, from 0.
        wanted: usize,
        /// How many there are.
        count: usize,
    },

    /// The GPU is too old.
    #[error("{name} has compute capability {major}.{minor}, but 8.0 (A100, RTX 30) or newer is needed for bf16")]
    TooOld {
        /// The GPU's name.
        name: String,
        /// Its compute capability.
        major: i32,
        /// After the dot.
        minor: i32,
    },

    /// The driver refused a call.
    #[error("CUDA: cannot {action}: {code}, {message}")]
    Driver {
        /// What was tried, such as `copy to the GPU`.
        action: String,
        /// The driver's name of the error.
        code: String,
        /// Its own words.
        message: String,
    },

    /// Device memory is used up.
    #[error(
        "the GPU is out of memory: {wanted} MiB wanted, {held} MiB held, {free} MiB of {total} MiB free. Use smaller \
         batches, or accumulate over more of them"
    )]
    OutOfMemory {
        /// MiB that were asked for.
        wanted: usize,
        /// MiB that this process holds by its pool.
        held: usize,
        /// MiB that the driver says are free.
        free: usize,
        /// MiB of the GPU.
        total: usize,
    },

    /// A kernel does not compile: a bug, or a compiler that is too old.
    #[error("kernel {source_name} [{variant}] does not compile for {architecture} with NVRTC {version}:\n{log}")]
    Compile {
        /// The file of the kernel.
        source_name: &'static str,
        /// What it was compiled for.
        variant: String,
        /// The target.
        architecture: String,
        /// The compiler's version.
        version: String,
        /// What it said.
        log: String,
    },

    /// cuBLASLt refused a call.
    #[error("cuBLASLt: cannot {action}: {status}")]
    Blas {
        /// What was tried, with the shapes.
        action: String,
        /// The library's status.
        status: String,
    },

    /// NCCL refused a call, or something failed that it was asked for before.
    #[error("NCCL {version}: cannot {action}: {message}")]
    Nccl {
        /// The library's version.
        version: String,
        /// What was tried.
        action: String,
        /// The library's own words.
        message: String,
    },

    /// Stored choices of algorithms that do not parse.
    #[error("the stored matmul choices, line {line}: {problem}. Delete the file: algorithms are then timed again")]
    Choices {
        /// The line, from 1.
        line: usize,
        /// What is wrong with it.
        problem: String,
    },

    /// A kernel met an index outside of its table; what it wrote instead is NaN.
    #[error("an index of {operation} lies outside of its table or its classes: check the batch against the model")]
    Index {
        /// The operation that met it first.
        operation: &'static str,
    },
}

/// Shorthand of this layer.
pub type Result<T, E = CudaError> = std::result::Result<T, E>;

fn visible(count: usize) -> &'static str {
    if count == 0 { "; `nvidia-smi` should list it, and CUDA_VISIBLE_DEVICES may hide it" } else { "" }
}

/// Turns a driver's answer into a result with the action's name.
pub(crate) trait Check<T> {
    fn doing(self, action: &str) -> Result<T>;
}

impl<T> Check<T> for Result<T, cudarc::driver::result::DriverError> {
    fn doing(self, action: &str) -> Result<T> {
        self.map_err(|error| {
            let text =
                |s: Result<&std::ffi::CStr, _>| s.map_or_else(|_| "unknown".into(), |s| s.to_string_lossy().into());
            CudaError::Driver {
                action: action.into(),
                code: text(error.error_name()),
                message: text(error.error_string()),
            }
        })
    }
}
