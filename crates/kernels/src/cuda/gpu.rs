//! One GPU: its context, its one stream of work, its memory and its kernels.
//!
//! Everything that a [`Gpu`] is asked to do is queued on one stream and done in that order, so operations need no
//! synchronisation among each other and nothing here waits for the GPU unless its name says so.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::marker::PhantomData;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use cudarc::driver::{result, sys};

use super::compile::{Architecture, Compiler, Source};
use super::error::{Check, CudaError, Result};
use super::library::{Library, Search};
use super::matmul::Blas;
use super::memory::{self, Block, Pinned, Pool};
use crate::philox::DROPOUT_ROUNDS;

/// What numbers in device memory are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// 32-bit floating point.
    F32,
    /// The upper half of it.
    Bf16,
    /// 64-bit floating point, for sums.
    F64,
    /// Indices.
    U32,
}

impl DType {
    /// Bytes of a number.
    pub fn size(self) -> usize {
        match self {
            DType::Bf16 => 2,
            DType::F32 | DType::U32 => 4,
            DType::F64 => 8,
        }
    }
}

/// Numbers on the host that device memory can hold.
pub trait Native: bytemuck::Pod {
    /// What they are there.
    const DTYPE: DType;
}

impl Native for f32 {
    const DTYPE: DType = DType::F32;
}
impl Native for half::bf16 {
    const DTYPE: DType = DType::Bf16;
}
impl Native for f64 {
    const DTYPE: DType = DType::F64;
}
impl Native for u32 {
    const DTYPE: DType = DType::U32;
}

/// Numbers in device memory: where they begin, how many, and what. Only an address; the memory's owner is a [`Buffer`].
///
/// Kernels take views both to read and to write: what they do to which is in their documentation.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    address: u64,
    len: usize,
    dtype: DType,
    owner: PhantomData<&'a Block>,
}

impl<'a> View<'a> {
    /// Numbers at an address of the GPU.
    ///
    /// # Safety
    /// They must lie in memory of the GPU for as long as the view is used, and must be aligned to their size.
    pub unsafe fn new(address: u64, len: usize, dtype: DType) -> Self {
        Self { address, len, dtype, owner: PhantomData }
    }

    /// Where it begins.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// How many numbers.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What they are.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// `len` of the numbers, from `start` on.
    #[track_caller]
    pub fn part(&self, start: usize, len: usize) -> View<'a> {
        assert!(start <= self.len && len <= self.len - start, "range {start}+{len} outside of {}", self.len);
        Self { address: self.address + (start * self.dtype.size()) as u64, len, ..*self }
    }

    /// The same words as f32.
    #[track_caller]
    pub fn as_f32(self) -> View<'a> {
        assert!(self.dtype == DType::U32, "{:?} is not a word", self.dtype);
        View { dtype: DType::F32, ..self }
    }

    /// Whether 16 bytes can be read and written at a time.
    pub(crate) fn is_aligned(&self) -> bool {
        self.address.is_multiple_of(16)
    }

    /// The rows of this many columns, which are floating-point numbers.
    #[track_caller]
    pub(crate) fn rows(&self, operation: &str, columns: usize) -> usize {
        assert!(
            matches!(self.dtype, DType::F32 | DType::Bf16),
            "{operation}: {:?} cannot be computed with",
            self.dtype
        );
        assert!(
            columns > 0 && self.len.is_multiple_of(columns),
            "{operation}: {} is no multiple of {columns}",
            self.len
        );
        self.len / columns
    }

    #[track_caller]
    pub(crate) fn expect(&self, operation: &str, what: &str, len: usize, dtype: DType) {
        assert!(self.len == len, "{operation}: {what} has {} numbers, not {len}", self.len);
        assert!(self.dtype == dtype, "{operation}: {what} is {:?}, not {dtype:?}", self.dtype);
    }
}

/// The address of what may be absent.
pub(crate) fn address(view: Option<View<'_>>) -> u64 {
    view.map_or(0, |view| view.address)
}

/// Memory of the pool that holds `len` numbers.
#[derive(Clone)]
pub struct Buffer {
    block: Arc<Block>,
    len: usize,
    dtype: DType,
}

impl Buffer {
    /// All of its numbers.
    pub fn view(&self) -> View<'_> {
        View { address: self.block.address(), len: self.len, dtype: self.dtype, owner: PhantomData }
    }
}

