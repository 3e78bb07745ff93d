//! Start and end logits to answers: the reverse of `windows.rs`. The procedure is that of Google's `run_squad.py`
//! (`write_predictions`) with one difference: an answer is a part of the passage as it was written, cut out by its offsets,
//! and never put together from pieces. How answers are scored is not here.

use std::collections::HashSet;
use std::ops::Range;

use crate::windows::QuestionWindows;

/// The logits of one window, one for each of its positions.
#[derive(Debug, Clone, PartialEq)]
pub struct SpanLogits {
    /// How well an answer begins here.
    pub start: Vec<f32>,
    /// How well an answer ends here, this token included.
    pub end: Vec<f32>,
}

/// Which answers are looked for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AnswerSettings {
    /// The most candidates; also how many of the best starts and ends of a window are paired.
    pub n_best: usize,
    /// The most tokens of an answer.
    pub longest: usize,
    /// Whether "no answer" is possible (SQuAD 2.0), and then by how much its score must exceed the best answer's. The
    /// higher this is, the more is answered. 0 is what the model itself thinks; tuning it on dev data gains a little.
    pub no_answer: Option<f64>,
}

impl Default for AnswerSettings {
    fn default() -> Self {
        Self { n_best: 20, longest: 30, no_answer: None }
    }
}

/// A possible answer.
#[derive(Debug, Clone, PartialEq)]
pub struct AnswerCandidate {
    /// Its bytes in the passage; `None` stands for "no answer".
    pub place: Option<Range<usize>>,
    /// The logit of its first token.
    pub start_logit: f32,
    /// The logit of its last token.
    pub end_logit: f32,
    /// Its share among the candidates: the softmax of start + end over them.
    pub probability: f64,
}

impl AnswerCandidate {
    /// Start and end together.
    pub fn score(&self) -> f64 {
        f64::from(self.start_logit) + f64::from(self.end_logit)
    }

    /// Its text in the passage; empty for "no answer".
    pub fn text<'p>(&self, passage: &'p str) -> &'p str {
        self.place.clone().and_then(|place| passage.get(place)).unwrap_or("")
    }
}

/// The answers to a question.
#[derive(Debug, Clone, PartialEq)]
pub struct Answers {
    /// The candidates, the best score first; "no answer" is among them where it is possible. No two have the same text.
    pub candidates: Vec<AnswerCandidate>,
    /// Which of them is the answer. `None` only where there are no candidates: a passage without pieces that must be
    /// answered.
    pub chosen: Option<usize>,
    /// Where "no answer" is possible: its score minus that of the best answer (SQuAD's null odds).
    pub null_odds: Option<f64>,
}

impl Answers {
    /// The answer.
    pub fn best(&self) -> Option<&AnswerCandidate> {
        self.candidates.get(self.chosen?)
    }
}

/// Finds the answers from the logits of a question's windows.
///
/// - A span is taken from a window where its first piece has most context, and nowhere else.
/// - Its start is among the window's `n_best` best starts and its end among the best ends, whatever tokens those are.
/// - The score of "no answer" is the smallest over the windows of both logits at `[CLS]`: every window must think so.
pub fn find_answers(
    question: &QuestionWindows,
    logits: &[SpanLogits],
    passage: &str,
    settings: &AnswerSettings,
) -> Answers {
    let mut found: Vec<AnswerCandidate> = Vec::new();
    let mut null: Option<AnswerCandidate> = None;
    for (number, (window, logits)) in question.windows.iter().zip(logits).enumerate() {
        let at = |side: &[f32], position: usize| side.get(position).copied().unwrap_or(f32::NEG_INFINITY);
        let candidate = |place, start, end| AnswerCandidate {
            place,
            start_logit: at(&logits.start, start),
            end_logit: at(&logits.end, end),
            probability: 0.0,
        };
        let here = question.null_position(number);
        let null_here = candidate(None, here, here);
        if null.as_ref().is_none_or(|null| null_here.score() < null.score()) {
            null = Some(null_here);
        }
        let shown = window.windowed_positions();
        let piece = |position: usize| shown.contains(&position).then(|| window.first_piece + position - shown.start);
        let ends = best_positions(&logits.end, settings.n_best);
        for start in best_positions(&logits.start, settings.n_best) {
            let Some(first) = piece(start).filter(|&first| question.most_context[first] == number) else { continue };
            for &end in ends.iter().filter(|&&end| start <= end && end - start < settings.longest) {
                let Some(last) = piece(end) else { continue };
                let place = question.passage.offsets[first].0..question.passage.offsets[last].1;
                if passage.get(place.clone()).is_some_and(|text| !text.is_empty()) {
                    found.push(candidate(Some(place), start, end));
                }
            }
        }
    }
    let null = null.filter(|_| settings.no_answer.is_some());
    let null_score = null.as_ref().map(AnswerCandidate::score);
    found.extend(null.clone());
    // A stable sort: of equal scores the earlier window's comes first, as in the original.
    found.sort_by(|a, b| b.score().total_cmp(&a.score()));
    let mut seen = HashSet::new();
    found.retain(|candidate| seen.insert(candidate.text(passage)));
    found.truncate(settings.n_best);
    if !found.iter().any(|candidate| candidate.place.is_none()) {
        found.extend(null);
    }
    spread(&mut found);

    let best_answer = found.iter().position(|candidate| candidate.place.is_some());
    let null_odds = null_score.map(|null| null - best_answer.map_or(0.0, |best| found[best].score()));
    let says_nothing = match (null_odds, settings.no_answer, best_answer) {
        (Some(_), _, None) => true,
        (Some(odds), Some(threshold), Some(_)) => odds > threshold,
        _ => false,
    };
    let nothing = found.iter().position(|candidate| candidate.place.is_none());
    Answers { chosen: if says_nothing { nothing } else { best_answer }, candidates: found, null_odds }
}

/// The positions of the largest logits, the largest first, ties by position.
fn best_positions(logits: &[f32], count: usize) -> Vec<usize> {
    let mut positions: Vec<usize> = (0..logits.len()).collect();
    positions.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    positions.truncate(count);
    positions
}

/// Turns scores into probabilities.
fn spread(candidates: &mut [AnswerCandidate]) {
    let highest = candidates.iter().map(AnswerCandidate::score).fold(f64::NEG_INFINITY, f64::max);
    let weight = |candidate: &AnswerCandidate| (candidate.score() - highest).exp();
    let total: f64 = candidates.iter().map(weight).sum();
    for candidate in candidates {
        candidate.probability = weight(candidate) / total;
    }
}
