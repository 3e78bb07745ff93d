//! Device memory that is used again, and host memory that the GPU can copy from while it computes.
//!
//! All work of a GPU goes through one stream, so what is still running reads and writes a block before its next user does.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::error::{Check, CudaError, Result};
use super::gpu::Context;
use crate::memory;

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

/// The blocks of a GPU.
pub type Pool = memory::Pool<Block>;

/// A block of at least `bytes`, of undefined content. Where there is no memory left, free blocks of `spare` are given back before the
/// pool's own.
pub(crate) fn take(pool: &Pool, spare: Option<&Pool>, context: &Arc<Context>, bytes: usize) -> Result<Arc<Block>> {
    let make = |bytes| match (Block::new(context, bytes)?, spare) {
        (None, Some(spare)) => {
            spare.trim();
            Block::new(context, bytes)
        }
        (made, _) => Ok(made),
    };
    if let Some(block) = pool.take(bytes, make)? {
        return Ok(block);
    }
    let (free, total) = result::mem_get_info().doing("ask for free memory")?;
    let [wanted, held, free, total] = [bytes, pool.held(), free, total].map(|bytes| bytes >> 20);
    Err(CudaError::OutOfMemory { wanted, held, free, total })
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

    /// How many bytes it has.
    #[allow(clippy::len_without_is_empty, reason = "it always has some")]
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Some of its bytes.
    ///
    /// # Safety
    /// No copy from the GPU into this range may be under way.
    pub unsafe fn bytes(&self, range: Range<usize>) -> &[u8] {
        assert!(range.start <= range.end && range.end <= self.bytes, "{range:?} of {} pinned bytes", self.bytes);
        // SAFETY: within what was allocated and filled with zeros; the rest is the caller's promise.
        unsafe { std::slice::from_raw_parts(self.start.add(range.start), range.len()) }
    }

    /// Some of its bytes, to write.
    ///
    /// # Safety
    /// No copy from or to the GPU may be under way in this range.
    pub unsafe fn bytes_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        assert!(range.start <= range.end && range.end <= self.bytes, "{range:?} of {} pinned bytes", self.bytes);
        // SAFETY: as above; borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
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
