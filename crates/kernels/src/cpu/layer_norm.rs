//! LayerNorm (Ba, Kiros and Hinton 2016) and RMSNorm (Zhang and Sennrich 2019) with what models put around them:
//! y = drop(norm(residual + drop(x))). In a post-norm block (BERT) y alone is used further on; in a pre-norm block the sum is
//! the stream of residuals, and y goes into the next layer.
//!
//! Legend: T rows, H columns. The statistics are f32 and kept for the backward.

use super::dropout::{Dropout, RowId, drop_row};
use super::scratch::{self, Purpose};
use super::simd::{Element, Simd, read, write};
use super::{Cpu, SharedMut, chunks};

/// The definition, in f64.
pub mod reference {
    use super::Norm;

    /// Multiplies by the dropout's mask and scale; `mask` holds 0 or the scale for every element.
    fn drop(x: &[f64], mask: Option<&[f64]>) -> Vec<f64> {
        x.iter().enumerate().map(|(i, x)| x * mask.map_or(1.0, |m| m[i])).collect()
    }

    /// What [`forward`] gives: the sum that was normalised, the output, and (mean, 1/deviation) of each row.
    pub struct Output {
        /// residual + drop(x), T×H.
        pub sum: Vec<f64>,
        /// T×H.
        pub y: Vec<f64>,
        /// T×2.
        pub statistics: Vec<[f64; 2]>,
    }

    /// y = drop_after(γ·(s − mean)/√(variance + ε) + β), s = residual + drop_before(x); the mean is 0 where the norm is not
    /// centred.
    pub fn forward(
        x: &[f64],
        residual: Option<&[f64]>,
        norm: &Norm<'_, f64>,
        before: Option<&[f64]>,
        after: Option<&[f64]>,
    ) -> Output {
        let h = norm.gamma.len();
        let mut sum = drop(x, before);
        for i in 0..sum.len() {
            sum[i] += residual.map_or(0.0, |r| r[i]);
        }
        let mut y = vec![0.0; x.len()];
        let mut statistics = Vec::new();
        for (row, y) in sum.chunks(h).zip(y.chunks_mut(h)) {
            let mean = if norm.centred { row.iter().sum::<f64>() / h as f64 } else { 0.0 };
            let variance = row.iter().map(|s| (s - mean) * (s - mean)).sum::<f64>() / h as f64;
            let inverse = 1.0 / (variance + norm.epsilon).sqrt();
            for c in 0..h {
                y[c] = (row[c] - mean) * inverse * norm.gamma[c] + norm.beta.map_or(0.0, |beta| beta[c]);
            }
            statistics.push([mean, inverse]);
        }
        Output { sum, y: drop(&y, after), statistics }
    }

    /// The gradients of [`forward`]: of x, of the residual, of γ and of β. `dstream` is the gradient that the sum has from
    /// elsewhere.
    pub fn backward(
        dy: &[f64],
        dstream: Option<&[f64]>,
        output: &Output,
        norm: &Norm<'_, f64>,
        before: Option<&[f64]>,
        after: Option<&[f64]>,
    ) -> [Vec<f64>; 4] {
        let (h, gamma) = (norm.gamma.len(), norm.gamma);
        let dy = drop(dy, after);
        let (mut dsum, mut dgamma, mut dbeta) = (vec![0.0; dy.len()], vec![0.0; h], vec![0.0; h]);
        for (t, [mean, inverse]) in output.statistics.iter().enumerate() {
            let normal = |c: usize| (output.sum[t * h + c] - mean) * inverse;
            let (mut a, mut b) = (0.0, 0.0);
            for c in 0..h {
                let g = dy[t * h + c] * gamma[c];
                a += if norm.centred { g / h as f64 } else { 0.0 };
                b += g * normal(c) / h as f64;
                dgamma[c] += dy[t * h + c] * normal(c);
                dbeta[c] += dy[t * h + c];
            }
            for c in 0..h {
                let more = dstream.map_or(0.0, |d| d[t * h + c]);
                dsum[t * h + c] = inverse * (dy[t * h + c] * gamma[c] - a - normal(c) * b) + more;
            }
        }
        [drop(&dsum, before), dsum, dgamma, dbeta]
    }
}

