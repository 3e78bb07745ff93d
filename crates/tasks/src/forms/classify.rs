//! One of several labels for a text, or for two.

use std::collections::BTreeMap;

use super::*;
use crate::metrics::Confusion;

pub(crate) static CLASSIFY: Form = Form { second_text: SecondText::Named, ..form("classify --model DIR 'A text.'") };
pub(crate) static PAIR: Form =
    Form { second_text: SecondText::Needed, ..form("classify --model DIR --pair 'A text.' 'Another one.'") };

const fn form(command: &'static str) -> Form {
    let metrics = &["accuracy", "f1", "matthews", "macro_f1"];
    Form { fewest_labels: 2, metrics, ..Form::of_texts(Problem::SingleLabel, command, &Classify) }
}

#[derive(Debug)]
struct Classify;

impl Steps for Classify {
    fn target(&self, cells: &Cells<'_>, collector: &mut Collector<'_>) -> Result<Target, TaskError> {
        let Some((column, value)) = &cells.label else { return Ok(Target::None) };
        collector.adopt(cells.row, column);
        let value = collector.named(cells.row, column, value);
        let class = collector.class(&value).map_err(|problem| cells.in_label(&problem))?;
        Ok(class.map_or(Target::None, Target::Class))
    }

    fn instances(&self, prepared: Prepared, target: &Target, _labels: usize) -> Vec<Instance> {
        let Target::Class(class) = target else { return Vec::new() };
        prepared.apart(|_| (vec![Some(*class)], Vec::new()))
    }

    fn digest(&self, instance: &Instance) -> String {
        format!("Class({})", joined(&instance.labels))
    }

    fn predict(&self, said: Said<'_>) -> Prediction {
        said.class()
    }

    fn loss(&self, device: &Device, part: &Part<'_>) -> TrainResult<Box<dyn Loss>> {
        class_loss(device, part.labels())
    }

    fn class_weights(&self, train: &Set) -> Option<Vec<f32>> {
        Some(balanced(&train.label_counts()))
    }

    fn score(&self, set: &Set, predictions: &[Prediction], _threshold: Option<f64>) -> Result<Score, TaskError> {
        let count = set.labels.len();
        let pairs = class_pairs(set, predictions, count)?;
        let confusion = Confusion::new(count, pairs.iter().copied());
        let macro_f1 = confusion.macro_f1();
        let f1 = if count == 2 { confusion.counts(1).f1() } else { macro_f1 };
        let name = |class: u32| set.task.meaning(&set.labels, class as usize).to_owned();
        let names: Vec<String> = (0..count as u32).map(name).collect();
        let wrong = set.examples.iter().zip(predictions).zip(&pairs).filter(|(_, (expected, class))| expected != class);
        let mistakes = wrong.map(|((example, prediction), (expected, class))| {
            mistake(example, name(*expected), name(*class), prediction.confidence())
        });
        Ok(Score {
            metrics: vec![
                ("accuracy", confusion.accuracy()),
                ("f1", f1),
                ("matthews", confusion.matthews()),
                ("macro_f1", macro_f1),
            ],
            positive: (count == 2).then(|| name(1)),
            labels: LabelScore::of_confusion(&names, &confusion),
            mistakes: mistakes.collect(),
            names,
            confusion: Some(confusion),
            ..Score::default()
        })
    }

    fn degenerate(&self, set: &Set, _predictions: &[Prediction], score: &Score) -> Option<String> {
        let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
        for example in &set.examples {
            if let Target::Class(class) = example.target {
                *counts.entry(class).or_default() += 1;
            }
        }
        let majority = counts.into_values().max()? as f64 / set.examples.len() as f64;
        let accuracy = score.get("accuracy")?;
        (accuracy < majority).then(|| {
            let (accuracy, majority) = (100.0 * accuracy, 100.0 * majority);
            format!("has an accuracy of {accuracy:.1}%, below the {majority:.1}% of the largest class")
        })
    }

    fn prediction(&self, set: &mut Set, found: &Found) -> Result<Prediction, String> {
        Ok(Prediction::Class { class: found.label(set)?, scores: found.scores(set)? })
    }

    fn prediction_files(&self, set: &Set, predictions: &[Prediction]) -> Result<Vec<(String, Vec<u8>)>, TaskError> {
        predictions::table(set, predictions, |prediction| match prediction {
            Prediction::Class { class, .. } => Some(set.label(*class).to_owned()),
            _ => None,
        })
    }
}

/// Expected and predicted classes; a class beyond those known is an error of the caller.
pub(super) fn class_pairs(set: &Set, predictions: &[Prediction], classes: usize) -> Result<Vec<(u32, u32)>, TaskError> {
    let pairs = set.examples.iter().zip(predictions).map(|(example, prediction)| match (&example.target, prediction) {
        (Target::Class(expected), Prediction::Class { class, .. })
            if (*expected as usize) < classes && (*class as usize) < classes =>
        {
            Ok((*expected, *class))
        }
        _ => Err(wrong_kind(set, example)),
    });
    pairs.collect()
}
