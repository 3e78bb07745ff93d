//! `henson answer`.

use anyhow::Context;
use henson_infer::{AnswerCandidate, AnswerSettings, Answers, Model, Question, Stride, Task, Want};
use henson_text::code_point_offsets;
use serde::{Deserialize, Serialize};

use crate::built_in::BuiltIn;
use crate::flags::Texts;
use crate::flags::tasks::Answer;
use crate::{input, models, output};

/// A line of input as JSON. Other keys, such as those of SQuAD's files, are ignored.
#[derive(Deserialize)]
struct Record {
    question: String,
    #[serde(alias = "passage")]
    context: String,
}

/// What `--json` prints for a question.
#[derive(Serialize)]
struct Line<'a> {
    question: &'a str,
    #[serde(flatten)]
    best: Span<'a>,
    /// The score of "no answer" minus that of the best answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    null_odds: Option<f64>,
    candidates: Vec<Span<'a>>,
}

/// An answer; empty and without a place where there is none. Offsets are in characters.
#[derive(Serialize, Clone)]
struct Span<'a> {
    text: &'a str,
    start: Option<usize>,
    end: Option<usize>,
    score: f64,
}

pub(crate) fn run(flags: &Answer) -> anyhow::Result<()> {
    let device = flags.compute.device()?;
    let path = models::find(&flags.model, BuiltIn::General)?;
    let model = Model::open(&path, &device, flags.compute.dtype(), Want::Task(Task::Answer))?;
    output::warn_of_length(flags.max_length, model.most_tokens());
    let mut length = model.question_settings();
    length.max_length = flags.max_length.unwrap_or(length.max_length);
    match (flags.stride, flags.overlap) {
        (Some(step), _) => length.stride = Stride::Step(step),
        (None, Some(overlap)) => length.stride = Stride::Overlap(overlap),
        (None, None) => {}
    }
    let mut settings = AnswerSettings { longest: flags.longest, ..model.answer_settings() };
    settings.no_answer = flags.no_answer.or(settings.no_answer);
    settings.n_best = settings.n_best.max(flags.top);
    let ask = |questions: &[Question<'_>], numbers: &[usize]| {
        let answers = model.answer(questions, length, &settings).map_err(|error| error.numbered(numbers))?;
        questions.iter().zip(&answers).try_for_each(|(question, answers)| {
            let line = line(*question, answers, flags.top);
            if flags.json { output::json(&line) } else { print(&line) }
        })
    };

    let passage = match (&flags.passage, &flags.passage_file) {
        (Some(passage), _) => Some(passage.clone()),
        (None, Some(path)) => {
            let text = std::fs::read_to_string(path);
            Some(text.with_context(|| format!("cannot read the passage in {}", path.display()))?)
        }
        (None, None) => None,
    };
    if let Some(passage) = passage {
        let questions: Vec<Question<'_>> =
            flags.question.iter().map(|question| Question { question, passage: &passage }).collect();
        return ask(&questions, &[]);
    }
    let lines = Texts { texts: Vec::new(), file: flags.file.clone() };
    input::for_each(&lines, |lines, numbers| {
        if !flags.question.is_empty() {
            let each = |passage| flags.question.iter().map(move |question| Question { question, passage });
            let questions: Vec<Question<'_>> = lines.iter().flat_map(|passage| each(*passage)).collect();
            let numbers: Vec<usize> =
                numbers.iter().flat_map(|number| std::iter::repeat_n(*number, flags.question.len())).collect();
            return ask(&questions, &numbers);
        }
        let records: Vec<Record> =
            lines.iter().zip(numbers).map(|(line, number)| record(line, *number)).collect::<anyhow::Result<_>>()?;
        let questions = records.iter().map(|record| Question { question: &record.question, passage: &record.context });
        ask(&questions.collect::<Vec<_>>(), numbers)
    })
}

fn record(line: &str, number: usize) -> anyhow::Result<Record> {
    let expected = || format!("line {number}: expected a JSON object with `question` and `context`");
    if line.trim_start().starts_with('{') {
        return serde_json::from_str(line).with_context(expected);
    }
    let (question, context) = line.split_once('\t').with_context(|| {
        format!("line {number}: expected a question, a tab and a passage; or give the question with --question")
    })?;
    Ok(Record { question: question.to_owned(), context: context.to_owned() })
}

fn line<'a>(question: Question<'a>, answers: &Answers, top: usize) -> Line<'a> {
    let passage = question.passage;
    let span = |candidate: &AnswerCandidate| {
        let place = candidate.place.clone().map(|place| code_point_offsets(passage, &[(place.start, place.end)])[0]);
        Span {
            text: candidate.text(passage),
            start: place.map(|(start, _)| start),
            end: place.map(|(_, end)| end),
            score: candidate.probability,
        }
    };
    let nothing = Span { text: "", start: None, end: None, score: 0.0 };
    Line {
        question: question.question,
        best: answers.best().map_or(nothing, span),
        null_odds: answers.null_odds,
        candidates: answers.candidates.iter().take(top).map(span).collect(),
    }
}

fn print(line: &Line<'_>) -> anyhow::Result<()> {
    output::line(line.question)?;
    let print = |span: &Span<'_>| {
        let text = if span.start.is_none() { "(no answer)" } else { span.text };
        output::line(&format!("    {:>6.2}%  {text}", 100.0 * span.score))
    };
    print(&line.best)?;
    let is_best = |span: &&Span<'_>| (span.start, span.end) == (line.best.start, line.best.end);
    line.candidates.iter().filter(|span| !is_best(span)).try_for_each(print)
}
