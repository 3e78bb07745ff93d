//! Recurrent layers against `torch.nn` on packed sequences, a conditional random field against `pytorch-crf`, and words read as
//! characters, attention and pooling against `torch`: values and all gradients, on every kernel set and, with HENSON_TEST_CUDA set, on the
//! GPU. `tools/golden/recurrent.py` made the values.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::Path;

use henson_models::characters::{CharacterCnn, CharacterSettings, Words, spell};
use henson_models::recurrent::{RecurrentSettings, RecurrentStack, build_crf};
use henson_models::{Batch, Capture, Head, InputError, Model, ModelConfig, Sequence};
use henson_tensor::cuda::CudaOptions;
use henson_tensor::{
    Activation, Attention, BiasValues, Builder, Cell, DType, Device, Directions, EmbeddingTables, Gradients, Init, Isa,
    Layout, Method, Optimizer, Param, Parameters, Pass, QueryKeyValue, Recordings, RecurrentState, Tape, Tensor,
    TensorError, Training, Update, Var,
};
use safetensors::SafeTensors;

/// f32 against f64, relative to the largest of a tensor.
const TOLERANCE: f64 = 1e-5;
/// Gradients are sums of more terms, and smaller ones than this hold noise of larger ones.
const GRADIENT_TOLERANCE: f64 = 5e-5;
const GRADIENT_FLOOR: f64 = 1e-3;

const LENGTHS: [usize; 4] = [4, 1, 9, 6];
const T: usize = 20;
const INPUT: usize = 5;
const HIDDEN: usize = 7;
const LABELS: usize = 5;

fn golden(case: &str) -> BTreeMap<String, Vec<f64>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/recurrent/golden.safetensors");
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let number = |b: &[u8]| f64::from(f32::from_le_bytes(b.try_into().unwrap()));
    let own = file.tensors().into_iter().filter_map(|(name, data)| {
        let name = name.strip_prefix(&format!("{case}/"))?.to_owned();
        Some((name, data.data().chunks_exact(4).map(number).collect()))
    });
    own.collect()
}

/// Every kernel set of the processor; with HENSON_TEST_CUDA set, the GPU too. Each with its name.
fn devices() -> Vec<(String, Device)> {
    let on = |isa: Isa| (isa.to_string(), Device::cpu(Some(isa), Some(2)).unwrap());
    let gpu = std::env::var_os("HENSON_TEST_CUDA").map(|_| Device::cuda(&CudaOptions::default()).unwrap());
    Isa::available().into_iter().map(on).chain(gpu.map(|gpu| ("cuda".to_owned(), gpu))).collect()
}

/// What the golden values were made with.
fn fill(parameters: &mut Parameters) {
    let mut names: Vec<String> = parameters.entries().iter().map(|entry| entry.name.clone()).collect();
    names.sort();
    for i in 0..parameters.entries().len() {
        let entry = parameters.entries()[i].clone();
        let k = names.iter().position(|name| *name == entry.name).unwrap() as f64;
        let size = if ["x", "h", "c"].contains(&entry.name.as_str()) { 1.0 } else { 0.4 };
        let value = |j: usize| (size * (0.7 * j as f64 + 1.3 * k).sin()) as f32;
        let values: Vec<f32> = (0..entry.shape.elements()).map(value).collect();
        parameters.write(i, &values).unwrap();
    }
    parameters.refresh().unwrap();
}

fn assert_close(what: &str, got: &[f32], expected: &[f64], floor: f64, tolerance: f64) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let scale = expected.iter().fold(floor, |m: f64, e| m.max(e.abs()));
    let worst = got.iter().zip(expected).fold(0.0, |m: f64, (g, e)| m.max((f64::from(*g) - e).abs()));
    assert!(worst <= tolerance * scale, "{what}: off by {worst:e} of {scale:e}");
}

/// The rows of a table, as a value with a gradient.
fn rows(pass: &mut Pass<'_>, table: Param, count: usize) -> Var {
    let ids = Tensor::from_slice(pass.device(), [count], &(0..count as u32).collect::<Vec<_>>()).unwrap();
    let tables = EmbeddingTables { word: table, position: None, position_offset: 0, segment: None };
    pass.embeddings(tables, &ids, &ids, None).unwrap()
}

