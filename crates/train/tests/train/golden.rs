//! A 2-layer BERT with every head against `transformers`: hidden states, attention maps, logits, loss, all gradients,
//! and ten steps of AdamW, on every kernel set of the machine and, with HENSON_TEST_CUDA set, on its GPU. `tools/golden` tells how the values were made.

use std::path::{Path, PathBuf};

use henson_checkpoint::{Config, LoadOptions, Weights, load};
use henson_data::Part;
use henson_models::{Batch, Capture, Head, Memory, Model, ModelConfig, Permutation, Sequence};
use henson_tensor::cuda::CudaOptions;
use henson_tensor::{Bits, Builder, DType, Device, Gradients, Isa, Parameters, Pass, Tape, Tensor, Training, Var};
use henson_train::objective::{self, AnswerWindow, BeamTargets, Masked, Scales, Targets};
use henson_train::replaced::{PerPrediction, ReplacedTokens};
use henson_train::{Engine, OptimizerSettings, Updater};
use safetensors::SafeTensors;

/// f32 against f32: both sides are within 2·10⁻⁶ of the values in f64 (golden files say so), the rest is slack for
/// other kernel sets.
const TOLERANCE: f64 = 2e-5;
/// A gradient that is zero in theory holds noise of both sides.
const GRADIENT_FLOOR: f64 = 1e-2;
/// How much the language model's loss counts next to that of choices.
const LM_SHARE: f32 = 0.5;
/// What the project promises for losses along ten steps.
const STEPS_TOLERANCE: f64 = 1e-4;

struct Golden {
    directory: PathBuf,
    bytes: Vec<u8>,
}

impl Golden {
    fn open(head: &str) -> Self {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data").join(head);
        let bytes = std::fs::read(directory.join("golden.safetensors")).unwrap();
        Self { directory, bytes }
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        floats(&self.bytes, name)
    }

    fn integers(&self, name: &str) -> Vec<i64> {
        let file = SafeTensors::deserialize(&self.bytes).unwrap();
        let data = file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
        data.data().chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap())).collect()
    }

    fn ids(&self, name: &str) -> Vec<u32> {
        self.integers(name).into_iter().map(|i| u32::try_from(i).unwrap()).collect()
    }
}

