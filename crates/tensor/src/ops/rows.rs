//! Operations on whole rows: picking, dropping, pooling.

use henson_kernels::cpu::rows as kernels;
use henson_kernels::cuda::Gpu;
use henson_kernels::cuda::rows::{self as cuda_kernels, Columns, Sorted};

use super::{Op, cast, copy, own, with_float};
use crate::tape::{Backward, Dropout, Slot};
use crate::{DType, Device, Kind, Layout, Param, Pass, Result, Tensor, TensorError, Var};

/// How the tokens of a sequence become one vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// Their mean.
    Mean,
    /// The first token.
    First,
    /// The largest value of each column.
    Max,
}

impl Pass<'_> {
    /// The rows of `x` (T×H) that `rows` (P, u32) names: P×H. A row may be named several times; on a GPU,
    /// [`Device::NOWHERE`] gives zeros.
    pub fn gather(&mut self, x: &Var, rows: &Tensor) -> Result<Var> {
        self.pick(x, rows, false)
    }

    /// The first token of every sequence: T×H → B×H. A layout's starts are distinct, so that the gradient needs no sorting.
    pub fn first_tokens(&mut self, x: &Var, layout: &Layout) -> Result<Var> {
        self.pick(x, layout.starts(), true)
    }

    /// The last token of every sequence: T×H → B×H.
    pub fn last_tokens(&mut self, x: &Var, layout: &Layout) -> Result<Var> {
        self.pick(x, layout.ends(), true)
    }

    fn pick(&mut self, x: &Var, rows: &Tensor, distinct: bool) -> Result<Var> {
        let (t, h) = (x.tensor().rows(), x.tensor().columns());
        rows.check_dtype("gather", "rows", DType::U32)?;
        check_indices("gather", "row", self.device(), rows, t)?;
        let mut out = Tensor::empty(self.device(), [rows.shape().elements(), h], x.tensor().dtype())?;
        let timer = self.device().timer(Kind::Rows, 0, &[&out, &out]);
        match self.device() {
            Device::Cpu(cpu) => with_float!(out.dtype(), E => {
                kernels::gather(&cpu.kernels, x.tensor().slice::<E>(), h, rows.slice(), out.slice_mut());
            }),
            Device::Cuda(cuda) => {
                cuda_kernels::gather(&cuda.gpu, x.tensor().on_gpu(), h, rows.on_gpu(), out.on_gpu())?;
            }
        }
        drop(timer);
        let y = self.var(out);
        if let Some(out) = y.slot() {
            self.record(Op::Gather(Gather { x: x.clone(), rows: rows.clone(), distinct, out }));
        }
        Ok(y)
    }

    /// The rows of two values in one of N: row i of `first` becomes row `places[0][i]` (u32), and the other's likewise. Each of the N
    /// rows must be named once.
    pub fn join(&mut self, first: &Var, second: &Var, places: [&Tensor; 2]) -> Result<Var> {
        let (h, dtype) = (first.tensor().columns(), first.tensor().dtype());
        let n = first.tensor().rows() + second.tensor().rows();
        let mut out = Tensor::empty(self.device(), [n, h], dtype)?;
        let timer = self.device().timer(Kind::Rows, 0, &[&out, &out]);
        for (i, (x, places)) in [first, second].into_iter().zip(places).enumerate() {
            let rows = x.tensor().rows();
            x.tensor().check_shape("join", "the rows", [rows, h])?;
            x.tensor().check_dtype("join", "the rows", dtype)?;
            places.check_shape("join", "the places", [rows])?;
            places.check_dtype("join", "the places", DType::U32)?;
            check_indices("join", "place", self.device(), places, n)?;
            match self.device() {
                // To add to zeros is to write, where each row is named once.
                Device::Cpu(cpu) => with_float!(dtype, E => {
                    let (x, places) = (x.tensor().slice::<E>(), places.slice());
                    kernels::scatter_add(&cpu.kernels, x, h, places, out.slice_mut::<E>(), i == 0);
                }),
                Device::Cuda(cuda) => {
                    let (x, places) = (x.tensor().on_gpu(), places.on_gpu());
                    cuda_kernels::scatter_distinct(&cuda.gpu, x, h, places, out.on_gpu(), i == 0)?;
                }
            }
        }
        drop(timer);
        let y = self.var(out);
        if let Some(out) = y.slot() {
            let [a, b] = places;
            let (terms, places) = ([first.slot(), second.slot()], [a.clone(), b.clone()]);
            self.record(Op::Join(Joined { terms, places, columns: h, out }));
        }
        Ok(y)
    }

    /// The columns of two values side by side: T×A and T×B → T×(A + B).
    pub fn beside(&mut self, first: &Var, second: &Var) -> Result<Var> {
        let (t, dtype) = (first.tensor().rows(), first.tensor().dtype());
        let [a, b] = [first, second].map(|x| x.tensor().columns());
        second.tensor().check_shape("beside", "the second", [t, b])?;
        second.tensor().check_dtype("beside", "the second", dtype)?;
        let mut out = Tensor::empty(self.device(), [t, a + b], dtype)?;
        let timer = self.device().timer(Kind::Rows, 0, &[&out, &out]);
        put_columns(self.device(), first.tensor(), &mut out, 0)?;
        put_columns(self.device(), second.tensor(), &mut out, a)?;
        drop(timer);
        let y = self.var(out);
        if let Some(out) = y.slot() {
            self.record(Op::Beside(Beside { terms: [first, second].map(|x| (x.slot(), x.tensor().columns())), out }));
        }
        Ok(y)
    }

    /// Numbers that no gradient is wanted of, such as what was computed in an earlier pass.
    pub fn constant(&mut self, numbers: &Tensor) -> Result<Var> {
        self.reads(&numbers.shape());
        Ok(Var::without_gradient(cast(self.device(), numbers, self.dtype())?))
    }

    /// The numbers of a parameter themselves, such as a table that is normalised before its use.
    pub fn table(&mut self, table: Param) -> Var {
        self.reads(&table);
        let y = self.var(self.parameters().matrix(table));
        if let Some(out) = y.slot() {
            self.record(Op::Table(Table { table, out }));
        }
        y
    }

    /// Numbers that come from elsewhere and get no gradient, in the pass's dtype.
    pub fn input(&mut self, x: &Tensor) -> Result<Var> {
        if x.dtype() == DType::U32 {
            let (what, expected, got) = ("the input", self.dtype(), x.dtype());
            return Err(TensorError::DType { operation: "input", what, expected, got });
        }
        self.reads(&x.shape());
        Ok(Var::without_gradient(cast(self.device(), x, self.dtype())?))
    }

    /// Dropout of the same columns at every token of a sequence (T×H), as in recurrent networks (Gal and Ghahramani 2016).
    pub fn variational_dropout(&mut self, x: Var, layout: &Layout, (p, site): (f32, u32)) -> Result<Var> {
        let mut rows = Tensor::empty(self.device(), [layout.tokens(), 2], DType::U32)?;
        let tokens = layout.token_rows();
        match self.device() {
            Device::Cpu(_) => {
                let pairs = rows.slice_mut::<u32>().chunks_exact_mut(2).zip(tokens.slice::<u32>().chunks_exact(2));
                pairs.for_each(|(to, token)| to.copy_from_slice(&[token[0], 0]));
            }
            Device::Cuda(cuda) => cuda_kernels::sequence_rows(&cuda.gpu, tokens.on_gpu(), rows.on_gpu())?,
        }
        self.drop_rows(x, &rows, p, site)
    }

    /// Dropout of one vector a sequence (B×H): what heads apply to the pooled output.
    pub fn dropout_sequences(&mut self, x: Var, layout: &Layout, (p, site): (f32, u32)) -> Result<Var> {
        self.drop_rows(x, layout.first_rows(), p, site)
    }

    /// Dropout of every token (T×H).
    pub fn dropout_tokens(&mut self, x: Var, layout: &Layout, (p, site): (f32, u32)) -> Result<Var> {
        self.drop_rows(x, layout.token_rows(), p, site)
    }

    pub(super) fn drop_rows(&mut self, x: Var, rows: &Tensor, p: f32, site: u32) -> Result<Var> {
        let Some(dropout) = self.dropout(p, site) else { return Ok(x) };
        rows.check_shape("dropout", "the layout", [x.tensor().rows(), 2])?;
        let x_slot = x.slot();
        // The layer before may need its output in the backward pass (tanh does not, but a caller may hold it).
        let mut out = own(self.device(), x.into_tensor())?;
        drop_in_place(self.device(), &mut out, &dropout, rows)?;
        let y = self.var(out);
        if let Some(out) = y.slot() {
            self.record(Op::Dropout(Dropped { x: x_slot, dropout, rows: rows.clone(), out }));
        }
        Ok(y)
    }

    /// residual + dropout(x): the end of a pre-norm block that no norm follows at once. Rows are the layout's tokens.
    pub fn add_residual(&mut self, x: Var, residual: &Var, layout: &Layout, (p, site): (f32, u32)) -> Result<Var> {
        residual.tensor().check_shape("add_residual", "the residual", x.tensor().shape())?;
        residual.tensor().check_dtype("add_residual", "the residual", x.tensor().dtype())?;
        let x = self.drop_rows(x, layout.token_rows(), p, site)?;
        let x_slot = x.slot();
        let mut out = own(self.device(), x.into_tensor())?;
        super::add(self.device(), residual.tensor(), &mut out)?;
        let y = self.var(out);
        if let Some(out) = y.slot() {
            self.record(Op::Sum(Sum { terms: [x_slot, residual.slot()], out }));
        }
        Ok(y)
    }

    /// The mean of each sequence's rows (T×H), in their dtype: B×H.
    pub fn means(&mut self, x: &Var, layout: &Layout) -> Result<Var> {
        let exact = self.pooled(x, layout, Pooling::Mean)?;
        let means = cast(self.device(), &exact, x.tensor().dtype())?;
        drop(exact);
        let y = self.var(means);
        if let Some(out) = y.slot() {
            self.record(Op::Means(Means { x: x.clone(), layout: layout.clone(), out }));
        }
        Ok(y)
    }

    /// The largest of each sequence's rows (T×H), column by column, in their dtype: B×H.
    pub fn maxima(&mut self, x: &Var, layout: &Layout) -> Result<Var> {
        let exact = self.pooled(x, layout, Pooling::Max)?;
        let largest = cast(self.device(), &exact, x.tensor().dtype())?;
        drop(exact);
        let y = self.var(largest);
        if let Some(out) = y.slot() {
            self.record(Op::Maxima(Maxima { x: x.clone(), layout: layout.clone(), out }));
        }
        Ok(y)
    }

    /// One vector a sequence (B×H), in f32; for inference. In training, see [`Pass::means`], [`Pass::maxima`] and
    /// [`Pass::unit_means`].
    pub fn pool(&mut self, x: &Var, layout: &Layout, pooling: Pooling) -> Result<Tensor> {
        if self.is_training() {
            return Err(TensorError::Unsupported { operation: "pool", why: "it has no backward" });
        }
        self.pooled(x, layout, pooling)
    }

    pub(super) fn pooled(&mut self, x: &Var, layout: &Layout, pooling: Pooling) -> Result<Tensor> {
        let (x, h) = (x.tensor(), x.tensor().columns());
        x.check_shape("pool", "the input", [layout.tokens(), h])?;
        let mut out = Tensor::empty(self.device(), [layout.sequences(), h], DType::F32)?;
        match self.device() {
            Device::Cpu(cpu) => with_float!(x.dtype(), E => {
                let (x, offsets, out) = (x.slice::<E>(), layout.offsets(), out.slice_mut::<f32>());
                match pooling {
                    Pooling::Mean => kernels::segment_mean(&cpu.kernels, x, h, offsets, out),
                    Pooling::Max => kernels::segment_max(&cpu.kernels, x, h, offsets, out),
                    Pooling::First => {
                        for (start, out) in offsets.iter().zip(out.chunks_exact_mut(h.max(1))) {
                            for (x, out) in x[*start as usize * h..].iter().zip(out) {
                                *out = henson_kernels::cpu::Element::to_f32(*x);
                            }
                        }
                    }
                }
            }),
            Device::Cuda(cuda) => {
                let (gpu, offsets) = (&cuda.gpu, layout.offsets_on_gpu()?.on_gpu());
                match pooling {
                    Pooling::Mean => cuda_kernels::segment_mean(gpu, x.on_gpu(), h, offsets, out.on_gpu())?,
                    Pooling::Max => cuda_kernels::segment_max(gpu, x.on_gpu(), h, offsets, out.on_gpu())?,
                    Pooling::First => {
                        cuda_kernels::gather(gpu, x.on_gpu(), h, layout.starts().on_gpu(), out.on_gpu())?;
                    }
                }
            }
        }
        Ok(out)
    }

    /// Divides every row of an f32 tensor by its length.
    pub fn normalise_rows(&mut self, x: Tensor) -> Result<Tensor> {
        x.check_dtype("normalise_rows", "the input", DType::F32)?;
        let mut x = own(self.device(), x)?;
        let h = x.columns();
        match self.device() {
            Device::Cpu(cpu) => kernels::l2_normalise(&cpu.kernels, x.slice_mut::<f32>(), h),
            Device::Cuda(cuda) => cuda_kernels::l2_normalise(&cuda.gpu, x.on_gpu(), h)?,
        }
        Ok(x)
    }
}

