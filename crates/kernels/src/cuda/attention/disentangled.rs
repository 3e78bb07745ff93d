//! Disentangled attention: as [`crate::cpu::attention::disentangled`].
//!
//! Legend: A heads, D = head size, H = A·D; T tokens of all sequences; P rows of the tables of positions; L the longest sequence,
//! rounded up.
//!
//! cuBLASLt multiplies queries and keys with all positions (T×A×P each, work space), and the kernels of [`general`] gather from these
//! products by distance. In the backward pass they leave the gradients of all scores (T×A×L), once by query and once by key, from which
//! a kernel sums the gradients of the products; cuBLASLt does the rest. So the work space is T×A×(3P + L): L is a few hundred.

use super::general::{self, Columns, Inputs as Content, POSITIONS, Plan, Sequences};
use super::{ITEM, TILE};
use crate::cpu::attention::LogBuckets;
use crate::cpu::attention::disentangled::Disentangled;
use crate::cuda::compile::Source;
use crate::cuda::error::Result;
use crate::cuda::gpu::{DType, Dropout, Gpu, Launch, Purpose, STORES, View, store};
use crate::cuda::matmul::{Batch, Finish, Matrix, products};

/// Sums of gradients by position.
pub static SOURCE: Source = Source {
    name: "attention_disentangled.cu",
    text: concat!(
        "#include \"common.cuh\"\n",
        include_str!("../kernels/described.cuh"),
        include_str!("../kernels/attention_disentangled.cu")
    ),
    variants: &[&[STORES]],
};

/// Tokens of a sequence at most: what shared memory has room for.
pub const LONGEST: usize = 1024;

/// Why an attention cannot be computed on a GPU, if it cannot.
pub fn unsupported(attention: &Disentangled, longest: usize) -> Option<&'static str> {
    if longest > LONGEST {
        return Some("sequences of more than 1024 tokens are not supported on a GPU: use --device cpu");
    }
    general::unsupported(&attention.content())
}

/// L for sequences of up to `longest` tokens, among them those that fill batches up: one of few numbers.
pub fn rounded_longest(longest: usize) -> usize {
    longest.next_multiple_of(TILE).max(TILE)
}

/// What kernels read of distances, for sequences of up to `longest` tokens (L) and tables of `rows` rows (P): the row of each distance
/// from −L to L; then the first distance of each row, and the end of the last.
pub fn distance_table(buckets: LogBuckets, rows: usize, longest: usize) -> Vec<u32> {
    let far = longest as i64;
    let of: Vec<usize> = (-far..=far).map(|distance| buckets.row(distance, rows)).collect();
    // Rows never descend. What lies further away than any distance belongs to the first and to the last.
    const BEYOND: i32 = 1 << 30;
    let first = |row: usize| match of.iter().position(|own| *own >= row) {
        _ if row == 0 => -BEYOND,
        Some(place) => (place as i64 - far) as i32,
        None => BEYOND,
    };
    let starts: Vec<u32> = (0..rows).map(|row| first(row) as u32).chain([BEYOND as u32]).collect();
    of.into_iter().map(|row| row as u32).chain(starts).collect()
}

/// What a disentangled attention reads.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// H columns.
    pub query: Columns<'a>,
    /// H columns.
    pub key: Columns<'a>,
    /// H columns.
    pub value: Columns<'a>,
    /// The layout.
    pub sequences: Sequences<'a>,
    /// P rows of H columns: positions as queries see them.
    pub position_key: Option<Columns<'a>>,
    /// P rows of H columns: positions as keys see them.
    pub position_query: Option<Columns<'a>>,
    /// [`distance_table`], u32.
    pub distances: View<'a>,
    /// L.
    pub longest: usize,
}

impl Inputs<'_> {
    /// P.
    fn positions(&self) -> usize {
        self.position_key.or(self.position_query).map_or(0, |table| table.rows())
    }

    fn content(&self) -> Content<'_> {
        let Self { query, key, value, sequences, .. } = *self;
        Content { query, key, value, queries: sequences, cross: None, bias: None }
    }
}

