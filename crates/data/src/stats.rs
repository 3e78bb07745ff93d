//! What a corpus is like: how much there is, how long documents and sentences are, how much is unknown, and how full
//! sequences would be.
//!
//! How full they would be is computed from lengths alone, without the short sequences and random segments that
//! [`crate::Instances`] draws: what the settings could reach, not a count of what they gave.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use henson_text::Template;
use serde::Serialize;

use crate::shard::Counts;
use crate::{Corpus, Cut, DataError};

/// What a corpus is like.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Stats {
    /// How much there is.
    pub counts: Counts,
    /// Unknown pieces; none where the tokenizer has no such piece.
    pub unknown: Option<u64>,
    /// Pieces of a document.
    pub document_lengths: Lengths,
    /// Pieces of a sentence.
    pub sentence_lengths: Lengths,
    /// The same counts for each source.
    pub sources: Vec<SourceStats>,
    /// How full sequences would be, for each layout and length.
    pub packing: Vec<PackingStats>,
}

/// How long things are.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Lengths {
    /// The mean.
    pub mean: f64,
    /// So many are at most as long: 10, 50, 90 and 99 of a hundred.
    pub percentiles: [u64; 4],
    /// The longest.
    pub longest: u64,
    /// How many have 1, 2–3, 4–7, 8–15 pieces, and so on.
    pub histogram: Vec<u64>,
}

/// How much a source has.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SourceStats {
    /// Its name.
    pub name: String,
    /// Its weight.
    pub weight: f64,
    /// How much it has.
    pub counts: Counts,
    /// Unknown pieces.
    pub unknown: Option<u64>,
}

/// How full sequences would be.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PackingStats {
    /// How texts become sequences, here without chance.
    #[serde(rename = "arrangement")]
    pub cut: Cut,
    /// The most pieces of a sequence.
    pub sequence_length: usize,
    /// How many sequences there would be in an epoch.
    pub sequences: u64,
    /// How full they would be, special pieces included; 1 is full.
    pub fullness: f64,
    /// The share of pieces that would be cut off.
    #[serde(rename = "cut")]
    pub cut_off: f64,
}

/// Reads all of a corpus. `template` says how many special tokens sequences have, `unknown` is the id of the unknown piece. `progress` hears of documents that were read; where
/// it returns false, this stops.
pub fn stats(
    corpus: &Corpus,
    template: &Template,
    unknown: Option<u32>,
    sequence_lengths: &[usize],
    progress: &mut dyn FnMut(usize) -> bool,
) -> Result<Stats, DataError> {
    let (mut documents, mut sentences) = (Tally::default(), Tally::default());
    let cuts = [Cut::Pairs, Cut::Documents, Cut::FullSentences, Cut::Blocks];
    let mut packings: Vec<Packer> = Vec::new();
    for &length in sequence_lengths {
        packings.extend(cuts.map(|cut| Packer::new(cut, cut.specials(template), length)));
    }
    let mut reader = corpus.reader();
    let (mut sources, mut ids, mut lengths) = (Vec::new(), Vec::new(), Vec::new());
    for source in corpus.sources() {
        let mut counts = Counts::default();
        let mut unknowns = unknown.map(|_| 0);
        for number in source.documents.clone() {
            let document = reader.document(number)?;
            lengths.clear();
            for sentence in 0..document.sentences() {
                lengths.push(reader.sentence(&document, sentence)?.len() as u64);
            }
            documents.add(document.len() as u64);
            lengths.iter().for_each(|&length| sentences.add(length));
            packings.iter_mut().for_each(|packing| packing.add(&lengths));
            counts.add(Counts { documents: 1, sentences: lengths.len() as u64, pieces: document.len() as u64 });
            if let Some((unknown, count)) = unknown.zip(unknowns.as_mut()) {
                ids.clear();
                reader.read(&document, 0..document.len(), &mut ids)?;
                *count += ids.iter().filter(|&&id| id == unknown).count() as u64;
            }
            if number.is_multiple_of(1 << 10) && !progress(number) {
                return Err(DataError::Stopped);
            }
        }
        sources.push(SourceStats { name: source.name.clone(), weight: source.weight, counts, unknown: unknowns });
    }
    let mut counts = Counts::default();
    sources.iter().for_each(|source| counts.add(source.counts));
    Ok(Stats {
        counts,
        unknown: unknown.map(|_| sources.iter().filter_map(|source| source.unknown).sum()),
        document_lengths: documents.lengths(),
        sentence_lengths: sentences.lengths(),
        sources,
        packing: packings.into_iter().map(Packer::finish).collect(),
    })
}

