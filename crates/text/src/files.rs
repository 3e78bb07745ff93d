//! Tokenizers out of files: a Hugging Face directory in any of its four forms, a plain `vocab.txt`, byte-level BPE's two
//! files, or a SentencePiece model (whose reader is in `sentencepiece/`). Nothing is downloaded.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::{Map, Value, json};
use tokenizers::decoders::wordpiece::WordPiece as WordPieceDecoder;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::models::wordpiece::WordPiece;
use tokenizers::normalizers::BertNormalizer;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, NormalizerWrapper};

use crate::error::TextError;
use crate::guard::{
    self, CONFIG_LIMIT, JSON_LIMIT, TEXT_LIMIT, check_tokenizer_json, read_object, read_text, shielded,
};
use crate::sentencepiece;
use crate::special::{self, SpecialNames};
use crate::template::shortened;
use crate::tokenizer::{Tokenizer, added_token, flag};

/// How a `vocab.txt` is used. The defaults are BERT's in Hugging Face's form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WordPieceOptions {
    /// Whether texts are lower-cased. `None`: they are, unless some token of the vocabulary other than `[…]` and the
    /// special ones would change by it; such a token could never be reached.
    pub lowercase: Option<bool>,
    /// Whether accents are dropped. `None`: when texts are lower-cased.
    pub strip_accents: Option<bool>,
    /// Whether each Chinese character is a word of its own.
    pub split_chinese_characters: bool,
    /// Longer words become the unknown token (100 in Hugging Face; Google's last code has 200).
    pub max_characters_per_word: usize,
    /// The texts of the special tokens. Those that the vocabulary lacks are not used, but the unknown token must exist.
    pub names: SpecialNames,
}

impl Default for WordPieceOptions {
    fn default() -> Self {
        Self {
            lowercase: None,
            strip_accents: None,
            split_chinese_characters: true,
            max_characters_per_word: 100,
            names: SpecialNames::default(),
        }
    }
}

/// The two families of byte-level BPE. They cut texts alike and differ in what stands around them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BytePairStyle {
    /// `<s>`, `</s>`, `<mask>`, `<pad>`, `<unk>`, and offsets without the space before a word.
    Roberta,
    /// `<|endoftext|>` alone, and nothing around a text.
    Gpt2,
}

/// How byte-level BPE's files are used.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BytePairOptions {
    /// `None`: RoBERTa's when the vocabulary has `<s>` and `<mask>`, otherwise GPT-2's.
    pub style: Option<BytePairStyle>,
    /// Whether a space is put before the text, so that its first word is cut as in the middle of a sentence.
    pub add_prefix_space: bool,
}

/// What lies beside the vocabulary in a directory. The maps are kept whole, so that unknown keys survive a round trip.
#[derive(Debug, Clone, Default)]
pub(crate) struct Settings {
    pub(crate) config_path: PathBuf,
    pub(crate) config: Map<String, Value>,
    pub(crate) special_path: PathBuf,
    pub(crate) special: Map<String, Value>,
    pub(crate) truncation: Option<usize>,
    pub(crate) dropout: Option<f64>,
}

impl Settings {
    pub(crate) fn read(directory: &Path) -> Result<Self, TextError> {
        let config_path = directory.join("tokenizer_config.json");
        let special_path = directory.join("special_tokens_map.json");
        let config = read_object(&config_path, CONFIG_LIMIT)?.unwrap_or_default();
        let special = read_object(&special_path, CONFIG_LIMIT)?.unwrap_or_default();
        Ok(Self { config_path, config, special_path, special, truncation: None, dropout: None })
    }

    /// The files that name special tokens, the most important first.
    pub(crate) fn stated(&self) -> [(&Path, &Map<String, Value>); 2] {
        [(&self.config_path, &self.config), (&self.special_path, &self.special)]
    }

    /// `model_max_length`, when it is a length: Hugging Face writes 10³⁰ where it knows none.
    pub(crate) fn max_length(&self) -> Result<Option<usize>, TextError> {
        match self.config.get("model_max_length") {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match value.as_f64() {
                Some(length) if (1.0..1e6).contains(&length) => Ok(Some(length as usize)),
                Some(length) if length >= 1e6 => Ok(None),
                _ => Err(self.malformed("model_max_length", "a positive number", value)),
            },
        }
    }

