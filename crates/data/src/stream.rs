//! A corpus as running text, for recurrent networks that carry their states from step to step (Zaremba et al. 2014, Peters et al. 2018).
//!
//! All documents stand in a row, which is divided into B parts of equal length; a step reads the next L units of each. A unit is a
//! token, with an end behind each document, and predicts the next. Or it is a word, with marks around each sentence, and is read in both
//! directions: a part is read from its beginning to its end, where each word predicts the next, and at the same time from its end to its
//! beginning, where each predicts the one before it. Every epoch is the same: what a state has seen is the text as it stands.
//!
//! Deliberately absent: shuffling, weights of sources, threads. A step is a few reads.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use henson_text::split_words;

use crate::{Corpus, DataError, Document, Part, Reader};

/// A text of B rows, read L units at a time.
#[derive(Debug)]
pub struct Stream {
    corpus: Arc<Corpus>,
    /// B.
    rows: usize,
    /// L.
    length: usize,
    /// Where each segment ends, counted in units: documents of tokens, sentences of words.
    ends: Vec<u64>,
    words: Option<Words>,
}

/// What a stream of words needs besides.
#[derive(Debug)]
struct Words {
    list: Arc<WordList>,
    /// Bytes of a word that are read; more change nothing.
    max_bytes: usize,
    /// For each document the number of its first sentence, and all sentences.
    first_sentence: Vec<usize>,
}

/// A unit of a stream: a token, or what is read of a word and what it is as a target.
struct Unit {
    ids: Vec<u32>,
    target: u32,
}

impl Stream {
    /// Of tokens, each of which predicts the next.
    pub fn of_tokens(corpus: Arc<Corpus>, rows: usize, length: usize) -> Result<Self, DataError> {
        let (mut ends, mut end) = (Vec::with_capacity(corpus.documents()), 0);
        let mut reader = corpus.reader();
        for number in 0..corpus.documents() {
            let length = reader.document(number)?.len() as u64;
            // One that is empty has no end either.
            end += if length > 0 { length + 1 } else { 0 };
            ends.push(end);
        }
        drop(reader);
        Self { corpus, rows, length, ends, words: None }.checked()
    }

    /// Of the words of a corpus of bytes, read in both directions; `max_bytes` of each are read.
    pub fn of_words(
        corpus: Arc<Corpus>,
        list: Arc<WordList>,
        max_bytes: usize,
        rows: usize,
        length: usize,
    ) -> Result<Self, DataError> {
        let (mut ends, mut end, mut first_sentence) = (Vec::new(), 0, vec![0]);
        let mut reader = corpus.reader();
        for number in 0..corpus.documents() {
            let document = reader.document(number)?;
            for sentence in 0..document.sentences() {
                let words = split_words(&sentence_text(&mut reader, &document, sentence)?).len() as u64;
                end += if words > 0 { words + 2 } else { 0 };
                ends.push(end);
            }
            first_sentence.push(ends.len());
        }
        drop(reader);
        let words = Some(Words { list, max_bytes, first_sentence });
        Self { corpus, rows, length, ends, words }.checked()
    }

    /// The same text in other rows.
    pub fn with_rows(self, rows: usize) -> Result<Self, DataError> {
        Self { rows, ..self }.checked()
    }

    /// Refuses weights, and texts that are too short.
    fn checked(self) -> Result<Self, DataError> {
        check_weights(&self.corpus)?;
        if self.rows == 0 || self.length == 0 || self.steps() == 0 {
            let problem = format!(
                "{} rows of {} {} need {} and one more, and the text has {}: lower batch_size or sequence_length, or give more text",
                self.rows,
                self.length,
                if self.words.is_some() { "words" } else { "tokens" },
                self.rows * self.length,
                self.units()
            );
            return Err(DataError::InstanceSetting { name: "batch_size", value: self.rows.to_string(), problem });
        }
        Ok(self)
    }

