//! Sums and extremes over whole buffers: bias gradients, the gradient's norm, and whether all is finite.
//!
//! Sums are divided in chunks whose borders depend on the sizes alone, and the chunks are added in order.

use super::scratch::{self, Purpose};
use super::simd::{Element, Simd, read, write};
use super::{Cpu, SharedMut, chunks};

/// The definition, in f64.
pub mod reference {
    /// Adds each column's sum over the rows of `x` to `out`.
    pub fn column_sums(x: &[f64], out: &mut [f64]) {
        for row in x.chunks(out.len()) {
            for c in 0..row.len() {
                out[c] += row[c];
            }
        }
    }

    /// Σ x².
    pub fn sum_of_squares(x: &[f64]) -> f64 {
        x.iter().map(|x| x * x).sum()
    }

    /// The largest |x|, 0 of none.
    pub fn max_abs(x: &[f64]) -> f64 {
        x.iter().fold(0.0, |m, x| m.max(x.abs()))
    }
}

/// Adds each column's sum over the rows of `x` (T×H) to `out` (H): the gradient of a bias.
pub fn column_sums<E: Element>(cpu: &Cpu, x: &[E], out: &mut [f32]) {
    let h = out.len();
    if h == 0 {
        assert!(x.is_empty(), "column_sums: lengths differ");
        return;
    }
    assert!(x.len().is_multiple_of(h), "column_sums: lengths differ");
    let t = x.len() / h;
    let (count, _) = chunks(t, 16);
    scratch::with(Purpose::Kernel, count * h, |partial: &mut [f32]| {
        let shared = SharedMut::new(partial);
        cpu.for_ranges(t, 16, |i, range| {
            // SAFETY: every range has its own partial sums.
            let partial = unsafe { shared.slice(i * h, h) };
            partial.fill(0.0);
            add_rows(cpu.isa(), &x[range.start * h..range.end * h], partial);
        });
        add_rows(cpu.isa(), partial, out);
    });
}

dispatch! { fn add_rows<E>(x: &[E], out: &mut [f32]) = add_rows_body }

/// Adds all rows to `out`, four at a time, so that `out` is read and written a fourth as often.
///
/// # Safety
/// The instruction set must be there.
#[inline(always)]
unsafe fn add_rows_body<S: Simd, E: Element>(x: &[E], out: &mut [f32]) {
    let h = out.len();
    let fours = x.chunks_exact(4 * h);
    let rest = fours.remainder();
    // SAFETY: c < h, and every row has h columns.
    unsafe {
        for four in fours {
            let (ab, cd) = four.split_at(2 * h);
            let ((a, b), (c, d)) = (ab.split_at(h), cd.split_at(h));
            for i in (0..h).step_by(S::LANES) {
                let ab = S::add(read::<S, E>(a, i), read::<S, E>(b, i));
                let cd = S::add(read::<S, E>(c, i), read::<S, E>(d, i));
                write::<S, f32>(out, i, S::add(read::<S, f32>(out, i), S::add(ab, cd)));
            }
        }
        for row in rest.chunks_exact(h) {
            for i in (0..h).step_by(S::LANES) {
                write::<S, f32>(out, i, S::add(read::<S, f32>(out, i), read::<S, E>(row, i)));
            }
        }
    }
}

/// Elements that are worth a task.
const LEAST: usize = 16384;

/// Elements of a chunk of the flat buffers. Sums over them are taken chunk by chunk and then added in order, so that whoever holds
/// some of the chunks can give their sums: processes that share a model's update divide the buffers at multiples of this.
pub const CHUNK: usize = 16384;

/// Σ x², in f64 over sums of 4096 squares in f32; infinite where a square is too large for f32.
pub fn sum_of_squares(cpu: &Cpu, x: &[f32]) -> f64 {
    scratch::with(Purpose::Kernel, x.len().div_ceil(CHUNK), |sums: &mut [f64]| {
        squares_of_chunks(cpu, x, sums);
        sums.iter().sum()
    })
}

