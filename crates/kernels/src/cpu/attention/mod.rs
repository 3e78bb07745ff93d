//! Scaled dot-product attention (Vaswani et al. 2017) over flat tokens: sequences lie one after the other, and offsets
//! tell where each begins. There is no padding and no mask for it.
//!
//! Legend: A heads, K key heads, D = head size; N queries and M keys of one sequence. What is computed is described by an
//! [`Attention`]. Scores exist for a block of queries at a time and the keys that these see, never N×M for long sequences;
//! the backward computes them again from the kept log-sums.

pub mod cache;
mod description;
pub mod disentangled;
pub mod reference;
mod softmax;
pub mod xl;

pub use description::{Attention, Bias, Buckets, LogBuckets, Window};

use std::marker::PhantomData;
use std::ops::Range;

use super::dropout::Dropout;
use super::gemm::{Finish, Matrix, Right, product, product_into};
use super::scratch::{self, Purpose};
use super::simd::Element;
use super::{Cpu, SharedMut};
use softmax::{Block, RowDropout, softmax, softmax_backward};

/// Columns of every row of a matrix without gaps between its rows: queries, keys or values, fused with others or not.
#[derive(Clone, Copy, Debug)]
pub struct View<'a, E> {
    data: &'a [E],
    stride: usize,
    offset: usize,
    width: usize,
}

impl<'a, E> View<'a, E> {
    /// All columns.
    pub fn new(data: &'a [E], columns: usize) -> Self {
        Self { data, stride: columns, offset: 0, width: columns }
    }

    /// Views side by side, of these widths, that are all of the columns together.
    pub fn split<const N: usize>(data: &'a [E], widths: [usize; N]) -> [Self; N] {
        let stride = widths.iter().sum();
        std::array::from_fn(|i| Self { data, stride, offset: widths[..i].iter().sum(), width: widths[i] })
    }

    fn rows(&self) -> usize {
        self.data.len() / self.stride.max(1)
    }

    fn matrix(&self, rows: Range<usize>, column: usize, columns: usize) -> Matrix<'a, E> {
        let start = if rows.is_empty() { 0 } else { rows.start * self.stride + self.offset + column };
        Matrix::strided(&self.data[start..], rows.len(), columns, self.stride)
    }
}

/// The same to be written: a gradient's columns.
#[derive(Debug)]
pub struct ViewMut<'a, E> {
    data: SharedMut<E>,
    stride: usize,
    offset: usize,
    width: usize,
    borrowed: PhantomData<&'a mut [E]>,
}

impl<'a, E: Copy> ViewMut<'a, E> {
    /// All columns.
    pub fn new(data: &'a mut [E], columns: usize) -> Self {
        let [view] = Self::split(data, [columns]);
        view
    }

    /// Views side by side, of these widths, that are all of the columns together.
    pub fn split<const N: usize>(data: &'a mut [E], widths: [usize; N]) -> [Self; N] {
        let (stride, data) = (widths.iter().sum(), SharedMut::new(data));
        std::array::from_fn(|i| {
            let offset = widths[..i].iter().sum();
            Self { data, stride, offset, width: widths[i], borrowed: PhantomData }
        })
    }

    fn rows(&self) -> usize {
        self.data.len() / self.stride.max(1)
    }

    /// Where some columns of a row begin.
    fn at(&self, row: usize, column: usize) -> usize {
        row * self.stride + self.offset + column
    }
}

/// What an attention reads.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a, E> {
    /// A·D columns.
    pub query: View<'a, E>,
    /// K·D columns.
    pub key: View<'a, E>,
    /// K·D columns.
    pub value: View<'a, E>,
    /// Where each sequence's queries begin, and the end of the last.
    pub query_offsets: &'a [u32],
    /// The same for its keys and values.
    pub key_offsets: &'a [u32],
    /// What the bias needs: see [`Attention::bias_size`].
    pub bias: &'a [f32],
}

