//! Losses, whose gradient takes the place of what they are computed from, and the softmax that they share. The definition
//! is [`crate::cpu::loss`] and [`crate::cpu::span`].
//!
//! Legend: P rows of logits, `columns` apart, of which the first `classes` count. A loss stays on the GPU: `loss` is one
//! f32 there, which the caller reads when it needs it. Scales may stand there too.

use crate::cpu::sample::Sampler;

use super::compile::Source;
use super::error::Result;
use super::gpu::{Argument, DType, EVENS, Gpu, Launch, Purpose, STORES, Scalar, Step, View, address, even, store};

/// All of them.
pub static SOURCE: Source = Source {
    name: "loss.cu",
    text: include_str!("kernels/loss.cu"),
    variants: &[
        &[STORES],
        &[STORES, EVENS],
        &[STORES, &["UNITS=1 BLOCK_THREADS=512", "UNITS=2 BLOCK_THREADS=512", "UNITS=4 BLOCK_THREADS=512"]],
        &[&["STORE=bf16 UNITS=8 BLOCK_THREADS=512", "STORE=float UNITS=4 BLOCK_THREADS=1024"]],
    ],
};

/// Where a loss goes: one f32, and whether it is added to what is there.
#[derive(Clone, Copy, Debug)]
pub struct Total<'a> {
    /// One f32.
    pub loss: View<'a>,
    /// Whether to add.
    pub add: bool,
}

/// Softmax cross-entropy: scale·Σ w·(ln Σ eˣ − `x[target]`), added in f64 in a fixed order. Without weights all are 1. With label
/// smoothing, that share of the target is spread evenly over all classes.
///
/// Each row's term, without scale and weight, goes to `losses`. With `want_gradient` the logits are replaced by
/// scale·w·(softmax − onehot). A row of weight 0 has no loss and no gradient, and neither its logits nor its target are
/// looked at. A target that is no class gives NaN and a fault.
pub fn cross_entropy(
    gpu: &Gpu,
    logits: View<'_>,
    columns: usize,
    classes: usize,
    targets: View<'_>,
    weights: Option<View<'_>>,
    smoothing: f32,
    scale: Scalar<'_>,
    want_gradient: bool,
    losses: View<'_>,
    total: Total<'_>,
) -> Result<()> {
    let rows = logits.rows("cross_entropy", columns);
    check(columns, classes, rows, targets, weights);
    losses.expect("cross_entropy", "the losses", rows, DType::F32);
    let even = even(columns, &[logits]);
    let units = columns.div_ceil(8);
    // Rows that fit into the registers of a block are read once.
    let (shape, threads) = match logits.dtype() {
        _ if even == EVENS[1] || units <= 128 || units > 4096 => (even, threads(classes)),
        _ if units <= 512 => ("UNITS=1 BLOCK_THREADS=512", 512),
        _ if units <= 1024 => ("UNITS=2 BLOCK_THREADS=512", 512),
        _ if units <= 2048 => ("UNITS=4 BLOCK_THREADS=512", 512),
        DType::Bf16 => ("UNITS=8 BLOCK_THREADS=512", 512),
        _ => ("UNITS=4 BLOCK_THREADS=1024", 1024),
    };
    let variant = [store(logits.dtype()), shape];
    let (scale_address, scale_value) = scale.arguments();
    // SAFETY: rows×columns logits, one target, weight and loss a row; the kernel checks targets.
    unsafe {
        let arguments: [&dyn Argument; 11] = [
            &logits.address(),
            &(columns as u32),
            &(classes as u32),
            &targets.address(),
            &address(weights),
            &smoothing,
            &scale_address,
            &scale_value,
            &u32::from(want_gradient),
            &losses.address(),
            &gpu.fault(),
        ];
        gpu.launch(&SOURCE, &variant, "cross_entropy", Launch::new(rows, threads), &arguments)?;
    }
    add_up(gpu, "total_f32", losses.address(), weights, rows, scale, total)
}

