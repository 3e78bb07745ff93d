//! Documents into sentences: by line, or by rule.
//!
//! The rule looks at punctuation, at what follows it, and at the word before a full stop. It knows some abbreviations of
//! English and its neighbours, initials, decimals, ellipses, closing quotes, and scripts whose full stops need no space
//! after them. It is no parser and learns nothing: some percent of its boundaries are debatable, which pre-training does
//! not mind.
//!
//! Whatever the rule, no sentence is longer than [`LONGEST`]: a longer one is cut at white space, so that memory stays
//! bounded on any text.

use serde::{Deserialize, Serialize};

/// What a sentence is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sentences {
    /// Each line is one.
    Lines,
    /// Punctuation decides. A line's end is a sentence's end too, except where lines are wrapped: in a document without
    /// lines over 100 characters, one of 40 or more goes on in the next line. An empty line always ends a sentence.
    Split,
}

/// The longest sentence in bytes: many times longer than any sequence.
pub(crate) const LONGEST: usize = 1 << 16;

/// A document whose longest line has at most so many characters may be wrapped …
const WRAPPED: usize = 100;
/// … and then a line with at least so many goes on in the next.
const GOES_ON: usize = 40;

/// Gives each sentence of a document, trimmed and never empty. `buffer` is memory to reuse.
pub(crate) fn for_each(document: &str, rule: Sentences, buffer: &mut String, each: &mut dyn FnMut(&str)) {
    let mut bounded = |sentence: &str| cut(sentence.trim(), each);
    match rule {
        Sentences::Lines => document.lines().for_each(bounded),
        Sentences::Split => {
            let wrapped = document.lines().all(|line| line.len() <= WRAPPED || line.chars().count() <= WRAPPED);
            buffer.clear();
            for line in document.lines().map(str::trim) {
                if !buffer.is_empty() && !line.is_empty() {
                    buffer.push(' ');
                }
                buffer.push_str(line);
                if line.is_empty() || !wrapped || line.chars().count() < GOES_ON {
                    split(buffer, &mut bounded);
                    buffer.clear();
                }
            }
            split(buffer, &mut bounded);
        }
    }
}

/// Cuts what is too long at white space, or where there is none between two characters.
fn cut(mut sentence: &str, each: &mut dyn FnMut(&str)) {
    while sentence.len() > LONGEST {
        let end = sentence.floor_char_boundary(LONGEST);
        let end = sentence[..end].rfind(char::is_whitespace).filter(|&space| space > 0).unwrap_or(end);
        each(sentence[..end].trim_end());
        sentence = sentence[end..].trim_start();
    }
    if !sentence.is_empty() {
        each(sentence);
    }
}

/// Divides a text without line breaks.
fn split(text: &str, each: &mut dyn FnMut(&str)) {
    let (mut begin, mut at) = (0, 0);
    while let Some(found) = text[at..].find(ends) {
        let stop = at + found;
        let stops_end = skip(text, stop, ends);
        let end = skip(text, stops_end, closes);
        if is_boundary(&text[begin..stop], &text[stop..stops_end], &text[stops_end..end], &text[end..]) {
            each(&text[begin..end]);
            begin = end;
        }
        at = end;
    }
    each(&text[begin..]);
}

/// Whether a sentence ends after `stops` and `closers`.
fn is_boundary(before: &str, stops: &str, closers: &str, after: &str) -> bool {
    let rest = after.trim_start();
    let Some(next) = rest.chars().next() else { return true };
    if stops.contains(ends_without_space) {
        // 「なに？」と言った: what is said goes on as a part of the sentence.
        return closers.is_empty() || !['と', '、', '，', ','].contains(&next);
    }
    if rest.len() == after.len() {
        // 3.14, e.g., example.org, what?!no
        return false;
    }
    let next = rest.chars().find(|&c| !opens(c)).unwrap_or(next);
    if next.is_lowercase() {
        return false;
    }
    if stops != "." || !closers.is_empty() {
        return true;
    }
    !goes_on(before, rest, next)
}

