//! Tags of words, and the entities that they make.

use std::ops::Range;

use henson_tensor::LegalSteps;
use henson_text::{LegalTags, Stride, TagSet, WordWindows, join_words, split_words};

use crate::numbers::softmax;
use crate::{Length, Model, Read, Request, Result, Task};

/// A text whose words are tagged.
#[derive(Clone, Debug)]
pub struct Tagged {
    /// The text: as it was given, or the words with spaces between them.
    pub text: String,
    /// Its words, in order.
    pub words: Vec<TaggedWord>,
    /// Its entities, in order; one for each word where labels are not of the kind that makes entities.
    pub entities: Vec<Entity>,
    /// Pieces that were cut off because the text was too long.
    pub dropped: usize,
}

/// A word with its tag.
#[derive(Clone, Debug)]
pub struct TaggedWord {
    /// Its bytes in the text.
    pub place: Range<usize>,
    /// The likeliest label's number. `None` for a word in the part that was cut off, and for one of which the tokenizer
    /// leaves nothing.
    pub label: Option<usize>,
    /// How likely that is; 0 without a label.
    pub score: f32,
    /// One for each label; empty without a label.
    pub logits: Vec<f32>,
}

/// Several words that belong together.
#[derive(Clone, Debug, PartialEq)]
pub struct Entity {
    /// Its bytes in the text.
    pub place: Range<usize>,
    /// Its words.
    pub words: Range<usize>,
    /// Its kind: `PER`, not `B-PER`.
    pub label: String,
    /// The mean of its words' scores.
    pub score: f32,
}

/// What is tagged.
#[derive(Clone, Copy, Debug)]
pub enum TagInput<'a> {
    /// Running text, divided into words by [`split_words`].
    Text(&'a str),
    /// The words of a corpus, which know best what a word is.
    Words(&'a [&'a str]),
}

impl Model {
    /// Tags the words of each text. With windows, which overlap by half, each word is read where it has most context.
    pub fn tag(&self, inputs: &[TagInput<'_>], length: Length) -> Result<Vec<Tagged>> {
        self.ask(inputs, |input| self.prepare_tag(*input, length))
    }

    /// [`tag`](Self::tag) for one text, to be run.
    pub fn prepare_tag(&self, input: TagInput<'_>, length: Length) -> Result<Request<Tagged>> {
        self.check_task(Task::Tag)?;
        let most = self.length_within(length.most);
        let room = most.saturating_sub(self.tokenizer().template().single_specials());
        let stride = length.windows.then_some(Stride::Step((room / 2).max(1)));
        let (text, words) = match input {
            TagInput::Text(text) => (text.to_owned(), split_words(text)),
            TagInput::Words(words) => join_words(words),
        };
        let WordWindows { windows, places, dropped } =
            self.tokenizer().words_in_windows(&text, &words, most, stride)?;
        Ok(Request::new(windows, Read::Labels, dropped, move |model, read| {
            let labels = model.labels();
            let row = |(window, position): (usize, usize)| {
                let (_, output) = read.get(window)?;
                let row = output.numbers.chunks_exact(labels.len().max(1)).nth(position)?;
                Some((row, output.ids.get(position).map(|id| *id as usize)))
            };
            let rows = places.into_iter().map(|place| place.and_then(row).unwrap_or_default());
            let words: Vec<TaggedWord> = words.into_iter().zip(rows).map(|(word, row)| tagged(word, row)).collect();
            let entities = Entity::of_words(&words, &labels);
            Tagged { text, words, entities, dropped }
        }))
    }
}

/// A word with its logits and, where labels are scored together, its label in the likeliest sequence.
fn tagged(place: Range<usize>, (logits, together): (&[f32], Option<usize>)) -> TaggedWord {
    let probabilities = softmax(logits);
    let better = |best: usize, i: usize| if probabilities[i] > probabilities[best] { i } else { best };
    let label = together.or_else(|| (0..probabilities.len()).reduce(better));
    TaggedWord { place, label, score: label.map_or(0.0, |best| probabilities[best]), logits: logits.to_vec() }
}

/// Which labels may follow each other in the best sequence, where they are written as BIO or BIOES; none: all.
pub fn legal_steps(labels: &[String]) -> Option<LegalSteps> {
    let LegalTags { start, end, transitions } = LegalTags::of_labels(labels)?;
    Some(LegalSteps { start, end, transitions })
}

impl Entity {
    /// The entities that the words of a text make, by what the labels of the tag set mean.
    pub fn of_words(words: &[TaggedWord], labels: &[String]) -> Vec<Self> {
        let tags: Vec<Option<&str>> =
            words.iter().map(|word| word.label.and_then(|label| labels.get(label)).map(String::as_str)).collect();
        let found = TagSet::of_labels(labels).entities(&tags).into_iter();
        found
            .map(|(range, label)| {
                let members = &words[range.clone()];
                Entity {
                    place: members[0].place.start..members[members.len() - 1].place.end,
                    label: label.to_owned(),
                    score: members.iter().map(|word| word.score).sum::<f32>() / members.len() as f32,
                    words: range,
                }
            })
            .collect()
    }
}
