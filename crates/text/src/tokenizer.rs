//! The tokenizer itself: text to pieces and back, and what a model must know about it. How it gets out of files is in
//! `files.rs`, how it gets back into them in `save.rs`; special tokens around the pieces are the template's work.
//!
//! It behaves as Hugging Face's does, since that is what existing checkpoints are used with, with three exceptions that
//! keep results a function of the text alone: truncation, padding and BPE dropout found in a `tokenizer.json` are
//! switched off.

use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value};
use tokenizers::normalizers::{Lowercase, Sequence};
use tokenizers::{
    AddedToken, Encoding, Model, ModelWrapper, NormalizedString, Normalizer, NormalizerWrapper, OffsetReferential,
    OffsetType, PreTokenizedString, PreTokenizer, PreTokenizerWrapper,
};

use crate::error::TextError;
use crate::files::Settings;
use crate::guard::{BREAKDOWN, shielded};
use crate::sentencepiece::SentencePiece;
use crate::special::{self, SpecialTokens};
use crate::template::{Template, shortened};
use crate::training::sentinel;
use crate::work::Work;

/// The algorithm that cuts words into pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// BERT's greedy longest match.
    WordPiece,
    /// Byte pair encoding, on bytes (GPT-2, RoBERTa) or characters.
    BytePair,
    /// SentencePiece's unigram language model (ALBERT, XLNet, T5).
    Unigram,
    /// Whole words.
    WordLevel,
}

/// A text in pieces, without special tokens around it. The lists have the same length.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pieces {
    /// The ids.
    pub ids: Vec<u32>,
    /// Byte ranges of the original text. They lie on character boundaries and never go backwards, but pieces of one
    /// character (byte-level BPE) share its range.
    pub offsets: Vec<(usize, usize)>,
    /// The number of the word that a piece belongs to: words as the tokenizer splits them, so punctuation counts as one.
    pub words: Vec<Option<u32>>,
    /// How the text spells each piece, where the tokenizer keeps that ([`Tokenizer::spelling`]).
    pub spellings: Option<Vec<Box<str>>>,
}

impl Pieces {
    pub(crate) fn of_encoding(encoding: &Encoding, text: &str) -> Self {
        // Odd normalizers can leave offsets that point past the text or into a character; callers cut the text with them.
        let within = |&(start, end): &(usize, usize)| {
            let end = text.ceil_char_boundary(end);
            (text.floor_char_boundary(start).min(end), end)
        };
        Self {
            ids: encoding.get_ids().to_vec(),
            offsets: encoding.get_offsets().iter().map(within).collect(),
            words: encoding.get_word_ids().to_vec(),
            spellings: None,
        }
    }

    /// How many pieces there are.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Keeps the first `length` pieces and says how many were cut off.
    pub fn truncate(&mut self, length: usize) -> usize {
        let dropped = self.len().saturating_sub(length);
        self.ids.truncate(length);
        self.offsets.truncate(length);
        self.words.truncate(length);
        self.spellings.iter_mut().for_each(|spellings| spellings.truncate(length));
        dropped
    }
}

/// A word of a text, before it is cut into pieces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Word {
    /// The word as the model sees it: normalized, and for byte-level BPE with a letter for each byte.
    pub text: String,
    /// Its byte range in the original text.
    pub offsets: (usize, usize),
}

/// Well below where the pattern matcher gives up, far above any real text.
const LONGEST_WHITE_SPACE: usize = 500_000;

/// The most bytes of tokens that are put together to a text.
const LONGEST_DECODED: usize = 64 << 20;

/// A tokenizer. It is immutable and may be shared between threads; a clone copies the vocabulary.
#[derive(Clone)]
pub struct Tokenizer {
    pub(crate) inner: tokenizers::Tokenizer,
    pub(crate) special: SpecialTokens,
    pub(crate) settings: Settings,
    template: Template,
    kind: Kind,
    vocabulary_size: usize,
    max_length: Option<usize>,
    lowercase: Option<bool>,
    heeds_leading_space: bool,
    splits_by_pattern: bool,
    work: Arc<Work>,
    /// What encodes in place of `inner`, where the tokenizer came out of a SentencePiece file.
    pub(crate) sentence_piece: Option<Arc<SentencePiece>>,
    /// Whether pieces keep how the text spells them.
    spells: bool,
}

