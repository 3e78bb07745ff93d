//! What encoder-decoders are pre-trained on: T5's spans and BART's noises, over a million tokens.

use std::sync::Arc;

use henson_data::{
    Corpus, DataError, Instance, InstanceSettings, Instances, Loader, NoiseSettings, Objective, Packing, Place, Step,
    Vocabulary, part_of,
};
use henson_text::Template;
use proptest::prelude::*;

use crate::corpora::{CLS, Documents, FIRST, MASK, SEP, documents, in_order, vocabulary};
use crate::hostile::any_documents;

/// The first sentinel; the others count down from it.
const SENTINEL: u32 = 999_999;

fn corpus(documents: &[Vec<Vec<u32>>]) -> Arc<Corpus> {
    corpus_below(SENTINEL, documents)
}

/// With a hundred sentinels from `last` down.
fn corpus_below(last: u32, documents: &[Vec<Vec<u32>>]) -> Arc<Corpus> {
    let sentinels: Vec<u32> = (0..100).map(|number| last - number).collect();
    let mut special: Vec<u32> = (0..FIRST).chain(sentinels.iter().copied()).collect();
    special.sort_unstable();
    let vocabulary = Vocabulary { special, sentinels, ..vocabulary(last + 1) };
    Arc::new(Corpus::from_documents(vocabulary, documents))
}

fn made(documents: &Documents, settings: &InstanceSettings, seed: u64) -> Arc<Instances> {
    Arc::new(Instances::new(corpus(documents), Template::bert(CLS, SEP), settings.clone(), seed).unwrap())
}

/// Instances of so many epochs that the texts have a million tokens.
fn million(all: &Documents, settings: &InstanceSettings) -> Vec<Instance> {
    let made = made(all, settings, 1);
    let (mut found, mut tokens, mut epoch) = (Vec::new(), 0, 0);
    while tokens < 1_000_000 {
        let instances = in_order(&made.epoch(epoch, 2).unwrap());
        tokens += instances.iter().map(|instance| instance.target.as_ref().unwrap().len()).sum::<usize>();
        tokens += if settings.objective == Objective::SpanCorruption { 512 * instances.len() } else { 0 };
        found.extend(instances);
        epoch += 1;
    }
    found
}

fn t5() -> InstanceSettings {
    InstanceSettings {
        objective: Objective::SpanCorruption,
        packing: Packing::Blocks,
        sequence_length: 512,
        short_sequences: 0.0,
        ..InstanceSettings::default()
    }
}

fn bart(noise: NoiseSettings) -> InstanceSettings {
    InstanceSettings {
        objective: Objective::Denoising,
        sequence_length: 256,
        short_sequences: 0.0,
        noise: Some(noise),
        ..InstanceSettings::default()
    }
}

const NONE: NoiseSettings =
    NoiseSettings { permutation: 0.0, masking: 0.0, deletion: 0.0, infilling: 0.0, rotation: 0.0, random: 0.0 };

/// Whether a text has an id; the ids of a document count up.
fn is_in(text: &[u32], id: u32) -> bool {
    text[0] <= id && id <= text[text.len() - 1]
}

fn assert_near(count: usize, of: usize, share: f64, most: f64) {
    let found = count as f64 / of as f64;
    assert!((found - share).abs() <= most, "{found}, expected {share}");
}

/// The text that a source and a target of spans came from, and the lengths of the spans. Says so where the two do not fit.
fn restored(source: &[u32], target: &[u32]) -> (Vec<u32>, Vec<usize>) {
    let is_sentinel = |id: &u32| *id > SENTINEL - 100;
    assert_eq!((source.last(), target.last()), (Some(&SEP), Some(&SEP)));
    let (source, target) = (&source[..source.len() - 1], &target[..target.len() - 1]);
    assert!(is_sentinel(&target[0]) && !is_sentinel(&source[0]) && is_sentinel(&source[source.len() - 1]));
    let mut spans: Vec<&[u32]> = target.split(is_sentinel).collect();
    assert!(spans.remove(0).is_empty());
    let sentinels = |ids: &[u32]| -> Vec<u32> { ids.iter().copied().filter(is_sentinel).collect() };
    // One for each span, in the order of the vocabulary's end.
    let expected: Vec<u32> = (0..spans.len() as u32).map(|number| SENTINEL - number).collect();
    assert_eq!([sentinels(source), sentinels(target)], [expected.clone(), expected]);
    let mut text = Vec::new();
    for (kept, span) in source.split(is_sentinel).zip(&spans) {
        assert!(!kept.is_empty() && !span.is_empty());
        text.extend(kept.iter().chain(*span));
    }
    (text, spans.iter().map(|span| span.len()).collect())
}

