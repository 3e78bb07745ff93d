//! How RoBERTa, ModernBERT and SpanBERT mask and cut, over a million tokens.

use std::sync::Arc;

use henson_data::{
    Boundaries, Corpus, DataError, Instance, InstanceSettings, Instances, Loader, LongSentences, MaskCount, Masking,
    Objective, Packing, Place, Separators, Step, part_of,
};
use henson_kernels::philox::Stream;

use crate::corpora::{
    CLS, Documents, FIRST, MASK, SEP, assert_share, begins, bert, documents, in_order, instances, originals, vocabulary,
};

fn mlm() -> InstanceSettings {
    InstanceSettings { objective: Objective::Mlm, short_sequences: 0.0, ..InstanceSettings::default() }
}

fn roberta() -> InstanceSettings {
    let (packing, separators) = (Packing::FullSentences, Separators::Sentences);
    let (mask_count, mask_specials) = (MaskCount::Stochastic, true);
    InstanceSettings { packing, separators, mask_count, mask_specials, long_sentences: LongSentences::Cut, ..mlm() }
}

fn spanbert() -> InstanceSettings {
    let (objective, masking) = (Objective::SpanBoundary, Masking::SpanBert);
    InstanceSettings { objective, masking, long_sentences: LongSentences::Drop, ..mlm() }
}

fn modern() -> InstanceSettings {
    let packing = Packing::Blocks;
    InstanceSettings { packing, mask_probability: 0.3, mask_count: MaskCount::Bernoulli, ..mlm() }
}

/// Instances of so many epochs that they have a million tokens.
fn million(all: &Documents, settings: &InstanceSettings) -> Vec<Instance> {
    let made = instances(all, settings, 1);
    let (mut found, mut tokens, mut epoch) = (Vec::new(), 0, 0);
    while tokens < 1_000_000 {
        let instances = in_order(&made.epoch(epoch, 2).unwrap());
        tokens += instances.iter().map(|instance| instance.ids.len()).sum::<usize>();
        found.extend(instances);
        epoch += 1;
    }
    found
}

/// 0 for `[MASK]`, 1 for a random token, 2 for the same. A random one is the right one too rarely to count.
fn fate(instance: &Instance, position: u32, target: u32) -> usize {
    let id = instance.ids[position as usize];
    if id == MASK { 0 } else { 1 + usize::from(id == target) }
}

fn restored(instance: &Instance) -> Vec<u32> {
    let mut ids = instance.ids.clone();
    instance.predicted.iter().for_each(|predicted| ids[predicted.position as usize] = predicted.target);
    ids
}

/// The first and last position of every run of predicted tokens.
fn runs(instance: &Instance) -> Vec<(u32, u32)> {
    let positions: Vec<u32> = instance.predicted.iter().map(|predicted| predicted.position).collect();
    positions.chunk_by(|a, b| a + 1 == *b).map(|run| (run[0], run[run.len() - 1])).collect()
}

#[test]
fn roberta_rounds_by_chance_and_masks_special_tokens() {
    let all = documents(3, 500, (5, 30), (5, 40));
    let (mut tokens, mut predicted, mut counts, mut specials) = (0, 0, [0; 3], [0; 2]);
    let (mut expected, mut ups, mut fractions) = (0.0, 0.0, 0.0);
    for instance in million(&all, &roberta()) {
        let n = instance.ids.len();
        let count = 0.15 * n as f64;
        assert!([count.floor(), count.floor() + 1.0].contains(&(instance.predicted.len() as f64)), "{n}");
        tokens += n;
        predicted += instance.predicted.len();
        expected += count;
        ups += instance.predicted.len() as f64 - count.floor();
        fractions += count.fract();
        for p in &instance.predicted {
            counts[fate(&instance, p.position, p.target)] += 1;
            // A special token is never drawn in another's place.
            assert!(instance.ids[p.position as usize] >= MASK || instance.ids[p.position as usize] == p.target);
            specials[0] += usize::from(p.target < FIRST);
        }
        specials[1] += restored(&instance).iter().filter(|id| **id < FIRST).count();
    }
    for (what, (count, share)) in ["mask", "random", "same"].into_iter().zip(counts.into_iter().zip([0.8, 0.1, 0.1])) {
        assert_share(what, count, predicted, share);
    }
    // Rounded up as often as the fraction says, so that the share is p.
    assert!((ups - fractions).abs() < 4.0 * (fractions / 2.0).sqrt(), "{ups} of {fractions}");
    assert!((predicted as f64 - expected).abs() < 4.0 * (fractions / 2.0).sqrt());
    assert_share("special", specials[0], specials[1], predicted as f64 / tokens as f64);
    assert!(specials[1] > 40_000);
}

