//! Between f32 and bf16.
//!
//! Rounding is to nearest, ties to even, bit for bit as in the `half` crate; a NaN stays a NaN. One exception: the
//! instruction of [`Isa::Avx512Bf16`](super::Isa) takes numbers below 2⁻¹²⁶ (denormal ones) as zero.

use half::bf16;

use super::simd::{Simd, read, write};
use super::{Cpu, Element};

/// The definition.
pub mod reference {
    use half::bf16;

    /// The nearest bf16, of two the even one.
    pub fn to_bf16(x: &[f32]) -> Vec<bf16> {
        x.iter().map(|x| bf16::from_f32(*x)).collect()
    }

    /// The same number.
    pub fn to_f32(x: &[bf16]) -> Vec<f32> {
        x.iter().map(|x| x.to_f32()).collect()
    }
}

/// Elements that are worth a task.
const LEAST: usize = 16384;

/// Rounds each number to bf16.
pub fn to_bf16(cpu: &Cpu, x: &[f32], out: &mut [bf16]) {
    assert!(x.len() == out.len(), "to_bf16: lengths differ");
    cpu.for_rows(out, 1, LEAST, |range, out| convert(cpu.isa(), &x[range], out));
}

/// Widens each number, exactly.
pub fn to_f32(cpu: &Cpu, x: &[bf16], out: &mut [f32]) {
    assert!(x.len() == out.len(), "to_f32: lengths differ");
    cpu.for_rows(out, 1, LEAST, |range, out| convert(cpu.isa(), &x[range], out));
}

dispatch! { fn convert<A, B>(x: &[A], out: &mut [B]) = convert_body }

/// # Safety
/// The instruction set must be there.
#[inline(always)]
unsafe fn convert_body<S: Simd, A: Element, B: Element>(x: &[A], out: &mut [B]) {
    for i in (0..x.len()).step_by(S::LANES) {
        // SAFETY: i < x.len() = out.len().
        unsafe { write::<S, B>(out, i, read::<S, A>(x, i)) };
    }
}
