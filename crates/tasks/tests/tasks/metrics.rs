//! Every metric against the values of scikit-learn, SciPy, seqeval and SQuAD's definition.

use henson_tasks::metrics::{
    Confusion, EntityCounts, MultilabelCounts, answer_score, best_threshold, normalise_answer, pearson, spearman,
};
use henson_tasks::{Reading, read, read_null_odds, read_predictions, score};
use henson_text::TagSet;
use serde_json::Value;

use crate::support::{golden, task};

fn cases(of: &str) -> Vec<Value> {
    let text = std::fs::read(golden("metrics.json")).unwrap();
    let all: Value = serde_json::from_slice(&text).unwrap();
    all[of].as_array().unwrap().clone()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

fn labels(value: &Value) -> Vec<u32> {
    numbers(value).into_iter().map(|number| number as u32).collect()
}

#[track_caller]
fn near(case: &Value, name: &str, got: f64) {
    match case[name].as_f64() {
        Some(expected) => assert!((got - expected).abs() < 1e-12, "{}: {name} is {got}, not {expected}", case["name"]),
        None => assert!(got.is_nan(), "{}: {name} is {got}, not undefined", case["name"]),
    }
}

#[test]
fn classes() {
    for case in cases("classes") {
        let count = case["classes"].as_u64().unwrap() as usize;
        let pairs = labels(&case["expected"]).into_iter().zip(labels(&case["predicted"]));
        let confusion = Confusion::new(count, pairs);
        near(&case, "accuracy", confusion.accuracy());
        near(&case, "macro_f1", confusion.macro_f1());
        near(&case, "matthews", confusion.matthews());
        if count == 2 {
            near(&case, "f1", confusion.counts(1).f1());
        }
    }
}

#[test]
fn several_labels() {
    for case in cases("multilabel") {
        let rows = |of: &str| case[of].as_array().unwrap().iter().map(labels).collect::<Vec<_>>();
        let (expected, predicted) = (rows("expected"), rows("predicted"));
        let pairs = expected.iter().map(Vec::as_slice).zip(predicted.iter().map(Vec::as_slice));
        let counts = MultilabelCounts::new(case["classes"].as_u64().unwrap() as usize, pairs);
        near(&case, "accuracy", counts.accuracy());
        near(&case, "micro_f1", counts.micro_f1());
        near(&case, "macro_f1", counts.macro_f1());
    }
}

#[test]
fn correlations() {
    for case in cases("numbers") {
        let (expected, predicted) = (numbers(&case["expected"]), numbers(&case["predicted"]));
        near(&case, "pearson", pearson(&expected, &predicted));
        near(&case, "spearman", spearman(&expected, &predicted));
    }
}

#[test]
fn entities() {
    for case in cases("tags") {
        let mut counts = EntityCounts::new(TagSet::Chunks);
        let (expected, predicted) = (case["expected"].as_array().unwrap(), case["predicted"].as_array().unwrap());
        for (expected, predicted) in expected.iter().zip(predicted) {
            let tags = |value: &Value| -> Vec<String> { serde_json::from_value(value.clone()).unwrap() };
            let (expected, predicted) = (tags(expected), tags(predicted));
            fn names(tags: &[String]) -> Vec<&str> {
                tags.iter().map(String::as_str).collect()
            }
            counts.add(&names(&expected), &names(&predicted));
        }
        let overall = counts.overall();
        near(&case, "accuracy", counts.accuracy());
        near(&case, "precision", overall.precision());
        near(&case, "recall", overall.recall());
        near(&case, "f1", overall.f1());
        near(&case, "macro_f1", counts.macro_f1());
        let kinds = case["kinds"].as_object().unwrap();
        assert_eq!(counts.kinds.len(), kinds.len(), "{}", case["name"]);
        for (kind, expected) in kinds {
            let counts = counts.kinds[kind];
            near(expected, "precision", counts.precision());
            near(expected, "recall", counts.recall());
            near(expected, "f1", counts.f1());
            assert_eq!(expected["expected"], counts.expected);
        }
    }
}

#[test]
fn answers() {
    let text = std::fs::read(golden("metrics.json")).unwrap();
    let all: Value = serde_json::from_slice(&text).unwrap();
    for pair in all["answers"]["normalised"].as_array().unwrap() {
        assert_eq!(normalise_answer(pair[0].as_str().unwrap()), pair[1].as_str().unwrap(), "{pair}");
    }
    for case in all["answers"]["scores"].as_array().unwrap() {
        let (expected, said) = (case[0].as_str().unwrap(), case[1].as_str().unwrap());
        let score = answer_score([expected].into_iter(), said);
        assert_eq!((score.exact, Some(score.f1)), (case[2].as_f64().unwrap(), case[3].as_f64()), "{case}");
    }
    // The best of several; none is the same as "".
    assert_eq!(answer_score(["x", "the cat"].into_iter(), "cat").exact, 1.0);
    assert_eq!(answer_score([].into_iter(), "").f1, 1.0);
    assert_eq!(answer_score([].into_iter(), "cat").f1, 0.0);
}

#[test]
fn thresholds() {
    // Nobody has odds: nothing to gain. Then the first best of two that are equal.
    assert_eq!(best_threshold(&[]).score, 0.0);
    let best = best_threshold(&[(-1.0, true, 1.0, true), (0.5, false, 0.0, true), (2.0, true, 1.0, true)]);
    assert_eq!((best.score, best.threshold), (2.0 / 3.0, -1.0));
    // Best to answer none: a threshold that does so, which for probabilities is 0.
    let best = best_threshold(&[(-0.5, false, 0.0, true), (-1.5, true, 0.0, true)]);
    assert_eq!((best.score, best.threshold), (0.5, -2.5));
    assert_eq!(best_threshold(&[(0.5, false, 0.0, true), (0.1, true, 0.0, true)]).threshold, 0.0);
}

#[test]
fn squad_scores_are_the_official_ones_to_the_last_digit() {
    let scores: Value = serde_json::from_slice(&std::fs::read(golden("squad/scores.json")).unwrap()).unwrap();
    for (name, version, odds, threshold) in [
        ("1.1", "1.1", false, None),
        ("2.0", "2.0", false, None),
        ("2.0 with odds", "2.0", true, None),
        ("2.0 at 0.5", "2.0", true, Some(0.5)),
    ] {
        let reading =
            Reading { places_needed: false, ..Reading::new(task(if version == "1.1" { "squad1" } else { "squad2" })) };
        let mut set = read(&golden(&format!("squad/dev-v{version}.json")), &reading).unwrap();
        let mut predictions =
            read_predictions(&golden(&format!("squad/predictions-{version}.json")), &mut set).unwrap();
        if odds {
            assert_eq!(read_null_odds(&golden("squad/null_odds-2.0.json"), &set, &mut predictions).unwrap(), 0);
        }
        let score = score(&set, &predictions, threshold, 3).unwrap();
        let expected = scores[name].as_object().unwrap();
        assert_eq!(score.metrics.len(), expected.len(), "{name}: {:?}", score.metrics);
        for (metric, value) in &score.metrics {
            let expected = expected[*metric].as_f64().unwrap();
            assert!((value - expected).abs() < 1e-10, "{name}: {metric} is {value}, not {expected}");
        }
        assert_eq!((score.missing, score.mistakes.len()), (0, 3));
    }
}

#[test]
fn frequent_mistakes_come_first() {
    let pairs = [(0, 1), (2, 0), (2, 0), (1, 1), (3, 2), (3, 2), (0, 1), (0, 1), (0, 3), (3, 2), (3, 2)];
    let confusion = Confusion::new(60_000, pairs.into_iter());
    assert_eq!(confusion.mistakes(3), [(3, 2, 4), (0, 1, 3), (2, 0, 2)]);
    assert_eq!(confusion.mistakes(9).len(), 4);
    assert_eq!((confusion.count(0, 1), confusion.count(1, 1), confusion.count(1, 0)), (3, 1, 0));
    let counts = confusion.counts(1);
    assert_eq!((counts.right, counts.expected, counts.predicted), (1, 1, 4));
}
