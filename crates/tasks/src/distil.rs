//! Distillation: what is learned from teachers, and the losses of it. Plain functions of logits and vectors with their gradients, on the
//! host and in f64, whatever the model runs on: a task's logits are few numbers.
//!
//! Of a row of logits z, a teacher's distribution q at temperature T and a label y with the weight w:
//!
//! ```text
//! α·T²·KL(q ‖ softmax(z/T)) + (1 − α)·w·(−ln softmax(z)_y)          classes, tags, spans (Hinton et al. 2015)
//! α·T²·Σ KL(q ‖ σ(z/T))     + (1 − α)·w·BCE(z, y)                    several labels
//! α·(z − teacher's)²        + (1 − α)·(z − y)²                       numbers
//! ```
//!
//! The factor T² keeps the gradients of the first part as large as those of the second whatever T is. Documents by relevance have the
//! margins of Hofstätter et al. (2020), vectors the squared error or the cosine to the teacher's.

use henson_train::soft;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::read::Paths;

/// What is learned from teachers in a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DistilSettings {
    /// The teachers (`--teacher`): directories of models that were fine-tuned for the task, or names of such. Several are averaged:
    /// their probabilities, numbers or vectors.
    pub teachers: Vec<String>,
    /// Texts without labels to learn from the teachers on (`--transfer`), before the model is fine-tuned on `train`; without a `train`,
    /// that is all.
    #[serde(skip_serializing_if = "Paths::is_empty")]
    pub transfer: Paths,
    /// What logits are divided by on both sides, classes and tags alone.
    pub temperature: f64,
    /// The teachers' share of the loss; the labels have the rest. By default 0.5, and 1 where texts have no labels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alpha: Option<f64>,
    /// `embed`: how far a vector is from the teacher's.
    pub vectors: VectorDistance,
    /// Number of epochs on `transfer`; by default as the run's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub epochs: Option<f64>,
    /// Peak learning rate on `transfer`; by default as the run's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub learning_rate: Option<f64>,
    /// A directory that keeps what teachers say from run to run (`--cache`), under a checksum of all that it depends on. Without one, they
    /// are asked about every batch.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub cache: String,
}

impl Default for DistilSettings {
    fn default() -> Self {
        Self {
            teachers: Vec::new(),
            transfer: Paths::default(),
            temperature: 2.0,
            alpha: None,
            vectors: VectorDistance::default(),
            epochs: None,
            learning_rate: None,
            cache: String::new(),
        }
    }
}

/// The teachers' share where labels are there as well and nobody says it.
const USUAL_ALPHA: f64 = 0.5;

impl DistilSettings {
    /// The teachers' share of the loss of texts that have labels, or have none.
    pub(crate) fn share(&self, labelled: bool) -> f64 {
        if labelled { self.alpha.unwrap_or(USUAL_ALPHA) } else { 1.0 }
    }
}

/// How far a vector is from the teacher's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum VectorDistance {
    /// The mean of squared differences (MSELoss of sentence-transformers).
    #[default]
    Mse,
    /// 1 − the cosine.
    Cosine,
}

/// What a form's logits are, as teachers are followed in them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lesson {
    /// A row of K classes for each sequence.
    Classes,
    /// One logit for each sequence of an instance, which are the classes.
    Choices,
    /// K logits for each sequence, each yes or no.
    Several,
    /// One number for each sequence.
    Number,
    /// A row of K classes for each token; a teacher's row of NaN is none.
    Tokens,
    /// Two columns, each a distribution over the tokens of a sequence.
    Spans,
    /// One logit for each document of a query.
    Margins,
    /// Vectors, not logits.
    Vectors,
}

/// What both parts of a loss are multiplied by.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shares {
    pub(crate) temperature: f64,
    /// α over the number of rows with a teacher in the step.
    pub(crate) soft: f64,
    /// (1 − α) over what all labels of the step count.
    pub(crate) hard: f64,
}

