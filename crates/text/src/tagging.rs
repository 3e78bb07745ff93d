//! Words with tags: words to pieces and windows, tags to pieces (for training), and back from the tags of words to
//! entities. The first piece of a word stands for it (section 5.3 of the paper): it carries the label in training and gives
//! the tag; the other pieces carry none and are not asked.
//!
//! A text and the byte ranges of its words are the one form of input. [`join_words`] makes it from the words of a corpus,
//! [`split_words`] from running text. So entities are always parts of a text.
//!
//! Which words have a tag is decided here, which tags a corpus has is not: reading and writing its columns is elsewhere.

use std::ops::Range;

use crate::error::TextError;
use crate::features::{Features, windows_with_most_context};
use crate::tokenizer::{Pieces, Tokenizer};
use crate::windows::Stride;

/// Words one after the other, a space between each two, and where each then stands.
pub fn join_words<T: AsRef<str>>(words: &[T]) -> (String, Vec<Range<usize>>) {
    let mut text = String::new();
    let mut places = Vec::with_capacity(words.len());
    for (i, word) in words.iter().enumerate() {
        if i > 0 {
            text.push(' ');
        }
        let start = text.len();
        text.push_str(word.as_ref());
        places.push(start..text.len());
    }
    (text, places)
}

/// The words of running text, about as tagging corpora write them: white space separates; punctuation at either end of a
/// word is a word itself, one for each character; so is a final `'s`, and each CJK ideograph. Punctuation inside of a word
/// stays (`co-operate`, `3.5`, `U.S`).
pub fn split_words(text: &str) -> Vec<Range<usize>> {
    let mut words = Vec::new();
    let mut start = None;
    for (at, letter) in text.char_indices() {
        if letter.is_whitespace() || is_ideograph(letter) {
            if let Some(start) = start.take() {
                split_ends(text, start..at, &mut words);
            }
            if is_ideograph(letter) {
                words.push(at..at + letter.len_utf8());
            }
        } else {
            start = start.or(Some(at));
        }
    }
    if let Some(start) = start {
        split_ends(text, start..text.len(), &mut words);
    }
    words
}

/// Takes punctuation off both ends of a run of characters without white space.
fn split_ends(text: &str, run: Range<usize>, words: &mut Vec<Range<usize>>) {
    let part = &text[run.clone()];
    // Marks and joiners belong to what they stand on: only what is surely punctuation is taken off.
    let is_punctuation = |c: char| c.is_ascii_punctuation() || GENERAL_PUNCTUATION.contains(&c);
    let core = part.trim_start_matches(is_punctuation);
    let core_start = run.end - core.len();
    let core = core.trim_end_matches(is_punctuation);
    let core_end = core_start + core.len();
    let each = |from: Range<usize>| {
        text[from.clone()].char_indices().map(move |(i, c)| from.start + i..from.start + i + c.len_utf8())
    };
    words.extend(each(run.start..core_start));
    let possessive = ["'s", "\u{2019}s", "'S", "\u{2019}S"].into_iter().find(|ending| core.ends_with(ending));
    match possessive.map(|ending| core_end - ending.len()).filter(|&at| at > core_start) {
        Some(at) => words.extend([core_start..at, at..core_end]),
        None if core_start < core_end => words.push(core_start..core_end),
        None => {}
    }
    words.extend(each(core_end..run.end));
}

/// Punctuation beyond ASCII that often touches words: quotes, dashes, the ellipsis, and those of CJK texts.
const GENERAL_PUNCTUATION: [char; 29] = [
    '\u{2010}', '\u{2011}', '\u{2012}', '\u{2013}', '\u{2014}', '\u{2018}', '\u{2019}', '\u{201a}', '\u{201c}',
    '\u{201d}', '\u{201e}', '\u{2026}', '\u{2039}', '\u{203a}', '\u{a1}', '\u{ab}', '\u{bb}', '\u{bf}', '\u{3001}',
    '\u{3002}', '\u{300a}', '\u{300b}', '\u{300c}', '\u{300d}', '\u{ff01}', '\u{ff08}', '\u{ff09}', '\u{ff0c}',
    '\u{ff1f}',
];

