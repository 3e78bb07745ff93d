//! How tokens are chosen, in `transformers`' words and with its meaning.

use crate::{InferError, Result};

/// New tokens where neither a model's files nor the caller says how many.
const NEW_TOKENS: usize = 20;

/// Candidates that sampling keeps where neither a model's files nor the caller says how many.
pub(crate) const TOP_K: usize = 50;

/// The most sequences of one prompt, counted as beams or as those to return.
pub const MOST_SEQUENCES: usize = 1024;

/// The longest n-grams, the most alternatives and the most stop strings that make sense.
const MOST_SMALL: usize = 256;

/// How the tokens of a text are chosen. The default is greedy search for 20 tokens, without an end.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateSettings {
    /// The most new tokens; where it is none, what `max_length` leaves. Both end at the length that the model takes.
    pub max_new_tokens: Option<usize>,
    /// Maximum number of tokens with those that the decoder begins with: a prompt, or the start token of an encoder-decoder. 20 new ones where
    /// neither is given.
    pub max_length: Option<usize>,
    /// No end token before so many new ones.
    pub min_new_tokens: usize,
    /// No end token before so many, counted like `max_length`.
    pub min_length: usize,
    /// Sequences that a beam search follows; 1 for none.
    pub beams: usize,
    /// Sequences to return for a prompt; of a beam search the best.
    pub return_sequences: usize,
    /// Draws tokens instead of taking the likeliest.
    pub sampling: Option<Sampling>,
    /// The exponent of the number of new tokens that a score is divided by.
    pub length_penalty: f32,
    /// When a beam search stops.
    pub early_stopping: EarlyStopping,
    /// Divides the positive logits of tokens that are there already, and multiplies the negative ones; 1 for none.
    pub repetition_penalty: f32,
    /// What is subtracted from the logits of tokens that were written, once for each token; 0 for none. (Of OpenAI's, not of
    /// `transformers`.)
    pub presence_penalty: f32,
    /// The same, once for every time that a token was written.
    pub frequency_penalty: f32,
    /// No n-gram of so many tokens occurs twice; 0 for none.
    pub no_repeat_ngram: usize,
    /// What is added to the logits of tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// The token that follows an encoder-decoder's start token.
    pub forced_first: Option<u32>,
    /// The token at the last place, where a sequence gets as long as it may.
    pub forced_last: Option<u32>,
    /// End tokens.
    pub end: Vec<u32>,
    /// Texts that end a sequence; they are not a part of its text.
    pub stop: Vec<String>,
    /// For each token, so many of the likeliest ones with their logarithms of probabilities.
    pub logprobs: Option<usize>,
}

/// How tokens are drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// What logits are divided by.
    pub temperature: f32,
    /// Keeps the likeliest so many, and those equal to the last of them; 0 for all.
    pub top_k: usize,
    /// Keeps the likeliest that together reach this probability; 1 for all.
    pub top_p: f32,
    /// Keeps those with at least this share of the likeliest one's probability; 0 for all.
    pub min_p: f32,
    /// Draws are a function of it, of the sequence's number among those of its prompt, and of the token's place.
    pub seed: u64,
}

/// When a beam search stops that has as many finished sequences as beams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EarlyStopping {
    /// At once.
    Yes,
    /// When the best running sequence, as long as it is now, scores no better than the worst finished one.
    No,
    /// When no running sequence can score better, however long it gets.
    Never,
}

impl Default for GenerateSettings {
    fn default() -> Self {
        Self {
            max_new_tokens: None,
            max_length: None,
            min_new_tokens: 0,
            min_length: 0,
            beams: 1,
            return_sequences: 1,
            sampling: None,
            length_penalty: 1.0,
            early_stopping: EarlyStopping::No,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            no_repeat_ngram: 0,
            logit_bias: vec![],
            forced_first: None,
            forced_last: None,
            end: vec![],
            stop: vec![],
            logprobs: None,
        }
    }
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 1.0, top_k: TOP_K, top_p: 1.0, min_p: 0.0, seed: 0 }
    }
}

