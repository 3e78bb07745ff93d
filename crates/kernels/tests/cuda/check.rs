//! What all checks share: test data, poisoned outputs with guards behind them, and the tolerances, which are those of the
//! CPU's kernel tests (docs/tolerances.md).

use half::bf16;
use henson_kernels::cpu::Element;
use henson_kernels::cpu::dropout::RowId;
use henson_kernels::cuda::{Buffer, DType, Gpu, Native, Result, View};
use henson_kernels::philox::Stream;

/// Error that a kernel in f32 may have against the reference in f64, relative to the tensor's largest magnitude.
pub(crate) const TOLERANCE_F32: f64 = 1e-5;

/// The same for bf16 storage: half of a last place is 2⁻⁹ of the value, and a few roundings add up.
pub(crate) const TOLERANCE_BF16: f64 = 1.5e-2;

/// Gradients smaller than this count as this large: some are zero in theory.
const FLOOR: f64 = 1e-3;

/// A number type of kernels on both sides.
pub(crate) trait Number: Element + Native + PartialEq {
    fn nan() -> Self;
    fn is_nan(self) -> bool {
        self.to_f32().is_nan()
    }
}

impl Number for f32 {
    fn nan() -> Self {
        f32::NAN
    }
}

impl Number for bf16 {
    fn nan() -> Self {
        bf16::NAN
    }
}

pub(crate) fn tolerance<E: Element>() -> f64 {
    if E::IS_BF16 { TOLERANCE_BF16 } else { TOLERANCE_F32 }
}

/// Normal numbers, rounded to `E` so that the reference sees what the kernel sees.
pub(crate) fn numbers<E: Element>(seed: u64, n: usize) -> Vec<E> {
    let mut stream = Stream::new(seed, 0, 0);
    (0..n).map(|_| E::from_f32(stream.normal())).collect()
}

/// Indices below `limit`.
pub(crate) fn indices(seed: u64, n: usize, limit: usize) -> Vec<u32> {
    let mut stream = Stream::new(seed, 1, 0);
    (0..n).map(|_| stream.below(limit as u32)).collect()
}

/// Sequences of five tokens.
pub(crate) fn places(t: usize) -> Vec<RowId> {
    (0..t as u32).map(|i| RowId { sequence: i / 5, position: i % 5 }).collect()
}

pub(crate) fn exact<E: Element>(x: &[E]) -> Vec<f64> {
    x.iter().map(|x| f64::from(x.to_f32())).collect()
}

/// max |got − expected| / max(|expected|, FLOOR); NaN counts as infinite.
pub(crate) fn error(got: &[f64], expected: &[f64]) -> f64 {
    if got.len() != expected.len() {
        return f64::INFINITY;
    }
    let scale = expected.iter().fold(FLOOR, |m, e| m.max(e.abs()));
    got.iter().zip(expected).fold(0.0, |m: f64, (g, e)| {
        let d = (g - e).abs() / scale;
        if d.is_nan() { f64::INFINITY } else { m.max(d) }
    })
}

/// Numbers behind an output that no kernel may touch.
const GUARD: usize = 72;

/// An output: full of NaN, or of what it starts with, and a guard behind it.
pub(crate) struct Out {
    buffer: Buffer,
    len: usize,
}

impl Out {
    pub(crate) fn view(&self) -> View<'_> {
        self.buffer.view().part(0, self.len)
    }
}

/// Counts checks, and remembers what failed.
pub(crate) struct Checks<'a> {
    pub(crate) gpu: &'a Gpu,
    /// Whether large shapes are left out.
    pub(crate) small: bool,
    pub(crate) count: usize,
    pub(crate) failures: Vec<String>,
    /// The largest error of f32 and of bf16 outputs.
    pub(crate) worst: [f64; 2],
}

impl<'a> Checks<'a> {
    pub(crate) fn new(gpu: &'a Gpu, small: bool) -> Self {
        Self { gpu, small, count: 0, failures: Vec::new(), worst: [0.0; 2] }
    }

    pub(crate) fn up<T: Native>(&self, numbers: &[T]) -> Result<Buffer> {
        self.gpu.upload(numbers)
    }

