//! `henson eval`: one file a task.

mod blimp;
mod diagnostics;
mod paraphrases;
mod perplexity;
mod predictions;
mod retrieval;

use std::path::Path;
use std::time::Instant;

use henson_checkpoint::CheckpointError;
use henson_infer::{InferError, Model, Scoring, Want};
use henson_tensor::{DType, Device};

pub(crate) use blimp::{accuracy as blimp_accuracy, read as read_blimp};
pub(crate) use predictions::MISTAKES;

use crate::built_in::BuiltIn;
use crate::flags::eval::{Eval, Task};
use crate::flags::labelled::Labelled;
use crate::flags::{LengthFlags, ModelName};
use crate::{models, output};

pub(crate) fn run(flags: &Eval) -> anyhow::Result<()> {
    match flags.task {
        Some(Task::Perplexity) => perplexity::run(flags, model_of(flags)?),
        Some(Task::Blimp) => blimp::run(flags, model_of(flags)?),
        Some(Task::Diagnostics) => diagnostics::run(flags, model_of(flags)?),
        Some(Task::Retrieval) => {
            model_of(flags)?;
            retrieval::run(flags)
        }
        Some(Task::Paraphrases) => {
            model_of(flags)?;
            paraphrases::run(flags)
        }
        Some(Task::Labelled(task)) => predictions::run(flags, Some(task)),
        None => predictions::run(flags, None),
    }
}

/// The language model of the tasks that need one. Their files have no labels to read.
fn model_of(flags: &Eval) -> anyhow::Result<&ModelName> {
    let no_labels = flags.labelled == Labelled::default();
    anyhow::ensure!(no_labels, "flags for labelled files (--text-column, --skip-bad, …) do not apply to this task");
    let LengthFlags { max_length, windows } = flags.length;
    let only_texts = max_length.is_none() && windows.is_none() && flags.mistakes.is_none() && flags.threshold.is_none();
    anyhow::ensure!(only_texts, "--max-length, --windows, --mistakes and --threshold do not apply to this task");
    anyhow::ensure!(flags.predictions.is_none(), "--predictions does not apply to this task: it measures a --model");
    Ok(&flags.model)
}

/// A language model, and how it is to score texts.
struct Scorer {
    model: Model,
    scoring: Scoring,
}

impl Scorer {
    fn of_flags(flags: &Eval, model: &ModelName) -> anyhow::Result<Self> {
        let device = flags.compute.device()?;
        let path = models::find(model, BuiltIn::General)?;
        Self::open(&path, &device, flags.compute.dtype(), flags.scoring)
    }

    fn open(path: &Path, device: &Device, dtype: DType, scoring: Option<Scoring>) -> anyhow::Result<Self> {
        let model = Model::open(path, device, dtype, Want::MaskedLm).map_err(|error| {
            let misfit = matches!(error, InferError::Checkpoint(CheckpointError::DoesNotFit { .. }));
            let error = anyhow::Error::from(error);
            let hint = || output::needs_masked_lm("score", path);
            if misfit { error.context(hint()) } else { error }
        })?;
        let scoring = match (model.is_left_to_right(), scoring) {
            (true, None) => Scoring::LeftToRight,
            (true, Some(_)) => anyhow::bail!(
                "{} reads left to right (is_decoder in config.json) and masks nothing: leave --scoring out",
                path.display()
            ),
            (false, given) => given.unwrap_or(Scoring::Piece),
        };
        Ok(Self { model, scoring })
    }

    /// For scripts.
    fn name(&self) -> &'static str {
        match self.scoring {
            Scoring::Piece => "piece",
            Scoring::Word => "word",
            Scoring::LeftToRight => "left-to-right",
        }
    }

    /// For people.
    fn description(&self) -> &'static str {
        match self.scoring {
            Scoring::Piece => "pseudo-log-likelihood, each token masked in turn",
            Scoring::Word => "pseudo-log-likelihood, each token masked in turn with the rest of its word",
            Scoring::LeftToRight => "log-likelihood, left to right",
        }
    }
}

/// What is taken of a list: the first ones or some of all.
#[derive(Clone, Copy)]
struct Choice {
    limit: Option<usize>,
    /// How many there are, where those taken are to lie evenly among them.
    spread_over: Option<usize>,
}

impl Choice {
    fn takes(&self, index: usize) -> bool {
        match (self.limit, self.spread_over) {
            (None, _) => true,
            (Some(limit), None) => index < limit,
            (Some(limit), Some(total)) => limit >= total || (index + 1) * limit / total > index * limit / total,
        }
    }
}

/// Tokens that went through the model, and how long that took.
struct Speed {
    start: Instant,
    tokens: usize,
}

impl Speed {
    fn start() -> Self {
        Self { start: Instant::now(), tokens: 0 }
    }

    fn seconds(&self) -> f64 {
        self.start.elapsed().as_secs_f64()
    }

    fn per_second(&self) -> f64 {
        (self.tokens as f64 / self.seconds()).round()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_evenly_spaced() {
        let taken = |limit, spread_over, total| -> Vec<usize> {
            let choice = Choice { limit, spread_over };
            (0..total).filter(|i| choice.takes(*i)).collect()
        };
        assert_eq!(taken(None, None, 3), [0, 1, 2]);
        assert_eq!(taken(Some(2), None, 5), [0, 1]);
        assert_eq!(taken(Some(2), Some(6), 6), [2, 5]);
        assert_eq!(taken(Some(9), Some(3), 3), [0, 1, 2]);
        for (limit, total) in [(1, 1), (1, 1000), (7, 1000), (999, 1000), (1000, 1000)] {
            let taken = taken(Some(limit), Some(total), total);
            assert_eq!(taken.len(), limit);
            let gaps: Vec<usize> = taken.windows(2).map(|w| w[1] - w[0]).collect();
            assert!(gaps.iter().max() <= gaps.iter().min().map(|least| least + 1).as_ref(), "{limit} of {total}");
        }
    }
}
