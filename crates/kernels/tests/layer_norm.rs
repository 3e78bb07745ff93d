//! LayerNorm with residual and dropout: finite differences check the reference, the reference checks every kernel set.

mod common;

use common::*;
use henson_kernels::cpu::dropout::{Dropout, RowId};
use henson_kernels::cpu::layer_norm::{Drops, backward, forward, reference};
use henson_kernels::cpu::{Cpu, Element};

fn rows(t: usize) -> Vec<RowId> {
    (0..t as u32).map(|i| RowId { sequence: i / 5, position: i % 5 }).collect()
}

fn mask(dropout: Option<Dropout>, rows: &[RowId], h: usize) -> Option<Vec<f64>> {
    let dropout = dropout?;
    let keep = |i: usize| dropout.keeps(rows[i / h], h, i % h);
    Some((0..rows.len() * h).map(|i| if keep(i) { f64::from(dropout.scale()) } else { 0.0 }).collect())
}

#[test]
fn reference_has_the_right_gradients() {
    let (t, h) = (3, 7);
    let inputs: Vec<Vec<f64>> =
        [t * h, t * h, h, h].iter().zip(1..).map(|(n, s)| exact(&numbers::<f32>(s, *n))).collect();
    let w = exact(&numbers::<f32>(9, t * h));
    let masks = [1, 2].map(|site| mask(Dropout::new(0.3, 1, 1, site), &rows(t), h).unwrap());
    let run =
        |x: &[Vec<f64>]| reference::forward(&x[0], Some(&x[1]), &x[2], &x[3], 1e-12, Some(&masks[0]), Some(&masks[1]));
    let gradients = reference::backward(&w, &run(&inputs), &inputs[2], Some(&masks[0]), Some(&masks[1]));
    check_gradients("layer_norm", &inputs, &gradients, |x| weighted(&run(x).y, &w));
}

fn check<E: Element>(cpu: &Cpu, t: usize, h: usize, with_residual: bool, before: bool, after: bool) {
    let (x, residual, dy) = (numbers::<E>(1, t * h), numbers::<E>(2, t * h), numbers::<E>(3, t * h));
    let (gamma, beta) = (numbers::<f32>(4, h), numbers::<f32>(5, h));
    let rows = rows(t);
    let drops = Drops {
        before: before.then(|| Dropout::new(0.1, 5, 2, 1).unwrap()),
        after: after.then(|| Dropout::new(0.1, 5, 2, 2).unwrap()),
        rows: &rows,
    };
    let masks = (mask(drops.before, &rows, h), mask(drops.after, &rows, h));
    let residual = with_residual.then_some(&residual[..]);
    let expected = reference::forward(
        &exact(&x),
        residual.map(exact).as_deref(),
        &exact(&gamma),
        &exact(&beta),
        1e-12,
        masks.0.as_deref(),
        masks.1.as_deref(),
    );
    let (mut sum, mut y, mut statistics) = (x.clone(), poisoned::<E>(t * h), vec![[f32::NAN; 2]; t]);
    forward(cpu, &mut sum, residual, &gamma, &beta, 1e-12, drops, &mut y, &mut statistics);
    assert_close("sum", cpu, &sum, &expected.sum);
    assert_close("y", cpu, &y, &expected.y);

    // The backward starts from what the forward stored, so the reference does too.
    let stored = reference::Output {
        sum: exact(&sum),
        y: vec![],
        statistics: statistics.iter().map(|s| s.map(f64::from)).collect(),
    };
    let expected = reference::backward(&exact(&dy), &stored, &exact(&gamma), masks.0.as_deref(), masks.1.as_deref());
    let (mut dsum, mut dx) = (poisoned::<E>(t * h), poisoned::<E>(t * h));
    let (mut dgamma, mut dbeta) = (vec![1.0; h], vec![2.0; h]);
    let dx_wanted = before.then_some(&mut dx[..]);
    backward(cpu, &dy, &sum, &statistics, &gamma, drops, &mut dsum, dx_wanted, &mut dgamma, &mut dbeta);
    if before {
        assert_close("dx", cpu, &dx, &expected[0]);
    }
    assert_close("dsum", cpu, &dsum, &expected[1]);
    // Masked dy is rounded to E once more before it is summed, hence E's tolerance for these f32 sums.
    let added = |g: &[f64], by: f64| g.iter().map(|g| g + by).collect::<Vec<_>>();
    assert!(error(&exact(&dgamma), &added(&expected[2], 1.0)) <= tolerance::<E>(), "dgamma on {cpu:?}");
    assert!(error(&exact(&dbeta), &added(&expected[3], 2.0)) <= tolerance::<E>(), "dbeta on {cpu:?}");
}

#[test]
fn kernels_match_the_reference() {
    for t in [1, 7, 33, 129] {
        for h in [3, 24, 128, 300] {
            for_all!(check(t, h, true, true, false));
            for_all!(check(t, h, false, false, true));
        }
    }
    for_all!(check(7, 64, true, false, false));
    for_all!(check(7, 64, false, false, false));
}

#[test]
fn threads_do_not_change_a_bit() {
    let (t, h) = (129, 100);
    let run = |threads| {
        let cpu = Cpu::new(henson_kernels::cpu::Isa::best(), threads).unwrap();
        let (mut sum, mut y, mut statistics) = (numbers::<f32>(1, t * h), poisoned::<f32>(t * h), vec![[0.0; 2]; t]);
        let gamma = numbers::<f32>(2, h);
        forward(&cpu, &mut sum, None, &gamma, &gamma, 1e-12, Drops::default(), &mut y, &mut statistics);
        let (mut dsum, mut dgamma, mut dbeta) = (poisoned::<f32>(t * h), vec![0.0; h], vec![0.0; h]);
        let drops = Drops::default();
        backward(&cpu, &y, &sum, &statistics, &gamma, drops, &mut dsum, None, &mut dgamma, &mut dbeta);
        [y, dsum, dgamma, dbeta].concat().into_iter().map(f32::to_bits).collect::<Vec<_>>()
    };
    assert_eq!(run(1), run(2));
    assert_eq!(run(1), run(3));
}
