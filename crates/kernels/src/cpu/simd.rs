//! Vectors of `f32` for every instruction set behind one trait, so that a kernel is written once.
//!
//! A kernel body is an `#[inline(always)] unsafe fn body<S: Simd, …>(…)`; [`dispatch!`] wraps it in one function per
//! instruction set with the matching `#[target_feature]`, into which everything is inlined. No vector crosses a
//! function border that is not inlined.
#![allow(
    unsafe_op_in_unsafe_fn,
    clippy::undocumented_unsafe_blocks,
    clippy::missing_safety_doc,
    reason = "all functions here are intrinsics in another dress: the caller guarantees that the instruction set is \
              there (`dispatch!` does) and that pointers are valid for the lanes that are read or written"
)]

use half::bf16;

use crate::philox::{DROPOUT_ROUNDS, philox_lanes};

/// A vector of `LANES` numbers and what can be done with it.
#[allow(unreachable_pub, reason = "public only for the bounds of the sealed `Element`")]
pub trait Simd: Copy + 'static {
    /// Numbers in a vector.
    const LANES: usize;
    /// Rows of the matrix product's register tile; its columns are `2 * LANES`.
    const TILE_ROWS: usize;
    /// Whether [`Simd::dot_pairs`] exists.
    const BF16_DOT: bool;
    type V: Copy;

    unsafe fn splat(x: f32) -> Self::V;
    unsafe fn load(p: *const f32) -> Self::V;
    unsafe fn store(p: *mut f32, v: Self::V);
    /// Loads the first `n < LANES` numbers; the others are zero.
    unsafe fn load_part(p: *const f32, n: usize) -> Self::V;
    unsafe fn store_part(p: *mut f32, n: usize, v: Self::V);
    unsafe fn load_bf16(p: *const bf16) -> Self::V;
    /// Rounds to nearest, ties to even.
    unsafe fn store_bf16(p: *mut bf16, v: Self::V);
    unsafe fn load_bf16_part(p: *const bf16, n: usize) -> Self::V;
    unsafe fn store_bf16_part(p: *mut bf16, n: usize, v: Self::V);

    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sqrt(a: Self::V) -> Self::V;
    unsafe fn abs(a: Self::V) -> Self::V;
    /// The magnitude of `a` with the sign of `b`.
    unsafe fn copysign(a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, fused where the instruction set can.
    unsafe fn mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// Rounds to the nearest integer, ties to even; |a| < 2²².
    unsafe fn round(a: Self::V) -> Self::V;
    /// 2ⁿ for integral −126 ≤ n ≤ 127.
    unsafe fn pow2(n: Self::V) -> Self::V;
    /// `v` where bit i of `bits` is set, zero elsewhere.
    unsafe fn keep(v: Self::V, bits: u32) -> Self::V;
    unsafe fn sum(v: Self::V) -> f32;
    unsafe fn largest(v: Self::V) -> f32;

    /// acc + a.low·b.low + a.high·b.high for lanes that each hold two bf16; only where `BF16_DOT`.
    unsafe fn dot_pairs(acc: Self::V, a: Self::V, b: Self::V) -> Self::V;

    /// Asks for a cache line that will be read soon; any address is allowed.
    unsafe fn prefetch(p: *const u8);

    /// Asks for a cache line that will be written soon; any address is allowed.
    unsafe fn prefetch_to_write(p: *const u8);

    /// Exchanges rows and columns of the first LANES×LANES numbers, one row a vector.
    unsafe fn transpose(rows: &mut [Self::V; 16]);

    /// Lanes that hold two bf16 each: `low[i]` in the lower half, `high[i]` in the upper; the first `n` of them, zeros
    /// after that. Only where `BF16_DOT`.
    unsafe fn load_pairs(low: *const bf16, high: *const bf16, n: usize) -> Self::V;

    /// Draws 128 numbers of 16 bits with Philox, from the counters `counter`, `counter` + 1, … in its first word, and
    /// sets the bits of those that are at least `threshold`: the low halves of words first, 32 bits in a word.
    #[inline(always)]
    unsafe fn draw_at_least(seed: u64, counter: [u32; 4], threshold: u16) -> [u32; 4] {
        let counters: [u32; 16] = std::array::from_fn(|i| counter[0].wrapping_add(i as u32));
        let words =
            philox_lanes::<16, DROPOUT_ROUNDS>(seed, [counters, [counter[1]; 16], [counter[2]; 16], [counter[3]; 16]]);
        std::array::from_fn(|quarter| {
            (0..16).fold(0, |bits, i| {
                let draw = words[i % 4][quarter * 4 + i / 4];
                let low = u32::from(draw as u16 >= threshold);
                let high = u32::from((draw >> 16) as u16 >= threshold);
                bits | (low | high << 1) << (2 * i)
            })
        })
    }
}