fn floats(bytes: &[u8], name: &str) -> Vec<f32> {
    let file = SafeTensors::deserialize(bytes).unwrap();
    let data = file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
    data.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

/// Every kernel set of the processor; with HENSON_TEST_CUDA set, the GPU too.
fn devices() -> Vec<Device> {
    let mut all: Vec<Device> =
        Isa::available().into_iter().map(|isa| Device::cpu(Some(isa), Some(2)).unwrap()).collect();
    if std::env::var_os("HENSON_TEST_CUDA").is_some() {
        all.push(Device::cuda(&CudaOptions::default()).unwrap());
    }
    all
}

/// Those that have all operations of a head: answers whose ends depend on their starts put columns side by side, which GPUs do not yet.
fn devices_for(name: &str) -> Vec<Device> {
    let on_cpu = |device: &Device| device.isa().is_some();
    devices().into_iter().filter(|device| on_cpu(device) || !name.ends_with("/beams")).collect()
}

/// A model with the golden weights.
struct Setup {
    golden: Golden,
    model: Model,
    parameters: Parameters,
    batch: Batch,
}

fn setup(device: &Device, name: &str, dtype: DType) -> Setup {
    let golden = Golden::open(name);
    let text = std::fs::read_to_string(golden.directory.join("config.json")).unwrap();
    let mut config = Config::from_json(&text).unwrap();
    config.model.set_dropout(0.0);
    let head = config.head().unwrap();
    let mut builder = Builder::new();
    let model = Model::build(&mut builder, &config.model, head).unwrap();
    let mut parameters = builder.finish(device, dtype).unwrap();
    let weights = Weights::open(&golden.directory).unwrap();
    let report = load(&weights, &config.model.family().naming, &mut parameters, &LoadOptions::strict()).unwrap();
    // Marian's bare class alone writes its sines and cosines.
    assert!(report.unused.is_empty() && report.ignored.len() <= 2, "{name}: {report:?}");
    let (ids, segments) = (golden.ids("input.ids"), golden.ids("input.segments"));
    let ranges = |name: &str| -> Vec<std::ops::Range<usize>> {
        golden.ids(name).windows(2).map(|w| w[0] as usize..w[1] as usize).collect()
    };
    let sequence = |range: std::ops::Range<usize>| Sequence { ids: &ids[range.clone()], segments: &segments[range] };
    let sequences: Vec<Sequence<'_>> = ranges("input.offsets").into_iter().map(sequence).collect();
    let batch = if head == Head::Seq2Seq {
        let ids = golden.ids("input.target_ids");
        let targets: Vec<&[u32]> = ranges("input.target_offsets").into_iter().map(|range| &ids[range]).collect();
        Batch::pairs(device, &config.model, &sequences, &targets, 0).unwrap()
    } else if name.ends_with("permutation") {
        batch_in_order(device, &golden, &config.model, &sequences)
    } else {
        Batch::new(device, &config.model, &sequences, 0).unwrap()
    };
    Setup { golden, model, parameters, batch }
}

/// The rows whose vocabulary's logits are in the file, and the ids that are right there.
fn predicted(setup: &Setup) -> Option<(Vec<u32>, Vec<u32>)> {
    let golden = &setup.golden;
    match setup.model.head() {
        // The batch knows the rows of its second stream.
        Head::MaskedLm if setup.batch.predicted().is_some() => Some((Vec::new(), golden.ids("input.labels"))),
        Head::PreTraining | Head::MaskedLm => Some((golden.ids("input.rows"), golden.ids("input.targets"))),
        Head::Seq2Seq => {
            let targets = golden.ids("input.target_ids");
            Some(((0..targets.len() as u32).collect(), targets))
        }
        // Of models that write, the language model is trained along with the head for choices.
        Head::Choice if setup.model.decoder().is_some() => {
            Some((golden.ids("input.rows"), golden.ids("input.targets")))
        }
        _ => None,
    }
}

fn error(got: &[f32], expected: &[f32], floor: f64) -> f64 {
    assert_eq!(got.len(), expected.len());
    let scale = expected.iter().fold(floor, |m, e| m.max(f64::from(e.abs())));
    let worst = got.iter().zip(expected).fold(0.0, |m: f64, (g, e)| {
        let d = (f64::from(*g) - f64::from(*e)).abs();
        if d.is_nan() { f64::INFINITY } else { m.max(d) }
    });
    worst / scale
}

#[track_caller]
fn assert_close(what: &str, got: &[f32], expected: &[f32]) {
    let error = error(got, expected, 1e-3);
    assert!(error <= TOLERANCE, "{what}: error {error:e}");
}

/// The loss of a head, recorded for the backward pass; as one number.
fn loss(setup: &Setup, pass: &mut Pass<'_>) -> f32 {
    let Setup { golden, model, batch, .. } = setup;
    let device = pass.device();
    let tensor = |numbers: &[u32]| Tensor::from_slice(device, [numbers.len()], numbers).unwrap();
    let value = |loss: Tensor| loss.to_vec::<f32>().unwrap()[0];
    let of_targets = |pass: &mut Pass<'_>, targets: Targets, scale: f32| {
        let logits = model.logits(pass, batch, None).unwrap();
        value(targets.loss(pass, logits, &batch.layout, scale).unwrap())
    };
    let sequences = batch.layout.sequences() as f32;
    match model.head() {
        Head::MaskedLm if batch.predicted().is_some() => {
            let (rows, targets) = (batch.predicted().unwrap().clone(), golden.ids("input.labels"));
            let scale = 1.0 / targets.len() as f32;
            let masked = Masked { rows, targets: tensor(&targets), weights: None };
            let scales = Scales { masked: scale, sequence: 0.0 };
            value(objective::pre_training(model, pass, batch, &masked, None, scales).unwrap().masked)
        }
        Head::PreTraining | Head::MaskedLm | Head::Seq2Seq => {
            let (rows, targets) = predicted(setup).unwrap();
            let masked = Masked { rows: tensor(&rows), targets: tensor(&targets), weights: None };
            let labels = (model.head() == Head::PreTraining).then(|| tensor(&golden.ids("input.nsp")));
            let scales = Scales { masked: 1.0 / rows.len() as f32, sequence: 1.0 / sequences };
            let loss = objective::pre_training(model, pass, batch, &masked, labels.as_ref(), scales).unwrap();
            value(loss.masked) + loss.next_sentence.map_or(0.0, value)
        }
        Head::Sequence { labels } => {
            let text = std::fs::read_to_string(golden.directory.join("config.json")).unwrap();
            let (labels, scale) = if text.contains("regression") {
                let numbers = golden.floats("input.labels");
                (Targets::Numbers(Tensor::from_slice(device, [numbers.len()], &numbers).unwrap()), 1.0 / sequences)
            } else if text.contains("multi_label") {
                let numbers = golden.floats("input.labels");
                let targets = Tensor::from_slice(device, [numbers.len()], &numbers).unwrap();
                (Targets::Several(targets, None), 1.0 / (sequences * labels as f32))
            } else {
                (Targets::Classes(tensor(&golden.ids("input.labels")), None), 1.0 / sequences)
            };
            of_targets(pass, labels, scale)
        }
        Head::Token { .. } => {
            let labels = golden.integers("input.labels");
            let weights: Vec<f32> = labels.iter().map(|l| if *l < 0 { 0.0 } else { 1.0 }).collect();
            let classes: Vec<u32> = labels.iter().map(|l| u32::try_from(*l).unwrap_or(0)).collect();
            let weights_tensor = Tensor::from_slice(device, [weights.len()], &weights).unwrap();
            let scale = 1.0 / weights.iter().sum::<f32>();
            of_targets(pass, Targets::Classes(tensor(&classes), Some(weights_tensor)), scale)
        }
        Head::ReplacedTokens => {
            let labels = golden.floats("input.labels");
            let targets = Tensor::from_slice(device, [labels.len()], &labels).unwrap();
            let scale = 1.0 / labels.len() as f32;
            of_targets(pass, Targets::Several(targets, None), scale)
        }
        Head::Span => {
            // transformers clamps negative positions to 0 and leaves out those beyond the end.
            let (starts, ends) = (golden.integers("input.start"), golden.integers("input.end"));
            let lengths: Vec<i64> = batch.layout.offsets().windows(2).map(|w| i64::from(w[1] - w[0])).collect();
            let longest = *lengths.iter().max().unwrap();
            let inside = |p: &[i64]| p.iter().filter(|p| **p < longest).count() as f32;
            let share = [0.5 / inside(&starts), 0.5 / inside(&ends)];
            let (mut targets, mut weights) = (vec![], vec![]);
            for (start, end) in starts.iter().zip(&ends) {
                let both = [*start, *end];
                targets.push(both.map(|p| if p < longest { p.max(0) as u32 } else { 0 }));
                weights.push([0, 1].map(|i| if both[i] < longest { share[i] } else { 0.0 }));
            }
            let shape = [targets.len(), 2];
            let targets = Tensor::from_slice::<u32>(device, shape, targets.as_flattened()).unwrap();
            let weights = Tensor::from_slice::<f32>(device, shape, weights.as_flattened()).unwrap();
            of_targets(pass, Targets::Spans(targets, weights), 1.0)
        }
        Head::BeamSpan => {
            let targets = BeamTargets::new(device, &batch.layout, &answer_windows(setup), 0.5 / sequences).unwrap();
            let last = model.encode(pass, batch, Capture::default()).unwrap().last;
            targets.losses(model, pass, &last).unwrap().map(value).iter().sum()
        }
        Head::SpanBoundary => unreachable!("not among these files"),
        Head::Choice => {
            let labels = golden.ids("input.labels");
            let (targets, scale) = (Targets::Classes(tensor(&labels), None), 1.0 / labels.len() as f32);
            let Some((rows, next)) = predicted(setup) else { return of_targets(pass, targets, scale) };
            let last = model.encode(pass, batch, Capture::default()).unwrap().last;
            let logits = model.logits_of(pass, last.clone(), &batch.layout, None).unwrap();
            let choices = value(targets.loss(pass, logits, &batch.layout, scale).unwrap());
            let logits = model.logits_of(pass, last, &batch.layout, Some(&tensor(&rows))).unwrap();
            let (vocabulary, scale) = (model.config().sizes().vocab_size, LM_SHARE / rows.len() as f32);
            choices + value(pass.cross_entropy(logits, vocabulary, &tensor(&next), None, scale).unwrap().0)
        }
        Head::Encoder | Head::Pooler => {
            // The golden file's loss: mean(last²) + mean(pooled), seeded by hand.
            let last = model.encode(pass, batch, Capture::default()).unwrap().last;
            let x = last.tensor().to_f32().unwrap();
            let gradient: Vec<f32> = x.iter().map(|v| 2.0 * v / x.len() as f32).collect();
            if model.head() == Head::Encoder {
                pass.seed_gradient(&last, &gradient).unwrap();
                return x.iter().map(|v| v * v).sum::<f32>() / x.len() as f32;
            }
            let pooled = model.pooled(pass, &last, &batch.layout).unwrap();
            let p = pooled.tensor().to_f32().unwrap();
            pass.seed_gradient(&last, &gradient).unwrap();
            pass.seed_gradient(&pooled, &vec![1.0 / p.len() as f32; p.len()]).unwrap();
            x.iter().map(|v| v * v).sum::<f32>() / x.len() as f32 + p.iter().sum::<f32>() / p.len() as f32
        }
    }
}

