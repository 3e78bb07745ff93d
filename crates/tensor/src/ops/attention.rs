//! Attention over flat tokens, by a description: self- and cross-attention, full, causal or in a window, with or without a
//! bias.
//!
//! Legend: A heads, K key heads, D = head size; N queries and M keys in all sequences of a batch.

use henson_kernels::cpu::attention::{self as kernels, Attention, Bias, View, ViewMut, Window};
use henson_kernels::cuda::Gpu;
use henson_kernels::cuda::attention as cuda_kernels;
use henson_kernels::cuda::attention::general::{self, Columns, Cross};

use super::{Op, sum_into, with_float};
use crate::tape::{Backward, Dropout, Slot};
use crate::{DType, Device, Kind, Layout, Native, Param, Pass, Result, Tensor, TensorError, Var};

/// Where query, key and value of every token are.
#[derive(Clone, Debug)]
pub enum QueryKeyValue {
    /// Side by side: N×(A + 2K)·D. There are as many keys as queries.
    Fused(Var),
    /// Queries alone (N×A·D), keys and values side by side (M×2K·D).
    Cross {
        /// N×A·D.
        query: Var,
        /// M×2K·D.
        key_value: Var,
    },
    /// Each alone.
    Apart {
        /// N×A·D.
        query: Var,
        /// M×K·D.
        key: Var,
        /// M×K·D.
        value: Var,
    },
}

/// The numbers of an attention's bias.
#[derive(Clone, Debug)]
pub enum BiasValues {
    /// There is none.
    None,
    /// The table of [`Bias::Relative`]: buckets×A, a parameter that may serve several layers.
    Table(Param),
    /// The slopes of [`Bias::Slopes`]: A, f32.
    Slopes(Tensor),
}

impl Pass<'_> {
    /// What each query attends to: N×A·D. `layouts` are those of the queries and of the keys, of which sequence i attends to
    /// sequence i.
    pub fn attention(
        &mut self,
        attention: &Attention,
        from: QueryKeyValue,
        bias: &BiasValues,
        layouts: (&Layout, &Layout),
        (p, site): (f32, u32),
    ) -> Result<Var> {
        self.reads(attention);
        let call = Call::new(self, attention, from, bias, layouts)?;
        let queries = layouts.0.tokens();
        let mut out = Tensor::empty(self.device(), [queries, attention.query_width()], self.dtype())?;
        let mut log_sums = Tensor::empty(self.device(), [attention.heads, queries], DType::F32)?;
        let dropout = self.dropout(p, site);
        let [query, key, value] = call.from.parts();
        let timer = self.device().timer(Kind::Attention, 2 * call.flops(), &[query, key, value, &out]);
        match self.device() {
            Device::Cpu(cpu) => with_float!(out.dtype(), E => kernels::forward(
                &cpu.kernels,
                attention,
                &call.inputs::<E>(self.parameters()),
                call.dropout_on_cpu(dropout.as_ref()),
                out.slice_mut::<E>(),
                log_sums.slice_mut(),
            )),
            Device::Cuda(cuda) => {
                let (gpu, dropout) = (&cuda.gpu, dropout.as_ref().and_then(Dropout::on_gpu));
                let (to, sums) = (out.on_gpu(), log_sums.on_gpu());
                match call.fused_on_gpu()? {
                    Some((qkv, shape)) => cuda_kernels::forward(gpu, qkv.on_gpu(), shape, dropout, to, sums)?,
                    None => {
                        let bias = call.bias.on_gpu(self.parameters());
                        let inputs = call.inputs_on_gpu(bias.as_ref())?;
                        general::forward(gpu, attention, &inputs, dropout, to, sums)?;
                    }
                }
            }
        }
        drop(timer);
        let kept = match self.device() {
            Device::Cpu(_) => None,
            Device::Cuda(_) => Some(out.clone()),
        };
        let y = self.var(out);
        if let Some(out) = y.slot() {
            self.record(Op::Attention(Recorded { call, log_sums, dropout, kept, out }));
        }
        Ok(y)
    }

    /// The probabilities that [`Pass::attention`] weighs with, before dropout: A×N×M for each sequence in turn.
    pub fn attention_maps(
        &mut self,
        attention: &Attention,
        from: &QueryKeyValue,
        bias: &BiasValues,
        layouts: (&Layout, &Layout),
    ) -> Result<Tensor> {
        let call = Call::new(self, attention, from.clone(), bias, layouts)?;
        let size = attention.probabilities(layouts.0.offsets(), layouts.1.offsets());
        let mut out = Tensor::empty(self.device(), [size], DType::F32)?;
        match self.device() {
            Device::Cpu(cpu) => with_float!(self.dtype(), E => {
                kernels::probabilities(&cpu.kernels, attention, &call.inputs::<E>(self.parameters()), out.slice_mut());
            }),
            Device::Cuda(cuda) => {
                let bias = call.bias.on_gpu(self.parameters());
                let (inputs, offsets) =
                    (call.inputs_on_gpu(bias.as_ref())?, (layouts.0.offsets(), layouts.1.offsets()));
                general::probabilities(&cuda.gpu, attention, &inputs, offsets, out.on_gpu())?;
            }
        }
        Ok(out)
    }
}

