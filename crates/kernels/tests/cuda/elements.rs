//! Activations, casts, plain passes and reductions.

use half::bf16;
use henson_kernels::cpu::activation::{Activation, reference};
use henson_kernels::cuda::reduce::Sum;
use henson_kernels::cuda::{DType, Result, activation as kernels, cast as casts, reduce as reductions, rows};

use crate::check::{Checks, Number, TOLERANCE_F32, bits, error, exact, numbers, tolerance};

const ALL: [Activation; 6] =
    [Activation::None, Activation::Gelu, Activation::GeluTanh, Activation::Relu, Activation::Tanh, Activation::Silu];

pub(crate) fn activation(checks: &mut Checks<'_>) -> Result<()> {
    for activation in ALL {
        for n in [0, 1, 3, 7, 33, 129, 300, 9001] {
            plain_activation::<f32>(checks, activation, n)?;
            plain_activation::<bf16>(checks, activation, n)?;
        }
        for (rows, h) in [(1, 3), (7, 24), (33, 300), (129, 128), (300, 768), (70, 3072)] {
            with_bias::<f32, f32>(checks, activation, rows, h)?;
            with_bias::<bf16, f32>(checks, activation, rows, h)?;
            with_bias::<bf16, bf16>(checks, activation, rows, h)?;
        }
        for (rows, n) in [(1, 3), (7, 24), (33, 129), (129, 128), (300, 768)] {
            gate::<f32, f32>(checks, activation, rows, n)?;
            gate::<bf16, f32>(checks, activation, rows, n)?;
            gate::<bf16, bf16>(checks, activation, rows, n)?;
        }
        stated_error(checks, activation)?;
        extremes(checks, activation)?;
    }
    if !checks.small {
        with_bias::<bf16, bf16>(checks, Activation::Gelu, 5000, 3072)?;
    }
    Ok(())
}

fn plain_activation<E: Number>(checks: &mut Checks<'_>, activation: Activation, n: usize) -> Result<()> {
    let (x, dy) = (numbers::<E>(1, n), numbers::<E>(2, n));
    let (gx, gdy) = (checks.up(&x)?, checks.up(&dy)?);
    let (y, dx) = (checks.poisoned::<E>(n)?, checks.poisoned::<E>(n)?);
    kernels::forward(checks.gpu, activation, gx.view(), None, y.view())?;
    kernels::backward(checks.gpu, activation, gx.view(), None, gdy.view(), dx.view(), None)?;
    let expected: Vec<f64> = exact(&x).iter().map(|x| reference::forward(activation, *x)).collect();
    checks.close::<E>(&format!("{activation:?} of {n}"), &y, &expected)?;
    let slopes = exact(&x).into_iter().map(|x| reference::derivative(activation, x));
    let expected: Vec<f64> = exact(&dy).iter().zip(slopes).map(|(dy, slope)| dy * slope).collect();
    checks.close::<E>(&format!("gradient of {activation:?} of {n}"), &dx, &expected)
}

/// With a bias in front, and its gradient; in place in the backward.
fn with_bias<E: Number, B: Number>(
    checks: &mut Checks<'_>,
    activation: Activation,
    rows: usize,
    h: usize,
) -> Result<()> {
    let what = format!("{activation:?} with bias {:?}, {rows}×{h}", B::DTYPE);
    let (x, dy, bias) = (numbers::<E>(1, rows * h), numbers::<E>(2, rows * h), numbers::<B>(3, h));
    let (gx, gbias) = (checks.up(&x)?, checks.up(&bias)?);
    let y = checks.poisoned::<E>(rows * h)?;
    kernels::forward(checks.gpu, activation, gx.view(), Some(gbias.view()), y.view())?;
    let wide = exact(&x);
    let bias = exact(&bias);
    let input = |i: usize| wide[i] + bias[i % h];
    let expected: Vec<f64> = (0..rows * h).map(|i| reference::forward(activation, input(i))).collect();
    checks.close::<E>(&what, &y, &expected)?;

    let expected: Vec<f64> =
        exact(&dy).iter().enumerate().map(|(i, dy)| dy * reference::derivative(activation, input(i))).collect();
    let mut sums = vec![0.5; h];
    henson_kernels::cpu::reduce::reference::column_sums(&expected, &mut sums);
    let mut run = || -> Result<Vec<u32>> {
        let (dx, dbias) = (checks.out::<E>(&dy)?, checks.out::<f32>(&vec![0.5; h])?);
        let gradient = dx.view();
        let (to, sums_to) = (Some(gbias.view()), Some(Sum::add(dbias.view())));
        kernels::backward(checks.gpu, activation, gx.view(), to, gradient, gradient, sums_to)?;
        checks.close::<E>(&format!("gradient of {what}"), &dx, &expected)?;
        checks.within::<f32>(&format!("bias gradient of {what}"), &dbias, &sums, tolerance::<f32>())?;
        bits::<f32>(checks.gpu, &dbias)
    };
    let (first, second) = (run()?, run()?);
    checks.verify(|| format!("bias gradient of {what}: two runs differ"), first == second);
    Ok(())
}

