//! Linear layers, alone and as a feed-forward pair, gated or not.
//!
//! Legend: T rows, K inputs, N outputs; a weight is N×K as in checkpoints.

use henson_kernels::cpu::gemm::{Finish, Matrix, Right, product};
use henson_kernels::cpu::{Element, reduce, rows};
use henson_kernels::cuda::matmul::{self, product as cuda_product};
use henson_kernels::cuda::{self, Gpu, product_hopper};

use super::{Op, cast, sum_into, with_float};
use crate::tape::{Backward, Dropout, Slot};
use crate::{
    Activation, DType, Device, Kind, Layout, Native, Param, Parameters, Pass, Result, Tensor, TensorError, Var,
};

impl Pass<'_> {
    /// activation(x·weightᵀ + bias): T×K → T×N, in the pass's dtype.
    pub fn linear(&mut self, x: &Var, weight: Param, bias: Option<Param>, activation: Activation) -> Result<Var> {
        let dtype = self.dtype();
        self.linear_in(x, weight, bias, activation, dtype)
    }

    /// The same with an output in f32, for the logits of small heads.
    pub fn linear_f32(&mut self, x: &Var, weight: Param, bias: Option<Param>) -> Result<Var> {
        self.linear_in(x, weight, bias, Activation::None, DType::F32)
    }

    /// x·weightᵀ + constants, in f32 for inference: logits of a vocabulary. The constants get no gradient.
    pub fn linear_with_constants(&mut self, x: &Var, weight: Param, constants: Param) -> Result<Var> {
        let dtype = if self.is_training() { self.dtype() } else { DType::F32 };
        let layer = Layer { weight, bias: Some(constants), activation: Activation::None, gated: false };
        self.reads(&(weight, constants));
        let (y, _) = apply(self.weights(), x.tensor(), layer, dtype, false)?;
        let y = self.var(y);
        if let Some(out) = y.slot() {
            let (bias, activation, slope) = (None, Activation::None, None);
            self.record(Op::Linear(Linear { x: x.clone(), weight, bias, activation, slope, out }));
        }
        Ok(y)
    }

    fn linear_in(
        &mut self,
        x: &Var,
        weight: Param,
        bias: Option<Param>,
        activation: Activation,
        dtype: DType,
    ) -> Result<Var> {
        let keep = self.is_training() && activation != Activation::None;
        let layer = Layer { weight, bias, activation, gated: false };
        self.reads(&(weight, bias, activation));
        let (y, slope) = apply(self.weights(), x.tensor(), layer, dtype, keep)?;
        let y = self.var(y);
        if let Some(out) = y.slot() {
            self.record(Op::Linear(Linear { x: x.clone(), weight, bias, activation, slope, out }));
        }
        Ok(y)
    }

    /// down(activation(up(x))): T×H → T×N → T×H; or, gated, down(activation(first half of up(x)) ∘ second half). `inner_dropout`
    /// stands before the second layer.
    pub fn feed_forward(
        &mut self,
        x: &Var,
        layers: &FeedForwardLayers,
        inner_dropout: Option<(&Layout, (f32, u32))>,
    ) -> Result<Var> {
        let dtype = self.dtype();
        let drop = match inner_dropout {
            Some((layout, (p, site))) => self.dropout(p, site).map(|dropout| (dropout, layout.token_rows().clone())),
            None => None,
        };
        self.reads(layers);
        // The slope comes along even where it is dropped at once: the activation's last bits may depend on that.
        let (weights, keep) = (self.weights(), self.is_training());
        let (inner, slope) = inner(weights, x.tensor(), layers, drop.as_ref(), dtype, keep)?;
        let down = Layer { weight: layers.down, bias: layers.down_bias, activation: Activation::None, gated: false };
        let (y, _) = apply(weights, &inner, down, dtype, false)?;
        let y = self.var(y);
        if let Some(out) = y.slot() {
            let kept = slope.filter(|_| !self.recompute()).map(|slope| (inner, slope));
            self.record(Op::FeedForward(FeedForward { x: x.clone(), layers: *layers, drop, kept, out }));
        }
        Ok(y)
    }

    pub(super) fn weights(&self) -> Weights<'_> {
        Weights { parameters: self.parameters(), packed: !self.is_training() }
    }
}

