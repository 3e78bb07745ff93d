//! Matrix products against the naive one in f64, with every finish, on shapes that suit the matrix units and on odd ones.

use half::bf16;
use henson_kernels::cpu::activation::{Activation, reference as activations};
use henson_kernels::cuda::Result;
use henson_kernels::cuda::matmul::{Finish, Matrix, product};

use crate::check::{Checks, Number, bits, exact, numbers, tolerance};

/// m, n, k.
const SHAPES: [(usize, usize, usize); 8] =
    [(1, 1, 1), (7, 5, 3), (33, 24, 17), (2, 768, 768), (64, 64, 64), (129, 300, 128), (100, 2, 768), (256, 512, 320)];

pub(crate) fn products(checks: &mut Checks<'_>) -> Result<()> {
    // Timing hundreds of shapes would take longer than all the rest; `choices` does it.
    checks.gpu.blas()?.set_search(false);
    for (m, n, k) in SHAPES {
        for (ta, tb) in [(false, false), (false, true), (true, false), (true, true)] {
            plain::<f32, f32>(checks, m, n, k, ta, tb)?;
            plain::<bf16, bf16>(checks, m, n, k, ta, tb)?;
            plain::<bf16, f32>(checks, m, n, k, ta, tb)?;
        }
        finishes::<f32, f32>(checks, m, n, k)?;
        finishes::<bf16, bf16>(checks, m, n, k)?;
        finishes::<bf16, f32>(checks, m, n, k)?;
        row_sums::<f32>(checks, m, n, k)?;
        row_sums::<bf16>(checks, m, n, k)?;
    }
    tf32(checks)?;
    checks.gpu.blas()?.set_search(true);
    Ok(())
}

/// A as it lies in memory: m×k, or k×m where it is to be transposed.
struct Operand<E> {
    data: Vec<E>,
    /// m×k.
    exact: Vec<f64>,
}

fn operand<E: Number>(seed: u64, rows: usize, columns: usize, transposed: bool) -> Operand<E> {
    let data = numbers::<E>(seed, rows * columns);
    let wide = exact(&data);
    let at = |i: usize| if transposed { wide[i % columns * rows + i / columns] } else { wide[i] };
    let exact = (0..rows * columns).map(at).collect();
    Operand { data, exact }
}

pub(crate) fn multiply(a: &[f64], b: &[f64], m: usize, n: usize, k: usize) -> Vec<f64> {
    // The order of loops makes it fast; the sums are the reference's.
    let mut c = vec![0.0; m * n];
    for i in 0..m {
        for l in 0..k {
            for j in 0..n {
                c[i * n + j] += a[i * k + l] * b[l * n + j];
            }
        }
    }
    c
}

fn view(buffer: &henson_kernels::cuda::Buffer, rows: usize, columns: usize, transposed: bool) -> Matrix<'_> {
    if transposed {
        Matrix::new(buffer.view(), columns, rows).transposed()
    } else {
        Matrix::new(buffer.view(), rows, columns)
    }
}

fn plain<E: Number, O: Number>(
    checks: &mut Checks<'_>,
    m: usize,
    n: usize,
    k: usize,
    ta: bool,
    tb: bool,
) -> Result<()> {
    let what = format!("product {m}×{n}×{k} of {:?}, transposed {ta} {tb}", E::DTYPE);
    let (a, b) = (operand::<E>(1, m, k, ta), operand::<E>(2, k, n, tb));
    let (ga, gb) = (checks.up(&a.data)?, checks.up(&b.data)?);
    let (ma, mb) = (view(&ga, m, k, ta), view(&gb, k, n, tb));
    let exact_product = multiply(&a.exact, &b.exact, m, n, k);

    let out = checks.poisoned::<O>(m * n)?;
    product(checks.gpu, ma, mb, Matrix::new(out.view(), m, n), Finish::default())?;
    checks.close::<O>(&what, &out, &exact_product)?;
    let first = bits::<O>(checks.gpu, &out)?;
    product(checks.gpu, ma, mb, Matrix::new(out.view(), m, n), Finish::default())?;
    let second = bits::<O>(checks.gpu, &out)?;
    checks.verify(|| format!("{what}: two runs differ"), first == second);

    // Scaled, added to what is there, with gaps between rows that nobody may touch.
    let stride = n + 3;
    let start = numbers::<O>(3, m * stride);
    let out = checks.out(&start)?;
    let finish = Finish { scale: 0.5, accumulate: true, ..Finish::default() };
    let target = Matrix::strided(out.view(), m, n, stride);
    product(checks.gpu, ma, mb, target, finish)?;
    let mut expected = exact(&start);
    for i in 0..m {
        for j in 0..n {
            expected[i * stride + j] += 0.5 * exact_product[i * n + j];
        }
    }
    checks.close::<O>(&format!("accumulated {what}"), &out, &expected)?;
    let got = checks.read::<O>(&what, &out)?;
    let untouched = (0..m * stride).all(|i| i % stride < n || got[i] == start[i]);
    checks.verify(|| format!("{what}: wrote between rows"), untouched);
    Ok(())
}

