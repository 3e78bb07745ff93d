//! The tagger as a function of flat parameters: vectors of words in, a logit for each label out, and the backward pass.
//!
//! The way: layers are mixed (where that is wanted), the BiLSTM reads the words (or not), dropout, a matrix, and the loss: each
//! word for itself, or all of a sentence by the CRF.
//!
//! T words of all sentences of a batch, W numbers of a word's vector, n layers to mix, K labels.

use std::ops::Range;

use henson_infer::softmax;
use henson_kernels::cpu::dropout::Dropout;
use henson_kernels::cpu::gemm::{Finish, Matrix, Right, product};
use henson_kernels::cpu::reduce::column_sums;
use henson_kernels::philox::Stream;

use crate::bilstm::{BiLstm, Pair, Passed, Sequences};
use crate::crf::Crf;

/// Numbers the stream of first weights among all uses of the seed.
const FIRST_WEIGHTS: u32 = 0x7a67;

/// The sites of dropout: between layers from the first on, and before the matrix.
const BETWEEN: u32 = 0x7000;
const BEFORE_CLASSIFIER: u32 = 0x70ff;

/// The sizes of a tagger.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Network {
    /// Layers that lie side by side in a word's vector, to be mixed; 0: the vector is taken as it is.
    pub(crate) mixed: usize,
    /// W, after mixing.
    pub(crate) width: usize,
    pub(crate) lstm: Option<BiLstm>,
    pub(crate) labels: usize,
    pub(crate) crf: bool,
    pub(crate) dropout: f32,
}

/// Dropout of one update.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Noise {
    pub(crate) seed: u64,
    pub(crate) step: u32,
}

/// Where each part's parameters lie.
struct Parts {
    mix: Range<usize>,
    lstm: Range<usize>,
    weight: Range<usize>,
    bias: Range<usize>,
    crf: Range<usize>,
}

/// What a pass leaves for the backward pass.
struct Run {
    /// T×n·W, empty where nothing is mixed.
    layers: Vec<f32>,
    /// Of the BiLSTM.
    passed: Option<Passed>,
    /// What the matrix read, T×W′.
    read: Vec<f32>,
    /// T×K.
    logits: Vec<f32>,
}

impl Network {
    /// The parameters by name and shape, in the order of the flat slice.
    pub(crate) fn entries(&self) -> Vec<(String, Vec<usize>)> {
        let mut entries = Vec::new();
        if self.mixed > 0 {
            entries.push(("mix.weights".to_owned(), vec![self.mixed]));
            entries.push(("mix.gamma".to_owned(), vec![1]));
        }
        let within = |part: &str, (name, shape): (String, Vec<usize>)| (format!("{part}.{name}"), shape);
        entries.extend(self.lstm.iter().flat_map(BiLstm::entries).map(|entry| within("lstm", entry)));
        entries.push(("classifier.weight".to_owned(), vec![self.labels, self.read_width()]));
        entries.push(("classifier.bias".to_owned(), vec![self.labels]));
        if self.crf {
            entries.extend(Crf { labels: self.labels }.entries().into_iter().map(|entry| within("crf", entry)));
        }
        entries
    }

    pub(crate) fn len(&self) -> usize {
        self.parts().crf.end
    }

    /// What the matrix reads of a word.
    fn read_width(&self) -> usize {
        self.lstm.map_or(self.width, |lstm| 2 * lstm.hidden)
    }

    fn parts(&self) -> Parts {
        let mut end = 0;
        let mut next = |len: usize| {
            end += len;
            end - len..end
        };
        Parts {
            mix: next(if self.mixed > 0 { self.mixed + 1 } else { 0 }),
            lstm: next(self.lstm.map_or(0, |lstm| lstm.len())),
            weight: next(self.labels * self.read_width()),
            bias: next(self.labels),
            crf: next(if self.crf { Crf { labels: self.labels }.len() } else { 0 }),
        }
    }

    /// First parameters: as PyTorch draws those of an LSTM and of a matrix; an even mixture; transitions near 0.
    pub(crate) fn first_parameters(&self, seed: u64) -> Vec<f32> {
        let mut draws = Stream::new(seed, FIRST_WEIGHTS, 0);
        let mut uniform = |count: usize, bound: f32| -> Vec<f32> {
            (0..count).map(|_| (2.0 * draws.uniform() - 1.0) * bound).collect()
        };
        let root = |size: usize| 1.0 / (size as f32).sqrt();
        let parts = self.parts();
        let mut all = vec![0.0; parts.mix.len()];
        if let Some(gamma) = all.last_mut() {
            *gamma = 1.0;
        }
        all.extend(uniform(parts.lstm.len(), self.lstm.map_or(0.0, |lstm| root(lstm.hidden))));
        all.extend(uniform(parts.weight.len() + parts.bias.len(), root(self.read_width())));
        all.extend(uniform(parts.crf.len(), 0.1));
        all
    }

