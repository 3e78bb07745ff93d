//! One GPU with what tensors need of it beyond kernels: memory of two kinds, inputs that travel ahead, results that are
//! read later, and passes that are recorded once and played again.
//!
//! A device is for one thread at a time, because kernels share its work space and what is recorded is all that the device is asked for:
//! a pass takes a turn, and so does whatever copies numbers between passes; another thread waits for it. Training has a device to itself.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use henson_kernels::cuda::attention::Room;
use henson_kernels::cuda::recurrent::Steps;
use henson_kernels::cuda::{self as kernels, Block, Event, Graph, Pinned, Pool, View, matmul};

use henson_ranks::Ranks;

use crate::profile::Recorded;
use crate::recording::{Signature, Sizes};
use crate::turns::{Turn, Turns};
use crate::wires::Wires;
use crate::{DType, Kind, Result, Shape, Spent, Tensor, TensorError};

pub use henson_kernels::cuda::nccl::Nccl;
pub use henson_kernels::cuda::{CudaError, Gpu, Library, Options as CudaOptions, Search};

/// Bytes of inputs that a recorded pass can have: some 350,000 tokens.
const FEED_BYTES: usize = 8 << 20;

/// Feeds that may be under way at a time: the host fills one while the GPU copies and uses others.
const FEEDS: usize = 3;

/// Bytes of other uploads that may be under way.
const UPLOAD_BYTES: usize = 4 << 20;

/// Inputs begin at multiples of this many bytes.
const INPUT_ALIGNMENT: usize = 256;

/// A GPU: kernels and memory.
pub struct CudaDevice {
    // Fields are dropped in this order: what needs the GPU goes first.
    wires: Mutex<Option<Arc<Wires>>>,
    feed: Mutex<Option<Feed>>,
    uploads: Mutex<Option<Uploads>>,
    readings: Mutex<Vec<Slot>>,
    /// Where results that are waited for at once arrive.
    words: Mutex<Option<Pinned>>,
    /// The most of attention's work that batches of a size had so far, so that most batches can play the same graph.
    rooms: Mutex<BTreeMap<usize, Room>>,
    /// The same for the steps of recurrent layers: by tokens, up to a power of two, and sequences.
    steps: Mutex<BTreeMap<(usize, usize), Steps>>,
    profile: Mutex<Option<Recorded>>,
    /// Memory of passes that are recorded: nobody else gets it, for graphs write to it whenever they are played.
    passing: Pool,
    /// Whether a pass runs that is, or will be, recorded.
    recording: AtomicBool,
    turns: Turns,
    pub(crate) gpu: Gpu,
}

/// Inputs on their way.
struct Feed {
    /// Where recorded passes read them: always at the same addresses.
    arena: Arc<Block>,
    slots: Vec<FeedSlot>,
    next: usize,
    filling: Option<Filling>,
}

struct FeedSlot {
    pinned: Pinned,
    /// Copied here beside what the GPU computes, then to the arena in its turn.
    staging: Arc<Block>,
    copied: Event,
    taken: Event,
}

/// What inputs are for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Feeding {
    /// A batch, while the GPU computes on the one before.
    #[default]
    Batch,
    /// A step of decoding, for which the GPU waits: a token of each of some sequences.
    Tokens,
}

#[derive(Default)]
struct Filling {
    feeding: Feeding,
    bytes: usize,
    signature: Sizes,
    /// More than there is room for: the pass cannot be recorded.
    overflow: bool,
}

/// Pinned memory that small uploads go through, one after the other.
struct Uploads {
    pinned: Pinned,
    used: usize,
}

/// Pinned memory of a result that is read later.
struct Slot {
    pinned: Pinned,
    event: Event,
}

impl CudaDevice {
    pub(crate) fn new(options: &CudaOptions) -> Result<Self> {
        let gpu = Gpu::new(options)?;
        Ok(Self {
            feed: Mutex::default(),
            uploads: Mutex::default(),
            readings: Mutex::default(),
            words: Mutex::default(),
            rooms: Mutex::default(),
            steps: Mutex::default(),
            profile: Mutex::default(),
            passing: Pool::default(),
            recording: AtomicBool::new(false),
            turns: Turns::default(),
            wires: Mutex::default(),
            gpu,
        })
    }

    /// The way to the GPUs of other ranks. The first call joins them, and all must make it.
    pub(crate) fn wires(&self, ranks: &Arc<Ranks>) -> Result<Arc<Wires>> {
        let mut wires = lock(&self.wires);
        if let Some(wires) = &*wires {
            return Ok(Arc::clone(wires));
        }
        let made = Arc::new(Wires::new(&self.gpu, ranks)?);
        *wires = Some(Arc::clone(&made));
        Ok(made)
    }

