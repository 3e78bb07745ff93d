//! A tensor: a shape and a dtype over a part of a block of memory. Several tensors may share a block; none has gaps.
//!
//! Who writes: an operation writes the tensors that it made before anybody else sees them. Afterwards only three things
//! are written in place, each by its owner: parameters by the optimizer, gradients by the backward pass, and operands
//! that an operation consumes.

use std::fmt;
use std::sync::Arc;

use henson_kernels::memory::Buffer as Block;

use crate::{DType, Device, Native, Result, TensorError};

/// Up to four sizes, the outermost first.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
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
    block: Arc<Block>,
    /// In bytes.
    offset: usize,
    shape: Shape,
    dtype: DType,
}

impl Tensor {
    /// A tensor of undefined content, to be written at once.
    pub(crate) fn empty(device: &Device, shape: impl Into<Shape>, dtype: DType) -> Result<Self> {
        let shape = shape.into();
        let block = device.memory().take(shape.elements().saturating_mul(dtype.size()))?;
        Ok(Self { block, offset: 0, shape, dtype })
    }

    /// A tensor of zeros.
    pub fn zeros(device: &Device, shape: impl Into<Shape>, dtype: DType) -> Result<Self> {
        let tensor = Self::empty(device, shape, dtype)?;
        tensor.bytes_mut().fill(0);
        Ok(tensor)
    }

    /// A tensor with these numbers.
    pub fn from_slice<T: Native>(device: &Device, shape: impl Into<Shape>, numbers: &[T]) -> Result<Self> {
        let shape = shape.into();
        if shape.elements() != numbers.len() {
            let got = [numbers.len()].into();
            return Err(TensorError::Shape { operation: "from_slice", what: "the slice", expected: shape, got });
        }
        let tensor = Self::empty(device, shape, T::DTYPE)?;
        tensor.slice_mut::<T>().copy_from_slice(numbers);
        Ok(tensor)
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

    /// The numbers, copied to the host.
    ///
    /// Panics if the tensor has another dtype.
    pub fn to_vec<T: Native>(&self) -> Vec<T> {
        self.slice::<T>().to_vec()
    }

    /// The numbers as f32, whatever the floating-point dtype.
    pub fn to_f32(&self) -> Vec<f32> {
        match self.dtype {
            DType::F32 => self.to_vec(),
            DType::Bf16 => self.slice::<crate::bf16>().iter().map(|x| x.to_f32()).collect(),
            DType::U32 => self.slice::<u32>().iter().map(|x| *x as f32).collect(),
        }
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

    /// Whether no other tensor shares the memory (the device's memory holds the second handle).
    pub(crate) fn is_unique(&self) -> bool {
        Arc::strong_count(&self.block) == 2
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
            let start = self.block.start().as_ptr().add(self.offset).cast::<T>();
            std::slice::from_raw_parts(start, self.shape.elements())
        }
    }

    /// The numbers, to be written by whom the module's rules allow to.
    #[allow(clippy::mut_from_ref, reason = "see the module: the rules of who writes are kept by this crate")]
    pub(crate) fn slice_mut<T: Native>(&self) -> &mut [T] {
        assert_eq!(self.dtype, T::DTYPE, "tensor's dtype");
        // SAFETY: as for `slice`; that no other reference to these elements is in use follows from the module's rules.
        unsafe {
            let start = self.block.start().as_ptr().add(self.offset).cast::<T>();
            std::slice::from_raw_parts_mut(start, self.shape.elements())
        }
    }

    #[allow(clippy::mut_from_ref, reason = "as for `slice_mut`")]
    fn bytes_mut(&self) -> &mut [u8] {
        // SAFETY: as for `slice_mut`; every bit pattern is a valid u8.
        unsafe {
            let start = self.block.start().as_ptr().add(self.offset);
            std::slice::from_raw_parts_mut(start, self.shape.elements() * self.dtype.size())
        }
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({} {})", self.dtype, self.shape)
    }
}
