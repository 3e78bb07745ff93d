//! Prediction files back to predictions, whoever wrote them.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use henson_data::tables::{self, Column, Header, Row, TableFormat, TableOptions};
use serde_json::Value;

use super::Prediction;
use crate::error::TaskError;
use crate::example::{Example, Input, Set};
use crate::read::{listed, reading_with, text, texts};
use crate::tags::{Scheme, convert_tags};
use crate::task::TaskKind;

const IDS: [&str; 4] = ["index", "id", "idx", "guid"];
const PREDICTIONS: [&str; 5] = ["prediction", "predictions", "label", "pred", "answer"];

/// Reads the predictions for a set, one for each of its examples: any of the files that [`crate::prediction_files`] names,
/// plain lists of labels with one a line, and tables of ids and predictions.
///
/// A prediction belongs to the example with its id; where ids are only a count from 0, to the example in that place. Labels
/// that the set learnt from its file may be joined by new ones here.
///
/// Questions without prediction have [`Prediction::None`]; otherwise every example must have one.
pub fn read_predictions(path: &Path, set: &mut Set) -> Result<Vec<Prediction>, TaskError> {
    match set.task.kind {
        TaskKind::Tag => tags(path, set),
        TaskKind::Qa => answers(path, set),
        _ => rows(path, set),
    }
}

/// Puts the odds of a null_odds.json into predictions; gives the number of questions that it lacks.
pub fn read_null_odds(path: &Path, set: &Set, predictions: &mut [Prediction]) -> Result<usize, TaskError> {
    let odds: HashMap<String, f64> = tables::read_json(path)?;
    let mut missing = 0;
    for (example, prediction) in set.examples.iter().zip(predictions) {
        match (odds.get(&example.id), prediction) {
            (Some(odds), Prediction::Answer { null_odds, .. }) => *null_odds = Some(*odds),
            _ => missing += 1,
        }
    }
    if missing == set.examples.len() {
        return Err(TaskError::mismatch(path, "it has odds for none of the questions"));
    }
    Ok(missing)
}