/// As `struct Sampler` of loss.cu.
#[repr(C)]
struct SamplerArgument {
    seed: u64,
    step_address: u64,
    step: u32,
    site: u32,
    temperature: f32,
    unused: u32,
}

// SAFETY: `struct Sampler` of loss.cu has the same fields.
unsafe impl Argument for SamplerArgument {}

/// Draws a class for each row of logits from its softmax at a temperature, as [`crate::cpu::sample`] does. `rows` (P, u32) tells which
/// token each belongs to, `places` (T×2) what the noise of each token is counted by. A row that is
/// [`NOWHERE`](super::rows::NOWHERE) draws class 0. `step` takes the place of the sampler's.
pub fn sample(
    gpu: &Gpu,
    sampler: &Sampler,
    step: Step<'_>,
    logits: View<'_>,
    columns: usize,
    classes: usize,
    places: View<'_>,
    rows: View<'_>,
    never: Option<View<'_>>,
    out: View<'_>,
) -> Result<()> {
    let count = logits.rows("sample", columns);
    assert!(0 < classes && classes <= columns, "sample: {classes} classes in {columns} columns");
    assert!(sampler.temperature > 0.0, "sample: the temperature is above 0");
    rows.expect("sample", "the rows", count, DType::U32);
    out.expect("sample", "the output", count, DType::U32);
    places.expect("sample", "the tokens' places", places.len() / 2 * 2, DType::U32);
    if let Some(never) = never {
        never.expect("sample", "what is never drawn", count, DType::U32);
    }
    let (step, step_address) = match step {
        Step::Value(step) => (step, 0),
        Step::At(view) => {
            view.expect("sample", "the step", 1, DType::U32);
            (0, view.address())
        }
    };
    let Sampler { seed, site, temperature, .. } = *sampler;
    let argument = SamplerArgument { seed, step_address, step, site, temperature, unused: 0 };
    let sizes = (columns as u32, classes as u32, (places.len() / 2) as u32);
    let (logits_at, places, rows, out) = (logits.address(), places.address(), rows.address(), out.address());
    let arguments: [&dyn Argument; 10] =
        [&logits_at, &sizes.0, &sizes.1, &places, &rows, &sizes.2, &address(never), &argument, &out, &gpu.fault()];
    // SAFETY: rows×columns logits, one row and one draw each; the kernel checks rows against the tokens.
    unsafe { gpu.launch(&SOURCE, &[store(logits.dtype())], "sample", Launch::new(count, 256), &arguments) }
}

/// A block for a row of `n` numbers, eight a thread where it is long.
fn threads(n: usize) -> usize {
    n.div_ceil(8).next_multiple_of(32).clamp(32, 1024)
}

#[track_caller]
fn check(columns: usize, classes: usize, rows: usize, targets: View<'_>, weights: Option<View<'_>>) {
    assert!(0 < classes && classes <= columns, "loss: {classes} classes in {columns} columns");
    targets.expect("loss", "the targets", rows, DType::U32);
    if let Some(weights) = weights {
        weights.expect("loss", "the weights", rows, DType::F32);
    }
}

/// loss = scale·Σ weight·term.
fn add_up(
    gpu: &Gpu,
    kernel: &'static str,
    terms: u64,
    weights: Option<View<'_>>,
    n: usize,
    scale: Scalar<'_>,
    total: Total<'_>,
) -> Result<()> {
    total.loss.expect("loss", "the loss", 1, DType::F32);
    let (scale_address, scale) = scale.arguments();
    // SAFETY: n terms, and as many weights.
    unsafe {
        let arguments: [&dyn Argument; 7] = [
            &terms,
            &address(weights),
            &(n as u32),
            &scale_address,
            &scale,
            &total.loss.address(),
            &u32::from(total.add),
        ];
        gpu.launch(&SOURCE, &[STORES[0]], kernel, Launch::new(1, 1024), &arguments)
    }
}

