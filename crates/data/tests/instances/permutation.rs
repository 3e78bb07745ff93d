//! XLNet's instances: which tokens are predicted, in spans, and in which order.

use henson_data::{Instance, InstanceSettings, Objective, Packing, Part, Place, Rows};

use crate::corpora::{CLS, SEP, assert_share, documents, in_order, instances};

fn settings() -> InstanceSettings {
    InstanceSettings {
        objective: Objective::Permutation,
        packing: Packing::Blocks,
        mask_probability: 1.0 / 6.0,
        ..InstanceSettings::default()
    }
}

fn orders(instance: &Instance) -> &[u32] {
    instance.orders.as_deref().unwrap()
}

/// The lengths of runs of predicted tokens.
fn runs(instance: &Instance) -> Vec<usize> {
    let mut runs: Vec<(u32, usize)> = Vec::new();
    for predicted in &instance.predicted {
        match runs.last_mut() {
            Some((end, length)) if *end == predicted.position => (*end, *length) = (*end + 1, *length + 1),
            _ => runs.push((predicted.position + 1, 1)),
        }
    }
    runs.into_iter().map(|(_, length)| length).collect()
}

#[test]
fn a_sixth_is_predicted_in_short_spans() {
    let all = documents(3, 300, (1, 60), (3, 40));
    let made = instances(&all, &settings(), 1);
    let (mut predicted, mut tokens, mut lengths) = (0, 0, [0_usize; 6]);
    for instance in in_order(&made.epoch(0, 1).unwrap()) {
        assert_eq!(instance.predicted.len(), settings().predictions(instance.ids.len()).min(instance.ids.len() - 2));
        predicted += instance.predicted.len();
        tokens += instance.ids.len();
        for target in &instance.predicted {
            assert_eq!(instance.ids[target.position as usize], target.target, "the text stays as it is");
            assert!(![CLS, SEP].contains(&target.target));
        }
        // Single tokens that fill up may stand next to a span, so runs of more than five are possible and rare.
        runs(&instance).into_iter().for_each(|length| lengths[length.min(6) - 1] += 1);
    }
    assert!(tokens > 150_000, "{tokens}");
    assert_share("predicted", predicted, tokens, 1.0 / 6.0);
    let total: usize = lengths.iter().sum();
    // 60/137 of spans have one token, 12/137 five; some are moved on to the next word, and single tokens fill up.
    let share = |i: usize| lengths[i] as f64 / total as f64;
    assert!((0.45..0.6).contains(&share(0)), "{lengths:?}");
    assert!((0.05..0.12).contains(&share(4)) && share(5) < 0.03, "{lengths:?}");
    assert!(lengths.windows(2).all(|pair| pair[0] > pair[1]), "{lengths:?}");
}

#[test]
fn orders_are_permutations_of_what_is_hidden() {
    let all = documents(3, 60, (1, 60), (3, 40));
    let (whole, in_blocks) = (settings(), InstanceSettings { permutation_size: Some(32), ..settings() });
    let mut first_ranks = Vec::new();
    for (settings, block) in [(whole, usize::MAX), (in_blocks, 32)] {
        let made = instances(&all, &settings, 1);
        for instance in in_order(&made.epoch(0, 1).unwrap()) {
            let hidden: Vec<usize> = (0..instance.ids.len()).filter(|i| orders(&instance)[*i] > 0).collect();
            let mut expected: Vec<usize> = instance.predicted.iter().map(|p| p.position as usize).collect();
            expected.extend((0..instance.ids.len()).filter(|i| [CLS, SEP].contains(&instance.ids[*i])));
            expected.sort_unstable();
            assert_eq!(hidden, expected, "what is predicted, and special tokens");
            let mut ranks: Vec<u32> = hidden.iter().map(|i| orders(&instance)[*i]).collect();
            for (i, rank) in hidden.iter().zip(&ranks) {
                assert_eq!(i / block, (*rank as usize - 1) / block, "blocks stand one after the other");
            }
            if block == usize::MAX {
                first_ranks.push(f64::from(ranks[0]) / instance.ids.len() as f64);
            }
            ranks.sort_unstable();
            ranks.dedup();
            assert_eq!(ranks.len(), hidden.len(), "no two at once");
        }
    }
    // The first token comes anywhere in the order.
    let mean = first_ranks.iter().sum::<f64>() / first_ranks.len() as f64;
    assert!((mean - 0.5).abs() < 0.05, "{mean}");
}

