//! The directory of a run: the finished model itself, and beside it `recipe.toml`, `metrics.jsonl` and
//! `checkpoints/step-N/`. A checkpoint is a model directory of its own, with the optimizer's moments and a state.json;
//! it appears whole or not at all.

use std::fs::{self, File, TryLockError};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use henson_checkpoint::{
    Existing, LoadOptions, SaveDType, SaveOptions, TensorFile, Weights, load, read_json, save_with,
};
use henson_models::bert::NAMING;
use henson_tensor::{Entry, Parameters};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::Updater;
use crate::error::{Result, TrainError};

const CHECKPOINTS: &str = "checkpoints";
const STATE: &str = "state.json";
const OPTIMIZER: &str = "optimizer.safetensors";
/// Names the moments of a parameter in [`OPTIMIZER`].
const MOMENTS: [&str; 2] = ["first", "second"];

/// The largest state.json that is read.
const STATE_LIMIT: u64 = 1 << 20;

/// Raised when an old henson could not go on from a new one's state.
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
}

/// The best evaluation of a run; of equal ones the last, whose model has learnt the longest.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// When.
    pub step: u64,
    /// The score; lower is better.
    pub score: f64,
    /// How many updates earlier the score was reached for the first time.
    #[serde(default)]
    pub held: u64,
}

impl Best {
    /// The best after one more evaluation.
    pub(crate) fn after(best: Option<Self>, step: u64, score: f64) -> Option<Self> {
        match best {
            _ if score.is_nan() => best,
            Some(best) if score > best.score => Some(best),
            Some(best) if score == best.score => Some(Self { step, held: best.held + (step - best.step), ..best }),
            _ => Some(Self { step, score, held: 0 }),
        }
    }
}

impl State {
    /// The beginning of a run.
    pub fn new(data: String, device: String) -> Self {
        let place = Value::Null;
        Self { version: STATE_VERSION, step: 0, tokens: 0, seconds: 0.0, place, data, device, best: None }
    }
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
}

