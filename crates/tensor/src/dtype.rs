//! The number types that tensors hold.

use std::fmt;
use std::str::FromStr;

use henson_kernels::bf16;

/// A number type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// 32-bit floating point: the truth of weights, statistics and sums.
    F32,
    /// The upper half of an f32: what large products are computed from.
    Bf16,
    /// Token ids, positions, offsets.
    U32,
}

impl DType {
    /// Bytes of one number.
    pub fn size(self) -> usize {
        match self {
            DType::F32 | DType::U32 => 4,
            DType::Bf16 => 2,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DType::F32 => "f32",
            DType::Bf16 => "bf16",
            DType::U32 => "u32",
        })
    }
}

impl FromStr for DType {
    type Err = String;

    /// Reads a dtype to compute in.
    fn from_str(name: &str) -> Result<Self, Self::Err> {
        match name {
            "f32" => Ok(DType::F32),
            "bf16" => Ok(DType::Bf16),
            _ => Err(format!("unknown dtype `{name}`: expected f32 or bf16")),
        }
    }
}

/// A Rust type that stands for a [`DType`].
pub trait Native: bytemuck::Pod + Send + Sync {
    /// Which one.
    const DTYPE: DType;
}

impl Native for f32 {
    const DTYPE: DType = DType::F32;
}

impl Native for bf16 {
    const DTYPE: DType = DType::Bf16;
}

impl Native for u32 {
    const DTYPE: DType = DType::U32;
}
