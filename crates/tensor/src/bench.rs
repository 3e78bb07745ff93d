//! Single products and transfers, for benchmarks: what a linear layer multiplies, without the tape around it, and what ranks exchange.

use std::ops::Range;
use std::sync::Arc;

use henson_kernels::cpu::gemm::{Finish, Matrix, Right, product};
use henson_kernels::cuda::matmul::{self, product as cuda_product};

use henson_ranks::Ranks;

use crate::ops::{cast, with_float};
use crate::wires::Wires;
use crate::{DType, Device, Result, Tensor};

/// The operands of a linear layer with `n` outputs and `k` inputs.
pub struct Product {
    device: Device,
    dtype: DType,
    sizes: [usize; 3],
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    dx: Tensor,
    dweight: Tensor,
}

impl Product {
    /// Small numbers for `tokens` rows (not zeros, which draw less power).
    pub fn new(device: &Device, dtype: DType, tokens: usize, n: usize, k: usize) -> Result<Self> {
        let zeros = |rows, columns, dtype| Tensor::zeros(device, [rows, columns], dtype);
        let numbers = |rows: usize, columns: usize| {
            let values: Vec<f32> = (0..rows * columns).map(|i| ((i * 7919) % 1013) as f32 / 1013.0 - 0.5).collect();
            cast(device, &Tensor::from_slice(device, [rows, columns], &values)?, dtype)
        };
        Ok(Self {
            device: device.clone(),
            dtype,
            sizes: [tokens, n, k],
            x: numbers(tokens, k)?,
            weight: numbers(n, k)?,
            y: numbers(tokens, n)?,
            dx: zeros(tokens, k, dtype)?,
            dweight: zeros(n, k, DType::F32)?,
        })
    }

    /// y = x·weightᵀ.
    pub fn forward(&mut self) -> Result<()> {
        let [t, n, k] = self.sizes;
        match &self.device {
            Device::Cpu(cpu) => with_float!(self.dtype, E => {
                let weight = Right::Plain(Matrix::new(self.weight.slice::<E>(), n, k).transposed());
                let x = Matrix::new(self.x.slice::<E>(), t, k);
                product(&cpu.kernels, x, weight, self.y.slice_mut::<E>(), n, Finish::default());
            }),
            Device::Cuda(cuda) => {
                let (x, weight) = (on_gpu(&self.x, t, k), on_gpu(&self.weight, n, k).transposed());
                cuda_product(&cuda.gpu, x, weight, on_gpu(&self.y, t, n), matmul::Finish::default())?;
            }
        }
        self.device.synchronise()
    }

    /// dx = dy·weight.
    pub fn input_gradient(&mut self) -> Result<()> {
        let [t, n, k] = self.sizes;
        match &self.device {
            Device::Cpu(cpu) => with_float!(self.dtype, E => {
                let weight = Right::Plain(Matrix::new(self.weight.slice::<E>(), n, k));
                let dy = Matrix::new(self.y.slice::<E>(), t, n);
                product(&cpu.kernels, dy, weight, self.dx.slice_mut::<E>(), k, Finish::default());
            }),
            Device::Cuda(cuda) => {
                let (dy, weight) = (on_gpu(&self.y, t, n), on_gpu(&self.weight, n, k));
                cuda_product(&cuda.gpu, dy, weight, on_gpu(&self.dx, t, k), matmul::Finish::default())?;
            }
        }
        self.device.synchronise()
    }

    /// dweight += dyᵀ·x.
    pub fn weight_gradient(&mut self) -> Result<()> {
        let [t, n, k] = self.sizes;
        match &self.device {
            Device::Cpu(cpu) => with_float!(self.dtype, E => {
                let x = Right::Plain(Matrix::new(self.x.slice::<E>(), t, k));
                let dy = Matrix::new(self.y.slice::<E>(), t, n).transposed();
                let finish = Finish { accumulate: true, ..Finish::default() };
                product(&cpu.kernels, dy, x, self.dweight.slice_mut::<f32>(), k, finish);
            }),
            Device::Cuda(cuda) => {
                let (dy, x) = (on_gpu(&self.y, t, n).transposed(), on_gpu(&self.x, t, k));
                let finish = matmul::Finish { accumulate: true, ..matmul::Finish::default() };
                cuda_product(&cuda.gpu, dy, x, on_gpu(&self.dweight, n, k), finish)?;
            }
        }
        self.device.synchronise()
    }
}

