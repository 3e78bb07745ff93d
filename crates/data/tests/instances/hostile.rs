//! Whatever the corpus and the settings: an error or instances that fit, never a panic.

use std::sync::Arc;

use henson_data::{
    Corpus, Cut, DataError, InstanceSettings, Instances, Loader, LongSentences, MaskCount, Masking, Objective, Packing,
    Place, Predicted, Separators, Vocabulary, part_of,
};
use henson_text::Template;
use proptest::prelude::*;

use crate::corpora::{CLS, FIRST, SEP, bert, vocabulary};

fn any_settings() -> impl Strategy<Value = InstanceSettings> {
    let names = (
        prop_oneof![
            Just(Objective::MlmNsp),
            Just(Objective::MlmSop),
            Just(Objective::Mlm),
            Just(Objective::SpanBoundary),
            Just(Objective::Causal),
            Just(Objective::ReplacedTokens),
            Just(Objective::Permutation)
        ],
        prop_oneof![
            Just(Packing::Documents),
            Just(Packing::FullSentences),
            Just(Packing::Blocks),
            Just(Packing::SentencePairs)
        ],
        prop_oneof![
            Just(Masking::Pieces),
            Just(Masking::Words),
            Just(Masking::Spans),
            Just(Masking::SpanBert),
            Just(Masking::NGrams)
        ],
        prop_oneof![Just([0.8, 0.1, 0.1]), Just([0.0, 0.0, 1.0]), Just([0.0, 1.0, 0.0]), Just([1.0, 0.0, 0.0])],
    );
    let blocks = proptest::option::weighted(0.2, 0_usize..5);
    let numbers =
        (0_usize..20, 0.0..=1.0, 0.0..=1.0, proptest::option::of(0_usize..5), 0_u32..3, any::<bool>(), blocks);
    let rules = (
        prop_oneof![Just(LongSentences::Split), Just(LongSentences::Cut), Just(LongSentences::Drop)],
        prop_oneof![Just(Separators::Documents), Just(Separators::Sentences)],
        prop_oneof![3 => Just(MaskCount::Rounded), 1 => Just(MaskCount::Stochastic), 1 => Just(MaskCount::Bernoulli)],
        proptest::bool::weighted(0.3),
    );
    (names, rules, numbers).prop_map(|((objective, packing, masking, mask_split), rules, numbers)| {
        let (long_sentences, separators, mask_count, mask_specials) = rules;
        let (sequence_length, short_sequences, mask_probability, max_predictions, dupe_factor, repeated_draws, blocks) =
            numbers;
        InstanceSettings {
            sequence_length,
            objective,
            packing,
            long_sentences,
            separators,
            short_sequences,
            masking,
            mask_probability,
            mask_count,
            mask_specials,
            max_predictions,
            mask_split,
            dupe_factor,
            repeated_draws,
            permutation_size: blocks,
            ..InstanceSettings::default()
        }
    })
}