/// Where the gradients of [`forward`] go; each is written and lies as what it is the gradient of.
#[derive(Clone, Copy, Debug)]
pub struct Gradients<'a> {
    /// T rows.
    pub query: Columns<'a>,
    /// T rows.
    pub key: Columns<'a>,
    /// T rows.
    pub value: Columns<'a>,
    /// P rows, where there is such a table.
    pub position_key: Option<Columns<'a>>,
    /// P rows, where there is such a table.
    pub position_query: Option<Columns<'a>>,
}

/// An attention under way.
struct Call<'a> {
    attention: &'a Disentangled,
    inputs: &'a Inputs<'a>,
    dtype: DType,
    /// Where the products of queries lie (T×A×P), then those of keys, then their gradients.
    products: u64,
}

impl<'a> Call<'a> {
    #[track_caller]
    fn new(gpu: &Gpu, attention: &'a Disentangled, inputs: &'a Inputs<'a>, room: usize) -> Result<Self> {
        let (h, p, dtype) = (attention.heads * attention.head_size, inputs.positions(), inputs.query.dtype());
        assert!(unsupported(attention, inputs.longest).is_none(), "disentangled attention of {}", inputs.longest);
        assert!(inputs.longest.is_multiple_of(2), "rows of scores have an even length");
        for table in [inputs.position_key, inputs.position_query].into_iter().flatten() {
            table.expect("the positions", p, h, dtype);
        }
        inputs.distances.expect("attention", "the distances", 2 * inputs.longest + 2 + p, DType::U32);
        let size = inputs.sequences.tokens * attention.heads * p * dtype.size();
        let products = gpu.scratch(Purpose::Positions, room * size)?;
        Ok(Self { attention, inputs, dtype, products })
    }

    /// One of the parts of the work space.
    fn part(&self, which: usize) -> View<'_> {
        let len = self.inputs.sequences.tokens * self.attention.heads * self.inputs.positions();
        // SAFETY: `new` asked for as many parts as are used.
        unsafe { View::new(self.products + (which * len * self.dtype.size()) as u64, len, self.dtype) }
    }

    /// All heads' products of one part with others at once: those of a head lie D, or P, columns behind the head's before.
    fn multiply(&self, gpu: &Gpu, [a, b, out]: [Operand<'_>; 3], accumulate: bool) -> Result<()> {
        let finish = Finish { scale: self.attention.scale, accumulate, ..Finish::default() };
        let batch = Batch { count: self.attention.heads, steps: [a.step, b.step, out.step] };
        products(gpu, batch, a.matrix, b.matrix, out.matrix, finish)
    }

    /// A head's columns of a matrix of H columns.
    fn content<'v>(&self, columns: &Columns<'v>) -> Operand<'v> {
        let (d, rows) = (self.attention.head_size, columns.rows());
        let view = columns.view.part(columns.offset, columns.view.len() - columns.offset);
        Operand { matrix: Matrix::strided(view, rows, d, columns.stride), step: d }
    }

    /// A head's columns of a part of the work space.
    fn by_position<'v>(&self, part: View<'v>) -> Operand<'v> {
        let (p, rows) = (self.inputs.positions(), self.inputs.sequences.tokens);
        Operand { matrix: Matrix::strided(part, rows, p, self.attention.heads * p), step: p }
    }

    /// The products of queries and of keys with positions.
    fn multiply_contents(&self, gpu: &Gpu) -> Result<()> {
        let Inputs { query, key, position_key, position_query, .. } = self.inputs;
        for (part, (content, table)) in [(query, position_key), (key, position_query)].into_iter().enumerate() {
            if let Some(table) = table {
                let to = self.by_position(self.part(part));
                self.multiply(gpu, [self.content(content), self.content(table).transposed(), to], false)?;
            }
        }
        Ok(())
    }

    /// The kernels' part of the arguments.
    fn arguments<'d>(&self, plan: &Plan<'_>, dropout: Option<Dropout<'d>>) -> general::Arguments<'d> {
        let mut arguments = plan.arguments(dropout);
        let Inputs { position_key, position_query, distances, longest, .. } = self.inputs;
        arguments.by_query = if position_key.is_some() { self.part(0).address() } else { 0 };
        arguments.by_key = if position_query.is_some() { self.part(1).address() } else { 0 };
        arguments.distance_rows = distances.address();
        arguments.positions = self.inputs.positions() as u32;
        arguments.reach = *longest as i32;
        // Of none of the kinds with numbers, but with as much room by distance.
        arguments.bias_kind = 3;
        arguments
    }
}

