//! What families of models make of a SentencePiece file: which ids its pieces get, which special tokens stand around a text,
//! and what is done to a text before. The file says none of that; `transformers` has a class for each family, and so the
//! class that `tokenizer_config.json` names decides, or else `model_type` of `config.json`.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

use serde_json::{Map, Value, json};

use super::proto::{Algorithm, ModelProto, PieceKind};
use super::{FILE_LIMIT, ModelFile, SPACE, SentencePiece, check_pieces};
use crate::error::TextError;
use crate::files::{ListedToken, Settings, add_listed_tokens, listed_tokens};
use crate::guard::{CONFIG_LIMIT, base64_text, check_tokenizer_json, read_bytes, read_object, shielded};
use crate::tokenizer::Tokenizer;

/// The names that a model file has in a directory, the most important first.
pub(crate) const MODEL_FILES: [&str; 4] = ["spm.model", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model"];

/// Where tokenizer_config.json says which model file encodes, and by whose convention. Without it, a directory that we saved
/// would be opened by its tokenizer.json, and rare texts would get other ids than before.
const SAVED: &str = "henson_sentencepiece";

/// Work that is spent on finding BPE's merges for a tokenizer.json: characters times bytes of the pieces.
const MOST_WORK: usize = 1 << 30;

/// What Python's `str.split()` takes for white space: Unicode's, and four separators.
const PYTHON_SPACES: &str = r"[\s\x1c-\x1f]+";

/// Which ids the pieces of the file get.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Layout {
    /// Their places.
    AsInFile,
    /// fairseq's: four special tokens, the pieces after the file's first three, and the mask.
    Fairseq,
    /// CamemBERT's: fairseq's own four, a spare one, the pieces after the file's first, and the mask.
    Camembert,
}

/// What surrounds texts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Surround {
    Nothing,
    Bert,
    Roberta,
    /// T5's: `a </s>`, `a </s> b </s>`.
    End,
    /// XLNet's: `a <sep> <cls>`, with a segment of its own for the last.
    XlNet,
}

/// What is done to a text before SentencePiece sees it, by keys of tokenizer_config.json.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Preparation {
    Nothing,
    /// `do_lower_case`, no unless stated.
    LowerCase,
    /// `remove_space`, quotes, `keep_accents`, `do_lower_case`: yes unless stated where `lower_case` is.
    Quotes {
        lower_case: bool,
    },
}

struct Convention {
    name: &'static str,
    /// Of tokenizer classes, what stands before `Tokenizer`; the first is written down.
    classes: &'static [&'static str],
    model_types: &'static [&'static str],
    /// Special tokens by role, in the order in which those that the file lacks are added.
    roles: &'static [(&'static str, &'static str)],
    additional: &'static [&'static str],
    layout: Layout,
    surround: Surround,
    preparation: Preparation,
    /// Whether the mask takes the space before it along.
    mask_takes_space: bool,
    /// T5's `<extra_id_99>` to `<extra_id_0>`, as many as `extra_ids` says.
    extra_ids: bool,
}

const BERT_ROLES: [(&str, &str); 7] = [
    ("bos_token", "[CLS]"),
    ("eos_token", "[SEP]"),
    ("unk_token", "<unk>"),
    ("sep_token", "[SEP]"),
    ("pad_token", "<pad>"),
    ("cls_token", "[CLS]"),
    ("mask_token", "[MASK]"),
];
const ROBERTA_ROLES: [(&str, &str); 7] = [
    ("bos_token", "<s>"),
    ("eos_token", "</s>"),
    ("unk_token", "<unk>"),
    ("sep_token", "</s>"),
    ("pad_token", "<pad>"),
    ("cls_token", "<s>"),
    ("mask_token", "<mask>"),
];

