//! The attention of Transformer-XL (Dai et al. 2019) and XLNet (Yang et al. 2019) over flat tokens: besides their contents, a query is
//! scored against how far away a key stands and against whether both are of one segment, each time with a bias of its own.
//!
//! Legend: A heads, D = head size, H = A·D; N queries and M keys of one sequence; P rows of the table of positions, U of them that a
//! block of queries needs.
//!
//! score(i, j) = scale·((q_i + u)·k_j + (q_i + w)·R(place(i) − j) + (q_i + z)·s(i, j)), where R is a table of positions whose row t
//! belongs to the distance first − t, and s one of two vectors: of the same segment, or of another. What a query sees and where it
//! stands is what [`Relations`] tell, so that earlier tokens (more keys than queries), permutations and a second stream of queries are
//! one kernel.
//!
//! A row of (q + w)·Rᵀ has all that positions add for a query, and rows follow each other as keys do: what belongs to a query is a
//! part of that row as it is. Nothing is N×M but a block.

use std::ops::Range;

use super::softmax::{softmax, softmax_backward};
use super::{Attention, AttentionDropout, Block, Matrix, Part, Right, View, ViewMut, store};
use crate::cpu::gemm::{Finish, product, product_into};
use crate::cpu::scratch::{self, Purpose};
use crate::cpu::simd::{Element, Simd, read, write};
use crate::cpu::{Cpu, SharedMut};

/// The definition for one sequence and one head, in f64.
pub mod reference {
    use super::super::reference::{self as plain, Output};
    use super::Relations;

    /// What scores are made of.
    pub struct Inputs<'a> {
        /// N×D.
        pub q: &'a [f64],
        /// M×D.
        pub k: &'a [f64],
        /// M×D.
        pub v: &'a [f64],
        /// D.
        pub d: usize,
        /// D each: what is added to queries before they meet contents, positions and segments.
        pub biases: [&'a [f64]; 3],
        /// P×D.
        pub positions: &'a [f64],
        /// The distance of the first row of the positions.
        pub first: usize,
        /// 2×D: of the same segment, of another.
        pub segments: Option<&'a [f64]>,
        /// Of this sequence.
        pub relations: Relations<'a>,
        /// What all of a score is multiplied by.
        pub scale: f64,
    }

    /// The gradients of [`forward`].
    pub struct Gradients {
        /// N×D.
        pub q: Vec<f64>,
        /// M×D.
        pub k: Vec<f64>,
        /// M×D.
        pub v: Vec<f64>,
        /// D each.
        pub biases: [Vec<f64>; 3],
        /// P×D.
        pub positions: Vec<f64>,
        /// 2×D; empty where there are no segments.
        pub segments: Vec<f64>,
    }

    impl Inputs<'_> {
        fn sizes(&self) -> (usize, usize) {
            (self.q.len() / self.d, self.k.len() / self.d)
        }

        fn shifted(&self, which: usize) -> Vec<f64> {
            self.q.iter().enumerate().map(|(i, q)| q + self.biases[which][i % self.d]).collect()
        }

        /// For every pair of a query and a key: 1 and the row of the positions, then 2 and that of the segments.
        fn terms(&self, mut each: impl FnMut([usize; 2], usize, &[f64], usize)) {
            let (n, m) = self.sizes();
            for pair in 0..n * m {
                let (i, j) = (pair / m, pair % m);
                each([i, j], 1, self.positions, self.first + j - self.relations.place(i, m - n));
                if let Some(segments) = self.segments {
                    each([i, j], 2, segments, usize::from(!self.relations.same_segment(i, j)));
                }
            }
        }
    }

    /// drop(softmax(scores))·v; `mask` holds 0 or dropout's scale for every probability.
    pub fn forward(x: &Inputs<'_>, mask: Option<&[f64]>) -> Output {
        let ((n, m), d) = (x.sizes(), x.d);
        let shifted = [0, 1, 2].map(|which| x.shifted(which));
        let mut added = vec![0.0; n * m];
        x.terms(|[i, j], which, table, row| {
            let products = (0..d).map(|c| shifted[which][i * d + c] * table[row * d + c]);
            added[i * m + j] += x.scale * products.sum::<f64>();
        });
        for (pair, added) in added.iter_mut().enumerate() {
            if !x.relations.sees(pair / m, pair % m, m - n) {
                *added = f64::NEG_INFINITY;
            }
        }
        plain::forward(&shifted[0], x.k, x.v, d, x.scale, Some(&added), mask)
    }

    /// The gradients of [`forward`] with respect to all that it reads.
    pub fn backward(x: &Inputs<'_>, output: &Output, mask: Option<&[f64]>, dout: &[f64]) -> Gradients {
        let ((_, m), d) = (x.sizes(), x.d);
        let shifted = [0, 1, 2].map(|which| x.shifted(which));
        let [of_content, k, v, dadded] = plain::backward(&shifted[0], x.k, x.v, d, x.scale, output, mask, dout);
        let mut of_shifted = [of_content, vec![0.0; x.q.len()], vec![0.0; x.q.len()]];
        let mut tables = [x.positions.len(), x.segments.map_or(0, <[f64]>::len)].map(|size| vec![0.0; size]);
        x.terms(|[i, j], which, table, row| {
            let slope = x.scale * dadded[i * m + j];
            for c in 0..d {
                of_shifted[which][i * d + c] += slope * table[row * d + c];
                tables[which - 1][row * d + c] += slope * shifted[which][i * d + c];
            }
        });
        let biases = [0, 1, 2].map(|which| {
            let column = |c: usize| of_shifted[which].iter().skip(c).step_by(d).sum();
            (0..d).map(column).collect()
        });
        let q = (0..x.q.len()).map(|i| of_shifted.iter().map(|part| part[i]).sum()).collect();
        let [positions, segments] = tables;
        Gradients { q, k, v, biases, positions, segments }
    }
}

