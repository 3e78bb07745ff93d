//! The report: every key that does not fit, in one go, and parameters untouched when it is an error.

use henson_checkpoint::{
    CheckpointError, LoadOptions, LoadReport, Misshapen, Missing, NonFinite, NotFloat, Repeated, StoredDType, Untied,
    Weights, load,
};

use crate::{Stored, f32s, naming, numbers, ones, safetensors, tiny};

const WORDS: &str = "bert.embeddings.word_embeddings.weight";
const NORM: &str = "bert.embeddings.LayerNorm.weight";
const BIAS: &str = "cls.predictions.bias";
const DENSE: &str = "cls.predictions.transform.dense.weight";

/// Loads a file of these tensors into [`tiny`] and checks that an error changes nothing.
fn check(tensors: &[Stored], options: &LoadOptions<'_>) -> (bool, LoadReport, Vec<(String, Vec<f32>)>) {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("model.safetensors"), safetensors(tensors)).unwrap();
    let weights = Weights::open(directory.path()).unwrap();
    let mut parameters = tiny(3);
    let before = numbers(&parameters);
    match load(&weights, naming(), &mut parameters, options) {
        Ok(report) => (true, report, numbers(&parameters)),
        Err(CheckpointError::DoesNotFit { report, .. }) => {
            assert_eq!(numbers(&parameters), before);
            (false, *report, before)
        }
        Err(error) => panic!("{error}"),
    }
}

fn complete() -> Vec<Stored> {
    vec![ones(WORDS, &[5, 3]), ones(NORM, &[3]), ones(BIAS, &[5]), ones(DENSE, &[3, 3])]
}

fn strict(tensors: &[Stored]) -> (bool, LoadReport, Vec<(String, Vec<f32>)>) {
    check(tensors, &LoadOptions::strict())
}

#[test]
fn all_faults_at_once() {
    let tensors = [
        ones(WORDS, &[7, 3]),
        f32s(BIAS, &[5], &[0.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1.0]),
        ones("classifier.weight", &[2, 3]),
        ones("bert.embeddings.position_ids", &[1, 40]),
        Stored { name: DENSE, dtype: "I32", shape: vec![3, 3], bytes: vec![0; 36] },
    ];
    let (ok, report, _) = strict(&tensors);
    assert!(!ok);
    assert_eq!(report.missing, [Missing { parameter: NORM.into(), shape: vec![3] }]);
    assert_eq!(report.unused, ["classifier.weight"]);
    assert_eq!(report.ignored, ["bert.embeddings.position_ids"]);
    assert_eq!(report.non_finite, [NonFinite { key: BIAS.into(), nan: 1, infinite: 2, total: 5 }]);
    assert_eq!(report.not_float, [NotFloat { key: DENSE.into(), dtype: StoredDType::I32 }]);
    let [Misshapen { key, expected, got, hint: Some(hint) }] = &report.misshapen[..] else { panic!("{report}") };
    assert_eq!((key.as_str(), &expected[..], &got[..]), (WORDS, &[5, 3][..], &[7, 3][..]));
    assert!(hint.contains("vocabulary does not fit"));
    assert_eq!(
        report.to_string(),
        "1 parameters loaded\n\
         1 missing, so not in the file:\n  bert.embeddings.LayerNorm.weight [3]\n\
         1 with a different shape than in the model:\n  bert.embeddings.word_embeddings.weight: expected [5, 3], got [7, 3] (the \
         vocabulary does not fit the model: config and tokenizer must come with these weights)\n\
         1 without floating-point numbers:\n  cls.predictions.transform.dense.weight: I32\n\
         1 with numbers that are not finite:\n  cls.predictions.bias: 1 NaN and 2 infinite of 5\n\
         1 in the file, but not used by this model:\n  classifier.weight"
    );
}

#[test]
fn long_lists_are_cut() {
    let names: Vec<String> = (0..20).map(|i| format!("layer.{i}")).collect();
    let report = LoadReport { unused: names, ..LoadReport::default() };
    let text = report.to_string();
    assert!(text.ends_with("  layer.11\n  … and 8 more"), "{text}");
    assert_eq!(text.lines().count(), 1 + 1 + 12 + 1);
}

