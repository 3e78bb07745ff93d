//! One pass over a model: operations run at once and, in training, are recorded on the tape for the backward pass.
//!
//! Gradients of parameters are added to flat buffers; gradients of intermediate values live in slots for just as long
//! as they are needed. The loss of a pass is the sum of its loss operations.

use henson_kernels::cpu;
use henson_kernels::cuda;

use crate::ops::{self, Op};
use crate::recording::Trace;
use crate::turns::Turn;
use crate::{Angles, DType, Device, Gradients, Parameters, Result, RotaryTable, Tensor, TensorError};

/// What a pass remembers for the backward pass; kept from step to step, so that its lists need not grow again.
#[derive(Default)]
pub struct Tape {
    ops: Vec<Op>,
    slots: Vec<Option<Tensor>>,
    recompute: bool,
    trace: Trace,
}

impl Tape {
    /// An empty tape.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether feed-forward layers keep their input alone and compute the rest again in the backward pass: half of the memory
    /// that a pass keeps, for an eighth more work. The numbers are the same.
    pub fn set_recompute(&mut self, on: bool) {
        self.recompute = on;
    }

    /// Whether [`Tape::set_recompute`] is on.
    pub fn recomputes(&self) -> bool {
        self.recompute
    }

    /// What the last pass read from the host, for [`Recordings::run`](crate::Recordings::run).
    pub fn trace(&self) -> Trace {
        self.trace
    }
}

/// What makes a pass a training pass: the randomness of its dropout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Training {
    /// The run's seed.
    pub seed: u64,
    /// The number of the update that the pass belongs to.
    pub step: u32,
}

/// A value in a pass.
#[derive(Clone, Debug)]
pub struct Var {
    tensor: Tensor,
    /// Where its gradient is collected; none where no gradient is wanted.
    slot: Option<Slot>,
}

/// The number of a gradient's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slot(usize);

impl Var {
    /// A value that no gradient is wanted of.
    pub(crate) fn without_gradient(tensor: Tensor) -> Self {
        Self { tensor, slot: None }
    }

    /// The numbers.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// The numbers, consuming the value.
    pub fn into_tensor(self) -> Tensor {
        self.tensor
    }

    /// The same with other sizes.
    pub fn reshape(&self, shape: impl Into<crate::Shape>) -> Result<Self> {
        Ok(Self { tensor: self.tensor.reshape(shape)?, slot: self.slot })
    }

    pub(crate) fn slot(&self) -> Option<Slot> {
        self.slot
    }
}

/// Dropout at one site of a training pass.
#[derive(Clone, Debug)]
pub(crate) struct Dropout {
    p: f32,
    training: Training,
    site: u32,
    /// Where the step's number stands on the device, if it is read there.
    step_at: Option<Tensor>,
}

impl Dropout {
    pub(crate) fn on_cpu(&self) -> Option<cpu::dropout::Dropout> {
        cpu::dropout::Dropout::new(self.p, self.training.seed, self.training.step, self.site)
    }

    pub(crate) fn on_gpu(&self) -> Option<cuda::Dropout<'_>> {
        let step = match &self.step_at {
            Some(at) => cuda::Step::At(at.on_gpu()),
            None => cuda::Step::Value(self.training.step),
        };
        cuda::Dropout::new(self.p, self.training.seed, step, self.site)
    }
}

/// A pass over a model's parameters.
pub struct Pass<'a> {
    tape: &'a mut Tape,
    parameters: &'a Parameters,
    training: Option<Training>,
    step_at: Option<Tensor>,
    /// Where other threads may want the device.
    _turn: Option<Turn<'a>>,
}

impl<'a> Pass<'a> {
    /// A pass with dropout, recorded for [`Pass::backward`].
    pub fn training(tape: &'a mut Tape, parameters: &'a Parameters, training: Training) -> Self {
        Self::new(tape, parameters, Some(training))
    }

    /// A pass without dropout that remembers nothing.
    pub fn inference(tape: &'a mut Tape, parameters: &'a Parameters) -> Self {
        Self::new(tape, parameters, None)
    }

    fn new(tape: &'a mut Tape, parameters: &'a Parameters, training: Option<Training>) -> Self {
        tape.ops.clear();
        tape.slots.clear();
        tape.trace = Trace::default();
        let turn = match parameters.device() {
            Device::Cpu(_) => None,
            Device::Cuda(cuda) => Some(cuda.turn()),
        };
        Self { tape, parameters, training, step_at: None, _turn: turn }
    }

    /// Lets a training pass on a GPU read the step's number (one u32) from device memory, so that it can be recorded and
    /// played for other steps.
    pub fn read_step_from(&mut self, step: &Tensor) {
        self.step_at = Some(step.clone());
    }

    /// Where the step's number stands on the device, if it is read there.
    pub(crate) fn step_at(&self) -> Option<&Tensor> {
        self.step_at.as_ref()
    }

    /// What a training pass draws from.
    pub fn randomness(&self) -> Option<Training> {
        self.training
    }

    /// Whether this is a training pass.
    pub fn is_training(&self) -> bool {
        self.training.is_some()
    }

