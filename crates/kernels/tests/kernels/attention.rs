//! Attention over flat tokens: finite differences check the reference, the reference checks every kernel set.

use crate::common::*;
use henson_kernels::cpu::attention::{
    Attention, Bias, Buckets, Gradients, Inputs, View, ViewMut, Window, backward, forward, probabilities, reference,
};
use henson_kernels::cpu::dropout::{Dropout, RowId};
use henson_kernels::cpu::{Cpu, Element, Isa};

#[test]
fn reference_has_the_right_gradients() {
    let d = 3;
    for (n, m) in [(5, 5), (2, 6), (4, 1)] {
        let sizes = [n * d, m * d, m * d, n * m];
        let mut inputs: Vec<Vec<f64>> = (1..).zip(sizes).map(|(seed, n)| exact(&numbers::<f32>(seed, n))).collect();
        let w = exact(&numbers::<f32>(9, n * d));
        let mask: Vec<f64> = (0..n * m).map(|i| if i % 4 == 1 { 0.0 } else { 1.25 }).collect();
        for (hidden, mask) in [(false, None), (true, None), (false, Some(&mask[..])), (true, Some(&mask[..]))] {
            if hidden {
                // A minus infinity stays one when a finite difference is added to it.
                (0..n * m).filter(|i| i % 5 == 2).for_each(|i| inputs[3][i] = f64::NEG_INFINITY);
            }
            let run = |x: &[Vec<f64>]| reference::forward(&x[0], &x[1], &x[2], d, 0.6, Some(&x[3]), mask);
            let gradients = reference::backward(&inputs[0], &inputs[1], &inputs[2], d, 0.6, &run(&inputs), mask, &w);
            check_gradients("attention", &inputs, &gradients, |x| weighted(&run(x).out, &w));
        }
    }
}

/// How query, key and value lie in memory.
#[derive(Clone, Copy, Debug)]
enum Storage {
    /// Side by side, where there are as many keys as queries.
    Fused,
    /// Queries alone, keys and values side by side.
    Cross,
    /// Three matrices.
    Apart,
}

struct Case<'a> {
    /// (queries, keys) of each sequence.
    lengths: &'a [(usize, usize)],
    attention: Attention,
    storage: Storage,
    p: f32,
}

const T5: Buckets = Buckets { count: 32, max_distance: 128, bidirectional: true };

/// What stands in a fused matrix: the columns of each of its parts, row by row.
fn join<E: Copy>(rows: usize, parts: &[(&[E], usize)]) -> Vec<E> {
    (0..rows)
        .flat_map(|r| parts.iter().flat_map(move |(x, width)| x[r * width..(r + 1) * width].iter().copied()))
        .collect()
}

/// The columns of one part of it.
fn part<E: Copy>(x: &[E], stride: usize, offset: usize, width: usize) -> Vec<E> {
    x.chunks(stride.max(1)).flat_map(|row| row[offset..offset + width].iter().copied()).collect()
}

fn offsets(lengths: impl Iterator<Item = usize>) -> Vec<u32> {
    let mut all = vec![0];
    for length in lengths {
        all.push(all[all.len() - 1] + length as u32);
    }
    all
}

/// What a query at key position `position` sees of the key at `key`: the definition, spelled out.
fn added(attention: &Attention, bias: &[f32], head: usize, position: i64, key: i64) -> f64 {
    let Window { left, right } = attention.window;
    let hidden = (left != u32::MAX && key < position - i64::from(left))
        || (right != u32::MAX && key > position + i64::from(right));
    match attention.bias {
        _ if hidden => f64::NEG_INFINITY,
        Bias::None => 0.0,
        Bias::Relative(buckets) => f64::from(bias[buckets.of(key - position) * attention.heads + head]),
        Bias::Slopes => -f64::from(bias[head]) * (key - position).abs() as f64,
    }
}

struct Results<E> {
    out: Vec<E>,
    /// Those of queries, keys and values, each without gaps.
    gradients: [Vec<E>; 3],
    dbias: Vec<f32>,
    maps: Vec<f32>,
}

