//! The life of a run, the same whatever is trained: its directory is opened and compared with what is asked for, its newest
//! checkpoint is loaded, the loop runs with evaluations and checkpoints, and in the end the model is chosen and all that stays
//! is written.

use std::path::Path;
use std::sync::Arc;

use henson_checkpoint::{read_limited, write_atomic};
use henson_ranks::Ranks;
use henson_tensor::{Device, Isa, Parameters};

use crate::error::{Result, TrainError};
use crate::run::{Carried, ModelFiles, RunDirectory, RunRecipe, State, rounding_on};
use crate::together;
use crate::trainer::{Engine, Event, Keep, LoopSettings, Outcome, PRODUCTS, Task, Watch, train};

/// The largest list of how a GPU does its matrix products that is read.
const PRODUCTS_LIMIT: u64 = 16 << 20;

/// A run, from its opening to its end.
pub struct TrainingRun {
    /// None on ranks that are not the first: they have no business with files.
    directory: Option<RunDirectory>,
    ranks: Option<Arc<Ranks>>,
    settings: LoopSettings,
    state: State,
    /// What computes it now.
    device: String,
}

impl TrainingRun {
    /// Opens or makes the directory of a run, unless it holds other things or a run of another recipe. Where the run is, says
    /// [`TrainingRun::find`].
    pub fn open<R: RunRecipe>(out: &Path, recipe: &R, settings: LoopSettings) -> Result<Self> {
        Self::open_with(out, recipe, settings, None)
    }

    /// The same by several ranks, of which the first has the directory.
    pub fn open_with<R: RunRecipe>(
        out: &Path,
        recipe: &R,
        settings: LoopSettings,
        ranks: Option<Arc<Ranks>>,
    ) -> Result<Self> {
        let (device, state) = (String::new(), State::new(String::new(), String::new()));
        let is_first = ranks.as_ref().is_none_or(|ranks| ranks.rank() == 0);
        let directory = is_first.then(|| RunDirectory::open_for(out, recipe)).transpose()?;
        Ok(Self { directory, ranks, settings, state, device })
    }

    /// Whether this process writes the run's files: the only one, or the first of several ranks.
    pub fn is_first(&self) -> bool {
        self.directory.is_some()
    }

    /// Writes the recipe, by which the directory is known as that of a run.
    pub fn write_recipe<R: RunRecipe>(&self, recipe: &R) -> Result<()> {
        self.directory.as_ref().map_or(Ok(()), |directory| directory.write_recipe(recipe))
    }

    /// Finds the run's newest checkpoint, which must be of the same data, or its beginning.
    pub fn find(&mut self, data: &str, device: &Device, watch: &mut Watch<'_>) -> Result<()> {
        self.device = device.isa().map_or_else(|| device.to_string(), |isa| format!("cpu {isa}"));
        let fresh = || State::new(data.to_owned(), self.device.clone());
        let found = match &self.directory {
            None => fresh(),
            Some(directory) => match directory.latest()? {
                Some(state) if state.data != data => {
                    return Err(TrainError::OtherData { path: directory.path().to_owned() });
                }
                Some(state) => state,
                None => fresh(),
            },
        };
        self.state = together::from_first(self.ranks.as_ref(), found)?;
        if !self.is_first() {
            return Ok(());
        }
        if self.state.device != self.device {
            // What suits a processor best may have changed since, but its kernels are still there.
            let set = self.state.device.strip_prefix("cpu ").filter(|_| device.isa().is_some());
            let kept = set.filter(|set| set.parse::<Isa>().is_ok());
            let text = format!(
                "this run started on {} and resumes on {}: its last bits will differ from those of a run on one of them{}",
                self.state.device,
                self.device,
                kept.map_or_else(String::new, |set| format!("; `--kernels {set}` computes as it began"))
            );
            (watch.on)(Event::Warning { text: &text });
        }
        if self.state.rounding != rounding_on(&self.state.device) {
            let text = "this run was started by a version of henson that rounds norms and sums over parts of a batch in another \
                        order: its last bits will differ from those of a run by one version";
            (watch.on)(Event::Warning { text });
        }
        Ok(())
    }

    /// Deletes all checkpoints.
    pub fn delete_checkpoints(&self) -> Result<()> {
        self.directory.as_ref().map_or(Ok(()), RunDirectory::delete_checkpoints)
    }

    /// Its directory, unless that is another rank's.
    pub fn directory(&self) -> Option<&RunDirectory> {
        self.directory.as_ref()
    }

