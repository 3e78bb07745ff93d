//! What a run with teachers settles before it begins: its phases, whose labels count, what is refused, and the teachers themselves.

use std::mem::discriminant;
use std::path::Path;
use std::sync::Arc;

use henson_checkpoint::{Config, ModelDirectory};
use henson_infer::{EmbedSettings, Model};
use henson_models::{Family, Head};
use henson_tensor::DType;
use henson_text::Tokenizer;
use henson_train::TrainError;

use super::recipe::FineTuneRecipe;
use super::taught::TaughtObjective;
use super::teaching::{Teaching, TeachingParts};
use crate::distil::Lesson;
use crate::error::TaskError;
use crate::example::{Input, Set, Target};
use crate::prepare::Lengths;
use crate::read::{Paths, Reading};
use crate::sentences::SentenceLoss;
use crate::task::{TASKS, Task};

/// The recipe of the first of two phases: on texts without labels, before those with labels (Turc et al. 2019).
pub(super) fn first_phase(recipe: &FineTuneRecipe) -> Option<FineTuneRecipe> {
    let distil = recipe.distil.as_ref().filter(|_| recipe.has_two_phases())?;
    let mut first = FineTuneRecipe { train: Paths::default(), dev_rows: 0, folds: 0, ..recipe.clone() };
    first.estimate_by(None);
    for (key, own) in [("epochs", distil.epochs), ("learning_rate", distil.learning_rate)] {
        let Some(own) = own else { continue };
        first.by_size.remove(key);
        *if key == "epochs" { &mut first.epochs } else { &mut first.learning_rate } = own;
    }
    Some(first)
}

/// Settles whose labels count and what is read. Gives whether the texts are read without labels.
pub(super) fn prepare(
    recipe: &mut FineTuneRecipe,
    task: &'static Task,
    reading: &mut Reading,
) -> Result<bool, TaskError> {
    if recipe.distil.is_none() {
        return Ok(false);
    }
    let Some(lesson) = task.form.lesson() else {
        let names: Vec<&str> = TASKS.iter().filter(|task| task.form.lesson().is_some()).map(|task| task.name).collect();
        return Err(
            TrainError::setting("task", task.name, format!("one that can be distilled: {}", names.join(", "))).into()
        );
    };
    let teachers = recipe.teacher_directories();
    if teachers.is_empty() {
        let expected = "directories of models that were fine-tuned for the task: `henson distil --teacher DIR`";
        return Err(TrainError::setting("distil.teachers", "empty", expected).into());
    }
    start(recipe, &teachers[0]);
    for path in &teachers {
        let (config, wanted) = (config_of(path)?, task.form.head(1));
        let other = config.head().filter(|head| discriminant(head) != discriminant(&wanted));
        if let Some(head) = other.filter(|_| wanted != Head::Encoder) {
            let class = config.model.class(head);
            let expected = format!("a model that was fine-tuned for {} (`henson finetune`), not a {class}", task.name);
            return Err(TrainError::setting("distil.teachers", path.display(), expected).into());
        }
    }
    // The labels of the first teacher, in its order: the model that learns has the same.
    let learned = task.form.fewest_labels > 0 && task.labels.is_empty();
    if learned && reading.files.labels.is_empty() {
        let labels = config_of(&teachers[0])?.task.label_names();
        (reading.files.labels, reading.labels_of_model) = (task.form.class_names(labels), true);
    }
    let Some(distil) = recipe.taught_by() else { return Ok(false) };
    let unlabelled = recipe.train.is_empty();
    let vectors = lesson == Lesson::Vectors;
    if (unlabelled || vectors) && distil.alpha.is_some_and(|alpha| alpha < 1.0) {
        let expected = "1, since there are no labels to learn from beside the teachers";
        return Err(TrainError::setting("distil.alpha", distil.alpha.unwrap_or(1.0), expected).into());
    }
    if vectors && recipe.loss.is_some() {
        let expected = "nothing: vectors are held against the teachers' (distil.vectors)";
        return Err(TrainError::setting("loss", "set", expected).into());
    }
    if vectors {
        // A text may stand alone.
        reading.loss = Some(SentenceLoss::Mse);
    }
    reading.labels_wanted = !(unlabelled || vectors);
    // What would take another loss, or none, is not chosen by itself.
    for key in ["linear_head", "task_tokens", "auxiliary_lm", "both_orders", "text_to_text", "beam_head"] {
        recipe.by_size.remove(key);
    }
    Ok(unlabelled)
}

