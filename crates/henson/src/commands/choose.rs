//! `henson choose`.

use anyhow::Context;
use henson_infer::{Choices, Chosen, Model, Task, Want};
use serde::{Deserialize, Serialize};

use crate::built_in::BuiltIn;
use crate::flags::Texts;
use crate::flags::tasks::Choose;
use crate::{input, models, output};

/// A line of input as JSON.
#[derive(Deserialize)]
struct Record {
    #[serde(alias = "question")]
    context: String,
    choices: Vec<String>,
}

/// What `--json` prints for a context.
#[derive(Serialize)]
struct Line<'a> {
    context: &'a str,
    /// The likeliest.
    choice: Option<&'a str>,
    /// Its number, counted from 0.
    index: Option<usize>,
    score: Option<f32>,
    /// All, in the order that they came in.
    scores: Vec<Score<'a>>,
    dropped: usize,
}

#[derive(Serialize)]
struct Score<'a> {
    choice: &'a str,
    score: f32,
    logit: f32,
}

pub(crate) fn run(flags: &Choose) -> anyhow::Result<()> {
    let device = flags.compute.device()?;
    let path = models::find(&flags.model, BuiltIn::General)?;
    let model = Model::open(&path, &device, flags.compute.dtype(), Want::Task(Task::Choose))?;
    output::warn_of_length(flags.max_length, model.most_tokens());
    if let Some(context) = &flags.context {
        let record = Record { context: context.clone(), choices: flags.choices.clone() };
        return choose(&model, &[record], &[1], flags);
    }
    let lines = Texts { texts: Vec::new(), file: flags.file.clone() };
    input::for_each(&lines, |lines, numbers| {
        let records: Vec<Record> =
            lines.iter().zip(numbers).map(|(line, number)| record(line, *number)).collect::<anyhow::Result<_>>()?;
        choose(&model, &records, numbers, flags)
    })
}

fn record(line: &str, number: usize) -> anyhow::Result<Record> {
    let record = if line.trim_start().starts_with('{') {
        let expected = || format!("line {number}: expected a JSON object with `context` and `choices`");
        serde_json::from_str(line).with_context(expected)?
    } else {
        let mut parts = line.split('\t').map(str::to_owned);
        Record { context: parts.next().unwrap_or_default(), choices: parts.collect() }
    };
    anyhow::ensure!(
        !record.choices.is_empty(),
        "line {number}: expected a context and its choices with tabs between them; found no choice"
    );
    Ok(record)
}

fn choose(model: &Model, records: &[Record], numbers: &[usize], flags: &Choose) -> anyhow::Result<()> {
    let choices: Vec<Vec<&str>> =
        records.iter().map(|record| record.choices.iter().map(String::as_str).collect()).collect();
    let questions: Vec<Choices<'_>> =
        records.iter().zip(&choices).map(|(record, choices)| Choices { context: &record.context, choices }).collect();
    let chosen = model.choose(&questions, flags.max_length.or(model.task_length().most));
    let chosen = chosen.map_err(|error| error.numbered(numbers))?;
    for (number, chosen) in numbers.iter().zip(&chosen).filter(|(_, chosen)| chosen.dropped > 0).take(3) {
        output::warn(&format!("context {number} is too long with its choices: {} tokens were cut off", chosen.dropped));
    }
    questions.iter().zip(&chosen).try_for_each(|(question, chosen)| {
        let line = line(*question, chosen);
        if flags.json { output::json(&line) } else { print(&line) }
    })
}

fn line<'a>(question: Choices<'a>, chosen: &Chosen) -> Line<'a> {
    let index = chosen.best();
    let scores = question.choices.iter().zip(chosen.probabilities.iter().zip(&chosen.logits));
    Line {
        context: question.context,
        choice: index.map(|best| question.choices[best]),
        index,
        score: index.map(|best| chosen.probabilities[best]),
        scores: scores.map(|(choice, (score, logit))| Score { choice, score: *score, logit: *logit }).collect(),
        dropped: chosen.dropped,
    }
}

fn print(line: &Line<'_>) -> anyhow::Result<()> {
    output::line(line.context)?;
    for (i, score) in line.scores.iter().enumerate() {
        let mark = if Some(i) == line.index { '*' } else { ' ' };
        output::line(&format!("  {mark} {:>6.2}%  {}", 100.0 * score.score, score.choice))?;
    }
    Ok(())
}
