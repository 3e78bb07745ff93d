//! Which documents were seen, by 128 bits of their hash: 16 bytes a document and an eighth more.
//!
//! A hash table would take up to twice as much, and both its old and its new memory each time that it grows.

use std::collections::HashSet;

/// A set of hashes.
#[derive(Default)]
pub(crate) struct Seen {
    sorted: Vec<u128>,
    /// Those that are not sorted in yet: at most a sixteenth, or some thousands.
    recent: HashSet<u128>,
}

impl Seen {
    /// Adds a hash; whether it is new.
    pub(crate) fn insert(&mut self, hash: u128) -> bool {
        if self.sorted.binary_search(&hash).is_ok() || !self.recent.insert(hash) {
            return false;
        }
        if self.recent.len() >= (self.sorted.len() / 16).max(1 << 12) {
            self.sort_in();
        }
        true
    }

    /// Merges the recent hashes into the others, from the end, in place.
    fn sort_in(&mut self) {
        let mut recent: Vec<u128> = self.recent.drain().collect();
        recent.sort_unstable();
        let mut old = self.sorted.len();
        self.sorted.reserve_exact(recent.len());
        self.sorted.resize(old + recent.len(), 0);
        while let Some(&hash) = recent.last() {
            // The last free place is as far behind the old ones as there are new ones.
            let free = old + recent.len() - 1;
            if old > 0 && self.sorted[old - 1] > hash {
                self.sorted[free] = self.sorted[old - 1];
                old -= 1;
            } else {
                self.sorted[free] = hash;
                recent.pop();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_a_set() {
        let mut seen = Seen::default();
        let mut reference = HashSet::new();
        let mut state = 1_u64;
        for _ in 0..100_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            // Few bits, so that many come twice; spread over all 128.
            let hash = u128::from(state >> 48) * 0x0123_4567_89ab_cdef_0123_4567_89ab;
            assert_eq!(seen.insert(hash), reference.insert(hash));
        }
        assert!(seen.sorted.is_sorted() && seen.sorted.len() + seen.recent.len() == reference.len());
        assert!(seen.sorted.capacity() <= seen.sorted.len() + 1 && seen.recent.len() < 1 << 12);
    }
}
