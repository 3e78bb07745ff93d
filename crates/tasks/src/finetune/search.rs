//! Many runs from one recipe: a grid of settings, each with several seeds, as in the paper's fine-tuning (section A.3). One
//! directory for each run, so that an interrupted search resumes where it stopped; the best model ends up in the search's own.

use std::fs;
use std::path::{Path, PathBuf};

use henson_checkpoint::{is_temporary, write_atomic};
use henson_tensor::Device;
use henson_train::{Result as TrainResult, RunRecipe, TrainError, Watch, differences, parse_settings, report};
use serde::{Deserialize, Serialize};

use super::plan::Plan;
use super::recipe::FineTuneRecipe;
use super::run::{Ended, FOLDS, Results, finetune, mean_and_deviation};
use crate::error::TaskError;
use crate::forms::ERRORS;

/// What a search tries.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Search {
    /// Runs of each setting, with the recipe's seed and those after it.
    pub restarts: u64,
    /// Keys of the recipe with the values to try, all combinations of them.
    pub grid: Vec<(String, Vec<String>)>,
    /// What all runs have in common.
    pub recipe: FineTuneRecipe,
}

/// One run of a search.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    /// The settings, `key=value`.
    pub settings: Vec<String>,
    /// The seed.
    pub seed: u64,
    /// The directory, within that of the search.
    pub directory: String,
    /// Its score; none where it failed or the score is not a number.
    pub value: Option<f64>,
    /// Why it is no better than nothing, or failed, if so.
    pub failed: Option<String>,
}

/// What a search found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Table {
    /// The score's name.
    pub metric: String,
    /// All runs, in the order of the grid.
    pub cells: Vec<Cell>,
    /// For each setting: the mean, the deviation (of a sample) and the best of its runs, without those that failed.
    pub rows: Vec<Row>,
    /// The directory of the best run, whose model stands in that of the search.
    pub best: Option<String>,
}

/// The runs of one setting.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The settings, `key=value`.
    pub settings: Vec<String>,
    /// The mean score.
    pub mean: Option<f64>,
    /// The deviation of a sample; none for fewer than two.
    pub deviation: Option<f64>,
    /// The best score.
    pub best: Option<f64>,
    /// Runs that count.
    pub runs: usize,
    /// Runs that learned nothing or failed.
    pub failed: usize,
}

/// How a search ended.
#[derive(Debug)]
pub enum SearchEnded {
    /// All runs are done.
    Finished(Table),
    /// Stopped in this run, at this step; the same call resumes.
    Stopped(String, u64),
}

impl Search {
    /// The paper's: batches of 16 and 32; 5e-5, 4e-5, 3e-5 and 2e-5; 2, 3 and 4 epochs.
    pub fn papers_grid() -> Vec<(String, Vec<String>)> {
        let list = |key: &str, values: &[&str]| (key.to_owned(), values.iter().map(|v| (*v).to_owned()).collect());
        vec![
            list("batch_size", &["16", "32"]),
            list("learning_rate", &["5e-5", "4e-5", "3e-5", "2e-5"]),
            list("epochs", &["2", "3", "4"]),
        ]
    }

    /// All combinations of the grid's values.
    fn combinations(&self) -> Vec<Vec<String>> {
        let mut all = vec![Vec::new()];
        for (key, values) in &self.grid {
            let with = |settings: &Vec<String>| {
                let each = values.iter().map(|value| [settings.as_slice(), &[format!("{key}={value}")]].concat());
                each.collect::<Vec<_>>()
            };
            all = all.iter().flat_map(with).collect();
        }
        all
    }

    /// All runs with their recipes.
    fn runs(&self) -> TrainResult<Vec<(Cell, FineTuneRecipe)>> {
        let base = self.recipe.to_toml()?;
        let mut runs = Vec::new();
        for settings in self.combinations() {
            let mut recipe: FineTuneRecipe = parse_settings(&[(&base, "the recipe")], &settings)?;
            if recipe.model == self.recipe.model {
                recipe.found_at.clone_from(&self.recipe.found_at);
            }
            let in_grid = |key: &str| self.grid.iter().any(|(name, _)| name == key);
            recipe.by_size = self.recipe.by_size.iter().copied().filter(|key| !in_grid(key)).collect();
            recipe.check()?;
            for seed in (0..self.restarts).map(|i| self.recipe.seed + i) {
                let name = settings.iter().map(|setting| setting.replace('=', "-")).collect::<Vec<_>>().join("_");
                let name = if name.is_empty() { format!("seed-{seed}") } else { format!("{name}_seed-{seed}") };
                let name = name.replace(|c: char| !c.is_ascii_alphanumeric() && !"-_.".contains(c), "-");
                let directory = format!("runs/{name}");
                if runs.iter().any(|(cell, _): &(Cell, _)| cell.directory == directory) {
                    return Err(TrainError::setting("--grid", settings.join(" "), "values that differ"));
                }
                let cell = Cell { settings: settings.clone(), seed, directory, value: None, failed: None };
                runs.push((cell, FineTuneRecipe { seed, ..recipe.clone() }));
            }
        }
        Ok(runs)
    }
}

