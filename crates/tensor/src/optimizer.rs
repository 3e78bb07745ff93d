//! Optimizers as plain passes over the flat buffers. Schedules and clipping are the caller's: a step gets its learning
//! rate and the factor for its gradients.

use std::sync::Arc;

use henson_kernels::cpu::optimizer::{self as kernels, Plan, Segment};
use henson_kernels::cuda::optimizer::{self as cuda_kernels, Control, FACTORS, NORM, Rule};
use henson_kernels::cuda::{self, Buffer, reduce, rows};

pub use henson_kernels::cpu::optimizer::Settings as Update;

use crate::cuda::{CudaDevice, Reading};
use crate::{DType, Device, Entry, Gradients, Kind, Parameters, Result, Tensor, TensorError};

/// The rule of an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Adam with decoupled weight decay (Loshchilov and Hutter 2019).
    AdamW,
    /// The same with smaller steps of tensors whose gradients are larger than the second moment expects (Wortsman et al. 2023).
    StableAdamW,
    /// AdamW with a trust ratio per tensor, for very large batches (You et al. 2020).
    Lamb,
}

/// The state of an optimizer: two moments for every parameter.
pub struct Optimizer {
    method: Method,
    segments: Vec<Segment>,
    plan: Plan,
    first: Tensor,
    second: Tensor,
    on_gpu: Option<OnGpu>,
}

/// What a GPU needs: made at the first step, when the constants are known.
struct OnGpu {
    cuda: Arc<CudaDevice>,
    rule: Rule,
    plan: cuda_kernels::Plan,
    control: Buffer,
    squares: Buffer,
    /// The norm stands among them, so it is read from here.
    factors: Tensor,
}

impl Optimizer {
    /// Fresh state. `rate` gives each parameter's factor on the learning rate.
    pub fn new(method: Method, parameters: &Parameters, rate: impl Fn(&Entry) -> f32) -> Result<Self> {
        let segments: Vec<Segment> = parameters
            .entries()
            .iter()
            .map(|entry| Segment {
                start: entry.start,
                len: entry.shape.elements(),
                decay: entry.decay,
                rate: rate(entry),
            })
            .collect();
        let shape = parameters.flat().shape();
        let zeros = || Tensor::zeros(parameters.device(), shape, DType::F32);
        let plan = Plan::new(&segments, shape.elements());
        Ok(Self { method, segments, plan, first: zeros()?, second: zeros()?, on_gpu: None })
    }

    /// The first and the second moment of a parameter, for a checkpoint.
    pub fn moments(&self, entry: &Entry) -> Result<[Vec<f32>; 2]> {
        let read = |moment: &Tensor| moment.view(entry.start, entry.shape).to_vec();
        Ok([read(&self.first)?, read(&self.second)?])
    }

    /// Sets the moments of a parameter to what [`Optimizer::moments`] gave.
    pub fn set_moments(&mut self, entry: &Entry, moments: [&[f32]; 2]) -> Result<()> {
        for (tensor, numbers) in [&self.first, &self.second].into_iter().zip(moments) {
            if numbers.len() != entry.shape.elements() {
                let (expected, got) = (entry.shape, [numbers.len()].into());
                return Err(TensorError::Shape { operation: "set_moments", what: "a moment", expected, got });
            }
            tensor.view(entry.start, entry.shape).write(numbers)?;
        }
        Ok(())
    }