fn check_gradients(case: &str, isa: impl Display + Copy, parameters: &Parameters, gradients: &Gradients) {
    let golden = golden(case);
    let known = golden.keys().filter(|name| name.starts_with("gradient.")).count();
    assert_eq!(parameters.entries().len(), known, "{case}: as many parameters");
    for (i, entry) in parameters.entries().iter().enumerate() {
        let (got, key) = (gradients.read(parameters, i).unwrap(), format!("gradient.{}", entry.name));
        assert_close(&format!("{case}: {key}, {isa}"), &got, &golden[&key], GRADIENT_FLOOR, GRADIENT_TOLERANCE);
    }
}

#[test]
fn layers_equal_those_of_torch() {
    let stack = |cell, layers, directions, projection| RecurrentSettings {
        directions,
        projection,
        ..RecurrentSettings::new(cell, INPUT, HIDDEN, layers)
    };
    let cases = [
        ("lstm", stack(Cell::Lstm, 2, Directions::Both, None), false),
        ("lstm-projected", stack(Cell::Lstm, 2, Directions::Both, Some(3)), false),
        ("lstm-states", stack(Cell::Lstm, 1, Directions::Both, None), true),
        ("gru", stack(Cell::Gru, 2, Directions::Both, None), false),
        ("gru-states", stack(Cell::Gru, 1, Directions::Forward, None), true),
        ("tanh", stack(Cell::Tanh, 1, Directions::Both, None), false),
        ("relu", stack(Cell::Relu, 2, Directions::Forward, None), false),
    ];
    for (name, device) in devices() {
        for (case, settings, states) in cases {
            let (mut b, init, rows_of_state) = (Builder::new(), Init::Zeros, settings.directions.count() * 4);
            let stack = RecurrentStack::build(&mut b, settings);
            let x = b.matrix("x", T, INPUT, init);
            let h = states.then(|| b.matrix("h", rows_of_state, HIDDEN, init));
            let c = (states && settings.cell == Cell::Lstm).then(|| b.matrix("c", rows_of_state, HIDDEN, init));
            let mut parameters = b.finish(&device, DType::F32).unwrap();
            fill(&mut parameters);
            let mut tape = Tape::new();
            let mut pass = Pass::training(&mut tape, &parameters, Training { seed: 1, step: 1 });
            let layout = Layout::new(&device, &LENGTHS, 0).unwrap();
            let x = rows(&mut pass, x, T);
            let initial = h.map(|h| RecurrentState {
                hidden: rows(&mut pass, h, rows_of_state),
                cell: c.map(|c| rows(&mut pass, c, rows_of_state)),
            });
            let (out, last) = stack.forward_from(&mut pass, x, &layout, initial.as_slice()).unwrap();
            let mut outputs = vec![out];
            if states {
                outputs.extend(last.into_iter().flat_map(|last| [Some(last.hidden), last.cell]).flatten());
            }
            check_outputs(case, name.as_str(), &parameters, pass, &outputs);
        }
    }
}

/// Seeds the gradients of outputs as the script does, runs backward, and compares.
fn check_outputs(case: &str, isa: impl Display + Copy, parameters: &Parameters, mut pass: Pass<'_>, outputs: &[Var]) {
    let (mut all, mut j) = (Vec::new(), 0);
    let mut gradients = parameters.gradients().unwrap();
    for output in outputs {
        let values = output.tensor().to_f32().unwrap();
        let weights: Vec<f32> = (j..j + values.len()).map(|j| (0.3 * j as f64 + 1.0).sin() as f32).collect();
        j += values.len();
        pass.seed_gradient(output, &weights).unwrap();
        all.extend(values);
    }
    pass.backward(&mut gradients).unwrap();
    assert_close(&format!("{case}: output, {isa}"), &all, &golden(case)["output"], 0.0, TOLERANCE);
    check_gradients(case, isa, parameters, &gradients);
}

