//! All probes of a probing, one after the other, each in a directory of its own within that of the probing: a stopped one continues
//! with the probe that it was at.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use henson_checkpoint::{ModelDirectory, read_json, write_atomic};
use henson_infer::{Layers, Model, Want};
use henson_models::probe::{EdgeProbe, EdgeProbeSettings};
use henson_tensor::{Builder, DType, Device};
use henson_train::{
    Clip, Engine, Event, Keep, LoopSettings, ModelFiles, OptimizerSettings, Outcome, RunDirectory, Schedule,
    TrainError, TrainingRun, Watch,
};
use sha2::{Digest, Sha256};

use super::control::{control_labels, own_labels};
use super::data::{EdgeSet, read_sets};
use super::encoded::Encoded;
use super::learner::{Labels, ProbeLearner, Seen, total};
use super::page;
use super::recipe::ProbeRecipe;
use super::scores::{ControlScore, Counted, Cumulative, ProbeResults, ProbeScore, centre_of_gravity, shares};
use crate::batches::ShuffledBatches;
use crate::error::TaskError;
use crate::finetune::{RESULTS, thin};

/// The largest file of results that is read.
const RESULTS_LIMIT: u64 = 16 << 20;

/// A probing before it begins.
pub struct ProbePlan {
    /// The recipe, as it will be saved.
    pub recipe: ProbeRecipe,
    /// What probes are trained on.
    pub train: EdgeSet,
    /// What they are scored on.
    pub dev: EdgeSet,
    /// The number of the last layer; 0 is the embeddings.
    pub last_layer: usize,
    data: String,
}

/// How a probing ended.
#[derive(Debug)]
pub enum ProbeEnded {
    /// All probes are trained and scored.
    Finished(Box<ProbeResults>),
    /// Stopped after so many updates of this probe; the same call resumes.
    Stopped(String, u64),
}

/// One probe of a probing.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Kind {
    /// Its directory.
    name: String,
    /// How many layers it reads.
    layers: usize,
    control: bool,
    untrained: bool,
}

impl ProbePlan {
    /// Reads the files of a recipe.
    pub fn new(recipe: ProbeRecipe) -> Result<Self, TaskError> {
        recipe.check()?;
        let (mut train, mut dev) =
            read_sets(recipe.task, Path::new(&recipe.train), Path::new(&recipe.dev), &recipe.files)?;
        thin(&mut train.examples, recipe.limit);
        thin(&mut dev.examples, recipe.dev_limit);
        let directory = Model::encoder_directory(recipe.directory())?;
        let config = Model::read_config(&ModelDirectory::open(&directory).map_err(TrainError::from)?)?;
        let mut hash = Sha256::new();
        for set in [&train, &dev] {
            hash.update(format!("{:?}", set.labels));
            set.examples.iter().for_each(|example| hash.update(format!("{:?}{:?}", example.words, example.targets)));
        }
        let data = hash.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect();
        Ok(Self { recipe, train, dev, last_layer: config.model.sizes().num_hidden_layers, data })
    }

    /// How many probes are trained.
    pub fn probes(&self) -> usize {
        self.kinds().len()
    }

    /// Updates of each.
    pub fn steps(&self) -> u64 {
        self.steps_per_epoch() * self.recipe.epochs
    }

    fn steps_per_epoch(&self) -> u64 {
        self.train.examples.len().div_ceil(self.recipe.batch_size).max(1) as u64
    }

    /// All probes, the one of all layers first.
    fn kinds(&self) -> Vec<Kind> {
        let all = self.last_layer + 1;
        let kind = |name: String, layers: usize| Kind { name, layers, control: false, untrained: false };
        let up_to = |layers: usize| kind(format!("layers-0-to-{}", layers - 1), layers);
        let mut kinds = vec![up_to(all)];
        if self.recipe.control {
            kinds.push(Kind { control: true, ..kind("control".to_owned(), all) });
        }
        if self.recipe.random_encoder {
            kinds.push(Kind { untrained: true, ..kind("random-encoder".to_owned(), all) });
        }
        if self.recipe.cumulative {
            kinds.extend((1..all).map(up_to));
        }
        kinds
    }

