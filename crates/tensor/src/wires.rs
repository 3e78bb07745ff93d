//! From the memory of one rank's GPU to that of others: over NCCL, or through the memory of the hosts where ranks move that.
//!
//! Nothing here adds anything, and nothing of it may stand in a recorded pass: ranks record and play those at different times.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use henson_kernels::cuda::nccl::{Communicator, Nccl, UniqueId};
use henson_kernels::cuda::{CudaError, Event, Gpu, Pinned, View};
use henson_ranks::Ranks;

use crate::{Result, TensorError};

/// How often transfers are asked about.
const LOOK_EVERY: Duration = Duration::from_millis(100);

pub(crate) struct Wires {
    // Fields are dropped in this order: who watches the transfers goes before what makes them.
    watch: Option<Watch>,
    over: Over,
    ranks: Arc<Ranks>,
}

enum Over {
    Nccl(Arc<Communicator>),
    /// Grows with what goes through it.
    Host(Mutex<Option<Pinned>>),
}

impl Wires {
    /// Joins all ranks, which all must do.
    pub(crate) fn new(gpu: &Gpu, ranks: &Arc<Ranks>) -> Result<Self> {
        if ranks.moves_host_memory() {
            return Ok(Self { watch: None, over: Over::Host(Mutex::default()), ranks: Arc::clone(ranks) });
        }
        let nccl = Nccl::load(gpu.search())?;
        // Rank 0 must tell the others in any case, or they wait for it.
        let id = if ranks.rank() == 0 { nccl.unique_id().map(|id| id.bytes().to_vec()) } else { Ok(Vec::new()) };
        let shared = ranks.from_first(id.as_ref().map_or(&[], |id| id));
        id?;
        let Ok(id) = <[u8; UniqueId::BYTES]>::try_from(shared) else {
            let why = "rank 0 could not make an id for NCCL";
            return Err(TensorError::Unsupported { operation: "nccl", why });
        };
        let place = (ranks.rank(), ranks.size());
        let joined = Arc::new(Communicator::join(nccl, gpu, UniqueId::from_bytes(id), place, ranks.patience())?);
        let watch = Watch::start(Arc::clone(&joined), Arc::clone(ranks));
        Ok(Self { watch: Some(watch), over: Over::Nccl(joined), ranks: Arc::clone(ranks) })
    }

