//! The loop that every training goes through: steps, logs, evaluations, checkpoints, and how it ends.
//!
//! What is learned is a [`Task`]'s business; where it runs and how it is shown, the caller's.

use std::collections::{BTreeMap, VecDeque};
use std::hash::Hash;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Instant, SystemTime};

use henson_checkpoint::write_atomic;
use henson_models::{Model, ModelConfig};
use henson_ranks::Ranks;
use henson_tensor::{Device, Gradients, Parameters, PartSums, Pass, Reading, Recordings, Tape, Tensor, Training};
use serde_json::Value;

use crate::error::{Result, TrainError};
use crate::losses::{LossNames, LossWeights, Losses};
use crate::metrics::{self, Line, MetricsLog};
use crate::objective::Objective;
use crate::run::{Best, Carried, ModelFiles, RunDirectory, State};
use crate::tensorboard::EventWriter;
use crate::together;
use crate::{OptimizerSettings, Updater};

/// How a GPU does its matrix products in a run.
pub(crate) const PRODUCTS: &str = "cuda-products.txt";

/// What a part of a step computes on its inputs: at most eight numbers, such as its losses.
///
/// It may be recorded, and then it runs on a GPU alone: all that it reads from the host must be in its key. So it is a function
/// and no closure that holds other things:
///
/// ```compile_fail
/// let scale = 0.5_f32;
/// let work: henson_train::Work<(), ()> = |(), _, _, ()| Ok(vec![]).inspect(|_| drop(scale));
/// ```
pub type Work<K, I, M = Model> = fn(&K, &M, &mut Pass<'_>, &I) -> Result<Vec<Tensor>>;

/// A model with what training needs of it; `M` is its network.
pub struct Engine<M = Model> {
    /// The network.
    pub model: M,
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
    /// Passes that a GPU has learned to play.
    recordings: Recordings,
    /// Gradients of parts of a batch.
    sums: PartSums,
    /// Those that train together with this process.
    ranks: Option<Arc<Ranks>>,
    /// Whether the next step's first part tells how a GPU does its matrix products.
    tunes: bool,
}

impl<M> Engine<M> {
    /// A model ready to be trained.
    pub fn new(model: M, parameters: Parameters, optimizer: OptimizerSettings, seed: u64) -> Result<Self> {
        let gradients = parameters.gradients()?;
        let updater = Updater::new(optimizer, &parameters)?;
        let (tape, recordings, sums) = (Tape::new(), Recordings::default(), PartSums::default());
        Ok(Self { model, parameters, gradients, updater, tape, seed, recordings, sums, ranks: None, tunes: false })
    }

    /// Trains together with other ranks from here on: each computes its own parts of a batch and updates a shard of the weights.
    /// Before any state is loaded.
    pub fn join(&mut self, ranks: Option<Arc<Ranks>>) -> Result<()> {
        if let Some(ranks) = &ranks {
            self.updater.share(&self.parameters, Arc::clone(ranks))?;
        }
        self.ranks = ranks;
        Ok(())
    }

    /// Those that it trains together with.
    pub fn ranks(&self) -> Option<&Arc<Ranks>> {
        self.ranks.as_ref()
    }

    /// Lets all ranks do matrix products as the first does, for different algorithms give different bits: what it has no choice for
    /// yet, the library's first proposal does, which depends on the shape alone. On one process, or on CPUs, nothing.
    pub fn agree_on_products(&mut self) -> Result<()> {
        let device = self.parameters.device().clone();
        let (Some(ranks), Some(choices)) = (&self.ranks, device.product_choices()) else { return Ok(()) };
        device.search_products(false)?;
        let choices = ranks.from_first(choices.as_bytes());
        if ranks.rank() > 0 && !device.choose_products(&String::from_utf8_lossy(&choices))? {
            let text = "rank 0 has another GPU or another cuBLASLt than this one: all ranks need the same";
            return Err(TrainError::Ranks(text.to_owned()));
        }
        device.search_products(false)?;
        self.recordings = Recordings::default();
        Ok(())
    }

    /// Lets the first rank time matrix products in the first part of the next step, before the others begin with theirs.
    pub(crate) fn tune_products(&mut self) {
        self.tunes = self.ranks.is_some() && matches!(self.parameters.device(), Device::Cuda(_));
    }

    /// The randomness of a step's dropout.
    pub fn training(&self, step: u64) -> Training {
        // Recipes refuse more than u32::MAX steps.
        Training { seed: self.seed, step: step as u32 }
    }

    /// One part of update number `step`: `fill` puts its inputs on the device, `work` goes from them to the losses. The
    /// gradients are added to the engine's; nothing of this waits for a GPU.
    ///
    /// `key` holds whatever `work` depends on beside its inputs. Where these hold numbers of the host, the key has them, too.
    pub fn learn_from<K: Hash + Copy + 'static, I>(
        &mut self,
        step: u64,
        key: K,
        fill: impl FnOnce(&Device, &M) -> Result<I>,
        work: Work<K, I, M>,
    ) -> Result<Reading> {
        let training = self.training(step);
        let Self { model, parameters, gradients, tape, recordings, .. } = self;
        let device = parameters.device().clone();
        let ((inputs, number), signature) = device.feed(|| {
            let number = Tensor::from_slice(&device, [1], &[training.step])?;
            Ok::<_, TrainError>((fill(&device, model)?, number))
        })?;
        let all = (work as usize, training.seed, tape.recomputes(), gradients.is_zero(), key);
        let losses = recordings.run(&device, &signature, &all, || {
            let mut pass = Pass::training(tape, parameters, training);
            pass.read_step_from(&number);
            let losses = work(&key, model, &mut pass, &inputs)?;
            pass.backward(gradients)?;
            Ok::<_, TrainError>((losses, tape.trace()))
        })?;
        gradients.played();
        Ok(device.read_later(&losses.iter().collect::<Vec<_>>())?)
    }

    /// Goes through the parts of update number `step`, or those that are this rank's: `learn` adds the gradients of one of them, by its
    /// number, to the engine's, and gives the losses of its passes; none where the part is empty. What all parts give is added in a tree
    /// that depends on their number alone ([`PartSums`]). Gives the losses in the order of the parts.
    pub fn in_parts(
        &mut self,
        step: u64,
        parts: usize,
        mut learn: impl FnMut(&mut Self, usize) -> Result<Vec<Reading>>,
    ) -> Result<Vec<Reading>> {
        let mut readings = Vec::with_capacity(parts);
        self.sums.clear();
        let own = together::own_parts(self.ranks.as_deref(), parts);
        let tunes = std::mem::take(&mut self.tunes);
        if tunes && own.start > 0 {
            self.agree_on_products()?;
        } else if tunes {
            self.parameters.device().search_products(true)?;
            self.recordings = Recordings::default();
        }
        for part in own.clone() {
            self.gradients.zero();
            let losses = learn(self, part)?;
            if losses.is_empty() {
                self.learn_nothing(step)?;
            }
            if tunes && part == 0 {
                self.agree_on_products()?;
            }
            readings.extend(losses);
            self.sums.end_part(&mut self.gradients, part - own.start, own.len())?;
        }
        Ok(readings)
    }

    /// Reads `count` things, each by the one rank that gets to it, and gives what `look` found in their order, on all ranks.
    pub fn look_around(
        &mut self,
        count: usize,
        mut look: impl FnMut(&mut Self, usize) -> Result<Reading>,
    ) -> Result<Vec<Reading>> {
        let Some(ranks) = self.ranks.clone() else { return (0..count).map(|i| look(self, i)).collect() };
        let (rank, size) = (ranks.rank(), ranks.size());
        let own: Vec<Reading> = (rank..count).step_by(size).map(|i| look(self, i)).collect::<Result<_>>()?;
        let all = together::share_readings(&ranks, own, false)?.0;
        // By rank first: put back in their order.
        let numbers = (0..size).flat_map(|rank| (rank..count).step_by(size));
        let mut all: Vec<(usize, Reading)> = numbers.zip(all).collect();
        all.sort_by_key(|(number, _)| *number);
        Ok(all.into_iter().map(|(_, reading)| reading).collect())
    }

    /// Leaves all gradients at zero: a step that has nothing to learn from.
    pub fn learn_nothing(&mut self, step: u64) -> Result<()> {
        let pass = Pass::training(&mut self.tape, &self.parameters, Training { seed: self.seed, step: step as u32 });
        Ok(pass.backward(&mut self.gradients)?)
    }
}

