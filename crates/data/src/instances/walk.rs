//! How a document is cut into chunks, each of which becomes an instance. It runs on the lengths of sentences alone: what
//! is drawn for random second segments, for truncation and for masks never moves its cursor, so an epoch can be counted
//! without reading a single piece.

use std::ops::Range;

use henson_text::Template;

use super::draws::{self, Copy};
use super::{Cut, InstanceSettings, LongSentences, Objective, Packing, Separators};
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
    /// The sentence that the first piece belongs to.
    pub(super) sentence: usize,
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
    /// The sentences that follow, which stand first: the chunk's own are the second segment.
    Swapped(Range<usize>),
    /// The sentences that follow, as a plain continuation that nothing is asked about.
    More(Range<usize>),
}

/// The share of ELECTRA's sequences that have only one segment, as texts of tasks do.
const ONE_SEGMENT: f64 = 0.1;

/// The least length that a short one of ELECTRA's sequences aims at.
const LEAST_TARGET: usize = 5;

/// How consecutive segments are cut.
#[derive(Clone, Copy, Debug)]
pub(super) struct Consecutive {
    /// The most pieces of a sequence, special tokens included.
    length: usize,
    /// How many special tokens stand around one segment, and around two.
    specials: [usize; 2],
    /// The share of sequences that aim at a shorter length.
    short_sequences: f64,
}

impl Consecutive {
    pub(super) fn new(settings: &InstanceSettings, template: &Template) -> Option<Self> {
        let specials = [template.single_specials(), template.pair_specials()];
        let (length, short_sequences) = (settings.sequence_length, settings.short_sequences);
        (settings.cut() == Cut::Consecutive).then_some(Self { length, specials, short_sequences })
    }
}

