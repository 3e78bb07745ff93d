//! Losses of sentence vectors: plain functions of the vectors of a batch, with their gradients, as sentence-transformers defines
//! them. They run on the host in f64, whatever the encoder runs on: next to it they are little work.
//!
//! Legend: Q examples, H numbers of a vector, N vectors in this order: Q first texts, Q second ones (where the loss has them), then
//! the other texts (negatives), of which each belongs to one example. C candidates: second and other texts.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What F.pairwise_distance adds to each difference.
const EPSILON: f64 = 1e-6;

/// What is learned from the vectors of texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum SentenceLoss {
    /// Of all second texts and negatives in a batch, a first text shall be most like its own (MultipleNegativesRankingLoss).
    Ranking,
    /// The cosine of two texts shall be a given number (CosineSimilarityLoss).
    Cosine,
    /// Cosines shall have the order of the given numbers (CoSENTLoss).
    Cosent,
    /// Pairs labelled 1 shall be near, pairs labelled 0 at least a margin apart (ContrastiveLoss).
    Contrastive,
    /// A second text shall be nearer than a negative by a margin (TripletLoss).
    Triplet,
    /// The difference of two dot products shall be that of a teacher's scores (MarginMSELoss).
    MarginMse,
    /// Vectors shall be those of a teacher (MSELoss).
    Mse,
    /// A class from u, v and |u − v| (SoftmaxLoss of Reimers and Gurevych, 2019).
    Softmax,
}

/// How far apart two vectors are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Distance {
    /// 1 − their cosine.
    Cosine,
    /// The length of their difference.
    Euclidean,
    /// The sum of the differences' absolute values.
    Manhattan,
}

/// A loss with all that it is made of.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct VectorLoss {
    pub(crate) loss: SentenceLoss,
    /// What cosines are divided by.
    pub(crate) temperature: f64,
    pub(crate) margin: f64,
    pub(crate) distance: Distance,
    /// Whether second texts choose among first ones, too.
    pub(crate) symmetric: bool,
    /// Whether vectors get the length 1 first, as the finished model's do.
    pub(crate) normalise: bool,
    /// Numbers of the vectors' beginnings that shall do alone (Kusupati et al. 2022), each with a weight; empty: the whole.
    pub(crate) dims: Vec<(usize, f64)>,
}

/// What the vectors of a part of a batch are held against.
#[derive(Clone, Debug, Default)]
pub(crate) struct VectorTargets {
    /// Q.
    pub(crate) examples: usize,
    /// How many of an example's texts stand in columns: 1, or 2 with second texts.
    pub(crate) columns: usize,
    /// For each other text, its example.
    pub(crate) owners: Vec<usize>,
    /// The numbers of all examples: one each, for [`SentenceLoss::Mse`] a vector each, for [`SentenceLoss::MarginMse`] one for
    /// each negative in the order of `owners`, for [`SentenceLoss::Softmax`] a class each.
    pub(crate) numbers: Vec<f32>,
    /// Q×C: candidates that are not wrong, only not asked for; empty: none.
    pub(crate) never: Vec<bool>,
}

/// The layer on u, v and |u − v|: classes × (3H + 1), the bias last.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PairHead<'a> {
    pub(crate) classes: usize,
    pub(crate) weights: &'a [f32],
}

/// A loss and its gradients.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Found {
    pub(crate) loss: f64,
    /// N×H.
    pub(crate) gradient: Vec<f32>,
    /// That of the layer on pairs.
    pub(crate) head: Vec<f32>,
}

impl SentenceLoss {
    /// Whether other examples of a batch are what one is told from.
    pub(crate) fn is_in_batch(self) -> bool {
        matches!(self, Self::Ranking | Self::Cosent)
    }

    /// Whether an example needs a negative.
    pub(crate) fn needs_negatives(self) -> bool {
        matches!(self, Self::Triplet | Self::MarginMse)
    }

    /// Whether what it learns from is a number for a pair, as dev files have one.
    pub(crate) fn has_scores(self) -> bool {
        matches!(self, Self::Cosine | Self::Cosent | Self::Contrastive)
    }

