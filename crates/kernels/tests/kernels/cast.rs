//! Casts: every kernel set against the `half` crate, bit for bit.

use crate::common::*;
use henson_kernels::bf16;
use henson_kernels::cpu::cast::{reference, to_bf16, to_f32};
use henson_kernels::cpu::{Cpu, Isa};

/// Equal bits; any NaN for a NaN; and zero for a denormal number where the instruction set says so.
fn same(cpu: &Cpu, x: f32, got: bf16, expected: bf16) -> bool {
    let flushed = x.is_subnormal() && [Isa::Avx512Bf16, Isa::Amx].contains(&cpu.isa()) && got.to_f32() == 0.0;
    got.to_bits() == expected.to_bits() || (got.is_nan() && expected.is_nan()) || flushed
}

fn check(cpu: &Cpu, x: &[f32]) {
    let mut narrow = poisoned::<bf16>(x.len());
    to_bf16(cpu, x, &mut narrow);
    for ((x, got), expected) in x.iter().zip(&narrow).zip(reference::to_bf16(x)) {
        assert!(same(cpu, *x, *got, expected), "{x:e} became {got:?}, not {expected:?}, on {cpu:?}");
    }
    let mut wide = poisoned::<f32>(x.len());
    to_f32(cpu, &narrow, &mut wide);
    for (got, expected) in wide.iter().zip(reference::to_f32(&narrow)) {
        assert!(got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan(), "{got} on {cpu:?}");
    }
}

#[test]
fn casts_are_those_of_half() {
    // Around every bf16: itself, ties to the even and to the odd side, and their neighbours.
    let bits = (0..=u16::MAX)
        .flat_map(|high| [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff].map(|low| f32::from_bits(u32::from(high) << 16 | low)));
    let all: Vec<f32> = bits.collect();
    for cpu in contexts() {
        check(&cpu, &all);
        for n in [0, 1, 3, 7, 24, 33, 129, 300] {
            check(&cpu, &numbers::<f32>(n as u64, n));
        }
    }
}
