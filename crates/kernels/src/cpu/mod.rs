//! CPU kernels. Each file opens with the naive loop in `f64` that defines the operation (`reference`), followed by the
//! kernel that is written once over a trait of vectors and compiled for every instruction set.

#[macro_use]
mod simd;

pub mod isa;
mod math;
pub mod peak;
mod pool;
mod scratch;

pub mod activation;
pub mod adafactor;
pub mod additive;
mod amx;
pub mod attention;
pub mod cast;
pub mod convolution;
pub mod crf;
pub mod dropout;
pub mod embedding;
pub mod gemm;
pub mod highway;
pub mod layer_norm;
pub mod loss;
pub mod mix;
pub mod optimizer;
pub mod recurrent;
pub mod reduce;
pub mod replace;
pub mod rotary;
pub mod rows;
pub mod sample;
pub mod span;

pub use isa::{Choice, Isa, UnsupportedIsa};
pub use simd::Element;

use std::ops::Range;

use crate::cores::Cores;
use pool::Pool;

/// What every CPU kernel runs on: the instruction set to use and the threads to use it with.
///
/// There is no global instance: whoever computes, owns or borrows one.
pub struct Cpu {
    isa: Isa,
    pool: Pool,
    second_level_cache: usize,
}

impl Cpu {
    /// A context with `threads` threads (at least one; the calling thread is one of them) and the given instruction set.
    pub fn new(isa: Isa, threads: usize) -> Result<Self, UnsupportedIsa> {
        isa.check()?;
        let second_level_cache = isa::second_level_cache();
        Ok(Self { isa, pool: Pool::new(threads.max(1)), second_level_cache })
    }

    /// The instruction set that suits this machine best, and all the cores that this process may use.
    pub fn detect() -> Self {
        let (pool, second_level_cache) = (Pool::new(Cores::of_this_process().threads()), isa::second_level_cache());
        Self { isa: Isa::best(), pool, second_level_cache }
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// The number of threads in use.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// The number of threads that a loop would have: one inside of another loop.
    pub(crate) fn threads_of_a_loop(&self) -> usize {
        self.pool.threads_of_a_loop()
    }

    /// Bytes of a core's second-level cache. What is computed never depends on it, only in which order.
    pub(crate) fn second_level_cache(&self) -> usize {
        self.second_level_cache
    }

    /// Runs `task(0..tasks)`, divided among the threads in no particular order.
    pub(crate) fn for_each(&self, tasks: usize, task: impl Fn(usize) + Sync) {
        self.pool.run(tasks, &task);
    }

    /// Runs `task(i, range)` on the ranges that `chunks` divides `0..rows` into.
    pub(crate) fn for_ranges(&self, rows: usize, least: usize, task: impl Fn(usize, Range<usize>) + Sync) {
        let (count, chunk) = chunks(rows, least);
        self.pool.run(count, &|i| task(i, i * chunk..((i + 1) * chunk).min(rows)));
    }

    /// The same over the rows of an output, `width` elements each: every task has its own to write.
    pub(crate) fn for_rows<T: Send>(
        &self,
        out: &mut [T],
        width: usize,
        least: usize,
        task: impl Fn(Range<usize>, &mut [T]) + Sync,
    ) {
        let rows = out.len() / width.max(1);
        let out = SharedMut::new(out);
        self.for_ranges(rows, least, |_, range| {
            // SAFETY: ranges are disjoint, and so are their rows.
            let part = unsafe { out.slice(range.start * width, range.len() * width) };
            task(range, part);
        });
    }
}

/// How rows are divided for parallel work: (number of ranges, rows in each but the last).
///
/// There are at most 64 ranges of at least `least` rows. The borders depend on the sizes alone, never on the number of
/// threads, so sums over a range and then over ranges always come out the same.
pub(crate) fn chunks(rows: usize, least: usize) -> (usize, usize) {
    let chunk = least.max(rows.div_ceil(64)).max(1);
    (rows.div_ceil(chunk), chunk)
}

impl std::fmt::Debug for Cpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Cpu({}, {} threads)", self.isa, self.threads())
    }
}

/// A pointer that tasks share to write disjoint parts of one output.
///
/// The kernels hand each task its own rows or tiles; this only carries the pointer across the thread border.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedMut<T>(*mut T, usize);

// SAFETY: whoever makes references or writes through it keeps the contract of `slice` and `part`: what different tasks
// touch does not overlap.
unsafe impl<T: Send> Send for SharedMut<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedMut<T> {}

impl<T> SharedMut<T> {
    pub(crate) fn new(slice: &mut [T]) -> Self {
        Self(slice.as_mut_ptr(), slice.len())
    }

    /// The elements from `start` on, for a callee that takes care of disjointness itself.
    ///
    /// # Safety
    /// As for `slice`, for those elements that the callee touches.
    pub(crate) unsafe fn part(&self, start: usize, len: usize) -> Self {
        assert!(len <= self.1 && start <= self.1 - len, "range {start}+{len} outside of {}", self.1);
        // SAFETY: within bounds by the assertion.
        Self(unsafe { self.0.add(start) }, len)
    }

    pub(crate) fn len(&self) -> usize {
        self.1
    }

    /// # Safety
    /// No other task may use an overlapping range at the same time, and the slice that `new` got must still be
    /// borrowed by the caller.
    #[allow(clippy::mut_from_ref, reason = "handing out disjoint parts is this type's purpose")]
    #[inline(always)]
    pub(crate) unsafe fn slice(&self, start: usize, len: usize) -> &mut [T] {
        assert!(len <= self.1 && start <= self.1 - len, "range {start}+{len} outside of {}", self.1);
        // SAFETY: within bounds by the assertion; disjoint by the contract.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(start), len) }
    }

    /// # Safety
    /// No task may write into an overlapping range at the same time, and the slice that `new` got must still be borrowed by
    /// the caller.
    #[inline(always)]
    pub(crate) unsafe fn shared(&self, start: usize, len: usize) -> &[T] {
        assert!(len <= self.1 && start <= self.1 - len, "range {start}+{len} outside of {}", self.1);
        // SAFETY: within bounds by the assertion; nobody writes by the contract.
        unsafe { std::slice::from_raw_parts(self.0.add(start), len) }
    }
}
