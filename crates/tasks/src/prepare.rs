//! Examples as sequences for a model, and the way back from its logits to predictions. Used for training, for the scores
//! that choose the best model, and for predictions alike; the sequences themselves are built by `text` and `infer`.

use henson_infer::{Model, Problem, join_windows, softmax, text_windows};
use henson_kernels::threads::in_threads;
use henson_text::{
    AnswerSettings, Features, QuestionSettings, QuestionWindows, SpanLogits, Stride, TextError, Tokenizer, WordWindows,
    find_answers, join_words,
};

use crate::example::{Example, Input, Set, Target, Words};
use crate::predictions::Prediction;
use crate::task::TaskKind;

/// How examples become sequences.
#[derive(Clone, Copy, Debug)]
pub struct Lengths {
    /// The most tokens of a sequence, special ones included.
    pub most: usize,
    /// Whether longer texts are divided into windows instead of cut. Words to tag and passages always are.
    pub windows: bool,
    /// From the beginning of one window over a passage to that of the next.
    pub stride: Stride,
    /// The most pieces of a question.
    pub max_question: usize,
    /// Whether words to tag are read amid the sentences around them, as many as fit.
    pub document_context: bool,
}

impl Lengths {
    /// As the paper has it for questions; others as long as `most`, cut.
    pub fn new(most: usize) -> Self {
        let paper = QuestionSettings::default();
        Self { most, windows: false, stride: paper.stride, max_question: paper.max_question, document_context: false }
    }

    /// As the model was trained, where its config.json says so, else as long as it takes (for questions as in the paper), cut.
    pub fn of_model(model: &Model, kind: TaskKind) -> Self {
        let (length, questions) = (model.task_length(), model.question_settings());
        Self {
            most: if kind == TaskKind::Qa { questions.max_length } else { length.most.unwrap_or(model.most_tokens()) },
            windows: length.windows,
            stride: questions.stride,
            max_question: questions.max_question,
            document_context: model.config().task.reading.is_some_and(|reading| reading.document_context),
        }
    }
}

/// An example as a model reads it.
#[derive(Debug)]
pub(crate) enum Prepared {
    /// A text or a pair, in one sequence or several.
    Text(Vec<Features>),
    /// Words.
    Words(WordWindows),
    /// A question.
    Question(QuestionWindows),
    /// A sequence for each choice.
    Choices(Vec<Features>),
    /// A sequence for each of two texts, and for one that is unlike them.
    Alike(Vec<Features>),
}

/// One thing to learn from.
#[derive(Clone, Debug, PartialEq)]
pub struct Instance {
    /// Piece ids and segments of its sequence; of its sequences, for choices and for texts that are alike.
    pub sequences: Vec<(Vec<u32>, Vec<u32>)>,
    /// What the model should say.
    pub wanted: Wanted,
}

/// What a model should say about an [`Instance`].
#[derive(Clone, Debug, PartialEq)]
pub enum Wanted {
    /// One label for the sequence.
    Class(u32),
    /// A number.
    Number(f32),
    /// 0 or 1 for each label.
    Several(Vec<f32>),
    /// A label for the positions that carry one.
    Tags(Vec<Option<u32>>),
    /// The first and the last position of an answer.
    Span(u32, u32),
    /// Which of the sequences.
    Choice(u32),
    /// That the first two sequences are alike, and the third, if there is one, is unlike them.
    Alike,
    /// The cosine of its two sequences' vectors.
    Cosine(f32),
}

/// What a model says about an example, so that models can be averaged.
#[derive(Clone, Debug)]
pub(crate) enum Scores {
    /// One for each label or choice, or a number; of two texts, both vectors.
    Row(Vec<f32>),
    /// One for each label of each word; nothing for words that no sequence shows.
    Words(Vec<Vec<f32>>),
    /// Of each window.
    Spans(Vec<SpanLogits>),
}