    /// The margin that sentence-transformers has.
    pub(crate) fn usual_margin(self) -> f64 {
        if self == Self::Triplet { 5.0 } else { 0.5 }
    }

    /// The distance that sentence-transformers has.
    pub(crate) fn usual_distance(self) -> Distance {
        if self == Self::Triplet { Distance::Euclidean } else { Distance::Cosine }
    }

    /// Whether vectors have the length 1 unless something else is said: where cosines are compared.
    pub(crate) fn usually_normalised(self) -> bool {
        matches!(self, Self::Ranking | Self::Cosine | Self::Cosent | Self::Contrastive)
    }
}

impl VectorLoss {
    /// The mean over examples (of [`SentenceLoss::Cosent`], the one number of all), times `scale`.
    pub(crate) fn of(
        &self,
        vectors: &[f32],
        width: usize,
        to: &VectorTargets,
        head: PairHead<'_>,
        scale: f64,
    ) -> Found {
        let whole = [(width, 1.0)];
        // Matryoshka's beginnings are always normalised, as there.
        let (dims, normalise) = match self.dims.is_empty() {
            true => (&whole[..], self.normalise),
            false => (&self.dims[..], true),
        };
        let mut found = Found { loss: 0.0, gradient: vec![0.0; vectors.len()], head: vec![0.0; head.weights.len()] };
        let mut gradient = vec![0.0_f64; vectors.len()];
        for (dim, weight) in dims {
            let rows = Rows::new(vectors, width, *dim, normalise);
            let mut back = vec![0.0; rows.values.len()];
            let mut of_head = vec![0.0; head.weights.len()];
            let loss = self.on(&rows, to, head, (&mut back, &mut of_head));
            found.loss += scale * weight * loss;
            rows.back(&back, scale * weight, &mut gradient, width);
            found.head.iter_mut().zip(of_head).for_each(|(sum, x)| *sum += (scale * weight * x) as f32);
        }
        found.gradient.iter_mut().zip(gradient).for_each(|(to, from)| *to = from as f32);
        found
    }

    /// The loss of rows; adds to their gradient and to that of the layer on pairs.
    fn on(&self, rows: &Rows, to: &VectorTargets, head: PairHead<'_>, (back, of_head): Backs<'_>) -> f64 {
        let q = to.examples;
        let per_example = 1.0 / q.max(1) as f64;
        let target = |i: usize| f64::from(to.numbers.get(i).copied().unwrap_or(0.0));
        match self.loss {
            SentenceLoss::Ranking => self.ranking(rows, to, back),
            SentenceLoss::Cosent => self.cosent(rows, to, back),
            SentenceLoss::Cosine => {
                let each = (0..q).map(|i| {
                    let off = rows.cosine(i, q + i) - target(i);
                    rows.cosine_back(i, q + i, 2.0 * off * per_example, back);
                    off * off
                });
                each.sum::<f64>() * per_example
            }
            SentenceLoss::Contrastive => {
                let each = (0..q).map(|i| {
                    let (distance, near) = (rows.distance(self.distance, EPSILON, i, q + i), target(i));
                    let short = (self.margin - distance).max(0.0);
                    let slope = near * distance - (1.0 - near) * short;
                    rows.distance_back(self.distance, EPSILON, (i, q + i), slope * per_example, back);
                    0.5 * (near * distance * distance + (1.0 - near) * short * short)
                });
                each.sum::<f64>() * per_example
            }
            SentenceLoss::Triplet => {
                let per_triplet = 1.0 / to.owners.len().max(1) as f64;
                let each = to.owners.iter().enumerate().map(|(k, &i)| {
                    let [near, far] = [q + i, 2 * q + k];
                    let distance = |other: usize| rows.distance(self.distance, 0.0, i, other);
                    let loss = distance(near) - distance(far) + self.margin;
                    if loss > 0.0 {
                        rows.distance_back(self.distance, 0.0, (i, near), per_triplet, back);
                        rows.distance_back(self.distance, 0.0, (i, far), -per_triplet, back);
                    }
                    loss.max(0.0)
                });
                each.sum::<f64>() * per_triplet
            }
            SentenceLoss::MarginMse => {
                let per_pair = 1.0 / to.owners.len().max(1) as f64;
                let each = to.owners.iter().enumerate().map(|(k, &i)| {
                    let [near, far] = [q + i, 2 * q + k];
                    let off = rows.dot(i, near) - rows.dot(i, far) - target(k);
                    rows.dot_back(i, near, 2.0 * off * per_pair, back);
                    rows.dot_back(i, far, -2.0 * off * per_pair, back);
                    off * off
                });
                each.sum::<f64>() * per_pair
            }
            SentenceLoss::Mse => {
                let (h, own) = (rows.width, to.numbers.len() / q.max(1));
                let per_number = 1.0 / (to.columns * q * h).max(1) as f64;
                let mut loss = 0.0;
                for (row, (x, back)) in rows.values.chunks(h).zip(back.chunks_mut(h)).enumerate().take(to.columns * q) {
                    for (j, (x, back)) in x.iter().zip(back).enumerate() {
                        let off = x - target((row % q) * own + j);
                        *back += 2.0 * off * per_number;
                        loss += off * off * per_number;
                    }
                }
                loss
            }
            SentenceLoss::Softmax => softmax(rows, to, head, (back, of_head)),
        }
    }

