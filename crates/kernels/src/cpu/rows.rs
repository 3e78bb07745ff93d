//! What is done with whole rows of a T×H matrix: picking, adding back, dropout, pooling over sequences, and the plain
//! passes (add, scale, zero) over any slice.

use super::dropout::{Dropout, RowId, drop_row};
use super::simd::{Element, Simd, read, write};
use super::{Cpu, SharedMut};

/// The definition, in f64.
pub mod reference {
    /// Row i of the output is row `rows[i]` of `x`.
    pub fn gather(x: &[f64], h: usize, rows: &[u32]) -> Vec<f64> {
        rows.iter().flat_map(|r| x[*r as usize * h..][..h].iter().copied()).collect()
    }

    /// The gradient of [`gather`]: row i of `dy` is added to row `rows[i]` of `dx`.
    pub fn scatter_add(dy: &[f64], h: usize, rows: &[u32], dx: &mut [f64]) {
        for (i, r) in rows.iter().enumerate() {
            for c in 0..h {
                dx[*r as usize * h + c] += dy[i * h + c];
            }
        }
    }

    /// The mean of rows `offsets[i]..offsets[i + 1]`; zeros where there are none.
    pub fn segment_mean(x: &[f64], h: usize, offsets: &[u32]) -> Vec<f64> {
        let mean = |i: usize, c: usize| {
            let (start, end) = (offsets[i] as usize, offsets[i + 1] as usize);
            (start..end).map(|t| x[t * h + c]).sum::<f64>() / (end - start).max(1) as f64
        };
        (0..(offsets.len() - 1) * h).map(|i| mean(i / h, i % h)).collect()
    }

    /// The largest of rows `offsets[i]..offsets[i + 1]`, column by column; zeros where there are none.
    pub fn segment_max(x: &[f64], h: usize, offsets: &[u32]) -> Vec<f64> {
        let largest = |i: usize, c: usize| {
            let rows = offsets[i] as usize..offsets[i + 1] as usize;
            rows.map(|t| x[t * h + c]).reduce(f64::max).unwrap_or(0.0)
        };
        (0..(offsets.len() - 1) * h).map(|i| largest(i / h, i % h)).collect()
    }

    /// Divides each row by its length √Σx², or by 10⁻¹² where that is larger.
    pub fn l2_normalise(x: &[f64], h: usize) -> Vec<f64> {
        let unit = |row: &[f64]| {
            let length = row.iter().map(|x| x * x).sum::<f64>().sqrt().max(1e-12);
            row.iter().map(|x| x / length).collect::<Vec<_>>()
        };
        x.chunks(h).flat_map(unit).collect()
    }

    /// The gradient of [`segment_mean`], added to `dx`: every row of a sequence gets its share.
    pub fn segment_mean_gradient(dy: &[f64], h: usize, offsets: &[u32], dx: &mut [f64]) {
        for (i, ends) in offsets.windows(2).enumerate() {
            for t in ends[0] as usize..ends[1] as usize {
                for c in 0..h {
                    dx[t * h + c] += dy[i * h + c] / f64::from(ends[1] - ends[0]);
                }
            }
        }
    }

    /// The gradient of [`segment_max`] at `x`, added to `dx`: the first of the largest gets it.
    pub fn segment_max_gradient(x: &[f64], dy: &[f64], h: usize, offsets: &[u32], dx: &mut [f64]) {
        for (i, ends) in offsets.windows(2).enumerate() {
            for c in 0..h {
                let rows = ends[0] as usize..ends[1] as usize;
                if let Some(t) = rows.reduce(|best, t| if x[t * h + c] > x[best * h + c] { t } else { best }) {
                    dx[t * h + c] += dy[i * h + c];
                }
            }
        }
    }

    /// The gradient of [`l2_normalise`] at `x`: what of `dy` stands at right angles to the row, divided by its length.
    pub fn l2_normalise_gradient(x: &[f64], dy: &[f64], h: usize) -> Vec<f64> {
        let row = |(x, dy): (&[f64], &[f64])| {
            let squares: f64 = x.iter().map(|x| x * x).sum();
            let length = squares.sqrt();
            if length < 1e-12 {
                return dy.iter().map(|dy| dy / 1e-12).collect::<Vec<_>>();
            }
            let along = x.iter().zip(dy).map(|(x, dy)| x * dy).sum::<f64>() / squares;
            x.iter().zip(dy).map(|(x, dy)| (dy - along * x) / length).collect()
        };
        x.chunks(h).zip(dy.chunks(h)).flat_map(row).collect()
    }
}

/// Elements that are worth a task.
const LEAST: usize = 8192;