    pub(crate) fn flag(&self, key: &str) -> Result<Option<bool>, TextError> {
        flag(&self.config_path, &self.config, key)
    }

    pub(crate) fn name(&self, role: &str) -> Result<Option<String>, TextError> {
        for (path, map) in self.stated() {
            if let Some(value) = map.get(role).filter(|value| !value.is_null()) {
                return special::content(path, role, value).map(Some);
            }
        }
        Ok(None)
    }

    /// `BertTokenizerFast` → `Bert`; `None` where no class is named.
    pub(crate) fn class_family(&self) -> Option<&str> {
        let class = self.config.get("tokenizer_class")?.as_str()?;
        let class = class.strip_suffix("Fast").unwrap_or(class);
        Some(class.strip_suffix("Tokenizer").unwrap_or(class))
    }

    /// Plain vocabulary files say nothing of what is done with them: other classes read the same names differently
    /// (ESM's `vocab.txt` holds whole words, CLIP's `vocab.json` marks ends of words). Only known ones are opened.
    fn check_class(&self, known: &[&str], file: &'static str) -> Result<(), TextError> {
        match self.class_family() {
            Some(family) if !known.contains(&family) => Err(TextError::UnknownClass {
                path: self.config_path.clone(),
                class: self.config["tokenizer_class"].as_str().unwrap_or(family).to_owned(),
                file,
            }),
            _ => Ok(()),
        }
    }

    pub(crate) fn malformed(&self, key: &str, expected: &str, got: &Value) -> TextError {
        TextError::Malformed {
            path: self.config_path.clone(),
            place: key.to_owned(),
            expected: expected.to_owned(),
            got: shortened(got),
        }
    }
}

/// Classes that read `vocab.txt` as BERT does and put `[CLS]` and `[SEP]` where BERT does.
const WORD_PIECE_CLASSES: [&str; 9] =
    ["Bert", "DistilBert", "Electra", "MobileBert", "ConvBert", "LayoutLM", "Lxmert", "RetriBert", "SqueezeBert"];
/// Classes that read `vocab.json` and `merges.txt` as byte-level BPE in one of our two styles.
const BYTE_PAIR_CLASSES: [&str; 6] = ["GPT2", "Roberta", "Longformer", "LED", "Bart", "Mvp"];

impl Tokenizer {
    /// Opens the tokenizer of a model directory: `tokenizer.json` if it is there, else `vocab.txt`, else `vocab.json`
    /// with `merges.txt`, else a SentencePiece model by the convention of its family, else bytes where there is an
    /// `options.json`. `tokenizer_config.json` and `special_tokens_map.json` are heeded where they exist. The path of a SentencePiece model itself, `….model`, opens it
    /// without special tokens.
    pub fn open(directory: &Path) -> Result<Self, TextError> {
        if directory.is_file() && directory.extension().is_some_and(|extension| extension == "model") {
            return sentencepiece::open_bare(directory);
        }
        if directory.exists() && !directory.is_dir() {
            return Err(TextError::NotADirectory { path: directory.to_owned() });
        }
        let there = |name: &str| directory.join(name).exists();
        if there("tokenizer.json") {
            return open_json(directory);
        }
        if there("vocab.txt") {
            return open_word_piece(directory);
        }
        match (there("vocab.json"), there("merges.txt")) {
            (true, true) => open_byte_pair(directory),
            (true, false) => Err(missing_companion(directory, "vocab.json", "merges.txt")),
            (false, true) => Err(missing_companion(directory, "merges.txt", "vocab.json")),
            (false, false) => {
                if let Some(name) = sentencepiece::MODEL_FILES.into_iter().find(|name| there(name)) {
                    return sentencepiece::open_directory(directory, name);
                }
                // What the first ELMo models come with: words are found in bytes, and there is no file for that.
                if there("options.json") {
                    return Self::of_bytes();
                }
                let hint = match directory.exists() {
                    false => "the directory does not exist: check the path".to_owned(),
                    true => "copy them from where the model comes from".to_owned(),
                };
                Err(TextError::NoTokenizer { directory: directory.to_owned(), hint })
            }
        }
    }

