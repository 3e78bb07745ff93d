//! The instruction sets that kernels are compiled for, and which of them this machine has.

use std::fmt;
use std::str::FromStr;

/// A set of instructions that every kernel is compiled for. Later ones include the earlier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// Plain Rust, whatever the target's base line gives.
    Portable,
    /// 256-bit vectors with fused multiply-add.
    Avx2,
    /// 512-bit vectors.
    Avx512,
    /// 512-bit vectors and the bf16 dot product.
    Avx512Bf16,
}

/// An instruction set was asked for that this machine does not have, or whose name is unknown.
#[derive(Debug, thiserror::Error)]
pub enum UnsupportedIsa {
    /// The name is none of ours.
    #[error("unknown instruction set `{0}`: expected one of portable, avx2, avx512, avx512bf16")]
    Unknown(String),
    /// The machine lacks it.
    #[error("this machine has no {wanted}; the best that it has is {best}")]
    Missing {
        /// What was asked for.
        wanted: Isa,
        /// What there is.
        best: Isa,
    },
}

impl Isa {
    /// All of them, the simplest first.
    pub const ALL: [Isa; 4] = [Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16];

    /// The best set of this machine.
    pub fn best() -> Isa {
        *Self::available().last().unwrap_or(&Isa::Portable)
    }

    /// The sets that this machine has, the simplest first.
    pub fn available() -> Vec<Isa> {
        Self::ALL.into_iter().filter(|isa| isa.is_available()).collect()
    }

    /// Whether this machine has the set.
    pub fn is_available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
            let avx512 = avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512dq");
            match self {
                Isa::Portable => true,
                Isa::Avx2 => avx2,
                Isa::Avx512 => avx512,
                Isa::Avx512Bf16 => avx512 && is_x86_feature_detected!("avx512bf16"),
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            self == Isa::Portable
        }
    }

    pub(crate) fn check(self) -> Result<(), UnsupportedIsa> {
        if self.is_available() { Ok(()) } else { Err(UnsupportedIsa::Missing { wanted: self, best: Self::best() }) }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Avx512Bf16 => "avx512bf16",
        })
    }
}

impl FromStr for Isa {
    type Err = UnsupportedIsa;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let isa = Self::ALL.into_iter().find(|isa| isa.to_string() == name);
        let isa = isa.ok_or_else(|| UnsupportedIsa::Unknown(name.to_owned()))?;
        isa.check()?;
        Ok(isa)
    }
}
