//! Scaled dot-product attention (Vaswani et al. 2017) over flat tokens: sequences lie one after the other, and
//! `offsets` tells where each begins. There is no padding and no mask for it.
//!
//! Legend: T tokens, A heads, D = head size, H = A·D, S = tokens of one sequence. A row of `qkv` holds query, key and
//! value of a token, 3·H numbers. Scores exist for a block of queries at a time and all keys of their sequence, never
//! S×S for long sequences; the backward computes them again from the kept log-sums.

use super::dropout::{Dropout, RowId};
use super::gemm::{Finish, Matrix, Right, product, product_into};
use super::math;
use super::scratch::{self, Purpose};
use super::simd::{Element, Simd, read, write};
use super::{Cpu, SharedMut};

/// The definition for one sequence and one head, in f64.
pub mod reference {
    /// What [`forward`] gives.
    pub struct Output {
        /// softmax(scale·q·kᵀ), S×S, before dropout.
        pub probabilities: Vec<f64>,
        /// S×D.
        pub out: Vec<f64>,
    }

    /// drop(softmax(scale·q·kᵀ))·v; q, k, v S×D; `mask` holds 0 or dropout's scale for every probability.
    pub fn forward(q: &[f64], k: &[f64], v: &[f64], d: usize, causal: bool, mask: Option<&[f64]>) -> Output {
        let s = q.len() / d;
        let scale = 1.0 / (d as f64).sqrt();
        let mut probabilities = vec![0.0; s * s];
        let mut out = vec![0.0; s * d];
        for i in 0..s {
            let keys = if causal { i + 1 } else { s };
            let row = &mut probabilities[i * s..(i + 1) * s];
            for j in 0..keys {
                row[j] = (scale * (0..d).map(|c| q[i * d + c] * k[j * d + c]).sum::<f64>()).exp();
            }
            let sum: f64 = row.iter().sum();
            for j in 0..keys {
                row[j] /= sum;
                for c in 0..d {
                    out[i * d + c] += row[j] * mask.map_or(1.0, |m| m[i * s + j]) * v[j * d + c];
                }
            }
        }
        Output { probabilities, out }
    }

    /// The gradients of [`forward`] with respect to q, k and v.
    pub fn backward(
        q: &[f64],
        k: &[f64],
        v: &[f64],
        d: usize,
        output: &Output,
        mask: Option<&[f64]>,
        dout: &[f64],
    ) -> [Vec<f64>; 3] {
        let s = q.len() / d;
        let scale = 1.0 / (d as f64).sqrt();
        let [mut dq, mut dk, mut dv] = [vec![0.0; s * d], vec![0.0; s * d], vec![0.0; s * d]];
        for i in 0..s {
            let p = &output.probabilities[i * s..(i + 1) * s];
            let m = |j: usize| mask.map_or(1.0, |m| m[i * s + j]);
            let dp: Vec<f64> =
                (0..s).map(|j| m(j) * (0..d).map(|c| dout[i * d + c] * v[j * d + c]).sum::<f64>()).collect();
            let mean: f64 = (0..s).map(|j| p[j] * dp[j]).sum();
            for j in 0..s {
                let ds = scale * p[j] * (dp[j] - mean);
                for c in 0..d {
                    dq[i * d + c] += ds * k[j * d + c];
                    dk[j * d + c] += ds * q[i * d + c];
                    dv[j * d + c] += p[j] * m(j) * dout[i * d + c];
                }
            }
        }
        [dq, dk, dv]
    }
}

/// The sizes of an attention over a flat batch.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// Where each sequence begins, and the end of the last; at least one token each.
    pub offsets: &'a [u32],
    /// A.
    pub heads: usize,
    /// D.
    pub head_size: usize,
    /// Whether a token sees only itself and what stands before it.
    pub causal: bool,
}

/// Dropout of probabilities, with each sequence's number in the global batch.
pub type AttentionDropout<'a> = Option<(Dropout, &'a [u32])>;

