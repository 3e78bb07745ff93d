//! The attention of Transformer-XL and XLNet: as [`crate::cpu::attention::xl`].
//!
//! Legend: A heads, D = head size, H = A·D; T queries of all sequences; P rows of the table of positions; L the most keys of a sequence,
//! rounded up.
//!
//! cuBLASLt multiplies queries with all positions (T×P for a head), from which a kernel makes a matrix of what positions and segments add to
//! the scores of contents (T×L), −∞ where a query does not see a key. The kernels of [`general`] add it, and in the backward pass leave its
//! gradient, which goes the same way. So what is as large as all scores exists, though in the storage type, and for as many heads
//! at a time as about a gigabyte has room for: no length is refused, but a head of very long sequences takes what its scores take.

use super::ITEM;
use super::general::{self, Columns, Cross, Inputs as Content, MATRIX, Plan, Sequences};
use crate::cpu::attention::Attention;
use crate::cpu::attention::xl::Xl;
use crate::cuda::compile::Source;
use crate::cuda::error::Result;
use crate::cuda::gpu::{Argument, DType, Dropout, Gpu, Launch, Purpose, STORES, View, address, store};
use crate::cuda::matmul::{Batch, Finish, Matrix, products};
use crate::cuda::reduce::{self, Strips, Sum};

/// What there is besides the general kernels.
pub static SOURCE: Source = Source {
    name: "attention_xl.cu",
    text: concat!(
        "#include \"common.cuh\"\n",
        include_str!("../kernels/described.cuh"),
        include_str!("../kernels/attention_xl.cu")
    ),
    variants: &[&[STORES]],
};

/// As much of [`Inputs::room`] as is worth while: the heads of usual batches go together.
pub const ROOM: usize = 1 << 30;

/// Rows of the matrix and of the table of positions are a multiple of so many numbers.
const UNIT: usize = 8;

/// Why an attention cannot be computed on a GPU, if it cannot.
pub fn unsupported(attention: &Xl) -> Option<&'static str> {
    general::unsupported(&attention.content())
}

/// Rows of the table of positions, and the distance of its first, that the kernels take for up to so many keys, among them those of
/// sequences that fill batches up: few numbers.
pub fn table_for(longest: usize) -> (usize, usize) {
    let longest = rounded_longest(longest);
    (2 * longest, longest - 1)
}

/// L for so many keys.
pub fn rounded_longest(longest: usize) -> usize {
    super::disentangled::rounded_longest(longest)
}

/// How queries stand to keys, u32: as [`crate::cpu::attention::xl::Relations`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Relations<'a> {
    /// Of queries.
    pub places: Option<View<'a>>,
    /// Of queries, and of keys.
    pub segments: Option<[View<'a>; 2]>,
    /// Of queries, and of keys.
    pub orders: Option<[View<'a>; 2]>,
}

/// What an attention reads.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// H columns, without a bias.
    pub query: Columns<'a>,
    /// H columns.
    pub key: Columns<'a>,
    /// H columns.
    pub value: Columns<'a>,
    /// The queries' layout.
    pub queries: Sequences<'a>,
    /// Where the keys have another one.
    pub cross: Option<Cross<'a>>,
    /// Of contents, of positions and of segments: 3×H, f32.
    pub biases: View<'a>,
    /// P rows of H columns.
    pub positions: Columns<'a>,
    /// The distance of the first of them: every sequence has at most one key more, and P is at least as many rows more.
    pub first: usize,
    /// L.
    pub longest: usize,
    /// 2×H, f32: of the same segment, of another; none where segments do not count.
    pub segments: Option<View<'a>>,
    /// How queries stand to keys.
    pub relations: Relations<'a>,
    /// Bytes that products and matrices may take together: with fewer, fewer heads are worked on at a time, but one at least.
    pub room: usize,
}

/// Where the gradients of [`forward`] go.
#[derive(Clone, Copy, Debug)]
pub struct Gradients<'a> {
    /// Written; lies as the queries.
    pub query: Columns<'a>,
    /// Written; lies as the keys.
    pub key: Columns<'a>,
    /// Written; lies as the values.
    pub value: Columns<'a>,
    /// Written; lies as the positions.
    pub positions: Columns<'a>,
    /// 3×H.
    pub biases: Sum<'a>,
    /// 2×H, where there are segments.
    pub segments: Option<Sum<'a>>,
}

