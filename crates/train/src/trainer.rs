//! The loop that every training goes through: steps, logs, evaluations, checkpoints, and how it ends.
//!
//! What is learnt is a [`Task`]'s business; where it runs and how it is shown, the caller's.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Instant, SystemTime};

use henson_models::Bert;
use henson_tensor::{Builder, Gradients, Parameters, Tape, Training};
use serde_json::Value;

use crate::error::{Result, TrainError};
use crate::metrics::{self, Line, MetricsLog};
use crate::run::{Best, ModelFiles, RunDirectory, State};
use crate::tensorboard::EventWriter;
use crate::{OptimizerSettings, Updater, report};

/// A model with what training needs of it.
pub struct Engine {
    /// The network.
    pub model: Bert,
    /// Its weights.
    pub parameters: Parameters,
    /// Their gradients.
    pub gradients: Gradients,
    /// What changes the weights.
    pub updater: Updater,
    /// Reused from pass to pass.
    pub tape: Tape,
    /// The seed of dropout.
    pub seed: u64,
}

impl Engine {
    /// A model ready to be trained.
    pub fn new(model: Bert, parameters: Parameters, optimizer: OptimizerSettings, seed: u64) -> Result<Self> {
        let gradients = parameters.gradients()?;
        let updater = Updater::new(optimizer, &parameters)?;
        Ok(Self { model, parameters, gradients, updater, tape: Tape::new(), seed })
    }

    /// The randomness of a step's dropout.
    pub fn training(&self, step: u64) -> Training {
        // Recipes refuse more than u32::MAX steps.
        Training { seed: self.seed, step: step as u32 }
    }

    /// How many parameters a config's model has, without making it.
    pub fn count_parameters(build: impl FnOnce(&mut Builder)) -> usize {
        let mut builder = Builder::new();
        build(&mut builder);
        builder.entries().iter().map(|entry| entry.shape.elements()).sum()
    }
}

/// What a step saw.
#[derive(Clone, Debug, Default)]
pub struct StepLoss {
    /// What is trained: the sum of the parts.
    pub loss: f64,
    /// The masked-LM part, in pre-training.
    pub masked: Option<f64>,
    /// The next-sentence part.
    pub next_sentence: Option<f64>,
    /// Tokens read.
    pub tokens: usize,
}

/// What an evaluation found.
#[derive(Clone, Debug, Default)]
pub struct Evaluation {
    /// By name.
    pub metrics: BTreeMap<String, f64>,
    /// What the best checkpoint is chosen by; lower is better.
    pub score: f64,
}

/// What is learnt.
pub trait Task {
    /// Adds the gradients of update number `step` (from 0) to the engine's, which are zero.
    fn step(&mut self, engine: &mut Engine, step: u64) -> Result<StepLoss>;
    /// How good the model is on held-out data after `step` updates, where there are some.
    fn evaluate(&mut self, engine: &mut Engine, step: u64) -> Result<Option<Evaluation>>;
    /// What the model puts into the sample texts.
    fn samples(&mut self, engine: &mut Engine) -> Result<Vec<metrics::Sample>>;
    /// The learning rate of update number `step`, and which phase it belongs to.
    fn rate(&self, step: u64) -> (f64, u32);
    /// Where the data is, for a checkpoint.
    fn place(&self) -> Result<Value>;
}

/// When the loop does what.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoopSettings {
    /// Updates in all.
    pub steps: u64,
    /// Steps between checkpoints; 0 for one at the end alone.
    pub checkpoint_every: u64,
    /// How many of the last checkpoints are kept, beside the best.
    pub keep_checkpoints: usize,
    /// Steps between evaluations; 0 for one at the end alone.
    pub eval_every: u64,
    /// Steps between lines of the log.
    pub log_every: u64,
    /// Stop after this step with a checkpoint, to go on later.
    pub stop_at: Option<u64>,
}

/// What happens, for whoever watches.
#[derive(Debug)]
pub enum Event<'a> {
    /// An update was made.
    Step {
        /// Updates made.
        step: u64,
        /// Its loss.
        loss: f64,
        /// Tokens a second, of the last steps.
        tokens_per_s: f64,
        /// Of the whole update.
        learning_rate: f64,
    },
    /// An evaluation begins, which may take a while.
    Evaluating,
    /// An evaluation was made.
    Evaluated {
        /// Updates made.
        step: u64,
        /// What it found.
        metrics: &'a BTreeMap<String, f64>,
    },
    /// What the model puts into sample texts.
    Samples {
        /// Updates made.
        step: u64,
        /// The texts.
        texts: &'a [metrics::Sample],
    },
    /// A checkpoint was written.
    Saved {
        /// Updates made.
        step: u64,
        /// Where.
        path: &'a Path,
    },
}

