//! Where tests compute: on the processor, or on the GPU with HENSON_TEST_CUDA set.

use henson_tensor::cuda::CudaOptions;
use henson_tensor::{Device, Isa};

pub(crate) fn device(isa: Option<Isa>, threads: Option<usize>) -> Device {
    if std::env::var_os("HENSON_TEST_CUDA").is_some() {
        return Device::cuda(&CudaOptions::default()).unwrap();
    }
    Device::cpu(isa, threads).unwrap()
}
