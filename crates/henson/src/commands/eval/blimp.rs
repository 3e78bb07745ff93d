//! `henson eval --task blimp`: minimal pairs of sentences of which one is English (Warstadt et al. 2020). A pair is right
//! where the model finds that one likelier; where it finds both equally likely, it does not know, and the pair is wrong.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;

use anyhow::Context;
use henson_tensor::{DType, Device};
use serde::Serialize;
use serde_json::{Map, Value};

use super::{Choice, Scorer, Speed};
use crate::flags::ModelName;
use crate::flags::eval::Eval;
use crate::input::Lines;
use crate::output::{self, Progress};

/// What a line must have.
const KEYS: [&str; 5] = ["sentence_good", "sentence_bad", "UID", "linguistics_term", "field"];

pub(crate) struct Pair {
    good: String,
    bad: String,
    paradigm: String,
    phenomenon: String,
    field: String,
}

/// How a set of pairs went.
#[derive(Clone, Copy, Default, Serialize)]
struct Tally {
    accuracy: f64,
    correct: usize,
    ties: usize,
    pairs: usize,
}

impl Tally {
    fn add(&mut self, good: f64, bad: f64) {
        self.correct += usize::from(good > bad);
        self.ties += usize::from(good == bad);
        self.pairs += 1;
        self.accuracy = self.correct as f64 / self.pairs as f64;
    }
}

/// What `--json` prints.
#[derive(Serialize)]
struct Result<'a> {
    task: &'static str,
    model: &'a str,
    data: &'a Path,
    scoring: &'static str,
    #[serde(flatten)]
    overall: Tally,
    fields: BTreeMap<&'a str, Tally>,
    phenomena: BTreeMap<&'a str, Tally>,
    paradigms: BTreeMap<&'a str, Tally>,
    tokens: usize,
    seconds: f64,
    tokens_per_s: f64,
}

pub(super) fn run(flags: &Eval, model: &ModelName) -> anyhow::Result<()> {
    let pairs = read(&flags.data, flags.limit, flags.sample)?;
    let scorer = Scorer::of_flags(flags, model)?;
    let mut speed = Speed::start();
    let scores = score(&scorer, &pairs, &mut speed)?;
    let mut result = Result {
        task: "blimp",
        model: model.shown(),
        data: &flags.data,
        scoring: scorer.name(),
        overall: Tally::default(),
        fields: BTreeMap::new(),
        phenomena: BTreeMap::new(),
        paradigms: BTreeMap::new(),
        tokens: speed.tokens,
        seconds: speed.seconds(),
        tokens_per_s: speed.per_second(),
    };
    for (pair, (good, bad)) in pairs.iter().zip(scores) {
        let groups = [
            result.fields.entry(pair.field.as_str()).or_default(),
            result.phenomena.entry(pair.phenomenon.as_str()).or_default(),
            result.paradigms.entry(pair.paradigm.as_str()).or_default(),
            &mut result.overall,
        ];
        for tally in groups {
            tally.add(good, bad);
        }
    }
    if flags.json { output::json(&result) } else { print(&result, scorer.description()) }
}

/// The share of right pairs: for commands that compare models.
pub(crate) fn accuracy(model: &Path, pairs: &[Pair], device: &Device) -> anyhow::Result<f64> {
    let scorer = Scorer::open(model, device, DType::F32, None)?;
    let mut overall = Tally::default();
    for (good, bad) in score(&scorer, pairs, &mut Speed::start())? {
        overall.add(good, bad);
    }
    Ok(overall.accuracy)
}

