//! Sequences of any length in flat batches of a bounded number of tokens.

use std::ops::Range;

/// Tokens of a batch: large enough for full speed, small enough for the caches of a CPU.
pub(crate) const TOKENS: usize = 4096;

/// Consecutive ranges of sequences with at most [`TOKENS`] tokens each (or one longer sequence).
pub(crate) fn by_tokens(lengths: impl IntoIterator<Item = usize>) -> Vec<Range<usize>> {
    let mut batches: Vec<Range<usize>> = Vec::new();
    let mut tokens = usize::MAX;
    for (i, length) in lengths.into_iter().enumerate() {
        match batches.last_mut() {
            Some(batch) if tokens.saturating_add(length) <= TOKENS => {
                batch.end = i + 1;
                tokens += length;
            }
            _ => {
                batches.push(i..i + 1);
                tokens = length;
            }
        }
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_cover_everything_in_order() {
        assert!(by_tokens([]).is_empty());
        assert_eq!(by_tokens([5000, 1, 4095, 1, 4096]), [0..1, 1..3, 3..4, 4..5]);
        assert_eq!(by_tokens([10; 3]).first(), Some(&(0..3)));
    }
}
