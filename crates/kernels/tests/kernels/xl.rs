//! Transformer-XL's attention: finite differences check the reference, the reference checks every kernel set.

use crate::common::*;
use henson_kernels::cpu::attention::xl::{
    Gradients, Inputs, Relations, UNSEEN, Xl, backward, forward, probabilities, reference, sinusoid, sinusoids,
};
use henson_kernels::cpu::attention::{self, View, ViewMut};
use henson_kernels::cpu::dropout::{Dropout, RowId};
use henson_kernels::cpu::{Cpu, Element, Isa};

#[test]
fn reference_has_the_right_gradients() {
    let (n, m, d, first) = (4, 7, 3, 6);
    let mask: Vec<f64> = (0..n * m).map(|i| if i % 4 == 1 { 0.0 } else { 1.25 }).collect();
    let w = exact(&numbers::<f32>(9, n * d));
    let (places, of, segments) = ([3, 1, 5, 6], [0, 1, 1, 0], [0, 0, 1, 1, 2, 0, 1]);
    let (own_orders, orders) = ([1, 3, 2, 9], [0, 4, 0, 2, 7, UNSEEN, 1]);
    let whole =
        Relations { places: Some(&places), segments: Some([&of, &segments]), orders: Some([&own_orders, &orders]) };
    let (seen, segmented) =
        (Relations { segments: None, ..whole }, Relations { segments: whole.segments, ..Default::default() });
    let sizes = [n * d, m * d, m * d, d, d, d, (2 * m - 1) * d, 2 * d];
    let inputs: Vec<Vec<f64>> = (1..).zip(sizes).map(|(seed, n)| exact(&numbers::<f32>(seed, n))).collect();
    for (relations, mask) in [(whole, Some(&mask[..])), (seen, None), (segmented, None), (Relations::default(), None)] {
        let with = relations.segments.is_some();
        let of = |x: &[Vec<f64>]| reference::forward(&inputs_of(x, with, relations, d, first), mask).out;
        let x = inputs_of(&inputs, with, relations, d, first);
        let all = reference::backward(&x, &reference::forward(&x, mask), mask, &w);
        let [u, v, z] = all.biases;
        let mut gradients = vec![all.q, all.k, all.v, u, v, z, all.positions, all.segments];
        gradients[7].resize(2 * d, 0.0);
        check_gradients("XL attention", &inputs, &gradients, |x| weighted(&of(x), &w));
    }
}

fn inputs_of<'a>(
    x: &'a [Vec<f64>],
    segments: bool,
    relations: Relations<'a>,
    d: usize,
    first: usize,
) -> reference::Inputs<'a> {
    let biases = [&x[3][..], &x[4], &x[5]];
    let segments = segments.then_some(&x[7][..]);
    reference::Inputs {
        q: &x[0],
        k: &x[1],
        v: &x[2],
        d,
        biases,
        positions: &x[6],
        first,
        segments,
        relations,
        scale: 0.6,
    }
}

/// What a token of a query, or of a key, is.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// As many keys as queries, or more in front.
    Plain,
    /// With segments.
    Segments,
    /// With segments, in the order of a permutation.
    Permuted,
    /// The same, and the last sixth of a sequence's rows are a second stream: they stand where others do, and nobody sees them.
    Streams,
}

struct Case<'a> {
    /// Of queries, and of keys.
    lengths: &'a [(usize, usize)],
    attention: Xl,
    kind: Kind,
    p: f32,
}

/// For all queries or keys of a batch.
#[derive(Default)]
struct Numbers {
    places: Vec<u32>,
    segments: [Vec<u32>; 2],
    orders: [Vec<u32>; 2],
}

