//! Disentangled attention: finite differences check the reference, the reference checks every kernel set.

use crate::common::*;
use henson_kernels::cpu::attention::disentangled::{
    Disentangled, Gradients, Inputs, backward, forward, probabilities, reference,
};
use henson_kernels::cpu::attention::{self, LogBuckets, View, ViewMut};
use henson_kernels::cpu::dropout::{Dropout, RowId};
use henson_kernels::cpu::{Cpu, Element, Isa};

/// Few exact buckets, so that short sequences have others, and distances beyond the last.
const SHORT: LogBuckets = LogBuckets { count: 8, max_distance: 24 };
const V3: LogBuckets = LogBuckets { count: 256, max_distance: 512 };

#[test]
fn reference_has_the_right_gradients() {
    let (s, d) = (7, 3);
    let mask: Vec<f64> = (0..s * s).map(|i| if i % 4 == 1 { 0.0 } else { 1.25 }).collect();
    let w = exact(&numbers::<f32>(9, s * d));
    for buckets in [LogBuckets { count: 4, max_distance: 6 }, LogBuckets { count: 0, max_distance: 3 }] {
        let rows = 6;
        let sizes = [s * d, s * d, s * d, rows * d, rows * d];
        let inputs: Vec<Vec<f64>> = (1..).zip(sizes).map(|(seed, n)| exact(&numbers::<f32>(seed, n))).collect();
        for (tables, mask) in [([true, true], Some(&mask[..])), ([true, false], None), ([false, true], None)] {
            let of = |x: &[Vec<f64>]| -> Vec<f64> { reference::forward(&of_tables(x, tables, d, buckets), mask).out };
            let x = of_tables(&inputs, tables, d, buckets);
            let mut gradients = reference::backward(&x, &reference::forward(&x, mask), mask, &w);
            for (i, there) in tables.iter().enumerate() {
                assert_eq!(gradients[3 + i].is_empty(), !there);
                gradients[3 + i].resize(rows * d, 0.0);
            }
            check_gradients("disentangled attention", &inputs, &gradients, |x| weighted(&of(x), &w));
        }
    }
}

fn of_tables<'a>(x: &'a [Vec<f64>], tables: [bool; 2], d: usize, buckets: LogBuckets) -> reference::Inputs<'a> {
    let [kr, qr] = [0, 1].map(|i| tables[i].then(|| &x[3 + i][..]));
    reference::Inputs { q: &x[0], k: &x[1], v: &x[2], kr, qr, d, buckets, scale: 0.6 }
}

struct Case<'a> {
    lengths: &'a [usize],
    attention: Disentangled,
    /// P.
    positions: usize,
    tables: [bool; 2],
    p: f32,
}

struct Results<E> {
    out: Vec<E>,
    /// Fused: T×3H.
    dqkv: Vec<E>,
    /// Fused: P×2H, of the queries' side first, as projections lie.
    dpositions: Vec<E>,
    maps: Vec<f32>,
}

fn offsets(lengths: &[usize]) -> Vec<u32> {
    let mut all = vec![0];
    lengths.iter().for_each(|length| all.push(all[all.len() - 1] + *length as u32));
    all
}

