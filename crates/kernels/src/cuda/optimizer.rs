//! AdamW, StableAdamW, LAMB, Adagrad and plain gradient descent over flat buffers. The definition is [`crate::cpu::optimizer`].
//!
//! What changes from step to step (learning rate, the step's number, the bound on the gradients' norm) is read from device
//! memory: a step is [`reduce::sum_of_squares`](super::reduce::sum_of_squares), [`prepare`], then [`adamw`],
//! [`stable_adamw`], [`lamb`], [`adagrad`] or [`sgd`], none of which waits, and a recorded graph of them can be played again.

use crate::cpu::optimizer::Segment;

use super::compile::Source;
use super::error::Result;
use super::gpu::{Argument, Buffer, DType, Gpu, Launch, Purpose, View, address};

/// All optimizers but Adafactor.
pub static SOURCE: Source = Source {
    name: "optimizer.cu",
    text: concat!(include_str!("kernels/flat.cuh"), include_str!("kernels/optimizer.cu")),
    variants: &[&[]],
};

/// What stays the same over a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rule {
    /// How much of the first moment stays.
    pub beta1: f64,
    /// How much of the second moment stays.
    pub beta2: f64,
    /// Added to the root of the second moment; positive.
    pub epsilon: f64,
    /// Decay per unit of learning rate.
    pub weight_decay: f64,
}

/// What a step is made with, as four f64 in device memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Control {
    /// Of this step.
    pub learning_rate: f64,
    /// The number of this step, counted from 1, where the moments are corrected for their start at 0.
    pub bias_correction: Option<u64>,
    /// The most that the norm of all gradients may be; they are scaled down to it.
    pub clip: Option<f64>,
    /// What gradients are multiplied by before everything else.
    pub gradient_scale: f64,
}

impl Control {
    /// As it is written to device memory.
    pub fn numbers(&self) -> [f64; 4] {
        let step = self.bias_correction.unwrap_or(0) as f64;
        [self.learning_rate, step, self.clip.unwrap_or(0.0), self.gradient_scale]
    }
}

/// Numbers of the step's factors in device memory, f32: learning rate, the two corrections, the gradients' scale, their norm
/// before clipping, and whether the step is skipped because that is not finite.
pub const FACTORS: usize = 6;

/// Where the norm stands among the factors.
pub const NORM: usize = 4;

#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct DeviceChunk {
    start: u64,
    length: u32,
    segment: u32,
}

#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct DeviceSegment {
    decay: f32,
    rate: f32,
    first: u32,
    end: u32,
    trusted: u32,
    length: u32,
}

#[repr(C)]
struct DeviceRule {
    beta1: f32,
    beta2: f32,
    rest1: f32,
    rest2: f32,
    epsilon: f32,
}

// SAFETY: `struct Rule` of optimizer.cu has the same fields.
unsafe impl Argument for DeviceRule {}

impl Rule {
    fn argument(&self) -> DeviceRule {
        DeviceRule {
            beta1: self.beta1 as f32,
            beta2: self.beta2 as f32,
            rest1: (1.0 - self.beta1) as f32,
            rest2: (1.0 - self.beta2) as f32,
            epsilon: self.epsilon as f32,
        }
    }
}

/// How the work on a set of segments is divided. Built once.
pub struct Plan {
    rule: Rule,
    chunks: Buffer,
    segments: Buffer,
    chunk_count: usize,
    segment_count: usize,
    len: usize,
}

/// Elements of a chunk: a block's work.
const CHUNK: usize = 16384;

