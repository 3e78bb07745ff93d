//! Distrust of what comes from outside. The `tokenizers` crate was written for files it wrote itself: some broken ones
//! make it panic, allocate without bound, or worse. Here files are read with a limit, and a `tokenizer.json` is checked
//! for the known cases before the crate sees it; [`shielded`] is the last resort for the unknown ones.

use std::collections::HashMap;
use std::io::Read;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use serde_json::Value;

use crate::error::TextError;
use crate::template::shortened;
use crate::work::{self, Work};

/// The largest `tokenizer.json` or `vocab.json` that is read. The largest on the Hub are some 30 MiB.
pub(crate) const JSON_LIMIT: u64 = 256 << 20;
/// The largest `vocab.txt` or `merges.txt`.
pub(crate) const TEXT_LIMIT: u64 = 64 << 20;
/// The largest configuration.
pub(crate) const CONFIG_LIMIT: u64 = 16 << 20;

/// No vocabulary has more ids. The bound keeps a broken id from making the crate's writer, which walks all ids up to the
/// largest, run for minutes or overflow.
const MOST_IDS: u64 = 1 << 24;

/// The longest word that WordPiece tries to cut: its time grows with the cube of it. Hugging Face has 100, Google 200.
const LONGEST_WORD: u64 = 1000;
/// The longest mark of a piece that continues or ends a word, such as `##`: it is put before every piece that is looked up.
const LONGEST_AFFIX: usize = 64;
/// The longest piece of a unigram vocabulary, in bytes: at each character, all pieces that begin there are looked for.
const LONGEST_PIECE: usize = 4096;

/// How the text of [`shielded`] begins after a panic.
pub(crate) const BREAKDOWN: &str = "the tokenizers library failed on it";

/// Calls into the `tokenizers` crate and turns a panic into an error's text.
///
/// The panic's message still goes to the process's panic hook, which is global and therefore not ours to change.
/// Nothing of ours is borrowed mutably across the call, and the crate's own caches are only written whole, so that no
/// half-made state is seen afterwards.
pub(crate) fn shielded<T>(call: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(payload) => {
            let words = payload.downcast_ref::<&str>().copied();
            let words = words.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
            Err(format!("{BREAKDOWN} ({})", words.unwrap_or("without a message")))
        }
    }
}

