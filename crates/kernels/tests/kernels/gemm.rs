//! Matrix products in all forms, against the naive triple loop.

use crate::common::*;
use henson_kernels::cpu::activation::{Activation, reference as activation};
use henson_kernels::cpu::gemm::{Finish, Matrix, Packed, Right, product, reference};
use henson_kernels::cpu::{Cpu, Element, Isa};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    /// A·B
    Plain,
    /// A·Bᵀ
    RightTransposed,
    /// Aᵀ·B
    LeftTransposed,
}

fn transpose(x: &[f64], rows: usize, columns: usize) -> Vec<f64> {
    (0..rows * columns).map(|i| x[i % rows * columns + i / rows]).collect()
}

/// E: operands, O: result.
fn check<E: Element, O: Element>(cpu: &Cpu, form: Form, m: usize, n: usize, k: usize) {
    let (mut a, b) = (numbers::<E>(1, m * k), numbers::<E>(2, k * n));
    if k > 1000 {
        // Keeps long sums near 1, where the activation bends.
        a.iter_mut().for_each(|a| *a = E::from_f32(a.to_f32() / 64.0));
    }
    let (mut ea, mut eb) = (exact(&a), exact(&b));
    let (mut va, mut vb) = (Matrix::new(&a, m, k), Matrix::new(&b, k, n));
    match form {
        Form::Plain => {}
        Form::RightTransposed => {
            vb = Matrix::new(&b, n, k).transposed();
            eb = transpose(&eb, n, k);
        }
        Form::LeftTransposed => {
            va = Matrix::new(&a, k, m).transposed();
            ea = transpose(&ea, k, m);
        }
    }
    let expected = reference::product(&ea, &eb, m, n, k);
    let what = format!("{form:?} {m}×{n}×{k}");

    let mut out = poisoned::<O>(m * n);
    product(cpu, va, Right::Plain(vb), &mut out, n, Finish::default());
    assert_close(&what, cpu, &out, &expected);

    let packed = Packed::new(cpu, vb);
    let mut again = poisoned::<O>(m * n);
    product(cpu, va, Right::Packed(&packed), &mut again, n, Finish::default());
    if k < 1000 {
        // Beyond that, sums are divided where the operand is not packed.
        assert_eq!(exact(&out), exact(&again), "{what}: packed before differs on {cpu:?}");
    }
    assert_close(&format!("{what}: packed before"), cpu, &again, &expected);

    // Everything at once: scale, bias, activation, its derivative, a factor, accumulation, a stride.
    let bias = numbers::<f32>(3, n);
    let gate = numbers::<O>(4, m * n);
    let old = numbers::<O>(5, m * (n + 3));
    let (mut out, mut slope) = (old.clone(), poisoned::<O>(m * n));
    let finish = Finish {
        scale: 0.5,
        bias: Some(&bias),
        activation: Activation::Gelu,
        derivative: Some(&mut slope),
        factor: Some(&gate),
        accumulate: true,
        ..Finish::default()
    };
    product(cpu, va, Right::Plain(vb), &mut out, n + 3, finish);
    let z: Vec<f64> = (0..m * n).map(|i| 0.5 * expected[i] + f64::from(bias[i % n])).collect();
    let slopes: Vec<f64> = z.iter().map(|z| activation::derivative(Activation::Gelu, *z)).collect();
    assert_close(&format!("{what}: derivative"), cpu, &slope, &slopes);
    let full: Vec<f64> = (0..m * (n + 3))
        .map(|i| {
            let (r, c) = (i / (n + 3), i % (n + 3));
            let old = f64::from(old[i].to_f32());
            if c >= n {
                return old;
            }
            let gate = f64::from(gate[r * n + c].to_f32());
            old + activation::forward(Activation::Gelu, z[r * n + c]) * gate
        })
        .collect();
    assert_close(&format!("{what}: finished"), cpu, &out, &full);
}

#[test]
fn products_match_the_reference() {
    let sizes = [
        (1, 1, 1),
        (1, 7, 33),
        (7, 1, 5),
        (33, 129, 7),
        (129, 33, 24),
        (16, 64, 300),
        (2, 200, 64),
        (70, 70, 0),
        (5, 9, 1601),
        (6, 40, 8195),
    ];
    for cpu in &contexts_with_tiles() {
        for (m, n, k) in sizes {
            for form in [Form::Plain, Form::RightTransposed, Form::LeftTransposed] {
                check::<f32, f32>(cpu, form, m, n, k);
                check::<henson_kernels::bf16, henson_kernels::bf16>(cpu, form, m, n, k);
                check::<henson_kernels::bf16, f32>(cpu, form, m, n, k);
            }
        }
    }
}

