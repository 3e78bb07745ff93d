//! All parameters of a model in one flat buffer, their gradients in another of the same layout.
//!
//! The truth is f32; where a model computes in bf16, a second flat buffer holds the rounded copy. A parameter's path
//! while it is built is its name in the checkpoint.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use henson_kernels::cpu::gemm::{Matrix, Packed};
use henson_kernels::cpu::{Cpu, Element, cast, reduce};
use henson_kernels::cuda;
use henson_kernels::philox::Stream;
use henson_kernels::threads::in_threads;

use crate::{DType, Device, Kind, Result, Rotary, RotaryTable, Shape, Tensor, TensorError, bf16};

/// A parameter's elements start at a multiple of this many: a cache line of bf16 and more.
const ALIGNMENT: usize = 64;

/// Numbers the stream of initial weights among all uses of the seed.
const INITIAL_WEIGHTS: u32 = 0x1217;

/// Elements that one counter index of the initial weights covers.
const INITIAL_BLOCK: usize = 4096;

/// How a parameter starts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Normal with this deviation, redrawn beyond two deviations, as in BERT.
    TruncatedNormal(f32),
    /// Normal with this deviation, redrawn beyond so many deviations.
    TruncatedNormalAt(f32, f32),
    /// Normal with this deviation.
    Normal(f32),
    /// Evenly between this number and its negative, as PyTorch starts linear and recurrent layers.
    Uniform(f32),
    /// All zero.
    Zeros,
    /// All one.
    Ones,
    /// All this number.
    Constant(f32),
    /// One in the second of four parts, zero elsewhere: an LSTM that does not forget at first.
    OpenForgetGates,
}

/// The part of a model that a parameter belongs to, from the input up. Freezing, layer-wise rates and new heads go by it, never
/// by a parameter's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Group {
    /// The tables of tokens, positions and segments, with what follows them before the first layer.
    Embeddings,
    /// Layer number i of the encoder, from 0.
    Layer(usize),
    /// What stands between the encoder and a head, and is pre-trained with it.
    Pooler,
    /// A head: what a task or an objective adds.
    Head,
    /// What an objective needs in training alone: checkpoints keep it for the run to resume, models do not have it.
    Objective,
}

impl Group {
    /// Whether it is a part of the encoder itself, which every head stands on.
    pub fn is_encoder(self) -> bool {
        matches!(self, Group::Embeddings | Group::Layer(_))
    }
}

/// A parameter as a checkpoint knows it.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Its name in a checkpoint.
    pub name: String,
    /// Its shape in memory; see [`Entry::stored_shape`].
    pub shape: Shape,
    /// How it starts.
    pub init: Init,
    /// Whether weight decay applies: to matrices, not to biases and LayerNorm.
    pub decay: bool,
    /// The part of the model that it belongs to.
    pub group: Group,
    /// Whether it is no parameter but numbers that stand next to them in a checkpoint, and are zeros where one does not have them:
    /// nothing has a gradient of them.
    pub constant: bool,
    /// Whether the vocabulary's logits are products with it: a table for the output in a checkpoint is then a copy of it.
    pub is_output: bool,
    /// The place of the parameter whose numbers it has where a checkpoint lacks it.
    pub otherwise: Option<usize>,
    /// Where it begins in the flat buffers.
    pub start: usize,
    /// Whether checkpoints hold it as columns×rows, the transpose of what products read.
    pub transposed: bool,
    /// Its shape there, where that divides a side further.
    pub stored: Option<Shape>,
}

impl Entry {
    /// Its shape in a checkpoint.
    pub fn stored_shape(&self) -> Shape {
        match *self.shape.sizes() {
            [rows, columns] if self.transposed => self.stored.unwrap_or([columns, rows].into()),
            _ => self.stored.unwrap_or(self.shape),
        }
    }

    /// Numbers in the order of a checkpoint, from the order in memory.
    pub fn to_stored(&self, numbers: Vec<f32>) -> Vec<f32> {
        match *self.shape.sizes() {
            [rows, columns] if self.transposed => transpose(&numbers, rows, columns),
            _ => numbers,
        }
    }

