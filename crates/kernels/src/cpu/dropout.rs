//! Dropout without stored masks: whether an element is kept is a pure function of the seed, the step, the site in the
//! model, the number of the sequence in the global batch and the element's place within its sequence. So accumulation,
//! the order of sequences, the number of threads and the device change nothing, and the backward asks again.

use super::simd::{Element, Simd, read, write};
use crate::philox::{DROPOUT_ROUNDS, philox_of};

/// Elements that one call of Philox decides about: 128 bits are eight draws of 16.
pub const GROUP: usize = 8;

/// Which elements to drop, at one site of the model in one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    seed: u64,
    step: u32,
    site: u32,
    /// An element is dropped when its 16-bit draw is below this.
    threshold: u16,
}

/// Where a row of a flat batch belongs: what dropout counts by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct RowId {
    /// The sequence's number in the global batch of the step.
    pub sequence: u32,
    /// The row's place within its sequence.
    pub position: u32,
}

impl Dropout {
    /// Drops with the probability `p`, rounded to a multiple of 2⁻¹⁶; none for p = 0.
    pub fn new(p: f32, seed: u64, step: u32, site: u32) -> Option<Self> {
        assert!((0.0..1.0).contains(&p), "dropout probability {p} is not in [0, 1)");
        let threshold = (p * 65536.0).round().min(65535.0) as u16;
        (threshold > 0).then_some(Self { seed, step, site, threshold })
    }

    /// The same at the site of one head: attention draws for each head separately. Sites stay below 2¹⁶.
    pub fn at_head(self, head: usize) -> Self {
        Self { site: self.site | (head as u32 + 1) << 16, ..self }
    }

    /// What kept elements are multiplied by, so that the mean stays: 1 / (1 − p).
    pub fn scale(&self) -> f32 {
        65536.0 / (65536.0 - f32::from(self.threshold))
    }

    /// Whether column `column` of a row is kept, where rows have `columns` columns.
    pub fn keeps(&self, row: RowId, columns: usize, column: usize) -> bool {
        let group = row.position * groups(columns) + (column / GROUP) as u32;
        let words = philox_of::<DROPOUT_ROUNDS>(self.seed, [group, row.sequence, self.step, self.site]);
        let draw = words[column % GROUP / 2] >> (16 * (column % 2));
        draw as u16 >= self.threshold
    }

    /// Bits of the 128 elements from `column` (a multiple of 128) on, 32 in a word: set where the element is kept.
    #[inline(always)]
    pub(crate) unsafe fn keep_128<S: Simd>(&self, row: RowId, columns: usize, column: usize) -> [u32; 4] {
        let group = row.position * groups(columns) + (column / GROUP) as u32;
        // SAFETY: the caller has the instruction set.
        unsafe { S::draw_at_least(self.seed, [group, row.sequence, self.step, self.site], self.threshold) }
    }
}

/// Applies dropout to a row in place.
#[inline(always)]
pub(crate) unsafe fn drop_row<S: Simd, E: Element>(dropout: &Dropout, row: RowId, x: &mut [E]) {
    let h = x.len();
    // SAFETY: the caller has the instruction set; indices stay below h.
    unsafe {
        let scale = S::splat(dropout.scale());
        for block in (0..h).step_by(128) {
            let bits = dropout.keep_128::<S>(row, h, block);
            for c in (block..h.min(block + 128)).step_by(S::LANES) {
                let v = S::mul(read::<S, E>(x, c), scale);
                write::<S, E>(x, c, S::keep(v, bits[(c - block) / 32] >> ((c - block) % 32)));
            }
        }
    }
}

/// Groups in a row of `columns` columns; a row never shares a group with the next.
fn groups(columns: usize) -> u32 {
    columns.div_ceil(GROUP) as u32
}

#[inline(always)]
unsafe fn row_mask_body<S: Simd>(dropout: &Dropout, row: RowId, out: &mut [bool]) {
    let columns = out.len();
    for (block, out) in out.chunks_mut(128).enumerate() {
        // SAFETY: as for the caller.
        let bits = unsafe { dropout.keep_128::<S>(row, columns, block * 128) };
        for (i, out) in out.iter_mut().enumerate() {
            *out = bits[i / 32] >> (i % 32) & 1 == 1;
        }
    }
}

dispatch! {
    /// The mask of one row, as the vector kernels draw it.
    pub fn row_mask(dropout: &Dropout, row: RowId, out: &mut [bool]) = row_mask_body
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;

    #[test]
    fn vector_masks_equal_the_definition() {
        let dropout = Dropout::new(0.1, 77, 3, 5).unwrap();
        for isa in Isa::available() {
            for columns in [1, 7, 8, 33, 128, 129, 300] {
                for position in [0, 1, 9] {
                    let row = RowId { sequence: 4, position };
                    let mut mask = vec![false; columns];
                    row_mask(isa, &dropout, row, &mut mask);
                    let expected: Vec<bool> = (0..columns).map(|c| dropout.keeps(row, columns, c)).collect();
                    assert_eq!(mask, expected, "{isa}, {columns} columns, position {position}");
                }
            }
        }
    }

    #[test]
    fn drops_as_often_as_it_should_and_differs_by_everything() {
        let n = 1 << 20;
        let mut mask = vec![false; n];
        let row = RowId { sequence: 0, position: 0 };
        for p in [0.1f32, 0.5] {
            row_mask(Isa::best(), &Dropout::new(p, 1, 2, 3).unwrap(), row, &mut mask);
            let dropped = mask.iter().filter(|k| !**k).count() as f32 / n as f32;
            // Five deviations of the binomial distribution.
            assert!((dropped - p).abs() < 5.0 * (p * (1.0 - p) / n as f32).sqrt(), "{dropped} for {p}");
        }
        let draw = |seed, step, site, sequence, position| {
            let mut mask = vec![false; 256];
            let row = RowId { sequence, position };
            row_mask(Isa::best(), &Dropout::new(0.5, seed, step, site).unwrap(), row, &mut mask);
            mask
        };
        let base = draw(1, 1, 1, 1, 1);
        for other in [draw(2, 1, 1, 1, 1), draw(1, 2, 1, 1, 1), draw(1, 1, 2, 1, 1), draw(1, 1, 1, 2, 1)] {
            assert_ne!(base, other);
        }
        assert_ne!(base, draw(1, 1, 1, 1, 2));
        assert!(Dropout::new(0.0, 1, 1, 1).is_none());
    }
}