    /// The GPU itself.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Waits until no other thread has a turn.
    pub(crate) fn turn(&self) -> Turn<'_> {
        self.turns.take()
    }

    pub(crate) fn take(&self, bytes: usize) -> Result<Arc<Block>> {
        let _turn = self.turn();
        let pool = if self.recording.load(Ordering::Relaxed) { &self.passing } else { self.gpu.pool() };
        Ok(self.gpu.take(pool, bytes)?)
    }

    pub(crate) fn held(&self) -> usize {
        self.gpu.pool().held() + self.passing.held()
    }

    /// How often memory that recorded passes write to was given back: none that was recorded before may be played.
    pub(crate) fn trims(&self) -> u64 {
        self.passing.trims()
    }

    pub(crate) fn trim(&self) {
        self.gpu.pool().trim();
        self.passing.trim();
    }

    /// Numbers from the host in a block of their own; in a feed, in the arena.
    pub(crate) fn upload(&self, bytes: &[u8], shape: Shape, dtype: DType) -> Result<(Arc<Block>, usize)> {
        let _turn = self.turn();
        if self.recording.load(Ordering::Relaxed) {
            let why = "numbers from the host must come before a recorded pass, in its feed";
            return Err(TensorError::Unsupported { operation: "from_slice", why });
        }
        if let Some(place) = self.feed_bytes(bytes, shape, dtype) {
            return Ok(place);
        }
        let block = self.take(bytes.len())?;
        if bytes.is_empty() {
            return Ok((block, 0));
        }
        // SAFETY: the block has this many bytes.
        let target = unsafe { View::new(block.address(), bytes.len() / dtype.size(), native(dtype)) };
        let mut uploads = lock(&self.uploads);
        if bytes.len() > UPLOAD_BYTES / 2 {
            match dtype {
                DType::F32 => self.gpu.write::<f32>(target, bytemuck::cast_slice(bytes))?,
                DType::Bf16 => self.gpu.write::<crate::bf16>(target, bytemuck::cast_slice(bytes))?,
                DType::U32 => self.gpu.write::<u32>(target, bytemuck::cast_slice(bytes))?,
            }
            return Ok((block, 0));
        }
        let uploads = match &mut *uploads {
            Some(uploads) => uploads,
            none => none.insert(Uploads { pinned: self.gpu.pinned(UPLOAD_BYTES)?, used: 0 }),
        };
        if uploads.used + bytes.len() > UPLOAD_BYTES {
            self.gpu.synchronise()?;
            uploads.used = 0;
        }
        // SAFETY: copies from parts that were used before are under way, or were waited for; none from this one.
        unsafe { uploads.pinned.bytes_mut(uploads.used..uploads.used + bytes.len()) }.copy_from_slice(bytes);
        // SAFETY: this part of the pinned memory is not written again before the GPU was waited for, and is dropped with it.
        unsafe { self.gpu.write_later(&uploads.pinned, uploads.used, target)? };
        uploads.used += bytes.len().next_multiple_of(64);
        Ok((block, 0))
    }

    /// A place in the arena, while a feed is being filled and has room.
    fn feed_bytes(&self, bytes: &[u8], shape: Shape, dtype: DType) -> Option<(Arc<Block>, usize)> {
        let mut feed = lock(&self.feed);
        let Feed { arena, slots, next, filling } = feed.as_mut()?;
        let filling = filling.as_mut()?;
        if filling.bytes + bytes.len() > FEED_BYTES {
            filling.overflow = true;
            return None;
        }
        let place = filling.bytes;
        // SAFETY: `start_feed` waited for the last copy from this slot; the next begins when it is filled.
        unsafe { slots[*next].pinned.bytes_mut(place..place + bytes.len()) }.copy_from_slice(bytes);
        filling.bytes = (place + bytes.len()).next_multiple_of(INPUT_ALIGNMENT);
        filling.signature.add(shape, dtype);
        Some((Arc::clone(arena), place))
    }

    /// Runs `fill`, whose tensors from slices go to the GPU together.
    pub(crate) fn feed<R, E: From<TensorError>>(
        &self,
        feeding: Feeding,
        fill: impl FnOnce() -> Result<R, E>,
    ) -> Result<(R, Signature), E> {
        let _turn = self.turn();
        self.start_feed(feeding)?;
        // Where `fill` panics, what comes later is no input of it.
        let outcome = catch_unwind(AssertUnwindSafe(fill));
        let signature = self.finish_feed();
        let outcome = outcome.unwrap_or_else(|panic| resume_unwind(panic));
        Ok((outcome?, signature?))
    }

    fn start_feed(&self, feeding: Feeding) -> Result<()> {
        let mut feed = lock(&self.feed);
        let feed = match &mut *feed {
            Some(feed) => feed,
            none => none.insert(Feed::new(&self.gpu)?),
        };
        // What the GPU still has to copy from this slot must not change.
        feed.slots[feed.next].taken.synchronise()?;
        feed.filling = Some(Filling { feeding, ..Filling::default() });
        Ok(())
    }

    fn finish_feed(&self) -> Result<Signature> {
        let mut feed = lock(&self.feed);
        let Some(Feed { arena, slots, next, filling }) = feed.as_mut() else { return Ok(Signature::default()) };
        let Some(filling) = filling.take() else { return Ok(Signature::default()) };
        let Filling { feeding, bytes, signature, overflow } = filling;
        if bytes > 0 {
            let slot = &slots[*next];
            // SAFETY: both blocks have room for a whole feed.
            let (staging, target) = unsafe {
                let view = |block: &Block| View::new(block.address(), bytes / 4, kernels::DType::U32);
                (view(&slot.staging), view(arena))
            };
            match feeding {
                Feeding::Batch => {
                    // SAFETY: the slot is written again only after `taken` has come, by which time this copy and the next are done.
                    unsafe { self.gpu.copy_ahead(&slot.pinned, 0, staging, &slot.copied)? };
                    self.gpu.wait(&slot.copied)?;
                    self.gpu.copy(staging, target)?;
                }
                // SAFETY: as above.
                Feeding::Tokens => unsafe { self.gpu.write_later(&slot.pinned, 0, target)? },
            }
            self.gpu.record(&slot.taken)?;
            *next = (*next + 1) % FEEDS;
        }
        Ok(Signature((!overflow).then_some(signature)))
    }

    /// What inputs are being filled in for, where it may be recorded.
    pub(crate) fn filling(&self) -> Option<Feeding> {
        self.fill(|filling| filling.feeding)
    }

    /// Does something with the inputs that are being filled in for a pass that may be recorded.
    fn fill<R>(&self, work: impl FnOnce(&mut Filling) -> R) -> Option<R> {
        let mut feed = lock(&self.feed);
        feed.as_mut()?.filling.as_mut().filter(|filling| !filling.overflow).map(work)
    }

    /// In a feed: its pass reads from the host while it runs, so it is not recorded.
    pub(crate) fn do_not_record(&self) {
        self.fill(|filling| filling.overflow = true);
    }

    /// In a feed: its pass reads numbers here that are no input, and is recorded for this place.
    pub(crate) fn note_address(&self, address: u64) {
        self.fill(|filling| filling.signature.extend([address as usize]));
    }

    /// Bounds for the steps of recurrent layers: in a feed, what any batch of about so many tokens and as many sequences needed so far.
    /// Batches with more tokens have longer sequences, so that all of them together would bound the steps badly.
    pub(crate) fn steps(&self, (tokens, sequences): (usize, usize), needed: Steps) -> Steps {
        let noted = self.fill(|filling| {
            let mut all = lock(&self.steps);
            let sizes = (tokens.next_power_of_two(), sequences);
            let steps = all.entry(sizes).or_insert_with(|| Steps::none(sequences));
            *steps = steps.grown_for(needed);
            filling.signature.extend(steps.numbers());
            *steps
        });
        noted.unwrap_or(needed)
    }

    /// The room to give attention's table: in a feed, as much as any batch of this many tokens needed so far.
    pub(crate) fn room(&self, tokens: usize, needed: Room) -> Room {
        let mut feed = lock(&self.feed);
        // A step of decoding needs the same for as many tokens.
        let batch = |filling: &&mut Filling| filling.feeding == Feeding::Batch;
        let Some(filling) = feed.as_mut().and_then(|feed| feed.filling.as_mut()).filter(batch) else { return needed };
        let mut rooms = lock(&self.rooms);
        let room = rooms.entry(tokens).or_default();
        if !room.holds(needed) {
            *room = room.grown_for(needed);
        }
        filling.signature.extend(room.by_class());
        *room
    }

    /// Reads numbers once the GPU has come to them; none of this waits.
    pub(crate) fn read_later(self: &Arc<Self>, tensors: &[&Tensor]) -> Result<Reading> {
        let kinds: Vec<(DType, usize)> = tensors.iter().map(|t| (t.dtype(), t.shape().elements())).collect();
        if kinds.iter().map(|(_, count)| count).sum::<usize>() > MOST_READ {
            return Err(TOO_MANY);
        }
        let mut slot = match lock(&self.readings).pop() {
            Some(slot) => slot,
            None => Slot { pinned: self.gpu.pinned(4 * (MOST_READ + 1))?, event: self.gpu.event()? },
        };
        let mut start = 0;
        for view in tensors.iter().map(|t| t.on_gpu()).chain([self.gpu.fault_word()]) {
            // SAFETY: the slot belongs to the reading, which waits for the event before it looks.
            unsafe { self.gpu.read_later(view, &mut slot.pinned, start)? };
            start += view.len() * view.dtype().size();
        }
        self.gpu.record(&slot.event)?;
        Ok(Reading(ReadingInner::Cuda(Pending { cuda: Arc::clone(self), slot: Some(slot), kinds })))
    }

    /// Words of 32 bits, and whether a kernel met a fault, with one wait for both.
    pub(crate) fn read_words(&self, view: View<'_>) -> Result<Vec<u32>> {
        let _turn = self.turn();
        let bytes = 4 * view.len();
        let mut kept = lock(&self.words);
        let mut pinned = match kept.take().filter(|pinned| pinned.len() >= bytes + 4) {
            Some(pinned) => pinned,
            None => self.gpu.pinned((bytes + 4).next_power_of_two())?,
        };
        // SAFETY: nobody else has it, and it is read after the GPU was waited for.
        let copied = unsafe {
            let first = self.gpu.read_later(view, &mut pinned, 0);
            first.and_then(|()| self.gpu.read_later(self.gpu.fault_word(), &mut pinned, bytes))
        };
        self.gpu.synchronise()?;
        copied?;
        // SAFETY: the copies are done.
        let (words, fault) = unsafe { (pinned.bytes(0..bytes), pinned.bytes(bytes..bytes + 4)) };
        let word = |bytes: &[u8]| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        let (words, fault) = (words.chunks_exact(4).map(word).collect(), word(fault));
        *kept = Some(pinned);
        if fault != 0 {
            self.gpu.fill_zero(self.gpu.fault_word())?;
        }
        Gpu::fault_in(fault)?;
        Ok(words)
    }

    pub(crate) fn start_profile(&self) {
        *lock(&self.profile) = Some(Recorded::default());
    }

    pub(crate) fn stop_profile(&self) -> Vec<(Kind, Spent)> {
        lock(&self.profile).take().map(Recorded::finish).unwrap_or_default()
    }

    /// A mark before an operation, while profiling is on.
    pub(crate) fn mark(&self) -> Option<Event> {
        lock(&self.profile).as_ref()?;
        let event = self.gpu.event().ok()?;
        self.gpu.record(&event).ok()?;
        Some(event)
    }

    pub(crate) fn note(&self, kind: Kind, flops: f64, bytes: f64, before: Event) {
        let after = self.mark();
        if let (Some(recorded), Some(after)) = (&mut *lock(&self.profile), after) {
            recorded.add(kind, flops, bytes, before, after);
        }
    }

    /// The most floating-point operations per second of a product of a large matrix.
    pub(crate) fn peak(&self, dtype: DType) -> Result<f64> {
        let n = if dtype == DType::Bf16 || self.gpu.allows_tf32() { 8192 } else { 2048 };
        // Numbers that differ: equal ones draw less power and are faster than any real product.
        let numbers: Vec<f32> = (0..n * n).map(|i| ((i * 7919) % 10007) as f32 / 10007.0 - 0.5).collect();
        let wide = self.gpu.upload(&numbers)?;
        let buffer = || -> Result<_> {
            let buffer = self.gpu.empty(n * n, native(dtype))?;
            match dtype {
                DType::Bf16 => kernels::cast::to_bf16(&self.gpu, wide.view(), buffer.view())?,
                _ => self.gpu.copy(wide.view(), buffer.view())?,
            }
            Ok(buffer)
        };
        let (a, b, out) = (buffer()?, buffer()?, buffer()?);
        let [a, b, out] = [&a, &b, &out].map(|buffer| matmul::Matrix::new(buffer.view(), n, n));
        let product = || Ok(matmul::product(&self.gpu, a, b.transposed(), out, matmul::Finish::default())?);
        let seconds = self.fastest(5, product)?;
        Ok(2.0 * (n as f64).powi(3) / seconds)
    }

    /// Bytes per second that a large copy reads and writes.
    pub(crate) fn bandwidth(&self) -> Result<f64> {
        let numbers = 256 << 20;
        let (from, to) =
            (self.gpu.empty(numbers, kernels::DType::Bf16)?, self.gpu.empty(numbers, kernels::DType::Bf16)?);
        kernels::rows::fill(&self.gpu, from.view(), 1.0)?;
        let seconds = self.fastest(5, || Ok(self.gpu.copy(from.view(), to.view())?))?;
        Ok(4.0 * numbers as f64 / seconds)
    }

    fn fastest(&self, runs: usize, work: impl Fn() -> Result<()>) -> Result<f64> {
        let (before, after) = (self.gpu.event()?, self.gpu.event()?);
        work()?;
        let mut best = f64::INFINITY;
        for _ in 0..runs {
            self.gpu.record(&before)?;
            work()?;
            self.gpu.record(&after)?;
            best = best.min(after.seconds_since(&before)?);
        }
        Ok(best)
    }
}