fn on_gpu(x: &Tensor, rows: usize, columns: usize) -> matmul::Matrix<'_> {
    matmul::Matrix::new(x.on_gpu(), rows, columns)
}

/// Transfers of a buffer between ranks, as an update of so many bytes of weights would make them.
pub struct Transfers {
    device: Device,
    ranks: Arc<Ranks>,
    buffer: Moved,
    /// In the units of the buffer.
    shards: Vec<Range<usize>>,
}

/// Bytes of the host with room for what comes in, or the same in f32 numbers of a GPU.
enum Moved {
    Host(Vec<u8>, Vec<u8>),
    Gpu(Arc<Wires>, Tensor, Tensor),
}

impl Transfers {
    /// Of a buffer of so many bytes; on a GPU, of whole numbers of four. All ranks must make it.
    pub fn new(device: &Device, ranks: &Arc<Ranks>, bytes: usize) -> Result<Self> {
        let (rank, size) = (ranks.rank(), ranks.size());
        let units = if matches!(device, Device::Cuda(_)) { bytes.div_ceil(4) } else { bytes };
        let shards: Vec<Range<usize>> = (0..size).map(|rank| ranks.share(units, rank)).collect();
        let received = shards[rank].len() * (size - 1);
        let zeros = |len: usize| Tensor::zeros(device, [len.max(1)], DType::F32);
        let buffer = match device {
            Device::Cpu(_) => Moved::Host(vec![rank as u8; bytes], vec![0; received]),
            Device::Cuda(cuda) => Moved::Gpu(cuda.wires(ranks)?, zeros(units)?, zeros(received)?),
        };
        Ok(Self { device: device.clone(), ranks: Arc::clone(ranks), buffer, shards })
    }

    /// Every rank gives each other one its shard. Returns when all is there.
    pub fn all_to_all(&mut self) -> Result<()> {
        let Self { device, ranks, buffer, shards } = self;
        let rank = ranks.rank();
        let own = shards[rank].len();
        let others = || (0..ranks.size()).filter(move |other| *other != rank);
        match (buffer, &*device) {
            (Moved::Gpu(wires, buffer, received), Device::Cuda(cuda)) => {
                let (all, received) = (buffer.on_gpu(), received.on_gpu());
                let shard = |other: usize| all.part(shards[other].start, shards[other].len());
                let sends: Vec<_> =
                    others().map(|other| (other, shard(other))).filter(|(_, shard)| !shard.is_empty()).collect();
                let receives = others().enumerate().filter(|_| own > 0);
                let receives: Vec<_> = receives.map(|(i, other)| (other, received.part(i * own, own))).collect();
                wires.exchange(&cuda.gpu, &sends, &receives)?;
                Ok(cuda.gpu.synchronise()?)
            }
            (Moved::Host(buffer, received), _) => {
                let sends = others().filter(|other| !shards[*other].is_empty());
                let sends: Vec<(usize, &[u8])> = sends.map(|other| (other, &buffer[shards[other].clone()])).collect();
                let mut receives: Vec<(usize, &mut [u8])> = others().zip(received.chunks_mut(own.max(1))).collect();
                ranks.exchange(&sends, &mut receives);
                Ok(())
            }
            (Moved::Gpu(..), Device::Cpu(_)) => unreachable!("made for this device"),
        }
    }

    /// Every rank gives all others its own shard. Returns when all is there.
    pub fn all_gather(&mut self) -> Result<()> {
        match (&mut self.buffer, &self.device) {
            (Moved::Gpu(wires, buffer, _), Device::Cuda(cuda)) => {
                wires.all_gather(&cuda.gpu, buffer.on_gpu(), &self.shards)?;
                Ok(cuda.gpu.synchronise()?)
            }
            (Moved::Host(buffer, _), _) => {
                self.ranks.all_gather(buffer, &self.shards);
                Ok(())
            }
            (Moved::Gpu(..), Device::Cpu(_)) => unreachable!("made for this device"),
        }
    }
}
