//! Where the time of a step goes: every operation reports its kind, its time and what it could not do without, the
//! multiply-adds and the bytes that must move. Off unless a benchmark asks for it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

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
    LayerNorm,
    LayerNormGradient,
    Rows,
    Loss,
    GradientNorm,
    ZeroGradients,
    Optimizer,
}

impl Kind {
    /// All of them, in the order of a step.
    pub const ALL: [Kind; 15] = [
        Kind::Embedding,
        Kind::Linear,
        Kind::Attention,
        Kind::LayerNorm,
        Kind::Activation,
        Kind::Rows,
        Kind::Loss,
        Kind::InputGradient,
        Kind::WeightGradient,
        Kind::BiasGradient,
        Kind::AttentionGradient,
        Kind::LayerNormGradient,
        Kind::ZeroGradients,
        Kind::GradientNorm,
        Kind::Optimizer,
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
            Kind::LayerNorm => "layer norm",
            Kind::LayerNormGradient => "layer norm gradient",
            Kind::Rows => "rows",
            Kind::Loss => "loss",
            Kind::GradientNorm => "gradient norm",
            Kind::ZeroGradients => "zeroing gradients",
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
            profile: self,
            kind,
            flops: flops as f64,
            bytes: bytes as f64,
            start: Instant::now(),
        })
    }
}

pub(crate) struct Timer<'a> {
    profile: &'a Profile,
    kind: Kind,
    flops: f64,
    bytes: f64,
    start: Instant,
}

impl Drop for Timer<'_> {
    fn drop(&mut self) {
        let seconds = self.start.elapsed().as_secs_f64();
        let mut all = self.profile.spent.lock().unwrap_or_else(PoisonError::into_inner);
        let spent = &mut all[self.kind as usize];
        spent.calls += 1;
        spent.seconds += seconds;
        spent.flops += self.flops;
        spent.bytes += self.bytes;
    }
}
