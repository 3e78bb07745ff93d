//! BERT's loop written down naively, piece by piece over vectors, with the draws that henson promises: the crate must give
//! the same instances, by number as in a row.

use henson_data::{Instance, InstanceSettings, Masking, Objective, Predicted};
use henson_kernels::philox::{Stream, philox};

use crate::corpora::{CLS, Documents, FIRST, MASK, SEP, begins, documents, in_order, instances};

const WALK: u32 = 2;
const SECOND: u32 = 3;
const TRUNCATION: u32 = 4;
const MASKS: u32 = 5;

struct Draws {
    seed: u64,
    epoch: u64,
    document: u64,
}

impl Draws {
    fn stream(&self, purpose: u32, chunk: u32) -> Stream {
        let counter = [purpose, self.epoch as u32, (self.epoch >> 32) as u32, u32::from_be_bytes(*b"inst")];
        let [low, high, ..] = philox(self.seed, counter);
        Stream::new(u64::from(high) << 32 | u64::from(low), chunk, self.document)
    }
}

fn happens(draws: &mut Stream, probability: f64) -> bool {
    f64::from(draws.bits()) / 4294967296.0 < probability
}

fn below_many(draws: &mut Stream, n: usize) -> usize {
    let bits = u128::from(draws.bits()) << 32 | u128::from(draws.bits());
    ((bits * n as u128) >> 64) as usize
}

fn pairs(all: &Documents, settings: &InstanceSettings, seed: u64, epoch: u64, vocabulary: u32) -> Vec<Instance> {
    let max_num_tokens = settings.sequence_length - 3;
    let mut made = Vec::new();
    for (number, with_empties) in all.iter().enumerate() {
        let draws = Draws { seed, epoch, document: number as u64 };
        let document: Vec<&Vec<u32>> = with_empties.iter().filter(|sentence| !sentence.is_empty()).collect();
        let mut target_seq_length = max_num_tokens;
        let mut of_document = draws.stream(WALK, u32::MAX);
        if happens(&mut of_document, settings.short_sequences) {
            target_seq_length = 2 + of_document.below(max_num_tokens as u32 - 1) as usize;
        }
        let mut current_chunk: Vec<&Vec<u32>> = Vec::new();
        let mut current_length = 0;
        let mut chunk = 0;
        let mut i = 0;
        while i < document.len() {
            current_chunk.push(document[i]);
            current_length += document[i].len();
            if i == document.len() - 1 || current_length >= target_seq_length {
                let mut walk = draws.stream(WALK, chunk);
                let mut a_end = 1;
                if current_chunk.len() >= 2 {
                    a_end = 1 + walk.below(current_chunk.len() as u32 - 1) as usize;
                }
                let mut tokens_a: Vec<u32> = current_chunk[..a_end].iter().copied().flatten().copied().collect();
                let mut tokens_b: Vec<u32> = Vec::new();
                let mut random_document = None;
                if current_chunk.len() == 1 || happens(&mut walk, 0.5) {
                    let target_b_length = target_seq_length as isize - tokens_a.len() as isize;
                    let has_text = |other: &usize| all[*other].iter().any(|sentence| !sentence.is_empty());
                    let others: Vec<usize> = (0..all.len()).filter(|o| *o != number).filter(has_text).collect();
                    let mut second = draws.stream(SECOND, chunk);
                    let other = others[below_many(&mut second, others.len())];
                    let mut start = second.below(all[other].len() as u32) as usize;
                    while all[other][start].is_empty() {
                        start = second.below(all[other].len() as u32) as usize;
                    }
                    for sentence in &all[other][start..] {
                        tokens_b.extend(sentence);
                        if tokens_b.len() as isize >= target_b_length {
                            break;
                        }
                    }
                    random_document = Some(other);
                    i -= current_chunk.len() - a_end;
                } else {
                    tokens_b.extend(current_chunk[a_end..].iter().copied().flatten());
                }
                let mut coins = draws.stream(TRUNCATION, chunk);
                let mut tosses = (0..).flat_map(|_| {
                    let bits = coins.bits();
                    (0..32).map(move |bit| bits >> bit & 1 == 1)
                });
                while tokens_a.len() + tokens_b.len() > max_num_tokens {
                    let longer = if tokens_a.len() > tokens_b.len() { &mut tokens_a } else { &mut tokens_b };
                    if tosses.next() == Some(true) {
                        longer.remove(0);
                    } else {
                        longer.pop();
                    }
                }
                let mut ids = vec![CLS];
                ids.extend(&tokens_a);
                ids.push(SEP);
                let segments = [vec![0; tokens_a.len() + 2], vec![1; tokens_b.len() + 1]].concat();
                ids.extend(&tokens_b);
                ids.push(SEP);
                let predicted = hide(&mut ids, settings, &mut draws.stream(MASKS, chunk), vocabulary);
                let next_sentence = Some(u32::from(random_document.is_some()));
                made.push(Instance {
                    ids,
                    segments,
                    predicted,
                    target: None,
                    orders: None,
                    next_sentence,
                    document: number,
                    random_document,
                });
                current_chunk.clear();
                current_length = 0;
                chunk += 1;
            }
            i += 1;
        }
    }
    made
}

