//! What the rows of a file give to the losses of vectors, and what these losses refuse.

use std::collections::HashMap;

use henson_data::tables::Column;
use henson_train::TrainError;
use serde_json::Value;

use super::embed::keep_alike;
use super::*;
use crate::sentences::SentenceLoss;

/// The texts that mean something else, where the row has some: in one column, as a text or a list, or in `negative_1`, `negative_2`
/// and so on.
pub(super) fn unlike(cells: &Cells<'_>) -> Result<Vec<String>, TaskError> {
    let (path, row, user) = (cells.path, cells.row, cells.files.negative_column.as_ref());
    let role = Role { what: "the negative text", flag: "--negative-column", names: &["negative", "neg", "negatives"] };
    let mut columns: Vec<(Column, &Value)> = match user {
        Some(_) => vec![rows::need(path, row, user, &role, None)?],
        None => rows::find(row, None, role.names, None).into_iter().collect(),
    };
    if user.is_none() {
        let numbered = (1..).map_while(|n| rows::find(row, None, &[&format!("negative_{n}")], None));
        columns.extend(numbered);
    }
    let mut all = Vec::new();
    for (column, value) in columns {
        let wrong = |problem: String| cells.wrong(format!("column {column}: {problem}"));
        match value {
            Value::Array(_) => all.extend(texts(value).map_err(wrong)?),
            _ => all.extend(text(value).map_err(wrong)?),
        }
    }
    all.retain(|text| !text.trim().is_empty());
    Ok(all)
}

/// The partners of a text in a list.
pub(super) fn partners_in(cells: &Cells<'_>, column: &Column, value: &Value) -> Result<Vec<String>, TaskError> {
    let wrong = |problem: String| cells.wrong(format!("column {column}: {problem}"));
    let all = texts(value).map_err(wrong)?;
    match all.iter().any(|text| text.trim().is_empty()) || all.is_empty() {
        true => Err(wrong("the list is empty, or a text in it is".to_owned())),
        false => Ok(all),
    }
}

/// Where losses find what vectors are held against, where no column was named: a score or a class, and a teacher's numbers.
const LABELS: &[&str] = &["score", "label", "gold_label"];
const NUMBERS: &[&str] = &["score", "scores", "margin", "embedding", "vector", "label", "labels"];

/// What a loss needs of a row.
pub(super) fn target_of(
    loss: SentenceLoss,
    cells: &Cells<'_>,
    collector: &mut Collector<'_>,
) -> Result<Target, TaskError> {
    let names = if matches!(loss, SentenceLoss::Mse | SentenceLoss::MarginMse) { NUMBERS } else { LABELS };
    let found = cells.label.clone().or_else(|| rows::find(cells.row, None, names, None));
    let Some((column, value)) = found.filter(|(_, value)| !value.is_null()) else { return Ok(Target::None) };
    let wrong = |problem: String| cells.wrong(format!("column {column}: {problem}"));
    let number = |value: &Value| {
        let text = text(value)?.unwrap_or_default();
        let number = text.trim().parse::<f64>().ok().filter(|number| (*number as f32).is_finite());
        number.ok_or_else(|| format!("expected a number, found {text:?}"))
    };
    match (loss, value) {
        (SentenceLoss::Ranking | SentenceLoss::Triplet, _) => Ok(Target::None),
        (SentenceLoss::Softmax, _) => {
            collector.adopt(cells.row, &column);
            let named = collector.named(cells.row, &column, value);
            Ok(collector.class(&named).map_err(wrong)?.map_or(Target::None, Target::Class))
        }
        (SentenceLoss::Mse | SentenceLoss::MarginMse, Value::Array(values)) => {
            let numbers = values.iter().map(|value| Ok(number(value)? as f32));
            Ok(Target::Numbers(numbers.collect::<Result<_, String>>().map_err(wrong)?))
        }
        (SentenceLoss::Mse, _) => Err(wrong("expected a list of numbers, the teacher's vector".to_owned())),
        (_, Value::String(text)) if text.trim().is_empty() => Ok(Target::None),
        _ => Ok(Target::Number(number(value).map_err(wrong)?)),
    }
}

/// Whether a recipe without a `loss` asks for what only losses of vectors have.
pub(super) fn asks_for_vectors(recipe: &FineTuneRecipe) -> bool {
    let plain = recipe.poolings() == [henson_infer::Pooling::Mean] && recipe.matryoshka.is_empty();
    recipe.symmetric || recipe.cached_gradients || recipe.normalize.is_some() || !plain
}

