//! Training as a whole: real text, dropout on. bf16 follows f32, parts of a batch add up to it, threads change no bit,
//! and a step uses the memory of the one before.

use std::collections::HashMap;
use std::path::Path;

use henson_models::{Batch, Family, Head, Model, Sequence};
use henson_tensor::philox::Stream;
use henson_tensor::{Bits, Builder, DType, Device, Gradients, Parameters, Pass, Tape, Tensor, Training};
use henson_text::{Tokenizer, WordPieceOptions};
use henson_train::objective::{self, Masked, Scales};
use henson_train::{Engine, OptimizerSettings, Updater};

const LENGTH: usize = 64;

/// Sequences of real text as piece ids, without special tokens.
fn corpus() -> (usize, Vec<Vec<u32>>) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/text/novels.txt");
    let text = std::fs::read_to_string(path).unwrap().to_lowercase();
    let mut counts: HashMap<&str, usize> = HashMap::new();
    for word in text.split(|c: char| !c.is_alphabetic()).filter(|word| word.len() > 1) {
        *counts.entry(word).or_default() += 1;
    }
    let mut words: Vec<(&str, usize)> = counts.into_iter().collect();
    words.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(b.0)));
    let mut vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"].map(str::to_owned).to_vec();
    for c in (b'!'..=b'~').map(char::from).filter(|c| !c.is_ascii_uppercase()) {
        vocabulary.extend([c.to_string(), format!("##{c}")]);
    }
    vocabulary.extend(words.iter().take(1500).map(|(word, _)| word.to_string()));
    let tokenizer = Tokenizer::from_vocabulary(&vocabulary, &WordPieceOptions::default()).unwrap();
    let ids: Vec<u32> = text.lines().flat_map(|line| tokenizer.encode_ids(line).unwrap()).collect();
    (vocabulary.len(), ids.chunks_exact(LENGTH - 2).map(<[u32]>::to_vec).collect())
}

/// A step's sequences with 15% of their pieces hidden, and what was there.
struct Step {
    sequences: Vec<Vec<u32>>,
    /// (sequence, position, piece).
    hidden: Vec<(usize, usize, u32)>,
}

fn step_of(corpus: &[Vec<u32>], step: u64, batch: usize) -> Step {
    let mut draws = Stream::new(11, 1, step);
    let (mut sequences, mut hidden) = (Vec::new(), Vec::new());
    for b in 0..batch {
        let text = &corpus[draws.below(corpus.len() as u32) as usize];
        // Lengths differ, as they do in life.
        let length = text.len() - draws.below(20) as usize;
        let mut ids = vec![2];
        for (i, id) in text[..length].iter().enumerate() {
            let masked = draws.uniform() < 0.15 || i == 0;
            if masked {
                hidden.push((b, i + 1, *id));
            }
            ids.push(if masked { 4 } else { *id });
        }
        ids.push(3);
        sequences.push(ids);
    }
    Step { sequences, hidden }
}

struct Trainer {
    model: Model,
    parameters: Parameters,
    gradients: Gradients,
    updater: Updater,
    tape: Tape,
}

impl Trainer {
    fn new(device: &Device, dtype: DType, vocabulary: usize) -> Self {
        let mut config = Family::config_of_size("bert-tiny").unwrap();
        config.set_vocab_size(vocabulary);
        let mut builder = Builder::new();
        let model = Model::build(&mut builder, &config, Head::MaskedLm).unwrap();
        let mut parameters = builder.finish(device, dtype).unwrap();
        parameters.initialise(5).unwrap();
        let gradients = parameters.gradients().unwrap();
        let updater = Updater::new(OptimizerSettings::default(), &parameters).unwrap();
        Self { model, parameters, gradients, updater, tape: Tape::new() }
    }

