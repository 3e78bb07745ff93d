//! What all kernel tests share: the machine's kernel sets, test data, and the tolerances with their reasons.
#![allow(unreachable_pub, reason = "a module of a program")]

use henson_kernels::cpu::{Cpu, Element, Isa};
use henson_kernels::philox::Stream;

/// Error that a kernel in f32 may have against the reference in f64, relative to the tensor's largest magnitude:
/// sums of a few thousand products in f32 stay well below it.
pub const TOLERANCE_F32: f64 = 1e-5;

/// The same for bf16 storage: half of a last place is 2⁻⁹ of the value, and a few roundings add up.
pub const TOLERANCE_BF16: f64 = 1.5e-2;

/// A finite difference in f64 with the step 10⁻⁵ has an error of some 10⁻⁹ relative to the function's scale.
pub const TOLERANCE_DIFFERENCE: f64 = 1e-6;

/// Gradients smaller than this count as this large: some are zero in theory.
pub const FLOOR: f64 = 1e-3;

/// Every kernel set of this machine, with one and with two threads.
pub fn contexts() -> Vec<Cpu> {
    let sets = Isa::available().into_iter();
    sets.flat_map(|isa| [1, 2].map(|threads| Cpu::new(isa, threads).unwrap())).collect()
}

/// The same and the model of matrix tiles, which is slow.
pub fn contexts_with_tiles() -> Vec<Cpu> {
    contexts().into_iter().chain([Cpu::new(Isa::AmxModel, 2).unwrap()]).collect()
}

pub fn tolerance<E: Element>() -> f64 {
    if E::IS_BF16 { TOLERANCE_BF16 } else { TOLERANCE_F32 }
}

/// Normal numbers, rounded to `E` so that the reference sees what the kernel sees.
pub fn numbers<E: Element>(seed: u64, n: usize) -> Vec<E> {
    let mut stream = Stream::new(seed, 0, 0);
    (0..n).map(|_| E::from_f32(stream.normal())).collect()
}

pub fn exact<E: Element>(x: &[E]) -> Vec<f64> {
    x.iter().map(|x| f64::from(x.to_f32())).collect()
}

/// An output buffer full of NaN: what a kernel forgets to write shows.
pub fn poisoned<E: Element>(n: usize) -> Vec<E> {
    vec![E::from_f32(f32::NAN); n]
}

/// max |got − expected| / max(|expected|, FLOOR), the design's measure; NaN counts as infinite.
pub fn error(got: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(got.len(), expected.len(), "lengths differ");
    let scale = expected.iter().fold(FLOOR, |m, e| m.max(e.abs()));
    got.iter().zip(expected).fold(0.0, |m: f64, (g, e)| {
        let d = (g - e).abs() / scale;
        if d.is_nan() { f64::INFINITY } else { m.max(d) }
    })
}

#[track_caller]
pub fn assert_close<E: Element>(what: &str, cpu: &Cpu, got: &[E], expected: &[f64]) {
    let error = error(&exact(got), expected);
    assert!(error <= tolerance::<E>(), "{what} on {cpu:?}, bf16 {}: error {error:e}", E::IS_BF16);
}

/// Checks analytic gradients in f64: `loss` is differentiated with respect to each of `inputs` by central differences.
#[track_caller]
pub fn check_gradients(what: &str, inputs: &[Vec<f64>], gradients: &[Vec<f64>], loss: impl Fn(&[Vec<f64>]) -> f64) {
    assert_eq!(inputs.len(), gradients.len());
    let mut x = inputs.to_vec();
    let step = 1e-5;
    for (k, gradient) in gradients.iter().enumerate() {
        let numeric: Vec<f64> = (0..x[k].len())
            .map(|i| {
                let old = x[k][i];
                x[k][i] = old + step;
                let above = loss(&x);
                x[k][i] = old - step;
                let below = loss(&x);
                x[k][i] = old;
                (above - below) / (2.0 * step)
            })
            .collect();
        let error = error(gradient, &numeric);
        assert!(error <= TOLERANCE_DIFFERENCE, "{what}, input {k}: error {error:e}");
    }
}

/// Σ x·w: a loss whose gradient with respect to x is w.
pub fn weighted(x: &[f64], w: &[f64]) -> f64 {
    x.iter().zip(w).map(|(x, w)| x * w).sum()
}

/// Runs a check for f32 and bf16 on every kernel set.
#[macro_export]
macro_rules! for_all {
    ($check:ident ( $($arg:expr),* )) => {
        for cpu in &$crate::common::contexts() {
            $check::<f32>(cpu, $($arg),*);
            $check::<henson_kernels::bf16>(cpu, $($arg),*);
        }
    };
}