impl Engine {
    /// [`Engine::learn_from`] for a model with a config.
    pub fn learn<K: Hash + Copy + 'static, I>(
        &mut self,
        step: u64,
        key: K,
        fill: impl FnOnce(&Device, &ModelConfig) -> Result<I>,
        work: Work<K, I>,
    ) -> Result<Reading> {
        self.learn_from(step, key, |device, model| fill(device, model.config()), work)
    }

    /// One part of update number `step` towards an objective; see [`Engine::learn_from`].
    pub fn learn_part<O: Objective>(&mut self, step: u64, objective: O, part: O::Part<'_>) -> Result<Reading> {
        self.learn(step, objective, |device, config| objective.inputs(device, config, part), O::losses)
    }

    /// A pass without gradients, otherwise as [`Engine::learn_from`].
    pub fn look<K: Hash + Copy + 'static, I>(
        &mut self,
        key: K,
        fill: impl FnOnce(&Device, &ModelConfig) -> Result<I>,
        work: Work<K, I>,
    ) -> Result<Reading> {
        let Self { model, parameters, tape, recordings, .. } = self;
        let device = parameters.device().clone();
        let (inputs, signature) = device.feed(|| fill(&device, model.config()))?;
        let results = recordings.run(&device, &signature, &(work as usize, key), || {
            let mut pass = Pass::inference(tape, parameters);
            let results = work(&key, model, &mut pass, &inputs)?;
            drop(pass);
            Ok::<_, TrainError>((results, tape.trace()))
        })?;
        Ok(device.read_later(&results.iter().collect::<Vec<_>>())?)
    }
}

