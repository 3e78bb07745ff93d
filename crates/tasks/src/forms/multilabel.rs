//! Any number of labels for a text or two.

use henson_data::tables::Column;
use serde_json::Value;

use super::*;
use crate::metrics::{Counts, MultilabelCounts};

pub(crate) static MULTILABEL: Form = Form {
    fewest_labels: 1,
    metrics: &["f1", "macro_f1", "accuracy"],
    ..Form::of_texts(Problem::MultiLabel, "classify --model DIR 'A text.'", &Multilabel)
};

#[derive(Debug)]
struct Multilabel;

/// Columns with 0 or 1, named after their labels.
fn of_columns(cells: &Cells<'_>, collector: &mut Collector<'_>) -> Result<Target, TaskError> {
    let mut classes = Vec::new();
    for column in &cells.label_columns {
        let role = Role { what: "a label", flag: "--label-column", names: &[] };
        let (_, value) = rows::need(cells.path, cells.row, Some(column), &role, None)?;
        let name = match column {
            Column::Name(name) => name.clone(),
            Column::Number(number) => number.to_string(),
        };
        let class = collector.number_of(&name).map_err(|problem| cells.wrong(problem))?;
        match text(value).map_err(|problem| cells.wrong(problem))?.as_deref().map(str::trim) {
            Some("1" | "1.0" | "true" | "True") => classes.push(class),
            Some("0" | "0.0" | "false" | "False") => {}
            _ => return Err(cells.wrong(format!("column {column}: expected 0 or 1, found {value}"))),
        }
    }
    classes.sort_unstable();
    Ok(Target::Classes(classes))
}

/// A list, or names between commas, semicolons or bars.
fn names_in(value: &Value) -> Result<Vec<String>, String> {
    let names = match value {
        Value::Array(_) => texts(value)?,
        _ => text(value)?.unwrap_or_default().split([',', ';', '|']).map(|name| name.trim().to_owned()).collect(),
    };
    Ok(names.into_iter().filter(|name| !name.is_empty()).collect())
}

fn sorted(classes: Result<Vec<u32>, String>) -> Result<Vec<u32>, String> {
    let mut classes = classes?;
    classes.sort_unstable();
    classes.dedup();
    Ok(classes)
}

impl Steps for Multilabel {
    fn target(&self, cells: &Cells<'_>, collector: &mut Collector<'_>) -> Result<Target, TaskError> {
        let Some((column, value)) = &cells.label else {
            return match cells.label_columns.len() > 1 {
                true => of_columns(cells, collector),
                false => Ok(Target::None),
            };
        };
        collector.adopt(cells.row, column);
        let value = collector.named(cells.row, column, value);
        if value.is_null() {
            return Ok(Target::None);
        }
        let names = names_in(&value).map_err(|problem| cells.in_label(&problem))?;
        let classes = sorted(names.iter().map(|name| collector.number_of(name)).collect());
        Ok(Target::Classes(classes.map_err(|problem| cells.in_label(&problem))?))
    }

    fn instances(&self, prepared: Prepared, target: &Target, labels: usize) -> Vec<Instance> {
        let Target::Classes(classes) = target else { return Vec::new() };
        let right: Vec<f32> = (0..labels as u32).map(|label| f32::from(u8::from(classes.contains(&label)))).collect();
        prepared.apart(|_| (Vec::new(), right.clone()))
    }

    fn lesson(&self) -> Option<Lesson> {
        Some(Lesson::Several)
    }

    fn taught(&self, prepared: Prepared, target: &Target, labels: usize) -> Vec<Instance> {
        match target {
            Target::None => prepared.apart(|_| (Vec::new(), vec![f32::NAN; labels])),
            _ => self.instances(prepared, target, labels),
        }
    }

    fn digest(&self, instance: &Instance) -> String {
        format!("Several({:?})", instance.numbers)
    }

    fn predict(&self, said: Said<'_>) -> Prediction {
        let scores = said.row();
        let classes = (0..scores.len() as u32).filter(|i| scores[*i as usize] >= 0.5).collect();
        Prediction::Classes { classes, scores }
    }

    fn loss(&self, device: &Device, part: &Part<'_>) -> TrainResult<Box<dyn Loss>> {
        // What a label counts, it counts where it is right: PyTorch's `pos_weight`.
        let each = part.instances.iter().flat_map(|instance| instance.numbers.iter().zip(0..));
        let weights: Vec<f32> =
            each.map(|(right, label)| if *right > 0.0 { part.weight(label) } else { part.scale }).collect();
        let right = Tensor::from_slice(device, [weights.len()], &part.numbers())?;
        let weights = Tensor::from_slice(device, [weights.len()], &weights)?;
        Ok(Box::new((Targets::Several(right, Some(weights)), 1.0)))
    }

    fn class_weights(&self, train: &Set) -> Option<Vec<f32>> {
        Some(odds_against(&train.label_counts(), train.examples.len()))
    }

    fn score(&self, set: &Set, predictions: &[Prediction], _threshold: Option<f64>) -> Result<Score, TaskError> {
        let mut pairs: Vec<(&[u32], &[u32])> = Vec::new();
        let mut mistakes = Vec::new();
        let names = |classes: &[u32]| classes.iter().map(|class| set.label(*class)).collect::<Vec<_>>().join(", ");
        for (example, prediction) in set.examples.iter().zip(predictions) {
            let (Target::Classes(expected), Prediction::Classes { classes, .. }) = (&example.target, prediction) else {
                return Err(wrong_kind(set, example));
            };
            if expected.iter().chain(classes).any(|class| *class as usize >= set.labels.len()) {
                return Err(wrong_kind(set, example));
            }
            let differ = expected.iter().filter(|class| !classes.contains(class)).count()
                + classes.iter().filter(|class| !expected.contains(class)).count();
            if differ > 0 {
                mistakes.push(mistake(example, names(expected), names(classes), differ as f64));
            }
            pairs.push((expected, classes));
        }
        let counts = MultilabelCounts::new(set.labels.len(), pairs.into_iter());
        let label = |(name, counts): (&String, &Counts)| LabelScore { name: name.clone(), counts: *counts };
        Ok(Score {
            metrics: vec![("f1", counts.micro_f1()), ("macro_f1", counts.macro_f1()), ("accuracy", counts.accuracy())],
            labels: set.labels.iter().zip(&counts.classes).map(label).collect(),
            mistakes,
            ..Score::default()
        })
    }

    fn prediction(&self, set: &mut Set, found: &Found) -> Result<Prediction, String> {
        let names = names_in(&found.value)?;
        let classes = sorted(names.iter().map(|name| predictions::label_number(set, name)).collect())?;
        Ok(Prediction::Classes { classes, scores: found.scores(set)? })
    }
}

/// For labels of which a text may have several: how many texts are without one for each that has it, so that yes and no
/// weigh the same together. 1 where none has it or all have it: then there is nothing to weigh against, and a weight of 0
/// would leave nothing to learn.
fn odds_against(counts: &[usize], texts: usize) -> Vec<f32> {
    let odds = |count: &usize| match texts.saturating_sub(*count) {
        without if without > 0 && *count > 0 => without as f32 / *count as f32,
        _ => 1.0,
    };
    counts.iter().map(odds).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rare_labels_weigh_more_where_they_are_right() {
        assert_eq!(odds_against(&[10, 4, 0, 80, 81], 80), [7.0, 19.0, 1.0, 1.0, 1.0]);
    }
}
