//! Sequences that are written together. Every step is one flat batch: parts of the prompts that came last, and one token of each
//! sequence that is being written. Sequences that end leave, and those that wait take their places; nothing is padded.
//!
//! Memory is bounded: a job enters when the pages that it can need in the worst case are free, so that nothing runs out midway. What is
//! written for a job depends on the job alone, to the last bit (on a CPU).
//!
//! Most steps have one token of each sequence and nothing else. A GPU records the pass of such a step once for a number of sequences and
//! plays it from then on: ids, positions and where keys lie are its inputs.
//!
//! Legend: N new tokens of a step, P rows with logits, V tokens of the vocabulary.

use std::collections::VecDeque;
use std::fmt;

use henson_models::{Batch, Decoder, DecoderCache, Model, NewTokens, Sequence, Writing};
use henson_tensor::{CachedSequence, LogSums, Parameters, Pass, Recordings, Signature, Tape, Tensor};

use super::GenerateSettings;
use super::beams::Beams;
use super::job::{Active, Event, Job, Need, PAGE, State, Ticket, need, pages_of};
use super::next::{Choice, Room, Row};
use crate::{InferError, Result};

/// Prompts are read in parts of so many tokens. Where a part ends depends on the prompt alone.
const PART: usize = 512;

/// Recorded steps that are kept, each with its logits.
const RECORDINGS: usize = 16;

/// What a [`Writer`] may hold at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriterLimits {
    /// Tokens in the cache, prompts included.
    pub tokens: usize,
    /// Tokens of sources in the cache, of an encoder-decoder.
    pub source_tokens: usize,
    /// Sequences that are written at once.
    pub streams: usize,
    /// Tokens of prompts and sources that a step reads; at least one part of one prompt.
    pub prefill: usize,
}

impl Default for WriterLimits {
    /// For a few texts of some hundred tokens.
    fn default() -> Self {
        Self { tokens: 16_384, source_tokens: 16_384, streams: 64, prefill: 2048 }
    }
}

/// Writes for many jobs at once; see the module.
pub struct Writer<'a> {
    model: &'a Model,
    parameters: &'a Parameters,
    decoder: &'a dyn Decoder,
    cache: DecoderCache,
    limits: WriterLimits,
    tape: Tape,
    recordings: Recordings,
    records: bool,
    waiting: VecDeque<Active<'a>>,
    running: Vec<Active<'a>>,
    /// What running jobs have reserved.
    reserved: Need,
    tickets: u64,
    room: Room,
}

impl<'a> Writer<'a> {
    /// A writer for a model with its weights, and room in a cache. A model that cannot write is refused.
    pub fn new(model: &'a Model, parameters: &'a Parameters, limits: WriterLimits) -> Result<Self> {
        let has = || InferError::CannotWrite { path: None, has: crate::task::described(model.config(), model.head()) };
        let decoder = model.decoder().ok_or_else(has)?;
        let (device, dtype, sizes) = (parameters.device(), parameters.dtype(), decoder.cache_sizes());
        let pages = (pages_of(limits.tokens), pages_of(limits.source_tokens));
        Ok(Self {
            model,
            parameters,
            decoder,
            cache: DecoderCache::new(device, dtype, sizes, pages, PAGE)?,
            limits,
            tape: Tape::new(),
            recordings: Recordings::at_most(RECORDINGS),
            records: decoder.is_recordable(),
            waiting: VecDeque::new(),
            running: vec![],
            reserved: Need::default(),
            tickets: 0,
            room: Room::default(),
        })
    }

    /// The limits that some jobs need together, each with this many tokens in its prompt or source, at most `streams` sequences and
    /// `bytes` of cache at a time, and at least what the largest needs.
    pub fn limits_for(
        model: &Model,
        parameters: &Parameters,
        prompts: impl Iterator<Item = usize>,
        settings: &GenerateSettings,
        (streams, bytes): (usize, usize),
    ) -> Result<WriterLimits> {
        let has = || InferError::CannotWrite { path: None, has: crate::task::described(model.config(), model.head()) };
        let sizes = model.decoder().ok_or_else(has)?.cache_sizes();
        let page_bytes = 2 * sizes.layers * sizes.width * parameters.dtype().size() * PAGE;
        let most = model.config().sizes().max_tokens;
        let (mut all, mut largest) = (Need::default(), Need::default());
        for prompt in prompts {
            let (source, begun) = if sizes.source { (prompt, 1) } else { (0, prompt) };
            let need = need(source, begun, settings.new_tokens(begun, most), settings);
            let [pages, source_pages, streams] = need.parts();
            largest.pages = largest.pages.max(pages);
            largest.source_pages = largest.source_pages.max(source_pages);
            largest.streams = largest.streams.max(streams);
            all = all.plus(need);
        }
        let share = if sizes.source { 2 } else { 1 };
        // No more sequences at once than asked for, so no more pages than as many of the largest need.
        let jobs = (streams / largest.streams.max(1)).max(1);
        let bounded = |all: usize, largest: usize| {
            let within = all.min(largest.saturating_mul(jobs)).min(bytes / share / page_bytes.max(1));
            within.max(largest).max(1) * PAGE
        };
        Ok(WriterLimits {
            tokens: bounded(all.pages, largest.pages),
            source_tokens: bounded(all.source_pages, largest.source_pages),
            streams: streams.max(largest.streams),
            prefill: WriterLimits::default().prefill,
        })
    }

