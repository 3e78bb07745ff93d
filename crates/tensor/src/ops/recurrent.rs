//! Recurrent layers over flat tokens: LSTM, GRU and plain ones, in one direction or both.
//!
//! Legend: B sequences, T tokens, I inputs of a layer; C its units, P numbers of its state (C, or fewer where it is projected), G
//! gates; D directions. Parameters of directions lie side by side, so that what tokens say to all gates is one product.
//!
//! On a GPU a layout bounds the steps of a scan ([`Layout::for_steps`]), which are a part of what a recorded pass is known by.

use henson_kernels::cpu::Element;
use henson_kernels::cpu::recurrent::{
    self as kernels, Columns, Gradients, Kept, Scan, Sequences, State, StateMut, Weights,
};
use henson_kernels::cuda::recurrent as cuda_kernels;

use super::linear::{Layer, apply, input_gradient, parameter_gradients};
use super::{Op, sum_into, with_float};
use crate::cuda::CudaDevice;
use crate::layout::Stepwise;
use crate::tape::{Backward, Slot};
use crate::{Activation, Cell, DType, Device, Kind, Layout, Native, Param, Parameters, Pass, Result, Tensor};
use crate::{TensorError, Var};

const OPERATION: &str = "recurrent";

/// Which way a layer reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Directions {
    /// From the first token to the last.
    Forward,
    /// From the last token to the first.
    Backward,
    /// Both, their states side by side.
    Both,
}

impl Directions {
    /// D.
    pub fn count(self) -> usize {
        if self == Self::Both { 2 } else { 1 }
    }

    fn is_reverse(self, direction: usize) -> bool {
        self == Self::Backward || direction == 1
    }

    /// The same of all directions.
    fn reverse(self) -> &'static [bool] {
        match self {
            Self::Forward => &[false],
            Self::Backward => &[true],
            Self::Both => &[false, true],
        }
    }
}

/// A layer: what it is, and its parameters, those of both directions side by side.
#[derive(Clone, Copy, Debug)]
pub struct RecurrentLayer {
    /// What it is made of.
    pub cell: Cell,
    /// C.
    pub hidden: usize,
    /// Which way it reads.
    pub directions: Directions,
    /// D·G·C×I.
    pub input: Param,
    /// D·G·C.
    pub input_bias: Option<Param>,
    /// D·G·C×P.
    pub recurrent: Param,
    /// D·G·C.
    pub recurrent_bias: Option<Param>,
    /// D·P×C, where an LSTM's output is projected.
    pub projection: Option<Param>,
    /// The largest magnitude of an LSTM's cell; infinite: any.
    pub clip_cell: f32,
    /// The largest magnitude of what is projected; infinite: any.
    pub clip_projection: f32,
}

impl RecurrentLayer {
    fn scan(&self, direction: usize) -> Scan {
        let d = self.directions.count();
        Scan {
            cell: self.cell,
            hidden: self.hidden,
            projection: self.projection.map(|projection| projection.shape().sizes()[0] / d),
            reverse: self.directions.is_reverse(direction),
            clip_cell: self.clip_cell,
            clip_projection: self.clip_projection,
        }
    }

    /// C, or 0 where there are no cells.
    fn cells(&self) -> usize {
        if self.cell == Cell::Lstm { self.hidden } else { 0 }
    }

    fn check(&self) -> Result<()> {
        let (d, c, scan) = (self.directions.count(), self.hidden, self.scan(0));
        let wrong = |what, expected: crate::Shape, got| {
            if expected == got { Ok(()) } else { Err(TensorError::Shape { operation: OPERATION, what, expected, got }) }
        };
        if c == 0 || self.projection.is_some() && self.cell != Cell::Lstm {
            let why = "a layer has at least one unit, and only an LSTM is projected";
            return Err(TensorError::Unsupported { operation: OPERATION, why });
        }
        let gates = d * scan.gates();
        wrong("the input's weight", [gates, self.input.shape().sizes()[1]].into(), self.input.shape())?;
        wrong("the state's weight", [gates, scan.width()].into(), self.recurrent.shape())?;
        for bias in [self.input_bias, self.recurrent_bias].into_iter().flatten() {
            wrong("a bias", [gates].into(), bias.shape())?;
        }
        self.projection.map_or(Ok(()), |p| wrong("the projection", [d * scan.width(), c].into(), p.shape()))
    }
}

