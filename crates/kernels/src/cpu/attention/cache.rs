//! Attention with a cache, for decoding: keys and values of earlier tokens lie in pages, and a few new tokens of each
//! sequence attend to all of them. Forward only.
//!
//! A cache is a matrix of K·D columns for the keys and another for the values. A page is `page_size` of its rows; which pages a
//! sequence has is up to the caller, so sequences can enter, grow and leave without anything being moved. A flat buffer for each
//! sequence is a cache with one page a sequence. What a token gets depends on its own sequence alone.

use super::softmax::softmax;
use super::{Attention, Block, Part, View, check_offsets, with_buckets};
use crate::cpu::gemm::{Finish, Matrix, Right, product};
use crate::cpu::scratch::{self, Purpose};
use crate::cpu::simd::{Element, Simd, read, write};
use crate::cpu::{Cpu, SharedMut};

/// Where the tokens of some sequences lie in a cache.
#[derive(Clone, Copy, Debug)]
pub struct Pages<'a> {
    /// Tokens of a page.
    pub page_size: usize,
    /// The pages of every sequence in the order of its tokens, one sequence after the other.
    pub pages: &'a [u32],
    /// Where each sequence's pages begin, and the end of the last.
    pub page_offsets: &'a [u32],
    /// Tokens of each sequence.
    pub lengths: &'a [u32],
}

impl Pages<'_> {
    fn check(&self, rows: usize) {
        check_offsets(self.page_offsets, self.pages.len());
        assert!(self.page_offsets.len() == self.lengths.len() + 1, "cache: numbers of sequences differ");
        assert!(self.pages.iter().all(|page| (*page as usize + 1) * self.page_size <= rows), "cache: no such page");
        let room = self.page_offsets.windows(2).map(|w| (w[1] - w[0]) as usize * self.page_size);
        assert!(self.lengths.iter().zip(room).all(|(n, room)| *n as usize <= room), "cache: too few pages");
    }

    /// The row of a token.
    fn row(&self, sequence: usize, token: usize) -> usize {
        let page = self.pages[self.page_offsets[sequence] as usize + token / self.page_size] as usize;
        page * self.page_size + token % self.page_size
    }

    /// The parts of some of a sequence's tokens that lie in one page: (first token, tokens).
    fn runs(&self, tokens: std::ops::Range<usize>) -> impl Iterator<Item = (usize, usize)> + use<> {
        let size = self.page_size;
        (tokens.start / size..tokens.end.div_ceil(size)).map(move |page| {
            let (first, end) = ((page * size).max(tokens.start), ((page + 1) * size).min(tokens.end));
            (first, end.saturating_sub(first))
        })
    }
}

/// Copies new tokens' keys, or values, to the last places of their sequences; `offsets` tells which rows are whose.
pub fn append<E: Element>(pages: &Pages<'_>, new: &View<'_, E>, offsets: &[u32], cache: &mut [E]) {
    let width = new.width;
    pages.check(cache.len() / width.max(1));
    check_offsets(offsets, new.rows());
    assert!(offsets.len() == pages.page_offsets.len(), "cache: numbers of sequences differ");
    for (sequence, ends) in offsets.windows(2).enumerate() {
        let (first, count) = (ends[0] as usize, (ends[1] - ends[0]) as usize);
        let length = pages.lengths[sequence] as usize;
        assert!(count <= length, "cache: lengths include the new tokens");
        for i in 0..count {
            let from = (first + i) * new.stride + new.offset;
            let to = pages.row(sequence, length - count + i) * width;
            cache[to..to + width].copy_from_slice(&new.data[from..from + width]);
        }
    }
}

