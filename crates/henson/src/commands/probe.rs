//! `henson probe`: what can be read off the layers of an encoder, and what its attention heads look at.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::Ordering;

use henson_infer::{Model, Want};
use henson_tasks::{
    HeadResults, HeadSettings, ProbeEnded, ProbePlan, ProbeRecipe, ProbeResults, Relation, compare_heads, probe,
};
use henson_train::{Event, Precision, Watch, parse_settings};
use serde::Serialize;

use crate::built_in::BuiltIn;
use crate::flags::probe::Probe;
use crate::output::{self, Progress, thousands};
use crate::{models, signals};

pub(crate) fn run(flags: &Probe) -> anyhow::Result<()> {
    match (&flags.data, &flags.out) {
        (Some(data), _) if flags.heads => run_heads(flags, data),
        (_, Some(out)) => run_probes(flags, out),
        _ => anyhow::bail!("--out DIR is missing: where the results go"),
    }
}

fn run_probes(flags: &Probe, out: &Path) -> anyhow::Result<()> {
    output::check_directory(out)?;
    let plan = ProbePlan::new(recipe(flags)?)?;
    let device = flags.machine.device()?;
    let stop = signals::stop()?;
    for problem in plan.train.problems.iter().chain(&plan.dev.problems) {
        output::warn(problem);
    }
    output::message(&format!(
        "{} in {}: {} targets with {} labels to train on, {} to score on; {} probes of {} updates",
        plan.recipe.task.name(),
        plan.recipe.model,
        thousands(plan.train.targets()),
        thousands(plan.train.labels.len()),
        thousands(plan.dev.targets()),
        plan.probes(),
        thousands(plan.steps())
    ));
    let mut reading = Progress::new("texts read", None);
    let (mut training, mut best): (Option<Progress>, Option<f64>) = (None, None);
    let mut on = |event: Event<'_>| match event {
        Event::Part { name, steps } => {
            report(best.take());
            training = Some(Progress::steps(steps, 0));
            output::message(&format!("probe {name}"));
        }
        Event::Step { step, loss, .. } => {
            if let Some(training) = &mut training {
                training.show(step, |_| format!("loss {loss:.4}"));
            }
        }
        // Before the first step it knows nothing.
        Event::Evaluated { step: 0, .. } => {}
        Event::Evaluated { metrics, .. } => {
            let f1 = metrics.get("f1").copied().unwrap_or_default();
            best = Some(best.map_or(f1, |best| best.max(f1)));
        }
        Event::Warning { text } => output::warn(text),
        Event::Begins { .. }
        | Event::Evaluating
        | Event::Samples { .. }
        | Event::Saved { .. }
        | Event::Teaching { .. } => {}
    };
    let mut read = |done: usize, all: usize| {
        reading.at(done as u64, done);
        if done == all {
            reading.finish();
        }
    };
    let ended = probe(&plan, &device, out, &mut read, &mut Watch { on: &mut on, stop: &stop });
    drop(training);
    match ended? {
        ProbeEnded::Finished(results) => {
            report(best);
            output::message(&format!("results.json and report.html are in {}", out.display()));
            if flags.json { output::json(&results) } else { print(&results) }
        }
        ProbeEnded::Stopped(_, 0) if stop.load(Ordering::Relaxed) => {
            Err(output::Interrupted::lost(0, "the same command resumes with the probe that it was at").into())
        }
        ProbeEnded::Stopped(_, step) => Err(output::Interrupted::saved(step).into()),
    }
}

/// The score of the probe that was trained last.
fn report(best: Option<f64>) {
    if let Some(best) = best {
        output::message(&format!("  F1 {:.2}%", 100.0 * best));
    }
}

/// The recipe that the flags mean.
fn recipe(flags: &Probe) -> anyhow::Result<ProbeRecipe> {
    let mut recipe: ProbeRecipe = parse_settings(&[("", "the default recipe")], &flags.settings.sets()?)?;
    recipe.found_at = Some(models::find(&flags.model, BuiltIn::General)?);
    flags.model.shown().clone_into(&mut recipe.model);
    let named =
        |path: &Option<std::path::PathBuf>| path.as_ref().map(|path| path.display().to_string()).unwrap_or_default();
    (recipe.task, recipe.seed, recipe.dtype) = (flags.task, flags.seed, Precision::from(flags.dtype));
    (recipe.train, recipe.dev) = (named(&flags.train), named(&flags.dev));
    recipe.limit = flags.limit.or(recipe.limit);
    recipe.random_encoder |= flags.random_encoder;
    recipe.files = recipe.files.overruled_by(flags.labelled.files());
    recipe.check()?;
    Ok(recipe)
}

