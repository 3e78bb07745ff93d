//! What the tests of operations share: small networks, and gradients against directional differences.
#![allow(unreachable_pub, dead_code, reason = "a module of every test file, and not every file uses all of it")]

use henson_tensor::cuda::CudaOptions;
use henson_tensor::philox::Stream;
use henson_tensor::{
    Builder, DType, Device, EmbeddingTables, Gradients, Init, Param, Parameters, Pass, Tape, Tensor, Training, Var,
};

/// A difference of two losses in f32, each with a rounding error of some 10⁻⁷, over a step of 10⁻²; and the curvature that a
/// central difference does not see.
pub const TOLERANCE: f64 = 3e-3;

/// Two devices in f32 add in other orders.
pub const TOLERANCE_DEVICES: f64 = 1e-4;

/// bf16 has eight bits, and a few roundings follow each other.
pub const TOLERANCE_BF16: f64 = 3e-2;

pub const TRAINING: Training = Training { seed: 5, step: 3 };

pub fn device(threads: usize) -> Device {
    Device::cpu(None, Some(threads)).unwrap()
}

/// The GPU, with HENSON_TEST_CUDA set.
pub fn gpu() -> Option<Device> {
    std::env::var_os("HENSON_TEST_CUDA").map(|_| Device::cuda(&CudaOptions::default()).unwrap())
}

/// Everything that a test of one device runs on.
pub fn devices() -> Vec<Device> {
    [device(2)].into_iter().chain(gpu()).collect()
}

pub fn numbers(seed: u64, n: usize) -> Vec<f32> {
    let mut stream = Stream::new(seed, 0, 0);
    (0..n).map(|_| stream.normal()).collect()
}

/// A value whose gradient can be read: the rows of a table, in order.
pub fn input(b: &mut Builder, name: &str, rows: usize, columns: usize) -> (Param, usize) {
    (b.matrix(name, rows, columns, Init::Normal(1.0)), rows)
}

/// The rows of an [`input`].
pub fn rows(pass: &mut Pass<'_>, (table, rows): (Param, usize)) -> Var {
    let ids: Vec<u32> = (0..rows as u32).collect();
    let ids = Tensor::from_slice(pass.device(), [rows], &ids).unwrap();
    let tables = EmbeddingTables { word: table, position: None, position_offset: 0, segment: None };
    pass.embeddings(tables, &ids, &ids, None).unwrap()
}

/// Parameters and what is computed from them.
pub struct Network<M, F> {
    pub parameters: Parameters,
    model: M,
    forward: F,
}