/// Without dropout the step and seed change nothing.
const TRAINING: Training = Training { seed: 1, step: 1 };

fn check_forward(setup: &Setup, what: &str) {
    let Setup { golden, model, parameters, batch } = setup;
    let mut tape = Tape::new();
    let mut pass = Pass::inference(&mut tape, parameters);
    let capture = Capture { hidden_states: true, attention_maps: true };
    let encoded = model.encode(&mut pass, batch, capture).unwrap();
    let two_streams = batch.predicted();
    for (i, hidden) in encoded.hidden_states.iter().enumerate().filter(|_| two_streams.is_none()) {
        assert_close(
            &format!("{what}: hidden {i}"),
            &hidden.tensor().to_f32().unwrap(),
            &golden.floats(&format!("output.hidden.{i}")),
        );
    }
    let last = &encoded.last;
    let logits = |pass: &mut Pass<'_>, rows: Option<&Tensor>| {
        model.logits_of(pass, last.clone(), batch.output_layout(), rows).unwrap().tensor().to_f32().unwrap()
    };
    if let Some((rows, _)) = predicted(setup) {
        let own = || Tensor::from_slice(pass.device(), [rows.len()], &rows).unwrap();
        let rows = two_streams.cloned().unwrap_or_else(own);
        let logits = logits(&mut pass, Some(&rows));
        let vocabulary = model.config().sizes().vocab_size;
        let padded = vocabulary.next_multiple_of(64);
        let found: Vec<f32> = logits.chunks(padded).flat_map(|row| row[..vocabulary].to_vec()).collect();
        let name = if model.head() == Head::Choice { "output.vocabulary_logits" } else { "output.logits" };
        assert_close(&format!("{what}: {name}"), &found, &golden.floats(name));
    }
    if model.head() == Head::BeamSpan {
        check_beam_logits(setup, &mut pass, last, what);
    } else if !matches!(model.head(), Head::PreTraining | Head::MaskedLm | Head::Seq2Seq | Head::Encoder | Head::Pooler)
    {
        let expected = golden.floats("output.logits");
        assert_close(&format!("{what}: logits"), &logits(&mut pass, None), &expected);
        // In inference, a head that reads one token makes the last layer compute no other.
        let direct = model.logits(&mut pass, batch, None).unwrap().tensor().to_f32().unwrap();
        assert_close(&format!("{what}: logits, directly"), &direct, &expected);
    }
    if model.head() == Head::PreTraining {
        let nsp = logits(&mut pass, None);
        assert_close(&format!("{what}: nsp"), &nsp, &golden.floats("output.nsp_logits"));
    }
    if model.head() == Head::Pooler {
        let pooled = model.pooled(&mut pass, last, &batch.layout).unwrap();
        assert_close(&format!("{what}: pooled"), &pooled.tensor().to_f32().unwrap(), &golden.floats("output.pooled"));
    }
    if matches!(model.head(), Head::Pooler | Head::Encoder) {
        for (layer, maps) in encoded.attention_maps.iter().enumerate() {
            let expected: Vec<f32> = (0..batch.layout.sequences())
                .flat_map(|i| golden.floats(&format!("output.attention.{layer}.{i}")))
                .collect();
            assert_close(&format!("{what}: attention {layer}"), &maps.to_f32().unwrap(), &expected);
        }
    }
}