    fn between(&self, noise: Option<Noise>) -> impl Fn(usize) -> Option<Dropout> + use<> {
        let p = self.dropout;
        move |layer| noise.and_then(|noise| Dropout::new(p, noise.seed, noise.step, BETWEEN + layer as u32))
    }

    fn before_classifier(&self, noise: Option<Noise>) -> Option<Dropout> {
        noise.and_then(|noise| Dropout::new(self.dropout, noise.seed, noise.step, BEFORE_CLASSIFIER))
    }

    fn run(&self, pair: &Pair, p: &[f32], rows: Vec<f32>, sequences: &Sequences, noise: Option<Noise>) -> Run {
        let (parts, t, cpu) = (self.parts(), sequences.words(), &pair.first);
        let (layers, x) = match self.mixed {
            0 => (Vec::new(), rows),
            _ => {
                let mixed = mix(&rows, &p[parts.mix.clone()], self.width);
                (rows, mixed)
            }
        };
        let (mut passed, mut read) = (None, x);
        if let Some(lstm) = &self.lstm {
            let mut all = lstm.forward(pair, &p[parts.lstm], read, sequences, self.between(noise));
            read = std::mem::take(&mut all.output);
            passed = Some(all);
        }
        sequences.drop(cpu.isa(), self.before_classifier(noise), &mut read);
        let mut logits = vec![0.0; t * self.labels];
        let weight = Right::Plain(Matrix::new(&p[parts.weight], self.labels, self.read_width()).transposed());
        let finish = Finish { bias: Some(&p[parts.bias]), ..Finish::default() };
        product(cpu, Matrix::new(&read, t, self.read_width()), weight, &mut logits, self.labels, finish);
        Run { layers, passed, read, logits }
    }

    /// T×K, without dropout.
    pub(crate) fn logits(&self, pair: &Pair, parameters: &[f32], rows: Vec<f32>, sequences: &Sequences) -> Vec<f32> {
        self.run(pair, parameters, rows, sequences, None).logits
    }

    /// The loss of a batch, a mean over its words. Writes the gradients of all parameters.
    pub(crate) fn learn(
        &self,
        pair: &Pair,
        p: &[f32],
        rows: Vec<f32>,
        sequences: &Sequences,
        tags: &[u32],
        noise: Option<Noise>,
        gradients: &mut [f32],
    ) -> f64 {
        let (parts, t, k, cpu) = (self.parts(), sequences.words(), self.labels, &pair.first);
        assert!(tags.len() == t && gradients.len() == self.len(), "{} tags for {t} words", tags.len());
        gradients.fill(0.0);
        let run = self.run(pair, p, rows, sequences, noise);
        let mut d_logits = vec![0.0; t * k];
        let scale = 1.0 / t.max(1) as f64;
        let mut loss = 0.0;
        if self.crf {
            let crf = Crf { labels: k };
            let d = &mut gradients[parts.crf.clone()];
            for words in sequences.ranges() {
                let all = words.start * k..words.end * k;
                let (logits, d_logits) = (&run.logits[all.clone()], &mut d_logits[all]);
                loss += scale * crf.loss(&p[parts.crf.clone()], logits, &tags[words], scale, d, d_logits);
            }
        } else {
            for (word, tag) in tags.iter().enumerate() {
                let row = softmax(&run.logits[word * k..][..k]);
                loss -= scale * f64::from(row[*tag as usize].max(f32::MIN_POSITIVE)).ln();
                for (label, share) in row.iter().enumerate() {
                    let right = f32::from(u8::from(label == *tag as usize));
                    d_logits[word * k + label] = (share - right) * scale as f32;
                }
            }
        }

        column_sums(cpu, &d_logits, &mut gradients[parts.bias.clone()]);
        let (width, d_logits) = (self.read_width(), Matrix::new(&d_logits, t, k));
        let read = Right::Plain(Matrix::new(&run.read, t, width));
        product(cpu, d_logits.transposed(), read, &mut gradients[parts.weight.clone()], width, Finish::default());
        if self.lstm.is_none() && self.mixed == 0 {
            return loss;
        }
        let mut d = vec![0.0; t * width];
        let weight = Right::Plain(Matrix::new(&p[parts.weight], k, width));
        product(cpu, d_logits, weight, &mut d, width, Finish::default());
        sequences.drop(cpu.isa(), self.before_classifier(noise), &mut d);
        let mut d = Some(d);
        if let (Some(lstm), Some(passed), Some(dy)) = (&self.lstm, &run.passed, d.take()) {
            let (p, gradients) = (&p[parts.lstm.clone()], &mut gradients[parts.lstm]);
            let between = self.between(noise);
            d = lstm.backward(pair, p, passed, dy, sequences, between, gradients, self.mixed > 0);
        }
        if let (true, Some(d)) = (self.mixed > 0, d) {
            mix_backward(&run.layers, &p[parts.mix.clone()], self.width, &d, &mut gradients[parts.mix]);
        }
        loss
    }

