//! What instances must know of a vocabulary: its special pieces, and which pieces begin a word.

use henson_text::{Special, Tokenizer};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::DataError;

/// The facts about a vocabulary that corruption needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vocabulary {
    /// How many ids there are: all are below this.
    pub size: u32,
    /// Opens a sequence; where no piece does, what ends a text.
    pub cls: u32,
    /// Ends a segment, and stands between documents.
    pub sep: u32,
    /// Stands for a masked token; a vocabulary for causal models alone may lack it.
    pub mask: Option<u32>,
    /// All special ids, sorted: never drawn as a replacement.
    pub special: Vec<u32>,
    /// Where words begin.
    pub words: WordMarks,
    /// What stands for spans that an encoder-decoder writes, the first one first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sentinels: Vec<u32>,
}

/// How pieces tell where a word begins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum WordMarks {
    /// For each id, whether its piece begins a word (`Ġthe`, `▁the`, or one without `##`).
    #[serde(with = "digits")]
    Begin(Vec<bool>),
    /// For each id, whether its piece ends a word (`the</w>`): the next one begins another.
    #[serde(with = "digits")]
    End(Vec<bool>),
}

impl WordMarks {
    /// Whether `id` begins a word where `previous` stands before it; none at the beginning of a segment.
    pub fn begins(&self, previous: Option<u32>, id: u32) -> bool {
        match (self, previous) {
            (_, None) => true,
            (WordMarks::Begin(marks), _) => marks.get(id as usize).copied().unwrap_or(true),
            (WordMarks::End(marks), Some(previous)) => marks.get(previous as usize).copied().unwrap_or(true),
        }
    }
}

impl Vocabulary {
    /// The facts about a tokenizer's vocabulary; an error where it lacks the pieces that open and end a sequence, and has none
    /// that ends a text either.
    pub fn of(tokenizer: &Tokenizer) -> Result<Self, DataError> {
        let (special, end) = (tokenizer.special(), tokenizer.end_of_text());
        let id = |special: &Option<Special>| special.as_ref().map(|special| special.id).or(end);
        let missing = |role| DataError::MissingSpecial { role };
        let size = tokenizer.vocabulary_size() as u32;
        Ok(Self {
            size,
            cls: id(&special.cls).ok_or(missing("cls_token"))?,
            sep: id(&special.sep).ok_or(missing("sep_token"))?,
            mask: special.mask.as_ref().map(|mask| mask.id),
            special: (0..size).filter(|&id| tokenizer.is_special(id)).collect(),
            words: Convention::of(tokenizer)?.marks(tokenizer),
            sentinels: tokenizer.sentinels(),
        })
    }

    /// What must hold of one that was read from a file.
    pub(crate) fn check(&self) -> Result<(), String> {
        let (WordMarks::Begin(marks) | WordMarks::End(marks)) = &self.words;
        let ids = [self.cls, self.sep].into_iter().chain(self.mask).chain(self.special.iter().copied());
        let ids = ids.chain(self.sentinels.iter().copied());
        match self.size as usize == marks.len() && self.special.is_sorted() && ids.into_iter().all(|id| id < self.size)
        {
            true => Ok(()),
            false => Err("its special ids or word marks do not fit its size".to_owned()),
        }
    }
}

/// How a kind of tokenizer marks words in its pieces.
enum Convention {
    /// Pieces inside a word begin with this (`##`).
    Inside(String),
    /// Pieces that end a word end with this (`</w>`).
    Ending(String),
    /// Pieces that begin a word begin with one of these.
    Beginning(Vec<char>),
    /// Pieces do not say: each counts as a word.
    Silent,
}

