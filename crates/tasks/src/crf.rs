//! A linear-chain conditional random field (Lafferty, McCallum and Pereira 2001) on the logits of words: which tag follows which
//! counts, too, and the best tags of a sentence are found together.
//!
//! The score of tags y for logits x is start[y₀] + Σ x[t][yₜ] + Σ transition[yₜ₋₁][yₜ] + end[y_last]; a sentence's loss is the
//! logarithm of the sum of e^score over all tags, less the score of the right ones. Sums are in f64. The paper has no CRF; the
//! taggers that it compares with do.
//!
//! K labels, T words of a sentence.

use std::ops::Range;

/// A field of K labels. Its parameters are one flat slice: start (K), end (K), transitions (K×K, from row to column).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Crf {
    pub(crate) labels: usize,
}

/// Logarithms of sums over all beginnings and all ends of a sentence, T×K each.
struct Sums {
    /// Over the tags of the words up to each, which is included.
    before: Vec<f64>,
    /// Over the tags of the words after each.
    after: Vec<f64>,
    all: f64,
}

impl Crf {
    /// The parameters in the order of the flat slice, by the names of the `pytorch-crf` package.
    pub(crate) fn entries(&self) -> Vec<(String, Vec<usize>)> {
        let k = self.labels;
        vec![
            ("start_transitions".to_owned(), vec![k]),
            ("end_transitions".to_owned(), vec![k]),
            ("transitions".to_owned(), vec![k, k]),
        ]
    }

    pub(crate) fn len(&self) -> usize {
        self.labels * (self.labels + 2)
    }

    /// The loss of one sentence. Adds `scale` times its gradients to those of the parameters, and writes those of the logits.
    pub(crate) fn loss(
        &self,
        parameters: &[f32],
        logits: &[f32],
        tags: &[u32],
        scale: f64,
        d_parameters: &mut [f32],
        d_logits: &mut [f32],
    ) -> f64 {
        let (k, t) = (self.labels, tags.len());
        if t == 0 {
            return 0.0;
        }
        let sums = self.sums(parameters, logits);
        let (start, end, transitions) = self.parts();
        // The gradient is what the field expects less what is right.
        let mut d = vec![0.0; self.len()];
        let mut score = f64::from(parameters[start][tags[0] as usize]);
        score += f64::from(parameters[end.clone()][tags[t - 1] as usize]);
        for (word, tag) in tags.iter().enumerate() {
            let tag = *tag as usize;
            score += f64::from(logits[word * k + tag]);
            for label in 0..k {
                let expected = (sums.before[word * k + label] + sums.after[word * k + label] - sums.all).exp();
                let difference = expected - f64::from(u8::from(label == tag));
                d_logits[word * k + label] = (scale * difference) as f32;
                if word == 0 {
                    d[label] += difference;
                }
                if word + 1 == t {
                    d[end.start + label] += difference;
                }
            }
            if word == 0 {
                continue;
            }
            let last = tags[word - 1] as usize;
            score += f64::from(parameters[transitions.start + last * k + tag]);
            for from in 0..k {
                for to in 0..k {
                    let at = transitions.start + from * k + to;
                    let together = sums.before[(word - 1) * k + from]
                        + f64::from(parameters[at])
                        + f64::from(logits[word * k + to])
                        + sums.after[word * k + to];
                    d[at] += (together - sums.all).exp() - f64::from(u8::from(from == last && to == tag));
                }
            }
        }
        d_parameters.iter_mut().zip(&d).for_each(|(sum, d)| *sum += (scale * d) as f32);
        sums.all - score
    }

    /// How likely each label of each word is, T×K.
    pub(crate) fn probabilities(&self, parameters: &[f32], logits: &[f32]) -> Vec<f32> {
        let sums = self.sums(parameters, logits);
        let both = sums.before.iter().zip(&sums.after);
        both.map(|(before, after)| (before + after - sums.all).exp() as f32).collect()
    }

