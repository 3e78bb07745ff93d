//! Special tokens around texts, cutting, windows, and the mapping back to the text.

use henson_text::{
    Features, Pieces, Slot, Template, TextError, code_point_offsets, truncated_lengths, window_with_most_context,
    windows_with_most_context,
};

use crate::support::{GPT2, ROBERTA, UNCASED, assert_error, small};

/// Pieces with the ids `from..to`, one byte each.
fn pieces(ids: std::ops::Range<u32>) -> Pieces {
    Pieces {
        offsets: (0..ids.len()).map(|at| (at, at + 1)).collect(),
        words: (0..ids.len() as u32).map(Some).collect(),
        ids: ids.collect(),
        spellings: None,
    }
}

const BERT: (u32, u32) = (101, 102);

fn bert() -> Template {
    Template::bert(BERT.0, BERT.1)
}

#[test]
fn one_text() {
    let text = "Jim Henson was a puppeteer.";
    let tokenizer = small();
    let features = tokenizer.template().single(&tokenizer.encode(text).unwrap(), 16).unwrap();
    assert_eq!(features.ids, [2, 5, 6, 7, 8, 9, 10, 11, 12, 13, 3]);
    assert_eq!(features.segments, [0; 11]);
    let quoted: Vec<Option<&str>> =
        features.offsets.iter().map(|at| at.map(|(start, end)| &text[start..end])).collect();
    let words = ["Jim", "Hen", "son", "was", "a", "pupp", "et", "eer", "."].map(Some);
    assert_eq!(quoted, [&[None], &words[..], &[None]].concat());
    assert_eq!((features.first, features.second), (1..10, None));
    assert_eq!((features.first_piece, features.dropped), (0, 0));
}

#[test]
fn a_text_without_pieces() {
    let features = bert().single(&Pieces::default(), 2).unwrap();
    assert_eq!((features.ids, features.first), (vec![101, 102], 1..1));
    let windows = bert().windows(&Pieces::default(), 2, 1).unwrap();
    assert_eq!(windows.len(), 1);
    assert!(windows_with_most_context(&windows).is_empty());
}

#[test]
fn a_pair_in_berts_form() {
    let features = bert().pair(&pieces(1..3), &pieces(11..14), 128).unwrap();
    assert_eq!(features.ids, [101, 1, 2, 102, 11, 12, 13, 102]);
    assert_eq!(features.segments, [0, 0, 0, 0, 1, 1, 1, 1]);
    assert_eq!((features.first.clone(), features.second.clone()), (1..3, Some(4..7)));
    // Offsets of the second text start again from 0.
    assert_eq!(features.offsets[4], Some((0, 1)));
    assert_eq!(features.offsets[3], None);
}

#[test]
fn a_pair_in_robertas_form() {
    let first = ROBERTA.encode("Hello").unwrap();
    let second = ROBERTA.encode("world").unwrap();
    let features = ROBERTA.template().pair(&first, &second, 128).unwrap();
    assert_eq!(features.ids, [0, 31414, 2, 2, 8331, 2]);
    assert_eq!(features.segments, [0; 6]);
    assert_eq!(features.second, Some(4..5));
}

#[test]
fn gpt2_has_no_special_tokens_around() {
    let first = GPT2.encode("a b").unwrap();
    let features = GPT2.template().single(&first, 128).unwrap();
    assert_eq!(features.ids, first.ids);
    let features = GPT2.template().pair(&first, &first, 128).unwrap();
    assert_eq!(features.ids, [first.ids.clone(), first.ids].concat());
}

/// XLNet's: the special tokens at the end, a segment of their own for the last.
#[test]
fn a_template_of_ones_own() {
    let special = |id, segment| Slot::Special { id, segment };
    let single = vec![Slot::First { segment: 0 }, special(4, 0), special(3, 2)];
    let pair =
        vec![Slot::First { segment: 0 }, special(4, 0), Slot::Second { segment: 1 }, special(4, 1), special(3, 2)];
    let template = Template::new(single.clone(), pair).unwrap();
    let features = template.pair(&pieces(10..12), &pieces(20..21), 128).unwrap();
    assert_eq!(features.ids, [10, 11, 4, 20, 4, 3]);
    assert_eq!(features.segments, [0, 0, 0, 1, 1, 2]);
    assert_error(Template::new(single.clone(), single), &["two texts", "each text once", "second 0 times"]);
}

