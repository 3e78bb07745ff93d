//! The next token of a sequence, from its scores: the best one, or one that is drawn.
//!
//! Draws come from Philox of the seed and of where the token stands, so that they depend neither on other sequences nor on earlier
//! draws. Probabilities are added up in the order of ids.
//!
//! Legend: V tokens of the vocabulary.

use std::cmp::Ordering;

use henson_tensor::philox::philox;

use super::Sampling;

/// The word of the counter that tells these draws from others of the same seed.
const STREAM: u32 = 0x6765_6e65;

/// Likeliest tokens that are sorted at a time to find those that reach a probability.
const SORTED_AT_A_TIME: usize = 512;

/// What sums of weights differ by at most, relative to them, if they are added in another order: V times half a last place, and more.
const ROUNDING: f64 = 1e-8;

/// Scores that are compared with the least of the best ones at a time.
const CHUNK: usize = 64;

/// A token with its score.
pub(crate) type Scored = (u32, f32);

/// The first id with the largest score.
pub(crate) fn best(scores: &[f32]) -> u32 {
    let most = largest(scores);
    scores.iter().position(|score| *score == most).unwrap_or(0) as u32
}

/// The largest score. Sixteen at a time, which the compiler turns into vectors.
fn largest(scores: &[f32]) -> f32 {
    let greater = |a: f32, b: f32| if b > a { b } else { a };
    let (chunks, rest) = scores.as_chunks::<16>();
    let mut most = [f32::NEG_INFINITY; 16];
    for chunk in chunks {
        most.iter_mut().zip(chunk).for_each(|(most, score)| *most = greater(*most, *score));
    }
    most.iter().chain(rest).copied().fold(f32::NEG_INFINITY, greater)
}

/// The best `count` of scores, best first, ties by id.
pub(crate) fn best_of(scores: &[f32], count: usize, found: &mut Vec<Scored>) {
    found.clear();
    if count == 0 {
        return;
    }
    for (chunk, first) in scores.chunks(CHUNK).zip((0..).step_by(CHUNK)) {
        // Few chunks have anything that is among the best so far; the others are read at full speed.
        let (mut least, full) = (found.last().map_or(f32::NEG_INFINITY, |(_, score)| *score), found.len() == count);
        if full
            && chunk.iter().fold(f32::NEG_INFINITY, |most, score| if *score > most { *score } else { most }) <= least
        {
            continue;
        }
        for (id, score) in (first..).zip(chunk) {
            if found.len() == count && *score <= least {
                continue;
            }
            let place = found.partition_point(|(_, better)| better >= score);
            found.truncate(count - 1);
            found.insert(place, (id, *score));
            least = found.last().map_or(f32::NEG_INFINITY, |(_, score)| *score);
        }
    }
}

/// Draws a token: `sequence` is its number among those of its prompt, `place` the token's among the new ones. `kept` and `weights` are
/// room.
pub(crate) fn draw(
    sampling: &Sampling,
    scores: &[f32],
    (sequence, place): (u32, u32),
    (kept, weights): (&mut Vec<Scored>, &mut Vec<f64>),
) -> u32 {
    candidates(sampling, scores, kept);
    let most = kept.iter().fold(f32::NEG_INFINITY, |most, (_, score)| most.max(*score));
    weights.clear();
    weights.extend(kept.iter().map(|(_, score)| weight(*score, most)));
    let all: f64 = weights.iter().sum();
    let words = philox(sampling.seed, [place, sequence, 0, STREAM]);
    let bits = (u64::from(words[0]) << 32 | u64::from(words[1])) >> 11;
    let mut left = bits as f64 / (1_u64 << 53) as f64 * all;
    let mut last = 0;
    for ((id, _), weight) in kept.iter().zip(weights) {
        if *weight > 0.0 {
            last = *id;
            if left < *weight {
                break;
            }
            left -= *weight;
        }
    }
    last
}

