//! Memory for numbers: aligned to a cache line, zeroed once, and on huge pages where it is large. A product of a large
//! vocabulary touches tens of megabytes in strides; with 4 KiB pages it would wait for page tables.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
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
        Self::with_pages(bytes, bytes >= 2 * HUGE)
    }

    fn with_pages(bytes: usize, huge: bool) -> Option<Self> {
        let layout = Layout::from_size_align(bytes.max(LINE), if huge { HUGE } else { LINE }).ok()?;
        // SAFETY: the layout's size is not zero.
        let start = NonNull::new(unsafe { alloc(layout) })?;
        // Pages are given out when they are first written: the advice has to come before the zeros, and `alloc_zeroed` would write them.
        if huge {
            advise_huge_pages(start, layout.size());
        }
        // SAFETY: just allocated with this size.
        unsafe { start.as_ptr().write_bytes(0, layout.size()) };
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

/// Numbers in a [`Buffer`] of their own: where all threads read them in order, lines that a vector register takes whole and huge pages
/// are worth some of the time that a `Vec` costs.
pub struct Numbers<T> {
    buffer: Buffer,
    len: usize,
    kind: PhantomData<T>,
}

impl<T: bytemuck::Pod> Numbers<T> {
    /// So many zeros. Ends the process where there is no memory, as `vec![]` does.
    pub fn zeros(len: usize) -> Self {
        const { assert!(align_of::<T>() <= LINE) };
        let bytes = len.saturating_mul(size_of::<T>());
        // A last page of which half is used is a huge one, too.
        let rounded = if bytes % HUGE >= HUGE / 2 { bytes.saturating_add(HUGE - bytes % HUGE) } else { bytes };
        let buffer = Buffer::with_pages(rounded, rounded >= HUGE).unwrap_or_else(|| {
            let layout = Layout::from_size_align(bytes.min(isize::MAX as usize / 2), LINE);
            handle_alloc_error(layout.unwrap_or(Layout::new::<T>()))
        });
        Self { buffer, len, kind: PhantomData }
    }
}

impl<T: bytemuck::Pod> Deref for Numbers<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the buffer has `len` numbers, of which any bits are one, is aligned for them, and nobody else has its address.
        unsafe { std::slice::from_raw_parts(self.buffer.start.as_ptr().cast(), self.len) }
    }
}

impl<T: bytemuck::Pod> DerefMut for Numbers<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and it is borrowed for writing.
        unsafe { std::slice::from_raw_parts_mut(self.buffer.start.as_ptr().cast(), self.len) }
    }
}

impl<T> fmt::Debug for Numbers<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Numbers").field("len", &self.len).finish_non_exhaustive()
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
    trims: AtomicU64,
}

impl<B> Default for Pool<B> {
    fn default() -> Self {
        Self { classes: Mutex::default(), trims: AtomicU64::new(0) }
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
            self.trim_classes(&mut classes);
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
        self.trim_classes(&mut self.classes.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// How often free blocks were given back. Whoever noted addresses of free blocks, to use them again, must not where this has grown.
    pub fn trims(&self) -> u64 {
        self.trims.load(Ordering::Relaxed)
    }

    fn trim_classes(&self, classes: &mut BTreeMap<usize, Vec<Arc<B>>>) {
        self.trims.fetch_add(1, Ordering::Relaxed);
        for blocks in classes.values_mut() {
            blocks.retain_mut(|block| Arc::get_mut(block).is_none());
        }
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

    /// KiB of huge pages in the mapping that an address is in.
    #[cfg(target_os = "linux")]
    fn huge_kib(address: usize) -> usize {
        let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut inside = false;
        for line in text.lines() {
            let range = line.split(' ').next().and_then(|range| range.split_once('-'));
            let hex = |number: &str| usize::from_str_radix(number, 16).ok();
            if let Some((start, end)) = range.and_then(|(start, end)| Some((hex(start)?, hex(end)?))) {
                inside = (start..end).contains(&address);
            } else if let (true, Some(kib)) = (inside, line.strip_prefix("AnonHugePages:")) {
                return kib.trim().trim_end_matches(" kB").parse().unwrap();
            }
        }
        0
    }

    /// Advised before it was written, memory has the huge pages that the system gives; where a plain try gets none, nothing is tested.
    #[test]
    #[cfg(target_os = "linux")]
    fn large_buffers_have_huge_pages() {
        const BYTES: usize = 16 << 20;
        let layout = Layout::from_size_align(BYTES, HUGE).unwrap();
        // SAFETY: the layout has a size; the memory is written within it and given back with it.
        let plain = unsafe {
            let start = NonNull::new(alloc(layout)).unwrap();
            advise_huge_pages(start, BYTES);
            start.as_ptr().write_bytes(1, BYTES);
            let kib = huge_kib(start.as_ptr().addr());
            dealloc(start.as_ptr(), layout);
            kib
        };
        let (buffer, numbers) = (Buffer::new(BYTES).unwrap(), Numbers::<u32>::zeros((BYTES - HUGE / 3) / 4));
        for address in [buffer.start().as_ptr().addr(), numbers.as_ptr().addr()] {
            assert!(huge_kib(address) >= plain / 2, "{} of {plain} KiB", huge_kib(address));
        }
    }

    #[test]
    fn numbers_are_zero_and_aligned() {
        for len in [0, 1, 1000, 3 << 20] {
            let mut numbers = Numbers::<u32>::zeros(len);
            assert!(numbers.iter().all(|x| *x == 0) && numbers.len() == len);
            assert!(numbers.as_ptr().addr().is_multiple_of(if len > 1000 { HUGE } else { LINE }));
            numbers.fill(7);
            assert_eq!(numbers.iter().map(|x| *x as usize).sum::<usize>(), 7 * len);
        }
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
        assert_eq!(pool.trims(), 1);
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
