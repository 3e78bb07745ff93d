//! The softmax of a block of queries, with bias and dropout, and its backward.

use std::ops::Range;

use super::Window;
use crate::cpu::dropout::{Dropout, RowId};
use crate::cpu::math;
use crate::cpu::simd::{Element, Simd, read, write};

/// A block of queries of one sequence and the keys that they see together. Scores of a block are `queries × keys.len()`.
#[derive(Clone, Debug)]
pub(super) struct Block {
    pub(super) window: Window,
    /// N.
    pub(super) all_queries: usize,
    /// M.
    pub(super) all_keys: usize,
    /// The first query.
    pub(super) first: usize,
    pub(super) queries: usize,
    pub(super) keys: Range<usize>,
}

impl Block {
    /// The columns of a row that its query sees.
    #[inline(always)]
    fn seen(&self, query: usize) -> Range<usize> {
        let keys = self.window.keys(self.first + query, self.all_queries, self.all_keys);
        let column = |key: usize| key.clamp(self.keys.start, self.keys.end) - self.keys.start;
        column(keys.start)..column(keys.end)
    }

    /// The numbers of a head by distance (see [`super::by_distance`]) that belong to the columns of a row.
    #[inline(always)]
    fn distances(&self, query: usize) -> Range<usize> {
        let start = self.all_queries - 1 - (self.first + query) + self.keys.start;
        start..start + self.keys.len()
    }
}

/// Dropout of a head's probabilities in one sequence.
#[derive(Clone, Copy)]
pub(super) struct RowDropout {
    pub(super) dropout: Dropout,
    pub(super) sequence: u32,
}

impl RowDropout {
    /// What is kept of the 128 keys from `key` (a multiple of 128) on.
    #[inline(always)]
    unsafe fn keep_128<S: Simd>(&self, block: &Block, query: usize, key: usize) -> [u32; 4] {
        let row = RowId { sequence: self.sequence, position: (block.first + query) as u32 };
        // SAFETY: the caller has the instruction set.
        unsafe { self.dropout.keep_128::<S>(row, block.all_keys, key) }
    }
}

/// The bits from `at` on, at least 16 of them where there are so many.
#[inline(always)]
fn bits_from(bits: [u32; 4], at: usize) -> u32 {
    let (word, shift) = (at / 32, at % 32);
    let next = if word < 3 { bits[word + 1] } else { 0 };
    ((u64::from(bits[word]) | u64::from(next) << 32) >> shift) as u32
}

dispatch! {
    /// row += the numbers that belong to its distances, for every row of a block.
    fn add_rows(block: &Block, bias: &[f32], scores: &mut [f32]) = add_rows_body
}

/// # Safety
/// The instruction set must be there.
#[inline(always)]
unsafe fn add_rows_body<S: Simd>(block: &Block, bias: &[f32], scores: &mut [f32]) {
    let width = block.keys.len();
    for i in 0..block.queries {
        let (row, bias) = (&mut scores[i * width..(i + 1) * width], &bias[block.distances(i)]);
        for c in (0..width).step_by(S::LANES) {
            // SAFETY: c < width, the length of both.
            unsafe { write::<S, f32>(row, c, S::add(read::<S, f32>(row, c), read::<S, f32>(bias, c))) };
        }
    }
}

/// Softmax of a block's scores, then dropout. `bias` holds a head's numbers by distance.
pub(super) fn softmax<E: Element>(
    isa: crate::cpu::Isa,
    block: &Block,
    bias: Option<&[f32]>,
    drop: Option<RowDropout>,
    scores: &mut [f32],
    weights: &mut [E],
    log_sums: &mut [f32],
) {
    if let Some(bias) = bias {
        add_rows(isa, block, bias, scores);
    }
    softmax_rows(isa, block, drop, scores, weights, log_sums);
}

dispatch! {
    fn softmax_rows<E>(
        block: &Block, drop: Option<RowDropout>, scores: &mut [f32], weights: &mut [E], log_sums: &mut [f32],
    ) = softmax_body
}

/// # Safety
/// The instruction set must be there; scores and weights have `queries × keys` elements.
#[inline(always)]
unsafe fn softmax_body<S: Simd, E: Element>(
    block: &Block,
    drop: Option<RowDropout>,
    scores: &mut [f32],
    weights: &mut [E],
    log_sums: &mut [f32],
) {
    let width = block.keys.len();
    for (i, log_sum) in log_sums.iter_mut().enumerate() {
        let seen = block.seen(i);
        let weights = &mut weights[i * width..(i + 1) * width];
        weights[..seen.start].fill(E::default());
        weights[seen.end..].fill(E::default());
        if seen.is_empty() {
            *log_sum = f32::NEG_INFINITY;
            continue;
        }
        let first_key = block.keys.start + seen.start;
        let row = &mut scores[i * width..(i + 1) * width][seen.clone()];
        let weights = &mut weights[seen];
        let seen = row.len();
        // SAFETY: all accesses go through `read` and `write` at indices below the length of what they access.
        unsafe {
            let whole = seen - seen % S::LANES;
            let mut most = S::splat(f32::NEG_INFINITY);
            for c in (0..whole).step_by(S::LANES) {
                most = S::max(most, read::<S, f32>(row, c));
            }
            let mut most = S::largest(most);
            for c in whole..seen {
                most = most.max(row[c]);
            }
            let mut sum = S::splat(0.0);
            for c in (0..whole).step_by(S::LANES) {
                let e = math::exp::<S>(S::sub(read::<S, f32>(row, c), S::splat(most)));
                sum = S::add(sum, e);
                write::<S, f32>(row, c, e);
            }
            let mut sum = S::sum(sum);
            if whole < seen {
                let e = math::exp::<S>(S::sub(read::<S, f32>(row, whole), S::splat(most)));
                write::<S, f32>(row, whole, e);
                for c in whole..seen {
                    sum += row[c];
                }
            }
            *log_sum = most + sum.ln();
            let factor = 1.0 / sum;
            let Some(drop) = drop else {
                for c in (0..seen).step_by(S::LANES) {
                    write::<S, E>(weights, c, S::mul(read::<S, f32>(row, c), S::splat(factor)));
                }
                continue;
            };
            let factor = S::splat(factor * drop.dropout.scale());
            for key in groups(first_key, seen) {
                let columns = columns(key, first_key, seen);
                let bits = drop.keep_128::<S>(block, i, key);
                let (row, weights) = (&row[..columns.end], &mut weights[..columns.end]);
                for c in columns.step_by(S::LANES) {
                    let p = S::mul(read::<S, f32>(row, c), factor);
                    write::<S, E>(weights, c, S::keep(p, bits_from(bits, first_key + c - key)));
                }
            }
        }
    }
}