    /// −ln of the softmax of cosine / temperature at each example's own; of both directions, their mean.
    fn ranking(&self, rows: &Rows, to: &VectorTargets, back: &mut [f64]) -> f64 {
        let (q, candidates) = (to.examples, to.examples + to.owners.len());
        let directions = if self.symmetric { 2.0 } else { 1.0 };
        let per_example = 1.0 / (directions * q.max(1) as f64);
        let units = rows.units();
        let mut slopes = vec![0.0; units.values.len()];
        let never = |i: usize, j: usize| to.never.get(i * candidates + j).copied().unwrap_or(false);
        let mut loss = 0.0;
        for i in 0..q {
            let of = |j: usize| (!never(i, j)).then_some(q + j);
            loss += self.choose(&units, i, i, candidates, of, per_example, &mut slopes);
            if self.symmetric {
                let of = |j: usize| (i == j || !never(j, i)).then_some(j);
                loss += self.choose(&units, q + i, i, q, of, per_example, &mut slopes);
            }
        }
        rows.units_back(&units, &slopes, back);
        loss * per_example
    }

    /// How badly row `i` chooses its `own` among `count` candidates, whose rows `of` gives; none where it may not be chosen.
    #[expect(clippy::too_many_arguments, reason = "one choice, with all that it needs")]
    fn choose(
        &self,
        units: &Rows,
        i: usize,
        own: usize,
        count: usize,
        of: impl Fn(usize) -> Option<usize>,
        slope: f64,
        slopes: &mut [f64],
    ) -> f64 {
        let scores: Vec<f64> =
            (0..count).map(|j| of(j).map_or(f64::NEG_INFINITY, |row| units.dot(i, row) / self.temperature)).collect();
        let all = log_sum(&scores);
        for (j, score) in scores.iter().enumerate() {
            let Some(row) = of(j) else { continue };
            let share = (score - all).exp() - if j == own { 1.0 } else { 0.0 };
            units.dot_back(i, row, slope * share / self.temperature, slopes);
        }
        all - scores[own]
    }

    /// ln(1 + Σ exp((cosine of a pair − that of a pair with a higher number) / temperature)).
    fn cosent(&self, rows: &Rows, to: &VectorTargets, back: &mut [f64]) -> f64 {
        let q = to.examples;
        let scores: Vec<f64> = (0..q).map(|i| rows.cosine(i, q + i) / self.temperature).collect();
        let lower = |i: usize, j: usize| to.numbers[i] < to.numbers[j];
        let pairs = (0..q).flat_map(|i| (0..q).map(move |j| (i, j))).filter(|(i, j)| lower(*i, *j));
        let differences: Vec<f64> = pairs.clone().map(|(i, j)| scores[i] - scores[j]).chain([0.0]).collect();
        let all = log_sum(&differences);
        let mut slopes = vec![0.0; q];
        for ((i, j), difference) in pairs.zip(&differences) {
            let share = (difference - all).exp();
            slopes[i] += share;
            slopes[j] -= share;
        }
        for (i, slope) in slopes.into_iter().enumerate() {
            rows.cosine_back(i, q + i, slope / self.temperature, back);
        }
        all
    }
}

