//! DeBERTa's attention over flat tokens: contents and relative positions are scored apart.
//!
//! Legend: A heads, D = head size, H = A·D; T tokens of all sequences; P rows of the tables of positions.

use henson_kernels::cpu::attention::disentangled::{self as kernels, Disentangled};
use henson_kernels::cpu::attention::{self as plain, LogBuckets, View, ViewMut};
use henson_kernels::cuda::Gpu;
use henson_kernels::cuda::attention::disentangled as cuda_kernels;
use henson_kernels::cuda::attention::general::Columns;

use super::{Op, with_float};
use crate::tape::{Backward, Dropout, Slot};
use crate::{DType, Device, Kind, Layout, Native, Pass, Result, Tensor, TensorError, Var};

/// The rows in the middle of a table of relative positions that a batch needs: short sequences have few distances.
///
/// It is an input of a pass, made along with its batch, so that its size tells recorded passes apart.
#[derive(Clone, Debug)]
pub struct RelativePositions {
    buckets: LogBuckets,
    first: usize,
    /// P×2: what dropout counts the rows by.
    rows: Tensor,
    /// What a GPU's kernels read of distances, and for sequences of up to how many tokens.
    on_gpu: Option<(Tensor, usize)>,
}

impl RelativePositions {
    /// Of a table with `table_rows` rows, the middle one for no distance; an even number.
    pub fn new(device: &Device, buckets: LogBuckets, table_rows: usize, layout: &Layout) -> Result<Self> {
        if table_rows == 0 || !table_rows.is_multiple_of(2) {
            let why = "a table of relative positions needs an even number of rows";
            return Err(TensorError::Unsupported { operation: "relative positions", why });
        }
        let longest = layout.offsets().windows(2).map(|w| (w[1] - w[0]) as usize).max().unwrap_or(0);
        let count = buckets.rows_for(longest, table_rows);
        let first = (table_rows - count) / 2;
        let ids: Vec<u32> = (first..first + count).flat_map(|row| [0, row as u32]).collect();
        let rows = Tensor::from_slice(device, [count, 2], &ids)?;
        let on_gpu = match device {
            Device::Cpu(_) => None,
            Device::Cuda(_) => {
                let longest = cuda_kernels::rounded_longest(longest);
                let table = cuda_kernels::distance_table(buckets, count, longest);
                Some((Tensor::from_slice(device, [table.len()], &table)?, longest))
            }
        };
        Ok(Self { buckets, first, rows, on_gpu })
    }

    /// The rows of the table.
    pub fn range(&self) -> std::ops::Range<usize> {
        self.first..self.first + self.rows.rows()
    }

    /// How distances become rows.
    pub fn buckets(&self) -> LogBuckets {
        self.buckets
    }
}

/// Positions as contents are compared with them: projections of P rows.
#[derive(Clone, Debug)]
pub enum PositionTables {
    /// Those that keys and those that queries are compared with side by side, as queries' and keys' projections lie: P×2H.
    Both(Var),
    /// P×H: what queries are compared with.
    Keys(Var),
    /// P×H: what keys are compared with.
    Queries(Var),
    /// P×H each.
    Apart {
        /// What queries are compared with.
        keys: Var,
        /// What keys are compared with.
        queries: Var,
    },
}

impl PositionTables {
    /// How many of the two there are.
    pub fn count(&self) -> usize {
        if matches!(self, Self::Keys(_) | Self::Queries(_)) { 1 } else { 2 }
    }

    /// The values, with their columns.
    fn vars(&self, h: usize) -> impl Iterator<Item = (&Var, usize)> {
        let (first, second) = match self {
            Self::Both(both) => ((both, 2 * h), None),
            Self::Keys(one) | Self::Queries(one) => ((one, h), None),
            Self::Apart { keys, queries } => ((keys, h), Some((queries, h))),
        };
        [Some(first), second].into_iter().flatten()
    }
}

