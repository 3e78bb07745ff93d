//! What is done with whole rows of a T×H matrix: picking, adding back, dropout, pooling over sequences, and the plain
//! passes over any numbers. The definition is [`crate::cpu::rows`].

use crate::cpu::activation::Activation;

use super::activation::{self, STRIPS, aligned, blocks};
use super::compile::Source;
use super::error::Result;
use super::gpu::{Argument, DType, Dropout, EVENS, Gpu, Launch, Native, Purpose, STORES, View, even, store};
use super::reduce::{self, Strips, Sum};

/// Picking, adding back, pooling.
pub static SOURCE: Source =
    Source { name: "rows.cu", text: include_str!("kernels/rows.cu"), variants: &[&[STORES, OUTS, EVENS]] };

/// Sorting of indices.
pub static SORT: Source = Source { name: "sort.cu", text: include_str!("kernels/sort.cu"), variants: &[&[]] };

const OUTS: &[&str] = &["OUT=float", "OUT=bf16"];

fn variant(x: View<'_>, out: View<'_>, h: usize) -> [&'static str; 3] {
    [store(x.dtype()), OUTS[usize::from(out.dtype() == DType::Bf16)], even(h, &[x, out])]
}

/// Warps of a block where each has a row.
const WARPS: usize = 4;

/// A warp for each row.
pub(crate) fn warps(rows: usize) -> Launch {
    Launch::new(rows.div_ceil(WARPS), WARPS * 32)
}

/// A row that stands for nothing: what fills rows up to the number that a graph was recorded with.
pub const NOWHERE: u32 = u32::MAX;

/// Row i of `out` becomes row `rows[i]` of `x`, in the dtype of `out`; zeros where that is [`NOWHERE`]. Rows have `h` columns.
pub fn gather(gpu: &Gpu, x: View<'_>, h: usize, rows: View<'_>, out: View<'_>) -> Result<()> {
    rows.expect("gather", "the rows", out.rows("gather", h), DType::U32);
    let variant = variant(x, out, h);
    let (count, limit, h) = (rows.len() as u32, x.rows("gather", h) as u32, h as u32);
    // SAFETY: the kernel checks rows against the limit.
    unsafe {
        let (x, rows, out) = (x.address(), rows.address(), out.address());
        let arguments: [&dyn Argument; 7] = [&x, &rows, &out, &count, &limit, &h, &gpu.fault()];
        gpu.launch(&SOURCE, &variant, "gather", warps(count as usize), &arguments)
    }
}

/// Row i of `dy` is added to row `rows[i]` of `dx`, or written over it, with zeros in all rows that are not named: the
/// gradient of [`gather`] where no row but [`NOWHERE`] is named twice, as it is with predicted tokens.
///
/// Of a row that is named twice, one of the two would be lost: use [`scatter_add`] there.
pub fn scatter_distinct(
    gpu: &Gpu,
    dy: View<'_>,
    h: usize,
    rows: View<'_>,
    dx: View<'_>,
    zero_first: bool,
) -> Result<()> {
    if zero_first {
        gpu.fill_zero(dx)?;
    }
    scatter(gpu, dy, h, rows, dx, !zero_first)
}

/// Row `rows[i]` of `to` becomes row i of `x`, in the dtype of `to`; the others stay as they are. No row but [`NOWHERE`] is named twice.
pub fn put(gpu: &Gpu, x: View<'_>, h: usize, rows: View<'_>, to: View<'_>) -> Result<()> {
    scatter(gpu, x, h, rows, to, false)
}

fn scatter(gpu: &Gpu, dy: View<'_>, h: usize, rows: View<'_>, dx: View<'_>, add: bool) -> Result<()> {
    rows.expect("scatter", "the rows", dy.rows("scatter", h), DType::U32);
    let variant = variant(dy, dx, h);
    let (count, limit, h) = (rows.len() as u32, dx.rows("scatter", h) as u32, h as u32);
    // SAFETY: the kernel checks rows against the limit.
    unsafe {
        let (dy, rows, dx, add) = (dy.address(), rows.address(), dx.address(), u32::from(add));
        let arguments: [&dyn Argument; 8] = [&dy, &rows, &dx, &count, &limit, &h, &add, &gpu.fault()];
        gpu.launch(&SOURCE, &variant, "scatter", warps(count as usize), &arguments)
    }
}

