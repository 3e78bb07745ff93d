//! Pseudo-log-likelihoods and left-to-right ones against `transformers`, on every kernel set of the machine.
//! `tools/golden/likelihood.py` tells how the values were made.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use henson_infer::{InferError, Length, Model, ScoreProgress, Scored, Scoring, Want};
use henson_tensor::{DType, Isa};
use serde_json::Value;
use tempfile::TempDir;

/// f32 against f64: pieces differ by less than a tenth of it on all kernel sets here.
const TOLERANCE: f64 = 1e-5;
/// bf16 keeps 8 bits of each activation: a text differs by half a per cent or so.
const BF16_TOLERANCE: f64 = 0.01;

const ALL: [(&str, Scoring); 3] =
    [("piece", Scoring::Piece), ("word", Scoring::Word), ("left_to_right", Scoring::LeftToRight)];

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data").join(name)
}

/// The golden masked LM with the golden vocabulary; with `causal` as a model that reads left to right.
fn directory(causal: bool) -> TempDir {
    let directory = TempDir::new().unwrap();
    std::fs::copy(data("bert-golden/mlm/model.safetensors"), directory.path().join("model.safetensors")).unwrap();
    std::fs::copy(data("likelihood/vocab.txt"), directory.path().join("vocab.txt")).unwrap();
    let config = std::fs::read_to_string(data("bert-golden/mlm/config.json")).unwrap();
    let with_causal = config.replace("\"is_decoder\": false", "\"is_decoder\": true");
    assert_ne!(config, with_causal);
    std::fs::write(directory.path().join("config.json"), if causal { with_causal } else { config }).unwrap();
    directory
}

fn open(causal: bool, isa: Option<Isa>, dtype: DType) -> Model {
    let device = crate::common::device(isa, Some(2));
    Model::open(directory(causal).path(), &device, dtype, Want::MaskedLm).unwrap()
}

fn golden() -> Vec<Value> {
    let text = std::fs::read_to_string(data("likelihood/golden.json")).unwrap();
    serde_json::from_str::<Value>(&text).unwrap()["texts"].as_array().unwrap().clone()
}

fn texts(golden: &[Value]) -> Vec<&str> {
    golden.iter().map(|entry| entry["text"].as_str().unwrap()).collect()
}

fn score(model: &Model, texts: &[&str], scoring: Scoring) -> Vec<Scored> {
    model.log_likelihoods(texts, scoring, |_| ControlFlow::Continue(())).unwrap()
}

#[test]
fn scores_are_those_of_transformers() {
    let golden = golden();
    for isa in Isa::available() {
        for (name, scoring) in ALL {
            let model = open(scoring == Scoring::LeftToRight, Some(isa), DType::F32);
            for (entry, scored) in golden.iter().zip(score(&model, &texts(&golden), scoring)) {
                let what = format!("{name} on {isa}: {}", entry["text"]);
                let expected: Vec<f64> = serde_json::from_value(entry[name]["logs"].clone()).unwrap();
                assert_eq!(scored.pieces.len(), expected.len(), "{what}");
                for (got, expected) in scored.pieces.iter().zip(&expected) {
                    let error = (f64::from(*got) - expected).abs() / expected.abs();
                    assert!(error <= TOLERANCE, "{what}: {got} not {expected}");
                }
                let sum: f64 = expected.iter().sum();
                assert!((scored.log_likelihood - sum).abs() <= TOLERANCE * sum.abs(), "{what}");
                assert_eq!(Some(scored.correct as u64), entry[name]["correct"].as_u64(), "{what}");
            }
        }
    }
}

#[test]
fn bf16_stays_near() {
    let golden = golden();
    for isa in Isa::available() {
        for (name, scoring) in ALL {
            let model = open(scoring == Scoring::LeftToRight, Some(isa), DType::Bf16);
            for (entry, scored) in golden.iter().zip(score(&model, &texts(&golden), scoring)) {
                let logs: Vec<f64> = serde_json::from_value(entry[name]["logs"].clone()).unwrap();
                let sum: f64 = logs.iter().sum();
                let error = (scored.log_likelihood - sum).abs();
                assert!(error <= BF16_TOLERANCE * sum.abs(), "{name} on {isa}: {error} of {sum}: {}", entry["text"]);
            }
        }
    }
}