impl Plan {
    /// A plan for buffers of `len` elements. What lies in no segment is padding and never touched.
    ///
    /// Panics when segments overlap or end outside of the buffers, and when ε is not positive.
    pub fn new(gpu: &Gpu, rule: Rule, segments: &[Segment], len: usize) -> Result<Self> {
        let mut order: Vec<(usize, usize)> = segments.iter().map(|s| (s.start, s.start + s.len)).collect();
        order.sort_unstable();
        assert!(order.windows(2).all(|w| w[0].1 <= w[1].0), "optimizer: segments overlap");
        assert!(order.iter().all(|(_, end)| *end <= len), "optimizer: a segment ends outside of {len}");
        // Without it 0/0 is the direction of an element that never had a gradient.
        assert!(rule.epsilon as f32 > 0.0, "optimizer: epsilon {} is not positive", rule.epsilon);
        let mut chunks: Vec<DeviceChunk> = Vec::new();
        let mut table: Vec<DeviceSegment> = Vec::new();
        for (i, segment) in segments.iter().enumerate() {
            let first = chunks.len() as u32;
            let end = segment.start + segment.len;
            for start in (segment.start..end).step_by(CHUNK) {
                let length = CHUNK.min(end - start) as u32;
                chunks.push(DeviceChunk { start: start as u64, length, segment: i as u32 });
            }
            let decay = if segment.decay { rule.weight_decay as f32 } else { 0.0 };
            let (end, trusted) = (chunks.len() as u32, u32::from(segment.decay));
            let length = segment.len as u32;
            table.push(DeviceSegment { decay, rate: segment.rate, first, end, trusted, length });
        }
        Ok(Self {
            rule,
            chunk_count: chunks.len(),
            segment_count: table.len(),
            chunks: gpu.upload::<u32>(bytemuck::cast_slice(&chunks))?,
            segments: gpu.upload::<u32>(bytemuck::cast_slice(&table))?,
            len,
        })
    }

