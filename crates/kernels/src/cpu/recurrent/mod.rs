//! Recurrent layers over flat tokens: long short-term memory (Hochreiter and Schmidhuber 1997), gated recurrent units (Cho et al.
//! 2014) and plain ones (Elman 1990), one direction at a time, forward and backward.
//!
//! Legend: B sequences, T tokens of all of them, n sequences that are still running at a step; C units of a layer, P numbers of its
//! state (C, or fewer where it is projected), G gates.
//!
//! What the tokens have to say to the gates is the same for all steps: one large product (T×G·C) outside of here. A scan adds what
//! the last state says, and turns the sums into gates in their place, in the order of the tokens; the backward turns the gates into
//! the gradients of what the tokens said, again in their place. So all that depends on tokens is one large product in either way,
//! and only products with the state are done step by step. Nothing is padded: sequences go side by side, the longest first, and
//! short ones leave. Gates, their order and the two biases are PyTorch's.

use super::gemm::{Finish, Matrix, Right, Units, pack_into, packed_units, product};
use super::scratch::{self, Purpose};
use super::simd::Element;
use super::{Cpu, SharedMut, chunks};

mod gates;
pub mod reference;

use gates::{Back, Step};

/// What a layer is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cell {
    /// Gates for the input, for forgetting, the new value, and for the output.
    Lstm,
    /// Gates for the reset and the update, and the new value; the reset comes after the product with the state.
    Gru,
    /// The state is the tanh of the sum.
    Tanh,
    /// The state is the sum, or 0 where that is negative.
    Relu,
}

impl Cell {
    /// G.
    pub fn gates(self) -> usize {
        match self {
            Self::Lstm => 4,
            Self::Gru => 3,
            Self::Tanh | Self::Relu => 1,
        }
    }
}

/// A direction of a layer apart from its data.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scan {
    /// What it is made of.
    pub cell: Cell,
    /// C.
    pub hidden: usize,
    /// P, where an LSTM's output is projected.
    pub projection: Option<usize>,
    /// Whether it begins at the end of each sequence.
    pub reverse: bool,
    /// The largest magnitude of an LSTM's cell, as in ELMo; infinite: any.
    pub clip_cell: f32,
    /// The largest magnitude of what is projected, as in ELMo; infinite: any.
    pub clip_projection: f32,
}

impl Scan {
    /// From left to right, without projection and clipping.
    pub fn new(cell: Cell, hidden: usize) -> Self {
        let any = f32::INFINITY;
        Self { cell, hidden, projection: None, reverse: false, clip_cell: any, clip_projection: any }
    }

    /// P: numbers of the state.
    pub fn width(&self) -> usize {
        self.projection.unwrap_or(self.hidden)
    }

    /// G·C.
    pub fn gates(&self) -> usize {
        self.cell.gates() * self.hidden
    }

    /// Numbers per token that are kept beside the gates: cells of an LSTM, what the state says to the new value of a GRU.
    pub fn aside(&self) -> usize {
        if matches!(self.cell, Cell::Lstm | Cell::Gru) { self.hidden } else { 0 }
    }
}

/// Some columns of a larger matrix: row r begins at element `at` + r·`stride`.
#[derive(Clone, Copy, Debug)]
pub struct Columns {
    /// Where the first row begins.
    pub at: usize,
    /// From row to row.
    pub stride: usize,
}

impl Columns {
    /// All columns of a matrix.
    pub fn all(width: usize) -> Self {
        Self { at: 0, stride: width }
    }

    fn start(&self, row: usize) -> usize {
        self.at + row * self.stride
    }

    fn check(&self, what: &str, len: usize, rows: usize, width: usize) {
        let fits = self.at + width <= self.stride && (rows == 0 || self.start(rows - 1) + width <= len);
        assert!(fits, "recurrent: {what} are not {rows} rows of {width}");
    }
}

/// Sequences of tokens, and the order in which a scan takes them up.
#[derive(Clone, Copy, Debug)]
pub struct Sequences<'a> {
    /// B + 1: where each begins, and the end of the last.
    pub offsets: &'a [u32],
    /// B: from [`longest_first`].
    pub order: &'a [u32],
}