/// A step's number for dropout: a value, or one u32 in device memory so that a recorded graph can be played again.
#[derive(Clone, Copy, Debug)]
pub enum Step<'a> {
    /// This one.
    Value(u32),
    /// Whatever stands there when the kernel runs.
    At(View<'a>),
}

/// Dropout as kernels take it: the same masks as [`crate::cpu::dropout::Dropout`] with the same numbers.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Dropout<'a> {
    seed: u64,
    step_address: u64,
    step: u32,
    site: u32,
    threshold: u32,
    scale: f32,
    owner: PhantomData<&'a Block>,
}

impl<'a> Dropout<'a> {
    /// Drops with the probability `p`, rounded to a multiple of 2⁻¹⁶; none for p = 0.
    pub fn new(p: f32, seed: u64, step: Step<'a>, site: u32) -> Option<Self> {
        assert!((0.0..1.0).contains(&p), "dropout probability {p} is not in [0, 1)");
        let threshold = (p * 65536.0).round().min(65535.0) as u32;
        let (step, step_address) = match step {
            Step::Value(step) => (step, 0),
            Step::At(view) => {
                view.expect("dropout", "the step", 1, DType::U32);
                (0, view.address)
            }
        };
        let scale = 65536.0 / (65536.0 - threshold as f32);
        (threshold > 0).then_some(Self { seed, step_address, step, site, threshold, scale, owner: PhantomData })
    }

    /// What is kept is multiplied by it.
    pub fn scale(&self) -> f32 {
        self.scale
    }

    /// Philox' keys of its seven rounds, two each, for kernels that have them at hand instead of adding them up.
    pub(crate) fn keys(&self) -> [u32; 2 * DROPOUT_ROUNDS] {
        let (low, high) = (self.seed as u32, (self.seed >> 32) as u32);
        let weyl = |i: usize, (key, step): (u32, u32)| key.wrapping_add(step.wrapping_mul(i as u32 / 2));
        std::array::from_fn(|i| weyl(i, if i % 2 == 0 { (low, 0x9E37_79B9) } else { (high, 0xBB67_AE85) }))
    }

    /// As a kernel's argument; a threshold of 0 drops nothing.
    pub(crate) fn argument(dropout: Option<Self>) -> Self {
        let off = Self { seed: 0, step_address: 0, step: 0, site: 0, threshold: 0, scale: 1.0, owner: PhantomData };
        dropout.unwrap_or(off)
    }
}

/// A factor: a value, or one f32 in device memory so that a recorded graph can be played again with another.
#[derive(Clone, Copy, Debug)]
pub enum Scalar<'a> {
    /// This one.
    Value(f32),
    /// Whatever stands there when the kernel runs.
    At(View<'a>),
}

impl Scalar<'_> {
    /// As kernels take it: (address or 0, value).
    pub(crate) fn arguments(self) -> (u64, f32) {
        match self {
            Scalar::Value(value) => (0, value),
            Scalar::At(view) => {
                view.expect("scalar", "the factor", 1, DType::F32);
                (view.address, 1.0)
            }
        }
    }
}

/// What can be handed to a kernel: plain values that look the same on both sides.
///
/// # Safety
/// The kernel's parameter at that place must have the same size and layout.
pub(crate) unsafe trait Argument {}
// SAFETY: these are the same on the host and on the GPU.
unsafe impl Argument for u32 {}
// SAFETY: as above.
unsafe impl Argument for u64 {}
// SAFETY: as above.
unsafe impl Argument for i32 {}
// SAFETY: as above.
unsafe impl Argument for f32 {}
// SAFETY: as above.
unsafe impl Argument for f64 {}
// SAFETY: `struct Dropout` of common.cuh has the same fields.
unsafe impl Argument for Dropout<'_> {}

/// A variant's definitions, put together without an allocation.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Variant {
    bytes: [u8; 96],
    len: usize,
}

impl Variant {
    /// The definitions with spaces between them.
    fn new(definitions: &[&str]) -> Self {
        let mut variant = Self { bytes: [0; 96], len: 0 };
        for (i, definition) in definitions.iter().enumerate() {
            for part in [if i > 0 { " " } else { "" }, definition] {
                variant.bytes[variant.len..variant.len + part.len()].copy_from_slice(part.as_bytes());
                variant.len += part.len();
            }
        }
        variant
    }

