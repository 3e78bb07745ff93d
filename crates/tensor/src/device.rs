//! Where tensors live and operations run.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use crate::cuda::{CudaDevice, CudaOptions, Feeding, ROW_PARTS, Reading, TOKEN_PARTS, bucket, streams_bucket};

use henson_kernels::cpu::{Cpu, peak};

use crate::profile::{Profile, Timer};
use crate::recording::{CHECKED, Signature, Sizes};
use crate::turns::Turn;
use crate::{Cores, DType, Isa, Kind, Memory, Result, Shape, Spent, Tensor, TensorError, UnsupportedIsa, bf16};

/// Pages of each sequence that a step of decoding has room for: below that, all have the same sizes.
const PAGES: usize = 8;

/// A device, shared by all that compute on it.
#[derive(Clone)]
pub enum Device {
    /// The processor.
    Cpu(Arc<CpuDevice>),
    /// An NVIDIA GPU.
    Cuda(Arc<CudaDevice>),
}

/// The processor: kernels and memory.
pub struct CpuDevice {
    pub(crate) kernels: Cpu,
    pub(crate) memory: Memory,
    profile: Profile,
    /// The sizes of inputs, while some are filled in and recordings are checked.
    inputs: Mutex<Option<Sizes>>,
}

impl CpuDevice {
    /// Notes an input of a pass, where recordings are checked.
    pub(crate) fn note_input(&self, shape: Shape, dtype: DType) {
        if CHECKED && let Some(sizes) = &mut *self.inputs.lock().unwrap_or_else(PoisonError::into_inner) {
            sizes.add(shape, dtype);
        }
    }

    fn feed<R, E>(&self, fill: impl FnOnce() -> Result<R, E>) -> Result<(R, Signature), E> {
        let inputs = || self.inputs.lock().unwrap_or_else(PoisonError::into_inner);
        *inputs() = CHECKED.then(Sizes::default);
        let filled = fill();
        Ok((filled?, Signature(inputs().take())))
    }
}

impl Device {
    /// The processor; without a choice, with the instruction set that suits it best and all the cores that this process may use.
    pub fn cpu(isa: Option<Isa>, threads: Option<usize>) -> Result<Self, UnsupportedIsa> {
        let threads = threads.unwrap_or_else(|| Cores::of_this_process().threads());
        let kernels = Cpu::new(isa.unwrap_or_else(Isa::best), threads)?;
        let (memory, profile, inputs) = Default::default();
        Ok(Device::Cpu(Arc::new(CpuDevice { kernels, memory, profile, inputs })))
    }

    /// An NVIDIA GPU; an error that says what is missing where there is none.
    pub fn cuda(options: &CudaOptions) -> Result<Self> {
        Ok(Device::Cuda(Arc::new(CudaDevice::new(options)?)))
    }

    /// The processor next to it: itself, or, next to a GPU, with the best instruction set and all cores.
    pub fn host(&self) -> Result<Self, UnsupportedIsa> {
        match self {
            Device::Cpu(_) => Ok(self.clone()),
            Device::Cuda(_) => Self::cpu(None, None),
        }
    }

    /// Bytes of memory that tensors hold, or held and may use again.
    pub fn held(&self) -> usize {
        match self {
            Device::Cpu(cpu) => cpu.memory.held(),
            Device::Cuda(cuda) => cuda.held(),
        }
    }

    /// Gives memory that nobody uses back to the system: when batches change their size for good.
    pub fn trim(&self) {
        let _turn = self.turn();
        match self {
            Device::Cpu(cpu) => cpu.memory.trim(),
            Device::Cuda(cuda) => cuda.trim(),
        }
    }

    /// Waits until all that was asked for is done; an error if some of it failed.
    pub fn synchronise(&self) -> Result<()> {
        match self {
            Device::Cpu(_) => Ok(()),
            Device::Cuda(cuda) => {
                let _turn = cuda.turn();
                Ok(cuda.gpu.check_faults()?)
            }
        }
    }

    /// Steps that may be asked for before the first of their results is waited for.
    pub fn ahead(&self) -> usize {
        match self {
            Device::Cpu(_) => 0,
            Device::Cuda(_) => 2,
        }
    }

    /// How a GPU does its matrix products, as it found to be fastest so far: for [`Device::choose_products`], so that a run
    /// that resumes computes the same bits.
    pub fn product_choices(&self) -> Option<String> {
        match self {
            Device::Cpu(_) => None,
            Device::Cuda(cuda) => cuda.gpu.blas().ok().map(|blas| blas.choices(&cuda.gpu)),
        }
    }

