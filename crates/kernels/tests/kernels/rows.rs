//! Whole rows: the reference's gradients by finite differences, then every kernel set against the reference.

use crate::common::*;
use henson_kernels::bf16;
use henson_kernels::cpu::dropout::{Dropout, RowId};
use henson_kernels::cpu::rows::{self, reference};
use henson_kernels::cpu::{Cpu, Element, Isa};

/// Rows in no order, some of them twice: a third as many as there are.
fn picked(t: usize) -> Vec<u32> {
    (0..t.div_ceil(3)).map(|i| (i * 7 % t / 2) as u32).collect()
}

/// Sequences of 0, 1, 2, … rows, the last one cut off.
fn offsets(t: usize) -> Vec<u32> {
    let ends = (0..).map(|i: u32| i * (i + 1) / 2);
    ends.take_while(|end| (*end as usize) < t).chain([t as u32]).collect()
}

#[test]
fn reference_has_the_right_gradients() {
    let (t, h) = (9, 4);
    let (x, rows) = (exact(&numbers::<f32>(1, t * h)), [4, 0, 4, 8]);
    let w = exact(&numbers::<f32>(2, rows.len() * h));
    let mut gradient = vec![0.0; t * h];
    reference::scatter_add(&w, h, &rows, &mut gradient);
    check_gradients("gather", std::slice::from_ref(&x), &[gradient], |x| {
        weighted(&reference::gather(&x[0], h, &rows), &w)
    });

    let (offsets, w) = ([0, 3, 3, 4, 8], exact(&numbers::<f32>(3, 4 * h)));
    let mut gradient = vec![0.0; t * h];
    reference::segment_mean_gradient(&w, h, &offsets, &mut gradient);
    check_gradients("segment_mean", std::slice::from_ref(&x), &[gradient], |x| {
        weighted(&reference::segment_mean(&x[0], h, &offsets), &w)
    });

    let w = exact(&numbers::<f32>(5, 4 * h));
    let mut gradient = vec![0.0; t * h];
    reference::segment_max_gradient(&x, &w, h, &offsets, &mut gradient);
    check_gradients("segment_max", std::slice::from_ref(&x), &[gradient], |x| {
        weighted(&reference::segment_max(&x[0], h, &offsets), &w)
    });

    let w = exact(&numbers::<f32>(4, t * h));
    let gradient = reference::l2_normalise_gradient(&x, &w, h);
    check_gradients("l2_normalise", &[x], &[gradient], |x| weighted(&reference::l2_normalise(&x[0], h), &w));
    // Too short a row is only multiplied.
    assert_eq!(reference::l2_normalise_gradient(&[0.0, 1e-13], &[2.0, -3.0], 2), [2.0 / 1e-12, -3.0 / 1e-12]);
}

