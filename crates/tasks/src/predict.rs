//! Fine-tuned models on a file: predictions for each example, averaged over several models where there are several.

use std::ops::ControlFlow;

use henson_infer::{EmbedSettings, Model};
use henson_models::Head;
use henson_tensor::Tape;
use henson_train::TrainError;

use crate::error::TaskError;
use crate::example::{Example, Input, Set};
use crate::finetune::{predictions_of, problem_of};
use crate::forward::forward;
use crate::predictions::Prediction;
use crate::prepare::{Lengths, Scores, prepare_all};
use crate::read::{Reading, listed};
use crate::task::{Task, TaskKind};

/// Examples that are laid out and computed at a time.
const TOGETHER: usize = 512;

/// How predictions are made.
#[derive(Clone, Copy, Debug, Default)]
pub struct PredictSettings {
    /// The most tokens of a sequence, within what each model takes; none: what it was trained with.
    pub max_length: Option<usize>,
    /// Whether longer texts are divided into windows; none: as each model was trained.
    pub windows: Option<bool>,
    /// For questions that may be without an answer: by how much that must beat the best one. None: always answer.
    pub no_answer: Option<f64>,
}

/// How a file is read for a model: where the labels are not official ones, they are the model's.
pub fn reading_for(model: &Model, mut reading: Reading) -> Reading {
    let learnt =
        matches!(reading.task.kind, TaskKind::Classify | TaskKind::Pair | TaskKind::Multilabel | TaskKind::Tag)
            && reading.task.labels.is_empty();
    if learnt && reading.files.labels.is_empty() {
        (reading.files.labels, reading.labels_of_model) = (model.labels(), true);
    }
    reading
}

/// Asks models about all examples of a set. Several are averaged: their probabilities, for answers their logits, for texts that
/// are compared their cosines.
/// `each` is told how many of all examples are done, and may end it.
pub fn predict(
    models: &[Model],
    set: &Set,
    settings: &PredictSettings,
    mut each: impl FnMut(usize) -> ControlFlow<()>,
) -> Result<Vec<Prediction>, TaskError> {
    if set.task.kind == TaskKind::Embed {
        return compare(models, set, settings, each);
    }
    let orders: Vec<Vec<usize>> = models.iter().map(|model| label_order(model, set)).collect::<Result<_, _>>()?;
    let problem = problem_of(set.task.kind);
    let lengths_of = |model: &Model| {
        let own = Lengths::of_model(model, set.task.kind);
        Lengths {
            most: settings.max_length.map_or(own.most, |most| most.min(model.most_tokens())),
            windows: settings.windows.unwrap_or(own.windows),
            ..own
        }
    };
    let mut lengths: Vec<Lengths> = models.iter().map(lengths_of).collect();
    // Logits of answers are averaged piece by piece: all models read a passage in the windows of the first.
    if set.task.kind == TaskKind::Qa {
        (1..lengths.len()).for_each(|i| lengths[i] = lengths[0]);
    }
    let mut predictions = Vec::with_capacity(set.examples.len());
    let mut tape = Tape::new();
    for examples in set.examples.chunks(TOGETHER) {
        let references: Vec<&Example> = examples.iter().collect();
        let mut joined: Option<Vec<Scores>> = None;
        let mut prepared = Vec::new();
        for ((model, order), lengths) in models.iter().zip(&orders).zip(&lengths) {
            let threads = model.parameters().device().threads();
            let own = prepare_all(model.tokenizer(), &references, lengths, threads).map_err(TrainError::from)?;
            let done = predictions.len();
            let mut stopped = false;
            let mut scores = forward(model.network(), model.parameters(), &mut tape, &own, problem, |more| {
                stopped = each(done + more / models.len()).is_break();
                !stopped
            })
            .map_err(TrainError::from)?;
            if stopped {
                return Err(TaskError::Stopped);
            }
            if let Some(broken) = scores.iter().position(|scores| !scores.is_finite()) {
                return Err(henson_infer::InferError::NotFinite { text: done + broken + 1 }.into());
            }
            scores.iter_mut().for_each(|scores| scores.reorder(order));
            match &mut joined {
                None => joined = Some(scores),
                Some(joined) => {
                    if !joined.iter_mut().zip(&scores).all(|(to, from)| to.add(from, 1.0)) {
                        let (first, second) = (models[0].path().to_owned(), model.path().to_owned());
                        return Err(TaskError::Ensemble { first, second });
                    }
                }
            }
            prepared = own;
        }
        let mut scores = joined.unwrap_or_default();
        scores.iter_mut().for_each(|scores| scores.scale(1.0 / models.len() as f32));
        predictions.extend(predictions_of(set, examples, &prepared, scores, settings.no_answer));
    }
    Ok(predictions)
}