/// A state for each sequence: a row for each of them, first those of the first direction.
#[derive(Clone, Debug)]
pub struct RecurrentState {
    /// D·B×P.
    pub hidden: Var,
    /// D·B×C, of an LSTM.
    pub cell: Option<Var>,
}

impl RecurrentState {
    /// From numbers that were kept, rows of `width` each: the states, and the cells of an LSTM.
    pub fn from_numbers(
        device: &Device,
        dtype: DType,
        (hidden, width): (&[f32], usize),
        cell: Option<(&[f32], usize)>,
    ) -> Result<Self> {
        let kept = |(numbers, width): (&[f32], usize)| {
            let shape = [numbers.len() / width.max(1), width];
            let tensor = match dtype {
                DType::Bf16 => {
                    let rounded: Vec<crate::bf16> = numbers.iter().map(|x| crate::bf16::from_f32(*x)).collect();
                    Tensor::from_slice(device, shape, &rounded)?
                }
                _ => Tensor::from_slice(device, shape, numbers)?,
            };
            Ok::<_, TensorError>(Var::without_gradient(tensor))
        };
        Ok(Self { hidden: kept((hidden, width))?, cell: cell.map(kept).transpose()? })
    }

    /// From numbers that a device has, of which no gradient is wanted.
    pub fn of_tensor(hidden: Tensor) -> Self {
        Self { hidden: Var::without_gradient(hidden), cell: None }
    }

    /// The same numbers, of which no gradient is wanted: what another pass begins with.
    pub fn detached(&self) -> Self {
        let cut = |x: &Var| Var::without_gradient(x.tensor().clone());
        Self { hidden: cut(&self.hidden), cell: self.cell.as_ref().map(cut) }
    }
}

impl RecurrentState {
    /// The same for the backward pass: on a GPU, numbers of which no gradient is wanted may be overwritten by then
    /// ([`Pass::carry`]).
    fn kept(&self, device: &Device) -> Result<Self> {
        let keep = |x: &Var| match device {
            Device::Cuda(_) if x.slot().is_none() => super::copy(device, x.tensor()).map(Var::without_gradient),
            _ => Ok(x.clone()),
        };
        Ok(Self { hidden: keep(&self.hidden)?, cell: self.cell.as_ref().map(keep).transpose()? })
    }

    fn parts(&self) -> impl Iterator<Item = &Tensor> {
        [Some(&self.hidden), self.cell.as_ref()].into_iter().flatten().map(Var::tensor)
    }
}

/// What a layer gives.
pub struct RecurrentOutput {
    /// T×D·P.
    pub out: Var,
    /// What each sequence ends with.
    pub last: RecurrentState,
}