/// The chunks of one copy of a document, in order. Sentences without pieces count as not there; so do those of a damaged
/// shard that would end before the last one.
#[derive(Debug)]
pub(super) struct Walk {
    document: Document,
    copy: Copy,
    key: u64,
    pairs: bool,
    /// Whether consecutive segments are swapped, instead of joining random ones.
    swaps: bool,
    consecutive: Option<Consecutive>,
    /// Whether each segment of a pair is one sentence.
    sentence_pairs: bool,
    rules: SentenceRules,
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
        (room, rules, consecutive): (usize, SentenceRules, Option<Consecutive>),
        key: u64,
        copy: Copy,
        cursor: Cursor,
    ) -> Self {
        let mut target = room;
        let mut draws = draws::of_copy(key, copy);
        if draws::happens(&mut draws, settings.short_sequences) {
            target = 2 + draws.below(room as u32 - 1) as usize;
        }
        let (pairs, sentence_pairs) = (settings.cut() == Cut::Pairs, settings.packing == Packing::SentencePairs);
        let swaps = settings.objective == Objective::MlmSop;
        Self { document, copy, key, pairs, swaps, sentence_pairs, consecutive, rules, room, target, cursor }
    }

    /// BERT's pairs (create_pretraining_data.py, create_instances_from_document): sentences are collected until the
    /// target is reached or passed. A ends after a random one of them. B is the rest, or half of the time a part of
    /// another document, and then the rest is put back. A chunk of one sentence always has a random B. Of sentence pairs,
    /// two sentences are collected.
    ///
    /// ALBERT's (its own create_pretraining_data.py) differ in what becomes of that half: the two parts are swapped.
    fn pair(&mut self, reader: &mut Reader<'_>) -> Result<Option<Chunk>, DataError> {
        let begin = self.cursor;
        let (mut sentence, mut end, mut sentences) = (begin.sentence, begin.position, 0);
        let is_open = |end: usize, sentences: u32| match self.sentence_pairs {
            true => sentences < 2,
            false => sentences == 0 || end - begin.position < self.target,
        };
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
        let other = sentences == 1 || draws::happens(&mut draws, 0.5);
        let random = other && (sentences == 1 || !self.swaps);

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
            // One sentence is drawn in any case.
            Second::Random { target: if self.sentence_pairs { 0 } else { self.target } }
        } else {
            self.cursor = Cursor { sentence, position: end, chunk };
            if other { Second::Swapped(first_end..end) } else { Second::Next(first_end..end) }
        };
        let (number, sentence) = (begin.chunk, begin.sentence);
        Ok(Some(Chunk { number, sentence, first: begin.position..first_end, second }))
    }

    /// ELECTRA's segments (build_pretraining_dataset.py): sentences are collected until the target is reached or passed. The first one
    /// is A's, and so are those that keep A below half of the target; one that would not is, by a coin, A's last. The rest is B, and
    /// what does not fit is cut off at the end of each. With 10% all of it is A. The target is that of the sequence, 5 up to its
    /// whole length where it is a short one.
    ///
    /// There, a short sentence behind the first of B may still join A, whose text then has a gap; here the two are consecutive.
    fn consecutive(&mut self, reader: &mut Reader<'_>, cut: Consecutive) -> Result<Option<Chunk>, DataError> {
        let Consecutive { length, specials: [around_one, around_two], short_sequences } = cut;
        let begin = self.cursor;
        let mut draws = draws::of_chunk(self.key, self.copy, begin.chunk);
        let target = match draws::happens(&mut draws, short_sequences) && length > LEAST_TARGET {
            true => LEAST_TARGET + draws.below((length - LEAST_TARGET + 1) as u32) as usize,
            false => length,
        };
        let half = target.saturating_sub(around_two) / 2;
        let half = if draws::happens(&mut draws, ONE_SEGMENT) { usize::MAX } else { half };
        let (mut sentence, mut end, mut first_end) = (begin.sentence, begin.position, None);
        'sentences: while sentence < self.document.sentences() && end - begin.position < target {
            for &stop in reader.ends(&self.document, sentence)? {
                sentence += 1;
                let before = end - begin.position;
                end = end.max(stop as usize);
                let length = end - begin.position;
                // Sentences without pieces are not there.
                if first_end.is_none() && length > before {
                    let joins = before == 0 || length < half || (before < half && draws::happens(&mut draws, 0.5));
                    first_end = (!joins).then_some(begin.position + before);
                }
                if end - begin.position >= target {
                    break 'sentences;
                }
            }
        }
        if end == begin.position {
            return Ok(None);
        }
        reader.check(&self.document, end)?;
        let first_end = first_end.unwrap_or(end);
        let first = begin.position..first_end.min(begin.position + length - around_one);
        let room = length.saturating_sub(first.len() + around_two);
        let second = first_end..end.min(first_end + room);
        self.cursor = Cursor { sentence, position: end, chunk: begin.chunk + 1 };
        let second = if second.is_empty() { Second::None } else { Second::More(second) };
        Ok(Some(Chunk { number: begin.chunk, sentence: begin.sentence, first, second }))
    }

    /// Whole sentences until the target is reached or would be passed. One that is longer than the target stands
    /// alone; what becomes of one that does not even fit into a sequence, the rules say.
    fn single(&mut self, reader: &mut Reader<'_>) -> Result<Option<Chunk>, DataError> {
        let Cursor { sentence, position, chunk: number } = self.cursor;
        let from = (sentence, position);
        let found = whole_sentences(reader, &self.document, from, (self.target, self.room), self.rules)?;
        let (sentence, position) = found.next;
        self.cursor = Cursor { sentence, position, chunk: number + 1 };
        let Sentences { first, pieces, .. } = found;
        Ok((!pieces.is_empty()).then_some(Chunk { number, sentence: first, first: pieces, second: Second::None }))
    }

    /// The next chunk, if there is one.
    pub(super) fn next(&mut self, reader: &mut Reader<'_>) -> Result<Option<Chunk>, DataError> {
        match self.consecutive {
            Some(cut) => self.consecutive(reader, cut),
            None if self.pairs => self.pair(reader),
            None => self.single(reader),
        }
    }
}

/// How sentences are put into single segments.
#[derive(Clone, Copy, Debug)]
pub(super) struct SentenceRules {
    long: LongSentences,
    /// What stands between two sentences, if anything.
    pub(super) separator: Option<u32>,
}