    /// Adds the gradients of some of a step's sequences; gives their part of the loss.
    fn accumulate(&mut self, step: &Step, number: u32, part: std::ops::Range<usize>) -> f32 {
        let device = self.parameters.device();
        let segments = [0; LENGTH];
        let sequences: Vec<Sequence<'_>> =
            step.sequences[part.clone()].iter().map(|ids| Sequence { ids, segments: &segments[..ids.len()] }).collect();
        let batch = Batch::new(device, self.model.config(), &sequences, part.start as u32).unwrap();
        let inside: Vec<_> = step.hidden.iter().filter(|(b, ..)| part.contains(b)).collect();
        let offsets = batch.layout.offsets();
        let rows: Vec<u32> = inside.iter().map(|(b, i, _)| offsets[b - part.start] + *i as u32).collect();
        let targets: Vec<u32> = inside.iter().map(|(.., id)| *id).collect();
        let masked = Masked {
            rows: Tensor::from_slice(device, [rows.len()], &rows).unwrap(),
            targets: Tensor::from_slice(device, [rows.len()], &targets).unwrap(),
            weights: None,
        };
        let scales = Scales { masked: 1.0 / step.hidden.len() as f32, sequence: 0.0 };
        let training = Training { seed: 3, step: number };
        let mut pass = Pass::training(&mut self.tape, &self.parameters, training);
        let loss = objective::pre_training(&self.model, &mut pass, &batch, &masked, None, scales).unwrap();
        pass.backward(&mut self.gradients).unwrap();
        loss.masked.to_vec::<f32>().unwrap()[0]
    }

    fn update(&mut self, learning_rate: f64) {
        self.updater.step(&mut self.parameters, &self.gradients, learning_rate).unwrap();
        self.gradients.zero();
    }

    fn all(&self, what: impl Fn(usize) -> Vec<f32>) -> Vec<f32> {
        (0..self.parameters.entries().len()).flat_map(what).collect()
    }

    fn weights(&self) -> Vec<f32> {
        self.all(|i| self.parameters.read(i).unwrap())
    }

    fn all_gradients(&self) -> Vec<f32> {
        self.all(|i| self.gradients.read(&self.parameters, i).unwrap())
    }
}

fn device(threads: usize) -> Device {
    Device::cpu(None, Some(threads)).unwrap()
}

#[test]
fn bf16_follows_f32_for_200_steps() {
    let (vocabulary, corpus) = corpus();
    let run = |dtype| -> Vec<f32> {
        let mut trainer = Trainer::new(&device(2), dtype, vocabulary);
        (0..200)
            .map(|i| {
                let step = step_of(&corpus, i, 16);
                let loss = trainer.accumulate(&step, i as u32, 0..16);
                trainer.update(1e-3 * (i as f64 / 20.0).min(1.0));
                loss
            })
            .collect()
    };
    let (single, half) = (run(DType::F32), run(DType::Bf16));
    let mean = |losses: &[f32]| losses.iter().sum::<f32>() / losses.len() as f32;
    for (i, (a, b)) in single.chunks(20).zip(half.chunks(20)).enumerate() {
        let difference = (mean(b) / mean(a) - 1.0).abs();
        assert!(difference < 0.01, "steps {}…: f32 {}, bf16 {}", i * 20, mean(a), mean(b));
    }
    assert!(mean(&single[180..]) < 0.85 * mean(&single[..20]), "it learns: {single:?}");
}

#[test]
fn parts_of_a_batch_add_up_to_it() {
    let (vocabulary, corpus) = corpus();
    let step = step_of(&corpus, 0, 8);
    let mut whole = Trainer::new(&device(2), DType::F32, vocabulary);
    let loss = whole.accumulate(&step, 0, 0..8);
    let mut parts = Trainer::new(&device(2), DType::F32, vocabulary);
    let sum: f32 = [0..2, 2..3, 3..8].map(|part| parts.accumulate(&step, 0, part)).iter().sum();
    assert!((loss - sum).abs() < 1e-5, "{loss} and {sum}");
    let (a, b) = (whole.all_gradients(), parts.all_gradients());
    let scale = a.iter().fold(0.0, |m: f32, x| m.max(x.abs()));
    let worst = a.iter().zip(&b).fold(0.0, |m: f32, (a, b)| m.max((a - b).abs()));
    assert!(worst < 1e-5 * scale.max(1e-3), "gradients differ by {worst} of {scale}");
}

#[test]
fn threads_change_no_bit_and_steps_and_seeds_do() {
    let (vocabulary, corpus) = corpus();
    let run = |threads| {
        let mut trainer = Trainer::new(&device(threads), DType::Bf16, vocabulary);
        for i in 0..3 {
            trainer.accumulate(&step_of(&corpus, i, 4), i as u32, 0..4);
            trainer.update(1e-3);
        }
        trainer.weights()
    };
    let one = run(1);
    assert!(one == run(2) && one == run(3), "weights differ by the number of threads");

    let step = step_of(&corpus, 0, 4);
    let mut trainer = Trainer::new(&device(1), DType::F32, vocabulary);
    let (first, again, later) =
        (trainer.accumulate(&step, 0, 0..4), trainer.accumulate(&step, 0, 0..4), trainer.accumulate(&step, 1, 0..4));
    assert_eq!(first, again, "dropout is a function of seed and step");
    assert_ne!(first, later, "another step drops other elements");
}

