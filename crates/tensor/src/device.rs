//! Where tensors live and operations run.

use std::fmt;
use std::sync::Arc;

use henson_kernels::cpu::{Cpu, peak};

use crate::profile::{Profile, Timer};
use crate::{DType, Isa, Kind, Memory, Result, Spent, Tensor, UnsupportedIsa, bf16};

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
    profile: Profile,
}

impl Device {
    /// The processor; without a choice, with its best instruction set and all of its cores.
    pub fn cpu(isa: Option<Isa>, threads: Option<usize>) -> Result<Self, UnsupportedIsa> {
        let threads = threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, |n| n.get()));
        let kernels = Cpu::new(isa.unwrap_or_else(Isa::best), threads)?;
        Ok(Device::Cpu(Arc::new(CpuDevice { kernels, memory: Memory::default(), profile: Profile::default() })))
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

    /// Bytes per second that the device's memory can read and write, measured now.
    pub fn bandwidth(&self) -> f64 {
        match self {
            Device::Cpu(cpu) => peak::bytes_per_second(&cpu.kernels),
        }
    }

    /// Starts to measure every operation.
    pub fn start_profile(&self) {
        match self {
            Device::Cpu(cpu) => cpu.profile.start(),
        }
    }

    /// Stops, and tells what each kind of operation took.
    pub fn stop_profile(&self) -> Vec<(Kind, Spent)> {
        match self {
            Device::Cpu(cpu) => cpu.profile.stop(),
        }
    }

    /// Measures an operation while profiling is on; the bytes are those of the tensors that it reads and writes.
    pub(crate) fn timer(&self, kind: Kind, flops: usize, tensors: &[&Tensor]) -> Option<Timer<'_>> {
        let bytes = tensors.iter().map(|t| t.shape().elements() * t.dtype().size()).sum();
        match self {
            Device::Cpu(cpu) => cpu.profile.timer(kind, flops, bytes),
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
