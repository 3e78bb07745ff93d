//! GPT and GPT-2: states, logits and loss against `transformers`; token by token from a cache they, and LSTMs, give what a whole
//! sequence at once gives.

use std::path::Path;

use henson_models::{Batch, Capture, DecoderCache, Family, Head, Model, ModelConfig, NewTokens, Sequence, Writing};
use henson_tensor::cuda::CudaOptions;
use henson_tensor::{Builder, DType, Device, Parameters, Pass, Tape, Tensor};
use safetensors::SafeTensors;
use serde_json::{Value, json};

const WIDTH: usize = 16;

fn gpt2(more: Value) -> Value {
    let mut config = json!({
        "model_type": "gpt2", "vocab_size": 40, "n_embd": WIDTH, "n_layer": 3, "n_head": 2, "n_positions": 32, "n_inner": 24,
    });
    more.as_object().unwrap().iter().for_each(|(key, value)| config[key] = value.clone());
    config
}

fn openai_gpt() -> Value {
    json!({ "model_type": "openai-gpt", "vocab_size": 40, "n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 32 })
}

fn devices() -> Vec<Device> {
    let mut all = vec![Device::cpu(None, Some(2)).unwrap()];
    if std::env::var_os("HENSON_TEST_CUDA").is_some() {
        all.push(Device::cuda(&CudaOptions::default()).unwrap());
    }
    all
}

/// A model with weights far from the usual start: 0.3·sin of a running number, norms around 1.
fn filled(config: &Value, device: &Device, dtype: DType) -> (Model, Parameters) {
    let config = ModelConfig::from_value(config.clone()).unwrap();
    let mut builder = Builder::new();
    let model = Model::build(&mut builder, &config, Head::MaskedLm).unwrap();
    let mut parameters = builder.finish(device, dtype).unwrap();
    for i in 0..parameters.entries().len() {
        let entry = parameters.entries()[i].clone();
        let one = if entry.name.contains("ln_") && entry.name.ends_with("weight") { 1.0 } else { 0.0 };
        let value = |j: usize| 0.3 * (0.7 * j as f32 + 1.3 * i as f32).sin() + one;
        parameters.write(i, &(0..entry.shape.elements()).map(value).collect::<Vec<f32>>()).unwrap();
    }
    parameters.refresh().unwrap();
    (model, parameters)
}

fn text(number: usize, length: usize) -> Vec<u32> {
    (0..length).map(|i| ((11 * number + 7 * i + i * i) % 40) as u32).collect()
}

/// The last hidden states of a sequence, all at once.
fn whole((model, parameters): &(Model, Parameters), ids: &[u32]) -> Vec<f32> {
    let segments = vec![0; ids.len()];
    let batch = Batch::new(parameters.device(), model.config(), &[Sequence { ids, segments: &segments }], 0).unwrap();
    let mut tape = Tape::new();
    let mut pass = Pass::inference(&mut tape, parameters);
    model.encode(&mut pass, &batch, Capture::default()).unwrap().last.tensor().to_f32().unwrap()
}

/// Sequences of unequal lengths that are read in parts of some tokens, enter and leave: (number of the text, its length).
struct Written<'a> {
    model: &'a (Model, Parameters),
    cache: DecoderCache,
    /// Each with its text, what was read of it, and the states that came of it.
    all: Vec<(Writing, Vec<u32>, usize, Vec<f32>)>,
}

impl Written<'_> {
    fn enter(&mut self, number: usize, length: usize) {
        let writing = Writing { written: self.cache.written.enter(), source: None };
        self.all.push((writing, text(number, length), 0, vec![]));
    }

    /// Reads further tokens of some sequences, by their place: (place, tokens).
    fn step(&mut self, parts: &[(usize, usize)]) {
        let (model, parameters) = self.model;
        let (mut writings, mut tokens) = (vec![], vec![]);
        for (place, count) in parts {
            let (writing, text, read, _) = &mut self.all[*place];
            writings.push(*writing);
            tokens.push(text[*read..*read + count].to_vec());
            *read += count;
        }
        let tokens: Vec<&[u32]> = tokens.iter().map(Vec::as_slice).collect();
        let new = NewTokens::new(parameters.device(), model.config(), &mut self.cache, &writings, &tokens).unwrap();
        let mut tape = Tape::new();
        let mut pass = Pass::inference(&mut tape, parameters);
        let states = model.decoder().unwrap().step(&mut pass, &new, &mut self.cache).unwrap();
        let states = states.tensor().to_f32().unwrap();
        for ((place, _), range) in parts.iter().zip(new.layout.offsets().windows(2)) {
            let rows = range[0] as usize * WIDTH..range[1] as usize * WIDTH;
            self.all[*place].3.extend(&states[rows]);
        }
    }

    /// A sequence that was read to its end leaves; what was computed is what a whole pass computes.
    fn leave(&mut self, place: usize, tolerance: f32) {
        let (writing, text, read, states) = &self.all[place];
        assert_eq!(*read, text.len());
        let expected = whole(self.model, text);
        let scale = expected.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        for (i, (got, expected)) in states.iter().zip(&expected).enumerate() {
            let off = (got - expected).abs() / scale;
            assert!(off <= tolerance, "sequence {place}, token {}: {got}, not {expected}", i / WIDTH);
        }
        assert_eq!(states.len(), expected.len());
        self.cache.written.leave(writing.written);
    }
}