#[test]
fn attentions_and_poolings_equal_those_of_torch() {
    const WIDTH: usize = 6;
    for (isa, device) in devices() {
        let isa = isa.as_str();
        let (layout, of_queries) =
            (Layout::new(&device, &LENGTHS, 0).unwrap(), Layout::new(&device, &[2, 3, 1, 4], 0).unwrap());
        for case in ["attention-additive", "attention-general", "attention-dot"] {
            let (mut b, init) = (Builder::new(), Init::Zeros);
            let (x, q) = (b.matrix("x", T, INPUT, init), b.matrix("q", 10, INPUT, init));
            let additive = case.ends_with("additive");
            let keys = additive.then(|| (b.matrix("keys", WIDTH, INPUT, init), b.vector("v", WIDTH, init)));
            let rows_of_queries = if additive { WIDTH } else { INPUT };
            let queries = (!case.ends_with("dot")).then(|| b.matrix("queries", rows_of_queries, INPUT, init));
            let mut parameters = b.finish(&device, DType::F32).unwrap();
            fill(&mut parameters);
            let mut tape = Tape::new();
            let mut pass = Pass::training(&mut tape, &parameters, Training { seed: 1, step: 1 });
            let (x, mut q) = (rows(&mut pass, x, T), rows(&mut pass, q, 10));
            if let Some(queries) = queries {
                q = pass.linear(&q, queries, None, Activation::None).unwrap();
            }
            let out = match keys {
                Some((keys, v)) => {
                    let keys = pass.linear(&x, keys, None, Activation::None).unwrap();
                    pass.additive_attention(Some((&q, &of_queries)), &keys, v, &x, &layout).unwrap()
                }
                None => {
                    let attention = Attention { scale: 1.0, ..Attention::new(1, INPUT) };
                    let from = QueryKeyValue::Apart { query: q, key: x.clone(), value: x };
                    pass.attention(&attention, from, &BiasValues::None, (&of_queries, &layout), (0.0, 0)).unwrap()
                }
            };
            check_outputs(case, isa, &parameters, pass, &[out]);
        }
        let (mut b, init) = (Builder::new(), Init::Zeros);
        let x = b.matrix("x", T, INPUT, init);
        let dense = (b.matrix("weight", WIDTH, INPUT, init), b.vector("bias", WIDTH, init));
        let v = b.vector("v", WIDTH, init);
        let mut parameters = b.finish(&device, DType::F32).unwrap();
        fill(&mut parameters);
        let mut tape = Tape::new();
        let mut pass = Pass::training(&mut tape, &parameters, Training { seed: 1, step: 1 });
        let x = rows(&mut pass, x, T);
        let keys = pass.linear(&x, dense.0, Some(dense.1), Activation::None).unwrap();
        let outputs = [
            pass.additive_attention(None, &keys, v, &x, &layout).unwrap(),
            pass.maxima(&x, &layout).unwrap(),
            pass.means(&x, &layout).unwrap(),
        ];
        check_outputs("pooling", isa, &parameters, pass, &outputs);
    }
}

const VOCABULARY: usize = 11;

/// Tokens of sequences: token i of a stream is 7·i mod 11.
fn tokens(lengths: &[usize]) -> Vec<Vec<u32>> {
    let mut all = (0u32..).map(|i| i * 7 % VOCABULARY as u32);
    lengths.iter().map(|length| all.by_ref().take(*length).collect()).collect()
}

/// An encoder-decoder with the weights of the script, and what it reads and writes.
fn encoder_decoder(
    device: &Device,
    (cell, attention, bidirectional, feeding): (&str, &str, bool, &str),
) -> (Model, Parameters, Batch, Vec<u32>) {
    let config = serde_json::json!({
        "model_type": "rnn-seq2seq", "vocab_size": VOCABULARY, "embedding_size": 5, "hidden_size": 8, "dropout": 0.0,
        "num_hidden_layers": 2, "cell": cell, "attention": attention, "bidirectional": bidirectional, "feeding": feeding,
    });
    let config = ModelConfig::from_value(config).unwrap();
    let (sources, targets, segments) = (tokens(&[4, 1, 6]), tokens(&[3, 5, 2]), [0; 6]);
    let mut b = Builder::new();
    let model = Model::build(&mut b, &config, Head::Seq2Seq).unwrap();
    let mut parameters = b.finish(device, DType::F32).unwrap();
    fill(&mut parameters);
    let of_sources: Vec<Sequence<'_>> =
        sources.iter().map(|ids| Sequence { ids, segments: &segments[..ids.len()] }).collect();
    let of_targets: Vec<&[u32]> = targets.iter().map(Vec::as_slice).collect();
    let batch = Batch::pairs(device, &config, &of_sources, &of_targets, 0).unwrap();
    (model, parameters, batch, targets.concat())
}

