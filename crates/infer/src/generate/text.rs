//! Texts in, texts out: a tokenizer around a [`Writer`].

use std::ops::ControlFlow;

use henson_text::Slot;

use super::stream::first_stop;
use super::{EventKind, FinishReason, GenerateSettings, Job, StopCheck, TextStream, TokenScore, Writer, Written};
use crate::{InferError, Model, Result};

/// Sequences that are written at once.
const STREAMS: usize = 64;

/// Bytes of keys and values at once, where no single text needs more.
const CACHE_BYTES: usize = 1 << 30;

/// A text that was written.
#[derive(Clone, Debug, PartialEq)]
pub struct Generated {
    /// The new tokens, an end token included.
    pub ids: Vec<u32>,
    /// Their text, without special tokens and up to a stop string.
    pub text: String,
    /// See [`Written::score`].
    pub score: f32,
    /// Why it ended.
    pub why: FinishReason,
    /// Its tokens one by one; none of a beam search.
    pub tokens: Vec<TokenScore>,
}

/// Text that was added to a sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GenerateEvent<'a> {
    /// The number of its prompt, from 0.
    pub prompt: usize,
    /// Its number among those of the prompt.
    pub sequence: usize,
    /// The text; empty while nothing is certain. A beam search gives all of it at its end.
    pub text: &'a str,
    /// Why it ended, with the last one.
    pub why: Option<FinishReason>,
}

impl Model {
    /// The tokens of a prompt. A decoder gets what its tokenizer puts before a text and nothing behind it, or its start token where
    /// there is nothing else; an encoder-decoder gets the source as it was trained, behind the `prefix` of its config.json, and so does a
    /// decoder that was trained to continue sources, which end like texts. One that leaves no room for a token is an error.
    pub fn prompt(&self, text: &str) -> Result<Vec<u32>> {
        let ids = self.uncut_prompt(text)?;
        let (got, most) = (ids.len(), self.most_tokens());
        let reads_source = self.config().model.targets().is_some();
        if got + usize::from(!reads_source) > most {
            return Err(InferError::LongPrompt { text: 1, got, most });
        }
        Ok(ids)
    }

    /// The same of any length, for those who cut it themselves.
    pub fn uncut_prompt(&self, text: &str) -> Result<Vec<u32>> {
        let pieces = match &self.config().task.prefix {
            Some(prefix) => self.tokenizer().encode_ids(&format!("{prefix}{text}"))?,
            None => self.tokenizer().encode_ids(text)?,
        };
        let targets = self.config().model.targets();
        let continues =
            targets.is_none() && self.config().task.reading.is_some_and(|reading| reading.max_target.is_some());
        let reads_source = targets.is_some() || continues;
        let (mut ids, mut behind) = (vec![], false);
        for slot in self.tokenizer().template().single_slots() {
            match slot {
                Slot::Special { id, .. } if !behind || reads_source => ids.push(*id),
                Slot::First { .. } => {
                    ids.extend_from_slice(&pieces);
                    behind = true;
                }
                Slot::Special { .. } | Slot::Second { .. } => {}
            }
        }
        if continues {
            ids.extend(self.generation_files()?.settings.end.first().filter(|end| ids.last() != Some(end)));
        }
        if ids.is_empty() {
            ids.extend(self.generation_files()?.first);
        }
        if ids.is_empty() {
            return Err(InferError::EmptyPrompt { text: 1 });
        }
        Ok(ids)
    }

