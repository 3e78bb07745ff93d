//! Draws from softmax distributions without computing one: the class with the largest logit/temperature + Gumbel noise is
//! distributed as the softmax (Gumbel 1954). The noise is a pure function of counters, as dropout is: the same draw for any number of
//! threads, in any company.
//!
//! Legend: P rows of logits, `columns` apart, of which the first `classes` count.

use super::Cpu;
use super::dropout::RowId;
use super::simd::{Element, Simd};
use crate::philox::{ROUNDS, philox, philox_lanes};

/// The definition, in f64.
pub mod reference {
    use super::{RowId, Sampler};

    /// The Gumbel noise of 32 random bits.
    pub fn gumbel(bits: u32) -> f64 {
        let uniform = (f64::from(bits) + 0.5) / 4_294_967_296.0;
        -(-uniform.ln()).ln()
    }

    /// The class that is drawn for a row of logits, the first of several; not `never`, unless it is the only one.
    pub fn sample(sampler: &Sampler, row: RowId, logits: &[f64], never: Option<u32>) -> usize {
        let score = |c: usize| logits[c] / f64::from(sampler.temperature) + gumbel(sampler.bits(row, logits.len(), c));
        let allowed = (0..logits.len()).filter(|c| never != Some(*c as u32));
        allowed.reduce(|best, c| if score(c) > score(best) { c } else { best }).unwrap_or(0)
    }
}

/// A place in the model, in one step, where classes are drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampler {
    /// The run's seed.
    pub seed: u64,
    /// The number of the update.
    pub step: u32,
    /// Which place.
    pub site: u32,
    /// What logits are divided by; above 0.
    pub temperature: f32,
}

impl Sampler {
    /// The random bits of one class of a row: four classes share a counter.
    pub fn bits(&self, row: RowId, classes: usize, class: usize) -> u32 {
        let group = self.first_group(row, classes).wrapping_add(class as u32 / 4);
        philox(self.seed, [group, row.sequence, self.step, self.site])[class % 4]
    }

    fn first_group(&self, row: RowId, classes: usize) -> u32 {
        row.position.wrapping_mul(classes.div_ceil(4) as u32)
    }
}

/// Draws a class for each row of logits; `rows` (P) tells what its noise is counted by. A logit that is a NaN is never drawn, nor is
/// the class that `never` (P) names for the row, unless it is the only one.
pub fn sample<E: Element>(
    cpu: &Cpu,
    sampler: &Sampler,
    logits: &[E],
    columns: usize,
    classes: usize,
    rows: &[RowId],
    never: Option<&[u32]>,
    out: &mut [u32],
) {
    assert!(0 < classes && classes <= columns && logits.len() == rows.len() * columns, "sample: lengths differ");
    assert!(out.len() == rows.len() && sampler.temperature > 0.0, "sample: one draw per row, at a temperature above 0");
    assert!(never.is_none_or(|never| never.len() == rows.len()), "sample: one class per row that is never drawn");
    cpu.for_rows(out, 1, (4096 / columns).max(1), |range, out| {
        for (i, out) in range.zip(out) {
            let never = never.map_or(u32::MAX, |never| never[i]);
            *out = sample_row(cpu.isa(), sampler, rows[i], never, &logits[i * columns..][..classes]);
        }
    });
}

dispatch! { fn sample_row<E>(sampler: &Sampler, row: RowId, never: u32, logits: &[E]) -> u32 = sample_body }

/// Counters that are drawn from at a time.
const COUNTERS: usize = 16;

/// Two logarithms for each class would cost more than the logits did. Noise is at most (leading zeros + 1)·ln 2 of the bits'
/// distance to the largest number, so few classes can still be the best and need theirs.
///
/// # Safety
/// The instruction set must be there: the loop over counters is left to the compiler's vectors.
#[inline(always)]
unsafe fn sample_body<S: Simd, E: Element>(sampler: &Sampler, row: RowId, never: u32, logits: &[E]) -> u32 {
    let first = sampler.first_group(row, logits.len());
    let temperature = f64::from(sampler.temperature);
    // The bound is computed in f32: what rounding may take away is added.
    let inverse = 1.0 / sampler.temperature;
    let (mut best, mut found) = (f64::NEG_INFINITY, 0);
    let mut least = f32::NEG_INFINITY;
    for (block, logits) in logits.chunks(4 * COUNTERS).enumerate() {
        let group = first.wrapping_add((block * COUNTERS) as u32);
        let counters: [u32; COUNTERS] = std::array::from_fn(|i| group.wrapping_add(i as u32));
        let fixed = [row.sequence, sampler.step, sampler.site].map(|word| [word; COUNTERS]);
        let words = philox_lanes::<COUNTERS, ROUNDS>(sampler.seed, [counters, fixed[0], fixed[1], fixed[2]]);
        for (i, logit) in logits.iter().enumerate() {
            let (logit, bits) = (logit.to_f32(), words[i % 4][i / 4]);
            let bound = logit * inverse + ((u32::MAX - bits).leading_zeros() + 1) as f32 * std::f32::consts::LN_2;
            let class = block * 4 * COUNTERS + i;
            if bound > least && class as u32 != never {
                let score = f64::from(logit) / temperature + reference::gumbel(bits);
                if score > best {
                    (best, found) = (score, class);
                    least = (best - 1e-4 - 1e-5 * best.abs()) as f32;
                }
            }
        }
    }
    found as u32
}