/// As `struct Xl` of attention_xl.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct Arguments {
    biases: u64,
    segments: u64,
    query: u64,
    content: u64,
    position: u64,
    by_segment: u64,
    products: u64,
    matrix: u64,
    places: u64,
    query_segments: u64,
    key_segments: u64,
    query_orders: u64,
    key_orders: u64,
    stride: u32,
    first: u32,
    factor: f32,
}

// SAFETY: `struct Xl` has the same fields.
unsafe impl Argument for Arguments {}

/// Work space that is as large as the queries, or has a pair of numbers for each of their heads.
struct Space<'a> {
    /// Queries with the biases of contents and of positions.
    content: View<'a>,
    position: View<'a>,
    by_segment: u64,
    /// In a backward: the gradients of both, and sums by segment.
    dcontent: View<'a>,
    dposition: View<'a>,
    segment_sums: u64,
}

impl Space<'_> {
    fn new(gpu: &Gpu, rows: usize, attention: &Xl, dtype: DType, backward: bool) -> Result<Self> {
        let h = attention.heads * attention.head_size;
        let (queries, pairs) =
            ((rows * h * dtype.size()).next_multiple_of(256), (rows * attention.heads * 8).next_multiple_of(256));
        let turns = if backward { 2 } else { 1 };
        let start = gpu.scratch(Purpose::Relative, turns * (2 * queries + pairs))?;
        // SAFETY: the work space has room for four of them in a backward; in a forward nobody asks for the last two.
        let view = |which: usize| unsafe { View::new(start + (which * queries) as u64, rows * h, dtype) };
        let pairs_at = |which: usize| start + (2 * turns * queries + which * pairs) as u64;
        let last = 2 * (turns - 1);
        Ok(Self {
            content: view(0),
            position: view(1),
            by_segment: pairs_at(0),
            dcontent: view(last),
            dposition: view(last + 1),
            segment_sums: pairs_at(turns - 1),
        })
    }
}

/// An attention under way.
struct Call<'a> {
    attention: &'a Xl,
    described: Attention,
    inputs: &'a Inputs<'a>,
    dtype: DType,
    /// Heads that are worked on at a time.
    heads: usize,
    space: Space<'a>,
    /// T × heads at a time × P, and as many matrices as asked for of T × heads at a time × L, one after the other.
    products: u64,
    matrix: u64,
}

impl<'a> Call<'a> {
    #[track_caller]
    fn new(gpu: &Gpu, attention: &'a Xl, inputs: &'a Inputs<'a>, backward: bool) -> Result<Self> {
        let (heads, h, dtype) = (attention.heads, attention.heads * attention.head_size, inputs.query.dtype());
        let Inputs { query, positions, queries, biases, segments, relations, first, longest, .. } = inputs;
        let p = positions.rows();
        assert!(unsupported(attention).is_none(), "attention: {:?}", unsupported(attention));
        query.expect("the query", queries.tokens, h, dtype);
        positions.expect("the positions", p, h, dtype);
        biases.expect("attention", "the biases", 3 * h, DType::F32);
        assert!(p.is_multiple_of(UNIT) && longest.is_multiple_of(UNIT), "attention: {p} positions, {longest} keys");
        assert!(*longest <= (first + 1).next_multiple_of(UNIT) && first + 1 < p, "attention: too few positions");
        let keys = inputs.cross.map_or(queries.tokens, |cross| cross.keys.tokens);
        if let Some(table) = segments {
            table.expect("attention", "the segments", 2 * h, DType::F32);
            assert!(relations.segments.is_some(), "attention: a table of segments, and tokens without");
        }
        if let Some(places) = relations.places {
            places.expect("attention", "the places", queries.tokens, DType::U32);
        }
        for [own, other] in [relations.segments, relations.orders].into_iter().flatten() {
            own.expect("attention", "numbers of queries", queries.tokens, DType::U32);
            other.expect("attention", "numbers of keys", keys, DType::U32);
        }
        let (of_products, of_matrix) = (queries.tokens * p * dtype.size(), queries.tokens * longest * dtype.size());
        let matrices = if backward { 2 } else { 1 };
        let fits = inputs.room / (of_products + matrices * of_matrix).max(1);
        let count = fits.clamp(1, heads);
        Ok(Self {
            attention,
            described: attention.content(),
            inputs,
            dtype,
            heads: count,
            space: Space::new(gpu, queries.tokens, attention, dtype, backward)?,
            products: gpu.scratch(Purpose::Positions, count * of_products)?,
            matrix: gpu.scratch(Purpose::Scores, matrices * count * of_matrix)?,
        })
    }