    /// The likeliest tags of a sentence, by Viterbi's algorithm; of equals, the first labels.
    pub(crate) fn best(&self, parameters: &[f32], logits: &[f32]) -> Vec<u32> {
        let k = self.labels;
        let (start, end, transitions) = self.parts();
        let (start, end, transitions) = (&parameters[start], &parameters[end], &parameters[transitions]);
        let t = logits.len() / k;
        // The best score of all beginnings that end in a label, and the label before it.
        let mut scores = vec![f64::NEG_INFINITY; t * k];
        let mut from = vec![0; t * k];
        for word in 0..t {
            for label in 0..k {
                let own = f64::from(logits[word * k + label]);
                let at = word * k + label;
                if word == 0 {
                    scores[at] = own + f64::from(start[label]);
                }
                for last in (0..k).filter(|_| word > 0) {
                    let score = scores[at - label - k + last] + f64::from(transitions[last * k + label]) + own;
                    if score > scores[at] {
                        (scores[at], from[at]) = (score, last);
                    }
                }
            }
        }
        let Some(last) = t.checked_sub(1) else { return Vec::new() };
        let total = |label: usize| scores[last * k + label] + f64::from(end[label]);
        let mut label = (0..k).reduce(|best, i| if total(i) > total(best) { i } else { best }).unwrap_or(0);
        let mut tags = vec![0; t];
        for word in (0..t).rev() {
            tags[word] = label as u32;
            label = from[word * k + label];
        }
        tags
    }

    fn parts(&self) -> (Range<usize>, Range<usize>, Range<usize>) {
        let k = self.labels;
        (0..k, k..2 * k, 2 * k..2 * k + k * k)
    }

    fn sums(&self, parameters: &[f32], logits: &[f32]) -> Sums {
        let k = self.labels;
        assert!(parameters.len() == self.len() && logits.len().is_multiple_of(k), "parameters of another field");
        let t = logits.len() / k;
        let (start, end, transitions) = self.parts();
        let (start, end, transitions) = (&parameters[start], &parameters[end], &parameters[transitions]);
        let (mut before, mut after) = (vec![0.0; t * k], vec![0.0; t * k]);
        let mut terms = vec![0.0; k];
        for word in 0..t {
            for label in 0..k {
                let own = f64::from(logits[word * k + label]);
                before[word * k + label] = own
                    + if word == 0 {
                        f64::from(start[label])
                    } else {
                        for last in 0..k {
                            terms[last] = before[(word - 1) * k + last] + f64::from(transitions[last * k + label]);
                        }
                        log_sum(&terms)
                    };
            }
        }
        for word in (0..t).rev() {
            for label in 0..k {
                after[word * k + label] = if word + 1 == t {
                    f64::from(end[label])
                } else {
                    for next in 0..k {
                        let at = (word + 1) * k + next;
                        terms[next] = f64::from(transitions[label * k + next]) + f64::from(logits[at]) + after[at];
                    }
                    log_sum(&terms)
                };
            }
        }
        let last = t.saturating_sub(1) * k;
        (0..k).for_each(|label| terms[label] = before.get(last + label).map_or(0.0, |x| x + f64::from(end[label])));
        Sums { before, after, all: log_sum(&terms) }
    }
}

/// ln Σ eˣ, without overflow.
fn log_sum(terms: &[f64]) -> f64 {
    let largest = terms.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if !largest.is_finite() {
        return largest;
    }
    largest + terms.iter().map(|x| (x - largest).exp()).sum::<f64>().ln()
}

#[cfg(test)]
mod tests {
    use super::*;
    use henson_kernels::philox::Stream;

    fn numbers(seed: u64, count: usize, size: f32) -> Vec<f32> {
        let mut draws = Stream::new(seed, 2, 0);
        (0..count).map(|_| draws.normal() * size).collect()
    }