impl QueryKeyValue {
    /// The tensors that hold query, key and value; the same where they are fused.
    pub(super) fn parts(&self) -> [&Tensor; 3] {
        let (query, key, value) = match self {
            Self::Fused(all) => (all, all, all),
            Self::Cross { query, key_value } => (query, key_value, key_value),
            Self::Apart { query, key, value } => (query, key, value),
        };
        [query.tensor(), key.tensor(), value.tensor()]
    }

    /// The tensors themselves: one, two or three.
    pub(super) fn tensors(&self) -> [Option<&Tensor>; 3] {
        match self {
            Self::Fused(all) => [Some(all.tensor()), None, None],
            Self::Cross { query, key_value } => [Some(query.tensor()), Some(key_value.tensor()), None],
            Self::Apart { query, key, value } => [query, key, value].map(|x| Some(x.tensor())),
        }
    }

    pub(super) fn check(&self, attention: &Attention, queries: usize, keys: usize, dtype: DType) -> Result<()> {
        let [hq, hk, _] = attention.fused_widths();
        let expect = |x: &Var, what: &'static str, rows: usize, columns: usize| {
            x.tensor().check_shape("attention", what, [rows, columns])?;
            x.tensor().check_dtype("attention", what, dtype)
        };
        match self {
            Self::Fused(_) if queries != keys => {
                let why = "fused queries and keys must belong to one layout";
                Err(TensorError::Unsupported { operation: "attention", why })
            }
            Self::Fused(all) => expect(all, "query, key and value", queries, hq + 2 * hk),
            Self::Cross { query, key_value } => {
                expect(query, "the query", queries, hq)?;
                expect(key_value, "key and value", keys, 2 * hk)
            }
            Self::Apart { query, key, value } => {
                expect(query, "the query", queries, hq)?;
                expect(key, "the key", keys, hk)?;
                expect(value, "the value", keys, hk)
            }
        }
    }
}

/// One attention: what it reads and how.
struct Call {
    attention: Attention,
    from: QueryKeyValue,
    bias: BiasValues,
    queries: Layout,
    keys: Layout,
}

impl Call {
    fn new(
        pass: &Pass<'_>,
        attention: &Attention,
        from: QueryKeyValue,
        bias: &BiasValues,
        (queries, keys): (&Layout, &Layout),
    ) -> Result<Self> {
        check(attention, pass.device())?;
        if queries.sequences() != keys.sequences() {
            let (expected, got) = ([queries.sequences()].into(), [keys.sequences()].into());
            return Err(TensorError::Shape { operation: "attention", what: "the keys' layout", expected, got });
        }
        from.check(attention, queries.tokens(), keys.tokens(), pass.dtype())?;
        bias.check(attention)?;
        Ok(Self { attention: *attention, from, bias: bias.clone(), queries: queries.clone(), keys: keys.clone() })
    }

    fn inputs<'a, E: Native>(&'a self, parameters: &'a crate::Parameters) -> kernels::Inputs<'a, E> {
        let [hq, hk, _] = self.attention.fused_widths();
        let [query, key, value] = match &self.from {
            QueryKeyValue::Fused(all) => View::split(all.tensor().slice(), [hq, hk, hk]),
            QueryKeyValue::Cross { query, key_value } => {
                let [key, value] = View::split(key_value.tensor().slice(), [hk, hk]);
                [View::new(query.tensor().slice(), hq), key, value]
            }
            QueryKeyValue::Apart { query, key, value } => [
                View::new(query.tensor().slice(), hq),
                View::new(key.tensor().slice(), hk),
                View::new(value.tensor().slice(), hk),
            ],
        };
        let (query_offsets, key_offsets) = (self.queries.offsets(), self.keys.offsets());
        kernels::Inputs { query, key, value, query_offsets, key_offsets, bias: self.bias.slice(parameters) }
    }

