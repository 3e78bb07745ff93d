//! Additive attention (Bahdanau et al. 2015): a key's score is v·tanh(query + key), where both were projected already; what a
//! query gets is the mean of the values by the softmax of its scores. Without queries every sequence has one that is zero: then
//! it is a pooling whose weights are learned.
//!
//! Multiplicative attention (Luong et al. 2015) is `attention` with one head.
//!
//! Legend: B sequences; N queries and M keys, those of a sequence side by side; A columns of projections, H of values.

use super::math::tanh;
use super::scratch::{self, Purpose};
use super::simd::{Element, Simd, read, write};
use super::{Cpu, SharedMut, chunks};

/// The definition, in f64.
pub mod reference {
    /// N×H, and the probabilities of each query's keys, one query after the other. `v` has A numbers; offsets are those of
    /// queries and of keys.
    pub fn forward(
        queries: &[f64],
        keys: &[f64],
        v: &[f64],
        values: &[f64],
        offsets: [&[u32]; 2],
    ) -> (Vec<f64>, Vec<f64>) {
        let (a, h) = (v.len(), values.len() * v.len() / keys.len());
        let (mut out, mut probabilities) = (Vec::new(), Vec::new());
        for (of_queries, of_keys) in offsets[0].windows(2).zip(offsets[1].windows(2)) {
            let keys_of = || of_keys[0] as usize..of_keys[1] as usize;
            for i in of_queries[0] as usize..of_queries[1] as usize {
                let score = |j: usize| (0..a).map(|c| v[c] * (queries[i * a + c] + keys[j * a + c]).tanh()).sum();
                let scores: Vec<f64> = keys_of().map(score).collect();
                let sum: f64 = scores.iter().map(|score| score.exp()).sum();
                let shares: Vec<f64> = scores.iter().map(|score| score.exp() / sum).collect();
                let mean = |c: usize| keys_of().zip(&shares).map(|(j, share)| share * values[j * h + c]).sum();
                out.extend((0..h).map(mean).collect::<Vec<f64>>());
                probabilities.extend(shares);
            }
        }
        (out, probabilities)
    }

    /// The gradients with respect to queries, keys, v and values.
    pub fn backward(
        queries: &[f64],
        keys: &[f64],
        v: &[f64],
        values: &[f64],
        offsets: [&[u32]; 2],
        dout: &[f64],
    ) -> [Vec<f64>; 4] {
        let (a, h) = (v.len(), values.len() * v.len() / keys.len());
        let (_, probabilities) = forward(queries, keys, v, values, offsets);
        let mut gradients = [queries, keys, v, values].map(|x| vec![0.0; x.len()]);
        let mut rest = &probabilities[..];
        for (of_queries, of_keys) in offsets[0].windows(2).zip(offsets[1].windows(2)) {
            for i in of_queries[0] as usize..of_queries[1] as usize {
                let keys_of = of_keys[0] as usize..of_keys[1] as usize;
                let (shares, others) = rest.split_at(keys_of.len());
                rest = others;
                let along = |j: usize| (0..h).map(|c| dout[i * h + c] * values[j * h + c]).sum::<f64>();
                let mean: f64 = keys_of.clone().zip(shares).map(|(j, share)| share * along(j)).sum();
                for (j, share) in keys_of.zip(shares) {
                    let dscore = share * (along(j) - mean);
                    (0..h).for_each(|c| gradients[3][j * h + c] += share * dout[i * h + c]);
                    for c in 0..a {
                        let bent = (queries[i * a + c] + keys[j * a + c]).tanh();
                        gradients[2][c] += dscore * bent;
                        let dx = dscore * v[c] * (1.0 - bent * bent);
                        gradients[0][i * a + c] += dx;
                        gradients[1][j * a + c] += dx;
                    }
                }
            }
        }
        gradients
    }
}

/// Where the queries and the keys of each sequence are. Without offsets of queries, each sequence has one.
#[derive(Clone, Copy, Debug)]
pub struct Offsets<'a> {
    /// B + 1, or none.
    pub queries: Option<&'a [u32]>,
    /// B + 1.
    pub keys: &'a [u32],
}

