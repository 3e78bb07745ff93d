//! `henson eval --task retrieval`: how well an encoder, BM25, or one of them with a cross-encoder behind it, finds what is relevant to a
//! query, in collections as BEIR has them.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use henson_tasks::metrics::ranking_scores;
use henson_tasks::{Bm25, Collection, Near};
use serde::Serialize;

use crate::built_in::BuiltIn;
use crate::commands::search::Ranker;
use crate::commands::vectors::{Embedder, Side};
use crate::flags::eval::Eval;
use crate::output::{self, Progress, thousands};

/// Among how many of the nearest something relevant is looked for.
const CUTOFFS: [usize; 6] = [1, 3, 5, 10, 20, 100];

/// What `--json` prints.
#[derive(Serialize)]
struct Result<'a> {
    task: &'static str,
    model: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    rerank: Option<&'a str>,
    data: &'a Path,
    judgments: &'a Path,
    queries: usize,
    passages: usize,
    #[serde(flatten)]
    scores: BTreeMap<String, f64>,
    seconds: f64,
}

pub(super) fn run(flags: &Eval) -> anyhow::Result<()> {
    let start = Instant::now();
    anyhow::ensure!(
        flags.limit.is_none() && flags.scoring.is_none(),
        "--limit and --scoring do not apply to this task"
    );
    let collection = Collection::open(&flags.data, flags.qrels.as_deref())?;
    let texts: Vec<&str> = collection.passages.iter().map(|passage| passage.text.as_str()).collect();
    let queries: Vec<&str> = collection.queries.iter().map(|query| query.text.as_str()).collect();
    let ranker =
        flags.rerank.as_ref().map(|name| Ranker::of(name, &flags.compute, flags.model.download)).transpose()?;
    let most = CUTOFFS.into_iter().max().unwrap_or(1).max(if ranker.is_some() { flags.candidates } else { 0 });
    let mut found =
        if flags.bm25 { by_words(&texts, &queries, most) } else { by_vectors(flags, &texts, &queries, most)? };
    if let Some(ranker) = &ranker {
        found = reranked(ranker, &texts, &queries, found, flags.candidates)?;
    }
    let scores = ranking_scores(&collection.judged(&found), &CUTOFFS);
    let result = Result {
        task: "retrieval",
        model: if flags.bm25 { "bm25" } else { flags.model.model.as_deref().unwrap_or(BuiltIn::Sentences.name()) },
        rerank: flags.rerank.as_deref(),
        data: &flags.data,
        judgments: &collection.judgments,
        queries: queries.len(),
        passages: texts.len(),
        scores: scores.iter().cloned().collect(),
        seconds: start.elapsed().as_secs_f64(),
    };
    if flags.json { output::json(&result) } else { print(&result) }
}

/// The nearest passages of each query.
fn by_vectors(flags: &Eval, texts: &[&str], queries: &[&str], most: usize) -> anyhow::Result<Vec<Vec<Near>>> {
    let (query, passage) = (flags.query_prefix.as_deref(), flags.passage_prefix.as_deref());
    let embedder = Embedder::open(&flags.model, &flags.compute, query, passage)?;
    let passages = embedder.embed(texts, Side::Passage, "passages")?;
    let asking = embedder.embed(queries, Side::Query, "queries")?;
    Ok(embedder.nearest(&asking, &passages, texts.len(), most))
}

/// The passages that share the rarest words with each query.
fn by_words(texts: &[&str], queries: &[&str], most: usize) -> Vec<Vec<Near>> {
    let index = Bm25::new(texts);
    let mut progress = Progress::new("queries", Some(queries.len() as u64));
    let each = queries.iter().enumerate().map(|(number, query)| {
        progress.at(number as u64 + 1, number + 1);
        index.best(query, most)
    });
    let found = each.collect();
    progress.finish();
    found
}

/// The first `candidates` of each query in the order of a cross-encoder; the others stay behind them.
fn reranked(
    ranker: &Ranker,
    texts: &[&str],
    queries: &[&str],
    found: Vec<Vec<Near>>,
    candidates: usize,
) -> anyhow::Result<Vec<Vec<Near>>> {
    let mut progress = Progress::new("queries", Some(queries.len() as u64));
    let mut all = Vec::with_capacity(found.len());
    for (number, (query, mut near)) in queries.iter().zip(found).enumerate() {
        let rest = near.split_off(near.len().min(candidates));
        let best: Vec<(usize, f32)> = near.iter().map(|near| (near.index, near.score)).collect();
        let ranked = ranker.ranked(query, texts, &best)?.into_iter().map(|(index, score)| Near { index, score });
        all.push(ranked.chain(rest).collect());
        progress.at(number as u64 + 1, number + 1);
    }
    progress.finish();
    Ok(all)
}

fn print(result: &Result<'_>) -> anyhow::Result<()> {
    let Result { queries, passages, judgments, seconds, .. } = result;
    let counts = format!("{} queries, {} passages", thousands(*queries), thousands(*passages));
    output::line(&format!("{counts}, judgments of {}", judgments.display()))?;
    let heading: String = CUTOFFS.iter().map(|k| format!("{:>9}", format!("@{k}"))).collect();
    output::line(&format!("{:<14}{heading}", ""))?;
    for name in ["ndcg", "binary_ndcg", "mrr", "map", "recall", "precision", "accuracy"] {
        let of = |k: &usize| result.scores.get(&format!("{name}@{k}")).copied().unwrap_or(f64::NAN);
        let numbers: String = CUTOFFS.iter().map(|k| format!("{:>9.4}", of(k))).collect();
        output::line(&format!("  {name:<12}{numbers}"))?;
    }
    output::line(&format!("  {seconds:.1} s"))
}
