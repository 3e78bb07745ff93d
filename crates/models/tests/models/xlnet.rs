//! XLNet against `transformers`: hidden states, logits, two streams in an order of prediction, and a memory; then what holds for any
//! weights: company changes nothing, a token that is predicted is not seen, memory is what stood before, and wrong input is an error. With HENSON_TEST_CUDA set, on the GPU as well.

use std::path::{Path, PathBuf};

use henson_models::{
    Batch, Capture, Head, InputError, Memory, MemorySettings, Model, ModelConfig, Permutation, Sequence,
};
use henson_tensor::cuda::CudaOptions;
use henson_tensor::{Builder, DType, Device, Parameters, Pass, Shape, Tape, Tensor};
use safetensors::SafeTensors;
use serde_json::{Value, json};

/// f32 against f32, of golden files with seven digits.
const TOLERANCE: f32 = 1e-4;

fn device() -> Device {
    Device::cpu(None, Some(2)).unwrap()
}

/// The processor; with HENSON_TEST_CUDA set, the GPU too.
fn devices() -> Vec<Device> {
    let gpu = std::env::var_os("HENSON_TEST_CUDA").map(|_| Device::cuda(&CudaOptions::default()).unwrap());
    [device()].into_iter().chain(gpu).collect()
}

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/writers/xlnet")
}

fn read(name: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(directory().join(name)).unwrap()).unwrap()
}

fn config(more: Value) -> ModelConfig {
    let mut config = read("config.json");
    config.as_object_mut().unwrap().remove("architectures");
    more.as_object().unwrap().iter().for_each(|(key, value)| config[key] = value.clone());
    ModelConfig::from_value(config).unwrap()
}

/// A model with the golden weights.
fn open(device: &Device, config: &ModelConfig) -> (Model, Parameters) {
    let mut builder = Builder::new();
    let model = Model::build(&mut builder, config, Head::MaskedLm).unwrap();
    let mut parameters = builder.finish(device, DType::F32).unwrap();
    let bytes = std::fs::read(directory().join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    for i in 0..parameters.entries().len() {
        let entry = parameters.entries()[i].clone();
        let data = file.tensor(&entry.name).unwrap_or_else(|error| panic!("{}: {error}", entry.name));
        assert_eq!(data.shape(), entry.stored_shape().sizes(), "{}", entry.name);
        let values = data.data().chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect();
        parameters.write(i, &entry.from_stored(values)).unwrap();
    }
    assert_eq!(parameters.entries().len(), file.names().len(), "all that the file has");
    parameters.refresh().unwrap();
    (model, parameters)
}

fn numbers(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap() as f32).collect()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

#[track_caller]
fn assert_close(what: &str, got: &[f32], expected: &[f32]) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let worst = got.iter().zip(expected).fold(0.0_f32, |worst, (g, e)| worst.max((g - e).abs()));
    assert!(worst <= TOLERANCE, "{what}: off by {worst:e}");
}

/// What a batch gives: hidden states and the vocabulary's logits of the second stream's rows, or of all.
struct Given {
    hidden: Vec<Vec<f32>>,
    logits: Vec<Vec<f32>>,
    memory: Memory,
}

fn run((model, parameters): &(Model, Parameters), batch: &Batch, settings: MemorySettings) -> Given {
    let device = parameters.device();
    let mut tape = Tape::new();
    let mut pass = Pass::inference(&mut tape, parameters);
    let capture = Capture { hidden_states: true, attention_maps: true };
    let encoded = model.encode(&mut pass, batch, capture).unwrap();
    let all: Vec<u32> = (0..batch.output_layout().tokens() as u32).collect();
    let all = Tensor::from_slice(device, [all.len()], &all).unwrap();
    let rows = batch.predicted().unwrap_or(&all);
    let logits = model.logits_of(&mut pass, encoded.last, batch.output_layout(), Some(rows)).unwrap();
    let vocabulary = model.config().sizes().vocab_size;
    let logits = logits.tensor().to_f32().unwrap();
    Given {
        hidden: encoded.hidden_states.iter().map(|x| x.tensor().to_f32().unwrap()).collect(),
        logits: logits.chunks(vocabulary.next_multiple_of(64)).map(|row| row[..vocabulary].to_vec()).collect(),
        memory: Memory::after(device, batch, &encoded.hidden_states, settings).unwrap(),
    }
}

const ALL: MemorySettings = MemorySettings { most: None, reused: None };

/// A text of the golden file.
struct Case {
    ids: Vec<u32>,
    segments: Vec<u32>,
    golden: Value,
}

