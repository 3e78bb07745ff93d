//! LayerNorm and RMSNorm with what models put around them: y = drop(norm(residual + drop(x + bias))). The definition is
//! [`crate::cpu::layer_norm`].
//!
//! Legend: T rows, H columns. The statistics are f32 and kept for the backward.

use super::compile::Source;
use super::error::Result;
use super::gpu::{Argument, DType, Dropout, EVENS, Gpu, Launch, Purpose, STORES, View, address, even, store};
use super::reduce::{self, Sum};
use super::rows::warps;

/// LayerNorm and the embeddings before it.
pub static SOURCE: Source = Source {
    name: "layer_norm.cu",
    text: include_str!("kernels/layer_norm.cu"),
    variants: &[
        &[STORES, &["EVEN=true"], &["UNITS=1", "UNITS=2", "UNITS=3", "UNITS=4"]],
        &[STORES, &["EVEN=false"], &["UNITS=4"]],
        &[STORES, EVENS, &["LONG"]],
        &[STORES, EVENS, &["TABLE=float", "TABLE=bf16"]],
        &[&["STORE=float"], EVENS, &["BLOCK_THREADS=640 AHEAD_OF=2", "BLOCK_THREADS=1024 AHEAD_OF=1"], AFTERS],
        &[&["STORE=bf16"], EVENS, &["BLOCK_THREADS=640 AHEAD_OF=4", "BLOCK_THREADS=1024 AHEAD_OF=2"], AFTERS],
        &[&["STORE=bf16"], &["EVEN=true"], &["ROWS=1", "ROWS=2", "ROWS=3", "ROWS=4"], AFTERS],
    ],
};

/// Dropout after the normalisation, or a gradient of the sum from elsewhere, or neither.
const AFTERS: &[&str] = &["AFTER=false", "AFTER=true", "AFTER=false STREAM"];

/// A normalisation of rows.
#[derive(Clone, Copy, Debug)]
pub struct Norm<'a> {
    /// H, f32.
    pub gamma: View<'a>,
    /// H, f32; none where there is no shift.
    pub beta: Option<View<'a>>,
    /// Added to the variance, or to the mean square.
    pub epsilon: f32,
    /// Whether the mean is subtracted: LayerNorm; else it is RMSNorm.
    pub centred: bool,
}

impl Norm<'_> {
    #[track_caller]
    pub(crate) fn check(&self) {
        self.gamma.expect("layer_norm", "gamma", self.gamma.len(), DType::F32);
        if let Some(beta) = self.beta {
            beta.expect("layer_norm", "beta", self.gamma.len(), DType::F32);
        }
    }
}

/// Where dropout is applied around the normalisation, and how its rows are counted.
#[derive(Clone, Copy, Default)]
pub struct Drops<'a> {
    /// On x, before the residual is added.
    pub before: Option<Dropout<'a>>,
    /// On the output.
    pub after: Option<Dropout<'a>>,
    /// T×2: sequence and position of each row; unused where both are off.
    pub rows: Option<View<'a>>,
}

impl Drops<'_> {
    fn check(&self, rows: usize) {
        match self.rows {
            Some(view) => view.expect("layer_norm", "the rows' places", 2 * rows, DType::U32),
            None => assert!(self.before.is_none() && self.after.is_none(), "layer_norm: dropout without places"),
        }
    }
}

/// The most columns that the backward can hold: what follows from eight a thread of a block.
pub const MOST_COLUMNS: usize = 8192;

/// The most columns of a row that a warp holds in registers.
pub(crate) const REGISTERS: usize = 1024;

/// How many units of 256 columns a row has; odd rows have room for the most.
pub(crate) fn units(h: usize, even: &str) -> &'static str {
    match h.div_ceil(256) {
        _ if h > REGISTERS => "LONG",
        _ if even == EVENS[1] => "UNITS=4",
        1 => "UNITS=1",
        2 => "UNITS=2",
        3 => "UNITS=3",
        _ => "UNITS=4",
    }
}