    /// Takes what [`Device::product_choices`] gave; `false` where it is another device's.
    pub fn choose_products(&self, choices: &str) -> Result<bool> {
        match self {
            Device::Cpu(_) => Ok(false),
            Device::Cuda(cuda) => Ok(cuda.gpu.blas()?.load_choices(&cuda.gpu, choices)?),
        }
    }

    /// Whether a GPU times algorithms for matrix products that it has no choice for; else the library's first proposal is taken. What
    /// was found so far for single shapes is forgotten, and passes must be recorded again.
    pub fn search_products(&self, on: bool) -> Result<()> {
        if let Device::Cuda(cuda) = self {
            let blas = cuda.gpu.blas()?;
            blas.set_search(on);
            blas.discard_plans();
        }
        Ok(())
    }

    /// What tells a GPU from all others.
    pub fn identity(&self) -> Option<[u8; 16]> {
        match self {
            Device::Cpu(_) => None,
            Device::Cuda(cuda) => Some(cuda.gpu.identity()),
        }
    }

    /// Runs `fill`, whose tensors from slices are the inputs of a pass for [`crate::Recordings`]: they go to the device
    /// together, ahead of what it computes. They are valid until the next feed.
    pub fn feed<R, E: From<crate::TensorError>>(
        &self,
        fill: impl FnOnce() -> Result<R, E>,
    ) -> Result<(R, Signature), E> {
        match self {
            Device::Cpu(cpu) => cpu.feed(fill),
            Device::Cuda(cuda) => cuda.feed(Feeding::Batch, fill),
        }
    }

    /// The same for a step of decoding, in which each of some sequences gets a token and for which the device waits: what is
    /// [`Device::rounded_streams`] has few sizes.
    pub fn feed_tokens<R, E: From<crate::TensorError>>(
        &self,
        fill: impl FnOnce() -> Result<R, E>,
    ) -> Result<(R, Signature), E> {
        match self {
            Device::Cpu(cpu) => cpu.feed(fill),
            Device::Cuda(cuda) => cuda.feed(Feeding::Tokens, fill),
        }
    }

