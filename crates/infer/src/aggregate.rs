//! `transformers`' aggregation strategies: tags of single tokens, grouped to entities as its token-classification pipeline does.
//!
//! What [`tag`](Model::tag) gives without them is not one of these: it reads whole words by their first token, and joins them by
//! what the labels of the tag set mean.

use std::ops::Range;

use henson_text::{Kind, Pieces, join_words, windows_with_most_context};
use serde::Deserialize;

use crate::numbers::softmax;
use crate::{Length, Model, Read, Request, Result, TagInput, Task};

/// How tags of tokens become entities, by the names of `transformers`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Aggregation {
    /// Every token with its tag, as it is.
    None,
    /// Adjacent tokens with the same tag.
    Simple,
    /// The same for words; a word has the tag of its first token.
    First,
    /// The tag with the highest mean score over the word's tokens.
    Average,
    /// The tag of the token that is surest of its own.
    Max,
}

/// A part of the text with a tag.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// Its bytes in the text.
    pub place: Range<usize>,
    /// `PER`; without aggregation as the model has it, `B-PER`.
    pub label: String,
    /// The mean over its tokens or words.
    pub score: f32,
}

/// The groups of a text.
#[derive(Clone, Debug)]
pub struct Grouped {
    /// The text: as it was given, or the words with spaces between them.
    pub text: String,
    /// In order; those outside of any entity (`O`) are left out.
    pub groups: Vec<Group>,
    /// Pieces that were cut off because the text was too long.
    pub dropped: usize,
}

/// A token, or a word, with the probability of each label.
struct Scored {
    place: Range<usize>,
    scores: Vec<f32>,
    /// Whether it continues the word before it.
    continues: bool,
}

impl Model {
    /// Tags the tokens of each text and groups them. With windows, each token is read where it has most context.
    pub fn tag_groups(
        &self,
        inputs: &[TagInput<'_>],
        aggregation: Aggregation,
        length: Length,
    ) -> Result<Vec<Grouped>> {
        self.ask(inputs, |input| self.prepare_tag_groups(*input, aggregation, length))
    }

    /// [`tag_groups`](Self::tag_groups) for one text, to be run.
    pub fn prepare_tag_groups(
        &self,
        input: TagInput<'_>,
        aggregation: Aggregation,
        length: Length,
    ) -> Result<Request<Grouped>> {
        self.check_task(Task::Tag)?;
        let text = match input {
            TagInput::Text(text) => text.to_owned(),
            TagInput::Words(words) => join_words(words).0,
        };
        let pieces = self.tokenizer().encode(&text)?;
        let continues = self.continuations(&text, &pieces);
        let (windows, dropped) = self.windows_of(&pieces, length)?;
        // Where each piece is read; those that were cut off are not.
        let places = windows_with_most_context(&windows).into_iter().enumerate();
        let places: Vec<Option<(usize, usize)>> =
            places.map(|(piece, window)| Some((window, windows[window].position_of_piece(piece)?))).collect();
        Ok(Request::new(windows, Read::Labels, dropped, move |model, read| {
            let labels = model.labels();
            let row = |(window, position): (usize, usize)| {
                let (_, output) = read.get(window)?;
                output.numbers.chunks_exact(labels.len().max(1)).nth(position)
            };
            let tokens = places.iter().enumerate().filter_map(|(piece, place)| {
                let scores = softmax(place.and_then(row)?);
                let (start, end) = pieces.offsets[piece];
                Some(Scored { place: start..end, scores, continues: continues[piece] })
            });
            let groups = aggregation.groups(tokens.collect(), &labels);
            Grouped { text, groups, dropped }
        }))
    }

    /// Which pieces continue a word, by `transformers`' rules: with WordPiece those whose text is not that of their token (`##`
    /// stands before it); elsewhere those without a space before them. An unknown token continues nothing.
    fn continuations(&self, text: &str, pieces: &Pieces) -> Vec<bool> {
        let unknown = self.tokenizer().special().unk.as_ref().map(|unk| unk.id);
        let both = pieces.ids.iter().zip(&pieces.offsets);
        both.map(|(&id, &(start, end))| {
            if Some(id) == unknown {
                return false;
            }
            if self.tokenizer().kind() == Kind::WordPiece {
                let token = self.tokenizer().token(id).unwrap_or_default();
                return token.chars().count() != text[start..end].chars().count();
            }
            start > 0 && !text[..start].ends_with(' ') && !text[start..].starts_with(' ')
        })
        .collect()
    }
}

impl Aggregation {
    fn groups(self, tokens: Vec<Scored>, labels: &[String]) -> Vec<Group> {
        let name = |label: usize| labels.get(label).cloned().unwrap_or_default();
        let tagged = |place: Range<usize>, scores: &[f32]| {
            let label = best(scores);
            Group { place, label: name(label), score: scores.get(label).copied().unwrap_or(0.0) }
        };
        let parts: Vec<Group> = match self {
            Aggregation::None | Aggregation::Simple => {
                tokens.into_iter().map(|token| tagged(token.place, &token.scores)).collect()
            }
            Aggregation::First | Aggregation::Average | Aggregation::Max => {
                let words = tokens.chunk_by(|_, next| next.continues);
                words
                    .map(|word| tagged(word[0].place.start..word[word.len() - 1].place.end, &self.scores(word)))
                    .collect()
            }
        };
        let mut groups = if self == Aggregation::None { parts } else { joined(&parts) };
        groups.retain(|group| group.label != "O");
        groups
    }

    /// The scores of a word.
    fn scores(self, word: &[Scored]) -> Vec<f32> {
        let highest = |token: &Scored| token.scores[best(&token.scores)];
        match self {
            Aggregation::Average => {
                let mean = |label: usize| word.iter().map(|token| token.scores[label]).sum::<f32>() / word.len() as f32;
                (0..word[0].scores.len()).map(mean).collect()
            }
            Aggregation::Max => {
                let surer = |a, b| if highest(b) > highest(a) { b } else { a };
                word.iter().reduce(surer).map(|token| token.scores.clone()).unwrap_or_default()
            }
            _ => word[0].scores.clone(),
        }
    }
}

/// The first of the highest.
fn best(scores: &[f32]) -> usize {
    (0..scores.len()).reduce(|best, i| if scores[i] > scores[best] { i } else { best }).unwrap_or(0)
}

/// A label's tag, and whether it begins an entity. Only `B-` and `I-` are prefixes here.
fn tag(label: &str) -> (&str, bool) {
    match label.strip_prefix("B-") {
        Some(tag) => (tag, true),
        None => (label.strip_prefix("I-").unwrap_or(label), false),
    }
}

/// Neighbours with the same tag as one, unless the next one begins an entity.
fn joined(parts: &[Group]) -> Vec<Group> {
    let same = |a: &Group, b: &Group| tag(&a.label).0 == tag(&b.label).0 && !tag(&b.label).1;
    let groups = parts.chunk_by(same).map(|group| Group {
        place: group[0].place.start..group[group.len() - 1].place.end,
        label: group[0].label.split_once('-').map_or(group[0].label.as_str(), |(_, tag)| tag).to_owned(),
        score: group.iter().map(|part| part.score).sum::<f32>() / group.len() as f32,
    });
    groups.collect()
}
