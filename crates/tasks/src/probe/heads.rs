//! Attention heads against the arcs of a treebank (Clark et al. 2019): how often the word that a head looks at most, or is looked at
//! by most, is the one that a word depends on. Nothing is trained.
//!
//! Attention between words is made of that between tokens as in the paper: to a word, the sum over its tokens; from a word, their
//! mean. A word never looks at itself here, and special tokens are no words. Roots are left out: they depend on no word.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::{ControlFlow, Range};
use std::path::Path;

use henson_infer::{AttentionMaps, Input, Model, Request};
use henson_text::{join_words, words_of_pieces};
use serde::Serialize;

use super::data::{Arcs, read_arcs};
use crate::error::TaskError;
use crate::finetune::thin;

/// Sentences that go through the encoder at a time.
const TOGETHER: usize = 16;

/// Words to either side that the baseline tries.
const REACH: i64 = 5;

/// How heads are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadSettings {
    /// So many sentences, evenly spaced; none: all.
    pub limit: Option<usize>,
    /// Sentences of more tokens than this, or than the model takes, are left out: their maps grow with the square of it.
    pub max_length: usize,
    /// Relations with fewer arcs than this are not listed.
    pub min_count: usize,
}

/// Which way attention is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub enum Direction {
    /// The dependent looks at its head.
    #[serde(rename = "dependent-to-head")]
    DependentToHead,
    /// The head looks at its dependent.
    #[serde(rename = "head-to-dependent")]
    HeadToDependent,
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::DependentToHead => "dependent to head",
            Self::HeadToDependent => "head to dependent",
        })
    }
}

/// The head that finds most arcs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct BestHead {
    /// Its layer, from 1.
    pub layer: usize,
    /// Its number there, from 1.
    pub head: usize,
    /// How its attention is read.
    pub direction: Direction,
    /// The share of arcs that it finds.
    pub accuracy: f64,
}

/// A relation, and who finds its arcs best.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Relation {
    /// Its name; `all` for all together.
    pub relation: String,
    /// Arcs.
    pub count: usize,
    /// The best head.
    pub best: BestHead,
    /// The distance at which the baseline finds most: it always says the word so many places further on.
    pub offset: i64,
    /// The share of arcs that the baseline finds there.
    pub offset_accuracy: f64,
}

/// What was found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HeadResults {
    /// Sentences that were read.
    pub sentences: usize,
    /// Sentences that were left out because they are too long.
    pub too_long: usize,
    /// Layers and heads of each.
    pub layers: usize,
    /// Heads of a layer.
    pub heads: usize,
    /// All arcs together.
    pub all: Relation,
    /// The relations, those with most arcs first.
    pub relations: Vec<Relation>,
}

/// Compares all heads of a model with the arcs of a CoNLL-U file. `each` is told how many of how many sentences are done, and may
/// end it.
pub fn compare_heads(
    model: &Model,
    path: &Path,
    settings: &HeadSettings,
    mut each: impl FnMut(usize, usize) -> ControlFlow<()>,
) -> Result<HeadResults, TaskError> {
    let mut sentences = Vec::new();
    read_arcs(path, |sentence| {
        sentences.push(sentence?);
        Ok(())
    })?;
    sentences.retain(|sentence| sentence.heads.iter().any(|(head, _)| head.is_some()));
    thin(&mut sentences, settings.limit);
    let mut tally = Tally::default();
    let (mut read, mut too_long) = (0, 0);
    for (chunk, some) in sentences.chunks(TOGETHER).enumerate() {
        let (mut requests, mut chosen, mut numbers) = (Vec::new(), Vec::new(), Vec::new());
        for (i, sentence) in some.iter().enumerate() {
            let (text, places) = join_words(&sentence.words);
            let request = model.prepare_attention(Input::One(&text), Some(settings.max_length))?;
            if request.dropped > 0 {
                too_long += 1;
                continue;
            }
            requests.push(request);
            chosen.push((sentence, places));
            numbers.push(chunk * TOGETHER + i + 1);
        }
        let maps = model.run(Request::all(requests)).map_err(|error| error.numbered(&numbers))?;
        for ((sentence, places), maps) in chosen.iter().zip(&maps) {
            tally.add(sentence, places, maps);
        }
        read += chosen.len();
        if each(read + too_long, sentences.len()).is_break() {
            return Err(TaskError::Stopped);
        }
    }
    tally.results(path, settings, read, too_long)
}

/// How many arcs of a relation were found by whom.
#[derive(Clone, Default)]
struct Found {
    arcs: usize,
    /// By layer, head and direction.
    heads: BTreeMap<(usize, usize, Direction), usize>,
    offsets: BTreeMap<i64, usize>,
}

#[derive(Default)]
struct Tally {
    relations: BTreeMap<String, Found>,
    layers: usize,
    heads: usize,
}

impl Tally {
    fn add(&mut self, sentence: &Arcs, places: &[Range<usize>], maps: &AttentionMaps) {
        let (words, tokens) = (places.len(), tokens_of_words(maps, places));
        let offset_of = |word: usize, offset: i64| usize::try_from(word as i64 + offset).ok();
        for (word, (head, relation)) in sentence.heads.iter().enumerate() {
            let Some(head) = head else { continue };
            let found = self.relations.entry(relation.clone()).or_default();
            found.arcs += 1;
            for offset in (-REACH..=REACH).filter(|offset| *offset != 0) {
                *found.offsets.entry(offset).or_default() += usize::from(offset_of(word, offset) == Some(*head));
            }
        }
        self.heads = maps.heads;
        for (layer, of_layer) in maps.layers().enumerate() {
            self.layers = self.layers.max(layer + 1);
            let size = maps.sequence.len().pow(2);
            for (number, map) in of_layer.chunks_exact(size).enumerate() {
                let between = between_words(map, maps.sequence.len(), &tokens);
                for direction in [Direction::DependentToHead, Direction::HeadToDependent] {
                    for (word, (head, relation)) in sentence.heads.iter().enumerate() {
                        let Some(head) = head else { continue };
                        let right = most_attended(&between, words, word, direction) == Some(*head);
                        if let Some(found) = self.relations.get_mut(relation) {
                            *found.heads.entry((layer, number, direction)).or_default() += usize::from(right);
                        }
                    }
                }
            }
        }
    }

