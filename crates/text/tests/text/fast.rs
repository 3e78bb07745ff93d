//! The encoder with a memory gives the ids that the tokenizer gives, whatever the text and whatever it remembers.

use henson_text::{BytePairOptions, Encoder, Tokenizer};
use proptest::prelude::*;
use serde_json::Value;

use crate::support::{CASED, GPT2, PLAIN_GPT2, ROBERTA, UNCASED, directory, unpacked};

fn check(encoder: &mut Encoder<'_>, tokenizer: &Tokenizer, text: &str) {
    let mut ids = vec![7];
    encoder.encode(text, &mut ids).unwrap();
    assert_eq!(ids[0], 7, "ids are appended");
    assert_eq!(ids[1..], tokenizer.encode_ids(text).unwrap(), "{text:?}");
}

#[test]
fn golden_texts() {
    let rows = String::from_utf8(unpacked("golden-4vocabs.jsonl")).unwrap();
    for tokenizer in [&*UNCASED, &*CASED, &*GPT2, &*PLAIN_GPT2, &*ROBERTA] {
        let mut encoder = tokenizer.encoder();
        // The second time from memory.
        for row in rows.lines().chain(rows.lines()) {
            let row: Value = serde_json::from_str(row).unwrap();
            check(&mut encoder, tokenizer, row["text"].as_str().unwrap());
        }
    }
}

/// More words than are remembered, the first of them again and again.
#[test]
fn memory_is_bounded_and_harmless() {
    let mut encoder = UNCASED.encoder();
    let word = |i: usize| format!("w{i}x{}", i % 7);
    for i in 0..80_000 {
        let mut ids = Vec::new();
        let text = format!("{} {}", word(i), word(i % 100));
        encoder.encode(&text, &mut ids).unwrap();
        if i.is_multiple_of(997) {
            assert_eq!(ids, UNCASED.encode_ids(&text).unwrap(), "{text}");
        }
    }
}

/// Tokenizers whose added tokens look across spaces, and splitters that join words.
#[test]
fn other_tokenizers() {
    let texts = [
        "the cat",
        "a  <x> b",
        "a<x>b <x>",
        " two words here",
        "two  words",
        "中文 字 中 文",
        "a.<x> .b, \u{2019}tis\u{2014}so <x>\u{301}",
        "\t a \n b \u{a0} c",
        "",
        " ",
    ];
    let vocabulary =
        r###"{"[UNK]":0,"a":1,"b":2,"the":3,"cat":4,"two":5,"words":6,"中":7,".":8,",":9,"s":10,"##o":11}"###;
    let added = |content: &str, flags: &str| {
        let flag = |name: &str| flags.contains(name);
        format!(
            r#"{{"id":12,"content":"{content}","special":{},"single_word":{},"lstrip":{},"rstrip":{},"normalized":{}}}"#,
            flag("special"),
            flag("single"),
            flag("left"),
            flag("right"),
            flag("normalized"),
        )
    };
    const BERT: &str = r#"{"type":"BertPreTokenizer"}"#;
    const BYTES: &str = r#"{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,"use_regex":true}"#;
    const SPACE: &str = r#"{"type":"Metaspace","replacement":"▁","prepend_scheme":"always","split":false}"#;
    for pre_tokenizer in [BERT, BYTES, SPACE, "null", r#"{"type":"Whitespace"}"#] {
        for content in ["<x>", "two words", "中文", ".b", "x"] {
            for flags in ["special", "single", "left", "right", "normalized", "special left right", ""] {
                let normalizer = match pre_tokenizer {
                    BERT => {
                        r#"{"type":"BertNormalizer","clean_text":true,"handle_chinese_chars":true,"strip_accents":null,"lowercase":true}"#
                    }
                    _ => "null",
                };
                let json = format!(
                    r###"{{"version":"1.0","added_tokens":[{}],"normalizer":{normalizer},"pre_tokenizer":{pre_tokenizer},
                    "post_processor":null,"decoder":null,"model":{{"type":"WordPiece","unk_token":"[UNK]",
                    "continuing_subword_prefix":"##","max_input_chars_per_word":100,"vocab":{vocabulary}}}}}"###,
                    added(content, flags)
                );
                let directory = directory(&[("tokenizer.json", json.as_bytes())]);
                let tokenizer = Tokenizer::open(directory.path()).unwrap();
                let mut encoder = tokenizer.encoder();
                for text in texts.iter().chain(&texts) {
                    check(&mut encoder, &tokenizer, text);
                }
            }
        }
    }
}

/// A space is put before the first word of a text, and before no other.
#[test]
fn prefix_spaces() {
    let directory = directory(&[
        ("vocab.json", &unpacked("roberta-base.vocab.json")),
        ("merges.txt", &unpacked("byte-pair.merges.txt")),
    ]);
    let (vocabulary, merges) = (directory.path().join("vocab.json"), directory.path().join("merges.txt"));
    let options = BytePairOptions { add_prefix_space: true, ..BytePairOptions::default() };
    let tokenizer = Tokenizer::from_byte_pair_files(&vocabulary, &merges, &options).unwrap();
    let mut encoder = tokenizer.encoder();
    for text in ["the the", " the the", "the<mask>the", "the <mask> the", "  the", "the\n the", "the \nthe", "it's 's"]
    {
        check(&mut encoder, &tokenizer, text);
    }
}

/// Words, spaces and the troublesome characters.
fn any_text() -> impl Strategy<Value = String> {
    let snippets = prop::sample::select(vec![
        " ",
        " ",
        " ",
        " ",
        "  ",
        "\n",
        "\t",
        "\u{a0}",
        "\u{200b}",
        "\u{3000}",
        "\u{85}",
        "\u{1f}",
        "\u{0}",
        "\u{fffd}",
        "a",
        "Z",
        "é",
        "e\u{301}",
        "\u{301}",
        "İ",
        "ß",
        "ﬁ",
        "ΑΣ",
        "中",
        "日本",
        "🐸",
        "'s",
        "n't",
        "...",
        "…",
        "—",
        "“",
        "’",
        "#",
        "##",
        "[MASK]",
        "[UNK]",
        "<mask>",
        "</s>",
        "<|endoftext|>",
        "[",
        "]",
        "\u{1e9b}\u{323}",
        "ำ",
        "가",
        "1234567890",
        "The",
        "puppeteer",
        "unaffable",
        ",",
        "-",
        "$",
        "^",
        "`",
        "\u{7f}",
    ]);
    prop_oneof![any::<String>(), prop::collection::vec(snippets, 0..24).prop_map(|s| s.concat()), "[ -~]{0,60}"]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_text_has_the_same_ids(texts in prop::collection::vec(any_text(), 1..8)) {
        for tokenizer in [&*UNCASED, &*CASED, &*GPT2, &*PLAIN_GPT2, &*ROBERTA] {
            let mut encoder = tokenizer.encoder();
            for text in texts.iter().chain(&texts) {
                check(&mut encoder, tokenizer, text);
            }
        }
    }
}
