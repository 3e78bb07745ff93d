//! Optimizers as plain passes over the flat buffers. Schedules and clipping are the caller's: a step gets its learning
//! rate and the factor for its gradients.

use std::sync::Arc;

use henson_kernels::cpu::adafactor::{self, Moment};
use henson_kernels::cpu::optimizer::{self as kernels, Plan, Segment};
use henson_kernels::cuda::optimizer::{self as cuda_kernels, Control, FACTORS, NORM, Rule};
use henson_kernels::cuda::{self, Buffer, adafactor as cuda_adafactor, reduce, rows};

pub use henson_kernels::cpu::adafactor::Rule as Adafactor;
pub use henson_kernels::cpu::optimizer::Settings as Update;

use henson_ranks::Ranks;

use crate::cuda::{CudaDevice, Reading};
use crate::device::CpuDevice;
use crate::sharing::{Sharing, alone};
use crate::{DType, Device, Entry, Gradients, Kind, Parameters, Result, Shape, Tensor, TensorError};

/// The rule of an update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Method {
    /// Adam with decoupled weight decay (Loshchilov and Hutter 2019).
    AdamW,
    /// The same with smaller steps of tensors whose gradients are larger than the second moment expects (Wortsman et al. 2023).
    StableAdamW,
    /// AdamW with a trust ratio per tensor, for very large batches (You et al. 2020).
    Lamb,
    /// Plain gradient descent, which keeps nothing.
    Sgd,
    /// Gradients over the root of the sum of all squares so far, which begins at this number (Duchi et al. 2011).
    Adagrad(f32),
    /// Adam's second moment alone, of matrices only by rows and columns (Shazeer and Stern 2018).
    Adafactor(Adafactor),
}

impl Method {
    /// Numbers that it keeps of parameters.
    pub fn state<'e>(&self, entries: impl IntoIterator<Item = &'e Entry>) -> usize {
        let of = |entry: &Entry| {
            let len = entry.shape.elements();
            match self {
                Self::Adafactor(rule) => rule.moment(sides(entry)).kept(len),
                Self::Sgd => 0,
                Self::Adagrad(_) => len,
                Self::AdamW | Self::StableAdamW | Self::Lamb => 2 * len,
            }
        };
        entries.into_iter().map(of).sum()
    }
}

/// The rows and columns of a matrix.
fn sides(entry: &Entry) -> Option<[usize; 2]> {
    entry.shape.sizes().try_into().ok()
}

/// The state of an optimizer: two moments for every parameter, or what Adafactor keeps.
pub struct Optimizer {
    method: Method,
    segments: Vec<Segment>,
    state: State,
    on_gpu: Option<OnGpu>,
    factored_on_gpu: Option<FactoredOnGpu>,
    /// Where several ranks share the work: the moments are then there.
    sharing: Option<Sharing>,
}

enum State {
    Nothing { plan: Plan },
    Squares { plan: Plan, sums: Tensor },
    Moments { plan: Plan, first: Tensor, second: Tensor },
    Factored { plan: adafactor::Plan, numbers: Tensor },
}

/// Names of moments in a checkpoint: the first, the second, and where that is divided, its rows and columns.
const FIRST: &str = "first";
const SECOND: &str = "second";
const ROWS: &str = "rows";
const COLUMNS: &str = "columns";

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

