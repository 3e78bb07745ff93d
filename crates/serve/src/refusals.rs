//! Lines about requests that failed: some in each interval, and of the others only how many there were, so that nobody can
//! fill a disk by asking nonsense.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Lines of an interval.
const LINES: u64 = 10;

/// An interval.
pub(crate) const INTERVAL: Duration = Duration::from_secs(10);

#[derive(Default)]
pub(crate) struct Refusals(Mutex<Option<(Instant, u64)>>);

impl Refusals {
    /// Counts a failed request, and says whether it gets a line of its own.
    pub(crate) fn count(&self, now: Instant) -> bool {
        let mut interval = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (_, count) = interval.get_or_insert((now, 0));
        *count += 1;
        *count <= LINES
    }

    /// How many had no line in an interval that is over. To be asked now and then.
    pub(crate) fn settle(&self, now: Instant) -> Option<u64> {
        let mut interval = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (_, count) = interval.take_if(|(begin, _)| now.duration_since(*begin) >= INTERVAL)?;
        Some(count.saturating_sub(LINES)).filter(|count| *count > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_some_lines_and_a_number() {
        let (refusals, start) = (Refusals::default(), Instant::now());
        assert_eq!(refusals.settle(start), None);
        let lines = (0..1000).filter(|_| refusals.count(start)).count();
        assert_eq!((lines as u64, refusals.settle(start)), (LINES, None));
        assert_eq!(refusals.settle(start + INTERVAL), Some(1000 - LINES));
        assert_eq!(refusals.settle(start + INTERVAL), None);
        // A new interval has lines again, and few failures leave nothing to add.
        assert!(refusals.count(start + 2 * INTERVAL));
        assert_eq!(refusals.settle(start + 3 * INTERVAL), None);
    }
}
