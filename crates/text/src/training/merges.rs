//! Byte pair encoding (Sennrich, Haddow and Birch, 2016): the most frequent pair of neighbours becomes a piece of its
//! own, again and again. WordPiece's vocabulary is made the same way, as Hugging Face does it; the two differ in how
//! pieces are marked and in how texts are encoded later.
//!
//! The rule, which `reference` in the tests states as a plain loop: take the pair with the highest count; among equals
//! the one whose left id is lowest, then the right one. Replace it everywhere, from left to right. Stop when the
//! vocabulary is full or no pair is frequent enough. Here counts are kept up to date instead of made again, so that the
//! whole takes about as long as going over the words a few times.

use std::cmp::Reverse;
use std::collections::hash_map::Entry;
use std::collections::{BinaryHeap, HashMap};

use crate::error::TextError;

/// What marks the pieces that end a word.
pub(super) const WORD_END: &str = "</w>";
/// What marks the pieces that continue a word.
const CONTINUATION: &str = "##";

/// Longer words are learned from in parts: they are hardly words, and each merge looks through the whole of one.
const LONGEST_RUN: usize = 1000;

/// How a piece shows its place in the word.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Marks {
    None,
    /// [`CONTINUATION`].
    Continuation,
    /// [`WORD_END`].
    WordEnd,
}

pub(super) struct MergeSettings {
    pub(super) specials: Vec<String>,
    /// Sorted.
    pub(super) alphabet: Vec<char>,
    /// The most frequent characters of the alphabet. Letters of scripts with case and digits among them, and those of ASCII
    /// in any case, are in the vocabulary in both forms, marked and unmarked.
    pub(super) common: Vec<char>,
    pub(super) marks: Marks,
    pub(super) vocabulary_size: usize,
    pub(super) min_frequency: u64,
}

/// A vocabulary in the order of ids: special tokens, characters, marked characters, merges.
pub(super) struct Learned {
    pub(super) pieces: Vec<String>,
    merges: Vec<(u32, u32)>,
}

impl Learned {
    /// The merges by the texts of their sides, the first to be made first.
    pub(super) fn merges(&self) -> Vec<(String, String)> {
        let piece = |id: u32| self.pieces[id as usize].clone();
        self.merges.iter().map(|&(left, right)| (piece(left), piece(right))).collect()
    }
}

/// A pair of neighbours.
#[derive(Default)]
struct Pair {
    count: u64,
    /// The runs that hold it, and some that no longer do.
    runs: Vec<u32>,
}

/// Neighbouring pieces of one word, in `symbols[start..start + length]`.
struct Run {
    start: usize,
    length: usize,
    count: u64,
}

type PairOfIds = (u32, u32);