#[test]
fn cutting_says_how_much() {
    let features = bert().single(&pieces(1..11), 7).unwrap();
    assert_eq!((features.ids, features.dropped), (vec![101, 1, 2, 3, 4, 5, 102], 5));
    let features = bert().pair(&pieces(1..6), &pieces(11..13), 8).unwrap();
    assert_eq!((features.ids, features.dropped), (vec![101, 1, 2, 3, 102, 11, 12, 102], 2));
    let mut text = pieces(1..6);
    assert_eq!((text.truncate(2), text.truncate(2)), (3, 0));
    assert_eq!(text, pieces(1..3));
}

/// Against the loop of run_classifier.py, for every small pair of lengths.
#[test]
fn pairs_are_cut_from_the_longer_and_ties_from_the_second() {
    for first in 0..14 {
        for second in 0..14 {
            for room in 0..30 {
                let (mut a, mut b) = (first, second);
                while a + b > room {
                    if a > b { a -= 1 } else { b -= 1 }
                }
                assert_eq!(truncated_lengths(first, second, room), (a, b), "{first} and {second} into {room}");
            }
        }
    }
}

#[test]
fn lengths_that_cannot_be() {
    assert_error(bert().single(&pieces(0..3), 1), &["max_length 1 is too small", "2 positions", "special tokens"]);
    assert_error(bert().pair(&pieces(0..3), &pieces(0..3), 2), &["max_length 2", "3 positions"]);
    assert_error(bert().windows(&pieces(0..3), 2, 1), &["max_length 2", "3 positions", "one token"]);
    assert_error(
        bert().pair_windows(&pieces(0..3), &pieces(0..3), 6, 1),
        &["max_length 6", "7 positions", "whole first"],
    );
    assert!(matches!(bert().windows(&pieces(0..3), 5, 0), Err(TextError::ZeroStride)));
    // Exactly enough.
    assert_eq!(bert().single(&pieces(0..3), 2).unwrap().dropped, 3);
    assert_eq!(bert().pair_windows(&pieces(0..3), &pieces(0..3), 7, 1).unwrap().len(), 3);
}

#[test]
fn windows_step_by_the_stride() {
    let windows = bert().windows(&pieces(0..10), 6, 3).unwrap();
    let shown: Vec<_> = windows.iter().map(Features::windowed_pieces).collect();
    assert_eq!(shown, [0..4, 3..7, 6..10]);
    assert_eq!(windows[1].ids, [101, 3, 4, 5, 6, 102]);
    assert_eq!(windows[1].offsets[1], Some((3, 4)));
    assert_eq!((windows[1].first_piece, windows[1].dropped), (3, 0));
    assert_eq!(windows[1].position_of_piece(5), Some(3));
    assert_eq!((windows[1].position_of_piece(2), windows[1].position_of_piece(7)), (None, None));
}

#[test]
fn windows_of_a_passage_repeat_the_question() {
    let windows = bert().pair_windows(&pieces(50..52), &pieces(0..7), 9, 2).unwrap();
    let shown: Vec<_> = windows.iter().map(Features::windowed_pieces).collect();
    assert_eq!(shown, [0..4, 2..6, 4..7]);
    assert_eq!(windows[2].ids, [101, 50, 51, 102, 4, 5, 6, 102]);
    assert_eq!(windows[2].position_of_piece(5), Some(5));
    assert_eq!(windows[2].segments, [0, 0, 0, 0, 1, 1, 1, 1]);
}

/// Every piece is shown, windows never skip one, no window lies in another, for all small lengths.
#[test]
fn windows_cover_without_repeating() {
    for length in 0..40_u32 {
        for room in 1..12 {
            for stride in 1..15 {
                let windows = bert().windows(&pieces(0..length), room + 2, stride).unwrap();
                let shown: Vec<_> = windows.iter().map(Features::windowed_pieces).collect();
                assert_eq!((shown[0].start, shown[shown.len() - 1].end), (0, length as usize));
                for pair in shown.windows(2) {
                    assert!(pair[0].start < pair[1].start && pair[0].end < pair[1].end, "{shown:?}");
                    assert!(pair[1].start <= pair[0].end, "{shown:?}");
                    assert_eq!(pair[1].start - pair[0].start, stride.min(room), "{shown:?}");
                }
                assert!(windows.iter().all(|window| window.len() <= room + 2 && window.dropped == 0));
                let best = windows_with_most_context(&windows);
                assert_eq!(best.len(), length as usize);
                for (piece, &window) in best.iter().enumerate() {
                    assert_eq!(window_with_most_context(&windows, piece), Some(window));
                    assert!(windows[window].position_of_piece(piece).is_some());
                }
                assert_eq!(window_with_most_context(&windows, length as usize), None);
            }
        }
    }
}