impl std::fmt::Debug for Tokenizer {
    /// Without the vocabulary, which would fill screens.
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Tokenizer")
            .field("kind", &self.kind)
            .field("vocabulary_size", &self.vocabulary_size)
            .field("special", &self.special)
            .finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Cuts a text into pieces, without adding special tokens. The texts of special tokens in it, such as `[MASK]`, stay
    /// whole and get their ids, unless [`recognise_special_strings`](Self::recognise_special_strings) is off.
    pub fn encode(&self, text: &str) -> Result<Pieces, TextError> {
        if let Some(sentence_piece) = &self.sentence_piece {
            return Ok(self.spelled(sentence_piece.encode(&self.inner, text)?, text));
        }
        self.check_text(text)?;
        let encoding = shielded(|| self.inner.encode(text, false))
            .map_err(|reason| TextError::Failed { action: "encode", reason })?;
        Ok(self.spelled(Pieces::of_encoding(&encoding, text), text))
    }

    /// The same tokenizer, whose pieces also keep how the text spells them, before any normalization: for networks that read words
    /// as characters, those that the vocabulary does not have among them. Not saved with the tokenizer.
    #[must_use]
    pub fn spelling(mut self) -> Self {
        self.spells = true;
        self
    }

    /// Pieces with their spelling, where it is kept.
    pub(crate) fn spelled(&self, pieces: Pieces, text: &str) -> Pieces {
        if !self.spells {
            return pieces;
        }
        let spelling = |&(start, end): &(usize, usize)| Box::from(text.get(start..end).unwrap_or_default());
        Pieces { spellings: Some(pieces.offsets.iter().map(spelling).collect()), ..pieces }
    }

    /// The ids of [`encode`](Self::encode) alone, faster because nothing is traced back to the text.
    pub fn encode_ids(&self, text: &str) -> Result<Vec<u32>, TextError> {
        if let Some(sentence_piece) = &self.sentence_piece {
            return Ok(sentence_piece.encode(&self.inner, text)?.ids);
        }
        self.check_text(text)?;
        let encoding = shielded(|| self.inner.encode_fast(text, false))
            .map_err(|reason| TextError::Failed { action: "encode", reason })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Puts pieces together to a text. `skip_special` leaves special tokens out. What normalization took from the
    /// original (case, accents, spacing) does not come back: quote the original by its offsets instead.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, TextError> {
        let mut bytes = 0_usize;
        for &id in ids {
            // The crate would leave unknown ids out without a word.
            let Some(token) = self.token(id) else {
                return Err(TextError::UnknownId { id, vocabulary_size: self.vocabulary_size });
            };
            bytes += token.len();
            if bytes > LONGEST_DECODED {
                return Err(TextError::TooLong { ids: ids.len(), limit: LONGEST_DECODED });
            }
        }
        // Some of the crate's decoders count on at least one token.
        if ids.iter().all(|&id| skip_special && self.is_special(id)) {
            return Ok(String::new());
        }
        shielded(|| self.inner.decode(ids, skip_special))
            .map_err(|reason| TextError::Failed { action: "decode", reason })
    }

    /// The words before they are cut into pieces, normalized, with their byte ranges in the original text: for BERT, its
    /// basic tokenization. Special strings are not recognised here.
    pub fn words(&self, text: &str) -> Result<Vec<Word>, TextError> {
        self.check_text(text)?;
        split_words(self.inner.get_normalizer(), self.inner.get_pre_tokenizer(), text)
    }

    /// Whether the texts of special tokens are recognised in a text (the default, as in Hugging Face) or cut into pieces
    /// like any other, which is safer where strangers write the text. Not saved with the tokenizer.
    #[must_use]
    pub fn recognise_special_strings(mut self, recognise: bool) -> Self {
        self.inner.set_encode_special_tokens(!recognise);
        self
    }