    /// A WordPiece tokenizer from a `vocab.txt` alone: one token per line, the line number from 0 is the id.
    pub fn from_vocab_txt(path: &Path, options: &WordPieceOptions) -> Result<Self, TextError> {
        word_piece(&read_vocabulary_lines(path)?, options, Settings::default(), &[], path)
    }

    /// A WordPiece tokenizer from tokens in memory, in the order of their ids.
    pub fn from_vocabulary<T: AsRef<str>>(tokens: &[T], options: &WordPieceOptions) -> Result<Self, TextError> {
        let tokens: Vec<String> = tokens.iter().map(|token| token.as_ref().to_owned()).collect();
        word_piece(&tokens, options, Settings::default(), &[], Path::new("the given vocabulary"))
    }

    /// A byte-level BPE tokenizer from a `vocab.json` and a `merges.txt`.
    pub fn from_byte_pair_files(
        vocabulary: &Path,
        merges: &Path,
        options: &BytePairOptions,
    ) -> Result<Self, TextError> {
        byte_pair(vocabulary, merges, options, Settings::default(), &[])
    }
}

fn missing_companion(directory: &Path, found: &'static str, missing: &'static str) -> TextError {
    TextError::MissingCompanion { directory: directory.to_owned(), found, missing }
}

fn open_json(directory: &Path) -> Result<Tokenizer, TextError> {
    let path = directory.join("tokenizer.json");
    let mut settings = Settings::read(directory)?;
    if let Some(tokenizer) = sentencepiece::open_saved(directory, &settings)? {
        return Ok(tokenizer);
    }
    let text = read_text(&path, JSON_LIMIT)?;
    let mut value: Value = serde_json::from_str(&text).map_err(|error| guard::json_error(&path, &error))?;
    drop(text);
    check_tokenizer_json(&path, &value)?;

    settings.truncation = value["truncation"]["max_length"].as_u64().and_then(|length| usize::try_from(length).ok());
    settings.dropout = value["model"]["dropout"].as_f64().filter(|&dropout| dropout > 0.0);
    let implied = implied_names(&value);
    let expected_ids: Vec<(String, u32)> = added_token_ids(&value);
    value["truncation"] = Value::Null;
    value["padding"] = Value::Null;
    if settings.dropout.is_some() {
        value["model"]["dropout"] = Value::Null;
    }

    let refused = |reason| TextError::Refused { path: path.clone(), reason };
    let mut inner: tokenizers::Tokenizer =
        shielded(|| serde_json::from_value(value).map_err(Into::into)).map_err(refused)?;
    for (token, expected) in expected_ids {
        // The crate numbers added tokens itself and only logs that the file disagrees.
        let got = inner.token_to_id(&token);
        if got != Some(expected) {
            return Err(TextError::MovedToken { path: path.clone(), token, expected, got: id_or_none(got) });
        }
    }
    if let Some(normalizer) = overruled_normalizer(&inner, &settings)? {
        shielded(|| inner.with_normalizer(Some(normalizer)).map(drop)).map_err(refused)?;
    }
    add_listed_tokens(&mut inner, &settings, &listed_tokens(directory, &settings)?)?;
    Tokenizer::assemble(inner, settings, &implied, &path)
}

/// The names that the parts of a `tokenizer.json` use.
fn implied_names(value: &Value) -> Vec<(&'static str, String)> {
    let processors = value["post_processor"]["processors"].as_array().map(Vec::as_slice).unwrap_or_default();
    let mut names = Vec::new();
    let mut add = |role, name: &Value| names.extend(name.as_str().map(|name| (role, name.to_owned())));
    for processor in processors.iter().chain([&value["post_processor"]]) {
        add("cls_token", &processor["cls"][0]);
        add("sep_token", &processor["sep"][0]);
    }
    add("unk_token", &value["model"]["unk_token"]);
    add("pad_token", &value["padding"]["pad_token"]);
    names
}

