//! A learned mixture of layers that lie side by side: γ·Σ softmax(w)ᵢ·layerᵢ (Peters et al. 2018, equation 1).
//!
//! Legend: T tokens, n layers of W columns each; a row of x is n·W.

use super::scratch::{self, Purpose};
use super::simd::{Element, Simd, read, write};
use super::{Cpu, SharedMut, chunks};

/// The definition, in f64.
pub mod reference {
    /// softmax(w).
    pub fn shares(weights: &[f64]) -> Vec<f64> {
        let sum: f64 = weights.iter().map(|w| w.exp()).sum();
        weights.iter().map(|w| w.exp() / sum).collect()
    }

    /// T×W.
    pub fn forward(x: &[f64], w: usize, weights: &[f64], gamma: f64) -> Vec<f64> {
        let shares = shares(weights);
        let row = |row: &[f64], c: usize| gamma * shares.iter().zip(row.chunks(w)).map(|(s, x)| s * x[c]).sum::<f64>();
        x.chunks(weights.len() * w).flat_map(|x| (0..w).map(|c| row(x, c)).collect::<Vec<_>>()).collect()
    }

    /// The gradients with respect to x, the weights and γ.
    pub fn backward(x: &[f64], w: usize, weights: &[f64], gamma: f64, dy: &[f64]) -> (Vec<f64>, Vec<f64>, f64) {
        let (n, shares) = (weights.len(), shares(weights));
        let mut dots = vec![0.0; n];
        let mut dx = vec![0.0; x.len()];
        for (i, x) in x.iter().enumerate() {
            let (row, layer, c) = (i / (n * w), i / w % n, i % w);
            dots[layer] += x * dy[row * w + c];
            dx[i] = gamma * shares[layer] * dy[row * w + c];
        }
        let dgamma: f64 = shares.iter().zip(&dots).map(|(s, d)| s * d).sum();
        (dx, shares.iter().zip(&dots).map(|(s, d)| gamma * s * (d - dgamma)).collect(), dgamma)
    }
}

/// Layers that can be mixed at most.
const MOST: usize = 256;

/// Numbers that are worth a task.
const LEAST: usize = 16384;

/// T×n·W → T×W.
pub fn forward<E: Element>(cpu: &Cpu, x: &[E], w: usize, weights: &[f32], gamma: f32, out: &mut [E]) {
    let n = check(x, w, weights);
    assert!(out.len() * n == x.len(), "mix: lengths differ");
    let shares = shares(weights);
    cpu.for_rows(out, w, (LEAST / (n * w)).max(1), |rows, out| {
        let x = &x[rows.start * n * w..rows.end * n * w];
        for (x, out) in x.chunks_exact(n * w).zip(out.chunks_exact_mut(w)) {
            mix_row(cpu.isa(), x, &shares[..n], gamma, out);
        }
    });
}

/// Writes the gradient of x (where there is room for it), and adds to those of the weights and γ.
pub fn backward<E: Element>(
    cpu: &Cpu,
    x: &[E],
    w: usize,
    weights: &[f32],
    gamma: f32,
    dy: &[E],
    dx: &mut [E],
    dweights: &mut [f32],
    dgamma: &mut f32,
) {
    let n = check(x, w, weights);
    let wants = !dx.is_empty();
    assert!(dy.len() * n == x.len() && (!wants || dx.len() == x.len()) && dweights.len() == n, "mix: lengths differ");
    let (shares, t, least) = (shares(weights), dy.len() / w, (LEAST / (n * w)).max(1));
    let (count, _) = chunks(t, least);
    let dx = SharedMut::new(dx);
    scratch::with(Purpose::Kernel, count * n, |partial: &mut [f64]| {
        let shared = SharedMut::new(partial);
        cpu.for_ranges(t, least, |i, rows| {
            // SAFETY: every range has its own partial sums.
            let partial = unsafe { shared.slice(i * n, n) };
            partial.fill(0.0);
            for row in rows {
                let dy = &dy[row * w..(row + 1) * w];
                for (layer, dots) in partial.iter_mut().enumerate() {
                    let at = row * n * w + layer * w;
                    *dots += f64::from(dot(cpu.isa(), &x[at..at + w], dy));
                    if wants {
                        // SAFETY: every row is one task's.
                        scaled(cpu.isa(), gamma * shares[layer], dy, unsafe { dx.slice(at, w) });
                    }
                }
            }
        });
        let mut dots = [0.0; MOST];
        partial.chunks_exact(n).for_each(|part| dots.iter_mut().zip(part).for_each(|(sum, x)| *sum += x));
        let along: f64 = shares.iter().zip(&dots[..n]).map(|(share, dot)| f64::from(*share) * dot).sum();
        *dgamma += along as f32;
        for (to, (share, dot)) in dweights.iter_mut().zip(shares.iter().zip(&dots)) {
            *to += (f64::from(gamma) * f64::from(*share) * (dot - along)) as f32;
        }
    });
}

fn check<E>(x: &[E], w: usize, weights: &[f32]) -> usize {
    let n = weights.len();
    assert!(n > 0 && n <= MOST, "mix: {n} layers");
    assert!(w > 0 && x.len().is_multiple_of(n * w), "mix: lengths differ");
    n
}

/// softmax(w), with zeros behind.
fn shares(weights: &[f32]) -> [f32; MOST] {
    let largest = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut shares = [0.0; MOST];
    shares.iter_mut().zip(weights).for_each(|(share, w)| *share = (w - largest).exp());
    let sum: f32 = shares.iter().sum();
    shares.iter_mut().for_each(|share| *share /= sum);
    shares
}

dispatch! { fn mix_row<E>(x: &[E], shares: &[f32], gamma: f32, out: &mut [E]) = mix_body }
dispatch! { fn dot<E>(x: &[E], y: &[E]) -> f32 = dot_body }
dispatch! { fn scaled<E>(factor: f32, x: &[E], y: &mut [E]) = scaled_body }

/// # Safety
/// The instruction set must be there; x has as many rows as there are shares.
#[inline(always)]
unsafe fn mix_body<S: Simd, E: Element>(x: &[E], shares: &[f32], gamma: f32, out: &mut [E]) {
    let w = out.len();
    for c in (0..w).step_by(S::LANES) {
        // SAFETY: c < w, and every layer has w columns.
        unsafe {
            let mut sum = S::splat(0.0);
            for (share, x) in shares.iter().zip(x.chunks_exact(w)) {
                sum = S::mul_add(S::splat(*share), read::<S, E>(x, c), sum);
            }
            write::<S, E>(out, c, S::mul(sum, S::splat(gamma)));
        }
    }
}

/// # Safety
/// The instruction set must be there; both have the same length.
#[inline(always)]
unsafe fn dot_body<S: Simd, E: Element>(x: &[E], y: &[E]) -> f32 {
    // SAFETY: c < x.len() = y.len().
    unsafe {
        let mut sum = S::splat(0.0);
        for c in (0..x.len()).step_by(S::LANES) {
            sum = S::mul_add(read::<S, E>(x, c), read::<S, E>(y, c), sum);
        }
        S::sum(sum)
    }
}

/// # Safety
/// The instruction set must be there; both have the same length.
#[inline(always)]
unsafe fn scaled_body<S: Simd, E: Element>(factor: f32, x: &[E], y: &mut [E]) {
    for c in (0..x.len()).step_by(S::LANES) {
        // SAFETY: c < x.len() = y.len().
        unsafe { write::<S, E>(y, c, S::mul(S::splat(factor), read::<S, E>(x, c))) };
    }
}
