//! The attention of Transformer-XL and XLNet over flat tokens: contents, distances and segments are scored apart, each with a bias of
//! its own.
//!
//! Legend: A heads, D = head size, H = A·D; N queries and M keys in all sequences of a batch; P rows of the table of positions.

use std::sync::Arc;

use henson_kernels::cpu::attention::xl::{self as kernels, Relations, UNSEEN, Xl};
use henson_kernels::cpu::attention::{self as plain, View, ViewMut};
use henson_kernels::cuda::Gpu;
use henson_kernels::cuda::attention::general::{Columns, Cross};
use henson_kernels::cuda::attention::xl as cuda_kernels;

use super::attention::columns;
use super::rows::drop_in_place;
use super::{Op, QueryKeyValue, sum_into, with_float};
use crate::tape::{Backward, Dropout, Slot};
use crate::{DType, Device, Kind, Layout, Native, Param, Parameters, Pass, Result, Tensor, TensorError, Var};

const OPERATION: &str = "Transformer-XL's attention";

/// How the queries of a batch stand to its keys. It is an input of a pass, made along with its batch. Cheap to clone.
#[derive(Clone, Debug)]
pub struct XlRelations {
    all: Arc<Numbers>,
    /// Whether segments count, where there are any.
    segmented: bool,
}

#[derive(Debug)]
struct Numbers {
    queries: Layout,
    keys: Layout,
    places: Option<Tensor>,
    segments: Option<[Tensor; 2]>,
    orders: Option<[Tensor; 2]>,
}

impl XlRelations {
    /// Of these queries and keys, of which sequence i attends to sequence i. A sequence must not have more queries than keys, and every
    /// query must see a key.
    pub fn new(device: &Device, (queries, keys): (&Layout, &Layout), numbers: Relations<'_>) -> Result<Self> {
        check_relations(queries, keys, &numbers)?;
        // What fills a batch up stands at the first place, has the first segment, and sees everything that fills it up.
        let tensor = |numbers: &[u32], layout: &Layout, filling: u32| {
            let mut all = numbers.to_vec();
            all.resize(layout.tokens(), filling);
            Tensor::from_slice(device, [all.len()], &all)
        };
        let both = |numbers: Option<[&[u32]; 2]>, order: u32| match numbers {
            Some([own, other]) => Ok::<_, TensorError>(Some([tensor(own, queries, order)?, tensor(other, keys, 0)?])),
            None => Ok(None),
        };
        let all = Numbers {
            queries: queries.clone(),
            keys: keys.clone(),
            places: numbers.places.map(|places| tensor(places, queries, 0)).transpose()?,
            segments: both(numbers.segments, 0)?,
            orders: both(numbers.orders, 1)?,
        };
        Ok(Self { segmented: all.segments.is_some(), all: Arc::new(all) })
    }

    /// The sequences of the queries.
    pub fn queries(&self) -> &Layout {
        &self.all.queries
    }

    /// The sequences of the keys.
    pub fn keys(&self) -> &Layout {
        &self.all.keys
    }

    /// Whether tokens have segments.
    pub fn has_segments(&self) -> bool {
        self.segmented
    }

    /// The same without segments: what they add to scores is left out.
    pub fn without_segments(&self) -> Self {
        Self { segmented: false, ..self.clone() }
    }

    fn on_gpu(&self) -> cuda_kernels::Relations<'_> {
        fn both(tensors: &Option<[Tensor; 2]>) -> Option<[henson_kernels::cuda::View<'_>; 2]> {
            tensors.as_ref().map(|tensors| tensors.each_ref().map(Tensor::on_gpu))
        }
        cuda_kernels::Relations {
            places: self.all.places.as_ref().map(Tensor::on_gpu),
            segments: both(&self.all.segments).filter(|_| self.segmented),
            orders: both(&self.all.orders),
        }
    }

    fn slices(&self) -> Relations<'_> {
        fn both(tensors: &Option<[Tensor; 2]>) -> Option<[&[u32]; 2]> {
            tensors.as_ref().map(|tensors| tensors.each_ref().map(|tensor| tensor.slice()))
        }
        Relations {
            places: self.all.places.as_ref().map(|places| places.slice()),
            segments: both(&self.all.segments).filter(|_| self.segmented),
            orders: both(&self.all.orders),
        }
    }
}

