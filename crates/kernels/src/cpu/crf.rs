//! A linear-chain conditional random field (Lafferty, McCallum and Pereira 2001) on the logits of tokens: which label follows which
//! counts, too, and the best labels of a sequence are found together.
//!
//! Legend: B sequences, T tokens of all of them, K labels.
//!
//! The score of labels y for logits x is `start[y₀] + Σ x[t][yₜ] + Σ transitions[yₜ₋₁][yₜ] + end[y_last]`; a sequence's loss is the
//! logarithm of the sum of e^score over all labellings, less the score of the right one. Labels are few and sums run along the
//! sequence, so this is plain code in f64; sequences are divided among threads.

use std::ops::Range;

use super::scratch::{self, Purpose};
use super::simd::Element;
use super::{Cpu, SharedMut, chunks};

/// The definition for one sequence, in f64: over all labellings, one by one.
pub mod reference {
    use super::Field;

    /// All labellings of as many tokens as there are rows of logits, with their scores.
    pub fn labellings(field: &Field<'_, f64>, logits: &[f64]) -> Vec<(Vec<u32>, f64)> {
        let k = field.labels();
        let t = logits.len() / k;
        let one = |mut number: usize| {
            let mut labels = vec![0; t];
            for label in &mut labels {
                *label = (number % k) as u32;
                number /= k;
            }
            let score = score(field, logits, &labels);
            (labels, score)
        };
        (0..k.pow(t as u32)).map(one).collect()
    }

    /// The score of a labelling.
    pub fn score(field: &Field<'_, f64>, logits: &[f64], labels: &[u32]) -> f64 {
        let k = field.labels();
        let first = field.start[labels[0] as usize] + field.end[labels[labels.len() - 1] as usize];
        let own = labels.iter().enumerate().map(|(t, label)| logits[t * k + *label as usize]);
        let moves = labels.windows(2).map(|two| field.transitions[two[0] as usize * k + two[1] as usize]);
        first + own.sum::<f64>() + moves.sum::<f64>()
    }

    /// The loss, and its gradients with respect to the logits, start, end and transitions.
    pub fn loss(field: &Field<'_, f64>, logits: &[f64], right: &[u32]) -> (f64, [Vec<f64>; 4]) {
        let k = field.labels();
        let all = labellings(field, logits);
        let largest = all.iter().fold(f64::MIN, |most, (_, score)| most.max(*score));
        let total: f64 = all.iter().map(|(_, score)| (score - largest).exp()).sum();
        let mut d = [logits.len(), k, k, k * k].map(|n| vec![0.0; n]);
        let mut add = |labels: &[u32], share: f64| {
            for (t, label) in labels.iter().enumerate() {
                d[0][t * k + *label as usize] += share;
            }
            d[1][labels[0] as usize] += share;
            d[2][labels[labels.len() - 1] as usize] += share;
            labels.windows(2).for_each(|two| d[3][two[0] as usize * k + two[1] as usize] += share);
        };
        all.iter().for_each(|(labels, score)| add(labels, (score - largest).exp() / total));
        add(right, -1.0);
        (largest + total.ln() - score(field, logits, right), d)
    }
}

/// The parameters of a field.
#[derive(Clone, Copy, Debug)]
pub struct Field<'a, F = f32> {
    /// K.
    pub start: &'a [F],
    /// K.
    pub end: &'a [F],
    /// K×K, from row to column.
    pub transitions: &'a [F],
}

impl<F> Field<'_, F> {
    /// K.
    pub fn labels(&self) -> usize {
        self.start.len()
    }

    fn check(&self, logits: usize, offsets: &[u32]) {
        let k = self.labels();
        assert!(k > 0 && self.end.len() == k && self.transitions.len() == k * k, "crf: parameters of other sizes");
        assert!(offsets.windows(2).all(|w| w[0] <= w[1]), "crf: offsets descend");
        assert!(offsets.last().map_or(0, |end| *end as usize) * k == logits, "crf: one row of logits per token");
    }
}

