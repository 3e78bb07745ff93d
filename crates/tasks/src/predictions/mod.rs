//! What models say, and the files that it is written to.

mod read;
mod write;

use serde::{Deserialize, Serialize};

use crate::metrics::cosine;

pub use read::{read_null_odds, read_predictions};
pub use write::prediction_files;

/// What a model says about an example. Labels are numbers of [`crate::Set::labels`].
#[derive(Clone, Debug, PartialEq)]
pub enum Prediction {
    /// Nothing: it counts as wrong.
    None,
    /// One label, or which of the choices; with the probabilities of all, where they are known.
    Class {
        /// The label.
        class: u32,
        /// For each label its probability; empty where nobody knows.
        scores: Vec<f32>,
    },
    /// Any number of labels.
    Classes {
        /// The labels, in ascending order.
        classes: Vec<u32>,
        /// For each label its probability; empty where nobody knows.
        scores: Vec<f32>,
    },
    /// A number.
    Number(f64),
    /// How alike two texts are.
    Similarity {
        /// The cosine of their vectors.
        cosine: f64,
        /// The vectors, where they are known.
        vectors: Option<[Vec<f32>; 2]>,
    },
    /// A label for each word.
    Tags(Vec<u32>),
    /// A part of the passage; "" says that it has no answer.
    Answer {
        /// Its text.
        text: String,
        /// The score of "no answer" minus that of the best answer.
        null_odds: Option<f64>,
        /// The best candidates, the best first; empty where nobody knows.
        candidates: Vec<Candidate>,
    },
}

/// A possible answer, as SQuAD's n-best files have it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Candidate {
    /// Its text; "" for "no answer".
    pub text: String,
    /// Its share among the candidates.
    pub probability: f64,
    /// The logit of its first token.
    pub start_logit: f64,
    /// The logit of its last token.
    pub end_logit: f64,
}

impl Prediction {
    /// By the vectors of two texts.
    pub fn similarity(first: Vec<f32>, second: Vec<f32>) -> Self {
        Self::Similarity { cosine: cosine(&first, &second), vectors: Some([first, second]) }
    }

    /// An answer from the decoded logits of a question's windows.
    pub fn from_answers(answers: &henson_text::Answers, passage: &str) -> Self {
        let candidates = answers.candidates.iter().map(|candidate| Candidate {
            text: candidate.text(passage).to_owned(),
            probability: candidate.probability,
            start_logit: f64::from(candidate.start_logit),
            end_logit: f64::from(candidate.end_logit),
        });
        let text = answers.best().map_or("", |best| best.text(passage)).to_owned();
        Self::Answer { text, null_odds: answers.null_odds, candidates: candidates.collect() }
    }
}