/// The two layers of a feed-forward pair.
#[derive(Clone, Copy, Debug)]
pub struct FeedForwardLayers {
    /// N×H; 2N×H where it is gated: the gate's rows, then those of what it gates.
    pub up: Param,
    /// As many as rows.
    pub up_bias: Option<Param>,
    /// Of the first layer, or of its gate.
    pub activation: Activation,
    /// Whether the first layer is gated (Shazeer 2020): GeGLU, SwiGLU, ReGLU.
    pub gated: bool,
    /// H×N.
    pub down: Param,
    /// H.
    pub down_bias: Option<Param>,
}

/// One layer.
#[derive(Clone, Copy)]
pub(super) struct Layer {
    pub(super) weight: Param,
    pub(super) bias: Option<Param>,
    pub(super) activation: Activation,
    pub(super) gated: bool,
}

/// What layers multiply with, and whether packed copies of it are used where there are some.
#[derive(Clone, Copy)]
pub(super) struct Weights<'a> {
    parameters: &'a Parameters,
    packed: bool,
}

/// The layer's output, and what the backward needs of the activation where it is to be kept: on the CPU its derivative (both
/// factors of a gate's), on a GPU its input.
pub(super) fn apply(
    Weights { parameters, packed }: Weights<'_>,
    x: &Tensor,
    layer: Layer,
    dtype: DType,
    keep: bool,
) -> Result<(Tensor, Option<Tensor>)> {
    let device = parameters.device();
    let packed = if packed { parameters.packed(layer.weight, layer.gated) } else { None };
    let (weight, bias) = (parameters.matrix(layer.weight), layer.bias.map(|bias| parameters.vector(bias)));
    let (t, columns, k) = (x.rows(), weight.rows(), weight.columns());
    x.check_shape("linear", "the input", [t, k])?;
    x.check_dtype("linear", "the input", weight.dtype())?;
    if let Some(bias) = &bias {
        bias.check_shape("linear", "the bias", [columns])?;
    }
    if layer.gated && !columns.is_multiple_of(2) {
        let why = "a gated layer needs two halves of the same size";
        return Err(TensorError::Unsupported { operation: "linear", why });
    }
    let n = if layer.gated { columns / 2 } else { columns };
    let mut y = Tensor::empty(device, [t, n], dtype)?;
    let mut slope = if keep { Some(Tensor::empty(device, [t, columns], dtype)?) } else { None };
    let moved = [x, &weight, &y, slope.as_ref().unwrap_or(&y)];
    let moved = if keep { &moved[..] } else { &moved[..3] };
    let _timer = device.timer(Kind::Linear, 2 * t * columns * k, moved);
    match device {
        Device::Cpu(cpu) => with_float!(x.dtype(), E => with_float!(dtype, O => {
            let finish = Finish {
                bias: bias.as_ref().map(|bias| bias.slice::<f32>()),
                activation: layer.activation,
                gated: layer.gated,
                derivative: slope.as_mut().map(|slope| slope.slice_mut::<O>()),
                ..Finish::default()
            };
            let x = Matrix::new(x.slice::<E>(), t, k);
            let weight = match &packed {
                Some(packed) => Right::Packed(packed),
                None => Right::Plain(Matrix::new(weight.slice::<E>(), columns, k).transposed()),
            };
            product(&cpu.kernels, x, weight, y.slice_mut::<O>(), n, finish);
        })),
        Device::Cuda(cuda) => {
            let (gpu, bias) = (&cuda.gpu, layer.bias.map(|bias| parameters.in_dtype(bias, dtype)));
            let (left, right) = (on_gpu(x, t, k), on_gpu(&weight, columns, k).transposed());
            if layer.gated {
                let bias = bias.as_ref().map(Tensor::on_gpu);
                if dtype == DType::Bf16 && product_hopper::fits_gate(gpu, t, n, k) {
                    let kept = slope.as_ref().map(Tensor::on_gpu);
                    let (x, weight) = (x.on_gpu(), weight.on_gpu());
                    product_hopper::gate(gpu, layer.activation, x, weight, bias, n, kept, y.on_gpu())?;
                } else {
                    let to = match &slope {
                        Some(slope) => slope.clone(),
                        None => Tensor::empty(device, [t, columns], dtype)?,
                    };
                    cuda_product(gpu, left, right, on_gpu(&to, t, columns), matmul::Finish::default())?;
                    cuda::activation::gate(gpu, layer.activation, to.on_gpu(), bias, n, y.on_gpu())?;
                }
            } else {
                let to = slope.as_ref().unwrap_or(&y);
                apply_on_gpu(gpu, left, right, bias.as_ref(), layer.activation, to, &y)?;
            }
        }
    }
    Ok((y, slope))
}