fn run<E: Element>(cpu: &Cpu, case: &Case<'_>, [q, k, v]: [&[E]; 3], bias: &[f32], dout: &[E]) -> Results<E> {
    let Case { lengths, attention, storage, p } = case;
    let (query_offsets, key_offsets) = (offsets(lengths.iter().map(|l| l.0)), offsets(lengths.iter().map(|l| l.1)));
    let (tq, tk) = (*query_offsets.last().unwrap() as usize, *key_offsets.last().unwrap() as usize);
    let [hq, hk, _] = attention.fused_widths();
    let sequences: Vec<u32> = (0..lengths.len() as u32).map(|i| 100 - 7 * i).collect();
    let dropout = Dropout::new(*p, 3, 4, 5).map(|dropout| (dropout, &sequences[..]));
    let (fused, pair) = match storage {
        Storage::Fused => (join(tq, &[(q, hq), (k, hk), (v, hk)]), vec![]),
        Storage::Cross => (vec![], join(tk, &[(k, hk), (v, hk)])),
        Storage::Apart => (vec![], vec![]),
    };
    let [query, key, value] = match storage {
        Storage::Fused => View::split(&fused, [hq, hk, hk]),
        Storage::Cross => {
            let [key, value] = View::split(&pair, [hk, hk]);
            [View::new(q, hq), key, value]
        }
        Storage::Apart => [View::new(q, hq), View::new(k, hk), View::new(v, hk)],
    };
    let (query_offsets, key_offsets) = (&query_offsets[..], &key_offsets[..]);
    let inputs = Inputs { query, key, value, query_offsets, key_offsets, bias };
    let (mut out, mut log_sums) = (poisoned::<E>(tq * hq), vec![f32::NAN; attention.heads * tq]);
    forward(cpu, attention, &inputs, dropout, &mut out, &mut log_sums);
    let mut maps = vec![f32::NAN; attention.probabilities(query_offsets, key_offsets)];
    probabilities(cpu, attention, &inputs, &mut maps);
    let mut dbias = vec![0.5; if matches!(attention.bias, Bias::Relative(_)) { bias.len() } else { 0 }];
    let table = (!dbias.is_empty()).then_some(&mut dbias[..]);
    let (mut dq, mut dk, mut dv) = (poisoned::<E>(tq * hq), poisoned::<E>(tk * hk), poisoned::<E>(tk * hk));
    let mut dfused = poisoned::<E>(match storage {
        Storage::Fused => tq * (hq + 2 * hk),
        Storage::Cross => tk * 2 * hk,
        Storage::Apart => 0,
    });
    let [query, key, value] = match storage {
        Storage::Fused => ViewMut::split(&mut dfused, [hq, hk, hk]),
        Storage::Cross => {
            let [key, value] = ViewMut::split(&mut dfused, [hk, hk]);
            [ViewMut::new(&mut dq, hq), key, value]
        }
        Storage::Apart => [ViewMut::new(&mut dq, hq), ViewMut::new(&mut dk, hk), ViewMut::new(&mut dv, hk)],
    };
    let gradients = Gradients { query, key, value, bias: table };
    backward(cpu, attention, &inputs, dropout, &log_sums, dout, gradients);
    let gradients = match storage {
        Storage::Fused => {
            let stride = hq + 2 * hk;
            [part(&dfused, stride, 0, hq), part(&dfused, stride, hq, hk), part(&dfused, stride, hq + hk, hk)]
        }
        Storage::Cross => [dq, part(&dfused, 2 * hk, 0, hk), part(&dfused, 2 * hk, hk, hk)],
        Storage::Apart => [dq, dk, dv],
    };
    Results { out, gradients, dbias, maps }
}

