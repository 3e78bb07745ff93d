//! `henson pretrain`: a recipe in, a model directory out.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context;
use henson_models::ModelConfig;
use henson_tensor::{DType, Device};
use henson_train::metrics::{Prediction, Sample};
use henson_train::report::{self, numbers::metric};
use henson_train::{Event, Outcome, Plan, Precision, Recipe, Task, Watch};
use serde::Serialize;

use crate::flags::pretrain::Pretrain;
use crate::launch::{self, Started, Together};
use crate::output::{self, JsonLines, Progress, duration, thousands};
use crate::{models, signals};

/// Seconds of training from which a dry run takes its speed.
const TRIAL_SECONDS: f64 = 3.0;

pub(crate) fn run(flags: &Pretrain) -> anyhow::Result<()> {
    if flags.dry_run {
        return run_with(flags, None, None);
    }
    match launch::start(&flags.together, &flags.machine)? {
        Started::Alone => run_with(flags, None, None),
        Started::Together(together) => {
            let ended = run_with(flags, None, Some(&together));
            together.end(ended)
        }
    }
}

/// The same with a teacher, over what the recipe says of one, or as one of several processes.
pub(crate) fn run_with(flags: &Pretrain, teacher: Option<&str>, together: Option<&Together>) -> anyhow::Result<()> {
    let mut recipe = recipe(flags, teacher)?;
    let device = flags.machine.device_of(together)?;
    if let Some(together) = together {
        recipe.accumulation = together.parts(recipe.accumulation, flags.out.as_deref());
    }
    let mut plan = plan(recipe, device.threads())?;
    plan.ranks = together.map(|together| Arc::clone(&together.ranks));
    let fits = check_memory(&plan, &device);
    if flags.dry_run {
        return dry_run(&plan, &device, flags, fits);
    }
    fits?;
    let out = flags.out.as_deref().context("--out is missing: the run's directory")?;
    output::check_directory(out)?;
    if let Some(choices) = &flags.matmul_choices {
        anyhow::ensure!(
            take_matmul_choices(&device, choices)?,
            "{} was recorded on a different GPU or cuBLASLt version, or needs --device cuda",
            choices.display()
        );
    }
    let outcome = pretrain(
        &plan,
        &device,
        out,
        &Options {
            stop_at: flags.stop_at,
            loader_threads: flags.loader_threads,
            show: match together {
                Some(together) if !together.is_first() => Show::Nothing,
                _ if flags.json => Show::Json,
                _ => Show::People,
            },
        },
    )?;
    if together.is_some_and(|together| !together.is_first()) {
        return Ok(());
    }
    match outcome {
        (Outcome::Interrupted, step) => Err(output::Interrupted::saved(step).into()),
        (Outcome::Paused, step) => {
            output::message(&format!(
                "stopped at step {step} as requested; the same command without --stop-at resumes"
            ));
            Ok(())
        }
        (Outcome::Finished | Outcome::WasFinished, _) => {
            output::message(&format!("the model is in {}; report.html shows the run", out.display()));
            Ok(())
        }
    }
}

/// How a run is shown.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Show {
    /// A bar and lines of text on standard error.
    People,
    /// The log's lines on standard output.
    Json,
    /// Only the bar.
    Bar,
    /// Not at all: another process does.
    Nothing,
}

/// What is not in the recipe.
#[derive(Clone, Copy)]
pub(crate) struct Options {
    pub(crate) stop_at: Option<u64>,
    pub(crate) loader_threads: usize,
    pub(crate) show: Show,
}

/// Trains in a directory, from its newest checkpoint on. Says how it ended and at which step.
pub(crate) fn pretrain(plan: &Plan, device: &Device, out: &Path, options: &Options) -> anyhow::Result<(Outcome, u64)> {
    let stop = signals::stop()?;
    let (progress, json) = (Progress::steps(plan.steps(), 0), JsonLines::default());
    let mut watcher = Watcher { plan, device, progress, json, show: options.show };
    let mut on = |event: Event<'_>| {
        if options.show != Show::Nothing {
            watcher.on(&event);
        }
    };
    let mut watch = Watch { on: &mut on, stop: &stop };
    let ended = henson_train::pretrain(plan, device, out, options.loader_threads, options.stop_at, &mut watch);
    watcher.progress.finish();
    let (outcome, step) = ended?;
    if outcome != Outcome::Interrupted {
        watcher.json.finish()?;
    }
    if outcome == Outcome::WasFinished && options.show != Show::Nothing {
        output::message(&format!(
            "{} is finished: {step} of {} steps. To continue, raise steps: --set steps={}",
            out.display(),
            plan.steps(),
            2 * step
        ));
    }
    Ok((outcome, step))
}

