//! Subword regularisation: a text cut into other pieces than the best ones, at random, so that a model in training sees
//! words in more than one form.
//!
//! - The unigram model draws among all ways to write a word, each with its probability to the power of alpha (Kudo,
//!   2018). Large alphas give the best way almost always, 0 gives every way the same chance.
//! - BPE drops each possible merge with some probability, drawn again before every merge (BPE-dropout: Provilkov, Emelianenko
//!   and Voita, 2020).
//! - WordPiece drops each match but the shortest with some probability while it looks for the longest
//!   (MaxMatch-dropout: Hiraoka, 2022). A word that cannot be finished after that is cut as usual: to lose it to the
//!   unknown token would teach nothing.
//!
//! The `tokenizers` crate can sample too, but from a random state of its own. Here the pieces are a pure function of
//! (seed, number of the text, text).

use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use henson_kernels::philox::Stream;
use serde_json::Value;
use tokenizers::{ModelWrapper, OffsetType, PreTokenizer, Token};

use crate::error::TextError;
use crate::guard::shielded;
use crate::lattice::{Lattice, Trie, UNKNOWN, UNKNOWN_PENALTY};
use crate::tokenizer::{Kind, Pieces, Tokenizer, json};

/// How encoding is made random.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Regularisation {
    /// For the unigram model: ways to write a word are drawn with their probability to this power, at least 0.
    Sampling {
        /// The power; Kudo uses 0.1 to 0.5.
        alpha: f64,
    },
    /// For BPE and WordPiece: merges or matches are skipped with this probability.
    Dropout {
        /// From 0, which changes nothing, to 1, which leaves characters; Provilkov and others use 0.1.
        probability: f64,
    },
}

/// Encodes at random. Made once for many texts by [`Tokenizer::sampler`].
pub struct Sampler<'t> {
    tokenizer: &'t Tokenizer,
    model: SampledModel,
    seed: u64,
}

enum SampledModel {
    Unigram(Unigram),
    BytePair(BytePair),
    WordPiece(WordPiece),
}

/// The stream of random numbers that this module draws from.
const STREAM: u32 = 0x7375_6277;

impl Tokenizer {
    /// Prepares encoding at random. The kind of randomness must be that of the tokenizer's kind.
    pub fn sampler(&self, seed: u64, regularisation: Regularisation) -> Result<Sampler<'_>, TextError> {
        let bad = |expected: &'static str, got: f64| TextError::BadSampling { expected, got: got.to_string() };
        match regularisation {
            Regularisation::Sampling { alpha } if !(alpha >= 0.0 && alpha.is_finite()) => {
                return Err(bad("a finite alpha of at least 0", alpha));
            }
            Regularisation::Dropout { probability } if !(0.0..=1.0).contains(&probability) => {
                return Err(bad("a probability from 0 to 1", probability));
            }
            _ => {}
        }
        let model = json(Some(self.inner.get_model()));
        let model = match (self.inner.get_model(), regularisation) {
            (ModelWrapper::Unigram(_), Regularisation::Sampling { alpha }) => {
                Unigram::of(&model, alpha).map(SampledModel::Unigram)
            }
            (ModelWrapper::BPE(_), Regularisation::Dropout { probability }) => {
                BytePair::of(&model, probability).map(SampledModel::BytePair)
            }
            (ModelWrapper::WordPiece(_), Regularisation::Dropout { probability }) => {
                WordPiece::of(&model, probability).map(SampledModel::WordPiece)
            }
            _ => None,
        };
        let Some(model) = model else {
            let unfit = match self.kind() {
                Kind::Unigram => "a unigram model without byte fallback, sampled with an alpha and not by dropout",
                Kind::BytePair => "BPE without byte fallback, sampled by dropout and not with an alpha",
                Kind::WordPiece => "WordPiece, sampled by dropout and not with an alpha",
                Kind::WordLevel => "a tokenizer that splits words",
            };
            return Err(TextError::BadSampling { expected: unfit, got: format!("{regularisation:?}") });
        };
        Ok(Sampler { tokenizer: self, model, seed })
    }
}

impl Sampler<'_> {
    /// Cuts a text into pieces at random, without adding special tokens. The same seed, number and text give the same
    /// pieces; different numbers draw independently.
    pub fn encode(&self, text: &str, number: u64) -> Result<Pieces, TextError> {
        self.tokenizer.check_text(text)?;
        let state = RefCell::new((Stream::new(self.seed, STREAM, number), Lattice::default()));
        let encode = || {
            let inner = &self.tokenizer.inner;
            let mut words = inner.get_added_vocabulary().extract_and_normalize(inner.get_normalizer(), text);
            if let Some(pre_tokenizer) = inner.get_pre_tokenizer() {
                pre_tokenizer.pre_tokenize(&mut words)?;
            }
            words.tokenize(|word| {
                let (draws, lattice) = &mut *state.borrow_mut();
                Ok(self.cut(word.get(), draws, lattice))
            })?;
            inner.post_process(words.into_encoding(None, 0, OffsetType::Byte)?, None, false)
        };
        let encoding = shielded(encode).map_err(|reason| TextError::Failed { action: "encode", reason })?;
        Ok(Pieces::of_encoding(&encoding, text))
    }

    /// Cuts a word.
    fn cut(&self, word: &str, draws: &mut Stream, lattice: &mut Lattice) -> Vec<Token> {
        let token = |(id, start, end): (u32, usize, usize)| {
            // The post-processor looks at the text of byte-level pieces to trim their offsets.
            Token::new(id, self.tokenizer.token(id).unwrap_or_default(), (start, end))
        };
        let pieces = match &self.model {
            SampledModel::Unigram(model) => model.cut(word, draws, lattice),
            SampledModel::BytePair(model) => model.cut(word, draws),
            SampledModel::WordPiece(model) => model.cut(word, draws),
        };
        pieces.into_iter().map(token).collect()
    }
}

