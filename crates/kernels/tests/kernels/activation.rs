//! Activations: finite differences check the reference, the reference checks every kernel set.

use crate::common::*;
use henson_kernels::cpu::activation::{Activation, backward, forward, reference};
use henson_kernels::cpu::{Cpu, Element, Isa};

const ALL: [Activation; 6] =
    [Activation::None, Activation::Gelu, Activation::GeluTanh, Activation::Relu, Activation::Tanh, Activation::Silu];

#[test]
fn reference_has_the_right_gradients() {
    for activation in ALL {
        let (x, w) = (exact(&numbers::<f32>(1, 40)), exact(&numbers::<f32>(2, 40)));
        let gradient = x.iter().zip(&w).map(|(x, w)| w * reference::derivative(activation, *x)).collect();
        check_gradients(&format!("{activation:?}"), &[x], &[gradient], |x| {
            x[0].iter().zip(&w).map(|(x, w)| w * reference::forward(activation, *x)).sum()
        });
    }
    // Values of the two GELUs by Python's `math.erf` and `math.tanh`.
    for (x, erf, tanh) in [(1.0, 0.841344746068543, 0.841191990608277), (-2.0, -0.045500263896358, -0.045402305912225)]
    {
        assert!((reference::forward(Activation::Gelu, x) - erf).abs() < 1e-12);
        assert!((reference::forward(Activation::GeluTanh, x) - tanh).abs() < 1e-12);
    }
}

fn check<E: Element>(cpu: &Cpu, activation: Activation, n: usize) {
    let (x, dy) = (numbers::<E>(1, n), numbers::<E>(2, n));
    let (mut y, mut dx) = (poisoned::<E>(n), poisoned::<E>(n));
    forward(cpu, activation, &x, &mut y);
    backward(cpu, activation, &x, &dy, &mut dx);
    let expected: Vec<f64> = exact(&x).iter().map(|x| reference::forward(activation, *x)).collect();
    assert_close(&format!("{activation:?}"), cpu, &y, &expected);
    let slopes = exact(&x).into_iter().map(|x| reference::derivative(activation, x));
    let expected: Vec<f64> = exact(&dy).iter().zip(slopes).map(|(dy, slope)| dy * slope).collect();
    assert_close(&format!("gradient of {activation:?}"), cpu, &dx, &expected);
}

#[test]
fn kernels_match_the_reference() {
    for activation in ALL {
        for n in [0, 1, 3, 7, 33, 129, 300, 9001] {
            for_all!(check(activation, n));
        }
    }
}

#[test]
fn errors_are_as_stated() {
    let x: Vec<f32> = (-8000..=8000).map(|i| i as f32 * 1e-3).collect();
    let one = vec![1.0; x.len()];
    for cpu in contexts() {
        for activation in ALL {
            let (mut y, mut dx) = (poisoned::<f32>(x.len()), poisoned::<f32>(x.len()));
            forward(&cpu, activation, &x, &mut y);
            backward(&cpu, activation, &x, &one, &mut dx);
            for i in 0..x.len() {
                let exact = f64::from(x[i]);
                let error = (f64::from(y[i]) - reference::forward(activation, exact)).abs();
                assert!(error <= 1e-6, "{activation:?}({exact}) is off by {error:e} on {cpu:?}");
                let error = (f64::from(dx[i]) - reference::derivative(activation, exact)).abs();
                assert!(error <= 1e-6, "{activation:?}'({exact}) is off by {error:e} on {cpu:?}");
            }
        }
    }
}

#[test]
fn extremes_stay_extremes_and_nan_stays_nan() {
    let x = [f32::NAN, 1e30, -1e30, 0.0, -0.0];
    for cpu in contexts() {
        for activation in ALL {
            let (mut y, mut dx) = ([0.0; 5], [0.0; 5]);
            forward(&cpu, activation, &x, &mut y);
            backward(&cpu, activation, &x, &[1.0; 5], &mut dx);
            assert!(y[0].is_nan(), "{activation:?} of NaN on {cpu:?}");
            for i in 1..5 {
                let (value, slope) = (f64::from(x[i]), f64::from(dx[i]));
                let scale = value.abs().max(1.0);
                let (y, expected) = (f64::from(y[i]) / scale, reference::forward(activation, value) / scale);
                assert!((y - expected).abs() < 1e-6, "{activation:?} of {value} on {cpu:?}");
                let expected = reference::derivative(activation, value);
                assert!((slope - expected).abs() < 1e-6, "{activation:?}' of {value} is {slope} on {cpu:?}");
            }
        }
    }
}

#[test]
fn threads_do_not_change_a_bit() {
    let x = numbers::<f32>(1, 20_001);
    let run = |threads| {
        let cpu = Cpu::new(Isa::best(), threads).unwrap();
        let (mut y, mut dx) = (poisoned::<f32>(x.len()), poisoned::<f32>(x.len()));
        forward(&cpu, Activation::Gelu, &x, &mut y);
        backward(&cpu, Activation::Gelu, &x, &y, &mut dx);
        [y, dx].concat().into_iter().map(f32::to_bits).collect::<Vec<_>>()
    };
    assert_eq!(run(1), run(2));
    assert_eq!(run(1), run(3));
}
