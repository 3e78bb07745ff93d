//! Single segments: nothing is lost, nothing comes twice, sentences stay whole where they fit.

use std::sync::Arc;

use henson_data::{InstanceSettings, Instances, Objective, Packing};
use henson_text::Template;

use crate::corpora::{CLS, SEP, corpus, documents, in_order, instances, originals};

fn settings(objective: Objective, packing: Packing, sequence_length: usize) -> InstanceSettings {
    InstanceSettings { sequence_length, objective, packing, ..InstanceSettings::default() }
}

#[test]
fn documents_are_cut_at_sentences_without_a_loss() {
    let mut all = documents(1, 150, (1, 30), (1, 40));
    all.extend(documents(2, 2, (1, 3), (500, 900)));
    all[3].insert(1, vec![]);
    all[4] = vec![];
    for sequence_length in [4, 13, 32, 128] {
        for short_sequences in [0.0, 0.1, 1.0] {
            let settings =
                InstanceSettings { short_sequences, ..settings(Objective::Mlm, Packing::Documents, sequence_length) };
            let room = sequence_length - 2;
            let mut seen = vec![Vec::new(); all.len()];
            for instance in in_order(&instances(&all, &settings, 8).epoch(0, 1).unwrap()) {
                let [pieces, second] = originals(&instance);
                assert!(second.is_empty() && instance.next_sentence.is_none() && instance.random_document.is_none());
                assert!(instance.segments.iter().all(|segment| *segment == 0));
                assert_eq!(instance.ids.len(), pieces.len() + 2);
                assert!(pieces.len() <= room);
                seen[instance.document].push(pieces);
            }
            for (document, chunks) in all.iter().zip(&seen) {
                assert_eq!(document.concat(), chunks.concat());
                // A border inside a sentence: the chunk before it is full, and the sentence did not fit.
                for sentence in document {
                    let inside = |chunk: &&Vec<u32>| sentence.contains(&chunk[0]) && sentence[0] != chunk[0];
                    let cut = chunks.iter().filter(inside).count();
                    assert!(cut == 0 || sentence.len() > room, "{sentence:?} {chunks:?}");
                }
                if short_sequences == 0.0 {
                    // Each chunk is as full as whole sentences make it.
                    for pair in chunks.windows(2) {
                        let next = document.iter().find(|sentence| sentence.contains(&pair[1][0])).unwrap();
                        assert!(pair[0].len() + next.len() > room || next[0] != pair[1][0], "{pair:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn blocks_are_the_documents_in_a_row() {
    let mut all = documents(1, 200, (1, 8), (1, 12));
    all[0] = vec![];
    all[77] = vec![vec![], vec![]];
    for sequence_length in [4, 5, 16, 101, 100_000] {
        let settings = settings(Objective::Mlm, Packing::Blocks, sequence_length);
        let epoch = instances(&all, &settings, 8).epoch(0, 1).unwrap();
        let room = sequence_length - 2;
        let mut row: Vec<u32> = Vec::new();
        for document in all.iter().filter(|document| !document.concat().is_empty()) {
            row.extend(if row.is_empty() { None } else { Some(SEP) });
            row.extend(document.concat());
        }
        let blocks = in_order(&epoch);
        assert_eq!(blocks.len(), row.len().div_ceil(room));
        for (block, expected) in blocks.iter().zip(row.chunks(room)) {
            let mut ids = block.ids.clone();
            block.predicted.iter().for_each(|predicted| ids[predicted.position as usize] = predicted.target);
            // A separator at either end is left out.
            let expected = expected.strip_prefix(&[SEP]).unwrap_or(expected);
            let expected = expected.strip_suffix(&[SEP]).unwrap_or(expected);
            assert_eq!(ids, [&[CLS], expected, &[SEP]].concat());
            assert!(all[block.document].concat().contains(&expected[0]));
            assert!(!block.predicted.is_empty());
        }
    }
}

/// A text from left to right whose tokenizer sets nothing around it: blocks are the whole row, end-of-text between documents, and
/// sequences of one document have it before the first and behind the last of them.
#[test]
fn ends_of_documents_stand_in_for_a_template() {
    let mut all = documents(1, 200, (1, 8), (1, 12));
    all[77] = vec![vec![], vec![]];
    let filled = || all.iter().filter(|document| !document.concat().is_empty());
    let row: Vec<u32> = filled().map(|document| document.concat()).collect::<Vec<_>>().join(&SEP);
    for sequence_length in [4, 5, 16, 101, 100_000] {
        let of = |packing| {
            let settings = settings(Objective::Causal, packing, sequence_length);
            let instances = Instances::new(corpus(&all), Template::plain(), settings, 8).unwrap();
            in_order(&Arc::new(instances).epoch(0, 1).unwrap())
        };
        let blocks = of(Packing::Blocks);
        assert_eq!(blocks.len(), row.len().div_ceil(sequence_length));
        for (block, expected) in blocks.iter().zip(row.chunks(sequence_length)) {
            assert_eq!(block.ids, expected);
            // Each predicts the next, and the last nothing.
            let pairs: Vec<(u32, u32)> = block.predicted.iter().map(|p| (p.position, p.target)).collect();
            assert_eq!(pairs, (0..).zip(expected[1..].iter().copied()).collect::<Vec<_>>());
        }
        let mut seen = vec![Vec::new(); all.len()];
        for sequence in of(Packing::Documents) {
            assert!(sequence.ids.len() <= sequence_length);
            seen[sequence.document].extend(sequence.ids);
        }
        for (document, seen) in all.iter().zip(seen).filter(|(document, _)| !document.concat().is_empty()) {
            assert_eq!(seen, [&[SEP], &document.concat()[..], &[SEP]].concat());
        }
    }
}

/// FULL-SENTENCES as one would write it down: a list of sequences, filled one sentence after the other.
#[test]
fn full_sentences_are_packed_across_documents() {
    let mut all = documents(1, 300, (1, 8), (1, 12));
    all.extend(documents(2, 3, (1, 3), (40, 90)));
    all.extend(documents(3, 40, (1, 2), (1, 4)));
    all[0] = vec![];
    all[7].insert(1, vec![]);
    all[77] = vec![vec![], vec![]];
    for sequence_length in [4, 5, 16, 33, 101, 100_000] {
        let room = sequence_length - 2;
        let (mut packed, mut open) = (Vec::new(), Vec::new());
        for document in &all {
            let sentences = document.iter().filter(|sentence| !sentence.is_empty());
            for (number, sentence) in sentences.enumerate() {
                let separator = if number == 0 && !open.is_empty() { vec![SEP] } else { vec![] };
                if open.len() + separator.len() + sentence.len() <= room {
                    open = [open, separator, sentence.clone()].concat();
                    continue;
                }
                packed.push(std::mem::replace(&mut open, sentence.clone()));
                // Longer than a sequence: it is cut.
                while open.len() > room {
                    let rest = open.split_off(room);
                    packed.push(std::mem::replace(&mut open, rest));
                }
            }
        }
        packed.push(open);
        packed.retain(|sequence: &Vec<u32>| !sequence.is_empty());

        let settings = settings(Objective::Mlm, Packing::FullSentences, sequence_length);
        let made = instances(&all, &settings, 8);
        let epoch = made.epoch(0, 1).unwrap();
        let found = in_order(&epoch);
        assert_eq!(found.len(), packed.len(), "{sequence_length}");
        for (instance, expected) in found.iter().zip(&packed) {
            let mut ids = instance.ids.clone();
            instance.predicted.iter().for_each(|predicted| ids[predicted.position as usize] = predicted.target);
            assert_eq!(ids, [&[CLS], &expected[..], &[SEP]].concat());
            assert!(instance.predicted.iter().all(|predicted| predicted.target != SEP));
            assert!(all[instance.document].concat().contains(&expected[0]));
            assert!(instance.next_sentence.is_none() && instance.segments.iter().all(|segment| *segment == 0));
        }
        // The next epoch has the same sequences with other masks.
        let next = in_order(&made.epoch(1, 2).unwrap());
        assert!(next.iter().map(originals).eq(found.iter().map(originals)));
        assert!(found.len() < 20 || next != found);
    }
}

#[test]
fn causal_instances_tell_the_next_piece() {
    let all = documents(1, 30, (1, 8), (1, 12));
    for packing in [Packing::Documents, Packing::FullSentences, Packing::Blocks] {
        let settings = settings(Objective::Causal, packing, 24);
        for instance in in_order(&instances(&all, &settings, 8).epoch(0, 1).unwrap()) {
            assert_eq!(instance.predicted.len(), instance.ids.len() - 1);
            for (i, predicted) in instance.predicted.iter().enumerate() {
                assert_eq!((predicted.position as usize, predicted.target), (i, instance.ids[i + 1]));
            }
            assert!(instance.next_sentence.is_none() && instance.segments.iter().all(|segment| *segment == 0));
            assert!(in_row(&instance.ids[1..instance.ids.len() - 1]));
        }
    }
    fn in_row(ids: &[u32]) -> bool {
        ids.windows(2).all(|pair| pair[1] == pair[0] + 1 || pair.contains(&SEP))
    }
}