/// out (queries × A·D) = the attention of new tokens to all of their sequences' tokens in the cache, which hold the new ones
/// at their end.
pub fn attend<E: Element>(
    cpu: &Cpu,
    attention: &Attention,
    query: &View<'_, E>,
    offsets: &[u32],
    bias: &[f32],
    keys: &[E],
    values: &[E],
    pages: &Pages<'_>,
    out: &mut [E],
) {
    attention.check();
    let (h, width) = (attention.query_width(), attention.key_width());
    assert!(query.width == h && out.len() == query.rows() * h, "attention: lengths differ");
    assert!(keys.len() == values.len() && keys.len().is_multiple_of(width), "cache: lengths differ");
    assert!(bias.len() == attention.bias_size(), "attention: the bias has another size");
    check_offsets(offsets, query.rows());
    pages.check(keys.len() / width);
    assert!(offsets.len() == pages.page_offsets.len(), "cache: numbers of sequences differ");
    let cache = Cache { attention, query, bias, keys, values, pages };
    let (out, sequences) = (SharedMut::new(out), pages.lengths.len());
    with_buckets(attention, 0, |buckets, _| {
        cpu.for_each(sequences * attention.heads, |i| {
            let (sequence, head) = (i / attention.heads, i % attention.heads);
            let queries = offsets[sequence] as usize..offsets[sequence + 1] as usize;
            let keys = 0..pages.lengths[sequence] as usize;
            // SAFETY: every task has its own sequence and head.
            unsafe { cache.attend(cpu, &Part { attention, sequence, head, queries, keys }, buckets, out) };
        });
    });
}

/// What all tasks read.
struct Cache<'a, E> {
    attention: &'a Attention,
    query: &'a View<'a, E>,
    bias: &'a [f32],
    keys: &'a [E],
    values: &'a [E],
    pages: &'a Pages<'a>,
}

impl<E: Element> Cache<'_, E> {
    /// # Safety
    /// No other task may have the same sequence and head.
    unsafe fn attend(&self, cpu: &Cpu, part: &Part<'_>, buckets: &[u32], out: SharedMut<E>) {
        let (h, d) = (self.attention.query_width(), self.attention.head_size);
        let (block, width) = part.block_sizes();
        let distances = part.distances();
        scratch::with(Purpose::Kernel, 2 * block * width + block * (d + 1) + distances, |space: &mut [f32]| {
            let (scores, rest) = space.split_at_mut(block * width);
            let (weights, rest) = rest.split_at_mut(block * width);
            let weights: &mut [E] = &mut bytemuck::cast_slice_mut(weights)[..block * width];
            let (sums, rest) = rest.split_at_mut(block * d);
            let (log_sums, bias) = rest.split_at_mut(block);
            part.by_distance(self.bias, buckets, bias);
            let bias = (distances > 0).then_some(&*bias);
            for block in part.blocks() {
                let (n, seen) = (block.queries, block.keys.len());
                let (scores, weights) = (&mut scores[..n * seen], &mut weights[..n * seen]);
                let alone = (n == 1).then(|| self.query_row(part, &block));
                match alone {
                    Some(query) => self.scores_of_one(cpu, part, &block, query, scores),
                    None => self.scores(cpu, part, &block, scores),
                }
                softmax(cpu.isa(), &block, bias, None, scores, weights, &mut log_sums[..n]);
                let sums = &mut sums[..n * d];
                sums.fill(0.0);
                for (first, tokens) in self.pages.runs(block.keys.clone()) {
                    let weights = &weights[first - block.keys.start..];
                    if alone.is_some() {
                        let (rows, width) = self.row_slices(self.values, part, first);
                        add_weighted(cpu.isa(), &weights[..tokens], rows, width, sums);
                        continue;
                    }
                    let weights = Matrix::strided(weights, n, tokens, seen);
                    let value = Right::Plain(self.rows(self.values, part, first, tokens));
                    product(cpu, weights, value, sums, d, Finish { accumulate: true, ..Finish::default() });
                }
                for (i, sums) in sums.chunks_exact(d).enumerate() {
                    let start = (part.query_rows(&block).start + i) * h + part.query_column();
                    // SAFETY: this head's columns of this sequence's rows belong to this task.
                    let out = unsafe { out.slice(start, d) };
                    out.iter_mut().zip(sums).for_each(|(out, sum)| *out = E::from_f32(*sum));
                }
            }
        });
    }

    fn scores(&self, cpu: &Cpu, part: &Part<'_>, block: &Block, scores: &mut [f32]) {
        let query = part.query(self.query, block);
        for (first, tokens) in self.pages.runs(block.keys.clone()) {
            let key = Right::Plain(self.rows(self.keys, part, first, tokens).transposed());
            let finish = Finish { scale: self.attention.scale, ..Finish::default() };
            product(cpu, query, key, &mut scores[first - block.keys.start..], block.keys.len(), finish);
        }
    }

    /// A single query, as every step of decoding has one: rows of a page are read where they lie, without being packed.
    fn scores_of_one(&self, cpu: &Cpu, part: &Part<'_>, block: &Block, query: &[E], scores: &mut [f32]) {
        for (first, tokens) in self.pages.runs(block.keys.clone()) {
            let (rows, width) = self.row_slices(self.keys, part, first);
            let scores = &mut scores[first - block.keys.start..][..tokens];
            dots(cpu.isa(), query, rows, width, self.attention.scale, scores);
        }
    }

    /// The head's columns of a block's first query.
    fn query_row(&self, part: &Part<'_>, block: &Block) -> &[E] {
        let View { data, offset, stride, .. } = *self.query;
        &data[part.query_rows(block).start * stride + offset + part.query_column()..][..self.attention.head_size]
    }

    /// The head's columns of a page's tokens from one on: every `width` elements a row begins.
    fn row_slices<'a>(&self, cache: &'a [E], part: &Part<'_>, first: usize) -> (&'a [E], usize) {
        let width = self.attention.key_width();
        (&cache[self.pages.row(part.sequence, first) * width + part.key_column()..], width)
    }

    /// The head's columns of tokens that lie in one page.
    fn rows<'a>(&self, cache: &'a [E], part: &Part<'_>, first: usize, tokens: usize) -> Matrix<'a, E> {
        let width = self.attention.key_width();
        let start = self.pages.row(part.sequence, first) * width + part.key_column();
        Matrix::strided(&cache[start..], tokens, self.attention.head_size, width)
    }
}