/// Whether a single full stop belongs to the word before it and not to the sentence.
fn goes_on(before: &str, rest: &str, next: char) -> bool {
    let mut words = before.split_whitespace().rev();
    let word = words.next().unwrap_or_default().trim_start_matches(opens);
    let previous = words.next();
    let word = word.rsplit(['-', '–', '—', '/']).next().unwrap_or(word);
    if previous.is_none() && !word.is_empty() && word.chars().all(|c| c.is_ascii_digit()) {
        // 1. Introduction
        return true;
    }
    let mut letters = word.chars();
    if let (Some(letter), None) = (letters.next(), letters.next())
        && letter.is_uppercase()
    {
        // J. K. Rowling; but: so do I. Then
        return letter != 'I' || previous.is_none_or(|word| word.starts_with(char::is_uppercase));
    }
    let starter = || {
        let first = rest.trim_start_matches(opens);
        let end = first.find(|c: char| !c.is_alphabetic()).unwrap_or(first.len());
        STARTERS.contains(&&first[..end])
    };
    let lower = word.to_lowercase();
    if TITLES.contains(&lower.as_str()) {
        return next.is_alphanumeric();
    }
    if BEFORE_NUMBERS.contains(&lower.as_str()) {
        return next.is_numeric();
    }
    // U.S. Army; but: in the U.S. The army
    let abbreviated = word.contains('.') && word.split('.').all(|part| (1..=3).contains(&part.chars().count()));
    (abbreviated && word.starts_with(char::is_alphabetic) || SOMETIMES.contains(&lower.as_str())) && !starter()
}

/// Abbreviations that stand before a name.
const TITLES: [&str; 49] = [
    "mr", "mrs", "ms", "messrs", "dr", "prof", "rev", "hon", "st", "mt", "ft", "gen", "col", "capt", "lt", "sgt",
    "maj", "cmdr", "adm", "sen", "rep", "gov", "pres", "supt", "mlle", "mme", "sra", "srta", "hr", "frl", "bzw", "sog",
    "vgl", "vs", "cf", "viz", "ca", "approx", "al", "esp", "incl", "ed", "eds", "trans", "dept", "univ", "assn",
    "bros", "gebr",
];

/// Abbreviations that stand before a number, and words when they do not.
const BEFORE_NUMBERS: [&str; 32] = [
    "no", "nos", "nr", "fig", "figs", "eq", "eqs", "sec", "ch", "chap", "vol", "vols", "pp", "p", "art", "op", "tab",
    "ver", "jan", "feb", "mar", "apr", "jun", "jul", "aug", "sep", "sept", "oct", "nov", "dec", "bd", "abb",
];

/// Abbreviations that may end a sentence.
const SOMETIMES: [&str; 12] = ["inc", "ltd", "co", "corp", "etc", "jr", "sr", "mass", "calif", "est", "ave", "blvd"];

/// Words that begin a sentence more often than they go on after an abbreviation.
const STARTERS: [&str; 48] = [
    "The", "A", "An", "In", "On", "At", "It", "He", "She", "They", "We", "You", "I", "This", "That", "These", "Those",
    "But", "And", "However", "His", "Her", "Its", "Their", "Our", "My", "There", "Then", "When", "While", "If", "As",
    "For", "From", "After", "Before", "Although", "Because", "Since", "So", "To", "What", "Who", "Why", "How", "Not",
    "Some", "Most",
];

fn ends(c: char) -> bool {
    matches!(c, '.' | '!' | '?' | '…' | '‼' | '⁇' | '⁈' | '⁉' | '؟' | '۔' | '։') || ends_without_space(c)
}

/// Full stops of scripts that do not use spaces, or not after them.
fn ends_without_space(c: char) -> bool {
    matches!(c, '。' | '！' | '？' | '｡' | '।' | '॥' | '።' | '။' | '។')
}

fn closes(c: char) -> bool {
    matches!(c, '"' | '\'' | '”' | '’' | '»' | '›' | ')' | ']' | '}' | '」' | '』' | '）' | '】' | '》' | '〉' | '］')
}

fn opens(c: char) -> bool {
    matches!(
        c,
        '"' | '\'' | '“' | '‘' | '„' | '‚' | '«' | '‹' | '(' | '[' | '{' | '¿' | '¡' | '「' | '『' | '（' | '【'
    )
}

