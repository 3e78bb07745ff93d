//! Matrix products of our own for Hopper, for what cuBLASLt does not have: BERT's erf form of GELU and the gates of gated layers, and
//! their derivatives, on the way out of a product. Without them a pass over a T×4H matrix follows each product of a feed-forward pair.
//!
//! They are no replacement for [`super::matmul`]: only bf16, only sizes that fit their tiles, only compute capability 9.0.
//! Elsewhere a plain product and [`super::activation`] do the same, but for rounding. What they keep for the backward differs with GELU:
//! those keep its input, these its derivative. With gates both keep the same, so that either backward goes with either forward.

use std::ffi::c_void;

use cudarc::driver::sys;

use super::activation::{ACTIVATIONS, definition};
use super::compile::Source;
use super::error::{Check, Result};
use super::gpu::{Argument, DType, Gpu, Launch, Purpose, View, address};
use super::reduce::{self, Sum};
use crate::cpu::activation::Activation;

/// The products.
pub static SOURCE: Source = Source {
    name: "product_hopper.cu",
    text: concat!(
        "#include \"common.cuh\"\n#include \"activation.cuh\"\n",
        include_str!("kernels/wgmma.cuh"),
        include_str!("kernels/pipeline.cuh"),
        include_str!("kernels/product_hopper.cu")
    ),
    variants: &[&[], &[ACTIVATIONS]],
};

/// The sizes of product_hopper.cu: a block's part of the result, what it adds up at a time, and how far ahead factors come.
const ROWS: usize = 128;
const COLUMNS: usize = 256;
/// Columns of each half of a gated layer in a tile, and rows of a tile of its gradient.
const GATE_COLUMNS: usize = 128;
const GATE_GRADIENT_ROWS: usize = 256;
const DEPTH: usize = 64;
const STAGES: usize = 3;
const THREADS: u32 = 640;
/// The ring of factors, a part of the result, sums of columns by eight warps, barriers.
const SHARED: usize = STAGES * (ROWS + COLUMNS) * DEPTH * 2 + ROWS * COLUMNS * 2 + 8 * COLUMNS * 4 + STAGES * 16;

/// Whether these products are for this GPU and an m×n result that k products are added up for.
pub fn fits(gpu: &Gpu, m: usize, n: usize, k: usize) -> bool {
    let parts = m.div_ceil(ROWS) * (n / COLUMNS);
    // With fewer parts than multiprocessors other ways to divide the work are better.
    let full = parts >= gpu.multiprocessors() && n / COLUMNS <= gpu.multiprocessors();
    gpu.capability() == (9, 0) && n.is_multiple_of(COLUMNS) && k.is_multiple_of(DEPTH) && k > 0 && full
}

/// y = gelu(x·weightᵀ + bias), and gelu′ of the same into `slope` where that is given; all bf16, sizes that [`fits`] says
/// yes to.
///
/// x is m×k, `weight` n×k, `bias` n, `slope` and y m×n.
#[track_caller]
pub fn gelu(
    gpu: &Gpu,
    x: View<'_>,
    weight: View<'_>,
    bias: View<'_>,
    slope: Option<View<'_>>,
    y: View<'_>,
) -> Result<()> {
    let sizes = Sizes::of(gpu, x, weight, slope, y, bias.len());
    bias.expect("product", "the bias", sizes.n, DType::Bf16);
    assert!(bias.is_aligned(), "product: the bias does not begin at a multiple of 16 bytes");
    let right = map(weight, (sizes.n, sizes.k), COLUMNS)?;
    sizes.launch(gpu, GELU, x, &right, [bias.address(), address(slope), y.address(), 0])
}

/// dz = dy·weight times `slope`, which [`gelu`] gave; `sums` gets the sums of its columns, the gradient of the bias. bf16
/// but for the sums, and sizes that [`fits`] says yes to.
///
/// dy is m×k, `weight` k×n, `slope` and dz m×n, `sums` n.
#[track_caller]
pub fn gelu_gradient(
    gpu: &Gpu,
    dy: View<'_>,
    weight: View<'_>,
    slope: View<'_>,
    dz: View<'_>,
    sums: Sum<'_>,
) -> Result<()> {
    let sizes = Sizes::of(gpu, dy, weight, Some(slope), dz, sums.to.len());
    let chunks = 2 * sizes.blocks(gpu);
    let partial = gpu.scratch(Purpose::Sums, chunks * sizes.n * 4)?;
    let right = map(weight, (sizes.k, sizes.n), DEPTH)?;
    sizes.launch(gpu, GELU_GRADIENT, dy, &right, [0, slope.address(), dz.address(), partial])?;
    reduce::finish(gpu, partial, chunks, sizes.n, [Some(sums), None, None])
}