/// What each sequence shows of a passage, and the answer.
fn answer_windows(setup: &Setup) -> Vec<AnswerWindow> {
    let ids = |name: &str| -> Vec<usize> { setup.golden.ids(name).into_iter().map(|id| id as usize).collect() };
    let (shown, starts, ends) = (ids("input.shown"), ids("input.start"), ids("input.end"));
    let lengths = setup.batch.layout.offsets().windows(2).map(|w| (w[1] - w[0]) as usize);
    let window = |(i, length)| AnswerWindow {
        shown: shown[2 * i]..shown[2 * i + 1],
        null: length - 1,
        answer: [starts[i], ends[i]],
    };
    lengths.enumerate().map(window).collect()
}

/// Starts, ends given the right start, and whether there is an answer given that. What is found without it is tested where beams are
/// searched.
fn check_beam_logits(setup: &Setup, pass: &mut Pass<'_>, last: &Var, what: &str) {
    let (head, golden) = (setup.model.beams().unwrap(), &setup.golden);
    let (mut rows, mut ends, mut answers) = (Vec::new(), Vec::new(), Vec::new());
    for (window, first) in answer_windows(setup).iter().zip(setup.batch.layout.offsets()) {
        let row = |place: usize| first + place as u32;
        for place in window.shown.clone().chain([window.null]) {
            rows.push(row(place));
            ends.extend([row(place), row(window.answer[0])]);
        }
        answers.extend([row(window.answer[0]), row(window.null)]);
    }
    let tensor = |rows: &[u32], pass: &Pass<'_>| Tensor::from_slice(pass.device(), [rows.len()], rows).unwrap();
    let (rows, ends, answers) = (tensor(&rows, pass), tensor(&ends, pass), tensor(&answers, pass));
    let found = [
        ("start_logits", head.start_logits(pass, last, &rows)),
        ("end_logits", head.end_logits(pass, last, &ends)),
        ("no_answer_logits", head.no_answer_logits(pass, last, &answers)),
    ];
    for (name, logits) in found {
        let got = logits.unwrap().tensor().to_f32().unwrap();
        assert_close(&format!("{what}: {name}"), &got, &golden.floats(&format!("output.{name}")));
    }
}