/// A normalisation of rows.
#[derive(Clone, Copy, Debug)]
pub struct Norm<'a, F = f32> {
    /// H.
    pub gamma: &'a [F],
    /// H; none where there is no shift.
    pub beta: Option<&'a [F]>,
    /// Added to the variance, or to the mean square.
    pub epsilon: F,
    /// Whether the mean is subtracted: LayerNorm; else it is RMSNorm.
    pub centred: bool,
}

/// Where dropout is applied around the normalisation, and how its rows are counted.
#[derive(Clone, Copy, Default)]
pub struct Drops<'a> {
    /// On x, before the residual is added.
    pub before: Option<Dropout>,
    /// On the output.
    pub after: Option<Dropout>,
    /// T entries; unused where both are off.
    pub rows: &'a [RowId],
}

impl Drops<'_> {
    fn check(&self, rows: usize) {
        assert!(self.before.is_none() && self.after.is_none() || self.rows.len() == rows, "one RowId per row");
    }
}

/// Normalises rows: `x` (T×H) becomes residual + drop(x), `y` gets the output, `statistics` (mean, 1/deviation) a row.
pub fn forward<E: Element>(
    cpu: &Cpu,
    x: &mut [E],
    residual: Option<&[E]>,
    norm: &Norm<'_>,
    drops: Drops<'_>,
    y: &mut [E],
    statistics: &mut [[f32; 2]],
) {
    let (t, h) = (statistics.len(), norm.gamma.len());
    assert!(x.len() == t * h && y.len() == t * h, "layer_norm: lengths differ");
    assert!(norm.beta.is_none_or(|beta| beta.len() == h), "layer_norm: beta's length differs");
    assert!(residual.is_none_or(|r| r.len() == t * h), "layer_norm: residual's length differs");
    drops.check(t);
    let (x, y, statistics) = (SharedMut::new(x), SharedMut::new(y), SharedMut::new(statistics));
    cpu.for_ranges(t, 8, |_, range| {
        let (start, len) = (range.start * h, range.len() * h);
        // SAFETY: ranges are disjoint.
        let (x, y, statistics) =
            unsafe { (x.slice(start, len), y.slice(start, len), statistics.slice(range.start, range.len())) };
        let residual = residual.map(|r| &r[start..start + len]);
        let drops = Drops { rows: drops.rows.get(range).unwrap_or(&[]), ..drops };
        forward_rows(cpu.isa(), x, residual, norm, drops, y, statistics);
    });
}

dispatch! {
    fn forward_rows<E>(
        x: &mut [E], residual: Option<&[E]>, norm: &Norm<'_>, drops: Drops<'_>, y: &mut [E],
        statistics: &mut [[f32; 2]],
    ) = forward_body
}