const CONVENTIONS: [Convention; 6] = [
    Convention {
        name: "ALBERT",
        classes: &["Albert"],
        model_types: &["albert"],
        roles: &BERT_ROLES,
        additional: &[],
        layout: Layout::AsInFile,
        surround: Surround::Bert,
        preparation: Preparation::Quotes { lower_case: true },
        mask_takes_space: true,
        extra_ids: false,
    },
    Convention {
        name: "XLM-R",
        classes: &["XLMRoberta"],
        model_types: &["xlm-roberta", "xlm-roberta-xl", "xmod"],
        roles: &ROBERTA_ROLES,
        additional: &[],
        layout: Layout::Fairseq,
        surround: Surround::Roberta,
        preparation: Preparation::Nothing,
        mask_takes_space: true,
        extra_ids: false,
    },
    Convention {
        name: "CamemBERT",
        classes: &["Camembert"],
        model_types: &["camembert"],
        roles: &ROBERTA_ROLES,
        additional: &["<s>NOTUSED", "</s>NOTUSED", "<unk>NOTUSED"],
        layout: Layout::Camembert,
        surround: Surround::Roberta,
        preparation: Preparation::Nothing,
        mask_takes_space: true,
        extra_ids: false,
    },
    Convention {
        name: "DeBERTa-v2/v3",
        classes: &["DebertaV2"],
        model_types: &["deberta-v2"],
        roles: &[
            ("bos_token", "[CLS]"),
            ("eos_token", "[SEP]"),
            ("unk_token", "[UNK]"),
            ("sep_token", "[SEP]"),
            ("pad_token", "[PAD]"),
            ("cls_token", "[CLS]"),
            ("mask_token", "[MASK]"),
        ],
        additional: &[],
        layout: Layout::AsInFile,
        surround: Surround::Bert,
        preparation: Preparation::LowerCase,
        mask_takes_space: false,
        extra_ids: false,
    },
    Convention {
        name: "T5",
        classes: &["T5"],
        model_types: &["t5", "mt5", "umt5"],
        roles: &[("eos_token", "</s>"), ("unk_token", "<unk>"), ("pad_token", "<pad>")],
        additional: &[],
        layout: Layout::AsInFile,
        surround: Surround::End,
        preparation: Preparation::Nothing,
        mask_takes_space: false,
        extra_ids: true,
    },
    Convention {
        name: "XLNet",
        classes: &["XLNet"],
        model_types: &["xlnet"],
        roles: &[
            ("bos_token", "<s>"),
            ("eos_token", "</s>"),
            ("unk_token", "<unk>"),
            ("sep_token", "<sep>"),
            ("pad_token", "<pad>"),
            ("cls_token", "<cls>"),
            ("mask_token", "<mask>"),
        ],
        additional: &["<eop>", "<eod>"],
        layout: Layout::AsInFile,
        surround: Surround::XlNet,
        preparation: Preparation::Quotes { lower_case: false },
        mask_takes_space: true,
        extra_ids: false,
    },
];

/// The file alone: its ids, and no special tokens.
const BARE: Convention = Convention {
    name: "none",
    classes: &[],
    model_types: &[],
    roles: &[],
    additional: &[],
    layout: Layout::AsInFile,
    surround: Surround::Nothing,
    preparation: Preparation::Nothing,
    mask_takes_space: false,
    extra_ids: false,
};

/// Opens a directory whose only tokenizer is the model file `name`.
pub(crate) fn open_directory(directory: &Path, name: &str) -> Result<Tokenizer, TextError> {
    let settings = Settings::read(directory)?;
    let convention = find_convention(directory, name, &settings)?;
    let listed = listed_tokens(directory, &settings)?;
    open(&directory.join(name), convention, settings, &listed)
}

/// Opens a model file without anything around it.
pub(crate) fn open_bare(path: &Path) -> Result<Tokenizer, TextError> {
    open(path, &BARE, Settings::default(), &[])
}

