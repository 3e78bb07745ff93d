//! What transformers wrote, as it wrote it over the years.

use henson_checkpoint::{CheckpointError, LoadOptions, LoadReport, Weights, load};
use henson_models::Head;
use henson_tensor::{Entry, Group, Parameters};

use crate::{bert, golden, naming, numbers};

fn load_into(directory: &str, parameters: &mut Parameters) -> LoadReport {
    let weights = Weights::open(&golden(directory)).unwrap();
    load(&weights, naming(), parameters, &LoadOptions::strict()).unwrap()
}

fn pretraining() -> Vec<(String, Vec<f32>)> {
    let mut parameters = bert(&golden("pretraining"), Head::PreTraining, 0);
    load_into("pretraining", &mut parameters);
    numbers(&parameters)
}

#[test]
fn every_head_is_read_without_remainder() {
    for (directory, head, count) in [
        ("model", Head::Pooler, 39),
        ("pretraining", Head::PreTraining, 46),
        ("pretraining-gelu-new", Head::PreTraining, 46),
        ("mlm", Head::MaskedLm, 42),
        ("sequence", Head::Sequence { labels: 3 }, 41),
        ("token", Head::Token { labels: 5 }, 39),
        ("qa", Head::Span, 39),
        ("choice", Head::Choice, 41),
    ] {
        let mut parameters = bert(&golden(directory), head, 0);
        let report = load_into(directory, &mut parameters);
        assert!(report.is_clean(), "{directory}: {report}");
        assert_eq!((report.loaded, report.to_string()), (count, format!("{count} parameters loaded")));
        let weights = Weights::open(&golden(directory)).unwrap();
        for (name, values) in numbers(&parameters) {
            assert_eq!(values, weights.read_f32(&name).unwrap(), "{directory}: {name}");
        }
    }
}

#[test]
fn every_variant_has_the_same_weights() {
    let expected = pretraining();
    for (variant, digits) in
        [("old-names", 0.0), ("sharded", 0.0), ("tied-copies", 0.0), ("f16", 2f32.powi(-11)), ("bf16", 2f32.powi(-8))]
    {
        let directory = format!("variants/{variant}");
        let mut parameters = bert(&golden(&directory), Head::PreTraining, 0);
        let report = load_into(&directory, &mut parameters);
        assert!(report.is_clean(), "{variant}: {report}");
        for ((name, expected), (_, got)) in expected.iter().zip(numbers(&parameters)) {
            for (x, y) in expected.iter().zip(got) {
                // Half precision has a least number too.
                assert!((x - y).abs() <= x.abs() * digits + if digits > 0.0 { 1e-7 } else { 0.0 }, "{name}: {x} {y}");
            }
        }
        let extra = ["cls.predictions.decoder.bias", "cls.predictions.decoder.weight"];
        let (tied, ignored): (&[&str], &[&str]) = match variant {
            "tied-copies" => (&extra, &["bert.embeddings.position_ids"]),
            _ => (&[], &[]),
        };
        assert_eq!(report.tied, tied, "{variant}");
        assert_eq!(report.ignored, ignored, "{variant}");
    }
}

#[test]
fn without_prefix_and_head() {
    let weights = Weights::open(&golden("variants/no-prefix")).unwrap();
    let mut parameters = bert(&golden("pretraining"), Head::PreTraining, 5);
    let before = numbers(&parameters);

    let error = load(&weights, naming(), &mut parameters, &LoadOptions::strict()).unwrap_err();
    let CheckpointError::DoesNotFit { report, .. } = &error else { panic!("{error}") };
    assert_eq!((report.loaded, report.missing.len(), report.fresh.len()), (39, 7, 0));
    assert!(error.to_string().contains("7 missing, so not in the file:\n  cls."), "{error}");
    assert_eq!(numbers(&parameters), before);

    let head = |entry: &Entry| entry.group == Group::Head;
    let report = load(&weights, naming(), &mut parameters, &LoadOptions::new_head(&head)).unwrap();
    assert_eq!((report.loaded, report.missing.len(), report.fresh.len()), (39, 0, 7));
    for (((name, before), (_, expected)), (_, got)) in before.iter().zip(pretraining()).zip(numbers(&parameters)) {
        assert_eq!(got, if name.starts_with("cls.") { before.clone() } else { expected }, "{name}");
    }
}

#[test]
fn with_prefix_and_a_head_too_many() {
    let expected = pretraining();
    for directory in ["pretraining", "variants/tied-copies"] {
        let mut parameters = bert(&golden("model"), Head::Pooler, 0);
        let report = load_into(directory, &mut parameters);
        assert_eq!((report.loaded, report.missing.len()), (39, 0));
        assert!(report.unused.iter().all(|key| key.starts_with("cls.")), "{report}");
        for (name, got) in numbers(&parameters) {
            let (_, expected) = expected.iter().find(|(key, _)| key.strip_prefix("bert.") == Some(&name)).unwrap();
            assert_eq!(&got, expected, "{name}");
        }
    }
}
