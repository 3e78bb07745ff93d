//! `henson demo`: the whole story on embedded text. Nothing is downloaded, and nothing is staged: the two classifiers differ
//! in the weights that they start from, and in nothing else.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read};
use std::ops::ControlFlow;
use std::path::Path;
use std::time::Instant;

use anyhow::Context;
use henson_data::{BuildOptions, SourceFiles, build};
use henson_infer::{Length, Model, Want};
use henson_models::Head;
use henson_tasks::{Dev, Example, Input, Learner, LearnerSettings, Lengths, Set, Target, instances};
use henson_tensor::{Builder, DType, Device};
use henson_text::{Tokenizer, TrainingKind, TrainingSettings};
use henson_train::{Engine, OptimizerSettings, Outcome, Plan, Recipe, Schedule, ScheduleKind, Task};
use serde::Serialize;

use crate::built_in::BuiltIn;
use crate::commands::pretrain::{Options, Show, pretrain};
use crate::flags::demo::Demo;
use crate::output::{self, Progress, duration, message as say};
use crate::signals;

const CORPUS: &[u8] = include_bytes!("../../demo/corpus.txt.zst");
const RECIPE: &str = include_str!("../../../../recipes/demo.toml");

/// Inaugural addresses come first in the text, then chapters of novels.
const ADDRESSES: usize = 59;

const PIECES: usize = 4000;

/// The files of the text, in `--out`.
const TRAIN: &str = "train.txt";
const HELD_OUT: &str = "held-out.txt";

/// One of so many documents is held out.
const HELD_OUT_EVERY: usize = 10;

/// The classifiers' recipe.
const LABELS: usize = 40;
const SEEDS: [u64; 3] = [1, 2, 3];
const EPOCHS: u64 = 30;
const BATCH: usize = 16;
const LEARNING_RATE: f64 = 5e-4;
const LONGEST: usize = 64;

/// Sentences to fill, none of them in the text.
const BLANKS: [&str; 4] = [
    "she opened the [MASK] and went into the room.",
    "he was a young [MASK] of twenty years.",
    "the people of the united [MASK] have spoken.",
    "\" i do not [MASK] what you mean, \" said he.",
];

/// A document with its number in the text.
type Numbered<'a> = (usize, &'a str);

/// Everything that `--json` prints.
#[derive(Serialize)]
struct Results {
    seconds: f64,
    /// Held-out figures before and after pre-training.
    before: BTreeMap<String, f64>,
    after: BTreeMap<String, f64>,
    fills: Vec<Fill>,
    /// What the built-in model puts into the same blanks, where it is found.
    built_in: Option<Vec<Vec<String>>>,
    labels: usize,
    test: usize,
    /// Accuracies of the classifiers, one a seed.
    pretrained: Vec<f64>,
    untrained: Vec<f64>,
}

#[derive(Serialize)]
struct Fill {
    text: &'static str,
    before: Vec<String>,
    after: Vec<String>,
}

pub(crate) fn run(flags: &Demo) -> anyhow::Result<()> {
    let start = Instant::now();
    let out = &flags.out;
    let device = flags.machine.device()?;
    // Read before anything is written, so that a mistake in it leaves nothing.
    let mut recipe = Recipe::parse(RECIPE, "the demo's recipe", &flags.sets)?;

    let text = unpacked(CORPUS)?;
    let documents: Vec<&str> = text.split("\n\n").map(str::trim).filter(|document| !document.is_empty()).collect();
    let (held_out, train): (Vec<Numbered<'_>>, Vec<Numbered<'_>>) =
        documents.iter().copied().enumerate().partition(|(i, _)| i % HELD_OUT_EVERY == HELD_OUT_EVERY / 2);
    let text_of = |part: &[Numbered<'_>]| part.iter().map(|(_, document)| *document).collect::<Vec<_>>().join("\n\n");
    check_place(out, &text_of(&train))?;
    std::fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))?;
    for (name, part) in [(TRAIN, &train), (HELD_OUT, &held_out)] {
        henson_checkpoint::write_atomic(&out.join(name), text_of(part).as_bytes())?;
    }

    let tokenizer = train_tokenizer(out, &train, device.threads())?;
    recipe.data = build_shards(out, &tokenizer, device.threads())?;
    let plan = Plan::new(recipe, device.threads())?;
    let model = out.join("model");
    let fills = pretrain_and_fill(&plan, &device, out, &model)?;

    let train = balanced(sentences(&train));
    let test = sentences(&held_out);
    let (pretrained, untrained) = compare_classifiers(&plan, &model, &train, &test, &device)?;
    let built_in = fill_with_built_in(&device);

    let evals = evaluations(&model)?;
    let results = Results {
        seconds: start.elapsed().as_secs_f64(),
        before: evals.first().cloned().unwrap_or_default(),
        after: evals.last().cloned().unwrap_or_default(),
        fills,
        built_in,
        labels: train.len(),
        test: test.len(),
        pretrained,
        untrained,
    };
    henson_checkpoint::write_atomic(&out.join("results.json"), &serde_json::to_vec_pretty(&results)?)?;
    if flags.json {
        output::json(&results)?;
    }
    next_steps(out, &results);
    Ok(())
}

