//! Matrix products by cuBLASLt, with what follows them done while a result is still on the chip: scale, bias,
//! activation, accumulation.
//!
//! Legend: out (m×n) = finish(A·B), A m×k, B k×n, all row-major. cuBLASLt thinks in columns, where a row-major matrix is
//! its own transpose: it is asked for outᵀ = Bᵀ·Aᵀ.
//!
//! For every shape the library proposes some algorithms; they are timed once, on outputs of no consequence, and the best
//! is remembered. [`Blas::choices`] writes the choices down, so that a run that is continued computes the same bits.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::fmt;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::cublaslt::{result, sys};

use super::error::{CudaError, Result};
use super::gpu::{Context, DType, Event, Gpu, Purpose, View};
use super::library::{Library, Search};
use super::{activation, reduce, rows};
use crate::cpu::activation::Activation;

/// A row-major matrix in device memory.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    view: View<'a>,
    rows: usize,
    columns: usize,
    stride: usize,
    transposed: bool,
}

impl<'a> Matrix<'a> {
    /// A matrix without gaps.
    #[track_caller]
    pub fn new(view: View<'a>, rows: usize, columns: usize) -> Self {
        Self::strided(view, rows, columns, columns)
    }

    /// A matrix whose rows start `stride` elements apart.
    #[track_caller]
    pub fn strided(view: View<'a>, rows: usize, columns: usize, stride: usize) -> Self {
        assert!(stride >= columns, "rows of {columns} overlap with the stride {stride}");
        let needed = if rows == 0 { 0 } else { (rows - 1) * stride + columns };
        assert!(view.len() >= needed, "matrix is shorter than {rows}×{columns}");
        Self { view, rows, columns, stride, transposed: false }
    }

    /// The same elements with rows and columns exchanged; nothing is moved.
    pub fn transposed(self) -> Self {
        Self { rows: self.columns, columns: self.rows, transposed: !self.transposed, ..self }
    }

    /// The power of two that its address, and those of matrices `step` elements apart, are multiples of, 16 at most.
    fn alignment(&self, step: usize) -> u32 {
        let step = (step * self.view.dtype().size()) as u64;
        1 << (self.view.address() | step).trailing_zeros().min(4)
    }

    /// Whether `count` matrices, `step` elements apart, lie within the view.
    fn has(&self, count: usize, step: usize) -> bool {
        let (rows, columns) = if self.transposed { (self.columns, self.rows) } else { (self.rows, self.columns) };
        rows == 0 || (count - 1) * step + (rows - 1) * self.stride + columns <= self.view.len()
    }
}

/// Several products of one shape, such as those of an attention's heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Batch {
    /// How many; at least one.
    pub count: usize,
    /// Elements from one A to the next, from one B and from one output.
    pub steps: [usize; 3],
}

impl Batch {
    const ONE: Self = Self { count: 1, steps: [0; 3] };
}

/// What happens to a result on its way out, in this order.
#[derive(Clone, Copy, Debug)]
pub struct Finish<'a> {
    /// Multiplied with.
    pub scale: f32,
    /// Added to every row; length n. Free where it has the dtype of the output.
    pub bias: Option<View<'a>>,
    /// Applied then: GELU in its tanh form; what it was applied to is kept here (m×n, without gaps).
    pub gelu_tanh: Option<View<'a>>,
    /// Multiplied with then: the tanh form's derivative at what `gelu_tanh` kept.
    pub gelu_tanh_gradient: Option<View<'a>>,
    /// Gets the sums of A's rows (m numbers in f32): the gradient of a bias where A is the transposed gradient of the
    /// layer's output. The flag: whether they are added to what is there. On an H200 this costs more than
    /// [`reduce::column_sums`] does by itself, and far more than the sums that LayerNorm's and GELU's gradients give along.
    pub row_sums: Option<(View<'a>, bool)>,
    /// Whether the result is added to what `out` holds.
    pub accumulate: bool,
    /// Whether f32 operands may be rounded to TF32, as they may wherever [`Gpu::allow_tf32`] was called.
    pub tf32: bool,
}

impl Default for Finish<'_> {
    fn default() -> Self {
        let (bias, gelu_tanh, gelu_tanh_gradient, row_sums) = (None, None, None, None);
        Self { scale: 1.0, bias, gelu_tanh, gelu_tanh_gradient, row_sums, accumulate: false, tf32: false }
    }
}

