//! Tokenizers into files, such that transformers' `AutoTokenizer` opens them. `tokenizer.json` says everything; the
//! others repeat parts of it for programs that read only them. The same tokenizer always gives the same bytes.

use std::io::Write;
use std::path::Path;

use serde_json::{Map, Value, json};
use tokenizers::{AddedToken, ModelWrapper};

use crate::error::TextError;
use crate::guard::shielded;
use crate::special::ROLES;
use crate::tokenizer::{Kind, Tokenizer, json};

/// Keys of tokenizer_config.json that hold paths of the machine that wrote it.
const MACHINE_PATHS: [&str; 6] =
    ["name_or_path", "tokenizer_file", "vocab_file", "merges_file", "special_tokens_map_file", "added_tokens_file"];

impl Tokenizer {
    /// The files of this tokenizer, as names and contents: `tokenizer.json`, `tokenizer_config.json`,
    /// `special_tokens_map.json`, and `vocab.txt` for WordPiece or `vocab.json` and `merges.txt` for byte-level BPE. The
    /// plain vocabulary files are left out when they could not say the same as `tokenizer.json`: because ids are
    /// missing, tokens hold the characters that separate them, or the BPE is not byte-level. A SentencePiece model that was
    /// read is among the files as it was, and `tokenizer_config.json` names it: `tokenizer.json` can say the same only nearly.
    ///
    /// `max_length` becomes `model_max_length`; without it the one that was read stays. Keys of a
    /// `tokenizer_config.json` that was read stay too, except those with paths of the machine that wrote it.
    pub fn files(&self, max_length: Option<usize>) -> Result<Vec<(String, Vec<u8>)>, TextError> {
        let mut files = vec![
            ("tokenizer.json".to_owned(), self.tokenizer_json()?),
            ("tokenizer_config.json".to_owned(), pretty(&Value::Object(self.config(max_length)))?),
            ("special_tokens_map.json".to_owned(), pretty(&Value::Object(self.special_map()))?),
        ];
        match self.kind() {
            Kind::WordPiece => files.extend(self.vocab_txt().map(|bytes| ("vocab.txt".to_owned(), bytes))),
            Kind::BytePair => {
                if let Some((vocabulary, merges)) = self.byte_pair_files() {
                    files.push(("vocab.json".to_owned(), vocabulary));
                    files.push(("merges.txt".to_owned(), merges));
                }
            }
            Kind::Unigram | Kind::WordLevel => {}
        }
        if let Some(sentence_piece) = &self.sentence_piece {
            let (name, bytes) = sentence_piece.file();
            files.push((name.to_owned(), bytes.to_vec()));
        }
        Ok(files)
    }

    /// Writes [`files`](Self::files) into a directory, which is made if it is not there. Each file appears whole or not
    /// at all.
    pub fn save(&self, directory: &Path, max_length: Option<usize>) -> Result<(), TextError> {
        let io = |path: &Path| {
            let path = path.to_owned();
            move |source| TextError::Io { action: "write", path, source }
        };
        std::fs::create_dir_all(directory).map_err(io(directory))?;
        for (name, bytes) in self.files(max_length)? {
            let path = directory.join(&name);
            let temporary = directory.join(format!(".{name}.{}", std::process::id()));
            let write = || {
                let mut file = std::fs::File::create(&temporary)?;
                file.write_all(&bytes)?;
                file.sync_all()?;
                std::fs::rename(&temporary, &path)
            };
            if let Err(error) = write() {
                // Not left behind; that this may fail too changes nothing about the first failure.
                drop(std::fs::remove_file(&temporary));
                return Err(io(&path)(error));
            }
        }
        Ok(())
    }

    fn tokenizer_json(&self) -> Result<Vec<u8>, TextError> {
        let failed = |reason| TextError::Failed { action: "save", reason };
        if let Some(sentence_piece) = &self.sentence_piece {
            if let Some(obstacle) = sentence_piece.obstacle() {
                return Err(failed(obstacle.to_owned()));
            }
            let symbols = sentence_piece.user_defined().iter();
            let symbols: Vec<AddedToken> =
                symbols.map(|text| AddedToken::from(&**text, false).normalized(false)).collect();
            let mut inner = self.inner.clone();
            inner.set_encode_special_tokens(false);
            return shielded(|| {
                inner.add_tokens(symbols)?;
                Ok(inner.to_string(true)?.into_bytes())
            })
            .map_err(failed);
        }
        let write = || Ok(self.inner.to_string(true)?.into_bytes());
        shielded(write).map_err(failed)
    }

    /// `None` unless the ids are 0, 1, 2, … and every token fits on a line.
    fn vocab_txt(&self) -> Option<Vec<u8>> {
        let mut bytes = Vec::new();
        for token in self.tokens_by_id()? {
            if token.is_empty() || token.contains(['\n', '\r']) {
                return None;
            }
            bytes.extend_from_slice(token.as_bytes());
            bytes.push(b'\n');
        }
        Some(bytes)
    }