impl Pass<'_> {
    /// Dropout of rows of a table of relative positions.
    pub fn dropout_positions(&mut self, x: Var, positions: &RelativePositions, (p, site): (f32, u32)) -> Result<Var> {
        self.drop_rows(x, &positions.rows, p, site)
    }

    /// What each token attends to: T×H. `qkv` holds query, key and value side by side (T×3H).
    pub fn disentangled(
        &mut self,
        heads: usize,
        qkv: Var,
        tables: PositionTables,
        positions: &RelativePositions,
        layout: &Layout,
        (p, site): (f32, u32),
    ) -> Result<Var> {
        let call = Call::new(self, heads, qkv, tables, positions, layout)?;
        self.reads(&call.attention);
        let (t, h) = (layout.tokens(), call.width());
        let mut out = Tensor::empty(self.device(), [t, h], self.dtype())?;
        let mut log_sums = Tensor::empty(self.device(), [heads, t], DType::F32)?;
        let dropout = self.dropout(p, site);
        let timer = self.device().timer(Kind::Attention, call.flops(), &[call.qkv.tensor(), &out]);
        match self.device() {
            Device::Cpu(cpu) => with_float!(out.dtype(), E => kernels::forward(
                &cpu.kernels,
                &call.attention,
                &call.inputs::<E>(),
                call.dropout_on_cpu(dropout.as_ref()),
                out.slice_mut::<E>(),
                log_sums.slice_mut(),
            )),
            Device::Cuda(cuda) => {
                let dropout = dropout.as_ref().and_then(Dropout::on_gpu);
                let inputs = call.inputs_on_gpu()?;
                cuda_kernels::forward(&cuda.gpu, &call.attention, &inputs, dropout, out.on_gpu(), log_sums.on_gpu())?;
            }
        }
        drop(timer);
        let kept = match self.device() {
            Device::Cpu(_) => None,
            Device::Cuda(_) => Some(out.clone()),
        };
        let y = self.var(out);
        if let Some(out) = y.slot() {
            self.record(Op::Disentangled(Recorded { call, log_sums, dropout, kept, out }));
        }
        Ok(y)
    }

    /// The probabilities that [`Pass::disentangled`] weighs with, before dropout: A×S×S for each sequence in turn.
    pub fn disentangled_maps(
        &mut self,
        heads: usize,
        qkv: &Var,
        tables: &PositionTables,
        positions: &RelativePositions,
        layout: &Layout,
    ) -> Result<Tensor> {
        let call = Call::new(self, heads, qkv.clone(), tables.clone(), positions, layout)?;
        let size = call.attention.content().probabilities(layout.offsets(), layout.offsets());
        let mut out = Tensor::empty(self.device(), [size], DType::F32)?;
        match self.device() {
            Device::Cpu(cpu) => with_float!(self.dtype(), E => {
                kernels::probabilities(&cpu.kernels, &call.attention, &call.inputs::<E>(), out.slice_mut());
            }),
            Device::Cuda(cuda) => {
                let (inputs, offsets) = (call.inputs_on_gpu()?, layout.offsets());
                cuda_kernels::probabilities(&cuda.gpu, &call.attention, &inputs, offsets, out.on_gpu())?;
            }
        }
        Ok(out)
    }
}

/// One attention: what it reads and how.
struct Call {
    attention: Disentangled,
    qkv: Var,
    tables: PositionTables,
    positions: RelativePositions,
    layout: Layout,
}

impl Call {
    fn new(
        pass: &Pass<'_>,
        heads: usize,
        qkv: Var,
        tables: PositionTables,
        positions: &RelativePositions,
        layout: &Layout,
    ) -> Result<Self> {
        let operation = "disentangled attention";
        let h = qkv.tensor().columns() / 3;
        if heads == 0 || h == 0 || !h.is_multiple_of(heads) {
            return Err(TensorError::Unsupported { operation, why: "the columns are not heads" });
        }
        qkv.tensor().check_shape(operation, "query, key and value", [layout.tokens(), 3 * h])?;
        qkv.tensor().check_dtype(operation, "query, key and value", pass.dtype())?;
        for (table, columns) in tables.vars(h) {
            table.tensor().check_shape(operation, "the positions", [positions.rows.rows(), columns])?;
            table.tensor().check_dtype(operation, "the positions", pass.dtype())?;
        }
        let attention = Disentangled::new(heads, h / heads, positions.buckets, tables.count());
        let longest = positions.on_gpu.as_ref().map(|(_, longest)| *longest);
        if let Some(why) = longest.and_then(|longest| cuda_kernels::unsupported(&attention, longest)) {
            return Err(TensorError::Unsupported { operation, why });
        }
        Ok(Self { attention, qkv, tables, positions: positions.clone(), layout: layout.clone() })
    }

