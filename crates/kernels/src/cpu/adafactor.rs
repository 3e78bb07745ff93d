//! Adafactor (Shazeer and Stern 2018) over flat buffers: of a matrix's second moment only the means of its rows and of its columns are
//! kept, of smaller tensors all of it, and no first moment. The bf16 copy that the model computes with is refreshed in the same pass.
//!
//! As `Adafactor` of `transformers` without a first moment and with a given learning rate. There every matrix is divided into rows and
//! columns; T5's own code keeps the whole moment where a side is below 128, which is [`Rule::min_side`].
//!
//! Legend: R rows and C columns of a matrix.

use std::ops::Range;

use half::bf16;

use super::optimizer::Segment;
use super::scratch::{self, Purpose};
use super::simd::{Simd, read, write};
use super::{Cpu, SharedMut};

/// Added to squared gradients, so that a moment is never 0.
pub const LEAST_SQUARE: f64 = 1e-30;

/// The definition, in f64.
pub mod reference {
    use super::{LEAST_SQUARE, Moment, Rule, Settings, Tensor};

    fn mean(numbers: impl ExactSizeIterator<Item = f64>) -> f64 {
        let count = numbers.len() as f64;
        numbers.sum::<f64>() / count
    }

    /// One step: row and column means or the whole moment, the direction, its clipping, the step.
    pub fn adafactor(
        p: &mut [f64],
        g: &[f64],
        state: &mut [f64],
        tensors: &[Tensor],
        rule: &Rule,
        settings: &Settings,
    ) {
        let beta = rule.beta(settings.step);
        for tensor in tensors.iter().filter(|tensor| tensor.segment.len > 0) {
            let all = tensor.segment.start..tensor.segment.start + tensor.segment.len;
            let p = &mut p[all.clone()];
            let g: Vec<f64> = g[all].iter().map(|g| g * settings.gradient_scale).collect();
            let squares: Vec<f64> = g.iter().map(|g| g * g + LEAST_SQUARE).collect();
            let keep = |old: &mut f64, new: f64| *old = beta * *old + (1.0 - beta) * new;
            let mut u: Vec<f64> = match tensor.moment {
                Moment::Factored { rows, columns } => {
                    let (of_rows, of_columns) = state[tensor.state..][..rows + columns].split_at_mut(rows);
                    for (i, row) in of_rows.iter_mut().enumerate() {
                        keep(row, mean(squares[i * columns..][..columns].iter().copied()));
                    }
                    for (j, column) in of_columns.iter_mut().enumerate() {
                        keep(column, mean((0..rows).map(|i| squares[i * columns + j])));
                    }
                    let all_rows = mean(of_rows.iter().copied());
                    (0..g.len())
                        .map(|i| g[i] / (of_rows[i / columns] / all_rows).sqrt() / of_columns[i % columns].sqrt())
                        .collect()
                }
                Moment::Whole => {
                    let v = &mut state[tensor.state..][..g.len()];
                    v.iter_mut().zip(&squares).for_each(|(v, square)| keep(v, *square));
                    g.iter().zip(v).map(|(g, v)| g / v.sqrt()).collect()
                }
            };
            let rms = |x: &[f64]| mean(x.iter().map(|x| x * x)).sqrt();
            let clip = (rms(&u) / rule.clip).max(1.0);
            let scale = if rule.scale_parameter { rms(p).max(rule.least_scale) } else { 1.0 };
            let rate = settings.learning_rate * f64::from(tensor.segment.rate) * scale;
            u.iter_mut().for_each(|u| *u *= rate / clip);
            let decay = if tensor.segment.decay { settings.weight_decay * rate } else { 0.0 };
            p.iter_mut().zip(u).for_each(|(p, u)| *p -= decay * *p + u);
        }
    }
}

/// What is fixed over a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rule {
    /// Both sides of a matrix must be so long for its moment to be divided into rows and columns: 128 in T5's code, 1 in `transformers`.
    pub min_side: usize,
    /// β₂ of step t is 1 − t to the power of minus this.
    pub decay_rate: f64,
    /// An update whose root mean square is above this is scaled down to it.
    pub clip: f64,
    /// Whether steps are multiplied by the root mean square of a tensor's numbers.
    pub scale_parameter: bool,
    /// The least that they are multiplied by then.
    pub least_scale: f64,
}

impl Default for Rule {
    /// Those of the paper and of T5.
    fn default() -> Self {
        Self { min_side: 128, decay_rate: 0.8, clip: 1.0, scale_parameter: true, least_scale: 1e-3 }
    }
}

