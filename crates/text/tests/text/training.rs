//! Tokenizers trained from text: the same text gives the same bytes, and what is trained works like any other.

use std::ops::ControlFlow;
use std::sync::LazyLock;

use henson_text::{
    Kind, Slot, SpecialSet, TextError, Tokenizer, Trained, TrainingKind, TrainingProgress, TrainingSettings, train,
};
use proptest::prelude::*;

use crate::support::{assert_error, directory};

pub(crate) static NOVELS: LazyLock<String> = LazyLock::new(|| {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests-data/text/novels.txt");
    let text = std::fs::read_to_string(path).unwrap();
    // A fifth of it is enough to see everything, and fast.
    text[..text.floor_char_boundary(text.len() / 5)].to_owned()
});

const KINDS: [TrainingKind; 4] =
    [TrainingKind::WordPiece, TrainingKind::Bpe, TrainingKind::ByteBpe, TrainingKind::Unigram];

fn trained_on(settings: &TrainingSettings, blocks: &[&str]) -> Result<Trained, TextError> {
    train(
        settings,
        blocks.iter().map(|&block| Ok::<_, TextError>(block.to_owned())),
        &mut |_| ControlFlow::Continue(()),
    )
}

pub(crate) fn novel_tokenizer(kind: TrainingKind) -> &'static Tokenizer {
    static ALL: LazyLock<Vec<Tokenizer>> = LazyLock::new(|| {
        let train = |kind| trained_on(&TrainingSettings::new(kind, 900), &[&NOVELS]).unwrap().tokenizer;
        KINDS.map(train).into()
    });
    &ALL[KINDS.iter().position(|&other| other == kind).unwrap()]
}

#[test]
fn the_same_text_gives_the_same_bytes() {
    let by_line: Vec<&str> = NOVELS.split_inclusive('\n').collect();
    let third = NOVELS[..NOVELS.len() / 3].rfind('\n').unwrap() + 1;
    let in_two = [&NOVELS[..third], &NOVELS[third..]];
    for kind in KINDS {
        let expected = novel_tokenizer(kind).files(None).unwrap();
        for (threads, blocks) in [(1, &[NOVELS.as_str()][..]), (2, &by_line), (3, &in_two), (5, &[&NOVELS])] {
            let trained =
                trained_on(&TrainingSettings { threads, ..TrainingSettings::new(kind, 900) }, blocks).unwrap();
            assert_eq!(trained.tokenizer.files(None).unwrap(), expected, "{kind:?} with {threads} threads");
            assert_eq!(trained.report.vocabulary_size, 900);
            assert_eq!(trained.report.lines, by_line.len() as u64);
        }
    }
}

#[test]
fn what_is_written_can_be_read() {
    for kind in KINDS {
        for cased in [false, true] {
            let lowercase = !cased && kind != TrainingKind::ByteBpe;
            let settings = TrainingSettings { lowercase, ..TrainingSettings::new(kind, 500) };
            let tokenizer = trained_on(&settings, &[&NOVELS]).unwrap().tokenizer;
            let files = tokenizer.files(Some(128)).unwrap();
            let names: Vec<&str> = files.iter().map(|(name, _)| name.as_str()).collect();
            let plain: &[&str] = match kind {
                TrainingKind::WordPiece => &["vocab.txt"],
                TrainingKind::ByteBpe => &["vocab.json", "merges.txt"],
                TrainingKind::Bpe | TrainingKind::Unigram => &[],
            };
            assert_eq!(names[3..], *plain);
            let borrowed: Vec<(&str, &[u8])> =
                files.iter().map(|(name, bytes)| (name.as_str(), bytes.as_slice())).collect();
            let opened = Tokenizer::open(directory(&borrowed).path()).unwrap();
            assert_eq!(opened.files(None).unwrap(), files, "{kind:?}");
            assert_eq!((opened.lowercase(), opened.max_length()), (Some(lowercase), Some(128)));
            for text in [
                "Mary said: \"It's a Garden!\"",
                "",
                "  na\u{ef}ve \u{4e2d}\u{6587} \u{1f642}\u{200b}x ",
                "[MASK]<mask>",
            ] {
                assert_eq!(opened.encode(text).unwrap(), tokenizer.encode(text).unwrap());
            }
            // The plain files alone say the same.
            if !plain.is_empty() {
                let opened = Tokenizer::open(directory(&borrowed[1..]).path()).unwrap();
                let text = "Mary said: \"It's a Garden!\" <mask>";
                assert_eq!(opened.encode(text).unwrap(), tokenizer.encode(text).unwrap());
            }
        }
    }
}

