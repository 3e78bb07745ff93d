//! Documents by their relevance to a query, by a model that reads both together: a cross-encoder.
//!
//! An example is a query with some documents, each with a relevance. Files have a document in each row with its `score`; or a query's
//! positives and negatives; or lists of documents and of their labels. What is learned from a list is a [`RankLoss`](crate::RankLoss).

use std::collections::HashMap;

use henson_data::tables::Column;
use serde_json::Value;

use super::*;
use crate::finetune::ListObjective;
use crate::metrics::reranking_scores;

/// The cutoff of its scores.
const CUTOFF: usize = 10;

pub(crate) static RANK: Form = Form {
    reads_whole: true,
    learns_on_host: true,
    usual_length: 256,
    metrics: &["ndcg", "mrr", "map"],
    library: "sentence-transformers",
    ..Form::new(
        Head::Sequence { labels: 1 },
        "text-ranking",
        "CrossEncoder",
        "rerank --model DIR --query 'A question?' 'A text.'",
        &Rank,
    )
};

/// The names of columns with documents, with relevances, and with documents that are not relevant.
const DOCUMENTS: &[&str] =
    &["documents", "docs", "passages", "document", "passage", "positives", "positive", "pos", "answer", "text"];
const RELEVANCES: &[&str] = &["labels", "scores", "score", "label", "relevance"];
const NEGATIVES: &[&str] = &["negatives", "negative", "neg"];

#[derive(Debug)]
struct Rank;

impl Steps for Rank {
    fn input(&self, cells: &Cells<'_>) -> Result<Input, TaskError> {
        let (documents, _) = documents(cells)?;
        Ok(Input::Choices { context: cells.first.clone(), endings: documents })
    }

    fn target(&self, cells: &Cells<'_>, _collector: &mut Collector<'_>) -> Result<Target, TaskError> {
        Ok(documents(cells)?.1.map_or(Target::None, Target::Numbers))
    }

    /// As a re-ranker reads them.
    fn lay_out(&self, tokenizer: &Tokenizer, input: &Input, lengths: &Lengths) -> Result<Prepared, TextError> {
        let Input::Choices { context, endings } = input else { return Ok(Prepared::Plain(Vec::new())) };
        let mut all = Vec::with_capacity(endings.len());
        for document in endings {
            all.extend(text_windows(tokenizer, henson_infer::Input::Pair(context, document), lengths.most, false)?.0);
        }
        Ok(Prepared::Plain(all))
    }

    fn instances(&self, prepared: Prepared, target: &Target, _labels: usize) -> Vec<Instance> {
        let Target::Numbers(numbers) = target else { return Vec::new() };
        let sequences = prepared.into_sequences().collect();
        vec![Instance { sequences, numbers: numbers.clone(), ..Instance::default() }]
    }

    fn lesson(&self) -> Option<Lesson> {
        Some(Lesson::Margins)
    }

    fn taught(&self, prepared: Prepared, target: &Target, labels: usize) -> Vec<Instance> {
        match target {
            Target::None => {
                let sequences: Vec<_> = prepared.into_sequences().collect();
                vec![Instance { numbers: vec![f32::NAN; sequences.len()], sequences, ..Instance::default() }]
            }
            _ => self.instances(prepared, target, labels),
        }
    }

    fn digest(&self, instance: &Instance) -> String {
        format!("Relevance({:?})", instance.numbers)
    }

    fn host(&self, recipe: &FineTuneRecipe, _train: &Set, _width: usize) -> TrainResult<Option<HostObjective>> {
        Ok(Some(HostObjective::Lists(ListObjective { loss: recipe.rank_loss })))
    }

    fn check_data(&self, train: &Set, _dev: Option<&Set>) -> Result<(), TaskError> {
        let relevances = || {
            train.examples.iter().filter_map(|example| match &example.target {
                Target::Numbers(numbers) => Some(numbers),
                _ => None,
            })
        };
        let mut all = relevances().flatten();
        let first = all.next().copied();
        if all.all(|relevance| Some(*relevance) == first) {
            let reason =
                "all documents of every query are equally relevant, so that there is nothing to learn".to_owned();
            return Err(TaskError::Empty { path: train.path.clone(), task: train.task.name, reason });
        }
        Ok(())
    }

