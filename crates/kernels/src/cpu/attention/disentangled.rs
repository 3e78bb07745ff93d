//! Disentangled attention (He et al. 2021, "DeBERTa") over flat tokens: besides their contents, a query and a key are scored by
//! how the one's content goes with the other's relative position.
//!
//! Legend: A heads, D = head size, H = A·D; S tokens of one sequence; P rows of the tables of positions, U of them that a
//! sequence, or a block of its queries, needs.
//!
//! score(i, j) = scale·(q_i·k_j + q_i·kr_c(i−j) + k_j·qr_c(i−j)), where c is [`LogBuckets::row`]. Either table may be absent. The
//! paper has c(j−i) in the last term; its code and `transformers` transpose that term along with its index, and all published
//! models were trained so.
//!
//! A row of q·krᵀ has all that a query adds, by position. With kr's rows in reverse, f(j−i) = P−1−c(i−j) grows with the key, so
//! that near by, where each distance has its own row, what a query adds to the scores is a part of that row as it is. A row of
//! k·qrᵀ has what a key adds: f(i−j) = c(i−j) grows with the query, hence it is transposed on its way to the scores. Nothing is
//! S×S but a block.

use std::ops::Range;

use super::softmax::{softmax, softmax_backward};
use super::{Attention, AttentionDropout, Block, LogBuckets, Matrix, Part, Right, View, ViewMut, round, store};
use crate::cpu::gemm::{Finish, product, product_into};
use crate::cpu::scratch::{self, Purpose};
use crate::cpu::simd::{Element, Simd, read, write};
use crate::cpu::{Cpu, SharedMut};

/// The definition for one sequence and one head, in f64.
pub mod reference {
    use super::super::LogBuckets;
    use super::super::reference::{self as plain, Output};

    /// What scores are made of: content, S×D each, and positions, P×D each or none.
    pub struct Inputs<'a> {
        /// S×D.
        pub q: &'a [f64],
        /// S×D.
        pub k: &'a [f64],
        /// S×D.
        pub v: &'a [f64],
        /// P×D: what queries are compared with.
        pub kr: Option<&'a [f64]>,
        /// P×D: what keys are compared with.
        pub qr: Option<&'a [f64]>,
        /// D.
        pub d: usize,
        /// How distances become rows of the tables.
        pub buckets: LogBuckets,
        /// What all of a score is multiplied by.
        pub scale: f64,
    }

    impl Inputs<'_> {
        /// For every pair of a query and a key, and each table that is there: 0 for kr or 1 for qr, the table, the content
        /// that it is multiplied with, and the rows of both.
        fn terms(&self, mut each: impl FnMut(usize, usize, &[f64], &[f64], [usize; 2])) {
            let s = self.q.len() / self.d;
            for pair in 0..s * s {
                let (i, j) = ((pair / s) as i64, (pair % s) as i64);
                for (which, table, content, from) in [(0, self.kr, self.q, i), (1, self.qr, self.k, j)] {
                    let Some(table) = table else { continue };
                    let row = self.buckets.row(i - j, table.len() / self.d);
                    each(pair, which, table, content, [from as usize, row]);
                }
            }
        }

        fn added(&self) -> Vec<f64> {
            let (s, d) = (self.q.len() / self.d, self.d);
            let mut added = vec![0.0; s * s];
            self.terms(|pair, _, table, content, [from, row]| {
                added[pair] += self.scale * (0..d).map(|c| content[from * d + c] * table[row * d + c]).sum::<f64>();
            });
            added
        }
    }

    /// drop(softmax(scores))·v; `mask` holds 0 or dropout's scale for every probability.
    pub fn forward(x: &Inputs<'_>, mask: Option<&[f64]>) -> Output {
        plain::forward(x.q, x.k, x.v, x.d, x.scale, Some(&x.added()), mask)
    }

    /// The gradients of [`forward`] with respect to q, k, v, kr and qr; empty for a table that is not there.
    pub fn backward(x: &Inputs<'_>, output: &Output, mask: Option<&[f64]>, dout: &[f64]) -> [Vec<f64>; 5] {
        let [dq, dk, dv, dadded] = plain::backward(x.q, x.k, x.v, x.d, x.scale, output, mask, dout);
        let mut dcontent = [dq, dk];
        let mut dtables = [x.kr, x.qr].map(|table| vec![0.0; table.map_or(0, <[f64]>::len)]);
        x.terms(|pair, which, table, content, [from, row]| {
            let slope = x.scale * dadded[pair];
            for c in 0..x.d {
                dcontent[which][from * x.d + c] += slope * table[row * x.d + c];
                dtables[which][row * x.d + c] += slope * content[from * x.d + c];
            }
        });
        let ([dq, dk], [dkr, dqr]) = (dcontent, dtables);
        [dq, dk, dv, dkr, dqr]
    }
}

