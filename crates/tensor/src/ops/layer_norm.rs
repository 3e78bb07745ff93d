//! LayerNorm and RMSNorm with the residual and the dropout around them, in post- and pre-norm blocks.

use henson_kernels::cpu::layer_norm::{self as kernels, Drops};
use henson_kernels::cuda::layer_norm as cuda_kernels;

use super::{Op, own, sum_into, with_float};
use crate::tape::{Backward, Dropout, Slot};
use crate::{DType, Device, Kind, Layout, Param, Parameters, Pass, Result, Tensor, TensorError, Var};

/// A normalisation of rows, and its parameters.
#[derive(Clone, Copy, Debug)]
pub struct Norm {
    /// γ: H.
    pub weight: Param,
    /// β: H; none where there is no shift.
    pub bias: Option<Param>,
    /// Added to the variance, or to the mean square.
    pub epsilon: f32,
    /// Whether the mean is subtracted: LayerNorm; else it is RMSNorm.
    pub centred: bool,
}

impl Norm {
    pub(super) fn check(&self, operation: &'static str, parameters: &Parameters, columns: usize) -> Result<()> {
        parameters.vector(self.weight).check_shape(operation, "gamma", [columns])?;
        match self.bias {
            Some(bias) => parameters.vector(bias).check_shape(operation, "beta", [columns]),
            None => Ok(()),
        }
    }

    fn on_cpu<'a>(&self, parameters: &'a Parameters) -> kernels::Norm<'a> {
        let beta = self.bias.map(|bias| parameters.slice(bias));
        let (gamma, epsilon, centred) = (parameters.slice(self.weight), self.epsilon, self.centred);
        kernels::Norm { gamma, beta, epsilon, centred }
    }

    /// γ and β.
    pub(super) fn vectors(&self, parameters: &Parameters) -> (Tensor, Option<Tensor>) {
        (parameters.vector(self.weight), self.bias.map(|bias| parameters.vector(bias)))
    }

    pub(super) fn on_gpu<'a>(&self, (gamma, beta): &'a (Tensor, Option<Tensor>)) -> cuda_kernels::Norm<'a> {
        let (gamma, beta) = (gamma.on_gpu(), beta.as_ref().map(Tensor::on_gpu));
        cuda_kernels::Norm { gamma, beta, epsilon: self.epsilon, centred: self.centred }
    }
}

impl Pass<'_> {
    /// norm(x), rows of any origin.
    pub fn norm(&mut self, x: Var, norm: &Norm) -> Result<Var> {
        Ok(self.normalise(x, None, norm, Around::default(), false)?.1)
    }

    /// dropout(norm(x)): what follows BERT's embeddings and T5's last block. Rows are the layout's tokens.
    pub fn norm_dropout(&mut self, x: Var, norm: &Norm, layout: &Layout, (p, site): (f32, u32)) -> Result<Var> {
        let around = Around { after: self.dropout(p, site), rows: Some(layout.token_rows().clone()), before: None };
        Ok(self.normalise(x, None, norm, around, false)?.1)
    }

    /// norm(residual + dropout(x)): the end of each half of a post-norm block. Rows are the layout's tokens.
    pub fn add_norm(
        &mut self,
        x: Var,
        residual: &Var,
        norm: &Norm,
        layout: &Layout,
        dropout: (f32, u32),
    ) -> Result<Var> {
        let around = self.around_residual(layout, dropout);
        Ok(self.normalise(x, Some(residual), norm, around, false)?.1)
    }

    /// residual + dropout(x), and its norm: the end of a part of a pre-norm block and the start of the next.
    pub fn add_pre_norm(
        &mut self,
        x: Var,
        residual: &Var,
        norm: &Norm,
        layout: &Layout,
        dropout: (f32, u32),
    ) -> Result<(Var, Var)> {
        let around = self.around_residual(layout, dropout);
        let (sum, y) = self.normalise(x, Some(residual), norm, around, true)?;
        Ok((sum, y))
    }

    fn around_residual(&mut self, layout: &Layout, (p, site): (f32, u32)) -> Around {
        Around { before: self.dropout(p, site), rows: Some(layout.token_rows().clone()), after: None }
    }

    /// The sum and its norm. The sum has a gradient of its own only where it is used further on, as a stream of residuals.
    fn normalise(
        &mut self,
        x: Var,
        residual: Option<&Var>,
        norm: &Norm,
        around: Around,
        stream: bool,
    ) -> Result<(Var, Var)> {
        let (x_slot, shape) = (x.slot(), x.tensor().shape());
        self.reads(norm);
        norm.check("norm", self.parameters(), x.tensor().columns())?;
        if let Some(residual) = residual {
            residual.tensor().check_shape("norm", "the residual", shape)?;
            residual.tensor().check_dtype("norm", "the residual", x.tensor().dtype())?;
        }
        if let Some(rows) = &around.rows {
            rows.check_shape("norm", "the layout", [x.tensor().rows(), 2])?;
        }
        let on_gpu = matches!(self.device(), Device::Cuda(_));
        // On a GPU the gradient of the bias that made x comes along with x's own, where x has no other use.
        let bias = match self.device() {
            Device::Cuda(_) if x.tensor().is_unique() => x_slot.and_then(|slot| self.take_bias_of_last(slot)),
            _ => None,
        };
        // Without a backward, a GPU leaves the output in the same place, and no statistics.
        let in_place = !self.is_training() && !stream && on_gpu;
        // The sum takes the place of x, whose value nobody needs afterwards; where it is x itself, others may read it too.
        let changed = residual.is_some() || around.before.is_some() || on_gpu;
        let mut sum = if changed { own(self.device(), x.into_tensor())? } else { x.into_tensor() };
        let mut y = if in_place { sum.clone() } else { Tensor::empty(self.device(), shape, sum.dtype())? };
        let mut statistics = Tensor::empty(self.device(), [if in_place { 0 } else { sum.rows() }, 2], DType::F32)?;
        let moved = [&sum, &sum, &y, &y];
        let moved = if residual.is_some() { &moved[..] } else { &moved[..3] };
        let timer = self.device().timer(Kind::LayerNorm, 0, moved);
        match self.device() {
            Device::Cpu(cpu) => with_float!(sum.dtype(), E => kernels::forward(
                &cpu.kernels,
                sum.slice_mut::<E>(),
                residual.map(|r| r.tensor().slice::<E>()),
                &norm.on_cpu(self.parameters()),
                around.drops(),
                y.slice_mut::<E>(),
                bytemuck::cast_slice_mut(statistics.slice_mut::<f32>()),
            )),
            Device::Cuda(cuda) => cuda_kernels::forward(
                &cuda.gpu,
                sum.on_gpu(),
                None,
                residual.map(|r| r.tensor().on_gpu()),
                norm.on_gpu(&norm.vectors(self.parameters())),
                around.drops_on_gpu(),
                y.on_gpu(),
                (!in_place).then(|| statistics.on_gpu()),
            )?,
        }
        drop(timer);
        let stream = if stream { self.var(sum.clone()) } else { Var::without_gradient(sum.clone()) };
        let y = self.var(y);
        if let Some(out) = y.slot() {
            let (residual, stream, norm) = (residual.and_then(Var::slot), stream.slot(), *norm);
            let norm = LayerNorm { x: x_slot, residual, sum, statistics, norm, bias, around, stream, out };
            self.record(Op::LayerNorm(norm));
        }
        Ok((stream, y))
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
    pub(super) norm: Norm,
    /// The bias of the layer that made x, whose gradient is computed here.
    pub(super) bias: Option<Param>,
    pub(super) around: Around,
    /// Where the gradient of the sum is collected, if it is used further on.
    pub(super) stream: Option<Slot>,
    pub(super) out: Slot,
}

