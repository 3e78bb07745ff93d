//! LayerNorm with the residual and the dropout around it.

use henson_kernels::cpu::dropout::Dropout;
use henson_kernels::cpu::layer_norm::{self as kernels, Drops};

use super::{Op, own, with_float};
use crate::tape::{Backward, Slot};
use crate::{DType, Device, Kind, Layout, Param, Pass, Result, Tensor, Var};

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
        // The sum takes the place of x, whose value nobody needs on the way back.
        let sum = own(self.device(), x.into_tensor())?;
        let y = Tensor::empty(self.device(), shape, sum.dtype())?;
        let statistics = Tensor::empty(self.device(), [sum.rows(), 2], DType::F32)?;
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
        }
        drop(timer);
        let y = self.var(y);
        if let Some(out) = y.slot() {
            let residual = residual.and_then(Var::slot);
            self.record(Op::LayerNorm(LayerNorm { x: x_slot, residual, sum, statistics, gamma, beta, around, out }));
        }
        Ok(y)
    }
}

/// Dropout before and after the normalisation.
#[derive(Default)]
struct Around {
    before: Option<Dropout>,
    after: Option<Dropout>,
    rows: Option<Tensor>,
}

impl Around {
    fn drops(&self) -> Drops<'_> {
        let rows = self.rows.as_ref().map_or(&[][..], |rows| bytemuck::cast_slice(rows.slice::<u32>()));
        Drops { before: self.before, after: self.after, rows }
    }
}

/// A recorded normalisation.
pub(crate) struct LayerNorm {
    x: Option<Slot>,
    residual: Option<Slot>,
    sum: Tensor,
    statistics: Tensor,
    gamma: Param,
    beta: Param,
    around: Around,
    out: Slot,
}

impl LayerNorm {
    pub(super) fn backward(self, back: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = back.take(self.out) else { return Ok(()) };
        let device = back.device();
        let dsum = Tensor::empty(device, self.sum.shape(), self.sum.dtype())?;
        let dx = match self.around.before {
            Some(_) => Some(Tensor::empty(device, self.sum.shape(), self.sum.dtype())?),
            None => None,
        };
        let timer = device.timer(Kind::LayerNormGradient, 0, &[&dy, &dy, &dsum, dx.as_ref().unwrap_or(&dsum)]);
        let (dgamma, dbeta) = (back.gradients.sum(self.gamma), back.gradients.sum(self.beta));
        match device {
            Device::Cpu(cpu) => with_float!(self.sum.dtype(), E => kernels::backward(
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
            )),
        }
        drop(timer);
        drop(dy);
        back.add(self.x, dx.unwrap_or_else(|| dsum.clone()))?;
        back.add(self.residual, dsum)
    }
}