/// The logits of all tokens of the targets.
fn logits_of_targets(model: &Model, pass: &mut Pass<'_>, batch: &Batch) -> Var {
    let last = model.encode(pass, batch, Capture::default()).unwrap().last;
    let rows = Tensor::from_slice(pass.device(), [10], &(0..10).collect::<Vec<u32>>()).unwrap();
    model.logits_of(pass, last, batch.output_layout(), Some(&rows)).unwrap()
}

/// The name of a case of the script.
fn case_of(what: &str, (cell, attention, _, feeding): (&str, &str, bool, &str)) -> String {
    let feeding = if feeding == "none" { String::new() } else { format!("-{feeding}") };
    format!("{what}-{cell}-{attention}{feeding}")
}

/// Encoder-decoders: logits and all gradients.
#[test]
fn encoder_decoders_equal_those_of_torch() {
    for kind in [
        ("lstm", "general", true, "none"),
        ("gru", "additive", true, "none"),
        ("lstm", "dot", false, "none"),
        ("gru", "none", false, "none"),
        ("lstm", "general", true, "output"),
        ("gru", "additive", true, "context"),
        ("lstm", "dot", false, "context"),
    ] {
        let case = case_of("seq2seq", kind);
        for isa in Isa::available() {
            let device = Device::cpu(Some(isa), Some(2)).unwrap();
            let (model, parameters, batch, _) = encoder_decoder(&device, kind);
            let (mut gradients, mut tape) = (parameters.gradients().unwrap(), Tape::new());
            let mut pass = Pass::training(&mut tape, &parameters, Training { seed: 1, step: 1 });
            let logits = logits_of_targets(&model, &mut pass, &batch);
            // The vocabulary's columns are filled up.
            let (values, columns) = (logits.tensor().to_f32().unwrap(), logits.tensor().columns());
            let own = |j: usize| j / columns * VOCABULARY + j % columns;
            let weight =
                |j: usize| if j % columns < VOCABULARY { (0.3 * own(j) as f64 + 1.0).sin() as f32 } else { 0.0 };
            pass.seed_gradient(&logits, &(0..values.len()).map(weight).collect::<Vec<_>>()).unwrap();
            pass.backward(&mut gradients).unwrap();
            let values: Vec<f32> = values.chunks(columns).flat_map(|row| row[..VOCABULARY].to_vec()).collect();
            assert_close(&format!("{case}: logits, {isa}"), &values, &golden(&case)["output"], 0.0, TOLERANCE);
            check_gradients(&case, isa, &parameters, &gradients);
        }
    }
}

/// Ten updates by Adam, clipped: every loss, and all parameters after the last one.
#[test]
fn encoder_decoders_learn_as_those_of_torch() {
    for kind in [
        ("lstm", "general", true, "none"),
        ("gru", "additive", true, "none"),
        ("lstm", "general", true, "output"),
        ("gru", "additive", true, "context"),
    ] {
        for (_, device) in devices() {
            learns_as_those_of_torch(&device, kind);
        }
    }
}

fn learns_as_those_of_torch(device: &Device, kind: (&str, &str, bool, &str)) {
    let golden = golden(&case_of("training", kind));
    let (model, mut parameters, batch, targets) = encoder_decoder(device, kind);
    let targets = Tensor::from_slice(device, [targets.len()], &targets).unwrap();
    let mut optimizer = Optimizer::new(Method::AdamW, &parameters, |_| 1.0).unwrap();
    let (mut gradients, mut tape) = (parameters.gradients().unwrap(), Tape::new());
    for (step, expected) in (1..).zip(&golden["losses"]) {
        gradients.zero();
        let mut pass = Pass::training(&mut tape, &parameters, Training { seed: 1, step });
        let logits = logits_of_targets(&model, &mut pass, &batch);
        let loss = pass.cross_entropy(logits, VOCABULARY, &targets, None, 0.1).unwrap().0;
        pass.backward(&mut gradients).unwrap();
        let loss = f64::from(loss.to_f32().unwrap()[0]);
        assert!((loss - expected).abs() < 1e-5, "{kind:?}, update {step}: {loss}, PyTorch has {expected}");
        let update = Update {
            learning_rate: 1e-2,
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-6,
            weight_decay: 0.0,
            bias_correction: Some(u64::from(step)),
            gradient_scale: 1.0,
        };
        optimizer.step(&mut parameters, &gradients, &update, Some(0.5)).unwrap();
    }
    for (i, entry) in parameters.entries().iter().enumerate() {
        let (got, key) = (parameters.read(i).unwrap(), format!("after.{}", entry.name));
        // Adam divides a gradient by its own size: what is noise in a gradient moves a parameter.
        assert_close(&key, &got, &golden[&key], 1.0, 2e-4);
    }
}

