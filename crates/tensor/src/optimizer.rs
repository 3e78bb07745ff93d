//! Optimizers as plain passes over the flat buffers. Schedules and clipping are the caller's: a step gets its learning
//! rate and the factor for its gradients.

use henson_kernels::cpu::optimizer::{self as kernels, Plan, Segment};

pub use henson_kernels::cpu::optimizer::Settings as Update;

use crate::{DType, Device, Entry, Gradients, Kind, Parameters, Result, Tensor, TensorError};

/// The rule of an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Adam with decoupled weight decay (Loshchilov and Hutter 2019).
    AdamW,
    /// The same with a trust ratio per tensor, for very large batches (You et al. 2020).
    Lamb,
}

/// The state of an optimizer: two moments for every parameter.
pub struct Optimizer {
    method: Method,
    plan: Plan,
    first: Tensor,
    second: Tensor,
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
        Ok(Self { method, plan, first: zeros()?, second: zeros()? })
    }

    /// The first and the second moment of a parameter, for a checkpoint.
    pub fn moments(&self, entry: &Entry) -> [Vec<f32>; 2] {
        [&self.first, &self.second].map(|moment| moment.view(entry.start, entry.shape).to_vec())
    }

    /// Sets the moments of a parameter to what [`Optimizer::moments`] gave.
    pub fn set_moments(&mut self, entry: &Entry, moments: [&[f32]; 2]) -> Result<()> {
        for (tensor, numbers) in [&self.first, &self.second].into_iter().zip(moments) {
            if numbers.len() != entry.shape.elements() {
                let (expected, got) = (entry.shape, [numbers.len()].into());
                return Err(TensorError::Shape { operation: "set_moments", what: "a moment", expected, got });
            }
            tensor.view(entry.start, entry.shape).slice_mut::<f32>().copy_from_slice(numbers);
        }
        Ok(())
    }

    /// One update of all parameters, with their bf16 copy where there is one.
    pub fn step(&mut self, parameters: &mut Parameters, gradients: &Gradients, update: &Update) -> Result<()> {
        parameters.discard_packed();
        let copy = parameters.flat_copy();
        let (p, g) = (parameters.flat(), gradients.flat());
        let moved = [p, p, g, &self.first, &self.first, &self.second, &self.second, copy.unwrap_or(p)];
        let moved = &moved[..if copy.is_some() { 8 } else { 7 }];
        let _timer = parameters.device().timer(Kind::Optimizer, 0, moved);
        match parameters.device() {
            Device::Cpu(cpu) => {
                let kernel = match self.method {
                    Method::AdamW => kernels::adamw,
                    Method::Lamb => kernels::lamb,
                };
                kernel(
                    &cpu.kernels,
                    &self.plan,
                    parameters.flat().slice_mut(),
                    gradients.flat().slice(),
                    self.first.slice_mut(),
                    self.second.slice_mut(),
                    update,
                    copy.map(|copy| copy.slice_mut()),
                );
            }
        }
        Ok(())
    }
}