/// `out` (m×n, f32 or bf16, f32 where the operands are) = finish(A·B).
#[track_caller]
pub fn product(gpu: &Gpu, a: Matrix<'_>, b: Matrix<'_>, out: Matrix<'_>, finish: Finish<'_>) -> Result<()> {
    let (m, n, k) = (a.rows, b.columns, a.columns);
    assert!(b.rows == k, "inner sizes differ: {m}×{k} times {}×{n}", b.rows);
    assert!((out.rows, out.columns, out.transposed) == (m, n, false), "out is not {m}×{n}");
    assert!(k > 0, "the inner size is 0");
    let (input, output) = (a.view.dtype(), out.view.dtype());
    assert!(b.view.dtype() == input, "operands have different dtypes");
    let fine = matches!((input, output), (DType::F32, DType::F32) | (DType::Bf16, DType::F32 | DType::Bf16));
    assert!(fine, "no product of {input:?} into {output:?}");
    assert!(finish.bias.is_none_or(|bias| bias.len() == n), "bias has another length than {n}");
    let kept = [finish.gelu_tanh, finish.gelu_tanh_gradient];
    assert!(kept.iter().flatten().all(|v| v.len() == m * n && v.dtype() == output), "what GELU keeps is not {m}×{n}");
    assert!(kept.iter().flatten().count() <= 1, "GELU and its gradient in one product");
    assert!(finish.row_sums.is_none_or(|(sums, _)| sums.len() == m), "row sums have another length than {m}");
    if m == 0 || n == 0 {
        return Ok(());
    }
    gpu.bind()?;
    let blas = gpu.blas()?;
    let fused = Fusion::of(&finish, output);
    if let Some(fused) = fused
        && blas.run(gpu, a, b, out, &finish, fused)?
    {
        return Ok(());
    }
    // What the library does not do at once is done by kernels of our own afterwards.
    assert!(
        out.stride == n || kept.iter().all(Option::is_none) && finish.bias.is_none(),
        "gaps between rows with a bias"
    );
    assert!(!finish.accumulate || finish.bias.is_none() && kept.iter().all(Option::is_none), "a bias that accumulates");
    let plain = Finish { bias: None, gelu_tanh: None, gelu_tanh_gradient: None, row_sums: None, ..finish };
    // GELU's input is kept in any case, so the product goes there.
    let target = finish.gelu_tanh.map_or(out, |kept| Matrix::new(kept, m, n));
    if !blas.run(gpu, a, b, target, &plain, Fusion::None)? {
        let action = format!("multiply {m}×{k} by {k}×{n} ({input:?} into {output:?})");
        return Err(CudaError::Blas { action, status: "the library knows no way".into() });
    }
    if let Some(bias) = finish.bias {
        rows::add_bias(gpu, target.view.part(0, m * n), bias)?;
    }
    if let Some(kept) = finish.gelu_tanh {
        activation::forward(gpu, Activation::GeluTanh, kept, None, out.view.part(0, m * n))?;
    }
    if let Some(kept) = finish.gelu_tanh_gradient {
        let d = out.view.part(0, m * n);
        activation::backward(gpu, Activation::GeluTanh, kept, None, d, d, None)?;
    }
    if let Some((sums, add)) = finish.row_sums {
        assert!(a.transposed && a.stride == m, "row sums of an A that is not the transpose of a whole matrix");
        reduce::column_sums(gpu, a.view.part(0, k * m), reduce::Sum { to: sums, add })?;
    }
    Ok(())
}

/// The same for several matrices, each some elements behind the one before, of which the first are given. Only the scale and
/// accumulation of `finish` count.
#[track_caller]
pub fn products(
    gpu: &Gpu,
    batch: Batch,
    a: Matrix<'_>,
    b: Matrix<'_>,
    out: Matrix<'_>,
    finish: Finish<'_>,
) -> Result<()> {
    let (m, n, k) = (a.rows, b.columns, a.columns);
    assert!(b.rows == k && k > 0, "inner sizes differ: {m}×{k} times {}×{n}", b.rows);
    assert!((out.rows, out.columns, out.transposed) == (m, n, false), "out is not {m}×{n}");
    let (input, output) = (a.view.dtype(), out.view.dtype());
    assert!(b.view.dtype() == input, "operands have different dtypes");
    assert!(output == input || output == DType::F32, "no products of {input:?} into {output:?}");
    assert!(Fusion::of(&finish, output) == Some(Fusion::None), "a batch of products has no finish");
    let within = [a, b, out].iter().zip(batch.steps).all(|(matrix, step)| matrix.has(batch.count, step));
    assert!(batch.count > 0 && within, "a batch of {} reaches beyond its matrices", batch.count);
    if m == 0 || n == 0 {
        return Ok(());
    }
    gpu.bind()?;
    match gpu.blas()?.run_batch(gpu, batch, [a, b, out], &finish, Fusion::None)? {
        true => Ok(()),
        false => {
            let action = format!("multiply {} times {m}×{k} by {k}×{n} ({input:?})", batch.count);
            Err(CudaError::Blas { action, status: "the library knows no way".into() })
        }
    }
}

/// What the library does besides multiplying.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Fusion {
    None,
    Bias,
    GeluTanh,
    GeluTanhBias,
    GeluTanhGradient,
    RowSums,
}

