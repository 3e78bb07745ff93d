//! Learning rates over the steps of a run.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::{Result, TrainError};

/// The course of the learning rate after the warm-up, in which it rises from 0 in a line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ScheduleKind {
    /// Linear decay to 0 after the warm-up, as `get_linear_schedule_with_warmup` of `transformers`.
    #[default]
    Linear,
    /// Linear decay to 0 over all steps, with a drop where the warm-up ends: as in Google's code (optimization.py 31-54).
    PaperLinear,
    /// Half a cosine to 0 after the warm-up.
    Cosine,
    /// Constant after the warm-up.
    Constant,
    /// Constant until the last `decay_steps`, then linear decay to 0.
    WarmupStableDecay,
    /// Constant until the last `decay_steps`, then decay to 0 as 1 − √x, as in Warner et al. (2024).
    WarmupStableSqrt,
    /// Decay as √(warm-up/step) after the warm-up, as in Vaswani et al. (2017), whose peak is 1/√(width·warm-up).
    InverseSqrt,
    /// The same without a rise: constant in the warm-up, as T5 is trained, whose peak is 1/√warm-up.
    ConstantInverseSqrt,
    /// Constant for `constant_epochs`, then divided by `decay_factor` after each epoch, as in Zaremba et al. (2014).
    ByEpoch,
}

/// The constants of [`ScheduleKind::ByEpoch`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ByEpoch {
    /// Steps of an epoch.
    pub steps: u64,
    /// Epochs before the first division.
    pub constant: u64,
    /// What the rate is divided by.
    pub factor: f64,
}

impl Default for ByEpoch {
    fn default() -> Self {
        Self { steps: 1, constant: 0, factor: 1.0 }
    }
}

/// A learning rate for each of a number of steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// Its course.
    pub kind: ScheduleKind,
    /// The highest rate.
    pub peak: f64,
    /// Steps in which the rate rises.
    pub warmup_steps: u64,
    /// Steps of the decay of [`ScheduleKind::WarmupStableDecay`] and [`ScheduleKind::WarmupStableSqrt`].
    pub decay_steps: u64,
    /// All steps.
    pub steps: u64,
    /// The constants of a decay by epochs.
    pub by_epoch: ByEpoch,
}

impl ScheduleKind {
    /// Refuses a decay by epochs, which runs of pre-training alone have the constants of.
    pub fn check_task(self) -> Result<()> {
        match self {
            Self::ByEpoch => {
                let expected = "another schedule: the rate is divided after epochs in pre-training alone";
                Err(TrainError::setting("schedule", "by-epoch", expected))
            }
            _ => Ok(()),
        }
    }
}

impl Schedule {
    /// That of a task: `warmup` is a share of all steps, and a tenth of them is the decay's, where there is one.
    pub fn of_task(kind: ScheduleKind, peak: f64, warmup: f64, steps: u64) -> Self {
        let warmup_steps = (steps as f64 * warmup) as u64;
        Self { kind, peak, warmup_steps, decay_steps: steps / 10, steps, by_epoch: ByEpoch::default() }
    }

