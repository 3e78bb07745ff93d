//! A linear head on a frozen model, for few rows: logistic regression (a softmax, or a sigmoid for each of several labels) or
//! ridge regression on the mean of the last layer's vectors.
//!
//! What is saved is a plain model with a sequence head. Such a head reads the first token alone, so the encoder gets one layer
//! more, which does nothing but average, and what stands between it and the head lets the mean through ([`Model::average`]).
//!
//! N rows, D features of a row, K outputs.

use henson_checkpoint::{Config, LoadOptions, ModelDirectory, open_parameters};
use henson_infer as infer;
use henson_models::{Batch, Head, LinearHead, Model, Sequence};
use henson_tensor::{Builder, DType, Device, Parameters, Pass, Tape};
use henson_train::{ModelFiles, Result as TrainResult};

use super::plan::Plan;
use super::start::copy_encoder;
use crate::prepare::Instance;

/// The weight of the squared weights (half of their sum) beside the summed loss, for features with a variance of 1. Within a point of
/// the best of 1 to 10,000 on TREC with 4, 16 and 50 rows a class and 50 classes of 5.
const L2: f64 = 10.0;

/// The same for several labels: each is rare, and with more weight none would reach a probability of a half.
const L2_OF_SEVERAL: f64 = 1.0;

/// Sequences through the encoder at a time.
const TOGETHER: usize = 64;

/// A model with a linear head.
pub(super) struct LinearModel {
    pub(super) model: Model,
    pub(super) parameters: Parameters,
    config: Config,
}

impl LinearModel {
    /// Fits a head on the plan's training rows.
    pub(super) fn fit(plan: &Plan, device: &Device) -> TrainResult<Self> {
        let (mut model, head) = Self::frozen(plan, device)?;
        let features = model.features(head, plan.training_instances())?;
        let problem = Problem::new(plan, features);
        let fitted = problem.solve();
        let (weights, biases) = fitted.split_at(problem.k * problem.d);
        head.set(&mut model.parameters, weights, biases)?;
        model.parameters.refresh()?;
        Ok(model)
    }

    /// The model that a head is fitted on: the encoder of the plan's directory and a layer that averages.
    fn frozen(plan: &Plan, device: &Device) -> TrainResult<(Self, LinearHead)> {
        let recipe = &plan.recipe;
        let weights = ModelDirectory::open(recipe.directory())?.weights()?;
        let family = plan.config.model.family();
        let mut encoder = Builder::new();
        Model::build(&mut encoder, &plan.config.model, Head::Encoder)?;
        let options = LoadOptions::new_head(&|_| false);
        let encoder = open_parameters(&weights, &family.naming, encoder, device, DType::F32, &options, recipe.seed)?.0;

        let mut config = plan.config.clone();
        config.model.set_layers(config.model.sizes().num_hidden_layers + 1);
        let mut builder = Builder::new();
        let model = Model::build(&mut builder, &config.model, Head::Sequence { labels: config.task.labels() })?;
        let mut parameters = builder.finish(device, DType::from(recipe.dtype))?;
        parameters.initialise(recipe.seed)?;
        copy_encoder(family, &encoder, &mut parameters)?;
        let head = model.average(&mut parameters)?;
        parameters.refresh()?;
        Ok((Self { model, parameters, config }, head))
    }

    /// What is saved beside the weights.
    pub(super) fn files(&self, plan: &Plan) -> TrainResult<ModelFiles> {
        Ok(ModelFiles { config: self.config.to_json()?, ..plan.model_files()? })
    }

    /// What the head sees of each instance, with a variance of about 1: N×D.
    fn features(&self, head: LinearHead, instances: &[Instance]) -> TrainResult<Vec<f64>> {
        let mut tape = Tape::new();
        let mut features = Vec::new();
        for some in instances.chunks(TOGETHER) {
            let sequences = some.iter().flat_map(|instance| &instance.sequences);
            let sequences: Vec<Sequence<'_>> = sequences.map(|(ids, segments)| Sequence { ids, segments }).collect();
            let batch = Batch::new(self.parameters.device(), &self.config.model, &sequences, 0)?;
            let mut pass = Pass::inference(&mut tape, &self.parameters);
            let first = self.model.encode_rows(&mut pass, &batch, batch.layout.starts())?;
            features.extend(first.tensor().to_f32()?.into_iter().map(|mean| head.feature(mean)));
        }
        Ok(features)
    }
}

/// What outputs are held against.
enum Loss {
    /// One of K classes: the cross-entropy of a softmax.
    Classes,
    /// Each of K labels: cross-entropies of sigmoids.
    Several,
    /// A number: half of the squared error.
    Number,
}

