//! Sums and extremes over whole buffers: bias gradients, the gradient's norm, and whether all is finite. The definition is
//! [`crate::cpu::reduce`].
//!
//! Sums have two stages with fixed borders, so their bits are the same from run to run.

use crate::cpu::reduce::CHUNK;

use super::activation::STRIPS;
use super::compile::Source;
use super::error::Result;
use super::gpu::{Argument, DType, Gpu, Launch, Purpose, View, address, even, store};

/// Whole buffers.
pub static SOURCE: Source = Source { name: "reduce.cu", text: include_str!("kernels/reduce.cu"), variants: &[&[]] };

/// Where sums go: f32 numbers, and whether they are added to what is there or written over it.
#[derive(Clone, Copy, Debug)]
pub struct Sum<'a> {
    /// One number a column.
    pub to: View<'a>,
    /// Whether to add.
    pub add: bool,
}

impl<'a> Sum<'a> {
    /// Added to what is there.
    pub fn add(to: View<'a>) -> Self {
        Self { to, add: true }
    }
}

/// How strips.cu divides a matrix: strips of 256 columns, chunks of rows.
pub(crate) struct Strips {
    strips: usize,
    rows: usize,
    pub(crate) chunk: u32,
}

impl Strips {
    /// Short chunks, where nothing is summed.
    pub(crate) fn short(columns: usize, rows: usize) -> Self {
        // A grid has at most 65535 blocks in this direction.
        let chunk = 32.max(rows.div_ceil(65535).next_multiple_of(32)) as u32;
        Self { strips: columns.div_ceil(256), rows, chunk }
    }

    /// As many chunks as the GPU has room for at once, so that there are few sums to add.
    pub(crate) fn summed(gpu: &Gpu, columns: usize, rows: usize) -> Self {
        let strips = columns.div_ceil(256);
        let chunks = (gpu.multiprocessors() * 5 / strips).max(1);
        Self { strips, rows, chunk: rows.div_ceil(chunks).max(32).next_multiple_of(32) as u32 }
    }

    pub(crate) fn chunks(&self) -> usize {
        self.rows.div_ceil(self.chunk as usize)
    }

    pub(crate) fn launch(&self) -> Launch {
        Launch { grid: (self.strips as u32, self.chunks() as u32), threads: 256, shared: 0 }
    }

    /// Room for the sums of every chunk.
    pub(crate) fn partial(&self, gpu: &Gpu, columns: usize) -> Result<u64> {
        gpu.scratch(Purpose::Sums, self.chunks() * columns * 4)
    }
}

