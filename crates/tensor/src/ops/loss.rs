//! Losses. In training, a loss replaces the logits by their gradient at once, so that a vocabulary's worth of them
//! exists only one time; a pass's loss is the sum of all its loss operations.

use henson_kernels::cpu::loss as kernels;
use henson_kernels::cpu::span;

use super::rows::check_indices;
use super::{own, with_float};
use crate::{DType, Device, Kind, Layout, Pass, Result, Tensor, TensorError, Var};

impl Pass<'_> {
    /// scale·Σ weight·(−ln of the softmax at the target) over rows (P×columns), of which the first `classes` columns count.
    /// Gives the loss as a tensor of one number, and the loss of each row before weight and scale.
    pub fn cross_entropy(
        &mut self,
        logits: Var,
        classes: usize,
        targets: &Tensor,
        weights: Option<&Tensor>,
        scale: f32,
    ) -> Result<(Tensor, Tensor)> {
        let (rows, columns) = (logits.tensor().rows(), logits.tensor().columns());
        targets.check_shape("cross_entropy", "targets", [rows])?;
        targets.check_dtype("cross_entropy", "targets", DType::U32)?;
        check_indices("cross_entropy", "target", self.device(), targets, classes)?;
        if let Some(weights) = weights {
            weights.check_shape("cross_entropy", "weights", [rows])?;
        }
        let losses = Tensor::empty(self.device(), [rows], DType::F32)?;
        let loss = self.replace_by_gradient(logits, |device, logits, want_gradient| match device {
            Device::Cpu(cpu) => Ok(with_float!(logits.dtype(), E => kernels::cross_entropy(
                &cpu.kernels,
                logits.slice_mut::<E>(),
                columns,
                classes,
                targets.slice(),
                weights.map(|weights| weights.slice()),
                scale,
                want_gradient,
                losses.slice_mut(),
            ))),
        })?;
        Ok((loss, losses))
    }

    /// scale·Σ (x − target)².
    pub fn squared_error(&mut self, x: Var, targets: &Tensor, scale: f32) -> Result<Tensor> {
        targets.check_shape("squared_error", "targets", [x.tensor().shape().elements()])?;
        self.replace_by_gradient(x, |device, x, want_gradient| match device {
            Device::Cpu(cpu) => Ok(with_float!(x.dtype(), E => kernels::mean_squared_error(
                &cpu.kernels, x.slice_mut::<E>(), targets.slice(), scale, want_gradient,
            ))),
        })
    }

    /// scale·Σ of the binary cross-entropy of every logit with its own target in [0, 1].
    pub fn binary_cross_entropy(&mut self, logits: Var, targets: &Tensor, scale: f32) -> Result<Tensor> {
        targets.check_shape("binary_cross_entropy", "targets", [logits.tensor().shape().elements()])?;
        self.replace_by_gradient(logits, |device, logits, want_gradient| match device {
            Device::Cpu(cpu) => Ok(with_float!(logits.dtype(), E => kernels::binary_cross_entropy(
                &cpu.kernels, logits.slice_mut::<E>(), targets.slice(), scale, want_gradient,
            ))),
        })
    }

    /// scale·Σ weight·(−ln of the softmax at the target) where each sequence has two softmaxes over its own tokens: column 0
    /// of the logits (T×2) for where an answer starts, column 1 for where it ends. `targets` and `weights` are B×2.
    pub fn span_cross_entropy(
        &mut self,
        logits: Var,
        layout: &Layout,
        targets: &[[u32; 2]],
        weights: &[[f32; 2]],
        scale: f32,
    ) -> Result<Tensor> {
        logits.tensor().check_shape("span_cross_entropy", "the logits", [layout.tokens(), 2])?;
        let lengths = layout.offsets().windows(2).map(|w| (w[1] - w[0]) as usize);
        for (length, targets) in lengths.zip(targets) {
            if let Some(target) = targets.iter().find(|target| **target as usize >= length) {
                let (operation, what) = ("span_cross_entropy", "target");
                return Err(TensorError::Index { operation, what, index: *target as usize, end: length });
            }
        }
        if targets.len() != layout.sequences() || weights.len() != layout.sequences() {
            let why = "there must be one target and one weight for each sequence";
            return Err(TensorError::Unsupported { operation: "span_cross_entropy", why });
        }
        self.replace_by_gradient(logits, |device, logits, want_gradient| match device {
            Device::Cpu(cpu) => Ok(with_float!(logits.dtype(), E => {
                let logits = logits.slice_mut::<E>();
                span::cross_entropy(&cpu.kernels, logits, layout.offsets(), targets, weights, scale, want_gradient)
            })),
        })
    }

    /// The probabilities of the first `classes` columns of each row: P×classes in f32.
    pub fn softmax(&mut self, logits: &Var, classes: usize) -> Result<Tensor> {
        let (rows, columns) = (logits.tensor().rows(), logits.tensor().columns());
        let out = Tensor::empty(self.device(), [rows, classes], DType::F32)?;
        match self.device() {
            Device::Cpu(cpu) => with_float!(logits.tensor().dtype(), E => {
                kernels::softmax(&cpu.kernels, logits.tensor().slice::<E>(), columns, classes, out.slice_mut());
            }),
        }
        Ok(out)
    }

    /// How many rows have their largest logit, of the first `classes`, at the target.
    pub fn count_correct(&mut self, logits: &Var, classes: usize, targets: &Tensor) -> Result<usize> {
        let columns = logits.tensor().columns();
        targets.check_shape("count_correct", "targets", [logits.tensor().rows()])?;
        match self.device() {
            Device::Cpu(cpu) => Ok(with_float!(logits.tensor().dtype(), E => {
                let logits = logits.tensor().slice::<E>();
                kernels::accuracy(&cpu.kernels, logits, columns, classes, targets.slice(), None)
            })),
        }
    }

    /// Which rows have their largest logit, of the first `classes`, at the target.
    pub fn hits(&mut self, logits: &Var, classes: usize, targets: &Tensor) -> Result<Vec<bool>> {
        let (rows, columns) = (logits.tensor().rows(), logits.tensor().columns());
        targets.check_shape("hits", "targets", [rows])?;
        let mut hits = vec![false; rows];
        let _timer = self.device().timer(Kind::Loss, 0, &[logits.tensor()]);
        match self.device() {
            Device::Cpu(cpu) => with_float!(logits.tensor().dtype(), E => {
                let logits = logits.tensor().slice::<E>();
                kernels::hits(&cpu.kernels, logits, columns, classes, targets.slice(), &mut hits);
            }),
        }
        Ok(hits)
    }

    /// Runs a loss kernel on logits that it may overwrite, and starts their gradient.
    fn replace_by_gradient(
        &mut self,
        logits: Var,
        kernel: impl FnOnce(&Device, &Tensor, bool) -> Result<f32>,
    ) -> Result<Tensor> {
        let slot = logits.slot();
        let mut logits = logits.into_tensor();
        if slot.is_some() {
            logits = own(self.device(), logits)?;
        }
        let timer = self.device().timer(Kind::Loss, 0, &[&logits, &logits]);
        let loss = kernel(self.device(), &logits, slot.is_some())?;
        drop(timer);
        if let Some(slot) = slot {
            self.start_gradient(slot, logits)?;
        }
        Tensor::from_slice(self.device(), [1], &[loss])
    }
}
