//! LayerNorm with residual and dropout: finite differences check the reference, the reference checks every kernel set.

use crate::common::*;
use henson_kernels::cpu::dropout::{Dropout, RowId};
use henson_kernels::cpu::layer_norm::{Drops, Norm, backward, forward, reference};
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
    // x, residual, γ, β.
    let inputs: Vec<Vec<f64>> =
        [t * h, t * h, h, h].iter().zip(1..).map(|(n, s)| exact(&numbers::<f32>(s, *n))).collect();
    let (w, dstream) = (exact(&numbers::<f32>(9, t * h)), exact(&numbers::<f32>(10, t * h)));
    let masks = [1, 2].map(|site| mask(Dropout::new(0.3, 1, 1, site), &rows(t), h).unwrap());
    for (centred, shifted) in [(true, true), (true, false), (false, false), (false, true)] {
        fn norm(x: &[Vec<f64>], (centred, shifted): (bool, bool)) -> Norm<'_, f64> {
            Norm { gamma: &x[2], beta: shifted.then_some(&x[3][..]), epsilon: 1e-3, centred }
        }
        let run = |x: &[Vec<f64>]| {
            reference::forward(&x[0], Some(&x[1]), &norm(x, (centred, shifted)), Some(&masks[0]), Some(&masks[1]))
        };
        let loss = |x: &[Vec<f64>]| {
            let output = run(x);
            weighted(&output.y, &w) + weighted(&output.sum, &dstream)
        };
        let norm = norm(&inputs, (centred, shifted));
        let gradients = reference::backward(&w, Some(&dstream), &run(&inputs), &norm, Some(&masks[0]), Some(&masks[1]));
        let wanted = if shifted { 4 } else { 3 };
        check_gradients("norm", &inputs[..wanted], &gradients[..wanted], |x| loss(&[x, &inputs[wanted..]].concat()));
    }
}

/// What a check of the kernels is about.
#[derive(Clone, Copy, Debug)]
struct Case {
    residual: bool,
    before: bool,
    after: bool,
    centred: bool,
    shifted: bool,
    stream: bool,
}

const PLAIN: Case = Case { residual: false, before: false, after: false, centred: true, shifted: true, stream: false };

fn check<E: Element>(cpu: &Cpu, t: usize, h: usize, case: Case) {
    let (x, residual, dy) = (numbers::<E>(1, t * h), numbers::<E>(2, t * h), numbers::<E>(3, t * h));
    let (gamma, beta) = (numbers::<f32>(4, h), numbers::<f32>(5, h));
    let rows = rows(t);
    let drops = Drops {
        before: case.before.then(|| Dropout::new(0.1, 5, 2, 1).unwrap()),
        after: case.after.then(|| Dropout::new(0.1, 5, 2, 2).unwrap()),
        rows: &rows,
    };
    let masks = (mask(drops.before, &rows, h), mask(drops.after, &rows, h));
    let residual = case.residual.then_some(&residual[..]);
    let norm = Norm { gamma: &gamma, beta: case.shifted.then_some(&beta[..]), epsilon: 1e-12, centred: case.centred };
    let (wide_gamma, wide_beta) = (exact(&gamma), exact(&beta));
    let wide = Norm {
        gamma: &wide_gamma,
        beta: case.shifted.then_some(&wide_beta[..]),
        epsilon: 1e-12,
        centred: case.centred,
    };
    let expected =
        reference::forward(&exact(&x), residual.map(exact).as_deref(), &wide, masks.0.as_deref(), masks.1.as_deref());
    let (mut sum, mut y, mut statistics) = (x.clone(), poisoned::<E>(t * h), vec![[f32::NAN; 2]; t]);
    forward(cpu, &mut sum, residual, &norm, drops, &mut y, &mut statistics);
    assert_close(&format!("sum, {case:?}"), cpu, &sum, &expected.sum);
    assert_close(&format!("y, {case:?}"), cpu, &y, &expected.y);

    // The backward starts from what the forward stored, so the reference does too.
    let stored = reference::Output {
        sum: exact(&sum),
        y: vec![],
        statistics: statistics.iter().map(|s| s.map(f64::from)).collect(),
    };
    let dstream = case.stream.then(|| numbers::<E>(6, t * h));
    let wide_stream = dstream.as_deref().map(exact);
    let expected = reference::backward(
        &exact(&dy),
        wide_stream.as_deref(),
        &stored,
        &wide,
        masks.0.as_deref(),
        masks.1.as_deref(),
    );
    let (mut dsum, mut dx) = (poisoned::<E>(t * h), poisoned::<E>(t * h));
    let (mut dgamma, mut dbeta) = (vec![1.0; h], vec![2.0; h]);
    let dx_wanted = case.before.then_some(&mut dx[..]);
    let dbeta_wanted = case.shifted.then_some(&mut dbeta[..]);
    let dstream = dstream.as_deref();
    backward(cpu, &dy, dstream, &sum, &statistics, &norm, drops, &mut dsum, dx_wanted, &mut dgamma, dbeta_wanted);
    if case.before {
        assert_close(&format!("dx, {case:?}"), cpu, &dx, &expected[0]);
    }
    assert_close(&format!("dsum, {case:?}"), cpu, &dsum, &expected[1]);
    // Masked dy is rounded to E once more before it is summed, hence E's tolerance for these f32 sums.
    let added = |g: &[f64], by: f64| g.iter().map(|g| g + by).collect::<Vec<_>>();
    assert!(error(&exact(&dgamma), &added(&expected[2], 1.0)) <= tolerance::<E>(), "dgamma on {cpu:?}, {case:?}");
    if case.shifted {
        assert!(error(&exact(&dbeta), &added(&expected[3], 2.0)) <= tolerance::<E>(), "dbeta on {cpu:?}, {case:?}");
    }
}