fn run<E: Element>(cpu: &Cpu, case: &Case<'_>, qkv: &[E], positions: &[E], dout: &[E], numbers: &[u32]) -> Results<E> {
    let Case { lengths, attention, positions: rows, tables, p } = case;
    let (offsets, h) = (offsets(lengths), attention.heads * attention.head_size);
    let (t, content) = (*offsets.last().unwrap() as usize, attention.content());
    let dropout = Dropout::new(*p, 3, 4, 5).map(|dropout| (dropout, numbers));
    let [query, key] = View::split(positions, [h, h]);
    let inputs = Inputs {
        content: attention::Inputs::fused(&content, qkv, &offsets),
        position_key: tables[0].then_some(key),
        position_query: tables[1].then_some(query),
    };
    let (mut out, mut log_sums) = (poisoned::<E>(t * h), vec![f32::NAN; attention.heads * t]);
    forward(cpu, attention, &inputs, dropout, &mut out, &mut log_sums);
    let mut maps = vec![f32::NAN; content.probabilities(&offsets, &offsets)];
    probabilities(cpu, attention, &inputs, &mut maps);
    let (mut dqkv, mut dpositions) = (poisoned::<E>(t * 3 * h), poisoned::<E>(rows * 2 * h));
    let [query, key, value] = ViewMut::split(&mut dqkv, [h, h, h]);
    let [position_query, position_key] = ViewMut::split(&mut dpositions, [h, h]);
    let position_key = tables[0].then_some(position_key);
    let position_query = tables[1].then_some(position_query);
    let gradients = Gradients { query, key, value, position_key, position_query };
    backward(cpu, attention, &inputs, dropout, &log_sums, dout, gradients);
    Results { out, dqkv, dpositions, maps }
}

/// A head's columns of some rows, without gaps; `first` is the first of them in a row.
fn columns<E: Element>(x: &[E], rows: std::ops::Range<usize>, stride: usize, first: usize, d: usize) -> Vec<f64> {
    rows.flat_map(|row| exact(&x[row * stride + first..row * stride + first + d])).collect()
}

fn add(to: &mut [f64], from: &[f64], first_row: usize, stride: usize, first: usize, d: usize) {
    for (i, x) in from.iter().enumerate() {
        to[(first_row + i / d) * stride + first + i % d] += x;
    }
}

fn check<E: Element>(cpu: &Cpu, case: &Case<'_>) {
    let Case { lengths, attention, positions: rows, tables, p } = case;
    let Disentangled { heads, head_size: d, buckets, scale } = *attention;
    let (offsets, h) = (offsets(lengths), heads * d);
    let t = *offsets.last().unwrap() as usize;
    let (qkv, positions) = (numbers::<E>(1, t * 3 * h), numbers::<E>(2, rows * 2 * h));
    let dout = numbers::<E>(3, t * h);
    let sequences: Vec<u32> = (0..lengths.len() as u32).map(|i| 100 - 7 * i).collect();
    let results = run(cpu, case, &qkv, &positions, &dout, &sequences);

    let dropout = Dropout::new(*p, 3, 4, 5);
    let (mut out, mut maps) = (vec![0.0; t * h], vec![]);
    let (mut dqkv, mut dpositions) = (vec![0.0; t * 3 * h], vec![0.0; rows * 2 * h]);
    for (i, &s) in lengths.iter().enumerate() {
        let first = offsets[i] as usize;
        for head in 0..heads {
            let own = |part: usize| columns(&qkv, first..first + s, 3 * h, part * h + head * d, d);
            let table = |part: usize| columns(&positions, 0..*rows, 2 * h, part * h + head * d, d);
            let (q, k, v, qr, kr) = (own(0), own(1), own(2), table(0), table(1));
            let (kr, qr) = (tables[0].then_some(&kr[..]), tables[1].then_some(&qr[..]));
            let x = reference::Inputs { q: &q, k: &k, v: &v, kr, qr, d, buckets, scale: f64::from(scale) };
            let mask = dropout.map(|dropout| -> Vec<f64> {
                let kept = |j: usize| {
                    let row = RowId { sequence: sequences[i], position: (j / s) as u32 };
                    dropout.at_head(head).keeps(row, s, j % s)
                };
                (0..s * s).map(|j| if kept(j) { f64::from(dropout.scale()) } else { 0.0 }).collect()
            });
            let output = reference::forward(&x, mask.as_deref());
            let dout = columns(&dout, first..first + s, h, head * d, d);
            let [dq, dk, dv, dkr, dqr] = reference::backward(&x, &output, mask.as_deref(), &dout);
            add(&mut out, &output.out, first, h, head * d, d);
            for (part, gradient) in [dq, dk, dv].iter().enumerate() {
                add(&mut dqkv, gradient, first, 3 * h, part * h + head * d, d);
            }
            for (part, gradient) in [dqr, dkr].iter().enumerate() {
                add(&mut dpositions, gradient, 0, 2 * h, part * h + head * d, d);
            }
            maps.extend(output.probabilities);
        }
    }
    let what = format!("{lengths:?}, {attention:?}, tables {tables:?} of {rows}, dropout {p}");
    assert_close(&what, cpu, &results.out, &out);
    let part = |x: &[f64], parts: usize, i: usize| -> Vec<f64> {
        x.chunks(parts * h).flat_map(|row| row[i * h..(i + 1) * h].to_vec()).collect()
    };
    let got = exact(&results.dqkv);
    for (i, name) in ["query", "key", "value"].iter().enumerate() {
        let off = error(&part(&got, 3, i), &part(&dqkv, 3, i));
        assert!(off <= tolerance::<E>(), "{what} on {cpu:?}: the {name}'s gradient is off by {off:e}");
    }
    let got = exact(&results.dpositions);
    for (i, name, there) in [(0, "query", tables[1]), (1, "key", tables[0])] {
        let got = part(&got, 2, i);
        if there {
            let off = error(&got, &part(&dpositions, 2, i));
            assert!(off <= tolerance::<E>(), "{what} on {cpu:?}: the position {name}'s gradient is off by {off:e}");
        } else {
            assert!(got.iter().all(|x| x.is_nan()), "{what}: an absent table has a gradient");
        }
    }
    assert!(error(&exact(&results.maps), &maps) <= tolerance::<E>(), "{what}: maps");
}