    /// Where the pass runs.
    pub fn device(&self) -> &'a Device {
        self.parameters.device()
    }

    /// A table of rotary positions of its parameters.
    pub fn rotary_table(&self, angles: Angles) -> &'a RotaryTable {
        self.parameters.rotary(angles)
    }

    /// What it computes in.
    pub fn dtype(&self) -> DType {
        self.parameters.dtype()
    }

    /// Lets the backward pass begin at a value with a given gradient, for losses that are computed elsewhere.
    pub fn seed_gradient(&mut self, value: &Var, gradient: &[f32]) -> Result<()> {
        let Some(slot) = value.slot else {
            return Err(TensorError::Unsupported { operation: "seed_gradient", why: "the value has no gradient" });
        };
        let tensor = Tensor::from_slice(self.device(), value.tensor.shape(), gradient)?;
        let tensor = ops::cast(self.device(), &tensor, value.tensor.dtype())?;
        add_gradient(self.device(), &mut self.tape.slots, slot, tensor)
    }

    /// Walks the tape back and adds the gradients of all parameters to `gradients`.
    pub fn backward(self, gradients: &mut Gradients) -> Result<()> {
        if self.training.is_none() {
            return Err(TensorError::Unsupported { operation: "backward", why: "an inference pass records nothing" });
        }
        let Tape { ops, slots, .. } = self.tape;
        let mut back = Backward { parameters: self.parameters, gradients, slots };
        while let Some(op) = ops.pop() {
            op.backward(&mut back)?;
        }
        slots.clear();
        gradients.finish()
    }

    pub(crate) fn recompute(&self) -> bool {
        self.tape.recompute
    }

    pub(crate) fn parameters(&self) -> &'a Parameters {
        self.parameters
    }

    /// Notes values of the host that an operation gives to its kernels: a recorded pass would give the same again.
    pub(crate) fn reads(&mut self, values: &dyn std::fmt::Debug) {
        self.tape.trace.add(values);
    }

    /// The dropout of one site, none in inference.
    pub(crate) fn dropout(&mut self, p: f32, site: u32) -> Option<Dropout> {
        self.reads(&(p, site, self.training.map(|training| training.seed)));
        let dropout = Dropout { p, training: self.training?, site, step_at: self.step_at.clone() };
        // A probability that rounds to zero drops nothing.
        dropout.on_cpu().map(|_| dropout)
    }

    /// A value; in training with a place for its gradient.
    pub(crate) fn var(&mut self, tensor: Tensor) -> Var {
        self.reads(&tensor.shape());
        let slot = self.training.is_some().then(|| {
            self.tape.slots.push(None);
            Slot(self.tape.slots.len() - 1)
        });
        Var { tensor, slot }
    }

    pub(crate) fn record(&mut self, op: Op) {
        debug_assert!(self.training.is_some(), "only training passes record");
        self.tape.ops.push(op);
    }

    /// Takes over the gradient of the bias of the layer that was recorded last, if that made the value of this slot.
    pub(crate) fn take_bias_of_last(&mut self, slot: Slot) -> Option<crate::Param> {
        self.tape.ops.last_mut()?.take_bias(slot)
    }

    /// Sets the gradient of a value that a loss operation consumed.
    pub(crate) fn start_gradient(&mut self, slot: Slot, gradient: Tensor) -> Result<()> {
        add_gradient(self.parameters.device(), &mut self.tape.slots, slot, gradient)
    }
}

/// The backward pass: what operations need of the pass.
pub(crate) struct Backward<'a> {
    pub(crate) parameters: &'a Parameters,
    pub(crate) gradients: &'a mut Gradients,
    slots: &'a mut Vec<Option<Tensor>>,
}

impl<'a> Backward<'a> {
    pub(crate) fn device(&self) -> &'a Device {
        self.parameters.device()
    }

    /// The finished gradient of an operation's output; none where nothing depended on it.
    pub(crate) fn take(&mut self, slot: Slot) -> Option<Tensor> {
        self.slots[slot.0].take()
    }

    /// Adds to a value's gradient.
    pub(crate) fn add(&mut self, slot: Option<Slot>, gradient: Tensor) -> Result<()> {
        match slot {
            Some(slot) => add_gradient(self.parameters.device(), self.slots, slot, gradient),
            None => Ok(()),
        }
    }

    /// Where to write a value's gradient, and whether to add to what is there.
    pub(crate) fn target(&mut self, slot: Slot, like: &Tensor) -> Result<(Tensor, bool)> {
        let device = self.parameters.device();
        if let Some(gradient) = self.slots[slot.0].take() {
            // Somebody else reads the same memory as another value's gradient: leave it to them.
            let gradient = if gradient.is_unique() { gradient } else { ops::copy(device, &gradient)? };
            self.slots[slot.0] = Some(gradient.clone());
            return Ok((gradient, true));
        }
        let gradient = Tensor::empty(device, like.shape(), like.dtype())?;
        self.slots[slot.0] = Some(gradient.clone());
        Ok((gradient, false))
    }
}

fn add_gradient(device: &Device, slots: &mut [Option<Tensor>], slot: Slot, gradient: Tensor) -> Result<()> {
    let place = &mut slots[slot.0];
    *place = Some(match place.take() {
        None => gradient,
        Some(old) => {
            let mut sum = if old.is_unique() { old } else { ops::copy(device, &old)? };
            ops::add(device, &gradient, &mut sum)?;
            sum
        }
    });
    Ok(())
}