impl Numbers {
    fn new(case: &Case<'_>) -> Self {
        let mut all = Self::default();
        for (i, &(n, m)) in case.lengths.iter().enumerate() {
            let before = m - n;
            let second = if case.kind == Kind::Streams { n / 6 } else { 0 };
            let content = n - second;
            // 7 is prime to all lengths that stand here, so these are permutations.
            let order = |j: usize| (j * 7 + i) % content.max(1);
            for j in 0..m {
                all.segments[1].push(if j < before { 0 } else { ((j - before) * 3 / n) as u32 });
                let row = j.saturating_sub(before);
                all.orders[1].push(match row {
                    _ if j < before => 0,
                    _ if row >= content => UNSEEN,
                    // Every query sees the first key, and a third of the others.
                    _ if row == 0 || row % 3 == 1 => 0,
                    _ => 1 + order(row) as u32,
                });
            }
            for row in 0..n {
                let place = if row < content { row } else { (row - content) * 5 % content };
                all.places.push((before + place) as u32);
                all.segments[0].push((place * 3 / n) as u32);
                all.orders[0].push(1 + order(place) as u32);
            }
        }
        all
    }

    fn relations(&self, kind: Kind) -> Relations<'_> {
        Relations {
            places: (kind == Kind::Streams).then_some(&self.places[..]),
            segments: (kind != Kind::Plain).then_some([&self.segments[0][..], &self.segments[1][..]]),
            orders: matches!(kind, Kind::Permuted | Kind::Streams)
                .then_some([&self.orders[0][..], &self.orders[1][..]]),
        }
    }
}

fn offsets(lengths: impl Iterator<Item = usize>) -> Vec<u32> {
    let mut all = vec![0];
    lengths.for_each(|length| all.push(all[all.len() - 1] + length as u32));
    all
}

struct Results<E> {
    out: Vec<E>,
    dquery: Vec<E>,
    /// Side by side.
    dkey_value: Vec<E>,
    dpositions: Vec<E>,
    /// 3×H, then 2×H.
    dvectors: Vec<f32>,
    maps: Vec<f32>,
}

/// Numbers of queries, of keys and values side by side, of positions, of biases and segments, and of the output's gradient.
struct Data<E> {
    query: Vec<E>,
    key_value: Vec<E>,
    positions: Vec<E>,
    vectors: Vec<f32>,
    dout: Vec<E>,
}

fn longest(case: &Case<'_>) -> usize {
    case.lengths.iter().map(|l| l.1).max().unwrap_or(0)
}

fn run<E: Element>(cpu: &Cpu, case: &Case<'_>, data: &Data<E>, sequences: &[u32]) -> Results<E> {
    let Case { lengths, attention, kind, p } = case;
    let h = attention.heads * attention.head_size;
    let (query_offsets, key_offsets) = (offsets(lengths.iter().map(|l| l.0)), offsets(lengths.iter().map(|l| l.1)));
    let (tq, tk) = (*query_offsets.last().unwrap() as usize, *key_offsets.last().unwrap() as usize);
    let dropout = Dropout::new(*p, 3, 4, 5).map(|dropout| (dropout, sequences));
    let numbers = Numbers::new(case);
    let [key, value] = View::split(&data.key_value, [h, h]);
    let query = View::new(&data.query, h);
    let (query_offsets, key_offsets) = (&query_offsets[..], &key_offsets[..]);
    let (biases, segments) = data.vectors.split_at(3 * h);
    let inputs = Inputs {
        content: attention::Inputs { query, key, value, query_offsets, key_offsets, bias: &[] },
        biases,
        positions: View::new(&data.positions, h),
        first: longest(case) + 2,
        segments: (*kind != Kind::Plain).then_some(segments),
        relations: numbers.relations(*kind),
    };
    let (mut out, mut log_sums) = (poisoned::<E>(tq * h), vec![f32::NAN; attention.heads * tq]);
    forward(cpu, attention, &inputs, dropout, &mut out, &mut log_sums);
    let mut maps = vec![f32::NAN; attention.content().probabilities(query_offsets, key_offsets)];
    probabilities(cpu, attention, &inputs, &mut maps);
    let (mut dquery, mut dkey_value) = (poisoned::<E>(tq * h), poisoned::<E>(tk * 2 * h));
    let mut dpositions = poisoned::<E>(data.positions.len());
    let mut dvectors = vec![0.5; 5 * h];
    let [key, value] = ViewMut::split(&mut dkey_value, [h, h]);
    let (query, positions) = (ViewMut::new(&mut dquery, h), ViewMut::new(&mut dpositions, h));
    let (biases, segments) = dvectors.split_at_mut(3 * h);
    let segments = (*kind != Kind::Plain).then_some(segments);
    let to = Gradients { query, key, value, positions, biases, segments };
    backward(cpu, attention, &inputs, dropout, &log_sums, &data.dout, to);
    Results { out, dquery, dkey_value, dpositions, dvectors, maps }
}

