//! What readers give and models are trained and scored on: one plain type for all tasks.

use std::fmt;
use std::ops::{Deref, Range};
use std::path::PathBuf;
use std::sync::Arc;

use crate::tags::Scheme;
use crate::task::Task;

/// Examples of a task, from one file.
#[derive(Clone, Debug)]
pub struct Set {
    /// The task.
    pub task: &'static Task,
    /// The file.
    pub path: PathBuf,
    /// The labels in the order of their numbers: official, given, or learned from the file and sorted. Empty for numbers,
    /// answers and choices.
    pub labels: Vec<String>,
    /// Whether a label outside of `labels` is wrong; else the list is only what the file happened to have.
    pub labels_are_final: bool,
    /// The examples in the file's order.
    pub examples: Vec<Example>,
    /// Rows that were wrong and left out.
    pub skipped: usize,
    /// What was wrong with the first of them, or looks wrong with the file.
    pub problems: Vec<String>,
    /// Rows that the benchmark itself says to leave out, because their annotators disagreed.
    pub undecided: usize,
    /// How the file wrote entities, where its tags are such; in the examples they are BIO.
    pub scheme: Option<Scheme>,
}

impl Set {
    /// Examples from elsewhere than a file, with these labels.
    pub fn new(task: &'static Task, labels: Vec<String>, examples: Vec<Example>) -> Self {
        Self {
            task,
            path: PathBuf::new(),
            labels,
            labels_are_final: true,
            examples,
            skipped: 0,
            problems: Vec::new(),
            undecided: 0,
            scheme: None,
        }
    }

    /// The same without any examples, for some of them to be put in.
    pub(crate) fn without_examples(&self) -> Self {
        Self {
            task: self.task,
            path: self.path.clone(),
            labels: self.labels.clone(),
            labels_are_final: self.labels_are_final,
            examples: Vec::new(),
            skipped: self.skipped,
            problems: self.problems.clone(),
            undecided: self.undecided,
            scheme: self.scheme,
        }
    }

    /// Whether its examples have labels. All have one, or none has.
    pub fn is_labelled(&self) -> bool {
        self.examples.first().is_some_and(|example| example.target != Target::None)
    }

    /// A label's name.
    pub fn label(&self, number: u32) -> &str {
        self.labels.get(number as usize).map_or("?", String::as_str)
    }

    /// How many examples have each label; of words with tags, how many words.
    pub fn label_counts(&self) -> Vec<usize> {
        let mut counts = vec![0; self.labels.len()];
        for &label in self.examples.iter().flat_map(|example| example.target.labels()) {
            if let Some(count) = counts.get_mut(label as usize) {
                *count += 1;
            }
        }
        counts
    }
}

/// One thing to predict.
#[derive(Clone, Debug, PartialEq)]
pub struct Example {
    /// What its prediction is known by: the file's own id, else its number among the rows, from 0.
    pub id: String,
    /// Where it stands in its file, for messages: a line, row or question.
    pub place: String,
    /// What the model reads.
    pub input: Input,
    /// What it should say.
    pub target: Target,
}

/// What the model reads.
#[derive(Clone, Debug, PartialEq)]
pub enum Input {
    /// One text.
    One(String),
    /// Two texts.
    Pair(String, String),
    /// The words of a sentence.
    Words {
        /// The words, with those around them.
        words: Words,
        /// Which document they are from.
        document: u64,
    },
    /// A question about a passage.
    Question {
        /// The question.
        question: String,
        /// The passage, which many questions share.
        passage: Arc<str>,
    },
    /// A beginning and its possible continuations.
    Choices {
        /// The beginning.
        context: String,
        /// At least two continuations.
        endings: Vec<String>,
    },
    /// Two texts that are alike, or are to be compared; each is read by itself.
    Alike {
        /// One.
        first: String,
        /// The other; empty where a text stands alone, to be given a teacher's vector.
        second: String,
        /// Those that mean something else than the first, to learn from.
        unlike: Vec<String>,
    },
    /// An answer to a question about a passage, to be judged by itself.
    Answered {
        /// The passage, which many answers share.
        passage: Arc<str>,
        /// The question.
        question: String,
        /// The answer.
        answer: String,
    },
    /// A sentence with a gap, about a passage, and what may fill it.
    Cloze {
        /// The passage, which many sentences share.
        passage: Arc<str>,
        /// The sentence.
        query: String,
        /// What may fill the gap, all different.
        candidates: Vec<String>,
    },
    /// A text or two, in which spans are marked.
    Marked {
        /// The text, or the first of two.
        first: String,
        /// The second one.
        second: Option<String>,
        /// The spans, as many in each example of a set.
        spans: Vec<Span>,
    },
}

