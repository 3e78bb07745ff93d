//! A learned mixture of layers that lie side by side, forward and backward. The definition is [`crate::cpu::mix`].
//!
//! Legend: T tokens, n layers of W columns.

use super::compile::Source;
use super::error::Result;
use super::gpu::{Argument, DType, EVENS, Gpu, Launch, Purpose, STORES, View, address, even, store};
use super::reduce::Sum;

/// All of it.
pub static SOURCE: Source =
    Source { name: "mix.cu", text: include_str!("kernels/mix.cu"), variants: &[&[STORES, EVENS]] };

/// Layers that can be mixed at most.
const MOST: usize = 256;

/// Threads of a block.
const THREADS: usize = 256;

/// Chunks of rows that sums are taken over, at most.
const CHUNKS: usize = 64;

/// γ·Σ softmax(weights)ᵢ·layerᵢ: T×n·W → T×W; weights and γ are f32.
pub fn forward(gpu: &Gpu, x: View<'_>, w: usize, weights: View<'_>, gamma: View<'_>, out: View<'_>) -> Result<()> {
    let (rows, n) = check(x, w, weights, gamma);
    out.expect("mix", "the output", rows * w, x.dtype());
    let (variant, sizes) = ([store(x.dtype()), even(w, &[x, out])], (rows as u32, n as u32, w as u32));
    let launch = Launch::new((rows * w.div_ceil(8)).div_ceil(THREADS), THREADS);
    // SAFETY: rows×n·w and rows×w numbers, n weights and one factor.
    unsafe {
        let (x, weights, gamma, out) = (x.address(), weights.address(), gamma.address(), out.address());
        let arguments: [&dyn Argument; 7] = [&x, &weights, &gamma, &out, &sizes.0, &sizes.1, &sizes.2];
        gpu.launch(&SOURCE, &variant, "forward", launch, &arguments)
    }
}

/// Writes the gradient of x where it is wanted, and gives those of the weights and of γ.
pub fn backward(
    gpu: &Gpu,
    x: View<'_>,
    w: usize,
    weights: View<'_>,
    gamma: View<'_>,
    dy: View<'_>,
    dx: Option<View<'_>>,
    [dweights, dgamma]: [Sum<'_>; 2],
) -> Result<()> {
    let (rows, n) = check(x, w, weights, gamma);
    dy.expect("mix", "the gradient", rows * w, x.dtype());
    if let Some(dx) = dx {
        dx.expect("mix", "the input's gradient", x.len(), x.dtype());
    }
    dweights.to.expect("mix", "the weights' gradient", n, DType::F32);
    dgamma.to.expect("mix", "the factor's gradient", 1, DType::F32);
    let chunk = rows.div_ceil(CHUNKS).max(8);
    let chunks = rows.div_ceil(chunk);
    let partial = gpu.scratch(Purpose::Sums, (chunks * n * 8).max(8))?;
    let variant = [store(x.dtype()), even(w, &[x, dy, dx.unwrap_or(x)])];
    let sizes = (rows as u32, n as u32, w as u32, chunk as u32);
    // SAFETY: as in the forward; a sum for each chunk and layer.
    unsafe {
        let (x, weights, gamma) = (x.address(), weights.address(), gamma.address());
        let (dy, dx) = (dy.address(), address(dx));
        let launch = Launch { grid: (chunks as u32, n as u32), threads: THREADS as u32, shared: 0 };
        let arguments: [&dyn Argument; 10] =
            [&x, &weights, &gamma, &dy, &dx, &partial, &sizes.0, &sizes.1, &sizes.2, &sizes.3];
        gpu.launch(&SOURCE, &variant, "backward", launch, &arguments)?;
        let add = u32::from(dweights.add) | u32::from(dgamma.add) << 1;
        let (chunks, dweights, dgamma) = (chunks as u32, dweights.to.address(), dgamma.to.address());
        let arguments: [&dyn Argument; 8] = [&partial, &chunks, &weights, &gamma, &dweights, &dgamma, &sizes.1, &add];
        gpu.launch(&SOURCE, &variant, "finish", Launch::new(1, THREADS), &arguments)
    }
}

/// T and n.
fn check(x: View<'_>, w: usize, weights: View<'_>, gamma: View<'_>) -> (usize, usize) {
    let n = weights.len();
    assert!(n > 0 && n <= MOST, "mix: {n} layers");
    weights.expect("mix", "the weights", n, DType::F32);
    gamma.expect("mix", "the factor", 1, DType::F32);
    (x.rows("mix", n * w), n)
}