    /// Queries with the bias of contents, and all else as it is.
    fn content(&self) -> Content<'_> {
        let Inputs { key, value, queries, cross, .. } = *self.inputs;
        Content { query: Columns::new(self.space.content, self.width()), key, value, queries, cross, bias: None }
    }

    fn width(&self) -> usize {
        self.attention.heads * self.attention.head_size
    }

    fn arguments(&self) -> Arguments {
        let Inputs { query, biases, segments, relations, first, .. } = self.inputs;
        let [query_segments, key_segments] = relations.segments.map_or([0; 2], |both| both.map(|x| x.address()));
        let [query_orders, key_orders] = relations.orders.map_or([0; 2], |both| both.map(|x| x.address()));
        Arguments {
            biases: biases.address(),
            segments: address(*segments),
            query: query.address(),
            content: self.space.content.address(),
            position: self.space.position.address(),
            by_segment: self.space.by_segment,
            products: self.products,
            matrix: self.matrix,
            places: address(relations.places),
            query_segments,
            key_segments,
            query_orders,
            key_orders,
            stride: query.stride as u32,
            first: *first as u32,
            factor: 1.0,
        }
    }

    /// The general kernels' arguments.
    fn described<'d>(&self, plan: &Plan<'_>, dropout: Option<Dropout<'d>>) -> general::Arguments<'d> {
        let mut arguments = plan.arguments(dropout);
        arguments.by_query = self.matrix;
        arguments.positions = self.inputs.positions.rows() as u32;
        arguments.reach = self.inputs.longest as i32;
        arguments
    }

    /// Where the gradient of the matrix lies.
    fn dscores(&self) -> u64 {
        self.matrix + (self.inputs.queries.tokens * self.heads * self.inputs.longest * self.dtype.size()) as u64
    }

    /// The general kernels' plan.
    #[track_caller]
    fn plan<'p>(&'p self, gpu: &Gpu, content: &'p Content<'p>, others: &[Columns<'_>], drops: bool) -> Plan<'p> {
        let mut plan = Plan::new(gpu, &self.described, content, others, drops);
        plan.tiled = None;
        let place = if plan.tiles.is_some() { 2 } else { 1 };
        plan.variant[place] = MATRIX;
        plan
    }

    /// Adds the biases to queries.
    fn shift(&self, gpu: &Gpu, arguments: &general::Arguments<'_>) -> Result<()> {
        let blocks = (self.inputs.queries.tokens * self.attention.heads).div_ceil(8);
        // SAFETY: the queries' rows, whose lengths are checked, and as many numbers in the work space.
        unsafe {
            gpu.launch(
                &SOURCE,
                &[store(self.dtype)],
                "shift_queries",
                Launch::new(blocks, 256),
                &[arguments, &self.arguments()],
            )
        }
    }

    /// The heads that are worked on together: the first, and how many.
    fn parts(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (all, heads) = (self.attention.heads, self.heads);
        (0..all).step_by(heads).map(move |first| (first, heads.min(all - first)))
    }

    /// The matrix of some heads.
    fn gather(&self, gpu: &Gpu, arguments: &mut general::Arguments<'_>, (first, count): (usize, usize)) -> Result<()> {
        (arguments.first_head, arguments.matrix_heads) = (first as u32, count as u32);
        let position = self.of_heads(Columns::new(self.space.position, self.width()), first);
        let table = self.of_heads(self.inputs.positions, first).transposed();
        self.multiply(gpu, count, [position, table, self.of_products(count)])?;
        self.launch(gpu, "gather", arguments, &self.arguments())
    }

    /// A kernel of ours over the queries of the heads that are worked on.
    fn launch(
        &self,
        gpu: &Gpu,
        kernel: &'static str,
        arguments: &mut general::Arguments<'_>,
        own: &Arguments,
    ) -> Result<()> {
        let Sequences { table, room, .. } = self.inputs.queries;
        if let Some(Cross { query_offsets, key_offsets, .. }) = self.inputs.cross {
            (arguments.own_offsets, arguments.other_offsets) = (query_offsets.address(), key_offsets.address());
        }
        for start in (0..room.items()).step_by(65_535) {
            let items = (room.items() - start).min(65_535);
            arguments.items = table.part(ITEM * start, ITEM * items).address();
            let launch = Launch { grid: (arguments.matrix_heads, items as u32), threads: 256, shared: 0 };
            // SAFETY: the table was written from sequences within the tokens, whose numbers are checked; products and matrices have a
            // row for each of them.
            unsafe { gpu.launch(&SOURCE, &[store(self.dtype)], kernel, launch, &[&*arguments, own])? };
        }
        Ok(())
    }

    /// Products of as many heads as there are, all at once: those of a head lie behind the head's before.
    fn multiply(&self, gpu: &Gpu, count: usize, [a, b, out]: [Operand<'_>; 3]) -> Result<()> {
        let finish = Finish { scale: self.attention.scale, ..Finish::default() };
        products(gpu, Batch { count, steps: [a.step, b.step, out.step] }, a.matrix, b.matrix, out.matrix, finish)
    }

    /// Some heads' columns of a matrix of H columns, from a head on.
    fn of_heads<'v>(&self, columns: Columns<'v>, first: usize) -> Operand<'v> {
        let (d, rows) = (self.attention.head_size, columns.rows());
        let start = columns.offset + first * d;
        let view = columns.view.part(start, columns.view.len() - start);
        Operand { matrix: Matrix::strided(view, rows, d, columns.stride), step: d }
    }

    /// The products of so many heads.
    fn of_products(&self, count: usize) -> Operand<'_> {
        let (p, rows) = (self.inputs.positions.rows(), self.inputs.queries.tokens);
        // SAFETY: `new` asked for as many for at least as many heads.
        let view = unsafe { View::new(self.products, rows * count * p, self.dtype) };
        Operand { matrix: Matrix::strided(view, rows, p, count * p), step: p }
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