#[test]
fn a_field_equals_that_of_pytorch_crf() {
    let (golden, labels): (_, Vec<u32>) = (golden("crf"), (0..T as u32).map(|i| i * i % LABELS as u32).collect());
    for (isa, device) in devices() {
        let isa = isa.as_str();
        let mut b = Builder::new();
        let crf = build_crf(&mut b, LABELS);
        let x = b.matrix("x", T, LABELS, Init::Zeros);
        let mut parameters = b.finish(&device, DType::F32).unwrap();
        fill(&mut parameters);
        let (mut gradients, mut tape) = (parameters.gradients().unwrap(), Tape::new());
        let layout = Layout::new(&device, &LENGTHS, 0).unwrap();
        let mut pass = Pass::inference(&mut tape, &parameters);
        let logits = rows(&mut pass, x, T);
        let best = pass.crf_best(&logits, &crf, &layout, None).unwrap();
        assert_eq!(best.iter().map(|tag| f64::from(*tag)).collect::<Vec<_>>(), golden["tags"]);
        drop(pass);
        let mut pass = Pass::training(&mut tape, &parameters, Training { seed: 1, step: 1 });
        let logits = rows(&mut pass, x, T);
        let labels = Tensor::from_slice(&device, [T], &labels).unwrap();
        let loss = pass.crf_loss(logits, &crf, &layout, &labels, 1.0).unwrap();
        pass.backward(&mut gradients).unwrap();
        assert_close("loss", &loss.to_f32().unwrap(), &golden["loss"], 0.0, TOLERANCE);
        check_gradients("crf", isa, &parameters, &gradients);
    }
}

const WORDS: [&str; 8] = ["The", "naïve", "cat", "The", "", "incomprehensibilities", "cat", "a"];

#[test]
fn words_are_read_as_in_torch() {
    let plain =
        CharacterSettings { activation: Activation::Tanh, max_characters: 14, ..CharacterSettings::plain(6, (3, 11)) };
    let whole = CharacterSettings {
        activation: Activation::Relu,
        filters: vec![(1, 3), (2, 5), (4, 9)],
        highways: 2,
        projection: Some(7),
        ..plain.clone()
    };
    let devices = devices();
    for ((isa, device), (case, settings)) in devices
        .iter()
        .flat_map(|device| [("characters", &whole), ("characters-tanh", &plain)].map(|case| (device, case)))
    {
        assert_eq!(settings.problem(), None);
        let mut b = Builder::new();
        let network = CharacterCnn::build(&mut b, settings);
        let mut parameters = b.finish(device, DType::F32).unwrap();
        fill(&mut parameters);
        let words: Vec<Vec<u32>> = WORDS.iter().map(|word| spell(word, settings.max_characters).collect()).collect();
        let words = Words::new(device, settings, words.iter().map(Vec::as_slice)).unwrap();
        assert_eq!(words.types(), 6);
        let (mut gradients, mut tape) = (parameters.gradients().unwrap(), Tape::new());
        let mut pass = Pass::training(&mut tape, &parameters, Training { seed: 1, step: 1 });
        let out = network.forward(&mut pass, &words).unwrap();
        let values = out.tensor().to_f32().unwrap();
        assert_eq!(values.len(), WORDS.len() * settings.output());
        let weights: Vec<f32> = (0..values.len()).map(|j| (0.3 * j as f64 + 1.0).sin() as f32).collect();
        pass.seed_gradient(&out, &weights).unwrap();
        pass.backward(&mut gradients).unwrap();
        assert_close(&format!("{case}: output, {isa}"), &values, &golden(case)["output"], 0.0, TOLERANCE);
        check_gradients(case, isa, &parameters, &gradients);
    }
}