/// The sequences by their lengths, the longest first; of equals, the first.
pub fn longest_first(offsets: &[u32], order: &mut [u32]) {
    assert!(offsets.len() == order.len() + 1, "recurrent: one place for each sequence");
    (0..).zip(order.iter_mut()).for_each(|(i, place)| *place = i);
    let length = |i: u32| offsets[i as usize + 1] - offsets[i as usize];
    order.sort_unstable_by_key(|i| (std::cmp::Reverse(length(*i)), *i));
}

impl Sequences<'_> {
    fn tokens(&self) -> usize {
        self.offsets.last().map_or(0, |end| *end as usize)
    }

    /// The token of a row's sequence at a step; none where the sequence is shorter.
    fn token(&self, row: usize, step: usize, reverse: bool) -> Option<usize> {
        let i = self.order[row] as usize;
        let (start, end) = (self.offsets[i] as usize, self.offsets[i + 1] as usize);
        (step < end - start).then(|| if reverse { end - 1 - step } else { start + step })
    }

    /// n of each step, from the first.
    fn running(&self, step: usize) -> usize {
        self.order.partition_point(|i| (self.offsets[*i as usize + 1] - self.offsets[*i as usize]) as usize > step)
    }

    fn steps(&self) -> usize {
        self.order.first().map_or(0, |i| (self.offsets[*i as usize + 1] - self.offsets[*i as usize]) as usize)
    }

    fn check(&self) {
        assert!(self.offsets.len() == self.order.len() + 1, "recurrent: one place for each sequence");
        assert!(self.offsets.windows(2).all(|w| w[0] <= w[1]), "recurrent: offsets descend");
        let length = |i: u32| self.offsets[i as usize + 1] - self.offsets[i as usize];
        assert!(self.order.windows(2).all(|w| length(w[0]) >= length(w[1])), "recurrent: not the longest first");
    }
}

/// What a scan multiplies with.
#[derive(Clone, Copy, Debug)]
pub struct Weights<'a, E> {
    /// G·C×P.
    pub recurrent: &'a [E],
    /// G·C; the second of PyTorch's biases.
    pub bias: Option<&'a [f32]>,
    /// P×C, where there is a projection.
    pub projection: Option<&'a [E]>,
}

/// A state for each sequence.
#[derive(Clone, Copy, Debug)]
pub struct State<'a, E> {
    /// B×P.
    pub hidden: &'a [E],
    /// B×C; of an LSTM, else empty.
    pub cell: &'a [E],
}

/// Where states go.
#[derive(Debug)]
pub struct StateMut<'a, E> {
    /// B×P.
    pub hidden: &'a mut [E],
    /// B×C; of an LSTM, else empty.
    pub cell: &'a mut [E],
}

/// What a scan leaves for the backward.
#[derive(Debug)]
pub struct Kept<'a, E> {
    /// T×G·C: what tokens say; becomes the gates, and in the backward the gradient of what they said.
    pub gates: &'a mut [E],
    /// Which columns are this direction's.
    pub columns: Columns,
    /// T×[`Scan::aside`], or empty where no backward follows.
    pub aside: &'a mut [E],
}

