//! Fine-tuning in the directory of a run: one life of it for each fold and one for the model, and what is said of them in the
//! end, in results and a model card.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use henson_checkpoint::read_json;
use henson_ranks::Ranks;
use henson_tensor::Device;
use henson_train::{Engine, Event, Keep, LoopSettings, Outcome, TrainError, TrainingRun, Watch};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::card;
use super::learner::{Found, Learner, chosen_by};
use super::linear::LinearModel;
use super::plan::Plan;
use crate::error::TaskError;
use crate::score::Mistake;

/// What a run gave, the last file of a finished one.
pub(crate) const RESULTS: &str = "results.json";

/// The largest results.json that is read. It grows with the number of labels, and in version 0.1 with its square.
const RESULTS_LIMIT: u64 = 64 << 20;

/// Where the runs of folds are, within that of the run.
pub(super) const FOLDS: &str = "folds";

/// Where a phase on texts without labels runs, within the directory of the run.
pub(super) const DISTILLED: &str = "distilled";

/// What stays of a fold.
const BOOKS: [&str; 5] = ["run.lock", "recipe.toml", "metrics.jsonl", RESULTS, "report.html"];

/// The fewest updates between checkpoints that nothing is chosen from. One takes as long as some updates on few rows.
pub(crate) const UNCHOSEN_CHECKPOINTS: u64 = 200;

/// What a finished run gave.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Results {
    /// The task.
    pub task: String,
    /// The score that the best model was chosen by.
    pub metric: String,
    /// Its value on the dev data; none without such data, and where it is not a number.
    pub value: Option<f64>,
    /// All scores on the dev data.
    pub scores: Map<String, Value>,
    /// After how many updates the model was best.
    pub best_step: u64,
    /// Updates made.
    pub steps: u64,
    /// Whether it ended before its last step, because the score no longer improved.
    pub stopped_early: bool,
    /// Why the model is no better than none, if so.
    pub degenerate: Option<String>,
    /// The seed.
    pub seed: u64,
    /// Examples trained on.
    pub train_examples: usize,
    /// Seconds of training, without evaluations.
    pub seconds: f64,
    /// Tokens read in training.
    pub tokens: u64,
    /// Names the data.
    pub data: String,
    /// Rows of the training file that were held out, where the dev data is a part of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dev_rows: Option<usize>,
    /// What a linear head on the frozen model gave, where one was fitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub linear_head: Option<LinearScore>,
    /// What the folds gave, where they estimate the score: `value` and `scores` are then their means.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub folds: Option<FoldScores>,
    /// Mistakes on the dev data or in the folds, the worst first. They quote the files, so they are never saved: none where the
    /// run was finished before.
    #[serde(skip)]
    pub mistakes: Option<Vec<Mistake>>,
}

/// How good models were that were trained like this one, each without a part of the rows and scored on it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FoldScores {
    /// The score of each fold; none where it is not a number.
    pub values: Vec<Option<f64>>,
    /// Their mean.
    pub mean: Option<f64>,
    /// Their standard deviation, of a sample.
    pub standard_deviation: Option<f64>,
}

/// A linear head on the frozen model, beside the fine-tuned one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LinearScore {
    /// Whether it scored better, and so is the model.
    pub kept: bool,
    /// Its score on the dev data, or the mean of the folds; none where it is not a number.
    pub value: Option<f64>,
    /// That of the fine-tuned model.
    pub fine_tuned: Option<f64>,
    /// All its scores.
    pub scores: Map<String, Value>,
    /// Why it is no better than none, if so.
    pub degenerate: Option<String>,
}

/// How a run ended. One that did not finish has a checkpoint, and the same call resumes it.
#[derive(Debug)]
pub enum Ended {
    /// The model is there.
    Finished(Box<Results>),
    /// The same on a rank that is not the first of several: that one has the results.
    FinishedElsewhere,
    /// Stopped from outside at this step, be it by way of another rank.
    Interrupted(u64),
    /// The step that it was to stop at is reached.
    Paused(u64),
}