/// Does matmuls as a run before did; `false` where that was on another device.
fn take_matmul_choices(device: &Device, path: &Path) -> anyhow::Result<bool> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(device.choose_products(&text)?)
}

/// What a recipe means on this machine. It keeps the name of a model that comes with henson, wherever that is here.
pub(crate) fn plan(mut recipe: Recipe, threads: usize) -> anyhow::Result<Plan> {
    let name = recipe.model.clone();
    recipe.model = models::directory(Path::new(&name))?.display().to_string();
    let mut plan = Plan::new(recipe, threads)?;
    plan.recipe.model = name;
    Ok(plan)
}

fn recipe(flags: &Pretrain, teacher: Option<&str>) -> anyhow::Result<Recipe> {
    let mut recipe = read_recipe(flags.recipe.as_deref(), flags.settings.sets()?, teacher)?;
    if let Some(model) = &flags.model {
        recipe.model.clone_from(model);
    }
    if let Some(data) = &flags.data {
        recipe.data.clone_from(data);
    }
    recipe.seed = flags.seed.unwrap_or(recipe.seed);
    recipe.dtype = flags.dtype.map_or(recipe.dtype, Precision::from);
    recipe.samples_in_report |= flags.samples_in_report;
    Ok(recipe)
}

/// A recipe's file, if there is one, with what was set and a teacher over what it says.
pub(super) fn read_recipe(path: Option<&Path>, mut sets: Vec<String>, teacher: Option<&str>) -> anyhow::Result<Recipe> {
    let (text, place) = match path {
        Some(path) => {
            let text =
                std::fs::read_to_string(path).with_context(|| format!("cannot read the recipe {}", path.display()))?;
            (text, path.display().to_string())
        }
        None => (String::new(), "the default recipe".to_owned()),
    };
    if let Some(teacher) = teacher {
        sets.push(format!("distil.teacher={}", serde_json::to_string(teacher)?));
        // What a teacher is followed in, unless somebody says otherwise.
        let says = |line: &str| line.trim_start().starts_with("objective");
        if !text.lines().any(says) && !sets.iter().any(|set| says(set)) {
            sets.push("objective=mlm".to_owned());
        }
    }
    let recipe = Recipe::parse(&text, &place, &sets)?;
    // By itself it may lack what flags say.
    if let Ok(written) = Recipe::parse(&text, &place, &[]) {
        report_overruled(&written, &recipe, &place);
    }
    Ok(recipe)
}

/// Says that steps are given instead of a recipe's epochs, or the other way round.
fn report_overruled(written: &Recipe, recipe: &Recipe, place: &str) {
    match (written.steps, written.epochs, recipe.steps, recipe.epochs) {
        (None, Some(epochs), Some(steps), None) => {
            output::message(&format!("steps={steps} is used instead of epochs = {epochs} in {place}"));
        }
        (Some(steps), None, None, Some(epochs)) => {
            output::message(&format!("epochs={epochs} is used instead of steps = {steps} in {place}"));
        }
        _ => {}
    }
}

/// The kernel would kill us without a word: better to say it before.
fn check_memory(plan: &Plan, device: &Device) -> anyhow::Result<()> {
    let available = match device {
        Device::Cpu(_) => std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
            let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
            line.trim().trim_end_matches(" kB").parse::<u64>().ok().map(|kib| kib << 10)
        }),
        Device::Cuda(cuda) => Some(cuda.gpu().memory() as u64),
    };
    let needed = plan.memory();
    if let Some(available) = available.filter(|available| needed > *available) {
        let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
        anyhow::bail!(
            "this run needs about {:.1} GiB, and {:.1} GiB are free: raise accumulation (now {}), lower batch_size ({}) or \
             sequence_length ({}), set recompute=true, use --dtype bf16, or take a smaller model",
            gib(needed),
            gib(available),
            plan.recipe.accumulation,
            plan.recipe.batch_size,
            plan.recipe.sequence_length
        );
    }
    Ok(())
}

