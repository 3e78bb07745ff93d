//! `henson eval --task diagnostics`: what a masked LM expects at the end of a sentence, next to what people expect there (Ettinger
//! 2020). FILE is a set in the layout of github.com/aetting/lm-diagnostics: CPRAG-102, ROLE-88, or one of the two parts of NEG-136.
//! Sentences are laid out and scored as its scripts do it.
//!
//! Words of more than one token have no probability of their own: items with such targets are counted, and left out of what they
//! would be compared in.

mod scores;
mod sets;

use std::collections::BTreeMap;
use std::path::Path;

use henson_infer::{Length, Model};
use serde::Serialize;

use super::Scorer;
use crate::flags::ModelName;
use crate::flags::eval::Eval;
use crate::output::{self, Progress};
use scores::{Found, Share};
use sets::Item;

/// Where an expected word is looked for: among so many predictions.
const TOP: [usize; 2] = [1, 5];

/// Contexts that are filled at a time.
const TOGETHER: usize = 16;

/// What `--json` prints.
#[derive(Serialize)]
struct Result<'a> {
    task: &'static str,
    set: &'static str,
    model: &'a str,
    data: &'a Path,
    items: usize,
    /// Targets that are not one token.
    out_of_vocabulary: Vec<String>,
    #[serde(flatten)]
    found: Found,
}

pub(super) fn run(flags: &Eval, model: &ModelName) -> anyhow::Result<()> {
    anyhow::ensure!(
        flags.limit.is_none() && flags.scoring.is_none(),
        "--limit, --sample and --scoring do not apply to this task: sets are small, and only their last word is predicted"
    );
    let (set, items) = sets::read(&flags.data)?;
    let Scorer { model: opened, .. } = Scorer::of_flags(flags, model)?;
    let (answers, out_of_vocabulary) = ask(&opened, &items)?;
    let found = scores::score(set, &items, &answers);
    let (data, count) = (flags.data.as_path(), items.len());
    let result = Result {
        task: "diagnostics",
        set: set.name(),
        model: model.shown(),
        data,
        items: count,
        out_of_vocabulary,
        found,
    };
    if flags.json { output::json(&result) } else { print(&result) }
}

/// What the model says about one question of an item.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Answer {
    /// The target's probability; none where it is not one token.
    target: Option<f64>,
    /// Whether an expected word is among the first predictions, for each of [`TOP`].
    hits: [bool; TOP.len()],
}

/// Answers to all questions of all items, and the targets that have no probability.
fn ask(model: &Model, items: &[Item]) -> anyhow::Result<(Vec<Vec<Answer>>, Vec<String>)> {
    let mask = model.tokenizer().special().mask.as_ref().map(|mask| mask.text.clone());
    let mask = mask.ok_or_else(|| anyhow::anyhow!("the tokenizer of {} has no mask token", model.path().display()))?;
    let everything = model.config().model.sizes().vocab_size;
    // Questions about the same context are answered by one sequence.
    let mut contexts: BTreeMap<&str, Vec<(usize, usize)>> = BTreeMap::new();
    for (i, item) in items.iter().enumerate() {
        for (j, question) in item.questions.iter().enumerate() {
            contexts.entry(&question.context).or_default().push((i, j));
        }
    }
    let mut answers: Vec<Vec<Answer>> =
        items.iter().map(|item| vec![Answer::default(); item.questions.len()]).collect();
    let mut unknown = std::collections::BTreeSet::new();
    let contexts: Vec<(&str, Vec<(usize, usize)>)> = contexts.into_iter().collect();
    let mut progress = Progress::new("contexts", Some(contexts.len() as u64));
    for (chunk, some) in contexts.chunks(TOGETHER).enumerate() {
        let texts: Vec<String> = some.iter().map(|(context, _)| format!("{context} {mask}.")).collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        let filled = model.fill(&texts, everything, Length::CUT)?;
        for ((context, questions), filled) in some.iter().zip(filled) {
            let Some(blank) = filled.blanks.last().filter(|blank| !blank.candidates.is_empty()) else {
                anyhow::bail!("the context {context:?} is longer than the model takes");
            };
            let probabilities: BTreeMap<u32, f64> =
                blank.candidates.iter().map(|candidate| (candidate.id, f64::from(candidate.probability))).collect();
            for &(i, j) in questions {
                let question = &items[i].questions[j];
                let id = token_at_end(model, context, &mask, &question.target)?;
                let target = id.and_then(|id| probabilities.get(&id).copied());
                if target.is_none() {
                    unknown.insert(question.target.clone());
                }
                let expected = question.expected.iter();
                let expected = expected
                    .map(|word| token_at_end(model, context, &mask, word))
                    .collect::<anyhow::Result<Vec<_>>>()?;
                let among = |top: usize| {
                    blank.candidates.iter().take(top).any(|candidate| expected.contains(&Some(candidate.id)))
                };
                answers[i][j] = Answer { target, hits: TOP.map(among) };
            }
        }
        let done = chunk * TOGETHER + some.len();
        progress.at(done as u64, done);
    }
    progress.finish();
    Ok((answers, unknown.into_iter().collect()))
}

/// The token that a word is in place of the mask at the end of a context, if it is one.
fn token_at_end(model: &Model, context: &str, mask: &str, word: &str) -> anyhow::Result<Option<u32>> {
    let (masked, filled) = (format!("{context} {mask}."), format!("{context} {word}."));
    let (masked, filled) = (model.tokenizer().encode(&masked)?, model.tokenizer().encode(&filled)?);
    let special = model.tokenizer().special();
    let place = masked.ids.iter().rposition(|id| special.mask.as_ref().is_some_and(|mask| mask.id == *id));
    let token = place.filter(|_| masked.len() == filled.len()).map(|place| filled.ids[place]);
    Ok(token.filter(|id| special.unk.as_ref().is_none_or(|unknown| unknown.id != *id)))
}

fn print(result: &Result<'_>) -> anyhow::Result<()> {
    let Found { accuracy, sensitivity, probabilities, correlation } = &result.found;
    output::line(&format!("{} of {}: {} items", result.set, result.data.display(), result.items))?;
    let row = |name: String, share: &Share| {
        output::line(&format!("  {name:<58} {:>6.1}%  {:>4} of {}", 100.0 * share.share, share.right, share.count))
    };
    output::line("expected word among the predictions")?;
    for share in accuracy {
        row(format!("{}, first {}", share.condition, share.top.unwrap_or_default()), share)?;
    }
    output::line("probabilities in the expected order")?;
    for share in sensitivity {
        let by = share.threshold.filter(|threshold| *threshold > 0.0).map_or(String::new(), |by| format!(", by {by}"));
        row(format!("{}{by}", share.condition), share)?;
    }
    if !probabilities.is_empty() {
        output::line("mean probability of targets")?;
    }
    for mean in probabilities {
        output::line(&format!("  {:<58} {:>7.4}", mean.condition, mean.mean))?;
    }
    if let Some(correlation) = correlation {
        output::line(&format!(
            "differences of probability against those of cloze: Pearson {:.3}, Spearman {:.3}",
            correlation.pearson, correlation.spearman
        ))?;
    }
    if !result.out_of_vocabulary.is_empty() {
        let words = result.out_of_vocabulary.join(", ");
        output::line(&format!("left out, because they are not one token: {words}"))?;
    }
    Ok(())
}
