//! Batches made ahead of the trainer.
//!
//! Threads make whole steps, each from its own place, and [`Loader::next`] hands them out in order: how many threads
//! there are changes nothing. One more thread counts the next epoch before it begins. The whole state is a [`Place`].

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::DataError;
use crate::instances::{Epoch, Instance, Instances, Maker};

/// Where a stream of instances stands: the next one to come.
#[derive(Serialize, Deserialize, Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Place {
    /// The epoch, from 0.
    pub epoch: u64,
    /// The number of the instance in its order.
    pub index: u64,
}

/// What one update of the model is computed from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// The batch in equal parts, one for each pass of the model.
    pub parts: Vec<Part>,
    /// The pieces to predict in all parts together.
    pub predicted: usize,
    /// The sequences with a next-sentence label in all parts together.
    pub pairs: usize,
    /// The pieces in all parts together.
    pub tokens: usize,
    /// Where the next step begins.
    pub after: Place,
}

/// Sequences in one flat stream, without padding.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Part {
    /// The pieces of all sequences.
    pub ids: Vec<u32>,
    /// The segment of each piece.
    pub segments: Vec<u32>,
    /// How many pieces each sequence has.
    pub lengths: Vec<usize>,
    /// Where pieces are to be predicted, counted from the beginning of the part; where sequences have targets, of those.
    pub rows: Vec<u32>,
    /// Which pieces these are.
    pub targets: Vec<u32>,
    /// For encoder-decoders: how many pieces each target has, of `targets`.
    pub target_lengths: Option<Vec<usize>>,
    /// Where pieces are predicted in an order: when each piece comes; 0 for those that all see.
    pub orders: Option<Vec<u32>>,
    /// For sentence pairs: the label of each sequence.
    pub next_sentence: Option<Vec<u32>>,
    /// The number of its first sequence in the step's batch.
    pub first_number: u32,
}

/// Puts instances into one stream.
pub fn part_of(instances: &[Instance], first_number: u32) -> Part {
    let tokens = instances.iter().map(|instance| instance.ids.len()).sum();
    let predicted = instances.iter().map(|instance| instance.predicted.len()).sum();
    let mut part = Part {
        ids: Vec::with_capacity(tokens),
        segments: Vec::with_capacity(tokens),
        lengths: instances.iter().map(|instance| instance.ids.len()).collect(),
        rows: Vec::with_capacity(predicted),
        targets: Vec::with_capacity(predicted),
        target_lengths: instances.iter().map(|instance| Some(instance.target.as_ref()?.len())).collect(),
        orders: instances.iter().all(|instance| instance.orders.is_some()).then(|| Vec::with_capacity(tokens)),
        next_sentence: instances.iter().map(|instance| instance.next_sentence).collect(),
        first_number,
    };
    for instance in instances {
        let begin = part.ids.len() as u32;
        part.ids.extend_from_slice(&instance.ids);
        part.segments.extend_from_slice(&instance.segments);
        if let Some(orders) = &mut part.orders {
            orders.extend(instance.orders.iter().flatten());
        }
        part.rows.extend(instance.predicted.iter().map(|predicted| begin + predicted.position));
        part.targets.extend(instance.predicted.iter().map(|predicted| predicted.target));
        part.targets.extend(instance.target.iter().flatten());
    }
    if part.target_lengths.is_some() {
        part.rows.extend(0..part.targets.len() as u32);
    }
    part
}

impl Part {
    /// The pieces that a model reads: of sources and of targets.
    pub fn tokens(&self) -> usize {
        self.ids.len() + self.target_lengths.as_ref().map_or(0, |lengths| lengths.iter().sum())
    }
}

/// Hands out the steps from a place on, for as long as somebody asks. Dropping it ends its threads.
#[derive(Debug)]
pub struct Loader {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    waited: Duration,
}