/// Refuses indices outside of `0..end`; on the CPU a look at each is cheap beside moving its row. On a GPU the kernels look,
/// and the error comes when something is read.
pub(super) fn check_indices(
    operation: &'static str,
    what: &'static str,
    device: &Device,
    indices: &Tensor,
    end: usize,
) -> Result<()> {
    match device {
        Device::Cpu(_) => match indices.slice::<u32>().iter().find(|index| **index as usize >= end) {
            Some(index) => Err(TensorError::Index { operation, what, index: *index as usize, end }),
            None => Ok(()),
        },
        Device::Cuda(_) => Ok(()),
    }
}

/// The columns of `x` become those of `out` from `first` on.
pub(super) fn put_columns(device: &Device, x: &Tensor, out: &mut Tensor, first: usize) -> Result<()> {
    let (count, stride) = (x.columns(), out.columns());
    match device {
        Device::Cpu(_) => with_float!(out.dtype(), E => {
            let rows = x.slice::<E>().chunks_exact(count.max(1));
            let to = out.slice_mut::<E>().chunks_exact_mut(stride.max(1));
            to.zip(rows).for_each(|(to, row)| to[first..first + count].copy_from_slice(row));
        }),
        Device::Cuda(cuda) => {
            let (from, to) = (Columns::all(count), Columns { first, count, stride });
            cuda_kernels::copy_columns(&cuda.gpu, x.on_gpu(), from, out.on_gpu(), to)?;
        }
    }
    Ok(())
}

