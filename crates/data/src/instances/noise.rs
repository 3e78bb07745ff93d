//! BART's noises (Lewis et al. 2020, section 2.2; `denoising_dataset.py` of fairseq): what stands in the source in place of a text, all of
//! which is the target. In their order: sentences change places, tokens are masked, tokens are deleted, spans become one mask each,
//! and the text is turned around. Each works on what the one before left.
//!
//! Deliberately unlike fairseq, sentences are those of the corpus, and not what stands between two full stops.

use henson_kernels::philox::Stream;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::draws::happens;
use super::masks::{Masks, unit_interval};
use crate::DataError;

/// How a text is spoiled that an encoder-decoder shall write as it was. The defaults are BART's.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct NoiseSettings {
    /// Share of the sentences that change places among themselves.
    pub permutation: f64,
    /// Share of the tokens that become a mask each.
    pub masking: f64,
    /// Share of the tokens that are deleted.
    pub deletion: f64,
    /// Share of the tokens in spans that become one mask each. Lengths of spans are Poisson with a mean of `mean_span`; one of length
    /// 0 is a mask more. Spans may run into each other, so that somewhat fewer tokens are hidden.
    pub infilling: f64,
    /// Share of the sequences that begin at a random token, with what stood before it at their end.
    pub rotation: f64,
    /// Share of the masks that are a random token instead (0.1 in the command that BART's authors gave).
    pub random: f64,
}

impl Default for NoiseSettings {
    fn default() -> Self {
        Self { permutation: 1.0, masking: 0.0, deletion: 0.0, infilling: 0.3, rotation: 0.0, random: 0.0 }
    }
}

impl NoiseSettings {
    /// No noise at all: a text is copied.
    pub fn none() -> Self {
        Self { permutation: 0.0, infilling: 0.0, ..Self::default() }
    }

    /// Refuses what is no share.
    pub(super) fn check(&self) -> Result<(), DataError> {
        let shares = [
            ("noise.permutation", self.permutation),
            ("noise.masking", self.masking),
            ("noise.deletion", self.deletion),
            ("noise.infilling", self.infilling),
            ("noise.rotation", self.rotation),
            ("noise.random", self.random),
        ];
        match shares.iter().find(|(_, share)| !(0.0..=1.0).contains(share)) {
            Some((name, share)) => Err(DataError::InstanceSetting {
                name,
                value: share.to_string(),
                problem: "expected a share, 0 to 1".to_owned(),
            }),
            None => Ok(()),
        }
    }

    /// The source of a text whose sentences begin at `sentences`, the first of which is 0. Specials of a layout inside of it stay. It
    /// has at most `most` tokens, which is at least as many as the text has.
    pub(super) fn spoil(
        &self,
        masks: &Masks,
        mean_span: f64,
        draws: &mut Stream,
        (text, sentences): (&[u32], &[usize]),
        most: usize,
    ) -> Vec<u32> {
        let mut text = permuted(text, sentences, self.permutation, draws);
        if self.masking > 0.0 {
            for place in self.chosen(masks, &text, self.masking, draws) {
                text[place] = self.mask(masks, draws);
            }
        }
        if self.deletion > 0.0 {
            let mut deleted = vec![false; text.len()];
            self.chosen(masks, &text, self.deletion, draws).into_iter().for_each(|place| deleted[place] = true);
            let mut deleted = deleted.into_iter();
            text.retain(|_| !deleted.next().unwrap_or(false));
        }
        if self.infilling > 0.0 {
            text = self.infilled(masks, mean_span, &text, most, draws);
        }
        if self.rotation > 0.0 && happens(draws, self.rotation) && !text.is_empty() {
            let start = draws.below(text.len() as u32) as usize;
            text.rotate_left(start);
        }
        text
    }

    /// ⌈share·n⌉ of the n tokens that no layout set, in the order of the draws.
    fn chosen(&self, masks: &Masks, text: &[u32], share: f64, draws: &mut Stream) -> Vec<usize> {
        let mut places = ordinary_places(masks, text);
        let count = (share * places.len() as f64).ceil() as usize;
        shuffle_first(&mut places, count, draws);
        places
    }

    /// A mask, now and then a random token.
    fn mask(&self, masks: &Masks, draws: &mut Stream) -> u32 {
        if self.random > 0.0 && happens(draws, self.random) { masks.ordinary(draws) } else { masks.mask() }
    }

    /// Lengths of spans are drawn until they cover ⌈share·n⌉ tokens, and the last is cut to that. Spans begin at different tokens; one
    /// that reaches over the beginning of another swallows its mask.
    fn infilled(&self, masks: &Masks, mean: f64, text: &[u32], most: usize, draws: &mut Stream) -> Vec<u32> {
        let mut starts = ordinary_places(masks, text);
        let mut left = (self.infilling * starts.len() as f64).ceil() as usize;
        let (mut lengths, mut inserted) = (Vec::new(), 0);
        while left > 0 {
            let length = poisson(mean, draws).min(left);
            left -= length;
            if length == 0 {
                inserted += 1;
            } else {
                lengths.push(length);
            }
        }
        shuffle_first(&mut starts, lengths.len(), draws);
        let mut fates = vec![Fate::Stays; text.len()];
        starts.iter().for_each(|start| fates[*start] = Fate::Mask);
        for (start, length) in starts.iter().zip(&lengths) {
            let end = text.len().min(start + length);
            let behind = (start + 1..end).take_while(|place| !masks.is_layout(text[*place]));
            behind.for_each(|place| fates[place] = Fate::Gone);
        }
        let mut filled = Vec::with_capacity(most);
        for (id, fate) in text.iter().zip(&fates) {
            match fate {
                Fate::Stays => filled.push(*id),
                Fate::Mask => filled.push(self.mask(masks, draws)),
                Fate::Gone => {}
            }
        }
        let inserted = inserted.min(most.saturating_sub(filled.len()));
        self.with_masks(masks, &filled, inserted, draws)
    }

