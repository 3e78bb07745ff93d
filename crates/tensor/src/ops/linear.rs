//! Linear layers, alone and as BERT's feed-forward pair.
//!
//! Legend: T rows, K inputs, N outputs; a weight is N×K as in checkpoints.

use henson_kernels::cpu::gemm::{Finish, Matrix, Right, product};
use henson_kernels::cpu::{Element, reduce, rows};

use super::{Op, cast, with_float};
use crate::tape::{Backward, Slot};
use crate::{Activation, DType, Device, Kind, Native, Param, Pass, Result, Tensor, Var};

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

    fn linear_in(
        &mut self,
        x: &Var,
        weight: Param,
        bias: Option<Param>,
        activation: Activation,
        dtype: DType,
    ) -> Result<Var> {
        let keep = self.is_training() && activation != Activation::None;
        let (y, slope) = apply(self, x.tensor(), weight, bias, activation, dtype, keep)?;
        let y = self.var(y);
        if let Some(out) = y.slot() {
            self.record(Op::Linear(Linear { x: x.clone(), weight, bias, slope, out }));
        }
        Ok(y)
    }

    /// down(activation(up(x))): T×H → T×4H → T×H.
    pub fn feed_forward(
        &mut self,
        x: &Var,
        up: (Param, Param),
        activation: Activation,
        down: (Param, Param),
    ) -> Result<Var> {
        let dtype = self.dtype();
        let (inner, slope) = apply(self, x.tensor(), up.0, Some(up.1), activation, dtype, self.is_training())?;
        let (y, _) = apply(self, &inner, down.0, Some(down.1), Activation::None, dtype, false)?;
        let y = self.var(y);
        if let (Some(out), Some(slope)) = (y.slot(), slope) {
            self.record(Op::FeedForward(FeedForward { x: x.clone(), up, slope, inner, down, out }));
        }
        Ok(y)
    }
}

/// The layer's output, and the activation's derivative where it is to be kept.
fn apply(
    pass: &Pass<'_>,
    x: &Tensor,
    weight: Param,
    bias: Option<Param>,
    activation: Activation,
    dtype: DType,
    keep: bool,
) -> Result<(Tensor, Option<Tensor>)> {
    let parameters = pass.parameters();
    let packed = if pass.is_training() { None } else { parameters.packed(weight) };
    let (weight, bias) = (parameters.matrix(weight), bias.map(|bias| parameters.vector(bias)));
    let (t, n, k) = (x.rows(), weight.rows(), weight.columns());
    x.check_shape("linear", "the input", [t, k])?;
    x.check_dtype("linear", "the input", weight.dtype())?;
    if let Some(bias) = &bias {
        bias.check_shape("linear", "the bias", [n])?;
    }
    let y = Tensor::empty(pass.device(), [t, n], dtype)?;
    let slope = if keep { Some(Tensor::empty(pass.device(), [t, n], dtype)?) } else { None };
    let moved = [x, &weight, &y, &y];
    let moved = if keep { &moved[..] } else { &moved[..3] };
    let _timer = pass.device().timer(Kind::Linear, 2 * t * n * k, moved);
    match pass.device() {
        Device::Cpu(cpu) => with_float!(x.dtype(), E => with_float!(dtype, O => {
            let finish = Finish {
                bias: bias.as_ref().map(|bias| bias.slice::<f32>()),
                activation,
                derivative: slope.as_ref().map(|slope| slope.slice_mut::<O>()),
                ..Finish::default()
            };
            let x = Matrix::new(x.slice::<E>(), t, k);
            let weight = match &packed {
                Some(packed) => Right::Packed(packed),
                None => Right::Plain(Matrix::new(weight.slice::<E>(), n, k).transposed()),
            };
            product(&cpu.kernels, x, weight, y.slice_mut::<O>(), n, finish);
        })),
    }
    Ok((y, slope))
}

/// A recorded linear layer.
pub(crate) struct Linear {
    x: Var,
    weight: Param,
    bias: Option<Param>,
    /// The activation's derivative, where there is one.
    slope: Option<Tensor>,
    out: Slot,
}

impl Linear {
    pub(super) fn backward(self, back: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = back.take(self.out) else { return Ok(()) };
        let x = self.x.tensor();
        let n = self.weight.shape().sizes()[0];
        let mut dz = dy.reshape([x.rows(), n])?;
        if let Some(slope) = self.slope {
            // The slope is ours alone: its product with the gradient takes its place.
            let _timer = back.device().timer(Kind::Activation, 0, &[&slope, &dz, &slope]);
            match back.device() {
                Device::Cpu(cpu) => with_float!(slope.dtype(), E => {
                    rows::multiply::<E>(&cpu.kernels, dz.slice(), slope.slice_mut());
                }),
            }
            dz = slope;
        }
        let dz = cast(back.device(), &dz, x.dtype())?;
        parameter_gradients(back, &dz, x, self.weight, self.bias)?;
        drop(dy);
        if let Some(slot) = self.x.slot() {
            input_gradient(back, &dz, self.weight, slot, x)?;
        }
        Ok(())
    }
}