fn check_gradients(setup: &Setup, gradients: &Gradients, what: &str) {
    for (i, entry) in setup.parameters.entries().iter().enumerate().filter(|(_, entry)| !entry.constant) {
        let expected = entry.from_stored(setup.golden.floats(&format!("grad.{}", entry.name)));
        let error = error(&gradients.read(&setup.parameters, i).unwrap(), &expected, GRADIENT_FLOOR);
        assert!(error <= 1e-4, "{what}: gradient of {}: error {error:e}", entry.name);
    }
}

fn check(name: &str) {
    for device in devices_for(name) {
        let what = format!("{name} on {device}");
        let mut setup = setup(&device, name, DType::F32);
        check_forward(&setup, &what);

        let mut tape = Tape::new();
        let mut gradients = setup.parameters.gradients().unwrap();
        let mut updater = Updater::new(OptimizerSettings::default(), &setup.parameters).unwrap();
        let (losses, norms) = (setup.golden.floats("steps.losses"), setup.golden.floats("steps.grad_norms"));
        for step in 0..10 {
            gradients.zero();
            let mut pass = Pass::training(&mut tape, &setup.parameters, TRAINING);
            let loss = loss(&setup, &mut pass);
            pass.backward(&mut gradients).unwrap();
            if step == 0 {
                assert_close(&format!("{what}: loss"), &[loss], &setup.golden.floats("output.loss"));
                check_gradients(&setup, &gradients, &what);
            }
            let norm = updater.step(&mut setup.parameters, &gradients, 1e-3).unwrap().wait().unwrap()[0];
            let difference = f64::from((loss - losses[step]).abs());
            assert!(difference <= STEPS_TOLERANCE, "{what}: loss of step {step} is {loss}, not {}", losses[step]);
            let relative = (norm / f64::from(norms[step]) - 1.0).abs();
            assert!(relative <= 1e-3, "{what}: gradient norm of step {step} is {norm}");
        }
        if name == "bert-golden/pretraining" {
            for (i, entry) in setup.parameters.entries().iter().enumerate() {
                let expected = setup.golden.floats(&format!("steps.final.{}", entry.name));
                let error = error(&setup.parameters.read(i).unwrap(), &expected, 1e-1);
                assert!(error <= 1e-3, "{what}: {} after ten steps: error {error:e}", entry.name);
            }
        }
    }
}