const GATES: [Activation; 5] =
    [Activation::Gelu, Activation::GeluTanh, Activation::Silu, Activation::Relu, Activation::None];

#[test]
fn reference_of_a_gate_has_the_right_gradients() {
    for gate in GATES {
        let z = vec![exact(&numbers::<f32>(1, 4 * 6))];
        let w = exact(&numbers::<f32>(2, 4 * 3));
        let (_, slopes) = reference::gated(&z[0], 3, gate);
        let gradient = (0..4 * 6).map(|i| slopes[i] * w[i / 6 * 3 + i % 3]).collect();
        check_gradients("gate", &z, &[gradient], |z| weighted(&reference::gated(&z[0], 3, gate).0, &w));
    }
}

/// activation(x·gate)∘(x·other) as one product, what it keeps, and the backward through it.
fn check_gated<E: Element>(cpu: &Cpu, m: usize, n: usize, k: usize, gate: Activation, with_bias: bool) {
    let (mut a, b) = (numbers::<E>(1, m * k), numbers::<E>(2, 2 * n * k));
    if k > 1000 {
        a.iter_mut().for_each(|a| *a = E::from_f32(a.to_f32() / 64.0));
    }
    let bias = numbers::<f32>(3, 2 * n);
    let bias = with_bias.then_some(&bias[..]);
    // As weights are stored: the gate's n rows, then those of what it gates.
    let weight = Matrix::new(&b, 2 * n, k).transposed();
    let mut z = reference::product(&exact(&a), &transpose(&exact(&b), 2 * n, k), m, 2 * n, k);
    z.iter_mut().enumerate().for_each(|(i, z)| *z += bias.map_or(0.0, |bias| f64::from(bias[i % (2 * n)])));
    let (expected, slopes) = reference::gated(&z, n, gate);
    let what = format!("{gate:?}, {m}×{n}×{k}");
    let a = Matrix::new(&a, m, k);
    let (mut out, mut kept) = (poisoned::<E>(m * n), poisoned::<E>(m * 2 * n));
    let derivative = Some(&mut kept[..]);
    let finish = Finish { bias, activation: gate, gated: true, derivative, ..Finish::default() };
    product(cpu, a, Right::Plain(weight), &mut out, n, finish);
    assert_close(&what, cpu, &out, &expected);
    assert_close(&format!("{what}: kept"), cpu, &kept, &slopes);
    let packed = Packed::gated(cpu, weight);
    for weight in [Right::Plain(weight), Right::Packed(&packed)] {
        let mut out = poisoned::<E>(m * n);
        let finish = Finish { bias, activation: gate, gated: true, ..Finish::default() };
        product(cpu, a, weight, &mut out, n, finish);
        assert_close(&format!("{what}: nothing kept"), cpu, &out, &expected);
    }
    // Back through the gate: dy·down, times both halves of what was kept.
    let (dy, down) = (numbers::<E>(4, m * 5), numbers::<E>(5, 5 * n));
    let dinner = reference::product(&exact(&dy), &exact(&down), m, n, 5);
    let expected: Vec<f64> =
        (0..m * 2 * n).map(|i| dinner[i / (2 * n) * n + i % n] * f64::from(kept[i].to_f32())).collect();
    let mut dz = poisoned::<E>(m * 2 * n);
    let finish = Finish { gate_factors: Some(&kept), ..Finish::default() };
    product(cpu, Matrix::new(&dy, m, 5), Right::Plain(Matrix::new(&down, 5, n)), &mut dz, 2 * n, finish);
    assert_close(&format!("{what}: backward"), cpu, &dz, &expected);
}

#[test]
fn gated_products_match_the_reference() {
    for (m, n, k) in [(1, 1, 1), (7, 33, 24), (129, 7, 33), (33, 129, 7), (100, 64, 40), (5, 9, 8195)] {
        for_all!(check_gated(m, n, k, Activation::Gelu, true));
        check_gated::<henson_kernels::bf16>(&Cpu::new(Isa::AmxModel, 2).unwrap(), m, n, k, Activation::Gelu, true);
    }
    for gate in GATES {
        for_all!(check_gated(33, 40, 20, gate, false));
        check_gated::<henson_kernels::bf16>(&Cpu::new(Isa::AmxModel, 1).unwrap(), 33, 40, 20, gate, false);
    }
}