    /// The largest id + 1, added tokens included: a model's embedding needs at least as many rows.
    pub fn vocabulary_size(&self) -> usize {
        self.vocabulary_size
    }

    /// The text of a token.
    pub fn token(&self, id: u32) -> Option<String> {
        let added = self.inner.get_added_vocabulary().get_added_tokens_decoder().get(&id);
        added.map(|token| token.content.clone()).or_else(|| self.inner.get_model().id_to_token(id))
    }

    /// A token as people read it: decoded alone, so that byte-level BPE's `Ġthe` is ` the` and `Ã©` is `é`. A token that is
    /// only a part of a character stays as it is in the vocabulary, as do special tokens.
    pub fn readable(&self, id: u32) -> Option<String> {
        let token = self.token(id)?;
        if self.is_special(id) || !matches!(self.kind, Kind::BytePair | Kind::Unigram) {
            return Some(token);
        }
        let text = self.decode(&[id], false).ok().filter(|text| !text.is_empty() && !text.contains('\u{fffd}'));
        Some(text.unwrap_or(token))
    }

    /// Whether a space before a text changes its first token, and none is put there: byte-level BPE as RoBERTa and GPT-2 have
    /// it. What continues an earlier text then needs its space.
    pub fn heeds_leading_space(&self) -> bool {
        self.heeds_leading_space
    }

    /// The id of a token, by its exact text (`##ing`, `Ġthe`, `[CLS]`).
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The tokens with special parts.
    pub fn special(&self) -> &SpecialTokens {
        &self.special
    }

    /// Whether an id is a special token: one of the five, or another that the tokenizer's files mark so.
    pub fn is_special(&self, id: u32) -> bool {
        let added = self.inner.get_added_vocabulary().get_added_tokens_decoder();
        added.get(&id).is_some_and(|token| token.special) || self.special.contains(id)
    }

    /// What ends a text where nothing stands around it: the `eos_token` that its files name, or `<|endoftext|>` or `</s>`.
    pub fn end_of_text(&self) -> Option<u32> {
        let stated = self.settings.stated();
        let named = stated.iter().find_map(|(_, map)| map.get("eos_token"));
        let text = named.and_then(|value| value.as_str().or_else(|| value.get("content")?.as_str()));
        text.into_iter().chain(["<|endoftext|>", "</s>"]).find_map(|text| self.id(text))
    }

    /// What stands for the spans of T5's pre-training, `<extra_id_0>` first; as many as there are without a gap.
    pub fn sentinels(&self) -> Vec<u32> {
        (0..).map_while(|number| self.id(&sentinel(number))).collect()
    }

    /// How special tokens and segments surround texts.
    pub fn template(&self) -> &Template {
        &self.template
    }

    /// The algorithm.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// `model_max_length` of tokenizer_config.json, when it is a real number (Hugging Face writes 10³⁰ for "unknown").
    pub fn max_length(&self) -> Option<usize> {
        self.max_length
    }

    /// The length that `tokenizer.json` asked to truncate to. It is information only: nothing is truncated here.
    pub fn configured_truncation(&self) -> Option<usize> {
        self.settings.truncation
    }

    /// The BPE dropout that `tokenizer.json` asked for. It is information only: encoding is never random.
    pub fn configured_dropout(&self) -> Option<f64> {
        self.settings.dropout
    }

    /// Whether texts are lower-cased; `None` when the normalizer cannot be seen through (SentencePiece's tables).
    pub fn lowercase(&self) -> Option<bool> {
        self.lowercase
    }

    /// The same tokenizer for texts that are lower-cased first, as sentence-transformers' `do_lower_case` has it; one that
    /// lower-cases already stays as it is. Special strings are found before that.
    pub fn lower_casing(mut self) -> Result<Self, TextError> {
        if self.lowercase != Some(true) {
            let own = self.inner.get_normalizer().cloned();
            let both: Vec<NormalizerWrapper> = std::iter::once(Lowercase.into()).chain(own).collect();
            shielded(|| self.inner.with_normalizer(Some(Sequence::new(both))).map(drop))
                .map_err(|reason| TextError::Failed { action: "lower-case", reason })?;
            self.lowercase = Some(true);
        }
        Ok(self)
    }