/// Normalises rows: `x` (T×H) becomes residual + drop(x + bias), `y` gets the output, `statistics` (T×2, f32) mean and
/// 1/deviation of each row. Without statistics there is no backward pass: what x holds afterwards is undefined, and y may be x.
///
/// The bias (H, f32) is that of the layer that made x: added here it costs nothing, added by the product it costs up to a
/// sixth of the product.
pub fn forward(
    gpu: &Gpu,
    x: View<'_>,
    bias: Option<View<'_>>,
    residual: Option<View<'_>>,
    norm: Norm<'_>,
    drops: Drops<'_>,
    y: View<'_>,
    statistics: Option<View<'_>>,
) -> Result<()> {
    let Norm { gamma, beta, epsilon, centred } = norm;
    let h = gamma.len();
    let rows = x.rows("layer_norm", h);
    norm.check();
    y.expect("layer_norm", "the output", x.len(), x.dtype());
    if let Some(statistics) = statistics {
        statistics.expect("layer_norm", "the statistics", 2 * rows, DType::F32);
    }
    if let Some(residual) = residual {
        residual.expect("layer_norm", "the residual", x.len(), x.dtype());
    }
    drops.check(rows);
    if let Some(bias) = bias {
        bias.expect("layer_norm", "the bias", h, DType::F32);
    }
    let even = even(h, &[x, y, residual.unwrap_or(x), gamma, beta.unwrap_or(gamma), bias.unwrap_or(gamma)]);
    let variant = [store(x.dtype()), even, units(h, even)];
    let launch = if h > REGISTERS { Launch::new(rows, 256) } else { warps(rows) };
    let (before, after) = (Dropout::argument(drops.before), Dropout::argument(drops.after));
    // SAFETY: rows×h numbers, h of gamma and beta, two statistics and two numbers of the place for each row.
    unsafe {
        let arguments: [&dyn Argument; 14] = [
            &x.address(),
            &address(bias),
            &address(residual),
            &gamma.address(),
            &address(beta),
            &epsilon,
            &u32::from(centred),
            &before,
            &after,
            &address(drops.rows),
            &y.address(),
            &address(statistics),
            &(rows as u32),
            &(h as u32),
        ];
        gpu.launch(&SOURCE, &variant, "forward", launch, &arguments)
    }
}

