//! What changes logits before a token is chosen, in the order of `transformers` 5: biases, repetition penalty, repeated n-grams, ends
//! that come too early, forced tokens. Greedy search and sampling change logits, beam search logarithms of probabilities.
//!
//! Legend: V tokens of the vocabulary.

use super::GenerateSettings;

/// Which ids were seen, without clearing V marks each time.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    seen: Vec<u32>,
    now: u32,
}

impl Marks {
    fn clear(&mut self, vocabulary: usize) {
        self.now = self.now.wrapping_add(1);
        if self.now == 0 || self.seen.len() != vocabulary {
            self.seen.clear();
            self.seen.resize(vocabulary, 0);
            self.now = 1;
        }
    }

    /// Whether an id is seen for the first time.
    fn first(&mut self, id: u32) -> bool {
        self.seen.get_mut(id as usize).is_some_and(|seen| std::mem::replace(seen, self.now) != self.now)
    }
}

/// A sequence whose next token is to be chosen.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Begun<'a> {
    /// What the decoder has read: a prompt or a start token, and what was written.
    pub(crate) tokens: &'a [u32],
    /// How many stood there at first.
    pub(crate) first: usize,
    /// Maximum number of tokens in all.
    pub(crate) limit: usize,
}

impl Begun<'_> {
    /// Whether [`process`] would change anything.
    pub(crate) fn is_changed_by(&self, settings: &GenerateSettings) -> bool {
        settings.repetition_penalty != 1.0
            || settings.presence_penalty != 0.0
            || settings.frequency_penalty != 0.0
            || settings.no_repeat_ngram > 0
            || !settings.logit_bias.is_empty()
            || (!settings.end.is_empty() && self.is_too_short(settings))
            || self.forced(settings).is_some()
    }

    fn is_too_short(&self, settings: &GenerateSettings) -> bool {
        let length = self.tokens.len();
        length < settings.min_length || length - self.first < settings.min_new_tokens
    }

    /// The token that has to come next, if any.
    fn forced(&self, settings: &GenerateSettings) -> Option<u32> {
        let last = settings.forced_last.filter(|_| self.tokens.len() + 1 == self.limit);
        last.or(settings.forced_first.filter(|_| self.tokens.len() == 1))
    }
}

/// Changes the scores of the next token: V.
pub(crate) fn process(settings: &GenerateSettings, begun: Begun<'_>, marks: &mut Marks, scores: &mut [f32]) {
    for (id, bias) in &settings.logit_bias {
        if let Some(score) = scores.get_mut(*id as usize) {
            *score += bias;
        }
    }
    if settings.repetition_penalty != 1.0 {
        penalise(settings.repetition_penalty, begun.tokens, marks, scores);
    }
    if settings.presence_penalty != 0.0 || settings.frequency_penalty != 0.0 {
        let written = &begun.tokens[begun.first..];
        subtract(settings.presence_penalty, settings.frequency_penalty, written, marks, scores);
    }
    if settings.no_repeat_ngram > 0 {
        ban_repeated(settings.no_repeat_ngram, begun.tokens, scores);
    }
    if begun.is_too_short(settings) {
        settings.end.iter().for_each(|id| ban(*id, scores));
    }
    if let Some(id) = begun.forced(settings) {
        scores.fill(f32::NEG_INFINITY);
        if let Some(score) = scores.get_mut(id as usize) {
            *score = 0.0;
        }
    }
}

/// Makes tokens that are there less likely, each once.
fn penalise(penalty: f32, tokens: &[u32], marks: &mut Marks, scores: &mut [f32]) {
    marks.clear(scores.len());
    for id in tokens {
        if marks.first(*id) {
            let score = &mut scores[*id as usize];
            *score = if *score < 0.0 { *score * penalty } else { *score / penalty };
        }
    }
}

/// Makes tokens that were written less likely, by a constant for each and by another for every time.
fn subtract(presence: f32, frequency: f32, written: &[u32], marks: &mut Marks, scores: &mut [f32]) {
    marks.clear(scores.len());
    for id in written {
        let first = if marks.first(*id) { presence } else { 0.0 };
        scores[*id as usize] -= first + frequency;
    }
}

/// Bans what would complete an n-gram that is there.
fn ban_repeated(n: usize, tokens: &[u32], scores: &mut [f32]) {
    let Some(start) = (tokens.len() + 1).checked_sub(n) else { return };
    let end = &tokens[start..];
    // Each n-gram as its first n − 1 tokens and its last.
    for i in n - 1..tokens.len() {
        if tokens[i + 1 - n..i] == *end {
            ban(tokens[i], scores);
        }
    }
}

fn ban(id: u32, scores: &mut [f32]) {
    if let Some(score) = scores.get_mut(id as usize) {
        *score = f32::NEG_INFINITY;
    }
}
