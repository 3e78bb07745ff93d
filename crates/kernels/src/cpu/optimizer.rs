//! AdamW, StableAdamW, LAMB, Adagrad and plain gradient descent over flat buffers: parameters, gradients and the two moments of all tensors lie in four slices, and a
//! [`Plan`] says which part is whose. The bf16 copy that the model computes with is refreshed in the same pass.
//!
//! With `bias_correction` AdamW is `torch.optim.AdamW` (Loshchilov and Hutter 2019); without it is that of the BERT paper
//! (google-research/bert `optimization.py` 130-151). ε stands outside of the root in both. LAMB is that of You et al.
//! 2020, algorithm 2. StableAdamW (Wortsman et al. 2023, algorithm 2) is AdamW with the update clipping of Adafactor, as in
//! optimi, which ModernBERT was trained with: the clipped rate is that of the decay, too. Adagrad (Duchi et al. 2011) is
//! `torch.optim.Adagrad` with decoupled decay. Clipping gradients is not done here: the factor comes in by `gradient_scale`.

use std::ops::Range;

use half::bf16;

use super::reduce::CHUNK;
use super::scratch::{self, Purpose};
use super::simd::{Simd, read, write};
use super::{Cpu, SharedMut};

/// The definition, in f64.
pub mod reference {
    use super::{Segment, Settings};

    /// Updates the moments and gives the direction m̂/(√v̂ + ε) + decay·p of every element of a segment.
    fn direction(
        p: &[f64],
        g: &[f64],
        m: &mut [f64],
        v: &mut [f64],
        segment: &Segment,
        settings: &Settings,
    ) -> Vec<f64> {
        let step = |i: usize| {
            let g = g[i] * settings.gradient_scale;
            m[i] = settings.beta1 * m[i] + (1.0 - settings.beta1) * g;
            v[i] = settings.beta2 * v[i] + (1.0 - settings.beta2) * g * g;
            let (mut m, mut v) = (m[i], v[i]);
            if let Some(step) = settings.bias_correction {
                m /= 1.0 - settings.beta1.powf(step as f64);
                v /= 1.0 - settings.beta2.powf(step as f64);
            }
            let decay = if segment.decay { settings.weight_decay } else { 0.0 };
            m / (v.sqrt() + settings.epsilon) + decay * p[i]
        };
        (0..p.len()).map(step).collect()
    }

    /// One step of AdamW: p −= learning rate·direction.
    pub fn adamw(p: &mut [f64], g: &[f64], m: &mut [f64], v: &mut [f64], segments: &[Segment], settings: &Settings) {
        for segment in segments {
            let all = segment.start..segment.start + segment.len;
            let (p, m, v) = (&mut p[all.clone()], &mut m[all.clone()], &mut v[all.clone()]);
            let direction = direction(p, &g[all], m, v, segment, settings);
            for i in 0..p.len() {
                p[i] -= settings.learning_rate * f64::from(segment.rate) * direction[i];
            }
        }
    }

    /// One step of gradient descent: p −= learning rate·(g + decay·p).
    pub fn sgd(p: &mut [f64], g: &[f64], segments: &[Segment], settings: &Settings) {
        for segment in segments {
            let decay = if segment.decay { settings.weight_decay } else { 0.0 };
            for i in segment.start..segment.start + segment.len {
                let direction = g[i] * settings.gradient_scale + decay * p[i];
                p[i] -= settings.learning_rate * f64::from(segment.rate) * direction;
            }
        }
    }

    /// One step of Adagrad: a += g², then p −= learning rate·(g/(√a + ε) + decay·p).
    pub fn adagrad(p: &mut [f64], g: &[f64], a: &mut [f64], segments: &[Segment], settings: &Settings) {
        for segment in segments {
            let decay = if segment.decay { settings.weight_decay } else { 0.0 };
            for i in segment.start..segment.start + segment.len {
                let g = g[i] * settings.gradient_scale;
                a[i] += g * g;
                let direction = g / (a[i].sqrt() + settings.epsilon) + decay * p[i];
                p[i] -= settings.learning_rate * f64::from(segment.rate) * direction;
            }
        }
    }

