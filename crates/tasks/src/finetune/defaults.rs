//! Settings that depend on the size of data and model, for those who set none. What is given is never changed; what is chosen
//! is written into recipe.toml like any other setting.

use std::path::Path;

use henson_train::{Result, Setting, TrainError, parse_settings};
use toml::Table;

use super::recipe::FineTuneRecipe;
use super::split;
use crate::error::TaskError;
use crate::example::Set;

/// The settings that are chosen.
const BY_SIZE: [&str; 2] = ["dev_rows", "folds"];

impl FineTuneRecipe {
    /// Every setting, for people. Those that are chosen have no default.
    pub fn settings() -> Vec<Setting> {
        let mut settings = henson_train::settings::<Self>();
        for setting in settings.iter_mut().filter(|setting| BY_SIZE.contains(&setting.key.as_str())) {
            setting.default = None;
            setting.meaning += " By default chosen by the size of the data and the model.";
        }
        settings
    }

    /// Reads a recipe from TOML texts with their names, of which a later one overrules the earlier, and `key=value`s on top.
    /// What none of them sets is left to be chosen by the size of data and model.
    pub fn parse(layers: &[(&str, &str)], sets: &[String]) -> Result<Self> {
        let mut recipe: Self = parse_settings(layers, sets)?;
        let given: Table = parse_settings(layers, sets)?;
        recipe.by_size = BY_SIZE.into_iter().filter(|key| !given.contains_key(*key)).collect();
        // Whoever writes an empty name, as recipes of version 0.1 do, wants no dev data.
        if recipe.dev == "none" || (given.contains_key("dev") && recipe.dev.is_empty()) {
            recipe.dev.clear();
            recipe.estimate_by(None);
        }
        Ok(recipe)
    }

    /// Chooses what the model is scored on where there is no dev file: so many folds, or nothing at all. What was set to hold
    /// rows out is left, if `folds` does not say otherwise.
    pub fn estimate_by(&mut self, folds: Option<usize>) {
        if let Some(folds) = folds {
            (self.folds, self.dev_rows) = (folds, 0);
        }
        self.by_size.retain(|key| !["dev_rows", "folds"].contains(key));
    }

    /// Takes what was chosen when the run in this directory began, so that a run that resumes does not depend on what is
    /// chosen today. A directory without a run changes nothing.
    pub fn resume_from(&mut self, out: &Path) -> Result<()> {
        let path = out.join("recipe.toml");
        let Ok(text) = std::fs::read_to_string(&path) else { return Ok(()) };
        // Another kind of recipe is reported where recipes are compared.
        let Ok(old) = parse_settings::<Table>(&[(&text, "")], &[]) else { return Ok(()) };
        let mut table = Table::try_from(&*self)
            .map_err(|error| TrainError::Recipe { place: path.display().to_string(), problem: error.to_string() })?;
        // What an older henson did not write is what it did: the value that the key has without being chosen.
        let known = self.by_size.iter().filter_map(|key| Some(((*key).to_owned(), old.get(*key)?.clone())));
        table.extend(known.collect::<Table>());
        if let Ok(old) = table.try_into::<Self>() {
            *self = Self { found_at: self.found_at.take(), ..old };
        }
        Ok(())
    }

    fn is_chosen(&self, key: &str) -> bool {
        self.by_size.contains(key)
    }
}

/// Chooses what the model is scored on where there is no dev file, and refuses what cannot be.
pub(super) fn choose_estimate(recipe: &mut FineTuneRecipe, train: &Set) -> std::result::Result<(), TaskError> {
    if recipe.dev.is_empty() {
        let rows = recipe.limit.map_or(train.examples.len(), |limit| limit.min(train.examples.len()));
        let (dev_rows, folds) = split::usual(train, rows, recipe.document_context);
        if recipe.is_chosen("dev_rows") {
            recipe.dev_rows = if recipe.folds > 0 { 0 } else { dev_rows };
        }
        if recipe.is_chosen("folds") {
            recipe.folds = if recipe.dev_rows > 0 { 0 } else { folds };
        }
    }
    let wrong = |key, got: usize, expected: String| Err(TrainError::setting(key, got, expected).into());
    let (rows, parts) = (train.examples.len(), split::most_parts(train, recipe.document_context));
    let taken = [("dev_rows", recipe.dev_rows), ("folds", recipe.folds)].into_iter().find(|(_, count)| *count > 0);
    match taken {
        Some((key, count)) if !recipe.dev.is_empty() => {
            wrong(key, count, format!("0, since {} is the dev file", recipe.dev))
        }
        Some(("dev_rows", count)) if recipe.folds > 0 => {
            wrong("dev_rows", count, "0, since there are folds".to_owned())
        }
        Some(("dev_rows", count)) if count >= rows || parts < 2 => {
            wrong("dev_rows", count, format!("fewer than the rows of {}, {rows} in {parts} groups", recipe.train))
        }
        Some(("folds", count)) if count < 2 || count > parts => wrong(
            "folds",
            count,
            format!("0 for none, or 2 to {parts}: so many groups of rows that belong together has {}", recipe.train),
        ),
        _ => Ok(()),
    }
}

/// What the model is scored on, in a sentence.
pub(super) fn why_estimate(recipe: &FineTuneRecipe, train: &Set, dev: Option<&Set>) -> String {
    match dev.map(|dev| dev.examples.len()) {
        Some(rows) if recipe.dev_rows > 0 => format!(
            "no dev file: {rows} of {} rows are held out and choose the best model (--dev FILE names a file, --dev none \
             trains on all rows)",
            rows + train.examples.len()
        ),
        Some(_) => String::new(),
        None if recipe.folds > 0 => format!(
            "no dev file, {} rows: {} folds estimate the score, then the model trains on all rows (--dev none skips the folds)",
            train.examples.len(),
            recipe.folds
        ),
        None => "no dev data: the last model is kept, without a score".to_owned(),
    }
}