/// The first head's part of something, and how far the next is.
#[derive(Clone, Copy)]
struct Operand<'a> {
    matrix: Matrix<'a>,
    step: usize,
}

impl Operand<'_> {
    fn transposed(self) -> Self {
        Self { matrix: self.matrix.transposed(), ..self }
    }
}

/// The general kernels' plan, for positions.
#[track_caller]
fn plan<'a>(
    gpu: &Gpu,
    attention: &'a crate::cpu::attention::Attention,
    content: &'a Content<'a>,
    others: &[Columns<'_>],
    drops: bool,
) -> Plan<'a> {
    let mut plan = Plan::new(gpu, attention, content, others, drops);
    let place = if plan.tiles.is_some() { 2 } else { 1 };
    plan.variant[place] = POSITIONS;
    plan.tiled = None;
    plan
}

/// out (T×H) = the attention; `log_sums` (A×T, f32) gets the logarithm of each softmax's denominator.
pub fn forward(
    gpu: &Gpu,
    attention: &Disentangled,
    inputs: &Inputs<'_>,
    dropout: Option<Dropout<'_>>,
    out: View<'_>,
    log_sums: View<'_>,
) -> Result<()> {
    let (rows, width) = (inputs.sequences.tokens, attention.heads * attention.head_size);
    out.expect("attention", "the output", rows * width, inputs.query.dtype());
    log_sums.expect("attention", "the log-sums", attention.heads * rows, DType::F32);
    let (described, content) = (attention.content(), inputs.content());
    let plan = plan(gpu, &described, &content, &[Columns::new(out, width)], dropout.is_some());
    let call = Call::new(gpu, attention, inputs, 2)?;
    call.multiply_contents(gpu)?;
    let mut arguments = call.arguments(&plan, dropout);
    (arguments.result, arguments.log_sums) = (out.address(), log_sums.address());
    let shared = plan.forward_bytes(&arguments);
    // SAFETY: all lengths were checked; the kernels stay within the sequences of the table, and the rows of distances within the tables.
    unsafe { plan.launch(gpu, "forward", false, shared, &mut arguments) }
}

/// Gradients of [`forward`]. `out` and `log_sums` are what it gave.
pub fn backward(
    gpu: &Gpu,
    attention: &Disentangled,
    inputs: &Inputs<'_>,
    dropout: Option<Dropout<'_>>,
    out: View<'_>,
    log_sums: View<'_>,
    dout: View<'_>,
    gradients: Gradients<'_>,
) -> Result<()> {
    let (rows, heads, dtype) = (inputs.sequences.tokens, attention.heads, inputs.query.dtype());
    let p = inputs.positions();
    let Gradients { query, key, value, position_key, position_query } = gradients;
    for (x, dx) in [(inputs.position_key, position_key), (inputs.position_query, position_query)] {
        assert!(x.is_some() == dx.is_some(), "attention: a table without a gradient, or the reverse");
        if let (Some(x), Some(dx)) = (x, dx) {
            dx.expect_gradient_of(&x);
        }
    }
    let (described, content) = (attention.content(), inputs.content());
    let others = general::check_backward(&described, &content, out, log_sums, dout, [query, key, value]);
    let plan = plan(gpu, &described, &content, &others, dropout.is_some());
    let call = Call::new(gpu, attention, inputs, 3)?;
    call.multiply_contents(gpu)?;
    let mut arguments = call.arguments(&plan, dropout);
    arguments.set_backward(gpu, &content, out, log_sums, dout, [query, key, value])?;
    arguments.dscores = gpu.scratch(Purpose::Scores, rows * heads * inputs.longest * dtype.size())?;
    let shared = match plan.tiles {
        Some(tiles) => general::backward_bytes(tiles, &arguments, false),
        None => arguments.bias_bytes(),
    };
    // SAFETY: all lengths were checked; the kernels stay within the sequences of the table, and the work space has a pair of numbers
    // for every query and head, a number for every score, and one for every product.
    unsafe {
        plan.launch_terms(gpu, &arguments)?;
        for (by_keys, kernel, content, dcontent, table, dtable) in [
            (false, "backward_queries", inputs.query, query, inputs.position_key, position_key),
            (true, "backward_keys", inputs.key, key, inputs.position_query, position_query),
        ] {
            plan.launch(gpu, kernel, by_keys, shared, &mut arguments)?;
            let (Some(table), Some(dtable)) = (table, dtable) else { continue };
            let part = call.part(2);
            contract(gpu, inputs, &mut arguments, (heads, p, by_keys), part)?;
            let slopes = call.by_position(part);
            call.multiply(gpu, [slopes, call.content(&table), call.content(&dcontent)], true)?;
            let operands = [slopes.transposed(), call.content(&content), call.content(&dtable)];
            call.multiply(gpu, operands, false)?;
        }
    }
    Ok(())
}