    /// One step of StableAdamW: p −= learning rate/max(1, RMS)·direction, where RMS² is the mean of g²/max(v̂, ε²) over a segment.
    /// A gradient that the second moment does not expect makes a smaller step of its tensor.
    pub fn stable_adamw(
        p: &mut [f64],
        g: &[f64],
        m: &mut [f64],
        v: &mut [f64],
        segments: &[Segment],
        settings: &Settings,
    ) {
        for segment in segments {
            let all = segment.start..segment.start + segment.len;
            let (p, g, m, v) = (&mut p[all.clone()], &g[all.clone()], &mut m[all.clone()], &mut v[all]);
            let direction = direction(p, g, m, v, segment, settings);
            let correction = settings.bias_correction.map_or(1.0, |step| 1.0 - settings.beta2.powf(step as f64));
            let ratio = |(g, v): (&f64, &f64)| {
                (g * settings.gradient_scale).powi(2) / (v / correction).max(settings.epsilon.powi(2))
            };
            let mean = g.iter().zip(&*v).map(ratio).sum::<f64>() / (p.len() as f64).max(1.0);
            for i in 0..p.len() {
                p[i] -= settings.learning_rate * f64::from(segment.rate) / mean.sqrt().max(1.0) * direction[i];
            }
        }
    }

    /// One step of LAMB: p −= learning rate·‖p‖/‖direction‖·direction.
    pub fn lamb(p: &mut [f64], g: &[f64], m: &mut [f64], v: &mut [f64], segments: &[Segment], settings: &Settings) {
        let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
        for segment in segments {
            let all = segment.start..segment.start + segment.len;
            let (p, m, v) = (&mut p[all.clone()], &mut m[all.clone()], &mut v[all.clone()]);
            let direction = direction(p, &g[all], m, v, segment, settings);
            let (length, step) = (norm(p), norm(&direction));
            let trust = if segment.decay && length > 0.0 && step > 0.0 { length / step } else { 1.0 };
            for i in 0..p.len() {
                p[i] -= settings.learning_rate * f64::from(segment.rate) * trust * direction[i];
            }
        }
    }
}

/// A tensor's part of the flat buffers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Segment {
    /// Its first element.
    pub start: usize,
    /// Its elements.
    pub len: usize,
    /// Whether weight decay applies, and LAMB's trust ratio with it: not to biases and LayerNorm.
    pub decay: bool,
    /// A factor on the learning rate.
    pub rate: f32,
}

/// What a step is made with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// Of this step; the schedule is the caller's.
    pub learning_rate: f64,
    /// How much of the first moment stays.
    pub beta1: f64,
    /// How much of the second moment stays.
    pub beta2: f64,
    /// Added to the root of the second moment; positive.
    pub epsilon: f64,
    /// Decay per unit of learning rate, "decoupled": it does not go through the moments.
    pub weight_decay: f64,
    /// The number of this step, counted from 1, where the moments are corrected for their start at 0; none: they are not.
    pub bias_correction: Option<u64>,
    /// What gradients are multiplied by before use: the factor that clips the global norm.
    pub gradient_scale: f64,
}

/// How the work on a set of segments is divided. Built once; a step then allocates nothing.
///
/// A plan may be of a part of the buffers alone, where several processes share an update: the slices of a step are then that part.
/// Rates that depend on a whole tensor need the sums of all parts between the two passes of such a step.
#[derive(Clone, Debug)]
pub struct Plan {
    segments: Vec<Segment>,
    /// Of all buffers, in their order.
    chunks: Vec<Chunk>,
    /// Those of this plan's part.
    own: Range<usize>,
    /// The part.
    range: Range<usize>,
}

/// A piece of one segment: a task. Ends where a chunk of the flat buffers does, at the latest.
#[derive(Clone, Copy, Debug)]
struct Chunk {
    start: usize,
    len: usize,
    segment: usize,
}

impl Plan {
    /// A plan for buffers of `len` elements. What lies in no segment is padding and never touched.
    ///
    /// Panics when segments overlap or end outside of the buffers.
    pub fn new(segments: &[Segment], len: usize) -> Self {
        Self::of_range(segments, len, 0..len)
    }

