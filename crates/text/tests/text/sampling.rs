//! Random encodings: their distribution against all possibilities of small vocabularies, and what must hold for each.

use std::collections::BTreeMap;

use henson_text::{Regularisation, Tokenizer, TrainingKind};
use serde_json::{Value, json};

use crate::support::{assert_error, directory};
use crate::training::{NOVELS, novel_tokenizer};

/// A tokenizer that takes its whole text as one word.
fn of_model(model: Value) -> Tokenizer {
    let file = json!({"version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null,
        "post_processor": null, "decoder": null, "model": model});
    Tokenizer::open(directory(&[("tokenizer.json", file.to_string().as_bytes())]).path()).unwrap()
}

const DRAWS: u64 = 20_000;

/// Draws many times and compares with exact probabilities: none is off by more than five deviations, and nothing that
/// cannot be comes.
#[track_caller]
fn check(tokenizer: &Tokenizer, how: Regularisation, word: &str, exact: &BTreeMap<Vec<String>, f64>) {
    assert!((exact.values().sum::<f64>() - 1.0).abs() < 1e-9, "{exact:?}");
    let sampler = tokenizer.sampler(7, how).unwrap();
    let mut counts: BTreeMap<Vec<String>, u64> = BTreeMap::new();
    for number in 0..DRAWS {
        let pieces = sampler.encode(word, number).unwrap();
        let texts = pieces.ids.iter().map(|&id| tokenizer.token(id).unwrap()).collect();
        *counts.entry(texts).or_default() += 1;
    }
    assert!(counts.keys().all(|way| exact.contains_key(way)), "{counts:?} against {exact:?}");
    for (way, &probability) in exact {
        let count = counts.get(way).copied().unwrap_or(0) as f64;
        let expected = probability * DRAWS as f64;
        let deviation = (expected * (1.0 - probability)).sqrt();
        assert!((count - expected).abs() <= 5.0 * deviation + 1e-6, "{way:?}: {count} against {expected} in {how:?}");
    }
}

fn strings(way: &[&str]) -> Vec<String> {
    way.iter().map(|&piece| piece.to_owned()).collect()
}

#[test]
fn unigram_draws_each_way_with_its_probability() {
    let scores = [("a", -2.0), ("b", -2.5), ("c", -3.0), ("ab", -3.2), ("bc", -4.0), ("abc", -5.0), ("aa", -9.0)];
    let mut vocabulary = vec![("<unk>", 0.0)];
    vocabulary.extend(scores);
    let tokenizer = of_model(json!({"type": "Unigram", "unk_id": 0, "vocab": vocabulary}));
    let ways: [&[&str]; 4] = [&["a", "b", "c"], &["ab", "c"], &["a", "bc"], &["abc"]];
    let score = |way: &[&str]| -> f64 {
        way.iter().map(|piece| scores.iter().find(|(text, _)| text == piece).unwrap().1).sum()
    };
    for alpha in [0.0, 0.3, 1.0, 3.0] {
        let total: f64 = ways.iter().map(|way| (alpha * score(way)).exp()).sum();
        let exact = ways.iter().map(|way| (strings(way), (alpha * score(way)).exp() / total)).collect();
        check(&tokenizer, Regularisation::Sampling { alpha }, "abc", &exact);
    }
    // Neighbouring unknown characters are one piece, as in plain encoding; others never become unknown.
    let sampler = tokenizer.sampler(1, Regularisation::Sampling { alpha: 0.1 }).unwrap();
    for number in 0..200 {
        let pieces = sampler.encode("xya", number).unwrap();
        assert_eq!((&pieces.ids[..], &pieces.offsets[..]), (&[0, 1][..], &[(0, 2), (2, 3)][..]));
    }
    assert_eq!(tokenizer.encode("xya").unwrap(), sampler.encode("xya", 0).unwrap());
}