/// out (T×H) = the attention; `log_sums` (A×T, f32) gets the logarithm of each softmax's denominator.
pub fn forward(
    gpu: &Gpu,
    attention: &Xl,
    inputs: &Inputs<'_>,
    dropout: Option<Dropout<'_>>,
    out: View<'_>,
    log_sums: View<'_>,
) -> Result<()> {
    let (rows, width) = (inputs.queries.tokens, attention.heads * attention.head_size);
    out.expect("attention", "the output", rows * width, inputs.query.dtype());
    log_sums.expect("attention", "the log-sums", attention.heads * rows, DType::F32);
    let call = Call::new(gpu, attention, inputs, false)?;
    let content = call.content();
    let plan = call.plan(gpu, &content, &[Columns::new(out, width)], dropout.is_some());
    let mut arguments = call.described(&plan, dropout);
    (arguments.result, arguments.log_sums) = (out.address(), log_sums.address());
    call.shift(gpu, &arguments)?;
    for part in call.parts() {
        call.gather(gpu, &mut arguments, part)?;
        let shared = plan.forward_bytes(&arguments);
        // SAFETY: all lengths were checked; the kernels stay within the sequences of the tables, and the matrix has a row for each query.
        unsafe { plan.launch(gpu, "forward", false, shared, &mut arguments)? };
    }
    Ok(())
}

