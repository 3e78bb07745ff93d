//! Single segments across documents: all documents in a row, with a `[SEP]` before each but the first, cut once into
//! blocks of one length. Only the last may be shorter.

use crate::{Corpus, DataError, Reader};

use super::GROUP;
use super::weights::Weights;

/// Where blocks begin and end. Memory: 8 bytes for every 64 documents.
#[derive(Debug)]
pub(super) struct Blocks {
    /// Where every 64th document begins in the row.
    starts: Vec<u64>,
    /// How long the row is.
    total: u64,
    room: u64,
    /// Where each source ends in the row.
    source_ends: Vec<u64>,
}

impl Blocks {
    pub(super) fn new(corpus: &Corpus, weights: &Weights, room: usize) -> Result<Self, DataError> {
        let mut reader = corpus.reader();
        let mut blocks = Self { starts: Vec::new(), total: 0, room: room as u64, source_ends: Vec::new() };
        for number in 0..corpus.documents() {
            if number.is_multiple_of(GROUP) {
                blocks.starts.push(blocks.total);
            }
            while weights.source_of(number) > blocks.source_ends.len() {
                blocks.source_ends.push(blocks.total);
            }
            blocks.total += extent(&mut reader, weights, number, blocks.total)?;
        }
        blocks.source_ends.resize(weights.sources(), blocks.total);
        Ok(blocks)
    }

    pub(super) fn count(&self) -> usize {
        self.total.div_ceil(self.room) as usize
    }

    /// The source of a block's first piece.
    pub(super) fn source_of(&self, block: usize) -> usize {
        let position = block as u64 * self.room;
        self.source_ends.partition_point(|end| *end <= position)
    }

    /// Appends a block's pieces and returns the document of the first of them. A separator that would be the first or
    /// the last is left out: there a special piece stands anyway.
    pub(super) fn read(
        &self,
        reader: &mut Reader<'_>,
        weights: &Weights,
        separator: u32,
        block: usize,
        ids: &mut Vec<u32>,
    ) -> Result<usize, DataError> {
        let begin = block as u64 * self.room;
        let end = (begin + self.room).min(self.total);
        let group = self.starts.partition_point(|start| *start <= begin).saturating_sub(1);
        let (mut number, mut start) = (group * GROUP, self.starts[group]);
        let mut first = None;
        while start < end {
            let extent = extent(reader, weights, number, start)?;
            let separators = u64::from(start > 0);
            let (from, to) = (begin.max(start), end.min(start + extent));
            if from < to {
                if from < start + separators && from > begin && from + 1 < end {
                    ids.push(separator);
                }
                let from = from.max(start + separators);
                if from < to {
                    first.get_or_insert(number);
                    let origin = start + separators;
                    let document = reader.document(number)?;
                    reader.read(&document, (from - origin) as usize..(to - origin) as usize, ids)?;
                }
            }
            start += extent;
            number += 1;
        }
        Ok(first.unwrap_or(number))
    }
}

/// How much of the row a document takes that begins at `start`, its separator included.
fn extent(reader: &mut Reader<'_>, weights: &Weights, number: usize, start: u64) -> Result<u64, DataError> {
    let length = reader.document(number)?.len() as u64;
    let absent = length == 0 || weights.of_source(weights.source_of(number)) == 0.0;
    Ok(if absent { 0 } else { length + u64::from(start > 0) })
}