    /// The text with masks at random places among it.
    fn with_masks(&self, masks: &Masks, text: &[u32], mut inserted: usize, draws: &mut Stream) -> Vec<u32> {
        let (all, mut rest) = (text.len() + inserted, text.iter());
        let mut result = Vec::with_capacity(all);
        for place in 0..all {
            if inserted > 0 && (draws.below((all - place) as u32) as usize) < inserted {
                result.push(self.mask(masks, draws));
                inserted -= 1;
            } else {
                result.extend(rest.next());
            }
        }
        result
    }
}

/// What becomes of a token in infilling.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    Stays,
    Mask,
    Gone,
}

/// ⌈share·m⌉ of m sentences, drawn at random, change places among themselves.
fn permuted(text: &[u32], sentences: &[usize], share: f64, draws: &mut Stream) -> Vec<u32> {
    let mut order: Vec<usize> = (0..sentences.len()).collect();
    let count = (share * sentences.len() as f64).ceil() as usize;
    if count > 1 {
        let mut drawn = order.clone();
        shuffle_first(&mut drawn, count, draws);
        let mut places = drawn.clone();
        places.sort_unstable();
        places.into_iter().zip(drawn).for_each(|(place, sentence)| order[place] = sentence);
    }
    let sentence = |number: usize| {
        let end = sentences.get(number + 1).copied().unwrap_or(text.len());
        &text[sentences[number]..end]
    };
    order.into_iter().flat_map(sentence).copied().collect()
}

/// Places that no layout set.
fn ordinary_places(masks: &Masks, text: &[u32]) -> Vec<usize> {
    (0..text.len()).filter(|place| !masks.is_layout(text[*place])).collect()
}

/// Leaves `count` items, drawn at random without replacement, in random order.
fn shuffle_first(items: &mut Vec<usize>, count: usize, draws: &mut Stream) {
    let count = count.min(items.len());
    for i in 0..count {
        let other = i + draws.below((items.len() - i) as u32) as usize;
        items.swap(i, other);
    }
    items.truncate(count);
}

/// Longer spans than any that is drawn in practice.
const LONGEST: usize = 127;

/// A number from the Poisson distribution with this mean, by its cumulative probabilities.
fn poisson(mean: f64, draws: &mut Stream) -> usize {
    let mut draw = unit_interval(draws);
    let (mut length, mut probability) = (0, (-mean).exp());
    while draw >= probability && length < LONGEST {
        draw -= probability;
        length += 1;
        probability *= mean / length as f64;
    }
    length
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn poisson_has_its_mean_and_variance() {
        let mut draws = Stream::new(1, 0, 0);
        for mean in [0.5, 3.0, 3.5, 20.0] {
            let lengths: Vec<f64> = (0..20_000).map(|_| poisson(mean, &mut draws) as f64).collect();
            let count = lengths.len() as f64;
            let found = lengths.iter().sum::<f64>() / count;
            let variance = lengths.iter().map(|length| (length - found).powi(2)).sum::<f64>() / count;
            // Five standard errors.
            assert!((found - mean).abs() < 5.0 * (mean / count).sqrt(), "{mean}: {found}");
            assert!((variance / mean - 1.0).abs() < 0.08, "{mean}: {variance}");
        }
    }

    #[test]
    fn sentences_change_places_and_stay_whole() {
        let text: Vec<u32> = (0..20).collect();
        let sentences = [0, 3, 4, 11, 15];
        let mut draws = Stream::new(3, 0, 0);
        let whole: Vec<&[u32]> = vec![&text[..3], &text[3..4], &text[4..11], &text[11..15], &text[15..]];
        for share in [0.0, 0.4, 1.0] {
            let (mut moved, tries) = (0, 2000);
            for _ in 0..tries {
                let mut rest = &permuted(&text, &sentences, share, &mut draws)[..];
                for place in 0..5 {
                    let found = whole.iter().position(|sentence| rest.starts_with(sentence)).unwrap();
                    moved += usize::from(found != place);
                    rest = &rest[whole[found].len()..];
                }
                assert!(rest.is_empty());
            }
            // Of a permutation of n, one stays on average.
            let expected = if share == 0.0 { 0.0 } else { (5.0 * share).ceil() - 1.0 };
            let found = moved as f64 / tries as f64;
            assert!((found - expected).abs() < 0.15, "{share}: {found} of 5 sentences moved");
        }
    }
}