impl Lengths {
    /// The lengths that a place of the histogram counts.
    pub fn bin(place: usize) -> RangeInclusive<u64> {
        1 << place..=(1 << place) + ((1_u64 << place) - 1)
    }
}

/// How many have which length.
#[derive(Default)]
struct Tally {
    counts: BTreeMap<u64, u64>,
}

impl Tally {
    fn add(&mut self, length: u64) {
        *self.counts.entry(length).or_default() += 1;
    }

    fn lengths(&self) -> Lengths {
        let number: u64 = self.counts.values().sum();
        let total: u64 = self.counts.iter().map(|(length, count)| length * count).sum();
        let Some((&longest, _)) = self.counts.last_key_value() else { return Lengths::default() };
        let percentile = |percent: u64| {
            let mut seen = 0;
            let reached = |count: &u64| {
                seen += count;
                seen * 100 >= number * percent
            };
            let mut counts = self.counts.iter();
            let mut reached = reached;
            counts.find(|(_, count)| reached(count)).map_or(longest, |(&length, _)| length)
        };
        let mut histogram = vec![0; longest.max(1).ilog2() as usize + 1];
        for (&length, count) in &self.counts {
            // A damaged document may be empty.
            histogram[length.max(1).ilog2() as usize] += count;
        }
        let percentiles = [10, 50, 90, 99].map(percentile);
        Lengths { mean: total as f64 / number.max(1) as f64, percentiles, longest, histogram }
    }
}

struct Packer {
    of: Cut,
    specials: u64,
    length: usize,
    sequences: u64,
    /// Pieces of the sequence that is not full yet: a cut within documents has none between two documents.
    open: u64,
    /// Pieces that are kept and that are cut off.
    kept: u64,
    cut_off: u64,
}

impl Packer {
    fn new(of: Cut, specials: usize, length: usize) -> Self {
        Self { of, specials: specials as u64, length, sequences: 0, open: 0, kept: 0, cut_off: 0 }
    }

    /// Pieces of text in a sequence.
    fn room(&self) -> u64 {
        (self.length as u64).saturating_sub(self.specials).max(1)
    }

    fn add(&mut self, sentences: &[u64]) {
        let room = self.room();
        match self.of {
            Cut::Pairs | Cut::Consecutive => {
                for sentence in sentences {
                    self.open += sentence;
                    if self.open >= room {
                        self.cut_off += self.open - room;
                        self.open = room;
                        self.close();
                    }
                }
                self.close();
            }
            Cut::Documents => {
                self.whole_sentences(sentences, 0);
                self.close();
            }
            Cut::FullSentences => self.whole_sentences(sentences, u64::from(self.open > 0)),
            // With a separator after each document.
            Cut::Blocks => self.kept += sentences.iter().sum::<u64>() + 1,
        }
    }

    /// As many as fit, after a separator where there is one.
    fn whole_sentences(&mut self, sentences: &[u64], mut separator: u64) {
        let room = self.room();
        for &sentence in sentences {
            if self.open + separator + sentence > room {
                self.close();
                self.open = sentence;
                // One that does not fit is divided.
                while self.open > room {
                    let rest = self.open - room;
                    self.open = room;
                    self.close();
                    self.open = rest;
                }
            } else {
                self.open += separator + sentence;
            }
            separator = 0;
        }
    }

    /// Ends a sequence.
    fn close(&mut self) {
        self.sequences += u64::from(self.open > 0);
        self.kept += std::mem::take(&mut self.open);
    }

