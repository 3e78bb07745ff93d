//! Scores by their official definitions: scikit-learn's for classes, SciPy's for numbers, conlleval's for entities, those of
//! SQuAD's own programs for answers, and those of sacreBLEU and rouge-score for written texts. Plain functions of what is
//! expected and what was predicted.
//!
//! A quotient of nothing by nothing is 0, as scikit-learn has it; a correlation with something constant is not a number.

mod answers;
mod bleu;
mod chrf;
mod classes;
mod edits;
mod entities;
mod ngrams;
mod numbers;
mod ranking;
mod retrieval;
mod rouge;
mod stem;
mod texts;

pub use answers::{AnswerScore, Threshold, answer_score, best_threshold, normalise_answer};
pub use bleu::Bleu;
pub use chrf::Chrf;
pub use classes::{Confusion, MultilabelCounts};
pub use edits::{common_length, edit_distance};
pub use entities::EntityCounts;
pub use numbers::{mean_absolute_error, mean_squared_error, pearson, spearman};
pub use ranking::{JudgedRanking, PairScores, ranking_scores, reranking_scores};
pub use retrieval::{cosine, nearest};
pub use rouge::{Rouge, RougeScore};
pub use stem::stem;
pub use texts::TextScores;

/// Right ones, predicted ones and expected ones: all that precision, recall and F1 need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Predicted and expected.
    pub right: u64,
    /// Predicted.
    pub predicted: u64,
    /// Expected.
    pub expected: u64,
}

impl Counts {
    /// Of those predicted, the share that is right.
    pub fn precision(self) -> f64 {
        share(self.right, self.predicted)
    }

    /// Of those expected, the share that was predicted.
    pub fn recall(self) -> f64 {
        share(self.right, self.expected)
    }

    /// The harmonic mean of both.
    pub fn f1(self) -> f64 {
        share(2 * self.right, self.predicted + self.expected)
    }
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.right += other.right;
        self.predicted += other.predicted;
        self.expected += other.expected;
    }
}

fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// The mean; of nothing, 0.
fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0u64), |(sum, count), value| (sum + value, count + 1));
    if count == 0 { 0.0 } else { sum / count as f64 }
}
