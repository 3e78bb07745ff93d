//! What cannot be seen from outside: what a walk consumes, and mixing weights without files.

use std::sync::Arc;

use henson_kernels::philox::Stream;
use henson_text::Template;

use super::draws::Copy;
use super::walk::{Cursor, Second, SentenceRules, Walk};
use super::weights::Weights;
use super::{Epoch, Instance, InstanceSettings, Instances, Objective, Packing};
use crate::{Corpus, DataError, Loader, Place, Vocabulary, WordMarks};

fn bert() -> Template {
    Template::bert(2, 3)
}

fn corpus(documents: &[Vec<Vec<u32>>]) -> Arc<Corpus> {
    let size = 60_000;
    let words = WordMarks::Begin(vec![true; size as usize]);
    let special = vec![0, 1, 2, 3, 4];
    Arc::new(Corpus::from_documents(
        Vocabulary { size, cls: 2, sep: 3, mask: Some(4), special, words, sentinels: Vec::new() },
        documents,
    ))
}

/// Before truncation every sentence is seen: what is put back is taken up again, and nothing comes twice.
#[test]
fn a_walk_consumes_every_sentence_once() {
    let mut draws = Stream::new(1, 0, 0);
    for case in 0..300 {
        let sentences: Vec<Vec<u32>> =
            (0..draws.below(60)).map(|_| vec![9; draws.below(if case % 3 == 0 { 60 } else { 6 }) as usize]).collect();
        let corpus = corpus(std::slice::from_ref(&sentences));
        let mut reader = corpus.reader();
        let document = reader.document(0).unwrap();
        let borders: Vec<usize> =
            (0..document.sentences()).map(|i| reader.sentence(&document, i).unwrap().end).collect();
        for objective in [Objective::MlmNsp, Objective::MlmSop, Objective::Mlm] {
            let settings = InstanceSettings { sequence_length: 24, objective, ..InstanceSettings::default() };
            let room = (settings.room(&bert()).unwrap(), SentenceRules::new(&settings, 3), None);
            let copy = Copy { unit: case, copy: 0 };
            let mut walk = Walk::new(document, &settings, room, 77, copy, Cursor::default());
            let mut consumed = 0;
            while let Some(chunk) = walk.next(&mut reader).unwrap() {
                assert!(!chunk.first.is_empty() && chunk.first.start == consumed);
                consumed = chunk.first.end;
                match chunk.second {
                    Second::Next(second) | Second::Swapped(second) => {
                        assert!(!second.is_empty() && second.start == consumed && borders.contains(&consumed));
                        consumed = second.end;
                    }
                    Second::Random { target } => assert!((2..=21).contains(&target) && borders.contains(&consumed)),
                    Second::None => assert_ne!(objective, Objective::MlmNsp),
                    Second::More(_) => panic!("{objective:?}"),
                }
                assert_eq!(walk.cursor.position, consumed);
                // A walk that goes on from here is the same.
                let mut again = Walk::new(document, &settings, room, 77, copy, walk.cursor);
                let mut rest = Walk::new(document, &settings, room, 77, copy, Cursor::default());
                for _ in 0..=chunk.number {
                    rest.next(&mut reader).unwrap();
                }
                assert_eq!(again.next(&mut reader).unwrap(), rest.next(&mut reader).unwrap());
            }
            assert_eq!(consumed, document.len(), "{objective:?}");
        }
    }
}

/// Sources of 600 documents each, with these weights; ids tell the source.
fn weighted(weights: &[f64], settings: InstanceSettings, sentences: usize) -> Arc<Instances> {
    let document = |number: usize| {
        let sentence = |i: usize| (0..6).map(|_| 5 + (number * sentences + i) as u32).collect();
        (0..sentences).map(sentence).collect()
    };
    let documents: Vec<Vec<Vec<u32>>> = (0..600 * weights.len()).map(document).collect();
    let weights = Weights { sources: weights.iter().enumerate().map(|(i, weight)| (600 * (i + 1), *weight)).collect() };
    Arc::new(Instances::weighted(corpus(&documents), bert(), settings, 3, weights).unwrap())
}

fn in_order(epoch: &Epoch) -> Vec<Instance> {
    (0..epoch.count()).map(|index| epoch.in_order(index).unwrap()).collect()
}

/// Within four deviations of a binomial count.
fn assert_near(count: f64, of: f64, share: f64) {
    assert!((count - of * share).abs() <= 4.0 * (of * share * (1.0 - share)).sqrt(), "{count} of {of}: not {share}");
}