    fn as_str(&self) -> &str {
        std::str::from_utf8(&self.bytes[..self.len]).unwrap_or("")
    }
}

/// The storage types that sources are compiled for.
pub(crate) const STORES: &[&str] = &["STORE=float", "STORE=bf16"];

/// Whether rows are even.
pub(crate) const EVENS: &[&str] = &["EVEN=true", "EVEN=false"];

/// Kernels for floating-point numbers of this dtype.
pub(crate) fn store(dtype: DType) -> &'static str {
    STORES[usize::from(dtype == DType::Bf16)]
}

/// Kernels for even rows, where the columns and all of the views allow it.
pub(crate) fn even(columns: usize, views: &[View<'_>]) -> &'static str {
    EVENS[usize::from(!columns.is_multiple_of(8) || !views.iter().all(View::is_aligned))]
}

/// How many blocks of how many threads, and their shared memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Launch {
    pub(crate) grid: (u32, u32),
    pub(crate) threads: u32,
    pub(crate) shared: u32,
}

impl Launch {
    /// Blocks in one row, without dynamic shared memory.
    pub(crate) fn new(blocks: usize, threads: usize) -> Self {
        Self { grid: (blocks as u32, 1), threads: threads as u32, shared: 0 }
    }
}

/// How to find a GPU and what it needs.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The GPU's number, from 0.
    pub ordinal: usize,
    /// Where libraries may be, beyond the usual places.
    pub search: Search,
    /// Where compiled kernels are kept; none: they are compiled at every start.
    pub cache: Option<PathBuf>,
}

/// A GPU's context in the driver.
pub struct Context {
    device: sys::CUdevice,
    context: sys::CUcontext,
}

// SAFETY: the driver's handles may be used from any thread, once the context is current there.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Makes it the calling thread's current context.
    pub(crate) fn bind(&self) -> Result<()> {
        // SAFETY: retained by `Gpu::new`, released when dropped.
        unsafe { result::ctx::set_current(self.context) }.doing("make the GPU's context current")
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once. At the end of the process nobody could hear of an error.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

/// What kernels use between their own stages; each has its own memory, because two may be alive at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Purpose {
    /// Partial sums.
    Sums,
    /// Learning rates of tensors.
    Rates,
    /// The bias gradient of a product before it is added.
    Vector,
    /// Sorted indices and their counts.
    Sort,
    /// cuBLASLt's own.
    Blas,
    /// Outputs of trial runs.
    Trial,
    /// Attention's own.
    Attention,
    /// Products of contents with positions, and their gradients.
    Positions,
    /// Queries next to their biases, and gradients of them.
    Relative,
    /// What is as large as scores: their gradients, or what is added to them.
    Scores,
    /// States of recurrent layers between two steps.
    Recurrent,
    /// Windows over characters and what filters give for them.
    Convolution,
    /// Sums along the sequences of a conditional random field.
    Field,
    /// Gradients of additive attention before they are added.
    Additive,
}

/// A GPU that computes. Shared by all that compute on it.
pub struct Gpu {
    // Fields are dropped in this order: what needs the context goes first.
    blas: OnceLock<Blas>,
    /// By source, variant and kernel.
    functions: Mutex<HashMap<(&'static str, Variant, &'static str), Function>>,
    modules: Mutex<HashMap<(&'static str, Variant), Module>>,
    scratch: Mutex<HashMap<Purpose, Vec<Arc<Block>>>>,
    fault: Arc<Block>,
    tickets: Arc<Block>,
    pool: Pool,
    stream: Stream,
    copies: Stream,
    context: Arc<Context>,
    search: Search,
    compiler: Compiler,
    architecture: Architecture,
    capability: (i32, i32),
    name: String,
    multiprocessors: usize,
    shared_memory: usize,
    memory: usize,
    tf32: AtomicBool,
    identity: [u8; 16],
}

#[derive(Clone, Copy)]
struct Function {
    function: sys::CUfunction,
    /// Dynamic shared memory that it was allowed to use so far.
    shared: u32,
}

// SAFETY: handles of the driver, see `Context`.
unsafe impl Send for Function {}

struct Module(sys::CUmodule, Arc<Context>);

// SAFETY: as above.
unsafe impl Send for Module {}

impl Drop for Module {
    fn drop(&mut self) {
        if self.1.bind().is_ok() {
            // SAFETY: loaded once; no kernel of it is launched after its `Gpu` is gone.
            let _ = unsafe { result::module::unload(self.0) };
        }
    }
}

struct Stream(sys::CUstream, Arc<Context>);

// SAFETY: as above.
unsafe impl Send for Stream {}
// SAFETY: the driver's calls on a stream may come from several threads.
unsafe impl Sync for Stream {}

impl Stream {
    fn new(context: &Arc<Context>) -> Result<Self> {
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking).doing("create a stream")?;
        Ok(Self(stream, Arc::clone(context)))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.1.bind().is_ok() {
            // SAFETY: created once; the driver finishes what is queued.
            let _ = unsafe { result::stream::destroy(self.0) };
        }
    }
}