fn check<E: Element>(cpu: &Cpu, t: usize, h: usize) {
    let x = numbers::<E>(1, t * h);
    let wide = exact(&x);

    let picked = picked(t);
    let mut out = poisoned::<E>(picked.len() * h);
    rows::gather(cpu, &x, h, &picked, &mut out);
    assert_eq!(exact(&out), reference::gather(&wide, h, &picked));

    let dy = numbers::<E>(2, picked.len() * h);
    let mut expected = vec![0.0; t * h];
    reference::scatter_add(&exact(&dy), h, &picked, &mut expected);
    let mut dx = poisoned::<E>(t * h);
    rows::scatter_add(cpu, &dy, h, &picked, &mut dx, true);
    assert_close("scatter_add", cpu, &dx, &expected);
    let mut dx = x.clone();
    rows::scatter_add(cpu, &dy, h, &picked, &mut dx, false);
    let expected: Vec<f64> = expected.iter().zip(&wide).map(|(d, x)| d + x).collect();
    assert_close("scatter_add to what is there", cpu, &dx, &expected);

    let (dropout, ids) = (Dropout::new(0.2, 3, 1, 4).unwrap(), RowId { sequence: 6, position: 0 });
    let ids: Vec<RowId> = (0..t as u32).map(|position| RowId { position, ..ids }).collect();
    let keeps = |i: usize| f64::from(u8::from(dropout.keeps(ids[i / h], h, i % h)));
    let mut y = x.clone();
    rows::drop(cpu, &mut y, h, &dropout, &ids);
    let expected: Vec<f64> = (0..t * h).map(|i| wide[i] * keeps(i) * f64::from(dropout.scale())).collect();
    assert_close("drop", cpu, &y, &expected);
    // The same columns of both halves of every row.
    let mut both: Vec<E> = x.chunks(h).flat_map(|row| [row, row].concat()).collect();
    rows::drop_parts(cpu, &mut both, h, 2, &dropout, &ids);
    let twice: Vec<E> = y.chunks(h).flat_map(|row| [row, row].concat()).collect();
    assert!(
        both.iter().zip(&twice).all(|(a, b)| a.to_f32().to_bits() == b.to_f32().to_bits()),
        "drop_parts on {cpu:?}"
    );

    let offsets = offsets(t);
    let expected = reference::segment_mean(&wide, h, &offsets);
    check_pooling::<E, f32>(cpu, rows::segment_mean, &x, h, &offsets, &expected);
    check_pooling::<E, bf16>(cpu, rows::segment_mean, &x, h, &offsets, &expected);
    let expected = reference::segment_max(&wide, h, &offsets);
    check_pooling::<E, f32>(cpu, rows::segment_max, &x, h, &offsets, &expected);
    check_pooling::<E, bf16>(cpu, rows::segment_max, &x, h, &offsets, &expected);

    // With a row more than the sequences have.
    let (dy, mut expected) = (numbers::<f32>(6, (offsets.len() - 1) * h), vec![0.0; (t + 1) * h]);
    reference::segment_mean_gradient(&exact(&dy), h, &offsets, &mut expected);
    let mut dx = poisoned::<E>((t + 1) * h);
    rows::segment_mean_gradient(cpu, &dy, h, &offsets, &mut dx, true);
    assert_close("segment_mean's gradient", cpu, &dx, &expected);
    let mut dx = numbers::<E>(7, (t + 1) * h);
    expected.iter_mut().zip(exact(&dx)).for_each(|(d, x)| *d += x);
    rows::segment_mean_gradient(cpu, &dy, h, &offsets, &mut dx, false);
    assert_close("segment_mean's gradient to what is there", cpu, &dx, &expected);

    let (x_and_more, mut expected) = (numbers::<E>(9, (t + 1) * h), vec![0.0; (t + 1) * h]);
    reference::segment_max_gradient(&exact(&x_and_more), &exact(&dy), h, &offsets, &mut expected);
    let mut dx = poisoned::<E>((t + 1) * h);
    rows::segment_max_gradient(cpu, &x_and_more, &dy, h, &offsets, &mut dx, true);
    assert_close("segment_max's gradient", cpu, &dx, &expected);
    rows::segment_max_gradient(cpu, &x_and_more, &dy, h, &offsets, &mut dx, false);
    expected.iter_mut().for_each(|d| *d *= 2.0);
    assert_close("segment_max's gradient to what is there", cpu, &dx, &expected);

    let mut dy = numbers::<E>(8, t * h);
    let expected = reference::l2_normalise_gradient(&wide, &exact(&dy), h);
    rows::l2_normalise_gradient(cpu, &x, &mut dy, h);
    assert_close("l2_normalise's gradient", cpu, &dy, &expected);
    let mut dy = numbers::<E>(8, h);
    let expected: Vec<f64> = exact(&dy).iter().map(|dy| dy * 1e12).collect();
    rows::l2_normalise_gradient(cpu, &vec![E::default(); h], &mut dy, h);
    assert_close("l2_normalise's gradient at nothing", cpu, &dy, &expected);

    let mut y = x.clone();
    // Rows of zeros, and of a very small length.
    y[..h].fill(E::default());
    y.chunks_mut(h).skip(1).step_by(2).for_each(|row| row[1..].fill(E::from_f32(1e-7)));
    y.chunks_mut(h).skip(1).step_by(4).for_each(|row| row[0] = E::from_f32(1e-7));
    let expected = reference::l2_normalise(&exact(&y), h);
    rows::l2_normalise(cpu, &mut y, h);
    assert_close("l2_normalise", cpu, &y, &expected);

    let mut y = numbers::<E>(5, t * h);
    let expected: Vec<f64> = exact(&y).iter().zip(&wide).map(|(y, x)| x + y).collect();
    rows::add(cpu, &x, &mut y);
    assert_close("add", cpu, &y, &expected);

    let mut y = x.clone();
    rows::multiply(cpu, &x, &mut y);
    let expected: Vec<f64> = wide.iter().map(|x| x * x).collect();
    assert_close("multiply", cpu, &y, &expected);

    let mut y = poisoned::<E>(t * h);
    rows::scale(cpu, -1.75, &x, &mut y);
    let expected: Vec<f64> = wide.iter().map(|x| -1.75 * x).collect();
    assert_close("scale", cpu, &y, &expected);

    let mut y = poisoned::<E>(t * h);
    rows::fill_zero(cpu, &mut y);
    assert!(y.iter().all(|y| y.to_f32() == 0.0));
}