    /// A plan for a part of such buffers, whose borders are multiples of [`CHUNK`] or their end.
    ///
    /// Panics as [`Plan::new`] does, and where a border is another.
    pub fn of_range(segments: &[Segment], len: usize, range: Range<usize>) -> Self {
        let mut order: Vec<(usize, usize)> = segments.iter().map(|s| (s.start, s.start + s.len)).collect();
        order.sort_unstable();
        assert!(order.windows(2).all(|w| w[0].1 <= w[1].0), "optimizer: segments overlap");
        assert!(order.iter().all(|(_, end)| *end <= len), "optimizer: a segment ends outside of {len}");
        let is_border = |place: usize| place.is_multiple_of(CHUNK) || place == len;
        assert!(is_border(range.start) && is_border(range.end) && range.end <= len, "optimizer: {range:?} of {len}");
        let mut chunks = Vec::new();
        for (segment, Segment { start, len, .. }) in segments.iter().enumerate() {
            let (mut start, end) = (*start, start + len);
            while start < end {
                let next = end.min((start / CHUNK + 1) * CHUNK);
                chunks.push(Chunk { start, len: next - start, segment });
                start = next;
            }
        }
        chunks.sort_unstable_by_key(|chunk| chunk.start);
        let place = |of: usize| chunks.partition_point(|chunk| chunk.start < of);
        let own = place(range.start)..place(range.end);
        Self { segments: segments.to_vec(), own, chunks, range }
    }

    /// The segments, as they were given.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// How many numbers [`first_pass`] and [`second_pass`] need for their sums.
    pub fn sums(&self) -> usize {
        2 * (self.chunks.len() + self.segments.len())
    }

    /// Which of these [`first_pass`] writes. Those of the other parts of the buffers must stand before and behind them for
    /// [`second_pass`].
    pub fn own_sums(&self) -> Range<usize> {
        2 * self.own.start..2 * self.own.end
    }

    /// Calls `task` with the number of every own chunk, the chunk with its place in the slices, and its segment.
    fn for_chunks(&self, cpu: &Cpu, task: impl Fn(usize, Chunk, &Segment) + Sync) {
        cpu.for_each(self.own.len(), |i| {
            let number = self.own.start + i;
            let chunk = self.chunks[number];
            let start = chunk.start - self.range.start;
            task(number, Chunk { start, ..chunk }, &self.segments[chunk.segment]);
        });
    }
}

/// The buffers of a step, shared by its tasks.
struct Buffers<'a> {
    p: SharedMut<f32>,
    g: &'a [f32],
    m: SharedMut<f32>,
    v: SharedMut<f32>,
    copy: Option<SharedMut<bf16>>,
}

impl<'a> Buffers<'a> {
    fn new(
        plan: &Plan,
        p: &mut [f32],
        g: &'a [f32],
        m: &mut [f32],
        v: &mut [f32],
        copy: Option<&mut [bf16]>,
        settings: &Settings,
    ) -> Self {
        // Without it 0/0 is the direction of an element that never had a gradient.
        assert!(settings.epsilon as f32 > 0.0, "optimizer: epsilon {} is not positive", settings.epsilon);
        let len = plan.range.len();
        // The second of two passes has no use for gradients.
        let gradients = if g.is_empty() { len } else { g.len() };
        let lengths = [p.len(), gradients, m.len(), v.len(), copy.as_ref().map_or(len, |c| c.len())];
        assert!(lengths == [len; 5], "optimizer: lengths {lengths:?} for a plan of {len}");
        let (p, m, v) = (SharedMut::new(p), SharedMut::new(m), SharedMut::new(v));
        Self { p, g, m, v, copy: copy.map(SharedMut::new) }
    }
}

/// The settings as one segment's loop uses them.
#[derive(Clone, Copy)]
struct Factors {
    beta1: f32,
    beta2: f32,
    /// 1 − β₁ and 1 − β₂, not rounded before the subtraction.
    rest1: f32,
    rest2: f32,
    /// What makes m̂ of m, and √v̂ of √v.
    correct_m: f32,
    correct_root: f32,
    epsilon: f32,
    decay: f32,
    rate: f32,
    gradient_scale: f32,
}

impl Factors {
    fn new(settings: &Settings, segment: &Segment) -> Self {
        let correction = |beta: f64| settings.bias_correction.map_or(1.0, |step| 1.0 / (1.0 - beta.powf(step as f64)));
        Self {
            beta1: settings.beta1 as f32,
            beta2: settings.beta2 as f32,
            rest1: (1.0 - settings.beta1) as f32,
            rest2: (1.0 - settings.beta2) as f32,
            correct_m: correction(settings.beta1) as f32,
            correct_root: correction(settings.beta2).sqrt() as f32,
            epsilon: settings.epsilon as f32,
            decay: if segment.decay { settings.weight_decay as f32 } else { 0.0 },
            rate: (settings.learning_rate * f64::from(segment.rate)) as f32,
            gradient_scale: settings.gradient_scale as f32,
        }
    }
}