impl<'a, E> Inputs<'a, E> {
    /// Self-attention without a bias: a row of `qkv` holds query, key and value of a token.
    pub fn fused(attention: &Attention, qkv: &'a [E], offsets: &'a [u32]) -> Self {
        let [query, key, value] = View::split(qkv, attention.fused_widths());
        Self { query, key, value, query_offsets: offsets, key_offsets: offsets, bias: &[] }
    }
}

/// Dropout of probabilities, with each sequence's number in the global batch.
pub type AttentionDropout<'a> = Option<(Dropout, &'a [u32])>;

impl Attention {
    /// Columns of query, key and value where they lie side by side.
    pub fn fused_widths(&self) -> [usize; 3] {
        [self.query_width(), self.key_width(), self.key_width()]
    }

    fn check_inputs<E>(&self, inputs: &Inputs<'_, E>, dropout: AttentionDropout<'_>) {
        self.check();
        check_offsets(inputs.query_offsets, inputs.query.rows());
        check_offsets(inputs.key_offsets, inputs.key.rows());
        assert!(inputs.key.rows() == inputs.value.rows(), "attention: keys and values differ in number");
        let widths = [inputs.query.width, inputs.key.width, inputs.value.width];
        assert!(widths == self.fused_widths(), "attention: widths differ");
        assert!(inputs.query_offsets.len() == inputs.key_offsets.len(), "attention: numbers of sequences differ");
        assert!(inputs.bias.len() == self.bias_size(), "attention: the bias has another size");
        let sequences = inputs.query_offsets.len().saturating_sub(1);
        assert!(dropout.is_none_or(|(_, numbers)| numbers.len() == sequences), "one number per sequence");
    }
}

fn check_offsets(offsets: &[u32], rows: usize) {
    assert!(offsets.first().is_none_or(|first| *first == 0), "offsets begin with 0");
    assert!(offsets.windows(2).all(|w| w[0] <= w[1]), "offsets do not descend");
    assert!(offsets.last().map_or(0, |end| *end as usize) == rows, "attention: offsets end elsewhere than the rows");
}

/// One sequence and one head of the queries.
#[derive(Clone)]
struct Part<'a> {
    attention: &'a Attention,
    sequence: usize,
    head: usize,
    /// Rows of the queries.
    queries: Range<usize>,
    /// Rows of keys and values.
    keys: Range<usize>,
}

impl<'a> Part<'a> {
    fn new<E>(attention: &'a Attention, inputs: &Inputs<'_, E>, sequence: usize, head: usize) -> Self {
        let rows = |offsets: &[u32]| offsets[sequence] as usize..offsets[sequence + 1] as usize;
        let (queries, keys) = (rows(inputs.query_offsets), rows(inputs.key_offsets));
        Self { attention, sequence, head, queries, keys }
    }

    /// Columns where the head's keys and values begin.
    fn key_column(&self) -> usize {
        self.head / (self.attention.heads / self.attention.key_heads) * self.attention.head_size
    }

    fn query_column(&self) -> usize {
        self.head * self.attention.head_size
    }

    /// Queries that are worked on at a time, at most, and keys that they see together at most. Their scores should stay in the
    /// second-level cache; in a window, longer blocks would see many keys that single queries do not.
    fn block_sizes(&self) -> (usize, usize) {
        let (queries, keys) = (self.queries.len(), self.keys.len());
        match self.attention.window.span() {
            Some(span) if span < keys => {
                let block = (span / 2).next_power_of_two().clamp(32, 128).min(queries);
                (block, keys.min(block + span))
            }
            _ => ((65536 / keys.max(1)).clamp(32, 256).min(queries), keys),
        }
    }

    fn blocks(&self) -> impl Iterator<Item = Block> + use<> {
        let (window, size) = (self.attention.window, self.block_sizes().0.max(1));
        let (all_queries, all_keys) = (self.queries.len(), self.keys.len());
        (0..all_queries).step_by(size).map(move |first| {
            let queries = size.min(all_queries - first);
            let keys = window.keys_of_block(first, queries, all_queries, all_keys);
            Block { window, all_queries, all_keys, first, queries, keys }
        })
    }