#[test]
fn special_tokens_and_templates() {
    for kind in KINDS {
        let tokenizer = novel_tokenizer(kind);
        let special = tokenizer.special();
        let id = |special: &Option<henson_text::Special>| special.as_ref().unwrap().id;
        let ids = [&special.pad, &special.unk, &special.cls, &special.sep, &special.mask].map(id);
        let special_slot = |id| Slot::Special { id, segment: 0 };
        let single = [special_slot(ids[2]), Slot::First { segment: 0 }, special_slot(ids[3])];
        assert_eq!(tokenizer.template().single_slots(), single);
        let segments: Vec<u32> = tokenizer
            .template()
            .pair_slots()
            .iter()
            .map(|slot| match *slot {
                Slot::Special { segment, .. } | Slot::First { segment } | Slot::Second { segment } => segment,
            })
            .collect();
        match kind {
            TrainingKind::ByteBpe => {
                assert_eq!(ids, [1, 3, 0, 2, 4]);
                assert_eq!(segments, [0; 6], "RoBERTa's has one segment and two separators");
                // The mask takes the space before it along.
                assert_eq!(tokenizer.encode("the <mask>").unwrap().ids.last(), Some(&4));
                assert!((0..=255_u8).all(|byte| tokenizer.encode(&char::from(byte).to_string()).is_ok()));
            }
            _ => {
                assert_eq!(ids, [0, 1, 2, 3, 4]);
                assert_eq!(segments, [0, 0, 0, 1, 1]);
            }
        }
        // A special string that is not to be recognised is text like any other.
        let mask = special.mask.clone().unwrap();
        assert_eq!(tokenizer.encode(&mask.text).unwrap().ids, [mask.id]);
        let strict = tokenizer.clone().recognise_special_strings(false);
        assert!(!strict.encode(&mask.text).unwrap().ids.contains(&mask.id), "{kind:?}");
    }
}

/// Special tokens of models that write: GPT-2's, T5's with its sentinels, and both again from their files.
#[test]
fn special_tokens_of_writers() {
    let end = |id| Slot::Special { id, segment: 0 };
    let text = Slot::First { segment: 0 };
    for (kind, specials, sentinels, single, ends) in [
        (TrainingKind::ByteBpe, SpecialSet::EndOfText, 0, vec![text], 0),
        (TrainingKind::Unigram, SpecialSet::Ended, 10, vec![text, end(1)], 1),
        (TrainingKind::Bpe, SpecialSet::Ended, 3, vec![text, end(1)], 1),
        (TrainingKind::ByteBpe, SpecialSet::Ended, 1, vec![text, end(1)], 1),
    ] {
        let settings = TrainingSettings { specials, sentinels, ..TrainingSettings::new(kind, 700) };
        let tokenizer = trained_on(&settings, &[&NOVELS]).unwrap().tokenizer;
        let files = tokenizer.files(None).unwrap();
        let borrowed: Vec<(&str, &[u8])> =
            files.iter().map(|(name, bytes)| (name.as_str(), bytes.as_slice())).collect();
        let opened = Tokenizer::open(directory(&borrowed).path()).unwrap();
        for tokenizer in [&tokenizer, &opened] {
            assert_eq!(tokenizer.vocabulary_size(), 700, "{kind:?}");
            assert_eq!(tokenizer.template().single_slots(), single);
            assert_eq!(tokenizer.end_of_text(), Some(ends));
            // They count down from the end of the vocabulary.
            let expected: Vec<u32> = (0..sentinels as u32).map(|number| 699 - number).collect();
            assert_eq!(tokenizer.sentinels(), expected);
            assert!(expected.iter().all(|id| tokenizer.is_special(*id)));
            if sentinels > 0 {
                assert_eq!(tokenizer.id("<extra_id_0>"), Some(699));
                assert!(tokenizer.encode("the <extra_id_0> was").unwrap().ids.contains(&699));
            }
            let said = "Mary said it.";
            let said = if kind == TrainingKind::ByteBpe { said.to_owned() } else { said.to_lowercase() };
            assert_eq!(tokenizer.decode(&tokenizer.encode(&said).unwrap().ids, true).unwrap().replace(" .", "."), said);
        }
    }
    let wrong = TrainingSettings { specials: SpecialSet::EndOfText, ..TrainingSettings::new(TrainingKind::Bpe, 700) };
    assert_error(trained_on(&wrong, &["a\n"]), &["specials", "gpt2", "bert or t5"]);
    let wrong = TrainingSettings { sentinels: 1, ..TrainingSettings::new(TrainingKind::WordPiece, 700) };
    assert_error(trained_on(&wrong, &["a\n"]), &["sentinels", "WordPiece"]);
    let wrong = TrainingSettings { sentinels: 700, ..TrainingSettings::new(TrainingKind::Unigram, 700) };
    assert_error(trained_on(&wrong, &["a\n"]), &["sentinels", "fewer than vocabulary_size"]);
}

