//! Classes, several classes at once, or a number, for a text or a pair of texts.

use henson_text::{Features, Stride, TextError, Tokenizer};

use crate::numbers::{join_windows, sigmoid, softmax};
use crate::{InferError, Length, Model, Read, Result, Task};

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
        self.config().task.label_names()
    }

    /// What a classifier's logits mean. As in `transformers`, a head with one label that says nothing is a regression.
    pub fn problem(&self) -> Result<Problem> {
        let task = &self.config().task;
        match task.problem_type.as_deref() {
            Some("single_label_classification") => Ok(Problem::SingleLabel),
            Some("multi_label_classification") => Ok(Problem::MultiLabel),
            Some("regression") => Ok(Problem::Regression),
            None if task.labels() == 1 => Ok(Problem::Regression),
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
        let most = self.length_within(length.most);
        let prepare = |input: &Input<'_>| Ok(text_windows(self.tokenizer(), *input, most, length.windows)?);
        let prepared: Vec<(Vec<Features>, usize)> = inputs.iter().map(prepare).collect::<Result<_>>()?;
        let windows: Vec<&[Features]> = prepared.iter().map(|(windows, _)| windows.as_slice()).collect();
        let outputs = self.read_texts(&windows, |_, _| Read::Sequence)?;
        let classified = prepared.iter().zip(outputs).map(|((windows, dropped), outputs)| {
            let rows = windows.iter().zip(outputs).map(|(window, output)| (window.len(), output.numbers));
            let logits = join_windows(rows);
            Classified { scores: problem.scores(&logits), logits, dropped: *dropped }
        });
        Ok(classified.collect())
    }
}

/// A text or a pair as sequences of at most `most` tokens, and how many pieces they leave out. With windows, a long text is
/// divided into ones that overlap by half; of a long pair the second text is, while the first keeps at most half of each.
pub fn text_windows(
    tokenizer: &Tokenizer,
    input: Input<'_>,
    most: usize,
    windows: bool,
) -> Result<(Vec<Features>, usize), TextError> {
    let template = tokenizer.template();
    let (mut first, second) = match input {
        Input::One(text) => {
            let pieces = tokenizer.encode(text)?;
            let room = most.saturating_sub(template.single_specials());
            let windows = match windows {
                true => template.windows(&pieces, most, (room / 2).max(1))?,
                false => vec![template.single(&pieces, most)?],
            };
            let dropped = windows.iter().map(|window| window.dropped).sum();
            return Ok((windows, dropped));
        }
        Input::Pair(first, second) => (tokenizer.encode(first)?, tokenizer.encode(second)?),
    };
    let room = most.saturating_sub(template.pair_specials());
    if !windows || first.len() + second.len() <= room {
        let pair = template.pair(&first, &second, most)?;
        let dropped = pair.dropped;
        return Ok((vec![pair], dropped));
    }
    let dropped = first.truncate(room / 2);
    let room = room - first.len();
    let windows = template.pair_windows(&first, &second, most, Stride::Overlap(room / 2).step(room)?)?;
    Ok((windows, dropped))
}
