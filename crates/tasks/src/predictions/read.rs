//! Prediction files back to predictions, whoever wrote them.

use std::collections::HashMap;
use std::path::Path;

use henson_data::tables::{self, Column, Header, Row, TableFormat, TableOptions};
use serde_json::Value;

use super::Prediction;
use crate::error::TaskError;
use crate::example::{Example, Set};
use crate::read::{listed, reading_with, text};

const IDS: [&str; 4] = ["index", "id", "idx", "guid"];
const PREDICTIONS: [&str; 5] = ["prediction", "predictions", "label", "pred", "answer"];

/// Reads the predictions for a set, one for each of its examples: any of the files that [`crate::prediction_files`] names,
/// plain lists of labels with one a line, and tables of ids and predictions.
///
/// A prediction belongs to the example with its id; where ids are only a count from 0, to the example in that place. Labels
/// that the set learned from its file may be joined by new ones here.
///
/// Questions without prediction have [`Prediction::None`]; otherwise every example must have one.
pub fn read_predictions(path: &Path, set: &mut Set) -> Result<Vec<Prediction>, TaskError> {
    let form = set.task.form;
    form.read_predictions(path, set)
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

/// A row of a table of predictions.
pub(crate) struct Found {
    id: Option<String>,
    place: String,
    /// What is predicted.
    pub(crate) value: Value,
    scores: Option<Value>,
    /// The number of its example.
    pub(crate) example: usize,
}

/// Reads a table of predictions.
pub(crate) fn read_rows(path: &Path, set: &mut Set) -> Result<Vec<Prediction>, TaskError> {
    let form = set.task.form;
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
        found[at].example = i;
        let prediction = form.prediction(set, &found[at]);
        predictions.push(prediction.map_err(|problem| TaskError::row(path, found[at].place.clone(), problem))?);
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
    Ok(Found { id, place, value: value.clone(), scores, example: 0 })
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

impl Found {
    /// A prediction for an example.
    pub(crate) fn of(example: usize, value: Value) -> Self {
        Self { id: None, place: String::new(), value, scores: None, example }
    }

    /// The prediction as a word.
    pub(crate) fn word(&self) -> Result<String, String> {
        let word = text(&self.value)?.map(|word| word.trim().to_owned()).filter(|word| !word.is_empty());
        word.ok_or_else(|| "the prediction is empty".to_owned())
    }

    /// The number of the label that it names.
    pub(crate) fn label(&self, set: &mut Set) -> Result<u32, String> {
        label_number(set, &self.word()?)
    }

    pub(crate) fn number(&self) -> Result<f64, String> {
        let word = self.word()?;
        let number = word.parse().ok().filter(|number: &f64| number.is_finite());
        number.ok_or_else(|| format!("expected a number, found {word:?}"))
    }

    /// The probabilities of all labels, where they are known.
    pub(crate) fn scores(&self, set: &mut Set) -> Result<Vec<f32>, String> {
        let Some(Value::Object(scores)) = &self.scores else { return Ok(Vec::new()) };
        let mut all = vec![0.0; set.labels.len()];
        for (label, score) in scores {
            let number = label_number(set, label)? as usize;
            all.resize(all.len().max(number + 1), 0.0);
            all[number] = score.as_f64().ok_or_else(|| format!("the score of {label:?} is not a number"))? as f32;
        }
        Ok(all)
    }
}

/// The number of a label, which is new where the set's own were only learned.
pub(crate) fn label_number(set: &mut Set, label: &str) -> Result<u32, String> {
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