macro_rules! heads {
    ($($test:ident $name:literal,)*) => {
        $(#[test]
        fn $test() {
            check($name);
        })*
    };
}

heads! {
    pooler "bert-golden/model",
    pre_training "bert-golden/pretraining",
    pre_training_with_tanh_gelu "bert-golden/pretraining-gelu-new",
    masked_lm "bert-golden/mlm",
    sequence_classification "bert-golden/sequence",
    regression "bert-golden/regression",
    several_labels "bert-golden/multilabel",
    token_classification "bert-golden/token",
    span_answers "bert-golden/qa",
    multiple_choice "bert-golden/choice",
}

/// BERT's relatives: every head of a family, in the directories that the golden files have.
fn check_family(family: &str, heads: &[&str]) {
    for head in heads {
        check(&format!("relatives-golden/{family}/{head}"));
    }
}

const HEADS: [&str; 8] = ["model", "mlm", "sequence", "regression", "multilabel", "token", "qa", "choice"];

#[test]
fn roberta() {
    check_family("roberta", &HEADS);
}

#[test]
fn xlm_roberta() {
    check_family("xlm-roberta", &["mlm", "sequence"]);
}

#[test]
fn distilbert() {
    check_family("distilbert", &HEADS);
}

#[test]
fn mpnet() {
    check_family("mpnet", &HEADS);
}

#[test]
fn electra() {
    check_family("electra", &HEADS);
    check_family("electra", &["discriminator"]);
}

