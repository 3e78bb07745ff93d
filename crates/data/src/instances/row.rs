//! Single segments across documents: all documents in a row, with a separator between them, cut once and for all epochs.
//!
//! Either into blocks of one length, of which only the last may be shorter, or into as many whole sentences as fit:
//! FULL-SENTENCES of RoBERTa (Liu and others, 2019, section 4.2). There, too, a sentence that does not fit into a sequence
//! is cut, and the next sequence goes on with its rest. fairseq also ends every line of its input with a separator; here,
//! as in the paper's text, one stands between documents alone.

use std::ops::Range;

use super::walk::whole_sentences;
use super::weights::Weights;
use crate::{Corpus, DataError, Document, Reader};

/// How many sequences lie between two marks. One is found by a walk over half of them on average.
const BETWEEN_MARKS: usize = 16;

/// Where sequences begin and end. Memory: two bytes a sequence.
#[derive(Debug)]
pub(super) struct Row {
    whole_sentences: bool,
    /// The most pieces of a sequence.
    room: usize,
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
    pieces: Range<usize>,
    /// Whether a separator stands before it.
    separated: bool,
}

impl Row {
    pub(super) fn new(
        corpus: &Corpus,
        weights: &Weights,
        room: usize,
        whole_sentences: bool,
    ) -> Result<Self, DataError> {
        let mut row = Self { whole_sentences, room, marks: Vec::new(), count: 0, source_ends: Vec::new() };
        let mut documents = Documents { reader: &mut corpus.reader(), weights, end: corpus.documents() };
        let (mut next, mut parts) = (documents.from(0)?.map(|start| Start { separated: true, ..start }), Vec::new());
        while let Some(start) = next {
            next = row.walk(start, &mut documents, &mut parts)?;
            // Only a damaged document has pieces and no sentences.
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

    /// Appends a sequence's pieces and returns the document of the first of them.
    pub(super) fn read(
        &self,
        reader: &mut Reader<'_>,
        corpus: &Corpus,
        weights: &Weights,
        sequence: usize,
        ids: &mut Vec<u32>,
    ) -> Result<usize, DataError> {
        let mut documents = Documents { reader, weights, end: corpus.documents() };
        let (mut next, mut parts) = (self.marks.get(sequence / BETWEEN_MARKS).copied(), Vec::new());
        for _ in 0..=sequence % BETWEEN_MARKS {
            let Some(start) = next else { return Err(corpus.changed()) };
            next = self.walk(start, &mut documents, &mut parts)?;
        }
        for part in &parts {
            if part.separated {
                ids.push(corpus.vocabulary().sep);
            }
            documents.reader.read(&part.document, part.pieces.clone(), ids)?;
        }
        parts.first().map(|part| part.number).ok_or_else(|| corpus.changed())
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
            let separated = !parts.is_empty();
            let (sentence, end) = if self.whole_sentences {
                let (target, alone) = if separated { (left - 1, 0) } else { (left, left) };
                whole_sentences(documents.reader, &document, (start.sentence, start.position), target, alone)?
            } else {
                if !start.separated {
                    // A separator that would be the first or the last of a block is left out, as a special token stands
                    // there anyway; its place is not filled.
                    left -= 1;
                    start.separated = true;
                }
                (0, document.len().min(start.position + left))
            };
            if end > start.position {
                let pieces = start.position..end;
                left -= pieces.len() + usize::from(separated && self.whole_sentences);
                parts.push(Part { number: start.document, document, pieces, separated });
            }
            let ended = if self.whole_sentences { sentence == document.sentences() } else { end == document.len() };
            if !ended {
                return Ok(Some(Start { sentence, position: end, ..start }));
            }
            let Some(next) = documents.from(start.document + 1)? else { return Ok(None) };
            start = next;
            // Whole sentences need room for a separator and a piece; a block ends when it is full.
            if left <= usize::from(self.whole_sentences) {
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
