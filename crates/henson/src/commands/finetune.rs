//! `henson finetune`: labelled files and a model in, a fine-tuned model out; one run or a search over many.

pub(crate) mod distil;
mod tagger;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context;
use henson_checkpoint::write_atomic;
use henson_tasks::{
    Cell, Ended, FineTuneRecipe, Mistake, Paths, Plan, Results, Search, SearchEnded, Set, Split, Table, TaggerRecipe,
    Task, TaskError, finetune, search,
};
use henson_tensor::{DType, Device};
use henson_train::{Event, Precision, Watch};
use serde_json::json;

use crate::built_in::BuiltIn;
use crate::commands::eval::MISTAKES;
use crate::flags::distil::Distil;
use crate::flags::finetune::Finetune;
use crate::launch::{self, Started, Together};
use crate::output::{self, JsonLines, Progress, duration, thousands};
use crate::{models, signals};

/// What `--dev` says where all rows are trained on and nothing is scored.
const NO_DEV: &str = "none";

/// Where nothing names what to train on.
const NO_FILES: &str = "--data DIR or --train FILE is missing: what to train on";

pub(crate) fn run(flags: &Finetune) -> anyhow::Result<()> {
    match launch::start(&flags.together, &flags.machine)? {
        Started::Alone => train(flags, None),
        Started::Together(together) => {
            let ended = train(flags, Some(&together));
            together.end(ended)
        }
    }
}

fn train(flags: &Finetune, together: Option<&Together>) -> anyhow::Result<()> {
    output::check_directory(&flags.out)?;
    if let Some(path) = &flags.mistakes {
        anyhow::ensure!(
            !path.exists(),
            "--mistakes {} exists already: give another name, or delete it",
            path.display()
        );
    }
    if flags.features.are_wanted() || TaggerRecipe::is_written_in(&recipe_text(flags)?.0) {
        anyhow::ensure!(together.is_none(), "taggers on a frozen encoder are trained by one process alone so far");
        return tagger::run(flags);
    }
    run_recipe(flags, recipe(flags, None)?, together)
}

/// Runs a recipe, or a search over many.
fn run_recipe(flags: &Finetune, mut recipe: FineTuneRecipe, together: Option<&Together>) -> anyhow::Result<()> {
    let device = flags.machine.device_of(together)?;
    let stop = signals::stop()?;
    if let Some(together) = together {
        recipe.accumulation = together.parts(recipe.accumulation, Some(&flags.out));
    }
    if is_search(flags) {
        anyhow::ensure!(
            together.is_none(),
            "a search trains many models, by one process alone so far: leave --grid, --restarts and --seeds out"
        );
        return run_search(flags, recipe, &device, &stop);
    }
    let mut plan = Plan::new(recipe, device.threads())?;
    plan.ranks = together.map(|together| Arc::clone(&together.ranks));
    check_mistakes(flags, plan.dev.is_some() || plan.has_folds())?;
    if together.is_some_and(|together| !together.is_first()) {
        // The first shows all there is to see.
        let mut watch = Watch { on: &mut |_| {}, stop: &stop };
        return Ok(finetune(&plan, &device, &flags.out, flags.stop_at, &mut watch).map(drop)?);
    }
    introduce(&plan, &device);
    let mut watcher = Watcher::new(&plan, flags.json);
    let mut on = |event: Event<'_>| watcher.on(&event);
    let ended = finetune(&plan, &device, &flags.out, flags.stop_at, &mut Watch { on: &mut on, stop: &stop });
    match watcher.finish(ended?)? {
        Ended::Interrupted(step) => Err(output::Interrupted::saved(step).into()),
        Ended::Paused(step) => {
            output::message(&format!(
                "stopped at step {step} as requested; the same command without --stop-at resumes"
            ));
            Ok(())
        }
        Ended::Finished(results) => show(flags, &results),
        Ended::FinishedElsewhere => Ok(()),
    }
}

/// Mistakes need something that they are made on.
fn check_mistakes(flags: &Finetune, has_dev: bool) -> anyhow::Result<()> {
    anyhow::ensure!(flags.mistakes.is_none() || has_dev, "--mistakes needs something to score: give --dev FILE");
    Ok(())
}

