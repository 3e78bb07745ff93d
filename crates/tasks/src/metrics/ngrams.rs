//! n-grams with their counts, for scores of written texts. Sorted runs instead of hash tables: memory and time follow the length of
//! a text, whatever is in it.

use std::collections::HashMap;

/// Numbers for words, the same for the same word.
#[derive(Debug, Default)]
pub(super) struct Words {
    numbers: HashMap<String, u32>,
}

impl Words {
    pub(super) fn number(&mut self, word: &str) -> u32 {
        if let Some(number) = self.numbers.get(word) {
            return *number;
        }
        let number = self.numbers.len() as u32;
        self.numbers.insert(word.to_owned(), number);
        number
    }
}

/// The different n-grams of a text, in order, each with how often it occurs.
#[derive(Debug)]
pub(super) struct Counted(Vec<(u128, u32)>);

impl Counted {
    /// All runs of `n` items; `n` items of `bits` bits must fit into 128.
    pub(super) fn new(items: &[u32], n: usize, bits: usize) -> Self {
        let pack = |run: &[u32]| run.iter().fold(0u128, |packed, item| (packed << bits) | u128::from(*item));
        let mut all: Vec<u128> = items.windows(n).map(pack).collect();
        all.sort_unstable();
        Self(all.chunk_by(|a, b| a == b).map(|same| (same[0], same.len() as u32)).collect())
    }

    pub(super) fn total(&self) -> u64 {
        self.0.iter().map(|(_, count)| u64::from(*count)).sum()
    }

    /// How many are also in another text, each at most as often as there.
    pub(super) fn shared(&self, other: &Self) -> u64 {
        self.shared_with_any(std::slice::from_ref(other))
    }

    /// How many are also in one of several texts, each at most as often as in the one with the most of it.
    pub(super) fn shared_with_any(&self, others: &[Self]) -> u64 {
        let mut rests: Vec<&[(u128, u32)]> = others.iter().map(|other| other.0.as_slice()).collect();
        let mut shared = 0;
        for (ngram, count) in &self.0 {
            let mut most = 0;
            for rest in &mut rests {
                while rest.first().is_some_and(|(other, _)| other < ngram) {
                    *rest = &rest[1..];
                }
                if let Some((_, theirs)) = rest.first().filter(|(other, _)| other == ngram) {
                    most = most.max(*theirs);
                }
            }
            shared += u64::from(most.min(*count));
        }
        shared
    }
}

/// White space as Python's `str.split` has it: four control characters more than Rust's.
pub(super) fn is_python_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}
