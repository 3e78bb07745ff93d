//! What models say, and the files that it is written to.

mod read;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::error::TaskError;
use crate::example::{Example, Set};
use crate::forms::wrong_kind;
use crate::metrics::cosine;

pub(crate) use read::{Found, label_number, read_rows};
pub use read::{read_null_odds, read_predictions};

/// What a model says about an example. Labels are numbers of [`crate::Set::labels`].
#[derive(Clone, Debug, PartialEq)]
pub enum Prediction {
    /// Nothing: it counts as wrong.
    None,
    /// One label, or which of the choices; with the probabilities of all, where they are known.
    Class {
        /// The label.
        class: u32,
        /// For each label its probability; empty where nobody knows.
        scores: Vec<f32>,
    },
    /// Any number of labels.
    Classes {
        /// The labels, in ascending order.
        classes: Vec<u32>,
        /// For each label its probability; empty where nobody knows.
        scores: Vec<f32>,
    },
    /// A number.
    Number(f64),
    /// How alike two texts are.
    Similarity {
        /// The cosine of their vectors.
        cosine: f64,
        /// The vectors, where they are known.
        vectors: Option<[Vec<f32>; 2]>,
        /// The highest cosine of the first text with one that means something else, where there are such.
        negative: Option<f64>,
    },
    /// How relevant each document of a query is: its logit.
    Ranks(Vec<f32>),
    /// A label for each word.
    Tags(Vec<u32>),
    /// A part of the passage; "" says that it has no answer.
    Answer {
        /// Its text.
        text: String,
        /// The score of "no answer" minus that of the best answer.
        null_odds: Option<f64>,
        /// The best candidates, the best first; empty where nobody knows.
        candidates: Vec<Candidate>,
    },
    /// A text that the model wrote.
    Text(String),
}

/// A possible answer, as SQuAD's n-best files have it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Candidate {
    /// Its text; "" for "no answer".
    pub text: String,
    /// Its share among the candidates.
    pub probability: f64,
    /// The logit of its first token.
    pub start_logit: f64,
    /// The logit of its last token.
    pub end_logit: f64,
}

impl Prediction {
    /// By the vectors of two texts.
    pub fn similarity(first: Vec<f32>, second: Vec<f32>) -> Self {
        Self::Similarity { cosine: cosine(&first, &second), vectors: Some([first, second]), negative: None }
    }

    /// An answer from the decoded logits of a question's windows.
    pub fn from_answers(answers: &henson_text::Answers, passage: &str) -> Self {
        let candidates = answers.candidates.iter().map(|candidate| Candidate {
            text: candidate.text(passage).to_owned(),
            probability: candidate.probability,
            start_logit: f64::from(candidate.start_logit),
            end_logit: f64::from(candidate.end_logit),
        });
        let text = answers.best().map_or("", |best| best.text(passage)).to_owned();
        Self::Answer { text, null_odds: answers.null_odds, candidates: candidates.collect() }
    }

    /// How sure it is, where one label is predicted.
    pub(crate) fn confidence(&self) -> f64 {
        match self {
            Self::Class { class, scores } => scores.get(*class as usize).map_or(0.0, |score| f64::from(*score)),
            _ => 0.0,
        }
    }

    /// Whether it says the same as the first of all; of words, to every one.
    pub(crate) fn says_the_same(&self, first: &Self) -> bool {
        match (self, first) {
            (Self::Class { class, .. }, Self::Class { class: first, .. }) => class == first,
            (Self::Classes { classes, .. }, Self::Classes { classes: first, .. }) => classes == first,
            (Self::Number(number), Self::Number(first))
            | (Self::Similarity { cosine: number, .. }, Self::Similarity { cosine: first, .. }) => {
                (number - first).abs() < 1e-6
            }
            (Self::Ranks(logits), Self::Ranks(first)) => {
                logits.iter().all(|logit| first.first().is_some_and(|first| (logit - first).abs() < 1e-6))
            }
            (Self::Tags(tags), Self::Tags(first)) => tags.iter().all(|tag| Some(tag) == first.first()),
            (Self::Answer { text, .. }, Self::Answer { text: first, .. }) | (Self::Text(text), Self::Text(first)) => {
                text == first
            }
            _ => false,
        }
    }
}

