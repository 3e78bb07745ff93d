//! A learned mixture of layers that lie side by side (Peters et al. 2018): γ·Σ softmax(w)ᵢ·layerᵢ.
//!
//! Legend: T tokens, n layers of W columns.

use henson_kernels::cpu::mix as kernels;
use henson_kernels::cuda::mix as cuda_kernels;

use super::{Op, sum_into, with_float};
use crate::tape::{Backward, Slot};
use crate::{Device, Kind, Param, Pass, Result, Tensor, TensorError, Var};

const OPERATION: &str = "mix";

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
        self.reads(mix);
        let (t, n) = (x.tensor().rows(), mix.weights.shape().elements());
        if n == 0 || !x.tensor().columns().is_multiple_of(n) || mix.gamma.shape().elements() != 1 {
            let why = "the columns are not as many layers as there are weights, or there is not one factor";
            return Err(TensorError::Unsupported { operation: OPERATION, why });
        }
        let w = x.tensor().columns() / n;
        let mut out = Tensor::empty(self.device(), [t, w], x.tensor().dtype())?;
        let timer = self.device().timer(Kind::Rows, 0, &[x.tensor(), &out]);
        match self.device() {
            Device::Cpu(cpu) => {
                let (weights, gamma) = (self.parameters().slice(mix.weights), self.parameters().slice(mix.gamma)[0]);
                with_float!(out.dtype(), E => {
                    kernels::forward(&cpu.kernels, x.tensor().slice::<E>(), w, weights, gamma, out.slice_mut());
                });
            }
            Device::Cuda(cuda) => {
                let (weights, gamma) = (self.parameters().vector(mix.weights), self.parameters().vector(mix.gamma));
                let (weights, gamma) = (weights.on_gpu(), gamma.on_gpu());
                cuda_kernels::forward(&cuda.gpu, x.tensor().on_gpu(), w, weights, gamma, out.on_gpu())?;
            }
        }
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
        let x = self.x.tensor();
        let w = x.columns() / self.mix.weights.shape().elements();
        let mut dx = match self.x.slot() {
            Some(_) => Some(Tensor::empty(back.device(), x.shape(), x.dtype())?),
            None => None,
        };
        let timer = back.device().timer(Kind::Rows, 0, &[x, &dy]);
        match back.device() {
            Device::Cpu(cpu) => {
                let weights = back.parameters.slice(self.mix.weights);
                let gamma = back.parameters.slice(self.mix.gamma)[0];
                let mut dweights = back.gradients.sum(self.mix.weights)?;
                let mut dgamma = back.gradients.sum(self.mix.gamma)?;
                with_float!(x.dtype(), E => {
                    let to = dx.as_mut().map(|dx| dx.slice_mut::<E>()).unwrap_or_default();
                    let (x, dy, dgamma) = (x.slice::<E>(), dy.slice::<E>(), &mut dgamma.slice_mut::<f32>()[0]);
                    kernels::backward(&cpu.kernels, x, w, weights, gamma, dy, to, dweights.slice_mut(), dgamma);
                });
            }
            Device::Cuda(cuda) => {
                let [weights, gamma] = [self.mix.weights, self.mix.gamma].map(|param| back.parameters.vector(param));
                let dweights = back.gradients.target(self.mix.weights)?;
                let dgamma = back.gradients.target(self.mix.gamma)?;
                let (weights, gamma, sums) =
                    (weights.on_gpu(), gamma.on_gpu(), [sum_into(&dweights), sum_into(&dgamma)]);
                let to = dx.as_ref().map(Tensor::on_gpu);
                cuda_kernels::backward(&cuda.gpu, x.on_gpu(), w, weights, gamma, dy.on_gpu(), to, sums)?;
            }
        }
        drop(timer);
        dx.map_or(Ok(()), |dx| back.add(self.x.slot(), dx))
    }
}
