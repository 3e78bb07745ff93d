//! One vector a sequence, and how alike vectors are: what tuning for sentence embeddings needs beside a cross-entropy.
//!
//! Legend: T tokens, H hidden, N vectors of which the first Q ask and the other C = N − Q are what they choose among.
//! Vectors and similarities are f32, whatever the pass computes in.

use henson_kernels::cpu::gemm::{Finish, Matrix, Right, product};
use henson_kernels::cpu::rows as kernels;
use henson_kernels::cuda::matmul::{self, product as cuda_product};
use henson_kernels::cuda::rows as cuda_kernels;

use super::rows::spread_means;
use super::{Op, copy};
use crate::tape::{Backward, Slot};
use crate::{DType, Device, Kind, Layout, Pass, Pooling, Result, Tensor, Var};

impl Pass<'_> {
    /// The mean of each sequence's tokens (T×H), divided by its length √Σx²: N×H.
    pub fn unit_means(&mut self, x: &Var, layout: &Layout) -> Result<Var> {
        let means = self.pooled(x, layout, Pooling::Mean)?;
        // The means stay as they are for the backward pass: what is normalised is a copy.
        let units = self.normalise_rows(means.clone())?;
        let y = self.var(units);
        if let Some(out) = y.slot() {
            self.record(Op::UnitMeans(UnitMeans { x: x.clone(), layout: layout.clone(), means, out }));
        }
        Ok(y)
    }

    /// scale·(row of the first Q)·(row of the others) + what `added` (Q×C) holds for the two: Q×C. A very negative number
    /// there takes a candidate out of a softmax.
    pub fn similarities(&mut self, vectors: &Var, scale: f32, added: &Tensor) -> Result<Var> {
        let (q, c) = (added.rows(), added.columns());
        self.reads(&scale);
        let x = vectors.tensor();
        let h = x.columns();
        added.check_dtype("similarities", "what is added", DType::F32)?;
        x.check_dtype("similarities", "the vectors", DType::F32)?;
        x.check_shape("similarities", "the vectors", [q + c, h])?;
        let mut out = copy(self.device(), added)?;
        let timer = self.device().timer(Kind::Linear, 2 * q * c * h, &[x, &out]);
        match self.device() {
            Device::Cpu(cpu) => {
                let (first, others) = x.slice::<f32>().split_at(q * h);
                let (first, others) = (Matrix::new(first, q, h), Matrix::new(others, c, h).transposed());
                let finish = Finish { scale, accumulate: true, ..Finish::default() };
                product(&cpu.kernels, first, Right::Plain(others), out.slice_mut::<f32>(), c, finish);
            }
            Device::Cuda(cuda) => {
                let [first, others] = halves(x, q, c, h);
                let finish = matmul::Finish { scale, accumulate: true, ..matmul::Finish::default() };
                cuda_product(&cuda.gpu, first, others.transposed(), matmul::Matrix::new(out.on_gpu(), q, c), finish)?;
            }
        }
        drop(timer);
        let y = self.var(out);
        if let Some(out) = y.slot() {
            self.record(Op::Similarities(Similarities { vectors: vectors.clone(), scale, queries: q, out }));
        }
        Ok(y)
    }
}

/// The first q rows on a GPU, and the other c.
fn halves(x: &Tensor, q: usize, c: usize, h: usize) -> [matmul::Matrix<'_>; 2] {
    let part = |start: usize, rows: usize| matmul::Matrix::new(x.on_gpu().part(start * h, rows * h), rows, h);
    [part(0, q), part(q, c)]
}

/// Recorded means of unit length.
pub(crate) struct UnitMeans {
    x: Var,
    layout: Layout,
    /// N×H, as they were before.
    means: Tensor,
    out: Slot,
}

impl UnitMeans {
    pub(super) fn backward(self, back: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = back.take(self.out) else { return Ok(()) };
        let Some(slot) = self.x.slot() else { return Ok(()) };
        let mut dy = if dy.is_unique() { dy } else { copy(back.device(), &dy)? };
        let h = self.means.columns();
        match back.device() {
            Device::Cpu(cpu) => {
                kernels::l2_normalise_gradient(&cpu.kernels, self.means.slice::<f32>(), dy.slice_mut(), h);
            }
            Device::Cuda(cuda) => {
                cuda_kernels::l2_normalise_gradient(&cuda.gpu, self.means.on_gpu(), dy.on_gpu(), h)?;
            }
        }
        spread_means(back, &dy, &self.x, slot, &self.layout)
    }
}