#[test]
fn kernels_match_the_reference() {
    for t in [1, 7, 33, 129] {
        for h in [3, 24, 128, 300] {
            for_all!(check(t, h, Case { residual: true, before: true, ..PLAIN }));
            for_all!(check(t, h, Case { after: true, ..PLAIN }));
            // Pre-norm, with RMSNorm and without a shift.
            let rms = Case { centred: false, shifted: false, ..PLAIN };
            for_all!(check(t, h, Case { residual: true, before: true, stream: true, ..rms }));
        }
    }
    for_all!(check(7, 64, Case { residual: true, ..PLAIN }));
    for_all!(check(7, 64, PLAIN));
    for_all!(check(7, 64, Case { shifted: false, after: true, ..PLAIN }));
    for_all!(check(7, 64, Case { shifted: false, residual: true, stream: true, ..PLAIN }));
    for_all!(check(33, 64, Case { centred: false, shifted: false, after: true, ..PLAIN }));
}

#[test]
fn threads_do_not_change_a_bit() {
    let (t, h) = (129, 100);
    for (centred, stream) in [(true, false), (false, true)] {
        let run = |threads| {
            let cpu = Cpu::new(henson_kernels::cpu::Isa::best(), threads).unwrap();
            let (mut sum, mut y) = (numbers::<f32>(1, t * h), poisoned::<f32>(t * h));
            let (gamma, mut statistics) = (numbers::<f32>(2, h), vec![[0.0; 2]; t]);
            let norm = Norm { gamma: &gamma, beta: centred.then_some(&gamma[..]), epsilon: 1e-12, centred };
            forward(&cpu, &mut sum, None, &norm, Drops::default(), &mut y, &mut statistics);
            let (mut dsum, mut dgamma, mut dbeta) = (poisoned::<f32>(t * h), vec![0.0; h], vec![0.0; h]);
            let (drops, dbeta_wanted) = (Drops::default(), centred.then_some(&mut dbeta[..]));
            let dstream = stream.then_some(&sum[..]);
            backward(&cpu, &y, dstream, &sum, &statistics, &norm, drops, &mut dsum, None, &mut dgamma, dbeta_wanted);
            [y, dsum, dgamma, dbeta].concat().into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        assert_eq!(run(1), run(2));
        assert_eq!(run(1), run(3));
    }
}