/// The states of all tokens (T×P, in `out`'s columns), from those before each sequence's first; zeros without.
pub fn forward<E: Element>(
    cpu: &Cpu,
    scan: &Scan,
    sequences: Sequences<'_>,
    weights: Weights<'_, E>,
    initial: Option<State<'_, E>>,
    kept: Kept<'_, E>,
    (out, out_columns): (&mut [E], Columns),
    last: Option<StateMut<'_, E>>,
) {
    let (t, b, c, p, width) = (sequences.tokens(), sequences.order.len(), scan.hidden, scan.width(), scan.gates());
    check(scan, &sequences, &weights, &kept, initial);
    out_columns.check("the states", out.len(), t, p);
    let last = last.map(|last| {
        let cells = if scan.cell == Cell::Lstm { b * c } else { 0 };
        assert!(last.hidden.len() == b * p && last.cell.len() == cells, "recurrent: last states of other sizes");
        (SharedMut::new(last.hidden), SharedMut::new(last.cell))
    });
    let (aside, gates) = (SharedMut::new(kept.aside), SharedMut::new(kept.gates));
    let out = SharedMut::new(out);
    with_packed(cpu, scan, &weights, false, |recurrent, projection| {
        // n×C cells, n×G·C sums with the state, n×C of what is projected, n×P states.
        scratch::with(Purpose::Kernel, b * (c + width + c + p), |space: &mut [f32]| {
            let (cells, space) = space.split_at_mut(b * c);
            let (sums, space) = space.split_at_mut(b * width);
            let (inner, states) = space.split_at_mut(b * c);
            let (inner, states) = (as_elements::<E>(inner), as_elements::<E>(states));
            start(&sequences, initial, p, c, states, cells);
            finish(&sequences, (0, b), last, (states, p), (cells, c));
            for step in 0..sequences.steps() {
                let n = sequences.running(step);
                let sums = &mut sums[..n * width];
                if step == 0 && initial.is_none() {
                    sums.chunks_exact_mut(width).for_each(|row| fill_from(row, weights.bias));
                } else {
                    let finish = Finish { bias: weights.bias, ..Finish::default() };
                    let states = Matrix::new(&states[..n * p], n, p);
                    product(cpu, states, Right::Units(recurrent), sums, width, finish);
                }
                let now = Step {
                    scan,
                    sequences,
                    step,
                    sums,
                    gates,
                    columns: kept.columns,
                    aside,
                    cells: SharedMut::new(&mut cells[..n * c]),
                    states: SharedMut::new(if projection.is_some() {
                        &mut inner[..n * c]
                    } else {
                        &mut states[..n * p]
                    }),
                    out: projection.is_none().then_some((out, out_columns)),
                };
                let least = (2048 / width.max(1)).max(1);
                cpu.for_ranges(n, least, |_, rows| gates::forward(cpu.isa(), &now, rows));
                if let Some(projection) = projection {
                    let inner = Matrix::new(&inner[..n * c], n, c);
                    product(cpu, inner, Right::Units(projection), &mut states[..n * p], p, Finish::default());
                    for (row, state) in states[..n * p].chunks_exact_mut(p).enumerate() {
                        let token = sequences.token(row, step, scan.reverse).unwrap_or_default();
                        // SAFETY: nobody else writes now.
                        let out = unsafe { out.slice(out_columns.start(token), p) };
                        gates::clip(cpu.isa(), scan.clip_projection, state, out);
                    }
                }
                finish(&sequences, (step + 1, n), last, (states, p), (cells, c));
            }
        });
    });
}

