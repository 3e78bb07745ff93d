//! `henson mine`.

use std::collections::{HashMap, HashSet};

use henson_checkpoint::write_atomic;
use henson_tasks::metrics::cosine;
use henson_tasks::{Input, MiningSettings, Near, Reading, Task, TaskError, mine, read, read_passages, report_twins};
use serde::Serialize;

use super::search::Ranker;
use crate::commands::vectors::{Embedder, Side};
use crate::flags::search::Mine;
use crate::output::{self, Progress, thousands};

/// A row of the result.
#[derive(Serialize)]
struct Row<'a> {
    anchor: &'a str,
    positive: &'a str,
    negatives: Vec<&'a str>,
    /// Of the positive, then of each negative.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    scores: Vec<f32>,
}

pub(crate) fn run(flags: &Mine) -> anyhow::Result<()> {
    anyhow::ensure!(!flags.out.exists(), "{} exists already: choose another --out, or delete it", flags.out.display());
    anyhow::ensure!(flags.skip < flags.among, "--skip is {}: expected less than --among", flags.skip);
    let task = Task::named("embed").ok_or_else(|| TaskError::NoTask { name: "embed".to_owned() })?;
    let reading = Reading { files: flags.labelled.files(), labels_wanted: false, ..Reading::new(task) };
    let mut set = read(&flags.train, &reading)?;
    report_twins(&mut set);
    set.problems.iter().for_each(|problem| output::warn(problem));
    let pairs = set.examples.iter().filter_map(|example| match &example.input {
        Input::Alike { first, second, .. } => Some((first.as_str(), second.as_str())),
        _ => None,
    });
    let pairs: Vec<(&str, &str)> = pairs.collect();
    let given = flags.corpus.as_ref().map(|corpus| read_passages(corpus)).transpose()?;
    let texts: Vec<&str> = match &given {
        Some(passages) => unique(passages.iter().map(|passage| passage.text.as_str())),
        None => unique(pairs.iter().map(|(_, second)| *second)),
    };
    let (query, passage) = (flags.query_prefix.as_deref(), flags.passage_prefix.as_deref());
    let embedder = Embedder::open(&flags.model, &flags.compute, query, passage)?;
    let ranker = match &flags.cross_encoder {
        Some(name) => Some(Ranker::of(name, &flags.compute, flags.model.download)?),
        None => None,
    };
    let queries = unique(pairs.iter().map(|(first, _)| *first));
    let own_texts = unique(pairs.iter().map(|(_, second)| *second));
    let corpus = embedder.embed(&texts, Side::Passage, "texts")?;
    let asking = embedder.embed(&queries, Side::Query, "queries")?;
    let own = match given.is_some() {
        true => embedder.embed(&own_texts, Side::Passage, "positives")?,
        false => corpus.clone(),
    };
    let mut of_query: HashMap<&str, HashSet<&str>> = HashMap::new();
    pairs.iter().for_each(|(first, second)| {
        of_query.entry(first).or_default().insert(second);
    });
    // What is its own is skipped, and there may be so much of it.
    let most = flags.among + 1 + of_query.values().map(HashSet::len).max().unwrap_or(0);
    let near = embedder.nearest(&asking, &corpus, texts.len(), most);
    let mined = Mined {
        flags,
        texts: &texts,
        queries: numbers(&queries),
        own: numbers(&own_texts),
        of_query,
        vectors: (&asking, &own, corpus.len() / texts.len().max(1)),
        near,
    };
    mined.write(&pairs, ranker.as_ref())
}

/// All that negatives are chosen by.
struct Mined<'a> {
    flags: &'a Mine,
    texts: &'a [&'a str],
    queries: HashMap<&'a str, usize>,
    own: HashMap<&'a str, usize>,
    of_query: HashMap<&'a str, HashSet<&'a str>>,
    /// Of queries and of positives, and their width.
    vectors: (&'a [f32], &'a [f32], usize),
    near: Vec<Vec<Near>>,
}

impl Mined<'_> {
    fn write(&self, pairs: &[(&str, &str)], ranker: Option<&Ranker>) -> anyhow::Result<()> {
        let mut progress = Progress::new("pairs", Some(pairs.len() as u64));
        let (mut bytes, mut negatives, mut without) = (Vec::new(), 0, 0);
        for (number, (first, second)) in pairs.iter().enumerate() {
            let row = self.row(number as u64, first, second, ranker)?;
            negatives += row.negatives.len();
            without += usize::from(row.negatives.is_empty());
            serde_json::to_writer(&mut bytes, &row)?;
            bytes.push(b'\n');
            progress.at(number as u64 + 1, number + 1);
        }
        progress.finish();
        write_atomic(&self.flags.out, &bytes)?;
        let counts = format!("{} pairs with {} negatives", thousands(pairs.len()), thousands(negatives));
        output::message(&format!("{counts} are in {}; {without} pairs have none", self.flags.out.display()));
        Ok(())
    }

    fn row<'r>(
        &'r self,
        number: u64,
        first: &'r str,
        second: &'r str,
        ranker: Option<&Ranker>,
    ) -> anyhow::Result<Row<'r>> {
        let (flags, (asking, own, width)) = (self.flags, self.vectors);
        let (query, right) = (self.queries[first], self.own[second]);
        let nearness = cosine_or_dot(&asking[query * width..][..width], &own[right * width..][..width]);
        let settings = MiningSettings {
            skip: flags.skip,
            among: flags.among,
            // A cross-encoder may refuse some.
            count: if ranker.is_some() { flags.among } else { flags.negatives },
            margin: flags.margin,
            relative: flags.relative_margin,
            most: flags.max_score,
            least: flags.min_score,
            random: flags.random,
        };
        let is_own = |index: usize| self.texts[index] == first || self.of_query[first].contains(self.texts[index]);
        let found = mine(number, &self.near[query], nearness, is_own, &settings);
        let mut negatives: Vec<&str> = found.iter().map(|near| self.texts[near.index]).collect();
        let mut scores = Vec::new();
        if let Some(ranker) = ranker {
            let all: Vec<&str> = [second].into_iter().chain(negatives.iter().copied()).collect();
            let all = ranker.scores(first, &all)?;
            let below = f64::from(all[0]) - flags.cross_margin;
            let kept = negatives.iter().zip(&all[1..]).filter(|(_, score)| f64::from(**score) < below);
            let kept: Vec<(&str, f32)> = kept.map(|(text, score)| (*text, *score)).take(flags.negatives).collect();
            scores = [all[0]].into_iter().chain(kept.iter().map(|(_, score)| *score)).collect();
            negatives = kept.into_iter().map(|(text, _)| text).collect();
        }
        Ok(Row { anchor: first, positive: second, negatives, scores })
    }
}

/// The nearness that searches go by: vectors have the length 1, unless the model's directory says that they are compared as they are.
fn cosine_or_dot(first: &[f32], second: &[f32]) -> f64 {
    let length = |x: &[f32]| x.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>().sqrt();
    cosine(first, second) * length(first) * length(second)
}

/// Each once, in the order of their first places.
fn unique<'t>(texts: impl Iterator<Item = &'t str>) -> Vec<&'t str> {
    let mut seen = HashSet::new();
    texts.filter(|text| seen.insert(*text)).collect()
}

fn numbers<'t>(texts: &[&'t str]) -> HashMap<&'t str, usize> {
    texts.iter().enumerate().map(|(number, text)| (*text, number)).collect()
}
