//! What reads words as characters: convolutions along sequences with the largest value of each filter, and highway gates; and
//! values side by side.
//!
//! Legend: W sequences (words), N rows (their characters) of D columns, F filters of width K; T rows of H columns.

use henson_kernels::cpu::convolution::{self, Bank, BankGradients};
use henson_kernels::cpu::highway as kernels;
use henson_kernels::cuda::characters as cuda_kernels;

use super::rows::{put_columns, take_columns};
use super::{Op, sum_into, with_float};
use crate::tape::{Backward, Slot};
use crate::{Activation, DType, Device, Kind, Layout, Param, Parameters, Pass, Result, Tensor, TensorError, Var};

const CONVOLUTION: &str = "convolve_max";
const HIGHWAY: &str = "highway";
const SIDE_BY_SIDE: &str = "side_by_side";

/// Filters of one width.
#[derive(Clone, Copy, Debug)]
pub struct Filters {
    /// K.
    pub width: usize,
    /// F×K·D: of each filter the numbers for a window's first row, then those for the second, …
    pub weight: Param,
    /// F.
    pub bias: Param,
}

impl Pass<'_> {
    /// N×D → W×ΣF: the largest that each filter gives over the windows of a sequence, and then the activation: none, ReLU or tanh.
    /// No sequence may be shorter than the widest filter.
    pub fn convolve_max(
        &mut self,
        x: &Var,
        layout: &Layout,
        filters: &[Filters],
        activation: Activation,
    ) -> Result<Var> {
        let d = x.tensor().columns();
        self.reads(&(filters, activation));
        x.tensor().check_shape(CONVOLUTION, "the input", [layout.tokens(), d])?;
        x.tensor().check_dtype(CONVOLUTION, "the input", self.dtype())?;
        check_filters(filters, layout, d, activation)?;
        if let Device::Cuda(_) = self.device()
            && filters.len() > cuda_kernels::MOST_BANKS
        {
            let why = "a GPU has filters of 32 widths at most: choose the device cpu";
            return Err(TensorError::Unsupported { operation: CONVOLUTION, why });
        }
        let columns = filters.iter().map(|bank| bank.bias.shape().elements()).sum();
        let (words, dtype) = (layout.sequences(), self.dtype());
        let mut out = Tensor::empty(self.device(), [words, columns], dtype)?;
        let mut at = Tensor::empty(self.device(), [words, columns], DType::U32)?;
        let weights = filters.iter().map(|bank| bank.weight.shape().elements()).sum::<usize>();
        let timer = self.device().timer(Kind::Convolution, 2 * layout.tokens() * weights, &[x.tensor(), &out]);
        let weights = matrices(self.parameters(), filters);
        match self.device() {
            Device::Cpu(cpu) => with_float!(dtype, E => {
                let banks = banks::<E>(self.parameters(), filters, &weights);
                let (x, out, at) = (x.tensor().slice::<E>(), out.slice_mut(), at.slice_mut());
                convolution::forward(&cpu.kernels, (x, d), layout.offsets(), &banks, activation, out, at);
            }),
            Device::Cuda(cuda) => {
                let biases = biases(self.parameters(), filters);
                let banks = banks_on_gpu(filters, &weights, &biases);
                let (x, offsets) = ((x.tensor().on_gpu(), d), layout.offsets_on_gpu()?.on_gpu());
                cuda_kernels::forward(&cuda.gpu, x, offsets, &banks, activation, out.on_gpu(), at.on_gpu())?;
            }
        }
        drop(timer);
        let kept = out.clone();
        let y = self.var(out);
        if let Some(out) = y.slot() {
            let (x, layout, filters) = (x.clone(), layout.clone(), filters.to_vec());
            self.record(Op::Convolution(Convolution { x, layout, filters, activation, kept, at, out }));
        }
        Ok(y)
    }

    /// σ(g)∘relu(t) + (1 − σ(g))∘x, where t and g are the halves of z (T×2H) and x is T×H.
    pub fn highway(&mut self, z: &Var, x: &Var) -> Result<Var> {
        let (t, h) = (x.tensor().rows(), x.tensor().columns());
        z.tensor().check_shape(HIGHWAY, "the gates", [t, 2 * h])?;
        z.tensor().check_dtype(HIGHWAY, "the gates", x.tensor().dtype())?;
        let mut out = Tensor::empty(self.device(), [t, h], x.tensor().dtype())?;
        let timer = self.device().timer(Kind::Rows, 0, &[z.tensor(), x.tensor(), &out]);
        match self.device() {
            Device::Cpu(cpu) => with_float!(out.dtype(), E => {
                kernels::forward(&cpu.kernels, z.tensor().slice::<E>(), x.tensor().slice(), h, out.slice_mut());
            }),
            Device::Cuda(cuda) => {
                let (z, x) = (z.tensor().on_gpu(), x.tensor().on_gpu());
                cuda_kernels::highway(&cuda.gpu, z, x, h, out.on_gpu())?;
            }
        }
        drop(timer);
        let y = self.var(out);
        if let Some(out) = y.slot() {
            self.record(Op::Highway(Highway { z: z.clone(), x: x.clone(), out }));
        }
        Ok(y)
    }

    /// T×H₁, T×H₂, … → T×(H₁ + H₂ + …).
    pub fn side_by_side(&mut self, parts: &[&Var]) -> Result<Var> {
        let Some(first) = parts.first() else {
            return Err(TensorError::Unsupported { operation: SIDE_BY_SIDE, why: "there is nothing to put together" });
        };
        let (t, dtype) = (first.tensor().rows(), first.tensor().dtype());
        for part in parts {
            part.tensor().check_shape(SIDE_BY_SIDE, "a part", [t, part.tensor().columns()])?;
            part.tensor().check_dtype(SIDE_BY_SIDE, "a part", dtype)?;
        }
        let widths: Vec<usize> = parts.iter().map(|part| part.tensor().columns()).collect();
        let all = widths.iter().sum();
        let mut out = Tensor::empty(self.device(), [t, all], dtype)?;
        let timer = self.device().timer(Kind::Rows, 0, &[&out, &out]);
        let mut at = 0;
        for (part, width) in parts.iter().zip(&widths) {
            put_columns(self.device(), part.tensor(), &mut out, at)?;
            at += width;
        }
        drop(timer);
        let y = self.var(out);
        if let Some(out) = y.slot() {
            let parts = parts.iter().map(|part| (part.slot(), part.tensor().columns())).collect();
            self.record(Op::SideBySide(SideBySide { parts, out }));
        }
        Ok(y)
    }
}

