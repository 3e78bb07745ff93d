//! Classes that a model was never trained on: each becomes a sentence ("This example is about sport."), and a model of natural
//! language inference says whether the text entails it. As `transformers`' zero-shot pipeline has it.

use henson_text::Pieces;

use crate::numbers::{join_windows, softmax};
use crate::{InferError, Model, Read, Request, Result, Task};

/// What is asked.
#[derive(Clone, Copy, Debug)]
pub struct ZeroShot<'a> {
    /// The classes.
    pub labels: &'a [&'a str],
    /// The sentence, with `{}` where a label goes.
    pub hypothesis: &'a str,
    /// Whether several labels may hold: each has a probability of its own.
    pub multi_label: bool,
}

impl ZeroShot<'_> {
    /// The sentence of `transformers`.
    pub const HYPOTHESIS: &'static str = "This example is {}.";
}

/// What the model thinks of the labels for a text.
#[derive(Clone, Debug, PartialEq)]
pub struct ZeroShotScores {
    /// One for each label, in their order; they add up to 1 unless several may hold.
    pub scores: Vec<f32>,
    /// Pieces of the text that were cut off, in the sequences of all labels together.
    pub dropped: usize,
}

/// Which of a model's labels mean what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entailment {
    /// The text entails the hypothesis.
    pub entailment: usize,
    /// It contradicts it.
    pub contradiction: usize,
}

impl Entailment {
    /// By the names of labels: those that begin with "entail" and "contra", in any case. Without the latter, `transformers`'
    /// rule: the first label, or the last where the first is the entailment.
    pub(crate) fn of_labels(labels: &[String]) -> Option<Self> {
        let named = |start: &str| labels.iter().position(|label| label.to_lowercase().starts_with(start));
        let entailment = named("entail")?;
        let other = if entailment == 0 { labels.len() - 1 } else { 0 };
        (labels.len() > 1).then(|| Self { entailment, contradiction: named("contra").unwrap_or(other) })
    }
}

impl Model {
    /// What its labels mean, if it is a model of natural language inference.
    pub fn entailment(&self) -> Option<Entailment> {
        if self.task() == Some(Task::Classify) { Entailment::of_labels(&self.labels()) } else { None }
    }

    /// How likely each label is for each text.
    pub fn zero_shot(&self, texts: &[&str], asked: &ZeroShot<'_>, most: Option<usize>) -> Result<Vec<ZeroShotScores>> {
        self.ask(texts, |text| self.prepare_zero_shot(text, asked, most))
    }

    /// [`zero_shot`](Self::zero_shot) for one text, to be run. Where a text and a hypothesis are too long together, the text is
    /// cut.
    pub fn prepare_zero_shot(
        &self,
        text: &str,
        asked: &ZeroShot<'_>,
        most: Option<usize>,
    ) -> Result<Request<ZeroShotScores>> {
        self.check_task(Task::Classify)?;
        let entailment = self.entailment().ok_or_else(|| InferError::NoEntailment {
            path: self.path().to_owned(),
            labels: self.labels().join(", "),
        })?;
        if asked.labels.is_empty() || asked.labels.iter().any(|label| label.trim().is_empty()) {
            return Err(InferError::ZeroShot("expected at least one label, and no empty ones".to_owned()));
        }
        if !asked.hypothesis.contains("{}") {
            let hypothesis = asked.hypothesis;
            return Err(InferError::ZeroShot(format!(
                "the hypothesis {hypothesis:?} has no {{}} where the label goes"
            )));
        }
        let most = most.or(self.task_length().most).or(self.tokenizer().max_length());
        let text = self.tokenizer().encode(text)?;
        let requests = asked.labels.iter().map(|label| {
            let hypothesis = self.tokenizer().encode(&asked.hypothesis.replace("{}", label))?;
            self.prepare_entailment(text.clone(), &hypothesis, most)
        });
        let request = Request::all(requests.collect::<Result<Vec<_>>>()?);
        let (multi_label, dropped) = (asked.multi_label || asked.labels.len() == 1, request.dropped);
        Ok(request.map(move |logits: Vec<Vec<f32>>| {
            let Entailment { entailment, contradiction } = entailment;
            let scores = match multi_label {
                true => logits.iter().map(|row| softmax(&[row[contradiction], row[entailment]])[1]).collect(),
                false => softmax(&logits.iter().map(|row| row[entailment]).collect::<Vec<f32>>()),
            };
            ZeroShotScores { scores, dropped }
        }))
    }

    /// The logits of a text and a hypothesis. The text alone is cut, unless the hypothesis takes all of the room.
    fn prepare_entailment(
        &self,
        mut text: Pieces,
        hypothesis: &Pieces,
        most: Option<usize>,
    ) -> Result<Request<Vec<f32>>> {
        let most = self.length_within(most);
        let template = self.tokenizer().template();
        let room = most.saturating_sub(template.pair_specials()).saturating_sub(hypothesis.len());
        let mut dropped = if room > 0 { text.truncate(room) } else { 0 };
        let pair = template.pair(&text, hypothesis, most)?;
        dropped += pair.dropped;
        Ok(Request::new(vec![pair], Read::Sequence, dropped, |_, read| {
            join_windows(read.into_iter().map(|(window, output)| (window.len(), output.numbers)))
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_of_inference_are_found_by_name() {
        let of = |labels: &[&str]| {
            let labels: Vec<String> = labels.iter().map(|&label| label.to_owned()).collect();
            Entailment::of_labels(&labels).map(|found| (found.entailment, found.contradiction))
        };
        assert_eq!(of(&["contradiction", "neutral", "entailment"]), Some((2, 0)));
        assert_eq!(of(&["ENTAILMENT", "NEUTRAL", "CONTRADICTION"]), Some((0, 2)));
        assert_eq!(of(&["neutral", "entailment", "contradiction"]), Some((1, 2)));
        assert_eq!(of(&["entailment", "not_entailment"]), Some((0, 1)));
        assert_eq!(of(&["not_entailment", "entailment"]), Some((1, 0)));
        assert_eq!(of(&["LABEL_0", "LABEL_1", "LABEL_2"]), None);
        assert_eq!(of(&["entailment"]), None);
    }
}
