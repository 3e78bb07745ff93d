//! T5, T5 v1.1, BART and Marian against `transformers`: states of the encoder and of the decoder, logits and loss; and writing token by
//! token, also by recurrent ones, against reading the whole target. With HENSON_TEST_CUDA set, on the GPU as well.

use std::path::{Path, PathBuf};

use henson_models::{Batch, Capture, DecoderCache, Family, Head, Model, ModelConfig, NewTokens, Sequence, Writing};
use henson_tensor::cuda::CudaOptions;
use henson_tensor::{Builder, DType, Device, Layout, Parameters, Pass, Tape, Tensor};
use safetensors::SafeTensors;
use serde_json::Value;

/// f32 against f32, of golden files with seven digits.
const TOLERANCE: f32 = 1e-4;

const MODELS: [&str; 4] = ["t5", "t5-v1_1", "bart", "marian"];

fn devices() -> Vec<Device> {
    let mut all = vec![Device::cpu(None, Some(2)).unwrap()];
    if std::env::var_os("HENSON_TEST_CUDA").is_some() {
        all.push(Device::cuda(&CudaOptions::default()).unwrap());
    }
    all
}

fn directory(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/writers").join(name)
}

fn json(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn numbers(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap() as f32).collect()
}

fn rows(value: &Value) -> Vec<Vec<u32>> {
    let ids = |row: &Value| row.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
    value.as_array().unwrap().iter().map(ids).collect()
}

/// A model with the golden weights.
fn open(device: &Device, name: &str, head: Head) -> (Model, Parameters) {
    let mut keys = json(&directory(name).join("config.json"));
    for key in ["architectures", "id2label", "label2id"] {
        keys.as_object_mut().unwrap().remove(key);
    }
    let config = ModelConfig::from_value(keys).unwrap();
    let mut builder = Builder::new();
    let model = Model::build(&mut builder, &config, head).unwrap();
    let mut parameters = builder.finish(device, DType::F32).unwrap();
    let bytes = std::fs::read(directory(name).join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    for i in 0..parameters.entries().len() {
        let entry = &parameters.entries()[i].name;
        let data = file.tensor(entry).unwrap_or_else(|error| panic!("{entry}: {error}"));
        let values: Vec<f32> =
            data.data().chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect();
        parameters.write(i, &values).unwrap();
    }
    parameters.refresh().unwrap();
    if head == Head::Seq2Seq {
        assert_eq!(parameters.entries().len(), file.names().len(), "{name}: all that the file has");
    }
    (model, parameters)
}

fn sequences(rows: &[Vec<u32>]) -> Vec<(Vec<u32>, Vec<u32>)> {
    rows.iter().map(|ids| (ids.clone(), vec![0; ids.len()])).collect()
}

fn pairs(device: &Device, config: &ModelConfig, sources: &[Vec<u32>], targets: &[Vec<u32>]) -> Batch {
    let all = sequences(sources);
    let sources: Vec<Sequence<'_>> = all.iter().map(|(ids, segments)| Sequence { ids, segments }).collect();
    let targets: Vec<&[u32]> = targets.iter().map(Vec::as_slice).collect();
    Batch::pairs(device, config, &sources, &targets, 0).unwrap()
}

#[track_caller]
fn assert_close(what: &str, got: &[f32], expected: &[f32]) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let worst = got.iter().zip(expected).fold(0.0_f32, |worst, (g, e)| worst.max((g - e).abs()));
    assert!(worst <= TOLERANCE, "{what}: off by {worst:e}");
}

/// The vocabulary's logits of all rows of a batch, without padded columns.
fn logits(model: &Model, pass: &mut Pass<'_>, last: &henson_tensor::Var, layout: &Layout) -> Vec<Vec<f32>> {
    let all: Vec<u32> = (0..*layout.offsets().last().unwrap()).collect();
    let all = Tensor::from_slice(pass.device(), [all.len()], &all).unwrap();
    let found = model.logits_of(pass, last.clone(), layout, Some(&all)).unwrap().tensor().to_f32().unwrap();
    let vocabulary = model.config().sizes().vocab_size;
    found.chunks(vocabulary.next_multiple_of(64)).map(|row| row[..vocabulary].to_vec()).collect()
}