/// One step of AdamW over all segments of the plan; `copy`, where given, gets the new parameters in bf16.
///
/// Adding an element's `learning_rate·rate·weight_decay·p` to its update is the decoupled decay of both sources.
pub fn adamw(
    cpu: &Cpu,
    plan: &Plan,
    parameters: &mut [f32],
    gradients: &[f32],
    m: &mut [f32],
    v: &mut [f32],
    settings: &Settings,
    copy: Option<&mut [bf16]>,
) {
    let buffers = Buffers::new(plan, parameters, gradients, m, v, copy, settings);
    plan.for_chunks(cpu, |_, Chunk { start, len, .. }, segment| {
        let factors = Factors::new(settings, segment);
        // SAFETY: chunks are disjoint, since segments are.
        unsafe {
            let (p, m, v) = (buffers.p.slice(start, len), buffers.m.slice(start, len), buffers.v.slice(start, len));
            let copy = buffers.copy.as_ref().map(|c| c.slice(start, len));
            adamw_chunk(cpu.isa(), &factors, p, &buffers.g[start..start + len], m, v, copy);
        }
    });
}

/// One step of plain gradient descent over all segments of the plan, which keeps nothing; `copy`, where given, gets the new parameters
/// in bf16.
pub fn sgd(
    cpu: &Cpu,
    plan: &Plan,
    parameters: &mut [f32],
    gradients: &[f32],
    settings: &Settings,
    copy: Option<&mut [bf16]>,
) {
    let of_plan = plan.range.len();
    let lengths = [parameters.len(), gradients.len(), copy.as_ref().map_or(of_plan, |c| c.len())];
    assert!(lengths == [of_plan; 3], "optimizer: lengths {lengths:?} for a plan of {of_plan}");
    let (parameters, copy) = (SharedMut::new(parameters), copy.map(SharedMut::new));
    plan.for_chunks(cpu, |_, Chunk { start, len, .. }, segment| {
        let Factors { decay, rate, gradient_scale, .. } = Factors::new(settings, segment);
        // SAFETY: chunks are disjoint, since segments are.
        let (p, copy) = unsafe { (parameters.slice(start, len), copy.as_ref().map(|copy| copy.slice(start, len))) };
        for (p, g) in p.iter_mut().zip(&gradients[start..start + len]) {
            *p -= rate * (g * gradient_scale + decay * *p);
        }
        if let Some(copy) = copy {
            copy.iter_mut().zip(&*p).for_each(|(copy, p)| *copy = bf16::from_f32(*p));
        }
    });
}

/// One step of Adagrad over all segments of the plan, which keeps the sums of squares of gradients; `copy`, where given, gets the new
/// parameters in bf16.
pub fn adagrad(
    cpu: &Cpu,
    plan: &Plan,
    parameters: &mut [f32],
    gradients: &[f32],
    squares: &mut [f32],
    settings: &Settings,
    copy: Option<&mut [bf16]>,
) {
    assert!(settings.epsilon as f32 > 0.0, "optimizer: epsilon {} is not positive", settings.epsilon);
    let of_plan = plan.range.len();
    let lengths = [parameters.len(), gradients.len(), squares.len(), copy.as_ref().map_or(of_plan, |c| c.len())];
    assert!(lengths == [of_plan; 4], "optimizer: lengths {lengths:?} for a plan of {of_plan}");
    let (p, a, copy) = (SharedMut::new(parameters), SharedMut::new(squares), copy.map(SharedMut::new));
    plan.for_chunks(cpu, |_, Chunk { start, len, .. }, segment| {
        let factors = Factors::new(settings, segment);
        // SAFETY: chunks are disjoint, since segments are.
        unsafe {
            let copy = copy.as_ref().map(|copy| copy.slice(start, len));
            let (p, a) = (p.slice(start, len), a.slice(start, len));
            adagrad_chunk(cpu.isa(), &factors, p, &gradients[start..start + len], a, copy);
        }
    });
}