    fn dropout(&self, dropout: AttentionDropout<'_>) -> Option<RowDropout> {
        let (dropout, numbers) = dropout?;
        Some(RowDropout { dropout: dropout.at_head(self.head), sequence: numbers[self.sequence] })
    }

    /// How many distances there are between a query and a key.
    fn distances(&self) -> usize {
        if self.attention.bias == Bias::None { 0 } else { self.queries.len() + self.keys.len() }
    }

    /// What is added to the head's scores, by distance: first that of the first key from the last query, M − 1 before it.
    fn by_distance(&self, bias: &[f32], buckets: &[u32], out: &mut [f32]) {
        let (heads, before) = (self.attention.heads, self.keys.len() as i64 - 1);
        match self.attention.bias {
            Bias::None => {}
            Bias::Relative(_) => {
                for (i, out) in out.iter_mut().enumerate() {
                    *out = bias[bucket(buckets, i as i64 - before) * heads + self.head];
                }
            }
            Bias::Slopes => {
                for (i, out) in out.iter_mut().enumerate() {
                    *out = -bias[self.head] * (i as i64 - before).unsigned_abs() as f32;
                }
            }
        }
    }

    /// The scaled scores of a block.
    fn scores<E: Element>(&self, cpu: &Cpu, inputs: &Inputs<'_, E>, block: &Block, scores: &mut [f32]) {
        let key = inputs.key.matrix(self.key_rows(block), self.key_column(), self.attention.head_size).transposed();
        let finish = Finish { scale: self.attention.scale, ..Finish::default() };
        product(cpu, self.query(&inputs.query, block), Right::Plain(key), scores, block.keys.len(), finish);
    }

    /// The block's rows of the queries, or of what has as many columns.
    fn query<'e, E>(&self, query: &View<'e, E>, block: &Block) -> Matrix<'e, E> {
        query.matrix(self.query_rows(block), self.query_column(), self.attention.head_size)
    }

    fn query_rows(&self, block: &Block) -> Range<usize> {
        let first = self.queries.start + block.first;
        first..first + block.queries
    }

    fn key_rows(&self, block: &Block) -> Range<usize> {
        self.keys.start + block.keys.start..self.keys.start + block.keys.end
    }
}

/// The bucket of a distance, from those of −reach..=reach: further away all are the same.
fn bucket(buckets: &[u32], distance: i64) -> usize {
    let reach = buckets.len() as i64 / 2;
    buckets[(distance.clamp(-reach, reach) + reach) as usize] as usize
}

/// Runs `body` with the bucket of every distance that has one of its own, and `extra` more numbers.
fn with_buckets<R>(attention: &Attention, extra: usize, body: impl FnOnce(&[u32], &mut [f32]) -> R) -> R {
    let reach = match attention.bias {
        Bias::Relative(buckets) => buckets.max_distance as usize,
        _ => 0,
    };
    scratch::with(Purpose::Outer, 2 * reach + 1 + extra, |space: &mut [u32]| {
        let (table, extra) = space.split_at_mut(2 * reach + 1);
        if let Bias::Relative(buckets) = attention.bias {
            for (i, bucket) in table.iter_mut().enumerate() {
                *bucket = buckets.of(i as i64 - reach as i64) as u32;
            }
        }
        body(table, bytemuck::cast_slice_mut(extra))
    })
}

/// out (queries × A·D) = the attention; `log_sums` (A × queries) gets the logarithm of each softmax's denominator.
pub fn forward<E: Element>(
    cpu: &Cpu,
    attention: &Attention,
    inputs: &Inputs<'_, E>,
    dropout: AttentionDropout<'_>,
    out: &mut [E],
    log_sums: &mut [f32],
) {
    let (rows, h) = (inputs.query.rows(), attention.query_width());
    attention.check_inputs(inputs, dropout);
    assert!(out.len() == rows * h && log_sums.len() == attention.heads * rows, "attention: lengths differ");
    let (out, log_sums) = (SharedMut::new(out), SharedMut::new(log_sums));
    let sequences = inputs.query_offsets.len().saturating_sub(1);
    with_buckets(attention, 0, |buckets, _| {
        cpu.for_each(sequences * attention.heads, |i| {
            let part = Part::new(attention, inputs, i / attention.heads, i % attention.heads);
            // SAFETY: every task has its own sequence and head.
            unsafe { forward_part(cpu, &part, inputs, buckets, dropout, out, log_sums) };
        });
    });
}