/// A gate with and without a bias.
fn gate<E: Number, B: Number>(checks: &mut Checks<'_>, activation: Activation, rows: usize, n: usize) -> Result<()> {
    let (x, dy, bias) = (numbers::<E>(1, rows * 2 * n), numbers::<E>(2, rows * n), numbers::<B>(3, 2 * n));
    let (gx, gdy, gbias) = (checks.up(&x)?, checks.up(&dy)?, checks.up(&bias)?);
    let (wide, wide_dy, wide_bias) = (exact(&x), exact(&dy), exact(&bias));
    for biased in [false, true] {
        let what = format!("gate of {activation:?}, {rows}×{n}, bias {biased} {:?}", B::DTYPE);
        let input = |r: usize, c: usize| wide[r * 2 * n + c] + if biased { wide_bias[c] } else { 0.0 };
        let pairs: Vec<(f64, f64)> = (0..rows * n).map(|i| (input(i / n, i % n), input(i / n, n + i % n))).collect();
        let (y, dx) = (checks.poisoned::<E>(rows * n)?, checks.poisoned::<E>(rows * 2 * n)?);
        let bias = biased.then(|| gbias.view());
        kernels::gate(checks.gpu, activation, gx.view(), bias, n, y.view())?;
        kernels::gate_backward(checks.gpu, activation, gx.view(), bias, gdy.view(), n, dx.view())?;
        let expected: Vec<f64> =
            pairs.iter().map(|(gate, value)| reference::forward(activation, *gate) * value).collect();
        checks.close::<E>(&what, &y, &expected)?;
        let mut expected = vec![0.0; rows * 2 * n];
        for (i, (gate, value)) in pairs.iter().enumerate() {
            let row = &mut expected[i / n * 2 * n..][..2 * n];
            row[i % n] = wide_dy[i] * value * reference::derivative(activation, *gate);
            row[n + i % n] = wide_dy[i] * reference::forward(activation, *gate);
        }
        checks.close::<E>(&format!("gradient of {what}"), &dx, &expected)?;
    }
    Ok(())
}

/// The module promises 10⁻⁶ over [−8, 8].
fn stated_error(checks: &mut Checks<'_>, activation: Activation) -> Result<()> {
    let x: Vec<f32> = (-8000..=8000).map(|i| i as f32 * 1e-3).collect();
    let (gx, ones) = (checks.up(&x)?, checks.up(&vec![1.0f32; x.len()])?);
    let (y, dx) = (checks.poisoned::<f32>(x.len())?, checks.poisoned::<f32>(x.len())?);
    kernels::forward(checks.gpu, activation, gx.view(), None, y.view())?;
    kernels::backward(checks.gpu, activation, gx.view(), None, ones.view(), dx.view(), None)?;
    let (y, dx) = (checks.read::<f32>("stated", &y)?, checks.read::<f32>("stated", &dx)?);
    let worst = |got: &[f32], f: fn(Activation, f64) -> f64| {
        let each = x.iter().zip(got).map(|(x, got)| (f64::from(*got) - f(activation, f64::from(*x))).abs());
        each.fold(0.0, |m: f64, e| if e.is_nan() { f64::INFINITY } else { m.max(e) })
    };
    let (value, slope) = (worst(&y, reference::forward), worst(&dx, reference::derivative));
    checks.verify(|| format!("{activation:?} is off by {value:.2e}"), value <= 1e-6);
    checks.verify(|| format!("{activation:?}' is off by {slope:.2e}"), slope <= 1e-6);
    Ok(())
}