/// Ten joint steps of a generator and a discriminator over one set of tables, with draws from the same counters.
#[test]
fn electra_with_its_generator() {
    for device in devices() {
        let golden = Golden::open("electra-joint");
        let config = |path: &str| {
            Config::from_json(&std::fs::read_to_string(golden.directory.join(path)).unwrap()).unwrap().model
        };
        let mut builder = Builder::new();
        let (own, generator) = (config("config.json"), config("generator/config.json"));
        let model = Model::build_with_generator(&mut builder, &own, &generator).unwrap();
        let mut parameters = builder.finish(&device, DType::F32).unwrap();
        let read = |path: &str| std::fs::read(golden.directory.join(path)).unwrap();
        let (weights, generator) = (read("model.safetensors"), read("generator/model.safetensors"));
        for i in 0..parameters.entries().len() {
            let name = &parameters.entries()[i].name;
            let numbers = match name.strip_prefix(Model::GENERATOR) {
                Some(name) => floats(&generator, name),
                None => floats(&weights, name),
            };
            parameters.write(i, &numbers).unwrap();
        }
        parameters.refresh().unwrap();
        let mut engine = Engine::new(model, parameters, OptimizerSettings::default(), 9).unwrap();
        let offsets = golden.ids("input.offsets");
        let part = Part {
            ids: golden.ids("input.ids"),
            segments: golden.ids("input.segments"),
            target_lengths: None,
            lengths: offsets.windows(2).map(|w| (w[1] - w[0]) as usize).collect(),
            rows: golden.ids("input.rows"),
            targets: golden.ids("input.targets"),
            orders: None,
            next_sentence: None,
            first_number: 0,
        };
        let per = PerPrediction { masked: 1.0 / part.rows.len() as f32, token: 50.0 / part.ids.len() as f32 };
        let objective = ReplacedTokens { temperature: Bits::from(1.0), disallow_correct: false };
        let steps = ["mlm_losses", "rtd_losses", "grad_norms"].map(|name| golden.floats(&format!("steps.{name}")));
        for step in 0..10 {
            engine.gradients.zero();
            let found = engine.learn_part(step as u64, objective, (&part, per)).unwrap().wait().unwrap();
            let [mlm, rtd] = [found[0], found[1] / 50.0];
            for (name, got, expected) in [("mlm", mlm, steps[0][step]), ("rtd", rtd, steps[1][step])] {
                let off = (got - f64::from(expected)).abs();
                assert!(off <= STEPS_TOLERANCE, "{device}: {name} of step {step} is {got}, not {expected}");
            }
            if step == 0 {
                for (i, entry) in engine.parameters.entries().iter().enumerate() {
                    let expected = golden.floats(&format!("grad.{}", entry.name));
                    let got = engine.gradients.read(&engine.parameters, i).unwrap();
                    let error = error(&got, &expected, GRADIENT_FLOOR);
                    assert!(error <= 1e-4, "{device}: gradient of {}: error {error:e}", entry.name);
                }
            }
            let norm = engine.updater.step(&mut engine.parameters, &engine.gradients, 1e-3).unwrap().wait().unwrap()[0];
            let relative = (norm / f64::from(steps[2][step]) - 1.0).abs();
            assert!(relative <= 1e-3, "{device}: gradient norm of step {step} is {norm}");
        }
    }
}

#[test]
fn albert() {
    check_family("albert", &HEADS);
    check_family("albert", &["pretraining"]);
}

const MODERNBERT_HEADS: [&str; 6] = ["model", "mlm", "sequence", "token", "qa", "choice"];

#[test]
fn modernbert() {
    check_family("modernbert", &MODERNBERT_HEADS);
    check_family("modernbert-biases", &["mlm", "sequence"]);
}

/// As v3's; then with one kind of scores each, of contents' own projections and of positions'.
#[test]
fn deberta_v2() {
    check_family("deberta-v2", &["model", "mlm", "sequence", "token", "qa", "choice"]);
    check_family("deberta-v2-c2p", &["mlm"]);
    check_family("deberta-v2-p2c", &["mlm"]);
}

/// Models that write: every head of a family, in f32 and in bf16.
fn check_writers(family: &str, heads: &[&str]) {
    for head in heads {
        let name = format!("writers-golden/{family}/{head}");
        check(&name);
        check_bf16(&name);
    }
}

#[test]
fn gpt2() {
    check_writers("gpt2", &["model", "lm", "sequence", "token", "qa", "choice"]);
    check_writers("gpt2-scaled", &["lm"]);
}

#[test]
fn openai_gpt() {
    check_writers("openai-gpt", &["model", "lm", "sequence", "choice"]);
}

#[test]
fn t5() {
    check_writers("t5", &["model", "seq2seq", "sequence", "token", "qa"]);
    check_writers("t5-v1_1", &["seq2seq", "sequence"]);
}

#[test]
fn bart() {
    check_writers("bart", &["model", "seq2seq", "sequence", "qa"]);
    check_writers("bart-scaled", &["seq2seq"]);
}