impl Feed {
    fn new(gpu: &Gpu) -> Result<Self> {
        let block = || gpu.take(gpu.pool(), FEED_BYTES);
        let slot = || -> Result<FeedSlot> {
            let (copied, taken) = (gpu.event()?, gpu.event()?);
            Ok(FeedSlot { pinned: gpu.pinned(FEED_BYTES)?, staging: block()?, copied, taken })
        };
        let slots = (0..FEEDS).map(|_| slot()).collect::<Result<Vec<_>>>()?;
        Ok(Self { arena: block()?, slots, next: 0, filling: None })
    }
}

/// A few numbers that will be there once the device has computed them.
pub struct Reading(ReadingInner);

enum ReadingInner {
    Host { numbers: [f64; MOST_READ], count: usize },
    Cuda(Pending),
}

/// A copy from the GPU that may be under way.
struct Pending {
    cuda: Arc<CudaDevice>,
    slot: Option<Slot>,
    kinds: Vec<(DType, usize)>,
}

impl Drop for Pending {
    fn drop(&mut self) {
        // The next copy into the slot is queued behind this one, so nobody has to wait.
        if let Some(slot) = self.slot.take() {
            lock(&self.cuda.readings).push(slot);
        }
    }
}

const MOST_READ: usize = Reading::MOST;