/// The same on a GPU: `to` gets what the activation is applied to, without the bias that is added on its way; or, for the
/// tanh form of GELU, with it. It is `y` where nobody asks.
fn apply_on_gpu(
    gpu: &Gpu,
    x: matmul::Matrix<'_>,
    weight: matmul::Matrix<'_>,
    bias: Option<&Tensor>,
    activation: Activation,
    to: &Tensor,
    y: &Tensor,
) -> Result<()> {
    let (t, n) = (y.rows(), y.columns());
    let bias = bias.map(Tensor::on_gpu);
    let plain = matmul::Finish::default();
    match activation {
        Activation::None => cuda_product(gpu, x, weight, on_gpu(y, t, n), matmul::Finish { bias, ..plain })?,
        // The library has this one in its products. What it is applied to is kept somewhere in any case.
        Activation::GeluTanh if to.on_gpu().address() != y.on_gpu().address() => {
            let finish = matmul::Finish { bias, gelu_tanh: Some(to.on_gpu()), ..plain };
            cuda_product(gpu, x, weight, on_gpu(y, t, n), finish)?;
        }
        // A bias in the product costs up to a quarter of it, one in the activation's kernel nothing.
        _ => {
            cuda_product(gpu, x, weight, on_gpu(to, t, n), plain)?;
            cuda::activation::forward(gpu, activation, to.on_gpu(), bias, y.on_gpu())?;
        }
    }
    Ok(())
}

/// dz = dy·activation′ at what `apply` kept, with the gradient of the bias along the way. `dz` may be `dy`.
fn activation_gradient_on_gpu(
    gpu: &Gpu,
    back: &mut Backward<'_>,
    activation: Activation,
    kept: &Tensor,
    bias: Option<Param>,
    dy: &Tensor,
    dz: &Tensor,
) -> Result<()> {
    let sums = bias.map(|bias| back.gradients.target(bias)).transpose()?;
    // What the tanh form keeps has the bias in it already.
    let bias = bias.filter(|_| activation != Activation::GeluTanh).map(|b| back.parameters.in_dtype(b, kept.dtype()));
    let bias = bias.as_ref().map(Tensor::on_gpu);
    let sums = sums.as_ref().map(sum_into);
    cuda::activation::backward(gpu, activation, kept.on_gpu(), bias, dy.on_gpu(), dz.on_gpu(), sums)?;
    Ok(())
}

/// A tensor as a matrix for cuBLASLt.
fn on_gpu(x: &Tensor, rows: usize, columns: usize) -> matmul::Matrix<'_> {
    matmul::Matrix::new(x.on_gpu(), rows, columns)
}

/// A recorded linear layer.
pub(crate) struct Linear {
    x: Var,
    weight: Param,
    /// Nothing where somebody else computes its gradient.
    bias: Option<Param>,
    activation: Activation,
    /// What [`apply`] kept of the activation, where there is one.
    slope: Option<Tensor>,
    out: Slot,
}

impl Linear {
    pub(super) fn take_bias(&mut self, slot: Slot) -> Option<Param> {
        // With an activation in between, the output's gradient is not that of the bias.
        if self.out == slot && self.slope.is_none() { self.bias.take() } else { None }
    }

    pub(super) fn backward(self, back: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = back.take(self.out) else { return Ok(()) };
        let x = self.x.tensor();
        let n = self.weight.shape().sizes()[0];
        let mut dz = dy.reshape([x.rows(), n])?;
        let mut bias = self.bias;
        if let Some(mut slope) = self.slope {
            let _timer = back.device().timer(Kind::Activation, 0, &[&slope, &dz, &slope]);
            match back.device() {
                // The slope is ours alone: its product with the gradient takes its place.
                Device::Cpu(cpu) => {
                    with_float!(slope.dtype(), E => {
                        rows::multiply::<E>(&cpu.kernels, dz.slice(), slope.slice_mut());
                    });
                    dz = slope;
                }
                Device::Cuda(cuda) => {
                    let out = Tensor::empty(back.device(), slope.shape(), slope.dtype())?;
                    activation_gradient_on_gpu(&cuda.gpu, back, self.activation, &slope, bias.take(), &dz, &out)?;
                    dz = out;
                }
            }
        }
        let dz = cast(back.device(), &dz, x.dtype())?;
        parameter_gradients(back, &dz, x, self.weight, bias)?;
        drop(dy);
        if let Some(slot) = self.x.slot() {
            input_gradient(back, &dz, self.weight, slot, x)?;
        }
        Ok(())
    }
}

