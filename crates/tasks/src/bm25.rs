//! BM25 (Robertson et al. 1994): passages by the words that they share with a query. It needs no model, and is what every encoder is
//! measured against. Words are runs of letters and digits in small letters; there is no stemming and no list of stop words.

use std::collections::HashMap;

use crate::nearest::Near;

/// How soon a word that occurs again counts no more, and how much the length of a passage matters: those of Lucene.
const K1: f64 = 1.2;
const B: f64 = 0.75;

/// Passages, by their words.
#[derive(Clone, Debug)]
pub struct Bm25 {
    /// For each word the passages that have it, and how often.
    places: HashMap<String, Vec<(usize, u32)>>,
    /// Words of each passage.
    lengths: Vec<usize>,
}

impl Bm25 {
    /// Indexes passages.
    pub fn new(passages: &[&str]) -> Self {
        let mut places: HashMap<String, Vec<(usize, u32)>> = HashMap::new();
        let mut lengths = Vec::with_capacity(passages.len());
        for (number, passage) in passages.iter().enumerate() {
            let mut length = 0;
            for word in words(passage) {
                length += 1;
                let found = places.entry(word).or_default();
                match found.last_mut() {
                    Some((last, count)) if *last == number => *count += 1,
                    _ => found.push((number, 1)),
                }
            }
            lengths.push(length);
        }
        Self { places, lengths }
    }

    /// The `k` best passages for a query, best first; of equal ones the first. A passage that shares no word with it is none.
    pub fn best(&self, query: &str, k: usize) -> Vec<Near> {
        let passages = self.lengths.len() as f64;
        let mean = self.lengths.iter().sum::<usize>() as f64 / passages.max(1.0);
        let mut scores: HashMap<usize, f64> = HashMap::new();
        // In the order of the query, so that sums have the same bits every time.
        for word in words(query) {
            let Some(found) = self.places.get(&word) else { continue };
            let rarity = (1.0 + (passages - found.len() as f64 + 0.5) / (found.len() as f64 + 0.5)).ln();
            for (number, count) in found {
                let count = f64::from(*count);
                let long = 1.0 - B + B * self.lengths[*number] as f64 / mean;
                *scores.entry(*number).or_default() += rarity * count * (K1 + 1.0) / (count + K1 * long);
            }
        }
        let mut best: Vec<(usize, f64)> = scores.into_iter().collect();
        best.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        best.into_iter().take(k).map(|(index, score)| Near { index, score: score as f32 }).collect()
    }
}

fn words(text: &str) -> impl Iterator<Item = String> {
    text.split(|letter: char| !letter.is_alphanumeric()).filter(|word| !word.is_empty()).map(str::to_lowercase)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passages_are_ranked_by_rare_words() {
        let passages = ["The cat sat.", "A cat, a cat and the dog!", "Dogs run; the end.", "", "the the the the"];
        let index = Bm25::new(&passages);
        let found = index.best("the CAT", 10);
        assert_eq!(found.iter().map(|near| near.index).collect::<Vec<_>>(), [0, 1, 4, 2]);
        // By hand: 5 passages of 3, 7, 4, 0 and 4 words; "cat" is in 2 of them, "the" in 4.
        let term = |count: f64, length: f64, having: f64| {
            let rarity = (1.0 + (5.0 - having + 0.5) / (having + 0.5)).ln();
            rarity * count * 2.2 / (count + 1.2 * (0.25 + 0.75 * length / 3.6))
        };
        let expected = [term(1.0, 3.0, 2.0) + term(1.0, 3.0, 4.0), term(2.0, 7.0, 2.0) + term(1.0, 7.0, 4.0)];
        for (near, expected) in found.iter().zip(expected) {
            assert!((f64::from(near.score) - expected).abs() < 1e-6, "{} {expected}", near.score);
        }
        assert_eq!(index.best("the CAT", 1), found[..1]);
        assert!(index.best("?! unicorn", 3).is_empty() && Bm25::new(&[]).best("cat", 3).is_empty());
    }
}