/// Room for indices in ascending order and the places that they come from; equal ones in the order of their places.
#[derive(Clone, Copy, Debug)]
pub struct Sorted<'a> {
    /// The indices, ascending (u32).
    pub keys: View<'a>,
    /// Where each of them stood (u32).
    pub order: View<'a>,
}

/// Keys of a block of sort.cu.
const TILE: usize = 8 * 8 * 32;

/// Sorts indices below `limit` into `sorted`, then those that are [`NOWHERE`]. Any other stands somewhere among them, and
/// [`scatter_add`] reports it.
pub fn sort(gpu: &Gpu, indices: View<'_>, limit: usize, sorted: Sorted<'_>) -> Result<()> {
    let n = indices.len();
    indices.expect("sort", "the indices", n, DType::U32);
    sorted.keys.expect("sort", "the keys", n, DType::U32);
    sorted.order.expect("sort", "the order", n, DType::U32);
    if n == 0 {
        return Ok(());
    }
    // Eight bits a pass, and so many that nowhere, all of whose bits are set, comes after the last index.
    let passes = (usize::BITS - limit.leading_zeros()).div_ceil(8).max(1) as usize;
    let tiles = n.div_ceil(TILE);
    let counts = 256 * tiles;
    let scratch = gpu.scratch(Purpose::Sort, (counts + 2 * n) * 4)?;
    let spare = [scratch + (counts * 4) as u64, scratch + ((counts + n) * 4) as u64];
    let own = [sorted.keys.address(), sorted.order.address()];
    let (mut keys, mut order) = (indices.address(), 0u64);
    for pass in 0..passes {
        // The last pass writes to `sorted`, the one before to the spare room, and so on.
        let to = if (passes - 1 - pass).is_multiple_of(2) { own } else { spare };
        let (count, shift) = (n as u32, 8 * pass as u32);
        let launch = Launch::new(tiles, 256);
        // SAFETY: n indices on each side, 256 counts a tile; no pass writes what it reads.
        unsafe {
            gpu.launch(&SORT, &[], "histogram", launch, &[&keys, &scratch, &count, &shift])?;
            gpu.launch(&SORT, &[], "exclusive_sums", Launch::new(1, 1024), &[&scratch, &(counts as u32)])?;
            gpu.launch(&SORT, &[], "reorder", launch, &[&keys, &order, &scratch, &to[0], &to[1], &count, &shift])?;
        }
        [keys, order] = to;
    }
    Ok(())
}

/// Sorted indices that a block of `scatter_chunks` takes.
const CHUNK: usize = 32;

/// Row i of `dy` is added to row `rows[i]` of `dx`, which is zeroed first on demand; `sorted` holds those rows.
///
/// Rows may repeat. Their sum is taken in f32 in the order of `rows`, in pieces with fixed borders, and rounded once. Those that
/// are [`NOWHERE`] are added to nothing.
pub fn scatter_add(
    gpu: &Gpu,
    dy: View<'_>,
    h: usize,
    sorted: Sorted<'_>,
    dx: View<'_>,
    zero_first: bool,
) -> Result<()> {
    sorted.keys.expect("scatter_add", "the rows", dy.rows("scatter_add", h), DType::U32);
    if zero_first {
        gpu.fill_zero(dx)?;
    }
    let (count, limit) = (sorted.keys.len(), dx.rows("scatter_add", h) as u32);
    let chunks = count.div_ceil(CHUNK);
    let partial = gpu.scratch(Purpose::Sums, chunks * 2 * h * 4)?;
    let variant = variant(dy, dx, h);
    let (threads, strips) = columns(h);
    let launch = Launch { grid: (chunks as u32, strips), threads, shared: 0 };
    let (count, h) = (count as u32, h as u32);
    // SAFETY: places are below the count since `sort` made them, the kernel checks keys against the limit, and there is room
    // for two rows of sums a chunk.
    unsafe {
        let (keys, order) = (sorted.keys.address(), sorted.order.address());
        let (dy, dx, fault) = (dy.address(), dx.address(), gpu.fault());
        let arguments: [&dyn Argument; 9] = [&dy, &keys, &order, &dx, &partial, &count, &limit, &h, &fault];
        gpu.launch(&SOURCE, &variant, "scatter_chunks", launch, &arguments)?;
        let launch = Launch { grid: (chunks as u32, h.div_ceil(256)), threads: 256, shared: 0 };
        let arguments: [&dyn Argument; 7] = [&keys, &partial, &dx, &count, &limit, &h, &fault];
        gpu.launch(&SOURCE, &variant, "scatter_runs", launch, &arguments)
    }
}