    /// The same tokenizer with further pieces at the end of its vocabulary; those that it has already are skipped.
    ///
    /// A piece is a word, which is normalized as texts are, or `##` and what continues one. Only WordPiece can be extended
    /// so: the other kinds would also need to know how the piece is made, or how likely it is.
    pub fn extended(&self, pieces: &[String]) -> Result<Self, TextError> {
        let refused = |piece: &str, problem: String| TextError::Piece { piece: piece.to_owned(), problem };
        if self.kind != Kind::WordPiece {
            return Err(refused(
                "",
                format!("only WordPiece vocabularies can be extended, this one is {:?}", self.kind),
            ));
        }
        let mut value = serde_json::to_value(&self.inner).map_err(|error| refused("", error.to_string()))?;
        let mut next = self.vocabulary_size as u32;
        for piece in pieces {
            let (prefix, rest) = piece.strip_prefix("##").map_or(("", piece.as_str()), |rest| ("##", rest));
            let words = self.words(rest)?;
            let [word] = &words[..] else {
                return Err(refused(piece, format!("it is {} words to this tokenizer, expected one", words.len())));
            };
            let token = format!("{prefix}{}", word.text);
            if self.inner.token_to_id(&token).is_none() && value["model"]["vocab"].get(&token).is_none() {
                value["model"]["vocab"][token] = next.into();
                next += 1;
            }
        }
        let inner = shielded(|| serde_json::from_value(value).map_err(Into::into)).map_err(|r| refused("", r))?;
        Ok(Self { inner, vocabulary_size: next as usize, ..self.clone() })
    }

    /// The same with another tokenizer inside, whose tokens are those of this one and some more.
    pub(crate) fn with_inner(self, inner: tokenizers::Tokenizer, template: Template, vocabulary_size: usize) -> Self {
        Self { inner, template, vocabulary_size, ..self }
    }

    pub(crate) fn check_text(&self, text: &str) -> Result<(), TextError> {
        check_white_space(self.splits_by_pattern, text)?;
        self.work.check(text)
    }

    /// The last step of every way to a tokenizer: finds the special tokens and the template, and checks the whole.
    /// `origin` is the file that holds the vocabulary, for messages.
    pub(crate) fn assemble(
        inner: tokenizers::Tokenizer,
        settings: Settings,
        implied_names: &[(&str, String)],
        origin: &Path,
    ) -> Result<Self, TextError> {
        Self::assemble_with(inner, settings, implied_names, origin, None)
    }

