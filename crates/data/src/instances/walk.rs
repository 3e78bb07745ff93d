//! How a document is cut into chunks, each of which becomes an instance. It runs on the lengths of sentences alone: what
//! is drawn for random second segments, for truncation and for masks never moves its cursor, so an epoch can be counted
//! without reading a single piece.

use std::ops::Range;

use super::draws::{self, Copy};
use super::{Cut, InstanceSettings};
use crate::{DataError, Document, Reader};

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
pub(super) struct Walk {
    document: Document,
    copy: Copy,
    key: u64,
    pairs: bool,
    /// The most pieces of a chunk of single segments.
    room: usize,
    /// The length that chunks aim at.
    target: usize,
    pub(super) cursor: Cursor,
}

impl Walk {
    /// Goes on at `cursor`, or begins with the default one.
    pub(super) fn new(
        document: Document,
        settings: &InstanceSettings,
        room: usize,
        key: u64,
        copy: Copy,
        cursor: Cursor,
    ) -> Self {
        let mut target = room;
        let mut draws = draws::of_copy(key, copy);
        if draws::happens(&mut draws, settings.short_sequences) {
            target = 2 + draws.below(room as u32 - 1) as usize;
        }
        Self { document, copy, key, pairs: settings.cut() == Cut::Pairs, room, target, cursor }
    }

    /// BERT's pairs (create_pretraining_data.py, create_instances_from_document): sentences are collected until the
    /// target is reached or passed. A ends after a random one of them. B is the rest, or half of the time a part of
    /// another document, and then the rest is put back. A chunk of one sentence always has a random B.
    fn pair(&mut self, reader: &mut Reader<'_>) -> Result<Option<Chunk>, DataError> {
        let begin = self.cursor;
        let (mut sentence, mut end, mut sentences) = (begin.sentence, begin.position, 0);
        let is_open = |end: usize, sentences: u32| sentences == 0 || end - begin.position < self.target;
        while sentence < self.document.sentences() && is_open(end, sentences) {
            for &stop in reader.ends(&self.document, sentence)? {
                sentence += 1;
                if stop as usize > end {
                    sentences += 1;
                    end = stop as usize;
                    if !is_open(end, sentences) {
                        break;
                    }
                }
            }
        }
        if sentences == 0 {
            return Ok(None);
        }
        reader.check(&self.document, end)?;
        let mut draws = draws::of_chunk(self.key, self.copy, begin.chunk);
        let of_first = if sentences >= 2 { 1 + draws.below(sentences - 1) } else { 1 };
        let random = sentences == 1 || draws::happens(&mut draws, 0.5);

        let (mut after_first, mut first_end, mut found) = (begin.sentence, begin.position, 0);
        while found < of_first && after_first < self.document.sentences() {
            for &stop in reader.ends(&self.document, after_first)? {
                after_first += 1;
                if stop as usize > first_end {
                    found += 1;
                    first_end = stop as usize;
                    if found == of_first {
                        break;
                    }
                }
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
        Ok(Some(Chunk { number: begin.chunk, first: begin.position..first_end, second }))
    }

    /// Whole sentences until the target is reached or would be passed. One that is longer than the target stands
    /// alone; one that does not even fit into a sequence is cut, and the next chunk goes on with its rest.
    fn single(&mut self, reader: &mut Reader<'_>) -> Result<Option<Chunk>, DataError> {
        let Cursor { sentence, position, chunk } = self.cursor;
        let (sentence, end) = whole_sentences(reader, &self.document, (sentence, position), self.target, self.room)?;
        if end == position {
            return Ok(None);
        }
        self.cursor = Cursor { sentence, position: end, chunk: chunk + 1 };
        Ok(Some(Chunk { number: chunk, first: position..end, second: Second::None }))
    }

    /// The next chunk, if there is one.
    pub(super) fn next(&mut self, reader: &mut Reader<'_>) -> Result<Option<Chunk>, DataError> {
        if self.pairs { self.pair(reader) } else { self.single(reader) }
    }
}

/// How far whole sentences from (sentence, piece) on reach within `target` pieces, as (sentence, piece). Where even the
/// first is longer than that, it is taken nevertheless, but of it at most `alone` pieces.
pub(super) fn whole_sentences(
    reader: &mut Reader<'_>,
    document: &Document,
    (mut sentence, begin): (usize, usize),
    target: usize,
    alone: usize,
) -> Result<(usize, usize), DataError> {
    let mut end = begin;
    'sentences: while sentence < document.sentences() && end - begin < target {
        for &stop in reader.ends(document, sentence)? {
            let length = (stop as usize).saturating_sub(begin);
            if end == begin && length > target.max(alone) {
                end = begin + alone;
                break 'sentences;
            }
            if end > begin && length > target {
                break 'sentences;
            }
            end = end.max(stop as usize);
            sentence += 1;
            if end - begin >= target {
                break;
            }
        }
    }
    reader.check(document, end)?;
    Ok((sentence, end))
}
