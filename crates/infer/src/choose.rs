//! Which of several endings, answers or continuations fits a context.

use crate::numbers::softmax;
use crate::{Model, Read, Request, Result, Task};

/// A context and what may follow it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choices<'a> {
    /// The context, or a question.
    pub context: &'a str,
    /// The choices, of any number.
    pub choices: &'a [&'a str],
}

/// What the model thinks of the choices.
#[derive(Clone, Debug, PartialEq)]
pub struct Chosen {
    /// One for each choice.
    pub logits: Vec<f32>,
    /// How likely each is; they add up to 1.
    pub probabilities: Vec<f32>,
    /// Pieces that were cut off because context and choices were too long, in all of the sequences together.
    pub dropped: usize,
}

impl Chosen {
    /// The likeliest choice, the first of equals; `None` where there was none.
    pub fn best(&self) -> Option<usize> {
        let better = |best: usize, i: usize| if self.logits[i] > self.logits[best] { i } else { best };
        (0..self.logits.len()).reduce(better)
    }
}

impl Model {
    /// Compares the choices of each context. A pair of context and choice that is longer than `most` tokens (or the model's
    /// limit) loses the end of its longer text.
    pub fn choose(&self, questions: &[Choices<'_>], most: Option<usize>) -> Result<Vec<Chosen>> {
        self.ask(questions, |question| self.prepare_choose(*question, most))
    }

    /// [`choose`](Self::choose) for one context, to be run.
    pub fn prepare_choose(&self, question: Choices<'_>, most: Option<usize>) -> Result<Request<Chosen>> {
        self.check_task(Task::Choose)?;
        let pairs = self.tokenizer().choices(question.context, question.choices, self.length_within(most))?;
        let dropped = pairs.iter().map(|pair| pair.dropped).sum();
        Ok(Request::new(pairs, Read::Sequence, dropped, move |_, read| {
            let logits: Vec<f32> = read.into_iter().flat_map(|(_, output)| output.numbers).collect();
            Chosen { probabilities: softmax(&logits), logits, dropped }
        }))
    }
}