    /// Takes a job. One that could never fit is refused; others wait inside until there is room.
    pub fn enter(&mut self, job: Job<'a>) -> Result<Ticket> {
        let Job { prompt, start, settings, stop } = job;
        settings.check()?;
        let sizes = self.model.config().sizes();
        let (source, begun) = if self.decoder.cache_sizes().source {
            let first = self.model.config().targets().map(|targets| targets.start);
            (prompt, if start.is_empty() { first.into_iter().collect() } else { start })
        } else {
            (vec![], [prompt, start].concat())
        };
        if begun.is_empty() || (self.cache.source.is_some() && source.is_empty()) {
            return Err(InferError::EmptyPrompt { text: 1 });
        }
        let most = sizes.max_tokens;
        if let Some(got) = [begun.len() + 1, source.len()].into_iter().find(|got| *got > most) {
            return Err(InferError::LongPrompt { text: 1, got: got.min(begun.len().max(source.len())), most });
        }
        let forced = settings.forced_first.iter().chain(&settings.forced_last);
        let biased = settings.logit_bias.iter().map(|(id, _)| id);
        let mut ids = source.iter().chain(&begun).chain(forced).chain(biased);
        if let Some(id) = ids.find(|id| **id as usize >= sizes.vocab_size) {
            let (sequence, got, end) = (0, *id, sizes.vocab_size);
            return Err(henson_models::InputError::Id { sequence, got, end }.into());
        }
        let new = settings.new_tokens(begun.len(), most);
        let need = need(source.len(), begun.len(), new, &settings);
        let whats = ["tokens in the cache", "tokens of sources in the cache", "sequences at once"];
        for ((what, needed), (room, unit)) in
            whats.into_iter().zip(need.parts()).zip(self.all().parts().into_iter().zip([PAGE, PAGE, 1]))
        {
            if needed > room {
                let (needed, room) = (needed.saturating_mul(unit), room * unit);
                return Err(InferError::NoRoom { what, needed, room });
            }
        }
        self.tickets += 1;
        let (ticket, limit) = (Ticket(self.tickets), begun.len() + new);
        let state = State::Reading(0, None);
        self.waiting.push_back(Active {
            ticket,
            source,
            begun,
            settings,
            stop,
            limit,
            need,
            source_place: None,
            state,
        });
        Ok(ticket)
    }

    /// Lets a job go, whatever it waits for; nothing more is heard of it.
    pub fn leave(&mut self, ticket: Ticket) {
        self.waiting.retain(|job| job.ticket != ticket);
        if let Some(place) = self.running.iter().position(|job| job.ticket == ticket) {
            let job = self.running.remove(place);
            self.release(job);
        }
    }

    /// Whether no job is left.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// Jobs that wait for room, and jobs that are under way.
    pub fn jobs(&self) -> (usize, usize) {
        (self.waiting.len(), self.running.len())
    }

    /// Runs one flat batch: what new jobs read, and one token of every sequence. After an error, the writer is of no more use.
    pub fn step(&mut self) -> Result<Vec<Event>> {
        let parameters = self.parameters;
        let _turn = parameters.device().turn();
        self.admit();
        self.read_sources()?;
        let mut events = vec![];
        let batch = self.compose();
        if !batch.tokens.is_empty()
            && let Some((logits, sums)) = self.run(&batch)?
        {
            self.choose(&batch, &logits, &sums, &mut events)?;
        }
        let mut place = 0;
        while place < self.running.len() {
            if matches!(self.running[place].state, State::Done) {
                let job = self.running.remove(place);
                self.release(job);
            } else {
                place += 1;
            }
        }
        Ok(events)
    }

    /// Pages that nobody has, of what is written and of sources.
    pub fn free_pages(&self) -> (usize, usize) {
        (self.cache.written.free_pages(), self.cache.source.as_ref().map_or(0, |source| source.free_pages()))
    }

