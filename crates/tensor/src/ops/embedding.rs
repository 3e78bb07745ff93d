//! The sum of word, position and segment embeddings, of which all but the words' may be absent.

use henson_kernels::cpu::embedding::{self as kernels, Lookup};

use henson_kernels::cuda::embedding as cuda_kernels;
use henson_kernels::cuda::rows as cuda_rows;

use super::layer_norm::{Around, LayerNorm, Norm};
use super::rows::check_indices;
use super::{Op, sum_into, with_float};
use crate::cuda::CudaDevice;
use crate::tape::{Backward, Slot};
use crate::{DType, Device, Kind, Layout, Param, Pass, Result, Tensor, TensorError, Var};

/// The tables of an embedding layer; each has one index a token.
#[derive(Clone, Copy, Debug)]
pub struct EmbeddingTables {
    /// V×H.
    pub word: Param,
    /// Positions×H; none where positions are relative or rotary.
    pub position: Option<Param>,
    /// The row of the first position: 2 in RoBERTa, whose rows 0 and 1 belong to padding.
    pub position_offset: usize,
    /// Segments×H; none where there are no segments.
    pub segment: Option<Param>,
}

/// Tables at most.
const MOST: usize = 3;

/// A table, the first of its rows that counts, and the indices into it, counted from there.
#[derive(Clone)]
struct Indexed {
    table: Param,
    offset: usize,
    indices: Tensor,
    what: &'static str,
}

impl EmbeddingTables {
    fn indexed(&self, ids: &Tensor, positions: &Tensor, segments: Option<&Tensor>) -> Result<[Option<Indexed>; MOST]> {
        if self.segment.is_some() != segments.is_some() {
            let why = "segments are needed just where there is a table for them";
            return Err(TensorError::Unsupported { operation: "embeddings", why });
        }
        let entry = |table: Param, offset: usize, indices: &Tensor, what: &'static str| Indexed {
            table,
            offset,
            indices: indices.clone(),
            what,
        };
        Ok([
            Some(entry(self.word, 0, ids, "token id")),
            self.position.map(|table| entry(table, self.position_offset, positions, "position")),
            self.segment.zip(segments).map(|(table, segments)| entry(table, 0, segments, "segment")),
        ])
    }
}

impl Indexed {
    /// The rows that count.
    fn values(&self, pass: &Pass<'_>) -> Result<Tensor> {
        let table = pass.parameters().matrix(self.table);
        let (rows, h) = (table.rows(), table.columns());
        if self.offset >= rows {
            let (operation, what, index, end) = ("embeddings", "the first row", self.offset, rows);
            return Err(TensorError::Index { operation, what, index, end });
        }
        Ok(table.view(self.offset * h, [rows - self.offset, h].into()))
    }
}