fn answers(path: &Path, set: &Set) -> Result<Vec<Prediction>, TaskError> {
    let mut found: BTreeMap<String, Value> = tables::read_json(path)?;
    let mut predictions = Vec::with_capacity(set.examples.len());
    let mut missing = 0;
    for example in &set.examples {
        predictions.push(match found.remove(&example.id) {
            Some(Value::String(text)) => Prediction::Answer { text, null_odds: None, candidates: Vec::new() },
            // An n-best file: its first candidate is the answer.
            Some(Value::Array(candidates)) => {
                let problem = |error| {
                    TaskError::row(path, format!("question {}", example.id), format!("no list of candidates: {error}"))
                };
                let candidates: Vec<super::Candidate> =
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

/// The last column holds what is predicted. Words and sentences must be those of the data.
fn tags(path: &Path, set: &mut Set) -> Result<Vec<Prediction>, TaskError> {
    let universal = path.to_string_lossy().to_lowercase().contains(".conllu");
    let mut sentences: Vec<(u64, Vec<String>, Vec<String>)> = Vec::new();
    reading_with(
        |each| tables::read_sentences(path, universal, each),
        |sentence| {
            let (mut words, mut tags) = (Vec::new(), Vec::new());
            let sentence = sentence?;
            let line = sentence.words.first().map_or(0, |(line, _)| *line);
            for (line, mut cells) in sentence.words {
                if universal && cells.first().is_some_and(|id| id.contains(['-', '.'])) {
                    continue;
                }
                let (word, tag) = match universal {
                    true => (1, 3),
                    false => (0, cells.len().wrapping_sub(1)),
                };
                if cells.len() < 2 || tag >= cells.len() {
                    let problem = "expected a word and its predicted tag, in the first and last columns";
                    return Err(TaskError::row(path, format!("line {line}"), problem));
                }
                tags.push(std::mem::take(&mut cells[tag]));
                words.push(std::mem::take(&mut cells[word]));
            }
            sentences.push((line, words, tags));
            Ok(())
        },
    )?;
    if sentences.len() != set.examples.len() {
        let problem =
            format!("it has {} sentences, {} has {}", sentences.len(), set.path.display(), set.examples.len());
        return Err(TaskError::mismatch(path, problem));
    }
    let mut predictions = Vec::with_capacity(sentences.len());
    for (i, (line, words, tags)) in sentences.into_iter().enumerate() {
        let example = &set.examples[i];
        if let Input::Words { words: expected, .. } = &example.input
            && **expected != words
        {
            let at = expected.iter().zip(&words).position(|(a, b)| a != b).unwrap_or(expected.len().min(words.len()));
            let shown =
                |words: &[String]| words.get(at).map_or("the sentence's end".to_owned(), |word| format!("{word:?}"));
            let problem = format!(
                "word {} of the sentence is {}, in {} (sentence at {}) it is {}",
                at + 1,
                shown(&words),
                set.path.display(),
                example.place,
                shown(expected)
            );
            return Err(TaskError::row(path, format!("sentence at line {line}"), problem));
        }
        // As the data's own tags were read. Those of BIO stay as they are, well-formed or not.
        let tags = match set.scheme {
            Some(scheme) if scheme != Scheme::Bio => convert_tags(&tags, Scheme::Bio),
            _ => tags,
        };
        let numbers: Result<Vec<u32>, String> = tags.iter().map(|tag| label_number(set, tag)).collect();
        let numbers = numbers.map_err(|problem| TaskError::row(path, format!("sentence at line {line}"), problem))?;
        predictions.push(Prediction::Tags(numbers));
    }
    Ok(predictions)
}

/// A row of a table of predictions.
struct Found {
    id: Option<String>,
    place: String,
    value: Value,
    scores: Option<Value>,
}

fn rows(path: &Path, set: &mut Set) -> Result<Vec<Prediction>, TaskError> {
    let named = IDS.iter().chain(&PREDICTIONS).map(|name| (*name).to_owned()).collect();
    let options = TableOptions { header: Header::IfNamed(named), ..TableOptions::default() };
    let mut found = Vec::new();
    reading_with(
        |each| tables::read_rows(path, &options, each),
        |row| {
            found.push(found_in(path, &row?)?);
            Ok(())
        },
    )?;
    if TableFormat::of(path).is_none() && found.is_empty() {
        return Err(TaskError::mismatch(path, "it is empty"));
    }
    let order = match_up(path, set, &found)?;
    let mut predictions = Vec::with_capacity(order.len());
    for (i, at) in order.into_iter().enumerate() {
        let Found { place, value, scores, .. } = &found[at];
        let prediction = prediction(set, i, value, scores.as_ref());
        predictions.push(prediction.map_err(|problem| TaskError::row(path, place.clone(), problem))?);
    }
    Ok(predictions)
}

fn found_in(path: &Path, row: &Row) -> Result<Found, TaskError> {
    let place = format!("line {}", row.line);
    let by_name = |names: &[&str]| names.iter().find_map(|name| row.get(&Column::Name((*name).to_owned())));
    let (id, value) = match (row.names().is_empty() && !row.is_object(), row.width()) {
        (true, 1) => (None, row.get(&Column::Number(0))),
        (true, 2) => (row.get(&Column::Number(0)), row.get(&Column::Number(1))),
        (true, _) => (None, None),
        (false, _) => (by_name(&IDS), by_name(&PREDICTIONS)),
    };
    let Some(value) = value else {
        let names = row.names();
        let found = if names.is_empty() { format!("{} columns", row.width()) } else { listed(&names) };
        let problem = format!("no prediction: expected the columns \"index\" and \"prediction\", found {found}");
        return Err(TaskError::row(path, place, problem));
    };
    let id = id.and_then(|id| text(id).ok().flatten());
    let scores = row.get(&Column::Name("scores".to_owned())).cloned();
    Ok(Found { id, place, value: value.clone(), scores })
}

/// For each example the row with its prediction.
fn match_up(path: &Path, set: &Set, found: &[Found]) -> Result<Vec<usize>, TaskError> {
    let mut places: HashMap<&str, usize> = HashMap::new();
    let counted = found.iter().enumerate().all(|(i, row)| row.id.as_ref().is_none_or(|id| *id == i.to_string()));
    for (i, row) in found.iter().enumerate() {
        if let Some(id) = &row.id
            && places.insert(id, i).is_some()
        {
            return Err(TaskError::row(path, row.place.clone(), format!("a second prediction for {id:?}")));
        }
    }
    let by_id: Option<Vec<usize>> =
        set.examples.iter().map(|example| places.get(example.id.as_str()).copied()).collect();
    let unique = || {
        let mut ids: Vec<&str> = set.examples.iter().map(|example| example.id.as_str()).collect();
        ids.sort_unstable();
        ids.windows(2).all(|two| two[0] != two[1])
    };
    let complete = found.len() == set.examples.len() || set.skipped + set.undecided > 0;
    match by_id {
        Some(order) if complete && unique() => Ok(order),
        _ if counted && found.len() == set.examples.len() => Ok((0..found.len()).collect()),
        Some(_) if !unique() => Err(TaskError::mismatch(path, format!("ids repeat in {}", set.path.display()))),
        Some(_) => {
            let problem = format!("it has {} predictions for {} examples", found.len(), set.examples.len());
            Err(TaskError::mismatch(path, problem))
        }
        None => {
            let missing: Vec<&Example> =
                set.examples.iter().filter(|example| !places.contains_key(example.id.as_str())).collect();
            let ids: Vec<&str> = missing.iter().take(3).map(|example| example.id.as_str()).collect();
            let problem = format!(
                "{} of {} examples have no prediction, such as those with the ids {}; it has {} predictions",
                missing.len(),
                set.examples.len(),
                listed(&ids),
                found.len()
            );
            Err(TaskError::mismatch(path, problem))
        }
    }
}

fn prediction(set: &mut Set, example: usize, value: &Value, scores: Option<&Value>) -> Result<Prediction, String> {
    let missing = || "the prediction is empty".to_owned();
    let word = || text(value)?.map(|word| word.trim().to_owned()).filter(|word| !word.is_empty()).ok_or_else(missing);
    Ok(match set.task.kind {
        kind @ (TaskKind::Regress | TaskKind::Embed) => {
            let word = word()?;
            let number = word.parse().ok().filter(|number: &f64| number.is_finite());
            let number = number.ok_or_else(|| format!("expected a number, found {word:?}"))?;
            match kind {
                TaskKind::Embed => Prediction::Similarity { cosine: number, vectors: None },
                _ => Prediction::Number(number),
            }
        }
        TaskKind::Choice => {
            let choices = match &set.examples[example].input {
                Input::Choices { endings, .. } => endings.len(),
                _ => 0,
            };
            let word = word()?;
            let letter = match word.as_bytes() {
                [letter] if letter.is_ascii_alphabetic() => Some(u32::from(letter.to_ascii_uppercase() - b'A')),
                _ => None,
            };
            let class = letter.or(word.parse().ok()).filter(|class| (*class as usize) < choices);
            let problem = || format!("expected the number of one of {choices} choices, from 0, found {word:?}");
            Prediction::Class { class: class.ok_or_else(problem)?, scores: Vec::new() }
        }
        TaskKind::Multilabel => {
            let names = match value {
                Value::Array(_) => texts(value)?,
                _ => {
                    text(value)?.unwrap_or_default().split([',', ';', '|']).map(|name| name.trim().to_owned()).collect()
                }
            };
            let names = names.iter().filter(|name| !name.is_empty());
            let mut classes = names.map(|name| label_number(set, name)).collect::<Result<Vec<u32>, _>>()?;
            classes.sort_unstable();
            classes.dedup();
            Prediction::Classes { classes, scores: scores_of(set, scores)? }
        }
        _ => Prediction::Class { class: label_number(set, &word()?)?, scores: scores_of(set, scores)? },
    })
}

fn label_number(set: &mut Set, label: &str) -> Result<u32, String> {
    let known = set.labels.iter().position(|known| known == label);
    let meant = || set.task.meanings.iter().position(|meaning| *meaning == label);
    match known.or_else(meant) {
        Some(number) => Ok(number as u32),
        None if set.labels_are_final => Err(format!("unknown label {label:?}: expected {}", listed(&set.labels))),
        None => {
            set.labels.push(label.to_owned());
            Ok(set.labels.len() as u32 - 1)
        }
    }
}

fn scores_of(set: &mut Set, scores: Option<&Value>) -> Result<Vec<f32>, String> {
    let Some(Value::Object(scores)) = scores else { return Ok(Vec::new()) };
    let mut all = vec![0.0; set.labels.len()];
    for (label, score) in scores {
        let number = label_number(set, label)? as usize;
        all.resize(all.len().max(number + 1), 0.0);
        all[number] = score.as_f64().ok_or_else(|| format!("the score of {label:?} is no number"))? as f32;
    }
    Ok(all)
}