#[test]
fn bernoulli_masks_each_token_or_word_by_itself() {
    let all = documents(3, 500, (5, 30), (5, 40));
    for masking in [Masking::Pieces, Masking::Words] {
        let settings = InstanceSettings { masking, sequence_length: 64, ..modern() };
        let (mut units, mut hidden, mut counts, mut predicted) = (0, 0, [0; 3], 0);
        let (mut both, mut variance, mut full) = (0, 0.0, 0_usize);
        for instance in million(&all, &settings) {
            let ids = restored(&instance);
            let is_hidden = |i: usize| instance.predicted.binary_search_by_key(&(i as u32), |p| p.position).is_ok();
            let starts = (0..ids.len()).filter(|i| {
                let within = masking == Masking::Words && *i > 0 && ids[*i - 1] >= FIRST && !begins(ids[*i]);
                ids[*i] >= FIRST && !within
            });
            let starts: Vec<usize> = starts.collect();
            units += starts.len();
            hidden += starts.iter().filter(|i| is_hidden(**i)).count();
            both += starts.windows(2).filter(|pair| is_hidden(pair[0]) && is_hidden(pair[1])).count();
            for i in (1..ids.len()).filter(|i| ids[*i] >= FIRST && !starts.contains(i)) {
                assert_eq!(is_hidden(i), is_hidden(i - 1), "a word is masked whole");
            }
            if masking == Masking::Pieces && ids.len() == 64 && !ids[1..63].contains(&SEP) {
                variance += (instance.predicted.len() as f64 - 0.3 * 62.0).powi(2);
                full += 1;
            }
            for p in &instance.predicted {
                assert!(p.target >= FIRST);
                counts[fate(&instance, p.position, p.target)] += 1;
            }
            predicted += instance.predicted.len();
        }
        assert_share("masked", hidden, units, 0.3);
        // Neighbours know nothing of each other.
        assert!((both as f64 / units as f64 - 0.09).abs() < 0.004, "{both} of {units}");
        counts.into_iter().zip([0.8, 0.1, 0.1]).for_each(|(n, share)| assert_share("fate", n, predicted, share));
        if masking == Masking::Pieces {
            // No number is kept to: it varies as that of coins does.
            let (found, expected) = (variance / full as f64, 62.0 * 0.3 * 0.7);
            assert!(full > 1000 && (found / expected - 1.0).abs() < 0.1, "{found} not {expected}");
        }
    }
}

/// SpanBERT's loop as one would write it down, on words of the corpora; gives the lengths of merged spans in tokens.
fn spanbert_by_hand(words: &[(u32, u32)], n: u32, draws: &mut Stream) -> Vec<u32> {
    let budget = (f64::from(n) * 0.15).ceil() as usize;
    let mut masked = std::collections::BTreeSet::new();
    while masked.len() < budget {
        let mut length = 1;
        let mut stops = f64::from(draws.below(1 << 30)) / f64::from(1 << 30) * (1.0 - 0.8_f64.powi(10));
        while length < 10 && stops >= 0.2 * 0.8_f64.powi(length - 1) {
            stops -= 0.2 * 0.8_f64.powi(length - 1);
            length += 1;
        }
        let anchor = draws.below(n);
        if masked.contains(&anchor) {
            continue;
        }
        let word = words.iter().position(|(_, end)| anchor < *end).unwrap();
        for position in words[word..].iter().take(length as usize).flat_map(|(start, end)| *start..*end) {
            if masked.len() < budget {
                masked.insert(position);
            }
        }
    }
    let masked: Vec<u32> = masked.into_iter().collect();
    masked.chunk_by(|a, b| a + 1 == *b).map(|run| run.len() as u32).collect()
}

