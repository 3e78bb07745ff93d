//! One of several labels for a text, or for two.

use std::collections::BTreeMap;

use super::*;
use crate::metrics::Confusion;

pub(crate) static CLASSIFY: Form =
    Form { second_text: SecondText::Named, ..form(&Classify::PLAIN, "classify --model DIR 'A text.'") };
pub(crate) static PAIR: Form = pair(&Classify::PLAIN);

/// CommitmentBank: the mean of accuracy and macro-F1 as well, which is what SuperGLUE averages.
pub(crate) static COMMITMENT: Form = Form {
    metrics: &["accuracy", "f1", "matthews", "macro_f1", "acc_and_f1"],
    ..pair(&Classify { mean: true, ..Classify::PLAIN })
};

/// Winogender's sentences: gender parity as well.
pub(crate) static WINOGENDER: Form = Form {
    metrics: &["accuracy", "f1", "matthews", "macro_f1", "gender_parity"],
    ..pair(&Classify { parity: true, ..Classify::PLAIN })
};

/// The scores of classes.
pub(super) const CLASS_METRICS: &[&str] = &["accuracy", "f1", "matthews", "macro_f1"];

const fn pair(steps: &'static Classify) -> Form {
    Form { second_text: SecondText::Needed, ..form(steps, "classify --model DIR --pair 'A text.' 'Another one.'") }
}

const fn form(steps: &'static Classify, command: &'static str) -> Form {
    Form { fewest_labels: 2, metrics: CLASS_METRICS, ..Form::of_texts(Problem::SingleLabel, command, steps) }
}

/// Which scores there are beside those of all classes.
#[derive(Debug)]
struct Classify {
    mean: bool,
    parity: bool,
}

impl Classify {
    const PLAIN: Self = Self { mean: false, parity: false };
}

impl Steps for Classify {
    fn target(&self, cells: &Cells<'_>, collector: &mut Collector<'_>) -> Result<Target, TaskError> {
        class_target(cells, collector)
    }

    fn lesson(&self) -> Option<Lesson> {
        Some(Lesson::Classes)
    }

    fn class_weights(&self, train: &Set) -> Option<Vec<f32>> {
        Some(balanced(&train.label_counts()))
    }

    fn score(&self, set: &Set, predictions: &[Prediction], _threshold: Option<f64>) -> Result<Score, TaskError> {
        let mut score = score_classes(set, predictions)?;
        if let (true, Some(accuracy), Some(macro_f1)) = (self.mean, score.get("accuracy"), score.get("macro_f1")) {
            score.metrics.insert(0, ("acc_and_f1", (accuracy + macro_f1) / 2.0));
        }
        if let (true, Some(parity)) = (self.parity, gender_parity(set, predictions)) {
            score.metrics.push(("gender_parity", parity));
        }
        Ok(score)
    }

    fn degenerate(&self, set: &Set, _predictions: &[Prediction], score: &Score) -> Option<String> {
        below_majority(set, score)
    }

    fn prediction(&self, set: &mut Set, found: &Found) -> Result<Prediction, String> {
        read_class(set, found)
    }

    fn prediction_files(&self, set: &Set, predictions: &[Prediction]) -> Result<Vec<(String, Vec<u8>)>, TaskError> {
        class_files(set, predictions)
    }
}

/// The class in a row.
pub(super) fn class_target(cells: &Cells<'_>, collector: &mut Collector<'_>) -> Result<Target, TaskError> {
    let Some((column, value)) = &cells.label else { return Ok(Target::None) };
    collector.adopt(cells.row, column);
    let value = collector.named(cells.row, column, value);
    let class = collector.class(&value).map_err(|problem| cells.in_label(&problem))?;
    Ok(class.map_or(Target::None, Target::Class))
}

/// The scores of one class for each example.
pub(super) fn score_classes(set: &Set, predictions: &[Prediction]) -> Result<Score, TaskError> {
    score_among(set, predictions, &[])
}

/// The same with further classes that are never right, behind the set's own.
pub(super) fn score_among(set: &Set, predictions: &[Prediction], more: &[&str]) -> Result<Score, TaskError> {
    let count = set.labels.len();
    let all = count + more.len();
    let pairs = class_pairs(set, predictions, all)?;
    let confusion = Confusion::new(all, pairs.iter().copied());
    let macro_f1 = confusion.macro_f1();
    let f1 = if count == 2 { confusion.counts(1).f1() } else { macro_f1 };
    let name = |class: u32| match more.get((class as usize).wrapping_sub(count)) {
        Some(name) => (*name).to_owned(),
        None => set.task.meaning(&set.labels, class as usize).to_owned(),
    };
    let names: Vec<String> = (0..all as u32).map(name).collect();
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

/// The share of neighbours with the same hypothesis, whose premises differ in the gender of a pronoun alone, that have the same
/// prediction; nothing where there are no such neighbours (Rudinger et al. 2018, as SuperGLUE counts them).
fn gender_parity(set: &Set, predictions: &[Prediction]) -> Option<f64> {
    let hypothesis = |at: usize| match &set.examples.get(at)?.input {
        Input::Pair(_, second) => Some(second),
        _ => None,
    };
    let (mut at, mut pairs, mut same) = (0, 0, 0);
    while at + 1 < set.examples.len() {
        let is_pair = hypothesis(at).is_some() && hypothesis(at) == hypothesis(at + 1);
        if is_pair {
            pairs += 1;
            same += usize::from(predictions.get(at + 1)?.says_the_same(predictions.get(at)?));
        }
        at += if is_pair { 2 } else { 1 };
    }
    (pairs > 0).then(|| same as f64 / pairs as f64)
}

/// Says so where a model is worse than the largest class alone.
pub(super) fn below_majority(set: &Set, score: &Score) -> Option<String> {
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

/// A row of predictions.
pub(super) fn read_class(set: &mut Set, found: &Found) -> Result<Prediction, String> {
    Ok(Prediction::Class { class: found.label(set)?, scores: found.scores(set)? })
}

/// The benchmark's file, with labels as its own files have them.
pub(super) fn class_files(set: &Set, predictions: &[Prediction]) -> Result<Vec<(String, Vec<u8>)>, TaskError> {
    predictions::table(set, predictions, |prediction| match prediction {
        Prediction::Class { class, .. } => Some(set.label(*class).to_owned()),
        _ => None,
    })
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
