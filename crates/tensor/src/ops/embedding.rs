//! The sum of word, position and segment embeddings.

use henson_kernels::cpu::embedding::{self as kernels, Lookup};

use henson_kernels::cuda::embedding as cuda_kernels;
use henson_kernels::cuda::rows::{self as cuda_rows, Sorted};

use super::layer_norm::{Around, LayerNorm};
use super::rows::check_indices;
use super::{Op, sum_into, with_float};
use crate::cuda::CudaDevice;
use crate::tape::{Backward, Slot};
use crate::{DType, Device, Kind, Layout, Param, Pass, Result, Tensor, Var};

/// The tables of an embedding layer; each has one index a token.
#[derive(Clone, Copy, Debug)]
pub struct EmbeddingTables {
    /// V×H.
    pub word: Param,
    /// Positions×H.
    pub position: Param,
    /// Segments×H.
    pub segment: Param,
}

impl EmbeddingTables {
    fn all(&self) -> [Param; 3] {
        [self.word, self.position, self.segment]
    }
}

impl Pass<'_> {
    /// dropout(LN(`word[ids] + position[place within the sequence] + segment[segments]`)): what BERT begins with; T×H.
    pub fn embeddings_layer_norm(
        &mut self,
        tables: EmbeddingTables,
        ids: &Tensor,
        segments: &Tensor,
        layout: &Layout,
        (gamma, beta, epsilon): (Param, Param, f32),
        (p, site): (f32, u32),
    ) -> Result<Var> {
        let Device::Cuda(cuda) = self.device() else {
            let x = self.embeddings(tables, ids, layout.positions(), segments)?;
            return self.layer_norm_dropout(x, gamma, beta, epsilon, layout, (p, site));
        };
        let indices = [ids, layout.positions(), segments];
        let values = self.check_tables(&tables, indices)?;
        let (t, h) = (ids.shape().elements(), values[0].columns());
        let (scale, shift) = (self.parameters().vector(gamma), self.parameters().vector(beta));
        scale.check_shape("embeddings_layer_norm", "gamma", [h])?;
        shift.check_shape("embeddings_layer_norm", "beta", [h])?;
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
            &lookups(&indices, &values),
            scale.on_gpu(),
            shift.on_gpu(),
            epsilon,
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
                let indices = indices.map(Tensor::clone);
                self.record(Op::Embedding(Embedding { tables, indices, layout: Some(layout.clone()), out }));
            }
            let norm = LayerNorm { x, residual: None, sum, statistics, gamma, beta, bias: None, around, out };
            self.record(Op::LayerNorm(norm));
        }
        Ok(y)
    }

    /// The tables' values, where all sizes are right.
    fn check_tables(&self, tables: &EmbeddingTables, indices: [&Tensor; 3]) -> Result<[Tensor; 3]> {
        let values = tables.all().map(|table| self.parameters().matrix(table));
        let (t, h) = (indices[0].shape().elements(), values[0].columns());
        for ((index, table), what) in indices.iter().zip(&values).zip(["token id", "position", "segment"]) {
            index.check_shape("embeddings", what, [t])?;
            index.check_dtype("embeddings", what, DType::U32)?;
            table.check_shape("embeddings", what, [table.rows(), h])?;
            check_indices("embeddings", what, self.device(), index, table.rows())?;
        }
        Ok(values)
    }

    /// `word[ids] + position[positions] + segment[segments]`: T×H.
    pub fn embeddings(
        &mut self,
        tables: EmbeddingTables,
        ids: &Tensor,
        positions: &Tensor,
        segments: &Tensor,
    ) -> Result<Var> {
        let indices = [ids, positions, segments];
        let values = self.check_tables(&tables, indices)?;
        let (t, h) = (ids.shape().elements(), values[0].columns());
        let out = Tensor::empty(self.device(), [t, h], self.dtype())?;
        let timer = self.device().timer(Kind::Embedding, 0, &[&out, &out, &out, &out]);
        match self.device() {
            Device::Cpu(cpu) => with_float!(out.dtype(), E => {
                let lookups: [Lookup<'_, E>; 3] =
                    std::array::from_fn(|i| Lookup { ids: indices[i].slice(), table: values[i].slice() });
                kernels::forward(&cpu.kernels, &lookups, h, out.slice_mut::<E>());
            }),
            Device::Cuda(cuda) => cuda_kernels::forward(&cuda.gpu, &lookups(&indices, &values), h, out.on_gpu())?,
        }
        drop(timer);
        let y = self.var(out);
        if let Some(out) = y.slot() {
            let indices = indices.map(Tensor::clone);
            self.record(Op::Embedding(Embedding { tables, indices, layout: None, out }));
        }
        Ok(y)
    }
}

/// As kernels take them.
fn lookups<'a>(indices: &'a [&Tensor; 3], values: &'a [Tensor; 3]) -> [cuda_kernels::Lookup<'a>; 3] {
    std::array::from_fn(|i| cuda_kernels::Lookup { ids: indices[i].on_gpu(), table: values[i].on_gpu() })
}

/// A recorded embedding.
pub(crate) struct Embedding {
    tables: EmbeddingTables,
    indices: [Tensor; 3],
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
        for (table, index) in self.tables.all().into_iter().zip(&self.indices) {
            add_rows(back, &dy, index, table)?;
        }
        Ok(())
    }

    /// Positions and segments are few, so their rows are summed without sorting them.
    fn backward_on_gpu(&self, cuda: &CudaDevice, back: &mut Backward<'_>, dy: &Tensor, layout: &Layout) -> Result<()> {
        let [_, _, segments] = &self.indices;
        add_rows(back, dy, &self.indices[0], self.tables.word)?;
        let offsets = layout.offsets_on_gpu()?.on_gpu();
        let positions = back.gradients.target(self.tables.position);
        cuda_rows::add_places(&cuda.gpu, dy.on_gpu(), dy.columns(), offsets, sum_into(&positions))?;
        if self.tables.segment.shape().sizes()[0] > cuda_rows::MOST_KINDS {
            return add_rows(back, dy, segments, self.tables.segment);
        }
        let kinds = back.gradients.target(self.tables.segment);
        cuda_rows::add_kinds(&cuda.gpu, dy.on_gpu(), dy.columns(), segments.on_gpu(), sum_into(&kinds))?;
        Ok(())
    }
}

/// Adds each row of dy to the row of a table's gradient that its index names.
fn add_rows(back: &mut Backward<'_>, dy: &Tensor, index: &Tensor, table: Param) -> Result<()> {
    let gradient = back.gradients.sum(table)?;
    match back.device() {
        Device::Cpu(cpu) => with_float!(dy.dtype(), E => {
            let (dy, ids, h) = (dy.slice::<E>(), index.slice(), dy.columns());
            kernels::backward(&cpu.kernels, dy, ids, gradient.slice_mut::<f32>(), h);
        }),
        Device::Cuda(cuda) => {
            let room = || Tensor::empty(back.device(), index.shape(), DType::U32);
            let (keys, order) = (room()?, room()?);
            let sorted = Sorted { keys: keys.on_gpu(), order: order.on_gpu() };
            cuda_rows::sort(&cuda.gpu, index.on_gpu(), gradient.rows(), sorted)?;
            cuda_rows::scatter_add(&cuda.gpu, dy.on_gpu(), dy.columns(), sorted, gradient.on_gpu(), false)?;
        }
    }
    Ok(())
}