/// Bias, and GELU's tanh form forwards and backwards, of x·weightᵀ.
fn finishes<E: Number, O: Number>(checks: &mut Checks<'_>, m: usize, n: usize, k: usize) -> Result<()> {
    let what = format!("{m}×{n}×{k} of {:?}", E::DTYPE);
    let (a, b) = (operand::<E>(1, m, k, false), operand::<E>(2, k, n, true));
    let (ga, gb) = (checks.up(&a.data)?, checks.up(&b.data)?);
    let (ma, mb) = (view(&ga, m, k, false), view(&gb, k, n, true));
    // Small enough for GELU to be curved.
    let scale = 1.0 / (k as f32).sqrt();
    let z: Vec<f64> = multiply(&a.exact, &b.exact, m, n, k).iter().map(|x| x * f64::from(scale)).collect();
    let bias = numbers::<O>(4, n);
    let wide_bias = exact(&bias);
    let (gbias, gbias_f32) =
        (checks.up(&bias)?, checks.up(&exact(&bias).iter().map(|x| *x as f32).collect::<Vec<_>>())?);
    let with_bias: Vec<f64> = z.iter().enumerate().map(|(i, z)| z + wide_bias[i % n]).collect();
    for (bias, kind) in [(gbias.view(), "own"), (gbias_f32.view(), "f32")] {
        let out = checks.poisoned::<O>(m * n)?;
        let finish = Finish { scale, bias: Some(bias), ..Finish::default() };
        product(checks.gpu, ma, mb, Matrix::new(out.view(), m, n), finish)?;
        checks.close::<O>(&format!("product with {kind} bias, {what}"), &out, &with_bias)?;
    }
    for (bias, input) in [(Some(gbias.view()), &with_bias), (None, &z)] {
        let (out, kept) = (checks.poisoned::<O>(m * n)?, checks.poisoned::<O>(m * n)?);
        let finish = Finish { scale, bias, gelu_tanh: Some(kept.view()), ..Finish::default() };
        product(checks.gpu, ma, mb, Matrix::new(out.view(), m, n), finish)?;
        checks.close::<O>(&format!("what GELU keeps, {what}, bias {}", bias.is_some()), &kept, input)?;
        let value = |z: &f64| activations::forward(Activation::GeluTanh, *z);
        let expected: Vec<f64> = input.iter().map(value).collect();
        // The library's tanh has an error of its own, some 5·10⁻⁴ of the value: an instruction of the chip.
        let bound = tolerance::<O>().max(2e-3);
        checks.within::<O>(&format!("product with GELU, {what}, bias {}", bias.is_some()), &out, &expected, bound)?;
    }
    let kept = numbers::<O>(5, m * n);
    let (gkept, out) = (checks.up(&kept)?, checks.poisoned::<O>(m * n)?);
    let finish = Finish { scale, gelu_tanh_gradient: Some(gkept.view()), ..Finish::default() };
    product(checks.gpu, ma, mb, Matrix::new(out.view(), m, n), finish)?;
    let slope = |x: &f64| activations::derivative(Activation::GeluTanh, *x);
    let expected: Vec<f64> = z.iter().zip(&exact(&kept)).map(|(z, x)| z * slope(x)).collect();
    let bound = tolerance::<O>().max(2e-3);
    checks.within::<O>(&format!("product with GELU's gradient, {what}"), &out, &expected, bound)
}