/// Row p of `out` (f32) gets the sum of the rows of `dy` at place p of all sequences that are so long, added or written over:
/// the gradient of a table of positions, without sorting them. Offsets come from a layout: they ascend and end within dy.
pub fn add_places(gpu: &Gpu, dy: View<'_>, h: usize, offsets: View<'_>, out: Sum<'_>) -> Result<()> {
    let places = out.to.rows("add_places", h);
    offsets.expect("add_places", "the offsets", offsets.len(), DType::U32);
    let _ = dy.rows("add_places", h);
    let launch = Launch { grid: (places as u32, h.div_ceil(256) as u32), threads: 256, shared: 0 };
    let sizes = (offsets.len().saturating_sub(1) as u32, h as u32, u32::from(out.add));
    // SAFETY: places×h numbers go out; offsets are the caller's promise.
    unsafe {
        let (from, offsets, to) = (dy.address(), offsets.address(), out.to.address());
        let arguments: [&dyn Argument; 6] = [&from, &offsets, &to, &sizes.0, &sizes.1, &sizes.2];
        gpu.launch(&SOURCE, &variant(dy, out.to, h), "add_places", launch, &arguments)
    }
}

/// (threads, blocks) that cover h columns, eight a thread.
fn columns(h: usize) -> (u32, u32) {
    let threads = h.div_ceil(8).next_multiple_of(32).min(128);
    (threads as u32, h.div_ceil(threads * 8) as u32)
}

/// Dropout of rows in place; `ids` is T×2: sequence and position of each. It is its own backward.
pub fn drop(gpu: &Gpu, x: View<'_>, h: usize, dropout: Dropout<'_>, ids: View<'_>) -> Result<()> {
    let rows = x.rows("drop", h);
    ids.expect("drop", "the rows' places", 2 * rows, DType::U32);
    let strips = Strips::short(h, rows);
    let variant = [store(x.dtype()), even(h, &[x])];
    // SAFETY: rows×h numbers.
    unsafe {
        let sizes = (rows as u32, h as u32, strips.chunk);
        let arguments: [&dyn Argument; 6] = [&x.address(), &dropout, &ids.address(), &sizes.0, &sizes.1, &sizes.2];
        gpu.launch(&STRIPS, &variant, "drop", strips.launch(), &arguments)
    }
}

/// Row i of `out` becomes the mean of the rows `offsets[i]..offsets[i + 1]` of `x`; zeros where there are none.
pub fn segment_mean(gpu: &Gpu, x: View<'_>, h: usize, offsets: View<'_>, out: View<'_>) -> Result<()> {
    pool(gpu, x, h, offsets, out, false)
}

/// Row i of `out` becomes the largest of the rows `offsets[i]..offsets[i + 1]` of `x`, column by column; zeros where
/// there are none, NaN where one of the numbers is a NaN or infinite.
pub fn segment_max(gpu: &Gpu, x: View<'_>, h: usize, offsets: View<'_>, out: View<'_>) -> Result<()> {
    pool(gpu, x, h, offsets, out, true)
}