#[test]
fn spanbert_has_its_budget_and_its_spans() {
    let all = documents(3, 400, (20, 60), (5, 40));
    let (mut counts, mut spans, mut inside) = ([0; 3], 0, 0);
    let (mut found, mut expected) = ([0.0_f64; 41], [0.0_f64; 41]);
    let (mut draws, mut sequences) = (Stream::new(99, 0, 0), 0);
    for instance in million(&all, &spanbert()) {
        let ids = restored(&instance);
        let n = ids.len() - 2;
        assert!(ids[1..=n].iter().all(|id| *id >= FIRST) && instance.segments == vec![0; n + 2]);
        assert_eq!(instance.predicted.len(), (n as f64 * 0.15).ceil() as usize);
        let mut words: Vec<(u32, u32)> = Vec::new();
        for (i, id) in ids[1..=n].iter().enumerate() {
            match words.last_mut() {
                Some(word) if !begins(*id) => word.1 += 1,
                _ => words.push((i as u32, i as u32 + 1)),
            }
        }
        let mut cut = 0;
        for (start, end) in runs(&instance) {
            // Both sides are as they were: what is masked is in the span.
            assert!([start - 1, end + 1].into_iter().all(|i| instance.ids[i as usize] == ids[i as usize]));
            let fates: Vec<usize> = (start..=end).map(|i| fate(&instance, i, ids[i as usize])).collect();
            assert!(fates.iter().all(|fate| *fate == fates[0]), "{fates:?}");
            counts[fates[0]] += 1;
            spans += 1;
            found[(end - start + 1).min(40) as usize] += 1.0;
            assert!(words.iter().any(|word| word.0 + 1 == start), "a span begins with a word");
            cut += usize::from(words.iter().all(|word| word.1 != end));
        }
        assert!(cut <= 1, "only the last span may end inside a word");
        inside += cut;
        sequences += 1;
        spanbert_by_hand(&words, n as u32, &mut draws).iter().for_each(|n| expected[(*n).min(40) as usize] += 1.0);
    }
    counts.into_iter().zip([0.8, 0.1, 0.1]).for_each(|(count, share)| assert_share("fate", count, spans, share));
    assert!(inside > sequences / 20, "{inside} of {sequences}");
    let total: f64 = expected.iter().sum();
    assert!((spans as f64 / total - 1.0).abs() < 0.02, "{spans} spans, by hand {total}");
    for (length, (found, expected)) in found.into_iter().zip(expected).enumerate() {
        assert!(
            (found - expected).abs() <= 5.0 * (found + expected).max(1.0).sqrt(),
            "{length}: {found} not {expected}"
        );
    }
}

/// Spans far apart and never cut have the lengths that are drawn: P(1) = 0.224 and P(10) = 0.030 are SpanBERT's.
#[test]
fn single_spans_have_geometric_lengths() {
    // Words of one token each, 4,000 of them: one span of a budget of ten, and what is left of it.
    let all: Documents = vec![vec![(0..4000).map(|i| FIRST + 2 + 3 * (i % 1000)).collect()]; 3];
    let settings = InstanceSettings { sequence_length: 4002, mask_probability: 0.0025, ..spanbert() };
    let made = instances(&all, &settings, 5);
    let mut whole = [0; 11];
    for epoch in 0..4000 {
        for instance in in_order(&made.epoch(epoch, 1).unwrap()) {
            assert_eq!(instance.predicted.len(), 10);
            let runs = runs(&instance);
            // A single run of ten: drawn at once, or made of spans that touch, which one in some thousand do.
            whole[runs.len()] += 1;
        }
    }
    let sequences: usize = whole.iter().sum();
    assert_share("one span of ten", whole[1], sequences, 0.030_07);
    // Ten spans of one word each, if the first nine have one: 0.224⁹ is nearly never.
    assert_eq!(whole[10], 0);
}