/// What a dry run found.
#[derive(Serialize)]
struct Facts {
    model: String,
    parameters: usize,
    vocabulary: usize,
    documents: usize,
    corpus_tokens: u64,
    held_out_documents: usize,
    steps: u64,
    tokens: u64,
    memory_mib: f64,
    /// None where it does not fit into memory, so that nothing could be measured.
    tokens_per_s: Option<f64>,
    seconds: Option<f64>,
}

/// Says what would run; how fast, only where it `fits`.
fn dry_run(plan: &Plan, device: &Device, flags: &Pretrain, fits: anyhow::Result<()>) -> anyhow::Result<()> {
    let speed = match fits {
        Ok(()) => Some(speed(plan, device, flags)?),
        Err(error) => {
            output::warn(&error.to_string());
            None
        }
    };
    report_plan(plan, device, flags, speed)
}

/// Tokens a second of the first steps.
fn speed(plan: &Plan, device: &Device, flags: &Pretrain) -> anyhow::Result<f64> {
    let mut engine = plan.engine(device)?;
    let mut task = plan.task(&serde_json::Value::Null, flags.loader_threads)?;
    let (mut tokens, mut seconds, mut step) = (0, 0.0, 0);
    while seconds < TRIAL_SECONDS && step < plan.steps() {
        let start = Instant::now();
        engine.gradients.zero();
        let loss = task.step(&mut engine, step)?;
        engine.updater.step(&mut engine.parameters, &engine.gradients, 1e-4)?.wait()?;
        // The first ones also allocate and, on a GPU, search and record.
        if step >= plan.steps().min(3).saturating_sub(1) {
            tokens += loss.tokens;
            seconds += start.elapsed().as_secs_f64();
        }
        step += 1;
    }
    Ok(tokens as f64 / seconds.max(1e-9))
}

fn report_plan(plan: &Plan, device: &Device, flags: &Pretrain, speed: Option<f64>) -> anyhow::Result<()> {
    let facts = Facts {
        model: plan.recipe.model.clone(),
        parameters: plan.parameters(),
        vocabulary: plan.config.model.sizes().vocab_size,
        documents: plan.corpus().documents(),
        corpus_tokens: plan.corpus().pieces(),
        held_out_documents: plan.held_out().map_or(0, henson_data::Corpus::documents),
        steps: plan.steps(),
        tokens: plan.most_tokens(),
        memory_mib: (plan.memory() as f64 / (1 << 20) as f64).round(),
        tokens_per_s: speed.map(f64::round),
        seconds: speed.map(|speed| (plan.most_tokens() as f64 / speed).round()),
    };
    if flags.json {
        return output::json(&facts);
    }
    let sizes = plan.config.model.sizes();
    output::line(&format!(
        "model    {}: {} layers of {}, {} parameters, {} tokens",
        facts.model,
        sizes.num_hidden_layers,
        sizes.hidden_size,
        thousands(facts.parameters),
        facts.vocabulary
    ))?;
    if let Some(sizes) = plan.generator().map(ModelConfig::sizes) {
        let text = format!("         with a generator of {} layers of {}", sizes.num_hidden_layers, sizes.hidden_size);
        output::line(&text)?;
    }
    output::line(&format!(
        "data     {}: {} documents, {} tokens; {} documents held out",
        plan.recipe.data,
        thousands(facts.documents),
        thousands(facts.corpus_tokens as usize),
        thousands(facts.held_out_documents)
    ))?;
    for (number, phase) in plan.phases.iter().enumerate() {
        output::line(&format!(
            "phase {number}  {} steps of {} sequences of at most {} tokens, in {} parts; learning rate up to {:e}",
            phase.steps, phase.batch_size, phase.instances.sequence_length, phase.accumulation, phase.schedule.peak
        ))?;
    }
    output::line(&format!("tokens   at most {}", thousands(facts.tokens as usize)))?;
    output::line(&format!("memory   about {} MiB", facts.memory_mib))?;
    let (Some(seconds), Some(speed)) = (facts.seconds, facts.tokens_per_s) else {
        return output::line("time     not measured: it does not fit into memory");
    };
    output::line(&format!(
        "time     about {} at {} tokens/s, measured on {device} (the first steps alone: the mean may differ)",
        duration(seconds),
        thousands(speed as usize)
    ))
}