    /// Numbers in the order in memory, from that of a checkpoint.
    pub fn from_stored(&self, numbers: Vec<f32>) -> Vec<f32> {
        match *self.shape.sizes() {
            [rows, columns] if self.transposed => transpose(&numbers, columns, rows),
            _ => numbers,
        }
    }
}

/// A matrix of rows×columns as one of columns×rows.
fn transpose(numbers: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    // Tile by tile, so that neither side leaves the cache.
    const TILE: usize = 32;
    let mut to = vec![0.0; numbers.len()];
    for i0 in (0..rows).step_by(TILE) {
        for j0 in (0..columns).step_by(TILE) {
            for i in i0..(i0 + TILE).min(rows) {
                for j in j0..(j0 + TILE).min(columns) {
                    to[j * rows + i] = numbers[i * columns + j];
                }
            }
        }
    }
    to
}

/// A view of one parameter, or of several that lie side by side, in the flat buffers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Param {
    start: usize,
    shape: Shape,
}

impl Param {
    /// Its sizes, padding included.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The rows of a matrix, or numbers of a vector, from this one on, such as positions behind an offset.
    ///
    /// Panics if there are not as many.
    pub fn from_row(&self, row: usize) -> Self {
        let sizes = self.shape.sizes();
        assert!(row <= sizes[0], "row {row} of {}", sizes[0]);
        let rest = sizes[0] - row;
        match *sizes {
            [_, columns] => Self { start: self.start + row * columns, shape: [rest, columns].into() },
            _ => Self { start: self.start + row, shape: [rest].into() },
        }
    }

    /// The first rows of a matrix, or numbers of a vector, such as those of the query and key of a fused projection.
    ///
    /// Panics if there are not as many.
    pub fn to_row(&self, end: usize) -> Self {
        let sizes = self.shape.sizes();
        assert!(end <= sizes[0], "row {end} of {}", sizes[0]);
        let shape = if let [_, columns] = *sizes { [end, columns].into() } else { [end].into() };
        Self { start: self.start, shape }
    }

    fn range(&self) -> std::ops::Range<usize> {
        self.start..self.start + self.shape.elements()
    }
}

/// A table of rotary positions that a model was built with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Angles(usize);

/// Lays out parameters while a model is built.
pub struct Builder {
    entries: Vec<Entry>,
    /// Each with the number of its positions.
    rotary: Vec<(Rotary, usize)>,
    sinusoids: Vec<Param>,
    path: String,
    group: Group,
    size: usize,
}

impl Default for Builder {
    fn default() -> Self {
        let (entries, rotary, sinusoids) = (Vec::new(), Vec::new(), Vec::new());
        Self { entries, rotary, sinusoids, path: String::new(), group: Group::Head, size: 0 }
    }
}

impl Builder {
    /// Nothing yet. What is built outside of any group belongs to the head.
    pub fn new() -> Self {
        Self::default()
    }

    /// Builds parameters of a group; of groups within each other, the innermost counts.
    pub fn group<R>(&mut self, group: Group, build: impl FnOnce(&mut Self) -> R) -> R {
        let outer = std::mem::replace(&mut self.group, group);
        let result = build(self);
        self.group = outer;
        result
    }

    /// Builds below a name: `at("encoder", …)` puts `encoder.` in front. An empty name changes nothing.
    pub fn at<R>(&mut self, name: &str, build: impl FnOnce(&mut Self) -> R) -> R {
        let length = self.path.len();
        if !name.is_empty() {
            self.path.push_str(name);
            self.path.push('.');
        }
        let result = build(self);
        self.path.truncate(length);
        result
    }

    /// A matrix that checkpoints hold as columns×rows.
    pub fn transposed_matrix(&mut self, name: &str, rows: usize, columns: usize, init: Init) -> Param {
        let param = self.matrix(name, rows, columns, init);
        if let Some(entry) = self.entries.last_mut() {
            entry.transposed = true;
        }
        param
    }

