//! The coarse operations of a pass, one file a kind: what goes in and out, the choice of kernel by device and dtype,
//! and the backward next to it.

mod activation;
mod additive;
mod attention;
mod cache;
mod characters;
mod crf;
mod disentangled;
mod embedding;
mod layer_norm;
mod linear;
mod loss;
mod mix;
mod recurrent;
mod replace;
mod rotary;
mod rows;
mod similarity;
mod xl;

pub use attention::{BiasValues, QueryKeyValue};
pub use cache::{Cache, CachedSequence};
pub use characters::Filters;
pub use crf::{CrfParams, LegalSteps};
pub use disentangled::{PositionTables, RelativePositions};
pub use embedding::EmbeddingTables;
pub use layer_norm::Norm;
pub use linear::FeedForwardLayers;
pub use loss::LogSums;
pub use mix::MixParams;
pub use recurrent::{Directions, RecurrentLayer, RecurrentOutput, RecurrentState};
pub use rotary::RotaryTable;
pub use rows::Pooling;
pub use xl::{Sinusoids, XlRelations, XlTables};

use henson_kernels::cpu::activation::Activation;
use henson_kernels::cpu::{cast as kernels_cast, rows as kernels};
use henson_kernels::cuda;

use crate::tape::{Backward, Slot};
use crate::{DType, Device, Kind, Param, Result, Tensor, bf16};

/// Runs `$body` with the type `$E` that stands for a floating-point dtype.
macro_rules! with_float {
    ($dtype:expr, $E:ident => $body:expr) => {
        match $dtype {
            $crate::DType::F32 => {
                type $E = f32;
                $body
            }
            $crate::DType::Bf16 => {
                type $E = $crate::bf16;
                $body
            }
            $crate::DType::U32 => {
                return Err($crate::TensorError::DType {
                    operation: "arithmetic",
                    what: "an operand",
                    expected: $crate::DType::F32,
                    got: $crate::DType::U32,
                });
            }
        }
    };
}
pub(crate) use with_float;

/// A recorded operation.
pub(crate) enum Op {
    Activation(activation::Activated),
    Additive(additive::Recorded),
    Beside(rows::Beside),
    Attention(attention::Recorded),
    Convolution(characters::Convolution),
    Crf(crf::Recorded),
    Disentangled(disentangled::Recorded),
    Dropout(rows::Dropped),
    Embedding(embedding::Embedding),
    FeedForward(linear::FeedForward),
    Gather(rows::Gather),
    Highway(characters::Highway),
    Join(rows::Joined),
    LayerNorm(layer_norm::LayerNorm),
    Linear(linear::Linear),
    Maxima(rows::Maxima),
    Means(rows::Means),
    Mix(mix::Recorded),
    Recurrent(recurrent::Recorded),
    Rotary(rotary::Rotated),
    Scale(activation::Scaled),
    SideBySide(characters::SideBySide),
    Similarities(similarity::Similarities),
    Sum(rows::Sum),
    Table(rows::Table),
    UnitMeans(similarity::UnitMeans),
    Xl(xl::Recorded),
}

impl Op {
    /// Turns the gradient of the output into gradients of inputs and parameters.
    pub(crate) fn backward(self, back: &mut Backward<'_>) -> Result<()> {
        match self {
            Op::Activation(op) => op.backward(back),
            Op::Additive(op) => op.backward(back),
            Op::Beside(op) => op.backward(back),
            Op::Attention(op) => op.backward(back),
            Op::Convolution(op) => op.backward(back),
            Op::Crf(op) => op.backward(back),
            Op::Disentangled(op) => op.backward(back),
            Op::Dropout(op) => op.backward(back),
            Op::Embedding(op) => op.backward(back),
            Op::FeedForward(op) => op.backward(back),
            Op::Gather(op) => op.backward(back),
            Op::Highway(op) => op.backward(back),
            Op::Join(op) => op.backward(back),
            Op::LayerNorm(op) => op.backward(back),
            Op::Linear(op) => op.backward(back),
            Op::Maxima(op) => op.backward(back),
            Op::Means(op) => op.backward(back),
            Op::Mix(op) => op.backward(back),
            Op::Recurrent(op) => op.backward(back),
            Op::Rotary(op) => op.backward(back),
            Op::Scale(op) => op.backward(back),
            Op::SideBySide(op) => op.backward(back),
            Op::Similarities(op) => op.backward(back),
            Op::Sum(op) => op.backward(back),
            Op::Table(op) => op.backward(back),
            Op::UnitMeans(op) => op.backward(back),
            Op::Xl(op) => op.backward(back),
        }
    }
}