/// A BiLSTM tagger over vectors of words and what filters find in their characters, on the words of two sentences: some known, some not.
fn character_tagger(device: &Device) -> (Model, Parameters, Batch) {
    let config = serde_json::json!({
        "model_type": "bilstm", "vocab_size": 4, "embedding_size": 4, "hidden_size": 3, "dropout": 0.0, "character_filters": 7,
        "character_embedding_size": 6, "max_characters": 14,
    });
    let config = ModelConfig::from_value(config).unwrap();
    let mut b = Builder::new();
    let model = Model::build(&mut b, &config, Head::Token { labels: LABELS }).unwrap();
    let mut parameters = b.finish(device, DType::F32).unwrap();
    fill(&mut parameters);
    let known =
        |word: &&str| ["[PAD]", "[UNK]", "The", "cat"].iter().position(|known| known == word).unwrap_or(1) as u32;
    let ids: Vec<u32> = WORDS.iter().map(known).collect();
    let spellings: Vec<Box<str>> = WORDS.iter().map(|word| Box::from(*word)).collect();
    let zeros = [0; 5];
    let sequences = [0..5, 5..8].map(|range| Sequence { ids: &ids[range.clone()], segments: &zeros[..range.len()] });
    let batch = Batch::new(device, &config, &sequences, 0).unwrap();
    let missing = [vec![Some(&spellings[..5])], vec![None, None], vec![Some(&spellings[..5]), Some(&spellings[5..7])]];
    for (spellings, sequence) in missing.into_iter().zip([1, 0, 1]) {
        let error = batch.clone().spelled(device, &config, spellings).unwrap_err().to_string();
        assert!(error.starts_with(&format!("sequence {sequence}: the model reads the characters")), "{error}");
    }
    let batch = batch.spelled(device, &config, [Some(&spellings[..5]), Some(&spellings[5..])]).unwrap();
    (model, parameters, batch)
}

#[test]
fn a_tagger_that_reads_characters_equals_one_of_torch() {
    for (isa, device) in devices() {
        let isa = isa.as_str();
        let (model, parameters, batch) = character_tagger(&device);
        let mut tape = Tape::new();
        let mut pass = Pass::training(&mut tape, &parameters, Training { seed: 1, step: 1 });
        let logits = model.logits(&mut pass, &batch, None).unwrap();
        check_outputs("tagger-characters", isa, &parameters, pass, &[logits]);
    }
}

/// What a gradient promises is what a small step along it gives, from the tables of words and of characters on.
#[test]
fn a_tagger_that_reads_characters_follows_its_gradient() {
    let device = Device::cpu(None, Some(2)).unwrap();
    let (model, mut parameters, batch) = character_tagger(&device);
    let loss = |parameters: &Parameters, gradients: Option<&mut Gradients>| -> f64 {
        let mut tape = Tape::new();
        let mut pass = Pass::training(&mut tape, parameters, Training { seed: 1, step: 1 });
        let logits = model.logits(&mut pass, &batch, None).unwrap();
        let values = logits.tensor().to_f32().unwrap();
        let weights: Vec<f32> = (0..values.len()).map(|j| (0.3 * j as f64 + 1.0).sin() as f32).collect();
        pass.seed_gradient(&logits, &weights).unwrap();
        if let Some(gradients) = gradients {
            pass.backward(gradients).unwrap();
        }
        values.iter().zip(&weights).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum()
    };
    let mut gradients = parameters.gradients().unwrap();
    loss(&parameters, Some(&mut gradients));
    for i in 0..parameters.entries().len() {
        let (own, gradient) = (parameters.read(i).unwrap(), gradients.read(&parameters, i).unwrap());
        let size = gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
        let mut at = |step: f64| {
            let moved = own.iter().zip(&gradient).map(|(x, g)| x + (step * f64::from(*g) / size) as f32);
            parameters.write(i, &moved.collect::<Vec<_>>()).unwrap();
            parameters.refresh().unwrap();
            loss(&parameters, None)
        };
        let slope = (at(2e-3) - at(-2e-3)) / 4e-3;
        at(0.0);
        let name = &parameters.entries()[i].name;
        assert!((slope - size).abs() < 2e-2 * size, "{name}: {slope}, its gradient has the length {size}");
    }
}