/// A marked span of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// Whether it is in the second text.
    pub in_second: bool,
    /// Its bytes there.
    pub bytes: Range<usize>,
}

/// The words of a sentence, and where they stand in their document: its other sentences are context for them.
#[derive(Clone, PartialEq, Eq)]
pub struct Words {
    document: Arc<[String]>,
    own: Range<usize>,
}

impl Words {
    /// A sentence without a document.
    pub fn new(words: Vec<String>) -> Self {
        Self { own: 0..words.len(), document: words.into() }
    }

    /// The sentences of a document.
    pub fn of_document(sentences: Vec<Vec<String>>) -> Vec<Self> {
        let lengths: Vec<usize> = sentences.iter().map(Vec::len).collect();
        let document: Arc<[String]> = sentences.into_iter().flatten().collect();
        let mut end = 0;
        let next = |length: usize| {
            end += length;
            Self { document: Arc::clone(&document), own: end - length..end }
        };
        lengths.into_iter().map(next).collect()
    }

    /// The sentence within at most so many words of its document on either side, and which of all these are its own.
    pub(crate) fn around(&self, most: usize) -> (&[String], Range<usize>) {
        let start = self.own.start.saturating_sub(most);
        let end = self.document.len().min(self.own.end.saturating_add(most));
        (&self.document[start..end], self.own.start - start..self.own.end - start)
    }
}

/// Its own words.
impl Deref for Words {
    type Target = [String];

    fn deref(&self) -> &[String] {
        &self.document[self.own.clone()]
    }
}

impl fmt::Debug for Words {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

/// What a model should say.
#[derive(Clone, Debug, PartialEq)]
pub enum Target {
    /// Nobody knows: a test file.
    None,
    /// One label, or which of the choices.
    Class(u32),
    /// Several labels or none, in ascending order.
    Classes(Vec<u32>),
    /// A number.
    Number(f64),
    /// Several numbers: a teacher's vector, or its scores.
    Numbers(Vec<f32>),
    /// A label for each word.
    Tags(Vec<u32>),
    /// The answers that count as right; none: the passage does not say.
    Answers(Vec<Answer>),
    /// What may be written, at least one text.
    Texts(Vec<String>),
}

impl Target {
    /// The numbers of its labels.
    fn labels(&self) -> &[u32] {
        match self {
            Self::Class(class) => std::slice::from_ref(class),
            Self::Classes(classes) | Self::Tags(classes) => classes,
            Self::None | Self::Number(_) | Self::Numbers(_) | Self::Answers(_) | Self::Texts(_) => &[],
        }
    }

    pub(crate) fn labels_mut(&mut self) -> &mut [u32] {
        match self {
            Self::Class(class) => std::slice::from_mut(class),
            Self::Classes(classes) | Self::Tags(classes) => classes,
            Self::None | Self::Number(_) | Self::Numbers(_) | Self::Answers(_) | Self::Texts(_) => &mut [],
        }
    }
}

/// An answer as the annotators gave it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Its text.
    pub text: String,
    /// Its bytes in the passage. `None` where the file does not say, or says it wrongly and only scores are wanted.
    pub place: Option<Range<usize>>,
}