/// The order of a key that no query sees.
pub const UNSEEN: u32 = u32::MAX;

/// The score of a key that a query does not see, as in `transformers`. Every query must see at least one.
const HIDDEN: f32 = -1e30;

/// How queries stand to keys: a number for each query, or key, of all sequences, or of one.
#[derive(Clone, Copy, Debug, Default)]
pub struct Relations<'a> {
    /// Where each query stands among its sequence's keys. Without, the last stands at the last key, the one before at the key before:
    /// further keys at the front are earlier tokens.
    pub places: Option<&'a [u32]>,
    /// The segments of queries, and of keys.
    pub segments: Option<[&'a [u32]; 2]>,
    /// The orders of queries, and of keys. A query sees the keys of a lower order, and its own, which is the last key for the last
    /// query and so on, unless nobody sees that ([`UNSEEN`]). Without, it sees all.
    pub orders: Option<[&'a [u32]; 2]>,
}

impl<'a> Relations<'a> {
    /// Those of one sequence.
    pub fn of(&self, queries: Range<usize>, keys: Range<usize>) -> Self {
        let both = |[own, other]: [&'a [u32]; 2]| [&own[queries.clone()], &other[keys.clone()]];
        Self {
            places: self.places.map(|places| &places[queries.clone()]),
            segments: self.segments.map(both),
            orders: self.orders.map(both),
        }
    }

    /// Where a query stands among the keys of its sequence, which has `before` more keys than queries.
    pub fn place(&self, query: usize, before: usize) -> usize {
        self.places.map_or(query + before, |places| places[query] as usize)
    }

    /// Whether a query and a key are of one segment.
    pub fn same_segment(&self, query: usize, key: usize) -> bool {
        self.segments.is_none_or(|[queries, keys]| queries[query] == keys[key])
    }

    /// Whether a query sees a key.
    pub fn sees(&self, query: usize, key: usize, before: usize) -> bool {
        let own = key == query + before;
        self.orders.is_none_or(|[of, orders]| orders[key] < of[query] || own && orders[key] != UNSEEN)
    }

    fn check(&self, queries: usize, keys: usize) {
        let fits = |[own, other]: [&[u32]; 2]| own.len() == queries && other.len() == keys;
        assert!(self.places.is_none_or(|places| places.len() == queries), "attention: one place for each query");
        assert!(self.segments.is_none_or(fits), "attention: one segment for each query and key");
        assert!(self.orders.is_none_or(fits), "attention: one order for each query and key");
    }
}

/// An attention apart from its data.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Xl {
    /// A.
    pub heads: usize,
    /// D.
    pub head_size: usize,
    /// What all of a score is multiplied by.
    pub scale: f32,
}

impl Xl {
    /// Scores are divided by √D.
    pub fn new(heads: usize, head_size: usize) -> Self {
        Self { heads, head_size, scale: 1.0 / (head_size as f32).sqrt() }
    }

    /// The attention among contents alone.
    pub fn content(&self) -> Attention {
        Attention { scale: self.scale, ..Attention::new(self.heads, self.head_size) }
    }

    fn check<E>(&self, inputs: &Inputs<'_, E>, dropout: AttentionDropout<'_>) {
        let (content, h) = (&inputs.content, self.heads * self.head_size);
        self.content().check_inputs(content, dropout);
        inputs.relations.check(content.query.rows(), content.key.rows());
        assert!(inputs.positions.width == h, "attention: widths of positions differ");
        assert!(inputs.biases.len() == 3 * h, "attention: three biases");
        assert!(inputs.segments.is_none_or(|table| table.len() == 2 * h), "attention: two segments");
        assert!(
            inputs.segments.is_none() || inputs.relations.segments.is_some(),
            "attention: a table of segments, and tokens without"
        );
        for (queries, keys) in content.query_offsets.windows(2).zip(content.key_offsets.windows(2)) {
            let keys = (keys[1] - keys[0]) as usize;
            assert!((queries[1] - queries[0]) as usize <= keys, "attention: more queries than keys");
            assert!(
                keys <= inputs.first + 1 && inputs.first + keys <= inputs.positions.rows(),
                "attention: too few positions"
            );
            let places = inputs.relations.places.map(|places| &places[queries[0] as usize..queries[1] as usize]);
            assert!(
                places.is_none_or(|places| places.iter().all(|place| (*place as usize) < keys)),
                "attention: a query stands outside of its sequence"
            );
        }
    }
}

/// What an attention reads.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a, E> {
    /// Queries, keys and values, without a bias. A sequence has at least as many keys as queries.
    pub content: super::Inputs<'a, E>,
    /// u, w and z: 3×H.
    pub biases: &'a [f32],
    /// R: P×H.
    pub positions: View<'a, E>,
    /// The distance of the first row of the positions: for M keys at least M − 1, and as many rows after it.
    pub first: usize,
    /// 2×H: of the same segment, of another; none where segments do not count.
    pub segments: Option<&'a [f32]>,
    /// How queries stand to keys.
    pub relations: Relations<'a>,
}

