//! Ranks that are threads of one process, for tests: what they do with each other is the same, without any library.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// A test that went wrong shall fail, and not hang.
const PATIENCE: Duration = Duration::from_secs(120);

/// What one rank sent to another, which has not taken it yet, in order.
type Letters = VecDeque<Vec<u8>>;

/// Messages under way, by sender and receiver.
#[derive(Default)]
struct Mail {
    boxes: Mutex<HashMap<(usize, usize), Letters>>,
    changed: Condvar,
}

pub(crate) struct Port {
    rank: usize,
    mail: Arc<Mail>,
}

impl Port {
    pub(crate) fn all(size: usize) -> Vec<Self> {
        let mail = Arc::new(Mail::default());
        (0..size).map(|rank| Self { rank, mail: Arc::clone(&mail) }).collect()
    }

    pub(crate) fn send(&self, to: usize, message: &[u8]) {
        let mut boxes = self.mail.boxes.lock().unwrap_or_else(PoisonError::into_inner);
        boxes.entry((self.rank, to)).or_default().push_back(message.to_vec());
        drop(boxes);
        self.mail.changed.notify_all();
    }

    pub(crate) fn receive(&self, from: usize) -> Vec<u8> {
        let mut boxes = self.mail.boxes.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(message) = boxes.get_mut(&(from, self.rank)).and_then(VecDeque::pop_front) {
                return message;
            }
            let (waited, timeout) =
                self.mail.changed.wait_timeout(boxes, PATIENCE).unwrap_or_else(PoisonError::into_inner);
            assert!(!timeout.timed_out(), "ranks: rank {} waits for rank {from}, whose thread has ended", self.rank);
            boxes = waited;
        }
    }
}
