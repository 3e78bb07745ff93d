//! What tiny models write, against `transformers` token by token; and that company, parts and cancelled jobs change nothing.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use henson_checkpoint::{LoadOptions, ModelDirectory, open_parameters};
use henson_infer::{
    EarlyStopping, Event, EventKind, FinishReason, GenerateSettings, Job, Sampling, Ticket, TokenScore, Writer,
    WriterLimits, Written,
};
use henson_models::{Batch, Head, Model, ModelConfig, Sequence};
use henson_tensor::{Builder, DType, Device, Parameters, Pass, Tape, Tensor};
use serde_json::Value;

const SMALL: [&str; 7] = ["gpt2", "gpt2-scaled", "openai-gpt", "t5", "t5-v1_1", "bart", "marian"];

const LIMITS: WriterLimits = WriterLimits { tokens: 2048, source_tokens: 1024, streams: 32, prefill: 64 };

fn directory(folder: &str, name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data").join(folder).join(name)
}

fn json(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn open_on(device: &Device, dtype: DType, path: &Path) -> (Model, Parameters) {
    let directory = ModelDirectory::open(path).unwrap();
    let mut keys = directory.config().unwrap();
    for key in ["architectures", "id2label", "label2id"] {
        keys.as_object_mut().unwrap().remove(key);
    }
    let config = ModelConfig::from_value(keys).unwrap();
    let head = if config.targets().is_some() { Head::Seq2Seq } else { Head::MaskedLm };
    let mut builder = Builder::new();
    let model = Model::build(&mut builder, &config, head).unwrap();
    let (weights, naming) = (directory.weights().unwrap(), &config.family().naming);
    let (mut parameters, _) =
        open_parameters(&weights, naming, builder, device, dtype, &LoadOptions::strict(), 0).unwrap();
    parameters.keep_packed();
    (model, parameters)
}

fn open(folder: &str, name: &str) -> (Model, Parameters) {
    open_on(&crate::common::device(None, Some(2)), DType::F32, &directory(folder, name))
}

fn job<'a>(prompt: &[u32], settings: &GenerateSettings) -> Job<'a> {
    Job { prompt: prompt.to_vec(), start: vec![], settings: settings.clone(), stop: None }
}

/// Everything that comes of a writer's jobs.
#[derive(Default)]
struct Heard {
    tokens: HashMap<(Ticket, usize), Vec<TokenScore>>,
    finished: HashMap<(Ticket, usize), Written>,
}

impl Heard {
    fn take(&mut self, events: Vec<Event>) {
        for Event { ticket, sequence, kind } in events {
            match kind {
                EventKind::Token(token) => self.tokens.entry((ticket, sequence)).or_default().push(token),
                EventKind::Finished(written) => {
                    assert!(self.finished.insert((ticket, sequence), written).is_none(), "finished twice");
                }
            }
        }
    }

    /// What was written for a job; the tokens heard one by one are those at the end.
    fn of(&self, ticket: Ticket, sequences: usize) -> Vec<Written> {
        let one = |sequence: usize| {
            let written = self.finished.get(&(ticket, sequence)).expect("finished").clone();
            if let Some(tokens) = self.tokens.get(&(ticket, sequence)) {
                assert_eq!(tokens.iter().map(|token| token.id).collect::<Vec<_>>(), written.ids);
            }
            written
        };
        (0..sequences).map(one).collect()
    }
}

fn run(writer: &mut Writer<'_>) -> Heard {
    let mut heard = Heard::default();
    while !writer.is_idle() {
        heard.take(writer.step().unwrap());
    }
    heard
}

/// What is written for one prompt alone.
fn alone((model, parameters): &(Model, Parameters), prompt: &[u32], settings: &GenerateSettings) -> Vec<Written> {
    let mut writer = Writer::new(model, parameters, LIMITS).unwrap();
    let ticket = writer.enter(job(prompt, settings)).unwrap();
    run(&mut writer).of(ticket, settings.return_sequences)
}

/// Settings in `transformers`' words.
fn settings(keys: &Value, new_tokens: usize) -> GenerateSettings {
    let number = |key: &str, default: f64| keys.get(key).map_or(default, |value| value.as_f64().unwrap());
    let count = |key: &str, default: usize| number(key, default as f64) as usize;
    let id = |key: &str| keys.get(key).map(|id| id.as_u64().unwrap() as u32);
    let end = &keys["eos_token_id"];
    let bias = |pair: &Value| (ids(&pair[0])[0], pair[1].as_f64().unwrap() as f32);
    GenerateSettings {
        max_new_tokens: Some(new_tokens),
        min_new_tokens: count("min_new_tokens", 0),
        min_length: count("min_length", 0),
        beams: count("num_beams", 1),
        return_sequences: count("num_return_sequences", 1),
        length_penalty: number("length_penalty", 1.0) as f32,
        early_stopping: match keys.get("early_stopping") {
            Some(Value::Bool(true)) => EarlyStopping::Yes,
            Some(Value::String(_)) => EarlyStopping::Never,
            _ => EarlyStopping::No,
        },
        repetition_penalty: number("repetition_penalty", 1.0) as f32,
        no_repeat_ngram: count("no_repeat_ngram_size", 0),
        logit_bias: keys.get("sequence_bias").map_or(vec![], |all| all.as_array().unwrap().iter().map(bias).collect()),
        forced_first: id("forced_bos_token_id"),
        forced_last: id("forced_eos_token_id"),
        end: if end.is_null() { vec![] } else { end.as_u64().map_or_else(|| ids(end), |id| vec![id as u32]) },
        ..GenerateSettings::default()
    }
}

/// The eight settings of the small golden directories.
fn small_settings(name: &str, end: u32) -> GenerateSettings {
    let plain = GenerateSettings { max_new_tokens: Some(12), end: vec![end], ..GenerateSettings::default() };
    let beams = GenerateSettings { beams: 3, ..plain.clone() };
    match name {
        "greedy" => plain,
        "beam3" => beams,
        "beam3_lp0.6" => GenerateSettings { length_penalty: 0.6, ..beams },
        "beam3_lp2_early" => GenerateSettings { length_penalty: 2.0, early_stopping: EarlyStopping::Yes, ..beams },
        "beam3_never" => GenerateSettings { length_penalty: 2.0, early_stopping: EarlyStopping::Never, ..beams },
        "beam4_norepeat2_min6" => GenerateSettings { beams: 4, no_repeat_ngram: 2, min_new_tokens: 6, ..beams },
        "greedy_rep1.3" => GenerateSettings { repetition_penalty: 1.3, ..plain },
        "beam3_forced" => GenerateSettings { forced_first: Some(7), forced_last: Some(3), ..beams },
        other => panic!("{other}"),
    }
}

#[test]
fn small_golden_directories() {
    for name in SMALL {
        let (model, parameters) = open("writers", name);
        let golden = json(&directory("writers", name).join("golden.json"));
        let begun = if model.config().targets().is_some() { 1 } else { 4 };
        // All settings of both cases at once: none sees another.
        let mut writer = Writer::new(&model, &parameters, LIMITS).unwrap();
        let mut expected = vec![];
        for (case, input) in golden["cases"].as_array().unwrap().iter().zip(golden["inputs"].as_array().unwrap()) {
            let generated = case["generate"].as_object().unwrap();
            let end = generated["eos"].as_u64().unwrap() as u32;
            let input = ids(input);
            let prompt = if begun == 1 { &input[..] } else { &input[..4] };
            for (tag, golden) in generated.iter().filter(|(tag, _)| *tag != "eos") {
                let ticket = writer.enter(job(prompt, &small_settings(tag, end))).unwrap();
                expected.push((tag, ticket, golden));
            }
        }
        assert_eq!(expected.len(), 16);
        let heard = run(&mut writer);
        for (tag, ticket, golden) in expected {
            let written = &heard.of(ticket, 1)[0];
            assert_eq!(written.ids, ids(&golden["ids"])[begun..], "{name}: {tag}");
            if let Some(score) = golden.get("score").and_then(Value::as_f64) {
                assert!((f64::from(written.score) - score).abs() < 1e-4, "{name}: {tag}: {} {score}", written.score);
            }
        }
    }
}

#[test]
fn longer_texts() {
    for name in ["gpt2", "t5", "bart"] {
        let model = open("generation", name);
        let golden = json(&directory("generation", name).join("golden.json"));
        let new_tokens = golden["new_tokens"].as_u64().unwrap() as usize;
        for (number, case) in golden["cases"].as_array().unwrap().iter().enumerate() {
            let source = ids(&case["source"]);
            for generated in case["generated"].as_array().unwrap() {
                let settings = settings(&generated["keys"], new_tokens);
                let found = alone(&model, &source, &settings);
                let what = format!("{name}, case {number}: {}", generated["tag"]);
                for (i, (found, golden)) in found.iter().zip(generated["ids"].as_array().unwrap()).enumerate() {
                    let golden = ids(golden);
                    assert!(golden.starts_with(&found.ids), "{what} {i}: {:?}, not {golden:?}", found.ids);
                    // Where others are longer, `transformers` fills up with the first end token.
                    let fill = settings.end.first();
                    assert!(golden[found.ids.len()..].iter().all(|id| Some(id) == fill), "{what} {i}: {golden:?}");
                    if let Some(score) = generated["scores"][i].as_f64() {
                        let off = (f64::from(found.score) - score).abs();
                        assert!(off < 1e-4 * score.abs().max(1.0), "{what} {i}: {} {score}", found.score);
                    }
                }
            }
        }
    }
}

/// A recurrent encoder-decoder with the weights of tools/golden/recurrent.py.
fn recurrent(
    device: &Device,
    (cell, attention, bidirectional, feeding): (&str, &str, bool, &str),
) -> (Model, Parameters) {
    let config = serde_json::json!({
        "model_type": "rnn-seq2seq", "vocab_size": 11, "embedding_size": 5, "hidden_size": 8, "dropout": 0.0,
        "num_hidden_layers": 2, "cell": cell, "attention": attention, "bidirectional": bidirectional, "feeding": feeding,
    });
    filled(device, config)
}

/// A model whose element i of the k-th parameter, by name, is 0.4·sin(0.7·i + 1.3·k).
fn filled(device: &Device, config: Value) -> (Model, Parameters) {
    let config = ModelConfig::from_value(config).unwrap();
    let head = if config.targets().is_some() { Head::Seq2Seq } else { Head::MaskedLm };
    let mut builder = Builder::new();
    let model = Model::build(&mut builder, &config, head).unwrap();
    let mut parameters = builder.finish(device, DType::F32).unwrap();
    let mut names: Vec<String> = parameters.entries().iter().map(|entry| entry.name.clone()).collect();
    names.sort();
    for i in 0..parameters.entries().len() {
        let (k, count) = (names.binary_search(&parameters.entries()[i].name), parameters.entries()[i].shape.elements());
        let value = |j: usize| (0.4 * (0.7 * j as f64 + 1.3 * k.unwrap() as f64).sin()) as f32;
        parameters.write(i, &(0..count).map(value).collect::<Vec<f32>>()).unwrap();
    }
    parameters.refresh().unwrap();
    (model, parameters)
}

/// Decoders whose steps are fed with earlier ones write what PyTorch's do, greedily and with beams, which then have to take along
/// what they are fed with.
#[test]
fn fed_decoders_write_as_in_pytorch() {
    let bytes = std::fs::read(directory("recurrent", "golden.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let number = |b: &[u8]| f32::from_le_bytes(b.try_into().unwrap()) as u32;
    let sources: [&[u32]; 3] = [&[0, 7, 3, 10], &[6], &[2, 9, 5, 1, 8, 4]];
    for kind in
        [("lstm", "general", true, "output"), ("gru", "additive", true, "context"), ("lstm", "dot", false, "context")]
    {
        let device = Device::cpu(None, Some(2)).unwrap();
        let (case, model) = (format!("writing-{}-{}-{}", kind.0, kind.1, kind.3), recurrent(&device, kind));
        for (what, beams) in [("greedy", 1), ("beams", 3)] {
            let settings = GenerateSettings {
                max_new_tokens: Some(8),
                end: vec![],
                beams,
                return_sequences: beams,
                ..GenerateSettings::default()
            };
            let expected = file.tensor(&format!("{case}/{what}")).unwrap();
            let expected: Vec<u32> = expected.data().chunks_exact(4).map(number).collect();
            let mut writer = Writer::new(&model.0, &model.1, LIMITS).unwrap();
            let tickets = sources.map(|source| writer.enter(job(source, &settings)).unwrap());
            let heard = run(&mut writer);
            let together: Vec<Written> = tickets.iter().flat_map(|ticket| heard.of(*ticket, beams)).collect();
            let by_itself: Vec<Written> = sources.iter().flat_map(|source| alone(&model, source, &settings)).collect();
            for found in [together, by_itself] {
                assert_eq!(
                    found.iter().flat_map(|one| one.ids.clone()).collect::<Vec<_>>(),
                    expected,
                    "{case}, {what}"
                );
            }
        }
    }
}

fn sampled(seed: u64, more: impl Fn(&mut Sampling)) -> GenerateSettings {
    let mut sampling = Sampling { top_k: 0, seed, ..Sampling::default() };
    more(&mut sampling);
    GenerateSettings { max_new_tokens: Some(20), sampling: Some(sampling), ..GenerateSettings::default() }
}

/// Jobs of every kind, with prompts of unequal lengths.
fn mixed_jobs() -> Vec<(Vec<u32>, GenerateSettings)> {
    let prompt =
        |number: usize, length: usize| (0..length).map(|i| (3 + (7 * number + 5 * i * i) % 50) as u32).collect();
    let greedy = GenerateSettings { max_new_tokens: Some(17), end: vec![12, 40], ..GenerateSettings::default() };
    let beams = GenerateSettings { beams: 3, return_sequences: 2, ..greedy.clone() };
    let several = GenerateSettings { return_sequences: 3, ..sampled(5, |s| s.top_p = 0.9) };
    vec![
        (prompt(0, 5), greedy.clone()),
        (prompt(1, 40), beams.clone()),
        (prompt(2, 3), sampled(3, |s| s.top_k = 5)),
        (prompt(3, 33), several),
        (prompt(4, 9), GenerateSettings { repetition_penalty: 1.2, no_repeat_ngram: 2, ..greedy }),
        (prompt(5, 21), GenerateSettings { length_penalty: 0.3, max_new_tokens: Some(30), ..beams }),
    ]
}

/// The same bits alone and in company, whatever enters and leaves in between, and for any number of threads.
#[test]
fn company_changes_nothing() {
    if !crate::common::company_keeps_bits() {
        return;
    }
    for name in ["gpt2", "t5", "bart"] {
        for dtype in [DType::F32, DType::Bf16] {
            let path = directory("generation", name);
            let model = open_on(&Device::cpu(None, Some(2)).unwrap(), dtype, &path);
            let single = open_on(&Device::cpu(None, Some(1)).unwrap(), dtype, &path);
            let jobs = mixed_jobs();
            let expected: Vec<_> = jobs.iter().map(|(prompt, settings)| alone(&single, prompt, settings)).collect();
            let mut writer = Writer::new(&model.0, &model.1, LIMITS).unwrap();
            let mut heard = Heard::default();
            let mut tickets = vec![];
            for (i, (prompt, settings)) in jobs.iter().enumerate() {
                // One that leaves soon stands beside each.
                let guest = writer.enter(job(&[9, 8, 7], &jobs[(i + 2) % jobs.len()].1)).unwrap();
                tickets.push(writer.enter(job(prompt, settings)).unwrap());
                (0..2 + i % 3).for_each(|_| heard.take(writer.step().unwrap()));
                writer.leave(guest);
            }
            let rest = run(&mut writer);
            heard.finished.extend(rest.finished);
            for (i, (ticket, expected)) in tickets.into_iter().zip(expected).enumerate() {
                let found: Vec<_> = (0..expected.len()).map(|n| heard.finished[&(ticket, n)].clone()).collect();
                let bits = |all: &[Written]| all.iter().map(|w| (w.ids.clone(), w.score.to_bits())).collect::<Vec<_>>();
                assert_eq!(bits(&found), bits(&expected), "{name}, job {i}, {dtype:?}");
            }
        }
    }
}

/// All that comes of jobs of every kind that enter and leave in between, and how many steps were recorded.
fn events_of((model, parameters): &(Model, Parameters), recorded: bool) -> (Vec<Event>, usize) {
    // Operations that are timed one by one are not recorded.
    if !recorded {
        parameters.device().start_profile();
    }
    let mut writer = Writer::new(model, parameters, LIMITS).unwrap();
    let ids = model.config().sizes().vocab_size as u32;
    let (mut jobs, mut events, mut guests) = (mixed_jobs(), vec![], vec![]);
    // Once more each: by then sequences have left, and others have their pages.
    jobs.extend(mixed_jobs());
    for (i, (mut prompt, settings)) in jobs.into_iter().enumerate() {
        prompt.iter_mut().for_each(|id| *id %= ids);
        let settings = GenerateSettings { end: settings.end.iter().map(|id| id % ids).collect(), ..settings };
        guests.push(writer.enter(job(&prompt[..2], &settings)).unwrap());
        writer.enter(job(&prompt, &settings)).unwrap();
        (0..3 + i % 4).for_each(|_| events.extend(writer.step().unwrap()));
        if i % 3 == 2 {
            guests.drain(..).for_each(|guest| writer.leave(guest));
        }
    }
    while !writer.is_idle() {
        events.extend(writer.step().unwrap());
    }
    parameters.device().stop_profile();
    (events, writer.recordings())
}

/// What a GPU plays is what it computes step by step, to the last bit: with any number of sequences, wherever their pages lie.
#[test]
fn recorded_steps_write_what_others_write() {
    let device = &crate::common::device(None, Some(2));
    let on_gpu = matches!(device, Device::Cuda(_));
    let opened = |dtype| move |name: &str| open_on(device, dtype, &directory("generation", name));
    let names = ["gpt2", "t5", "bart"];
    let long = serde_json::json!({ "model_type": "gpt2", "vocab_size": 60, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 400 });
    let lstm =
        serde_json::json!({ "model_type": "lstm-lm", "vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2 });
    let mut models: Vec<_> = names.map(opened(DType::F32)).into_iter().chain(names.map(opened(DType::Bf16))).collect();
    models.push(recurrent(device, ("lstm", "general", true, "output")));
    models.push(filled(device, lstm));
    for (i, model) in models.iter().enumerate() {
        let (expected, none) = events_of(model, false);
        let (found, some) = events_of(model, true);
        assert!(expected.len() > 200, "{}", expected.len());
        assert!(found == expected, "model {i}");
        // Recurrent ones find states on the host.
        assert!(none == 0 && (some > 3) == (on_gpu && i < 6), "model {i}: {some}");
    }
    // More pages than most sequences have.
    let (model, parameters) = filled(device, long);
    let written = |recorded: bool| {
        if !recorded {
            device.start_profile();
        }
        let settings = GenerateSettings { max_new_tokens: Some(60), ..GenerateSettings::default() };
        let mut writer = Writer::new(&model, &parameters, LIMITS).unwrap();
        let ticket = writer.enter(job(&[7, 3].repeat(120), &settings)).unwrap();
        let heard = run(&mut writer);
        device.stop_profile();
        (heard.of(ticket, 1), writer.recordings())
    };
    let (found, recordings) = written(true);
    assert_eq!(found, written(false).0);
    assert_eq!(recordings, if on_gpu { 2 } else { 0 });
}

/// Threads of a server share a GPU: what others ask of it while a step is recorded is not a part of the step, and is done.
#[test]
fn other_threads_compute_between_steps() {
    let device = &crate::common::device(None, Some(2));
    if let Device::Cpu(_) = device {
        return;
    }
    let model = open_on(device, DType::F32, &directory("generation", "gpt2"));
    let (ids, segments) = ((3..40).collect::<Vec<u32>>(), [0; 37]);
    let rows: Vec<u32> = (0..37).collect();
    let read = |at_once: bool| {
        let _turn = at_once.then(|| device.turn());
        let batch = Batch::new(device, model.0.config(), &[Sequence { ids: &ids, segments: &segments }], 0).unwrap();
        let rows = Tensor::from_slice(device, [37], &rows).unwrap();
        let mut tape = Tape::new();
        let mut pass = Pass::inference(&mut tape, &model.1);
        let logits = model.0.logits(&mut pass, &batch, Some(&rows)).unwrap();
        drop(pass);
        logits.tensor().to_f32().unwrap()
    };
    let (expected, (written, _)) = (read(true), events_of(&model, true));
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut passes = 0;
            while !done.load(Ordering::Relaxed) && passes < 2000 {
                assert!(read(passes % 2 == 0) == expected);
                passes += 1;
            }
            passes
        });
        let (found, recorded) = events_of(&model, true);
        done.store(true, Ordering::Relaxed);
        assert!(found == written && recorded > 3);
        assert!(reader.join().unwrap() > 4);
    });
}

/// The probabilities that tokens get one after the other are those of a whole pass over them.
#[test]
fn step_by_step_is_all_at_once() {
    for name in ["gpt2", "t5", "bart"] {
        let (model, parameters) = open("generation", name);
        let (prompt, device) = ((3..20).collect::<Vec<u32>>(), parameters.device());
        let settings = GenerateSettings { max_new_tokens: Some(40), ..sampled(1, |s| s.temperature = 1.5) };
        let mut writer = Writer::new(&model, &parameters, LIMITS).unwrap();
        let ticket = writer.enter(job(&prompt, &settings)).unwrap();
        let heard = run(&mut writer);
        let (written, tokens) = (&heard.finished[&(ticket, 0)], &heard.tokens[&(ticket, 0)]);
        assert_eq!(written.ids.len(), 40);
        let whole = |ids: &[u32]| -> Batch {
            let segments = vec![0; ids.len()];
            Batch::new(device, model.config(), &[Sequence { ids, segments: &segments }], 0).unwrap()
        };
        let (batch, first) = match model.config().targets() {
            Some(_) => {
                let segments = vec![0; prompt.len()];
                let source = [Sequence { ids: &prompt, segments: &segments }];
                (Batch::pairs(device, model.config(), &source, &[&written.ids], 0).unwrap(), 0)
            }
            None => (whole(&[&prompt[..], &written.ids[..39]].concat()), prompt.len() - 1),
        };
        let mut tape = Tape::new();
        let mut pass = Pass::inference(&mut tape, &parameters);
        let rows: Vec<u32> = (first as u32..first as u32 + 40).collect();
        let rows = Tensor::from_slice(device, [40], &rows).unwrap();
        let logits = model.logits(&mut pass, &batch, Some(&rows)).unwrap();
        let (columns, logits) = (logits.tensor().columns(), logits.tensor().to_f32().unwrap());
        let mut sum = 0.0;
        for (row, token) in logits.chunks(columns).zip(tokens) {
            let all: f64 = row[..64].iter().map(|x| f64::from(*x).exp()).sum();
            let expected = f64::from(row[token.id as usize]) - all.ln();
            assert!((f64::from(token.logprob) - expected).abs() < 1e-4, "{name}: {} {expected}", token.logprob);
            sum += expected;
        }
        assert!((f64::from(written.score) - sum / 40.0).abs() < 1e-4, "{name}");
    }
}

/// Prompts longer than what a step reads are read in parts, sources one after the other.
#[test]
fn little_room_gives_the_same() {
    if !crate::common::company_keeps_bits() {
        return;
    }
    for name in ["gpt2", "t5"] {
        let model = open("generation", name);
        let jobs = mixed_jobs();
        // Room for the largest job alone.
        let limits = WriterLimits { tokens: 7 * 32, source_tokens: 64, streams: 3, prefill: 1 };
        let mut writer = Writer::new(&model.0, &model.1, limits).unwrap();
        let tickets: Vec<_> =
            jobs.iter().map(|(prompt, settings)| writer.enter(job(prompt, settings)).unwrap()).collect();
        assert_eq!(writer.jobs(), (6, 0));
        let heard = run(&mut writer);
        for (ticket, (prompt, settings)) in tickets.into_iter().zip(&jobs) {
            assert_eq!(heard.of(ticket, settings.return_sequences), alone(&model, prompt, settings), "{name}");
        }
        assert_eq!(writer.free_pages(), (7, if name == "t5" { 2 } else { 0 }));
    }
}

/// Jobs that leave, wherever they are, free what they had; those that wait then enter.
#[test]
fn who_leaves_frees_its_pages() {
    for name in ["gpt2", "bart"] {
        let (model, parameters) = open("generation", name);
        let mut writer = Writer::new(&model, &parameters, WriterLimits { streams: 7, ..LIMITS }).unwrap();
        let free = writer.free_pages();
        let tickets: Vec<_> =
            mixed_jobs().iter().map(|(prompt, settings)| writer.enter(job(prompt, settings)).unwrap()).collect();
        writer.step().unwrap();
        let (waiting, running) = writer.jobs();
        assert!(waiting > 0 && running > 1, "{waiting} {running}");
        assert!(writer.free_pages().0 < free.0);
        writer.leave(tickets[5]);
        assert_eq!(writer.jobs(), (waiting - 1, running));
        (0..3).for_each(|_| drop(writer.step().unwrap()));
        for ticket in &tickets {
            writer.leave(*ticket);
        }
        assert!(writer.is_idle() && writer.free_pages() == free, "{name}: {:?}", writer.free_pages());
        assert_eq!(writer.step().unwrap(), []);
    }
}

/// What can never be written is refused when it enters, with the reason.
#[test]
fn limits() {
    let (model, parameters) = open("generation", "gpt2");
    let mut writer = Writer::new(&model, &parameters, LIMITS).unwrap();
    let plain = GenerateSettings::default;
    let nan = Sampling { temperature: f32::NAN, ..Sampling::default() };
    let zero = Sampling { temperature: 0.0, ..Sampling::default() };
    let cases: Vec<(usize, GenerateSettings, &str)> = vec![
        (0, plain(), "text 1 is empty"),
        (96, plain(), "text 1 has 96 tokens, and the model takes 96"),
        (3, GenerateSettings { sampling: Some(nan), ..plain() }, "temperature is NaN"),
        (3, GenerateSettings { sampling: Some(zero), ..plain() }, "temperature is 0"),
        (3, GenerateSettings { beams: 0, ..plain() }, "beams is 0"),
        (
            3,
            GenerateSettings { beams: 1 << 30, ..plain() },
            "beams is 1073741824, expected a whole number from 1 to 1024",
        ),
        (3, GenerateSettings { beams: 33, ..plain() }, "sequences at once: 33 are needed, and there is room for 32"),
        (3, GenerateSettings { beams: 2, return_sequences: 3, ..plain() }, "return_sequences is 3, expected at most"),
        (3, GenerateSettings { return_sequences: 2, ..plain() }, "return_sequences is 2, expected 1, or sampling"),
        (3, GenerateSettings { beams: 2, ..sampled(0, |_| ()) }, "sampling is some, expected none with beams"),
        (3, sampled(0, |s| s.top_p = 0.0), "top_p is 0"),
        (3, sampled(0, |s| s.min_p = 1.5), "min_p is 1.5"),
        (3, GenerateSettings { max_new_tokens: Some(0), ..plain() }, "max_new_tokens is 0"),
        (3, GenerateSettings { repetition_penalty: -1.0, ..plain() }, "repetition_penalty is -1"),
        (3, GenerateSettings { length_penalty: f32::INFINITY, ..plain() }, "length_penalty is inf"),
        (3, GenerateSettings { logit_bias: vec![(1, f32::NAN)], ..plain() }, "logit_bias is NaN"),
        (
            3,
            GenerateSettings { logit_bias: vec![(64, 1.0)], ..plain() },
            "token id 64 is not in the model's vocabulary",
        ),
        (3, GenerateSettings { stop: vec![String::new()], ..plain() }, "stop is \"\""),
    ];
    for (length, settings, expected) in cases {
        let error = writer.enter(job(&vec![1; length], &settings)).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}\n{expected}");
    }
    let few = WriterLimits { tokens: 32, ..LIMITS };
    let mut writer = Writer::new(&model, &parameters, few).unwrap();
    let error = writer.enter(job(&[1; 20], &plain())).unwrap_err().to_string();
    assert!(error.contains("tokens in the cache: 64 are needed, and there is room for 32"), "{error}");
    // As long as the model takes, and no longer.
    let long = GenerateSettings { max_new_tokens: Some(1000), ..plain() };
    let written = &alone(&open("generation", "gpt2"), &[1; 90], &long)[0];
    assert_eq!((written.ids.len(), written.why), (6, FinishReason::Length));

    let device = crate::common::device(None, Some(1));
    let config = ModelConfig::from_value(serde_json::json!({ "model_type": "bert", "hidden_size": 16,
        "max_position_embeddings": 16, "type_vocab_size": 2, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 32 }))
    .unwrap();
    let mut builder = Builder::new();
    let bert = Model::build(&mut builder, &config, Head::MaskedLm).unwrap();
    let parameters = builder.finish(&device, DType::F32).unwrap();
    let error = Writer::new(&bert, &parameters, LIMITS).unwrap_err().to_string();
    assert!(error.contains("it is a masked language model (BertForMaskedLM)"), "{error}");
}

