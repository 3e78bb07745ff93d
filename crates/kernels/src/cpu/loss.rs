//! Losses, whose gradient takes the place of what they are computed from, and the softmax that they share.
//!
//! Legend: P rows of logits, `columns` apart, of which the first `classes` count; the rest is padding, whatever it
//! holds, and its gradient is 0. A row with a logit that is infinite or a NaN gives NaN everywhere, never a plausible
//! number.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::reduce::sum_over_ranges;
use super::simd::{Element, Simd, read, write};
use super::{Cpu, SharedMut, math};

/// The definition, in f64: each loss with its gradient.
pub mod reference {
    fn log_sum_exp(row: &[f64]) -> f64 {
        let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        largest + row.iter().map(|x| (x - largest).exp()).sum::<f64>().ln()
    }

    /// eˣ / Σ eˣ over the first `classes` of each row.
    pub fn softmax(logits: &[f64], columns: usize, classes: usize) -> Vec<f64> {
        log_softmax(logits, columns, classes).iter().map(|x| x.exp()).collect()
    }

    /// ln Σ eˣ over the first `classes` of each row.
    pub fn log_sums(logits: &[f64], columns: usize, classes: usize) -> Vec<f64> {
        logits.chunks(columns).map(|row| log_sum_exp(&row[..classes])).collect()
    }

    /// x − ln Σ eˣ over the first `classes` of each row.
    pub fn log_softmax(logits: &[f64], columns: usize, classes: usize) -> Vec<f64> {
        let rows = logits.chunks(columns).map(|row| &row[..classes]);
        rows.map(|row| (row, log_sum_exp(row))).flat_map(|(row, sum)| row.iter().map(move |x| x - sum)).collect()
    }

    /// (scale·Σ w·(ln Σ eˣ − (1 − smoothing)·`x[target]` − smoothing·mean of x), the rows' terms without scale and w, the
    /// gradient).
    pub fn smoothed_cross_entropy(
        logits: &[f64],
        columns: usize,
        classes: usize,
        targets: &[u32],
        weights: &[f64],
        smoothing: f64,
        scale: f64,
    ) -> (f64, Vec<f64>, Vec<f64>) {
        let (mut losses, mut gradient) = (vec![0.0; targets.len()], vec![0.0; logits.len()]);
        let mut loss = 0.0;
        for (p, row) in logits.chunks(columns).enumerate() {
            let (target, w) = (targets[p] as usize, weights[p]);
            if w == 0.0 {
                continue;
            }
            let row = &row[..classes];
            let sum = log_sum_exp(row);
            // What the target's distribution has at each class.
            let wanted = |c: usize| (1.0 - smoothing) * f64::from(u8::from(c == target)) + smoothing / classes as f64;
            losses[p] = sum - (0..classes).map(|c| wanted(c) * row[c]).sum::<f64>();
            loss += scale * w * losses[p];
            for c in 0..classes {
                gradient[p * columns + c] = scale * w * ((row[c] - sum).exp() - wanted(c));
            }
        }
        (loss, losses, gradient)
    }

    /// Without smoothing.
    pub fn cross_entropy(
        logits: &[f64],
        columns: usize,
        classes: usize,
        targets: &[u32],
        weights: &[f64],
        scale: f64,
    ) -> (f64, Vec<f64>, Vec<f64>) {
        smoothed_cross_entropy(logits, columns, classes, targets, weights, 0.0, scale)
    }

    /// (scale·Σ (x − t)², the gradient).
    pub fn mean_squared_error(x: &[f64], targets: &[f64], scale: f64) -> (f64, Vec<f64>) {
        let differences = || x.iter().zip(targets).map(|(x, t)| x - t);
        (differences().map(|d| scale * d * d).sum(), differences().map(|d| 2.0 * scale * d).collect())
    }

    /// (−scale·Σ w·(t·ln σ(x) + (1 − t)·ln(1 − σ(x))), the gradient), where σ(x) = 1/(1 + e⁻ˣ).
    pub fn binary_cross_entropy(x: &[f64], targets: &[f64], weights: &[f64], scale: f64) -> (f64, Vec<f64>) {
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let all = || x.iter().zip(targets).zip(weights).map(|((x, t), w)| (*x, *t, scale * w));
        let loss = |(x, t, w): (f64, f64, f64)| -w * (t * sigmoid(x).ln() + (1.0 - t) * (1.0 - sigmoid(x)).ln());
        (all().map(loss).sum(), all().map(|(x, t, w)| w * (sigmoid(x) - t)).collect())
    }
}