/// The other way round: those of `x`, whose rows have `stride` numbers, become all of `out`.
pub(super) fn take_columns(
    device: &Device,
    (x, stride): (&Tensor, usize),
    first: usize,
    out: &mut Tensor,
) -> Result<()> {
    let count = out.columns();
    match device {
        Device::Cpu(_) => with_float!(out.dtype(), E => {
            let rows = x.slice::<E>().chunks_exact(stride.max(1));
            let to = out.slice_mut::<E>().chunks_exact_mut(count.max(1));
            to.zip(rows).for_each(|(to, row)| to.copy_from_slice(&row[first..first + count]));
        }),
        Device::Cuda(cuda) => {
            let (from, to) = (Columns { first, count, stride }, Columns::all(count));
            cuda_kernels::copy_columns(&cuda.gpu, x.on_gpu(), from, out.on_gpu(), to)?;
        }
    }
    Ok(())
}

pub(super) fn drop_in_place(device: &Device, x: &mut Tensor, dropout: &Dropout, rows: &Tensor) -> Result<()> {
    let h = x.columns();
    match device {
        Device::Cpu(cpu) => with_float!(x.dtype(), E => {
            let rows = bytemuck::cast_slice(rows.slice::<u32>());
            if let Some(dropout) = dropout.on_cpu() {
                kernels::drop(&cpu.kernels, x.slice_mut::<E>(), h, &dropout, rows);
            }
        }),
        Device::Cuda(cuda) => {
            if let Some(dropout) = dropout.on_gpu() {
                cuda_kernels::drop(&cuda.gpu, x.on_gpu(), h, dropout, rows.on_gpu())?;
            }
        }
    }
    Ok(())
}