/// The GPU that has GELU in the products of a feed-forward pair, T rows, N inner and K outer columns. Such a pair keeps
/// GELU's derivative.
fn fused<'a>(
    device: &'a Device,
    layers: &FeedForwardLayers,
    drop: Option<&RowDropout>,
    dtype: DType,
    [t, n, k]: [usize; 3],
) -> Option<&'a Gpu> {
    let plain = !layers.gated && layers.up_bias.is_some() && drop.is_none();
    match device {
        Device::Cuda(cuda) if plain && (layers.activation, dtype) == (Activation::Gelu, DType::Bf16) => {
            product_hopper::fits(&cuda.gpu, t, n, k).then_some(&cuda.gpu)
        }
        _ => None,
    }
}

/// Whether the device has the gradient of a gated pair in a product, too. Its forward may be either: what is kept is the same.
fn fused_gate_gradient(
    device: &Device,
    layers: &FeedForwardLayers,
    drop: Option<&RowDropout>,
    dtype: DType,
    [t, n, k]: [usize; 3],
) -> bool {
    match device {
        Device::Cuda(cuda) if layers.gated && drop.is_none() && dtype == DType::Bf16 => {
            product_hopper::fits_gate_gradient(&cuda.gpu, t, n, k)
        }
        _ => false,
    }
}

/// Whether a GPU's product has the activation's gradient in it.
fn in_product(layers: &FeedForwardLayers) -> bool {
    layers.activation == Activation::GeluTanh && !layers.gated
}

/// Dropout of rows, with what they are counted by.
type RowDropout = (Dropout, Tensor);

/// What a feed-forward pair has between its layers: as [`apply`], but for what is kept of a GELU that is [`fused`].
fn inner(
    weights: Weights<'_>,
    x: &Tensor,
    layers: &FeedForwardLayers,
    drop: Option<&RowDropout>,
    dtype: DType,
    keep: bool,
) -> Result<(Tensor, Option<Tensor>)> {
    let (device, weight) = (weights.parameters.device(), weights.parameters.matrix(layers.up));
    let (t, n, k) = (x.rows(), weight.rows(), weight.columns());
    let (Some(gpu), Some(bias)) = (fused(device, layers, drop, dtype, [t, n, k]), layers.up_bias) else {
        let FeedForwardLayers { up: weight, up_bias: bias, activation, gated, .. } = *layers;
        let (mut y, mut slope) = apply(weights, x, Layer { weight, bias, activation, gated }, dtype, keep)?;
        if let Some(drop) = drop {
            drop_inner(device, &mut y, slope.as_mut(), drop)?;
        }
        return Ok((y, slope));
    };
    x.check_shape("linear", "the input", [t, k])?;
    x.check_dtype("linear", "the input", dtype)?;
    let y = Tensor::empty(device, [t, n], dtype)?;
    let slope = if keep { Some(Tensor::empty(device, [t, n], dtype)?) } else { None };
    let moved = [x, &weight, &y, &y];
    let _timer = device.timer(Kind::Linear, 2 * t * n * k, if keep { &moved[..] } else { &moved[..3] });
    let bias = weights.parameters.in_dtype(bias, dtype);
    let to = slope.as_ref().map(Tensor::on_gpu);
    product_hopper::gelu(gpu, x.on_gpu(), weight.on_gpu(), bias.on_gpu(), to, y.on_gpu())?;
    Ok((y, slope))
}