/// A recorded feed-forward pair.
pub(crate) struct FeedForward {
    x: Var,
    up: (Param, Param),
    slope: Tensor,
    inner: Tensor,
    down: (Param, Param),
    out: Slot,
}

impl FeedForward {
    pub(super) fn backward(self, back: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = back.take(self.out) else { return Ok(()) };
        parameter_gradients(back, &dy, &self.inner, self.down.0, Some(self.down.1))?;
        // The gradient of the activation's input takes the place of its output, which is not needed any more.
        let Self { inner: dz, slope, .. } = self;
        let weight = back.parameters.matrix(self.down.0);
        let (t, n, k) = (dy.rows(), dz.columns(), dy.columns());
        let timer = back.device().timer(Kind::InputGradient, 2 * t * n * k, &[&dy, &weight, &dz, &slope]);
        match back.device() {
            Device::Cpu(cpu) => with_float!(dy.dtype(), E => {
                let dy = Matrix::new(dy.slice::<E>(), t, k);
                let weight = Right::Plain(Matrix::new(weight.slice::<E>(), k, n));
                let finish = Finish { factor: Some(slope.slice::<E>()), ..Finish::default() };
                product(&cpu.kernels, dy, weight, dz.slice_mut::<E>(), n, finish);
            }),
        }
        drop(timer);
        drop(dy);
        drop(slope);
        parameter_gradients(back, &dz, self.x.tensor(), self.up.0, Some(self.up.1))?;
        if let Some(slot) = self.x.slot() {
            input_gradient(back, &dz, self.up.0, slot, self.x.tensor())?;
        }
        Ok(())
    }
}

/// weight's gradient += dzᵀ·x, bias' += column sums of dz.
fn parameter_gradients(
    back: &mut Backward<'_>,
    dz: &Tensor,
    x: &Tensor,
    weight: Param,
    bias: Option<Param>,
) -> Result<()> {
    let (dweight, accumulate) = back.gradients.target(weight);
    let dbias = bias.map(|bias| back.gradients.sum(bias));
    let flops = 2 * x.rows() * dz.columns() * x.columns();
    let timer = back.device().timer(Kind::WeightGradient, flops, &[dz, x, &dweight]);
    match back.device() {
        Device::Cpu(cpu) => with_float!(x.dtype(), E => {
            let (t, n, k) = (x.rows(), dz.columns(), x.columns());
            let (dz, x) = (matrix::<E>(dz, t, n), matrix::<E>(x, t, k));
            let finish = Finish { accumulate, ..Finish::default() };
            product(&cpu.kernels, dz.transposed(), Right::Plain(x), dweight.slice_mut::<f32>(), k, finish);
        }),
    }
    drop(timer);
    if let Some(dbias) = dbias {
        let _timer = back.device().timer(Kind::BiasGradient, 0, &[dz]);
        match back.device() {
            Device::Cpu(cpu) => with_float!(dz.dtype(), E => {
                reduce::column_sums(&cpu.kernels, dz.slice::<E>(), dbias.slice_mut());
            }),
        }
    }
    Ok(())
}

/// x's gradient += dz·weight.
fn input_gradient(back: &mut Backward<'_>, dz: &Tensor, weight: Param, slot: Slot, x: &Tensor) -> Result<()> {
    let (dx, accumulate) = back.target(slot, x)?;
    let weight = back.parameters.matrix(weight);
    let (t, n, k) = (x.rows(), weight.rows(), weight.columns());
    let _timer = back.device().timer(Kind::InputGradient, 2 * t * n * k, &[dz, &weight, &dx]);
    match back.device() {
        Device::Cpu(cpu) => with_float!(x.dtype(), E => {
            let finish = Finish { accumulate, ..Finish::default() };
            let weight = Right::Plain(matrix::<E>(&weight, n, k));
            product(&cpu.kernels, matrix::<E>(dz, t, n), weight, dx.slice_mut::<E>(), k, finish);
        }),
    }
    Ok(())
}

fn matrix<E: Element + Native>(x: &Tensor, rows: usize, columns: usize) -> Matrix<'_, E> {
    Matrix::new(x.slice::<E>(), rows, columns)
}
