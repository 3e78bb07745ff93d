//! `henson eval --task perplexity`: e to the mean of −ln P over the pieces of a text, for a masked LM of its
//! pseudo-log-likelihood (Salazar et al. 2020). Comparable only between models with the same vocabulary; the figure by
//! word (separated by white space) is comparable beyond, as far as unknown words are rare.

use std::ops::ControlFlow;
use std::path::Path;

use anyhow::Context;
use serde::Serialize;

use super::{Choice, Scorer, Speed};
use crate::flags::ModelName;
use crate::flags::eval::Eval;
use crate::input::Lines;
use crate::output::{self, Progress};

/// Texts that are read and scored at a time.
const TOGETHER: usize = 256;

/// What `--json` prints.
#[derive(Serialize)]
struct Result<'a> {
    task: &'static str,
    model: &'a str,
    data: &'a Path,
    scoring: &'static str,
    loss: f64,
    perplexity: f64,
    accuracy: f64,
    word_perplexity: f64,
    texts: usize,
    words: usize,
    pieces: usize,
    /// With those of all masked copies.
    tokens: usize,
    seconds: f64,
    tokens_per_s: f64,
}

pub(super) fn run(flags: &Eval, model: &ModelName) -> anyhow::Result<()> {
    let mut texts = Texts::open(flags)?;
    let scorer = Scorer::of_flags(flags, model)?;
    let mut progress = Progress::new("texts", flags.limit.map(|limit| limit as u64).or(texts.lines.bytes));
    let (mut count, mut words, mut pieces, mut correct, mut sum) = (0, 0, 0, 0, 0.0);
    let mut speed = Speed::start();
    loop {
        let first_line = texts.lines.number + 1;
        let some = texts.next(TOGETHER)?;
        if some.is_empty() {
            break;
        }
        let some: Vec<&str> = some.iter().map(String::as_str).collect();
        let before = speed.tokens;
        let scored = scorer.model.log_likelihoods(&some, scorer.scoring, |done| {
            speed.tokens = before + done.tokens;
            let texts_done = count + done.texts;
            progress.at(if flags.limit.is_some() { texts_done as u64 } else { texts.lines.read() }, texts_done);
            ControlFlow::Continue(())
        });
        let scored = scored.with_context(|| format!("in {}, texts from line {first_line}", texts.lines.name))?;
        count += some.len();
        words += some.iter().map(|text| text.split_whitespace().count()).sum::<usize>();
        for text in scored {
            pieces += text.pieces.len();
            correct += text.correct;
            sum += text.log_likelihood;
        }
    }
    progress.finish();
    anyhow::ensure!(pieces > 0, "{} has no text: expected one per line", texts.lines.name);
    let loss = -sum / pieces as f64;
    let result = Result {
        task: "perplexity",
        model: model.shown(),
        data: &flags.data,
        scoring: scorer.name(),
        loss,
        perplexity: loss.exp(),
        accuracy: correct as f64 / pieces as f64,
        word_perplexity: (-sum / words as f64).exp(),
        texts: count,
        words,
        pieces,
        tokens: speed.tokens,
        seconds: speed.seconds(),
        tokens_per_s: speed.per_second(),
    };
    if flags.json {
        return output::json(&result);
    }
    let Result { perplexity, accuracy, word_perplexity, texts, tokens, seconds, tokens_per_s, .. } = result;
    output::line(&format!("{texts} texts of {}: {}", flags.data.display(), scorer.description()))?;
    output::line(&format!("  loss        {loss:.4}"))?;
    output::line(&format!("  perplexity  {perplexity:.3} per token, {word_perplexity:.3} per word"))?;
    output::line(&format!("  accuracy    {:.2}%", 100.0 * accuracy))?;
    output::line(&format!("  tokens      {pieces}, in {words} words (separated by white space)"))?;
    output::line(&format!(
        "  speed       {tokens_per_s:.0} tokens/s, {tokens} in {seconds:.1} s with all masked copies"
    ))
}

/// The lines of a file that are taken: not the blank ones, and of the others what `--limit` and `--sample` choose.
struct Texts {
    lines: Lines,
    choice: Choice,
    /// Lines that were not blank.
    seen: usize,
}

impl Texts {
    fn open(flags: &Eval) -> anyhow::Result<Self> {
        let mut choice = Choice { limit: flags.limit, spread_over: None };
        if flags.sample {
            let stdin = flags.data == Path::new("-");
            anyhow::ensure!(!stdin, "--sample reads its file twice, which standard input does not allow: name a file");
            let mut all = Self { lines: Lines::open(Some(&flags.data))?, choice, seen: 0 };
            while all.next_text()?.is_some() {}
            choice.spread_over = Some(all.seen);
        }
        Ok(Self { lines: Lines::open(Some(&flags.data))?, choice, seen: 0 })
    }

    /// Up to `most` texts; none at the end.
    fn next(&mut self, most: usize) -> anyhow::Result<Vec<String>> {
        let mut texts = Vec::new();
        let last = self.choice.limit.filter(|_| self.choice.spread_over.is_none());
        while texts.len() < most && last.is_none_or(|last| self.seen < last) {
            let Some(text) = self.next_text()? else { break };
            if self.choice.takes(self.seen - 1) {
                texts.push(text);
            }
        }
        Ok(texts)
    }

    fn next_text(&mut self) -> anyhow::Result<Option<String>> {
        while let Some(line) = self.lines.next_line()? {
            if !line.trim().is_empty() {
                self.seen += 1;
                return Ok(Some(line));
            }
        }
        Ok(None)
    }
}