/// The same for Adafactor.
struct FactoredOnGpu {
    cuda: Arc<CudaDevice>,
    plan: cuda_adafactor::Plan,
    control: Buffer,
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
        let zeros = |shape: Shape| Tensor::zeros(parameters.device(), shape, DType::F32);
        let state = match method {
            Method::Adafactor(rule) => {
                let segments: Vec<_> = segments.iter().copied().zip(parameters.entries().iter().map(sides)).collect();
                let plan = adafactor::Plan::new(rule, &segments, shape.elements());
                let numbers = zeros([plan.state_len().max(1)].into())?;
                State::Factored { plan, numbers }
            }
            Method::Sgd => State::Nothing { plan: Plan::new(&segments, shape.elements()) },
            Method::Adagrad(initial) => {
                let sums = Tensor::from_slice(parameters.device(), shape, &vec![initial; shape.elements()])?;
                State::Squares { plan: Plan::new(&segments, shape.elements()), sums }
            }
            _ => {
                let plan = Plan::new(&segments, shape.elements());
                State::Moments { plan, first: zeros(shape)?, second: zeros(shape)? }
            }
        };
        Ok(Self { method, segments, state, on_gpu: None, factored_on_gpu: None, sharing: None })
    }

    /// Shares the work with other ranks from here on; the state begins afresh. All ranks must do so.
    pub fn share(&mut self, parameters: &Parameters, ranks: Arc<Ranks>) -> Result<()> {
        match self.method {
            Method::Adafactor(_) => return Err(alone("adafactor")),
            Method::Adagrad(_) => return Err(alone("adagrad")),
            Method::Sgd => return Err(alone("sgd")),
            Method::AdamW | Method::StableAdamW | Method::Lamb => {}
        }
        self.sharing = Some(Sharing::new(&self.segments, parameters, ranks)?);
        // What would hold all moments.
        let nothing = || Tensor::zeros(parameters.device(), [1], DType::F32);
        self.state = State::Moments { plan: Plan::new(&[], 1), first: nothing()?, second: nothing()? };
        Ok(())
    }

    /// Makes room on rank 0 for [`Optimizer::write`], where ranks share the state; [`Optimizer::distribute`] follows.
    pub fn make_whole(&mut self, parameters: &Parameters) -> Result<()> {
        self.sharing.as_mut().map_or(Ok(()), |sharing| sharing.make_whole(parameters))
    }

    /// Gives each rank its part of what was written on rank 0. All ranks must call it.
    pub fn distribute(&mut self) -> Result<()> {
        if let Some(sharing) = &mut self.sharing {
            sharing.distribute()?;
        }
        Ok(())
    }

    /// Brings the state of all ranks to rank 0, for [`Optimizer::read`]; [`Optimizer::release`] follows. All ranks must call it.
    pub fn collect(&mut self, parameters: &Parameters) -> Result<()> {
        self.sharing.as_mut().map_or(Ok(()), |sharing| sharing.collect(parameters))
    }

    /// Forgets what was collected.
    pub fn release(&mut self) {
        if let Some(sharing) = &mut self.sharing {
            sharing.whole = None;
        }
    }

    /// The names and shapes of what is kept of a parameter, for a checkpoint.
    pub fn kept(&self, entry: &Entry) -> Vec<(&'static str, Shape)> {
        match &self.state {
            State::Nothing { .. } => Vec::new(),
            State::Squares { .. } => vec![(SECOND, entry.shape)],
            State::Moments { .. } => vec![(FIRST, entry.shape), (SECOND, entry.shape)],
            State::Factored { plan, .. } => match tensor_of(plan, entry).map(|tensor| tensor.moment) {
                Some(Moment::Factored { rows, columns }) => vec![(ROWS, [rows].into()), (COLUMNS, [columns].into())],
                _ => vec![(SECOND, entry.shape)],
            },
        }
    }

    /// The numbers of something that is kept of a parameter, by its name.
    pub fn read(&self, entry: &Entry, name: &str) -> Result<Vec<f32>> {
        self.part(entry, name)?.to_vec()
    }

    /// Sets them to what [`Optimizer::read`] gave.
    pub fn write(&mut self, entry: &Entry, name: &str, numbers: &[f32]) -> Result<()> {
        let mut part = self.part(entry, name)?;
        if numbers.len() != part.shape().elements() {
            let (expected, got) = (part.shape(), [numbers.len()].into());
            return Err(TensorError::Shape { operation: "optimizer", what: "a moment", expected, got });
        }
        part.write(numbers)
    }

    /// Where something that is kept lies.
    fn part(&self, entry: &Entry, name: &str) -> Result<Tensor> {
        let none = || TensorError::Unsupported { operation: "optimizer", why: "it keeps no such moment" };
        let mut kept = self.kept(entry).into_iter();
        let place = kept.clone().position(|(own, _)| own == name).ok_or_else(none)?;
        if let Some(Sharing { whole, .. }) = &self.sharing {
            let why = "other ranks have a part of the moments: they are not collected";
            let whole = whole.as_ref().ok_or(TensorError::Unsupported { operation: "optimizer", why })?;
            return Ok(whole[place].view(entry.start, entry.shape));
        }
        match &self.state {
            State::Nothing { .. } => Err(none()),
            State::Squares { sums, .. } => Ok(sums.view(entry.start, entry.shape)),
            State::Moments { first, second, .. } => Ok([first, second][place].view(entry.start, entry.shape)),
            State::Factored { plan, numbers } => {
                let start = tensor_of(plan, entry).ok_or_else(none)?.state;
                let before: usize = kept.clone().take(place).map(|(_, shape)| shape.elements()).sum();
                let (_, shape) = kept.nth(place).ok_or_else(none)?;
                Ok(numbers.view(start + before, shape))
            }
        }
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
        if let Some(sharing) = &mut self.sharing {
            return sharing.step(self.method, parameters, gradients, update, clip);
        }
        let cpu = match parameters.device() {
            Device::Cpu(cpu) => cpu,
            Device::Cuda(cuda) => return self.step_on_gpu(cuda, parameters, gradients, update, clip),
        };
        let mut update = *update;
        let norm = gradients.norm()? * update.gradient_scale;
        if !norm.is_finite() {
            return Ok(Reading::one(norm));
        }
        update.gradient_scale *= clipping(clip, norm);
        let copy = parameters.flat_copy();
        let (p, g) = (parameters.flat(), gradients.flat());
        let (plan, first, second) = match &mut self.state {
            State::Moments { plan, first, second } => (plan, first, second),
            State::Nothing { plan } => {
                plain_step(cpu, parameters, gradients, (plan, None), &update)?;
                return Ok(Reading::one(norm));
            }
            State::Squares { plan, sums } => {
                plain_step(cpu, parameters, gradients, (plan, Some(sums)), &update)?;
                return Ok(Reading::one(norm));
            }
            State::Factored { plan, numbers } => {
                // Rows and columns, both sums of squares, the step: gradients are read four times.
                let moved = [p, p, p, g, g, g, g, copy.unwrap_or(p)];
                let moved = &moved[..if copy.is_some() { 8 } else { 7 }];
                let _timer = parameters.device().timer(Kind::Optimizer, 0, moved);
                factored_step(cpu, parameters, gradients, (plan, numbers), &update)?;
                return Ok(Reading::one(norm));
            }
        };
        let moved = [p, p, g, first, first, second, second, copy.unwrap_or(p)];
        let moved = &moved[..if copy.is_some() { 8 } else { 7 }];
        let _timer = parameters.device().timer(Kind::Optimizer, 0, moved);
        let kernel = match self.method {
            Method::StableAdamW => kernels::stable_adamw,
            Method::Lamb => kernels::lamb,
            Method::AdamW | Method::Sgd | Method::Adagrad(_) | Method::Adafactor(_) => kernels::adamw,
        };
        let (mut p, mut copy) = (p.clone(), copy.cloned());
        kernel(
            &cpu.kernels,
            plan,
            p.slice_mut(),
            gradients.flat().slice(),
            first.slice_mut(),
            second.slice_mut(),
            &update,
            copy.as_mut().map(|copy| copy.slice_mut()),
        );
        Ok(Reading::one(norm))
    }

    fn factored_step_on_gpu(
        &mut self,
        cuda: &Arc<CudaDevice>,
        parameters: &Parameters,
        gradients: &Gradients,
        update: &Update,
        clip: Option<f64>,
    ) -> Result<Reading> {
        let State::Factored { plan, numbers } = &self.state else { return Err(no_such_state()) };
        let (p, g, copy) = (parameters.flat(), gradients.flat(), parameters.flat_copy());
        // Rows and columns in one pass, which is the norm's, too.
        let moved = [p, p, p, g, g, g, copy.unwrap_or(p)];
        let _timer = parameters.device().timer(Kind::Optimizer, 0, &moved[..if copy.is_some() { 7 } else { 6 }]);
        if self.factored_on_gpu.is_none() {
            self.factored_on_gpu = Some(FactoredOnGpu::new(parameters.device(), cuda, plan)?);
        }
        let Some(on_gpu) = &self.factored_on_gpu else { unreachable!("made above") };
        on_gpu.step([p, g, &numbers.view(0, [plan.state_len()].into())], copy, update, clip)?;
        parameters.device().read_later(&[&on_gpu.factors.view(NORM, [1].into())])
    }

    fn step_on_gpu(
        &mut self,
        cuda: &Arc<CudaDevice>,
        parameters: &Parameters,
        gradients: &Gradients,
        update: &Update,
        clip: Option<f64>,
    ) -> Result<Reading> {
        if let State::Factored { .. } = &self.state {
            return self.factored_step_on_gpu(cuda, parameters, gradients, update, clip);
        }
        let (p, g, copy) = (parameters.flat(), gradients.flat(), parameters.flat_copy());
        let rule = Rule {
            beta1: update.beta1,
            beta2: update.beta2,
            // Gradient descent has none, and any will do.
            epsilon: if self.method == Method::Sgd { 1.0 } else { update.epsilon },
            weight_decay: update.weight_decay,
        };
        if self.on_gpu.as_ref().is_none_or(|on_gpu| on_gpu.rule != rule) {
            self.on_gpu = Some(OnGpu::new(parameters.device(), cuda, rule, &self.segments, p.shape().elements())?);
        }
        let Some(on_gpu) = &self.on_gpu else { unreachable!("made above") };
        let kept = match &self.state {
            State::Nothing { .. } => [None, None],
            State::Squares { sums, .. } => [None, Some(sums)],
            State::Moments { first, second, .. } => [Some(first), Some(second)],
            State::Factored { .. } => return Err(no_such_state()),
        };
        let (mut moved, mut count) = ([p; 8], 3);
        moved[2] = g;
        for tensor in kept.into_iter().flatten().flat_map(|kept| [kept, kept]).chain(copy) {
            moved[count] = tensor;
            count += 1;
        }
        let _timer = parameters.device().timer(Kind::Optimizer, 0, &moved[..count]);
        on_gpu.step(self.method, [p, g], kept, copy, update, clip)?;
        parameters.device().read_later(&[&on_gpu.factors.view(NORM, [1].into())])
    }
}