fn check(config: &Value, dtype: DType, tolerance: f32) {
    for device in &devices() {
        let model = filled(config, device, dtype);
        let sizes = model.0.decoder().unwrap().cache_sizes();
        let cache = DecoderCache::new(device, dtype, sizes, (24, 0), 4).unwrap();
        let free = cache.written.free_pages();
        let mut written = Written { model: &model, cache, all: vec![] };
        [(0, 9), (1, 3), (2, 32)].into_iter().for_each(|(number, length)| written.enter(number, length));
        // Prompts together, then token by token; one ends, another joins with its prompt while others write.
        written.step(&[(0, 5), (1, 1), (2, 17)]);
        written.step(&[(0, 1), (1, 1), (2, 1)]);
        written.step(&[(2, 1), (1, 1), (0, 1)]);
        written.leave(1, tolerance);
        written.enter(3, 12);
        written.step(&[(0, 1), (3, 7), (2, 1)]);
        written.step(&[(3, 4), (0, 1)]);
        written.leave(0, tolerance);
        written.step(&[(2, 12)]);
        written.step(&[(3, 1)]);
        [2, 3].into_iter().for_each(|place| written.leave(place, tolerance));
        assert_eq!(written.cache.written.free_pages(), free);
    }
}

#[test]
fn gpt2_goes_on_as_if_all_were_read_at_once() {
    check(&gpt2(json!({})), DType::F32, 1e-5);
    check(&gpt2(json!({ "scale_attn_weights": false, "scale_attn_by_inverse_layer_idx": true })), DType::F32, 1e-5);
    check(&gpt2(json!({})), DType::Bf16, 3e-2);
}

#[test]
fn openai_gpt_goes_on_as_if_all_were_read_at_once() {
    check(&openai_gpt(), DType::F32, 1e-5);
    check(&openai_gpt(), DType::Bf16, 3e-2);
}

/// The state that a sequence ended with has the place of keys and values.
#[test]
fn an_lstm_goes_on_as_if_all_were_read_at_once() {
    for tied in [false, true] {
        let config = json!({
            "model_type": "lstm-lm", "vocab_size": 40, "hidden_size": WIDTH, "num_hidden_layers": 2, "tie_word_embeddings": tied,
        });
        check(&config, DType::F32, 1e-5);
        check(&config, DType::Bf16, 3e-2);
        let (model, parameters) = filled(&config, &devices()[0], DType::F32);
        assert_eq!(parameters.entries().iter().any(|entry| entry.name == "lm_head.weight"), !tied);
        // A fork goes on apart from the sequence that it continues.
        let mut cache =
            DecoderCache::new(parameters.device(), DType::F32, model.decoder().unwrap().cache_sizes(), (8, 0), 4)
                .unwrap();
        let first = Writing { written: cache.written.enter(), source: None };
        let read = |writings: &[Writing], tokens: &[&[u32]], cache: &mut DecoderCache| {
            let new = NewTokens::new(parameters.device(), model.config(), cache, writings, tokens).unwrap();
            let (mut tape, decoder) = (Tape::new(), model.decoder().unwrap());
            let mut pass = Pass::inference(&mut tape, &parameters);
            decoder.step(&mut pass, &new, cache).unwrap().tensor().to_f32().unwrap()
        };
        read(&[first], &[&[1, 2, 3]], &mut cache);
        let second = Writing { written: cache.written.fork(first.written).unwrap(), source: None };
        let states = read(&[first, second], &[&[4], &[5]], &mut cache);
        let pair = (model.clone(), filled(&config, &devices()[0], DType::F32).1);
        for (row, last) in states.chunks(WIDTH).zip([4, 5]) {
            let expected = whole(&pair, &[1, 2, 3, last]);
            assert_close("a fork", row, &expected[3 * WIDTH..]);
        }
    }
}

fn numbers(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap() as f32).collect()
}

#[track_caller]
fn assert_close(what: &str, got: &[f32], expected: &[f32]) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let worst = got.iter().zip(expected).fold(0.0_f32, |worst, (g, e)| worst.max((g - e).abs()));
    assert!(worst <= 1e-4, "{what}: off by {worst:e}");
}

