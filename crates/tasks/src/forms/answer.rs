//! The part of a passage that answers a question. Read from SQuAD's documents, and rows as the `datasets` library has them.

use std::collections::BTreeMap;
use std::sync::Arc;

use henson_data::{DataError, tables};
use henson_text::{AnswerSettings, QuestionSettings, SpanBeams, SpanLogits, find_answers, find_beam_answers};
use henson_train::objective::{AnswerWindow, BeamTargets};
use serde::Deserialize;
use serde_json::{Value, json};

use super::*;
use crate::example::Answer;
use crate::metrics::{AnswerScore, answer_score, best_threshold};
use crate::predictions::Candidate;
use crate::read::is_document;
use crate::read::rows::{each_row, find, id_of, need, place, text_in};

pub(crate) static ANSWER: Form = Form {
    usual_length: 384,
    divides: true,
    averages_positions: true,
    metrics: &[
        "f1",
        "exact_match",
        "best_f1",
        "best_exact_match",
        "has_answer_f1",
        "has_answer_exact_match",
        "no_answer_f1",
        "no_answer_exact_match",
    ],
    ..Form::new(
        Head::Span,
        "question-answering",
        "AutoModelForQuestionAnswering",
        "answer --model DIR --question 'Who?' --passage 'A text.'",
        &Questions,
    )
};

#[derive(Debug)]
struct Questions;

impl Steps for Questions {
    fn read(&self, path: &Path, collector: Collector<'_>) -> Result<Set, TaskError> {
        let is_document = is_document(path) && !tables::is_array(path)?;
        match is_document || !collector.reading.has_rows(path) {
            true => read_document(path, collector),
            false => read_rows(path, collector),
        }
    }

    fn length_of(&self, model: &henson_infer::Model) -> usize {
        model.question_settings().max_length
    }

    fn reading(&self, recipe: &FineTuneRecipe, _train: &Set, reading: TrainedReading) -> TrainedReading {
        let (stride, max_question) = (Some(recipe.stride), Some(recipe.max_question));
        TrainedReading { stride, max_question, ..reading }
    }

    fn lay_out(&self, tokenizer: &Tokenizer, input: &Input, lengths: &Lengths) -> Result<Prepared, TextError> {
        let Input::Question { question, passage } = input else { return Ok(Prepared::Plain(Vec::new())) };
        let room = lengths.most.saturating_sub(tokenizer.template().pair_specials());
        let max_question = lengths.max_question.min(room / 2);
        let settings = QuestionSettings { max_length: lengths.most, stride: lengths.stride, max_question };
        Ok(Prepared::Question(tokenizer.question(question, passage, &settings)?))
    }

    fn instances(&self, prepared: Prepared, target: &Target, _labels: usize) -> Vec<Instance> {
        let (Prepared::Question(question), Target::Answers(answers)) = (&prepared, target) else { return Vec::new() };
        // The first answer, as in Google's program; training files have one.
        let place = answers.first().and_then(|answer| answer.place.as_ref());
        let spans: Vec<_> = (0..question.windows.len()).map(|window| question.targets(window, place)).collect();
        let shown = |window: usize| {
            let positions = question.windows[window].windowed_positions();
            vec![vec![question.null_position(window) as u32], vec![positions.start as u32, positions.end as u32]]
        };
        let shown: Vec<Vec<Vec<u32>>> = (0..spans.len()).map(shown).collect();
        let instances = prepared.apart(|window| {
            let (first, last) = spans[window];
            (vec![Some(first as u32), Some(last as u32)], Vec::new())
        });
        instances.into_iter().zip(shown).map(|(instance, spans)| Instance { spans, ..instance }).collect()
    }

    fn lesson(&self) -> Option<Lesson> {
        Some(Lesson::Spans)
    }

    fn taught(&self, prepared: Prepared, target: &Target, labels: usize) -> Vec<Instance> {
        match target {
            Target::None => prepared.apart(|_| (vec![None; 2], Vec::new())),
            _ => self.instances(prepared, target, labels),
        }
    }

    fn digest(&self, instance: &Instance) -> String {
        format!("Span({})", joined(&instance.labels))
    }

    /// The logits of starts and those of ends, of each window in turn.
    fn scores(&self, _problem: Option<Problem>, _prepared: &Prepared, logits: &[Vec<f32>]) -> Scores {
        let column = |rows: &[f32], place: usize| rows.chunks_exact(2).map(|row| row[place]).collect();
        logits.iter().flat_map(|rows| [column(rows, 0), column(rows, 1)]).collect()
    }

