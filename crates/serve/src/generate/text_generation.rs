//! `POST /generate` and `POST /generate_stream`, as Text Generation Inference has them. As there, a stop string is a part of
//! the text that it ends, and the end token is among the tokens.

use std::sync::Arc;

use axum::response::{IntoResponse, Response};
use henson_infer::{FinishReason, TextStream, TokenScore, Written};
use serde::Serialize;

use super::events::{Events, Form, stream};
use super::queue::Update;
use super::task::prepare;
use super::text::text_after;
use super::wire::{GenerateRequest, Wish};
use crate::app::{Answer, Call};
use crate::error::{ApiError, Kind};
use crate::models::Loaded;
use crate::wire::Input;

#[derive(Clone, Debug, Serialize)]
struct Token {
    id: u32,
    text: String,
    logprob: f32,
    special: bool,
}

#[derive(Debug, Serialize)]
struct PromptToken {
    id: u32,
    text: String,
    logprob: Option<f32>,
}

#[derive(Debug, Serialize)]
struct Generated {
    generated_text: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    details: Option<Details>,
}

#[derive(Debug, Serialize)]
struct Details {
    finish_reason: &'static str,
    generated_tokens: usize,
    seed: Option<u64>,
    prefill: Vec<PromptToken>,
    tokens: Vec<Token>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    top_tokens: Vec<Vec<Token>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    best_of_sequences: Vec<Other>,
}

/// Another sequence that was written.
#[derive(Debug, Serialize)]
struct Other {
    generated_text: String,
    finish_reason: &'static str,
    generated_tokens: usize,
    seed: Option<u64>,
    prefill: Vec<PromptToken>,
    tokens: Vec<Token>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    top_tokens: Vec<Vec<Token>>,
}

#[derive(Debug, Serialize)]
struct StreamEvent {
    index: usize,
    token: Token,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    top_tokens: Vec<Token>,
    generated_text: Option<String>,
    details: Option<StreamDetails>,
}

#[derive(Debug, Serialize)]
struct StreamDetails {
    finish_reason: &'static str,
    generated_tokens: usize,
    seed: Option<u64>,
    input_length: usize,
}

fn reason(why: FinishReason) -> &'static str {
    match why {
        FinishReason::EndOfText => "eos_token",
        FinishReason::Stop => "stop_sequence",
        FinishReason::Length | FinishReason::NotFinite => "length",
    }
}

pub(crate) async fn generate(call: Call<GenerateRequest>) -> Result<Response, ApiError> {
    Ok(whole(call).await?.into_response())
}

pub(crate) async fn generate_stream(call: Call<GenerateRequest>) -> Result<Response, ApiError> {
    streamed(call).await
}

/// At `POST /`, which clients use that know no routes: the request says whether it wants a stream.
pub(crate) async fn generate_at_root(call: Call<GenerateRequest>) -> Result<Response, ApiError> {
    if call.body.asks_for_stream() {
        return streamed(call).await;
    }
    Ok(whole(call).await?.map(|answer| [answer]).into_response())
}

async fn whole(call: Call<GenerateRequest>) -> Result<Answer<Generated>, ApiError> {
    let Call { model, body, .. } = call;
    let wish = body.wish(false)?;
    let prepared = prepare(&model, "inputs", vec![input(&body)?], &wish).await?;
    let (seed, prompt_tokens) = (prepared.seed, prepared.prompt_tokens());
    let mut prefill = Vec::new();
    if wish.prompt_logprobs {
        let prompts: Vec<&[u32]> = prepared.tasks.iter().map(|task| task.prompt.as_slice()).collect();
        let tokens = model.prompt_scores(&prompts, 0).await?.into_iter().flatten();
        let tokenizer = model.model.tokenizer();
        prefill.extend(tokens.map(|token| {
            let special = tokenizer.is_special(token.id).then(|| tokenizer.token(token.id)).flatten();
            PromptToken { id: token.id, text: special.unwrap_or(token.text), logprob: token.logprob }
        }));
    }
    let beginning = prepared.prompts.first().cloned().unwrap_or_default();
    let mut updates = model.write(prepared.tasks).await?;
    let mut lines = vec![Line::default(); wish.best_of];
    let all = async {
        let mut left = lines.len();
        while left > 0 {
            let (sequence, token, end) = step(updates.recv().await)?;
            let line = &mut lines[sequence];
            if let Some(token) = token {
                line.push(&model, &token, &wish)?;
            }
            if let Some(end) = end {
                line.finish(&model, &end)?;
                left -= 1;
            }
        }
        Ok(())
    };
    model.within_timeout(all).await?;
    let tokens = prompt_tokens + lines.iter().map(|line| line.tokens.len()).sum::<usize>();
    // The best by the mean of ln P; the others follow where details are asked for.
    lines.sort_by(|a, b| b.score.total_cmp(&a.score));
    let mut lines = lines.into_iter();
    let best = lines.next().unwrap_or_default();
    let others = lines.map(|line| Other {
        generated_text: format!("{beginning}{}", line.text),
        finish_reason: line.why.map_or("length", reason),
        generated_tokens: line.tokens.len(),
        seed,
        prefill: Vec::new(),
        tokens: line.tokens,
        top_tokens: line.top_tokens,
    });
    let details = wish.details.then(|| Details {
        finish_reason: best.why.map_or("length", reason),
        generated_tokens: best.tokens.len(),
        seed,
        prefill,
        tokens: best.tokens,
        top_tokens: best.top_tokens,
        best_of_sequences: others.collect(),
    });
    let body = Generated { generated_text: format!("{beginning}{}", best.text), details };
    Ok(Answer { body, tokens, dropped: 0 })
}