/// Offsets come from a layout, which checked them: they ascend and end within x.
fn pool(gpu: &Gpu, x: View<'_>, h: usize, offsets: View<'_>, out: View<'_>, largest: bool) -> Result<()> {
    let segments = out.rows("pooling", h);
    offsets.expect("pooling", "the offsets", segments + 1, DType::U32);
    let _ = x.rows("pooling", h);
    let (threads, strips) = columns(h);
    let launch = Launch { grid: (segments as u32, strips), threads, shared: 0 };
    let variant = variant(x, out, h);
    // SAFETY: segments×h numbers go out; offsets are the caller's promise.
    unsafe {
        let (x, offsets, out) = (x.address(), offsets.address(), out.address());
        let (h, largest) = (h as u32, u32::from(largest));
        gpu.launch(&SOURCE, &variant, "pool", launch, &[&x, &offsets, &out, &h, &largest])
    }
}

/// The gradient of [`segment_mean`]: every row of sequence i gets row i of `dy`, divided by how many there are. It is added to
/// `dx`, or written over it, with zeros in the rows after the last sequence. Offsets are a layout's, and begin with 0.
pub fn segment_mean_gradient(
    gpu: &Gpu,
    dy: View<'_>,
    h: usize,
    offsets: View<'_>,
    dx: View<'_>,
    zero_first: bool,
) -> Result<()> {
    let (segments, tokens) = (dy.rows("pooling's gradient", h), dx.rows("pooling's gradient", h));
    offsets.expect("pooling's gradient", "the offsets", segments + 1, DType::U32);
    let (threads, strips) = columns(h);
    // One block more for the rows that belong to no sequence.
    let launch = Launch { grid: (segments as u32 + 1, strips), threads, shared: 0 };
    let sizes = (segments as u32, tokens as u32, h as u32, u32::from(!zero_first));
    // SAFETY: tokens×h numbers; offsets are the caller's promise.
    unsafe {
        let (from, offsets, to) = (dy.address(), offsets.address(), dx.address());
        let arguments: [&dyn Argument; 7] = [&from, &offsets, &to, &sizes.0, &sizes.1, &sizes.2, &sizes.3];
        gpu.launch(&SOURCE, &variant(dy, dx, h), "spread", launch, &arguments)
    }
}

/// The gradient of [`segment_max`] at `x`: in each column the first of a sequence's largest gets that of the sequence. It is added to `dx`,
/// or written over it, with zeros everywhere else. Offsets are a layout's, and begin with 0.
pub fn segment_max_gradient(
    gpu: &Gpu,
    x: View<'_>,
    dy: View<'_>,
    h: usize,
    offsets: View<'_>,
    dx: View<'_>,
    zero_first: bool,
) -> Result<()> {
    let (segments, tokens) = (dy.rows("pooling's gradient", h), dx.rows("pooling's gradient", h));
    x.expect("pooling's gradient", "the input", dx.len(), dx.dtype());
    offsets.expect("pooling's gradient", "the offsets", segments + 1, DType::U32);
    let (threads, strips) = columns(h);
    // One block more for the rows that belong to no sequence.
    let launch = Launch { grid: (segments as u32 + 1, strips), threads, shared: 0 };
    let sizes = (segments as u32, tokens as u32, h as u32, u32::from(!zero_first));
    let variant = [variant(dy, dx, h)[0], variant(dy, dx, h)[1], even(h, &[x, dy, dx])];
    // SAFETY: tokens×h numbers; offsets are the caller's promise.
    unsafe {
        let (x, from, offsets, to) = (x.address(), dy.address(), offsets.address(), dx.address());
        let arguments: [&dyn Argument; 8] = [&x, &from, &offsets, &to, &sizes.0, &sizes.1, &sizes.2, &sizes.3];
        gpu.launch(&SOURCE, &variant, "largest_gradient", launch, &arguments)
    }
}

/// Some columns of a matrix: `count` of them from `first` on, of rows that are `stride` numbers apart.
#[derive(Clone, Copy, Debug)]
pub struct Columns {
    /// The first of them.
    pub first: usize,
    /// How many.
    pub count: usize,
    /// All of a row.
    pub stride: usize,
}

impl Columns {
    /// A whole matrix of so many columns.
    pub fn all(count: usize) -> Self {
        Self { first: 0, count, stride: count }
    }
}

