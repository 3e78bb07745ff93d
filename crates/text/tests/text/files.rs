//! Directories in and out: what is found where, round trips, and messages for what is missing or broken.

use henson_text::{BytePairOptions, Kind, Tokenizer, WordPieceOptions};
use serde_json::{Value, json};

use crate::support::{CASED, GPT2, ROBERTA, SMALL, UNCASED, assert_error, data, directory, small, unpacked};

const TEXTS: [&str; 6] = [
    "Jim Henson was a puppeteer.",
    "É um café [MASK], não? <mask> </s>",
    "  two  spaces\tand\na tab 中文 🐸 don't",
    "",
    "Straße ﬁ ǅ \u{0}\u{fffd}",
    "[CLS] a [SEP] <|endoftext|>",
];

fn open(files: &[(&str, &[u8])]) -> Result<Tokenizer, henson_text::TextError> {
    Tokenizer::open(directory(files).path())
}

fn value_of(files: &[(String, Vec<u8>)], name: &str) -> Value {
    let (_, bytes) = files.iter().find(|(found, _)| found == name).unwrap_or_else(|| panic!("no {name}"));
    serde_json::from_slice(bytes).unwrap()
}

#[test]
fn facts_about_known_tokenizers() {
    let uncased = &*UNCASED;
    assert_eq!((uncased.kind(), uncased.vocabulary_size()), (Kind::WordPiece, 30_522));
    assert_eq!((uncased.lowercase(), CASED.lowercase(), GPT2.lowercase()), (Some(true), Some(false), Some(false)));
    let roles: Vec<(&str, u32)> = uncased.special().by_role().map(|(role, special)| (role, special.id)).collect();
    assert_eq!(
        roles,
        [("cls_token", 101), ("sep_token", 102), ("mask_token", 103), ("pad_token", 0), ("unk_token", 100)]
    );
    assert_eq!((uncased.token(2003).as_deref(), uncased.id("##ing")), (Some("is"), Some(2075)));
    assert_eq!((uncased.token(30_522), uncased.id("no such token")), (None, None));
    assert!(uncased.is_special(101) && uncased.special().contains(103) && !uncased.is_special(2003));

    let roles: Vec<(&str, u32)> = ROBERTA.special().by_role().map(|(role, special)| (role, special.id)).collect();
    assert_eq!(roles, [("cls_token", 0), ("sep_token", 2), ("mask_token", 50_264), ("pad_token", 1), ("unk_token", 3)]);
    assert_eq!(ROBERTA.vocabulary_size(), 50_265);
    assert_eq!((GPT2.kind(), GPT2.vocabulary_size()), (Kind::BytePair, 50_257));
    assert_eq!(GPT2.special().cls, None);
    assert_eq!(GPT2.special().unk.as_ref().map(|unk| unk.id), Some(50_256));
}

#[test]
fn special_strings_are_whole_or_not() {
    assert_eq!(UNCASED.encode("a [MASK] b").unwrap().ids, [1037, 103, 1038]);
    let plain = UNCASED.clone().recognise_special_strings(false);
    assert_eq!(plain.encode("a [MASK] b").unwrap().ids, [1037, 1031, 7308, 1033, 1038]);
    // RoBERTa's mask takes the space before it along; its offsets do not show it.
    let pieces = ROBERTA.encode("a <mask> b").unwrap();
    assert_eq!(pieces.ids, [102, 50_264, 741]);
    assert_eq!(pieces.offsets, [(0, 1), (2, 8), (9, 10)]);
    assert_eq!(GPT2.encode("<|endoftext|>").unwrap().ids, [50_256]);
}

#[test]
fn words_are_numbered() {
    let pieces = UNCASED.encode("puppeteers, puppeteers").unwrap();
    let words: Vec<u32> = pieces.words.iter().map(|word| word.unwrap()).collect();
    assert_eq!(words, [0, 0, 1, 2, 2]);
}

