//! Examples as sequences for a model. Used for training, for the scores that choose the best model, and for predictions alike;
//! what a form makes of them is in `forms`, the sequences themselves are built by `text` and `infer`.

use henson_infer::Model;
use henson_kernels::threads::in_threads;
use henson_text::{Features, QuestionSettings, QuestionWindows, Stride, TextError, Tokenizer, WordWindows};

use crate::example::{Example, Set, Target};
use crate::task::Task;

/// How examples become sequences.
#[derive(Clone, Copy, Debug)]
pub struct Lengths {
    /// Maximum number of tokens of a sequence, special ones included.
    pub most: usize,
    /// Whether longer texts are divided into windows instead of cut. Words to tag and passages always are.
    pub windows: bool,
    /// From the beginning of one window over a passage to that of the next.
    pub stride: Stride,
    /// The most pieces of a question.
    pub max_question: usize,
    /// Whether words to tag are read together with the sentences around them, as many as fit.
    pub document_context: bool,
    /// Maximum number of tokens of a target, the end token included.
    pub target: usize,
    /// What ends a target, where the model writes one.
    pub end: Option<u32>,
    /// Whether pairs are read in both orders.
    pub both_orders: bool,
    /// Whether a model continues sources with targets, and so has both in one sequence.
    pub continues: bool,
}

/// Maximum number of tokens of a target, where nothing else is said.
pub(crate) const TARGET_LENGTH: usize = 128;

impl Lengths {
    /// As the paper has it for questions; others as long as `most`, cut.
    pub fn new(most: usize) -> Self {
        let paper = QuestionSettings::default();
        Self {
            most,
            windows: false,
            stride: paper.stride,
            max_question: paper.max_question,
            document_context: false,
            target: TARGET_LENGTH,
            end: None,
            both_orders: false,
            continues: false,
        }
    }

    /// The same for a model that continues sources: both within its longest sequence, a target in at most half of it.
    pub(crate) fn in_one(self, max_tokens: usize) -> Self {
        let target = self.target.min(max_tokens / 2);
        Self { target, most: self.most.min(max_tokens - target), continues: true, ..self }
    }

    /// As the model was trained, where its config.json says so, else as long as it takes (for questions as in the paper), cut.
    pub fn of_model(model: &Model, task: &Task) -> Self {
        let questions = model.question_settings();
        let continues = task.form.head_for(&model.config().model, 0) != task.form.head(0);
        let ends = || model.generate_settings().ok().filter(|_| continues)?.end.first().copied();
        let lengths = Self {
            most: task.form.length_of(model),
            windows: model.task_length().windows,
            stride: questions.stride,
            max_question: questions.max_question,
            document_context: model.config().task.reading.is_some_and(|reading| reading.document_context),
            target: model.config().task.reading.and_then(|reading| reading.max_target).unwrap_or(TARGET_LENGTH),
            end: model.config().model.targets().map(|reading| reading.end).or_else(ends),
            both_orders: model.config().task.reading.is_some_and(|reading| reading.both_orders),
            continues,
        };
        if continues { lengths.in_one(model.most_tokens()) } else { lengths }
    }
}

/// What examples are laid out with.
pub(crate) struct LayingOut<'a> {
    pub(crate) task: &'static Task,
    /// Those of the set.
    pub(crate) labels: &'a [String],
    pub(crate) tokenizer: &'a Tokenizer,
    pub(crate) lengths: &'a Lengths,
}

/// An example as a model reads it.
#[derive(Debug)]
pub(crate) enum Prepared {
    /// Sequences, and nothing more to know about them.
    Plain(Vec<Features>),
    /// Words.
    Words(WordWindows),
    /// A question.
    Question(QuestionWindows),
    /// A sequence for each of some candidates.
    Candidates(Vec<Features>, Vec<String>),
    /// One sequence, and the positions of each of its roles: the first token, then every marked span.
    Marked(Features, Vec<Vec<u32>>),
    /// A source, and the targets that a model shall write for it, each with its end token; and how many tokens they lost.
    Written(Features, Vec<Vec<u32>>, usize),
    /// A pair of texts in both orders.
    BothOrders([Features; 2]),
}

/// One thing to learn from.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Instance {
    /// Token ids and segments of its sequence; of its sequences, for choices and for texts that are alike; of a source and its
    /// target.
    pub sequences: Vec<(Vec<u32>, Vec<u32>)>,
    /// How the text spells the positions of each sequence, where the model reads that; else nothing.
    pub spellings: Vec<Option<Vec<Box<str>>>>,
    /// The right label of the sequence, or which of the sequences; a label for each position, where it carries one; the first
    /// and the last position of an answer.
    pub labels: Vec<Option<u32>>,
    /// The right number, or 0 or 1 for each label. Where there are neither labels nor numbers, the first two sequences are
    /// alike, and the third, if there is one, is unlike them.
    pub numbers: Vec<f32>,
    /// The positions of the first token and of each marked span, where spans are marked; of a question, that of the classification
    /// token, and from where to where its window shows the passage.
    pub spans: Vec<Vec<u32>>,
    /// Which example of its set it is of.
    pub example: u32,
    /// Which of the example's sequences it is.
    pub window: u32,
}

/// What a model says about an example, so that models can be averaged: rows, whose meaning its form knows.
pub(crate) type Scores = Vec<Vec<f32>>;