impl Rule {
    /// What is kept of a tensor's moment, given the sides of a matrix.
    pub fn moment(&self, sides: Option<[usize; 2]>) -> Moment {
        match sides {
            Some([rows, columns]) if rows.min(columns) >= self.min_side.max(1) => Moment::Factored { rows, columns },
            _ => Moment::Whole,
        }
    }

    /// β₂ of a step, counted from 1.
    pub fn beta(&self, step: u64) -> f64 {
        1.0 - (step as f64).powf(-self.decay_rate)
    }
}

/// What a step is made with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// Of this step.
    pub learning_rate: f64,
    /// Its number, counted from 1.
    pub step: u64,
    /// Decay per unit of learning rate.
    pub weight_decay: f64,
    /// What gradients are multiplied by before use.
    pub gradient_scale: f64,
}

/// What is kept of a tensor's second moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// Means of rows, then means of columns.
    Factored {
        /// R.
        rows: usize,
        /// C.
        columns: usize,
    },
    /// A number for each.
    Whole,
}

impl Moment {
    /// Numbers that are kept of a tensor of so many.
    pub fn kept(self, len: usize) -> usize {
        match self {
            Self::Factored { rows, columns } => rows + columns,
            Self::Whole => len,
        }
    }
}

/// A tensor, and where its state lies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tensor {
    /// Its part of parameters and gradients.
    pub segment: Segment,
    /// What is kept.
    pub moment: Moment,
    /// Where that begins in the state.
    pub state: usize,
}

/// How the work on a set of tensors is divided. Built once; a step then allocates nothing.
#[derive(Clone, Debug)]
pub struct Plan {
    rule: Rule,
    tensors: Vec<Tensor>,
    parts: Vec<Parts>,
    chunks: Vec<Chunk>,
    stripes: Vec<Stripe>,
    /// Elements of parameters, and of the state.
    len: usize,
    state: usize,
    /// Columns of all matrices that are divided.
    columns: usize,
}

/// The parts of a tensor.
#[derive(Clone, Debug)]
struct Parts {
    chunks: Range<usize>,
    /// Where its first column stands among those of all.
    columns: usize,
}

/// A part of one tensor, of whole rows where it is divided: a task.
#[derive(Clone, Copy, Debug)]
struct Chunk {
    tensor: usize,
    /// Counted from the tensor's first element.
    start: usize,
    len: usize,
}

/// Columns of one tensor: a task.
#[derive(Clone, Copy, Debug)]
struct Stripe {
    tensor: usize,
    start: usize,
    len: usize,
}

/// Elements of a chunk, about.
const CHUNK: usize = 16384;

/// Columns of a stripe: two cache lines of every row.
const STRIPE: usize = 32;

impl Plan {
    /// A plan for tensors with their rows and columns, where they are matrices, in buffers of `len` elements.
    ///
    /// Panics when segments overlap or end outside of the buffers.
    pub fn new(rule: Rule, segments: &[(Segment, Option<[usize; 2]>)], len: usize) -> Self {
        let mut order: Vec<(usize, usize)> = segments.iter().map(|(s, _)| (s.start, s.start + s.len)).collect();
        order.sort_unstable();
        assert!(order.windows(2).all(|w| w[0].1 <= w[1].0), "adafactor: segments overlap");
        assert!(order.iter().all(|(_, end)| *end <= len), "adafactor: a segment ends outside of {len}");
        let (tensors, parts, chunks, stripes) = (vec![], vec![], vec![], vec![]);
        let mut plan = Self { rule, tensors, parts, chunks, stripes, len, state: 0, columns: 0 };
        for (number, (segment, sides)) in segments.iter().enumerate() {
            let moment = rule.moment(*sides);
            let width = match moment {
                Moment::Factored { rows, columns } => {
                    assert_eq!(rows * columns, segment.len, "adafactor: a matrix of {rows}×{columns}");
                    columns
                }
                Moment::Whole => 1,
            };
            let step = (CHUNK / width).max(1) * width;
            let starts = (0..segment.len).step_by(step);
            let chunk = |start: usize| Chunk { tensor: number, start, len: step.min(segment.len - start) };
            let first = plan.chunks.len();
            plan.chunks.extend(starts.map(chunk));
            plan.parts.push(Parts { chunks: first..plan.chunks.len(), columns: plan.columns });
            if let Moment::Factored { columns, .. } = moment {
                let starts = (0..columns).step_by(STRIPE);
                let stripe = |start: usize| Stripe { tensor: number, start, len: STRIPE.min(columns - start) };
                plan.stripes.extend(starts.map(stripe));
                plan.columns += columns;
            }
            plan.tensors.push(Tensor { segment: *segment, moment, state: plan.state });
            plan.state += moment.kept(segment.len);
        }
        plan
    }