/// Bytes of [`Gpu::tickets`].
const TICKETS: usize = 8;

/// Numbers of the operations that can meet a bad index, as kernels write them into the fault word.
const FAULTS: [&str; 11] = [
    "",
    "embedding",
    "gather",
    "scatter_add",
    "cross_entropy",
    "span",
    "sample",
    "rotary",
    "replace",
    "convolution",
    "crf",
];

impl Gpu {
    /// How many GPUs the driver sees, with their names; an error where there is no driver.
    pub fn list(search: &Search) -> Result<Vec<String>> {
        search.load(Library::Driver)?;
        result::init().doing("start the CUDA driver")?;
        let count = result::device::get_count().doing("count GPUs")?;
        let name = |i| result::device::get(i).and_then(result::device::get_name).doing("ask for a GPU's name");
        (0..count).map(name).collect()
    }

    /// A GPU with everything that it needs to compute.
    pub fn new(options: &Options) -> Result<Self> {
        let search = options.search.clone();
        search.load(Library::Driver)?;
        search.load(Library::Blas)?;
        let compiler = Compiler::new(&search, options.cache.clone())?;
        result::init().doing("start the CUDA driver")?;
        let count = result::device::get_count().doing("count GPUs")? as usize;
        if options.ordinal >= count {
            return Err(CudaError::NoDevice { wanted: options.ordinal, count });
        }
        let device = result::device::get(options.ordinal as i32).doing("open the GPU")?;
        let name = result::device::get_name(device).doing("ask for the GPU's name")?;
        use sys::CUdevice_attribute as Attribute;
        // SAFETY: the device is open.
        let ask = |what| unsafe { result::device::get_attribute(device, what) }.doing("ask about the GPU");
        let major = ask(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = ask(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        if major < 8 {
            return Err(CudaError::TooOld { name, major, minor });
        }
        let multiprocessors = ask(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize;
        let shared_memory = ask(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as usize;
        // SAFETY: as above.
        let memory = unsafe { result::device::total_mem(device) }.doing("ask for the GPU's memory")?;
        let identity = result::device::get_uuid(device).doing("ask which GPU it is")?.bytes.map(|byte| byte as u8);
        // SAFETY: as above; released by `Context`.
        let context = unsafe { result::primary_ctx::retain(device) }.doing("make a context on the GPU")?;
        let context = Arc::new(Context { device, context });
        context.bind()?;
        let (stream, copies) = (Stream::new(&context)?, Stream::new(&context)?);
        let pool = Pool::default();
        let fault = memory::take(&pool, None, &context, 4)?;
        let tickets = memory::take(&pool, None, &context, TICKETS)?;
        // SAFETY: four bytes of our own.
        unsafe { result::memset_d8_sync(fault.address(), 0, 4) }.doing("clear memory")?;
        // SAFETY: the same.
        unsafe { result::memset_d8_sync(tickets.address(), 0, TICKETS) }.doing("clear memory")?;
        Ok(Self {
            blas: OnceLock::new(),
            functions: Mutex::default(),
            modules: Mutex::default(),
            scratch: Mutex::default(),
            fault,
            tickets,
            pool,
            stream,
            copies,
            context,
            search,
            compiler,
            architecture: Architecture::of(major, minor),
            capability: (major, minor),
            name,
            multiprocessors,
            shared_memory,
            memory,
            tf32: AtomicBool::new(false),
            identity,
        })
    }

    /// What it calls itself.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What tells it from all other GPUs, of this machine and others.
    pub fn identity(&self) -> [u8; 16] {
        self.identity
    }

    /// Where libraries are looked for.
    pub fn search(&self) -> &Search {
        &self.search
    }

    /// Its compute capability.
    pub fn capability(&self) -> (i32, i32) {
        self.capability
    }

    /// The target that kernels are compiled for.
    pub fn architecture(&self) -> &Architecture {
        &self.architecture
    }

    /// From now on f32 factors of matrix products may be rounded to TF32.
    pub fn allow_tf32(&self) {
        self.tf32.store(true, Ordering::Relaxed);
    }

    /// Whether they may.
    pub fn allows_tf32(&self) -> bool {
        self.tf32.load(Ordering::Relaxed)
    }

    /// How many multiprocessors it has.
    pub fn multiprocessors(&self) -> usize {
        self.multiprocessors
    }

    /// Bytes of shared memory that a block of threads can have.
    pub fn shared_memory(&self) -> usize {
        self.shared_memory
    }

    /// Bytes of its memory.
    pub fn memory(&self) -> usize {
        self.memory
    }

    /// The memory that this process holds on it.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Matrix products.
    pub fn blas(&self) -> Result<&Blas> {
        if let Some(blas) = self.blas.get() {
            return Ok(blas);
        }
        self.bind()?;
        let cache = self.compiler.cache();
        let blas = Blas::new(&self.search, Arc::clone(&self.context), cache, self.name())?;
        Ok(self.blas.get_or_init(|| blas))
    }

    /// A block of at least `bytes` from a pool, of undefined content. Another pool than the GPU's own is trimmed after that one.
    pub fn take(&self, pool: &Pool, bytes: usize) -> Result<Arc<Block>> {
        let spare = (!std::ptr::eq(pool, self.pool())).then(|| self.pool());
        memory::take(pool, spare, &self.context, bytes)
    }

    /// Room for `len` numbers of undefined content.
    pub fn empty(&self, len: usize, dtype: DType) -> Result<Buffer> {
        Ok(Buffer { block: memory::take(&self.pool, None, &self.context, len * dtype.size())?, len, dtype })
    }

    /// Room for `len` zeros.
    pub fn zeros(&self, len: usize, dtype: DType) -> Result<Buffer> {
        let buffer = self.empty(len, dtype)?;
        self.fill_zero(buffer.view())?;
        Ok(buffer)
    }

    /// The same numbers on the GPU. Waits until they are there.
    pub fn upload<T: Native>(&self, numbers: &[T]) -> Result<Buffer> {
        let buffer = self.empty(numbers.len(), T::DTYPE)?;
        self.write(buffer.view(), numbers)?;
        Ok(buffer)
    }

    /// Copies numbers to the GPU. Waits until they are there.
    pub fn write<T: Native>(&self, to: View<'_>, numbers: &[T]) -> Result<()> {
        to.expect("write", "the target", numbers.len(), T::DTYPE);
        if numbers.is_empty() {
            return Ok(());
        }
        self.bind()?;
        // SAFETY: the lengths are the same; the copy is over before `numbers` can go.
        unsafe { result::memcpy_htod_async(to.address, numbers, self.stream.0) }.doing("copy to the GPU")?;
        self.synchronise()
    }

    /// Copies numbers from the GPU, after all that was asked for before.
    pub fn read<T: Native>(&self, from: View<'_>) -> Result<Vec<T>> {
        let mut numbers = vec![T::zeroed(); from.len];
        self.read_into(from, &mut numbers)?;
        Ok(numbers)
    }

    /// The same into a slice of the same length.
    pub fn read_into<T: Native>(&self, from: View<'_>, numbers: &mut [T]) -> Result<()> {
        from.expect("read", "what is read", numbers.len(), T::DTYPE);
        if from.len > 0 {
            self.bind()?;
            // SAFETY: the lengths are the same; the copy is over before `numbers` is read.
            unsafe { result::memcpy_dtoh_async(numbers, from.address, self.stream.0) }.doing("copy from the GPU")?;
        }
        self.synchronise()
    }

    /// Copies from pinned memory, in the order of all else that was asked for, without waiting.
    ///
    /// # Safety
    /// The pinned memory must not be written or dropped until the copy is done.
    pub unsafe fn write_later(&self, from: &Pinned, start: usize, to: View<'_>) -> Result<()> {
        // SAFETY: read by copies only, as the caller promises.
        let bytes = unsafe { from.bytes(start..start + to.len * to.dtype.size()) };
        self.bind()?;
        // SAFETY: the lengths are the same; the rest is the caller's promise.
        unsafe { result::memcpy_htod_async(to.address, bytes, self.stream.0) }.doing("copy to the GPU")
    }

    /// Copies to pinned memory, in the order of all else that was asked for, without waiting.
    ///
    /// # Safety
    /// The pinned memory must not be read, written or dropped until the copy is done.
    pub unsafe fn read_later(&self, from: View<'_>, to: &mut Pinned, start: usize) -> Result<()> {
        // SAFETY: not in use by any other copy, as the caller promises.
        let bytes = unsafe { to.bytes_mut(start..start + from.len * from.dtype.size()) };
        self.bind()?;
        // SAFETY: the lengths are the same; the rest is the caller's promise.
        unsafe { result::memcpy_dtoh_async(bytes, from.address, self.stream.0) }.doing("copy from the GPU")
    }

    /// Copies numbers within the GPU. In a recorded graph the driver does it at some 2.7 TB/s; the identity of
    /// [`activation::forward`](super::activation::forward) is a copy at the memory's speed.
    pub fn copy(&self, from: View<'_>, to: View<'_>) -> Result<()> {
        to.expect("copy", "the target", from.len, from.dtype);
        self.bind()?;
        let bytes = from.len * from.dtype.size();
        // SAFETY: both have this length.
        unsafe { result::memcpy_dtod_async(to.address, from.address, bytes, self.stream.0) }.doing("copy on the GPU")
    }

    /// Sets every number to zero.
    pub fn fill_zero(&self, x: View<'_>) -> Result<()> {
        self.fill_bytes(x, 0)
    }

    /// Sets every byte: 0xff makes NaN of floating-point numbers, which tests use.
    pub fn fill_bytes(&self, x: View<'_>, byte: u8) -> Result<()> {
        self.bind()?;
        // SAFETY: the view's own memory.
        unsafe { result::memset_d8_async(x.address, byte, x.len * x.dtype.size(), self.stream.0) }.doing("fill memory")
    }

    /// Waits until all that was asked for is done.
    pub fn synchronise(&self) -> Result<()> {
        self.bind()?;
        // SAFETY: the stream lives as long as `self`.
        unsafe { result::stream::synchronize(self.stream.0) }.doing("finish the work on the GPU")
    }

    /// The word that kernels write a fault to: see [`Gpu::fault_in`].
    pub fn fault_word(&self) -> View<'_> {
        // SAFETY: our own block.
        unsafe { View::new(self.fault.address(), 1, DType::U32) }
    }

    /// What a fault word that was read says.
    pub fn fault_in(word: u32) -> Result<()> {
        match word {
            0 => Ok(()),
            fault => Err(CudaError::Index { operation: FAULTS.get(fault as usize).copied().unwrap_or("a kernel") }),
        }
    }

    /// An error if a kernel met an index outside of its table since the last call. Waits for the GPU.
    pub fn check_faults(&self) -> Result<()> {
        let word = self.fault_word();
        let fault = self.read::<u32>(word)?[0];
        if fault != 0 {
            self.fill_zero(word)?;
        }
        Self::fault_in(fault)
    }

    /// Host memory to copy batches from.
    pub fn pinned(&self, bytes: usize) -> Result<Pinned> {
        Pinned::new(&self.context, bytes)
    }

    /// Copies from pinned memory beside what the GPU computes; the work that needs it must [`Gpu::wait`] for the event.
    ///
    /// # Safety
    /// The pinned memory must not be written or dropped, and nothing queued before may still use `to`, until the event
    /// has come.
    pub unsafe fn copy_ahead(&self, from: &Pinned, start: usize, to: View<'_>, event: &Event) -> Result<()> {
        // SAFETY: read by copies only, as the caller promises.
        let bytes = unsafe { from.bytes(start..start + to.len * to.dtype.size()) };
        self.bind()?;
        // SAFETY: the lengths are the same; the rest is the caller's promise.
        unsafe {
            result::memcpy_htod_async(to.address, bytes, self.copies.0).doing("copy to the GPU")?;
            result::event::record(event.0, self.copies.0).doing("record an event")
        }
    }

    /// A mark in the queue, for timing or for other queues to wait for.
    pub fn event(&self) -> Result<Event> {
        self.bind()?;
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT).doing("create an event")?;
        Ok(Event(event, Arc::clone(&self.context)))
    }

    /// Puts the mark after all that was asked for so far.
    pub fn record(&self, event: &Event) -> Result<()> {
        self.bind()?;
        // SAFETY: both are alive.
        unsafe { result::event::record(event.0, self.stream.0) }.doing("record an event")
    }

    /// Lets all that is asked for from now on start after the mark, without waiting here.
    pub fn wait(&self, event: &Event) -> Result<()> {
        self.bind()?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both are alive.
        unsafe { result::stream::wait_event(self.stream.0, event.0, flags) }.doing("wait for an event")
    }

    /// Records what `work` asks for instead of doing it, to be played again and again at the cost of one call.
    ///
    /// Memory that the work uses must stay where it is for as long as the graph is played. Everything it needs must have
    /// run once before: nothing can be compiled, searched or waited for while recording.
    pub fn capture(&self, work: impl FnOnce() -> Result<()>) -> Result<Graph> {
        self.bind()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is alive, and ending is tried in any case.
        unsafe { result::stream::begin_capture(self.stream.0, mode) }.doing("record a graph")?;
        let outcome = work();
        // SAFETY: as above.
        let graph = unsafe { result::stream::end_capture(self.stream.0) }.doing("record a graph");
        outcome?;
        let graph = graph?;
        // SAFETY: just recorded; the graph itself is not needed once it is ready to play.
        let ready = unsafe {
            let ready = result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0)).doing("prepare a graph");
            let _ = result::graph::destroy(graph);
            ready?
        };
        Ok(Graph(ready, Arc::clone(&self.context)))
    }