/// Dropout between the layers: of what the second one sees and, on the CPU, of the derivatives that lead back from there. A GPU
/// keeps no derivatives, and drops the gradient itself.
fn drop_inner(device: &Device, y: &mut Tensor, slope: Option<&mut Tensor>, drop: &RowDropout) -> Result<()> {
    let (dropout, ids) = drop;
    ids.check_shape("feed_forward", "the layout", [y.rows(), 2])?;
    let cpu = match device {
        Device::Cpu(cpu) => cpu,
        Device::Cuda(cuda) => {
            let Some(dropout) = dropout.on_gpu() else { return Ok(()) };
            return Ok(cuda::rows::drop(&cuda.gpu, y.on_gpu(), y.columns(), dropout, ids.on_gpu())?);
        }
    };
    let (Some(dropout), h) = (dropout.on_cpu(), y.columns()) else { return Ok(()) };
    let ids = bytemuck::cast_slice(ids.slice::<u32>());
    for x in [Some(y), slope].into_iter().flatten() {
        let _timer = device.timer(Kind::Rows, 0, &[x, x]);
        let parts = x.columns() / h;
        with_float!(x.dtype(), E => {
            rows::drop_parts(&cpu.kernels, x.slice_mut::<E>(), h, parts, &dropout, ids);
        });
    }
    Ok(())
}

/// A recorded feed-forward pair.
pub(crate) struct FeedForward {
    x: Var,
    /// Without the second layer's bias where somebody else computes its gradient.
    layers: FeedForwardLayers,
    drop: Option<RowDropout>,
    /// What [`inner`] gave; nothing where it is computed again.
    kept: Option<(Tensor, Tensor)>,
    out: Slot,
}

impl FeedForward {
    pub(super) fn take_bias(&mut self, slot: Slot) -> Option<Param> {
        if self.out == slot { self.layers.down_bias.take() } else { None }
    }

    pub(super) fn backward(self, back: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = back.take(self.out) else { return Ok(()) };
        let layers = &self.layers;
        let (inner, slope) = match self.kept {
            Some(kept) => kept,
            None => {
                let weights = Weights { parameters: back.parameters, packed: false };
                let (x, dtype) = (self.x.tensor(), back.parameters.dtype());
                let (inner, slope) = inner(weights, x, layers, self.drop.as_ref(), dtype, true)?;
                let why = "nothing was kept of its activation";
                let slope = slope.ok_or(TensorError::Unsupported { operation: "feed_forward", why })?;
                (inner, slope)
            }
        };
        parameter_gradients(back, &dy, &inner, layers.down, layers.down_bias)?;
        let (t, n, k) = (dy.rows(), inner.columns(), dy.columns());
        // The gradient of the activation's input takes the place of its output, which is not needed any more; or, where it is twice
        // as wide and its kernel can do that, of what was kept.
        let fused_gate = fused_gate_gradient(back.device(), layers, self.drop.as_ref(), dy.dtype(), [t, n, k]);
        let mut dz = match layers.gated {
            true if fused_gate => slope.clone(),
            true => Tensor::empty(back.device(), slope.shape(), slope.dtype())?,
            false => inner,
        };
        let weight = back.parameters.matrix(layers.down);
        let timer = back.device().timer(Kind::InputGradient, 2 * t * n * k, &[&dy, &weight, &dz, &slope]);
        let fused = fused(back.device(), layers, self.drop.as_ref(), dy.dtype(), [t, n, k]).is_some();
        let mut up_bias = layers.up_bias;
        match back.device() {
            Device::Cuda(cuda) if fused_gate => {
                let bias = up_bias.map(|bias| back.parameters.in_dtype(bias, slope.dtype()));
                let (dy, weight, kept) = (dy.on_gpu(), weight.on_gpu(), slope.on_gpu());
                let (bias, dz) = (bias.as_ref().map(Tensor::on_gpu), dz.on_gpu());
                product_hopper::gate_gradient(&cuda.gpu, layers.activation, dy, weight, bias, n, kept, dz)?;
                drop(timer);
            }
            Device::Cuda(cuda) if fused => {
                let Some(bias) = up_bias.take() else { return Ok(()) };
                let sums = back.gradients.target(bias)?;
                let (dy, weight, slope) = (dy.on_gpu(), weight.on_gpu(), slope.on_gpu());
                product_hopper::gelu_gradient(&cuda.gpu, dy, weight, slope, dz.on_gpu(), sum_into(&sums))?;
                drop(timer);
            }
            Device::Cpu(cpu) => with_float!(dy.dtype(), E => {
                let dy = Matrix::new(dy.slice::<E>(), t, k);
                let weight = Right::Plain(Matrix::new(weight.slice::<E>(), k, n));
                let (plain, slope) = (Finish::default(), Some(slope.slice::<E>()));
                let finish = match layers.gated {
                    true => Finish { gate_factors: slope, ..plain },
                    false => Finish { factor: slope, ..plain },
                };
                let columns = dz.columns();
                product(&cpu.kernels, dy, weight, dz.slice_mut::<E>(), columns, finish);
                drop(timer);
            }),
            Device::Cuda(cuda) => {
                // The product itself has the gradient of the tanh form of GELU where there is no gate.
                let kept = in_product(layers).then(|| slope.on_gpu());
                let finish = matmul::Finish { gelu_tanh_gradient: kept, ..matmul::Finish::default() };
                let mut dinner = match layers.gated {
                    true => Tensor::empty(back.device(), [t, n], dy.dtype())?,
                    false => dz.clone(),
                };
                cuda_product(&cuda.gpu, on_gpu(&dy, t, k), on_gpu(&weight, k, n), on_gpu(&dinner, t, n), finish)?;
                drop(timer);
                if let Some(drop) = &self.drop {
                    drop_inner(back.device(), &mut dinner, None, drop)?;
                }
                let _timer = back.device().timer(Kind::Activation, 0, &[&slope, &dinner, &dz]);
                if layers.gated {
                    let bias = up_bias.map(|bias| back.parameters.in_dtype(bias, slope.dtype()));
                    let (x, bias, dy) = (slope.on_gpu(), bias.as_ref().map(Tensor::on_gpu), dinner.on_gpu());
                    cuda::activation::gate_backward(&cuda.gpu, layers.activation, x, bias, dy, n, dz.on_gpu())?;
                } else if !in_product(layers) {
                    activation_gradient_on_gpu(&cuda.gpu, back, layers.activation, &slope, up_bias.take(), &dz, &dz)?;
                }
            }
        }
        drop(dy);
        drop(slope);
        parameter_gradients(back, &dz, self.x.tensor(), layers.up, up_bias)?;
        if let Some(slot) = self.x.slot() {
            input_gradient(back, &dz, layers.up, slot, self.x.tensor())?;
        }
        Ok(())
    }
}

