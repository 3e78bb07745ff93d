//! `henson predict`: fine-tuned models and a file in, the benchmark's own prediction files out.

use std::ops::ControlFlow;
use std::path::PathBuf;

use anyhow::Context;
use henson_checkpoint::write_atomic;
use henson_infer::{Model, Task as Ability, Want};
use henson_tasks::{
    PredictSettings, Prediction, Reading, Set, Tagger, Task, TaskKind, missing_documents, predict, prediction_files,
    read, reading_for,
};

use crate::built_in::BuiltIn;
use crate::flags::finetune::Predict;
use crate::flags::{Compute, LengthFlags};
use crate::output::Progress;
use crate::{models, output};

pub(crate) fn run(flags: &Predict) -> anyhow::Result<()> {
    output::check_directory(&flags.out)?;
    let task = Task::named(&flags.task).context("the parser knows the tasks")?;
    let reading = Reading { places_needed: false, labels_wanted: false, ..flags.labelled.reading(task) };
    let asked = Asked { names: &flags.model, download: false, compute: &flags.compute, length: flags.length };
    let (set, predictions, _) = asked.predict(&flags.data, reading, flags.no_answer)?;
    let files = prediction_files(&set, &predictions)?;
    std::fs::create_dir_all(&flags.out).with_context(|| format!("cannot make {}", flags.out.display()))?;
    for (name, _) in &files {
        let path = flags.out.join(name);
        anyhow::ensure!(
            flags.overwrite || !path.exists(),
            "{} is there already: choose another --out, or give --overwrite",
            path.display()
        );
    }
    for (name, bytes) in &files {
        let path = flags.out.join(name);
        write_atomic(&path, bytes)?;
        eprintln!("wrote {}", path.display());
    }
    Ok(())
}

/// Models that are asked about a file.
pub(crate) struct Asked<'a> {
    pub(crate) names: &'a [String],
    pub(crate) download: bool,
    pub(crate) compute: &'a Compute,
    pub(crate) length: LengthFlags,
}

impl Asked<'_> {
    /// Reads the file and predicts all of it. `no_answer` overrules the models' own threshold, which is given, too.
    pub(crate) fn predict(
        &self,
        data: &std::path::Path,
        reading: Reading,
        no_answer: Option<f64>,
    ) -> anyhow::Result<(Set, Vec<Prediction>, f64)> {
        let device = self.compute.device()?;
        let kind = reading.task.kind;
        let paths: Vec<PathBuf> = match self.names {
            // Nothing needs to be learnt to compare texts.
            [] if kind == TaskKind::Embed => vec![models::built_in(BuiltIn::Sentences)?.1],
            names => names.iter().map(|name| models::resolve(name, self.download)).collect::<anyhow::Result<_>>()?,
        };
        if let Some(path) = paths.iter().find(|path| kind == TaskKind::Tag && Tagger::is_in(path)) {
            anyhow::ensure!(
                paths.len() == 1,
                "{} is a tagger on a frozen encoder, which is not averaged",
                path.display()
            );
            let tagger = Tagger::open(path, &device, self.compute.dtype)?;
            let (set, predictions) = self.tagged(&tagger, data, reading)?;
            return Ok((set, predictions, 0.0));
        }
        let want = match kind {
            TaskKind::Classify | TaskKind::Pair | TaskKind::Regress | TaskKind::Multilabel => {
                Want::Task(Ability::Classify)
            }
            TaskKind::Tag => Want::Task(Ability::Tag),
            TaskKind::Qa => Want::Task(Ability::Answer),
            TaskKind::Choice => Want::Task(Ability::Choose),
            TaskKind::Embed => Want::Encoder,
        };
        let open = |path: &PathBuf| Model::open(path, &device, self.compute.dtype, want);
        let opened: Vec<Model> = paths.iter().map(open).collect::<Result<_, _>>()?;
        let first = opened.first().with_context(|| format!("--task {} needs --model DIR", reading.task.name))?;
        output::warn_of_length(self.length.max_length, first.most_tokens());
        let may_be_unanswerable = reading.task.may_be_unanswerable;
        let set = read(data, &reading_for(first, reading))?;
        set.problems.iter().for_each(|problem| output::warn(problem));
        let amid_documents =
            |model: &Model| model.bert().config().reading.is_some_and(|reading| reading.document_context);
        if let Some(expected) = missing_documents(&set).filter(|_| opened.iter().any(amid_documents)) {
            output::warn(&format!("the model was trained with document_context; expected {expected}"));
        }
        // A model that henson trained on questions with answers alone gives one to all.
        let always = |model: &Model| model.no_answer_threshold().is_none() && model.bert().config().reading.is_some();
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
    fn tagged(
        &self,
        tagger: &Tagger,
        data: &std::path::Path,
        reading: Reading,
    ) -> anyhow::Result<(Set, Vec<Prediction>)> {
        let set = read(data, &tagger.reading(reading))?;
        set.problems.iter().for_each(|problem| output::warn(problem));
        let mut progress = Progress::new("examples", Some(set.examples.len() as u64));
        let predictions = tagger.predict(&set, self.length.max_length, |done| {
            progress.at(done as u64, done);
            ControlFlow::Continue(())
        })?;
        progress.finish();
        Ok((set, predictions))
    }
}