/// The first place from `at` on where a character is not of a kind.
fn skip(text: &str, at: usize, kind: fn(char) -> bool) -> usize {
    text[at..].find(|c| !kind(c)).map_or(text.len(), |length| at + length)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sentences(document: &str, rule: Sentences) -> Vec<String> {
        let mut found = Vec::new();
        for_each(document, rule, &mut String::new(), &mut |sentence| found.push(sentence.to_owned()));
        found
    }

    /// A text with `|` where sentences end.
    #[track_caller]
    fn check(marked: &str) {
        let text = marked.replace('|', "");
        let expected: Vec<&str> = marked.split('|').map(str::trim).collect();
        assert_eq!(sentences(&text, Sentences::Split), expected);
    }

    #[test]
    fn boundaries() {
        for marked in [
            "One.| Two!| Three?| Four",
            "Jim Henson was a puppeteer.| He was born in 1936.| 20 years later he had a show.",
            // Abbreviations and initials.
            "Dr. Smith met Mrs. Jones of St. Louis.| They spoke.",
            "J. K. Rowling and J.R.R. Tolkien wrote.| So did C. S. Lewis.",
            "The U.S. Army left the U.S. in 1946.| It came back.",
            "They live in the U.S.| The weather is good.",
            "At 5 p.m. Tuesday it rained, e.g. in Rome, i.e. there.| Then it stopped.",
            "Apple Inc. Chairman Jobs spoke.| He works for Apple Inc.| The firm is large.",
            "So do I.| Then we left.",
            "Smith et al. Found this vs. That.| Yes.",
            "See Fig. 3 and No. 10 of Vol. 2.| The answer is no.| Others agree.",
            "On Jan. 5 it began.| In Jan.| Others came.",
            "He has a Ph.D. from Yale.| Good.",
            // Numbers.
            "It is 3.14 or 1,000.5 m.| Version 2.0.1 is out.",
            "1. Introduction to it.| 2. The rest.",
            "It was in 1990.| Others came.",
            // Quotes and brackets.
            "“Stop!” he said.| “Go on.”| She did.",
            "\"What?\" asked he.| 'No.'| (He left.)| [It ended.]| Good.",
            "He said: «Oui.»| ¿Qué?| ¡No!| Sí.",
            // Ellipses and runs.
            "Well... maybe.| Well...| Maybe.| Well… maybe.| Well…| Maybe.| What?!| Really!!!| Yes.",
            // Addresses.
            "Go to example.org or write to a.b@c.de today.| Thanks.",
            // Other scripts.
            "今天很好。|明天呢？|「真的！」|是的。",
            "「なに？」と言った。|そうです。",
            "यह एक वाक्य है।| यह दूसरा है।",
            "هل أنت هنا؟| نعم.",
            "Это предложение.| И ещё одно.",
            // Nothing to end.
            "no punctuation at all",
            "...",
        ] {
            check(marked);
        }
    }

    #[test]
    fn lines() {
        assert_eq!(sentences("a. B.\n\n  c \r\n \n", Sentences::Lines), ["a. B.", "c"]);
        assert_eq!(sentences("", Sentences::Split), [""; 0]);
        assert_eq!(sentences(" \n \n", Sentences::Split), [""; 0]);
        // Short lines end sentences, wrapped ones do not, paragraphs always do.
        let wrapped = "CHAPTER I\n\nIt is a truth universally acknowledged, that a\nsingle man in possession of a good fortune,\n\
            must be in want of a wife. However little known\nthe feelings may be.";
        assert_eq!(
            sentences(wrapped, Sentences::Split),
            [
                "CHAPTER I",
                "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a wife.",
                "However little known the feelings may be.",
            ]
        );
        let long = "x".repeat(101);
        let first = "A line of more than forty characters without an end";
        assert_eq!(sentences(&format!("{first}\n{long}"), Sentences::Split), [first, &long]);
    }

    #[test]
    fn long_ones_are_cut() {
        let text = "ab ".repeat(LONGEST);
        for rule in [Sentences::Lines, Sentences::Split] {
            let parts = sentences(&text, rule);
            assert!(parts.iter().all(|part| part.len() <= LONGEST && part.starts_with('a') && part.ends_with('b')));
            assert_eq!(parts.join(" "), text.trim_end());
        }
        let solid = "é".repeat(LONGEST);
        assert_eq!(sentences(&solid, Sentences::Lines).concat(), solid);
    }

    proptest::proptest! {
        /// Nothing is lost but white space, whatever the text.
        #[test]
        fn nothing_is_lost(text in "([a-cA-C.?!…。」\"' \n\r\t\u{85}éÉ1\u{3000}]|(Mr)|(\\PC)){0,60}") {
            let solid = |text: &str| text.chars().filter(|c| !c.is_whitespace()).collect::<String>();
            for rule in [Sentences::Lines, Sentences::Split] {
                let found = sentences(&text, rule);
                proptest::prop_assert_eq!(solid(&found.concat()), solid(&text));
                proptest::prop_assert!(found.iter().all(|s| !s.is_empty() && s.trim() == s && !s.contains('\n')));
            }
        }
    }
}