/// The files with a set's predictions, the main one first, each with the name that the benchmark gives it:
///
/// - GLUE: `CoLA.tsv` and so on, `index` and `prediction`, labels as in the task's own files, similarities within 0 and 5;
/// - questions: `predictions.json`, and where they are known `nbest_predictions.json` and `null_odds.json`;
/// - tags: `predictions.conll`, the word, the expected tag where there is one, and the predicted one, in the way that the
///   data's own file writes entities; conlleval reads it;
/// - choices: `predictions.csv`, the number of the choice, from 0;
/// - SuperGLUE: `BoolQ.jsonl` and so on, `idx` and `label` in the form that its server takes;
/// - written texts: `predictions.txt`, a line for each source with spaces for line breaks, and `predictions.jsonl` with the
///   texts as they are;
/// - all others: `predictions.jsonl`, with the probabilities of all labels where they are known.
pub fn prediction_files(set: &Set, predictions: &[Prediction]) -> Result<Vec<(String, Vec<u8>)>, TaskError> {
    if predictions.len() != set.examples.len() {
        return Err(TaskError::WrongCount { predictions: predictions.len(), examples: set.examples.len() });
    }
    set.task.form.prediction_files(set, predictions)
}

/// The benchmark's table, with cells as `value` has them, or JSON lines where there is no such table.
pub(crate) fn table(
    set: &Set,
    predictions: &[Prediction],
    value: impl Fn(&Prediction) -> Option<String>,
) -> Result<Vec<(String, Vec<u8>)>, TaskError> {
    let Some(name) = set.task.submission else { return json_lines(set, predictions) };
    if name.ends_with(".jsonl") {
        return lines(set, predictions, |prediction| value(prediction).map(Value::String));
    }
    let rows = set.examples.iter().zip(predictions).map(|(example, prediction)| {
        let value = value(prediction).ok_or_else(|| wrong_kind(set, example))?;
        Ok::<_, TaskError>(format!("{}\t{value}\n", example.id))
    });
    let text = "index\tprediction\n".to_owned() + &rows.collect::<Result<String, _>>()?;
    Ok(vec![(name.to_owned(), text.into_bytes())])
}

/// SuperGLUE's JSON lines: an example's number and what is predicted.
pub(crate) fn lines(
    set: &Set,
    predictions: &[Prediction],
    value: impl Fn(&Prediction) -> Option<Value>,
) -> Result<Vec<(String, Vec<u8>)>, TaskError> {
    let rows = set.examples.iter().zip(predictions).map(|(example, prediction)| {
        let value = value(prediction).ok_or_else(|| wrong_kind(set, example))?;
        let idx = example.id.parse::<u64>().map_or_else(|_| json!(example.id), |number| json!(number));
        Ok(format!("{}\n", json!({"idx": idx, "label": value})))
    });
    let name = set.task.submission.unwrap_or("predictions.jsonl");
    Ok(vec![(name.to_owned(), rows.collect::<Result<String, TaskError>>()?.into_bytes())])
}

/// An object for each prediction.
pub(crate) fn json_lines(set: &Set, predictions: &[Prediction]) -> Result<Vec<(String, Vec<u8>)>, TaskError> {
    let pairs = set.examples.iter().zip(predictions);
    let rows = pairs.map(|(example, prediction)| Ok(format!("{}\n", object(set, example, prediction)?)));
    Ok(vec![("predictions.jsonl".to_owned(), rows.collect::<Result<String, TaskError>>()?.into_bytes())])
}

fn object(set: &Set, example: &Example, prediction: &Prediction) -> Result<Value, TaskError> {
    let (value, scores) = match prediction {
        Prediction::Class { class, scores } => (json!(set.label(*class)), scores.as_slice()),
        Prediction::Classes { classes, scores } => {
            (classes.iter().map(|class| set.label(*class)).collect(), scores.as_slice())
        }
        Prediction::Number(number) | Prediction::Similarity { cosine: number, .. } => (json!(number), &[][..]),
        Prediction::Text(text) => (json!(text), &[][..]),
        Prediction::Ranks(logits) => (json!(logits), &[][..]),
        _ => return Err(wrong_kind(set, example)),
    };
    let mut object = Map::from_iter([("id".to_owned(), json!(example.id)), ("prediction".to_owned(), value)]);
    if !scores.is_empty() {
        let scores = set.labels.iter().cloned().zip(scores.iter().map(|score| json!(score)));
        object.insert("scores".to_owned(), Value::Object(scores.collect()));
    }
    Ok(Value::Object(object))
}