    /// Steps that a GPU has recorded, and plays for others of their sizes.
    pub fn recordings(&self) -> usize {
        self.recordings.ready()
    }

    fn all(&self) -> Need {
        Need {
            pages: pages_of(self.limits.tokens),
            source_pages: if self.cache.source.is_some() { pages_of(self.limits.source_tokens) } else { 0 },
            streams: self.limits.streams,
        }
    }

    /// Jobs that fit enter, first come, first served.
    fn admit(&mut self) {
        while let Some(job) = self.waiting.front() {
            let with = self.reserved.plus(job.need);
            if !with.within(self.all()) {
                break;
            }
            self.reserved = with;
            self.running.extend(self.waiting.pop_front());
        }
    }

    fn release(&mut self, job: Active<'a>) {
        self.reserved = self.reserved.minus(job.need);
        match job.state {
            State::Reading(_, place) => place.into_iter().for_each(|place| self.cache.written.leave(place)),
            State::Lines(lines) => lines.iter().for_each(|line| self.cache.written.leave(line.place)),
            State::Beams(_, places) => places.into_iter().for_each(|place| self.cache.written.leave(place)),
            State::Done => {}
        }
        if let (Some(source), Some(place)) = (&mut self.cache.source, job.source_place) {
            source.leave(place);
        }
    }

    /// Encodes sources of jobs that have just entered, several at once.
    fn read_sources(&mut self) -> Result<()> {
        let Some(kept) = &mut self.cache.source else { return Ok(()) };
        let (mut read, mut chosen) = (0, vec![]);
        for (i, job) in self.running.iter().enumerate().filter(|(_, job)| job.source_place.is_none()) {
            if read > 0 && read + job.source.len() > self.limits.prefill {
                break;
            }
            read += job.source.len();
            chosen.push(i);
        }
        if chosen.is_empty() {
            return Ok(());
        }
        let segments = vec![0; chosen.iter().map(|i| self.running[*i].source.len()).max().unwrap_or(0)];
        let sequence = |i: &usize| {
            let ids = self.running[*i].source.as_slice();
            Sequence { ids, segments: &segments[..ids.len()] }
        };
        let sources: Vec<Sequence<'_>> = chosen.iter().map(sequence).collect();
        let sources = Batch::new(self.parameters.device(), self.model.config(), &sources, 0)?;
        let places: Vec<CachedSequence> = chosen.iter().map(|_| kept.enter()).collect();
        kept.extend(&places, &sources.layout)?;
        let mut pass = Pass::inference(&mut self.tape, self.parameters);
        self.decoder.read_sources(&mut pass, &sources, &mut self.cache)?;
        for (i, place) in chosen.into_iter().zip(places) {
            self.running[i].source_place = Some(place);
        }
        Ok(())
    }

    /// What the next pass is about.
    fn compose(&mut self) -> Composed {
        let mut batch = Composed::default();
        let has_source = self.cache.source.is_some();
        let mut read = 0;
        for (i, job) in self.running.iter_mut().enumerate() {
            if has_source && job.source_place.is_none() {
                continue;
            }
            let source = job.source_place;
            match &mut job.state {
                State::Reading(done, place) => {
                    let part = *done..(*done + PART).min(job.begun.len());
                    if read > 0 && read + part.len() > self.limits.prefill {
                        continue;
                    }
                    read += part.len();
                    let place = *place.get_or_insert_with(|| self.cache.written.enter());
                    batch.push(Writing { written: place, source }, &job.begun[part.clone()]);
                    if part.end == job.begun.len() {
                        batch.rows_of(i, 1);
                    }
                    *done = part.end;
                }
                State::Lines(lines) => {
                    for line in &*lines {
                        batch.push(Writing { written: line.place, source }, last(&line.tokens));
                        batch.rows_of(i, 1);
                    }
                }
                State::Beams(beams, places) => {
                    for (beam, place) in beams.running.iter().zip(&*places) {
                        batch.push(Writing { written: *place, source }, last(&beam.tokens));
                        batch.rows_of(i, 1);
                    }
                }
                State::Done => {}
            }
        }
        batch
    }

