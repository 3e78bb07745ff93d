//! Answers to questions from passages.

use henson_text::{
    AnswerSettings, Answers, QuestionSettings, SpanBeams, SpanLogits, Stride, find_answers, find_beam_answers,
};

use crate::{Model, Output, Read, Request, Result, Task};

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
        self.ask(questions, |question| self.prepare_answer(*question, length, *settings))
    }

    /// [`answer`](Self::answer) for one question, to be run. It takes at most half of each window, so that a model of few
    /// positions has room for the passage.
    pub fn prepare_answer(
        &self,
        question: Question<'_>,
        length: QuestionSettings,
        settings: AnswerSettings,
    ) -> Result<Request<Answers>> {
        self.check_task(Task::Answer)?;
        let max_length = self.length_within(Some(length.max_length));
        let room = max_length.saturating_sub(self.tokenizer().template().pair_specials());
        let length = QuestionSettings { max_length, max_question: length.max_question.min(room / 2), ..length };
        let mut asked = self.tokenizer().question(question.question, question.passage, &length)?;
        let nulls: Vec<usize> = (0..asked.windows.len()).map(|window| asked.null_position(window)).collect();
        let (windows, dropped) = (std::mem::take(&mut asked.windows), asked.dropped);
        let passage = question.passage.to_owned();
        let has_beams = self.network().beams().is_some();
        let mut request = Request::new(windows, Read::Spans, dropped, move |_, read| {
            let (windows, outputs): (_, Vec<Output>) = read.into_iter().unzip();
            asked.windows = windows;
            if has_beams {
                let beams: Vec<SpanBeams> = outputs.iter().map(Output::beams).collect();
                return find_beam_answers(&asked, &beams, &passage, &settings);
            }
            let logits: Vec<SpanLogits> = outputs.iter().map(Output::spans).collect();
            find_answers(&asked, &logits, &passage, &settings)
        });
        if has_beams {
            let windows = request.sequences.iter_mut().zip(nulls);
            windows.for_each(|(window, null)| window.read = Read::beams(&window.features, null));
        }
        Ok(request)
    }
}
