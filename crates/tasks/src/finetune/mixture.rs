//! Several data sets in one run, each with its own files, loss and share of the batches, as sentence-transformers trains on several.
//!
//! A batch comes from one set. Which one, and which of its rows, is a function of the seed and the step, so that a run can resume
//! anywhere. There are two ways to mix: in proportion to the sets' sizes, or in turn.

use std::ops::Range;

use henson_kernels::philox::Stream;
use henson_train::{TrainError, check_ranges};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::recipe::FineTuneRecipe;
use crate::error::TaskError;
use crate::example::Set;
use crate::ranking::RankLoss;
use crate::read::{Files, Paths, Reading};
use crate::sentences::{Distance, SentenceLoss};
use crate::task::Task;

/// Numbers the stream that orders the batches of several sets among all uses of the seed.
const MIXING: u32 = 0x3149;

/// How batches of several data sets follow each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Mixing {
    /// In an epoch every set is gone through once, its batches at random places (ProportionalBatchSampler).
    #[default]
    Proportional,
    /// A batch of each set in turn; an epoch ends with the smallest set (RoundRobinBatchSampler).
    RoundRobin,
}

/// A data set among several: what differs from the settings of the recipe.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DataSet {
    /// The file to train on, or a list of several.
    pub train: Paths,
    /// `embed`: what is learned from it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss: Option<SentenceLoss>,
    /// `rerank`: what is learned from it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank_loss: Option<RankLoss>,
    /// Factor on its batches in an epoch: with 0.5 half of it is seen, with 2 all of it twice.
    pub weight: f64,
    /// Examples per update from this set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch_size: Option<usize>,
    /// Train on this many examples of it, evenly spaced.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<usize>,
    /// What cosines are divided by.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f64>,
    /// Whether second texts also choose among first ones.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub symmetric: Option<bool>,
    /// By how much texts shall be apart.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub margin: Option<f64>,
    /// How vectors are compared.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub distance: Option<Distance>,
    /// Lowest score of a row to learn from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_score: Option<f64>,
    /// Encode the parts of its batches twice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cached_gradients: Option<bool>,
    /// How its files are written.
    #[serde(skip_serializing_if = "Files::is_usual")]
    pub files: Files,
}

impl Default for DataSet {
    fn default() -> Self {
        Self {
            train: Paths::default(),
            loss: None,
            rank_loss: None,
            weight: 1.0,
            batch_size: None,
            limit: None,
            temperature: None,
            symmetric: None,
            margin: None,
            distance: None,
            min_score: None,
            cached_gradients: None,
            files: Files::default(),
        }
    }
}

impl DataSet {
    /// The recipe that this set alone would have.
    fn alone(&self, recipe: &FineTuneRecipe) -> FineTuneRecipe {
        FineTuneRecipe {
            train: self.train.clone(),
            loss: self.loss.or(recipe.loss),
            rank_loss: self.rank_loss.unwrap_or(recipe.rank_loss),
            batch_size: self.batch_size.unwrap_or(recipe.batch_size),
            limit: self.limit.or(recipe.limit),
            temperature: self.temperature.unwrap_or(recipe.temperature),
            symmetric: self.symmetric.unwrap_or(recipe.symmetric),
            margin: self.margin.or(recipe.margin),
            distance: self.distance.or(recipe.distance),
            min_score: self.min_score.or(recipe.min_score),
            cached_gradients: self.cached_gradients.unwrap_or(recipe.cached_gradients),
            files: recipe.files.clone().overruled_by(self.files.clone()),
            datasets: Vec::new(),
            ..recipe.clone()
        }
    }
}

/// A data set of a plan.
#[derive(Clone, Debug)]
pub(crate) struct Member {
    /// The recipe that it alone would have.
    pub(super) recipe: FineTuneRecipe,
    pub(super) set: Set,
    /// Those of the plan's instances that are its own.
    pub(super) instances: Range<usize>,
}

/// Reads the data sets of a recipe; none where it has a single file.
pub(super) fn read(recipe: &mut FineTuneRecipe, task: &'static Task) -> Result<Vec<Member>, TaskError> {
    if recipe.datasets.is_empty() {
        return Ok(Vec::new());
    }
    if !task.form.learns_on_host {
        let expected = "none: several data sets with losses of their own are for the tasks embed and rerank";
        return Err(TrainError::setting("datasets", recipe.datasets.len(), expected).into());
    }
    if !recipe.train.is_empty() {
        let expected = "nothing, since `datasets` name the files to train on";
        return Err(TrainError::setting("train", &recipe.train, expected).into());
    }
    for (key, rows) in [("dev_rows", recipe.dev_rows), ("folds", recipe.folds)] {
        if rows > 0 {
            let expected = "0 with `datasets`: give a dev file, or `dev = \"none\"`";
            return Err(TrainError::setting(key, rows, expected).into());
        }
    }
    if recipe.dev.is_empty() {
        recipe.estimate_by(Some(0));
    }
    // One model has one way to give vectors.
    if recipe.normalize.is_none() {
        let losses = recipe.datasets.iter().map(|set| set.loss.or(recipe.loss));
        let usual = losses.into_iter().all(|loss| loss.is_none_or(SentenceLoss::usually_normalised));
        recipe.normalize = (task.name == "embed").then_some(usual);
    }
    let mut members = Vec::with_capacity(recipe.datasets.len());
    for (number, own) in recipe.datasets.iter().enumerate() {
        if own.train.is_empty() {
            let expected = format!("the name of a file to train on, or a list of names, in set {}", number + 1);
            return Err(TrainError::setting("datasets.N.train", "empty", expected).into());
        }
        check_ranges(&[("datasets.weight", own.weight, 1e-6, 1e6)])?;
        let alone = own.alone(recipe);
        alone.check()?;
        let reading = Reading { files: alone.files.clone(), loss: alone.loss, ..Reading::new(task) };
        let set = alone.train.read(&reading)?;
        members.push(Member { recipe: alone, set, instances: 0..0 });
    }
    Ok(members)
}

