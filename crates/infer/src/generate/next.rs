//! The next tokens of a job, from the rows of logits that a step gave it: chosen, drawn or kept by a beam search.
//!
//! Legend: V tokens of the vocabulary.

use henson_models::DecoderCache;
use henson_tensor::CachedSequence;

use super::beams::{Beams, Finished, Step};
use super::choice::{Scored, best, best_of, draw};
use super::job::{Active, Event, EventKind, FinishReason, Line, State, TokenScore, Written};
use super::processors::{Begun, Marks, process};
use crate::Result;

/// Buffers that serve every choice.
#[derive(Default)]
pub(super) struct Room {
    marks: Marks,
    scores: Vec<f32>,
    found: Vec<Scored>,
    weights: Vec<f64>,
    best: Vec<Vec<Scored>>,
}

/// What the model says about the next token of a sequence.
#[derive(Clone, Copy)]
pub(super) struct Row<'a> {
    /// V; none where all that is asked for is `largest`.
    pub(super) logits: &'a [f32],
    /// The logarithm of the sum of their exponentials; not finite where they are not.
    pub(super) log_sum: f32,
    /// The first id with the largest logit, and that, where it is known and all that is asked for.
    pub(super) largest: Option<(u32, f32)>,
}

/// What a choice of tokens works with.
pub(super) struct Choice<'w> {
    pub(super) cache: &'w mut DecoderCache,
    pub(super) room: &'w mut Room,
    pub(super) events: &'w mut Vec<Event>,
}