#[test]
fn nothing_fits() {
    let (ok, report, _) = strict(&[ones("roberta.embeddings.word_embeddings.weight", &[5, 3])]);
    assert!(!ok && report.to_string().ends_with("is this a model of another family?"), "{report}");
}

#[test]
fn numbers_that_are_not_finite_need_permission() {
    let mut tensors = complete();
    tensors[1] = f32s(NORM, &[3], &[1.0, f32::INFINITY, 2.0]);
    assert!(!strict(&tensors).0);
    let (ok, report, got) = check(&tensors, &LoadOptions { allow_non_finite: true, ..LoadOptions::strict() });
    assert!(ok && report.non_finite.len() == 1);
    assert_eq!(got.iter().find(|(name, _)| name == NORM).unwrap().1, [1.0, f32::INFINITY, 2.0]);
    // A double that is beyond f32 counts as infinite.
    tensors[1] =
        Stored { name: NORM, dtype: "F64", shape: vec![3], bytes: [1e300f64, 1.0, 2.0].map(f64::to_le_bytes).concat() };
    assert!(!strict(&tensors).0);
}

#[test]
fn shapes_are_wrong_in_every_mode() {
    let mut tensors = complete();
    tensors[0] = ones(WORDS, &[15]);
    let (ok, report, _) = check(&tensors, &LoadOptions::new_head(&|_| true));
    assert!(!ok);
    assert_eq!(report.misshapen[0].hint, None);
}

#[test]
fn two_names_for_one_parameter() {
    for other in ["bert.embeddings.LayerNorm.gamma", "embeddings.LayerNorm.weight", "embeddings.LayerNorm.gamma"] {
        let mut tensors = complete();
        tensors.push(ones(other, &[3]));
        let (ok, report, _) = check(&tensors, &LoadOptions::new_head(&|_| true));
        assert!(!ok && report.fresh.is_empty());
        let mut keys: Vec<String> = vec![NORM.into(), other.into()];
        keys.sort();
        assert_eq!(report.repeated, [Repeated { parameter: NORM.into(), keys }]);
    }
}

#[test]
fn copies() {
    const COPY: &str = "cls.predictions.decoder.weight";
    let mut tensors = complete();
    tensors.push(ones(COPY, &[5, 3]));
    let (ok, report, _) = strict(&tensors);
    assert!(ok && report.is_clean() && report.tied == [COPY]);

    // In place of an original that is missing.
    tensors.remove(0);
    let (ok, report, got) = strict(&tensors);
    assert!(ok && report.is_clean() && report.tied.is_empty(), "{report}");
    assert_eq!(got.iter().find(|(name, _)| name == WORDS).unwrap().1, [1.0; 15]);

    // Other numbers, or another shape.
    for (shape, different) in [(&[5, 3][..], Some(14)), (&[6, 3], None)] {
        let mut tensors = complete();
        let mut values = vec![2.0; shape.iter().product()];
        values[0] = 1.0;
        tensors.push(f32s(COPY, shape, &values));
        let (ok, report, _) = strict(&tensors);
        assert!(!ok);
        assert_eq!(report.untied, [Untied { copy: COPY.into(), original: WORDS.into(), different }]);
        let (ok, report, got) = check(&tensors, &LoadOptions { allow_untied: true, ..LoadOptions::strict() });
        assert!(ok && report.untied.len() == 1);
        assert_eq!(got.iter().find(|(name, _)| name == WORDS).unwrap().1, [1.0; 15]);
    }
}

#[test]
fn unaligned_and_empty_tensors() {
    let mut tensors = complete();
    // Three bytes first, so that all that follows lies at odd places.
    tensors.insert(0, Stored { name: "mask", dtype: "BOOL", shape: vec![3], bytes: vec![1; 3] });
    tensors.insert(3, Stored { name: "nothing", dtype: "F32", shape: vec![0, 7], bytes: vec![] });
    let (ok, report, got) = strict(&tensors);
    assert!(ok && report.unused == ["mask", "nothing"]);
    assert!(got.iter().all(|(_, values)| values.iter().all(|&x| x == 1.0)));
}