/// A step that a device may still be at work on.
pub struct Underway {
    /// The losses of each part of the batch: their sums are the step's.
    pub parts: Vec<Reading>,
    /// What these losses are.
    pub losses: LossNames,
    /// What they were multiplied with.
    pub weights: LossWeights,
    /// Tokens read.
    pub tokens: usize,
}

impl Underway {
    /// What the step saw; waits for it.
    pub fn wait(self) -> Result<Losses> {
        Losses::wait(self.losses, &self.weights, self.parts)
    }
}

/// What an evaluation found.
#[derive(Clone, Debug, Default)]
pub struct Evaluation {
    /// By name.
    pub metrics: BTreeMap<String, f64>,
    /// What the best checkpoint is chosen by.
    pub score: f64,
    /// What tells equal scores apart, the lower the better, where something does.
    pub loss: Option<f64>,
}

/// What is learned, by a network of the kind `M`.
pub trait Task<M = Model> {
    /// Adds the gradients of update number `step` (from 0) to the engine's, which are zero.
    fn step(&mut self, engine: &mut Engine<M>, step: u64) -> Result<Underway>;
    /// How good the model is on held-out data after `step` updates, where there are some.
    fn evaluate(&mut self, engine: &mut Engine<M>, step: u64) -> Result<Option<Evaluation>>;
    /// What the model puts into the sample texts.
    fn samples(&mut self, engine: &mut Engine<M>) -> Result<Vec<metrics::Sample>>;
    /// The learning rate of update number `step`, and which phase it belongs to.
    fn rate(&self, step: u64) -> (f64, u32);
    /// Where the data is, for a checkpoint.
    fn place(&self) -> Result<Value>;
    /// What layers ended the last step with, for a checkpoint; none where each step begins with nothing.
    fn carried(&self) -> Result<Vec<Carried>> {
        Ok(Vec::new())
    }
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
    /// Whether samples go into the run's directory, and are not only shown.
    pub log_samples: bool,
    /// Stop after this step with a checkpoint, to resume later.
    pub stop_at: Option<u64>,
    /// Whether higher scores are better.
    pub higher_is_better: bool,
    /// Stop after so many evaluations without a better one; 0 for never.
    pub patience: u64,
    /// What stays of the run.
    pub keep: Keep,
}

/// What stays of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// The last model, and the checkpoints: the run may continue with more steps.
    Last,
    /// The best model and no checkpoint: another length would be another schedule, and so another run.
    Best,
}

