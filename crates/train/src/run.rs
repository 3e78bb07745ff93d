//! The directory of a run: the finished model itself, and beside it `recipe.toml`, `metrics.jsonl` and
//! `checkpoints/step-N/`. A checkpoint is a model directory of its own, with the optimizer's moments and a state.json;
//! it appears whole or not at all.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, File, TryLockError};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use henson_checkpoint::{
    Beside, Existing, LoadOptions, ModelBeside, SaveDType, SaveOptions, Sums, TensorFile, Weights, is_temporary, load,
    parse_json, read_limited, remove_temporaries, save_with, write_atomic,
};
use henson_models::{Model, Naming};
use henson_tensor::{Entry, Group, Parameters};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{Result, TrainError};
use crate::recipe::{differences, parse_settings, to_toml};
use crate::trainer::Evaluation;
use crate::{Updater, report};

const LOCK: &str = "run.lock";
const RECIPE: &str = "recipe.toml";
const CHECKPOINTS: &str = "checkpoints";
const STATE: &str = "state.json";
const OPTIMIZER: &str = "optimizer.safetensors";
/// Names the numbers of a parameter in [`OPTIMIZER`] that is no part of the model; other names are the optimizer's.
const VALUE: &str = "value";
/// Begins the names of states in [`OPTIMIZER`] that the next step begins with.
const CARRIED: &str = "carried.";

/// The largest state.json that is read.
const STATE_LIMIT: u64 = 1 << 20;

/// Raised when an old henson could not resume from a new one's state.
const STATE_VERSION: u32 = 1;

/// Where a run is, beside its weights and moments.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// The format's version.
    pub version: u32,
    /// Updates made.
    pub step: u64,
    /// Tokens read.
    pub tokens: u64,
    /// Seconds spent in training.
    pub seconds: f64,
    /// Where the data is: the task's own words.
    pub place: Value,
    /// Names the data.
    pub data: String,
    /// The device and kernels that computed it: others give other last bits.
    pub device: String,
    /// The best evaluation so far.
    pub best: Option<Best>,
    /// How sums over all parameters and over the parts of a batch are rounded: `rounding_on`, or 0 of versions before
    /// there was a choice.
    #[serde(default)]
    pub rounding: u32,
}

/// Raised when sums are taken in another order, so that the last bits of a run that resumes will differ: norms chunk by chunk, parts of a
/// batch in a tree, from 1 on CPUs, from 2 on GPUs.
pub(crate) fn rounding_on(device: &str) -> u32 {
    if device.starts_with("cpu") { 1 } else { 2 }
}

/// The best evaluation of a run. Of equal scores the one with the lower loss is the better, where evaluations have one: BLEU stays 0
/// until four words in a row are right, and the model learns all the same. Otherwise the last is, whose model has learned the longest.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// When.
    pub step: u64,
    /// The score, negated where higher is better; [`Best::WORST`] where it is not a number.
    pub score: f64,
    /// The loss that tells equal scores apart.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss: Option<f64>,
    /// How many updates earlier the score was reached for the first time.
    #[serde(default)]
    pub held: u64,
}

impl Best {
    /// Stands for a score that is not a number, such as the correlation of a constant: JSON has only numbers.
    pub const WORST: f64 = 1e9;

    /// The best after one more evaluation.
    pub(crate) fn after(best: Option<Self>, step: u64, found: &Evaluation, higher_is_better: bool) -> Self {
        let score = match higher_is_better {
            _ if !found.score.is_finite() => Self::WORST,
            true => -found.score,
            false => found.score,
        };
        let loss = found.loss.filter(|loss| loss.is_finite());
        match best {
            Some(best) if score > best.score => best,
            Some(best) if score == best.score => match (loss, best.loss) {
                (Some(loss), Some(lowest)) if loss >= lowest => best,
                (Some(_), Some(_)) => Self { step, score, loss, held: 0 },
                _ => Self { step, loss, held: best.held + (step - best.step), ..best },
            },
            _ => Self { step, score, loss, held: 0 },
        }
    }

    /// How many updates before `step` it was reached for the first time; all, where no score is a number.
    pub(crate) fn age(&self, step: u64) -> u64 {
        if self.score < Self::WORST { step - self.step + self.held } else { step }
    }
}

impl State {
    /// The beginning of a run.
    pub fn new(data: String, device: String) -> Self {
        let place = Value::Null;
        let (version, rounding) = (STATE_VERSION, rounding_on(&device));
        Self { version, step: 0, tokens: 0, seconds: 0.0, place, data, device, best: None, rounding }
    }
}

