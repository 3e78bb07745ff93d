//! A pool of threads for very short parallel loops: a step of a small model has hundreds of them, some of a few
//! microseconds, so workers spin for a while before they sleep, and starting a loop allocates nothing.
//!
//! It is no general scheduler: one loop at a time, no nesting (an inner loop runs on the thread that starts it).

use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Rounds of waiting before a worker goes to sleep: some 50 µs, more than the gaps inside a training step.
const SPINS: u32 = 20_000;

/// The most workers that a state can count.
const MOST_WORKERS: usize = (1 << 15) - 1;

type Task<'a> = dyn Fn(usize) + Sync + 'a;

pub(crate) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Workers that a loop takes at most: more threads than processors would only take turns.
    most_seats: usize,
    /// Held while a loop runs: several threads may share a pool, one loop runs at a time.
    turn: Mutex<()>,
}

struct Shared {
    /// generation << 32 | OPEN | free seats << 16 | workers inside. Workers enter only while the generation is open, so a
    /// loop never waits for a worker that is asleep; and only while a seat is free, so a loop of three tasks never waits
    /// for fifteen workers that come to see that nothing is left.
    state: AtomicU64,
    next: AtomicUsize,
    tasks: AtomicUsize,
    /// The loop's body, valid while the generation is open or workers are inside.
    job: UnsafeCell<Option<*const Task<'static>>>,
    panicked: AtomicBool,
    quit: AtomicBool,
    /// Whether there are more threads than processors. A worker that finds no seat then goes to sleep in the end, where
    /// otherwise it stays awake for the next loop.
    crowded: bool,
    sleepers: AtomicUsize,
    bed: Mutex<()>,
    bell: Condvar,
}

const OPEN: u64 = 1 << 31;
const SEAT: u64 = 1 << 16;
const INSIDE: u64 = SEAT - 1;

/// Workers that may still enter.
fn seats(state: u64) -> u64 {
    (state & (OPEN - 1)) / SEAT
}

// SAFETY: `job` is written only while no generation is open and no worker inside, see `Pool::run`.
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `job` is to a `Sync` closure and used only while `Pool::run` keeps it alive.
unsafe impl Send for Shared {}

thread_local! {
    static INSIDE_LOOP: Cell<bool> = const { Cell::new(false) };
}

impl Pool {
    pub(crate) fn new(threads: usize) -> Self {
        Self::on(threads, std::thread::available_parallelism().map_or(threads, usize::from))
    }