/// T5's arithmetic: 568 tokens of text become 512 and 114, of which 85 in 28 spans are noise.
#[test]
fn spans_have_t5s_lengths_and_give_the_text_back() {
    let all = documents(3, 400, (5, 60), (3, 40));
    let row: Vec<u32> = all.iter().map(|document| document.concat()).collect::<Vec<_>>().join(&SEP);
    let found = million(&all, &t5());
    let blocks = row.len().div_ceil(568);
    let (mut lengths, mut first_kept, mut full) = ([0_usize; 80], 0, 0);
    for (number, instance) in found.iter().enumerate() {
        assert!(instance.predicted.is_empty() && instance.segments.iter().all(|segment| *segment == 0));
        let target = instance.target.as_ref().unwrap();
        let (text, spans) = restored(&instance.ids, target);
        let block = row.chunks(568).nth(number % blocks).unwrap();
        assert_eq!(text, block);
        if block.len() == 568 {
            assert_eq!((instance.ids.len(), target.len(), spans.len()), (512, 114, 28));
            assert_eq!(spans.iter().sum::<usize>(), 85);
            spans.iter().for_each(|length| lengths[*length] += 1);
            first_kept += instance.ids.iter().position(|id| *id == SENTINEL).unwrap();
            full += 1;
        }
    }
    // Of compositions of 85 into 28, a part is 1 with 27/84, and the mean is 85/28; of 483 kept tokens the first run has 483/28.
    let spans = 28 * full;
    assert_near(lengths[1], spans, 27.0 / 84.0, 0.003);
    assert_near(lengths[2], spans, 27.0 * 57.0 / (84.0 * 83.0), 0.003);
    let mean = first_kept as f64 / full as f64;
    assert!((mean - 483.0 / 28.0).abs() < 1.5, "{mean}");
}

/// Every text is its target; what is hidden has its share, and spans their lengths.
#[test]
fn infilling_has_its_share_and_its_spans() {
    let all = documents(5, 400, (5, 60), (3, 40));
    let noise = NoiseSettings { infilling: 0.3, ..NONE };
    let (mut hidden, mut tokens, mut masks, mut empty) = (0, 0, 0, 0);
    for instance in million(&all, &bart(noise)) {
        let target = instance.target.as_ref().unwrap();
        let (text, source) = (&target[1..target.len() - 1], &instance.ids[1..instance.ids.len() - 1]);
        assert_eq!([target[0], *target.last().unwrap()], [CLS, SEP]);
        assert_eq!([instance.ids[0], *instance.ids.last().unwrap()], [CLS, SEP]);
        // Ids count up: what stays stays in its order, and the gap between two tells what a mask stands for.
        let kept: Vec<u32> = source.iter().copied().filter(|id| *id != MASK).collect();
        assert!(kept.is_sorted() && kept.iter().all(|id| is_in(text, *id)));
        hidden += text.len() - kept.len();
        tokens += text.len();
        masks += source.len() - kept.len();
        empty +=
            source.windows(3).filter(|three| three[1] == MASK && three[0] != MASK && three[2] == three[0] + 1).count();
    }
    // 0.3 in spans of 3.0 tokens on average, whose overlaps hide some tokens twice.
    let share = hidden as f64 / tokens as f64;
    assert!((0.25..0.285).contains(&share), "{share}");
    let span = hidden as f64 / masks as f64;
    assert!((3.0..3.6).contains(&span), "{span}");
    // e^-3 of the draws are empty; some of them stand next to another mask.
    let share = empty as f64 / masks as f64;
    assert!((0.03..0.06).contains(&share), "{share}");
}

