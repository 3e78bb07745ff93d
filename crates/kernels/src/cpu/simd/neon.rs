//! ARM's vectors: two of 128 bits make one of eight numbers, so that a tile of 6×16 results fills the 32 registers.

use std::arch::aarch64::*;
use std::arch::asm;

use super::{Simd, bf16};

/// Two vectors of four numbers each.
pub(crate) type Eight = [float32x4_t; 2];

#[inline(always)]
unsafe fn each(a: Eight, f: impl Fn(float32x4_t) -> float32x4_t) -> Eight {
    [f(a[0]), f(a[1])]
}

#[inline(always)]
unsafe fn both(a: Eight, b: Eight, f: impl Fn(float32x4_t, float32x4_t) -> float32x4_t) -> Eight {
    [f(a[0], b[0]), f(a[1], b[1])]
}

/// bf16 by integer arithmetic: to nearest even by adding half of the last place, less one where the last bit is even; a NaN
/// keeps its sign and becomes quiet. The processor's own instruction is not everywhere, and bits should not depend on it.
#[inline(always)]
unsafe fn narrow(v: float32x4_t) -> uint16x4_t {
    let bits = vreinterpretq_u32_f32(v);
    let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
    let rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    let quiet = vorrq_u32(bits, vdupq_n_u32(0x0040_0000));
    vshrn_n_u32::<16>(vbslq_u32(vceqq_f32(v, v), rounded, quiet))
}

#[inline(always)]
unsafe fn widen(halves: uint16x4_t) -> float32x4_t {
    vreinterpretq_f32_u32(vshlq_n_u32::<16>(vmovl_u16(halves)))
}

#[inline(always)]
unsafe fn power_of_two(n: float32x4_t) -> float32x4_t {
    vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127))))
}

/// `v` where the bits that `lanes` names are set.
#[inline(always)]
unsafe fn keep_four(v: float32x4_t, bits: u32, lanes: [u32; 4]) -> float32x4_t {
    let set = vtstq_u32(vdupq_n_u32(bits), vld1q_u32(lanes.as_ptr()));
    vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(v), set))
}

/// Exchanges rows and columns of 4×4 numbers.
#[inline(always)]
unsafe fn transpose_four(r: [float32x4_t; 4]) -> [float32x4_t; 4] {
    let double = |x| vreinterpretq_f64_f32(x);
    let (a, b) = (double(vtrn1q_f32(r[0], r[1])), double(vtrn2q_f32(r[0], r[1])));
    let (c, d) = (double(vtrn1q_f32(r[2], r[3])), double(vtrn2q_f32(r[2], r[3])));
    [
        vreinterpretq_f32_f64(vtrn1q_f64(a, c)),
        vreinterpretq_f32_f64(vtrn1q_f64(b, d)),
        vreinterpretq_f32_f64(vtrn2q_f64(a, c)),
        vreinterpretq_f32_f64(vtrn2q_f64(b, d)),
    ]
}

/// The first `n` elements, zeros after them.
#[inline(always)]
unsafe fn copied<T: Copy + Default>(p: *const T, n: usize) -> [T; 8] {
    let mut all = [T::default(); 8];
    std::ptr::copy_nonoverlapping(p, all.as_mut_ptr(), n);
    all
}

/// `acc` + a.low·b.low + a.high·b.high. Intrinsics for it are not stable.
#[inline(always)]
unsafe fn dot_four(acc: float32x4_t, a: float32x4_t, b: float32x4_t) -> float32x4_t {
    let mut sum = acc;
    asm!(
        "bfdot {sum:v}.4s, {a:v}.8h, {b:v}.8h",
        sum = inout(vreg) sum, a = in(vreg) a, b = in(vreg) b,
        options(pure, nomem, nostack, preserves_flags),
    );
    sum
}