async fn streamed(call: Call<GenerateRequest>) -> Result<Response, ApiError> {
    let Call { model, body, .. } = call;
    let wish = body.wish(true)?;
    let prepared = prepare(&model, "inputs", vec![input(&body)?], &wish).await?;
    let form = Streaming {
        wish,
        seed: prepared.seed,
        input_length: prepared.prompt_tokens(),
        beginning: prepared.prompts.first().cloned().unwrap_or_default(),
        line: Line::default(),
        model: Arc::clone(&model),
    };
    Ok(stream(model.write(prepared.tasks).await?, form))
}

fn input(body: &GenerateRequest) -> Result<Input, ApiError> {
    if body.inputs.is_empty() {
        return Err(ApiError::new(Kind::Empty, "`inputs` is empty"));
    }
    Ok(Input::Text(body.inputs.clone()))
}

/// What an update says about the one prompt that there is.
fn step(update: Option<Update>) -> Result<(usize, Option<TokenScore>, Option<Written>), ApiError> {
    match update {
        Some(Update::Step { sequence, token, end, .. }) => Ok((sequence, token, end)),
        Some(Update::Failed(error)) => Err(error),
        None => Err(ApiError::new(Kind::Unhealthy, "the model's thread has ended")),
    }
}

/// A sequence as text.
#[derive(Clone, Debug)]
struct Line {
    stream: TextStream,
    text: String,
    tokens: Vec<Token>,
    top_tokens: Vec<Vec<Token>>,
    previous: Option<u32>,
    score: f32,
    why: Option<FinishReason>,
}

impl Default for Line {
    fn default() -> Self {
        Self {
            stream: TextStream::new(&[]),
            text: String::new(),
            tokens: Vec::new(),
            top_tokens: Vec::new(),
            previous: None,
            score: f32::NEG_INFINITY,
            why: None,
        }
    }
}

impl Line {
    fn push(&mut self, model: &Loaded, score: &TokenScore, wish: &Wish) -> Result<(), ApiError> {
        let tokenizer = model.model.tokenizer();
        let TokenScore { id, logprob, alternatives } = score;
        let new = self.stream.push(tokenizer, *id)?;
        self.text.push_str(&new);
        let special = tokenizer.is_special(*id);
        // A special token is shown, though the text is without it.
        let text = if special { tokenizer.token(*id).unwrap_or_default() } else { new };
        self.tokens.push(Token { id: *id, text, logprob: *logprob, special });
        if wish.alternatives.is_some_and(|count| count > 0) {
            let named = |(id, logprob): &(u32, f32)| Token {
                id: *id,
                text: text_after(&model.model, self.previous, *id),
                logprob: *logprob,
                special: tokenizer.is_special(*id),
            };
            self.top_tokens.push(alternatives.iter().map(named).collect());
        }
        self.previous = Some(*id);
        Ok(())
    }

    fn finish(&mut self, model: &Loaded, end: &Written) -> Result<(), ApiError> {
        let rest = self.stream.finish(model.model.tokenizer())?;
        self.text.push_str(&rest);
        if let Some(last) = self.tokens.last_mut().filter(|last| !last.special) {
            last.text.push_str(&rest);
        }
        (self.score, self.why) = (end.score, Some(end.why));
        Ok(())
    }
}

/// The events of a stream.
struct Streaming {
    model: Arc<Loaded>,
    wish: Wish,
    seed: Option<u64>,
    input_length: usize,
    /// What the whole text begins with.
    beginning: String,
    line: Line,
}

impl Streaming {
    fn send(&mut self, update: Update, events: &mut Events) -> Result<bool, ApiError> {
        let (_, token, end) = step(Some(update))?;
        if let Some(token) = &token {
            self.line.push(&self.model, token, &self.wish)?;
        }
        if let Some(end) = &end {
            self.line.finish(&self.model, end)?;
        }
        let index = self.line.tokens.len();
        let Some(token) = self.line.tokens.last().cloned() else { return Ok(end.is_none()) };
        let details = end.as_ref().map(|end| StreamDetails {
            finish_reason: reason(end.why),
            generated_tokens: index,
            seed: self.seed,
            input_length: self.input_length,
        });
        let generated_text = end.as_ref().map(|_| format!("{}{}", self.beginning, self.line.text));
        let top_tokens = self.line.top_tokens.last().cloned().unwrap_or_default();
        events.json(&StreamEvent { index, token, top_tokens, generated_text, details });
        Ok(end.is_none())
    }
}

impl Form for Streaming {
    type Update = Update;

    fn write(&mut self, update: Update, events: &mut Events) -> bool {
        self.send(update, events).unwrap_or_else(|error| {
            events.json(&error.body());
            false
        })
    }

    fn broken(&mut self, events: &mut Events) {
        events.json(&ApiError::new(Kind::Unhealthy, "the model's thread has ended").body());
    }
}