    /// Sends and receives, all at once, after all that the GPU was asked for. Every rank must expect what is sent to it.
    pub(crate) fn exchange(
        &self,
        gpu: &Gpu,
        sends: &[(usize, View<'_>)],
        receives: &[(usize, View<'_>)],
    ) -> Result<()> {
        match &self.over {
            Over::Nccl(communicator) => {
                self.or_end(communicator.exchange(gpu, sends, receives));
                self.watch.as_ref().map_or(Ok(()), |watch| watch.mark(gpu))
            }
            Over::Host(staging) => self.through_the_host(gpu, staging, sends, receives),
        }
    }

    /// Completes a buffer of which each rank has a part.
    pub(crate) fn all_gather(&self, gpu: &Gpu, buffer: View<'_>, parts: &[Range<usize>]) -> Result<()> {
        let of = |rank: usize| buffer.part(parts[rank].start, parts[rank].len());
        let own = of(self.ranks.rank());
        // What is empty is neither sent nor expected.
        let sends: Vec<_> = self.others().filter(|_| !own.is_empty()).map(|rank| (rank, own)).collect();
        let receives: Vec<_> =
            self.others().map(|rank| (rank, of(rank))).filter(|(_, part)| !part.is_empty()).collect();
        self.exchange(gpu, &sends, &receives)
    }

    /// Gives all ranks the numbers of rank 0.
    pub(crate) fn broadcast(&self, gpu: &Gpu, buffer: View<'_>) -> Result<()> {
        match &self.over {
            Over::Nccl(communicator) => {
                self.or_end(communicator.broadcast(gpu, buffer, 0));
                self.watch.as_ref().map_or(Ok(()), |watch| watch.mark(gpu))
            }
            Over::Host(_) if self.ranks.rank() == 0 => {
                let sends: Vec<_> = self.others().map(|rank| (rank, buffer)).collect();
                self.exchange(gpu, &sends, &[])
            }
            Over::Host(_) => self.exchange(gpu, &[], &[(0, buffer)]),
        }
    }

    /// A transfer that fails ends all ranks: most often one of them is lost, which is then named.
    fn or_end(&self, moved: Result<(), CudaError>) {
        if let Err(error) = moved {
            self.ranks.fail(&error.to_string());
        }
    }

    pub(crate) fn others(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.ranks.size()).filter(|rank| *rank != self.ranks.rank())
    }

    fn through_the_host(
        &self,
        gpu: &Gpu,
        staging: &Mutex<Option<Pinned>>,
        sends: &[(usize, View<'_>)],
        receives: &[(usize, View<'_>)],
    ) -> Result<()> {
        let bytes = |view: &View<'_>| view.len() * view.dtype().size();
        let needed: usize = sends.iter().chain(receives).map(|(_, view)| bytes(view).next_multiple_of(64)).sum();
        let mut staging = lock(staging);
        let pinned = match staging.take() {
            Some(pinned) if pinned.len() >= needed => pinned,
            _ => gpu.pinned(needed)?,
        };
        let pinned = staging.insert(pinned);
        // Several receivers of the same numbers read the same place.
        let (mut at, mut places): (usize, Vec<(u64, Range<usize>)>) = (0, Vec::new());
        let mut sent: Vec<(usize, Range<usize>)> = Vec::new();
        for (to, view) in sends {
            let known = places.iter().find(|(start, place)| *start == view.address() && place.len() == bytes(view));
            if let Some((_, place)) = known {
                sent.push((*to, place.clone()));
                continue;
            }
            let place = at..at + bytes(view);
            // SAFETY: nobody reads or writes the place before the GPU was waited for, below.
            unsafe { gpu.read_later(*view, pinned, place.start)? };
            at += place.len().next_multiple_of(64);
            places.push((view.address(), place.clone()));
            sent.push((*to, place));
        }
        gpu.synchronise()?;
        let border = at;
        {
            // SAFETY: all copies are done, and none is asked for until the exchange is over.
            let all = unsafe { pinned.bytes_mut(0..needed) };
            let (out, mut rest) = all.split_at_mut(border);
            let sends: Vec<(usize, &[u8])> = sent.into_iter().map(|(to, place)| (to, &out[place])).collect();
            let mut pieces: Vec<(usize, &mut [u8])> = Vec::new();
            for (from, view) in receives {
                let (piece, behind) = std::mem::take(&mut rest).split_at_mut(bytes(view).next_multiple_of(64));
                rest = behind;
                pieces.push((*from, &mut piece[..bytes(view)]));
            }
            self.ranks.exchange(&sends, &mut pieces);
        }
        for (_, view) in receives {
            // SAFETY: not written again before the next exchange, which waits for the GPU before it does.
            unsafe { gpu.write_later(pinned, at, *view)? };
            at += bytes(view).next_multiple_of(64);
        }
        // The pinned memory is free again once this is done; a dropped one must not be read.
        Ok(gpu.synchronise()?)
    }
}

/// Looks at transfers from a thread of its own: the one that made them may wait for the GPU for ever where a rank is lost.
struct Watch {
    shared: Arc<Watched>,
    thread: Option<JoinHandle<()>>,
}

struct Watched {
    over: AtomicBool,
    /// What comes after transfers, and when they were asked for; the oldest first.
    marks: Mutex<VecDeque<(Event, Instant)>>,
    spare: Mutex<Vec<Event>>,
}

impl Watch {
    fn start(communicator: Arc<Communicator>, ranks: Arc<Ranks>) -> Self {
        let shared =
            Arc::new(Watched { over: AtomicBool::new(false), marks: Mutex::default(), spare: Mutex::default() });
        let watched = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("henson-nccl".to_owned()).spawn(move || {
            while !watched.over.load(Ordering::Relaxed) {
                if let Err(reason) = watched.look(&communicator, ranks.patience()) {
                    ranks.fail(&reason);
                }
                std::thread::park_timeout(LOOK_EVERY);
            }
        });
        // Without it a loss that TCP does not notice is noticed by nobody; all else goes on.
        Self { shared, thread: thread.ok() }
    }

    /// Notes that a transfer was asked for.
    fn mark(&self, gpu: &Gpu) -> Result<()> {
        let event = match lock(&self.shared.spare).pop() {
            Some(event) => event,
            None => gpu.event()?,
        };
        gpu.record(&event)?;
        lock(&self.shared.marks).push_back((event, Instant::now()));
        Ok(())
    }
}

impl Watched {
    /// Whether all is well; else why not.
    fn look(&self, communicator: &Communicator, patience: Duration) -> Result<(), String> {
        communicator.state().map_err(|error| error.to_string())?;
        let mut marks = lock(&self.marks);
        while let Some((event, asked)) = marks.front() {
            match event.is_done() {
                Ok(true) => {}
                Ok(false) if asked.elapsed() > patience => {
                    return Err(format!("a transfer was not done after {} s", patience.as_secs()));
                }
                Ok(false) => break,
                Err(error) => return Err(error.to_string()),
            }
            if let Some((event, _)) = marks.pop_front() {
                lock(&self.spare).push(event);
            }
        }
        Ok(())
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // It has nothing to say any more.
            let _ = thread.join();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
