//! Which of a passage's entities fills the gap of a sentence about it: ReCoRD.
//!
//! Each entity is put into the gap, and `[CLS] passage [SEP] sentence [SEP]` has one logit, as jiant lays it out. jiant judges each
//! entity by itself; here they are compared by a softmax, like any choices. Where several are right, each is learned
//! against the wrong ones alone.

use std::collections::HashSet;
use std::sync::Arc;

use henson_infer::softmax;
use serde::Deserialize;
use serde_json::json;

use super::*;
use crate::example::Answer;
use crate::metrics::answer_score;
use crate::read::rows::{each_row, need, object_in, place};

pub(crate) static CLOZE: Form = Form {
    reads_whole: true,
    metrics: &["f1", "exact_match"],
    ..Form::new(
        Head::Choice,
        "multiple-choice",
        "AutoModelForMultipleChoice",
        "choose --model DIR --context 'A passage.' 'A sentence about A.' 'A sentence about B.'",
        &Cloze,
    )
};

/// What stands in the gap.
const GAP: &str = "@placeholder";

#[derive(Debug)]
struct Cloze;

#[derive(Deserialize)]
struct Passage {
    text: String,
    entities: Vec<Entity>,
}

/// Characters of the passage, the last one included.
#[derive(Deserialize)]
struct Entity {
    start: usize,
    end: usize,
}

#[derive(Deserialize)]
struct Query {
    query: String,
    idx: u64,
    #[serde(default)]
    answers: Vec<Right>,
}

#[derive(Deserialize)]
struct Right {
    text: String,
}

impl Steps for Cloze {
    fn read(&self, path: &Path, mut collector: Collector<'_>) -> Result<Set, TaskError> {
        each_row(path, &mut collector, |collector, row| {
            let row = row?;
            let place = place(path, &row);
            let wrong = |problem: String| TaskError::row(path, place.clone(), problem);
            let role = |what, names| Role { what, flag: "--task record", names };
            let (_, passage) = need(path, &row, None, &role("the passage", &["passage"]), None)?;
            let Passage { text, entities } = object_in("passage", passage).map_err(wrong)?;
            let candidates = candidates(&text, &entities).map_err(wrong)?;
            let (_, queries) = need(path, &row, None, &role("the sentences", &["qas"]), None)?;
            let queries: Vec<Query> = object_in("qas", queries).map_err(wrong)?;
            let passage: Arc<str> = without_marks(&text).into();
            let mut examples = Vec::new();
            for Query { query, idx, answers } in queries {
                let place = format!("{place}, query {idx}");
                if !query.contains(GAP) {
                    return Err(TaskError::row(path, place, format!("there is no {GAP} in {query:?}")));
                }
                let answers = answers.into_iter().map(|Right { text }| Answer { text, place: None });
                let target = match answers.len() {
                    0 => Target::None,
                    _ if !collector.reading.labels_wanted => Target::None,
                    _ => Target::Answers(answers.collect()),
                };
                let input = Input::Cloze { passage: Arc::clone(&passage), query, candidates: candidates.clone() };
                examples.push(Example { id: idx.to_string(), place, input, target });
            }
            Ok(examples)
        })?;
        collector.finish(None)
    }

    fn lay_out(&self, tokenizer: &Tokenizer, input: &Input, lengths: &Lengths) -> Result<Prepared, TextError> {
        let Input::Cloze { passage, query, candidates } = input else { return Ok(Prepared::Plain(Vec::new())) };
        let filled: Vec<String> = candidates.iter().map(|candidate| query.replace(GAP, candidate)).collect();
        let filled: Vec<&str> = filled.iter().map(String::as_str).collect();
        Ok(Prepared::Candidates(tokenizer.choices(passage, &filled, lengths.most)?, candidates.clone()))
    }