/// BPE-dropout by its definition: of the possible merges, best first, each is dropped or made.
fn dropout_ways(
    pieces: Vec<String>,
    merges: &[(&str, &str)],
    dropout: f64,
    weight: f64,
    ways: &mut BTreeMap<Vec<String>, f64>,
) {
    let mut possible = Vec::new();
    for (rank, merge) in merges.iter().enumerate() {
        for place in 0..pieces.len().saturating_sub(1) {
            if (pieces[place].as_str(), pieces[place + 1].as_str()) == *merge {
                possible.push((rank, place));
            }
        }
    }
    possible.sort_unstable();
    let mut left = weight;
    for (_, place) in possible {
        let mut merged = pieces.clone();
        let right = merged.remove(place + 1);
        merged[place].push_str(&right);
        dropout_ways(merged, merges, dropout, left * (1.0 - dropout), ways);
        left *= dropout;
    }
    *ways.entry(pieces).or_default() += left;
}

#[test]
fn byte_pairs_drop_merges() {
    let merges = [("a", "b"), ("a", "a"), ("b", "a"), ("ab", "a"), ("aa", "ab"), ("ab", "ab"), ("aba", "b")];
    let mut texts = vec!["[UNK]".to_owned(), "a".to_owned(), "b".to_owned()];
    texts.extend(merges.iter().map(|(left, right)| format!("{left}{right}")));
    texts.dedup();
    let mut vocabulary = serde_json::Map::new();
    for text in texts {
        let id = vocabulary.len();
        vocabulary.entry(text).or_insert(json!(id));
    }
    let model = |unk: Value| {
        json!({"type": "BPE", "vocab": vocabulary, "unk_token": unk,
        "merges": merges.iter().map(|(left, right)| json!([left, right])).collect::<Vec<_>>()})
    };
    let tokenizer = of_model(model(json!("[UNK]")));
    for word in ["abab", "aabab", "aaab"] {
        for probability in [0.1, 0.5, 0.9] {
            let mut ways = BTreeMap::new();
            dropout_ways(word.chars().map(String::from).collect(), &merges, probability, 1.0, &mut ways);
            assert!(ways.len() > 3);
            check(&tokenizer, Regularisation::Dropout { probability }, word, &ways);
        }
    }
    // With certainty: letters. An unknown letter stays where it is, and none is left out.
    let sampler = tokenizer.sampler(0, Regularisation::Dropout { probability: 1.0 }).unwrap();
    assert_eq!(sampler.encode("abxab", 5).unwrap().offsets, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]);
}

#[test]
fn word_pieces_drop_matches() {
    // `##c` is missing: after a and ##b alone the word cannot be finished, and is cut as usual.
    let vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "ab", "abc", "##b", "##bc", "##cd", "##d"];
    let tokenizer = Tokenizer::from_vocabulary(&vocabulary, &henson_text::WordPieceOptions::default()).unwrap();
    for p in [0.1, 0.4, 0.9] {
        let q = 1.0 - p;
        // abc | ab | a, then from each: ##d; ##cd; ##bc ##d or the dead end ##b, unless ##cd follows it.
        let exact = BTreeMap::from([
            (strings(&["abc", "##d"]), q),
            (strings(&["ab", "##cd"]), p * q),
            (strings(&["a", "##bc", "##d"]), p * p * q),
            (strings(&["a", "##b", "##cd"]), p * p * p),
        ]);
        check(&tokenizer, Regularisation::Dropout { probability: p }, "abcd", &exact);
        // abc as usual: whole. ab and then c: dead end, so whole again.
        let exact = BTreeMap::from([(strings(&["abc"]), q + p * q + p * p * p), (strings(&["a", "##bc"]), p * p * q)]);
        check(&tokenizer, Regularisation::Dropout { probability: p }, "abc", &exact);
        check(
            &tokenizer,
            Regularisation::Dropout { probability: p },
            "axe",
            &BTreeMap::from([(strings(&["[UNK]"]), 1.0)]),
        );
    }
}

fn no_change(kind: TrainingKind) -> Regularisation {
    match kind {
        TrainingKind::Unigram => Regularisation::Sampling { alpha: 1e5 },
        _ => Regularisation::Dropout { probability: 0.0 },
    }
}