/// The mistakes of a run, for people and, where they are asked for, in a file.
fn show_mistakes(flags: &Finetune, results: &Results) -> anyhow::Result<()> {
    let Some(mistakes) = &results.mistakes else {
        anyhow::ensure!(
            flags.mistakes.is_none(),
            "{out} was finished before, and mistakes are not kept: `henson eval --model {out} --data DEV --mistakes 100 --json` \
             lists them",
            out = flags.out.display()
        );
        return Ok(());
    };
    if let Some(path) = &flags.mistakes {
        let lines: Result<Vec<String>, _> = mistakes.iter().map(serde_json::to_string).collect();
        let text: String = lines?.iter().map(|line| format!("{line}\n")).collect();
        write_atomic(path, text.as_bytes())?;
    }
    if !flags.json && !mistakes.is_empty() {
        let count = thousands(mistakes.len());
        output::message(&format!("the worst of {count} mistakes on examples that it was not trained on:"));
        for mistake in mistakes.iter().take(MISTAKES) {
            let Mistake { place, text, expected, predicted, .. } = mistake;
            output::message(&format!("  {place}: {text}\n      expected {expected}, predicted {predicted}"));
        }
    }
    Ok(())
}

fn show(flags: &Finetune, results: &Results) -> anyhow::Result<()> {
    show_mistakes(flags, results)?;
    if let Some(reason) = &results.degenerate {
        output::warn(&format!(
            "training failed: the model {reason}; try --restarts 5, more epochs, or another learning_rate"
        ));
    }
    let task = Task::named(&results.task).ok_or_else(|| TaskError::NoTask { name: results.task.clone() })?;
    let shown = |value: f64| output::score(task, &results.metric, value);
    let score = match (results.value, &results.folds) {
        (Some(value), Some(folds)) => format!(
            "{} {}{}, estimated by {} folds; the model has all rows, after {}",
            results.metric,
            shown(value),
            folds.standard_deviation.map_or(String::new(), |deviation| format!(" ± {}", shown(deviation))),
            folds.values.len(),
            updates(results.best_step)
        ),
        (Some(value), None) => format!("{} {} after {}", results.metric, shown(value), updates(results.best_step)),
        (None, _) => format!("after {}", updates(results.best_step)),
    };
    if let Some(linear) = &results.linear_head {
        let number = |value: Option<f64>| value.map_or("no score".to_owned(), shown);
        output::message(&format!(
            "{}: a linear head on the frozen model {}, fine-tuning {}; {} is kept",
            results.metric,
            number(linear.value),
            number(linear.fine_tuned),
            if linear.kept { "the linear head" } else { "the fine-tuned model" }
        ));
    }
    let early = if results.stopped_early { "; it stopped early, because the score no longer improved" } else { "" };
    output::message(&format!("{score}, trained for {}{early}", duration(results.seconds)));
    output::message(&format!("the model is in {}; README.md and report.html show the run", flags.out.display()));
    if flags.json { output::json(results) } else { Ok(()) }
}

/// So many updates, in words.
fn updates(count: u64) -> String {
    format!("{} update{}", thousands(count as usize), if count == 1 { "" } else { "s" })
}

/// The recipe's file and its name.
fn recipe_text(flags: &Finetune) -> anyhow::Result<(String, String)> {
    let Some(path) = &flags.recipe else { return Ok((String::new(), "the default recipe".to_owned())) };
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read the recipe {}", path.display()))?;
    Ok((text, path.display().to_string()))
}