/// What a state.json holds: the state, the checksums of all other files, and of itself. Those of version 0.1 have the state
/// alone.
#[derive(Serialize, Deserialize)]
struct Noted {
    #[serde(flatten)]
    state: State,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    files: Option<Sums>,
    /// Of all bytes before this field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sum: Option<String>,
}

impl Noted {
    /// How the file ends, from its own checksum on.
    fn end(sum: &str) -> String {
        format!(",\n  \"sum\": \"{sum}\"\n}}\n")
    }

    fn to_json(&self) -> Vec<u8> {
        // Numbers, texts and maps of them can always be written.
        let text = serde_json::to_string_pretty(self).unwrap_or_default();
        let body = text.strip_suffix("\n}").unwrap_or(&text);
        (body.to_owned() + &Self::end(&Sums::of(body.as_bytes()))).into_bytes()
    }

    /// Whether the bytes that it was read from are those that were written.
    fn is_whole(&self, bytes: &[u8]) -> bool {
        let Some(sum) = &self.sum else { return false };
        bytes.strip_suffix(Self::end(sum).as_bytes()).is_some_and(|body| Sums::of(body) == *sum)
    }
}

/// A checkpoint that cannot be used.
struct Damage {
    step: u64,
    problem: String,
}

/// What a layer ended the last step with, and the next one begins with: the state of a recurrent layer, or what is remembered of the
/// last tokens, a row for each.
#[derive(Clone, Debug, PartialEq)]
pub struct Carried {
    /// The part of a step that it belongs to.
    pub part: usize,
    /// The layer, counted over all directions.
    pub layer: usize,
    /// `hidden` or `cell`.
    pub what: &'static str,
    /// Numbers of a row.
    pub width: usize,
    /// Row after row.
    pub numbers: Vec<f32>,
}

impl Carried {
    fn name(&self) -> String {
        format!("{CARRIED}{}.{}.{}", self.part, self.layer, self.what)
    }

    /// Part, layer and what it is, from its name.
    fn parse(name: &str) -> Option<(usize, usize, &'static str)> {
        let mut parts = name.strip_prefix(CARRIED)?.split('.');
        let mut number = || parts.next()?.parse().ok();
        let (part, layer) = (number()?, number()?);
        let what = ["hidden", "cell"].into_iter().find(|what| parts.clone().eq([*what]))?;
        Some((part, layer, what))
    }
}

/// Whether a parameter is no part of the model.
fn is_of_objective(entry: &Entry) -> bool {
    entry.group == Group::Objective
}

/// A recipe as the directory of its run keeps it.
pub trait RunRecipe: Serialize + DeserializeOwned {
    /// Keys that only watch a run, or name files, which are compared by their content.
    const MAY_CHANGE: &'static [&'static str];
    /// Keys of numbers that may be raised, for the run to continue.
    const MAY_RISE: &'static [&'static str] = &[];
}

/// A run's directory, locked for this process.
#[derive(Debug)]
pub struct RunDirectory {
    path: PathBuf,
    _lock: File,
}

/// What is saved beside the weights.
pub struct ModelFiles {
    /// The config as `transformers` writes it.
    pub config: Value,
    /// The tokenizer's files, and others.
    pub files: Vec<(String, Vec<u8>)>,
    /// What is saved of the generator that a model is trained with.
    pub generator: Option<GeneratorFiles>,
}

/// The generator of a model, in a directory of its own within the model's.
pub struct GeneratorFiles {
    /// Its config.
    pub config: Value,
    /// The names of the parameters that it has in common with the model, and which are written for both.
    pub shared: BTreeSet<String>,
}

/// The directory of a generator within its model's.
pub(crate) const GENERATOR: &str = "generator";

impl GeneratorFiles {
    /// What a parameter is called in the generator, if it has it.
    fn name(&self, entry: &Entry) -> Option<String> {
        let own = entry.name.strip_prefix(Model::GENERATOR);
        own.or(self.shared.get(&entry.name).map(String::as_str)).map(str::to_owned)
    }
}

/// What a parameter is called in a model with a generator, unless it is the generator's alone.
fn name_beside_generator(entry: &Entry) -> Option<String> {
    (!entry.name.starts_with(Model::GENERATOR)).then(|| entry.name.clone())
}