fn added_token_ids(value: &Value) -> Vec<(String, u32)> {
    let tokens = value["added_tokens"].as_array().map(Vec::as_slice).unwrap_or_default();
    let with_id = |token: &Value| {
        Some((token["content"].as_str()?.to_owned(), token["id"].as_u64().and_then(|id| u32::try_from(id).ok())?))
    };
    tokens.iter().filter_map(with_id).collect()
}

/// transformers' BERT classes let `tokenizer_config.json` overrule the normalizer in `tokenizer.json`. Only keys that are
/// there count: a missing `do_lower_case` would mean "yes" to transformers, against what `tokenizer.json` says.
fn overruled_normalizer(
    inner: &tokenizers::Tokenizer,
    settings: &Settings,
) -> Result<Option<BertNormalizer>, TextError> {
    if matches!(settings.class_family(), Some("PreTrained" | "TokenizersBackend")) {
        return Ok(None);
    }
    let Some(NormalizerWrapper::BertNormalizer(normalizer)) = inner.get_normalizer() else { return Ok(None) };
    let mut normalizer = *normalizer;
    if let Some(lowercase) = settings.flag("do_lower_case")? {
        normalizer.lowercase = lowercase;
    }
    if settings.config.contains_key("strip_accents") {
        normalizer.strip_accents = settings.flag("strip_accents")?;
    }
    if let Some(split) = settings.flag("tokenize_chinese_chars")? {
        normalizer.handle_chinese_chars = split;
    }
    Ok(Some(normalizer))
}

fn open_word_piece(directory: &Path) -> Result<Tokenizer, TextError> {
    let path = directory.join("vocab.txt");
    let settings = Settings::read(directory)?;
    settings.check_class(&WORD_PIECE_CLASSES, "vocab.txt")?;
    if settings.flag("do_basic_tokenize")? == Some(false) {
        return Err(settings.malformed(
            "do_basic_tokenize",
            "true (words without BERT's splitting are not supported)",
            &json!(false),
        ));
    }
    if let Some(kept) =
        settings.config.get("never_split").filter(|kept| kept.as_array().is_some_and(|list| !list.is_empty()))
    {
        return Err(settings.malformed("never_split", "nothing (tokens kept from splitting are not supported)", kept));
    }
    let default = SpecialNames::default();
    let name = |role, default: String| settings.name(role).map(|name| name.unwrap_or(default));
    let options = WordPieceOptions {
        lowercase: settings.flag("do_lower_case")?,
        strip_accents: settings.flag("strip_accents")?,
        split_chinese_characters: settings.flag("tokenize_chinese_chars")?.unwrap_or(true),
        names: SpecialNames {
            cls: name("cls_token", default.cls)?,
            sep: name("sep_token", default.sep)?,
            mask: name("mask_token", default.mask)?,
            pad: name("pad_token", default.pad)?,
            unk: name("unk_token", default.unk)?,
        },
        ..WordPieceOptions::default()
    };
    let listed = listed_tokens(directory, &settings)?;
    word_piece(&read_vocabulary_lines(&path)?, &options, settings, &listed, &path)
}

/// One token per line. Only the line ending is cut off, as in Python: tokens may end in other white space.
fn read_vocabulary_lines(path: &Path) -> Result<Vec<String>, TextError> {
    let text = read_text(path, TEXT_LIMIT)?;
    let mut lines: Vec<&str> = text.split('\n').map(|line| line.strip_suffix('\r').unwrap_or(line)).collect();
    // What follows the last line ending is not a line.
    if lines.last().is_some_and(|last| last.is_empty()) {
        lines.pop();
    }
    Ok(lines.into_iter().map(str::to_owned).collect())
}

