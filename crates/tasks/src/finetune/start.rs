//! What a model begins with: its config and tokenizer, and its first weights, from a directory or from scratch.

use std::path::Path;

use henson_checkpoint::{Config, LoadOptions, ModelDirectory, Weights, open_parameters};
use henson_models::{Family, Head, Model, ModelConfig, SpecialIds};
use henson_tensor::{Builder, DType, Device, Entry, Group, Parameters};
use henson_text::{Slot, Tokenizer};
use henson_train::{Result as TrainResult, TrainError};
use serde_json::Value;

use super::recipe::FineTuneRecipe;
use super::words::{WordModel, WordTable, word_model};
use crate::error::TaskError;
use crate::example::Set;
use crate::task::Task;

/// The model's config and its tokenizer: those of its directory, or of a size that starts from random weights; and what its words
/// begin with.
pub(super) fn started_with(
    recipe: &FineTuneRecipe,
    task: &'static Task,
    train: &Set,
) -> Result<(Config, Tokenizer, Option<WordTable>), TaskError> {
    let directory = recipe.tokenizer_directory();
    if !recipe.is_from_scratch() {
        if !recipe.config.is_empty() {
            let expected = "nothing: a model that was trained keeps its sizes; with `tokenizer`, a size starts from random weights";
            return Err(TrainError::setting("config", &recipe.config, expected).into());
        }
        let json =
            ModelDirectory::open(directory).and_then(|directory| directory.config()).map_err(TrainError::from)?;
        let config = Config::from_value(json).map_err(TrainError::from)?;
        let tokenizer = spelling_for(&config.model, tokenizer_of(directory, &config)?);
        return Ok((config, tokenizer, None));
    }
    let mut model = Family::config_of_size(&recipe.model).map_err(TrainError::from)?;
    if recipe.makes_vocabulary() {
        let WordModel { tokenizer, vectors } = word_model(recipe, train)?;
        model.set_vocab_size(tokenizer.vocabulary_size());
        let width = vectors.as_ref().map(|vectors| ("embedding_size", Value::from(vectors.width)));
        let model = with_keys(model, width, recipe)?;
        if let (Some(vectors), Some(own)) = (&vectors, model.word_vocabulary())
            && own.width != vectors.width
        {
            let expected = format!("{}, as wide as the vectors of {}", vectors.width, recipe.word_vectors);
            return Err(TrainError::setting("config.embedding_size", own.width, expected).into());
        }
        let tokenizer = spelling_for(&model, tokenizer);
        return Ok((Config::new(model), tokenizer, vectors));
    }
    // That of a teacher may be in a folder of its directory.
    let directory = &henson_infer::Model::encoder_directory(directory).unwrap_or_else(|_| directory.to_owned());
    let tokenizer = Tokenizer::open(directory).map_err(TrainError::from)?;
    if task.form.writes && !model.family().has_head(task.form.head_for(&model, 1)) {
        let expected = format!(
            "the name of a size that writes for a source, such as those of {}",
            Family::types_with_head(Head::Seq2Seq)
        );
        return Err(TrainError::setting("model", &recipe.model, expected).into());
    }
    model.set_vocab_size(tokenizer.vocabulary_size());
    model.set_special_ids(special_ids(&tokenizer, directory)?);
    Ok((Config::new(with_keys(model, None, recipe)?), tokenizer, None))
}

/// The tokenizer with what a network reads of words besides their numbers.
fn spelling_for(model: &ModelConfig, tokenizer: Tokenizer) -> Tokenizer {
    if model.spells_words() { tokenizer.spelling() } else { tokenizer }
}

/// A config with the values that a recipe has for it, over one that comes from elsewhere.
fn with_keys(
    model: ModelConfig,
    first: Option<(&str, Value)>,
    recipe: &FineTuneRecipe,
) -> Result<ModelConfig, TaskError> {
    let mut json = model.to_json().map_err(TrainError::from)?;
    if let Some((key, value)) = first {
        json[key] = value;
    }
    for (key, value) in &recipe.config {
        json[key] =
            serde_json::to_value(value).map_err(|error| TrainError::setting("config", value, error.to_string()))?;
    }
    Ok(ModelConfig::from_value(json).map_err(TrainError::from)?)
}

/// Lets words begin with vectors from a file.
pub(super) fn begin_with(parameters: &mut Parameters, vectors: &WordTable) -> TrainResult<()> {
    let is_table =
        |entry: &Entry| entry.group == Group::Embeddings && entry.shape.sizes().get(1) == Some(&vectors.width);
    if let Some(table) = parameters.entries().iter().position(is_table) {
        let mut numbers = parameters.read(table)?;
        vectors.write_into(&mut numbers);
        parameters.write(table, &numbers)?;
        parameters.refresh()?;
    }
    Ok(())
}

