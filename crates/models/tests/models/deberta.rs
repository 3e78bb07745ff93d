//! DeBERTa-v2 on weights from a formula: numbers of `transformers` 5.22 without any file, and sequences alone against the same in
//! company, on every kernel set and, with HENSON_TEST_CUDA set, on the GPU.

use henson_models::{Batch, Capture, Head, Model, ModelConfig, Sequence};
use henson_tensor::cuda::CudaOptions;
use henson_tensor::{Builder, DType, Device, Isa, Parameters, Pass, Tape, Tensor};
use serde_json::json;

fn devices() -> Vec<Device> {
    let cpu = Isa::available().into_iter().map(|isa| Device::cpu(Some(isa), Some(2)).unwrap());
    let gpu = std::env::var_os("HENSON_TEST_CUDA").map(|_| Device::cuda(&CudaOptions::default()).unwrap());
    cpu.chain(gpu).collect()
}

/// As v3's, with few buckets.
fn config(positions: usize) -> ModelConfig {
    let mut config = ModelConfig::from_value(json!({
        "model_type": "deberta-v2", "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 32, "max_position_embeddings": positions, "position_buckets": 4, "relative_attention": true,
        "norm_rel_ebd": "layer_norm", "share_att_key": true, "pos_att_type": "p2c|c2p", "position_biased_input": false,
    }))
    .unwrap();
    config.set_dropout(0.0);
    config
}

/// 0.2·sin(0.7·i + 1.3·k) for element i of the k-th parameter by name; norms' weights around 1.
fn build(device: &Device, config: &ModelConfig, head: Head) -> (Model, Parameters) {
    let mut builder = Builder::new();
    let model = Model::build(&mut builder, config, head).unwrap();
    let mut parameters = builder.finish(device, DType::F32).unwrap();
    let mut names: Vec<String> = parameters.entries().iter().map(|entry| entry.name.clone()).collect();
    names.sort();
    for i in 0..parameters.entries().len() {
        let entry = parameters.entries()[i].clone();
        let k = names.iter().position(|name| *name == entry.name).unwrap() as f64;
        let one = if entry.name.ends_with("Norm.weight") { 1.0 } else { 0.0 };
        let values: Vec<f32> =
            (0..entry.shape.elements()).map(|j| (0.2 * (0.7 * j as f64 + 1.3 * k).sin() + one) as f32).collect();
        parameters.write(i, &values).unwrap();
    }
    parameters.refresh().unwrap();
    (model, parameters)
}

fn ids(count: u32) -> Vec<u32> {
    [1].into_iter().chain((0..count).map(|i| (7 * i + 3) % 36 + 4)).chain([2]).collect()
}

fn batch(device: &Device, config: &ModelConfig, sequences: &[Vec<u32>]) -> Batch {
    let segments = vec![0; 400];
    let sequences: Vec<Sequence<'_>> =
        sequences.iter().map(|ids| Sequence { ids, segments: &segments[..ids.len()] }).collect();
    Batch::new(device, config, &sequences, 0).unwrap()
}

fn hidden(device: &Device, model: &Model, parameters: &Parameters, sequences: &[Vec<u32>]) -> Vec<f32> {
    let mut tape = Tape::new();
    let mut pass = Pass::inference(&mut tape, parameters);
    let batch = batch(device, model.config(), sequences);
    model.encode(&mut pass, &batch, Capture::default()).unwrap().last.tensor().to_f32().unwrap()
}

#[track_caller]
fn assert_near(got: &[f32], expected: &[f32], bound: f32) {
    assert_eq!(got.len(), expected.len());
    assert!(got.iter().zip(expected).all(|(g, e)| (g - e).abs() <= bound), "{got:?} not {expected:?}");
}

#[test]
fn values_of_transformers_without_files() {
    for device in devices() {
        let config = config(24);
        let (model, parameters) = build(&device, &config, Head::Sequence { labels: 3 });
        let mut tape = Tape::new();
        let mut pass = Pass::inference(&mut tape, &parameters);
        let batch = batch(&device, &config, &[ids(12)]);
        let logits = model.logits(&mut pass, &batch, None).unwrap().tensor().to_f32().unwrap();
        assert_near(&logits, &[0.11003, 0.08345, 0.06863], 2e-5);
        drop(pass);

        let (model, parameters) = build(&device, &config, Head::Encoder);
        let x = hidden(&device, &model, &parameters, &[ids(12)]);
        assert_near(&x[..4], &[1.82811, 0.19143, 0.75924, -0.62368], 2e-5);
        assert_near(&x[x.len() - 2..], &[1.43362, -1.30242], 2e-5);
        let (sum, size) = x.iter().fold((0.0, 0.0), |(sum, size), x| (sum + x, size + x.abs()));
        assert_near(&[sum, size], &[7.9338, 172.2048], 2e-3);
    }
}

/// The rows of the table that a batch uses depend on its longest sequence; what a sequence gets does not.
#[test]
fn company_changes_nothing() {
    for device in devices() {
        let config = config(400);
        let (model, parameters) = build(&device, &config, Head::Encoder);
        let sequences = [ids(0), ids(300), ids(1), ids(31), ids(5)];
        let together = hidden(&device, &model, &parameters, &sequences);
        let alone: Vec<f32> =
            sequences.iter().flat_map(|one| hidden(&device, &model, &parameters, std::slice::from_ref(one))).collect();
        let bound = if matches!(device, Device::Cpu(_)) { 0.0 } else { 1e-5 };
        assert_near(&together, &alone, bound);

        // Some rows alone.
        let rows = [0u32, 7, 301, 305];
        let mut tape = Tape::new();
        let mut pass = Pass::inference(&mut tape, &parameters);
        let batch = batch(&device, &config, &sequences);
        let rows_on_device = Tensor::from_slice(&device, [rows.len()], &rows).unwrap();
        let some = model.encode_rows(&mut pass, &batch, &rows_on_device).unwrap().tensor().to_f32().unwrap();
        let expected: Vec<f32> = rows.iter().flat_map(|row| together[*row as usize * 16..][..16].to_vec()).collect();
        assert_near(&some, &expected, 1e-5);
    }
}
