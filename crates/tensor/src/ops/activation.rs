//! An activation by itself, where no linear layer stands before it that would apply it; and a factor on all numbers.

use henson_kernels::cpu::{activation as kernels, rows};
use henson_kernels::cuda::{activation as cuda_kernels, rows as cuda_rows};

use super::{Op, with_float};
use crate::tape::{Backward, Slot};
use crate::{Activation, Device, Kind, Pass, Result, Tensor, Var};

impl Pass<'_> {
    /// activation(x), element by element; for sums of layers.
    pub fn activate(&mut self, x: &Var, activation: Activation) -> Result<Var> {
        self.reads(&activation);
        let mut out = Tensor::empty(self.device(), x.tensor().shape(), x.tensor().dtype())?;
        let timer = self.device().timer(Kind::Rows, 0, &[x.tensor(), &out]);
        match self.device() {
            Device::Cpu(cpu) => with_float!(out.dtype(), E => {
                kernels::forward(&cpu.kernels, activation, x.tensor().slice::<E>(), out.slice_mut::<E>());
            }),
            Device::Cuda(cuda) => {
                cuda_kernels::forward(&cuda.gpu, activation, x.tensor().on_gpu(), None, out.on_gpu())?;
            }
        }
        drop(timer);
        let y = self.var(out);
        if let Some(out) = y.slot() {
            self.record(Op::Activation(Activated { x: x.clone(), activation, out }));
        }
        Ok(y)
    }

    /// factor·x, element by element.
    pub fn scale(&mut self, x: &Var, factor: f32) -> Result<Var> {
        self.reads(&factor);
        let y = self.var(scaled(self.device(), x.tensor(), factor)?);
        if let Some(out) = y.slot() {
            self.record(Op::Scale(Scaled { x: x.slot(), factor, out }));
        }
        Ok(y)
    }
}

fn scaled(device: &Device, x: &Tensor, factor: f32) -> Result<Tensor> {
    let mut out = Tensor::empty(device, x.shape(), x.dtype())?;
    let _timer = device.timer(Kind::Rows, 0, &[x, &out]);
    match device {
        Device::Cpu(cpu) => with_float!(x.dtype(), E => {
            rows::scale(&cpu.kernels, factor, x.slice::<E>(), out.slice_mut::<E>());
        }),
        Device::Cuda(cuda) => cuda_rows::scale(&cuda.gpu, factor, x.on_gpu(), out.on_gpu())?,
    }
    Ok(out)
}

/// A recorded factor.
pub(crate) struct Scaled {
    x: Option<Slot>,
    factor: f32,
    out: Slot,
}

impl Scaled {
    pub(super) fn backward(self, back: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = back.take(self.out) else { return Ok(()) };
        let dx = scaled(back.device(), &dy, self.factor)?;
        back.add(self.x, dx)
    }
}

/// A recorded activation.
pub(crate) struct Activated {
    x: Var,
    activation: Activation,
    out: Slot,
}

impl Activated {
    pub(super) fn backward(self, back: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = back.take(self.out) else { return Ok(()) };
        let x = self.x.tensor();
        let mut dx = Tensor::empty(back.device(), x.shape(), x.dtype())?;
        let timer = back.device().timer(Kind::Rows, 0, &[x, &dy, &dx]);
        match back.device() {
            Device::Cpu(cpu) => with_float!(dx.dtype(), E => {
                let (x, dy) = (x.slice::<E>(), dy.slice::<E>());
                kernels::backward(&cpu.kernels, self.activation, x, dy, dx.slice_mut::<E>());
            }),
            Device::Cuda(cuda) => {
                let (x, dy) = (x.on_gpu(), dy.on_gpu());
                cuda_kernels::backward(&cuda.gpu, self.activation, x, None, dy, dx.on_gpu(), None)?;
            }
        }
        drop(timer);
        back.add(self.x.slot(), dx)
    }
}