/// Where gradients of rows and of the layer on pairs are added.
type Backs<'a> = (&'a mut [f64], &'a mut [f64]);

/// The cross-entropy of a linear layer on u, v and |u − v|.
fn softmax(rows: &Rows, to: &VectorTargets, head: PairHead<'_>, (back, of_head): Backs<'_>) -> f64 {
    let (q, h, columns) = (to.examples, rows.width, 3 * rows.width + 1);
    let per_example = 1.0 / q.max(1) as f64;
    let mut loss = 0.0;
    for i in 0..q {
        let (u, v) = (rows.row(i).to_vec(), rows.row(q + i).to_vec());
        let apart = u.iter().zip(&v).map(|(u, v)| (u - v).abs());
        let features: Vec<f64> = u.iter().chain(&v).copied().chain(apart).chain([1.0]).collect();
        let weight = |class: usize, k: usize| f64::from(head.weights[class * columns + k]);
        let logit = |class: usize| features.iter().enumerate().map(|(k, x)| weight(class, k) * x).sum::<f64>();
        let logits: Vec<f64> = (0..head.classes).map(logit).collect();
        let (all, own) = (log_sum(&logits), to.numbers[i] as usize);
        loss += all - logits[own];
        for (class, logit) in logits.iter().enumerate() {
            let slope = per_example * ((logit - all).exp() - if class == own { 1.0 } else { 0.0 });
            for k in 0..h {
                let sign = (u[k] - v[k]).signum() * f64::from(u8::from(u[k] != v[k]));
                back[i * h + k] += slope * (weight(class, k) + sign * weight(class, 2 * h + k));
                back[(q + i) * h + k] += slope * (weight(class, h + k) - sign * weight(class, 2 * h + k));
            }
            let row = &mut of_head[class * columns..(class + 1) * columns];
            row.iter_mut().zip(&features).for_each(|(sum, x)| *sum += slope * x);
        }
    }
    loss * per_example
}

/// ln Σ exp.
fn log_sum(numbers: &[f64]) -> f64 {
    let most = numbers.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    most + numbers.iter().map(|x| (x - most).exp()).sum::<f64>().ln()
}

/// Rows of numbers, and what they were divided by.
struct Rows {
    width: usize,
    values: Vec<f64>,
    /// The lengths that rows had; empty where they are as they came.
    lengths: Vec<f64>,
}

impl Rows {
    /// The first `dim` numbers of each vector, with the length 1 on demand.
    fn new(vectors: &[f32], width: usize, dim: usize, normalise: bool) -> Self {
        let cut = vectors.chunks(width.max(1)).flat_map(|row| row[..dim].iter().map(|x| f64::from(*x)));
        let plain = Self { width: dim, values: cut.collect(), lengths: Vec::new() };
        if normalise { plain.units() } else { plain }
    }

    fn row(&self, i: usize) -> &[f64] {
        &self.values[i * self.width..(i + 1) * self.width]
    }

    /// The same rows with the length 1.
    fn units(&self) -> Self {
        let lengths: Vec<f64> =
            self.values.chunks(self.width.max(1)).map(|row| dot(row, row).sqrt().max(1e-12)).collect();
        let values =
            self.values.chunks(self.width.max(1)).zip(&lengths).flat_map(|(row, l)| row.iter().map(move |x| x / l));
        Self { width: self.width, values: values.collect(), lengths }
    }

    /// Adds the gradient of rows whose `units` have the gradient `slopes`.
    fn units_back(&self, units: &Rows, slopes: &[f64], back: &mut [f64]) {
        let width = self.width.max(1);
        let each = units.values.chunks(width).zip(slopes.chunks(width)).zip(back.chunks_mut(width)).zip(&units.lengths);
        for (((unit, slope), back), length) in each {
            let along = dot(unit, slope);
            for ((back, slope), unit) in back.iter_mut().zip(slope).zip(unit) {
                *back += (slope - along * unit) / length;
            }
        }
    }

