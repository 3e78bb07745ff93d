//! Fine-tuned models on a file: predictions for each example, averaged over several models where there are several.

use std::ops::ControlFlow;

use henson_infer::{Model, Pooling};
use henson_train::TrainError;

use crate::error::TaskError;
use crate::example::{Example, Set};
use crate::forms::Said;
use crate::forward::forward;
use crate::predictions::Prediction;
use crate::prepare::{Lengths, Prepared, Scores, prepare_all};
use crate::read::{Reading, listed};
use crate::task::Task;

/// Examples that are laid out and computed at a time.
pub(crate) const TOGETHER: usize = 512;

/// How predictions are made.
#[derive(Clone, Copy, Debug, Default)]
pub struct PredictSettings {
    /// Maximum number of tokens of a sequence, within what each model takes; none: what it was trained with.
    pub max_length: Option<usize>,
    /// Whether longer texts are divided into windows; none: as each model was trained.
    pub windows: Option<bool>,
    /// For questions that may be without an answer: by how much that must beat the best one. None: always answer.
    pub no_answer: Option<f64>,
}

/// How a file is read for a model: where the labels are not official ones, they are the model's.
pub fn reading_for(model: &Model, mut reading: Reading) -> Reading {
    let learned = reading.task.form.fewest_labels > 0 && reading.task.labels.is_empty();
    if learned && reading.files.labels.is_empty() {
        let labels = reading.task.form.class_names(model.labels());
        (reading.files.labels, reading.labels_of_model) = (labels, true);
    }
    reading.prefix = model.config().task.prefix.clone().unwrap_or_default();
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
    set.task.form.predict_set(models, set, settings, &mut each)
}

/// The same by the models' own heads.
pub(crate) fn predict_set(
    models: &[Model],
    set: &Set,
    settings: &PredictSettings,
    each: &mut dyn FnMut(usize) -> ControlFlow<()>,
) -> Result<Vec<Prediction>, TaskError> {
    let orders: Vec<Vec<usize>> = models.iter().map(|model| label_order(model, set)).collect::<Result<_, _>>()?;
    let lengths_of = |model: &Model| {
        let own = Lengths::of_model(model, set.task);
        Lengths {
            most: settings.max_length.map_or(own.most, |most| most.min(model.most_tokens())),
            windows: settings.windows.unwrap_or(own.windows),
            ..own
        }
    };
    let mut lengths: Vec<Lengths> = models.iter().map(lengths_of).collect();
    // Logits of answers are averaged piece by piece: all models read a passage in the windows of the first.
    if set.task.form.averages_positions {
        (1..lengths.len()).for_each(|i| lengths[i] = lengths[0]);
    }
    if let Some(beams) = models.iter().find(|model| models.len() > 1 && model.network().beams().is_some()) {
        return Err(TaskError::Beams { path: beams.path().to_owned() });
    }
    let mut predictions = Vec::with_capacity(set.examples.len());
    for examples in set.examples.chunks(TOGETHER) {
        let mut joined: Option<Vec<Scores>> = None;
        let mut prepared = Vec::new();
        for ((model, order), lengths) in models.iter().zip(&orders).zip(&lengths) {
            let threads = model.parameters().device().threads();
            let own = prepare_all(set.task, &set.labels, model.tokenizer(), examples, lengths, threads)
                .map_err(TrainError::from)?;
            let done = predictions.len();
            let mut stopped = false;
            let mut scores = forward(model.network(), model.parameters(), set.task, &own, &[Pooling::Mean], |more| {
                stopped = each(done + more / models.len()).is_break();
                !stopped
            })?;
            if stopped {
                return Err(TaskError::Stopped);
            }
            if let Some(broken) = scores.iter().position(|scores| scores.iter().flatten().any(|x| !x.is_finite())) {
                return Err(henson_infer::InferError::NotFinite { text: done + broken + 1 }.into());
            }
            scores.iter_mut().for_each(|scores| reorder(scores, order));
            match &mut joined {
                None => joined = Some(scores),
                Some(joined) => {
                    if !joined.iter_mut().zip(&scores).all(|(to, from)| add(to, from)) {
                        let (first, second) = (models[0].path().to_owned(), model.path().to_owned());
                        return Err(TaskError::Ensemble { first, second });
                    }
                }
            }
            prepared = own;
        }
        let mut scores = joined.unwrap_or_default();
        let share = 1.0 / models.len() as f32;
        scores.iter_mut().flatten().flatten().for_each(|score| *score *= share);
        predictions.extend(predictions_of(set, examples, &prepared, scores, settings.no_answer));
    }
    Ok(predictions)
}

/// Scores as predictions for some examples of a set.
pub(crate) fn predictions_of(
    set: &Set,
    examples: &[Example],
    prepared: &[Prepared],
    scores: Vec<Scores>,
    no_answer: Option<f64>,
) -> Vec<Prediction> {
    let each = examples.iter().zip(prepared).zip(scores);
    let said = |((example, prepared), scores)| Said { set, example, prepared, scores, no_answer };
    each.map(|each| set.task.form.predict(said(each))).collect()
}

/// Adds another model's scores. False where the two are of different shapes.
fn add(to: &mut Scores, from: &Scores) -> bool {
    to.len() == from.len()
        && to.iter_mut().zip(from).all(|(to, from)| {
            to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
            to.len() == from.len()
        })
}

/// Puts labels into another order: place i gets what stood at `order[i]`; of rows with votes, in both halves. Empty leaves all as
/// it is.
fn reorder(scores: &mut Scores, order: &[usize]) {
    let fits = |row: &&mut Vec<f32>| !order.is_empty() && [order.len(), 2 * order.len()].contains(&row.len());
    for row in scores.iter_mut().filter(fits) {
        *row = row.chunks(order.len()).flat_map(|half| order.iter().map(|from| half[*from])).collect();
    }
}

/// For each label of the set its number in the model, by name or by meaning. Empty: the same, or nothing to order.
pub(crate) fn label_order(model: &Model, set: &Set) -> Result<Vec<usize>, TaskError> {
    let (head, form, labels) = (model.network().head(), set.task.form, model.labels());
    if !form.takes(head, labels.len()) {
        return Err(TaskError::OtherLabels {
            path: model.path().to_owned(),
            model: format!("of another kind ({})", model.config().model.class(head)),
            data: format!("those of task {}", set.task.name),
        });
    }
    form.fits(model.config().task.reading, set).map_err(|model_is| TaskError::OtherLabels {
        path: model.path().to_owned(),
        model: model_is,
        data: format!("those of task {}", set.task.name),
    })?;
    if form.fewest_labels == 0 {
        return Ok(Vec::new());
    }
    let labels = form.class_names(labels);
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
