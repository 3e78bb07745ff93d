//! The loss of span answers against its definition.

use crate::common::*;
use henson_kernels::cpu::span::{cross_entropy, reference};
use henson_kernels::cpu::{Cpu, Element};

const OFFSETS: [u32; 4] = [0, 1, 8, 41];
const TARGETS: [[u32; 2]; 3] = [[0, 0], [2, 6], [32, 0]];
const WEIGHTS: [[f32; 2]; 3] = [[1.0, 0.5], [0.0, 1.0], [1.0, 1.0]];

#[test]
fn reference_has_the_right_gradient() {
    let logits = exact(&numbers::<f32>(1, 82));
    let weights = WEIGHTS.map(|w| w.map(f64::from));
    let loss = |x: &[Vec<f64>]| reference::loss(&x[0], &OFFSETS, &TARGETS, &weights, 0.25);
    let gradient = loss(std::slice::from_ref(&logits)).1;
    check_gradients("span", &[logits], &[gradient], |x| loss(x).0);
}

fn check<E: Element>(cpu: &Cpu, want_gradient: bool) {
    let mut logits = numbers::<E>(1, 82);
    let weights = WEIGHTS.map(|w| w.map(f64::from));
    let (loss, gradient) = reference::loss(&exact(&logits), &OFFSETS, &TARGETS, &weights, 0.25);
    let before = logits.clone();
    let got = cross_entropy(cpu, &mut logits, &OFFSETS, &TARGETS, &WEIGHTS, 0.25, want_gradient);
    assert!((f64::from(got) - loss).abs() < 1e-5, "{got} not {loss}");
    let expected = if want_gradient { gradient } else { exact(&before) };
    assert_close("span", cpu, &logits, &expected);
}

#[test]
fn kernel_matches_the_reference() {
    for_all!(check(true));
    for_all!(check(false));
}
