//! ROUGE as rouge-score 0.1.2 computes it with stemming: words of ASCII letters and digits, of several references the best for each kind of
//! score, the mean of F1 over a corpus.

use std::collections::{HashMap, HashSet};

use super::edits::{Sequence, common_items, common_length};
use super::ngrams::{Counted, Words};
use super::stem::stem;
use super::{Counts, mean};

/// The shortest word that is stemmed.
const STEMMED: usize = 4;

/// F1 of a text, or the mean of a corpus, from 0 to 1.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RougeScore {
    /// By words.
    pub rouge1: f64,
    /// By pairs of words.
    pub rouge2: f64,
    /// By the longest common subsequence of words.
    pub rouge_l: f64,
    /// The same by sentences, which are lines.
    pub rouge_l_sum: f64,
}

/// The scores of all texts of a corpus.
#[derive(Debug, Default)]
pub struct Rouge {
    words: Words,
    /// The number of each word's stem.
    stems: HashMap<String, u32>,
    scores: Vec<RougeScore>,
}

impl Rouge {
    /// Adds a text; of its references, the one with the best score counts, for each kind of score.
    pub fn add<S: AsRef<str>>(&mut self, text: &str, references: &[S]) {
        let own = self.read(text);
        let mut best = RougeScore::default();
        for reference in references {
            let reference = self.read(reference.as_ref());
            best.rouge1 = best.rouge1.max(own.by_ngrams(&reference, 1));
            best.rouge2 = best.rouge2.max(own.by_ngrams(&reference, 2));
            best.rouge_l = best.rouge_l.max(own.by_subsequence(&reference));
            best.rouge_l_sum = best.rouge_l_sum.max(own.by_sentences(&reference));
        }
        self.scores.push(best);
    }

    /// The scores of the corpus.
    pub fn score(&self) -> RougeScore {
        let of = |part: fn(&RougeScore) -> f64| mean(self.scores.iter().map(part));
        RougeScore {
            rouge1: of(|score| score.rouge1),
            rouge2: of(|score| score.rouge2),
            rouge_l: of(|score| score.rouge_l),
            rouge_l_sum: of(|score| score.rouge_l_sum),
        }
    }

    fn read(&mut self, text: &str) -> Text {
        let sentences: Vec<Vec<u32>> = text.split('\n').map(|line| self.words_of(line)).collect();
        Text { words: sentences.concat(), sentences }
    }

    fn words_of(&mut self, line: &str) -> Vec<u32> {
        let line = line.to_lowercase();
        let words = line.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
        words.filter_map(|word| self.number(word)).collect()
    }

    /// The number of a word's stem, where it leaves anything.
    fn number(&mut self, word: &str) -> Option<u32> {
        if let Some(number) = self.stems.get(word) {
            return Some(*number);
        }
        let stem = if word.len() < STEMMED { word.to_owned() } else { stem(word) };
        let number = (!stem.is_empty()).then(|| self.words.number(&stem))?;
        self.stems.insert(word.to_owned(), number);
        Some(number)
    }
}

/// A text as numbers of stems.
struct Text {
    words: Vec<u32>,
    sentences: Vec<Vec<u32>>,
}

impl Text {
    fn by_ngrams(&self, reference: &Self, n: usize) -> f64 {
        let (own, reference) = (Counted::new(&self.words, n, 32), Counted::new(&reference.words, n, 32));
        f1(reference.shared(&own), own.total(), reference.total())
    }

    fn by_subsequence(&self, reference: &Self) -> f64 {
        let common = common_length(&reference.words, &self.words);
        f1(common as u64, self.words.len() as u64, reference.words.len() as u64)
    }

    /// The words of each sentence of the reference that are in the longest common subsequence with any sentence of the text, each word
    /// at most as often as both texts have it.
    fn by_sentences(&self, reference: &Self) -> f64 {
        let (mut left, mut left_own) = (frequencies(&reference.words), frequencies(&self.words));
        // The same sentence twice adds nothing, nor does one without common words.
        let mut sentences = self.sentences.clone();
        sentences.sort_unstable();
        sentences.dedup();
        let mut with: HashMap<u32, Vec<usize>> = HashMap::new();
        for (number, sentence) in sentences.iter().enumerate() {
            for word in sentence {
                let numbers = with.entry(*word).or_default();
                if numbers.last() != Some(&number) {
                    numbers.push(number);
                }
            }
        }
        let sentences: Vec<Sequence> = sentences.into_iter().map(Sequence::new).collect();
        let mut known: HashMap<&[u32], Vec<u32>> = HashMap::new();
        let mut right = 0;
        for sentence in &reference.sentences {
            let found = known.entry(sentence).or_insert_with(|| {
                let shared = sentence.iter().filter_map(|word| with.get(word));
                let related: HashSet<usize> = shared.flatten().copied().collect();
                let (mut union, own) = (vec![false; sentence.len()], Sequence::new(sentence.clone()));
                for number in related {
                    common_items(&own, &sentences[number]).into_iter().for_each(|item| union[item] = true);
                }
                sentence.iter().zip(union).filter(|(_, found)| *found).map(|(word, _)| *word).collect()
            });
            for word in found.iter() {
                if let (Some(own @ 1..), Some(other @ 1..)) = (left_own.get_mut(word), left.get_mut(word)) {
                    *own -= 1;
                    *other -= 1;
                    right += 1;
                }
            }
        }
        f1(right, self.words.len() as u64, reference.words.len() as u64)
    }
}

fn frequencies(words: &[u32]) -> HashMap<u32, u32> {
    let mut counts = HashMap::new();
    for word in words {
        *counts.entry(*word).or_default() += 1;
    }
    counts
}

/// In this form, and not as 2·right/(both), the last digit is that of rouge-score.
fn f1(right: u64, predicted: u64, expected: u64) -> f64 {
    let counts = Counts { right, predicted, expected };
    let (precision, recall) = (counts.precision(), counts.recall());
    if precision + recall > 0.0 { 2.0 * precision * recall / (precision + recall) } else { 0.0 }
}
