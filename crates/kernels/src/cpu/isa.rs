//! The instruction sets that kernels are compiled for, which of them this machine has, and which of those is used.
//!
//! The choice follows the processor's family and never a measurement: a measured one could differ from run to run and
//! between processes, and with it the last bits of every result.

use std::fmt;
use std::str::FromStr;

use super::amx;

/// A set of instructions that every kernel is compiled for. Later ones of a processor include its earlier ones.
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
    /// The same, with matrix tiles for products of bf16.
    Amx,
    /// A model of those tiles in plain Rust, for tests: it is there on any machine, but never used unasked.
    AmxModel,
    /// ARM's 128-bit vectors.
    Neon,
    /// ARM's 128-bit vectors and the bf16 dot product.
    NeonBf16,
}

/// An instruction set was asked for that this machine does not have, or whose name is unknown.
#[derive(Debug, thiserror::Error)]
pub enum UnsupportedIsa {
    /// The name is none of ours.
    #[error("unknown instruction set `{0}`: expected one of {known}", known = names(&Isa::ALL))]
    Unknown(String),
    /// The machine lacks it.
    #[error("this machine has no {wanted}; it has {list}", list = names(.available))]
    Missing {
        /// What was asked for.
        wanted: Isa,
        /// What there is.
        available: Vec<Isa>,
    },
}

impl Isa {
    /// All but the model, the simplest first.
    pub const ALL: [Isa; 7] =
        [Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16, Isa::Amx, Isa::Neon, Isa::NeonBf16];

    /// The set that suits this machine best.
    pub fn best() -> Isa {
        Choice::of_this_machine().isa
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
                Isa::Portable | Isa::AmxModel => true,
                Isa::Avx2 => avx2,
                Isa::Avx512 => avx512,
                Isa::Avx512Bf16 => avx512 && is_x86_feature_detected!("avx512bf16"),
                Isa::Amx => Isa::Avx512Bf16.is_available() && amx::available(),
                Isa::Neon | Isa::NeonBf16 => false,
            }
        }
        #[cfg(target_arch = "aarch64")]
        {
            use std::arch::is_aarch64_feature_detected;
            match self {
                Isa::Portable | Isa::AmxModel => true,
                Isa::Neon => is_aarch64_feature_detected!("neon"),
                Isa::NeonBf16 => is_aarch64_feature_detected!("neon") && is_aarch64_feature_detected!("bf16"),
                Isa::Amx => amx::available(),
                Isa::Avx2 | Isa::Avx512 | Isa::Avx512Bf16 => false,
            }
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        {
            matches!(self, Isa::Portable | Isa::AmxModel) || self == Isa::Amx && amx::available()
        }
    }

    /// The matrix tiles that products of bf16 use.
    pub(crate) fn tiles(self) -> Option<amx::Tiles> {
        match self {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Isa::Amx => Some(amx::Tiles::Processor),
            Isa::AmxModel => Some(amx::Tiles::Model),
            _ => None,
        }
    }

    pub(crate) fn check(self) -> Result<(), UnsupportedIsa> {
        if self.is_available() {
            return Ok(());
        }
        Err(UnsupportedIsa::Missing { wanted: self, available: Self::available() })
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Avx512Bf16 => "avx512bf16",
            Isa::Amx => "amx",
            Isa::AmxModel => "amxmodel",
            Isa::Neon => "neon",
            Isa::NeonBf16 => "neonbf16",
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

/// The names of some sets, in a sentence.
fn names(sets: &[Isa]) -> String {
    sets.iter().map(Isa::to_string).collect::<Vec<_>>().join(", ")
}

/// Who made a processor, and which one of theirs it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Processor {
    /// The maker's name as the processor has it: `GenuineIntel`, `AuthenticAMD`; empty where it has none.
    pub vendor: String,
    /// The family, with its extension.
    pub family: u32,
    /// The model, with its extension.
    pub model: u32,
}

impl Processor {
    /// From the registers that CPUID gives: EBX, ECX and EDX of leaf 0, EAX of leaf 1.
    pub fn from_cpuid([ebx, ecx, edx]: [u32; 3], signature: u32) -> Self {
        let name: Vec<u8> = [ebx, edx, ecx].iter().flat_map(|register| register.to_le_bytes()).collect();
        let (base, extension) = (signature >> 8 & 0xf, signature >> 20 & 0xff);
        // As both makers' manuals have it: the extensions count only with these families.
        let family = if base == 0xf { base + extension } else { base };
        let high = if base == 0xf || base == 0x6 { signature >> 16 & 0xf } else { 0 };
        let vendor = String::from_utf8_lossy(&name).trim_end_matches('\0').to_owned();
        Self { vendor, family, model: high << 4 | signature >> 4 & 0xf }
    }

    /// This machine's.
    pub fn of_this_machine() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::__cpuid;
            let (name, signature) = (__cpuid(0), __cpuid(1).eax);
            Self::from_cpuid([name.ebx, name.ecx, name.edx], signature)
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            Self { vendor: String::new(), family: 0, model: 0 }
        }
    }

    /// Whether it has a bf16 dot product that takes longer than the two f32 multiply-adds that it replaces: Intel's server
    /// cores with matrix tiles, which leave bf16 to those.
    fn bf16_dot_is_slow(&self) -> bool {
        // Sapphire Rapids, Emerald Rapids, Granite Rapids and Granite Rapids D. Cooper Lake (model 85) is not among them:
        // it had no tiles, and its dot product is fast.
        self.vendor == "GenuineIntel" && self.family == 6 && [0x8f, 0xcf, 0xad, 0xae].contains(&self.model)
    }
}