#[test]
fn spanbert_draws_random_tokens_from_the_corpus() {
    // Nine of ten tokens are one id, which a uniform draw would hardly ever give.
    let common = FIRST + 2;
    let document = |d: u32| {
        let id = |i: u32| if i.is_multiple_of(10) { FIRST + 3 + 3 * ((d * 31 + i) % 300) } else { common };
        (0..20).map(|s| (0..30).map(|i| id(s * 30 + i)).collect()).collect()
    };
    let all: Documents = (0..60).map(document).collect();
    let (mut random, mut commons) = (0, 0);
    let settings = InstanceSettings { mask_split: [0.0, 1.0, 0.0], ..spanbert() };
    let corpus = Arc::new(Corpus::from_documents(vocabulary(1000), &all));
    let made = Arc::new(Instances::new(corpus, bert(), settings, 5).unwrap());
    for epoch in 0..8 {
        for instance in in_order(&made.epoch(epoch, 1).unwrap()) {
            for predicted in &instance.predicted {
                random += 1;
                commons += usize::from(instance.ids[predicted.position as usize] == common);
            }
        }
    }
    assert!(random > 20_000);
    assert_share("the common token", commons, random, 0.9);
}

#[test]
fn boundaries_are_those_of_inner_spans() {
    let all = documents(3, 200, (5, 30), (5, 40));
    let made = instances(&all, &InstanceSettings { mask_probability: 0.3, ..spanbert() }, 1);
    let epoch = made.epoch(0, 1).unwrap();
    let (mut at_edges, mut long) = (0, 0);
    for batch in in_order(&epoch).chunks(5) {
        let part = part_of(batch, 0);
        let mut expected = Boundaries::default();
        let mut begin = 0;
        for instance in batch {
            let last = instance.ids.len() as u32 - 2;
            for (start, end) in runs(instance) {
                // Next to [CLS] or [SEP] there is no token to predict from.
                if start == 1 || end == last {
                    at_edges += 1;
                    continue;
                }
                long += usize::from(end - start + 1 > 15);
                for (place, i) in (start..=end).enumerate().take(15) {
                    expected.ends.extend([begin + start - 1, begin + end + 1]);
                    expected.places.push(place as u32);
                    expected.targets.push(instance.predicted.iter().find(|p| p.position == i).unwrap().target);
                }
            }
            begin += instance.ids.len() as u32;
        }
        let found = made.boundaries(&part, 15);
        assert_eq!(found, expected);
        assert!(found.ends.iter().all(|row| !part.rows.contains(row) && part.ids[*row as usize] >= FIRST));
    }
    assert!(at_edges > 20 && long > 20, "{at_edges} {long}");
}

