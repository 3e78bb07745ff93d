//! Attention over flat tokens: finite differences check the reference, the reference checks every kernel set.

mod common;

use common::*;
use henson_kernels::cpu::attention::{Attention, backward, forward, probabilities, reference};
use henson_kernels::cpu::dropout::{Dropout, RowId};
use henson_kernels::cpu::{Cpu, Element, Isa};

#[test]
fn reference_has_the_right_gradients() {
    let (s, d) = (5, 3);
    let inputs: Vec<Vec<f64>> = (1..=3).map(|seed| exact(&numbers::<f32>(seed, s * d))).collect();
    let w = exact(&numbers::<f32>(9, s * d));
    let mask: Vec<f64> = (0..s * s).map(|i| if i % 4 == 1 { 0.0 } else { 1.25 }).collect();
    for (causal, mask) in [(false, None), (true, None), (false, Some(&mask[..])), (true, Some(&mask[..]))] {
        let run = |x: &[Vec<f64>]| reference::forward(&x[0], &x[1], &x[2], d, causal, mask);
        let gradients = reference::backward(&inputs[0], &inputs[1], &inputs[2], d, &run(&inputs), mask, &w);
        check_gradients("attention", &inputs, &gradients, |x| weighted(&run(x).out, &w));
    }
}

struct Case<'a> {
    lengths: &'a [usize],
    heads: usize,
    d: usize,
    causal: bool,
    p: f32,
}

fn check<E: Element>(cpu: &Cpu, case: &Case<'_>) {
    let Case { lengths, heads, d, causal, p } = *case;
    let h = heads * d;
    let t: usize = lengths.iter().sum();
    let offsets: Vec<u32> = std::iter::once(0)
        .chain(lengths.iter().scan(0, |a, l| {
            *a += *l as u32;
            Some(*a)
        }))
        .collect();
    let numbers_of: Vec<u32> = (0..lengths.len() as u32).map(|i| 100 - 7 * i).collect();
    let dropout = Dropout::new(p, 3, 4, 5);
    let (qkv, dout) = (numbers::<E>(1, t * 3 * h), numbers::<E>(2, t * h));
    let shape = Attention { offsets: &offsets, heads, head_size: d, causal };

    let (mut out, mut log_sums, mut dqkv) = (poisoned::<E>(t * h), vec![f32::NAN; heads * t], poisoned::<E>(t * 3 * h));
    let dropout_of = dropout.map(|dropout| (dropout, &numbers_of[..]));
    forward(cpu, &qkv, shape, dropout_of, &mut out, &mut log_sums);
    backward(cpu, &qkv, shape, dropout_of, &log_sums, &dout, &mut dqkv);
    let mut maps = vec![f32::NAN; shape.probabilities()];
    probabilities(cpu, &qkv, shape, &mut maps);

    let (mut expected_out, mut expected_dqkv, mut expected_maps) = (vec![0.0; t * h], vec![0.0; t * 3 * h], vec![]);
    for (i, &s) in lengths.iter().enumerate() {
        for head in 0..heads {
            let at =
                |token: usize, which: usize, c: usize| (offsets[i] as usize + token) * 3 * h + which * h + head * d + c;
            let part =
                |which| -> Vec<f64> { (0..s * d).map(|j| f64::from(qkv[at(j / d, which, j % d)].to_f32())).collect() };
            let (q, k, v) = (part(0), part(1), part(2));
            let mask = dropout.map(|dropout| -> Vec<f64> {
                let masks = |j: usize| {
                    let row = RowId { sequence: numbers_of[i], position: (j / s) as u32 };
                    head_keeps(&dropout, head, row, s, j % s)
                };
                (0..s * s).map(|j| if masks(j) { f64::from(dropout.scale()) } else { 0.0 }).collect()
            });
            let output = reference::forward(&q, &k, &v, d, causal, mask.as_deref());
            let out_at = |j: usize| (offsets[i] as usize + j / d) * h + head * d + j % d;
            let gradient: Vec<f64> = (0..s * d).map(|j| f64::from(dout[out_at(j)].to_f32())).collect();
            let gradients = reference::backward(&q, &k, &v, d, &output, mask.as_deref(), &gradient);
            for j in 0..s * d {
                expected_out[out_at(j)] = output.out[j];
                for which in 0..3 {
                    expected_dqkv[at(j / d, which, j % d)] = gradients[which][j];
                }
            }
            expected_maps.extend(output.probabilities);
        }
    }
    let what = format!("attention {lengths:?} × {heads} × {d}, causal {causal}, dropout {p}");
    assert_close(&what, cpu, &out, &expected_out);
    assert_close(&format!("{what}: gradient"), cpu, &dqkv, &expected_dqkv);
    assert!(error(&exact(&maps), &expected_maps) <= tolerance::<E>(), "{what}: maps");
}