/// What the first of several ranks says.
pub(super) fn first_says(ranks: Option<&Ranks>, yes: bool) -> bool {
    ranks.map_or(yes, |ranks| ranks.from_first(&[u8::from(yes)]) == [1])
}

/// Fine-tunes in a directory, from its newest checkpoint on, and leaves the best model there. Where folds estimate its score,
/// they run first, each in a directory of its own below `folds`.
pub fn finetune(
    plan: &Plan,
    device: &Device,
    out: &Path,
    stop_at: Option<u64>,
    watch: &mut Watch<'_>,
) -> Result<Ended, TaskError> {
    for phase in plan.first_phase().into_iter().chain([plan]) {
        phase.check_ranks(plan.ranks.as_ref(), device)?;
    }
    live(plan, &plan.ranks, device, out, stop_at, watch)
}

/// The life of one phase.
fn live(
    plan: &Plan,
    ranks: &Option<Arc<Ranks>>,
    device: &Device,
    out: &Path,
    stop_at: Option<u64>,
    watch: &mut Watch<'_>,
) -> Result<Ended, TaskError> {
    let mut run = TrainingRun::open_with(out, &plan.recipe, loop_settings(plan, stop_at), ranks.clone())?;
    let finished = if run.is_first() { finished(plan.data_name(), out)? } else { None };
    if first_says(ranks.as_deref(), finished.is_some()) && !run.is_first() {
        return Ok(Ended::FinishedElsewhere);
    }
    if let Some(results) = finished {
        // Killed while they were deleted, some are still there.
        run.delete_checkpoints()?;
        return Ok(Ended::Finished(Box::new(results)));
    }
    run.find(plan.data_name(), device, watch)?;
    // Made before anything is written, so that a model that cannot be used leaves nothing behind.
    let mut engine = plan.engine(device)?;
    engine.join(ranks.clone())?;
    run.write_recipe(&plan.recipe)?;
    let mut folds = Vec::new();
    if plan.has_folds() {
        // One model in memory at a time.
        drop(engine);
        folds = match run_folds(plan, device, out, watch)? {
            Folds::Finished(folds) => folds,
            Folds::Stopped(ended) => return Ok(ended),
        };
        engine = plan.engine(device)?;
    }
    if let Some(first) = plan.first_phase() {
        drop(engine);
        let directory = out.join(DISTILLED);
        (watch.on)(Event::Part { name: "distillation on texts without labels", steps: first.steps() });
        let ended = live(first, ranks, device, &directory, stop_at, watch)?;
        if matches!(ended, Ended::Interrupted(_) | Ended::Paused(_)) {
            return Ok(ended);
        }
        (watch.on)(Event::Part { name: "fine-tuning", steps: plan.steps() });
        // Other ranks have no such directory; they get the weights of the first when the run is resumed.
        engine = if run.is_first() { plan.engine_from(device, Some(&directory))? } else { plan.engine(device)? };
        engine.join(ranks.clone())?;
    }
    let mut learner = plan.learner()?;
    // Each rank asks about examples of its own, and what a teacher says must not depend on who asks.
    engine.agree_on_products()?;
    match learner.ask_teachers(device, ranks.as_deref(), watch) {
        Err(TaskError::Stopped) => return Ok(Ended::Interrupted(run.state().step)),
        asked => asked?,
    }
    // Folds have said whether a linear head is better; dev data says it in the end.
    let linear_wins = linear_wins(&folds);
    let has_linear = plan.recipe.linear_head && (plan.dev.is_some() || linear_wins);
    let linear = has_linear.then(|| Linear::new(plan, device, &learner)).transpose()?;
    if !linear_wins {
        if !folds.is_empty() {
            (watch.on)(Event::Part { name: "all rows", steps: plan.steps() });
        }
        run.resume(&mut engine, watch)?;
        match run.train(&mut engine, &mut learner, &plan.model_files()?, watch)? {
            Outcome::Interrupted => return Ok(Ended::Interrupted(run.state().step)),
            Outcome::Paused => return Ok(Ended::Paused(run.state().step)),
            Outcome::Finished | Outcome::WasFinished => {}
        }
        if !run.is_first() {
            return Ok(Ended::FinishedElsewhere);
        }
        let averaged = plan.recipe.average_checkpoints;
        if averaged > 1 {
            average(&run, &mut engine, averaged)?;
            learner.look(&engine, run.state().step, None)?;
        }
        // What the model says that the run ends with; the other ranks are done.
        if averaged <= 1 && learner.found.as_ref().is_none_or(|found| found.step != run.best_step()) {
            learner.look(&engine, run.best_step(), None)?;
        }
    }
    let mut results = results(plan, &run, learner.found.as_ref(), &folds);
    if plan.recipe.linear_head {
        compare(plan, linear.as_ref(), &mut results, &folds);
    }
    let mut model = plan.model_files()?;
    if plan.config.task.no_answer_threshold.is_some() {
        let threshold = learner.found.as_ref().and_then(|found| found.score.get("best_f1_threshold"));
        let mut config = plan.config.clone();
        config.task.no_answer_threshold = threshold.or(mean_of(&folds, "best_f1_threshold")).or(Some(0.0));
        model.config = config.to_json().map_err(TrainError::from)?;
    }
    let (mut parameters, mut found) = (&engine.parameters, learner.found.as_ref());
    if let Some(linear) = linear.as_ref().filter(|_| results.keeps_linear_head()) {
        model = linear.model.files(plan)?;
        (parameters, found) = (&linear.model.parameters, linear.found.as_ref());
    }
    let card = card::write(plan, &results, found.map(|found| &found.score));
    let json = serde_json::to_vec_pretty(&results)
        .map_err(|error| TrainError::State { path: out.join(RESULTS), problem: error.to_string() })?;
    run.finish(&model, parameters, &[("README.md", card.into_bytes()), (RESULTS, json)])?;
    Ok(Ended::Finished(Box::new(results)))
}

