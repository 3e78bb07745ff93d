//! Between f32 and bf16.
//!
//! Rounding is to nearest, ties to even, bit for bit as in the `half` crate; a NaN stays a NaN. One exception: the
//! instruction of [`Isa::Avx512Bf16`](super::Isa) takes numbers below 2⁻¹²⁶ (denormal ones) as zero.

use half::bf16;

use super::simd::{Simd, read, write};
use super::{Cpu, SharedMut};

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
    let out = SharedMut::new(out);
    cpu.for_ranges(x.len(), LEAST, |_, range| {
        // SAFETY: ranges are disjoint.
        let out = unsafe { out.slice(range.start, range.len()) };
        narrow(cpu.isa(), &x[range], out);
    });
}

dispatch! { fn narrow(x: &[f32], out: &mut [bf16]) = narrow_body }

/// # Safety
/// The instruction set must be there.
#[inline(always)]
unsafe fn narrow_body<S: Simd>(x: &[f32], out: &mut [bf16]) {
    for i in (0..x.len()).step_by(S::LANES) {
        // SAFETY: i < x.len() = out.len().
        unsafe { write::<S, bf16>(out, i, read::<S, f32>(x, i)) };
    }
}

/// Widens each number, exactly.
pub fn to_f32(cpu: &Cpu, x: &[bf16], out: &mut [f32]) {
    assert!(x.len() == out.len(), "to_f32: lengths differ");
    let out = SharedMut::new(out);
    cpu.for_ranges(x.len(), LEAST, |_, range| {
        // SAFETY: ranges are disjoint.
        let out = unsafe { out.slice(range.start, range.len()) };
        widen(cpu.isa(), &x[range], out);
    });
}

dispatch! { fn widen(x: &[bf16], out: &mut [f32]) = widen_body }

/// # Safety
/// The instruction set must be there.
#[inline(always)]
unsafe fn widen_body<S: Simd>(x: &[bf16], out: &mut [f32]) {
    for i in (0..x.len()).step_by(S::LANES) {
        // SAFETY: i < x.len() = out.len().
        unsafe { write::<S, f32>(out, i, read::<S, bf16>(x, i)) };
    }
}