impl Choice<'_> {
    /// The first tokens of a job's sequences, which all come from the same row.
    pub(super) fn first_tokens(&mut self, job: &Active<'_>, place: CachedSequence, rows: &[Row<'_>]) -> Result<State> {
        let Some(row) = rows.first() else { return Ok(State::Done) };
        let mut lines: Vec<Line> = vec![];
        // The last one takes the place of what was read, the others continue it.
        for number in 0..job.settings.return_sequences {
            let mut tokens = Vec::with_capacity(job.limit);
            tokens.extend_from_slice(&job.begun);
            let line = Line { number, place, tokens, log_probability: 0.0 };
            lines.extend(self.token(job, line, *row));
        }
        let living = lines.len();
        for line in lines.iter_mut().take(living.saturating_sub(1)) {
            line.place = self.cache.written.fork(place)?;
        }
        if living == 0 {
            self.cache.written.leave(place);
            return Ok(State::Done);
        }
        Ok(State::Lines(lines))
    }

    /// The next tokens of sequences that go their own ways.
    pub(super) fn lines(&mut self, job: &Active<'_>, lines: Vec<Line>, rows: &[Row<'_>]) -> State {
        let mut living = Vec::with_capacity(lines.len());
        for (line, row) in lines.into_iter().zip(rows) {
            let place = line.place;
            match self.token(job, line, *row) {
                Some(line) => living.push(line),
                None => self.cache.written.leave(place),
            }
        }
        if living.is_empty() { State::Done } else { State::Lines(living) }
    }

    /// Chooses a token; gives the sequence back unless it ends.
    fn token(&mut self, job: &Active<'_>, line: Line, row: Row<'_>) -> Option<Line> {
        let (settings, Row { logits, log_sum: all, largest }) = (&job.settings, row);
        if !all.is_finite() {
            self.finished(job, line, FinishReason::NotFinite);
            return None;
        }
        if let Some((id, logit)) = largest {
            return self.chosen(job, line, TokenScore { id, logprob: logit - all, alternatives: Vec::new() });
        }
        let begun = Begun { tokens: &line.tokens, first: job.begun.len(), limit: job.limit };
        let scores = if begun.is_changed_by(settings) {
            self.room.scores.clear();
            self.room.scores.extend_from_slice(logits);
            process(settings, begun, &mut self.room.marks, &mut self.room.scores);
            self.room.scores.as_slice()
        } else {
            logits
        };
        let place = (line.number as u32, (line.tokens.len() - job.begun.len()) as u32);
        let id = match &settings.sampling {
            Some(sampling) => draw(sampling, scores, place, (&mut self.room.found, &mut self.room.weights)),
            None => best(scores),
        };
        let logprob = logits[id as usize] - all;
        let alternatives = settings.logprobs.map_or_else(Vec::new, |count| {
            best_of(logits, count, &mut self.room.found);
            self.room.found.iter().map(|(id, logit)| (*id, logit - all)).collect()
        });
        self.chosen(job, line, TokenScore { id, logprob, alternatives })
    }

    /// Appends a token; gives the sequence back unless it ends.
    fn chosen(&mut self, job: &Active<'_>, mut line: Line, token: TokenScore) -> Option<Line> {
        let (settings, id) = (&job.settings, token.id);
        line.tokens.push(id);
        line.log_probability += f64::from(token.logprob);
        let kind = EventKind::Token(token);
        self.events.push(Event { ticket: job.ticket, sequence: line.number, kind });
        let new = &line.tokens[job.begun.len()..];
        let why = if settings.end.contains(&id) {
            FinishReason::EndOfText
        } else if job.stop.as_ref().is_some_and(|stop| stop(new)) {
            FinishReason::Stop
        } else if line.tokens.len() >= job.limit {
            FinishReason::Length
        } else {
            return Some(line);
        };
        self.finished(job, line, why);
        None
    }

    fn finished(&mut self, job: &Active<'_>, line: Line, why: FinishReason) {
        let ids = line.tokens[job.begun.len()..].to_vec();
        let divisor = (ids.len().max(1) as f64).powf(f64::from(job.settings.length_penalty));
        let score = (line.log_probability / divisor) as f32;
        let kind = EventKind::Finished(Written { ids, score, why });
        self.events.push(Event { ticket: job.ticket, sequence: line.number, kind });
    }

    /// A step of a beam search.
    pub(super) fn beams(
        &mut self,
        job: &Active<'_>,
        mut beams: Beams,
        places: Vec<CachedSequence>,
        rows: &[Row<'_>],
    ) -> Result<State> {
        let settings = &job.settings;
        let wanted = Beams::wanted(settings);
        self.room.best.resize_with(rows.len(), Vec::new);
        let mut finite = true;
        let Room { marks, scores, best, .. } = &mut *self.room;
        for ((row, beam), best) in rows.iter().zip(&beams.running).zip(best) {
            finite &= row.log_sum.is_finite();
            scores.clear();
            scores.extend(row.logits.iter().map(|logit| logit - row.log_sum));
            let begun = Begun { tokens: &beam.tokens, first: job.begun.len(), limit: job.limit };
            process(settings, begun, marks, scores);
            best_of(scores, wanted, best);
        }
        let stops = |new: &[u32]| job.stop.as_ref().is_some_and(|stop| stop(new));
        let step = Step { settings, first: job.begun.len(), limit: job.limit, stops: &stops };
        if !finite || beams.step(&step, &self.room.best) {
            places.into_iter().for_each(|place| self.cache.written.leave(place));
            self.end_search(job, beams, finite);
            return Ok(State::Done);
        }
        let places = self.follow(&beams, places)?;
        Ok(State::Beams(beams, places))
    }

    fn end_search(&mut self, job: &Active<'_>, beams: Beams, finite: bool) {
        let (first, wanted) = (job.begun.len(), job.settings.return_sequences);
        let ended = if finite { beams.into_finished(wanted) } else { vec![] };
        let lost = (ended.len()..wanted).map(|_| {
            let tokens = job.begun.clone();
            Finished { tokens, score: f32::NEG_INFINITY, why: FinishReason::NotFinite }
        });
        for (sequence, ended) in ended.iter().cloned().chain(lost).enumerate() {
            let Finished { tokens, score, why } = ended;
            let kind = EventKind::Finished(Written { ids: tokens[first..].to_vec(), score, why });
            self.events.push(Event { ticket: job.ticket, sequence, kind });
        }
    }

    /// Places for the running sequences, each of which continues one of those before: the first takes its place, others get copies.
    /// Places that nobody continues are free before any copy is made, so that there are never more than beams.
    fn follow(&mut self, beams: &Beams, places: Vec<CachedSequence>) -> Result<Vec<CachedSequence>> {
        // At the first step all continue the one that was read.
        let parents = || beams.running.iter().map(|beam| beam.parent.min(places.len() - 1));
        for (i, place) in places.iter().enumerate() {
            if parents().all(|parent| parent != i) {
                self.cache.written.leave(*place);
            }
        }
        let mut next = Vec::with_capacity(beams.running.len());
        for (i, parent) in parents().enumerate() {
            let taken = parents().take(i).any(|earlier| earlier == parent);
            let place = places[parent];
            next.push(if taken { self.cache.written.fork(place)? } else { place });
        }
        Ok(next)
    }
}