fn word_piece(
    tokens: &[String],
    options: &WordPieceOptions,
    settings: Settings,
    listed: &[ListedToken],
    path: &Path,
) -> Result<Tokenizer, TextError> {
    if tokens.is_empty() {
        return Err(TextError::EmptyVocabulary { path: path.to_owned() });
    }
    let mut ids: HashMap<String, u32> = HashMap::with_capacity(tokens.len());
    for (id, token) in (0_u32..).zip(tokens) {
        if token.is_empty() {
            return Err(TextError::Malformed {
                path: path.to_owned(),
                place: format!("line {}", id + 1),
                expected: "a token on every line, up to the last one".to_owned(),
                got: "an empty line".to_owned(),
            });
        }
        if let Some(first) = ids.insert(token.clone(), id) {
            return Err(TextError::DuplicateToken { path: path.to_owned(), token: token.clone(), first, second: id });
        }
    }
    let names = &options.names;
    if !ids.contains_key(&names.unk) {
        return Err(TextError::UnknownSpecialToken {
            path: path.to_owned(),
            role: "unk_token (needed for words that cannot be tokenized)".to_owned(),
            token: names.unk.clone(),
        });
    }

    let named: [(&str, String); 5] = [
        ("cls_token", names.cls.clone()),
        ("sep_token", names.sep.clone()),
        ("mask_token", names.mask.clone()),
        ("pad_token", names.pad.clone()),
        ("unk_token", names.unk.clone()),
    ];
    let lowercase = options.lowercase.unwrap_or_else(|| {
        let special = |token: &str| {
            named.iter().any(|(_, name)| name == token) || (token.starts_with('[') && token.ends_with(']'))
        };
        !tokens.iter().any(|token| !special(token) && changes_in_lower_case(token))
    });
    let normalizer = BertNormalizer::new(true, options.split_chinese_characters, options.strip_accents, lowercase);

    let refused = |reason| TextError::Refused { path: path.to_owned(), reason };
    let build = || {
        let model = WordPiece::builder()
            .vocab(ids.into_iter().collect::<Vocab>())
            .unk_token(names.unk.clone())
            .max_input_chars_per_word(options.max_characters_per_word)
            .build()?;
        let mut inner = tokenizers::Tokenizer::new(model);
        inner.with_normalizer(Some(normalizer))?;
        inner.with_pre_tokenizer(Some(BertPreTokenizer));
        inner.with_decoder(Some(WordPieceDecoder::default()));
        Ok(inner)
    };
    let mut inner = shielded(build).map_err(refused)?;
    add_listed_tokens(&mut inner, &settings, listed)?;
    Tokenizer::assemble(inner, settings, &named, path)
}

fn changes_in_lower_case(token: &str) -> bool {
    // Not `is_uppercase`: letters such as ℝ are upper case but have no lower one, and uncased vocabularies hold them.
    token.chars().any(|letter| !letter.to_lowercase().eq([letter]))
}

fn open_byte_pair(directory: &Path) -> Result<Tokenizer, TextError> {
    let settings = Settings::read(directory)?;
    settings.check_class(&BYTE_PAIR_CLASSES, "vocab.json")?;
    let options =
        BytePairOptions { style: None, add_prefix_space: settings.flag("add_prefix_space")?.unwrap_or(false) };
    let listed = listed_tokens(directory, &settings)?;
    byte_pair(&directory.join("vocab.json"), &directory.join("merges.txt"), &options, settings, &listed)
}

