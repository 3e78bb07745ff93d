//! One fine-tuning run in its directory: begun or taken up again, trained, and finished with the best model, a model card and
//! its results.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::atomic::Ordering;

use henson_checkpoint::{read_json, write_atomic};
use henson_tensor::Device;
use henson_train::{
    Event, LoopSettings, Outcome, RunDirectory, State, TrainError, Watch, differences, parse_settings, report, train,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::card;
use super::learner::{Found, chosen_by};
use super::plan::Plan;
use super::recipe::FineTuneRecipe;
use crate::error::TaskError;

/// The largest results.json that is read.
const RESULTS_LIMIT: u64 = 16 << 20;

/// What a finished run gave.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Results {
    /// The task.
    pub task: String,
    /// The score that the best model was chosen by.
    pub metric: String,
    /// Its value on the dev file; none without such a file, and where it is not a number.
    pub value: Option<f64>,
    /// All scores on the dev file.
    pub scores: Map<String, Value>,
    /// After how many updates the model was best.
    pub best_step: u64,
    /// Updates made.
    pub steps: u64,
    /// Whether it ended before its last step, because nothing got better.
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
}

/// How a run ended.
#[derive(Debug)]
pub enum Ended {
    /// The model is there.
    Finished(Box<Results>),
    /// Stopped with a checkpoint at this step; the same call goes on.
    Stopped(u64),
}

/// Fine-tunes in a directory, from its newest checkpoint on, and leaves the best model there.
pub fn finetune(
    plan: &Plan,
    device: &Device,
    out: &Path,
    stop_at: Option<u64>,
    watch: &mut Watch<'_>,
) -> Result<Ended, TaskError> {
    let run = RunDirectory::open(out)?;
    check_recipe(&plan.recipe, &FineTuneRecipe::MAY_CHANGE, out)?;
    if let Some(results) = finished(plan.data_name(), out)? {
        return Ok(Ended::Finished(Box::new(results)));
    }
    let kernels = device.isa().map_or_else(|| device.to_string(), |isa| format!("cpu {isa}"));
    let mut state = match run.latest()? {
        Some(state) if state.data != plan.data_name() => return Err(other_data(out)),
        Some(state) => state,
        None => State::new(plan.data_name().to_owned(), kernels.clone()),
    };
    let mut engine = plan.engine(device)?;
    write_atomic(&out.join("recipe.toml"), plan.recipe.to_toml()?.as_bytes()).map_err(TrainError::from)?;
    if state.step > 0 {
        run.load(&state, &mut engine.parameters, &mut engine.updater)?;
        state.device = kernels;
    }
    let mut learner = plan.learner()?;
    let every = (plan.steps_per_epoch() / plan.recipe.evals_per_epoch).max(1);
    let settings = LoopSettings {
        steps: plan.steps(),
        checkpoint_every: every,
        keep_checkpoints: 1,
        eval_every: if plan.dev.is_some() { every } else { 0 },
        log_every: plan.recipe.log_every,
        stop_at,
    };
    let mut patience = Patience::new(plan, &state, every);
    if !patience.is_over() {
        let model = plan.model_files()?;
        let Watch { on, stop } = watch;
        let mut set_here = false;
        let outcome = {
            let mut notice = |event: Event<'_>| {
                if let Event::Evaluated { step, metrics } = &event
                    && *step > 0
                {
                    patience.notice(metrics);
                }
                on(event);
                if patience.is_over() && !stop.swap(true, Ordering::Relaxed) {
                    set_here = true;
                }
            };
            train(&mut engine, &mut learner, &run, &model, &mut state, &settings, &mut Watch { on: &mut notice, stop })?
        };
        // Whoever watches may have more runs: the flag is left as it was, and an interruption is not taken back.
        if set_here {
            stop.store(false, Ordering::Relaxed);
        }
        if outcome != Outcome::Finished && !patience.is_over() {
            return Ok(Ended::Stopped(state.step));
        }
    }

    // The best model, and what it says.
    let best_step = state.best.map_or(state.step, |best| best.step);
    if best_step != state.step {
        let best = State { step: best_step, ..state.clone() };
        run.load(&best, &mut engine.parameters, &mut engine.updater)?;
    }
    if learner.found.as_ref().is_none_or(|found| found.step != best_step) {
        learner.look(&mut engine, best_step)?;
    }
    let results = results(plan, &state, best_step, learner.found.as_ref());
    let mut model = plan.model_files()?;
    if plan.config.no_answer_threshold().is_some() {
        let threshold = learner.found.as_ref().and_then(|found| found.score.get("best_f1_threshold")).unwrap_or(0.0);
        let mut config = plan.config.clone();
        config.set_no_answer_threshold(Some(threshold));
        model.config = config.to_json().map_err(TrainError::from)?;
    }
    run.finish(&model, &engine.parameters)?;
    let card = card::write(plan, &results, learner.found.as_ref().map(|found| &found.score));
    write_atomic(&out.join("README.md"), card.as_bytes()).map_err(TrainError::from)?;
    let json = serde_json::to_vec_pretty(&results)
        .map_err(|error| TrainError::State { path: out.join("results.json"), problem: error.to_string() })?;
    write_atomic(&out.join("results.json"), &json).map_err(TrainError::from)?;
    let page = report::Run::open(out).and_then(|run| report::write(&out.join("report.html"), &[run]));
    page.map_err(TrainError::from)?;
    // Nothing is left to go on from: another length is another schedule, and so another run.
    let checkpoints = out.join("checkpoints");
    match fs::remove_dir_all(&checkpoints) {
        Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
            Err(TrainError::Io { action: "delete", path: checkpoints, source }.into())
        }
        _ => Ok(Ended::Finished(Box::new(results))),
    }
}