/// Adds up `chunks` rows of sums (h numbers for each vector that may be given) for the vectors.
pub(crate) fn finish(gpu: &Gpu, partial: u64, chunks: usize, h: usize, to: [Option<Sum<'_>>; 3]) -> Result<()> {
    let sets = to.iter().rposition(Option::is_some).map_or(0, |last| last + 1).max(1);
    finish_sets(gpu, partial, chunks, h, sets, to)
}

/// The same where the rows hold sums of `sets` vectors.
pub(crate) fn finish_sets(
    gpu: &Gpu,
    partial: u64,
    chunks: usize,
    h: usize,
    sets: usize,
    to: [Option<Sum<'_>>; 3],
) -> Result<()> {
    for sum in to.iter().flatten() {
        sum.to.expect("column_sums", "the sums", h, DType::F32);
    }
    let columns = sets * h;
    let [a, b, c] = to.map(|sum| address(sum.map(|sum| sum.to)));
    let add =
        to.iter().enumerate().filter(|(_, sum)| sum.is_some_and(|sum| sum.add)).map(|(i, _)| 1u32 << i).sum::<u32>();
    let launch = Launch::new(columns.div_ceil(32), 256);
    // SAFETY: the kernel before wrote chunks×columns sums, and each vector has h numbers.
    unsafe {
        let sizes = (chunks as u32, columns as u32, h as u32);
        gpu.launch(&SOURCE, &[], "finish", launch, &[&partial, &sizes.0, &sizes.1, &sizes.2, &a, &b, &c, &add])
    }
}

/// Each column's sum over the rows of `x` (T×H): the gradient of a bias.
pub fn column_sums(gpu: &Gpu, x: View<'_>, out: Sum<'_>) -> Result<()> {
    let h = out.to.len();
    if h == 0 {
        return Ok(());
    }
    if x.is_empty() {
        if !out.add {
            gpu.fill_zero(out.to)?;
        }
        return Ok(());
    }
    let rows = x.rows("column_sums", h);
    let strips = Strips::summed(gpu, h, rows);
    let partial = strips.partial(gpu, h)?;
    let variant = [store(x.dtype()), even(h, &[x])];
    // SAFETY: rows×h numbers, and h for each chunk of rows.
    unsafe {
        let sizes = (rows as u32, h as u32, strips.chunk);
        let arguments: [&dyn Argument; 5] = [&x.address(), &partial, &sizes.0, &sizes.1, &sizes.2];
        gpu.launch(&STRIPS, &variant, "column_sums", strips.launch(), &arguments)?;
    }
    finish(gpu, partial, strips.chunks(), h, [Some(out), None, None])
}

/// (blocks, elements of each) that a whole buffer is divided into: many for all multiprocessors, and multiples of four.
fn ranges(n: usize) -> (usize, usize) {
    let range = n.div_ceil(1024).max(4096).next_multiple_of(4);
    (n.div_ceil(range), range)
}

/// `out` (one f64) becomes Σ x² of f32 numbers; not finite where a square is not.
pub fn sum_of_squares(gpu: &Gpu, x: View<'_>, out: View<'_>) -> Result<()> {
    let chunks = x.len().div_ceil(CHUNK);
    // SAFETY: just asked for, with this many numbers.
    let sums = unsafe { View::new(gpu.scratch(Purpose::Sums, chunks * 8)?, chunks, DType::F64) };
    squares_of_chunks(gpu, x, sums)?;
    add_squares(gpu, sums, out)
}

/// The same for each chunk of `x` ([`CHUNK`], as on the CPU), one f64 each: [`add_squares`] of them all is [`sum_of_squares`], whoever has
/// which chunks.
pub fn squares_of_chunks(gpu: &Gpu, x: View<'_>, out: View<'_>) -> Result<()> {
    x.expect("squares_of_chunks", "the input", x.len(), DType::F32);
    let chunks = x.len().div_ceil(CHUNK);
    out.expect("squares_of_chunks", "the sums", chunks, DType::F64);
    assert!(x.is_aligned(), "squares_of_chunks: the buffer does not begin at a multiple of 16 bytes");
    // SAFETY: n numbers, and one sum a block.
    unsafe {
        let (n, range) = (x.len() as u64, CHUNK as u64);
        let arguments: [&dyn Argument; 4] = [&x.address(), &n, &range, &out.address()];
        gpu.launch(&SOURCE, &[], "squares", Launch::new(chunks, 256), &arguments)
    }
}

/// `out` (one f64) becomes the sum of f64 numbers, in an order that depends on their number alone.
pub fn add_squares(gpu: &Gpu, sums: View<'_>, out: View<'_>) -> Result<()> {
    sums.expect("add_squares", "the input", sums.len(), DType::F64);
    out.expect("add_squares", "the sum", 1, DType::F64);
    // SAFETY: n numbers in, one out.
    unsafe {
        let arguments: [&dyn Argument; 3] = [&sums.address(), &(sums.len() as u32), &out.address()];
        gpu.launch(&SOURCE, &[], "add_squares", Launch::new(1, 1024), &arguments)
    }
}

/// The most ranks whose shards [`add_shards`] adds.
pub const MOST_RANKS: usize = 4096;

/// Adds what `size` ranks have of a shard, in the tree over their numbers ((0+1)+(2+3))+…, to `own`, which is that of number `rank`. The
/// others stand in `received` one after the other, in their order.
pub fn add_shards(gpu: &Gpu, own: View<'_>, received: View<'_>, rank: usize, size: usize) -> Result<()> {
    own.expect("add_shards", "the own shard", own.len(), DType::F32);
    received.expect("add_shards", "what was received", own.len() * (size - 1), DType::F32);
    assert!(rank < size && size <= MOST_RANKS, "add_shards: rank {rank} of {size}");
    // SAFETY: n numbers of each rank.
    unsafe {
        let (n, rank, size) = (own.len() as u64, rank as u32, size as u32);
        let arguments: [&dyn Argument; 5] = [&own.address(), &received.address(), &n, &rank, &size];
        gpu.launch(&SOURCE, &[], "add_shards", Launch::new(own.len().div_ceil(256), 256), &arguments)
    }
}

/// `out` (one f32) becomes the largest |x| of f32 numbers, 0 of none; NaN where an element is infinite or a NaN.
pub fn max_abs(gpu: &Gpu, x: View<'_>, out: View<'_>) -> Result<()> {
    x.expect("max_abs", "the input", x.len(), DType::F32);
    out.expect("max_abs", "the output", 1, DType::F32);
    let (blocks, range) = ranges(x.len());
    let partial = gpu.scratch(Purpose::Sums, blocks * 4)?;
    // SAFETY: n numbers, and one a block.
    unsafe {
        let (n, range) = (x.len() as u64, range as u64);
        gpu.launch(&SOURCE, &[], "largest", Launch::new(blocks, 256), &[&x.address(), &n, &range, &partial])?;
        gpu.launch(&SOURCE, &[], "largest_of_all", Launch::new(1, 1024), &[&partial, &(blocks as u32), &out.address()])
    }
}