impl Pass<'_> {
    /// The states of a layer at each token. They begin at those of `initial`, or at zeros.
    pub fn recurrent(
        &mut self,
        x: &Var,
        layer: &RecurrentLayer,
        layout: &Layout,
        initial: Option<&RecurrentState>,
    ) -> Result<RecurrentOutput> {
        layer.check()?;
        self.reads(layer);
        let (device, dtype) = (self.device(), self.dtype());
        let (d, b, t, scan) = (layer.directions.count(), layout.sequences(), layout.tokens(), layer.scan(0));
        let (p, width) = (scan.width(), scan.gates());
        check_state(layer, initial, b, dtype)?;
        x.tensor().check_shape(OPERATION, "the input", [t, layer.input.shape().sizes()[1]])?;
        let plain = Layer { weight: layer.input, bias: layer.input_bias, activation: Activation::None, gated: false };
        let (mut gates, _) = apply(self.weights(), x.tensor(), plain, dtype, false)?;
        let kept_columns = if self.is_training() { scan.aside() } else { 0 };
        let mut aside = Tensor::empty(device, [d, t, kept_columns], dtype)?;
        let mut out = Tensor::empty(device, [t, d * p], dtype)?;
        let mut last =
            [Tensor::empty(device, [d * b, p], dtype)?, Tensor::empty(device, [d * b, layer.cells()], dtype)?];
        let timer = device.timer(Kind::Recurrent, d * 2 * t * width * p, &[&gates, &gates, &out]);
        let order = match device {
            Device::Cpu(cpu) => {
                let mut order = Tensor::empty(device, [b], DType::U32)?;
                kernels::longest_first(layout.offsets(), order.slice_mut());
                with_float!(dtype, E => for direction in 0..d {
                    let view = Directed::<E>::new(self.parameters(), layer, direction, initial);
                    let [hidden, cell] = &mut last;
                    let last = StateMut {
                        hidden: part_mut::<E>(hidden, direction, d),
                        cell: part_mut::<E>(cell, direction, d),
                    };
                    let kept = Kept {
                        gates: gates.slice_mut::<E>(),
                        columns: Columns { at: direction * width, stride: d * width },
                        aside: part_mut::<E>(&mut aside, direction, d),
                    };
                    let columns = Columns { at: direction * p, stride: d * p };
                    let sequences = Sequences { offsets: layout.offsets(), order: order.slice() };
                    let out = (out.slice_mut::<E>(), columns);
                    let (weights, initial) = (view.weights(), view.initial());
                    kernels::forward(&cpu.kernels, &view.scan, sequences, weights, initial, kept, out, Some(last));
                });
                order
            }
            Device::Cuda(cuda) => {
                let stepwise = layout.stepwise(device)?;
                self.reads(&stepwise.steps);
                let on_gpu = OnGpu::new(self.parameters(), layer);
                let aside = Some(aside.on_gpu()).filter(|_| self.is_training());
                let last = state_on_gpu(&last);
                let layer = on_gpu.layer(layer, layout, stepwise, initial)?;
                cuda_kernels::forward(&cuda.gpu, &layer, gates.on_gpu(), aside, out.on_gpu(), Some(last))?;
                stepwise.order.clone()
            }
        };
        drop(timer);
        let kept = out.clone();
        let out = self.var(out);
        let [hidden, cell] = last;
        let cell = (layer.cells() > 0).then(|| self.var(cell));
        let last = RecurrentState { hidden: self.var(hidden), cell };
        if let Some(slot) = out.slot() {
            let last = [last.hidden.slot(), last.cell.as_ref().and_then(Var::slot)];
            let initial = initial.map(|initial| initial.kept(device)).transpose()?;
            let (layer, layout, x) = (*layer, layout.clone(), x.clone());
            self.record(Op::Recurrent(Recorded {
                x,
                layer,
                layout,
                initial,
                order,
                gates,
                aside,
                kept,
                out: slot,
                last,
            }));
        }
        Ok(RecurrentOutput { out, last })
    }
}

impl Pass<'_> {
    /// Puts the states that sequences ended with where the next pass finds them. On a GPU `kept` stays where it is, so that a recorded
    /// pass that begins with it can be played again; see [`Device::reads_in_place`].
    pub fn carry(&mut self, last: &[RecurrentState], kept: &mut Vec<RecurrentState>) -> Result<()> {
        let Device::Cuda(cuda) = self.device() else {
            *kept = last.iter().map(RecurrentState::detached).collect();
            return Ok(());
        };
        let shapes = |states: &[RecurrentState]| {
            states.iter().flat_map(RecurrentState::parts).map(|x| (x.shape(), x.dtype())).collect::<Vec<_>>()
        };
        if shapes(last) != shapes(kept) {
            *kept = last.iter().map(RecurrentState::detached).collect();
            return Ok(());
        }
        let (from, to) = (last.iter().flat_map(RecurrentState::parts), kept.iter().flat_map(RecurrentState::parts));
        for (from, to) in from.zip(to) {
            let _timer = self.device().timer(Kind::Rows, 0, &[from, to]);
            henson_kernels::cuda::activation::forward(&cuda.gpu, Activation::None, from.on_gpu(), None, to.on_gpu())?;
        }
        Ok(())
    }
}

impl Device {
    /// In a feed: states that a pass begins with, where they are. It can be recorded for these alone; without any, it is not recorded,
    /// since what it ends with has no place yet ([`Pass::carry`]).
    pub fn reads_in_place(&self, states: &[RecurrentState]) {
        let Device::Cuda(cuda) = self else { return };
        match states {
            [] => cuda.do_not_record(),
            states => {
                states.iter().flat_map(RecurrentState::parts).for_each(|x| cuda.note_address(x.on_gpu().address()))
            }
        }
    }
}