fn check<E: Element>(cpu: &Cpu, case: &Case<'_>) {
    let Case { lengths, attention, storage, p } = case;
    let (query_offsets, key_offsets) = (offsets(lengths.iter().map(|l| l.0)), offsets(lengths.iter().map(|l| l.1)));
    let (tq, tk) = (*query_offsets.last().unwrap() as usize, *key_offsets.last().unwrap() as usize);
    let ([hq, hk, _], d) = (attention.fused_widths(), attention.head_size);
    let (q, k, v) = (numbers::<E>(1, tq * hq), numbers::<E>(2, tk * hk), numbers::<E>(3, tk * hk));
    let (dout, bias) = (numbers::<E>(4, tq * hq), numbers::<f32>(5, attention.bias_size()));
    let results = run(cpu, case, [&q, &k, &v], &bias, &dout);

    let dropout = Dropout::new(*p, 3, 4, 5);
    let (mut out, mut maps) = (vec![0.0; tq * hq], vec![]);
    let mut gradients = [vec![0.0; tq * hq], vec![0.0; tk * hk], vec![0.0; tk * hk]];
    let mut dbias = vec![0.5; results.dbias.len()];
    for (i, &(n, m)) in lengths.iter().enumerate() {
        for head in 0..attention.heads {
            let key_head = head * attention.key_heads / attention.heads;
            let at =
                |row: usize, offsets: &[u32], width: usize, head: usize| (offsets[i] as usize + row) * width + head * d;
            let query_at = |j: usize| at(j / d, &query_offsets, hq, head) + j % d;
            let key_at = |j: usize| at(j / d, &key_offsets, hk, key_head) + j % d;
            let exactly = |x: &[E], at: &dyn Fn(usize) -> usize, len: usize| -> Vec<f64> {
                (0..len).map(|j| f64::from(x[at(j)].to_f32())).collect()
            };
            let (q, dout) = (exactly(&q, &query_at, n * d), exactly(&dout, &query_at, n * d));
            let (k, v) = (exactly(&k, &key_at, m * d), exactly(&v, &key_at, m * d));
            let position = |query: usize| query as i64 + m as i64 - n as i64;
            let added: Vec<f64> =
                (0..n * m).map(|j| added(attention, &bias, head, position(j / m), (j % m) as i64)).collect();
            let mask = dropout.map(|dropout| -> Vec<f64> {
                let kept = |j: usize| {
                    let row = RowId { sequence: 100 - 7 * i as u32, position: (j / m) as u32 };
                    // Each head draws at a site of its own.
                    dropout.at_head(head).keeps(row, m, j % m)
                };
                (0..n * m).map(|j| if kept(j) { f64::from(dropout.scale()) } else { 0.0 }).collect()
            });
            let scale = f64::from(attention.scale);
            let output = reference::forward(&q, &k, &v, d, scale, Some(&added), mask.as_deref());
            let [dq, dk, dv, dadded] = reference::backward(&q, &k, &v, d, scale, &output, mask.as_deref(), &dout);
            for j in 0..n * d {
                out[query_at(j)] = output.out[j];
                gradients[0][query_at(j)] = dq[j];
            }
            for j in 0..m * d {
                gradients[1][key_at(j)] += dk[j];
                gradients[2][key_at(j)] += dv[j];
            }
            if let Bias::Relative(buckets) = attention.bias {
                for (j, dadded) in dadded.iter().enumerate() {
                    dbias[buckets.of((j % m) as i64 - position(j / m)) * attention.heads + head] += dadded;
                }
            }
            maps.extend(output.probabilities);
        }
    }
    let what = format!("{lengths:?}, {attention:?}, {storage:?}, dropout {p}");
    assert_close(&what, cpu, &results.out, &out);
    for (name, (got, expected)) in ["query", "key", "value"].iter().zip(results.gradients.iter().zip(&gradients)) {
        assert_close(&format!("{what}: {name}'s gradient"), cpu, got, expected);
    }
    assert!(error(&exact(&results.maps), &maps) <= tolerance::<E>(), "{what}: maps");
    let off = error(&exact(&results.dbias), &dbias);
    assert!(off <= tolerance::<E>(), "{what} on {cpu:?}: the bias' gradient is off by {off:e}");
}

fn self_attention(lengths: &[usize]) -> Vec<(usize, usize)> {
    lengths.iter().map(|n| (*n, *n)).collect()
}