fn byte_pair(
    vocabulary_path: &Path,
    merges_path: &Path,
    options: &BytePairOptions,
    mut settings: Settings,
    listed: &[ListedToken],
) -> Result<Tokenizer, TextError> {
    let vocabulary = read_vocabulary_json(vocabulary_path)?;
    let merges = read_merges(merges_path, &vocabulary)?;
    let missing = ByteLevel::alphabet().into_iter().filter(|&letter| {
        let mut buffer = [0; 4];
        !vocabulary.contains_key(letter.encode_utf8(&mut buffer))
    });
    // Without a piece for each byte, the crate would leave characters out without a word.
    let missing = missing.count();
    if missing > 0 {
        return Err(TextError::Malformed {
            path: vocabulary_path.to_owned(),
            place: "the vocabulary".to_owned(),
            expected: "a token for each of the 256 bytes, as byte-level BPE has".to_owned(),
            got: format!("{missing} bytes without one"),
        });
    }

    let has = |token: &str| vocabulary.contains_key(token);
    let style = options.style.unwrap_or(match has("<s>") && has("<mask>") {
        true => BytePairStyle::Roberta,
        false => BytePairStyle::Gpt2,
    });
    // What transformers' classes take for granted is written down, so that it is saved with the tokenizer.
    let defaults: &[(&str, &str)] = match style {
        BytePairStyle::Roberta => &[
            ("bos_token", "<s>"),
            ("eos_token", "</s>"),
            ("cls_token", "<s>"),
            ("sep_token", "</s>"),
            ("mask_token", "<mask>"),
            ("pad_token", "<pad>"),
            ("unk_token", "<unk>"),
        ],
        BytePairStyle::Gpt2 => {
            &[("bos_token", "<|endoftext|>"), ("eos_token", "<|endoftext|>"), ("unk_token", "<|endoftext|>")]
        }
    };
    for (role, name) in defaults.iter().filter(|(_, name)| has(name)) {
        if settings.stated().iter().all(|(_, map)| !map.contains_key(*role)) {
            settings.config.insert((*role).to_owned(), json!(name));
        }
    }
    // RoBERTa's mask takes the space before it along, so that "a <mask>" predicts a piece with that space. An object in
    // a configuration has its own word on that.
    let mask = settings.stated().iter().find_map(|(_, map)| map.get("mask_token")?.as_str()).map(str::to_owned);
    let mask = mask.filter(|mask| style == BytePairStyle::Roberta && has(mask));
    let mask = mask.filter(|mask| listed.iter().all(|listed| listed.token.content != *mask));
    let mask = mask.map(|mask| AddedToken::from(mask, true).lstrip(true));
    settings.config.entry("tokenizer_class").or_insert_with(|| match style {
        BytePairStyle::Roberta => json!("RobertaTokenizer"),
        BytePairStyle::Gpt2 => json!("GPT2Tokenizer"),
    });

    let refused = |reason| TextError::Refused { path: vocabulary_path.to_owned(), reason };
    let build = || {
        let model = BPE::builder().vocab_and_merges(vocabulary.into_iter().collect::<Vocab>(), merges).build()?;
        let mut inner = tokenizers::Tokenizer::new(model);
        inner.with_pre_tokenizer(Some(ByteLevel::default().add_prefix_space(options.add_prefix_space)));
        if style == BytePairStyle::Gpt2 {
            inner.with_post_processor(Some(ByteLevel::default().trim_offsets(false)));
        }
        inner.with_decoder(Some(ByteLevel::default()));
        inner.add_special_tokens(mask)?;
        Ok(inner)
    };
    let mut inner = shielded(build).map_err(refused)?;
    add_listed_tokens(&mut inner, &settings, listed)?;
    Tokenizer::assemble(inner, settings, &[], vocabulary_path)
}

/// `vocab.json`, read pair by pair, because a JSON map would keep the last of two equal tokens without a word.
fn read_vocabulary_json(path: &Path) -> Result<HashMap<String, u32>, TextError> {
    struct Pairs(Vec<(String, u32)>);
    impl<'de> Deserialize<'de> for Pairs {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            struct InOrder;
            impl<'de> Visitor<'de> for InOrder {
                type Value = Pairs;
                fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                    formatter.write_str("an object that gives each token its id")
                }
                fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Pairs, A::Error> {
                    let mut pairs = Vec::new();
                    while let Some(pair) = map.next_entry()? {
                        pairs.push(pair);
                    }
                    Ok(Pairs(pairs))
                }
            }
            deserializer.deserialize_map(InOrder)
        }
    }

    let text = read_text(path, JSON_LIMIT)?;
    let Pairs(pairs) = serde_json::from_str(&text).map_err(|error| guard::json_error(path, &error))?;
    if pairs.is_empty() {
        return Err(TextError::EmptyVocabulary { path: path.to_owned() });
    }
    let mut ids = HashMap::with_capacity(pairs.len());
    let mut tokens = HashMap::with_capacity(pairs.len());
    for (token, id) in pairs {
        guard::check_id(path, &token, id)?;
        if let Some(first) = tokens.insert(id, token.clone()).filter(|first| *first != token) {
            return Err(TextError::DuplicateId { path: path.to_owned(), id, first, second: token });
        }
        if let Some(first) = ids.insert(token.clone(), id) {
            return Err(TextError::DuplicateToken { path: path.to_owned(), token, first, second: id });
        }
    }
    Ok(ids)
}