/// As one would write it down: every sentence ends with a separator, a document with one more; `[SEP]` of the template is the
/// last of a sequence.
#[test]
fn full_sentences_with_a_separator_each() {
    let mut all = documents(1, 200, (1, 8), (1, 12));
    all.extend(documents(2, 3, (1, 3), (40, 90)));
    all[7].insert(1, vec![]);
    all[20] = vec![];
    let mut lost = 0;
    for (sequence_length, long_sentences) in [
        (4, LongSentences::Cut),
        (16, LongSentences::Cut),
        (33, LongSentences::Cut),
        (33, LongSentences::Drop),
        (33, LongSentences::Split),
        (101, LongSentences::Cut),
    ] {
        let room = sequence_length - 2;
        let (mut packed, mut open) = (Vec::new(), Vec::new());
        for document in &all {
            let mut border = vec![SEP, SEP];
            for sentence in document.iter().filter(|sentence| !sentence.is_empty()) {
                let between = if open.is_empty() { vec![] } else { std::mem::replace(&mut border, vec![SEP]) };
                border = vec![SEP];
                if open.len() + between.len() + sentence.len() <= room {
                    open = [open, between, sentence.clone()].concat();
                    continue;
                }
                packed.push(std::mem::replace(&mut open, sentence.clone()));
                while open.len() > room {
                    let rest = open.split_off(room);
                    lost += usize::from(long_sentences != LongSentences::Split);
                    match long_sentences {
                        LongSentences::Split => packed.push(std::mem::replace(&mut open, rest)),
                        LongSentences::Cut => packed.push(std::mem::take(&mut open)),
                        LongSentences::Drop => open.clear(),
                    }
                }
            }
        }
        packed.push(open);
        packed.retain(|sequence: &Vec<u32>| !sequence.is_empty());
        let settings = InstanceSettings { sequence_length, long_sentences, ..roberta() };
        let found: Vec<Vec<u32>> =
            in_order(&instances(&all, &settings, 8).epoch(0, 1).unwrap()).iter().map(restored).collect();
        let expected: Vec<Vec<u32>> = packed.iter().map(|ids| [&[CLS], &ids[..], &[SEP]].concat()).collect();
        assert!(found == expected, "{sequence_length} {long_sentences:?}");
    }
    assert!(lost > 10);
}

#[test]
fn doc_sentences_with_a_separator_each() {
    let all = documents(1, 100, (1, 20), (1, 25));
    let settings = InstanceSettings { sequence_length: 40, packing: Packing::Documents, ..roberta() };
    for instance in in_order(&instances(&all, &settings, 8).epoch(0, 1).unwrap()) {
        let ids = restored(&instance);
        assert!(ids.len() <= 40 && ids[0] == CLS && ids[ids.len() - 1] == SEP);
        let sentences: Vec<&[u32]> = ids[1..ids.len() - 1].split(|id| *id == SEP).collect();
        let own: Vec<&[u32]> = all[instance.document].iter().map(Vec::as_slice).collect();
        assert!(own.windows(sentences.len()).any(|run| run == sentences), "{sentences:?}");
    }
}

#[test]
fn long_sentences_are_dropped() {
    let mut all = documents(1, 50, (1, 8), (1, 12));
    let first_long = all.iter().flatten().flatten().max().unwrap() + 1;
    let mut next = first_long;
    for document in all.iter_mut().step_by(3) {
        document.insert(document.len() / 2, (next..next + 70).collect());
        next += 70;
    }
    // A document of which nothing is left.
    all[0] = vec![(next..next + 65).collect()];
    for (sequence_length, packing) in [(66, Packing::Documents), (66, Packing::FullSentences)] {
        let settings = InstanceSettings { sequence_length, packing, ..spanbert() };
        let instances = in_order(&instances(&all, &settings, 8).epoch(0, 1).unwrap());
        let mut seen: Vec<u32> = instances.iter().flat_map(|instance| originals(instance)[0].clone()).collect();
        let kept = all.iter().flatten().filter(|sentence| sentence.len() <= 64).flatten();
        let mut expected: Vec<u32> = kept.copied().collect();
        seen.sort_unstable();
        expected.sort_unstable();
        assert_eq!(seen, expected, "{packing:?}");
    }
    let all: Documents = vec![vec![(10..80).collect()]];
    for packing in [Packing::Documents, Packing::FullSentences] {
        let settings = InstanceSettings { sequence_length: 66, packing, ..spanbert() };
        let error = instances(&all, &settings, 8).epoch(0, 1).unwrap_err();
        assert!(matches!(error, DataError::NothingFits { room: 64 }), "{error}");
    }
}