/// # Safety
/// No other task may have the same sequence and head.
unsafe fn forward_part<E: Element>(
    cpu: &Cpu,
    part: &Part<'_>,
    inputs: &Inputs<'_, E>,
    buckets: &[u32],
    dropout: AttentionDropout<'_>,
    out: SharedMut<E>,
    log_sums: SharedMut<f32>,
) {
    let (h, d) = (part.attention.query_width(), part.attention.head_size);
    let (block, width) = part.block_sizes();
    let distances = part.distances();
    let drop = part.dropout(dropout);
    // SAFETY: the head's rows of this sequence belong to this task.
    let log_sums = unsafe { log_sums.slice(part.head * inputs.query.rows() + part.queries.start, part.queries.len()) };
    scratch::with(Purpose::Kernel, 2 * block * width + distances, |space: &mut [f32]| {
        let (scores, rest) = space.split_at_mut(block * width);
        let (weights, bias) = rest.split_at_mut(block * width);
        let weights: &mut [E] = &mut bytemuck::cast_slice_mut(weights)[..block * width];
        part.by_distance(inputs.bias, buckets, bias);
        let bias = (distances > 0).then_some(&*bias);
        for block in part.blocks() {
            let (n, keys) = (block.queries, block.keys.len());
            let (scores, weights) = (&mut scores[..n * keys], &mut weights[..n * keys]);
            part.scores(cpu, inputs, &block, scores);
            let log_sums = &mut log_sums[block.first..block.first + n];
            softmax(cpu.isa(), &block, bias, drop, scores, weights, log_sums);
            let value = inputs.value.matrix(part.key_rows(&block), part.key_column(), d);
            let start = part.query_rows(&block).start * h + part.query_column();
            // SAFETY: this head's columns of this sequence's rows belong to this task.
            unsafe {
                let out = out.part(start, (n - 1) * h + d);
                product_into(cpu, Matrix::new(weights, n, keys), Right::Plain(value), out, h, Finish::default());
            }
        }
    });
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
    /// That of the table of [`Bias::Relative`] (buckets × A), added to; none where it is not wanted.
    pub bias: Option<&'a mut [f32]>,
}

impl<'a, E: Copy> Gradients<'a, E> {
    /// Those of [`Inputs::fused`], side by side.
    pub fn fused(attention: &Attention, dqkv: &'a mut [E]) -> Self {
        let [query, key, value] = ViewMut::split(dqkv, attention.fused_widths());
        Self { query, key, value, bias: None }
    }
}

