//! Settings that depend on the size of data and model, for those who set none. What is given is never changed; what is chosen
//! is written into recipe.toml like any other setting.

use std::path::Path;

use henson_models::{FineTuning, Head, ModelConfig};
use henson_train::{Result, Setting, TrainError, parse_settings};
use toml::Table;

use super::plan::Plan;
use super::recipe::FineTuneRecipe;
use super::split;
use crate::error::TaskError;
use crate::example::{Input, Set};
use crate::task::Task;

/// The settings that are chosen.
const BY_SIZE: [&str; 7] =
    ["dev_rows", "folds", "batch_size", "epochs", "learning_rate", "evals_per_epoch", "linear_head"];

/// Those that depend on the model's family.
const BY_FAMILY: [&str; 5] = ["warmup", "weight_decay", "beta2", "clip", "layer_decay"];

/// Those that depend on what the model's family was made for.
const BY_MODEL: [&str; 5] = ["task_tokens", "auxiliary_lm", "both_orders", "text_to_text", "beam_head"];

/// Up to this width a model is small: it takes, and needs, a higher learning rate than those of the paper.
const SMALL_WIDTH: usize = 512;

/// The width of base models.
const BASE_WIDTH: usize = 768;

/// Epochs of a small model, below so many rows.
const SMALL_EPOCHS: (f64, usize) = (5.0, 10_000);

/// The fewest updates. On 96 questions of TREC, 18 leave a new head where it began (25% right), 120 to 240 give 67 to 76%.
const LEAST_UPDATES: f64 = 200.0;

/// The most epochs.
const MOST_EPOCHS: f64 = 100.0;

/// Below so many sequences, batches are small.
const TINY: usize = 64;
const TINY_BATCH: usize = 8;

/// Evaluations of a run, where an epoch is so short that one for each would take longer than the training.
const EVALUATIONS: f64 = 10.0;

/// Below so many sequences, a linear head is tried as well.
const LINEAR_BELOW: usize = 500;

impl FineTuneRecipe {
    /// Every setting, for people. Those that are chosen have no default.
    pub fn settings() -> Vec<Setting> {
        let mut settings = henson_train::settings::<Self>();
        for setting in settings.iter_mut().filter(|setting| BY_SIZE.contains(&setting.key.as_str())) {
            setting.default = None;
            setting.meaning += " By default chosen by the size of the data and the model.";
        }
        let by_family: Vec<&str> = BY_FAMILY.into_iter().chain(BY_MODEL).collect();
        for setting in settings.iter_mut().filter(|setting| by_family.contains(&setting.key.as_str())) {
            setting.meaning += " Some families of models have a default of their own.";
        }
        settings
    }

    /// Reads a recipe from TOML texts with their names, of which a later one overrules the earlier, and `key=value`s on top.
    /// What none of them sets is left to be chosen by the size of data and model.
    pub fn parse(layers: &[(&str, &str)], sets: &[String]) -> Result<Self> {
        let mut recipe: Self = parse_settings(layers, sets)?;
        let given: Table = parse_settings(layers, sets)?;
        recipe.by_size =
            BY_SIZE.into_iter().chain(BY_FAMILY).chain(BY_MODEL).filter(|key| !given.contains_key(*key)).collect();
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
            // What was chosen for the texts without labels is another matter, and stands with their run.
            let mut first = super::teach::first_phase(self).map(Box::new);
            if let Some(first) = &mut first {
                first.resume_from(&out.join(super::run::DISTILLED))?;
            }
            let (found_at, teachers_at) = (self.found_at.take(), std::mem::take(&mut self.teachers_at));
            *self = Self { found_at, teachers_at, first, ..old };
        }
        Ok(())
    }

    /// The same with what is chosen as another recipe has it, chosen or still to be chosen.
    pub(super) fn with_choices_of(self, other: &Self) -> Result<Self> {
        let wrong = |problem: String| TrainError::Recipe { place: "the recipe of the first phase".to_owned(), problem };
        let table_of = |recipe: &Self| Table::try_from(recipe).map_err(|error| wrong(error.to_string()));
        let (mut table, mut chosen) = (table_of(&self)?, table_of(other)?);
        for key in BY_SIZE.into_iter().chain(BY_FAMILY).chain(BY_MODEL) {
            match chosen.remove(key) {
                Some(value) => table.insert(key.to_owned(), value),
                // Not written, because it is as it is without being set.
                None => table.remove(key),
            };
        }
        let whole: Self = table.try_into().map_err(|error: toml::de::Error| wrong(error.to_string()))?;
        let (found_at, teachers_at, first) = (self.found_at, self.teachers_at, self.first);
        Ok(Self { found_at, teachers_at, first, by_size: other.by_size.clone(), ..whole })
    }

    pub(super) fn is_chosen(&self, key: &str) -> bool {
        self.by_size.contains(key)
    }
}