/// Elements that are worth a task.
const LEAST: usize = 8192;

/// Softmax cross-entropy: scale·Σ w·(ln Σ eˣ − `x[target]`), added in f64 in the order of rows. Without weights all are 1.
///
/// With label smoothing (Szegedy et al. 2016), a share of the target is spread evenly over all classes, the target included:
/// ln Σ eˣ − (1 − smoothing)·`x[target]` − smoothing·mean of x, as in PyTorch.
///
/// Each row's term, without scale and weight, goes to `losses`. With `want_gradient` the logits are replaced by
/// scale·w·(softmax − onehot). A row of weight 0 has no loss and no gradient, and neither its logits nor its target
/// are looked at.
pub fn cross_entropy<E: Element>(
    cpu: &Cpu,
    logits: &mut [E],
    columns: usize,
    classes: usize,
    targets: &[u32],
    weights: Option<&[f32]>,
    smoothing: f32,
    scale: f32,
    want_gradient: bool,
    losses: &mut [f32],
) -> f32 {
    let rows = targets.len();
    assert!((0.0..1.0).contains(&smoothing), "cross_entropy: smoothing {smoothing} is not in [0, 1)");
    check("cross_entropy", logits.len(), columns, classes, rows, weights);
    assert!(losses.len() == rows, "cross_entropy: one loss per row");
    let counted = |p: usize| weights.is_none_or(|w| w[p] != 0.0);
    assert!(
        (0..rows).all(|p| !counted(p) || (targets[p] as usize) < classes),
        "cross_entropy: a target is not a class"
    );
    let (logits, shared) = (SharedMut::new(logits), SharedMut::new(losses));
    cpu.for_ranges(rows, (LEAST / columns).max(1), |_, range| {
        // SAFETY: ranges are disjoint.
        let (logits, losses) = unsafe {
            (logits.slice(range.start * columns, range.len() * columns), shared.slice(range.start, range.len()))
        };
        let weights = weights.map(|w| &w[range.clone()]);
        let rows = Rows { columns, classes, targets: &targets[range], weights, smoothing, scale };
        cross_entropy_rows(cpu.isa(), logits, &rows, want_gradient, losses);
    });
    let terms = losses.iter().enumerate().map(|(p, loss)| f64::from(weights.map_or(1.0, |w| w[p])) * f64::from(*loss));
    (f64::from(scale) * terms.sum::<f64>()) as f32
}

fn check(what: &str, len: usize, columns: usize, classes: usize, rows: usize, weights: Option<&[f32]>) {
    assert!(0 < classes && classes <= columns, "{what}: {classes} classes in {columns} columns");
    assert!(len == rows * columns, "{what}: lengths differ");
    assert!(weights.is_none_or(|w| w.len() == rows), "{what}: one weight per row");
}

/// Some rows of a cross-entropy.
struct Rows<'a> {
    columns: usize,
    classes: usize,
    targets: &'a [u32],
    weights: Option<&'a [f32]>,
    smoothing: f32,
    scale: f32,
}

