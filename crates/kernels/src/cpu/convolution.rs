//! Convolutions along sequences and the largest value over their positions (Kim et al. 2016): how words are read as characters.
//!
//! Legend: W sequences (words), N rows (their characters) of D columns, F filters of width K. A window of K rows is K·D numbers that
//! lie in x one after the other, so nothing is unfolded: rows of the left operand of a matmul overlap. Windows across two
//! sequences are computed and not looked at. The backward touches one window for each sequence and filter.

use super::activation::Activation;
use super::gemm::{Finish, Matrix, Right, pack_into, packed_units, product};
use super::scratch::{self, Purpose};
use super::simd::{Element, Simd, read, write};
use super::{Cpu, SharedMut};

/// The definition, in f64.
pub mod reference {
    use super::Bank;
    use crate::cpu::activation::Activation;

    /// Of one bank: W×F, and the row at which the window with the largest sum begins (the first of several).
    pub fn forward(
        x: &[f64],
        d: usize,
        offsets: &[u32],
        bank: Bank<'_, f64, f64>,
        activation: Activation,
    ) -> (Vec<f64>, Vec<u32>) {
        let (mut out, mut at) = (Vec::new(), Vec::new());
        for word in offsets.windows(2) {
            for (f, filter) in bank.weight.chunks(bank.width * d).enumerate() {
                let sum = |t: u32| -> f64 {
                    filter.iter().zip(&x[t as usize * d..]).map(|(w, x)| w * x).sum::<f64>() + bank.bias[f]
                };
                let best = (word[0]..word[1] - bank.width as u32 + 1).rev().max_by(|a, b| sum(*a).total_cmp(&sum(*b)));
                let best = best.expect("a sequence is at least as long as a filter is wide");
                out.push(crate::cpu::activation::reference::forward(activation, sum(best)));
                at.push(best);
            }
        }
        (out, at)
    }

    /// The gradients with respect to x (added), the weight and the bias of a bank, where the windows are known.
    pub fn backward(
        x: &[f64],
        d: usize,
        bank: Bank<'_, f64, f64>,
        activation: Activation,
        at: &[u32],
        dy: &[f64],
        dx: &mut [f64],
    ) -> (Vec<f64>, Vec<f64>) {
        let (mut dweight, mut dbias) = (vec![0.0; bank.weight.len()], vec![0.0; bank.bias.len()]);
        let (size, filters) = (bank.width * d, bank.bias.len());
        for (i, (at, dy)) in at.iter().zip(dy).enumerate() {
            let (f, start) = (i % filters, *at as usize * d);
            let filter = &bank.weight[f * size..(f + 1) * size];
            let sum: f64 = filter.iter().zip(&x[start..]).map(|(w, x)| w * x).sum::<f64>() + bank.bias[f];
            let g = dy * crate::cpu::activation::reference::derivative(activation, sum);
            dbias[f] += g;
            for c in 0..size {
                dweight[f * size + c] += g * x[start + c];
                dx[start + c] += g * filter[c];
            }
        }
        (dweight, dbias)
    }
}

/// Filters of one width.
#[derive(Clone, Copy, Debug)]
pub struct Bank<'a, E, B = f32> {
    /// K.
    pub width: usize,
    /// F×K·D: for each filter the numbers of its first row, then those of the second, …
    pub weight: &'a [E],
    /// F.
    pub bias: &'a [B],
}

/// Gradients of a bank, which are added to.
#[derive(Debug)]
pub struct BankGradients<'a> {
    /// F×K·D.
    pub weight: &'a mut [f32],
    /// F.
    pub bias: &'a mut [f32],
}

/// Numbers of a block of products: about what stays in the second-level caches of a few cores.
const BLOCK: usize = 1 << 18;

/// Filters that are compared at a time.
const FILTERS: usize = 64;

