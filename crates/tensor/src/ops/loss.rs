//! Losses. In training, a loss replaces the logits by their gradient at once, so that a vocabulary's worth of them
//! exists only one time; a pass's loss is the sum of all its loss operations.

use henson_kernels::cpu::loss as kernels;
use henson_kernels::cpu::sample::{Sampler, sample};
use henson_kernels::cpu::span;
use henson_kernels::cuda::loss::{self as cuda_kernels, Total};
use henson_kernels::cuda::{Scalar, Step};

use super::rows::check_indices;
use super::{own, with_float};
use crate::{DType, Device, Kind, Layout, Pass, Result, Tensor, TensorError, Training, Var};

/// What [`Pass::log_sums`] gives, for each row.
#[derive(Clone, Debug)]
pub struct LogSums {
    /// ln Σ eˣ.
    pub sums: Vec<f32>,
    /// The place of the largest logit, and it; where logits are not on the host.
    pub largest: Option<Vec<(u32, f32)>>,
}

impl LogSums {
    /// Reads what [`Pass::log_sums`] gave; waits for it. An index outside of its table that a kernel met before is an error here.
    pub fn read(found: &Tensor) -> Result<Self> {
        let Some(cuda) = found.cuda() else { return Ok(Self { sums: found.slice().to_vec(), largest: None }) };
        let words = cuda.read_words(found.on_gpu())?;
        let (sums, largest) = words.split_at(found.columns());
        let (values, places) = largest.split_at(found.columns());
        let numbers = |words: &[u32]| words.iter().map(|word| f32::from_bits(*word)).collect::<Vec<_>>();
        Ok(Self { sums: numbers(sums), largest: Some(places.iter().copied().zip(numbers(values)).collect()) })
    }
}

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
        self.smoothed_cross_entropy(logits, classes, targets, weights, 0.0, scale)
    }

    /// The same with label smoothing: a share of each target is spread evenly over all classes.
    pub fn smoothed_cross_entropy(
        &mut self,
        logits: Var,
        classes: usize,
        targets: &Tensor,
        weights: Option<&Tensor>,
        smoothing: f32,
        scale: f32,
    ) -> Result<(Tensor, Tensor)> {
        if !(0.0..1.0).contains(&smoothing) {
            let why = "label smoothing is a share in [0, 1)";
            return Err(TensorError::Unsupported { operation: "cross_entropy", why });
        }
        self.reads(&(classes, smoothing, scale));
        let (rows, columns) = (logits.tensor().rows(), logits.tensor().columns());
        targets.check_shape("cross_entropy", "targets", [rows])?;
        targets.check_dtype("cross_entropy", "targets", DType::U32)?;
        check_indices("cross_entropy", "target", self.device(), targets, classes)?;
        if let Some(weights) = weights {
            weights.check_shape("cross_entropy", "weights", [rows])?;
        }
        let mut losses = Tensor::empty(self.device(), [rows], DType::F32)?;
        let loss = self.replace_by_gradient(logits, |device, logits, want_gradient, loss| {
            match device {
                Device::Cpu(cpu) => with_float!(logits.dtype(), E => {
                    loss.slice_mut::<f32>()[0] = kernels::cross_entropy(
                        &cpu.kernels,
                        logits.slice_mut::<E>(),
                        columns,
                        classes,
                        targets.slice(),
                        weights.map(|weights| weights.slice()),
                        smoothing,
                        scale,
                        want_gradient,
                        losses.slice_mut(),
                    );
                }),
                Device::Cuda(cuda) => cuda_kernels::cross_entropy(
                    &cuda.gpu,
                    logits.on_gpu(),
                    columns,
                    classes,
                    targets.on_gpu(),
                    weights.map(Tensor::on_gpu),
                    smoothing,
                    Scalar::Value(scale),
                    want_gradient,
                    losses.on_gpu(),
                    total(loss),
                )?,
            }
            Ok(())
        })?;
        Ok((loss, losses))
    }

    /// scale·Σ (x − target)².
    pub fn squared_error(&mut self, x: Var, targets: &Tensor, scale: f32) -> Result<Tensor> {
        self.reads(&scale);
        targets.check_shape("squared_error", "targets", [x.tensor().shape().elements()])?;
        self.replace_by_gradient(x, |device, x, want_gradient, loss| {
            match device {
                Device::Cpu(cpu) => with_float!(x.dtype(), E => {
                    loss.slice_mut::<f32>()[0] = kernels::mean_squared_error(
                        &cpu.kernels, x.slice_mut::<E>(), targets.slice(), scale, want_gradient,
                    );
                }),
                Device::Cuda(cuda) => {
                    let (x, targets, scale) = (x.on_gpu(), targets.on_gpu(), Scalar::Value(scale));
                    cuda_kernels::mean_squared_error(&cuda.gpu, x, targets, scale, want_gradient, total(loss))?;
                }
            }
            Ok(())
        })
    }

    /// scale·Σ weight·(the binary cross-entropy of every logit with its own target in [0, 1]).
    pub fn binary_cross_entropy(
        &mut self,
        logits: Var,
        targets: &Tensor,
        weights: Option<&Tensor>,
        scale: f32,
    ) -> Result<Tensor> {
        self.reads(&scale);
        let elements = logits.tensor().shape().elements();
        targets.check_shape("binary_cross_entropy", "targets", [elements])?;
        if let Some(weights) = weights {
            weights.check_shape("binary_cross_entropy", "weights", [elements])?;
        }
        self.replace_by_gradient(logits, |device, logits, want_gradient, loss| {
            match device {
                Device::Cpu(cpu) => with_float!(logits.dtype(), E => {
                    let weights = weights.map(|weights| weights.slice());
                    loss.slice_mut::<f32>()[0] = kernels::binary_cross_entropy(
                        &cpu.kernels, logits.slice_mut::<E>(), targets.slice(), weights, scale, want_gradient,
                    );
                }),
                Device::Cuda(cuda) => {
                    let (x, targets, scale) = (logits.on_gpu(), targets.on_gpu(), Scalar::Value(scale));
                    let (gpu, weights) = (&cuda.gpu, weights.map(Tensor::on_gpu));
                    cuda_kernels::binary_cross_entropy(gpu, x, targets, weights, scale, want_gradient, total(loss))?;
                }
            }
            Ok(())
        })
    }

    /// scale·Σ weight·(−ln of the softmax at the target) where each sequence has two softmaxes over its own tokens: column 0
    /// of the logits (T×2) for where an answer starts, column 1 for where it ends. `targets` (u32, within the sequence) and
    /// `weights` are B×2.
    pub fn span_cross_entropy(
        &mut self,
        logits: Var,
        layout: &Layout,
        targets: &Tensor,
        weights: &Tensor,
        scale: f32,
    ) -> Result<Tensor> {
        self.reads(&scale);
        logits.tensor().check_shape("span_cross_entropy", "the logits", [layout.tokens(), 2])?;
        targets.check_shape("span_cross_entropy", "targets", [layout.sequences(), 2])?;
        targets.check_dtype("span_cross_entropy", "targets", DType::U32)?;
        weights.check_shape("span_cross_entropy", "weights", [layout.sequences(), 2])?;
        if let Device::Cpu(_) = self.device() {
            let lengths = layout.offsets().windows(2).map(|w| (w[1] - w[0]) as usize);
            for (end, targets) in lengths.zip(targets.slice::<u32>().chunks(2)) {
                if let Some(target) = targets.iter().find(|target| **target as usize >= end) {
                    let (operation, what) = ("span_cross_entropy", "target");
                    return Err(TensorError::Index { operation, what, index: *target as usize, end });
                }
            }
        }
        self.replace_by_gradient(logits, |device, logits, want_gradient, loss| {
            match device {
                Device::Cpu(cpu) => with_float!(logits.dtype(), E => {
                    loss.slice_mut::<f32>()[0] = span::cross_entropy(
                        &cpu.kernels,
                        logits.slice_mut::<E>(),
                        layout.offsets(),
                        bytemuck::cast_slice(targets.slice::<u32>()),
                        bytemuck::cast_slice(weights.slice::<f32>()),
                        scale,
                        want_gradient,
                    );
                }),
                Device::Cuda(cuda) => cuda_kernels::span_cross_entropy(
                    &cuda.gpu,
                    logits.on_gpu(),
                    layout.offsets_on_gpu()?.on_gpu(),
                    targets.on_gpu(),
                    weights.on_gpu(),
                    Scalar::Value(scale),
                    want_gradient,
                    total(loss),
                )?,
            }
            Ok(())
        })
    }

    /// Draws a class for each row (P×columns) from the softmax of its first `classes` logits at a temperature: P, u32. Noise is
    /// counted by the tokens (`rows`, P) that the logits belong to, so it is the same in any company. The class that `never` (P)
    /// names for a row is not drawn there. There is no gradient.
    pub fn sample(
        &mut self,
        logits: &Var,
        classes: usize,
        temperature: f32,
        (layout, rows): (&Layout, &Tensor),
        never: Option<&Tensor>,
        (from, site): (Training, u32),
    ) -> Result<Tensor> {
        let (p, columns) = (logits.tensor().rows(), logits.tensor().columns());
        // The step of a training pass is read from the device, as dropout's is, so that it can be recorded.
        let own_step = self.randomness() == Some(from);
        self.reads(&(classes, temperature, from.seed, (!own_step).then_some(from.step), site, never.is_some()));
        rows.check_shape("sample", "rows", [p])?;
        rows.check_dtype("sample", "rows", DType::U32)?;
        check_indices("sample", "row", self.device(), rows, layout.tokens())?;
        if let Some(never) = never {
            never.check_shape("sample", "what is never drawn", [p])?;
            never.check_dtype("sample", "what is never drawn", DType::U32)?;
        }
        let why = if classes == 0 || classes > columns {
            Some("there are fewer logits than classes, or none")
        } else if !(temperature > 0.0 && temperature.is_finite()) {
            Some("the temperature is not above 0")
        } else {
            None
        };
        if let Some(why) = why {
            return Err(TensorError::Unsupported { operation: "sample", why });
        }
        let mut out = Tensor::empty(self.device(), [p], DType::U32)?;
        let _timer = self.device().timer(Kind::Sampling, 0, &[logits.tensor()]);
        let sampler = Sampler { seed: from.seed, step: from.step, site, temperature };
        match self.device() {
            Device::Cpu(cpu) => {
                let mut tokens = Tensor::empty(self.device(), [p, 2], DType::U32)?;
                let all: &[[u32; 2]] = bytemuck::cast_slice(layout.token_rows().slice::<u32>());
                for (to, row) in tokens.slice_mut::<u32>().chunks_exact_mut(2).zip(rows.slice::<u32>()) {
                    to.copy_from_slice(&all[*row as usize]);
                }
                with_float!(logits.tensor().dtype(), E => {
                    let (logits, tokens) = (logits.tensor().slice::<E>(), bytemuck::cast_slice(tokens.slice::<u32>()));
                    let never = never.map(|never| never.slice());
                    sample(&cpu.kernels, &sampler, logits, columns, classes, tokens, never, out.slice_mut());
                });
            }
            Device::Cuda(cuda) => {
                let (x, places) = (logits.tensor().on_gpu(), layout.token_rows().on_gpu());
                let step = match self.step_at().filter(|_| own_step) {
                    Some(at) => Step::At(at.on_gpu()),
                    None => Step::Value(from.step),
                };
                let (gpu, never) = (&cuda.gpu, never.map(Tensor::on_gpu));
                let (rows, out) = (rows.on_gpu(), out.on_gpu());
                cuda_kernels::sample(gpu, &sampler, step, x, columns, classes, places, rows, never, out)?;
            }
        }
        Ok(out)
    }

    /// The probabilities of the first `classes` columns of each row: P×classes in f32.
    pub fn softmax(&mut self, logits: &Var, classes: usize) -> Result<Tensor> {
        self.reads(&classes);
        let (rows, columns) = (logits.tensor().rows(), logits.tensor().columns());
        let mut out = Tensor::empty(self.device(), [rows, classes], DType::F32)?;
        match self.device() {
            Device::Cpu(cpu) => with_float!(logits.tensor().dtype(), E => {
                kernels::softmax(&cpu.kernels, logits.tensor().slice::<E>(), columns, classes, out.slice_mut());
            }),
            Device::Cuda(cuda) => {
                cuda_kernels::softmax(&cuda.gpu, logits.tensor().on_gpu(), columns, classes, out.on_gpu())?;
            }
        }
        Ok(out)
    }

    /// Of the first `classes` logits of each row: ln Σ eˣ, not finite where a row has infinities or NaNs; and on a GPU also the largest
    /// logit and its place, the first of several. What is on the host can be asked for them there. For [`LogSums::read`]: P numbers, or
    /// 3×P words in which a GPU has all of it.
    pub fn log_sums(&mut self, logits: &Tensor, classes: usize) -> Result<Tensor> {
        self.reads(&classes);
        let (rows, columns) = (logits.rows(), logits.columns());
        if classes == 0 || classes > columns {
            let (expected, got) = ([rows, classes].into(), logits.shape());
            return Err(TensorError::Shape { operation: "log_sums", what: "logits", expected, got });
        }
        match self.device() {
            Device::Cpu(cpu) => {
                let mut sums = Tensor::empty(self.device(), [rows], DType::F32)?;
                with_float!(logits.dtype(), E => {
                    kernels::log_sums(&cpu.kernels, logits.slice::<E>(), columns, classes, sums.slice_mut());
                });
                Ok(sums)
            }
            Device::Cuda(cuda) => {
                let found = Tensor::empty(self.device(), [3, rows], DType::U32)?;
                let [sums, values, places] = [0, 1, 2].map(|i| found.on_gpu().part(i * rows, rows));
                let to = [sums.as_f32(), values.as_f32(), places];
                cuda_kernels::likeliest(&cuda.gpu, logits.on_gpu(), columns, classes, to)?;
                Ok(found)
            }
        }
    }

    /// How many rows (of weight above 0, where weights are given) have their largest logit, of the first `classes`, at the
    /// target: one u32.
    pub fn count_correct(
        &mut self,
        logits: &Var,
        classes: usize,
        targets: &Tensor,
        weights: Option<&Tensor>,
    ) -> Result<Tensor> {
        self.reads(&classes);
        let columns = logits.tensor().columns();
        targets.check_shape("count_correct", "targets", [logits.tensor().rows()])?;
        let mut count = Tensor::zeros(self.device(), [1], DType::U32)?;
        match self.device() {
            Device::Cpu(cpu) => with_float!(logits.tensor().dtype(), E => {
                let (logits, weights) = (logits.tensor().slice::<E>(), weights.map(|weights| weights.slice()));
                let right = kernels::accuracy(&cpu.kernels, logits, columns, classes, targets.slice(), weights);
                count.slice_mut::<u32>()[0] = right as u32;
            }),
            Device::Cuda(cuda) => {
                let (logits, weights) = (logits.tensor().on_gpu(), weights.map(Tensor::on_gpu));
                let to = Some(count.on_gpu());
                cuda_kernels::hits(&cuda.gpu, logits, columns, classes, targets.on_gpu(), weights, None, to)?;
            }
        }
        Ok(count)
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
            Device::Cuda(cuda) => {
                let found = Tensor::empty(self.device(), [rows], DType::U32)?;
                let (logits, to) = (logits.tensor().on_gpu(), Some(found.on_gpu()));
                cuda_kernels::hits(&cuda.gpu, logits, columns, classes, targets.on_gpu(), None, to, None)?;
                hits = found.to_vec::<u32>()?.iter().map(|hit| *hit == 1).collect();
            }
        }
        Ok(hits)
    }

    /// Runs a loss kernel on logits that it may overwrite, and starts their gradient.
    pub(super) fn replace_by_gradient(
        &mut self,
        logits: Var,
        kernel: impl FnOnce(&Device, &mut Tensor, bool, &mut Tensor) -> Result<()>,
    ) -> Result<Tensor> {
        let slot = logits.slot();
        let mut logits = logits.into_tensor();
        if slot.is_some() {
            logits = own(self.device(), logits)?;
        }
        let timer = self.device().timer(Kind::Loss, 0, &[&logits, &logits]);
        let mut loss = Tensor::empty(self.device(), [1], DType::F32)?;
        kernel(self.device(), &mut logits, slot.is_some(), &mut loss)?;
        drop(timer);
        if let Some(slot) = slot {
            self.start_gradient(slot, logits)?;
        }
        Ok(loss)
    }
}

/// A loss as kernels take it.
fn total(loss: &Tensor) -> Total<'_> {
    Total { loss: loss.on_gpu(), add: false }
}
