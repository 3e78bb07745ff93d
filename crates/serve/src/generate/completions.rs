//! `POST /v1/completions`, as OpenAI has it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::response::{IntoResponse, Response};
use henson_infer::{FinishReason, TokenScore, Written};
use serde::Serialize;

use super::events::{Events, Form, stream};
use super::queue::Update;
use super::task::{Prepared, prepare, random};
use super::text::{Part, Token, Transcript};
use super::wire::{CompletionRequest, Wish};
use crate::app::{Answer, Call};
use crate::error::{ApiError, Kind};
use crate::models::Loaded;
use crate::routes::check_count;

/// What stands around all choices of an answer, and around each part of a stream.
#[derive(Clone, Debug)]
struct Envelope {
    id: String,
    created: u64,
    model: String,
}

#[derive(Debug, Serialize)]
struct Completion<'e> {
    id: &'e str,
    object: &'static str,
    created: u64,
    model: &'e str,
    choices: Vec<Choice>,
    /// Not there at all in a stream that was not asked for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Usage>>,
}

#[derive(Debug, Serialize)]
struct Choice {
    text: String,
    index: usize,
    logprobs: Option<Logprobs>,
    finish_reason: Option<&'static str>,
}

#[derive(Debug, Default, Serialize)]
struct Logprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Vec<Option<BTreeMap<String, f32>>>,
    text_offset: Vec<usize>,
}

#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
}

impl Usage {
    fn new(prompt_tokens: usize, completion_tokens: usize) -> Self {
        Self { prompt_tokens, completion_tokens, total_tokens: prompt_tokens + completion_tokens }
    }
}

impl Envelope {
    fn new(model: &Loaded) -> Self {
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        Self { id: format!("cmpl-{:016x}", random()), created, model: model.name.clone() }
    }

    fn around(&self, choices: Vec<Choice>, usage: Option<Option<Usage>>) -> Completion<'_> {
        let Self { id, created, model } = self;
        Completion { id, object: "text_completion", created: *created, model, choices, usage }
    }
}

impl Logprobs {
    fn of(tokens: Vec<Token>) -> Self {
        let mut all = Self::default();
        for Token { text, offset, logprob, alternatives, .. } in tokens {
            // The token itself is always among them; of tokens that read the same, the likeliest counts.
            let top = logprob.map(|logprob| {
                let mut top = BTreeMap::new();
                let alternatives = alternatives.into_iter().map(|(_, text, score)| (text, score));
                for (text, score) in alternatives.chain([(text.clone(), logprob)]) {
                    top.entry(text).or_insert(score);
                }
                top
            });
            all.tokens.push(text);
            all.token_logprobs.push(logprob);
            all.top_logprobs.push(top);
            all.text_offset.push(offset);
        }
        all
    }
}

fn reason(why: FinishReason) -> &'static str {
    match why {
        FinishReason::Length => "length",
        _ => "stop",
    }
}

pub(crate) async fn completions(call: Call<CompletionRequest>) -> Result<Response, ApiError> {
    let Call { app, model, body } = call;
    let wish = body.wish()?;
    check_count(&app, body.prompt.0.len(), "prompt")?;
    check_count(&app, body.prompt.0.len().saturating_mul(wish.best_of), "prompt` times `best_of")?;
    let prepared = prepare(&model, "prompt", body.prompt.0, &wish).await?;
    let prompts = prompt_parts(&model, &prepared, &wish).await?;
    let (envelope, prompt_tokens) = (Envelope::new(&model), prepared.prompt_tokens());
    let mut answer = Answering::new(&model, &wish, prompts, prompt_tokens);
    if wish.max_new_tokens == 0 {
        let choices = answer.nothing_written();
        return Ok(if wish.stream {
            let (sender, updates) = tokio::sync::mpsc::unbounded_channel();
            drop(sender);
            let form = Streaming { answer, envelope, left: 0, ready: Some(choices) };
            stream(updates, form)
        } else {
            let body = envelope.around(choices, Some(Some(Usage::new(prompt_tokens, 0))));
            Answer { body, tokens: prompt_tokens, dropped: 0 }.into_response()
        });
    }
    let sequences: usize = prepared.tasks.iter().map(|task| task.settings.return_sequences).sum();
    let mut updates = model.write(prepared.tasks).await?;
    if wish.stream {
        return Ok(stream(updates, Streaming { answer, envelope, left: sequences, ready: None }));
    }
    let all = async {
        let mut left = sequences;
        while left > 0 {
            left -= usize::from(answer.collect(updates.recv().await)?);
        }
        Ok(())
    };
    model.within_timeout(all).await?;
    let (choices, written) = answer.into_choices();
    let body = envelope.around(choices, Some(Some(Usage::new(prompt_tokens, written))));
    Ok(Answer { body, tokens: prompt_tokens + written, dropped: 0 }.into_response())
}