    fn instances(&self, prepared: Prepared, target: &Target, _labels: usize) -> Vec<Instance> {
        let (Prepared::Candidates(_, candidates), Target::Answers(answers)) = (&prepared, target) else {
            return Vec::new();
        };
        let is_right: Vec<bool> =
            candidates.iter().map(|candidate| answers.iter().any(|answer| answer.text == *candidate)).collect();
        let sequences: Vec<_> = prepared.into_sequences().collect();
        let rights = (0..sequences.len()).filter(|right| is_right[*right]);
        let instance = |right: usize| {
            let kept = || (0..sequences.len()).filter(|i| *i == right || !is_right[*i]);
            let number = kept().position(|i| i == right).map(|number| number as u32);
            Instance {
                sequences: kept().map(|i| sequences[i].clone()).collect(),
                labels: vec![number],
                ..Instance::default()
            }
        };
        rights.map(instance).collect()
    }

    fn digest(&self, instance: &Instance) -> String {
        format!("Choice({})", joined(&instance.labels))
    }

    fn scores(&self, _problem: Option<Problem>, _prepared: &Prepared, logits: &[Vec<f32>]) -> Scores {
        vec![softmax(&logits.concat())]
    }

    fn predict(&self, said: Said<'_>) -> Prediction {
        let Input::Cloze { candidates, .. } = &said.example.input else { return Prediction::None };
        let candidate = said.scores.first().and_then(|scores| best(scores)).and_then(|best| candidates.get(best));
        candidate.map_or(Prediction::None, |candidate| answer(candidate.clone()))
    }

    /// As SQuAD's answers are counted, the best of those that are right.
    fn score(&self, set: &Set, predictions: &[Prediction], _threshold: Option<f64>) -> Result<Score, TaskError> {
        let (mut exact, mut f1, mut mistakes) = (0.0, 0.0, Vec::new());
        for (example, prediction) in set.examples.iter().zip(predictions) {
            let (Target::Answers(expected), Prediction::Answer { text, .. }) = (&example.target, prediction) else {
                return Err(wrong_kind(set, example));
            };
            let said = answer_score(expected.iter().map(|answer| answer.text.as_str()), text);
            (exact, f1) = (exact + said.exact, f1 + said.f1);
            if said.exact < 1.0 {
                let expected = expected.first().map_or(String::new(), |answer| answer.text.clone());
                mistakes.push(mistake(example, expected, text.clone(), 1.0 - said.f1));
            }
        }
        let count = set.examples.len().max(1) as f64;
        Ok(Score { metrics: vec![("f1", f1 / count), ("exact_match", exact / count)], mistakes, ..Score::default() })
    }

    fn prediction(&self, _set: &mut Set, found: &Found) -> Result<Prediction, String> {
        Ok(answer(found.word()?))
    }

    fn prediction_files(&self, set: &Set, predictions: &[Prediction]) -> Result<Vec<(String, Vec<u8>)>, TaskError> {
        predictions::lines(set, predictions, |prediction| match prediction {
            Prediction::Answer { text, .. } => Some(json!(text)),
            _ => None,
        })
    }
}

fn answer(text: String) -> Prediction {
    Prediction::Answer { text, null_odds: None, candidates: Vec::new() }
}

/// The texts of entities, each once.
fn candidates(text: &str, entities: &[Entity]) -> Result<Vec<String>, String> {
    let starts: Vec<usize> = text.char_indices().map(|(start, _)| start).chain([text.len()]).collect();
    let (mut found, mut known) = (Vec::new(), HashSet::new());
    for Entity { start, end } in entities {
        let ends = (starts.get(*start), end.checked_add(1).and_then(|end| starts.get(end)));
        let entity = match ends {
            (Some(start), Some(end)) if start < end => &text[*start..*end],
            _ => {
                let length = starts.len() - 1;
                return Err(format!("an entity is at the characters {start} to {end}: the passage has {length}"));
            }
        };
        if known.insert(entity) {
            found.push(entity.to_owned());
        }
    }
    if found.is_empty() { Err("the passage has no entities".to_owned()) } else { Ok(found) }
}

/// A passage without the marks before its highlights, which become sentences of their own.
fn without_marks(text: &str) -> String {
    let mut whole = String::with_capacity(text.len());
    for part in text.split("@highlight") {
        let part = part.trim();
        if !whole.is_empty() {
            whole += if whole.ends_with(['.', '?', '!', '"', '\'']) { " " } else { ". " };
        }
        whole += part;
    }
    whole
}