impl Prepared {
    /// Lays out an example.
    pub(crate) fn new(tokenizer: &Tokenizer, example: &Example, lengths: &Lengths) -> Result<Self, TextError> {
        let template = tokenizer.template();
        match &example.input {
            Input::One(text) => {
                let input = henson_infer::Input::One(text);
                Ok(Self::Text(text_windows(tokenizer, input, lengths.most, lengths.windows)?.0))
            }
            Input::Pair(first, second) => {
                let input = henson_infer::Input::Pair(first, second);
                Ok(Self::Text(text_windows(tokenizer, input, lengths.most, lengths.windows)?.0))
            }
            Input::Words { words, .. } => {
                Ok(Self::Words(lay_out_words(tokenizer, words, lengths.most, lengths.document_context)?))
            }
            Input::Question { question, passage } => {
                let room = lengths.most.saturating_sub(template.pair_specials());
                let max_question = lengths.max_question.min(room / 2);
                let settings = QuestionSettings { max_length: lengths.most, stride: lengths.stride, max_question };
                Ok(Self::Question(tokenizer.question(question, passage, &settings)?))
            }
            Input::Choices { context, endings } => {
                let endings: Vec<&str> = endings.iter().map(String::as_str).collect();
                Ok(Self::Choices(tokenizer.choices(context, &endings, lengths.most)?))
            }
            Input::Alike { first, second, unlike } => {
                let texts = [first, second].into_iter().chain(unlike);
                let each = texts.map(|text| template.single(&tokenizer.encode(text)?, lengths.most));
                Ok(Self::Alike(each.collect::<Result<_, _>>()?))
            }
        }
    }

    /// What goes through the model.
    pub(crate) fn sequences(&self) -> &[Features] {
        match self {
            Self::Text(windows) | Self::Choices(windows) | Self::Alike(windows) => windows,
            Self::Words(words) => &words.windows,
            Self::Question(question) => &question.windows,
        }
    }

    /// Pieces that were cut off.
    pub(crate) fn dropped(&self) -> usize {
        self.sequences().iter().map(|sequence| sequence.dropped).sum()
    }

    /// What there is to learn from it; `labels` is how many there are. Nothing where the label is not known.
    pub(crate) fn instances(self, target: &Target, labels: usize) -> Vec<Instance> {
        let wanted: Vec<Wanted> = match (&self, target) {
            (Self::Text(windows), target) => {
                let wanted = match target {
                    Target::Class(class) => Wanted::Class(*class),
                    Target::Number(number) => Wanted::Number(*number as f32),
                    Target::Classes(classes) => {
                        let share = |label: u32| if classes.contains(&label) { 1.0 } else { 0.0 };
                        Wanted::Several((0..labels as u32).map(share).collect())
                    }
                    _ => return Vec::new(),
                };
                vec![wanted; windows.len()]
            }
            (Self::Words(words), Target::Tags(tags)) => {
                let tags: Vec<Option<u32>> = tags.iter().map(|tag| Some(*tag)).collect();
                (0..words.windows.len()).map(|window| Wanted::Tags(words.labels(window, &tags))).collect()
            }
            (Self::Question(question), Target::Answers(answers)) => {
                // The first answer, as in Google's program; training files have one.
                let place = answers.first().and_then(|answer| answer.place.as_ref());
                let span = |window| {
                    let (first, last) = question.targets(window, place);
                    Wanted::Span(first as u32, last as u32)
                };
                (0..question.windows.len()).map(span).collect()
            }
            (Self::Choices(_), Target::Class(class)) => vec![Wanted::Choice(*class)],
            (Self::Alike(_), Target::Number(cosine)) => vec![Wanted::Cosine(*cosine as f32)],
            (Self::Alike(_), _) => vec![Wanted::Alike],
            _ => return Vec::new(),
        };
        let together = matches!(self, Self::Choices(_) | Self::Alike(_));
        let sequences = match self {
            Self::Text(windows) | Self::Choices(windows) | Self::Alike(windows) => windows,
            Self::Words(words) => words.windows,
            Self::Question(question) => question.windows,
        };
        let sequences = sequences.into_iter().map(|sequence| (sequence.ids, sequence.segments));
        if together {
            // A cosine is between two.
            let most = if matches!(wanted[..], [Wanted::Cosine(_)]) { 2 } else { usize::MAX };
            let sequences = sequences.take(most).collect();
            return wanted.into_iter().next().map(|wanted| Instance { sequences, wanted }).into_iter().collect();
        }
        let instances = sequences.zip(wanted).map(|(sequence, wanted)| Instance { sequences: vec![sequence], wanted });
        instances.filter(Instance::says_something).collect()
    }