/// What each prompt's choices begin with; empty where nothing is to be repeated.
async fn prompt_parts(model: &Arc<Loaded>, prepared: &Prepared, wish: &Wish) -> Result<Vec<Part>, ApiError> {
    if !wish.echo {
        return Ok(vec![Part::default(); prepared.tasks.len()]);
    }
    if !wish.prompt_logprobs {
        return Ok(prepared.prompts.iter().map(|text| Part { text: text.clone(), tokens: Vec::new() }).collect());
    }
    let prompts: Vec<&[u32]> = prepared.tasks.iter().map(|task| task.prompt.as_slice()).collect();
    let tokens = model.prompt_scores(&prompts, wish.alternatives.unwrap_or(0)).await?;
    Ok(prepared.prompts.iter().cloned().zip(tokens).map(|(text, tokens)| Part { text, tokens }).collect())
}

/// An answer in the making.
struct Answering {
    model: Arc<Loaded>,
    wish: Wish,
    /// By prompt, what its choices begin with.
    prompts: Vec<Part>,
    /// By prompt and sequence.
    lines: Vec<Vec<Line>>,
    prompt_tokens: usize,
    written: usize,
}

#[derive(Clone)]
struct Line {
    transcript: Transcript,
    /// What is not sent bit by bit.
    part: Part,
    begun: bool,
    end: Option<(f32, FinishReason)>,
}

impl Answering {
    fn new(model: &Arc<Loaded>, wish: &Wish, prompts: Vec<Part>, prompt_tokens: usize) -> Self {
        let sequences = if wish.sampling.is_some() { wish.best_of } else { 1 };
        let lines = |prompt: &Part| {
            let offset = prompt.text.chars().count();
            let stop = model.generate_settings().into_iter().flat_map(|own| &own.stop).chain(&wish.stop).cloned();
            let stop: Vec<String> = stop.collect();
            let transcript = Transcript::new(&stop, offset, wish.alternatives.is_some());
            vec![Line { transcript, part: Part::default(), begun: false, end: None }; sequences]
        };
        let lines = prompts.iter().map(lines).collect();
        Self { model: Arc::clone(model), wish: wish.clone(), prompts, lines, prompt_tokens, written: 0 }
    }

    /// What an update adds to a sequence: `None` where it is nothing that could be sent.
    fn add(
        &mut self,
        task: usize,
        sequence: usize,
        token: Option<&TokenScore>,
        end: Option<&Written>,
    ) -> Result<Part, ApiError> {
        let model = &self.model.model;
        let line = &mut self.lines[task][sequence];
        let mut part = Part::default();
        if !line.begun {
            line.begun = true;
            part.join(self.prompts[task].clone());
        }
        if let Some(token) = token {
            self.written += 1;
            part.join(line.transcript.push(model, token)?);
        }
        if let Some(written) = end {
            part.join(line.transcript.finish(model)?);
            line.end = Some((written.score, written.why));
        }
        Ok(part)
    }

    /// Keeps what an update adds. Says whether a sequence is done.
    fn collect(&mut self, update: Option<Update>) -> Result<bool, ApiError> {
        let Update::Step { task, sequence, token, end } = checked(update)? else { return Ok(false) };
        let part = self.add(task, sequence, token.as_ref(), end.as_ref())?;
        self.lines[task][sequence].part.join(part);
        Ok(end.is_some())
    }

