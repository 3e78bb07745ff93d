//! Attention over flat tokens, by a description: self- and cross-attention, full, causal or in a window, with or without a
//! bias.
//!
//! Legend: A heads, K key heads, D = head size; N queries and M keys in all sequences of a batch.

use henson_kernels::cpu::attention::{self as kernels, Attention, Bias, View, ViewMut, Window};
use henson_kernels::cuda::attention as cuda_kernels;

use super::{Op, with_float};
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
        let out = Tensor::empty(self.device(), [queries, attention.query_width()], self.dtype())?;
        let log_sums = Tensor::empty(self.device(), [attention.heads, queries], DType::F32)?;
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
                let (qkv, shape) = call.on_gpu()?;
                let dropout = dropout.as_ref().and_then(Dropout::on_gpu);
                cuda_kernels::forward(&cuda.gpu, qkv.on_gpu(), shape, dropout, out.on_gpu(), log_sums.on_gpu())?;
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
        let out = Tensor::empty(self.device(), [size], DType::F32)?;
        match self.device() {
            Device::Cpu(cpu) => with_float!(self.dtype(), E => {
                kernels::probabilities(&cpu.kernels, attention, &call.inputs::<E>(self.parameters()), out.slice_mut());
            }),
            Device::Cuda(cuda) => {
                let (qkv, shape) = call.on_gpu()?;
                cuda_kernels::probabilities(&cuda.gpu, qkv.on_gpu(), shape, layouts.0.offsets(), out.on_gpu())?;
            }
        }
        Ok(out)
    }
}

impl QueryKeyValue {
    /// The tensors that hold query, key and value; the same where they are fused.
    fn parts(&self) -> [&Tensor; 3] {
        let (query, key, value) = match self {
            Self::Fused(all) => (all, all, all),
            Self::Cross { query, key_value } => (query, key_value, key_value),
            Self::Apart { query, key, value } => (query, key, value),
        };
        [query.tensor(), key.tensor(), value.tensor()]
    }

    fn check(&self, attention: &Attention, queries: usize, keys: usize, dtype: DType) -> Result<()> {
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
        check(attention)?;
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

    /// The one form that GPUs have kernels for: fused self-attention, full or causal.
    fn on_gpu(&self) -> Result<(&Tensor, cuda_kernels::Attention<'_>)> {
        let Attention { heads, head_size, window, .. } = self.attention;
        let causal = window == Window::CAUSAL;
        let plain = Attention { window, ..Attention::new(heads, head_size) };
        let known = self.attention == plain && (causal || window == Window::FULL);
        let (QueryKeyValue::Fused(qkv), true) = (&self.from, known) else {
            let why = "this form of attention has no CUDA kernel: use --device cpu";
            return Err(TensorError::Unsupported { operation: "attention", why });
        };
        if head_size > cuda_kernels::LARGEST_HEAD {
            let why = "heads of more than 256 numbers are not supported on a GPU: use --device cpu";
            return Err(TensorError::Unsupported { operation: "attention", why });
        }
        let (table, room) = self.queries.attention_table()?;
        let tokens = self.queries.tokens();
        let table = table.on_gpu();
        Ok((qkv.tensor(), cuda_kernels::Attention { table, room, tokens, heads, head_size, causal }))
    }
}

/// Refuses numbers of heads that make no sense.
pub(super) fn check(attention: &Attention) -> Result<()> {
    let Attention { heads, key_heads, head_size, .. } = *attention;
    let why = if heads == 0 || key_heads == 0 || head_size == 0 {
        "there are no heads"
    } else if !heads.is_multiple_of(key_heads) {
        "the number of heads is not a multiple of that of the key heads"
    } else {
        return Ok(());
    };
    Err(TensorError::Unsupported { operation: "attention", why })
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
        let gradients: [Option<Tensor>; 3] = match &self.call.from {
            QueryKeyValue::Fused(all) => [Some(like(all)?), None, None],
            QueryKeyValue::Cross { query, key_value } => [Some(like(query)?), Some(like(key_value)?), None],
            QueryKeyValue::Apart { query, key, value } => [Some(like(query)?), Some(like(key)?), Some(like(value)?)],
        };
        let [query, key, value] = self.call.from.parts();
        let timer =
            back.device().timer(Kind::AttentionGradient, 5 * self.call.flops(), &[query, key, value, query, &dout]);
        match back.device() {
            Device::Cpu(cpu) => {
                let dbias = match self.call.bias {
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
                    views::<E>(&self.call.attention, &gradients, dbias.as_ref()),
                ));
            }
            Device::Cuda(cuda) => {
                let (qkv, shape) = self.call.on_gpu()?;
                let [Some(dqkv), ..] = &gradients else { return Ok(()) };
                cuda_kernels::backward(
                    &cuda.gpu,
                    qkv.on_gpu(),
                    shape,
                    self.dropout.as_ref().and_then(Dropout::on_gpu),
                    self.kept.as_ref().unwrap_or(&dout).on_gpu(),
                    self.log_sums.on_gpu(),
                    dout.on_gpu(),
                    dqkv.on_gpu(),
                )?;
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

/// The gradients' tensors as the kernel takes them: one that holds all three, two of which the second holds keys and values, or
/// one for each.
fn views<'a, E: Native>(
    attention: &Attention,
    gradients: &'a [Option<Tensor>; 3],
    dbias: Option<&'a Tensor>,
) -> kernels::Gradients<'a, E> {
    let [hq, hk, _] = attention.fused_widths();
    let slice = |i: usize| gradients[i].as_ref().map(|x| x.slice_mut::<E>()).unwrap_or_default();
    let [query, key, value] = match gradients {
        [_, None, _] => ViewMut::split(slice(0), [hq, hk, hk]),
        [_, _, None] => {
            let [key, value] = ViewMut::split(slice(1), [hk, hk]);
            [ViewMut::new(slice(0), hq), key, value]
        }
        _ => [ViewMut::new(slice(0), hq), ViewMut::new(slice(1), hk), ViewMut::new(slice(2), hk)],
    };
    kernels::Gradients { query, key, value, bias: dbias.map(|dbias| dbias.slice_mut()) }
}
