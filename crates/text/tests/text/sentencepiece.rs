//! SentencePiece model files against the `sentencepiece` package and `transformers`, and broken ones.
//! `tools/golden/sentencepiece_models.py` made the data, and compares 10,000 lines in the same way.

use std::sync::LazyLock;

use henson_text::{Kind, TextError, Tokenizer};
use serde_json::Value;
use tempfile::TempDir;

use crate::support::{assert_error, data, directory, unpacked};

static GOLDEN: LazyLock<Value> =
    LazyLock::new(|| serde_json::from_slice(&unpacked("sentencepiece/golden.json")).unwrap());

fn model(name: &str) -> Vec<u8> {
    std::fs::read(data(&format!("sentencepiece/{name}.model"))).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn bare(bytes: &[u8]) -> Result<Tokenizer, TextError> {
    let directory = directory(&[("x.model", bytes)]);
    Tokenizer::open(&directory.path().join("x.model"))
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn saved(tokenizer: &Tokenizer) -> (TempDir, Tokenizer) {
    let directory = tempfile::tempdir().unwrap();
    tokenizer.save(directory.path(), None).unwrap();
    let again = Tokenizer::open(directory.path()).unwrap();
    (directory, again)
}

#[test]
fn every_line_has_sentencepieces_ids() {
    let lines = GOLDEN["lines"].as_array().unwrap();
    for (name, all) in GOLDEN["ids"].as_object().unwrap() {
        let tokenizer = bare(&model(name)).unwrap();
        let kind = if name.starts_with("bpe") { Kind::BytePair } else { Kind::Unigram };
        assert_eq!(tokenizer.kind(), kind, "{name}");
        // A tokenizer.json cannot put the sign for a space after words.
        let again = (name != "bpe-suffix").then(|| saved(&tokenizer).1);
        let mut encoder = tokenizer.encoder();
        for (line, expected) in lines.iter().zip(all.as_array().unwrap()) {
            let (line, expected) = (line.as_str().unwrap(), ids(expected));
            let pieces = tokenizer.encode(line).unwrap();
            assert_eq!(pieces.ids, expected, "{name}: {line:?}");
            let mut fast = Vec::new();
            encoder.encode(line, &mut fast).unwrap();
            assert_eq!(fast, expected, "{name}: {line:?}");
            if let Some(again) = &again {
                assert_eq!(again.encode_ids(line).unwrap(), expected, "{name} saved: {line:?}");
            }
            let in_order = pieces.offsets.windows(2).all(|pair| pair[0].1 <= pair[1].1);
            assert!(in_order && pieces.offsets.iter().all(|&(a, b)| line.get(a..b).is_some()), "{name}: {line:?}");
        }
    }
    let suffix = bare(&model("bpe-suffix")).unwrap();
    assert_error(suffix.files(None), &["cannot put the sign for a space after words"]);
}

#[test]
fn families_give_transformers_ids() {
    for (family, golden) in GOLDEN["families"].as_object().unwrap() {
        let bytes = model(golden["model"].as_str().unwrap());
        let config = golden["config"].to_string();
        let file = golden["file"].as_str().unwrap();
        let place = directory(&[(file, &bytes), ("tokenizer_config.json", config.as_bytes())]);
        let tokenizer = Tokenizer::open(place.path()).unwrap_or_else(|error| panic!("{family}: {error}"));
        let (saved_to, again) = saved(&tokenizer);
        assert_eq!(std::fs::read(saved_to.path().join(file)).unwrap(), bytes, "{family}");
        for tokenizer in [&tokenizer, &again] {
            assert_eq!(tokenizer.vocabulary_size(), golden["size"].as_u64().unwrap() as usize, "{family}");
            for (role, special) in tokenizer.special().by_role() {
                let expected = &golden["special"][role.strip_suffix("_token").unwrap()];
                // T5 has no separator of its own; its end of a text does as one.
                if !expected.is_null() {
                    assert_eq!(
                        (expected[0].as_str(), expected[1].as_u64()),
                        (Some(&*special.text), Some(u64::from(special.id)))
                    );
                }
            }
            for entry in golden["ids"].as_array().unwrap() {
                let text = entry[0].as_str().unwrap();
                let features = tokenizer.template().single(&tokenizer.encode(text).unwrap(), 1000).unwrap();
                assert_eq!(features.ids, ids(&entry[1]), "{family}: {text:?}");
            }
            let [first, second] = ["Jim Henson", "a puppeteer"].map(|text| tokenizer.encode(text).unwrap());
            let features = tokenizer.template().pair(&first, &second, 1000).unwrap();
            assert_eq!(features.ids, ids(&golden["pair"]), "{family}");
            // transformers gives segments to those families whose models have them.
            if ["albert", "deberta", "xlnet"].iter().any(|name| family.starts_with(name)) {
                assert_eq!(features.segments, ids(&golden["segments"]), "{family}");
            }
        }
    }
}

#[test]
fn the_family_is_found_by_class_or_model_type() {
    let albert = model("albert");
    let open = |files: &[(&str, &[u8])]| Tokenizer::open(directory(files).path());
    let tokenizer = open(&[("spiece.model", &albert), ("config.json", br#"{"model_type": "albert"}"#)]).unwrap();
    assert_eq!(tokenizer.special().mask.as_ref().unwrap().text, "[MASK]");
    assert_eq!(tokenizer.lowercase(), Some(true));
    // The class has the last word: XLM-R's tokenizer with a BERT.
    let config: &[u8] = br#"{"tokenizer_class": "XLMRobertaTokenizerFast"}"#;
    let bert: &[u8] = br#"{"model_type": "bert"}"#;
    let files =
        [("sentencepiece.bpe.model", &*model("unigram")), ("tokenizer_config.json", config), ("config.json", bert)];
    assert_eq!(open(&files).unwrap().special().pad.as_ref().unwrap().id, 1);

    let known = ["AlbertTokenizer", "XLMRobertaTokenizer", "CamembertTokenizer", "DebertaV2Tokenizer", "T5Tokenizer"];
    assert_error(
        open(&[("spiece.model", &albert)]),
        &["spiece.model", "neither tokenizer_config.json nor config.json"],
    );
    assert_error(open(&[("spiece.model", &albert)]), &known);
    let unknown = open(&[("spm.model", &albert), ("config.json", bert)]);
    assert_error(unknown, &["spm.model", "model_type \"bert\"", "save_pretrained"]);
    let config: &[u8] = br#"{"tokenizer_class": "MarianTokenizer"}"#;
    let unknown = open(&[("spm.model", &albert), ("tokenizer_config.json", config)]);
    assert_error(unknown, &["names MarianTokenizer", "XLNetTokenizer (XLNet)"]);
}

#[test]
fn files_that_do_not_fit_their_family() {
    let open = |name: &str, config: &str| {
        Tokenizer::open(directory(&[("spm.model", &model(name)), ("tokenizer_config.json", config.as_bytes())]).path())
    };
    let xlm_roberta = r#"{"tokenizer_class": "XLMRobertaTokenizer"}"#;
    assert_error(open("albert", xlm_roberta), &["spm.model", "piece 0", "\"<unk>\", as XLM-R has it", "<pad>"]);
    let deberta = r#"{"tokenizer_class": "DebertaV2Tokenizer", "split_by_punct": true}"#;
    assert_error(open("deberta", deberta), &["tokenizer_config.json: split_by_punct", "not supported"]);
    assert_error(
        open("albert", r#"{"tokenizer_class": "DebertaV2Tokenizer"}"#),
        &["the unknown piece", "\"[UNK]\", the unk_token", "<unk>"],
    );
    assert_error(open("t5", r#"{"tokenizer_class": "T5Tokenizer", "extra_ids": -1}"#), &["extra_ids", "65536"]);
    assert_error(open("albert", r#"{"tokenizer_class": "AlbertTokenizer", "keep_accents": 1}"#), &["keep_accents"]);
    let moved = r#"{"tokenizer_class": "AlbertTokenizer", "added_tokens_decoder": {"7": {"content": "[MASK]"}}}"#;
    assert_error(open("albert", moved), &["[MASK]", "should have id 7"]);
}

#[test]
fn offsets_and_words_point_into_the_text() {
    let tokenizer = bare(&model("unigram")).unwrap();
    let text = "  The old bridge, o\u{fb01}ce";
    let pieces = tokenizer.encode(text).unwrap();
    let words = pieces.offsets.iter().zip(&pieces.words).fold(Vec::<String>::new(), |mut words, (&(a, b), word)| {
        words.resize(word.unwrap() as usize + 1, String::new());
        words.last_mut().unwrap().push_str(&text[a..b]);
        words
    });
    assert_eq!(words.join("|").replace("\u{fb01}\u{fb01}", "\u{fb01}"), "The|old|bridge,|o\u{fb01}ce");
    assert_eq!(tokenizer.decode(&pieces.ids, false).unwrap(), "The old bridge, ofice");
    let bytes = bare(&model("bpe-bytes")).unwrap();
    let pieces = bytes.encode("\u{1f642}").unwrap();
    assert_eq!(pieces.ids.len(), 5);
    assert_eq!(bytes.decode(&pieces.ids, false).unwrap(), "\u{1f642}");
}

#[test]
fn a_bare_file_knows_no_special_tokens() {
    let tokenizer = bare(&model("albert")).unwrap();
    assert!(tokenizer.special().cls.is_none() && tokenizer.special().mask.is_none());
    assert_eq!(tokenizer.special().unk.as_ref().map(|special| special.id), Some(1));
    assert_eq!(tokenizer.template().single_specials(), 0);
    let pieces = tokenizer.encode("[CLS] <unk>").unwrap();
    assert!(pieces.len() > 4, "{:?}", pieces.ids);
}

/// A protobuf field of bytes.
fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    let mut field = vec![number << 3 | 2];
    let mut length = bytes.len();
    while length >= 0x80 {
        field.push(length as u8 | 0x80);
        length >>= 7;
    }
    field.push(length as u8);
    field.extend(bytes);
    field
}

fn piece(text: &str, score: f32, kind: u8) -> Vec<u8> {
    let score = [&[2 << 3 | 5][..], &score.to_le_bytes()].concat();
    field(1, &[field(1, text.as_bytes()), score, vec![3 << 3, kind]].concat())
}

fn small() -> Vec<u8> {
    [piece("<unk>", 0.0, 2), piece("\u{2581}", -1.0, 1), piece("a", -2.0, 1), piece("ab", -1.5, 1)].concat()
}

fn trainer(fields: &[u8]) -> Vec<u8> {
    field(2, fields)
}

/// Where sums are equal the first way found stays, and of equal merges the leftmost is made: ids of the package.
#[test]
fn equal_scores() {
    let unigram = [("\u{2581}", -1.0), ("a", -1.0), ("b", -1.0), ("c", -1.0), ("ab", -2.0), ("bc", -2.0)];
    let byte_pair = [("\u{2581}", -9.0), ("a", -9.0), ("aa", -1.0)];
    let model = |kind: u8, pieces: &[(&str, f32)]| {
        let pieces = pieces.iter().flat_map(|(text, score)| piece(text, *score, 1));
        let bytes: Vec<u8> = piece("<unk>", 0.0, 2).into_iter().chain(pieces).chain(trainer(&[0x18, kind])).collect();
        bare(&bytes).unwrap()
    };
    assert_eq!(model(1, &unigram).encode_ids("abc").unwrap(), [1, 2, 6]);
    assert_eq!(model(2, &byte_pair).encode_ids("aaaaa").unwrap(), [1, 3, 3, 2]);
}

#[test]
fn broken_files() {
    assert!(bare(&small()).is_ok());
    let with = |more: &[u8]| bare(&[&small(), more].concat());
    assert_error(bare(b""), &["x.model", "expected pieces", "got none"]);
    assert_error(bare(b"IQ== 0\nIg== 1\n"), &["x.model", "is it a SentencePiece model?"]);
    assert_error(bare(b"<html>404</html>"), &["x.model", "whole SentencePiece model"]);
    assert_error(with(&[0x0a, 0xff, 0xff, 0xff, 0xff, 0x7f]), &["byte", "a field of 34359738367 bytes"]);
    assert_error(with(&[0xff; 11]), &["at most ten bytes"]);
    assert_error(with(&[0x0b]), &["wire type 3"]);
    assert_error(with(&[0x00, 0x00]), &["a field's number", "got 0"]);
    assert_error(with(&[0x08, 0x01]), &["a message"]);
    assert_error(with(&piece("a", 0.0, 1)), &["token \"a\" has two ids, 2 and 4"]);
    assert_error(with(&piece("b", f32::NAN, 1)), &["finite number", "NaN for piece 4"]);
    assert_error(with(&piece("b", f32::NEG_INFINITY, 1)), &["finite number"]);
    assert_error(with(&piece("b", 0.0, 7)), &["type from 1 to 6", "7 for piece 4"]);
    assert_error(with(&piece("", 0.0, 1)), &["piece 4", "1 to 4096 bytes", "0 bytes"]);
    assert_error(with(&piece(&"b".repeat(5000), 0.0, 1)), &["piece 4", "5000 bytes"]);
    assert_error(with(&piece("b", 0.0, 2)), &["piece 4", "one unknown piece"]);
    assert_error(with(&piece("<0x00>", 0.0, 6)), &["piece 4", "byte_fallback is false"]);
    assert_error(with(&field(1, &field(1, &[0xff]))), &["a piece in UTF-8"]);
    assert_error(bare(&piece("a", 0.0, 1)), &["type 2 (unknown)", "none"]);
    // byte_fallback without bytes; words; characters.
    assert_error(with(&trainer(&[0x98, 0x02, 0x01])), &["256 byte pieces", "got 0"]);
    assert_error(with(&trainer(&[0x18, 0x03])), &["unigram", "3 (words)"]);
    assert_error(with(&trainer(&[0x18, 0x04])), &["4 (characters)"]);
    assert_error(with(&trainer(&[0x1a, 0x00])), &["a number"]);
    assert_error(with(&field(5, &field(2, b"x"))), &["denormalizer_spec"]);
    // Many long pieces whose merges nobody would wait for.
    let mut long = trainer(&[0x18, 0x02]);
    (0..300).for_each(|number| long.extend(piece(&format!("{number:04}{}", "x".repeat(4000)), -1.0, 1)));
    assert_error(with(&long), &["squared lengths"]);
}

/// A table of one entry: "b" becomes what stands at `value` in `strings`.
fn table(edit: impl Fn(&mut Vec<u32>), strings: &[u8]) -> Result<Tokenizer, TextError> {
    let mut units = vec![0x0100_0000_u32; 512];
    let letter = u32::from(b'b');
    units[0] = 0;
    units[b'b' as usize] = letter | 1 << 8 | (letter ^ 256) << 10;
    units[256] = 1 << 31;
    edit(&mut units);
    let mut bytes = (units.len() as u32 * 4).to_le_bytes().to_vec();
    bytes.extend(units.iter().flat_map(|unit| unit.to_le_bytes()));
    bytes.extend(strings);
    bare(&[small(), field(3, &field(2, &bytes))].concat())
}

#[test]
fn broken_character_tables() {
    let tokenizer = table(|_| {}, b"a\0").unwrap();
    assert_eq!(tokenizer.encode_ids("b").unwrap(), tokenizer.encode_ids("a").unwrap());
    let label = b'b' as usize;
    // The unit of "b" leads to units far outside, or back to where it came from.
    assert_error(
        table(|units| units[label] = label as u32 | (1 << 20) << 10, b"a\0"),
        &["precompiled_charsmap", "offsets"],
    );
    assert_error(table(|units| units[label] = label as u32 | (label as u32) << 10, b"a\0"), &["without circles"]);
    assert_error(table(|units| units[256] = 1 << 31 | 77, b"a\0"), &["places within the replacements", "77"]);
    assert_error(table(|units| units[256] = 1 << 31 | 1, "\u{e9}\0".as_bytes()), &["between characters"]);
    assert_error(table(|_| {}, b"\xff\0"), &["replacements in UTF-8"]);
    // A chain of more units than any entry has bytes.
    let chain = |units: &mut Vec<u32>| {
        units.resize(256 * 400, 0x0100_0000);
        (0..399_u32).for_each(|block| {
            let place = block * 256 + label as u32;
            units[place as usize] = label as u32 | (place ^ ((block + 1) * 256)) << 10;
        });
    };
    assert_error(table(chain, b"a\0"), &["entries of at most 256 bytes"]);
    let map = |bytes: &[u8]| bare(&[small(), field(3, &field(2, bytes))].concat());
    assert_error(map(&[1, 2]), &["precompiled_charsmap", "four bytes"]);
    assert_error(map(&[255, 255, 255, 255, 0]), &["a trie of units of four bytes"]);
    assert_error(map(&[3, 0, 0, 0, 0, 0, 0, 0]), &["a trie of units", "3 bytes"]);
    assert_error(map(&vec![0; 5 << 20]), &["at most 4194304 bytes"]);
    // A replacement that is no burden once, but is for a long text.
    let long = [&[b'a'; 1500][..], b"\0"].concat();
    let tokenizer = table(|_| {}, &long).unwrap();
    assert!(tokenizer.encode("b").is_ok());
    assert_error(tokenizer.encode(&"b".repeat(100_000)), &["too much work"]);
}

#[test]
fn cut_and_changed_files_give_errors_or_tokenizers() {
    let text = "a b\u{e9}e\u{301} \u{4e2d}\u{1f642} ab <sep2> New York\t";
    for name in ["unigram-rules", "bpe-symbols"] {
        let bytes = model(name);
        for number in 0..150_usize {
            let mut changed = bytes[..bytes.len() - number % 2 * (number * 97 % bytes.len())].to_vec();
            for change in 0..number % 5 {
                let place = (number * 7919 + change * 104_729) % changed.len();
                changed[place] = changed[place].wrapping_add((number * 31 + change) as u8);
            }
            // A panic would end the test; what opens must also encode or refuse.
            if let Ok(tokenizer) = bare(&changed)
                && let Ok(pieces) = tokenizer.encode(text)
            {
                assert!(pieces.offsets.iter().all(|&(start, end)| text.get(start..end).is_some()));
            }
        }
    }
}