fn extremes(checks: &mut Checks<'_>, activation: Activation) -> Result<()> {
    let x = [f32::NAN, 1e30, -1e30, 0.0, -0.0];
    let (gx, ones) = (checks.up(&x)?, checks.up(&[1.0f32; 5])?);
    let (y, dx) = (checks.poisoned::<f32>(5)?, checks.poisoned::<f32>(5)?);
    kernels::forward(checks.gpu, activation, gx.view(), None, y.view())?;
    kernels::backward(checks.gpu, activation, gx.view(), None, ones.view(), dx.view(), None)?;
    let (y, dx) = (checks.read::<f32>("extremes", &y)?, checks.read::<f32>("extremes", &dx)?);
    checks.verify(|| format!("{activation:?} of NaN is {}", y[0]), y[0].is_nan());
    for i in 1..5 {
        let value = f64::from(x[i]);
        let scale = value.abs().max(1.0);
        let off = (f64::from(y[i]) - reference::forward(activation, value)).abs() / scale;
        checks.verify(|| format!("{activation:?} of {value} is {}", y[i]), off < 1e-6);
        let off = (f64::from(dx[i]) - reference::derivative(activation, value)).abs();
        checks.verify(|| format!("{activation:?}' of {value} is {}", dx[i]), off < 1e-6);
    }
    Ok(())
}

pub(crate) fn cast(checks: &mut Checks<'_>) -> Result<()> {
    for n in [0, 1, 7, 8, 33, 9001] {
        let mut x = numbers::<f32>(1, n);
        // Ties, extremes and what is no number.
        let special = [1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, f32::MAX, f32::INFINITY, f32::NAN, -0.0, 1e-40];
        for (x, s) in x.iter_mut().zip(special) {
            *x = s;
        }
        let (gx, out, back) = (checks.up(&x)?, checks.poisoned::<bf16>(n)?, checks.poisoned::<f32>(n)?);
        casts::to_bf16(checks.gpu, gx.view(), out.view())?;
        casts::to_f32(checks.gpu, out.view(), back.view())?;
        let got = checks.read::<bf16>("to_bf16", &out)?;
        let same = |(x, got): (&f32, &bf16)| {
            let expected = bf16::from_f32(*x);
            expected.to_bits() == got.to_bits() || expected.is_nan() && got.is_nan()
        };
        checks.verify(|| format!("to_bf16 of {n}"), x.iter().zip(&got).all(same));
        let wide = checks.read::<f32>("to_f32", &back)?;
        let same = |(wide, got): (&f32, &bf16)| wide.to_bits() == got.to_f32().to_bits() || wide.is_nan();
        checks.verify(|| format!("to_f32 of {n}"), wide.iter().zip(&got).all(same));
    }
    Ok(())
}

pub(crate) fn plain(checks: &mut Checks<'_>) -> Result<()> {
    for n in [1, 3, 8, 33, 4096, 9001] {
        passes::<f32>(checks, n, 0)?;
        passes::<bf16>(checks, n, 0)?;
        // Numbers that do not begin at a multiple of 16 bytes.
        passes::<f32>(checks, n, 1)?;
        passes::<bf16>(checks, n, 1)?;
    }
    Ok(())
}

