//! What probes found, in numbers: by layer (Tenney et al. 2019b) and against a control task (Hewitt and Liang 2019).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// One probe.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProbeScore {
    /// The micro-averaged F1 over all targets and labels of the dev file.
    pub f1: f64,
    /// Of the labels that were predicted, the share that is right.
    pub precision: f64,
    /// Of the right labels, the share that was predicted.
    pub recall: f64,
    /// The weight of each layer that it reads, from the embeddings on; they add up to 1.
    pub mixing_weights: Vec<f64>,
    /// Σ ℓ·weight of layer ℓ.
    pub centre_of_gravity: f64,
    /// F1 of each label that the dev file has.
    pub labels: BTreeMap<String, f64>,
    /// After how many updates it was best.
    pub best_step: u64,
    /// Updates in all.
    pub steps: u64,
    /// Seconds of training.
    pub seconds: f64,
    /// Names the data.
    pub(super) data: String,
}

/// How a probe does on labels that are random, but fixed for the words of a span.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ControlScore {
    /// Its F1.
    pub f1: f64,
    /// By how much the F1 of the real task is above it.
    pub selectivity: f64,
}

/// All that was found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ProbeResults {
    /// What was probed for.
    pub task: &'static str,
    /// The encoder.
    pub model: String,
    /// The seed.
    pub seed: u64,
    /// Texts and targets that probes were trained on.
    pub train: Counted,
    /// Texts and targets that they were scored on.
    pub dev: Counted,
    /// Different labels.
    pub label_count: usize,
    /// The probe that reads all layers.
    #[serde(flatten)]
    pub full: ProbeScore,
    /// F1 of the probes that read layers 0 to ℓ, for each ℓ.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cumulative: Option<Cumulative>,
    /// The control task.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub control: Option<ControlScore>,
    /// The probe on an encoder with random weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub random_encoder: Option<ProbeScore>,
}

/// The size of a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Counted {
    /// Texts.
    pub texts: usize,
    /// Targets.
    pub targets: usize,
}

/// What each further layer adds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Cumulative {
    /// P(0) to P(L).
    pub f1: Vec<f64>,
    /// Δ(1) to Δ(L): by how much each layer raises it.
    pub differences: Vec<f64>,
    /// Σ ℓ·Δ(ℓ) / Σ Δ(ℓ) over the layers from the first on; none where they raise nothing together.
    pub expected_layer: Option<f64>,
}

impl Cumulative {
    /// From the scores of P(0) to P(L).
    pub fn new(f1: Vec<f64>) -> Self {
        let differences: Vec<f64> = f1.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let gained: f64 = differences.iter().sum();
        let weighted: f64 = (1..).zip(&differences).map(|(layer, gain)| f64::from(layer) * gain).sum();
        let expected_layer = (gained > 0.0).then(|| weighted / gained);
        Self { f1, differences, expected_layer }
    }
}

impl ControlScore {
    /// From the F1 of both tasks.
    pub fn new(real: f64, control: f64) -> Self {
        Self { f1: control, selectivity: real - control }
    }
}

/// The shares that layers have: the softmax of their weights.
pub(super) fn shares(weights: &[f32]) -> Vec<f64> {
    let most = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let powers: Vec<f64> = weights.iter().map(|weight| f64::from(weight - most).exp()).collect();
    let sum: f64 = powers.iter().sum();
    powers.iter().map(|power| power / sum).collect()
}

/// Σ ℓ·share of layer ℓ.
pub(super) fn centre_of_gravity(shares: &[f64]) -> f64 {
    (0..).zip(shares).map(|(layer, share)| f64::from(layer) * share).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-12, "{a} instead of {b}");
    }

    #[test]
    fn layers_by_hand() {
        // ln 1, ln 2, ln 5: shares of 1/8, 2/8 and 5/8.
        let shares = shares(&[0.0, 2.0_f32.ln(), 5.0_f32.ln()]);
        shares.iter().zip([0.125, 0.25, 0.625]).for_each(|(a, b)| assert!((a - b).abs() < 1e-7));
        close(centre_of_gravity(&[0.125, 0.25, 0.625]), 1.5);
        close(centre_of_gravity(&[0.25; 4]), 1.5);
        // Gains of 0.2, 0.1, −0.05 and 0.05: (0.2 + 0.2 − 0.15 + 0.2) / 0.3.
        let found = Cumulative::new(vec![0.5, 0.7, 0.8, 0.75, 0.8]);
        close(found.expected_layer.unwrap(), 1.5);
        found.differences.iter().zip([0.2, 0.1, -0.05, 0.05]).for_each(|(a, b)| close(*a, b));
        // What the embeddings know is no part of it.
        close(Cumulative::new(vec![0.1, 0.7, 0.8]).expected_layer.unwrap(), 0.8 / 0.7);
        assert_eq!(Cumulative::new(vec![0.5, 0.4, 0.5]).expected_layer, None);
        assert_eq!(Cumulative::new(vec![0.5]).expected_layer, None);
        let control = ControlScore::new(0.93, 0.71);
        close(control.selectivity, 0.22);
    }
}
