//! Predictions against labels: every score that a task has, and what people want to look at.

use henson_text::TagSet;
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::error::TaskError;
use crate::example::{Example, Input, Set, Target};
use crate::metrics::{
    AnswerScore, Confusion, Counts, EntityCounts, MultilabelCounts, answer_score, best_threshold, cosine,
    mean_absolute_error, mean_squared_error, nearest, pearson, spearman,
};
use crate::predictions::Prediction;
use crate::task::TaskKind;

/// The most confusions that are kept for scripts and reports.
const CONFUSIONS: usize = 200;

/// How much of a text a mistake shows.
const SHOWN: usize = 160;

/// How a set was predicted.
#[derive(Clone, Debug, Default)]
pub struct Score {
    /// The scores by their names, the more important first. All are shares from 0 to 1 or correlations, but for those of
    /// answers, which are percentages as SQuAD's programs print them.
    pub metrics: Vec<(&'static str, f64)>,
    /// Examples that were scored.
    pub examples: usize,
    /// Of these, those without prediction, which count as wrong.
    pub missing: usize,
    /// The label that `f1` is about, where there are two.
    pub positive: Option<String>,
    /// What was taken for what, where each example has one label.
    pub confusion: Option<Confusion>,
    /// Each label or kind of entity.
    pub labels: Vec<LabelScore>,
    /// The names of the confusion's rows.
    pub names: Vec<String>,
    /// The worst mistakes, the worst first.
    pub mistakes: Vec<Mistake>,
}

/// How one label or kind of entity was predicted.
#[derive(Clone, Debug, PartialEq)]
pub struct LabelScore {
    /// Its name.
    pub name: String,
    /// What precision, recall and F1 are made of.
    pub counts: Counts,
}

/// A prediction that is wrong.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Mistake {
    /// The example.
    pub id: String,
    /// Where it stands in its file.
    pub place: String,
    /// What the model read, cut to a line.
    pub text: String,
    /// What is right.
    pub expected: String,
    /// What was predicted.
    pub predicted: String,
    /// How wrong: the probability of the wrong label, the difference of numbers, wrong entities or words, 1 − F1 of answers.
    pub weight: f64,
}

impl Score {
    /// A score by its name.
    pub fn get(&self, name: &str) -> Option<f64> {
        self.metrics.iter().find(|(other, _)| *other == name).map(|(_, value)| *value)
    }

    /// The scores for scripts; what is not a number is null. Of what was taken for what, only mistakes are kept, the most
    /// frequent first and no more than a bounded number: what was right is in `labels`.
    pub fn to_json(&self) -> Map<String, Value> {
        let mut object: Map<String, Value> =
            self.metrics.iter().map(|(name, value)| ((*name).to_owned(), json!(value))).collect();
        object.insert("examples".to_owned(), json!(self.examples));
        if self.missing > 0 {
            object.insert("missing".to_owned(), json!(self.missing));
        }
        if let Some(positive) = &self.positive {
            object.insert("positive".to_owned(), json!(positive));
        }
        if !self.labels.is_empty() {
            let labels = self.labels.iter().map(|label| {
                let Counts { predicted, expected, .. } = label.counts;
                let (precision, recall, f1) = (label.counts.precision(), label.counts.recall(), label.counts.f1());
                let value = json!({
                    "precision": precision, "recall": recall, "f1": f1, "expected": expected, "predicted": predicted,
                });
                (label.name.clone(), value)
            });
            object.insert("labels".to_owned(), Value::Object(labels.collect()));
        }
        if let Some(confusion) = &self.confusion {
            let name = |class: usize| &self.names[class];
            let each = confusion.mistakes(CONFUSIONS).into_iter().map(|(expected, predicted, count)| {
                json!({"expected": name(expected), "predicted": name(predicted), "count": count})
            });
            object.insert("confusions".to_owned(), each.collect());
        }
        object
    }
}

/// Scores the predictions for a set, in its order. Answers whose odds for "no answer" are above `threshold` count as "".
/// At most `mistakes` of the worst mistakes are kept.
pub fn score(
    set: &Set,
    predictions: &[Prediction],
    threshold: Option<f64>,
    mistakes: usize,
) -> Result<Score, TaskError> {
    if predictions.len() != set.examples.len() {
        return Err(TaskError::WrongCount { predictions: predictions.len(), examples: set.examples.len() });
    }
    // Pairs that are alike need no more than each other.
    if !set.is_labelled() && set.task.kind != TaskKind::Embed {
        return Err(TaskError::NoLabels {
            path: set.path.clone(),
            needed: "scoring needs a file with labels (of a table, --label-column names the column)",
        });
    }
    let mut score = match set.task.kind {
        TaskKind::Classify | TaskKind::Pair => classes(set, predictions)?,
        TaskKind::Choice => choices(set, predictions)?,
        TaskKind::Multilabel => multilabel(set, predictions)?,
        TaskKind::Regress => numbers(set, predictions)?,
        TaskKind::Embed if set.is_labelled() => similarities(set, predictions)?,
        TaskKind::Embed => partners(set, predictions)?,
        TaskKind::Tag => tags(set, predictions)?,
        TaskKind::Qa => answers(set, predictions, threshold)?,
    };
    score.examples = set.examples.len();
    score.mistakes.sort_by(|a, b| b.weight.total_cmp(&a.weight));
    score.mistakes.truncate(mistakes);
    Ok(score)
}