    /// One update of all parameters, with their bf16 copy where there is one; gives the gradients' norm before they are
    /// scaled down to `clip`, where that is given. Where the norm is not finite, nothing is changed.
    pub fn step(
        &mut self,
        parameters: &mut Parameters,
        gradients: &Gradients,
        update: &Update,
        clip: Option<f64>,
    ) -> Result<Reading> {
        parameters.discard_packed();
        let mut update = *update;
        let mut norm = None;
        if let Device::Cpu(_) = parameters.device() {
            let found = gradients.norm()? * update.gradient_scale;
            norm = Some(found);
            if !found.is_finite() {
                return Ok(Reading::one(found));
            }
            // torch's clip_grad_norm_ has the same 10⁻⁶, which keeps the quotient finite.
            update.gradient_scale *= clip.map_or(1.0, |most| (most / (found + 1e-6)).min(1.0));
        }
        let copy = parameters.flat_copy();
        let (p, g) = (parameters.flat(), gradients.flat());
        let moved = [p, p, g, &self.first, &self.first, &self.second, &self.second, copy.unwrap_or(p)];
        let moved = &moved[..if copy.is_some() { 8 } else { 7 }];
        let _timer = parameters.device().timer(Kind::Optimizer, 0, moved);
        match parameters.device() {
            Device::Cpu(cpu) => {
                let kernel = match self.method {
                    Method::AdamW => kernels::adamw,
                    Method::StableAdamW => kernels::stable_adamw,
                    Method::Lamb => kernels::lamb,
                };
                let (mut p, mut copy) = (p.clone(), copy.cloned());
                kernel(
                    &cpu.kernels,
                    &self.plan,
                    p.slice_mut(),
                    gradients.flat().slice(),
                    self.first.slice_mut(),
                    self.second.slice_mut(),
                    &update,
                    copy.as_mut().map(|copy| copy.slice_mut()),
                );
                Ok(Reading::one(norm.unwrap_or(0.0)))
            }
            Device::Cuda(cuda) => {
                let rule = Rule {
                    beta1: update.beta1,
                    beta2: update.beta2,
                    epsilon: update.epsilon,
                    weight_decay: update.weight_decay,
                };
                if self.on_gpu.as_ref().is_none_or(|on_gpu| on_gpu.rule != rule) {
                    self.on_gpu =
                        Some(OnGpu::new(parameters.device(), cuda, rule, &self.segments, p.shape().elements())?);
                }
                let Some(on_gpu) = &self.on_gpu else { unreachable!("made above") };
                on_gpu.step(self.method, [p, g, &self.first, &self.second], copy, &update, clip)?;
                parameters.device().read_later(&[&on_gpu.factors.view(NORM, [1].into())])
            }
        }
    }
}

impl OnGpu {
    fn new(device: &Device, cuda: &Arc<CudaDevice>, rule: Rule, segments: &[Segment], len: usize) -> Result<Self> {
        Ok(Self {
            cuda: Arc::clone(cuda),
            rule,
            plan: cuda_kernels::Plan::new(&cuda.gpu, rule, segments, len)?,
            control: cuda.gpu.empty(4, cuda::DType::F64)?,
            squares: cuda.gpu.empty(1, cuda::DType::F64)?,
            factors: Tensor::zeros(device, [FACTORS], DType::F32)?,
        })
    }

    fn step(
        &self,
        method: Method,
        [p, g, first, second]: [&Tensor; 4],
        copy: Option<&Tensor>,
        update: &Update,
        clip: Option<f64>,
    ) -> Result<()> {
        let gpu = &self.cuda.gpu;
        let control = Control {
            learning_rate: update.learning_rate,
            bias_correction: update.bias_correction,
            clip,
            gradient_scale: update.gradient_scale,
        };
        rows::set(gpu, self.control.view(), &control.numbers())?;
        reduce::sum_of_squares(gpu, g.on_gpu(), self.squares.view())?;
        let factors = self.factors.on_gpu();
        cuda_kernels::prepare(gpu, &self.rule, self.control.view(), Some(self.squares.view()), factors)?;
        let kernel = match method {
            Method::AdamW => cuda_kernels::adamw,
            Method::StableAdamW => cuda_kernels::stable_adamw,
            Method::Lamb => cuda_kernels::lamb,
        };
        let (p, g, first, second) = (p.on_gpu(), g.on_gpu(), first.on_gpu(), second.on_gpu());
        Ok(kernel(gpu, &self.plan, p, g, first, second, factors, copy.map(Tensor::on_gpu))?)
    }
}