/// Adds each row of `dy` to the row of `dx` that its index names, on a GPU; `dx` is zeroed first on demand.
pub(super) fn add_sorted(
    device: &Device,
    gpu: &Gpu,
    dy: &Tensor,
    indices: &Tensor,
    dx: &Tensor,
    zero_first: bool,
) -> Result<()> {
    let room = || Tensor::empty(device, indices.shape(), DType::U32);
    let (keys, order) = (room()?, room()?);
    let sorted = Sorted { keys: keys.on_gpu(), order: order.on_gpu() };
    cuda_kernels::sort(gpu, indices.on_gpu(), dx.rows(), sorted)?;
    // Not the columns of dy: whoever used the rows may have given them another shape.
    Ok(cuda_kernels::scatter_add(gpu, dy.on_gpu(), dx.columns(), sorted, dx.on_gpu(), zero_first)?)
}

/// A recorded choice of rows.
pub(crate) struct Gather {
    x: Var,
    rows: Tensor,
    /// Whether no row is named twice.
    distinct: bool,
    out: Slot,
}

impl Gather {
    pub(super) fn backward(self, back: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = back.take(self.out) else { return Ok(()) };
        let Some(slot) = self.x.slot() else { return Ok(()) };
        let (mut dx, accumulate) = back.target(slot, self.x.tensor())?;
        let _timer = back.device().timer(Kind::Rows, 0, &[&dy, &dx]);
        match back.device() {
            Device::Cpu(cpu) => with_float!(dx.dtype(), E => {
                let (dy, rows, h) = (dy.slice::<E>(), self.rows.slice(), self.x.tensor().columns());
                kernels::scatter_add(&cpu.kernels, dy, h, rows, dx.slice_mut::<E>(), !accumulate);
            }),
            Device::Cuda(cuda) => {
                let (rows, h) = (self.rows.on_gpu(), self.x.tensor().columns());
                if self.distinct {
                    cuda_kernels::scatter_distinct(&cuda.gpu, dy.on_gpu(), h, rows, dx.on_gpu(), !accumulate)?;
                } else {
                    add_sorted(back.device(), &cuda.gpu, &dy, &self.rows, &dx, !accumulate)?;
                }
            }
        }
        Ok(())
    }
}

