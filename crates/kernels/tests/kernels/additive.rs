//! Additive attention: finite differences check the reference, the reference checks every kernel set.

use crate::common::*;
use henson_kernels::cpu::additive::{Gradients, Inputs, Offsets, backward, forward, reference};
use henson_kernels::cpu::{Cpu, Element, Isa};

/// Offsets of sequences with so many rows.
fn offsets(lengths: &[u32]) -> Vec<u32> {
    let ends = lengths.iter().scan(0, |end, length| {
        *end += length;
        Some(*end)
    });
    [0].into_iter().chain(ends).collect()
}

#[test]
fn reference_has_the_right_gradients() {
    let (a, h, of_queries, of_keys) = (3, 4, offsets(&[2, 1, 3]), offsets(&[1, 4, 2]));
    let both = [&of_queries[..], &of_keys[..]];
    let inputs: Vec<Vec<f64>> =
        [(1, 6 * a), (2, 7 * a), (3, a), (4, 7 * h)].map(|(seed, n)| exact(&numbers::<f32>(seed, n))).to_vec();
    let dout = exact(&numbers::<f32>(5, 6 * h));
    let gradients = reference::backward(&inputs[0], &inputs[1], &inputs[2], &inputs[3], both, &dout);
    check_gradients("additive attention", &inputs, &gradients, |x| {
        weighted(&reference::forward(&x[0], &x[1], &x[2], &x[3], both).0, &dout)
    });
}

/// With queries, or with one that is zero for each sequence.
fn check<E: Element>(cpu: &Cpu, queries: Option<&[u32]>, keys: &[u32], (a, h): (usize, usize)) {
    let (of_queries, of_keys) = (offsets(queries.unwrap_or(&vec![1; keys.len()])), offsets(keys));
    let (n, m) = (of_queries[keys.len()] as usize, of_keys[keys.len()] as usize);
    let query_rows = if queries.is_some() { numbers::<E>(1, n * a) } else { Vec::new() };
    let (key_rows, v, values) = (numbers::<E>(2, m * a), numbers::<f32>(3, a), numbers::<E>(4, m * h));
    let dout = numbers::<E>(5, n * h);
    let wide = if queries.is_some() { exact(&query_rows) } else { vec![0.0; n * a] };
    let both = [&of_queries[..], &of_keys[..]];
    let (expected, shares) = reference::forward(&wide, &exact(&key_rows), &exact(&v), &exact(&values), both);
    let offsets = Offsets { queries: queries.map(|_| &of_queries[..]), keys: &of_keys };
    let inputs = Inputs { queries: &query_rows, keys: &key_rows, v: &v, values: &values, offsets };
    let (mut probabilities, mut out) = (poisoned::<f32>(offsets.probabilities()), poisoned::<E>(n * h));
    forward(cpu, &inputs, &mut probabilities, &mut out);
    assert_close("out", cpu, &out, &expected);
    assert_close("probabilities", cpu, &probabilities, &shares);
    let expected = reference::backward(&wide, &exact(&key_rows), &exact(&v), &exact(&values), both, &exact(&dout));
    let (mut dqueries, mut dkeys) = (poisoned::<E>(query_rows.len()), poisoned::<E>(m * a));
    let (mut dv, mut dvalues) = (vec![1.0; a], poisoned::<E>(m * h));
    let to = Gradients { queries: &mut dqueries, keys: &mut dkeys, v: &mut dv, values: &mut dvalues };
    backward(cpu, &inputs, &probabilities, &dout, to);
    if queries.is_some() {
        assert_close("dqueries", cpu, &dqueries, &expected[0]);
    }
    assert_close("dkeys", cpu, &dkeys, &expected[1]);
    assert_close("dv", cpu, &dv, &expected[2].iter().map(|x| x + 1.0).collect::<Vec<_>>());
    assert_close("dvalues", cpu, &dvalues, &expected[3]);
}

#[test]
fn kernels_follow_the_reference() {
    for_all!(check(Some(&[3, 1, 7]), &[5, 2, 1], (7, 33)));
    for_all!(check(Some(&[1]), &[1], (1, 1)));
    for_all!(check(Some(&[2, 9, 1, 4]), &[11, 3, 17, 2], (33, 16)));
    for_all!(check(None, &[4, 1, 9], (17, 24)));
}

#[test]
fn threads_do_not_change_a_bit() {
    let (of_queries, of_keys) = (offsets(&[7; 90]), offsets(&[9; 90]));
    let (queries, keys, v, values) =
        (numbers::<f32>(1, 630 * 8), numbers::<f32>(2, 810 * 8), numbers::<f32>(3, 8), numbers::<f32>(4, 810 * 5));
    let dout = numbers::<f32>(5, 630 * 5);
    let offsets = Offsets { queries: Some(&of_queries), keys: &of_keys };
    let inputs = Inputs { queries: &queries, keys: &keys, v: &v, values: &values, offsets };
    let run = |threads: usize| {
        let cpu = Cpu::new(Isa::best(), threads).unwrap();
        let (mut probabilities, mut out) = (poisoned::<f32>(offsets.probabilities()), poisoned::<f32>(630 * 5));
        forward(&cpu, &inputs, &mut probabilities, &mut out);
        let (mut dq, mut dk, mut dv) = (poisoned(630 * 8), poisoned(810 * 8), vec![0.0; 8]);
        let mut dvalues = poisoned(810 * 5);
        let to = Gradients { queries: &mut dq, keys: &mut dk, v: &mut dv, values: &mut dvalues };
        backward(&cpu, &inputs, &probabilities, &dout, to);
        (out, dq, dk, dv, dvalues)
    };
    assert_eq!(run(1), run(2));
    assert_eq!(run(1), run(3));
}