pub(super) fn learn(
    words: &[(Box<str>, u64)],
    settings: &MergeSettings,
    progress: &mut dyn FnMut(usize, usize) -> Result<(), TextError>,
) -> Result<Learned, TextError> {
    let (mut pieces, mut symbols, mut runs) = lay_out(words, settings);
    if pieces.len() > settings.vocabulary_size {
        let specials = settings.specials.len();
        let alphabet = pieces.len() - specials;
        return Err(TextError::VocabularyTooSmall { asked: settings.vocabulary_size, specials, alphabet });
    }
    let mut pairs: HashMap<PairOfIds, Pair> = HashMap::new();
    for (number, run) in (0_u32..).zip(&runs) {
        for window in symbols[run.start..run.start + run.length].windows(2) {
            let pair = pairs.entry((window[0], window[1])).or_default();
            pair.count += run.count;
            if pair.runs.last() != Some(&number) {
                pair.runs.push(number);
            }
        }
    }
    // Every pair has an entry with at least its count; one with more is put right when it comes up.
    let entry = |pair: PairOfIds, count: u64| (count, Reverse(pair));
    let mut queue: BinaryHeap<(u64, Reverse<PairOfIds>)> =
        pairs.iter().map(|(&key, pair)| entry(key, pair.count)).collect();
    let mut merges = Vec::new();
    let mut grown: Vec<PairOfIds> = Vec::new();
    while pieces.len() < settings.vocabulary_size {
        let Some((count, Reverse(key))) = queue.pop() else { break };
        let current = pairs.get(&key).map_or(0, |pair| pair.count);
        if current != count {
            if current > 0 && current < count {
                queue.push(entry(key, current));
            }
            continue;
        }
        if count < settings.min_frequency.max(1) {
            break;
        }
        let Some(pair) = pairs.remove(&key) else { continue };
        let (left, right) = key;
        // Always a new piece: every place where its text stands between borders that no merge has crossed went through
        // the same merges, so that there is one way to each text.
        let new = pieces.len() as u32;
        pieces.push(joined(&pieces[left as usize], &pieces[right as usize], settings.marks));
        merges.push(key);

        for number in pair.runs {
            let run = &mut runs[number as usize];
            let symbols = &mut symbols[run.start..run.start + run.length];
            let (mut read, mut written) = (0, 0);
            while read < symbols.len() {
                let found = symbols[read] == left && symbols.get(read + 1) == Some(&right);
                if found {
                    let mut change = |before: PairOfIds, after: PairOfIds| {
                        if before != key {
                            take(&mut pairs, before, run.count);
                        }
                        let pair = pairs.entry(after).or_default();
                        pair.count += run.count;
                        if pair.runs.last() != Some(&number) {
                            pair.runs.push(number);
                        }
                        grown.push(after);
                    };
                    if written > 0 {
                        let neighbour = symbols[written - 1];
                        change((neighbour, left), (neighbour, new));
                    }
                    if let Some(&neighbour) = symbols.get(read + 2) {
                        change((right, neighbour), (new, neighbour));
                    }
                }
                symbols[written] = if found { new } else { symbols[read] };
                read += if found { 2 } else { 1 };
                written += 1;
            }
            run.length = written;
        }
        grown.sort_unstable();
        grown.dedup();
        queue.extend(grown.drain(..).filter_map(|key| Some(entry(key, pairs.get(&key)?.count))));
        if merges.len().is_multiple_of(256) {
            progress(pieces.len(), settings.vocabulary_size)?;
        }
    }
    Ok(Learned { pieces, merges })
}

fn take(pairs: &mut HashMap<PairOfIds, Pair>, key: PairOfIds, count: u64) {
    if let Entry::Occupied(mut entry) = pairs.entry(key) {
        entry.get_mut().count -= count;
        if entry.get().count == 0 {
            entry.remove();
        }
    }
}

/// The text of a merge.
fn joined(left: &str, right: &str, marks: Marks) -> String {
    let right = match marks {
        Marks::Continuation => right.strip_prefix(CONTINUATION).unwrap_or(right),
        Marks::None | Marks::WordEnd => right,
    };
    format!("{left}{right}")
}

