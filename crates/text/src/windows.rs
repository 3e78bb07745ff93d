//! Examples of tasks as sequences for a model: a question with its passage in windows, a context with its choices. Training
//! and serving build their inputs here; single texts and pairs come from [`Template`](crate::Template) directly, words with
//! tags from `tagging.rs`. The reverse, from logits to answers, is in `answers.rs`.

use std::ops::Range;

use crate::error::TextError;
use crate::features::{Features, windows_with_most_context};
use crate::tokenizer::{Pieces, Tokenizer};

/// How far windows over a long text lie apart, in pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stride {
    /// From the beginning of one window to that of the next: the paper's and Google's `doc_stride`.
    Step(usize),
    /// What neighbouring windows have in common: Hugging Face's `stride`.
    Overlap(usize),
}

impl Stride {
    /// The step, in windows with room for so many pieces of the text.
    pub fn step(self, room: usize) -> Result<usize, TextError> {
        match self {
            Stride::Step(step) => Ok(step),
            // Where there is no room at all, laying out the windows says so.
            Stride::Overlap(overlap) if overlap < room || room == 0 => Ok(room.saturating_sub(overlap).max(1)),
            Stride::Overlap(overlap) => Err(TextError::Overlap { overlap, room }),
        }
    }
}

/// How a question and its passage are laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuestionSettings {
    /// Maximum number of tokens of a sequence, special ones included.
    pub max_length: usize,
    /// How far the windows over the passage lie apart.
    pub stride: Stride,
    /// The most pieces of a question; longer ones lose their end.
    pub max_question: usize,
}

impl Default for QuestionSettings {
    /// The paper's, as in Google's `run_squad.py`: 384 tokens, windows that begin 128 pieces apart, 64 for the question.
    /// Hugging Face's examples differ in the windows alone: `Stride::Overlap(128)`.
    fn default() -> Self {
        Self { max_length: 384, stride: Stride::Step(128), max_question: 64 }
    }
}

/// A question (the first text) with its passage (the second) in one window or several.
#[derive(Debug, Clone)]
pub struct QuestionWindows {
    /// The sequences; the question stands whole in each.
    pub windows: Vec<Features>,
    /// The passage in pieces.
    pub passage: Pieces,
    /// Pieces that the question lost.
    pub dropped: usize,
    /// For each piece of the passage the window where it has most context.
    pub most_context: Vec<usize>,
    /// The id of the token that stands for "no answer".
    cls: Option<u32>,
}

impl QuestionWindows {
    /// Where a window points to when the passage does not answer the question, or this part of it: at `[CLS]`.
    pub fn null_position(&self, window: usize) -> usize {
        let ids = self.windows.get(window).map(|window| window.ids.as_slice()).unwrap_or_default();
        ids.iter().position(|id| Some(*id) == self.cls).unwrap_or(0)
    }

    /// The pieces that cover a byte range of the passage: all that it touches, so that an answer which begins or ends
    /// inside of a piece has that piece whole. `None` where it touches none, being empty or of white space alone.
    pub fn pieces_of(&self, range: &Range<usize>) -> Option<Range<usize>> {
        let offsets = &self.passage.offsets;
        let first = offsets.partition_point(|&(_, end)| end <= range.start);
        let end = offsets.partition_point(|&(start, _)| start < range.end);
        (first < end && range.start < range.end).then_some(first..end)
    }

    /// What training asks of a window: the positions of the answer's first and last token, both at `[CLS]` where there is
    /// no answer or the window does not show all of it. `answer` is in bytes of the passage.
    pub fn targets(&self, window: usize, answer: Option<&Range<usize>>) -> (usize, usize) {
        let inside = || {
            let pieces = self.pieces_of(answer?)?;
            let window = self.windows.get(window)?;
            Some((window.position_of_piece(pieces.start)?, window.position_of_piece(pieces.end - 1)?))
        };
        let null = self.null_position(window);
        inside().unwrap_or((null, null))
    }
}

impl Tokenizer {
    /// Lays out a question and its passage.
    pub fn question(
        &self,
        question: &str,
        passage: &str,
        settings: &QuestionSettings,
    ) -> Result<QuestionWindows, TextError> {
        let mut question = self.encode(question)?;
        let dropped = question.truncate(settings.max_question);
        let passage = self.encode(passage)?;
        let template = self.template();
        let room = settings.max_length.saturating_sub(template.pair_specials() + question.len());
        let step = settings.stride.step(room)?;
        let windows = template.pair_windows(&question, &passage, settings.max_length, step)?;
        let most_context = windows_with_most_context(&windows);
        let cls = self.special().cls.as_ref().map(|cls| cls.id);
        Ok(QuestionWindows { windows, passage, dropped, most_context, cls })
    }

    /// One sequence for each choice: (context, choice), as for SWAG. Where a pair is too long, the longer text loses its
    /// end; see [`Template::pair`](crate::Template::pair).
    pub fn choices(&self, context: &str, choices: &[&str], max_length: usize) -> Result<Vec<Features>, TextError> {
        let context = self.encode(context)?;
        choices.iter().map(|choice| self.template().pair(&context, &self.encode(choice)?, max_length)).collect()
    }
}
