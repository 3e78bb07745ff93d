//! `henson finetune --frozen --layers …`: a tagger on vectors of chosen layers.

use henson_tasks::{Ended, TaggerPlan, TaggerRecipe, Task, TaskError, train_tagger};
use henson_train::{Event, Precision, Watch, parse_settings};

use super::{Watcher, check_mistakes, find_files, recipe_text, show, warn_of_bad_rows};
use crate::flags::finetune::Finetune;
use crate::output::{self, Progress, thousands};
use crate::signals;

pub(super) fn run(flags: &Finetune) -> anyhow::Result<()> {
    let search = flags.grid.is_some() || flags.restarts.is_some_and(|restarts| restarts > 1);
    anyhow::ensure!(
        !search,
        "--grid and --restarts do not apply to a tagger on a frozen encoder: its runs take minutes; start one for each value \
         (--seed, --set)"
    );
    let recipe = recipe(flags)?;
    let task = Task::named(&recipe.task).ok_or_else(|| TaskError::NoTask { name: recipe.task.clone() })?;
    let device = flags.machine.device()?;
    let stop = signals::stop()?;
    let plan = TaggerPlan::new(recipe)?;
    check_mistakes(flags, plan.dev.is_some())?;
    warn_of_bad_rows(&plan.train, plan.dev.as_ref());
    output::message(&format!(
        "{} on {}, layers {}: {} sentences, {} updates of {}",
        task.name,
        plan.recipe.model,
        plan.recipe.layers,
        thousands(plan.train.examples.len()),
        thousands(plan.steps() as usize),
        plan.recipe.batch_size
    ));
    let mut progress = Progress::new("sentences read", None);
    let mut watcher: Option<Watcher> = None;
    let mut on = |event: Event<'_>| {
        let new = || Watcher::of_steps(plan.steps(), task, flags.json);
        watcher.get_or_insert_with(new).on(&event);
    };
    let mut read = |done: usize, all: usize| {
        progress.at(done as u64, done);
        if done == all {
            progress.finish();
        }
    };
    let mut watch = Watch { on: &mut on, stop: &stop };
    let ended = train_tagger(&plan, &device, &flags.out, flags.stop_at, &mut read, &mut watch);
    let ended = match watcher {
        Some(watcher) => watcher.finish(ended?)?,
        None => ended?,
    };
    match ended {
        Ended::Finished(results) => show(flags, &results),
        Ended::FinishedElsewhere => Ok(()),
        // While the encoder reads there is nothing to save yet.
        Ended::Interrupted(0) => Err(output::Interrupted::lost(0, "the same command starts from scratch").into()),
        Ended::Interrupted(step) => Err(output::Interrupted::saved(step).into()),
        Ended::Paused(step) => {
            output::message(&format!(
                "stopped at step {step} as requested; the same command without --stop-at resumes"
            ));
            Ok(())
        }
    }
}

/// The recipe that the flags mean.
fn recipe(flags: &Finetune) -> anyhow::Result<TaggerRecipe> {
    let (text, place) = recipe_text(flags)?;
    let mut recipe: TaggerRecipe = parse_settings(&[(&text, &place)], &flags.settings.sets()?)?;
    if let Some(task) = &flags.task {
        recipe.task.clone_from(task);
    }
    anyhow::ensure!(!recipe.task.is_empty(), "{place} names no task: give --task, or write task = \"…\" into it");
    let task = Task::named(&recipe.task).ok_or_else(|| TaskError::NoTask { name: recipe.task.clone() })?;
    let TaggerRecipe { model, train, dev, .. } = &mut recipe;
    recipe.found_at = find_files(flags, task, false, model, train, dev)?;
    anyhow::ensure!(!recipe.train.is_empty(), super::NO_FILES);
    recipe.files = recipe.files.overruled_by(flags.labelled.files());
    recipe.layers = flags.features.layers.unwrap_or(recipe.layers);
    recipe.head = flags.features.head.unwrap_or(recipe.head);
    recipe.crf |= flags.features.crf;
    recipe.seed = flags.seed.unwrap_or(recipe.seed);
    recipe.dtype = flags.dtype.map_or(recipe.dtype, Precision::from);
    recipe.check()?;
    Ok(recipe)
}