/// Which labels may begin and end a sequence, and follow each other.
#[derive(Clone, Copy, Debug)]
pub struct Legal<'a> {
    /// K.
    pub start: &'a [bool],
    /// K.
    pub end: &'a [bool],
    /// K×K, from row to column.
    pub transitions: &'a [bool],
}

/// What an illegal step takes off a score: more than any other, so that a labelling has as few of them as there can be.
const ILLEGAL: f64 = 1e9;

/// Where the gradients of a field go; they are added to.
#[derive(Debug)]
pub struct Gradients<'a> {
    /// K.
    pub start: &'a mut [f32],
    /// K.
    pub end: &'a mut [f32],
    /// K×K.
    pub transitions: &'a mut [f32],
}

/// scale·Σ of the losses of all sequences. With `gradients` the logits (T×K) are replaced by their gradient.
pub fn loss<E: Element>(
    cpu: &Cpu,
    field: &Field<'_>,
    logits: &mut [E],
    offsets: &[u32],
    labels: &[u32],
    scale: f32,
    gradients: Option<Gradients<'_>>,
) -> f32 {
    let (k, b) = (field.labels(), offsets.len().saturating_sub(1));
    field.check(logits.len(), offsets);
    assert!(labels.len() * k == logits.len(), "crf: one label per token");
    assert!(labels.iter().all(|label| (*label as usize) < k), "crf: a label outside of the field");
    let (count, _) = chunks(b, 1);
    let numbers = 1 + k * (k + 2);
    let want = gradients.is_some();
    let logits = SharedMut::new(logits);
    scratch::with(Purpose::Outer, count * numbers, |partial: &mut [f64]| {
        let shared = SharedMut::new(partial);
        cpu.for_ranges(b, 1, |i, some| {
            // SAFETY: every range has its own partial sums.
            let partial = unsafe { shared.slice(i * numbers, numbers) };
            partial.fill(0.0);
            for sequence in some.filter(|i| offsets[*i] < offsets[i + 1]) {
                let tokens = offsets[sequence] as usize..offsets[sequence + 1] as usize;
                // SAFETY: every sequence is one task's.
                let logits = unsafe { logits.slice(tokens.start * k, tokens.len() * k) };
                with_space(logits.len(), k, |space| {
                    let sums = sums(field, logits, space);
                    partial[0] += sums.all - score(field, logits, &labels[tokens.clone()]);
                    if want {
                        differences(field, &sums, logits, &labels[tokens], scale, &mut partial[1..]);
                    }
                });
            }
        });
        let loss: f64 = partial.chunks_exact(numbers).map(|part| part[0]).sum();
        if let Some(to) = gradients {
            assert!(to.start.len() == k && to.end.len() == k && to.transitions.len() == k * k, "crf: lengths differ");
            for part in partial.chunks_exact(numbers) {
                let (start, rest) = part[1..].split_at(k);
                let (end, transitions) = rest.split_at(k);
                for (to, from) in [(&mut *to.start, start), (&mut *to.end, end), (&mut *to.transitions, transitions)] {
                    to.iter_mut().zip(from).for_each(|(to, x)| *to += (f64::from(scale) * x) as f32);
                }
            }
        }
        (f64::from(scale) * loss) as f32
    })
}

/// How likely each label of each token is (T×K).
pub fn probabilities<E: Element>(cpu: &Cpu, field: &Field<'_>, logits: &[E], offsets: &[u32], out: &mut [f32]) {
    let k = field.labels();
    field.check(logits.len(), offsets);
    assert!(out.len() == logits.len(), "crf: lengths differ");
    let out = SharedMut::new(out);
    for_sequences(cpu, offsets, |tokens| {
        let all = tokens.start * k..tokens.end * k;
        // SAFETY: every sequence is one task's.
        let out = unsafe { out.slice(all.start, all.len()) };
        with_space(all.len(), k, |space| {
            let sums = sums(field, &logits[all], space);
            let both = sums.before.iter().zip(sums.after);
            out.iter_mut().zip(both).for_each(|(to, (before, after))| *to = (before + after - sums.all).exp() as f32);
        });
    });
}