#[test]
fn inference_is_without_dropout() {
    let (vocabulary, corpus) = corpus();
    let trainer = Trainer::new(&device(1), DType::F32, vocabulary);
    let step = step_of(&corpus, 0, 2);
    let segments = [0; LENGTH];
    let sequences: Vec<Sequence<'_>> =
        step.sequences.iter().map(|ids| Sequence { ids, segments: &segments[..ids.len()] }).collect();
    let batch = Batch::new(trainer.parameters.device(), trainer.model.config(), &sequences, 0).unwrap();
    let mut tape = Tape::new();
    let mut hidden = |training: Option<u32>| {
        let mut pass = match training {
            Some(step) => Pass::training(&mut tape, &trainer.parameters, Training { seed: 1, step }),
            None => Pass::inference(&mut tape, &trainer.parameters),
        };
        trainer.model.encode(&mut pass, &batch, Default::default()).unwrap().last.tensor().to_f32().unwrap()
    };
    assert_eq!(hidden(None), hidden(None));
    assert_ne!(hidden(None), hidden(Some(0)));
    let passes = 300;
    let mut mean = vec![0.0; hidden(None).len()];
    for step in 0..passes {
        hidden(Some(step)).iter().zip(&mut mean).for_each(|(x, m)| *m += x / passes as f32);
    }
    // Kept elements are scaled up: over many draws the mean comes close to the pass without dropout.
    let (plain, mut off) = (hidden(None), 0.0);
    for (m, p) in mean.iter().zip(&plain) {
        off += (m - p).abs() / plain.len() as f32;
    }
    assert!(off < 0.12, "mean distance {off}");
}

#[test]
fn memory_stays_the_same_from_step_to_step() {
    let (vocabulary, corpus) = corpus();
    let device = device(2);
    let mut trainer = Trainer::new(&device, DType::F32, vocabulary);
    let mut held = Vec::new();
    for i in 0..12 {
        trainer.accumulate(&step_of(&corpus, i, 8), i as u32, 0..8);
        trainer.update(1e-3);
        held.push(device.held());
    }
    // Lengths vary a little, so the first steps may ask for more; then it must end.
    assert!(held[11] <= held[5] + held[5] / 20, "memory grows: {held:?}");
}

#[test]
fn what_gets_no_gradient_in_a_step_has_none_left_from_the_last() {
    let device = device(2);
    let mut config = Family::config_of_size("bert-tiny").unwrap();
    config.set_vocab_size(100);
    let mut builder = Builder::new();
    let model = Model::build(&mut builder, &config, Head::PreTraining).unwrap();
    let mut parameters = builder.finish(&device, DType::F32).unwrap();
    parameters.initialise(1).unwrap();
    let mut gradients = parameters.gradients().unwrap();
    let (ids, segments) = ([2, 50, 4, 3], [0; 4]);
    let batch = Batch::new(&device, &config, &[Sequence { ids: &ids, segments: &segments }], 0).unwrap();
    let one = |x: u32| Tensor::from_slice(&device, [1], &[x]).unwrap();
    let masked = Masked { rows: one(2), targets: one(60), weights: None };
    let mut tape = Tape::new();
    let mut pooler_gradient = |labels: Option<&Tensor>| {
        gradients.zero();
        let mut pass = Pass::training(&mut tape, &parameters, Training { seed: 1, step: 1 });
        let scales = Scales { masked: 1.0, sequence: 1.0 };
        objective::pre_training(&model, &mut pass, &batch, &masked, labels, scales).unwrap();
        pass.backward(&mut gradients).unwrap();
        let entry = parameters.entries().iter().position(|e| e.name == "bert.pooler.dense.weight").unwrap();
        gradients.read(&parameters, entry).unwrap().iter().map(|x| x.abs()).sum::<f32>()
    };
    assert!(pooler_gradient(Some(&one(1))) > 0.0);
    assert_eq!(pooler_gradient(None), 0.0);
}