/// Gradients of [`forward`]. `out` and `log_sums` are what it gave.
pub fn backward(
    gpu: &Gpu,
    attention: &Xl,
    inputs: &Inputs<'_>,
    dropout: Option<Dropout<'_>>,
    out: View<'_>,
    log_sums: View<'_>,
    dout: View<'_>,
    gradients: Gradients<'_>,
) -> Result<()> {
    let Gradients { query, key, value, positions, biases, segments } = gradients;
    let h = attention.heads * attention.head_size;
    query.expect_gradient_of(&inputs.query);
    positions.expect_gradient_of(&inputs.positions);
    assert!(segments.is_some() == inputs.segments.is_some(), "attention: segments without a gradient, or the reverse");
    let call = Call::new(gpu, attention, inputs, true)?;
    let content = call.content();
    let dcontent = Columns::new(call.space.dcontent, h);
    let others = general::check_backward(&call.described, &content, out, log_sums, dout, [dcontent, key, value]);
    let plan = call.plan(gpu, &content, &others, dropout.is_some());
    let mut arguments = call.described(&plan, dropout);
    arguments.set_backward(gpu, &content, out, log_sums, dout, [dcontent, key, value])?;
    arguments.dscores = call.dscores();
    let shared = match plan.tiles {
        Some(tiles) => general::backward_bytes(tiles, &arguments, false),
        None => 0,
    };
    // On tensor cores gradients of scores are divided by what dropout multiplies with.
    let factor = if plan.tiles.is_some() { dropout.map_or(1.0, |dropout| dropout.scale()) } else { 1.0 };
    let back = Arguments { factor, by_segment: call.space.segment_sums, ..call.arguments() };
    call.shift(gpu, &arguments)?;
    // SAFETY: all lengths were checked; the kernels stay within the sequences of the tables, and the work space has a pair of numbers
    // for every query and head, and a number for every score.
    unsafe { plan.launch_terms(gpu, &arguments)? };
    for (first, count) in call.parts() {
        call.gather(gpu, &mut arguments, (first, count))?;
        // SAFETY: as above.
        unsafe {
            plan.launch(gpu, "backward_queries", false, shared, &mut arguments)?;
            plan.launch(gpu, "backward_keys", true, shared, &mut arguments)?;
        }
        call.launch(gpu, "spread", &mut arguments, &back)?;
        let slopes = call.of_products(count);
        let [position, dposition] =
            [call.space.position, call.space.dposition].map(|view| call.of_heads(Columns::new(view, h), first));
        call.multiply(gpu, count, [slopes, call.of_heads(inputs.positions, first), dposition])?;
        call.multiply(gpu, count, [slopes.transposed(), position, call.of_heads(positions, first)])?;
    }

    let rows = inputs.queries.tokens;
    let strips = Strips::summed(gpu, h, rows);
    let (chunks, own) = (strips.chunks(), back);
    let partial = gpu.scratch(Purpose::Sums, chunks * 5 * h * 4)?;
    let of_segments = partial + (chunks * 3 * h * 4) as u64;
    // SAFETY: a row of H numbers for each query, and five for each chunk of rows.
    unsafe {
        let views = (call.space.dcontent.address(), call.space.dposition.address(), query.address());
        let to: [&dyn Argument; 8] =
            [&arguments, &own, &views.0, &views.1, &views.2, &partial, &of_segments, &strips.chunk];
        gpu.launch(&SOURCE, &[store(call.dtype)], "finish_queries", strips.launch(), &to)?;
    }
    reduce::finish(gpu, partial, chunks, 3 * h, [Some(biases), None, None])?;
    match segments {
        Some(sum) => reduce::finish(gpu, of_segments, chunks, 2 * h, [Some(sum), None, None]),
        None => Ok(()),
    }
}

/// The probabilities of every sequence, one after the other: A×N×M each, before dropout. For people to look at.
///
/// `offsets` are those that the tables were written from, without room to spare.
pub fn probabilities(
    gpu: &Gpu,
    attention: &Xl,
    inputs: &Inputs<'_>,
    offsets: (&[u32], &[u32]),
    out: View<'_>,
) -> Result<()> {
    let call = Call::new(gpu, attention, inputs, false)?;
    let content = call.content();
    let plan = call.plan(gpu, &content, &[], false);
    let mut whole = call.described(&plan, None);
    call.shift(gpu, &whole)?;
    for part in call.parts() {
        call.gather(gpu, &mut whole, part)?;
        let variant = [store(call.dtype), MATRIX, ""];
        general::probabilities_of(gpu, &call.described, &content, offsets, variant, out, |plan| {
            let mut arguments = call.described(plan, None);
            (arguments.first_head, arguments.matrix_heads) = (part.0 as u32, part.1 as u32);
            arguments
        })?;
    }
    Ok(())
}

/// The table of sines, then cosines, of the distances from `first` downwards (rows × `width`), and what dropout counts each row by, u32.
/// Distances beyond `most` count as that many.
pub fn sinusoids(gpu: &Gpu, first: usize, most: usize, width: usize, out: View<'_>, ids: View<'_>) -> Result<()> {
    let rows = out.rows("sinusoids", width);
    assert!(width.is_multiple_of(2), "sinusoids: {width} is odd");
    ids.expect("sinusoids", "the rows' numbers", 2 * rows, DType::U32);
    // SAFETY: rows of `width` numbers, and two for each.
    unsafe {
        let sizes = (first as u32, most.min(i32::MAX as usize) as u32, width as u32);
        let arguments: [&dyn Argument; 5] = [&out.address(), &ids.address(), &sizes.0, &sizes.1, &sizes.2];
        gpu.launch(&SOURCE, &[store(out.dtype())], "sinusoids", Launch::new(rows, 256), &arguments)
    }
}
