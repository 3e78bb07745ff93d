//! Vector forms of the functions that models need, with their errors stated and tested.
#![allow(
    unsafe_op_in_unsafe_fn,
    clippy::undocumented_unsafe_blocks,
    clippy::missing_safety_doc,
    reason = "compositions of `Simd` functions: sound whenever the instruction set is there"
)]

use super::simd::Simd;

/// eˣ with a relative error under 2·10⁻⁷; 0 below −87.3, 2¹²⁷·(1+…) above 88.
///
/// x = n·ln 2 + r with |r| ≤ ln 2 / 2, eʳ by its series to r⁷ (remainder under 10⁻⁸).
#[inline(always)]
pub(crate) unsafe fn exp<S: Simd>(x: S::V) -> S::V {
    // The bounds stand first: these instructions give their second operand where one is NaN, so NaN passes.
    let x = S::max(S::splat(-87.336_54), S::min(S::splat(88.0), x));
    let n = S::round(S::mul(x, S::splat(std::f32::consts::LOG2_E)));
    // ln 2 in two parts, so that the subtraction is exact to the last bit of x.
    let r = S::mul_add(n, S::splat(-0.693_359_4), x);
    let r = S::mul_add(n, S::splat(2.121_944_4e-4), r);
    let mut y = S::splat(1.0 / 5040.0);
    for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        y = S::mul_add(y, r, S::splat(c));
    }
    S::mul(y, S::pow2(n))
}

/// (erf(x/√2), e^(−x²/2)), absolute error of the first under 6·10⁻⁷.
///
/// Abramowitz and Stegun 7.1.26, whose exponential is also what the derivative of GELU needs.
#[inline(always)]
pub(crate) unsafe fn erf_and_exp<S: Simd>(x: S::V) -> (S::V, S::V) {
    let z = S::mul(S::abs(x), S::splat(std::f32::consts::FRAC_1_SQRT_2));
    let e = exp::<S>(S::mul(S::mul(z, z), S::splat(-1.0)));
    let t = S::div(S::splat(1.0), S::mul_add(z, S::splat(0.327_591_1), S::splat(1.0)));
    let mut y = S::splat(1.061_405_4);
    for c in [-1.453_152, 1.421_413_7, -0.284_496_74, 0.254_829_6] {
        y = S::mul_add(y, t, S::splat(c));
    }
    let erf = S::sub(S::splat(1.0), S::mul(S::mul(y, t), e));
    (S::copysign(erf, x), e)
}

/// tanh x with an absolute error under 3·10⁻⁷.
#[inline(always)]
pub(crate) unsafe fn tanh<S: Simd>(x: S::V) -> S::V {
    let e = exp::<S>(S::mul(S::abs(x), S::splat(-2.0)));
    let y = S::div(S::sub(S::splat(1.0), e), S::add(S::splat(1.0), e));
    S::copysign(y, x)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;

    #[inline(always)]
    unsafe fn apply<S: Simd>(x: &[f32], out: &mut [[f32; 4]]) {
        for (x, out) in x.iter().zip(out) {
            let v = S::splat(*x);
            let (erf, half_square) = erf_and_exp::<S>(v);
            let n = S::LANES as f32;
            *out = [S::sum(exp::<S>(v)) / n, S::sum(erf) / n, S::sum(half_square) / n, S::sum(tanh::<S>(v)) / n];
        }
    }
    dispatch!(fn run(x: &[f32], out: &mut [[f32; 4]]) = apply);

    /// erf by its series, in f64: good to 10⁻¹³ for |x| < 4.
    fn erf(x: f64) -> f64 {
        let (mut term, mut sum, mut n) = (x, x, 0.0);
        while term.abs() > 1e-17 {
            n += 1.0;
            term *= -x * x / n;
            sum += term / (2.0 * n + 1.0);
        }
        sum * 2.0 / std::f64::consts::PI.sqrt()
    }

    #[test]
    fn errors_are_as_stated() {
        let x: Vec<f32> = (-5000..=5000).map(|i| i as f32 * 1e-3).collect();
        let wide: Vec<f32> = (-8400..=8400).map(|i| i as f32 * 1e-2).collect();
        for isa in Isa::available() {
            let mut out = vec![[0.0; 4]; wide.len()];
            run(isa, &wide, &mut out);
            for (x, out) in wide.iter().zip(&out) {
                let exact = f64::from(*x).exp();
                assert!((f64::from(out[0]) - exact).abs() <= 3e-7 * exact, "{isa}: exp({x}) = {} not {exact}", out[0]);
            }
            let mut out = vec![[0.0; 4]; x.len()];
            run(isa, &x, &mut out);
            for (x, out) in x.iter().zip(&out) {
                let x = f64::from(*x);
                let error = (f64::from(out[1]) - erf(x * std::f64::consts::FRAC_1_SQRT_2)).abs();
                assert!(error <= 6e-7, "{isa}: erf({x}/√2) is off by {error}");
                assert!((f64::from(out[2]) - (-x * x / 2.0).exp()).abs() <= 4e-7, "{isa}: exp(-{x}²/2)");
                assert!((f64::from(out[3]) - x.tanh()).abs() <= 3e-7, "{isa}: tanh({x})");
            }
            let mut out = [[0.0; 4]; 3];
            run(isa, &[f32::NEG_INFINITY, -1e30, 1e30], &mut out);
            assert!(
                out[0][0] < 1e-37 && out[1][1] == -1.0 && out[2][1] == 1.0 && out[1][3] == -1.0 && out[2][3] == 1.0
            );
        }
    }
}