    /// All tags of a sentence, with their scores by the definition.
    fn all_tags(crf: &Crf, p: &[f32], logits: &[f32]) -> Vec<(Vec<u32>, f64)> {
        let (k, t) = (crf.labels, logits.len() / crf.labels);
        (0..k.pow(t as u32))
            .map(|mut number| {
                let mut tags = vec![0; t];
                for tag in &mut tags {
                    *tag = (number % k) as u32;
                    number /= k;
                }
                let at = |i: usize| f64::from(p[i]);
                let mut score = at(tags[0] as usize) + at(k + tags[t - 1] as usize);
                score += tags.iter().enumerate().map(|(i, tag)| f64::from(logits[i * k + *tag as usize])).sum::<f64>();
                score += tags.windows(2).map(|two| at(2 * k + two[0] as usize * k + two[1] as usize)).sum::<f64>();
                (tags, score)
            })
            .collect()
    }

    #[test]
    fn as_the_sum_over_all_tags() {
        for (k, t, size) in [(2, 1, 1.0), (3, 5, 1.0), (4, 4, 30.0), (1, 3, 1.0), (5, 2, 0.0)] {
            let crf = Crf { labels: k };
            let (p, logits) = (numbers(k as u64, crf.len(), size), numbers(9, t * k, size));
            let all = all_tags(&crf, &p, &logits);
            let largest = all.iter().map(|(_, score)| *score).fold(f64::MIN, f64::max);
            let total: f64 = all.iter().map(|(_, score)| (score - largest).exp()).sum();
            let (right, score) = &all[all.len() / 2];
            let (mut dp, mut dx) = (vec![0.0; p.len()], vec![0.0; logits.len()]);
            let loss = crf.loss(&p, &logits, right, 1.0, &mut dp, &mut dx);
            assert!((loss - (largest + total.ln() - score)).abs() < 1e-9 * largest.abs().max(1.0), "{k} {t}");

            let mut expected = vec![0.0; t * k];
            for (tags, score) in &all {
                let share = (score - largest).exp() / total;
                tags.iter().enumerate().for_each(|(word, tag)| expected[word * k + *tag as usize] += share);
            }
            let got = crf.probabilities(&p, &logits);
            assert!(got.iter().zip(&expected).all(|(a, b)| (f64::from(*a) - b).abs() < 1e-6), "{got:?} {expected:?}");
            let best = crf.best(&p, &logits);
            let found = all.iter().find(|(tags, _)| *tags == best).map(|(_, score)| *score);
            assert!(found.is_some_and(|score| (score - largest).abs() < 1e-9 * largest.abs().max(1.0)));
        }
        // Of equals, the first.
        assert_eq!(Crf { labels: 3 }.best(&[0.0; 15], &[0.0; 12]), [0, 0, 0, 0]);
        assert_eq!(Crf { labels: 3 }.best(&[0.0; 15], &[]), Vec::<u32>::new());
    }

    #[test]
    fn the_way_back_is_the_derivative() {
        let (crf, tags) = (Crf { labels: 3 }, [2, 0, 0, 1]);
        let (p, logits) = (numbers(1, crf.len(), 1.0), numbers(2, 12, 1.0));
        let (mut dp, mut dx) = (vec![0.0; p.len()], vec![0.0; 12]);
        crf.loss(&p, &logits, &tags, 0.5, &mut dp, &mut dx);
        let loss = |p: &[f32], x: &[f32]| {
            let (mut dp, mut dx) = (vec![0.0; p.len()], vec![0.0; 12]);
            0.5 * crf.loss(p, x, &tags, 1.0, &mut dp, &mut dx)
        };
        // Steps that f32 holds exactly or nearly; the slope is over what it really was.
        let slope = |x: &[f32], i: usize, loss: &dyn Fn(&[f32]) -> f64| {
            let (mut up, mut down) = (x.to_vec(), x.to_vec());
            up[i] += 1.0 / 256.0;
            down[i] -= 1.0 / 256.0;
            (loss(&up) - loss(&down)) / f64::from(up[i] - down[i])
        };
        for i in 0..p.len() {
            let slope = slope(&p, i, &|p| loss(p, &logits));
            assert!((slope - f64::from(dp[i])).abs() < 2e-6, "parameter {i}: {slope} and {}", dp[i]);
        }
        for i in 0..12 {
            let slope = slope(&logits, i, &|x| loss(&p, x));
            assert!((slope - f64::from(dx[i])).abs() < 2e-6, "logit {i}: {slope} and {}", dx[i]);
        }
    }
}
