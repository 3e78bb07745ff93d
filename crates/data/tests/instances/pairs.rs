//! Sentence pairs: where the two segments come from, how long they are, how often they are random.

use henson_data::{Instance, InstanceSettings, Objective};

use crate::corpora::{CLS, Documents, SEP, assert_share, documents, in_order, instances, originals};

/// The document of every id.
fn home(documents: &Documents) -> Vec<usize> {
    let last = documents.iter().flatten().flatten().max().copied().unwrap_or(0) as usize;
    let mut home = vec![usize::MAX; last + 1];
    for (number, document) in documents.iter().enumerate() {
        document.iter().flatten().for_each(|id| home[*id as usize] = number);
    }
    home
}

fn in_a_row(ids: &[u32]) -> bool {
    !ids.is_empty() && ids.windows(2).all(|pair| pair[1] == pair[0] + 1)
}

#[test]
fn segments_come_from_where_they_should() {
    let all = documents(5, 200, (1, 20), (1, 25));
    let home = home(&all);
    for (sequence_length, short_sequences) in [(5, 0.1), (16, 0.1), (64, 0.1), (128, 0.5), (512, 1.0)] {
        let settings = InstanceSettings { sequence_length, short_sequences, ..InstanceSettings::default() };
        let epoch = instances(&all, &settings, 3).epoch(0, 1).unwrap();
        let (mut truncated, mut longest) = (0, 0);
        for instance in in_order(&epoch) {
            let [first, second] = originals(&instance);
            assert!(instance.ids.len() <= sequence_length && first.len() + second.len() + 3 == instance.ids.len());
            assert_eq!(instance.ids[0], CLS);
            assert_eq!([instance.ids[first.len() + 1], instance.ids[instance.ids.len() - 1]], [SEP; 2]);
            assert!(instance.segments[..first.len() + 2].iter().all(|segment| *segment == 0));
            assert!(instance.segments[first.len() + 2..].iter().all(|segment| *segment == 1));
            assert!(in_a_row(&first) && in_a_row(&second), "{first:?} {second:?}");
            let [a, b] = [&first, &second].map(|segment| home[segment[0] as usize]);
            assert!(first.iter().all(|id| home[*id as usize] == a) && second.iter().all(|id| home[*id as usize] == b));
            assert_eq!(a, instance.document);
            match instance.next_sentence {
                Some(0) => assert!(a == b && first[first.len() - 1] < second[0] && instance.random_document.is_none()),
                Some(1) => assert!(a != b && instance.random_document == Some(b)),
                other => panic!("{other:?}"),
            }
            truncated += usize::from(instance.next_sentence == Some(0) && first[first.len() - 1] + 1 != second[0]);
            longest = longest.max(instance.ids.len());
        }
        assert!(truncated > 0 || sequence_length == 512, "{sequence_length}: nothing was truncated");
        assert!(longest == sequence_length || sequence_length == 512, "{sequence_length}: {longest}");
    }
}

#[test]
fn labels_have_the_shares_of_the_walk() {
    let random = |all: &Documents, settings: &InstanceSettings| {
        let epoch = instances(all, settings, 4).epoch(0, 1).unwrap();
        let labels: Vec<Option<u32>> = in_order(&epoch).iter().map(|instance| instance.next_sentence).collect();
        (labels.iter().filter(|label| **label == Some(1)).count(), labels.len())
    };
    // Long documents of short sentences: only the last chunk of each can be one of a single sentence.
    let settings = InstanceSettings { sequence_length: 64, short_sequences: 0.0, ..InstanceSettings::default() };
    let long = documents(6, 20, (3000, 3000), (1, 8));
    let (count, of) = random(&long, &settings);
    assert!(of > 5000);
    assert_share("random", count, of, 0.5);
    // A document of one sentence has nothing that follows.
    let single = documents(6, 50, (1, 1), (1, 30));
    assert_eq!(random(&single, &settings), (50, 50));
    // Two sentences that fit: half are pairs; the other half give two chunks, each random. So 2 of 3 are random, though
    // not independently: of 3000 documents, those that are random give two instances.
    let two = documents(6, 3000, (2, 2), (5, 5));
    let (count, of) = random(&two, &settings);
    assert_eq!(of - 3000, count / 2);
    assert_share("documents with a random pair", count / 2, 3000, 0.5);
}

