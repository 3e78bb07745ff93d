//! How often each word occurs, in bounded memory.
//!
//! Normalizing and splitting a text costs far more than counting it. So what is counted first is the raw text between
//! spaces; only the different ones among these then go through the tokenizer's normalizer and pre-tokenizer. That gives
//! the same words as whole lines would, because none of the pre-tokenizers here looks across the places where
//! [`segments`] cuts (a property test checks it).

use std::collections::HashMap;

use crate::error::TextError;
use crate::tokenizer::{check_white_space, split_words};
use crate::training::{Parts, TrainingKind};

/// Lines are gathered up to this size, then counted by all threads. The rarest entries are only ever dropped between
/// two such rounds, so that what is dropped depends on the text alone.
const ROUND: usize = 8 << 20;

/// The words of a text and their number.
pub(super) struct Counted {
    /// Sorted by text.
    pub(super) words: Vec<(Box<str>, u64)>,
    /// The characters of the words and their number, sorted by character.
    pub(super) characters: Vec<(char, u64)>,
    pub(super) occurrences: u64,
    pub(super) dropped: u64,
    pub(super) bytes: u64,
    pub(super) lines: u64,
}

impl Counted {
    /// The characters to start from, sorted: the `limit` most frequent, and those of ASCII however rare they are. Markup,
    /// code and paths come up in texts of all kinds, and an unknown character makes a whole word unknown.
    pub(super) fn first_characters(&self, limit: usize) -> Vec<char> {
        let ascii = self.characters.iter().map(|(character, _)| *character).filter(char::is_ascii_graphic);
        let mut kept: Vec<char> = self.alphabet(limit).into_iter().chain(ascii).collect();
        kept.sort_unstable();
        kept.dedup();
        kept
    }

    /// The `limit` most frequent characters, sorted. Among equally frequent ones the lower code points are kept.
    pub(super) fn alphabet(&self, limit: usize) -> Vec<char> {
        let mut kept = self.characters.clone();
        kept.sort_unstable_by_key(|&(character, count)| (std::cmp::Reverse(count), character));
        kept.truncate(limit);
        let mut kept: Vec<char> = kept.into_iter().map(|(character, _)| character).collect();
        kept.sort_unstable();
        kept
    }
}

/// Gathers lines and counts what is between their spaces.
pub(super) struct WordCounter {
    kind: TrainingKind,
    limit: usize,
    threads: usize,
    round_size: usize,
    round: String,
    segments: HashMap<Box<str>, u64>,
    dropped: u64,
    bytes: u64,
    lines: u64,
}

impl WordCounter {
    pub(super) fn new(kind: TrainingKind, limit: usize, threads: usize) -> Self {
        Self {
            kind,
            limit,
            threads,
            round_size: ROUND,
            round: String::new(),
            segments: HashMap::new(),
            dropped: 0,
            bytes: 0,
            lines: 0,
        }
    }

    /// Bytes of text so far.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Takes whole lines, with or without a line ending after the last. Says whether it did some work on the way.
    pub(super) fn add(&mut self, block: &str) -> bool {
        let mut worked = false;
        for line in block.lines() {
            self.bytes += line.len() as u64 + 1;
            self.lines += 1;
            self.round.push_str(line);
            self.round.push('\n');
            if self.round.len() >= self.round_size {
                self.count_round();
                worked = true;
            }
        }
        worked
    }

    fn count_round(&mut self) {
        let parts = divide_lines(&self.round, self.threads);
        let kind = self.kind;
        let count = |part| {
            let mut counts: HashMap<&str, u64> = HashMap::new();
            for line in str::lines(part) {
                segments(kind, line, |segment| *counts.entry(segment).or_default() += 1);
            }
            counts
        };
        for counts in in_threads(parts, count) {
            // Walked in any order: only sums come of it.
            for (segment, count) in counts {
                match self.segments.get_mut(segment) {
                    Some(sum) => *sum += count,
                    None => drop(self.segments.insert(segment.into(), count)),
                }
            }
        }
        self.round.clear();
        self.drop_rarest();
    }