/// What queries are scored with besides contents.
#[derive(Clone, Debug)]
pub struct XlTables {
    /// P×H: the projection of a [`Sinusoids`] table.
    pub positions: Var,
    /// The distance of its first row.
    pub first: usize,
    /// 3·H: what is added to queries before they meet contents, positions and segments.
    pub biases: Param,
    /// 2×H: of the same segment, of another; none where segments do not count.
    pub segments: Option<Param>,
}

/// A table of distances: sines, then cosines.
#[derive(Clone, Debug)]
pub struct Sinusoids {
    /// P×H, nothing to train.
    pub table: Var,
    /// The distance of the first row; each has one less.
    pub first: usize,
}

impl Sinusoids {
    /// For how many keys a table of distances is made where `longest` are needed: on a GPU for somewhat more, so that few sizes occur
    /// and what fills a batch up has its distances.
    pub fn distances_for(device: &Device, longest: usize) -> usize {
        match device {
            Device::Cpu(_) => longest,
            Device::Cuda(_) => cuda_kernels::rounded_longest(longest),
        }
    }
}

impl Pass<'_> {
    /// The distances within sequences of up to `longest` keys. Those beyond `most` on either side count as that many. Dropout is the
    /// same for a distance in all sequences.
    pub fn sinusoids(&mut self, longest: usize, most: usize, width: usize, (p, site): (f32, u32)) -> Result<Sinusoids> {
        if width == 0 || !width.is_multiple_of(2) {
            return Err(TensorError::Unsupported { operation: "sinusoids", why: "the width is not an even number" });
        }
        let (rows, first) = match self.device() {
            Device::Cpu(_) => (2 * longest.max(1) - 1, longest.max(1) - 1),
            Device::Cuda(_) => cuda_kernels::table_for(longest),
        };
        let mut table = Tensor::empty(self.device(), [rows, width], self.dtype())?;
        // What dropout counts rows by: the distance, which does not depend on the longest sequence.
        let mut ids = Tensor::empty(self.device(), [rows, 2], DType::U32)?;
        match self.device() {
            Device::Cpu(cpu) => {
                with_float!(table.dtype(), E => {
                    kernels::sinusoids::<E>(&cpu.kernels, first, most, width, table.slice_mut());
                });
                for (row, id) in ids.slice_mut::<u32>().chunks_exact_mut(2).enumerate() {
                    id.copy_from_slice(&[u32::from(row > first), first.abs_diff(row) as u32]);
                }
            }
            Device::Cuda(cuda) => {
                cuda_kernels::sinusoids(&cuda.gpu, first, most, width, table.on_gpu(), ids.on_gpu())?;
            }
        }
        if let Some(dropout) = self.dropout(p, site) {
            drop_in_place(self.device(), &mut table, &dropout, &ids)?;
        }
        self.reads(&(rows, width, most));
        Ok(Sinusoids { table: Var::without_gradient(table), first })
    }

    /// What each query attends to: N×H.
    pub fn xl_attention(
        &mut self,
        attention: &Xl,
        from: QueryKeyValue,
        tables: XlTables,
        relations: &XlRelations,
        (p, site): (f32, u32),
    ) -> Result<Var> {
        let call = Call::new(self, attention, from, tables, relations)?;
        self.reads(attention);
        let queries = relations.queries().tokens();
        let mut out = Tensor::empty(self.device(), [queries, call.width()], self.dtype())?;
        let mut log_sums = Tensor::empty(self.device(), [attention.heads, queries], DType::F32)?;
        let dropout = self.dropout(p, site);
        let [query, key, value] = call.from.parts();
        let timer = self.device().timer(Kind::Attention, call.flops(), &[query, key, value, &out]);
        match self.device() {
            Device::Cpu(cpu) => with_float!(out.dtype(), E => kernels::forward(
                &cpu.kernels,
                attention,
                &call.inputs::<E>(self.parameters()),
                call.dropout(dropout.as_ref()),
                out.slice_mut::<E>(),
                log_sums.slice_mut(),
            )),
            Device::Cuda(cuda) => {
                let (dropout, vectors) = (dropout.as_ref().and_then(Dropout::on_gpu), call.vectors(self.parameters()));
                let inputs = call.inputs_on_gpu(&vectors)?;
                cuda_kernels::forward(&cuda.gpu, attention, &inputs, dropout, out.on_gpu(), log_sums.on_gpu())?;
            }
        }
        drop(timer);
        let kept = match self.device() {
            Device::Cpu(_) => None,
            Device::Cuda(_) => Some(out.clone()),
        };
        let y = self.var(out);
        if let Some(out) = y.slot() {
            self.record(Op::Xl(Recorded { call, log_sums, dropout, kept, out }));
        }
        Ok(y)
    }

    /// The probabilities that [`Pass::xl_attention`] weighs with, before dropout: A×N×M for each sequence in turn.
    pub fn xl_attention_maps(
        &mut self,
        attention: &Xl,
        from: &QueryKeyValue,
        tables: &XlTables,
        relations: &XlRelations,
    ) -> Result<Tensor> {
        let call = Call::new(self, attention, from.clone(), tables.clone(), relations)?;
        let offsets = (relations.queries().offsets(), relations.keys().offsets());
        let size = attention.content().probabilities(offsets.0, offsets.1);
        let mut out = Tensor::empty(self.device(), [size], DType::F32)?;
        match self.device() {
            Device::Cpu(cpu) => with_float!(self.dtype(), E => {
                kernels::probabilities(&cpu.kernels, attention, &call.inputs::<E>(self.parameters()), out.slice_mut());
            }),
            Device::Cuda(cuda) => {
                let vectors = call.vectors(self.parameters());
                let inputs = call.inputs_on_gpu(&vectors)?;
                cuda_kernels::probabilities(&cuda.gpu, attention, &inputs, offsets, out.on_gpu())?;
            }
        }
        Ok(out)
    }
}

