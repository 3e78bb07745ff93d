//! AdamW, StableAdamW, LAMB, Adagrad and plain gradient descent over flat buffers. The definition is [`crate::cpu::optimizer`].
//!
//! What changes from step to step (learning rate, the step's number, the bound on the gradients' norm) is read from device
//! memory: a step is [`reduce::sum_of_squares`](super::reduce::sum_of_squares), [`prepare`], then [`adamw`],
//! [`stable_adamw`], [`lamb`], [`adagrad`] or [`sgd`], none of which waits, and a recorded graph of them can be played again.

use std::ops::Range;

use crate::cpu::optimizer::{Segment, TwoPasses};
use crate::cpu::reduce::CHUNK;

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
///
/// A plan may be of a part of the buffers alone, where several processes share an update: the views of a step are then that part. Rates
/// that depend on a whole tensor need the sums of all parts between the two passes of such a step.
pub struct Plan {
    rule: Rule,
    /// Those of this plan's part, by their places in it.
    chunks: Buffer,
    segments: Buffer,
    segment_count: usize,
    /// Of all buffers.
    chunk_count: usize,
    own: Range<usize>,
    /// Elements of the part.
    len: usize,
}

impl Plan {
    /// A plan for buffers of `len` elements. What lies in no segment is padding and never touched.
    ///
    /// Panics when segments overlap or end outside of the buffers, and when ε is not positive.
    pub fn new(gpu: &Gpu, rule: Rule, segments: &[Segment], len: usize) -> Result<Self> {
        Self::of_range(gpu, rule, segments, len, 0..len)
    }

    /// A plan for a part of such buffers, whose borders are multiples of [`CHUNK`] or their end.
    ///
    /// Panics as [`Plan::new`] does, and where a border is another.
    pub fn of_range(gpu: &Gpu, rule: Rule, segments: &[Segment], len: usize, range: Range<usize>) -> Result<Self> {
        let mut order: Vec<(usize, usize)> = segments.iter().map(|s| (s.start, s.start + s.len)).collect();
        order.sort_unstable();
        assert!(order.windows(2).all(|w| w[0].1 <= w[1].0), "optimizer: segments overlap");
        assert!(order.iter().all(|(_, end)| *end <= len), "optimizer: a segment ends outside of {len}");
        // Without it 0/0 is the direction of an element that never had a gradient.
        assert!(rule.epsilon as f32 > 0.0, "optimizer: epsilon {} is not positive", rule.epsilon);
        let is_border = |place: usize| place.is_multiple_of(CHUNK) || place == len;
        assert!(is_border(range.start) && is_border(range.end) && range.end <= len, "optimizer: {range:?} of {len}");
        let mut chunks: Vec<DeviceChunk> = Vec::new();
        for (i, segment) in segments.iter().enumerate() {
            let (mut start, end) = (segment.start, segment.start + segment.len);
            while start < end {
                // As on the CPU, it ends where a chunk of the flat buffers does, so that it is one process's whoever shares them.
                let next = end.min((start / CHUNK + 1) * CHUNK);
                chunks.push(DeviceChunk { start: start as u64, length: (next - start) as u32, segment: i as u32 });
                start = next;
            }
        }
        chunks.sort_unstable_by_key(|chunk| chunk.start);
        let mut table: Vec<DeviceSegment> = Vec::new();
        for segment in segments {
            let place = |of: usize| chunks.partition_point(|chunk| (chunk.start as usize) < of) as u32;
            let (first, end) = (place(segment.start), place(segment.start + segment.len));
            let decay = if segment.decay { rule.weight_decay as f32 } else { 0.0 };
            let (trusted, length) = (u32::from(segment.decay), segment.len as u32);
            table.push(DeviceSegment { decay, rate: segment.rate, first, end, trusted, length });
        }
        let place = |of: usize| chunks.partition_point(|chunk| (chunk.start as usize) < of);
        let own = place(range.start)..place(range.end);
        let mut of_own: Vec<DeviceChunk> = chunks[own.clone()].to_vec();
        of_own.iter_mut().for_each(|chunk| chunk.start -= range.start as u64);
        if of_own.is_empty() {
            // No block of nothing can be had; this one is never read.
            of_own.push(DeviceChunk { start: 0, length: 0, segment: 0 });
        }
        Ok(Self {
            rule,
            chunk_count: chunks.len(),
            segment_count: table.len(),
            chunks: gpu.upload::<u32>(bytemuck::cast_slice(&of_own))?,
            segments: gpu.upload::<u32>(bytemuck::cast_slice(&table))?,
            own,
            len: range.len(),
        })
    }

