//! What was written as text, in parts that can be sent: whole characters, no beginnings of stop strings, and the tokens
//! behind each part.

use std::collections::VecDeque;

use henson_infer::{Model, TextStream, TokenScore};

use crate::error::ApiError;

/// A token with its text.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Token {
    pub(crate) id: u32,
    /// What it adds. Of tokens that share a character, the last one has it.
    pub(crate) text: String,
    /// Characters before it.
    pub(crate) offset: usize,
    /// ln P; none of a prompt's first token, which nothing stands before.
    pub(crate) logprob: Option<f32>,
    /// The likeliest tokens with theirs.
    pub(crate) alternatives: Vec<(u32, String, f32)>,
}

/// Text that is certain, and its tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Part {
    pub(crate) text: String,
    pub(crate) tokens: Vec<Token>,
}

impl Part {
    pub(crate) fn is_empty(&self) -> bool {
        self.text.is_empty() && self.tokens.is_empty()
    }

    /// What follows it as a part of it.
    pub(crate) fn join(&mut self, next: Part) {
        self.text.push_str(&next.text);
        self.tokens.extend(next.tokens);
    }
}

/// Turns the tokens of a sequence into parts while they come.
#[derive(Clone, Debug)]
pub(crate) struct Transcript {
    /// The text of each token on its own.
    plain: TextStream,
    /// The text without stop strings, where there are some.
    stopping: Option<TextStream>,
    /// Tokens whose text is not certain.
    pending: VecDeque<Token>,
    previous: Option<u32>,
    /// Characters that tokens have, and those that were given.
    read: usize,
    given: usize,
    /// Whether tokens are wanted.
    tokens: bool,
}

impl Transcript {
    /// One that begins after so many characters. `tokens` asks for tokens beside the text.
    pub(crate) fn new(stop: &[String], offset: usize, tokens: bool) -> Self {
        let stopping = (!stop.is_empty()).then(|| TextStream::new(stop));
        Self {
            plain: TextStream::new(&[]),
            stopping,
            pending: VecDeque::new(),
            previous: None,
            read: offset,
            given: offset,
            tokens,
        }
    }

    /// What a token makes certain.
    pub(crate) fn push(&mut self, model: &Model, score: &TokenScore) -> Result<Part, ApiError> {
        self.push_with(model, score.id, Some(score.logprob), &score.alternatives)
    }

    /// The same for a token that may be without a probability.
    pub(crate) fn push_with(
        &mut self,
        model: &Model,
        id: u32,
        logprob: Option<f32>,
        alternatives: &[(u32, f32)],
    ) -> Result<Part, ApiError> {
        let tokenizer = model.tokenizer();
        let certain = self.stopping.as_mut().map(|stream| stream.push(tokenizer, id)).transpose()?;
        if !self.tokens
            && let Some(text) = certain
        {
            return Ok(Part { text, tokens: Vec::new() });
        }
        let text = self.plain.push(tokenizer, id)?;
        if self.tokens {
            let named = |(other, score): &(u32, f32)| {
                let same = *other == id && !text.is_empty();
                (*other, if same { text.clone() } else { text_after(model, self.previous, *other) }, *score)
            };
            let alternatives = alternatives.iter().map(named).collect();
            self.pending.push_back(Token { id, text: text.clone(), offset: self.read, logprob, alternatives });
        }
        self.read += text.chars().count();
        self.previous = Some(id);
        Ok(self.part(certain.unwrap_or(text)))
    }

    /// What is left when no token follows: an end or a stop string has no part in it.
    pub(crate) fn finish(&mut self, model: &Model) -> Result<Part, ApiError> {
        let rest = self.plain.finish(model.tokenizer())?;
        // What is left of a character belongs to the last token.
        if let Some(last) = self.pending.iter_mut().rev().find(|token| !model.tokenizer().is_special(token.id)) {
            last.text.push_str(&rest);
        }
        let text = match &mut self.stopping {
            Some(stream) => stream.finish(model.tokenizer())?,
            None => rest,
        };
        Ok(self.part(text))
    }

    /// Tokens that have no part in the text: an end, a stop string, special ones behind the last character.
    pub(crate) fn rest(self) -> impl Iterator<Item = Token> {
        self.pending.into_iter()
    }

    /// Tokens belong to what was given as soon as a part of their text does.
    fn part(&mut self, text: String) -> Part {
        self.given += text.chars().count();
        let certain = self.pending.iter().take_while(|token| token.offset < self.given).count();
        Part { text, tokens: self.pending.drain(..certain).collect() }
    }
}

/// The text of a token after another one: some tokenizers set a space between tokens, and not before the first.
pub(crate) fn text_after(model: &Model, previous: Option<u32>, id: u32) -> String {
    let tokenizer = model.tokenizer();
    let readable = || tokenizer.readable(id).unwrap_or_default();
    let (Some(previous), false) = (previous, tokenizer.is_special(id)) else { return readable() };
    let decode = |ids: &[u32]| tokenizer.decode(ids, true).unwrap_or_default();
    let (before, both) = (decode(&[previous]), decode(&[previous, id]));
    match both.strip_prefix(&before) {
        Some(text) if !text.is_empty() && !text.contains('\u{fffd}') => text.to_owned(),
        _ => readable(),
    }
}
