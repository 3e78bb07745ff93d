//! Activation functions, element by element. The matrix product applies them while it writes back, by the same two
//! functions; the kernels here are for where no product stands before.
//!
//! Over [−8, 8] every activation and every derivative is within 10⁻⁶ of the exact one in f32 (tested).

use super::Cpu;
use super::math;
use super::simd::{Element, Simd, read, write};

/// The definition, in f64.
pub mod reference {
    use super::Activation;
    use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI, PI};

    /// erf by Σ 2ⁿ z²ⁿ⁺¹ / (2n+1)!!, whose terms all have one sign: full precision.
    fn erf(z: f64) -> f64 {
        if z.abs() > 6.0 {
            return z.signum();
        }
        let (mut term, mut sum, mut n) = (z, z, 1.0);
        while term.abs() > 1e-17 * sum.abs() {
            term *= 2.0 * z * z / (2.0 * n + 1.0);
            sum += term;
            n += 1.0;
        }
        FRAC_2_SQRT_PI * (-z * z).exp() * sum
    }

    fn tanh_of_gelu(x: f64) -> f64 {
        ((2.0 / PI).sqrt() * (x + 0.044_715 * x * x * x)).tanh()
    }

    /// The activation of x.
    pub fn forward(activation: Activation, x: f64) -> f64 {
        match activation {
            Activation::None => x,
            Activation::Gelu => 0.5 * x * (1.0 + erf(x * FRAC_1_SQRT_2)),
            Activation::GeluTanh => 0.5 * x * (1.0 + tanh_of_gelu(x)),
            Activation::Relu => x.max(0.0),
            Activation::Tanh => x.tanh(),
            Activation::Silu => x / (1.0 + (-x).exp()),
        }
    }

    /// Its derivative at x.
    pub fn derivative(activation: Activation, x: f64) -> f64 {
        match activation {
            Activation::None => 1.0,
            Activation::Gelu => 0.5 * (1.0 + erf(x * FRAC_1_SQRT_2)) + x * (-0.5 * x * x).exp() / (2.0 * PI).sqrt(),
            Activation::GeluTanh => {
                let t = tanh_of_gelu(x);
                0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * (2.0 / PI).sqrt() * (1.0 + 3.0 * 0.044_715 * x * x)
            }
            Activation::Relu => f64::from(x > 0.0),
            Activation::Tanh => 1.0 - x.tanh() * x.tanh(),
            Activation::Silu => {
                let share = 1.0 / (1.0 + (-x).exp());
                share * (1.0 + x * (1.0 - share))
            }
        }
    }
}

/// What a layer applies to each of its outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// Nothing.
    None,
    /// x·Φ(x) with the error function: `gelu` of Hugging Face and of Google's first releases.
    Gelu,
    /// GELU's approximation by tanh: google-research/bert `modeling.py` 264-277, `gelu_new` of Hugging Face.
    GeluTanh,
    /// max(x, 0); its derivative at 0 is 0.
    Relu,
    /// The pooler's.
    Tanh,
    /// x·σ(x), in gated layers.
    Silu,
}

/// √(2/π) and its product with 0.044715.
const SQRT_2_PI: f32 = 0.797_884_6;
const CUBIC: f32 = SQRT_2_PI * 0.044_715;
/// 1/√(2π).
const NORMAL_PEAK: f32 = 0.398_942_3;

#[allow(clippy::undocumented_unsafe_blocks, reason = "compositions of `Simd`: sound where the instruction set is")]
impl Activation {
    /// The activation of each lane. A NaN stays one.
    ///
    /// # Safety
    /// The instruction set must be there.
    #[inline(always)]
    pub(crate) unsafe fn apply<S: Simd>(self, x: S::V) -> S::V {
        unsafe {
            match self {
                Self::None => x,
                Self::Gelu => {
                    let half = S::mul(x, S::splat(0.5));
                    S::mul_add(half, math::erf_and_exp::<S>(x).0, half)
                }
                Self::GeluTanh => {
                    // ½(1 + tanh u) = 1/(1 + e^(−2u)).
                    let e = math::exp::<S>(S::mul(gelu_tanh_argument::<S>(x).0, S::splat(-2.0)));
                    S::div(x, S::add(S::splat(1.0), e))
                }
                // Of two operands of which one is a NaN, `max` gives the second.
                Self::Relu => S::max(S::splat(0.0), x),
                Self::Tanh => tanh::<S>(x),
                Self::Silu => S::div(x, S::add(S::splat(1.0), math::exp::<S>(S::sub(S::splat(0.0), x)))),
            }
        }
    }

