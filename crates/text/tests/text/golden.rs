//! Agreement with the reference implementations, piece by piece. The data and where it comes from: `tests/data/README.md`.

use henson_text::{Tokenizer, code_point_offsets};
use serde_json::Value;

use crate::support::{CASED, GPT2, PLAIN_GPT2, ROBERTA, UNCASED, unpacked};

fn texts(value: &Value) -> Vec<&str> {
    value.as_array().unwrap().iter().map(|text| text.as_str().unwrap()).collect()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn tokens(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<String> {
    ids.iter().map(|&id| tokenizer.token(id).unwrap()).collect()
}

#[test]
fn squad_questions_in_basic_tokens_and_word_pieces() {
    let questions: Vec<Value> = serde_json::from_slice(&unpacked("question_tokens.json")).unwrap();
    assert_eq!(questions.len(), 10_570);
    for question in &questions {
        let text = question["original"].as_str().unwrap();
        let words: Vec<String> = UNCASED.words(text).unwrap().into_iter().map(|word| word.text).collect();
        assert_eq!(words, texts(&question["basic"]), "{text}");
        let pieces = UNCASED.encode(text).unwrap();
        assert_eq!(tokens(&UNCASED, &pieces.ids), texts(&question["wordpiece"]), "{text}");
    }
}

#[test]
fn four_vocabularies() {
    // This file's byte-level rows were made without recognising special strings.
    let roberta = ROBERTA.clone().recognise_special_strings(false);
    let rows = String::from_utf8(unpacked("golden-4vocabs.jsonl")).unwrap();
    let mut count = 0;
    for row in rows.lines() {
        let row: Value = serde_json::from_str(row).unwrap();
        let text = row["text"].as_str().unwrap();
        for (name, tokenizer) in [
            ("bert-base-uncased", &*UNCASED),
            ("bert-base-cased", &*CASED),
            ("gpt2", &*PLAIN_GPT2),
            ("roberta-base", &roberta),
        ] {
            let expected = &row[name];
            let pieces = tokenizer.encode(text).unwrap();
            let place = format!("row {} in {name}: {text:?}", row["id"]);
            assert_eq!(pieces.ids, ids(&expected["ids"]), "ids of {place}");
            assert_eq!(tokenizer.encode_ids(text).unwrap(), pieces.ids, "fast ids of {place}");
            if let Some(expected) = expected.get("tokens") {
                assert_eq!(tokens(tokenizer, &pieces.ids), texts(expected), "tokens of {place}");
            }
            if let Some(expected) = expected.get("offsets") {
                let expected: Vec<(usize, usize)> = serde_json::from_value(expected.clone()).unwrap();
                assert_eq!(code_point_offsets(text, &pieces.offsets), expected, "offsets of {place}");
            }
        }
        count += 1;
    }
    assert_eq!(count, 364);
}

#[test]
fn french_in_gpt2() {
    let expected: Value = serde_json::from_slice(&unpacked("gpt2-encoded_tokens.json")).unwrap();
    let text = expected["text"].as_str().unwrap();
    let words: Vec<String> = GPT2.words(text).unwrap().into_iter().map(|word| word.text).collect();
    assert_eq!(words, texts(&expected["encoded_text"]));
    let pieces = GPT2.encode(text).unwrap();
    assert_eq!(tokens(&GPT2, &pieces.ids), texts(&expected["bpe_tokens"]));
    assert_eq!(pieces.ids, ids(&expected["token_ids"]));
    assert_eq!(GPT2.decode(&pieces.ids, true).unwrap(), text);
}

/// Directories that transformers saved: the same ids, offsets, pairs with segments, and decoding.
#[test]
fn directories_of_transformers() {
    for name in ["bert", "roberta", "modernbert"] {
        let directory = crate::support::data("transformers").join(name);
        let tokenizer = Tokenizer::open(&directory).unwrap();
        let expected: Value = serde_json::from_slice(&std::fs::read(directory.join("expected.json")).unwrap()).unwrap();
        assert_eq!(tokenizer.vocabulary_size() as u64, expected["length"].as_u64().unwrap());
        let second = tokenizer.encode(expected["pair_with"].as_str().unwrap()).unwrap();
        for row in expected["rows"].as_array().unwrap() {
            let text = row["text"].as_str().unwrap();
            let pieces = tokenizer.encode(text).unwrap();
            assert_eq!(pieces.ids, ids(&row["ids"]), "{name}: {text:?}");
            let offsets: Vec<(usize, usize)> = serde_json::from_value(row["code_point_offsets"].clone()).unwrap();
            assert_eq!(code_point_offsets(text, &pieces.offsets), offsets, "{name}: {text:?}");
            let pair = tokenizer.template().pair(&pieces, &second, 512).unwrap();
            assert_eq!(pair.ids, ids(&row["pair_ids"]), "{name}: {text:?}");
            assert_eq!(pair.segments, ids(&row["pair_segments"]), "{name}: {text:?}");
            assert_eq!(
                tokenizer.decode(&pair.ids, true).unwrap(),
                row["decoded"].as_str().unwrap(),
                "{name}: {text:?}"
            );
        }
    }
}