    /// Where nothing is to be written, an answer may still have the prompts in it.
    fn nothing_written(&self) -> Vec<Choice> {
        let choice = |index: usize| {
            let part = self.prompts[index / self.wish.n].clone();
            self.choice(index, part, Some("length"))
        };
        (0..self.prompts.len() * self.wish.n).map(choice).collect()
    }

    fn choice(&self, index: usize, part: Part, finish_reason: Option<&'static str>) -> Choice {
        let logprobs = self.wish.alternatives.map(|_| Logprobs::of(part.tokens));
        Choice { text: part.text, index, logprobs, finish_reason }
    }

    /// All choices, the best of each prompt, and how many tokens were written.
    fn into_choices(mut self) -> (Vec<Choice>, usize) {
        let n = self.wish.n;
        let mut choices = Vec::with_capacity(self.lines.len() * n);
        for (task, mut lines) in std::mem::take(&mut self.lines).into_iter().enumerate() {
            if self.wish.best_of > n {
                let score = |line: &Line| line.end.map_or(f32::NEG_INFINITY, |(score, _)| score);
                lines.sort_by(|a, b| score(b).total_cmp(&score(a)));
            }
            for i in 0..n {
                // Equal ones were written once.
                let Line { part, end, .. } = lines[i % lines.len()].clone();
                choices.push(self.choice(task * n + i, part, end.map(|(_, why)| reason(why))));
            }
        }
        (choices, self.written * self.copies())
    }

    /// How often each sequence is in the answer.
    fn copies(&self) -> usize {
        if self.wish.sampling.is_some() { 1 } else { self.wish.n }
    }
}

/// The next update, or why there is none.
fn checked(update: Option<Update>) -> Result<Update, ApiError> {
    match update {
        Some(Update::Failed(error)) => Err(error),
        Some(update) => Ok(update),
        None => Err(ApiError::new(Kind::Unhealthy, "the model's thread has ended")),
    }
}

/// The events of a stream.
struct Streaming {
    answer: Answering,
    envelope: Envelope,
    /// Sequences that have not ended.
    left: usize,
    /// What is complete already.
    ready: Option<Vec<Choice>>,
}

impl Streaming {
    /// Where usage is asked for, every event has it, all but the last without a value.
    fn send(&self, choices: Vec<Choice>, events: &mut Events) {
        events.json(&self.envelope.around(choices, self.answer.wish.details.then_some(None)));
    }

    fn end(&self, events: &mut Events) {
        if self.answer.wish.details {
            let usage = Usage::new(self.answer.prompt_tokens, self.answer.written * self.answer.copies());
            events.json(&self.envelope.around(Vec::new(), Some(Some(usage))));
        }
        events.text("[DONE]");
    }

    fn step(&mut self, update: Update, events: &mut Events) -> Result<bool, ApiError> {
        let Update::Step { task, sequence, token, end } = checked(Some(update))? else { return Ok(true) };
        let part = self.answer.add(task, sequence, token.as_ref(), end.as_ref())?;
        let why = end.map(|written| reason(written.why));
        if !part.is_empty() || why.is_some() {
            let (n, copies) = (self.answer.wish.n, self.answer.copies());
            for copy in 0..copies {
                let choice = self.answer.choice(task * n + sequence + copy, part.clone(), why);
                self.send(vec![choice], events);
            }
        }
        self.left -= usize::from(why.is_some());
        if self.left == 0 {
            self.end(events);
        }
        Ok(self.left > 0)
    }
}

impl Form for Streaming {
    type Update = Update;

    fn write(&mut self, update: Update, events: &mut Events) -> bool {
        self.step(update, events).unwrap_or_else(|error| {
            events.json(&error.openai_body());
            false
        })
    }

    fn broken(&mut self, events: &mut Events) {
        match self.ready.take() {
            Some(choices) => {
                choices.into_iter().for_each(|choice| self.send(vec![choice], events));
                self.end(events);
            }
            None => events.json(&ApiError::new(Kind::Unhealthy, "the model's thread has ended").openai_body()),
        }
    }
}
