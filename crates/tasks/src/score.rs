//! Predictions against labels: every score that a task has, and what people want to look at.

use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::error::TaskError;
use crate::example::{Example, Input, Set};
use crate::metrics::{Confusion, Counts};
use crate::predictions::Prediction;

/// The most confusions that are kept for scripts and reports.
const CONFUSIONS: usize = 200;

/// How much of a text a mistake shows.
const SHOWN: usize = 160;

/// How a set was predicted.
#[derive(Clone, Debug, Default)]
pub struct Score {
    /// The scores by their names, the more important first. All are shares from 0 to 1 or correlations, but for those of
    /// answers, which are percentages as SQuAD's programs print them, BLEU and chrF from 0 to 100, and losses.
    pub metrics: Vec<(&'static str, f64)>,
    /// Examples that were scored.
    pub examples: usize,
    /// Of these, those without prediction, which count as wrong.
    pub missing: usize,
    /// The label that `f1` is about, where there are two.
    pub positive: Option<String>,
    /// What was taken for what, where each example has one label.
    pub confusion: Option<Confusion>,
    /// Each label or kind of entity.
    pub labels: Vec<LabelScore>,
    /// The names of the confusion's rows.
    pub names: Vec<String>,
    /// The worst mistakes, the worst first.
    pub mistakes: Vec<Mistake>,
    /// How scores of written texts were computed, by the names of these.
    pub signatures: Vec<(&'static str, String)>,
    /// Different sources, where rows with the same one are scored together.
    pub sources: Option<usize>,
}

/// How one label or kind of entity was predicted.
#[derive(Clone, Debug, PartialEq)]
pub struct LabelScore {
    /// Its name.
    pub name: String,
    /// What precision, recall and F1 are made of.
    pub counts: Counts,
}

impl LabelScore {
    /// Of all classes of a confusion.
    pub(crate) fn of_confusion(names: &[String], confusion: &Confusion) -> Vec<Self> {
        let label = |(class, name): (usize, &String)| Self { name: name.clone(), counts: confusion.counts(class) };
        names.iter().enumerate().map(label).collect()
    }
}

/// A prediction that is wrong.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Mistake {
    /// The example.
    pub id: String,
    /// Where it stands in its file.
    pub place: String,
    /// What the model read, cut to a line.
    pub text: String,
    /// What is right.
    pub expected: String,
    /// What was predicted.
    pub predicted: String,
    /// How wrong: the probability of the wrong label, the difference of numbers, wrong entities or words, 1 − F1 of answers.
    pub weight: f64,
}

impl Score {
    /// A score by its name; `f1:LABEL`, `precision:LABEL` and `recall:LABEL` are those of a label or kind of entity.
    pub fn get(&self, name: &str) -> Option<f64> {
        if let Some((_, value)) = self.metrics.iter().find(|(other, _)| *other == name) {
            return Some(*value);
        }
        let (part, label) = name.split_once(':')?;
        let counts = self.labels.iter().find(|other| other.name == label)?.counts;
        match part {
            "f1" => Some(counts.f1()),
            "precision" => Some(counts.precision()),
            "recall" => Some(counts.recall()),
            _ => None,
        }
    }

    /// The scores for scripts; what is not a number is null. Of what was taken for what, only mistakes are kept, the most
    /// frequent first and no more than a bounded number: what was right is in `labels`.
    pub fn to_json(&self) -> Map<String, Value> {
        let mut object: Map<String, Value> =
            self.metrics.iter().map(|(name, value)| ((*name).to_owned(), json!(value))).collect();
        object.insert("examples".to_owned(), json!(self.examples));
        if let Some(sources) = self.sources {
            object.insert("sources".to_owned(), json!(sources));
        }
        if !self.signatures.is_empty() {
            let signatures = self.signatures.iter().map(|(name, text)| ((*name).to_owned(), json!(text)));
            object.insert("signatures".to_owned(), Value::Object(signatures.collect()));
        }
        if self.missing > 0 {
            object.insert("missing".to_owned(), json!(self.missing));
        }
        if let Some(positive) = &self.positive {
            object.insert("positive".to_owned(), json!(positive));
        }
        if !self.labels.is_empty() {
            let labels = self.labels.iter().map(|label| {
                let Counts { predicted, expected, .. } = label.counts;
                let (precision, recall, f1) = (label.counts.precision(), label.counts.recall(), label.counts.f1());
                let value = json!({
                    "precision": precision, "recall": recall, "f1": f1, "expected": expected, "predicted": predicted,
                });
                (label.name.clone(), value)
            });
            object.insert("labels".to_owned(), Value::Object(labels.collect()));
        }
        if let Some(confusion) = &self.confusion {
            let name = |class: usize| &self.names[class];
            let each = confusion.mistakes(CONFUSIONS).into_iter().map(|(expected, predicted, count)| {
                json!({"expected": name(expected), "predicted": name(predicted), "count": count})
            });
            object.insert("confusions".to_owned(), each.collect());
        }
        object
    }
}

/// Scores the predictions for a set, in its order. Answers whose odds for "no answer" are above `threshold` count as "".
/// At most `mistakes` of the worst mistakes are kept.
pub fn score(
    set: &Set,
    predictions: &[Prediction],
    threshold: Option<f64>,
    mistakes: usize,
) -> Result<Score, TaskError> {
    if predictions.len() != set.examples.len() {
        return Err(TaskError::WrongCount { predictions: predictions.len(), examples: set.examples.len() });
    }
    if !set.is_labelled() && set.task.form.needs_targets {
        return Err(TaskError::NoLabels {
            path: set.path.clone(),
            needed: "scoring needs a file with labels (of a table, --label-column names the column)",
        });
    }
    let mut score = set.task.form.score(set, predictions, threshold)?;
    score.examples = set.examples.len();
    score.mistakes.sort_by(|a, b| b.weight.total_cmp(&a.weight));
    score.mistakes.truncate(mistakes);
    Ok(score)
}

/// A prediction that is wrong, by so much.
pub(crate) fn mistake(example: &Example, expected: String, predicted: String, weight: f64) -> Mistake {
    let text = match &example.input {
        Input::One(text) => text.clone(),
        Input::Pair(first, second) => format!("{first} | {second}"),
        Input::Words { words, .. } => words.join(" "),
        Input::Question { question, .. } => question.clone(),
        Input::Choices { context, .. } => context.clone(),
        Input::Alike { first, second, .. } => format!("{first} | {second}"),
        Input::Answered { question, answer, .. } => format!("{question} | {answer}"),
        Input::Cloze { query, .. } => query.clone(),
        Input::Marked { first, second, .. } => match second {
            Some(second) => format!("{first} | {second}"),
            None => first.clone(),
        },
    };
    let mut text: String = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if let Some((cut, _)) = text.char_indices().nth(SHOWN) {
        text.truncate(cut);
        text.push('…');
    }
    Mistake { id: example.id.clone(), place: example.place.clone(), text, expected, predicted, weight }
}