impl LoopSettings {
    /// Whether nothing got better for so long that the run ends.
    pub(crate) fn is_over(&self, state: &State) -> bool {
        let age = state.best.map_or(0, |best| best.age(state.step));
        self.patience > 0 && age.checked_div(self.eval_every).is_some_and(|evaluations| evaluations >= self.patience)
    }
}

/// What happens, for whoever watches.
#[derive(Debug)]
pub enum Event<'a> {
    /// A part of the work begins that has updates of its own, such as a fold.
    Part {
        /// What it is.
        name: &'a str,
        /// Its updates.
        steps: u64,
    },
    /// Training begins, or resumes.
    Begins {
        /// Updates made before.
        step: u64,
        /// Seconds that it took to find the position in the data.
        seconds: f64,
    },
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
    /// Teachers are asked about all examples, before anything is learned from them.
    Teaching {
        /// Examples that they were asked about.
        done: usize,
        /// All of them.
        of: usize,
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
    /// Something is wrong that does not end the training.
    Warning {
        /// What, in words for people.
        text: &'a str,
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
    /// All steps are done, or nothing got better for long enough.
    Finished,
    /// It was finished before.
    WasFinished,
    /// `stop_at` was reached; a checkpoint is there.
    Paused,
    /// Stopped from outside; a checkpoint is there.
    Interrupted,
}

/// Trains from `state` on. Of several ranks only the first has a directory, and so a log, samples and checkpoints.
pub(crate) fn train<M>(
    engine: &mut Engine<M>,
    task: &mut dyn Task<M>,
    run: Option<&RunDirectory>,
    model: &ModelFiles,
    state: &mut State,
    settings: &LoopSettings,
    watch: &mut Watch<'_>,
) -> Result<Outcome> {
    let mut ledger = run.map(|run| Ledger::open(run, state, settings, watch)).transpose()?;
    engine.agree_on_products()?;
    let mut saved_at = (state.step > 0).then_some(state.step);
    // Not again where a run was stopped before its first step.
    if state.place.is_null() && settings.eval_every > 0 {
        evaluate(engine, task, state, settings, ledger.as_mut(), watch)?;
    }
    let ranks = engine.ranks().cloned();
    let ahead = engine.parameters.device().ahead();
    // Ranks agree on it once a step; one process looks at the last moment.
    let mut agreed = together::any(ranks.as_ref(), watch.stop.load(Ordering::Relaxed));
    let mut underway = VecDeque::new();
    while state.step < settings.steps && !settings.is_over(state) {
        let stop = if ranks.is_some() { agreed } else { watch.stop.load(Ordering::Relaxed) };
        let pause = settings.stop_at.is_some_and(|at| state.step >= at);
        if stop || pause {
            settle(&mut underway, 0, ranks.as_ref(), ledger.as_mut(), state, watch)?;
            if saved_at != Some(state.step) {
                save(engine, task, run, model, state, settings, watch)?;
            }
            ledger.as_mut().map_or(Ok(()), |ledger| ledger.show(watch))?;
            return Ok(if stop { Outcome::Interrupted } else { Outcome::Paused });
        }
        let start = Instant::now();
        let (rate, phase) = task.rate(state.step);
        if state.step == 0 || task.rate(state.step - 1).1 != phase {
            // Longer sequences, perhaps. Not where a run resumes: it must do as it would have done.
            engine.tune_products();
        }
        engine.gradients.zero();
        let loss = task.step(engine, state.step)?;
        let norm = engine.updater.step(&mut engine.parameters, &engine.gradients, rate)?;
        state.step += 1;
        if let Some(ranks) = &ranks {
            ranks.at(state.step);
        }
        let last = state.step == settings.steps;
        let due = |every: u64| last || (every > 0 && state.step.is_multiple_of(every));
        let save_now = due(settings.checkpoint_every);
        // Checkpoints are evaluated, so that the best of them is known.
        let evaluate_now = due(settings.eval_every) || (save_now && settings.eval_every > 0);
        underway.push_back(Queued { step: state.step, rate, phase, loss, norm, start });
        // What is saved or logged after a step must know of it.
        let but = if save_now || evaluate_now { 0 } else { ahead };
        agreed |= settle(&mut underway, but, ranks.as_ref(), ledger.as_mut(), state, watch)?;
        if evaluate_now {
            let found = evaluate(engine, task, state, settings, ledger.as_mut(), watch)?;
            if let Some(found) = found.filter(|_| save_now) {
                state.best = Some(Best::after(state.best, state.step, &found, settings.higher_is_better));
            }
            ledger.as_mut().map_or(Ok(()), |ledger| ledger.show(watch))?;
        }
        if save_now {
            save(engine, task, run, model, state, settings, watch)?;
            saved_at = Some(state.step);
            if let Some(ledger) = &mut ledger {
                ledger.saved_at = saved_at;
            }
        }
    }
    Ok(Outcome::Finished)
}

/// Waits for the results of all steps but the last few, which the first rank writes down; of several ranks, all must do so. Whether any
/// of them was asked to stop.
fn settle(
    underway: &mut VecDeque<Queued>,
    but: usize,
    ranks: Option<&Arc<Ranks>>,
    mut ledger: Option<&mut Ledger<'_>>,
    state: &mut State,
    watch: &mut Watch<'_>,
) -> Result<bool> {
    let mut stop = false;
    while underway.len() > but {
        let Some(mut queued) = underway.pop_front() else { break };
        if let Some(ranks) = ranks {
            let asked;
            (queued.loss.parts, asked) =
                together::share_readings(ranks, queued.loss.parts, watch.stop.load(Ordering::Relaxed))?;
            stop |= asked;
        }
        ledger.as_deref_mut().map_or(Ok(()), |ledger| ledger.note(queued, state, watch))?;
    }
    Ok(stop)
}

/// An evaluation, by all ranks; the first writes it down.
fn evaluate<M>(
    engine: &mut Engine<M>,
    task: &mut dyn Task<M>,
    state: &State,
    settings: &LoopSettings,
    ledger: Option<&mut Ledger<'_>>,
    watch: &mut Watch<'_>,
) -> Result<Option<Evaluation>> {
    (watch.on)(Event::Evaluating);
    let step = state.step;
    let evaluation = task.evaluate(engine, step)?;
    if let Some(Ledger { logs, .. }) = ledger {
        if let Some(Evaluation { metrics, .. }) = &evaluation {
            (watch.on)(Event::Evaluated { step, metrics });
            logs.append(&Line::Eval(metrics::Eval { step, metrics: metrics.clone() }))?;
        }
        let texts = task.samples(engine)?;
        if !texts.is_empty() {
            (watch.on)(Event::Samples { step, texts: &texts });
            if settings.log_samples {
                logs.append(&Line::Samples(metrics::Samples { step, texts }))?;
            }
        }
    }
    Ok(evaluation)
}

/// A checkpoint, for which all ranks give what they have; the first writes it.
fn save<M>(
    engine: &mut Engine<M>,
    task: &mut dyn Task<M>,
    run: Option<&RunDirectory>,
    model: &ModelFiles,
    state: &mut State,
    settings: &LoopSettings,
    watch: &mut Watch<'_>,
) -> Result<()> {
    state.place = task.place()?;
    engine.updater.collect(&engine.parameters)?;
    let Some(run) = run else { return Ok(()) };
    run.save(state, model, &engine.parameters, &engine.updater, &task.carried()?)?;
    engine.updater.release();
    // A run that continues elsewhere does its matrix products in the same way.
    if let (Keep::Last, Some(choices)) = (settings.keep, engine.parameters.device().product_choices()) {
        write_atomic(&run.path().join(PRODUCTS), choices.as_bytes())?;
    }
    run.prune(settings.keep_checkpoints, state.best)?;
    (watch.on)(Event::Saved { step: state.step, path: &run.checkpoint(state.step) });
    Ok(())
}

/// A step whose results are not known yet.
struct Queued {
    /// Updates made with it.
    step: u64,
    rate: f64,
    phase: u32,
    loss: Underway,
    norm: Reading,
    start: Instant,
}

/// Writes down the results of steps as they come, a few steps behind where a GPU is at work.
struct Ledger<'a> {
    logs: Logs,
    run: &'a RunDirectory,
    /// The last checkpoint's step.
    saved_at: Option<u64>,
    steps: u64,
    log_every: u64,
    guard: Guard,
    interval: Interval,
    /// Tokens and seconds of a step, moving means over some twenty.
    recent: (f64, f64),
    /// When the last result came.
    came: Instant,
    /// How many warnings about the log were given.
    warned: usize,
}