    /// The tags of one sentence from its logits, and how likely each label of each word is, n×K.
    pub(crate) fn decode(&self, parameters: &[f32], logits: &[f32]) -> (Vec<u32>, Vec<f32>) {
        let k = self.labels;
        if self.crf {
            let (crf, own) = (Crf { labels: k }, &parameters[self.parts().crf]);
            return (crf.best(own, logits), crf.probabilities(own, logits));
        }
        let shares: Vec<f32> = logits.chunks_exact(k).flat_map(softmax).collect();
        let better =
            |row: &[f32]| (0..k).reduce(|best, i| if row[i] > row[best] { i } else { best }).unwrap_or(0) as u32;
        (shares.chunks_exact(k).map(better).collect(), shares)
    }
}

/// γ·Σ softmax(w)ᵢ·layerᵢ of each word; the parameters are the w and γ.
fn mix(rows: &[f32], parameters: &[f32], width: usize) -> Vec<f32> {
    let (weights, gamma) = parameters.split_at(parameters.len() - 1);
    let shares = softmax(weights);
    let mut mixed = vec![0.0; rows.len() / shares.len()];
    for (mixed, row) in mixed.chunks_exact_mut(width).zip(rows.chunks_exact(width * shares.len())) {
        for (share, layer) in shares.iter().zip(row.chunks_exact(width)) {
            mixed.iter_mut().zip(layer).for_each(|(sum, x)| *sum += gamma[0] * share * x);
        }
    }
    mixed
}

/// Adds to the gradients of the w and γ.
fn mix_backward(rows: &[f32], parameters: &[f32], width: usize, d: &[f32], gradients: &mut [f32]) {
    let (weights, gamma) = parameters.split_at(parameters.len() - 1);
    let shares = softmax(weights);
    // How much the loss asks for each layer.
    let mut asked = vec![0.0; shares.len()];
    for (d, row) in d.chunks_exact(width).zip(rows.chunks_exact(width * shares.len())) {
        for (asked, layer) in asked.iter_mut().zip(row.chunks_exact(width)) {
            *asked += d.iter().zip(layer).map(|(d, x)| f64::from(d * x)).sum::<f64>();
        }
    }
    let mean: f64 = shares.iter().zip(&asked).map(|(share, asked)| f64::from(*share) * asked).sum();
    for (i, share) in shares.iter().enumerate() {
        gradients[i] += (f64::from(gamma[0] * share) * (asked[i] - mean)) as f32;
    }
    gradients[shares.len()] += mean as f32;
}

#[cfg(test)]
mod tests {
    use super::*;
    use henson_kernels::cpu::Isa;
    use henson_kernels::cpu::optimizer::{Plan, Segment, Settings, adamw};
    use henson_kernels::cpu::reduce::sum_of_squares;
    use serde::Deserialize;

    /// What tools/golden/feature_tagger.py wrote.
    #[derive(Deserialize)]
    struct Golden {
        layers: usize,
        width: usize,
        hidden: usize,
        labels: usize,
        lengths: Vec<usize>,
        vectors: Vec<f32>,
        tags: Vec<u32>,
        parameters: Vec<f32>,
        logits: Vec<f32>,
        gradients: Vec<f32>,
        losses: Vec<f64>,
        parameters_after: Vec<f32>,
    }