fn data<E: Element>(case: &Case<'_>, of: impl Fn(u64, usize) -> Vec<E>) -> Data<E> {
    let h = case.attention.heads * case.attention.head_size;
    Data {
        query: of(1, h),
        key_value: of(2, 2 * h),
        positions: numbers(7, (2 * longest(case) + 5) * h),
        vectors: numbers(8, 5 * h),
        dout: of(3, h),
    }
}

/// A head's columns of some rows, without gaps.
fn columns<E: Element>(x: &[E], rows: std::ops::Range<usize>, stride: usize, first: usize, d: usize) -> Vec<f64> {
    rows.flat_map(|row| exact(&x[row * stride + first..row * stride + first + d])).collect()
}

fn add(to: &mut [f64], from: &[f64], first_row: usize, stride: usize, first: usize, d: usize) {
    for (i, x) in from.iter().enumerate() {
        to[(first_row + i / d) * stride + first + i % d] += x;
    }
}

fn check<E: Element>(cpu: &Cpu, case: &Case<'_>) {
    let Case { lengths, attention, kind, p } = case;
    let Xl { heads, head_size: d, scale } = *attention;
    let (h, all) = (heads * d, Numbers::new(case));
    let (tq, tk) = (lengths.iter().map(|l| l.0).sum::<usize>(), lengths.iter().map(|l| l.1).sum::<usize>());
    let data = data::<E>(case, |seed, width| numbers(seed, if width == 2 * h { tk } else { tq } * width));
    let sequences: Vec<u32> = (0..lengths.len() as u32).map(|i| 100 - 7 * i).collect();
    let results = run(cpu, case, &data, &sequences);

    let dropout = Dropout::new(*p, 3, 4, 5);
    let (mut out, mut maps) = (vec![0.0; tq * h], vec![]);
    let (mut dquery, mut dkey_value) = (vec![0.0; tq * h], vec![0.0; tk * 2 * h]);
    let (mut dpositions, mut dvectors) = (vec![0.0; data.positions.len()], vec![0.5; 5 * h]);
    let (mut first_query, mut first_key) = (0, 0);
    for (i, &(n, m)) in lengths.iter().enumerate() {
        for head in 0..heads {
            let at = head * d;
            let q = columns(&data.query, first_query..first_query + n, h, at, d);
            let [k, v] = [0, 1].map(|part| columns(&data.key_value, first_key..first_key + m, 2 * h, part * h + at, d));
            let vector = |which: usize| exact(&data.vectors[which * h + at..which * h + at + d]);
            let (biases, segments) = ([vector(0), vector(1), vector(2)], [vector(3), vector(4)].concat());
            let positions = columns(&data.positions, 0..data.positions.len() / h, h, at, d);
            let x = reference::Inputs {
                q: &q,
                k: &k,
                v: &v,
                d,
                biases: biases.each_ref().map(|x| &x[..]),
                positions: &positions,
                first: longest(case) + 2,
                segments: (*kind != Kind::Plain).then_some(&segments[..]),
                relations: all.relations(*kind).of(first_query..first_query + n, first_key..first_key + m),
                scale: f64::from(scale),
            };
            let mask = dropout.map(|dropout| -> Vec<f64> {
                let kept = |j: usize| {
                    let row = RowId { sequence: sequences[i], position: (j / m) as u32 };
                    dropout.at_head(head).keeps(row, m, j % m)
                };
                (0..n * m).map(|j| if kept(j) { f64::from(dropout.scale()) } else { 0.0 }).collect()
            });
            let output = reference::forward(&x, mask.as_deref());
            let dout = columns(&data.dout, first_query..first_query + n, h, at, d);
            let gradients = reference::backward(&x, &output, mask.as_deref(), &dout);
            add(&mut out, &output.out, first_query, h, at, d);
            add(&mut dquery, &gradients.q, first_query, h, at, d);
            add(&mut dkey_value, &gradients.k, first_key, 2 * h, at, d);
            add(&mut dkey_value, &gradients.v, first_key, 2 * h, h + at, d);
            add(&mut dpositions, &gradients.positions, 0, h, at, d);
            for (which, gradient) in gradients.biases.iter().enumerate() {
                add(&mut dvectors, gradient, which, h, at, d);
            }
            add(&mut dvectors, &gradients.segments, 3, h, at, d);
            maps.extend(output.probabilities);
        }
        (first_query, first_key) = (first_query + n, first_key + m);
    }
    let what = format!("{lengths:?}, {attention:?}, {kind:?}, dropout {p}");
    assert_close(&what, cpu, &results.out, &out);
    assert_close(&format!("{what}: the queries' gradient"), cpu, &results.dquery, &dquery);
    let part = |x: &[f64], i: usize| -> Vec<f64> {
        x.chunks(2 * h).flat_map(|row| row[i * h..(i + 1) * h].to_vec()).collect()
    };
    let got = exact(&results.dkey_value);
    for (i, name) in ["key", "value"].iter().enumerate() {
        let off = error(&part(&got, i), &part(&dkey_value, i));
        assert!(off <= tolerance::<E>(), "{what} on {cpu:?}: the {name}s' gradient is off by {off:e}");
    }
    assert_close(&format!("{what}: the positions' gradient"), cpu, &results.dpositions, &dpositions);
    // Sums over all queries of numbers that nearly cancel: rounding of each counts beside the sum.
    let vectors = if E::IS_BF16 { 3.0 } else { 1.0 } * tolerance::<E>();
    for (which, name) in ["contents", "positions", "segments", "the same segment", "another segment"].iter().enumerate()
    {
        let range = which * h..(which + 1) * h;
        let off = error(&exact(&results.dvectors[range.clone()]), &dvectors[range]);
        assert!(off <= vectors, "{what} on {cpu:?}, bf16 {}: the gradient of {name} is off by {off:e}", E::IS_BF16);
    }
    assert!(error(&exact(&results.maps), &maps) <= tolerance::<E>(), "{what}: maps");
}

