//! Processors and draws on fixed scores, against `transformers`: values that tie decide between implementations.

use std::path::Path;

use henson_tensor::philox::Stream;
use serde_json::Value;

use super::choice::{best_of, candidates, draw};
use super::processors::{Begun, Marks, process};
use super::{GenerateSettings, Sampling};

fn golden() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/generation/processors.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn scores(row: &Value) -> Vec<f32> {
    row.as_array().unwrap().iter().map(|x| x.as_f64().map_or(f32::NEG_INFINITY, |x| x as f32)).collect()
}

fn ids(row: &Value) -> Vec<u32> {
    row.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// Processors of a chain that come first, and what is left for sampling.
fn of_chain(chain: &Value, end: &[u32]) -> (GenerateSettings, Option<Sampling>) {
    let mut settings = GenerateSettings { end: end.to_vec(), ..GenerateSettings::default() };
    let mut sampling = Sampling { top_k: 0, ..Sampling::default() };
    let mut samples = false;
    for link in chain.as_array().unwrap() {
        let (name, value) = (link[0].as_str().unwrap(), &link[1]);
        let number = value.as_f64().unwrap_or(0.0);
        samples |= ["temperature", "top_k", "top_p", "min_p"].contains(&name);
        match name {
            "repetition_penalty" => settings.repetition_penalty = number as f32,
            "no_repeat_ngram" => settings.no_repeat_ngram = number as usize,
            "logit_bias" => {
                let pair = |pair: &Value| (pair[0].as_u64().unwrap() as u32, pair[1].as_f64().unwrap() as f32);
                settings.logit_bias = value.as_array().unwrap().iter().map(pair).collect();
            }
            "min_length" => settings.min_length = number as usize,
            "min_new_tokens" => settings.min_new_tokens = number as usize,
            "forced_last" => settings.forced_last = Some(number as u32),
            "temperature" => sampling.temperature = number as f32,
            "top_k" => sampling.top_k = number as usize,
            "top_p" => sampling.top_p = number as f32,
            "min_p" => sampling.min_p = number as f32,
            other => panic!("{other}"),
        }
    }
    (settings, samples.then_some(sampling))
}

#[test]
fn processors_on_fixed_scores() {
    let golden = golden();
    let (tokens, end) = (ids(&golden["tokens"]), ids(&golden["end"]));
    let number = |key: &str| golden[key].as_u64().unwrap() as usize;
    let begun = Begun { tokens: &tokens, first: number("first"), limit: number("limit") };
    let mut marks = Marks::default();
    let cases = golden["cases"].as_array().unwrap();
    assert!(cases.len() > 150);
    for case in cases {
        let name = case["row"].as_str().unwrap();
        let mut row = scores(&golden["rows"][name]);
        let (settings, sampling) = of_chain(&case["chain"], &end);
        if begun.is_changed_by(&settings) {
            process(&settings, begun, &mut marks, &mut row);
        }
        if let Some(sampling) = sampling {
            let mut kept = vec![];
            candidates(&sampling, &row, &mut kept);
            row.fill(f32::NEG_INFINITY);
            kept.iter().for_each(|(id, score)| row[*id as usize] = *score);
        }
        let expected = scores(&case["expected"]);
        let same = |(a, b): (&f32, &f32)| a == b || (a - b).abs() <= 1e-6 * b.abs();
        assert!(row.iter().zip(&expected).all(same), "{name}, {}: {row:?}, not {expected:?}", case["chain"]);
    }
}

/// The first token of an encoder-decoder is forced where one stands before it alone.
#[test]
fn first_tokens_that_are_forced() {
    let settings = GenerateSettings { forced_first: Some(2), ..GenerateSettings::default() };
    for (tokens, changed) in [(&[0][..], true), (&[0, 5][..], false)] {
        let begun = Begun { tokens, first: 1, limit: 9 };
        assert_eq!(begun.is_changed_by(&settings), changed);
        let mut row = [1.0, 2.0, -1.0];
        process(&settings, begun, &mut Marks::default(), &mut row);
        assert_eq!(row == [f32::NEG_INFINITY, f32::NEG_INFINITY, 0.0], changed);
    }
}

#[test]
fn best_scores_with_ties() {
    // Falling, rising and equal scores, beyond one chunk.
    for kind in 0..4_usize {
        let score = |i: usize| match kind {
            0 => -(i as f32),
            1 => i as f32,
            2 => 1.0,
            _ => (i * 7 % 13) as f32,
        };
        let all: Vec<f32> = (0..300).map(score).collect();
        for count in [1, 2, 5, 64, 65, 300, 400] {
            let mut expected: Vec<(u32, f32)> = (0..).zip(all.iter().copied()).collect();
            expected.sort_by(|a, b| b.1.total_cmp(&a.1));
            expected.truncate(count);
            let mut found = vec![];
            best_of(&all, count, &mut found);
            assert_eq!(found, expected, "{kind} {count}");
        }
    }
}

/// However flat the scores are and however many tie, top-p keeps what a sort of all keeps.
#[test]
fn probable_tokens_are_those_of_a_sort() {
    let mut draws = Stream::new(7, 1, 0);
    for (spread, step, count) in
        [(0.0, 1.0, 4096), (0.5, 0.0, 5000), (3.0, 0.0, 5000), (12.0, 0.0, 3000), (2.0, 0.25, 4000)]
    {
        let score = |x: f32| if step > 0.0 { (x * spread / step).round() * step } else { x * spread };
        let row: Vec<f32> = (0..count).map(|_| score(draws.below(1 << 20) as f32 / (1 << 20) as f32)).collect();
        let mut sorted: Vec<(u32, f32)> = (0..).zip(row.iter().copied()).collect();
        sorted.sort_by(|a, b| b.1.total_cmp(&a.1).then(b.0.cmp(&a.0)));
        let weight = |score: f32| f64::from(score - sorted[0].1).exp();
        let all: f64 = row.iter().map(|score| weight(*score)).sum();
        for top_p in [0.01_f32, 0.25, 0.5, 0.9, 0.95, 0.999] {
            let (mut mass, mut expected) = (0.0, vec![]);
            for (id, score) in &sorted {
                if !expected.is_empty() && mass >= f64::from(top_p) * all {
                    break;
                }
                mass += weight(*score);
                expected.push(*id);
            }
            expected.sort_unstable();
            let mut kept = vec![];
            candidates(&Sampling { top_k: 0, top_p, ..Sampling::default() }, &row, &mut kept);
            let found: Vec<u32> = kept.iter().map(|(id, _)| *id).collect();
            assert!(found == expected, "{spread} {step} {top_p}: {} for {}", found.len(), expected.len());
        }
    }
}

/// However small, a temperature draws the best token and no other.
#[test]
fn small_temperatures_draw_the_best() {
    let row = [1.0_f32, -40.0, 2.0, f32::NEG_INFINITY];
    for temperature in [1e-3, 1e-30, 1e-38, f32::from_bits(1)] {
        for top_k in [0, 2] {
            let sampling = Sampling { temperature, top_k, ..Sampling::default() };
            let (mut kept, mut weights) = (vec![], vec![]);
            assert_eq!(draw(&sampling, &row, (0, 0), (&mut kept, &mut weights)), 2, "{temperature:e}, {top_k}");
        }
    }
}

/// 20,000 draws have the frequencies of their probabilities: χ² with six degrees of freedom is above 22.5 once in a thousand.
#[test]
fn draws_are_distributed_as_they_should() {
    let row = [1.0_f32, 0.0, 2.0, -1.0, 0.5, 0.5, -2.0, f32::NEG_INFINITY];
    for (sampling, only) in [
        (Sampling { top_k: 0, ..Sampling::default() }, 0..8),
        (Sampling { top_k: 4, temperature: 0.7, ..Sampling::default() }, 0..8),
    ] {
        let (mut kept, mut weights) = (vec![], vec![]);
        candidates(&sampling, &row, &mut kept);
        let all: f64 = kept.iter().map(|(_, score)| f64::from(*score).exp()).sum();
        let expected: Vec<(u32, f64)> = kept.iter().map(|(id, score)| (*id, f64::from(*score).exp() / all)).collect();
        assert!(expected.iter().all(|(id, _)| only.contains(&(*id as usize)) && *id != 7));
        // Draws of one sequence, and first tokens of many sequences.
        for across in [false, true] {
            let mut counts = [0_u32; 8];
            for i in 0..20_000 {
                let place = if across { (i, 3) } else { (3, i) };
                counts[draw(&Sampling { seed: 11, ..sampling }, &row, place, (&mut kept, &mut weights)) as usize] += 1;
            }
            let square = |(id, p): &(u32, f64)| {
                let wanted = p * 20_000.0;
                (f64::from(counts[*id as usize]) - wanted).powi(2) / wanted
            };
            let chi_square: f64 = expected.iter().map(square).sum();
            assert!(chi_square < 22.5, "{chi_square} {counts:?}");
            assert_eq!(counts.iter().sum::<u32>(), expected.iter().map(|(id, _)| counts[*id as usize]).sum::<u32>());
        }
    }
    // Another seed, another sequence.
    let of = |seed| {
        let sampling = Sampling { seed, top_k: 0, ..Sampling::default() };
        (0..50).map(|i| draw(&sampling, &row, (0, i), (&mut vec![], &mut vec![]))).collect::<Vec<_>>()
    };
    assert!(of(1) != of(2) && of(1) == of(1));
}
