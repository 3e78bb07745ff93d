//! Which examples an update sees: all of them once an epoch, in an order of its own, a batch at a time. A function of the step, so
//! that a run resumes without any state of it.

use henson_kernels::philox::Stream;

/// Numbers the stream of shuffles among all uses of the seed.
const SHUFFLE: u32 = 0x7a68;

/// The batches of a run.
pub(crate) struct ShuffledBatches {
    seed: u64,
    count: usize,
    batch_size: usize,
    /// The order of the epoch that was asked for last.
    order: Option<(u64, Vec<usize>)>,
}

impl ShuffledBatches {
    /// Of so many examples.
    pub(crate) fn new(seed: u64, count: usize, batch_size: usize) -> Self {
        Self { seed, count, batch_size, order: None }
    }

    /// The examples of a step.
    pub(crate) fn of_step(&mut self, step: u64) -> &[usize] {
        let steps = self.count.div_ceil(self.batch_size).max(1) as u64;
        let epoch = step / steps;
        if self.order.as_ref().is_none_or(|(of, _)| *of != epoch) {
            self.order = Some((epoch, order(self.seed, epoch, self.count)));
        }
        let order = self.order.as_ref().map(|(_, order)| order.as_slice()).unwrap_or_default();
        order.chunks(self.batch_size).nth((step % steps) as usize).unwrap_or_default()
    }
}

/// The order of an epoch.
fn order(seed: u64, epoch: u64, count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    let mut draws = Stream::new(seed, SHUFFLE, epoch);
    for i in (1..count).rev() {
        order.swap(i, draws.below(i as u32 + 1) as usize);
    }
    order
}