/// weight's gradient += dzᵀ·x, bias' += column sums of dz.
pub(super) fn parameter_gradients(
    back: &mut Backward<'_>,
    dz: &Tensor,
    x: &Tensor,
    weight: Param,
    bias: Option<Param>,
) -> Result<()> {
    let (mut dweight, accumulate) = back.gradients.target(weight)?;
    let flops = 2 * x.rows() * dz.columns() * x.columns();
    let timer = back.device().timer(Kind::WeightGradient, flops, &[dz, x, &dweight]);
    match back.device() {
        Device::Cpu(cpu) => with_float!(x.dtype(), E => {
            let (t, n, k) = (x.rows(), dz.columns(), x.columns());
            let (dz, x) = (matrix::<E>(dz, t, n), matrix::<E>(x, t, k));
            let finish = Finish { accumulate, ..Finish::default() };
            product(&cpu.kernels, dz.transposed(), Right::Plain(x), dweight.slice_mut::<f32>(), k, finish);
        }),
        Device::Cuda(cuda) => {
            let (t, n, k) = (x.rows(), dz.columns(), x.columns());
            let finish = matmul::Finish { accumulate, ..matmul::Finish::default() };
            let (dz, x) = (on_gpu(dz, t, n).transposed(), on_gpu(x, t, k));
            cuda_product(&cuda.gpu, dz, x, on_gpu(&dweight, n, k), finish)?;
        }
    }
    drop(timer);
    if let Some(bias) = bias {
        let _timer = back.device().timer(Kind::BiasGradient, 0, &[dz]);
        match back.device() {
            Device::Cpu(cpu) => {
                let mut dbias = back.gradients.sum(bias)?;
                with_float!(dz.dtype(), E => {
                    reduce::column_sums(&cpu.kernels, dz.slice::<E>(), dbias.slice_mut());
                });
            }
            Device::Cuda(cuda) => {
                let dbias = back.gradients.target(bias)?;
                cuda::reduce::column_sums(&cuda.gpu, dz.on_gpu(), sum_into(&dbias))?;
            }
        }
    }
    Ok(())
}