/// Where the gradients of [`forward`] go.
#[derive(Debug)]
pub struct Gradients<'a, E> {
    /// Written.
    pub query: ViewMut<'a, E>,
    /// Written.
    pub key: ViewMut<'a, E>,
    /// Written.
    pub value: ViewMut<'a, E>,
    /// P×H, written.
    pub positions: ViewMut<'a, E>,
    /// 3×H, added to.
    pub biases: &'a mut [f32],
    /// 2×H where there are segments, added to.
    pub segments: Option<&'a mut [f32]>,
}

/// The sines, then the cosines, of the distances from `first` downwards: a row for each, of `width` numbers. Distances beyond `most` on
/// either side count as that many.
pub fn sinusoids<E: Element>(cpu: &Cpu, first: usize, most: usize, width: usize, out: &mut [E]) {
    let half = width / 2;
    assert!(width.is_multiple_of(2) && out.len().is_multiple_of(width.max(1)), "sinusoids: lengths differ");
    let most = i64::try_from(most).unwrap_or(i64::MAX);
    let (rows, out) = (out.len() / width.max(1), SharedMut::new(out));
    cpu.for_ranges(rows, 8, |_, range| {
        // SAFETY: every row is one task's.
        let out = unsafe { out.slice(range.start * width, range.len() * width) };
        for t in 0..half {
            let frequency = frequency(t, width);
            for (row, out) in range.clone().zip(out.chunks_exact_mut(width)) {
                let (sin, cos) = at(first as i64 - row as i64, most, frequency);
                (out[t], out[half + t]) = (E::from_f32(sin), E::from_f32(cos));
            }
        }
    });
}

/// One of them.
pub fn sinusoid(distance: i64, t: usize, width: usize) -> (f32, f32) {
    at(distance, i64::MAX, frequency(t, width))
}

fn frequency(t: usize, width: usize) -> f32 {
    1.0 / 10_000f64.powf(2.0 * t as f64 / width as f64) as f32
}

/// The angle is rounded to f32, as in `transformers`.
fn at(distance: i64, most: i64, frequency: f32) -> (f32, f32) {
    let angle = f64::from(distance.clamp(-most, most) as f32 * frequency);
    (angle.sin() as f32, angle.cos() as f32)
}

/// What positions and segments add to the scores of a block of queries.
struct Added<'a> {
    relations: Relations<'a>,
    /// M − N.
    before: usize,
    /// The block's first query in its sequence.
    first: usize,
    /// The distance of the first row of `by_position`.
    far: usize,
}

impl Added<'_> {
    /// Which numbers of its row of `by_position` belong to a query of the block.
    #[inline(always)]
    fn columns(&self, query: usize, keys: usize) -> Range<usize> {
        let start = self.far - self.relations.place(self.first + query, self.before);
        start..start + keys
    }
}