    /// Lets checkpoints hold the last `count` parameters in a shape that divides a side further, such as that of heads; of matrices
    /// that are `transposed` it is the columns' sides first. Panics where the numbers are not as many.
    pub fn stored_as(&mut self, count: usize, shape: impl Into<Shape>, transposed: bool) {
        let (first, shape) = (self.entries.len() - count, shape.into());
        for entry in &mut self.entries[first..] {
            assert_eq!(entry.shape.elements(), shape.elements(), "{}: other numbers", entry.name);
            (entry.stored, entry.transposed) = (Some(shape), transposed);
        }
    }

    /// A matrix, subject to weight decay.
    pub fn matrix(&mut self, name: &str, rows: usize, columns: usize, init: Init) -> Param {
        self.side_by_side(&[name], rows, columns, init)
    }

    /// A matrix that is not subject to weight decay, such as one of biases.
    pub fn matrix_without_decay(&mut self, name: &str, rows: usize, columns: usize, init: Init) -> Param {
        let param = self.matrix(name, rows, columns, init);
        if let Some(entry) = self.entries.last_mut() {
            entry.decay = false;
        }
        param
    }

    /// Matrices of one shape without gaps between them, seen as one with all of their rows.
    pub fn side_by_side(&mut self, names: &[&str], rows: usize, columns: usize, init: Init) -> Param {
        let starts: Vec<(&str, Init)> = names.iter().map(|name| (*name, init)).collect();
        self.side_by_side_from(&starts, rows, columns)
    }

    /// The same for matrices that start in ways of their own.
    pub fn side_by_side_from(&mut self, starts: &[(&str, Init)], rows: usize, columns: usize) -> Param {
        self.align();
        let start = self.size;
        for (name, init) in starts {
            self.push(name, [rows, columns].into(), *init, true);
        }
        Param { start, shape: [starts.len() * rows, columns].into() }
    }

    /// A table whose rows are padded with zeros to a multiple of 64 inside; the padding is never saved.
    pub fn padded_table(&mut self, name: &str, rows: usize, columns: usize, init: Init) -> Param {
        self.align();
        let start = self.size;
        self.push(name, [rows, columns].into(), init, true);
        let padded = pad(rows);
        self.size = start + padded * columns;
        Param { start, shape: [padded, columns].into() }
    }

    /// A vector, not subject to weight decay.
    pub fn vector(&mut self, name: &str, length: usize, init: Init) -> Param {
        self.vectors(&[name], length, init)
    }

    /// Vectors of one length without gaps between them, seen as one.
    pub fn vectors(&mut self, names: &[&str], length: usize, init: Init) -> Param {
        let starts: Vec<(&str, Init)> = names.iter().map(|name| (*name, init)).collect();
        self.vectors_from(&starts, length)
    }

    /// The same for vectors that start in ways of their own.
    pub fn vectors_from(&mut self, starts: &[(&str, Init)], length: usize) -> Param {
        self.align();
        let start = self.size;
        for (name, init) in starts {
            self.push(name, [length].into(), *init, false);
        }
        Param { start, shape: [starts.len() * length].into() }
    }

    /// A vector that is padded like [`Builder::padded_table`].
    pub fn padded_vector(&mut self, name: &str, length: usize, init: Init) -> Param {
        self.align();
        let start = self.size;
        self.push(name, [length].into(), init, false);
        self.size = start + pad(length);
        Param { start, shape: [pad(length)].into() }
    }

    /// Constants that are added to vectors padded like [`Builder::padded_table`]'s rows; a checkpoint has them as 1×length.
    pub fn padded_constants(&mut self, name: &str, length: usize) -> Param {
        self.align();
        let start = self.size;
        self.push(name, [1, length].into(), Init::Zeros, false);
        if let Some(entry) = self.entries.last_mut() {
            entry.constant = true;
        }
        self.size = start + pad(length);
        Param { start, shape: [pad(length)].into() }
    }

    /// Says that the vocabulary's logits are products with a table.
    pub fn mark_output(&mut self, table: Param) {
        let entry = self.entries.iter_mut().find(|entry| entry.start == table.start);
        if let Some(entry) = entry {
            entry.is_output = true;
        }
    }