/// Columns of `x` become as many columns of `out`, row by row; the others stay as they are.
pub fn copy_columns(gpu: &Gpu, x: View<'_>, from: Columns, out: View<'_>, to: Columns) -> Result<()> {
    let rows = out.rows("columns", to.stride);
    assert!(x.rows("columns", from.stride) == rows && from.count == to.count, "columns: sizes differ");
    assert!(from.first + from.count <= from.stride && to.first + to.count <= to.stride, "columns: outside of the rows");
    if rows == 0 || from.count == 0 {
        return Ok(());
    }
    let (x, out) = (x.part(from.first, x.len() - from.first), out.part(to.first, out.len() - to.first));
    // All are multiples of eight where none has a lower bit.
    let variant = variant(x, out, from.count | from.stride | to.stride);
    let sizes = (from.stride as u32, to.stride as u32, rows as u32, from.count as u32);
    let launch = Launch::new((rows * from.count.div_ceil(8)).div_ceil(128), 128);
    // SAFETY: rows and columns lie within both, as was checked.
    unsafe {
        let arguments: [&dyn Argument; 6] = [&x.address(), &sizes.0, &out.address(), &sizes.1, &sizes.2, &sizes.3];
        gpu.launch(&SOURCE, &variant, "copy_columns", launch, &arguments)
    }
}

/// Rows for [`drop`] (T×2) at which a sequence's tokens are one: the numbers of their sequences, as `tokens` (T×2) has them, and place 0.
pub fn sequence_rows(gpu: &Gpu, tokens: View<'_>, out: View<'_>) -> Result<()> {
    tokens.expect("sequence_rows", "the tokens", out.len(), DType::U32);
    out.expect("sequence_rows", "the rows", tokens.len() / 2 * 2, DType::U32);
    let count = (out.len() / 2) as u32;
    let launch = Launch::new((count as usize).div_ceil(256), 256);
    let variant = [STORES[0], OUTS[0], EVENS[0]];
    // SAFETY: pairs of numbers, as many in both.
    unsafe { gpu.launch(&SOURCE, &variant, "sequence_rows", launch, &[&tokens.address(), &out.address(), &count]) }
}

/// The most rows of a table for [`add_kinds`].
pub const MOST_KINDS: usize = 3;

/// Row k of `out` (f32, [`MOST_KINDS`] rows at the most) gets the sum of the rows of `dy` whose number in `kinds` is k, added or
/// written over: the gradient of a table of segments, without sorting them. A kind outside of the table is a fault.
pub fn add_kinds(gpu: &Gpu, dy: View<'_>, h: usize, kinds: View<'_>, out: Sum<'_>) -> Result<()> {
    let (rows, count) = (dy.rows("add_kinds", h), out.to.rows("add_kinds", h));
    assert!(count <= MOST_KINDS, "add_kinds: {count} kinds");
    kinds.expect("add_kinds", "the kinds", rows, DType::U32);
    let strips = Strips::summed(gpu, h, rows);
    let partial = gpu.scratch(Purpose::Sums, strips.chunks() * count * h * 4)?;
    let variant = [store(dy.dtype()), even(h, &[dy])];
    // SAFETY: rows×h numbers, and count·h for each chunk of rows; the kernel checks kinds.
    unsafe {
        let sizes = (rows as u32, h as u32, strips.chunk, count as u32);
        let (from, kinds, fault) = (dy.address(), kinds.address(), gpu.fault());
        let arguments: [&dyn Argument; 8] = [&from, &kinds, &partial, &sizes.0, &sizes.1, &sizes.2, &sizes.3, &fault];
        gpu.launch(&STRIPS, &variant, "kind_sums", strips.launch(), &arguments)?;
    }
    let row = |k: usize| (k < count).then(|| Sum { to: out.to.part(k * h, h), add: out.add });
    reduce::finish_sets(gpu, partial, strips.chunks(), h, count, [row(0), row(1), row(2)])
}

/// Divides each row by its length √Σx², or by 10⁻¹² where that is larger, in place.
pub fn l2_normalise(gpu: &Gpu, x: View<'_>, h: usize) -> Result<()> {
    let rows = x.rows("l2_normalise", h);
    let (variant, sizes) = (variant(x, x, h), (rows as u32, h as u32));
    // SAFETY: rows×h numbers.
    unsafe { gpu.launch(&SOURCE, &variant, "l2_normalise", warps(rows), &[&x.address(), &sizes.0, &sizes.1]) }
}