/// Columns that one task of [`scatter_add`] and of pooling takes; a multiple of every vector's lanes.
const COLUMNS: usize = 64;

/// Row i of `out` becomes row `rows[i]` of `x`; rows have `h` columns.
pub fn gather<E: Element>(cpu: &Cpu, x: &[E], h: usize, rows: &[u32], out: &mut [E]) {
    assert!(h > 0 && x.len().is_multiple_of(h) && out.len() == rows.len() * h, "gather: lengths differ");
    cpu.for_rows(out, h, (LEAST / h).max(1), |range, out| {
        for (row, out) in rows[range].iter().zip(out.chunks_exact_mut(h)) {
            out.copy_from_slice(&x[*row as usize * h..][..h]);
        }
    });
}

/// Row i of `dy` is added to row `rows[i]` of `dx`, which is zeroed first on demand: the gradient of [`gather`].
///
/// Rows may repeat. Their sum is taken in the order of `rows`, rounded to `O` after each term: columns are divided
/// among threads, rows never.
pub fn scatter_add<E: Element, O: Element>(
    cpu: &Cpu,
    dy: &[E],
    h: usize,
    rows: &[u32],
    dx: &mut [O],
    zero_first: bool,
) {
    assert!(h > 0 && dx.len().is_multiple_of(h) && dy.len() == rows.len() * h, "scatter_add: lengths differ");
    let count = dx.len() / h;
    assert!(rows.iter().all(|r| (*r as usize) < count), "scatter_add: a row is outside of {count}");
    if zero_first {
        fill_zero(cpu, dx);
    }
    let dx = SharedMut::new(dx);
    cpu.for_each(h.div_ceil(COLUMNS), |i| {
        let start = i * COLUMNS;
        scatter_columns(cpu.isa(), dy, h, rows, dx, start, COLUMNS.min(h - start));
    });
}

dispatch! {
    fn scatter_columns<E, O>(
        dy: &[E], h: usize, rows: &[u32], dx: SharedMut<O>, start: usize, len: usize,
    ) = scatter_body
}

/// # Safety
/// The instruction set must be there; no other task writes columns `start..start + len`.
#[inline(always)]
unsafe fn scatter_body<S: Simd, E: Element, O: Element>(
    dy: &[E],
    h: usize,
    rows: &[u32],
    dx: SharedMut<O>,
    start: usize,
    len: usize,
) {
    for (i, row) in rows.iter().enumerate() {
        let dy = &dy[i * h + start..][..len];
        // SAFETY: these columns are this task's alone, and the slice of the last round is gone; c < len.
        unsafe {
            let dx = dx.slice(*row as usize * h + start, len);
            for c in (0..len).step_by(S::LANES) {
                write::<S, O>(dx, c, S::add(read::<S, O>(dx, c), read::<S, E>(dy, c)));
            }
        }
    }
}

/// Dropout of rows in place. It is its own backward: applied to the gradient it drops and scales the same elements.
pub fn drop<E: Element>(cpu: &Cpu, x: &mut [E], h: usize, dropout: &Dropout, rows: &[RowId]) {
    drop_parts(cpu, x, h, 1, dropout, rows);
}

/// The same for rows of several parts of `h` columns: all parts of a row lose the same columns.
pub fn drop_parts<E: Element>(cpu: &Cpu, x: &mut [E], h: usize, parts: usize, dropout: &Dropout, rows: &[RowId]) {
    let columns = parts * h;
    assert!(x.len() == rows.len() * columns, "drop: lengths differ");
    cpu.for_rows(x, columns, (LEAST / columns.max(1)).max(1), |range, x| {
        drop_rows(cpu.isa(), x, h, parts, dropout, &rows[range]);
    });
}

dispatch! {
    fn drop_rows<E>(x: &mut [E], h: usize, parts: usize, dropout: &Dropout, rows: &[RowId]) = drop_body
}

/// # Safety
/// The instruction set must be there.
#[inline(always)]
unsafe fn drop_body<S: Simd, E: Element>(x: &mut [E], h: usize, parts: usize, dropout: &Dropout, rows: &[RowId]) {
    for (i, row) in rows.iter().enumerate() {
        for part in i * parts..(i + 1) * parts {
            // SAFETY: the caller has the instruction set.
            unsafe { drop_row::<S, E>(dropout, *row, &mut x[part * h..(part + 1) * h]) };
        }
    }
}

/// Row i of `out` becomes the mean of the rows `offsets[i]..offsets[i + 1]` of `x`; zeros where there are none.
pub fn segment_mean<E: Element, O: Element>(cpu: &Cpu, x: &[E], h: usize, offsets: &[u32], out: &mut [O]) {
    pool(cpu, x, h, offsets, out, mean_columns::<E, O>);
}