/// Reads a whole file, up to a limit.
pub(crate) fn read_bytes(path: &Path, limit: u64) -> Result<Vec<u8>, TextError> {
    let io = |source| TextError::Io { action: "read", path: path.to_owned(), source };
    check_regular(path).map_err(io)?;
    let file = std::fs::File::open(path).map_err(io)?;
    let too_large = |size| TextError::TooLarge { path: path.to_owned(), size, limit };
    let size = file.metadata().map_err(io)?.len();
    if size > limit {
        return Err(too_large(size));
    }
    let mut bytes = Vec::new();
    // The size is only what the system says beforehand: files may grow.
    file.take(limit + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > limit {
        return Err(too_large(bytes.len() as u64));
    }
    Ok(bytes)
}

/// Reads a whole file as UTF-8, up to a limit, without the byte order mark that some editors put before it.
pub(crate) fn read_text(path: &Path, limit: u64) -> Result<String, TextError> {
    let mut bytes = read_bytes(path, limit)?;
    if bytes.starts_with(b"\xEF\xBB\xBF") {
        bytes.drain(..3);
    }
    String::from_utf8(bytes).map_err(|error| {
        let good = &error.as_bytes()[..error.utf8_error().valid_up_to()];
        let line_start = good.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
        TextError::NotUtf8 {
            path: path.to_owned(),
            line: good.iter().filter(|&&byte| byte == b'\n').count() + 1,
            column: good.len() - line_start + 1,
        }
    })
}

/// Whether a file can be opened and read to its end: opening a FIFO would wait for somebody who writes to it, and a device may
/// have no end.
pub fn check_regular(path: &Path) -> std::io::Result<()> {
    let found = match std::fs::metadata(path)?.file_type() {
        kind if kind.is_file() => return Ok(()),
        kind if kind.is_dir() => "a directory",
        _ => "a FIFO, a socket or a device",
    };
    Err(std::io::Error::other(format!("expected a regular file, found {found}")))
}

/// Turns a parser's error into ours.
pub(crate) fn json_error(path: &Path, error: &serde_json::Error) -> TextError {
    let whole = error.to_string();
    // serde_json appends the place, which our message says in its own words.
    let reason = whole.split(" at line ").next().unwrap_or(&whole).to_owned();
    TextError::Json { path: path.to_owned(), line: error.line(), column: error.column(), reason }
}

/// Reads a JSON object; `None` when the file is not there.
pub(crate) fn read_object(path: &Path, limit: u64) -> Result<Option<serde_json::Map<String, Value>>, TextError> {
    if !path.exists() {
        return Ok(None);
    }
    let text = read_text(path, limit)?;
    match serde_json::from_str(&text).map_err(|error| json_error(path, &error))? {
        Value::Object(map) => Ok(Some(map)),
        other => Err(malformed(path, "the whole file", "a JSON object", &other)),
    }
}

/// Checks a `tokenizer.json` for what is known to make the crate panic or misbehave.
pub(crate) fn check_tokenizer_json(path: &Path, value: &Value) -> Result<(), TextError> {
    let model = &value["model"];
    if !model.is_object() {
        return Err(malformed(path, "model", "an object", model));
    }
    match &model["vocab"] {
        Value::Object(vocabulary) => {
            let mut by_id = HashMap::with_capacity(vocabulary.len());
            for (token, id) in vocabulary {
                let id = checked_id(path, &format!("model.vocab[{token:?}]"), id)?;
                if let Some(first) = by_id.insert(id, token) {
                    let (first, second) = (first.clone(), token.clone());
                    return Err(TextError::DuplicateId { path: path.to_owned(), id, first, second });
                }
            }
        }
        // Unigram: the id is the place in the list.
        Value::Array(list) if list.len() as u64 <= MOST_IDS => {}
        other => {
            return Err(malformed(path, "model.vocab", "an object of ids, or a list of tokens with scores", other));
        }
    }
    if is_empty(&model["vocab"]) && is_empty(&value["added_tokens"]) {
        return Err(TextError::EmptyVocabulary { path: path.to_owned() });
    }
    for (number, token) in list(&value["added_tokens"]).iter().enumerate() {
        checked_id(path, &format!("added_tokens[{number}].id"), &token["id"])?;
        if token["content"].as_str().is_none_or(str::is_empty) {
            let place = format!("added_tokens[{number}].content");
            return Err(malformed(path, &place, "a text that is not empty", &token["content"]));
        }
    }
    check_model_work(path, model)?;
    check_unknown_token(path, model)?;
    check_merges(path, model)?;
    check_normalizer(path, &value["normalizer"])?;
    check_pre_tokenizer(path, &value["pre_tokenizer"])?;
    work::check_decoder(path, &value["decoder"])?;
    // Checked here and not only when the tokenizer is made: the crate would compile its patterns without limit.
    Work::of(path, &value["normalizer"], &value["pre_tokenizer"]).map(drop)
}

/// What would make a model's work on a text grow without measure.
fn check_model_work(path: &Path, model: &Value) -> Result<(), TextError> {
    if let Some(length) = model.get("max_input_chars_per_word").filter(|n| n.as_u64().is_none_or(|n| n > LONGEST_WORD))
    {
        let place = "model.max_input_chars_per_word";
        return Err(malformed(path, place, &format!("a number of at most {LONGEST_WORD}"), length));
    }
    for key in ["continuing_subword_prefix", "end_of_word_suffix"] {
        let affix = &model[key];
        if affix.as_str().is_some_and(|affix| affix.len() > LONGEST_AFFIX) {
            return Err(malformed(path, &format!("model.{key}"), &format!("at most {LONGEST_AFFIX} bytes"), affix));
        }
    }
    let long = |entry: &&Value| entry[0].as_str().is_some_and(|piece| piece.len() > LONGEST_PIECE);
    match list(&model["vocab"]).iter().find(long) {
        None => Ok(()),
        Some(entry) => {
            Err(malformed(path, "model.vocab", &format!("tokens of at most {LONGEST_PIECE} bytes"), &entry[0]))
        }
    }
}

/// Checks an id that was parsed already.
pub(crate) fn check_id(path: &Path, token: &str, id: u32) -> Result<(), TextError> {
    checked_id(path, &format!("{token:?}"), &Value::from(id)).map(drop)
}

fn checked_id(path: &Path, place: &str, id: &Value) -> Result<u32, TextError> {
    match id.as_u64() {
        Some(id) if id < MOST_IDS => Ok(id as u32),
        _ => Err(malformed(path, place, &format!("an id below {MOST_IDS}"), id)),
    }
}

/// WordPiece needs its unknown token for every word that it cannot write, and would fail only when one comes.
fn check_unknown_token(path: &Path, model: &Value) -> Result<(), TextError> {
    if model["type"] != "WordPiece" {
        return Ok(());
    }
    match model["unk_token"].as_str() {
        Some(token) if model["vocab"].get(token).is_none() => Err(TextError::UnknownSpecialToken {
            path: path.to_owned(),
            role: "unk_token".to_owned(),
            token: token.to_owned(),
        }),
        // A missing key is the crate's to report.
        _ => Ok(()),
    }
}

/// The crate copies both sides of a merge into a buffer as long as the longest token, cutting the continuation prefix
/// off the second side without looking. A merge into something longer panics, and a second side without the prefix can
/// cut a character in two, which the crate then calls a string without checking.
fn check_merges(path: &Path, model: &Value) -> Result<(), TextError> {
    let Value::Object(vocabulary) = &model["vocab"] else { return Ok(()) };
    let prefix = model["continuing_subword_prefix"].as_str().unwrap_or_default();
    let mut merged = String::new();
    for (number, merge) in list(&model["merges"]).iter().enumerate() {
        let place = || format!("model.merges[{number}]");
        // Old files have "a b", newer ones ["a", "b"].
        let sides = match merge {
            Value::String(line) if line.starts_with("#version") => continue,
            Value::String(line) => line.split_once(' '),
            Value::Array(both) if both.len() == 2 => both[0].as_str().zip(both[1].as_str()),
            _ => None,
        };
        let Some((left, right)) = sides else {
            return Err(malformed(path, &place(), "two tokens", merge));
        };
        let Some(continued) = right.strip_prefix(prefix) else {
            return Err(malformed(path, &place(), &format!("a second token that begins with {prefix:?}"), merge));
        };
        merged.clear();
        merged.push_str(left);
        merged.push_str(continued);
        for token in [left, right, &merged] {
            if !vocabulary.contains_key(token) {
                return Err(malformed(path, &place(), &format!("{token:?} in the vocabulary"), merge));
            }
        }
    }
    Ok(())
}

/// A `Precompiled` normalizer is a base64 text of [trie size, trie, strings]; the crate reserves memory for whatever
/// size is written there, and panics on base64 that is none.
fn check_normalizer(path: &Path, normalizer: &Value) -> Result<(), TextError> {
    for inner in list(&normalizer["normalizers"]) {
        check_normalizer(path, inner)?;
    }
    // Old files have components without a type.
    let Some(map) = normalizer.get("precompiled_charsmap") else { return Ok(()) };
    let sound = map.as_str().and_then(base64).is_some_and(|bytes| {
        let Some((size, rest)) = bytes.split_first_chunk::<4>() else { return false };
        let size = u32::from_le_bytes(*size) as usize;
        size >= 4
            && size.is_multiple_of(4)
            && rest.get(size..).is_some_and(|strings| std::str::from_utf8(strings).is_ok())
    });
    match sound {
        true => Ok(()),
        false => Err(malformed(path, "normalizer.precompiled_charsmap", "a character map in base64", map)),
    }
}

/// `FixedLength` with length 0 divides a text into chunks of nothing.
fn check_pre_tokenizer(path: &Path, pre_tokenizer: &Value) -> Result<(), TextError> {
    for inner in list(&pre_tokenizer["pretokenizers"]) {
        check_pre_tokenizer(path, inner)?;
    }
    match pre_tokenizer["type"] == "FixedLength" && pre_tokenizer["length"] == 0 {
        true => Err(malformed(path, "pre_tokenizer.length", "at least 1", &pre_tokenizer["length"])),
        false => Ok(()),
    }
}

pub(crate) fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

fn is_empty(value: &Value) -> bool {
    value.as_object().is_none_or(serde_json::Map::is_empty) && list(value).is_empty()
}

pub(crate) fn malformed(path: &Path, place: &str, expected: &str, got: &Value) -> TextError {
    TextError::Malformed {
        path: path.to_owned(),
        place: place.to_owned(),
        expected: expected.to_owned(),
        got: shortened(got),
    }
}

/// Standard base64 with padding, the reverse of [`base64`].
pub(crate) fn base64_text(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let bits = chunk.iter().fold(0_u32, |bits, &byte| bits << 8 | u32::from(byte)) << (8 * (3 - chunk.len()));
        for place in 0..4 {
            let digit = DIGITS[(bits >> (18 - 6 * place)) as usize & 63];
            text.push(if place <= chunk.len() { char::from(digit) } else { '=' });
        }
    }
    text
}

/// Standard base64 with padding. Three lines of bits do not earn a dependency.
pub(crate) fn base64(text: &str) -> Option<Vec<u8>> {
    if !text.len().is_multiple_of(4) {
        return None;
    }
    let digits = text.trim_end_matches('=');
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let (mut bits, mut count) = (0_u32, 0);
    for digit in digits.bytes() {
        let value = match digit {
            b'A'..=b'Z' => digit - b'A',
            b'a'..=b'z' => digit - b'a' + 26,
            b'0'..=b'9' => digit - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = (bits << 6) | u32::from(value);
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
            bits &= (1 << count) - 1;
        }
    }
    (text.len() - digits.len() <= 2).then_some(bytes)
}