/// Recorded similarities.
pub(crate) struct Similarities {
    vectors: Var,
    scale: f32,
    queries: usize,
    out: Slot,
}

impl Similarities {
    pub(super) fn backward(self, back: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = back.take(self.out) else { return Ok(()) };
        let Some(slot) = self.vectors.slot() else { return Ok(()) };
        let x = self.vectors.tensor();
        // Not the gradient's own shape: whoever used the output may have given it another.
        let (q, c, h) = (self.queries, x.rows() - self.queries, x.columns());
        let (mut dx, accumulate) = back.target(slot, x)?;
        let _timer = back.device().timer(Kind::InputGradient, 4 * q * c * h, &[&dy, x, &dx]);
        match back.device() {
            Device::Cpu(cpu) => {
                let (first, others) = x.slice::<f32>().split_at(q * h);
                let (dfirst, dothers) = dx.slice_mut::<f32>().split_at_mut(q * h);
                let dy = Matrix::new(dy.slice::<f32>(), q, c);
                let finish = || Finish { scale: self.scale, accumulate, ..Finish::default() };
                let others = Right::Plain(Matrix::new(others, c, h));
                product(&cpu.kernels, dy, others, dfirst, h, finish());
                let first = Right::Plain(Matrix::new(first, q, h));
                product(&cpu.kernels, dy.transposed(), first, dothers, h, finish());
            }
            Device::Cuda(cuda) => {
                let ([first, others], [dfirst, dothers]) = (halves(x, q, c, h), halves(&dx, q, c, h));
                let dy = matmul::Matrix::new(dy.on_gpu(), q, c);
                let finish = matmul::Finish { scale: self.scale, accumulate, ..matmul::Finish::default() };
                cuda_product(&cuda.gpu, dy, others, dfirst, finish)?;
                cuda_product(&cuda.gpu, dy.transposed(), first, dothers, finish)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::CudaOptions;
    use crate::philox::Stream;
    use crate::{Activation, Builder, Init, Tape, Training, bf16};

    const LENGTHS: [usize; 7] = [3, 1, 4, 2, 5, 1, 2];
    const QUERIES: usize = 3;
    const SIZES: [usize; 2] = [8, 5];
    const SCALE: f32 = 7.0;
    const OUT: f32 = -1e9;

    fn numbers(seed: u64, n: usize) -> Vec<f32> {
        let mut stream = Stream::new(seed, 0, 0);
        (0..n).map(|_| stream.normal()).collect()
    }

    /// What is added: query 1 may not choose candidate 2.
    fn added() -> Vec<f32> {
        let candidates = LENGTHS.len() - QUERIES;
        (0..QUERIES * candidates).map(|i| if i == candidates + 2 { OUT } else { 0.0 }).collect()
    }

    /// The definition, in f64: a linear layer, means (of unit length, or as they are), similarities, and the mean −ln of the
    /// softmax where each query's own candidate is the one of its number.
    fn loss(x: &[f64], weight: &[f64], unit: bool) -> f64 {
        let [h, k] = SIZES;
        let y: Vec<f64> = x
            .chunks(k)
            .flat_map(|x| {
                weight.chunks(k).map(|w| w.iter().zip(x).map(|(w, x)| w * x).sum::<f64>()).collect::<Vec<_>>()
            })
            .collect();
        let mut rows = y.chunks(h);
        let units: Vec<Vec<f64>> = LENGTHS
            .iter()
            .map(|length| {
                let mut mean = vec![0.0; h];
                for row in rows.by_ref().take(*length) {
                    mean.iter_mut().zip(row).for_each(|(m, x)| *m += x / *length as f64);
                }
                let norm = if unit { mean.iter().map(|m| m * m).sum::<f64>().sqrt() } else { 3.0 };
                mean.iter().map(|m| m / norm).collect()
            })
            .collect();
        let (queries, candidates) = units.split_at(QUERIES);
        let added = added();
        let each = queries.iter().enumerate().map(|(i, query)| {
            let score = |(j, c): (usize, &Vec<f64>)| {
                let dot: f64 = query.iter().zip(c).map(|(a, b)| a * b).sum();
                f64::from(SCALE) * dot + f64::from(added[i * candidates.len() + j])
            };
            let scores: Vec<f64> = candidates.iter().enumerate().map(score).collect();
            scores.iter().map(|s| s.exp()).sum::<f64>().ln() - scores[i]
        });
        each.sum::<f64>() / QUERIES as f64
    }

    /// The same by operations: the loss, and the weight's gradient.
    fn computed(device: &Device, dtype: DType, x: &[f32], weight: &[f32], unit: bool) -> (f64, Vec<f64>) {
        let [h, k] = SIZES;
        let mut builder = Builder::new();
        let param = builder.matrix("weight", h, k, Init::Zeros);
        let mut parameters = builder.finish(device, dtype).unwrap();
        parameters.write(0, weight).unwrap();
        parameters.refresh().unwrap();
        let mut gradients = parameters.gradients().unwrap();
        let mut tape = Tape::new();
        let mut pass = Pass::training(&mut tape, &parameters, Training { seed: 0, step: 0 });
        let x = Tensor::from_slice(device, [x.len() / k, k], x).unwrap();
        let x = pass.var(super::super::cast(device, &x, dtype).unwrap());
        // Means have the dtype of what they are taken of.
        let y = match unit {
            true => pass.linear(&x, param, None, Activation::None),
            false => pass.linear_f32(&x, param, None),
        };
        let y = y.unwrap();
        let layout = Layout::new(device, &LENGTHS, 0).unwrap();
        let (means, scale) = match unit {
            true => (pass.unit_means(&y, &layout), SCALE),
            false => (pass.means(&y, &layout), SCALE / 9.0),
        };
        let units = means.unwrap();
        let added = Tensor::from_slice(device, [QUERIES, LENGTHS.len() - QUERIES], &added()).unwrap();
        let scores = pass.similarities(&units, scale, &added).unwrap();
        let targets = Tensor::from_slice(device, [QUERIES], &[0u32, 1, 2]).unwrap();
        let classes = scores.tensor().columns();
        let (loss, _) = pass.cross_entropy(scores, classes, &targets, None, 1.0 / QUERIES as f32).unwrap();
        let loss = loss.to_f32().unwrap()[0];
        pass.backward(&mut gradients).unwrap();
        (f64::from(loss), gradients.read(&parameters, 0).unwrap().into_iter().map(f64::from).collect())
    }

    #[test]
    fn gradients_are_finite_differences() {
        let [h, k] = SIZES;
        let mut devices = vec![Device::cpu(None, Some(1)).unwrap(), Device::cpu(None, Some(2)).unwrap()];
        if std::env::var_os("HENSON_TEST_CUDA").is_some() {
            devices.push(Device::cuda(&CudaOptions::default()).unwrap());
        }
        // Numbers that bf16 has, too.
        let exact = |numbers: Vec<f32>| -> Vec<f32> { numbers.iter().map(|x| bf16::from_f32(*x).to_f32()).collect() };
        let (x, weight) = (exact(numbers(1, LENGTHS.iter().sum::<usize>() * k)), exact(numbers(2, h * k)));
        let wide = |x: &[f32]| -> Vec<f64> { x.iter().map(|x| f64::from(*x)).collect() };
        let (wide_x, wide_weight) = (wide(&x), wide(&weight));
        for unit in [true, false] {
            let expected_loss = loss(&wide_x, &wide_weight, unit);
            let difference = |i: usize| {
                let at = |step: f64| {
                    let mut weight = wide_weight.clone();
                    weight[i] += step;
                    loss(&wide_x, &weight, unit)
                };
                (at(1e-5) - at(-1e-5)) / 2e-5
            };
            let expected: Vec<f64> = (0..h * k).map(difference).collect();
            let largest = expected.iter().fold(0.0, |m: f64, e| m.max(e.abs()));
            assert!(largest > 1e-2, "there is something to compare");
            for (device, dtype, tolerance) in
                devices.iter().flat_map(|device| [(device, DType::F32, 1e-5), (device, DType::Bf16, 3e-2)])
            {
                let (loss, gradient) = computed(device, dtype, &x, &weight, unit);
                let off = gradient.iter().zip(&expected).fold(0.0, |m: f64, (g, e)| m.max((g - e).abs())) / largest;
                let near = (loss - expected_loss).abs() < tolerance * expected_loss.abs().max(1.0);
                assert!(near, "{loss} {expected_loss}");
                assert!(off < tolerance, "{dtype:?} on {device:?}: error {off:e}");
            }
        }
    }
}