#[test]
fn company_and_order_change_no_bit() {
    if !crate::common::company_keeps_bits() {
        return;
    }
    let golden = golden();
    let texts = texts(&golden);
    for (_, scoring) in ALL {
        let model = open(scoring == Scoring::LeftToRight, None, DType::F32);
        let together = score(&model, &texts, scoring);
        let alone: Vec<Scored> = texts.iter().map(|text| score(&model, &[text], scoring).remove(0)).collect();
        assert_eq!(together, alone);
        let backwards: Vec<&str> = texts.iter().rev().copied().collect();
        let mut scored = score(&model, &backwards, scoring);
        scored.reverse();
        assert_eq!(scored, together);
    }
}

#[test]
fn what_is_known_is_not_computed_again() {
    let model = open(false, None, DType::F32);
    let tokens = |texts: &[&str]| {
        let mut last = ScoreProgress { texts: 0, tokens: 0 };
        let each = |progress| {
            last = progress;
            ControlFlow::Continue(())
        };
        model.log_likelihoods(texts, Scoring::Piece, each).unwrap();
        assert_eq!(last.texts, texts.len());
        last.tokens
    };
    // Three pieces and two special tokens, three times.
    assert_eq!(tokens(&["the cat sat"]), 15);
    assert_eq!(tokens(&["the cat sat", "a", "the cat sat"]), 15 + 3);
    // Only the verb differs, so that its masked sequence is the same.
    assert_eq!(tokens(&["the cat sat", "the cat ran"]), 15 + 10);
}

#[test]
fn long_runs_report_and_stop() {
    let model = open(false, None, DType::F32);
    // More sequences than a batch holds, from one text alone.
    let long = "the cat sat on the dog . ".repeat(50);
    let texts = ["a dog", &long, "a cat"];
    let mut seen = Vec::new();
    let all = model.log_likelihoods(&texts, Scoring::Piece, |progress| {
        seen.push(progress);
        ControlFlow::Continue(())
    });
    assert_eq!(all.unwrap()[1].pieces.len(), 350);
    assert!(seen.len() > 2 && seen[0].texts == 1 && seen.last().unwrap().texts == 3, "{seen:?}");
    assert!(seen.windows(2).all(|w| w[0].tokens < w[1].tokens && w[0].texts <= w[1].texts), "{seen:?}");
    let stopped = model.log_likelihoods(&texts, Scoring::Piece, |_| ControlFlow::Break(()));
    assert!(matches!(stopped, Err(InferError::Stopped)));
}

#[test]
fn a_scoring_that_is_not_the_models_is_refused() {
    for (causal, scoring, part) in [
        (true, Scoring::Piece, "left to right, without masks"),
        (true, Scoring::Word, "sees only what stands before"),
        (false, Scoring::LeftToRight, "by piece or by word"),
    ] {
        let model = open(causal, None, DType::F32);
        assert_eq!(model.is_left_to_right(), causal);
        let error = model.log_likelihoods(&["a"], scoring, |_| ControlFlow::Continue(())).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    assert!(score(&open(false, None, DType::F32), &[], Scoring::Piece).is_empty());
}

/// Such a model has never seen a mask, and a guess at the next piece is none at the blank.
#[test]
fn a_model_that_reads_left_to_right_fills_nothing() {
    let texts = ["the [MASK]"];
    assert_eq!(open(false, None, DType::F32).fill(&texts, 1, Length::CUT).unwrap().len(), 1);
    let error = open(true, None, DType::F32).fill(&texts, 1, Length::CUT).unwrap_err();
    assert!(matches!(&error, InferError::CannotFill { mask } if mask == "[MASK]"), "{error}");
    for part in ["is_decoder", "eval --task perplexity", "--task blimp"] {
        assert!(error.to_string().contains(part), "{part}: {error}");
    }
}