/// One step of LAMB over all segments of the plan; `copy`, where given, gets the new parameters in bf16.
///
/// A segment's trust ratio is ‖p‖/‖direction‖; it is 1 where either is 0 and where the segment is not decayed.
pub fn lamb(
    cpu: &Cpu,
    plan: &Plan,
    parameters: &mut [f32],
    gradients: &[f32],
    m: &mut [f32],
    v: &mut [f32],
    settings: &Settings,
    copy: Option<&mut [bf16]>,
) {
    in_two_passes(cpu, plan, TwoPasses::Lamb, parameters, gradients, m, v, settings, copy);
}

/// One step of StableAdamW over all segments of the plan; `copy`, where given, gets the new parameters in bf16.
///
/// A segment's learning rate is divided by the root of the mean of g²/max(v̂, ε²), where that is above 1.
pub fn stable_adamw(
    cpu: &Cpu,
    plan: &Plan,
    parameters: &mut [f32],
    gradients: &[f32],
    m: &mut [f32],
    v: &mut [f32],
    settings: &Settings,
    copy: Option<&mut [bf16]>,
) {
    in_two_passes(cpu, plan, TwoPasses::StableAdamW, parameters, gradients, m, v, settings, copy);
}

/// Rules whose rate of a tensor depends on sums over it: they are taken while the moments are updated, then the step follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TwoPasses {
    /// [`lamb`].
    Lamb,
    /// [`stable_adamw`].
    StableAdamW,
}

impl TwoPasses {
    /// A segment's rate, of the one that it would have otherwise and of its sums.
    fn rate(self, segment: &Segment, rate: f32, sums: &[f64]) -> f32 {
        match self {
            // Σp² and Σdirection².
            Self::Lamb => {
                let (length, step) = (sums[0].sqrt(), sums[1].sqrt());
                match segment.decay && length > 0.0 && step > 0.0 {
                    true => (f64::from(rate) * length / step) as f32,
                    false => rate,
                }
            }
            Self::StableAdamW => (f64::from(rate) / (sums[0] / segment.len as f64).sqrt().max(1.0)) as f32,
        }
    }
}

/// Both passes over a whole model.
fn in_two_passes(
    cpu: &Cpu,
    plan: &Plan,
    rule: TwoPasses,
    parameters: &mut [f32],
    gradients: &[f32],
    m: &mut [f32],
    v: &mut [f32],
    settings: &Settings,
    copy: Option<&mut [bf16]>,
) {
    assert_eq!(plan.own.len(), plan.chunks.len(), "optimizer: a step of a part needs the sums of the others");
    scratch::with(Purpose::Kernel, plan.sums(), |sums: &mut [f64]| {
        first_pass(cpu, plan, rule, parameters, gradients, m, v, settings, sums);
        second_pass(cpu, plan, rule, parameters, m, v, settings, sums, copy);
    });
}

/// Updates the moments of the plan's part, and writes its own of the `sums` ([`Plan::sums`], [`Plan::own_sums`]).
pub fn first_pass(
    cpu: &Cpu,
    plan: &Plan,
    rule: TwoPasses,
    parameters: &mut [f32],
    gradients: &[f32],
    m: &mut [f32],
    v: &mut [f32],
    settings: &Settings,
    sums: &mut [f64],
) {
    let buffers = Buffers::new(plan, parameters, gradients, m, v, None, settings);
    assert_eq!(sums.len(), plan.sums(), "optimizer: sums");
    let shared = SharedMut::new(sums);
    let first = match rule {
        TwoPasses::Lamb => moments_chunk,
        TwoPasses::StableAdamW => surprise_chunk,
    };
    plan.for_chunks(cpu, |number, Chunk { start, len, .. }, segment| {
        let factors = Factors::new(settings, segment);
        // SAFETY: chunks are disjoint, since segments are, and each has its own two sums.
        unsafe {
            let (p, m, v) = (buffers.p.slice(start, len), buffers.m.slice(start, len), buffers.v.slice(start, len));
            let sums = first(cpu.isa(), &factors, p, &buffers.g[start..start + len], m, v);
            shared.slice(2 * number, 2).copy_from_slice(&sums);
        }
    });
}