#[derive(Debug)]
struct Shared {
    instances: Arc<Instances>,
    batch_size: usize,
    accumulation: usize,
    /// How many steps may be there or in the making before they are asked for.
    ahead: u64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The first instance that no step has yet.
    next: Place,
    /// What the next step has of its instances so far: of each epoch the numbers from … to.
    open: Vec<Stretch>,
    /// The epochs that are counted.
    epochs: BTreeMap<u64, Arc<Epoch>>,
    /// How many steps were begun, and how many handed out.
    begun: u64,
    given: u64,
    /// Steps that were made, or why one could not be.
    ready: BTreeMap<u64, Result<Step, DataError>>,
    /// Why the epoch that comes next cannot be counted.
    failure: Option<DataError>,
    stop: bool,
}

/// Instances of one epoch that follow each other.
#[derive(Debug)]
struct Stretch {
    epoch: Arc<Epoch>,
    from: u64,
    to: u64,
}

impl Loader {
    /// Steps of `batch_size` instances from `place` on, each in `accumulation` equal parts, at most `ahead` of them made
    /// before they are asked for. Counts the epoch of the place first, which is all that it takes to find it.
    pub fn new(
        instances: Arc<Instances>,
        place: Place,
        batch_size: usize,
        accumulation: usize,
        threads: usize,
        ahead: usize,
    ) -> Result<Self, DataError> {
        let refuse =
            |name, value: usize, problem| Err(DataError::InstanceSetting { name, value: value.to_string(), problem });
        if batch_size == 0 || u32::try_from(batch_size).is_err() {
            return refuse("batch_size", batch_size, "expected at least one sequence, fewer than 2³²".to_owned());
        }
        if accumulation == 0 || !batch_size.is_multiple_of(accumulation) {
            let problem = format!("expected a number that divides the batch_size of {batch_size}");
            return refuse("accumulation", accumulation, problem);
        }
        let threads = threads.max(1);
        let epoch = instances.epoch(place.epoch, threads)?;
        if place.index > epoch.count() {
            return Err(DataError::NoSuchPlace { place, count: epoch.count() });
        }
        let state = State { next: place, epochs: BTreeMap::from([(place.epoch, epoch)]), ..State::default() };
        let ahead = ahead.max(1) as u64;
        let (state, changed) = (Mutex::new(state), Condvar::new());
        let shared = Arc::new(Shared { instances, batch_size, accumulation, ahead, state, changed });
        // Should a thread not start, dropping the loader ends those that did.
        let mut loader = Self { shared, threads: Vec::with_capacity(threads + 1), waited: Duration::ZERO };
        loader.start(Shared::count_epochs)?;
        for _ in 0..threads {
            loader.start(Shared::make_steps)?;
        }
        Ok(loader)
    }

    /// The next step; waits for it where it is not ready.
    #[allow(clippy::should_implement_trait, reason = "there is no last one, and it can fail")]
    pub fn next(&mut self) -> Result<Step, DataError> {
        let shared = &*self.shared;
        let mut state = shared.lock();
        let begin = Instant::now();
        let step = loop {
            let number = state.given;
            if let Some(step) = state.ready.remove(&number) {
                state.stop |= step.is_err();
                break step?;
            }
            // An epoch is counted before it is needed: steps that do not need it still come.
            let needed = state.begun == number && !state.epochs.contains_key(&state.next.epoch);
            if let Some(failure) = state.failure.take_if(|_| needed) {
                state.stop = true;
                return Err(failure);
            }
            if state.stop {
                return Err(DataError::LoaderStopped);
            }
            state = shared.wait(state);
        };
        self.waited += begin.elapsed();
        state.given += 1;
        drop(state);
        shared.changed.notify_all();
        Ok(step)
    }

    /// How long [`Loader::next`] has waited for steps that were not ready, all in all.
    pub fn waited(&self) -> Duration {
        self.waited
    }

    fn start(&mut self, work: fn(&Shared)) -> Result<(), DataError> {
        let shared = self.shared.clone();
        let run = move || {
            let _guard = StopOnPanic(&shared);
            work(&shared);
        };
        let name = format!("henson-data-{}", self.threads.len());
        let thread = std::thread::Builder::new().name(name).spawn(run);
        self.threads.push(thread.map_err(|source| DataError::Threads { source })?);
        Ok(())
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.changed.notify_all();
        for thread in self.threads.drain(..) {
            // One that panicked has said so on standard error already.
            let _ = thread.join();
        }
    }
}