/// Recorded maxima.
pub(crate) struct Maxima {
    x: Var,
    layout: Layout,
    out: Slot,
}

impl Maxima {
    pub(super) fn backward(self, back: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = back.take(self.out) else { return Ok(()) };
        let Some(slot) = self.x.slot() else { return Ok(()) };
        let (mut dx, accumulate) = back.target(slot, self.x.tensor())?;
        // Not the gradient's own columns: whoever used the maxima may have given them another shape.
        let (x, h) = (self.x.tensor(), dx.columns());
        let _timer = back.device().timer(Kind::Rows, 0, &[x, &dx]);
        match back.device() {
            Device::Cpu(cpu) => with_float!(dx.dtype(), E => {
                let (x, dy, offsets) = (x.slice::<E>(), dy.slice::<E>(), self.layout.offsets());
                kernels::segment_max_gradient(&cpu.kernels, x, dy, h, offsets, dx.slice_mut::<E>(), !accumulate);
            }),
            Device::Cuda(cuda) => {
                let (x, dy, offsets) = (x.on_gpu(), dy.on_gpu(), self.layout.offsets_on_gpu()?.on_gpu());
                cuda_kernels::segment_max_gradient(&cuda.gpu, x, dy, h, offsets, dx.on_gpu(), !accumulate)?;
            }
        }
        Ok(())
    }
}

/// Recorded means.
pub(crate) struct Means {
    x: Var,
    layout: Layout,
    out: Slot,
}

impl Means {
    pub(super) fn backward(self, back: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = back.take(self.out) else { return Ok(()) };
        let Some(slot) = self.x.slot() else { return Ok(()) };
        let dy = cast(back.device(), &dy, DType::F32)?;
        spread_means(back, &dy, &self.x, slot, &self.layout)
    }
}