/// Takes the step of the plan's part, once the sums of all chunks are known; `copy`, where given, gets the new parameters in bf16.
pub fn second_pass(
    cpu: &Cpu,
    plan: &Plan,
    rule: TwoPasses,
    parameters: &mut [f32],
    m: &mut [f32],
    v: &mut [f32],
    settings: &Settings,
    sums: &mut [f64],
    copy: Option<&mut [bf16]>,
) {
    let buffers = Buffers::new(plan, parameters, &[], m, v, copy, settings);
    assert_eq!(sums.len(), plan.sums(), "optimizer: sums");
    // The sums of each chunk, then those of each segment.
    let (parts, sums) = sums.split_at_mut(2 * plan.chunks.len());
    sums.fill(0.0);
    for (chunk, parts) in plan.chunks.iter().zip(parts.chunks_exact(2)) {
        sums[2 * chunk.segment] += parts[0];
        sums[2 * chunk.segment + 1] += parts[1];
    }
    let sums = &*sums;
    plan.for_chunks(cpu, |_, Chunk { start, len, segment: number }, segment| {
        let mut factors = Factors::new(settings, segment);
        factors.rate = rule.rate(segment, factors.rate, &sums[2 * number..2 * number + 2]);
        // SAFETY: chunks are disjoint.
        unsafe {
            let (p, m, v) = (buffers.p.slice(start, len), buffers.m.slice(start, len), buffers.v.slice(start, len));
            let copy = buffers.copy.as_ref().map(|c| c.slice(start, len));
            apply_chunk(cpu.isa(), &factors, p, m, v, copy);
        }
    });
}

dispatch! {
    fn adamw_chunk(
        factors: &Factors, p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32], copy: Option<&mut [bf16]>,
    ) = adamw_body
}
dispatch! {
    fn adagrad_chunk(factors: &Factors, p: &mut [f32], g: &[f32], a: &mut [f32], copy: Option<&mut [bf16]>) = adagrad_body
}
dispatch! {
    fn moments_chunk(factors: &Factors, p: &[f32], g: &[f32], m: &mut [f32], v: &mut [f32]) -> [f64; 2] = moments_body
}
dispatch! {
    fn surprise_chunk(factors: &Factors, p: &[f32], g: &[f32], m: &mut [f32], v: &mut [f32]) -> [f64; 2] = surprise_body
}
dispatch! {
    fn apply_chunk(factors: &Factors, p: &mut [f32], m: &[f32], v: &[f32], copy: Option<&mut [bf16]>) = apply_body
}

/// # Safety
/// The instruction set must be there; all slices have one length.
#[inline(always)]
unsafe fn adamw_body<S: Simd>(
    factors: &Factors,
    p: &mut [f32],
    g: &[f32],
    m: &mut [f32],
    v: &mut [f32],
    mut copy: Option<&mut [bf16]>,
) {
    for i in (0..p.len()).step_by(S::LANES) {
        // SAFETY: i is below the length.
        unsafe {
            let (moment, square) = moments::<S>(factors, g, m, v, i);
            let old = read::<S, f32>(p, i);
            let new = S::mul_add(direction::<S>(factors, old, moment, square), S::splat(-factors.rate), old);
            write::<S, f32>(p, i, new);
            if let Some(copy) = copy.as_deref_mut() {
                write::<S, bf16>(copy, i, new);
            }
        }
    }
}

/// # Safety
/// As for `adamw_body`.
#[inline(always)]
unsafe fn adagrad_body<S: Simd>(
    factors: &Factors,
    p: &mut [f32],
    g: &[f32],
    a: &mut [f32],
    mut copy: Option<&mut [bf16]>,
) {
    for i in (0..p.len()).step_by(S::LANES) {
        // SAFETY: i is below the length. Beyond it g and a are 0, and since ε > 0 so is the step.
        unsafe {
            let g = S::mul(read::<S, f32>(g, i), S::splat(factors.gradient_scale));
            let squares = S::mul_add(g, g, read::<S, f32>(a, i));
            write::<S, f32>(a, i, squares);
            let old = read::<S, f32>(p, i);
            let step = S::div(g, S::add(S::sqrt(squares), S::splat(factors.epsilon)));
            let direction = S::mul_add(old, S::splat(factors.decay), step);
            let new = S::mul_add(direction, S::splat(-factors.rate), old);
            write::<S, f32>(p, i, new);
            if let Some(copy) = copy.as_deref_mut() {
                write::<S, bf16>(copy, i, new);
            }
        }
    }
}

