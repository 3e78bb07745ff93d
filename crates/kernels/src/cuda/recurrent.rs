//! Recurrent layers over flat tokens, all directions of a layer at once, forward and backward. The definition is
//! [`crate::cpu::recurrent`].
//!
//! Legend: B sequences, T tokens (those that fill a batch up among them); C units of a layer, P numbers of its state (C, or fewer where
//! it is projected), G gates, D directions.
//!
//! What tokens say to the gates is a product outside of here, and so are its gradients. A step is one product of the states of all
//! sequences and directions with the recurrent weights, and one kernel for all that happens to a row between two products; an LSTM
//! that is projected has another pair. Gradients of weights are one product over all tokens at the end.
//!
//! Sequences are rows, the longest first, so that those that still run are the first rows. How many these are at a step is only
//! bounded here ([`Steps`]): a graph is played with other batches than it was recorded with, and kernels find in device memory whether
//! a row runs.

use super::compile::Source;
use super::error::Result;
use super::gpu::{Argument, DType, Gpu, Launch, Purpose, STORES, View, address, store};
use super::matmul::{Batch, Finish, Matrix, products};
use super::reduce::{self, Sum};
use crate::cpu::recurrent::{Cell, Scan};

/// All of them.
pub static SOURCE: Source =
    Source { name: "recurrent.cu", text: include_str!("kernels/recurrent.cu"), variants: &[&[STORES]] };

/// How many numbers of rows steps may have: all, half, a quarter and an eighth. Fewer are hardly faster, and each number is one more
/// that recorded passes can differ in.
const LEVELS: usize = 4;

/// How many steps a scan takes with how many rows: bounds for all batches that it may be played with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Steps {
    sequences: usize,
    /// Until which step all rows count, half of them, a quarter, and so on; the last: all steps.
    ends: [usize; LEVELS],
}

impl Steps {
    /// What a batch needs: `offsets` says where each sequence begins, and the end of the last; `order` has the longest first.
    pub fn of(offsets: &[u32], order: &[u32]) -> Self {
        let sequences = order.len();
        let length = |i: u32| (offsets[i as usize + 1] - offsets[i as usize]) as usize;
        // A level lasts as long as more sequences run than the next one has rows.
        let next = |level: usize| if level + 1 < LEVELS { rows(sequences, level + 1) } else { 0 };
        let ends = std::array::from_fn(|level| order.get(next(level)).map_or(0, |i| length(*i)));
        // With few sequences, a level has as many rows as the next.
        let mut steps = Self { sequences, ends };
        (1..LEVELS).for_each(|level| steps.ends[level] = steps.ends[level].max(steps.ends[level - 1]));
        steps
    }

    /// Bounds for both, with some to spare where they had to grow, so that they seldom have to again.
    pub fn grown_for(self, needed: Self) -> Self {
        assert!(self.sequences == needed.sequences, "recurrent: bounds for other sequences");
        let grown = |have: usize, need: usize| {
            if need <= have { have } else { need.next_multiple_of((need.next_power_of_two() / 8).max(4)) }
        };
        Self { ends: std::array::from_fn(|level| grown(self.ends[level], needed.ends[level])), ..self }
    }

    /// The numbers that tell bounds apart.
    pub fn numbers(self) -> [usize; LEVELS] {
        self.ends
    }

    /// All steps.
    pub fn count(self) -> usize {
        self.ends[LEVELS - 1]
    }

    /// Rows of a step.
    fn rows(self, step: usize) -> usize {
        rows(self.sequences, self.ends.iter().position(|end| step < *end).unwrap_or(LEVELS - 1))
    }

    /// None at all, of so many sequences.
    pub fn none(sequences: usize) -> Self {
        Self { sequences, ends: [0; LEVELS] }
    }
}

fn rows(sequences: usize, level: usize) -> usize {
    sequences.div_ceil(1 << level)
}