    /// What is fixed over a run.
    pub fn rule(&self) -> &Rule {
        &self.rule
    }

    /// Elements of the buffers.
    #[allow(clippy::len_without_is_empty, reason = "a plan is no collection")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The tensors, in the order that they were given in.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// Elements of the state.
    pub fn state_len(&self) -> usize {
        self.state
    }
}

/// Sums over each chunk: Σu² and Σp².
const SUMS: usize = 2;

/// The buffers of a step, shared by its tasks.
struct Buffers<'a> {
    p: SharedMut<f32>,
    g: &'a [f32],
    state: SharedMut<f32>,
    copy: Option<SharedMut<bf16>>,
    /// 1/√ of the columns' means.
    roots: SharedMut<f32>,
    /// Of each chunk.
    sums: SharedMut<f64>,
    /// The mean over the rows of each matrix that is divided.
    means: SharedMut<f64>,
    /// What the last pass multiplies with, of each tensor.
    rates: SharedMut<f64>,
}

/// One step over all tensors of the plan; `copy`, where given, gets the new parameters in bf16.
pub fn adafactor(
    cpu: &Cpu,
    plan: &Plan,
    parameters: &mut [f32],
    gradients: &[f32],
    state: &mut [f32],
    settings: &Settings,
    copy: Option<&mut [bf16]>,
) {
    let lengths = [parameters.len(), gradients.len(), copy.as_ref().map_or(plan.len, |c| c.len())];
    assert!(lengths == [plan.len; 3], "adafactor: lengths {lengths:?} for a plan of {}", plan.len);
    assert_eq!(state.len(), plan.state, "adafactor: the state's length");
    let (chunks, tensors) = (plan.chunks.len(), plan.tensors.len());
    scratch::with(Purpose::Outer, plan.columns, |roots: &mut [f32]| {
        scratch::with(Purpose::Kernel, SUMS * chunks + 3 * tensors, |space: &mut [f64]| {
            let (sums, rest) = space.split_at_mut(SUMS * chunks);
            let (means, rates) = rest.split_at_mut(tensors);
            let buffers = Buffers {
                p: SharedMut::new(parameters),
                g: gradients,
                state: SharedMut::new(state),
                copy: copy.map(SharedMut::new),
                roots: SharedMut::new(roots),
                sums: SharedMut::new(sums),
                means: SharedMut::new(means),
                rates: SharedMut::new(rates),
            };
            buffers.steps(cpu, plan, settings);
        });
    });
}

