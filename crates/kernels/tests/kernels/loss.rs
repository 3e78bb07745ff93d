//! Losses: finite differences check the reference, the reference checks every kernel set.

use crate::common::*;
use henson_kernels::cpu::loss::{self, reference};
use henson_kernels::cpu::{Cpu, Element, Isa};
use henson_kernels::philox::Stream;

fn targets(rows: usize, classes: usize) -> Vec<u32> {
    let mut stream = Stream::new(3, 0, 0);
    (0..rows).map(|_| stream.below(classes as u32)).collect()
}

/// Every fourth row has the weight 0.
fn weights(rows: usize) -> Vec<f32> {
    (0..rows).map(|p| [1.0, 0.5, 0.0, 2.0][p % 4]).collect()
}

/// Answers of 0 and 1, and some between.
fn answers(n: usize) -> Vec<f32> {
    (0..n).map(|i| [0.0, 1.0, 0.25][i % 3]).collect()
}

#[test]
fn reference_has_the_right_gradients() {
    let (columns, classes) = (9, 7);
    let (targets, weights) = (targets(5, classes), exact(&weights(5)));
    let inputs = [exact(&numbers::<f32>(1, 5 * columns))];
    for smoothing in [0.0, 0.1] {
        let run =
            |x: &[f64]| reference::smoothed_cross_entropy(x, columns, classes, &targets, &weights, smoothing, 0.3);
        check_gradients("cross_entropy", &inputs, &[run(&inputs[0]).2], |x| run(&x[0]).0);
    }
    let answers = exact(&answers(5 * columns));
    let run = |x: &[f64]| reference::mean_squared_error(x, &answers, 0.3);
    check_gradients("mean_squared_error", &inputs, &[run(&inputs[0]).1], |x| run(&x[0]).0);
    let weights: Vec<f64> = (0..5 * columns).map(|i| i as f64 / 9.0).collect();
    let run = |x: &[f64]| reference::binary_cross_entropy(x, &answers, &weights, 0.3);
    check_gradients("binary_cross_entropy", &inputs, &[run(&inputs[0]).1], |x| run(&x[0]).0);
}

/// Losses are f32 for either kind of logits, and exact to f32's tolerance.
#[track_caller]
fn assert_loss(what: &str, cpu: &Cpu, got: f32, expected: f64) {
    let error = (f64::from(got) - expected).abs() / expected.abs().max(1.0);
    assert!(error <= TOLERANCE_F32, "{what} on {cpu:?}: {got} for {expected}");
}

fn check<E: Element>(cpu: &Cpu, rows: usize, classes: usize, padding: usize, stretch: f32) {
    let columns = classes + padding;
    let mut logits: Vec<E> = numbers::<f32>(1, rows * columns).iter().map(|x| E::from_f32(x * stretch)).collect();
    // Whatever padding holds must not matter.
    for row in logits.chunks_mut(columns) {
        row[classes..].fill(E::from_f32(f32::NAN));
    }
    let targets = targets(rows, classes);
    for (weights, smoothing) in [(None, 0.0), (Some(&weights(rows)[..]), 0.0), (Some(&weights(rows)[..]), 0.125)] {
        let exact_weights = weights.map_or(vec![1.0; rows], exact);
        let (loss, terms, gradient) = reference::smoothed_cross_entropy(
            &exact(&logits),
            columns,
            classes,
            &targets,
            &exact_weights,
            f64::from(smoothing),
            0.3,
        );
        for want_gradient in [false, true] {
            let (mut x, mut losses) = (logits.clone(), poisoned::<f32>(rows));
            let got = loss::cross_entropy(
                cpu,
                &mut x,
                columns,
                classes,
                &targets,
                weights,
                smoothing,
                0.3,
                want_gradient,
                &mut losses,
            );
            assert_loss("cross_entropy", cpu, got, loss);
            assert_close("losses", cpu, &losses, &terms);
            if want_gradient {
                assert_close("gradient of cross_entropy", cpu, &x, &gradient);
            } else {
                assert!(x.iter().zip(&logits).all(|(x, l)| x.to_f32().to_bits() == l.to_f32().to_bits()));
            }
        }
    }
    let mut out = poisoned::<f32>(rows * classes);
    loss::softmax(cpu, &logits, columns, classes, &mut out);
    assert_close("softmax", cpu, &out, &reference::softmax(&exact(&logits), columns, classes));
    loss::log_softmax(cpu, &logits, columns, classes, &mut out);
    assert_close("log_softmax", cpu, &out, &reference::log_softmax(&exact(&logits), columns, classes));
    let mut sums = poisoned::<f32>(rows);
    loss::log_sums(cpu, &logits, columns, classes, &mut sums);
    assert_close("log_sums", cpu, &sums, &reference::log_sums(&exact(&logits), columns, classes));

    let (x, answers) = (numbers::<E>(2, rows * classes), answers(rows * classes));
    for want_gradient in [false, true] {
        let check = |what: &str, got: f32, after: Vec<E>, (loss, gradient): (f64, Vec<f64>)| {
            assert_loss(what, cpu, got, loss);
            assert_close(what, cpu, &after, &if want_gradient { gradient } else { exact(&x) });
        };
        let mut after = x.clone();
        let got = loss::mean_squared_error(cpu, &mut after, &answers, 0.3, want_gradient);
        let expected = reference::mean_squared_error(&exact(&x), &exact(&answers), 0.3);
        check("mean_squared_error", got, after, expected);
        for weights in [None, Some(weights(x.len()))] {
            let mut after = x.clone();
            let got = loss::binary_cross_entropy(cpu, &mut after, &answers, weights.as_deref(), 0.3, want_gradient);
            let weights = exact(&weights.unwrap_or_else(|| vec![1.0; x.len()]));
            let expected = reference::binary_cross_entropy(&exact(&x), &exact(&answers), &weights, 0.3);
            check("binary_cross_entropy", got, after, expected);
        }
    }
}

