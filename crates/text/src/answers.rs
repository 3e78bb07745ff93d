//! Start and end logits, or beams of both, to answers: the reverse of `windows.rs`. The procedure is that of Google's `run_squad.py`
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

/// What a model whose ends depend on their starts (XLNet's own head) says about a window: a few starts with a few ends each.
#[derive(Debug, Clone, PartialEq)]
pub struct SpanBeams {
    /// The logit that this window has no answer.
    pub no_answer: f32,
    /// Starts and ends that were looked at.
    pub spans: Vec<BeamSpan>,
}

/// A start and an end.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BeamSpan {
    /// The position of the first token.
    pub start: usize,
    /// That of the last.
    pub end: usize,
    /// The logarithm of the start's probability.
    pub start_score: f32,
    /// That of the end's, given the start.
    pub end_score: f32,
}

impl SpanBeams {
    /// All as plain numbers: whether there is no answer, then four of each span.
    pub fn to_numbers(&self) -> Vec<f32> {
        let spans = self.spans.iter();
        let of = |span: &BeamSpan| [span.start as f32, span.end as f32, span.start_score, span.end_score];
        [self.no_answer].into_iter().chain(spans.flat_map(of)).collect()
    }

    /// The reverse. Positions are whole numbers far below 2²⁴, which `f32` holds as they are.
    pub fn from_numbers(numbers: &[f32]) -> Self {
        let span =
            |n: &[f32]| BeamSpan { start: n[0] as usize, end: n[1] as usize, start_score: n[2], end_score: n[3] };
        let (first, rest) = numbers.split_first().map_or((0.0, &[][..]), |(first, rest)| (*first, rest));
        Self { no_answer: first, spans: rest.chunks_exact(4).map(span).collect() }
    }
}

/// Which answers are looked for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AnswerSettings {
    /// The most candidates; also how many of the best starts and ends of a window are paired.
    pub n_best: usize,
    /// Maximum number of tokens of an answer.
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
    /// The logit of its first token; of a beam the logarithm of its probability.
    pub start_logit: f32,
    /// The same of its last token.
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
    /// Where "no answer" is possible: its score minus that of the best answer (SQuAD's null odds); of a model with beams, its logit.
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
    for (number, logits) in logits.iter().take(question.windows.len()).enumerate() {
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
        let ends = best_positions(&logits.end, settings.n_best);
        for start in best_positions(&logits.start, settings.n_best) {
            for &end in &ends {
                if let Some(place) = place_of(question, number, (start, end), passage, settings) {
                    found.push(candidate(Some(place), start, end));
                }
            }
        }
    }
    let null = null.filter(|_| settings.no_answer.is_some());
    let null_score = null.as_ref().map(AnswerCandidate::score);
    found.extend(null.clone());
    rank(&mut found, passage, settings.n_best);
    if !found.iter().any(|candidate| candidate.place.is_none()) {
        found.extend(null);
    }
    let best = found.iter().find(|candidate| candidate.place.is_some());
    let null_odds = null_score.map(|null| null - best.map_or(0.0, AnswerCandidate::score));
    chosen_among(found, null_odds, settings)
}

/// Finds the answers from what a model with beams says about a question's windows. Spans of all windows are ranked by the product
/// of both probabilities. Whether there is an answer is a question of its own: that of the window that denies it least.
pub fn find_beam_answers(
    question: &QuestionWindows,
    beams: &[SpanBeams],
    passage: &str,
    settings: &AnswerSettings,
) -> Answers {
    let mut found: Vec<AnswerCandidate> = Vec::new();
    for (number, beams) in beams.iter().enumerate() {
        for span in &beams.spans {
            if let Some(place) = place_of(question, number, (span.start, span.end), passage, settings) {
                let (start_logit, end_logit) = (span.start_score, span.end_score);
                found.push(AnswerCandidate { place: Some(place), start_logit, end_logit, probability: 0.0 });
            }
        }
    }
    rank(&mut found, passage, settings.n_best);
    let no_answer = beams.iter().map(|beams| beams.no_answer).reduce(f32::min).filter(|_| settings.no_answer.is_some());
    if let Some(logit) = no_answer {
        // With the logarithm of what all spans have, its share among them is the logit's own probability.
        let all = found.iter().map(|candidate| candidate.score().exp()).sum::<f64>();
        let end_logit = if all > 0.0 { all.ln() as f32 } else { 0.0 };
        found.push(AnswerCandidate { place: None, start_logit: logit, end_logit, probability: 0.0 });
        found.sort_by(|a, b| b.score().total_cmp(&a.score()));
    }
    chosen_among(found, no_answer.map(f64::from), settings)
}

/// Where a window's span stands in the passage, if it may be an answer and this is the window to take it from.
fn place_of(
    question: &QuestionWindows,
    number: usize,
    (start, end): (usize, usize),
    passage: &str,
    settings: &AnswerSettings,
) -> Option<Range<usize>> {
    let window = question.windows.get(number)?;
    let shown = window.windowed_positions();
    let piece = |position: usize| shown.contains(&position).then(|| window.first_piece + position - shown.start);
    let first = piece(start).filter(|&first| question.most_context[first] == number)?;
    let last = piece(end).filter(|_| start <= end && end - start < settings.longest)?;
    let place = question.passage.offsets[first].0..question.passage.offsets[last].1;
    passage.get(place.clone()).is_some_and(|text| !text.is_empty()).then_some(place)
}

/// The best candidates, one of each text.
fn rank(found: &mut Vec<AnswerCandidate>, passage: &str, n_best: usize) {
    // A stable sort: of equal scores the earlier window's comes first, as in the original.
    found.sort_by(|a, b| b.score().total_cmp(&a.score()));
    let mut seen = HashSet::new();
    found.retain(|candidate| seen.insert(candidate.text(passage)));
    found.truncate(n_best);
}

/// The answer among candidates, the best first.
fn chosen_among(mut found: Vec<AnswerCandidate>, null_odds: Option<f64>, settings: &AnswerSettings) -> Answers {
    spread(&mut found);
    let best_answer = found.iter().position(|candidate| candidate.place.is_some());
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