/// A combination of method and state that is not made.
fn no_such_state() -> TensorError {
    TensorError::Unsupported { operation: "optimizer", why: "it does not keep what its method needs" }
}

/// A step of gradient descent, or of Adagrad where there are sums of squares.
fn plain_step(
    cpu: &CpuDevice,
    parameters: &Parameters,
    gradients: &Gradients,
    (plan, sums): (&Plan, Option<&mut Tensor>),
    update: &Update,
) -> Result<()> {
    let (p, g, copy) = (parameters.flat(), gradients.flat(), parameters.flat_copy());
    // A step allocates nothing.
    let kept = sums.as_ref().map(|sums| Tensor::clone(sums));
    let (mut moved, mut count) = ([p, p, g, p, p, p], 3);
    for tensor in [copy, kept.as_ref(), kept.as_ref()].into_iter().flatten() {
        moved[count] = tensor;
        count += 1;
    }
    let _timer = parameters.device().timer(Kind::Optimizer, 0, &moved[..count]);
    let (mut p, mut copy) = (p.clone(), copy.cloned());
    let copy = copy.as_mut().map(|copy| copy.slice_mut());
    match sums {
        None => kernels::sgd(&cpu.kernels, plan, p.slice_mut(), g.slice(), update, copy),
        Some(sums) => kernels::adagrad(&cpu.kernels, plan, p.slice_mut(), g.slice(), sums.slice_mut(), update, copy),
    }
    Ok(())
}