/// A disentangled attention apart from its data.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Disentangled {
    /// A.
    pub heads: usize,
    /// D.
    pub head_size: usize,
    /// How distances become rows of the tables of positions.
    pub buckets: LogBuckets,
    /// What all of a score is multiplied by: 1/√(D·(1 + tables)).
    pub scale: f32,
}

impl Disentangled {
    /// With the scale that `tables` tables of positions, 0 to 2, lead to.
    pub fn new(heads: usize, head_size: usize, buckets: LogBuckets, tables: usize) -> Self {
        Self { heads, head_size, buckets, scale: 1.0 / ((head_size * (1 + tables)) as f32).sqrt() }
    }

    /// The attention among contents alone.
    pub fn content(&self) -> Attention {
        Attention { scale: self.scale, ..Attention::new(self.heads, self.head_size) }
    }

    fn check<E>(&self, inputs: &Inputs<'_, E>, dropout: AttentionDropout<'_>) {
        let content = self.content();
        content.check_inputs(&inputs.content, dropout);
        assert!(inputs.content.query_offsets == inputs.content.key_offsets, "disentangled attention: two layouts");
        let tables = [&inputs.position_key, &inputs.position_query];
        for table in tables.into_iter().flatten() {
            assert!(table.width == content.query_width(), "disentangled attention: widths of positions differ");
            assert!(table.rows() == inputs.positions(), "disentangled attention: numbers of positions differ");
        }
        let mut tables = tables.into_iter().flatten();
        assert!(tables.all(|table| table.rows().is_multiple_of(2) && table.rows() > 0), "positions have no middle");
    }
}

/// What a disentangled attention reads.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a, E> {
    /// Queries, keys and values of one layout, without a bias.
    pub content: super::Inputs<'a, E>,
    /// kr, P×H: positions as queries see them.
    pub position_key: Option<View<'a, E>>,
    /// qr, P×H: positions as keys see them.
    pub position_query: Option<View<'a, E>>,
}

impl<E> Inputs<'_, E> {
    /// P.
    fn positions(&self) -> usize {
        self.position_key.as_ref().or(self.position_query.as_ref()).map_or(0, View::rows)
    }
}

/// Where the gradients of [`forward`] go; all are written.
#[derive(Debug)]
pub struct Gradients<'a, E> {
    /// S×H of all sequences.
    pub query: ViewMut<'a, E>,
    /// Likewise.
    pub key: ViewMut<'a, E>,
    /// Likewise.
    pub value: ViewMut<'a, E>,
    /// P×H, where there is such a table.
    pub position_key: Option<ViewMut<'a, E>>,
    /// P×H, where there is such a table.
    pub position_query: Option<ViewMut<'a, E>>,
}

/// f by distance.
struct Expansion<'a> {
    /// From the distance −(longest − 1) on.
    rows: &'a [u32],
    /// Where distance 0 stands there.
    zero: i64,
    /// Distances in which f grows by one each.
    straight: Range<i64>,
}

impl<'a> Expansion<'a> {
    /// Space for a sequence of `longest` tokens.
    fn space(longest: usize) -> usize {
        (2 * longest).saturating_sub(1)
    }

    /// `row` gives f, which never descends.
    fn new(longest: usize, rows: &'a mut [u32], row: impl Fn(i64) -> usize) -> Self {
        let zero = longest.saturating_sub(1) as i64;
        for (i, to) in rows.iter_mut().enumerate() {
            *to = row(i as i64 - zero) as u32;
        }
        let rows = &*rows;
        let grows = |x: i64| rows[(x + zero) as usize] + 1 == rows[(x + 1 + zero) as usize];
        let (mut start, mut end) = (0, 0);
        while end < zero && grows(end) {
            end += 1;
        }
        while start > -zero && grows(start - 1) {
            start -= 1;
        }
        Self { rows, zero, straight: start..end + 1 }
    }

    fn row(&self, distance: i64) -> usize {
        self.rows[(distance + self.zero) as usize] as usize
    }

    /// The rows of distances from one to another, both included.
    fn range(&self, first: i64, last: i64) -> Range<usize> {
        self.row(first)..self.row(last) + 1
    }

    /// The rows of `columns` distances from `first` on, and which of these columns have rows that follow each other.
    #[inline(always)]
    fn columns(&self, first: i64, columns: usize) -> (&[u32], Range<usize>) {
        let column = |distance: i64| (distance - first).clamp(0, columns as i64) as usize;
        (&self.rows[(first + self.zero) as usize..][..columns], column(self.straight.start)..column(self.straight.end))
    }
}

