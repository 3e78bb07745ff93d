//! Whether an answer to a question about a passage is right, each answer by itself: MultiRC, where a question may have several
//! right answers.
//!
//! `[CLS] passage question [SEP] answer [SEP]`, as jiant lays it out: where that is too long, the end of the passage is cut.

use std::collections::BTreeMap;
use std::sync::Arc;

use henson_data::tables::{self, Column, TableOptions};
use serde::Deserialize;
use serde_json::{Value, json};

use super::classify::{class_pairs, read_class, score_classes};
use super::*;
use crate::metrics::Confusion;
use crate::read::reading_with;
use crate::read::rows::{each_row, need, object_in, place};

pub(crate) static JUDGE: Form = Form {
    reads_whole: true,
    fewest_labels: 2,
    metrics: &["f1_a", "exact_match", "f1_m", "accuracy"],
    ..Form::of_texts(Problem::SingleLabel, "classify --model DIR --pair 'A passage. A question?' 'An answer.'", &Judge)
};

#[derive(Debug)]
struct Judge;

/// What MultiRC has in `passage`. Its list of sentences is the same text once more.
#[derive(Deserialize)]
struct Passage {
    text: String,
    questions: Vec<Question>,
}

#[derive(Deserialize)]
struct Question {
    question: String,
    answers: Vec<Judged>,
    idx: u64,
}

#[derive(Deserialize)]
struct Judged {
    text: String,
    idx: u64,
    #[serde(default)]
    label: Value,
}

impl Steps for Judge {
    fn read(&self, path: &Path, mut collector: Collector<'_>) -> Result<Set, TaskError> {
        each_row(path, &mut collector, |collector, row| {
            let row = row?;
            let place = place(path, &row);
            let wrong = |problem: String| TaskError::row(path, place.clone(), problem);
            let role = |what, names| Role { what, flag: "--task multirc", names };
            let (_, passage) = need(path, &row, None, &role("the passage", &["passage"]), None)?;
            let passage: Passage = object_in("passage", passage).map_err(wrong)?;
            let (_, idx) = need(path, &row, None, &role("the passage's number", &["idx"]), None)?;
            let idx = idx.as_u64().ok_or_else(|| wrong(format!("\"idx\": expected a whole number, found {idx}")))?;
            if passage.text.trim().is_empty() {
                return Err(wrong("\"passage\": the text is empty".to_owned()));
            }
            let text: Arc<str> = passage.text.into();
            let mut examples = Vec::new();
            for Question { question, answers, idx: number } in passage.questions {
                let wrong = |problem: String| wrong(format!("question {number}: {problem}"));
                if question.trim().is_empty() {
                    return Err(wrong("the text is empty".to_owned()));
                }
                for answer in answers {
                    let target = match collector.reading.labels_wanted {
                        true => collector.class(&answer.label),
                        false => Ok(None),
                    };
                    let target = target.map_err(|problem| wrong(format!("answer {}: {problem}", answer.idx)))?;
                    examples.push(Example {
                        id: format!("{idx}/{number}/{}", answer.idx),
                        place: format!("{place}, question {number}, answer {}", answer.idx),
                        input: Input::Answered {
                            passage: Arc::clone(&text),
                            question: question.clone(),
                            answer: answer.text,
                        },
                        target: target.map_or(Target::None, Target::Class),
                    });
                }
            }
            Ok(examples)
        })?;
        collector.finish(None)
    }

    fn lay_out(&self, tokenizer: &Tokenizer, input: &Input, lengths: &Lengths) -> Result<Prepared, TextError> {
        let Input::Answered { passage, question, answer } = input else { return Ok(Prepared::Plain(Vec::new())) };
        let (mut first, mut question, answer) =
            (tokenizer.encode(passage)?, tokenizer.encode(question)?, tokenizer.encode(answer)?);
        let room = lengths.most.saturating_sub(tokenizer.template().pair_specials());
        // A question that leaves no room for its answer is cut, too.
        let cut = question.truncate(room.saturating_sub(answer.len()))
            + first.truncate(room.saturating_sub(question.len() + answer.len()));
        first.ids.extend(question.ids);
        first.offsets.extend(question.offsets);
        first.words.extend(question.words);
        let mut features = tokenizer.template().pair(&first, &answer, lengths.most)?;
        features.dropped += cut;
        Ok(Prepared::Plain(vec![features]))
    }

    fn class_weights(&self, train: &Set) -> Option<Vec<f32>> {
        Some(balanced(&train.label_counts()))
    }

    fn reading(&self, _recipe: &FineTuneRecipe, _train: &Set, reading: TrainedReading) -> TrainedReading {
        TrainedReading { pairs: Some(true), ..reading }
    }