#[test]
fn kernels_match_the_reference() {
    let plain = Attention::new;
    let causal = |heads, d| Attention { window: Window::CAUSAL, ..plain(heads, d) };
    let some = self_attention(&[7, 33, 1, 129]);
    let cases = [
        (self_attention(&[1]), plain(1, 3), Storage::Fused, 0.0),
        (some.clone(), plain(3, 8), Storage::Fused, 0.0),
        (some.clone(), plain(2, 64), Storage::Fused, 0.1),
        (self_attention(&[129, 2]), causal(2, 24), Storage::Fused, 0.1),
        (self_attention(&[300]), plain(1, 16), Storage::Fused, 0.1),
        (self_attention(&[33, 300]), causal(1, 16), Storage::Fused, 0.0),
        // Queries and keys of very different numbers, none of one or the other among them.
        (vec![(1, 300), (129, 7), (33, 1), (0, 7), (5, 0)], plain(2, 16), Storage::Cross, 0.1),
        (vec![(1, 129), (7, 33), (33, 7), (5, 0)], causal(2, 16), Storage::Apart, 0.1),
        // Shared key heads.
        (some.clone(), Attention { key_heads: 2, ..plain(6, 16) }, Storage::Fused, 0.1),
        (some.clone(), Attention { key_heads: 1, ..causal(4, 8) }, Storage::Apart, 0.0),
        // T5: no scale, a bias, in both directions and to the left.
        (some.clone(), Attention { bias: Bias::Relative(T5), scale: 1.0, ..plain(3, 8) }, Storage::Fused, 0.1),
        (self_attention(&[300, 7]), Attention { bias: Bias::Relative(T5), ..plain(2, 16) }, Storage::Cross, 0.0),
        (
            vec![(129, 129), (3, 40), (1, 1)],
            Attention {
                bias: Bias::Relative(Buckets { bidirectional: false, ..T5 }),
                scale: 1.0,
                key_heads: 1,
                ..causal(2, 8)
            },
            Storage::Apart,
            0.1,
        ),
        (some.clone(), Attention { bias: Bias::Slopes, ..plain(4, 8) }, Storage::Fused, 0.1),
        (vec![(5, 33)], Attention { bias: Bias::Slopes, ..causal(2, 8) }, Storage::Cross, 0.0),
        // The largest heads.
        (self_attention(&[7, 33]), plain(1, 256), Storage::Fused, 0.0),
    ];
    for (lengths, attention, storage, p) in cases {
        let case = Case { lengths: &lengths, attention, storage, p };
        for_all!(check(&case));
    }
}

#[test]
fn windows_match_the_reference() {
    let lengths = self_attention(&[7, 33, 1, 129, 300]);
    for reach in [0, 1, 4, 20, 1000] {
        let attention = Attention { window: Window::local(reach), ..Attention::new(2, 16) };
        let case = Case { lengths: &lengths, attention, storage: Storage::Fused, p: 0.1 };
        for_all!(check(&case));
    }
    // One-sided, with a bias, with a cache's lengths; and keys that no query sees.
    let window = Window { left: 5, right: 2 };
    let bias = Bias::Relative(Buckets { count: 8, max_distance: 20, bidirectional: true });
    let attention = Attention { window, bias, key_heads: 1, ..Attention::new(2, 8) };
    let case = Case { lengths: &[(200, 200), (3, 150), (40, 9)], attention, storage: Storage::Cross, p: 0.1 };
    for_all!(check(&case));
}

/// What a query that stands at a key's position sees: the borders, key by key.
#[test]
fn windows_are_inclusive_and_end_with_the_last_key() {
    assert_eq!(Window::local(2).keys(5, 10, 10), 3..8);
    assert_eq!(Window::local(64).keys(100, 500, 500).len(), 129, "ModernBERT's `local_attention` of 128");
    assert_eq!(Window::CAUSAL.keys(4, 10, 10), 0..5);
    // Two new tokens after eight in a cache.
    assert_eq!(Window::CAUSAL.keys(0, 2, 10), 0..9);
    assert_eq!(Window::CAUSAL.keys(1, 2, 10), 0..10);
    assert_eq!(Window::CAUSAL.keys(0, 10, 2), 0..0, "before the first key");
    assert_eq!(Window::FULL.keys(0, 10, 2), 0..2);
    assert_eq!(Window { left: 3, right: 0 }.keys(0, 1, 10), 6..10);
}