    /// Plays a graph.
    pub fn play(&self, graph: &Graph) -> Result<()> {
        self.bind()?;
        // SAFETY: both are alive.
        unsafe { result::graph::launch(graph.0, self.stream.0) }.doing("play a graph")
    }

    pub(crate) fn bind(&self) -> Result<()> {
        self.context.bind()
    }

    pub(crate) fn stream(&self) -> sys::CUstream {
        self.stream.0
    }

    /// Where kernels report a bad index.
    pub(crate) fn fault(&self) -> u64 {
        self.fault.address()
    }

    /// Two u32 numbers that are zero, and that a kernel leaves so: how many pieces of its work were taken, and how many blocks are done.
    pub(crate) fn tickets(&self) -> u64 {
        self.tickets.address()
    }

    /// Work space of at least `bytes`; what it held before is undefined. It stays where it is until a larger one is
    /// asked for, and even then the old one is kept: a recorded graph may use it.
    pub(crate) fn scratch(&self, purpose: Purpose, bytes: usize) -> Result<u64> {
        let mut all = lock(&self.scratch);
        let blocks = all.entry(purpose).or_default();
        if blocks.last().is_none_or(|block| block.bytes() < bytes) {
            blocks.push(memory::take(&self.pool, None, &self.context, bytes)?);
        }
        Ok(blocks.last().map_or(0, |block| block.address()))
    }