    /// Says that a parameter has the numbers of another where a checkpoint lacks it.
    pub fn otherwise(&mut self, parameter: Param, other: Param) {
        let other = self.entries.iter().position(|entry| entry.start == other.start);
        if let Some(entry) = self.entries.iter_mut().find(|entry| entry.start == parameter.start) {
            entry.otherwise = other;
        }
    }

    /// A table of rotary positions below `positions`: nothing to train and nothing to save. Layers that ask for the same one
    /// share it.
    pub fn rotary(&mut self, rotary: Rotary, positions: usize) -> Angles {
        let own = (rotary, positions);
        let place = self.rotary.iter().position(|other| *other == own);
        Angles(place.unwrap_or_else(|| {
            self.rotary.push(own);
            self.rotary.len() - 1
        }))
    }

    /// A table of the sines and cosines of positions (Vaswani et al. 2017), all sines before all cosines, as tensor2tensor and Marian
    /// have them: rows of numbers that are neither trained nor saved.
    pub fn sinusoids(&mut self, positions: usize, columns: usize) -> Param {
        self.align();
        let table = Param { start: self.size, shape: [positions, columns].into() };
        self.size += positions * columns;
        self.sinusoids.push(table);
        table
    }

    /// What was laid out so far.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// All parameters on a device, zero until they are initialised or loaded. Models compute in `dtype`.
    pub fn finish(mut self, device: &Device, dtype: DType) -> Result<Parameters> {
        self.align();
        let values = Tensor::zeros(device, [self.size], DType::F32)?;
        let compute = match dtype {
            DType::Bf16 => Some(Tensor::zeros(device, [self.size], DType::Bf16)?),
            _ => None,
        };
        let rotary: Result<Vec<RotaryTable>> =
            self.rotary.iter().map(|(rotary, positions)| RotaryTable::new(device, *rotary, *positions)).collect();
        let (device, entries, sinusoids) = (device.clone(), self.entries, self.sinusoids);
        let mut all = Parameters { device, entries, values, compute, rotary: rotary?, sinusoids, packed: None };
        for i in 0..all.sinusoids.len() {
            let table = all.sinusoids[i];
            all.set(table, &sines_and_cosines(table.shape.sizes()))?;
        }
        if !all.sinusoids.is_empty() {
            all.refresh()?;
        }
        Ok(all)
    }

    fn push(&mut self, name: &str, shape: Shape, init: Init, decay: bool) {
        let name = format!("{}{name}", self.path);
        let (group, start) = (self.group, self.size);
        let (constant, transposed, is_output, otherwise, stored) = (false, false, false, None, None);
        let entry =
            Entry { name, shape, init, decay, group, constant, is_output, otherwise, start, transposed, stored };
        self.entries.push(entry);
        self.size += shape.elements();
    }

    fn align(&mut self) {
        self.size = pad(self.size);
    }
}

/// The numbers of [`Builder::sinusoids`].
fn sines_and_cosines(sizes: &[usize]) -> Vec<f32> {
    let &[positions, columns] = sizes else { return vec![] };
    let sines = columns.div_ceil(2);
    let number = |position: usize, column: usize| {
        let pair = if column < sines { column } else { column - sines };
        let angle = position as f64 / 10_000_f64.powf(2.0 * pair as f64 / columns as f64);
        (if column < sines { angle.sin() } else { angle.cos() }) as f32
    };
    (0..positions).flat_map(|position| (0..columns).map(move |column| number(position, column))).collect()
}

fn pad(n: usize) -> usize {
    n.next_multiple_of(ALIGNMENT)
}

/// By where a weight starts and ends, and whether it is that of a gated layer.
type PackedWeights = HashMap<(usize, usize, bool), Arc<Packed>>;

/// The parameters of a model.
pub struct Parameters {
    device: Device,
    entries: Vec<Entry>,
    values: Tensor,
    compute: Option<Tensor>,
    rotary: Vec<RotaryTable>,
    /// Tables that are neither trained nor saved.
    sinusoids: Vec<Param>,
    /// Weights in the order in which products read them; none unless asked for.
    packed: Option<Mutex<PackedWeights>>,
}

