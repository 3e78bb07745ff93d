//! The files of a run: what is trained on and what the best model is chosen by, with the same labels.

use std::path::{Path, PathBuf};

use henson_train::TrainError;

use crate::error::TaskError;
use crate::example::{Example, Input, Set, Target};
use crate::read::{Files, Paths, Reading, listed, read, sort_labels};

/// Both files with the same labels: where these are learned, all that either of them has. Of the first, only so many examples
/// as `limit` says, evenly spaced.
pub(crate) fn read_both(
    train: &Paths,
    dev: &str,
    limit: Option<usize>,
    reading: &Reading,
) -> Result<(Set, Option<Set>), TaskError> {
    let (train_files, dev_path) = (train, PathBuf::from(dev));
    let mut train = train_files.read(reading)?;
    let needs_labels = train.task.form.needs_targets;
    if !reading.labels_wanted {
        train.examples.iter_mut().for_each(|example| example.target = Target::None);
    } else if needs_labels && !train.is_labelled() {
        return Err(TaskError::NoLabels {
            path: train.path,
            needed: "training needs a file with labels (of a table, --label-column names the column)",
        });
    }
    let with = |labels: &[String]| Files { labels: labels.to_vec(), ..reading.files.clone() };
    let mut dev = read_dev(dev, reading)?;
    if let Some(found) = dev.as_mut().filter(|dev| dev.labels != train.labels) {
        let mut labels = train.labels.clone();
        labels.extend(found.labels.iter().filter(|label| !train.labels.contains(label)).cloned());
        sort_labels(&mut labels);
        if labels != train.labels {
            train = train_files.read(&Reading { files: with(&labels), ..reading.clone() })?;
            if !reading.labels_wanted {
                train.examples.iter_mut().for_each(|example| example.target = Target::None);
            }
        }
        *found = read(&dev_path, &of_dev(reading, &labels))?;
    }
    if let Some(dev) = dev.as_ref().filter(|dev| needs_labels && !dev.is_labelled()) {
        return Err(TaskError::NoLabels { path: dev.path.clone(), needed: "a dev file is for scoring" });
    }
    if train.labels.len() < train.task.form.fewest_labels {
        return Err(TaskError::FewLabels { path: train.path, found: format!("the labels {}", listed(&train.labels)) });
    }
    thin(&mut train.examples, limit);
    Ok((train, dev))
}

/// The dev file, where there is one.
pub(super) fn read_dev(dev: &str, reading: &Reading) -> Result<Option<Set>, TaskError> {
    match dev.is_empty() {
        true => Ok(None),
        false => Ok(Some(read(Path::new(dev), &of_dev(reading, &reading.files.labels))?)),
    }
}

/// How a dev file is read. Its answers need no place: they are only compared.
fn of_dev(reading: &Reading, labels: &[String]) -> Reading {
    let mut files = Files { labels: labels.to_vec(), ..reading.files.clone() };
    if reading.loss.is_some_and(|loss| !loss.has_scores()) {
        files.label_column.clear();
    }
    Reading { files, places_needed: false, loss: None, labels_wanted: true, ..reading.clone() }
}

/// Keeps so many examples alone, evenly spaced.
pub(crate) fn thin<T>(examples: &mut Vec<T>, limit: Option<usize>) {
    if let Some(limit) = limit.filter(|limit| *limit < examples.len()) {
        let total = examples.len();
        let mut index = 0;
        examples.retain(|_| {
            index += 1;
            index * limit / total > (index - 1) * limit / total
        });
    }
}

/// Refuses `document_context` where files do not say which sentences belong together.
pub(crate) fn check_documents(train: &Set, dev: Option<&Set>) -> Result<(), TaskError> {
    match [Some(train), dev].into_iter().flatten().find_map(missing_documents) {
        Some(expected) => Err(TrainError::setting("document_context", "true", expected).into()),
        None => Ok(()),
    }
}

/// What a file lacks whose sentences are to be read within their documents, if it lacks anything: all would be one document,
/// or each its own.
pub fn missing_documents(set: &Set) -> Option<String> {
    let document = |example: &Example| match example.input {
        Input::Words { document, .. } => Some(document),
        _ => None,
    };
    // Not by its neighbours in the set, of which `limit` may have left some out.
    let is_alone = |example: &Example| match &example.input {
        Input::Words { words, .. } => words.around(1).0.len() == words.len(),
        _ => true,
    };
    let (first, path) = (set.examples.first().and_then(document), set.path.display());
    if first.is_none() {
        Some("a task of words with tags (ner, pos, tag)".to_owned())
    } else if set.examples.iter().all(|example| document(example) == first) {
        Some(format!(
            "several documents in {path}: -DOCSTART- lines in columns, `# newdoc` in CoNLL-U, a column `document` in tables"
        ))
    } else if set.examples.iter().all(is_alone) {
        Some(format!(
            "sentences of the same document next to each other in {path}: in tables, rows with the same number in a column \
             `document`"
        ))
    } else {
        None
    }
}