/// Gradients of the parameters, each with whether it is added to what is there, and of the first states.
#[derive(Debug)]
pub struct Gradients<'a, E> {
    /// G·C×P.
    pub recurrent: (&'a mut [f32], bool),
    /// G·C; added to.
    pub bias: Option<&'a mut [f32]>,
    /// P×C.
    pub projection: Option<(&'a mut [f32], bool)>,
    /// B×P and, of an LSTM, B×C; written.
    pub initial: Option<StateMut<'a, E>>,
}

/// The gradients of [`forward`]: `kept.gates` becomes that of what tokens said. `out` are the states, `dout` their gradient (T×P in
/// columns each); `dlast` is what the last states and cells get besides.
pub fn backward<E: Element>(
    cpu: &Cpu,
    scan: &Scan,
    sequences: Sequences<'_>,
    weights: Weights<'_, E>,
    initial: Option<State<'_, E>>,
    kept: Kept<'_, E>,
    (out, out_columns): (&[E], Columns),
    (dout, dout_columns): (&[E], Columns),
    dlast: Option<State<'_, E>>,
    gradients: Gradients<'_, E>,
) {
    let (t, b, c, p) = (sequences.tokens(), sequences.order.len(), scan.hidden, scan.width());
    check(scan, &sequences, &weights, &kept, initial);
    assert!(kept.aside.len() == t * scan.aside(), "recurrent: nothing was kept for the backward");
    out_columns.check("the states", out.len(), t, p);
    dout_columns.check("the gradients", dout.len(), t, p);
    check_state("last", scan, dlast, b);
    let columns = kept.columns;
    let (aside, gates) = (SharedMut::new(kept.aside), SharedMut::new(kept.gates));
    with_work(scan, t, b, |mut work: Work<'_, E>| {
        states_before(cpu, scan, sequences, initial, (out, out_columns), work.before);
        if scan.projection.is_some() {
            let shared = SharedMut::new(work.inner);
            cpu.for_ranges(t, (1024 / c.max(1)).max(1), |_, tokens| {
                gates::inner(cpu.isa(), c, tokens, gates, columns, aside, shared);
            });
        }
        with_packed(cpu, scan, &weights, true, |recurrent, projection| {
            let all = Backward { cpu, scan, sequences, gates, columns, aside, initial, recurrent, projection };
            for step in (0..sequences.steps()).rev() {
                work.begin(scan, sequences, step, dlast);
                let last = step == 0 && gradients.initial.is_none();
                all.step(step, (out, out_columns), (dout, dout_columns), &mut work, last);
            }
        });
        if let Some(initial) = gradients.initial {
            work.end(scan, sequences, initial);
        }
        // SAFETY: the steps are done, and nobody writes any more.
        let (gates, aside) = unsafe { (gates.slice(0, gates.len()), aside.slice(0, aside.len())) };
        weight_gradients(cpu, scan, t, (gates, columns), aside, work.before, gradients.recurrent, gradients.bias);
        if let (Some((to, accumulate)), Some(p)) = (gradients.projection, scan.projection) {
            let (from, inner) = (Matrix::new(&*work.dprojections, t, p), Matrix::new(&*work.inner, t, c));
            let finish = Finish { accumulate, ..Finish::default() };
            product(cpu, from.transposed(), Right::Plain(inner), to, c, finish);
        }
    });
}

/// Work space of the backward.
struct Work<'a, E> {
    /// n×C and n×P: of the cells and states that a step hands to the next.
    dcells: &'a mut [f32],
    dstates: &'a mut [f32],
    /// n×C: of what is projected.
    dinner: &'a mut [f32],
    /// n×P and n×G·C, for products.
    dprojected: &'a mut [E],
    dsums: &'a mut [E],
    /// T×P: the state before each token.
    before: &'a mut [E],
    /// T×C and T×P where there is a projection, else nothing: what is projected, and the gradient of what comes out.
    inner: &'a mut [E],
    dprojections: &'a mut [E],
}

fn with_work<E: Element>(scan: &Scan, t: usize, b: usize, body: impl FnOnce(Work<'_, E>)) {
    let (c, p) = (scan.hidden, scan.width());
    let (of_inner, of_projections) = if scan.projection.is_some() { (t * c, t * p) } else { (0, 0) };
    let lengths = [b * c, b * p, b * c, b * p, b * scan.gates(), t * p, of_inner, of_projections];
    scratch::with(Purpose::Kernel, lengths.iter().sum(), |space: &mut [f32]| {
        let mut rest = space;
        let [dcells, dstates, dinner, dprojected, dsums, before, inner, dprojections] = lengths.map(|length| {
            let (part, others) = std::mem::take(&mut rest).split_at_mut(length);
            rest = others;
            part
        });
        body(Work {
            dcells,
            dstates,
            dinner,
            dprojected: as_elements(dprojected),
            dsums: as_elements(dsums),
            before: as_elements(before),
            inner: as_elements(inner),
            dprojections: as_elements(dprojections),
        });
    });
}

impl<E: Element> Work<'_, E> {
    /// Sequences that end at a step begin there with what is asked of their last states.
    fn begin(&mut self, scan: &Scan, sequences: Sequences<'_>, step: usize, dlast: Option<State<'_, E>>) {
        let (c, p) = (scan.hidden, scan.width());
        for row in sequences.running(step + 1)..sequences.running(step) {
            let i = sequences.order[row] as usize;
            let cell = dlast.filter(|last| !last.cell.is_empty()).map(|last| &last.cell[i * c..]);
            fill_from(&mut self.dstates[row * p..(row + 1) * p], dlast.map(|last| &last.hidden[i * p..]));
            fill_from(&mut self.dcells[row * c..(row + 1) * c], cell);
        }
    }

    /// What is left after the first step is the gradient of the states before it.
    fn end(&self, scan: &Scan, sequences: Sequences<'_>, to: StateMut<'_, E>) {
        let (b, c, p) = (sequences.order.len(), scan.hidden, scan.width());
        let cells = if scan.cell == Cell::Lstm { c } else { 0 };
        assert!(to.hidden.len() == b * p && to.cell.len() == b * cells, "recurrent: first states differ");
        to.hidden.fill(E::default());
        to.cell.fill(E::default());
        for row in 0..sequences.running(0) {
            let i = sequences.order[row] as usize;
            let pairs = to.hidden[i * p..(i + 1) * p].iter_mut().zip(&self.dstates[row * p..]);
            pairs.for_each(|(to, x)| *to = E::from_f32(*x));
            let pairs = to.cell[i * cells..(i + 1) * cells].iter_mut().zip(&self.dcells[row * c..]);
            pairs.for_each(|(to, x)| *to = E::from_f32(*x));
        }
    }
}