impl fmt::Display for Processor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, family {}, model {}", self.vendor, self.family, self.model)
    }
}

/// Bytes of a core's second-level cache, as the processor says; 1 MiB where it does not.
pub(crate) fn second_level_cache() -> usize {
    const USUAL: usize = 1 << 20;
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{__cpuid, __cpuid_count};
        // Intel and AMD describe their caches alike, in leaves of different numbers.
        let leaf = if __cpuid(0x8000_0000).eax >= 0x8000_001d && __cpuid(0x8000_0001).ecx & 1 << 22 != 0 {
            0x8000_001d
        } else if __cpuid(0).eax >= 4 {
            4
        } else {
            return USUAL;
        };
        let described = (0..8).map(|index| __cpuid_count(leaf, index)).find_map(|cache| {
            let (kind, level) = (cache.eax & 31, cache.eax >> 5 & 7);
            let parts = [cache.ebx >> 22, cache.ebx >> 12 & 0x3ff, cache.ebx & 0xfff, cache.ecx];
            // Data, or data and instructions.
            (level == 2 && (kind == 1 || kind == 3))
                .then(|| parts.into_iter().map(|part| part as usize + 1).product::<usize>())
        });
        // A virtual machine may describe anything.
        described.unwrap_or(USUAL).clamp(256 << 10, 4 << 20)
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        USUAL
    }
}

/// The set that is used where none is asked for, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The set.
    pub isa: Isa,
    /// Why it and no other, as the end of a sentence.
    pub reason: String,
}

impl Choice {
    /// For a processor that has these sets.
    pub fn new(processor: &Processor, available: &[Isa]) -> Self {
        let best = *available.last().unwrap_or(&Isa::Portable);
        if best == Isa::Avx512Bf16 && processor.bf16_dot_is_slow() {
            let reason =
                format!("widens bf16 to f32, since the bf16 dot product is slow on this processor ({processor})");
            return Self { isa: Isa::Avx512, reason };
        }
        Self { isa: best, reason: "the best that this processor has".to_owned() }
    }

    /// For this machine.
    pub fn of_this_machine() -> Self {
        Self::new(&Processor::of_this_machine(), &Isa::available())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTEL: [u32; 3] = [0x756e_6547, 0x6c65_746e, 0x4965_6e69];
    const AMD: [u32; 3] = [0x6874_7541, 0x444d_4163, 0x6974_6e65];

    /// The signatures are those that processors of each kind have in leaf 1.
    #[test]
    fn sets_follow_the_processor() {
        let cases = [
            ("Sapphire Rapids", INTEL, 0x0008_06f8, (6, 0x8f), Isa::Avx512),
            ("Emerald Rapids", INTEL, 0x000c_06f2, (6, 0xcf), Isa::Avx512),
            ("Granite Rapids", INTEL, 0x000a_06d1, (6, 0xad), Isa::Avx512),
            ("Granite Rapids D", INTEL, 0x000a_06e1, (6, 0xae), Isa::Avx512),
            ("Cooper Lake", INTEL, 0x0005_065b, (6, 0x55), Isa::Avx512Bf16),
            ("Zen 4, server", AMD, 0x00a1_0f11, (25, 0x11), Isa::Avx512Bf16),
            ("Zen 5, server", AMD, 0x00b0_0f21, (26, 0x02), Isa::Avx512Bf16),
            // A model of AMD's with the same numbers as one of Intel's is another processor.
            ("AMD's family 6", AMD, 0x0008_06f8, (6, 0x8f), Isa::Avx512Bf16),
        ];
        for (name, vendor, signature, numbers, expected) in cases {
            let processor = Processor::from_cpuid(vendor, signature);
            assert_eq!((processor.family, processor.model), numbers, "{name}");
            assert_eq!(processor.vendor, if vendor == INTEL { "GenuineIntel" } else { "AuthenticAMD" });
            let x86 = [Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16, Isa::Amx];
            // Matrix tiles are the best wherever there are some; without the system's permission they are not.
            assert_eq!(Choice::new(&processor, &x86).isa, Isa::Amx, "{name}");
            let x86 = &x86[..4];
            let choice = Choice::new(&processor, x86);
            assert_eq!(choice.isa, expected, "{name}");
            assert_eq!(choice.reason.contains("slow"), expected == Isa::Avx512, "{name}: {}", choice.reason);
            // Whatever the processor, what it lacks is not chosen: a virtual machine may hide instructions.
            for sets in 1..4 {
                assert_eq!(Choice::new(&processor, &x86[..sets]).isa, x86[sets - 1], "{name}, {sets} sets");
            }
        }
        assert_eq!(Choice::new(&Processor::from_cpuid(INTEL, 0x0008_06f8), &[]).isa, Isa::Portable);
    }

    #[test]
    fn this_machine_uses_what_it_has() {
        assert!(Isa::best().is_available());
        assert!(Isa::available().contains(&Isa::best()));
        for isa in Isa::available() {
            assert_eq!(isa.to_string().parse::<Isa>().unwrap(), isa);
        }
        let error = "avx".parse::<Isa>().unwrap_err().to_string();
        assert!(Isa::ALL.iter().all(|isa| error.contains(&isa.to_string())), "{error}");
    }
}