fn hide(ids: &mut [u32], settings: &InstanceSettings, draws: &mut Stream, vocabulary: u32) -> Vec<Predicted> {
    let mut candidates: Vec<Vec<usize>> = Vec::new();
    for (i, id) in ids.iter().enumerate() {
        if *id == CLS || *id == SEP {
            continue;
        }
        let goes_on = settings.masking == Masking::Words && ids[i - 1] >= FIRST && !begins(*id);
        match candidates.last_mut() {
            Some(word) if goes_on => word.push(i),
            _ => candidates.push(vec![i]),
        }
    }
    let share = (ids.len() as f64 * settings.mask_probability).round_ties_even() as usize;
    let enough = share.max(1).min(settings.max_predictions.unwrap_or(usize::MAX));
    let mut predicted = Vec::new();
    while !candidates.is_empty() && predicted.len() < enough {
        let draw = draws.below(candidates.len() as u32) as usize;
        // What is drawn makes room for the first that is left: what a shuffle in place does.
        candidates.swap(0, draw);
        let word = candidates.remove(0);
        if predicted.len() + word.len() > enough {
            continue;
        }
        for i in word {
            predicted.push(Predicted { position: i as u32, target: ids[i] });
            let draw = f64::from(draws.bits()) / 4294967296.0;
            if draw < settings.mask_split[0] {
                ids[i] = MASK;
            } else if draw < settings.mask_split[0] + settings.mask_split[1] {
                ids[i] = FIRST + draws.below(vocabulary - FIRST);
            }
        }
    }
    predicted.sort_by_key(|p| p.position);
    predicted
}

fn check(all: &Documents, settings: &InstanceSettings, seed: u64, epoch: u64) -> usize {
    let made = instances(all, settings, seed);
    let vocabulary = made.corpus().vocabulary().size;
    let expected = pairs(all, settings, seed, epoch, vocabulary);
    let found = made.epoch(epoch, 2).unwrap();
    assert_eq!(found.count(), expected.len() as u64);
    for (i, expected) in expected.iter().enumerate() {
        assert_eq!(&found.in_order(i as u64).unwrap(), expected, "instance {i} of epoch {epoch}");
    }
    // The order is a permutation of these.
    let key = |instance: &Instance| (instance.document, instance.ids.clone());
    let mut shuffled: Vec<Instance> = (0..found.count()).map(|i| found.get(i).unwrap()).collect();
    assert_ne!(shuffled, expected, "not shuffled");
    shuffled.sort_by_key(key);
    let mut expected = expected;
    expected.sort_by_key(key);
    assert_eq!(shuffled, expected);
    expected.len()
}

#[test]
fn pairs_equal_the_naive_loop() {
    let settings = InstanceSettings { sequence_length: 48, ..InstanceSettings::default() };
    let mut all = documents(1, 300, (1, 12), (1, 30));
    // Marks lie inside documents that are long; sentences and documents without pieces are not there.
    all.extend(documents(2, 3, (2000, 3000), (1, 9)));
    all.insert(0, vec![]);
    all.insert(70, vec![vec![], vec![]]);
    all[20].insert(0, vec![]);
    all[21].push(vec![]);
    all[22] = vec![vec![], vec![7, 8, 9], vec![], vec![], vec![10; 60], vec![]];
    let words = InstanceSettings { masking: Masking::Words, ..settings.clone() };
    let limited = InstanceSettings { max_predictions: Some(4), mask_split: [0.5, 0.3, 0.2], ..words.clone() };
    let short = InstanceSettings { short_sequences: 1.0, ..settings.clone() };
    for (settings, epoch) in [(&settings, 0), (&settings, 1), (&words, 7), (&limited, 1 << 40), (&short, 3)] {
        assert!(check(&all, settings, 11, epoch) > 1000);
    }
    assert!(check(&all, &settings, 12, 0) > 1000);
}

#[test]
fn seeds_and_epochs_differ_and_repeat() {
    let all = documents(1, 40, (1, 12), (1, 30));
    for objective in [Objective::MlmNsp, Objective::Mlm] {
        let settings = InstanceSettings { sequence_length: 32, objective, ..InstanceSettings::default() };
        let epoch = |seed, epoch| in_order(&instances(&all, &settings, seed).epoch(epoch, 1).unwrap());
        assert_eq!(epoch(1, 0), epoch(1, 0));
        assert_ne!(epoch(1, 0), epoch(2, 0));
        assert_ne!(epoch(1, 0), epoch(1, 1));
    }
}
