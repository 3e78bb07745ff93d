//! How a document is cut into chunks, each of which becomes an instance. It runs on the lengths of sentences alone: what
//! is drawn for random second segments, for truncation and for masks never moves its cursor, so an epoch can be counted
//! without reading a single piece.

use std::ops::Range;

use super::draws::{self, Copy};
use super::settings::{InstanceSettings, Objective};
use crate::Document;

/// Where a walk stands in its document: everything that is needed to go on from there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Cursor {
    /// The sentence that comes next, or goes on.
    pub(super) sentence: usize,
    /// The piece that comes next.
    pub(super) position: usize,
    /// The number of the next chunk.
    pub(super) chunk: u32,
}

/// What an instance is made of. Sentences lie side by side, so each segment is one range of the document's pieces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    /// Its number in its document.
    pub(super) number: u32,
    pub(super) first: Range<usize>,
    pub(super) second: Second,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Second {
    /// There is only one segment.
    None,
    /// The sentences that follow.
    Next(Range<usize>),
    /// Sentences of another document, until the two segments together have this length.
    Random { target: usize },
}

/// The chunks of one copy of a document, in order. Sentences without pieces count as not there; so do those of a damaged
/// shard that would end before the last one.
#[derive(Debug)]
pub(super) struct Walk<'a> {
    document: Document<'a>,
    copy: Copy,
    key: u64,
    pairs: bool,
    /// The most pieces of a chunk of single segments.
    room: usize,
    /// The length that chunks aim at.
    target: usize,
    pub(super) cursor: Cursor,
}

impl<'a> Walk<'a> {
    /// Goes on at `cursor`, or begins with the default one.
    pub(super) fn new(
        document: Document<'a>,
        settings: &InstanceSettings,
        key: u64,
        copy: Copy,
        cursor: Cursor,
    ) -> Self {
        let room = settings.room();
        let mut target = room;
        let mut draws = draws::of_copy(key, copy);
        if draws::happens(&mut draws, settings.short_sequences) {
            target = 2 + draws.below(room as u32 - 1) as usize;
        }
        Self { document, copy, key, pairs: settings.objective == Objective::MlmNsp, room, target, cursor }
    }

    /// BERT's pairs (create_pretraining_data.py, create_instances_from_document): sentences are collected until the
    /// target is reached or passed. A ends after a random one of them. B is the rest, or half of the time a part of
    /// another document, and then the rest is put back. A chunk of one sentence always has a random B.
    fn pair(&mut self) -> Option<Chunk> {
        let begin = self.cursor;
        let (mut sentence, mut end, mut sentences) = (begin.sentence, begin.position, 0);
        while sentence < self.document.sentences() && (sentences == 0 || end - begin.position < self.target) {
            let stop = self.document.sentence(sentence).end;
            sentence += 1;
            if stop > end {
                sentences += 1;
                end = stop;
            }
        }
        if sentences == 0 {
            return None;
        }
        let mut draws = draws::of_chunk(self.key, self.copy, begin.chunk);
        let of_first = if sentences >= 2 { 1 + draws.below(sentences - 1) } else { 1 };
        let random = sentences == 1 || draws::happens(&mut draws, 0.5);

        let (mut after_first, mut first_end, mut found) = (begin.sentence, begin.position, 0);
        while found < of_first {
            let stop = self.document.sentence(after_first).end;
            after_first += 1;
            if stop > first_end {
                found += 1;
                first_end = stop;
            }
        }
        let chunk = begin.chunk + 1;
        let second = if random {
            self.cursor = Cursor { sentence: after_first, position: first_end, chunk };
            Second::Random { target: self.target }
        } else {
            self.cursor = Cursor { sentence, position: end, chunk };
            Second::Next(first_end..end)
        };
        Some(Chunk { number: begin.chunk, first: begin.position..first_end, second })
    }

    /// Whole sentences until the target is reached or would be passed. One that is longer than the target stands
    /// alone; one that does not even fit into a sequence is cut, and the next chunk goes on with its rest.
    fn single(&mut self) -> Option<Chunk> {
        let begin = self.cursor;
        let (mut sentence, mut end) = (begin.sentence, begin.position);
        while sentence < self.document.sentences() && end - begin.position < self.target {
            let stop = self.document.sentence(sentence).end;
            let length = stop.saturating_sub(begin.position);
            if end == begin.position && length > self.room {
                end = begin.position + self.room;
                break;
            }
            if end > begin.position && length > self.target {
                break;
            }
            end = end.max(stop);
            sentence += 1;
        }
        if end == begin.position {
            return None;
        }
        self.cursor = Cursor { sentence, position: end, chunk: begin.chunk + 1 };
        Some(Chunk { number: begin.chunk, first: begin.position..end, second: Second::None })
    }
}

impl Iterator for Walk<'_> {
    type Item = Chunk;

    fn next(&mut self) -> Option<Chunk> {
        if self.pairs { self.pair() } else { self.single() }
    }
}