/// The weights of a model and of the generator in its directory, where there is one, whose names then have
/// [`Model::GENERATOR`] in front. They are compared with checksums, where these are known, while they are read.
pub(crate) fn weights_of(directory: &Path, sums: Option<&Sums>) -> Result<Weights> {
    let mut weights = Weights::open(directory)?;
    let inner = directory.join(GENERATOR);
    let mut generator = if inner.is_dir() { Some(Weights::open(&inner)?) } else { None };
    if let Some(sums) = sums {
        weights.expect(sums)?;
        generator.as_mut().map_or(Ok(()), |generator| generator.expect(&sums.within(GENERATOR)))?;
    }
    if let Some(generator) = generator {
        weights.attach(Model::GENERATOR, generator);
    }
    Ok(weights)
}

impl RunDirectory {
    /// Opens or makes the directory of a run. One that holds other things is refused; what a run leaves that was killed in
    /// its first moment is none.
    pub fn open(path: &Path) -> Result<Self> {
        let is_run = path.join(RECIPE).is_file();
        match fs::read_dir(path) {
            Ok(mut entries) if !is_run => {
                let is_ours = |name: &OsStr| name == LOCK || is_temporary(name);
                if entries.any(|entry| entry.is_ok_and(|entry| !is_ours(&entry.file_name()))) {
                    return Err(TrainError::NotARun { path: path.to_owned() });
                }
            }
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                fs::create_dir_all(path).map_err(TrainError::io("make", path))?;
            }
            Err(error) => return Err(TrainError::io("open", path)(error)),
        }
        let lock_path = path.join(LOCK);
        let lock =
            File::options().create(true).append(true).open(&lock_path).map_err(TrainError::io("open", &lock_path))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(TrainError::Busy { path: path.to_owned() }),
            // A file system without locks: nothing to be done about it.
            Err(TryLockError::Error(_)) => {}
        }
        remove_temporaries(path);
        remove_temporaries(&path.join(CHECKPOINTS));
        Ok(Self { path: path.to_owned(), _lock: lock })
    }

    /// The same for a run of this recipe: that of another is refused.
    pub fn open_for<R: RunRecipe>(path: &Path, recipe: &R) -> Result<Self> {
        let directory = Self::open(path)?;
        let file = path.join(RECIPE);
        if file.exists() {
            let text = fs::read_to_string(&file).map_err(TrainError::io("read", &file))?;
            let old: R = parse_settings(&[(&text, &file.display().to_string())], &[])
                .map_err(|error| TrainError::OtherKind { path: path.to_owned(), problem: error.to_string() })?;
            let differences = differences(&old, recipe, R::MAY_CHANGE, R::MAY_RISE)?;
            if !differences.is_empty() {
                return Err(TrainError::OtherRecipe { path: path.to_owned(), differences });
            }
        }
        Ok(directory)
    }

    /// Writes the recipe, by which the directory is known as that of a run.
    pub fn write_recipe<R: RunRecipe>(&self, recipe: &R) -> Result<()> {
        Ok(write_atomic(&self.path.join(RECIPE), to_toml(recipe)?.as_bytes())?)
    }

    /// Draws the run's page. Returns what is wrong with its log, for people.
    pub(crate) fn write_report(&self) -> Result<Vec<String>> {
        let run = report::Run::open(&self.path)?;
        report::write(&self.path.join("report.html"), std::slice::from_ref(&run))?;
        Ok(run.skipped)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where the checkpoint of a step is.
    pub fn checkpoint(&self, step: u64) -> PathBuf {
        self.path.join(CHECKPOINTS).join(format!("step-{step}"))
    }

    /// The steps of all checkpoints, sorted.
    pub fn steps(&self) -> Result<Vec<u64>> {
        let directory = self.path.join(CHECKPOINTS);
        let entries = match fs::read_dir(&directory) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(TrainError::io("read", directory)(error)),
        };
        let mut steps = Vec::new();
        for entry in entries {
            let name = entry.map_err(TrainError::io("read", &directory))?.file_name();
            steps.extend(name.to_str().and_then(|name| name.strip_prefix("step-")?.parse::<u64>().ok()));
        }
        steps.sort_unstable();
        Ok(steps)
    }

    /// The state of the newest checkpoint that has a readable one, if there are checkpoints at all. Its other files are
    /// looked at by [`RunDirectory::resume`].
    pub fn latest(&self) -> Result<Option<State>> {
        let mut damaged = Vec::new();
        for step in self.steps()?.into_iter().rev() {
            match self.state(step) {
                Ok(noted) => return Ok(Some(noted.state)),
                Err(error) => damaged.push(self.damage(step, error)?),
            }
        }
        if damaged.is_empty() { Ok(None) } else { Err(self.nothing_to_resume(&damaged)) }
    }

    /// Sets parameters and moments to those of the newest checkpoint whose files are all what was written, and returns its
    /// state. Newer ones that are damaged are moved aside, and `warn` gets a sentence for each.
    pub fn resume(
        &self,
        parameters: &mut Parameters,
        updater: &mut Updater,
        warn: &mut dyn FnMut(&str),
    ) -> Result<State> {
        let mut damaged = Vec::new();
        for step in self.steps()?.into_iter().rev() {
            match self.load(step, parameters, updater) {
                Ok(state) => {
                    for damage in damaged {
                        self.move_aside(&damage, step, warn)?;
                    }
                    return Ok(state);
                }
                Err(error) => damaged.push(self.damage(step, error)?),
            }
        }
        Err(self.nothing_to_resume(&damaged))
    }

    /// Sets parameters and moments to those of a checkpoint. After an error they are of no use.
    pub fn load(&self, step: u64, parameters: &mut Parameters, updater: &mut Updater) -> Result<State> {
        let directory = self.checkpoint(step);
        let Noted { state, files, .. } = self.state(step)?;
        let sums = files.unwrap_or_default();
        let weights = weights_of(&directory, Some(&sums))?;
        let mut moments = Weights::open_file(&directory.join(OPTIMIZER))?;
        moments.expect(&sums)?;
        sums.check(&directory, |name| !name.ends_with(".safetensors"))?;
        load(&weights, &Naming::PLAIN, parameters, &LoadOptions::new_head(&is_of_objective))?;
        for i in 0..parameters.entries().len() {
            let entry = &parameters.entries()[i];
            if is_of_objective(entry) {
                let numbers = moments.read_f32(&format!("{}.{VALUE}", entry.name))?;
                parameters.write(i, &numbers)?;
            }
        }
        parameters.refresh()?;
        updater.restore(state.step, parameters, |entry, what| {
            Ok::<_, TrainError>(moments.read_f32(&format!("{}.{what}", entry.name))?)
        })?;
        moments.verify()?;
        Ok(state)
    }

    /// The states that the step after a checkpoint begins with, by part and layer, hidden ones before cells.
    pub fn carried(&self, step: u64) -> Result<Vec<Carried>> {
        let moments = Weights::open_file(&self.checkpoint(step).join(OPTIMIZER))?;
        let mut found = Vec::new();
        for name in moments.names() {
            let Some((part, layer, what)) = Carried::parse(name) else { continue };
            let width = moments.get(name).and_then(|info| info.shape.last().copied()).unwrap_or(0);
            found.push(Carried { part, layer, what, width, numbers: moments.read_f32(name)? });
        }
        found.sort_by_key(|carried| (carried.part, carried.layer, carried.what != "hidden"));
        Ok(found)
    }

    /// Whether all files of a checkpoint are what was written, as far as that is known.
    pub fn verify(&self, step: u64) -> Result<()> {
        let files = self.state(step)?.files.unwrap_or_default();
        Ok(files.check(&self.checkpoint(step), |_| true)?)
    }

    /// What a checkpoint notes of itself.
    fn state(&self, step: u64) -> Result<Noted> {
        let path = self.checkpoint(step).join(STATE);
        let bytes = read_limited(&path, STATE_LIMIT)?;
        let noted: Noted = parse_json(&path, &bytes)?;
        let wrong = |problem: String| TrainError::State { path: path.clone(), problem };
        // Those of version 0.1 have neither; one of the two alone is a damaged name.
        if (noted.files.is_some() || noted.sum.is_some()) && !noted.is_whole(&bytes) {
            return Err(wrong("it is damaged: it does not match its own checksum".to_owned()));
        }
        if noted.state.version != STATE_VERSION {
            return Err(TrainError::StateVersion { path, found: noted.state.version, supported: STATE_VERSION });
        }
        if noted.state.step != step {
            return Err(wrong(format!("it belongs to step {}, its directory to step {step}", noted.state.step)));
        }
        Ok(noted)
    }

    /// Tells damage from other errors, which are none of the checkpoint's own.
    fn damage(&self, step: u64, error: TrainError) -> Result<Damage> {
        match error.is_of_the_checkpoint() {
            true => Ok(Damage { step, problem: with_cause(&error) }),
            false => Err(error),
        }
    }

    fn move_aside(&self, damage: &Damage, instead: u64, warn: &mut dyn FnMut(&str)) -> Result<()> {
        let path = self.checkpoint(damage.step);
        let aside = path.with_file_name(format!("damaged-step-{}", damage.step));
        match fs::remove_dir_all(&aside) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(TrainError::io("delete", &aside)(error));
            }
            _ => fs::rename(&path, &aside).map_err(TrainError::io("move", &path))?,
        }
        warn(&format!(
            "the checkpoint of step {} is damaged, and the one of step {instead} is used instead ({}); the damaged one is \
             now {}, delete it when you no longer need it",
            damage.step,
            damage.problem,
            aside.display()
        ));
        Ok(())
    }

    fn nothing_to_resume(&self, damaged: &[Damage]) -> TrainError {
        let path = self.path.join(CHECKPOINTS);
        let found: Vec<String> =
            damaged.iter().map(|damage| format!("  step {}: {}", damage.step, damage.problem)).collect();
        let problem = format!(
            "no checkpoint can be used; copy one from a backup, or delete this directory to train from scratch\n{}",
            found.join("\n")
        );
        TrainError::State { path, problem }
    }

    /// Writes the checkpoint of a step: weights, moments, carried states, state, all or nothing.
    pub fn save(
        &self,
        state: &State,
        model: &ModelFiles,
        parameters: &Parameters,
        updater: &Updater,
        carried: &[Carried],
    ) -> Result<()> {
        // Sorted by name, like weights.
        let entries = parameters.entries();
        let mut order: Vec<usize> = (0..entries.len()).collect();
        order.sort_by_key(|&i| &entries[i].name);
        let (mut tensors, mut sources) = (Vec::new(), Vec::new());
        for i in order {
            let value = is_of_objective(&entries[i]).then_some((VALUE, entries[i].shape));
            for (what, shape) in updater.kept(&entries[i]).into_iter().chain(value) {
                tensors.push((format!("{}.{what}", entries[i].name), shape.sizes().to_vec()));
                sources.push((i, what));
            }
        }
        let own = tensors.len();
        for state in carried {
            tensors.push((state.name(), vec![state.numbers.len() / state.width.max(1), state.width]));
        }
        let read = |place: usize| {
            if let Some(state) = place.checked_sub(own).and_then(|place| carried.get(place)) {
                return Ok(state.numbers.clone());
            }
            let (i, what) = sources[place];
            if what == VALUE {
                return parameters.read(i);
            }
            updater.read(&entries[i], what)
        };
        let moments = TensorFile { name: OPTIMIZER, tensors, read: &read };
        let last = |sums: &Sums| Noted { state: state.clone(), files: Some(sums.clone()), sum: None }.to_json();
        let beside = Beside { tensors: vec![moments], last: Some((STATE, &last)), ..Beside::default() };
        let options = SaveOptions { existing: Existing::Replace, ..SaveOptions::default() };
        let path = self.checkpoint(state.step);
        self.write(&path, model, beside, parameters, &options)
    }

    /// Writes a model, and its generator within.
    fn write(
        &self,
        path: &Path,
        model: &ModelFiles,
        mut beside: Beside<'_>,
        parameters: &Parameters,
        options: &SaveOptions,
    ) -> Result<()> {
        let ModelFiles { config, files, generator } = model;
        let save = |beside: &Beside<'_>| save_with(path, files, beside, config, parameters, SaveDType::F32, options);
        let Some(generator) = generator else { return Ok(save(&beside)?) };
        let name = |entry: &Entry| generator.name(entry);
        // A shorter life than that of what else stands beside.
        let Beside { tensors, last, .. } = std::mem::take(&mut beside);
        let models = vec![ModelBeside { directory: GENERATOR, config: &generator.config, name: &name }];
        Ok(save(&Beside { own: Some(&name_beside_generator), models, tensors, last })?)
    }

    /// Writes the finished model into the run's directory.
    pub fn finish(&self, model: &ModelFiles, parameters: &Parameters) -> Result<()> {
        let options = SaveOptions { existing: Existing::Merge, ..SaveOptions::default() };
        self.write(&self.path, model, Beside::default(), parameters, &options)
    }

    /// Whether the finished model in the directory is that of a step's checkpoint: equal weights give equal bytes.
    pub fn is_finished(&self, step: u64) -> Result<bool> {
        let checkpoint = self.checkpoint(step);
        // Opened first: finishes a save that was killed halfway.
        if Weights::open(&self.path).is_err() {
            return Ok(false);
        }
        let generator = checkpoint.join(GENERATOR);
        let mut models = vec![(checkpoint, self.path.clone())];
        if generator.is_dir() {
            models.push((generator, self.path.join(GENERATOR)));
        }
        for (saved, finished) in models {
            for entry in fs::read_dir(&saved).map_err(TrainError::io("read", &saved))? {
                let name = entry.map_err(TrainError::io("read", &saved))?.file_name();
                let is_weights =
                    name.to_str().is_some_and(|name| name.starts_with("model") && name.ends_with("safetensors"));
                if is_weights && !same_bytes(&saved.join(&name), &finished.join(&name))? {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Deletes all checkpoints but the last `keep` and the one of the best step.
    pub fn prune(&self, keep: usize, best: Option<Best>) -> Result<()> {
        let steps = self.steps()?;
        let old = &steps[..steps.len().saturating_sub(keep)];
        for &step in old.iter().filter(|step| best.is_none_or(|best| best.step != **step)) {
            let path = self.checkpoint(step);
            // Renamed first: what is deleted half is no checkpoint any more.
            let gone = path.with_file_name(format!(".gone-{step}"));
            fs::rename(&path, &gone).map_err(TrainError::io("delete", &path))?;
            fs::remove_dir_all(&gone).map_err(TrainError::io("delete", &gone))?;
        }
        Ok(())
    }

    /// Deletes all checkpoints.
    pub fn delete_checkpoints(&self) -> Result<()> {
        let path = self.path.join(CHECKPOINTS);
        match fs::remove_dir_all(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(TrainError::io("delete", &path)(error)),
            _ => Ok(()),
        }
    }

    /// Says what to do where the best model cannot be read again.
    pub(crate) fn lost_best(&self, step: u64, error: TrainError) -> TrainError {
        if !error.is_of_the_checkpoint() {
            return error;
        }
        let problem = format!(
            "this checkpoint has the best model and cannot be used; delete {} to train from scratch with the same result\n{error}",
            self.path.join(CHECKPOINTS).display()
        );
        TrainError::State { path: self.checkpoint(step), problem }
    }

    /// Deletes what a kill in the middle of [`RunDirectory::prune`] left.
    pub fn sweep(&self) {
        let Ok(entries) = fs::read_dir(self.path.join(CHECKPOINTS)) else { return };
        for entry in entries.flatten().filter(|entry| entry.file_name().to_string_lossy().starts_with(".gone-")) {
            // Best effort: it only takes room.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// An error with the reason that the system gave, if it is the system's.
fn with_cause(error: &TrainError) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

fn same_bytes(a: &Path, b: &Path) -> Result<bool> {
    let open = |path: &Path| File::open(path).map(|file| BufReader::with_capacity(1 << 20, file));
    let (Ok(mut left), Ok(mut right)) = (open(a), open(b)) else { return Ok(false) };
    loop {
        let (x, y) =
            (left.fill_buf().map_err(TrainError::io("read", a))?, right.fill_buf().map_err(TrainError::io("read", b))?);
        let n = x.len().min(y.len());
        if x[..n] != y[..n] {
            return Ok(false);
        }
        if n == 0 {
            return Ok(x.is_empty() && y.is_empty());
        }
        left.consume(n);
        right.consume(n);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_equal_evaluations_the_last_is_the_best() {
        let scores = [(1, f64::NAN), (2, 3.0), (4, 1.0), (6, 1.0), (8, 2.0), (9, 1.0), (10, f64::NAN)];
        let best = |scores: &[(u64, f64)], higher| {
            let found = |score: f64| Evaluation { score, ..Evaluation::default() };
            scores
                .iter()
                .fold(None, |best, (step, score)| Some(Best::after(best, *step, &found(*score), higher)))
                .unwrap()
        };
        assert_eq!(best(&scores, false), Best { step: 9, score: 1.0, loss: None, held: 5 });
        assert_eq!(best(&scores, true), Best { step: 2, score: -3.0, loss: None, held: 0 });
        assert_eq!((best(&scores, false).age(12), best(&scores, true).age(12)), (8, 10));
        // Without any score, nothing got better since the beginning.
        let none = best(&scores[..1], true);
        assert_eq!((none, none.age(12)), (Best { step: 1, score: Best::WORST, loss: None, held: 0 }, 12));
        // States that were written before there was such a key.
        let old: Best = serde_json::from_str(r#"{"step": 4, "score": 1.0}"#).unwrap();
        assert_eq!(old, Best { step: 4, score: 1.0, loss: None, held: 0 });
    }
}