/// A thread that panics must not leave the trainer waiting for its step.
struct StopOnPanic<'a>(&'a Shared);

impl Drop for StopOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.lock().stop = true;
            self.0.changed.notify_all();
        }
    }
}

impl Shared {
    /// Counts epochs, always one more than the steps have reached.
    fn count_epochs(&self) {
        let mut state = self.lock();
        while !state.stop && state.failure.is_none() {
            let missing = (0..2).map(|i| state.next.epoch.saturating_add(i)).find(|e| !state.epochs.contains_key(e));
            let Some(number) = missing else {
                state = self.wait(state);
                continue;
            };
            drop(state);
            // On one thread: the trainer needs the others, and there is time.
            let epoch = self.instances.epoch(number, 1);
            state = self.lock();
            match epoch {
                Ok(epoch) => _ = state.epochs.insert(number, epoch),
                Err(error) => state.failure = Some(error),
            }
            self.changed.notify_all();
        }
    }

    fn make_steps(&self) {
        let mut maker = Maker::new(&self.instances);
        let mut state = self.lock();
        while !state.stop {
            let before = state.next;
            let room = state.begun < state.given + self.ahead;
            let stretches = room.then(|| state.stretches(self.batch_size)).flatten();
            if state.next.epoch != before.epoch {
                // For the thread that counts epochs.
                self.changed.notify_all();
            }
            let Some(stretches) = stretches else {
                state = self.wait(state);
                continue;
            };
            let (number, after) = (state.begun, state.next);
            state.begun += 1;
            drop(state);
            let step = self.step(&stretches, after, &mut maker);
            state = self.lock();
            state.ready.insert(number, step);
            self.changed.notify_all();
        }
    }

    fn step(&self, stretches: &[Stretch], after: Place, maker: &mut Maker<'_>) -> Result<Step, DataError> {
        let mut parts = Vec::with_capacity(self.accumulation);
        let in_part = self.batch_size / self.accumulation;
        let mut instances = Vec::with_capacity(in_part);
        for stretch in stretches {
            for index in stretch.from..stretch.to {
                instances.push(stretch.epoch.make(index, maker)?);
                if instances.len() == in_part {
                    parts.push(part_of(&instances, (parts.len() * in_part) as u32));
                    instances.clear();
                }
            }
        }
        let predicted = parts.iter().map(|part: &Part| part.rows.len()).sum();
        let pairs = parts.iter().map(|part| part.next_sentence.as_ref().map_or(0, Vec::len)).sum();
        let tokens = parts.iter().map(Part::tokens).sum();
        Ok(Step { parts, predicted, pairs, tokens, after })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Takes the instances of the next step, which may run over the ends of several epochs. None as long as one of
    /// these is not counted; what was taken is then kept for the next try.
    fn stretches(&mut self, batch_size: usize) -> Option<Vec<Stretch>> {
        loop {
            let taken: u64 = self.open.iter().map(|stretch| stretch.to - stretch.from).sum();
            let missing = batch_size as u64 - taken;
            let epoch = self.epochs.get(&self.next.epoch);
            if let Some(epoch) = epoch.filter(|epoch| self.next.index >= epoch.count()) {
                // Its end: a place always names an instance that is there.
                debug_assert_eq!(self.next.index, epoch.count());
                self.epochs.remove(&self.next.epoch);
                self.next = Place { epoch: self.next.epoch.saturating_add(1), index: 0 };
                continue;
            }
            if missing == 0 {
                return Some(std::mem::take(&mut self.open));
            }
            let epoch = epoch?;
            let (from, to) = (self.next.index, epoch.count().min(self.next.index + missing));
            self.open.push(Stretch { epoch: epoch.clone(), from, to });
            self.next.index = to;
        }
    }
}