impl Fusion {
    const ALL: [(Fusion, &'static str); 6] = [
        (Fusion::None, "plain"),
        (Fusion::Bias, "bias"),
        (Fusion::GeluTanh, "gelu"),
        (Fusion::GeluTanhBias, "gelu-bias"),
        (Fusion::GeluTanhGradient, "gelu-gradient"),
        (Fusion::RowSums, "row-sums"),
    ];

    /// Nothing where the library has no such combination.
    fn of(finish: &Finish<'_>, output: DType) -> Option<Self> {
        // The library adds a bias of the output's dtype only.
        if finish.bias.is_some_and(|bias| bias.dtype() != output) {
            return None;
        }
        let gelu = (finish.gelu_tanh.is_some(), finish.gelu_tanh_gradient.is_some());
        match (finish.bias.is_some(), gelu, finish.row_sums) {
            (false, (false, false), None) => Some(Fusion::None),
            (true, (false, false), None) => Some(Fusion::Bias),
            (false, (true, false), None) => Some(Fusion::GeluTanh),
            (true, (true, false), None) => Some(Fusion::GeluTanhBias),
            (false, (false, true), None) => Some(Fusion::GeluTanhGradient),
            // It stores sums in the output's dtype.
            (false, (false, false), Some(_)) if output == DType::F32 => Some(Fusion::RowSums),
            _ => None,
        }
    }

    fn epilogue(self) -> sys::cublasLtEpilogue_t {
        use sys::cublasLtEpilogue_t as E;
        match self {
            Fusion::None => E::CUBLASLT_EPILOGUE_DEFAULT,
            Fusion::Bias => E::CUBLASLT_EPILOGUE_BIAS,
            Fusion::GeluTanh => E::CUBLASLT_EPILOGUE_GELU_AUX,
            Fusion::GeluTanhBias => E::CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
            Fusion::GeluTanhGradient => E::CUBLASLT_EPILOGUE_DGELU,
            // A of ours is B of theirs.
            Fusion::RowSums => E::CUBLASLT_EPILOGUE_BGRADB,
        }
    }

    fn keeps(self) -> bool {
        matches!(self, Fusion::GeluTanh | Fusion::GeluTanhBias | Fusion::GeluTanhGradient)
    }
}

/// All that an algorithm may depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Shape {
    m: usize,
    n: usize,
    k: usize,
    /// (stride, transposed, alignment) of A and B.
    a: (usize, bool, u32),
    b: (usize, bool, u32),
    /// (stride, alignment).
    out: (usize, u32),
    /// Whether operands and output are bf16.
    bf16: (bool, bool),
    fusion: Fusion,
    accumulate: bool,
    tf32: bool,
    batch: Batch,
}

impl Shape {
    /// Shapes that differ little in one of their sizes, such as the number of tokens, have the same class: sizes are rounded
    /// up to halves of a power of two.
    fn class(&self) -> Self {
        let rounded = |n: usize| n.next_multiple_of((n.next_power_of_two() / 4).max(1));
        // Strides follow the sizes; what matters of them is the alignment.
        let matrix = |(stride, transposed, alignment): (usize, bool, u32)| (rounded(stride), transposed, alignment);
        Self {
            m: rounded(self.m),
            n: rounded(self.n),
            k: rounded(self.k),
            a: matrix(self.a),
            b: matrix(self.b),
            out: (rounded(self.out.0), self.out.1),
            ..*self
        }
    }

    /// Whether algorithms are timed for a class. Shapes do not ask for themselves: one that is not worth it would be multiplied by the
    /// library's favourite until a larger one of its class comes, and by that one's choice in a process that begins later.
    fn is_worth_searching(&self) -> bool {
        2 * self.m * self.n * self.k * self.batch.count >= WORTH_SEARCHING
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { m, n, k, a, b, out, bf16, fusion, accumulate, tf32, batch } = self;
        let name = Fusion::ALL.iter().find(|(known, _)| known == fusion).map_or("", |(_, name)| name);
        let bits = |x: bool| u8::from(x);
        write!(f, "{m} {n} {k} {} {} {} {} {} {}", a.0, bits(a.1), a.2, b.0, bits(b.1), b.2)?;
        write!(f, " {} {} {} {} {name}", out.0, out.1, bits(bf16.0), bits(bf16.1))?;
        write!(f, " {} {}", bits(*accumulate), bits(*tf32))?;
        match batch {
            &Batch::ONE => Ok(()),
            Batch { count, steps: [a, b, out] } => write!(f, " {count} {a} {b} {out}"),
        }
    }
}

impl FromStr for Shape {
    type Err = String;

    fn from_str(s: &str) -> std::result::Result<Self, String> {
        let fields: Vec<&str> = s.split_whitespace().collect();
        let [m, n, k, a0, a1, a2, b0, b1, b2, o0, o1, f0, f1, fusion, accumulate, tf32, ref batch @ ..] = fields[..]
        else {
            return Err(format!("a shape has 16 fields, this has {}", fields.len()));
        };
        let number = |s: &str| s.parse::<usize>().map_err(|_| format!("`{s}` is not a number"));
        let batch = match *batch {
            [] => Batch::ONE,
            [count, a, b, out] => Batch { count: number(count)?, steps: [number(a)?, number(b)?, number(out)?] },
            _ => return Err(format!("a shape has 16 fields, or 20 with a batch, this has {}", fields.len())),
        };
        let small = |s: &str| s.parse::<u32>().map_err(|_| format!("`{s}` is not a number"));
        let bit = |s: &str| match s {
            "0" => Ok(false),
            "1" => Ok(true),
            _ => Err(format!("`{s}` is neither 0 nor 1")),
        };
        let known = Fusion::ALL.iter().find(|(_, name)| *name == fusion);
        Ok(Self {
            m: number(m)?,
            n: number(n)?,
            k: number(k)?,
            a: (number(a0)?, bit(a1)?, small(a2)?),
            b: (number(b0)?, bit(b1)?, small(b2)?),
            out: (number(o0)?, small(o1)?),
            bf16: (bit(f0)?, bit(f1)?),
            fusion: known.map(|(fusion, _)| *fusion).ok_or(format!("`{fusion}` is no known fusion"))?,
            accumulate: bit(accumulate)?,
            tf32: bit(tf32)?,
            batch,
        })
    }
}

