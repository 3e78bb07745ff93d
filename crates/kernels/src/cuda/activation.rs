//! Activation functions where no product's epilogue has them: BERT's erf form of GELU above all, with the bias before it
//! and the bias' gradient in the backward; and the gates of gated layers. The definition is [`crate::cpu::activation`].

use crate::cpu::activation::Activation;

use super::compile::Source;
use super::error::Result;
use super::gpu::{Argument, DType, EVENS, Gpu, Launch, STORES, View, address, even, store};
use super::reduce::{self, Strips, Sum};

/// Passes over plain elements.
pub static SOURCE: Source = Source {
    name: "elementwise.cu",
    text: include_str!("kernels/elementwise.cu"),
    variants: &[&[STORES], &[STORES, ACTIVATIONS]],
};

/// Passes over columns that have a bias.
pub static STRIPS: Source = Source {
    name: "strips.cu",
    text: include_str!("kernels/strips.cu"),
    variants: &[
        &[STORES, EVENS],
        &[&["STORE=float"], EVENS, ACTIVATIONS, &["BIAS=float"]],
        &[&["STORE=bf16"], EVENS, ACTIVATIONS, &["BIAS=float", "BIAS=bf16"]],
    ],
};

pub(super) const ACTIVATIONS: &[&str] = &[
    "ACTIVATION=identity",
    "ACTIVATION=gelu",
    "ACTIVATION=gelu_tanh",
    "ACTIVATION=relu",
    "ACTIVATION=hyperbolic",
    "ACTIVATION=silu",
];

/// Blocks of 256 threads with 16 elements each.
pub(crate) fn blocks(elements: usize) -> Launch {
    Launch::new(elements.div_ceil(256 * 16), 256)
}

/// Whether eight elements can be read and written at a time.
pub(crate) fn aligned(views: &[View<'_>]) -> u32 {
    u32::from(views.iter().all(View::is_aligned))
}

pub(super) fn definition(activation: Activation) -> &'static str {
    ACTIVATIONS[match activation {
        Activation::None => 0,
        Activation::Gelu => 1,
        Activation::GeluTanh => 2,
        Activation::Relu => 3,
        Activation::Tanh => 4,
        Activation::Silu => 5,
    }]
}

fn bias_definition(dtype: DType) -> &'static str {
    if dtype == DType::Bf16 { "BIAS=bf16" } else { "BIAS=float" }
}

/// y = activation(x + bias), where a bias (one number a column, f32 or the dtype of x) is given. y may be x.
pub fn forward(gpu: &Gpu, activation: Activation, x: View<'_>, bias: Option<View<'_>>, y: View<'_>) -> Result<()> {
    y.expect("activation", "the output", x.len(), x.dtype());
    let Some(bias) = bias else {
        let (n, variant) = (x.len() as u64, [store(x.dtype()), definition(activation)]);
        let (wide, x, y) = (aligned(&[x, y]), x.address(), y.address());
        // SAFETY: both have n numbers.
        return unsafe { gpu.launch(&SOURCE, &variant, "forward", blocks(n as usize), &[&x, &y, &n, &wide]) };
    };
    let h = bias.len();
    let rows = x.rows("activation", h);
    let strips = Strips::short(h, rows);
    let variant = [store(x.dtype()), even(h, &[x, y, bias]), definition(activation), bias_definition(bias.dtype())];
    let sizes = (rows as u32, h as u32, strips.chunk);
    // SAFETY: rows×h numbers and h of the bias.
    unsafe {
        let (x, bias, y) = (x.address(), bias.address(), y.address());
        let arguments: [&dyn Argument; 6] = [&x, &bias, &y, &sizes.0, &sizes.1, &sizes.2];
        gpu.launch(&STRIPS, &variant, "forward", strips.launch(), &arguments)
    }
}

