//! Small models of blocks beyond BERT's against `transformers`: outputs and the gradients of all parameters, on every kernel set and,
//! with HENSON_TEST_CUDA set, on the GPU. `tools/golden/blocks.py` made the values.

use std::collections::BTreeMap;
use std::path::Path;

use henson_models::blocks::{
    MODERN_BERT_SITES, ModernBertBlock, ModernBertSettings, Stream, T5_SITES, T5Block, T5Settings, norm_without_bias,
};
use henson_tensor::cuda::CudaOptions;
use henson_tensor::{
    Activation, Builder, DType, Device, EmbeddingTables, Init, Isa, Layout, Norm, Pairing, Param, Parameters, Pass,
    Rotary, Tape, Tensor, Training, Var, Window,
};
use safetensors::SafeTensors;

/// f32 against f64.
const TOLERANCE: f64 = 2e-5;
/// Gradients are sums of more terms.
const GRADIENT_TOLERANCE: f64 = 1e-4;
/// Gradients that are smaller than this all hold noise of larger ones.
const GRADIENT_FLOOR: f64 = 1e-3;
/// bf16 has eight bits, and two blocks' roundings follow each other.
const TOLERANCE_BF16: f64 = 5e-2;
/// Weights from a formula cancel in many gradients, and rounded ones cancel less well: in bf16 only their direction is compared.
const COSINE_BF16: f64 = 0.95;

const ENCODER: [usize; 2] = [21, 6];
const DECODER: [usize; 2] = [5, 13];
const VOCABULARY: usize = 40;
const HIDDEN: usize = 32;

fn golden(name: &str) -> BTreeMap<String, Vec<f64>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/blocks").join(name);
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let number = |b: &[u8]| f64::from(f32::from_le_bytes(b.try_into().unwrap()));
    file.tensors().into_iter().map(|(name, data)| (name, data.data().chunks_exact(4).map(number).collect())).collect()
}

/// The weights that the golden values were made with.
fn fill(parameters: &mut Parameters, size: f64) {
    let mut names: Vec<String> = parameters.entries().iter().map(|entry| entry.name.clone()).collect();
    names.sort();
    for i in 0..parameters.entries().len() {
        let entry = parameters.entries()[i].clone();
        let k = names.iter().position(|name| *name == entry.name).unwrap() as f64;
        let one = if entry.name.contains("norm") && entry.name.ends_with("weight") { 1.0 } else { 0.0 };
        let value = |j: usize| (size * (0.7 * j as f64 + 1.3 * k).sin() + one) as f32;
        let values: Vec<f32> = (0..entry.shape.elements()).map(value).collect();
        parameters.write(i, &values).unwrap();
    }
    parameters.refresh().unwrap();
}

/// Ids of all sequences.
fn ids(device: &Device, lengths: &[usize], factor: usize) -> Tensor {
    let ids: Vec<u32> = lengths.iter().flat_map(|n| (0..*n).map(|i| ((factor * i + 3) % 36 + 4) as u32)).collect();
    Tensor::from_slice(device, [ids.len()], &ids).unwrap()
}

fn words(pass: &mut Pass<'_>, table: Param, ids: &Tensor, layout: &Layout) -> Var {
    let tables = EmbeddingTables { word: table, position: None, position_offset: 0, segment: None };
    pass.embeddings(tables, ids, layout.positions(), None).unwrap()
}

fn assert_close(what: &str, got: &[f32], expected: &[f64], floor: f64, tolerance: f64) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let scale = expected.iter().fold(floor, |m: f64, e| m.max(e.abs()));
    let worst = got.iter().zip(expected).fold(0.0, |m: f64, (g, e)| m.max((f64::from(*g) - e).abs()));
    assert!(worst <= tolerance * scale, "{what}: off by {worst:e} of {scale:e}");
}