fn print(results: &ProbeResults) -> anyhow::Result<()> {
    let full = &results.full;
    let percent = |value: f64| format!("{:.2}%", 100.0 * value);
    output::line(&format!("{} in {}", results.task, results.model))?;
    output::line("  layer  mixing weight                        F1 of layers 0 to ℓ    gain")?;
    for (layer, weight) in full.mixing_weights.iter().enumerate() {
        let bar = "█".repeat((weight * 28.0).round() as usize);
        let cumulative = results.cumulative.as_ref().map(|found| {
            let gain = layer.checked_sub(1).map_or(String::new(), |i| format!("{:+6.2}", 100.0 * found.differences[i]));
            format!("{:>19}  {gain}", percent(found.f1[layer]))
        });
        output::line(format!("  {layer:>5}  {weight:.3}  {bar:<28}  {}", cumulative.unwrap_or_default()).trim_end())?;
    }
    let line = |name: &str, value: String| output::line(&format!("  {name:<22} {value:>8}"));
    line("F1", percent(full.f1))?;
    line("precision", percent(full.precision))?;
    line("recall", percent(full.recall))?;
    line("centre of gravity", format!("{:.2}", full.centre_of_gravity))?;
    if let Some(cumulative) = &results.cumulative {
        let expected = cumulative.expected_layer.map_or("none: no gain".to_owned(), |layer| format!("{layer:.2}"));
        line("expected layer", expected)?;
    }
    if let Some(control) = &results.control {
        line("F1 of control task", percent(control.f1))?;
        line("selectivity", format!("{:.2}", 100.0 * control.selectivity))?;
    }
    if let Some(random) = &results.random_encoder {
        line("F1 of random encoder", percent(random.f1))?;
        line("  centre of gravity", format!("{:.2}", random.centre_of_gravity))?;
    }
    Ok(())
}

/// What `--heads --json` prints.
#[derive(Serialize)]
struct Heads<'a> {
    model: &'a str,
    data: &'a Path,
    #[serde(flatten)]
    results: &'a HeadResults,
}

fn run_heads(flags: &Probe, data: &Path) -> anyhow::Result<()> {
    // The one key that means something here, too.
    let recipe: ProbeRecipe = parse_settings(&[("", "the default recipe")], &flags.settings.sets()?)?;
    let expected = ProbeRecipe { max_length: recipe.max_length, ..ProbeRecipe::default() };
    anyhow::ensure!(recipe == expected, "--heads trains nothing: of the settings only max_length applies");
    let device = flags.machine.device()?;
    let path = models::find(&flags.model, BuiltIn::General)?;
    let model = Model::open(&path, &device, flags.dtype, Want::Encoder)?;
    let stop = signals::stop()?;
    let mut progress = Progress::new("sentences", None);
    let settings = HeadSettings { limit: flags.limit, max_length: recipe.max_length, min_count: flags.min_count };
    let results = compare_heads(&model, data, &settings, |done, _| {
        progress.at(done as u64, done);
        if stop.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    progress.finish();
    let results = results?;
    if results.too_long > 0 {
        output::warn(&format!("{} sentences were left out: too long (--set max_length=N)", results.too_long));
    }
    if flags.json {
        return output::json(&Heads { model: flags.model.shown(), data, results: &results });
    }
    let HeadResults { sentences, layers, heads, all, relations, .. } = &results;
    output::line(&format!("{} sentences, {layers} layers of {heads} heads", thousands(*sentences)))?;
    output::line("relation               arcs   found by head                             best offset")?;
    for Relation { relation, count, best, offset, offset_accuracy } in [all].into_iter().chain(relations) {
        output::line(&format!(
            "{relation:<18} {:>8}  {:>6.1}%  {:>2}-{:<3} {:<18}  {:>6.1}%  {offset:+}",
            thousands(*count),
            100.0 * best.accuracy,
            best.layer,
            best.head,
            best.direction.to_string(),
            100.0 * offset_accuracy,
        ))?;
    }
    Ok(())
}