/// Refuses settings that a loss does not have.
pub(super) fn check_loss(recipe: &FineTuneRecipe) -> Result<(), TaskError> {
    let apart = matches!(recipe.loss, Some(SentenceLoss::Contrastive | SentenceLoss::Triplet));
    let (ranks, scored) = match recipe.loss {
        None => (true, recipe.min_score.is_some()),
        Some(loss) => (loss == SentenceLoss::Ranking, recipe.min_score.is_some()),
    };
    let wrong = [
        (recipe.margin.is_some() && !apart, "margin", "loss = \"contrastive\" or \"triplet\", which have one"),
        (recipe.distance.is_some() && !apart, "distance", "loss = \"contrastive\" or \"triplet\", which have one"),
        (recipe.symmetric && !ranks, "symmetric", "loss = \"ranking\""),
        (scored && !ranks, "min_score", "loss = \"ranking\""),
        (
            recipe.cached_gradients && !recipe.loss.is_none_or(SentenceLoss::is_in_batch),
            "cached_gradients",
            "loss = \"ranking\" or \"cosent\": others look at one example at a time, so that `accumulation` gives the same",
        ),
        (
            !recipe.matryoshka.is_empty() && recipe.loss == Some(SentenceLoss::Softmax),
            "matryoshka",
            "another loss than softmax, whose layer reads whole vectors",
        ),
    ];
    match wrong.into_iter().find(|(wrong, ..)| *wrong) {
        Some((_, key, expected)) => Err(TrainError::setting(key, "set", expected).into()),
        None => Ok(()),
    }
}

/// Adds to a set's problems that rows are there twice, or say different things about the same texts. Neither keeps anyone from
/// learning: in a batch, a text that occurs again is never a negative.
pub fn report_twins(train: &mut Set) {
    let mut known: HashMap<(&str, &str, &[String]), &Example> = HashMap::new();
    let (mut twins, mut at_odds) = (Vec::new(), Vec::new());
    for example in &train.examples {
        let Input::Alike { first, second, unlike } = &example.input else { continue };
        let key = (first.as_str(), second.as_str(), unlike.as_slice());
        match known.get(&key) {
            Some(before) if before.target == example.target => {
                twins.push((before.place.clone(), example.place.clone()))
            }
            Some(before) => at_odds.push((before.place.clone(), example.place.clone())),
            None => {
                known.insert(key, example);
            }
        }
    }
    let path = train.path.display().to_string();
    let all = [
        (twins, "the same as earlier ones"),
        (at_odds, "about the same texts as earlier ones, with another label or score"),
    ];
    for (found, what) in all {
        if let Some((before, again)) = found.first() {
            train.problems.push(format!("{path}: {} rows are {what}, first {again}, after {before}", found.len()));
        }
    }
}

/// Refuses rows without what a loss needs, and brings their targets into its form.
pub(super) fn keep_for(loss: SentenceLoss, train: &mut Set, recipe: &FineTuneRecipe) -> Result<(), TaskError> {
    if matches!(loss, SentenceLoss::Ranking) {
        train.examples.iter_mut().for_each(|example| example.target = Target::None);
        return keep_alike(train, &FineTuneRecipe { min_score: None, ..recipe.clone() });
    }
    let path = train.path.clone();
    for example in &mut train.examples {
        let place = example.place.clone();
        let wrong = |problem: &str| Err(TaskError::row(&path, place.clone(), problem));
        let Input::Alike { unlike, .. } = &mut example.input else { continue };
        if loss.needs_negatives() && unlike.is_empty() {
            return wrong("it has no negative text, which this loss needs (--negative-column)");
        }
        if !loss.needs_negatives() {
            unlike.clear();
        }
        let needs_target = loss != SentenceLoss::Triplet;
        let target = std::mem::replace(&mut example.target, Target::None);
        example.target = match (loss, target) {
            (_, Target::None) if needs_target => {
                return wrong("it has no label, score or vector, which this loss needs (--label-column)");
            }
            (SentenceLoss::Contrastive, Target::Number(label)) if label != 0.0 && label != 1.0 => {
                return wrong("its label is neither 1 (near) nor 0 (apart)");
            }
            (SentenceLoss::MarginMse, Target::Number(margin)) if unlike.len() == 1 => {
                Target::Numbers(vec![margin as f32])
            }
            (SentenceLoss::MarginMse, Target::Numbers(scores)) if scores.len() == unlike.len() + 1 => {
                Target::Numbers(scores[1..].iter().map(|score| scores[0] - score).collect())
            }
            (SentenceLoss::MarginMse, Target::Numbers(margins)) if margins.len() == unlike.len() => {
                Target::Numbers(margins)
            }
            (SentenceLoss::MarginMse, _) => {
                return wrong(
                    "expected a margin for each negative, or the scores of the second text and of each negative",
                );
            }
            (_, target) => target,
        };
    }
    let differ = train.examples.windows(2).any(|two| two[0].target != two[1].target);
    let varied = matches!(loss, SentenceLoss::Triplet | SentenceLoss::Mse | SentenceLoss::MarginMse);
    if !differ && !varied {
        let reason = "all rows have the same label, so that there is nothing to learn".to_owned();
        return Err(TaskError::Empty { path: train.path.clone(), task: train.task.name, reason });
    }
    if loss == SentenceLoss::Cosine { keep_alike(train, recipe) } else { Ok(()) }
}