    /// The activation of each lane and its derivative there, at little more than the cost of one.
    ///
    /// # Safety
    /// The instruction set must be there.
    #[inline(always)]
    pub(crate) unsafe fn apply_with_derivative<S: Simd>(self, x: S::V) -> (S::V, S::V) {
        unsafe {
            match self {
                Self::Gelu => {
                    let (erf, e) = math::erf_and_exp::<S>(x);
                    let share = S::mul_add(erf, S::splat(0.5), S::splat(0.5));
                    (S::mul(x, share), S::mul_add(S::mul(x, e), S::splat(NORMAL_PEAK), share))
                }
                Self::Tanh => {
                    let t = tanh::<S>(x);
                    (t, S::sub(S::splat(1.0), S::mul(t, t)))
                }
                Self::Silu => {
                    let share = sigmoid::<S>(x);
                    let y = S::mul(x, share);
                    (y, S::mul_add(y, S::sub(S::splat(1.0), share), share))
                }
                _ => (self.apply::<S>(x), self.derivative::<S>(x)),
            }
        }
    }

    /// The derivative at each lane of the input x (not of the output).
    ///
    /// # Safety
    /// The instruction set must be there.
    #[inline(always)]
    pub(crate) unsafe fn derivative<S: Simd>(self, x: S::V) -> S::V {
        unsafe {
            let (half, one) = (S::splat(0.5), S::splat(1.0));
            match self {
                Self::None => one,
                Self::Gelu => {
                    let (erf, e) = math::erf_and_exp::<S>(x);
                    let density = S::mul(S::mul(x, e), S::splat(NORMAL_PEAK));
                    S::add(S::mul_add(erf, half, half), density)
                }
                Self::GeluTanh => {
                    let (u, square) = gelu_tanh_argument::<S>(x);
                    // With e = e^(−2|u|): |tanh u| = (1 − e)/(1 + e), and 1 − tanh² u = 4e/(1 + e)² without cancellation.
                    let e = math::exp::<S>(S::mul(S::abs(u), S::splat(-2.0)));
                    let r = S::div(one, S::add(one, e));
                    let t = S::copysign(S::mul(S::sub(one, e), r), u);
                    let slope = S::mul_add(square, S::splat(6.0 * CUBIC), S::splat(2.0 * SQRT_2_PI));
                    S::mul_add(S::mul(x, slope), S::mul(e, S::mul(r, r)), S::mul_add(t, half, half))
                }
                // 1 where 0 − x is negative, that is where x > 0.
                Self::Relu => S::sub(half, S::copysign(half, S::sub(S::splat(0.0), x))),
                Self::Tanh => {
                    let t = tanh::<S>(x);
                    S::sub(one, S::mul(t, t))
                }
                Self::Silu => {
                    let share = sigmoid::<S>(x);
                    S::mul_add(S::mul(x, share), S::sub(one, share), share)
                }
            }
        }
    }
}

/// √(2/π)·(x + 0.044715·x³) and x², where |x| > 10 counts as 10 in the square: tanh is ±1 there, and nothing overflows.
#[inline(always)]
unsafe fn gelu_tanh_argument<S: Simd>(x: S::V) -> (S::V, S::V) {
    // SAFETY: the caller has the instruction set.
    unsafe {
        let square = S::min(S::splat(100.0), S::mul(x, x));
        (S::mul(x, S::mul_add(square, S::splat(CUBIC), S::splat(SQRT_2_PI))), square)
    }
}

/// 1/(1 + e⁻ˣ).
#[inline(always)]
pub(super) unsafe fn sigmoid<S: Simd>(x: S::V) -> S::V {
    // SAFETY: the caller has the instruction set.
    unsafe {
        let one = S::splat(1.0);
        S::div(one, S::add(one, math::exp::<S>(S::sub(S::splat(0.0), x))))
    }
}