    /// Queues a kernel of a variant of a source.
    ///
    /// # Safety
    /// The arguments must be what the kernel of that name takes, in number, order and size, and the kernel must stay
    /// within the memory that they name.
    pub(crate) unsafe fn launch(
        &self,
        source: &'static Source,
        variant: &[&str],
        kernel: &'static str,
        launch: Launch,
        arguments: &[&dyn Argument],
    ) -> Result<()> {
        if launch.grid.0 == 0 || launch.grid.1 == 0 {
            return Ok(());
        }
        self.bind()?;
        let function = self.function(source, Variant::new(variant), kernel, launch.shared)?;
        let mut pointers = [std::ptr::null_mut::<c_void>(); 32];
        assert!(arguments.len() <= pointers.len(), "{kernel}: too many arguments");
        for (pointer, argument) in pointers.iter_mut().zip(arguments) {
            *pointer = std::ptr::from_ref(*argument).cast::<c_void>().cast_mut();
        }
        let (grid, threads) = ((launch.grid.0, launch.grid.1, 1), (launch.threads, 1, 1));
        let arguments = &mut pointers[..arguments.len()];
        // SAFETY: the caller's promise; the driver copies the arguments before it returns.
        unsafe { result::launch_kernel(function, grid, threads, launch.shared, self.stream.0, arguments) }.doing(kernel)
    }

