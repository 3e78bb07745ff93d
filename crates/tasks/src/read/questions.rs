//! Questions about passages: SQuAD's documents, and rows as the `datasets` library has them.

use std::path::Path;
use std::sync::Arc;

use henson_data::{DataError, tables};
use serde::Deserialize;
use serde_json::Value;

use super::rows::{Role, each_row, find, id_of, need, place, text_in};
use super::{Collector, text, texts};
use crate::error::TaskError;
use crate::example::{Answer, Example, Input, Set, Target};

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
pub(super) fn read_document(path: &Path, mut collector: Collector<'_>) -> Result<Set, TaskError> {
    let document: Document = tables::read_json(path).map_err(|error| match error {
        DataError::Json { path, problem } => {
            let reason = format!(
                "{problem}; expected a JSON document as SQuAD's, with \"data\", \"paragraphs\" and \"qas\", or a .jsonl or \
                 .parquet with a question and its passage a row"
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
pub(super) fn read_rows(path: &Path, mut collector: Collector<'_>) -> Result<Set, TaskError> {
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