/// tanh that lets a NaN through, which `math::exp` takes for a large number.
#[inline(always)]
unsafe fn tanh<S: Simd>(x: S::V) -> S::V {
    // SAFETY: the caller has the instruction set.
    unsafe {
        let finite = S::max(S::splat(-20.0), S::min(S::splat(20.0), x));
        S::mul_add(finite, S::splat(0.0), math::tanh::<S>(finite))
    }
}

/// y = activation(x).
pub fn forward<E: Element>(cpu: &Cpu, activation: Activation, x: &[E], y: &mut [E]) {
    assert!(x.len() == y.len(), "activation: lengths differ");
    cpu.for_rows(y, 1, LEAST, |range, y| {
        forward_range(cpu.isa(), activation, &x[range], y);
    });
}

/// dx = dy·activation′(x), where x is what the activation was applied to.
pub fn backward<E: Element>(cpu: &Cpu, activation: Activation, x: &[E], dy: &[E], dx: &mut [E]) {
    assert!(x.len() == dy.len() && x.len() == dx.len(), "activation: lengths differ");
    cpu.for_rows(dx, 1, LEAST, |range, dx| {
        backward_range(cpu.isa(), activation, &x[range.clone()], &dy[range], dx);
    });
}

/// Elements that are worth a task: some microseconds.
const LEAST: usize = 4096;

dispatch! { fn forward_range<E>(activation: Activation, x: &[E], y: &mut [E]) = forward_body }
dispatch! { fn backward_range<E>(activation: Activation, x: &[E], dy: &[E], dx: &mut [E]) = backward_body }

/// # Safety
/// The instruction set must be there.
#[inline(always)]
unsafe fn forward_body<S: Simd, E: Element>(activation: Activation, x: &[E], y: &mut [E]) {
    // SAFETY: the caller has the instruction set. One loop for each activation, without a branch inside.
    unsafe {
        match activation {
            Activation::None => y.copy_from_slice(x),
            Activation::Gelu => forward_loop::<S, E>(Activation::Gelu, x, y),
            Activation::GeluTanh => forward_loop::<S, E>(Activation::GeluTanh, x, y),
            Activation::Relu => forward_loop::<S, E>(Activation::Relu, x, y),
            Activation::Tanh => forward_loop::<S, E>(Activation::Tanh, x, y),
            Activation::Silu => forward_loop::<S, E>(Activation::Silu, x, y),
        }
    }
}

#[inline(always)]
unsafe fn forward_loop<S: Simd, E: Element>(activation: Activation, x: &[E], y: &mut [E]) {
    for i in (0..x.len()).step_by(S::LANES) {
        // SAFETY: i < x.len() = y.len(); the caller has the instruction set.
        unsafe { write::<S, E>(y, i, activation.apply::<S>(read::<S, E>(x, i))) };
    }
}

/// # Safety
/// The instruction set must be there.
#[inline(always)]
unsafe fn backward_body<S: Simd, E: Element>(activation: Activation, x: &[E], dy: &[E], dx: &mut [E]) {
    // SAFETY: as in `forward_body`.
    unsafe {
        match activation {
            Activation::None => dx.copy_from_slice(dy),
            Activation::Gelu => backward_loop::<S, E>(Activation::Gelu, x, dy, dx),
            Activation::GeluTanh => backward_loop::<S, E>(Activation::GeluTanh, x, dy, dx),
            Activation::Relu => backward_loop::<S, E>(Activation::Relu, x, dy, dx),
            Activation::Tanh => backward_loop::<S, E>(Activation::Tanh, x, dy, dx),
            Activation::Silu => backward_loop::<S, E>(Activation::Silu, x, dy, dx),
        }
    }
}

#[inline(always)]
unsafe fn backward_loop<S: Simd, E: Element>(activation: Activation, x: &[E], dy: &[E], dx: &mut [E]) {
    for i in (0..x.len()).step_by(S::LANES) {
        // SAFETY: i is below the three lengths, which are one; the caller has the instruction set.
        unsafe {
            let slope = activation.derivative::<S>(read::<S, E>(x, i));
            write::<S, E>(dx, i, S::mul(read::<S, E>(dy, i), slope));
        }
    }
}