impl Pass<'_> {
    /// dropout(norm(`word[ids] + position[place within the sequence] + segment[segments]`)): what BERT begins with; T×H.
    pub fn embeddings_norm(
        &mut self,
        tables: EmbeddingTables,
        ids: &Tensor,
        segments: Option<&Tensor>,
        layout: &Layout,
        norm: &Norm,
        (p, site): (f32, u32),
    ) -> Result<Var> {
        let Device::Cuda(cuda) = self.device() else {
            let x = self.embeddings(tables, ids, layout.positions(), segments)?;
            return self.norm_dropout(x, norm, layout, (p, site));
        };
        let indexed = tables.indexed(ids, layout.positions(), segments)?;
        let values = self.check_tables(&indexed)?;
        self.reads(&(tables, norm));
        let h = self.parameters().matrix(tables.word).columns();
        let t = ids.shape().elements();
        norm.check("embeddings_norm", self.parameters(), h)?;
        let vectors = norm.vectors(self.parameters());
        let sum = Tensor::empty(self.device(), [t, h], self.dtype())?;
        let (y, statistics) = match self.is_training() {
            true => {
                let y = Tensor::empty(self.device(), [t, h], self.dtype())?;
                (y, Some(Tensor::empty(self.device(), [t, 2], DType::F32)?))
            }
            false => (sum.clone(), None),
        };
        let around = Around { after: self.dropout(p, site), rows: Some(layout.token_rows().clone()), before: None };
        let drops = around.drops_on_gpu();
        let timer = self.device().timer(Kind::Embedding, 0, &[&sum, &sum, &sum, &sum, &y]);
        cuda_kernels::forward_layer_norm(
            &cuda.gpu,
            &lookups(&indexed, &values),
            norm.on_gpu(&vectors),
            drops.after.zip(drops.rows),
            sum.on_gpu(),
            y.on_gpu(),
            statistics.as_ref().map(Tensor::on_gpu),
        )?;
        drop(timer);
        let y = self.var(y);
        if let (Some(out), Some(statistics)) = (y.slot(), statistics) {
            let x = self.var(sum.clone()).slot();
            if let Some(out) = x {
                self.record(Op::Embedding(Embedding { indexed, layout: Some(layout.clone()), out }));
            }
            let (residual, bias, stream, norm) = (None, None, None, *norm);
            self.record(Op::LayerNorm(LayerNorm { x, residual, sum, statistics, norm, bias, around, stream, out }));
        }
        Ok(y)
    }

    /// The tables' values, where all sizes are right.
    fn check_tables(&self, indexed: &[Option<Indexed>; MOST]) -> Result<[Option<Tensor>; MOST]> {
        let mut values = [None, None, None];
        let mut sizes = None;
        for (indexed, values) in indexed.iter().zip(&mut values) {
            let Some(indexed) = indexed else { continue };
            let (table, Indexed { indices, what, .. }) = (indexed.values(self)?, indexed);
            let (t, h) = *sizes.get_or_insert((indices.shape().elements(), table.columns()));
            indices.check_shape("embeddings", what, [t])?;
            indices.check_dtype("embeddings", what, DType::U32)?;
            table.check_shape("embeddings", what, [table.rows(), h])?;
            check_indices("embeddings", what, self.device(), indices, table.rows())?;
            *values = Some(table);
        }
        Ok(values)
    }

    /// dropout(`word[ids] + position[place within the sequence]`): what GPT begins with; T×H.
    pub fn embeddings_dropout(
        &mut self,
        tables: EmbeddingTables,
        ids: &Tensor,
        layout: &Layout,
        dropout: (f32, u32),
    ) -> Result<Var> {
        let x = self.sum_of_tables(tables, ids, layout.positions(), None, Some(layout))?;
        self.dropout_tokens(x, layout, dropout)
    }

    /// `word[ids] + position[positions] + segment[segments]`: T×H.
    pub fn embeddings(
        &mut self,
        tables: EmbeddingTables,
        ids: &Tensor,
        positions: &Tensor,
        segments: Option<&Tensor>,
    ) -> Result<Var> {
        self.sum_of_tables(tables, ids, positions, segments, None)
    }

    /// The same; with a layout, positions are places within its sequences.
    fn sum_of_tables(
        &mut self,
        tables: EmbeddingTables,
        ids: &Tensor,
        positions: &Tensor,
        segments: Option<&Tensor>,
        layout: Option<&Layout>,
    ) -> Result<Var> {
        let indexed = tables.indexed(ids, positions, segments)?;
        let values = self.check_tables(&indexed)?;
        let h = self.parameters().matrix(tables.word).columns();
        let mut out = Tensor::empty(self.device(), [ids.shape().elements(), h], self.dtype())?;
        let count = indexed.iter().flatten().count();
        let timer = self.device().timer(Kind::Embedding, 0, &[&out, &out, &out, &out][..=count]);
        match self.device() {
            Device::Cpu(cpu) => with_float!(out.dtype(), E => {
                let none = Lookup::<'_, E> { ids: &[], table: &[] };
                let mut lookups = [none; MOST];
                let all = indexed.iter().flatten().zip(values.iter().flatten());
                for (lookup, (indexed, table)) in lookups.iter_mut().zip(all) {
                    *lookup = Lookup { ids: indexed.indices.slice(), table: table.slice() };
                }
                kernels::forward(&cpu.kernels, &lookups[..count], h, out.slice_mut::<E>());
            }),
            Device::Cuda(cuda) => {
                cuda_kernels::forward(&cuda.gpu, &lookups(&indexed, &values), h, out.on_gpu())?;
            }
        }
        drop(timer);
        let y = self.var(out);
        if let Some(out) = y.slot() {
            self.record(Op::Embedding(Embedding { indexed, layout: layout.cloned(), out }));
        }
        Ok(y)
    }
}