fn check_filters(filters: &[Filters], layout: &Layout, d: usize, activation: Activation) -> Result<()> {
    for bank in filters {
        let expected = [bank.bias.shape().elements(), bank.width * d].into();
        if bank.weight.shape() != expected {
            let (operation, what, got) = (CONVOLUTION, "a filter's weight", bank.weight.shape());
            return Err(TensorError::Shape { operation, what, expected, got });
        }
    }
    let widest = filters.iter().map(|bank| bank.width).max().unwrap_or(0);
    let short = layout.offsets().windows(2).any(|word| ((word[1] - word[0]) as usize) < widest);
    let why = match activation {
        _ if filters.is_empty() || filters.iter().any(|bank| bank.width == 0) => "a filter is at least one row wide",
        _ if short => "a sequence is shorter than the widest filter",
        Activation::None | Activation::Relu | Activation::Tanh => return Ok(()),
        _ => "the activation is none, ReLU or tanh",
    };
    Err(TensorError::Unsupported { operation: CONVOLUTION, why })
}

fn matrices(parameters: &Parameters, filters: &[Filters]) -> Vec<Tensor> {
    filters.iter().map(|bank| parameters.matrix(bank.weight)).collect()
}

fn biases(parameters: &Parameters, filters: &[Filters]) -> Vec<Tensor> {
    filters.iter().map(|bank| parameters.vector(bank.bias)).collect()
}

fn banks_on_gpu<'a>(filters: &[Filters], weights: &'a [Tensor], biases: &'a [Tensor]) -> Vec<cuda_kernels::Bank<'a>> {
    let each = filters.iter().zip(weights.iter().zip(biases));
    each.map(|(bank, (weight, bias))| cuda_kernels::Bank {
        width: bank.width,
        weight: weight.on_gpu(),
        bias: bias.on_gpu(),
    })
    .collect()
}

fn banks<'a, E: crate::Native>(
    parameters: &'a Parameters,
    filters: &[Filters],
    weights: &'a [Tensor],
) -> Vec<Bank<'a, E>> {
    let one = |(bank, weight): (&Filters, &'a Tensor)| Bank {
        width: bank.width,
        weight: weight.slice::<E>(),
        bias: parameters.slice(bank.bias),
    };
    filters.iter().zip(weights).map(one).collect()
}

/// A recorded convolution.
pub(crate) struct Convolution {
    x: Var,
    layout: Layout,
    filters: Vec<Filters>,
    activation: Activation,
    /// W×ΣF: its output.
    kept: Tensor,
    /// W×ΣF: the rows at which the windows begin that gave it.
    at: Tensor,
    out: Slot,
}