/// Steps of two language models over words, with other words each and the states of the step before: what is recorded on a GPU gives what
/// the CPU gives.
#[test]
fn recorded_passes_follow_other_words() {
    let config = serde_json::json!({
        "model_type": "elmo", "dropout": 0.1, "n_tokens_vocab": 9,
        "char_cnn": {
            "embedding": {"dim": 4}, "filters": [[1, 3], [2, 5], [3, 8]], "n_highway": 1, "n_characters": 261,
            "max_characters_per_token": 12, "activation": "relu",
        },
        "lstm": {
            "cell_clip": 3, "proj_clip": 3, "dim": 6, "n_layers": 2, "projection_dim": 5, "use_skip_connections": true,
        },
    });
    let config = ModelConfig::from_value(config).unwrap();
    let text = "<a few words that are long and longer than twelve bytes> incomprehensibilities \u{e9}t\u{e9} again a b c d e f g h i j";
    let run = |device: &Device| -> Vec<Vec<f32>> {
        let mut b = Builder::new();
        let model = Model::build(&mut b, &config, Head::MaskedLm).unwrap();
        let mut parameters = b.finish(device, DType::F32).unwrap();
        fill(&mut parameters);
        let (mut gradients, mut tape, mut recordings) =
            (parameters.gradients().unwrap(), Tape::new(), Recordings::default());
        let (mut all, kept) = (Vec::new(), RefCell::new(Vec::<RecurrentState>::new()));
        for step in 0..12 {
            // Four rows of three words each, of other lengths in every step.
            let words: Vec<&str> = text.split(' ').cycle().skip(step * 5 % 19).take(12).collect();
            let ids: Vec<Vec<u32>> =
                words.chunks(3).map(|row| row.join(" ").bytes().map(u32::from).collect()).collect();
            let zeros = vec![0; 100];
            let sequences: Vec<Sequence<'_>> =
                ids.iter().map(|ids| Sequence { ids, segments: &zeros[..ids.len()] }).collect();
            let ((batch, rows, targets), signature) = device
                .feed(|| {
                    device.reads_in_place(&kept.borrow());
                    let batch = Batch::in_two_directions(device, &config, [&sequences[..2], &sequences[2..]], 0)?
                        .continuing(&kept.borrow());
                    let rows = Tensor::from_slice(device, [12], &(0..12).collect::<Vec<u32>>())?;
                    let targets: Vec<u32> = (0..12).map(|i| (i * i + step as u32) % 9).collect();
                    Ok::<_, InputError>((batch, rows, Tensor::from_slice(device, [12], &targets)?))
                })
                .unwrap();
            gradients.zero();
            let losses = recordings.run(device, &signature, &(), || {
                let mut pass = Pass::training(&mut tape, &parameters, Training { seed: 1, step: 1 });
                let encoded = model.encode(&mut pass, &batch, Capture::default())?;
                pass.carry(&encoded.states, &mut kept.borrow_mut())?;
                let logits = model.logits_of(&mut pass, encoded.last, batch.output_layout(), Some(&rows))?;
                let loss = pass.cross_entropy(logits, 9, &targets, None, 1.0)?.0;
                pass.backward(&mut gradients)?;
                Ok::<_, TensorError>((vec![loss], tape.trace()))
            });
            gradients.played();
            all.push(losses.unwrap()[0].to_f32().unwrap());
            all.extend((0..parameters.entries().len()).map(|i| gradients.read(&parameters, i).unwrap()));
        }
        all
    };
    let mut devices = devices();
    let expected = run(&Device::cpu(None, Some(1)).unwrap());
    let (name, device) = devices.pop().unwrap();
    for (i, (got, expected)) in run(&device).iter().zip(&expected).enumerate() {
        let expected: Vec<f64> = expected.iter().map(|x| f64::from(*x)).collect();
        assert_close(&format!("result {i} on {name}"), got, &expected, GRADIENT_FLOOR, GRADIENT_TOLERANCE);
    }
}

#[test]
fn sizes_that_read_no_word_are_refused() {
    let good = CharacterSettings::plain(6, (3, 11));
    let wrong = [
        CharacterSettings { filters: vec![], ..good.clone() },
        CharacterSettings { filters: vec![(0, 3)], ..good.clone() },
        CharacterSettings { max_characters: 2, ..good.clone() },
        CharacterSettings { activation: Activation::Gelu, ..good.clone() },
    ];
    assert!(good.problem().is_none() && wrong.iter().all(|settings| settings.problem().is_some()));
}