impl Offsets<'_> {
    fn sequences(&self) -> usize {
        self.keys.len().saturating_sub(1)
    }

    fn queries(&self, i: usize) -> (usize, usize) {
        self.queries.map_or((i, 1), |offsets| (offsets[i] as usize, (offsets[i + 1] - offsets[i]) as usize))
    }

    fn keys(&self, i: usize) -> (usize, usize) {
        (self.keys[i] as usize, (self.keys[i + 1] - self.keys[i]) as usize)
    }

    /// Where the probabilities of a sequence begin.
    fn place(&self, i: usize) -> usize {
        (0..i).map(|i| self.queries(i).1 * self.keys(i).1).sum()
    }

    /// How many probabilities there are.
    pub fn probabilities(&self) -> usize {
        self.place(self.sequences())
    }

    fn check(&self, queries: usize, keys: usize) {
        let ends = |offsets: &[u32]| {
            assert!(offsets.windows(2).all(|w| w[0] <= w[1]), "additive attention: offsets descend");
            offsets.last().map_or(0, |end| *end as usize)
        };
        let of_queries = self.queries.map_or(self.sequences(), ends);
        assert!(self.queries.is_none_or(|offsets| offsets.len() == self.keys.len()), "additive attention: sequences");
        assert!(of_queries <= queries && ends(self.keys) <= keys, "additive attention: offsets end outside");
        assert!(self.keys.windows(2).all(|w| w[0] < w[1]), "additive attention: a sequence without keys");
    }
}

/// What is attended to, and by what. `queries` is empty where there are none.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a, E> {
    /// N×A.
    pub queries: &'a [E],
    /// M×A.
    pub keys: &'a [E],
    /// A.
    pub v: &'a [f32],
    /// M×H.
    pub values: &'a [E],
    /// Where each sequence's are.
    pub offsets: Offsets<'a>,
}

impl<E: Element> Inputs<'_, E> {
    /// A and H.
    fn check(&self, out: usize) -> (usize, usize) {
        let a = self.v.len();
        assert!(
            a > 0 && self.keys.len().is_multiple_of(a) && self.queries.len().is_multiple_of(a),
            "additive: lengths"
        );
        let keys = self.keys.len() / a;
        assert!(keys > 0 && self.values.len().is_multiple_of(keys), "additive attention: lengths differ");
        let h = self.values.len() / keys;
        assert!(h > 0 && out.is_multiple_of(h), "additive attention: lengths differ");
        assert!(
            self.queries.is_empty() == self.offsets.queries.is_none(),
            "additive attention: queries without offsets"
        );
        assert!(self.queries.is_empty() || self.queries.len() / a == out / h, "additive attention: lengths differ");
        self.offsets.check(out / h, keys);
        (a, h)
    }

    fn query(&self, i: usize) -> &[E] {
        if self.queries.is_empty() { &[] } else { &self.queries[i * self.v.len()..(i + 1) * self.v.len()] }
    }
}

/// Writes what each query gets (N×H) and the probabilities, [`Offsets::probabilities`] of them.
pub fn forward<E: Element>(cpu: &Cpu, inputs: &Inputs<'_, E>, probabilities: &mut [f32], out: &mut [E]) {
    let (a, h) = inputs.check(out.len());
    let Inputs { keys, v, values, offsets, .. } = *inputs;
    assert!(probabilities.len() == offsets.probabilities(), "additive attention: lengths differ");
    let (out, probabilities) = (SharedMut::new(out), SharedMut::new(probabilities));
    cpu.for_each(offsets.sequences(), |sequence| {
        let ((first, queries), (start, m)) = (offsets.queries(sequence), offsets.keys(sequence));
        let (keys, values) = (&keys[start * a..(start + m) * a], &values[start * h..(start + m) * h]);
        let place = offsets.place(sequence);
        for i in 0..queries {
            // SAFETY: every query is one task's.
            let (shares, out) = unsafe { (probabilities.slice(place + i * m, m), out.slice((first + i) * h, h)) };
            for (share, key) in shares.iter_mut().zip(keys.chunks_exact(a)) {
                *share = score(cpu.isa(), inputs.query(first + i), key, v);
            }
            let largest = shares.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            shares.iter_mut().for_each(|share| *share = (*share - largest).exp());
            let sum: f32 = shares.iter().sum();
            shares.iter_mut().for_each(|share| *share /= sum);
            mean(cpu.isa(), shares, values, out);
        }
    });
}

/// Where gradients go: those of queries, keys and values are written, that of v is added to.
#[derive(Debug)]
pub struct Gradients<'a, E> {
    /// N×A, or nothing.
    pub queries: &'a mut [E],
    /// M×A.
    pub keys: &'a mut [E],
    /// A.
    pub v: &'a mut [f32],
    /// M×H.
    pub values: &'a mut [E],
}

