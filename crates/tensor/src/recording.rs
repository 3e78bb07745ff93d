//! Passes that are recorded once and played again, and what tells them apart.
//!
//! A recording repeats on a GPU what a pass did, and none of it runs on the host again. So whatever the pass read from the host
//! must be in its key: the sizes of its inputs, which a feed notes, and a value that the caller's work gets. What was forgotten
//! would be stale on a GPU and right everywhere else. So passes keep a [`Trace`] of what their operations give to kernels, and
//! with debug assertions, on any device, two passes of the same key with different traces are a panic.

use std::any::TypeId;
use std::collections::HashMap;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};

use henson_kernels::cuda::Graph;

use crate::{DType, Device, Result, Shape, Tensor, TensorError};

/// Whether what passes read from the host is compared with their keys.
pub(crate) const CHECKED: bool = cfg!(debug_assertions);

/// Recorded passes that are kept, unless others are asked for; the one that was not used for longest goes first.
const MOST_RECORDINGS: usize = 64;

/// Keys whose traces are compared; beyond, it begins again.
const MOST_TRACES: usize = 4096;

const NO_ROOM: TensorError = TensorError::Unsupported {
    operation: "record a pass",
    why: "memory ran out meanwhile; lower the batch size or the sequence length, or raise the accumulation",
};

/// A number that a recorded pass reads from the host, as a part of its key: equal where its bits are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Bits(u32);

impl From<f32> for Bits {
    fn from(number: f32) -> Self {
        Self(number.to_bits())
    }
}

impl Bits {
    /// The number.
    pub fn get(self) -> f32 {
        f32::from_bits(self.0)
    }
}

/// The sizes of a pass's inputs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Sizes(Vec<usize>);

impl Sizes {
    /// One more input.
    pub(crate) fn add(&mut self, shape: Shape, dtype: DType) {
        let sizes = shape.sizes();
        self.0.extend(sizes.iter().chain(&[sizes.len(), dtype as usize]));
    }

    /// Sizes of another kind.
    pub(crate) fn extend<const N: usize>(&mut self, sizes: [usize; N]) {
        self.0.extend(sizes);
    }
}

/// The sizes of a pass's inputs, where it can be recorded: passes with equal ones can share a recording.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Signature(pub(crate) Option<Sizes>);

/// What a pass read from the host, in short.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Trace(u64);

impl Trace {
    pub(crate) fn add(&mut self, values: &dyn fmt::Debug) {
        struct Hashed(DefaultHasher);
        impl fmt::Write for Hashed {
            fn write_str(&mut self, text: &str) -> fmt::Result {
                self.0.write(text.as_bytes());
                Ok(())
            }
        }
        if CHECKED {
            let mut hashed = Hashed(DefaultHasher::new());
            self.0.hash(&mut hashed.0);
            // Nothing that is hashed can fail.
            let _ = fmt::write(&mut hashed, format_args!("{values:?}"));
            self.0 = hashed.0.finish();
        }
    }
}

/// All that a recorded pass depends on.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Identity {
    sizes: Sizes,
    key: TypeId,
    value: Vec<u8>,
}

impl Identity {
    fn new<K: Hash + 'static>(sizes: &Sizes, key: &K) -> Self {
        /// Keeps what it is given: keys are told apart by all of their parts, and by no hash of them.
        struct Kept(Vec<u8>);
        impl Hasher for Kept {
            fn write(&mut self, bytes: &[u8]) {
                self.0.extend_from_slice(bytes);
            }
            fn finish(&self) -> u64 {
                0
            }
        }
        let mut kept = Kept(Vec::new());
        key.hash(&mut kept);
        Self { sizes: sizes.clone(), key: TypeId::of::<K>(), value: kept.0 }
    }
}

/// Passes that were recorded, by all that they depend on.
///
/// On a GPU, a pass runs twice before it is played: once to see what it needs, once to be recorded.
pub struct Recordings {
    known: HashMap<Identity, Recording>,
    traces: HashMap<Identity, Trace>,
    clock: u64,
    most: usize,
}

enum Recording {
    /// It ran once.
    Seen,
    /// It can be played, as long as no memory of recorded passes was given back (`trims`). Its outputs stay where they are.
    Ready { graph: Graph, outputs: Vec<Tensor>, used: u64, trims: u64 },
    /// It could not be recorded.
    Never,
}