    fn pick_rows(&self, train: &mut Set, recipe: &FineTuneRecipe, _dropout: bool) -> Result<(), TaskError> {
        for example in &train.examples {
            let Target::Numbers(numbers) = &example.target else { continue };
            let outside = numbers.iter().find(|relevance| !(0.0..=1.0).contains(*relevance));
            if let (Some(relevance), crate::RankLoss::Bce) = (outside, recipe.rank_loss) {
                let problem =
                    format!("a relevance of {relevance}: expected 0 to 1 (other losses take any: --set rank_loss=…)");
                return Err(TaskError::row(&train.path, example.place.clone(), problem));
            }
        }
        // What compares documents learns nothing from one.
        if recipe.rank_loss.compares()
            && train.examples.iter().all(|example| matches!(&example.target, Target::Numbers(n) if n.len() < 2))
        {
            let reason = "every row has one document, and this loss compares several of a query: expected lists of \
                          documents, or positives and negatives (--set rank_loss=bce takes single ones)";
            return Err(TaskError::Empty {
                path: train.path.clone(),
                task: train.task.name,
                reason: reason.to_owned(),
            });
        }
        Ok(())
    }

    fn label_names(&self, _train: &Set) -> Vec<String> {
        vec!["LABEL_0".to_owned()]
    }

    fn scores(&self, _problem: Option<Problem>, _prepared: &Prepared, logits: &[Vec<f32>]) -> Scores {
        vec![logits.concat()]
    }

    fn predict(&self, said: Said<'_>) -> Prediction {
        Prediction::Ranks(said.row())
    }

    /// Documents of the same query count together, whether they stand in one row or in several.
    fn score(&self, set: &Set, predictions: &[Prediction], _threshold: Option<f64>) -> Result<Score, TaskError> {
        let mut numbers: HashMap<&str, usize> = HashMap::new();
        let mut queries: Vec<Vec<(f32, f64)>> = Vec::new();
        for (example, prediction) in set.examples.iter().zip(predictions) {
            let (Input::Choices { context, .. }, Target::Numbers(relevance), Prediction::Ranks(scores)) =
                (&example.input, &example.target, prediction)
            else {
                return Err(wrong_kind(set, example));
            };
            let number = *numbers.entry(context.as_str()).or_insert(queries.len());
            if number == queries.len() {
                queries.push(Vec::new());
            }
            queries[number].extend(scores.iter().copied().zip(relevance.iter().map(|x| f64::from(*x))));
        }
        Ok(Score { metrics: reranking_scores(&queries, CUTOFF).to_vec(), ..Score::default() })
    }
}

/// The documents of a row, and their relevances where it has some.
fn documents(cells: &Cells<'_>) -> Result<(Vec<String>, Option<Vec<f32>>), TaskError> {
    let wrong = |column: &Column, problem: String| cells.wrong(format!("column {column}: {problem}"));
    let list = |(column, value): (Column, &Value)| -> Result<Vec<String>, TaskError> {
        let found = match value {
            Value::Array(_) => texts(value),
            _ => text(value).map(|text| text.into_iter().collect()),
        };
        found.map_err(|problem| wrong(&column, problem))
    };
    let role = Role { what: "the documents", flag: "--second-column", names: DOCUMENTS };
    let found = rows::need(cells.path, cells.row, cells.files.second_column.as_ref(), &role, None)?;
    let column = found.0.clone();
    let mut all = list(found)?;
    let negatives = rows::find(cells.row, cells.files.negative_column.as_ref(), NEGATIVES, None);
    // A pair for which `mine` found none has an empty list.
    let tells_negatives = negatives.is_some();
    let negatives = negatives.map(list).transpose()?.unwrap_or_default();
    if all.is_empty() || all.iter().chain(&negatives).any(|text| text.trim().is_empty()) {
        return Err(wrong(&column, "a document is empty, or there is none".to_owned()));
    }
    let mut relevance = None;
    let user = cells.files.label_column.first();
    if let Some((column, value)) = rows::find(cells.row, user, RELEVANCES, None) {
        let given = list((column.clone(), value))?;
        let numbers =
            given.iter().map(|x| x.trim().parse::<f32>().ok().filter(|x| x.is_finite())).collect::<Option<Vec<f32>>>();
        let numbers = numbers.ok_or_else(|| wrong(&column, "expected a number for each document".to_owned()))?;
        relevance = (!numbers.is_empty()).then_some(numbers);
    }
    let positives = all.len();
    all.extend(negatives);
    let relevance = match relevance {
        // Those that are not relevant need no number, and what is relevant alone needs none where there are others.
        Some(mut numbers) if numbers.len() == positives => {
            numbers.resize(all.len(), 0.0);
            Some(numbers)
        }
        Some(numbers) if numbers.len() != all.len() => {
            return Err(cells.wrong(format!("{} numbers for {} documents", numbers.len(), all.len())));
        }
        None if tells_negatives => Some((0..all.len()).map(|i| f32::from(u8::from(i < positives))).collect()),
        other => other,
    };
    Ok((all, relevance))
}