/// Whether each row has its largest logit (the first of several) at the target: 1 or 0 in `hits` (P, u32), where given, and
/// the number of those whose weight is above 0, added to `count` (one u32), where given.
pub fn hits(
    gpu: &Gpu,
    logits: View<'_>,
    columns: usize,
    classes: usize,
    targets: View<'_>,
    weights: Option<View<'_>>,
    hits: Option<View<'_>>,
    count: Option<View<'_>>,
) -> Result<()> {
    let rows = logits.rows("hits", columns);
    check(columns, classes, rows, targets, weights);
    if let Some(hits) = hits {
        hits.expect("hits", "the answers", rows, DType::U32);
    }
    if let Some(count) = count {
        count.expect("hits", "the count", 1, DType::U32);
    }
    // SAFETY: rows×columns logits, one target, weight and answer a row.
    unsafe {
        let arguments: [&dyn Argument; 7] = [
            &logits.address(),
            &(columns as u32),
            &(classes as u32),
            &targets.address(),
            &address(weights),
            &address(hits),
            &address(count),
        ];
        gpu.launch(&SOURCE, &[store(logits.dtype())], "hits", Launch::new(rows, threads(classes)), &arguments)
    }
}

/// Of each row's first `classes` numbers: ln Σ eˣ, not finite where one of them is not, the largest number, and its place, the first of
/// several; P each, places u32.
pub fn likeliest(
    gpu: &Gpu,
    logits: View<'_>,
    columns: usize,
    classes: usize,
    [log_sums, values, places]: [View<'_>; 3],
) -> Result<()> {
    let rows = logits.rows("likeliest", columns);
    assert!((1..=columns).contains(&classes), "likeliest: {classes} classes of {columns} columns");
    log_sums.expect("likeliest", "the sums", rows, DType::F32);
    values.expect("likeliest", "the largest", rows, DType::F32);
    places.expect("likeliest", "the places", rows, DType::U32);
    // SAFETY: rows×columns logits, and a number of each kind for each row.
    unsafe {
        let arguments: [&dyn Argument; 6] = [
            &logits.address(),
            &(columns as u32),
            &(classes as u32),
            &log_sums.address(),
            &values.address(),
            &places.address(),
        ];
        gpu.launch(&SOURCE, &[store(logits.dtype())], "likeliest", Launch::new(rows, threads(classes)), &arguments)
    }
}

/// eˣ / Σ eˣ of each row, without the padding: `out` is P×classes in f32.
pub fn softmax(gpu: &Gpu, logits: View<'_>, columns: usize, classes: usize, out: View<'_>) -> Result<()> {
    rows_of_softmax(gpu, logits, columns, classes, out, false)
}

/// x − ln Σ eˣ of each row, without the padding: `out` is P×classes in f32.
pub fn log_softmax(gpu: &Gpu, logits: View<'_>, columns: usize, classes: usize, out: View<'_>) -> Result<()> {
    rows_of_softmax(gpu, logits, columns, classes, out, true)
}

fn rows_of_softmax(
    gpu: &Gpu,
    logits: View<'_>,
    columns: usize,
    classes: usize,
    out: View<'_>,
    log: bool,
) -> Result<()> {
    let rows = logits.rows("softmax", columns);
    assert!(0 < classes && classes <= columns, "softmax: {classes} classes in {columns} columns");
    out.expect("softmax", "the output", rows * classes, DType::F32);
    let sizes = (columns as u32, classes as u32, u32::from(log));
    // SAFETY: rows×columns logits, rows×classes results.
    unsafe {
        let arguments: [&dyn Argument; 5] = [&logits.address(), &sizes.0, &sizes.1, &out.address(), &sizes.2];
        gpu.launch(&SOURCE, &[store(logits.dtype())], "softmax", Launch::new(rows, threads(classes)), &arguments)
    }
}

/// Elements of a block of the small losses.
const BLOCK: usize = 4096;

/// scale·Σ (x − t)²; with `want_gradient` x is replaced by 2·scale·(x − t). A scale of 1/n makes it the mean.
pub fn mean_squared_error(
    gpu: &Gpu,
    x: View<'_>,
    targets: View<'_>,
    scale: Scalar<'_>,
    want_gradient: bool,
    total: Total<'_>,
) -> Result<()> {
    elements(gpu, "mean_squared_error", x, targets, None, scale, want_gradient, total)
}

/// Cross-entropy of independent yes-or-no answers, from logits: scale·Σ w·(ln(1 + eˣ) − t·x); with `want_gradient` x is
/// replaced by scale·w·(σ(x) − t). Without weights all are 1.
pub fn binary_cross_entropy(
    gpu: &Gpu,
    logits: View<'_>,
    targets: View<'_>,
    weights: Option<View<'_>>,
    scale: Scalar<'_>,
    want_gradient: bool,
    total: Total<'_>,
) -> Result<()> {
    elements(gpu, "binary_cross_entropy", logits, targets, weights, scale, want_gradient, total)
}

fn elements(
    gpu: &Gpu,
    kernel: &'static str,
    x: View<'_>,
    targets: View<'_>,
    weights: Option<View<'_>>,
    scale: Scalar<'_>,
    want_gradient: bool,
    total: Total<'_>,
) -> Result<()> {
    targets.expect(kernel, "the targets", x.len(), DType::F32);
    if let Some(weights) = weights {
        weights.expect(kernel, "the weights", x.len(), DType::F32);
    }
    let blocks = x.len().div_ceil(BLOCK);
    let partial = gpu.scratch(Purpose::Sums, blocks * 8)?;
    let (scale_address, scale_value) = scale.arguments();
    // SAFETY: n numbers, n targets, n weights or none, one sum a block.
    unsafe {
        let arguments: [&dyn Argument; 8] = [
            &x.address(),
            &targets.address(),
            &address(weights),
            &(x.len() as u64),
            &scale_address,
            &scale_value,
            &u32::from(want_gradient),
            &partial,
        ];
        gpu.launch(&SOURCE, &[store(x.dtype())], kernel, Launch::new(blocks, 256), &arguments)?;
    }
    add_up(gpu, "total_f64", partial, None, blocks, scale, total)
}

/// scale·Σ weight·(−ln of the softmax at the target) where each sequence has two softmaxes over its own tokens: column 0 of
/// the logits (T×2) for where an answer starts, column 1 for where it ends. `targets` (u32) and `weights` (f32) are B×2,
/// targets counted from the sequence's first token. With `want_gradient` the logits are replaced by their gradient.
pub fn span_cross_entropy(
    gpu: &Gpu,
    logits: View<'_>,
    offsets: View<'_>,
    targets: View<'_>,
    weights: View<'_>,
    scale: Scalar<'_>,
    want_gradient: bool,
    total: Total<'_>,
) -> Result<()> {
    let sequences = targets.len() / 2;
    let _ = logits.rows("span", 2);
    targets.expect("span", "the targets", 2 * sequences, DType::U32);
    weights.expect("span", "the weights", 2 * sequences, DType::F32);
    offsets.expect("span", "the offsets", sequences + 1, DType::U32);
    let terms = gpu.scratch(Purpose::Sums, 2 * sequences * 8)?;
    let (scale_address, scale_value) = scale.arguments();
    // SAFETY: the kernel checks targets; offsets are those of a layout, which ends with the logits.
    unsafe {
        let arguments: [&dyn Argument; 9] = [
            &logits.address(),
            &offsets.address(),
            &targets.address(),
            &weights.address(),
            &scale_address,
            &scale_value,
            &u32::from(want_gradient),
            &terms,
            &gpu.fault(),
        ];
        let launch = Launch { grid: (sequences as u32, 2), threads: 128, shared: 0 };
        gpu.launch(&SOURCE, &[store(logits.dtype())], "span", launch, &arguments)?;
    }
    // Weights and scale are in the terms already.
    add_up(gpu, "total_f64", terms, None, 2 * sequences, Scalar::Value(1.0), total)
}