#[test]
fn sentence_pairs_are_two_sentences() {
    let all = documents(5, 300, (1, 20), (1, 25));
    let packing = Packing::SentencePairs;
    let settings = InstanceSettings { packing, sequence_length: 64, ..InstanceSettings::default() };
    let (mut random, mut of_two) = (0, 0);
    for instance in in_order(&instances(&all, &settings, 3).epoch(0, 1).unwrap()) {
        let [first, second] = originals(&instance);
        let own = &all[instance.document];
        let at = own.iter().position(|sentence| *sentence == first).unwrap();
        match (instance.next_sentence, instance.random_document) {
            (Some(0), None) => assert_eq!(own[at + 1], second),
            (Some(1), Some(other)) => assert!(other != instance.document && all[other].contains(&second)),
            wrong => panic!("{wrong:?}"),
        }
        if at + 1 < own.len() {
            of_two += 1;
            random += usize::from(instance.next_sentence == Some(1));
        }
    }
    assert_share("random", random, of_two, 0.5);
}

#[test]
fn instances_are_pure_whatever_the_threads() {
    let all = documents(1, 40, (1, 9), (1, 20));
    let pairs = InstanceSettings { packing: Packing::SentencePairs, ..InstanceSettings::default() };
    for settings in [roberta(), spanbert(), modern(), pairs] {
        let settings = InstanceSettings { sequence_length: 32, ..settings };
        let made = instances(&all, &settings, 5);
        let steps = |place: Place, threads: usize, count: usize| -> Vec<Step> {
            let mut loader = Loader::new(made.clone(), place, 12, 3, threads, 3).unwrap();
            (0..count).map(|_| loader.next().unwrap()).collect()
        };
        let whole = steps(Place::default(), 1, 30);
        assert!(whole[29].after.epoch > 1);
        assert!(steps(Place::default(), 4, 30) == whole, "{settings:?}");
        for done in [0, 7, 23] {
            assert!(steps(whole[done].after, 2, 29 - done) == whole[done + 1..], "{settings:?} after {done}");
        }
        // By seed, epoch and index alone; another seed or epoch masks otherwise.
        let again = instances(&all, &settings, 5).epoch(2, 3).unwrap();
        let epoch = made.epoch(2, 1).unwrap();
        assert!((0..epoch.count()).all(|i| epoch.get(i).unwrap() == again.get(i).unwrap()));
        let [first, second, other] = [(5, 0), (5, 1), (6, 0)]
            .map(|(seed, epoch)| in_order(&instances(&all, &settings, seed).epoch(epoch, 1).unwrap()));
        assert!(first != second && first != other);
    }
}

#[test]
fn settings_that_contradict_each_other_are_refused() {
    let nsp = InstanceSettings::default;
    let cases = [
        (InstanceSettings { packing: Packing::SentencePairs, ..mlm() }, "packing"),
        (InstanceSettings { separators: Separators::Sentences, ..nsp() }, "separators"),
        (InstanceSettings { long_sentences: LongSentences::Drop, ..nsp() }, "long_sentences"),
        (InstanceSettings { long_sentences: LongSentences::Cut, packing: Packing::Blocks, ..mlm() }, "long_sentences"),
        (InstanceSettings { mask_count: MaskCount::Bernoulli, masking: Masking::Spans, ..mlm() }, "mask_count"),
        (InstanceSettings { mask_count: MaskCount::Bernoulli, max_predictions: Some(3), ..mlm() }, "mask_count"),
        (InstanceSettings { mask_count: MaskCount::Stochastic, masking: Masking::SpanBert, ..mlm() }, "mask_count"),
        (InstanceSettings { mask_specials: true, masking: Masking::SpanBert, ..mlm() }, "mask_specials"),
        (InstanceSettings { mask_specials: true, objective: Objective::SpanBoundary, ..mlm() }, "mask_specials"),
    ];
    for (settings, expected) in cases {
        match settings.check().unwrap_err() {
            DataError::InstanceSetting { name, .. } => assert_eq!(name, expected),
            other => panic!("{other}"),
        }
    }
    [roberta(), spanbert(), modern()].iter().for_each(|settings| settings.check().unwrap());
}