#[test]
fn marian() {
    check_writers("marian", &["model", "seq2seq"]);
}

const XLNET_HEADS: [&str; 8] = ["model", "mlm", "sequence", "token", "qa", "choice", "permutation", "beams"];

/// The last is pre-training: tokens are predicted in an order, behind a memory.
#[test]
fn xlnet() {
    check_family("xlnet", &XLNET_HEADS);
}

/// The batch of a golden file with an order of prediction and a memory.
fn batch_in_order(device: &Device, golden: &Golden, config: &ModelConfig, sequences: &[Sequence<'_>]) -> Batch {
    let [orders, targets] = ["input.orders", "input.targets"].map(|name| golden.ids(name));
    let [own, of_targets, of_memory] =
        ["input.offsets", "input.target_offsets", "input.memory_offsets"].map(|name| golden.ids(name));
    let range = |offsets: &[u32], i: usize| offsets[i] as usize..offsets[i + 1] as usize;
    let permutations: Vec<Permutation<'_>> = (0..sequences.len())
        .map(|i| Permutation { orders: &orders[range(&own, i)], targets: &targets[range(&of_targets, i)] })
        .collect();
    let layers = config.sizes().num_hidden_layers;
    let states: Vec<Vec<f32>> = (0..layers).map(|layer| golden.floats(&format!("input.memory.{layer}"))).collect();
    let lengths: Vec<usize> = of_memory.windows(2).map(|ends| (ends[1] - ends[0]) as usize).collect();
    let memory = Memory::new(device, &lengths, &states).unwrap();
    Batch::in_order(device, config, sequences, Some(&permutations), Some(&memory), 0).unwrap()
}

#[test]
fn bf16_stays_near() {
    check_bf16("bert-golden/pretraining");
    for head in ["model", "mlm", "sequence", "token", "qa", "choice"] {
        check_bf16(&format!("relatives-golden/deberta-v2/{head}"));
    }
}

#[test]
fn bf16_stays_near_in_modernbert() {
    for head in MODERNBERT_HEADS {
        check_bf16(&format!("relatives-golden/modernbert/{head}"));
    }
}

/// How near the gradients of bf16 point: its roundings are some per cent of single ones.
const COSINE: f32 = 0.999;
/// The same where few tokens carry the loss: a unit of a ReLU that is within a rounding of zero turns them.
const COSINE_WITH_RELU: f32 = 0.985;

#[test]
fn bf16_stays_near_in_xlnet() {
    for head in XLNET_HEADS {
        check_bf16(&format!("relatives-golden/xlnet/{head}"));
    }
}

fn check_bf16(name: &str) {
    for device in devices_for(name) {
        let setup = setup(&device, name, DType::Bf16);
        let mut tape = Tape::new();
        let mut gradients = setup.parameters.gradients().unwrap();
        let mut pass = Pass::training(&mut tape, &setup.parameters, TRAINING);
        let loss = loss(&setup, &mut pass);
        pass.backward(&mut gradients).unwrap();
        let expected = setup.golden.floats("output.loss")[0];
        assert!((loss / expected - 1.0).abs() < 0.01, "{name} on {device}: {loss} not {expected}");
        // All gradients together point the same way.
        let (mut dot, mut a, mut b) = (0.0, 0.0, 0.0);
        for (i, entry) in setup.parameters.entries().iter().enumerate().filter(|(_, entry)| !entry.constant) {
            let expected = entry.from_stored(setup.golden.floats(&format!("grad.{}", entry.name)));
            for (g, e) in gradients.read(&setup.parameters, i).unwrap().iter().zip(&expected) {
                (dot, a, b) = (dot + g * e, a + g * g, b + e * e);
            }
        }
        let cosine = dot / (a.sqrt() * b.sqrt());
        let bound = if name.ends_with("t5/qa") { COSINE_WITH_RELU } else { COSINE };
        assert!(cosine > bound, "{name} on {device}: cosine {cosine}");
    }
}
