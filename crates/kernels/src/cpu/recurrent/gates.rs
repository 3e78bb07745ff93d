//! What happens to the rows of one step between two products, written once over vectors.

use std::ops::Range;

use super::{Cell, Columns, Scan, Sequences};
use crate::cpu::SharedMut;
use crate::cpu::math::{exp, tanh};
use crate::cpu::simd::{Element, Simd, read, write};

/// One step forward.
pub(super) struct Step<'a, E> {
    pub(super) scan: &'a Scan,
    pub(super) sequences: Sequences<'a>,
    pub(super) step: usize,
    /// n×G·C: what the states say, with their bias.
    pub(super) sums: &'a [f32],
    /// T×G·C: what tokens say; becomes the gates.
    pub(super) gates: SharedMut<E>,
    pub(super) columns: Columns,
    /// T×[`Scan::aside`], or nothing.
    pub(super) aside: SharedMut<E>,
    /// n×C.
    pub(super) cells: SharedMut<f32>,
    /// n×C: the states before, which become the states, or what is projected.
    pub(super) states: SharedMut<E>,
    /// T×C, where nothing is projected.
    pub(super) out: Option<(SharedMut<E>, Columns)>,
}

/// One step back.
pub(super) struct Back<'a, E> {
    pub(super) scan: &'a Scan,
    pub(super) sequences: Sequences<'a>,
    pub(super) step: usize,
    /// T×G·C: gates, which become the gradients of what tokens said.
    pub(super) gates: SharedMut<E>,
    pub(super) columns: Columns,
    /// T×[`Scan::aside`]; a GRU's become the gradients of what the states said to the new value.
    pub(super) aside: SharedMut<E>,
    /// B×C.
    pub(super) initial_cell: Option<&'a [E]>,
    /// T×P: the state before each token.
    pub(super) before: &'a [E],
    /// T×C, where nothing is projected.
    pub(super) dout: Option<(&'a [E], Columns)>,
    /// n×C: of the states, or of what is projected; becomes what goes straight to the states before.
    pub(super) dstates: SharedMut<f32>,
    /// n×C.
    pub(super) dcells: SharedMut<f32>,
    /// n×G·C: of the sums with the states.
    pub(super) dsums: SharedMut<E>,
}

