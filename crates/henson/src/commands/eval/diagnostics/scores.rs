//! How the answers of a set are scored: expected words among the first predictions, and whether probabilities are in the order that
//! people's expectations have.

use henson_tasks::metrics::{pearson, spearman};
use serde::Serialize;

use super::sets::{Item, Set};
use super::{Answer, TOP};

/// Differences of probability below this are hardly any (section 4 of the paper).
const THRESHOLD: f64 = 0.01;

/// How many of some are right.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Share {
    pub(super) condition: String,
    /// Among so many predictions.
    #[serde(rename = "k", skip_serializing_if = "Option::is_none")]
    pub(super) top: Option<usize>,
    /// By more than this.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) threshold: Option<f64>,
    pub(super) right: usize,
    pub(super) count: usize,
    pub(super) share: f64,
}

/// A mean probability.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Mean {
    pub(super) condition: String,
    pub(super) mean: f64,
}

/// How differences between two contexts go together.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Correlation {
    pub(super) pearson: f64,
    pub(super) spearman: f64,
}

/// All scores of a set.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Found {
    pub(super) accuracy: Vec<Share>,
    pub(super) sensitivity: Vec<Share>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) probabilities: Vec<Mean>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) correlation: Option<Correlation>,
}

pub(super) fn score(set: Set, items: &[Item], answers: &[Vec<Answer>]) -> Found {
    let all: Vec<(&Item, &[Answer])> = items.iter().zip(answers.iter().map(Vec::as_slice)).collect();
    match set {
        Set::CommonSense => common_sense(&all),
        Set::Roles => roles(&all),
        Set::SimpleNegation | Set::NaturalNegation => negation(&all),
    }
}

type Answered<'a> = (&'a Item, &'a [Answer]);

/// The probabilities of an item's targets, where all have one.
fn probabilities(answers: &[Answer]) -> Option<Vec<f64>> {
    answers.iter().map(|answer| answer.target).collect()
}

fn share(condition: &str, right: impl Iterator<Item = bool>) -> Share {
    let (right, count) = right.fold((0, 0), |(right, count), is_right| (right + usize::from(is_right), count + 1));
    let share = if count == 0 { 0.0 } else { right as f64 / count as f64 };
    Share { condition: condition.to_owned(), top: None, threshold: None, right, count, share }
}

/// Hits of some questions, for each number of predictions.
fn accuracy(found: &mut Found, condition: &str, answers: &[&Answer]) {
    for (i, top) in TOP.into_iter().enumerate() {
        let share = share(condition, answers.iter().map(|answer| answer.hits[i]));
        found.accuracy.push(Share { top: Some(top), ..share });
    }
}