    fn dropout_on_cpu(&self, dropout: Option<&Dropout>) -> kernels::AttentionDropout<'_> {
        dropout.and_then(Dropout::on_cpu).map(|dropout| (dropout, self.queries.numbers().slice()))
    }

    /// Of one of the products: what all queries see, for each head.
    fn flops(&self) -> usize {
        2 * self.attention.pairs(self.queries.offsets(), self.keys.offsets()) * self.attention.query_width()
    }

    /// The form that GPUs have kernels of its own for: fused self-attention, full or causal.
    fn fused_on_gpu(&self) -> Result<Option<(&Tensor, cuda_kernels::Attention<'_>)>> {
        let Attention { heads, head_size, window, .. } = self.attention;
        let causal = window == Window::CAUSAL;
        let plain = Attention { window, ..Attention::new(heads, head_size) };
        let known = self.attention == plain && (causal || window == Window::FULL) && self.queries.is_same(&self.keys);
        let (QueryKeyValue::Fused(qkv), true) = (&self.from, known) else { return Ok(None) };
        let general::Sequences { table, room, tokens } = self.queries.attention_table()?;
        Ok(Some((qkv.tensor(), cuda_kernels::Attention { table, room, tokens, heads, head_size, causal })))
    }

    /// Any form.
    fn inputs_on_gpu<'a>(&'a self, bias: Option<&'a Tensor>) -> Result<general::Inputs<'a>> {
        let [query, key, value] = columns(&self.attention, self.from.tensors());
        let queries = self.queries.attention_table()?;
        let cross = match self.queries.is_same(&self.keys) {
            true => None,
            false => Some(Cross {
                keys: self.keys.attention_table()?,
                query_offsets: self.queries.offsets_on_gpu()?.on_gpu(),
                key_offsets: self.keys.offsets_on_gpu()?.on_gpu(),
                numbers: self.queries.numbers().on_gpu(),
            }),
        };
        Ok(general::Inputs { query, key, value, queries, cross, bias: bias.map(Tensor::on_gpu) })
    }
}

/// Refuses numbers of heads that make no sense, and what a device has no kernel for.
pub(super) fn check(attention: &Attention, device: &Device) -> Result<()> {
    let Attention { heads, key_heads, head_size, .. } = *attention;
    let why = if heads == 0 || key_heads == 0 || head_size == 0 {
        Some("there are no heads")
    } else if !heads.is_multiple_of(key_heads) {
        Some("the number of heads is not a multiple of that of the key heads")
    } else {
        match device {
            Device::Cpu(_) => None,
            Device::Cuda(_) => general::unsupported(attention),
        }
    };
    why.map_or(Ok(()), |why| Err(TensorError::Unsupported { operation: "attention", why }))
}

/// Query, key and value as a GPU's kernels take them: one tensor that holds all three, two of which the second holds keys and values,
/// or one for each.
pub(super) fn columns<'a>(attention: &Attention, tensors: [Option<&'a Tensor>; 3]) -> [Columns<'a>; 3] {
    let [hq, hk, _] = attention.fused_widths();
    let view = |x: &'a Tensor| x.on_gpu();
    match tensors {
        [Some(query), Some(key), Some(value)] => {
            [Columns::new(view(query), hq), Columns::new(view(key), hk), Columns::new(view(value), hk)]
        }
        [Some(query), Some(key_value), None] => {
            let [key, value] = Columns::split(view(key_value), [hk, hk]);
            [Columns::new(view(query), hq), key, value]
        }
        [Some(all), ..] => Columns::split(view(all), [hq, hk, hk]),
        [None, ..] => unreachable!("there is always a tensor with the queries"),
    }
}

impl BiasValues {
    pub(super) fn check(&self, attention: &Attention) -> Result<()> {
        match (self, attention.bias) {
            (Self::None, Bias::None) => Ok(()),
            (Self::Table(table), Bias::Relative(buckets)) => {
                let (expected, got) = ([buckets.count as usize, attention.heads].into(), table.shape());
                if got == expected {
                    return Ok(());
                }
                Err(TensorError::Shape { operation: "attention", what: "the bias' table", expected, got })
            }
            (Self::Slopes(slopes), Bias::Slopes) => {
                slopes.check_shape("attention", "the slopes", [attention.heads])?;
                slopes.check_dtype("attention", "the slopes", DType::F32)
            }
            _ => {
                let why = "the bias' numbers are not those that its description needs";
                Err(TensorError::Unsupported { operation: "attention", why })
            }
        }
    }

    /// The numbers, on a GPU.
    pub(super) fn on_gpu(&self, parameters: &crate::Parameters) -> Option<Tensor> {
        match self {
            Self::None => None,
            Self::Table(table) => Some(parameters.vector(*table)),
            Self::Slopes(slopes) => Some(slopes.clone()),
        }
    }