impl Parameters {
    /// Keeps a packed copy of every weight that an inference pass multiplies with, made when it is first used: products
    /// with few rows are then several times as fast, for twice the memory.
    ///
    /// A change of the parameters discards the copies, so this is for models that are not trained.
    pub fn keep_packed(&mut self) {
        self.packed = Some(Mutex::default());
    }

    /// The packed form of a weight (N×K as in checkpoints, to multiply K columns with), where it is kept.
    pub(crate) fn packed(&self, param: Param, gated: bool) -> Option<Arc<Packed>> {
        let Device::Cpu(cpu) = &self.device else { return None };
        let mut all = self.packed.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner);
        let packed = all.entry((param.start, param.range().end, gated)).or_insert_with(|| {
            fn pack<E: Element>(cpu: &Cpu, weight: Matrix<'_, E>, gated: bool) -> Packed {
                if gated { Packed::gated(cpu, weight) } else { Packed::new(cpu, weight) }
            }
            let weight = self.matrix(param);
            let (n, k) = (weight.rows(), weight.columns());
            Arc::new(match weight.dtype() {
                DType::Bf16 => pack(&cpu.kernels, Matrix::new(weight.slice::<bf16>(), n, k).transposed(), gated),
                _ => pack(&cpu.kernels, Matrix::new(weight.slice::<f32>(), n, k).transposed(), gated),
            })
        });
        Some(Arc::clone(packed))
    }

    /// Whether a view is of a table that is not trained.
    pub(crate) fn is_fixed(&self, param: Param) -> bool {
        self.sinusoids.iter().any(|table| table.range().contains(&param.start))
    }

    /// A table of rotary positions.
    pub(crate) fn rotary(&self, angles: Angles) -> &RotaryTable {
        &self.rotary[angles.0]
    }

    /// Where they are.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// What models compute in.
    pub fn dtype(&self) -> DType {
        if self.compute.is_some() { DType::Bf16 } else { DType::F32 }
    }

    /// All of them, in the order of the flat buffers.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// How many numbers a checkpoint holds.
    pub fn count(&self) -> usize {
        self.entries.iter().map(|entry| entry.shape.elements()).sum()
    }

    /// Lets weight decay apply to all of them, to biases and LayerNorm as well. For optimizers that are made afterwards.
    pub fn decay_all(&mut self) {
        self.entries.iter_mut().for_each(|entry| entry.decay = true);
    }

    /// Draws initial values: the same for a seed on every device.
    pub fn initialise(&mut self, seed: u64) -> Result<()> {
        for i in 0..self.entries.len() {
            let entry = &self.entries[i];
            let mut values = vec![0.0; entry.shape.elements()];
            let threads = self.device.threads();
            match entry.init {
                Init::Zeros => {}
                Init::Ones => values.fill(1.0),
                Init::Constant(number) => values.fill(number),
                Init::OpenForgetGates => {
                    let quarter = values.len() / 4;
                    values[quarter..2 * quarter].fill(1.0);
                }
                Init::TruncatedNormal(deviation) => draw(&mut values, (deviation, 2.0), seed, i, threads),
                Init::TruncatedNormalAt(deviation, most) => draw(&mut values, (deviation, most), seed, i, threads),
                Init::Normal(deviation) => draw(&mut values, (deviation, f32::INFINITY), seed, i, threads),
                Init::Uniform(bound) => draw_evenly(&mut values, bound, seed, i),
            }
            self.write(i, &values)?;
        }
        self.refresh()
    }

    /// A parameter's numbers, by its place in [`Parameters::entries`].
    pub fn read(&self, entry: usize) -> Result<Vec<f32>> {
        let Entry { start, shape, .. } = self.entries[entry];
        self.values.view(start, shape).to_vec()
    }

    /// Sets a parameter's numbers. Call [`Parameters::refresh`] after the last.
    pub fn write(&mut self, entry: usize, numbers: &[f32]) -> Result<()> {
        let Entry { start, shape, .. } = self.entries[entry];
        if numbers.len() != shape.elements() {
            let got = [numbers.len()].into();
            return Err(TensorError::Shape { operation: "write", what: "the parameter", expected: shape, got });
        }
        self.values.view(start, shape).write(numbers)
    }

    /// Sets the numbers of a part of a model. Call [`Parameters::refresh`] after the last.
    pub fn set(&mut self, param: Param, numbers: &[f32]) -> Result<()> {
        if numbers.len() != param.shape.elements() {
            let got = [numbers.len()].into();
            return Err(TensorError::Shape { operation: "set", what: "the parameter", expected: param.shape, got });
        }
        self.vector(param).write(numbers)
    }

    /// Sets a parameter's numbers: `fill` writes all of them, straight to their place where that is in this machine's
    /// memory. Call [`Parameters::refresh`] after the last.
    pub fn fill<E: From<TensorError>>(
        &mut self,
        entry: usize,
        fill: impl FnOnce(&mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let Entry { start, shape, .. } = self.entries[entry];
        let mut view = self.values.view(start, shape);
        match &self.device {
            Device::Cpu(_) => fill(view.slice_mut()),
            Device::Cuda(_) => {
                let mut numbers = vec![0.0; shape.elements()];
                fill(&mut numbers)?;
                Ok(view.write(&numbers)?)
            }
        }
    }

    /// Rounds the values once more into the copy that models compute with.
    pub fn refresh(&mut self) -> Result<()> {
        self.discard_packed();
        // What another thread records must not hold this.
        let device = self.device.clone();
        let _turn = device.turn();
        if let Some(compute) = &mut self.compute {
            match &self.device {
                Device::Cpu(cpu) => cast::to_bf16(&cpu.kernels, self.values.slice(), compute.slice_mut()),
                Device::Cuda(cuda) => cuda::cast::to_bf16(&cuda.gpu, self.values.on_gpu(), compute.on_gpu())?,
            }
        }
        Ok(())
    }

    /// Forgets packed copies of weights that changed.
    pub(crate) fn discard_packed(&mut self) {
        if let Some(packed) = &mut self.packed {
            packed.get_mut().unwrap_or_else(PoisonError::into_inner).clear();
        }
    }

    /// Gradients of these parameters, all zero.
    pub fn gradients(&self) -> Result<Gradients> {
        Gradients::new(self)
    }

    /// A matrix in the dtype that models compute in.
    pub(crate) fn matrix(&self, param: Param) -> Tensor {
        self.compute.as_ref().unwrap_or(&self.values).view(param.start, param.shape)
    }

    /// A vector in a dtype that there is a copy in: f32 always, bf16 where models compute in it.
    pub(crate) fn in_dtype(&self, param: Param, dtype: DType) -> Tensor {
        if dtype == DType::F32 { self.vector(param) } else { self.matrix(param) }
    }

    /// Its numbers in f32, on the CPU.
    pub(crate) fn slice(&self, param: Param) -> &[f32] {
        &self.values.slice::<f32>()[param.range()]
    }

    /// A vector in f32.
    pub(crate) fn vector(&self, param: Param) -> Tensor {
        self.values.view(param.start, param.shape)
    }

    pub(crate) fn flat(&self) -> &Tensor {
        &self.values
    }

    pub(crate) fn flat_copy(&self) -> Option<&Tensor> {
        self.compute.as_ref()
    }
}