#[test]
fn states_logits_and_loss_are_those_of_transformers() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/writers");
    let json = |path: &Path| -> Value { serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap() };
    for (device, name) in devices().iter().flat_map(|d| ["gpt2", "gpt2-scaled", "openai-gpt"].map(|name| (d, name))) {
        let directory = directory.join(name);
        let mut keys = json(&directory.join("config.json"));
        keys.as_object_mut().unwrap().remove("architectures");
        let config = ModelConfig::from_value(keys).unwrap();
        let mut builder = Builder::new();
        let model = Model::build(&mut builder, &config, Head::MaskedLm).unwrap();
        let mut parameters = builder.finish(device, DType::F32).unwrap();
        let bytes = std::fs::read(directory.join("model.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        for i in 0..parameters.entries().len() {
            let entry = parameters.entries()[i].clone();
            let data = file.tensor(&entry.name).unwrap();
            let number = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap());
            let numbers = entry.from_stored(data.data().chunks_exact(4).map(number).collect());
            parameters.write(i, &numbers).unwrap();
        }
        parameters.refresh().unwrap();
        assert_eq!(parameters.entries().len(), file.names().len(), "{name}: all that the file has");
        let golden = json(&directory.join("golden.json"));
        for (ids, case) in golden["inputs"].as_array().unwrap().iter().zip(golden["cases"].as_array().unwrap()) {
            let ids: Vec<u32> = ids.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
            let segments = vec![0; ids.len()];
            let batch = Batch::new(device, &config, &[Sequence { ids: &ids, segments: &segments }], 0).unwrap();
            let mut tape = Tape::new();
            let mut pass = Pass::inference(&mut tape, &parameters);
            let capture = Capture { hidden_states: true, attention_maps: false };
            let encoded = model.encode(&mut pass, &batch, capture).unwrap();
            for (layer, expected) in case["hidden"].as_array().unwrap().iter().enumerate() {
                let found = encoded.hidden_states[layer].tensor().to_f32().unwrap();
                assert_close(&format!("{name} on {device}: layer {layer}"), &found, &numbers(expected));
            }
            let rows: Vec<u32> = (0..ids.len() as u32).collect();
            let rows = Tensor::from_slice(device, [rows.len()], &rows).unwrap();
            let found = model.logits_of(&mut pass, encoded.last, &batch.layout, Some(&rows)).unwrap();
            let found: Vec<Vec<f32>> =
                found.tensor().to_f32().unwrap().chunks(64).map(|row| row[..60].to_vec()).collect();
            assert_close(&format!("{name} on {device}: logits"), &found.concat(), &numbers(&case["logits"]));
            let loss = |(row, next): (&Vec<f32>, &u32)| {
                let sum: f64 = row.iter().map(|x| f64::from(*x).exp()).sum();
                sum.ln() - f64::from(row[*next as usize])
            };
            let mean = found.iter().zip(&ids[1..]).map(loss).sum::<f64>() / (ids.len() - 1) as f64;
            assert_close(&format!("{name}: loss"), &[mean as f32], &[case["loss"].as_f64().unwrap() as f32]);
        }
    }
}

/// The numbers of parameters that `transformers` has.
#[test]
fn sizes_are_the_published_ones() {
    let cases = [
        ("openai-gpt", 116_534_784),
        ("distilgpt2", 81_912_576),
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ];
    for (size, expected) in cases {
        let mut builder = Builder::new();
        let config = Family::config_of_size(size).unwrap();
        Model::build(&mut builder, &config, Head::MaskedLm).unwrap();
        let found: usize = builder.entries().iter().map(|entry| entry.shape.elements()).sum();
        assert_eq!(found, expected, "{size}");
    }
}

/// The vocabulary's logits of new tokens are those of the same rows in a whole pass.
#[test]
fn logits_of_new_tokens() {
    let device = Device::cpu(None, Some(2)).unwrap();
    for config in [gpt2(json!({})), gpt2(json!({ "tie_word_embeddings": false })), openai_gpt()] {
        let model = filled(&config, &device, DType::F32);
        let (network, parameters) = &model;
        let (ids, segments) = (text(4, 11), vec![0; 11]);
        let rows = |rows: &[u32]| Tensor::from_slice(&device, [rows.len()], rows).unwrap();
        let mut tape = Tape::new();
        let batch = Batch::new(&device, network.config(), &[Sequence { ids: &ids, segments: &segments }], 0).unwrap();
        let mut pass = Pass::inference(&mut tape, parameters);
        let expected = network.logits(&mut pass, &batch, Some(&rows(&[8, 10]))).unwrap().tensor().to_f32().unwrap();
        let decoder = network.decoder().unwrap();
        let mut cache = DecoderCache::new(&device, DType::F32, decoder.cache_sizes(), (4, 0), 4).unwrap();
        let writing = Writing { written: cache.written.enter(), source: None };
        let new = |cache: &mut DecoderCache, ids: &[u32]| {
            NewTokens::new(&device, network.config(), cache, &[writing], &[ids])
        };
        let first = new(&mut cache, &ids[..7]).unwrap();
        decoder.step(&mut pass, &first, &mut cache).unwrap();
        let second = new(&mut cache, &ids[7..]).unwrap();
        let states = decoder.step(&mut pass, &second, &mut cache).unwrap();
        let logits = network.logits_of(&mut pass, states, &second.layout, Some(&rows(&[1, 3]))).unwrap();
        let found = logits.tensor().to_f32().unwrap();
        assert!(found.iter().zip(&expected).all(|(f, e)| (f - e).abs() <= 1e-5), "{config}");
        // Nothing is written beyond the table of positions.
        let error = new(&mut cache, &[1; 22]).unwrap_err().to_string();
        assert!(error.contains("has 33 tokens, the model takes 32"), "{error}");
    }
}