#[test]
fn each_noise_does_its_own() {
    let all = documents(7, 300, (5, 60), (3, 40));
    let sentences: Vec<&[u32]> = all.iter().flatten().map(Vec::as_slice).collect();
    let of = |noise| million(&all, &bart(noise));
    let text = |ids: &[u32]| ids[1..ids.len() - 1].to_vec();
    let both = |instance: &Instance| (text(&instance.ids), text(instance.target.as_ref().unwrap()));

    let (mut masked, mut random, mut tokens) = (0, 0, 0);
    for (source, target) in of(NoiseSettings { masking: 0.2, random: 0.1, ..NONE }).iter().map(both) {
        assert_eq!(source.len(), target.len());
        let changed = source.iter().zip(&target).filter(|(new, old)| new != old).count();
        assert!(changed <= (0.2 * target.len() as f64).ceil() as usize);
        masked += source.iter().filter(|id| **id == MASK).count();
        random += changed - source.iter().filter(|id| **id == MASK).count();
        tokens += target.len();
    }
    assert_near(masked + random, tokens, 0.2, 0.005);
    assert_near(random, masked + random, 0.1, 0.005);

    for (source, target) in of(NoiseSettings { deletion: 0.2, ..NONE }).iter().map(both) {
        assert_eq!(source.len(), target.len() - (0.2 * target.len() as f64).ceil() as usize);
        assert!(source.is_sorted() && source.iter().all(|id| is_in(&target, *id)));
    }

    let (mut rotated, mut all_of) = (0, 0);
    for (source, target) in of(NoiseSettings { rotation: 0.5, ..NONE }).iter().map(both) {
        let start = target.iter().position(|id| *id == source[0]).unwrap();
        assert_eq!(source, [&target[start..], &target[..start]].concat());
        rotated += usize::from(start > 0);
        all_of += 1;
    }
    assert_near(rotated, all_of, 0.5, 0.03);

    // Whole sentences change places, and the same come.
    let mut moved = 0;
    for (source, target) in of(NoiseSettings { permutation: 1.0, ..NONE }).iter().map(both) {
        let mut sorted = source.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, target);
        moved += usize::from(source != target);
        let inside = |id: u32| sentences.iter().find(|sentence| sentence.contains(&id)).unwrap();
        // A border between two that do not follow each other is one between sentences; checked now and then, since it is slow.
        if moved % 500 == 1 {
            for pair in source.windows(2).filter(|pair| pair[1] != pair[0] + 1) {
                assert!(inside(pair[0]).last() == Some(&pair[0]) || Some(&pair[0]) == target.last());
                assert!(inside(pair[1])[0] == pair[1] || pair[1] == target[0]);
            }
        }
    }
    assert!(moved > 0);
    // Together: BART's, and all at once.
    for noise in
        [NoiseSettings::default(), NoiseSettings { masking: 0.1, deletion: 0.1, rotation: 0.5, ..Default::default() }]
    {
        for (source, target) in of(noise).iter().map(both) {
            assert!(source.len() <= 254 && source.iter().all(|id| *id == MASK || is_in(&target, *id)));
        }
    }
}