/// When the loop does what.
fn loop_settings(plan: &Plan, stop_at: Option<u64>) -> LoopSettings {
    let every = plan.eval_every();
    let chooses = plan.dev.is_some() && !plan.is_fold();
    LoopSettings {
        steps: plan.steps(),
        // Where no checkpoint is chosen, one is only there to resume from.
        checkpoint_every: if chooses { every } else { every.max(UNCHOSEN_CHECKPOINTS) },
        keep_checkpoints: plan.recipe.average_checkpoints.max(1),
        eval_every: if chooses { every } else { 0 },
        log_every: plan.recipe.log_every,
        log_samples: false,
        stop_at,
        higher_is_better: !plan.metric_is_error(),
        patience: plan.recipe.patience,
        keep: Keep::Best,
    }
}

/// Makes the mean of the last checkpoints the model; sums are f64, in the order of steps.
fn average(run: &TrainingRun, engine: &mut Engine, count: usize) -> Result<(), TaskError> {
    let Some(directory) = run.directory() else { return Ok(()) };
    let steps = directory.steps()?;
    let last = &steps[steps.len().saturating_sub(count)..];
    let mut sums: Vec<Vec<f64>> = Vec::new();
    for step in last {
        directory.load(*step, &mut engine.parameters, &mut engine.updater)?;
        for i in 0..engine.parameters.entries().len() {
            let values = engine.parameters.read(i).map_err(TrainError::from)?;
            match sums.get_mut(i) {
                Some(sum) => sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += f64::from(value)),
                None => sums.push(values.into_iter().map(f64::from).collect()),
            }
        }
    }
    for (i, sum) in sums.into_iter().enumerate() {
        let mean: Vec<f32> = sum.into_iter().map(|sum| (sum / last.len() as f64) as f32).collect();
        engine.parameters.write(i, &mean).map_err(TrainError::from)?;
    }
    engine.parameters.refresh().map_err(TrainError::from)?;
    Ok(())
}

/// A linear head on the frozen model, and how good it is on the dev data.
struct Linear {
    model: LinearModel,
    found: Option<Found>,
}

impl Linear {
    fn new(plan: &Plan, device: &Device, learner: &Learner) -> Result<Self, TaskError> {
        let model = LinearModel::fit(plan, device)?;
        let found = learner.score(&model.model, &model.parameters, 0, None)?;
        Ok(Self { model, found })
    }
}