/// The gradient of [`forward`]: `dsum` (T×H) gets the residual's gradient, `dx`, where dropout stood before, that of x
/// (without it they are the same). `dstream` is the gradient that the sum has from elsewhere, in a pre-norm block. `dgamma` and
/// `dbeta` get their sums, and so does `dbias`, where given: the sums of the columns of x's gradient, which is the gradient of the
/// bias of the layer that made x.
pub fn backward(
    gpu: &Gpu,
    dy: View<'_>,
    dstream: Option<View<'_>>,
    sum: View<'_>,
    statistics: View<'_>,
    norm: Norm<'_>,
    drops: Drops<'_>,
    dsum: View<'_>,
    dx: Option<View<'_>>,
    dgamma: Sum<'_>,
    dbeta: Option<Sum<'_>>,
    dbias: Option<Sum<'_>>,
) -> Result<()> {
    let gamma = norm.gamma;
    let h = gamma.len();
    let rows = sum.rows("layer_norm", h);
    norm.check();
    assert!(dbeta.is_none() || norm.beta.is_some(), "layer_norm: there is no beta to have a gradient");
    assert!(dstream.is_none() || drops.after.is_none(), "layer_norm: a stream has no dropout after its norm");
    if let Some(dstream) = dstream {
        dstream.expect("layer_norm", "the stream's gradient", sum.len(), sum.dtype());
    }
    dy.expect("layer_norm", "the output's gradient", sum.len(), sum.dtype());
    dsum.expect("layer_norm", "the sum's gradient", sum.len(), sum.dtype());
    statistics.expect("layer_norm", "the statistics", 2 * rows, DType::F32);
    assert!(dx.is_some() == drops.before.is_some(), "layer_norm: dx is wanted just where dropout stands before");
    if let Some(dx) = dx {
        dx.expect("layer_norm", "the input's gradient", sum.len(), sum.dtype());
    }
    assert!(h <= MOST_COLUMNS, "layer_norm: {h} columns are more than its backward can hold");
    drops.check(rows);
    if rows == 0 {
        return Ok(());
    }
    let even = even(h, &[dy, dstream.unwrap_or(dy), sum, dsum, dx.unwrap_or(dsum), gamma]);
    let call = Backward { dy, dstream, sum, statistics, norm, drops, dsum, dx, sums: [Some(dgamma), dbeta, dbias] };
    let units = h.div_ceil(256);
    if sum.dtype() == DType::Bf16 && even == EVENS[0] && units <= 4 {
        // A warp has whole rows; as many blocks of four as the registers allow (see the kernel's bounds).
        let blocks = (gpu.multiprocessors() * [4, 3, 3, 2][units - 1]).min(rows.div_ceil(4));
        let launch = Launch { grid: (blocks as u32, 1), threads: 128, shared: (4 * h * 4) as u32 };
        let shape = ["ROWS=1", "ROWS=2", "ROWS=3", "ROWS=4"][units - 1];
        let place = (launch, shape, blocks, 32);
        return call.launch(gpu, even, place);
    }
    // A group of threads has whole rows; a block has as many groups as there is room for. Each thread needs 64 bytes for a
    // pair of rows in bf16, and one for sums.
    let threads = h.div_ceil(8).next_multiple_of(32);
    let (size, most, each) = match (threads > 640, sum.dtype()) {
        (false, DType::Bf16) => ("BLOCK_THREADS=640 AHEAD_OF=4", 640, 1 + 4 * 64),
        (false, _) => ("BLOCK_THREADS=640 AHEAD_OF=2", 640, 1 + 2 * 128),
        (true, DType::Bf16) => ("BLOCK_THREADS=1024 AHEAD_OF=2", 1024, 1 + 2 * 64),
        (true, _) => ("BLOCK_THREADS=1024 AHEAD_OF=1", 1024, 1 + 128),
    };
    let groups = (most.min(gpu.shared_memory() / each) / threads).clamp(1, 15);
    let blocks = gpu.multiprocessors().min(rows.div_ceil(2 * groups));
    let launch = Launch {
        grid: (blocks as u32, 1),
        threads: (groups * threads) as u32,
        shared: (groups * threads * each) as u32,
    };
    let place = (launch, size, blocks, threads);
    call.launch(gpu, even, place)
}

/// A backward under way.
struct Backward<'a> {
    dy: View<'a>,
    dstream: Option<View<'a>>,
    sum: View<'a>,
    statistics: View<'a>,
    norm: Norm<'a>,
    drops: Drops<'a>,
    dsum: View<'a>,
    dx: Option<View<'a>>,
    /// Those of γ, of β and of the bias.
    sums: [Option<Sum<'a>>; 3],
}

impl Backward<'_> {
    /// Launches a kernel, whose every block leaves sums, and adds those.
    fn launch(
        &self,
        gpu: &Gpu,
        even: &'static str,
        (launch, shape, blocks, threads): (Launch, &'static str, usize, usize),
    ) -> Result<()> {
        let Self { dy, dstream, sum, statistics, norm, drops, dsum, dx, sums } = self;
        let h = norm.gamma.len();
        let (rows, with_columns) = (sum.rows("layer_norm", h), sums[2].is_some());
        let sets = if with_columns { 3 } else { 2 };
        let partial = gpu.scratch(Purpose::Sums, blocks * sets * h * 4)?;
        let after = if dstream.is_some() { 2 } else { usize::from(drops.after.is_some()) };
        let variant = [store(sum.dtype()), even, shape, AFTERS[after]];
        let (before, after) = (Dropout::argument(drops.before), Dropout::argument(drops.after));
        // SAFETY: as in `forward`, and room for the sums of each block.
        unsafe {
            let arguments: [&dyn Argument; 16] = [
                &dy.address(),
                &address(*dstream),
                &sum.address(),
                &statistics.address(),
                &norm.gamma.address(),
                &u32::from(norm.centred),
                &before,
                &after,
                &address(drops.rows),
                &dsum.address(),
                &address(*dx),
                &partial,
                &(rows as u32),
                &(h as u32),
                &(threads as u32),
                &u32::from(with_columns),
            ];
            gpu.launch(&SOURCE, &variant, "backward", launch, &arguments)?;
        }
        reduce::finish_sets(gpu, partial, blocks, h, sets, *sums)
    }
}