#[test]
fn states_logits_and_loss_are_those_of_transformers() {
    for device in devices() {
        for name in MODELS {
            let golden = json(&directory(name).join("golden.json"));
            let (sources, targets) = (rows(&golden["inputs"]), rows(&golden["targets"]));
            let (model, parameters) = open(&device, name, Head::Seq2Seq);
            // Both cases at once: neither sees the other.
            let batch = pairs(&device, model.config(), &sources, &targets);
            let mut tape = Tape::new();
            let mut pass = Pass::inference(&mut tape, &parameters);
            let last = model.encode(&mut pass, &batch, Capture::default()).unwrap().last;
            let states = last.tensor().to_f32().unwrap();
            let found = logits(&model, &mut pass, &last, batch.output_layout());
            let h = model.config().sizes().hidden_size;
            let mut first = 0;
            for (case, (golden, target)) in golden["cases"].as_array().unwrap().iter().zip(&targets).enumerate() {
                let own = first..first + target.len();
                first = own.end;
                let what = |part: &str| format!("{name} on {device}, case {case}: {part}");
                let expected = numbers(&golden["decoder_last"]);
                assert_close(&what("decoder"), &states[own.start * h..own.end * h], &expected);
                let own = &found[own];
                assert_close(&what("logits"), &own.concat(), &numbers(&golden["logits"]));
                let loss = |(row, target): (&Vec<f32>, &u32)| {
                    let sum: f64 = row.iter().map(|x| f64::from(*x).exp()).sum();
                    sum.ln() - f64::from(row[*target as usize])
                };
                let mean = own.iter().zip(target).map(loss).sum::<f64>() / target.len() as f64;
                assert_close(&what("loss"), &[mean as f32], &[golden["loss"].as_f64().unwrap() as f32]);
            }
        }
    }
}

/// Without targets, T5 and Marian give their encoder's states, which T5's encoder alone gives as well; BART's decoder reads the
/// source.
#[test]
fn an_encoder_may_stand_alone() {
    let device = Device::cpu(None, Some(2)).unwrap();
    for name in ["t5", "t5-v1_1", "marian"] {
        let golden = json(&directory(name).join("golden.json"));
        let expected: Vec<f32> =
            golden["cases"].as_array().unwrap().iter().flat_map(|case| numbers(&case["encoder"])).collect();
        let heads: &[Head] = if name == "marian" { &[Head::Seq2Seq] } else { &[Head::Encoder, Head::Seq2Seq] };
        for &head in heads {
            let (model, parameters) = open(&device, name, head);
            let all = sequences(&rows(&golden["inputs"]));
            let sources: Vec<Sequence<'_>> = all.iter().map(|(ids, segments)| Sequence { ids, segments }).collect();
            let batch = Batch::new(&device, model.config(), &sources, 0).unwrap();
            let mut tape = Tape::new();
            let mut pass = Pass::inference(&mut tape, &parameters);
            let capture = Capture { hidden_states: true, attention_maps: true };
            let encoded = model.encode(&mut pass, &batch, capture).unwrap();
            assert_close(name, &encoded.last.tensor().to_f32().unwrap(), &expected);
            let layers = model.config().sizes().num_hidden_layers;
            assert_eq!((encoded.hidden_states.len(), encoded.attention_maps.len()), (layers + 1, layers));
            assert_eq!(model.decoder().is_some(), head == Head::Seq2Seq);
        }
    }
    let (model, parameters) = open(&device, "bart", Head::Seq2Seq);
    let (ids, segments) = ([5, 6, 2], [0; 3]);
    let batch = Batch::new(&device, model.config(), &[Sequence { ids: &ids, segments: &segments }], 0).unwrap();
    let read = pairs(&device, model.config(), &[ids.to_vec()], &[ids.to_vec()]);
    let [a, b] = [batch, read].map(|batch| {
        let mut tape = Tape::new();
        let mut pass = Pass::inference(&mut tape, &parameters);
        model.encode(&mut pass, &batch, Capture::default()).unwrap().last.tensor().to_f32().unwrap()
    });
    assert_eq!(a, b);
}