impl Attention<'_> {
    /// T.
    fn tokens(&self) -> usize {
        self.offsets.last().map_or(0, |end| *end as usize)
    }

    /// H.
    fn hidden(&self) -> usize {
        self.heads * self.head_size
    }

    fn check(&self, dropout: AttentionDropout<'_>) {
        assert!(self.offsets.first().is_none_or(|first| *first == 0), "offsets begin with 0");
        assert!(self.offsets.windows(2).all(|w| w[0] < w[1]), "every sequence has at least one token");
        let sequences = self.offsets.len().saturating_sub(1);
        assert!(dropout.is_none_or(|(_, numbers)| numbers.len() == sequences), "one number per sequence");
    }

    /// Runs `task` for every sequence and head.
    fn for_each(&self, cpu: &Cpu, task: impl Fn(Part) + Sync) {
        let sequences = self.offsets.len().saturating_sub(1);
        cpu.for_each(sequences * self.heads, |i| {
            let sequence = i / self.heads;
            let start = self.offsets[sequence] as usize;
            let tokens = self.offsets[sequence + 1] as usize - start;
            task(Part { sequence, head: i % self.heads, start, tokens });
        });
    }

    /// Query (0), key (1) or value (2) of some tokens of a head.
    fn matrix<'a, E>(&self, qkv: &'a [E], part: &Part, which: usize, first: usize, tokens: usize) -> Matrix<'a, E> {
        let stride = 3 * self.hidden();
        let start = (part.start + first) * stride + which * self.hidden() + part.head * self.head_size;
        Matrix::strided(&qkv[start..], tokens, self.head_size, stride)
    }

    fn scale(&self) -> f32 {
        1.0 / (self.head_size as f32).sqrt()
    }
}

/// One head of one sequence.
struct Part {
    sequence: usize,
    head: usize,
    start: usize,
    tokens: usize,
}

impl Part {
    /// Queries that are worked on at a time: their scores should stay in the second-level cache.
    fn block(&self) -> usize {
        (65536 / self.tokens).clamp(32, 256).min(self.tokens)
    }

    fn dropout(&self, dropout: AttentionDropout<'_>, first: usize) -> Option<RowDropout> {
        let (dropout, numbers) = dropout?;
        Some(RowDropout { dropout: dropout.at_head(self.head), sequence: numbers[self.sequence], first: first as u32 })
    }
}

/// Dropout of a block of queries.
#[derive(Clone, Copy)]
struct RowDropout {
    dropout: Dropout,
    sequence: u32,
    first: u32,
}

impl RowDropout {
    #[inline(always)]
    fn row(&self, query: usize) -> RowId {
        RowId { sequence: self.sequence, position: self.first + query as u32 }
    }
}

/// out (T×H) = attention of `qkv` (T×3H); `log_sums` (A×T) gets the logarithm of each softmax's denominator.
pub fn forward<E: Element>(
    cpu: &Cpu,
    qkv: &[E],
    shape: Attention<'_>,
    dropout: AttentionDropout<'_>,
    out: &mut [E],
    log_sums: &mut [f32],
) {
    let (t, h) = (shape.tokens(), shape.hidden());
    assert!(qkv.len() == t * 3 * h && out.len() == t * h && log_sums.len() == shape.heads * t, "attention: lengths");
    shape.check(dropout);
    let (out, log_sums) = (SharedMut::new(out), SharedMut::new(log_sums));
    shape.for_each(cpu, |part| {
        let (s, block) = (part.tokens, part.block());
        let value = shape.matrix(qkv, &part, 2, 0, s);
        // SAFETY: every task has its own sequence and head.
        let log_sums = unsafe { log_sums.slice(part.head * t + part.start, s) };
        scratch::with(Purpose::Kernel, 2 * block * s, |space: &mut [f32]| {
            let (scores, weights) = space.split_at_mut(block * s);
            let weights: &mut [E] = &mut bytemuck::cast_slice_mut(weights)[..block * s];
            for first in (0..s).step_by(block) {
                let n = block.min(s - first);
                block_scores(cpu, qkv, &shape, &part, first, n, scores);
                let drop = part.dropout(dropout, first);
                let (scores, weights) = (&mut scores[..n * s], &mut weights[..n * s]);
                softmax(cpu.isa(), scores, weights, s, first, shape.causal, drop, &mut log_sums[first..first + n]);
                let start = (part.start + first) * h + part.head * shape.head_size;
                // SAFETY: this head's columns of this sequence's rows belong to this task.
                unsafe {
                    let out = out.part(start, (n - 1) * h + shape.head_size);
                    let weights = Matrix::new(weights, n, s);
                    product_into(cpu, weights, Right::Plain(value), out, h, Finish::default());
                }
            }
        });
    });
}

/// The scaled scores of a block of queries.
fn block_scores<E: Element>(
    cpu: &Cpu,
    qkv: &[E],
    shape: &Attention<'_>,
    part: &Part,
    first: usize,
    queries: usize,
    scores: &mut [f32],
) {
    let query = shape.matrix(qkv, part, 0, first, queries);
    let key = shape.matrix(qkv, part, 1, 0, part.tokens).transposed();
    let finish = Finish { scale: shape.scale(), ..Finish::default() };
    product(cpu, query, Right::Plain(key), scores, part.tokens, finish);
}