/// The banks' outputs side by side: `out` is W×ΣF, and `at` the rows at which the windows begin that gave them.
///
/// Every sequence must be at least as long as the widest filter. The activation is one of a value's own sign or size: none, ReLU
/// or tanh, so that the backward needs its value alone.
pub fn forward<E: Element>(
    cpu: &Cpu,
    (x, d): (&[E], usize),
    offsets: &[u32],
    banks: &[Bank<'_, E>],
    activation: Activation,
    out: &mut [E],
    at: &mut [u32],
) {
    let columns = check(x, d, offsets, banks, activation);
    let words = offsets.len() - 1;
    assert!(out.len() == words * columns && at.len() == out.len(), "convolution: lengths differ");
    let (out, at) = (SharedMut::new(out), SharedMut::new(at));
    let mut first = 0;
    for bank in banks {
        let filters = bank.bias.len();
        let weight = Matrix::new(bank.weight, filters, bank.width * d).transposed();
        scratch::with(Purpose::Outer, packed_units(cpu, weight), |units: &mut [u32]| {
            let packed = pack_into(cpu, weight, units);
            for block in blocks(offsets, filters) {
                let (start, end) = (offsets[block.start] as usize, offsets[block.end] as usize);
                let rows = end - start - bank.width + 1;
                let windows = Matrix::overlapping(&x[start * d..end * d], rows, bank.width * d, d);
                scratch::with(Purpose::Kernel, rows * filters, |sums: &mut [f32]| {
                    product(cpu, windows, Right::Units(packed), sums, filters, Finish::default());
                    let sums = &*sums;
                    cpu.for_ranges(block.len(), 1, |_, words| {
                        for word in words.start + block.start..words.end + block.start {
                            let from = offsets[word] as usize;
                            let windows = offsets[word + 1] as usize - from - bank.width + 1;
                            let sums = &sums[(from - start) * filters..][..windows * filters];
                            // SAFETY: every word is one task's, and every bank has columns of its own.
                            let (out, at) = unsafe {
                                let place = word * columns + first;
                                (out.slice(place, filters), at.slice(place, filters))
                            };
                            largest(cpu.isa(), sums, bank.bias, activation, out, at, from as u32);
                        }
                    });
                });
            }
        });
        first += filters;
    }
}

/// Writes the gradient of x (where there is room for it), and adds to those of the banks; `y` is what the forward gave.
pub fn backward<E: Element>(
    cpu: &Cpu,
    (x, d): (&[E], usize),
    offsets: &[u32],
    banks: &[Bank<'_, E>],
    activation: Activation,
    (y, at): (&[E], &[u32]),
    dy: &[E],
    dx: &mut [E],
    gradients: &mut [BankGradients<'_>],
) {
    let columns = check(x, d, offsets, banks, activation);
    let words = offsets.len() - 1;
    let fits = y.len() == words * columns && at.len() == y.len() && dy.len() == y.len();
    assert!(fits && (dx.is_empty() || dx.len() == x.len()), "convolution: lengths differ");
    assert!(at.iter().all(|row| (*row as usize) * d < x.len().max(1)), "convolution: a window is outside");
    let same = |(bank, to): (&Bank<'_, E>, &BankGradients<'_>)| {
        to.weight.len() == bank.weight.len() && to.bias.len() == bank.bias.len()
    };
    assert!(
        banks.len() == gradients.len() && banks.iter().zip(&*gradients).all(same),
        "convolution: gradients of other sizes"
    );
    scratch::with(Purpose::Kernel, y.len(), |slopes: &mut [f32]| {
        cpu.for_rows(slopes, 1, 4096, |range, slopes| {
            slopes_of(cpu.isa(), activation, &y[range.clone()], &dy[range], slopes);
        });
        let slopes = &*slopes;
        let mut first = 0;
        for (bank, to) in banks.iter().zip(&mut *gradients) {
            let (size, filters) = (bank.width * d, bank.bias.len());
            let bias = SharedMut::new(to.bias);
            let place = |word: usize, f: usize| word * columns + first + f;
            cpu.for_rows(to.weight, size, 1, |range, weight| {
                for (f, weight) in range.zip(weight.chunks_exact_mut(size)) {
                    let mut sum = 0.0;
                    for word in 0..words {
                        let (g, at) = (slopes[place(word, f)], at[place(word, f)] as usize);
                        sum += f64::from(g);
                        if g != 0.0 {
                            add_scaled(cpu.isa(), g, &x[at * d..at * d + size], weight);
                        }
                    }
                    // SAFETY: every filter is one task's.
                    unsafe { bias.slice(f, 1)[0] += sum as f32 };
                }
            });
            first += filters;
        }
        if !dx.is_empty() {
            input_gradient(cpu, d, offsets, banks, (slopes, at), dx);
        }
    });
}

/// The gradient of x, a sequence at a time: sums are f32 whatever the storage.
fn input_gradient<E: Element>(
    cpu: &Cpu,
    d: usize,
    offsets: &[u32],
    banks: &[Bank<'_, E>],
    (slopes, at): (&[f32], &[u32]),
    dx: &mut [E],
) {
    let words = offsets.len() - 1;
    let columns = slopes.len() / words.max(1);
    let dx = SharedMut::new(dx);
    cpu.for_ranges(words, 1, |_, range| {
        for word in range {
            let (start, end) = (offsets[word] as usize, offsets[word + 1] as usize);
            scratch::with(Purpose::Local, (end - start) * d, |sums: &mut [f32]| {
                sums.fill(0.0);
                let mut place = word * columns;
                for bank in banks {
                    let size = bank.width * d;
                    for filter in bank.weight.chunks_exact(size) {
                        let (g, from) = (slopes[place], (at[place] as usize - start) * d);
                        if g != 0.0 {
                            add_scaled(cpu.isa(), g, filter, &mut sums[from..from + size]);
                        }
                        place += 1;
                    }
                }
                // SAFETY: every sequence is one task's.
                let dx = unsafe { dx.slice(start * d, (end - start) * d) };
                dx.iter_mut().zip(&*sums).for_each(|(to, sum)| *to = E::from_f32(*sum));
            });
        }
    });
}

/// ΣF, where all sizes are right.
fn check<E>(x: &[E], d: usize, offsets: &[u32], banks: &[Bank<'_, E>], activation: Activation) -> usize {
    let known = matches!(activation, Activation::None | Activation::Relu | Activation::Tanh);
    assert!(known, "convolution: {activation:?} is not known by its value");
    let ends = offsets.first() == Some(&0) && offsets.last().is_some_and(|end| *end as usize * d == x.len());
    assert!(d > 0 && ends, "convolution: lengths differ");
    let widest = banks.iter().map(|bank| bank.width).max().unwrap_or(0);
    let long = |pair: &[u32]| pair[0] <= pair[1] && (pair[1] - pair[0]) as usize >= widest;
    assert!(offsets.windows(2).all(long), "convolution: a sequence is shorter than {widest}");
    let fits = |bank: &Bank<'_, E>| bank.width > 0 && bank.weight.len() == bank.bias.len() * bank.width * d;
    assert!(banks.iter().all(fits), "convolution: a bank's lengths differ");
    banks.iter().map(|bank| bank.bias.len()).sum()
}

/// Ranges of sequences whose products fill a block; their borders depend on sizes alone.
fn blocks(offsets: &[u32], filters: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
    let (rows, words) = ((BLOCK / filters.max(1)).max(1), offsets.len() - 1);
    let mut start = 0;
    std::iter::from_fn(move || {
        if start == words {
            return None;
        }
        let fits = |end: &usize| (offsets[end + 1] - offsets[start]) as usize <= rows;
        let end = (start + 1..words).find(|end| !fits(end)).unwrap_or(words);
        Some(std::mem::replace(&mut start, end)..end)
    })
}

dispatch! {
    fn largest<E>(
        sums: &[f32], bias: &[f32], activation: Activation, out: &mut [E], at: &mut [u32], from: u32,
    ) = largest_body
}
dispatch! { fn slopes_of<E>(activation: Activation, y: &[E], dy: &[E], slopes: &mut [f32]) = slopes_body }
dispatch! { fn add_scaled<E>(factor: f32, x: &[E], sum: &mut [f32]) = add_scaled_body }

/// # Safety
/// The instruction set must be there; sums are whole rows as long as all others.
#[inline(always)]
unsafe fn largest_body<S: Simd, E: Element>(
    sums: &[f32],
    bias: &[f32],
    activation: Activation,
    out: &mut [E],
    at: &mut [u32],
    from: u32,
) {
    let filters = bias.len();
    for first in (0..filters).step_by(FILTERS) {
        let n = FILTERS.min(filters - first);
        let (mut best, mut rows) = ([f32::NEG_INFINITY; FILTERS], [from; FILTERS]);
        for (t, row) in sums.chunks_exact(filters).enumerate() {
            let row = &row[first..first + n];
            for (c, x) in row.iter().enumerate() {
                // A NaN stays: nothing is larger.
                let larger = *x > best[c] || x.is_nan();
                best[c] = if larger { *x } else { best[c] };
                rows[c] = if larger { from + t as u32 } else { rows[c] };
            }
        }
        at[first..first + n].copy_from_slice(&rows[..n]);
        let (bias, out) = (&bias[first..first + n], &mut out[first..first + n]);
        for c in (0..n).step_by(S::LANES) {
            // SAFETY: c < n, the length of all three.
            unsafe {
                let sum = S::add(read::<S, f32>(&best[..n], c), read::<S, f32>(bias, c));
                write::<S, E>(out, c, activation.apply::<S>(sum));
            }
        }
    }
}

/// # Safety
/// The instruction set must be there; all have the same length.
#[inline(always)]
unsafe fn slopes_body<S: Simd, E: Element>(activation: Activation, y: &[E], dy: &[E], slopes: &mut [f32]) {
    for c in (0..y.len()).step_by(S::LANES) {
        // SAFETY: c is below the three lengths, which are one.
        unsafe {
            let (y, dy) = (read::<S, E>(y, c), read::<S, E>(dy, c));
            let slope = match activation {
                // What ReLU gave has its own slope.
                Activation::Relu => Activation::Relu.derivative::<S>(y),
                Activation::Tanh => S::sub(S::splat(1.0), S::mul(y, y)),
                _ => S::splat(1.0),
            };
            write::<S, f32>(slopes, c, S::mul(dy, slope));
        }
    }
}

/// # Safety
/// The instruction set must be there; both have the same length.
#[inline(always)]
unsafe fn add_scaled_body<S: Simd, E: Element>(factor: f32, x: &[E], sum: &mut [f32]) {
    for c in (0..x.len()).step_by(S::LANES) {
        // SAFETY: c < x.len() = sum.len().
        unsafe {
            let scaled = S::mul_add(S::splat(factor), read::<S, E>(x, c), read::<S, f32>(sum, c));
            write::<S, f32>(sum, c, scaled);
        }
    }
}