/// The library's descriptors for a shape.
struct Descriptors {
    operation: sys::cublasLtMatmulDesc_t,
    // In their words: A is our B, B is our A.
    a: sys::cublasLtMatrixLayout_t,
    b: sys::cublasLtMatrixLayout_t,
    out: sys::cublasLtMatrixLayout_t,
}

// SAFETY: handles of the library, used under a lock.
unsafe impl Send for Descriptors {}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: made by `Blas::describe`, destroyed once.
        unsafe {
            let _ = result::destroy_matmul_desc(self.operation);
            for layout in [self.a, self.b, self.out] {
                let _ = result::destroy_matrix_layout(layout);
            }
        }
    }
}

/// A shape's descriptors and algorithm; none where the library knows no way.
type Plan = Option<(Descriptors, sys::cublasLtMatmulAlgo_t)>;

/// Work space of the library: what it recommends for Hopper, twice.
const WORKSPACE: usize = 64 << 20;

/// Multiply-adds of a product that takes so short that its launch counts more than its algorithm: a few microseconds.
const WORTH_SEARCHING: usize = 2_000_000_000;

/// Algorithms that are tried for a shape.
const CANDIDATES: usize = 32;

/// A line behind the first of choices that several processes share: what is not among them is the library's first proposal.
const NO_SEARCH: &str = "no search";

/// cuBLASLt with the plans that were made.
pub struct Blas {
    handle: sys::cublasLtHandle_t,
    plans: Mutex<HashMap<Shape, Plan>>,
    /// Choices that were read from a file, and those that were made: by class. Files may also have single shapes.
    choices: Mutex<HashMap<Shape, sys::cublasLtMatmulAlgo_t>>,
    search: Mutex<bool>,
    /// Where this machine's choices are kept, so that a run and its repetition compute the same bits; none: nowhere.
    store: Option<PathBuf>,
    context: Arc<Context>,
}

// SAFETY: the handle may be used from any thread.
unsafe impl Send for Blas {}
// SAFETY: as above.
unsafe impl Sync for Blas {}

impl Drop for Blas {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            self.plans.lock().unwrap_or_else(PoisonError::into_inner).clear();
            // SAFETY: created once.
            let _ = unsafe { result::destroy_handle(self.handle) };
        }
    }
}

impl Blas {
    /// Choices are read from a file in `cache` of their own for each version of the library and kind of GPU, and added to it.
    pub(crate) fn new(search: &Search, context: Arc<Context>, cache: Option<&Path>, gpu: &str) -> Result<Self> {
        search.load(Library::Blas)?;
        let handle = result::create_handle().map_err(|e| error("start", e))?;
        let (plans, choices) = (Mutex::default(), Mutex::default());
        let mut blas = Self { handle, plans, choices, search: Mutex::new(true), store: None, context };
        let name: String = gpu.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        blas.store = cache.map(|cache| cache.join(format!("products-{}-{name}.txt", blas.version())));
        if let Some(text) = blas.store.as_ref().and_then(|store| std::fs::read_to_string(store).ok()) {
            let mut known = lock(&blas.choices);
            // Another process may be writing its last line, which is then not taken. Of two processes that searched at the
            // same time, the first line holds, then and ever after.
            for (shape, algorithm) in text.lines().filter_map(|line| choice(line).ok()) {
                known.entry(shape).or_insert(algorithm);
            }
        }
        Ok(blas)
    }

    /// Keeps what a search found for a class, here and on disk.
    fn keep(&self, class: Shape, algorithm: sys::cublasLtMatmulAlgo_t) {
        lock(&self.choices).insert(class, algorithm);
        if let Some(store) = &self.store {
            // Without the file, the next run searches again and may differ in its last bits, and nothing else.
            let _ = append(store, &line(&class, &algorithm));
        }
    }

    /// The library's version.
    pub fn version(&self) -> usize {
        // SAFETY: the library is loaded.
        unsafe { sys::cublasLtGetVersion() }
    }

    /// Whether algorithms are timed; otherwise the library's first proposal is taken. On at first.
    pub fn set_search(&self, on: bool) {
        *lock(&self.search) = on;
    }

    /// Forgets what was chosen for single shapes: with other choices of classes, or with a search, it may be another.
    pub fn discard_plans(&self) {
        lock(&self.plans).clear();
    }