/// Writes down how a linear head did beside the fine-tuned model, and takes its scores where it did better.
fn compare(plan: &Plan, linear: Option<&Linear>, results: &mut Results, folds: &[Results]) {
    let fine_tuned = results.value;
    let of_folds: Vec<Results> = folds.iter().filter_map(Results::of_linear_head).collect();
    let (value, scores, degenerate) = match (&plan.dev, linear.and_then(|linear| linear.found.as_ref())) {
        (Some(dev), Some(found)) => {
            let value =
                Some(chosen_by(dev, &found.score, plan.recipe.metric.as_deref()).1).filter(|value| value.is_finite());
            (value, found.score.to_json(), found.degenerate.clone())
        }
        _ => {
            let joined = joined(&of_folds);
            (joined.folds.mean, joined.scores, joined.degenerate)
        }
    };
    // A fold is there for both scores.
    let kept = !plan.is_fold() && value > fine_tuned;
    if kept {
        (results.value, results.scores, results.degenerate) = (value, scores.clone(), degenerate.clone());
        results.folds = (!folds.is_empty()).then(|| joined(&of_folds).folds);
        results.best_step = 0;
    }
    results.linear_head = Some(LinearScore { kept, value, fine_tuned, scores, degenerate });
}

/// Whether folds found a linear head better than fine-tuning.
fn linear_wins(folds: &[Results]) -> bool {
    let of_linear: Vec<Results> = folds.iter().filter_map(Results::of_linear_head).collect();
    joined(&of_linear).folds.mean > joined(folds).folds.mean
}

/// How the folds of a run ended.
enum Folds {
    /// What each gave.
    Finished(Vec<Results>),
    /// One of them did not end.
    Stopped(Ended),
}

/// Trains and scores all folds that are not finished yet.
fn run_folds(plan: &Plan, device: &Device, out: &Path, watch: &mut Watch<'_>) -> Result<Folds, TaskError> {
    let mut all = Vec::new();
    for (number, fold) in (1..).zip(plan.folds()) {
        let fold = fold?;
        let directory = out.join(FOLDS).join(number.to_string());
        let name = format!("fold {number} of {}", plan.recipe.folds);
        (watch.on)(Event::Part { name: &name, steps: fold.steps() });
        match finetune(&fold, device, &directory, None, watch)? {
            Ended::Finished(results) => all.push(*results),
            stopped => return Ok(Folds::Stopped(stopped)),
        }
        keep_books(&directory)?;
    }
    Ok(Folds::Finished(all))
}

/// Deletes the model of a fold, which was only there to be scored; log, page and results stay.
fn keep_books(fold: &Path) -> Result<(), TaskError> {
    let io = |path: &Path| {
        let path = path.to_owned();
        move |source| TaskError::Train(TrainError::Io { action: "delete", path, source })
    };
    for entry in fs::read_dir(fold).map_err(io(fold))? {
        let entry = entry.map_err(io(fold))?;
        let (path, name) = (entry.path(), entry.file_name());
        if BOOKS.iter().any(|book| name == *book) {
            continue;
        }
        if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) }.map_err(io(&path))?;
    }
    Ok(())
}

/// The results of a run on this data that is finished already.
pub(crate) fn finished(data: &str, out: &Path) -> Result<Option<Results>, TaskError> {
    let path = out.join(RESULTS);
    if !path.exists() {
        return Ok(None);
    }
    let results: Results = read_json(&path, RESULTS_LIMIT).map_err(TrainError::from)?;
    if results.data != data { Err(TrainError::OtherData { path: out.to_owned() }.into()) } else { Ok(Some(results)) }
}

