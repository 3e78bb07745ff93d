//! What reads words as characters: convolutions along sequences with the largest value of each filter, and highway gates, forward and
//! backward. The definitions are [`crate::cpu::convolution`] and [`crate::cpu::highway`].
//!
//! Legend: W sequences (words), N rows (their characters) of D columns, F filters of width K in a bank.
//!
//! A window of K rows is laid out as one row of K·D numbers, for the widest bank alone: those of the others are the beginnings of the same
//! rows. A bank is one product of windows and filters, over so many rows at a time that its results stay small.

use crate::cpu::activation::Activation;

use super::compile::Source;
use super::error::Result;
use super::gpu::{Argument, DType, EVENS, Gpu, Launch, Purpose, STORES, View, even, store};
use super::matmul::{Finish, Matrix, product};
use super::reduce::Sum;

/// All of it.
pub static SOURCE: Source =
    Source { name: "characters.cu", text: include_str!("kernels/characters.cu"), variants: &[&[STORES, EVENS]] };

/// Banks at most.
pub const MOST_BANKS: usize = 32;

/// Bytes of a block of products.
const BLOCK: usize = 64 << 20;

/// Chunks of words that sums are taken over, at most, and the words of a chunk at least.
const CHUNKS: usize = 16;
const LEAST_WORDS: usize = 32;

/// Filters of one width.
#[derive(Clone, Copy, Debug)]
pub struct Bank<'a> {
    /// K.
    pub width: usize,
    /// F×K·D: for each filter the numbers of its first row, then those of the second, …
    pub weight: View<'a>,
    /// F, in f32.
    pub bias: View<'a>,
}

/// Where the gradients of a bank go.
#[derive(Clone, Copy, Debug)]
pub struct BankGradients<'a> {
    /// F×K·D, in f32.
    pub weight: Sum<'a>,
    /// F, in f32.
    pub bias: Sum<'a>,
}

/// `struct Banks` of characters.cu.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct Banks {
    weights: [u64; MOST_BANKS],
    biases: [u64; MOST_BANKS],
    dweights: [u64; MOST_BANKS],
    dbiases: [u64; MOST_BANKS],
    widths: [u32; MOST_BANKS],
    firsts: [u32; MOST_BANKS],
    places: [u32; MOST_BANKS],
    add_weights: u32,
    add_biases: u32,
    count: u32,
    columns: u32,
    d: u32,
    sums: u32,
}

// SAFETY: `struct Banks` has the same fields in the same order.
unsafe impl Argument for Banks {}