/// What gradients of this norm are multiplied by, where they are clipped.
pub(crate) fn clipping(clip: Option<f64>, norm: f64) -> f64 {
    // torch's clip_grad_norm_ has the same 10⁻⁶, which keeps the quotient finite.
    clip.map_or(1.0, |most| (most / (norm + 1e-6)).min(1.0))
}

/// What Adafactor keeps of a parameter.
fn tensor_of<'p>(plan: &'p adafactor::Plan, entry: &Entry) -> Option<&'p adafactor::Tensor> {
    plan.tensors()
        .iter()
        .find(|tensor| (tensor.segment.start, tensor.segment.len) == (entry.start, entry.shape.elements()))
}

/// A step of Adafactor on a CPU, whose number stands where Adam's correction has it.
fn factored_step(
    cpu: &CpuDevice,
    parameters: &Parameters,
    gradients: &Gradients,
    (plan, numbers): (&adafactor::Plan, &mut Tensor),
    update: &Update,
) -> Result<()> {
    let settings = adafactor::Settings {
        learning_rate: update.learning_rate,
        step: update.bias_correction.unwrap_or(1),
        weight_decay: update.weight_decay,
        gradient_scale: update.gradient_scale,
    };
    let (mut p, mut copy) = (parameters.flat().clone(), parameters.flat_copy().cloned());
    let state = &mut numbers.slice_mut()[..plan.state_len()];
    let copy = copy.as_mut().map(|copy| copy.slice_mut());
    adafactor::adafactor(&cpu.kernels, plan, p.slice_mut(), gradients.flat().slice(), state, &settings, copy);
    Ok(())
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
        [p, g]: [&Tensor; 2],
        kept: [Option<&Tensor>; 2],
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
        let (p, g, copy) = (p.on_gpu(), g.on_gpu(), copy.map(Tensor::on_gpu));
        match (method, kept) {
            (Method::Sgd, _) => cuda_kernels::sgd(gpu, &self.plan, p, g, factors, copy)?,
            (Method::Adagrad(_), [_, Some(sums)]) => {
                cuda_kernels::adagrad(gpu, &self.plan, p, g, sums.on_gpu(), factors, copy)?;
            }
            (Method::AdamW | Method::StableAdamW | Method::Lamb, [Some(first), Some(second)]) => {
                let kernel = match method {
                    Method::StableAdamW => cuda_kernels::stable_adamw,
                    Method::Lamb => cuda_kernels::lamb,
                    _ => cuda_kernels::adamw,
                };
                kernel(gpu, &self.plan, p, g, first.on_gpu(), second.on_gpu(), factors, copy)?;
            }
            _ => return Err(no_such_state()),
        }
        Ok(())
    }
}