/// A layer's parameters on a GPU.
struct OnGpu {
    recurrent: Tensor,
    bias: Option<Tensor>,
    projection: Option<Tensor>,
}

impl OnGpu {
    fn new(parameters: &Parameters, layer: &RecurrentLayer) -> Self {
        Self {
            recurrent: parameters.matrix(layer.recurrent),
            bias: layer.recurrent_bias.map(|bias| parameters.vector(bias)),
            projection: layer.projection.map(|projection| parameters.matrix(projection)),
        }
    }

    fn layer<'a>(
        &'a self,
        layer: &RecurrentLayer,
        layout: &'a Layout,
        stepwise: &'a Stepwise,
        initial: Option<&'a RecurrentState>,
    ) -> Result<cuda_kernels::Layer<'a>> {
        Ok(cuda_kernels::Layer {
            scan: layer.scan(0),
            reverse: layer.directions.reverse(),
            sequences: cuda_kernels::Sequences {
                offsets: layout.offsets_on_gpu()?.on_gpu(),
                order: stepwise.order.on_gpu(),
                steps: stepwise.steps,
                tokens: layout.tokens(),
            },
            recurrent: self.recurrent.on_gpu(),
            bias: self.bias.as_ref().map(Tensor::on_gpu),
            projection: self.projection.as_ref().map(Tensor::on_gpu),
            initial: initial.map(|state| cuda_kernels::State {
                hidden: state.hidden.tensor().on_gpu(),
                cell: state.cell.as_ref().map(|cell| cell.tensor().on_gpu()),
            }),
        })
    }
}

/// States and, where there are some, cells.
fn state_on_gpu([hidden, cell]: &[Tensor; 2]) -> cuda_kernels::State<'_> {
    let cells = cell.shape().elements() > 0;
    cuda_kernels::State { hidden: hidden.on_gpu(), cell: cells.then(|| cell.on_gpu()) }
}

/// A direction of a layer.
struct Directed<'a, E> {
    scan: Scan,
    recurrent: Tensor,
    bias: Option<&'a [f32]>,
    projection: Option<Tensor>,
    initial: Option<&'a RecurrentState>,
    direction: usize,
    d: usize,
    element: std::marker::PhantomData<E>,
}

impl<'a, E: Native + Element> Directed<'a, E> {
    fn new(
        parameters: &'a Parameters,
        layer: &RecurrentLayer,
        direction: usize,
        initial: Option<&'a RecurrentState>,
    ) -> Self {
        let (d, scan) = (layer.directions.count(), layer.scan(direction));
        Self {
            scan,
            recurrent: parameters.matrix(rows_of(layer.recurrent, direction, d)),
            bias: layer.recurrent_bias.map(|bias| parameters.slice(rows_of(bias, direction, d))),
            projection: layer.projection.map(|projection| parameters.matrix(rows_of(projection, direction, d))),
            initial,
            direction,
            d,
            element: std::marker::PhantomData,
        }
    }

    fn weights(&self) -> Weights<'_, E> {
        let projection = self.projection.as_ref().map(|projection| projection.slice::<E>());
        Weights { recurrent: self.recurrent.slice::<E>(), bias: self.bias, projection }
    }

    fn initial(&self) -> Option<State<'_, E>> {
        let of = |x: &'a Var| part::<E>(x.tensor(), self.direction, self.d);
        self.initial
            .map(|state| State { hidden: of(&state.hidden), cell: state.cell.as_ref().map(of).unwrap_or_default() })
    }
}

/// The rows of a parameter that are a direction's.
fn rows_of(param: Param, direction: usize, d: usize) -> Param {
    let rows = param.shape().sizes()[0] / d;
    param.from_row(direction * rows).to_row(rows)
}

/// The part of a tensor that is a direction's.
fn part<E: Native>(x: &Tensor, direction: usize, d: usize) -> &[E] {
    let all = x.slice::<E>();
    let size = all.len() / d;
    &all[direction * size..(direction + 1) * size]
}

fn part_mut<E: Native>(x: &mut Tensor, direction: usize, d: usize) -> &mut [E] {
    let all = x.slice_mut::<E>();
    let size = all.len() / d;
    &mut all[direction * size..(direction + 1) * size]
}

