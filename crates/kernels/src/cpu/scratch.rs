//! Work space that each thread keeps from call to call, so that a kernel allocates only when sizes grow.

use std::cell::RefCell;

use bytemuck::Pod;

use crate::memory::Buffer;

/// Who uses the space. A kernel may call another one inside, so each purpose has a buffer of its own.
#[derive(Clone, Copy)]
pub(crate) enum Purpose {
    /// The packed operand of a matrix product that all tasks read.
    Shared,
    /// The packed left operand, where tasks read both.
    Left,
    /// The packed operand of a matrix product that one task uses.
    Local,
    /// Sums of a matrix product over parts of k.
    Sums,
    /// Sums of a task's tiles over blocks of k.
    Tiles,
    /// Anything else, of the outermost kernel.
    Kernel,
    /// What the tasks of a kernel share while each has work space of its own.
    Outer,
}

thread_local! {
    static BUFFERS: [RefCell<Option<Buffer>>; 7] = const { [const { RefCell::new(None) }; 7] };
}

/// Lends `len` elements of undefined (but initialised) content to `body`.
///
/// Panics when a purpose is asked for inside itself, which is a bug of the kernel.
pub(crate) fn with<T: Pod, R>(purpose: Purpose, len: usize, body: impl FnOnce(&mut [T]) -> R) -> R {
    BUFFERS.with(|buffers| {
        let mut buffer = buffers[purpose as usize].borrow_mut();
        let bytes = len * size_of::<T>();
        if buffer.as_ref().is_none_or(|buffer| buffer.bytes() < bytes) {
            // A little more, so that sizes that vary do not lead to a new buffer each time.
            *buffer = Buffer::new(bytes + bytes / 8);
        }
        let Some(buffer) = &*buffer else { panic!("out of memory: no {bytes} bytes of work space") };
        let pointer = buffer.start().as_ptr().cast::<T>();
        // SAFETY: the buffer holds at least `len` elements, aligned to 64 bytes, initialised with zeros at first and
        // with other `Pod` values later; the borrow of the cell makes the reference unique.
        body(unsafe { std::slice::from_raw_parts_mut(pointer, len) })
    })
}
