//! Replaced tokens: what a generator drew is put into a text, which a discriminator then reads. Nothing of it has a gradient.

use henson_kernels::cpu::replace as kernels;
use henson_kernels::cuda::replace as cuda_kernels;

use crate::{DType, Device, Kind, Pass, Result, Tensor, Var};

impl Pass<'_> {
    /// The ids of a text (T) with `drawn` (P) at `rows` (P), and for each token 1 where that is not what stood there, else 0 (f32).
    /// No row may be named twice, but for [`Device::NOWHERE`], which stands for nothing.
    pub fn replace_tokens(&mut self, ids: &Tensor, rows: &Tensor, drawn: &Tensor) -> Result<(Tensor, Tensor)> {
        let tokens = ids.shape().elements();
        ids.check_dtype("replace_tokens", "ids", DType::U32)?;
        rows.check_dtype("replace_tokens", "rows", DType::U32)?;
        drawn.check_dtype("replace_tokens", "what was drawn", DType::U32)?;
        drawn.check_shape("replace_tokens", "what was drawn", rows.shape())?;
        super::rows::check_indices("replace_tokens", "row", self.device(), rows, tokens)?;
        let mut out = Tensor::empty(self.device(), [tokens], DType::U32)?;
        let mut labels = Tensor::empty(self.device(), [tokens], DType::F32)?;
        let _timer = self.device().timer(Kind::Sampling, 0, &[ids, &out, &labels]);
        match self.device() {
            Device::Cpu(cpu) => {
                let (ids, rows, drawn) = (ids.slice(), rows.slice(), drawn.slice());
                kernels::replace(&cpu.kernels, ids, rows, drawn, out.slice_mut(), labels.slice_mut());
            }
            Device::Cuda(cuda) => {
                let (ids, rows, drawn) = (ids.on_gpu(), rows.on_gpu(), drawn.on_gpu());
                cuda_kernels::replace(&cuda.gpu, ids, rows, drawn, out.on_gpu(), labels.on_gpu())?;
            }
        }
        Ok((out, labels))
    }

    /// How many tokens of a weight above 0 are replaced (a label above ½), are said to be (a logit above 0; f32), and both: three
    /// tensors of one u32.
    pub fn count_found(&mut self, logits: &Var, labels: &Tensor, weights: &Tensor) -> Result<[Tensor; 3]> {
        let logits = logits.tensor();
        let tokens = logits.shape().elements();
        logits.check_dtype("count_found", "the logits", DType::F32)?;
        labels.check_shape("count_found", "labels", [tokens])?;
        weights.check_shape("count_found", "weights", [tokens])?;
        let mut counts = Tensor::zeros(self.device(), [3], DType::U32)?;
        match self.device() {
            Device::Cpu(cpu) => {
                let found = kernels::found(&cpu.kernels, logits.slice(), labels.slice(), weights.slice());
                counts.slice_mut().copy_from_slice(&[found.replaced, found.said, found.both]);
            }
            Device::Cuda(cuda) => {
                let (labels, weights) = (labels.on_gpu(), weights.on_gpu());
                cuda_kernels::found(&cuda.gpu, logits.on_gpu(), labels, weights, counts.on_gpu())?;
            }
        }
        Ok([0, 1, 2].map(|i| counts.view(i, [1].into())))
    }
}