fn cases() -> Vec<Case> {
    let golden = read("golden.json");
    let all = golden["inputs"].as_array().unwrap().iter().zip(golden["cases"].as_array().unwrap());
    all.map(|(input, case)| Case { ids: ids(input), segments: ids(&case["segments"]), golden: case.clone() }).collect()
}

fn sequences(cases: &[Case]) -> Vec<Sequence<'_>> {
    cases.iter().map(|case| Sequence { ids: &case.ids, segments: &case.segments }).collect()
}

#[test]
fn states_and_logits_are_those_of_transformers() {
    for device in devices() {
        let cases = cases();
        let opened = open(&device, &config(json!({})));
        // Both at once: neither sees the other.
        let batch = Batch::new(&device, opened.0.config(), &sequences(&cases), 0).unwrap();
        let given = run(&opened, &batch, ALL);
        let mut first = 0;
        for case in &cases {
            let rows = first..first + case.ids.len();
            for (layer, expected) in case.golden["hidden"].as_array().unwrap().iter().enumerate() {
                let got = &given.hidden[layer][rows.start * 16..rows.end * 16];
                assert_close(&format!("hidden {layer}"), got, &numbers(expected));
            }
            assert_close("logits", &given.logits[rows.clone()].concat(), &numbers(&case.golden["logits"]));
            first = rows.end;
        }
    }
}

#[test]
fn two_streams_are_those_of_transformers() {
    for device in devices() {
        let cases = cases();
        let opened = open(&device, &config(json!({})));
        // Token 2 first, then the last, which sees it.
        let orders: Vec<Vec<u32>> = cases
            .iter()
            .map(|case| {
                (0..case.ids.len()).map(|i| if i == 2 { 1 } else { 2 * u32::from(i + 1 == case.ids.len()) }).collect()
            })
            .collect();
        let targets: Vec<Vec<u32>> = cases.iter().map(|case| ids(&case.golden["two_stream"]["targets"])).collect();
        let permutations: Vec<Permutation<'_>> =
            orders.iter().zip(&targets).map(|(orders, targets)| Permutation { orders, targets }).collect();
        let batch =
            Batch::in_order(&device, opened.0.config(), &sequences(&cases), Some(&permutations), None, 0).unwrap();
        let given = run(&opened, &batch, ALL);
        for (case, got) in cases.iter().zip(given.logits.chunks(2)) {
            assert_close("two streams", &got.concat(), &numbers(&case.golden["two_stream"]["logits"]));
        }
    }
}

#[test]
fn memory_is_that_of_transformers() {
    for device in devices() {
        let cases = cases();
        let opened = open(&device, &config(json!({})));
        let config = opened.0.config();
        let settings = config.memory().unwrap();
        assert_eq!(settings, MemorySettings { most: Some(512), reused: None });
        // Both at once, with memories of unequal lengths; the golden file's have no segments.
        let batch = Batch::new(&device, config, &sequences(&cases), 0).unwrap().without_segments();
        let memory = run(&opened, &batch, settings).memory;
        assert_eq!([memory.length(0), memory.length(1)], [8, 4]);
        let batch =
            Batch::in_order(&device, config, &sequences(&cases), None, Some(&memory), 0).unwrap().without_segments();
        let given = run(&opened, &batch, settings);
        let mut first = 0;
        for case in &cases {
            let rows = first..first + case.ids.len();
            let expected = numbers(&case.golden["with_memory"]["second_pass_logits"]);
            assert_close("with memory", &given.logits[rows.clone()].concat(), &expected);
            first = rows.end;
        }
        assert_eq!([given.memory.length(0), given.memory.length(1)], [16, 8]);
        // So many at most, of the beginning of each text: the memory's own tokens are the oldest.
        let given = run(&opened, &batch, MemorySettings { most: Some(5), reused: Some(3) });
        assert_eq!([given.memory.length(0), given.memory.length(1)], [5, 5]);
        let kept = run(&opened, &batch, MemorySettings { most: Some(2), reused: Some(3) }).memory;
        assert_eq!([kept.length(0), kept.length(1)], [2, 2]);
    }
}