/// dx = dy·activation′(x + bias), where x is what [`forward`] got. dx may be dy. `sums`, where given, gets
/// the sums of dx's columns: the gradient of the bias.
pub fn backward(
    gpu: &Gpu,
    activation: Activation,
    x: View<'_>,
    bias: Option<View<'_>>,
    dy: View<'_>,
    dx: View<'_>,
    sums: Option<Sum<'_>>,
) -> Result<()> {
    dy.expect("activation", "the gradient", x.len(), x.dtype());
    dx.expect("activation", "the input's gradient", x.len(), x.dtype());
    let Some(h) = bias.or(sums.map(|sums| sums.to)).map(|vector| vector.len()) else {
        let (n, variant) = (x.len() as u64, [store(x.dtype()), definition(activation)]);
        let (wide, x, dy, dx) = (aligned(&[x, dy, dx]), x.address(), dy.address(), dx.address());
        // SAFETY: all have n numbers.
        return unsafe { gpu.launch(&SOURCE, &variant, "backward", blocks(n as usize), &[&x, &dy, &dx, &n, &wide]) };
    };
    let rows = x.rows("activation", h);
    let strips = if sums.is_some() { Strips::summed(gpu, h, rows) } else { Strips::short(h, rows) };
    let partial = if sums.is_some() { strips.partial(gpu, h)? } else { 0 };
    let bias_dtype = bias.map_or(x.dtype(), |bias| bias.dtype());
    let even = even(h, &[x, dy, dx, bias.unwrap_or(x)]);
    let variant = [store(x.dtype()), even, definition(activation), bias_definition(bias_dtype)];
    // SAFETY: rows×h numbers, h of the bias, and h for each chunk of rows.
    unsafe {
        let (x, bias, dy, dx) = (x.address(), address(bias), dy.address(), dx.address());
        let sizes = (rows as u32, h as u32, strips.chunk);
        let arguments: [&dyn Argument; 8] = [&x, &bias, &dy, &dx, &partial, &sizes.0, &sizes.1, &sizes.2];
        gpu.launch(&STRIPS, &variant, "backward", strips.launch(), &arguments)?;
    }
    match sums {
        Some(sums) => reduce::finish(gpu, partial, strips.chunks(), h, [Some(sums), None, None]),
        None => Ok(()),
    }
}

/// A gate: rows of `x` (T×2N) hold what is activated and then what that is multiplied with. y (T×N) = activation(first half + bias) ∘
/// (second half + bias); the bias has 2N numbers, f32 or of the dtype of x.
pub fn gate(
    gpu: &Gpu,
    activation: Activation,
    x: View<'_>,
    bias: Option<View<'_>>,
    n: usize,
    y: View<'_>,
) -> Result<()> {
    y.expect("gate", "the output", x.rows("gate", 2 * n) * n, x.dtype());
    launch_gate(gpu, activation, "gate_forward", [x, x, y], bias, n)
}

/// Gradients of [`gate`] from the same `x`: dx (T×2N) from dy (T×N).
pub fn gate_backward(
    gpu: &Gpu,
    activation: Activation,
    x: View<'_>,
    bias: Option<View<'_>>,
    dy: View<'_>,
    n: usize,
    dx: View<'_>,
) -> Result<()> {
    dy.expect("gate", "the gradient", x.rows("gate", 2 * n) * n, x.dtype());
    dx.expect("gate", "the input's gradient", x.len(), x.dtype());
    launch_gate(gpu, activation, "gate_backward", [x, dy, dx], bias, n)
}

/// Launches a kernel of a gate with what it reads and writes: the input, the output's gradient, the result.
fn launch_gate(
    gpu: &Gpu,
    activation: Activation,
    kernel: &'static str,
    [x, dy, to]: [View<'_>; 3],
    bias: Option<View<'_>>,
    n: usize,
) -> Result<()> {
    let rows = x.rows("gate", 2 * n);
    if let Some(bias) = bias {
        bias.expect("gate", "the bias", 2 * n, bias.dtype());
    }
    let strips = Strips::short(n, rows);
    let bias_dtype = bias.map_or(x.dtype(), |bias| bias.dtype());
    let even = even(n, &[x, dy, to, bias.unwrap_or(x)]);
    let variant = [store(x.dtype()), even, definition(activation), bias_definition(bias_dtype)];
    let (x, dy, to, bias) = (x.address(), dy.address(), to.address(), address(bias));
    let sizes = (rows as u32, n as u32, strips.chunk);
    let arguments: [&dyn Argument; 7] = [&x, &dy, &to, &bias, &sizes.0, &sizes.1, &sizes.2];
    // SAFETY: rows×2n and rows×n numbers, and 2n of the bias; the callers have checked them.
    unsafe { gpu.launch(&STRIPS, &variant, kernel, strips.launch(), &arguments) }
}
