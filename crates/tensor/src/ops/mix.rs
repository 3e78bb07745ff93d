//! A learned mixture of layers that lie side by side (Peters et al. 2018): γ·Σ softmax(w)ᵢ·layerᵢ.
//!
//! Legend: T tokens, n layers of W columns. On a GPU there is no such operation yet.

use henson_kernels::cpu::mix as kernels;

use super::{Op, with_float};
use crate::tape::{Backward, Slot};
use crate::{Device, Kind, Param, Pass, Result, Tensor, TensorError, Var};

const OPERATION: &str = "mix";
const NO_GPU: TensorError =
    TensorError::Unsupported { operation: OPERATION, why: "layers are not mixed on a GPU yet: choose the device cpu" };

/// The parameters of a mixture.
#[derive(Clone, Copy, Debug)]
pub struct MixParams {
    /// n.
    pub weights: Param,
    /// γ: 1.
    pub gamma: Param,
}

impl Pass<'_> {
    /// T×n·W → T×W.
    pub fn mix(&mut self, x: &Var, mix: &MixParams) -> Result<Var> {
        let Device::Cpu(cpu) = self.device() else { return Err(NO_GPU) };
        self.reads(mix);
        let (t, n) = (x.tensor().rows(), mix.weights.shape().elements());
        if n == 0 || !x.tensor().columns().is_multiple_of(n) || mix.gamma.shape().elements() != 1 {
            let why = "the columns are not as many layers as there are weights, or there is not one factor";
            return Err(TensorError::Unsupported { operation: OPERATION, why });
        }
        let w = x.tensor().columns() / n;
        let mut out = Tensor::empty(self.device(), [t, w], x.tensor().dtype())?;
        let timer = self.device().timer(Kind::Rows, 0, &[x.tensor(), &out]);
        let (weights, gamma) = (self.parameters().slice(mix.weights), self.parameters().slice(mix.gamma)[0]);
        with_float!(out.dtype(), E => {
            kernels::forward(&cpu.kernels, x.tensor().slice::<E>(), w, weights, gamma, out.slice_mut());
        });
        drop(timer);
        let y = self.var(out);
        if let Some(out) = y.slot() {
            self.record(Op::Mix(Recorded { x: x.clone(), mix: *mix, out }));
        }
        Ok(y)
    }
}

/// A recorded mixture.
pub(crate) struct Recorded {
    x: Var,
    mix: MixParams,
    out: Slot,
}

impl Recorded {
    pub(super) fn backward(self, back: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = back.take(self.out) else { return Ok(()) };
        let Device::Cpu(cpu) = back.device() else { return Err(NO_GPU) };
        let x = self.x.tensor();
        let (weights, gamma) = (back.parameters.slice(self.mix.weights), back.parameters.slice(self.mix.gamma)[0]);
        let w = x.columns() / weights.len();
        let mut dx = match self.x.slot() {
            Some(_) => Some(Tensor::empty(back.device(), x.shape(), x.dtype())?),
            None => None,
        };
        let mut dweights = back.gradients.sum(self.mix.weights)?;
        let mut dgamma = back.gradients.sum(self.mix.gamma)?;
        let timer = back.device().timer(Kind::Rows, 0, &[x, &dy]);
        with_float!(x.dtype(), E => {
            let to = dx.as_mut().map(|dx| dx.slice_mut::<E>()).unwrap_or_default();
            let (x, dy, dgamma) = (x.slice::<E>(), dy.slice::<E>(), &mut dgamma.slice_mut::<f32>()[0]);
            kernels::backward(&cpu.kernels, x, w, weights, gamma, dy, to, dweights.slice_mut(), dgamma);
        });
        drop(timer);
        dx.map_or(Ok(()), |dx| back.add(self.x.slot(), dx))
    }
}
