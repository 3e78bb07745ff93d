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

/// Parts that are remembered at a time, half of them for certain: some 7 MiB.
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

/// Parts and their ids, in three lists that keep their memory: a map of texts would spread over all of the heap.
#[derive(Default)]
struct Memory {
    /// The numbers of entries, from 1, at the places that their hashes lead to; 0 where there is none.
    slots: Vec<u32>,
    entries: Vec<Entry>,
    text: String,
    ids: Vec<u32>,
}

/// Where the text and the ids of a part end; they begin where those of the entry before it end.
struct Entry {
    hash: u64,
    text_end: u32,
    ids_end: u32,
}

type Words = HashMap<Box<str>, u32, BuildHasherDefault<Folded>>;

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
            _ if !plain || tokenizer.sentence_piece.is_some() => Self::Whole,
            (Some("BertPreTokenizer"), Some("BertNormalizer")) => Self::Words,
            (Some("ByteLevel"), None) if normalizer == Value::Null && splitter["use_regex"] == true => {
                Self::SpacedWords
            }
            _ => Self::Whole,
        }
    }
}

impl Encoder<'_> {
    /// Whose ids these are.
    pub fn tokenizer(&self) -> &Tokenizer {
        self.tokenizer
    }

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
        let hash = hash(text);
        if let Some(found) = self.recent.get(hash, text) {
            ids.extend_from_slice(found);
            return true;
        }
        let Some(found) = self.older.get(hash, text) else { return false };
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
        if self.recent.entries.len() >= REMEMBERED / 2 {
            std::mem::swap(&mut self.recent, &mut self.older);
            self.recent.clear();
        }
        self.recent.insert(hash(text), text, ids);
    }
}

impl Memory {
    fn get(&self, hash: u64, text: &str) -> Option<&[u32]> {
        let mut slot = hash as usize % REMEMBERED;
        loop {
            let number = *self.slots.get(slot)? as usize;
            let entry = self.entries.get(number.checked_sub(1)?)?;
            let (text_begin, ids_begin) = match number {
                1 => (0, 0),
                _ => (self.entries[number - 2].text_end as usize, self.entries[number - 2].ids_end as usize),
            };
            if entry.hash == hash && self.text[text_begin..entry.text_end as usize] == *text {
                return Some(&self.ids[ids_begin..entry.ids_end as usize]);
            }
            slot = (slot + 1) % REMEMBERED;
        }
    }

    /// Adds a part that is not there. Half of the places stay free, so that searches end.
    fn insert(&mut self, hash: u64, text: &str, ids: &[u32]) {
        self.slots.resize(REMEMBERED, 0);
        self.text.push_str(text);
        self.ids.extend_from_slice(ids);
        self.entries.push(Entry { hash, text_end: self.text.len() as u32, ids_end: self.ids.len() as u32 });
        let mut slot = hash as usize % REMEMBERED;
        while self.slots[slot] != 0 {
            slot = (slot + 1) % REMEMBERED;
        }
        self.slots[slot] = self.entries.len() as u32;
    }

    fn clear(&mut self) {
        self.slots.fill(0);
        self.entries.clear();
        self.text.clear();
        self.ids.clear();
    }
}

/// WordPiece for words that normalization leaves alone, but for their case.
struct PlainWords {
    /// The pieces that begin a word, and those that continue one, without their prefix.
    first: Words,
    rest: Words,
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

fn hash(text: &str) -> u64 {
    let mut hasher = Folded::default();
    hasher.write(text.as_bytes());
    hasher.finish()
}

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