/// The recipe that the flags mean.
fn recipe(flags: &Finetune, teachers: Option<&Distil>) -> anyhow::Result<FineTuneRecipe> {
    let (text, place) = recipe_text(flags)?;
    let mut recipe = FineTuneRecipe::parse(&[(&text, &place)], &flags.settings.sets()?)?;
    if let Some(task) = &flags.task {
        recipe.task.clone_from(task);
    }
    anyhow::ensure!(!recipe.task.is_empty(), "{place} names no task: give --task, or write task = \"…\" into it");
    let task = Task::named(&recipe.task).ok_or_else(|| TaskError::NoTask { name: recipe.task.clone() })?;
    recipe.tokenizer = flags.tokenizer.clone().unwrap_or(recipe.tokenizer);
    recipe.model = flags.model.clone().unwrap_or(recipe.model);
    recipe.word_vectors = flags.word_vectors.clone().unwrap_or(recipe.word_vectors);
    if let Some(teachers) = teachers {
        distil::add_teachers(&mut recipe, flags, teachers)?;
    }
    // A directory of that name is the model that is meant.
    let from_scratch = recipe.is_from_scratch() && !(recipe.makes_vocabulary() && Path::new(&recipe.model).exists());
    let FineTuneRecipe { model, train, dev, .. } = &mut recipe;
    recipe.found_at = find_files(flags, task, from_scratch, model, train, dev)?;
    anyhow::ensure!(!recipe.training_files().iter().all(|path| path.is_empty()), NO_FILES);
    recipe.files = recipe.files.overruled_by(flags.labelled.files());
    recipe.prefix = flags.prefix.clone().unwrap_or(recipe.prefix);
    recipe.freeze |= flags.frozen;
    recipe.metric = flags.metric.clone().or(recipe.metric);
    recipe.seed = flags.seed.unwrap_or(recipe.seed);
    recipe.dtype = flags.dtype.map_or(recipe.dtype, Precision::from);
    choose_estimate(flags, &mut recipe);
    // A search has a run of its own for each of its directories.
    if !is_search(flags) {
        recipe.resume_from(&flags.out)?;
    }
    recipe.check()?;
    Ok(recipe)
}

/// What the flags say about dev data, over what a recipe says.
fn choose_estimate(flags: &Finetune, recipe: &mut FineTuneRecipe) {
    if let Some(folds) = flags.folds {
        recipe.dev.clear();
        recipe.estimate_by(Some(folds));
    } else if flags.dev.as_deref() == Some(Path::new(NO_DEV)) {
        recipe.estimate_by(Some(0));
    } else if !recipe.dev.is_empty() && flags.names_dev() {
        // A dev file on the command line takes the place of a recipe's split.
        recipe.estimate_by(Some(0));
    }
}

/// Whether several runs are asked for.
fn is_search(flags: &Finetune) -> bool {
    flags.grid.is_some() || flags.restarts.is_some_and(|restarts| restarts > 1)
}