impl Buffers<'_> {
    /// Passes over all tensors, each of which needs what the one before gave.
    fn steps(&self, cpu: &Cpu, plan: &Plan, settings: &Settings) {
        let beta = plan.rule.beta(settings.step);
        let keep = Keep { beta: beta as f32, rest: (1.0 - beta) as f32, scale: settings.gradient_scale as f32 };
        cpu.for_each(plan.chunks.len(), |i| self.moments(cpu, plan, i, keep));
        cpu.for_each(plan.stripes.len(), |i| self.columns(cpu, plan, i, keep));
        cpu.for_each(plan.tensors.len(), |i| self.mean(plan, i));
        cpu.for_each(plan.chunks.len(), |i| self.update(cpu, plan, i, keep));
        cpu.for_each(plan.tensors.len(), |i| self.rates(plan, i, settings));
        cpu.for_each(plan.chunks.len(), |i| self.apply(cpu, plan, i, keep));
    }

    /// The means of a chunk's rows or its whole moment, and Σp²; of the latter Σu², too.
    fn moments(&self, cpu: &Cpu, plan: &Plan, i: usize, keep: Keep) {
        let (Chunk { start, len, tensor }, isa) = (plan.chunks[i], cpu.isa());
        let tensor = &plan.tensors[tensor];
        let place = tensor.segment.start + start;
        let g = &self.g[place..place + len];
        // SAFETY: chunks are disjoint, since segments are: so are their rows, their numbers and their sums. Parameters are only read
        // in this pass.
        unsafe {
            let sums = self.sums.slice(SUMS * i, SUMS);
            sums[1] = sum_of_squares(isa, self.p.slice(place, len));
            match tensor.moment {
                Moment::Factored { columns, .. } => {
                    let rows = self.state.slice(tensor.state + start / columns, len / columns);
                    for (row, g) in rows.iter_mut().zip(g.chunks_exact(columns)) {
                        let scale = f64::from(keep.scale);
                        let mean = sum_of_squares(isa, g) * scale * scale / columns as f64 + LEAST_SQUARE;
                        *row = keep.beta.mul_add(*row, keep.rest * mean as f32);
                    }
                }
                Moment::Whole => sums[0] = whole_moment(isa, keep, g, self.state.slice(tensor.state + start, len)),
            }
        }
    }

    /// The means of a stripe's columns, and one over their roots.
    fn columns(&self, cpu: &Cpu, plan: &Plan, i: usize, keep: Keep) {
        let Stripe { tensor, start, len } = plan.stripes[i];
        let base = plan.parts[tensor].columns;
        let tensor = &plan.tensors[tensor];
        let Moment::Factored { rows, columns } = tensor.moment else { return };
        let g = &self.g[tensor.segment.start..tensor.segment.start + rows * columns];
        let mut sums = [0.0; STRIPE];
        // A sum of thousands of f32 loses bits: blocks of rows are added in f64.
        for first in (0..rows).step_by(ROWS) {
            let block = &g[first * columns..rows.min(first + ROWS) * columns];
            let mut parts = [0.0; STRIPE];
            column_sums(cpu.isa(), block, columns, start, &mut parts[..len]);
            sums.iter_mut().zip(parts).for_each(|(sum, part)| *sum += f64::from(part));
        }
        let scale = f64::from(keep.scale);
        // SAFETY: stripes are disjoint.
        unsafe {
            let means = self.state.slice(tensor.state + rows + start, len);
            let roots = self.roots.slice(base + start, len);
            for ((mean, root), sum) in means.iter_mut().zip(roots).zip(sums) {
                let new = sum * scale * scale / rows as f64 + LEAST_SQUARE;
                *mean = keep.beta.mul_add(*mean, keep.rest * new as f32);
                *root = (1.0 / f64::from(*mean).sqrt()) as f32;
            }
        }
    }

    /// The mean of a matrix over its rows' means.
    fn mean(&self, plan: &Plan, i: usize) {
        let tensor = &plan.tensors[i];
        let Moment::Factored { rows, .. } = tensor.moment else { return };
        // SAFETY: each tensor has its own; rows are only read in this pass.
        unsafe {
            let sum: f64 = self.state.slice(tensor.state, rows).iter().map(|row| f64::from(*row)).sum();
            self.means.slice(i, 1)[0] = sum / rows as f64;
        }
    }

    /// Σu² of a chunk of a matrix that is divided.
    fn update(&self, cpu: &Cpu, plan: &Plan, i: usize, keep: Keep) {
        let Chunk { start, len, tensor } = plan.chunks[i];
        let Moment::Factored { columns, .. } = plan.tensors[tensor].moment else { return };
        let place = plan.tensors[tensor].segment.start + start;
        let (roots, mut sum) = (self.roots_of(plan, tensor, columns), 0.0);
        for (row, g) in self.g[place..place + len].chunks_exact(columns).enumerate() {
            let factor = self.row_factor(plan, tensor, start / columns + row, keep);
            sum += sum_of_products(cpu.isa(), factor, g, roots);
        }
        // SAFETY: each chunk has its own sums.
        unsafe { self.sums.slice(SUMS * i, SUMS)[0] = sum };
    }

    /// The rate of a tensor, and what decay leaves of its numbers.
    fn rates(&self, plan: &Plan, i: usize, settings: &Settings) {
        let (tensor, chunks) = (&plan.tensors[i], &plan.parts[i].chunks);
        // SAFETY: sums were written in passes before; each tensor has its own rates.
        unsafe {
            let [mut u, mut p] = [0.0; 2];
            for sums in self.sums.shared(SUMS * chunks.start, SUMS * chunks.len()).chunks_exact(SUMS) {
                (u, p) = (u + sums[0], p + sums[1]);
            }
            let rms = |sum: f64| (sum / tensor.segment.len.max(1) as f64).sqrt();
            let scale = if plan.rule.scale_parameter { rms(p).max(plan.rule.least_scale) } else { 1.0 };
            let rate = settings.learning_rate * f64::from(tensor.segment.rate) * scale;
            let decay = if tensor.segment.decay { settings.weight_decay * rate } else { 0.0 };
            self.rates.slice(2 * i, 2).copy_from_slice(&[rate / (rms(u) / plan.rule.clip).max(1.0), 1.0 - decay]);
        }
    }

    /// The step of a chunk.
    fn apply(&self, cpu: &Cpu, plan: &Plan, i: usize, keep: Keep) {
        let (Chunk { start, len, tensor: number }, isa) = (plan.chunks[i], cpu.isa());
        let tensor = &plan.tensors[number];
        let place = tensor.segment.start + start;
        // SAFETY: what other passes wrote is only read in this one; chunks are disjoint.
        unsafe {
            let rates = self.rates.shared(2 * number, 2);
            let step = Step { rate: rates[0] as f32, stays: rates[1] as f32, scale: keep.scale };
            let (p, g) = (self.p.slice(place, len), &self.g[place..place + len]);
            let mut copy = self.copy.as_ref().map(|copy| copy.slice(place, len));
            match tensor.moment {
                Moment::Whole => {
                    let moment = self.state.shared(tensor.state + start, len);
                    step_of_moment(isa, step, p, g, moment, copy);
                }
                Moment::Factored { columns, .. } => {
                    let roots = self.roots_of(plan, number, columns);
                    for (row, p) in p.chunks_exact_mut(columns).enumerate() {
                        let g = &g[row * columns..][..columns];
                        let factor = self.row_factor(plan, number, start / columns + row, keep);
                        let copy = copy.as_deref_mut().map(|copy| &mut copy[row * columns..][..columns]);
                        step_of_row(isa, step, factor, p, g, roots, copy);
                    }
                }
            }
        }
    }

    /// What a row's gradients are multiplied by, beside the columns' roots: 1/√(row/mean), and the scale.
    fn row_factor(&self, plan: &Plan, tensor: usize, row: usize, keep: Keep) -> f32 {
        // SAFETY: both were written in passes before, and are only read in this one.
        let (mean, row) = unsafe {
            (self.means.shared(tensor, 1)[0], f64::from(self.state.shared(plan.tensors[tensor].state + row, 1)[0]))
        };
        ((mean / row).sqrt() * f64::from(keep.scale)) as f32
    }

    /// The columns' roots of a matrix.
    fn roots_of(&self, plan: &Plan, tensor: usize, columns: usize) -> &[f32] {
        // SAFETY: written in a pass before, and only read in this one.
        unsafe { self.roots.shared(plan.parts[tensor].columns, columns) }
    }
}