dispatch! {
    /// scores (`keys` a row) += what positions (`width` a row) and segments (2 a row) add; hides what is not seen.
    fn add(added: &Added<'_>, by_position: &[f32], width: usize, by_segment: &[f32], scores: &mut [f32], keys: usize) = add_body
}

/// # Safety
/// The instruction set must be there.
#[inline(always)]
unsafe fn add_body<S: Simd>(
    added: &Added<'_>,
    by_position: &[f32],
    width: usize,
    by_segment: &[f32],
    scores: &mut [f32],
    keys: usize,
) {
    let rows = scores.chunks_exact_mut(keys).zip(by_position.chunks_exact(width));
    for (i, ((row, from), by_segment)) in rows.zip(by_segment.chunks_exact(2)).enumerate() {
        let from = &from[added.columns(i, keys)];
        for c in (0..keys).step_by(S::LANES) {
            // SAFETY: c is below the length of both.
            unsafe { write::<S, f32>(row, c, S::add(read::<S, f32>(row, c), read::<S, f32>(from, c))) };
        }
        let query = added.first + i;
        if let Some([of, segments]) = added.relations.segments {
            for (score, segment) in row.iter_mut().zip(segments) {
                *score += if *segment == of[query] { by_segment[0] } else { by_segment[1] };
            }
        }
        if let Some([of, orders]) = added.relations.orders {
            let (own, own_score) = (query + added.before, row[query + added.before]);
            for (score, order) in row.iter_mut().zip(orders) {
                *score = if *order < of[query] { *score } else { HIDDEN };
            }
            if orders[own] != UNSEEN {
                row[own] = own_score;
            }
        }
    }
}

/// A backward's sums of the gradients of a query's scores: those of keys of its own segment, and of others. Eight at a time, so that
/// they can be added side by side.
fn segment_sums<E: Element>(dscores: &[E], segments: &[u32], own: u32) -> [f32; 2] {
    let mut sums = [[0f32; 8]; 2];
    for (slopes, segments) in dscores.chunks(8).zip(segments.chunks(8)) {
        for (lane, (slope, segment)) in slopes.iter().zip(segments).enumerate() {
            let slope = slope.to_f32();
            let same = *segment == own;
            sums[0][lane] += if same { slope } else { 0.0 };
            sums[1][lane] += if same { 0.0 } else { slope };
        }
    }
    sums.map(|lanes| lanes.iter().sum())
}

/// What all tasks read.
struct Work<'a, 'b, E> {
    cpu: &'a Cpu,
    attention: &'a Attention,
    inputs: &'a Inputs<'b, E>,
    dropout: AttentionDropout<'a>,
}

/// Scores of a block under way.
struct Space<'a, E> {
    /// Queries × M.
    scores: &'a mut [f32],
    /// Queries × U.
    by_position: &'a mut [f32],
    /// Queries × 2.
    by_segment: &'a mut [f32],
    /// Queries with the biases of contents, and of positions: queries × D each.
    shifted: [&'a mut [E]; 2],
}

impl<'a, E: Element> Space<'a, E> {
    fn size((block, keys, width): (usize, usize, usize), d: usize) -> usize {
        block * (keys + width + 2 + 2 * d)
    }

    fn split(space: &'a mut [f32], sizes: (usize, usize, usize), d: usize) -> (Self, &'a mut [f32]) {
        let (block, keys, width) = sizes;
        let (scores, rest) = space.split_at_mut(block * keys);
        let (by_position, rest) = rest.split_at_mut(block * width);
        let (by_segment, rest) = rest.split_at_mut(block * 2);
        let (shifted, rest) = rest.split_at_mut(2 * block * d);
        let (content, position) = bytemuck::cast_slice_mut(shifted)[..2 * block * d].split_at_mut(block * d);
        (Self { scores, by_position, by_segment, shifted: [content, position] }, rest)
    }
}

impl<'b, E: Element> Work<'_, 'b, E> {
    fn part(&self, sequence: usize, head: usize) -> Part<'_> {
        Part::new(self.attention, &self.inputs.content, sequence, head)
    }

    fn relations(&self, part: &Part<'_>) -> Relations<'b> {
        self.inputs.relations.of(part.queries.clone(), part.keys.clone())
    }

    /// Queries of a block, M, and U, at most.
    fn sizes(&self, part: &Part<'_>) -> (usize, usize, usize) {
        let (block, keys) = part.block_sizes();
        let span = match self.relations(part).places {
            None => block - 1,
            Some(places) => places.iter().max().map_or(0, |most| *most as usize),
        };
        (block, keys, span + keys)
    }

    /// What is added to a block's scores, and the rows of the positions that it needs.
    fn added(&self, part: &Part<'_>, block: &Block) -> (Added<'b>, Range<usize>) {
        let (relations, before) = (self.relations(part), block.all_keys - block.all_queries);
        let places = (block.first..block.first + block.queries).map(|query| relations.place(query, before));
        let (least, most) = places.fold((usize::MAX, 0), |(least, most), at| (least.min(at), most.max(at)));
        let rows = self.inputs.first - most..self.inputs.first - least + block.all_keys;
        (Added { relations, before, first: block.first, far: most }, rows)
    }

    fn positions(&self, part: &Part<'_>, rows: Range<usize>) -> Matrix<'b, E> {
        self.inputs.positions.matrix(rows, part.query_column(), self.attention.head_size)
    }

    /// A head's part of one of the vectors in a row: biases, or segments.
    fn vector<'t>(&self, vectors: &'t [f32], which: usize, part: &Part<'_>) -> &'t [f32] {
        let start = which * self.attention.query_width() + part.query_column();
        &vectors[start..start + self.attention.head_size]
    }

    /// A block's queries with a bias.
    fn shifted(&self, part: &Part<'_>, block: &Block, which: usize, mut each: impl FnMut(usize, usize, f32)) {
        let (query, bias) = (&self.inputs.content.query, self.vector(self.inputs.biases, which, part));
        for (i, row) in part.query_rows(block).enumerate() {
            let start = row * query.stride + query.offset + part.query_column();
            for (c, (q, bias)) in query.data[start..start + bias.len()].iter().zip(bias).enumerate() {
                each(i, c, q.to_f32() + bias);
            }
        }
    }

    /// The scores of a block; what they are made of stays in the space.
    fn scores(&self, part: &Part<'_>, block: &Block, space: &mut Space<'_, E>) {
        let (cpu, d, n, keys) = (self.cpu, self.attention.head_size, block.queries, block.all_keys);
        let finish = || Finish { scale: self.attention.scale, ..Finish::default() };
        for (which, to) in space.shifted.iter_mut().enumerate() {
            self.shifted(part, block, which, |i, c, q| to[i * d + c] = E::from_f32(q));
        }
        let [of_contents, of_positions] = space.shifted.each_ref().map(|x| Matrix::new(&x[..n * d], n, d));
        let scores = &mut space.scores[..n * keys];
        let key = self.inputs.content.key.matrix(part.keys.clone(), part.key_column(), d);
        product(cpu, of_contents, Right::Plain(key.transposed()), scores, keys, finish());
        let (added, rows) = self.added(part, block);
        let width = rows.len();
        let by_position = &mut space.by_position[..n * width];
        let table = Right::Plain(self.positions(part, rows).transposed());
        product(cpu, of_positions, table, by_position, width, finish());
        let by_segment = &mut space.by_segment[..2 * n];
        by_segment.fill(0.0);
        if let Some(table) = self.inputs.segments {
            let [same, other] = [0, 1].map(|which| self.vector(table, which, part));
            self.shifted(part, block, 2, |i, c, q| {
                by_segment[2 * i] += q * same[c];
                by_segment[2 * i + 1] += q * other[c];
            });
            by_segment.iter_mut().for_each(|sum| *sum *= self.attention.scale);
        }
        add(cpu.isa(), &added, by_position, width, by_segment, scores, keys);
    }

    /// # Safety
    /// No other task may have the same sequence and head.
    unsafe fn forward(&self, sequence: usize, head: usize, out: SharedMut<E>, log_sums: SharedMut<f32>) {
        let part = self.part(sequence, head);
        if part.queries.is_empty() {
            return;
        }
        let (h, d, sizes) = (self.attention.query_width(), self.attention.head_size, self.sizes(&part));
        let (block, keys, _) = sizes;
        let (drop, content) = (part.dropout(self.dropout), &self.inputs.content);
        // SAFETY: the head's rows of this sequence belong to this task.
        let log_sums = unsafe { log_sums.slice(head * content.query.rows() + part.queries.start, part.queries.len()) };
        scratch::with(Purpose::Kernel, Space::<E>::size(sizes, d) + block * keys, |space: &mut [f32]| {
            let (mut space, weights) = Space::<E>::split(space, sizes, d);
            let weights: &mut [E] = &mut bytemuck::cast_slice_mut(weights)[..block * keys];
            for block in part.blocks() {
                let n = block.queries;
                self.scores(&part, &block, &mut space);
                let (scores, weights) = (&mut space.scores[..n * keys], &mut weights[..n * keys]);
                softmax(self.cpu.isa(), &block, None, drop, scores, weights, &mut log_sums[block.first..][..n]);
                let value = Right::Plain(content.value.matrix(part.keys.clone(), part.key_column(), d));
                let start = part.query_rows(&block).start * h + part.query_column();
                // SAFETY: this head's columns of this sequence's rows belong to this task.
                unsafe {
                    let out = out.part(start, (n - 1) * h + d);
                    product_into(self.cpu, Matrix::new(weights, n, keys), value, out, h, Finish::default());
                }
            }
        });
    }
}

/// out (queries × H) = the attention; `log_sums` (A × queries) gets the logarithm of each softmax's denominator.
pub fn forward<E: Element>(
    cpu: &Cpu,
    attention: &Xl,
    inputs: &Inputs<'_, E>,
    dropout: AttentionDropout<'_>,
    out: &mut [E],
    log_sums: &mut [f32],
) {
    attention.check(inputs, dropout);
    let (rows, heads) = (inputs.content.query.rows(), attention.heads);
    assert!(out.len() == rows * heads * attention.head_size && log_sums.len() == heads * rows, "lengths differ");
    let (out, log_sums) = (SharedMut::new(out), SharedMut::new(log_sums));
    let content = attention.content();
    let work = Work { cpu, attention: &content, inputs, dropout };
    cpu.for_each(inputs.content.query_offsets.len().saturating_sub(1) * heads, |i| {
        // SAFETY: every task has its own sequence and head.
        unsafe { work.forward(i / heads, i % heads, out, log_sums) };
    });
}

/// The probabilities of every sequence, one after the other: A×N×M each, before dropout. For people to look at.
pub fn probabilities<E: Element>(cpu: &Cpu, attention: &Xl, inputs: &Inputs<'_, E>, out: &mut [f32]) {
    attention.check(inputs, None);
    let (content, heads, d) = (attention.content(), attention.heads, attention.head_size);
    let (query_offsets, key_offsets) = (inputs.content.query_offsets, inputs.content.key_offsets);
    assert!(out.len() == content.probabilities(query_offsets, key_offsets), "attention: lengths differ");
    let (out, work) = (SharedMut::new(out), Work { cpu, attention: &content, inputs, dropout: None });
    cpu.for_each(query_offsets.len().saturating_sub(1) * heads, |i| {
        let part = work.part(i / heads, i % heads);
        if part.queries.is_empty() {
            return;
        }
        let before = content.probabilities(&query_offsets[..=part.sequence], &key_offsets[..=part.sequence]);
        let (sizes, keys) = (work.sizes(&part), part.keys.len());
        let size = part.queries.len() * keys;
        // SAFETY: every task has its own sequence and head.
        let out = unsafe { out.slice(before + part.head * size, size) };
        scratch::with(Purpose::Kernel, Space::<E>::size(sizes, d) + sizes.0, |space: &mut [f32]| {
            let (mut space, log_sums) = Space::<E>::split(space, sizes, d);
            for block in part.blocks() {
                let n = block.queries;
                work.scores(&part, &block, &mut space);
                let out = &mut out[block.first * keys..][..n * keys];
                softmax(cpu.isa(), &block, None, None, &mut space.scores[..n * keys], out, &mut log_sums[..n]);
            }
        });
    });
}

/// The gradients of [`forward`], from its log-sums and the gradient of its output.
pub fn backward<E: Element>(
    cpu: &Cpu,
    attention: &Xl,
    inputs: &Inputs<'_, E>,
    dropout: AttentionDropout<'_>,
    log_sums: &[f32],
    dout: &[E],
    gradients: Gradients<'_, E>,
) {
    attention.check(inputs, dropout);
    let (rows, heads, d) = (inputs.content.query.rows(), attention.heads, attention.head_size);
    let (h, positions) = (heads * d, inputs.positions.rows());
    assert!(dout.len() == rows * h && log_sums.len() == heads * rows, "attention: lengths differ");
    let Gradients { query, key, value, positions: dpositions, biases, segments } = gradients;
    assert!(query.rows() == rows && query.width == h, "attention: the queries' gradient differs");
    assert!(
        [&key, &value].iter().all(|g| g.rows() == inputs.content.key.rows() && g.width == h),
        "attention: gradients differ"
    );
    assert!(dpositions.rows() == positions && dpositions.width == h, "attention: the positions' gradient differs");
    assert!(biases.len() == 3 * h, "attention: the biases' gradient differs");
    assert!(segments.is_some() == inputs.segments.is_some(), "attention: segments without a gradient, or the reverse");
    assert!(segments.as_ref().is_none_or(|to| to.len() == 2 * h), "attention: the segments' gradient differs");
    let sequences = inputs.content.query_offsets.len().saturating_sub(1);
    // Sequences whose shares of the sums over all are added up by one task: enough tasks for many threads, by sizes alone.
    let chunks = 32usize.div_ceil(heads).min(sequences);
    let chunk = sequences.div_ceil(chunks.max(1));
    // Of the positions, then of the biases and of the segments.
    let share = (positions + 5) * d;
    let content = attention.content();
    let work = Work { cpu, attention: &content, inputs, dropout };
    let back = BackwardWork { work: &work, log_sums, dout: View::new(dout, h), query, key, value };
    scratch::with(Purpose::Outer, chunks * heads * share, |sums: &mut [f32]| {
        let shared = SharedMut::new(sums);
        cpu.for_each(chunks * heads, |i| {
            // SAFETY: every task has its own share, and its own sequences and head.
            let sums = unsafe { shared.slice(i * share, share) };
            sums.fill(0.0);
            for sequence in i / heads * chunk..((i / heads + 1) * chunk).min(sequences) {
                // SAFETY: as above.
                unsafe { back.part(sequence, i % heads, sums) };
            }
        });
        let total =
            |head: usize, at: usize| (0..chunks).map(|chunk| sums[(chunk * heads + head) * share + at]).sum::<f32>();
        cpu.for_ranges(positions, 8, |_, range| {
            for row in range {
                for head in 0..heads {
                    // SAFETY: every row is one task's.
                    let out = unsafe { dpositions.data.slice(dpositions.at(row, head * d), d) };
                    out.iter_mut().enumerate().for_each(|(c, out)| *out = E::from_f32(total(head, row * d + c)));
                }
            }
        });
        let vectors = biases.chunks_exact_mut(h).chain(segments.into_iter().flat_map(|to| to.chunks_exact_mut(h)));
        for (which, to) in vectors.enumerate() {
            let numbers = to.iter_mut().enumerate();
            numbers.for_each(|(i, to)| *to += total(i / d, (positions + which) * d + i % d));
        }
    });
}

/// A backward under way.
struct BackwardWork<'a, 'b, 'c, E> {
    work: &'a Work<'a, 'b, E>,
    log_sums: &'a [f32],
    dout: View<'a, E>,
    query: ViewMut<'c, E>,
    key: ViewMut<'c, E>,
    value: ViewMut<'c, E>,
}