    /// The rate of update number `step`, from 0. The first of a warm-up is 0, as in both Google's and Hugging Face's code.
    pub fn rate(&self, step: u64) -> f64 {
        let (k, warmup, total) = (step as f64, self.warmup_steps as f64, self.steps as f64);
        if step < self.warmup_steps {
            let rises = self.kind != ScheduleKind::ConstantInverseSqrt;
            return self.peak * if rises { k / warmup } else { 1.0 };
        }
        let left = |from: f64| ((total - k) / (total - from).max(1.0)).clamp(0.0, 1.0);
        let last_part = left((total - self.decay_steps as f64).max(warmup));
        self.peak
            * match self.kind {
                ScheduleKind::Linear => left(warmup),
                ScheduleKind::PaperLinear => left(0.0),
                ScheduleKind::Cosine => 0.5 * (1.0 - (std::f64::consts::PI * left(warmup)).cos()),
                ScheduleKind::Constant => 1.0,
                ScheduleKind::WarmupStableDecay => last_part,
                ScheduleKind::WarmupStableSqrt => 1.0 - (1.0 - last_part).sqrt(),
                // Without a warm-up, the first step has the peak.
                ScheduleKind::ByEpoch => {
                    let ByEpoch { steps, constant, factor } = self.by_epoch;
                    // The epoch at hand, from 1, is the first to be divided where it is the first behind the constant ones.
                    let divisions = (step / steps.max(1) + 1).saturating_sub(constant.max(1));
                    factor.powf(-(divisions as f64))
                }
                ScheduleKind::InverseSqrt | ScheduleKind::ConstantInverseSqrt => (warmup.max(1.0) / k.max(1.0)).sqrt(),
            }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates() {
        use ScheduleKind::*;
        let by_epoch = super::ByEpoch { steps: 20, constant: 2, factor: 2.0 };
        // kind, step, expected of a peak of 1 with 10 steps of warm-up, 20 of decay, 110 in all
        let cases = [
            (Linear, 0, 0.0),
            (Linear, 5, 0.5),
            (Linear, 10, 1.0),
            (Linear, 60, 0.5),
            (Linear, 109, 0.01),
            (Linear, 110, 0.0),
            (Linear, 500, 0.0),
            (PaperLinear, 5, 0.5),
            (PaperLinear, 9, 0.9),
            (PaperLinear, 10, 100.0 / 110.0),
            (PaperLinear, 55, 0.5),
            (Cosine, 10, 1.0),
            (Cosine, 60, 0.5),
            (Cosine, 110, 0.0),
            (Constant, 5, 0.5),
            (Constant, 109, 1.0),
            (WarmupStableDecay, 89, 1.0),
            (WarmupStableDecay, 90, 1.0),
            (WarmupStableDecay, 100, 0.5),
            (WarmupStableDecay, 110, 0.0),
            (WarmupStableSqrt, 5, 0.5),
            (WarmupStableSqrt, 90, 1.0),
            (WarmupStableSqrt, 95, 0.5),
            (WarmupStableSqrt, 110, 0.0),
            (InverseSqrt, 0, 0.0),
            (InverseSqrt, 5, 0.5),
            (InverseSqrt, 10, 1.0),
            (InverseSqrt, 40, 0.5),
            (InverseSqrt, 1000, 0.1),
            (ConstantInverseSqrt, 0, 1.0),
            (ConstantInverseSqrt, 9, 1.0),
            (ConstantInverseSqrt, 10, 1.0),
            (ConstantInverseSqrt, 90, 1.0 / 3.0),
            (ByEpoch, 5, 0.5),
            (ByEpoch, 39, 1.0),
            (ByEpoch, 40, 0.5),
            (ByEpoch, 59, 0.5),
            (ByEpoch, 60, 0.25),
        ];
        for (kind, step, expected) in cases {
            let schedule = Schedule { kind, peak: 1.0, warmup_steps: 10, decay_steps: 20, steps: 110, by_epoch };
            let got = schedule.rate(step);
            assert!((got - expected).abs() < 1e-12, "{kind:?} at {step}: {got}, expected {expected}");
        }
    }

    /// The formulas of T5 and of Vaswani et al., from peaks that are theirs.
    #[test]
    fn inverse_roots_are_those_of_the_papers() {
        let schedule = |kind, peak, warmup_steps| Schedule {
            kind,
            peak,
            warmup_steps,
            decay_steps: 0,
            steps: 1 << 19,
            by_epoch: ByEpoch::default(),
        };
        let t5 = schedule(ScheduleKind::ConstantInverseSqrt, 1e-2, 10_000);
        let width = 512_f64;
        let vaswani = schedule(ScheduleKind::InverseSqrt, (width * 4000.0).powf(-0.5), 4000);
        for step in [1_u64, 100, 3999, 4000, 4001, 9999, 10_000, 10_001, 123_456, 500_000] {
            let k = step as f64;
            let expected = [1.0 / k.max(10_000.0).sqrt(), width.powf(-0.5) * k.powf(-0.5).min(k * 4000_f64.powf(-1.5))];
            for (schedule, expected) in [t5, vaswani].iter().zip(expected) {
                let got = schedule.rate(step);
                assert!(
                    (got / expected - 1.0).abs() < 1e-12,
                    "{:?} at {step}: {got}, expected {expected}",
                    schedule.kind
                );
            }
        }
    }

    #[test]
    fn degenerate_lengths_stay_finite() {
        for kind in [
            ScheduleKind::Linear,
            ScheduleKind::PaperLinear,
            ScheduleKind::Cosine,
            ScheduleKind::Constant,
            ScheduleKind::WarmupStableDecay,
            ScheduleKind::WarmupStableSqrt,
            ScheduleKind::InverseSqrt,
            ScheduleKind::ConstantInverseSqrt,
            ScheduleKind::ByEpoch,
        ] {
            for (warmup_steps, decay_steps, steps) in [(0, 0, 0), (5, 0, 5), (9, 9, 5), (0, 9, 1)] {
                let by_epoch = ByEpoch { steps, constant: 1, factor: 1.5 };
                let schedule = Schedule { kind, peak: 1.0, warmup_steps, decay_steps, steps, by_epoch };
                for step in 0..12 {
                    assert!((0.0..=1.0).contains(&schedule.rate(step)), "{schedule:?} at {step}");
                }
            }
        }
    }
}