impl Prepared {
    /// What goes through the model.
    pub(crate) fn sequences(&self) -> &[Features] {
        match self {
            Self::Plain(sequences) => sequences,
            Self::Words(words) => &words.windows,
            Self::Question(question) => &question.windows,
            Self::Candidates(sequences, _) => sequences,
            Self::Marked(sequence, _) | Self::Written(sequence, ..) => std::slice::from_ref(sequence),
            Self::BothOrders(sequences) => sequences,
        }
    }

    /// The same, to keep.
    fn into_features(self) -> Vec<Features> {
        match self {
            Self::Plain(sequences) => sequences,
            Self::Words(words) => words.windows,
            Self::Question(question) => question.windows,
            Self::Candidates(sequences, _) => sequences,
            Self::Marked(sequence, _) | Self::Written(sequence, ..) => vec![sequence],
            Self::BothOrders(sequences) => sequences.into(),
        }
    }

    /// Token ids and segments.
    pub(crate) fn into_sequences(self) -> impl Iterator<Item = (Vec<u32>, Vec<u32>)> {
        self.into_features().into_iter().map(|sequence| (sequence.ids, sequence.segments))
    }

    /// An instance for each sequence, with these labels and numbers; one for both orders of a pair.
    pub(crate) fn apart(self, target: impl Fn(usize) -> (Vec<Option<u32>>, Vec<f32>)) -> Vec<Instance> {
        if let Self::BothOrders(_) = self {
            let (labels, numbers) = target(0);
            return vec![Instance { labels, numbers, ..Instance::of(self.into_features()) }];
        }
        let each = self.into_features().into_iter().enumerate().map(|(number, sequence)| {
            let (labels, numbers) = target(number);
            Instance { labels, numbers, window: number as u32, ..Instance::of(vec![sequence]) }
        });
        each.collect()
    }

    /// Pieces that were cut off.
    pub(crate) fn dropped(&self) -> usize {
        let of_target = if let Self::Written(.., dropped) = self { *dropped } else { 0 };
        self.sequences().iter().map(|sequence| sequence.dropped).sum::<usize>() + of_target
    }
}

impl Instance {
    /// Sequences, and nothing yet to learn from them.
    fn of(sequences: Vec<Features>) -> Self {
        let parts = sequences.into_iter().map(|sequence| ((sequence.ids, sequence.segments), sequence.spellings));
        let (sequences, spellings) = parts.unzip();
        Self { sequences, spellings, ..Self::default() }
    }

    /// A source, and a target that is a label for each of its places.
    pub(crate) fn pair(source: &Features, target: Vec<u32>) -> Self {
        Self {
            labels: target.iter().map(|id| Some(*id)).collect(),
            sequences: vec![(source.ids.clone(), source.segments.clone()), (target.clone(), vec![0; target.len()])],
            ..Self::default()
        }
    }

    /// Tokens of all its sequences.
    pub(crate) fn tokens(&self) -> usize {
        self.sequences.iter().map(|(ids, _)| ids.len()).sum()
    }

    /// Its number, where it has one.
    pub(crate) fn number(&self) -> f32 {
        self.numbers.first().copied().unwrap_or(f32::NAN)
    }

    /// Whether it is a pair that is told from others, as then all of its set are.
    pub(crate) fn is_contrast(&self) -> bool {
        self.labels.is_empty() && self.numbers.is_empty()
    }
}

/// All that there is to learn from a set, and how many of its examples lose their end.
pub fn instances(
    set: &Set,
    tokenizer: &Tokenizer,
    lengths: &Lengths,
    threads: usize,
) -> Result<(Vec<Instance>, usize), TextError> {
    instances_by(
        |prepared, target, labels| set.task.form.instances(prepared, target, labels),
        set,
        tokenizer,
        lengths,
        threads,
    )
}

/// The same with a teacher, whether targets are known or not.
pub(crate) fn taught_instances(
    set: &Set,
    tokenizer: &Tokenizer,
    lengths: &Lengths,
    threads: usize,
) -> Result<(Vec<Instance>, usize), TextError> {
    instances_by(
        |prepared, target, labels| set.task.form.taught(prepared, target, labels),
        set,
        tokenizer,
        lengths,
        threads,
    )
}

fn instances_by(
    of_example: impl Fn(Prepared, &Target, usize) -> Vec<Instance>,
    set: &Set,
    tokenizer: &Tokenizer,
    lengths: &Lengths,
    threads: usize,
) -> Result<(Vec<Instance>, usize), TextError> {
    let prepared = prepare_all(set.task, &set.labels, tokenizer, &set.examples, lengths, threads)?;
    let cut = prepared.iter().filter(|prepared| prepared.dropped() > 0).count();
    let each = prepared.into_iter().zip(&set.examples).zip(0..);
    let instances = each.flat_map(|((prepared, example), number)| {
        let own = of_example(prepared, &example.target, set.labels.len()).into_iter();
        own.map(move |instance| Instance { example: number, ..instance })
    });
    Ok((instances.collect(), cut))
}

/// Lays out all examples, on several threads.
pub(crate) fn prepare_all(
    task: &'static Task,
    labels: &[String],
    tokenizer: &Tokenizer,
    examples: &[Example],
    lengths: &Lengths,
    threads: usize,
) -> Result<Vec<Prepared>, TextError> {
    let each = examples.len().div_ceil(threads.max(1)).max(1);
    let laying_out = LayingOut { task, labels, tokenizer, lengths };
    let part = |examples: &[Example]| -> Result<Vec<Prepared>, TextError> {
        examples.iter().map(|example| task.form.lay_out_example(&laying_out, example)).collect()
    };
    let mut all = Vec::with_capacity(examples.len());
    for part in in_threads(threads, examples.chunks(each), part) {
        all.extend(part?);
    }
    Ok(all)
}