/// The likeliest labels of each sequence, by Viterbi's algorithm; of equals, the first. With `legal`, of those that have as few
/// illegal steps as there can be.
pub fn best<E: Element>(
    cpu: &Cpu,
    field: &Field<'_>,
    legal: Option<Legal<'_>>,
    logits: &[E],
    offsets: &[u32],
    out: &mut [u32],
) {
    let k = field.labels();
    field.check(logits.len(), offsets);
    assert!(out.len() * k == logits.len(), "crf: one label per token");
    let fits = |legal: &Legal<'_>| legal.start.len() == k && legal.end.len() == k && legal.transitions.len() == k * k;
    assert!(legal.as_ref().is_none_or(fits), "crf: legal steps of another field");
    let out = SharedMut::new(out);
    for_sequences(cpu, offsets, |tokens| {
        // SAFETY: every sequence is one task's.
        let out = unsafe { out.slice(tokens.start, tokens.len()) };
        best_of_one(field, legal, &logits[tokens.start * k..tokens.end * k], out);
    });
}

fn for_sequences(cpu: &Cpu, offsets: &[u32], each: impl Fn(Range<usize>) + Sync) {
    cpu.for_each(offsets.len().saturating_sub(1), |i| {
        let tokens = offsets[i] as usize..offsets[i + 1] as usize;
        if !tokens.is_empty() {
            each(tokens);
        }
    });
}

fn best_of_one<E: Element>(field: &Field<'_>, legal: Option<Legal<'_>>, logits: &[E], out: &mut [u32]) {
    let (k, t) = (field.labels(), out.len());
    let penalty = |allowed: Option<bool>| if allowed == Some(false) { ILLEGAL } else { 0.0 };
    // The best score of all beginnings that end in a label, and the label before it.
    scratch::with(Purpose::Kernel, 2 * t * k, |space: &mut [f64]| {
        let (scores, from) = space.split_at_mut(t * k);
        for label in 0..k {
            let own = f64::from(logits[label].to_f32()) + f64::from(field.start[label]);
            scores[label] = own - penalty(legal.map(|legal| legal.start[label]));
        }
        for token in 1..t {
            let (done, now) = scores.split_at_mut(token * k);
            let before = &done[(token - 1) * k..];
            for label in 0..k {
                let (mut most, mut place) = (f64::NEG_INFINITY, 0);
                for last in 0..k {
                    let step = f64::from(field.transitions[last * k + label]);
                    let score = before[last] + step - penalty(legal.map(|legal| legal.transitions[last * k + label]));
                    if score > most {
                        (most, place) = (score, last);
                    }
                }
                now[label] = most + f64::from(logits[token * k + label].to_f32());
                from[token * k + label] = place as f64;
            }
        }
        let total = |label: usize| {
            let end = f64::from(field.end[label]) - penalty(legal.map(|legal| legal.end[label]));
            scores[(t - 1) * k + label] + end
        };
        let mut label = (0..k).reduce(|best, i| if total(i) > total(best) { i } else { best }).unwrap_or(0);
        for token in (0..t).rev() {
            out[token] = label as u32;
            label = from[token * k + label] as usize;
        }
    });
}

/// Logarithms of sums over all beginnings and all ends of a sequence, T×K each.
struct Sums<'a> {
    /// Over the labels of the tokens up to each, which is included.
    before: &'a [f64],
    /// Over the labels of the tokens after each.
    after: &'a [f64],
    all: f64,
}

