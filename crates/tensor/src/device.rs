//! Where tensors live and operations run.

use std::fmt;
use std::sync::Arc;

use henson_kernels::cpu::{Cpu, peak};

use crate::{DType, Isa, Memory, Result, UnsupportedIsa, bf16};

/// A device, shared by all that compute on it.
#[derive(Clone)]
pub enum Device {
    /// The processor.
    Cpu(Arc<CpuDevice>),
}

/// The processor: kernels and memory.
pub struct CpuDevice {
    pub(crate) kernels: Cpu,
    pub(crate) memory: Memory,
}

impl Device {
    /// The processor; without a choice, with its best instruction set and all of its cores.
    pub fn cpu(isa: Option<Isa>, threads: Option<usize>) -> Result<Self, UnsupportedIsa> {
        let threads = threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, |n| n.get()));
        let kernels = Cpu::new(isa.unwrap_or_else(Isa::best), threads)?;
        Ok(Device::Cpu(Arc::new(CpuDevice { kernels, memory: Memory::default() })))
    }

    /// Its memory.
    pub fn memory(&self) -> &Memory {
        match self {
            Device::Cpu(cpu) => &cpu.memory,
        }
    }

    /// The instruction set that kernels use, where there is a choice.
    pub fn isa(&self) -> Option<Isa> {
        match self {
            Device::Cpu(cpu) => Some(cpu.kernels.isa()),
        }
    }

    /// The most floating-point operations per second that the device can do in a dtype, measured now.
    pub fn peak(&self, dtype: DType) -> f64 {
        match self {
            Device::Cpu(cpu) => match dtype {
                DType::Bf16 => peak::operations_per_second::<bf16>(&cpu.kernels),
                _ => peak::operations_per_second::<f32>(&cpu.kernels),
            },
        }
    }

    /// Threads that kernels use.
    pub fn threads(&self) -> usize {
        match self {
            Device::Cpu(cpu) => cpu.kernels.threads(),
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu(cpu) => cpu.kernels.fmt(f),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu(cpu) => write!(f, "cpu ({}, {} threads)", cpu.kernels.isa(), cpu.kernels.threads()),
        }
    }
}