/// Sums the gradients of scores by position.
///
/// # Safety
/// The arguments have gradients of scores for every row, and `to` a number for every product.
unsafe fn contract(
    gpu: &Gpu,
    inputs: &Inputs<'_>,
    arguments: &mut general::Arguments<'_>,
    (heads, positions, by_keys): (usize, usize, bool),
    to: View<'_>,
) -> Result<()> {
    let Sequences { table, room, .. } = inputs.sequences;
    let starts = inputs.distances.part(2 * inputs.longest + 1, positions + 1).address();
    for start in (0..room.items()).step_by(65_535) {
        let items = (room.items() - start).min(65_535);
        arguments.items = table.part(ITEM * start, ITEM * items).address();
        let launch = Launch { grid: (heads as u32, items as u32), threads: 256, shared: 0 };
        let variant = [store(to.dtype())];
        // SAFETY: the caller's promise.
        unsafe {
            let more = (to.address(), starts, u32::from(by_keys));
            gpu.launch(&SOURCE, &variant, "contract", launch, &[arguments, &more.0, &more.1, &more.2])?;
        }
    }
    Ok(())
}

/// The probabilities of every sequence, one after the other: A×S×S each, before dropout. For people to look at.
///
/// `offsets` are those that the table was written from, without room to spare.
pub fn probabilities(
    gpu: &Gpu,
    attention: &Disentangled,
    inputs: &Inputs<'_>,
    offsets: &[u32],
    out: View<'_>,
) -> Result<()> {
    let (described, content) = (attention.content(), inputs.content());
    let call = Call::new(gpu, attention, inputs, 2)?;
    call.multiply_contents(gpu)?;
    let variant = [store(inputs.query.dtype()), POSITIONS, ""];
    general::probabilities_of(gpu, &described, &content, (offsets, offsets), variant, out, |plan| {
        call.arguments(plan, None)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As `contract` of attention_disentangled.cu reads the second part.
    #[test]
    fn both_parts_of_the_table_agree() {
        for (count, max_distance, rows) in [(8, 24, 16), (256, 512, 512), (256, 512, 64), (0, 20, 40), (256, 300, 512)]
        {
            let (buckets, longest) = (LogBuckets { count, max_distance }, 640);
            let table = distance_table(buckets, rows, longest);
            let (of, starts) = table.split_at(2 * longest + 1);
            assert_eq!(starts.len(), rows + 1);
            for (i, row) in of.iter().enumerate() {
                let distance = i as i32 - longest as i32;
                let found = (0..rows).filter(|r| (starts[*r] as i32..starts[r + 1] as i32).contains(&distance));
                assert_eq!(found.collect::<Vec<_>>(), [*row as usize], "{buckets:?}, {rows} rows, {distance}");
            }
        }
        assert_eq!([1, 128, 129, 512].map(rounded_longest), [128, 128, 256, 512]);
    }
}