/// Work space of one sequence and head beyond that of its scores.
struct BackwardSpace<'a, E> {
    /// Queries × M.
    dweights: &'a mut [f32],
    weights: &'a mut [E],
    dscores: &'a mut [E],
    /// Queries × D: the gradients of queries with each of the biases.
    dqueries: [&'a mut [f32]; 3],
    /// M×D.
    dkey: &'a mut [f32],
    dvalue: &'a mut [f32],
    /// Queries × U: gradients of scores by position.
    dby_position: &'a mut [E],
}

impl<'a, E: Element> BackwardSpace<'a, E> {
    fn size((block, keys, width): (usize, usize, usize), d: usize) -> usize {
        3 * block * keys + (3 * block + 2 * keys) * d + block * width
    }

    fn split(space: &'a mut [f32], (block, keys, width): (usize, usize, usize), d: usize) -> Self {
        let (dweights, rest) = space.split_at_mut(block * keys);
        let (elements, rest) = rest.split_at_mut(2 * block * keys);
        let (weights, dscores) =
            bytemuck::cast_slice_mut::<f32, E>(elements)[..2 * block * keys].split_at_mut(block * keys);
        let (of_contents, rest) = rest.split_at_mut(block * d);
        let (of_positions, rest) = rest.split_at_mut(block * d);
        let (of_segments, rest) = rest.split_at_mut(block * d);
        let (dkey, rest) = rest.split_at_mut(keys * d);
        let (dvalue, rest) = rest.split_at_mut(keys * d);
        let dby_position = &mut bytemuck::cast_slice_mut(rest)[..block * width];
        let dqueries = [of_contents, of_positions, of_segments];
        Self { dweights, weights, dscores, dqueries, dkey, dvalue, dby_position }
    }
}