/// The gradients, from that of what queries got and the probabilities that [`forward`] wrote. Rows that belong to no sequence
/// are not written.
pub fn backward<E: Element>(
    cpu: &Cpu,
    inputs: &Inputs<'_, E>,
    probabilities: &[f32],
    dout: &[E],
    to: Gradients<'_, E>,
) {
    let (a, h) = inputs.check(dout.len());
    let Inputs { queries, keys, values, offsets, .. } = *inputs;
    let same = to.queries.len() == queries.len() && to.keys.len() == keys.len() && to.values.len() == values.len();
    assert!(same && to.v.len() == a && probabilities.len() == offsets.probabilities(), "additive: lengths differ");
    let [dqueries, dkeys, dvalues] = [to.queries, to.keys, to.values].map(SharedMut::new);
    let (count, _) = chunks(offsets.sequences(), 1);
    scratch::with(Purpose::Outer, count * a, |partial: &mut [f32]| {
        let shared = SharedMut::new(partial);
        cpu.for_ranges(offsets.sequences(), 1, |range, sequences| {
            // SAFETY: every range has its own partial sums.
            let dv = unsafe { shared.slice(range * a, a) };
            dv.fill(0.0);
            for sequence in sequences {
                let ((first, n), (start, m)) = (offsets.queries(sequence), offsets.keys(sequence));
                let of_queries = if queries.is_empty() { (0, 0) } else { (first * a, n * a) };
                // SAFETY: sequences do not overlap.
                let (dqueries, dkeys, dvalues) = unsafe {
                    (
                        dqueries.slice(of_queries.0, of_queries.1),
                        dkeys.slice(start * a, m * a),
                        dvalues.slice(start * h, m * h),
                    )
                };
                let part = Part {
                    isa: cpu.isa(),
                    inputs,
                    first,
                    keys: &keys[start * a..(start + m) * a],
                    values: &values[start * h..(start + m) * h],
                    probabilities: &probabilities[offsets.place(sequence)..][..n * m],
                    dout: &dout[first * h..(first + n) * h],
                };
                scratch::with(Purpose::Kernel, m * (a + h + 1) + a, |room| {
                    part.backward((a, h), room, dqueries, dkeys, dv, dvalues);
                });
            }
        });
        for part in partial.chunks_exact(a) {
            to.v.iter_mut().zip(part).for_each(|(to, part)| *to += part);
        }
    });
}

/// A sequence in the backward pass.
struct Part<'a, E> {
    isa: super::Isa,
    inputs: &'a Inputs<'a, E>,
    /// Its first query.
    first: usize,
    keys: &'a [E],
    values: &'a [E],
    probabilities: &'a [f32],
    dout: &'a [E],
}

impl<E: Element> Part<'_, E> {
    /// `room` is for sums in f32: of keys, of values, of a query, and a number for each key.
    fn backward(
        &self,
        (a, h): (usize, usize),
        room: &mut [f32],
        dqueries: &mut [E],
        dkeys: &mut [E],
        dv: &mut [f32],
        dvalues: &mut [E],
    ) {
        let m = self.keys.len() / a;
        room.fill(0.0);
        let (key_sums, rest) = room.split_at_mut(m * a);
        let (value_sums, rest) = rest.split_at_mut(m * h);
        let (query_sum, along) = rest.split_at_mut(a);
        for (i, (dout, shares)) in self.dout.chunks_exact(h).zip(self.probabilities.chunks_exact(m)).enumerate() {
            query_sum.fill(0.0);
            for ((along, value), (sum, share)) in
                along.iter_mut().zip(self.values.chunks_exact(h)).zip(value_sums.chunks_exact_mut(h).zip(shares))
            {
                *along = dot(self.isa, dout, value);
                add_scaled(self.isa, *share, dout, sum);
            }
            let mean: f32 = along.iter().zip(shares).map(|(along, share)| along * share).sum();
            for (j, share) in shares.iter().enumerate() {
                let (key, sum) = (&self.keys[j * a..(j + 1) * a], &mut key_sums[j * a..(j + 1) * a]);
                let dscore = share * (along[j] - mean);
                bend(self.isa, self.inputs.query(self.first + i), key, self.inputs.v, dscore, query_sum, sum, dv);
            }
            if let Some(to) = dqueries.chunks_exact_mut(a).nth(i) {
                to.iter_mut().zip(&*query_sum).for_each(|(to, x)| *to = E::from_f32(*x));
            }
        }
        dkeys.iter_mut().zip(&*key_sums).for_each(|(to, x)| *to = E::from_f32(*x));
        dvalues.iter_mut().zip(&*value_sums).for_each(|(to, x)| *to = E::from_f32(*x));
    }
}