/// What begins, ends and fills texts, for a model that knows no tokenizer yet.
pub(super) fn special_ids(tokenizer: &Tokenizer, directory: &Path) -> Result<SpecialIds, TaskError> {
    let special = tokenizer.special();
    let id = |special: &Option<henson_text::Special>| special.as_ref().map(|special| special.id);
    let slots = tokenizer.template().single_slots();
    let last = match slots.last() {
        Some(Slot::Special { id, .. }) => Some(*id),
        _ => None,
    };
    let first = match slots.first() {
        Some(Slot::Special { id, .. }) => Some(*id),
        _ => None,
    };
    let Some(end) = last.or(id(&special.sep)).or_else(|| tokenizer.end_of_text()) else {
        let problem = format!(
            "the tokenizer in {} has no token that ends a text: train one with [SEP] or </s>",
            directory.display()
        );
        return Err(TrainError::Vocabulary(problem).into());
    };
    Ok(SpecialIds { begin: first.unwrap_or(end), end, padding: id(&special.pad) })
}

/// The tokenizer of a model's directory.
fn tokenizer_of(path: &Path, config: &Config) -> Result<Tokenizer, TaskError> {
    let tokenizer = Tokenizer::open(path).map_err(TrainError::from)?;
    if tokenizer.vocabulary_size() > config.model.sizes().vocab_size {
        let (pieces, rows) = (tokenizer.vocabulary_size(), config.model.sizes().vocab_size);
        let problem = format!(
            "the tokenizer in {} has {pieces} tokens, the model's vocabulary {rows}: they do not belong together",
            path.display()
        );
        return Err(TrainError::Vocabulary(problem).into());
    }
    Ok(tokenizer)
}

/// The weights of a directory. What stands on its encoder is kept where it has the right shape, and otherwise starts from scratch.
pub(super) fn started_from(
    config: &Config,
    grown_from: Option<&ModelConfig>,
    builder: Builder,
    device: &Device,
    recipe: &FineTuneRecipe,
    directory: Option<&Path>,
) -> TrainResult<Parameters> {
    let (dtype, seed) = (DType::from(recipe.dtype), recipe.seed);
    let Some(directory) = directory else {
        let mut parameters = builder.finish(device, dtype)?;
        parameters.initialise(seed)?;
        parameters.refresh()?;
        return Ok(parameters);
    };
    let weights = ModelDirectory::open(directory)?.weights()?;
    let family = config.model.family();
    let is_new = |entry: &Entry| !entry.group.is_encoder();
    let options = LoadOptions::new_head(&is_new);
    let other_head = builder.entries().iter().filter(|entry| is_new(entry)).any(|entry| differs(&weights, entry));
    if !other_head && grown_from.is_none() {
        return Ok(open_parameters(&weights, &family.naming, builder, device, dtype, &options, seed)?.0);
    }
    // Another task's head: only the encoder is taken.
    let mut encoder = Builder::new();
    Model::build(&mut encoder, grown_from.unwrap_or(&config.model), family.bare_head())?;
    let encoder = open_parameters(&weights, &family.naming, encoder, device, DType::F32, &options, seed)?.0;
    let mut parameters = builder.finish(device, dtype)?;
    parameters.initialise(seed)?;
    copy_encoder(family, &encoder, &mut parameters)?;
    parameters.refresh()?;
    Ok(parameters)
}

/// Copies what a bare encoder has to where it stands in a model with a head.
pub(super) fn copy_encoder(family: &Family, encoder: &Parameters, parameters: &mut Parameters) -> TrainResult<()> {
    for i in 0..parameters.entries().len() {
        let name = parameters.entries()[i].name.strip_prefix(family.naming.base_prefix).unwrap_or_default();
        if let Some(from) = encoder.entries().iter().position(|entry| entry.name == name) {
            let mut values = encoder.read(from)?;
            // A table of words that grew: the rows of new tokens are those that it begins with.
            if values.len() < parameters.entries()[i].stored_shape().elements() {
                let known = values.len();
                values.extend_from_slice(&parameters.read(i)?[known..]);
            }
            parameters.write(i, &values)?;
        }
    }
    Ok(())
}

/// Whether a file has a parameter in another shape.
fn differs(weights: &Weights, entry: &Entry) -> bool {
    weights.get(&entry.name).is_some_and(|info| info.shape != entry.stored_shape().sizes())
}
