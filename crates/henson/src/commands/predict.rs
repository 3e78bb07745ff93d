//! `henson predict`: fine-tuned models and a file in, the benchmark's own prediction files out.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use anyhow::Context;
use henson_checkpoint::write_atomic;
use henson_infer::{Model, Task as Ability, Want};
use henson_tasks::{
    PredictSettings, Prediction, Reading, Set, Tagger, Task, TaskError, Trained, missing_documents, predict,
    prediction_files, read, reading_for,
};

use crate::built_in::BuiltIn;
use crate::flags::finetune::Predict;
use crate::flags::labelled::Labelled;
use crate::flags::{Compute, LengthFlags};
use crate::output::Progress;
use crate::{models, output};

pub(crate) fn run(flags: &Predict) -> anyhow::Result<()> {
    output::check_directory(&flags.out)?;
    let task = flags.task.as_deref().and_then(Task::named);
    let asked = Asked::find(task, &flags.model, false, &flags.compute, flags.length)?;
    let reading = Reading { labels_wanted: false, ..asked.reading(&flags.data, &flags.labelled) };
    let (set, predictions, _) = asked.predict(&flags.data, reading, flags.no_answer)?;
    let files = prediction_files(&set, &predictions)?;
    std::fs::create_dir_all(&flags.out).with_context(|| format!("cannot make {}", flags.out.display()))?;
    for (name, _) in &files {
        let path = flags.out.join(name);
        anyhow::ensure!(
            flags.overwrite || !path.exists(),
            "{} exists already: choose another --out, or give --overwrite",
            path.display()
        );
    }
    for (name, bytes) in &files {
        let path = flags.out.join(name);
        write_atomic(&path, bytes)?;
        output::message(&format!("wrote {}", path.display()));
    }
    Ok(())
}

/// Models that are asked about a file.
pub(crate) struct Asked<'a> {
    /// What they are asked.
    pub(crate) task: &'static Task,
    paths: Vec<PathBuf>,
    /// What the first one says about the files that it was trained on, where that was for the same task.
    trained: Trained,
    compute: &'a Compute,
    length: LengthFlags,
}

impl<'a> Asked<'a> {
    /// Finds models by their names. Without a `task` it is the one that the first of them was trained for.
    pub(crate) fn find(
        task: Option<&'static Task>,
        names: &[String],
        download: bool,
        compute: &'a Compute,
        length: LengthFlags,
    ) -> anyhow::Result<Self> {
        let is_embed = task.is_some_and(Task::compares);
        let paths: Vec<PathBuf> = match names {
            // Nothing needs to be learned to compare texts.
            [] if is_embed => vec![models::built_in(BuiltIn::Sentences)?.1],
            names => names.iter().map(|name| models::resolve(name, download)).collect::<anyhow::Result<_>>()?,
        };
        let first = paths.first().with_context(|| match task {
            Some(task) => format!("--task {} needs --model DIR", task.name),
            None => "--model DIR is missing: which model to ask".to_owned(),
        })?;
        let mut trained = Trained::of_directory(first)?;
        let task = task.or(trained.task).with_context(|| {
            format!("--task is missing: {} has no recipe.toml of `henson finetune` that names it", first.display())
        })?;
        // The same task, perhaps with labels as texts.
        let task = trained.task.filter(|trained| *trained == task).unwrap_or(task);
        if trained.task != Some(task) {
            trained = Trained::default();
        }
        Ok(Self { task, paths, trained, compute, length })
    }

    /// How a file is read for them: as those of the training were, where no flag says otherwise. Neither scores nor
    /// predictions depend on where in a passage an answer stands.
    pub(crate) fn reading(&self, data: &Path, flags: &Labelled) -> Reading {
        let files = self.trained.clone().files_for(data, flags.files());
        Reading { files, places_needed: false, ..Reading::new(self.task) }
    }

    /// Reads a file for them.
    fn read(&self, data: &Path, reading: &Reading) -> anyhow::Result<Set> {
        let set = read(data, reading).map_err(|error| {
            let as_trained = matches!(error, TaskError::NoColumn { .. }) && !self.trained.files.is_usual();
            let error = anyhow::Error::from(error);
            let hint = || {
                format!(
                    "columns are those of the training unless flags name others ({})",
                    self.paths[0].join("recipe.toml").display()
                )
            };
            if as_trained { error.context(hint()) } else { error }
        })?;
        set.problems.iter().for_each(|problem| output::warn(problem));
        Ok(set)
    }

    /// Reads the file and predicts all of it. `no_answer` overrules the models' own threshold, which is given, too.
    pub(crate) fn predict(
        &self,
        data: &Path,
        reading: Reading,
        no_answer: Option<f64>,
    ) -> anyhow::Result<(Set, Vec<Prediction>, f64)> {
        let device = self.compute.device()?;
        let ability = self.task.ability();
        if let Some(path) = self.paths.iter().find(|path| ability == Some(Ability::Tag) && Tagger::is_in(path)) {
            anyhow::ensure!(
                self.paths.len() == 1,
                "{} is a tagger on a frozen encoder, which is not averaged",
                path.display()
            );
            let tagger = Tagger::open(path, &device, self.compute.dtype())?;
            let (set, predictions) = self.tagged(&tagger, data, reading)?;
            return Ok((set, predictions, 0.0));
        }
        let want = match ability {
            Some(ability) => Want::Task(ability),
            None if self.task.writes() => Want::AsSaved,
            None => Want::Encoder,
        };
        let open = |path: &PathBuf| Model::open(path, &device, self.compute.dtype(), want);
        let opened: Vec<Model> = self.paths.iter().map(open).collect::<Result<_, _>>()?;
        let first = opened.first().context("there is a first model")?;
        output::warn_of_length(self.length.max_length, first.most_tokens());
        let may_be_unanswerable = self.task.may_be_unanswerable;
        let set = self.read(data, &reading_for(first, reading))?;
        let amid_documents =
            |model: &Model| model.config().task.reading.is_some_and(|reading| reading.document_context);
        if let Some(expected) = missing_documents(&set).filter(|_| opened.iter().any(amid_documents)) {
            output::warn(&format!("the model was trained with document_context; expected {expected}"));
        }
        // A model that henson trained on questions with answers alone gives one to all.
        let always = |model: &Model| model.no_answer_threshold().is_none() && model.config().task.reading.is_some();
        let own = match set.task.name == "qa" && opened.iter().any(always) {
            true => f64::MAX,
            false => opened.iter().filter_map(Model::no_answer_threshold).sum::<f64>() / opened.len() as f64,
        };
        let no_answer = no_answer.or(may_be_unanswerable.then_some(own));
        let mut progress = Progress::new("examples", Some(set.examples.len() as u64));
        let LengthFlags { max_length, windows } = self.length;
        let predictions = predict(&opened, &set, &PredictSettings { max_length, windows, no_answer }, |done| {
            progress.at(done as u64, done);
            ControlFlow::Continue(())
        })?;
        progress.finish();
        Ok((set, predictions, own))
    }

    /// The same by a tagger on a frozen encoder, which always reads by windows.
    fn tagged(&self, tagger: &Tagger, data: &Path, reading: Reading) -> anyhow::Result<(Set, Vec<Prediction>)> {
        let set = self.read(data, &tagger.reading(reading))?;
        let mut progress = Progress::new("examples", Some(set.examples.len() as u64));
        let predictions = tagger.predict(&set, self.length.max_length, |done| {
            progress.at(done as u64, done);
            ControlFlow::Continue(())
        })?;
        progress.finish();
        Ok((set, predictions))
    }
}