/// Sequences of tokens, in device memory.
#[derive(Clone, Copy, Debug)]
pub struct Sequences<'a> {
    /// B + 1: where each begins, and the end of the last; each has a token at least.
    pub offsets: View<'a>,
    /// B: the longest first.
    pub order: View<'a>,
    /// How many steps are taken, at least as many as there are tokens in the longest.
    pub steps: Steps,
    /// T.
    pub tokens: usize,
}

/// A state for each sequence and direction, first those of the first direction.
#[derive(Clone, Copy, Debug)]
pub struct State<'a> {
    /// D·B×P.
    pub hidden: View<'a>,
    /// D·B×C, of an LSTM.
    pub cell: Option<View<'a>>,
}

/// A layer: what it is, what it multiplies with, and what it begins with.
#[derive(Clone, Copy, Debug)]
pub struct Layer<'a> {
    /// What each direction is, but for which way it reads.
    pub scan: Scan,
    /// Of each direction, whether it begins at the ends.
    pub reverse: &'a [bool],
    /// What it reads.
    pub sequences: Sequences<'a>,
    /// D·G·C×P.
    pub recurrent: View<'a>,
    /// D·G·C, in f32.
    pub bias: Option<View<'a>>,
    /// D·P×C, where there is a projection.
    pub projection: Option<View<'a>>,
    /// The states before each sequence's first; none: zeros.
    pub initial: Option<State<'a>>,
}

/// `struct Scan` of recurrent.cu: addresses, or 0, and sizes.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct Arguments {
    offsets: u64,
    order: u64,
    gates: u64,
    aside: u64,
    sums: u64,
    bias: u64,
    initial_states: u64,
    initial_cells: u64,
    states: u64,
    cells: u64,
    inner: u64,
    out: u64,
    last_states: u64,
    last_cells: u64,
    dout: u64,
    dstates: u64,
    dcells: u64,
    dinner: u64,
    dprojected: u64,
    dprojections: u64,
    dsums: u64,
    all_dsums: u64,
    before: u64,
    sequences: u32,
    tokens: u32,
    hidden: u32,
    width: u32,
    directions: u32,
    reverse: u32,
    rows: u32,
    step: u32,
    relu: u32,
    clip_cell: f32,
    clip_projection: f32,
}

// SAFETY: `struct Scan` has the same fields in the same order.
unsafe impl Argument for Arguments {}

/// Threads of a block, one for each column of a row.
const THREADS: usize = 128;