impl Reading {
    /// The most numbers that it has.
    pub const MOST: usize = 8;

    pub(crate) fn of(tensors: &[&Tensor]) -> Result<Self> {
        let (mut numbers, mut count) = ([0.0; MOST_READ], 0);
        for number in tensors.iter().flat_map(|tensor| tensor.numbers()) {
            *numbers.get_mut(count).ok_or(TOO_MANY)? = number;
            count += 1;
        }
        Ok(Self(ReadingInner::Host { numbers, count }))
    }

    /// Numbers that are known already, such as those of another rank.
    pub fn known(known: &[f64]) -> Result<Self> {
        let mut numbers = [0.0; MOST_READ];
        numbers.get_mut(..known.len()).ok_or(TOO_MANY)?.copy_from_slice(known);
        Ok(Self(ReadingInner::Host { numbers, count: known.len() }))
    }

    pub(crate) fn one(number: f64) -> Self {
        let mut numbers = [0.0; MOST_READ];
        numbers[0] = number;
        Self(ReadingInner::Host { numbers, count: 1 })
    }

    /// The numbers of all tensors in turn; waits for them.
    pub fn wait(self) -> Result<Vec<f64>> {
        match self.0 {
            ReadingInner::Host { numbers, count } => Ok(numbers[..count].to_vec()),
            ReadingInner::Cuda(pending) => {
                let Some(slot) = &pending.slot else { return Ok(Vec::new()) };
                slot.event.synchronise()?;
                // The numbers, and the word that tells of faults.
                let count = pending.kinds.iter().map(|(_, count)| count).sum::<usize>() + 1;
                // SAFETY: the event comes after the copies.
                let bytes = unsafe { slot.pinned.bytes(0..4 * count) };
                let mut words = bytes.chunks_exact(4).map(|w| u32::from_le_bytes([w[0], w[1], w[2], w[3]]));
                let mut numbers = Vec::new();
                for (dtype, count) in pending.kinds.iter().copied() {
                    let number =
                        |word| if dtype == DType::U32 { f64::from(word) } else { f64::from(f32::from_bits(word)) };
                    numbers.extend(words.by_ref().take(count).map(number));
                }
                let fault = words.next().unwrap_or(0);
                Gpu::fault_in(fault)?;
                Ok(numbers)
            }
        }
    }
}

