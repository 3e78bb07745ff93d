//! The conditional random field: finite differences check the reference, which goes through all labellings; the reference checks
//! the kernels.

use crate::common::*;
use henson_kernels::cpu::crf::{Field, Gradients, Legal, best, loss, probabilities, reference};
use henson_kernels::cpu::{Cpu, Element, Isa};

fn field<F>(x: &[Vec<F>]) -> Field<'_, F> {
    Field { start: &x[0], end: &x[1], transitions: &x[2] }
}

fn scaled(seed: u64, n: usize, size: f32) -> Vec<f32> {
    numbers::<f32>(seed, n).iter().map(|x| x * size).collect()
}

fn parameters(k: usize, size: f32) -> Vec<Vec<f32>> {
    [(1, k), (2, k), (3, k * k)].map(|(seed, n)| scaled(seed, n, size)).to_vec()
}

#[test]
fn reference_has_the_right_gradients() {
    let (k, right) = (3, [2, 0, 0, 1]);
    let mut inputs: Vec<Vec<f64>> = parameters(k, 1.0).iter().map(|x| exact(x)).collect();
    inputs.push(exact(&numbers::<f32>(4, 4 * k)));
    let (_, [logits, start, end, transitions]) = reference::loss(&field(&inputs), &inputs[3], &right);
    let gradients = [start, end, transitions, logits];
    check_gradients("crf", &inputs, &gradients, |x| reference::loss(&field(x), &x[3], &right).0);
}

fn check<E: Element>(cpu: &Cpu, k: usize, lengths: &[usize], size: f32) {
    let parameters = parameters(k, size);
    let wide: Vec<Vec<f64>> = parameters.iter().map(|x| exact(x)).collect();
    let mut offsets = vec![0u32];
    lengths.iter().for_each(|length| offsets.push(offsets[offsets.len() - 1] + *length as u32));
    let t = offsets[lengths.len()] as usize;
    let logits: Vec<E> = scaled(5, t * k, size).into_iter().map(E::from_f32).collect();
    let labels: Vec<u32> = (0..t).map(|i| (i * i % k) as u32).collect();
    let scale = 0.5;
    let (mut total, mut tags, mut shares) = (0.0, Vec::new(), Vec::new());
    let mut expected = [vec![], vec![1.0; k], vec![1.0; k], vec![1.0; k * k]];
    for ends in offsets.windows(2).filter(|w| w[0] < w[1]) {
        let tokens = ends[0] as usize..ends[1] as usize;
        let own = exact(&logits[tokens.start * k..tokens.end * k]);
        let (loss, d) = reference::loss(&field(&wide), &own, &labels[tokens.clone()]);
        total += f64::from(scale) * loss;
        let hits = labels[tokens]
            .iter()
            .flat_map(|right| (0..k).map(move |label| f64::from(u8::from(label == *right as usize))));
        shares.extend(d[0].iter().zip(hits).map(|(d, hit)| d + hit));
        expected[0].extend(d[0].iter().map(|x| f64::from(scale) * x));
        for which in 1..4 {
            expected[which].iter_mut().zip(&d[which]).for_each(|(sum, x)| *sum += f64::from(scale) * x);
        }
        let all = reference::labellings(&field(&wide), &own);
        let most = all.iter().max_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
        tags.extend(most.0.clone());
    }
    let mut got = [vec![1.0; k], vec![1.0; k], vec![1.0; k * k]];
    let mut dlogits = logits.clone();
    let [start, end, transitions] = &mut got;
    let to = Gradients { start, end, transitions };
    let with = loss(cpu, &field(&parameters), &mut dlogits, &offsets, &labels, scale, Some(to));
    let without = loss(cpu, &field(&parameters), &mut logits.clone(), &offsets, &labels, scale, None);
    assert_eq!(with, without);
    assert!((f64::from(with) - total).abs() <= 1e-5 * total.abs().max(1.0), "{with} instead of {total}");
    assert_close("logits", cpu, &dlogits, &expected[0]);
    for (got, expected) in got.iter().zip(&expected[1..]) {
        assert_close("parameters", cpu, got, expected);
    }
    let mut out = poisoned::<f32>(t * k);
    probabilities(cpu, &field(&parameters), &logits, &offsets, &mut out);
    assert_close("probabilities", cpu, &out, &shares);
    let mut out = vec![99; t];
    best(cpu, &field(&parameters), None, &logits, &offsets, &mut out);
    assert_eq!(out, tags);
}

#[test]
fn as_the_sum_over_all_labellings() {
    for_all!(check(2, &[1], 1.0));
    for_all!(check(3, &[5, 1, 0, 4], 1.0));
    for_all!(check(4, &[4, 2], 30.0));
    for_all!(check(1, &[3], 1.0));
}

#[test]
fn large_scores_do_not_overflow_and_threads_change_no_bit() {
    let (k, lengths) = (7, [40, 3, 91, 1, 17]);
    let mut offsets = vec![0u32];
    lengths.iter().for_each(|length| offsets.push(offsets[offsets.len() - 1] + length));
    let t = offsets[5] as usize;
    let (parameters, labels) = (parameters(k, 100.0), vec![3; t]);
    let run = |threads: usize| {
        let cpu = Cpu::new(Isa::best(), threads).unwrap();
        let mut d = [vec![0.0; k], vec![0.0; k], vec![0.0; k * k]];
        let mut logits = scaled(5, t * k, 100.0);
        let [start, end, transitions] = &mut d;
        let to = Gradients { start, end, transitions };
        (loss(&cpu, &field(&parameters), &mut logits, &offsets, &labels, 1.0, Some(to)), logits, d)
    };
    let one = run(1);
    assert!(one.0.is_finite() && one.0 > 0.0 && one.1.iter().all(|x| x.is_finite()));
    assert_eq!(one, run(2));
    assert_eq!(one, run(3));
}

#[test]
fn illegal_steps_are_not_taken() {
    let (k, cpu) = (3, Cpu::new(Isa::best(), 2).unwrap());
    // Outside, beginning, inside: an inside follows a beginning or an inside.
    let transitions = [true, true, false, true, true, true, true, true, true];
    let legal = Legal { start: &[true, true, false], end: &[true; 3], transitions: &transitions };
    for seed in 0..50 {
        let logits = scaled(seed, 6 * k, 3.0);
        let parameters = parameters(k, 1.0);
        let wide: Vec<Vec<f64>> = parameters.iter().map(|x| exact(x)).collect();
        let allowed = |labels: &[u32]| {
            labels[0] != 2 && labels.windows(2).all(|two| transitions[two[0] as usize * k + two[1] as usize])
        };
        let all = reference::labellings(&field(&wide), &exact(&logits));
        let most = all.iter().filter(|(labels, _)| allowed(labels)).max_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
        let mut out = vec![9; 6];
        best(&cpu, &field(&parameters), Some(legal), &logits, &[0, 6], &mut out);
        assert_eq!(out, most.0);
    }
    // Where nothing is legal, as little as can be is illegal.
    let legal = Legal { start: &[false, true, false], end: &[false; 3], transitions: &transitions };
    let (zeros, mut out) = (vec![vec![0.0; k], vec![0.0; k], vec![0.0; k * k]], vec![9; 2]);
    best(&cpu, &field(&zeros), Some(legal), &[5.0, 0.0, 0.0, 0.0, 0.0, 1.0], &[0, 2], &mut out);
    assert_eq!(out, [1, 2]);
}
