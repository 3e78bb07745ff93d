//! ALBERT's instances against the facts of its code: consecutive segments in either order, and n-grams of words.

use henson_data::{InstanceSettings, MaskCount, Masking, Objective};

use crate::corpora::{FIRST, SEP, assert_share, begins, documents, in_order, instances, originals};

fn settings() -> InstanceSettings {
    InstanceSettings { objective: Objective::MlmSop, masking: Masking::NGrams, ..InstanceSettings::default() }
}

/// Label 0 in order, 1 swapped or, of one sentence, random; each text comes once, since nothing is put back.
#[test]
fn half_of_all_pairs_are_swapped() {
    let all = documents(6, 40, (300, 300), (1, 12));
    let settings = InstanceSettings { sequence_length: 64, short_sequences: 0.0, ..settings() };
    let made = instances(&all, &settings, 4);
    let (mut pairs, mut swapped, mut lone) = (0, 0, 0);
    for epoch in 0..4 {
        let mut next = 0;
        for instance in in_order(&made.epoch(epoch, 1).unwrap()) {
            let [first, second] = originals(&instance);
            let in_a_row = |ids: &[u32]| !ids.is_empty() && ids.windows(2).all(|pair| pair[1] == pair[0] + 1);
            assert!(in_a_row(&first) && in_a_row(&second));
            if instance.random_document.is_some() {
                assert_eq!(instance.next_sentence, Some(1));
                (lone, next) = (lone + 1, first[0]);
                continue;
            }
            let is_swapped = first[0] > second[0];
            assert_eq!(instance.next_sentence, Some(u32::from(is_swapped)));
            // The earlier part comes behind all that was there before.
            let (early, late) = if is_swapped { (&second, &first) } else { (&first, &second) };
            assert!(early[0] > next && early.last() < late.first());
            next = *late.last().unwrap();
            (pairs, swapped) = (pairs + 1, swapped + usize::from(is_swapped));
        }
    }
    assert!(pairs > 3000 && lone < 40, "{pairs} pairs, {lone} alone");
    assert_share("swapped", swapped, pairs, 0.5);
}

/// With room for three words of one piece, what is hidden follows from the first draws: n words with 6/11, 3/11 and 2/11.
#[test]
fn lengths_of_ngrams() {
    let words: Vec<u32> = (FIRST..3000).filter(|id| begins(*id)).collect();
    let settings = InstanceSettings {
        objective: Objective::Mlm,
        sequence_length: words.len() + 2,
        short_sequences: 0.0,
        max_predictions: Some(3),
        ..settings()
    };
    let made = instances(&vec![vec![words]; 50], &settings, 4);
    let (mut sequences, mut longest) = (0, [0; 3]);
    for epoch in 0..200 {
        for instance in in_order(&made.epoch(epoch, 1).unwrap()) {
            assert_eq!(instance.predicted.len(), 3);
            let runs = instance.predicted.chunk_by(|a, b| a.position + 1 == b.position);
            longest[runs.map(<[_]>::len).max().unwrap() - 1] += 1;
            sequences += 1;
        }
    }
    // Three alone: n = 1 twice, then there is room for one. Three together: n = 3 at once, or, once in 400 times, two
    // that happen to meet.
    assert_share("one by one", longest[0], sequences, 36.0 / 121.0 * (1.0 - 6.0 / 2000.0));
    assert_share("three in a row", longest[2], sequences, 2.0 / 11.0 + 63.0 / 121.0 * 2.0 / 2000.0);
}

/// Where only a special token stands between two words, they are in no n-gram together.
#[test]
fn ngrams_stay_in_their_segment() {
    let all = documents(6, 2000, (2, 2), (1, 1));
    let settings = InstanceSettings { mask_probability: 0.3, short_sequences: 0.0, ..settings() };
    // `[CLS] a [SEP] b [SEP]`: two of five may be hidden, each by itself.
    for instance in in_order(&instances(&all, &settings, 1).epoch(0, 1).unwrap()) {
        assert_eq!((instance.ids.len(), instance.ids[2]), (5, SEP));
        assert!(instance.predicted.iter().all(|p| [1, 3].contains(&p.position)));
    }
}

#[test]
fn ngrams_have_no_coins_and_no_specials() {
    let refused = [
        (InstanceSettings { mask_count: MaskCount::Bernoulli, ..settings() }, "mask_count"),
        (InstanceSettings { mask_specials: true, ..settings() }, "mask_specials"),
    ];
    for (settings, name) in refused {
        let error = settings.check().unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
    }
}