    fn predict(&self, said: Said<'_>) -> Prediction {
        let (Prepared::Question(question), Input::Question { passage, .. }) = (said.prepared, &said.example.input)
        else {
            return Prediction::None;
        };
        let settings = AnswerSettings { no_answer: said.no_answer, ..AnswerSettings::default() };
        // Starts and ends of each window; or one row, which is what beams found.
        if said.scores.len() == question.windows.len() {
            let beams: Vec<SpanBeams> = said.scores.iter().map(|row| SpanBeams::from_numbers(row)).collect();
            return Prediction::from_answers(&find_beam_answers(question, &beams, passage, &settings), passage);
        }
        let span = |pair: &[Vec<f32>]| SpanLogits { start: pair[0].clone(), end: pair[1].clone() };
        let spans: Vec<SpanLogits> = said.scores.chunks_exact(2).map(span).collect();
        Prediction::from_answers(&find_answers(question, &spans, passage, &settings), passage)
    }

    fn loss(&self, device: &Device, part: &Part<'_>) -> TrainResult<Box<dyn Loss>> {
        if part.head == Head::BeamSpan {
            let windows: Vec<AnswerWindow> = part.instances.iter().map(|instance| window_of(instance)).collect();
            return Ok(Box::new(BeamTargets::new(device, part.layout, &windows, part.scale)?));
        }
        let ((places, weights), rows) = (part.labels(), [part.instances.len(), 2]);
        let places = Tensor::from_slice(device, rows, &places)?;
        Ok(Box::new((Targets::Spans(places, Tensor::from_slice(device, rows, &weights)?), 1.0)))
    }

    fn score(&self, set: &Set, predictions: &[Prediction], threshold: Option<f64>) -> Result<Score, TaskError> {
        let mut score = Score::default();
        let mut all: Vec<(bool, AnswerScore)> = Vec::new();
        // For the best thresholds: odds, whether there is an answer, the scores, whether something is said.
        let mut with_odds: Vec<(f64, bool, AnswerScore, bool)> = Vec::new();
        for (example, prediction) in set.examples.iter().zip(predictions) {
            let Target::Answers(expected) = &example.target else { return Err(wrong_kind(set, example)) };
            let texts = || expected.iter().map(|answer| answer.text.as_str());
            let has_answer = !expected.is_empty();
            let (text, odds) = match prediction {
                Prediction::Answer { text, null_odds, .. } => (text.as_str(), *null_odds),
                Prediction::None => {
                    score.missing += 1;
                    all.push((has_answer, AnswerScore { exact: 0.0, f1: 0.0 }));
                    continue;
                }
                _ => return Err(wrong_kind(set, example)),
            };
            let said = answer_score(texts(), text);
            if let Some(odds) = odds {
                with_odds.push((odds, has_answer, said, !text.is_empty()));
            }
            let withheld = matches!((odds, threshold), (Some(odds), Some(threshold)) if odds > threshold);
            let (text, counted) = if withheld { ("", answer_score(texts(), "")) } else { (text, said) };
            all.push((has_answer, counted));
            if counted.f1 < 1.0 {
                let shown = |text: &str| if text.is_empty() { "no answer".to_owned() } else { text.to_owned() };
                let expected = expected.first().map_or("no answer", |answer| &answer.text);
                score.mistakes.push(mistake(example, expected.to_owned(), shown(text), 1.0 - counted.f1));
            }
        }
        score.metrics = metrics(&all, &with_odds, score.missing);
        Ok(score)
    }

    fn degenerate(&self, set: &Set, predictions: &[Prediction], score: &Score) -> Option<String> {
        let declined = |threshold: f64| {
            predictions.iter().all(
                |prediction| matches!(prediction, Prediction::Answer { null_odds: Some(odds), .. } if *odds > threshold),
            )
        };
        let best = score.get("best_f1_threshold").filter(|_| set.task.may_be_unanswerable);
        best.is_some_and(declined).then(|| "scores best by answering nothing".to_owned())
    }

