//! The loss of span answers: for each sequence, two softmaxes over its own tokens, one for where the answer starts and
//! one for where it ends. Rows are few and narrow, so this is plain code.
//!
//! Legend: T tokens, B sequences. Column 0 of the logits (T×2) is the start's, column 1 the end's.

use super::simd::Element;
use super::{Cpu, SharedMut};

/// The definition, in f64.
pub mod reference {
    /// Σ weight·(−ln of the target's softmax over the sequence's tokens) for starts and ends, and its gradient.
    pub fn loss(
        logits: &[f64],
        offsets: &[u32],
        targets: &[[u32; 2]],
        weights: &[[f64; 2]],
        scale: f64,
    ) -> (f64, Vec<f64>) {
        let (mut loss, mut gradient) = (0.0, vec![0.0; logits.len()]);
        for b in 0..targets.len() {
            let tokens = offsets[b] as usize..offsets[b + 1] as usize;
            for which in 0..2 {
                let sum: f64 = tokens.clone().map(|t| logits[2 * t + which].exp()).sum();
                let target = tokens.start + targets[b][which] as usize;
                let w = scale * weights[b][which];
                loss += w * (sum.ln() - logits[2 * target + which]);
                for t in tokens.clone() {
                    let p = logits[2 * t + which].exp() / sum;
                    gradient[2 * t + which] = w * (p - f64::from(u8::from(t == target)));
                }
            }
        }
        (loss, gradient)
    }
}

/// scale·Σ weight·(−ln probability of the target) over all starts and ends; targets count from the sequence's first
/// token. With `want_gradient` the logits are replaced by their gradient.
pub fn cross_entropy<E: Element>(
    cpu: &Cpu,
    logits: &mut [E],
    offsets: &[u32],
    targets: &[[u32; 2]],
    weights: &[[f32; 2]],
    scale: f32,
    want_gradient: bool,
) -> f32 {
    let sequences = offsets.len().saturating_sub(1);
    assert!(targets.len() == sequences && weights.len() == sequences, "span: one target and weight per sequence");
    assert!(logits.len() == 2 * offsets.last().map_or(0, |end| *end as usize), "span: two logits per token");
    let fits = |b: usize| targets[b].iter().all(|target| *target < offsets[b + 1] - offsets[b]);
    assert!((0..sequences).all(fits), "span: a target is outside of its sequence");
    let mut losses = vec![0.0f64; sequences];
    let (logits, shared) = (SharedMut::new(logits), SharedMut::new(&mut losses));
    cpu.for_each(sequences, |b| {
        let (start, end) = (offsets[b] as usize, offsets[b + 1] as usize);
        // SAFETY: every task has its own sequence.
        let (logits, loss) = unsafe { (logits.slice(2 * start, 2 * (end - start)), &mut shared.slice(b, 1)[0]) };
        for which in 0..2 {
            let column = |t: usize| logits[2 * t + which].to_f32();
            let tokens = end - start;
            let most = (0..tokens).map(column).fold(f32::NEG_INFINITY, f32::max);
            let sum: f32 = (0..tokens).map(|t| (column(t) - most).exp()).sum();
            let (target, weight) = (targets[b][which] as usize, weights[b][which] * scale);
            if weight != 0.0 {
                *loss += f64::from(weight) * f64::from(most + sum.ln() - column(target));
            }
            if want_gradient {
                for t in 0..tokens {
                    let p = (logits[2 * t + which].to_f32() - most).exp() / sum;
                    let hit = if t == target { 1.0 } else { 0.0 };
                    logits[2 * t + which] = E::from_f32(if weight == 0.0 { 0.0 } else { weight * (p - hit) });
                }
            }
        }
    });
    losses.iter().sum::<f64>() as f32
}