/// What the flags say about model and files, over what a recipe says; and the model's directory, where it has one. The recipe keeps
/// the model's name, so that it means the same on another machine.
fn find_files(
    flags: &Finetune,
    task: &'static Task,
    from_scratch: bool,
    model: &mut String,
    train: &mut Paths,
    dev: &mut String,
) -> anyhow::Result<Option<PathBuf>> {
    if let Some(name) = &flags.model {
        model.clone_from(name);
    }
    let found_at = if from_scratch {
        None
    } else if model.is_empty() {
        anyhow::ensure!(!task.writes(), "--model is missing: the model that comes with henson writes no texts");
        let usual = if task.compares() { BuiltIn::Sentences } else { BuiltIn::General };
        let (built_in, found_at) = models::built_in(usual)?;
        built_in.name().clone_into(model);
        Some(found_at)
    } else {
        Some(models::resolve(model, flags.download)?)
    };
    let named = |path: &Path| path.display().to_string();
    if let Some(data) = &flags.data {
        anyhow::ensure!(
            data.is_dir(),
            "--data {} is not a directory: expected the one with the files of task {}; --train and --dev name files themselves",
            data.display(),
            task.name
        );
        if flags.train.is_empty() {
            *train = named(&task.find(data, Split::Train)?).into();
        }
        if flags.dev.is_none() && flags.folds.is_none() {
            match task.find(data, Split::Dev) {
                Ok(path) => *dev = named(&path),
                // The run says what it is scored on instead.
                Err(TaskError::NoFile { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
    if !flags.train.is_empty() {
        *train = Paths(flags.train.clone());
    }
    if let Some(path) = &flags.dev {
        *dev = if path == Path::new(NO_DEV) { String::new() } else { named(path) };
    }
    Ok(found_at)
}

fn introduce(plan: &Plan, device: &Device) {
    warn_of_bad_rows(&plan.train, plan.dev.as_ref());
    let most = plan.config.model.sizes().max_tokens;
    output::warn_of_length(plan.recipe.max_length, most);
    // Texts without labels have teachers.
    if let Some(unseen) = plan.labels_without_examples().filter(|_| !plan.recipe.train.0.is_empty()) {
        output::warn(&format!("no example of {} has {unseen}: such a label is not learned", plan.recipe.train));
    }
    if plan.cut > 0 {
        let longer = plan.config.task.reading.is_some_and(|reading| reading.max_length < most);
        let windows = plan.task.can_divide();
        let writes = plan.task.writes();
        let ways = [
            (longer, "raise max_length"),
            (writes, "raise max_target_length where targets are cut"),
            (windows, "--set windows=true"),
        ];
        let ways: Vec<&str> = ways.iter().filter(|(helps, _)| *helps).map(|(_, way)| *way).collect();
        output::warn(&format!(
            "{} of {} examples are longer than a sequence and lose their end{}{}",
            thousands(plan.cut),
            thousands(plan.train.examples.len()),
            if ways.is_empty() { "" } else { ": " },
            ways.join(", or ")
        ));
    }
    let dev =
        plan.dev.as_ref().map_or("no dev data".to_owned(), |dev| format!("{} dev", thousands(dev.examples.len())));
    plan.reasons.iter().for_each(|reason| output::message(reason));
    output::message(&format!(
        "{} from {}: {} examples, {dev}, {} of {} sequences, {} on {device}",
        plan.task.name,
        plan.recipe.model,
        thousands(plan.train.examples.len()),
        updates(plan.steps()),
        plan.recipe.batch_size,
        DType::from(plan.recipe.dtype)
    ));
}

fn warn_of_bad_rows(train: &Set, dev: Option<&Set>) {
    for set in [Some(train), dev].into_iter().flatten() {
        set.problems.iter().for_each(|problem| output::warn(problem));
        if set.skipped > 0 {
            output::warn(&format!("{} bad rows of {} were left out", set.skipped, set.path.display()));
        }
    }
}

fn run_search(flags: &Finetune, recipe: FineTuneRecipe, device: &Device, stop: &AtomicBool) -> anyhow::Result<()> {
    let grid = match flags.grid.as_deref() {
        None => Vec::new(),
        Some([]) => Search::papers_grid(),
        Some(lists) => lists.iter().map(|list| parse_list(list)).collect::<anyhow::Result<_>>()?,
    };
    let wanted = Search { restarts: flags.restarts.unwrap_or(1) as u64, grid, recipe };
    let table = searched(&wanted, device, &flags.out, flags.json, stop)?;
    if flags.json {
        output::json(&table)?;
    } else {
        print(task_of(&wanted.recipe)?, &table)?;
    }
    match &table.best {
        Some(best) => output::message(&format!(
            "the best model, that of {best}, is in {out}; `henson eval --model {out} --data FILE` shows its mistakes",
            out = flags.out.display()
        )),
        None => output::warn("no run has a score"),
    }
    Ok(())
}

fn task_of(recipe: &FineTuneRecipe) -> Result<&'static Task, TaskError> {
    Task::named(&recipe.task).ok_or_else(|| TaskError::NoTask { name: recipe.task.clone() })
}

/// Runs a search, and shows how it goes. An interrupted one is an error.
pub(crate) fn searched(
    wanted: &Search,
    device: &Device,
    out: &Path,
    json: bool,
    stop: &AtomicBool,
) -> anyhow::Result<Table> {
    let task = task_of(&wanted.recipe)?;
    let metric = wanted.recipe.metric.clone().unwrap_or_else(|| task.metric.to_owned());
    let watcher: std::cell::RefCell<Option<Watcher>> = std::cell::RefCell::new(None);
    let mut on = |event: Event<'_>| {
        if let Some(watcher) = watcher.borrow_mut().as_mut() {
            watcher.on(&event);
        }
    };
    let mut begins = |cell: &Cell, number: usize, count: usize, plan: &Plan| {
        if number == 0 {
            introduce(plan, device);
        }
        output::message(&format!("run {} of {count}: {}", number + 1, name_of(&cell.settings, cell.seed)));
        *watcher.borrow_mut() = Some(Watcher { people: false, ..Watcher::new(plan, json) });
    };
    let mut ends = |cell: &Cell| {
        if let Some(watcher) = watcher.borrow_mut().take() {
            watcher.progress.finish();
        }
        let value = cell.value.map_or("no score".to_owned(), |value| output::score(task, &metric, value));
        let failed = cell.failed.as_ref().map_or(String::new(), |reason| format!("  ({reason})"));
        output::message(&format!("  {value}{failed}"));
    };
    let ended = search(wanted, device, out, &mut begins, &mut ends, &mut Watch { on: &mut on, stop })?;
    match ended {
        SearchEnded::Stopped(_, step) => Err(output::Interrupted::saved(step).into()),
        SearchEnded::Finished(table) => Ok(table),
    }
}

fn name_of(settings: &[String], seed: u64) -> String {
    [settings, &[format!("seed={seed}")]].concat().join(" ")
}

/// `key=a,b,c`.
fn parse_list(list: &str) -> anyhow::Result<(String, Vec<String>)> {
    let (key, values) = list
        .split_once('=')
        .with_context(|| format!("--grid {list}: expected a key and its values, such as learning_rate=5e-5,3e-5"))?;
    let values: Vec<String> = values.split(',').map(|value| value.trim().to_owned()).collect();
    anyhow::ensure!(values.iter().all(|value| !value.is_empty()), "--grid {list}: a value is empty");
    Ok((key.trim().to_owned(), values))
}

fn print(task: &Task, table: &Table) -> anyhow::Result<()> {
    let name = |settings: &[String]| if settings.is_empty() { "all runs".to_owned() } else { settings.join(" ") };
    let width = table.rows.iter().map(|row| name(&row.settings).chars().count()).max().unwrap_or(0).max(8);
    let number = |value: Option<f64>| value.map_or("–".to_owned(), |value| output::score(task, &table.metric, value));
    output::line(&format!("{:<width$}  {:>8}  {:>9}  {:>8}  runs  failed", table.metric, "mean", "deviation", "best"))?;
    for row in &table.rows {
        output::line(&format!(
            "{:<width$}  {:>8}  {:>9}  {:>8}  {:>4}  {:>6}",
            name(&row.settings),
            number(row.mean),
            number(row.deviation),
            number(row.best),
            row.runs,
            row.failed
        ))?;
    }
    Ok(())
}

/// Shows what happens.
struct Watcher {
    progress: Progress,
    task: &'static Task,
    /// The score that is shown first.
    metric: String,
    json: Option<JsonLines>,
    /// Whether evaluations are reported on standard error.
    people: bool,
}

impl Watcher {
    fn new(plan: &Plan, json: bool) -> Self {
        Self { metric: plan.metric().to_owned(), ..Self::of_steps(plan.steps(), plan.task, json) }
    }

    fn of_steps(steps: u64, task: &'static Task, json: bool) -> Self {
        let lines = json.then(JsonLines::default);
        let metric = task.metric.to_owned();
        Self { progress: Progress::steps(steps, 0), task, metric, json: lines, people: !json }
    }

    fn on(&mut self, event: &Event<'_>) {
        match event {
            Event::Part { name, steps } => {
                self.progress.finish();
                if self.people {
                    output::message(name);
                }
                self.progress = Progress::steps(*steps, 0);
            }
            Event::Step { step, loss, tokens_per_s, .. } => {
                self.progress.show(*step, |_| format!("loss {loss:.3}, {} tokens/s", thousands(*tokens_per_s as u64)));
            }
            Event::Evaluated { step, metrics } => {
                if let Some(lines) = &mut self.json {
                    lines.print(&json!({ "kind": "eval", "step": step, "metrics": metrics }));
                } else if self.people {
                    let first = metrics.get_key_value(&self.metric);
                    let rest = metrics.iter().filter(|(name, _)| **name != self.metric && !name.contains("threshold"));
                    let parts = first
                        .into_iter()
                        .chain(rest.take(3))
                        .map(|(name, value)| format!("{name} {}", output::score(self.task, name, *value)));
                    output::message(&format!("step {step:>6}  {}", parts.collect::<Vec<_>>().join("  ")));
                }
            }
            Event::Teaching { done, of } => {
                self.progress.pause(&format!("asking the teachers: {} of {}", thousands(*done), thousands(*of)));
            }
            Event::Warning { text } => output::warn(text),
            Event::Evaluating => self.progress.pause("evaluating"),
            Event::Begins { .. } | Event::Samples { .. } | Event::Saved { .. } => {}
        }
    }

    /// After a run that ended like this. What could not be printed is an error, unless the run was stopped.
    fn finish(self, ended: Ended) -> anyhow::Result<Ended> {
        self.progress.finish();
        if let (Ended::Finished(_), Some(lines)) = (&ended, self.json) {
            lines.finish()?;
        }
        Ok(ended)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_update_is_not_several() {
        assert_eq!([0, 1, 2000].map(updates), ["0 updates", "1 update", "2,000 updates"]);
    }
}
