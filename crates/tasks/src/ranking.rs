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
    /// Pairs of documents, weighted by what their exchange would change in nDCG (LambdaLoss with NDCGLoss2++).
    Lambda,
    /// All documents of a query: the order of their relevance shall be likely, one drawn after the other (Plackett-Luce; ListMLELoss).
    Listmle,
    /// The same, with the first places counting most (PListMLELoss).
    Plistmle,
    /// The most relevant document against each other one: the difference of their logits shall be that of a teacher's scores
    /// (MarginMSELoss).
    MarginMse,
}

impl RankLoss {
    /// How much there is to learn from a list: what its loss is a mean over.
    pub(crate) fn count(self, relevance: &[f32]) -> usize {
        match self {
            Self::Bce | Self::Mse => relevance.len(),
            Self::Ranknet | Self::Lambda => pairs(relevance).count(),
            Self::Listnet | Self::Listmle | Self::Plistmle => 1,
            Self::MarginMse => relevance.len().saturating_sub(1),
        }
    }

    /// Whether it compares documents of a query, so that one alone says nothing.
    pub(crate) fn compares(self) -> bool {
        !matches!(self, Self::Bce | Self::Mse)
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
            Self::Ranknet | Self::Lambda => {
                let exchanges = (self == Self::Lambda).then(|| Exchanges::new(logits, relevance));
                let each = pairs(relevance).map(|(i, j)| {
                    // In bits, as there.
                    let weight = exchanges.as_ref().map_or(1.0, |all| all.weight(i, j)) / std::f64::consts::LN_2;
                    let difference = f64::from(logits[i]) - f64::from(logits[j]);
                    let slope = -weight * sigmoid(-difference);
                    add(i, slope);
                    add(j, -slope);
                    weight * softplus(-difference)
                });
                each.sum()
            }
            Self::Listmle | Self::Plistmle => likelihood(logits, relevance, self == Self::Plistmle, add),
            Self::MarginMse => {
                let Some(&best) = order(relevance).first() else { return 0.0 };
                let off = |i: usize| f64::from(logits[best] - logits[i]) - f64::from(relevance[best] - relevance[i]);
                let each = (0..logits.len()).filter(|i| *i != best).map(|i| {
                    add(best, 2.0 * off(i));
                    add(i, -2.0 * off(i));
                    off(i) * off(i)
                });
                each.sum()
            }
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

/// What the exchange of two documents would change in nDCG: NDCGLoss2++ of Wang et al. (2018), with their μ of 10.
struct Exchanges {
    /// The place of each document in the order of the logits, from 1.
    places: Vec<usize>,
    /// 2^relevance − 1, over the best DCG.
    gains: Vec<f64>,
}

impl Exchanges {
    const MU: f64 = 10.0;

    fn new(logits: &[f32], relevance: &[f32]) -> Self {
        let mut places = vec![0; logits.len()];
        order(logits).into_iter().enumerate().for_each(|(place, document)| places[document] = place + 1);
        let gain = |relevance: f32| f64::from(relevance.max(0.0)).exp2() - 1.0;
        let best = order(relevance).into_iter().enumerate();
        let best: f64 = best.map(|(place, document)| gain(relevance[document]) / Self::discount(place + 1)).sum();
        Self { places, gains: relevance.iter().map(|x| gain(*x) / best.max(1e-10)).collect() }
    }

    fn discount(place: usize) -> f64 {
        ((1 + place) as f64).log2()
    }

    fn weight(&self, i: usize, j: usize) -> f64 {
        let (first, second) = (self.places[i], self.places[j]);
        let change = |a: usize, b: usize| (1.0 / Self::discount(a) - 1.0 / Self::discount(b)).abs();
        let apart = first.abs_diff(second);
        (Self::MU * change(apart, apart + 1) + change(first, second)) * (self.gains[i] - self.gains[j]).abs()
    }
}

/// −ln of the likelihood that documents are drawn in the order of their relevance, each by the softmax over those that are left
/// (Xia et al. 2008); where `first_most`, the i-th of n has the weight 2^(n − i) − 1, over the sum of all (Lan et al. 2014).
fn likelihood(logits: &[f32], relevance: &[f32], first_most: bool, mut add: impl FnMut(usize, f64)) -> f64 {
    let (order, n) = (order(relevance), logits.len() as i32);
    // All divided by 2^n, so that long lists stay finite.
    let weight = |i: i32| (-f64::from(i)).exp2() - (-f64::from(n)).exp2();
    let all: f64 = (1..=n).map(weight).sum();
    let mut loss = 0.0;
    for (i, document) in order.iter().enumerate() {
        let weight = match first_most {
            true if all > 0.0 => weight(i as i32 + 1) / all,
            true => 0.0,
            false => 1.0,
        };
        let left: Vec<f32> = order[i..].iter().map(|other| logits[*other]).collect();
        let left = log_softmax(&left);
        loss -= weight * left[0];
        add(*document, -weight);
        order[i..].iter().zip(&left).for_each(|(other, x)| add(*other, weight * x.exp()));
    }
    loss
}

/// Numbers of documents, those with the highest values first; equals stay as they are.
fn order(values: &[f32]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|a, b| values[*b].total_cmp(&values[*a]));
    order
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
        assert!(cases.len() > 20);
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
        use RankLoss::{Bce, Lambda, Listmle, Listnet, MarginMse, Mse, Plistmle, Ranknet};
        for loss in [Bce, Mse, Ranknet, Listnet, Lambda, Listmle, Plistmle, MarginMse] {
            let mut gradient = [0.0; 2];
            let value = loss.of(&[-1e4, 1e4], &[1.0, 0.0], 1.0, &mut gradient);
            assert!(value > 1.0 && value.is_finite() && gradient[0] < 0.0 && gradient[1] > 0.0, "{loss:?}: {value}");
        }
    }
}