/// Sequences that enter one by one, grow unequally and share a source give what the whole targets give.
#[test]
fn writing_token_by_token_gives_what_reading_the_target_gives() {
    for device in devices() {
        for name in MODELS {
            let (model, parameters) = open(&device, name, Head::Seq2Seq);
            check_writing(&device, name, &model, &parameters);
        }
    }
}

/// The same of recurrent ones. On a GPU those without attention, which puts columns side by side.
#[test]
fn recurrent_ones_write_what_reading_the_target_gives() {
    for device in devices() {
        recurrent_ones_write(&device);
    }
}

fn recurrent_ones_write(device: &Device) {
    for (cell, attention, bidirectional, feeding) in [
        ("lstm", "general", true, "none"),
        ("gru", "additive", true, "none"),
        ("lstm", "dot", false, "none"),
        ("gru", "none", false, "none"),
        ("lstm", "none", false, "none"),
        ("lstm", "general", true, "output"),
        ("gru", "additive", true, "context"),
    ] {
        if matches!(device, Device::Cuda(_)) && attention != "none" {
            continue;
        }
        let config = serde_json::json!({
            "model_type": "rnn-seq2seq", "vocab_size": 60, "embedding_size": 6, "hidden_size": 8, "num_hidden_layers": 2,
            "cell": cell, "attention": attention, "bidirectional": bidirectional, "feeding": feeding,
        });
        let config = ModelConfig::from_value(config).unwrap();
        let mut builder = Builder::new();
        let model = Model::build(&mut builder, &config, Head::Seq2Seq).unwrap();
        let mut parameters = builder.finish(device, DType::F32).unwrap();
        for i in 0..parameters.entries().len() {
            let value = |j: usize| 0.4 * (0.7 * j as f32 + 1.3 * i as f32).sin();
            let count = parameters.entries()[i].shape.elements();
            parameters.write(i, &(0..count).map(value).collect::<Vec<f32>>()).unwrap();
        }
        parameters.refresh().unwrap();
        check_writing(device, &format!("{cell}, {attention}, {feeding}"), &model, &parameters);
    }
}

fn check_writing(device: &Device, name: &str, model: &Model, parameters: &Parameters) {
    let decoder = model.decoder().unwrap();
    // Longer than the reach of the biases; and a source shorter than what is written at once.
    let sources: [Vec<u32>; 2] = [(3..27).collect(), vec![9]];
    let targets: [Vec<u32>; 2] = [(20..42).map(|i| i % 7 + 20).collect(), (10..26).collect()];
    let batch = pairs(device, model.config(), &sources, &targets);
    let mut tape = Tape::new();
    let mut pass = Pass::inference(&mut tape, parameters);
    let last = model.encode(&mut pass, &batch, Capture::default()).unwrap().last;
    let expected = logits(model, &mut pass, &last, batch.output_layout());

    let mut cache = DecoderCache::new(device, DType::F32, decoder.cache_sizes(), (20, 20), 4).unwrap();
    // The second source enters alone, later.
    let enter = |pass: &mut Pass<'_>, cache: &mut DecoderCache, source: &Vec<u32>| {
        let all = sequences(std::slice::from_ref(source));
        let source: Vec<Sequence<'_>> = all.iter().map(|(ids, segments)| Sequence { ids, segments }).collect();
        let source = Batch::new(device, model.config(), &source, 0).unwrap();
        let kept = cache.source.as_mut().unwrap();
        let place = kept.enter();
        kept.extend(&[place], &source.layout).unwrap();
        decoder.read_sources(pass, &source, cache).unwrap();
        Writing { written: cache.written.enter(), source: Some(place) }
    };
    let mut got: [Vec<Vec<f32>>; 2] = Default::default();
    // What a decoder reads begins with its start token.
    let start = model.config().targets().unwrap().start;
    let read: Vec<Vec<u32>> = targets.iter().map(|target| [&[start], &target[..target.len() - 1]].concat()).collect();
    let mut step = |pass: &mut Pass<'_>, cache: &mut DecoderCache, who: &[(usize, Writing, usize)]| {
        let writing: Vec<Writing> = who.iter().map(|(_, writing, _)| *writing).collect();
        let new: Vec<&[u32]> = who.iter().map(|(i, _, n)| &read[*i][got[*i].len()..][..*n]).collect();
        let new = NewTokens::new(device, model.config(), cache, &writing, &new).unwrap();
        let last = decoder.step(pass, &new, cache).unwrap();
        let mut found = logits(model, pass, &last, &new.layout).into_iter();
        who.iter().for_each(|(i, _, n)| got[*i].extend(found.by_ref().take(*n)));
    };
    let first = enter(&mut pass, &mut cache, &sources[0]);
    step(&mut pass, &mut cache, &[(0, first, 5)]);
    let second = enter(&mut pass, &mut cache, &sources[1]);
    step(&mut pass, &mut cache, &[(1, second, 3), (0, first, 1)]);
    for _ in 0..13 {
        step(&mut pass, &mut cache, &[(0, first, 1), (1, second, 1)]);
    }
    step(&mut pass, &mut cache, &[(0, first, 3)]);
    assert_close(&format!("{name} on {device}"), &got.concat().concat(), &expected.concat());
}