    fn results(
        self,
        path: &Path,
        settings: &HeadSettings,
        sentences: usize,
        too_long: usize,
    ) -> Result<HeadResults, TaskError> {
        let mut all = Found::default();
        for found in self.relations.values() {
            all.arcs += found.arcs;
            found.heads.iter().for_each(|(key, count)| *all.heads.entry(*key).or_default() += count);
            found.offsets.iter().for_each(|(key, count)| *all.offsets.entry(*key).or_default() += count);
        }
        let Some(all) = all.relation("all") else {
            let reason = match too_long {
                0 => "no sentence has an arc between two words".to_owned(),
                too_long => format!("all {too_long} sentences are too long"),
            };
            return Err(TaskError::Empty { path: path.to_owned(), task: "heads", reason });
        };
        let listed = self.relations.iter().filter(|(_, found)| found.arcs >= settings.min_count);
        let mut relations: Vec<Relation> = listed.filter_map(|(name, found)| found.relation(name)).collect();
        relations.sort_by_key(|relation| std::cmp::Reverse(relation.count));
        Ok(HeadResults { sentences, too_long, layers: self.layers, heads: self.heads, all, relations })
    }
}

impl Found {
    /// Of equals the first counts.
    fn relation(&self, name: &str) -> Option<Relation> {
        let share = |count: usize| count as f64 / self.arcs.max(1) as f64;
        let best = self.heads.iter().reduce(|best, other| if other.1 > best.1 { other } else { best })?;
        let near = self.offsets.iter().reduce(|best, other| if other.1 > best.1 { other } else { best })?;
        let &(layer, head, direction) = best.0;
        Some(Relation {
            relation: name.to_owned(),
            count: self.arcs,
            best: BestHead { layer: layer + 1, head: head + 1, direction, accuracy: share(*best.1) },
            offset: *near.0,
            offset_accuracy: share(*near.1),
        })
    }
}

/// The positions of each word's tokens in a sequence.
fn tokens_of_words(maps: &AttentionMaps, places: &[Range<usize>]) -> Vec<Vec<usize>> {
    let own = maps.sequence.offsets.iter().enumerate().filter_map(|(at, offset)| Some((at, (*offset)?)));
    let (positions, offsets): (Vec<usize>, Vec<(usize, usize)>) = own.unzip();
    let mut tokens = vec![Vec::new(); places.len()];
    for (position, word) in positions.into_iter().zip(words_of_pieces(&offsets, places)) {
        if let Some(word) = word {
            tokens[word].push(position);
        }
    }
    tokens
}

/// Attention from word to word, row by row: the mean over the tokens that look, of the sum over the tokens looked at.
fn between_words(map: &[f32], sequence: usize, tokens: &[Vec<usize>]) -> Vec<f64> {
    let mut between = vec![0.0; tokens.len().pow(2)];
    for (from, row) in tokens.iter().zip(between.chunks_exact_mut(tokens.len().max(1))) {
        for &token in from {
            let looks = &map[token * sequence..][..sequence];
            for (to, sum) in tokens.iter().zip(row.iter_mut()) {
                *sum += to.iter().map(|other| f64::from(looks[*other])).sum::<f64>() / from.len() as f64;
            }
        }
    }
    between
}

/// The other word that a word attends to most, or that attends to it most; of equals the first.
fn most_attended(between: &[f64], words: usize, word: usize, direction: Direction) -> Option<usize> {
    let attention = |other: usize| match direction {
        Direction::DependentToHead => between[word * words + other],
        Direction::HeadToDependent => between[other * words + word],
    };
    let others = (0..words).filter(|other| *other != word);
    others.reduce(|best, other| if attention(other) > attention(best) { other } else { best })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_from_tokens_by_hand() {
        // [CLS] a b1 b2 c [SEP]: the second word has two tokens.
        #[rustfmt::skip]
        let map = [
            0.5, 0.1, 0.1, 0.1, 0.1, 0.1,
            0.1, 0.1, 0.2, 0.3, 0.2, 0.1,
            0.0, 0.6, 0.1, 0.1, 0.2, 0.0,
            0.0, 0.2, 0.1, 0.1, 0.6, 0.0,
            0.2, 0.1, 0.4, 0.2, 0.1, 0.0,
            1.0, 0.0, 0.0, 0.0, 0.0, 0.0_f32,
        ];
        let between = between_words(&map, 6, &[vec![1], vec![2, 3], vec![4]]);
        let expected = [0.1, 0.5, 0.2, 0.4, 0.2, 0.4, 0.1, 0.6, 0.1];
        between.iter().zip(expected).for_each(|(a, b)| assert!((a - b).abs() < 1e-7, "{between:?}"));
        let most = |word, direction| most_attended(&between, 3, word, direction);
        assert_eq!([0, 1, 2].map(|word| most(word, Direction::DependentToHead)), [Some(1), Some(0), Some(1)]);
        assert_eq!([0, 1, 2].map(|word| most(word, Direction::HeadToDependent)), [Some(1), Some(2), Some(1)]);
        assert_eq!(most_attended(&[1.0], 1, 0, Direction::DependentToHead), None);
    }
}