    /// Adds `scale` times a gradient of these rows to that of the vectors that they were made of.
    fn back(&self, gradient: &[f64], scale: f64, vectors: &mut [f64], width: usize) {
        let dim = self.width.max(1);
        for (i, (slope, to)) in gradient.chunks(dim).zip(vectors.chunks_mut(width.max(1))).enumerate() {
            let (along, length) = match self.lengths.get(i) {
                Some(length) => (dot(self.row(i), slope), *length),
                None => (0.0, 1.0),
            };
            for (k, slope) in slope.iter().enumerate() {
                to[k] += scale * (slope - along * self.values[i * dim + k]) / length;
            }
        }
    }

    fn dot(&self, i: usize, j: usize) -> f64 {
        dot(self.row(i), self.row(j))
    }

    fn dot_back(&self, i: usize, j: usize, slope: f64, back: &mut [f64]) {
        for (to, from) in [(i, j), (j, i)] {
            let to = &mut back[to * self.width..(to + 1) * self.width];
            to.iter_mut().zip(self.row(from)).for_each(|(to, x)| *to += slope * x);
        }
    }

    fn cosine(&self, i: usize, j: usize) -> f64 {
        let length = |i: usize| self.dot(i, i).sqrt().max(1e-12);
        self.dot(i, j) / (length(i) * length(j))
    }

    fn cosine_back(&self, i: usize, j: usize, slope: f64, back: &mut [f64]) {
        let length = |i: usize| self.dot(i, i).sqrt().max(1e-12);
        let (cosine, lengths) = (self.cosine(i, j), [length(i), length(j)]);
        for ((to, from), own) in [(i, j), (j, i)].into_iter().zip(lengths) {
            for k in 0..self.width {
                let (x, y) = (self.values[to * self.width + k], self.values[from * self.width + k]);
                back[to * self.width + k] += slope * (y / (lengths[0] * lengths[1]) - cosine * x / (own * own));
            }
        }
    }

    fn distance(&self, distance: Distance, added: f64, i: usize, j: usize) -> f64 {
        let differences = self.row(i).iter().zip(self.row(j)).map(|(x, y)| x - y + added);
        match distance {
            Distance::Cosine => 1.0 - self.cosine(i, j),
            Distance::Euclidean => differences.map(|d| d * d).sum::<f64>().sqrt(),
            Distance::Manhattan => differences.map(f64::abs).sum(),
        }
    }

    fn distance_back(&self, distance: Distance, added: f64, (i, j): (usize, usize), slope: f64, back: &mut [f64]) {
        if distance == Distance::Cosine {
            return self.cosine_back(i, j, -slope, back);
        }
        let length = self.distance(distance, added, i, j);
        for k in 0..self.width {
            let difference = self.values[i * self.width + k] - self.values[j * self.width + k] + added;
            let towards = match distance {
                // Where two vectors are one, no direction is better than another.
                Distance::Euclidean if length == 0.0 => 0.0,
                Distance::Euclidean => difference / length,
                _ if difference == 0.0 => 0.0,
                _ => difference.signum(),
            };
            back[i * self.width + k] += slope * towards;
            back[j * self.width + k] -= slope * towards;
        }
    }
}