    /// Logits of the sequences that get a token (P×V, the columns padded), and the logarithm of each row's sum of exponentials.
    fn run(&mut self, batch: &Composed) -> Result<Option<(Tensor, LogSums)>> {
        let Self { model, parameters, decoder, cache, tape, recordings, .. } = self;
        let (device, config) = (parameters.device(), model.config());
        let tokens: Vec<&[u32]> = batch.ranges().collect();
        let records = self.records && batch.has_a_token_of_each();
        let ((new, rows), signature) = device.feed_tokens(|| {
            if !records {
                device.do_not_record();
            }
            let new = NewTokens::new(device, config, cache, &batch.writing, &tokens)?;
            let mut rows = batch.rows.clone();
            rows.extend(rows.len() as u32..device.rounded_streams(rows.len()) as u32);
            Ok::<_, InferError>((new, Tensor::from_slice(device, [rows.len()], &rows)?))
        })?;
        let signature = if records { signature } else { Signature::default() };
        let outputs = recordings.run(device, &signature, &(), || {
            let mut pass = Pass::inference(tape, parameters);
            let states = decoder.step(&mut pass, &new, cache)?;
            let mut outputs = vec![];
            if !batch.rows.is_empty() {
                let logits = model.logits_of(&mut pass, states, &new.layout, Some(&rows))?.into_tensor();
                let found = pass.log_sums(&logits, config.sizes().vocab_size)?;
                outputs.extend([logits, found]);
            }
            drop(pass);
            Ok::<_, InferError>((outputs, tape.trace()))
        })?;
        match &outputs[..] {
            [logits, found] => Ok(Some((logits.clone(), LogSums::read(found)?))),
            _ => Ok(None),
        }
    }

    /// Chooses tokens for all jobs that have logits.
    fn choose(&mut self, batch: &Composed, logits: &Tensor, found: &LogSums, events: &mut Vec<Event>) -> Result<()> {
        let (vocabulary, columns) = (self.model.config().sizes().vocab_size, logits.columns());
        // Logits stay on a GPU where the largest ones are all that is asked for.
        let greedy = found.largest.is_some() && batch.jobs.iter().all(|(i, _)| self.running[*i].takes_the_largest());
        let copied;
        let numbers: Option<&[f32]> = match logits.on_host() {
            Some(numbers) => Some(numbers),
            None if greedy => None,
            None => {
                copied = logits.to_f32()?;
                Some(&copied)
            }
        };
        let mut first = 0;
        for (i, count) in &batch.jobs {
            let job = &mut self.running[*i];
            let row = |r: usize| Row {
                logits: numbers.map_or(&[], |numbers| &numbers[r * columns..r * columns + vocabulary]),
                log_sum: found.sums[r],
                largest: found.largest.as_ref().filter(|_| greedy).map(|largest| largest[r]),
            };
            let own: Vec<Row<'_>> = (first..first + count).map(row).collect();
            first += count;
            let mut choice = Choice { cache: &mut self.cache, room: &mut self.room, events };
            match std::mem::replace(&mut job.state, State::Done) {
                State::Reading(_, Some(place)) => {
                    job.state = if job.settings.beams > 1 {
                        let beams = Beams::new(job.settings.beams, &job.begun);
                        choice.beams(job, beams, vec![place], &own)?
                    } else {
                        choice.first_tokens(job, place, &own)?
                    };
                }
                State::Lines(lines) => job.state = choice.lines(job, lines, &own),
                State::Beams(beams, places) => job.state = choice.beams(job, beams, places, &own)?,
                state => job.state = state,
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Writer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (waiting, running) = self.jobs();
        f.debug_struct("Writer")
            .field("limits", &self.limits)
            .field("waiting", &waiting)
            .field("running", &running)
            .finish()
    }
}

/// New tokens of a pass, and which rows of it get logits.
#[derive(Default)]
struct Composed {
    writing: Vec<Writing>,
    tokens: Vec<u32>,
    ends: Vec<usize>,
    /// P rows of the flat batch.
    rows: Vec<u32>,
    /// Which jobs they belong to, with how many each.
    jobs: Vec<(usize, usize)>,
}

impl Composed {
    fn push(&mut self, writing: Writing, tokens: &[u32]) {
        self.writing.push(writing);
        self.tokens.extend_from_slice(tokens);
        self.ends.push(self.tokens.len());
    }

    /// The last token pushed gets logits, for a job.
    fn rows_of(&mut self, job: usize, count: usize) {
        self.rows.push(self.tokens.len() as u32 - 1);
        match self.jobs.last_mut() {
            Some((last, rows)) if *last == job => *rows += count,
            _ => self.jobs.push((job, count)),
        }
    }

    /// Whether every sequence gets one token and its logits, so that the step differs in numbers alone from others of as many sequences.
    fn has_a_token_of_each(&self) -> bool {
        self.tokens.len() == self.writing.len() && self.rows.len() == self.writing.len()
    }

    fn ranges(&self) -> impl Iterator<Item = &[u32]> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        starts.zip(&self.ends).map(|(start, end)| &self.tokens[start..*end])
    }
}

fn last(tokens: &[u32]) -> &[u32] {
    &tokens[tokens.len().saturating_sub(1)..]
}