    /// How many f64 numbers [`first_pass`] and [`second_pass`] need for their sums.
    pub fn sums(&self) -> usize {
        2 * self.chunk_count
    }

    /// Which of these [`first_pass`] writes. Those of the other parts of the buffers must stand before and behind them for
    /// [`second_pass`].
    pub fn own_sums(&self) -> Range<usize> {
        2 * self.own.start..2 * self.own.end
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
        gpu.launch(&SOURCE, &[], "adamw", Launch::new(plan.own.len(), 256), &arguments)
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
    in_two_passes(gpu, plan, TwoPasses::Lamb, [parameters, gradients, m, v], factors, copy)
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
    in_two_passes(gpu, plan, TwoPasses::StableAdamW, [parameters, gradients, m, v], factors, copy)
}

/// A step whose rate depends on sums over each segment: one kernel takes those of chunks while it updates the moments, one makes the
/// segments' rates of them, and a third takes the step.
fn in_two_passes(
    gpu: &Gpu,
    plan: &Plan,
    rule: TwoPasses,
    [parameters, gradients, m, v]: [View<'_>; 4],
    factors: View<'_>,
    copy: Option<View<'_>>,
) -> Result<()> {
    assert!(plan.own.len() == plan.chunk_count, "optimizer: sums of other parts are needed");
    // SAFETY: just asked for, with this many numbers.
    let sums = unsafe { View::new(gpu.scratch(Purpose::Sums, plan.sums() * 8)?, plan.sums(), DType::F64) };
    first_pass(gpu, plan, rule, [parameters, gradients, m, v], factors, sums)?;
    second_pass(gpu, plan, rule, [parameters, m, v], factors, sums, copy)
}

fn kernels(rule: TwoPasses) -> [&'static str; 2] {
    match rule {
        TwoPasses::Lamb => ["lamb_moments", "lamb_rates"],
        TwoPasses::StableAdamW => ["stable_moments", "stable_rates"],
    }
}

/// Updates the moments of the plan's part, and writes its [`Plan::own_sums`] among `sums`, which are [`Plan::sums`] f64.
pub fn first_pass(
    gpu: &Gpu,
    plan: &Plan,
    rule: TwoPasses,
    [parameters, gradients, m, v]: [View<'_>; 4],
    factors: View<'_>,
    sums: View<'_>,
) -> Result<()> {
    plan.check(&[parameters, gradients, m, v], None, factors);
    sums.expect("optimizer", "the sums", plan.sums(), DType::F64);
    let own = sums.part(plan.own_sums().start, plan.own_sums().len());
    // SAFETY: chunks lie within the buffers, whose lengths are checked; two sums for each.
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
            &own.address(),
        ];
        gpu.launch(&SOURCE, &[], kernels(rule)[0], Launch::new(plan.own.len(), 256), &arguments)
    }
}

/// Takes the step after [`first_pass`], with the sums of all parts; `copy`, where given, gets the new parameters in bf16.
pub fn second_pass(
    gpu: &Gpu,
    plan: &Plan,
    rule: TwoPasses,
    [parameters, m, v]: [View<'_>; 3],
    factors: View<'_>,
    sums: View<'_>,
    copy: Option<View<'_>>,
) -> Result<()> {
    plan.check(&[parameters, m, v], copy, factors);
    sums.expect("optimizer", "the sums", plan.sums(), DType::F64);
    let rates = gpu.scratch(Purpose::Rates, plan.segment_count * 4)?;
    let (chunks, segments) = (plan.chunks.view().address(), plan.segments.view().address());
    // SAFETY: as in `first_pass`; one rate a segment.
    unsafe {
        let arguments: [&dyn Argument; 4] = [&segments, &factors.address(), &sums.address(), &rates];
        gpu.launch(&SOURCE, &[], kernels(rule)[1], Launch::new(plan.segment_count, 256), &arguments)?;
        let arguments: [&dyn Argument; 9] = [
            &chunks,
            &segments,
            &factors.address(),
            &plan.rule.argument(),
            &parameters.address(),
            &m.address(),
            &v.address(),
            &rates,
            &address(copy),
        ];
        gpu.launch(&SOURCE, &[], "apply", Launch::new(plan.own.len(), 256), &arguments)
    }
}