dispatch! {
    fn cross_entropy_rows<E>(logits: &mut [E], rows: &Rows<'_>, want_gradient: bool, losses: &mut [f32])
        = cross_entropy_body
}

/// # Safety
/// The instruction set must be there; the lengths are checked by `cross_entropy`.
#[inline(always)]
unsafe fn cross_entropy_body<S: Simd, E: Element>(
    logits: &mut [E],
    rows: &Rows<'_>,
    want_gradient: bool,
    losses: &mut [f32],
) {
    let Rows { columns, classes, targets, weights, smoothing, scale } = *rows;
    for (p, row) in logits.chunks_exact_mut(columns).enumerate() {
        let weight = weights.map_or(1.0, |w| w[p]);
        if weight == 0.0 {
            losses[p] = 0.0;
            if want_gradient {
                row.fill(E::default());
            }
            continue;
        }
        let (row, padding) = row.split_at_mut(classes);
        let target = targets[p] as usize;
        let logit = row[target].to_f32();
        // SAFETY: the caller has the instruction set; c < classes.
        unsafe {
            let (largest, sum) = largest_and_sum::<S, E>(row);
            let mut loss = f64::from(largest - logit) + f64::from(sum).ln();
            if smoothing > 0.0 {
                // How far the target's logit is above the mean, as it is below the largest one here.
                loss += f64::from(smoothing) * (f64::from(logit) - f64::from(total::<S, E>(row)) / classes as f64);
            }
            losses[p] = loss as f32;
            if want_gradient {
                let factor = scale * weight;
                let (shift, share) = (S::splat(largest), S::splat(factor / sum));
                let spread = smoothing / classes as f32;
                if smoothing > 0.0 {
                    let spread = S::splat(-factor * spread);
                    for c in (0..classes).step_by(S::LANES) {
                        let e = math::exp::<S>(S::sub(read::<S, E>(row, c), shift));
                        write::<S, E>(row, c, S::mul_add(e, share, spread));
                    }
                } else {
                    for c in (0..classes).step_by(S::LANES) {
                        let e = math::exp::<S>(S::sub(read::<S, E>(row, c), shift));
                        write::<S, E>(row, c, S::mul(e, share));
                    }
                }
                let wanted = 1.0 - smoothing + spread;
                row[target] = E::from_f32(factor * ((logit - largest).exp() / sum - wanted));
                padding.fill(E::default());
            }
        }
    }
}

/// Σ x.
///
/// # Safety
/// The instruction set must be there.
#[inline(always)]
unsafe fn total<S: Simd, E: Element>(x: &[E]) -> f32 {
    // SAFETY: c is below the length.
    unsafe {
        let mut sums = [S::splat(0.0); 4];
        for (i, c) in (0..x.len()).step_by(S::LANES).enumerate() {
            sums[i % 4] = S::add(sums[i % 4], read::<S, E>(x, c));
        }
        S::sum(S::add(S::add(sums[0], sums[1]), S::add(sums[2], sums[3])))
    }
}

/// The largest number m and Σ e^(x − m); both NaN where a number is infinite or a NaN.
///
/// Two passes: a row of logits stays in the second-level cache, and the first costs a tenth of the second.
///
/// # Safety
/// The instruction set must be there.
#[inline(always)]
unsafe fn largest_and_sum<S: Simd, E: Element>(x: &[E]) -> (f32, f32) {
    // SAFETY: c + LANES is at most the length in the loop over whole vectors, c is below it in the other.
    unsafe {
        let largest = largest::<S, E>(x);
        let shift = S::splat(largest);
        // Four sums in turn are more exact than one.
        let mut sums = [S::splat(0.0); 4];
        let whole = x.len() - x.len() % S::LANES;
        for (i, c) in (0..whole).step_by(S::LANES).enumerate() {
            sums[i % 4] = S::add(sums[i % 4], math::exp::<S>(S::sub(E::load::<S>(x.as_ptr().add(c)), shift)));
        }
        if whole < x.len() {
            let e = math::exp::<S>(S::sub(read::<S, E>(x, whole), shift));
            sums[0] = S::add(sums[0], S::keep(e, (1 << (x.len() - whole)) - 1));
        }
        let sum = S::sum(S::add(S::add(sums[0], sums[1]), S::add(sums[2], sums[3])));
        // `math::exp` takes a NaN for a number.
        (largest, sum + largest * 0.0)
    }
}

/// The largest number; NaN where one is infinite or a NaN.
///
/// # Safety
/// The instruction set must be there.
#[inline(always)]
unsafe fn largest<S: Simd, E: Element>(x: &[E]) -> f32 {
    // SAFETY: as in `largest_and_sum`.
    unsafe {
        let zero = S::splat(0.0);
        let (mut tops, mut bad) = ([S::splat(f32::NEG_INFINITY); 4], [zero; 4]);
        let step = 4 * S::LANES;
        let fours = x.len() - x.len() % step;
        for c in (0..fours).step_by(step) {
            for k in 0..4 {
                let v = E::load::<S>(x.as_ptr().add(c + k * S::LANES));
                tops[k] = S::max(tops[k], v);
                // `max` forgets a NaN with the next number; a sum of zeros does not.
                bad[k] = S::mul_add(v, zero, bad[k]);
            }
        }
        let top = S::max(S::max(tops[0], tops[1]), S::max(tops[2], tops[3]));
        let bad = S::add(S::add(bad[0], bad[1]), S::add(bad[2], bad[3]));
        let (mut top, mut bad) = (S::largest(top), S::sum(bad));
        for x in &x[fours..] {
            top = top.max(x.to_f32());
            bad += x.to_f32() * 0.0;
        }
        top + bad
    }
}

/// How many rows have their largest logit (the first of several) at the target, of those whose weight is above 0.
pub fn accuracy<E: Element>(
    cpu: &Cpu,
    logits: &[E],
    columns: usize,
    classes: usize,
    targets: &[u32],
    weights: Option<&[f32]>,
) -> usize {
    check("accuracy", logits.len(), columns, classes, targets.len(), weights);
    let correct = AtomicUsize::new(0);
    cpu.for_ranges(targets.len(), (LEAST / columns).max(1), |_, range| {
        let hit = |p: &usize| is_hit(cpu, &logits[p * columns..][..classes], targets[*p]);
        let count = range.filter(|p| weights.is_none_or(|w| w[*p] > 0.0) && hit(p)).count();
        correct.fetch_add(count, Ordering::Relaxed);
    });
    correct.into_inner()
}

/// Whether each row has its largest logit (the first of several) at the target.
pub fn hits<E: Element>(cpu: &Cpu, logits: &[E], columns: usize, classes: usize, targets: &[u32], hits: &mut [bool]) {
    check("hits", logits.len(), columns, classes, targets.len(), None);
    assert!(hits.len() == targets.len(), "hits: one answer per row");
    cpu.for_rows(hits, 1, (LEAST / columns).max(1), |range, hits| {
        for (p, hit) in range.zip(hits) {
            *hit = is_hit(cpu, &logits[p * columns..][..classes], targets[p]);
        }
    });
}

fn is_hit<E: Element>(cpu: &Cpu, row: &[E], target: u32) -> bool {
    let Some(logit) = row.get(target as usize) else { return false };
    let (logit, before) = (logit.to_f32(), &row[..target as usize]);
    logit == row_largest(cpu.isa(), row) && before.iter().all(|x| x.to_f32() < logit)
}

dispatch! { fn row_largest<E>(x: &[E]) -> f32 = largest }

/// ln Σ eˣ of each row's first `classes` numbers: P; not finite where one of them is infinite or a NaN.
pub fn log_sums<E: Element>(cpu: &Cpu, logits: &[E], columns: usize, classes: usize, out: &mut [f32]) {
    check("log_sums", logits.len(), columns, classes, out.len(), None);
    cpu.for_rows(out, 1, (LEAST / columns).max(1), |range, out| {
        for (row, out) in range.zip(out) {
            *out = row_log_sum(cpu.isa(), &logits[row * columns..row * columns + classes]);
        }
    });
}

dispatch! { fn row_log_sum<E>(x: &[E]) -> f32 = log_sum_body }

/// # Safety
/// The instruction set must be there.
#[inline(always)]
unsafe fn log_sum_body<S: Simd, E: Element>(x: &[E]) -> f32 {
    // SAFETY: as for this function.
    let (largest, sum) = unsafe { largest_and_sum::<S, E>(x) };
    largest + sum.ln()
}

/// eˣ / Σ eˣ of each row, without the padding: `out` is P×classes.
pub fn softmax<E: Element>(cpu: &Cpu, logits: &[E], columns: usize, classes: usize, out: &mut [f32]) {
    for_rows_of_softmax(cpu, logits, columns, classes, out, false);
}

/// x − ln Σ eˣ of each row, without the padding: `out` is P×classes.
pub fn log_softmax<E: Element>(cpu: &Cpu, logits: &[E], columns: usize, classes: usize, out: &mut [f32]) {
    for_rows_of_softmax(cpu, logits, columns, classes, out, true);
}

fn for_rows_of_softmax<E: Element>(
    cpu: &Cpu,
    logits: &[E],
    columns: usize,
    classes: usize,
    out: &mut [f32],
    log: bool,
) {
    let rows = logits.len() / columns.max(1);
    check("softmax", logits.len(), columns, classes, rows, None);
    assert!(out.len() == rows * classes, "softmax: lengths differ");
    cpu.for_rows(out, classes, (LEAST / columns).max(1), |range, out| {
        softmax_rows(cpu.isa(), &logits[range.start * columns..range.end * columns], columns, classes, out, log);
    });
}

dispatch! {
    fn softmax_rows<E>(logits: &[E], columns: usize, classes: usize, out: &mut [f32], log: bool) = softmax_body
}

/// # Safety
/// The instruction set must be there; the lengths are checked by `for_rows_of_softmax`.
#[inline(always)]
unsafe fn softmax_body<S: Simd, E: Element>(logits: &[E], columns: usize, classes: usize, out: &mut [f32], log: bool) {
    for (row, out) in logits.chunks_exact(columns).zip(out.chunks_exact_mut(classes)) {
        let row = &row[..classes];
        // SAFETY: the caller has the instruction set; c < classes.
        unsafe {
            let (largest, sum) = largest_and_sum::<S, E>(row);
            let (shift, share, ln) = (S::splat(largest), S::splat(1.0 / sum), S::splat(sum.ln()));
            for c in (0..classes).step_by(S::LANES) {
                let x = S::sub(read::<S, E>(row, c), shift);
                write::<S, f32>(out, c, if log { S::sub(x, ln) } else { S::mul(math::exp::<S>(x), share) });
            }
        }
    }
}

/// scale·Σ (x − t)²; with `want_gradient` x is replaced by 2·scale·(x − t). A scale of 1/n makes it the mean.
pub fn mean_squared_error<E: Element>(cpu: &Cpu, x: &mut [E], targets: &[f32], scale: f32, want_gradient: bool) -> f32 {
    assert!(x.len() == targets.len(), "mean_squared_error: lengths differ");
    let x = SharedMut::new(x);
    let sum = sum_over_ranges(cpu, targets.len(), LEAST, |range| {
        // SAFETY: ranges are disjoint.
        let x = unsafe { x.slice(range.start, range.len()) };
        squared_errors(cpu.isa(), x, &targets[range], scale, want_gradient)
    });
    (f64::from(scale) * sum) as f32
}

dispatch! {
    fn squared_errors<E>(x: &mut [E], targets: &[f32], scale: f32, want_gradient: bool) -> f64 = squared_errors_body
}

/// # Safety
/// The instruction set must be there; the lengths are the same.
#[inline(always)]
unsafe fn squared_errors_body<S: Simd, E: Element>(
    x: &mut [E],
    targets: &[f32],
    scale: f32,
    want_gradient: bool,
) -> f64 {
    let mut total = 0.0;
    for (x, targets) in x.chunks_mut(4096).zip(targets.chunks(4096)) {
        // SAFETY: i < x.len() = targets.len(); beyond the end both are 0.
        unsafe {
            let mut sum = S::splat(0.0);
            for i in (0..x.len()).step_by(S::LANES) {
                let d = S::sub(read::<S, E>(x, i), read::<S, f32>(targets, i));
                sum = S::mul_add(d, d, sum);
                if want_gradient {
                    write::<S, E>(x, i, S::mul(d, S::splat(2.0 * scale)));
                }
            }
            total += f64::from(S::sum(sum));
        }
    }
    total
}

/// Cross-entropy of independent yes-or-no answers, from logits: scale·Σ w·(ln(1 + eˣ) − t·x), which never overflows as
/// it is written here; with `want_gradient` x is replaced by scale·w·(σ(x) − t). Without weights all are 1.
///
/// Without vectors: it sees at most a number for each token, and in f64 the logarithm is exact.
pub fn binary_cross_entropy<E: Element>(
    cpu: &Cpu,
    logits: &mut [E],
    targets: &[f32],
    weights: Option<&[f32]>,
    scale: f32,
    want_gradient: bool,
) -> f32 {
    assert!(logits.len() == targets.len(), "binary_cross_entropy: lengths differ");
    assert!(weights.is_none_or(|weights| weights.len() == targets.len()), "binary_cross_entropy: lengths differ");
    let logits = SharedMut::new(logits);
    let sum = sum_over_ranges(cpu, targets.len(), 256, |range| {
        // SAFETY: ranges are disjoint.
        let logits = unsafe { logits.slice(range.start, range.len()) };
        let mut sum = 0.0;
        for (i, logit) in range.zip(logits) {
            let (x, t) = (f64::from(logit.to_f32()), f64::from(targets[i]));
            let w = weights.map_or(1.0, |weights| f64::from(weights[i]));
            let e = (-x.abs()).exp();
            let bad = x * 0.0;
            sum += w * (x.max(0.0) - t * x + e.ln_1p() + bad);
            if want_gradient {
                let sigmoid = if x > 0.0 { 1.0 / (1.0 + e) } else { e / (1.0 + e) };
                *logit = E::from_f32((f64::from(scale) * w * (sigmoid - t + bad)) as f32);
            }
        }
        sum
    });
    (f64::from(scale) * sum) as f32
}
