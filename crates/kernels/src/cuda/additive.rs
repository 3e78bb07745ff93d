//! Additive attention, forward and backward. The definition is [`crate::cpu::additive`].
//!
//! Legend: B sequences; N queries and M keys (those that fill a batch up among them), those of a sequence side by side; A columns of
//! projections, H of values.

use super::compile::Source;
use super::error::Result;
use super::gpu::{Argument, DType, Gpu, Launch, Purpose, STORES, View, address, store};
use super::reduce::{self, Sum};

/// All of it.
pub static SOURCE: Source =
    Source { name: "additive.cu", text: include_str!("kernels/additive.cu"), variants: &[&[STORES]] };

/// Threads of a block, one for each column.
const THREADS: usize = 256;

/// What is attended to, and by what.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// N×A, and where each sequence's begin (B + 1); none: each sequence has one query that is zero.
    pub queries: Option<(View<'a>, View<'a>)>,
    /// M×A.
    pub keys: View<'a>,
    /// A, in f32.
    pub v: View<'a>,
    /// M×H.
    pub values: View<'a>,
    /// B + 1: where each sequence's keys begin. No sequence is without.
    pub offsets: View<'a>,
}

/// `struct Inputs` of additive.cu.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Arguments {
    queries: u64,
    keys: u64,
    v: u64,
    values: u64,
    query_offsets: u64,
    key_offsets: u64,
    sequences: u32,
    a: u32,
    h: u32,
}

// SAFETY: `struct Inputs` has the same fields in the same order.
unsafe impl Argument for Arguments {}

/// Sizes of an attention.
struct Sizes {
    n: usize,
    m: usize,
    a: usize,
    h: usize,
}

impl Inputs<'_> {
    /// N.
    pub fn queries(&self) -> usize {
        self.queries.map_or(self.offsets.len().saturating_sub(1), |(queries, _)| queries.len() / self.v.len().max(1))
    }

    fn check(&self, out: View<'_>) -> (Sizes, Arguments) {
        let (dtype, a, n) = (self.keys.dtype(), self.v.len(), self.queries());
        self.v.expect("additive attention", "v", a, DType::F32);
        let m = self.keys.rows("additive attention", a);
        assert!(m > 0 && self.values.len().is_multiple_of(m), "additive attention: lengths differ");
        let (h, b) = (self.values.len() / m, self.offsets.len().saturating_sub(1));
        self.values.expect("additive attention", "the values", m * h, dtype);
        self.offsets.expect("additive attention", "the offsets", b + 1, DType::U32);
        out.expect("additive attention", "the output", n * h, dtype);
        assert!(h > 0, "additive attention: values of no columns");
        if let Some((queries, offsets)) = self.queries {
            queries.expect("additive attention", "the queries", n * a, dtype);
            offsets.expect("additive attention", "the queries' offsets", b + 1, DType::U32);
        }
        let arguments = Arguments {
            queries: address(self.queries.map(|(queries, _)| queries)),
            keys: self.keys.address(),
            v: self.v.address(),
            values: self.values.address(),
            query_offsets: address(self.queries.map(|(_, offsets)| offsets)),
            key_offsets: self.offsets.address(),
            sequences: b as u32,
            a: a as u32,
            h: h as u32,
        };
        (Sizes { n, m, a, h }, arguments)
    }
}

fn strips(columns: usize) -> usize {
    columns.div_ceil(THREADS)
}

fn launch(rows: usize, strips: usize) -> Launch {
    Launch { grid: (rows as u32, strips as u32), threads: THREADS as u32, shared: 0 }
}

/// Writes what each query gets (N×H), zeros behind the last sequence, and the logarithms of its softmax's sums (N, f32).
pub fn forward(gpu: &Gpu, inputs: &Inputs<'_>, sums: View<'_>, out: View<'_>) -> Result<()> {
    let (Sizes { n, h, .. }, arguments) = inputs.check(out);
    sums.expect("additive attention", "the sums", n, DType::F32);
    // SAFETY: sizes are checked; offsets are a layout's.
    unsafe {
        let list: [&dyn Argument; 3] = [&arguments, &sums.address(), &out.address()];
        gpu.launch(&SOURCE, &[store(out.dtype())], "forward", launch(n, strips(h)), &list)
    }
}

/// Where gradients go: those of queries, keys and values are written over, with zeros behind the last sequence.
#[derive(Clone, Copy, Debug)]
pub struct Gradients<'a> {
    /// N×A, where there are queries.
    pub queries: Option<View<'a>>,
    /// M×A.
    pub keys: View<'a>,
    /// A, in f32.
    pub v: Sum<'a>,
    /// M×H.
    pub values: View<'a>,
}

/// The gradients, from that of what queries got and the sums that [`forward`] wrote.
pub fn backward(gpu: &Gpu, inputs: &Inputs<'_>, sums: View<'_>, dout: View<'_>, to: Gradients<'_>) -> Result<()> {
    let (Sizes { n, m, a, h }, arguments) = inputs.check(dout);
    let dtype = dout.dtype();
    sums.expect("additive attention", "the sums", n, DType::F32);
    assert!(to.queries.is_some() == inputs.queries.is_some(), "additive attention: gradients of other queries");
    if let Some(queries) = to.queries {
        queries.expect("additive attention", "the queries' gradient", n * a, dtype);
    }
    to.keys.expect("additive attention", "the keys' gradient", m * a, dtype);
    to.values.expect("additive attention", "the values' gradient", m * h, dtype);
    to.v.to.expect("additive attention", "the gradient of v", a, DType::F32);
    let means_bytes = (n * 4).next_multiple_of(256);
    let means = gpu.scratch(Purpose::Additive, means_bytes + n * a * 4)?;
    // SAFETY: the part of the work space behind the means, one for each query.
    let by_query = unsafe { View::new(means + means_bytes as u64, n * a, DType::F32) };
    let variant = [store(dtype)];
    // SAFETY: as in the forward.
    unsafe {
        let (sums, dout, dqueries, dv) = (sums.address(), dout.address(), address(to.queries), by_query.address());
        let list: [&dyn Argument; 6] = [&arguments, &sums, &dout, &means, &dqueries, &dv];
        gpu.launch(&SOURCE, &variant, "of_queries", launch(n, strips(a)), &list)?;
        let (dkeys, dvalues, of_keys) = (to.keys.address(), to.values.address(), strips(a) as u32);
        let list: [&dyn Argument; 7] = [&arguments, &sums, &dout, &means, &dkeys, &dvalues, &of_keys];
        gpu.launch(&SOURCE, &variant, "of_keys", launch(m, strips(a) + strips(h)), &list)?;
    }
    reduce::column_sums(gpu, by_query, to.v)
}
