//! Memory for numbers: aligned to a cache line, zeroed once, and on huge pages where it is large. A product of a large
//! vocabulary touches tens of megabytes in strides; with 4 KiB pages it would wait for page tables.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

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
