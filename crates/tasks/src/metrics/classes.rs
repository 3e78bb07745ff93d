//! Scores of classes: one for each example, or several.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::{Counts, mean, share};

/// How often each class was taken for each. There may be many thousands of classes, so only pairs that occur are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Confusion {
    /// By the expected and the predicted class.
    pairs: BTreeMap<(u32, u32), u64>,
    /// Of each class.
    counts: Vec<Counts>,
}

impl Confusion {
    /// Counts pairs of an expected and a predicted class, all below `classes`.
    pub fn new(classes: usize, pairs: impl Iterator<Item = (u32, u32)>) -> Self {
        let mut result = Self { pairs: BTreeMap::new(), counts: vec![Counts::default(); classes] };
        for (expected, predicted) in pairs {
            *result.pairs.entry((expected, predicted)).or_default() += 1;
            result.counts[expected as usize].expected += 1;
            result.counts[predicted as usize].predicted += 1;
            result.counts[expected as usize].right += u64::from(expected == predicted);
        }
        result
    }

    /// How many classes there are.
    pub fn classes(&self) -> usize {
        self.counts.len()
    }

    /// How often `expected` was taken for `predicted`.
    pub fn count(&self, expected: usize, predicted: usize) -> u64 {
        self.pairs.get(&(expected as u32, predicted as u32)).copied().unwrap_or(0)
    }

    /// The most frequent mistakes, at most so many: expected class, predicted class, how often.
    pub fn mistakes(&self, most: usize) -> Vec<(usize, usize, u64)> {
        let wrong = self.pairs.iter().filter(|((expected, predicted), _)| expected != predicted);
        let mut wrong: Vec<(usize, usize, u64)> =
            wrong.map(|((expected, predicted), count)| (*expected as usize, *predicted as usize, *count)).collect();
        wrong.sort_by_key(|(expected, predicted, count)| (Reverse(*count), *expected, *predicted));
        wrong.truncate(most);
        wrong
    }

    /// What precision, recall and F1 of a class need.
    pub fn counts(&self, class: usize) -> Counts {
        self.counts[class]
    }

    /// The share of right predictions.
    pub fn accuracy(&self) -> f64 {
        let sum = |of: &dyn Fn(&Counts) -> u64| self.counts.iter().map(of).sum();
        share(sum(&|counts| counts.right), sum(&|counts| counts.expected))
    }

    /// The mean F1 of the classes that were expected or predicted at all.
    pub fn macro_f1(&self) -> f64 {
        let counts = self.counts.iter().copied();
        mean(counts.filter(|counts| counts.expected + counts.predicted > 0).map(Counts::f1))
    }

    /// Matthews' correlation, in its form for any number of classes; 0 where everything expected or predicted is one class.
    pub fn matthews(&self) -> f64 {
        let sum = |of: &dyn Fn(&Counts) -> f64| self.counts.iter().map(of).sum::<f64>();
        let right = sum(&|c| c.right as f64);
        let total = sum(&|c| c.expected as f64);
        let by_chance = sum(&|c| c.expected as f64 * c.predicted as f64);
        let spread = |of: &dyn Fn(&Counts) -> f64| total * total - sum(&|c| of(c) * of(c));
        let (predicted, expected) = (spread(&|c| c.predicted as f64), spread(&|c| c.expected as f64));
        if predicted == 0.0 || expected == 0.0 {
            return 0.0;
        }
        (right * total - by_chance) / (predicted * expected).sqrt()
    }
}

/// Counts where each example has any number of classes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MultilabelCounts {
    /// Of each class.
    pub classes: Vec<Counts>,
    /// Examples whose classes are exactly those predicted.
    pub exact: u64,
    /// All examples.
    pub examples: u64,
}

impl MultilabelCounts {
    /// Counts pairs of expected and predicted classes, each in ascending order and below `classes`.
    pub fn new<'c>(classes: usize, pairs: impl Iterator<Item = (&'c [u32], &'c [u32])>) -> Self {
        let mut result = Self { classes: vec![Counts::default(); classes], exact: 0, examples: 0 };
        for (expected, predicted) in pairs {
            result.examples += 1;
            result.exact += u64::from(expected == predicted);
            for &class in expected {
                result.classes[class as usize].expected += 1;
                result.classes[class as usize].right += u64::from(predicted.contains(&class));
            }
            for &class in predicted {
                result.classes[class as usize].predicted += 1;
            }
        }
        result
    }

    /// The share of examples with exactly the right classes.
    pub fn accuracy(&self) -> f64 {
        share(self.exact, self.examples)
    }

    /// F1 over all decisions together.
    pub fn micro_f1(&self) -> f64 {
        let mut all = Counts::default();
        self.classes.iter().for_each(|counts| all += *counts);
        all.f1()
    }

    /// The mean F1 of all classes, those that never occur among them.
    pub fn macro_f1(&self) -> f64 {
        mean(self.classes.iter().map(|counts| counts.f1()))
    }
}