#[test]
fn instances_are_pure_and_parts_have_their_targets() {
    let all = documents(9, 60, (1, 20), (1, 30));
    let full = InstanceSettings { packing: Packing::FullSentences, ..bart(NoiseSettings::default()) };
    for settings in [t5(), bart(NoiseSettings::default()), full] {
        let settings = InstanceSettings { sequence_length: 64, ..settings };
        let steps = |threads: usize| -> Vec<Step> {
            let mut loader = Loader::new(made(&all, &settings, 5), Place::default(), 6, 3, threads, 4).unwrap();
            (0..40).map(|_| loader.next().unwrap()).collect()
        };
        let (one, three) = (steps(1), steps(3));
        assert_eq!(one, three);
        for step in &one {
            let lengths = |part: &henson_data::Part| part.target_lengths.as_ref().unwrap().iter().sum::<usize>();
            assert_eq!(step.predicted, step.parts.iter().map(lengths).sum::<usize>());
            assert_eq!(step.tokens, step.parts.iter().map(|part| part.ids.len() + lengths(part)).sum::<usize>());
            assert!(step.parts.iter().all(|part| part.rows == (0..lengths(part) as u32).collect::<Vec<_>>()));
        }
        // Other seeds and epochs draw otherwise.
        let first = |seed, epoch| made(&all, &settings, seed).epoch(epoch, 1).unwrap().in_order(0).unwrap();
        assert_eq!(first(5, 0), first(5, 0));
        assert!(first(5, 0) != first(6, 0) && first(5, 0) != first(5, 1));
        let instance = first(5, 0);
        let part = part_of(std::slice::from_ref(&instance), 0);
        assert_eq!(part.targets, instance.target.unwrap());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn nothing_panics(
        spans: bool,
        packing in prop_oneof![Just(Packing::Documents), Just(Packing::FullSentences), Just(Packing::Blocks)],
        sequence_length in 0_usize..40,
        (mask_probability, mean_span) in (0.0..=1.0, prop_oneof![Just(3.0), 0.0..=200.0]),
        shares in proptest::array::uniform6(prop_oneof![Just(0.0), Just(1.0), 0.0..=1.0]),
        documents in any_documents(),
    ) {
        let objective = if spans { Objective::SpanCorruption } else { Objective::Denoising };
        let [permutation, masking, deletion, infilling, rotation, random] = shares;
        let noise = NoiseSettings { permutation, masking, deletion, infilling, rotation, random };
        let noise = (!spans).then_some(noise);
        let settings =
            InstanceSettings { objective, packing, sequence_length, mask_probability, mean_span, noise, ..Default::default() };
        let Ok(instances) = Instances::new(corpus_below(120, &documents), Template::bert(CLS, SEP), settings.clone(), 1) else {
            return Ok(());
        };
        let epoch = Arc::new(instances).epoch(0, 1).unwrap();
        for index in 0..epoch.count() {
            let instance = epoch.get(index).unwrap();
            prop_assert!(instance.ids.len() <= sequence_length);
            prop_assert_eq!(instance.segments.len(), instance.ids.len());
            prop_assert!(instance.target.unwrap().len() <= settings.longest_target());
        }
    }
}

#[test]
fn refusals_say_what_to_do() {
    let refused = |settings: InstanceSettings| {
        let all = documents(1, 3, (3, 9), (3, 9));
        Instances::new(corpus(&all), Template::bert(CLS, SEP), settings, 0).map(|_| ()).unwrap_err().to_string()
    };
    let cases = [
        (InstanceSettings { sequence_length: 2, ..t5() }, "at least 3"),
        (InstanceSettings { mask_probability: 0.95, ..t5() }, "at most 0.9"),
        (InstanceSettings { mean_span: 0.0, ..t5() }, "mean_span"),
        (InstanceSettings { sequence_length: 2048, ..t5() }, "--sentinels 114"),
        (InstanceSettings { noise: Some(NONE), ..t5() }, "objective = \"denoising\""),
        (bart(NoiseSettings { deletion: 1.5, ..NONE }), "noise.deletion"),
        (InstanceSettings { packing: Packing::Blocks, ..bart(NoiseSettings::default()) }, "blocks cut sentences"),
    ];
    for (settings, expected) in cases {
        let error = refused(settings);
        assert!(error.contains(expected), "{error}");
    }
    let all = documents(1, 3, (3, 9), (3, 9));
    let plain = Arc::new(Corpus::from_documents(vocabulary(2000), &all));
    let error = Instances::new(plain, Template::bert(CLS, SEP), t5(), 0).map(|_| ()).unwrap_err();
    assert!(matches!(error, DataError::TooFewSentinels { needed: 28, found: 0 }), "{error}");
}