#[test]
fn kernels_match_the_reference() {
    let both = [true, true];
    let of = |heads, d, buckets, tables: [bool; 2]| {
        Disentangled::new(heads, d, buckets, tables.iter().filter(|there| **there).count())
    };
    let linear = LogBuckets { count: 0, max_distance: 20 };
    /// Lengths, what is computed, rows of the tables, which tables there are, dropout.
    type Row<'a> = (&'a [usize], Disentangled, usize, [bool; 2], f32);
    let cases: [Row<'_>; 9] = [
        (&[1], of(1, 3, SHORT, both), 16, both, 0.0),
        (&[7, 33, 1, 129], of(3, 8, SHORT, both), 16, both, 0.1),
        (&[129, 2, 40], of(2, 24, SHORT, [true, false]), 16, [true, false], 0.1),
        (&[33, 1, 129], of(2, 16, SHORT, [false, true]), 16, [false, true], 0.0),
        // Beyond 256 tokens, where even v3's buckets hold several distances; and beyond the last of them.
        (&[300, 5], of(1, 16, V3, both), 512, both, 0.1),
        (&[530], of(1, 8, V3, both), 512, both, 0.0),
        // The rows in the middle that short sequences need.
        (&[17, 3], of(2, 64, V3, both), V3.rows_for(17, 512), both, 0.1),
        (&[33, 7], of(2, 8, linear, both), 40, both, 0.1),
        // Without positions it is plain attention; more sequences than tasks.
        (&[3, 9, 1, 2, 5, 8, 4], of(17, 8, SHORT, both), 16, both, 0.0),
    ];
    for (lengths, attention, positions, tables, p) in cases {
        let case = Case { lengths, attention, positions, tables, p };
        for_all!(check(&case));
    }
}

#[test]
fn without_positions_it_is_plain_attention() {
    let cpu = Cpu::new(Isa::best(), 2).unwrap();
    let attention = Disentangled::new(2, 8, SHORT, 0);
    let content = attention.content();
    assert_eq!(content, attention::Attention::new(2, 8));
    let qkv = numbers::<f32>(1, 40 * 48);
    let inputs = attention::Inputs::fused(&content, &qkv, &[0, 33, 40]);
    let (mut out, mut plain, mut sums) = (poisoned::<f32>(40 * 16), poisoned::<f32>(40 * 16), vec![0.0; 80]);
    attention::forward(&cpu, &content, &inputs, None, &mut plain, &mut sums);
    let inputs = Inputs { content: inputs, position_key: None, position_query: None };
    forward(&cpu, &attention, &inputs, None, &mut out, &mut sums);
    assert_eq!(out, plain);
}