impl SentenceRules {
    pub(super) fn new(settings: &InstanceSettings, separator: u32) -> Self {
        let separator = (settings.separators == Separators::Sentences).then_some(separator);
        Self { long: settings.long_sentences, separator }
    }

    /// What a border between sentences takes.
    pub(super) fn gap(self) -> usize {
        usize::from(self.separator.is_some())
    }
}

/// Whole sentences of a document that follow each other, or a part of a long one.
pub(super) struct Sentences {
    /// The sentence that the first piece belongs to.
    pub(super) first: usize,
    pub(super) pieces: Range<usize>,
    /// How many separators stand among them.
    pub(super) gaps: usize,
    /// The sentence and the piece that come next.
    pub(super) next: (usize, usize),
}

/// The whole sentences from (sentence, piece) on that have room in `target` pieces. Where even the first is longer than that,
/// it is taken nevertheless if it has no more than `alone` pieces; what becomes of a longer one is a rule. Where `alone` is 0,
/// nothing is taken then.
pub(super) fn whole_sentences(
    reader: &mut Reader<'_>,
    document: &Document,
    (mut sentence, mut begin): (usize, usize),
    (target, alone): (usize, usize),
    rules: SentenceRules,
) -> Result<Sentences, DataError> {
    let (mut first, mut end, mut gaps) = (sentence, begin, 0);
    let mut next = None;
    'sentences: while sentence < document.sentences() && end - begin + gaps < target {
        for &stop in reader.ends(document, sentence)? {
            let stop = stop as usize;
            let gap = if end > begin && stop > end { rules.gap() } else { 0 };
            let length = stop.saturating_sub(begin) + gaps + gap;
            if end == begin && length > target.max(alone) {
                if rules.long == LongSentences::Drop && alone > 0 {
                    sentence += 1;
                    (first, begin, end) = (sentence, stop, stop);
                    continue;
                }
                end = begin + alone;
                if rules.long == LongSentences::Cut && alone > 0 {
                    next = Some((sentence + 1, stop));
                }
                break 'sentences;
            }
            if end > begin && length > target {
                break 'sentences;
            }
            (end, gaps) = (end.max(stop), gaps + gap);
            sentence += 1;
            if end - begin + gaps >= target {
                break;
            }
        }
    }
    let next = next.unwrap_or((sentence, end));
    reader.check(document, next.1)?;
    Ok(Sentences { first, pieces: begin..end, gaps, next })
}

/// Where the sentences of [`read_sentences`]'s pieces begin, counted from the `base` on: the first where the pieces do. A separator
/// belongs to the sentence before it.
pub(super) fn sentence_starts(
    reader: &mut Reader<'_>,
    document: &Document,
    (mut sentence, pieces): (usize, Range<usize>),
    separator: Option<u32>,
    (base, starts): (usize, &mut Vec<usize>),
) -> Result<(), DataError> {
    let (mut begin, mut gaps) = (pieces.start, 0);
    while begin < pieces.end && sentence < document.sentences() {
        let end = reader.sentence_end(document, sentence)?.min(pieces.end);
        if end > begin {
            gaps += usize::from(separator.is_some() && begin > pieces.start);
            starts.push(base + begin - pieces.start + gaps);
            begin = end;
        }
        sentence += 1;
    }
    Ok(())
}

/// Appends pieces of a document, with the rules' separator between those of different sentences. `sentence` is that of the
/// first of them.
pub(super) fn read_sentences(
    reader: &mut Reader<'_>,
    document: &Document,
    (mut sentence, pieces): (usize, Range<usize>),
    separator: Option<u32>,
    ids: &mut Vec<u32>,
) -> Result<(), DataError> {
    let Some(separator) = separator else { return reader.read(document, pieces, ids) };
    let mut begin = pieces.start;
    while begin < pieces.end && sentence < document.sentences() {
        let end = reader.sentence_end(document, sentence)?.min(pieces.end);
        if end > begin {
            if begin > pieces.start {
                ids.push(separator);
            }
            reader.read(document, begin..end, ids)?;
            begin = end;
        }
        sentence += 1;
    }
    Ok(())
}