/// The two parts of a loss, each with its share: the teachers' and the labels'.
pub(crate) type Parts = [f64; 2];

/// The loss of a row of logits; adds to its gradient. The label comes with what it counts.
pub(crate) fn classes(
    logits: &[f64],
    teacher: Option<&[f32]>,
    label: Option<(usize, f64)>,
    shares: Shares,
    gradient: &mut [f64],
) -> Parts {
    let mut loss = [0.0; 2];
    if let Some(teacher) = teacher {
        loss[0] = soft::divergence(logits, teacher, shares.temperature, shares.soft, gradient);
    }
    if let Some((label, weight)) = label {
        loss[1] = soft::cross_entropy(logits, label, shares.hard * weight, gradient);
    }
    loss
}

/// The loss of logits that are each yes or no: a mean over the labels. Targets come with what each counts.
pub(crate) fn several(
    logits: &[f64],
    teacher: Option<&[f32]>,
    targets: Option<&[(f64, f64)]>,
    shares: Shares,
    gradient: &mut [f64],
) -> Parts {
    let mut loss = [0.0; 2];
    let per_label = 1.0 / logits.len().max(1) as f64;
    if let Some(teacher) = teacher {
        let t = shares.temperature;
        let scale = shares.soft * t * t * per_label;
        let part = |q: f64, log: f64| if q > 0.0 { q * (q.ln() - log) } else { 0.0 };
        for ((z, q), back) in logits.iter().zip(teacher).zip(gradient.iter_mut()) {
            let (z, q) = (z / t, f64::from(*q));
            loss[0] += scale * (part(q, -softplus(-z)) + part(1.0 - q, -softplus(z)));
            *back += scale * (sigmoid(z) - q) / t;
        }
    }
    for ((z, (y, weight)), back) in logits.iter().zip(targets.unwrap_or_default()).zip(gradient) {
        let scale = shares.hard * weight * per_label;
        loss[1] += scale * (softplus(*z) - z * y);
        *back += scale * (sigmoid(*z) - y);
    }
    loss
}

/// The loss of a number.
pub(crate) fn number(
    logit: f64,
    teacher: Option<f32>,
    label: Option<f32>,
    shares: Shares,
    gradient: &mut f64,
) -> Parts {
    let mut part = |target: Option<f32>, share: f64| {
        let off = target.map_or(0.0, |target| logit - f64::from(target));
        *gradient += share * 2.0 * off;
        share * off * off
    };
    [part(teacher, shares.soft), part(label, shares.hard)]
}

/// Pairs of a query's documents whose margins are compared: of different relevance where that is known, else all.
pub(crate) fn margins(documents: usize, relevance: Option<&[f32]>) -> Vec<(usize, usize)> {
    let all = (0..documents).flat_map(|i| (i + 1..documents).map(move |j| (i, j)));
    all.filter(|(i, j)| relevance.is_none_or(|relevance| relevance[*i] != relevance[*j])).collect()
}

/// Σ ((zᵢ − zⱼ) − (tᵢ − tⱼ))² over pairs of documents, times `scale`; adds to the gradient.
pub(crate) fn margin_mse(
    logits: &[f64],
    teacher: &[f32],
    pairs: &[(usize, usize)],
    scale: f64,
    gradient: &mut [f64],
) -> f64 {
    let off = |(i, j): (usize, usize)| logits[i] - logits[j] - (f64::from(teacher[i]) - f64::from(teacher[j]));
    let mut loss = 0.0;
    for pair in pairs {
        let off = off(*pair);
        loss += scale * off * off;
        gradient[pair.0] += 2.0 * scale * off;
        gradient[pair.1] -= 2.0 * scale * off;
    }
    loss
}