fn check_pooling<E: Element, O: Element>(
    cpu: &Cpu,
    kernel: fn(&Cpu, &[E], usize, &[u32], &mut [O]),
    x: &[E],
    h: usize,
    offsets: &[u32],
    expected: &[f64],
) {
    let mut out = poisoned::<O>(expected.len());
    kernel(cpu, x, h, offsets, &mut out);
    assert_close("pooling", cpu, &out, expected);
}

#[test]
fn kernels_match_the_reference() {
    for t in [1, 7, 33, 129] {
        for h in [3, 24, 128, 300] {
            for_all!(check(t, h));
        }
    }
}

#[test]
fn a_nan_is_not_forgotten() {
    for cpu in contexts() {
        let (mut x, mut out) = (numbers::<f32>(1, 5 * 20), poisoned::<f32>(20));
        x[2 * 20 + 9] = f32::NAN;
        rows::segment_max(&cpu, &x, 20, &[0, 5], &mut out);
        assert!((0..20).all(|c| out[c].is_nan() == (c == 9)), "{out:?} on {cpu:?}");
        rows::l2_normalise(&cpu, &mut x, 20);
        assert!((0..100).all(|i| x[i].is_nan() == (i / 20 == 2)), "{x:?} on {cpu:?}");
    }
}

#[test]
fn threads_do_not_change_a_bit() {
    let (t, h) = (129, 300);
    let x = numbers::<f32>(1, t * h);
    let run = |threads| {
        let cpu = Cpu::new(Isa::best(), threads).unwrap();
        let mut dx = x.clone();
        rows::scatter_add(&cpu, &x[..43 * h], h, &picked(t), &mut dx, false);
        rows::l2_normalise(&cpu, &mut dx, h);
        let offsets = offsets(t);
        let mut mean = poisoned::<f32>((offsets.len() - 1) * h);
        rows::segment_mean(&cpu, &x, h, &offsets, &mut mean);
        [dx, mean].concat().into_iter().map(f32::to_bits).collect::<Vec<_>>()
    };
    assert_eq!(run(1), run(2));
    assert_eq!(run(1), run(3));
}

#[test]
#[should_panic(expected = "outside")]
fn a_row_outside_is_refused() {
    rows::scatter_add(&Cpu::detect(), &[1.0f32; 4], 2, &[0, 3], &mut [0.0f32; 6], true);
}