/// Few ids, so that words are long and special pieces stand in the text.
pub(crate) fn any_documents() -> impl Strategy<Value = Vec<Vec<Vec<u32>>>> {
    let sentence = prop_oneof![
        1 => proptest::collection::vec(0_u32..12, 0..3),
        1 => proptest::collection::vec(0_u32..12, 0..40),
        1 => proptest::collection::vec(Just(6_u32), 0..40),
    ];
    proptest::collection::vec(proptest::collection::vec(sentence, 0..6), 0..8)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn nothing_panics(settings in any_settings(), documents in any_documents(), seed: u64, epoch: u64) {
        let corpus = Arc::new(Corpus::from_documents(vocabulary(12), &documents));
        let with_text = documents.iter().filter(|document| !document.concat().is_empty()).count();
        let pairs = settings.objective.has_pairs();
        let (least_documents, shortest) = if pairs { (2, 5) } else { (1, 3) };
        let Ok(instances) = Instances::new(corpus, bert(), settings.clone(), seed) else {
            let long_enough = settings.sequence_length >= if pairs || settings.cut() == Cut::Consecutive { 5 } else { 4 };
            prop_assert!(settings.check().is_err() || !long_enough || with_text < least_documents);
            return Ok(());
        };
        let instances = Arc::new(instances);
        let epoch = match instances.epoch(epoch, 1) {
            Ok(epoch) => epoch,
            Err(error) => {
                prop_assert!(settings.long_sentences == LongSentences::Drop, "{}", error);
                return Ok(());
            }
        };
        prop_assert!(epoch.count() >= 1);
        for index in 0..epoch.count() {
            let instance = epoch.get(index).unwrap();
            let length = instance.ids.len();
            prop_assert!((shortest..=settings.sequence_length).contains(&length));
            prop_assert_eq!(instance.segments.len(), length);
            let mut ids = instance.ids.clone();
            if settings.objective != Objective::Causal {
                instance.predicted.iter().for_each(|predicted| ids[predicted.position as usize] = predicted.target);
            }
            prop_assert_eq!([ids[0], ids[length - 1]], [CLS, SEP]);
            prop_assert_eq!(instance.next_sentence.is_some(), pairs);
            let again = |pair: &[Predicted]| settings.repeated_draws && pair[0] == pair[1];
            prop_assert!(instance.predicted.windows(2).all(|pair| pair[0].position < pair[1].position || again(pair)));
            if settings.objective != Objective::Causal {
                let most = settings.predictions(length) + usize::from(settings.mask_count == MaskCount::Stochastic);
                let by_length = settings.mask_count != MaskCount::Bernoulli && settings.masking != Masking::SpanBert;
                prop_assert!(instance.predicted.len() <= most || !by_length);
                for predicted in &instance.predicted {
                    prop_assert!((predicted.position as usize) < length);
                    prop_assert!(settings.mask_specials || ![CLS, SEP].contains(&predicted.target));
                }
                if let Some(orders) = &instance.orders {
                    let least = orders.iter().min().unwrap();
                    for predicted in &instance.predicted {
                        prop_assert!(orders[predicted.position as usize] > *least, "{:?} {:?}", orders, predicted);
                    }
                }
                prop_assert_eq!(instance.orders.is_some(), settings.objective == Objective::Permutation);
                let boundaries = instances.boundaries(&part_of(&[instance], 0), 15);
                prop_assert!(settings.repeated_draws || boundaries.ends.iter().all(|row| ![CLS, SEP].contains(&ids[*row as usize])));
            }
        }
        let mut loader = Loader::new(instances, Place::default(), 4, 2, 2, 2).unwrap();
        for _ in 0..5 {
            prop_assert_eq!(loader.next().unwrap().parts.len(), 2);
        }
    }
}