/// # Safety
/// The instruction set must be there; the lengths are checked by `forward`.
#[inline(always)]
#[allow(clippy::undocumented_unsafe_blocks, reason = "one invariant for all: indices stay below h, see the loops")]
unsafe fn forward_body<S: Simd, E: Element>(
    x: &mut [E],
    residual: Option<&[E]>,
    norm: &Norm<'_>,
    drops: Drops<'_>,
    y: &mut [E],
    statistics: &mut [[f32; 2]],
) {
    let (h, gamma) = (norm.gamma.len(), norm.gamma);
    for t in 0..statistics.len() {
        let x = &mut x[t * h..(t + 1) * h];
        let y = &mut y[t * h..(t + 1) * h];
        let residual = residual.map(|r| &r[t * h..(t + 1) * h]);
        unsafe {
            let mut total = S::splat(0.0);
            if let Some(dropout) = drops.before {
                let scale = S::splat(dropout.scale());
                for block in (0..h).step_by(128) {
                    let bits = dropout.keep_128::<S>(drops.rows[t], h, block);
                    for c in (block..h.min(block + 128)).step_by(S::LANES) {
                        let v = S::mul(read::<S, E>(x, c), scale);
                        let mut v = S::keep(v, bits[(c - block) / 32] >> ((c - block) % 32));
                        if let Some(residual) = residual {
                            v = S::add(v, read::<S, E>(residual, c));
                        }
                        write::<S, E>(x, c, v);
                        total = S::add(total, read::<S, E>(x, c));
                    }
                }
            } else {
                for c in (0..h).step_by(S::LANES) {
                    if let Some(residual) = residual {
                        let v = S::add(read::<S, E>(x, c), read::<S, E>(residual, c));
                        write::<S, E>(x, c, v);
                    }
                    // Read back as stored: in bf16 the statistics are those of the rounded sum that the backward sees.
                    total = S::add(total, read::<S, E>(x, c));
                }
            }
            let mean = if norm.centred { S::sum(total) / h as f32 } else { 0.0 };
            let mut squares = S::splat(0.0);
            let whole = h - h % S::LANES;
            for c in (0..whole).step_by(S::LANES) {
                let d = S::sub(read::<S, E>(x, c), S::splat(mean));
                squares = S::mul_add(d, d, squares);
            }
            let mut variance = S::sum(squares);
            for c in whole..h {
                variance += (x[c].to_f32() - mean) * (x[c].to_f32() - mean);
            }
            let inverse = 1.0 / (variance / h as f32 + norm.epsilon).sqrt();
            statistics[t] = [mean, inverse];
            let (mean, inverse) = (S::splat(mean), S::splat(inverse));
            match norm.beta {
                Some(beta) => {
                    for c in (0..h).step_by(S::LANES) {
                        let normal = S::mul(S::sub(read::<S, E>(x, c), mean), inverse);
                        write::<S, E>(y, c, S::mul_add(normal, read::<S, f32>(gamma, c), read::<S, f32>(beta, c)));
                    }
                }
                None => {
                    for c in (0..h).step_by(S::LANES) {
                        let normal = S::mul(S::sub(read::<S, E>(x, c), mean), inverse);
                        write::<S, E>(y, c, S::mul(normal, read::<S, f32>(gamma, c)));
                    }
                }
            }
            if let Some(dropout) = drops.after {
                drop_row::<S, E>(&dropout, drops.rows[t], y);
            }
        }
    }
}

/// The gradient of [`forward`]: `dsum` (T×H) gets the residual's gradient, `dx`, where dropout stood before, that of x
/// (without it they are the same). `dstream` is the gradient that the sum has from elsewhere, in a pre-norm block. `dgamma` and
/// `dbeta` (where there is a β) are added to.
pub fn backward<E: Element>(
    cpu: &Cpu,
    dy: &[E],
    dstream: Option<&[E]>,
    sum: &[E],
    statistics: &[[f32; 2]],
    norm: &Norm<'_>,
    drops: Drops<'_>,
    dsum: &mut [E],
    dx: Option<&mut [E]>,
    dgamma: &mut [f32],
    mut dbeta: Option<&mut [f32]>,
) {
    let (t, h) = (statistics.len(), norm.gamma.len());
    assert!(dy.len() == t * h && sum.len() == t * h && dsum.len() == t * h, "layer_norm: lengths differ");
    assert!(dstream.is_none_or(|d| d.len() == t * h), "layer_norm: the stream's length differs");
    assert!(dbeta.is_some() == norm.beta.is_some(), "layer_norm: dbeta is wanted just where there is a beta");
    assert!(dbeta.as_ref().is_none_or(|d| d.len() == h) && dgamma.len() == h, "layer_norm: parameters' lengths differ");
    assert!(dx.is_some() == drops.before.is_some(), "layer_norm: dx is wanted just where dropout stands before");
    assert!(dx.as_ref().is_none_or(|dx| dx.len() == t * h), "layer_norm: dx's length differs");
    drops.check(t);
    let (count, _) = chunks(t, 8);
    scratch::with(Purpose::Kernel, count * 2 * h, |partial: &mut [f32]| {
        let shared = SharedMut::new(partial);
        let dsum = SharedMut::new(dsum);
        let dx = dx.map(SharedMut::new);
        cpu.for_ranges(t, 8, |i, range| {
            let (start, len) = (range.start * h, range.len() * h);
            // SAFETY: ranges are disjoint, and so are the partial sums of different ranges.
            let (dsum, dx, partial) = unsafe {
                (dsum.slice(start, len), dx.as_ref().map(|dx| dx.slice(start, len)), shared.slice(i * 2 * h, 2 * h))
            };
            let rows = Drops { rows: drops.rows.get(range.clone()).unwrap_or(&[]), ..drops };
            let (dy, sum) = (&dy[start..start + len], &sum[start..start + len]);
            let dstream = dstream.map(|d| &d[start..start + len]);
            backward_rows(cpu.isa(), dy, dstream, sum, &statistics[range], norm, rows, dsum, dx, partial);
        });
        for part in partial.chunks(2 * h) {
            for c in 0..h {
                dgamma[c] += part[c];
            }
            for (dbeta, part) in dbeta.iter_mut().flat_map(|d| d.iter_mut()).zip(&part[h..]) {
                *dbeta += part;
            }
        }
    });
}