/// The first vocabulary, and the words as runs of it. A character outside the alphabet ends a run: nothing can be
/// merged across it when encoding either.
fn lay_out(words: &[(Box<str>, u64)], settings: &MergeSettings) -> (Vec<String>, Vec<u32>, Vec<Run>) {
    let alphabet = &settings.alphabet;
    // A place in the word, then a place in the alphabet: first the unmarked forms, then the marked ones.
    let form = |character: char, first: bool, last: bool| -> Option<usize> {
        let place = alphabet.binary_search(&character).ok()?;
        let marked = match settings.marks {
            Marks::None => false,
            Marks::Continuation => !first,
            Marks::WordEnd => last,
        };
        Some(if marked { alphabet.len() + place } else { place })
    };
    let forms = |word: &str, each: &mut dyn FnMut(Option<usize>)| {
        let mut characters = word.chars().peekable();
        let mut first = true;
        while let Some(character) = characters.next() {
            each(form(character, first, characters.peek().is_none()));
            first = false;
        }
    };
    // Unmarked characters are there whether they occur so or not, as in Hugging Face's trainer. So are, unlike there,
    // the marked forms of common letters: a word may end in z though none of the text does, and would be unknown.
    let cased = |character: &char| character.is_lowercase() || character.is_uppercase() || character.is_ascii_digit();
    let both = |character: &char| match settings.marks {
        Marks::None => false,
        // Signs are words of their own, without anything before them.
        Marks::Continuation => cased(character) && (character.is_ascii() || settings.common.contains(character)),
        // And what is a word of its own ends it.
        Marks::WordEnd => character.is_ascii() || (cased(character) && settings.common.contains(character)),
    };
    let mut used = vec![true; alphabet.len()];
    used.extend(alphabet.iter().map(both));
    for (word, _) in words {
        forms(word, &mut |form| {
            if let Some(form) = form {
                used[form] = true;
            }
        });
    }
    let mut pieces = settings.specials.clone();
    let mut ids = vec![0; used.len()];
    for form in (0..used.len()).filter(|&form| used[form]) {
        ids[form] = pieces.len() as u32;
        let character = alphabet[form % alphabet.len()];
        pieces.push(match (settings.marks, form < alphabet.len()) {
            (Marks::Continuation, false) => format!("{CONTINUATION}{character}"),
            (Marks::WordEnd, false) => format!("{character}{WORD_END}"),
            _ => character.to_string(),
        });
    }

    let mut symbols = Vec::new();
    let mut runs = Vec::new();
    for &(ref word, count) in words {
        let mut start = symbols.len();
        let mut end_run = |start: &mut usize, end: usize| {
            // A run of one has no pairs.
            if end - *start > 1 {
                runs.push(Run { start: *start, length: end - *start, count });
            }
            *start = end;
        };
        forms(word, &mut |form| {
            if form.is_none() || symbols.len() - start == LONGEST_RUN {
                end_run(&mut start, symbols.len());
            }
            symbols.extend(form.map(|form| ids[form]));
        });
        end_run(&mut start, symbols.len());
    }
    (pieces, symbols, runs)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The rule as a plain loop: everything is counted again for each merge.
    fn reference(words: &[(Box<str>, u64)], settings: &MergeSettings) -> (Vec<String>, Vec<(u32, u32)>) {
        let (mut pieces, symbols, runs) = lay_out(words, settings);
        let mut runs: Vec<(Vec<u32>, u64)> =
            runs.iter().map(|run| (symbols[run.start..run.start + run.length].to_vec(), run.count)).collect();
        let mut merges = Vec::new();
        while pieces.len() < settings.vocabulary_size {
            let mut counts: std::collections::BTreeMap<(u32, u32), u64> = std::collections::BTreeMap::new();
            for (run, count) in &runs {
                run.windows(2).for_each(|pair| *counts.entry((pair[0], pair[1])).or_default() += count);
            }
            // The map is sorted, so that the first of the largest has the lowest ids.
            let Some(largest) = counts.values().copied().max() else { break };
            if largest < settings.min_frequency {
                break;
            }
            let Some((&(left, right), _)) = counts.iter().find(|(_, count)| **count == largest) else { break };
            let text = joined(&pieces[left as usize], &pieces[right as usize], settings.marks);
            assert!(!pieces.contains(&text) && !merges.contains(&(left, right)), "there is one way to each text");
            let new = pieces.len() as u32;
            pieces.push(text);
            merges.push((left, right));
            for (run, _) in &mut runs {
                let mut at = 0;
                while at + 1 < run.len() {
                    if (run[at], run[at + 1]) == (left, right) {
                        run[at] = new;
                        run.remove(at + 1);
                    }
                    at += 1;
                }
            }
        }
        (pieces, merges)
    }

    fn settings(marks: Marks, alphabet: &str, vocabulary_size: usize, min_frequency: u64) -> MergeSettings {
        let specials = vec!["[PAD]".to_owned(), "[UNK]".to_owned()];
        let alphabet: Vec<char> = alphabet.chars().collect();
        let common = alphabet[..alphabet.len() / 2].to_vec();
        MergeSettings { specials, alphabet, common, marks, vocabulary_size, min_frequency }
    }

    fn run(words: &[(&str, u64)], settings: &MergeSettings) -> Learned {
        let words: Vec<(Box<str>, u64)> = words.iter().map(|&(word, count)| (word.into(), count)).collect();
        learn(&words, settings, &mut |_, _| Ok(())).unwrap()
    }

    const MARKS: [Marks; 3] = [Marks::None, Marks::Continuation, Marks::WordEnd];

    proptest! {
        #[test]
        fn the_fast_way_gives_what_the_plain_loop_gives(
            // Few letters, so that pairs overlap, merges meet in the same piece, and counts are often equal.
            words in prop::collection::btree_map("[abc中☃]{1,12}", 1_u64..6, 1..30),
            size in 12_usize..60,
            min_frequency in 0_u64..4,
            marks in 0_usize..3,
        ) {
            let words: Vec<(Box<str>, u64)> = words.into_iter().map(|(word, count)| (word.into(), count)).collect();
            let settings = settings(MARKS[marks], "abc中", size, min_frequency);
            let learned = learn(&words, &settings, &mut |_, _| Ok(())).unwrap();
            prop_assert_eq!((learned.pieces, learned.merges), reference(&words, &settings));
        }
    }

    /// Worked by hand, with ties: `pug` before `hugs`, because p has a lower id than hug.
    #[test]
    fn word_piece_by_hand() {
        let words = [("bun", 4), ("hug", 10), ("hugs", 5), ("pug", 5), ("pun", 12)];
        let learned = run(&words, &settings(Marks::Continuation, "bghnpsu", 100, 2));
        // b, h and p are there in both forms because all letters of ASCII are.
        let expected = "[PAD] [UNK] b g h n p s u ##b ##g ##h ##n ##p ##s ##u ##ug ##un hug pun pug hugs bun";
        assert_eq!(learned.pieces.join(" "), expected);
        let fewer = run(&words, &settings(Marks::Continuation, "bghnpsu", 19, 2));
        assert_eq!(fewer.pieces.join(" "), expected.split(" pun").next().unwrap());
        let frequent = run(&words, &settings(Marks::Continuation, "bghnpsu", 100, 12));
        assert_eq!(frequent.pieces.last().map(String::as_str), Some("pun"));
    }

    #[test]
    fn byte_pairs_by_hand() {
        let words = [("bun", 4), ("hug", 10), ("hugs", 5), ("pug", 5), ("pun", 12)];
        let learned = run(&words, &settings(Marks::WordEnd, "bghnpsu", 100, 2));
        let merges: Vec<String> = learned.merges().into_iter().map(|(left, right)| format!("{left} {right}")).collect();
        let expected = ["p u", "h u", "pu n</w>", "hu g</w>", "g s</w>", "pu g</w>", "hu gs</w>", "b u", "bu n</w>"];
        assert_eq!(merges, expected);
    }

    /// Characters outside the alphabet, and the middle of very long words, are borders.
    #[test]
    fn nothing_is_merged_across_a_gap() {
        let learned = run(&[("ab☃cd", 9)], &settings(Marks::None, "abcd", 100, 2));
        assert_eq!(learned.pieces[2..].join(" "), "a b c d ab cd");
        let long = "a".repeat(LONGEST_RUN + 1);
        let (_, _, runs) = lay_out(&[(long.into(), 1)], &settings(Marks::None, "a", 100, 2));
        assert_eq!(runs.iter().map(|run| run.length).collect::<Vec<_>>(), [LONGEST_RUN]);
    }

    #[test]
    fn too_small_or_stopped() {
        let words: [(Box<str>, u64); 1] = [("ab".repeat(600).into(), 2)];
        let small = learn(&words, &settings(Marks::Continuation, "ab", 5, 2), &mut |_, _| Ok(()));
        assert!(matches!(small, Err(TextError::VocabularyTooSmall { asked: 5, specials: 2, alphabet: 4 })));
        // Every letter another, so that there are merges enough to be asked in between.
        let letters: String = ('\u{4e00}'..'\u{5000}').collect();
        let words: [(Box<str>, u64); 1] = [(letters.as_str().into(), 2)];
        let stopped = learn(&words, &settings(Marks::None, &letters, 10_000, 2), &mut |_, _| Err(TextError::Stopped));
        assert!(matches!(stopped, Err(TextError::Stopped)));
    }
}