/// Builds a model, runs it and compares outputs and gradients with a file.
fn check<M>(
    (name, size): (&str, f64),
    lengths: &[usize],
    build: impl Fn(&mut Builder) -> M,
    forward: impl Fn(&M, &mut Pass<'_>) -> Var,
) {
    let golden = golden(name);
    let mut devices: Vec<(String, Device)> =
        Isa::available().into_iter().map(|isa| (isa.to_string(), Device::cpu(Some(isa), Some(2)).unwrap())).collect();
    if std::env::var_os("HENSON_TEST_CUDA").is_some() {
        devices.push(("CUDA".into(), Device::cuda(&CudaOptions::default()).unwrap()));
    }
    let all = devices.iter().flat_map(|(name, device)| [DType::F32, DType::Bf16].map(|dtype| (name, device, dtype)));
    for (isa, device, dtype) in all {
        let mut builder = Builder::new();
        let model = build(&mut builder);
        let mut parameters = builder.finish(device, dtype).unwrap();
        fill(&mut parameters, size);
        let (mut gradients, mut tape) = (parameters.gradients().unwrap(), Tape::new());
        let mut pass = Pass::training(&mut tape, &parameters, Training { seed: 1, step: 1 });
        let y = forward(&model, &mut pass);
        let outputs = y.tensor().to_f32().unwrap();
        let weights: Vec<f32> = (0..outputs.len()).map(|j| (0.3 * j as f64 + 1.0).sin() as f32).collect();
        pass.seed_gradient(&y, &weights).unwrap();
        pass.backward(&mut gradients).unwrap();
        let tolerance = if dtype == DType::F32 { TOLERANCE } else { TOLERANCE_BF16 };
        let mut rest = &outputs[..];
        for (i, length) in lengths.iter().enumerate() {
            let (own, others) = rest.split_at(length * HIDDEN);
            assert_close(
                &format!("{name}: output {i}, {isa}, {dtype}"),
                own,
                &golden[&format!("output.{i}")],
                0.0,
                tolerance,
            );
            rest = others;
        }
        assert_eq!(parameters.entries().len() + lengths.len(), golden.len(), "{name}: as many parameters");
        for (i, entry) in parameters.entries().iter().enumerate() {
            let (got, key) = (gradients.read(&parameters, i).unwrap(), format!("gradient.{}", entry.name));
            let (what, expected) = (format!("{name}: {key}, {isa}, {dtype}"), &golden[&key]);
            match dtype {
                DType::F32 => assert_close(&what, &got, expected, GRADIENT_FLOOR, GRADIENT_TOLERANCE),
                _ => assert!(cosine(&got, expected) > COSINE_BF16, "{what}: cosine {}", cosine(&got, expected)),
            }
        }
    }
}

fn cosine(got: &[f32], expected: &[f64]) -> f64 {
    let got: Vec<f64> = got.iter().map(|x| f64::from(*x)).collect();
    let product = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    product(&got, expected) / (product(&got, &got) * product(expected, expected)).sqrt()
}

const INIT: Init = Init::Normal(0.02);

#[test]
fn modern_bert_equals_transformers() {
    struct Model {
        words: Param,
        norm: Norm,
        blocks: Vec<ModernBertBlock>,
        last: Norm,
    }
    // `local_attention` is 8: four tokens on each side.
    let kinds = [(Window::FULL, 160_000.0), (Window::local(4), 10_000.0)];
    let settings = |b: &mut Builder, (window, theta): (Window, f32)| ModernBertSettings {
        hidden: HIDDEN,
        intermediate: 24,
        heads: 2,
        window,
        angles: b.rotary(Rotary { theta, size: 16, pairing: Pairing::Halves }, 21),
        activation: Activation::Gelu,
        epsilon: 1e-5,
        attention_dropout: 0.0,
        mlp_dropout: 0.0,
        attention_bias: false,
        mlp_bias: false,
        norm_bias: false,
        init: INIT,
        output_init: INIT,
    };
    let build = |b: &mut Builder| {
        let (words, norm) = b.at("embeddings", |b| {
            (
                b.matrix("tok_embeddings.weight", VOCABULARY, HIDDEN, INIT),
                norm_without_bias(b, "norm", HIDDEN, 1e-5, true),
            )
        });
        let block = |b: &mut Builder, i: usize| {
            let site = 1 + i as u32 * MODERN_BERT_SITES;
            let settings = settings(b, kinds[i]);
            b.at(&format!("layers.{i}"), |b| ModernBertBlock::build(b, settings, i == 0, site))
        };
        let blocks = (0..2).map(|i| block(b, i)).collect();
        Model { words, norm, blocks, last: norm_without_bias(b, "final_norm", HIDDEN, 1e-5, true) }
    };
    check(("modernbert.safetensors", 0.2), &ENCODER, build, |model, pass| {
        let device = pass.device();
        let layout = Layout::new(device, &ENCODER, 0).unwrap();
        let x = words(pass, model.words, &ids(device, &ENCODER, 7), &layout);
        let x = pass.norm(x, &model.norm).unwrap();
        let mut stream = Stream::new(x, &layout);
        for block in &model.blocks {
            block.forward(pass, &mut stream).unwrap();
        }
        stream.finish(pass, &model.last, (0.0, 0)).unwrap()
    });
}

#[test]
fn t5_equals_transformers() {
    struct Stack {
        blocks: Vec<T5Block>,
        last: Norm,
    }
    struct Model {
        shared: Param,
        encoder: Stack,
        decoder: Stack,
    }
    let settings = T5Settings {
        hidden: HIDDEN,
        intermediate: 24,
        heads: 3,
        head_size: 16,
        buckets: 8,
        max_distance: 20,
        activation: Activation::GeluTanh,
        gated: true,
        epsilon: 1e-6,
        dropout: 0.0,
        initializer_factor: 1.0,
    };
    let stack = |b: &mut Builder, decoder: bool| {
        let mut blocks: Vec<T5Block> = vec![];
        for i in 0..2 {
            let bias = blocks.first().and_then(T5Block::bias);
            let site = (1 + i) * T5_SITES;
            blocks.push(b.at(&format!("block.{i}"), |b| T5Block::build(b, settings, decoder, bias, site)));
        }
        Stack { blocks, last: norm_without_bias(b, "final_layer_norm", HIDDEN, 1e-6, false) }
    };
    let build = |b: &mut Builder| Model {
        shared: b.matrix("shared.weight", VOCABULARY, HIDDEN, INIT),
        encoder: b.at("encoder", |b| stack(b, false)),
        decoder: b.at("decoder", |b| stack(b, true)),
    };
    check(("t5.safetensors", 0.06), &DECODER, build, |model, pass| {
        let device = pass.device();
        let [encoder, decoder] = [ENCODER, DECODER].map(|lengths| Layout::new(device, &lengths, 0).unwrap());
        let run = |pass: &mut Pass<'_>, stack: &Stack, x: Var, layout: &Layout, memory: Option<(&Var, &Layout)>| {
            let mut stream = Stream::new(x, layout);
            for block in &stack.blocks {
                block.forward(pass, &mut stream, memory).unwrap();
            }
            stream.finish(pass, &stack.last, (0.0, 0)).unwrap()
        };
        let x = words(pass, model.shared, &ids(device, &ENCODER, 7), &encoder);
        let memory = run(pass, &model.encoder, x, &encoder, None);
        let x = words(pass, model.shared, &ids(device, &DECODER, 5), &decoder);
        run(pass, &model.decoder, x, &decoder, Some((&memory, &encoder)))
    });
}
