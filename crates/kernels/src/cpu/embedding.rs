//! Embedding: each token's vector is the sum of one row of each of a few tables (BERT: word, position and segment).
//!
//! Legend: T tokens, H columns. Tables may be f32 or bf16, whatever the output is; the sum is taken in f32.

use super::Cpu;
use super::rows::scatter_add;
use super::simd::{Element, Simd, read, write};

/// The definition, in f64.
pub mod reference {
    /// Row t of the output is Σ over the tables of row `ids[t]`; each lookup is (ids, table).
    pub fn forward(lookups: &[(&[u32], &[f64])], h: usize) -> Vec<f64> {
        let sum = |t: usize, c: usize| lookups.iter().map(|(ids, table)| table[ids[t] as usize * h + c]).sum();
        (0..lookups[0].0.len() * h).map(|i| sum(i / h, i % h)).collect()
    }

    /// The gradient of [`forward`] for one table: row t of `dy` is added to row `ids[t]` of `dtable`.
    pub fn backward(dy: &[f64], ids: &[u32], dtable: &mut [f64], h: usize) {
        for (t, id) in ids.iter().enumerate() {
            for c in 0..h {
                dtable[*id as usize * h + c] += dy[t * h + c];
            }
        }
    }
}

/// Which row of a table each token takes.
#[derive(Clone, Copy, Debug)]
pub struct Lookup<'a, W> {
    /// T row numbers.
    pub ids: &'a [u32],
    /// Rows of H columns.
    pub table: &'a [W],
}

/// Row t of `out` (T×H) becomes the sum of row `ids[t]` of each of one to four tables.
///
/// Panics when an id is outside of its table.
pub fn forward<E: Element, W: Element>(cpu: &Cpu, lookups: &[Lookup<'_, W>], h: usize, out: &mut [E]) {
    assert!(h > 0 && out.len().is_multiple_of(h), "embedding: lengths differ");
    let t = out.len() / h;
    for (i, lookup) in lookups.iter().enumerate() {
        assert!(
            lookup.ids.len() == t && lookup.table.len().is_multiple_of(h),
            "embedding: lengths of table {i} differ"
        );
        let rows = lookup.table.len() / h;
        assert!(lookup.ids.iter().all(|id| (*id as usize) < rows), "embedding: an id is outside of table {i}'s {rows}");
    }
    assert!((1..=4).contains(&lookups.len()), "embedding: {} tables", lookups.len());
    cpu.for_rows(out, h, (8192 / h).max(1), |range, out| {
        sum_rows(cpu.isa(), lookups, range.start, h, out);
    });
}

dispatch! { fn sum_rows<E, W>(lookups: &[Lookup<'_, W>], start: usize, h: usize, out: &mut [E]) = sum_body }

/// # Safety
/// The instruction set must be there; ids and lengths are checked by `forward`.
#[inline(always)]
unsafe fn sum_body<S: Simd, E: Element, W: Element>(lookups: &[Lookup<'_, W>], start: usize, h: usize, out: &mut [E]) {
    // SAFETY: as above. One loop for each number of tables.
    unsafe {
        match *lookups {
            [a] => sum_of::<S, E, W, 1>([a], start, h, out),
            [a, b] => sum_of::<S, E, W, 2>([a, b], start, h, out),
            [a, b, c] => sum_of::<S, E, W, 3>([a, b, c], start, h, out),
            [a, b, c, d] => sum_of::<S, E, W, 4>([a, b, c, d], start, h, out),
            _ => {}
        }
    }
}

#[inline(always)]
unsafe fn sum_of<S: Simd, E: Element, W: Element, const N: usize>(
    lookups: [Lookup<'_, W>; N],
    start: usize,
    h: usize,
    out: &mut [E],
) {
    for (t, out) in out.chunks_exact_mut(h).enumerate() {
        let rows = lookups.map(|lookup| &lookup.table[lookup.ids[start + t] as usize * h..][..h]);
        for c in (0..h).step_by(S::LANES) {
            // SAFETY: c < h, the length of every row; the caller has the instruction set.
            unsafe {
                let mut sum = read::<S, W>(rows[0], c);
                for row in &rows[1..] {
                    sum = S::add(sum, read::<S, W>(row, c));
                }
                write::<S, E>(out, c, sum);
            }
        }
    }
}

/// The gradient of [`forward`] for one table: row t of `dy` (T×H) is added to row `ids[t]` of `dtable`.
///
/// Tokens are added in order and columns divided among threads, so the bits do not depend on their number.
pub fn backward<E: Element>(cpu: &Cpu, dy: &[E], ids: &[u32], dtable: &mut [f32], h: usize) {
    scatter_add(cpu, dy, h, ids, dtable, false);
}