    /// [`assemble`](Self::assemble), with what encodes in place of `inner`.
    pub(crate) fn assemble_with(
        mut inner: tokenizers::Tokenizer,
        settings: Settings,
        implied_names: &[(&str, String)],
        origin: &Path,
        sentence_piece: Option<SentencePiece>,
    ) -> Result<Self, TextError> {
        let refused = |reason| TextError::Refused { path: origin.to_owned(), reason };
        let stated = settings.stated();
        let special = special::find(&stated, implied_names, |token| inner.token_to_id(token))?;
        register(&mut inner, &special, &stated).map_err(refused)?;

        let post_processor = json(inner.get_post_processor());
        let template = match Template::from_post_processor(origin, &post_processor)? {
            Some(template) => template,
            None => {
                let (cls, sep) = (special.cls.as_ref(), special.sep.as_ref());
                let template = Template::from_special_tokens(cls, sep);
                let processor = template.post_processor(cls, sep, inner.get_pre_tokenizer()).map_err(refused)?;
                if processor.is_some() {
                    inner.with_post_processor(processor);
                }
                template
            }
        };
        if let Some(id) = template.special_ids().find(|&id| inner.id_to_token(id).is_none()) {
            return Err(TextError::Malformed {
                path: origin.to_owned(),
                place: "post_processor".to_owned(),
                expected: "ids of the vocabulary".to_owned(),
                got: id.to_string(),
            });
        }

        let kind = match inner.get_model() {
            ModelWrapper::WordPiece(_) => Kind::WordPiece,
            ModelWrapper::BPE(_) => Kind::BytePair,
            ModelWrapper::Unigram(_) => Kind::Unigram,
            ModelWrapper::WordLevel(_) => Kind::WordLevel,
        };
        let Some(largest) = inner.get_vocab(true).into_values().max() else {
            return Err(TextError::EmptyVocabulary { path: origin.to_owned() });
        };
        let (normalizer, pre_tokenizer) = (json(inner.get_normalizer()), json(inner.get_pre_tokenizer()));
        let lowercase = lowercases(&normalizer);
        let tokenizer = Self {
            heeds_leading_space: has_bare_byte_level(&pre_tokenizer),
            splits_by_pattern: splits_by_pattern(&pre_tokenizer),
            work: Arc::new(Work::of(origin, &normalizer, &pre_tokenizer)?),
            max_length: settings.max_length()?,
            vocabulary_size: largest as usize + 1,
            inner,
            special,
            settings,
            template,
            kind,
            lowercase,
            sentence_piece: sentence_piece.map(Arc::new),
            spells: false,
        };

        // A tokenizer that breaks down on a plain text is refused now rather than while it serves. Ordinary errors are
        // left to the text that causes them: a vocabulary may do without an unknown token.
        match tokenizer.encode("Jim Henson, 1955: a pupp\u{e9}teer \u{4e2d} [MASK] <mask>") {
            Err(TextError::Failed { reason, .. }) if reason.starts_with(BREAKDOWN) => Err(refused(reason)),
            Err(error @ TextError::TooMuchWork { .. }) => Err(refused(error.to_string())),
            _ => Ok(tokenizer),
        }
    }
}

/// Normalizes a text and splits it into words, with their byte ranges in the text as it was. For patterns,
/// [`check_white_space`] comes first.
pub(crate) fn split_words(
    normalizer: Option<&NormalizerWrapper>,
    pre_tokenizer: Option<&PreTokenizerWrapper>,
    text: &str,
) -> Result<Vec<Word>, TextError> {
    let split = || -> tokenizers::Result<Vec<Word>> {
        let mut normalized = NormalizedString::from(text);
        if let Some(normalizer) = normalizer {
            normalizer.normalize(&mut normalized)?;
        }
        let mut words = PreTokenizedString::from(normalized);
        if let Some(pre_tokenizer) = pre_tokenizer {
            pre_tokenizer.pre_tokenize(&mut words)?;
        }
        let splits = words.get_splits(OffsetReferential::Original, OffsetType::Byte);
        Ok(splits.into_iter().map(|(text, offsets, _)| Word { text: text.to_owned(), offsets }).collect())
    };
    shielded(split).map_err(|reason| TextError::Failed { action: "split", reason })
}

/// Byte-level splitting looks ahead from the end of white space. Its matcher gives up on runs of about a million
/// characters, and the crate then leaves the rest of the text in one piece without a word.
pub(crate) fn check_white_space(splits_by_pattern: bool, text: &str) -> Result<(), TextError> {
    if !splits_by_pattern || text.len() <= LONGEST_WHITE_SPACE {
        return Ok(());
    }
    let mut run = 0;
    for letter in text.chars() {
        run = if letter.is_whitespace() { run + 1 } else { 0 };
        if run > LONGEST_WHITE_SPACE {
            let reason = format!("more than {LONGEST_WHITE_SPACE} white space characters in a row: shorten them");
            return Err(TextError::Failed { action: "split", reason });
        }
    }
    Ok(())
}

