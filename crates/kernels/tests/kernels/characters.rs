//! What reads words as characters, convolutions with their largest value and highway gates: finite differences check the references,
//! the references check every kernel set.

use crate::common::*;
use henson_kernels::cpu::activation::Activation;
use henson_kernels::cpu::convolution::{self, Bank, BankGradients};
use henson_kernels::cpu::{Cpu, Element, Isa, highway};

const ACTIVATIONS: [Activation; 3] = [Activation::None, Activation::Relu, Activation::Tanh];

fn offsets(lengths: &[usize]) -> Vec<u32> {
    (0..=lengths.len()).map(|n| lengths[..n].iter().sum::<usize>() as u32).collect()
}

#[test]
fn the_reference_of_a_convolution_has_the_right_gradients() {
    let (d, width, filters, offsets) = (3, 2, 4, offsets(&[5, 2, 7]));
    for activation in ACTIVATIONS {
        let sizes = [(1, 14 * d), (2, filters * width * d), (3, filters)];
        let inputs: Vec<Vec<f64>> = sizes.map(|(seed, n)| exact(&numbers::<f32>(seed, n))).to_vec();
        let dy = exact(&numbers::<f32>(4, 3 * filters));
        let forward = |x: &[Vec<f64>]| {
            let bank = Bank { width, weight: &x[1][..], bias: &x[2][..] };
            convolution::reference::forward(&x[0], d, &offsets, bank, activation)
        };
        let (_, at) = forward(&inputs);
        let mut dx = vec![0.0; 14 * d];
        let bank = Bank { width, weight: &inputs[1][..], bias: &inputs[2][..] };
        let (dweight, dbias) = convolution::reference::backward(&inputs[0], d, bank, activation, &at, &dy, &mut dx);
        check_gradients("convolution", &inputs, &[dx, dweight, dbias], |x| weighted(&forward(x).0, &dy));
    }
}

#[test]
fn the_reference_of_a_highway_has_the_right_gradients() {
    let (t, h) = (3, 5);
    let inputs: Vec<Vec<f64>> = [(1, t * 2 * h), (2, t * h)].map(|(s, n)| exact(&numbers::<f32>(s, n))).to_vec();
    let dy = exact(&numbers::<f32>(3, t * h));
    let (dz, dx) = highway::reference::backward(&inputs[0], &inputs[1], h, &dy);
    check_gradients("highway", &inputs, &[dz, dx], |x| weighted(&highway::reference::forward(&x[0], &x[1], h), &dy));
}

/// Columns `first..first + n` of rows of `all`.
fn columns<T: Copy>(x: &[T], all: usize, first: usize, n: usize) -> Vec<T> {
    x.chunks(all).flat_map(|row| row[first..first + n].to_vec()).collect()
}

fn check_convolution<E: Element>(
    cpu: &Cpu,
    lengths: &[usize],
    d: usize,
    banks: &[(usize, usize)],
    activation: Activation,
) {
    let (offsets, all) = (offsets(lengths), banks.iter().map(|bank| bank.1).sum::<usize>());
    let n = lengths.iter().sum::<usize>() * d;
    let (x, dy) = (numbers::<E>(1, n), numbers::<E>(2, lengths.len() * all));
    let weights: Vec<_> = banks.iter().map(|(k, f)| numbers::<E>(10 + *k as u64, f * k * d)).collect();
    let biases: Vec<_> = banks.iter().map(|(k, f)| numbers::<f32>(20 + *k as u64, *f)).collect();
    let given = banks.iter().zip(weights.iter().zip(&biases));
    let given: Vec<_> = given.map(|((width, _), (weight, bias))| Bank { width: *width, weight, bias }).collect();
    let (mut y, mut at) = (poisoned::<E>(dy.len()), vec![u32::MAX; dy.len()]);
    convolution::forward(cpu, (&x, d), &offsets, &given, activation, &mut y, &mut at);
    let mut gradients: Vec<_> = given.iter().map(|b| (vec![0.0; b.weight.len()], vec![0.0; b.bias.len()])).collect();
    let mut dx = poisoned::<E>(n);
    let run = |dx: &mut [E], gradients: &mut [(Vec<f32>, Vec<f32>)]| {
        let mut to: Vec<_> = gradients.iter_mut().map(|(weight, bias)| BankGradients { weight, bias }).collect();
        convolution::backward(cpu, (&x, d), &offsets, &given, activation, (&y, &at), &dy, dx, &mut to);
    };
    run(&mut dx, &mut gradients);
    // Sums are f32, and what they sum has the storage's precision: a slope comes from a value that was stored.
    let close = |what: &str, got: &[f32], expected: &[f64]| {
        let error = error(&exact(got), expected);
        assert!(error <= tolerance::<E>(), "{what} on {cpu:?}, bf16 {}: error {error:e}", E::IS_BF16);
    };
    let (wide, mut expected_dx, mut first) = (exact(&x), vec![0.0; n], 0);
    let mut twice = Vec::new();
    for (i, (width, filters)) in banks.iter().enumerate() {
        let (weight, bias) = (exact(&weights[i]), exact(&biases[i]));
        let bank = Bank { width: *width, weight: &weight[..], bias: &bias[..] };
        let expected = convolution::reference::forward(&wide, d, &offsets, bank, activation).0;
        assert_close("y", cpu, &columns(&y, all, first, *filters), &expected);
        // Where two windows are nearly as good, rounding chooses; the kernel's choice is what the backward is about.
        let (at, dy) = (columns(&at, all, first, *filters), exact(&columns(&dy, all, first, *filters)));
        let (dweight, dbias) = convolution::reference::backward(&wide, d, bank, activation, &at, &dy, &mut expected_dx);
        close("dweight", &gradients[i].0, &dweight);
        close("dbias", &gradients[i].1, &dbias);
        twice.push(dweight.iter().map(|x| 2.0 * x).collect::<Vec<_>>());
        first += filters;
    }
    assert_close("dx", cpu, &dx, &expected_dx);
    // Added to, and without room for the gradient of x.
    run(&mut [], &mut gradients);
    gradients.iter().zip(&twice).for_each(|(got, expected)| close("twice", &got.0, expected));
}