    /// The numbers, on the CPU.
    pub(super) fn slice<'a>(&'a self, parameters: &'a crate::Parameters) -> &'a [f32] {
        match self {
            Self::None => &[],
            Self::Table(table) => parameters.slice(*table),
            Self::Slopes(slopes) => slopes.slice(),
        }
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
        let like = |x: &Var| Tensor::empty(back.device(), x.tensor().shape(), x.tensor().dtype());
        let mut gradients: [Option<Tensor>; 3] = match &self.call.from {
            QueryKeyValue::Fused(all) => [Some(like(all)?), None, None],
            QueryKeyValue::Cross { query, key_value } => [Some(like(query)?), Some(like(key_value)?), None],
            QueryKeyValue::Apart { query, key, value } => [Some(like(query)?), Some(like(key)?), Some(like(value)?)],
        };
        let [query, key, value] = self.call.from.parts();
        let timer =
            back.device().timer(Kind::AttentionGradient, 5 * self.call.flops(), &[query, key, value, query, &dout]);
        match back.device() {
            Device::Cpu(cpu) => {
                let mut dbias = match self.call.bias {
                    BiasValues::Table(table) => Some(back.gradients.sum(table)?),
                    _ => None,
                };
                with_float!(dout.dtype(), E => kernels::backward(
                    &cpu.kernels,
                    &self.call.attention,
                    &self.call.inputs::<E>(back.parameters),
                    self.call.dropout_on_cpu(self.dropout.as_ref()),
                    self.log_sums.slice(),
                    dout.slice::<E>(),
                    views::<E>(&self.call.attention, &mut gradients, dbias.as_mut()),
                ));
            }
            Device::Cuda(cuda) => {
                self.backward_on_gpu(&cuda.gpu, back, &dout, [0, 1, 2].map(|i| gradients[i].as_ref()))?;
            }
        }
        drop(timer);
        let slots = match &self.call.from {
            QueryKeyValue::Fused(all) => [all.slot(), None, None],
            QueryKeyValue::Cross { query, key_value } => [query.slot(), key_value.slot(), None],
            QueryKeyValue::Apart { query, key, value } => [query.slot(), key.slot(), value.slot()],
        };
        for (slot, gradient) in slots.into_iter().zip(gradients) {
            if let Some(gradient) = gradient {
                back.add(slot, gradient)?;
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
        gradients: [Option<&Tensor>; 3],
    ) -> Result<()> {
        let dropout = self.dropout.as_ref().and_then(Dropout::on_gpu);
        let (out, log_sums) = (self.kept.as_ref().unwrap_or(dout).on_gpu(), self.log_sums.on_gpu());
        if let (Some((qkv, shape)), [Some(dqkv), ..]) = (self.call.fused_on_gpu()?, gradients) {
            let (qkv, dout, dqkv) = (qkv.on_gpu(), dout.on_gpu(), dqkv.on_gpu());
            return Ok(cuda_kernels::backward(gpu, qkv, shape, dropout, out, log_sums, dout, dqkv)?);
        }
        let dbias = match self.call.bias {
            BiasValues::Table(table) => Some(back.gradients.target(table)?),
            _ => None,
        };
        let bias = self.call.bias.on_gpu(back.parameters);
        let inputs = self.call.inputs_on_gpu(bias.as_ref())?;
        let attention = &self.call.attention;
        let [query, key, value] = columns(attention, gradients);
        let gradients = general::Gradients { query, key, value, bias: dbias.as_ref().map(sum_into) };
        Ok(general::backward(gpu, attention, &inputs, dropout, out, log_sums, dout.on_gpu(), gradients)?)
    }
}

/// The gradients' tensors as the kernel takes them: one that holds all three, two of which the second holds keys and values, or
/// one for each.
fn views<'a, E: Native>(
    attention: &Attention,
    gradients: &'a mut [Option<Tensor>; 3],
    dbias: Option<&'a mut Tensor>,
) -> kernels::Gradients<'a, E> {
    let [hq, hk, _] = attention.fused_widths();
    let slices = gradients.each_mut().map(|x| x.as_mut().map(|x| x.slice_mut::<E>()));
    let [query, key, value] = match slices {
        [all, None, _] => ViewMut::split(all.unwrap_or_default(), [hq, hk, hk]),
        [query, Some(both), None] => {
            let [key, value] = ViewMut::split(both, [hk, hk]);
            [ViewMut::new(query.unwrap_or_default(), hq), key, value]
        }
        [query, Some(key), Some(value)] => {
            [ViewMut::new(query.unwrap_or_default(), hq), ViewMut::new(key, hk), ViewMut::new(value, hk)]
        }
    };
    kernels::Gradients { query, key, value, bias: dbias.map(|dbias| dbias.slice_mut()) }
}