/// Draws `values` between a bound and its negative; parts that start like this are small.
fn draw_evenly(values: &mut [f32], bound: f32, seed: u64, entry: usize) {
    let mut stream = Stream::new(seed, INITIAL_WEIGHTS, (entry as u64) << 32);
    values.iter_mut().for_each(|value| *value = (2.0 * stream.uniform() - 1.0) * bound);
}

/// Draws `values` block by block, so that blocks can be drawn in parallel.
fn draw(values: &mut [f32], (deviation, most): (f32, f32), seed: u64, entry: usize, threads: usize) {
    let fill = |block: usize, values: &mut [f32]| {
        let mut stream = Stream::new(seed, INITIAL_WEIGHTS, (entry as u64) << 32 | block as u64);
        for value in values {
            let mut x = stream.normal();
            while x.abs() > most {
                x = stream.normal();
            }
            *value = x * deviation;
        }
    };
    let blocks = values.len().div_ceil(INITIAL_BLOCK);
    let share = blocks.div_ceil(threads).max(1);
    in_threads(threads, values.chunks_mut(share * INITIAL_BLOCK).enumerate(), |(i, part)| {
        part.chunks_mut(INITIAL_BLOCK).enumerate().for_each(|(j, values)| fill(i * share + j, values));
    });
}