    /// Compiles and loads a variant of a source, as its first launch would.
    pub fn prepare(&self, source: &'static Source, variant: &str) -> Result<()> {
        self.bind()?;
        self.module(source, Variant::new(&[variant])).map(|_| ())
    }

    fn function(
        &self,
        source: &'static Source,
        variant: Variant,
        kernel: &'static str,
        shared: u32,
    ) -> Result<sys::CUfunction> {
        let mut functions = lock(&self.functions);
        let known = functions.get(&(source.name, variant, kernel)).copied();
        if let Some(function) = known.filter(|function| shared <= function.shared) {
            return Ok(function.function);
        }
        let mut function = match known {
            Some(function) => function,
            None => {
                let module = self.module(source, variant)?;
                let name = CString::new(kernel).unwrap_or_default();
                // SAFETY: the module stays loaded as long as `self`.
                let function = unsafe { result::module::get_function(module, name) }.doing(kernel)?;
                // What a kernel may use unasked.
                Function { function, shared: 48 << 10 }
            }
        };
        if shared > function.shared {
            let what = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is loaded.
            unsafe { result::function::set_function_attribute(function.function, what, shared as i32) }
                .doing(kernel)?;
            function.shared = shared;
        }
        functions.insert((source.name, variant, kernel), function);
        Ok(function.function)
    }