fn wrong_kind(set: &Set, example: &Example) -> TaskError {
    TaskError::WrongKind { id: example.id.clone(), task: set.task.name }
}

fn mistake(example: &Example, expected: String, predicted: String, weight: f64) -> Mistake {
    let text = match &example.input {
        Input::One(text) => text.clone(),
        Input::Pair(first, second) => format!("{first} | {second}"),
        Input::Words { words, .. } => words.join(" "),
        Input::Question { question, .. } => question.clone(),
        Input::Choices { context, .. } => context.clone(),
        Input::Alike { first, second, .. } => format!("{first} | {second}"),
    };
    let mut text: String = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if let Some((cut, _)) = text.char_indices().nth(SHOWN) {
        text.truncate(cut);
        text.push('…');
    }
    Mistake { id: example.id.clone(), place: example.place.clone(), text, expected, predicted, weight }
}

/// Expected and predicted classes; a class beyond those known is an error of the caller.
fn class_pairs(set: &Set, predictions: &[Prediction], classes: usize) -> Result<Vec<(u32, u32)>, TaskError> {
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

/// How sure a wrong prediction was.
fn confidence(prediction: &Prediction) -> f64 {
    match prediction {
        Prediction::Class { class, scores } => scores.get(*class as usize).map_or(0.0, |score| f64::from(*score)),
        _ => 0.0,
    }
}

fn classes(set: &Set, predictions: &[Prediction]) -> Result<Score, TaskError> {
    let count = set.labels.len();
    let pairs = class_pairs(set, predictions, count)?;
    let confusion = Confusion::new(count, pairs.iter().copied());
    let macro_f1 = confusion.macro_f1();
    let f1 = if count == 2 { confusion.counts(1).f1() } else { macro_f1 };
    let name = |class: u32| set.task.meaning(&set.labels, class as usize).to_owned();
    let names: Vec<String> = (0..count as u32).map(name).collect();
    let label = |(class, name): (usize, &String)| LabelScore { name: name.clone(), counts: confusion.counts(class) };
    let labels = names.iter().enumerate().map(label).collect();
    let wrong = set.examples.iter().zip(predictions).zip(&pairs).filter(|(_, (expected, class))| expected != class);
    let mistakes = wrong.map(|((example, prediction), (expected, class))| {
        mistake(example, name(*expected), name(*class), confidence(prediction))
    });
    Ok(Score {
        metrics: vec![
            ("accuracy", confusion.accuracy()),
            ("f1", f1),
            ("matthews", confusion.matthews()),
            ("macro_f1", macro_f1),
        ],
        positive: (count == 2).then(|| name(1)),
        labels,
        mistakes: mistakes.collect(),
        names,
        confusion: Some(confusion),
        ..Score::default()
    })
}

fn choices(set: &Set, predictions: &[Prediction]) -> Result<Score, TaskError> {
    let pairs = class_pairs(set, predictions, usize::MAX)?;
    let mut mistakes = Vec::new();
    for ((example, prediction), (expected, class)) in set.examples.iter().zip(predictions).zip(&pairs) {
        let Input::Choices { endings, .. } = &example.input else { return Err(wrong_kind(set, example)) };
        if expected != class {
            let ending = |class: u32| endings.get(class as usize).map_or("?", String::as_str).to_owned();
            mistakes.push(mistake(example, ending(*expected), ending(*class), confidence(prediction)));
        }
    }
    let right = pairs.iter().filter(|(expected, class)| expected == class).count();
    let accuracy = right as f64 / pairs.len().max(1) as f64;
    Ok(Score { metrics: vec![("accuracy", accuracy)], mistakes, ..Score::default() })
}

fn multilabel(set: &Set, predictions: &[Prediction]) -> Result<Score, TaskError> {
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

fn numbers(set: &Set, predictions: &[Prediction]) -> Result<Score, TaskError> {
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

/// Cosines against scores of any scale.
fn similarities(set: &Set, predictions: &[Prediction]) -> Result<Score, TaskError> {
    let (mut expected, mut predicted) = (Vec::new(), Vec::new());
    for (example, prediction) in set.examples.iter().zip(predictions) {
        let (Target::Number(right), Prediction::Similarity { cosine, .. }) = (&example.target, prediction) else {
            return Err(wrong_kind(set, example));
        };
        expected.push(*right);
        predicted.push(*cosine);
    }
    let metrics = vec![("spearman", spearman(&expected, &predicted)), ("pearson", pearson(&expected, &predicted))];
    Ok(Score { metrics, ..Score::default() })
}

/// Whether each pair's second text is the nearest to its first, among those of other pairs.
fn partners(set: &Set, predictions: &[Prediction]) -> Result<Score, TaskError> {
    let mut pairs: Vec<[&[f32]; 2]> = Vec::new();
    for (example, prediction) in set.examples.iter().zip(predictions) {
        match prediction {
            Prediction::Similarity { vectors: Some([first, second]), .. } => pairs.push([first, second]),
            Prediction::Similarity { vectors: None, .. } => {
                let needed = "cosines alone can only be held against scores; give a model, or a file with scores";
                return Err(TaskError::NoLabels { path: set.path.clone(), needed });
            }
            _ => return Err(wrong_kind(set, example)),
        }
    }
    let second = |example: &Example| match &example.input {
        Input::Alike { second, .. } => second.clone(),
        _ => String::new(),
    };
    let seconds: Vec<String> = set.examples.iter().map(second).collect();
    let found = nearest(&pairs, &seconds);
    let wrong = found.iter().enumerate().filter(|(own, found)| Some(*own) != **found);
    let mistakes: Vec<Mistake> = wrong
        .map(|(own, found)| {
            let to = |other: usize| cosine(pairs[own][0], pairs[other][1]);
            let (other, lead) = match found {
                Some(found) => (seconds[*found].clone(), to(*found) - to(own)),
                None => ("(a vector is not a number)".to_owned(), 0.0),
            };
            mistake(&set.examples[own], seconds[own].clone(), other, lead)
        })
        .collect();
    let accuracy = 1.0 - mistakes.len() as f64 / pairs.len().max(1) as f64;
    Ok(Score { metrics: vec![("accuracy", accuracy)], mistakes, ..Score::default() })
}

fn tags(set: &Set, predictions: &[Prediction]) -> Result<Score, TaskError> {
    let kind = match set.scheme {
        Some(_) => TagSet::Chunks,
        None if set.task.name == "pos" => TagSet::Words,
        None => TagSet::of_labels(&set.labels),
    };
    let mut counts = EntityCounts::new(kind);
    let mut mistakes = Vec::new();
    let mut word_pairs = Vec::new();
    for (example, prediction) in set.examples.iter().zip(predictions) {
        let (Target::Tags(expected), Prediction::Tags(predicted), Input::Words { words, .. }) =
            (&example.target, prediction, &example.input)
        else {
            return Err(wrong_kind(set, example));
        };
        if expected.len() != words.len() || predicted.len() != words.len() {
            return Err(wrong_kind(set, example));
        }
        let names = |tags: &[u32]| tags.iter().map(|tag| set.label(*tag)).collect::<Vec<_>>();
        let (expected_names, predicted_names) = (names(expected), names(predicted));
        let [right, found] = counts.add(&expected_names, &predicted_names);
        if kind == TagSet::Words {
            word_pairs.extend(expected.iter().copied().zip(predicted.iter().copied()));
            let wrong: Vec<usize> = (0..words.len()).filter(|&i| expected[i] != predicted[i]).collect();
            if !wrong.is_empty() {
                let shown = |names: &[&str]| {
                    let each = wrong.iter().map(|&i| format!("{}/{}", words[i], names[i]));
                    each.collect::<Vec<_>>().join(" ")
                };
                let (expected, predicted) = (shown(&expected_names), shown(&predicted_names));
                mistakes.push(mistake(example, expected, predicted, wrong.len() as f64));
            }
            continue;
        }
        let only_in = |these: &[(std::ops::Range<usize>, &str)], others: &[(std::ops::Range<usize>, &str)]| {
            let each = these.iter().filter(|entity| !others.contains(entity));
            let each = each.map(|(place, kind)| format!("{} ({kind})", words[place.clone()].join(" ")));
            each.collect::<Vec<_>>()
        };
        let (missed, invented) = (only_in(&right, &found), only_in(&found, &right));
        if !missed.is_empty() || !invented.is_empty() {
            let weight = (missed.len() + invented.len()) as f64;
            let shown = |entities: Vec<String>| match entities.is_empty() {
                true => "nothing".to_owned(),
                false => entities.join(", "),
            };
            mistakes.push(mistake(example, shown(missed), shown(invented), weight));
        }
    }
    let mut score = Score { mistakes, ..Score::default() };
    if kind == TagSet::Words {
        let confusion = Confusion::new(set.labels.len(), word_pairs.into_iter());
        score.metrics = vec![("accuracy", counts.accuracy()), ("macro_f1", confusion.macro_f1())];
        let label = |(i, name): (usize, &String)| LabelScore { name: name.clone(), counts: confusion.counts(i) };
        score.labels = set.labels.iter().enumerate().map(label).collect();
        score.names = set.labels.clone();
        score.confusion = Some(confusion);
        return Ok(score);
    }
    let overall = counts.overall();
    score.metrics = vec![
        ("f1", overall.f1()),
        ("precision", overall.precision()),
        ("recall", overall.recall()),
        ("accuracy", counts.accuracy()),
        ("macro_f1", counts.macro_f1()),
    ];
    score.labels = counts.kinds.into_iter().map(|(name, counts)| LabelScore { name, counts }).collect();
    Ok(score)
}

fn answers(set: &Set, predictions: &[Prediction], threshold: Option<f64>) -> Result<Score, TaskError> {
    let mut score = Score::default();
    let mut all: Vec<(bool, AnswerScore)> = Vec::new();
    // For the best thresholds: odds, whether there is an answer, the scores, whether something is said.
    let mut with_odds: Vec<(f64, bool, AnswerScore, bool)> = Vec::new();
    for (example, prediction) in set.examples.iter().zip(predictions) {
        let Target::Answers(expected) = &example.target else { return Err(wrong_kind(set, example)) };
        let texts = || expected.iter().map(|answer| answer.text.as_str());
        let has_answer = !expected.is_empty();
        let (text, odds) = match prediction {
            Prediction::Answer { text, null_odds, .. } => (text.as_str(), *null_odds),
            Prediction::None => {
                score.missing += 1;
                all.push((has_answer, AnswerScore { exact: 0.0, f1: 0.0 }));
                continue;
            }
            _ => return Err(wrong_kind(set, example)),
        };
        let said = answer_score(texts(), text);
        if let Some(odds) = odds {
            with_odds.push((odds, has_answer, said, !text.is_empty()));
        }
        let withheld = matches!((odds, threshold), (Some(odds), Some(threshold)) if odds > threshold);
        let (text, counted) = if withheld { ("", answer_score(texts(), "")) } else { (text, said) };
        all.push((has_answer, counted));
        if counted.f1 < 1.0 {
            let shown = |text: &str| if text.is_empty() { "no answer".to_owned() } else { text.to_owned() };
            let expected = expected.first().map_or("no answer", |answer| &answer.text);
            score.mistakes.push(mistake(example, expected.to_owned(), shown(text), 1.0 - counted.f1));
        }
    }
    let percent = |of: &dyn Fn(&AnswerScore) -> f64, keep: &dyn Fn(bool) -> bool| {
        let kept = || all.iter().filter(|(has_answer, _)| keep(*has_answer));
        100.0 * kept().map(|(_, score)| of(score)).sum::<f64>() / kept().count().max(1) as f64
    };
    let (exact, f1) = (|score: &AnswerScore| score.exact, |score: &AnswerScore| score.f1);
    score.metrics = vec![("exact_match", percent(&exact, &|_| true)), ("f1", percent(&f1, &|_| true))];
    let unanswerable = all.iter().filter(|(has_answer, _)| !has_answer).count();
    if unanswerable > 0 {
        score.metrics.extend([
            ("has_answer_exact_match", percent(&exact, &|has_answer| has_answer)),
            ("has_answer_f1", percent(&f1, &|has_answer| has_answer)),
            ("no_answer_exact_match", percent(&exact, &|has_answer| !has_answer)),
            ("no_answer_f1", percent(&f1, &|has_answer| !has_answer)),
        ]);
    }
    // Thresholds mean something only where all questions can be ordered.
    if with_odds.len() + score.missing == all.len() && !with_odds.is_empty() && unanswerable > 0 {
        let best = |of: &dyn Fn(&AnswerScore) -> f64| {
            let questions: Vec<(f64, bool, f64, bool)> =
                with_odds.iter().map(|(odds, has_answer, said, says)| (*odds, *has_answer, of(said), *says)).collect();
            best_threshold(&questions)
        };
        let (best_exact, best_f1) = (best(&exact), best(&f1));
        score.metrics.extend([
            ("best_exact_match", 100.0 * best_exact.score),
            ("best_exact_match_threshold", best_exact.threshold),
            ("best_f1", 100.0 * best_f1.score),
            ("best_f1_threshold", best_f1.threshold),
        ]);
    }
    Ok(score)
}