impl GenerateSettings {
    /// Refuses what has no meaning, by its name.
    pub fn check(&self) -> Result<()> {
        let within = |name, got: usize, least: usize, most: usize, expected| {
            refuse_unless((least..=most).contains(&got), name, expected, got)
        };
        let small = "a whole number up to 256";
        if let Some(most) = self.max_new_tokens {
            refuse_unless(most > 0, "max_new_tokens", "at least 1", most)?;
            let least = self.min_new_tokens;
            refuse_unless(least <= most, "min_new_tokens", "at most max_new_tokens", least)?;
        }
        within("beams", self.beams, 1, MOST_SEQUENCES, "a whole number from 1 to 1024")?;
        within("return_sequences", self.return_sequences, 1, MOST_SEQUENCES, "a whole number from 1 to 1024")?;
        within("no_repeat_ngram", self.no_repeat_ngram, 0, MOST_SMALL, small)?;
        within("logprobs", self.logprobs.unwrap_or(0), 0, MOST_SMALL, small)?;
        within("stop", self.stop.len(), 0, MOST_SMALL, "at most 256 texts")?;
        refuse_unless(self.stop.iter().all(|stop| !stop.is_empty()), "stop", "texts that are not empty", "\"\"")?;
        let penalty = self.repetition_penalty;
        refuse_unless(penalty > 0.0 && penalty.is_finite(), "repetition_penalty", "a positive number", penalty)?;
        for (name, penalty) in
            [("presence_penalty", self.presence_penalty), ("frequency_penalty", self.frequency_penalty)]
        {
            refuse_unless(penalty.is_finite(), name, "a finite number", penalty)?;
        }
        refuse_unless(self.length_penalty.is_finite(), "length_penalty", "a finite number", self.length_penalty)?;
        let bias = self.logit_bias.iter().find(|(_, bias)| bias.is_nan() || *bias == f32::INFINITY);
        refuse_unless(bias.is_none(), "logit_bias", "numbers", bias.map_or(0.0, |(_, bias)| *bias))?;
        if self.beams > 1 {
            let expected = "none with beams, which are not drawn";
            refuse_unless(self.sampling.is_none(), "sampling", expected, "some")?;
            let got = self.logprobs.unwrap_or(0);
            refuse_unless(self.logprobs.is_none(), "logprobs", "none with beams", got)?;
            let got = self.return_sequences;
            refuse_unless(got <= self.beams, "return_sequences", "at most as many as beams", got)?;
        }
        match &self.sampling {
            Some(sampling) => sampling.check(),
            None if self.beams == 1 => {
                let expected = "1, or sampling or as many beams: a greedy search finds one sequence";
                refuse_unless(self.return_sequences == 1, "return_sequences", expected, self.return_sequences)
            }
            None => Ok(()),
        }
    }

    /// Sequences that are written at a time for one prompt.
    pub fn sequences(&self) -> usize {
        self.beams.max(self.return_sequences)
    }

    /// How many new tokens may follow `begun` ones, in a model that takes `most` in all; at least one.
    pub(crate) fn new_tokens(&self, begun: usize, most: usize) -> usize {
        let of_length = |length: usize| length.saturating_sub(begun).max(1);
        let wanted = self.max_new_tokens.unwrap_or_else(|| self.max_length.map_or(NEW_TOKENS, of_length));
        wanted.min(most.saturating_sub(begun)).max(1)
    }
}

impl Sampling {
    fn check(&self) -> Result<()> {
        let Self { temperature, top_p, min_p, .. } = *self;
        let expected = "a number above 0; leave sampling out to take the likeliest token";
        refuse_unless(temperature > 0.0 && temperature.is_finite(), "temperature", expected, temperature)?;
        refuse_unless(top_p > 0.0 && top_p <= 1.0, "top_p", "a number above 0 and at most 1", top_p)?;
        refuse_unless((0.0..=1.0).contains(&min_p), "min_p", "a number from 0 to 1", min_p)
    }
}

fn refuse_unless(fine: bool, name: &'static str, expected: &'static str, got: impl ToString) -> Result<()> {
    if fine { Ok(()) } else { Err(InferError::Setting { name, expected, got: got.to_string() }) }
}
