//! What is hidden: how many pieces, which, and behind what.

use henson_data::{InstanceSettings, Masking, Objective};

use crate::corpora::{FIRST, MASK, assert_share, begins, documents, in_order, instances};

#[test]
fn the_formula_of_the_reference() {
    // Python: [(n, min(20, max(1, int(round(n * 0.15))))) for n in …], halves to even.
    let known = [(1, 1), (3, 1), (5, 1), (9, 1), (10, 2), (30, 4), (50, 8), (70, 10), (90, 14), (110, 16), (128, 19)];
    let limited = InstanceSettings { max_predictions: Some(20), ..InstanceSettings::default() };
    for (length, count) in known.into_iter().chain([(130, 20), (512, 20)]) {
        assert_eq!(limited.predictions(length), count, "{length}");
    }
    let free = InstanceSettings::default();
    assert_eq!([130, 150, 170, 190, 512].map(|length| free.predictions(length)), [20, 22, 26, 28, 77]);
}

#[test]
fn as_many_are_hidden_as_the_formula_says() {
    let all = documents(3, 400, (1, 12), (1, 60));
    for (mask_probability, max_predictions) in [(0.15, None), (0.15, Some(20)), (0.4, None), (1.0, None), (0.01, None)]
    {
        let settings = InstanceSettings {
            mask_probability,
            max_predictions,
            short_sequences: 1.0,
            sequence_length: 256,
            ..InstanceSettings::default()
        };
        let mut lengths = vec![false; 257];
        for instance in in_order(&instances(&all, &settings, 1).epoch(0, 1).unwrap()) {
            let length = instance.ids.len();
            lengths[length] = true;
            assert_eq!(instance.predicted.len(), settings.predictions(length).min(length - 3), "{length}");
            assert!(instance.predicted.windows(2).all(|pair| pair[0].position < pair[1].position));
            assert!(instance.predicted.iter().all(|predicted| predicted.target >= FIRST));
        }
        assert!(lengths.iter().filter(|seen| **seen).count() > 150);
    }
}

/// Over a million pieces.
#[test]
fn shares_of_mask_random_and_same() {
    let all = documents(3, 500, (5, 30), (5, 40));
    for (masking, mask_split) in [
        (Masking::Pieces, [0.8, 0.1, 0.1]),
        (Masking::Words, [0.8, 0.1, 0.1]),
        (Masking::Pieces, [0.0, 0.2, 0.8]),
        (Masking::NGrams, [0.8, 0.1, 0.1]),
    ] {
        let settings = InstanceSettings { masking, mask_split, ..InstanceSettings::default() };
        let made = instances(&all, &settings, 1);
        let (mut pieces, mut predicted, mut counts) = (0, 0, [0; 3]);
        let mut epoch = 0;
        while pieces < 1_000_000 {
            for instance in in_order(&made.epoch(epoch, 1).unwrap()) {
                pieces += instance.ids.len();
                predicted += instance.predicted.len();
                for p in &instance.predicted {
                    let id = instance.ids[p.position as usize];
                    assert!(id >= FIRST || id == MASK);
                    // A random piece is the right one once in 200,000 times: too rare to count.
                    counts[if id == MASK { 0 } else { 1 + usize::from(id == p.target) }] += 1;
                }
            }
            epoch += 1;
        }
        for (what, (count, share)) in ["mask", "random", "same"].into_iter().zip(counts.into_iter().zip(mask_split)) {
            assert_share(what, count, predicted, share);
        }
    }
}

#[test]
fn every_position_is_hidden_as_often() {
    // Sentences of one piece: all sequences have one length.
    let all = documents(3, 20, (980, 980), (1, 1));
    let objective = Objective::Mlm;
    let settings =
        InstanceSettings { sequence_length: 30, short_sequences: 0.0, objective, ..InstanceSettings::default() };
    let made = instances(&all, &settings, 1);
    let (mut counts, mut sequences) = ([0; 30], 0);
    for epoch in 0..10 {
        for instance in in_order(&made.epoch(epoch, 1).unwrap()) {
            assert_eq!((instance.ids.len(), instance.predicted.len()), (30, 4));
            instance.predicted.iter().for_each(|predicted| counts[predicted.position as usize] += 1);
            sequences += 1;
        }
    }
    assert_eq!([counts[0], counts[29]], [0, 0]);
    counts[1..29].iter().for_each(|count| assert_share("position", *count, sequences, 4.0 / 28.0));
}

/// Words and spans are hidden whole, and never more than the formula says.
#[test]
fn words_stay_whole() {
    let all = documents(3, 300, (1, 20), (1, 40));
    for masking in [Masking::Words, Masking::Spans, Masking::NGrams] {
        for sequence_length in [8, 64, 256] {
            let settings = InstanceSettings { masking, sequence_length, ..InstanceSettings::default() };
            let (mut hidden_words, mut wanted, mut got) = (0, 0, 0);
            for instance in in_order(&instances(&all, &settings, 1).epoch(0, 1).unwrap()) {
                let mut originals = instance.ids.clone();
                let mut hidden = vec![false; originals.len()];
                for predicted in &instance.predicted {
                    originals[predicted.position as usize] = predicted.target;
                    hidden[predicted.position as usize] = true;
                }
                for i in 1..originals.len() {
                    let goes_on = originals[i] >= FIRST && originals[i - 1] >= FIRST && !begins(originals[i]);
                    assert!(!goes_on || hidden[i] == hidden[i - 1], "{originals:?} {hidden:?}");
                    hidden_words += usize::from(goes_on && hidden[i]);
                }
                let most = settings.predictions(originals.len());
                assert!(instance.predicted.len() <= most);
                wanted += most;
                got += instance.predicted.len();
            }
            assert!(hidden_words > 0 || sequence_length == 8);
            // Words of two pieces miss the last one of an odd budget now and then.
            let least = if sequence_length == 8 { 0.5 } else { 0.97 };
            assert!(got as f64 > least * wanted as f64, "{masking:?} {sequence_length}: {got} of {wanted}");
        }
    }
}

/// A span shares one fate; spans are longer than chance would make them.
#[test]
fn spans_share_their_fate() {
    let all = documents(3, 300, (5, 30), (5, 40));
    let settings = InstanceSettings { masking: Masking::Spans, ..InstanceSettings::default() };
    let (mut spans, mut counts, mut pieces) = (0, [0; 3], 0);
    for instance in in_order(&instances(&all, &settings, 1).epoch(0, 1).unwrap()) {
        let fates: Vec<(u32, usize)> = instance
            .predicted
            .iter()
            .map(|p| {
                let id = instance.ids[p.position as usize];
                (p.position, if id == MASK { 0 } else { 1 + usize::from(id == p.target) })
            })
            .collect();
        for span in fates.chunk_by(|a, b| a.0 + 1 == b.0) {
            assert!(span.iter().all(|(_, fate)| *fate == span[0].1), "{span:?}");
            spans += 1;
            counts[span[0].1] += 1;
            pieces += span.len();
        }
    }
    assert!(spans > 5000);
    for (count, share) in counts.into_iter().zip([0.8, 0.1, 0.1]) {
        assert_share("fate", count, spans, share);
    }
    let mean = pieces as f64 / spans as f64;
    assert!(mean > 3.0, "spans of {mean} pieces");
}