fn is_ideograph(letter: char) -> bool {
    matches!(letter, '\u{3400}'..='\u{4dbf}' | '\u{4e00}'..='\u{9fff}' | '\u{f900}'..='\u{faff}' | '\u{20000}'..='\u{323af}')
}

/// A text with words as sequences for a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WordWindows {
    /// One sequence, or several that overlap.
    pub windows: Vec<Features>,
    /// For each word the window and the position there of its first piece: of the windows that show it, the one where it
    /// has most context. `None` for words without pieces (control characters, say) and beyond the end that was cut off.
    pub places: Vec<Option<(usize, usize)>>,
    /// Pieces that were cut off the end.
    pub dropped: usize,
}

impl WordWindows {
    /// Finds where each word is read.
    fn new(pieces: &Pieces, mut windows: Vec<Features>, words: &[Range<usize>]) -> Self {
        // Of a text without words, where nothing stands around one.
        windows.retain(|window| !window.is_empty());
        let mut first_pieces = vec![None; words.len()];
        for (piece, word) in words_of_pieces(&pieces.offsets, words).into_iter().enumerate() {
            if let Some(word) = word.filter(|word| first_pieces[*word].is_none()) {
                first_pieces[word] = Some(piece);
            }
        }
        let most_context = windows_with_most_context(&windows);
        let place = |piece: Option<usize>| {
            let piece = piece?;
            let window = *most_context.get(piece)?;
            Some((window, windows[window].position_of_piece(piece)?))
        };
        let places = first_pieces.into_iter().map(place).collect();
        let dropped = windows.iter().map(|window| window.dropped).sum();
        Self { windows, places, dropped }
    }

    /// What training asks of a window: for each of its positions the label of the word that is read there, if one is. A
    /// word in the overlap of two windows counts once, where it has most context; a word may be without label.
    pub fn labels(&self, window: usize, of_words: &[Option<u32>]) -> Vec<Option<u32>> {
        let mut labels = vec![None; self.windows.get(window).map_or(0, Features::len)];
        for (place, label) in self.places.iter().zip(of_words) {
            if let Some((_, position)) = place.filter(|(number, _)| *number == window) {
                labels[position] = *label;
            }
        }
        labels
    }
}

impl Tokenizer {
    /// Lays out a text whose words are `words`, in order and without overlap. `stride` divides a text that is too long into
    /// windows; without it, its end is cut off.
    ///
    /// A piece belongs to the first word that it touches; the text is encoded as a whole, which for BERT gives the pieces
    /// that encoding each word on its own would give.
    pub fn words_in_windows(
        &self,
        text: &str,
        words: &[Range<usize>],
        max_length: usize,
        stride: Option<Stride>,
    ) -> Result<WordWindows, TextError> {
        let pieces = self.pieces_of_words(text, words)?;
        let template = self.template();
        let windows = match stride {
            None => vec![template.single(&pieces, max_length)?],
            Some(stride) => {
                let room = max_length.saturating_sub(template.single_specials());
                template.windows(&pieces, max_length, stride.step(room)?)?
            }
        };
        Ok(WordWindows::new(&pieces, windows, words))
    }

    /// Lays out some words of a text, `own`, among the others: one sequence with as much of the text as fits, the same
    /// on both sides where both have so much. Only their own places are given. Where they alone are too long they stand
    /// in windows that overlap by half, and nothing around them.
    pub fn words_in_context(
        &self,
        text: &str,
        words: &[Range<usize>],
        own: Range<usize>,
        max_length: usize,
    ) -> Result<WordWindows, TextError> {
        let pieces = self.pieces_of_words(text, words)?;
        let template = self.template();
        let room = max_length.saturating_sub(template.single_specials());
        let before = |word: usize| pieces.offsets.partition_point(|(start, _)| word_at(words, *start) < word);
        let start = before(own.start);
        // Never before it, even where a tokenizer's offsets do not ascend.
        let (mut start, mut end) = (start, before(own.end).max(start));
        if let Some(free) = room.checked_sub(end - start) {
            let after = pieces.len() - end;
            let left = start.min((free / 2).max(free.saturating_sub(after)));
            (start, end) = (start - left, end + after.min(free - left));
        }
        let windows = template.windows_of(&pieces, start..end, max_length, (room / 2).max(1))?;
        Ok(WordWindows::new(&pieces, windows, &words[own]))
    }
}