    /// Names the data of a probe.
    fn data_of(&self, kind: &Kind) -> String {
        format!("{} {}", self.data, kind.name)
    }

    fn schedule(&self) -> Schedule {
        let (recipe, steps) = (&self.recipe, self.steps());
        Schedule::of_task(recipe.schedule, recipe.learning_rate, recipe.warmup, steps)
    }

    /// Evaluations and checkpoints are those of epochs.
    fn loop_settings(&self) -> LoopSettings {
        let epoch = self.steps_per_epoch();
        LoopSettings {
            steps: self.steps(),
            checkpoint_every: epoch,
            keep_checkpoints: 1,
            eval_every: epoch,
            log_every: epoch,
            log_samples: false,
            stop_at: None,
            higher_is_better: true,
            patience: self.recipe.patience,
            keep: Keep::Best,
        }
    }

    /// A probe with its first weights; it computes on the processor.
    fn engine(&self, kind: &Kind, width: usize, host: &Device) -> Result<Engine<EdgeProbe>, TaskError> {
        let recipe = &self.recipe;
        let mut builder = Builder::new();
        let settings = EdgeProbeSettings {
            layers: kind.layers,
            width,
            projection: recipe.projection_size,
            hidden: recipe.hidden_size,
            labels: self.train.labels.len(),
            pairs: self.train.pairs,
            dropout: recipe.dropout as f32,
        };
        let probe = EdgeProbe::build(&mut builder, settings);
        let mut parameters = builder.finish(host, DType::F32).map_err(TrainError::from)?;
        parameters.initialise(recipe.seed).map_err(TrainError::from)?;
        let optimizer = OptimizerSettings {
            epsilon: 1e-8,
            weight_decay: 0.0,
            clip: if recipe.clip > 0.0 { Clip::GlobalNorm(recipe.clip) } else { Clip::Off },
            ..OptimizerSettings::default()
        };
        Ok(Engine::new(probe, parameters, optimizer, recipe.seed)?)
    }
}

/// Trains and scores all probes in a directory, from where an earlier call was stopped. `read` is told how many of all texts the
/// encoder has read, which it does again for a probing that resumes.
pub fn probe(
    plan: &ProbePlan,
    device: &Device,
    out: &Path,
    read: &mut dyn FnMut(usize, usize),
    watch: &mut Watch<'_>,
) -> Result<ProbeEnded, TaskError> {
    let directory = RunDirectory::open_for(out, &plan.recipe)?;
    let mut scores = BTreeMap::new();
    for untrained in [false, true] {
        let kinds: Vec<Kind> = plan.kinds().into_iter().filter(|kind| kind.untrained == untrained).collect();
        let mut missing = Vec::new();
        for kind in kinds {
            match finished(plan, &kind, out)? {
                Some(score) => drop(scores.insert(kind.name, score)),
                None => missing.push(kind),
            }
        }
        let Some(first) = missing.first() else { continue };
        let model = open(plan, device, untrained)?;
        directory.write_recipe(&plan.recipe)?;
        let sets = match encode(plan, &model, read, watch.stop) {
            Err(TaskError::Stopped) => return Ok(ProbeEnded::Stopped(first.name.clone(), 0)),
            sets => sets?,
        };
        for kind in missing {
            (watch.on)(Event::Part { name: &kind.name, steps: plan.steps() });
            match train_one(plan, &kind, &model, &sets, out, watch)? {
                One::Finished(score) => drop(scores.insert(kind.name, *score)),
                One::Stopped(step) => return Ok(ProbeEnded::Stopped(kind.name, step)),
            }
        }
    }
    let results = results(plan, scores)?;
    let wrong = |error: serde_json::Error| TrainError::State { path: out.join(RESULTS), problem: error.to_string() };
    let json = serde_json::to_vec_pretty(&results).map_err(wrong)?;
    write_atomic(&out.join("report.html"), page::render(&results).as_bytes()).map_err(TrainError::from)?;
    write_atomic(&out.join(RESULTS), &json).map_err(TrainError::from)?;
    Ok(ProbeEnded::Finished(Box::new(results)))
}

