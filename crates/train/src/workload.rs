//! What a recipe asks of the machines that run it: the model's size, the steps and their batches, the memory of a process. Nothing is
//! computed, and the data need not be there.

use std::path::PathBuf;

use henson_data::{Objective, Packing};
use henson_models::{Family, ModelConfig};
use henson_tensor::{Builder, DType, Method};

use crate::cost::{Footprint, TokenCounts};
use crate::error::{Result, TrainError};
use crate::pretraining::{Start, build, check_length, checked_head, generator_of, overridden};
use crate::recipe::{Recipe, ResolvedPhase};
use crate::together::check_parts;

/// A recipe's demands.
#[derive(Clone, Debug)]
pub struct Workload {
    /// The model.
    pub config: ModelConfig,
    /// The run's phases.
    pub phases: Vec<ResolvedPhase>,
    /// What passes compute in.
    pub dtype: DType,
    method: Method,
    recompute: bool,
    footprint: Footprint,
    generator_footprint: Option<Footprint>,
}

/// Which process of how many, on what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rank {
    /// How many there are.
    pub ranks: usize,
    /// Whether it is the first, which writes checkpoints.
    pub is_first: bool,
}

impl Workload {
    pub(crate) fn new(
        recipe: &Recipe,
        config: &ModelConfig,
        generator: Option<&ModelConfig>,
        phases: &[ResolvedPhase],
    ) -> Result<Self> {
        let head = checked_head(recipe.objective, config)?;
        phases.iter().try_for_each(|phase| check_length(phase, config))?;
        let mut builder = Builder::new();
        let model = build(&mut builder, config, generator, head)?;
        Ok(Self {
            config: config.clone(),
            phases: phases.to_vec(),
            dtype: recipe.dtype.into(),
            method: recipe.optimizer().method,
            recompute: recipe.recompute,
            footprint: Footprint::new(&model, builder.entries()),
            generator_footprint: model.generator().map(|generator| Footprint::new(generator, &[])),
        })
    }

    /// Of a recipe without its data: the vocabulary is that of the model's size or directory, and the length of the run must be given in
    /// steps.
    pub fn without_data(mut recipe: Recipe) -> Result<Self> {
        recipe.resolve_tables();
        let (config, start) = match Family::config_of_size(&recipe.model) {
            Ok(config) => (config, None),
            Err(error) => {
                let path = PathBuf::from(&recipe.model);
                if !path.exists() {
                    let expected = format!("a directory, or a size ({error})");
                    return Err(TrainError::setting("model", &recipe.model, expected));
                }
                let start = Start::open(path, recipe.objective)?;
                (start.config.clone(), Some(start))
            }
        };
        if recipe.packing == Packing::Stream {
            let expected = "another: states are carried by one process alone so far";
            return Err(TrainError::setting("packing", "stream", expected));
        }
        let mut config = overridden(config, &recipe)?;
        config.set_causal(recipe.objective == Objective::Causal)?;
        let generator = generator_of(&config, &recipe, start.as_ref())?;
        let phases = recipe.resolve(|epochs| {
            let expected = "the data, to count an epoch's instances: --data DIR; or a number of `steps` instead";
            Err(TrainError::setting("epochs", epochs, expected))
        })?;
        Self::new(&recipe, &config, generator.as_ref(), &phases)
    }

    /// Numbers of the model.
    pub fn parameters(&self) -> usize {
        self.footprint.parameters()
    }

    /// Updates in all.
    pub fn steps(&self) -> u64 {
        self.phases.iter().map(|phase| phase.steps).sum()
    }

    /// In how many parts so many ranks compute a batch: what the recipe says, or as many as there are; an error where they cannot
    /// share it.
    pub fn parts(phase: &ResolvedPhase, ranks: usize) -> Result<usize> {
        if phase.accumulation > 1 && ranks > 1 {
            return check_parts(phase.accumulation, ranks).map(|()| phase.accumulation);
        }
        if phase.batch_size.is_multiple_of(ranks) {
            return Ok(phase.accumulation.max(ranks));
        }
        let expected = format!("a multiple of {ranks}, to be divided evenly among {ranks} ranks");
        Err(TrainError::setting("batch_size", phase.batch_size, expected))
    }

    /// Bytes that a process takes, about, in the largest part of any step.
    pub fn memory(&self, rank: Rank) -> u64 {
        let of_phase = |phase: &ResolvedPhase| {
            let parts = if phase.accumulation > 1 { phase.accumulation } else { rank.ranks };
            self.of_part(phase, parts) + self.of_parameters(parts, rank)
        };
        self.phases.iter().map(of_phase).max().unwrap_or(0)
    }