/// The config of a teacher.
fn config_of(path: &Path) -> Result<Config, TaskError> {
    let directory = Model::encoder_directory(path)?;
    let json = ModelDirectory::open(&directory).and_then(|directory| directory.config()).map_err(TrainError::from)?;
    Ok(Config::from_value(json).map_err(TrainError::from)?)
}

/// A size starts from random weights, with the first teacher's tokenizer where none is named.
fn start(recipe: &mut FineTuneRecipe, teacher: &Path) {
    let is_size = recipe.found_at.is_none() && Family::config_of_size(&recipe.model).is_ok();
    if is_size && recipe.tokenizer.is_empty() {
        recipe.tokenizer = teacher.display().to_string();
    }
}

/// Without labels there is nothing to hold out.
pub(super) fn check_estimate(recipe: &mut FineTuneRecipe) -> Result<(), TaskError> {
    for (key, count) in [("dev_rows", recipe.dev_rows), ("folds", recipe.folds)] {
        if count > 0 {
            let expected = "0: the texts have no labels, so that none of them can be scored; give --dev FILE";
            return Err(TrainError::setting(key, count, expected).into());
        }
    }
    recipe.estimate_by(Some(0));
    Ok(())
}

/// Refuses what takes its loss elsewhere.
pub(super) fn check_inputs(recipe: &FineTuneRecipe) -> Result<(), TaskError> {
    if recipe.taught_by().is_none() {
        return Ok(());
    }
    let wrong = [
        ("linear_head", recipe.linear_head),
        ("auxiliary_lm", recipe.auxiliary_lm > 0.0),
        ("both_orders", recipe.both_orders),
        ("beam_head", recipe.beam_head),
        ("text_to_text", recipe.text_to_text),
    ];
    match wrong.into_iter().find(|(_, is_set)| *is_set) {
        Some((key, _)) => Err(TrainError::setting(key, "set", "nothing in a run with teachers").into()),
        None => Ok(()),
    }
}

/// Refuses data that a teacher's margins say nothing about.
pub(super) fn check_data(train: &Set) -> Result<(), TaskError> {
    let alone = |input: &Input| matches!(input, Input::Choices { endings, .. } if endings.len() < 2);
    if train.task.form.lesson() == Some(Lesson::Margins) && train.examples.iter().all(|example| alone(&example.input)) {
        let reason = "every row has one document, and margins are between two of a query: expected lists of documents, or \
                      positives and negatives";
        return Err(TaskError::Empty { path: train.path.clone(), task: train.task.name, reason: reason.to_owned() });
    }
    Ok(())
}

/// The teachers for a set, where there are some.
pub(super) fn teaching(
    recipe: &FineTuneRecipe,
    task: &'static Task,
    train: &Set,
    tokenizer: &Arc<Tokenizer>,
    lengths: Lengths,
) -> Option<Teaching> {
    let (settings, lesson) = (recipe.taught_by()?.clone(), task.form.lesson()?);
    let parts = TeachingParts {
        settings,
        directories: recipe.teacher_directories(),
        dtype: DType::from(recipe.dtype),
        tokenizer: Arc::clone(tokenizer),
        lengths,
        normalise: lesson == Lesson::Vectors && recipe.normalize.unwrap_or(true),
    };
    Some(Teaching::new(parts, lesson, Arc::new(train.clone())))
}

/// What is learned from them. `width` is that of the hidden states.
pub(super) fn objective(
    recipe: &FineTuneRecipe,
    teaching: &Arc<Teaching>,
    train: &Set,
    width: usize,
    class_weights: Vec<f32>,
) -> Result<TaughtObjective, TaskError> {
    let labelled = train.examples.first().is_some_and(|example| example.target != Target::None);
    let vectors = teaching.lesson == Lesson::Vectors;
    let mut projection = None;
    if vectors {
        for path in recipe.teacher_directories() {
            let hidden = config_of(&path)?.model.sizes().hidden_size;
            let own = EmbedSettings::of_directory(&path)?.width(hidden)?;
            match projection {
                Some(first) if first != own => {
                    let first = recipe.teacher_directories()[0].clone();
                    return Err(TaskError::Ensemble { first, second: path });
                }
                _ => projection = Some(own),
            }
        }
    }
    Ok(TaughtObjective {
        teaching: Arc::clone(teaching),
        alpha: teaching.settings.share(labelled && !vectors),
        class_weights,
        rank_loss: recipe.rank_loss,
        projection: projection.filter(|own| *own != recipe.poolings().len() * width).map(|own| (own, None)),
        poolings: recipe.poolings(),
        normalise: recipe.normalize.unwrap_or(true),
    })
}
