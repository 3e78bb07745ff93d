//! `henson eval --task paraphrases`: which of all pairs of sentences an encoder finds to mean the same.

use std::path::Path;
use std::time::Instant;

use henson_tasks::Paraphrases;
use serde::Serialize;

use crate::built_in::BuiltIn;
use crate::commands::vectors::{Embedder, Side};
use crate::flags::eval::Eval;
use crate::output::{self, thousands};

/// What `--json` prints.
#[derive(Serialize)]
struct Result<'a> {
    task: &'static str,
    model: &'a str,
    data: &'a Path,
    sentences: usize,
    duplicates: usize,
    average_precision: f64,
    f1: f64,
    precision: f64,
    recall: f64,
    /// The cosine from which on a pair means the same, where F1 is best.
    threshold: f64,
    seconds: f64,
}

pub(super) fn run(flags: &Eval) -> anyhow::Result<()> {
    let start = Instant::now();
    let only = flags.limit.is_none() && flags.scoring.is_none() && flags.qrels.is_none() && flags.rerank.is_none();
    anyhow::ensure!(
        only && !flags.bm25 && flags.query_prefix.is_none(),
        "--limit, --scoring, --qrels, --bm25, --rerank and --query-prefix do not apply to this task"
    );
    let data = Paraphrases::open(&flags.data)?;
    let embedder = Embedder::open(&flags.model, &flags.compute, None, flags.passage_prefix.as_deref())?;
    let texts: Vec<&str> = data.sentences.iter().map(|sentence| sentence.text.as_str()).collect();
    let vectors = embedder.embed(&texts, Side::Passage, "sentences")?;
    // Each is nearest to itself.
    let near = embedder.nearest(&vectors, &vectors, texts.len(), Paraphrases::NEAREST + 1);
    let scores = data.scores(&near);
    let result = Result {
        task: "paraphrases",
        model: flags.model.model.as_deref().unwrap_or(BuiltIn::Sentences.name()),
        data: &flags.data,
        sentences: texts.len(),
        duplicates: data.duplicates.len(),
        average_precision: scores.average_precision,
        f1: scores.f1,
        precision: scores.precision,
        recall: scores.recall,
        threshold: scores.f1_threshold,
        seconds: start.elapsed().as_secs_f64(),
    };
    if flags.json {
        return output::json(&result);
    }
    let Result { average_precision, f1, precision, recall, threshold, seconds, .. } = result;
    let counts = format!("{} sentences, {} duplicates", thousands(result.sentences), thousands(result.duplicates));
    output::line(&counts)?;
    output::line(&format!("  average precision {average_precision:.4}"))?;
    output::line(&format!(
        "  best F1           {f1:.4} (precision {precision:.4}, recall {recall:.4}) from a cosine of {threshold:.4} on"
    ))?;
    output::line(&format!("  {seconds:.1} s"))
}