/// Every other document is drawn alike, and so is the sentence where its part begins.
#[test]
fn random_segments_are_drawn_from_everywhere() {
    let all = documents(8, 11, (400, 400), (3, 3));
    let settings = InstanceSettings { sequence_length: 16, short_sequences: 0.0, ..InstanceSettings::default() };
    let made = instances(&all, &settings, 4);
    let mut drawn = [[0_usize; 11]; 11];
    let mut quarters = [0_usize; 4];
    for epoch in 0..4 {
        for instance in in_order(&made.epoch(epoch, 1).unwrap()) {
            let Some(other) = instance.random_document else { continue };
            drawn[instance.document][other] += 1;
            // The truncated front never reaches over a sentence of three pieces into the next quarter but rarely.
            let place = originals(&instance)[1][0] - all[other][0][0];
            quarters[place as usize / 300] += 1;
        }
    }
    for (own, drawn) in drawn.iter().enumerate() {
        assert_eq!(drawn[own], 0);
        let of: usize = drawn.iter().sum();
        (0..11).filter(|other| *other != own).for_each(|other| assert_share("document", drawn[other], of, 0.1));
    }
    let of: usize = quarters.iter().sum();
    quarters.iter().for_each(|count| assert_share("quarter", *count, of, 0.25));
}

/// Ten in a hundred documents aim at a shorter length, evenly from 2 to the longest.
#[test]
fn some_documents_are_cut_short() {
    let all = documents(9, 4000, (60, 60), (1, 1));
    let settings = InstanceSettings { sequence_length: 35, objective: Objective::Mlm, ..InstanceSettings::default() };
    let epoch = instances(&all, &settings, 4).epoch(0, 2).unwrap();
    // With sentences of one piece every chunk has the length that its document aims at, but for the last.
    let mut targets = vec![0; 34];
    let mut last: Option<Instance> = None;
    for instance in in_order(&epoch) {
        if last.as_ref().is_none_or(|last| last.document != instance.document) {
            targets[instance.ids.len() - 2] += 1;
        }
        last = Some(instance);
    }
    let short: usize = targets[2..33].iter().sum();
    // A short one may draw the full length, 1 of 32.
    assert_share("short", short, 4000, 0.1 * 31.0 / 32.0);
    assert_eq!(targets[..2], [0, 0]);
    for half in [2..18, 18..33] {
        let share = half.len() as f64 / 31.0;
        assert_share("half", targets[half].iter().sum(), short, share);
    }
}

/// Which end of the longer segment loses a piece is a fair draw.
#[test]
fn truncation_takes_from_both_ends() {
    let all = documents(10, 600, (1, 1), (100, 100));
    let settings = InstanceSettings { sequence_length: 53, short_sequences: 0.0, ..InstanceSettings::default() };
    let (mut front, mut lost) = (0, 0);
    for instance in in_order(&instances(&all, &settings, 1).epoch(0, 1).unwrap()) {
        let [first, second] = originals(&instance);
        // 100 and 100 are cut in turn, B first.
        assert_eq!([first.len(), second.len()], [25, 25]);
        for (segment, document) in [(first, instance.document), (second, instance.random_document.unwrap())] {
            front += (segment[0] - all[document][0][0]) as usize;
            lost += 75;
        }
    }
    assert_share("front", front, lost, 0.5);
}

#[test]
fn threads_do_not_matter() {
    let all = documents(5, 3000, (1, 9), (1, 25));
    let made = instances(&all, &InstanceSettings { sequence_length: 32, ..InstanceSettings::default() }, 3);
    let one = in_order(&made.epoch(2, 1).unwrap());
    for threads in [2, 3, 16] {
        assert!(in_order(&made.epoch(2, threads).unwrap()) == one, "{threads} threads");
    }
}

#[test]
fn static_masks_come_again_and_dynamic_ones_do_not() {
    let all = documents(5, 50, (1, 9), (1, 25));
    for (dupe_factor, again) in [(3, true), (0, false)] {
        let settings = InstanceSettings { sequence_length: 32, dupe_factor, ..InstanceSettings::default() };
        let made = instances(&all, &settings, 3);
        let epoch = |epoch| made.epoch(epoch, 1).unwrap();
        assert_eq!(in_order(&epoch(1)) == in_order(&epoch(4)), again);
        assert_ne!(in_order(&epoch(1)), in_order(&epoch(2)));
        // The order is always a new one.
        let order = |number| -> Vec<Instance> { (0..20).map(|i| epoch(number).get(i).unwrap()).collect() };
        assert_ne!(order(1), order(4));
    }
}
