//! Rotary positions, in place on queries and keys. The definition is [`crate::cpu::rotary`].

use std::ops::Range;

use crate::cpu::rotary::{Pairing, Rotary};

use super::compile::Source;
use super::error::Result;
use super::gpu::{Argument, DType, EVENS, Gpu, Launch, STORES, View, store};

/// One kernel.
pub static SOURCE: Source =
    Source { name: "rotary.cu", text: include_str!("kernels/rotary.cu"), variants: &[&[STORES, EVENS, PAIRINGS]] };

const PAIRINGS: &[&str] = &["PAIRING=0", "PAIRING=1"];

/// Rotates the heads of D columns within `columns` of every row of `x` (T × `stride`) by the angles of `table` (see
/// [`Rotary::table`], f32) at `positions` (T, u32). With `opposite` it is the backward. A position outside of the table gives NaN and a
/// fault.
pub fn rotate(
    gpu: &Gpu,
    rotary: &Rotary,
    table: View<'_>,
    positions: View<'_>,
    x: View<'_>,
    stride: usize,
    columns: Range<usize>,
    head_size: usize,
    opposite: bool,
) -> Result<()> {
    let (size, tokens) = (rotary.size, x.rows("rotary", stride));
    assert!(size > 0 && size.is_multiple_of(2) && size <= head_size, "rotary: {size} of {head_size} columns");
    assert!(columns.end <= stride && columns.len().is_multiple_of(head_size), "rotary: columns are not heads");
    positions.expect("rotary", "the positions", tokens, DType::U32);
    table.expect("rotary", "the table", table.len() / size * size, DType::F32);
    if x.is_empty() || columns.is_empty() {
        return Ok(());
    }
    let (half, heads) = (size / 2, columns.len() / head_size);
    let eights = [half, head_size, stride, columns.start].iter().all(|n| n.is_multiple_of(8));
    let even = EVENS[usize::from(!(eights && x.is_aligned() && table.is_aligned()))];
    let pairing = PAIRINGS[usize::from(rotary.pairing == Pairing::Neighbours)];
    let launch = Launch::new((tokens * heads * half.div_ceil(8)).div_ceil(256), 256);
    let first = x.address() + (columns.start * x.dtype().size()) as u64;
    let sizes = [tokens, heads, head_size, half].map(|n| n as u32);
    let (sign, known) = (if opposite { -1.0f32 } else { 1.0 }, (table.len() / size) as u32);
    assert!(known > 0, "rotary: the table has no positions");
    let (stride, table, positions) = (stride as u64, table.address(), positions.address());
    let arguments: [&dyn Argument; 11] =
        [&first, &stride, &table, &positions, &sizes[0], &sizes[1], &sizes[2], &sizes[3], &sign, &known, &gpu.fault()];
    // SAFETY: the heads lie within the rows; the kernel checks positions against the table.
    unsafe { gpu.launch(&SOURCE, &[store(x.dtype()), even, pairing], "rotate", launch, &arguments) }
}