fn results(plan: &Plan, run: &TrainingRun, found: Option<&Found>, folds: &[Results]) -> Results {
    let (metric, value) = match (&plan.dev, found) {
        (Some(dev), Some(found)) => chosen_by(dev, &found.score, plan.recipe.metric.as_deref()),
        _ => (plan.metric().to_owned(), f64::NAN),
    };
    let state = run.state();
    let own = Results {
        task: plan.task.name.to_owned(),
        metric,
        value: value.is_finite().then_some(value),
        scores: found.map(|found| found.score.to_json()).unwrap_or_default(),
        best_step: if plan.recipe.average_checkpoints > 1 { state.step } else { run.best_step() },
        steps: state.step,
        stopped_early: state.step > 0 && state.step < plan.steps(),
        degenerate: found.and_then(|found| found.degenerate.clone()),
        seed: plan.recipe.seed,
        train_examples: plan.train.examples.len(),
        seconds: state.seconds,
        tokens: state.tokens,
        data: plan.data_name().to_owned(),
        dev_rows: plan.dev.as_ref().filter(|_| plan.recipe.dev_rows > 0).map(|dev| dev.examples.len()),
        linear_head: None,
        folds: None,
        mistakes: found.map(|found| found.score.mistakes.clone()),
    };
    let Some(first) = folds.first() else { return own };
    let mistakes = mistakes_of(folds);
    let Joined { folds, scores, degenerate } = joined(folds);
    Results { metric: first.metric.clone(), value: folds.mean, scores, degenerate, folds: Some(folds), mistakes, ..own }
}

impl Results {
    /// Whether the model has a linear head on the frozen encoder, because that was better.
    pub fn keeps_linear_head(&self) -> bool {
        self.linear_head.as_ref().is_some_and(|linear| linear.kept)
    }

    /// The same with the scores of the linear head, where there is one.
    fn of_linear_head(&self) -> Option<Self> {
        let LinearScore { value, scores, degenerate, .. } = self.linear_head.clone()?;
        Some(Self { value, scores, degenerate, ..self.clone() })
    }
}

/// What folds say together.
struct Joined {
    folds: FoldScores,
    scores: Map<String, Value>,
    degenerate: Option<String>,
}

fn joined(folds: &[Results]) -> Joined {
    let first = folds.first().into_iter().flat_map(|first| &first.scores);
    let numbers = first.filter(|(name, value)| value.is_number() && *name != "examples");
    let degenerate: Vec<&String> = folds.iter().filter_map(|fold| fold.degenerate.as_ref()).collect();
    Joined {
        folds: FoldScores::new(folds.iter().map(|fold| fold.value).collect()),
        scores: numbers.filter_map(|(name, _)| Some((name.clone(), mean_of(folds, name)?.into()))).collect(),
        degenerate: degenerate.first().filter(|_| 2 * degenerate.len() > folds.len()).map(|reason| (*reason).clone()),
    }
}

/// The mean of a score over folds.
fn mean_of(folds: &[Results], name: &str) -> Option<f64> {
    FoldScores::new(folds.iter().map(|fold| fold.scores.get(name)?.as_f64()).collect()).mean
}

/// The mistakes of all folds, where all are known.
fn mistakes_of(folds: &[Results]) -> Option<Vec<Mistake>> {
    let each: Option<Vec<&Vec<Mistake>>> = folds.iter().map(|fold| fold.mistakes.as_ref()).collect();
    let mut all: Vec<Mistake> = each?.into_iter().flatten().cloned().collect();
    all.sort_by(|a, b| b.weight.total_cmp(&a.weight));
    Some(all)
}

impl FoldScores {
    /// Of these values.
    fn new(values: Vec<Option<f64>>) -> Self {
        let numbers: Vec<f64> = values.iter().copied().flatten().collect();
        let (mean, standard_deviation) = mean_and_deviation(&numbers);
        Self { values, mean, standard_deviation }
    }
}

/// The mean, where there are numbers, and the standard deviation of a sample, where there are several.
pub fn mean_and_deviation(numbers: &[f64]) -> (Option<f64>, Option<f64>) {
    let n = numbers.len() as f64;
    let mean = numbers.iter().sum::<f64>() / n;
    let squares: f64 = numbers.iter().map(|number| (number - mean).powi(2)).sum();
    ((!numbers.is_empty()).then_some(mean), (numbers.len() > 1).then(|| (squares / (n - 1.0)).sqrt()))
}