/// Adds the gradient of sequences' means (B×H, f32) to that of their tokens.
pub(super) fn spread_means(back: &mut Backward<'_>, dy: &Tensor, x: &Var, slot: Slot, layout: &Layout) -> Result<()> {
    let (mut dx, accumulate) = back.target(slot, x.tensor())?;
    // Not the gradient's own columns: whoever used the means may have given them another shape.
    let h = dx.columns();
    let _timer = back.device().timer(Kind::Rows, 0, &[dy, &dx]);
    match back.device() {
        Device::Cpu(cpu) => with_float!(dx.dtype(), E => {
            let (dy, dx) = (dy.slice::<f32>(), dx.slice_mut::<E>());
            kernels::segment_mean_gradient(&cpu.kernels, dy, h, layout.offsets(), dx, !accumulate);
        }),
        Device::Cuda(cuda) => {
            let offsets = layout.offsets_on_gpu()?.on_gpu();
            cuda_kernels::segment_mean_gradient(&cuda.gpu, dy.on_gpu(), h, offsets, dx.on_gpu(), !accumulate)?;
        }
    }
    Ok(())
}

/// A recorded use of a parameter as a value.
pub(crate) struct Table {
    table: Param,
    out: Slot,
}

impl Table {
    pub(super) fn backward(self, back: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = back.take(self.out) else { return Ok(()) };
        let dy = cast(back.device(), &dy, DType::F32)?;
        let mut gradient = back.gradients.sum(self.table)?;
        super::add(back.device(), &dy, &mut gradient)
    }
}

/// A recorded join.
pub(crate) struct Joined {
    terms: [Option<Slot>; 2],
    places: [Tensor; 2],
    /// H: the gradient may come in the shape that its rows were used in.
    columns: usize,
    out: Slot,
}

impl Joined {
    pub(super) fn backward(self, back: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = back.take(self.out) else { return Ok(()) };
        for (term, places) in self.terms.into_iter().zip(&self.places) {
            if term.is_none() {
                continue;
            }
            let mut dx = Tensor::empty(back.device(), [places.shape().elements(), self.columns], dy.dtype())?;
            let timer = back.device().timer(Kind::Rows, 0, &[&dx, &dx]);
            match back.device() {
                Device::Cpu(cpu) => with_float!(dx.dtype(), E => {
                    let (dy, h) = (dy.slice::<E>(), self.columns);
                    kernels::gather(&cpu.kernels, dy, h, places.slice(), dx.slice_mut());
                }),
                Device::Cuda(cuda) => {
                    cuda_kernels::gather(&cuda.gpu, dy.on_gpu(), self.columns, places.on_gpu(), dx.on_gpu())?;
                }
            }
            drop(timer);
            back.add(term, dx)?;
        }
        Ok(())
    }
}

/// Recorded columns side by side.
pub(crate) struct Beside {
    /// With their columns.
    terms: [(Option<Slot>, usize); 2],
    out: Slot,
}

impl Beside {
    pub(super) fn backward(self, back: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = back.take(self.out) else { return Ok(()) };
        // Not the gradient's own columns: whoever used them may have given them another shape.
        let both = self.terms[0].1 + self.terms[1].1;
        let (t, mut start) = (dy.shape().elements() / both.max(1), 0);
        for (term, columns) in self.terms {
            if term.is_some() {
                let mut dx = Tensor::empty(back.device(), [t, columns], dy.dtype())?;
                let timer = back.device().timer(Kind::Rows, 0, &[&dx, &dx]);
                take_columns(back.device(), (&dy, both), start, &mut dx)?;
                drop(timer);
                back.add(term, dx)?;
            }
            start += columns;
        }
        Ok(())
    }
}

/// A recorded sum of two.
pub(crate) struct Sum {
    terms: [Option<Slot>; 2],
    out: Slot,
}

impl Sum {
    pub(super) fn backward(self, back: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = back.take(self.out) else { return Ok(()) };
        let [x, residual] = self.terms;
        back.add(residual, dy.clone())?;
        back.add(x, dy)
    }
}

/// A recorded dropout.
pub(crate) struct Dropped {
    x: Option<Slot>,
    dropout: Dropout,
    rows: Tensor,
    out: Slot,
}

impl Dropped {
    pub(super) fn backward(self, back: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = back.take(self.out) else { return Ok(()) };
        let mut dx = if dy.is_unique() { dy } else { copy(back.device(), &dy)? };
        drop_in_place(back.device(), &mut dx, &self.dropout, &self.rows)?;
        back.add(self.x, dx)
    }
}