/// The gradients of [`Parameters`], in f32 and the same layout.
///
/// Zeroing them is only a note: the first operation that has something to add to a parameter's gradient writes it
/// instead, and what nobody wrote is zeroed at the end of the backward pass. That saves two passes over all of them.
pub struct Gradients {
    device: Device,
    values: Tensor,
    /// For each entry, where it starts and whether its gradient counts yet; in the order of the flat buffers.
    entries: Vec<GradientEntry>,
}

struct GradientEntry {
    start: usize,
    len: usize,
    written: bool,
}

impl Gradients {
    fn new(parameters: &Parameters) -> Result<Self> {
        let values = Tensor::zeros(&parameters.device, parameters.values.shape(), DType::F32)?;
        let entry = |e: &Entry| GradientEntry { start: e.start, len: e.shape.elements(), written: true };
        let entries = parameters.entries.iter().map(entry).collect();
        Ok(Self { device: parameters.device.clone(), values, entries })
    }

    /// Sets all to zero.
    pub fn zero(&mut self) {
        self.entries.iter_mut().for_each(|entry| entry.written = false);
    }

    /// The norm of all gradients together. Not finite if any of them is not. Waits for it.
    pub fn norm(&self) -> Result<f64> {
        let _timer = self.device.timer(Kind::GradientNorm, 0, &[&self.values]);
        match &self.device {
            Device::Cpu(cpu) => Ok(reduce::sum_of_squares(&cpu.kernels, self.values.slice()).sqrt()),
            Device::Cuda(cuda) => {
                let sum = cuda.gpu.empty(1, cuda::DType::F64)?;
                cuda::reduce::sum_of_squares(&cuda.gpu, self.values.on_gpu(), sum.view())?;
                Ok(cuda.gpu.read::<f64>(sum.view())?[0].sqrt())
            }
        }
    }

    /// Whether nothing was added since [`Gradients::zero`].
    pub fn is_zero(&self) -> bool {
        self.entries.iter().all(|entry| !entry.written)
    }

    /// Notes that a recorded pass was played, which wrote all of them.
    pub fn played(&mut self) {
        self.entries.iter_mut().for_each(|entry| entry.written = true);
    }

    /// The gradient of a parameter of `parameters`, by its place in its entries.
    pub fn read(&self, parameters: &Parameters, entry: usize) -> Result<Vec<f32>> {
        let Entry { start, shape, .. } = parameters.entries[entry];
        self.values.view(start, shape).to_vec()
    }

    /// A parameter's gradient, and whether to add to what is there (else all of it must be written).
    pub(crate) fn target(&mut self, param: Param) -> Result<(Tensor, bool)> {
        let view = self.values.view(param.start, param.shape);
        let range = param.range();
        let first = self.entries.partition_point(|entry| entry.start + entry.len <= range.start);
        let last = self.entries.partition_point(|entry| entry.start < range.end);
        // Of parameters that are seen as one, another view may have written some: the others then begin with zeros.
        let accumulate = self.entries[first..last].iter().any(|entry| entry.written);
        for i in first..last {
            let GradientEntry { start, len, written } = self.entries[i];
            if !written {
                // A view of some of its rows: nobody else writes those around them.
                let own = if accumulate { start..start } else { range.start.max(start)..range.end.min(start + len) };
                for rest in [start..own.start, own.end..start + len] {
                    if !rest.is_empty() {
                        self.fill_zero(self.values.view(rest.start, [rest.len()].into()))?;
                    }
                }
            }
            self.entries[i].written = true;
        }
        Ok((view, accumulate))
    }

    /// A parameter's gradient for an operation that can only add.
    pub(crate) fn sum(&mut self, param: Param) -> Result<Tensor> {
        let (view, accumulate) = self.target(param)?;
        if !accumulate {
            self.fill_zero(view.clone())?;
        }
        Ok(view)
    }

