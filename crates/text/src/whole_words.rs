//! Tokenizers of whole words, for models whose vocabulary is made from the texts of a task: a word is one token, or unknown.
//!
//! They are `WordLevel` tokenizers as Hugging Face has them, so that everything else that opens a tokenizer opens these.

use std::ops::Range;
use std::path::Path;

use serde_json::{Map, json};
use tokenizers::models::wordlevel::WordLevel;
use tokenizers::normalizers::Lowercase;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::pre_tokenizers::whitespace::WhitespaceSplit;

use crate::error::TextError;
use crate::files::Settings;
use crate::guard::shielded;
use crate::tokenizer::{Kind, Pieces, Tokenizer};

/// What is read word by word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WordUnit {
    /// Words that were divided already, such as those of a corpus with tags: white space alone separates them, and nothing
    /// stands around them.
    Words,
    /// Running text: white space and punctuation separate words, a mark of punctuation is one itself, and `[CLS]` and `[SEP]`
    /// stand around texts.
    Texts,
}

impl WordUnit {
    /// The special tokens, in the order of their ids.
    fn specials(self) -> &'static [&'static str] {
        match self {
            Self::Words => &["[PAD]", "[UNK]"],
            Self::Texts => &["[PAD]", "[UNK]", "[CLS]", "[SEP]"],
        }
    }
}

impl Tokenizer {
    /// A tokenizer of these words, which come behind its special tokens; one that occurs twice, or is a special token, counts once.
    /// With `lowercase`, texts are lower-cased first, and the words should be.
    pub fn of_words<'a>(
        words: impl IntoIterator<Item = &'a str>,
        lowercase: bool,
        unit: WordUnit,
    ) -> Result<Self, TextError> {
        let origin = Path::new("the vocabulary of words");
        let mut vocabulary = tokenizers::models::bpe::Vocab::default();
        for word in unit.specials().iter().copied().chain(words) {
            let next = vocabulary.len() as u32;
            vocabulary.entry(word.to_owned()).or_insert(next);
        }
        let build = || {
            let model = WordLevel::builder().vocab(vocabulary).unk_token("[UNK]".to_owned()).build()?;
            let mut inner = tokenizers::Tokenizer::new(model);
            if lowercase {
                inner.with_normalizer(Some(Lowercase))?;
            }
            match unit {
                WordUnit::Words => inner.with_pre_tokenizer(Some(WhitespaceSplit)),
                WordUnit::Texts => inner.with_pre_tokenizer(Some(BertPreTokenizer)),
            };
            Ok(inner)
        };
        let inner = shielded(build).map_err(|reason| TextError::Refused { path: origin.to_owned(), reason })?;
        let config = unit.specials().iter().map(|token| {
            let role = token.trim_matches(['[', ']']).to_lowercase();
            (format!("{role}_token"), json!(token))
        });
        let settings = Settings { config: Map::from_iter(config), ..Settings::default() };
        Self::assemble(inner, settings, &[], origin)
    }

    /// The pieces of a text whose words are known. A tokenizer of whole words has one for each of them, whatever punctuation stands
    /// in it; all others encode the text as a whole.
    pub(crate) fn pieces_of_words(&self, text: &str, words: &[Range<usize>]) -> Result<Pieces, TextError> {
        let unknown = self.special().unk.as_ref().map(|special| special.id);
        let (Kind::WordLevel, Some(unknown)) = (self.kind(), unknown) else { return self.encode(text) };
        let mut pieces = Pieces::default();
        for (number, word) in (0..).zip(words.iter().filter(|word| !word.is_empty())) {
            let ids = self.encode_ids(&text[word.clone()])?;
            let id = if let [id] = ids[..] { id } else { unknown };
            pieces.ids.push(id);
            pieces.offsets.push((word.start, word.end));
            pieces.words.push(Some(number));
        }
        Ok(self.spelled(pieces, text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tagging::join_words;

    #[test]
    fn words_are_tokens_or_unknown() {
        let tags = Tokenizer::of_words(["U.S.", "the", "the"], false, WordUnit::Words).unwrap();
        assert_eq!((tags.vocabulary_size(), tags.template().single_specials()), (4, 0));
        let (text, words) = join_words(&["The", "U.S.", "New York", "", "the"]);
        let pieces = tags.pieces_of_words(&text, &words).unwrap();
        assert_eq!((pieces.ids, pieces.offsets[2]), (vec![1, 2, 1, 3], (9, 17)));
        // In running text punctuation is a word, which it is not for words that were divided already.
        let windows = tags.words_in_windows("the U.S.", &[0..3, 4..8], 16, None).unwrap();
        assert_eq!((windows.windows[0].ids.clone(), windows.places), (vec![3, 2], vec![Some((0, 0)), Some((0, 1))]));
        assert_eq!(windows.windows[0].spellings, None);

        let texts = Tokenizer::of_words(["good", "!", "[SEP]"], true, WordUnit::Texts).unwrap();
        let pieces = texts.encode("GOOD, good!").unwrap();
        assert_eq!(pieces.ids, [4, 1, 4, 5]);
        assert_eq!(texts.template().single(&pieces, 8).unwrap().ids, [2, 4, 1, 4, 5, 3]);
        assert_eq!(texts.lowercase(), Some(true));
    }

    /// Words keep how the text spells them, whether they are known or not and however they are normalized; special tokens have none.
    #[test]
    fn words_are_spelled_as_the_text_has_them() {
        let spelled = |features: &crate::Features| -> Vec<String> {
            features.spellings.iter().flatten().map(|spelling| spelling.to_string()).collect()
        };
        let tags = Tokenizer::of_words(["the"], true, WordUnit::Words).unwrap().spelling();
        let (text, words) = join_words(&["The", "U.S.", "New York", "", "ÉTÉ"]);
        let windows = tags.words_in_windows(&text, &words, 3, Some(crate::Stride::Step(2))).unwrap().windows;
        assert_eq!(spelled(&windows[0]), ["The", "U.S.", "New York"]);
        assert_eq!(spelled(&windows[1]), ["New York", "ÉTÉ"]);
        let texts = Tokenizer::of_words(["good"], true, WordUnit::Texts).unwrap().spelling();
        let [first, second] = ["GOOD!", "İt is"].map(|text| texts.encode(text).unwrap());
        let pair = texts.template().pair(&first, &second, 6).unwrap();
        assert_eq!(spelled(&pair), ["", "GOOD", "!", "", "İt", ""]);
        assert_eq!(texts.template().single(&texts.encode("").unwrap(), 6).unwrap().spellings, Some(vec!["".into(); 2]));
        // Of ids alone nobody knows the text.
        let ids = Pieces { ids: vec![4], ..Pieces::default() };
        assert_eq!(texts.template().pair(&first, &ids, 6).unwrap().spellings, None);
    }

    #[test]
    fn saved_and_opened_again() {
        let directory = std::env::temp_dir().join(format!("henson-words-{}", std::process::id()));
        for unit in [WordUnit::Words, WordUnit::Texts] {
            let tokenizer = Tokenizer::of_words(["a", "b."], true, unit).unwrap();
            tokenizer.save(&directory, Some(99)).unwrap();
            let opened = Tokenizer::open(&directory).unwrap();
            assert_eq!((opened.kind(), opened.template()), (Kind::WordLevel, tokenizer.template()));
            for text in ["", "A b. c"] {
                assert_eq!(opened.encode(text).unwrap(), tokenizer.encode(text).unwrap(), "{text}");
            }
        }
        std::fs::remove_dir_all(directory).unwrap();
    }
}
