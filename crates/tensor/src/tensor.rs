//! A tensor: a shape and a dtype over a part of a block of memory. Several tensors may share a block; none has gaps.
//!
//! Who writes: an operation writes the tensors that it made before anybody else sees them. Afterwards only three things
//! are written in place, each by its owner: parameters by the optimizer, gradients by the backward pass, and operands
//! that an operation consumes.

use std::fmt;
use std::sync::Arc;

use henson_kernels::cuda::{self, View};
use henson_kernels::memory::Buffer as Block;

use crate::cuda::{CudaDevice, native};
use crate::{DType, Device, Native, Result, TensorError, memory};

/// Up to four sizes, the outermost first.
#[derive(Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct Shape {
    sizes: [usize; 4],
    rank: u8,
}

impl Shape {
    /// The sizes.
    pub fn sizes(&self) -> &[usize] {
        &self.sizes[..usize::from(self.rank)]
    }

    /// The number of elements; the largest number where there are more.
    pub fn elements(&self) -> usize {
        self.sizes().iter().fold(1, |product, size| product.saturating_mul(*size))
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(sizes: [usize; N]) -> Self {
        const { assert!(N <= 4) };
        let mut all = [0; 4];
        all[..N].copy_from_slice(&sizes);
        Self { sizes: all, rank: N as u8 }
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.sizes())
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.sizes())
    }
}

/// Numbers on a device.
#[derive(Clone)]
pub struct Tensor {
    storage: Storage,
    /// In bytes.
    offset: usize,
    shape: Shape,
    dtype: DType,
}

/// The memory that a tensor is a part of.
#[derive(Clone)]
enum Storage {
    Host(Arc<Block>),
    Cuda(Arc<cuda::Block>, Arc<CudaDevice>),
}

impl Tensor {
    /// A tensor of undefined content, to be written at once.
    pub(crate) fn empty(device: &Device, shape: impl Into<Shape>, dtype: DType) -> Result<Self> {
        let shape = shape.into();
        let bytes = shape.elements().saturating_mul(dtype.size());
        let storage = match device {
            Device::Cpu(cpu) => Storage::Host(memory::take(&cpu.memory, bytes)?),
            Device::Cuda(cuda) => Storage::Cuda(cuda.take(bytes)?, Arc::clone(cuda)),
        };
        Ok(Self { storage, offset: 0, shape, dtype })
    }

    /// A tensor of zeros.
    pub fn zeros(device: &Device, shape: impl Into<Shape>, dtype: DType) -> Result<Self> {
        let _turn = device.turn();
        let mut tensor = Self::empty(device, shape, dtype)?;
        match device {
            Device::Cpu(_) => tensor.bytes_mut().fill(0),
            Device::Cuda(cuda) => cuda.gpu.fill_zero(tensor.on_gpu())?,
        }
        Ok(tensor)
    }

    /// A tensor with these numbers.
    pub fn from_slice<T: Native>(device: &Device, shape: impl Into<Shape>, numbers: &[T]) -> Result<Self> {
        let shape = shape.into();
        if shape.elements() != numbers.len() {
            let got = [numbers.len()].into();
            return Err(TensorError::Shape { operation: "from_slice", what: "the slice", expected: shape, got });
        }
        match device {
            Device::Cpu(cpu) => {
                cpu.note_input(shape, T::DTYPE);
                let mut tensor = Self::empty(device, shape, T::DTYPE)?;
                tensor.slice_mut::<T>().copy_from_slice(numbers);
                Ok(tensor)
            }
            Device::Cuda(cuda) => {
                let (block, offset) = cuda.upload(bytemuck::cast_slice(numbers), shape, T::DTYPE)?;
                Ok(Self { storage: Storage::Cuda(block, Arc::clone(cuda)), offset, shape, dtype: T::DTYPE })
            }
        }
    }

    /// Sets the numbers to those of a slice of the same length.
    pub(crate) fn write<T: Native>(&mut self, numbers: &[T]) -> Result<()> {
        match &self.storage {
            Storage::Host(_) => self.slice_mut::<T>().copy_from_slice(numbers),
            Storage::Cuda(_, cuda) => {
                let _turn = cuda.turn();
                match T::DTYPE {
                    DType::F32 => cuda.gpu.write::<f32>(self.on_gpu(), bytemuck::cast_slice(numbers))?,
                    DType::Bf16 => cuda.gpu.write::<crate::bf16>(self.on_gpu(), bytemuck::cast_slice(numbers))?,
                    DType::U32 => cuda.gpu.write::<u32>(self.on_gpu(), bytemuck::cast_slice(numbers))?,
                }
            }
        }
        Ok(())
    }