/// What all steps of the backward share.
struct Backward<'a, E> {
    cpu: &'a Cpu,
    scan: &'a Scan,
    sequences: Sequences<'a>,
    gates: SharedMut<E>,
    columns: Columns,
    aside: SharedMut<E>,
    initial: Option<State<'a, E>>,
    recurrent: Units<'a>,
    projection: Option<Units<'a>>,
}

impl<E: Element> Backward<'_, E> {
    /// One step; what the states before get is left out at the `last`.
    fn step(
        &self,
        step: usize,
        (out, out_columns): (&[E], Columns),
        dout: (&[E], Columns),
        work: &mut Work<'_, E>,
        last: bool,
    ) {
        let (cpu, scan, n) = (self.cpu, self.scan, self.sequences.running(step));
        let (c, p, width) = (scan.hidden, scan.width(), scan.gates());
        if let Some(projection) = self.projection {
            for row in 0..n {
                let token = self.sequences.token(row, step, scan.reverse).unwrap_or_default();
                let to = &mut work.dprojected[row * p..(row + 1) * p];
                let (state, from) = (&out[out_columns.start(token)..][..p], &dout.0[dout.1.start(token)..][..p]);
                gates::clip_gradient(cpu.isa(), scan.clip_projection, state, from, &work.dstates[row * p..][..p], to);
                work.dprojections[token * p..(token + 1) * p].copy_from_slice(to);
            }
            let from = Matrix::new(&work.dprojected[..n * p], n, p);
            product(cpu, from, Right::Units(projection), &mut work.dinner[..n * c], c, Finish::default());
        }
        let projected = self.projection.is_some();
        let now = Back {
            scan,
            sequences: self.sequences,
            step,
            gates: self.gates,
            columns: self.columns,
            aside: self.aside,
            initial_cell: self.initial.map(|initial| initial.cell).filter(|cell| !cell.is_empty()),
            before: work.before,
            dout: (!projected).then_some(dout),
            dstates: SharedMut::new(if projected { &mut work.dinner[..n * c] } else { &mut work.dstates[..n * p] }),
            dcells: SharedMut::new(&mut work.dcells[..n * c]),
            dsums: SharedMut::new(&mut work.dsums[..n * width]),
        };
        cpu.for_ranges(n, (2048 / width.max(1)).max(1), |_, rows| gates::backward(cpu.isa(), &now, rows));
        if !last {
            let dsums = Matrix::new(&work.dsums[..n * width], n, width);
            let finish = Finish { accumulate: scan.cell == Cell::Gru, ..Finish::default() };
            product(cpu, dsums, Right::Units(self.recurrent), &mut work.dstates[..n * p], p, finish);
        }
    }
}