impl VectorDistance {
    /// How far a vector is from its teacher's, times `scale`; adds to its gradient.
    pub(crate) fn of(self, vector: &[f64], teacher: &[f32], scale: f64, gradient: &mut [f64]) -> f64 {
        let both = || vector.iter().copied().zip(teacher.iter().map(|t| f64::from(*t)));
        match self {
            Self::Mse => {
                let scale = scale / vector.len().max(1) as f64;
                gradient.iter_mut().zip(both()).for_each(|(back, (v, t))| *back += 2.0 * scale * (v - t));
                scale * both().map(|(v, t)| (v - t) * (v - t)).sum::<f64>()
            }
            Self::Cosine => soft::cosine_distance(vector, teacher, scale, gradient),
        }
    }
}

/// A vector brought to a teacher's width by a matrix (outputs × inputs).
pub(crate) fn projected(weights: &[f32], vector: &[f64]) -> Vec<f64> {
    let row = |row: &[f32]| row.iter().zip(vector).map(|(w, x)| f64::from(*w) * x).sum();
    weights.chunks_exact(vector.len().max(1)).map(row).collect()
}

/// The backward: from the gradient of the outputs to those of the vector and of the matrix, to which it adds.
pub(crate) fn projected_back(
    weights: &[f32],
    vector: &[f64],
    outputs: &[f64],
    (to_vector, to_weights): (&mut [f64], &mut [f64]),
) {
    let width = vector.len().max(1);
    let rows = weights.chunks_exact(width).zip(to_weights.chunks_exact_mut(width));
    for ((weights, to_weights), slope) in rows.zip(outputs) {
        for ((w, x), (to_x, to_w)) in weights.iter().zip(vector).zip(to_vector.iter_mut().zip(to_weights)) {
            *to_x += slope * f64::from(*w);
            *to_w += slope * x;
        }
    }
}

