//! The loader: the same steps whatever the threads, and from any place on.

use std::sync::Arc;

use henson_data::{DataError, Instance, InstanceSettings, Instances, Loader, Objective, Place, Step, part_of};

use crate::corpora::{documents, instances};

fn settings(sequence_length: usize) -> InstanceSettings {
    InstanceSettings { sequence_length, ..InstanceSettings::default() }
}

fn steps(made: &Arc<Instances>, place: Place, threads: usize, ahead: usize, count: usize) -> Vec<Step> {
    let mut loader = Loader::new(made.clone(), place, 12, 3, threads, ahead).unwrap();
    (0..count).map(|_| loader.next().unwrap()).collect()
}

/// The stream of instances that the steps are cut from.
fn stream(made: &Arc<Instances>, count: usize) -> Vec<(Place, Instance)> {
    let mut stream = Vec::new();
    for number in 0.. {
        let epoch = made.epoch(number, 1).unwrap();
        for index in 0..epoch.count() {
            stream.push((Place { epoch: number, index }, epoch.get(index).unwrap()));
            if stream.len() > count {
                return stream;
            }
        }
    }
    stream
}

#[test]
fn steps_are_the_stream_in_order() {
    // Many, some and less than one step an epoch.
    for (documents_count, count) in [(60, 40), (9, 30), (2, 20)] {
        let made = instances(&documents(1, documents_count, (1, 9), (1, 20)), &settings(32), 5);
        let stream = stream(&made, 12 * count);
        let steps = steps(&made, Place::default(), 2, 3, count);
        for (number, step) in steps.iter().enumerate() {
            let batch: Vec<Instance> =
                stream[12 * number..][..12].iter().map(|(_, instance)| instance.clone()).collect();
            let parts: Vec<_> = (0..3).map(|i| part_of(&batch[4 * i..][..4], 4 * i as u32)).collect();
            assert_eq!(step.parts, parts, "step {number}");
            assert_eq!(step.after, stream[12 * (number + 1)].0);
            assert_eq!(step.predicted, batch.iter().map(|instance| instance.predicted.len()).sum::<usize>());
            assert_eq!(step.tokens, batch.iter().map(|instance| instance.ids.len()).sum::<usize>());
            assert_eq!(step.pairs, 12);
        }
        assert!(steps[count - 1].after.epoch >= 1);
    }
}

#[test]
fn threads_and_looking_ahead_change_nothing() {
    let made = instances(&documents(1, 70, (1, 9), (1, 20)), &settings(32), 5);
    let one = steps(&made, Place::default(), 1, 1, 60);
    for (threads, ahead) in [(2, 1), (1, 8), (4, 2), (7, 20), (0, 0)] {
        assert!(steps(&made, Place::default(), threads, ahead, 60) == one, "{threads} threads, {ahead} ahead");
    }
}

#[test]
fn a_place_is_all_that_it_takes_to_go_on() {
    let made = instances(&documents(1, 20, (1, 9), (1, 20)), &settings(32), 5);
    let whole = steps(&made, Place::default(), 2, 3, 40);
    assert!(whole[39].after.epoch > 2);
    for done in 0..39 {
        let again = steps(&made, whole[done].after, 2, 2, 39 - done);
        assert!(again == whole[done + 1..], "after {} steps", done + 1);
    }
    // The end of an epoch is the beginning of the next.
    let end = Place { epoch: 0, index: made.epoch(0, 1).unwrap().count() };
    assert_eq!(steps(&made, end, 1, 1, 2), steps(&made, Place { epoch: 1, index: 0 }, 1, 1, 2));
}

#[test]
fn parts_are_flat() {
    let made = instances(&documents(1, 20, (1, 9), (1, 20)), &settings(32), 5);
    let epoch = made.epoch(0, 1).unwrap();
    let batch = [epoch.get(0).unwrap(), epoch.get(1).unwrap(), epoch.get(2).unwrap()];
    let part = part_of(&batch, 7);
    assert_eq!(part.lengths, batch.each_ref().map(|instance| instance.ids.len()));
    assert_eq!(part.ids, batch.each_ref().map(|instance| instance.ids.clone()).concat());
    assert_eq!(part.segments, batch.each_ref().map(|instance| instance.segments.clone()).concat());
    assert_eq!(part.next_sentence, batch.iter().map(|instance| instance.next_sentence).collect());
    assert_eq!(part.first_number, 7);
    let predicted = batch.iter().flat_map(|instance| &instance.predicted);
    assert_eq!(part.targets, predicted.map(|p| p.target).collect::<Vec<_>>());
    let third = batch[0].predicted.len() + batch[1].predicted.len();
    let begin = (part.lengths[0] + part.lengths[1]) as u32;
    assert_eq!(part.rows[third], begin + batch[2].predicted[0].position);
    // Without pairs there are no labels.
    let settings = InstanceSettings { objective: Objective::Mlm, ..settings(32) };
    let epoch = instances(&documents(1, 20, (1, 9), (1, 20)), &settings, 5).epoch(0, 1).unwrap();
    assert_eq!(part_of(&[epoch.get(0).unwrap()], 0).next_sentence, None);
}

#[test]
fn what_cannot_be_is_refused() {
    let made = instances(&documents(1, 20, (1, 9), (1, 20)), &settings(32), 5);
    let count = made.epoch(3, 1).unwrap().count();
    let refused = |place, batch_size, accumulation| {
        Loader::new(made.clone(), place, batch_size, accumulation, 1, 1).map(|_| ()).unwrap_err()
    };
    let begin = Place::default();
    for (batch_size, accumulation) in [(0, 1), (8, 0), (8, 3), (usize::MAX, 1)] {
        assert!(matches!(refused(begin, batch_size, accumulation), DataError::InstanceSetting { .. }));
    }
    let message = refused(begin, 8, 3).to_string();
    assert!(message.contains("accumulation = 3") && message.contains("batch_size of 8"), "{message}");
    let beyond = refused(Place { epoch: 3, index: count + 1 }, 8, 1);
    assert!(matches!(beyond, DataError::NoSuchPlace { .. }), "{beyond}");
    assert!(Loader::new(made.clone(), Place { epoch: u64::MAX, index: 0 }, 8, 1, 1, 1).unwrap().next().is_ok());
}

/// Dropped at once, in the middle of its work: it ends, and does not wait for steps that nobody will take.
#[test]
fn a_dropped_loader_ends() {
    let made = instances(&documents(1, 50, (1, 9), (1, 20)), &settings(32), 5);
    for taken in 0..4 {
        let mut loader = Loader::new(made.clone(), Place::default(), 16, 1, 3, 4).unwrap();
        (0..taken).for_each(|_| drop(loader.next().unwrap()));
        drop(loader);
    }
    // The threads have given back what they held.
    assert_eq!(Arc::strong_count(&made), 1);
}