/// Opens a directory that we saved, by the model file that its configuration names; `None` for any other directory.
pub(crate) fn open_saved(directory: &Path, settings: &Settings) -> Result<Option<Tokenizer>, TextError> {
    let Some(saved) = settings.config.get(SAVED) else { return Ok(None) };
    let known = CONVENTIONS.iter().chain([&BARE]).find(|convention| saved["convention"] == convention.name);
    let name = saved["file"].as_str().filter(|name| !name.contains(['/', '\\']) && name.ends_with(".model"));
    let (Some(convention), Some(name)) = (known, name) else {
        return Err(settings.malformed(SAVED, "a convention and the name of a .model file", saved));
    };
    let path = directory.join(name);
    // Whoever took the file away left tokenizer.json, which gives nearly the same.
    if !path.exists() {
        return Ok(None);
    }
    let listed = listed_tokens(directory, settings)?;
    open(&path, convention, settings.clone(), &listed).map(Some)
}

fn find_convention(directory: &Path, file: &str, settings: &Settings) -> Result<&'static Convention, TextError> {
    let unknown = |stated: String| {
        let known =
            CONVENTIONS.iter().map(|convention| format!("{}Tokenizer ({})", convention.classes[0], convention.name));
        TextError::UnknownConvention { path: directory.join(file), stated, known: known.collect::<Vec<_>>().join(", ") }
    };
    if let Some(family) = settings.class_family() {
        let found = CONVENTIONS.iter().find(|convention| convention.classes.contains(&family));
        // These name no family, so that the model's type has its say.
        if found.is_some() || !matches!(family, "PreTrained" | "TokenizersBackend" | "SentencePieceBackend") {
            return found.ok_or_else(|| unknown(format!("tokenizer_config.json names {family}Tokenizer")));
        }
    }
    let config = read_object(&directory.join("config.json"), CONFIG_LIMIT)?.unwrap_or_default();
    let Some(model_type) = config.get("model_type").and_then(Value::as_str) else {
        return Err(unknown("neither tokenizer_config.json nor config.json names a family".to_owned()));
    };
    let found = CONVENTIONS.iter().find(|convention| convention.model_types.contains(&model_type));
    found.ok_or_else(|| unknown(format!("config.json has the model_type {model_type:?}")))
}

fn open(
    path: &Path,
    convention: &'static Convention,
    settings: Settings,
    listed: &[ListedToken],
) -> Result<Tokenizer, TextError> {
    let bytes = read_bytes(path, FILE_LIMIT)?;
    let model = ModelProto::parse(path, &bytes)?;
    let unknown = check_pieces(path, &model)?;
    let mut builder = Builder { path, convention, settings, model, unknown, names: HashMap::new() };
    builder.settle_names()?;
    let vocabulary = builder.vocabulary()?;
    let ids: Vec<u32> = builder.ids();
    let front = builder.front()?;
    let mut model = builder.model.clone();
    if matches!(convention.preparation, Preparation::Quotes { .. }) {
        model
            .pieces
            .iter_mut()
            .filter(|piece| ends_in_number_and_comma(&piece.text))
            .for_each(|piece| piece.score -= 100.0);
    }
    let front_wrapper = match front.is_empty() {
        true => None,
        false => {
            let value = json!({"type": "Sequence", "normalizers": front});
            let refused =
                |error: serde_json::Error| TextError::Refused { path: path.to_owned(), reason: error.to_string() };
            Some(serde_json::from_value(value).map_err(refused)?)
        }
    };
    let mut sentence_piece = SentencePiece::of(path, &model, ids, front_wrapper)?;
    let name = path.file_name().map_or_else(|| MODEL_FILES[0].to_owned(), |name| name.to_string_lossy().into_owned());
    sentence_piece.file = ModelFile { name: name.clone(), bytes };

    let json = builder.tokenizer_json(&model, &vocabulary, front)?;
    check_tokenizer_json(path, &json)?;
    let refused = |reason| TextError::Refused { path: path.to_owned(), reason };
    let mut inner: tokenizers::Tokenizer =
        shielded(|| serde_json::from_value(json).map_err(Into::into)).map_err(refused)?;
    let mut settings = builder.settings;
    settings.config.insert(SAVED.to_owned(), json!({"file": name, "convention": convention.name}));
    add_listed_tokens(&mut inner, &settings, listed)?;
    // The file itself never finds its special pieces in a text.
    inner.set_encode_special_tokens(convention.surround == Surround::Nothing);
    let tokenizer = Tokenizer::assemble_with(inner, settings, &[], path, Some(sentence_piece))?;
    Ok(tokenizer)
}