    fn module(&self, source: &'static Source, variant: Variant) -> Result<sys::CUmodule> {
        let mut modules = lock(&self.modules);
        if let Some(module) = modules.get(&(source.name, variant)) {
            return Ok(module.0);
        }
        let load = || {
            let code = self.compiler.machine_code(source, variant.as_str(), &self.architecture)?;
            // SAFETY: machine code for this GPU; the driver checks its form.
            unsafe { result::module::load_data(code.as_ptr().cast()) }.doing("load a kernel")
        };
        let module = load().or_else(|error| match error {
            CudaError::Driver { .. } => {
                // Perhaps the cached file is broken.
                self.compiler.forget(source, variant.as_str(), &self.architecture);
                load()
            }
            other => Err(other),
        })?;
        modules.insert((source.name, variant), Module(module, Arc::clone(&self.context)));
        Ok(module)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl std::fmt::Display for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (major, minor) = self.capability;
        write!(f, "{} ({} GiB, compute capability {major}.{minor})", self.name, self.memory >> 30)
    }
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Gpu({self})")
    }
}

/// A mark in a queue.
pub struct Event(sys::CUevent, Arc<Context>);

// SAFETY: a handle of the driver, see `Context`.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// Seconds from `earlier` to this mark; waits for both.
    pub fn seconds_since(&self, earlier: &Event) -> Result<f64> {
        self.synchronise()?;
        // SAFETY: both are alive and recorded.
        unsafe { result::event::elapsed(earlier.0, self.0) }.map(|ms| f64::from(ms) * 1e-3).doing("read a clock")
    }

    /// Whether the mark has come.
    pub fn is_done(&self) -> Result<bool> {
        self.1.bind()?;
        // SAFETY: alive.
        match unsafe { sys::cuEventQuery(self.0) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            answer => answer.result().doing("ask for an event").map(|()| true),
        }
    }

    /// Waits until the mark has come.
    pub fn synchronise(&self) -> Result<()> {
        self.1.bind()?;
        // SAFETY: alive.
        unsafe { result::event::synchronize(self.0) }.doing("wait for an event")
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.1.bind().is_ok() {
            // SAFETY: created once.
            let _ = unsafe { result::event::destroy(self.0) };
        }
    }
}

/// Recorded work.
pub struct Graph(sys::CUgraphExec, Arc<Context>);

// SAFETY: a handle of the driver, see `Context`.
unsafe impl Send for Graph {}
// SAFETY: as above.
unsafe impl Sync for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.1.bind().is_ok() {
            // SAFETY: prepared once.
            let _ = unsafe { result::graph::exec_destroy(self.0) };
        }
    }
}