/// Refuses a directory that was begun with another recipe.
pub(crate) fn check_recipe<T: Serialize + DeserializeOwned>(
    recipe: &T,
    may_change: &[&str],
    out: &Path,
) -> Result<(), TaskError> {
    let path = out.join("recipe.toml");
    if !path.exists() {
        return Ok(());
    }
    let text =
        fs::read_to_string(&path).map_err(|source| TrainError::Io { action: "read", path: path.clone(), source })?;
    let old: T = parse_settings(&[(&text, &path.display().to_string())], &[])
        .map_err(|error| TrainError::OtherKind { path: out.to_owned(), problem: error.to_string() })?;
    let differences = differences(&old, recipe, may_change, &[])?;
    match differences.is_empty() {
        true => Ok(()),
        false => Err(TrainError::OtherRecipe { path: out.to_owned(), differences }.into()),
    }
}

/// The results of a run on this data that is finished already.
pub(crate) fn finished(data: &str, out: &Path) -> Result<Option<Results>, TaskError> {
    let path = out.join("results.json");
    if !path.exists() {
        return Ok(None);
    }
    let results: Results = read_json(&path, RESULTS_LIMIT).map_err(TrainError::from)?;
    if results.data != data { Err(other_data(out)) } else { Ok(Some(results)) }
}

fn other_data(out: &Path) -> TaskError {
    let problem = "it was begun with other data: give the same files, or choose another --out".to_owned();
    TrainError::State { path: out.to_owned(), problem }.into()
}

fn results(plan: &Plan, state: &State, best_step: u64, found: Option<&Found>) -> Results {
    let (metric, value) = match (&plan.dev, found) {
        (Some(dev), Some(found)) => chosen_by(dev, &found.score),
        _ => (plan.task.metric, f64::NAN),
    };
    Results {
        task: plan.task.name.to_owned(),
        metric: metric.to_owned(),
        value: value.is_finite().then_some(value),
        scores: found.map(|found| found.score.to_json()).unwrap_or_default(),
        best_step,
        steps: state.step,
        stopped_early: state.step < plan.steps(),
        degenerate: found.and_then(|found| found.degenerate.clone()),
        seed: plan.recipe.seed,
        train_examples: plan.train.examples.len(),
        seconds: state.seconds,
        tokens: state.tokens,
        data: plan.data_name().to_owned(),
    }
}

/// How many evaluations there were without a better one.
struct Patience {
    most: u64,
    since: u64,
    best: Option<f64>,
    metric: &'static str,
}

impl Patience {
    fn new(plan: &Plan, state: &State, every: u64) -> Self {
        // An equal one is no better: it counts since the score was first reached.
        let since = state.best.map_or(0, |best| (state.step - best.step + best.held) / every);
        Self { most: plan.recipe.patience, since, best: state.best.map(|best| -best.score), metric: plan.task.metric }
    }

    /// An evaluation was made. The names are those of [`chosen_by`]: answers with the best threshold, the task's own, and
    /// what tags without entities have.
    fn notice(&mut self, metrics: &BTreeMap<String, f64>) {
        let value = ["best_f1", self.metric, "accuracy"].iter().find_map(|name| metrics.get(*name).copied());
        let value = value.filter(|value| value.is_finite());
        if value.is_some() && value > self.best {
            (self.best, self.since) = (value, 0);
        } else {
            self.since += 1;
        }
    }

    fn is_over(&self) -> bool {
        self.most > 0 && self.since >= self.most
    }
}
