//! Losses of cross-encoders: of the logits that documents have for a query, with their gradients, as sentence-transformers defines them.
//! On the host, in f64: they are few numbers.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What is learned from the relevance of a query's documents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RankLoss {
    /// Each document by itself: its relevance, from 0 to 1, as a probability (BinaryCrossEntropyLoss).
    #[default]
    Bce,
    /// Each document by itself: its relevance, or a teacher's score, as the logit (MSELoss).
    Mse,
    /// Pairs of documents: the more relevant one shall have the higher logit (RankNetLoss).
    Ranknet,
    /// All documents of a query: the softmax of their logits shall be that of their relevance (ListNetLoss).
    Listnet,
}

impl RankLoss {
    /// How much there is to learn from a list: what its loss is a mean over.
    pub(crate) fn count(self, relevance: &[f32]) -> usize {
        match self {
            Self::Bce | Self::Mse => relevance.len(),
            Self::Ranknet => pairs(relevance).count(),
            Self::Listnet => 1,
        }
    }

    /// The loss of a list, summed over what is counted; adds `scale` times its gradient.
    pub(crate) fn of(self, logits: &[f32], relevance: &[f32], scale: f64, gradient: &mut [f32]) -> f64 {
        let mut add = |i: usize, slope: f64| gradient[i] += (scale * slope) as f32;
        let both = || logits.iter().zip(relevance).map(|(x, y)| (f64::from(*x), f64::from(*y))).enumerate();
        match self {
            Self::Bce => both()
                .map(|(i, (x, y))| {
                    add(i, sigmoid(x) - y);
                    softplus(x) - x * y
                })
                .sum(),
            Self::Mse => both()
                .map(|(i, (x, y))| {
                    add(i, 2.0 * (x - y));
                    (x - y) * (x - y)
                })
                .sum(),
            Self::Ranknet => pairs(relevance)
                .map(|(i, j)| {
                    // In bits, as there.
                    let difference = f64::from(logits[i]) - f64::from(logits[j]);
                    let slope = -sigmoid(-difference) / std::f64::consts::LN_2;
                    add(i, slope);
                    add(j, -slope);
                    softplus(-difference) / std::f64::consts::LN_2
                })
                .sum(),
            Self::Listnet => {
                let (logits, targets) = (log_softmax(logits), log_softmax(relevance));
                let each = logits.iter().zip(&targets).enumerate();
                each.map(|(i, (x, y))| {
                    add(i, x.exp() - y.exp());
                    -y.exp() * x
                })
                .sum()
            }
        }
    }
}

/// All pairs of which the first is more relevant.
fn pairs(relevance: &[f32]) -> impl Iterator<Item = (usize, usize)> {
    let all = (0..relevance.len()).flat_map(|i| (0..relevance.len()).map(move |j| (i, j)));
    all.filter(|(i, j)| relevance[*i] > relevance[*j])
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// ln(1 + eˣ), for any x.
fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

fn log_softmax(numbers: &[f32]) -> Vec<f64> {
    let most = numbers.iter().fold(f64::NEG_INFINITY, |most, x| most.max(f64::from(*x)));
    let all = numbers.iter().map(|x| (f64::from(*x) - most).exp()).sum::<f64>().ln() + most;
    numbers.iter().map(|x| f64::from(*x) - all).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Deserialize)]
    struct Case {
        name: RankLoss,
        lists: Vec<Vec<f32>>,
        logits: Vec<f32>,
        loss: f64,
        gradient: Vec<f32>,
    }

    #[test]
    fn losses_are_those_of_sentence_transformers() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests-data/rank-losses/golden.json");
        let cases: Vec<Case> = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        assert!(cases.len() > 10);
        for case in cases {
            let total: usize = case.lists.iter().map(|list| case.name.count(list)).sum();
            let (mut loss, mut start, mut gradient) = (0.0, 0, vec![0.0; case.logits.len()]);
            for list in &case.lists {
                let range = start..start + list.len();
                start = range.end;
                loss += case.name.of(&case.logits[range.clone()], list, 1.0 / total as f64, &mut gradient[range]);
            }
            let loss = loss / total as f64;
            assert!((loss - case.loss).abs() < 1e-6 * case.loss.max(1.0), "{:?}: {loss} {}", case.name, case.loss);
            let off = gradient.iter().zip(&case.gradient).fold(0.0, |off: f32, (a, b)| off.max((a - b).abs()));
            assert!(off < 1e-6, "{:?}: off by {off}", case.name);
        }
    }

    #[test]
    fn large_logits_stay_finite() {
        for loss in [RankLoss::Bce, RankLoss::Mse, RankLoss::Ranknet, RankLoss::Listnet] {
            let mut gradient = [0.0; 2];
            let value = loss.of(&[-1e4, 1e4], &[1.0, 0.0], 1.0, &mut gradient);
            assert!(value > 1.0 && value.is_finite() && gradient[0] < 0.0 && gradient[1] > 0.0, "{loss:?}: {value}");
        }
    }
}