#[test]
fn common_words_are_whole_and_unknown_letters_are_unknown() {
    for (kind, whole) in [
        (TrainingKind::WordPiece, "was"),
        (TrainingKind::Bpe, "was</w>"),
        (TrainingKind::ByteBpe, "\u{120}was"),
        (TrainingKind::Unigram, "\u{2581}was"),
    ] {
        let tokenizer = novel_tokenizer(kind);
        let pieces = tokenizer.encode("I was \u{2603}").unwrap();
        assert_eq!(tokenizer.token(pieces.ids[1]).as_deref(), Some(whole));
        let unknown = tokenizer.special().unk.as_ref().map(|unknown| unknown.id);
        assert_eq!(pieces.ids.last().copied() == unknown, kind != TrainingKind::ByteBpe);
    }
    assert_eq!(novel_tokenizer(TrainingKind::Unigram).kind(), Kind::Unigram);
    assert_eq!(novel_tokenizer(TrainingKind::Bpe).kind(), Kind::BytePair);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// Bytes lose nothing; the others give back words in lower case with single spaces.
    #[test]
    fn decoding_gives_the_text_back(text in "\\PC{0,30}", words in prop::collection::vec("[a-pA-P]{1,9}", 0..9)) {
        let bytes = novel_tokenizer(TrainingKind::ByteBpe).clone().recognise_special_strings(false);
        prop_assert_eq!(bytes.decode(&bytes.encode(&text).unwrap().ids, false).unwrap(), text);
        let spaced = words.join("  ");
        for kind in [TrainingKind::WordPiece, TrainingKind::Bpe, TrainingKind::Unigram] {
            let tokenizer = novel_tokenizer(kind);
            let decoded = tokenizer.decode(&tokenizer.encode(&spaced).unwrap().ids, false).unwrap();
            prop_assert_eq!(decoded, words.join(" ").to_lowercase(), "{:?}", kind);
        }
    }
}

#[test]
fn what_makes_no_sense_is_refused() {
    let settings = |kind, size| TrainingSettings::new(kind, size);
    for kind in KINDS {
        for blocks in [&[][..], &[""], &["\n\n", "\n"]] {
            assert_error(trained_on(&settings(kind, 1000), blocks), &["nothing to learn from"]);
        }
        assert_error(trained_on(&settings(kind, 7), &["some words\n"]), &["vocabulary of 7 is too small", "5 special"]);
        assert_error(trained_on(&settings(kind, usize::MAX), &["a\n"]), &["vocabulary_size", "at most"]);
        let no_threads = TrainingSettings { threads: 0, ..settings(kind, 1000) };
        assert_error(trained_on(&no_threads, &["a\n"]), &["threads", "at least 1"]);
    }
    let lower = TrainingSettings { lowercase: true, ..settings(TrainingKind::ByteBpe, 1000) };
    assert_error(trained_on(&lower, &["a\n"]), &["lowercase", "byte-level"]);
    let few = TrainingSettings { distinct_limit: 2, ..settings(TrainingKind::Bpe, 99) };
    assert_error(trained_on(&few, &["all once only here"]), &["distinct_limit", "no word is more frequent", "2"]);
    // White space and control characters alone are no words either.
    assert_error(
        trained_on(&settings(TrainingKind::WordPiece, 99), &[" \t\r\u{0}\u{7}\u{a0}\n"]),
        &["nothing to learn"],
    );
    assert_error(
        trained_on(&settings(TrainingKind::Unigram, 99), &[" \t\r\u{7}\u{200b}\u{a0}\n"]),
        &["nothing to learn"],
    );
}

#[test]
fn little_text_gives_few_pieces() {
    for kind in KINDS {
        let trained = trained_on(&TrainingSettings::new(kind, 30_000), &["one two two\nthree three three"]).unwrap();
        assert!(trained.report.vocabulary_size < 400, "{kind:?}: {:?}", trained.report);
        assert_eq!(trained.report.words, 6);
        assert_eq!(trained.tokenizer.vocabulary_size(), trained.report.vocabulary_size);
    }
    // The rarest letters go, and are counted.
    let few = TrainingSettings { alphabet_limit: 3, ..TrainingSettings::new(TrainingKind::WordPiece, 100) };
    let trained = trained_on(&few, &["ααα βββ γγ δ ε a"]).unwrap();
    assert_eq!((trained.report.characters, trained.report.dropped_characters), (6, 2));
    assert_eq!((trained.tokenizer.id("δ"), trained.tokenizer.id("a").is_some()), (None, true));
}