    fn finish(mut self) -> PackingStats {
        self.close();
        if self.of == Cut::Blocks {
            self.kept = self.kept.saturating_sub(1);
            self.sequences = self.kept.div_ceil(self.room());
        }
        let places = self.sequences * self.length.max(1) as u64;
        let share = |part: u64, whole: u64| if whole == 0 { 0.0 } else { part as f64 / whole as f64 };
        PackingStats {
            cut: self.of,
            sequence_length: self.length,
            sequences: self.sequences,
            fullness: share(self.kept + self.specials * self.sequences, places),
            cut_off: share(self.cut_off, self.kept + self.cut_off),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Vocabulary, WordMarks};

    /// Two documents: sentences of 3, 2 and 4 pieces, and one of 12.
    fn corpus() -> Corpus {
        let words = WordMarks::Begin(vec![true; 10]);
        let vocabulary = Vocabulary {
            size: 10,
            cls: 2,
            sep: 3,
            mask: Some(4),
            special: vec![1, 2, 3, 4],
            words,
            sentinels: Vec::new(),
        };
        let long = (0..12).map(|i| if i < 3 { 1 } else { 5 }).collect();
        Corpus::from_documents(vocabulary, &[vec![vec![5; 3], vec![6; 2], vec![7; 4]], vec![long]])
    }

    fn bert() -> Template {
        Template::bert(2, 3)
    }

    #[test]
    fn counts_and_lengths() {
        let stats = stats(&corpus(), &bert(), Some(1), &[], &mut |_| true).unwrap();
        assert_eq!(stats.counts, Counts { documents: 2, sentences: 4, pieces: 21 });
        assert_eq!((stats.unknown, stats.sources[0].unknown), (Some(3), Some(3)));
        let Lengths { mean, percentiles, longest, histogram } = stats.sentence_lengths;
        assert_eq!((mean, longest), (5.25, 12));
        assert_eq!(percentiles, [2, 3, 12, 12]);
        assert_eq!(histogram, [0, 2, 1, 1]);
        assert_eq!((Lengths::bin(0), Lengths::bin(3)), (1..=1, 8..=15));
        assert_eq!(stats.document_lengths.percentiles, [9, 9, 12, 12]);
        assert!(matches!(super::stats(&corpus(), &bert(), None, &[], &mut |_| false), Err(DataError::Stopped)));
    }

    #[test]
    fn packing() {
        let stats = stats(&corpus(), &bert(), None, &[8], &mut |_| true).unwrap();
        let [pairs, documents, full_sentences, blocks] = &stats.packing[..] else { panic!() };
        // Room for 5: 3 + 2 and 4; 12 loses 7.
        assert_eq!((pairs.sequences, pairs.fullness), (3, (5 + 4 + 5 + 9) as f64 / 24.0));
        assert_eq!(pairs.cut_off, 7.0 / 21.0);
        // Room for 6: 3 + 2, 4; 6 + 6.
        assert_eq!((documents.sequences, documents.fullness, documents.cut_off), (4, (21 + 8) as f64 / 32.0, 0.0));
        // 3 + 2, then 4; 12 does not fit beside it. Of shorter ones two share a sequence.
        assert_eq!((full_sentences.sequences, full_sentences.fullness), (4, (21 + 8) as f64 / 32.0));
        let mut packer = Packer::new(Cut::FullSentences, 2, 12);
        [&[3, 2][..], &[4], &[5]].into_iter().for_each(|sentences| packer.add(sentences));
        let PackingStats { sequences, fullness, .. } = packer.finish();
        assert_eq!((sequences, fullness), (2, (5 + 1 + 4 + 5 + 4) as f64 / 24.0));
        // Room for 4, since RoBERTa's pairs have a special token more: 5 loses 1, 12 loses 8.
        let roberta = super::stats(&corpus(), &Template::roberta(2, 3), None, &[8], &mut |_| true).unwrap();
        assert_eq!(roberta.packing[0].cut_off, 9.0 / 21.0);
        // 9, a separator, 12.
        assert_eq!((blocks.sequences, blocks.fullness), (4, (22 + 8) as f64 / 32.0));
    }
}