    /// The choices made so far, one a line, in a fixed order; and whether nothing else is to be timed.
    pub fn choices(&self, gpu: &Gpu) -> String {
        let mut lines: Vec<String> =
            lock(&self.choices).iter().map(|(shape, algorithm)| line(shape, algorithm)).collect();
        lines.sort();
        if !*lock(&self.search) {
            lines.insert(0, NO_SEARCH.to_owned());
        }
        format!("{}\n{}\n", self.header(gpu), lines.join("\n"))
    }

    /// Takes choices that [`Blas::choices`] gave, before anything is computed. Those of another library or GPU are ignored: `false`.
    pub fn load_choices(&self, gpu: &Gpu, text: &str) -> Result<bool> {
        let mut lines = text.lines().enumerate();
        if lines.next().is_none_or(|(_, line)| line != self.header(gpu)) {
            return Ok(false);
        }
        if text.lines().nth(1) == Some(NO_SEARCH) {
            self.set_search(false);
        }
        let read: Vec<_> = lines
            .filter(|(_, line)| !line.is_empty() && *line != NO_SEARCH)
            .map(|(i, line)| choice(line).map_err(|problem| CudaError::Choices { line: i + 1, problem }))
            .collect::<Result<_>>()?;
        lock(&self.choices).extend(read);
        Ok(true)
    }

    fn header(&self, gpu: &Gpu) -> String {
        format!("henson products 1, cuBLASLt {}, {}", self.version(), gpu.name())
    }

    /// Runs a product; `false` where the library knows no way.
    fn run(
        &self,
        gpu: &Gpu,
        a: Matrix<'_>,
        b: Matrix<'_>,
        out: Matrix<'_>,
        finish: &Finish<'_>,
        fusion: Fusion,
    ) -> Result<bool> {
        self.run_batch(gpu, Batch::ONE, [a, b, out], finish, fusion)
    }

    fn run_batch(
        &self,
        gpu: &Gpu,
        batch: Batch,
        [a, b, out]: [Matrix<'_>; 3],
        finish: &Finish<'_>,
        fusion: Fusion,
    ) -> Result<bool> {
        let shape = Shape {
            m: a.rows,
            n: b.columns,
            k: a.columns,
            a: (a.stride, a.transposed, a.alignment(batch.steps[0])),
            b: (b.stride, b.transposed, b.alignment(batch.steps[1])),
            out: (out.stride, out.alignment(batch.steps[2])),
            bf16: (a.view.dtype() == DType::Bf16, out.view.dtype() == DType::Bf16),
            fusion,
            accumulate: finish.accumulate,
            tf32: (finish.tf32 || gpu.allows_tf32()) && a.view.dtype() == DType::F32,
            batch,
        };
        let sums = match finish.row_sums {
            // The library overwrites, so what is to be added goes elsewhere first.
            Some((_, true)) => gpu.scratch(Purpose::Vector, 4 * shape.m)?,
            Some((sums, false)) => sums.address(),
            None => 0,
        };
        let kept = finish.gelu_tanh.or(finish.gelu_tanh_gradient).map_or(0, |view| view.address());
        let bias = finish.bias.map_or(sums, |bias| bias.address());
        let operands = Operands {
            a: a.view.address(),
            b: b.view.address(),
            out: out.view.address(),
            bias,
            kept,
            scale: finish.scale,
            accumulate: finish.accumulate,
        };
        let mut plans = lock(&self.plans);
        let plan = match plans.entry(shape) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(self.plan(gpu, &shape, &operands)?),
        };
        let Some((descriptors, algorithm)) = plan else { return Ok(false) };
        self.multiply(gpu, &shape, descriptors, algorithm, &operands)?;
        drop(plans);
        if let Some((to, true)) = finish.row_sums {
            // SAFETY: the scratch holds m numbers, written by the product above.
            rows::add(gpu, unsafe { View::new(sums, shape.m, DType::F32) }, to)?;
        }
        Ok(true)
    }

    fn plan(&self, gpu: &Gpu, shape: &Shape, operands: &Operands) -> Result<Plan> {
        let descriptors = self.describe(shape)?;
        descriptors.point(shape, operands).map_err(|e| error(&format!("describe {shape}"), e))?;
        // What is fastest for a neighbour is nearly so here: numbers of tokens are many, and a search takes its time. So one
        // algorithm is chosen for a class. Where it does not do, and where time does not count, the library's favourite is taken,
        // which depends on the shape alone: what a product computes must not depend on what was computed before.
        let class = shape.class();
        let known = [shape, &class].map(|shape| lock(&self.choices).get(shape).copied());
        if let Some(algorithm) = known.into_iter().flatten().find(|algorithm| self.fits(&descriptors, algorithm)) {
            return Ok(Some((descriptors, algorithm)));
        }
        let candidates = self.candidates(shape, &descriptors)?;
        let Some(&favourite) = candidates.first() else { return Ok(None) };
        if known[1].is_some() || !class.is_worth_searching() || !*lock(&self.search) {
            return Ok(Some((descriptors, favourite)));
        }
        let best = match candidates[..] {
            // Kept as well, for what comes of its class later does it otherwise in a process that knows the class.
            [only] => only,
            _ => self.fastest(gpu, shape, &descriptors, operands, &candidates)?,
        };
        self.keep(class, best);
        Ok(Some((descriptors, best)))
    }

