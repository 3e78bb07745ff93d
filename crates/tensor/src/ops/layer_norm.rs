//! LayerNorm with the residual and the dropout around it.

use henson_kernels::cpu::layer_norm::{self as kernels, Drops};
use henson_kernels::cuda::layer_norm as cuda_kernels;

use super::{Op, own, sum_into, with_float};
use crate::tape::{Backward, Dropout, Slot};
use crate::{DType, Device, Kind, Layout, Param, Pass, Result, Tensor, TensorError, Var};

impl Pass<'_> {
    /// LN(x), rows of any origin.
    pub fn layer_norm(&mut self, x: Var, gamma: Param, beta: Param, epsilon: f32) -> Result<Var> {
        self.normalise(x, None, gamma, beta, epsilon, Around::default())
    }

    /// dropout(LN(x)): what follows BERT's embeddings. Rows are the layout's tokens.
    pub fn layer_norm_dropout(
        &mut self,
        x: Var,
        gamma: Param,
        beta: Param,
        epsilon: f32,
        layout: &Layout,
        (p, site): (f32, u32),
    ) -> Result<Var> {
        let around = Around { after: self.dropout(p, site), rows: Some(layout.token_rows().clone()), before: None };
        self.normalise(x, None, gamma, beta, epsilon, around)
    }

    /// LN(residual + dropout(x)): the end of each half of a block. Rows are the layout's tokens.
    pub fn add_layer_norm(
        &mut self,
        x: Var,
        residual: &Var,
        gamma: Param,
        beta: Param,
        epsilon: f32,
        layout: &Layout,
        (p, site): (f32, u32),
    ) -> Result<Var> {
        let around = Around { before: self.dropout(p, site), rows: Some(layout.token_rows().clone()), after: None };
        self.normalise(x, Some(residual), gamma, beta, epsilon, around)
    }

    fn normalise(
        &mut self,
        x: Var,
        residual: Option<&Var>,
        gamma: Param,
        beta: Param,
        epsilon: f32,
        around: Around,
    ) -> Result<Var> {
        let (x_slot, shape) = (x.slot(), x.tensor().shape());
        let (scale, shift) = (self.parameters().vector(gamma), self.parameters().vector(beta));
        scale.check_shape("layer_norm", "gamma", [x.tensor().columns()])?;
        shift.check_shape("layer_norm", "beta", [x.tensor().columns()])?;
        if let Some(residual) = residual {
            residual.tensor().check_shape("layer_norm", "the residual", shape)?;
            residual.tensor().check_dtype("layer_norm", "the residual", x.tensor().dtype())?;
        }
        if let Some(rows) = &around.rows {
            rows.check_shape("layer_norm", "the layout", [x.tensor().rows(), 2])?;
        }
        // On a GPU the gradient of the bias that made x comes along with x's own.
        let bias = match self.device() {
            Device::Cpu(_) => None,
            Device::Cuda(_) => x_slot.and_then(|slot| self.take_bias_of_last(slot)),
        };
        // The sum takes the place of x, whose value nobody needs on the way back.
        let sum = own(self.device(), x.into_tensor())?;
        // Without a way back, a GPU leaves the output in the same place, and no statistics.
        let in_place = !self.is_training() && matches!(self.device(), Device::Cuda(_));
        let y = if in_place { sum.clone() } else { Tensor::empty(self.device(), shape, sum.dtype())? };
        let statistics = Tensor::empty(self.device(), [if in_place { 0 } else { sum.rows() }, 2], DType::F32)?;
        let moved = [&sum, &sum, &y, &y];
        let moved = if residual.is_some() { &moved[..] } else { &moved[..3] };
        let timer = self.device().timer(Kind::LayerNorm, 0, moved);
        match self.device() {
            Device::Cpu(cpu) => with_float!(sum.dtype(), E => kernels::forward(
                &cpu.kernels,
                sum.slice_mut::<E>(),
                residual.map(|r| r.tensor().slice::<E>()),
                scale.slice(),
                shift.slice(),
                epsilon,
                around.drops(),
                y.slice_mut::<E>(),
                bytemuck::cast_slice_mut(statistics.slice_mut::<f32>()),
            )),
            Device::Cuda(cuda) => cuda_kernels::forward(
                &cuda.gpu,
                sum.on_gpu(),
                None,
                residual.map(|r| r.tensor().on_gpu()),
                scale.on_gpu(),
                shift.on_gpu(),
                epsilon,
                around.drops_on_gpu(),
                y.on_gpu(),
                (!in_place).then(|| statistics.on_gpu()),
            )?,
        }
        drop(timer);
        let y = self.var(y);
        if let Some(out) = y.slot() {
            let residual = residual.and_then(Var::slot);
            self.record(Op::LayerNorm(LayerNorm {
                x: x_slot,
                residual,
                sum,
                statistics,
                gamma,
                beta,
                bias,
                around,
                out,
            }));
        }
        Ok(y)
    }
}