/// `merges.txt`: a version line, then one merge per line, the most important first.
fn read_merges(path: &Path, vocabulary: &HashMap<String, u32>) -> Result<Vec<(String, String)>, TextError> {
    let text = read_text(path, TEXT_LIMIT)?;
    let mut merges = Vec::new();
    let mut merged = String::new();
    for (number, line) in text.lines().enumerate() {
        // Only the first line: a later one that begins like this would be a merge.
        if line.is_empty() || (number == 0 && line.starts_with("#version")) {
            continue;
        }
        let malformed = |expected: String| TextError::Malformed {
            path: path.to_owned(),
            place: format!("line {}", number + 1),
            expected,
            got: format!("{:?}", line.chars().take(80).collect::<String>()),
        };
        let sides = line.split_once(' ').filter(|(left, right)| !left.is_empty() && !right.is_empty());
        let (left, right) = sides.ok_or_else(|| malformed("two tokens with a space between".to_owned()))?;
        merged.clear();
        merged.push_str(left);
        merged.push_str(right);
        if let Some(token) = [left, right, &merged].into_iter().find(|token| !vocabulary.contains_key(*token)) {
            return Err(malformed(format!("{token:?} in the vocabulary")));
        }
        merges.push((left.to_owned(), right.to_owned()));
    }
    Ok(merges)
}

/// A token that a configuration adds to the vocabulary.
pub(crate) struct ListedToken {
    path: PathBuf,
    id: u32,
    token: AddedToken,
}

/// Tokens outside the model's vocabulary: `added_tokens_decoder` of tokenizer_config.json, or the older
/// `added_tokens.json`, by id.
pub(crate) fn listed_tokens(directory: &Path, settings: &Settings) -> Result<Vec<ListedToken>, TextError> {
    let mut listed = Vec::new();
    if let Some(decoder) = settings.config.get("added_tokens_decoder").filter(|decoder| !decoder.is_null()) {
        let path = &settings.config_path;
        let entries = decoder.as_object();
        let entries = entries.ok_or_else(|| settings.malformed("added_tokens_decoder", "an object", decoder))?;
        for (key, value) in entries {
            let id = key.parse().map_err(|_| settings.malformed("added_tokens_decoder", "ids as keys", &json!(key)))?;
            let text = special::content(path, &format!("added_tokens_decoder[{key}]"), value)?;
            guard::check_id(path, &text, id)?;
            listed.push(ListedToken { path: path.clone(), id, token: added_token(&text, value, false) });
        }
    }
    let path = directory.join("added_tokens.json");
    for (text, value) in read_object(&path, CONFIG_LIMIT)?.unwrap_or_default() {
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(|| TextError::Malformed {
            path: path.clone(),
            place: format!("{text:?}"),
            expected: "an id".to_owned(),
            got: shortened(&value),
        })?;
        guard::check_id(&path, &text, id)?;
        listed.push(ListedToken { path: path.clone(), id, token: added_token(&text, &Value::Null, false) });
    }
    listed.sort_by_key(|listed| listed.id);
    Ok(listed)
}

/// Adds the tokens that are not there yet, and checks that every one has the id that its file says.
pub(crate) fn add_listed_tokens(
    inner: &mut tokenizers::Tokenizer,
    settings: &Settings,
    listed: &[ListedToken],
) -> Result<(), TextError> {
    let added = inner.get_added_vocabulary().get_vocab();
    let new: Vec<AddedToken> =
        listed.iter().map(|listed| listed.token.clone()).filter(|token| !added.contains_key(&token.content)).collect();
    let refused = |reason| TextError::Refused { path: settings.config_path.clone(), reason };
    shielded(|| inner.add_tokens(new)).map_err(refused)?;
    for ListedToken { path, id, token } in listed {
        let got = inner.token_to_id(&token.content);
        if got != Some(*id) {
            let (path, token) = (path.clone(), token.content.clone());
            return Err(TextError::MovedToken { path, token, expected: *id, got: id_or_none(got) });
        }
    }
    Ok(())
}

fn id_or_none(id: Option<u32>) -> String {
    id.map_or_else(|| "none".to_owned(), |id| id.to_string())
}