    /// Units of the whole text, ends and marks included.
    pub fn units(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Units of a row from which others are predicted, in a whole number of steps.
    fn per_row(&self) -> u64 {
        self.units().saturating_sub(1) / (self.rows as u64).max(1)
    }

    /// Steps of an epoch. What is left of a row is not read.
    pub fn steps(&self) -> u64 {
        self.per_row() / (self.length as u64).max(1)
    }

    /// B.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// A step of an epoch in equal parts, each of some of the rows. Of words, a part has the rows that are read forwards, then those that
    /// are read backwards, and what it predicts is counted in words.
    pub fn step(&self, number: u64, parts: usize) -> Result<Vec<Part>, DataError> {
        debug_assert!(number < self.steps() && self.rows.is_multiple_of(parts));
        let (mut reader, in_part) = (self.corpus.reader(), self.rows / parts.max(1));
        let (all, length) = (self.steps() * self.length as u64, self.length as u64);
        let mut made = Vec::with_capacity(parts);
        for first in (0..self.rows).step_by(in_part.max(1)) {
            let directions = if self.words.is_some() { 2 } else { 1 };
            let mut part = Part { first_number: (directions * first) as u32, ..Part::default() };
            for row in first..first + in_part {
                let start = row as u64 * self.per_row() + number * length;
                let units = self.read(&mut reader, start..start + length + 1)?;
                part.push(&units[..units.len() - 1], units[1..].iter());
            }
            for row in (first..first + in_part).filter(|_| directions == 2) {
                let end = row as u64 * self.per_row() + all + 1 - number * length;
                let units = self.read(&mut reader, end - length - 1..end)?;
                part.push(&units[1..], units.iter());
            }
            part.rows = (0..part.targets.len() as u32).collect();
            made.push(part);
        }
        Ok(made)
    }

    /// The units at these places of the text.
    fn read(&self, reader: &mut Reader<'_>, places: Range<u64>) -> Result<Vec<Unit>, DataError> {
        let mut units = Vec::with_capacity((places.end - places.start) as usize);
        let mut segment = self.ends.partition_point(|end| *end <= places.start);
        let mut at = places.start;
        while at < places.end {
            let start = segment.checked_sub(1).map_or(0, |before| self.ends[before]);
            let end = places.end.min(self.ends[segment]);
            let own = (at - start) as usize..(end - start) as usize;
            match &self.words {
                None => self.read_tokens(reader, segment, own, &mut units)?,
                Some(words) => self.read_words(reader, words, segment, own, &mut units)?,
            }
            (at, segment) = (end.max(at), segment + 1);
        }
        Ok(units)
    }

    fn read_tokens(
        &self,
        reader: &mut Reader<'_>,
        document: usize,
        places: Range<usize>,
        units: &mut Vec<Unit>,
    ) -> Result<(), DataError> {
        let (document, mut ids) = (reader.document(document)?, Vec::with_capacity(places.len()));
        reader.read(&document, places.clone(), &mut ids)?;
        if !places.is_empty() && places.end > document.len() {
            ids.push(self.corpus.vocabulary().sep);
        }
        units.extend(ids.into_iter().map(|id| Unit { ids: vec![id], target: id }));
        Ok(())
    }

    fn read_words(
        &self,
        reader: &mut Reader<'_>,
        words: &Words,
        sentence: usize,
        places: Range<usize>,
        units: &mut Vec<Unit>,
    ) -> Result<(), DataError> {
        let number = words.first_sentence.partition_point(|first| *first <= sentence) - 1;
        let document = reader.document(number)?;
        let text = sentence_text(reader, &document, sentence - words.first_sentence[number])?;
        let ranges = split_words(&text);
        let vocabulary = self.corpus.vocabulary();
        for place in places {
            let word = place.checked_sub(1).and_then(|place| ranges.get(place));
            units.push(match word {
                _ if place == 0 => Unit { ids: vec![vocabulary.cls], target: WordList::START },
                None => Unit { ids: vec![vocabulary.sep], target: WordList::END },
                Some(word) => {
                    let word = &text[word.clone()];
                    let bytes = word.bytes().take(words.max_bytes).map(u32::from);
                    // White space ends the word before it.
                    Unit { ids: std::iter::once(u32::from(b' ')).chain(bytes).collect(), target: words.list.id(word) }
                }
            });
        }
        Ok(())
    }
}

/// Refuses sources that would have to come more or less often than their text is long.
pub(crate) fn check_weights(corpus: &Corpus) -> Result<(), DataError> {
    let Some(source) = corpus.sources().iter().find(|source| source.weight != 1.0) else { return Ok(()) };
    let problem = format!(
        "running text is read as it stands, and source {} has the weight {}: build the corpus with weights of 1",
        source.name, source.weight
    );
    Err(DataError::InstanceSetting { name: "packing", value: "stream".to_owned(), problem })
}

impl Part {
    /// One more sequence of units, and what they predict.
    fn push<'u>(&mut self, units: &[Unit], targets: impl Iterator<Item = &'u Unit>) {
        let before = self.ids.len();
        units.iter().for_each(|unit| self.ids.extend(&unit.ids));
        self.segments.resize(self.ids.len(), 0);
        self.lengths.push(self.ids.len() - before);
        self.targets.extend(targets.take(units.len()).map(|unit| unit.target));
    }
}