    /// Where it is.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Whether all steps were made and the model of the last is in the directory.
    pub fn is_finished(&self) -> Result<bool> {
        let finished = match &self.directory {
            Some(directory) => self.state.step >= self.settings.steps && directory.is_finished(self.state.step)?,
            None => false,
        };
        together::from_first(self.ranks.as_ref(), finished)
    }

    /// After how many updates the model was best; where none was chosen, all.
    pub fn best_step(&self) -> u64 {
        self.state.best.map_or(self.state.step, |best| best.step)
    }

    /// The states that its next step begins with: those of the checkpoint that it resumes from.
    pub fn carried(&self) -> Result<Vec<Carried>> {
        match &self.directory {
            Some(directory) if !self.state.place.is_null() => directory.carried(self.state.step),
            _ => Ok(Vec::new()),
        }
    }

    /// Loads the newest checkpoint that can be used, where there are any.
    pub fn resume<M>(&mut self, engine: &mut Engine<M>, watch: &mut Watch<'_>) -> Result<()> {
        let mut warn = |text: &str| (watch.on)(Event::Warning { text });
        if let Some(directory) = &self.directory {
            take_products(directory, engine.parameters.device(), &mut warn)?;
            if !self.state.place.is_null() {
                let state = directory.resume(&mut engine.parameters, &mut engine.updater, &mut warn)?;
                self.state = State { device: self.device.clone(), rounding: rounding_on(&self.device), ..state };
                let best = self.best_step();
                if self.settings.keep == Keep::Best && best != self.state.step {
                    directory.verify(best).map_err(|error| directory.lost_best(best, error))?;
                }
            }
        }
        let Some(ranks) = &self.ranks else { return Ok(()) };
        self.state = together::from_first(Some(ranks), self.state.clone())?;
        engine.parameters.take_from_first(ranks)?;
        if !self.state.place.is_null() {
            engine.updater.distribute(self.state.step)?;
        }
        Ok(())
    }

    /// Trains to the last step, or until nothing gets better, and loads the model that the run ends with; unless it is stopped
    /// before.
    pub fn train<M>(
        &mut self,
        engine: &mut Engine<M>,
        task: &mut dyn Task<M>,
        model: &ModelFiles,
        watch: &mut Watch<'_>,
    ) -> Result<Outcome> {
        let Self { directory, settings, state, .. } = self;
        if !settings.is_over(state) {
            let outcome = train(engine, task, directory.as_ref(), model, state, settings, watch)?;
            if outcome != Outcome::Finished {
                return Ok(outcome);
            }
        }
        let best = self.best_step();
        if let Some(directory) = &self.directory
            && self.settings.keep == Keep::Best
            && best != self.state.step
        {
            let loaded = directory.load(best, &mut engine.parameters, &mut engine.updater);
            loaded.map_err(|error| directory.lost_best(best, error))?;
            // Nothing is trained after this, so that its moments stay where they are.
            engine.updater.release();
        }
        Ok(Outcome::Finished)
    }

    /// Writes what the run ends with: the model, the files beside it in their order, and the page.
    pub fn finish(&self, model: &ModelFiles, parameters: &Parameters, beside: &[(&str, Vec<u8>)]) -> Result<()> {
        self.finish_with(|directory| directory.finish(model, parameters), beside)
    }

    /// The same, where `write` writes the model.
    pub fn finish_with(
        &self,
        write: impl FnOnce(&RunDirectory) -> Result<()>,
        beside: &[(&str, Vec<u8>)],
    ) -> Result<()> {
        let Some(directory) = &self.directory else { return Ok(()) };
        write(directory)?;
        for (name, bytes) in beside {
            write_atomic(&directory.path().join(name), bytes)?;
        }
        // Without a step there is no course to show.
        if self.state.step > 0 {
            directory.write_report()?;
        }
        if self.settings.keep == Keep::Best { directory.delete_checkpoints() } else { Ok(()) }
    }
}

/// Does matrix products as the run did before, on a GPU like that one.
fn take_products(directory: &RunDirectory, device: &Device, warn: &mut dyn FnMut(&str)) -> Result<()> {
    let path = directory.path().join(PRODUCTS);
    if !matches!(device, Device::Cuda(_)) || !path.exists() {
        return Ok(());
    }
    let choices = read_limited(&path, PRODUCTS_LIMIT)?;
    if !device.choose_products(&String::from_utf8_lossy(&choices))? {
        warn(&format!(
            "{} is from another GPU or another cuBLASLt: matmul algorithms are timed again, and the last bits will differ",
            path.display()
        ));
    }
    Ok(())
}
