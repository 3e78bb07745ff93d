//! What must hold for every text.

use henson_text::{Tokenizer, code_point_offsets};
use proptest::prelude::*;

use crate::support::{CASED, GPT2, PLAIN_GPT2, ROBERTA, UNCASED};

/// Any characters, and mixtures of the troublesome ones: special strings, accents, spaces, emoji, ligatures, controls.
fn any_text() -> impl Strategy<Value = String> {
    let snippets = prop::sample::select(vec![
        " ",
        "  ",
        "\n",
        "\t",
        "\u{a0}",
        "\u{200b}",
        "\u{0}",
        "\u{fffd}",
        "a",
        "Z",
        "é",
        "e\u{301}",
        "İ",
        "ß",
        "ﬁ",
        "ΑΣ",
        "中",
        "日本",
        "👩‍👩‍👧",
        "🐸",
        "'s",
        "n't",
        "...",
        "#",
        "##",
        "[MASK]",
        "[CLS]",
        "<mask>",
        "</s>",
        "<|endoftext|>",
        "[",
        "]",
        "\u{1e9b}\u{323}",
        "ำ",
        "가",
        "\u{e000}",
        "\u{10ffff}",
        "1234567890",
        "puppeteer",
    ]);
    prop_oneof![
        any::<String>(),
        prop::collection::vec(snippets, 0..24).prop_map(|snippets| snippets.concat()),
        "\\PC{0,40}",
        "[ -~]{0,60}",
    ]
}

fn check(tokenizer: &Tokenizer, text: &str) -> Result<(), TestCaseError> {
    let pieces = tokenizer.encode(text).unwrap();
    prop_assert_eq!(pieces.ids.len(), pieces.offsets.len());
    prop_assert_eq!(pieces.ids.len(), pieces.words.len());
    prop_assert_eq!(&tokenizer.encode_ids(text).unwrap(), &pieces.ids);
    let mut before = (0, 0);
    for &(start, end) in &pieces.offsets {
        prop_assert!(start <= end && end <= text.len(), "{start}..{end} in {text:?}");
        prop_assert!(text.is_char_boundary(start) && text.is_char_boundary(end), "{start}..{end} in {text:?}");
        prop_assert!(before.0 <= start && before.1 <= end, "{before:?} then {start}..{end} in {text:?}");
        before = (start, end);
    }
    prop_assert!(pieces.words.is_sorted());
    prop_assert!(pieces.ids.iter().all(|&id| (id as usize) < tokenizer.vocabulary_size()));
    for (&(start, end), points) in pieces.offsets.iter().zip(code_point_offsets(text, &pieces.offsets)) {
        prop_assert_eq!((text[..start].chars().count(), text[..end].chars().count()), points);
    }
    tokenizer.decode(&pieces.ids, false).unwrap();
    tokenizer.words(text).unwrap();

    let features = tokenizer.template().single(&pieces, 8).unwrap();
    prop_assert!(features.len() <= 8);
    prop_assert_eq!(features.first.len() + features.dropped, pieces.len());
    let windows = tokenizer.template().windows(&pieces, 8, 3).unwrap();
    prop_assert_eq!(windows.last().unwrap().windowed_pieces().end, pieces.len());
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_text_becomes_pieces(text in any_text()) {
        for tokenizer in [&*UNCASED, &*CASED, &*GPT2, &*ROBERTA] {
            check(tokenizer, &text)?;
        }
    }

    /// Byte-level BPE loses nothing.
    #[test]
    fn byte_pairs_decode_to_the_text(text in any_text()) {
        let ids = PLAIN_GPT2.encode(&text).unwrap().ids;
        prop_assert_eq!(PLAIN_GPT2.decode(&ids, false).unwrap(), text);
    }

    /// What WordPiece writes, it reads as the same pieces again (unless there were unknown words in it).
    #[test]
    fn word_pieces_decode_to_the_same_pieces(words in prop::collection::vec("[a-z]{1,9}", 0..12)) {
        let ids = UNCASED.encode(&words.join(" ")).unwrap().ids;
        let decoded = UNCASED.decode(&ids, true).unwrap();
        prop_assert_eq!(UNCASED.encode(&decoded).unwrap().ids, ids);
    }
}
