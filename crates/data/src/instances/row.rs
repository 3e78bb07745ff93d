//! Single segments across documents: all documents in a row, with a separator between them, cut once and for all epochs.
//!
//! Either into blocks of one length, of which only the last may be shorter, or into as many whole sentences as fit:
//! FULL-SENTENCES of RoBERTa (Liu and others, 2019, section 4.2). In the paper's text one separator stands between documents;
//! fairseq also ends every sentence with one, so that there are two between documents. Both are there ([`SentenceRules`]). In
//! neither does a separator of documents stand at the beginning or the end of a sequence, where the template has its own. Blocks
//! without a template are all of the text: a separator stands behind every document, wherever a block ends.

use std::ops::Range;

use super::walk::{SentenceRules, Sentences, read_sentences, sentence_starts, whole_sentences};
use super::weights::Weights;
use crate::{Corpus, DataError, Document, Reader};

/// How many sequences lie between two marks. One is found by a walk over half of them on average.
const BETWEEN_MARKS: usize = 16;

/// Where sequences begin and end. Memory: two bytes a sequence.
#[derive(Debug)]
pub(super) struct Row {
    /// None where it is cut into blocks.
    rules: Option<SentenceRules>,
    /// The most pieces of a sequence.
    room: usize,
    /// Whether blocks have separators at their beginning and end as well.
    whole: bool,
    /// Where every 16th sequence begins.
    marks: Vec<Start>,
    count: usize,
    /// For each source, how many sequences begin in it or before it.
    source_ends: Vec<usize>,
}

/// Where a sequence begins.
#[derive(Clone, Copy, Debug)]
struct Start {
    document: usize,
    /// The sentence that comes next, or goes on; of blocks always 0.
    sentence: usize,
    /// The piece that comes next.
    position: usize,
    /// Whether the separator before the document has its place in the block before.
    separated: bool,
}

/// A part of a sequence.
struct Part {
    number: usize,
    document: Document,
    /// The sentence that the first piece belongs to; of blocks always 0.
    sentence: usize,
    pieces: Range<usize>,
    /// Whether a separator stands before it.
    separated: bool,
}

impl Row {
    pub(super) fn new(
        corpus: &Corpus,
        weights: &Weights,
        (room, whole): (usize, bool),
        rules: Option<SentenceRules>,
    ) -> Result<Self, DataError> {
        let mut row = Self { rules, room, whole, marks: Vec::new(), count: 0, source_ends: Vec::new() };
        let mut documents = Documents { reader: &mut corpus.reader(), weights, end: corpus.documents() };
        let (mut next, mut parts) = (documents.from(0)?.map(|start| Start { separated: true, ..start }), Vec::new());
        while let Some(start) = next {
            next = row.walk(start, &mut documents, &mut parts)?;
            // The rest was dropped; or a damaged document has pieces and no sentences.
            let Some(first) = parts.first() else { break };
            if row.count.is_multiple_of(BETWEEN_MARKS) {
                row.marks.push(start);
            }
            row.source_ends.resize(weights.source_of(first.number), row.count);
            row.count += 1;
        }
        row.source_ends.resize(weights.sources(), row.count);
        Ok(row)
    }

    /// How many sequences.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// The source of a sequence's first piece.
    pub(super) fn source_of(&self, sequence: usize) -> usize {
        self.source_ends.partition_point(|end| *end <= sequence)
    }

    /// Appends a sequence's pieces and returns the document of the first of them; of whole sentences also where each begins, counted
    /// from the first of its pieces.
    pub(super) fn read(
        &self,
        reader: &mut Reader<'_>,
        corpus: &Corpus,
        weights: &Weights,
        sequence: usize,
        ids: &mut Vec<u32>,
        mut sentences: Option<&mut Vec<usize>>,
    ) -> Result<usize, DataError> {
        let mut documents = Documents { reader, weights, end: corpus.documents() };
        let (mut next, mut parts) = (self.marks.get(sequence / BETWEEN_MARKS).copied(), Vec::new());
        for _ in 0..=sequence % BETWEEN_MARKS {
            let Some(start) = next else { return Err(corpus.changed()) };
            next = self.walk(start, &mut documents, &mut parts)?;
        }
        let separator = self.rules.and_then(|rules| rules.separator);
        let first = ids.len();
        for part in &parts {
            if part.separated {
                ids.extend(std::iter::repeat_n(corpus.vocabulary().sep, self.border()));
            }
            let from = (part.sentence, part.pieces.clone());
            if let Some(starts) = sentences.as_deref_mut() {
                let place = (ids.len() - first, starts);
                sentence_starts(documents.reader, &part.document, from.clone(), separator, place)?;
            }
            read_sentences(documents.reader, &part.document, from, separator, ids)?;
        }
        parts.first().map(|part| part.number).ok_or_else(|| corpus.changed())
    }

    /// How many separators stand between two documents of a sequence.
    fn border(&self) -> usize {
        1 + self.rules.map_or(0, SentenceRules::gap)
    }

    /// Finds the parts of the sequence that begins at `start`; returns where the next begins.
    fn walk(
        &self,
        mut start: Start,
        documents: &mut Documents<'_, '_>,
        parts: &mut Vec<Part>,
    ) -> Result<Option<Start>, DataError> {
        parts.clear();
        let mut left = self.room;
        loop {
            let document = documents.reader.document(start.document)?;
            let separated = !parts.is_empty() || (self.whole && !start.separated);
            let found = if let Some(rules) = self.rules {
                let sizes = if separated { (left - self.border(), 0) } else { (left, left) };
                whole_sentences(documents.reader, &document, (start.sentence, start.position), sizes, rules)?
            } else {
                if !start.separated {
                    // Where blocks are not whole, a separator that would be the first or the last of one is left out, as a
                    // special token stands there anyway; its place is not filled.
                    left -= 1;
                    start.separated = true;
                }
                let end = document.len().min(start.position + left);
                Sentences { first: 0, pieces: start.position..end, gaps: 0, next: (0, end) }
            };
            let Sentences { first, pieces, gaps, next: (sentence, position) } = found;
            if !pieces.is_empty() || (self.whole && separated) {
                let border = if separated && self.rules.is_some() { self.border() } else { 0 };
                left -= pieces.len() + gaps + border;
                parts.push(Part { number: start.document, document, sentence: first, pieces, separated });
            }
            let ended = match self.rules {
                Some(_) => sentence == document.sentences(),
                None => position == document.len(),
            };
            if !ended {
                return Ok(Some(Start { sentence, position, ..start }));
            }
            let Some(next) = documents.from(start.document + 1)? else { return Ok(None) };
            start = next;
            // Whole sentences need room for the separators and a piece; a block ends when it is full.
            if left <= self.rules.map_or(0, |_| self.border()) {
                return Ok(Some(start));
            }
        }
    }
}

/// The documents of a row: those that have pieces and a weight.
struct Documents<'r, 'c> {
    reader: &'r mut Reader<'c>,
    weights: &'r Weights,
    end: usize,
}

impl Documents<'_, '_> {
    /// The beginning of the first of them from a number on.
    fn from(&mut self, number: usize) -> Result<Option<Start>, DataError> {
        for document in number..self.end {
            let weight = self.weights.of_source(self.weights.source_of(document));
            if weight > 0.0 && !self.reader.document(document)?.is_empty() {
                return Ok(Some(Start { document, sentence: 0, position: 0, separated: false }));
            }
        }
        Ok(None)
    }
}