fn train_tokenizer(out: &Path, train: &[Numbered<'_>], threads: usize) -> anyhow::Result<Tokenizer> {
    step(1, "a tokenizer, from two megabytes of text: novels of the 19th century, and inaugural addresses");
    let settings = TrainingSettings { threads, ..TrainingSettings::new(TrainingKind::WordPiece, PIECES) };
    let blocks = train.iter().map(|(_, document)| Ok((*document).to_owned()));
    let trained = henson_text::train::<anyhow::Error>(&settings, blocks, &mut |_| ControlFlow::Continue(()))?;
    let tokenizer = trained.tokenizer;
    tokenizer.save(&out.join("tokenizer"), None)?;
    let sample = "Unquestionably, the puppeteer smiled.";
    let pieces: Vec<String> = tokenizer.encode(sample)?.ids.iter().filter_map(|id| tokenizer.token(*id)).collect();
    say(&format!("   {} tokens; \"{sample}\" is {}", tokenizer.vocabulary_size(), pieces.join(" ")));
    Ok(tokenizer)
}

/// Gives the directory of the shards.
fn build_shards(out: &Path, tokenizer: &Tokenizer, threads: usize) -> anyhow::Result<String> {
    step(2, "shards: the text as token ids, with a tenth of the documents held out");
    let source = SourceFiles { name: "demo".to_owned(), weight: 1.0, paths: vec![out.join(TRAIN)] };
    let options = BuildOptions {
        sources: vec![source],
        held_out_files: vec![out.join(HELD_OUT)],
        threads,
        // Those of a demo that was interrupted, which are the same.
        overwrite: true,
        ..BuildOptions::default()
    };
    let shards = out.join("shards");
    let report = build(tokenizer, &shards, &options, &mut |_| true)?;
    say(&format!(
        "   {} documents with {} tokens to train on, {} held out",
        report.train.documents, report.train.pieces, report.held_out.documents
    ));
    Ok(shards.display().to_string())
}

/// Pre-trains, and gives what the model puts into blanks before and after.
fn pretrain_and_fill(plan: &Plan, device: &Device, out: &Path, model: &Path) -> anyhow::Result<Vec<Fill>> {
    let sizes = plan.config.model.sizes();
    step(
        3,
        &format!(
            "pre-training: a BERT of {} layers and {} learns to fill blanks, for {} steps",
            sizes.num_hidden_layers,
            sizes.hidden_size,
            plan.steps()
        ),
    );
    let options = Options { stop_at: None, loader_threads: 1, show: Show::People };
    // What it predicts before the first step, to be compared with. Kept, since its weights are not: checkpoints replace them.
    let before = out.join("before.json");
    if !before.exists() {
        let first_step = Options { stop_at: Some(0), show: Show::Bar, ..options };
        if let (Outcome::Interrupted, step) = pretrain(plan, device, model, &first_step)? {
            return Err(output::Interrupted::saved(step).into());
        }
        let fills = fill(&model.join("checkpoints/step-0"), device)?;
        henson_checkpoint::write_atomic(&before, &serde_json::to_vec(&fills)?)?;
    }
    let before: Vec<Vec<String>> = henson_checkpoint::read_json(&before, 1 << 20)?;
    let (outcome, reached) = pretrain(plan, device, model, &options)?;
    // The rest takes seconds and keeps nothing.
    if signals::end_at_once()? || outcome == Outcome::Interrupted {
        return Err(output::Interrupted::saved(reached).into());
    }
    let fills = BLANKS.iter().zip(before.into_iter().zip(fill(model, device)?));
    let fills: Vec<Fill> = fills.map(|(text, (before, after))| Fill { text, before, after }).collect();
    say("   what it puts into blanks, before and after:");
    for Fill { text, before, after } in &fills {
        say(&format!("     {text}"));
        say(&format!("       before: {:<44} after: {}", before.join(", "), after.join(", ")));
    }
    Ok(fills)
}

/// The accuracies of classifiers that start from the model, and of those that start from random weights.
fn compare_classifiers(
    plan: &Plan,
    model: &Path,
    train: &[Example],
    test: &[Example],
    device: &Device,
) -> anyhow::Result<(Vec<f64>, Vec<f64>)> {
    step(
        4,
        &format!(
            "a classifier from {} labelled sentences (is it from an address, or from a novel?), scored on {} of documents \
             that it never saw, three times:",
            train.len(),
            test.len()
        ),
    );
    let pretrained = classify(plan, Some(model), train, test, device)?;
    let untrained = classify(plan, None, train, test, device)?;
    for (name, scores) in [("pre-trained", &pretrained), ("the same network, untrained", &untrained)] {
        let shown: Vec<String> = scores.iter().map(|score| format!("{:.1}%", 100.0 * score)).collect();
        let mean = scores.iter().sum::<f64>() / scores.len() as f64;
        say(&format!("   {name:<28} {}   mean {:.1}%", shown.join("  "), 100.0 * mean));
    }
    Ok((pretrained, untrained))
}

/// What the built-in model puts into the same blanks, where it is found.
fn fill_with_built_in(device: &Device) -> Option<Vec<Vec<String>>> {
    match BuiltIn::General.directory().and_then(|found| fill(&found, device)) {
        Ok(fills) => {
            step(
                5,
                "the model that henson comes with: trained the same way on 42.6 million words, in seven minutes on a GPU",
            );
            for (text, best) in BLANKS.iter().zip(&fills) {
                say(&format!("     {text:<44} {}", best.join(", ")));
            }
            Some(fills)
        }
        Err(error) => {
            step(5, &format!("skipped: the same with the model that henson comes with ({error:#})"));
            None
        }
    }
}

/// What to do next, as somebody can type it who has run `cargo run -- demo` and nothing else.
fn next_steps(out: &Path, results: &Results) {
    let here = out.display();
    let henson = std::env::args_os().next().map_or("henson".into(), |program| program.to_string_lossy().into_owned());
    say(&format!("\nDone in {}. Look at what it made:", duration(results.seconds)));
    say(&format!("  {here}/model/report.html, in a browser: the curves, and what the model fills in over time"));
    say(&format!("  {henson} fill --model {here}/model \"He opened the [MASK].\""));
    say(&format!("  {henson} data show {here}/shards"));
    if results.built_in.is_some() {
        say("Use the model that henson comes with, first here, then on a page in the browser:");
        say(&format!("  {henson} fill \"The keys to the cabinet [MASK] on the table.\""));
        say(&format!("  {henson} serve"));
    }
    say("Train a classifier on your own table, a csv with the columns text and label, and try it:");
    say(&format!("  {henson} finetune --task classify --train labels.csv --out my-model"));
    say(&format!("  {henson} classify --model my-model \"A new text.\""));
    say("From your own text to a model of your own, step by step: docs/tutorial.md");
    if !henson.starts_with("henson") {
        say(&format!("({henson} is the program that cargo built; put it on your PATH to type henson alone)"));
    }
}

/// Refuses a directory, unless an interrupted demo is in it (or nothing), which is resumed.
fn check_place(out: &Path, train: &str) -> anyhow::Result<()> {
    let holds = |what: &str| format!("{} {what}: give another --out DIR", out.display());
    let entries = match std::fs::read_dir(out) {
        Err(error) if error.kind() == ErrorKind::NotFound => 0,
        found => found.with_context(|| holds("cannot be read"))?.count(),
    };
    if entries == 0 {
        return Ok(());
    }
    let is_ours = std::fs::read(out.join(TRAIN)).is_ok_and(|found| found == train.as_bytes());
    anyhow::ensure!(is_ours, holds("holds something other than a demo of this henson"));
    anyhow::ensure!(
        !out.join("results.json").exists(),
        "{} has a finished demo already: look at {}, or give another --out DIR",
        out.display(),
        out.join("model/report.html").display()
    );
    say(&format!("{} has a demo that was interrupted; it resumes", out.display()));
    Ok(())
}

fn step(number: usize, text: &str) {
    say(&format!("{number}. {text}"));
}

/// An embedded text.
fn unpacked(bytes: &[u8]) -> anyhow::Result<String> {
    let mut text = String::new();
    zstd::Decoder::new(bytes)?.read_to_string(&mut text).context("the embedded text is damaged")?;
    Ok(text)
}

/// The three likeliest pieces for each blank.
fn fill(model: &Path, device: &Device) -> anyhow::Result<Vec<Vec<String>>> {
    let model = Model::open(model, device, DType::F32, Want::MaskedLm)?;
    let filled = model.fill(&BLANKS, 3, Length::CUT)?;
    let best = |filled: &henson_infer::Filled| filled.blanks[0].candidates.iter().map(|c| c.token.clone()).collect();
    Ok(filled.iter().map(best).collect())
}

/// The held-out figures of a run, in order.
fn evaluations(run: &Path) -> anyhow::Result<Vec<BTreeMap<String, f64>>> {
    use henson_train::metrics::{Line, read};
    let lines = read(&run.join("metrics.jsonl"))?.lines;
    Ok(lines
        .into_iter()
        .filter_map(|line| if let Line::Eval(line) = line { Some(line.metrics) } else { None })
        .collect())
}

/// Sentences of middling length with their class: 1 for an address, 0 for a novel.
fn sentences(documents: &[Numbered<'_>]) -> Vec<Example> {
    let of_document = |(number, document): &Numbered<'_>| {
        let target = Target::Class(u32::from(*number < ADDRESSES));
        let lines = document.lines().filter(|line| (6..=30).contains(&line.split_whitespace().count()));
        let example = |line: &str| Example {
            id: String::new(),
            place: String::new(),
            input: Input::One(line.to_owned()),
            target: target.clone(),
        };
        lines.map(example).collect::<Vec<_>>()
    };
    documents.iter().flat_map(of_document).collect()
}

/// As many of each class as there shall be labels, spread evenly over the text.
fn balanced(examples: Vec<Example>) -> Vec<Example> {
    let mut chosen = Vec::new();
    for label in [0, 1] {
        let class: Vec<&Example> = examples.iter().filter(|example| example.target == Target::Class(label)).collect();
        let count = LABELS / 2;
        chosen.extend((0..count).map(|i| class[i * class.len() / count].clone()));
    }
    chosen
}

/// The accuracy of a classifier for each seed, from the weights of a model or from random ones.
fn classify(
    plan: &Plan,
    from: Option<&Path>,
    train: &[Example],
    test: &[Example],
    device: &Device,
) -> anyhow::Result<Vec<f64>> {
    let task = henson_tasks::Task::named("classify").context("there is no task `classify`")?;
    let set = |examples: &[Example]| Set::new(task, vec!["novel".into(), "address".into()], examples.to_vec());
    let (lengths, threads) = (Lengths::new(LONGEST), device.threads());
    let (instances, _) = instances(&set(train), &plan.tokenizer, &lengths, threads)?;
    let steps = EPOCHS * train.len().div_ceil(BATCH) as u64;
    let schedule = Schedule::of_task(ScheduleKind::Linear, LEARNING_RATE, 0.1, steps);
    let mut progress = Progress::steps(steps * SEEDS.len() as u64, 0);
    let mut scores = Vec::new();
    for (number, seed) in SEEDS.into_iter().enumerate() {
        let mut builder = Builder::new();
        let model = henson_models::Model::build(&mut builder, &plan.config.model, Head::Sequence { labels: 2 })?;
        let dtype = DType::from(plan.recipe.dtype);
        let parameters = match from {
            Some(path) => {
                let weights = henson_checkpoint::Weights::open(path)?;
                let new = |entry: &henson_tensor::Entry| !entry.group.is_encoder();
                let options = henson_checkpoint::LoadOptions::new_head(&new);
                let naming = &plan.config.model.family().naming;
                henson_checkpoint::open_parameters(&weights, naming, builder, device, dtype, &options, seed)?.0
            }
            None => {
                let mut parameters = builder.finish(device, dtype)?;
                parameters.initialise(seed)?;
                parameters
            }
        };
        let mut engine = Engine::new(model, parameters, OptimizerSettings::default(), seed)?;
        let dev = Dev::new(set(test), &plan.tokenizer, &lengths, threads)?;
        let settings = LearnerSettings {
            task,
            batch_size: BATCH,
            accumulation: 1,
            schedule,
            seed,
            freeze: false,
            may_decline: false,
            temperature: 0.05,
            class_weights: Vec::new(),
            metric: None,
            auxiliary_lm: 0.0,
            both_orders: false,
            label_smoothing: 0.0,
            writing: None,
            resampling: None,
            poolings: Vec::new(),
            host: Vec::new(),
        };
        let mut learner = Learner::new(instances.clone(), Some(dev), settings)?;
        for step in 0..steps {
            engine.gradients.zero();
            learner.step(&mut engine, step)?;
            engine.updater.step(&mut engine.parameters, &engine.gradients, learner.rate(step).0)?;
            progress
                .show(number as u64 * steps + step + 1, |_| format!("classifier {} of {}", number + 1, SEEDS.len()));
        }
        let evaluation = learner.evaluate(&mut engine, steps)?.context("there is nothing to score with")?;
        scores.push(evaluation.metrics["accuracy"]);
    }
    progress.finish();
    Ok(scores)
}
