//! Memory for numbers: aligned to a cache line, zeroed once, and on huge pages where it is large. A product of a large
//! vocabulary touches tens of megabytes in strides; with 4 KiB pages it would wait for page tables.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

/// A cache line, which is also a vector register of AVX-512.
const LINE: usize = 64;

/// A huge page; buffers of at least two of them are aligned to it.
const HUGE: usize = 2 << 20;

/// A piece of memory. It hands out only its address: who may read and write it, is its owner's business.
pub struct Buffer {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: plain memory; sharing it safely is up to whoever makes slices of it.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Memory full of zeros, or nothing where there is none left.
    pub fn new(bytes: usize) -> Option<Self> {
        let large = bytes >= 2 * HUGE;
        let layout = Layout::from_size_align(bytes.max(LINE), if large { HUGE } else { LINE }).ok()?;
        // SAFETY: the layout's size is not zero.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        if large {
            advise_huge_pages(start, bytes);
        }
        Some(Self { start, layout })
    }

    /// Where it begins.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// How long it is.
    pub fn bytes(&self) -> usize {
        self.layout.size()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated by `new` with this layout.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}

/// Asks for huge pages. Whether there are any is the system's choice and changes nothing but speed, so its answer does
/// not matter.
fn advise_huge_pages(start: NonNull<u8>, bytes: usize) {
    #[cfg(target_os = "linux")]
    // SAFETY: the range was just allocated and belongs to us; the advice does not change its content.
    unsafe {
        let _ = rustix::mm::madvise(start.as_ptr().cast(), bytes, rustix::mm::Advice::LinuxHugepage);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (start, bytes);
}

/// Blocks of memory that are used again, by size class: a step asks for the same sizes as the one before, so after the first
/// nothing is allocated.
///
/// It keeps a handle to every block that it ever gave out. A block is free when that handle is the only one left, so nobody
/// has to give anything back.
pub struct Pool<B> {
    classes: Mutex<BTreeMap<usize, Vec<Arc<B>>>>,
}

impl<B> Default for Pool<B> {
    fn default() -> Self {
        Self { classes: Mutex::default() }
    }
}

impl<B> Pool<B> {
    /// A block of at least `bytes`, of undefined content: a free one, or one that `make` makes of the size it is given, in bytes.
    /// Where it makes none, free blocks of other sizes are given back first; nothing where even that does not help.
    pub fn take<E>(
        &self,
        bytes: usize,
        mut make: impl FnMut(usize) -> Result<Option<B>, E>,
    ) -> Result<Option<Arc<B>>, E> {
        if bytes > isize::MAX as usize / 4 {
            return Ok(None);
        }
        let class = size_class(bytes);
        let mut classes = self.classes.lock().unwrap_or_else(PoisonError::into_inner);
        // A free block of up to a quarter more will do: lengths vary from batch to batch.
        for (_, blocks) in classes.range_mut(class..=class + class / 4) {
            if let Some(free) = blocks.iter_mut().find_map(|block| Arc::get_mut(block).is_some().then_some(&*block)) {
                return Ok(Some(Arc::clone(free)));
            }
        }
        let mut block = make(class)?;
        if block.is_none() {
            trim(&mut classes);
            block = make(class)?;
        }
        let Some(block) = block else { return Ok(None) };
        let block = Arc::new(block);
        classes.entry(class).or_default().push(Arc::clone(&block));
        Ok(Some(block))
    }

    /// Bytes of all blocks, in use or not.
    pub fn held(&self) -> usize {
        let classes = self.classes.lock().unwrap_or_else(PoisonError::into_inner);
        classes.iter().map(|(class, blocks)| class * blocks.len()).sum()
    }

    /// Gives blocks that nobody uses back to the system: when batches change their size for good.
    pub fn trim(&self) {
        trim(&mut self.classes.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

fn trim<B>(classes: &mut BTreeMap<usize, Vec<Arc<B>>>) {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn take(pool: &Pool<Buffer>, bytes: usize) -> Arc<Buffer> {
        pool.take(bytes, |bytes| Ok::<_, ()>(Buffer::new(bytes))).unwrap().unwrap()
    }

    #[test]
    fn blocks_are_used_again_once_nobody_has_them() {
        let pool = Pool::default();
        let (first, second) = (take(&pool, 5000), take(&pool, 5000));
        assert_ne!(first.start(), second.start());
        let (at, held) = (first.start(), pool.held());
        drop(first);
        assert_eq!(take(&pool, 4900).start(), at);
        assert_eq!(pool.held(), held);
        drop(second);
        pool.trim();
        assert_eq!(pool.held(), 0);
    }

    #[test]
    fn free_blocks_make_room_for_others() {
        let pool = Pool::default();
        drop(take(&pool, 5000));
        let mut asked = 0;
        let scarce = |bytes: usize| {
            asked += 1;
            Ok::<_, ()>(if asked > 1 { Buffer::new(bytes) } else { None })
        };
        let block = pool.take(1 << 20, scarce).unwrap().unwrap();
        assert_eq!(pool.held(), block.bytes(), "the free one was given back");
        for bytes in [4 << 20, 1 << 62, usize::MAX] {
            assert!(pool.take(bytes, |_| Ok::<_, ()>(None)).unwrap().is_none());
        }
    }

    #[test]
    fn classes_waste_little() {
        for bytes in [1, 1024, 1025, 5000, 1 << 20, (1 << 20) + 1, 123_456_789] {
            let class = size_class(bytes);
            assert!(class >= bytes && class.is_multiple_of(256), "{bytes} → {class}");
            assert!(bytes < 1024 || class <= bytes + bytes / 8 + 256, "{bytes} → {class}");
        }
    }
}