    fn close(name: &str, got: &[f32], expected: &[f32], tolerance: f32) {
        assert_eq!(got.len(), expected.len(), "{name}");
        for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
            assert!((got - expected).abs() < tolerance, "{name} {i}: {got} instead of {expected}");
        }
    }

    #[test]
    fn logits_gradients_and_updates_of_pytorch() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests-data/feature-tagger/golden.json");
        let golden: Golden = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let lstm = BiLstm { input: golden.width, hidden: golden.hidden, layers: 2 };
        let (mixed, width, labels) = (golden.layers, golden.width, golden.labels);
        let network = Network { mixed, width, lstm: Some(lstm), labels, crf: false, dropout: 0.0 };
        assert_eq!(network.len(), golden.parameters.len());
        let (pair, sequences) = (Pair::new(Isa::best(), 2), Sequences::new(&golden.lengths));
        let mut p = golden.parameters.clone();
        close("logit", &network.logits(&pair, &p, golden.vectors.clone(), &sequences), &golden.logits, 1e-6);

        let mut segments = Vec::new();
        for (_, shape) in network.entries() {
            let start = segments.last().map_or(0, |last: &Segment| last.start + last.len);
            segments.push(Segment { start, len: shape.iter().product(), decay: shape.len() > 1, rate: 1.0 });
        }
        let plan = Plan::new(&segments, p.len());
        let (mut g, mut m, mut v) = (vec![0.0; p.len()], vec![0.0; p.len()], vec![0.0; p.len()]);
        for (step, expected) in golden.losses.iter().enumerate() {
            let loss = network.learn(&pair, &p, golden.vectors.clone(), &sequences, &golden.tags, None, &mut g);
            assert!((loss - expected).abs() < 1e-6, "step {step}: {loss} instead of {expected}");
            if step == 0 {
                close("gradient", &g, &golden.gradients, 1e-6);
            }
            let norm = sum_of_squares(&pair.first, &g).sqrt();
            assert!(norm > 0.1, "nothing is clipped");
            let settings = Settings {
                learning_rate: 1e-2,
                beta1: 0.9,
                beta2: 0.999,
                epsilon: 1e-8,
                weight_decay: 0.01,
                bias_correction: Some(step as u64 + 1),
                gradient_scale: 0.1 / (norm + 1e-6),
            };
            adamw(&pair.first, &plan, &mut p, &g, &mut m, &mut v, &settings, None);
        }
        close("parameter", &p, &golden.parameters_after, 1e-5);
    }

    /// The loss moves along its gradient, whatever parts there are and with dropout.
    #[test]
    fn every_part_has_its_way_back() {
        let (pair, sequences) = (Pair::new(Isa::best(), 1), Sequences::new(&[4, 0, 1, 3]));
        let noise = Some(Noise { seed: 5, step: 2 });
        for (mixed, lstm, crf) in
            [(0, false, false), (0, false, true), (3, false, false), (0, true, true), (3, true, true)]
        {
            let lstm = lstm.then_some(BiLstm { input: 6, hidden: 5, layers: 2 });
            let network = Network { mixed, width: 6, lstm, labels: 4, crf, dropout: 0.25 };
            let p = network.first_parameters(1);
            assert_eq!(p.len(), network.len());
            assert_eq!(network.entries().iter().map(|(_, s)| s.iter().product::<usize>()).sum::<usize>(), p.len());
            let mut draws = Stream::new(9, 9, 9);
            let rows: Vec<f32> = (0..8 * 6 * mixed.max(1)).map(|_| draws.normal()).collect();
            let tags = [0, 3, 1, 1, 2, 0, 0, 3];
            let loss = |p: &[f32], g: &mut [f32]| network.learn(&pair, p, rows.clone(), &sequences, &tags, noise, g);
            let (mut g, mut other) = (vec![0.0; p.len()], vec![0.0; p.len()]);
            loss(&p, &mut g);
            let mut start = 0;
            for (name, shape) in network.entries() {
                let part = start..start + shape.iter().product::<usize>();
                start = part.end;
                let squares: f64 = g[part.clone()].iter().map(|x| f64::from(*x).powi(2)).sum();
                let length = squares.sqrt().max(1e-6) as f32;
                let mut along = |by: f32| {
                    let mut p = p.clone();
                    part.clone().for_each(|i| p[i] += by * g[i] / length);
                    loss(&p, &mut other)
                };
                let slope = (along(5e-3) - along(-5e-3)) / 1e-2;
                let error = (slope - squares.sqrt()).abs();
                assert!(error < 1e-3 + 1e-2 * squares.sqrt(), "{name} of {network:?}: {slope}, {}", squares.sqrt());
            }
        }
    }
}