    /// The sizes.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The number type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The number of rows: all sizes but the last, multiplied.
    pub fn rows(&self) -> usize {
        let sizes = self.shape.sizes();
        sizes[..sizes.len().saturating_sub(1)].iter().product()
    }

    /// The last size.
    pub fn columns(&self) -> usize {
        *self.shape.sizes().last().unwrap_or(&1)
    }

    /// The numbers, copied to the host; waits for them. An index outside of its table that a kernel met before is an
    /// error here.
    ///
    /// Panics if the tensor has another dtype.
    pub fn to_vec<T: Native>(&self) -> Result<Vec<T>> {
        assert_eq!(self.dtype, T::DTYPE, "tensor's dtype");
        let Storage::Cuda(_, cuda) = &self.storage else { return Ok(self.slice::<T>().to_vec()) };
        let _turn = cuda.turn();
        let view = self.on_gpu();
        let mut numbers = vec![T::zeroed(); view.len()];
        match T::DTYPE {
            DType::F32 => cuda.gpu.read_into::<f32>(view, bytemuck::cast_slice_mut(&mut numbers))?,
            DType::Bf16 => cuda.gpu.read_into::<crate::bf16>(view, bytemuck::cast_slice_mut(&mut numbers))?,
            DType::U32 => cuda.gpu.read_into::<u32>(view, bytemuck::cast_slice_mut(&mut numbers))?,
        }
        cuda.gpu.check_faults()?;
        Ok(numbers)
    }

    /// The numbers themselves, where they are f32 and lie in the host's memory.
    pub fn on_host(&self) -> Option<&[f32]> {
        (self.dtype == DType::F32 && matches!(self.storage, Storage::Host(_))).then(|| self.slice())
    }

