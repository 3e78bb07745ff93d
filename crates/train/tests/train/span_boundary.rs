//! SpanBERT's losses against PyTorch: logits, losses, all gradients and ten steps of AdamW, on every kernel set of the machine
//! and, with HENSON_TEST_CUDA set, on its GPU. `tools/golden/span_boundary.py` made the values.

use std::path::Path;

use henson_checkpoint::Config;
use henson_models::{Batch, Capture, Head, Model, Sequence};
use henson_tensor::cuda::CudaOptions;
use henson_tensor::{Builder, DType, Device, Isa, Parameters, Pass, Tape, Tensor, Training};
use henson_train::objective::Masked;
use henson_train::span_boundary::{BoundaryTargets, span_boundary};
use henson_train::{OptimizerSettings, Updater};
use safetensors::SafeTensors;

const TRAINING: Training = Training { seed: 1, step: 1 };

struct Setup {
    golden: Vec<u8>,
    model: Model,
    parameters: Parameters,
    batch: Batch,
    masked: Masked,
    boundary: BoundaryTargets,
    scales: [f32; 2],
}

fn bytes<const N: usize>(golden: &[u8], name: &str) -> Vec<[u8; N]> {
    let file = SafeTensors::deserialize(golden).unwrap();
    let tensor = file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
    tensor.data().chunks_exact(N).map(|bytes| bytes.try_into().unwrap()).collect()
}

fn floats(golden: &[u8], name: &str) -> Vec<f32> {
    bytes(golden, name).into_iter().map(f32::from_le_bytes).collect()
}

fn ids(golden: &[u8], name: &str) -> Vec<u32> {
    bytes(golden, name).into_iter().map(|b| u32::try_from(i64::from_le_bytes(b)).unwrap()).collect()
}

/// Element i of the k-th parameter by name is 0.2·sin(0.7·i + 1.3·k), one more in the weights of norms.
fn fill(parameters: &mut Parameters) {
    let mut order: Vec<usize> = (0..parameters.entries().len()).collect();
    order.sort_by_key(|i| parameters.entries()[*i].name.clone());
    for (k, i) in order.into_iter().enumerate() {
        let entry = &parameters.entries()[i];
        let mut path = entry.name.rsplit('.');
        let is_weight = path.next() == Some("weight");
        let is_norm = path.next().is_some_and(|name| name.to_lowercase().contains("norm"));
        let shift = if is_weight && is_norm { 1.0 } else { 0.0 };
        let value = |i: usize| (0.2 * (0.7 * i as f64 + 1.3 * k as f64).sin() + shift) as f32;
        let values: Vec<f32> = (0..entry.shape.elements()).map(value).collect();
        parameters.write(i, &values).unwrap();
    }
    parameters.refresh().unwrap();
}

fn setup(device: &Device, dtype: DType) -> Setup {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/span-boundary");
    let golden = std::fs::read(directory.join("golden.safetensors")).unwrap();
    let config = Config::from_json(&std::fs::read_to_string(directory.join("config.json")).unwrap()).unwrap();
    let mut builder = Builder::new();
    let model = Model::build(&mut builder, &config.model, Head::SpanBoundary).unwrap();
    let mut parameters = builder.finish(device, dtype).unwrap();
    fill(&mut parameters);
    let (tokens, lengths) = (ids(&golden, "input.ids"), ids(&golden, "input.lengths"));
    let (zeros, mut begin) = (vec![0; tokens.len()], 0);
    let mut sequences = Vec::new();
    for length in lengths {
        let range = begin..begin + length as usize;
        begin = range.end;
        sequences.push(Sequence { ids: &tokens[range.clone()], segments: &zeros[range] });
    }
    let batch = Batch::new(device, &config.model, &sequences, 0).unwrap();
    let tensor = |name: &str| {
        let numbers = ids(&golden, name);
        Tensor::from_slice(device, [numbers.len()], &numbers).unwrap()
    };
    let masked = Masked { rows: tensor("input.rows"), targets: tensor("input.targets"), weights: None };
    let (ends, places, targets) = (tensor("input.ends"), tensor("input.places"), tensor("input.boundary"));
    let scales = [masked.rows.shape().elements(), targets.shape().elements() + 1].map(|n| 1.0 / n as f32);
    let boundary = BoundaryTargets { ends, places, targets, weights: None };
    Setup { golden, model, parameters, batch, masked, boundary, scales }
}