/// In eight sums, which the compiler can keep in one register.
fn dot(x: &[f64], y: &[f64]) -> f64 {
    let (mut sums, mut rest) = ([0.0; 8], 0.0);
    let (long_x, short_x) = x.as_chunks::<8>();
    let (long_y, short_y) = y.as_chunks::<8>();
    for (x, y) in long_x.iter().zip(long_y) {
        sums.iter_mut().zip(x.iter().zip(y)).for_each(|(sum, (x, y))| *sum += x * y);
    }
    short_x.iter().zip(short_y).for_each(|(x, y)| rest += x * y);
    sums.iter().sum::<f64>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Deserialize)]
    struct Case {
        name: SentenceLoss,
        queries: usize,
        columns: usize,
        width: usize,
        temperature: Option<f64>,
        margin: Option<f64>,
        distance: Option<Distance>,
        #[serde(default)]
        symmetric: bool,
        #[serde(default)]
        normalise: bool,
        #[serde(default)]
        dims: Vec<(usize, f64)>,
        #[serde(default)]
        labels: Vec<f32>,
        #[serde(default)]
        head: Vec<f32>,
        #[serde(default)]
        head_gradient: Vec<f32>,
        vectors: Vec<f32>,
        loss: f64,
        gradient: Vec<f32>,
    }

    fn golden() -> Vec<Case> {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests-data/sentence-losses/golden.json");
        serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
    }

    fn near(got: &[f32], expected: &[f32], what: &str) {
        let most = expected.iter().fold(1e-3, |most: f32, x| most.max(x.abs()));
        let off = got.iter().zip(expected).fold(0.0, |off: f32, (got, expected)| off.max((got - expected).abs()));
        assert!(got.len() == expected.len() && off < 1e-6 * most, "{what}: off by {off} of {most}");
    }

    /// Values and gradients are those of sentence-transformers.
    #[test]
    fn losses_are_those_of_sentence_transformers() {
        let cases = golden();
        assert!(cases.len() > 35);
        for case in cases {
            let what = format!("{:?} {:?} {}×{} {:?}", case.name, case.distance, case.columns, case.queries, case.dims);
            let loss = VectorLoss {
                loss: case.name,
                temperature: case.temperature.unwrap_or(0.05),
                margin: case.margin.unwrap_or(case.name.usual_margin()),
                distance: case.distance.unwrap_or(case.name.usual_distance()),
                symmetric: case.symmetric,
                normalise: case.normalise,
                dims: case.dims,
            };
            // There, labels of several negatives stand example by example; here in the order of the vectors.
            let (q, others) = (case.queries, case.columns.saturating_sub(2));
            let numbers = match case.name {
                SentenceLoss::MarginMse => (0..others * q).map(|k| case.labels[(k % q) * others + k / q]).collect(),
                _ => case.labels,
            };
            let owners = (0..others * q).map(|k| k % q).collect();
            let columns = case.columns.min(2);
            let to = VectorTargets { examples: q, columns, owners, numbers, never: Vec::new() };
            let head = PairHead { classes: case.head.len() / (3 * case.width + 1), weights: &case.head };
            let found = loss.of(&case.vectors, case.width, &to, head, 1.0);
            assert!(
                (found.loss - case.loss).abs() < 2e-7 * case.loss.abs().max(1.0),
                "{what}: {} {}",
                found.loss,
                case.loss
            );
            near(&found.gradient, &case.gradient, &what);
            near(&found.head, &case.head_gradient, &what);
            // A part of a larger batch counts its share.
            let half = loss.of(&case.vectors, case.width, &to, head, 0.5);
            assert!((half.loss - 0.5 * found.loss).abs() < 1e-12 * found.loss.abs().max(1.0));
        }
    }

    /// A candidate that may not be chosen is as good as not there.
    #[test]
    fn some_may_not_be_chosen() {
        let vectors: Vec<f32> = (0..5 * 4).map(|i| (i as f32 * 1.3).sin()).collect();
        let loss = VectorLoss {
            loss: SentenceLoss::Ranking,
            temperature: 0.1,
            margin: 0.0,
            distance: Distance::Cosine,
            symmetric: false,
            normalise: false,
            dims: Vec::new(),
        };
        let head = PairHead { classes: 0, weights: &[] };
        let few = VectorTargets { examples: 2, columns: 2, ..VectorTargets::default() };
        let never = vec![false, false, true, false, false, true];
        let more = VectorTargets { owners: vec![0], never, ..few.clone() };
        let (few, more) = (loss.of(&vectors[..16], 4, &few, head, 1.0), loss.of(&vectors, 4, &more, head, 1.0));
        assert_eq!((few.loss, &few.gradient[..]), (more.loss, &more.gradient[..16]));
        assert_eq!(more.gradient[16..], [0.0; 4]);
    }
}