    /// Where rows belong, as kernels take it.
    pub(crate) fn up_places(&self, places: &[RowId]) -> Result<Buffer> {
        self.gpu.upload::<u32>(bytemuck::cast_slice(places))
    }

    /// An output full of NaN: what a kernel forgets to write shows.
    pub(crate) fn poisoned<E: Number>(&self, len: usize) -> Result<Out> {
        self.out(&vec![E::nan(); len])
    }

    /// An output that a kernel adds to.
    pub(crate) fn out<E: Number>(&self, start: &[E]) -> Result<Out> {
        let mut all = start.to_vec();
        all.extend(vec![E::nan(); GUARD]);
        Ok(Out { buffer: self.gpu.upload(&all)?, len: start.len() })
    }

    /// What a kernel wrote; a failure where it touched the guard.
    pub(crate) fn read<E: Number>(&mut self, what: &str, out: &Out) -> Result<Vec<E>> {
        let mut all = self.gpu.read::<E>(out.buffer.view())?;
        let guard = all.split_off(out.len);
        if !guard.iter().all(|x| x.is_nan()) {
            self.failures.push(format!("{what}: wrote behind the end of its output"));
        }
        Ok(all)
    }

    pub(crate) fn verify(&mut self, what: impl FnOnce() -> String, good: bool) {
        self.count += 1;
        if !good {
            self.failures.push(what());
        }
    }

    /// Compares an output with its reference, by the tolerance of its storage.
    pub(crate) fn close<E: Number>(&mut self, what: &str, out: &Out, expected: &[f64]) -> Result<()> {
        self.within::<E>(what, out, expected, tolerance::<E>())
    }

    pub(crate) fn within<E: Number>(&mut self, what: &str, out: &Out, expected: &[f64], bound: f64) -> Result<()> {
        let got = self.read::<E>(what, out)?;
        let error = error(&exact(&got), expected);
        let worst = &mut self.worst[usize::from(E::IS_BF16)];
        *worst = worst.max(error);
        self.verify(|| format!("{what}, {:?}: error {error:.2e} above {bound:.0e}", E::DTYPE), error <= bound);
        Ok(())
    }

    /// A loss in f32 against its reference.
    pub(crate) fn loss(&mut self, what: &str, loss: &Buffer, expected: f64) -> Result<()> {
        let got = self.gpu.read::<f32>(loss.view())?[0];
        let error = (f64::from(got) - expected).abs() / expected.abs().max(1.0);
        self.verify(|| format!("{what}: {got} for {expected}"), error <= TOLERANCE_F32);
        Ok(())
    }
}

/// One f32 of undefined content on the GPU.
pub(crate) fn scalar(gpu: &Gpu) -> Result<Buffer> {
    gpu.upload(&[f32::NAN])
}

/// The bits of numbers, to compare two runs.
pub(crate) fn bits<E: Number>(gpu: &Gpu, out: &Out) -> Result<Vec<u32>> {
    Ok(gpu.read::<E>(out.view())?.iter().map(|x| x.to_f32().to_bits()).collect())
}

/// `len` normal numbers times `scale`, for benchmarks: drawn on the host and repeated on the GPU.
pub(crate) fn filled(gpu: &Gpu, seed: u64, len: usize, dtype: DType, scale: f32) -> Result<Buffer> {
    // A number that no row length divides, so that no two rows are the same, but a multiple of 16 bytes.
    let pattern = (1_000_003 * 8).min(len);
    let some: Vec<f32> = numbers::<f32>(seed, pattern.min(1_000_003)).iter().map(|x| x * scale).collect();
    let repeated = |i: usize| some[i % some.len()];
    let first = match dtype {
        DType::Bf16 => gpu.upload(&(0..pattern).map(|i| bf16::from_f32(repeated(i))).collect::<Vec<_>>())?,
        _ => gpu.upload(&(0..pattern).map(repeated).collect::<Vec<_>>())?,
    };
    let buffer = gpu.empty(len, dtype)?;
    for start in (0..len).step_by(pattern.max(1)) {
        let part = pattern.min(len - start);
        gpu.copy(first.view().part(0, part), buffer.view().part(start, part))?;
    }
    Ok(buffer)
}