/// Row i of `out` becomes the largest of the rows `offsets[i]..offsets[i + 1]` of `x`, column by column; zeros where
/// there are none, NaN where one of the numbers is a NaN or infinite.
pub fn segment_max<E: Element, O: Element>(cpu: &Cpu, x: &[E], h: usize, offsets: &[u32], out: &mut [O]) {
    pool(cpu, x, h, offsets, out, max_columns::<E, O>);
}

/// Runs `kernel(isa, rows of a sequence, h, first column, columns of the output)` on every block of the output.
fn pool<E: Element, O: Element>(
    cpu: &Cpu,
    x: &[E],
    h: usize,
    offsets: &[u32],
    out: &mut [O],
    kernel: fn(super::Isa, &[E], usize, usize, &mut [O]),
) {
    let segments = offsets.len().saturating_sub(1);
    assert!(h > 0 && x.len().is_multiple_of(h) && out.len() == segments * h, "pooling: lengths differ");
    assert!(offsets.windows(2).all(|w| w[0] <= w[1]), "pooling: offsets descend");
    assert!(offsets.last().is_none_or(|end| *end as usize <= x.len() / h), "pooling: offsets end outside");
    let blocks = h.div_ceil(COLUMNS);
    let out = SharedMut::new(out);
    cpu.for_each(segments * blocks, |task| {
        let (i, start) = (task / blocks, task % blocks * COLUMNS);
        // SAFETY: every task has its own row and columns.
        let out = unsafe { out.slice(i * h + start, COLUMNS.min(h - start)) };
        kernel(cpu.isa(), &x[offsets[i] as usize * h..offsets[i + 1] as usize * h], h, start, out);
    });
}

dispatch! { fn mean_columns<E, O>(x: &[E], h: usize, start: usize, out: &mut [O]) = mean_body }
dispatch! { fn max_columns<E, O>(x: &[E], h: usize, start: usize, out: &mut [O]) = max_body }

/// # Safety
/// The instruction set must be there; `x` holds whole rows of `h` columns and `out` ends within them.
#[inline(always)]
unsafe fn mean_body<S: Simd, E: Element, O: Element>(x: &[E], h: usize, start: usize, out: &mut [O]) {
    let n = out.len();
    // SAFETY: c < n, and `start + n` is at most h.
    unsafe {
        let share = S::splat(1.0 / (x.len() / h).max(1) as f32);
        for c in (0..n).step_by(S::LANES) {
            let mut sum = S::splat(0.0);
            for row in x.chunks_exact(h) {
                sum = S::add(sum, read::<S, E>(&row[start..start + n], c));
            }
            write::<S, O>(out, c, S::mul(sum, share));
        }
    }
}

/// # Safety
/// As for `mean_body`.
#[inline(always)]
unsafe fn max_body<S: Simd, E: Element, O: Element>(x: &[E], h: usize, start: usize, out: &mut [O]) {
    let n = out.len();
    // SAFETY: as above.
    unsafe {
        for c in (0..n).step_by(S::LANES) {
            let zero = S::splat(0.0);
            let mut rows = x.chunks_exact(h).map(|row| &row[start..start + n]);
            let mut largest = rows.next().map_or(zero, |row| read::<S, E>(row, c));
            // `max` forgets a NaN with the next number; a sum of zeros does not.
            let mut bad = S::mul(largest, zero);
            for row in rows {
                let v = read::<S, E>(row, c);
                largest = S::max(largest, v);
                bad = S::mul_add(v, zero, bad);
            }
            write::<S, O>(out, c, S::add(largest, bad));
        }
    }
}

/// Divides each row by its length √Σx², or by 10⁻¹² where that is larger, in place.
pub fn l2_normalise<E: Element>(cpu: &Cpu, x: &mut [E], h: usize) {
    assert!(h > 0 && x.len().is_multiple_of(h), "l2_normalise: lengths differ");
    cpu.for_rows(x, h, (LEAST / h).max(1), |_, x| l2_rows(cpu.isa(), x, h));
}

dispatch! { fn l2_rows<E>(x: &mut [E], h: usize) = l2_body }