/// The multiples of 128 keys from which on one draw of dropout's bits covers a part of a row whose first column is that of
/// `first_key`.
#[inline(always)]
fn groups(first_key: usize, len: usize) -> impl Iterator<Item = usize> {
    (first_key / 128 * 128..first_key + len).step_by(128)
}

/// That part's columns.
#[inline(always)]
fn columns(key: usize, first_key: usize, len: usize) -> Range<usize> {
    key.max(first_key) - first_key..(key + 128 - first_key).min(len)
}

/// From a block's scores and the gradient of the dropped weights: the dropped weights again, and the scores' gradient.
/// `dbias` is added to by distance.
pub(super) fn softmax_backward<E: Element>(
    isa: crate::cpu::Isa,
    block: &Block,
    bias: Option<&[f32]>,
    drop: Option<RowDropout>,
    log_sums: &[f32],
    scores: &mut [f32],
    dweights: &mut [f32],
    weights: &mut [E],
    dscores: &mut [E],
    dbias: Option<&mut [f32]>,
) {
    if let Some(bias) = bias {
        add_rows(isa, block, bias, scores);
    }
    backward_rows(isa, block, drop, log_sums, scores, dweights, weights, dscores, dbias);
}

dispatch! {
    fn backward_rows<E>(
        block: &Block, drop: Option<RowDropout>, log_sums: &[f32], scores: &mut [f32], dweights: &mut [f32],
        weights: &mut [E], dscores: &mut [E], dbias: Option<&mut [f32]>,
    ) = backward_body
}

/// # Safety
/// The instruction set must be there; all but the log-sums and dbias have `queries × keys` elements.
#[inline(always)]
unsafe fn backward_body<S: Simd, E: Element>(
    block: &Block,
    drop: Option<RowDropout>,
    log_sums: &[f32],
    scores: &mut [f32],
    dweights: &mut [f32],
    weights: &mut [E],
    dscores: &mut [E],
    mut dbias: Option<&mut [f32]>,
) {
    let width = block.keys.len();
    for (i, log_sum) in log_sums.iter().enumerate() {
        let (row, seen) = (i * width..(i + 1) * width, block.seen(i));
        let (weights, dscores) = (&mut weights[row.clone()], &mut dscores[row.clone()]);
        for out in [&mut *weights, &mut *dscores] {
            out[..seen.start].fill(E::default());
            out[seen.end..].fill(E::default());
        }
        let first_key = block.keys.start + seen.start;
        let (weights, dscores) = (&mut weights[seen.clone()], &mut dscores[seen.clone()]);
        let (p, dweights) = (&mut scores[row.clone()][seen.clone()], &mut dweights[row][seen.clone()]);
        // SAFETY: all accesses go through `read` and `write` at indices below the length of what they access.
        unsafe {
            let scale = S::splat(drop.map_or(1.0, |drop| drop.dropout.scale()));
            // The weight's gradient becomes the probability's, through dropout. Beyond the end it is 0.
            let mut mean = S::splat(0.0);
            for key in groups(first_key, p.len()) {
                let columns = columns(key, first_key, p.len());
                let bits = match drop {
                    Some(drop) => drop.keep_128::<S>(block, i, key),
                    None => [u32::MAX; 4],
                };
                let (p, dweights) = (&mut p[..columns.end], &mut dweights[..columns.end]);
                let weights = &mut weights[..columns.end];
                for c in columns.step_by(S::LANES) {
                    let bits = bits_from(bits, first_key + c - key);
                    let probability = math::exp::<S>(S::sub(read::<S, f32>(p, c), S::splat(*log_sum)));
                    let dp = S::keep(S::mul(read::<S, f32>(dweights, c), scale), bits);
                    write::<S, f32>(p, c, probability);
                    write::<S, f32>(dweights, c, dp);
                    write::<S, E>(weights, c, S::keep(S::mul(probability, scale), bits));
                    mean = S::mul_add(probability, dp, mean);
                }
            }
            let mean = S::splat(S::sum(mean));
            match &mut dbias {
                None => {
                    for c in (0..p.len()).step_by(S::LANES) {
                        let dp = read::<S, f32>(dweights, c);
                        write::<S, E>(dscores, c, S::mul(read::<S, f32>(p, c), S::sub(dp, mean)));
                    }
                }
                Some(dbias) => {
                    let dbias = &mut dbias[block.distances(i)][seen];
                    for c in (0..p.len()).step_by(S::LANES) {
                        let dp = read::<S, f32>(dweights, c);
                        let dscore = S::mul(read::<S, f32>(p, c), S::sub(dp, mean));
                        write::<S, E>(dscores, c, dscore);
                        write::<S, f32>(dbias, c, S::add(read::<S, f32>(dbias, c), dscore));
                    }
                }
            }
        }
    }
}