dispatch! { fn score<E>(query: &[E], key: &[E], v: &[f32]) -> f32 = score_body }
dispatch! { fn mean<E>(shares: &[f32], values: &[E], out: &mut [E]) = mean_body }
dispatch! { fn dot<E>(x: &[E], y: &[E]) -> f32 = dot_body }
dispatch! { fn add_scaled<E>(factor: f32, x: &[E], to: &mut [f32]) = add_scaled_body }
dispatch! {
    fn bend<E>(query: &[E], key: &[E], v: &[f32], dscore: f32, dquery: &mut [f32], dkey: &mut [f32], dv: &mut [f32]) = bend_body
}

/// # Safety
/// The instruction set must be there; all have the same length, or the query none.
#[inline(always)]
unsafe fn score_body<S: Simd, E: Element>(query: &[E], key: &[E], v: &[f32]) -> f32 {
    // SAFETY: c < key.len() = v.len(), and query.len() where it is not empty.
    unsafe {
        let mut sum = S::splat(0.0);
        for c in (0..key.len()).step_by(S::LANES) {
            sum = S::mul_add(read::<S, f32>(v, c), tanh::<S>(both::<S, E>(query, key, c)), sum);
        }
        S::sum(sum)
    }
}

/// # Safety
/// As for `score_body`.
#[inline(always)]
unsafe fn both<S: Simd, E: Element>(query: &[E], key: &[E], c: usize) -> S::V {
    // SAFETY: as above.
    unsafe {
        let key = read::<S, E>(key, c);
        if query.is_empty() { key } else { S::add(read::<S, E>(query, c), key) }
    }
}

/// # Safety
/// The instruction set must be there; there is a row of values as long as `out` for each share.
#[inline(always)]
unsafe fn mean_body<S: Simd, E: Element>(shares: &[f32], values: &[E], out: &mut [E]) {
    let h = out.len();
    for c in (0..h).step_by(S::LANES) {
        // SAFETY: c < h.
        unsafe {
            let mut sum = S::splat(0.0);
            for (share, value) in shares.iter().zip(values.chunks_exact(h)) {
                sum = S::mul_add(S::splat(*share), read::<S, E>(value, c), sum);
            }
            write::<S, E>(out, c, sum);
        }
    }
}

/// # Safety
/// The instruction set must be there; both have the same length.
#[inline(always)]
unsafe fn dot_body<S: Simd, E: Element>(x: &[E], y: &[E]) -> f32 {
    // SAFETY: c < x.len() = y.len().
    unsafe {
        let mut sum = S::splat(0.0);
        for c in (0..x.len()).step_by(S::LANES) {
            sum = S::mul_add(read::<S, E>(x, c), read::<S, E>(y, c), sum);
        }
        S::sum(sum)
    }
}

/// # Safety
/// The instruction set must be there; both have the same length.
#[inline(always)]
unsafe fn add_scaled_body<S: Simd, E: Element>(factor: f32, x: &[E], to: &mut [f32]) {
    for c in (0..x.len()).step_by(S::LANES) {
        // SAFETY: c < x.len() = to.len().
        unsafe {
            let sum = S::mul_add(S::splat(factor), read::<S, E>(x, c), read::<S, f32>(to, c));
            write::<S, f32>(to, c, sum);
        }
    }
}

/// Adds a score's gradient to those of its query, its key and v.
///
/// # Safety
/// The instruction set must be there; all have the same length, or the query none.
#[inline(always)]
unsafe fn bend_body<S: Simd, E: Element>(
    query: &[E],
    key: &[E],
    v: &[f32],
    dscore: f32,
    dquery: &mut [f32],
    dkey: &mut [f32],
    dv: &mut [f32],
) {
    for c in (0..key.len()).step_by(S::LANES) {
        // SAFETY: c < key.len(), the length of all.
        unsafe {
            let dscore = S::splat(dscore);
            let bent = tanh::<S>(both::<S, E>(query, key, c));
            write::<S, f32>(dv, c, S::mul_add(dscore, bent, read::<S, f32>(dv, c)));
            let slope = S::sub(S::splat(1.0), S::mul(bent, bent));
            let dx = S::mul(S::mul(dscore, read::<S, f32>(v, c)), slope);
            write::<S, f32>(dquery, c, S::add(dx, read::<S, f32>(dquery, c)));
            write::<S, f32>(dkey, c, S::add(dx, read::<S, f32>(dkey, c)));
        }
    }
}