impl RunDirectory {
    /// Opens or makes the directory of a run. One that holds other things is refused.
    pub fn open(path: &Path) -> Result<Self> {
        let is_run = path.join("recipe.toml").is_file();
        match fs::read_dir(path) {
            // What a run that was killed in its first moment leaves, too.
            Ok(mut entries) if !is_run => {
                let foreign = entries.any(|entry| entry.is_ok_and(|entry| entry.file_name() != "run.lock"));
                if foreign {
                    return Err(TrainError::NotARun { path: path.to_owned() });
                }
            }
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                fs::create_dir_all(path).map_err(TrainError::io("make", path))?;
            }
            Err(error) => return Err(TrainError::io("open", path)(error)),
        }
        let lock_path = path.join("run.lock");
        let lock =
            File::options().create(true).append(true).open(&lock_path).map_err(TrainError::io("open", &lock_path))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(TrainError::Busy { path: path.to_owned() }),
            // A file system without locks: nothing to be done about it.
            Err(TryLockError::Error(_)) => {}
        }
        Ok(Self { path: path.to_owned(), _lock: lock })
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

    /// The state of the newest checkpoint, if there is one.
    pub fn latest(&self) -> Result<Option<State>> {
        let Some(step) = self.steps()?.last().copied() else { return Ok(None) };
        let path = self.checkpoint(step).join(STATE);
        let state: State = read_json(&path, STATE_LIMIT).map_err(|error| self.damaged(step, error.into()))?;
        let wrong = |problem: String| TrainError::State { path: path.clone(), problem };
        if state.version != STATE_VERSION {
            let problem = format!("its version is {}, this henson reads {STATE_VERSION}", state.version);
            return Err(wrong(problem));
        }
        if state.step != step {
            return Err(wrong(format!("it is of step {}, its directory of step {step}", state.step)));
        }
        Ok(Some(state))
    }

    /// Sets parameters and moments to those of a checkpoint.
    pub fn load(&self, state: &State, parameters: &mut Parameters, updater: &mut Updater) -> Result<()> {
        self.read(state, parameters, updater).map_err(|error| self.damaged(state.step, error))
    }

    /// Says what to do about a checkpoint whose files cannot be used. Other errors are none of its own.
    fn damaged(&self, step: u64, error: TrainError) -> TrainError {
        let TrainError::Checkpoint(error) = error else { return error };
        let steps = self.steps().unwrap_or_default();
        let before = steps.iter().rev().find(|other| **other < step);
        let next = before.map_or("to begin anew".to_owned(), |before| format!("to go on from step {before}"));
        let problem = format!("this checkpoint cannot be read; if it is damaged, delete it {next}\n{error}");
        TrainError::State { path: self.checkpoint(step), problem }
    }

    fn read(&self, state: &State, parameters: &mut Parameters, updater: &mut Updater) -> Result<()> {
        let directory = self.checkpoint(state.step);
        load(&Weights::open(&directory)?, &NAMING, parameters, &LoadOptions::strict())?;
        let moments = Weights::open_file(&directory.join(OPTIMIZER))?;
        updater.restore(state.step, parameters, |entry| {
            let [first, second] = MOMENTS.map(|moment| moments.read_f32(&format!("{}.{moment}", entry.name)));
            Ok::<_, TrainError>([first?, second?])
        })
    }

    /// Writes the checkpoint of a step: weights, moments, state, all or nothing.
    pub fn save(&self, state: &State, model: &ModelFiles, parameters: &Parameters, updater: &Updater) -> Result<()> {
        // Sorted by name, like weights.
        let mut entries: Vec<&Entry> = parameters.entries().iter().collect();
        entries.sort_by_key(|entry| &entry.name);
        let shapes = |entry: &&Entry| {
            let shape = entry.shape.sizes().to_vec();
            MOMENTS.map(|moment| (format!("{}.{moment}", entry.name), shape.clone()))
        };
        let read = |i: usize| {
            let [first, second] = updater.moments(entries[i / 2])?;
            Ok(if i.is_multiple_of(2) { first } else { second })
        };
        let moments = TensorFile { name: OPTIMIZER, tensors: entries.iter().flat_map(shapes).collect(), read: &read };
        let mut files = model.files.clone();
        let bytes = serde_json::to_vec_pretty(state)
            .map_err(|error| TrainError::State { path: PathBuf::from(STATE), problem: error.to_string() })?;
        files.push((STATE.to_owned(), bytes));
        let options = SaveOptions { existing: Existing::Replace, ..SaveOptions::default() };
        let path = self.checkpoint(state.step);
        save_with(&path, &files, &[moments], &model.config, parameters, SaveDType::F32, &options)?;
        Ok(())
    }

    /// Writes the finished model into the run's directory.
    pub fn finish(&self, model: &ModelFiles, parameters: &Parameters) -> Result<()> {
        let options = SaveOptions { existing: Existing::Merge, ..SaveOptions::default() };
        henson_checkpoint::save(&self.path, &model.files, &model.config, parameters, SaveDType::F32, &options)?;
        Ok(())
    }

    /// Whether the finished model in the directory is that of a step's checkpoint: equal weights give equal bytes.
    pub fn is_finished(&self, step: u64) -> Result<bool> {
        let checkpoint = self.checkpoint(step);
        // Opened first: finishes a save that was killed halfway.
        if Weights::open(&self.path).is_err() {
            return Ok(false);
        }
        for entry in fs::read_dir(&checkpoint).map_err(TrainError::io("read", &checkpoint))? {
            let name = entry.map_err(TrainError::io("read", &checkpoint))?.file_name();
            let is_weights =
                name.to_str().is_some_and(|name| name.starts_with("model") && name.ends_with("safetensors"));
            if is_weights && !same_bytes(&checkpoint.join(&name), &self.path.join(&name))? {
                return Ok(false);
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

    /// Deletes what a kill in the middle of [`RunDirectory::prune`] left.
    pub fn sweep(&self) {
        let Ok(entries) = fs::read_dir(self.path.join(CHECKPOINTS)) else { return };
        for entry in entries.flatten().filter(|entry| entry.file_name().to_string_lossy().starts_with(".gone-")) {
            // Best effort: it only takes room.
            let _ = fs::remove_dir_all(entry.path());
        }
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
        let best = scores.iter().fold(None, |best, (step, score)| Best::after(best, *step, *score));
        assert_eq!(best, Some(Best { step: 9, score: 1.0, held: 5 }));
        // States that were written before there was such a key.
        let old: Best = serde_json::from_str(r#"{"step": 4, "score": 1.0}"#).unwrap();
        assert_eq!(old, Best { step: 4, score: 1.0, held: 0 });
    }
}