    /// H.
    fn width(&self) -> usize {
        self.attention.heads * self.attention.head_size
    }

    fn inputs<E: Native>(&self) -> kernels::Inputs<'_, E> {
        let h = self.width();
        fn whole<E: Native>(x: &Var, h: usize) -> View<'_, E> {
            View::new(x.tensor().slice(), h)
        }
        let (position_key, position_query) = match &self.tables {
            PositionTables::Both(both) => {
                let [query, key] = View::split(both.tensor().slice::<E>(), [h, h]);
                (Some(key), Some(query))
            }
            PositionTables::Keys(keys) => (Some(whole(keys, h)), None),
            PositionTables::Queries(queries) => (None, Some(whole(queries, h))),
            PositionTables::Apart { keys, queries } => (Some(whole(keys, h)), Some(whole(queries, h))),
        };
        let [query, key, value] = View::split(self.qkv.tensor().slice(), [h, h, h]);
        let (query_offsets, key_offsets) = (self.layout.offsets(), self.layout.offsets());
        let content = plain::Inputs { query, key, value, query_offsets, key_offsets, bias: &[] };
        kernels::Inputs { content, position_key, position_query }
    }

    fn dropout_on_cpu(&self, dropout: Option<&Dropout>) -> plain::AttentionDropout<'_> {
        dropout.and_then(Dropout::on_cpu).map(|dropout| (dropout, self.layout.numbers().slice()))
    }

    fn inputs_on_gpu(&self) -> Result<cuda_kernels::Inputs<'_>> {
        let h = self.width();
        let [query, key, value] = Columns::split(self.qkv.tensor().on_gpu(), [h, h, h]);
        let mut tables = self.tables.vars(h).map(|(table, _)| table.tensor());
        let [position_key, position_query] = self.columns([tables.next(), tables.next()]);
        let Some((distances, longest)) = &self.positions.on_gpu else {
            let why = "the positions were made for the CPU";
            return Err(TensorError::Unsupported { operation: "disentangled attention", why });
        };
        let (sequences, distances, longest) = (self.layout.attention_table()?, distances.on_gpu(), *longest);
        Ok(cuda_kernels::Inputs { query, key, value, sequences, position_key, position_query, distances, longest })
    }

    /// What queries, and what keys, are compared with, in tensors that lie as the tables do.
    fn columns<'a>(&self, [first, second]: [Option<&'a Tensor>; 2]) -> [Option<Columns<'a>>; 2] {
        let h = self.width();
        let whole = |x: Option<&'a Tensor>| x.map(|x| Columns::new(x.on_gpu(), h));
        match self.tables {
            PositionTables::Both(_) => {
                let both = first.map(|both| Columns::split(both.on_gpu(), [h, h]));
                [both.map(|[_, key]| key), both.map(|[query, _]| query)]
            }
            PositionTables::Keys(_) => [whole(first), None],
            PositionTables::Queries(_) => [None, whole(first)],
            PositionTables::Apart { .. } => [whole(first), whole(second)],
        }
    }

    /// Of the forward: two products of contents, and one for each table with as many rows as the batch uses.
    fn flops(&self) -> usize {
        let offsets = self.layout.offsets();
        let pairs = self.attention.content().pairs(offsets, offsets);
        let by_position = self.tables.count() * self.layout.tokens() * self.positions.rows.rows();
        2 * (2 * pairs + by_position) * self.width()
    }
}