/// How alike the two texts of each example are, by vectors that are made as each model's directory says.
fn compare(
    models: &[Model],
    set: &Set,
    settings: &PredictSettings,
    mut each: impl FnMut(usize) -> ControlFlow<()>,
) -> Result<Vec<Prediction>, TaskError> {
    let mut all: Vec<Prediction> = Vec::with_capacity(set.examples.len());
    for (number, model) in models.iter().enumerate() {
        let own = EmbedSettings::of_directory(model.path())?;
        let most_tokens = settings.max_length.or(own.most_tokens);
        for (i, examples) in set.examples.chunks(TOGETHER).enumerate() {
            let done = i * TOGETHER;
            if each((number * set.examples.len() + done) / models.len()).is_break() {
                return Err(TaskError::Stopped);
            }
            let texts = examples.iter().flat_map(|example| match &example.input {
                Input::Alike { first, second, .. } => [first.as_str(), second.as_str()],
                _ => [""; 2],
            });
            let texts: Vec<&str> = texts.collect();
            // Both texts of a pair have its number.
            let numbers: Vec<usize> = (0..texts.len()).map(|i| done + i / 2 + 1).collect();
            let vectors = model
                .embed(&texts, EmbedSettings { most_tokens, ..own }, settings.windows.unwrap_or(false))
                .map_err(|error| error.numbered(&numbers))?;
            for (k, pair) in vectors.chunks_exact(2).enumerate() {
                let [first, second] = [&pair[0].vector, &pair[1].vector];
                let prediction = Prediction::similarity(first.clone(), second.clone());
                match (all.get_mut(done + k), prediction) {
                    // Vectors of different models are in different spaces.
                    (Some(Prediction::Similarity { cosine, vectors }), Prediction::Similarity { cosine: more, .. }) => {
                        *cosine += (more - *cosine) / (number + 1) as f64;
                        *vectors = None;
                    }
                    (_, prediction) => all.push(prediction),
                }
            }
        }
    }
    Ok(all)
}

/// For each label of the set its number in the model, by name or by meaning. Empty: the same, or nothing to order.
fn label_order(model: &Model, set: &Set) -> Result<Vec<usize>, TaskError> {
    let labels = match (model.network().head(), set.task.kind) {
        (Head::Sequence { labels: 1 }, TaskKind::Regress) => return Ok(Vec::new()),
        (Head::Span, TaskKind::Qa) | (Head::Choice, TaskKind::Choice) => return Ok(Vec::new()),
        (Head::Sequence { .. }, TaskKind::Classify | TaskKind::Pair | TaskKind::Multilabel)
        | (Head::Token { .. }, TaskKind::Tag) => model.labels(),
        (head, _) => {
            return Err(TaskError::OtherLabels {
                path: model.path().to_owned(),
                model: format!("of another kind ({})", model.config().model.class(head)),
                data: format!("those of task {}", set.task.name),
            });
        }
    };
    let task: &'static Task = set.task;
    let place =
        |i: usize| labels.iter().position(|label| *label == set.labels[i] || label == task.meaning(&set.labels, i));
    let order: Option<Vec<usize>> = (0..set.labels.len()).map(place).collect();
    // A config that names nothing: the order that `transformers`' examples train in.
    let nameless = || labels.len() == set.labels.len() && labels.iter().all(|label| label.starts_with("LABEL_"));
    match order {
        Some(order) if labels.len() == order.len() => Ok(order),
        _ if nameless() => Ok((0..labels.len()).collect()),
        _ => Err(TaskError::OtherLabels {
            path: model.path().to_owned(),
            model: listed(&labels),
            data: listed(&set.labels),
        }),
    }
}
