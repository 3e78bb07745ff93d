//! Answers to questions from passages.

use henson_text::{
    AnswerSettings, Answers, Features, QuestionSettings, QuestionWindows, SpanLogits, Stride, find_answers,
};

use crate::{Model, Output, Read, Result, Task};

/// A question and the passage that may answer it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Question<'a> {
    /// The question.
    pub question: &'a str,
    /// The passage, of any length.
    pub passage: &'a str,
}

impl Model {
    /// By how much "no answer" must beat the best answer, if the model may say so at all; config.json stores it with a
    /// model that was trained on such questions.
    pub fn no_answer_threshold(&self) -> Option<f64> {
        self.config().task.no_answer_threshold
    }

    /// How questions are asked of this model unless told otherwise: as in its fine-tuning, where config.json says how that
    /// was, else the paper's settings, within the model's length.
    pub fn question_settings(&self) -> QuestionSettings {
        let (paper, trained) = (QuestionSettings::default(), self.config().task.reading);
        QuestionSettings {
            max_length: trained.map_or(paper.max_length, |reading| reading.max_length).min(self.most_tokens()),
            stride: trained.and_then(|reading| reading.stride).map_or(paper.stride, Stride::Step),
            max_question: trained.and_then(|reading| reading.max_question).unwrap_or(paper.max_question),
        }
    }

    /// Which answers are looked for unless told otherwise: the paper's, with the model's own threshold.
    pub fn answer_settings(&self) -> AnswerSettings {
        AnswerSettings { no_answer: self.no_answer_threshold(), ..AnswerSettings::default() }
    }

    /// The answers to each question. Passages are read whole, in windows.
    pub fn answer(
        &self,
        questions: &[Question<'_>],
        length: QuestionSettings,
        settings: &AnswerSettings,
    ) -> Result<Vec<Answers>> {
        let logits = self.span_logits(questions, length)?;
        let answers = questions.iter().zip(&logits);
        Ok(answers.map(|(q, (windows, logits))| find_answers(windows, logits, q.passage, settings)).collect())
    }

    /// What [`answer`](Self::answer) chooses by: the windows of each question, and their logits. Averaged over several
    /// models they make an ensemble.
    pub fn span_logits(
        &self,
        questions: &[Question<'_>],
        length: QuestionSettings,
    ) -> Result<Vec<(QuestionWindows, Vec<SpanLogits>)>> {
        self.check_task(Task::Answer)?;
        let asked: Vec<QuestionWindows> =
            questions.iter().map(|question| self.lay_out_question(*question, length)).collect::<Result<_>>()?;
        let windows: Vec<&[Features]> = asked.iter().map(|question| question.windows.as_slice()).collect();
        let outputs = self.read_texts(&windows, |_, _| Read::Spans)?;
        let logits = |output: Output| {
            let (start, end) = output.numbers.chunks_exact(2).map(|row| (row[0], row[1])).unzip();
            SpanLogits { start, end }
        };
        let logits = outputs.into_iter().map(|outputs| outputs.into_iter().map(logits).collect());
        Ok(asked.into_iter().zip(logits).collect())
    }

    /// The windows of a question, within the model's length; the question takes at most half of each, so that a model of few
    /// positions has room for the passage.
    pub fn lay_out_question(&self, question: Question<'_>, length: QuestionSettings) -> Result<QuestionWindows> {
        let max_length = self.length_within(Some(length.max_length));
        let room = max_length.saturating_sub(self.tokenizer().template().pair_specials());
        let length = QuestionSettings { max_length, max_question: length.max_question.min(room / 2), ..length };
        Ok(self.tokenizer().question(question.question, question.passage, &length)?)
    }
}