/// Rows whose squares are added in f32.
const ROWS: usize = 256;

/// How a moment goes on, and the factor of gradients.
#[derive(Clone, Copy)]
struct Keep {
    beta: f32,
    rest: f32,
    scale: f32,
}

/// What the last pass multiplies with.
#[derive(Clone, Copy)]
struct Step {
    rate: f32,
    /// What decay leaves of a number.
    stays: f32,
    scale: f32,
}

dispatch! {
    fn sum_of_squares(x: &[f32]) -> f64 = squares_body
}
dispatch! {
    fn whole_moment(keep: Keep, g: &[f32], v: &mut [f32]) -> f64 = whole_body
}
dispatch! {
    fn column_sums(block: &[f32], columns: usize, start: usize, sums: &mut [f32]) = columns_body
}
dispatch! {
    fn sum_of_products(factor: f32, g: &[f32], roots: &[f32]) -> f64 = products_body
}
dispatch! {
    fn step_of_moment(step: Step, p: &mut [f32], g: &[f32], v: &[f32], copy: Option<&mut [bf16]>) = moment_body
}
dispatch! {
    fn step_of_row(step: Step, factor: f32, p: &mut [f32], g: &[f32], roots: &[f32], copy: Option<&mut [bf16]>) = row_body
}

/// Elements whose squares are added in f32.
const PART: usize = 4096;

/// # Safety
/// The instruction set must be there.
#[inline(always)]
unsafe fn squares_body<S: Simd>(x: &[f32]) -> f64 {
    let mut total = 0.0;
    for part in x.chunks(PART) {
        // SAFETY: i is below the length; beyond it zeros are read.
        total += unsafe {
            let mut sum = S::splat(0.0);
            for i in (0..part.len()).step_by(S::LANES) {
                let x = read::<S, f32>(part, i);
                sum = S::mul_add(x, x, sum);
            }
            f64::from(S::sum(sum))
        };
    }
    total
}