    fn describe(&self, shape: &Shape) -> Result<Descriptors> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let wrong = |e| error(&format!("describe {shape}"), e);
        let compute = match shape.tf32 {
            true => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
            false => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
        };
        let number = |bf16| if bf16 { sys::cudaDataType_t::CUDA_R_16BF } else { sys::cudaDataType_t::CUDA_R_32F };
        let (input, output) = (number(shape.bf16.0), number(shape.bf16.1));
        // A row-major rows×columns matrix is a column-major columns×rows one. `rows` and `columns` are those in memory.
        let layout = |dtype, transposed: bool, rows: usize, columns: usize, stride: usize, step: usize| {
            let (rows, columns) = if transposed { (columns, rows) } else { (rows, columns) };
            let layout =
                result::create_matrix_layout(dtype, columns as u64, rows as u64, stride as i64).map_err(wrong)?;
            set_batch(layout, shape.batch.count, step).map_err(wrong)?;
            Ok(layout)
        };
        let [step_a, step_b, step_out] = shape.batch.steps;
        let descriptors = Descriptors {
            operation: result::create_matmul_desc(compute, sys::cudaDataType_t::CUDA_R_32F).map_err(wrong)?,
            a: layout(input, shape.b.1, shape.k, shape.n, shape.b.0, step_b)?,
            b: layout(input, shape.a.1, shape.m, shape.k, shape.a.0, step_a)?,
            out: layout(output, false, shape.m, shape.n, shape.out.0, step_out)?,
        };
        // CUBLAS_OP_T and CUBLAS_OP_N.
        let operation = i32::from;
        descriptors.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &operation(shape.b.1)).map_err(wrong)?;
        descriptors.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &operation(shape.a.1)).map_err(wrong)?;
        descriptors.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &shape.fusion.epilogue()).map_err(wrong)?;
        if shape.fusion.keeps() {
            let stride = shape.n as i64;
            descriptors.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &stride).map_err(wrong)?;
        }
        Ok(descriptors)
    }

    /// The algorithms that the library proposes, its favourite first.
    fn candidates(&self, shape: &Shape, d: &Descriptors) -> Result<Vec<sys::cublasLtMatmulAlgo_t>> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let wrong = |e| error(&format!("search for {shape}"), e);
        let preference = result::create_matmul_pref().map_err(wrong)?;
        let set = |attribute, value: *const c_void, size| {
            // SAFETY: the preference is alive, and the value has the attribute's size.
            unsafe { result::set_matmul_pref_attribute(preference, attribute, value, size) }.map_err(wrong)
        };
        let alignments = [
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, shape.b.2),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, shape.a.2),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, shape.out.1),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, shape.out.1),
        ];
        let workspace = WORKSPACE;
        let most = Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        let mut outcome = set(most, std::ptr::from_ref(&workspace).cast(), size_of::<usize>());
        for (attribute, bytes) in &alignments {
            outcome = outcome.and_then(|()| set(*attribute, std::ptr::from_ref(bytes).cast(), size_of::<u32>()));
        }
        let mut found = Vec::with_capacity(CANDIDATES);
        let mut count = 0;
        if outcome.is_ok() {
            // SAFETY: all handles are alive, and there is room for as many results as are asked for. Those that the library
            // says it wrote count.
            unsafe {
                let status = sys::cublasLtMatmulAlgoGetHeuristic(
                    self.handle,
                    d.operation,
                    d.a,
                    d.b,
                    d.out,
                    d.out,
                    preference,
                    CANDIDATES as i32,
                    found.as_mut_ptr(),
                    &mut count,
                );
                // An error here means that there is no algorithm: the caller has another way.
                found.set_len(if status.result().is_ok() { count.max(0) as usize } else { 0 });
            }
        }
        // SAFETY: made above.
        let _ = unsafe { result::destroy_matmul_pref(preference) };
        outcome?;
        let usable =
            |r: &sys::cublasLtMatmulHeuristicResult_t| r.state.result().is_ok() && r.workspaceSize <= WORKSPACE;
        Ok(found.into_iter().filter(usable).map(|r| r.algo).collect())
    }

    /// Whether a stored algorithm can still be used.
    fn fits(&self, d: &Descriptors, algorithm: &sys::cublasLtMatmulAlgo_t) -> bool {
        // SAFETY: a plain structure, for which zeros are valid.
        let mut answer: sys::cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
        // SAFETY: all handles are alive.
        let status = unsafe {
            sys::cublasLtMatmulAlgoCheck(self.handle, d.operation, d.a, d.b, d.out, d.out, algorithm, &mut answer)
        };
        status.result().is_ok() && answer.workspaceSize <= WORKSPACE
    }

    /// Times the candidates in turns, so that a GPU that warms up treats all the same.
    fn fastest(
        &self,
        gpu: &Gpu,
        shape: &Shape,
        descriptors: &Descriptors,
        operands: &Operands,
        candidates: &[sys::cublasLtMatmulAlgo_t],
    ) -> Result<sys::cublasLtMatmulAlgo_t> {
        // Nothing that counts is written: the output, what GELU keeps and the sums go to places of their own.
        let size = if shape.bf16.1 { 2 } else { 4 };
        let last = (shape.batch.count - 1) * shape.batch.steps[2];
        let out_bytes = (last + (shape.m - 1) * shape.out.0 + shape.n) * size;
        let kept_bytes = if shape.fusion.keeps() { shape.m * shape.n * size } else { 0 };
        let start = gpu.scratch(Purpose::Trial, out_bytes + kept_bytes + 4 * shape.m + 1024)?;
        let align = |address: u64| address.next_multiple_of(256);
        let kept = align(start + out_bytes as u64);
        let sums = align(kept + kept_bytes as u64);
        let trial = Operands {
            out: start,
            kept: if shape.fusion == Fusion::GeluTanhGradient { operands.kept } else { kept },
            bias: if shape.fusion == Fusion::RowSums { sums } else { operands.bias },
            ..*operands
        };
        let (before, after) = (gpu.event()?, gpu.event()?);
        let mut times = vec![f64::INFINITY; candidates.len()];
        // A candidate that fails is out, as long as another one runs.
        let mut usable: Vec<usize> = (0..candidates.len()).collect();
        usable.retain(|i| self.multiply(gpu, shape, descriptors, &candidates[*i], &trial).is_ok());
        // All of them shortly, then the best few again for longer.
        for rounds in [2, 6] {
            for _ in 0..rounds {
                for i in &usable {
                    let seconds = self.time(gpu, shape, descriptors, &candidates[*i], &trial, (&before, &after))?;
                    times[*i] = times[*i].min(seconds);
                }
            }
            usable.sort_by(|a, b| times[*a].total_cmp(&times[*b]));
            usable.truncate(5);
        }
        // Of equals the first: the library's order is the same everywhere, noise is not.
        let best = usable.first().map_or(f64::INFINITY, |i| times[*i]);
        let chosen = usable.iter().filter(|i| times[**i] <= best * 1.005).min();
        Ok(candidates[chosen.copied().unwrap_or(0)])
    }

    fn time(
        &self,
        gpu: &Gpu,
        shape: &Shape,
        descriptors: &Descriptors,
        algorithm: &sys::cublasLtMatmulAlgo_t,
        operands: &Operands,
        (before, after): (&Event, &Event),
    ) -> Result<f64> {
        const RUNS: usize = 4;
        gpu.record(before)?;
        for _ in 0..RUNS {
            self.multiply(gpu, shape, descriptors, algorithm, operands)?;
        }
        gpu.record(after)?;
        Ok(after.seconds_since(before)? / RUNS as f64)
    }

    fn multiply(
        &self,
        gpu: &Gpu,
        shape: &Shape,
        d: &Descriptors,
        algorithm: &sys::cublasLtMatmulAlgo_t,
        operands: &Operands,
    ) -> Result<()> {
        let wrong = |e| error(&format!("multiply {shape}"), e);
        let workspace = gpu.scratch(Purpose::Blas, WORKSPACE)?;
        d.point(shape, operands).map_err(wrong)?;
        let (scale, keep) = (operands.scale, if operands.accumulate { 1.0f32 } else { 0.0 });
        // SAFETY: descriptors and addresses belong to matrices whose sizes `product` checked; scale and keep are read
        // before the call returns.
        unsafe {
            result::matmul(
                self.handle,
                d.operation,
                std::ptr::from_ref(&scale).cast(),
                std::ptr::from_ref(&keep).cast(),
                operands.b as *const c_void,
                d.a,
                operands.a as *const c_void,
                d.b,
                operands.out as *const c_void,
                d.out,
                operands.out as *mut c_void,
                d.out,
                algorithm,
                workspace as *mut c_void,
                WORKSPACE,
                gpu.stream().cast(),
            )
        }
        .map_err(wrong)
    }
}

