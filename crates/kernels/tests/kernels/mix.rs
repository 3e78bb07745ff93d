//! Mixtures of layers: finite differences check the reference, the reference checks every kernel set.

use crate::common::*;
use henson_kernels::cpu::mix::{backward, forward, reference};
use henson_kernels::cpu::{Cpu, Element, Isa};

#[test]
fn reference_has_the_right_gradients() {
    let (t, n, w) = (3, 4, 5);
    let inputs: Vec<Vec<f64>> = [(1, t * n * w), (2, n), (3, 1)].map(|(s, n)| exact(&numbers::<f32>(s, n))).to_vec();
    let dy = exact(&numbers::<f32>(4, t * w));
    let (dx, dweights, dgamma) = reference::backward(&inputs[0], w, &inputs[1], inputs[2][0], &dy);
    let gradients = [dx, dweights, vec![dgamma]];
    check_gradients("mix", &inputs, &gradients, |x| weighted(&reference::forward(&x[0], w, &x[1], x[2][0]), &dy));
}

fn check<E: Element>(cpu: &Cpu, t: usize, n: usize, w: usize) {
    let (x, dy, weights, gamma) = (numbers::<E>(1, t * n * w), numbers::<E>(2, t * w), numbers::<f32>(3, n), 0.7);
    let (wide, wide_weights) = (exact(&x), exact(&weights));
    let mut out = poisoned::<E>(t * w);
    forward(cpu, &x, w, &weights, gamma, &mut out);
    assert_close("out", cpu, &out, &reference::forward(&wide, w, &wide_weights, f64::from(gamma)));
    let expected = reference::backward(&wide, w, &wide_weights, f64::from(gamma), &exact(&dy));
    let (mut dx, mut dweights, mut dgamma) = (poisoned::<E>(t * n * w), vec![0.0; n], 0.0);
    backward(cpu, &x, w, &weights, gamma, &dy, &mut dx, &mut dweights, &mut dgamma);
    assert_close("dx", cpu, &dx, &expected.0);
    assert_close("dweights", cpu, &dweights, &expected.1);
    assert_close("dgamma", cpu, &[dgamma], &[expected.2]);
    // Added to, and without room for the gradient of x.
    backward(cpu, &x, w, &weights, gamma, &dy, &mut [], &mut dweights, &mut dgamma);
    assert_close("twice", cpu, &dweights, &expected.1.iter().map(|x| 2.0 * x).collect::<Vec<_>>());
}

#[test]
fn kernels_follow_the_reference() {
    for_all!(check(5, 3, 33));
    for_all!(check(1, 1, 7));
    for_all!(check(70, 13, 129));
}

#[test]
fn threads_do_not_change_a_bit() {
    let (x, dy, weights) = (numbers::<f32>(1, 500 * 4 * 64), numbers::<f32>(2, 500 * 64), numbers::<f32>(3, 4));
    let run = |threads: usize| {
        let (mut dx, mut dweights, mut dgamma) = (poisoned::<f32>(x.len()), vec![0.0; 4], 0.0);
        let cpu = Cpu::new(Isa::best(), threads).unwrap();
        backward(&cpu, &x, 64, &weights, 1.5, &dy, &mut dx, &mut dweights, &mut dgamma);
        (dx, dweights, dgamma)
    };
    assert_eq!(run(1), run(2));
    assert_eq!(run(1), run(3));
}