fn check_state(layer: &RecurrentLayer, state: Option<&RecurrentState>, b: usize, dtype: DType) -> Result<()> {
    let Some(RecurrentState { hidden, cell }) = state else { return Ok(()) };
    let (rows, p) = (layer.directions.count() * b, layer.scan(0).width());
    hidden.tensor().check_shape(OPERATION, "the first state", [rows, p])?;
    hidden.tensor().check_dtype(OPERATION, "the first state", dtype)?;
    if cell.is_some() != (layer.cells() > 0) {
        let why = "an LSTM begins with a state and a cell, other layers with a state";
        return Err(TensorError::Unsupported { operation: OPERATION, why });
    }
    let Some(cell) = cell else { return Ok(()) };
    cell.tensor().check_shape(OPERATION, "the first cell", [rows, layer.hidden])?;
    cell.tensor().check_dtype(OPERATION, "the first cell", dtype)
}

/// A recorded layer.
pub(crate) struct Recorded {
    x: Var,
    layer: RecurrentLayer,
    layout: Layout,
    initial: Option<RecurrentState>,
    /// B: the longest sequences first.
    order: Tensor,
    /// T×D·G·C.
    gates: Tensor,
    /// D×T×C, or nothing.
    aside: Tensor,
    /// T×D·P: its output.
    kept: Tensor,
    out: Slot,
    last: [Option<Slot>; 2],
}

impl Recorded {
    pub(super) fn backward(mut self, back: &mut Backward<'_>) -> Result<()> {
        let dout = back.take(self.out);
        let dlast = self.last.map(|slot| slot.and_then(|slot| back.take(slot)));
        if dout.is_none() && dlast.iter().all(Option::is_none) {
            return Ok(());
        }
        let (device, dtype) = (back.device(), self.kept.dtype());
        let dout = match dout {
            Some(dout) => dout.reshape(self.kept.shape())?,
            None => Tensor::zeros(device, self.kept.shape(), dtype)?,
        };
        let (layer, d, b, scan) =
            (self.layer, self.layer.directions.count(), self.layout.sequences(), self.layer.scan(0));
        let dlast = match dlast {
            [None, None] => None,
            [hidden, cell] => {
                let or_zeros = |x: Option<Tensor>, columns: usize| {
                    x.map_or_else(|| Tensor::zeros(device, [d * b, columns], dtype), Ok)
                };
                Some([or_zeros(hidden, scan.width())?, or_zeros(cell, layer.cells())?])
            }
        };
        let wanted = self.initial.as_ref().is_some_and(|initial| {
            initial.hidden.slot().is_some() || initial.cell.as_ref().is_some_and(|cell| cell.slot().is_some())
        });
        let mut dinitial = match wanted {
            true => Some([
                Tensor::empty(device, [d * b, scan.width()], dtype)?,
                Tensor::empty(device, [d * b, layer.cells()], dtype)?,
            ]),
            false => None,
        };
        self.scans(back, &dout, dlast.as_ref(), dinitial.as_mut())?;
        drop((dout, dlast));
        parameter_gradients(back, &self.gates, self.x.tensor(), layer.input, layer.input_bias)?;
        if let Some(slot) = self.x.slot() {
            input_gradient(back, &self.gates, layer.input, slot, self.x.tensor())?;
        }
        if let (Some([hidden, cell]), Some(initial)) = (dinitial, self.initial) {
            back.add(initial.hidden.slot(), hidden)?;
            back.add(initial.cell.and_then(|cell| cell.slot()), cell)?;
        }
        Ok(())
    }