/// v = βv + (1 − β)(g² + 10⁻³⁰); gives Σg²/v.
///
/// # Safety
/// The instruction set must be there; both slices have one length.
#[inline(always)]
unsafe fn whole_body<S: Simd>(keep: Keep, g: &[f32], v: &mut [f32]) -> f64 {
    let mut total = 0.0;
    for (g, v) in g.chunks(PART).zip(v.chunks_mut(PART)) {
        // SAFETY: i is below the length. Beyond it g and v are read as 0, and the new moment is above 0 as long as 1 − β is.
        total += unsafe {
            let mut sum = S::splat(0.0);
            for i in (0..g.len()).step_by(S::LANES) {
                let g = S::mul(read::<S, f32>(g, i), S::splat(keep.scale));
                let square = S::mul_add(g, g, S::splat(LEAST_SQUARE as f32));
                let new = S::mul_add(read::<S, f32>(v, i), S::splat(keep.beta), S::mul(square, S::splat(keep.rest)));
                write::<S, f32>(v, i, new);
                sum = S::add(sum, S::div(S::mul(g, g), new));
            }
            f64::from(S::sum(sum))
        };
    }
    total
}

/// Σg² of some columns over a block of rows.
///
/// # Safety
/// The instruction set must be there; the block has whole rows, and the columns are in them.
#[inline(always)]
unsafe fn columns_body<S: Simd>(block: &[f32], columns: usize, start: usize, sums: &mut [f32]) {
    for first in (0..sums.len()).step_by(S::LANES) {
        // SAFETY: the columns are in the row.
        unsafe {
            let mut sum = S::splat(0.0);
            for row in block.chunks_exact(columns) {
                let g = read::<S, f32>(&row[start..start + sums.len()], first);
                sum = S::mul_add(g, g, sum);
            }
            write::<S, f32>(sums, first, sum);
        }
    }
}

/// Σ(factor·g·root)².
///
/// # Safety
/// The instruction set must be there; both slices have one length.
#[inline(always)]
unsafe fn products_body<S: Simd>(factor: f32, g: &[f32], roots: &[f32]) -> f64 {
    let mut total = 0.0;
    for (g, roots) in g.chunks(PART).zip(roots.chunks(PART)) {
        // SAFETY: i is below the length; beyond it zeros are read.
        total += unsafe {
            let mut sum = S::splat(0.0);
            for i in (0..g.len()).step_by(S::LANES) {
                let u = S::mul(S::mul(read::<S, f32>(g, i), S::splat(factor)), read::<S, f32>(roots, i));
                sum = S::mul_add(u, u, sum);
            }
            f64::from(S::sum(sum))
        };
    }
    total
}

/// p = stays·p − rate·g/√v.
///
/// # Safety
/// The instruction set must be there; all slices have one length.
#[inline(always)]
unsafe fn moment_body<S: Simd>(step: Step, p: &mut [f32], g: &[f32], v: &[f32], mut copy: Option<&mut [bf16]>) {
    for i in (0..p.len()).step_by(S::LANES) {
        // SAFETY: i is below the length; what is computed beyond it is not stored.
        unsafe {
            let g = S::mul(read::<S, f32>(g, i), S::splat(step.scale));
            let u = S::div(g, S::sqrt(read::<S, f32>(v, i)));
            let old = S::mul(read::<S, f32>(p, i), S::splat(step.stays));
            let new = S::mul_add(u, S::splat(-step.rate), old);
            write::<S, f32>(p, i, new);
            if let Some(copy) = copy.as_deref_mut() {
                write::<S, bf16>(copy, i, new);
            }
        }
    }
}

/// p = stays·p − rate·factor·g·root, over a row.
///
/// # Safety
/// As for `moment_body`.
#[inline(always)]
unsafe fn row_body<S: Simd>(
    step: Step,
    factor: f32,
    p: &mut [f32],
    g: &[f32],
    roots: &[f32],
    mut copy: Option<&mut [bf16]>,
) {
    for i in (0..p.len()).step_by(S::LANES) {
        // SAFETY: i is below the length.
        unsafe {
            let u = S::mul(S::mul(read::<S, f32>(g, i), S::splat(factor)), read::<S, f32>(roots, i));
            let old = S::mul(read::<S, f32>(p, i), S::splat(step.stays));
            let new = S::mul_add(u, S::splat(-step.rate), old);
            write::<S, f32>(p, i, new);
            if let Some(copy) = copy.as_deref_mut() {
                write::<S, bf16>(copy, i, new);
            }
        }
    }
}