impl<'a> Ledger<'a> {
    /// Clears up what a killed run left, and opens its log where the state is.
    fn open(run: &'a RunDirectory, state: &State, settings: &LoopSettings, watch: &mut Watch<'_>) -> Result<Self> {
        run.sweep();
        if state.step > 0 {
            // A kill right after a save leaves one checkpoint too many.
            run.prune(settings.keep_checkpoints, state.best)?;
        }
        // A run that was killed before its first checkpoint starts its log from scratch.
        let logs = Logs::open(run.path(), (!state.place.is_null()).then_some(state.step))?;
        logs.metrics.skipped().iter().for_each(|text| (watch.on)(Event::Warning { text }));
        Ok(Self::new(logs, run, (state.step > 0).then_some(state.step), settings))
    }

    fn new(logs: Logs, run: &'a RunDirectory, saved_at: Option<u64>, settings: &LoopSettings) -> Self {
        Self {
            logs,
            run,
            saved_at,
            steps: settings.steps,
            log_every: settings.log_every.max(1),
            guard: Guard::default(),
            interval: Interval::default(),
            recent: (0.0, 0.0),
            came: Instant::now(),
            warned: 0,
        }
    }

    /// Draws the run's page again.
    fn show(&mut self, watch: &mut Watch<'_>) -> Result<()> {
        let skipped = self.run.write_report()?;
        skipped.iter().skip(self.warned).for_each(|text| (watch.on)(Event::Warning { text }));
        self.warned = self.warned.max(skipped.len());
        Ok(())
    }

