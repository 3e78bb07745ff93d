//! Device memory that is used again, and host memory that the GPU can copy from while it computes.
//!
//! The pool keeps a handle to every block that it gave out; a block whose only handle is the pool's is free. All work of
//! a GPU goes through one stream, so what is still running reads and writes a block before its next user does.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::{result, sys};

use super::error::{Check, CudaError, Result};
use super::gpu::Context;

/// A piece of device memory, given back to the driver when dropped.
pub struct Block {
    address: u64,
    bytes: usize,
    context: Arc<Context>,
}

impl Block {
    fn new(context: &Arc<Context>, bytes: usize) -> Result<Option<Self>> {
        context.bind()?;
        // SAFETY: the context is current; nothing reads the memory before a kernel or a copy writes it.
        match unsafe { result::malloc_sync(bytes) } {
            Ok(address) => Ok(Some(Self { address, bytes, context: Arc::clone(context) })),
            Err(error) if error.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => Ok(None),
            Err(error) => Err(error).doing("allocate device memory"),
        }
    }

    /// Where it begins, in the GPU's address space.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// How long it is.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: allocated by `new`, freed once. The driver waits for kernels that use it. An error at the end of the
            // process has nobody to hear it.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

/// The blocks of a GPU, by size class.
#[derive(Default)]
pub struct Pool {
    classes: Mutex<BTreeMap<usize, Vec<Arc<Block>>>>,
}

impl Pool {
    /// A block of at least `bytes`, of undefined content. Where the driver has no more, free blocks of other sizes are
    /// given back to it first.
    pub(crate) fn take(&self, context: &Arc<Context>, bytes: usize) -> Result<Arc<Block>> {
        let class = size_class(bytes);
        let mut classes = self.lock();
        // A free block of up to a quarter more will do: lengths vary from batch to batch.
        for (_, blocks) in classes.range_mut(class..=class + class / 4) {
            if let Some(free) = blocks.iter_mut().find_map(|block| Arc::get_mut(block).is_some().then_some(&*block)) {
                return Ok(Arc::clone(free));
            }
        }
        let mut block = Block::new(context, class)?;
        if block.is_none() {
            trim(&mut classes);
            block = Block::new(context, class)?;
        }
        let Some(block) = block else {
            let (free, total) = result::mem_get_info().doing("ask for free memory")?;
            let mib = |bytes: usize| bytes >> 20;
            let held = mib(held(&classes));
            return Err(CudaError::OutOfMemory { wanted: mib(class), held, free: mib(free), total: mib(total) });
        };
        let block = Arc::new(block);
        classes.entry(class).or_default().push(Arc::clone(&block));
        Ok(block)
    }

    /// Bytes of all blocks, in use or not.
    pub fn held(&self) -> usize {
        held(&self.lock())
    }

    /// Gives blocks that nobody uses back to the driver: when batches change their size for good.
    pub fn trim(&self) {
        trim(&mut self.lock());
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, Vec<Arc<Block>>>> {
        self.classes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn held(classes: &BTreeMap<usize, Vec<Arc<Block>>>) -> usize {
    classes.iter().map(|(class, blocks)| class * blocks.len()).sum()
}

fn trim(classes: &mut BTreeMap<usize, Vec<Arc<Block>>>) {
    for blocks in classes.values_mut() {
        blocks.retain_mut(|block| Arc::get_mut(block).is_none());
    }
}

/// Sizes are rounded up to eighths of a power of two: at most an eighth is wasted, and classes stay few.
fn size_class(bytes: usize) -> usize {
    let bytes = bytes.max(1024);
    let step = (bytes.next_power_of_two() / 16).max(256);
    bytes.div_ceil(step) * step
}

/// Host memory that stays in its place, so that copies from and to it run beside kernels.
pub struct Pinned {
    start: *mut u8,
    bytes: usize,
    context: Arc<Context>,
}

// SAFETY: plain memory with one owner; shared only by `&`, which gives no way to write.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    pub(crate) fn new(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        context.bind()?;
        let bytes = bytes.max(64);
        // SAFETY: the context is current.
        let start = unsafe { result::malloc_host(bytes, 0) }.doing("allocate pinned host memory")?.cast::<u8>();
        // SAFETY: just allocated with this length; zeroed so that it can be read as numbers.
        unsafe { start.write_bytes(0, bytes) };
        Ok(Self { start, bytes, context: Arc::clone(context) })
    }

    /// Its bytes. A copy from the GPU that is still under way may change them: wait for it first.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: allocated with this length and filled with zeros.
        unsafe { std::slice::from_raw_parts(self.start, self.bytes) }
    }

    /// Its bytes, to write. A copy to the GPU that is still under way may read either: wait for it first.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: allocated by `new`, freed once; the driver waits for copies.
            let _ = unsafe { result::free_host(self.start.cast()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::size_class;

    #[test]
    fn classes_waste_little() {
        for bytes in [1, 1024, 1025, 5000, 1 << 20, (1 << 20) + 1, 123_456_789] {
            let class = size_class(bytes);
            assert!(class >= bytes && class.is_multiple_of(256), "{bytes} → {class}");
            assert!(bytes < 1024 || class <= bytes + bytes / 8 + 256, "{bytes} → {class}");
        }
    }
}