/// How often `right` holds for the probabilities of items, without a threshold and with it.
fn sensitivity(found: &mut Found, condition: &str, items: &[&Answered<'_>], right: impl Fn(&[f64], f64) -> bool) {
    for threshold in [0.0, THRESHOLD] {
        let each = items.iter().filter_map(|(_, answers)| probabilities(answers));
        let share = share(condition, each.map(|probabilities| right(&probabilities, threshold)));
        found.sensitivity.push(Share { threshold: Some(threshold), ..share });
    }
}

/// Items by their mark: all, then those with it, then those without.
fn by_mark<'a, 'b>(all: &'b [Answered<'a>], names: [&'static str; 2]) -> Vec<(&'static str, Vec<&'b Answered<'a>>)> {
    let marked = |mark: bool| -> Vec<&'b Answered<'a>> {
        all.iter().filter(move |(item, _)| item.marked == Some(mark)).collect()
    };
    let parts = [("all", all.iter().collect()), (names[0], marked(true)), (names[1], marked(false))];
    parts.into_iter().filter(|(_, items): &(_, Vec<_>)| !items.is_empty()).collect()
}

fn common_sense(all: &[Answered<'_>]) -> Found {
    let mut found = Found::default();
    for (name, items) in by_mark(all, ["high constraint", "low constraint"]) {
        accuracy(&mut found, name, &items.iter().map(|(_, answers)| &answers[0]).collect::<Vec<_>>());
        let expected = format!("expected word likeliest, {name}");
        sensitivity(&mut found, &expected, &items, |p, by| p[0] - p[1] > by && p[0] - p[2] > by);
        let category = format!("same category above other, {name}");
        sensitivity(&mut found, &category, &items, |p, by| p[1] - p[2] > by);
        for (i, target) in ["expected", "within category", "between category"].into_iter().enumerate() {
            let known: Vec<f64> = items.iter().filter_map(|(_, answers)| answers[i].target).collect();
            let mean = known.iter().sum::<f64>() / known.len().max(1) as f64;
            found.probabilities.push(Mean { condition: format!("{target}, {name}"), mean });
        }
    }
    found
}

fn roles(all: &[Answered<'_>]) -> Found {
    let mut found = Found::default();
    let each = || all.iter().flat_map(|(item, answers)| item.clozes.iter().zip(*answers));
    accuracy(&mut found, "all", &each().map(|(_, answer)| answer).collect::<Vec<_>>());
    let mut clozes: Vec<f64> = each().map(|((expected, _), _)| *expected).collect();
    clozes.sort_by(f64::total_cmp);
    let borders = [0.25, 0.5, 0.75].map(|share| quantile(&clozes, share));
    for quarter in 0..4 {
        let of_quarter = |cloze: f64| borders.iter().take_while(|border| cloze > **border).count() == quarter;
        let chosen: Vec<&Answer> =
            each().filter(|((expected, _), _)| of_quarter(*expected)).map(|(_, answer)| answer).collect();
        let name = match borders.get(quarter) {
            Some(border) => format!("cloze up to {border:.2}"),
            None => format!("cloze above {:.2}", borders[2]),
        };
        accuracy(&mut found, &name, &chosen);
    }
    let items: Vec<&Answered<'_>> = all.iter().collect();
    sensitivity(&mut found, "target likelier where it fits", &items, |p, by| p[0] - p[1] > by);
    let pairs: Vec<(f64, f64)> = all
        .iter()
        .filter_map(|(item, answers)| {
            let p = probabilities(answers)?;
            Some((p[0] - p[1], item.clozes[0].1 - item.clozes[1].1))
        })
        .collect();
    let (differences, of_cloze): (Vec<f64>, Vec<f64>) = pairs.into_iter().unzip();
    let correlation =
        Correlation { pearson: pearson(&of_cloze, &differences), spearman: spearman(&of_cloze, &differences) };
    found.correlation = Some(correlation).filter(|found| found.pearson.is_finite() && found.spearman.is_finite());
    found
}

fn negation(all: &[Answered<'_>]) -> Found {
    let mut found = Found::default();
    for (name, items) in by_mark(all, ["licensed", "not licensed"]) {
        accuracy(
            &mut found,
            &format!("affirmative, {name}"),
            &items.iter().map(|(_, answers)| &answers[0]).collect::<Vec<_>>(),
        );
        let affirmative = format!("true word likelier, affirmative, {name}");
        sensitivity(&mut found, &affirmative, &items, |p, by| p[0] - p[1] > by);
        let negative = format!("true word likelier, negative, {name}");
        sensitivity(&mut found, &negative, &items, |p, by| p[2] - p[3] > by);
    }
    found
}

/// As NumPy has percentiles: between the two values that it falls between, in proportion.
fn quantile(sorted: &[f64], share: f64) -> f64 {
    let place = share * sorted.len().saturating_sub(1) as f64;
    let (below, part) = (place.floor() as usize, place.fract());
    match (sorted.get(below), sorted.get(below + 1)) {
        (Some(low), Some(high)) => low + (high - low) * part,
        (Some(low), None) => *low,
        _ => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answers(probabilities: &[f64], hits: [bool; 2]) -> Vec<Answer> {
        probabilities.iter().map(|p| Answer { target: Some(*p).filter(|p| *p >= 0.0), hits }).collect()
    }

    fn item(marked: Option<bool>, clozes: &[(f64, f64)]) -> Item {
        Item { questions: Vec::new(), marked, clozes: clozes.to_vec() }
    }

    #[track_caller]
    fn check(shares: &[Share], condition: &str, key: f64, expected: (usize, usize)) {
        let same = |share: &&Share| {
            share.condition == condition && (share.top.map(|k| k as f64) == Some(key) || share.threshold == Some(key))
        };
        let found = shares.iter().find(same).unwrap_or_else(|| panic!("{condition} in {shares:?}"));
        assert_eq!((found.right, found.count), expected, "{condition}");
    }

    #[test]
    fn common_sense_by_hand() {
        let items = [item(Some(true), &[]), item(Some(true), &[]), item(Some(false), &[]), item(Some(false), &[])];
        let all = [
            answers(&[0.5, 0.1, 0.05], [true, true]),
            answers(&[0.105, 0.1, 0.05], [false, true]),
            answers(&[0.1, 0.2, 0.1999], [false, false]),
            // Its first target is not one token: it cannot be compared.
            answers(&[-1.0, 0.2, 0.1], [false, false]),
        ];
        let found = score(Set::CommonSense, &items, &all);
        check(&found.accuracy, "all", 1.0, (1, 4));
        check(&found.accuracy, "all", 5.0, (2, 4));
        check(&found.accuracy, "low constraint", 5.0, (0, 2));
        check(&found.sensitivity, "expected word likeliest, all", 0.0, (2, 3));
        check(&found.sensitivity, "expected word likeliest, all", 0.01, (1, 3));
        check(&found.sensitivity, "same category above other, low constraint", 0.0, (1, 1));
        check(&found.sensitivity, "same category above other, low constraint", 0.01, (0, 1));
        assert!((found.probabilities[0].mean - (0.5 + 0.105 + 0.1) / 3.0).abs() < 1e-12);
    }

    #[test]
    fn roles_by_hand() {
        let items = [item(None, &[(0.625, 0.5), (0.125, 0.0)]), item(None, &[(0.5, 0.3), (0.25, 0.2)])];
        let mut all = [answers(&[0.3, 0.1], [true, true]), answers(&[0.2, 0.195], [false, true])];
        all[0][1].hits = [false, false];
        let found = score(Set::Roles, &items, &all);
        check(&found.accuracy, "all", 1.0, (1, 4));
        check(&found.accuracy, "all", 5.0, (3, 4));
        // Clozes of 0.125, 0.25, 0.5, 0.625: NumPy's quartiles are 0.21875, 0.375 and 0.53125.
        check(&found.accuracy, "cloze up to 0.22", 5.0, (0, 1));
        check(&found.accuracy, "cloze above 0.53", 1.0, (1, 1));
        check(&found.sensitivity, "target likelier where it fits", 0.0, (2, 2));
        check(&found.sensitivity, "target likelier where it fits", 0.01, (1, 2));
        // Two pairs always lie on a line, here a rising one.
        let correlation = found.correlation.unwrap();
        assert!((correlation.pearson - 1.0).abs() < 1e-12 && (correlation.spearman - 1.0).abs() < 1e-12);
    }

    #[test]
    fn negation_by_hand() {
        let items = [item(Some(true), &[]), item(Some(false), &[])];
        let all = [answers(&[0.5, 0.1, 0.1, 0.4], [true, true]), answers(&[0.1, 0.2, 0.3, 0.1], [false, true])];
        let found = score(Set::NaturalNegation, &items, &all);
        check(&found.accuracy, "affirmative, all", 1.0, (1, 2));
        check(&found.sensitivity, "true word likelier, affirmative, all", 0.0, (1, 2));
        check(&found.sensitivity, "true word likelier, negative, all", 0.0, (1, 2));
        check(&found.sensitivity, "true word likelier, negative, licensed", 0.01, (0, 1));
        // Without marks there are no parts.
        let plain = score(Set::SimpleNegation, &[item(None, &[])], &all[..1]);
        assert_eq!((plain.accuracy.len(), plain.sensitivity.len()), (2, 4));
    }

    #[test]
    fn quantiles_lie_between_values() {
        assert!((quantile(&[0.1, 0.2, 0.4, 0.5], 0.25) - 0.175).abs() < 1e-12);
        assert_eq!((quantile(&[0.3], 0.75), quantile(&[], 0.5)), (0.3, 0.0));
    }
}