impl Banks {
    /// What kernels take of the banks, whose sizes are right.
    fn new(banks: &[Bank<'_>], d: usize, dtype: DType) -> Self {
        assert!(!banks.is_empty() && banks.len() <= MOST_BANKS, "convolution: {} banks", banks.len());
        let mut all = Self { count: banks.len() as u32, d: d as u32, ..Self::default() };
        for (i, bank) in banks.iter().enumerate() {
            let (filters, size) = (bank.bias.len(), bank.width * d);
            assert!(size > 0, "convolution: windows of no numbers");
            bank.weight.expect("convolution", "a filter's weight", filters * size, dtype);
            bank.bias.expect("convolution", "a filter's bias", filters, DType::F32);
            (all.weights[i], all.biases[i]) = (bank.weight.address(), bank.bias.address());
            (all.widths[i], all.firsts[i], all.places[i]) = (bank.width as u32, all.columns, all.sums);
            all.columns += filters as u32;
            all.sums += (filters * (size + 1)) as u32;
        }
        all
    }
}

fn number(activation: Activation) -> u32 {
    match activation {
        Activation::None => 0,
        Activation::Relu => 1,
        Activation::Tanh => 2,
        other => panic!("convolution: {other:?} is not known by its value"),
    }
}

/// The banks' outputs side by side: `out` is W×ΣF, and `at` (u32) the rows at which the windows begin that gave them.
///
/// The activation is none, ReLU or tanh. A sequence that is shorter than a filter gets NaN and is a fault. Offsets are a layout's.
pub fn forward(
    gpu: &Gpu,
    (x, d): (View<'_>, usize),
    offsets: View<'_>,
    banks: &[Bank<'_>],
    activation: Activation,
    out: View<'_>,
    at: View<'_>,
) -> Result<()> {
    let (dtype, rows, all) = (x.dtype(), x.rows("convolution", d), Banks::new(banks, d, x.dtype()));
    let (words, columns) = (offsets.len().saturating_sub(1), all.columns as usize);
    offsets.expect("convolution", "the offsets", words + 1, DType::U32);
    out.expect("convolution", "the output", words * columns, dtype);
    at.expect("convolution", "the windows", words * columns, DType::U32);
    if rows == 0 || words == 0 || columns == 0 {
        return Ok(());
    }
    let widest = banks.iter().map(|bank| bank.width).max().unwrap_or(0) * d;
    let stride = widest.next_multiple_of(8);
    let block = (BLOCK / (4 * columns)).clamp(1, rows);
    let (unfolded_len, sums_len) = (block * stride, block * columns);
    let aligned = |bytes: usize| bytes.next_multiple_of(256);
    let parts = [unfolded_len * dtype.size(), sums_len * 4, if block < rows { words * columns * 4 } else { 0 }];
    let scratch = gpu.scratch(Purpose::Convolution, parts.iter().map(|bytes| aligned(*bytes)).sum())?;
    let sums_at = scratch + aligned(parts[0]) as u64;
    let running = sums_at + aligned(parts[1]) as u64;
    // SAFETY: parts of the work space that was just asked for.
    let (unfolded, sums) =
        unsafe { (View::new(scratch, unfolded_len, dtype), View::new(sums_at, sums_len, DType::F32)) };
    let variant = [store(dtype), even(d, &[x])];
    for first in (0..rows).step_by(block) {
        let now = block.min(rows - first);
        let sizes = [first, now, rows, d, widest, stride].map(|size| size as u32);
        let launch = Launch::new((now * widest.div_ceil(8)).div_ceil(256), 256);
        // SAFETY: as many rows of `stride` numbers as there is room for; the kernel reads nothing behind the end of x.
        unsafe {
            let (x, to, [first, now, rows, d, widest, stride]) = (x.address(), unfolded.address(), sizes);
            let arguments: [&dyn Argument; 8] = [&x, &to, &first, &now, &rows, &d, &widest, &stride];
            gpu.launch(&SOURCE, &variant, "unfold", launch, &arguments)?;
        }
        let mut column = 0;
        for bank in banks {
            let (filters, size) = (bank.bias.len(), bank.width * d);
            if filters > 0 {
                let windows = Matrix::strided(unfolded, now, size, stride);
                let weight = Matrix::new(bank.weight, filters, size).transposed();
                let to = Matrix::strided(sums.part(column, sums.len() - column), now, filters, columns);
                product(gpu, windows, weight, to, Finish::default())?;
            }
            column += filters;
        }
        let launch = Launch { grid: (words as u32, columns.div_ceil(128) as u32), threads: 128, shared: 0 };
        let (offsets, out, at) = (offsets.address(), out.address(), at.address());
        let (sums, activation, fault) = (sums.address(), number(activation), gpu.fault());
        // SAFETY: W×ΣF numbers each; offsets are the caller's promise.
        unsafe {
            let arguments: [&dyn Argument; 10] =
                [&all, &sums, &offsets, &sizes[0], &sizes[1], &running, &out, &at, &activation, &fault];
            gpu.launch(&SOURCE, &variant, "largest", launch, &arguments)?;
        }
    }
    Ok(())
}

/// Writes the gradient of x where it is wanted, and gives those of the banks; `y` and `at` are what [`forward`] gave.
pub fn backward(
    gpu: &Gpu,
    (x, d): (View<'_>, usize),
    offsets: View<'_>,
    banks: &[Bank<'_>],
    activation: Activation,
    (y, at): (View<'_>, View<'_>),
    dy: View<'_>,
    dx: Option<View<'_>>,
    gradients: &[BankGradients<'_>],
) -> Result<()> {
    let (dtype, rows, mut all) = (x.dtype(), x.rows("convolution", d), Banks::new(banks, d, x.dtype()));
    let (words, columns) = (offsets.len().saturating_sub(1), all.columns as usize);
    offsets.expect("convolution", "the offsets", words + 1, DType::U32);
    y.expect("convolution", "the output", words * columns, dtype);
    dy.expect("convolution", "the gradient", words * columns, dtype);
    at.expect("convolution", "the windows", words * columns, DType::U32);
    assert!(gradients.len() == banks.len(), "convolution: gradients of other banks");
    for (i, (bank, to)) in banks.iter().zip(gradients).enumerate() {
        to.weight.to.expect("convolution", "a weight's gradient", bank.weight.len(), DType::F32);
        to.bias.to.expect("convolution", "a bias' gradient", bank.bias.len(), DType::F32);
        (all.dweights[i], all.dbiases[i]) = (to.weight.to.address(), to.bias.to.address());
        all.add_weights |= u32::from(to.weight.add) << i;
        all.add_biases |= u32::from(to.bias.add) << i;
    }
    let chunk = words.div_ceil(CHUNKS).max(LEAST_WORDS);
    let chunks = words.div_ceil(chunk);
    let slopes_bytes = (words * columns * 4).next_multiple_of(256);
    let slopes = gpu.scratch(Purpose::Convolution, slopes_bytes + chunks * all.sums as usize * 4)?;
    let partial = slopes + slopes_bytes as u64;
    let variant = [store(dtype), even(d, &[x])];
    let (n, activation) = ((words * columns) as u64, number(activation));
    let (x, at, offsets) = (x.address(), at.address(), offsets.address());
    let (words_now, chunk, count) = (words as u32, chunk as u32, chunks as u32);
    // SAFETY: W×ΣF numbers each; windows are those that the forward found.
    unsafe {
        let launch = Launch::new((n as usize).div_ceil(1024).min(4096), 256);
        let arguments: [&dyn Argument; 5] = [&y.address(), &dy.address(), &slopes, &n, &activation];
        gpu.launch(&SOURCE, &variant, "slopes", launch, &arguments)?;
        // Without words, what is written over gets zeros.
        let launch = Launch { grid: (columns.div_ceil(8) as u32, count), threads: 256, shared: 0 };
        let arguments: [&dyn Argument; 7] = [&all, &x, &slopes, &at, &partial, &words_now, &chunk];
        gpu.launch(&SOURCE, &variant, "weight_sums", launch, &arguments)?;
        let launch = Launch::new((all.sums as usize).div_ceil(256), 256);
        gpu.launch(&SOURCE, &variant, "weight_finish", launch, &[&all, &partial, &count])?;
    }
    let Some(dx) = dx else { return Ok(()) };
    dx.expect("convolution", "the input's gradient", rows * d, dtype);
    let launch = Launch::new(words + 1, 256);
    // SAFETY: as above; N×D numbers go out.
    unsafe {
        let arguments: [&dyn Argument; 7] = [&all, &slopes, &at, &offsets, &dx.address(), &words_now, &(rows as u32)];
        gpu.launch(&SOURCE, &variant, "input_sums", launch, &arguments)
    }
}

/// σ(g)∘relu(t) + (1 − σ(g))∘x: z (T×2H: t and g), x (T×H) → T×H.
pub fn highway(gpu: &Gpu, z: View<'_>, x: View<'_>, h: usize, out: View<'_>) -> Result<()> {
    let rows = check_highway(z, x, h);
    out.expect("highway", "the output", rows * h, x.dtype());
    let (variant, sizes) = ([store(x.dtype()), even(h, &[z, x, out])], (rows as u32, h as u32));
    // SAFETY: rows of 2h and of h numbers.
    unsafe {
        let arguments: [&dyn Argument; 5] = [&z.address(), &x.address(), &out.address(), &sizes.0, &sizes.1];
        gpu.launch(&SOURCE, &variant, "highway", units(rows, h), &arguments)
    }
}

/// Writes the gradients with respect to z and x.
pub fn highway_backward(
    gpu: &Gpu,
    z: View<'_>,
    x: View<'_>,
    h: usize,
    dy: View<'_>,
    dz: View<'_>,
    dx: View<'_>,
) -> Result<()> {
    let rows = check_highway(z, x, h);
    dy.expect("highway", "the gradient", rows * h, x.dtype());
    dz.expect("highway", "the gates' gradient", z.len(), x.dtype());
    dx.expect("highway", "the input's gradient", x.len(), x.dtype());
    let (variant, sizes) = ([store(x.dtype()), even(h, &[z, x, dy, dz, dx])], (rows as u32, h as u32));
    // SAFETY: as above.
    unsafe {
        let (z, x, dy, dz, dx) = (z.address(), x.address(), dy.address(), dz.address(), dx.address());
        let arguments: [&dyn Argument; 7] = [&z, &x, &dy, &dz, &dx, &sizes.0, &sizes.1];
        gpu.launch(&SOURCE, &variant, "highway_backward", units(rows, h), &arguments)
    }
}

/// T.
fn check_highway(z: View<'_>, x: View<'_>, h: usize) -> usize {
    let rows = x.rows("highway", h);
    z.expect("highway", "the gates", 2 * rows * h, x.dtype());
    rows
}

/// A thread for each eight columns of a row.
fn units(rows: usize, h: usize) -> Launch {
    Launch::new((rows * h.div_ceil(8)).div_ceil(256), 256)
}
