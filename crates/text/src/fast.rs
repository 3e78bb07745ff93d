//! Encoding for whole corpora: ids alone, the same as [`Tokenizer::encode_ids`], several times faster.
//!
//! Natural language repeats its words, and BERT's and GPT-2's splitters never look across a space. So a text is divided
//! at its spaces, and the ids of each part are remembered; only what was not seen lately is tokenized. Of that, plain
//! words in ASCII are cut into word pieces here, and the rest is the `tokenizers` crate's. Where a tokenizer's parts do
//! not promise that words are independent (SentencePiece's may join them), the text is encoded as a whole.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use serde_json::Value;
use tokenizers::{Model, ModelWrapper};

use crate::error::TextError;
use crate::tokenizer::{Tokenizer, json};

/// Parts that are remembered at a time, half of them for certain: some 20 MiB.
const REMEMBERED: usize = 1 << 17;

/// Longer parts are hardly words.
const LONGEST: usize = 64;

/// Turns texts into ids, with a memory. Each thread has its own.
pub struct Encoder<'a> {
    tokenizer: &'a Tokenizer,
    rule: Rule,
    plain: Option<PlainWords>,
    /// The first bytes of added tokens: in a part with one of these, no closer look is taken.
    opaque: [bool; 256],
    recent: Memory,
    older: Memory,
}

/// Where a text may be divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    /// At every space, which belongs to no word; and around punctuation, each of which is a word.
    Words,
    /// Before a space after something that is none: the space belongs to the next word.
    SpacedWords,
    /// Nowhere.
    Whole,
}

type Words<T> = HashMap<Box<str>, T, BuildHasherDefault<Folded>>;

#[derive(Default)]
struct Memory {
    places: Words<(u32, u32)>,
    ids: Vec<u32>,
}

impl Tokenizer {
    /// A faster way to the ids of many texts.
    pub fn encoder(&self) -> Encoder<'_> {
        let added = self.inner.get_added_vocabulary().get_added_tokens_decoder();
        let mut opaque = [false; 256];
        for first in added.values().filter_map(|token| token.content.bytes().next()) {
            opaque[usize::from(first)] = true;
        }
        let (recent, older) = (Memory::default(), Memory::default());
        Encoder { tokenizer: self, rule: Rule::of(self), plain: PlainWords::of(self), opaque, recent, older }
    }
}

impl Rule {
    fn of(tokenizer: &Tokenizer) -> Self {
        let inner = &tokenizer.inner;
        let (normalizer, splitter) = (json(inner.get_normalizer()), json(inner.get_pre_tokenizer()));
        let mut added = inner.get_added_vocabulary().get_added_tokens_decoder().values();
        // A token with a space in it could lie across two parts, and these flags look at what stands around.
        let plain = added.all(|token| {
            let solid = token.content.bytes().all(|byte| byte.is_ascii_graphic());
            solid && !token.single_word && !token.rstrip
        });
        match (splitter["type"].as_str(), normalizer["type"].as_str()) {
            _ if !plain => Self::Whole,
            (Some("BertPreTokenizer"), Some("BertNormalizer")) => Self::Words,
            (Some("ByteLevel"), None) if normalizer == Value::Null && splitter["use_regex"] == true => {
                Self::SpacedWords
            }
            _ => Self::Whole,
        }
    }
}