#[test]
fn kernels_match_the_reference() {
    /// Lengths of queries and keys, what is computed, dropout.
    type Row<'a> = (&'a [(usize, usize)], Xl, Kind, f32);
    let own = [(7, 7), (33, 33), (1, 1), (129, 129)];
    let cases: [Row<'_>; 9] = [
        (&[(1, 1)], Xl::new(1, 3), Kind::Plain, 0.0),
        (&own, Xl::new(3, 8), Kind::Plain, 0.1),
        (&own, Xl::new(2, 16), Kind::Segments, 0.0),
        (&own, Xl::new(2, 24), Kind::Permuted, 0.1),
        (&own, Xl::new(2, 8), Kind::Streams, 0.1),
        // Earlier tokens, more queries than a block has, and more sequences than tasks.
        (&[(7, 40), (33, 34), (1, 129)], Xl::new(2, 8), Kind::Plain, 0.1),
        (&[(33, 129), (7, 7)], Xl::new(2, 8), Kind::Segments, 0.0),
        (&[(300, 300), (5, 17)], Xl::new(1, 16), Kind::Streams, 0.1),
        (&[(3, 3), (9, 9), (1, 1), (2, 2), (5, 9), (8, 8), (4, 4)], Xl::new(17, 8), Kind::Permuted, 0.0),
    ];
    for (lengths, attention, kind, p) in cases {
        let case = Case { lengths, attention, kind, p };
        for_all!(check(&case));
    }
}

#[test]
fn without_positions_and_segments_it_is_plain_attention() {
    let cpu = Cpu::new(Isa::best(), 2).unwrap();
    let attention = Xl::new(2, 8);
    let content = attention.content();
    let qkv = numbers::<f32>(1, 40 * 48);
    let inputs = attention::Inputs::fused(&content, &qkv, &[0, 33, 40]);
    let (mut out, mut plain, mut sums) = (poisoned::<f32>(40 * 16), poisoned::<f32>(40 * 16), vec![0.0; 80]);
    attention::forward(&cpu, &content, &inputs, None, &mut plain, &mut sums);
    let (zeros, biases) = (vec![0.0; 65 * 16], vec![0.0; 48]);
    let positions = View::new(&zeros, 16);
    let relations = Relations::default();
    let inputs = Inputs { content: inputs, biases: &biases, positions, first: 32, segments: None, relations };
    forward(&cpu, &attention, &inputs, None, &mut out, &mut sums);
    assert_eq!(out, plain);
}