    #[track_caller]
    fn check(&self, f32s: &[View<'_>], copy: Option<View<'_>>, factors: View<'_>) {
        for view in f32s {
            view.expect("optimizer", "a buffer", self.len, DType::F32);
            assert!(view.is_aligned(), "optimizer: a buffer does not begin at a multiple of 16 bytes");
        }
        if let Some(copy) = copy {
            copy.expect("optimizer", "the copy", self.len, DType::Bf16);
            assert!(copy.is_aligned(), "optimizer: the copy does not begin at a multiple of 16 bytes");
        }
        factors.expect("optimizer", "the factors", FACTORS, DType::F32);
    }
}

/// Computes a step's factors from `control` ([`Control::numbers`], f64) and the sum of the gradients' squares (one f64;
/// without it nothing is clipped or skipped).
pub fn prepare(gpu: &Gpu, rule: &Rule, control: View<'_>, squares: Option<View<'_>>, factors: View<'_>) -> Result<()> {
    control.expect("prepare", "the control", 4, DType::F64);
    factors.expect("prepare", "the factors", FACTORS, DType::F32);
    if let Some(squares) = squares {
        squares.expect("prepare", "the squares", 1, DType::F64);
    }
    // SAFETY: four numbers in, six out.
    unsafe {
        let (control, squares, factors) = (control.address(), address(squares), factors.address());
        gpu.launch(
            &SOURCE,
            &[],
            "prepare",
            Launch::new(1, 1),
            &[&control, &squares, &rule.beta1, &rule.beta2, &factors],
        )
    }
}

/// One step of AdamW over all segments of the plan; `copy`, where given, gets the new parameters in bf16. Gradients whose
/// norm is not finite change nothing.
pub fn adamw(
    gpu: &Gpu,
    plan: &Plan,
    parameters: View<'_>,
    gradients: View<'_>,
    m: View<'_>,
    v: View<'_>,
    factors: View<'_>,
    copy: Option<View<'_>>,
) -> Result<()> {
    plan.check(&[parameters, gradients, m, v], copy, factors);
    // SAFETY: chunks lie within the buffers, whose lengths are checked.
    unsafe {
        let arguments: [&dyn Argument; 9] = [
            &plan.chunks.view().address(),
            &plan.segments.view().address(),
            &factors.address(),
            &plan.rule.argument(),
            &parameters.address(),
            &gradients.address(),
            &m.address(),
            &v.address(),
            &address(copy),
        ];
        gpu.launch(&SOURCE, &[], "adamw", Launch::new(plan.chunk_count, 256), &arguments)
    }
}

/// One step of gradient descent over all segments of the plan, otherwise as [`adamw`].
pub fn sgd(
    gpu: &Gpu,
    plan: &Plan,
    parameters: View<'_>,
    gradients: View<'_>,
    factors: View<'_>,
    copy: Option<View<'_>>,
) -> Result<()> {
    plan.check(&[parameters, gradients], copy, factors);
    let (chunks, segments, rule) = (plan.chunks.view().address(), plan.segments.view().address(), plan.rule.argument());
    // SAFETY: as in `adamw`.
    unsafe {
        let (factors, p, g, copy) = (factors.address(), parameters.address(), gradients.address(), address(copy));
        let arguments: [&dyn Argument; 7] = [&chunks, &segments, &factors, &rule, &p, &g, &copy];
        gpu.launch(&SOURCE, &[], "sgd", Launch::new(plan.chunk_count, 256), &arguments)
    }
}

/// One step of Adagrad over all segments of the plan, which keeps the sums of squares of gradients, otherwise as [`adamw`].
pub fn adagrad(
    gpu: &Gpu,
    plan: &Plan,
    parameters: View<'_>,
    gradients: View<'_>,
    squares: View<'_>,
    factors: View<'_>,
    copy: Option<View<'_>>,
) -> Result<()> {
    plan.check(&[parameters, gradients, squares], copy, factors);
    let (chunks, segments, rule) = (plan.chunks.view().address(), plan.segments.view().address(), plan.rule.argument());
    // SAFETY: as in `adamw`.
    unsafe {
        let (factors, p, g, copy) = (factors.address(), parameters.address(), gradients.address(), address(copy));
        let arguments: [&dyn Argument; 8] = [&chunks, &segments, &factors, &rule, &p, &g, &squares.address(), &copy];
        gpu.launch(&SOURCE, &[], "adagrad", Launch::new(plan.chunk_count, 256), &arguments)
    }
}

/// One step of LAMB over all segments of the plan, otherwise as [`adamw`].
pub fn lamb(
    gpu: &Gpu,
    plan: &Plan,
    parameters: View<'_>,
    gradients: View<'_>,
    m: View<'_>,
    v: View<'_>,
    factors: View<'_>,
    copy: Option<View<'_>>,
) -> Result<()> {
    in_two_passes(gpu, plan, ["lamb_moments", "lamb_rates"], [parameters, gradients, m, v], factors, copy)
}

/// One step of StableAdamW over all segments of the plan, otherwise as [`adamw`].
pub fn stable_adamw(
    gpu: &Gpu,
    plan: &Plan,
    parameters: View<'_>,
    gradients: View<'_>,
    m: View<'_>,
    v: View<'_>,
    factors: View<'_>,
    copy: Option<View<'_>>,
) -> Result<()> {
    in_two_passes(gpu, plan, ["stable_moments", "stable_rates"], [parameters, gradients, m, v], factors, copy)
}

/// A step whose rate depends on sums over each segment: one kernel takes those of chunks while it updates the moments, one makes the
/// segments' rates of them, and a third takes the step.
fn in_two_passes(
    gpu: &Gpu,
    plan: &Plan,
    [sums, rates_of_sums]: [&'static str; 2],
    [parameters, gradients, m, v]: [View<'_>; 4],
    factors: View<'_>,
    copy: Option<View<'_>>,
) -> Result<()> {
    plan.check(&[parameters, gradients, m, v], copy, factors);
    let squares = gpu.scratch(Purpose::Sums, plan.chunk_count * 16 + plan.segment_count * 4)?;
    let rates = squares + (plan.chunk_count * 16) as u64;
    let (chunks, segments, rule) = (plan.chunks.view().address(), plan.segments.view().address(), plan.rule.argument());
    let (factors, p, m, v) = (factors.address(), parameters.address(), m.address(), v.address());
    let each_chunk = Launch::new(plan.chunk_count, 256);
    // SAFETY: as in `adamw`; two sums a chunk, one rate a segment.
    unsafe {
        let arguments: [&dyn Argument; 9] =
            [&chunks, &segments, &factors, &rule, &p, &gradients.address(), &m, &v, &squares];
        gpu.launch(&SOURCE, &[], sums, each_chunk, &arguments)?;
        let arguments: [&dyn Argument; 4] = [&segments, &factors, &squares, &rates];
        gpu.launch(&SOURCE, &[], rates_of_sums, Launch::new(plan.segment_count, 256), &arguments)?;
        let arguments: [&dyn Argument; 9] = [&chunks, &segments, &factors, &rule, &p, &m, &v, &rates, &address(copy)];
        gpu.launch(&SOURCE, &[], "apply", each_chunk, &arguments)
    }
}