#[test]
fn kernels_match_the_reference() {
    for rows in [1, 7, 33] {
        for (classes, padding) in [(1, 0), (2, 1), (3, 0), (24, 8), (128, 0), (293, 7)] {
            for_all!(check(rows, classes, padding, 1.0));
        }
    }
    for_all!(check(129, 17, 2, 1.0));
    // A row as long as a vocabulary, and logits whose exponentials overflow.
    for_all!(check(2, 5011, 45, 3.0));
    for_all!(check(5, 40, 2, 300.0));
}

#[test]
fn accuracy_counts_first_maxima_of_rows_with_weight() {
    let logits = [
        [1.0, 3.0, 3.0, 9.0],
        [1.0, 3.0, 3.0, 9.0],
        [-5.0, -6.0, -7.0, 9.0],
        [-5.0, -6.0, -7.0, 9.0],
        [1.0, f32::NAN, 0.0, 9.0],
        [2.0, 1.0, 1.0, 9.0],
    ];
    for cpu in contexts() {
        let count = |targets: &[u32], weights: Option<&[f32]>| {
            loss::accuracy(&cpu, &logits.concat()[..4 * targets.len()], 4, 3, targets, weights)
        };
        assert_eq!(count(&[1, 2, 0, 1, 0, 0], None), 3);
        assert_eq!(count(&[1, 2, 0, 1, 0, 0], Some(&[1.0, 1.0, 0.0, 1.0, 1.0, 0.1])), 2);
        assert_eq!(count(&[0, 1, 3], None), 1);
        let mut hits = [false; 6];
        loss::hits(&cpu, &logits.concat(), 4, 3, &[1, 2, 0, 1, 0, 0], &mut hits);
        assert_eq!(hits, [true, false, true, false, false, true]);
        // A long row: the largest may stand in any lane.
        for top in [0, 1, 63, 64, 99, 100, 1002] {
            let mut row = numbers::<f32>(1, 1003);
            row[top as usize] = 50.0;
            assert_eq!(loss::accuracy(&cpu, &row, 1003, 1003, &[top], None), 1);
            assert_eq!(loss::accuracy(&cpu, &row, 1003, 1003, &[top ^ 2], None), 0);
        }
    }
}

#[test]
fn what_is_not_finite_gives_nan() {
    let (rows, columns) = (3, 70);
    for cpu in contexts() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for place in [0, 17, 63, 69] {
                let mut logits = numbers::<f32>(1, rows * columns);
                logits[columns + place] = bad;
                let mut out = poisoned::<f32>(rows * columns);
                loss::softmax(&cpu, &logits, columns, columns, &mut out);
                assert!(out[columns..2 * columns].iter().all(|x| x.is_nan()) && out[0].is_finite());
                let mut sums = [0.0; 3];
                loss::log_sums(&cpu, &logits, columns, columns, &mut sums);
                assert!(!sums[1].is_finite() && sums[0].is_finite() && sums[2].is_finite());
                let mut binary = logits.clone();
                assert!(loss::binary_cross_entropy(&cpu, &mut binary, &[1.0; 210], None, 1.0, true).is_nan());
                assert!(binary[columns + place].is_nan());
                assert!(!loss::mean_squared_error(&cpu, &mut logits.clone(), &[1.0; 210], 1.0, true).is_finite());
                let mut losses = [0.0; 3];
                let mut run = |weights| {
                    let mut logits = logits.clone();
                    let targets = [1, 2, 3];
                    let loss = loss::cross_entropy(
                        &cpu,
                        &mut logits,
                        columns,
                        columns,
                        &targets,
                        weights,
                        0.0,
                        1.0,
                        true,
                        &mut losses,
                    );
                    (loss, logits)
                };
                let (loss, gradient) = run(None);
                assert!(loss.is_nan() && gradient[columns..2 * columns].iter().all(|x| x.is_nan()), "{bad} on {cpu:?}");
                // Unless nobody counts the row.
                let (loss, gradient) = run(Some(&[1.0, 0.0, 1.0]));
                assert!(loss.is_finite() && gradient.iter().all(|x| x.is_finite()), "{bad} on {cpu:?}");
            }
        }
    }
}

#[test]
fn threads_do_not_change_a_bit() {
    let (rows, columns) = (129, 300);
    let logits = numbers::<f32>(1, rows * columns);
    let run = |threads| {
        let cpu = Cpu::new(Isa::best(), threads).unwrap();
        let (mut x, mut losses) = (logits.clone(), poisoned::<f32>(rows));
        let targets = targets(rows, columns);
        let loss = loss::cross_entropy(&cpu, &mut x, columns, columns, &targets, None, 0.0, 0.3, true, &mut losses);
        let mut y = logits.clone();
        let answers = answers(y.len());
        let squared = loss::mean_squared_error(&cpu, &mut y, &answers, 0.3, true);
        let binary = loss::binary_cross_entropy(&cpu, &mut y, &answers, None, 0.3, true);
        let bits: Vec<u32> = [x, y, losses, vec![loss, squared, binary]].concat().iter().map(|x| x.to_bits()).collect();
        bits
    };
    assert_eq!(run(1), run(2));
    assert_eq!(run(1), run(3));
}