impl FactoredOnGpu {
    fn new(device: &Device, cuda: &Arc<CudaDevice>, plan: &adafactor::Plan) -> Result<Self> {
        Ok(Self {
            cuda: Arc::clone(cuda),
            plan: cuda_adafactor::Plan::new(&cuda.gpu, plan)?,
            control: cuda.gpu.empty(4, cuda::DType::F64)?,
            factors: Tensor::zeros(device, [FACTORS], DType::F32)?,
        })
    }

    /// As on a CPU, the step's number stands where Adam's correction has it.
    fn step(
        &self,
        [p, g, state]: [&Tensor; 3],
        copy: Option<&Tensor>,
        update: &Update,
        clip: Option<f64>,
    ) -> Result<()> {
        let gpu = &self.cuda.gpu;
        let control = Control {
            learning_rate: update.learning_rate,
            bias_correction: Some(update.bias_correction.unwrap_or(1)),
            clip,
            gradient_scale: update.gradient_scale,
        };
        rows::set(gpu, self.control.view(), &control.numbers())?;
        let [p, g, state, factors] = [p, g, state, &self.factors].map(Tensor::on_gpu);
        let numbers = (self.control.view(), factors);
        let copy = copy.map(Tensor::on_gpu);
        Ok(cuda_adafactor::adafactor(gpu, &self.plan, p, g, state, update.weight_decay, numbers, copy)?)
    }
}