/// Gradients of [`forward`]: `dqkv` (T×3H) is written.
pub fn backward<E: Element>(
    cpu: &Cpu,
    qkv: &[E],
    shape: Attention<'_>,
    dropout: AttentionDropout<'_>,
    log_sums: &[f32],
    dout: &[E],
    dqkv: &mut [E],
) {
    let (t, h, d) = (shape.tokens(), shape.hidden(), shape.head_size);
    assert!(qkv.len() == t * 3 * h && dout.len() == t * h && dqkv.len() == t * 3 * h, "attention: lengths differ");
    assert!(log_sums.len() == shape.heads * t, "attention: log_sums' length differs");
    shape.check(dropout);
    let dqkv = SharedMut::new(dqkv);
    shape.for_each(cpu, |part| {
        let (s, block) = (part.tokens, part.block());
        let key = shape.matrix(qkv, &part, 1, 0, s);
        let value = shape.matrix(qkv, &part, 2, 0, s).transposed();
        let log_sums = &log_sums[part.head * t + part.start..][..s];
        let place = |which: usize, token: usize| (part.start + token) * 3 * h + which * h + part.head * d;
        scratch::with(Purpose::Kernel, 4 * block * s + 2 * s * d, |space: &mut [f32]| {
            let (scores, rest) = space.split_at_mut(block * s);
            let (dweights, rest) = rest.split_at_mut(block * s);
            let (elements, sums) = rest.split_at_mut(2 * block * s);
            let (weights, dscores) = bytemuck::cast_slice_mut::<f32, E>(elements).split_at_mut(block * s);
            let (dkey, dvalue) = sums.split_at_mut(s * d);
            for first in (0..s).step_by(block) {
                let n = block.min(s - first);
                let query = shape.matrix(qkv, &part, 0, first, n);
                let start = (part.start + first) * h + part.head * d;
                let dout = Matrix::strided(&dout[start..], n, d, h);
                block_scores(cpu, qkv, &shape, &part, first, n, scores);
                product(cpu, dout, Right::Plain(value), dweights, s, Finish::default());
                let (weights, dscores) = (&mut weights[..n * s], &mut dscores[..n * s]);
                let drop = part.dropout(dropout, first);
                let (scores, dweights) = (&mut scores[..n * s], &mut dweights[..n * s]);
                let log_sums = &log_sums[first..first + n];
                softmax_backward(cpu.isa(), scores, dweights, weights, dscores, s, first, shape.causal, drop, log_sums);
                let scale = shape.scale();
                let (weights, dscores) = (Matrix::new(weights, n, s), Matrix::new(dscores, n, s));
                let finish = Finish { scale, ..Finish::default() };
                // SAFETY: this head's columns of this sequence's rows belong to this task.
                unsafe {
                    let dquery = dqkv.part(place(0, first), (n - 1) * 3 * h + d);
                    product_into(cpu, dscores, Right::Plain(key), dquery, 3 * h, finish);
                }
                let sum = Finish { scale, accumulate: first > 0, ..Finish::default() };
                product(cpu, dscores.transposed(), Right::Plain(query), dkey, d, sum);
                let sum = Finish { accumulate: first > 0, ..Finish::default() };
                product(cpu, weights.transposed(), Right::Plain(dout), dvalue, d, sum);
            }
            for (which, sums) in [(1, dkey), (2, dvalue)] {
                for (token, sums) in sums.chunks_exact(d).enumerate() {
                    // SAFETY: as above.
                    let out = unsafe { dqkv.slice(place(which, token), d) };
                    for c in 0..d {
                        out[c] = E::from_f32(sums[c]);
                    }
                }
            }
        });
    });
}

/// The probabilities of every sequence, one after the other: A×S×S each, before dropout. For people to look at.
pub fn probabilities<E: Element>(cpu: &Cpu, qkv: &[E], shape: Attention<'_>, out: &mut [f32]) {
    let (t, h) = (shape.tokens(), shape.hidden());
    assert!(qkv.len() == t * 3 * h && out.len() == shape.probabilities(), "attention: lengths differ");
    shape.check(None);
    let out = SharedMut::new(out);
    shape.for_each(cpu, |part| {
        let s = part.tokens;
        let before: usize = shape.offsets[..=part.sequence].windows(2).map(|w| ((w[1] - w[0]) as usize).pow(2)).sum();
        // SAFETY: every task has its own sequence and head.
        let out = unsafe { out.slice(before * shape.heads + part.head * s * s, s * s) };
        for first in (0..s).step_by(part.block()) {
            let n = part.block().min(s - first);
            scratch::with(Purpose::Kernel, n * s + n, |space: &mut [f32]| {
                let (scores, log_sums) = space.split_at_mut(n * s);
                block_scores(cpu, qkv, &shape, &part, first, n, scores);
                let out = &mut out[first * s..(first + n) * s];
                softmax(cpu.isa(), scores, out, s, first, shape.causal, None, log_sums);
            });
        }
    });
}

impl Attention<'_> {
    /// How many numbers [`probabilities`] gives.
    pub fn probabilities(&self) -> usize {
        self.heads * self.offsets.windows(2).map(|w| ((w[1] - w[0]) as usize).pow(2)).sum::<usize>()
    }
}

