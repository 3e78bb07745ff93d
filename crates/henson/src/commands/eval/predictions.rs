//! `henson eval --task T`: what models predict, or predictions that are there already, against the labels.

use std::path::Path;

use anyhow::Context;
use henson_tasks::{LabelScore, Prediction, Reading, Score, Set, Task, read, read_null_odds, read_predictions, score};
use serde_json::{Value, json};

use crate::built_in::BuiltIn;
use crate::commands::predict::Asked;
use crate::flags::eval::Eval;
use crate::output::{self, thousands};

/// Mistakes that people are shown unless they ask for another number.
pub(crate) const MISTAKES: usize = 5;

/// Labels of which a table of confusions still fits a terminal.
const MOST_LABELS: usize = 12;

/// Labels whose scores are listed; where there are more, the most frequent.
const MOST_ROWS: usize = 50;

/// Confusions that are listed where there is no table of them.
const MOST_CONFUSIONS: usize = 10;

/// Without a `task`, it is the one that the model was fine-tuned for.
pub(super) fn run(flags: &Eval, task: Option<&'static Task>) -> anyhow::Result<()> {
    let (set, predicted, threshold) = match (&flags.predictions, &flags.model.model) {
        (Some(file), _) => {
            let task = task.context("--task is missing: what the predictions are for")?;
            anyhow::ensure!(
                flags.threshold.is_none() || flags.null_odds.is_some(),
                "--threshold needs --null-odds FILE"
            );
            let unused = flags.length.max_length.is_none() && flags.length.windows.is_none();
            anyhow::ensure!(unused, "--max-length and --windows do not apply where --predictions are given");
            from_file(flags, task, file)?
        }
        (None, Some(model)) => from_models(flags, task, &model.split(',').map(str::to_owned).collect::<Vec<_>>())?,
        (None, None) => match task {
            Some(task) if task.compares() => from_models(flags, Some(task), &[])?,
            Some(task) => anyhow::bail!(
                "--task {} needs --model DIR, or --predictions FILE with the predictions to score",
                task.name
            ),
            None => anyhow::bail!("--task is missing: what to measure (`henson eval --help` lists the tasks)"),
        },
    };
    let mistakes = flags.mistakes.unwrap_or(if flags.json { 0 } else { MISTAKES });
    let score = score(&set, &predicted, threshold, mistakes)?;
    if score.missing > 0 {
        output::warn(&format!("{} examples have no prediction; they count as wrong", score.missing));
    }
    if flags.json {
        return output::json(&object(flags, set.task, &score, set.skipped, set.undecided));
    }
    let left_out = match (set.skipped, set.undecided) {
        (0, 0) => String::new(),
        (0, undecided) => format!(", without {undecided} that annotators disagreed on"),
        (skipped, undecided) => format!(", without {skipped} bad rows and {undecided} undecided ones"),
    };
    let sources = score.sources.filter(|sources| *sources < score.examples);
    let sources = sources.map_or(String::new(), |sources| format!(" ({} different sources)", thousands(sources)));
    output::line(&format!("{} examples{sources} of {}{left_out}", score.examples, flags.data.display()))?;
    print(set.task, &score)
}

/// A set, what was predicted, and from which odds on a question counts as unanswered.
type Predicted = (Set, Vec<Prediction>, Option<f64>);

fn from_file(flags: &Eval, task: &'static Task, file: &Path) -> anyhow::Result<Predicted> {
    // Scores do not depend on where answers stand.
    let reading = Reading { files: flags.labelled.files(), places_needed: false, ..Reading::new(task) };
    let mut set = read(&flags.data, &reading)?;
    for problem in &set.problems {
        output::warn(problem);
    }
    let mut predicted = read_predictions(file, &mut set)?;
    if let Some(path) = &flags.null_odds {
        let missing = read_null_odds(path, &set, &mut predicted)?;
        if missing > 0 {
            output::warn(&format!("{} lacks {missing} of the questions", path.display()));
        }
    }
    Ok((set, predicted, flags.threshold))
}

fn from_models(flags: &Eval, task: Option<&'static Task>, names: &[String]) -> anyhow::Result<Predicted> {
    let meaningless = flags.limit.is_some() || flags.scoring.is_some();
    anyhow::ensure!(!meaningless, "--limit, --sample and --scoring do not apply to this task");
    let asked = Asked::find(task, names, flags.model.download, &flags.compute, flags.length)?;
    let reading = asked.reading(&flags.data, &flags.labelled);
    let may_be_unanswerable = asked.task.may_be_unanswerable;
    // All questions are answered first, so that the best threshold can be told.
    let (set, predicted, own) = asked.predict(&flags.data, reading, may_be_unanswerable.then_some(f64::MAX))?;
    Ok((set, predicted, may_be_unanswerable.then(|| flags.threshold.unwrap_or(own))))
}