fn introduce(plan: &Plan, device: &Device, step: u64, seconds: f64) {
    let (steps, parameters) = (plan.steps(), thousands(plan.parameters()));
    let dtype = DType::from(plan.recipe.dtype);
    let steps = thousands(steps);
    output::message(&format!("{}: {parameters} parameters, {steps} steps, {dtype} on {device}", plan.recipe.model));
    if step > 0 {
        let step = thousands(step);
        output::message(&format!("resuming from step {step} (position in the data found in {seconds:.2} s)"));
    }
    if plan.phases.iter().any(|phase| phase.schedule.warmup_steps >= phase.schedule.steps) {
        output::warn("the run ends before its warm-up: the learning rate never reaches its peak (lower warmup_steps)");
    }
    if plan.held_out().is_none() {
        output::warn("the data has no held-out part: nothing will be evaluated (data build --held-out 0.01 makes one)");
    }
}

/// A sample text with what the model puts into its blanks, on one line.
fn filled(sample: &Sample) -> String {
    let best = |blank: &Vec<Prediction>| {
        let each = blank.iter().take(3).map(|guess| format!("{} {:.0}%", guess.token, 100.0 * guess.probability));
        each.collect::<Vec<_>>().join(", ")
    };
    let blanks: Vec<String> = sample.blanks.iter().map(best).collect();
    format!("              {}  →  {}", sample.text, blanks.join(" | "))
}

/// Shows what happens.
struct Watcher<'a> {
    plan: &'a Plan,
    device: &'a Device,
    progress: Progress,
    json: JsonLines,
    show: Show,
}

impl Watcher<'_> {
    fn on(&mut self, event: &Event<'_>) {
        match event {
            Event::Begins { step, seconds } => {
                if self.show == Show::People {
                    introduce(self.plan, self.device, *step, *seconds);
                }
                self.progress = Progress::steps(self.plan.steps(), *step);
            }
            Event::Step { step, loss, tokens_per_s, learning_rate } => {
                self.progress.show(*step, |_| format!("loss {loss:.3}, {} tokens/s", thousands(*tokens_per_s as u64)));
                if self.show == Show::Json && step.is_multiple_of(self.plan.recipe.log_every) {
                    self.json.print(&serde_json::json!({
                        "kind": "train", "step": step, "loss": loss, "tokens_per_s": tokens_per_s, "learning_rate": learning_rate,
                    }));
                }
            }
            Event::Evaluating => self.progress.pause("evaluating"),
            Event::Evaluated { step, metrics } => match self.show {
                Show::Json => self.json.print(&serde_json::json!({ "kind": "eval", "step": step, "metrics": metrics })),
                Show::People => {
                    let mut parts = vec![format!("step {step:>7}  held-out")];
                    let names = [
                        "loss",
                        "perplexity",
                        "forward_perplexity",
                        "backward_perplexity",
                        "accuracy",
                        "nsp_accuracy",
                        "sop_accuracy",
                        "mlm_loss",
                        "mlm_accuracy",
                        "rtd_loss",
                        "rtd_f1",
                    ];
                    for (name, value) in names.iter().filter_map(|name| Some((name, metrics.get(*name)?))) {
                        parts.push(format!("{} {}", report::words(name), metric(name, *value)));
                    }
                    output::message(&parts.join("  "));
                }
                Show::Bar | Show::Nothing => {}
            },
            Event::Part { .. } | Event::Teaching { .. } => {}
            Event::Samples { step, texts } => {
                // One is enough to see how it gets on.
                let shown = if *step == self.plan.steps() { texts.len() } else { 1 };
                for sample in texts.iter().take(shown).filter(|_| self.show == Show::People) {
                    output::message(&filled(sample));
                }
            }
            Event::Warning { text } => output::warn(text),
            Event::Saved { step, path } => {
                if self.show == Show::Json {
                    self.json.print(&serde_json::json!({ "kind": "saved", "step": step, "path": path }));
                }
            }
        }
    }
}
