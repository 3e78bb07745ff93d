//! Beam search as `transformers` 5 does it, in f32 as it does. Ties go to the earlier beam, then to the lower id.
//!
//! Legend: B beams, V tokens of the vocabulary, K = max(2, 1 + end tokens)·B candidates of a step.

use super::choice::Scored;
use super::{EarlyStopping, FinishReason, GenerateSettings};

/// What stands for a score that nothing has.
const NONE: f32 = -1e9;

/// The search for one prompt.
#[derive(Debug)]
pub(crate) struct Beams {
    /// B running sequences: their scores, and all of their tokens.
    pub(crate) running: Vec<Beam>,
    /// Up to B finished ones, best first.
    finished: Vec<Finished>,
    /// Whether running sequences could still score better than finished ones.
    open: bool,
    /// Room for the candidates of a step.
    candidates: Vec<Candidate>,
    next: Vec<Beam>,
}

/// A running sequence.
#[derive(Clone, Debug)]
pub(crate) struct Beam {
    pub(crate) tokens: Vec<u32>,
    pub(crate) score: f32,
    /// The running sequence of the step before that it continues.
    pub(crate) parent: usize,
}

/// A finished sequence.
#[derive(Clone, Debug)]
pub(crate) struct Finished {
    pub(crate) tokens: Vec<u32>,
    pub(crate) score: f32,
    pub(crate) why: FinishReason,
}

#[derive(Clone, Copy, Debug)]
struct Candidate {
    beam: usize,
    id: u32,
    score: f32,
    ends: Option<FinishReason>,
}

/// Where a search stands, and how sequences end.
pub(crate) struct Step<'a> {
    pub(crate) settings: &'a GenerateSettings,
    /// Tokens that stood there at first.
    pub(crate) first: usize,
    /// Maximum number of tokens in all.
    pub(crate) limit: usize,
    /// Whether new tokens end a sequence, beside end tokens.
    pub(crate) stops: &'a dyn Fn(&[u32]) -> bool,
}

impl Beams {
    pub(crate) fn new(beams: usize, begun: &[u32]) -> Self {
        let beam = |i| Beam { tokens: begun.to_vec(), score: if i == 0 { 0.0 } else { NONE }, parent: 0 };
        let running = (0..beams).map(beam).collect();
        Self { running, finished: vec![], open: true, candidates: vec![], next: vec![] }
    }

    /// How many candidates of a row can matter.
    pub(crate) fn wanted(settings: &GenerateSettings) -> usize {
        (1 + settings.end.len()).max(2) * settings.beams
    }

    /// Takes the best candidates of each running sequence (ids with logarithms of probabilities, best first) to the next step;
    /// whether the search is over. At the first step all have those of the first.
    pub(crate) fn step(&mut self, step: &Step<'_>, best: &[Vec<Scored>]) -> bool {
        let (settings, length) = (step.settings, self.running[0].tokens.len());
        let (wanted, beams) = (Self::wanted(settings), settings.beams);
        self.candidates.clear();
        for (beam, running) in self.running.iter().enumerate() {
            let row = best.get(beam).or(best.first()).map_or(&[][..], Vec::as_slice);
            let candidate =
                |(id, score): &Scored| Candidate { beam, id: *id, score: score + running.score, ends: None };
            self.candidates.extend(row.iter().map(candidate));
        }
        // Stable: equal candidates stay in the order of beams and ids.
        self.candidates.sort_by(|a, b| b.score.total_cmp(&a.score));
        self.candidates.truncate(wanted);
        let mut written = Vec::with_capacity(length + 1 - step.first);
        for candidate in &mut self.candidates {
            candidate.ends = if settings.end.contains(&candidate.id) {
                Some(FinishReason::EndOfText)
            } else {
                written.clear();
                written.extend_from_slice(&self.running[candidate.beam].tokens[step.first..]);
                written.push(candidate.id);
                let at_limit = (length + 1 >= step.limit).then_some(FinishReason::Length);
                if (step.stops)(&written) { Some(FinishReason::Stop) } else { at_limit }
            };
        }
        self.finish(step, length);
        self.go_on(beams);
        let stuck = self.candidates.iter().all(|candidate| candidate.ends.is_some());
        self.check_open(step, length + 1);
        let full = self.finished.len() == beams && settings.early_stopping == EarlyStopping::Yes;
        !self.open || full || stuck
    }

    /// The best so many finished sequences, best first. Where fewer finished, because nothing else was possible, the best running ones
    /// follow.
    pub(crate) fn into_finished(mut self, wanted: usize) -> Vec<Finished> {
        let missing = wanted.saturating_sub(self.finished.len());
        let ended = |beam: Beam| Finished { tokens: beam.tokens, score: beam.score, why: FinishReason::Length };
        self.finished.extend(self.running.into_iter().take(missing).map(ended));
        self.finished.truncate(wanted);
        self.finished
    }

    /// Keeps the best B finished sequences; new ones come from the first B candidates alone.
    fn finish(&mut self, step: &Step<'_>, length: usize) {
        let beams = step.settings.beams;
        let divisor = ((length + 1 - step.first) as f32).powf(step.settings.length_penalty);
        let full = self.finished.len() == beams && step.settings.early_stopping == EarlyStopping::Yes;
        if full || !self.open {
            return;
        }
        for candidate in self.candidates.iter().take(beams) {
            let Some(why) = candidate.ends else { continue };
            let score = candidate.score / divisor;
            if score <= NONE {
                continue;
            }
            let place = self.finished.partition_point(|finished| finished.score >= score);
            if place < beams {
                let mut tokens = self.running[candidate.beam].tokens.clone();
                tokens.push(candidate.id);
                self.finished.insert(place, Finished { tokens, score, why });
                self.finished.truncate(beams);
            }
        }
    }

    /// The best B candidates that are not finished run on. Where there are fewer, finished ones do, far behind.
    fn go_on(&mut self, beams: usize) {
        self.candidates.iter_mut().filter(|candidate| candidate.ends.is_some()).for_each(|ended| ended.score += NONE);
        self.candidates.sort_by(|a, b| b.score.total_cmp(&a.score));
        self.next.clear();
        for candidate in self.candidates.iter().take(beams) {
            let mut tokens = Vec::with_capacity(self.running[candidate.beam].tokens.len() + 64);
            tokens.extend_from_slice(&self.running[candidate.beam].tokens);
            tokens.push(candidate.id);
            self.next.push(Beam { tokens, score: candidate.score, parent: candidate.beam });
        }
        std::mem::swap(&mut self.running, &mut self.next);
    }

    fn check_open(&mut self, step: &Step<'_>, length: usize) {
        let GenerateSettings { beams, length_penalty, early_stopping, .. } = *step.settings;
        let reach = if early_stopping == EarlyStopping::Never && length_penalty > 0.0 { step.limit } else { length };
        let possible = self.running[0].score / ((reach - step.first) as f32).powf(length_penalty);
        let worst = if self.finished.len() == beams { self.finished[beams - 1].score } else { NONE };
        self.open &= possible > worst;
    }
}