    /// Zeroes what no operation wrote since [`Gradients::zero`].
    pub(crate) fn finish(&mut self) -> Result<()> {
        for i in 0..self.entries.len() {
            let GradientEntry { start, len, written } = self.entries[i];
            if !written {
                self.fill_zero(self.values.view(start, [len].into()))?;
                self.entries[i].written = true;
            }
        }
        Ok(())
    }

    fn fill_zero(&self, mut view: Tensor) -> Result<()> {
        let _timer = self.device.timer(Kind::ZeroGradients, 0, &[&view]);
        match &self.device {
            Device::Cpu(cpu) => henson_kernels::cpu::rows::fill_zero(&cpu.kernels, view.slice_mut::<f32>()),
            Device::Cuda(cuda) => cuda.gpu.fill_zero(view.on_gpu())?,
        }
        Ok(())
    }

    pub(crate) fn flat(&self) -> &Tensor {
        &self.values
    }

    pub(crate) fn flat_mut(&mut self) -> &mut Tensor {
        &mut self.values
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn build(dtype: DType) -> (Parameters, Param) {
        let device = Device::cpu(None, Some(2)).unwrap();
        let mut builder = Builder::new();
        let fused = builder.at("layer", |b| {
            b.vector("bias", 3, Init::Ones);
            b.side_by_side(&["query.weight", "key.weight"], 5, 7, Init::TruncatedNormal(0.02))
        });
        builder.padded_table("table", 70, 100, Init::TruncatedNormal(0.5));
        (builder.finish(&device, dtype).unwrap(), fused)
    }

    #[test]
    fn paths_are_names_and_neighbours_touch() {
        let (parameters, fused) = build(DType::F32);
        let names: Vec<&str> = parameters.entries().iter().map(|e| e.name.as_str()).collect();
        assert_eq!(names, ["layer.bias", "layer.query.weight", "layer.key.weight", "table"]);
        assert_eq!(parameters.count(), 3 + 2 * 35 + 7000);
        assert_eq!(fused.shape(), [10, 7].into());
        assert_eq!(parameters.entries()[2].start, parameters.entries()[1].start + 35);
        assert!(parameters.entries().iter().map(|e| e.decay).eq([false, true, true, true]));
    }

    #[test]
    fn initial_values_follow_the_seed_alone() {
        let (mut a, fused) = build(DType::F32);
        let (mut b, _) = build(DType::Bf16);
        a.initialise(7).unwrap();
        b.initialise(7).unwrap();
        assert_eq!(a.read(3).unwrap(), b.read(3).unwrap());
        b.initialise(8).unwrap();
        assert_ne!(a.read(3).unwrap(), b.read(3).unwrap());
        let table = a.read(3).unwrap();
        let variance = table.iter().map(|x| x * x).sum::<f32>() / table.len() as f32;
        // A normal distribution cut at two deviations has 0.774 of its variance.
        assert!((variance / 0.25 - 0.774).abs() < 0.05, "{variance}");
        assert!(table.iter().all(|x| x.abs() <= 1.0));
        assert_eq!(a.matrix(fused).to_vec::<f32>().unwrap(), [a.read(1).unwrap(), a.read(2).unwrap()].concat());
        let rounded: Vec<bf16> = b.read(1).unwrap().into_iter().map(bf16::from_f32).collect();
        assert_eq!(b.matrix(fused).to_vec::<bf16>().unwrap()[..35], rounded);
    }

    #[test]
    fn a_normal_start_is_not_cut() {
        let mut builder = Builder::new();
        builder.matrix("head", 70, 100, Init::Normal(0.5));
        let mut parameters = builder.finish(&Device::cpu(None, Some(2)).unwrap(), DType::F32).unwrap();
        parameters.initialise(7).unwrap();
        let values = parameters.read(0).unwrap();
        let variance = values.iter().map(|x| x * x).sum::<f32>() / values.len() as f32;
        assert!((variance / 0.25 - 1.0).abs() < 0.05, "{variance}");
        // Of 7,000 draws, 4.6% lie beyond two deviations.
        let beyond = values.iter().filter(|x| x.abs() > 1.0).count();
        assert!((250..400).contains(&beyond), "{beyond}");
    }
}