/// Makes a layout that of the first of several matrices.
fn set_batch(layout: sys::cublasLtMatrixLayout_t, count: usize, step: usize) -> Result<(), result::CublasError> {
    use sys::cublasLtMatrixLayoutAttribute_t as Attribute;
    if count == 1 {
        return Ok(());
    }
    let (count, step) = (count as i32, step as i64);
    // SAFETY: the layout is alive, and the values have the attributes' sizes.
    unsafe {
        let value = std::ptr::from_ref(&count).cast();
        let attribute = Attribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT;
        result::set_matrix_layout_attribute(layout, attribute, value, size_of::<i32>())?;
        let value = std::ptr::from_ref(&step).cast();
        let attribute = Attribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET;
        result::set_matrix_layout_attribute(layout, attribute, value, size_of::<i64>())
    }
}

/// Addresses and numbers of one call.
#[derive(Clone, Copy)]
struct Operands {
    a: u64,
    b: u64,
    out: u64,
    /// The bias, or where row sums go.
    bias: u64,
    kept: u64,
    scale: f32,
    accumulate: bool,
}

impl Descriptors {
    fn set<T>(&self, attribute: sys::cublasLtMatmulDescAttributes_t, value: &T) -> Result<(), result::CublasError> {
        // SAFETY: the descriptor is alive; the library checks the size.
        unsafe {
            result::set_matmul_desc_attribute(
                self.operation,
                attribute,
                std::ptr::from_ref(value).cast(),
                size_of::<T>(),
            )
        }
    }