fn check_highway<E: Element>(cpu: &Cpu, t: usize, h: usize) {
    let (z, x, dy) = (numbers::<E>(1, t * 2 * h), numbers::<E>(2, t * h), numbers::<E>(3, t * h));
    let mut y = poisoned::<E>(t * h);
    highway::forward(cpu, &z, &x, h, &mut y);
    assert_close("y", cpu, &y, &highway::reference::forward(&exact(&z), &exact(&x), h));
    let (mut dz, mut dx) = (poisoned::<E>(z.len()), poisoned::<E>(x.len()));
    highway::backward(cpu, &z, &x, h, &dy, &mut dz, &mut dx);
    let expected = highway::reference::backward(&exact(&z), &exact(&x), h, &exact(&dy));
    assert_close("dz", cpu, &dz, &expected.0);
    assert_close("dx", cpu, &dx, &expected.1);
}

#[test]
fn kernels_follow_the_references() {
    for activation in ACTIVATIONS {
        for_all!(check_convolution(&[3, 9, 4], 5, &[(1, 7), (3, 33)], activation));
        for_all!(check_convolution(&[1], 1, &[(1, 1)], activation));
        for_all!(check_convolution(&[12, 7, 40, 8, 7], 16, &[(2, 129), (7, 65)], activation));
    }
    for_all!(check_convolution(&[], 4, &[(2, 3)], Activation::Relu));
    for_all!(check_highway(1, 1));
    for_all!(check_highway(7, 33));
    for_all!(check_highway(70, 129));
}

#[test]
fn the_largest_value_may_be_a_nan() {
    let cpu = Cpu::new(Isa::best(), 1).unwrap();
    let (mut y, mut at) = (vec![0.0; 1], vec![0; 1]);
    let bank = Bank { width: 1, weight: &[1.0], bias: &[0.0] };
    convolution::forward(&cpu, (&[1.0, f32::NAN, 3.0], 1), &[0, 3], &[bank], Activation::Relu, &mut y, &mut at);
    assert!(y[0].is_nan());
}

/// Enough filters and words for several blocks.
#[test]
fn threads_do_not_change_a_bit() {
    let lengths: Vec<usize> = (0..90).map(|i| 7 + i * i % 30).collect();
    let (offsets, d, filters) = (offsets(&lengths), 8, 300);
    let n = lengths.iter().sum::<usize>();
    let (x, weight, bias) = (numbers::<f32>(1, n * d), numbers::<f32>(2, filters * 7 * d), numbers::<f32>(3, filters));
    let dy = numbers::<f32>(4, 90 * filters);
    let run = |threads: usize| {
        let cpu = Cpu::new(Isa::best(), threads).unwrap();
        let banks = [Bank { width: 7, weight: &weight[..], bias: &bias[..] }];
        let (mut y, mut at, mut dx) = (poisoned::<f32>(dy.len()), vec![0; dy.len()], poisoned::<f32>(x.len()));
        convolution::forward(&cpu, (&x, d), &offsets, &banks, Activation::Tanh, &mut y, &mut at);
        let (mut dweight, mut dbias) = (vec![0.0; weight.len()], vec![0.0; filters]);
        let mut to = [BankGradients { weight: &mut dweight, bias: &mut dbias }];
        convolution::backward(&cpu, (&x, d), &offsets, &banks, Activation::Tanh, (&y, &at), &dy, &mut dx, &mut to);
        let (mut z, mut dz) = (poisoned::<f32>(y.len() / 2), poisoned::<f32>(y.len()));
        highway::forward(&cpu, &y, &dy[..z.len()], 50, &mut z);
        let mut through = poisoned::<f32>(z.len());
        highway::backward(&cpu, &y, &dy[..z.len()], 50, &z, &mut dz, &mut through);
        (y, at, dx, dweight, dbias, dz, through)
    };
    let one = run(1);
    assert!(one == run(2) && one == run(3));
}