#[test]
fn weights_are_shares_of_copies() {
    let weights = [2.5, 0.0, 0.25, 1.0];
    let settings = InstanceSettings { sequence_length: 32, ..InstanceSettings::default() };
    let made = weighted(&weights, settings, 1);
    let mut second = [0.0; 4];
    for number in 0..4 {
        let epoch = made.epoch(number, 3).unwrap();
        let instances = in_order(&epoch);
        assert!(instances.is_sorted_by_key(|instance| instance.document));
        let mut copies = vec![0; 2400];
        for instance in &instances {
            copies[instance.document] += 1;
            let other = instance.random_document.unwrap();
            assert_ne!(other, instance.document);
            second[other / 600] += 1.0;
        }
        let total: usize = copies.iter().sum();
        assert_eq!(total, instances.len());
        for (source, weight) in weights.into_iter().enumerate() {
            let of_source = &copies[600 * source..600 * (source + 1)];
            assert!(of_source.iter().all(|n| [weight.floor(), weight.ceil()].contains(&f64::from(*n as u32))));
            let again = of_source.iter().sum::<usize>() as f64 - 600.0 * weight.floor();
            assert_near(again, 600.0, weight.fract());
        }
        // Copies differ: each has draws of its own.
        let twins = instances.chunk_by(|a, b| a.document == b.document).filter(|twins| twins.len() > 1);
        let same = twins.clone().filter(|twins| twins[0] == twins[1]).count();
        assert!(same < twins.count() / 100);
        // Other documents in other epochs.
        let other_epoch = in_order(&made.epoch(number + 4, 1).unwrap());
        assert_ne!(instances.len(), other_epoch.len());
    }
    // Random second segments come in the same shares.
    let all: f64 = second.iter().sum();
    for (count, weight) in second.into_iter().zip(weights) {
        // The share is drawn too: allow for a hundredth of it.
        let share = weight / 3.75;
        assert!((count / all - share).abs() < 0.01 + 0.01 * share, "{count} of {all}: not {share}");
    }
}

#[test]
fn weights_of_rows() {
    // 13 positions a document with its separator, 28 a block.
    of_row(Packing::Blocks, 600.0 * 13.0 / 28.0);
    // Two documents a sequence: the next sentence would be too much.
    of_row(Packing::FullSentences, 300.0);
}

/// `sequences`: how many begin in a source of weight 1.
fn of_row(packing: Packing, sequences: f64) {
    let weights = [1.0, 0.0, 0.5, 3.0];
    let objective = Objective::Mlm;
    let settings = InstanceSettings { sequence_length: 30, objective, packing, ..InstanceSettings::default() };
    let made = weighted(&weights, settings, 2);
    let epoch = made.epoch(0, 2).unwrap();
    let mut counts = [0.0_f64; 4];
    for instance in in_order(&epoch) {
        counts[instance.document / 600] += 1.0;
        let targets = instance.predicted.iter().map(|predicted| predicted.target);
        assert!(targets.into_iter().all(|id| !(1205..2405).contains(&id)), "text of weight 0");
    }
    assert!((counts[0] - sequences).abs() <= 1.0 && counts[1] == 0.0 && (counts[3] - 3.0 * sequences).abs() <= 3.0);
    assert_near(counts[2], sequences, 0.5);
    // Every sequence by its number in the epoch's order, too.
    let mut shuffled: Vec<Instance> = (0..epoch.count()).map(|index| epoch.get(index).unwrap()).collect();
    shuffled.sort_by_key(|instance| instance.document);
    assert!(shuffled.iter().map(|i| i.document).eq(in_order(&epoch).iter().map(|i| i.document)));
}

/// Where weights leave an epoch without documents, the loader says so, after the steps that come before.
#[test]
fn an_epoch_that_weights_leave_empty() {
    let documents = vec![vec![vec![9; 10]]; 3];
    let settings = InstanceSettings { objective: Objective::Mlm, ..InstanceSettings::default() };
    let of_seed = |seed| {
        let weights = Weights { sources: vec![(3, 0.5)] };
        Arc::new(Instances::weighted(corpus(&documents), bert(), settings.clone(), seed, weights).unwrap())
    };
    let fit = |made: &Arc<Instances>| {
        let counts = [0, 1, 2].map(|epoch| made.epoch(epoch, 1).map_or(0, |epoch| epoch.count()));
        (counts == [2, 3, 0]).then(|| made.clone())
    };
    let made = (0..2000).find_map(|seed| fit(&of_seed(seed))).unwrap();
    assert!(matches!(made.epoch(2, 1), Err(DataError::EpochTooSmall { epoch: 2, documents: 0, needed: 1 })));
    for (batch_size, steps, threads) in [(1, 5, 1), (1, 5, 3), (2, 2, 2), (5, 1, 1), (6, 0, 2)] {
        let mut loader = Loader::new(made.clone(), Place::default(), batch_size, 1, threads, 2).unwrap();
        for _ in 0..steps {
            loader.next().unwrap();
        }
        assert!(matches!(loader.next(), Err(DataError::EpochTooSmall { epoch: 2, .. })));
        assert!(matches!(loader.next(), Err(DataError::LoaderStopped)));
    }
}

#[test]
fn weights_that_make_no_sense_are_refused() {
    let pairs = InstanceSettings::default();
    let refused = |weights: Vec<(usize, f64)>| {
        let documents = vec![vec![vec![9; 10]]; 4];
        Instances::weighted(corpus(&documents), bert(), pairs.clone(), 0, Weights { sources: weights }).map(|_| ())
    };
    assert!(matches!(refused(vec![(1, 1.0), (4, 0.0)]), Err(DataError::TooFewDocuments { documents: 1, needed: 2 })));
    assert!(refused(vec![(2, 1.0), (4, 0.0)]).is_ok());
}