impl Op {
    /// Leaves the gradient of the bias to whoever computes the gradient of the output, if that has this slot.
    pub(crate) fn take_bias(&mut self, slot: Slot) -> Option<Param> {
        match self {
            Op::Linear(op) => op.take_bias(slot),
            Op::FeedForward(op) => op.take_bias(slot),
            _ => None,
        }
    }
}

/// A parameter's gradient as kernels take sums' targets.
pub(crate) fn sum_into((tensor, accumulate): &(Tensor, bool)) -> cuda::reduce::Sum<'_> {
    cuda::reduce::Sum { to: tensor.on_gpu(), add: *accumulate }
}

/// sum += x.
pub(crate) fn add(device: &Device, x: &Tensor, sum: &mut Tensor) -> Result<()> {
    sum.check_dtype("add", "the sum", x.dtype())?;
    let _timer = device.timer(Kind::Rows, 0, &[x, sum, sum]);
    match device {
        Device::Cpu(cpu) => {
            with_float!(x.dtype(), E => kernels::add::<E>(&cpu.kernels, x.slice(), sum.slice_mut()));
        }
        Device::Cuda(cuda) => cuda::rows::add(&cuda.gpu, x.on_gpu(), sum.on_gpu())?,
    }
    Ok(())
}

/// The same numbers in memory of their own.
pub(crate) fn copy(device: &Device, x: &Tensor) -> Result<Tensor> {
    let mut out = Tensor::empty(device, x.shape(), x.dtype())?;
    let _timer = device.timer(Kind::Rows, 0, &[x, &out]);
    match device {
        Device::Cpu(_) => with_float!(x.dtype(), E => out.slice_mut::<E>().copy_from_slice(x.slice::<E>())),
        // The identity is a copy at the memory's speed, which the driver's own is not.
        Device::Cuda(cuda) if x.dtype() != DType::U32 => {
            cuda::activation::forward(&cuda.gpu, Activation::None, x.on_gpu(), None, out.on_gpu())?;
        }
        Device::Cuda(cuda) => cuda.gpu.copy(x.on_gpu(), out.on_gpu())?,
    }
    Ok(out)
}

/// The same numbers in another floating-point dtype; the same tensor where it is of that dtype already.
pub(crate) fn cast(device: &Device, x: &Tensor, dtype: DType) -> Result<Tensor> {
    if x.dtype() == dtype {
        return Ok(x.clone());
    }
    let mut out = Tensor::empty(device, x.shape(), dtype)?;
    match device {
        Device::Cpu(cpu) => match dtype {
            DType::Bf16 => kernels_cast::to_bf16(&cpu.kernels, x.slice(), out.slice_mut()),
            _ => kernels_cast::to_f32(&cpu.kernels, x.slice::<bf16>(), out.slice_mut()),
        },
        Device::Cuda(cuda) => match dtype {
            DType::Bf16 => cuda::cast::to_bf16(&cuda.gpu, x.on_gpu(), out.on_gpu())?,
            _ => cuda::cast::to_f32(&cuda.gpu, x.on_gpu(), out.on_gpu())?,
        },
    }
    Ok(out)
}

/// A tensor that an operation may write into: `x` itself if nobody else has it, else a copy.
pub(crate) fn own(device: &Device, x: Tensor) -> Result<Tensor> {
    if x.is_unique() { Ok(x) } else { copy(device, &x) }
}