    /// Sets the addresses that stand in the description.
    fn point(&self, shape: &Shape, operands: &Operands) -> Result<(), result::CublasError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        if matches!(shape.fusion, Fusion::Bias | Fusion::GeluTanhBias | Fusion::RowSums) {
            self.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &operands.bias)?;
        }
        if shape.fusion.keeps() {
            self.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &operands.kept)?;
        }
        Ok(())
    }
}

/// A choice as a line of a file.
fn line(shape: &Shape, algorithm: &sys::cublasLtMatmulAlgo_t) -> String {
    let words: String = algorithm.data.iter().map(|word| format!("{word:016x}")).collect();
    format!("{shape} {words}")
}

/// What [`line`] wrote, or what is wrong with it.
fn choice(line: &str) -> std::result::Result<(Shape, sys::cublasLtMatmulAlgo_t), String> {
    let (shape, words) = line.rsplit_once(' ').ok_or("there is no algorithm")?;
    Ok((shape.parse()?, parse_algorithm(words).ok_or("an algorithm is 128 digits")?))
}

/// Adds a line in one write, so that processes that do so at the same time do not mix theirs.
fn append(path: &Path, line: &str) -> std::io::Result<()> {
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory)?;
    }
    let mut file = std::fs::OpenOptions::new().create(true).append(true).open(path)?;
    file.write_all(format!("{line}\n").as_bytes())
}

fn parse_algorithm(words: &str) -> Option<sys::cublasLtMatmulAlgo_t> {
    if words.len() != 128 || !words.is_ascii() {
        return None;
    }
    let mut data = [0; 8];
    for (word, text) in data.iter_mut().zip(words.as_bytes().chunks(16)) {
        *word = u64::from_str_radix(std::str::from_utf8(text).ok()?, 16).ok()?;
    }
    Some(sys::cublasLtMatmulAlgo_t { data })
}

fn error(action: &str, error: result::CublasError) -> CudaError {
    CudaError::Blas { action: action.into(), status: format!("{:?}", error.0) }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_share_a_class_and_layers_do_not() {
        let shape = |m: usize, n: usize, k: usize| Shape {
            m,
            n,
            k,
            a: (k, false, 16),
            b: (k, true, 16),
            out: (n, 16),
            bf16: (true, true),
            fusion: Fusion::Bias,
            accumulate: false,
            tf32: false,
            batch: Batch::ONE,
        };
        assert_eq!(shape(16_896, 768, 768).class(), shape(24_576, 768, 768).class());
        assert_ne!(shape(16_384, 768, 768).class(), shape(16_896, 768, 768).class());
        assert_ne!(shape(32_768, 768, 768).class(), shape(32_768, 3072, 768).class());
        assert_ne!(shape(32_768, 768, 768).class(), shape(32_768, 768, 3072).class());
    }

    #[test]
    fn all_shapes_of_a_class_are_searched_or_none() {
        // Parts of about 4,096 tokens with an inner size of 1,024: the first alone has two thousand million operations.
        let shape = |tokens: usize| Shape {
            m: tokens,
            n: 1024,
            k: 256,
            a: (256, false, 16),
            b: (256, true, 16),
            out: (1024, 16),
            bf16: (true, true),
            fusion: Fusion::None,
            accumulate: false,
            tf32: false,
            batch: Batch::ONE,
        };
        let (large, small) = (shape(4096), shape(3712));
        assert!(large.is_worth_searching() && !small.is_worth_searching());
        assert_eq!(large.class(), small.class());
        // What counts is the class, which is a shape of its own class.
        assert_eq!(large.class().class(), large.class());
        assert!(small.class().is_worth_searching());
    }

    #[test]
    fn shapes_and_algorithms_are_read_as_written() {
        for (fusion, _) in Fusion::ALL {
            let shape = Shape {
                m: 3,
                n: 5,
                k: 7,
                a: (7, false, 16),
                b: (9, true, 4),
                out: (5, 2),
                bf16: (true, false),
                fusion,
                accumulate: true,
                tf32: false,
                batch: Batch::ONE,
            };
            assert_eq!(shape.to_string().parse::<Shape>(), Ok(shape));
            let several = Shape { batch: Batch { count: 12, steps: [64, 32, 512] }, ..shape };
            assert_eq!(several.to_string().parse::<Shape>(), Ok(several));
            let algorithm = sys::cublasLtMatmulAlgo_t { data: [1, 2, 3, 4, 5, 6, 7, u64::MAX] };
            let line = line(&shape, &algorithm);
            assert_eq!(choice(&line), Ok((shape, algorithm)));
            // Half a line, as another process may be writing it.
            assert!(choice(&line[..line.len() - 1]).unwrap_err().contains("128 digits"));
        }
        assert!("1 2 3".parse::<Shape>().unwrap_err().contains("16 fields"));
    }
}