    /// From the logits of each sequence to scores that can be averaged over models.
    pub(crate) fn scores(&self, logits: &[Vec<f32>], problem: Problem) -> Scores {
        match self {
            Self::Text(windows) => {
                let parts = windows.iter().zip(logits).map(|(window, logits)| (window.len(), logits.clone()));
                Scores::Row(problem.scores(&join_windows(parts)))
            }
            Self::Choices(_) => {
                let logits: Vec<f32> = logits.iter().flatten().copied().collect();
                Scores::Row(softmax(&logits))
            }
            // Their vectors stand where others have logits.
            Self::Alike(_) => Scores::Row(logits.iter().take(2).flatten().copied().collect()),
            Self::Words(words) => {
                let row = |(window, position): (usize, usize)| {
                    let rows: &Vec<f32> = logits.get(window)?;
                    let labels = rows.len() / words.windows[window].len().max(1);
                    rows.chunks_exact(labels.max(1)).nth(position)
                };
                let rows = words.places.iter().map(|place| place.and_then(row).map(softmax).unwrap_or_default());
                Scores::Words(rows.collect())
            }
            Self::Question(_) => {
                let spans = logits.iter().map(|rows| {
                    let (start, end) = rows.chunks_exact(2).map(|row| (row[0], row[1])).unzip();
                    SpanLogits { start, end }
                });
                Scores::Spans(spans.collect())
            }
        }
    }

    /// From scores to a prediction. `outside` is the label of words that no sequence shows, `no_answer` the threshold for
    /// questions that may be without one.
    pub(crate) fn predict(
        &self,
        example: &Example,
        kind: TaskKind,
        scores: Scores,
        outside: u32,
        no_answer: Option<f64>,
    ) -> Prediction {
        match (self, scores) {
            (Self::Question(question), Scores::Spans(spans)) => {
                let Input::Question { passage, .. } = &example.input else { return Prediction::None };
                let settings = AnswerSettings { no_answer, ..AnswerSettings::default() };
                Prediction::from_answers(&find_answers(question, &spans, passage, &settings), passage)
            }
            (_, Scores::Words(words)) => {
                let tag = |row: &Vec<f32>| best(row).map_or(outside, |best| best as u32);
                Prediction::Tags(words.iter().map(tag).collect())
            }
            (_, Scores::Row(scores)) => match kind {
                TaskKind::Regress => scores.first().map_or(Prediction::None, |x| Prediction::Number(f64::from(*x))),
                TaskKind::Embed => {
                    let (first, second) = scores.split_at(scores.len() / 2);
                    Prediction::similarity(first.to_vec(), second.to_vec())
                }
                TaskKind::Multilabel => {
                    let chosen = (0..scores.len() as u32).filter(|i| scores[*i as usize] >= 0.5);
                    Prediction::Classes { classes: chosen.collect(), scores }
                }
                _ => match best(&scores) {
                    Some(class) => Prediction::Class { class: class as u32, scores },
                    None => Prediction::None,
                },
            },
            _ => Prediction::None,
        }
    }
}

impl Instance {
    /// Tokens of all its sequences.
    pub(crate) fn tokens(&self) -> usize {
        self.sequences.iter().map(|(ids, _)| ids.len()).sum()
    }

    /// Whether there is anything to learn: a window may show no word's first piece.
    fn says_something(&self) -> bool {
        !matches!(&self.wanted, Wanted::Tags(labels) if labels.iter().all(Option::is_none))
    }
}