/// Runs a search in a directory. `begins` is told of every run before it begins, with its number from 0 and how many there
/// are, `ends` when it is done.
pub fn search(
    search: &Search,
    device: &Device,
    out: &Path,
    begins: &mut dyn FnMut(&Cell, usize, usize, &Plan),
    ends: &mut dyn FnMut(&Cell),
    watch: &mut Watch<'_>,
) -> Result<SearchEnded, TaskError> {
    let runs = search.runs()?;
    let count = runs.len();
    let mut metric = String::new();
    let mut cells: Vec<Cell> = Vec::new();
    // Whether it learned anything, its score, its number.
    let mut best: Option<(bool, f64, usize)> = None;
    for (number, (mut cell, mut recipe)) in runs.into_iter().enumerate() {
        let directory = out.join(&cell.directory);
        recipe.resume_from(&directory)?;
        let plan = Plan::new(recipe, device.threads())?;
        // Nothing is written before the first run can begin, so that a mistake is corrected in the same directory.
        if number == 0 {
            if plan.dev.is_none() && plan.recipe.folds == 0 {
                return Err(TaskError::NothingToChooseBy);
            }
            open(search, out)?;
        }
        let sign = if plan.metric_is_error() { -1.0 } else { 1.0 };
        begins(&cell, number, count, &plan);
        match finetune(&plan, device, &directory, None, watch) {
            Ok(Ended::Finished(results)) => {
                let Results { metric: name, value, degenerate, .. } = *results;
                (metric, cell.value, cell.failed) = (name, value, degenerate);
            }
            Ok(Ended::Interrupted(step) | Ended::Paused(step)) => {
                return Ok(SearchEnded::Stopped(cell.directory, step));
            }
            // A search has no ranks.
            Ok(Ended::FinishedElsewhere) => {}
            // A setting that diverges is a result of the search, and no reason to end it.
            Err(TaskError::Train(error @ (TrainError::Exploding { .. } | TrainError::NotFinite { .. }))) => {
                cell.failed = Some(error.to_string());
            }
            Err(error) => return Err(error),
        }
        let learned = cell.failed.is_none();
        let is_better =
            |value: &f64| best.is_none_or(|(other, best, _)| (learned, sign * value) > (other, sign * best));
        let better = cell.value.filter(is_better);
        let loser = match better {
            Some(value) => best.replace((learned, value, number)).map(|(_, _, loser)| cells[loser].directory.clone()),
            // Where none has a score, all are kept: one of them may be what is wanted.
            None => best.is_some().then(|| cell.directory.clone()),
        };
        if let Some(loser) = loser {
            drop_weights(&out.join(loser))?;
        }
        ends(&cell);
        cells.push(cell);
    }
    let table = tabulate(metric, cells, best.map(|(_, _, number)| number));
    finish(&table, out)?;
    Ok(SearchEnded::Finished(table))
}

/// What search.toml holds: a search, and the keys of its recipe that each run chooses by the size of its data.
#[derive(Serialize, Deserialize)]
struct StoredSearch {
    #[serde(default)]
    by_size: Vec<String>,
    #[serde(flatten)]
    search: Search,
}

/// Makes the directory, or checks that it holds this search.
fn open(search: &Search, out: &Path) -> Result<(), TaskError> {
    let path = out.join("search.toml");
    let io = |action, path: &Path| {
        let path = path.to_owned();
        move |source| TaskError::Train(TrainError::Io { action, path, source })
    };
    if path.exists() {
        let text = fs::read_to_string(&path).map_err(io("read", &path))?;
        let StoredSearch { search: old, by_size } = parse_settings(&[(&text, &path.display().to_string())], &[])?;
        // What runs choose by the size of their data is compared with what stands in their own recipes.
        let chosen = by_size.iter().map(String::as_str).chain(search.recipe.by_size.iter().copied());
        let may_change: Vec<&str> = FineTuneRecipe::MAY_CHANGE.iter().copied().chain(chosen).collect();
        let mut found = differences(&old.recipe, &search.recipe, &may_change, &[])?;
        if old.grid != search.grid {
            found.push(format!("  grid: was {:?}, now {:?}", old.grid, search.grid));
        }
        // More restarts only add runs.
        if search.restarts < old.restarts {
            found.push(format!("  restarts: was {}, now {}", old.restarts, search.restarts));
        }
        if !found.is_empty() {
            return Err(TaskError::OtherSearch { path: out.to_owned(), differences: found.join("\n") });
        }
    } else if fs::read_dir(out).is_ok_and(|entries| entries.flatten().any(|entry| !is_temporary(&entry.file_name()))) {
        return Err(TaskError::OtherSearch { path: out.to_owned(), differences: "  no search.toml".to_owned() });
    }
    fs::create_dir_all(out).map_err(io("make", out))?;
    let by_size = search.recipe.by_size.iter().map(|key| (*key).to_owned()).collect();
    let text = toml::to_string_pretty(&StoredSearch { search: search.clone(), by_size })
        .map_err(|error| TrainError::Recipe { place: path.display().to_string(), problem: error.to_string() })?;
    Ok(write_atomic(&path, text.as_bytes()).map_err(TrainError::from)?)
}