/// A number that inputs carry, and that a recorded pass would not see: where it changes under the same key, it is noticed on
/// the CPU, too.
#[test]
fn what_a_pass_reads_from_the_host_is_in_its_key() {
    let learn = |engine: &mut Engine, key: Bits, scale: f32| {
        engine.gradients.zero();
        let reading = engine.learn(
            0,
            key,
            |device, config| {
                let sequence = Sequence { ids: &[2, 7, 3], segments: &[0; 3] };
                let label = Tensor::from_slice(device, [1], &[1_u32])?;
                Ok((Batch::new(device, config, &[sequence], 0)?, label, scale))
            },
            |_, model, pass, (batch, label, scale)| {
                let logits = model.logits(pass, batch, None)?;
                Ok(vec![pass.cross_entropy(logits, 2, label, None, *scale)?.0])
            },
        );
        reading.unwrap().wait().unwrap()[0]
    };
    let mut config = Family::config_of_size("bert-tiny").unwrap();
    config.set_vocab_size(10);
    let mut builder = Builder::new();
    let model = Model::build(&mut builder, &config, Head::Sequence { labels: 2 }).unwrap();
    let parameters = builder.finish(&device(1), DType::F32).unwrap();
    let mut engine = Engine::new(model, parameters, OptimizerSettings::default(), 0).unwrap();
    for scale in [1.0, 0.5, 1.0] {
        let loss = learn(&mut engine, scale.into(), scale);
        assert!((loss - f64::from(scale) * 2.0_f64.ln()).abs() < 1e-6, "{loss}");
    }
    let forgotten = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| learn(&mut engine, 1.0.into(), 0.5)));
    assert!(forgotten.is_err());
}

/// Recurrent language models on running text against PyTorch (tools/golden/running_text.py): losses of steps across the border of an
/// epoch, with states that go on from step to step, and all parameters after them.
mod running_text {
    use std::path::Path;

    use henson_data::{Corpus, Vocabulary, WordMarks};
    use henson_tensor::{Device, Parameters};
    use henson_text::{Tokenizer, WordPieceOptions};
    use henson_train::{Engine, Plan, Recipe, Task};
    use serde_json::Value;

    /// f32 against f64: of losses, and of sums over parameters after eight updates.
    const TOLERANCE: f64 = 2e-5;

    fn golden() -> Value {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/running-text/golden.json");
        serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
    }

    fn documents(golden: &Value, ids: impl Fn(u8) -> u32) -> Vec<Vec<Vec<u32>>> {
        let sentence = |text: &Value| text.as_str().unwrap().bytes().map(&ids).collect();
        let document = |document: &Value| document.as_array().unwrap().iter().map(sentence).collect();
        golden["text"].as_array().unwrap().iter().map(document).collect()
    }

    fn corpus(size: u32, cls: u32, sep: u32, documents: &[Vec<Vec<u32>>]) -> Corpus {
        let words = WordMarks::Begin(vec![true; size as usize]);
        let special = vec![cls.min(sep), cls.max(sep)];
        let vocabulary = Vocabulary { size, cls, sep, mask: None, special, words, sentinels: Vec::new() };
        Corpus::from_documents(vocabulary, documents)
    }

    fn fill(parameters: &mut Parameters) {
        let mut names: Vec<String> = parameters.entries().iter().map(|entry| entry.name.clone()).collect();
        names.sort();
        for i in 0..parameters.entries().len() {
            let entry = parameters.entries()[i].clone();
            let k = names.iter().position(|name| *name == entry.name).unwrap() as f64;
            let values = (0..entry.shape.elements()).map(|j| (0.4 * (0.7 * j as f64 + 1.3 * k).sin()) as f32);
            parameters.write(i, &values.collect::<Vec<f32>>()).unwrap();
        }
        parameters.refresh().unwrap();
    }