impl Default for Recordings {
    fn default() -> Self {
        Self::at_most(MOST_RECORDINGS)
    }
}

impl Recordings {
    /// Keeps so many, whose outputs stay in memory.
    pub fn at_most(most: usize) -> Self {
        Self { known: HashMap::new(), traces: HashMap::new(), clock: 0, most }
    }

    /// How many passes can be played.
    pub fn ready(&self) -> usize {
        self.known.values().filter(|recording| matches!(recording, Recording::Ready { .. })).count()
    }

    /// Runs `work`, or plays what it did before under an equal key on inputs of equal sizes. With its outputs it gives the
    /// [`Trace`] of its pass, which must then be equal, too. The outputs are valid until it runs again.
    pub fn run<K: Hash + 'static, E: From<TensorError>>(
        &mut self,
        device: &Device,
        signature: &Signature,
        key: &K,
        work: impl FnOnce() -> Result<(Vec<Tensor>, Trace), E>,
    ) -> Result<Vec<Tensor>, E> {
        let Some(sizes) = &signature.0 else { return Ok(work()?.0) };
        let identity = Identity::new(sizes, key);
        let Device::Cuda(cuda) = device else {
            let (outputs, trace) = work()?;
            self.compare(identity, trace);
            return Ok(outputs);
        };
        let _turn = cuda.turn();
        if cuda.is_profiling() {
            return Ok(cuda.within_recording(work)?.0);
        }
        self.clock += 1;
        let now = cuda.trims();
        if matches!(self.known.get(&identity), Some(Recording::Ready { trims, .. }) if *trims != now) {
            // Memory ran out since, and what this pass writes on its way may belong to others: it begins again.
            self.known.remove(&identity);
        }
        match self.known.get_mut(&identity) {
            Some(Recording::Ready { graph, outputs, used, .. }) => {
                *used = self.clock;
                cuda.gpu.play(graph).map_err(TensorError::from)?;
                Ok(outputs.clone())
            }
            Some(Recording::Never) => Ok(cuda.within_recording(work)?.0),
            Some(Recording::Seen) => {
                let ((outputs, trace), graph) = cuda.capture(work)?;
                self.compare(identity.clone(), trace);
                if cuda.trims() != now {
                    return Err(E::from(NO_ROOM));
                }
                // Without a graph nothing was computed, and `work` is used up: the caller cannot go on with this step.
                let graph = graph.inspect_err(|_| drop(self.known.insert(identity.clone(), Recording::Never)))?;
                cuda.gpu.play(&graph).map_err(TensorError::from)?;
                self.known.insert(
                    identity,
                    Recording::Ready { graph, outputs: outputs.clone(), used: self.clock, trims: now },
                );
                self.forget_oldest();
                Ok(outputs)
            }
            None => {
                self.known.insert(identity.clone(), Recording::Seen);
                let (outputs, trace) = cuda.within_recording(work)?;
                self.compare(identity, trace);
                Ok(outputs)
            }
        }
    }

    /// Compares what a pass read with what the first of its key did.
    fn compare(&mut self, identity: Identity, trace: Trace) {
        if CHECKED {
            if self.traces.len() >= MOST_TRACES {
                self.traces.clear();
            }
            let first = *self.traces.entry(identity).or_insert(trace);
            assert_eq!(
                first, trace,
                "a pass read something from the host that is not in its key: a GPU would not see it"
            );
        }
    }

    fn forget_oldest(&mut self) {
        if self.ready() <= self.most {
            return;
        }
        let age = |r: &Recording| match r {
            Recording::Ready { used, .. } => *used,
            _ => u64::MAX,
        };
        if let Some(key) = self.known.iter().min_by_key(|(_, r)| age(r)).map(|(key, _)| key.clone()) {
            self.known.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Activation, Attention, BiasValues, Builder, FeedForwardLayers, Init, Layout, Norm, Parameters, Pass,
        QueryKeyValue, Tape, Training, Var,
    };

    /// A pass over one matrix (4×4), one vector (4) and two sequences of 3 tokens.
    struct Fixture {
        device: Device,
        parameters: Parameters,
        layout: Layout,
        seed: u64,
    }

    const LENGTHS: [usize; 2] = [3, 3];

    impl Fixture {
        fn new() -> (Self, crate::Param, crate::Param) {
            let device = Device::cpu(None, Some(1)).unwrap();
            let mut builder = Builder::new();
            let weight = builder.matrix("weight", 4, 4, Init::Ones);
            let vector = builder.vector("vector", 4, Init::Ones);
            let parameters = builder.finish(&device, DType::F32).unwrap();
            let layout = Layout::new(&device, &LENGTHS, 0).unwrap();
            (Self { device, parameters, layout, seed: 0 }, weight, vector)
        }

        /// What a pass reads.
        fn trace(&self, work: impl FnOnce(&mut Pass<'_>, Var)) -> Trace {
            let mut tape = Tape::new();
            let mut pass = Pass::training(&mut tape, &self.parameters, Training { seed: self.seed, step: 7 });
            let x = pass.var(self.numbers([6, 4]));
            work(&mut pass, x);
            drop(pass);
            tape.trace()
        }

        fn numbers(&self, [rows, columns]: [usize; 2]) -> Tensor {
            let numbers: Vec<f32> = (0..rows * columns).map(|i| i as f32 / 10.0).collect();
            Tensor::from_slice(&self.device, [rows, columns], &numbers).unwrap()
        }

        fn zeros<const N: usize>(&self, shape: [usize; N], dtype: DType) -> Tensor {
            Tensor::zeros(&self.device, shape, dtype).unwrap()
        }
    }

    #[test]
    fn every_number_that_an_operation_takes_from_the_host_is_noted() {
        let (f, weight, vector) = Fixture::new();
        let (classes, targets) = (f.zeros([6], DType::U32), f.zeros([24], DType::F32));
        let (spans, ones) = (f.zeros([2, 2], DType::U32), f.zeros([2, 2], DType::F32));
        let added = f.zeros([2, 4], DType::F32);
        let norm = |epsilon| Norm { weight: vector, bias: Some(vector), epsilon, centred: true };
        let layers = |activation| FeedForwardLayers {
            up: weight,
            up_bias: None,
            activation,
            gated: false,
            down: weight,
            down_bias: None,
        };
        let pick = |other: bool, a: f32, b: f32| if other { b } else { a };
        type Case<'a> = (&'a str, &'a dyn Fn(&mut Pass<'_>, Var, bool));
        let drawn_at = Training { seed: 0, step: 7 };
        let cases: [Case<'_>; 17] = [
            ("factor", &|p, x, o| drop(p.scale(&x, pick(o, 1.0, 0.5)).unwrap())),
            ("classes", &|p, x, o| drop(p.cross_entropy(x, 4 - usize::from(o), &classes, None, 1.0).unwrap())),
            ("smoothing", &|p, x, o| {
                drop(p.smoothed_cross_entropy(x, 4, &classes, None, pick(o, 0.0, 0.1), 1.0).unwrap());
            }),
            ("scale", &|p, x, o| drop(p.cross_entropy(x, 4, &classes, None, pick(o, 1.0, 0.5)).unwrap())),
            ("squares", &|p, x, o| drop(p.squared_error(x, &targets, pick(o, 1.0, 0.5)).unwrap())),
            ("binary", &|p, x, o| drop(p.binary_cross_entropy(x, &targets, None, pick(o, 1.0, 0.5)).unwrap())),
            ("spans", &|p, _, o| {
                let x = p.var(f.numbers([6, 2]));
                drop(p.span_cross_entropy(x, &f.layout, &spans, &ones, pick(o, 1.0, 0.5)).unwrap());
            }),
            ("counted", &|p, x, o| drop(p.count_correct(&x, 4 - usize::from(o), &classes, None).unwrap())),
            ("draws", &|p, x, o| {
                drop(p.sample(&x, 4, pick(o, 1.0, 0.5), (&f.layout, &classes), None, (drawn_at, 0)).unwrap());
            }),
            ("draws of another step", &|p, x, o| {
                let from = Training { seed: 1, step: 7 + u32::from(o) };
                drop(p.sample(&x, 4, 1.0, (&f.layout, &classes), None, (from, 0)).unwrap());
            }),
            ("softmax", &|p, x, o| drop(p.softmax(&x, 4 - usize::from(o)).unwrap())),
            ("similarities", &|p, x, o| drop(p.similarities(&x, pick(o, 1.0, 20.0), &added).unwrap())),
            ("dropout", &|p, x, o| drop(p.dropout_tokens(x, &f.layout, (pick(o, 0.1, 0.2), 0)).unwrap())),
            ("epsilon", &|p, x, o| drop(p.norm(x, &norm(pick(o, 1e-12, 1e-5))).unwrap())),
            ("activation", &|p, x, o| {
                let activation = if o { Activation::Relu } else { Activation::Tanh };
                drop(p.linear(&x, weight, None, activation).unwrap());
            }),
            ("inner activation", &|p, x, o| {
                let activation = if o { Activation::Relu } else { Activation::Gelu };
                drop(p.feed_forward(&x, &layers(activation), None).unwrap());
            }),
            ("attention", &|p, _, o| {
                let x = p.var(f.numbers([6, 12]));
                let attention = Attention { scale: pick(o, 1.0, 0.5), ..Attention::new(2, 2) };
                let from = QueryKeyValue::Fused(x);
                let layouts = (&f.layout, &f.layout);
                drop(p.attention(&attention, from, &BiasValues::None, layouts, (0.0, 0)).unwrap());
            }),
        ];
        for (name, work) in cases {
            let [first, again, other] = [false, false, true].map(|other| f.trace(|pass, x| work(pass, x, other)));
            assert_eq!(first, again, "{name}");
            assert_ne!(first, other, "{name}");
        }
        let drop_some = |pass: &mut Pass<'_>, x| drop(pass.dropout_tokens(x, &f.layout, (0.1, 0)).unwrap());
        let other = Fixture { seed: 1, device: f.device.clone(), layout: f.layout.clone(), ..Fixture::new().0 };
        assert_ne!(f.trace(drop_some), other.trace(drop_some), "the seed of dropout");
    }

    /// Runs a pass with this scale under this key.
    fn run(recordings: &mut Recordings, f: &Fixture, key: impl Hash + 'static, rows: usize, scale: f32) {
        let fill = || Ok::<_, TensorError>((f.numbers([rows, 4]), f.zeros([4 * rows], DType::F32)));
        let ((x, targets), signature) = f.device.feed(fill).unwrap();
        let mut tape = Tape::new();
        let work = || {
            let mut pass = Pass::training(&mut tape, &f.parameters, Training { seed: 0, step: 0 });
            let x = pass.var(x);
            let loss = pass.squared_error(x, &targets, scale)?;
            drop(pass);
            Ok::<_, TensorError>((vec![loss], tape.trace()))
        };
        recordings.run(&f.device, &signature, &key, work).unwrap();
    }

    #[test]
    #[should_panic = "not in its key"]
    fn a_number_that_is_not_in_the_key_is_noticed_without_a_gpu() {
        let (f, mut recordings) = (Fixture::new().0, Recordings::default());
        run(&mut recordings, &f, "any", 3, 1.0);
        run(&mut recordings, &f, "any", 3, 0.5);
    }

    #[test]
    fn passes_are_told_apart_by_all_that_is_in_their_keys() {
        let (f, mut recordings) = (Fixture::new().0, Recordings::default());
        // Each again, as a step would come again.
        for _ in 0..2 {
            for scale in [1.0, 0.5] {
                run(&mut recordings, &f, Bits::from(scale), 3, scale);
                run(&mut recordings, &f, (true, Bits::from(scale)), 3, scale);
            }
            // By the sizes of inputs, and by the type of a key with equal bytes.
            run(&mut recordings, &f, 1_u32, 4, 0.25);
            run(&mut recordings, &f, 1_u32, 5, 0.75);
            run(&mut recordings, &f, 1_i32, 5, 0.5);
        }
        assert_eq!(recordings.traces.len(), 7);
        let of_shape = |shape| f.device.feed(|| Ok::<_, TensorError>(f.numbers(shape))).unwrap().1;
        assert_ne!(of_shape([2, 6]), of_shape([3, 4]), "as many numbers in other rows");
    }
}
