//! Scores of written texts against the values of sacreBLEU and rouge-score.

use std::collections::BTreeMap;
use std::path::Path;

use henson_tasks::metrics::{Bleu, Chrf, Rouge, TextScores, edit_distance, stem};
use serde::Deserialize;

#[derive(Deserialize)]
struct Golden {
    lines: Vec<Line>,
    corpora: Vec<Corpus>,
    stems: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct Line {
    text: String,
    references: Vec<String>,
    /// bleu, chrf, rouge1, rouge2, rougeL, rougeLsum, exact, edits, length of the nearest reference.
    scores: [f64; 9],
}

#[derive(Deserialize)]
struct Corpus {
    first: usize,
    last: usize,
    scores: BTreeMap<String, f64>,
    signatures: BTreeMap<String, String>,
}

fn golden() -> Golden {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-data/texts/scores.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

#[track_caller]
fn near(got: f64, expected: f64, what: &str) {
    assert!((got - expected).abs() < 1e-9, "{what}: {got}, not {expected}");
}

#[test]
fn every_line_alone() {
    for Line { text, references, scores } in golden().lines {
        let (mut bleu, mut chrf, mut rouge) = (Bleu::default(), Chrf::default(), Rouge::default());
        bleu.add(&text, &references);
        chrf.add(&text, &references);
        rouge.add(&text, &references);
        let rouge = rouge.score();
        let got = [bleu.score(), chrf.score(), rouge.rouge1, rouge.rouge2, rouge.rouge_l, rouge.rouge_l_sum];
        for (name, (got, expected)) in
            ["bleu", "chrf", "rouge1", "rouge2", "rougeL", "rougeLsum"].iter().zip(got.iter().zip(scores))
        {
            near(*got, expected, &format!("{name} of {text:?} against {references:?}"));
        }
        let mut all = TextScores::default();
        all.add(&text, &references);
        let metrics: BTreeMap<&str, f64> = all.metrics().into_iter().collect();
        near(metrics["exact_match"], scores[6], "exact match");
        near(metrics["wer"], f64::from(u8::from(scores[7] > 0.0)), "word error");
        near(metrics["per"], scores[7] / scores[8].max(1.0), &format!("edits of {text:?} against {references:?}"));
    }
}

#[test]
fn corpora_and_their_signatures() {
    let Golden { lines, corpora, .. } = golden();
    for Corpus { first, last, scores, signatures } in corpora {
        let mut all = TextScores::default();
        for line in &lines[first..last] {
            all.add(&line.text, &line.references);
        }
        let got = all.metrics();
        assert_eq!(got.len(), scores.len());
        for (name, value) in got {
            near(value, scores[name], &format!("{name} of lines {first} to {last}"));
        }
        let got: BTreeMap<_, _> = all.signatures().into_iter().collect();
        for (name, signature) in signatures {
            assert_eq!(got[name.as_str()], signature);
        }
    }
}

#[test]
fn stems() {
    let stems = golden().stems;
    assert!(stems.len() > 900);
    for (word, expected) in stems {
        assert_eq!(stem(&word), expected, "{word}");
    }
}

/// Cost follows the texts, not their square: these have 30,000 words, in one line and in as many.
#[test]
fn long_texts_take_no_time() {
    let long: String = (0..30_000).map(|i| format!("w{i} ")).collect();
    let other = long.replace('7', "8");
    let lines = other.replace(' ', "\n");
    let mut all = TextScores::default();
    all.add(&long, &[&other, &lines]);
    all.add(&lines, &[&long, &lines]);
    assert!(all.metrics().iter().all(|(_, value)| value.is_finite()));
    assert_eq!(edit_distance(&[1, 2, 3], &[2, 3, 4]), 2);
}
