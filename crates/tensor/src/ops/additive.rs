//! Additive attention over flat tokens: scores are v·tanh(query + key) of what was projected already.
//!
//! Legend: B sequences, N queries, M keys, A columns of projections, H of values. On a GPU there is no such operation yet.

use henson_kernels::cpu::additive::{self as kernels, Gradients, Inputs, Offsets};

use super::{Op, with_float};
use crate::tape::{Backward, Slot};
use crate::{DType, Device, Kind, Layout, Param, Pass, Result, Tensor, TensorError, Var};

const OPERATION: &str = "additive_attention";
const NO_GPU: TensorError = TensorError::Unsupported {
    operation: OPERATION,
    why: "additive attention does not run on a GPU yet: choose the device cpu",
};

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
        let Device::Cpu(cpu) = self.device() else { return Err(NO_GPU) };
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
            probabilities: None,
            out: None,
        };
        let mut out = Tensor::empty(self.device(), [n, h], values.tensor().dtype())?;
        let mut probabilities = Tensor::empty(self.device(), [recorded.offsets().probabilities()], DType::F32)?;
        let timer =
            self.device().timer(Kind::Attention, probabilities.shape().elements() * (a + h), &[keys.tensor(), &out]);
        let v = self.parameters().slice(v);
        with_float!(out.dtype(), E => {
            kernels::forward(&cpu.kernels, &recorded.inputs::<E>(v), probabilities.slice_mut(), out.slice_mut());
        });
        drop(timer);
        let y = self.var(out);
        if y.slot().is_some() {
            self.record(Op::Additive(Recorded { probabilities: Some(probabilities), out: y.slot(), ..recorded }));
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
    /// Those of each query's keys.
    probabilities: Option<Tensor>,
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

    pub(super) fn backward(self, back: &mut Backward<'_>) -> Result<()> {
        let (Some(out), Some(probabilities)) = (self.out, &self.probabilities) else { return Ok(()) };
        let Some(dout) = back.take(out) else { return Ok(()) };
        let Device::Cpu(cpu) = back.device() else { return Err(NO_GPU) };
        let like = |x: &Var| Tensor::empty(back.device(), x.tensor().shape(), x.tensor().dtype());
        let mut dqueries = self.queries.as_ref().map(|(queries, _)| like(queries)).transpose()?;
        let (mut dkeys, mut dvalues) = (like(&self.keys)?, like(&self.values)?);
        let mut dv = back.gradients.sum(self.v)?;
        let flops = 2 * probabilities.shape().elements() * (self.v.shape().elements() + dvalues.columns());
        let timer = back.device().timer(Kind::AttentionGradient, flops, &[&dkeys, &dvalues, &dout]);
        let v = back.parameters.slice(self.v);
        with_float!(dkeys.dtype(), E => {
            let to = Gradients {
                queries: dqueries.as_mut().map(|x| x.slice_mut::<E>()).unwrap_or_default(),
                keys: dkeys.slice_mut::<E>(),
                v: dv.slice_mut(),
                values: dvalues.slice_mut::<E>(),
            };
            let inputs = self.inputs::<E>(v);
            kernels::backward(&cpu.kernels, &inputs, probabilities.slice(), dout.slice::<E>(), to);
        });
        drop(timer);
        if let (Some((queries, _)), Some(dqueries)) = (&self.queries, dqueries) {
            back.add(queries.slot(), dqueries)?;
        }
        back.add(self.keys.slot(), dkeys)?;
        back.add(self.values.slot(), dvalues)
    }
}
