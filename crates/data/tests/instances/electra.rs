//! ELECTRA's instances against the facts of its code: two segments of consecutive text, and its draws.

use henson_data::{Instance, InstanceSettings, Objective};

use crate::corpora::{CLS, FIRST, MASK, SEP, assert_share, documents, in_order, instances, originals};

fn settings(repeated_draws: bool) -> InstanceSettings {
    InstanceSettings {
        objective: Objective::ReplacedTokens,
        short_sequences: 0.05,
        mask_split: [0.85, 0.0, 0.15],
        max_predictions: Some(19),
        repeated_draws,
        ..InstanceSettings::default()
    }
}

/// Where the pieces of a segment stand in the corpus: their ids count them.
fn consecutive(pieces: &[u32]) -> bool {
    pieces.windows(2).all(|pair| pair[1] == pair[0] + 1)
}

/// The shape `[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]` with segments 0 and 1.
fn shape(instance: &Instance) -> usize {
    let Instance { ids, segments, .. } = instance;
    let separators: Vec<usize> = (0..ids.len()).filter(|i| ids[*i] == SEP).collect();
    assert_eq!((ids[0], separators.last()), (CLS, Some(&(ids.len() - 1))));
    let first = separators[0];
    assert!(segments[..=first].iter().all(|s| *s == 0) && segments[first + 1..].iter().all(|s| *s == 1));
    assert!(instance.next_sentence.is_none());
    separators.len()
}

#[test]
fn two_segments_of_consecutive_text() {
    let all = documents(4, 400, (1, 60), (3, 40));
    let made = instances(&all, &settings(false), 1);
    let (mut count, mut single, mut full, mut longest_first) = (0, 0, 0, 0);
    // Every sentence but those that were cut off is there once, and in its order.
    let mut next = FIRST;
    for instance in in_order(&made.epoch(0, 1).unwrap()) {
        let segments = shape(&instance);
        let [first, second] = originals(&instance);
        assert!(consecutive(&first) && consecutive(&second) && first[0] >= next);
        assert_eq!(second.is_empty(), segments == 1);
        if let Some(begin) = second.first() {
            assert!(*begin > *first.last().unwrap());
            next = *second.last().unwrap();
        }
        assert!(instance.ids.len() <= 128);
        count += 1;
        // The ends of documents are single segments as well, so only sequences that are full tell the share.
        if instance.ids.len() >= 127 {
            full += 1;
            single += usize::from(segments == 1);
        }
        if segments == 2 {
            longest_first = longest_first.max(first.len());
        }
    }
    assert!(count > 1500 && full > 1000, "{full} of {count}");
    assert_share("one segment", single, full, 0.1);
    // A sentence that begins below half of the target may still be A's: 61 and 40 pieces at the most.
    assert!((80..=62 + 40).contains(&longest_first), "{longest_first}");
}

/// All targets from 5 to the whole length are drawn, for about 5% of sequences.
#[test]
fn some_sequences_are_short() {
    // Sentences of one piece: a sequence of target t has t pieces, of which 125 or 126 fit.
    let all = documents(5, 4, (200_000, 200_000), (1, 1));
    let made = instances(&all, &settings(false), 1);
    let (mut count, mut lengths) = (0, vec![0; 129]);
    for instance in in_order(&made.epoch(0, 1).unwrap()) {
        let segments = shape(&instance);
        let pieces = instance.ids.len() - 1 - segments;
        count += 1;
        lengths[pieces] += 1;
        let [first, second] = originals(&instance);
        if segments == 2 && pieces == 125 {
            // The piece that reaches half of the target without its specials, 61 or 62, goes to A by a coin.
            assert!((60..=62).contains(&first.len()), "{} and {}", first.len(), second.len());
        }
    }
    let short: usize = lengths[..125].iter().sum();
    // One in 124 of them aims at 125 to 128.
    assert_share("short", short, count, 0.05 * 120.0 / 124.0);
    assert!(
        lengths[..5].iter().all(|n| *n == 0)
            && lengths[5] > 0
            && lengths[5..125].iter().filter(|n| **n > 0).count() > 80
    );
}

/// Over a million pieces: how many are drawn, masked and predicted, and which never are.
#[test]
fn shares_of_draws() {
    for repeated in [false, true] {
        let all = documents(3, 500, (5, 30), (5, 40));
        let made = instances(&all, &settings(repeated), 1);
        let (mut pieces, mut drawn, mut unique, mut masked, mut single_masked, mut single) = (0, 0, 0, 0, 0, 0);
        let mut epoch = 0;
        while pieces < 1_000_000 {
            for instance in in_order(&made.epoch(epoch, 1).unwrap()) {
                let (length, predicted) = (instance.ids.len(), &instance.predicted);
                pieces += length;
                // Python's max(1, min(19, round(0.15 * length))).
                assert_eq!(predicted.len(), ((0.15 * length as f64).round_ties_even() as usize).clamp(1, 19));
                drawn += predicted.len();
                for run in predicted.chunk_by(|a, b| a.position == b.position) {
                    let (id, target) = (instance.ids[run[0].position as usize], run[0].target);
                    assert!(target >= FIRST && (id == MASK || id == target) && run.iter().all(|p| p.target == target));
                    unique += 1;
                    masked += usize::from(id == MASK);
                    if run.len() == 1 {
                        single += 1;
                        single_masked += usize::from(id == MASK);
                    }
                }
            }
            epoch += 1;
        }
        assert_share("masked", single_masked, single, 0.85);
        let (share, of_all) = (unique as f64 / drawn as f64, unique as f64 / pieces as f64);
        if repeated {
            // 19 draws from 125: 1 − (124/125)^19 of them are hit, 17.7 of 19. What is drawn twice is masked more often.
            assert!((0.92..0.95).contains(&share) && (0.135..0.143).contains(&of_all), "{share} {of_all}");
            assert!(masked as f64 / unique as f64 > 0.853);
        } else {
            assert_eq!(unique, drawn);
            assert!((0.146..0.152).contains(&of_all), "{of_all}");
        }
    }
}

/// A `[MASK]` that stands in the text is none to predict.
#[test]
fn marks_in_the_text_are_never_drawn() {
    let all = vec![vec![[MASK, FIRST].repeat(30); 3]; 8];
    for repeated in [false, true] {
        let settings = InstanceSettings { mask_probability: 0.4, max_predictions: None, ..settings(repeated) };
        for instance in in_order(&instances(&all, &settings, 1).epoch(0, 1).unwrap()) {
            assert!(!instance.predicted.is_empty() && instance.predicted.iter().all(|p| p.target == FIRST));
        }
    }
}

/// An instance is a function of (seed, epoch, number), whatever was asked for before.
#[test]
fn the_same_again_and_others_in_another_epoch() {
    let all = documents(3, 100, (1, 30), (1, 40));
    let made = instances(&all, &settings(false), 1);
    let (first, second) = (in_order(&made.epoch(0, 1).unwrap()), in_order(&made.epoch(1, 1).unwrap()));
    let epoch = instances(&all, &settings(false), 1).epoch(0, 3).unwrap();
    for number in [7, 3, first.len() as u64 - 1, 0] {
        assert_eq!(epoch.in_order(number).unwrap(), first[number as usize]);
    }
    let same = first.iter().zip(&second).filter(|(a, b)| originals(a) == originals(b)).count();
    assert!(same < first.len() / 2, "{same} of {}", first.len());
}