/// A weight's gradient with its bias' gradient beside it: dzᵀ·x, k rows of dz with m columns.
fn row_sums<E: Number>(checks: &mut Checks<'_>, m: usize, n: usize, k: usize) -> Result<()> {
    let what = format!("{m}×{n}×{k} of {:?}", E::DTYPE);
    let (a, b) = (operand::<E>(1, m, k, true), operand::<E>(2, k, n, false));
    let (ga, gb) = (checks.up(&a.data)?, checks.up(&b.data)?);
    let (ma, mb) = (view(&ga, m, k, true), view(&gb, k, n, false));
    let expected = multiply(&a.exact, &b.exact, m, n, k);
    for add in [false, true] {
        let start = if add { 0.5 } else { f32::NAN };
        let (out, sums) = (checks.out(&vec![start; m * n])?, checks.out(&vec![start; m])?);
        let finish = Finish { row_sums: Some((sums.view(), add)), accumulate: add, ..Finish::default() };
        product(checks.gpu, ma, mb, Matrix::new(out.view(), m, n), finish)?;
        let by = if add { 0.5 } else { 0.0 };
        let added: Vec<f64> = expected.iter().map(|x| x + by).collect();
        checks.close::<f32>(&format!("weight gradient with row sums, {what}, add {add}"), &out, &added)?;
        let rows: Vec<f64> = (0..m).map(|i| by + a.exact[i * k..(i + 1) * k].iter().sum::<f64>()).collect();
        checks.close::<f32>(&format!("row sums, {what}, add {add}"), &sums, &rows)?;
    }
    Ok(())
}

/// TF32 is used where it is asked for, and nowhere else: its error is far above that of f32.
fn tf32(checks: &mut Checks<'_>) -> Result<()> {
    let (m, n, k) = (256, 256, 256);
    let (a, b) = (operand::<f32>(1, m, k, false), operand::<f32>(2, k, n, false));
    let (ga, gb) = (checks.up(&a.data)?, checks.up(&b.data)?);
    let expected = multiply(&a.exact, &b.exact, m, n, k);
    let out = checks.poisoned::<f32>(m * n)?;
    let finish = Finish { tf32: true, ..Finish::default() };
    product(checks.gpu, view(&ga, m, k, false), view(&gb, k, n, false), Matrix::new(out.view(), m, n), finish)?;
    let got = exact(&checks.read::<f32>("tf32", &out)?);
    let error = crate::check::error(&got, &expected);
    checks.verify(|| format!("TF32's error is {error:.1e}"), error > 1e-5 && error < 2e-3);
    Ok(())
}

/// Algorithms are searched, written down, read again, and give the same bits.
pub(crate) fn choices(checks: &mut Checks<'_>) -> Result<()> {
    // Large enough to be searched for.
    let (m, n, k) = (4096, 512, 512);
    let (a, b) = (operand::<bf16>(1, m, k, false), operand::<bf16>(2, k, n, true));
    let (ga, gb) = (checks.up(&a.data)?, checks.up(&b.data)?);
    let (ma, mb) = (view(&ga, m, k, false), view(&gb, k, n, true));
    let expected = multiply(&a.exact, &b.exact, m, n, k);
    let start = numbers::<f32>(3, m * n);
    let out = checks.out(&start)?;
    // While it searches, an output that is added to must not be touched.
    let finish = Finish { accumulate: true, ..Finish::default() };
    product(checks.gpu, ma, mb, Matrix::new(out.view(), m, n), finish)?;
    let added: Vec<f64> = exact(&start).iter().zip(&expected).map(|(s, e)| s + e).collect();
    checks.close::<f32>("product after a search", &out, &added)?;
    let first = bits::<f32>(checks.gpu, &out)?;

    let blas = checks.gpu.blas()?;
    let text = blas.choices(checks.gpu);
    checks.verify(|| format!("no choice for the shape in:\n{text}"), text.contains("4096 512 512 "));
    let other = henson_kernels::cuda::Gpu::new(&henson_kernels::cuda::Options::default())?;
    let read = other.blas()?.load_choices(&other, &text)?;
    checks.verify(|| "choices of the same GPU were ignored".into(), read);
    other.blas()?.set_search(false);
    let (ga, gb) = (other.upload(&a.data)?, other.upload(&b.data)?);
    let out = other.upload(&start)?;
    let (ma, mb) = (view(&ga, m, k, false), view(&gb, k, n, true));
    product(&other, ma, mb, Matrix::new(out.view(), m, n), finish)?;
    let second: Vec<u32> = other.read::<f32>(out.view())?.iter().map(|x| x.to_bits()).collect();
    checks.verify(|| "a stored choice gives other bits".into(), first == second);
    let again = other.blas()?.choices(&other);
    checks.verify(|| "choices change when they are read".into(), again == text);
    let ignored = !other.blas()?.load_choices(&other, "henson products 1, cuBLASLt 1, another GPU\n")?;
    checks.verify(|| "choices of another GPU were taken".into(), ignored);
    let broken = text.replacen("4096 512 512 ", "4096 512 ", 1);
    let refused = other.blas()?.load_choices(&other, &broken).is_err();
    checks.verify(|| "a broken line was taken".into(), refused);
    Ok(())
}