    /// The scans of all directions: gates become gradients of what tokens said.
    fn scans(
        &mut self,
        back: &mut Backward<'_>,
        dout: &Tensor,
        dlast: Option<&[Tensor; 2]>,
        mut dinitial: Option<&mut [Tensor; 2]>,
    ) -> Result<()> {
        let (layer, d, t) = (self.layer, self.layer.directions.count(), self.layout.tokens());
        let (p, width) = (layer.scan(0).width(), layer.scan(0).gates());
        let flops = d * 4 * t * width * p;
        let _timer = back.device().timer(Kind::RecurrentGradient, flops, &[&self.gates, &self.gates, dout, &self.kept]);
        let cpu = match back.device() {
            Device::Cpu(cpu) => cpu,
            Device::Cuda(cuda) => return self.scans_on_gpu(cuda, back, dout, dlast, dinitial.as_deref()),
        };
        with_float!(self.kept.dtype(), E => for direction in 0..d {
            let view = Directed::<E>::new(back.parameters, &layer, direction, self.initial.as_ref());
            let (mut recurrent, accumulate) = back.gradients.target(rows_of(layer.recurrent, direction, d))?;
            let of_bias = layer.recurrent_bias.map(|bias| back.gradients.sum(rows_of(bias, direction, d)));
            let mut bias = of_bias.transpose()?;
            let of_projection = layer.projection.map(|p| back.gradients.target(rows_of(p, direction, d)));
            let mut projection = of_projection.transpose()?;
            let gradients = Gradients {
                recurrent: (recurrent.slice_mut(), accumulate),
                bias: bias.as_mut().map(|bias| bias.slice_mut()),
                projection: projection.as_mut().map(|(to, accumulate)| (to.slice_mut(), *accumulate)),
                initial: dinitial.as_mut().map(|[hidden, cell]| StateMut {
                    hidden: part_mut::<E>(hidden, direction, d),
                    cell: part_mut::<E>(cell, direction, d),
                }),
            };
            let kept = Kept {
                gates: self.gates.slice_mut::<E>(),
                columns: Columns { at: direction * width, stride: d * width },
                aside: part_mut::<E>(&mut self.aside, direction, d),
            };
            let columns = Columns { at: direction * p, stride: d * p };
            let sequences = Sequences { offsets: self.layout.offsets(), order: self.order.slice() };
            let dlast = dlast.map(|[hidden, cell]| State {
                hidden: part::<E>(hidden, direction, d),
                cell: part::<E>(cell, direction, d),
            });
            let (out, dout) = ((self.kept.slice::<E>(), columns), (dout.slice::<E>(), columns));
            let weights = view.weights();
            kernels::backward(&cpu.kernels, &view.scan, sequences, weights, view.initial(), kept, out, dout, dlast, gradients);
        });
        Ok(())
    }

    fn scans_on_gpu(
        &self,
        cuda: &CudaDevice,
        back: &mut Backward<'_>,
        dout: &Tensor,
        dlast: Option<&[Tensor; 2]>,
        dinitial: Option<&[Tensor; 2]>,
    ) -> Result<()> {
        let (device, dtype, layer, scan) = (back.device(), self.kept.dtype(), &self.layer, self.layer.scan(0));
        let (d, t) = (layer.directions.count(), self.layout.tokens());
        let empty = |columns: usize| Tensor::empty(device, [t, d * columns], dtype);
        let before = empty(scan.width())?;
        let projected = match layer.projection {
            Some(_) => Some([empty(scan.hidden)?, empty(scan.width())?]),
            None => None,
        };
        let dsums = if scan.cell == Cell::Gru { Some(empty(scan.gates())?) } else { None };
        let work = cuda_kernels::Work {
            before: before.on_gpu(),
            projected: projected.as_ref().map(|both| both.each_ref().map(Tensor::on_gpu)),
            dsums: dsums.as_ref().map(Tensor::on_gpu),
        };
        let recurrent = back.gradients.target(layer.recurrent)?;
        let bias = layer.recurrent_bias.map(|bias| back.gradients.target(bias)).transpose()?;
        let projection = layer.projection.map(|projection| back.gradients.target(projection)).transpose()?;
        let gradients = cuda_kernels::Gradients {
            recurrent: sum_into(&recurrent),
            bias: bias.as_ref().map(sum_into),
            projection: projection.as_ref().map(sum_into),
            initial: dinitial.map(state_on_gpu),
        };
        let on_gpu = OnGpu::new(back.parameters, layer);
        let stepwise = self.layout.stepwise(device)?;
        let layer = on_gpu.layer(layer, &self.layout, stepwise, self.initial.as_ref())?;
        let (gates, aside) = (self.gates.on_gpu(), Some(self.aside.on_gpu()));
        let (out, dout, dlast) = (self.kept.on_gpu(), dout.on_gpu(), dlast.map(state_on_gpu));
        Ok(cuda_kernels::backward(&cuda.gpu, &layer, gates, aside, out, dout, dlast, work, gradients)?)
    }
}
