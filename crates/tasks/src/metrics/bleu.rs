//! BLEU as sacreBLEU 2 computes it by default: words by mteval's v13a, exponential smoothing, case kept, several references.

use super::ngrams::{Counted, Words, is_python_space};

/// The longest n-grams.
const ORDER: usize = 4;

/// What BLEU needs of all texts of a corpus, added up text by text.
#[derive(Debug, Default)]
pub struct Bleu {
    words: Words,
    matches: [u64; ORDER],
    totals: [u64; ORDER],
    length: u64,
    reference_length: u64,
}

impl Bleu {
    /// Adds a text and its references, of which there is at least one.
    pub fn add<S: AsRef<str>>(&mut self, text: &str, references: &[S]) {
        let text = self.read(text);
        let references: Vec<Vec<u32>> = references.iter().map(|reference| self.read(reference.as_ref())).collect();
        for n in 1..=ORDER {
            let ngrams = |words: &[u32]| Counted::new(words, n, 32);
            let (own, others) = (ngrams(&text), references.iter().map(|words| ngrams(words)).collect::<Vec<_>>());
            self.totals[n - 1] += own.total();
            self.matches[n - 1] += own.shared_with_any(&others);
        }
        self.length += text.len() as u64;
        // The length that is closest, of two as close the shorter one.
        let closest = references.iter().map(Vec::len).min_by_key(|length| (length.abs_diff(text.len()), *length));
        self.reference_length += closest.unwrap_or(0) as u64;
    }

    /// The score of the corpus, from 0 to 100.
    pub fn score(&self) -> f64 {
        if self.matches.iter().all(|count| *count == 0) {
            return 0.0;
        }
        let (mut smoothing, mut logs) = (1.0, 0.0);
        for (matched, total) in self.matches.iter().zip(self.totals) {
            // A corpus without any n-gram of this length has the score 0.
            if total == 0 {
                return 0.0;
            }
            let precision = match *matched {
                0 => {
                    smoothing *= 2.0;
                    100.0 / (smoothing * total as f64)
                }
                matched => 100.0 * matched as f64 / total as f64,
            };
            logs += precision.ln();
        }
        let penalty = match self.length < self.reference_length {
            true => (1.0 - self.reference_length as f64 / self.length as f64).exp(),
            false => 1.0,
        };
        penalty * (logs / ORDER as f64).exp()
    }

    fn read(&mut self, text: &str) -> Vec<u32> {
        let text = tokenize_13a(text.trim_end_matches(is_python_space));
        text.split(is_python_space).filter(|word| !word.is_empty()).map(|word| self.words.number(word)).collect()
    }
}

/// A text with spaces around all that counts as a word, as mteval-v13a.pl sets them.
fn tokenize_13a(text: &str) -> String {
    let mut text = text.replace("<skipped>", "").replace("-\n", "").replace('\n', " ");
    if text.contains('&') {
        for (entity, character) in [("&quot;", "\""), ("&amp;", "&"), ("&lt;", "<"), ("&gt;", ">")] {
            text = text.replace(entity, character);
        }
    }
    let mut spaced = String::with_capacity(text.len() * 2);
    spaced.push(' ');
    for c in text.chars() {
        match is_symbol(c) {
            true => spaced.extend([' ', c, ' ']),
            false => spaced.push(c),
        }
    }
    spaced.push(' ');
    // Full stops and commas leave what is not a digit before or after them, dashes a digit before them.
    let is_stop = |c: char| matches!(c, '.' | ',');
    let spaced = each_pair(&spaced, |a, b| !a.is_ascii_digit() && is_stop(b), |a, b| format!("{a} {b} "));
    let spaced = each_pair(&spaced, |a, b| is_stop(a) && !b.is_ascii_digit(), |a, b| format!(" {a} {b}"));
    each_pair(&spaced, |a, b| a.is_ascii_digit() && b == '-', |a, b| format!("{a} {b} "))
}

/// ASCII's punctuation but for `'`, `,`, `-` and `.`; and the space.
fn is_symbol(c: char) -> bool {
    matches!(c, '{'..='~' | '['..='`' | ' '..='&' | '('..='+' | ':'..='@' | '/')
}

/// Replaces pairs of neighbours from left to right, none of which overlap.
fn each_pair(text: &str, fits: impl Fn(char, char) -> bool, replaced: impl Fn(char, char) -> String) -> String {
    let mut out = String::with_capacity(text.len() * 2);
    let mut characters = text.chars().peekable();
    while let Some(first) = characters.next() {
        match characters.next_if(|second| fits(first, *second)) {
            Some(second) => out.push_str(&replaced(first, second)),
            None => out.push(first),
        }
    }
    out
}