impl LayerNorm {
    pub(super) fn backward(self, back: &mut Backward<'_>) -> Result<()> {
        let dstream = self.stream.and_then(|slot| back.take(slot));
        let device = back.device();
        let dy = match (back.take(self.out), &dstream) {
            (Some(dy), _) => dy,
            (None, None) => return Ok(()),
            // The norm's own output was not used.
            (None, Some(_)) => Tensor::zeros(device, self.sum.shape(), self.sum.dtype())?,
        };
        if matches!(device, Device::Cuda(_)) && self.sum.columns() > cuda_kernels::MOST_COLUMNS {
            let why = "more than 8192 columns cannot be trained on a GPU: use --device cpu";
            return Err(TensorError::Unsupported { operation: "layer_norm", why });
        }
        let mut dsum = Tensor::empty(device, self.sum.shape(), self.sum.dtype())?;
        let mut dx = match &self.around.before {
            Some(_) => Some(Tensor::empty(device, self.sum.shape(), self.sum.dtype())?),
            None => None,
        };
        let timer = device.timer(Kind::LayerNormGradient, 0, &[&dy, &dy, &dsum, dx.as_ref().unwrap_or(&dsum)]);
        match device {
            Device::Cpu(cpu) => {
                let mut dgamma = back.gradients.sum(self.norm.weight)?;
                let mut dbeta = self.norm.bias.map(|bias| back.gradients.sum(bias)).transpose()?;
                with_float!(self.sum.dtype(), E => kernels::backward(
                    &cpu.kernels,
                    dy.slice::<E>(),
                    dstream.as_ref().map(|d| d.slice::<E>()),
                    self.sum.slice::<E>(),
                    bytemuck::cast_slice(self.statistics.slice::<f32>()),
                    &self.norm.on_cpu(back.parameters),
                    self.around.drops(),
                    dsum.slice_mut::<E>(),
                    dx.as_mut().map(|dx| dx.slice_mut::<E>()),
                    dgamma.slice_mut(),
                    dbeta.as_mut().map(|dbeta| dbeta.slice_mut()),
                ));
            }
            Device::Cuda(cuda) => {
                let dgamma = back.gradients.target(self.norm.weight)?;
                let dbeta = self.norm.bias.map(|bias| back.gradients.target(bias)).transpose()?;
                let dbias = self.bias.map(|bias| back.gradients.target(bias)).transpose()?;
                cuda_kernels::backward(
                    &cuda.gpu,
                    dy.on_gpu(),
                    dstream.as_ref().map(Tensor::on_gpu),
                    self.sum.on_gpu(),
                    self.statistics.on_gpu(),
                    self.norm.on_gpu(&self.norm.vectors(back.parameters)),
                    self.around.drops_on_gpu(),
                    dsum.on_gpu(),
                    dx.as_ref().map(Tensor::on_gpu),
                    sum_into(&dgamma),
                    dbeta.as_ref().map(sum_into),
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