    /// A pool on a machine with so many processors.
    fn on(threads: usize, processors: usize) -> Self {
        let threads = threads.min(MOST_WORKERS);
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            next: AtomicUsize::new(0),
            tasks: AtomicUsize::new(0),
            job: UnsafeCell::new(None),
            panicked: AtomicBool::new(false),
            quit: AtomicBool::new(false),
            crowded: threads > processors,
            sleepers: AtomicUsize::new(0),
            bed: Mutex::new(()),
            bell: Condvar::new(),
        });
        let workers: Vec<_> = (1..threads)
            .filter_map(|i| {
                let shared = Arc::clone(&shared);
                // With fewer threads than wanted (a limit of the system) the results are the same, only later.
                std::thread::Builder::new().name(format!("henson-{i}")).spawn(move || shared.work()).ok()
            })
            .collect();
        let most_seats = workers.len().min(processors.saturating_sub(1).max(1));
        Self { shared, workers, most_seats, turn: Mutex::new(()) }
    }

    pub(crate) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// The number of threads that a loop which this thread begins would have.
    pub(crate) fn threads_of_a_loop(&self) -> usize {
        if INSIDE_LOOP.get() { 1 } else { self.most_seats + 1 }
    }

    /// Calls `task` with each of `0..tasks` once and returns when all calls are done.
    pub(crate) fn run(&self, tasks: usize, task: &Task<'_>) {
        if tasks <= 1 || self.workers.is_empty() || INSIDE_LOOP.get() {
            (0..tasks).for_each(task);
            return;
        }
        let _turn = lock(&self.turn);
        let shared = &*self.shared;
        // SAFETY: the last loop closed its generation and waited until nobody was inside, so no one reads `job` now.
        // The lifetime is erased, but this function returns only after the same wait below.
        unsafe {
            *shared.job.get() = Some(std::mem::transmute::<*const Task<'_>, *const Task<'static>>(task));
        }
        shared.next.store(0, Ordering::Relaxed);
        shared.tasks.store(tasks, Ordering::Relaxed);
        let generation = (shared.state.load(Ordering::Relaxed) >> 32).wrapping_add(1);
        let seats = self.most_seats.min(tasks - 1);
        shared.state.store(generation << 32 | OPEN | (seats as u64 * SEAT), Ordering::SeqCst);
        let asleep = shared.sleepers.load(Ordering::SeqCst);
        let wanted = seats.saturating_sub(self.workers.len() - asleep);
        if wanted > 0 {
            let _bed = lock(&shared.bed);
            if wanted == asleep {
                shared.bell.notify_all();
            } else {
                (0..wanted).for_each(|_| shared.bell.notify_one());
            }
        }
        INSIDE_LOOP.set(true);
        let own = catch_unwind(AssertUnwindSafe(|| shared.drain(task)));
        INSIDE_LOOP.set(false);
        shared.state.fetch_and(!OPEN, Ordering::SeqCst);
        let mut spins = 0;
        while shared.state.load(Ordering::Acquire) & INSIDE != 0 {
            // With more threads than cores the one that is waited for may need this core.
            if spins < SPINS {
                spins += 1;
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
        let panicked = shared.panicked.swap(false, Ordering::Relaxed);
        if let Err(cause) = own {
            std::panic::resume_unwind(cause);
        }
        assert!(!panicked, "a task of a parallel loop panicked");
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.quit.store(true, Ordering::SeqCst);
        {
            let _bed = lock(&self.shared.bed);
            self.shared.bell.notify_all();
        }
        for worker in self.workers.drain(..) {
            // A worker's panics were caught and reported by `run`.
            let _ = worker.join();
        }
    }
}

impl Shared {
    /// Takes tasks until none is left.
    fn drain(&self, task: &Task<'_>) {
        let tasks = self.tasks.load(Ordering::Relaxed);
        loop {
            let i = self.next.fetch_add(1, Ordering::Relaxed);
            if i >= tasks {
                return;
            }
            task(i);
        }
    }

    fn work(&self) {
        INSIDE_LOOP.set(true);
        let mut seen = 0;
        let mut spins = 0;
        while !self.quit.load(Ordering::Relaxed) {
            let state = self.state.load(Ordering::Acquire);
            if state & OPEN != 0 && state >> 32 != seen {
                if seats(state) == 0 {
                    seen = state >> 32;
                    if !self.crowded {
                        spins = 0;
                    }
                    continue;
                }
                spins = 0;
                let entered = state - SEAT + 1;
                if self.state.compare_exchange(state, entered, Ordering::AcqRel, Ordering::Relaxed).is_err() {
                    continue;
                }
                seen = state >> 32;
                // SAFETY: we are inside an open generation: `run` set `job` before opening it and keeps the closure
                // alive until we leave.
                let task = unsafe { &*(*self.job.get()).unwrap_unchecked() };
                if catch_unwind(AssertUnwindSafe(|| self.drain(task))).is_err() {
                    self.panicked.store(true, Ordering::Relaxed);
                    self.next.store(usize::MAX / 2, Ordering::Relaxed);
                }
                self.state.fetch_sub(1, Ordering::Release);
            } else if spins < SPINS {
                spins += 1;
                std::hint::spin_loop();
            } else {
                spins = 0;
                self.sleep(seen);
            }
        }
    }

    fn sleep(&self, seen: u64) {
        let mut bed = lock(&self.bed);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        loop {
            let state = self.state.load(Ordering::SeqCst);
            if (state & OPEN != 0 && state >> 32 != seen && seats(state) > 0) || self.quit.load(Ordering::SeqCst) {
                break;
            }
            bed = self.bell.wait(bed).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The guarded data are `()`: a panic elsewhere cannot have left them broken.
fn lock(mutex: &Mutex<()>) -> MutexGuard<'_, ()> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once() {
        let pool = Pool::new(3);
        for tasks in [0, 1, 2, 7, 1000] {
            let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
            for round in 1..=20 {
                pool.run(tasks, &|i| {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == round));
            }
        }
    }

    #[test]
    fn no_more_threads_than_seats_work_on_a_loop() {
        // (threads, processors, tasks) and how many threads may be inside at once.
        for (threads, processors, tasks, most) in
            [(4, 8, 2, 2), (4, 8, 3, 3), (6, 8, 100, 6), (6, 3, 100, 3), (3, 1, 100, 2)]
        {
            let pool = Pool::on(threads, processors);
            assert_eq!(pool.threads(), threads);
            let workers = Mutex::new(std::collections::BTreeSet::new());
            for _ in 0..50 {
                workers.lock().unwrap().clear();
                let done = AtomicUsize::new(0);
                pool.run(tasks, &|_| {
                    workers.lock().unwrap().insert(format!("{:?}", std::thread::current().id()));
                    done.fetch_add(1, Ordering::Relaxed);
                });
                assert_eq!(done.into_inner(), tasks);
                let threads = workers.lock().unwrap().len();
                assert!(threads <= most, "{threads} of {most} threads on {tasks} tasks");
            }
            assert_eq!(pool.shared.state.load(Ordering::SeqCst) & (OPEN | INSIDE), 0);
        }
    }

    #[test]
    fn wakes_after_sleep_and_allows_nesting_and_sharing() {
        let pool = Pool::new(2);
        let sum = AtomicUsize::new(0);
        for _ in 0..3 {
            std::thread::sleep(std::time::Duration::from_millis(5));
            std::thread::scope(|scope| {
                for _ in 0..2 {
                    scope.spawn(|| {
                        pool.run(4, &|_| {
                            pool.run(3, &|i| {
                                sum.fetch_add(i, Ordering::Relaxed);
                            });
                        });
                    });
                }
            });
        }
        assert_eq!(sum.load(Ordering::Relaxed), 3 * 2 * 4 * 3);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_survives() {
        let pool = Pool::new(2);
        let result = catch_unwind(AssertUnwindSafe(|| pool.run(100, &|i| assert!(i != 57))));
        assert!(result.is_err());
        let count = AtomicUsize::new(0);
        pool.run(10, &|_| {
            count.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(count.load(Ordering::Relaxed), 10);
    }
}