    /// `vocab.json` and `merges.txt`; `None` when they cannot say the same as `tokenizer.json`.
    fn byte_pair_files(&self) -> Option<(Vec<u8>, Vec<u8>)> {
        let ModelWrapper::BPE(model) = self.inner.get_model() else { return None };
        // Character-level BPE marks the ends of words, or falls back to bytes, in ways that these files do not say.
        let marks = [&model.continuing_subword_prefix, &model.end_of_word_suffix, &model.unk_token];
        let plain = marks.into_iter().all(|mark| mark.as_ref().is_none_or(String::is_empty))
            && !model.byte_fallback
            && !model.ignore_merges;
        let byte_level =
            json(self.inner.get_pre_tokenizer())["type"] == "ByteLevel" && self.inner.get_normalizer().is_none();
        if !(plain && byte_level) {
            return None;
        }
        let tokens = self.tokens_by_id()?;
        let mut merges = b"#version: 0.2\n".to_vec();
        let model = json(Some(model));
        for merge in model["merges"].as_array().map(Vec::as_slice).unwrap_or_default() {
            match (merge[0].as_str(), merge[1].as_str()) {
                (Some(left), Some(right))
                    if !(left.contains([' ', '\n', '\r']) || right.contains([' ', '\n', '\r'])) =>
                {
                    merges.extend_from_slice(format!("{left} {right}\n").as_bytes());
                }
                _ => return None,
            }
        }
        // By hand, because a JSON map would sort the tokens, and everybody's file has them by id.
        let mut vocabulary = b"{".to_vec();
        for (id, token) in tokens.iter().enumerate() {
            let separator = if id == 0 { "" } else { ", " };
            vocabulary.extend_from_slice(format!("{separator}{}: {id}", json!(token)).as_bytes());
        }
        vocabulary.extend_from_slice(b"}\n");
        Some((vocabulary, merges))
    }

    /// The model's vocabulary, without added tokens; `None` when ids are missing in it.
    fn tokens_by_id(&self) -> Option<Vec<String>> {
        let vocabulary = self.inner.get_vocab(false);
        let mut tokens = vec![None; vocabulary.len()];
        for (token, id) in vocabulary {
            *tokens.get_mut(id as usize)? = Some(token);
        }
        tokens.into_iter().collect()
    }

    fn config(&self, max_length: Option<usize>) -> Map<String, Value> {
        let mut config = self.settings.config.clone();
        config.retain(|key, _| !MACHINE_PATHS.contains(&key.as_str()));
        let class = match self.kind() {
            // By a class that has the same special tokens around pairs: `transformers` follows it, whatever tokenizer.json says.
            Kind::WordPiece if json(self.inner.get_post_processor())["type"] == "RobertaProcessing" => "MPNetTokenizer",
            Kind::WordPiece => "BertTokenizer",
            Kind::BytePair | Kind::Unigram | Kind::WordLevel => "PreTrainedTokenizerFast",
        };
        config.entry("tokenizer_class").or_insert(json!(class));
        match max_length.or(self.max_length()) {
            Some(length) => config.insert("model_max_length".to_owned(), json!(length)),
            // 10³⁰, "unknown", is what its absence means too.
            None => config.remove("model_max_length"),
        };
        let normalizer = json(self.inner.get_normalizer());
        if normalizer["type"] == "BertNormalizer" {
            config.insert("do_lower_case".to_owned(), normalizer["lowercase"].clone());
            config.insert("strip_accents".to_owned(), normalizer["strip_accents"].clone());
            config.insert("tokenize_chinese_chars".to_owned(), normalizer["handle_chinese_chars"].clone());
        }
        let pre_tokenizer = json(self.inner.get_pre_tokenizer());
        if pre_tokenizer["type"] == "ByteLevel" {
            config.insert("add_prefix_space".to_owned(), pre_tokenizer["add_prefix_space"].clone());
        }
        for (role, special) in self.special.by_role() {
            // A stated token stays as it was written, with its flags.
            config.entry(role).or_insert(json!(special.text));
        }
        config.insert("added_tokens_decoder".to_owned(), self.added_tokens_decoder());
        config
    }

    fn special_map(&self) -> Map<String, Value> {
        let mut map = self.settings.special.clone();
        let added = self.inner.get_added_vocabulary().get_added_tokens_decoder();
        let mut add = |role: &str, text: &str| {
            let token = self.id(text).and_then(|id| added.get(&id));
            let value = match token {
                Some(token) if token.lstrip || token.rstrip || token.single_word || token.normalized => flags(token),
                _ => json!(text),
            };
            map.entry(role).or_insert(value);
        };
        for (role, special) in self.special.by_role() {
            add(role, &special.text);
        }
        for role in ["bos_token", "eos_token"] {
            if let Some(text) = self.settings.config.get(role).and_then(Value::as_str) {
                add(role, text);
            }
        }
        // A role that tokenizer_config.json leaves empty on purpose is not filled by the other file.
        map.retain(|role, _| !(ROLES.contains(&role.as_str()) && self.settings.config.get(role) == Some(&Value::Null)));
        map
    }

    fn added_tokens_decoder(&self) -> Value {
        let added = self.inner.get_added_vocabulary().get_added_tokens_decoder();
        let mut added: Vec<_> = added.iter().collect();
        added.sort_by_key(|(id, _)| **id);
        let entry = |(id, token): (&u32, &AddedToken)| {
            let mut value = flags(token);
            value["special"] = json!(token.special);
            (id.to_string(), value)
        };
        Value::Object(added.into_iter().map(entry).collect())
    }
}

/// A token as Hugging Face's files write it.
fn flags(token: &AddedToken) -> Value {
    json!({
        "content": token.content,
        "lstrip": token.lstrip,
        "normalized": token.normalized,
        "rstrip": token.rstrip,
        "single_word": token.single_word,
    })
}

/// Indented as Python's `json.dumps(indent=2)`, with a line ending.
fn pretty(value: &Value) -> Result<Vec<u8>, TextError> {
    let failed = |error: serde_json::Error| TextError::Failed { action: "save", reason: error.to_string() };
    let mut bytes = serde_json::to_vec_pretty(value).map_err(failed)?;
    bytes.push(b'\n');
    Ok(bytes)
}
