//! `henson eval --task retrieval`: how well an encoder finds what is relevant to a query, in collections as BEIR has them.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use henson_tasks::Collection;
use henson_tasks::metrics::ranking_scores;
use serde::Serialize;

use crate::built_in::BuiltIn;
use crate::commands::vectors::{Embedder, Side};
use crate::flags::eval::Eval;
use crate::output::{self, thousands};

/// Among how many of the nearest something relevant is looked for.
const CUTOFFS: [usize; 6] = [1, 3, 5, 10, 20, 100];

/// What `--json` prints.
#[derive(Serialize)]
struct Result<'a> {
    task: &'static str,
    model: &'a str,
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
    let (query, passage) = (flags.query_prefix.as_deref(), flags.passage_prefix.as_deref());
    let embedder = Embedder::open(&flags.model, &flags.compute, query, passage)?;
    let texts: Vec<&str> = collection.passages.iter().map(|passage| passage.text.as_str()).collect();
    let queries: Vec<&str> = collection.queries.iter().map(|query| query.text.as_str()).collect();
    let passages = embedder.embed(&texts, Side::Passage, "passages")?;
    let asking = embedder.embed(&queries, Side::Query, "queries")?;
    let most = CUTOFFS.into_iter().max().unwrap_or(1);
    let found = embedder.nearest(&asking, &passages, texts.len(), most);
    let scores = ranking_scores(&collection.judged(&found), &CUTOFFS);
    let result = Result {
        task: "retrieval",
        model: flags.model.model.as_deref().unwrap_or(BuiltIn::Sentences.name()),
        data: &flags.data,
        judgments: &collection.judgments,
        queries: queries.len(),
        passages: texts.len(),
        scores: scores.iter().cloned().collect(),
        seconds: start.elapsed().as_secs_f64(),
    };
    if flags.json { output::json(&result) } else { print(&result) }
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