#[test]
fn long_words_are_unknown() {
    assert_eq!(UNCASED.encode(&"a".repeat(101)).unwrap().ids, [100]);
    assert!(!UNCASED.encode(&"a".repeat(100)).unwrap().ids.contains(&100));
    let options = WordPieceOptions { max_characters_per_word: 3, ..WordPieceOptions::default() };
    let tokens: Vec<&str> = SMALL.lines().collect();
    let tokenizer = Tokenizer::from_vocabulary(&tokens, &options).unwrap();
    assert_eq!(tokenizer.encode("jim puppet").unwrap().ids, [5, 1]);
}

#[test]
fn case_follows_the_vocabulary_unless_told() {
    let with = |vocabulary: &str, config: &str| {
        let files: &[(&str, &[u8])] =
            &[("vocab.txt", vocabulary.as_bytes()), ("tokenizer_config.json", config.as_bytes())];
        open(&files[..if config.is_empty() { 1 } else { 2 }]).unwrap()
    };
    let cased = format!("{SMALL}Jim\n");
    assert_eq!(with(SMALL, "").lowercase(), Some(true));
    assert_eq!(with(&cased, "").lowercase(), Some(false));
    // Upper-case special tokens and letters without a lower case say nothing.
    assert_eq!(with(&format!("{SMALL}[unused0]\n[Q]\nℝ\n"), "").lowercase(), Some(true));
    assert_eq!(with(SMALL, r#"{"do_lower_case": false}"#).lowercase(), Some(false));
    assert_eq!(with(SMALL, r#"{"do_lower_case": false}"#).encode("Jim jim").unwrap().ids, [1, 5]);
    assert_eq!(with(&cased, r#"{"do_lower_case": true}"#).encode("Jim").unwrap().ids, [5]);
    assert_eq!(with(SMALL, r#"{"strip_accents": false}"#).encode("jím").unwrap().ids, [1]);
    assert_eq!(with(SMALL, "").encode("jím").unwrap().ids, [5]);
    let chinese = format!("{SMALL}中\n##中\n");
    assert_eq!(with(&chinese, "").encode("中中").unwrap().ids, [14, 14]);
    assert_eq!(with(&chinese, r#"{"tokenize_chinese_chars": false}"#).encode("中中").unwrap().ids, [14, 15]);
}

#[test]
fn windows_line_endings_and_a_byte_order_mark() {
    let text = format!("\u{feff}{}", SMALL.replace('\n', "\r\n"));
    let tokenizer = open(&[("vocab.txt", text.as_bytes())]).unwrap();
    assert_eq!(tokenizer.vocabulary_size(), 14);
    assert_eq!(tokenizer.special(), small().special());
    // No line ending after the last token.
    assert_eq!(open(&[("vocab.txt", SMALL.trim_end().as_bytes())]).unwrap().vocabulary_size(), 14);
}

#[test]
fn names_of_special_tokens_come_from_the_configuration() {
    let vocabulary = "<nil>\n<?>\n<a>\n<z>\n<hide>\njim\n";
    let config = r#"{"cls_token": "<a>", "sep_token": {"content": "<z>", "lstrip": true}, "unk_token": "<?>"}"#;
    let map = r#"{"mask_token": "<hide>", "pad_token": "<nil>", "cls_token": "jim"}"#;
    let tokenizer = open(&[
        ("vocab.txt", vocabulary.as_bytes()),
        ("tokenizer_config.json", config.as_bytes()),
        ("special_tokens_map.json", map.as_bytes()),
    ])
    .unwrap();
    let ids: Vec<u32> = tokenizer.special().by_role().map(|(_, special)| special.id).collect();
    assert_eq!(ids, [2, 3, 4, 0, 1]);
    assert_eq!(tokenizer.encode("jim <z><hide>kermit").unwrap().ids, [5, 3, 4, 1]);
    assert_eq!(tokenizer.template().single(&tokenizer.encode("jim").unwrap(), 9).unwrap().ids, [2, 5, 3]);

    let none = r#"{"pad_token": null}"#;
    let tokenizer = open(&[("vocab.txt", SMALL.as_bytes()), ("tokenizer_config.json", none.as_bytes())]).unwrap();
    assert_eq!(tokenizer.special().pad, None);

    assert_error(
        open(&[("vocab.txt", SMALL.as_bytes()), ("tokenizer_config.json", br#"{"mask_token": "<mask>"}"#)]),
        &["tokenizer_config.json", "\"<mask>\"", "mask_token", "no such token", "correct the name"],
    );
}

#[test]
fn added_tokens_follow_the_vocabulary() {
    let added = br#"{"fozzie": 15, "Kermit": 14}"#;
    let tokenizer = open(&[("vocab.txt", SMALL.as_bytes()), ("added_tokens.json", added)]).unwrap();
    assert_eq!(tokenizer.vocabulary_size(), 16);
    // Found in the normalized text, so in any case.
    assert_eq!(tokenizer.encode("jim KERMIT fozzie").unwrap().ids, [5, 14, 15]);
    assert!(!tokenizer.is_special(14));
    let config = br#"{"added_tokens_decoder": {"14": {"content": "<x>", "special": true}}}"#;
    let tokenizer = open(&[("vocab.txt", SMALL.as_bytes()), ("tokenizer_config.json", config)]).unwrap();
    assert!(tokenizer.is_special(14));
    assert_error(
        open(&[("vocab.txt", SMALL.as_bytes()), ("added_tokens.json", br#"{"kermit": 20}"#)]),
        &["added_tokens.json", "\"kermit\"", "should have id 20", "given 14", "save the tokenizer again"],
    );
}

/// RoBERTa's class gives its mask the space before it, however the configuration spells the name; an object decides.
#[test]
fn other_special_tokens_of_a_configuration() {
    let vocabulary = unpacked("roberta-base.vocab.json");
    let merges = unpacked("byte-pair.merges.txt");
    let with = |config: &str| {
        open(&[("vocab.json", &vocabulary), ("merges.txt", &merges), ("tokenizer_config.json", config.as_bytes())])
            .unwrap()
    };
    assert_eq!(with(r#"{"mask_token": "<mask>"}"#).encode("a <mask>").unwrap().ids, [102, 50_264]);
    let strict = with(r#"{"mask_token": {"content": "<mask>", "lstrip": false}}"#);
    assert_eq!(strict.encode("a <mask>").unwrap().ids, [102, 1437, 50_264]);
    let more = with(r#"{"additional_special_tokens": ["madeupword0001", "nowhere"], "eos_token": "<|endoftext|>"}"#);
    assert_eq!(more.encode("amadeupword0001<|endoftext|>").unwrap().ids, [102, 50_262, 50_260]);
    assert!(more.is_special(50_262) && more.is_special(50_260));
    assert_eq!(more.vocabulary_size(), 50_265);
}

#[test]
fn saved_and_opened_again_they_encode_alike() {
    for tokenizer in [&*UNCASED, &*CASED, &*GPT2, &*ROBERTA, &small()] {
        let files = tokenizer.files(Some(77)).unwrap();
        assert_eq!(files, tokenizer.files(Some(77)).unwrap(), "the same bytes every time");
        let target = tempfile::tempdir().unwrap();
        tokenizer.save(&target.path().join("new/folder"), Some(77)).unwrap();
        let target = target.path().join("new/folder");
        for (name, bytes) in &files {
            assert_eq!(&std::fs::read(target.join(name)).unwrap(), bytes, "{name}");
        }
        assert_eq!(std::fs::read_dir(&target).unwrap().count(), files.len(), "no temporary files are left");

        let whole = Tokenizer::open(&target).unwrap();
        assert_eq!(whole.files(None).unwrap(), files, "what was opened is saved in the same bytes");
        // Without tokenizer.json the plain files must say the same.
        std::fs::remove_file(target.join("tokenizer.json")).unwrap();
        let plain = Tokenizer::open(&target).unwrap();
        for again in [&whole, &plain] {
            assert_eq!(again.special(), tokenizer.special());
            assert_eq!(again.template(), tokenizer.template());
            assert_eq!(again.vocabulary_size(), tokenizer.vocabulary_size());
            assert_eq!(again.lowercase(), tokenizer.lowercase());
            assert_eq!(again.max_length(), Some(77));
            for text in TEXTS {
                let (expected, got) = (tokenizer.encode(text).unwrap(), again.encode(text).unwrap());
                assert_eq!(got, expected, "{text:?}");
                assert_eq!(again.decode(&got.ids, true).unwrap(), tokenizer.decode(&got.ids, true).unwrap());
            }
        }
    }
}

#[test]
fn plain_files_are_saved_as_they_were() {
    let files = UNCASED.files(None).unwrap();
    let of = |name: &str| files.iter().find(|(found, _)| found == name).map(|(_, bytes)| bytes.clone());
    assert_eq!(of("vocab.txt").unwrap(), unpacked("bert-base-uncased.vocab.txt"));
    let files = GPT2.files(None).unwrap();
    let of = |name: &str| files.iter().find(|(found, _)| found == name).map(|(_, bytes)| bytes.clone());
    assert_eq!(of("merges.txt").unwrap(), unpacked("byte-pair.merges.txt"));
    let vocabulary = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).unwrap();
    assert_eq!(vocabulary(&of("vocab.json").unwrap()), vocabulary(&unpacked("gpt2.vocab.json")));
}

#[test]
fn what_transformers_needs_is_written() {
    let config = value_of(&small().files(Some(512)).unwrap(), "tokenizer_config.json");
    assert_eq!(config["tokenizer_class"], "BertTokenizer");
    // MPNet's pairs have two separators between them, which `transformers` does by the class.
    let mpnet = Tokenizer::from_vocabulary(
        &["<s>", "<pad>", "</s>", "[UNK]", "<mask>", "jim", "cat"],
        &WordPieceOptions::default(),
    );
    let of_mpnet = value_of(&mpnet.unwrap().files(None).unwrap(), "tokenizer_config.json");
    assert_eq!(of_mpnet["tokenizer_class"], "MPNetTokenizer");
    assert_eq!(config["model_max_length"], 512);
    assert_eq!(config["do_lower_case"], true);
    assert_eq!(config["mask_token"], "[MASK]");
    assert_eq!(config["added_tokens_decoder"]["4"]["content"], "[MASK]");
    assert_eq!(config["added_tokens_decoder"]["4"]["special"], true);
    let map = value_of(&small().files(None).unwrap(), "special_tokens_map.json");
    assert_eq!(map["cls_token"], "[CLS]");

    let files = ROBERTA.files(None).unwrap();
    let config = value_of(&files, "tokenizer_config.json");
    assert_eq!((&config["tokenizer_class"], &config["bos_token"]), (&json!("RobertaTokenizer"), &json!("<s>")));
    assert_eq!(config.get("model_max_length"), None);
    assert_eq!(value_of(&files, "special_tokens_map.json")["mask_token"]["lstrip"], true);
    assert_eq!(value_of(&GPT2.files(None).unwrap(), "tokenizer_config.json")["tokenizer_class"], "GPT2Tokenizer");
}

#[test]
fn unknown_keys_stay_and_machine_paths_go() {
    let config = json!({
        "model_max_length": 1e30, "name_or_path": "/home/someone/model", "tokenizer_file": "/tmp/x.json",
        "tokenizer_class": "ElectraTokenizer", "a_key_of_tomorrow": {"b": [1, 2]},
    });
    let tokenizer =
        open(&[("vocab.txt", SMALL.as_bytes()), ("tokenizer_config.json", config.to_string().as_bytes())]).unwrap();
    assert_eq!(tokenizer.max_length(), None);
    let saved = value_of(&tokenizer.files(None).unwrap(), "tokenizer_config.json");
    assert_eq!(saved["a_key_of_tomorrow"], config["a_key_of_tomorrow"]);
    assert_eq!(saved["tokenizer_class"], "ElectraTokenizer");
    for gone in ["name_or_path", "tokenizer_file", "model_max_length"] {
        assert_eq!(saved.get(gone), None, "{gone}");
    }
}

/// A `tokenizer.json` with changes.
fn changed(change: impl FnOnce(&mut Value)) -> Vec<u8> {
    let mut value = value_of(&small().files(None).unwrap(), "tokenizer.json");
    change(&mut value);
    value.to_string().into_bytes()
}

#[test]
fn truncation_padding_and_dropout_are_information_only() {
    let bytes = changed(|value| {
        value["truncation"] = json!({"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0});
        value["padding"] = json!({"strategy": {"Fixed": 20}, "direction": "Right", "pad_to_multiple_of": null,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"});
    });
    let tokenizer = open(&[("tokenizer.json", &bytes)]).unwrap();
    assert_eq!(tokenizer.configured_truncation(), Some(3));
    assert_eq!(tokenizer.encode("Jim Henson was a puppeteer.").unwrap().len(), 9);
    assert_eq!(tokenizer.max_length(), None);
    let saved = value_of(&tokenizer.files(None).unwrap(), "tokenizer.json");
    assert_eq!((&saved["truncation"], &saved["padding"]), (&Value::Null, &Value::Null));

    let mut value = value_of(&GPT2.files(None).unwrap(), "tokenizer.json");
    value["model"]["dropout"] = json!(0.9);
    let tokenizer = open(&[("tokenizer.json", value.to_string().as_bytes())]).unwrap();
    assert_eq!(tokenizer.configured_dropout(), Some(0.9));
    let text = "puppeteers puppeteering";
    assert_eq!(tokenizer.encode(text).unwrap(), GPT2.encode(text).unwrap());
}

#[test]
fn a_configuration_overrules_the_normalizer() {
    let bytes = changed(|_| {});
    let with = |config: &[u8]| open(&[("tokenizer.json", &bytes), ("tokenizer_config.json", config)]).unwrap();
    assert_eq!(with(br#"{"do_lower_case": false}"#).encode("Jim jim").unwrap().ids, [1, 5]);
    assert_eq!(with(br#"{"do_lower_case": false}"#).lowercase(), Some(false));
    // What is not said changes nothing, and generic classes do not look.
    assert_eq!(with(br#"{}"#).lowercase(), Some(true));
    let generic = br#"{"do_lower_case": false, "tokenizer_class": "PreTrainedTokenizerFast"}"#;
    assert_eq!(with(generic).lowercase(), Some(true));
}

#[test]
fn a_missing_post_processor_is_replaced_and_saved() {
    let tokenizer = open(&[("tokenizer.json", &changed(|value| value["post_processor"] = Value::Null))]).unwrap();
    assert_eq!(tokenizer.template(), small().template());
    let saved = value_of(&tokenizer.files(None).unwrap(), "tokenizer.json");
    assert_eq!(saved["post_processor"]["type"], "TemplateProcessing");
}

#[test]
fn older_post_processors_are_understood() {
    let bert = json!({"type": "BertProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2]});
    let tokenizer = open(&[("tokenizer.json", &changed(|value| value["post_processor"] = bert.clone()))]).unwrap();
    assert_eq!(tokenizer.template(), small().template());
    let sequence = json!({"type": "Sequence", "processors": [
        {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false, "use_regex": true}, bert]});
    let tokenizer = open(&[("tokenizer.json", &changed(|value| value["post_processor"] = sequence))]).unwrap();
    assert_eq!(tokenizer.template(), small().template());
}

#[test]
fn missing_files() {
    let empty = directory(&[]);
    let path = empty.path().display().to_string();
    assert_error(
        Tokenizer::open(empty.path()),
        &["no tokenizer in", &path, "tokenizer.json", "vocab.txt", "vocab.json with merges.txt", "copy them"],
    );
    assert_error(Tokenizer::open(&empty.path().join("nowhere")), &["nowhere", "does not exist"]);
    assert_error(open(&[("spiece.model", b"x")]), &["spiece.model", "names a family", "AlbertTokenizer"]);
    assert_error(open(&[("vocab.json", b"{}")]), &["has vocab.json but no merges.txt", "copy merges.txt"]);
    assert_error(open(&[("merges.txt", b"")]), &["has merges.txt but no vocab.json"]);
    let file = directory(&[("vocab.txt", SMALL.as_bytes())]);
    assert_error(
        Tokenizer::open(&file.path().join("vocab.txt")),
        &["vocab.txt is not a directory", "the directory that holds"],
    );
    assert_error(
        Tokenizer::from_vocab_txt(&empty.path().join("v.txt"), &WordPieceOptions::default()),
        &["cannot read", "v.txt"],
    );
}

#[test]
fn tokens_as_people_read_them() {
    let readable = |tokenizer: &Tokenizer, token: &str| tokenizer.readable(tokenizer.id(token).unwrap()).unwrap();
    let read: Vec<String> = ["\u{120}the", "ing", "\u{120}caf\u{c3}\u{a9}", "\u{c3}", "<mask>", "\u{10a}"]
        .map(|token| readable(&ROBERTA, token))
        .to_vec();
    assert_eq!(read, [" the", "ing", " caf\u{e9}", "\u{c3}", "<mask>", "\n"]);
    assert_eq!([readable(&small(), "##son"), readable(&small(), "[MASK]")], ["##son", "[MASK]"]);
    assert!(ROBERTA.heeds_leading_space() && !UNCASED.heeds_leading_space());
}

#[test]
fn broken_vocabularies() {
    let vocabulary = |text: &[u8]| open(&[("vocab.txt", text)]);
    assert_error(vocabulary(b""), &["vocab.txt has no tokens"]);
    assert_error(vocabulary(b"a\nb\n\nc\n"), &["vocab.txt", "line 3", "empty line"]);
    assert_error(vocabulary(b"[UNK]\na\nb\na\n"), &["token \"a\" has two ids, 1 and 3", "remove one"]);
    assert_error(vocabulary(b"a\nb\n"), &["vocab.txt", "\"[UNK]\"", "no such token"]);
    assert_error(vocabulary(b"[UNK]\nab\xff\n"), &["vocab.txt is not UTF-8 at line 2, byte 3"]);
    let path = data("bert-base-uncased.vocab.txt.gz");
    assert_error(Tokenizer::from_vocab_txt(&path, &WordPieceOptions::default()), &["is not UTF-8 at line 1"]);
}

#[test]
fn broken_byte_pairs() {
    let letters: String = serde_json::from_slice::<Value>(&unpacked("gpt2.vocab.json"))
        .unwrap()
        .as_object()
        .unwrap()
        .keys()
        .filter(|token| token.chars().count() == 1)
        .enumerate()
        .map(|(id, token)| format!("{}: {id}, ", json!(token)))
        .collect();
    let pair = |extra: &str, merges: &[u8]| {
        let vocabulary = format!("{{{letters}{extra}}}");
        open(&[("vocab.json", vocabulary.as_bytes()), ("merges.txt", merges)])
    };
    let good = pair("\"he\": 256", b"#version: 0.2\nh e\n\n").unwrap();
    assert_eq!(good.encode("he").unwrap().ids, [256]);
    assert_error(pair("\"he\": 256", b"h e\nhe\n"), &["merges.txt", "line 2", "two tokens with a space between"]);
    assert_error(pair("\"he\": 256", b"h e\nhe he\n"), &["merges.txt", "line 2", "\"hehe\" in the vocabulary"]);
    assert_error(pair("\"he\": 7", b""), &["vocab.json", "both have id 7"]);
    assert_error(pair("\"he\": 256, \"he\": 257", b""), &["token \"he\" has two ids, 256 and 257"]);
    assert_error(pair("\"he\": -1", b""), &["vocab.json cannot be parsed at line 1"]);
    assert_error(pair("\"he\": 99999999", b""), &["\"he\"", "an id below 16777216", "99999999"]);
    let few = open(&[("vocab.json", br#"{"a": 0, "b": 1}"#), ("merges.txt", b"")]);
    assert_error(few, &["vocab.json", "each of the 256 bytes", "254 bytes without one"]);
    assert_error(open(&[("vocab.json", b"{}"), ("merges.txt", b"")]), &["vocab.json has no tokens"]);
    assert_error(
        open(&[("vocab.json", b"[1"), ("merges.txt", b"")]),
        &["vocab.json cannot be parsed at line 1, column"],
    );
}

#[test]
fn broken_configurations() {
    let config = |text: &[u8]| open(&[("vocab.txt", SMALL.as_bytes()), ("tokenizer_config.json", text)]);
    assert_error(
        config(b"{\n  \"a\": }"),
        &["tokenizer_config.json cannot be parsed at line 2, column 8", "complete?"],
    );
    assert_error(config(b"[]"), &["tokenizer_config.json", "a JSON object"]);
    assert_error(config(br#"{"do_lower_case": "no"}"#), &["do_lower_case", "expected true or false", "\"no\""]);
    assert_error(config(br#"{"model_max_length": -5}"#), &["model_max_length", "a positive number", "-5"]);
    assert_error(config(br#"{"cls_token": 3}"#), &["cls_token", "a token", "3"]);
    assert_error(config(br#"{"do_basic_tokenize": false}"#), &["do_basic_tokenize", "not supported"]);
    assert_error(
        config(br#"{"tokenizer_class": "BertJapaneseTokenizer"}"#),
        &["tokenizer_config.json", "BertJapaneseTokenizer", "vocab.txt", "save_pretrained"],
    );
    let vocabulary = unpacked("gpt2.vocab.json");
    let merges = unpacked("byte-pair.merges.txt");
    let clip = open(&[
        ("vocab.json", &vocabulary),
        ("merges.txt", &merges),
        ("tokenizer_config.json", br#"{"tokenizer_class": "CLIPTokenizerFast"}"#),
    ]);
    assert_error(clip, &["CLIPTokenizerFast", "vocab.json"]);
}

#[test]
fn a_prefix_space_on_request() {
    let files = directory(&[
        ("vocab.json", &unpacked("roberta-base.vocab.json")),
        ("merges.txt", &unpacked("byte-pair.merges.txt")),
    ]);
    let options = BytePairOptions { add_prefix_space: true, ..BytePairOptions::default() };
    let (vocabulary, merges) = (files.path().join("vocab.json"), files.path().join("merges.txt"));
    let tokenizer = Tokenizer::from_byte_pair_files(&vocabulary, &merges, &options).unwrap();
    assert_eq!(tokenizer.encode("the").unwrap().ids, ROBERTA.encode(" the").unwrap().ids);
    assert_eq!(value_of(&tokenizer.files(None).unwrap(), "tokenizer_config.json")["add_prefix_space"], true);
}

/// More than this, and the matcher behind byte-level splitting would leave the rest of the text in one piece.
#[test]
fn endless_white_space() {
    let text = |count: usize| format!("{}the end", " ".repeat(count));
    assert_eq!(GPT2.encode(&text(500_000)).unwrap().words.last(), Some(&Some(2)));
    assert_error(GPT2.encode(&text(500_001)), &["more than 500000 white space characters in a row", "shorten"]);
    assert_error(GPT2.encode_ids(&text(500_001)), &["in a row"]);
    assert_error(GPT2.words(&text(500_001)), &["in a row"]);
    assert_eq!(UNCASED.encode(&text(500_001)).unwrap().ids, [1996, 2203]);
}

#[test]
fn unknown_ids_are_not_decoded() {
    assert_error(small().decode(&[5, 99], false), &["no token has id 99", "below 14"]);
    assert_eq!(small().decode(&[2, 5, 6, 7, 3], true).unwrap(), "jim henson");
    assert_eq!(small().decode(&[2, 5, 3], false).unwrap(), "[CLS] jim [SEP]");
}

#[test]
fn tokenizers_are_shared_between_threads() {
    fn shareable<T: Send + Sync + Clone + 'static>() {}
    shareable::<Tokenizer>();
    let text = "Jim Henson was a puppeteer.";
    let expected = UNCASED.encode(text).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| assert_eq!(UNCASED.encode(text).unwrap(), expected));
        }
    });
}