/// The example in the comments of run_squad.py: "bought" has most context in the third of
/// "the man went to the", "to the store and bought", "and bought a gallon of".
#[test]
fn most_context_of_googles_example() {
    let windows = bert().windows(&pieces(0..15), 7, 3).unwrap();
    let shown: Vec<_> = windows.iter().map(Features::windowed_pieces).collect();
    assert_eq!(shown, [0..5, 3..8, 6..11, 9..14, 12..15]);
    assert_eq!(window_with_most_context(&windows, 7), Some(2));
    // A tie of left and right context, piece 4 in 0..5 (0 on the right) and 3..8 (1 on the left): the larger minimum.
    assert_eq!(window_with_most_context(&windows, 4), Some(1));
    // Piece 13: no piece to its right in 9..14, one in the shorter 12..15.
    assert_eq!(window_with_most_context(&windows, 13), Some(4));
    // Piece 12: one to its right in 9..14, none to its left in 12..15.
    assert_eq!(window_with_most_context(&windows, 12), Some(3));
}

/// An equal minimum is decided by the length of the window, and an equal length by the order.
#[test]
fn most_context_on_ties() {
    let windows = bert().windows(&pieces(0..4), 5, 1).unwrap();
    assert_eq!(windows.iter().map(Features::windowed_pieces).collect::<Vec<_>>(), [0..3, 1..4]);
    assert_eq!(windows_with_most_context(&windows), [0, 0, 1, 1]);
    let windows = bert().windows(&pieces(0..5), 6, 3).unwrap();
    assert_eq!(windows.iter().map(Features::windowed_pieces).collect::<Vec<_>>(), [0..4, 3..5]);
    assert_eq!(
        windows_with_most_context(&windows),
        [0, 0, 0, 0, 1],
        "piece 3: the longer window, though it is last there"
    );
}

/// A window of 300 counts 3, one of 110 only 1.1: that outweighs one piece of context.
#[test]
fn most_context_prefers_longer_windows() {
    let windows = bert().windows(&pieces(0..400), 302, 290).unwrap();
    assert_eq!(windows.iter().map(Features::windowed_pieces).collect::<Vec<_>>(), [0..300, 290..400]);
    // Piece 295 has 4 to its right in the first and 5 to its left in the second: 7.0 against 6.1.
    assert_eq!(window_with_most_context(&windows, 295), Some(0));
    // Piece 297: 2 and 7, 5.0 against 8.1.
    assert_eq!(window_with_most_context(&windows, 297), Some(1));
}

#[test]
fn pieces_without_offsets_still_make_features() {
    let from_a_shard = Pieces { ids: vec![7, 8], ..Pieces::default() };
    let features = bert().single(&from_a_shard, 8).unwrap();
    assert_eq!((features.ids, features.offsets), (vec![101, 7, 8, 102], vec![None; 4]));
}

#[test]
fn offsets_in_code_points() {
    let text = "né 中 🐸 a";
    let byte_offsets = UNCASED.encode(text).unwrap().offsets;
    let quoted: Vec<&str> = byte_offsets.iter().map(|&(start, end)| &text[start..end]).collect();
    assert_eq!(quoted, ["né", "中", "🐸", "a"]);
    assert_eq!(code_point_offsets(text, &byte_offsets), [(0, 2), (3, 4), (5, 6), (7, 8)]);
    assert_eq!(code_point_offsets("abc", &[(1, 2), (3, 9)]), [(1, 2), (3, 3)]);
    // Inside a character and beyond the end: counted, not a panic.
    assert_eq!(code_point_offsets("é", &[(1, 99)]), [(1, 1)]);
}