/// One attention: what it reads and how.
struct Call {
    attention: Xl,
    from: QueryKeyValue,
    tables: XlTables,
    relations: XlRelations,
}

impl Call {
    fn new(
        pass: &Pass<'_>,
        attention: &Xl,
        from: QueryKeyValue,
        tables: XlTables,
        relations: &XlRelations,
    ) -> Result<Self> {
        if attention.heads == 0 || attention.head_size == 0 {
            return Err(TensorError::Unsupported { operation: OPERATION, why: "there are no heads" });
        }
        let (queries, keys) = (relations.queries().tokens(), relations.keys().tokens());
        from.check(&attention.content(), queries, keys, pass.dtype())?;
        let h = attention.heads * attention.head_size;
        let positions = tables.positions.tensor();
        positions.check_shape(OPERATION, "the positions", [positions.rows(), h])?;
        positions.check_dtype(OPERATION, "the positions", pass.dtype())?;
        let vectors = [(Some(tables.biases), "the biases", 3), (tables.segments, "the segments", 2)];
        for (param, what, count) in vectors {
            let Some(got) = param.map(|param| param.shape()) else { continue };
            if got.elements() != count * h {
                return Err(TensorError::Shape { operation: OPERATION, what, expected: [count, h].into(), got });
            }
        }
        if let (Device::Cuda(_), Some(why)) = (pass.device(), cuda_kernels::unsupported(attention)) {
            return Err(TensorError::Unsupported { operation: OPERATION, why });
        }
        let longest = longest(relations.keys());
        if longest > tables.first + 1 || tables.first + longest > positions.rows() {
            return Err(TensorError::Unsupported { operation: OPERATION, why: "the table of positions is too short" });
        }
        // Segments without a table of theirs do not count, and a table without segments neither.
        let (mut tables, mut relations) = (tables, relations.clone());
        if tables.segments.is_none() || !relations.segmented {
            (tables.segments, relations.segmented) = (None, false);
        }
        Ok(Self { attention: *attention, from, tables, relations })
    }

    /// H.
    fn width(&self) -> usize {
        self.attention.heads * self.attention.head_size
    }

    fn inputs<'a, E: Native>(&'a self, parameters: &'a Parameters) -> kernels::Inputs<'a, E> {
        let h = self.width();
        let [query, key, value] = match &self.from {
            QueryKeyValue::Fused(all) => View::split(all.tensor().slice(), [h, h, h]),
            QueryKeyValue::Cross { query, key_value } => {
                let [key, value] = View::split(key_value.tensor().slice(), [h, h]);
                [View::new(query.tensor().slice(), h), key, value]
            }
            QueryKeyValue::Apart { query, key, value } => [query, key, value].map(|x| View::new(x.tensor().slice(), h)),
        };
        let (query_offsets, key_offsets) = (self.relations.queries().offsets(), self.relations.keys().offsets());
        kernels::Inputs {
            content: plain::Inputs { query, key, value, query_offsets, key_offsets, bias: &[] },
            biases: parameters.slice(self.tables.biases),
            positions: View::new(self.tables.positions.tensor().slice(), h),
            first: self.tables.first,
            segments: self.tables.segments.map(|table| parameters.slice(table)),
            relations: self.relations.slices(),
        }
    }