macro_rules! neon {
    ($(#[$meta:meta])* $name:ident, $dot:literal, $dot_pairs:expr) => {
        $(#[$meta])*
        #[derive(Clone, Copy)]
        pub(crate) struct $name;

        impl Simd for $name {
            const LANES: usize = 8;
            const TILE_ROWS: usize = 6;
            const BF16_DOT: bool = $dot;
            type V = Eight;

            inlined! {
                splat(x: f32) -> Self::V = [vdupq_n_f32(x); 2];
                load(p: *const f32) -> Self::V = [vld1q_f32(p), vld1q_f32(p.add(4))];
                load_part(p: *const f32, n: usize) -> Self::V = Self::load(copied(p, n).as_ptr());
                load_bf16_part(p: *const bf16, n: usize) -> Self::V = Self::load_bf16(copied(p, n).as_ptr());
                add(a: Self::V, b: Self::V) -> Self::V = both(a, b, |a, b| vaddq_f32(a, b));
                sub(a: Self::V, b: Self::V) -> Self::V = both(a, b, |a, b| vsubq_f32(a, b));
                mul(a: Self::V, b: Self::V) -> Self::V = both(a, b, |a, b| vmulq_f32(a, b));
                div(a: Self::V, b: Self::V) -> Self::V = both(a, b, |a, b| vdivq_f32(a, b));
                // As x86 has it, and not `fmax`: the second where one is no number.
                max(a: Self::V, b: Self::V) -> Self::V = both(a, b, |a, b| vbslq_f32(vcgtq_f32(a, b), a, b));
                min(a: Self::V, b: Self::V) -> Self::V = both(a, b, |a, b| vbslq_f32(vcltq_f32(a, b), a, b));
                sqrt(a: Self::V) -> Self::V = each(a, |a| vsqrtq_f32(a));
                abs(a: Self::V) -> Self::V = each(a, |a| vabsq_f32(a));
                copysign(a: Self::V, b: Self::V) -> Self::V =
                    both(a, b, |a, b| vbslq_f32(vdupq_n_u32(1 << 31), b, a));
                mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V =
                    [vfmaq_f32(c[0], a[0], b[0]), vfmaq_f32(c[1], a[1], b[1])];
                round(a: Self::V) -> Self::V = each(a, |a| vrndnq_f32(a));
                pow2(n: Self::V) -> Self::V = each(n, |n| power_of_two(n));
                keep(v: Self::V, bits: u32) -> Self::V =
                    [keep_four(v[0], bits, [1, 2, 4, 8]), keep_four(v[1], bits, [16, 32, 64, 128])];
                sum(v: Self::V) -> f32 = vaddvq_f32(vaddq_f32(v[0], v[1]));
                largest(v: Self::V) -> f32 = vmaxnmvq_f32(vmaxnmq_f32(v[0], v[1]));
                dot_pairs(acc: Self::V, a: Self::V, b: Self::V) -> Self::V = $dot_pairs(acc, a, b);
                prefetch(p: *const u8) =
                    asm!("prfm pldl1keep, [{p}]", p = in(reg) p, options(nostack, readonly, preserves_flags));
                prefetch_to_write(p: *const u8) =
                    asm!("prfm pstl1keep, [{p}]", p = in(reg) p, options(nostack, readonly, preserves_flags));
            }
            #[inline(always)]
            unsafe fn store(p: *mut f32, v: Self::V) {
                vst1q_f32(p, v[0]);
                vst1q_f32(p.add(4), v[1]);
            }
            #[inline(always)]
            unsafe fn store_part(p: *mut f32, n: usize, v: Self::V) {
                let mut all = [0.0; 8];
                Self::store(all.as_mut_ptr(), v);
                std::ptr::copy_nonoverlapping(all.as_ptr(), p, n);
            }
            #[inline(always)]
            unsafe fn load_bf16(p: *const bf16) -> Self::V {
                let halves = vld1q_u16(p.cast());
                [widen(vget_low_u16(halves)), widen(vget_high_u16(halves))]
            }
            #[inline(always)]
            unsafe fn store_bf16(p: *mut bf16, v: Self::V) {
                vst1q_u16(p.cast(), vcombine_u16(narrow(v[0]), narrow(v[1])));
            }
            #[inline(always)]
            unsafe fn store_bf16_part(p: *mut bf16, n: usize, v: Self::V) {
                let mut all = [bf16::ZERO; 8];
                Self::store_bf16(all.as_mut_ptr(), v);
                std::ptr::copy_nonoverlapping(all.as_ptr(), p, n);
            }
            #[inline(always)]
            unsafe fn transpose(rows: &mut [Self::V; 16]) {
                let block = |row: usize, half: usize| {
                    transpose_four([rows[row][half], rows[row + 1][half], rows[row + 2][half], rows[row + 3][half]])
                };
                let blocks = [[block(0, 0), block(4, 0)], [block(0, 1), block(4, 1)]];
                for i in 0..4 {
                    rows[i] = [blocks[0][0][i], blocks[0][1][i]];
                    rows[4 + i] = [blocks[1][0][i], blocks[1][1][i]];
                }
            }
            #[inline(always)]
            unsafe fn load_pairs(low: *const bf16, high: *const bf16, n: usize) -> Self::V {
                let halves = |p: *const bf16| {
                    if n >= 8 { vld1q_u16(p.cast()) } else { vld1q_u16(copied(p.cast::<u16>(), n).as_ptr()) }
                };
                let (low, high) = (halves(low), halves(high));
                [
                    vreinterpretq_f32_u16(vzip1q_u16(low, high)),
                    vreinterpretq_f32_u16(vzip2q_u16(low, high)),
                ]
            }
        }
    };
}

neon!(
    /// 128-bit vectors with fused multiply-add, which every 64-bit ARM has.
    Neon, false, |acc, _a, _b| acc
);
neon!(
    /// The same with the bf16 dot product, which takes denormal numbers as zero.
    NeonBf16, true, |acc: Eight, a: Eight, b: Eight| [dot_four(acc[0], a[0], b[0]), dot_four(acc[1], a[1], b[1])]
);