/// The text of a sentence of a corpus of bytes.
fn sentence_text(reader: &mut Reader<'_>, document: &Document, sentence: usize) -> Result<String, DataError> {
    let (range, mut ids) = (reader.sentence(document, sentence)?, Vec::new());
    reader.read(document, range, &mut ids)?;
    let bytes: Vec<u8> = ids.into_iter().filter_map(|id| u8::try_from(id).ok()).collect();
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The words that a network of words predicts: the most frequent ones, behind the marks of sentences and what stands for all others.
#[derive(Debug, PartialEq, Eq)]
pub struct WordList {
    words: Vec<String>,
    ids: HashMap<String, u32>,
}

impl WordList {
    /// A sentence's end.
    pub const END: u32 = 0;
    /// A sentence's start.
    pub const START: u32 = 1;
    /// Words that are not in the list.
    pub const UNKNOWN: u32 = 2;
    /// Their names, in the order of the authors' vocabularies.
    const NAMES: [&str; 3] = ["</S>", "<S>", "<UNK>"];

    /// The words of a corpus of bytes, the most frequent first and of equally frequent ones by their letters, `most` with the three that
    /// stand for others.
    pub fn of_corpus(corpus: &Corpus, most: usize) -> Result<Self, DataError> {
        let mut counts: HashMap<String, u64> = HashMap::new();
        let mut reader = corpus.reader();
        for number in 0..corpus.documents() {
            let document = reader.document(number)?;
            for sentence in 0..document.sentences() {
                let text = sentence_text(&mut reader, &document, sentence)?;
                for word in split_words(&text) {
                    match counts.get_mut(&text[word.clone()]) {
                        Some(count) => *count += 1,
                        None => _ = counts.insert(text[word].to_owned(), 1),
                    }
                }
            }
        }
        let mut counts: Vec<(String, u64)> = counts.into_iter().collect();
        counts.sort_unstable_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        let known = counts.into_iter().map(|(word, _)| word).filter(|word| !Self::NAMES.contains(&word.as_str()));
        let words: Vec<String> = Self::NAMES.map(str::to_owned).into_iter().chain(known).take(most.max(3)).collect();
        let ids = words.iter().cloned().zip(0..).collect();
        Ok(Self { words, ids })
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.words.len()
    }

    /// Whether there are none; there always are three.
    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// The number of a word.
    pub fn id(&self, word: &str) -> u32 {
        self.ids.get(word).copied().unwrap_or(Self::UNKNOWN)
    }

    /// One on each line, in the order of their numbers.
    pub fn to_text(&self) -> String {
        self.words.iter().fold(String::new(), |text, word| text + word + "\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Vocabulary, WordMarks};

    fn vocabulary(size: u32, cls: u32, sep: u32) -> Vocabulary {
        let words = WordMarks::Begin(vec![true; size as usize]);
        Vocabulary { size, cls, sep, mask: None, special: vec![cls, sep], words, sentinels: Vec::new() }
    }

    fn of_bytes(documents: &[&[&str]]) -> Arc<Corpus> {
        let documents: Vec<Vec<Vec<u32>>> = documents
            .iter()
            .map(|sentences| sentences.iter().map(|text| text.bytes().map(u32::from).collect()).collect())
            .collect();
        Arc::new(Corpus::from_documents(vocabulary(258, 256, 257), &documents))
    }

    /// Every row is the text as it stands, and each token predicts the one behind it.
    #[test]
    fn rows_of_tokens_are_the_text() {
        let documents = [vec![vec![1, 2, 3], vec![4]], vec![], vec![vec![5, 6, 7, 8, 9, 10, 11]], vec![vec![12; 6]]];
        let text = [1, 2, 3, 4, 0, 5, 6, 7, 8, 9, 10, 11, 0, 12, 12, 12, 12, 12, 12, 0];
        let corpus = Arc::new(Corpus::from_documents(vocabulary(20, 0, 0), &documents));
        for (rows, length, parts) in [(1, 4, 1), (2, 3, 2), (3, 2, 1), (4, 1, 2)] {
            let stream = Stream::of_tokens(Arc::clone(&corpus), rows, length).unwrap();
            assert_eq!((stream.units(), stream.steps()), (20, 19 / rows as u64 / length as u64));
            let mut found = vec![(Vec::new(), Vec::new()); rows];
            for step in 0..stream.steps() {
                let made = stream.step(step, parts).unwrap();
                assert_eq!(made.len(), parts);
                let numbers: Vec<u32> = made.iter().map(|part| part.first_number).collect();
                assert_eq!(numbers, (0..parts).map(|part| (part * rows / parts) as u32).collect::<Vec<_>>());
                let rows = made.iter().flat_map(|part| part.ids.chunks(length).zip(part.targets.chunks(length)));
                for (row, (ids, targets)) in rows.enumerate() {
                    found[row].0.extend_from_slice(ids);
                    found[row].1.extend_from_slice(targets);
                }
            }
            for (row, (ids, targets)) in found.iter().enumerate() {
                let start = row * (19 / rows);
                assert_eq!(ids[..], text[start..start + ids.len()], "row {row} of {rows}");
                assert_eq!(targets[..], text[start + 1..start + 1 + ids.len()], "row {row} of {rows}");
            }
        }
    }

    /// Forwards from the beginning, backwards from the end; unknown words are read all the same.
    #[test]
    fn rows_of_words_are_read_in_both_directions() {
        let corpus = of_bytes(&[&["The cat sat.", ""], &["a cat na\u{ef}vely"]]);
        let list = Arc::new(WordList::of_corpus(&corpus, 6).unwrap());
        assert_eq!(list.to_text(), "</S>\n<S>\n<UNK>\ncat\n.\nThe\n");
        // <S> The cat sat . </S> <S> a cat naïvely </S>
        let targets = [1, 5, 3, 2, 4, 0, 1, 2, 3, 2, 0];
        let stream = Stream::of_words(Arc::clone(&corpus), Arc::clone(&list), 4, 1, 5).unwrap();
        assert_eq!((stream.units(), stream.steps()), (11, 2));
        let steps: Vec<Part> = (0..2).map(|step| stream.step(step, 1).unwrap().remove(0)).collect();
        let read = |part: &Part, sequence: usize| -> String {
            let start: usize = part.lengths[..sequence].iter().sum();
            let letter = |id: &u32| match *id {
                256 => "<".to_owned(),
                257 => ">".to_owned(),
                // Half of ï is left of a word that is cut.
                byte => char::from(byte as u8).to_string(),
            };
            part.ids[start..start + part.lengths[sequence]].iter().map(letter).collect()
        };
        assert_eq!(read(&steps[0], 0), "< The cat sat .");
        assert_eq!(steps[0].targets[..5], targets[1..6]);
        assert_eq!(read(&steps[1], 0), ">< a cat na\u{c3}\u{af}");
        assert_eq!(steps[1].targets[..5], targets[6..11]);
        assert_eq!(read(&steps[0], 1), "< a cat na\u{c3}\u{af}>");
        assert_eq!(steps[0].targets[5..], targets[5..10]);
        assert_eq!(read(&steps[1], 1), " The cat sat .>");
        assert_eq!(steps[1].targets[5..], targets[..5]);
        assert_eq!(steps[0].rows, (0..10).collect::<Vec<u32>>());
        assert_eq!(steps[0].segments.len(), steps[0].ids.len());
    }

    #[test]
    fn texts_that_are_too_short_are_refused() {
        let corpus = of_bytes(&[&["a b"]]);
        let error = Stream::of_tokens(Arc::clone(&corpus), 4, 2).unwrap_err().to_string();
        assert!(error.contains("the text has 4"), "{error}");
        let list = Arc::new(WordList::of_corpus(&corpus, 9).unwrap());
        assert!(Stream::of_words(Arc::clone(&corpus), list, 9, 1, 4).is_err());
        assert_eq!(Stream::of_tokens(corpus, 1, 3).unwrap().steps(), 1);
    }
}