fn devices() -> Vec<Device> {
    let mut all: Vec<Device> =
        Isa::available().into_iter().map(|isa| Device::cpu(Some(isa), Some(2)).unwrap()).collect();
    if std::env::var_os("HENSON_TEST_CUDA").is_some() {
        all.push(Device::cuda(&CudaOptions::default()).unwrap());
    }
    all
}

/// The largest difference, as a share of the largest number.
fn error(got: &[f32], expected: &[f32], floor: f32) -> f32 {
    assert_eq!(got.len(), expected.len());
    let scale = expected.iter().fold(floor, |most, x| most.max(x.abs()));
    let off = |(got, expected): (&f32, &f32)| if got.is_nan() { f32::INFINITY } else { (got - expected).abs() };
    got.iter().zip(expected).map(off).fold(0.0, f32::max) / scale
}

fn losses(setup: &Setup, pass: &mut Pass<'_>) -> Vec<f32> {
    let Setup { model, batch, masked, boundary, scales, .. } = setup;
    let losses = span_boundary(model, pass, batch, masked, boundary, *scales).unwrap();
    losses.iter().map(|loss| loss.to_vec::<f32>().unwrap()[0]).collect()
}

#[test]
fn logits_losses_gradients_and_ten_steps() {
    for device in devices() {
        let mut setup = setup(&device, DType::F32);
        let mut tape = Tape::new();
        let mut pass = Pass::inference(&mut tape, &setup.parameters);
        let last = setup.model.encode(&mut pass, &setup.batch, Capture::default()).unwrap().last;
        let (layout, boundary) = (&setup.batch.layout, &setup.boundary);
        let logits = setup.model.boundary_logits(&mut pass, &last, layout, &boundary.ends, &boundary.places).unwrap();
        let of_words: Vec<f32> =
            logits.tensor().to_f32().unwrap().chunks(64).flat_map(|row| row[..40].to_vec()).collect();
        let off = error(&of_words, &floats(&setup.golden, "output.boundary_logits"), 1e-3);
        assert!(off <= 2e-5, "{device}: logits are off by {off}");
        drop(pass);

        let mut gradients = setup.parameters.gradients().unwrap();
        let mut updater = Updater::new(OptimizerSettings::default(), &setup.parameters).unwrap();
        let (expected, norms) = (floats(&setup.golden, "steps.losses"), floats(&setup.golden, "steps.grad_norms"));
        for step in 0..10 {
            gradients.zero();
            let mut pass = Pass::training(&mut tape, &setup.parameters, TRAINING);
            let found = losses(&setup, &mut pass);
            pass.backward(&mut gradients).unwrap();
            if step == 0 {
                for (i, entry) in setup.parameters.entries().iter().enumerate() {
                    let expected = floats(&setup.golden, &format!("grad.{}", entry.name));
                    let off = error(&gradients.read(&setup.parameters, i).unwrap(), &expected, 1e-2);
                    assert!(off <= 1e-4, "{device}: gradient of {}: {off}", entry.name);
                }
            }
            let off = error(&found, &expected[2 * step..][..2], 1.0);
            assert!(off <= 1e-4, "{device}: losses of step {step} are {found:?}");
            let norm = updater.step(&mut setup.parameters, &gradients, 1e-3).unwrap().wait().unwrap()[0];
            assert!((norm / f64::from(norms[step]) - 1.0).abs() <= 1e-3, "{device}: norm of step {step} is {norm}");
        }
    }
}

#[test]
fn bf16_stays_near() {
    for device in devices() {
        let setup = setup(&device, DType::Bf16);
        let mut tape = Tape::new();
        let mut gradients = setup.parameters.gradients().unwrap();
        let mut pass = Pass::training(&mut tape, &setup.parameters, TRAINING);
        let off = error(&losses(&setup, &mut pass), &floats(&setup.golden, "output.losses"), 1.0);
        assert!(off < 0.01, "{device}: {off}");
        pass.backward(&mut gradients).unwrap();
        let (mut dot, mut a, mut b) = (0.0, 0.0, 0.0);
        for (i, entry) in setup.parameters.entries().iter().enumerate() {
            let expected = floats(&setup.golden, &format!("grad.{}", entry.name));
            for (g, e) in gradients.read(&setup.parameters, i).unwrap().iter().zip(&expected) {
                (dot, a, b) = (dot + g * e, a + g * g, b + e * e);
            }
        }
        assert!(dot / (a.sqrt() * b.sqrt()) > 0.999, "{device}: cosine {}", dot / (a.sqrt() * b.sqrt()));
    }
}