    /// What a [`Writer`] shall write for a prompt, with the model's text to look for stop strings in.
    pub fn job(&self, prompt: Vec<u32>, settings: &GenerateSettings) -> Job<'_> {
        Job { prompt, start: vec![], settings: settings.clone(), stop: self.stop_check(&settings.stop) }
    }

    /// Whether the text of new tokens has a stop string.
    fn stop_check(&self, stop: &[String]) -> Option<StopCheck<'_>> {
        let longest = stop.iter().map(String::len).max()?;
        let stop = stop.to_vec();
        Some(Box::new(move |ids| {
            // A token adds at least a byte or nothing at all, and one more stands before, which a first space may depend on.
            let telling = ids.iter().rev().scan(0, |found, id| {
                let before = *found;
                *found += usize::from(!self.tokenizer().is_special(*id));
                (before <= longest).then_some(())
            });
            let tail = &ids[ids.len() - telling.count()..];
            self.tokenizer().decode(tail, true).is_ok_and(|text| first_stop(&text, &stop).is_some())
        }))
    }

    /// Writes for prompts, all with the same settings: for each, its sequences. `on_event` sees text as it comes, in no order but
    /// that of a sequence's own; where it breaks, the result is [`InferError::Stopped`].
    pub fn generate(
        &self,
        prompts: &[Vec<u32>],
        settings: &GenerateSettings,
        mut on_event: impl FnMut(GenerateEvent<'_>) -> ControlFlow<()>,
    ) -> Result<Vec<Vec<Generated>>> {
        settings.check()?;
        let (network, parameters) = (self.network(), self.parameters());
        let lengths = prompts.iter().map(Vec::len);
        let limits = Writer::limits_for(network, parameters, lengths, settings, (STREAMS, CACHE_BYTES))
            .map_err(|error| self.named(error))?;
        let mut writer = Writer::new(network, parameters, limits)?;
        let mut tickets = Vec::with_capacity(prompts.len());
        for (number, prompt) in (1..).zip(prompts) {
            let ticket = writer.enter(self.job(prompt.clone(), settings));
            tickets.push(ticket.map_err(|error| error.numbered(&[number]))?);
        }
        let line = || Line { stream: TextStream::new(&settings.stop), tokens: vec![], generated: None };
        let lines = || (0..settings.return_sequences).map(|_| line()).collect::<Vec<_>>();
        let mut all: Vec<Vec<Line>> = prompts.iter().map(|_| lines()).collect();
        while !writer.is_idle() {
            for event in writer.step()? {
                // Tickets are given in rising order.
                let Ok(prompt) = tickets.binary_search(&event.ticket) else { continue };
                let sequence = event.sequence;
                let (text, why) = all[prompt][sequence].take(self, event.kind)?;
                if why == Some(FinishReason::NotFinite) {
                    return Err(InferError::NotFinite { text: prompt + 1 });
                }
                if on_event(GenerateEvent { prompt, sequence, text: &text, why }).is_break() {
                    return Err(InferError::Stopped);
                }
            }
        }
        Ok(all.into_iter().map(|lines| lines.into_iter().filter_map(|line| line.generated).collect()).collect())
    }

    fn named(&self, error: InferError) -> InferError {
        match error {
            InferError::CannotWrite { path: None, has } => {
                InferError::CannotWrite { path: Some(self.path().to_owned()), has }
            }
            other => other,
        }
    }
}

/// A sequence that is being written.
struct Line {
    stream: TextStream,
    tokens: Vec<TokenScore>,
    generated: Option<Generated>,
}

impl Line {
    /// The text that something adds, and why the sequence ended, if it did.
    fn take(&mut self, model: &Model, kind: EventKind) -> Result<(String, Option<FinishReason>)> {
        let tokenizer = model.tokenizer();
        match kind {
            EventKind::Token(token) => {
                let text = self.stream.push(tokenizer, token.id)?;
                self.tokens.push(token);
                Ok((text, None))
            }
            EventKind::Finished(Written { ids, score, why }) => {
                let mut text = String::new();
                if self.tokens.is_empty() {
                    for id in &ids {
                        text.push_str(&self.stream.push(tokenizer, *id)?);
                    }
                }
                text.push_str(&self.stream.finish(tokenizer)?);
                let mut whole = tokenizer.decode(&ids, true)?;
                whole.truncate(first_stop(&whole, self.stream.stops()).unwrap_or(whole.len()));
                let tokens = std::mem::take(&mut self.tokens);
                self.generated = Some(Generated { ids, text: whole, score, why, tokens });
                Ok((text, Some(why)))
            }
        }
    }
}