    /// The biases, and the segments where they count, as a GPU reads them.
    fn vectors(&self, parameters: &Parameters) -> (Tensor, Option<Tensor>) {
        (parameters.vector(self.tables.biases), self.tables.segments.map(|table| parameters.vector(table)))
    }

    fn inputs_on_gpu<'a>(
        &'a self,
        (biases, segments): &'a (Tensor, Option<Tensor>),
    ) -> Result<cuda_kernels::Inputs<'a>> {
        let [query, key, value] = columns(&self.attention.content(), self.from.tensors());
        let (queries, keys) = (self.relations.queries(), self.relations.keys());
        let cross = match queries.is_same(keys) {
            true => None,
            false => Some(Cross {
                keys: keys.attention_table()?,
                query_offsets: queries.offsets_on_gpu()?.on_gpu(),
                key_offsets: keys.offsets_on_gpu()?.on_gpu(),
                numbers: queries.numbers().on_gpu(),
            }),
        };
        Ok(cuda_kernels::Inputs {
            query,
            key,
            value,
            queries: queries.attention_table()?,
            cross,
            biases: biases.on_gpu(),
            positions: Columns::new(self.tables.positions.tensor().on_gpu(), self.width()),
            first: self.tables.first,
            // By the table, whose size is in the key of a recorded pass.
            longest: self.tables.first + 1,
            segments: segments.as_ref().map(Tensor::on_gpu),
            relations: self.relations.on_gpu(),
            room: cuda_kernels::ROOM,
        })
    }

    fn dropout(&self, dropout: Option<&Dropout>) -> plain::AttentionDropout<'_> {
        dropout.and_then(Dropout::on_cpu).map(|dropout| (dropout, self.relations.queries().numbers().slice()))
    }

    /// Of the forward: two products of contents, and one of positions, which has about twice as many columns as there are keys.
    fn flops(&self) -> usize {
        let pairs = self.attention.content().pairs(self.relations.queries().offsets(), self.relations.keys().offsets());
        2 * 4 * pairs * self.width()
    }
}

/// A recorded attention.
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
        let call = &self.call;
        let like = |x: &Var| Tensor::empty(back.device(), x.tensor().shape(), x.tensor().dtype());
        let vars: [Option<&Var>; 3] = match &call.from {
            QueryKeyValue::Fused(all) => [Some(all), None, None],
            QueryKeyValue::Cross { query, key_value } => [Some(query), Some(key_value), None],
            QueryKeyValue::Apart { query, key, value } => [Some(query), Some(key), Some(value)],
        };
        let mut gradients = [None, None, None];
        for (gradient, var) in gradients.iter_mut().zip(vars) {
            *gradient = var.map(like).transpose()?;
        }
        let mut dpositions = like(&call.tables.positions)?;
        let [query, key, value] = call.from.parts();
        // Scores again, and two gradients of each product.
        let timer =
            back.device().timer(Kind::AttentionGradient, call.flops() / 2 * 5, &[query, key, value, query, &dout]);
        match back.device() {
            Device::Cpu(cpu) => with_float!(dout.dtype(), E => {
                let mut dbiases = back.gradients.sum(call.tables.biases)?;
                let mut dsegments = call.tables.segments.map(|table| back.gradients.sum(table)).transpose()?;
                let h = call.width();
                let [query, key, value] = views::<E>(h, &mut gradients);
                let positions = ViewMut::new(dpositions.slice_mut::<E>(), h);
                let (biases, segments) = (dbiases.slice_mut(), dsegments.as_mut().map(|sums| sums.slice_mut()));
                kernels::backward(
                    &cpu.kernels,
                    &call.attention,
                    &call.inputs::<E>(back.parameters),
                    call.dropout(self.dropout.as_ref()),
                    self.log_sums.slice(),
                    dout.slice::<E>(),
                    kernels::Gradients { query, key, value, positions, biases, segments },
                );
            }),
            Device::Cuda(cuda) => self.backward_on_gpu(&cuda.gpu, back, &dout, &gradients, &dpositions)?,
        }
        drop(timer);
        back.add(call.tables.positions.slot(), dpositions)?;
        for (var, gradient) in vars.into_iter().zip(gradients) {
            if let (Some(var), Some(gradient)) = (var, gradient) {
                back.add(var.slot(), gradient)?;
            }
        }
        Ok(())
    }
}