#[test]
fn what_is_predicted_is_not_seen_and_company_changes_nothing() {
    let device = device();
    let opened = open(&device, &config(json!({})));
    let run_of = |texts: &[(&[u32], &[u32], &[u32])]| {
        let segments = [0; 12];
        let sequences: Vec<Sequence<'_>> =
            texts.iter().map(|(ids, ..)| Sequence { ids, segments: &segments[..ids.len()] }).collect();
        let permutations: Vec<Permutation<'_>> =
            texts.iter().map(|(_, orders, targets)| Permutation { orders, targets }).collect();
        let config = opened.0.config();
        let batch = Batch::in_order(&device, config, &sequences, Some(&permutations), None, 0).unwrap();
        run(&opened, &batch, ALL).logits
    };
    let (ids, orders, targets) = ([5, 6, 7, 8, 9, 10], [0, 2, 0, 1, 0, 3], [3, 1, 5]);
    let alone = run_of(&[(&ids, &orders, &targets)]);
    let long: Vec<u32> = (0..12).map(|i| 13 + i).collect();
    let others: Vec<u32> = (0..12).map(|i| i % 4).collect();
    let company = run_of(&[(&long, &others, &[1, 5]), (&ids, &orders, &targets)]);
    assert_eq!(alone, company[2..]);
    // The token of order 2 matters to the one behind it alone.
    let mut changed = ids;
    changed[1] = 40;
    let other = run_of(&[(&changed, &orders, &targets)]);
    assert_eq!(alone[..2], other[..2]);
    assert_ne!(alone[2], other[2]);
}

/// Masks are predicted from all else, whatever stands in their place, and where none is, the batch is a plain one.
#[test]
fn masks_are_not_seen() {
    let device = device();
    let opened = open(&device, &config(json!({})));
    let (model, parameters) = &opened;
    let logits = |ids: &[u32], masks: &[u32]| {
        let (first, zeros) = ([11, 12, 13], [0; 9]);
        let sequences =
            [Sequence { ids: &first, segments: &zeros[..3] }, Sequence { ids, segments: &zeros[..ids.len()] }];
        let (batch, rows) = Batch::with_masks(&device, model.config(), &sequences, masks, 0).unwrap();
        let mut tape = Tape::new();
        let mut pass = Pass::inference(&mut tape, parameters);
        let logits = model.logits(&mut pass, &batch, Some(&rows)).unwrap().tensor().to_f32().unwrap();
        logits.chunks(64).map(<[f32]>::to_vec).collect::<Vec<_>>()
    };
    // Two masks, of which the second is read twice: the other is hidden from it as well.
    let got = logits(&[5, 6, 9, 7, 6], &[4, 7, 7]);
    assert_eq!(got[1], got[2]);
    assert_ne!(got[0], got[1]);
    assert_eq!(got, logits(&[5, 40, 9, 7, 40], &[4, 7, 7]));
    assert_ne!(got, logits(&[5, 6, 10, 7, 6], &[4, 7, 7]));
    let sequence = Sequence { ids: &[5, 6], segments: &[0, 0] };
    let (plain, _) = Batch::with_masks(&device, model.config(), &[sequence], &[], 0).unwrap();
    assert!(plain.predicted().is_none());
    assert!(Batch::with_masks(&device, model.config(), &[sequence], &[2], 0).is_err());
    // An order with nothing to predict.
    let nothing = Permutation { orders: &[0, 1], targets: &[] };
    let batch = Batch::in_order(&device, model.config(), &[sequence], Some(&[nothing]), None, 0).unwrap();
    assert!(run(&opened, &batch, ALL).logits.is_empty());
}

/// A memory of the first half is as if it stood before the second, for tokens of one layer that see all: with the keys and values of
/// earlier tokens as they were, and distances counted through.
#[test]
fn memory_is_what_stood_before() {
    for device in devices() {
        let full = config(json!({}));
        let (model, parameters) = open(&device, &full);
        // One layer: the second half's states then depend on embeddings alone, which are the same in both.
        let mut one = full.clone();
        one.set_layers(1);
        let mut builder = Builder::new();
        let first = Model::build(&mut builder, &one, Head::MaskedLm).unwrap();
        let mut weights = builder.finish(&device, DType::F32).unwrap();
        for i in 0..weights.entries().len() {
            let name = weights.entries()[i].name.clone();
            let from = parameters.entries().iter().position(|entry| entry.name == name).unwrap();
            weights.write(i, &parameters.read(from).unwrap()).unwrap();
        }
        weights.refresh().unwrap();
        drop(model);
        let opened = (first, weights);
        let (ids, zeros) = ([5, 9, 21, 33, 8, 47, 13, 50, 6], [0; 9]);
        let batch = |ids: &[u32], memory: Option<&Memory>| {
            let sequence = Sequence { ids, segments: &zeros[..ids.len()] };
            Batch::in_order(&device, &one, &[sequence], None, memory, 0).unwrap()
        };
        let whole = run(&opened, &batch(&ids, None), ALL).logits;
        let memory = run(&opened, &batch(&ids[..5], None), ALL).memory;
        let rest = run(&opened, &batch(&ids[5..], Some(&memory)), ALL).logits;
        assert_close("the second half", &rest.concat(), &whole[5..].concat());
    }
}