/// The numbers of parameters that `transformers` has; constants are none.
#[test]
fn sizes_are_the_published_ones() {
    let cases = [
        ("t5-small", 60_506_624),
        ("t5-base", 222_903_552),
        ("t5-large", 737_668_096),
        ("t5-v1_1-small", 76_961_152),
        ("t5-v1_1-base", 247_577_856),
        ("bart-base", 139_420_416),
        ("bart-large", 406_291_456),
        ("transformer-mini", 16_844_800),
        ("transformer-base", 63_082_496),
        ("transformer-big", 214_245_376),
    ];
    for (size, expected) in cases {
        let mut builder = Builder::new();
        let config = Family::config_of_size(size).unwrap();
        Model::build(&mut builder, &config, Head::Seq2Seq).unwrap();
        let own = builder.entries().iter().filter(|entry| !entry.constant);
        assert_eq!(own.map(|entry| entry.shape.elements()).sum::<usize>(), expected, "{size}");
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let device = Device::cpu(None, Some(1)).unwrap();
    let cases = [
        ("t5-small", "feed_forward_proj", Value::from("gated-relu6"), "gated-"),
        ("t5-small", "relative_attention_max_distance", Value::from(16), "more than half"),
        ("t5-small", "decoder_start_token_id", Value::from(40_000), "less than vocab_size"),
        ("bart-base", "normalize_before", Value::from(true), "false"),
        ("bart-base", "extra_pos_embeddings", Value::from(1), "2"),
        ("bart-base", "encoder_attention_heads", Value::from(7), "divisor"),
        ("transformer-base", "share_encoder_decoder_embeddings", Value::from(false), "two vocabularies"),
        ("transformer-base", "decoder_vocab_size", Value::from(500), "37000"),
        ("transformer-base", "static_position_embeddings", Value::from(false), "true"),
        ("transformer-base", "decoder_start_token_id", Value::from(37_000), "less than vocab_size"),
        ("transformer-base", "max_position_embeddings", Value::from(1 << 20), "16384"),
        ("rnn-seq2seq", "feeding", Value::from("tokens"), "output"),
    ];
    for (size, key, value, expected) in cases {
        let mut json = Family::config_of_size(size).unwrap().to_json().unwrap();
        json[key] = value;
        let error = ModelConfig::from_value(json).unwrap_err().to_string();
        assert!(error.contains(key) && error.contains(expected), "{size}: {error}");
    }
    let unattended = serde_json::json!({ "model_type": "rnn-seq2seq", "attention": "none", "feeding": "context" });
    let error = ModelConfig::from_value(unattended).unwrap_err().to_string();
    assert!(error.contains("feeding") && error.contains("attention is none"), "{error}");
    let (ids, segments) = ([5, 6], [0, 0]);
    let source = [Sequence { ids: &ids, segments: &segments }];
    for (size, targets) in [("bert-tiny", 1), ("t5-mini", 0)] {
        let config = Family::config_of_size(size).unwrap();
        let error = Batch::pairs(&device, &config, &source, &vec![&ids[..]; targets], 0).unwrap_err().to_string();
        assert!(error.contains("1 sources with"), "{error}");
    }
}