dispatch! {
    /// out[r, c] += from[r, f(first + c − r) − base], of `width` numbers a row, to `columns` a row.
    fn expand(by: &Expansion<'_>, first: i64, base: usize, from: &[f32], width: usize, out: &mut [f32], columns: usize)
        = expand_body
}

/// # Safety
/// The instruction set must be there.
#[inline(always)]
unsafe fn expand_body<S: Simd>(
    by: &Expansion<'_>,
    first: i64,
    base: usize,
    from: &[f32],
    width: usize,
    out: &mut [f32],
    columns: usize,
) {
    for (r, (out, from)) in out.chunks_exact_mut(columns).zip(from.chunks_exact(width)).enumerate() {
        let (rows, straight) = by.columns(first - r as i64, columns);
        for c in (0..straight.start).chain(straight.end..columns) {
            out[c] += from[rows[c] as usize - base];
        }
        if !straight.is_empty() {
            let start = rows[straight.start] as usize - base;
            let (from, out) = (&from[start..start + straight.len()], &mut out[straight]);
            for c in (0..from.len()).step_by(S::LANES) {
                // SAFETY: c is below the length of both.
                unsafe { write::<S, f32>(out, c, S::add(read::<S, f32>(out, c), read::<S, f32>(from, c))) };
            }
        }
    }
}

dispatch! {
    /// The reverse: out[r, f(first + c − r) − base] += from[r, c].
    fn contract<E>(by: &Expansion<'_>, first: i64, base: usize, from: &[E], columns: usize, out: &mut [f32], width: usize)
        = contract_body
}

/// # Safety
/// The instruction set must be there.
#[inline(always)]
unsafe fn contract_body<S: Simd, E: Element>(
    by: &Expansion<'_>,
    first: i64,
    base: usize,
    from: &[E],
    columns: usize,
    out: &mut [f32],
    width: usize,
) {
    for (r, (from, out)) in from.chunks_exact(columns).zip(out.chunks_exact_mut(width)).enumerate() {
        let (rows, straight) = by.columns(first - r as i64, columns);
        for c in (0..straight.start).chain(straight.end..columns) {
            out[rows[c] as usize - base] += from[c].to_f32();
        }
        if !straight.is_empty() {
            let start = rows[straight.start] as usize - base;
            let (out, from) = (&mut out[start..start + straight.len()], &from[straight]);
            for c in (0..from.len()).step_by(S::LANES) {
                // SAFETY: c is below the length of both.
                unsafe { write::<S, f32>(out, c, S::add(read::<S, f32>(out, c), read::<S, E>(from, c))) };
            }
        }
    }
}

/// Rows of a tile on its way between a matrix and its transpose: lanes at most.
const TILE: usize = 16;

dispatch! {
    /// scores[i, j] += from[j, f(first + i − j) − base]: what keys add, of `width` numbers each, to `keys` scores a query.
    fn expand_keys(
        by: &Expansion<'_>, first: i64, base: usize, from: &[f32], width: usize, scores: &mut [f32], keys: usize,
        tile: &mut [f32],
    ) = expand_keys_body
}

/// # Safety
/// The instruction set must be there; the tile has 16 numbers for each query.
#[inline(always)]
unsafe fn expand_keys_body<S: Simd>(
    by: &Expansion<'_>,
    first: i64,
    base: usize,
    from: &[f32],
    width: usize,
    scores: &mut [f32],
    keys: usize,
    tile: &mut [f32],
) {
    let queries = scores.len() / keys;
    for key in (0..keys).step_by(S::LANES) {
        let rows = S::LANES.min(keys - key);
        let tile = &mut tile[..rows * queries];
        tile.fill(0.0);
        // SAFETY: the instruction set is there; lengths are checked where slices are read and written.
        unsafe {
            expand_body::<S>(by, first - key as i64, base, &from[key * width..], width, tile, queries);
            for query in (0..queries).step_by(S::LANES) {
                let mut square = [S::splat(0.0); TILE];
                for (square, row) in square.iter_mut().zip(tile.chunks_exact(queries)) {
                    *square = read::<S, f32>(row, query);
                }
                S::transpose(&mut square);
                for (i, square) in square.iter().enumerate().take(S::LANES.min(queries - query)) {
                    let scores = &mut scores[(query + i) * keys + key..][..rows];
                    write::<S, f32>(scores, 0, S::add(read::<S, f32>(scores, 0), *square));
                }
            }
        }
    }
}

dispatch! {
    /// The reverse: out[j, f(first + i − j) − base] += dscores[i, j].
    fn contract_keys<E>(
        by: &Expansion<'_>, first: i64, base: usize, dscores: &[E], keys: usize, out: &mut [f32], width: usize,
        tile: &mut [f32],
    ) = contract_keys_body
}

/// # Safety
/// The instruction set must be there; the tile has 16 numbers for each query.
#[inline(always)]
unsafe fn contract_keys_body<S: Simd, E: Element>(
    by: &Expansion<'_>,
    first: i64,
    base: usize,
    dscores: &[E],
    keys: usize,
    out: &mut [f32],
    width: usize,
    tile: &mut [f32],
) {
    let queries = dscores.len() / keys;
    for key in (0..keys).step_by(S::LANES) {
        let rows = S::LANES.min(keys - key);
        let tile = &mut tile[..rows * queries];
        // SAFETY: as above.
        unsafe {
            for query in (0..queries).step_by(S::LANES) {
                let mut square = [S::splat(0.0); TILE];
                for (i, square) in square.iter_mut().enumerate().take(S::LANES.min(queries - query)) {
                    *square = read::<S, E>(&dscores[(query + i) * keys + key..][..rows], 0);
                }
                S::transpose(&mut square);
                for (square, row) in square.iter().zip(tile.chunks_exact_mut(queries)) {
                    write::<S, f32>(row, query, *square);
                }
            }
            let out = &mut out[key * width..(key + rows) * width];
            contract_body::<S, f32>(by, first - key as i64, base, tile, queries, out, width);
        }
    }
}

/// What all tasks read.
struct Work<'a, 'b, E> {
    cpu: &'a Cpu,
    attention: &'a Attention,
    inputs: &'a Inputs<'b, E>,
    dropout: AttentionDropout<'a>,
    /// For kr and for qr.
    by: &'a [Expansion<'a>; 2],
    /// kr with its rows in reverse, and qr, P×H.
    tables: [Option<&'a [E]>; 2],
}

/// Scores of a block under way.
struct Space<'a> {
    /// Queries × keys.
    scores: &'a mut [f32],
    /// What queries add by position: queries × U.
    by_query: &'a mut [f32],
    /// What keys add by position: S×U.
    by_key: &'a mut [f32],
    tile: &'a mut [f32],
}

impl<'a> Space<'a> {
    fn size(part: &Part<'_>, width: usize) -> usize {
        let (block, keys) = part.block_sizes();
        block * keys + block * width + keys * width + TILE * block
    }

    fn split(space: &'a mut [f32], part: &Part<'_>, width: usize) -> (Self, &'a mut [f32]) {
        let (block, keys) = part.block_sizes();
        let (scores, rest) = space.split_at_mut(block * keys);
        let (by_query, rest) = rest.split_at_mut(block * width);
        let (by_key, rest) = rest.split_at_mut(keys * width);
        let (tile, rest) = rest.split_at_mut(TILE * block);
        (Self { scores, by_query, by_key, tile }, rest)
    }
}

impl<E: Element> Work<'_, '_, E> {
    fn part(&self, sequence: usize, head: usize) -> Part<'_> {
        Part::new(self.attention, &self.inputs.content, sequence, head)
    }

    /// The rows of qr that a sequence needs.
    fn range(&self, part: &Part<'_>) -> Range<usize> {
        let far = part.keys.len() as i64 - 1;
        self.by[1].range(-far, far)
    }

    /// The rows of either table that a sequence needs at most.
    fn width(&self, part: &Part<'_>) -> usize {
        let far = part.keys.len() as i64 - 1;
        self.range(part).len().max(self.by[0].range(-far, far).len())
    }

    /// The rows of kr that a block of queries needs.
    fn range_of_queries(&self, block: &Block) -> Range<usize> {
        let last = (block.first + block.queries) as i64 - 1;
        self.by[0].range(-last, (block.all_keys - 1 - block.first) as i64)
    }

    /// A head's columns of some rows of a table.
    fn table<'t>(&self, table: &'t [E], part: &Part<'_>, rows: &Range<usize>) -> Matrix<'t, E> {
        let h = self.attention.query_width();
        let start = rows.start * h + part.query_column();
        Matrix::strided(&table[start..], rows.len(), self.attention.head_size, h)
    }

    /// A head's columns of some tokens.
    fn rows<'t>(&self, from: &View<'t, E>, part: &Part<'_>, tokens: Range<usize>) -> Matrix<'t, E> {
        let rows = part.keys.start + tokens.start..part.keys.start + tokens.end;
        from.matrix(rows, part.key_column(), self.attention.head_size)
    }

    /// What keys add to all scores of a sequence.
    fn begin(&self, part: &Part<'_>, space: &mut Space<'_>) {
        let Some(table) = self.tables[1] else { return };
        let (rows, finish) = (self.range(part), Finish { scale: self.attention.scale, ..Finish::default() });
        let key = self.rows(&self.inputs.content.key, part, 0..part.keys.len());
        let table = Right::Plain(self.table(table, part, &rows).transposed());
        product(self.cpu, key, table, space.by_key, rows.len(), finish);
    }

    /// The scores of a block.
    fn scores(&self, part: &Part<'_>, block: &Block, space: &mut Space<'_>) {
        let (cpu, first, keys) = (self.cpu, block.first as i64, block.keys.len());
        let scores = &mut space.scores[..block.queries * keys];
        part.scores(cpu, &self.inputs.content, block, scores);
        if let Some(table) = self.tables[0] {
            let (rows, finish) =
                (self.range_of_queries(block), Finish { scale: self.attention.scale, ..Finish::default() });
            let by_query = &mut space.by_query[..block.queries * rows.len()];
            let table = Right::Plain(self.table(table, part, &rows).transposed());
            product(cpu, part.query(&self.inputs.content.query, block), table, by_query, rows.len(), finish);
            expand(cpu.isa(), &self.by[0], -first, rows.start, by_query, rows.len(), scores, keys);
        }
        if self.tables[1].is_some() {
            let rows = self.range(part);
            let by_key = &space.by_key[..keys * rows.len()];
            expand_keys(cpu.isa(), &self.by[1], first, rows.start, by_key, rows.len(), scores, keys, space.tile);
        }
    }

    /// # Safety
    /// No other task may have the same sequence and head.
    unsafe fn forward(&self, sequence: usize, head: usize, out: SharedMut<E>, log_sums: SharedMut<f32>) {
        let part = self.part(sequence, head);
        if part.queries.is_empty() {
            return;
        }
        let (h, d, width) = (self.attention.query_width(), self.attention.head_size, self.width(&part));
        let (block, keys) = part.block_sizes();
        let drop = part.dropout(self.dropout);
        let content = &self.inputs.content;
        // SAFETY: the head's rows of this sequence belong to this task.
        let log_sums = unsafe { log_sums.slice(head * content.query.rows() + part.queries.start, part.queries.len()) };
        scratch::with(Purpose::Kernel, Space::size(&part, width) + block * keys, |space: &mut [f32]| {
            let (mut space, weights) = Space::split(space, &part, width);
            let weights: &mut [E] = &mut bytemuck::cast_slice_mut(weights)[..block * keys];
            self.begin(&part, &mut space);
            for block in part.blocks() {
                let n = block.queries;
                self.scores(&part, &block, &mut space);
                let (scores, weights) = (&mut space.scores[..n * keys], &mut weights[..n * keys]);
                let log_sums = &mut log_sums[block.first..block.first + n];
                softmax(self.cpu.isa(), &block, None, drop, scores, weights, log_sums);
                let value = Right::Plain(self.rows(&content.value, &part, 0..keys));
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

/// Runs `body` on what all tasks of a call read, and `extra` more numbers.
fn with_work<E: Element, R>(
    cpu: &Cpu,
    attention: &Disentangled,
    inputs: &Inputs<'_, E>,
    dropout: AttentionDropout<'_>,
    extra: usize,
    body: impl FnOnce(&Work<'_, '_, E>, &mut [f32]) -> R,
) -> R {
    let (content, positions) = (attention.content(), inputs.positions());
    let h = content.query_width();
    let lengths = inputs.content.query_offsets.windows(2).map(|w| (w[1] - w[0]) as usize);
    let longest = lengths.max().unwrap_or(0);
    let (distances, table) = (Expansion::space(longest), positions * h);
    let aligned = distances.next_multiple_of(16);
    scratch::with(Purpose::Outer, 2 * aligned + 2 * table + extra, |space: &mut [u32]| {
        let (rows, rest) = space.split_at_mut(2 * aligned);
        let (tables, extra) = rest.split_at_mut(2 * table);
        let (of_queries, of_keys) = rows.split_at_mut(aligned);
        let (buckets, p) = (attention.buckets, positions.max(1));
        let by = [
            Expansion::new(longest, &mut of_queries[..distances], |distance| p - 1 - buckets.row(-distance, p)),
            Expansion::new(longest, &mut of_keys[..distances], |distance| buckets.row(distance, p)),
        ];
        let mut halves = bytemuck::cast_slice_mut::<u32, E>(tables)[..2 * table].chunks_exact_mut(table.max(1));
        let mut copied = |from: Option<View<'_, E>>, reverse: bool| {
            let (from, to) = (from?, halves.next()?);
            copy(cpu, &from, reverse, to);
            Some(&*to)
        };
        let tables = [copied(inputs.position_key, true), copied(inputs.position_query, false)];
        let work = Work { cpu, attention: &content, inputs, dropout, by: &by, tables };
        body(&work, bytemuck::cast_slice_mut(extra))
    })
}

/// Copies rows, in reverse the last first.
fn copy<E: Element>(cpu: &Cpu, from: &View<'_, E>, reverse: bool, to: &mut [E]) {
    let (rows, to) = (from.rows(), SharedMut::new(to));
    cpu.for_ranges(rows, 64, |_, range| {
        for row in range {
            let start = if reverse { rows - 1 - row } else { row } * from.stride + from.offset;
            // SAFETY: every row is one task's.
            unsafe { to.slice(row * from.width, from.width) }.copy_from_slice(&from.data[start..start + from.width]);
        }
    });
}

/// out (tokens × H) = the attention; `log_sums` (A × tokens) gets the logarithm of each softmax's denominator.
pub fn forward<E: Element>(
    cpu: &Cpu,
    attention: &Disentangled,
    inputs: &Inputs<'_, E>,
    dropout: AttentionDropout<'_>,
    out: &mut [E],
    log_sums: &mut [f32],
) {
    attention.check(inputs, dropout);
    let (rows, heads) = (inputs.content.query.rows(), attention.heads);
    assert!(out.len() == rows * heads * attention.head_size && log_sums.len() == heads * rows, "lengths differ");
    let (out, log_sums) = (SharedMut::new(out), SharedMut::new(log_sums));
    let sequences = inputs.content.query_offsets.len().saturating_sub(1);
    with_work(cpu, attention, inputs, dropout, 0, |work, _| {
        cpu.for_each(sequences * heads, |i| {
            // SAFETY: every task has its own sequence and head.
            unsafe { work.forward(i / heads, i % heads, out, log_sums) };
        });
    });
}

/// The probabilities of every sequence, one after the other: A×S×S each, before dropout. For people to look at.
pub fn probabilities<E: Element>(cpu: &Cpu, attention: &Disentangled, inputs: &Inputs<'_, E>, out: &mut [f32]) {
    attention.check(inputs, None);
    let (content, heads) = (attention.content(), attention.heads);
    let offsets = inputs.content.query_offsets;
    assert!(out.len() == content.probabilities(offsets, offsets), "attention: lengths differ");
    let out = SharedMut::new(out);
    with_work(cpu, attention, inputs, None, 0, |work, _| {
        cpu.for_each(offsets.len().saturating_sub(1) * heads, |i| {
            let part = work.part(i / heads, i % heads);
            if part.queries.is_empty() {
                return;
            }
            let before = &offsets[..=part.sequence];
            let (before, keys) = (content.probabilities(before, before), part.keys.len());
            // SAFETY: every task has its own sequence and head.
            let out = unsafe { out.slice(before + part.head * keys * keys, keys * keys) };
            let (width, block) = (work.width(&part), part.block_sizes().0);
            scratch::with(Purpose::Kernel, Space::size(&part, width) + block, |space: &mut [f32]| {
                let (mut space, log_sums) = Space::split(space, &part, width);
                work.begin(&part, &mut space);
                for block in part.blocks() {
                    work.scores(&part, &block, &mut space);
                    let scores = &mut space.scores[..block.queries * keys];
                    let out = &mut out[block.first * keys..][..block.queries * keys];
                    softmax(cpu.isa(), &block, None, None, scores, out, &mut log_sums[..block.queries]);
                }
            });
        });
    });
}

/// The gradients of [`forward`], from its log-sums and the gradient of its output.
pub fn backward<E: Element>(
    cpu: &Cpu,
    attention: &Disentangled,
    inputs: &Inputs<'_, E>,
    dropout: AttentionDropout<'_>,
    log_sums: &[f32],
    dout: &[E],
    gradients: Gradients<'_, E>,
) {
    attention.check(inputs, dropout);
    let (rows, heads, d) = (inputs.content.query.rows(), attention.heads, attention.head_size);
    let (h, positions) = (heads * d, inputs.positions());
    assert!(dout.len() == rows * h && log_sums.len() == heads * rows, "attention: lengths differ");
    let Gradients { query, key, value, position_key, position_query } = gradients;
    assert!([&query, &key, &value].iter().all(|g| g.rows() == rows && g.width == h), "attention: gradients differ");
    let of_tables = [&position_key, &position_query];
    let same = |to: &Option<ViewMut<'_, E>>| to.as_ref().is_none_or(|to| to.rows() == positions && to.width == h);
    assert!(of_tables.into_iter().all(same), "attention: gradients of positions differ");
    let wanted = [inputs.position_key.is_some(), inputs.position_query.is_some()];
    assert!(of_tables.map(Option::is_some) == wanted, "attention: a table without a gradient, or the reverse");
    let sequences = inputs.content.query_offsets.len().saturating_sub(1);
    // Sequences whose shares of the positions' gradients are added up by one task: enough tasks for many threads, by sizes alone.
    let chunks = 32usize.div_ceil(heads).min(sequences);
    let chunk = sequences.div_ceil(chunks.max(1));
    let share = positions * d;
    with_work(cpu, attention, inputs, dropout, chunks * heads * 2 * share, |work, sums| {
        let back = BackwardWork { work, log_sums, dout: View::new(dout, h), query, key, value };
        let shared = SharedMut::new(sums);
        cpu.for_each(chunks * heads, |i| {
            // SAFETY: every task has its own share, and its own sequences and head.
            let sums = unsafe { shared.slice(i * 2 * share, 2 * share) };
            sums.fill(0.0);
            let (dkr, dqr) = sums.split_at_mut(share);
            for sequence in i / heads * chunk..((i / heads + 1) * chunk).min(sequences) {
                // SAFETY: as above.
                unsafe { back.part(sequence, i % heads, [dkr, dqr]) };
            }
        });
        for (which, to) in [position_key, position_query].into_iter().enumerate() {
            if let Some(to) = to {
                add_shares(cpu, sums, (chunks, heads, d), which, &to);
            }
        }
    });
}

/// Adds up the shares of a table's gradient and writes them; those of the first, which was in reverse, the last row first.
fn add_shares<E: Element>(
    cpu: &Cpu,
    sums: &[f32],
    (chunks, heads, d): (usize, usize, usize),
    which: usize,
    to: &ViewMut<'_, E>,
) {
    let rows = to.rows();
    cpu.for_ranges(rows, 8, |_, range| {
        for row in range {
            for head in 0..heads {
                // SAFETY: every row is one task's.
                let out = unsafe { to.data.slice(to.at(if which == 0 { rows - 1 - row } else { row }, head * d), d) };
                for (c, out) in out.iter_mut().enumerate() {
                    let of = |chunk: usize| sums[((chunk * heads + head) * 2 + which) * rows * d + row * d + c];
                    *out = E::from_f32((0..chunks).map(of).sum());
                }
            }
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
    /// Queries × keys.
    dweights: &'a mut [f32],
    weights: &'a mut [E],
    dscores: &'a mut [E],
    /// Queries × D.
    dquery: &'a mut [f32],
    /// S×D.
    dkey: &'a mut [f32],
    dvalue: &'a mut [f32],
    /// Queries, or as many keys, × U.
    rounded: &'a mut [E],
    /// S×U.
    dby_key: &'a mut [f32],
}

impl<'a, E: Element> BackwardSpace<'a, E> {
    fn size(part: &Part<'_>, width: usize, d: usize) -> usize {
        let (block, keys) = part.block_sizes();
        3 * block * keys + (block + 2 * keys) * d + block * width + keys * width
    }

    fn split(space: &'a mut [f32], part: &Part<'_>, width: usize, d: usize) -> Self {
        let (block, keys) = part.block_sizes();
        let (dweights, rest) = space.split_at_mut(block * keys);
        let (elements, rest) = rest.split_at_mut(2 * block * keys);
        let (weights, dscores) = bytemuck::cast_slice_mut::<f32, E>(elements).split_at_mut(block * keys);
        let (dquery, rest) = rest.split_at_mut(block * d);
        let (dkey, rest) = rest.split_at_mut(keys * d);
        let (dvalue, rest) = rest.split_at_mut(keys * d);
        let (rounded, dby_key) = rest.split_at_mut(block * width);
        let rounded = &mut bytemuck::cast_slice_mut(rounded)[..block * width];
        Self { dweights, weights, dscores, dquery, dkey, dvalue, rounded, dby_key }
    }
}

impl<E: Element> BackwardWork<'_, '_, '_, E> {
    /// One head of a sequence; the gradients of its positions (P×D) are added to `dtables`.
    ///
    /// # Safety
    /// No other task may have the same sequence and head.
    unsafe fn part(&self, sequence: usize, head: usize, [dkr, dqr]: [&mut [f32]; 2]) {
        let work = self.work;
        let part = work.part(sequence, head);
        if part.queries.is_empty() {
            return;
        }
        let (d, keys, width) = (work.attention.head_size, part.keys.len(), work.width(&part));
        let size = Space::size(&part, width) + BackwardSpace::<E>::size(&part, width, d);
        scratch::with(Purpose::Kernel, size, |space: &mut [f32]| {
            let (mut scores, rest) = Space::split(space, &part, width);
            let mut space = BackwardSpace::<E>::split(rest, &part, width, d);
            work.begin(&part, &mut scores);
            space.dby_key.fill(0.0);
            for block in part.blocks() {
                self.block(&part, &block, &mut scores, &mut space, dkr);
                // SAFETY: this head's columns of this sequence's rows belong to this task.
                unsafe { store(&self.query, part.query_rows(&block), part.query_column(), space.dquery, d) };
            }
            if let Some(table) = work.tables[1] {
                self.keys(&part, table, &mut space, dqr);
            }
            for (to, sums) in [(&self.key, &*space.dkey), (&self.value, &*space.dvalue)] {
                // SAFETY: as above.
                unsafe { store(to, part.keys.start..part.keys.start + keys, part.key_column(), sums, d) };
            }
        });
    }

    /// The share of a block of queries in all gradients, its own queries' in `dquery`.
    fn block(
        &self,
        part: &Part<'_>,
        block: &Block,
        scores: &mut Space<'_>,
        space: &mut BackwardSpace<'_, E>,
        dkr: &mut [f32],
    ) {
        let (work, cpu) = (self.work, self.work.cpu);
        let (n, keys, d, scale) = (block.queries, block.keys.len(), work.attention.head_size, work.attention.scale);
        let content = &work.inputs.content;
        let log_sums = &self.log_sums[part.head * content.query.rows()..][part.queries.clone()];
        work.scores(part, block, scores);
        let (dout, query) = (part.query(&self.dout, block), part.query(&content.query, block));
        let [key, value] = [&content.key, &content.value].map(|from| work.rows(from, part, 0..keys));
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
        let later = block.first > 0;
        let dquery = &mut space.dquery[..n * d];
        product(cpu, Matrix::new(&*dscores, n, keys), Right::Plain(key), dquery, d, scaled(false));
        let transposed = Matrix::new(&*dscores, n, keys).transposed();
        product(cpu, transposed, Right::Plain(query), space.dkey, d, scaled(later));
        let summed = Finish { accumulate: later, ..Finish::default() };
        product(cpu, Matrix::new(&*weights, n, keys).transposed(), Right::Plain(dout), space.dvalue, d, summed);
        if let Some(table) = work.tables[0] {
            let rows = work.range_of_queries(block);
            let by_query = &mut scores.by_query[..n * rows.len()];
            by_query.fill(0.0);
            contract(cpu.isa(), &work.by[0], -(block.first as i64), rows.start, dscores, keys, by_query, rows.len());
            let rounded = round(by_query, space.rounded);
            let dpositions = Matrix::new(rounded, n, rows.len());
            product(cpu, dpositions, Right::Plain(work.table(table, part, &rows)), dquery, d, scaled(true));
            let dkr = &mut dkr[rows.start * d..rows.end * d];
            product(cpu, dpositions.transposed(), Right::Plain(query), dkr, d, scaled(true));
        }
        if work.tables[1].is_some() {
            let rows = work.range(part);
            let (by, first, width) = (&work.by[1], block.first as i64, rows.len());
            let sums = &mut space.dby_key[..keys * width];
            contract_keys(cpu.isa(), by, first, rows.start, dscores, keys, sums, width, scores.tile);
        }
    }

    /// What positions as keys see them add to the keys' gradients, and their own.
    fn keys(&self, part: &Part<'_>, table: &[E], space: &mut BackwardSpace<'_, E>, dqr: &mut [f32]) {
        let (work, cpu, d) = (self.work, self.work.cpu, self.work.attention.head_size);
        let (rows, keys) = (work.range(part), part.keys.len());
        let (block, width) = (part.block_sizes().0, rows.len());
        let finish = || Finish { scale: work.attention.scale, accumulate: true, ..Finish::default() };
        let dqr = &mut dqr[rows.start * d..rows.end * d];
        for first in (0..keys).step_by(block) {
            let tokens = first..(first + block).min(keys);
            let rounded = round(&space.dby_key[first * width..tokens.end * width], space.rounded);
            let dpositions = Matrix::new(rounded, tokens.len(), width);
            let dkey = &mut space.dkey[first * d..tokens.end * d];
            product(cpu, dpositions, Right::Plain(work.table(table, part, &rows)), dkey, d, finish());
            let key = Right::Plain(work.rows(&work.inputs.content.key, part, tokens));
            product(cpu, dpositions.transposed(), key, dqr, d, finish());
        }
    }
}