/// The gradients of [`forward`], from its log-sums and the gradient of its output.
pub fn backward<E: Element>(
    cpu: &Cpu,
    attention: &Attention,
    inputs: &Inputs<'_, E>,
    dropout: AttentionDropout<'_>,
    log_sums: &[f32],
    dout: &[E],
    gradients: Gradients<'_, E>,
) {
    let (rows, h) = (inputs.query.rows(), attention.query_width());
    attention.check_inputs(inputs, dropout);
    assert!(dout.len() == rows * h && log_sums.len() == attention.heads * rows, "attention: lengths differ");
    let Gradients { query, key, value, bias: dtable } = gradients;
    assert!(
        query.rows() == rows && [&key, &value].iter().all(|g| g.rows() == inputs.key.rows()),
        "attention: rows differ"
    );
    assert!([query.width, key.width, value.width] == attention.fused_widths(), "attention: widths differ");
    let relative = matches!(attention.bias, Bias::Relative(_));
    assert!(dtable.as_ref().is_none_or(|table| relative && table.len() == attention.bias_size()), "attention: bias");
    let sequences = inputs.query_offsets.len().saturating_sub(1);
    let count = if dtable.is_some() { attention.bias_size() / attention.heads } else { 0 };
    let dout = View::new(dout, h);
    let work = Work { cpu, attention, inputs, dropout, log_sums, dout, query, key, value, buckets: count };
    with_buckets(attention, count * attention.heads * sequences, |buckets, sums| {
        // One sum for each sequence, head and bucket, added up in the order of sequences.
        sums.fill(0.0);
        let shared = SharedMut::new(sums);
        cpu.for_each(sequences * attention.key_heads, |i| {
            // SAFETY: every task has its own sequence and key head, and the heads that share it.
            unsafe { work.part(i / attention.key_heads, i % attention.key_heads, buckets, shared) };
        });
        for (i, total) in dtable.into_iter().flatten().enumerate() {
            let (bucket, head) = (i / attention.heads, i % attention.heads);
            let of = |sequence: usize| f64::from(sums[(sequence * attention.heads + head) * count + bucket]);
            *total += (0..sequences).map(of).sum::<f64>() as f32;
        }
    });
}

/// A backward under way.
struct Work<'a, 'b, E> {
    cpu: &'a Cpu,
    attention: &'a Attention,
    inputs: &'a Inputs<'b, E>,
    dropout: AttentionDropout<'a>,
    log_sums: &'a [f32],
    dout: View<'a, E>,
    query: ViewMut<'b, E>,
    key: ViewMut<'b, E>,
    value: ViewMut<'b, E>,
    /// Rows of the bias' table whose gradient is wanted; 0 where it is not.
    buckets: usize,
}

/// Work space of one part; scores and weights are blocks of queries × keys.
struct Space<'a, E> {
    scores: &'a mut [f32],
    dweights: &'a mut [f32],
    weights: &'a mut [E],
    dscores: &'a mut [E],
    /// M×D.
    dkey: &'a mut [f32],
    dvalue: &'a mut [f32],
    bias: &'a mut [f32],
    dbias: &'a mut [f32],
}

impl<'a, E: Element> Space<'a, E> {
    fn split(space: &'a mut [f32], block: usize, sums: usize, distances: usize) -> Self {
        let (scores, rest) = space.split_at_mut(block);
        let (dweights, rest) = rest.split_at_mut(block);
        let (elements, rest) = rest.split_at_mut(2 * block);
        let (weights, dscores) = bytemuck::cast_slice_mut::<f32, E>(elements).split_at_mut(block);
        let (dkey, rest) = rest.split_at_mut(sums);
        let (dvalue, rest) = rest.split_at_mut(sums);
        let (bias, dbias) = rest.split_at_mut(distances);
        Self { scores, dweights, weights, dscores, dkey, dvalue, bias, dbias }
    }
}

impl<E: Element> Work<'_, '_, E> {
    /// All heads of the queries that share a key head, in one sequence.
    ///
    /// # Safety
    /// No other task may have the same sequence and key head.
    unsafe fn part(&self, sequence: usize, key_head: usize, buckets: &[u32], sums: SharedMut<f32>) {
        let group = self.attention.heads / self.attention.key_heads;
        let part = Part::new(self.attention, self.inputs, sequence, key_head * group);
        let (d, keys, distances) = (self.attention.head_size, part.keys.len(), part.distances());
        let (block, width) = part.block_sizes();
        let size = 4 * block * width + 2 * keys * d + 2 * distances;
        scratch::with(Purpose::Kernel, size, |space: &mut [f32]| {
            let mut space = Space::<E>::split(space, block * width, keys * d, distances);
            for head in key_head * group..(key_head + 1) * group {
                let part = Part { head, ..part.clone() };
                part.by_distance(self.inputs.bias, buckets, space.bias);
                space.dbias.fill(0.0);
                // SAFETY: this head belongs to this task.
                unsafe { self.head(&part, &mut space, head > key_head * group) };
                if self.buckets > 0 {
                    // SAFETY: as above.
                    let sums =
                        unsafe { sums.slice((sequence * self.attention.heads + head) * self.buckets, self.buckets) };
                    for (i, dbias) in space.dbias.iter().enumerate() {
                        sums[bucket(buckets, i as i64 - (keys as i64 - 1))] += dbias;
                    }
                }
            }
            for (to, sums) in [(&self.key, &*space.dkey), (&self.value, &*space.dvalue)] {
                for (row, sums) in part.keys.clone().zip(sums.chunks_exact(d)) {
                    // SAFETY: the key head's columns of this sequence's rows belong to this task.
                    let out = unsafe { to.data.slice(to.at(row, part.key_column()), d) };
                    for c in 0..d {
                        out[c] = E::from_f32(sums[c]);
                    }
                }
            }
        });
    }