/// Dropout before and after the normalisation.
#[derive(Default)]
pub(super) struct Around {
    pub(super) before: Option<Dropout>,
    pub(super) after: Option<Dropout>,
    pub(super) rows: Option<Tensor>,
}

impl Around {
    fn drops(&self) -> Drops<'_> {
        let rows = self.rows.as_ref().map_or(&[][..], |rows| bytemuck::cast_slice(rows.slice::<u32>()));
        let [before, after] = [&self.before, &self.after].map(|d| d.as_ref().and_then(Dropout::on_cpu));
        Drops { before, after, rows }
    }

    pub(super) fn drops_on_gpu(&self) -> cuda_kernels::Drops<'_> {
        let [before, after] = [&self.before, &self.after].map(|d| d.as_ref().and_then(Dropout::on_gpu));
        cuda_kernels::Drops { before, after, rows: self.rows.as_ref().map(Tensor::on_gpu) }
    }
}

/// A recorded normalisation.
pub(crate) struct LayerNorm {
    pub(super) x: Option<Slot>,
    pub(super) residual: Option<Slot>,
    pub(super) sum: Tensor,
    pub(super) statistics: Tensor,
    pub(super) gamma: Param,
    pub(super) beta: Param,
    /// The bias of the layer that made x, whose gradient is computed here.
    pub(super) bias: Option<Param>,
    pub(super) around: Around,
    pub(super) out: Slot,
}

impl LayerNorm {
    pub(super) fn backward(self, back: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = back.take(self.out) else { return Ok(()) };
        let device = back.device();
        if matches!(device, Device::Cuda(_)) && self.sum.columns() > cuda_kernels::MOST_COLUMNS {
            let why = "more than 8192 columns cannot be trained on a GPU: use --device cpu";
            return Err(TensorError::Unsupported { operation: "layer_norm", why });
        }
        let dsum = Tensor::empty(device, self.sum.shape(), self.sum.dtype())?;
        let dx = match &self.around.before {
            Some(_) => Some(Tensor::empty(device, self.sum.shape(), self.sum.dtype())?),
            None => None,
        };
        let timer = device.timer(Kind::LayerNormGradient, 0, &[&dy, &dy, &dsum, dx.as_ref().unwrap_or(&dsum)]);
        match device {
            Device::Cpu(cpu) => {
                let (dgamma, dbeta) = (back.gradients.sum(self.gamma)?, back.gradients.sum(self.beta)?);
                with_float!(self.sum.dtype(), E => kernels::backward(
                &cpu.kernels,
                dy.slice::<E>(),
                self.sum.slice::<E>(),
                bytemuck::cast_slice(self.statistics.slice::<f32>()),
                back.parameters.vector(self.gamma).slice(),
                self.around.drops(),
                dsum.slice_mut::<E>(),
                dx.as_ref().map(|dx| dx.slice_mut::<E>()),
                dgamma.slice_mut(),
                dbeta.slice_mut(),
                ));
            }
            Device::Cuda(cuda) => {
                let (dgamma, dbeta) = (back.gradients.target(self.gamma), back.gradients.target(self.beta));
                let dbias = self.bias.map(|bias| back.gradients.target(bias));
                cuda_kernels::backward(
                    &cuda.gpu,
                    dy.on_gpu(),
                    self.sum.on_gpu(),
                    self.statistics.on_gpu(),
                    back.parameters.vector(self.gamma).on_gpu(),
                    self.around.drops_on_gpu(),
                    dsum.on_gpu(),
                    dx.as_ref().map(Tensor::on_gpu),
                    sum_into(&dgamma),
                    sum_into(&dbeta),
                    dbias.as_ref().map(sum_into),
                )?;
            }
        }
        drop(timer);
        drop(dy);
        back.add(self.x, dx.unwrap_or_else(|| dsum.clone()))?;
        back.add(self.residual, dsum)
    }
}
