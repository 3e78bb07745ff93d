//! All scores of written texts against references.

use super::bleu::Bleu;
use super::chrf::Chrf;
use super::edits::edit_distance;
use super::ngrams::{Words, is_python_space};
use super::rouge::{Rouge, RougeScore};
use super::share;

/// The version of sacreBLEU whose values these are.
const VERSION: &str = "2.6.0";

/// Scores of a corpus of written texts, each against its references.
#[derive(Debug, Default)]
pub struct TextScores {
    bleu: Bleu,
    chrf: Chrf,
    rouge: Rouge,
    words: Words,
    texts: u64,
    exact: u64,
    wrong: u64,
    edits: u64,
    expected: u64,
    /// The fewest and the most references of a text.
    references: Option<(usize, usize)>,
}

impl TextScores {
    /// Adds a text and its references, of which there is at least one; gives its own chrF.
    pub fn add<S: AsRef<str>>(&mut self, text: &str, references: &[S]) -> f64 {
        self.bleu.add(text, references);
        let chrf = self.chrf.add(text, references);
        self.rouge.add(text, references);
        let (few, many) = self.references.unwrap_or((references.len(), references.len()));
        self.references = Some((few.min(references.len()), many.max(references.len())));
        self.texts += 1;
        let trimmed = |text: &str| text.trim_matches(is_python_space).to_owned();
        self.exact += u64::from(references.iter().any(|reference| trimmed(reference.as_ref()) == trimmed(text)));
        let own = self.read(text);
        // The nearest reference, of several as near the first.
        let mut nearest: Option<(usize, usize)> = None;
        for reference in references {
            let reference = self.read(reference.as_ref());
            let distance = edit_distance(&own, &reference);
            if nearest.is_none_or(|(least, _)| distance < least) {
                nearest = Some((distance, reference.len()));
            }
        }
        let (distance, length) = nearest.unwrap_or_default();
        self.wrong += u64::from(distance > 0);
        self.edits += distance as u64;
        self.expected += length as u64;
        chrf
    }

    /// All scores by their names. `bleu` and `chrf` are from 0 to 100 as sacreBLEU prints them, all others shares: ROUGE as rouge-score
    /// gives it, `exact_match`, `wer`, the share of texts that are none of their references word by word, and `per`, edits of words
    /// per word of the nearest reference. In grapheme to phoneme conversion a text is a word, and its words are phones: so the names.
    pub fn metrics(&self) -> Vec<(&'static str, f64)> {
        let RougeScore { rouge1, rouge2, rouge_l, rouge_l_sum } = self.rouge.score();
        vec![
            ("bleu", self.bleu.score()),
            ("chrf", self.chrf.score()),
            ("rouge1", rouge1),
            ("rouge2", rouge2),
            ("rougeL", rouge_l),
            ("rougeLsum", rouge_l_sum),
            ("exact_match", share(self.exact, self.texts)),
            ("wer", share(self.wrong, self.texts)),
            ("per", self.edits as f64 / self.expected.max(1) as f64),
        ]
    }

    /// How scores were computed: the signatures that sacreBLEU prints for BLEU and chrF, and the settings of ROUGE.
    pub fn signatures(&self) -> Vec<(&'static str, String)> {
        let references = match self.references {
            Some((few, many)) if few == many => few.to_string(),
            _ => "var".to_owned(),
        };
        vec![
            ("bleu", format!("nrefs:{references}|case:mixed|eff:no|tok:13a|smooth:exp|version:{VERSION}")),
            ("chrf", format!("nrefs:{references}|case:mixed|eff:yes|nc:6|nw:0|space:no|version:{VERSION}")),
            ("rouge", "rouge-score 0.1.2, use_stemmer, best reference, mean F1".to_owned()),
        ]
    }

    fn read(&mut self, text: &str) -> Vec<u32> {
        text.split(is_python_space).filter(|word| !word.is_empty()).map(|word| self.words.number(word)).collect()
    }
}