/// Alternatives are the likeliest tokens; the chosen one of a greedy search is the first of them.
#[test]
fn alternatives_and_stop_checks() {
    let (model, parameters) = open("generation", "gpt2");
    let mut writer = Writer::new(&model, &parameters, LIMITS).unwrap();
    let settings = GenerateSettings { logprobs: Some(5), ..GenerateSettings::default() };
    let ticket = writer.enter(job(&[4, 5, 6], &settings)).unwrap();
    let heard = run(&mut writer);
    for token in &heard.tokens[&(ticket, 0)] {
        assert_eq!(token.alternatives.len(), 5);
        assert_eq!(token.alternatives[0], (token.id, token.logprob));
        assert!(token.alternatives.windows(2).all(|pair| pair[0].1 >= pair[1].1));
        let mass: f32 = token.alternatives.iter().map(|(_, logprob)| logprob.exp()).sum();
        assert!(mass > 0.05 && mass <= 1.0 + 1e-5);
    }
    let all = heard.finished[&(ticket, 0)].ids.clone();
    assert_eq!(all.len(), 20);
    for beams in [1, 3] {
        let settings = GenerateSettings { beams, ..GenerateSettings::default() };
        let stop: henson_infer::StopCheck<'_> = Box::new(|new| new.len() == 7);
        let ticket = writer.enter(Job { stop: Some(stop), ..job(&[4, 5, 6], &settings) }).unwrap();
        let written = run(&mut writer).of(ticket, 1).remove(0);
        assert_eq!((written.ids.len(), written.why), (7, FinishReason::Stop), "{beams}");
        if beams == 1 {
            assert_eq!(written.ids, all[..7]);
        }
    }
}

/// Weights that are not finite end their own sequence, with the reason.
#[test]
fn numbers_that_are_not_finite() {
    let (model, mut parameters) = open("generation", "gpt2");
    let table = parameters.entries().iter().position(|entry| entry.name.ends_with("wpe.weight")).unwrap();
    let mut numbers = parameters.read(table).unwrap();
    // The tenth position alone.
    numbers[9 * 16] = f32::NAN;
    parameters.write(table, &numbers).unwrap();
    parameters.refresh().unwrap();
    let model = (model, parameters);
    for beams in [1, 2] {
        let settings = GenerateSettings { beams, ..GenerateSettings::default() };
        let written = alone(&model, &[5; 6], &settings);
        assert_eq!(written[0].why, FinishReason::NotFinite);
        assert_eq!(written[0].ids.len(), if beams == 1 { 4 } else { 0 });
    }
}