/// The sum over rows of weight·loss(features·Wᵀ + b, target), plus l2/2·‖W‖².
struct Problem {
    loss: Loss,
    l2: f64,
    d: usize,
    k: usize,
    /// N×D.
    features: Vec<f64>,
    /// N×K: 1 where a label is right; a number.
    targets: Vec<f64>,
    /// N×K.
    weights: Vec<f64>,
}

impl Problem {
    fn new(plan: &Plan, features: Vec<f64>) -> Self {
        let (instances, k) = (plan.training_instances(), plan.config.task.labels());
        let class_weights = plan.class_weights();
        let of = |label: usize| class_weights.get(label).map_or(1.0, |weight| f64::from(*weight));
        let (mut targets, mut weights) = (Vec::new(), Vec::new());
        for instance in instances {
            // One of the labels, several, or a number.
            match instance.labels[..] {
                [Some(class)] => {
                    targets.extend((0..k).map(|label| f64::from(label == class as usize)));
                    weights.extend(vec![of(class as usize); k]);
                }
                _ => {
                    let several = plan.task.form.problem == Some(infer::Problem::MultiLabel);
                    let weight = |label, right: f32| if several && right > 0.0 { of(label) } else { 1.0 };
                    targets.extend(instance.numbers.iter().map(|right| f64::from(*right)));
                    weights.extend(instance.numbers.iter().enumerate().map(|(label, right)| weight(label, *right)));
                }
            }
        }
        let loss = match plan.task.form.problem {
            Some(infer::Problem::MultiLabel) => Loss::Several,
            Some(infer::Problem::Regression) => Loss::Number,
            _ => Loss::Classes,
        };
        let l2 = if matches!(loss, Loss::Several) { L2_OF_SEVERAL } else { L2 };
        Self { loss, l2, d: features.len() / instances.len().max(1), k, features, targets, weights }
    }

    /// The loss at K×D weights and K biases, and its gradient.
    fn at(&self, point: &[f64], gradient: &mut [f64]) -> f64 {
        let Self { d, k, l2, .. } = *self;
        let (matrix, bias) = point.split_at(k * d);
        gradient[..k * d].iter_mut().zip(matrix).for_each(|(g, w)| *g = l2 * w);
        gradient[k * d..].fill(0.0);
        let mut sum = 0.5 * l2 * matrix.iter().map(|w| w * w).sum::<f64>();
        let mut outputs = vec![0.0; k];
        let rows = self.features.chunks_exact(d).zip(self.targets.chunks_exact(k)).zip(self.weights.chunks_exact(k));
        for ((x, target), weight) in rows {
            for (output, (w, b)) in outputs.iter_mut().zip(matrix.chunks_exact(d).zip(bias)) {
                *output = b + dot(w, x);
            }
            sum += self.loss.of(&mut outputs, target, weight);
            for (class, slope) in outputs.iter().enumerate() {
                gradient[k * d + class] += slope;
                add(&mut gradient[class * d..(class + 1) * d], *slope, x);
            }
        }
        sum
    }

    /// The minimum, by L-BFGS: the problem is convex. Every sum is in one order, so the result is the same everywhere.
    fn solve(&self) -> Vec<f64> {
        let size = self.k * (self.d + 1);
        let mut start = vec![0.0; size];
        if matches!(self.loss, Loss::Number) {
            start[size - 1] = self.targets.iter().sum::<f64>() / self.targets.len().max(1) as f64;
        }
        minimise(start, |point, gradient| self.at(point, gradient))
    }
}

impl Loss {
    /// The loss of a row, its outputs replaced by the gradient.
    fn of(&self, outputs: &mut [f64], target: &[f64], weight: &[f64]) -> f64 {
        let mut sum = 0.0;
        match self {
            Self::Classes => {
                let most = outputs.iter().copied().fold(f64::MIN, f64::max);
                let total: f64 = outputs.iter().map(|x| (x - most).exp()).sum();
                for ((output, target), weight) in outputs.iter_mut().zip(target).zip(weight) {
                    sum += weight * target * (most + total.ln() - *output);
                    *output = weight * ((*output - most).exp() / total - target);
                }
            }
            Self::Several => {
                for ((output, target), weight) in outputs.iter_mut().zip(target).zip(weight) {
                    let x = *output;
                    sum += weight * (x.max(0.0) - x * target + (-x.abs()).exp().ln_1p());
                    *output = weight * (1.0 / (1.0 + (-x).exp()) - target);
                }
            }
            Self::Number => {
                for (output, target) in outputs.iter_mut().zip(target) {
                    *output -= target;
                    sum += 0.5 * *output * *output;
                }
            }
        }
        sum
    }
}

