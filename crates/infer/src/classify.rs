//! Classes, several classes at once, or a number, for a text or a pair of texts.

use henson_text::{Features, Pieces, Stride, Template, TextError, Tokenizer};

use crate::numbers::{join_windows, sigmoid, softmax};
use crate::{InferError, Length, Model, Read, Request, Result, Task};

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
        self.ask(inputs, |input| self.prepare_classify(*input, length))
    }

    /// [`classify`](Self::classify) for one input, to be run.
    pub fn prepare_classify(&self, input: Input<'_>, length: Length) -> Result<Request<Classified>> {
        let request = self.prepare_logits(input, length)?;
        let (problem, dropped) = (self.problem()?, request.dropped);
        Ok(request.map(move |logits| Classified { scores: problem.scores(&logits), logits, dropped }))
    }

    /// Whether it was trained on pairs of texts in both orders, whose logits are added.
    fn reads_both_orders(&self) -> bool {
        self.config().task.reading.is_some_and(|reading| reading.both_orders)
    }

    /// The logits alone, whatever config.json says that they mean; to be run.
    pub fn prepare_logits(&self, input: Input<'_>, length: Length) -> Result<Request<Vec<f32>>> {
        self.check_task(Task::Classify)?;
        let most = self.length_within(length.most);
        if let (Input::Pair(first, second), true) = (input, self.reads_both_orders()) {
            let orders = both_orders(self.tokenizer(), first, second, most)?;
            let dropped = orders[0].dropped;
            return Ok(Request::new(orders.into(), Read::Sequence, dropped, |_, read| {
                sum_orders(read.into_iter().map(|(_, output)| output.numbers))
            }));
        }
        let (windows, dropped) = text_windows(self.tokenizer(), input, most, length.windows)?;
        Ok(Request::new(windows, Read::Sequence, dropped, |_, read| {
            join_windows(read.into_iter().map(|(window, output)| (window.len(), output.numbers)))
        }))
    }
}

/// A pair in both orders, each cut where it is too long.
pub fn both_orders(tokenizer: &Tokenizer, first: &str, second: &str, most: usize) -> Result<[Features; 2], TextError> {
    let (first, second) = (tokenizer.encode(first)?, tokenizer.encode(second)?);
    let template = tokenizer.template();
    Ok([template.pair(&first, &second, most)?, template.pair(&second, &first, most)?])
}

/// The logits of both orders of a pair, added.
pub fn sum_orders(orders: impl Iterator<Item = Vec<f32>>) -> Vec<f32> {
    let add = |mut sum: Vec<f32>, order: Vec<f32>| {
        sum.iter_mut().zip(order).for_each(|(sum, logit)| *sum += logit);
        sum
    };
    orders.reduce(add).unwrap_or_default()
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
        Input::One(text) => return single_windows(template, &tokenizer.encode(text)?, most, windows),
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

/// The pieces of a text as one sequence, or as windows that overlap by half, and how many of them are left out.
pub(crate) fn single_windows(
    template: &Template,
    pieces: &Pieces,
    most: usize,
    windows: bool,
) -> Result<(Vec<Features>, usize), TextError> {
    if windows {
        let room = most.saturating_sub(template.single_specials());
        return Ok((template.windows(pieces, most, (room / 2).max(1))?, 0));
    }
    let cut = template.single(pieces, most)?;
    let dropped = cut.dropped;
    Ok((vec![cut], dropped))
}
