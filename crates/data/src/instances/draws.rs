//! Where the random numbers of instances come from.
//!
//! Every draw is Philox of a key and a counter. A key belongs to (seed, epoch, purpose), a counter to (unit, copy, chunk,
//! draw), where a unit is a document or a block. Purposes share no numbers, so what is drawn for masks can never change
//! how documents are cut.

use henson_kernels::philox::{Stream, philox};

/// What numbers are drawn for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Purpose {
    /// How often a unit of a weighted source comes.
    Copies = 1,
    /// How a document is cut into chunks.
    Walk = 2,
    /// Where a random second segment comes from.
    Second = 3,
    /// Which end of a segment loses a piece.
    Truncation = 4,
    /// What is hidden, and behind what.
    Masks = 5,
    /// In which order instances come.
    Order = 6,
}

/// Keeps the derivation of keys apart from other uses of the seed, such as initial weights.
const INSTANCES: u32 = u32::from_be_bytes(*b"inst");

/// The chunk number under which the draws for a whole document stand.
const WHOLE: u32 = u32::MAX;

/// Units have 40 bits of a counter, their copies the 24 above.
const UNIT_BITS: u32 = 40;

/// The most copies of a unit.
pub(super) const MOST_COPIES: f64 = (1 << (64 - UNIT_BITS)) as f64 - 1.0;

/// One copy of a unit, as it stands in counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Copy {
    pub(super) unit: usize,
    pub(super) copy: u32,
}

/// The key of (seed, epoch, purpose).
pub(super) fn key(seed: u64, epoch: u64, purpose: Purpose) -> u64 {
    let [low, high, ..] = philox(seed, [purpose as u32, epoch as u32, (epoch >> 32) as u32, INSTANCES]);
    u64::from(high) << 32 | u64::from(low)
}

/// The numbers for one chunk of a copy.
pub(super) fn of_chunk(key: u64, copy: Copy, chunk: u32) -> Stream {
    Stream::new(key, chunk, u64::from(copy.copy) << UNIT_BITS | copy.unit as u64)
}

/// The numbers for a copy as a whole.
pub(super) fn of_copy(key: u64, copy: Copy) -> Stream {
    of_chunk(key, copy, WHOLE)
}

/// Whether something of probability `p` happens. Certain at 1, impossible at 0.
pub(super) fn happens(stream: &mut Stream, p: f64) -> bool {
    f64::from(stream.bits()) < p * (u64::from(u32::MAX) + 1) as f64
}

/// A number in 0..n, where n may need more than 32 bits; n > 0. Its bias is below n / 2⁶⁴.
pub(super) fn below(stream: &mut Stream, n: u64) -> u64 {
    let bits = u64::from(stream.bits()) << 32 | u64::from(stream.bits());
    ((u128::from(bits) * u128::from(n)) >> 64) as u64
}

/// Fair coins, 32 from each draw.
pub(super) struct Coins {
    stream: Stream,
    bits: u32,
    left: u32,
}

impl Coins {
    pub(super) fn new(stream: Stream) -> Self {
        Self { stream, bits: 0, left: 0 }
    }

    pub(super) fn toss(&mut self) -> bool {
        if self.left == 0 {
            (self.bits, self.left) = (self.stream.bits(), 32);
        }
        self.left -= 1;
        let coin = self.bits & 1 == 1;
        self.bits >>= 1;
        coin
    }
}

/// A random permutation of 0..count in constant memory: a Feistel network over the next power of four. Where it leads
/// outside, it is walked on until it leads back, which keeps it a bijection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Permutation {
    key: u64,
    count: u64,
    half: u32,
}

const ROUNDS: u32 = 6;

impl Permutation {
    pub(super) fn new(key: u64, count: u64) -> Self {
        let bits = u64::BITS - count.saturating_sub(1).leading_zeros();
        Self { key, count, half: bits.div_ceil(2).max(1) }
    }

    /// Where `index`, which is below the count, leads.
    pub(super) fn at(&self, index: u64) -> u64 {
        let mask = (1_u64 << self.half) - 1;
        let mut at = index;
        loop {
            let (mut left, mut right) = (at >> self.half, at & mask);
            for round in 0..ROUNDS {
                let mixed = philox(self.key, [right as u32, round, 0, 0])[0];
                (left, right) = (right, left ^ (u64::from(mixed) & mask));
            }
            at = left << self.half | right;
            if at < self.count {
                return at;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permutations_are_bijections_and_differ() {
        for count in (1..70).chain([255, 256, 257, 1000, 4096, 4097, 10_007]) {
            let permutation = Permutation::new(5, count);
            let mut seen = vec![false; count as usize];
            for i in 0..count {
                assert!(!std::mem::replace(&mut seen[permutation.at(i) as usize], true), "{count}: {i} meets another");
            }
        }
        let order = |key| -> Vec<u64> { (0..1000).map(|i| Permutation::new(key, 1000).at(i)).collect() };
        assert_eq!(order(1), order(1));
        assert_ne!(order(1), order(2));
    }

    /// Neighbours must not stay neighbours, and no place may draw some numbers more than others.
    #[test]
    fn permutations_shuffle() {
        let count = 10_000_u64;
        let permutation = Permutation::new(9, count);
        let near = (1..count).filter(|i| permutation.at(*i).abs_diff(permutation.at(i - 1)) <= 10).count();
        // By chance 20 in 10,000.
        assert!(near < 50, "{near} neighbours stayed near");
        let mut places = [0; 16];
        for key in 0..16_000 {
            places[Permutation::new(key, 16).at(3) as usize] += 1;
        }
        assert!(places.iter().all(|n| (850..1150).contains(n)), "{places:?}");
    }

    #[test]
    fn largest_counts_work() {
        let permutation = Permutation::new(1, u64::MAX >> 2);
        assert!(permutation.at(12345) < u64::MAX >> 2);
        let mut stream = Stream::new(1, 1, 1);
        assert!((0..100).all(|_| below(&mut stream, u64::MAX) < u64::MAX && below(&mut stream, 1) == 0));
        assert!((0..100).all(|_| happens(&mut stream, 1.0) && !happens(&mut stream, 0.0)));
    }
}
