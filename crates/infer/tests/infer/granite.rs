//! granite-embedding-30m-english, a real RoBERTa, against transformers: tokens, positions and vectors.
//!
//! `cargo xtask granite` fetches the model; without it these tests fail, they never pass by doing nothing. More real models:
//! tools/weights/check.py.

use std::path::{Path, PathBuf};

use henson_infer::{EmbedSettings, Model, Pooling, Want};
use henson_tensor::DType;
use serde::Deserialize;

/// Numbers are up to 17; transformers' own f32 is 2e-5 away from f64, henson's 4e-5.
const TOLERANCE: f32 = 1e-4;

/// The golden file keeps every twelfth number.
const STEP: usize = 12;

#[derive(Deserialize)]
struct Row {
    text: String,
    ids: Vec<u32>,
    vector: Vec<f32>,
}

fn golden() -> Vec<Row> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/granite/golden.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn model_directory() -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let directory = target.join("granite/model");
    assert!(directory.join("config.json").is_file(), "no model at {directory:?}: run `cargo xtask granite` first");
    directory
}

fn cosine(a: &[f32], b: &[f32]) -> f32 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

#[test]
fn vectors_are_those_of_transformers() {
    let directory = model_directory();
    let model = Model::open(&directory, &crate::common::device(None, None), DType::F32, Want::Encoder).unwrap();
    let rows = golden();
    let texts: Vec<&str> = rows.iter().map(|row| row.text.as_str()).collect();
    let raw = EmbedSettings { pooling: vec![Pooling::First], ..EmbedSettings::default() };
    let embeddings = model.embed(&texts, &raw, false).unwrap();
    for (row, embedding) in rows.iter().zip(&embeddings) {
        // Two special tokens are around the text, so that those that were cut off are what is left.
        let pieces = model.tokenizer().encode(&row.text).unwrap();
        let kept = pieces.ids.len() - embedding.dropped;
        assert_eq!(pieces.ids[..kept], row.ids[1..row.ids.len() - 1], "{}", row.text);
        let got = embedding.vector.iter().step_by(STEP);
        let worst = got.zip(&row.vector).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst <= TOLERANCE, "{}: {worst:e}", row.text);
    }
    assert!(embeddings[8].dropped > 0, "the longest text is cut");
    let near = |got: f32, expected: f32| assert!((got - expected).abs() < 1e-4, "{got} instead of {expected}");
    near(cosine(&embeddings[0].vector, &embeddings[1].vector), 0.76024);
    near(cosine(&embeddings[0].vector, &embeddings[2].vector), 0.51676);

    // As the directory says: the first token's vector, normalised.
    let settings = EmbedSettings::of_directory(&directory).unwrap();
    assert_eq!((settings.pooling, settings.normalise), (vec![Pooling::First], true));
}