/// Deletes what a run that is not the best no longer needs; its log, page and results stay.
fn drop_weights(run: &Path) -> Result<(), TaskError> {
    let io = |source| TrainError::Io { action: "read", path: run.to_owned(), source };
    for entry in fs::read_dir(run).map_err(io)? {
        let path = entry.map_err(io)?.path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            fs::remove_file(&path).map_err(|source| TrainError::Io { action: "delete", path, source })?;
        }
    }
    Ok(())
}

fn tabulate(metric: String, cells: Vec<Cell>, best: Option<usize>) -> Table {
    let rows = cells.chunk_by(|a, b| a.settings == b.settings).map(|runs| {
        let values: Vec<f64> = runs.iter().filter(|run| run.failed.is_none()).filter_map(|run| run.value).collect();
        let (mean, deviation) = mean_and_deviation(&values);
        Row {
            settings: runs[0].settings.clone(),
            mean,
            deviation,
            best: values.iter().copied().reduce(if ERRORS.contains(&metric.as_str()) { f64::min } else { f64::max }),
            runs: values.len(),
            failed: runs.len() - values.len(),
        }
    });
    let rows = rows.collect();
    Table { metric, rows, best: best.map(|number| cells[number].directory.clone()), cells }
}

/// Writes the table and a page with all runs side by side, and puts the best model where the search is.
fn finish(table: &Table, out: &Path) -> Result<(), TaskError> {
    if let Some(best) = &table.best {
        let from = out.join(best);
        copy_model(&from, out)?;
    }
    let open = |cell: &Cell| report::Run::open(&out.join(&cell.directory));
    // A run that diverged may have no log.
    let runs: Vec<report::Run> = table.cells.iter().filter_map(|cell| open(cell).ok()).collect();
    report::write(&out.join("report.html"), &runs).map_err(TrainError::from)?;
    let json = serde_json::to_vec_pretty(table)
        .map_err(|error| TrainError::State { path: out.join("results.json"), problem: error.to_string() })?;
    Ok(write_atomic(&out.join("results.json"), &json).map_err(TrainError::from)?)
}

/// Copies the files of a run's model, with those in directories of theirs.
fn copy_model(from: &Path, to: &Path) -> Result<(), TaskError> {
    let io = |action: &'static str, path: PathBuf| move |source| TrainError::Io { action, path, source };
    fs::create_dir_all(to).map_err(io("make", to.to_owned()))?;
    for entry in fs::read_dir(from).map_err(io("read", from.to_owned()))? {
        let entry = entry.map_err(io("read", from.to_owned()))?;
        let (path, name) = (entry.path(), entry.file_name());
        // The run's own books stay with it.
        let own = ["run.lock", "metrics.jsonl", "results.json", "report.html", "checkpoints", "tensorboard", FOLDS];
        if own.iter().any(|own| name == *own) {
            continue;
        }
        match path.is_dir() {
            true => copy_model(&path, &to.join(&name))?,
            false => {
                fs::copy(&path, to.join(&name)).map_err(io("copy", path))?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grid_is_all_combinations_times_seeds() {
        let search = Search { restarts: 2, grid: Search::papers_grid(), recipe: FineTuneRecipe::default() };
        let runs = search.runs().unwrap();
        assert_eq!(runs.len(), 2 * 4 * 3 * 2);
        let (cell, recipe) = &runs[1];
        assert_eq!(cell.settings, ["batch_size=16", "learning_rate=5e-5", "epochs=2"]);
        assert_eq!((recipe.batch_size, recipe.learning_rate, recipe.epochs, recipe.seed), (16, 5e-5, 2.0, 1));
        assert_eq!(cell.directory, "runs/batch_size-16_learning_rate-5e-5_epochs-2_seed-1");
        let mut names: Vec<&str> = runs.iter().map(|(cell, _)| cell.directory.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), 48);
        let wrong = Search { grid: vec![("no_such".to_owned(), vec!["1".to_owned()])], ..search };
        assert!(wrong.runs().unwrap_err().to_string().contains("no_such"));
    }

    #[test]
    fn means_leave_failed_runs_out() {
        let cell = |value, failed: Option<&str>| Cell {
            settings: vec!["a=1".to_owned()],
            seed: 0,
            directory: "runs/x".to_owned(),
            value,
            failed: failed.map(str::to_owned),
        };
        let cells =
            vec![cell(Some(0.5), None), cell(Some(0.7), None), cell(Some(0.1), Some("constant")), cell(None, None)];
        let row = tabulate("f1".to_owned(), cells, Some(1)).rows.remove(0);
        assert!((row.mean.unwrap() - 0.6).abs() < 1e-12 && (row.deviation.unwrap() - 0.02_f64.sqrt()).abs() < 1e-12);
        assert_eq!((row.best, row.runs, row.failed), (Some(0.7), 2, 2));
    }
}