dispatch! {
    /// Softmax of rows of `keys` scores, then dropout; `first` is the number of the first query.
    fn softmax<E>(
        scores: &mut [f32], weights: &mut [E], keys: usize, first: usize, causal: bool, drop: Option<RowDropout>,
        log_sums: &mut [f32],
    ) = softmax_body
}

/// # Safety
/// The instruction set must be there; lengths are those of `forward`.
#[inline(always)]
unsafe fn softmax_body<S: Simd, E: Element>(
    scores: &mut [f32],
    weights: &mut [E],
    keys: usize,
    first: usize,
    causal: bool,
    drop: Option<RowDropout>,
    log_sums: &mut [f32],
) {
    for (i, log_sum) in log_sums.iter_mut().enumerate() {
        let row = &mut scores[i * keys..(i + 1) * keys];
        let weights = &mut weights[i * keys..(i + 1) * keys];
        let seen = if causal { first + i + 1 } else { keys };
        let (row, weights) = (&mut row[..seen], {
            weights[seen..].fill(E::default());
            &mut weights[..seen]
        });
        // SAFETY: all accesses go through `read` and `write` at indices below `seen`.
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
            let mut factor = 1.0 / sum;
            if let Some(drop) = drop {
                factor *= drop.dropout.scale();
                for block in (0..seen).step_by(128) {
                    let bits = drop.dropout.keep_128::<S>(drop.row(i), keys, block);
                    for c in (block..seen.min(block + 128)).step_by(S::LANES) {
                        let p = S::mul(read::<S, f32>(row, c), S::splat(factor));
                        write::<S, E>(weights, c, S::keep(p, bits[(c - block) / 32] >> ((c - block) % 32)));
                    }
                }
            } else {
                for c in (0..seen).step_by(S::LANES) {
                    write::<S, E>(weights, c, S::mul(read::<S, f32>(row, c), S::splat(factor)));
                }
            }
        }
    }
}

dispatch! {
    /// From scores and the gradient of the dropped weights: the dropped weights again, and the scores' gradient.
    fn softmax_backward<E>(
        scores: &mut [f32], dweights: &mut [f32], weights: &mut [E], dscores: &mut [E], keys: usize, first: usize,
        causal: bool, drop: Option<RowDropout>, log_sums: &[f32],
    ) = softmax_backward_body
}

/// # Safety
/// The instruction set must be there; lengths are those of `backward`.
#[inline(always)]
unsafe fn softmax_backward_body<S: Simd, E: Element>(
    scores: &mut [f32],
    dweights: &mut [f32],
    weights: &mut [E],
    dscores: &mut [E],
    keys: usize,
    first: usize,
    causal: bool,
    drop: Option<RowDropout>,
    log_sums: &[f32],
) {
    for (i, log_sum) in log_sums.iter().enumerate() {
        let row = i * keys..(i + 1) * keys;
        let seen = if causal { first + i + 1 } else { keys };
        let (weights, dscores) = (&mut weights[row.clone()], &mut dscores[row.clone()]);
        weights[seen..].fill(E::default());
        dscores[seen..].fill(E::default());
        let (weights, dscores) = (&mut weights[..seen], &mut dscores[..seen]);
        let (p, dweights) = (&mut scores[row.clone()][..seen], &mut dweights[row][..seen]);
        // SAFETY: all accesses go through `read` and `write` at indices below `seen`.
        unsafe {
            let scale = S::splat(drop.map_or(1.0, |drop| drop.dropout.scale()));
            // The weight's gradient becomes the probability's, through dropout. Beyond the end it is 0.
            let mut mean = S::splat(0.0);
            for block in (0..seen).step_by(128) {
                let bits = drop.map_or([u32::MAX; 4], |drop| drop.dropout.keep_128::<S>(drop.row(i), keys, block));
                for c in (block..seen.min(block + 128)).step_by(S::LANES) {
                    let bits = bits[(c - block) / 32] >> ((c - block) % 32);
                    let probability = math::exp::<S>(S::sub(read::<S, f32>(p, c), S::splat(*log_sum)));
                    let dp = S::keep(S::mul(read::<S, f32>(dweights, c), scale), bits);
                    write::<S, f32>(p, c, probability);
                    write::<S, f32>(dweights, c, dp);
                    write::<S, E>(weights, c, S::keep(S::mul(probability, scale), bits));
                    mean = S::mul_add(probability, dp, mean);
                }
            }
            let mean = S::splat(S::sum(mean));
            for c in (0..seen).step_by(S::LANES) {
                let dp = read::<S, f32>(dweights, c);
                write::<S, E>(dscores, c, S::mul(read::<S, f32>(p, c), S::sub(dp, mean)));
            }
        }
    }
}