dispatch! {
    /// out[j] = scale · query·row j, where rows begin `stride` elements apart and are as long as the query.
    fn dots<E>(query: &[E], rows: &[E], stride: usize, scale: f32, out: &mut [f32]) = dots_body
}

/// Numbers of a query that are widened once for all rows.
const WIDENED: usize = 128;

/// # Safety
/// The instruction set must be there.
#[inline(always)]
unsafe fn dots_body<S: Simd, E: Element>(query: &[E], rows: &[E], stride: usize, scale: f32, out: &mut [f32]) {
    let d = query.len();
    let mut wide = [0.0; WIDENED];
    if E::IS_BF16 && d <= WIDENED {
        for c in (0..d).step_by(S::LANES) {
            // SAFETY: c < d, the length of both.
            unsafe { write::<S, f32>(&mut wide[..d], c, read::<S, E>(query, c)) };
        }
        // SAFETY: as for the caller.
        unsafe { dots_of::<S, f32, E>(&wide[..d], rows, stride, scale, out) };
    } else {
        // SAFETY: as for the caller.
        unsafe { dots_of::<S, E, E>(query, rows, stride, scale, out) };
    }
}

/// # Safety
/// As for `dots_body`.
#[inline(always)]
unsafe fn dots_of<S: Simd, Q: Element, E: Element>(
    query: &[Q],
    rows: &[E],
    stride: usize,
    scale: f32,
    out: &mut [f32],
) {
    let d = query.len();
    for (j, out) in out.iter_mut().enumerate() {
        let row = &rows[j * stride..][..d];
        // SAFETY: c < d, the length of both.
        unsafe {
            let mut sums = [S::splat(0.0); 2];
            for (i, c) in (0..d).step_by(S::LANES).enumerate() {
                sums[i % 2] = S::mul_add(read::<S, Q>(query, c), read::<S, E>(row, c), sums[i % 2]);
            }
            *out = scale * S::sum(S::add(sums[0], sums[1]));
        }
    }
}

dispatch! {
    /// sums += Σ weight j · row j, where rows begin `stride` elements apart and are as long as the sums.
    fn add_weighted<E>(weights: &[E], rows: &[E], stride: usize, sums: &mut [f32]) = add_weighted_body
}

/// # Safety
/// The instruction set must be there.
#[inline(always)]
unsafe fn add_weighted_body<S: Simd, E: Element>(weights: &[E], rows: &[E], stride: usize, sums: &mut [f32]) {
    let d = sums.len();
    for c in (0..d).step_by(S::LANES) {
        // SAFETY: c < d, the length of the sums and of every row.
        unsafe {
            let mut sum = read::<S, f32>(sums, c);
            for (j, weight) in weights.iter().enumerate() {
                let row = &rows[j * stride..][..d];
                sum = S::mul_add(S::splat(weight.to_f32()), read::<S, E>(row, c), sum);
            }
            write::<S, f32>(sums, c, sum);
        }
    }
}