fn usual(kind: TrainingKind) -> Regularisation {
    match kind {
        TrainingKind::Unigram => Regularisation::Sampling { alpha: 0.2 },
        _ => Regularisation::Dropout { probability: 0.1 },
    }
}

const KINDS: [TrainingKind; 4] =
    [TrainingKind::WordPiece, TrainingKind::Bpe, TrainingKind::ByteBpe, TrainingKind::Unigram];

#[test]
fn without_chance_it_is_plain_encoding() {
    let odd = "Na\u{ef}ve \u{4e2d}\u{6587}\u{2603}x  [MASK] <mask> \u{1f642}\u{200b} e\u{301} don't\n";
    for kind in KINDS {
        let tokenizer = novel_tokenizer(kind);
        let sampler = tokenizer.sampler(3, no_change(kind)).unwrap();
        for (number, line) in (0..).zip(NOVELS.lines().take(300).chain([odd, "", " "])) {
            assert_eq!(sampler.encode(line, number).unwrap(), tokenizer.encode(line).unwrap(), "{kind:?}: {line:?}");
        }
    }
}

#[test]
fn a_pure_function_of_seed_number_and_text() {
    let lines: Vec<&str> = NOVELS.lines().filter(|line| line.len() > 60).take(40).collect();
    for kind in KINDS {
        let tokenizer = novel_tokenizer(kind);
        let encode = |seed, number, line| tokenizer.sampler(seed, usual(kind)).unwrap().encode(line, number).unwrap();
        let (one, two) = (tokenizer.sampler(1, usual(kind)).unwrap(), tokenizer.sampler(2, usual(kind)).unwrap());
        let (mut other_number, mut other_seed, mut plain) = (0, 0, 0);
        for (number, &line) in (0..).zip(&lines) {
            let pieces = one.encode(line, number).unwrap();
            assert_eq!(pieces, encode(1, number, line), "whatever came before");
            other_number += usize::from(pieces != one.encode(line, number + (1 << 40)).unwrap());
            other_seed += usize::from(pieces != two.encode(line, number).unwrap());
            plain += usize::from(pieces == tokenizer.encode(line).unwrap());
            // The text is the same, however it is cut.
            let decoded = |ids| tokenizer.decode(ids, false).unwrap();
            assert_eq!(decoded(&pieces.ids), decoded(&tokenizer.encode(line).unwrap().ids));
            assert_eq!(pieces.offsets.last().map(|range| range.1), Some(line.len()));
        }
        assert!(other_number > 20 && other_seed > 20 && plain < 20, "{kind:?}: {other_number} {other_seed} {plain}");
    }
}

#[test]
fn long_words_do_not_take_long() {
    let long = "thegardenwassaid".repeat(4000);
    for kind in [TrainingKind::Bpe, TrainingKind::ByteBpe, TrainingKind::Unigram] {
        let tokenizer = novel_tokenizer(kind);
        let pieces = tokenizer.sampler(1, usual(kind)).unwrap().encode(&long, 0).unwrap();
        assert!(pieces.len() > 8000 && pieces.len() < long.len());
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let sample = |kind, how| novel_tokenizer(kind).sampler(0, how).map(drop);
    let dropout = |probability| Regularisation::Dropout { probability };
    let alpha = |alpha| Regularisation::Sampling { alpha };
    assert_error(sample(TrainingKind::Unigram, dropout(0.1)), &["at random", "alpha"]);
    assert_error(sample(TrainingKind::Bpe, alpha(0.1)), &["BPE", "dropout"]);
    assert_error(sample(TrainingKind::WordPiece, alpha(0.1)), &["WordPiece", "dropout"]);
    for bad in [-0.1, 1.1, f64::NAN] {
        assert_error(sample(TrainingKind::Bpe, dropout(bad)), &["from 0 to 1"]);
    }
    for bad in [-1.0, f64::NAN, f64::INFINITY] {
        assert_error(sample(TrainingKind::Unigram, alpha(bad)), &["at least 0"]);
    }
    let bytes = of_model(json!({"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0]], "byte_fallback": true}));
    assert_error(bytes.sampler(0, alpha(0.1)).map(drop), &["byte fallback"]);
}