/// The encoder, or one of its shape with random weights.
fn open(plan: &ProbePlan, device: &Device, untrained: bool) -> Result<Model, TaskError> {
    let (path, dtype) = (plan.recipe.directory(), DType::from(plan.recipe.dtype));
    Ok(match untrained {
        true => Model::open_untrained(path, device, dtype, plan.recipe.seed)?,
        false => Model::open(path, device, dtype, Want::Encoder)?,
    })
}

/// Both files as the encoder reads them.
struct Sets<'a> {
    train: Encoded<'a>,
    dev: Encoded<'a>,
}

/// Reads both files, and keeps their vectors where memory suffices.
fn encode<'a>(
    plan: &ProbePlan,
    model: &'a Model,
    read: &mut dyn FnMut(usize, usize),
    stop: &AtomicBool,
) -> Result<Sets<'a>, TaskError> {
    let max_length = model.config().model.own_length(plan.recipe.max_length).min(model.most_tokens());
    let mut train = Encoded::new(model, &plan.train, max_length)?;
    let mut dev = Encoded::new(model, &plan.dev, max_length)?;
    if train.bytes()? + dev.bytes()? <= plan.recipe.cache_mib << 20 {
        let (mut before, all) = (0, train.len() + dev.len());
        for set in [&mut train, &mut dev] {
            set.keep(|done| {
                read(before + done, all);
                if stop.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            })?;
            before += set.len();
        }
    }
    Ok(Sets { train, dev })
}

fn directory_of(kind: &Kind, out: &Path) -> PathBuf {
    out.join("probes").join(&kind.name)
}

/// The score of a probe that is finished already.
fn finished(plan: &ProbePlan, kind: &Kind, out: &Path) -> Result<Option<ProbeScore>, TaskError> {
    let path = directory_of(kind, out).join(RESULTS);
    if !path.exists() {
        return Ok(None);
    }
    let score: ProbeScore = read_json(&path, RESULTS_LIMIT).map_err(TrainError::from)?;
    if score.data != plan.data_of(kind) || score.mixing_weights.len() != kind.layers {
        return Err(TrainError::OtherData { path: out.to_owned() }.into());
    }
    // Killed while they were deleted, some are still there.
    RunDirectory::open_for(&directory_of(kind, out), &plan.recipe)?.delete_checkpoints()?;
    Ok(Some(score))
}

/// How the training of one probe ended.
enum One {
    Finished(Box<ProbeScore>),
    Stopped(u64),
}