/// What may be drawn, by ids, with scores divided by the temperature.
pub(crate) fn candidates(sampling: &Sampling, scores: &[f32], kept: &mut Vec<Scored>) {
    let Sampling { temperature, top_k, top_p, min_p, .. } = *sampling;
    // Below it scores are no longer finite, and long before the best has all the probability.
    let temperature = temperature.max(1e-30);
    if top_k > 0 && top_k < scores.len() {
        best_of(scores, top_k, kept);
        let least = kept.last().map_or(f32::NEG_INFINITY, |(_, score)| *score / temperature);
        kept.clear();
        let divided = (0..).zip(scores.iter().map(|score| score / temperature));
        kept.extend(divided.filter(|(_, score)| *score >= least));
    } else {
        kept.clear();
        kept.extend((0..).zip(scores.iter().map(|score| score / temperature)));
    }
    kept.retain(|(_, score)| *score > f32::NEG_INFINITY);
    if top_p < 1.0 {
        keep_probable(top_p, kept);
    }
    if min_p > 0.0 {
        let most = kept.iter().fold(f32::NEG_INFINITY, |most, (_, score)| most.max(*score));
        kept.retain(|(_, score)| (score - most).exp() >= min_p);
    }
    kept.sort_unstable_by_key(|(id, _)| *id);
}

/// Keeps the likeliest until they reach a probability together; of equal ones the later ids, as a stable sort from the least does.
fn keep_probable(top_p: f32, kept: &mut Vec<Scored>) {
    let most = kept.iter().fold(f32::NEG_INFINITY, |most, (_, score)| most.max(*score));
    let all: f64 = kept.iter().map(|(_, score)| weight(*score, most)).sum();
    let target = f64::from(top_p) * all;
    // Most of the probability is in few tokens. Where it is not, sorting them would take longer than all else.
    let count = sorted_until(kept, most, target, SORTED_AT_A_TIME)
        .or_else(|| divided_until(kept, most, target))
        .or_else(|| sorted_until(kept, most, target, usize::MAX));
    kept.truncate(count.unwrap_or(kept.len()));
}

fn weight(score: f32, most: f32) -> f64 {
    f64::from(score - most).exp()
}

/// The likeliest first, of equal ones the later ids.
fn order(a: &Scored, b: &Scored) -> Ordering {
    b.1.total_cmp(&a.1).then(b.0.cmp(&a.0))
}

/// How many of the likeliest reach the target, by sorting them in growing parts; none where `limit` of them do not.
fn sorted_until(kept: &mut [Scored], most: f32, target: f64, limit: usize) -> Option<usize> {
    let (mut sorted, mut mass) = (0, 0.0);
    while sorted < kept.len() && sorted < limit {
        let rest = &mut kept[sorted..];
        let part = SORTED_AT_A_TIME.max(sorted).min(rest.len());
        if part < rest.len() {
            rest.select_nth_unstable_by(part - 1, order);
        }
        rest[..part].sort_unstable_by(order);
        for (i, (_, score)) in rest[..part].iter().enumerate() {
            mass += weight(*score, most);
            if mass >= target {
                return Some(sorted + i + 1);
            }
        }
        sorted += part;
    }
    (sorted == kept.len()).then_some(sorted)
}

/// The same number by halving: those that count are in front then, and few are sorted. None where the rounding of sums in another order
/// could decide.
fn divided_until(kept: &mut [Scored], most: f32, target: f64) -> Option<usize> {
    let slack = ROUNDING * target;
    let (mut low, mut high, mut mass) = (0, kept.len(), 0.0);
    while high - low > SORTED_AT_A_TIME {
        let middle = low + (high - low) / 2;
        kept[low..high].select_nth_unstable_by(middle - low, order);
        let with = mass + kept[low..middle].iter().map(|(_, score)| weight(*score, most)).sum::<f64>();
        if (with - target).abs() <= slack {
            return None;
        }
        if with > target {
            high = middle;
        } else {
            (low, mass) = (middle, with);
        }
    }
    kept[low..high].sort_unstable_by(order);
    for (i, (_, score)) in kept[low..high].iter().enumerate() {
        mass += weight(*score, most);
        if (mass - target).abs() <= slack {
            return None;
        }
        if mass > target {
            return Some(low + i + 1);
        }
    }
    None
}