#[test]
fn what_is_hidden_changes_nothing() {
    let cpu = Cpu::new(Isa::best(), 2).unwrap();
    let case = Case { lengths: &[(40, 40)], attention: Xl::new(2, 8), kind: Kind::Permuted, p: 0.0 };
    let all = Numbers::new(&case);
    let relations = all.relations(case.kind);
    let mut data = data::<f32>(&case, |seed, width| numbers(seed, 40 * width));
    let before = run(&cpu, &case, &data, &[0]).out;
    let key = 5;
    data.key_value[key * 32..(key + 1) * 32].fill(1e3);
    let after = run(&cpu, &case, &data, &[0]).out;
    let rows = before.chunks(16).zip(after.chunks(16)).enumerate();
    let differ: Vec<usize> = rows.filter(|(_, (a, b))| a != b).map(|(i, _)| i).collect();
    let expected: Vec<usize> = (0..40).filter(|i| relations.sees(*i, key, 0)).collect();
    assert_eq!(differ, expected);
    assert!(expected.contains(&key) && expected.len() > 2 && expected.len() < 38, "{expected:?}");
}

#[test]
fn threads_order_and_company_do_not_change_a_bit() {
    let attention = Xl::new(2, 16);
    let (h, lengths) = (32, [(40, 40), (3, 3), (150, 150), (7, 7)]);
    let run_in = |threads, order: &[usize]| {
        let cpu = Cpu::new(Isa::best(), threads).unwrap();
        let own: Vec<(usize, usize)> = order.iter().map(|i| lengths[*i]).collect();
        let case = Case { lengths: &own, attention, kind: Kind::Segments, p: 0.1 };
        let data = data::<f32>(&case, |seed, width| {
            order.iter().flat_map(|i| numbers::<f32>(10 * seed + *i as u64, lengths[*i].0 * width)).collect()
        });
        let sequences: Vec<u32> = order.iter().map(|i| *i as u32).collect();
        let results = run(&cpu, &case, &data, &sequences);
        // The longest sequence's output and gradient, wherever it stands.
        let i = order.iter().position(|i| *i == 2).unwrap();
        let first = own[..i].iter().map(|l| l.0).sum::<usize>();
        let of = |x: &[f32], width: usize| x[first * width..(first + 150) * width].to_vec();
        let bits = |x: Vec<f32>| x.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        let parts = [of(&results.out, h), of(&results.dquery, h), of(&results.dkey_value, 2 * h)];
        (bits(parts.concat()), bits([results.dpositions, results.dvectors].concat()))
    };
    let one = run_in(1, &[0, 1, 2, 3]);
    assert_eq!(one, run_in(2, &[0, 1, 2, 3]));
    assert_eq!(one, run_in(3, &[0, 1, 2, 3]));
    assert_eq!(one.0, run_in(2, &[2, 0]).0);
}

#[test]
fn sinusoids_are_sines_then_cosines_from_the_furthest() {
    for cpu in &contexts() {
        let mut out = poisoned::<f32>(7 * 6);
        sinusoids(cpu, 4, 9, 6, &mut out);
        for (row, numbers) in out.chunks(6).enumerate() {
            let distance = 4 - row as i64;
            for t in 0..3 {
                let angle = distance as f64 * 10_000f64.powf(-2.0 * t as f64 / 6.0);
                assert!((f64::from(numbers[t]) - angle.sin()).abs() < 1e-6);
                assert!((f64::from(numbers[3 + t]) - angle.cos()).abs() < 1e-6);
                assert_eq!((numbers[t], numbers[3 + t]), sinusoid(distance, t, 6));
            }
        }
        let mut clamped = poisoned::<f32>(7 * 6);
        sinusoids(cpu, 4, 1, 6, &mut clamped);
        let rows: Vec<&[f32]> = out.chunks(6).collect();
        let expected: Vec<f32> = [3, 3, 3, 3, 4, 5, 5].iter().flat_map(|row| rows[*row].to_vec()).collect();
        assert_eq!(clamped, expected);
    }
}