impl Layer<'_> {
    fn directions(&self) -> usize {
        self.reverse.len()
    }

    fn count(&self) -> usize {
        self.sequences.order.len()
    }

    fn has_cells(&self) -> bool {
        self.scan.cell == Cell::Lstm
    }

    /// Checks all that both ways share, and gives what kernels take of it.
    fn arguments(&self, gates: View<'_>, aside: Option<View<'_>>, out: View<'_>) -> Arguments {
        let Self { scan, sequences, .. } = self;
        let (d, b, t, c, p, width) =
            (self.directions(), self.count(), sequences.tokens, scan.hidden, scan.width(), scan.gates());
        let dtype = out.dtype();
        assert!(c > 0 && p > 0 && (1..=2).contains(&d), "recurrent: a layer without units or directions");
        assert!(scan.projection.is_none() || self.has_cells(), "recurrent: only an LSTM is projected");
        assert!(sequences.steps.sequences == b, "recurrent: steps of other sequences");
        assert!(d * t <= u32::MAX as usize && t <= u32::MAX as usize, "recurrent: too many tokens");
        sequences.offsets.expect("recurrent", "the offsets", b + 1, DType::U32);
        sequences.order.expect("recurrent", "the order", b, DType::U32);
        gates.expect("recurrent", "the gates", t * d * width, dtype);
        out.expect("recurrent", "the states", t * d * p, dtype);
        self.recurrent.expect("recurrent", "the weight", d * width * p, dtype);
        if let Some(aside) = aside {
            aside.expect("recurrent", "what is kept aside", d * t * scan.aside(), dtype);
        }
        if let Some(bias) = self.bias {
            bias.expect("recurrent", "the bias", d * width, DType::F32);
        }
        assert!(self.projection.is_some() == scan.projection.is_some(), "recurrent: a projection without its matrix");
        if let Some(projection) = self.projection {
            projection.expect("recurrent", "the projection", d * p * c, dtype);
        }
        self.check_state("the first states", self.initial, dtype);
        Arguments {
            offsets: sequences.offsets.address(),
            order: sequences.order.address(),
            gates: gates.address(),
            aside: address(aside.filter(|aside| !aside.is_empty())),
            bias: address(self.bias),
            initial_states: address(self.initial.map(|state| state.hidden)),
            initial_cells: address(self.initial.and_then(|state| state.cell)),
            out: out.address(),
            sequences: b as u32,
            tokens: t as u32,
            hidden: c as u32,
            width: p as u32,
            directions: d as u32,
            reverse: self.reverse.iter().enumerate().map(|(i, reverse)| u32::from(*reverse) << i).sum(),
            relu: u32::from(scan.cell == Cell::Relu),
            clip_cell: scan.clip_cell,
            clip_projection: scan.clip_projection,
            ..Arguments::default()
        }
    }

    fn check_state(&self, what: &str, state: Option<State<'_>>, dtype: DType) {
        let Some(State { hidden, cell }) = state else { return };
        let rows = self.directions() * self.count();
        hidden.expect("recurrent", what, rows * self.scan.width(), dtype);
        assert!(cell.is_some() == self.has_cells(), "recurrent: {what} and cells do not belong together");
        if let Some(cell) = cell {
            cell.expect("recurrent", what, rows * self.scan.hidden, dtype);
        }
    }

    /// A thread for each of so many columns of so many rows, and each direction.
    fn launch(&self, rows: usize, columns: usize) -> Launch {
        let blocks = (rows * columns).div_ceil(THREADS);
        Launch { grid: (blocks as u32, self.directions() as u32), threads: THREADS as u32, shared: 0 }
    }

    /// One product of work space with a weight for each direction: rows×k times k×n.
    fn multiply(
        &self,
        gpu: &Gpu,
        rows: usize,
        (a, k): (View<'_>, usize),
        weight: Matrix<'_>,
        (out, n): (View<'_>, usize),
        accumulate: bool,
    ) -> Result<()> {
        let (d, b) = (self.directions(), self.count());
        let batch = Batch { count: d, steps: [b * k, k * n, b * n] };
        let (a, out) = (Matrix::new(a, rows, k), Matrix::new(out, rows, n));
        products(gpu, batch, a, weight, out, Finish { accumulate, ..Finish::default() })
    }
}

/// Work space, given out part by part.
struct Space(u64);

impl Space {
    fn new(gpu: &Gpu, parts: &[(usize, DType)]) -> Result<Self> {
        let bytes = parts.iter().map(|(len, dtype)| (len * dtype.size()).next_multiple_of(256)).sum::<usize>();
        Ok(Self(gpu.scratch(Purpose::Recurrent, bytes)?))
    }

    fn take<'a>(&mut self, (len, dtype): (usize, DType)) -> View<'a> {
        let at = self.0;
        self.0 += (len * dtype.size()).next_multiple_of(256) as u64;
        // SAFETY: within the work space, which the GPU keeps, and at a multiple of 256 bytes; `new` counted the part.
        unsafe { View::new(at, len, dtype) }
    }
}

/// The states of all tokens (`out`, T×D·P). `gates` (T×D·G·C) has what tokens say, and gets the gates; `aside` (D×T×[`Scan::aside`]) is
/// given where a backward follows; `last` gets the states after each sequence's last token. What fills a batch up gets zeros.
pub fn forward(
    gpu: &Gpu,
    layer: &Layer<'_>,
    gates: View<'_>,
    aside: Option<View<'_>>,
    out: View<'_>,
    last: Option<State<'_>>,
) -> Result<()> {
    let (scan, dtype, steps) = (&layer.scan, out.dtype(), layer.sequences.steps);
    let (d, b, c, p, width) = (layer.directions(), layer.count(), scan.hidden, scan.width(), scan.gates());
    let mut now = layer.arguments(gates, aside, out);
    layer.check_state("the last states", last, dtype);
    let parts = [(d * b * p, dtype), (d * b * c, DType::F32), (d * b * width, DType::F32), (d * b * c, dtype)];
    let mut space = Space::new(gpu, &parts)?;
    let [states, cells, sums, inner] = parts.map(|part| space.take(part));
    (now.states, now.cells) = (states.address(), cells.address());
    now.inner = if layer.projection.is_some() { inner.address() } else { 0 };
    (now.last_states, now.last_cells) =
        (address(last.map(|last| last.hidden)), address(last.and_then(|last| last.cell)));
    let variant = [store(dtype)];
    clear(gpu, layer, out, d * p)?;
    if let Some(initial) = layer.initial {
        let columns = p + if initial.cell.is_some() { c } else { 0 };
        // SAFETY: all that the arguments name was checked or has been taken for it.
        unsafe { gpu.launch(&SOURCE, &variant, "start_states", layer.launch(b, columns), &[&now])? };
    }
    let kernel = match scan.cell {
        Cell::Lstm => "lstm_forward",
        Cell::Gru => "gru_forward",
        Cell::Tanh | Cell::Relu => "plain_forward",
    };
    let recurrent = Matrix::new(layer.recurrent, width, p).transposed();
    for step in 0..steps.count() {
        let rows = steps.rows(step);
        (now.rows, now.step, now.sums) = (rows as u32, step as u32, 0);
        if step > 0 || layer.initial.is_some() {
            layer.multiply(gpu, rows, (states, p), recurrent, (sums, width), false)?;
            now.sums = sums.address();
        }
        // SAFETY: as above; rows and columns are those of the launch.
        unsafe { gpu.launch(&SOURCE, &variant, kernel, layer.launch(rows, c), &[&now])? };
        if let Some(projection) = layer.projection {
            let projection = Matrix::new(projection, p, c).transposed();
            layer.multiply(gpu, rows, (inner, c), projection, (states, p), false)?;
            // SAFETY: as above.
            unsafe { gpu.launch(&SOURCE, &variant, "projected", layer.launch(rows, p), &[&now])? };
        }
    }
    Ok(())
}

/// Zeros for what fills a batch up.
fn clear(gpu: &Gpu, layer: &Layer<'_>, x: View<'_>, columns: usize) -> Result<()> {
    let sizes = (columns as u32, layer.count() as u32, layer.sequences.tokens as u32);
    let (x_address, offsets) = (x.address(), layer.sequences.offsets.address());
    // As many threads as may be needed at most: a thirty-second of the tokens.
    let launch = Launch::new((x.len() / 32).div_ceil(256).clamp(1, 1024), 256);
    // SAFETY: T rows of so many columns; the kernel begins at the last offset.
    unsafe {
        let arguments: [&dyn Argument; 5] = [&x_address, &sizes.0, &offsets, &sizes.1, &sizes.2];
        gpu.launch(&SOURCE, &[store(x.dtype())], "clear_rest", launch, &arguments)
    }
}

/// Memory of [`backward`] that has a row for each token, of undefined content.
#[derive(Clone, Copy, Debug)]
pub struct Work<'a> {
    /// T×D·P.
    pub before: View<'a>,
    /// T×D·C and T×D·P, where there is a projection.
    pub projected: Option<[View<'a>; 2]>,
    /// T×D·G·C, of a GRU.
    pub dsums: Option<View<'a>>,
}

/// Where the gradients of parameters and first states go.
#[derive(Clone, Copy, Debug)]
pub struct Gradients<'a> {
    /// D·G·C×P, in f32.
    pub recurrent: Sum<'a>,
    /// D·G·C, in f32.
    pub bias: Option<Sum<'a>>,
    /// D·P×C, in f32.
    pub projection: Option<Sum<'a>>,
    /// Written over.
    pub initial: Option<State<'a>>,
}