dispatch! {
    fn backward_rows<E>(
        dy: &[E], dstream: Option<&[E]>, sum: &[E], statistics: &[[f32; 2]], norm: &Norm<'_>, drops: Drops<'_>,
        dsum: &mut [E], dx: Option<&mut [E]>, partial: &mut [f32],
    ) = backward_body
}

/// # Safety
/// The instruction set must be there; the lengths are checked by `backward`.
#[inline(always)]
#[allow(clippy::undocumented_unsafe_blocks, reason = "one invariant for all: indices stay below h, see the loops")]
unsafe fn backward_body<S: Simd, E: Element>(
    dy: &[E],
    dstream: Option<&[E]>,
    sum: &[E],
    statistics: &[[f32; 2]],
    norm: &Norm<'_>,
    drops: Drops<'_>,
    dsum: &mut [E],
    mut dx: Option<&mut [E]>,
    partial: &mut [f32],
) {
    let (h, gamma) = (norm.gamma.len(), norm.gamma);
    partial.fill(0.0);
    let (dgamma, dbeta) = partial.split_at_mut(h);
    for (t, [mean, inverse]) in statistics.iter().enumerate() {
        let row = t * h..(t + 1) * h;
        let (sum, dsum) = (&sum[row.clone()], &mut dsum[row.clone()]);
        unsafe {
            let mut dy = &dy[row.clone()];
            if let Some(dropout) = drops.after {
                // The output's row of `dsum` serves as the place for the masked dy until it is overwritten below.
                dsum.copy_from_slice(dy);
                drop_row::<S, E>(&dropout, drops.rows[t], dsum);
                dy = std::slice::from_raw_parts(dsum.as_ptr(), h);
            }
            let (mean, inverse) = (S::splat(*mean), S::splat(*inverse));
            let (mut a, mut b) = (S::splat(0.0), S::splat(0.0));
            for c in (0..h).step_by(S::LANES) {
                let d = read::<S, E>(dy, c);
                // Beyond the row's end d is 0, and so is all that is added here.
                let normal = S::mul(S::sub(read::<S, E>(sum, c), mean), inverse);
                let g = S::mul(d, read::<S, f32>(gamma, c));
                a = S::add(a, g);
                b = S::mul_add(g, normal, b);
                write::<S, f32>(dgamma, c, S::mul_add(d, normal, read::<S, f32>(dgamma, c)));
                write::<S, f32>(dbeta, c, S::add(d, read::<S, f32>(dbeta, c)));
            }
            let a = if norm.centred { S::sum(a) / h as f32 } else { 0.0 };
            let (a, b) = (S::splat(a), S::splat(S::sum(b) / h as f32));
            let dstream = dstream.map(|d| &d[row.clone()]);
            for c in (0..h).step_by(S::LANES) {
                let normal = S::mul(S::sub(read::<S, E>(sum, c), mean), inverse);
                let g = S::mul(read::<S, E>(dy, c), read::<S, f32>(gamma, c));
                let mut v = S::mul(inverse, S::sub(S::sub(g, a), S::mul(normal, b)));
                if let Some(dstream) = dstream {
                    v = S::add(v, read::<S, E>(dstream, c));
                }
                write::<S, E>(dsum, c, v);
            }
            if let (Some(dropout), Some(dx)) = (drops.before, dx.as_deref_mut()) {
                let dx = &mut dx[row];
                dx.copy_from_slice(dsum);
                drop_row::<S, E>(&dropout, drops.rows[t], dx);
            }
        }
    }
}
