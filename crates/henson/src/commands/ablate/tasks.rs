//! What `henson ablate --finetune` adds: every model of a set is fine-tuned on some tasks, several times each.

use std::path::{Path, PathBuf};

use anyhow::Context;
use henson_checkpoint::{Sums, write_atomic};
use henson_infer::Task as Ability;
use henson_tasks::{FineTuneRecipe, Reading, Search, Split, Table, Task, TaskError, mean_and_deviation, read};
use henson_tensor::Device;
use serde::Serialize;

use super::spread;
use crate::commands::finetune::searched;
use crate::flags::ablate::Ablate;
use crate::{output, signals};

/// Where fine-tuned models go, within the directory of a set: a directory for each of its runs, in it one for each task.
pub(super) const DIRECTORY: &str = "finetune";

/// The checksum of the model that was fine-tuned, beside the tasks.
const MODEL_SUM: &str = "model.sum";

/// The tasks, with all that their runs have in common.
pub(super) struct Tasks {
    searches: Vec<(&'static Task, Search)>,
}

/// What the runs of a task gave.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct TaskScores {
    task: String,
    /// The name of the score.
    metric: String,
    /// The dev score of each run; null where it diverged or has none. One that learned nothing counts like the others.
    values: Vec<Option<f64>>,
    mean: Option<f64>,
    /// Of a sample; null for fewer than two.
    standard_deviation: Option<f64>,
    /// Why runs are no better than none, or failed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    failed: Vec<String>,
}