#[test]
fn wrong_orders_and_memories_are_errors() {
    for device in devices() {
        let config = config(json!({}));
        let sequence = Sequence { ids: &[5, 6, 7], segments: &[0, 0, 2] };
        let wrong = |orders: &[u32], targets: &[u32]| {
            let permutation = Permutation { orders, targets };
            Batch::in_order(&device, &config, &[sequence], Some(&[permutation]), None, 0).unwrap_err().to_string()
        };
        assert!(wrong(&[0, 1], &[1]).contains("3 tokens but 2 orders"));
        assert!(wrong(&[0, 1, 2], &[3]).contains("token 3 of 3"));
        assert!(wrong(&[0, 1, 2], &[0]).contains("sees itself"));
        assert!(wrong(&[1, 1, 1], &[2]).contains("sees no key"));
        let opened = open(&device, &config);
        let batch = Batch::new(&device, &config, &[sequence, sequence], 0).unwrap();
        let memory = run(&opened, &batch, ALL).memory;
        let error = Batch::in_order(&device, &config, &[sequence], None, Some(&memory), 0).unwrap_err();
        assert!(matches!(error, InputError::Memory { sequences: 1, remembered: 2 }), "{error}");
        let bert = henson_models::Family::config_of_size("bert-tiny").unwrap();
        let error = Batch::in_order(&device, &bert, &[Sequence { ids: &[1], segments: &[0] }], None, Some(&memory), 0);
        assert!(matches!(error.unwrap_err(), InputError::NoStreams(name) if name == "bert"));
    }
}

#[test]
fn configs_that_mean_another_network_are_refused() {
    let cases = [
        ("untie_r", json!(false)),
        ("attn_type", json!("uni")),
        ("bi_data", json!(true)),
        ("d_head", json!(7)),
        ("n_head", json!(3)),
        ("n_head", json!(0)),
        ("d_model", json!(0)),
        ("n_layer", json!(0)),
        ("d_inner", json!(1u64 << 40)),
        ("clamp_len", json!(1i64 << 40)),
        ("summary_type", json!("attn")),
        ("summary_use_proj", json!(false)),
        ("summary_activation", json!("softmax")),
        ("summary_last_dropout", json!(1.5)),
        ("summary_first_dropout", json!("much")),
        ("dropout", json!(-0.1)),
        ("layer_norm_eps", json!(0.0)),
        ("tie_word_embeddings", json!(false)),
        ("ff_activation", json!("sine")),
        ("mem_len", json!(-3)),
    ];
    for (key, value) in cases {
        let mut keys = read("config.json");
        keys[key] = value;
        let error = ModelConfig::from_value(keys).unwrap_err().to_string();
        // A type that is wrong is reported by serde, which names the value alone.
        assert!(
            error.contains(key) || error.contains("unknown variant") || error.contains("invalid value"),
            "{key}: {error}"
        );
    }
    let mut odd = read("config.json");
    (odd["d_model"], odd["n_head"], odd["d_head"]) = (json!(15), json!(3), json!(5));
    assert!(ModelConfig::from_value(odd).unwrap_err().to_string().contains("even"));
}

#[test]
fn matrices_are_stored_by_head_as_inputs_and_outputs() {
    let mut builder = Builder::new();
    Model::build(&mut builder, &config(json!({})), Head::Sequence { labels: 3 }).unwrap();
    let shape = |name: &str| {
        let name = format!("transformer.{name}");
        builder.entries().iter().find(|entry| entry.name == name).unwrap_or_else(|| panic!("{name}")).stored_shape()
    };
    let expected: [(&str, Shape); 5] = [
        ("mask_emb", [1, 1, 16].into()),
        ("layer.1.rel_attn.q", [16, 2, 8].into()),
        ("layer.1.rel_attn.o", [16, 2, 8].into()),
        ("layer.0.rel_attn.r_s_bias", [2, 8].into()),
        ("layer.0.rel_attn.seg_embed", [2, 2, 8].into()),
    ];
    for (name, expected) in expected {
        assert_eq!(shape(name), expected, "{name}");
    }
}