/// ALBERT's and XLNet's code cuts such pieces again, without the comma: a lower score has the same effect.
fn ends_in_number_and_comma(piece: &str) -> bool {
    let mut ends = piece.chars().rev();
    ends.next() == Some(',') && ends.next().is_some_and(char::is_numeric)
}

/// What is known while a tokenizer is put together.
struct Builder<'a> {
    path: &'a Path,
    convention: &'static Convention,
    settings: Settings,
    model: ModelProto,
    unknown: usize,
    /// Special tokens by role.
    names: HashMap<&'static str, String>,
}

impl Builder<'_> {
    /// The special tokens' names, as stated or as the family has them. They are written down, so that they are saved.
    fn settle_names(&mut self) -> Result<(), TextError> {
        let unknown = &self.model.pieces[self.unknown].text;
        if self.convention.surround == Surround::Nothing {
            let roles =
                ["cls_token", "sep_token", "mask_token", "pad_token"].map(|role| (role.to_owned(), Value::Null));
            self.settings.config.extend(roles);
            self.settings.config.insert("unk_token".to_owned(), json!(unknown));
            return Ok(());
        }
        for &(role, default) in self.convention.roles {
            let stated = self.settings.name(role)?;
            if stated.is_none() {
                self.settings.config.insert(role.to_owned(), json!(default));
            }
            self.names.insert(role, stated.unwrap_or_else(|| default.to_owned()));
        }
        if self.convention.layout == Layout::AsInFile && self.names.get("unk_token") != Some(unknown) {
            let token = self.names.get("unk_token").cloned().unwrap_or_default();
            return Err(self.malformed(
                "the unknown piece",
                &format!("{token:?}, the unk_token"),
                format!("{unknown:?}"),
            ));
        }
        let class = format!("{}Tokenizer", self.convention.classes[0]);
        self.settings.config.entry("tokenizer_class").or_insert(json!(class));
        Ok(())
    }

    fn malformed(&self, place: &str, expected: &str, got: String) -> TextError {
        let (path, place, expected) = (self.path.to_owned(), place.to_owned(), expected.to_owned());
        TextError::Malformed { path, place, expected, got }
    }

    fn name(&self, role: &str) -> String {
        self.names.get(role).cloned().unwrap_or_default()
    }

    /// The model's vocabulary in the order of ids. Special tokens that it lacks are added after it.
    fn vocabulary(&self) -> Result<Vec<(String, f32)>, TextError> {
        let pieces = |from: usize| self.model.pieces.iter().skip(from).map(|piece| (piece.text.clone(), piece.score));
        let special = |role: &str| (self.name(role), 0.0);
        let fixed = |text: &str, score: f32| (text.to_owned(), score);
        let mut vocabulary: Vec<(String, f32)> = match self.convention.layout {
            Layout::AsInFile => pieces(0).collect(),
            Layout::Fairseq => {
                self.check_first(3)?;
                ["bos_token", "pad_token", "eos_token", "unk_token"].into_iter().map(special).chain(pieces(3)).collect()
            }
            Layout::Camembert => {
                self.check_first(1)?;
                let first = [fixed("<s>NOTUSED", 0.0), special("pad_token"), fixed("</s>NOTUSED", 0.0)];
                let spare = [special("unk_token"), fixed("<unk>NOTUSED", -100.0)];
                first.into_iter().chain(spare).chain(pieces(1)).collect()
            }
        };
        if self.convention.layout != Layout::AsInFile {
            vocabulary.push(special("mask_token"));
        }
        vocabulary.extend(self.extra_ids()?.into_iter().map(|token| (token, 0.0)));
        let mut ids = HashMap::with_capacity(vocabulary.len());
        for (id, (token, _)) in (0_u32..).zip(&vocabulary) {
            if let Some(first) = ids.insert(token, id) {
                let (path, token) = (self.path.to_owned(), token.clone());
                return Err(TextError::DuplicateToken { path, token, first, second: id });
            }
        }
        Ok(vocabulary)
    }

    /// fairseq's ids replace the first pieces of the file, which must be the special ones that they are in such files.
    fn check_first(&self, count: usize) -> Result<(), TextError> {
        let expected = ["unk_token", "bos_token", "eos_token"].map(|role| self.name(role));
        for (place, expected) in expected.iter().take(count).enumerate() {
            let got = self.model.pieces.get(place).map(|piece| piece.text.as_str());
            if got != Some(expected) {
                let expected = format!("{expected:?}, as {} has it", self.convention.name);
                return Err(self.malformed(&format!("piece {place}"), &expected, format!("{got:?}")));
            }
        }
        Ok(())
    }

    /// The vocabulary's id of each piece of the file.
    fn ids(&self) -> Vec<u32> {
        let pieces = 0..self.model.pieces.len() as u32;
        match self.convention.layout {
            Layout::AsInFile => pieces.collect(),
            Layout::Fairseq => [3, 0, 2].into_iter().chain(4..).take(pieces.len()).collect(),
            Layout::Camembert => [3].into_iter().chain(5..).take(pieces.len()).collect(),
        }
    }

    fn extra_ids(&self) -> Result<Vec<String>, TextError> {
        if !self.convention.extra_ids {
            return Ok(Vec::new());
        }
        let count = match self.settings.config.get("extra_ids") {
            None | Some(Value::Null) => 100,
            Some(value) => {
                let count = value.as_u64().filter(|count| *count <= 1 << 16);
                count.ok_or_else(|| self.settings.malformed("extra_ids", "a number of at most 65536", value))?
            }
        };
        let names = (0..count).rev().map(|number| format!("<extra_id_{number}>"));
        // A file may hold them already.
        let texts = self.model.pieces.iter().map(|piece| piece.text.as_str());
        let there: HashSet<&str> = texts.filter(|text| text.starts_with("<extra_id_")).collect();
        Ok(names.filter(|name| !there.contains(&**name)).collect())
    }

    /// The normalizers before SentencePiece's, as a tokenizer.json has them.
    fn front(&self) -> Result<Vec<Value>, TextError> {
        let flag = |key: &str, default: bool| self.settings.flag(key).map(|flag| flag.unwrap_or(default));
        for (key, only) in [("split_by_punct", false), ("add_prefix_space", true)] {
            if flag(key, only)? != only {
                let expected = format!("{only} (anything else is not supported with a SentencePiece file)");
                return Err(self.settings.malformed(key, &expected, &json!(!only)));
            }
        }
        let mut front = Vec::new();
        let replace =
            |pattern: Value, content: &str| json!({"type": "Replace", "pattern": pattern, "content": content});
        let lower_case = match self.convention.preparation {
            Preparation::Nothing => return Ok(front),
            Preparation::LowerCase => flag("do_lower_case", false)?,
            Preparation::Quotes { lower_case } => {
                if flag("remove_space", true)? {
                    front.push(replace(json!({"Regex": PYTHON_SPACES}), " "));
                    front.push(json!({"type": "Strip", "strip_left": true, "strip_right": true}));
                }
                front.push(replace(json!({"String": "``"}), "\""));
                front.push(replace(json!({"String": "''"}), "\""));
                if !flag("keep_accents", false)? {
                    front.extend([json!({"type": "NFKD"}), json!({"type": "StripAccents"})]);
                }
                flag("do_lower_case", lower_case)?
            }
        };
        front.extend(lower_case.then(|| json!({"type": "Lowercase"})));
        Ok(front)
    }

    /// The same as nearly as a tokenizer.json can say it.
    fn tokenizer_json(
        &self,
        model: &ModelProto,
        vocabulary: &[(String, f32)],
        front: Vec<Value>,
    ) -> Result<Value, TextError> {
        let ids: HashMap<&str, usize> = vocabulary.iter().enumerate().map(|(id, (token, _))| (&**token, id)).collect();
        let mut normalizers = front;
        if !model.characters.is_empty() {
            normalizers.push(json!({"type": "Precompiled", "precompiled_charsmap": base64_text(&model.characters)}));
        }
        if model.remove_extra_whitespaces {
            normalizers.push(json!({"type": "Strip", "strip_left": true, "strip_right": true}));
            normalizers.push(json!({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}));
        }
        if model.add_dummy_prefix && !model.escape_whitespaces {
            normalizers.push(json!({"type": "Prepend", "prepend": " "}));
        }
        // Where pieces hold a space within, texts must not be split at spaces.
        let inside =
            |piece: &super::proto::Piece| piece.text.char_indices().any(|(at, letter)| at > 0 && letter == SPACE);
        let scheme = if model.add_dummy_prefix { "always" } else { "never" };
        let metaspace = json!({"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme,
            "split": !model.pieces.iter().any(inside)});
        let decoder = match model.byte_fallback {
            false => metaspace.clone(),
            true => {
                let mut steps = vec![
                    json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
                    json!({"type": "ByteFallback"}),
                    json!({"type": "Fuse"}),
                ];
                steps.extend(
                    model.add_dummy_prefix.then(|| json!({"type": "Strip", "content": " ", "start": 1, "stop": 0})),
                );
                json!({"type": "Sequence", "decoders": steps})
            }
        };
        let (added, all_ids) = self.added_tokens(&ids)?;
        Ok(json!({
            "version": "1.0", "truncation": null, "padding": null,
            "added_tokens": added,
            "normalizer": {"type": "Sequence", "normalizers": normalizers},
            "pre_tokenizer": if model.escape_whitespaces { metaspace } else { Value::Null },
            "post_processor": self.post_processor(&all_ids),
            "decoder": decoder,
            "model": self.model_json(model, vocabulary, &ids)?,
        }))
    }

    /// Special tokens, with those that the vocabulary lacks at its end; and all ids by token.
    fn added_tokens(&self, ids: &HashMap<&str, usize>) -> Result<(Vec<Value>, HashMap<String, usize>), TextError> {
        let mut all: HashMap<String, usize> = ids.iter().map(|(token, id)| ((*token).to_owned(), *id)).collect();
        let control = |piece: &&super::proto::Piece| matches!(piece.kind, PieceKind::Control | PieceKind::Unknown);
        let control = self.model.pieces.iter().filter(control).map(|piece| piece.text.clone());
        let extra = self.extra_ids()?;
        let roles = self.convention.roles.iter().map(|(role, _)| self.name(role));
        let additional = self.convention.additional.iter().map(|token| (*token).to_owned());
        let mask = self.name("mask_token");
        let mut added = BTreeMap::new();
        for token in roles.chain(additional).chain(extra).chain(control.filter(|text| ids.contains_key(&**text))) {
            let next = all.len();
            let id = *all.entry(token.clone()).or_insert(next);
            let lstrip = self.convention.mask_takes_space && token == mask;
            added.insert(
                id,
                json!({"id": id, "content": token, "single_word": false, "lstrip": lstrip, "rstrip": false,
                "normalized": false, "special": true}),
            );
        }
        Ok((added.into_values().collect(), all))
    }

    fn post_processor(&self, ids: &HashMap<String, usize>) -> Value {
        let special = |role: &str, segment: u32| json!({"SpecialToken": {"id": self.name(role), "type_id": segment}});
        let text = |name: &str, segment: u32| json!({"Sequence": {"id": name, "type_id": segment}});
        let (cls, sep) = ("cls_token", "sep_token");
        let (single, pair) = match self.convention.surround {
            Surround::Nothing => return Value::Null,
            Surround::Bert => (
                vec![special(cls, 0), text("A", 0), special(sep, 0)],
                vec![special(cls, 0), text("A", 0), special(sep, 0), text("B", 1), special(sep, 1)],
            ),
            Surround::Roberta => (
                vec![special(cls, 0), text("A", 0), special(sep, 0)],
                vec![special(cls, 0), text("A", 0), special(sep, 0), special(sep, 0), text("B", 0), special(sep, 0)],
            ),
            Surround::End => (
                vec![text("A", 0), special("eos_token", 0)],
                vec![text("A", 0), special("eos_token", 0), text("B", 0), special("eos_token", 0)],
            ),
            Surround::XlNet => (
                vec![text("A", 0), special(sep, 0), special(cls, 2)],
                vec![text("A", 0), special(sep, 0), text("B", 1), special(sep, 1), special(cls, 2)],
            ),
        };
        let mut named = Map::new();
        for role in [cls, sep, "eos_token"] {
            let name = self.name(role);
            if let Some(id) = ids.get(&name) {
                named.insert(name.clone(), json!({"id": name, "ids": [id], "tokens": [name]}));
            }
        }
        json!({"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": named})
    }

    fn model_json(
        &self,
        model: &ModelProto,
        vocabulary: &[(String, f32)],
        ids: &HashMap<&str, usize>,
    ) -> Result<Value, TextError> {
        let unknown = self.ids()[self.unknown];
        match model.algorithm {
            Algorithm::Unigram => {
                // The scores of `model` are those that are used; `vocabulary` has the special tokens, too.
                let scores: HashMap<&str, f32> = model.pieces.iter().map(|piece| (&*piece.text, piece.score)).collect();
                let entry = |(token, score): &(String, f32)| json!([token, scores.get(&**token).unwrap_or(score)]);
                Ok(json!({"type": "Unigram", "unk_id": unknown, "byte_fallback": model.byte_fallback,
                    "vocab": vocabulary.iter().map(entry).collect::<Vec<_>>()}))
            }
            Algorithm::BytePair => {
                let vocabulary_json: Map<String, Value> =
                    vocabulary.iter().enumerate().map(|(id, (token, _))| (token.clone(), json!(id))).collect();
                Ok(json!({"type": "BPE", "dropout": null, "unk_token": vocabulary[unknown as usize].0,
                    "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": true,
                    "byte_fallback": model.byte_fallback, "ignore_merges": false,
                    "vocab": vocabulary_json, "merges": self.merges(model, ids)?}))
            }
        }
    }

    /// Every two pieces that make a third, those with the best score first.
    fn merges(&self, model: &ModelProto, ids: &HashMap<&str, usize>) -> Result<Vec<[String; 2]>, TextError> {
        let normal = model.pieces.iter().filter(|piece| piece.kind == PieceKind::Normal);
        let work: usize = normal.clone().map(|piece| piece.text.len() * piece.text.len()).sum();
        if work > MOST_WORK {
            let expected = format!("pieces whose squared lengths add up to at most {MOST_WORK}");
            return Err(self.malformed("the pieces", &expected, work.to_string()));
        }
        let mut pieces: Vec<_> = normal.collect();
        pieces.sort_by(|a, b| b.score.total_cmp(&a.score));
        let mut merges = Vec::new();
        for piece in pieces {
            for (at, _) in piece.text.char_indices().skip(1) {
                let (left, right) = piece.text.split_at(at);
                if ids.contains_key(left) && ids.contains_key(right) {
                    merges.push([left.to_owned(), right.to_owned()]);
                }
            }
        }
        Ok(merges)
    }
}