/// The gradients of [`forward`]: `gates` becomes that of what tokens said. `out` are the states, `dout` their gradient (T×D·P each);
/// `dlast` is what the last states and cells get besides.
pub fn backward(
    gpu: &Gpu,
    layer: &Layer<'_>,
    gates: View<'_>,
    aside: Option<View<'_>>,
    out: View<'_>,
    dout: View<'_>,
    dlast: Option<State<'_>>,
    work: Work<'_>,
    gradients: Gradients<'_>,
) -> Result<()> {
    let (scan, dtype, steps, t) = (&layer.scan, out.dtype(), layer.sequences.steps, layer.sequences.tokens);
    let (d, b, c, p, width) = (layer.directions(), layer.count(), scan.hidden, scan.width(), scan.gates());
    let mut now = layer.arguments(gates, aside, out);
    assert!(
        aside.map_or(0, |aside| aside.len()) == d * t * scan.aside(),
        "recurrent: nothing was kept for the backward"
    );
    dout.expect("recurrent", "the gradients", t * d * p, dtype);
    layer.check_state("the gradients of the last states", dlast, dtype);
    layer.check_state("the gradients of the first states", gradients.initial, dtype);
    check_work(layer, work, dtype);
    let parts = [
        (d * b * p, DType::F32),
        (d * b * c, DType::F32),
        (d * b * c, DType::F32),
        (d * b * p, dtype),
        (d * b * width, dtype),
    ];
    let mut space = Space::new(gpu, &parts)?;
    let [dstates, dcells, dinner, dprojected, dsums] = parts.map(|part| space.take(part));
    (now.dout, now.before) = (dout.address(), work.before.address());
    (now.dstates, now.dcells, now.dsums) = (dstates.address(), dcells.address(), dsums.address());
    (now.last_states, now.last_cells) =
        (address(dlast.map(|last| last.hidden)), address(dlast.and_then(|last| last.cell)));
    now.all_dsums = address(work.dsums);
    if let Some([inner, dprojections]) = work.projected {
        (now.inner, now.dprojections) = (inner.address(), dprojections.address());
        (now.dinner, now.dprojected) = (dinner.address(), dprojected.address());
    }
    let variant = [store(dtype)];
    let each_token = Launch { grid: (t as u32, d as u32), threads: THREADS as u32, shared: 0 };
    // SAFETY: all that the arguments name was checked or has been taken for it.
    unsafe { gpu.launch(&SOURCE, &variant, "prepare", each_token, &[&now, &(width as u32)])? };
    let kernel = match scan.cell {
        Cell::Lstm => "lstm_backward",
        Cell::Gru => "gru_backward",
        Cell::Tanh | Cell::Relu => "plain_backward",
    };
    for step in (0..steps.count()).rev() {
        let rows = steps.rows(step);
        (now.rows, now.step) = (rows as u32, step as u32);
        if let Some(projection) = layer.projection {
            // SAFETY: as above; rows and columns are those of the launch.
            unsafe { gpu.launch(&SOURCE, &variant, "projected_backward", layer.launch(rows, p), &[&now])? };
            layer.multiply(gpu, rows, (dprojected, p), Matrix::new(projection, p, c), (dinner, c), false)?;
        }
        // SAFETY: as above.
        unsafe { gpu.launch(&SOURCE, &variant, kernel, layer.launch(rows, c), &[&now])? };
        if step > 0 || gradients.initial.is_some() {
            let recurrent = Matrix::new(layer.recurrent, width, p);
            // Of a GRU, the update hands some of the gradient on by itself.
            layer.multiply(gpu, rows, (dsums, width), recurrent, (dstates, p), scan.cell == Cell::Gru)?;
        }
    }
    if let Some(State { hidden, cell }) = gradients.initial {
        let (launch, to) = (layer.launch(b, p + if cell.is_some() { c } else { 0 }), (hidden.address(), address(cell)));
        // SAFETY: as above.
        unsafe { gpu.launch(&SOURCE, &variant, "end_states", launch, &[&now, &to.0, &to.1])? };
    }
    weight_gradients(gpu, layer, work.dsums.unwrap_or(gates), work, gradients)
}