impl Encoder<'_> {
    /// Appends the ids of a text: those that [`Tokenizer::encode_ids`] gives.
    pub fn encode(&mut self, text: &str, ids: &mut Vec<u32>) -> Result<(), TextError> {
        match self.rule {
            Rule::Words => {
                let mut parts = text.split(' ').filter(|part| !part.is_empty());
                parts.try_for_each(|part| self.words(part, ids))
            }
            Rule::SpacedWords => {
                let mut begin = 0;
                for (space, _) in text.match_indices(' ') {
                    let solid = text[..space].chars().next_back().is_some_and(|c| !c.is_whitespace());
                    if solid {
                        self.part(&text[begin..space], ids)?;
                        begin = space;
                    }
                }
                if begin < text.len() { self.part(&text[begin..], ids) } else { Ok(()) }
            }
            Rule::Whole => {
                ids.extend(self.tokenizer.encode_ids(text)?);
                Ok(())
            }
        }
    }

    /// What stands between two spaces: a word with punctuation around it, most often.
    fn words(&mut self, text: &str, ids: &mut Vec<u32>) -> Result<(), TextError> {
        if self.recall(text, ids) {
            return Ok(());
        }
        // Controls and white space are the normalizer's, special tokens the tokenizer's, and of other letters it is not
        // known here what becomes of them.
        let known = |c: char| c.is_ascii_graphic() && !self.opaque[c as usize] || is_wide_punctuation(c);
        if !text.chars().all(known) {
            return self.part(text, ids);
        }
        let (first, mut begin) = (ids.len(), 0);
        for (at, c) in text.char_indices().filter(|&(_, c)| !c.is_ascii_alphanumeric()) {
            self.plain_word(&text[begin..at], ids)?;
            begin = at + c.len_utf8();
            self.plain_word(&text[at..begin], ids)?;
        }
        self.plain_word(&text[begin..], ids)?;
        self.remember(text, &ids[first..]);
        Ok(())
    }

    /// A word of ASCII letters and digits, or a punctuation character, or nothing.
    fn plain_word(&mut self, text: &str, ids: &mut Vec<u32>) -> Result<(), TextError> {
        match &mut self.plain {
            _ if text.is_empty() => Ok(()),
            Some(plain) if text.is_ascii() => {
                plain.cut(text, ids);
                Ok(())
            }
            _ => self.part(text, ids),
        }
    }

    /// A part that is tokenized on its own.
    fn part(&mut self, text: &str, ids: &mut Vec<u32>) -> Result<(), TextError> {
        if self.recall(text, ids) {
            return Ok(());
        }
        let found = self.tokenizer.encode_ids(text)?;
        ids.extend_from_slice(&found);
        self.remember(text, &found);
        Ok(())
    }

    fn recall(&mut self, text: &str, ids: &mut Vec<u32>) -> bool {
        if let Some(found) = self.recent.get(text) {
            ids.extend_from_slice(found);
            return true;
        }
        let Some(found) = self.older.get(text) else { return false };
        let begin = ids.len();
        ids.extend_from_slice(found);
        // What is used stays when the older half is forgotten.
        self.remember(text, &ids[begin..]);
        true
    }

    fn remember(&mut self, text: &str, ids: &[u32]) {
        if text.len() > LONGEST {
            return;
        }
        if self.recent.places.len() >= REMEMBERED / 2 {
            std::mem::swap(&mut self.recent, &mut self.older);
            self.recent.places.clear();
            self.recent.ids.clear();
        }
        let begin = self.recent.ids.len() as u32;
        self.recent.ids.extend_from_slice(ids);
        self.recent.places.insert(text.into(), (begin, self.recent.ids.len() as u32));
    }
}

impl Memory {
    fn get(&self, text: &str) -> Option<&[u32]> {
        let &(begin, end) = self.places.get(text)?;
        Some(&self.ids[begin as usize..end as usize])
    }
}

/// WordPiece for words that normalization leaves alone, but for their case.
struct PlainWords {
    /// The pieces that begin a word, and those that go on, without their prefix.
    first: Words<u32>,
    rest: Words<u32>,
    /// The longest of them.
    longest: usize,
    /// Longer words are unknown.
    most: usize,
    unknown: u32,
    lowercase: bool,
    word: String,
}

impl PlainWords {
    /// `None` where the model is another.
    fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let ModelWrapper::WordPiece(model) = tokenizer.inner.get_model() else { return None };
        let vocabulary = model.get_vocab();
        let lowercase = json(tokenizer.inner.get_normalizer())["lowercase"].as_bool()?;
        let mut plain = Self {
            first: Words::default(),
            rest: Words::default(),
            longest: vocabulary.keys().map(String::len).max()?,
            most: model.max_input_chars_per_word,
            unknown: *vocabulary.get(&model.unk_token)?,
            lowercase,
            word: String::new(),
        };
        for (piece, id) in vocabulary {
            if let Some(rest) = piece.strip_prefix(&model.continuing_subword_prefix) {
                plain.rest.insert(rest.into(), id);
            }
            plain.first.insert(piece.into(), id);
        }
        Some(plain)
    }

    /// Appends the pieces of a word: the longest that fits, again and again; if none does, all of it is unknown.
    fn cut(&mut self, word: &str, ids: &mut Vec<u32>) {
        self.word.clear();
        self.word.push_str(word);
        if self.lowercase {
            self.word.make_ascii_lowercase();
        }
        let (word, before) = (self.word.as_str(), ids.len());
        let mut begin = 0;
        while begin < word.len() && word.len() <= self.most {
            let pieces = if begin == 0 { &self.first } else { &self.rest };
            let ends = (begin + 1..=word.len().min(begin + self.longest)).rev();
            let Some((end, id)) = ends.into_iter().find_map(|end| Some((end, *pieces.get(&word[begin..end])?))) else {
                break;
            };
            ids.push(id);
            begin = end;
        }
        if begin < word.len() {
            ids.truncate(before);
            ids.push(self.unknown);
        }
    }
}

/// Punctuation that normalization leaves alone: dashes, quotes and the ellipsis.
fn is_wide_punctuation(c: char) -> bool {
    matches!(c, '\u{2013}' | '\u{2014}' | '\u{2018}' | '\u{2019}' | '\u{201c}' | '\u{201d}' | '\u{2026}')
}

/// A hash of eight bytes at a time: words are short, and the standard one takes longer than all else here.
#[derive(Default)]
struct Folded(u64);

impl Hasher for Folded {
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            let product = u128::from(self.0 ^ u64::from_le_bytes(word)) * 0x9e37_79b9_7f4a_7c15;
            self.0 = (product >> 64) as u64 ^ product as u64;
        }
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