/// The gradient of [`l2_normalise`] at `x`: what of `dy` stands at right angles to the row, divided by its length. It takes
/// the place of `dy`.
pub fn l2_normalise_gradient(gpu: &Gpu, x: View<'_>, dy: View<'_>, h: usize) -> Result<()> {
    dy.expect("l2_normalise's gradient", "the gradient", x.len(), x.dtype());
    let rows = x.rows("l2_normalise's gradient", h);
    let sizes = (rows as u32, h as u32);
    // SAFETY: rows×h numbers each.
    unsafe {
        let arguments: [&dyn Argument; 4] = [&x.address(), &dy.address(), &sizes.0, &sizes.1];
        gpu.launch(&SOURCE, &variant(x, dy, h), "l2_normalise_gradient", warps(rows), &arguments)
    }
}

/// y += x.
pub fn add(gpu: &Gpu, x: View<'_>, y: View<'_>) -> Result<()> {
    pass(gpu, "add", x, y)
}

/// y *= x.
pub fn multiply(gpu: &Gpu, x: View<'_>, y: View<'_>) -> Result<()> {
    pass(gpu, "multiply", x, y)
}

fn pass(gpu: &Gpu, kernel: &'static str, x: View<'_>, y: View<'_>) -> Result<()> {
    y.expect(kernel, "the result", x.len(), x.dtype());
    let (n, wide) = (x.len() as u64, aligned(&[x, y]));
    let arguments: [&dyn Argument; 4] = [&x.address(), &y.address(), &n, &wide];
    // SAFETY: both have n numbers.
    unsafe { gpu.launch(&activation::SOURCE, &[store(x.dtype())], kernel, blocks(x.len()), &arguments) }
}

/// y = factor·x.
pub fn scale(gpu: &Gpu, factor: f32, x: View<'_>, y: View<'_>) -> Result<()> {
    y.expect("scale", "the result", x.len(), x.dtype());
    let (n, wide) = (x.len() as u64, aligned(&[x, y]));
    let arguments: [&dyn Argument; 5] = [&x.address(), &y.address(), &n, &wide, &factor];
    // SAFETY: both have n numbers.
    unsafe { gpu.launch(&activation::SOURCE, &[store(x.dtype())], "scale", blocks(x.len()), &arguments) }
}

/// Adds a bias (f32 or the dtype of x) to every row, in place.
pub fn add_bias(gpu: &Gpu, x: View<'_>, bias: View<'_>) -> Result<()> {
    activation::forward(gpu, Activation::None, x, Some(bias), x)
}

/// Sets every number.
pub fn fill(gpu: &Gpu, x: View<'_>, value: f32) -> Result<()> {
    let _ = x.rows("fill", 1);
    let n = x.len() as u64;
    let launch = Launch::new(x.len().div_ceil(1024).min(16 * gpu.multiprocessors()), 256);
    // SAFETY: n numbers.
    unsafe { gpu.launch(&activation::SOURCE, &[store(x.dtype())], "fill", launch, &[&x.address(), &n, &value]) }
}

/// As kernels take them.
#[repr(C)]
struct Words([u32; 16]);

// SAFETY: `struct FewWords` of elementwise.cu has the same field.
unsafe impl Argument for Words {}

/// Sets up to 64 bytes, without waiting: they travel with the launch.
pub fn set<T: Native>(gpu: &Gpu, x: View<'_>, numbers: &[T]) -> Result<()> {
    x.expect("set", "the target", numbers.len(), T::DTYPE);
    let bytes: &[u8] = bytemuck::cast_slice(numbers);
    assert!(bytes.len() <= 64 && bytes.len().is_multiple_of(4), "set: {} bytes", bytes.len());
    let mut words = Words([0; 16]);
    bytemuck::cast_slice_mut(&mut words.0)[..bytes.len()].copy_from_slice(bytes);
    let count = (bytes.len() / 4) as u32;
    // SAFETY: the target has these words.
    unsafe { gpu.launch(&activation::SOURCE, &[STORES[0]], "set", Launch::new(1, 32), &[&x.address(), &words, &count]) }
}