/// T5's borders as `transformers` 5.22 computes them: the first distance of each bucket.
#[test]
fn buckets_are_those_of_transformers() {
    let one_sided = |buckets: Buckets| {
        let mut first = vec![0];
        for distance in 1..1000 {
            let bucket = buckets.of(-distance);
            if bucket == first.len() {
                first.push(distance);
            }
            assert_eq!(bucket, first.len() - 1, "distance {distance}");
        }
        first
    };
    assert_eq!(one_sided(T5), [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]);
    let decoder = Buckets { bidirectional: false, ..T5 };
    assert_eq!(one_sided(decoder)[16..], [16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]);
    for distance in 1..1000 {
        assert_eq!(T5.of(distance), T5.of(-distance) + 16);
        assert_eq!(decoder.of(distance), 0);
    }
}

#[test]
fn very_large_scores_stay_finite() {
    for cpu in &contexts() {
        let qkv: Vec<f32> = numbers::<f32>(1, 9 * 24).into_iter().map(|x| x * 1e3).collect();
        let attention = Attention::new(1, 8);
        let (mut out, mut log_sums) = (poisoned::<f32>(9 * 8), vec![0.0; 9]);
        forward(cpu, &attention, &Inputs::fused(&attention, &qkv, &[0, 9]), None, &mut out, &mut log_sums);
        assert!(out.iter().all(|x| x.is_finite()), "{cpu:?}");
    }
}

#[test]
fn threads_order_and_company_do_not_change_a_bit() {
    let buckets = Buckets { count: 8, max_distance: 20, bidirectional: true };
    let plain = Attention::new(2, 16);
    let window = Attention { window: Window::local(9), bias: Bias::Relative(buckets), key_heads: 1, ..plain };
    for attention in [plain, window] {
        let [hq, hk, _] = attention.fused_widths();
        let (width, h) = (hq + 2 * hk, hq);
        let dropout = Dropout::new(0.1, 1, 2, 3).unwrap();
        let bias = numbers::<f32>(7, attention.bias_size());
        let run = |threads, order: &[usize]| {
            let cpu = Cpu::new(Isa::best(), threads).unwrap();
            let lengths = [40, 3, 150];
            let parts: Vec<Vec<f32>> = (0..3).map(|i| numbers::<f32>(i as u64, lengths[i] * width)).collect();
            let qkv: Vec<f32> = order.iter().flat_map(|i| parts[*i].clone()).collect();
            let offsets = offsets(order.iter().map(|i| lengths[*i]));
            let numbers: Vec<u32> = order.iter().map(|i| *i as u32).collect();
            let t = *offsets.last().unwrap() as usize;
            let inputs = Inputs { bias: &bias, ..Inputs::fused(&attention, &qkv, &offsets) };
            let (mut out, mut log_sums) = (vec![0.0; t * h], vec![0.0; attention.heads * t]);
            let (mut dqkv, mut dbias) = (vec![0.0; t * width], vec![0.0; bias.len()]);
            forward(&cpu, &attention, &inputs, Some((dropout, &numbers)), &mut out, &mut log_sums);
            let mut gradients = Gradients::fused(&attention, &mut dqkv);
            gradients.bias = (!bias.is_empty()).then_some(&mut dbias[..]);
            backward(&cpu, &attention, &inputs, Some((dropout, &numbers)), &log_sums, &out, gradients);
            // The longest sequence's output and gradient, wherever it stands.
            let i = order.iter().position(|i| *i == 2).unwrap();
            let rows = offsets[i] as usize..offsets[i + 1] as usize;
            let of = |x: &[f32], width: usize| x[rows.start * width..rows.end * width].to_vec();
            let bits = |x: Vec<f32>| x.into_iter().map(f32::to_bits).collect::<Vec<_>>();
            (bits([of(&out, h), of(&dqkv, width)].concat()), bits(dbias))
        };
        let one = run(1, &[0, 1, 2]);
        assert_eq!(one, run(2, &[0, 1, 2]));
        assert_eq!(one, run(3, &[0, 1, 2]));
        assert_eq!(one.0, run(2, &[2, 0]).0);
    }
}
