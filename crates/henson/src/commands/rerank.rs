//! `henson rerank`.

use henson_infer::{Length, Model, Ranked, Want};
use serde::Serialize;

use crate::built_in::BuiltIn;
use crate::flags::tasks::Rerank;
use crate::{input, models, output};

/// What `--json` prints for a text, the best first.
#[derive(Serialize)]
struct Line {
    /// Its number among the texts, counted from 0.
    index: usize,
    text: String,
    score: f32,
    dropped: usize,
}

pub(crate) fn run(flags: &Rerank) -> anyhow::Result<()> {
    let device = flags.ask.compute.device()?;
    let path = models::find(&flags.ask.model, BuiltIn::General)?;
    let model = Model::open(&path, &device, flags.ask.compute.dtype(), Want::Reranker)?;
    output::warn_of_length(flags.ask.length.max_length, model.most_tokens());
    anyhow::ensure!(!flags.query.trim().is_empty(), "--query is empty: expected a question or what is looked for");
    let own = model.rerank_length();
    let length = Length {
        most: flags.ask.length.max_length.or(own.most),
        windows: flags.ask.length.windows.unwrap_or(own.windows),
    };
    let mut lines: Vec<Line> = Vec::new();
    input::for_each(&flags.ask.texts, |texts, numbers| {
        let ranked = model.rerank(&flags.query, texts, length).map_err(|error| error.numbered(numbers))?;
        output::warn_cut(numbers, ranked.iter().map(|r| r.dropped));
        for (text, Ranked { logit, score, dropped }) in texts.iter().zip(ranked) {
            let score = if flags.raw_scores { logit } else { score };
            lines.push(Line { index: lines.len(), text: (*text).to_owned(), score, dropped });
        }
        Ok(())
    })?;
    // Equals stay in the order that they came in.
    lines.sort_by(|a, b| b.score.total_cmp(&a.score));
    lines.truncate(flags.top.unwrap_or(usize::MAX));
    lines.iter().try_for_each(|line| match flags.ask.json {
        true => output::json(line),
        false => output::line(&format!("{:>10.4}  {}", line.score, line.text)),
    })
}