fn passes<E: Number>(checks: &mut Checks<'_>, n: usize, shift: usize) -> Result<()> {
    let (x, y) = (numbers::<E>(1, n + shift), numbers::<E>(2, n));
    let gx = checks.up(&x)?;
    let (gx, x) = (gx.view().part(shift, n), exact(&x[shift..]));
    let sum = checks.out(&y)?;
    rows::add(checks.gpu, gx, sum.view())?;
    let expected: Vec<f64> = exact(&y).iter().zip(&x).map(|(y, x)| x + y).collect();
    checks.close::<E>(&format!("add of {n}"), &sum, &expected)?;
    let product = checks.out(&y)?;
    rows::multiply(checks.gpu, gx, product.view())?;
    let expected: Vec<f64> = exact(&y).iter().zip(&x).map(|(y, x)| x * y).collect();
    checks.close::<E>(&format!("multiply of {n}"), &product, &expected)?;
    let scaled = checks.poisoned::<E>(n)?;
    rows::scale(checks.gpu, -1.75, gx, scaled.view())?;
    let expected: Vec<f64> = x.iter().map(|x| -1.75 * x).collect();
    checks.close::<E>(&format!("scale of {n}"), &scaled, &expected)?;
    let full = checks.poisoned::<E>(n)?;
    rows::fill(checks.gpu, full.view(), 0.25)?;
    checks.within::<E>(&format!("fill of {n}"), &full, &vec![0.25; n], 0.0)?;
    checks.gpu.fill_zero(full.view())?;
    checks.within::<E>(&format!("fill_zero of {n}"), &full, &vec![0.0; n], 0.0)
}

pub(crate) fn reduce(checks: &mut Checks<'_>) -> Result<()> {
    let mut shapes: Vec<(usize, usize)> = Vec::new();
    for t in [0, 1, 7, 33, 129] {
        shapes.extend([1, 3, 24, 128, 300].map(|h| (t, h)));
    }
    shapes.push((2500, 31));
    if !checks.small {
        shapes.push((9000, 768));
    }
    for (t, h) in shapes {
        sums::<f32>(checks, t, h)?;
        sums::<bf16>(checks, t, h)?;
    }
    let n = 40_007;
    let mut x = numbers::<f32>(1, n);
    for i in [0, 5, 16_383, 16_384, 20_000, n - 1] {
        let old = x[i];
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            x[i] = bad;
            let (largest, squares) = whole(checks, &x)?;
            checks.verify(|| format!("{bad} at {i}: {largest}, {squares}"), largest.is_nan() && !squares.is_finite());
        }
        x[i] = -1e30;
        let (largest, _) = whole(checks, &x)?;
        checks.verify(|| format!("-1e30 at {i}: {largest}"), largest == 1e30);
        x[i] = old;
    }
    let (largest, squares) = whole(checks, &[])?;
    checks.verify(|| format!("of nothing: {largest}, {squares}"), largest == 0.0 && squares == 0.0);
    Ok(())
}

/// max |x| and Σ x².
fn whole(checks: &Checks<'_>, x: &[f32]) -> Result<(f32, f64)> {
    let gx = checks.up(x)?;
    let (largest, squares) = (checks.up(&[f32::NAN])?, checks.gpu.empty(1, DType::F64)?);
    reductions::max_abs(checks.gpu, gx.view(), largest.view())?;
    reductions::sum_of_squares(checks.gpu, gx.view(), squares.view())?;
    Ok((checks.gpu.read::<f32>(largest.view())?[0], checks.gpu.read::<f64>(squares.view())?[0]))
}

fn sums<E: Number>(checks: &mut Checks<'_>, t: usize, h: usize) -> Result<()> {
    use henson_kernels::cpu::reduce::reference;
    let x = numbers::<E>(1, t * h);
    let mut expected = vec![0.5; h];
    reference::column_sums(&exact(&x), &mut expected);
    let gx = checks.up(&x)?;
    let mut run = || -> Result<Vec<u32>> {
        let out = checks.out::<f32>(&vec![0.5; h])?;
        reductions::column_sums(checks.gpu, gx.view(), Sum::add(out.view()))?;
        checks.close::<f32>(&format!("column_sums of {t}×{h}"), &out, &expected)?;
        bits::<f32>(checks.gpu, &out)
    };
    let (first, second) = (run()?, run()?);
    checks.verify(|| format!("column_sums of {t}×{h}: two runs differ"), first == second);

    let x = numbers::<f32>(2, t * h);
    let (largest, squares) = whole(checks, &x)?;
    let expected = reference::sum_of_squares(&exact(&x));
    let off = error(&[squares], &[expected]);
    checks.verify(|| format!("sum_of_squares: {squares} for {expected}"), off <= TOLERANCE_F32 / 10.0);
    let expected = reference::max_abs(&exact(&x));
    checks.verify(|| format!("max_abs: {largest} for {expected}"), f64::from(largest) == expected);
    Ok(())
}