/// # Safety
/// The instruction set must be there.
#[inline(always)]
unsafe fn l2_body<S: Simd, E: Element>(x: &mut [E], h: usize) {
    for row in x.chunks_exact_mut(h) {
        // SAFETY: c < h.
        unsafe {
            let mut squares = S::splat(0.0);
            for c in (0..h).step_by(S::LANES) {
                let v = read::<S, E>(row, c);
                squares = S::mul_add(v, v, squares);
            }
            let length = S::sum(squares).sqrt();
            // Not `f32::max`, which would drop a NaN.
            let inverse = S::splat(1.0 / if length < 1e-12 { 1e-12 } else { length });
            for c in (0..h).step_by(S::LANES) {
                write::<S, E>(row, c, S::mul(read::<S, E>(row, c), inverse));
            }
        }
    }
}

/// The gradient of [`segment_mean`]: every row of sequence i gets row i of `dy`, divided by how many there are. It is added to
/// `dx`, or written over it, with zeros in the rows that belong to no sequence.
pub fn segment_mean_gradient<E: Element, O: Element>(
    cpu: &Cpu,
    dy: &[E],
    h: usize,
    offsets: &[u32],
    dx: &mut [O],
    zero_first: bool,
) {
    let segments = offsets.len().saturating_sub(1);
    assert!(h > 0 && dx.len().is_multiple_of(h) && dy.len() == segments * h, "pooling's gradient: lengths differ");
    assert!(offsets.windows(2).all(|w| w[0] <= w[1]), "pooling's gradient: offsets descend");
    let (first, end) = (offsets.first().map_or(0, |o| *o as usize), offsets.last().map_or(0, |o| *o as usize));
    assert!(end <= dx.len() / h, "pooling's gradient: offsets end outside");
    if zero_first {
        dx[..first * h].fill(O::default());
        dx[end * h..].fill(O::default());
    }
    let dx = SharedMut::new(dx);
    cpu.for_each(segments, |i| {
        let (start, end) = (offsets[i] as usize, offsets[i + 1] as usize);
        // SAFETY: sequences do not overlap.
        let dx = unsafe { dx.slice(start * h, (end - start) * h) };
        spread_row(cpu.isa(), &dy[i * h..(i + 1) * h], dx, !zero_first);
    });
}

dispatch! { fn spread_row<E, O>(dy: &[E], dx: &mut [O], add: bool) = spread_body }

/// # Safety
/// The instruction set must be there; `dx` holds whole rows of as many columns as `dy` has.
#[inline(always)]
unsafe fn spread_body<S: Simd, E: Element, O: Element>(dy: &[E], dx: &mut [O], add: bool) {
    let h = dy.len();
    // SAFETY: c < h.
    unsafe {
        let share = S::splat(1.0 / (dx.len() / h).max(1) as f32);
        for row in dx.chunks_exact_mut(h) {
            for c in (0..h).step_by(S::LANES) {
                let mut v = S::mul(read::<S, E>(dy, c), share);
                if add {
                    v = S::add(v, read::<S, O>(row, c));
                }
                write::<S, O>(row, c, v);
            }
        }
    }
}

/// The gradient of [`segment_max`] at `x`: in each column the first of a sequence's largest gets that of the sequence. It is added
/// to `dx`, or written over it, with zeros everywhere else.
pub fn segment_max_gradient<E: Element, D: Element>(
    cpu: &Cpu,
    x: &[E],
    dy: &[D],
    h: usize,
    offsets: &[u32],
    dx: &mut [E],
    zero_first: bool,
) {
    let segments = offsets.len().saturating_sub(1);
    assert!(h > 0 && dx.len() == x.len() && dy.len() == segments * h, "pooling's gradient: lengths differ");
    assert!(offsets.windows(2).all(|w| w[0] <= w[1]), "pooling's gradient: offsets descend");
    assert!(offsets.last().is_none_or(|end| *end as usize <= dx.len() / h), "pooling's gradient: offsets end outside");
    if zero_first {
        fill_zero(cpu, dx);
    }
    let dx = SharedMut::new(dx);
    cpu.for_each(segments, |i| {
        let (start, end) = (offsets[i] as usize, offsets[i + 1] as usize);
        // SAFETY: sequences do not overlap.
        let dx = unsafe { dx.slice(start * h, (end - start) * h) };
        let x = &x[start * h..end * h];
        for (c, dy) in dy[i * h..(i + 1) * h].iter().enumerate() {
            let column = (c..x.len()).step_by(h);
            if let Some(at) = column.reduce(|best, at| if x[at].to_f32() > x[best].to_f32() { at } else { best }) {
                dx[at] = E::from_f32(dx[at].to_f32() + dy.to_f32());
            }
        }
    });
}