#[test]
fn threads_order_and_company_do_not_change_a_bit() {
    let attention = Disentangled::new(2, 16, SHORT, 2);
    let (h, lengths) = (32, [40, 3, 150, 7]);
    let positions = numbers::<f32>(9, 16 * 2 * h);
    let run_in = |threads, order: &[usize]| {
        let cpu = Cpu::new(Isa::best(), threads).unwrap();
        let parts = |width: usize| -> Vec<f32> {
            order.iter().flat_map(|i| numbers::<f32>(*i as u64, lengths[*i] * width)).collect()
        };
        let (qkv, dout) = (parts(3 * h), parts(h));
        let own: Vec<usize> = order.iter().map(|i| lengths[*i]).collect();
        let sequences: Vec<u32> = order.iter().map(|i| *i as u32).collect();
        let case = Case { lengths: &own, attention, positions: 16, tables: [true, true], p: 0.1 };
        let results = run(&cpu, &case, &qkv, &positions, &dout, &sequences);
        // The longest sequence's output and gradient, wherever it stands.
        let i = order.iter().position(|i| *i == 2).unwrap();
        let offsets = offsets(&own);
        let rows = offsets[i] as usize..offsets[i + 1] as usize;
        let of = |x: &[f32], width: usize| x[rows.start * width..rows.end * width].to_vec();
        let bits = |x: Vec<f32>| x.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        (bits([of(&results.out, h), of(&results.dqkv, 3 * h)].concat()), bits(results.dpositions))
    };
    let one = run_in(1, &[0, 1, 2, 3]);
    assert_eq!(one, run_in(2, &[0, 1, 2, 3]));
    assert_eq!(one, run_in(3, &[0, 1, 2, 3]));
    assert_eq!(one.0, run_in(2, &[2, 0]).0);
}

/// Σ bucket·(i mod 97 + 1) over distances i below 1,400, and the number of buckets, as `transformers` 5.x computes them in f32.
#[test]
fn buckets_are_those_of_transformers() {
    let cases = [
        (256, 512, 349, 17_609_257),
        (4, 24, 6, 324_853),
        (8, 24, 16, 868_718),
        (32, 64, 66, 3_708_719),
        (6, 40, 9, 508_870),
        (256, 1024, 276, 14_518_446),
        (128, 512, 159, 8_697_753),
        (64, 512, 76, 4_319_953),
        (2, 10, 2, 67_444),
        (7, 50, 9, 490_304),
        (256, 300, 485, 23_454_840),
    ];
    for (count, max_distance, different, expected) in cases {
        let buckets = LogBuckets { count, max_distance };
        let all: Vec<i64> = (0..1400).map(|i| buckets.of(i)).collect();
        let sum: i64 = all.iter().zip(0..).map(|(bucket, i)| bucket * (i % 97 + 1)).sum();
        assert_eq!(sum, expected, "{buckets:?}");
        assert_eq!(1 + all.windows(2).filter(|w| w[0] != w[1]).count(), different, "{buckets:?}");
        assert!(all.windows(2).all(|w| w[0] <= w[1]) && (0..1400).all(|i| buckets.of(-i) == -all[i as usize]));
    }
    assert_eq!([128, 129, 130, 511].map(|i| V3.of(i)), [128, 129, 130, 255]);
    assert_eq!([0, 511, -511, -600].map(|i| V3.row(i, 512)), [256, 511, 1, 0]);
    assert_eq!([1, 16, 17, 128, 129, 512].map(|n| V3.rows_for(n, 512)), [32, 32, 64, 256, 512, 512]);
}
