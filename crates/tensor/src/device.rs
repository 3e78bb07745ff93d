//! Where tensors live and operations run.

use std::fmt;
use std::sync::Arc;

use henson_kernels::cpu::Cpu;

use crate::{Isa, Memory, Result, UnsupportedIsa};

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