    fn note(&mut self, queued: Queued, state: &mut State, watch: &mut Watch<'_>) -> Result<()> {
        let Queued { step, rate, phase, loss, norm, start } = queued;
        let read = loss.tokens;
        let losses = loss.wait()?;
        let norm: f64 = norm.wait()?.iter().sum();
        let kept = || match self.saved_at {
            Some(step) => format!("the checkpoint of step {step} is in {}", self.run.checkpoint(step).display()),
            None => "there is no checkpoint yet".to_owned(),
        };
        for (number, what) in [(losses.total, "the loss"), (norm, "the gradients' norm")] {
            if !number.is_finite() {
                return Err(TrainError::NotFinite { step, what, kept: kept() });
            }
        }
        self.guard.check(step, losses.total, kept)?;
        // Steps overlap on a GPU: one took from the result before, or its own start, to its result.
        let now = Instant::now();
        let seconds = (now - start.max(self.came)).as_secs_f64();
        self.came = now;
        state.tokens += read as u64;
        state.seconds += seconds;
        self.interval.add(&losses, read, norm, seconds);
        let (tokens, time) = self.recent;
        let mean = |old: f64, new: f64| if time == 0.0 { new } else { 0.95 * old + 0.05 * new };
        self.recent = (mean(tokens, read as f64), mean(time, seconds));
        let tokens_per_s = self.recent.0 / self.recent.1.max(1e-9);
        (watch.on)(Event::Step { step, loss: losses.total, tokens_per_s, learning_rate: rate });
        if step == self.steps || step.is_multiple_of(self.log_every) {
            let line = self.interval.line(step, state, phase, rate);
            self.logs.append(&Line::Train(line))?;
            self.interval = Interval::default();
        }
        Ok(())
    }
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
    losses: Losses,
    tokens: usize,
    norm: f64,
    seconds: f64,
}

impl Interval {
    fn add(&mut self, losses: &Losses, tokens: usize, norm: f64, seconds: f64) {
        self.steps += 1;
        self.losses.add(losses);
        self.tokens += tokens;
        self.norm += norm;
        self.seconds += seconds;
    }

    fn line(&self, step: u64, state: &State, phase: u32, learning_rate: f64) -> metrics::Train {
        let n = self.steps as f64;
        metrics::Train {
            step,
            phase,
            loss: self.losses.total / n,
            losses: self.losses.named(n),
            learning_rate,
            gradient_norm: self.norm / n,
            tokens_per_s: self.tokens as f64 / self.seconds.max(1e-9),
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