impl Recorded {
    fn backward_on_gpu(
        &self,
        gpu: &Gpu,
        back: &mut Backward<'_>,
        dout: &Tensor,
        gradients: &[Option<Tensor>; 3],
        dpositions: &Tensor,
    ) -> Result<()> {
        let call = &self.call;
        let biases = back.gradients.target(call.tables.biases)?;
        let segments = call.tables.segments.map(|table| back.gradients.target(table)).transpose()?;
        let [query, key, value] = columns(&call.attention.content(), gradients.each_ref().map(Option::as_ref));
        let positions = Columns::new(dpositions.on_gpu(), call.width());
        let (biases, segments) = (sum_into(&biases), segments.as_ref().map(sum_into));
        let to = cuda_kernels::Gradients { query, key, value, positions, biases, segments };
        let (dropout, vectors) = (self.dropout.as_ref().and_then(Dropout::on_gpu), call.vectors(back.parameters));
        let inputs = call.inputs_on_gpu(&vectors)?;
        let (out, log_sums) = (self.kept.as_ref().unwrap_or(dout).on_gpu(), self.log_sums.on_gpu());
        Ok(cuda_kernels::backward(gpu, &call.attention, &inputs, dropout, out, log_sums, dout.on_gpu(), to)?)
    }
}

/// The gradients' tensors as the kernel takes them: one that holds all three, two of which the second holds keys and values, or one
/// for each.
fn views<E: Native>(h: usize, gradients: &mut [Option<Tensor>; 3]) -> [ViewMut<'_, E>; 3] {
    match gradients.each_mut().map(|x| x.as_mut().map(|x| x.slice_mut::<E>())) {
        [all, None, _] => ViewMut::split(all.unwrap_or_default(), [h, h, h]),
        [query, Some(both), None] => {
            let [key, value] = ViewMut::split(both, [h, h]);
            [ViewMut::new(query.unwrap_or_default(), h), key, value]
        }
        [query, Some(key), Some(value)] => [query.unwrap_or_default(), key, value].map(|x| ViewMut::new(x, h)),
    }
}

fn longest(layout: &Layout) -> usize {
    layout.offsets().windows(2).map(|ends| (ends[1] - ends[0]) as usize).max().unwrap_or(0)
}

/// Refuses numbers that do not fit, which the kernel would panic at, and queries that see nothing.
fn check_relations(queries: &Layout, keys: &Layout, numbers: &Relations<'_>) -> Result<()> {
    let wrong = |why: &'static str| Err(TensorError::Unsupported { operation: OPERATION, why });
    if queries.sequences() != keys.sequences() {
        return wrong("queries and keys are not of as many sequences");
    }
    let [n, m] = [queries, keys].map(|layout| layout.offsets().last().map_or(0, |end| *end as usize));
    let fits = |numbers: Option<[&[u32]; 2]>| numbers.is_none_or(|[own, other]| own.len() == n && other.len() == m);
    let placed = numbers.places.is_none_or(|places| places.len() == n);
    if !placed || !fits(numbers.segments) || !fits(numbers.orders) {
        return wrong("there is not one number for each query and key");
    }
    for (own, other) in queries.offsets().windows(2).zip(keys.offsets().windows(2)) {
        let [own, other] = [own, other].map(|ends| ends[0] as usize..ends[1] as usize);
        if own.len() > other.len() {
            return wrong("a sequence has more queries than keys");
        }
        let (before, count) = (other.len() - own.len(), other.len());
        let of = numbers.of(own, other);
        if of.places.is_some_and(|places| places.iter().any(|place| *place as usize >= count)) {
            return wrong("a query stands outside of its sequence");
        }
        let Some([orders, of_keys]) = of.orders else { continue };
        let least = of_keys.iter().min().copied().unwrap_or(UNSEEN);
        let mut all = orders.iter().enumerate();
        if !all.all(|(query, order)| least < *order || of_keys[query + before] != UNSEEN) {
            return wrong("a query sees no key");
        }
    }
    Ok(())
}