/// A number type that tensors hold and kernels compute with, in `f32` inside.
pub trait Element: bytemuck::Pod + Send + Sync + std::fmt::Debug + Default + private::Vectors {
    /// Whether this is bf16.
    const IS_BF16: bool;
    /// The exact value.
    fn to_f32(self) -> f32;
    /// Rounds to nearest, ties to even.
    fn from_f32(x: f32) -> Self;
}

impl Element for f32 {
    const IS_BF16: bool = false;
    fn to_f32(self) -> f32 {
        self
    }
    fn from_f32(x: f32) -> Self {
        x
    }
}

impl Element for bf16 {
    const IS_BF16: bool = true;
    fn to_f32(self) -> f32 {
        bf16::to_f32(self)
    }
    fn from_f32(x: f32) -> Self {
        bf16::from_f32(x)
    }
}

pub(crate) mod private {
    use super::{Simd, bf16};

    /// The vector side of [`super::Element`], not for other crates.
    #[allow(unreachable_pub, reason = "sealed: nameable only inside this crate")]
    pub trait Vectors: Sized + Copy {
        unsafe fn load<S: Simd>(p: *const Self) -> S::V;
        unsafe fn store<S: Simd>(p: *mut Self, v: S::V);
        unsafe fn load_part<S: Simd>(p: *const Self, n: usize) -> S::V;
        unsafe fn store_part<S: Simd>(p: *mut Self, n: usize, v: S::V);
    }

    macro_rules! vectors {
        ($element:ty, $load:ident, $store:ident, $load_part:ident, $store_part:ident) => {
            impl Vectors for $element {
                #[inline(always)]
                unsafe fn load<S: Simd>(p: *const Self) -> S::V {
                    S::$load(p)
                }
                #[inline(always)]
                unsafe fn store<S: Simd>(p: *mut Self, v: S::V) {
                    S::$store(p, v)
                }
                #[inline(always)]
                unsafe fn load_part<S: Simd>(p: *const Self, n: usize) -> S::V {
                    S::$load_part(p, n)
                }
                #[inline(always)]
                unsafe fn store_part<S: Simd>(p: *mut Self, n: usize, v: S::V) {
                    S::$store_part(p, n, v)
                }
            }
        };
    }
    vectors!(f32, load, store, load_part, store_part);
    vectors!(bf16, load_bf16, store_bf16, load_bf16_part, store_bf16_part);
}

/// Reads a vector at `c`, zeros beyond the end of the row.
#[inline(always)]
pub(crate) unsafe fn read<S: Simd, E: Element>(row: &[E], c: usize) -> S::V {
    let left = row.len() - c;
    // SAFETY: c < len by the loops of the callers, and only `left` elements are read near the end.
    unsafe {
        if left >= S::LANES { E::load::<S>(row.as_ptr().add(c)) } else { E::load_part::<S>(row.as_ptr().add(c), left) }
    }
}

/// Writes a vector at `c`, up to the end of the row.
#[inline(always)]
pub(crate) unsafe fn write<S: Simd, E: Element>(row: &mut [E], c: usize, v: S::V) {
    let left = row.len() - c;
    // SAFETY: as for `read`.
    unsafe {
        if left >= S::LANES {
            E::store::<S>(row.as_mut_ptr().add(c), v);
        } else {
            E::store_part::<S>(row.as_mut_ptr().add(c), left, v);
        }
    }
}