#[test]
fn refusals_say_what_to_do() {
    let documents = |count: usize| vec![vec![vec![FIRST; 9]; 3]; count];
    let refused = |settings: InstanceSettings, vocabulary: Vocabulary, documents: &[Vec<Vec<u32>>]| {
        let corpus = Arc::new(Corpus::from_documents(vocabulary, documents));
        Instances::new(corpus, bert(), settings, 0).map(|_| ()).unwrap_err()
    };
    let default = InstanceSettings::default;
    let mlm = InstanceSettings { objective: Objective::Mlm, ..default() };
    let causal = InstanceSettings { objective: Objective::Causal, ..default() };
    let no_mask = Vocabulary { mask: None, ..vocabulary(12) };
    let only_special = Vocabulary { special: (0..12).collect(), ..vocabulary(12) };

    let one = refused(default(), vocabulary(12), &documents(1));
    assert!(matches!(one, DataError::TooFewDocuments { documents: 1, needed: 2 }), "{one}");
    assert!(one.to_string().contains("objective = \"mlm\""), "{one}");
    assert!(matches!(refused(mlm.clone(), vocabulary(12), &[]), DataError::TooFewDocuments { documents: 0, .. }));
    assert!(matches!(refused(default(), no_mask.clone(), &documents(2)), DataError::NoMask));
    assert!(matches!(refused(mlm, only_special, &documents(2)), DataError::NoPieces));
    assert!(Instances::new(Arc::new(Corpus::from_documents(no_mask, &documents(1))), bert(), causal, 0).is_ok());

    let laid_out = |template: Template, sequence_length| {
        let corpus = Arc::new(Corpus::from_documents(vocabulary(12), &documents(2)));
        let settings = InstanceSettings { sequence_length, ..default() };
        Instances::new(corpus, template, settings, 0).map(|_| ())
    };
    assert!(matches!(laid_out(Template::bert(2, 12), 32), Err(DataError::ForeignTemplate { id: 12, size: 12 })));
    // Four special tokens and a piece of each text.
    assert!(laid_out(Template::roberta(CLS, SEP), 6).is_ok());
    let error = laid_out(Template::roberta(CLS, SEP), 5).unwrap_err().to_string();
    assert!(error.starts_with("sequence_length = 5") && error.contains("4 of them special"), "{error}");

    let settings = [
        ("sequence_length = 4", InstanceSettings { sequence_length: 4, ..default() }),
        ("sequence_length = 3", InstanceSettings { sequence_length: 3, objective: Objective::Mlm, ..default() }),
        ("sequence_length = 18446744073709551615", InstanceSettings { sequence_length: usize::MAX, ..default() }),
        ("packing = blocks", InstanceSettings { packing: Packing::Blocks, ..default() }),
        ("packing = full-sentences", InstanceSettings { packing: Packing::FullSentences, ..default() }),
        ("short_sequences = -0.1", InstanceSettings { short_sequences: -0.1, ..default() }),
        ("short_sequences = NaN", InstanceSettings { short_sequences: f64::NAN, ..default() }),
        ("mask_probability = 0", InstanceSettings { mask_probability: 0.0, ..default() }),
        ("mask_probability = NaN", InstanceSettings { mask_probability: f64::NAN, ..default() }),
        ("mask_probability = 1.5", InstanceSettings { mask_probability: 1.5, ..default() }),
        ("max_predictions = 0", InstanceSettings { max_predictions: Some(0), ..default() }),
        ("mask_split = [0.8, 0.1, 0.2]", InstanceSettings { mask_split: [0.8, 0.1, 0.2], ..default() }),
        ("mask_split = [1.5, -0.5, 0.0]", InstanceSettings { mask_split: [1.5, -0.5, 0.0], ..default() }),
    ];
    for (expected, settings) in settings {
        let error = refused(settings, vocabulary(12), &documents(2)).to_string();
        assert!(error.starts_with(expected) && error.contains(": "), "{error}");
    }
}

/// Settings are part of recipes: their words are fixed.
#[test]
fn settings_in_words() {
    let text = r#"{"sequence_length":64,"objective":"mlm-nsp","packing":"documents","short_sequences":0.1,
        "masking":"whole-words","mask_probability":0.15,"mask_split":[0.8,0.1,0.1],"dupe_factor":10}"#;
    let settings: InstanceSettings = serde_json::from_str(text).unwrap();
    let expected = InstanceSettings {
        sequence_length: 64,
        masking: Masking::Words,
        dupe_factor: 10,
        ..InstanceSettings::default()
    };
    assert_eq!(settings, expected);
    let written: serde_json::Value = serde_json::to_value(&settings).unwrap();
    let mut all = serde_json::from_str::<serde_json::Value>(text).unwrap();
    let more = [("long_sentences", "split"), ("separators", "documents"), ("mask_count", "rounded")];
    more.into_iter().for_each(|(key, word)| all[key] = word.into());
    all["mask_specials"] = false.into();
    assert_eq!(written, all);
    let words = |text: &str| serde_json::from_str::<InstanceSettings>(text);
    assert_eq!(
        words(r#"{"masking":"spans","objective":"causal","packing":"blocks"}"#).unwrap().masking,
        Masking::Spans
    );
    assert_eq!(words(r#"{"packing":"full-sentences"}"#).unwrap().packing, Packing::FullSentences);
    assert_eq!(words(r#"{"packing":"doc-sentences"}"#).unwrap().packing, Packing::Documents);
    let spanbert = words(r#"{"masking":"spanbert","objective":"span-boundary","long_sentences":"drop"}"#).unwrap();
    assert_eq!((spanbert.masking, spanbert.objective), (Masking::SpanBert, Objective::SpanBoundary));
    let roberta = words(r#"{"separators":"sentences","mask_count":"stochastic","packing":"sentence-pairs"}"#).unwrap();
    assert_eq!((roberta.separators, roberta.mask_count), (Separators::Sentences, MaskCount::Stochastic));
    assert_eq!(words("{}").unwrap(), InstanceSettings::default());
    assert!(words(r#"{"masking":"words"}"#).is_err());
}
