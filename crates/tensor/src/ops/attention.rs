//! Attention over flat tokens, from the fused projection.

use henson_kernels::cpu::attention as kernels;
use henson_kernels::cuda::attention as cuda_kernels;

use super::{Op, with_float};
use crate::tape::{Backward, Dropout, Slot};
use crate::{DType, Device, Kind, Layout, Pass, Result, Tensor, TensorError, Var};

impl Pass<'_> {
    /// Self-attention: `qkv` (T×3H) holds query, key and value of each token; gives T×H.
    pub fn attention(
        &mut self,
        qkv: Var,
        layout: &Layout,
        heads: usize,
        causal: bool,
        (p, site): (f32, u32),
    ) -> Result<Var> {
        let sizes = Sizes::new(qkv.tensor(), layout, heads, causal)?;
        let out = Tensor::empty(self.device(), [layout.tokens(), sizes.hidden()], self.dtype())?;
        let log_sums = Tensor::empty(self.device(), [heads, layout.tokens()], DType::F32)?;
        let dropout = self.dropout(p, site);
        let _timer = self.device().timer(Kind::Attention, 2 * sizes.flops(layout), &[qkv.tensor(), &out]);
        match self.device() {
            Device::Cpu(cpu) => with_float!(out.dtype(), E => kernels::forward(
                &cpu.kernels,
                &sizes.attention(),
                &kernels::Inputs::fused(&sizes.attention(), qkv.tensor().slice::<E>(), layout.offsets()),
                dropout.as_ref().and_then(Dropout::on_cpu).map(|dropout| (dropout, layout.numbers().slice())),
                out.slice_mut::<E>(),
                log_sums.slice_mut(),
            )),
            Device::Cuda(cuda) => {
                sizes.check_on_gpu()?;
                cuda_kernels::forward(
                    &cuda.gpu,
                    qkv.tensor().on_gpu(),
                    sizes.shape_on_gpu(layout)?,
                    dropout.as_ref().and_then(Dropout::on_gpu),
                    out.on_gpu(),
                    log_sums.on_gpu(),
                )?;
            }
        }
        let kept = match self.device() {
            Device::Cpu(_) => None,
            Device::Cuda(_) => Some(out.clone()),
        };
        let y = self.var(out);
        if let Some(out) = y.slot() {
            let layout = layout.clone();
            self.record(Op::Attention(Attention { qkv, layout, sizes, log_sums, dropout, kept, out }));
        }
        Ok(y)
    }

    /// The probabilities that [`Pass::attention`] weighs with, before dropout: A×S×S for each sequence in turn.
    pub fn attention_maps(&mut self, qkv: &Var, layout: &Layout, heads: usize, causal: bool) -> Result<Tensor> {
        let sizes = Sizes::new(qkv.tensor(), layout, heads, causal)?;
        let attention = sizes.attention();
        let offsets = layout.offsets();
        let out = Tensor::empty(self.device(), [attention.probabilities(offsets, offsets)], DType::F32)?;
        match self.device() {
            Device::Cpu(cpu) => with_float!(qkv.tensor().dtype(), E => {
                let inputs = kernels::Inputs::fused(&attention, qkv.tensor().slice::<E>(), offsets);
                kernels::probabilities(&cpu.kernels, &attention, &inputs, out.slice_mut());
            }),
            Device::Cuda(cuda) => {
                sizes.check_on_gpu()?;
                let shape = sizes.shape_on_gpu(layout)?;
                cuda_kernels::probabilities(&cuda.gpu, qkv.tensor().on_gpu(), shape, offsets, out.on_gpu())?;
            }
        }
        Ok(out)
    }
}

#[derive(Clone, Copy)]
struct Sizes {
    heads: usize,
    head_size: usize,
    causal: bool,
}

impl Sizes {
    fn new(qkv: &Tensor, layout: &Layout, heads: usize, causal: bool) -> Result<Self> {
        let head_size = qkv.columns() / (3 * heads.max(1));
        if heads == 0 || head_size == 0 {
            return Err(TensorError::Unsupported { operation: "attention", why: "there are no heads" });
        }
        qkv.check_shape("attention", "qkv", [layout.tokens(), 3 * heads * head_size])?;
        Ok(Self { heads, head_size, causal })
    }

    /// Of one of the products of every sequence: S×S×D for each head.
    fn flops(&self, layout: &Layout) -> usize {
        let squares: usize = layout.offsets().windows(2).map(|w| ((w[1] - w[0]) as usize).pow(2)).sum();
        2 * squares * self.hidden()
    }

    fn hidden(&self) -> usize {
        self.heads * self.head_size
    }

    fn attention(&self) -> kernels::Attention {
        let window = if self.causal { kernels::Window::CAUSAL } else { kernels::Window::FULL };
        kernels::Attention { window, ..kernels::Attention::new(self.heads, self.head_size) }
    }

    fn shape_on_gpu<'a>(&self, layout: &'a Layout) -> Result<cuda_kernels::Attention<'a>> {
        let Self { heads, head_size, causal } = *self;
        let (table, room) = layout.attention_table()?;
        let tokens = layout.tokens();
        Ok(cuda_kernels::Attention { table: table.on_gpu(), room, tokens, heads, head_size, causal })
    }

    fn check_on_gpu(&self) -> Result<()> {
        if self.head_size <= cuda_kernels::LARGEST_HEAD {
            return Ok(());
        }
        let why = "heads of more than 256 numbers are not supported on a GPU: use --device cpu";
        Err(TensorError::Unsupported { operation: "attention", why })
    }
}

/// A recorded attention.
pub(crate) struct Attention {
    qkv: Var,
    layout: Layout,
    sizes: Sizes,
    log_sums: Tensor,
    dropout: Option<Dropout>,
    /// The output, where the way back needs it.
    kept: Option<Tensor>,
    out: Slot,
}

impl Attention {
    pub(super) fn backward(self, back: &mut Backward<'_>) -> Result<()> {
        let Some(dout) = back.take(self.out) else { return Ok(()) };
        let qkv = self.qkv.tensor();
        let dqkv = Tensor::empty(back.device(), qkv.shape(), qkv.dtype())?;
        let flops = 5 * self.sizes.flops(&self.layout);
        let timer = back.device().timer(Kind::AttentionGradient, flops, &[qkv, qkv, &dout]);
        match back.device() {
            Device::Cpu(cpu) => with_float!(qkv.dtype(), E => kernels::backward(
                &cpu.kernels,
                &self.sizes.attention(),
                &kernels::Inputs::fused(&self.sizes.attention(), qkv.slice::<E>(), self.layout.offsets()),
                self.dropout.as_ref().and_then(Dropout::on_cpu).map(|d| (d, self.layout.numbers().slice())),
                self.log_sums.slice(),
                dout.slice::<E>(),
                kernels::Gradients::fused(&self.sizes.attention(), dqkv.slice_mut::<E>()),
            )),
            Device::Cuda(cuda) => cuda_kernels::backward(
                &cuda.gpu,
                qkv.on_gpu(),
                self.sizes.shape_on_gpu(&self.layout)?,
                self.dropout.as_ref().and_then(Dropout::on_gpu),
                self.kept.as_ref().unwrap_or(&dout).on_gpu(),
                self.log_sums.on_gpu(),
                dout.on_gpu(),
                dqkv.on_gpu(),
            )?,
        }
        drop(timer);
        back.add(self.qkv.slot(), dqkv)
    }
}
