//! Tokens in, text out as soon as it is certain: a character whose bytes are not all there waits, and so does what may be the beginning of
//! a stop string.

use henson_text::Tokenizer;

use crate::Result;

/// What a tokenizer gives for bytes that are no character.
const INCOMPLETE: char = '\u{fffd}';

/// Tokens that wait for the rest of a character; what is longer was never one.
const LONGEST_CHARACTER: usize = 8;

/// Turns the tokens of a sequence into text while they come.
#[derive(Clone, Debug)]
pub struct TextStream {
    stop: Vec<String>,
    ids: Vec<u32>,
    /// Text is made of the tokens from here on, and those before `given` have theirs. What stands before decides on spaces.
    context: usize,
    given: usize,
    /// Text that may begin a stop string.
    held: String,
    stopped: bool,
}

impl TextStream {
    /// A stream that ends before any of the texts in `stop`.
    pub fn new(stop: &[String]) -> Self {
        Self { stop: stop.to_vec(), ids: vec![], context: 0, given: 0, held: String::new(), stopped: false }
    }

    /// The text that a token adds; empty while nothing is certain, and after a stop string.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<String> {
        // A model may have more rows than its tokenizer has tokens; such an id reads as nothing.
        if self.stopped || tokenizer.token(id).is_none() {
            return Ok(String::new());
        }
        self.ids.push(id);
        let (before, now) = self.decoded(tokenizer)?;
        let waits = now.ends_with(INCOMPLETE) && self.ids.len() - self.given < LONGEST_CHARACTER;
        if waits || now.len() <= before.len() {
            return Ok(String::new());
        }
        // Text that was given already stays as it was, whatever the tokenizer makes of it now.
        let new = now.get(before.len()..).unwrap_or_default().to_owned();
        self.context = self.given;
        self.given = self.ids.len();
        Ok(self.certain(&new))
    }

    /// What was held back, when no token follows.
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> Result<String> {
        if self.stopped {
            return Ok(String::new());
        }
        let (before, now) = self.decoded(tokenizer)?;
        let new = now.get(before.len()..).unwrap_or_default().to_owned();
        self.given = self.ids.len();
        let mut text = self.certain(&new);
        text.push_str(&std::mem::take(&mut self.held));
        Ok(text)
    }

    /// Whether a stop string came.
    pub fn is_stopped(&self) -> bool {
        self.stopped
    }

    pub(crate) fn stops(&self) -> &[String] {
        &self.stop
    }

    /// The text of the tokens that were given, and with those that were not.
    fn decoded(&self, tokenizer: &Tokenizer) -> Result<(String, String)> {
        let before = tokenizer.decode(&self.ids[self.context..self.given], true)?;
        let now = tokenizer.decode(&self.ids[self.context..], true)?;
        Ok((before, now))
    }

    /// What of the text held back and of new text can be no part of a stop string.
    fn certain(&mut self, new: &str) -> String {
        self.held.push_str(new);
        if let Some(place) = first_stop(&self.held, &self.stop) {
            self.stopped = true;
            self.held.truncate(place);
            return std::mem::take(&mut self.held);
        }
        let begins = |place: &usize| self.stop.iter().any(|stop| stop.starts_with(&self.held[*place..]));
        let place = self.held.char_indices().map(|(place, _)| place).find(begins).unwrap_or(self.held.len());
        let rest = self.held.split_off(place);
        std::mem::replace(&mut self.held, rest)
    }
}

/// Where the first of some stop strings begins in a text.
pub(crate) fn first_stop(text: &str, stop: &[String]) -> Option<usize> {
    stop.iter().filter_map(|stop| text.find(stop.as_str())).min()
}