/// Whether [`gate`] is for this GPU and an m×n result that k products are added up for.
pub fn fits_gate(gpu: &Gpu, m: usize, n: usize, k: usize) -> bool {
    gate_fits(gpu, [m, n, k], ROWS)
}

/// Whether [`gate_gradient`] is for this GPU and a gradient of an m×n result, which k products are added up for.
pub fn fits_gate_gradient(gpu: &Gpu, m: usize, n: usize, k: usize) -> bool {
    gate_fits(gpu, [m, n, k], GATE_GRADIENT_ROWS)
}

fn gate_fits(gpu: &Gpu, [m, n, k]: [usize; 3], rows: usize) -> bool {
    let full = m.div_ceil(rows) * (n / GATE_COLUMNS) >= gpu.multiprocessors();
    gpu.capability() == (9, 0) && n.is_multiple_of(GATE_COLUMNS) && k.is_multiple_of(DEPTH) && k > 0 && full
}

/// y = activation(x·gateᵀ + bias) ∘ (x·valueᵀ + bias), and both products without the bias into `kept` where that is given; all bf16,
/// sizes that [`fits_gate`] says yes to. What is kept is what [`super::activation::gate`] reads.
///
/// x is m×k, `weight` 2n×k (the gate's rows first), `bias` 2n, `kept` m×2n, y m×n.
#[track_caller]
pub fn gate(
    gpu: &Gpu,
    activation: Activation,
    x: View<'_>,
    weight: View<'_>,
    bias: Option<View<'_>>,
    n: usize,
    kept: Option<View<'_>>,
    y: View<'_>,
) -> Result<()> {
    let (m, k) = (y.rows("gated product", n), weight.rows("gated product", 2 * n));
    let sizes = Sizes { m, n, k };
    assert!(fits_gate(gpu, m, n, k), "gated product: {m}×{n}×{k} is not for this kernel");
    check("the input", x, m * k);
    check("the weights", weight, 2 * n * k);
    check("the output", y, m * n);
    if let Some(kept) = kept {
        check("what is kept", kept, m * 2 * n);
    }
    if let Some(bias) = bias {
        check("the bias", bias, 2 * n);
    }
    let right = map(weight, (2 * n, k), GATE_COLUMNS)?;
    let kernel = ("gate_product", Some(activation), ROWS);
    sizes.launch(gpu, kernel, x, &right, [address(bias), address(kept), y.address(), 0])
}

/// dz = the gradient of what [`gate`] kept, from dy·weight, that of its result. bf16, and sizes that [`fits_gate`] says yes to. `dz` may
/// be `kept`.
///
/// dy is m×k, `weight` k×n, `bias` 2n, `kept` and dz m×2n.
#[track_caller]
pub fn gate_gradient(
    gpu: &Gpu,
    activation: Activation,
    dy: View<'_>,
    weight: View<'_>,
    bias: Option<View<'_>>,
    n: usize,
    kept: View<'_>,
    dz: View<'_>,
) -> Result<()> {
    let (m, k) = (dz.rows("gated product", 2 * n), weight.rows("gated product", n));
    let sizes = Sizes { m, n, k };
    assert!(fits_gate_gradient(gpu, m, n, k), "gated product: {m}×{n}×{k} is not for this kernel");
    check("the gradient", dy, m * k);
    check("the weights", weight, n * k);
    check("what was kept", kept, m * 2 * n);
    check("the input's gradient", dz, m * 2 * n);
    if let Some(bias) = bias {
        check("the bias", bias, 2 * n);
    }
    let right = map(weight, (k, n), DEPTH)?;
    let kernel = ("gate_gradient_product", Some(activation), GATE_GRADIENT_ROWS);
    sizes.launch(gpu, kernel, dy, &right, [address(bias), kept.address(), dz.address(), 0])
}

