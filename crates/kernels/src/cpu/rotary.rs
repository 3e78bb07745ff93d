//! Rotary positions (Su et al. 2021): pairs of columns of a query or key are rotated by an angle that grows with the
//! token's position, so that a score depends on how far apart two tokens stand.
//!
//! Legend: T tokens, D = head size, R ≤ D rotated columns of a head, which come first; the others stay as they are.

use std::ops::Range;

use super::Cpu;
use super::simd::{Element, Simd, read, write};

/// The definition, in f64.
pub mod reference {
    use super::{Pairing, Rotary};

    /// Rotates heads of `d` columns (T×A·D) at `positions`; by the opposite angle for the gradient.
    pub fn rotate(rotary: &Rotary, x: &[f64], d: usize, positions: &[u32], opposite: bool) -> Vec<f64> {
        let (half, columns) = (rotary.size / 2, x.len() / positions.len());
        let mut y = x.to_vec();
        for (t, position) in positions.iter().enumerate() {
            for head in (0..columns).step_by(d) {
                for i in 0..half {
                    let turn = f64::from(*position) / f64::from(rotary.theta).powf(i as f64 / half as f64);
                    let (sin, cos) = if opposite { (-turn).sin_cos() } else { turn.sin_cos() };
                    let (a, b) = match rotary.pairing {
                        Pairing::Halves => (i, half + i),
                        Pairing::Neighbours => (2 * i, 2 * i + 1),
                    };
                    let (a, b) = (t * columns + head + a, t * columns + head + b);
                    y[a] = x[a] * cos - x[b] * sin;
                    y[b] = x[b] * cos + x[a] * sin;
                }
            }
        }
        y
    }
}

/// Which columns of a head are rotated together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairing {
    /// i and i + R/2: ModernBERT, Llama, GPT-NeoX.
    Halves,
    /// 2i and 2i + 1: the paper, GPT-J.
    Neighbours,
}

/// How positions are turned into angles.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rotary {
    /// Pair i turns by position · theta^(−2i/R).
    pub theta: f32,
    /// R: even.
    pub size: usize,
    /// Its pairs.
    pub pairing: Pairing,
}

impl Rotary {
    /// For every position below `positions`, R/2 cosines and then R/2 sines.
    ///
    /// Frequencies and angles are rounded to f32 as `transformers` has them: at position 8,000 the rounding of an angle is
    /// larger than that of its cosine.
    pub fn table(&self, positions: usize) -> Vec<f32> {
        let half = self.size / 2;
        let frequency = |i: usize| (1.0 / f64::from(self.theta).powf(i as f64 / half as f64)) as f32;
        let frequencies: Vec<f32> = (0..half).map(frequency).collect();
        let mut table = Vec::with_capacity(positions * self.size);
        for position in 0..positions {
            let angle = |frequency: &f32| f64::from(position as f32 * frequency);
            table.extend(frequencies.iter().map(|f| angle(f).cos() as f32));
            table.extend(frequencies.iter().map(|f| angle(f).sin() as f32));
        }
        table
    }
}

/// Rotates the heads of D columns within `columns` of every row of `x` (T × `stride`) in place, by the angles of `table` (see
/// [`Rotary::table`]) at `positions` (T). With `opposite` it is the backward.
pub fn rotate<E: Element>(
    cpu: &Cpu,
    rotary: &Rotary,
    table: &[f32],
    positions: &[u32],
    x: &mut [E],
    stride: usize,
    columns: Range<usize>,
    head_size: usize,
    opposite: bool,
) {
    let size = rotary.size;
    assert!(size > 0 && size.is_multiple_of(2) && size <= head_size, "rotary: {size} of {head_size} columns");
    assert!(columns.end <= stride && columns.len().is_multiple_of(head_size), "rotary: columns are not heads");
    assert!(x.len() == positions.len() * stride && table.len().is_multiple_of(size), "rotary: lengths differ");
    let known = table.len() / size;
    assert!(positions.iter().all(|position| (*position as usize) < known), "rotary: a position is outside of {known}");
    cpu.for_rows(x, stride, (8192 / columns.len().max(1)).max(1), |range, x| {
        let rows = Rows { rotary, table, head_size, opposite };
        for (position, row) in positions[range].iter().zip(x.chunks_exact_mut(stride)) {
            rotate_row(cpu.isa(), &rows, *position as usize, &mut row[columns.clone()]);
        }
    });
}

/// What is the same for all rows.
struct Rows<'a> {
    rotary: &'a Rotary,
    table: &'a [f32],
    head_size: usize,
    opposite: bool,
}

dispatch! { fn rotate_row<E>(rows: &Rows<'_>, position: usize, x: &mut [E]) = rotate_body }

/// # Safety
/// The instruction set must be there; lengths are checked by `rotate`.
#[inline(always)]
unsafe fn rotate_body<S: Simd, E: Element>(rows: &Rows<'_>, position: usize, x: &mut [E]) {
    let size = rows.rotary.size;
    let (cos, sin) = rows.table[position * size..(position + 1) * size].split_at(size / 2);
    let sign = if rows.opposite { -1.0 } else { 1.0 };
    for head in x.chunks_exact_mut(rows.head_size) {
        match rows.rotary.pairing {
            Pairing::Halves => {
                let (first, rest) = head.split_at_mut(size / 2);
                let second = &mut rest[..size / 2];
                for i in (0..size / 2).step_by(S::LANES) {
                    // SAFETY: i < R/2, the length of all four.
                    unsafe {
                        let (cos, sin) = (read::<S, f32>(cos, i), S::mul(read::<S, f32>(sin, i), S::splat(sign)));
                        let (a, b) = (read::<S, E>(first, i), read::<S, E>(second, i));
                        write::<S, E>(first, i, S::sub(S::mul(a, cos), S::mul(b, sin)));
                        write::<S, E>(second, i, S::mul_add(a, sin, S::mul(b, cos)));
                    }
                }
            }
            Pairing::Neighbours => {
                for (i, pair) in head[..size].chunks_exact_mut(2).enumerate() {
                    let (cos, sin) = (cos[i], sin[i] * sign);
                    let (a, b) = (pair[0].to_f32(), pair[1].to_f32());
                    pair[0] = E::from_f32(a * cos - b * sin);
                    pair[1] = E::from_f32(b * cos + a * sin);
                }
            }
        }
    }
}