/// recurrent's gradient += gradients of sumsᵀ·states before, and so on.
fn weight_gradients(
    gpu: &Gpu,
    layer: &Layer<'_>,
    dsums: View<'_>,
    work: Work<'_>,
    gradients: Gradients<'_>,
) -> Result<()> {
    let (d, t, scan) = (layer.directions(), layer.sequences.tokens, &layer.scan);
    let (c, p, width) = (scan.hidden, scan.width(), scan.gates());
    // T×n and T×k in columns of their directions: n×k each.
    let summed = |a: View<'_>, n: usize, b: View<'_>, k: usize, to: Sum<'_>| -> Result<()> {
        to.to.expect("recurrent", "a weight's gradient", d * n * k, DType::F32);
        if t == 0 {
            return if to.add { Ok(()) } else { gpu.fill_zero(to.to) };
        }
        let (a, b) = (Matrix::strided(a, t, n, d * n).transposed(), Matrix::strided(b, t, k, d * k));
        let batch = Batch { count: d, steps: [n, k, n * k] };
        products(gpu, batch, a, b, Matrix::new(to.to, n, k), Finish { accumulate: to.add, ..Finish::default() })
    };
    summed(dsums, width, work.before, p, gradients.recurrent)?;
    if let Some(bias) = gradients.bias {
        bias.to.expect("recurrent", "the bias' gradient", d * width, DType::F32);
        reduce::column_sums(gpu, dsums, bias)?;
    }
    if let (Some(to), Some([inner, dprojections])) = (gradients.projection, work.projected) {
        summed(dprojections, p, inner, c, to)?;
    }
    Ok(())
}