    fn read_predictions(&self, path: &Path, set: &mut Set) -> Result<Vec<Prediction>, TaskError> {
        let mut found: BTreeMap<String, Value> = tables::read_json(path)?;
        let mut predictions = Vec::with_capacity(set.examples.len());
        let mut missing = 0;
        for example in &set.examples {
            predictions.push(match found.remove(&example.id) {
                Some(Value::String(text)) => Prediction::Answer { text, null_odds: None, candidates: Vec::new() },
                // An n-best file: its first candidate is the answer.
                Some(Value::Array(candidates)) => {
                    let problem = |error| {
                        TaskError::row(
                            path,
                            format!("question {}", example.id),
                            format!("no list of candidates: {error}"),
                        )
                    };
                    let candidates: Vec<Candidate> =
                        serde_json::from_value(Value::Array(candidates)).map_err(problem)?;
                    let text = candidates.first().map_or_else(String::new, |best| best.text.clone());
                    Prediction::Answer { text, null_odds: None, candidates }
                }
                Some(_) => {
                    let problem = "expected a text, as in {\"id\": \"answer\"}";
                    return Err(TaskError::row(path, format!("question {}", example.id), problem));
                }
                None => {
                    missing += 1;
                    Prediction::None
                }
            });
        }
        if missing == set.examples.len() {
            let found: Vec<String> = found.into_keys().take(3).collect();
            let problem = format!(
                "it has answers for none of the questions; its ids are {} and those of {} are {}",
                listed(&found),
                set.path.display(),
                listed(&set.examples.iter().take(3).map(|example| &example.id).collect::<Vec<_>>())
            );
            return Err(TaskError::mismatch(path, problem));
        }
        Ok(predictions)
    }

    fn prediction_files(&self, set: &Set, predictions: &[Prediction]) -> Result<Vec<(String, Vec<u8>)>, TaskError> {
        let (mut answers, mut n_best, mut null_odds) = (Vec::new(), Vec::new(), Vec::new());
        for (example, prediction) in set.examples.iter().zip(predictions) {
            let Prediction::Answer { text, null_odds: odds, candidates } = prediction else {
                return Err(wrong_kind(set, example));
            };
            let add = |to: &mut Vec<(String, Value)>, value: Value| to.push((example.id.clone(), value));
            add(&mut answers, json!(text));
            if !candidates.is_empty() {
                add(&mut n_best, json!(candidates));
            }
            if let Some(odds) = odds {
                add(&mut null_odds, json!(odds));
            }
        }
        let name = set.task.submission.unwrap_or("predictions.json");
        let others = [("nbest_predictions.json", n_best), ("null_odds.json", null_odds)];
        let others = others.into_iter().filter(|(_, entries)| !entries.is_empty());
        let all = [(name, answers)].into_iter().chain(others);
        Ok(all.map(|(name, entries)| (name.to_owned(), document(&entries).into_bytes())).collect())
    }
}

impl Loss for BeamTargets {
    fn of(&self, model: &Model, pass: &mut Pass<'_>, last: Var, _layout: &Layout) -> TrainResult<Vec<Tensor>> {
        Ok(self.losses(model, pass, &last)?.into())
    }
}

/// What is learned from a window of a question.
fn window_of(instance: &Instance) -> AnswerWindow {
    let number =
        |numbers: Option<&Vec<u32>>, i: usize| numbers.and_then(|numbers| numbers.get(i)).map_or(0, |n| *n as usize);
    let (null, shown) = (number(instance.spans.first(), 0), instance.spans.get(1));
    let label = |i: usize| instance.labels.get(i).copied().flatten().map_or(null, |label| label as usize);
    AnswerWindow { shown: number(shown, 0)..number(shown, 1), null, answer: [label(0), label(1)] }
}

/// All scores of answers, as SQuAD's programs have them. Of each question: whether it has an answer, and how right what was
/// said is; where odds are known, what [`best_threshold`] needs.
fn metrics(
    all: &[(bool, AnswerScore)],
    with_odds: &[(f64, bool, AnswerScore, bool)],
    missing: usize,
) -> Vec<(&'static str, f64)> {
    let percent = |of: &dyn Fn(&AnswerScore) -> f64, keep: &dyn Fn(bool) -> bool| {
        let kept = || all.iter().filter(|(has_answer, _)| keep(*has_answer));
        100.0 * kept().map(|(_, score)| of(score)).sum::<f64>() / kept().count().max(1) as f64
    };
    let (exact, f1) = (|score: &AnswerScore| score.exact, |score: &AnswerScore| score.f1);
    let mut metrics = vec![("exact_match", percent(&exact, &|_| true)), ("f1", percent(&f1, &|_| true))];
    let unanswerable = all.iter().filter(|(has_answer, _)| !has_answer).count();
    if unanswerable > 0 {
        metrics.extend([
            ("has_answer_exact_match", percent(&exact, &|has_answer| has_answer)),
            ("has_answer_f1", percent(&f1, &|has_answer| has_answer)),
            ("no_answer_exact_match", percent(&exact, &|has_answer| !has_answer)),
            ("no_answer_f1", percent(&f1, &|has_answer| !has_answer)),
        ]);
    }
    // Thresholds mean something only where all questions can be ordered.
    if with_odds.len() + missing == all.len() && !with_odds.is_empty() && unanswerable > 0 {
        let best = |of: &dyn Fn(&AnswerScore) -> f64| {
            let questions: Vec<(f64, bool, f64, bool)> =
                with_odds.iter().map(|(odds, has_answer, said, says)| (*odds, *has_answer, of(said), *says)).collect();
            best_threshold(&questions)
        };
        let (best_exact, best_f1) = (best(&exact), best(&f1));
        metrics.extend([
            ("best_exact_match", 100.0 * best_exact.score),
            ("best_exact_match_threshold", best_exact.threshold),
            ("best_f1", 100.0 * best_f1.score),
            ("best_f1_threshold", best_f1.threshold),
        ]);
    }
    metrics
}