#[track_caller]
fn check(what: &str, view: View<'_>, len: usize) {
    view.expect("gated product", what, len, DType::Bf16);
    assert!(view.is_aligned(), "gated product: {what} does not begin at a multiple of 16 bytes");
}

/// A kernel of product_hopper.cu, the activation that it is compiled for, and the rows of its tiles.
type Kernel = (&'static str, Option<Activation>, usize);

const GELU: Kernel = ("gelu_product", None, ROWS);
const GELU_GRADIENT: Kernel = ("gelu_gradient_product", None, ROWS);

/// Of a product that fits.
struct Sizes {
    m: usize,
    n: usize,
    k: usize,
}

impl Sizes {
    #[track_caller]
    fn of(gpu: &Gpu, left: View<'_>, right: View<'_>, slope: Option<View<'_>>, out: View<'_>, n: usize) -> Self {
        let m = out.rows("product", n);
        let k = left.rows("product", m);
        assert!(fits(gpu, m, n, k), "product: {m}×{n}×{k} is not for this kernel");
        for (what, view, len) in [
            ("the left factor", left, m * k),
            ("the right factor", right, n * k),
            ("the result", out, m * n),
            ("the slope", slope.unwrap_or(out), m * n),
        ] {
            view.expect("product", what, len, DType::Bf16);
            assert!(view.is_aligned(), "product: {what} does not begin at a multiple of 16 bytes");
        }
        Self { m, n, k }
    }

    /// Blocks that share each 256 columns: as many as there is room for at once.
    fn blocks(&self, gpu: &Gpu) -> usize {
        (gpu.multiprocessors() / (self.n / COLUMNS)).min(self.m.div_ceil(ROWS))
    }

    fn launch(
        &self,
        gpu: &Gpu,
        (kernel, gate, rows): Kernel,
        left: View<'_>,
        right: &Map,
        [bias, kept, out, sums]: [u64; 4],
    ) -> Result<()> {
        let left = map(left, (self.m, self.k), rows)?;
        let (m, n, k) = (self.m as u32, self.n as u32, self.k as u32);
        let arguments = Arguments { bias, kept, out, sums, m, n, k, unused: 0 };
        // A gate's tiles are dealt to all blocks in turn.
        let grid = match gate {
            Some(_) => gpu.multiprocessors(),
            None => self.blocks(gpu) * (self.n / COLUMNS),
        };
        let launch = Launch { grid: (grid as u32, 1), threads: THREADS, shared: SHARED as u32 };
        let variant = gate.map(definition);
        // SAFETY: all matrices have these sizes, and there are two rows of sums for each block of 256 columns with GELU.
        unsafe { gpu.launch(&SOURCE, variant.as_slice(), kernel, launch, &[&left, right, &arguments]) }
    }
}

/// `struct Arguments` of product_hopper.cu.
#[repr(C)]
struct Arguments {
    bias: u64,
    kept: u64,
    out: u64,
    sums: u64,
    m: u32,
    n: u32,
    k: u32,
    /// Where the compilers of both sides leave a gap.
    unused: u32,
}

// SAFETY: the same fields in the same order.
unsafe impl Argument for Arguments {}

/// How the copy engine is told of a matrix.
struct Map(sys::CUtensorMap);

// SAFETY: `struct Map` of product_hopper.cu is as large, and what it holds is the driver's affair.
unsafe impl Argument for Map {}

/// A row-major matrix of which `rows` rows and 64 columns are copied at a time; beyond its end there are zeros.
fn map(matrix: View<'_>, (height, width): (usize, usize), rows: usize) -> Result<Map> {
    let mut map = Map(sys::CUtensorMap { opaque: [0; 16] });
    let (sizes, stride) = ([width as u64, height as u64], [width as u64 * 2]);
    let (part, steps) = ([DEPTH as u32, rows as u32], [1, 1]);
    // SAFETY: two sizes, one stride and two sizes of a part, as the rank says; the driver only reads them.
    let status = unsafe {
        sys::cuTensorMapEncodeTiled(
            &mut map.0,
            sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            2,
            matrix.address() as *mut c_void,
            sizes.as_ptr(),
            stride.as_ptr(),
            part.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    status.result().doing("describe a matrix to the GPU")?;
    Ok(map)
}
