//! What a step's losses are: any set of named parts, whose sum is trained.

use henson_tensor::Reading;

use crate::error::Result;

/// The names of an objective's losses, in the order in which it gives them: keys of the log, so each ends in `_loss`. A loss
/// without parts has no names.
pub type LossNames = &'static [&'static str];

/// What each loss was multiplied with, in the order of their names. What is trained is the sum of all; the log shows each without.
pub type LossWeights = [f64; Reading::MOST];

/// Losses that are trained as they are.
pub const EQUAL: LossWeights = [1.0; Reading::MOST];

/// The losses of a step, or their sums over some steps. Holds them in place, so that a step allocates nothing for them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Losses {
    /// What is trained: the sum of all parts.
    pub total: f64,
    names: LossNames,
    parts: [f64; Reading::MOST],
}

impl Losses {
    /// The sums of what the parts of a batch gave; waits for them.
    pub(crate) fn wait(names: LossNames, weights: &LossWeights, batch: Vec<Reading>) -> Result<Self> {
        let mut losses = Self { names, ..Self::default() };
        for reading in batch {
            let numbers = reading.wait()?;
            debug_assert!(names.is_empty() || names.len() == numbers.len(), "{names:?}: {numbers:?}");
            losses.parts.iter_mut().zip(numbers).for_each(|(sum, number)| *sum += number);
        }
        losses.total = losses.parts.iter().sum();
        losses.parts.iter_mut().zip(weights).for_each(|(part, weight)| *part /= weight);
        Ok(losses)
    }

    /// Adds those of another step.
    pub(crate) fn add(&mut self, other: &Self) {
        self.total += other.total;
        self.names = other.names;
        self.parts.iter_mut().zip(other.parts).for_each(|(sum, part)| *sum += part);
    }

    /// The parts by name, each divided by a number of steps.
    pub fn named(&self, steps: f64) -> Vec<(String, f64)> {
        self.names.iter().zip(self.parts).map(|(name, part)| ((*name).to_owned(), part / steps)).collect()
    }
}