/// recurrent's gradient += gradients of sumsᵀ·states before, bias' += their column sums.
fn weight_gradients<E: Element>(
    cpu: &Cpu,
    scan: &Scan,
    t: usize,
    (gates, columns): (&[E], Columns),
    aside: &[E],
    before: &[E],
    (to, accumulate): (&mut [f32], bool),
    bias: Option<&mut [f32]>,
) {
    let (c, p, width) = (scan.hidden, scan.width(), scan.gates());
    assert!(to.len() == width * p && bias.as_ref().is_none_or(|bias| bias.len() == width), "recurrent: lengths differ");
    if t == 0 {
        if !accumulate {
            to.fill(0.0);
        }
        return;
    }
    // In a GRU the new value's sum with the state is not what its token said to it.
    let first = if scan.cell == Cell::Gru { 2 * c } else { width };
    let (upper, lower) = to.split_at_mut(first * p);
    let finish = || Finish { accumulate, ..Finish::default() };
    let of_gates = Matrix::strided(&gates[columns.at..], t, first, columns.stride);
    product(cpu, of_gates.transposed(), Right::Plain(Matrix::new(before, t, p)), upper, p, finish());
    if first < width {
        let of_new = Matrix::new(aside, t, c).transposed();
        product(cpu, of_new, Right::Plain(Matrix::new(before, t, p)), lower, p, finish());
    }
    if let Some(bias) = bias {
        let (upper, lower) = bias.split_at_mut(first);
        add_columns(cpu, t, (gates, columns), upper);
        if first < width {
            add_columns(cpu, t, (aside, Columns::all(c)), lower);
        }
    }
}

/// Adds the sum of each column to `to`.
fn add_columns<E: Element>(cpu: &Cpu, t: usize, (x, columns): (&[E], Columns), to: &mut [f32]) {
    let (h, (count, _)) = (to.len(), chunks(t, 16));
    scratch::with(Purpose::Outer, count * h, |partial: &mut [f32]| {
        let shared = SharedMut::new(partial);
        cpu.for_ranges(t, 16, |i, rows| {
            // SAFETY: every range has its own partial sums.
            let partial = unsafe { shared.slice(i * h, h) };
            partial.fill(0.0);
            for row in rows {
                gates::add(cpu.isa(), &x[columns.start(row)..][..h], partial);
            }
        });
        partial.chunks_exact(h.max(1)).for_each(|row| gates::add(cpu.isa(), row, to));
    });
}

/// Packs what each step multiplies with, for the forward or the backward.
fn with_packed<E: Element>(
    cpu: &Cpu,
    scan: &Scan,
    weights: &Weights<'_, E>,
    backward: bool,
    body: impl FnOnce(Units<'_>, Option<Units<'_>>),
) {
    let (c, p, width) = (scan.hidden, scan.width(), scan.gates());
    let recurrent = Matrix::new(weights.recurrent, width, p);
    let recurrent = if backward { recurrent } else { recurrent.transposed() };
    let projection = weights.projection.map(|projection| {
        let projection = Matrix::new(projection, p, c);
        if backward { projection } else { projection.transposed() }
    });
    let len = packed_units(cpu, recurrent);
    let all = len + projection.map_or(0, |projection| packed_units(cpu, projection));
    scratch::with(Purpose::Outer, all, |space: &mut [u32]| {
        let (first, second) = space.split_at_mut(len);
        let recurrent = pack_into(cpu, recurrent, first);
        body(recurrent, projection.map(|projection| pack_into(cpu, projection, second)));
    });
}

/// The state before each token (T×P).
fn states_before<E: Element>(
    cpu: &Cpu,
    scan: &Scan,
    sequences: Sequences<'_>,
    initial: Option<State<'_, E>>,
    (out, columns): (&[E], Columns),
    before: &mut [E],
) {
    let p = scan.width();
    let before = SharedMut::new(before);
    cpu.for_ranges(sequences.order.len(), 1, |_, some| {
        for i in some {
            let (start, end) = (sequences.offsets[i] as usize, sequences.offsets[i + 1] as usize);
            for token in start..end {
                // SAFETY: every sequence is one task's.
                let to = unsafe { before.slice(token * p, p) };
                let last = if scan.reverse { (token + 1 < end).then_some(token + 1) } else { token.checked_sub(1) };
                match (last.filter(|last| *last >= start), initial) {
                    (Some(last), _) => to.copy_from_slice(&out[columns.start(last)..][..p]),
                    (None, Some(initial)) => to.copy_from_slice(&initial.hidden[i * p..(i + 1) * p]),
                    (None, None) => to.fill(E::default()),
                }
            }
        }
    });
}