    /// Waits until no other thread uses a GPU, and keeps others from it as long as what this gives lives: between a feed, the pass that
    /// it is for, and the reading of what came of it.
    pub fn turn(&self) -> Option<Turn<'_>> {
        match self {
            Device::Cpu(_) => None,
            Device::Cuda(cuda) => Some(cuda.turn()),
        }
    }

    /// In a feed: the pass reads from the host while it runs, and is not recorded. What is laid out from now on is not rounded.
    pub fn do_not_record(&self) {
        if let Device::Cuda(cuda) = self {
            cuda.do_not_record();
        }
    }

    /// How many rows to lay out where `rows` are needed: in a feed on a GPU somewhat more, so that few sizes occur. Rows
    /// beyond are [`Device::NOWHERE`] or have no weight.
    pub fn rounded(&self, rows: usize) -> usize {
        match self {
            Device::Cuda(cuda) if cuda.filling() == Some(Feeding::Batch) => bucket(rows, ROW_PARTS),
            _ => rows,
        }
    }

    /// How many sequences to lay out where `streams` get a token each: in a [`Device::feed_tokens`] on a GPU somewhat more, so that few
    /// sizes occur. Those beyond have any token, and a [`Cache`](crate::Cache) has nothing of them.
    pub fn rounded_streams(&self, streams: usize) -> usize {
        match self {
            Device::Cuda(cuda) if cuda.filling() == Some(Feeding::Tokens) => streams_bucket(streams),
            _ => streams,
        }
    }

    /// The same for the pages that these sequences have in a cache.
    pub(crate) fn rounded_pages(&self, pages: usize, streams: usize) -> usize {
        match self {
            Device::Cuda(cuda) if cuda.filling() == Some(Feeding::Tokens) => {
                pages.next_power_of_two().max(PAGES * streams)
            }
            _ => pages,
        }
    }

    /// The same for a batch's tokens.
    pub(crate) fn rounded_tokens(&self, tokens: usize) -> usize {
        match self {
            Device::Cuda(cuda) if cuda.filling() == Some(Feeding::Batch) => bucket(tokens, TOKEN_PARTS),
            _ => tokens,
        }
    }

    /// A row that stands for nothing, where rows are [`Device::rounded`].
    pub const NOWHERE: u32 = henson_kernels::cuda::rows::NOWHERE;

    /// Reads a few numbers (f32 or u32) once the device has computed them, without waiting for that now.
    pub fn read_later(&self, tensors: &[&Tensor]) -> Result<Reading> {
        match self {
            Device::Cpu(_) => Reading::of(tensors),
            Device::Cuda(cuda) => cuda.read_later(tensors),
        }
    }

    /// The instruction set that kernels use, where there is a choice.
    pub fn isa(&self) -> Option<Isa> {
        match self {
            Device::Cpu(cpu) => Some(cpu.kernels.isa()),
            Device::Cuda(_) => None,
        }
    }

    /// From now on f32 factors of matrix products may be rounded to TF32: eight bits of exponent and ten after the binary point, as tensor
    /// cores read them. Sums and everything else, such as attention's products, stay f32. An error on the CPU, which has no such
    /// numbers.
    pub fn allow_tf32(&self) -> Result<()> {
        match self {
            Device::Cpu(_) => {
                let why = "TF32 is a number type of GPUs: use f32 or bf16 on the CPU, or --device cuda";
                Err(TensorError::Unsupported { operation: "tf32", why })
            }
            Device::Cuda(cuda) => {
                cuda.gpu.allow_tf32();
                Ok(())
            }
        }
    }

    /// The most floating-point operations per second that the device can do in a dtype, measured now.
    pub fn peak(&self, dtype: DType) -> Result<f64> {
        match self {
            Device::Cpu(cpu) => Ok(match dtype {
                DType::Bf16 => peak::operations_per_second::<bf16>(&cpu.kernels),
                _ => peak::operations_per_second::<f32>(&cpu.kernels),
            }),
            Device::Cuda(cuda) => cuda.peak(dtype),
        }
    }

    /// Bytes per second that the device's memory can read and write, measured now.
    pub fn bandwidth(&self) -> Result<f64> {
        match self {
            Device::Cpu(cpu) => Ok(peak::bytes_per_second(&cpu.kernels)),
            Device::Cuda(cuda) => cuda.bandwidth(),
        }
    }

    /// Bytes per second that the device's memory gives where nothing is written, measured now; on a GPU as [`Device::bandwidth`].
    pub fn read_bandwidth(&self) -> Result<f64> {
        match self {
            Device::Cpu(cpu) => Ok(peak::bytes_read_per_second(&cpu.kernels)),
            Device::Cuda(cuda) => cuda.bandwidth(),
        }
    }

    /// Starts to measure every operation.
    pub fn start_profile(&self) {
        match self {
            Device::Cpu(cpu) => cpu.profile.start(),
            Device::Cuda(cuda) => cuda.start_profile(),
        }
    }

    /// Stops, and tells what each kind of operation took.
    pub fn stop_profile(&self) -> Vec<(Kind, Spent)> {
        match self {
            Device::Cpu(cpu) => cpu.profile.stop(),
            Device::Cuda(cuda) => cuda.stop_profile(),
        }
    }

    /// Measures an operation while profiling is on; the bytes are those of the tensors that it reads and writes.
    pub(crate) fn timer(&self, kind: Kind, flops: usize, tensors: &[&Tensor]) -> Option<Timer<'_>> {
        let bytes = tensors.iter().map(|t| t.shape().elements() * t.dtype().size()).sum();
        match self {
            Device::Cpu(cpu) => cpu.profile.timer(kind, flops, bytes),
            Device::Cuda(cuda) => Some(Timer::on_gpu(cuda, kind, flops, bytes, cuda.mark()?)),
        }
    }

    /// Threads of the processor that may be used: by kernels, or to prepare what goes to a GPU.
    pub fn threads(&self) -> usize {
        match self {
            Device::Cpu(cpu) => cpu.kernels.threads(),
            Device::Cuda(_) => std::thread::available_parallelism().map_or(1, |n| n.get()),
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu(cpu) => cpu.kernels.fmt(f),
            Device::Cuda(cuda) => cuda.gpu.fmt(f),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu(cpu) => write!(f, "cpu ({}, {} threads)", cpu.kernels.isa(), cpu.kernels.threads()),
            Device::Cuda(cuda) => write!(f, "cuda ({})", cuda.gpu),
        }
    }
}