    /// One head; with `accumulate`, the gradients of keys and values are added to those of the heads before.
    ///
    /// # Safety
    /// No other task may have the same sequence and head.
    unsafe fn head(&self, part: &Part<'_>, space: &mut Space<'_, E>, accumulate: bool) {
        let (cpu, inputs, d, scale) = (self.cpu, self.inputs, self.attention.head_size, self.attention.scale);
        let log_sums = &self.log_sums[part.head * inputs.query.rows()..][part.queries.clone()];
        let with_bias = self.attention.bias != Bias::None;
        let drop = part.dropout(self.dropout);
        // Sums of keys before this one hold what earlier blocks, or heads, left there; those after it hold anything.
        let mut summed = if accumulate { part.keys.len() } else { 0 };
        for block in part.blocks() {
            let (n, keys) = (block.queries, block.keys.len());
            let dout = part.query(&self.dout, &block);
            let value = inputs.value.matrix(part.key_rows(&block), part.key_column(), d);
            part.scores(cpu, inputs, &block, space.scores);
            product(cpu, dout, Right::Plain(value.transposed()), space.dweights, keys, Finish::default());
            let (scores, dweights) = (&mut space.scores[..n * keys], &mut space.dweights[..n * keys]);
            let (weights, dscores) = (&mut space.weights[..n * keys], &mut space.dscores[..n * keys]);
            let bias = with_bias.then_some(&*space.bias);
            let dbias = (self.buckets > 0).then_some(&mut *space.dbias);
            let log_sums = &log_sums[block.first..block.first + n];
            softmax_backward(cpu.isa(), &block, bias, drop, log_sums, scores, dweights, weights, dscores, dbias);
            let key = inputs.key.matrix(part.key_rows(&block), part.key_column(), d);
            let start = self.query.at(part.query_rows(&block).start, part.query_column());
            // SAFETY: this head's columns of this sequence's rows belong to this task.
            unsafe {
                let dquery = self.query.data.part(start, (n - 1) * self.query.stride + d);
                let finish = Finish { scale, ..Finish::default() };
                let dscores = Matrix::new(&*dscores, n, keys);
                product_into(cpu, dscores, Right::Plain(key), dquery, self.query.stride, finish);
            }
            if block.keys.start > summed {
                // Keys that no query sees.
                space.dkey[summed * d..block.keys.start * d].fill(0.0);
                space.dvalue[summed * d..block.keys.start * d].fill(0.0);
                summed = block.keys.start;
            }
            let new = summed.clamp(block.keys.start, block.keys.end);
            let query = part.query(&inputs.query, &block);
            for (rows, accumulate) in [(block.keys.start..new, true), (new..block.keys.end, false)] {
                let columns = rows.start - block.keys.start..rows.end - block.keys.start;
                let rows = rows.start * d..rows.end * d;
                let (dkey, dvalue) = (&mut space.dkey[rows.clone()], &mut space.dvalue[rows]);
                let sum = Finish { scale, accumulate, ..Finish::default() };
                product(cpu, transposed(dscores, n, keys, columns.clone()), Right::Plain(query), dkey, d, sum);
                let sum = Finish { accumulate, ..Finish::default() };
                product(cpu, transposed(weights, n, keys, columns), Right::Plain(dout), dvalue, d, sum);
            }
            summed = summed.max(block.keys.end);
        }
        space.dkey[summed * d..].fill(0.0);
        space.dvalue[summed * d..].fill(0.0);
    }
}

