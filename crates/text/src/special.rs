//! Which tokens play the special parts, and where a directory says so. Four places may: `tokenizer_config.json`,
//! `special_tokens_map.json`, `tokenizer.json` itself, and the names that everybody uses. The first that speaks wins.

use std::path::Path;

use serde_json::{Map, Value};

use crate::error::TextError;
use crate::template::shortened;

/// A special token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Special {
    /// Its id.
    pub id: u32,
    /// Its text.
    pub text: String,
}

/// The special tokens that a BERT-like model needs. A tokenizer that has none for a part has `None` there.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// The first token of a sequence, whose vector stands for all of it.
    pub cls: Option<Special>,
    /// The token that ends a text.
    pub sep: Option<Special>,
    /// The token that hides another.
    pub mask: Option<Special>,
    /// The token that fills up a batch, in formats that need it.
    pub pad: Option<Special>,
    /// The token that stands for words which cannot be written in pieces.
    pub unk: Option<Special>,
}

impl SpecialTokens {
    /// The tokens that are there, with the key under which Hugging Face's files name each.
    pub fn by_role(&self) -> impl Iterator<Item = (&'static str, &Special)> {
        let all = [&self.cls, &self.sep, &self.mask, &self.pad, &self.unk];
        ROLES.into_iter().zip(all).filter_map(|(role, special)| Some((role, special.as_ref()?)))
    }

    /// Whether `id` plays one of the five parts.
    pub fn contains(&self, id: u32) -> bool {
        self.by_role().any(|(_, special)| special.id == id)
    }
}

/// The texts of the special tokens of a vocabulary that comes without a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpecialNames {
    /// BERT's `[CLS]`.
    pub cls: String,
    /// BERT's `[SEP]`.
    pub sep: String,
    /// BERT's `[MASK]`.
    pub mask: String,
    /// BERT's `[PAD]`.
    pub pad: String,
    /// BERT's `[UNK]`.
    pub unk: String,
}

impl Default for SpecialNames {
    fn default() -> Self {
        let [cls, sep, mask, pad, unk] = ["[CLS]", "[SEP]", "[MASK]", "[PAD]", "[UNK]"].map(str::to_owned);
        Self { cls, sep, mask, pad, unk }
    }
}

pub(crate) const ROLES: [&str; 5] = ["cls_token", "sep_token", "mask_token", "pad_token", "unk_token"];

/// What other libraries' models call them: BERT's names, RoBERTa's, XLNet's.
const CONVENTIONAL: [&[&str]; 5] = [
    &["[CLS]", "<s>", "<cls>"],
    &["[SEP]", "</s>", "<sep>"],
    &["[MASK]", "<mask>"],
    &["[PAD]", "<pad>"],
    &["[UNK]", "<unk>"],
];

/// Finds the five tokens. `stated` are files that name tokens by role, the most important first; what they name must
/// exist. `implied` are names that `tokenizer.json`'s parts use, taken where they exist, and then the conventional ones.
pub(crate) fn find(
    stated: &[(&Path, &Map<String, Value>)],
    implied: &[(&str, String)],
    id_of: impl Fn(&str) -> Option<u32>,
) -> Result<SpecialTokens, TextError> {
    let known = |text: &str| id_of(text).map(|id| Special { id, text: text.to_owned() });
    let find_role = |role: &'static str, conventional: &[&str]| -> Result<Option<Special>, TextError> {
        for (path, map) in stated {
            match map.get(role) {
                None => {}
                // Said to have none, so nothing is guessed.
                Some(Value::Null) => return Ok(None),
                Some(value) => {
                    let text = content(path, role, value)?;
                    let unknown = || TextError::UnknownSpecialToken {
                        path: path.to_path_buf(),
                        role: role.to_owned(),
                        token: text.clone(),
                    };
                    return known(&text).ok_or_else(unknown).map(Some);
                }
            }
        }
        let implied = implied.iter().filter(|(name, _)| *name == role).map(|(_, text)| text.as_str());
        Ok(implied.chain(conventional.iter().copied()).find_map(known))
    };
    let mut found = ROLES.into_iter().zip(CONVENTIONAL).map(|(role, names)| find_role(role, names));
    let mut next = || found.next().unwrap_or(Ok(None));
    Ok(SpecialTokens { cls: next()?, sep: next()?, mask: next()?, pad: next()?, unk: next()? })
}

/// A token in a Hugging Face file: its text, or an object with the text as `content`.
pub(crate) fn content(path: &Path, role: &str, value: &Value) -> Result<String, TextError> {
    let text = value.as_str().or_else(|| value.get("content")?.as_str());
    text.map(str::to_owned).ok_or_else(|| TextError::Malformed {
        path: path.to_owned(),
        place: role.to_owned(),
        expected: "a token: its text, or an object with the text as \"content\"".to_owned(),
        got: shortened(value),
    })
}
