//! A number for a text or two.

use super::*;
use crate::metrics::{mean_absolute_error, mean_squared_error, pearson, spearman};

/// A correlation below this one is none: numbers that have nothing to do with each other often have as much.
const UNRELATED: f64 = 0.1;

pub(crate) static REGRESS: Form = Form {
    metrics: &["pearson", "spearman"],
    ..Form::of_texts(Problem::Regression, "classify --model DIR --pair 'A text.' 'Another one.'", &Regress)
};

#[derive(Debug)]
struct Regress;

impl Steps for Regress {
    fn target(&self, cells: &Cells<'_>, _collector: &mut Collector<'_>) -> Result<Target, TaskError> {
        cells.number()
    }

    fn instances(&self, prepared: Prepared, target: &Target, _labels: usize) -> Vec<Instance> {
        let Target::Number(number) = target else { return Vec::new() };
        prepared.apart(|_| (Vec::new(), vec![*number as f32]))
    }

    fn lesson(&self) -> Option<Lesson> {
        Some(Lesson::Number)
    }

    fn taught(&self, prepared: Prepared, target: &Target, labels: usize) -> Vec<Instance> {
        match target {
            Target::None => prepared.apart(|_| (Vec::new(), vec![f32::NAN])),
            _ => self.instances(prepared, target, labels),
        }
    }

    fn digest(&self, instance: &Instance) -> String {
        format!("Number({:?})", instance.number())
    }

    fn predict(&self, said: Said<'_>) -> Prediction {
        said.row().first().map_or(Prediction::None, |number| Prediction::Number(f64::from(*number)))
    }

    fn loss(&self, device: &Device, part: &Part<'_>) -> TrainResult<Box<dyn Loss>> {
        let numbers = part.numbers();
        Ok(Box::new((Targets::Numbers(Tensor::from_slice(device, [numbers.len()], &numbers)?), part.scale)))
    }

    fn label_names(&self, _train: &Set) -> Vec<String> {
        vec!["LABEL_0".to_owned()]
    }

    fn score(&self, set: &Set, predictions: &[Prediction], _threshold: Option<f64>) -> Result<Score, TaskError> {
        score_numbers(set, predictions)
    }

    fn degenerate(&self, _set: &Set, predictions: &[Prediction], score: &Score) -> Option<String> {
        unrelated(predictions, score)
    }

    fn prediction(&self, _set: &mut Set, found: &Found) -> Result<Prediction, String> {
        Ok(Prediction::Number(found.number()?))
    }

    fn prediction_files(&self, set: &Set, predictions: &[Prediction]) -> Result<Vec<(String, Vec<u8>)>, TaskError> {
        number_files(set, predictions)
    }
}

/// The scores of a number for each example.
pub(super) fn score_numbers(set: &Set, predictions: &[Prediction]) -> Result<Score, TaskError> {
    let (mut expected, mut predicted, mut mistakes) = (Vec::new(), Vec::new(), Vec::new());
    for (example, prediction) in set.examples.iter().zip(predictions) {
        let (Target::Number(right), Prediction::Number(number)) = (&example.target, prediction) else {
            return Err(wrong_kind(set, example));
        };
        expected.push(*right);
        predicted.push(*number);
        if right != number {
            mistakes.push(mistake(example, format!("{right}"), format!("{number:.3}"), (right - number).abs()));
        }
    }
    Ok(Score {
        metrics: vec![
            ("pearson", pearson(&expected, &predicted)),
            ("spearman", spearman(&expected, &predicted)),
            ("mean_squared_error", mean_squared_error(&expected, &predicted)),
            ("mean_absolute_error", mean_absolute_error(&expected, &predicted)),
        ],
        mistakes,
        ..Score::default()
    })
}

/// The benchmark's file, with numbers within its range.
pub(super) fn number_files(set: &Set, predictions: &[Prediction]) -> Result<Vec<(String, Vec<u8>)>, TaskError> {
    predictions::table(set, predictions, |prediction| match prediction {
        Prediction::Number(number) => Some(format!("{:.3}", number.clamp(0.0, 5.0))),
        _ => None,
    })
}

/// Says so where predictions have nothing to do with the numbers expected.
pub(super) fn unrelated(predictions: &[Prediction], score: &Score) -> Option<String> {
    // Two points are always on a line.
    match score.get("pearson").filter(|_| predictions.len() > 2)? {
        none if none.is_nan() => {
            Some("has no correlation with the dev file, where all numbers are the same".to_owned())
        }
        low if low < UNRELATED => {
            Some(format!("has a correlation of {low:.3} with the numbers of the dev file, no better than chance"))
        }
        _ => None,
    }
}