/// x's gradient += dz·weight.
pub(super) fn input_gradient(
    back: &mut Backward<'_>,
    dz: &Tensor,
    weight: Param,
    slot: Slot,
    x: &Tensor,
) -> Result<()> {
    let (mut dx, accumulate) = back.target(slot, x)?;
    let weight = back.parameters.matrix(weight);
    let (t, n, k) = (x.rows(), weight.rows(), weight.columns());
    let _timer = back.device().timer(Kind::InputGradient, 2 * t * n * k, &[dz, &weight, &dx]);
    match back.device() {
        Device::Cpu(cpu) => with_float!(x.dtype(), E => {
            let finish = Finish { accumulate, ..Finish::default() };
            let weight = Right::Plain(matrix::<E>(&weight, n, k));
            product(&cpu.kernels, matrix::<E>(dz, t, n), weight, dx.slice_mut::<E>(), k, finish);
        }),
        Device::Cuda(cuda) => {
            let finish = matmul::Finish { accumulate, ..matmul::Finish::default() };
            cuda_product(&cuda.gpu, on_gpu(dz, t, n), on_gpu(&weight, n, k), on_gpu(&dx, t, k), finish)?;
        }
    }
    Ok(())
}

fn matrix<E: Element + Native>(x: &Tensor, rows: usize, columns: usize) -> Matrix<'_, E> {
    Matrix::new(x.slice::<E>(), rows, columns)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::CudaOptions;
    use crate::philox::Stream;
    use crate::{Builder, Init, Tape, Training};

    /// So many rows and inner columns that a GPU that can have GELU or gates in its products has them there.
    const SIZES: [usize; 3] = [1441, 3072, 128];

    fn numbers(seed: u64, n: usize) -> Vec<f32> {
        let mut stream = Stream::new(seed, 0, 0);
        (0..n).map(|_| stream.normal()).collect()
    }

    /// The output of a feed-forward pair, then the gradients of its parameters.
    fn feed_forward(device: &Device, dtype: DType, gated: bool, recompute: bool) -> Vec<Vec<f32>> {
        let [t, n, k] = SIZES;
        let mut builder = Builder::new();
        let init = Init::TruncatedNormal(0.1);
        let columns = if gated { 2 * n } else { n };
        let up = (builder.matrix("up", columns, k, init), builder.vector("up.bias", columns, init));
        let down = (builder.matrix("down", k, n, init), builder.vector("down.bias", k, init));
        let mut parameters = builder.finish(device, dtype).unwrap();
        parameters.initialise(1).unwrap();
        let mut gradients = parameters.gradients().unwrap();
        let mut tape = Tape::new();
        tape.set_recompute(recompute);
        let mut pass = Pass::training(&mut tape, &parameters, Training { seed: 1, step: 1 });
        let x = Tensor::from_slice(device, [t, k], &numbers(2, t * k)).unwrap();
        let x = pass.var(cast(device, &x, dtype).unwrap());
        let layers = FeedForwardLayers {
            up: up.0,
            up_bias: Some(up.1),
            activation: Activation::Gelu,
            gated,
            down: down.0,
            down_bias: Some(down.1),
        };
        let y = pass.feed_forward(&x, &layers, None).unwrap();
        let mut all = vec![y.tensor().to_f32().unwrap()];
        pass.seed_gradient(&y, &numbers(3, t * k)).unwrap();
        pass.backward(&mut gradients).unwrap();
        all.extend((0..4).map(|entry| gradients.read(&parameters, entry).unwrap()));
        all
    }

    #[test]
    fn feed_forward_pairs_are_the_same_on_every_device() {
        let cpu = Device::cpu(None, Some(2)).unwrap();
        let mut devices = vec![cpu.clone()];
        if std::env::var_os("HENSON_TEST_CUDA").is_some() {
            devices.push(Device::cuda(&CudaOptions::default()).unwrap());
        }
        for gated in [false, true] {
            let expected = feed_forward(&cpu, DType::F32, gated, false);
            for (device, recompute) in devices.iter().flat_map(|device| [(device, false), (device, true)]) {
                let got = feed_forward(device, DType::Bf16, gated, recompute);
                for (i, (got, expected)) in got.iter().zip(&expected).enumerate() {
                    let square = |x: f32| f64::from(x).powi(2);
                    let off: f64 = got.iter().zip(expected).map(|(g, e)| square(g - e)).sum();
                    let error = (off / expected.iter().map(|e| square(*e)).sum::<f64>()).sqrt();
                    // bf16 has eight bits, and a few roundings follow each other.
                    let what = format!("result {i} on {device:?}, gated {gated}, recomputed {recompute}");
                    assert!(error < 1e-2, "{what}: error {error}");
                }
            }
        }
    }
}