/// The states and cells before the first step, in the order of the rows.
fn start<E: Element>(
    sequences: &Sequences<'_>,
    initial: Option<State<'_, E>>,
    p: usize,
    c: usize,
    states: &mut [E],
    cells: &mut [f32],
) {
    states.fill(E::default());
    cells.fill(0.0);
    let Some(initial) = initial else { return };
    for (row, i) in sequences.order.iter().enumerate() {
        let i = *i as usize;
        states[row * p..(row + 1) * p].copy_from_slice(&initial.hidden[i * p..(i + 1) * p]);
        if !initial.cell.is_empty() {
            fill_from(&mut cells[row * c..(row + 1) * c], Some(&initial.cell[i * c..]));
        }
    }
}

/// Hands out the states of those of `n` sequences that do not run at a step any more.
fn finish<E: Element>(
    sequences: &Sequences<'_>,
    (step, n): (usize, usize),
    last: Option<(SharedMut<E>, SharedMut<E>)>,
    (states, p): (&[E], usize),
    (cells, c): (&[f32], usize),
) {
    let Some((hidden, cell)) = last else { return };
    for row in sequences.running(step)..n {
        let i = sequences.order[row] as usize;
        // SAFETY: no loop runs now, and every sequence has rows of its own.
        unsafe { hidden.slice(i * p, p) }.copy_from_slice(&states[row * p..(row + 1) * p]);
        if cell.len() > 0 {
            // SAFETY: as above.
            let to = unsafe { cell.slice(i * c, c) };
            to.iter_mut().zip(&cells[row * c..]).for_each(|(to, x)| *to = E::from_f32(*x));
        }
    }
}

/// Numbers from another slice, or zeros.
fn fill_from<E: Element>(to: &mut [f32], from: Option<&[E]>) {
    match from {
        Some(from) => to.iter_mut().zip(from).for_each(|(to, x)| *to = x.to_f32()),
        None => to.fill(0.0),
    }
}

fn check<E>(
    scan: &Scan,
    sequences: &Sequences<'_>,
    weights: &Weights<'_, E>,
    kept: &Kept<'_, E>,
    initial: Option<State<'_, E>>,
) {
    let (t, c, p, width) = (sequences.tokens(), scan.hidden, scan.width(), scan.gates());
    sequences.check();
    assert!(scan.projection.is_none() || scan.cell == Cell::Lstm, "recurrent: only an LSTM is projected");
    assert!(weights.recurrent.len() == width * p, "recurrent: the weight is not {width}×{p}");
    assert!(weights.bias.is_none_or(|bias| bias.len() == width), "recurrent: the bias is not {width}");
    assert!(
        weights.projection.map(<[E]>::len) == scan.projection.map(|p| p * c),
        "recurrent: the projection is not {p}×{c}"
    );
    kept.columns.check("the gates", kept.gates.len(), t, width);
    assert!(kept.aside.is_empty() || kept.aside.len() == t * scan.aside(), "recurrent: other numbers are kept");
    check_state("first", scan, initial, sequences.order.len());
}

fn check_state<E>(which: &str, scan: &Scan, state: Option<State<'_, E>>, b: usize) {
    let cells = if scan.cell == Cell::Lstm { b * scan.hidden } else { 0 };
    let fits = |state: State<'_, E>| state.hidden.len() == b * scan.width() && state.cell.len() == cells;
    assert!(state.is_none_or(fits), "recurrent: {which} states of other sizes");
}

/// Work space in the type of what is stored: there is room for as many numbers of it.
fn as_elements<E: Element>(space: &mut [f32]) -> &mut [E] {
    let len = space.len();
    &mut bytemuck::cast_slice_mut(space)[..len]
}
