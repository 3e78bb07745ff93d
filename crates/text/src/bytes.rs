//! Bytes as tokens, for networks that find the words in them themselves: the id of a byte is the byte, and `<S>` and `</S>` (256, 257)
//! stand around a text. It is an ordinary byte-level BPE without merges, so that its tokenizer.json is one that others read.

use std::path::Path;

use serde_json::{Map, Value, json};

use crate::error::TextError;
use crate::files::Settings;
use crate::guard::shielded;
use crate::tokenizer::Tokenizer;

impl Tokenizer {
    /// The tokenizer whose tokens are bytes. Words, as it counts them, are what ASCII white space separates.
    pub fn of_bytes() -> Result<Self, TextError> {
        let path = Path::new("the tokenizer of bytes");
        let refused = |reason| TextError::Refused { path: path.to_owned(), reason };
        let inner = shielded(|| serde_json::from_value(description()).map_err(Into::into)).map_err(refused)?;
        let names = [("cls_token", "<S>".to_owned()), ("sep_token", "</S>".to_owned())];
        Self::assemble(inner, Settings::default(), &names, path)
    }
}

/// Its tokenizer.json.
fn description() -> Value {
    let letters = (0..=u8::MAX).map(|byte| (letter(byte).to_string(), Value::from(byte)));
    let specials = [("<S>", 256), ("</S>", 257)];
    let vocabulary: Map<String, Value> =
        letters.chain(specials.map(|(token, id)| (token.to_owned(), Value::from(id)))).collect();
    let added = specials.map(|(content, id)| {
        json!({ "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true })
    });
    let special = |token: &str| json!({ "SpecialToken": { "id": token, "type_id": 0 } });
    let text = |name: &str, segment: u32| json!({ "Sequence": { "id": name, "type_id": segment } });
    let named = |(token, id): (&str, u32)| json!({ "id": token, "ids": [id], "tokens": [token] });
    let byte_level = |regex: bool| json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": regex });
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": { "type": "Sequence", "pretokenizers": [
            { "type": "Split", "pattern": { "Regex": "[\\t\\n\\x0b\\f\\r ]*[^\\t\\n\\x0b\\f\\r ]+" },
              "behavior": "Isolated", "invert": false },
            byte_level(false),
        ] },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [special("<S>"), text("A", 0), special("</S>")],
            "pair": [special("<S>"), text("A", 0), special("</S>"), special("<S>"), text("B", 1), special("</S>")],
            "special_tokens": { "<S>": named(specials[0]), "</S>": named(specials[1]) },
        },
        "decoder": byte_level(true),
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocabulary, "merges": [],
        },
    })
}

/// The letter that stands for a byte in byte-level BPE: those that can be printed stand for themselves.
fn letter(byte: u8) -> char {
    let printed = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..);
    match printed(byte) {
        true => char::from(byte),
        false => {
            let before = (0..byte).filter(|byte| !printed(*byte)).count() as u32;
            char::from_u32(256 + before).unwrap_or(char::REPLACEMENT_CHARACTER)
        }
    }
}