impl Convention {
    /// Read off the tokenizer's own description: guessing from the pieces fails on small vocabularies.
    fn of(tokenizer: &Tokenizer) -> Result<Self, DataError> {
        let files = tokenizer.files(None)?;
        let json = files.iter().find(|(name, _)| name == "tokenizer.json").map_or(&[][..], |(_, bytes)| bytes);
        let json: Value = serde_json::from_slice(json).unwrap_or_default();
        let (model, normalizer, splitter) = (&json["model"], &json["normalizer"], &json["pre_tokenizer"]);
        let affix = |key: &str| model[key].as_str().filter(|affix| !affix.is_empty()).map(str::to_owned);
        if let Some(suffix) = affix("end_of_word_suffix") {
            return Ok(Self::Ending(suffix));
        }
        if let Some(prefix) = affix("continuing_subword_prefix") {
            return Ok(Self::Inside(prefix));
        }
        if has(splitter, &|part| part["type"] == "ByteLevel") || has(normalizer, &|part| part["type"] == "ByteLevel") {
            // GPT-2's letters for the bytes of white space: tab, line feed, vertical tab, form feed, return, space.
            return Ok(Self::Beginning(vec!['ĉ', 'Ċ', 'ċ', 'Č', 'č', 'Ġ']));
        }
        // Metaspace is a pre-tokenizer in most files and a pair of normalizers in Llama's kind.
        let spaced = |part: &Value| {
            part["type"] == "Metaspace" || [&part["prepend"], &part["content"]].into_iter().any(|text| text == "▁")
        };
        if has(splitter, &spaced) || has(normalizer, &spaced) {
            return Ok(Self::Beginning(vec!['▁']));
        }
        Ok(Self::Silent)
    }

    fn marks(&self, tokenizer: &Tokenizer) -> WordMarks {
        let of_each = |marked: &dyn Fn(&str) -> bool| {
            let mark = |id| tokenizer.is_special(id) || tokenizer.token(id).is_none_or(|piece| marked(&piece));
            (0..tokenizer.vocabulary_size() as u32).map(mark).collect()
        };
        match self {
            Self::Inside(prefix) => WordMarks::Begin(of_each(&|piece| !piece.starts_with(prefix.as_str()))),
            Self::Ending(suffix) => WordMarks::End(of_each(&|piece| piece.ends_with(suffix.as_str()))),
            Self::Beginning(letters) => {
                let begins = |piece: &str| piece.starts_with(|c: char| letters.contains(&c) || c.is_whitespace());
                WordMarks::Begin(of_each(&begins))
            }
            Self::Silent => WordMarks::Begin(of_each(&|_| true)),
        }
    }
}

/// Whether a part of a tokenizer.json, or one in its sequence, is of a kind.
fn has(part: &Value, is: &dyn Fn(&Value) -> bool) -> bool {
    let inner = ["pretokenizers", "normalizers"].into_iter().filter_map(|key| part[key].as_array()).flatten();
    is(part) || inner.into_iter().any(|part| has(part, is))
}

/// Marks in files as one digit an id: a list of words would be five times as long.
mod digits {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(marks: &[bool], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&marks.iter().map(|&mark| if mark { '1' } else { '0' }).collect::<String>())
    }

    pub(super) fn deserialize<'a, D: Deserializer<'a>>(deserializer: D) -> Result<Vec<bool>, D::Error> {
        let text = String::deserialize(deserializer)?;
        let mark = |digit| match digit {
            b'0' => Ok(false),
            b'1' => Ok(true),
            _ => Err(D::Error::custom("word marks must be 0 and 1")),
        };
        text.bytes().map(mark).collect()
    }
}

#[cfg(test)]
mod tests {
    use henson_text::WordPieceOptions;

    use super::*;