/// Each head draws at a site of its own.
fn head_keeps(dropout: &Dropout, head: usize, row: RowId, columns: usize, column: usize) -> bool {
    dropout.at_head(head).keeps(row, columns, column)
}

#[test]
fn kernels_match_the_reference() {
    let cases = [
        Case { lengths: &[1], heads: 1, d: 3, causal: false, p: 0.0 },
        Case { lengths: &[7, 33, 1, 129], heads: 3, d: 8, causal: false, p: 0.0 },
        Case { lengths: &[7, 33, 1, 129], heads: 2, d: 64, causal: false, p: 0.1 },
        Case { lengths: &[129, 2], heads: 2, d: 24, causal: true, p: 0.1 },
        Case { lengths: &[300], heads: 1, d: 16, causal: false, p: 0.1 },
        Case { lengths: &[33, 300], heads: 1, d: 16, causal: true, p: 0.0 },
    ];
    for case in &cases {
        for_all!(check(case));
    }
}

#[test]
fn very_large_scores_stay_finite() {
    for cpu in &contexts() {
        let qkv: Vec<f32> = numbers::<f32>(1, 9 * 24).into_iter().map(|x| x * 1e3).collect();
        let shape = Attention { offsets: &[0, 9], heads: 1, head_size: 8, causal: false };
        let (mut out, mut log_sums) = (poisoned::<f32>(9 * 8), vec![0.0; 9]);
        forward(cpu, &qkv, shape, None, &mut out, &mut log_sums);
        assert!(out.iter().all(|x| x.is_finite()), "{cpu:?}");
    }
}

#[test]
fn threads_order_and_company_do_not_change_a_bit() {
    let (heads, d) = (2, 16);
    let h = heads * d;
    let dropout = Dropout::new(0.1, 1, 2, 3).unwrap();
    let run = |threads, order: &[usize]| {
        let cpu = Cpu::new(Isa::best(), threads).unwrap();
        let lengths = [40, 3, 150];
        let parts: Vec<Vec<f32>> = (0..3).map(|i| numbers::<f32>(i as u64, lengths[i] * 3 * h)).collect();
        let qkv: Vec<f32> = order.iter().flat_map(|i| parts[*i].clone()).collect();
        let mut offsets = vec![0];
        offsets.extend(order.iter().scan(0, |a, i| {
            *a += lengths[*i] as u32;
            Some(*a)
        }));
        let numbers: Vec<u32> = order.iter().map(|i| *i as u32).collect();
        let t = *offsets.last().unwrap() as usize;
        let shape = Attention { offsets: &offsets, heads, head_size: d, causal: false };
        let (mut out, mut log_sums, mut dqkv) = (vec![0.0; t * h], vec![0.0; heads * t], vec![0.0; t * 3 * h]);
        forward(&cpu, &qkv, shape, Some((dropout, &numbers)), &mut out, &mut log_sums);
        backward(&cpu, &qkv, shape, Some((dropout, &numbers)), &log_sums, &out, &mut dqkv);
        // The longest sequence's gradient, wherever it stands.
        let i = order.iter().position(|i| *i == 2).unwrap();
        dqkv[offsets[i] as usize * 3 * h..offsets[i + 1] as usize * 3 * h]
            .iter()
            .map(|x| x.to_bits())
            .collect::<Vec<_>>()
    };
    let one = run(1, &[0, 1, 2]);
    assert_eq!(one, run(2, &[0, 1, 2]));
    assert_eq!(one, run(2, &[2, 0]));
}