#[test]
fn orders_are_a_function_of_seed_and_epoch() {
    let all = documents(2, 20, (1, 30), (3, 40));
    let of = |seed, epoch, threads| in_order(&instances(&all, &settings(), seed).epoch(epoch, threads).unwrap());
    assert_eq!(of(1, 0, 1), of(1, 0, 2));
    let others = [of(2, 0, 1), of(1, 1, 1)];
    for other in others {
        let same = of(1, 0, 1).iter().zip(&other).filter(|(a, b)| a.orders == b.orders).count();
        assert!(same * 10 < other.len(), "{same} of {}", other.len());
    }
}

/// Of a text of one token, special tokens are all that it can see.
#[test]
fn a_single_token_sees_special_ones() {
    let documents = vec![vec![vec![40]], vec![vec![41, 42]]];
    let made = instances(&documents, &InstanceSettings { packing: Packing::Documents, ..settings() }, 1);
    for instance in in_order(&made.epoch(0, 1).unwrap()) {
        assert_eq!(instance.predicted.len(), 1);
        let at = instance.predicted[0].position as usize;
        let seen = orders(&instance).iter().filter(|order| **order < orders(&instance)[at]).count();
        assert!(if instance.ids.len() == 3 { seen == 2 } else { seen >= 1 }, "{instance:?}");
    }
}

/// Where a network remembers, every row is the text as it stands, from step to step and in every part.
#[test]
fn rows_are_the_text() {
    let all = documents(3, 40, (1, 60), (3, 40));
    let settings = InstanceSettings { packing: Packing::Stream, sequence_length: 32, ..settings() };
    // A separator stands between documents, wherever a sequence ends.
    let text: Vec<Vec<u32>> = all.iter().map(|document| document.concat()).filter(|text| !text.is_empty()).collect();
    let text = text.join(&SEP);
    for (rows, parts) in [(1, 1), (3, 1), (4, 2)] {
        let made = Rows::new(instances(&all, &settings, 1), rows).unwrap();
        assert_eq!((made.steps(), made.rows()), (text.len().div_ceil(30) as u64 / rows as u64, rows));
        let mut found = vec![Vec::new(); rows];
        for index in 0..made.steps() {
            let step = made.step(Place { epoch: 0, index }, parts).unwrap();
            let numbers: Vec<u32> = step.iter().map(|part| part.first_number).collect();
            assert_eq!(numbers, (0..parts).map(|part| (part * rows / parts) as u32).collect::<Vec<_>>());
            let sequence = |part: &Part| {
                assert_eq!(part.orders.as_ref().unwrap().len(), part.ids.len());
                part.ids.chunks(32).map(<[u32]>::to_vec).collect::<Vec<_>>()
            };
            for (row, ids) in step.iter().flat_map(sequence).enumerate() {
                assert_eq!((ids[0], ids[ids.len() - 1]), (CLS, SEP));
                found[row].extend_from_slice(&ids[1..ids.len() - 1]);
            }
        }
        for (row, found) in found.iter().enumerate() {
            let start = row * made.steps() as usize * 30;
            assert_eq!(found[..], text[start..start + found.len()], "row {row} of {rows}");
        }
    }
    // What is predicted differs from epoch to epoch, what is read does not.
    let made = Rows::new(instances(&all, &settings, 1), 2).unwrap();
    let [first, second] = [0, 1].map(|epoch| made.step(Place { epoch, index: 1 }, 1).unwrap().remove(0));
    assert!(first.ids == second.ids && first.orders != second.orders);
    let refused = Rows::new(instances(&all, &settings, 1), 100_000).unwrap_err().to_string();
    assert!(refused.contains("batch_size"), "{refused}");
    let causal = InstanceSettings { objective: Objective::Mlm, mask_probability: 0.15, ..settings };
    assert!(causal.check().unwrap_err().to_string().contains("running text is for"));
}