/// The word that each piece belongs to: the first that it touches, if it touches any.
pub fn words_of_pieces(offsets: &[(usize, usize)], words: &[Range<usize>]) -> Vec<Option<usize>> {
    let word = |&(start, end): &(usize, usize)| {
        Some(word_at(words, start)).filter(|word| words.get(*word).is_some_and(|word| word.start < end))
    };
    offsets.iter().map(word).collect()
}

/// The first word that ends behind a byte: the one that a piece which begins there touches first, if it touches any.
fn word_at(words: &[Range<usize>], byte: usize) -> usize {
    words.partition_point(|word| word.end <= byte)
}

/// What the labels of a tag set mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TagSet {
    /// Entities of several words, by prefixes: BIO, IOB1, BIOES and BILOU.
    Chunks,
    /// Entities of several words without prefixes: `O`, and a run of equal labels is one.
    Runs,
    /// Every word has a label of its own, such as its part of speech.
    Words,
}

impl TagSet {
    /// Tells by the labels.
    pub fn of_labels<T: AsRef<str>>(labels: &[T]) -> Self {
        let outside = labels.iter().any(|label| label.as_ref() == "O");
        let mut inside = labels.iter().map(AsRef::as_ref).filter(|label| *label != "O").peekable();
        if inside.peek().is_some() && inside.all(|label| parse(label).0 != Prefix::None) {
            TagSet::Chunks
        } else if outside {
            TagSet::Runs
        } else {
            TagSet::Words
        }
    }

    /// The entities in the tags of a text's words: which words, and of what kind. Words without a tag end an entity.
    ///
    /// Tags of chunks are read leniently, so that every tag but `O` is part of an entity, whatever stands around it (the
    /// rules of conlleval and of seqeval's default): `B` or `S` begins an entity; so does any other that follows `O`, another
    /// kind, or an `E` or `S`. `L` and `U` are `E` and `S` by BILOU's names. This reads BIO, IOB1 and BIOES alike.
    pub fn entities<'t>(self, tags: &[Option<&'t str>]) -> Vec<(Range<usize>, &'t str)> {
        let mut entities: Vec<(Range<usize>, &str)> = Vec::new();
        let mut open = false;
        for (word, tag) in tags.iter().enumerate() {
            let Some(tag) = tag.filter(|tag| self == TagSet::Words || *tag != "O") else {
                open = false;
                continue;
            };
            let (prefix, kind) = match self {
                TagSet::Chunks => parse(tag),
                TagSet::Runs => (Prefix::Inside, tag),
                TagSet::Words => (Prefix::Single, tag),
            };
            let begins = matches!(prefix, Prefix::Begin | Prefix::Single);
            match entities.last_mut() {
                Some((words, last)) if open && !begins && *last == kind => words.end = word + 1,
                _ => entities.push((word..word + 1, kind)),
            }
            open = !matches!(prefix, Prefix::End | Prefix::Single);
        }
        entities
    }
}

/// Which labels of a tag set may begin and end a sentence, and follow each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LegalTags {
    /// For each label, whether it may be that of the first word.
    pub start: Vec<bool>,
    /// For each label, whether it may be that of the last word.
    pub end: Vec<bool>,
    /// For each label and each that follows it, whether it may.
    pub transitions: Vec<bool>,
}