impl Tasks {
    /// What the flags ask for; none where they ask for no fine-tuning. All files are found and read once, so that a mistake in
    /// them shows before the first model is trained.
    pub(super) fn new(flags: &Ablate) -> anyhow::Result<Option<Self>> {
        let mut searches: Vec<(&'static Task, Search)> = Vec::new();
        let (common, own) = settings(&flags.finetune_set, &flags.finetune)?;
        for name in &flags.finetune {
            let task = Task::named(name).ok_or_else(|| TaskError::NoTask { name: name.clone() })?;
            anyhow::ensure!(searches.iter().all(|(other, _)| *other != task), "--finetune has {name} twice");
            let sets: Vec<String> = common
                .iter()
                .cloned()
                .chain(own.iter().filter(|(of, _)| of == name).map(|(_, set)| set.clone()))
                .collect();
            let mut recipe = FineTuneRecipe::parse(&[("", "--finetune-set")], &sets)?;
            let (train, dev) = files(task, &flags.finetune_data)?;
            let reading = Reading { files: recipe.files.clone(), ..Reading::new(task) };
            read(&train, &reading)?;
            if let Some(dev) = &dev {
                read(dev, &Reading { places_needed: false, ..reading })?;
            }
            recipe.task.clone_from(name);
            recipe.train = train.display().to_string().into();
            recipe.dev = dev.map_or(String::new(), |dev| dev.display().to_string());
            recipe.check()?;
            let restarts = flags.restarts.unwrap_or(1) as u64;
            searches.push((task, Search { restarts, grid: Vec::new(), recipe }));
        }
        Ok((!searches.is_empty()).then_some(Self { searches }))
    }

    /// Fine-tunes the model of a run on all tasks. What is finished is only read.
    pub(super) fn run(&self, model: &Path, set: &Path, device: &Device) -> anyhow::Result<Vec<TaskScores>> {
        let name = model.file_name().context("a run has a name")?;
        let out = set.join(DIRECTORY).join(name);
        check_model(model, &out)?;
        let stop = signals::stop()?;
        let mut all = Vec::new();
        for (task, search) in &self.searches {
            output::message(&format!("{} on {}", Path::new(name).display(), task.name));
            let mut search = search.clone();
            search.recipe.model = model.display().to_string();
            search.recipe.found_at = Some(model.to_owned());
            let table = searched(&search, device, &out.join(task.name), false, &stop)?;
            all.push(TaskScores::new(task, &table));
        }
        Ok(all)
    }
}

/// The training file and, where there is one, the dev file of a task, in the first directory that has the former.
fn files(task: &'static Task, directories: &[PathBuf]) -> anyhow::Result<(PathBuf, Option<PathBuf>)> {
    let mut missing = None;
    for directory in directories {
        anyhow::ensure!(directory.is_dir(), "--finetune-data {} is not a directory", directory.display());
        match task.find(directory, Split::Train) {
            Ok(train) => {
                return match task.find(directory, Split::Dev) {
                    Ok(dev) => Ok((train, Some(dev))),
                    Err(TaskError::NoFile { .. }) => Ok((train, None)),
                    Err(error) => Err(error.into()),
                };
            }
            Err(error @ TaskError::NoFile { .. }) => missing = missing.or(Some(error)),
            Err(error) => return Err(error.into()),
        }
    }
    match missing {
        Some(error) => Err(error.into()),
        None => anyhow::bail!("--finetune-data DIR is missing: where the files of {} are", task.name),
    }
}

/// The settings of all tasks, and those of single ones.
type Settings = (Vec<String>, Vec<(String, String)>);

/// Tells `TASK.KEY=VALUE` from `KEY=VALUE`; keys have dots, too.
fn settings(sets: &[String], tasks: &[String]) -> anyhow::Result<Settings> {
    let (mut common, mut own) = (Vec::new(), Vec::new());
    for set in sets {
        match set.split_once('.') {
            Some((name, rest)) if tasks.iter().any(|task| task == name) => own.push((name.to_owned(), rest.to_owned())),
            Some((name, _)) if Task::named(name.trim()).is_some() => {
                anyhow::bail!("--finetune-set {set}: --finetune does not have the task {name}")
            }
            _ => common.push(set.clone()),
        }
    }
    let fixed = ["task", "model", "train", "dev", "seed"];
    let key = |set: &str| set.split('=').next().unwrap_or_default().trim().to_owned();
    let keys = common.iter().chain(own.iter().map(|(_, set)| set)).map(|set| key(set));
    match keys.into_iter().find(|key| fixed.contains(&key.as_str())) {
        Some(key) => anyhow::bail!("--finetune-set {key}=…: the set itself says what {key} is"),
        None => Ok((common, own)),
    }
}

/// Refuses to go on with what another model gave: that of a run which was deleted and made again, say.
fn check_model(model: &Path, out: &Path) -> anyhow::Result<()> {
    let (path, sum) = (out.join(MODEL_SUM), Sums::of_file(&model.join("model.safetensors"))?);
    match std::fs::read_to_string(&path) {
        Ok(old) => anyhow::ensure!(
            old.trim() == sum,
            "{} was fine-tuned from another model than the one that is in {} now: delete it",
            out.display(),
            model.display()
        ),
        Err(_) => {
            std::fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))?;
            write_atomic(&path, sum.as_bytes())?;
        }
    }
    Ok(())
}

impl TaskScores {
    fn new(task: &Task, table: &Table) -> Self {
        let values: Vec<Option<f64>> = table.cells.iter().map(|cell| cell.value).collect();
        let (mean, standard_deviation) = mean_and_deviation(&values.iter().copied().flatten().collect::<Vec<_>>());
        Self {
            task: task.name.to_owned(),
            metric: if table.metric.is_empty() { task.metric.to_owned() } else { table.metric.clone() },
            values,
            mean,
            standard_deviation,
            failed: table.cells.iter().filter_map(|cell| cell.failed.clone()).collect(),
        }
    }

    /// Its name and its scores, for the report.
    pub(super) fn written(&self) -> (String, String) {
        (format!("{} {}", self.task, self.metric), shown(&[self]))
    }

    /// The scores of its runs in per cent, correlations as well.
    fn percents(&self) -> impl Iterator<Item = f64> + '_ {
        // Those of answers are in per cent.
        let of_answers = Task::named(&self.task).and_then(Task::ability) == Some(Ability::Answer);
        self.values.iter().flatten().map(move |value| if of_answers { *value } else { 100.0 * value })
    }
}

