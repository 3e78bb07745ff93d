//! Single products, for benchmarks: what a linear layer multiplies, without the tape around it.

use henson_kernels::cpu::gemm::{Finish, Matrix, Right, product};
use henson_kernels::cuda::matmul::{self, product as cuda_product};

use crate::ops::{cast, with_float};
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