/// The sums of one sequence, which has a token at least, in work space of 2·T·K + K numbers.
fn sums<'a, E: Element>(field: &Field<'_>, logits: &[E], space: &'a mut [f64]) -> Sums<'a> {
    let (k, n) = (field.labels(), logits.len());
    let (before, rest) = space.split_at_mut(n);
    let (after, terms) = rest.split_at_mut(n);
    let logit = |at: usize| f64::from(logits[at].to_f32());
    let transition = |from: usize, to: usize| f64::from(field.transitions[from * k + to]);
    (0..k).for_each(|label| before[label] = logit(label) + f64::from(field.start[label]));
    for at in (k..n).step_by(k) {
        let (done, now) = before.split_at_mut(at);
        for label in 0..k {
            (0..k).for_each(|last| terms[last] = done[at - k + last] + transition(last, label));
            now[label] = logit(at + label) + log_sum(terms);
        }
    }
    (0..k).for_each(|label| after[n - k + label] = f64::from(field.end[label]));
    for at in (0..n - k).step_by(k).rev() {
        for label in 0..k {
            (0..k).for_each(|i| terms[i] = transition(label, i) + logit(at + k + i) + after[at + k + i]);
            after[at + label] = log_sum(terms);
        }
    }
    (0..k).for_each(|label| terms[label] = before[label] + after[label]);
    let all = log_sum(terms);
    Sums { before, after, all }
}

/// Lends the work space of [`sums`] for T·K logits.
fn with_space<R>(logits: usize, k: usize, body: impl FnOnce(&mut [f64]) -> R) -> R {
    scratch::with(Purpose::Kernel, 2 * logits + k, body)
}

/// The score of a labelling.
fn score<E: Element>(field: &Field<'_>, logits: &[E], labels: &[u32]) -> f64 {
    let k = field.labels();
    let own = labels.iter().zip(logits.chunks_exact(k)).map(|(label, row)| f64::from(row[*label as usize].to_f32()));
    let moves = labels.windows(2).map(|two| f64::from(field.transitions[two[0] as usize * k + two[1] as usize]));
    let ends = labels.first().zip(labels.last());
    let ends = ends
        .map_or(0.0, |(first, last)| f64::from(field.start[*first as usize]) + f64::from(field.end[*last as usize]));
    ends + own.sum::<f64>() + moves.sum::<f64>()
}

/// What the field expects less what is right: the gradient. Those of the logits take their place, those of start, end and
/// transitions are added to `d`.
fn differences<E: Element>(
    field: &Field<'_>,
    sums: &Sums<'_>,
    logits: &mut [E],
    labels: &[u32],
    scale: f32,
    d: &mut [f64],
) {
    let (k, t) = (field.labels(), labels.len());
    let (start, rest) = d.split_at_mut(k);
    let (end, transitions) = rest.split_at_mut(k);
    let hit = |yes: bool| f64::from(u8::from(yes));
    for token in 1..t {
        let (last, right) = (labels[token - 1] as usize, labels[token] as usize);
        for from in 0..k {
            for to in 0..k {
                let together = sums.before[(token - 1) * k + from]
                    + f64::from(field.transitions[from * k + to])
                    + f64::from(logits[token * k + to].to_f32())
                    + sums.after[token * k + to];
                transitions[from * k + to] += (together - sums.all).exp() - hit(from == last && to == right);
            }
        }
    }
    for (token, right) in labels.iter().enumerate() {
        for label in 0..k {
            let at = token * k + label;
            let difference = (sums.before[at] + sums.after[at] - sums.all).exp() - hit(label == *right as usize);
            logits[at] = E::from_f32((f64::from(scale) * difference) as f32);
            if token == 0 {
                start[label] += difference;
            }
            if token + 1 == t {
                end[label] += difference;
            }
        }
    }
}

/// ln Σ eˣ, without overflow.
fn log_sum(terms: &[f64]) -> f64 {
    let largest = terms.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if !largest.is_finite() {
        // All are −∞, or one is ∞; a NaN shows below.
        return if terms.iter().any(|x| x.is_nan()) { f64::NAN } else { largest };
    }
    largest + terms.iter().map(|x| (x - largest).exp()).sum::<f64>().ln()
}
