//! Where the time of a step goes: every operation reports its kind, its time and what it could not do without, the
//! multiply-adds and the bytes that must move. Off unless a benchmark asks for it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use henson_kernels::cuda::Event;

use crate::cuda::CudaDevice;

/// What an operation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub enum Kind {
    Embedding,
    Linear,
    InputGradient,
    WeightGradient,
    BiasGradient,
    Activation,
    Attention,
    AttentionGradient,
    Convolution,
    ConvolutionGradient,
    LayerNorm,
    LayerNormGradient,
    Recurrent,
    RecurrentGradient,
    Rotary,
    Rows,
    Loss,
    Sampling,
    GradientNorm,
    ZeroGradients,
    /// Gradients of parts of a batch, added.
    AddParts,
    /// Gradients, to the ranks that have their shards.
    AllToAll,
    /// Those of all ranks, added by whoever has the shard.
    AddRanks,
    /// Weights, from the ranks that have updated them.
    AllGather,
    Optimizer,
}

impl Kind {
    /// All of them, in the order of a step.
    pub const ALL: [Kind; 25] = [
        Kind::Embedding,
        Kind::Convolution,
        Kind::Linear,
        Kind::Rotary,
        Kind::Attention,
        Kind::Recurrent,
        Kind::LayerNorm,
        Kind::Activation,
        Kind::Rows,
        Kind::Loss,
        Kind::Sampling,
        Kind::InputGradient,
        Kind::WeightGradient,
        Kind::BiasGradient,
        Kind::AttentionGradient,
        Kind::RecurrentGradient,
        Kind::LayerNormGradient,
        Kind::ConvolutionGradient,
        Kind::ZeroGradients,
        Kind::AddParts,
        Kind::AllToAll,
        Kind::AddRanks,
        Kind::GradientNorm,
        Kind::Optimizer,
        Kind::AllGather,
    ];

    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Embedding => "embedding",
            Kind::Linear => "linear",
            Kind::InputGradient => "linear, input gradient",
            Kind::WeightGradient => "linear, weight gradient",
            Kind::BiasGradient => "bias gradient",
            Kind::Activation => "activation gradient",
            Kind::Attention => "attention",
            Kind::AttentionGradient => "attention gradient",
            Kind::Convolution => "convolution",
            Kind::ConvolutionGradient => "convolution gradient",
            Kind::LayerNorm => "layer norm",
            Kind::LayerNormGradient => "layer norm gradient",
            Kind::Recurrent => "recurrent",
            Kind::RecurrentGradient => "recurrent gradient",
            Kind::Rotary => "rotary positions",
            Kind::Rows => "rows",
            Kind::Loss => "loss",
            Kind::Sampling => "sampling",
            Kind::GradientNorm => "gradient norm",
            Kind::ZeroGradients => "zeroing gradients",
            Kind::AddParts => "adding parts",
            Kind::AllToAll => "gradients to shards",
            Kind::AddRanks => "adding ranks",
            Kind::AllGather => "weights from shards",
            Kind::Optimizer => "optimizer",
        }
    }
}

/// What the operations of one kind took, and what they had to do.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Spent {
    /// How many there were.
    pub calls: usize,
    /// Their time.
    pub seconds: f64,
    /// Multiplications and additions of matrix products.
    pub flops: f64,
    /// Bytes of operands and results, each counted once.
    pub bytes: f64,
}

impl Spent {
    fn add(&mut self, seconds: f64, flops: f64, bytes: f64) {
        self.calls += 1;
        self.seconds += seconds;
        self.flops += flops;
        self.bytes += bytes;
    }
}

/// The times of a device's operations.
#[derive(Default)]
pub(crate) struct Profile {
    on: AtomicBool,
    spent: Mutex<[Spent; Kind::ALL.len()]>,
}

impl Profile {
    pub(crate) fn start(&self) {
        *self.spent.lock().unwrap_or_else(PoisonError::into_inner) = Default::default();
        self.on.store(true, Ordering::Relaxed);
    }

    pub(crate) fn stop(&self) -> Vec<(Kind, Spent)> {
        self.on.store(false, Ordering::Relaxed);
        let spent = self.spent.lock().unwrap_or_else(PoisonError::into_inner);
        Kind::ALL.into_iter().map(|kind| (kind, spent[kind as usize])).filter(|(_, s)| s.calls > 0).collect()
    }

    /// Measures until the result is dropped; nothing while profiling is off.
    pub(crate) fn timer(&self, kind: Kind, flops: usize, bytes: usize) -> Option<Timer<'_>> {
        self.on.load(Ordering::Relaxed).then(|| Timer {
            clock: Clock::Host(self, Instant::now()),
            kind,
            flops: flops as f64,
            bytes: bytes as f64,
        })
    }
}

pub(crate) struct Timer<'a> {
    clock: Clock<'a>,
    kind: Kind,
    flops: f64,
    bytes: f64,
}

enum Clock<'a> {
    Host(&'a Profile, Instant),
    /// The mark before; nothing once the one behind is set.
    Cuda(&'a CudaDevice, Option<Event>),
}

impl<'a> Timer<'a> {
    pub(crate) fn on_gpu(cuda: &'a CudaDevice, kind: Kind, flops: usize, bytes: usize, before: Event) -> Self {
        Self { clock: Clock::Cuda(cuda, Some(before)), kind, flops: flops as f64, bytes: bytes as f64 }
    }
}

impl Drop for Timer<'_> {
    fn drop(&mut self) {
        match &mut self.clock {
            Clock::Host(profile, start) => {
                let seconds = start.elapsed().as_secs_f64();
                let mut all = profile.spent.lock().unwrap_or_else(PoisonError::into_inner);
                all[self.kind as usize].add(seconds, self.flops, self.bytes);
            }
            Clock::Cuda(cuda, before) => {
                if let Some(before) = before.take() {
                    cuda.note(self.kind, self.flops, self.bytes, before);
                }
            }
        }
    }
}

/// Operations of a GPU between their marks.
#[derive(Default)]
pub(crate) struct Recorded(Vec<(Kind, f64, f64, Event, Event)>);

impl Recorded {
    pub(crate) fn add(&mut self, kind: Kind, flops: f64, bytes: f64, before: Event, after: Event) {
        self.0.push((kind, flops, bytes, before, after));
    }

    pub(crate) fn finish(self) -> Vec<(Kind, Spent)> {
        let mut all = [Spent::default(); Kind::ALL.len()];
        for (kind, flops, bytes, before, after) in self.0 {
            all[kind as usize].add(after.seconds_since(&before).unwrap_or(f64::NAN), flops, bytes);
        }
        Kind::ALL.into_iter().map(|kind| (kind, all[kind as usize])).filter(|(_, s)| s.calls > 0).collect()
    }
}