    /// What a part of a batch keeps for the backward pass.
    fn of_part(&self, phase: &ResolvedPhase, parts: usize) -> u64 {
        let counts = token_counts(phase, parts);
        let step = |footprint: &Footprint, counts| footprint.step(counts, self.dtype, self.recompute);
        match &self.generator_footprint {
            // Both keep what they need; only the generator has logits of the vocabulary.
            Some(generator) => step(&self.footprint, TokenCounts { predicted: 0, ..counts }) + step(generator, counts),
            None => step(&self.footprint, counts),
        }
    }

    /// Weights, gradients, what the optimizer keeps, and room for what is received.
    fn of_parameters(&self, parts: usize, Rank { ranks, is_first }: Rank) -> u64 {
        let (all, state) = (self.parameters() as u64, self.footprint.state(self.method));
        // Gradients of parts that wait to be added.
        let waiting = u64::from((parts / ranks).max(1).next_power_of_two().ilog2());
        let numbers = (2 + waiting) * all + state.div_ceil(ranks as u64);
        let received = all - all / ranks as u64;
        // The moments of all, while a checkpoint is written.
        let collected = if ranks > 1 && is_first { state } else { 0 };
        4 * (numbers + received + collected) + self.footprint.copy(self.dtype)
    }
}

/// Tokens of a part of a step, at most.
fn token_counts(phase: &ResolvedPhase, parts: usize) -> TokenCounts {
    let instances = &phase.instances;
    let sequences = phase.batch_size / parts;
    let (sources, targets) = (sequences * instances.sequence_length, sequences * instances.longest_target());
    let masked = (sources as f64 * instances.mask_probability) as usize;
    let (sources, predicted) = match instances.objective {
        // What is predicted stands in the batch once more.
        Objective::Permutation => (sources + masked, masked),
        // One row for each direction.
        Objective::Bidirectional => (2 * sources, 2 * sources),
        objective if objective.masks() => (sources, masked),
        _ if targets > 0 => (sources, targets),
        _ => (sources, sources),
    };
    TokenCounts { sources, targets, predicted }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workload(sets: &[&str]) -> Workload {
        let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
        Workload::without_data(Recipe::parse("model = \"bert-base\"", "here", &sets).unwrap()).unwrap()
    }

    #[test]
    fn moments_are_shared_and_the_first_collects_them() {
        let own = workload(&["steps=10", "batch_size=64", "sequence_length=128"]);
        let n = 110_106_428u64;
        assert_eq!((own.parameters() as u64, own.steps()), (n, 10));
        let rank = |ranks, is_first| own.memory(Rank { ranks, is_first });
        // What a part of 64/R sequences keeps: 12 layers of 8·768 + 2·3072 numbers a token, 2·768, 3·3072 at work, and logits of 15%.
        let part = |ranks: u64| {
            let tokens = 64 / ranks * 128;
            let kept = tokens * (12 * (8 * 768 + 2 * 3072) + 2 * 768 + 3 * 3072);
            4 * (kept + (tokens as f64 * 0.15) as u64 * 30522)
        };
        // Weights, gradients and two moments.
        assert_eq!(rank(1, true), 16 * n + part(1));
        // Half of the moments, and the other's gradients of the own half.
        assert_eq!(rank(2, false), 8 * n + 4 * n + 2 * n + part(2));
        assert_eq!(rank(2, true), 8 * n + 4 * n + 2 * n + part(2) + 8 * n);
        let half = workload(&["steps=10", "batch_size=64", "sequence_length=128", "dtype=\"bf16\""]);
        let (whole, copy) = (rank(1, true) - part(1), 2 * n);
        assert_eq!(half.memory(Rank { ranks: 1, is_first: true }), whole + copy + part(1) / 2);
        // Two of four parts each: gradients of one wait.
        let four = workload(&["steps=10", "batch_size=64", "sequence_length=128", "accumulation=4"]);
        assert_eq!(four.memory(Rank { ranks: 2, is_first: false }), 18 * n + part(4));
    }

    #[test]
    fn a_batch_is_shared_evenly_or_not_at_all() {
        let parts = |sets: &[&str], ranks| Workload::parts(&workload(sets).phases[0], ranks).map_err(|e| e.to_string());
        let own = ["steps=1", "batch_size=48"];
        assert_eq!((parts(&own, 16), parts(&own, 3)), (Ok(16), Ok(3)));
        assert!(parts(&own, 32).unwrap_err().contains("a multiple of 32"));
        let set = ["steps=1", "batch_size=48", "accumulation=12"];
        assert_eq!((parts(&set, 6), parts(&set, 1)), (Ok(12), Ok(12)));
        assert!(parts(&set, 4).unwrap_err().contains("3, 6, 12 ranks"));
    }

    #[test]
    fn an_epoch_needs_data() {
        let recipe = Recipe::parse("model = \"bert-tiny\"\nepochs = 2.0", "here", &[]).unwrap();
        let error = Workload::without_data(recipe).unwrap_err().to_string();
        assert!(error.contains("--data DIR") && error.contains("steps"), "{error}");
    }
}