    /// Drops what was seen once, then twice, and so on, until half of the table is free again.
    fn drop_rarest(&mut self) {
        if self.segments.len() <= self.limit {
            return;
        }
        let mut counts: Vec<u64> = self.segments.values().copied().collect();
        counts.sort_unstable();
        // All of one count go together: any order among them would be an accident.
        let threshold = counts[counts.len() - 1 - self.limit / 2];
        let dropped = &mut self.dropped;
        self.segments.retain(|_, count| {
            let kept = *count > threshold;
            *dropped += if kept { 0 } else { *count };
            kept
        });
    }

    /// Takes everything through the normalizer and the pre-tokenizer.
    pub(super) fn finish(mut self, parts: &Parts) -> Result<Counted, TextError> {
        self.count_round();
        let segments: Vec<(Box<str>, u64)> = self.segments.into_iter().collect();
        let kind = self.kind;
        let split = |segments: &[(Box<str>, u64)]| -> Result<HashMap<String, u64>, TextError> {
            let mut counts: HashMap<String, u64> = HashMap::new();
            for (segment, count) in segments {
                check_white_space(kind == TrainingKind::ByteBpe, segment)?;
                for word in split_words(parts.normalizer.as_ref(), Some(&parts.pre_tokenizer), segment)? {
                    *counts.entry(word.text).or_default() += count;
                }
            }
            Ok(counts)
        };
        let chunks = segments.chunks(segments.len().div_ceil(self.threads).max(1));
        let mut sums: HashMap<String, u64> = HashMap::new();
        for counts in in_threads(chunks.collect(), split) {
            let counts = counts?;
            if sums.is_empty() {
                sums = counts;
                continue;
            }
            for (word, count) in counts {
                *sums.entry(word).or_default() += count;
            }
        }
        drop(segments);
        let mut words: Vec<(Box<str>, u64)> =
            sums.into_iter().map(|(word, count)| (word.into_boxed_str(), count)).collect();
        words.sort_unstable();
        let mut characters: HashMap<char, u64> = HashMap::new();
        for (word, count) in &words {
            for character in word.chars() {
                *characters.entry(character).or_default() += count;
            }
        }
        let mut characters: Vec<(char, u64)> = characters.into_iter().collect();
        characters.sort_unstable();
        Ok(Counted {
            occurrences: words.iter().map(|(_, count)| count).sum(),
            words,
            characters,
            dropped: self.dropped,
            bytes: self.bytes,
            lines: self.lines,
        })
    }
}

/// Cuts a line where the tokenizer's own words end anyway, whatever stands around.
fn segments<'t>(kind: TrainingKind, line: &'t str, mut each: impl FnMut(&'t str)) {
    if kind != TrainingKind::ByteBpe {
        line.split([' ', '\t', '\r']).filter(|segment| !segment.is_empty()).for_each(each);
        return;
    }
    // A space goes with the word after it; white space before that is for itself.
    let mut start = 0;
    for (at, _) in line.match_indices(' ') {
        if at > start && line[at + 1..].chars().next().is_some_and(|letter| !letter.is_whitespace()) {
            each(&line[start..at]);
            start = at;
        }
    }
    if start < line.len() {
        each(&line[start..]);
    }
}

/// Divides a text into about equal parts at the ends of lines.
fn divide_lines(text: &str, parts: usize) -> Vec<&str> {
    let mut divided = Vec::with_capacity(parts);
    let mut rest = text;
    for left in (1..=parts).rev() {
        let middle = rest.len() / left;
        let end = match left {
            1 => rest.len(),
            _ => rest.as_bytes()[middle..]
                .iter()
                .position(|&byte| byte == b'\n')
                .map_or(rest.len(), |at| middle + at + 1),
        };
        let (part, remainder) = rest.split_at(end);
        divided.push(part);
        rest = remainder;
    }
    divided
}