/// An object with its entries in the order of the data, as the reference programs write it.
fn document(entries: &[(String, Value)]) -> String {
    let lines = entries.iter().map(|(id, value)| format!("    {}: {value}", json!(id)));
    format!("{{\n{}\n}}\n", lines.collect::<Vec<_>>().join(",\n"))
}

#[derive(Deserialize)]
struct Document {
    data: Vec<Article>,
}

#[derive(Deserialize)]
struct Article {
    #[serde(default)]
    title: String,
    paragraphs: Vec<Paragraph>,
}

#[derive(Deserialize)]
struct Paragraph {
    context: String,
    /// Looked at one by one, so that one that is wrong does not take the others with it.
    qas: Vec<Value>,
}

/// Reads a document in SQuAD's layout, 1.1 or 2.0.
fn read_document(path: &Path, mut collector: Collector<'_>) -> Result<Set, TaskError> {
    let document: Document = tables::read_json(path).map_err(|error| match error {
        DataError::Json { path, problem } => {
            let reason = format!(
                "{problem}; expected a JSON document as SQuAD's, with \"data\", \"paragraphs\" and \"qas\", or a .jsonl or \
                 .parquet with one question and its passage per row"
            );
            TaskError::Empty { path, task: collector.reading.task.name, reason }
        }
        other => other.into(),
    })?;
    for article in document.data {
        for (number, paragraph) in article.paragraphs.into_iter().enumerate() {
            let passage = Passage::new(paragraph.context);
            for (question, value) in paragraph.qas.iter().enumerate() {
                let place = match value.get("id").and_then(Value::as_str) {
                    Some(id) => format!("question {id}"),
                    None => format!("article {:?}, paragraph {}, question {}", article.title, number + 1, question + 1),
                };
                let example = question_of(value, &passage, &place, &collector);
                collector.take(example.map_err(|problem| TaskError::row(path, place, problem)))?;
            }
        }
    }
    collector.finish(None)
}

/// A passage with the place of each of its characters.
struct Passage {
    text: Arc<str>,
    /// The byte where each character begins, and the end.
    starts: Vec<usize>,
}

impl Passage {
    fn new(text: String) -> Self {
        let starts = text.char_indices().map(|(byte, _)| byte).chain([text.len()]).collect();
        Self { text: text.into(), starts }
    }
}

fn question_of(value: &Value, passage: &Passage, place: &str, collector: &Collector<'_>) -> Result<Example, String> {
    let string = |key: &str| match value.get(key) {
        Some(Value::String(text)) => Ok(text.clone()),
        Some(_) => Err(format!("{key:?} is not a text")),
        None => Err(format!("{key:?} is missing: expected \"id\", \"question\" and \"answers\"")),
    };
    let (id, question) = (string("id")?, string("question")?);
    let impossible = match value.get("is_impossible") {
        None | Some(Value::Null) => false,
        Some(Value::Bool(impossible)) => *impossible,
        Some(_) => return Err("\"is_impossible\" is not true or false".to_owned()),
    };
    let target = match value.get("answers") {
        None | Some(Value::Null) if impossible => Target::Answers(Vec::new()),
        None | Some(Value::Null) => Target::None,
        Some(Value::Array(answers)) if !impossible => {
            let answer = |value: &Value| {
                let Some(Value::String(text)) = value.get("text") else {
                    return Err("an answer without \"text\"".to_owned());
                };
                place_answer(text, value.get("answer_start"), passage, collector.reading.places_needed)
            };
            Target::Answers(answers.iter().map(answer).collect::<Result<_, _>>()?)
        }
        // In SQuAD 2.0 such a question may list plausible answers, which are none.
        Some(Value::Array(_)) => Target::Answers(Vec::new()),
        Some(_) => return Err("\"answers\" is not a list".to_owned()),
    };
    checked(id, place, question, target, passage, collector)
}