fn train_one(
    plan: &ProbePlan,
    kind: &Kind,
    model: &Model,
    sets: &Sets<'_>,
    out: &Path,
    watch: &mut Watch<'_>,
) -> Result<One, TaskError> {
    let (recipe, out) = (&plan.recipe, directory_of(kind, out));
    let host = model.parameters().device().host().map_err(|error| TrainError::Task(error.into()))?;
    let mut run = TrainingRun::open(&out, recipe, plan.loop_settings())?;
    run.find(&plan.data_of(kind), &host, watch)?;
    let mut engine = plan.engine(kind, model.width_of(Layers::One(0))?, &host)?;
    run.write_recipe(recipe)?;
    run.resume(&mut engine, watch)?;
    let labels: [Labels; 2] = [&plan.train, &plan.dev].map(|set| match kind.control {
        true => control_labels(recipe.seed, &plan.train, set),
        false => own_labels(set),
    });
    let mut learner = ProbeLearner {
        train: Seen { encoded: &sets.train, labels: &labels[0] },
        dev: Seen { encoded: &sets.dev, labels: &labels[1] },
        label_count: plan.train.labels.len(),
        layers: kind.layers,
        batches: ShuffledBatches::new(recipe.seed, plan.train.examples.len(), recipe.batch_size),
        schedule: plan.schedule(),
        found: None,
    };
    let files = ModelFiles { config: serde_json::json!({ "probe": kind.name }), files: Vec::new(), generator: None };
    if run.train(&mut engine, &mut learner, &files, watch)? != Outcome::Finished {
        return Ok(One::Stopped(run.state().step));
    }
    // What the probe says that the run ends with.
    if learner.found.as_ref().is_none_or(|(step, _)| *step != run.best_step()) {
        learner.look(&engine, run.best_step())?;
    }
    let score = score(plan, kind, &run, &engine, &learner)?;
    let wrong = |error: serde_json::Error| TrainError::State { path: out.join(RESULTS), problem: error.to_string() };
    let json = serde_json::to_vec_pretty(&score).map_err(wrong)?;
    run.finish_with(|_| Ok(()), &[(RESULTS, json)])?;
    Ok(One::Finished(Box::new(score)))
}

fn score(
    plan: &ProbePlan,
    kind: &Kind,
    run: &TrainingRun,
    engine: &Engine<EdgeProbe>,
    learner: &ProbeLearner<'_>,
) -> Result<ProbeScore, TaskError> {
    let counts = learner.found.as_ref().map(|(_, counts)| counts.as_slice()).unwrap_or_default();
    let place = engine.parameters.entries().iter().position(|entry| entry.name == EdgeProbe::MIXING_WEIGHTS);
    let weights = place.map(|place| engine.parameters.read(place)).transpose().map_err(TrainError::from)?;
    let (all, mixing_weights) = (total(counts), shares(&weights.unwrap_or_default()));
    let of_labels = plan.dev.labels.iter().zip(counts).filter(|(_, counts)| counts.expected > 0);
    Ok(ProbeScore {
        f1: all.f1(),
        precision: all.precision(),
        recall: all.recall(),
        centre_of_gravity: centre_of_gravity(&mixing_weights),
        mixing_weights,
        labels: of_labels.map(|(name, counts)| (name.clone(), counts.f1())).collect(),
        best_step: run.best_step(),
        steps: run.state().step,
        seconds: run.state().seconds,
        data: plan.data_of(kind),
    })
}

/// Puts the scores of all probes together.
fn results(plan: &ProbePlan, mut scores: BTreeMap<String, ProbeScore>) -> Result<ProbeResults, TaskError> {
    let kinds = plan.kinds();
    let f1 = |kind: &Kind| scores.get(&kind.name).map(|score| score.f1);
    let mut cumulative: Vec<&Kind> = kinds.iter().filter(|kind| !kind.control && !kind.untrained).collect();
    cumulative.sort_by_key(|kind| kind.layers);
    let cumulative = cumulative.into_iter().map(f1).collect::<Option<Vec<f64>>>().map(Cumulative::new);
    let control = kinds.iter().find(|kind| kind.control).and_then(f1);
    let full = scores.remove(&kinds[0].name).ok_or(TaskError::Stopped)?;
    let counted = |set: &EdgeSet| Counted { texts: set.examples.len(), targets: set.targets() };
    Ok(ProbeResults {
        task: plan.recipe.task.name(),
        model: plan.recipe.model.clone(),
        seed: plan.recipe.seed,
        train: counted(&plan.train),
        dev: counted(&plan.dev),
        label_count: plan.train.labels.len(),
        cumulative: cumulative.filter(|_| plan.recipe.cumulative),
        control: control.map(|control| ControlScore::new(full.f1, control)),
        random_encoder: kinds.iter().find(|kind| kind.untrained).and_then(|kind| scores.remove(&kind.name)),
        full,
    })
}