/// Works on each part in a thread of its own; the results come in the order of the parts.
pub(super) fn in_threads<P: Send, R: Send>(parts: Vec<P>, work: impl Fn(P) -> R + Sync) -> Vec<R> {
    henson_kernels::threads::in_threads(parts.len(), parts, work)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::training::TrainingSettings;

    const KINDS: [TrainingKind; 4] =
        [TrainingKind::WordPiece, TrainingKind::Bpe, TrainingKind::ByteBpe, TrainingKind::Unigram];

    fn parts(kind: TrainingKind, lowercase: bool) -> Parts {
        let lowercase = lowercase && kind != TrainingKind::ByteBpe;
        Parts::new(&TrainingSettings { lowercase, ..TrainingSettings::new(kind, 100) }).unwrap()
    }

    fn words_of(parts: &Parts, text: &str) -> Vec<String> {
        let words = split_words(parts.normalizer.as_ref(), Some(&parts.pre_tokenizer), text).unwrap();
        words.into_iter().map(|word| word.text).collect()
    }

    fn count(kind: TrainingKind, limit: usize, threads: usize, round_size: usize, blocks: &[&str]) -> Counted {
        let mut counter = WordCounter { round_size, ..WordCounter::new(kind, limit, threads) };
        for block in blocks {
            counter.add(block);
        }
        counter.finish(&parts(kind, true)).unwrap()
    }

    proptest! {
        /// What makes it right to normalize parts of a line instead of the line.
        #[test]
        fn parts_of_a_line_give_the_words_of_the_line(
            line in "([ \t\r\u{a0}\u{3000}\u{200b}\u{a8}]|[ ]|[a-dA-D',.!0-9]|\\PC|[\u{300}-\u{308}中ﬁ\u{ac00}]){0,24}",
            kind in prop::sample::select(KINDS.to_vec()),
            lowercase: bool,
        ) {
            let parts = parts(kind, lowercase);
            let mut from_segments = Vec::new();
            segments(kind, &line, |segment| from_segments.extend(words_of(&parts, segment)));
            prop_assert_eq!(from_segments, words_of(&parts, &line));
        }
    }

    /// Threads, blocks and rounds change nothing; words are counted by hand.
    #[test]
    fn counting_by_hand() {
        let text = "The cat, the mat.\n\nA\tthe\r\n";
        for (threads, round_size) in [(1, 1), (2, 5), (3, 1000)] {
            for blocks in [vec![text], text.split_inclusive('\n').collect()] {
                let counted = count(TrainingKind::WordPiece, 100, threads, round_size, &blocks);
                let words: Vec<(&str, u64)> = counted.words.iter().map(|(word, count)| (&**word, *count)).collect();
                assert_eq!(words, [(",", 1), (".", 1), ("a", 1), ("cat", 1), ("mat", 1), ("the", 3)]);
                assert_eq!((counted.lines, counted.occurrences, counted.dropped), (3, 8, 0));
                assert!(counted.characters.contains(&('t', 5)) && counted.characters.contains(&('a', 3)));
                // By frequency, then by code point: t, a, e, h stay.
                assert_eq!(counted.alphabet(4), ['a', 'e', 'h', 't']);
            }
        }
    }

    /// The table stays within its limit, the rarest go, and what goes depends on the text alone.
    #[test]
    fn the_table_is_bounded() {
        let mut text = String::new();
        for i in 0..3000 {
            text.push_str(&format!("common w{i} twice{} the\n", i / 2));
        }
        let run = |threads| count(TrainingKind::WordPiece, 500, threads, 2000, &[&text]);
        let counted = run(1);
        assert!(counted.words.len() <= 500, "{}", counted.words.len());
        assert!(counted.words.contains(&("common".into(), 3000)) && counted.words.contains(&("the".into(), 3000)));
        assert_eq!(counted.occurrences + counted.dropped, 12_000);
        assert!(counted.dropped > 4000);
        for threads in [2, 3] {
            let other = run(threads);
            assert_eq!((other.words, other.dropped), (counted.words.clone(), counted.dropped));
        }
    }

    #[test]
    fn lines_are_divided_whole() {
        for text in ["", "a", "a\n", "a\nbb\nccc\ndddd\n", "\n\n\n\n\n"] {
            for parts in 1..6 {
                let divided = divide_lines(text, parts);
                assert_eq!((divided.concat(), divided.len()), (text.to_owned(), parts));
                assert!(divided[..parts - 1].iter().all(|part| part.is_empty() || part.ends_with('\n') || text == "a"));
            }
        }
    }
}
