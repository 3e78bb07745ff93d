//! From a request to tasks: prompts as tokens, within the model's length, with settings that are the wish's and the model's.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use henson_infer::{GenerateSettings, Model, Sampling};
use henson_text::TextError;

use super::queue::Task;
use super::wire::{Wish, invalid};
use crate::error::{ApiError, Kind};
use crate::models::{BYTES_PER_TOKEN, Loaded};
use crate::routes::off_the_road;
use crate::wire::Input;

/// Prompts that are ready to be continued.
pub(crate) struct Prepared {
    pub(crate) tasks: Vec<Task>,
    /// What each prompt reads, where an answer shall begin with it.
    pub(crate) prompts: Vec<String>,
    /// What the draws come from, where there are any.
    pub(crate) seed: Option<u64>,
}

impl Prepared {
    /// Tokens of all prompts.
    pub(crate) fn prompt_tokens(&self) -> usize {
        self.tasks.iter().map(|task| task.prompt.len()).sum()
    }
}

/// A number that nobody could have guessed, from the keys of the standard library's hash maps.
pub(crate) fn random() -> u64 {
    RandomState::new().hash_one(0)
}

/// Turns inputs into tasks, where it delays nobody.
pub(crate) async fn prepare(
    model: &Arc<Loaded>,
    field: &'static str,
    inputs: Vec<Input>,
    wish: &Wish,
) -> Result<Prepared, ApiError> {
    if wish.echo && model.is_encoder_decoder() {
        let field = if field == "prompt" { "echo" } else { "return_full_text" };
        let message =
            format!("`{field}` is for models that continue their prompt; {:?} reads it as a source", model.name);
        return Err(invalid(message));
    }
    let bytes = inputs.iter().map(|input| match input {
        Input::Text(text) => text.len(),
        Input::Ids(ids) => 4 * ids.len(),
    });
    let (bytes, theirs, wish) = (bytes.sum(), Arc::clone(model), wish.clone());
    off_the_road(bytes, move || prepared(&theirs, field, inputs, &wish)).await
}

fn prepared(model: &Loaded, field: &'static str, inputs: Vec<Input>, wish: &Wish) -> Result<Prepared, ApiError> {
    let Some(own) = model.generate_settings() else {
        return Err(ApiError::new(Kind::Backend, "this model cannot write"));
    };
    let seed = wish.sampling.is_some().then(|| wish.seed.unwrap_or_else(random));
    let settings = settings(own, wish, seed);
    let (mut tasks, mut prompts) = (Vec::with_capacity(inputs.len()), Vec::new());
    for (i, input) in inputs.into_iter().enumerate() {
        if wish.echo {
            prompts.push(match &input {
                Input::Text(text) => text.clone(),
                Input::Ids(ids) => model.model.tokenizer().decode(ids, false)?,
            });
        }
        let prompt = tokens(&model.model, field, i + 1, input, wish)?;
        check_length(model, field, prompt.len(), wish)?;
        let mut settings = settings.clone();
        // Prompts of one request draw from streams of their own: equal ones may get different texts.
        if let Some(Sampling { seed, .. }) = &mut settings.sampling {
            *seed = seed.wrapping_add((i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        }
        tasks.push(Task { prompt, settings });
    }
    Ok(Prepared { tasks, prompts, seed })
}

/// What the model's files say about ends and forced tokens holds for every request; the rest is the request's alone.
fn settings(own: &GenerateSettings, wish: &Wish, seed: Option<u64>) -> GenerateSettings {
    GenerateSettings {
        max_new_tokens: Some(wish.max_new_tokens),
        // The likeliest tokens are the same each time.
        return_sequences: if wish.sampling.is_some() { wish.best_of } else { 1 },
        sampling: wish.sampling.map(|sampling| Sampling { seed: seed.unwrap_or(0), ..sampling }),
        repetition_penalty: wish.repetition_penalty,
        presence_penalty: wish.presence_penalty,
        frequency_penalty: wish.frequency_penalty,
        logit_bias: wish.logit_bias.clone(),
        forced_first: own.forced_first,
        forced_last: own.forced_last,
        end: own.end.clone(),
        stop: own.stop.iter().chain(&wish.stop).cloned().collect(),
        logprobs: wish.alternatives,
        ..GenerateSettings::default()
    }
}

/// The tokens of a prompt.
fn tokens(model: &Model, field: &str, number: usize, input: Input, wish: &Wish) -> Result<Vec<u32>, ApiError> {
    let most = model.most_tokens().saturating_mul(BYTES_PER_TOKEN);
    let mut ids = match input {
        Input::Text(text) if text.len() > most && wish.truncate.is_none() => {
            return Err(invalid(format!("`{field}` has {} bytes, this model reads at most {most}", text.len())));
        }
        Input::Text(text) => {
            let from = text.ceil_char_boundary(text.len().saturating_sub(most));
            let cut = wish.truncate.is_some();
            // Where it may be cut, the end of it counts.
            let prompt = if cut { model.uncut_prompt(&text[from..]) } else { model.prompt(&text) };
            prompt.map_err(|error| error.numbered(&[number]))?
        }
        Input::Ids(ids) => {
            if let Some(&id) = ids.iter().find(|&&id| model.tokenizer().token(id).is_none()) {
                let vocabulary_size = model.tokenizer().vocabulary_size();
                return Err(TextError::UnknownId { id, vocabulary_size }.into());
            }
            ids
        }
    };
    if let Some(most) = wish.truncate {
        ids.drain(..ids.len().saturating_sub(most));
    }
    Ok(ids)
}

/// What is asked for must fit behind the prompt: a shorter answer would look like one that was asked for.
fn check_length(model: &Loaded, field: &str, prompt: usize, wish: &Wish) -> Result<(), ApiError> {
    let (most, new) = (model.model.most_tokens(), wish.max_new_tokens);
    let begun = if model.is_encoder_decoder() { 1 } else { prompt };
    // Where the request says nothing, what is left of the usual number will do.
    let least = if wish.is_length_given { new } else { new.min(1) };
    let (name, next) = if field == "prompt" { ("max_tokens", "") } else { ("max_new_tokens", ", or set `truncate`") };
    if prompt > most {
        return Err(invalid(format!(
            "`{field}` has {prompt} tokens, this model takes at most {most}: shorten it{next}"
        )));
    }
    if begun.saturating_add(least) <= most {
        return Ok(());
    }
    Err(invalid(format!(
        "`{field}` has {prompt} tokens and `{name}` is {new}, together this model takes at most {most}: shorten one of them{next}"
    )))
}
