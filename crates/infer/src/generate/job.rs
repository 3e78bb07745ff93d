//! What is to be written, what is heard of it, and how far it is.

use henson_tensor::CachedSequence;

use super::GenerateSettings;
use super::beams::Beams;
use super::processors::Begun;

/// Tokens of a page of the cache.
pub(super) const PAGE: usize = 32;

/// What shall be written.
pub struct Job<'a> {
    /// What is continued; of an encoder-decoder, the source.
    pub prompt: Vec<u32>,
    /// The first tokens that an encoder-decoder's decoder reads, by default its start token; for others, more of the prompt.
    pub start: Vec<u32>,
    /// How.
    pub settings: GenerateSettings,
    /// What else ends a sequence. [`GenerateSettings::stop`] is a matter of texts, which a writer does not know.
    pub stop: Option<StopCheck<'a>>,
}

/// Whether new tokens end a sequence.
pub type StopCheck<'a> = Box<dyn Fn(&[u32]) -> bool + Send + 'a>;

/// A job in a [`Writer`](super::Writer).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub(super) u64);

/// Something that happened to a sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// The job.
    pub ticket: Ticket,
    /// Which of the job's sequences.
    pub sequence: usize,
    /// What.
    pub kind: EventKind,
}

/// What happened.
#[derive(Clone, Debug, PartialEq)]
pub enum EventKind {
    /// A token was chosen. Not of a beam search, where nothing is certain before its end.
    Token(TokenScore),
    /// The sequence is done.
    Finished(Written),
}

/// A token that was chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenScore {
    /// Its id.
    pub id: u32,
    /// ln P that the model gave it, before anything was changed by settings.
    pub logprob: f32,
    /// The likeliest tokens with theirs, as many as were asked for.
    pub alternatives: Vec<(u32, f32)>,
}

/// A sequence that is done.
#[derive(Clone, Debug, PartialEq)]
pub struct Written {
    /// The new tokens, an end token included.
    pub ids: Vec<u32>,
    /// The sum of ln P of its tokens, over their number to the power of the length penalty. A beam search adds what it compares: with
    /// penalties and forced tokens counted in.
    pub score: f32,
    /// Why it ended.
    pub why: FinishReason,
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// An end token.
    EndOfText,
    /// As long as it may get.
    Length,
    /// A stop string.
    Stop,
    /// The model's numbers were not finite.
    NotFinite,
}

/// What a job needs in the worst case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Need {
    pub(super) pages: usize,
    pub(super) source_pages: usize,
    pub(super) streams: usize,
}

impl Need {
    pub(super) fn parts(self) -> [usize; 3] {
        [self.pages, self.source_pages, self.streams]
    }

    pub(super) fn plus(self, other: Need) -> Need {
        let Need { pages, source_pages, streams } = other;
        let sum = |a: usize, b: usize| a.saturating_add(b);
        Need {
            pages: sum(self.pages, pages),
            source_pages: sum(self.source_pages, source_pages),
            streams: sum(self.streams, streams),
        }
    }

    pub(super) fn minus(self, other: Need) -> Need {
        let Need { pages, source_pages, streams } = other;
        Need {
            pages: self.pages - pages,
            source_pages: self.source_pages - source_pages,
            streams: self.streams - streams,
        }
    }

    pub(super) fn within(self, room: Need) -> bool {
        self.parts().iter().zip(room.parts()).all(|(need, room)| *need <= room)
    }
}

/// A job on its way.
pub(super) struct Active<'a> {
    pub(super) ticket: Ticket,
    /// The source of an encoder-decoder; empty for others.
    pub(super) source: Vec<u32>,
    /// What the decoder begins with.
    pub(super) begun: Vec<u32>,
    pub(super) settings: GenerateSettings,
    pub(super) stop: Option<StopCheck<'a>>,
    /// Maximum number of tokens of the decoder.
    pub(super) limit: usize,
    pub(super) need: Need,
    pub(super) source_place: Option<CachedSequence>,
    pub(super) state: State,
}

impl Active<'_> {
    /// Whether its next tokens are those with the largest logits, and nothing more is asked of these.
    pub(super) fn takes_the_largest(&self) -> bool {
        let Self { settings, begun, limit, .. } = self;
        let unchanged = |tokens: &[u32]| !Begun { tokens, first: begun.len(), limit: *limit }.is_changed_by(settings);
        let plain = settings.beams <= 1 && settings.sampling.is_none() && settings.logprobs.is_none();
        plain
            && match &self.state {
                State::Lines(lines) => lines.iter().all(|line| unchanged(&line.tokens)),
                State::Reading(..) => unchanged(begun),
                _ => false,
            }
    }
}

pub(super) enum State {
    /// So much of its beginning was read, into one place of the cache.
    Reading(usize, Option<CachedSequence>),
    /// Sequences that go their own ways.
    Lines(Vec<Line>),
    /// A beam search, with the places of its running sequences.
    Beams(Beams, Vec<CachedSequence>),
    Done,
}

/// A sequence of a greedy search, or one that is drawn.
pub(super) struct Line {
    pub(super) number: usize,
    pub(super) place: CachedSequence,
    pub(super) tokens: Vec<u32>,
    pub(super) log_probability: f64,
}

pub(super) fn pages_of(tokens: usize) -> usize {
    tokens.div_ceil(PAGE)
}

/// The last token of a sequence is never read. Its sequences share the full pages of what they begin with.
pub(super) fn need(source: usize, begun: usize, new: usize, settings: &GenerateSettings) -> Need {
    let shared = begun / PAGE;
    let own = pages_of(begun + new - 1) - shared;
    let streams = settings.sequences();
    Need { pages: shared.saturating_add(own.saturating_mul(streams)), source_pages: pages_of(source), streams }
}