/// Probabilities of logits that are each yes or no, at a temperature.
pub(crate) fn softened_each(logits: &[f32], temperature: f64) -> Vec<f32> {
    logits.iter().map(|x| sigmoid(f64::from(*x) / temperature) as f32).collect()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// ln(1 + eˣ), for any x.
fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

#[cfg(test)]
mod tests {
    use super::*;
    use soft::softened;

    #[derive(Deserialize)]
    struct Case {
        name: String,
        temperature: f64,
        alpha: f64,
        /// Rows of logits or vectors.
        rows: Vec<Vec<f32>>,
        /// The teacher's logits or vectors.
        teacher: Vec<Vec<f32>>,
        labels: Vec<Option<usize>>,
        numbers: Vec<Vec<f32>>,
        weights: Vec<f64>,
        projection: Vec<f32>,
        loss: f64,
        gradient: Vec<Vec<f64>>,
        projection_gradient: Vec<f64>,
    }

    impl Case {
        /// The loss, the gradient of each row and that of the projection.
        fn found(&self, rows: &[Vec<f64>], projection: &[f32]) -> (f64, Vec<Vec<f64>>, Vec<f64>) {
            let (n, t) = (rows.len() as f64, self.temperature);
            let (mut loss, mut to_projection) = (0.0, vec![0.0; projection.len()]);
            let mut gradient: Vec<Vec<f64>> = rows.iter().map(|row| vec![0.0; row.len()]).collect();
            let labelled: f64 = self.labels.iter().flatten().map(|label| self.weights[*label]).sum();
            for (i, row) in rows.iter().enumerate() {
                let (teacher, back) = (&self.teacher[i], &mut gradient[i][..]);
                let counted = if self.name == "classes" { labelled } else { n };
                let shares = Shares { temperature: t, soft: self.alpha / n, hard: (1.0 - self.alpha) / counted };
                let parts = match self.name.as_str() {
                    "classes" => {
                        let label = self.labels[i].map(|label| (label, self.weights[label]));
                        classes(row, Some(&softened(teacher, t)), label, shares, back)
                    }
                    "several" => {
                        let numbers = self.numbers[i].iter().zip(&self.weights);
                        let of = |(y, w): (&f32, &f64)| (f64::from(*y), if *y > 0.0 { *w } else { 1.0 });
                        let targets: Vec<(f64, f64)> = numbers.map(of).collect();
                        several(row, Some(&softened_each(teacher, t)), Some(&targets), shares, back)
                    }
                    "numbers" => number(row[0], Some(teacher[0]), Some(self.numbers[i][0]), shares, &mut back[0]),
                    "margins" => {
                        let count: usize = self.teacher.iter().map(|list| margins(list.len(), None).len()).sum();
                        let pairs = margins(row.len(), None);
                        [margin_mse(row, teacher, &pairs, 1.0 / count as f64, back), 0.0]
                    }
                    name => {
                        let distance = if name == "mse" { VectorDistance::Mse } else { VectorDistance::Cosine };
                        let seen = if projection.is_empty() { row.clone() } else { projected(projection, row) };
                        let mut slopes = vec![0.0; seen.len()];
                        let loss = distance.of(&seen, teacher, 1.0 / n, &mut slopes);
                        match projection.is_empty() {
                            true => back.copy_from_slice(&slopes),
                            false => projected_back(projection, row, &slopes, (back, &mut to_projection)),
                        }
                        [loss, 0.0]
                    }
                };
                loss += parts[0] + parts[1];
            }
            (loss, gradient, to_projection)
        }

        fn rows(&self) -> Vec<Vec<f64>> {
            self.rows.iter().map(|row| row.iter().map(|x| f64::from(*x)).collect()).collect()
        }
    }

    fn cases() -> Vec<Case> {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests-data/distil/golden.json");
        serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
    }

    /// Values and gradients of the formulas in PyTorch (tools/golden/distil.py), in f64 there; the teacher's distributions are
    /// rounded to f32 here, as they are kept.
    #[test]
    fn losses_are_those_of_pytorch() {
        let cases = cases();
        assert!(cases.len() >= 20);
        for case in &cases {
            let (loss, gradient, projection) = case.found(&case.rows(), &case.projection);
            let near = |a: f64, b: f64| (a - b).abs() < 1e-6 * b.abs().max(1.0);
            assert!(near(loss, case.loss), "{}: {loss}, expected {}", case.name, case.loss);
            let found = gradient.iter().flatten().chain(&projection);
            let expected = case.gradient.iter().flatten().chain(&case.projection_gradient);
            assert_eq!(found.clone().count(), expected.clone().count());
            for (a, b) in found.zip(expected) {
                assert!(near(*a, *b), "{} (T {}): {a}, expected {b}", case.name, case.temperature);
            }
        }
    }

    #[test]
    fn gradients_are_differences() {
        const STEP: f64 = 1e-5;
        for case in cases() {
            let rows = case.rows();
            let (_, gradient, _) = case.found(&rows, &case.projection);
            for i in 0..rows.len() {
                for j in 0..rows[i].len() {
                    let at = |step: f64| {
                        let mut rows = rows.clone();
                        rows[i][j] += step;
                        case.found(&rows, &case.projection).0
                    };
                    let slope = (at(STEP) - at(-STEP)) / (2.0 * STEP);
                    assert!((slope - gradient[i][j]).abs() < 1e-6, "{} {i} {j}: {slope} {}", case.name, gradient[i][j]);
                }
            }
        }
    }

    #[test]
    fn far_logits_stay_finite() {
        let shares = Shares { temperature: 1.0, soft: 1.0, hard: 1.0 };
        let mut back = [0.0; 2];
        let loss = classes(&[1e30, -1e30], Some(&[0.5, 0.5]), Some((0, 1.0)), shares, &mut back);
        assert!(loss.iter().chain(&back).all(|x| x.is_finite()), "{loss:?} {back:?}");
        assert_eq!(softened(&[f32::MAX, -f32::MAX], 0.5), [1.0, 0.0]);
        let mut back = [0.0];
        assert_eq!(VectorDistance::Cosine.of(&[0.0], &[1.0], 1.0, &mut back), 1.0);
        assert!(back[0].is_finite());
    }
}
