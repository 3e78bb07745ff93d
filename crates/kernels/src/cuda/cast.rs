//! Between f32 and bf16. The definition is [`crate::cpu::cast`].

use super::activation::{SOURCE, aligned, blocks};
use super::error::Result;
use super::gpu::{DType, Gpu, View, store};

/// Rounds each number to bf16, to nearest, ties to even.
pub fn to_bf16(gpu: &Gpu, x: View<'_>, out: View<'_>) -> Result<()> {
    cast(gpu, "to_bf16", x, DType::F32, out, DType::Bf16)
}

/// Widens each number, exactly.
pub fn to_f32(gpu: &Gpu, x: View<'_>, out: View<'_>) -> Result<()> {
    cast(gpu, "to_f32", x, DType::Bf16, out, DType::F32)
}

fn cast(gpu: &Gpu, kernel: &'static str, x: View<'_>, from: DType, out: View<'_>, to: DType) -> Result<()> {
    x.expect(kernel, "the input", x.len(), from);
    out.expect(kernel, "the output", x.len(), to);
    let (n, wide) = (x.len() as u64, aligned(&[x, out]));
    // SAFETY: both have n numbers.
    unsafe { gpu.launch(&SOURCE, &[store(from)], kernel, blocks(x.len()), &[&x.address(), &out.address(), &n, &wide]) }
}