/// Defines `fn name(isa, …)` that runs `body::<S, …>(…)` compiled for the instruction set `isa`.
///
/// Sound because a [`super::Cpu`] exists only with an instruction set that the machine has, and bodies that need more
/// say so.
macro_rules! dispatch {
    ($(#[$meta:meta])* $vis:vis fn $name:ident $(<$($g:ident),+>)? ($($arg:ident : $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:ident) => {
        $(#[$meta])*
        #[allow(unused_mut)]
        $vis fn $name $(<$($g: $crate::cpu::Element),+>)? (isa: $crate::cpu::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,bmi2")]
            unsafe fn avx512_bf16 $(<$($g: $crate::cpu::Element),+>)? ($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: the features are enabled here, the slices come from the caller's safe interface.
                unsafe { $body::<$crate::cpu::simd::Avx512Bf16 $(, $($g),+)?>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,bmi2")]
            unsafe fn avx512 $(<$($g: $crate::cpu::Element),+>)? ($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: as above.
                unsafe { $body::<$crate::cpu::simd::Avx512 $(, $($g),+)?>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,bmi2")]
            unsafe fn avx2 $(<$($g: $crate::cpu::Element),+>)? ($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: as above.
                unsafe { $body::<$crate::cpu::simd::Avx2 $(, $($g),+)?>($($arg),*) }
            }
            #[cfg(target_arch = "aarch64")]
            #[target_feature(enable = "neon,bf16")]
            unsafe fn neon_bf16 $(<$($g: $crate::cpu::Element),+>)? ($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: as above.
                unsafe { $body::<$crate::cpu::simd::NeonBf16 $(, $($g),+)?>($($arg),*) }
            }
            #[cfg(target_arch = "aarch64")]
            #[target_feature(enable = "neon")]
            unsafe fn neon $(<$($g: $crate::cpu::Element),+>)? ($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: as above.
                unsafe { $body::<$crate::cpu::simd::Neon $(, $($g),+)?>($($arg),*) }
            }
            // SAFETY: a `Cpu` is only made with an instruction set that `Isa::check` found on this machine.
            unsafe {
                match isa {
                    #[cfg(target_arch = "aarch64")]
                    $crate::cpu::Isa::NeonBf16 => neon_bf16 $(::<$($g),+>)? ($($arg),*),
                    #[cfg(target_arch = "aarch64")]
                    $crate::cpu::Isa::Neon => neon $(::<$($g),+>)? ($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    $crate::cpu::Isa::Avx512Bf16 | $crate::cpu::Isa::Amx => avx512_bf16 $(::<$($g),+>)? ($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    $crate::cpu::Isa::Avx512 => avx512 $(::<$($g),+>)? ($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    $crate::cpu::Isa::Avx2 => avx2 $(::<$($g),+>)? ($($arg),*),
                    _ => $body::<$crate::cpu::simd::Portable $(, $($g),+)?>($($arg),*),
                }
            }
        }
    };
}

/// Functions of a [`Simd`] that are one expression; like all others they must be inlined.
macro_rules! inlined {
    ($($name:ident($($arg:ident: $ty:ty),*) $(-> $ret:ty)? = $call:expr;)*) => {$(
        #[inline(always)]
        unsafe fn $name($($arg: $ty),*) $(-> $ret)? {
            $call
        }
    )*};
}

/// Plain Rust on four lanes, which compilers map to the base line's vectors.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

#[inline(always)]
fn map<const N: usize>(a: [f32; N], f: impl Fn(f32) -> f32) -> [f32; N] {
    std::array::from_fn(|i| f(a[i]))
}

#[inline(always)]
fn zip<const N: usize>(a: [f32; N], b: [f32; N], f: impl Fn(f32, f32) -> f32) -> [f32; N] {
    std::array::from_fn(|i| f(a[i], b[i]))
}

impl Simd for Portable {
    const LANES: usize = 4;
    const TILE_ROWS: usize = 4;
    const BF16_DOT: bool = false;
    type V = [f32; 4];

    inlined! {
        splat(x: f32) -> Self::V = [x; 4];
        load(p: *const f32) -> Self::V = p.cast::<[f32; 4]>().read_unaligned();
        store(p: *mut f32, v: Self::V) = p.cast::<[f32; 4]>().write_unaligned(v);
        load_part(p: *const f32, n: usize) -> Self::V = std::array::from_fn(|i| if i < n { *p.add(i) } else { 0.0 });
        store_bf16(p: *mut bf16, v: Self::V) = Self::store_bf16_part(p, 4, v);
        add(a: Self::V, b: Self::V) -> Self::V = zip(a, b, |a, b| a + b);
        sub(a: Self::V, b: Self::V) -> Self::V = zip(a, b, |a, b| a - b);
        mul(a: Self::V, b: Self::V) -> Self::V = zip(a, b, |a, b| a * b);
        div(a: Self::V, b: Self::V) -> Self::V = zip(a, b, |a, b| a / b);
        max(a: Self::V, b: Self::V) -> Self::V = zip(a, b, |a, b| if a > b { a } else { b });
        min(a: Self::V, b: Self::V) -> Self::V = zip(a, b, |a, b| if a < b { a } else { b });
        sqrt(a: Self::V) -> Self::V = map(a, f32::sqrt);
        abs(a: Self::V) -> Self::V = map(a, f32::abs);
        copysign(a: Self::V, b: Self::V) -> Self::V = zip(a, b, f32::copysign);
        pow2(n: Self::V) -> Self::V = map(n, |n| f32::from_bits(((n as i32 + 127) as u32) << 23));
        keep(v: Self::V, bits: u32) -> Self::V = std::array::from_fn(|i| if bits >> i & 1 == 1 { v[i] } else { 0.0 });
        sum(v: Self::V) -> f32 = (v[0] + v[2]) + (v[1] + v[3]);
        largest(v: Self::V) -> f32 = v[0].max(v[2]).max(v[1].max(v[3]));
    }
    #[inline(always)]
    unsafe fn dot_pairs(_: Self::V, _: Self::V, _: Self::V) -> Self::V {
        unreachable!("dot_pairs: only where BF16_DOT")
    }
    #[inline(always)]
    unsafe fn load_pairs(_: *const bf16, _: *const bf16, _: usize) -> Self::V {
        unreachable!("load_pairs: only where BF16_DOT")
    }
    /// Portable code has no such hint.
    #[inline(always)]
    unsafe fn prefetch(_: *const u8) {}
    #[inline(always)]
    unsafe fn prefetch_to_write(_: *const u8) {}
    #[inline(always)]
    unsafe fn store_part(p: *mut f32, n: usize, v: Self::V) {
        for i in 0..n {
            *p.add(i) = v[i];
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const bf16) -> Self::V {
        std::array::from_fn(|i| f32::from_bits(u32::from((*p.add(i)).to_bits()) << 16))
    }
    #[inline(always)]
    unsafe fn load_bf16_part(p: *const bf16, n: usize) -> Self::V {
        std::array::from_fn(|i| if i < n { f32::from_bits(u32::from((*p.add(i)).to_bits()) << 16) } else { 0.0 })
    }
    #[inline(always)]
    unsafe fn store_bf16_part(p: *mut bf16, n: usize, v: Self::V) {
        for i in 0..n {
            *p.add(i) = bf16::from_f32(v[i]);
        }
    }
    #[inline(always)]
    unsafe fn mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        // Not `f32::mul_add`: without the instruction that is a slow library call.
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    unsafe fn round(a: Self::V) -> Self::V {
        // Adding and taking away 1.5·2²³ leaves the nearest integer, ties to even.
        map(a, |a| (a + 12_582_912.0) - 12_582_912.0)
    }
    #[inline(always)]
    unsafe fn transpose(rows: &mut [Self::V; 16]) {
        for i in 0..4 {
            for j in 0..i {
                (rows[i][j], rows[j][i]) = (rows[j][i], rows[i][j]);
            }
        }
    }
}

#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "aarch64")]
pub(crate) use neon::{Neon, NeonBf16};

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx512, Avx512Bf16};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Simd, bf16};
    use crate::philox::{DROPOUT_ROUNDS, MULTIPLIER, WEYL};
    use std::arch::x86_64::*;

    /// 256-bit vectors with fused multiply-add.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx2;

    const FIRST: [i32; 16] = [-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0];

    /// A mask with the first `n` of eight lanes set.
    #[inline(always)]
    unsafe fn first_lanes(n: usize) -> __m256i {
        _mm256_loadu_si256(FIRST.as_ptr().add(8 - n).cast())
    }

    impl Simd for Avx2 {
        const LANES: usize = 8;
        const TILE_ROWS: usize = 6;
        const BF16_DOT: bool = false;
        type V = __m256;

        inlined! {
            splat(x: f32) -> Self::V = _mm256_set1_ps(x);
            load(p: *const f32) -> Self::V = _mm256_loadu_ps(p);
            store(p: *mut f32, v: Self::V) = _mm256_storeu_ps(p, v);
            load_part(p: *const f32, n: usize) -> Self::V = _mm256_maskload_ps(p, first_lanes(n));
            store_part(p: *mut f32, n: usize, v: Self::V) = _mm256_maskstore_ps(p, first_lanes(n), v);
            add(a: Self::V, b: Self::V) -> Self::V = _mm256_add_ps(a, b);
            sub(a: Self::V, b: Self::V) -> Self::V = _mm256_sub_ps(a, b);
            mul(a: Self::V, b: Self::V) -> Self::V = _mm256_mul_ps(a, b);
            div(a: Self::V, b: Self::V) -> Self::V = _mm256_div_ps(a, b);
            max(a: Self::V, b: Self::V) -> Self::V = _mm256_max_ps(a, b);
            min(a: Self::V, b: Self::V) -> Self::V = _mm256_min_ps(a, b);
            sqrt(a: Self::V) -> Self::V = _mm256_sqrt_ps(a);
            abs(a: Self::V) -> Self::V = _mm256_andnot_ps(_mm256_set1_ps(-0.0), a);
            mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V = _mm256_fmadd_ps(a, b, c);
            round(a: Self::V) -> Self::V = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a);
            prefetch(p: *const u8) = _mm_prefetch::<_MM_HINT_T0>(p.cast());
            prefetch_to_write(p: *const u8) = _mm_prefetch::<_MM_HINT_ET0>(p.cast());
        }
        #[inline(always)]
        unsafe fn dot_pairs(_: Self::V, _: Self::V, _: Self::V) -> Self::V {
            unreachable!("dot_pairs: only where BF16_DOT")
        }
        #[inline(always)]
        unsafe fn load_pairs(_: *const bf16, _: *const bf16, _: usize) -> Self::V {
            unreachable!("load_pairs: only where BF16_DOT")
        }
        #[inline(always)]
        unsafe fn load_bf16(p: *const bf16) -> Self::V {
            let halves = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(halves))
        }
        #[inline(always)]
        unsafe fn store_bf16(p: *mut bf16, v: Self::V) {
            // Round to nearest even by adding half of the last place, less one where the last bit is even; a NaN
            // keeps its sign and becomes quiet.
            let bits = _mm256_castps_si256(v);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(v, v));
            let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
            let high = _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet, nan));
            let packed = _mm256_permute4x64_epi64::<0b00_00_10_00>(_mm256_packus_epi32(high, high));
            _mm_storeu_si128(p.cast(), _mm256_castsi256_si128(packed))
        }
        #[inline(always)]
        unsafe fn load_bf16_part(p: *const bf16, n: usize) -> Self::V {
            let mut all = [bf16::ZERO; 8];
            std::ptr::copy_nonoverlapping(p, all.as_mut_ptr(), n);
            Self::load_bf16(all.as_ptr())
        }
        #[inline(always)]
        unsafe fn store_bf16_part(p: *mut bf16, n: usize, v: Self::V) {
            let mut all = [bf16::ZERO; 8];
            Self::store_bf16(all.as_mut_ptr(), v);
            std::ptr::copy_nonoverlapping(all.as_ptr(), p, n);
        }
        #[inline(always)]
        unsafe fn copysign(a: Self::V, b: Self::V) -> Self::V {
            let sign = _mm256_set1_ps(-0.0);
            _mm256_or_ps(_mm256_andnot_ps(sign, a), _mm256_and_ps(sign, b))
        }
        #[inline(always)]
        unsafe fn pow2(n: Self::V) -> Self::V {
            let biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
        }
        #[inline(always)]
        unsafe fn keep(v: Self::V, bits: u32) -> Self::V {
            let lanes = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
            let set = _mm256_and_si256(_mm256_set1_epi32(bits as i32), lanes);
            _mm256_and_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(set, lanes)), v)
        }
        #[inline(always)]
        unsafe fn sum(v: Self::V) -> f32 {
            let four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
        #[inline(always)]
        unsafe fn largest(v: Self::V) -> f32 {
            let four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
        #[inline(always)]
        unsafe fn transpose(rows: &mut [Self::V; 16]) {
            // In groups of four rows, then lane by lane: afterwards lane L of `four[c]` holds column 4·L + c.
            let mut groups = [[_mm256_setzero_ps(); 4]; 2];
            for (g, four) in groups.iter_mut().enumerate() {
                let r = &rows[4 * g..4 * g + 4];
                let (a, b) = (_mm256_unpacklo_ps(r[0], r[1]), _mm256_unpackhi_ps(r[0], r[1]));
                let (c, d) = (_mm256_unpacklo_ps(r[2], r[3]), _mm256_unpackhi_ps(r[2], r[3]));
                let double = |x| _mm256_castps_pd(x);
                *four = [
                    _mm256_castpd_ps(_mm256_unpacklo_pd(double(a), double(c))),
                    _mm256_castpd_ps(_mm256_unpackhi_pd(double(a), double(c))),
                    _mm256_castpd_ps(_mm256_unpacklo_pd(double(b), double(d))),
                    _mm256_castpd_ps(_mm256_unpackhi_pd(double(b), double(d))),
                ];
            }
            for c in 0..4 {
                rows[c] = _mm256_permute2f128_ps::<0x20>(groups[0][c], groups[1][c]);
                rows[4 + c] = _mm256_permute2f128_ps::<0x31>(groups[0][c], groups[1][c]);
            }
        }
    }

    #[inline(always)]
    fn first_bits(n: usize) -> __mmask16 {
        ((1u32 << n) - 1) as __mmask16
    }

    #[inline(always)]
    unsafe fn widen(halves: __m256i) -> __m512 {
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
    }

    /// bf16 by integer arithmetic, where there is no instruction for it; see `Avx2::store_bf16`.
    #[inline(always)]
    unsafe fn narrow(v: __m512) -> __m256i {
        let bits = _mm512_castps_si512(v);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
        let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
        _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(_mm512_mask_blend_epi32(nan, rounded, quiet)))
    }

    /// `Simd::draw_at_least`. Words sit in the lower halves of 64-bit lanes, eight counters a vector, since that is
    /// where the multiplication takes its operands from and leaves both halves of its result; the upper halves hold
    /// rubbish that never comes down.
    #[inline(always)]
    unsafe fn draw_at_least_512(seed: u64, counter: [u32; 4], threshold: u16) -> [u32; 4] {
        // Interleaving the words at the end puts lanes 0, 2, 4, 6 into one vector and 1, 3, 5, 7 into the next.
        let order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
        let first = _mm512_add_epi64(_mm512_set1_epi64(i64::from(counter[0])), order);
        let word = |w: usize| _mm512_set1_epi64(i64::from(counter[w]));
        let mut a = [first, word(1), word(2), word(3)];
        let mut b = [_mm512_add_epi64(first, _mm512_set1_epi64(8)), word(1), word(2), word(3)];
        let multiplier = [_mm512_set1_epi64(i64::from(MULTIPLIER[0])), _mm512_set1_epi64(i64::from(MULTIPLIER[1]))];
        let weyl = [_mm512_set1_epi64(i64::from(WEYL[0])), _mm512_set1_epi64(i64::from(WEYL[1]))];
        let mut key = [_mm512_set1_epi64(seed as u32 as i64), _mm512_set1_epi64((seed >> 32) as i64)];
        for _ in 0..DROPOUT_ROUNDS {
            for c in [&mut a, &mut b] {
                let (p, q) = (_mm512_mul_epu32(c[0], multiplier[0]), _mm512_mul_epu32(c[2], multiplier[1]));
                // 0x96 is the exclusive or of three.
                let c0 = _mm512_ternarylogic_epi64::<0x96>(_mm512_srli_epi64::<32>(q), c[1], key[0]);
                let c2 = _mm512_ternarylogic_epi64::<0x96>(_mm512_srli_epi64::<32>(p), c[3], key[1]);
                *c = [c0, q, c2, p];
            }
            key = [_mm512_add_epi64(key[0], weyl[0]), _mm512_add_epi64(key[1], weyl[1])];
        }
        let threshold = _mm512_set1_epi16(threshold as i16);
        let bits = |c: [__m512i; 4]| {
            // Words 0 and 1 of a counter in one lane, 2 and 3 in another, then side by side.
            let low = _mm512_mask_blend_epi32(0xaaaa, c[0], _mm512_slli_epi64::<32>(c[1]));
            let high = _mm512_mask_blend_epi32(0xaaaa, c[2], _mm512_slli_epi64::<32>(c[3]));
            let (even, odd) = (_mm512_unpacklo_epi64(low, high), _mm512_unpackhi_epi64(low, high));
            (_mm512_cmpge_epu16_mask(even, threshold), _mm512_cmpge_epu16_mask(odd, threshold))
        };
        let ((x, y), (z, w)) = (bits(a), bits(b));
        [x, y, z, w]
    }

    /// Four rows: afterwards lane L of result c holds column 4·L + c of them.
    #[inline(always)]
    unsafe fn transpose_lanes(r0: __m512, r1: __m512, r2: __m512, r3: __m512) -> [__m512; 4] {
        let (a, b) = (_mm512_castps_pd(_mm512_unpacklo_ps(r0, r1)), _mm512_castps_pd(_mm512_unpackhi_ps(r0, r1)));
        let (c, d) = (_mm512_castps_pd(_mm512_unpacklo_ps(r2, r3)), _mm512_castps_pd(_mm512_unpackhi_ps(r2, r3)));
        [
            _mm512_castpd_ps(_mm512_unpacklo_pd(a, c)),
            _mm512_castpd_ps(_mm512_unpackhi_pd(a, c)),
            _mm512_castpd_ps(_mm512_unpacklo_pd(b, d)),
            _mm512_castpd_ps(_mm512_unpackhi_pd(b, d)),
        ]
    }

    /// As `Avx2::transpose`, with four lanes of four.
    #[inline(always)]
    unsafe fn transpose_16(r: &mut [__m512; 16]) {
        let g0 = transpose_lanes(r[0], r[1], r[2], r[3]);
        let g1 = transpose_lanes(r[4], r[5], r[6], r[7]);
        let g2 = transpose_lanes(r[8], r[9], r[10], r[11]);
        let g3 = transpose_lanes(r[12], r[13], r[14], r[15]);
        macro_rules! columns {
            ($($c:literal)*) => {$(
                // Even lanes of each pair of groups, then odd ones; lane L of the four groups is column 4·L + c.
                let even_low = _mm512_shuffle_f32x4::<0x88>(g0[$c], g1[$c]);
                let even_high = _mm512_shuffle_f32x4::<0x88>(g2[$c], g3[$c]);
                let odd_low = _mm512_shuffle_f32x4::<0xdd>(g0[$c], g1[$c]);
                let odd_high = _mm512_shuffle_f32x4::<0xdd>(g2[$c], g3[$c]);
                r[$c] = _mm512_shuffle_f32x4::<0x88>(even_low, even_high);
                r[4 + $c] = _mm512_shuffle_f32x4::<0x88>(odd_low, odd_high);
                r[8 + $c] = _mm512_shuffle_f32x4::<0xdd>(even_low, even_high);
                r[12 + $c] = _mm512_shuffle_f32x4::<0xdd>(odd_low, odd_high);
            )*};
        }
        columns!(0 1 2 3);
    }

    macro_rules! avx512 {
        ($(#[$meta:meta])* $name:ident, $dot:literal, $narrow:expr, $dot_pairs:expr) => {
            $(#[$meta])*
            #[derive(Clone, Copy)]
            pub(crate) struct $name;

            impl Simd for $name {
                const LANES: usize = 16;
                const TILE_ROWS: usize = 14;
                const BF16_DOT: bool = $dot;
                type V = __m512;

                inlined! {
                    splat(x: f32) -> Self::V = _mm512_set1_ps(x);
                    load(p: *const f32) -> Self::V = _mm512_loadu_ps(p);
                    store(p: *mut f32, v: Self::V) = _mm512_storeu_ps(p, v);
                    load_part(p: *const f32, n: usize) -> Self::V = _mm512_maskz_loadu_ps(first_bits(n), p);
                    store_part(p: *mut f32, n: usize, v: Self::V) = _mm512_mask_storeu_ps(p, first_bits(n), v);
                    load_bf16(p: *const bf16) -> Self::V = widen(_mm256_loadu_si256(p.cast()));
                    store_bf16(p: *mut bf16, v: Self::V) = _mm256_storeu_si256(p.cast(), $narrow(v));
                    add(a: Self::V, b: Self::V) -> Self::V = _mm512_add_ps(a, b);
                    sub(a: Self::V, b: Self::V) -> Self::V = _mm512_sub_ps(a, b);
                    mul(a: Self::V, b: Self::V) -> Self::V = _mm512_mul_ps(a, b);
                    div(a: Self::V, b: Self::V) -> Self::V = _mm512_div_ps(a, b);
                    max(a: Self::V, b: Self::V) -> Self::V = _mm512_max_ps(a, b);
                    min(a: Self::V, b: Self::V) -> Self::V = _mm512_min_ps(a, b);
                    sqrt(a: Self::V) -> Self::V = _mm512_sqrt_ps(a);
                    abs(a: Self::V) -> Self::V = _mm512_abs_ps(a);
                    mul_add(a: Self::V, b: Self::V, c: Self::V) -> Self::V = _mm512_fmadd_ps(a, b, c);
                    pow2(n: Self::V) -> Self::V = _mm512_scalef_ps(_mm512_set1_ps(1.0), n);
                    keep(v: Self::V, bits: u32) -> Self::V = _mm512_maskz_mov_ps(bits as __mmask16, v);
                    sum(v: Self::V) -> f32 = _mm512_reduce_add_ps(v);
                    largest(v: Self::V) -> f32 = _mm512_reduce_max_ps(v);
                    dot_pairs(acc: Self::V, a: Self::V, b: Self::V) -> Self::V = $dot_pairs(acc, a, b);
                    prefetch(p: *const u8) = _mm_prefetch::<_MM_HINT_T0>(p.cast());
                    prefetch_to_write(p: *const u8) = _mm_prefetch::<_MM_HINT_ET0>(p.cast());
                    transpose(rows: &mut [Self::V; 16]) = transpose_16(rows);
                }
                #[inline(always)]
                unsafe fn load_bf16_part(p: *const bf16, n: usize) -> Self::V {
                    widen(_mm256_maskz_loadu_epi16(first_bits(n), p.cast()))
                }
                #[inline(always)]
                unsafe fn store_bf16_part(p: *mut bf16, n: usize, v: Self::V) {
                    _mm256_mask_storeu_epi16(p.cast(), first_bits(n), $narrow(v))
                }
                #[inline(always)]
                unsafe fn copysign(a: Self::V, b: Self::V) -> Self::V {
                    let sign = _mm512_set1_ps(-0.0);
                    _mm512_or_ps(_mm512_andnot_ps(sign, a), _mm512_and_ps(sign, b))
                }
                #[inline(always)]
                unsafe fn round(a: Self::V) -> Self::V {
                    _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a)
                }
                #[inline(always)]
                unsafe fn draw_at_least(seed: u64, counter: [u32; 4], threshold: u16) -> [u32; 4] {
                    draw_at_least_512(seed, counter, threshold)
                }
                #[inline(always)]
                unsafe fn load_pairs(low: *const bf16, high: *const bf16, n: usize) -> Self::V {
                    let bits = if n >= 16 { __mmask16::MAX } else { first_bits(n) };
                    let low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(bits, low.cast()));
                    let high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(bits, high.cast()));
                    _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32::<16>(high)))
                }
            }
        };
    }

    avx512!(
        /// 512-bit vectors.
        Avx512, false, narrow, |acc, _a, _b| acc
    );
    avx512!(
        /// 512-bit vectors and the bf16 dot product. Its bf16 instructions take denormal numbers as zero.
        Avx512Bf16,
        true,
        |v| std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(v)),
        |acc, a, b| _mm512_dpbf16_ps(
            acc,
            std::mem::transmute::<__m512, __m512bh>(a),
            std::mem::transmute::<__m512, __m512bh>(b)
        )
    );
}