#[test]
fn the_caller_can_stop_and_fail() {
    let settings = TrainingSettings::new(TrainingKind::Unigram, 600);
    let mut seen = Vec::new();
    let stopped = train(&settings, [Ok::<_, TextError>(NOVELS.clone())], &mut |progress| {
        seen.push(progress);
        if matches!(progress, TrainingProgress::Learning { done: 2, .. }) {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    });
    assert!(matches!(stopped, Err(TextError::Stopped)));
    assert!(
        seen.iter().all(|progress| matches!(progress, TrainingProgress::Learning { done, of } if done <= of)),
        "{seen:?}"
    );

    /// What a caller's reader may fail with.
    #[derive(Debug)]
    enum ReaderError {
        Broken,
        Text(TextError),
    }
    impl From<TextError> for ReaderError {
        fn from(error: TextError) -> Self {
            Self::Text(error)
        }
    }
    let go_on = &mut |_| ControlFlow::Continue(());
    let broken = train(&settings, [Ok(NOVELS.clone()), Err(ReaderError::Broken)], go_on);
    assert!(matches!(broken, Err(ReaderError::Broken)));
    let empty = train(&settings, [Ok::<_, ReaderError>(String::new())], go_on);
    assert!(matches!(empty, Err(ReaderError::Text(TextError::NoWords))));
}

#[test]
fn ascii_is_always_kept() {
    // Signs that are rare, beyond the limit of the alphabet, or not in the text at all.
    let text = "abcabc defdef ghighi\n".repeat(50) + "if (x < 3) { y } \n";
    let printable: String = ('!'..='~').collect();
    for kind in [TrainingKind::WordPiece, TrainingKind::Bpe, TrainingKind::ByteBpe, TrainingKind::Unigram] {
        for cased in [false, true] {
            let lowercase = !cased && kind != TrainingKind::ByteBpe;
            let settings = TrainingSettings { lowercase, alphabet_limit: 4, ..TrainingSettings::new(kind, 700) };
            let tokenizer = trained_on(&settings, &[&text]).unwrap().tokenizer;
            let unknown = tokenizer.special().unk.as_ref().map(|unk| unk.id);
            for c in printable.chars() {
                for text in [c.to_string(), format!("a{c}"), format!("a{c}b"), format!("{c}{c}{c}")] {
                    let ids = tokenizer.encode(&text).unwrap().ids;
                    assert!(!ids.is_empty() && !ids.iter().any(|id| Some(*id) == unknown), "{kind:?}: {text}");
                }
            }
        }
    }
    // Where there is no room, what the text has comes first.
    let settings = TrainingSettings { alphabet_limit: 4, ..TrainingSettings::new(TrainingKind::WordPiece, 60) };
    let tokenizer = trained_on(&settings, &[&text]).unwrap().tokenizer;
    assert!(tokenizer.id("<").is_some() && tokenizer.id("z").is_none());
}

/// XLNet's layout: `a [SEP] [CLS]`, the last in a segment of its own, also after the files were read again.
#[test]
fn special_tokens_behind_the_text() {
    let settings =
        TrainingSettings { specials: SpecialSet::XlNet, ..TrainingSettings::new(TrainingKind::Unigram, 300) };
    let trained = trained_on(&settings, &[&NOVELS]).unwrap().tokenizer;
    let files = trained.files(None).unwrap();
    let files: Vec<(&str, &[u8])> = files.iter().map(|(name, bytes)| (name.as_str(), bytes.as_slice())).collect();
    for tokenizer in [&trained, &Tokenizer::open(directory(&files).path()).unwrap()] {
        let [first, second] = ["one", "two three"].map(|text| tokenizer.encode(text).unwrap());
        let (a, b) = (first.len(), second.len());
        let pair = tokenizer.template().pair(&first, &second, 64).unwrap();
        assert_eq!(pair.ids, [&first.ids[..], &[4], &second.ids, &[4, 3]].concat());
        assert_eq!(pair.segments, [vec![0; a + 1], vec![1; b + 1], vec![2]].concat());
        let single = tokenizer.template().single(&first, 64).unwrap();
        assert_eq!(
            (single.ids, single.segments),
            ([&first.ids[..], &[4, 3]].concat(), [vec![0; a + 1], vec![2]].concat())
        );
        // What is too long loses text, not its last token.
        let short = tokenizer.template().single(&second, 3).unwrap();
        assert_eq!((short.ids[1..].to_vec(), short.len()), (vec![4, 3], 3));
    }
    let other = TrainingSettings { specials: SpecialSet::XlNet, ..TrainingSettings::new(TrainingKind::WordPiece, 300) };
    let refused = trained_on(&other, &[&NOVELS]).map(|_| ()).unwrap_err().to_string();
    assert!(refused.contains("xlnet"), "{refused}");
}