/// Who watches, and who may stop it.
pub struct Watch<'a> {
    /// Is told what happens.
    pub on: &'a mut dyn FnMut(Event<'_>),
    /// Set from outside to stop after the step at hand.
    pub stop: &'a AtomicBool,
}

/// How the loop ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All steps are done.
    Finished,
    /// `stop_at` was reached; a checkpoint is there.
    Paused,
    /// Stopped from outside; a checkpoint is there.
    Interrupted,
}

/// Trains from `state` on.
pub fn train(
    engine: &mut Engine,
    task: &mut dyn Task,
    run: &RunDirectory,
    model: &ModelFiles,
    state: &mut State,
    settings: &LoopSettings,
    watch: &mut Watch<'_>,
) -> Result<Outcome> {
    run.sweep();
    // A run that was killed before its first checkpoint begins its log anew.
    let mut logs = Logs::open(run.path(), (!state.place.is_null()).then_some(state.step))?;
    let mut saved_at = (state.step > 0).then_some(state.step);
    let mut guard = Guard::default();
    let mut interval = Interval::default();
    let mut tokens_per_s = 0.0;
    // Not again where a run was stopped before its first step.
    if state.place.is_null() && settings.eval_every > 0 {
        evaluate(engine, task, state, &mut logs, watch)?;
    }
    while state.step < settings.steps {
        let stop = watch.stop.load(Ordering::Relaxed);
        let pause = settings.stop_at.is_some_and(|at| state.step >= at);
        if stop || pause {
            if saved_at != Some(state.step) {
                save(engine, task, run, model, state, settings, watch)?;
            }
            show(run.path())?;
            return Ok(if stop { Outcome::Interrupted } else { Outcome::Paused });
        }
        let start = Instant::now();
        let (rate, phase) = task.rate(state.step);
        engine.gradients.zero();
        let loss = task.step(engine, state.step)?;
        let kept = || match saved_at {
            Some(step) => format!("the checkpoint of step {step} is in {}", run.checkpoint(step).display()),
            None => "there is no checkpoint yet".to_owned(),
        };
        if !loss.loss.is_finite() {
            return Err(TrainError::NotFinite { step: state.step + 1, what: "the loss", kept: kept() });
        }
        let norm = engine.updater.step(&mut engine.parameters, &engine.gradients, rate)?.gradient_norm;
        if !norm.is_finite() {
            return Err(TrainError::NotFinite { step: state.step + 1, what: "the gradients' norm", kept: kept() });
        }
        state.step += 1;
        state.tokens += loss.tokens as u64;
        let seconds = start.elapsed().as_secs_f64();
        state.seconds += seconds;
        guard.check(state.step, loss.loss, kept)?;
        interval.add(&loss, norm, seconds);
        // A moving mean for people, over some twenty steps.
        let speed = loss.tokens as f64 / seconds.max(1e-9);
        tokens_per_s = if tokens_per_s == 0.0 { speed } else { 0.95 * tokens_per_s + 0.05 * speed };
        (watch.on)(Event::Step { step: state.step, loss: loss.loss, tokens_per_s, learning_rate: rate });
        let last = state.step == settings.steps;
        if last || state.step.is_multiple_of(settings.log_every.max(1)) {
            logs.append(&Line::Train(interval.line(state, phase, rate)))?;
            interval = Interval::default();
        }
        let due = |every: u64| last || (every > 0 && state.step.is_multiple_of(every));
        let save_now = due(settings.checkpoint_every);
        // Checkpoints are evaluated, so that the best of them is known.
        if due(settings.eval_every) || (save_now && settings.eval_every > 0) {
            let score = evaluate(engine, task, state, &mut logs, watch)?;
            if let Some(score) = score.filter(|score| save_now && state.best.is_none_or(|best| *score < best.score)) {
                state.best = Some(Best { step: state.step, score });
            }
            show(run.path())?;
        }
        if save_now {
            save(engine, task, run, model, state, settings, watch)?;
            saved_at = Some(state.step);
        }
    }
    run.finish(model, &engine.parameters)?;
    show(run.path())?;
    Ok(Outcome::Finished)
}

/// Draws the run's page anew.
fn show(run: &Path) -> Result<()> {
    Ok(report::write(&run.join("report.html"), &[report::Run::open(run)?])?)
}