/// The sets as one, for what is the same for all of them.
pub(super) fn joined(members: &[Member], task: &'static Task) -> Set {
    let mut joined = Set::new(task, Vec::new(), Vec::new());
    joined.path = members.iter().map(|member| member.recipe.train.to_string()).collect::<Vec<_>>().join(", ").into();
    for Member { set, .. } in members {
        joined.examples.extend(set.examples.iter().cloned());
        joined.skipped += set.skipped;
        joined.undecided += set.undecided;
        joined.problems.extend(set.problems.iter().cloned());
    }
    joined
}

/// In which order the batches of several sets are learned from.
#[derive(Clone, Debug)]
pub struct Mixture {
    mixing: Mixing,
    seed: u64,
    /// For each set: its batches, and how many of an epoch are its own.
    shares: Vec<(u64, u64)>,
    /// The order of an epoch.
    order: Option<(u64, Vec<u16>)>,
}

impl Mixture {
    /// Of sets with so many batches and factors on them.
    pub(super) fn new(mixing: Mixing, seed: u64, sets: &[(u64, f64)]) -> Self {
        let least = sets.iter().map(|(batches, _)| *batches).min().unwrap_or(0);
        let share = |(batches, weight): &(u64, f64)| {
            let counted = if mixing == Mixing::RoundRobin { least } else { *batches };
            (*batches, ((counted as f64 * weight).round() as u64).max(1))
        };
        Self { mixing, seed, shares: sets.iter().map(share).collect(), order: None }
    }

    /// Batches of an epoch.
    pub(super) fn steps_per_epoch(&self) -> u64 {
        self.shares.iter().map(|(_, share)| share).sum::<u64>().max(1)
    }

    /// The set that a step learns from, and which of its own steps that is.
    pub(super) fn at(&mut self, step: u64) -> (usize, u64) {
        let steps = self.steps_per_epoch();
        let (epoch, place) = (step / steps, (step % steps) as usize);
        if self.order.as_ref().is_none_or(|(of, _)| *of != epoch) {
            self.order = Some((epoch, self.order_of(epoch)));
        }
        let order = self.order.as_ref().map(|(_, order)| order.as_slice()).unwrap_or_default();
        let set = order.get(place).copied().unwrap_or(0);
        let before = order[..place].iter().filter(|other| **other == set).count() as u64;
        let share = self.shares.get(usize::from(set)).map_or(1, |(_, share)| *share);
        (usize::from(set), epoch * share + before)
    }

    fn order_of(&self, epoch: u64) -> Vec<u16> {
        let sets = 0..self.shares.len() as u16;
        let share = |set: &u16| self.shares[usize::from(*set)].1;
        if self.mixing == Mixing::RoundRobin {
            let most = sets.clone().map(|set| share(&set)).max().unwrap_or(0);
            return (0..most).flat_map(|turn| sets.clone().filter(move |set| turn < share(set))).collect();
        }
        let mut order: Vec<u16> = sets.flat_map(|set| std::iter::repeat_n(set, share(&set) as usize)).collect();
        let mut draws = Stream::new(self.seed, MIXING, epoch);
        for i in (1..order.len()).rev() {
            order.swap(i, draws.below(i as u32 + 1) as usize);
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The batches of some epochs: the set, and its own step.
    fn steps(mixing: Mixing, sets: &[(u64, f64)], epochs: u64) -> Vec<(usize, u64)> {
        let mut mixture = Mixture::new(mixing, 3, sets);
        let all: Vec<(usize, u64)> = (0..epochs * mixture.steps_per_epoch()).map(|step| mixture.at(step)).collect();
        // Wherever a run resumes, it finds its place.
        for step in [all.len() as u64 - 1, 0, all.len() as u64 / 2] {
            assert_eq!(Mixture::new(mixing, 3, sets).at(step), all[step as usize]);
        }
        all
    }

    #[test]
    fn every_batch_of_every_set_comes_once_an_epoch() {
        let all = steps(Mixing::Proportional, &[(5, 1.0), (2, 1.0), (1, 1.0)], 2);
        assert_eq!(all.len(), 16);
        for (set, batches) in [(0, 10), (1, 4), (2, 2)] {
            let own: Vec<u64> = all.iter().filter(|(of, _)| *of == set).map(|(_, step)| *step).collect();
            assert_eq!(own, (0..batches).collect::<Vec<u64>>(), "in their own order");
        }
        let sets = |epoch: &[(usize, u64)]| epoch.iter().map(|(set, _)| *set).collect::<Vec<_>>();
        assert_ne!(sets(&all[..8]), sets(&all[8..]), "another order in each epoch");
    }

    #[test]
    fn in_turn_until_the_smallest_ends() {
        let all = steps(Mixing::RoundRobin, &[(5, 1.0), (2, 1.0)], 2);
        assert_eq!(all, [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2), (0, 3), (1, 3)]);
    }

    #[test]
    fn weights_are_factors_on_batches() {
        let count =
            |mixing, sets: &[(u64, f64)], set| steps(mixing, sets, 1).iter().filter(|(of, _)| *of == set).count();
        let sets = [(10, 0.5), (2, 2.0), (1, 0.01)];
        assert_eq!([0, 1, 2].map(|set| count(Mixing::Proportional, &sets, set)), [5, 4, 1]);
        let sets = [(10, 2.0), (2, 1.0)];
        assert_eq!([0, 1].map(|set| count(Mixing::RoundRobin, &sets, set)), [4, 2]);
    }
}