const TOO_MANY: TensorError =
    TensorError::Unsupported { operation: "read_later", why: "more numbers than it is made for" };

const NOT_RECORDED: TensorError = TensorError::Unsupported { operation: "capture", why: "its work was not run" };

impl CudaDevice {
    /// Runs work whose memory is that of recorded passes.
    pub(crate) fn within_recording<R>(&self, work: impl FnOnce() -> R) -> R {
        let _raised = Raised::new(&self.recording);
        work()
    }

    /// Records work; a panic in it ends the recording, too.
    pub(crate) fn capture<R, E: From<TensorError>>(
        &self,
        work: impl FnOnce() -> Result<R, E>,
    ) -> Result<(R, Result<Graph>), E> {
        let mut outcome = None;
        let graph = self.gpu.capture(|| {
            outcome = Some(catch_unwind(AssertUnwindSafe(|| self.within_recording(work))));
            Ok(())
        });
        let graph = graph.map_err(TensorError::from);
        match outcome {
            Some(outcome) => Ok((outcome.unwrap_or_else(|panic| resume_unwind(panic))?, graph)),
            None => graph.and(Err(NOT_RECORDED)).map_err(E::from),
        }
    }

    /// Whether every operation is timed, so that none can be recorded.
    pub(crate) fn is_profiling(&self) -> bool {
        lock(&self.profile).is_some()
    }
}

