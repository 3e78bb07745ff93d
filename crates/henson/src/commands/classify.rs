//! `henson classify`.

use anyhow::Context;
use henson_infer::{Classified, Input, Model, Problem, Task, Want, ZeroShot, ZeroShotScores};
use serde::Serialize;

use crate::built_in::BuiltIn;
use crate::flags::tasks::Classify;
use crate::{input, models, output};

/// What `--json` prints for a text.
#[derive(Serialize)]
struct Line<'a> {
    text: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pair: Option<&'a str>,
    /// The likeliest label, where a text has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    label: Option<&'a str>,
    /// The labels above the threshold, where a text may have several.
    #[serde(skip_serializing_if = "Option::is_none")]
    labels: Option<Vec<&'a str>>,
    /// The label's probability, or the number.
    #[serde(skip_serializing_if = "Option::is_none")]
    score: Option<f32>,
    scores: Vec<Score<'a>>,
    dropped: usize,
}

#[derive(Serialize)]
struct Score<'a> {
    label: &'a str,
    score: f32,
    /// Labels of one's own have none.
    #[serde(skip_serializing_if = "Option::is_none")]
    logit: Option<f32>,
}

pub(crate) fn run(flags: &Classify) -> anyhow::Result<()> {
    let device = flags.ask.compute.device()?;
    let path = models::find(&flags.ask.model, BuiltIn::General)?;
    let model = Model::open(&path, &device, flags.ask.compute.dtype(), Want::Task(Task::Classify))?;
    output::warn_of_length(flags.ask.length.max_length, model.most_tokens());
    if !flags.labels.is_empty() {
        return zero_shot(&model, flags);
    }
    let pairs = model.config().task.reading.and_then(|reading| reading.pairs);
    match pairs {
        Some(true) if !flags.pair => output::warn("the model was trained on pairs of texts: --pair asks about such"),
        Some(false) if flags.pair => output::warn("the model was trained on single texts, and is asked about pairs"),
        _ => {}
    }
    let (labels, problem) = (model.labels(), model.problem()?);
    input::for_each(&flags.ask.texts, |texts, numbers| {
        let inputs = inputs(texts, flags, numbers)?;
        let classified = model.classify(&inputs, flags.ask.length.of_task(&model));
        let classified = classified.map_err(|error| error.numbered(numbers))?;
        output::warn_cut(numbers, classified.iter().map(|c| c.dropped));
        inputs.iter().zip(&classified).try_for_each(|(input, classified)| {
            let line = line(*input, classified, &labels, problem, flags.threshold);
            if flags.ask.json { output::json(&line) } else { print(&line) }
        })
    })
}

/// Labels of the user's own.
fn zero_shot(model: &Model, flags: &Classify) -> anyhow::Result<()> {
    let windows = flags.ask.length.windows == Some(true);
    anyhow::ensure!(!windows, "--windows does not apply to --labels: texts that are too long are cut");
    let labels: Vec<&str> = flags.labels.iter().map(|label| label.trim()).collect();
    let asked = ZeroShot { labels: &labels, hypothesis: &flags.hypothesis, multi_label: flags.multi_label };
    input::for_each(&flags.ask.texts, |texts, numbers| {
        let found = model.zero_shot(texts, &asked, flags.ask.length.max_length);
        let found = found.map_err(|error| error.numbered(numbers))?;
        output::warn_cut(numbers, found.iter().map(|f| f.dropped));
        texts.iter().zip(&found).try_for_each(|(text, found)| {
            let line = zero_shot_line(text, found, &asked, flags.threshold);
            if flags.ask.json { output::json(&line) } else { print(&line) }
        })
    })
}

fn zero_shot_line<'a>(text: &'a str, found: &ZeroShotScores, asked: &ZeroShot<'a>, threshold: f32) -> Line<'a> {
    let both = asked.labels.iter().zip(&found.scores);
    let mut scores: Vec<Score<'a>> = both.map(|(label, score)| Score { label, score: *score, logit: None }).collect();
    scores.sort_by(|a, b| b.score.total_cmp(&a.score));
    let (label, labels, score) = if asked.multi_label {
        let given = scores.iter().filter(|score| score.score >= threshold).map(|score| score.label);
        (None, Some(given.collect()), None)
    } else {
        (scores.first().map(|best| best.label), None, scores.first().map(|best| best.score))
    };
    Line { text, pair: None, label, labels, score, scores, dropped: found.dropped }
}

fn inputs<'a>(texts: &[&'a str], flags: &Classify, numbers: &[usize]) -> anyhow::Result<Vec<Input<'a>>> {
    if !flags.pair {
        return Ok(texts.iter().map(|text| Input::One(text)).collect());
    }
    if !flags.ask.texts.texts.is_empty() {
        anyhow::ensure!(texts.len().is_multiple_of(2), "--pair takes texts two by two, and {} were given", texts.len());
        return Ok(texts.chunks_exact(2).map(|pair| Input::Pair(pair[0], pair[1])).collect());
    }
    let lines = texts.iter().zip(numbers);
    lines
        .map(|(line, number)| {
            let pair = line.split_once('\t').map(|(a, b)| Input::Pair(a, b));
            pair.with_context(|| format!("line {number}: expected two texts with a tab between them"))
        })
        .collect()
}

fn line<'a>(
    input: Input<'a>,
    classified: &Classified,
    labels: &'a [String],
    problem: Problem,
    threshold: f32,
) -> Line<'a> {
    let mut scores: Vec<Score<'a>> = labels
        .iter()
        .zip(classified.scores.iter().zip(&classified.logits))
        .map(|(label, (score, logit))| Score { label, score: *score, logit: Some(*logit) })
        .collect();
    let best = classified.best();
    let (label, labels, score) = match problem {
        Problem::SingleLabel => (labels.get(best).map(String::as_str), None, classified.scores.get(best).copied()),
        Problem::MultiLabel => {
            let given = scores.iter().filter(|score| score.score >= threshold).map(|score| score.label);
            (None, Some(given.collect()), None)
        }
        Problem::Regression => (None, None, classified.scores.first().copied()),
    };
    if problem != Problem::Regression {
        scores.sort_by(|a, b| b.score.total_cmp(&a.score));
    }
    let (text, pair) = match input {
        Input::One(text) => (text, None),
        Input::Pair(text, pair) => (text, Some(pair)),
    };
    Line { text, pair, label, labels, score, scores, dropped: classified.dropped }
}

fn print(line: &Line<'_>) -> anyhow::Result<()> {
    output::line(line.text)?;
    if let Some(pair) = line.pair {
        output::line(pair)?;
    }
    let is_number = line.label.is_none() && line.labels.is_none();
    for score in &line.scores {
        if is_number {
            output::line(&format!("    {:>10.4}  {}", score.score, score.label))?;
            continue;
        }
        let given = line.labels.as_ref().map_or("", |given| if given.contains(&score.label) { "* " } else { "  " });
        let bar = "█".repeat((score.score * 30.0).round() as usize);
        output::line(&format!("    {:>6.2}%  {given}{:<16} {bar}", 100.0 * score.score, score.label))?;
    }
    Ok(())
}