impl LegalTags {
    /// Those of labels that are written as BIO or, where they have prefixes for the last words of entities, as BIOES: an entity is
    /// continued by its own kind alone, and in BIOES it ends as it must. `None` for other labels, and where `I` may begin an entity (IOB1).
    pub fn of_labels<T: AsRef<str>>(labels: &[T]) -> Option<Self> {
        let parsed: Vec<(Prefix, &str)> = labels.iter().map(|label| parse(label.as_ref())).collect();
        let begins = |kind: &str| parsed.iter().any(|(prefix, own)| *prefix == Prefix::Begin && *own == kind);
        let has_beginnings = parsed.iter().all(|(prefix, kind)| *prefix != Prefix::Inside || begins(kind));
        if TagSet::of_labels(labels) != TagSet::Chunks || !has_beginnings {
            return None;
        }
        let closes = parsed.iter().any(|(prefix, _)| matches!(prefix, Prefix::End | Prefix::Single));
        // Whether an entity is under way behind a label that must, or may, be continued.
        let open = |prefix: Prefix| matches!(prefix, Prefix::Begin | Prefix::Inside);
        let continues = |prefix: Prefix| matches!(prefix, Prefix::Inside | Prefix::End);
        let follows = |&(before, of): &(Prefix, &str), &(after, kind): &(Prefix, &str)| match continues(after) {
            true => open(before) && of == kind,
            false => !(closes && open(before)),
        };
        Some(Self {
            start: parsed.iter().map(|(prefix, _)| !continues(*prefix)).collect(),
            end: parsed.iter().map(|(prefix, _)| !(closes && open(*prefix))).collect(),
            transitions: parsed.iter().flat_map(|from| parsed.iter().map(move |to| follows(from, to))).collect(),
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Prefix {
    Begin,
    Inside,
    End,
    Single,
    None,
}

/// `B-PER` is (Begin, "PER"). A label without a prefix is of its own kind.
fn parse(label: &str) -> (Prefix, &str) {
    let (prefix, kind) = label.split_once('-').unwrap_or(("", label));
    let prefix = match prefix {
        "B" => Prefix::Begin,
        "I" | "M" => Prefix::Inside,
        "E" | "L" => Prefix::End,
        "S" | "U" => Prefix::Single,
        _ => return (Prefix::None, label),
    };
    (prefix, kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Labels that may follow each other, begin and end, against the entities that they make.
    #[test]
    fn steps_between_tags() {
        let bio = ["O", "B-A", "I-A", "B-B", "I-B"];
        let bioes = ["O", "B-A", "I-A", "E-A", "S-A", "B-B", "I-B", "E-B", "S-B"];
        let write = |labels: &[&str], kind: &str, words: usize, last: bool| -> Vec<usize> {
            let number = |prefix: &str| labels.iter().position(|label| *label == format!("{prefix}-{kind}"));
            let prefix = |word: usize| match (word == 0, word + 1 == words) {
                (true, true) if last => "S",
                (true, _) => "B",
                (_, true) if last => "E",
                _ => "I",
            };
            (0..words).map(|word| number(prefix(word)).unwrap()).collect()
        };
        for (labels, closes) in [(&bio[..], false), (&bioes[..], true)] {
            let legal = LegalTags::of_labels(labels).unwrap();
            let k = labels.len();
            // Every way to write up to four words is legal if, and only if, it is one that some entities give.
            let mut written: Vec<Vec<usize>> = vec![vec![]];
            let mut all: Vec<Vec<usize>> = written.clone();
            for words in 1..=4 {
                let mut longer: Vec<Vec<usize>> = Vec::new();
                for tags in &written {
                    let entities =
                        ["A", "B"].iter().flat_map(|kind| (1..=4).map(move |n| write(labels, kind, n, closes)));
                    let next = std::iter::once(vec![0]).chain(entities);
                    longer.extend(next.map(|own| [&tags[..], &own].concat()));
                }
                written.extend(longer);
                written.sort();
                written.dedup();
                written.retain(|tags| tags.len() <= 4);
                all = all.iter().flat_map(|tags| (0..k).map(move |tag| [&tags[..], &[tag]].concat())).collect();
                for tags in &all {
                    let steps = tags.windows(2).all(|step| legal.transitions[step[0] * k + step[1]]);
                    let is_legal = steps && legal.start[tags[0]] && legal.end[tags[words - 1]];
                    // After as many rounds all of so many words are there.
                    assert_eq!(
                        is_legal,
                        written.contains(tags),
                        "{:?}",
                        tags.iter().map(|i| labels[*i]).collect::<Vec<_>>()
                    );
                }
            }
        }
        for other in [&["O", "I-A", "I-B", "B-B"][..], &["NOUN", "VERB"], &["O", "A"], &["O"], &[]] {
            assert_eq!(LegalTags::of_labels(other), None, "{other:?}");
        }
    }

    #[test]
    fn running_text_in_words() {
        let cases: &[(&str, &[&str])] = &[
            ("", &[]),
            (" \n ", &[]),
            ("Jim Henson was a puppeteer.", &["Jim", "Henson", "was", "a", "puppeteer", "."]),
            ("(Jim's \"Muppets\", 1955!?)", &["(", "Jim", "'s", "\"", "Muppets", "\"", ",", "1955", "!", "?", ")"]),
            ("co-operate 3.5% U.S. e-mail", &["co-operate", "3.5", "%", "U.S", ".", "e-mail"]),
            ("Zo\u{eb}\u{2019}s caf\u{e9}\u{2026}", &["Zo\u{eb}", "\u{2019}s", "caf\u{e9}", "\u{2026}"]),
            (
                "\u{4e2d}\u{56fd}ok \u{ff08}\u{4eba}\u{ff09}",
                &["\u{4e2d}", "\u{56fd}", "ok", "\u{ff08}", "\u{4eba}", "\u{ff09}"],
            ),
            ("'s ... \u{1f600}!", &["'", "s", ".", ".", ".", "\u{1f600}", "!"]),
        ];
        for (text, expected) in cases {
            let words: Vec<&str> = split_words(text).into_iter().map(|word| &text[word]).collect();
            assert_eq!(words, *expected, "{text}");
        }
        let (text, words) = join_words(&["a", "", "b\u{e9}"]);
        assert_eq!((text.as_str(), words), ("a  b\u{e9}", vec![0..1, 2..2, 3..6]));
    }

    #[test]
    fn tag_sets_by_their_labels() {
        for (labels, expected) in [
            (&["O", "B-PER", "I-PER"][..], TagSet::Chunks),
            (&["B-X-Y", "E-X-Y", "S-X", "O"], TagSet::Chunks),
            (&["NOUN", "VERB", "PUNCT"], TagSet::Words),
            (&["O", "PER", "LOC"], TagSet::Runs),
            (&["O"], TagSet::Runs),
            (&["LABEL_0", "LABEL_1"], TagSet::Words),
        ] {
            assert_eq!(TagSet::of_labels(labels), expected, "{labels:?}");
        }
    }

    #[test]
    fn tags_to_entities() {
        let check = |set: TagSet, tags: &str, expected: &[(Range<usize>, &str)]| {
            let tags: Vec<Option<&str>> = tags.split(' ').map(|tag| Some(tag).filter(|tag| *tag != "-")).collect();
            assert_eq!(set.entities(&tags), expected, "{tags:?}");
        };
        let chunks = |tags, expected: &[(Range<usize>, &str)]| check(TagSet::Chunks, tags, expected);
        chunks("O B-PER I-PER O", &[(1..3, "PER")]);
        chunks("B-PER B-PER", &[(0..1, "PER"), (1..2, "PER")]);
        // IOB1: `B` only between neighbours of one kind.
        chunks("I-PER I-PER B-PER O I-LOC", &[(0..2, "PER"), (2..3, "PER"), (4..5, "LOC")]);
        // Another kind begins a new one, also without its `B`.
        chunks("B-PER I-LOC I-LOC", &[(0..1, "PER"), (1..3, "LOC")]);
        chunks("B-X I-X E-X S-X S-X E-X I-X", &[(0..3, "X"), (3..4, "X"), (4..5, "X"), (5..6, "X"), (6..7, "X")]);
        chunks("B-X L-X U-X", &[(0..2, "X"), (2..3, "X")]);
        chunks("B-X - I-X", &[(0..1, "X"), (2..3, "X")]);
        chunks("B-X-Y I-X-Y", &[(0..2, "X-Y")]);
        check(TagSet::Runs, "PER PER LOC O LOC", &[(0..2, "PER"), (2..3, "LOC"), (4..5, "LOC")]);
        check(TagSet::Words, "DET NOUN NOUN O", &[(0..1, "DET"), (1..2, "NOUN"), (2..3, "NOUN"), (3..4, "O")]);
    }
}