    fn open(json: &str) -> Tokenizer {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("tokenizer.json"), json).unwrap();
        Tokenizer::open(directory.path()).unwrap()
    }

    /// A tokenizer.json around a model and its neighbours; the special pieces come first.
    fn json(model: &str, pre_tokenizer: &str, normalizer: &str) -> Tokenizer {
        let added = ["<s>", "</s>", "<mask>"].iter().enumerate().map(|(id, text)| {
            format!(
                r#"{{"id":{id},"content":"{text}","special":true,"single_word":false,"lstrip":false,"rstrip":false,"normalized":false}}"#
            )
        });
        let added: Vec<String> = added.collect();
        open(&format!(
            r#"{{"version":"1.0","added_tokens":[{}],"normalizer":{normalizer},"pre_tokenizer":{pre_tokenizer},
            "post_processor":null,"decoder":null,"model":{model}}}"#,
            added.join(",")
        ))
    }

    #[test]
    fn word_piece() {
        let pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hen", "##son", "#", "##"];
        let tokenizer = Tokenizer::from_vocabulary(&pieces, &WordPieceOptions::default()).unwrap();
        let vocabulary = Vocabulary::of(&tokenizer).unwrap();
        let Vocabulary { size, cls, sep, mask, special, words, sentinels } = &vocabulary;
        assert_eq!(sentinels.len(), 0);
        assert_eq!((*size, *cls, *sep, *mask), (9, 2, 3, Some(4)));
        assert_eq!(special, &[0, 1, 2, 3, 4]);
        let WordMarks::Begin(marks) = words else { panic!("{words:?}") };
        assert_eq!(marks, &[true, true, true, true, true, true, false, true, false]);
        assert!(words.begins(Some(5), 7) && !words.begins(Some(5), 6) && words.begins(None, 6));
        // In files, and back.
        let json = serde_json::to_string(&vocabulary).unwrap();
        assert!(json.contains(r#""words":{"Begin":"111111010"}"#), "{json}");
        assert_eq!(serde_json::from_str::<Vocabulary>(&json).unwrap(), vocabulary);
        assert!(serde_json::from_str::<Vocabulary>(&json.replace("010\"", "012\"")).is_err());
    }

    #[test]
    fn other_conventions() {
        const NONE: &str = "null";
        const BYTES: &str = r#"{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true}"#;
        const SPACE: &str = r#"{"type":"Metaspace","replacement":"▁","prepend_scheme":"always","split":true}"#;
        const LLAMA: &str = r#"{"type":"Sequence","normalizers":[{"type":"Prepend","prepend":"▁"},
            {"type":"Replace","pattern":{"String":" "},"content":"▁"}]}"#;
        let bpe = |suffix: &str, pieces: [&str; 3]| {
            let [a, b, c] = pieces;
            format!(
                r#"{{"type":"BPE","dropout":null,"unk_token":null,"continuing_subword_prefix":null,
                "end_of_word_suffix":{suffix},"fuse_unk":false,"byte_fallback":false,
                "vocab":{{"<s>":0,"</s>":1,"<mask>":2,"{a}":3,"{b}":4,"{c}":5}},"merges":[]}}"#
            )
        };
        let unigram = r#"{"type":"Unigram","unk_id":3,"byte_fallback":false,"vocab":[["<s>",0.0],["</s>",0.0],
            ["<mask>",0.0],["▁a",-1.0],["a",-1.0],["▁",-1.0]]}"#;
        let sequence = format!(r#"{{"type":"Sequence","pretokenizers":[{BYTES}]}}"#);
        for (tokenizer, expected) in [
            (json(&bpe(NONE, ["Ġa", "a", "Ċ"]), BYTES, NONE), "101"),
            (json(&bpe(NONE, ["Ġa", "a", "Ċ"]), &sequence, NONE), "101"),
            (json(&bpe(NONE, ["▁a", "a", "▁"]), NONE, LLAMA), "101"),
            (json(unigram, SPACE, NONE), "101"),
            (json(&bpe(NONE, ["x", "a", "b"]), r#"{"type":"Whitespace"}"#, NONE), "111"),
        ] {
            let WordMarks::Begin(marks) = Vocabulary::of(&tokenizer).unwrap().words else { panic!() };
            let found: String = marks[3..].iter().map(|&mark| if mark { '1' } else { '0' }).collect();
            assert_eq!(found, expected, "{:?}", tokenizer.token(3));
            assert_eq!(marks[..3], [true; 3]);
        }
        let ending = json(&bpe(r#""</w>""#, ["a</w>", "a", "b</w>"]), r#"{"type":"Whitespace"}"#, NONE);
        let words = Vocabulary::of(&ending).unwrap().words;
        assert_eq!(words, WordMarks::End(vec![true, true, true, true, false, true]));
        assert!(words.begins(Some(3), 4) && !words.begins(Some(4), 5));
    }

    #[test]
    fn a_vocabulary_without_ends_is_refused() {
        for (pieces, role) in [(["[UNK]", "[SEP]", "a"], "cls_token"), (["[UNK]", "[CLS]", "a"], "sep_token")] {
            let tokenizer = Tokenizer::from_vocabulary(&pieces, &WordPieceOptions::default()).unwrap();
            let error = Vocabulary::of(&tokenizer).unwrap_err();
            assert!(error.to_string().contains(role), "{error}");
        }
    }
}