/// Some columns of a matrix without gaps, as rows.
fn transposed<E>(x: &[E], rows: usize, stride: usize, columns: Range<usize>) -> Matrix<'_, E> {
    Matrix::strided(&x[columns.start..], rows, columns.len(), stride).transposed()
}

/// The probabilities of every sequence, one after the other: A×N×M each, before dropout. For people to look at.
pub fn probabilities<E: Element>(cpu: &Cpu, attention: &Attention, inputs: &Inputs<'_, E>, out: &mut [f32]) {
    attention.check_inputs(inputs, None);
    let (query_offsets, key_offsets) = (inputs.query_offsets, inputs.key_offsets);
    assert!(out.len() == attention.probabilities(query_offsets, key_offsets), "attention: lengths differ");
    let out = SharedMut::new(out);
    let sequences = query_offsets.len().saturating_sub(1);
    with_buckets(attention, 0, |buckets, _| {
        cpu.for_each(sequences * attention.heads, |i| {
            let part = Part::new(attention, inputs, i / attention.heads, i % attention.heads);
            let (sequence, keys, distances) = (part.sequence, part.keys.len(), part.distances());
            let before = attention.probabilities(&query_offsets[..=sequence], &key_offsets[..=sequence]);
            let size = part.queries.len() * keys;
            // SAFETY: every task has its own sequence and head.
            let out = unsafe { out.slice(before + part.head * size, size) };
            let (block, width) = part.block_sizes();
            scratch::with(Purpose::Kernel, 2 * block * width + block + distances, |space: &mut [f32]| {
                let (scores, rest) = space.split_at_mut(block * width);
                let (weights, rest) = rest.split_at_mut(block * width);
                let (log_sums, bias) = rest.split_at_mut(block);
                part.by_distance(inputs.bias, buckets, bias);
                let bias = (distances > 0).then_some(&*bias);
                for block in part.blocks() {
                    let (n, seen) = (block.queries, block.keys.len());
                    let (scores, weights) = (&mut scores[..n * seen], &mut weights[..n * seen]);
                    part.scores(cpu, inputs, &block, scores);
                    softmax(cpu.isa(), &block, bias, None, scores, weights, &mut log_sums[..n]);
                    let rows = out[block.first * keys..(block.first + n) * keys].chunks_exact_mut(keys.max(1));
                    for (row, weights) in rows.zip(weights.chunks_exact(seen.max(1))) {
                        row.fill(0.0);
                        row[block.keys.clone()].copy_from_slice(weights);
                    }
                }
            });
        });
    });
}

impl Attention {
    /// How many numbers [`probabilities`] gives.
    pub fn probabilities(&self, query_offsets: &[u32], key_offsets: &[u32]) -> usize {
        let pairs = query_offsets.windows(2).zip(key_offsets.windows(2));
        self.heads * pairs.map(|(q, k)| (q[1] - q[0]) as usize * (k[1] - k[0]) as usize).sum::<usize>()
    }
}

/// The same numbers as elements.
fn round<'a, E: Element>(from: &[f32], to: &'a mut [E]) -> &'a [E] {
    let to = &mut to[..from.len()];
    to.iter_mut().zip(from).for_each(|(to, from)| *to = E::from_f32(*from));
    to
}

/// Writes rows of D numbers to a gradient's columns.
///
/// # Safety
/// No other task may have these columns of these rows.
unsafe fn store<E: Element>(to: &ViewMut<'_, E>, rows: Range<usize>, column: usize, sums: &[f32], d: usize) {
    for (row, sums) in rows.zip(sums.chunks_exact(d)) {
        // SAFETY: the caller's promise.
        let out = unsafe { to.data.slice(to.at(row, column), d) };
        out.iter_mut().zip(sums).for_each(|(out, sum)| *out = E::from_f32(*sum));
    }
}