    /// The numbers as f32, whatever the floating-point dtype.
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        match self.dtype {
            DType::F32 => self.to_vec(),
            DType::Bf16 => Ok(self.to_vec::<crate::bf16>()?.iter().map(|x| x.to_f32()).collect()),
            DType::U32 => Ok(self.to_vec::<u32>()?.iter().map(|x| *x as f32).collect()),
        }
    }

    /// Rows of several matrices in one of `rows` rows of f32, where they are: row i of each becomes the row that stands at its i-th
    /// place, or none where that is [`Device::NOWHERE`]. Each row must be named once.
    pub fn of_rows(device: &Device, [rows, columns]: [usize; 2], parts: &[(&Tensor, Vec<u32>)]) -> Result<Self> {
        let mut out = Self::empty(device, [rows, columns], DType::F32)?;
        let mut named = vec![false; rows];
        // Nothing may have any width.
        let parts = parts.iter().filter(|(_, places)| !places.is_empty());
        for (part, places) in parts.clone() {
            part.check_shape("rows", "a part", [places.len(), columns])?;
            let mut each = places.iter().filter(|place| **place != Device::NOWHERE);
            if !each.all(|place| named.get_mut(*place as usize).is_some_and(|named| !std::mem::replace(named, true))) {
                let why = "a row is named twice, or lies behind the end";
                return Err(TensorError::Unsupported { operation: "rows", why });
            }
        }
        if named.contains(&false) {
            return Err(TensorError::Unsupported { operation: "rows", why: "a row is not named" });
        }
        for (part, places) in parts {
            match device {
                Device::Cpu(_) => {
                    let (to, from) = (out.slice_mut::<f32>(), part.to_f32()?);
                    for (row, place) in from.chunks_exact(columns).zip(places) {
                        if *place != Device::NOWHERE {
                            to[*place as usize * columns..][..columns].copy_from_slice(row);
                        }
                    }
                }
                Device::Cuda(cuda) => {
                    let places = Self::from_slice(device, [places.len()], places)?;
                    cuda::rows::put(&cuda.gpu, part.on_gpu(), columns, places.on_gpu(), out.on_gpu())?;
                }
            }
        }
        Ok(out)
    }

    /// The numbers one by one, on the CPU.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = f64> {
        (0..self.shape.elements()).map(|i| match self.dtype {
            DType::F32 => f64::from(self.slice::<f32>()[i]),
            DType::Bf16 => self.slice::<crate::bf16>()[i].to_f64(),
            DType::U32 => f64::from(self.slice::<u32>()[i]),
        })
    }

    /// The same elements with other sizes.
    pub fn reshape(&self, shape: impl Into<Shape>) -> Result<Self> {
        let shape = shape.into();
        if shape.elements() != self.shape.elements() {
            let (expected, got) = (self.shape, shape);
            return Err(TensorError::Shape { operation: "reshape", what: "the new shape", expected, got });
        }
        Ok(Self { shape, ..self.clone() })
    }

    /// `shape` elements from element `start` on.
    pub(crate) fn view(&self, start: usize, shape: Shape) -> Self {
        assert!(start + shape.elements() <= self.shape.elements(), "view outside of the tensor");
        Self { offset: self.offset + start * self.dtype.size(), shape, ..self.clone() }
    }

    /// The GPU that it is on.
    pub(crate) fn cuda(&self) -> Option<&CudaDevice> {
        match &self.storage {
            Storage::Host(_) => None,
            Storage::Cuda(_, cuda) => Some(cuda),
        }
    }

    /// Whether no other tensor shares the memory (the device's memory holds the second handle).
    pub(crate) fn is_unique(&self) -> bool {
        match &self.storage {
            Storage::Host(block) => Arc::strong_count(block) == 2,
            Storage::Cuda(block, _) => Arc::strong_count(block) == 2,
        }
    }

    /// The numbers, on a GPU.
    pub(crate) fn on_gpu(&self) -> View<'_> {
        let Storage::Cuda(block, _) = &self.storage else { panic!("a tensor of the CPU given to a GPU") };
        // SAFETY: the block holds `shape` elements of this type from `offset` on, and lives as long as the tensor; views
        // start at multiples of the size.
        unsafe { View::new(block.address() + self.offset as u64, self.shape.elements(), native(self.dtype)) }
    }

    /// Where the numbers begin, on the CPU.
    fn start(&self) -> *mut u8 {
        let Storage::Host(block) = &self.storage else { panic!("a tensor of a GPU given to the CPU") };
        // SAFETY: within the block.
        unsafe { block.start().as_ptr().add(self.offset) }
    }

    pub(crate) fn check_shape(
        &self,
        operation: &'static str,
        what: &'static str,
        expected: impl Into<Shape>,
    ) -> Result<()> {
        let expected = expected.into();
        if self.shape == expected {
            return Ok(());
        }
        Err(TensorError::Shape { operation, what, expected, got: self.shape })
    }

    pub(crate) fn check_dtype(&self, operation: &'static str, what: &'static str, expected: DType) -> Result<()> {
        if self.dtype == expected {
            return Ok(());
        }
        Err(TensorError::DType { operation, what, expected, got: self.dtype })
    }

    /// The numbers, on the CPU.
    pub(crate) fn slice<T: Native>(&self) -> &[T] {
        assert_eq!(self.dtype, T::DTYPE, "tensor's dtype");
        // SAFETY: the block holds `shape` initialised elements of this type from `offset` on (a tensor is written as a
        // whole before it is given out), aligned because blocks are and views start at multiples of the size.
        unsafe {
            let start = self.start().cast::<T>();
            std::slice::from_raw_parts(start, self.shape.elements())
        }
    }

    /// The numbers, to be written by whom the module's rules allow to.
    pub(crate) fn slice_mut<T: Native>(&mut self) -> &mut [T] {
        assert_eq!(self.dtype, T::DTYPE, "tensor's dtype");
        // SAFETY: as for `slice`; no other reference comes from this tensor, and that none from another that shares the memory is
        // in use follows from the module's rules.
        unsafe {
            let start = self.start().cast::<T>();
            std::slice::from_raw_parts_mut(start, self.shape.elements())
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `slice_mut`; every bit pattern is a valid u8.
        unsafe {
            let start = self.start();
            std::slice::from_raw_parts_mut(start, self.shape.elements() * self.dtype.size())
        }
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({} {})", self.dtype, self.shape)
    }
}