    /// F1 over all answers, the share of questions whose answers are all judged right, and the mean F1 of the questions: as in
    /// MultiRC's own program (Khashabi et al. 2018).
    fn score(&self, set: &Set, predictions: &[Prediction], _threshold: Option<f64>) -> Result<Score, TaskError> {
        let mut score = score_classes(set, predictions)?;
        let mut questions: BTreeMap<&str, Vec<(u32, u32)>> = BTreeMap::new();
        for (example, pair) in set.examples.iter().zip(class_pairs(set, predictions, set.labels.len())?) {
            questions.entry(question_of(example)).or_default().push(pair);
        }
        let count = questions.len().max(1) as f64;
        let right = questions.values().filter(|pairs| pairs.iter().all(|(expected, class)| expected == class)).count();
        let f1 = |pairs: &Vec<(u32, u32)>| Confusion::new(set.labels.len(), pairs.iter().copied()).counts(1).f1();
        score.metrics = vec![
            ("f1_a", score.get("f1").unwrap_or(0.0)),
            ("exact_match", right as f64 / count),
            ("f1_m", questions.values().map(f1).sum::<f64>() / count),
            ("accuracy", score.get("accuracy").unwrap_or(0.0)),
        ];
        Ok(score)
    }

    /// `MultiRC.jsonl`: passages with their questions with their answers.
    fn prediction_files(&self, set: &Set, predictions: &[Prediction]) -> Result<Vec<(String, Vec<u8>)>, TaskError> {
        let mut passages: Vec<(u64, Vec<Answers>)> = Vec::new();
        for (example, prediction) in set.examples.iter().zip(predictions) {
            let (Prediction::Class { class, .. }, Some([passage, question, answer])) =
                (prediction, numbers_of(example))
            else {
                return Err(wrong_kind(set, example));
            };
            if passages.last().is_none_or(|(last, _)| *last != passage) {
                passages.push((passage, Vec::new()));
            }
            let Some((_, questions)) = passages.last_mut() else { continue };
            if questions.last().is_none_or(|(last, _)| *last != question) {
                questions.push((question, Vec::new()));
            }
            if let Some((_, answers)) = questions.last_mut() {
                answers.push(json!({"idx": answer, "label": class}));
            }
        }
        let lines = passages.into_iter().map(|(idx, questions)| {
            let questions: Value =
                questions.into_iter().map(|(idx, answers)| json!({"idx": idx, "answers": answers})).collect();
            format!("{}\n", json!({"idx": idx, "passage": {"questions": questions}}))
        });
        let name = set.task.submission.unwrap_or("predictions.jsonl");
        Ok(vec![(name.to_owned(), lines.collect::<String>().into_bytes())])
    }

    fn read_predictions(&self, path: &Path, set: &mut Set) -> Result<Vec<Prediction>, TaskError> {
        let mut found = nested_predictions(path)?;
        // A table of ids, such as `0/3/12`, and predictions.
        if found.is_empty() {
            return predictions::read_rows(path, set);
        }
        let mut all = Vec::with_capacity(set.examples.len());
        for i in 0..set.examples.len() {
            let id = set.examples[i].id.clone();
            let value = found.remove(&id);
            let value = value.ok_or_else(|| TaskError::mismatch(path, format!("it has no prediction for {id:?}")))?;
            let prediction = read_class(set, &Found::of(i, value));
            all.push(prediction.map_err(|problem| TaskError::mismatch(path, format!("{id:?}: {problem}")))?);
        }
        match found.keys().next() {
            Some(id) => {
                Err(TaskError::mismatch(path, format!("it has a prediction for {id:?}, which is not in the data")))
            }
            None => Ok(all),
        }
    }

    fn prediction(&self, set: &mut Set, found: &Found) -> Result<Prediction, String> {
        read_class(set, found)
    }
}

/// The predictions of a `MultiRC.jsonl` by the numbers of passage, question and answer; none where a file is another.
fn nested_predictions(path: &Path) -> Result<BTreeMap<String, Value>, TaskError> {
    let mut found = BTreeMap::new();
    reading_with(
        |each| tables::read_rows(path, &TableOptions::default(), each),
        |row| {
            let row = row?;
            let cell = |name: &str| row.get(&Column::Name(name.to_owned()));
            let Some(passage) = cell("passage") else { return Ok(()) };
            let wrong = |problem: String| TaskError::row(path, place(path, &row), problem);
            let idx = cell("idx").and_then(Value::as_u64);
            let idx = idx.ok_or_else(|| wrong("\"idx\": expected the number of a passage".to_owned()))?;
            let passage: Predicted = object_in("passage", passage).map_err(wrong)?;
            for question in passage.questions {
                for answer in question.answers {
                    let id = format!("{idx}/{}/{}", question.idx, answer.idx);
                    if found.insert(id.clone(), answer.label).is_some() {
                        return Err(wrong(format!("a second prediction for {id:?}")));
                    }
                }
            }
            Ok(())
        },
    )?;
    Ok(found)
}

/// Predictions for a passage.
#[derive(Deserialize)]
struct Predicted {
    questions: Vec<PredictedQuestion>,
}

#[derive(Deserialize)]
struct PredictedQuestion {
    idx: u64,
    answers: Vec<PredictedAnswer>,
}

#[derive(Deserialize)]
struct PredictedAnswer {
    idx: u64,
    label: Value,
}

/// The number of a question, and what is predicted for its answers.
type Answers = (u64, Vec<Value>);

/// The numbers of passage and question.
fn question_of(example: &Example) -> &str {
    example.id.rsplit_once('/').map_or("", |(question, _)| question)
}

/// The numbers of passage, question and answer.
fn numbers_of(example: &Example) -> Option<[u64; 3]> {
    let numbers: Option<Vec<u64>> = example.id.split('/').map(|number| number.parse().ok()).collect();
    numbers?.try_into().ok()
}
