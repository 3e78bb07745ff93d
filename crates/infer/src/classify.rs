//! Classes, several classes at once, or a number, for a text or a pair of texts.

use henson_text::{Features, Stride};

use crate::numbers::{join_windows, sigmoid, softmax};
use crate::{InferError, Length, Model, Result, Task};

/// What is classified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input<'a> {
    /// One text.
    One(&'a str),
    /// Two: sentence A and sentence B.
    Pair(&'a str, &'a str),
}

/// What a classifier's logits mean: `problem_type` in config.json.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Problem {
    /// One of the labels: scores are probabilities that add up to 1.
    SingleLabel,
    /// Any of the labels: each score is a probability of its own.
    MultiLabel,
    /// A number for each label: the score is it. Nearly always there is one.
    Regression,
}

impl Problem {
    /// Logits as scores.
    pub fn scores(self, logits: &[f32]) -> Vec<f32> {
        match self {
            Problem::SingleLabel => softmax(logits),
            Problem::MultiLabel => logits.iter().copied().map(sigmoid).collect(),
            Problem::Regression => logits.to_vec(),
        }
    }
}

/// What the model thinks of a text.
#[derive(Clone, Debug, PartialEq)]
pub struct Classified {
    /// One for each label; the mean over the windows of a text, by their tokens.
    pub logits: Vec<f32>,
    /// One for each label; see [`Problem`].
    pub scores: Vec<f32>,
    /// Pieces that were cut off because the text was too long.
    pub dropped: usize,
}

impl Classified {
    /// The label with the highest score, the first of equals.
    pub fn best(&self) -> usize {
        let better = |best: usize, i: usize| if self.scores[i] > self.scores[best] { i } else { best };
        (0..self.scores.len()).reduce(better).unwrap_or(0)
    }
}

impl Model {
    /// The names of the head's labels, by number; `transformers`' own where config.json has none.
    pub fn labels(&self) -> Vec<String> {
        self.bert().config().label_names()
    }

    /// What a classifier's logits mean. As in `transformers`, a head with one label that says nothing is a regression.
    pub fn problem(&self) -> Result<Problem> {
        let config = self.bert().config();
        match config.problem_type.as_deref() {
            Some("single_label_classification") => Ok(Problem::SingleLabel),
            Some("multi_label_classification") => Ok(Problem::MultiLabel),
            Some("regression") => Ok(Problem::Regression),
            None if config.labels() == 1 => Ok(Problem::Regression),
            None => Ok(Problem::SingleLabel),
            Some(other) => {
                Err(InferError::ProblemType { path: self.path().to_owned(), problem_type: other.to_owned() })
            }
        }
    }

    /// Classifies texts and pairs. With windows, a long text is divided and its windows' logits are averaged; of a long
    /// pair the second text is divided, while the first keeps at most half of each window.
    pub fn classify(&self, inputs: &[Input<'_>], length: Length) -> Result<Vec<Classified>> {
        self.check_task(Task::Classify)?;
        let problem = self.problem()?;
        let prepared: Vec<(Vec<Features>, usize)> =
            inputs.iter().map(|input| self.windows_of(*input, length)).collect::<Result<_>>()?;
        let sequences: Vec<&Features> = prepared.iter().flat_map(|(windows, _)| windows).collect();
        let mut logits = self.sequence_logits(&sequences)?.into_iter();
        let mut classified = Vec::with_capacity(inputs.len());
        for (text, (windows, dropped)) in prepared.iter().enumerate() {
            let logits = join_windows(windows.iter().zip(logits.by_ref()).map(|(window, row)| (window.len(), row)));
            if logits.iter().any(|x| !x.is_finite()) {
                return Err(InferError::NotFinite { text: text + 1 });
            }
            let scores = problem.scores(&logits);
            classified.push(Classified { logits, scores, dropped: *dropped });
        }
        Ok(classified)
    }

    /// The sequences of an input, and how many pieces they leave out.
    pub(crate) fn windows_of(&self, input: Input<'_>, length: Length) -> Result<(Vec<Features>, usize)> {
        let (first, second) = match input {
            Input::One(text) => {
                let prepared = self.prepare(text, length)?;
                return Ok((prepared.windows, prepared.dropped));
            }
            Input::Pair(first, second) => (self.tokenizer().encode(first)?, self.tokenizer().encode(second)?),
        };
        let most = self.length_within(length.most);
        let template = self.tokenizer().template();
        let room = most.saturating_sub(template.pair_specials());
        if !length.windows || first.len() + second.len() <= room {
            let pair = template.pair(&first, &second, most)?;
            let dropped = pair.dropped;
            return Ok((vec![pair], dropped));
        }
        let mut first = first;
        let dropped = first.truncate(room / 2);
        let room = room - first.len();
        let windows = template.pair_windows(&first, &second, most, Stride::Overlap(room / 2).step(room)?)?;
        Ok((windows, dropped))
    }
}