/// A number in [0, 1).
fn uniform(draws: &mut Stream) -> f64 {
    f64::from(draws.bits()) / 4_294_967_296.0
}

struct Unigram {
    trie: Trie,
    /// The id and the score of each piece of the trie.
    ids: Vec<u32>,
    scores: Vec<f64>,
    unknown: f64,
    unknown_id: u32,
}

impl Unigram {
    fn of(model: &Value, alpha: f64) -> Option<Self> {
        let unknown_id = u32::try_from(model["unk_id"].as_u64()?).ok()?;
        if model["byte_fallback"] == true {
            return None;
        }
        let mut pieces: Vec<(&str, u32, f64)> = Vec::new();
        for (id, entry) in (0..).zip(model["vocab"].as_array()?) {
            pieces.push((entry[0].as_str()?, id, entry[1].as_f64()?));
        }
        let least = pieces.iter().map(|&(_, _, score)| score).fold(f64::INFINITY, f64::min);
        pieces.retain(|(text, _, _)| !text.is_empty());
        pieces.sort_unstable_by_key(|&(text, id, _)| (text, Reverse(id)));
        // Of equal texts the crate knows the last.
        pieces.dedup_by_key(|&mut (text, _, _)| text);
        let texts: Vec<&str> = pieces.iter().map(|&(text, _, _)| text).collect();
        Some(Self {
            trie: Trie::new(&texts),
            ids: pieces.iter().map(|&(_, id, _)| id).collect(),
            scores: pieces.iter().map(|&(_, _, score)| alpha * score).collect(),
            unknown: alpha * (least - UNKNOWN_PENALTY),
            unknown_id,
        })
    }

    fn cut(&self, word: &str, draws: &mut Stream, lattice: &mut Lattice) -> Vec<(u32, usize, usize)> {
        let characters: Vec<char> = word.chars().collect();
        lattice.fill(&characters, &self.trie, &self.scores, self.unknown, None);
        let mut pieces = Vec::new();
        lattice.sample_backwards(|| uniform(draws), |piece, begin, end| pieces.push((piece, begin, end)));
        let starts: Vec<usize> = word.char_indices().map(|(at, _)| at).chain([word.len()]).collect();
        let mut cut: Vec<(u32, usize, usize)> = Vec::with_capacity(pieces.len());
        for (piece, begin, end) in pieces.into_iter().rev() {
            let id = if piece == UNKNOWN { self.unknown_id } else { self.ids[piece as usize] };
            match cut.last_mut() {
                // Neighbouring unknown characters are one piece, as in the crate.
                Some(last) if id == self.unknown_id && last.0 == id => last.2 = starts[end],
                _ => cut.push((id, starts[begin], starts[end])),
            }
        }
        cut
    }
}

/// The ids of a model's vocabulary.
fn ids(model: &Value) -> Option<HashMap<String, u32>> {
    let vocabulary = model["vocab"].as_object()?;
    vocabulary.iter().map(|(piece, id)| Some((piece.clone(), u32::try_from(id.as_u64()?).ok()?))).collect()
}

struct BytePair {
    ids: HashMap<String, u32>,
    /// The rank of a merge, and what it gives.
    merges: HashMap<(u32, u32), (usize, u32)>,
    prefix: String,
    suffix: String,
    unknown: Option<u32>,
    fuse_unknown: bool,
    probability: f64,
}

impl BytePair {
    fn of(model: &Value, probability: f64) -> Option<Self> {
        if model["byte_fallback"] == true || model["ignore_merges"] == true {
            return None;
        }
        let ids = ids(model)?;
        let text = |key: &str| model[key].as_str().unwrap_or_default().to_owned();
        let prefix = text("continuing_subword_prefix");
        let mut merges = HashMap::new();
        for (rank, merge) in model["merges"].as_array()?.iter().enumerate() {
            let (left, right) = (merge[0].as_str()?, merge[1].as_str()?);
            let merged = format!("{left}{}", right.strip_prefix(&prefix).unwrap_or(right));
            merges.insert((*ids.get(left)?, *ids.get(right)?), (rank, *ids.get(&merged)?));
        }
        Some(Self {
            unknown: ids.get(&text("unk_token")).copied(),
            ids,
            merges,
            prefix,
            suffix: text("end_of_word_suffix"),
            fuse_unknown: model["fuse_unk"] == true,
            probability,
        })
    }