/// The log-likelihoods of each pair: of the good sentence and of the bad one.
fn score(scorer: &Scorer, pairs: &[Pair], speed: &mut Speed) -> anyhow::Result<Vec<(f64, f64)>> {
    // A pair's sentences follow each other: what they have in common is then computed once.
    let sentences: Vec<&str> = pairs.iter().flat_map(|pair| [pair.good.as_str(), &pair.bad]).collect();
    let mut progress = Progress::new("pairs", Some(pairs.len() as u64));
    let scored = scorer.model.log_likelihoods(&sentences, scorer.scoring, |done| {
        speed.tokens = done.tokens;
        progress.at(done.texts as u64 / 2, done.texts / 2);
        ControlFlow::Continue(())
    })?;
    progress.finish();
    Ok(scored.chunks_exact(2).map(|pair| (pair[0].log_likelihood, pair[1].log_likelihood)).collect())
}

fn print(result: &Result<'_>, description: &str) -> anyhow::Result<()> {
    let Result { overall, tokens, seconds, tokens_per_s, .. } = result;
    let parts = [("paradigm", &result.paradigms), ("phenomenon", &result.phenomena), ("field", &result.fields)];
    let names = parts.iter().flat_map(|(_, tallies)| tallies.keys());
    let width = names.map(|name| name.chars().count()).max().unwrap_or(0).clamp(12, 60);
    let row = |name: &str, tally: &Tally| {
        let bar = "█".repeat((tally.accuracy * 30.0).round() as usize);
        let ties = if tally.ties > 0 { format!("  {} ties", tally.ties) } else { String::new() };
        output::line(&format!("  {name:<width$} {:>6}  {:>6.2}%  {bar:<30}{ties}", tally.pairs, 100.0 * tally.accuracy))
    };
    for (title, tallies) in parts {
        output::line(&format!("{title:<width$}    pairs    right"))?;
        let mut sorted: Vec<(&&str, &Tally)> = tallies.iter().collect();
        sorted.sort_by(|a, b| b.1.accuracy.total_cmp(&a.1.accuracy));
        sorted.into_iter().try_for_each(|(name, tally)| row(name, tally))?;
    }
    output::line("")?;
    row("all", overall)?;
    output::line(&format!("  chance is 50%; {description}"))?;
    output::line(&format!("  {tokens_per_s:.0} tokens/s, {tokens} in {seconds:.1} s with all masked copies"))
}

/// The pairs of a file that are taken: of each paradigm what `limit` and `sample` choose.
pub(crate) fn read(data: &Path, limit: Option<usize>, sample: bool) -> anyhow::Result<Vec<Pair>> {
    let mut lines = Lines::open(Some(data))?;
    let mut pairs = Vec::new();
    let mut sizes: BTreeMap<String, usize> = BTreeMap::new();
    while let Some(line) = lines.next_line()? {
        if line.trim().is_empty() {
            continue;
        }
        let pair = parse(&line).with_context(|| format!("{}, line {}", lines.name, lines.number))?;
        *sizes.entry(pair.paradigm.clone()).or_default() += 1;
        pairs.push(pair);
    }
    anyhow::ensure!(!pairs.is_empty(), "{} has no pairs: expected one JSON object per line", lines.name);
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    pairs.retain(|pair| {
        let index = seen.entry(pair.paradigm.clone()).or_default();
        *index += 1;
        let spread_over = sample.then(|| sizes[&pair.paradigm]);
        Choice { limit, spread_over }.takes(*index - 1)
    });
    Ok(pairs)
}

fn parse(line: &str) -> anyhow::Result<Pair> {
    let mut object: Map<String, Value> = serde_json::from_str(line)
        .with_context(|| format!("expected a JSON object with the keys `{}`", KEYS.join("`, `")))?;
    let mut take = |key: &str| match object.remove(key) {
        Some(Value::String(text)) => Ok(text),
        Some(_) => anyhow::bail!("`{key}` is not a string"),
        None => anyhow::bail!("`{key}` is missing: expected the keys `{}`", KEYS.join("`, `")),
    };
    Ok(Pair {
        good: take(KEYS[0])?,
        bad: take(KEYS[1])?,
        paradigm: take(KEYS[2])?,
        phenomenon: take(KEYS[3])?,
        field: take(KEYS[4])?,
    })
}
