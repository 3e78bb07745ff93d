//! Predictions to the files that each benchmark wants.

use serde_json::{Map, Value, json};

use super::Prediction;
use crate::error::TaskError;
use crate::example::{Example, Input, Set, Target};
use crate::tags::{Scheme, convert_tags};
use crate::task::TaskKind;

/// The files with a set's predictions, the main one first, each with the name that the benchmark gives it:
///
/// - GLUE: `CoLA.tsv` and so on, `index` and `prediction`, labels as in the task's own files, similarities within 0 and 5;
/// - questions: `predictions.json`, and where they are known `nbest_predictions.json` and `null_odds.json`;
/// - tags: `predictions.conll`, the word, the expected tag where there is one, and the predicted one, in the way that the
///   data's own file writes entities; conlleval reads it;
/// - choices: `predictions.csv`, the number of the choice, from 0;
/// - all others: `predictions.jsonl`, with the probabilities of all labels where they are known.
pub fn prediction_files(set: &Set, predictions: &[Prediction]) -> Result<Vec<(String, Vec<u8>)>, TaskError> {
    if predictions.len() != set.examples.len() {
        return Err(TaskError::WrongCount { predictions: predictions.len(), examples: set.examples.len() });
    }
    let pairs = || set.examples.iter().zip(predictions);
    let file = |name: &str, text: String| (name.to_owned(), text.into_bytes());
    let files = match (set.task.kind, set.task.submission) {
        (TaskKind::Qa, name) => {
            let mut files = vec![file(name.unwrap_or("predictions.json"), answers(pairs())?)];
            files.extend(n_best(pairs())?.map(|text| file("nbest_predictions.json", text)));
            files.extend(null_odds(pairs())?.map(|text| file("null_odds.json", text)));
            files
        }
        (TaskKind::Tag, _) => vec![file("predictions.conll", columns(set, predictions)?)],
        (TaskKind::Choice, _) => {
            let rows = pairs().map(|(example, prediction)| match prediction {
                Prediction::Class { class, .. } => Ok(format!("{},{class}\n", quoted(&example.id))),
                _ => Err(wrong_kind(set, example)),
            });
            vec![file("predictions.csv", "id,prediction\n".to_owned() + &rows.collect::<Result<String, _>>()?)]
        }
        (_, Some(name)) => {
            let rows = pairs().map(|(example, prediction)| {
                let value = match prediction {
                    Prediction::Class { class, .. } => set.label(*class).to_owned(),
                    Prediction::Number(number) => format!("{:.3}", number.clamp(0.0, 5.0)),
                    _ => return Err(wrong_kind(set, example)),
                };
                Ok(format!("{}\t{value}\n", example.id))
            });
            vec![file(name, "index\tprediction\n".to_owned() + &rows.collect::<Result<String, _>>()?)]
        }
        (_, None) => {
            let rows = pairs().map(|(example, prediction)| Ok(format!("{}\n", object(set, example, prediction)?)));
            vec![file("predictions.jsonl", rows.collect::<Result<String, TaskError>>()?)]
        }
    };
    Ok(files)
}

fn wrong_kind(set: &Set, example: &Example) -> TaskError {
    TaskError::WrongKind { id: example.id.clone(), task: set.task.name }
}

fn object(set: &Set, example: &Example, prediction: &Prediction) -> Result<Value, TaskError> {
    let (value, scores) = match prediction {
        Prediction::Class { class, scores } => (json!(set.label(*class)), scores.as_slice()),
        Prediction::Classes { classes, scores } => {
            (classes.iter().map(|class| set.label(*class)).collect(), scores.as_slice())
        }
        Prediction::Number(number) | Prediction::Similarity { cosine: number, .. } => (json!(number), &[][..]),
        _ => return Err(wrong_kind(set, example)),
    };
    let mut object = Map::from_iter([("id".to_owned(), json!(example.id)), ("prediction".to_owned(), value)]);
    if !scores.is_empty() {
        let scores = set.labels.iter().cloned().zip(scores.iter().map(|score| json!(score)));
        object.insert("scores".to_owned(), Value::Object(scores.collect()));
    }
    Ok(Value::Object(object))
}

type Pair<'a> = (&'a Example, &'a Prediction);

fn answers<'a>(pairs: impl Iterator<Item = Pair<'a>>) -> Result<String, TaskError> {
    let entries = pairs.map(|(example, prediction)| match prediction {
        Prediction::Answer { text, .. } => Ok((example.id.clone(), json!(text))),
        _ => Err(TaskError::WrongKind { id: example.id.clone(), task: "qa" }),
    });
    document(entries.collect::<Result<_, _>>()?)
}

fn n_best<'a>(pairs: impl Iterator<Item = Pair<'a>>) -> Result<Option<String>, TaskError> {
    let mut entries = Vec::new();
    for (example, prediction) in pairs {
        if let Prediction::Answer { candidates, .. } = prediction
            && !candidates.is_empty()
        {
            entries.push((example.id.clone(), json!(candidates)));
        }
    }
    if entries.is_empty() { Ok(None) } else { document(entries).map(Some) }
}

fn null_odds<'a>(pairs: impl Iterator<Item = Pair<'a>>) -> Result<Option<String>, TaskError> {
    let mut entries = Vec::new();
    for (example, prediction) in pairs {
        if let Prediction::Answer { null_odds: Some(odds), .. } = prediction {
            entries.push((example.id.clone(), json!(odds)));
        }
    }
    if entries.is_empty() { Ok(None) } else { document(entries).map(Some) }
}

/// An object with its entries in the order of the data, as the reference programs write it.
fn document(entries: Vec<(String, Value)>) -> Result<String, TaskError> {
    let lines = entries.iter().map(|(id, value)| format!("    {}: {value}", json!(id)));
    Ok(format!("{{\n{}\n}}\n", lines.collect::<Vec<_>>().join(",\n")))
}

fn columns(set: &Set, predictions: &[Prediction]) -> Result<String, TaskError> {
    let mut text = String::new();
    let words_of = |example: &Example| match &example.input {
        Input::Words { words, .. } => words.to_vec(),
        _ => Vec::new(),
    };
    let has_space = set.examples.iter().any(|example| words_of(example).iter().any(|word| word.contains(' ')));
    let separator = if has_space { '\t' } else { ' ' };
    for (example, prediction) in set.examples.iter().zip(predictions) {
        let words = words_of(example);
        let Prediction::Tags(tags) = prediction else { return Err(wrong_kind(set, example)) };
        if tags.len() != words.len() {
            return Err(wrong_kind(set, example));
        }
        let predicted = written(set, tags);
        let expected = match &example.target {
            Target::Tags(tags) => Some(written(set, tags)),
            _ => None,
        };
        for (i, word) in words.iter().enumerate() {
            text.push_str(word);
            for tags in expected.iter().chain([&predicted]) {
                text.push(separator);
                text.push_str(&tags[i]);
            }
            text.push('\n');
        }
        text.push('\n');
    }
    Ok(text)
}

/// Tags as the data's own file writes them. BIO is left as it is, well-formed or not.
fn written(set: &Set, tags: &[u32]) -> Vec<String> {
    let tags: Vec<String> = tags.iter().map(|tag| set.label(*tag).to_owned()).collect();
    match set.scheme {
        Some(scheme) if scheme != Scheme::Bio => convert_tags(&tags, scheme),
        _ => tags,
    }
}

fn quoted(cell: &str) -> String {
    match cell.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", cell.replace('"', "\"\"")),
        false => cell.to_owned(),
    }
}
