//! The memory of a CPU's tensors.

use std::sync::Arc;

use henson_kernels::memory::{Buffer as Block, Pool};

use crate::{Result, TensorError};

/// The blocks of a device.
pub type Memory = Pool<Block>;

/// A block of at least `bytes`, of undefined content.
pub(crate) fn take(memory: &Memory, bytes: usize) -> Result<Arc<Block>> {
    let block = memory.take(bytes, |bytes| Ok::<_, TensorError>(Block::new(bytes)))?;
    block.ok_or_else(|| TensorError::OutOfMemory { wanted: bytes >> 20, held: memory.held() >> 20 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_much_is_an_error() {
        for bytes in [1 << 60, 1 << 62, usize::MAX] {
            let error = take(&Memory::default(), bytes).err().unwrap();
            assert!(error.to_string().contains("out of memory"), "{error}");
        }
        let device = crate::Device::cpu(None, Some(1)).unwrap();
        assert!(crate::Tensor::zeros(&device, [1 << 40, 1 << 40], crate::DType::F32).is_err());
    }
}