/// A flag that is set as long as this lives, also where a panic ends that.
struct Raised<'a>(&'a AtomicBool);

impl<'a> Raised<'a> {
    fn new(flag: &'a AtomicBool) -> Self {
        flag.store(true, Ordering::Relaxed);
        Self(flag)
    }
}

impl Drop for Raised<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

/// The dtype as kernels name it.
pub(crate) fn native(dtype: DType) -> kernels::DType {
    match dtype {
        DType::F32 => kernels::DType::F32,
        DType::Bf16 => kernels::DType::Bf16,
        DType::U32 => kernels::DType::U32,
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `n` rounded up to one of few sizes: a multiple of 64, and at most one part in `parts` more.
pub(crate) fn bucket(n: usize, parts: usize) -> usize {
    let step = (n.max(1).next_power_of_two() / (2 * parts)).max(64);
    n.max(1).next_multiple_of(step)
}

/// `n` sequences with a token each rounded up to one of few sizes: a power of two up to eight, a multiple of eight up to 64, and from there
/// at most a quarter more.
pub(crate) fn streams_bucket(n: usize) -> usize {
    let power = n.next_power_of_two();
    if n <= 8 { power } else { n.next_multiple_of((power / 8).max(8)) }
}

/// Parts that tokens are rounded by: what fills a batch up costs as much as the rest.
pub(crate) const TOKEN_PARTS: usize = 32;

/// Parts that predicted rows are rounded by: they cost less, and each number of them is one more graph for each of tokens.
pub(crate) const ROW_PARTS: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_lowers_the_flag() {
        let flag = AtomicBool::new(false);
        let during = catch_unwind(AssertUnwindSafe(|| {
            let _raised = Raised::new(&flag);
            assert!(flag.load(Ordering::Relaxed));
            panic!("as an operation may");
        }));
        assert!(during.is_err() && !flag.load(Ordering::Relaxed));
    }

    #[test]
    fn streams_are_rounded_to_few_sizes() {
        let mut all: Vec<usize> = (0..=256).map(streams_bucket).collect();
        assert!(all.iter().enumerate().all(|(n, b)| *b >= n && *b <= n.next_power_of_two()), "{all:?}");
        assert!((64..=256).all(|n| (all[n] - n) * 4 < n), "waste");
        all.dedup();
        assert_eq!(all.len(), 19, "{all:?}");
    }

    #[test]
    fn buckets_are_few_and_waste_little() {
        let mut all: Vec<usize> = (1..70_000).map(|n| bucket(n, 32)).collect();
        assert!((1..70_000).zip(&all).all(|(n, b)| *b >= n && (*b - n) * 32 <= n.max(64 * 32)), "waste");
        assert_eq!(bucket(32768, 32), 32768);
        assert_eq!(bucket(2000, 8), 2048);
        all.dedup();
        assert!(all.len() < 300, "{}", all.len());
    }
}