impl<M, F: Fn(&M, &mut Pass<'_>) -> Vec<Var>> Network<M, F> {
    /// Builds a model with random weights; `forward` gives its outputs.
    pub fn new(device: &Device, dtype: DType, build: impl FnOnce(&mut Builder) -> M, forward: F) -> Self {
        let mut builder = Builder::new();
        let model = build(&mut builder);
        let mut parameters = builder.finish(device, dtype).unwrap();
        for entry in 0..parameters.entries().len() {
            let n = parameters.entries()[entry].shape.elements();
            let scale = if parameters.entries()[entry].shape.sizes().len() == 1 { 0.3 } else { 0.5 };
            let shift = if parameters.entries()[entry].init == Init::Ones { 1.0 } else { 0.0 };
            let values: Vec<f32> = numbers(entry as u64 + 1, n).iter().map(|x| shift + scale * x).collect();
            parameters.write(entry, &values).unwrap();
        }
        parameters.refresh().unwrap();
        Self { parameters, model, forward }
    }

    /// Σ output·weight, in f64; with the gradients of all parameters on request.
    pub fn loss(&self, recompute: bool, gradients: Option<&mut Gradients>) -> f64 {
        let mut tape = Tape::new();
        tape.set_recompute(recompute);
        let mut pass = Pass::training(&mut tape, &self.parameters, TRAINING);
        let outputs = (self.forward)(&self.model, &mut pass);
        let mut loss = 0.0;
        for (i, output) in outputs.iter().enumerate() {
            let values = output.tensor().to_f32().unwrap();
            let weights = numbers(1000 + i as u64, values.len());
            loss += values.iter().zip(&weights).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum::<f64>();
            pass.seed_gradient(output, &weights).unwrap();
        }
        if let Some(gradients) = gradients {
            gradients.zero();
            pass.backward(gradients).unwrap();
        }
        loss
    }

    /// The gradients of all parameters, one after the other.
    pub fn gradients(&self, recompute: bool) -> Vec<Vec<f32>> {
        let mut gradients = self.parameters.gradients().unwrap();
        self.loss(recompute, Some(&mut gradients));
        (0..self.parameters.entries().len()).map(|i| gradients.read(&self.parameters, i).unwrap()).collect()
    }

    /// Compares the gradient of every parameter with a central difference along a random direction.
    pub fn check_gradients(&mut self, what: &str) {
        let gradients = self.gradients(false);
        for entry in 0..gradients.len() {
            let direction = numbers(77 + entry as u64, gradients[entry].len());
            let length = direction.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
            let expected: f64 =
                gradients[entry].iter().zip(&direction).map(|(g, d)| f64::from(*g) * f64::from(*d)).sum::<f64>()
                    / length;
            let old = self.parameters.read(entry).unwrap();
            let mut at = |step: f64| {
                let moved: Vec<f32> = old.iter().zip(&direction).map(|(x, d)| x + (step / length) as f32 * d).collect();
                self.parameters.write(entry, &moved).unwrap();
                self.parameters.refresh().unwrap();
                self.loss(false, None)
            };
            let got = (at(1e-2) - at(-1e-2)) / 2e-2;
            at(0.0);
            // A direction may be nearly flat; the gradient's own length says how large it could have been.
            let norm = gradients[entry].iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
            let scale = norm / (gradients[entry].len() as f64).sqrt();
            let name = &self.parameters.entries()[entry].name;
            assert!(norm > 1e-3, "{what}: {name} has no gradient");
            let error = (got - expected).abs() / scale.max(expected.abs()).max(1e-2);
            assert!(error <= 10.0 * TOLERANCE, "{what}: {name}: {got} is not {expected}, error {error:e}");
        }
    }
}

/// That bf16 follows f32, in the output's and the gradients' direction and size.
pub fn assert_similar(what: &str, got: &[Vec<f32>], expected: &[Vec<f32>], tolerance: f64) {
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let square = |x: f32| f64::from(x).powi(2);
        let off: f64 = got.iter().zip(expected).map(|(g, e)| square(g - e)).sum();
        let error = (off / expected.iter().map(|e| square(*e)).sum::<f64>().max(1e-9)).sqrt();
        assert!(error <= tolerance, "{what}: gradient {i} is off by {error:e}");
    }
}

/// Checks a network in f32, compares bf16, other numbers of threads and the GPU with it.
pub fn check<M>(
    what: &str,
    build: impl Fn(&mut Builder) -> M + Copy,
    forward: impl Fn(&M, &mut Pass<'_>) -> Vec<Var> + Copy,
) {
    let mut network = Network::new(&device(2), DType::F32, build, forward);
    network.check_gradients(what);
    let expected = network.gradients(false);
    assert_eq!(expected, network.gradients(true), "{what}: computed again");
    for threads in [1, 3] {
        let other = Network::new(&device(threads), DType::F32, build, forward);
        assert_eq!(expected, other.gradients(false), "{what}: {threads} threads");
    }
    let rounded = Network::new(&device(2), DType::Bf16, build, forward);
    assert_similar(what, &rounded.gradients(false), &expected, TOLERANCE_BF16);
    let Some(gpu) = gpu() else { return };
    for (dtype, tolerance) in [(DType::F32, TOLERANCE_DEVICES), (DType::Bf16, TOLERANCE_BF16)] {
        let network = Network::new(&gpu, dtype, build, forward);
        for recompute in [false, true] {
            assert_similar(&format!("{what} on the GPU, {dtype}"), &network.gradients(recompute), &expected, tolerance);
        }
    }
}