    /// Takes all steps, and compares their losses and what becomes of the parameters.
    fn check(plan: &Plan, golden: &Value, losses: &[&str]) {
        let device = Device::cpu(None, Some(2)).unwrap();
        let mut engine: Engine = plan.engine(&device).unwrap();
        fill(&mut engine.parameters);
        let mut task = plan.task(&Value::Null, 1).unwrap();
        for (step, expected) in golden["losses"].as_array().unwrap().iter().enumerate() {
            engine.gradients.zero();
            let found = task.step(&mut engine, step as u64).unwrap().wait().unwrap();
            let rate = task.rate(step as u64).0;
            let norm = engine.updater.step(&mut engine.parameters, &engine.gradients, rate).unwrap().wait().unwrap()[0];
            let expected: Vec<f64> = match expected {
                Value::Array(both) => both.iter().map(|loss| loss.as_f64().unwrap()).collect(),
                one => vec![one.as_f64().unwrap()],
            };
            let named = found.named(1.0);
            assert_eq!(named.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), losses);
            for ((name, got), expected) in named.iter().zip(&expected) {
                assert!((got - expected).abs() < TOLERANCE, "step {step}, {name}: {got}, PyTorch has {expected}");
            }
            assert!((found.total - expected.iter().sum::<f64>() / expected.len() as f64).abs() < TOLERANCE);
            let expected = golden["norms"][step].as_f64().unwrap();
            assert!((norm - expected).abs() < TOLERANCE * 10.0, "step {step}: norm {norm}, PyTorch has {expected}");
        }
        let known = golden["parameters"].as_object().unwrap();
        assert_eq!(known.len(), engine.parameters.entries().len());
        for (i, entry) in engine.parameters.entries().iter().enumerate() {
            let numbers = engine.parameters.read(i).unwrap();
            let sum = numbers.iter().zip(0..).map(|(p, j)| f64::from(*p) * f64::from(j + 1).sin()).sum::<f64>();
            let expected = known[&entry.name].as_f64().unwrap();
            assert!((sum - expected).abs() < 10.0 * TOLERANCE, "{}: {sum}, PyTorch has {expected}", entry.name);
        }
    }

    fn recipe(text: &str) -> Recipe {
        let common = "steps = 8\nbatch_size = 2\npacking = \"stream\"\nweight_decay = 0.0\nwarmup_steps = 0\n\
                      schedule = \"constant\"\neval_every = 0\n";
        Recipe::parse(&format!("{common}{text}"), "test", &[]).unwrap()
    }

    #[test]
    fn an_lstm_carries_its_states() {
        let golden = golden();
        let texts = documents(&golden, |byte| 1 + u32::from(byte) % 30);
        let vocabulary: Vec<String> = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
            .map(str::to_owned)
            .into_iter()
            .chain((0..26).map(|i| format!("w{i}")))
            .collect();
        let tokenizer = Tokenizer::from_vocabulary(&vocabulary, &WordPieceOptions::default()).unwrap();
        let recipe = recipe(
            "model = \"lstm-small\"\nobjective = \"causal\"\nsequence_length = 16\noptimizer = \"sgd\"\n\
             learning_rate = 0.5\nclip = 5.0\nconfig.hidden_size = 6",
        );
        let plan = Plan::on(corpus(31, 2, 0, &texts), corpus(31, 2, 0, &[]), tokenizer, recipe, 1).unwrap();
        check(&plan, &golden["tokens"], &["lm_loss"]);
    }

    #[test]
    fn elmo_predicts_words_from_both_sides() {
        let golden = golden();
        let texts = documents(&golden, u32::from);
        let recipe = recipe(
            "model = \"elmo-tiny\"\nobjective = \"bidirectional\"\nsequence_length = 4\noptimizer = \"adagrad\"\n\
             learning_rate = 0.2\nclip = 0.7\ndropout = 0.0\n[config]\nn_tokens_vocab = 9\n\
             char_cnn = { activation = \"relu\", embedding = { dim = 4 }, filters = [[1, 3], [2, 4], [3, 5]], \
             max_characters_per_token = 12, n_characters = 261, n_highway = 1 }\n\
             lstm = { cell_clip = 0.3, dim = 5, n_layers = 2, proj_clip = 0.2, projection_dim = 6, use_skip_connections = true }",
        );
        let bytes = Tokenizer::of_bytes().unwrap();
        let plan = Plan::on(corpus(258, 256, 257, &texts), corpus(258, 256, 257, &[]), bytes, recipe, 1).unwrap();
        let files = plan.model_files().unwrap().files;
        let words = files.iter().find(|(name, _)| name == "words.txt").map(|(_, bytes)| bytes.clone()).unwrap();
        let expected: Vec<&str> =
            golden["words"]["words"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
        assert_eq!(String::from_utf8(words).unwrap().lines().collect::<Vec<_>>(), expected);
        check(&plan, &golden["words"], &["forward_loss", "backward_loss"]);
    }
}
