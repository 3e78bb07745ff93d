//! `henson search`.

use std::path::{Path, PathBuf};

use henson_infer::{Model, Want};
use henson_tasks::{FoundPassages, PassageLength, PassagePlace, SkippedPath, SourcedPassage, passages_of};
use serde::Serialize;

use crate::commands::vectors::{Embedder, Side};
use crate::flags::search::Search;
use crate::{models, output};

/// What keeps vectors, in a folder or behind a file's name.
const KEPT: &str = ".henson-search";

/// Characters of a passage that are shown.
const SHOWN: usize = 300;

/// Files that were left out and are named; the others are counted.
const NAMED: usize = 5;

/// What `--json` prints for a passage, the best first.
#[derive(Serialize)]
struct Line<'a> {
    query: &'a str,
    rank: usize,
    score: f32,
    /// Where it is not UTF-8, with characters in the place of what is not.
    path: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    lines: Option<[usize; 2]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    text: &'a str,
}

pub(crate) fn run(flags: &Search) -> anyhow::Result<()> {
    if let Some(empty) = flags.queries.iter().position(|query| query.trim().is_empty()) {
        anyhow::bail!("query {} is empty: expected what to look for", empty + 1);
    }
    anyhow::ensure!(flags.overlap < flags.words, "--overlap is {}: expected less than --words", flags.overlap);
    anyhow::ensure!(flags.path.exists(), "{} does not exist: expected a folder or a file", flags.path.display());
    let length = PassageLength { words: flags.words, overlap: flags.overlap };
    let FoundPassages { passages, skipped } = passages_of(&flags.path, length)?;
    warn_of_skipped(&skipped);
    let (query, passage) = (flags.query_prefix.as_deref(), flags.passage_prefix.as_deref());
    let embedder = Embedder::open(&flags.model, &flags.compute, query, passage)?;
    let ranker = flags.rerank.as_ref().map(|name| Ranker::open(name, flags)).transpose()?;
    let texts: Vec<&str> = passages.iter().map(|passage| passage.text.as_str()).collect();
    let file = (!flags.no_cache).then(|| kept(&flags.path));
    let vectors = embedder.embed_kept(&texts, file.as_deref())?;
    let queries: Vec<&str> = flags.queries.iter().map(String::as_str).collect();
    let asking = embedder.embed(&queries, Side::Query, "queries")?;
    let most = if ranker.is_some() { flags.candidates.max(flags.top) } else { flags.top };
    let found = embedder.nearest(&asking, &vectors, texts.len(), most);
    for (number, (query, near)) in flags.queries.iter().zip(found).enumerate() {
        let mut found: Vec<(usize, f32)> = near.iter().map(|near| (near.index, near.score)).collect();
        if let Some(ranker) = &ranker {
            found = ranker.ranked(query, &texts, &found)?;
        }
        found.truncate(flags.top);
        if !flags.json && flags.queries.len() > 1 {
            output::line(&format!("{}{query}", if number > 0 { "\n" } else { "" }))?;
        }
        for (rank, (index, score)) in found.into_iter().enumerate() {
            show(flags.json, query, rank + 1, score, &passages[index])?;
        }
    }
    Ok(())
}

/// Where vectors are kept: within a folder, next to a file.
fn kept(path: &Path) -> PathBuf {
    if path.is_dir() {
        return path.join(KEPT);
    }
    let mut name = path.as_os_str().to_owned();
    name.push(KEPT);
    PathBuf::from(name)
}

fn warn_of_skipped(skipped: &[SkippedPath]) {
    for path in skipped.iter().take(NAMED) {
        output::warn(&format!("{}; it was left out", one_line(&path.reason)));
    }
    if skipped.len() > NAMED {
        output::warn(&format!("{} more were left out", skipped.len() - NAMED));
    }
}

/// Names may have line ends, which are shown as escapes, as other control characters are.
fn one_line(text: &str) -> String {
    text.replace('\n', "\\n")
}

fn show(json: bool, query: &str, rank: usize, score: f32, passage: &SourcedPassage) -> anyhow::Result<()> {
    let SourcedPassage { path, place, text } = passage;
    if json {
        let (lines, id) = match place {
            PassagePlace::Lines(first, last) => (Some([*first, *last]), None),
            PassagePlace::Id(id) => (None, Some(id.as_str())),
        };
        let path = path.to_string_lossy();
        return output::json(&Line { query, rank, score, path: &path, lines, id, text });
    }
    let place = match place {
        PassagePlace::Lines(first, last) if first == last => format!(":{first}"),
        PassagePlace::Lines(first, last) => format!(":{first}-{last}"),
        PassagePlace::Id(id) => format!(" {id}"),
    };
    output::line(&one_line(&format!("{score:>7.4}  {}{place}", path.display())))?;
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut shown: String = words.chars().take(SHOWN).collect();
    if shown.len() < words.len() {
        shown.push('…');
    }
    output::line(&format!("         {shown}"))
}

/// A cross-encoder.
pub(crate) struct Ranker(Model);

impl Ranker {
    fn open(name: &str, flags: &Search) -> anyhow::Result<Self> {
        Self::of(name, &flags.compute, flags.model.download)
    }

    pub(crate) fn of(name: &str, compute: &crate::flags::Compute, download: bool) -> anyhow::Result<Self> {
        let path = models::resolve(name, download)?;
        Ok(Self(Model::open(&path, &compute.device()?, compute.dtype(), Want::Reranker)?))
    }

    /// The scores of texts for a query.
    pub(crate) fn scores(&self, query: &str, texts: &[&str]) -> anyhow::Result<Vec<f32>> {
        let ranked = self.0.rerank(query, texts, self.0.rerank_length())?;
        Ok(ranked.into_iter().map(|ranked| ranked.score).collect())
    }

    /// Passages in the order of its scores.
    pub(crate) fn ranked(
        &self,
        query: &str,
        texts: &[&str],
        found: &[(usize, f32)],
    ) -> anyhow::Result<Vec<(usize, f32)>> {
        let candidates: Vec<&str> = found.iter().map(|(index, _)| texts[*index]).collect();
        let scores = self.scores(query, &candidates)?;
        let mut ranked: Vec<(usize, f32)> = found.iter().map(|(index, _)| *index).zip(scores).collect();
        // Equals stay in the order that they came in.
        ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
        Ok(ranked)
    }
}