impl Scores {
    /// Adds another model's, with a factor. False where the two are of different shapes.
    pub(crate) fn add(&mut self, other: &Self, factor: f32) -> bool {
        let add = |to: &mut Vec<f32>, from: &Vec<f32>| {
            to.iter_mut().zip(from).for_each(|(to, from)| *to += factor * from);
            to.len() == from.len()
        };
        match (self, other) {
            (Self::Row(to), Self::Row(from)) => add(to, from),
            (Self::Words(to), Self::Words(from)) => {
                to.len() == from.len() && to.iter_mut().zip(from).all(|(to, from)| add(to, from))
            }
            (Self::Spans(to), Self::Spans(from)) => {
                let both = |(to, from): (&mut SpanLogits, &SpanLogits)| {
                    add(&mut to.start, &from.start) && add(&mut to.end, &from.end)
                };
                to.len() == from.len() && to.iter_mut().zip(from).all(both)
            }
            _ => false,
        }
    }

    /// Puts labels into another order: place i gets what stood at `order[i]`. Empty leaves all as it is.
    pub(crate) fn reorder(&mut self, order: &[usize]) {
        let rows: &mut [Vec<f32>] = match self {
            Self::Row(row) => std::slice::from_mut(row),
            Self::Words(words) => words,
            Self::Spans(_) => return,
        };
        for row in rows.iter_mut().filter(|row| row.len() == order.len()) {
            *row = order.iter().map(|from| row[*from]).collect();
        }
    }

    pub(crate) fn scale(&mut self, factor: f32) {
        let rows: Vec<&mut Vec<f32>> = match self {
            Self::Row(row) => vec![row],
            Self::Words(words) => words.iter_mut().collect(),
            Self::Spans(spans) => spans.iter_mut().flat_map(|span| [&mut span.start, &mut span.end]).collect(),
        };
        rows.into_iter().flatten().for_each(|x| *x *= factor);
    }

    pub(crate) fn is_finite(&self) -> bool {
        match self {
            Self::Row(row) => row.iter().all(|x| x.is_finite()),
            Self::Words(words) => words.iter().flatten().all(|x| x.is_finite()),
            Self::Spans(spans) => {
                spans.iter().flat_map(|span| span.start.iter().chain(&span.end)).all(|x| x.is_finite())
            }
        }
    }
}

/// The place of the largest, the first of equals.
fn best(row: &[f32]) -> Option<usize> {
    (0..row.len()).reduce(|best, i| if row[i] > row[best] { i } else { best })
}

/// The words of a sentence as sequences, with as much of its document around them as fits, if that is wanted.
pub(crate) fn lay_out_words(
    tokenizer: &Tokenizer,
    words: &Words,
    most: usize,
    document_context: bool,
) -> Result<WordWindows, TextError> {
    // A word has a piece or more, nearly always: more words would hardly be shown.
    let (words, own) = words.around(if document_context { most } else { 0 });
    let (text, places) = join_words(words);
    tokenizer.words_in_context(&text, &places, own, most)
}

/// All that there is to learn from a set, and how many of its examples lose their end.
pub fn instances(
    set: &Set,
    tokenizer: &Tokenizer,
    lengths: &Lengths,
    threads: usize,
) -> Result<(Vec<Instance>, usize), TextError> {
    let examples: Vec<&Example> = set.examples.iter().collect();
    let prepared = prepare_all(tokenizer, &examples, lengths, threads)?;
    let cut = prepared.iter().filter(|prepared| prepared.dropped() > 0).count();
    let each = prepared.into_iter().zip(examples);
    let instances = each.flat_map(|(prepared, example)| prepared.instances(&example.target, set.labels.len()));
    Ok((instances.collect(), cut))
}

/// Lays out all examples, on several threads.
pub(crate) fn prepare_all(
    tokenizer: &Tokenizer,
    examples: &[&Example],
    lengths: &Lengths,
    threads: usize,
) -> Result<Vec<Prepared>, TextError> {
    let each = examples.len().div_ceil(threads.max(1)).max(1);
    let part = |examples: &[&Example]| -> Result<Vec<Prepared>, TextError> {
        examples.iter().map(|example| Prepared::new(tokenizer, example, lengths)).collect()
    };
    let mut all = Vec::with_capacity(examples.len());
    for part in in_threads(threads, examples.chunks(each), part) {
        all.extend(part?);
    }
    Ok(all)
}