/// The headings of the tasks' columns and of their average.
pub(super) fn headings(tasks: &[TaskScores]) -> Vec<String> {
    let mut headings: Vec<String> = tasks.iter().map(|task| format!("{} {}", task.task, task.metric)).collect();
    if headings.len() > 1 {
        headings.push("average".to_owned());
    }
    headings
}

/// The cells of a variant, one for each heading, from the rows of its seeds: all runs of a task together, and the mean of the
/// tasks' means.
pub(super) fn cells(rows: &[&[TaskScores]]) -> Vec<String> {
    let count = rows.first().map_or(0, |tasks| tasks.len());
    let of_task = |i: usize| -> Vec<&TaskScores> { rows.iter().filter_map(|tasks| tasks.get(i)).collect() };
    let mut cells: Vec<String> = (0..count).map(|i| shown(&of_task(i))).collect();
    if count > 1 {
        let mean =
            |i: usize| mean_and_deviation(&of_task(i).iter().flat_map(|task| task.percents()).collect::<Vec<_>>()).0;
        let means: Option<Vec<f64>> = (0..count).map(mean).collect();
        cells.push(means.map_or("–".to_owned(), |means| format!("{:.1}", means.iter().sum::<f64>() / count as f64)));
    }
    cells
}

/// The scores of some runs; how many have one, where that is not all.
fn shown(tasks: &[&TaskScores]) -> String {
    let values: Vec<f64> = tasks.iter().flat_map(|task| task.percents()).collect();
    let runs: usize = tasks.iter().map(|task| task.values.len()).sum();
    let missing = if values.len() < runs && !values.is_empty() {
        format!(" ({} of {runs})", values.len())
    } else {
        String::new()
    };
    spread(&values, |x| format!("{x:.1}")) + &missing
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scores(task: &str, metric: &str, values: &[Option<f64>]) -> TaskScores {
        let (mean, standard_deviation) = mean_and_deviation(&values.iter().copied().flatten().collect::<Vec<_>>());
        let (task, metric) = (task.to_owned(), metric.to_owned());
        TaskScores { task, metric, values: values.to_vec(), mean, standard_deviation, failed: Vec::new() }
    }

    #[test]
    fn cells_join_runs_and_seeds() {
        let row = |cola: &[Option<f64>], squad: &[Option<f64>]| {
            [scores("cola", "matthews", cola), scores("squad1", "f1", squad)]
        };
        let rows = [
            row(&[Some(0.1), Some(0.3)], &[Some(60.0), None]),
            row(&[Some(0.2), Some(0.2)], &[Some(62.0), Some(61.0)]),
        ];
        assert_eq!(headings(&rows[0]), ["cola matthews", "squad1 f1", "average"]);
        let rows: Vec<&[TaskScores]> = rows.iter().map(|row| &row[..]).collect();
        assert_eq!(cells(&rows), ["20.0 ± 8.2", "61.0 ± 1.0 (3 of 4)", "40.5"]);
        let failed = row(&[Some(0.0)], &[None]);
        assert_eq!(cells(&[&failed]), ["0.0", "–", "–"]);
        assert!(cells(&[&[], &[]]).is_empty() && headings(&[]).is_empty());
    }

    #[test]
    fn settings_are_those_of_all_tasks_or_of_one() {
        let texts = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        let found =
            settings(&texts(&["epochs=1", "qqp.limit=5", "files.format=tsv"]), &texts(&["qqp", "rte"])).unwrap();
        assert_eq!(found, (texts(&["epochs=1", "files.format=tsv"]), vec![("qqp".to_owned(), "limit=5".to_owned())]));
        for (set, expected) in [("cola.limit=5", "does not have the task cola"), ("qqp.train=x", "train")] {
            let message = settings(&texts(&[set]), &texts(&["qqp"])).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
    }
}
