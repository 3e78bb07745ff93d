//! chrF2 as sacreBLEU 2 computes it by default: F₂ of character n-grams up to 6, without white space, case kept.

use super::ngrams::{Counted, is_python_space};

/// The longest n-grams.
const ORDER: usize = 6;

/// β², how much more recall counts than precision.
const FACTOR: f64 = 4.0;

/// Bits of a character.
const BITS: usize = 21;

/// What chrF needs of all texts of a corpus, added up text by text.
#[derive(Debug, Default)]
pub struct Chrf {
    counts: [Order; ORDER],
}

/// n-grams of a length: those of the text, those of the reference, and those that both have.
#[derive(Clone, Copy, Debug, Default)]
struct Order {
    own: u64,
    reference: u64,
    shared: u64,
}

impl Chrf {
    /// Adds a text; of its references, the one counts to which it is closest. Gives the score of this text alone.
    pub fn add<S: AsRef<str>>(&mut self, text: &str, references: &[S]) -> f64 {
        let own = ngrams(text);
        let mut best: Option<(f64, [Order; ORDER])> = None;
        for reference in references {
            let reference = ngrams(reference.as_ref());
            let mut counts = [Order::default(); ORDER];
            for ((order, own), reference) in counts.iter_mut().zip(&own).zip(&reference) {
                let total = reference.total();
                // Of lengths that the reference has not got, nothing counts.
                let own_total = if total > 0 { own.total() } else { 0 };
                *order = Order { own: own_total, reference: total, shared: own.shared(reference) };
            }
            let score = f_score(&counts);
            if best.is_none_or(|(other, _)| score > other) {
                best = Some((score, counts));
            }
        }
        let (score, counts) = best.unwrap_or_default();
        for (sum, order) in self.counts.iter_mut().zip(counts) {
            sum.own += order.own;
            sum.reference += order.reference;
            sum.shared += order.shared;
        }
        score
    }

    /// The score of the corpus, from 0 to 100.
    pub fn score(&self) -> f64 {
        f_score(&self.counts)
    }
}

fn ngrams(text: &str) -> Vec<Counted> {
    let characters: Vec<u32> = text.chars().filter(|c| !is_python_space(*c)).map(u32::from).collect();
    (1..=ORDER).map(|n| Counted::new(&characters, n, BITS)).collect()
}

/// Of the mean precision and the mean recall over the lengths that both have.
fn f_score(counts: &[Order; ORDER]) -> f64 {
    let (mut precision, mut recall, mut orders) = (0.0, 0.0, 0.0);
    for Order { own, reference, shared } in counts.iter().filter(|order| order.own > 0 && order.reference > 0) {
        precision += *shared as f64 / *own as f64;
        recall += *shared as f64 / *reference as f64;
        orders += 1.0;
    }
    if precision + recall == 0.0 {
        return 0.0;
    }
    let (precision, recall) = (precision / orders, recall / orders);
    100.0 * ((1.0 + FACTOR) * precision * recall / (FACTOR * precision + recall))
}