/// A recorded disentangled attention.
pub(crate) struct Recorded {
    call: Call,
    log_sums: Tensor,
    dropout: Option<Dropout>,
    /// The output, where the backward needs it.
    kept: Option<Tensor>,
    out: Slot,
}

impl Recorded {
    pub(super) fn backward(self, back: &mut Backward<'_>) -> Result<()> {
        let Some(dout) = back.take(self.out) else { return Ok(()) };
        let (call, h) = (&self.call, self.call.width());
        let like = |x: &Var| Tensor::empty(back.device(), x.tensor().shape(), x.tensor().dtype());
        let mut dqkv = like(&call.qkv)?;
        let mut dtables = [None, None];
        for (dtable, (table, _)) in dtables.iter_mut().zip(call.tables.vars(h)) {
            *dtable = Some(like(table)?);
        }
        // Scores again, and two gradients of each product.
        let moved = [call.qkv.tensor(), &dqkv, &dout, &dout];
        let timer = back.device().timer(Kind::AttentionGradient, call.flops() / 2 * 5, &moved);
        match back.device() {
            Device::Cpu(cpu) => with_float!(dout.dtype(), E => kernels::backward(
                &cpu.kernels,
                &call.attention,
                &call.inputs::<E>(),
                call.dropout_on_cpu(self.dropout.as_ref()),
                self.log_sums.slice(),
                dout.slice::<E>(),
                gradients::<E>(call, &mut dqkv, &mut dtables),
            )),
            Device::Cuda(cuda) => self.backward_on_gpu(&cuda.gpu, &dout, &dqkv, &dtables)?,
        }
        drop(timer);
        for ((table, _), gradient) in call.tables.vars(h).zip(dtables) {
            if let Some(gradient) = gradient {
                back.add(table.slot(), gradient)?;
            }
        }
        back.add(call.qkv.slot(), dqkv)
    }

    fn backward_on_gpu(&self, gpu: &Gpu, dout: &Tensor, dqkv: &Tensor, dtables: &[Option<Tensor>; 2]) -> Result<()> {
        let (call, h) = (&self.call, self.call.width());
        let [query, key, value] = Columns::split(dqkv.on_gpu(), [h, h, h]);
        let [position_key, position_query] = call.columns(dtables.each_ref().map(Option::as_ref));
        let gradients = cuda_kernels::Gradients { query, key, value, position_key, position_query };
        let dropout = self.dropout.as_ref().and_then(Dropout::on_gpu);
        let (out, log_sums) = (self.kept.as_ref().unwrap_or(dout).on_gpu(), self.log_sums.on_gpu());
        let (inputs, attention) = (call.inputs_on_gpu()?, &call.attention);
        Ok(cuda_kernels::backward(gpu, attention, &inputs, dropout, out, log_sums, dout.on_gpu(), gradients)?)
    }
}

/// The gradients' tensors as the kernel takes them.
fn gradients<'a, E: Native>(
    call: &Call,
    dqkv: &'a mut Tensor,
    [first, second]: &'a mut [Option<Tensor>; 2],
) -> kernels::Gradients<'a, E> {
    let h = call.width();
    let [query, key, value] = ViewMut::split(dqkv.slice_mut::<E>(), [h, h, h]);
    let slice = |x: &'a mut Option<Tensor>| x.as_mut().map(|x| x.slice_mut::<E>()).unwrap_or_default();
    let (position_key, position_query) = match call.tables {
        PositionTables::Both(_) => {
            let [query, key] = ViewMut::split(slice(first), [h, h]);
            (Some(key), Some(query))
        }
        PositionTables::Keys(_) => (Some(ViewMut::new(slice(first), h)), None),
        PositionTables::Queries(_) => (None, Some(ViewMut::new(slice(first), h))),
        PositionTables::Apart { .. } => (Some(ViewMut::new(slice(first), h)), Some(ViewMut::new(slice(second), h))),
    };
    kernels::Gradients { query, key, value, position_key, position_query }
}