/// Updates the moments and gives Σp² and Σdirection², in f64 over f32 sums of a chunk's lanes.
///
/// # Safety
/// As for `adamw_body`.
#[inline(always)]
unsafe fn moments_body<S: Simd>(factors: &Factors, p: &[f32], g: &[f32], m: &mut [f32], v: &mut [f32]) -> [f64; 2] {
    // SAFETY: i is below the length. Beyond it p and the moments are 0, and since ε > 0 so is the direction.
    unsafe {
        let mut sums = [S::splat(0.0); 2];
        for i in (0..p.len()).step_by(S::LANES) {
            let (moment, square) = moments::<S>(factors, g, m, v, i);
            let p = read::<S, f32>(p, i);
            let d = direction::<S>(factors, p, moment, square);
            sums[0] = S::mul_add(p, p, sums[0]);
            sums[1] = S::mul_add(d, d, sums[1]);
        }
        sums.map(|sum| f64::from(S::sum(sum)))
    }
}

/// Updates the moments and gives Σg²/max(v̂, ε²), as `moments_body` gives its sums, and a 0.
///
/// # Safety
/// As for `adamw_body`.
#[inline(always)]
unsafe fn surprise_body<S: Simd>(factors: &Factors, _: &[f32], g: &[f32], m: &mut [f32], v: &mut [f32]) -> [f64; 2] {
    // SAFETY: i is below the length. Beyond it g is 0, and so is its square over a positive number.
    unsafe {
        let least = S::splat((factors.epsilon * factors.epsilon).max(f32::MIN_POSITIVE));
        let correct = S::splat(factors.correct_root * factors.correct_root);
        let mut sum = S::splat(0.0);
        for i in (0..g.len()).step_by(S::LANES) {
            let (_, square) = moments::<S>(factors, g, m, v, i);
            let g = S::mul(read::<S, f32>(g, i), S::splat(factors.gradient_scale));
            sum = S::add(sum, S::div(S::mul(g, g), S::max(S::mul(square, correct), least)));
        }
        [f64::from(S::sum(sum)), 0.0]
    }
}

/// Takes the step along the direction that the moments give.
///
/// # Safety
/// As for `adamw_body`.
#[inline(always)]
unsafe fn apply_body<S: Simd>(factors: &Factors, p: &mut [f32], m: &[f32], v: &[f32], mut copy: Option<&mut [bf16]>) {
    for i in (0..p.len()).step_by(S::LANES) {
        // SAFETY: i is below the length.
        unsafe {
            let old = read::<S, f32>(p, i);
            let direction = direction::<S>(factors, old, read::<S, f32>(m, i), read::<S, f32>(v, i));
            let new = S::mul_add(direction, S::splat(-factors.rate), old);
            write::<S, f32>(p, i, new);
            if let Some(copy) = copy.as_deref_mut() {
                write::<S, bf16>(copy, i, new);
            }
        }
    }
}

/// m = β₁m + (1 − β₁)g and v = β₂v + (1 − β₂)g², stored and given.
#[inline(always)]
unsafe fn moments<S: Simd>(factors: &Factors, g: &[f32], m: &mut [f32], v: &mut [f32], i: usize) -> (S::V, S::V) {
    // SAFETY: as for the callers.
    unsafe {
        let g = S::mul(read::<S, f32>(g, i), S::splat(factors.gradient_scale));
        let old = S::mul(read::<S, f32>(m, i), S::splat(factors.beta1));
        let moment = S::mul_add(g, S::splat(factors.rest1), old);
        let old = S::mul(read::<S, f32>(v, i), S::splat(factors.beta2));
        let square = S::mul_add(S::mul(g, g), S::splat(factors.rest2), old);
        write::<S, f32>(m, i, moment);
        write::<S, f32>(v, i, square);
        (moment, square)
    }
}

/// m̂/(√v̂ + ε) + decay·p.
#[inline(always)]
unsafe fn direction<S: Simd>(factors: &Factors, p: S::V, moment: S::V, square: S::V) -> S::V {
    // SAFETY: as for the callers.
    unsafe {
        let root = S::mul_add(S::sqrt(square), S::splat(factors.correct_root), S::splat(factors.epsilon));
        let step = S::div(S::mul(moment, S::splat(factors.correct_m)), root);
        S::mul_add(p, S::splat(factors.decay), step)
    }
}