/// Rows with question, context and answers.
fn read_rows(path: &Path, mut collector: Collector<'_>) -> Result<Set, TaskError> {
    let mut number = 0;
    each_row(path, &mut collector, |collector, row| {
        let row = row?;
        let columns = &collector.reading.files;
        let role = Role { what: "the question", flag: "--text-column", names: &["question", "text"] };
        let (column, value) = need(path, &row, columns.text_column.as_ref(), &role, None)?;
        let question = text_in(path, &row, &column, value)?;
        let role = Role { what: "the passage", flag: "--second-column", names: &["context", "passage", "paragraph"] };
        let (column, value) = need(path, &row, columns.second_column.as_ref(), &role, None)?;
        let passage = Passage::new(text_in(path, &row, &column, value)?);
        let id = id_of(collector, &row, number);
        number += 1;
        let wrong = |problem: String| TaskError::row(path, place(path, &row), problem);
        let target = match find(&row, columns.label_column.first(), &["answers"], None) {
            None | Some((_, Value::Null)) => Target::None,
            Some((_, value)) => {
                Target::Answers(row_answers(value, &passage, collector.reading.places_needed).map_err(wrong)?)
            }
        };
        checked(id, &place(path, &row), question, target, &passage, collector).map(Some).map_err(wrong)
    })?;
    collector.finish(None)
}

/// `{"text": [...], "answer_start": [...]}`, or a list of SQuAD's own objects.
fn row_answers(value: &Value, passage: &Passage, needed: bool) -> Result<Vec<Answer>, String> {
    if let Value::Array(answers) = value {
        let answer = |value: &Value| {
            let answer = value.get("text").map(text).transpose()?.flatten();
            let answer = answer.ok_or_else(|| "an answer without \"text\"".to_owned())?;
            place_answer(&answer, value.get("answer_start"), passage, needed)
        };
        return answers.iter().map(answer).collect();
    }
    let answers = value.get("text").map(texts).ok_or("expected answers with \"text\" and \"answer_start\"")??;
    let starts = value.get("answer_start");
    let each = answers
        .iter()
        .enumerate()
        .map(|(i, answer)| place_answer(answer, starts.and_then(|starts| starts.get(i)), passage, needed));
    each.collect()
}

/// Finds an answer where the file says that it stands, in characters.
fn place_answer(text: &str, start: Option<&Value>, passage: &Passage, needed: bool) -> Result<Answer, String> {
    let place = || {
        let Some(start) = start.and_then(Value::as_u64) else {
            return Err(format!("the answer {text:?} has no \"answer_start\""));
        };
        let outside = || {
            let characters = passage.starts.len() - 1;
            format!("the answer {text:?} begins at character {start}, the passage has {characters}")
        };
        let start_byte = usize::try_from(start).ok().and_then(|start| passage.starts.get(start)).ok_or_else(outside)?;
        let place = *start_byte..start_byte + text.len();
        match passage.text.get(place.clone()) {
            Some(found) if found == text && !text.is_empty() => Ok(place),
            Some(found) => Err(format!("the answer {text:?} is not at character {start}, where {found:?} stands")),
            None => {
                Err(format!("the answer {text:?} is not at character {start}: it would end outside of the passage"))
            }
        }
    };
    match place() {
        Ok(place) => Ok(Answer { text: text.to_owned(), place: Some(place) }),
        Err(_) if !needed => Ok(Answer { text: text.to_owned(), place: None }),
        Err(problem) => Err(problem),
    }
}

fn checked(
    id: String,
    place: &str,
    question: String,
    target: Target,
    passage: &Passage,
    collector: &Collector<'_>,
) -> Result<Example, String> {
    if question.trim().is_empty() {
        return Err("the question is empty".to_owned());
    }
    if passage.text.trim().is_empty() {
        return Err("the passage is empty".to_owned());
    }
    if target == Target::Answers(Vec::new()) && !collector.reading.task.may_be_unanswerable {
        return Err("it has no answer, and those of SQuAD 1.1 have one: is this a file for --task squad2?".to_owned());
    }
    let input = Input::Question { question, passage: Arc::clone(&passage.text) };
    Ok(Example { id, place: place.to_owned(), input, target })
}