    fn cut(&self, word: &str, draws: &mut Stream) -> Vec<(u32, usize, usize)> {
        let mut pieces = self.characters(word);
        // A merged piece stays at its left place; the right one is left empty. Where the neighbours of a place are:
        let mut previous: Vec<usize> = (0..pieces.len()).map(|place| place.wrapping_sub(1)).collect();
        let mut following: Vec<usize> = (1..=pieces.len()).collect();
        let merge_at = |pieces: &[(u32, usize, usize)], place: usize, next: usize| {
            let pair = (pieces.get(place)?.0, pieces.get(next)?.0);
            self.merges.get(&pair).map(|&(rank, merged)| Reverse((rank, place, next, merged)))
        };
        let mut possible: BinaryHeap<_> =
            (0..pieces.len()).filter_map(|place| merge_at(&pieces, place, place + 1)).collect();
        let mut dropped = Vec::new();
        // The best that is not dropped is made; those that were dropped have another chance before the next.
        while let Some(Reverse((rank, place, next, merged))) = possible.pop() {
            let expired = following[place] != next
                || merge_at(&pieces, place, next) != Some(Reverse((rank, place, next, merged)));
            if expired {
                continue;
            }
            if self.probability > 0.0 && uniform(draws) < self.probability {
                dropped.push(Reverse((rank, place, next, merged)));
                continue;
            }
            pieces[place] = (merged, pieces[place].1, pieces[next].2);
            let after = following[next];
            following[place] = after;
            // Nothing follows an empty place, so that its merges expire.
            following[next] = usize::MAX;
            if let Some(back) = previous.get_mut(after) {
                *back = place;
            }
            possible.extend(merge_at(&pieces, previous[place], place));
            possible.extend(merge_at(&pieces, place, after));
            possible.extend(dropped.drain(..));
        }
        let mut place = 0;
        let mut cut = Vec::new();
        while let Some(&piece) = pieces.get(place) {
            cut.push(piece);
            place = following[place];
        }
        cut
    }

    /// The pieces of single characters.
    fn characters(&self, word: &str) -> Vec<(u32, usize, usize)> {
        let mut pieces: Vec<(u32, usize, usize)> = Vec::new();
        let mut marked = String::new();
        let mut after_unknown = false;
        for (start, character) in word.char_indices() {
            let end = start + character.len_utf8();
            marked.clear();
            marked.push_str(if start > 0 { &self.prefix } else { "" });
            marked.push(character);
            marked.push_str(if end == word.len() { &self.suffix } else { "" });
            match (self.ids.get(&marked), self.unknown) {
                (Some(&id), _) => {
                    pieces.push((id, start, end));
                    after_unknown = false;
                }
                (None, Some(unknown)) => {
                    match pieces.last_mut() {
                        Some(last) if after_unknown && self.fuse_unknown => last.2 = end,
                        _ => pieces.push((unknown, start, end)),
                    }
                    after_unknown = true;
                }
                // Without an unknown token the crate leaves such characters out.
                (None, None) => {}
            }
        }
        pieces
    }
}

struct WordPiece {
    ids: HashMap<String, u32>,
    prefix: String,
    unknown: u32,
    longest: usize,
    probability: f64,
}

impl WordPiece {
    fn of(model: &Value, probability: f64) -> Option<Self> {
        let ids = ids(model)?;
        Some(Self {
            unknown: *ids.get(model["unk_token"].as_str()?)?,
            ids,
            prefix: model["continuing_subword_prefix"].as_str()?.to_owned(),
            longest: usize::try_from(model["max_input_chars_per_word"].as_u64()?).ok()?,
            probability,
        })
    }

    fn cut(&self, word: &str, draws: &mut Stream) -> Vec<(u32, usize, usize)> {
        let whole = || vec![(self.unknown, 0, word.len())];
        if word.chars().count() > self.longest {
            return whole();
        }
        let at_random = || self.probability > 0.0 && uniform(draws) < self.probability;
        self.longest_matches(word, at_random).or_else(|| self.longest_matches(word, || false)).unwrap_or_else(whole)
    }

    /// The longest match again and again, but for those that are dropped; `None` where there is none.
    fn longest_matches(&self, word: &str, mut drop: impl FnMut() -> bool) -> Option<Vec<(u32, usize, usize)>> {
        let mut pieces = Vec::new();
        let mut start = 0;
        let mut marked = String::new();
        while start < word.len() {
            let mut shortest = None;
            let mut chosen = None;
            let ends = word[start..].char_indices().map(|(at, character)| start + at + character.len_utf8());
            for end in ends.rev() {
                marked.clear();
                marked.push_str(if start > 0 { &self.prefix } else { "" });
                marked.push_str(&word[start..end]);
                let Some(&id) = self.ids.get(&marked) else { continue };
                // Whether this match is the shortest is known only later: then it is taken after all.
                shortest = Some((id, start, end));
                if !drop() {
                    chosen = shortest;
                    break;
                }
            }
            let piece = chosen.or(shortest)?;
            pieces.push(piece);
            start = piece.2;
        }
        Some(pieces)
    }
}