/// As a GPU's kernels take them.
fn lookups<'a>(
    indexed: &'a [Option<Indexed>; MOST],
    values: &'a [Option<Tensor>; MOST],
) -> Vec<cuda_kernels::Lookup<'a>> {
    let all = indexed.iter().flatten().zip(values.iter().flatten());
    all.map(|(indexed, table)| cuda_kernels::Lookup { ids: indexed.indices.on_gpu(), table: table.on_gpu() }).collect()
}

/// A recorded embedding.
pub(crate) struct Embedding {
    indexed: [Option<Indexed>; MOST],
    /// Where positions are places within its sequences.
    layout: Option<Layout>,
    out: Slot,
}

impl Embedding {
    pub(super) fn backward(self, back: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = back.take(self.out) else { return Ok(()) };
        let _timer = back.device().timer(Kind::Embedding, 0, &[&dy, &dy, &dy]);
        if let (Device::Cuda(cuda), Some(layout)) = (back.device(), &self.layout) {
            return self.backward_on_gpu(cuda, back, &dy, layout);
        }
        let parameters = back.parameters;
        for indexed in self.indexed.iter().flatten().filter(|indexed| !parameters.is_fixed(indexed.table)) {
            add_rows(back, &dy, indexed)?;
        }
        Ok(())
    }

    /// Positions and segments are few, so their rows are summed without sorting them.
    fn backward_on_gpu(&self, cuda: &CudaDevice, back: &mut Backward<'_>, dy: &Tensor, layout: &Layout) -> Result<()> {
        let [word, position, segment] = &self.indexed;
        if let Some(word) = word {
            add_rows(back, dy, word)?;
        }
        if let Some(position) = position.as_ref().filter(|position| !back.parameters.is_fixed(position.table)) {
            let offsets = layout.offsets_on_gpu()?.on_gpu();
            let positions = back.gradients.target(position.table.from_row(position.offset))?;
            cuda_rows::add_places(&cuda.gpu, dy.on_gpu(), dy.columns(), offsets, sum_into(&positions))?;
        }
        let Some(segment) = segment else { return Ok(()) };
        if segment.table.shape().sizes()[0] > cuda_rows::MOST_KINDS {
            return add_rows(back, dy, segment);
        }
        let kinds = back.gradients.target(segment.table)?;
        cuda_rows::add_kinds(&cuda.gpu, dy.on_gpu(), dy.columns(), segment.indices.on_gpu(), sum_into(&kinds))?;
        Ok(())
    }
}

/// Adds each row of dy to the row of a table's gradient that its index names.
fn add_rows(back: &mut Backward<'_>, dy: &Tensor, indexed: &Indexed) -> Result<()> {
    let (mut gradient, index) = (back.gradients.sum(indexed.table.from_row(indexed.offset))?, &indexed.indices);
    match back.device() {
        Device::Cpu(cpu) => with_float!(dy.dtype(), E => {
            let (dy, ids, h) = (dy.slice::<E>(), index.slice(), dy.columns());
            kernels::backward(&cpu.kernels, dy, ids, gradient.slice_mut::<f32>(), h);
        }),
        Device::Cuda(cuda) => {
            super::rows::add_sorted(back.device(), &cuda.gpu, dy, index, &gradient, false)?;
        }
    }
    Ok(())
}
