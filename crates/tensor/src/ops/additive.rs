//! Additive attention over flat tokens: scores are v·tanh(query + key) of what was projected already.
//!
//! Legend: B sequences, N queries, M keys, A columns of projections, H of values.

use henson_kernels::cpu::additive::{self as kernels, Gradients, Inputs, Offsets};
use henson_kernels::cuda::additive as cuda_kernels;

use super::{Op, sum_into, with_float};
use crate::tape::{Backward, Slot};
use crate::{DType, Device, Kind, Layout, Param, Pass, Result, Tensor, TensorError, Var};

const OPERATION: &str = "additive_attention";

impl Pass<'_> {
    /// The mean of each query's values by the softmax of v·tanh(query + key): N×H. `queries` (N×A) have a layout of their own;
    /// without them, each sequence of keys (M×A) has one that is zero, and B×H comes out.
    pub fn additive_attention(
        &mut self,
        queries: Option<(&Var, &Layout)>,
        keys: &Var,
        v: Param,
        values: &Var,
        layout: &Layout,
    ) -> Result<Var> {
        self.reads(&v);
        let (a, h, m) = (v.shape().elements(), values.tensor().columns(), layout.tokens());
        keys.tensor().check_shape(OPERATION, "the keys", [m, a])?;
        values.tensor().check_shape(OPERATION, "the values", [m, h])?;
        values.tensor().check_dtype(OPERATION, "the values", keys.tensor().dtype())?;
        let mut n = layout.sequences();
        if let Some((queries, of_queries)) = queries {
            n = of_queries.tokens();
            queries.tensor().check_shape(OPERATION, "the queries", [n, a])?;
            queries.tensor().check_dtype(OPERATION, "the queries", keys.tensor().dtype())?;
            if of_queries.sequences() != layout.sequences() {
                let why = "queries and keys are those of different numbers of sequences";
                return Err(TensorError::Unsupported { operation: OPERATION, why });
            }
        }
        let recorded = Recorded {
            queries: queries.map(|(queries, layout)| (queries.clone(), layout.clone())),
            keys: keys.clone(),
            v,
            values: values.clone(),
            layout: layout.clone(),
            kept: None,
            out: None,
        };
        let mut out = Tensor::empty(self.device(), [n, h], values.tensor().dtype())?;
        let pairs = recorded.offsets().probabilities();
        // A GPU computes probabilities again, for how many there are depends on the lengths of this very batch.
        let numbers = if let Device::Cpu(_) = self.device() { pairs } else { n };
        let mut kept = Tensor::empty(self.device(), [numbers], DType::F32)?;
        let timer = self.device().timer(Kind::Attention, pairs * (a + h), &[keys.tensor(), &out]);
        match self.device() {
            Device::Cpu(cpu) => {
                let v = self.parameters().slice(v);
                with_float!(out.dtype(), E => {
                    kernels::forward(&cpu.kernels, &recorded.inputs::<E>(v), kept.slice_mut(), out.slice_mut());
                });
            }
            Device::Cuda(cuda) => {
                let v = self.parameters().vector(v);
                cuda_kernels::forward(&cuda.gpu, &recorded.on_gpu(&v)?, kept.on_gpu(), out.on_gpu())?;
            }
        }
        drop(timer);
        let y = self.var(out);
        if y.slot().is_some() {
            self.record(Op::Additive(Recorded { kept: Some(kept), out: y.slot(), ..recorded }));
        }
        Ok(y)
    }
}

/// A recorded attention.
pub(crate) struct Recorded {
    queries: Option<(Var, Layout)>,
    keys: Var,
    v: Param,
    values: Var,
    layout: Layout,
    /// The probabilities of each query's keys; on a GPU, the logarithm of the sum that they were divided by.
    kept: Option<Tensor>,
    out: Option<Slot>,
}

impl Recorded {
    fn offsets(&self) -> Offsets<'_> {
        let queries = self.queries.as_ref().map(|(_, layout)| layout.offsets());
        Offsets { queries, keys: self.layout.offsets() }
    }

    fn inputs<'a, E: crate::Native>(&'a self, v: &'a [f32]) -> Inputs<'a, E> {
        Inputs {
            queries: self.queries.as_ref().map(|(queries, _)| queries.tensor().slice::<E>()).unwrap_or_default(),
            keys: self.keys.tensor().slice::<E>(),
            v,
            values: self.values.tensor().slice::<E>(),
            offsets: self.offsets(),
        }
    }

    fn on_gpu<'a>(&'a self, v: &'a Tensor) -> Result<cuda_kernels::Inputs<'a>> {
        let queries = match &self.queries {
            Some((queries, layout)) => Some((queries.tensor().on_gpu(), layout.offsets_on_gpu()?.on_gpu())),
            None => None,
        };
        Ok(cuda_kernels::Inputs {
            queries,
            keys: self.keys.tensor().on_gpu(),
            v: v.on_gpu(),
            values: self.values.tensor().on_gpu(),
            offsets: self.layout.offsets_on_gpu()?.on_gpu(),
        })
    }

    pub(super) fn backward(self, back: &mut Backward<'_>) -> Result<()> {
        let (Some(out), Some(kept)) = (self.out, &self.kept) else { return Ok(()) };
        let Some(dout) = back.take(out) else { return Ok(()) };
        let like = |x: &Var| Tensor::empty(back.device(), x.tensor().shape(), x.tensor().dtype());
        let mut dqueries = self.queries.as_ref().map(|(queries, _)| like(queries)).transpose()?;
        let (mut dkeys, mut dvalues) = (like(&self.keys)?, like(&self.values)?);
        let flops = 2 * self.offsets().probabilities() * (self.v.shape().elements() + dvalues.columns());
        let timer = back.device().timer(Kind::AttentionGradient, flops, &[&dkeys, &dvalues, &dout]);
        match back.device() {
            Device::Cpu(cpu) => {
                let mut dv = back.gradients.sum(self.v)?;
                let v = back.parameters.slice(self.v);
                with_float!(dkeys.dtype(), E => {
                    let to = Gradients {
                        queries: dqueries.as_mut().map(|x| x.slice_mut::<E>()).unwrap_or_default(),
                        keys: dkeys.slice_mut::<E>(),
                        v: dv.slice_mut(),
                        values: dvalues.slice_mut::<E>(),
                    };
                    let inputs = self.inputs::<E>(v);
                    kernels::backward(&cpu.kernels, &inputs, kept.slice(), dout.slice::<E>(), to);
                });
            }
            Device::Cuda(cuda) => {
                let (v, dv) = (back.parameters.vector(self.v), back.gradients.target(self.v)?);
                let to = cuda_kernels::Gradients {
                    queries: dqueries.as_ref().map(Tensor::on_gpu),
                    keys: dkeys.on_gpu(),
                    v: sum_into(&dv),
                    values: dvalues.on_gpu(),
                };
                cuda_kernels::backward(&cuda.gpu, &self.on_gpu(&v)?, kept.on_gpu(), dout.on_gpu(), to)?;
            }
        }
        drop(timer);
        if let (Some((queries, _)), Some(dqueries)) = (&self.queries, dqueries) {
            back.add(queries.slot(), dqueries)?;
        }
        back.add(self.keys.slot(), dkeys)?;
        back.add(self.values.slot(), dvalues)
    }
}