/// Makes the special tokens known as such, as Hugging Face does, where their file did not: otherwise their texts would
/// be cut into pieces, and decoding would not skip them. Beside our five these are the others that a configuration
/// names; one that is not in the vocabulary is skipped, since no model here could use it.
fn register(
    inner: &mut tokenizers::Tokenizer,
    special: &SpecialTokens,
    stated: &[(&Path, &Map<String, Value>)],
) -> Result<(), String> {
    let mut tokens: Vec<AddedToken> = Vec::new();
    for (role, special) in special.by_role() {
        let value = stated.iter().find_map(|(_, map)| map.get(role));
        tokens.push(added_token(&special.text, value.unwrap_or(&Value::Null), true));
    }
    for (_, map) in stated {
        let lists = ["additional_special_tokens", "extra_special_tokens"].into_iter().filter_map(|key| map.get(key));
        let listed = lists.filter_map(Value::as_array).flatten();
        for value in listed.chain(map.get("bos_token")).chain(map.get("eos_token")) {
            let text = value.as_str().or_else(|| value.get("content")?.as_str());
            tokens.extend(
                text.filter(|text| inner.token_to_id(text).is_some()).map(|text| added_token(text, value, true)),
            );
        }
    }
    let added = inner.get_added_vocabulary().get_vocab();
    tokens.retain(|token| !added.contains_key(&token.content));
    // The first mention of a token decides its flags.
    let mut seen = std::collections::HashSet::new();
    tokens.retain(|token| seen.insert(token.content.clone()));
    shielded(|| inner.add_special_tokens(tokens)).map(drop)
}

/// A token with the flags that its object in a configuration has. Like Hugging Face's, special tokens are found in the
/// text as it is, and others in the normalized text, unless told otherwise.
pub(crate) fn added_token(text: &str, flags: &Value, special: bool) -> AddedToken {
    let flag = |name: &str, default: bool| flags.get(name).and_then(Value::as_bool).unwrap_or(default);
    let special = flag("special", special);
    AddedToken::from(text, special)
        .lstrip(flag("lstrip", false))
        .rstrip(flag("rstrip", false))
        .single_word(flag("single_word", false))
        .normalized(flag("normalized", !special))
}

/// What a normalizer does to case, read off its JSON form because the crate keeps its parts private.
fn lowercases(normalizer: &Value) -> Option<bool> {
    match normalizer["type"].as_str() {
        Some("BertNormalizer") => normalizer["lowercase"].as_bool(),
        Some("Lowercase") => Some(true),
        Some("Precompiled") => None,
        Some("Sequence") => {
            let parts: Vec<Option<bool>> = normalizer["normalizers"].as_array()?.iter().map(lowercases).collect();
            if parts.contains(&Some(true)) { Some(true) } else { (!parts.contains(&None)).then_some(false) }
        }
        _ => Some(false),
    }
}

/// Whether a pre-tokenizer uses a regular expression.
fn splits_by_pattern(pre_tokenizer: &Value) -> bool {
    let inner = pre_tokenizer["pretokenizers"].as_array().map(Vec::as_slice).unwrap_or_default();
    pre_tokenizer["use_regex"] == true
        || pre_tokenizer["pattern"].get("Regex").is_some()
        || inner.iter().any(splits_by_pattern)
}

/// Whether a pre-tokenizer is byte-level BPE's without a space of its own before a text.
fn has_bare_byte_level(pre_tokenizer: &Value) -> bool {
    let inner = pre_tokenizer["pretokenizers"].as_array().map(Vec::as_slice).unwrap_or_default();
    (pre_tokenizer["type"] == "ByteLevel" && pre_tokenizer["add_prefix_space"] == false)
        || inner.iter().any(has_bare_byte_level)
}

/// The JSON form of a part of the tokenizer; null when there is none.
pub(crate) fn json<T: serde::Serialize>(part: Option<&T>) -> Value {
    part.and_then(|part| serde_json::to_value(part).ok()).unwrap_or(Value::Null)
}

/// A key of a configuration that must be true, false or null.
pub(crate) fn flag(path: &Path, map: &Map<String, Value>, key: &str) -> Result<Option<bool>, TextError> {
    match map.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Bool(value)) => Ok(Some(*value)),
        Some(other) => Err(TextError::Malformed {
            path: path.to_owned(),
            place: key.to_owned(),
            expected: "true or false".to_owned(),
            got: shortened(other),
        }),
    }
}