#[test]
fn every_number_of_rows_works() {
    for cpu in &contexts_with_tiles() {
        for m in 1..=30 {
            check::<f32, f32>(cpu, Form::Plain, m, 40, 9);
            check::<henson_kernels::bf16, f32>(cpu, Form::Plain, m, 20, 9);
        }
    }
    // Around the borders of matrix tiles, with sums that end inside of one.
    for cpu in contexts_with_tiles().iter().filter(|cpu| [Isa::Amx, Isa::AmxModel].contains(&cpu.isa())) {
        for m in [31, 32, 33, 47, 49, 64, 65] {
            for (form, k) in [(Form::Plain, 96), (Form::LeftTransposed, 64), (Form::LeftTransposed, 67)] {
                check::<henson_kernels::bf16, f32>(cpu, form, m, 65, k);
            }
        }
    }
}

/// Where the processor has matrix tiles, whole products have the bits of the model.
#[test]
fn matrix_tiles_equal_their_model() {
    for isa in Isa::available().into_iter().filter(|isa| *isa == Isa::Amx).chain([Isa::AmxModel]) {
        for (m, n, k) in [(1, 5, 33), (40, 70, 200), (128, 33, 64), (12, 300, 768)] {
            let (a, b) = (numbers::<henson_kernels::bf16>(1, m * k), numbers::<henson_kernels::bf16>(2, k * n));
            let run = |isa, threads, left: Matrix<'_, _>| {
                let cpu = Cpu::new(isa, threads).unwrap();
                let mut out = poisoned::<f32>(m * n);
                product(&cpu, left, Right::Plain(Matrix::new(&b, k, n)), &mut out, n, Finish::default());
                out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            for left in [Matrix::new(&a, m, k), Matrix::new(&a, k, m).transposed()] {
                let expected = run(Isa::AmxModel, 1, left);
                for threads in 1..=3 {
                    assert!(run(isa, threads, left) == expected, "{isa}, {threads} threads, {m}×{n}×{k}");
                }
            }
        }
    }
}

#[test]
fn strided_operands_are_read_in_place() {
    let data = numbers::<f32>(1, 20 * 30);
    let dense = |first: usize, rows: usize, columns: usize| -> Vec<f64> {
        (0..rows * columns).map(|i| f64::from(data[first + i / columns * 30 + i % columns])).collect()
    };
    for cpu in &contexts_with_tiles() {
        let (a, b) = (Matrix::strided(&data[3..], 20, 8, 30), Matrix::strided(&data[11..], 8, 17, 30));
        let mut out = poisoned::<f32>(20 * 17);
        product(cpu, a, Right::Plain(b), &mut out, 17, Finish::default());
        assert_close("strided", cpu, &out, &reference::product(&dense(3, 20, 8), &dense(11, 8, 17), 20, 17, 8));
    }
}

#[test]
fn threads_do_not_change_a_bit() {
    for (m, n, k) in [(129, 64, 100), (20, 500, 64)] {
        let run = |threads| {
            let cpu = Cpu::new(Isa::best(), threads).unwrap();
            let (a, b) = (numbers::<f32>(1, m * k), numbers::<f32>(2, k * n));
            let mut out = poisoned::<f32>(m * n);
            let b = Right::Plain(Matrix::new(&b, k, n));
            product(&cpu, Matrix::new(&a, m, k), b, &mut out, n, Finish::default());
            out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        assert_eq!(run(1), run(2));
        assert_eq!(run(1), run(3));
    }
    let run = |threads| {
        let cpu = Cpu::new(Isa::best(), threads).unwrap();
        let (a, b) = (numbers::<f32>(1, 129 * 40), numbers::<f32>(2, 40 * 200));
        let (mut out, mut kept) = (poisoned::<f32>(129 * 100), poisoned::<f32>(129 * 200));
        let derivative = Some(&mut kept[..]);
        let finish = Finish { activation: Activation::Silu, gated: true, derivative, ..Finish::default() };
        product(&cpu, Matrix::new(&a, 129, 40), Right::Plain(Matrix::new(&b, 40, 200)), &mut out, 100, finish);
        [out, kept].concat().into_iter().map(f32::to_bits).collect::<Vec<_>>()
    };
    assert_eq!(run(1), run(2));
    assert_eq!(run(1), run(3));
}
