//! T5's span corruption (Raffel et al. 2020, section 3.1.4; `random_spans_noise_mask` of its code): the text with spans replaced by one
//! sentinel each is the source, and the spans, each behind its sentinel, are the target.
//!
//! Legend: n tokens of text, of which k are noise, in s spans.

use henson_kernels::philox::Stream;

use super::settings::InstanceSettings;
use crate::{DataError, Vocabulary};

/// What span corruption must know of a vocabulary.
#[derive(Debug)]
pub(super) struct Spans {
    /// What stands for the first span, the second, and so on.
    sentinels: Vec<u32>,
    /// What ends a source and a target.
    end: u32,
}

/// How many tokens of noise a text has, in how many spans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Noise {
    tokens: usize,
    spans: usize,
}

impl Noise {
    /// k = round(p·n), halves to even, at least 1 and at most n − 1; s = round(k/mean), at least 1. Each span and each part between
    /// two has at least a token.
    fn of(length: usize, settings: &InstanceSettings) -> Self {
        let tokens = (length as f64 * settings.mask_probability).round_ties_even() as usize;
        let tokens = tokens.max(1).min(length.saturating_sub(1));
        let spans = (tokens as f64 / settings.mean_span).round_ties_even() as usize;
        Self { tokens, spans: spans.max(1).min(tokens).min(length - tokens) }
    }

    /// The lengths of source and target, with their ends.
    fn lengths(self, length: usize) -> (usize, usize) {
        (length - self.tokens + self.spans + 1, self.tokens + self.spans + 1)
    }
}

/// How many tokens of text fill a source of `length` tokens, its end included, and the length of the target then: 568 and 114 for 512.
/// None where there is no room for a token of noise and one of text.
pub(super) fn text_of_source(length: usize, settings: &InstanceSettings) -> Option<(usize, usize)> {
    let lengths = |text: usize| Noise::of(text, settings).lengths(text);
    // A token more of text makes the source at most a token longer, and with a share below 1 it grows without bound.
    let mut text = 2;
    if lengths(text).0 > length {
        return None;
    }
    while lengths(text + 1).0 <= length && text < 64 * length {
        text += 1;
    }
    Some((text, lengths(text).1))
}

impl Spans {
    /// `text` is the number of tokens that a source is made of. An error where the vocabulary has too few sentinels.
    pub(super) fn new(vocabulary: &Vocabulary, text: usize, settings: &InstanceSettings) -> Result<Self, DataError> {
        let needed = (2..=text).map(|length| Noise::of(length, settings).spans).max().unwrap_or(0);
        if vocabulary.sentinels.len() < needed {
            return Err(DataError::TooFewSentinels { needed, found: vocabulary.sentinels.len() });
        }
        Ok(Self { sentinels: vocabulary.sentinels.clone(), end: vocabulary.sep })
    }

    /// Source and target of a text.
    pub(super) fn corrupt(
        &self,
        settings: &InstanceSettings,
        draws: &mut Stream,
        text: &[u32],
    ) -> (Vec<u32>, Vec<u32>) {
        // Too short for a span: the target holds none, as in T5's code.
        if text.len() < 2 {
            let target = self.sentinels.first().copied().into_iter().chain([self.end]);
            return (text.iter().copied().chain([self.end]).collect(), target.collect());
        }
        let noise = Noise::of(text.len(), settings);
        let (source_length, target_length) = noise.lengths(text.len());
        let (mut source, mut target) = (Vec::with_capacity(source_length), Vec::with_capacity(target_length));
        // As there, the lengths of noise are drawn first.
        let of_noise = composition(draws, noise.tokens, noise.spans);
        let of_text = composition(draws, text.len() - noise.tokens, noise.spans);
        let mut rest = text;
        for ((kept, hidden), sentinel) in of_text.into_iter().zip(of_noise).zip(&self.sentinels) {
            let (before, behind) = rest.split_at(kept);
            let (span, behind) = behind.split_at(hidden);
            source.extend_from_slice(before);
            source.push(*sentinel);
            target.push(*sentinel);
            target.extend_from_slice(span);
            rest = behind;
        }
        source.push(self.end);
        target.push(self.end);
        (source, target)
    }
}

/// Divides `items` into `parts` that are not empty, each way as likely: of the places between two items, as many as needed are drawn.
fn composition(draws: &mut Stream, items: usize, parts: usize) -> Vec<usize> {
    let mut lengths = Vec::with_capacity(parts);
    let (mut needed, mut before) = (parts - 1, 0);
    for place in 1..items {
        if needed > 0 && (draws.below((items - place) as u32) as usize) < needed {
            lengths.push(place - before);
            (before, needed) = (place, needed - 1);
        }
    }
    lengths.push(items - before);
    lengths
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// Those of T5's `random_spans_helper`, without and with other shares.
    #[test]
    fn lengths_of_text_and_target() {
        let of = |length, mask_probability, mean_span| {
            let settings = InstanceSettings { mask_probability, mean_span, ..InstanceSettings::default() };
            text_of_source(length, &settings)
        };
        for (length, expected) in [(128, (141, 29)), (256, (284, 58)), (512, (568, 114)), (1024, (1137, 229))] {
            assert_eq!(of(length, 0.15, 3.0), Some(expected), "{length}");
        }
        assert_eq!(of(2, 0.15, 3.0), None);
        assert_eq!(of(3, 0.15, 3.0), Some((2, 3)));
    }

    #[test]
    fn noise_is_rounded_to_even() {
        let settings = InstanceSettings::default();
        // 1.5 → 2, 4.5 → 4; 2.25 → 2; 0.3 → 1; of 2 tokens one stays.
        for (length, tokens, spans) in
            [(10, 2, 1), (30, 4, 1), (15, 2, 1), (2, 1, 1), (568, 85, 28), (50, 8, 3), (70, 10, 3), (90, 14, 5)]
        {
            assert_eq!(Noise::of(length, &settings), Noise { tokens, spans }, "{length}");
        }
    }

    /// Of 5 items in 3 parts, all six ways, each as often.
    #[test]
    fn compositions_are_uniform() {
        let mut draws = Stream::new(7, 0, 0);
        let mut counts = BTreeMap::new();
        for _ in 0..6000 {
            *counts.entry(composition(&mut draws, 5, 3)).or_insert(0) += 1;
        }
        assert_eq!(counts.len(), 6);
        assert!(counts.iter().all(|(way, n)| way.iter().sum::<usize>() == 5 && (850..1150).contains(n)), "{counts:?}");
        assert_eq!(composition(&mut draws, 4, 4), [1; 4]);
        assert_eq!(composition(&mut draws, 4, 1), [4]);
    }
}