/// The minimum of a smooth convex function (Nocedal and Wright 2006, algorithm 7.5), from `at`, which fills in the gradient.
fn minimise(mut point: Vec<f64>, mut at: impl FnMut(&[f64], &mut [f64]) -> f64) -> Vec<f64> {
    const MEMORY: usize = 10;
    const STEPS: usize = 300;
    let mut gradient = vec![0.0; point.len()];
    let mut value = at(&point, &mut gradient);
    let enough = 1e-4 * largest(&gradient).max(1e-3);
    // Differences of points and of gradients, and one over their product.
    let mut memory: Vec<(Vec<f64>, Vec<f64>, f64)> = Vec::new();
    for _ in 0..STEPS {
        if largest(&gradient) <= enough {
            break;
        }
        let mut direction: Vec<f64> = gradient.iter().map(|g| -g).collect();
        let mut factors = Vec::new();
        for (moved, turned, rho) in memory.iter().rev() {
            let factor = rho * dot(moved, &direction);
            add(&mut direction, -factor, turned);
            factors.push(factor);
        }
        let scale = memory.last().map_or(1.0 / dot(&gradient, &gradient).sqrt(), |(_, y, rho)| 1.0 / (rho * dot(y, y)));
        direction.iter_mut().for_each(|x| *x *= scale);
        for ((moved, turned, rho), factor) in memory.iter().zip(factors.iter().rev()) {
            let back = factor - rho * dot(turned, &direction);
            add(&mut direction, back, moved);
        }
        // Halved until the value falls by a share of what the slope promises.
        let slope = dot(&gradient, &direction);
        let (mut length, mut next, mut new) = (1.0, point.clone(), vec![0.0; point.len()]);
        let fallen = loop {
            next.copy_from_slice(&point);
            add(&mut next, length, &direction);
            let reached = at(&next, &mut new);
            if reached <= value + 1e-4 * length * slope {
                break Some(reached);
            }
            length *= 0.5;
            if length < 1e-10 {
                break None;
            }
        };
        let Some(reached) = fallen else { break };
        let moved: Vec<f64> = next.iter().zip(&point).map(|(a, b)| a - b).collect();
        let turned: Vec<f64> = new.iter().zip(&gradient).map(|(a, b)| a - b).collect();
        let product = dot(&moved, &turned);
        if product > 1e-12 {
            memory.push((moved, turned, 1.0 / product));
        }
        if memory.len() > MEMORY {
            memory.remove(0);
        }
        (point, gradient, value) = (next, new, reached);
    }
    point
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    // Eight sums, so that the compiler may use vectors; always the same ones.
    let mut sums = [0.0; 8];
    let (chunks, others) = (a.chunks_exact(8), b.chunks_exact(8));
    let rest: f64 = chunks.remainder().iter().zip(others.remainder()).map(|(x, y)| x * y).sum();
    for (x, y) in chunks.zip(others) {
        (0..8).for_each(|i| sums[i] += x[i] * y[i]);
    }
    sums.iter().sum::<f64>() + rest
}

fn add(to: &mut [f64], factor: f64, from: &[f64]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += factor * from);
}

fn largest(numbers: &[f64]) -> f64 {
    numbers.iter().fold(0.0, |most, x| x.abs().max(most))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// scikit-learn's `LogisticRegression(C=0.1)`, on three classes and on one label, and `Ridge(alpha=10)`.
    #[test]
    fn minima_are_those_of_scikit_learn() {
        let features =
            vec![1.0, 0.5, -1.0, 0.2, -1.0, 0.3, -0.7, 1.2, 0.4, 1.5, 0.1, 0.9, -1.1, -0.3, -0.6, 0.4, 0.8, 1.3];
        let check = |loss, k: usize, targets: &[f64], expected: &[f64]| {
            let (targets, weights) = (targets.to_vec(), vec![1.0; targets.len()]);
            let problem = Problem { loss, l2: 10.0, d: 3, k, features: features.clone(), targets, weights };
            let found = problem.solve();
            // A softmax does not see what all biases have in common.
            let (shift, of) =
                ((found[k * 3..].iter().sum::<f64>() - expected[k * 3..].iter().sum::<f64>()) / k as f64, k * 3);
            for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
                let found = if k > 1 && i >= of { found - shift } else { *found };
                assert!((found - expected).abs() < 1e-3, "{i}: {found}, scikit-learn has {expected}");
            }
        };
        let classes: Vec<f64> =
            [0, 1, 2, 0, 1, 2].iter().flat_map(|c| (0..3).map(move |k| f64::from(k == *c))).collect();
        let softmax = [
            0.179082, 0.016131, -0.052463, -0.112788, -0.15494, -0.05855, -0.066294, 0.138809, 0.111013, -0.030578,
            0.068977, -0.0384,
        ];
        check(Loss::Classes, 3, &classes, &softmax);
        check(Loss::Several, 1, &[1.0, 0.0, 1.0, 1.0, 0.0, 0.0], &[0.103419, 0.107266, -0.036104, -0.037854]);
        check(Loss::Number, 1, &[1.0, 2.0, 3.0, 0.5, -1.0, 4.0], &[0.022944, 0.254551, 0.346229, 1.448193]);
    }
}