/// The same for each chunk of `x`: their sum, in order, is [`sum_of_squares`].
pub fn squares_of_chunks(cpu: &Cpu, x: &[f32], sums: &mut [f64]) {
    assert_eq!(sums.len(), x.len().div_ceil(CHUNK), "squares_of_chunks: lengths differ");
    let shared = SharedMut::new(sums);
    cpu.for_each(x.len().div_ceil(CHUNK), |i| {
        let sum = squares(cpu.isa(), &x[i * CHUNK..x.len().min((i + 1) * CHUNK)]);
        // SAFETY: every chunk has its own number.
        unsafe { shared.slice(i, 1)[0] = sum };
    });
}

/// The sum of what `part` gives for each of the ranges of `0..n`, added in their order.
pub(crate) fn sum_over_ranges(
    cpu: &Cpu,
    n: usize,
    least: usize,
    part: impl Fn(std::ops::Range<usize>) -> f64 + Sync,
) -> f64 {
    // `chunks` never makes more than 64 ranges.
    let mut sums = [0.0; 64];
    let shared = SharedMut::new(&mut sums);
    cpu.for_ranges(n, least, |i, range| {
        let sum = part(range);
        // SAFETY: every range has its own number.
        unsafe { shared.slice(i, 1)[0] = sum };
    });
    sums.iter().sum()
}

dispatch! { fn squares(x: &[f32]) -> f64 = squares_body }

/// # Safety
/// The instruction set must be there.
#[inline(always)]
unsafe fn squares_body<S: Simd>(x: &[f32]) -> f64 {
    let mut total = 0.0;
    for block in x.chunks(4096) {
        // SAFETY: i + 4 * LANES is at most the block's length in the first loop, and i is below it in the second.
        unsafe {
            // Four sums hide the latency of the addition.
            let mut sums = [S::splat(0.0); 4];
            let step = 4 * S::LANES;
            let whole = block.len() - block.len() % step;
            for i in (0..whole).step_by(step) {
                for k in 0..4 {
                    let v = S::load(block.as_ptr().add(i + k * S::LANES));
                    sums[k] = S::mul_add(v, v, sums[k]);
                }
            }
            for i in (whole..block.len()).step_by(S::LANES) {
                let v = read::<S, f32>(block, i);
                sums[0] = S::mul_add(v, v, sums[0]);
            }
            total += f64::from(S::sum(S::add(S::add(sums[0], sums[1]), S::add(sums[2], sums[3]))));
        }
    }
    total
}

/// Whether no element is infinite or a NaN.
pub fn all_finite(cpu: &Cpu, x: &[f32]) -> bool {
    max_abs(cpu, x).is_finite()
}

/// The largest |x|, 0 of none; NaN where an element is infinite or a NaN.
pub fn max_abs(cpu: &Cpu, x: &[f32]) -> f32 {
    let mut largest = [0.0f32; 64];
    let shared = SharedMut::new(&mut largest);
    cpu.for_ranges(x.len(), LEAST, |i, range| {
        let part = largest_abs(cpu.isa(), &x[range]);
        // SAFETY: every range has its own number; there are at most 64.
        unsafe { shared.slice(i, 1)[0] = part };
    });
    // `f32::max` would drop a NaN.
    largest.into_iter().fold(0.0, |m, x| if m.is_nan() || x <= m { m } else { x })
}

dispatch! { fn largest_abs(x: &[f32]) -> f32 = largest_abs_body }

/// # Safety
/// The instruction set must be there.
#[inline(always)]
unsafe fn largest_abs_body<S: Simd>(x: &[f32]) -> f32 {
    // SAFETY: i < x.len(); the zeros beyond the end change nothing.
    unsafe {
        let zero = S::splat(0.0);
        let (mut largest, mut bad) = (zero, zero);
        for i in (0..x.len()).step_by(S::LANES) {
            let v = read::<S, f32>(x, i);
            largest = S::max(largest, S::abs(v));
            bad = S::mul_add(v, zero, bad);
        }
        S::largest(largest) + S::sum(bad)
    }
}
