//! Buffers that are used again: a step asks for the same sizes as the one before, so after the first nothing is
//! allocated.
//!
//! The memory keeps a handle to every block that it ever gave out. A block is free when that handle is the only one
//! left, so nobody has to give anything back.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use henson_kernels::memory::Buffer as Block;

use crate::{Result, TensorError};

/// The blocks of a device, by size class.
#[derive(Default)]
pub struct Memory {
    classes: Mutex<BTreeMap<usize, Vec<Arc<Block>>>>,
}

impl Memory {
    /// A block of at least `bytes`, of undefined content.
    pub(crate) fn take(&self, bytes: usize) -> Result<Arc<Block>> {
        if bytes > isize::MAX as usize / 4 {
            return Err(TensorError::OutOfMemory { wanted: bytes >> 20, held: self.held() >> 20 });
        }
        let class = size_class(bytes);
        let mut classes = self.lock();
        // A free block of up to a quarter more will do: lengths vary from batch to batch.
        for (_, blocks) in classes.range_mut(class..=class + class / 4) {
            if let Some(free) = blocks.iter_mut().find_map(|block| Arc::get_mut(block).is_some().then_some(&*block)) {
                return Ok(Arc::clone(free));
            }
        }
        let held: usize = classes.iter().map(|(class, blocks)| class * blocks.len()).sum();
        let block = Block::new(class).ok_or(TensorError::OutOfMemory { wanted: class >> 20, held: held >> 20 })?;
        let block = Arc::new(block);
        classes.entry(class).or_default().push(Arc::clone(&block));
        Ok(block)
    }

    /// Bytes of all blocks, in use or not.
    pub fn held(&self) -> usize {
        self.lock().iter().map(|(class, blocks)| class * blocks.len()).sum()
    }

    /// Gives blocks that nobody uses back to the system: when batches change their size for good.
    pub fn trim(&self) {
        for blocks in self.lock().values_mut() {
            blocks.retain_mut(|block| Arc::get_mut(block).is_none());
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, Vec<Arc<Block>>>> {
        self.classes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sizes are rounded up to eighths of a power of two: at most an eighth is wasted, and classes stay few.
fn size_class(bytes: usize) -> usize {
    let bytes = bytes.max(1024);
    let step = (bytes.next_power_of_two() / 16).max(64);
    bytes.div_ceil(step) * step
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_used_again_once_nobody_has_them() {
        let memory = Memory::default();
        let first = memory.take(5000).unwrap();
        let second = memory.take(5000).unwrap();
        assert_ne!(first.start(), second.start());
        let (at, held) = (first.start(), memory.held());
        drop(first);
        assert_eq!(memory.take(4900).unwrap().start(), at);
        assert_eq!(memory.held(), held);
        drop(second);
        memory.trim();
        assert_eq!(memory.held(), 0);
    }

    #[test]
    fn too_much_is_an_error() {
        for bytes in [1 << 60, 1 << 62, usize::MAX] {
            let error = Memory::default().take(bytes).err().unwrap();
            assert!(error.to_string().contains("out of memory"), "{error}");
        }
        let device = crate::Device::cpu(None, Some(1)).unwrap();
        assert!(crate::Tensor::zeros(&device, [1 << 40, 1 << 40], crate::DType::F32).is_err());
    }

    #[test]
    fn classes_waste_little() {
        for bytes in [1, 1024, 1025, 5000, 1 << 20, (1 << 20) + 1, 123_456_789] {
            let class = size_class(bytes);
            assert!(class >= bytes && (bytes < 1024 || class <= bytes + bytes / 8 + 64), "{bytes} → {class}");
        }
    }
}
