//! Scores of entities: one is right where its words and its kind are.
//!
//! Tags are read as conlleval and seqeval's default do; see `henson_text::TagSet`. On well-formed tags every reading is the same.
//! On others this one makes an entity of an `I-` without a `B-` before it, where seqeval's strict mode makes none.

use std::collections::BTreeMap;
use std::ops::Range;

use henson_text::TagSet;

use super::{Counts, mean, share};

/// Counts of entities and of words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EntityCounts {
    /// Of each kind that was expected or predicted.
    pub kinds: BTreeMap<String, Counts>,
    /// Words with the right tag.
    pub right_words: u64,
    /// All words.
    pub words: u64,
    tags: TagSet,
}

impl EntityCounts {
    /// Nothing counted yet.
    pub fn new(tags: TagSet) -> Self {
        Self { kinds: BTreeMap::new(), right_words: 0, words: 0, tags }
    }

    /// Counts a sentence; gives its entities, those expected and those predicted. Where words alone have tags, there are
    /// none.
    pub fn add<'t>(&mut self, expected: &[&'t str], predicted: &[&'t str]) -> [Vec<(Range<usize>, &'t str)>; 2] {
        self.words += expected.len() as u64;
        self.right_words += expected.iter().zip(predicted).filter(|(a, b)| a == b).count() as u64;
        if self.tags == TagSet::Words {
            return [Vec::new(), Vec::new()];
        }
        let entities = |tags: &[&'t str]| self.tags.entities(&tags.iter().map(|tag| Some(*tag)).collect::<Vec<_>>());
        let (expected, predicted) = (entities(expected), entities(predicted));
        for (_, kind) in &predicted {
            self.of_kind(kind).predicted += 1;
        }
        for entity in &expected {
            let counts = self.of_kind(entity.1);
            counts.expected += 1;
            // A word is in one entity at most, so that no two can be the same.
            counts.right += u64::from(
                predicted.binary_search_by_key(&entity.0.start, |p| p.0.start).is_ok_and(|i| predicted[i] == *entity),
            );
        }
        [expected, predicted]
    }

    fn of_kind(&mut self, kind: &str) -> &mut Counts {
        if !self.kinds.contains_key(kind) {
            self.kinds.insert(kind.to_owned(), Counts::default());
        }
        self.kinds.entry(kind.to_owned()).or_default()
    }

    /// All kinds together.
    pub fn overall(&self) -> Counts {
        let mut all = Counts::default();
        self.kinds.values().for_each(|counts| all += *counts);
        all
    }

    /// The mean F1 of the kinds.
    pub fn macro_f1(&self) -> f64 {
        mean(self.kinds.values().map(|counts| counts.f1()))
    }

    /// The share of words with the right tag.
    pub fn accuracy(&self) -> f64 {
        share(self.right_words, self.words)
    }
}