dispatch! {
    /// The gates, cells and states of some rows.
    pub(super) fn forward<E>(step: &Step<'_, E>, rows: Range<usize>) = forward_body
}
dispatch! {
    /// The gradients of the gates and cells of some rows.
    pub(super) fn backward<E>(step: &Back<'_, E>, rows: Range<usize>) = backward_body
}
dispatch! {
    /// What an LSTM projects at some tokens (T×C).
    pub(super) fn inner<E>(
        c: usize, tokens: Range<usize>, gates: SharedMut<E>, columns: Columns, cells: SharedMut<E>, out: SharedMut<E>,
    ) = inner_body
}
dispatch! {
    /// Bounds a state, and puts it to its token.
    pub(super) fn clip<E>(limit: f32, state: &mut [E], out: &mut [E]) = clip_body
}
dispatch! {
    /// to = dout + dstate where a state was not bounded, else 0.
    pub(super) fn clip_gradient<E>(limit: f32, state: &[E], dout: &[E], dstate: &[f32], to: &mut [E]) = clip_gradient_body
}
dispatch! {
    /// to += x.
    pub(super) fn add<E>(x: &[E], to: &mut [f32]) = add_body
}

/// # Safety
/// The instruction set must be there, no other task may have the same rows, and all is as large as [`Step`] says.
#[inline(always)]
unsafe fn forward_body<S: Simd, E: Element>(step: &Step<'_, E>, rows: Range<usize>) {
    let (c, width) = (step.scan.hidden, step.scan.gates());
    for row in rows {
        let Some(token) = step.sequences.token(row, step.step, step.scan.reverse) else { continue };
        // SAFETY: every row has its own token, and every task its own rows.
        unsafe {
            let gates = step.gates.slice(step.columns.start(token), width);
            let aside = if step.aside.len() == 0 { &mut [] } else { step.aside.slice(token * c, step.scan.aside()) };
            let (cells, states) = (step.cells.slice(row * c, c), step.states.slice(row * c, c));
            let sums = &step.sums[row * width..(row + 1) * width];
            match step.scan.cell {
                Cell::Lstm => lstm::<S, E>(step.scan.clip_cell, sums, gates, aside, cells, states),
                Cell::Gru => gru::<S, E>(sums, gates, aside, states),
                Cell::Tanh | Cell::Relu => plain::<S, E>(step.scan.cell, sums, gates, states),
            }
            if let Some((out, columns)) = step.out {
                out.slice(columns.start(token), c).copy_from_slice(states);
            }
        }
    }
}

/// # Safety
/// The instruction set must be there; slices have C numbers or G·C.
#[inline(always)]
unsafe fn lstm<S: Simd, E: Element>(
    limit: f32,
    sums: &[f32],
    gates: &mut [E],
    aside: &mut [E],
    cells: &mut [f32],
    inner: &mut [E],
) {
    let c = cells.len();
    let (input, rest) = gates.split_at_mut(c);
    let (forget, rest) = rest.split_at_mut(c);
    let (new, out) = rest.split_at_mut(c);
    for j in (0..c).step_by(S::LANES) {
        // SAFETY: j < c, and every part has c numbers.
        unsafe {
            let sum = |said: &[E], g: usize| S::add(read::<S, E>(said, j), read::<S, f32>(&sums[g * c..][..c], j));
            let i = sigmoid::<S>(sum(input, 0));
            let f = sigmoid::<S>(sum(forget, 1));
            let g = tanh::<S>(sum(new, 2));
            let o = sigmoid::<S>(sum(out, 3));
            let cell = S::mul_add(f, read::<S, f32>(cells, j), S::mul(i, g));
            let cell = bounded::<S>(cell, limit);
            write::<S, f32>(cells, j, cell);
            if !aside.is_empty() {
                write::<S, E>(aside, j, cell);
            }
            write::<S, E>(inner, j, S::mul(o, tanh::<S>(cell)));
            write::<S, E>(input, j, i);
            write::<S, E>(forget, j, f);
            write::<S, E>(new, j, g);
            write::<S, E>(out, j, o);
        }
    }
}

/// # Safety
/// As for `lstm`.
#[inline(always)]
unsafe fn gru<S: Simd, E: Element>(sums: &[f32], gates: &mut [E], aside: &mut [E], states: &mut [E]) {
    let c = states.len();
    let (reset, rest) = gates.split_at_mut(c);
    let (update, new) = rest.split_at_mut(c);
    for j in (0..c).step_by(S::LANES) {
        // SAFETY: as above.
        unsafe {
            let of_state = |g: usize| read::<S, f32>(&sums[g * c..][..c], j);
            let r = sigmoid::<S>(S::add(read::<S, E>(reset, j), of_state(0)));
            let z = sigmoid::<S>(S::add(read::<S, E>(update, j), of_state(1)));
            let q = of_state(2);
            let n = tanh::<S>(S::mul_add(r, q, read::<S, E>(new, j)));
            let h = S::mul_add(z, S::sub(read::<S, E>(states, j), n), n);
            if !aside.is_empty() {
                write::<S, E>(aside, j, q);
            }
            write::<S, E>(states, j, h);
            write::<S, E>(reset, j, r);
            write::<S, E>(update, j, z);
            write::<S, E>(new, j, n);
        }
    }
}

/// # Safety
/// As for `lstm`.
#[inline(always)]
unsafe fn plain<S: Simd, E: Element>(cell: Cell, sums: &[f32], gates: &mut [E], states: &mut [E]) {
    for j in (0..states.len()).step_by(S::LANES) {
        // SAFETY: as above.
        unsafe {
            let sum = S::add(read::<S, E>(gates, j), read::<S, f32>(sums, j));
            // Of two operands of which one is a NaN, `max` gives the second.
            let h = if cell == Cell::Tanh { tanh::<S>(sum) } else { S::max(S::splat(0.0), sum) };
            write::<S, E>(gates, j, h);
            write::<S, E>(states, j, h);
        }
    }
}

/// # Safety
/// As for `forward_body`.
#[inline(always)]
unsafe fn backward_body<S: Simd, E: Element>(step: &Back<'_, E>, rows: Range<usize>) {
    let (scan, c, width) = (step.scan, step.scan.hidden, step.scan.gates());
    for row in rows {
        let Some(token) = step.sequences.token(row, step.step, scan.reverse) else { continue };
        // SAFETY: every row has its own token, and every task its own rows; tokens before are read alone, and by nobody written
        // before their own step.
        unsafe {
            let gates = step.gates.slice(step.columns.start(token), width);
            let dsums = step.dsums.slice(row * width, width);
            let dstates = step.dstates.slice(row * c, c);
            if let Some((dout, columns)) = step.dout {
                add_body::<S, E>(&dout[columns.start(token)..][..c], dstates);
            }
            match scan.cell {
                Cell::Lstm => {
                    let sequence = step.sequences.order[row] as usize;
                    let last = step.step.checked_sub(1).and_then(|s| step.sequences.token(row, s, scan.reverse));
                    let cells_before = match last {
                        Some(last) => Some(&*step.aside.slice(last * c, c)),
                        None => step.initial_cell.map(|cells| &cells[sequence * c..(sequence + 1) * c]),
                    };
                    let cells = &*step.aside.slice(token * c, c);
                    let dcells = step.dcells.slice(row * c, c);
                    lstm_backward::<S, E>(scan.clip_cell, cells, cells_before, dstates, dcells, gates);
                }
                Cell::Gru => {
                    let aside = step.aside.slice(token * c, c);
                    gru_backward::<S, E>(&step.before[token * c..(token + 1) * c], aside, dstates, gates);
                    dsums[2 * c..].copy_from_slice(aside);
                }
                Cell::Tanh | Cell::Relu => plain_backward::<S, E>(scan.cell, dstates, gates),
            }
            let same = if scan.cell == Cell::Gru { 2 * c } else { width };
            dsums[..same].copy_from_slice(&gates[..same]);
        }
    }
}

/// # Safety
/// As for `lstm`.
#[inline(always)]
unsafe fn lstm_backward<S: Simd, E: Element>(
    limit: f32,
    cells: &[E],
    cells_before: Option<&[E]>,
    dinner: &[f32],
    dcells: &mut [f32],
    gates: &mut [E],
) {
    let c = cells.len();
    let (input, rest) = gates.split_at_mut(c);
    let (forget, rest) = rest.split_at_mut(c);
    let (new, out) = rest.split_at_mut(c);
    for j in (0..c).step_by(S::LANES) {
        // SAFETY: as above.
        unsafe {
            let one = S::splat(1.0);
            let slope = |gate: S::V| S::mul(gate, S::sub(one, gate));
            let (i, f) = (read::<S, E>(input, j), read::<S, E>(forget, j));
            let (g, o) = (read::<S, E>(new, j), read::<S, E>(out, j));
            let cell = read::<S, E>(cells, j);
            let t = tanh::<S>(cell);
            let dh = read::<S, f32>(dinner, j);
            let dc = S::mul_add(S::mul(dh, o), S::sub(one, S::mul(t, t)), read::<S, f32>(dcells, j));
            let dc = S::mul(dc, inside::<S>(cell, limit));
            let before = cells_before.map_or(S::splat(0.0), |cells| read::<S, E>(cells, j));
            write::<S, E>(input, j, S::mul(S::mul(dc, g), slope(i)));
            write::<S, E>(forget, j, S::mul(S::mul(dc, before), slope(f)));
            write::<S, E>(new, j, S::mul(S::mul(dc, i), S::sub(one, S::mul(g, g))));
            write::<S, E>(out, j, S::mul(S::mul(dh, t), slope(o)));
            write::<S, f32>(dcells, j, S::mul(dc, f));
        }
    }
}

/// # Safety
/// As for `lstm`.
#[inline(always)]
unsafe fn gru_backward<S: Simd, E: Element>(before: &[E], aside: &mut [E], dstates: &mut [f32], gates: &mut [E]) {
    let c = before.len();
    let (reset, rest) = gates.split_at_mut(c);
    let (update, new) = rest.split_at_mut(c);
    for j in (0..c).step_by(S::LANES) {
        // SAFETY: as above.
        unsafe {
            let one = S::splat(1.0);
            let slope = |gate: S::V| S::mul(gate, S::sub(one, gate));
            let (r, z, n) = (read::<S, E>(reset, j), read::<S, E>(update, j), read::<S, E>(new, j));
            let dh = read::<S, f32>(dstates, j);
            let dn = S::mul(S::mul(dh, S::sub(one, z)), S::sub(one, S::mul(n, n)));
            write::<S, E>(reset, j, S::mul(S::mul(dn, read::<S, E>(aside, j)), slope(r)));
            write::<S, E>(update, j, S::mul(S::mul(dh, S::sub(read::<S, E>(before, j), n)), slope(z)));
            write::<S, E>(new, j, dn);
            write::<S, E>(aside, j, S::mul(dn, r));
            write::<S, f32>(dstates, j, S::mul(dh, z));
        }
    }
}

/// # Safety
/// As for `lstm`.
#[inline(always)]
unsafe fn plain_backward<S: Simd, E: Element>(cell: Cell, dstates: &[f32], gates: &mut [E]) {
    for j in (0..gates.len()).step_by(S::LANES) {
        // SAFETY: as above.
        unsafe {
            let (h, dh, half) = (read::<S, E>(gates, j), read::<S, f32>(dstates, j), S::splat(0.5));
            let slope = match cell {
                Cell::Tanh => S::sub(S::splat(1.0), S::mul(h, h)),
                // 1 where 0 − h is negative, that is where h > 0.
                _ => S::sub(half, S::copysign(half, S::sub(S::splat(0.0), h))),
            };
            write::<S, E>(gates, j, S::mul(dh, slope));
        }
    }
}

/// # Safety
/// The instruction set must be there; all have a token's rows for each token.
#[inline(always)]
unsafe fn inner_body<S: Simd, E: Element>(
    c: usize,
    tokens: Range<usize>,
    gates: SharedMut<E>,
    columns: Columns,
    cells: SharedMut<E>,
    out: SharedMut<E>,
) {
    for token in tokens {
        // SAFETY: every token is one task's, and j < c.
        unsafe {
            let gate = &*gates.slice(columns.start(token) + 3 * c, c);
            let (cells, out) = (&*cells.slice(token * c, c), out.slice(token * c, c));
            for j in (0..c).step_by(S::LANES) {
                write::<S, E>(out, j, S::mul(read::<S, E>(gate, j), tanh::<S>(read::<S, E>(cells, j))));
            }
        }
    }
}

/// # Safety
/// The instruction set must be there; both have the same length.
#[inline(always)]
unsafe fn clip_body<S: Simd, E: Element>(limit: f32, state: &mut [E], out: &mut [E]) {
    for j in (0..state.len()).step_by(S::LANES) {
        // SAFETY: j < state.len() = out.len().
        unsafe {
            let h = bounded::<S>(read::<S, E>(state, j), limit);
            write::<S, E>(state, j, h);
            write::<S, E>(out, j, h);
        }
    }
}

/// # Safety
/// The instruction set must be there; all have the same length.
#[inline(always)]
unsafe fn clip_gradient_body<S: Simd, E: Element>(limit: f32, state: &[E], dout: &[E], dstate: &[f32], to: &mut [E]) {
    for j in (0..to.len()).step_by(S::LANES) {
        // SAFETY: j < to.len(), which all have.
        unsafe {
            let d = S::add(read::<S, E>(dout, j), read::<S, f32>(dstate, j));
            write::<S, E>(to, j, S::mul(d, inside::<S>(read::<S, E>(state, j), limit)));
        }
    }
}

/// # Safety
/// The instruction set must be there; both have the same length.
#[inline(always)]
unsafe fn add_body<S: Simd, E: Element>(x: &[E], to: &mut [f32]) {
    for j in (0..to.len()).step_by(S::LANES) {
        // SAFETY: j < to.len() = x.len().
        unsafe { write::<S, f32>(to, j, S::add(read::<S, f32>(to, j), read::<S, E>(x, j))) };
    }
}

/// 1/(1 + e⁻ˣ).
#[inline(always)]
unsafe fn sigmoid<S: Simd>(x: S::V) -> S::V {
    // SAFETY: the caller has the instruction set.
    unsafe {
        let one = S::splat(1.0);
        S::div(one, S::add(one, exp::<S>(S::sub(S::splat(0.0), x))))
    }
}

/// x, or ±limit where that is nearer to 0. A NaN stays one: of two operands of which one is a NaN, these give the second.
#[inline(always)]
unsafe fn bounded<S: Simd>(x: S::V, limit: f32) -> S::V {
    // SAFETY: the caller has the instruction set.
    unsafe { S::max(S::splat(-limit), S::min(S::splat(limit), x)) }
}

/// 1 where |x| is less than the limit, else 0.
#[inline(always)]
unsafe fn inside<S: Simd>(x: S::V, limit: f32) -> S::V {
    // SAFETY: the caller has the instruction set.
    unsafe {
        let half = S::splat(0.5);
        S::sub(half, S::copysign(half, S::sub(S::abs(x), S::splat(limit))))
    }
}