/// The gradient of [`l2_normalise`] at `x`: what of `dy` stands at right angles to the row, divided by its length. It takes
/// the place of `dy`.
pub fn l2_normalise_gradient<E: Element>(cpu: &Cpu, x: &[E], dy: &mut [E], h: usize) {
    assert!(h > 0 && x.len().is_multiple_of(h) && dy.len() == x.len(), "l2_normalise's gradient: lengths differ");
    cpu.for_rows(dy, h, (LEAST / h).max(1), |range, dy| {
        l2_gradient_rows(cpu.isa(), &x[range.start * h..range.end * h], dy, h);
    });
}

dispatch! { fn l2_gradient_rows<E>(x: &[E], dy: &mut [E], h: usize) = l2_gradient_body }

/// # Safety
/// The instruction set must be there; `x` and `dy` have the same length.
#[inline(always)]
unsafe fn l2_gradient_body<S: Simd, E: Element>(x: &[E], dy: &mut [E], h: usize) {
    for (x, dy) in x.chunks_exact(h).zip(dy.chunks_exact_mut(h)) {
        // SAFETY: c < h.
        unsafe {
            let (mut squares, mut along) = (S::splat(0.0), S::splat(0.0));
            for c in (0..h).step_by(S::LANES) {
                let v = read::<S, E>(x, c);
                squares = S::mul_add(v, v, squares);
                along = S::mul_add(v, read::<S, E>(dy, c), along);
            }
            let (length, along) = (S::sum(squares).sqrt(), S::sum(along));
            // A row too short to be normalised is only multiplied.
            let (inverse, along) = if length < 1e-12 { (1e12, 0.0) } else { (1.0 / length, -along / length / length) };
            let (inverse, along) = (S::splat(inverse), S::splat(along));
            for c in (0..h).step_by(S::LANES) {
                let v = S::mul_add(along, read::<S, E>(x, c), read::<S, E>(dy, c));
                write::<S, E>(dy, c, S::mul(v, inverse));
            }
        }
    }
}

/// y += x.
pub fn add<E: Element>(cpu: &Cpu, x: &[E], y: &mut [E]) {
    assert!(x.len() == y.len(), "add: lengths differ");
    cpu.for_rows(y, 1, LEAST, |range, y| add_range(cpu.isa(), &x[range], y));
}

dispatch! { fn add_range<E>(x: &[E], y: &mut [E]) = add_body }

/// # Safety
/// The instruction set must be there.
#[inline(always)]
unsafe fn add_body<S: Simd, E: Element>(x: &[E], y: &mut [E]) {
    for i in (0..x.len()).step_by(S::LANES) {
        // SAFETY: i < x.len() = y.len().
        unsafe { write::<S, E>(y, i, S::add(read::<S, E>(y, i), read::<S, E>(x, i))) };
    }
}

/// y *= x.
pub fn multiply<E: Element>(cpu: &Cpu, x: &[E], y: &mut [E]) {
    assert!(x.len() == y.len(), "multiply: lengths differ");
    cpu.for_rows(y, 1, LEAST, |range, y| multiply_range(cpu.isa(), &x[range], y));
}

dispatch! { fn multiply_range<E>(x: &[E], y: &mut [E]) = multiply_body }

/// # Safety
/// The instruction set must be there.
#[inline(always)]
unsafe fn multiply_body<S: Simd, E: Element>(x: &[E], y: &mut [E]) {
    for i in (0..x.len()).step_by(S::LANES) {
        // SAFETY: i < x.len() = y.len().
        unsafe { write::<S, E>(y, i, S::mul(read::<S, E>(y, i), read::<S, E>(x, i))) };
    }
}

/// y = factor·x.
pub fn scale<E: Element>(cpu: &Cpu, factor: f32, x: &[E], y: &mut [E]) {
    assert!(x.len() == y.len(), "scale: lengths differ");
    let y = SharedMut::new(y);
    cpu.for_ranges(x.len(), LEAST, |_, range| {
        // SAFETY: ranges are disjoint.
        let y = unsafe { y.slice(range.start, range.len()) };
        scale_range(cpu.isa(), factor, &x[range], y);
    });
}

dispatch! { fn scale_range<E>(factor: f32, x: &[E], y: &mut [E]) = scale_body }

/// # Safety
/// The instruction set must be there.
#[inline(always)]
unsafe fn scale_body<S: Simd, E: Element>(factor: f32, x: &[E], y: &mut [E]) {
    for i in (0..x.len()).step_by(S::LANES) {
        // SAFETY: i < x.len() = y.len().
        unsafe { write::<S, E>(y, i, S::mul(S::splat(factor), read::<S, E>(x, i))) };
    }
}

/// x = 0.
pub fn fill_zero<E: Element>(cpu: &Cpu, x: &mut [E]) {
    cpu.for_rows(x, 1, 4 * LEAST, |_, x| x.fill(E::default()));
}
