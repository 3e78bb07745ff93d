//! Work space that each thread keeps from call to call, so that a kernel allocates only when sizes grow.

use std::cell::RefCell;

use bytemuck::Pod;

/// One cache line, and one AVX-512 register: what every buffer is aligned to.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// Who uses the space. A kernel may call another one inside, so each purpose has a buffer of its own.
#[derive(Clone, Copy)]
pub(crate) enum Purpose {
    /// The packed operand of a matrix product that all tasks read.
    Shared,
    /// The packed operand of a matrix product that one task uses.
    Local,
    /// Anything else, of the outermost kernel.
    Kernel,
}

thread_local! {
    static BUFFERS: [RefCell<Vec<Line>>; 3] = const { [const { RefCell::new(Vec::new()) }; 3] };
}

/// Lends `len` elements of undefined (but initialised) content to `body`.
///
/// Panics when a purpose is asked for inside itself, which is a bug of the kernel.
pub(crate) fn with<T: Pod, R>(purpose: Purpose, len: usize, body: impl FnOnce(&mut [T]) -> R) -> R {
    BUFFERS.with(|buffers| {
        let mut buffer = buffers[purpose as usize].borrow_mut();
        let lines = (len * size_of::<T>()).div_ceil(64);
        if buffer.len() < lines {
            buffer.resize(lines, Line([0; 64]));
        }
        let pointer = buffer.as_mut_ptr().cast::<T>();
        // SAFETY: the buffer holds at least `len` elements, aligned to 64 bytes, initialised with zeros at first and
        // with other `Pod` values later; `borrow_mut` makes the reference unique.
        body(unsafe { std::slice::from_raw_parts_mut(pointer, len) })
    })
}