fn object(flags: &Eval, task: &Task, score: &Score, skipped: usize, undecided: usize) -> Value {
    let mut object = score.to_json();
    object.insert("task".to_owned(), json!(task.name));
    object.insert("data".to_owned(), json!(flags.data));
    if let Some(predictions) = &flags.predictions {
        object.insert("predictions".to_owned(), json!(predictions));
    }
    if flags.predictions.is_none() {
        let model = flags.model.model.as_deref().unwrap_or(BuiltIn::Sentences.name());
        object.insert("model".to_owned(), json!(model));
    }
    object.insert("skipped".to_owned(), json!(skipped));
    object.insert("undecided".to_owned(), json!(undecided));
    if flags.mistakes.is_some() {
        object.insert("mistakes".to_owned(), json!(score.mistakes));
    }
    Value::Object(object)
}

/// Tables for people.
pub(super) fn print(task: &Task, score: &Score) -> anyhow::Result<()> {
    let width = score.metrics.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    for (name, value) in &score.metrics {
        let of = match (&score.positive, *name) {
            (Some(positive), "f1") => format!("  of {positive:?}"),
            _ => String::new(),
        };
        output::line(&format!("  {name:<width$}  {:>8}{of}", output::score(task, name, *value)))?;
    }
    for (name, signature) in &score.signatures {
        output::line(&format!("  {name}: {signature}"))?;
    }
    if !score.labels.is_empty() {
        let width = score.labels.iter().map(|label| label.name.chars().count()).max().unwrap_or(0).clamp(5, 40);
        output::line(&format!("\n  {:<width$}  precision   recall       f1  expected  predicted", "label"))?;
        let mut rows: Vec<&LabelScore> = score.labels.iter().collect();
        if rows.len() > MOST_ROWS {
            rows.sort_by_key(|label| std::cmp::Reverse(label.counts.expected));
            rows.truncate(MOST_ROWS);
        }
        for label in &rows {
            let counts = label.counts;
            output::line(&format!(
                "  {:<width$}  {:>8.2}%  {:>6.2}%  {:>6.2}%  {:>8}  {:>9}",
                label.name,
                100.0 * counts.precision(),
                100.0 * counts.recall(),
                100.0 * counts.f1(),
                thousands(counts.expected),
                thousands(counts.predicted)
            ))?;
        }
    }
    if score.labels.len() > MOST_ROWS {
        let all = thousands(score.labels.len());
        output::line(&format!("  (the {MOST_ROWS} most frequent of {all} labels; --json has all)"))?;
    }
    print_confusions(score)?;
    if !score.mistakes.is_empty() {
        output::line("\n  the worst mistakes")?;
    }
    for mistake in &score.mistakes {
        output::line(&format!("  {}: {}", mistake.place, mistake.text))?;
        output::line(&format!("      expected {}, predicted {}", mistake.expected, mistake.predicted))?;
    }
    Ok(())
}

/// What was taken for what: a table of few labels, a list of the most frequent pairs of many.
fn print_confusions(score: &Score) -> anyhow::Result<()> {
    if let Some(confusion) = score.confusion.as_ref().filter(|confusion| confusion.classes() <= MOST_LABELS) {
        let width = score.names.iter().map(|name| name.chars().count()).max().unwrap_or(0).clamp(8, 24);
        let cut = |name: &String| name.chars().take(width).collect::<String>();
        let header: String = score.names.iter().map(|name| format!("  {:>width$}", cut(name))).collect();
        output::line(&format!("\n  {:<width$}{header}", "expected"))?;
        for (i, name) in score.names.iter().enumerate() {
            let row: String =
                (0..confusion.classes()).map(|j| format!("  {:>width$}", confusion.count(i, j))).collect();
            output::line(&format!("  {:<width$}{row}", cut(name)))?;
        }
        output::line(&format!("  {:<width$}  (columns: predicted)", ""))?;
    }
    let many = score.confusion.as_ref().filter(|confusion| confusion.classes() > MOST_LABELS);
    let mistakes = many.map(|confusion| confusion.mistakes(MOST_CONFUSIONS)).unwrap_or_default();
    if !mistakes.is_empty() {
        output::line("\n  most frequent confusions")?;
    }
    for (expected, predicted, count) in mistakes {
        let (expected, predicted) = (&score.names[expected], &score.names[predicted]);
        output::line(&format!("  {:>8}  {expected} predicted as {predicted}", thousands(count)))?;
    }
    Ok(())
}
