//! Where tests compute: on the processor, or on the GPU with HENSON_TEST_CUDA set.

use henson_tensor::cuda::CudaOptions;
use henson_tensor::{Device, Isa};

/// Whether company changes no bit: on a GPU, products of other sizes are done in other ways.
#[allow(dead_code, reason = "not every test asks")]
pub(crate) fn company_keeps_bits() -> bool {
    std::env::var_os("HENSON_TEST_CUDA").is_none()
}

pub(crate) fn device(isa: Option<Isa>, threads: Option<usize>) -> Device {
    if std::env::var_os("HENSON_TEST_CUDA").is_some() {
        return Device::cuda(&CudaOptions::default()).unwrap();
    }
    Device::cpu(isa, threads).unwrap()
}