impl<E: Element> BackwardWork<'_, '_, '_, E> {
    /// One head of a sequence; its share of the gradients of positions, biases and segments is added to `sums`.
    ///
    /// # Safety
    /// No other task may have the same sequence and head.
    unsafe fn part(&self, sequence: usize, head: usize, sums: &mut [f32]) {
        let work = self.work;
        let part = work.part(sequence, head);
        let (d, keys) = (work.attention.head_size, part.keys.len());
        let sizes = if part.queries.is_empty() { (0, keys, keys) } else { work.sizes(&part) };
        let size = Space::<E>::size(sizes, d) + BackwardSpace::<E>::size(sizes, d);
        scratch::with(Purpose::Kernel, size, |space: &mut [f32]| {
            let (mut scores, rest) = Space::<E>::split(space, sizes, d);
            let mut space = BackwardSpace::<E>::split(rest, sizes, d);
            space.dkey.fill(0.0);
            space.dvalue.fill(0.0);
            for block in part.blocks() {
                self.block(&part, &block, &mut scores, &mut space, sums);
                let [dquery, ..] = &space.dqueries;
                // SAFETY: this head's columns of this sequence's rows belong to this task.
                unsafe { store(&self.query, part.query_rows(&block), part.query_column(), dquery, d) };
            }
            for (to, sums) in [(&self.key, &*space.dkey), (&self.value, &*space.dvalue)] {
                // SAFETY: as above.
                unsafe { store(to, part.keys.clone(), part.key_column(), sums, d) };
            }
        });
    }

    /// The share of a block of queries in all gradients, its own queries' in the first of `dqueries`.
    fn block(
        &self,
        part: &Part<'_>,
        block: &Block,
        scores: &mut Space<'_, E>,
        space: &mut BackwardSpace<'_, E>,
        sums: &mut [f32],
    ) {
        let (work, cpu) = (self.work, self.work.cpu);
        let (n, keys, d, scale) = (block.queries, block.all_keys, work.attention.head_size, work.attention.scale);
        let (content, positions) = (&work.inputs.content, work.inputs.positions.rows());
        let log_sums = &self.log_sums[part.head * content.query.rows()..][part.queries.clone()];
        work.scores(part, block, scores);
        let dout = part.query(&self.dout, block);
        let [key, value] = [&content.key, &content.value].map(|x| x.matrix(part.keys.clone(), part.key_column(), d));
        product(cpu, dout, Right::Plain(value.transposed()), space.dweights, keys, Finish::default());
        let (weights, dscores) = (&mut space.weights[..n * keys], &mut space.dscores[..n * keys]);
        softmax_backward(
            cpu.isa(),
            block,
            None,
            part.dropout(work.dropout),
            &log_sums[block.first..block.first + n],
            &mut scores.scores[..n * keys],
            &mut space.dweights[..n * keys],
            weights,
            dscores,
            None,
        );
        let scaled = |accumulate: bool| Finish { scale, accumulate, ..Finish::default() };
        let [of_contents, of_positions] = scores.shifted.each_ref().map(|x| Matrix::new(&x[..n * d], n, d));
        let [dquery, by_positions, by_segments] = space.dqueries.each_mut().map(|x| &mut x[..n * d]);
        let slopes = Matrix::new(&*dscores, n, keys);
        product(cpu, slopes, Right::Plain(key), dquery, d, scaled(false));
        product(cpu, slopes.transposed(), Right::Plain(of_contents), space.dkey, d, scaled(true));
        let summed = Finish { accumulate: true, ..Finish::default() };
        product(cpu, Matrix::new(&*weights, n, keys).transposed(), Right::Plain(dout), space.dvalue, d, summed);

        let (added, rows) = work.added(part, block);
        let width = rows.len();
        let spread = &mut space.dby_position[..n * width];
        spread.fill(E::default());
        for (i, (to, from)) in spread.chunks_exact_mut(width).zip(dscores.chunks_exact(keys)).enumerate() {
            to[added.columns(i, keys)].copy_from_slice(from);
        }
        let spread = Matrix::new(&*spread, n, width);
        product(cpu, spread, Right::Plain(work.positions(part, rows.clone())), by_positions, d, scaled(false));
        let (dpositions, vectors) = sums.split_at_mut(positions * d);
        let dpositions = &mut dpositions[rows.start * d..rows.end * d];
        product(cpu, spread.transposed(), Right::Plain(of_positions), dpositions, d, scaled(true));

        by_segments.fill(0.0);
        let (biases, dsegments) = vectors.split_at_mut(3 * d);
        if let (Some(table), Some([of, segments])) = (work.inputs.segments, added.relations.segments) {
            let tables = [0, 1].map(|which| work.vector(table, which, part));
            // The gradients of what segments add: as they lie, 2 for each query.
            for (i, slopes) in dscores.chunks_exact(keys).enumerate() {
                let both = segment_sums(slopes, segments, of[block.first + i]).map(|sum| scale * sum);
                scores.by_segment[2 * i..2 * i + 2].copy_from_slice(&both);
                for c in 0..d {
                    by_segments[i * d + c] = both[0] * tables[0][c] + both[1] * tables[1][c];
                }
            }
            work.shifted(part, block, 2, |i, c, q| {
                dsegments[c] += scores.by_segment[2 * i] * q;
                dsegments[d + c] += scores.by_segment[2 * i + 1] * q;
            });
        }
        for (i, x) in dquery.iter_mut().enumerate() {
            let parts = [*x, by_positions[i], by_segments[i]];
            (0..3).for_each(|which| biases[which * d + i % d] += parts[which]);
            *x = parts.iter().sum();
        }
    }
}