/// Chooses how a decoder reads texts, by its family and the task, and refuses what cannot be.
pub(super) fn choose_inputs(
    recipe: &mut FineTuneRecipe,
    config: &ModelConfig,
    task: &Task,
    train: &Set,
) -> std::result::Result<(), TaskError> {
    let (head, form) = (task.form.head(1), task.form);
    let own = config.fine_tuning(head);
    let reads_last = config.sizes().causal && (form.problem.is_some() || head == Head::Choice);
    let pairs = form.problem.is_some() && matches!(train.examples.first().map(|e| &e.input), Some(Input::Pair(..)));
    let auxiliary = if recipe.freeze { 0.0 } else { own.auxiliary_lm };
    if recipe.is_chosen("task_tokens") {
        recipe.task_tokens = reads_last && own.task_tokens;
    }
    if recipe.is_chosen("auxiliary_lm") {
        recipe.auxiliary_lm = if reads_last { auxiliary } else { 0.0 };
    }
    if recipe.is_chosen("both_orders") {
        recipe.both_orders = reads_last && pairs && task.symmetric && recipe.task_tokens && !recipe.windows;
    }
    let decoder = "a decoder (a model that reads left to right) and one label or number for a text or two, or choices";
    let wrong = |key, got: String, expected: &str| Err(TrainError::setting(key, got, expected).into());
    match recipe {
        _ if recipe.task_tokens && !reads_last => {
            wrong("task_tokens", "true".to_owned(), &format!("false, but for {decoder}"))
        }
        _ if recipe.auxiliary_lm > 0.0 && (!reads_last || recipe.freeze) => {
            let expected = format!("0, but for {decoder}, of which all is trained");
            wrong("auxiliary_lm", recipe.auxiliary_lm.to_string(), &expected)
        }
        _ if recipe.both_orders && !(reads_last && pairs && !recipe.windows) => {
            let expected = "false, but for a decoder and pairs of texts, without windows";
            wrong("both_orders", "true".to_owned(), expected)
        }
        _ => Ok(()),
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

/// Chooses how to train by the number of sequences and the model's width, and says why in a line or two.
pub(super) fn choose_training(plan: &mut Plan) -> std::result::Result<Vec<String>, TaskError> {
    let (sequences, width, form) = (plan.instances(), plan.config.model.sizes().hidden_size, plan.task.form);
    let has_estimate = plan.dev.is_some() || plan.recipe.folds > 0;
    let can_average = plan.config.model.can_average();
    // What is published is for base and large sizes; what `transformers` does not know is small, and has its own.
    let small = width <= SMALL_WIDTH && plan.config.model.in_transformers();
    let own = if small {
        FineTuning::BERT
    } else {
        plan.config.model.fine_tuning(plan.recipe.head(plan.task, &plan.config.model, 1))
    };
    let recipe = &mut plan.recipe;
    let has_head = can_average && form.problem.is_some();
    if recipe.linear_head && !(has_head && has_estimate) {
        let expected = "false, but for a label, labels or a number of a text (classify, pair, multilabel, regress), with dev data \
                        or folds to compare by, and a family of models with a layer that can average (not ALBERT, not ModernBERT)";
        return Err(TrainError::setting("linear_head", "true", expected).into());
    }
    // Both together: whoever set one of them wants a run of their own design.
    if recipe.is_chosen("linear_head") && recipe.is_chosen("epochs") && recipe.is_chosen("learning_rate") {
        recipe.linear_head = has_head && has_estimate && !recipe.freeze && sequences < LINEAR_BELOW;
    }
    let mut chosen = Vec::new();
    // Of pairs, few updates are better than many: the model's vectors are good before.
    let trains_head = form.head(1) != Head::Encoder;
    if recipe.is_chosen("batch_size") && trains_head && sequences < TINY {
        recipe.batch_size = TINY_BATCH;
        chosen.push(format!("batches of {TINY_BATCH}, for fewer than {TINY} sequences"));
    } else if recipe.is_chosen("batch_size") {
        recipe.batch_size = own.batch_size;
    }
    if recipe.is_chosen("epochs") {
        let usual = if small && sequences < SMALL_EPOCHS.1 { SMALL_EPOCHS.0 } else { own.epochs };
        let per_epoch = sequences.div_ceil(recipe.batch_size).max(1) as f64;
        let least = if trains_head { (LEAST_UPDATES / per_epoch).ceil().min(MOST_EPOCHS) } else { 0.0 };
        recipe.epochs = usual.max(least);
        chosen.push(match least > usual {
            true => format!("{} epochs, since {usual} would be {} updates", recipe.epochs, usual * per_epoch),
            false => format!("{} epochs", recipe.epochs),
        });
    }
    if recipe.is_chosen("learning_rate") {
        recipe.learning_rate = match width {
            _ if small => 1e-4,
            _ if width <= BASE_WIDTH => own.learning_rates[0],
            _ => own.learning_rates[1],
        };
        chosen.push(format!("learning rate {:e}, for a width of {width}", recipe.learning_rate));
    }
    chosen.extend(choose_by_family(recipe, own));
    if recipe.is_chosen("evals_per_epoch") && recipe.epochs > EVALUATIONS {
        recipe.evals_per_epoch = EVALUATIONS / recipe.epochs;
    }
    let mut reasons = Vec::new();
    if !chosen.is_empty() {
        let dropout = recipe.dropout.unwrap_or(plan.config.model.sizes().dropout);
        reasons.push(format!(
            "chosen by size: {}; dropout {dropout}, {}",
            chosen.join("; "),
            match recipe.dropout {
                Some(_) => "as set",
                None => "the model's own",
            }
        ));
    }
    if recipe.linear_head {
        reasons.push(format!(
            "{sequences} sequences: a linear head on the frozen model is fitted as well, and the better one is kept"
        ));
    }
    Ok(reasons)
}

/// Chooses what depends on the model's family, and says so where that is not as for BERT.
fn choose_by_family(recipe: &mut FineTuneRecipe, own: FineTuning) -> Option<String> {
    let [warmup, weight_decay, beta2, clip, layer_decay] = BY_FAMILY.map(|key| recipe.is_chosen(key));
    let fields = [
        (warmup, &mut recipe.warmup, own.warmup, "warm-up"),
        (weight_decay, &mut recipe.weight_decay, own.weight_decay, "weight decay"),
        (beta2, &mut recipe.beta2, own.beta2, "β₂"),
        (clip, &mut recipe.clip, own.clip, "clip"),
        (layer_decay, &mut recipe.layer_decay, own.layer_decay, "layer decay"),
    ];
    let mut chosen = Vec::new();
    for (is_chosen, field, value, name) in fields {
        if is_chosen {
            *field = value;
            chosen.push(format!("{name} {value}"));
        }
    }
    (own != FineTuning::BERT && !chosen.is_empty()).then(|| format!("{}, as for the model's family", chosen.join(", ")))
}

/// What the model is scored on where there is no dev file, in a sentence.
pub(super) fn why_estimate(recipe: &FineTuneRecipe, train: &Set, dev: Option<&Set>) -> Option<String> {
    let reason = match dev.map(|dev| dev.examples.len()) {
        Some(rows) if recipe.dev_rows > 0 => format!(
            "no dev file: {rows} of {} rows are held out and choose the best model (--dev FILE names a file, --dev none \
             trains on all rows)",
            rows + train.examples.len()
        ),
        Some(_) => return None,
        None if recipe.folds > 0 => format!(
            "no dev file, {} rows: {} folds estimate the score, then the model trains on all rows (--dev none skips the folds)",
            train.examples.len(),
            recipe.folds
        ),
        None => "no dev data: the last model is kept, without a score".to_owned(),
    };
    Some(reason)
}
