//! Scores of answers as SQuAD's programs count them (evaluate-v2.0, whose values for SQuAD 1.1 are those of evaluate-v1.1).

use std::collections::HashMap;

/// How right an answer is, by the annotators' answer that it is closest to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AnswerScore {
    /// 1 where the normalised texts are the same, else 0.
    pub exact: f64,
    /// The F1 of the words that both have, from 0 to 1.
    pub f1: f64,
}

/// Compares an answer with those expected; none expected, or only such as normalise to nothing: "" is the right answer.
pub fn answer_score<'a>(expected: impl Iterator<Item = &'a str>, predicted: &str) -> AnswerScore {
    let mut expected: Vec<String> = expected.map(normalise_answer).filter(|answer| !answer.is_empty()).collect();
    if expected.is_empty() {
        expected.push(String::new());
    }
    let predicted = normalise_answer(predicted);
    let mut best = AnswerScore { exact: 0.0, f1: 0.0 };
    for answer in &expected {
        best.exact = f64::max(best.exact, f64::from(u8::from(*answer == predicted)));
        best.f1 = best.f1.max(f1_of_words(answer, &predicted));
    }
    best
}

/// Small letters, no ASCII punctuation, no articles, single spaces.
pub fn normalise_answer(text: &str) -> String {
    let text: String = text.to_lowercase().chars().filter(|c| !c.is_ascii_punctuation()).collect();
    // An article stands between characters that are not part of words; what it leaves is a space.
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut kept = String::with_capacity(text.len());
    let mut rest = text.as_str();
    while let Some(first) = rest.chars().next() {
        let length = match is_word(first) {
            true => rest.find(|c| !is_word(c)).unwrap_or(rest.len()),
            false => first.len_utf8(),
        };
        let (part, after) = rest.split_at(length);
        kept.push_str(if matches!(part, "a" | "an" | "the") { " " } else { part });
        rest = after;
    }
    // Python's white space has four control characters more than Rust's.
    let is_space = |c: char| c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c);
    kept.split(is_space).filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ")
}

fn f1_of_words(expected: &str, predicted: &str) -> f64 {
    let words = |text: &'_ str| text.split(' ').filter(|word| !word.is_empty()).count();
    let (expected_words, predicted_words) = (words(expected), words(predicted));
    if expected_words == 0 || predicted_words == 0 {
        return f64::from(u8::from(expected_words == predicted_words));
    }
    let mut left: HashMap<&str, usize> = HashMap::new();
    for word in expected.split(' ') {
        *left.entry(word).or_default() += 1;
    }
    let mut same = 0;
    for word in predicted.split(' ') {
        if let Some(count) = left.get_mut(word).filter(|count| **count > 0) {
            *count -= 1;
            same += 1;
        }
    }
    if same == 0 {
        return 0.0;
    }
    // In this form, and not 2·same/(both), the last digit is that of the official program.
    let precision = f64::from(same) / predicted_words as f64;
    let recall = f64::from(same) / expected_words as f64;
    2.0 * precision * recall / (precision + recall)
}

/// The best that another threshold for "no answer" would give.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Threshold {
    /// The mean score there.
    pub score: f64,
    /// Questions whose odds for "no answer" are above it count as unanswered.
    pub threshold: f64,
}

/// Finds the threshold on the odds for "no answer" with the best mean score. Of each question: the odds, whether it has an
/// answer, the score of what was answered, and whether that is more than "". The procedure is the official one: all
/// unanswered at first, then answered one by one in the order of their odds; the first best counts. Where that is to answer
/// none, the official threshold is 0, which is below all odds that are probabilities; below others it has to be lower.
pub fn best_threshold(questions: &[(f64, bool, f64, bool)]) -> Threshold {
    let mut order: Vec<usize> = (0..questions.len()).collect();
    order.sort_by(|&a, &b| questions[a].0.total_cmp(&questions[b].0));
    let mut score = questions.iter().filter(|question| !question.1).count() as f64;
    let lowest = order.first().map_or(f64::INFINITY, |&i| questions[i].0);
    let mut best = Threshold { score, threshold: if lowest > 0.0 { 0.0 } else { lowest - 1.0 } };
    for i in order {
        let (odds, has_answer, answered, says_something) = questions[i];
        score += match (has_answer, says_something) {
            (true, _) => answered,
            (false, true) => -1.0,
            (false, false) => 0.0,
        };
        if score > best.score {
            best = Threshold { score, threshold: odds };
        }
    }
    Threshold { score: best.score / questions.len().max(1) as f64, ..best }
}