fn check_work(layer: &Layer<'_>, work: Work<'_>, dtype: DType) {
    let (rows, scan) = (layer.sequences.tokens * layer.directions(), &layer.scan);
    work.before.expect("recurrent", "the states before", rows * scan.width(), dtype);
    assert!(work.projected.is_some() == layer.projection.is_some(), "recurrent: work space of another layer");
    if let Some([inner, dprojections]) = work.projected {
        inner.expect("recurrent", "what is projected", rows * scan.hidden, dtype);
        dprojections.expect("recurrent", "the gradients of what is projected", rows * scan.width(), dtype);
    }
    assert!(work.dsums.is_some() == (scan.cell == Cell::Gru), "recurrent: work space of another layer");
    if let Some(dsums) = work.dsums {
        dsums.expect("recurrent", "the gradients of sums", rows * scan.gates(), dtype);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::recurrent::longest_first;

    fn steps(lengths: &[u32]) -> Steps {
        let mut offsets = vec![0];
        lengths.iter().for_each(|length| offsets.push(offsets[offsets.len() - 1] + length));
        let mut order = vec![0; lengths.len()];
        longest_first(&offsets, &mut order);
        Steps::of(&offsets, &order)
    }

    #[test]
    fn a_step_has_a_row_for_every_sequence_that_runs() {
        for count in [1, 2, 3, 5, 32, 33, 100, 513] {
            let lengths: Vec<u32> = (0..count).map(|i| 1 + (i * i * 7919) % 61).collect();
            let needed = steps(&lengths);
            let running = |step: usize| lengths.iter().filter(|length| **length as usize > step).count();
            assert_eq!(needed.count(), *lengths.iter().max().unwrap() as usize);
            let least = (count as usize).div_ceil(8);
            for step in 0..needed.count() {
                let (rows, running) = (needed.rows(step), running(step));
                assert!(rows >= running && rows <= (2 * running).max(least), "{count}, {step}: {rows} of {running}");
            }
            // What grew holds both, and stays as it is for what it holds.
            let other: Vec<u32> = (0..count).map(|i| 1 + (i * 31) % 97).collect();
            let grown = Steps::none(count as usize).grown_for(needed).grown_for(steps(&other));
            for step in 0..grown.count() {
                let both = running(step).max(other.iter().filter(|length| **length as usize > step).count());
                assert!(grown.rows(step) >= both, "{count}, {step}");
            }
            assert_eq!(grown, grown.grown_for(needed));
        }
        assert_eq!(steps(&[]).count(), 0);
    }
}