fn evaluate(
    engine: &mut Engine,
    task: &mut dyn Task,
    state: &State,
    logs: &mut Logs,
    watch: &mut Watch<'_>,
) -> Result<Option<f64>> {
    (watch.on)(Event::Evaluating);
    let step = state.step;
    let evaluation = task.evaluate(engine, step)?;
    if let Some(Evaluation { metrics, .. }) = &evaluation {
        (watch.on)(Event::Evaluated { step, metrics });
        logs.append(&Line::Eval(metrics::Eval { step, metrics: metrics.clone() }))?;
    }
    let texts = task.samples(engine)?;
    if !texts.is_empty() {
        (watch.on)(Event::Samples { step, texts: &texts });
        logs.append(&Line::Samples(metrics::Samples { step, texts }))?;
    }
    Ok(evaluation.map(|evaluation| evaluation.score))
}

fn save(
    engine: &Engine,
    task: &mut dyn Task,
    run: &RunDirectory,
    model: &ModelFiles,
    state: &mut State,
    settings: &LoopSettings,
    watch: &mut Watch<'_>,
) -> Result<()> {
    state.place = task.place()?;
    run.save(state, model, &engine.parameters, &engine.updater)?;
    run.prune(settings.keep_checkpoints, state.best)?;
    (watch.on)(Event::Saved { step: state.step, path: &run.checkpoint(state.step) });
    Ok(())
}

/// The run's log and its copy for TensorBoard.
struct Logs {
    metrics: MetricsLog,
    events: EventWriter,
}

impl Logs {
    fn open(run: &Path, checkpoint: Option<u64>) -> Result<Self> {
        let metrics = MetricsLog::open(run.join("metrics.jsonl"), checkpoint)?;
        let events = EventWriter::create(&run.join("tensorboard"), SystemTime::now(), checkpoint)?;
        Ok(Self { metrics, events })
    }

    fn append(&mut self, line: &Line) -> Result<()> {
        self.metrics.append(line)?;
        Ok(self.events.log(line, SystemTime::now())?)
    }
}

/// Sums since the last line of the log.
#[derive(Default)]
struct Interval {
    steps: usize,
    loss: StepLoss,
    norm: f64,
    seconds: f64,
}

impl Interval {
    fn add(&mut self, loss: &StepLoss, norm: f64, seconds: f64) {
        let sum = |a: &mut Option<f64>, b: Option<f64>| *a = b.map(|b| a.unwrap_or(0.0) + b);
        self.steps += 1;
        self.loss.loss += loss.loss;
        sum(&mut self.loss.masked, loss.masked);
        sum(&mut self.loss.next_sentence, loss.next_sentence);
        self.loss.tokens += loss.tokens;
        self.norm += norm;
        self.seconds += seconds;
    }

    fn line(&self, state: &State, phase: u32, learning_rate: f64) -> metrics::Train {
        let n = self.steps as f64;
        metrics::Train {
            step: state.step,
            phase,
            loss: self.loss.loss / n,
            mlm_loss: self.loss.masked.map(|sum| sum / n),
            nsp_loss: self.loss.next_sentence.map(|sum| sum / n),
            learning_rate,
            gradient_norm: self.norm / n,
            tokens_per_s: self.loss.tokens as f64 / self.seconds.max(1e-9),
            tokens: state.tokens,
            seconds: state.seconds,
        }
    }
}

/// Notices a loss that grows without bound: when the mean of some twenty steps is above twice its lowest value and one.
#[derive(Default)]
struct Guard {
    mean: Option<f64>,
    lowest: Option<f64>,
    steps: u64,
}

impl Guard {
    fn check(&mut self, step: u64, loss: f64, kept: impl Fn() -> String) -> Result<()> {
        let mean = self.mean.map_or(loss, |mean| 0.95 * mean + 0.05 * loss);
        self.mean = Some(mean);
        self.steps += 1;
        let lowest = self.lowest.unwrap_or(mean);
        if self.steps > 20 && mean > 2.0 * lowest + 1.0 {
            return Err(TrainError::Exploding { step, loss: mean, lowest, kept: kept() });
        }
        self.lowest = Some(lowest.min(mean));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guard_tells_noise_from_an_explosion() {
        let none = || String::new();
        let mut guard = Guard::default();
        for step in 0..500 {
            let noise = if step % 7 == 0 { 2.0 } else { 0.0 };
            guard.check(step, 10.0 - step as f64 / 100.0 + noise, none).unwrap();
        }
        let caught = (500..600).find(|step| guard.check(*step, 30.0, none).is_err());
        assert!(caught.is_some_and(|step| step < 520), "{caught:?}");
    }
}