impl Convolution {
    pub(super) fn backward(self, back: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = back.take(self.out) else { return Ok(()) };
        let x = self.x.tensor();
        let mut dx = match self.x.slot() {
            Some(_) => Some(Tensor::empty(back.device(), x.shape(), x.dtype())?),
            None => None,
        };
        let timer = back.device().timer(Kind::ConvolutionGradient, 0, &[x, &dy, &self.kept]);
        let weights = matrices(back.parameters, &self.filters);
        match back.device() {
            Device::Cpu(cpu) => {
                let mut sums = Vec::with_capacity(self.filters.len());
                for bank in &self.filters {
                    sums.push((back.gradients.sum(bank.weight)?, back.gradients.sum(bank.bias)?));
                }
                with_float!(x.dtype(), E => {
                    let banks = banks::<E>(back.parameters, &self.filters, &weights);
                    let mut to: Vec<BankGradients<'_>> = sums
                        .iter_mut()
                        .map(|(weight, bias)| BankGradients { weight: weight.slice_mut(), bias: bias.slice_mut() })
                        .collect();
                    let (kept, at) = (self.kept.slice::<E>(), self.at.slice::<u32>());
                    let room = dx.as_mut().map(|dx| dx.slice_mut::<E>()).unwrap_or_default();
                    let (x, offsets) = ((x.slice::<E>(), x.columns()), self.layout.offsets());
                    convolution::backward(
                        &cpu.kernels, x, offsets, &banks, self.activation, (kept, at), dy.slice::<E>(), room, &mut to,
                    );
                });
            }
            Device::Cuda(cuda) => {
                let biases = biases(back.parameters, &self.filters);
                let banks = banks_on_gpu(&self.filters, &weights, &biases);
                let mut targets = Vec::with_capacity(self.filters.len());
                for bank in &self.filters {
                    targets.push((back.gradients.target(bank.weight)?, back.gradients.target(bank.bias)?));
                }
                let to: Vec<_> = targets
                    .iter()
                    .map(|(weight, bias)| cuda_kernels::BankGradients {
                        weight: sum_into(weight),
                        bias: sum_into(bias),
                    })
                    .collect();
                let (x, offsets) = ((x.on_gpu(), x.columns()), self.layout.offsets_on_gpu()?.on_gpu());
                let (kept, room) = ((self.kept.on_gpu(), self.at.on_gpu()), dx.as_ref().map(Tensor::on_gpu));
                let dy = dy.on_gpu();
                cuda_kernels::backward(&cuda.gpu, x, offsets, &banks, self.activation, kept, dy, room, &to)?;
            }
        }
        drop(timer);
        dx.map_or(Ok(()), |dx| back.add(self.x.slot(), dx))
    }
}

/// Recorded gates.
pub(crate) struct Highway {
    z: Var,
    x: Var,
    out: Slot,
}

impl Highway {
    pub(super) fn backward(self, back: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = back.take(self.out) else { return Ok(()) };
        let (z, x) = (self.z.tensor(), self.x.tensor());
        let mut dz = Tensor::empty(back.device(), z.shape(), z.dtype())?;
        let mut dx = Tensor::empty(back.device(), x.shape(), x.dtype())?;
        let timer = back.device().timer(Kind::Rows, 0, &[z, x, &dy, &dz, &dx]);
        match back.device() {
            Device::Cpu(cpu) => with_float!(x.dtype(), E => {
                let (dz, dx) = (dz.slice_mut::<E>(), dx.slice_mut::<E>());
                kernels::backward(&cpu.kernels, z.slice::<E>(), x.slice(), x.columns(), dy.slice(), dz, dx);
            }),
            Device::Cuda(cuda) => {
                let (z, x, h) = (z.on_gpu(), x.on_gpu(), x.columns());
                cuda_kernels::highway_backward(&cuda.gpu, z, x, h, dy.on_gpu(), dz.on_gpu(), dx.on_gpu())?;
            }
        }
        drop(timer);
        back.add(self.z.slot(), dz)?;
        back.add(self.x.slot(), dx)
    }
}

/// Recorded values side by side.
pub(crate) struct SideBySide {
    /// Of each its slot and how wide it is.
    parts: Vec<(Option<Slot>, usize)>,
    out: Slot,
}

impl SideBySide {
    pub(super) fn backward(self, back: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = back.take(self.out) else { return Ok(()) };
        let all: usize = self.parts.iter().map(|part| part.1).sum();
        let (t, mut at) = (dy.shape().elements() / all.max(1), 0);
        for (slot, width) in self.parts {
            if slot.is_some() {
                let mut dx = Tensor::empty(back.device(), [t, width], dy.dtype())?;
                take_columns(back.device(), (&dy, all), at, &mut dx)?;
                back.add(slot, dx)?;
            }
            at += width;
        }
        Ok(())
    }
}
