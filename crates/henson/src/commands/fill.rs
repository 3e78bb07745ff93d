//! `henson fill`.

use henson_checkpoint::CheckpointError;
use henson_infer::{Filled, InferError, Model, Want};
use serde::Serialize;

use crate::built_in::BuiltIn;
use crate::flags::Fill;
use crate::{input, models, output};

/// What `--json` prints for a text. Offsets are in characters.
#[derive(Serialize)]
struct Line<'a> {
    text: &'a str,
    #[serde(flatten)]
    filled: Filled,
}

pub(crate) fn run(flags: &Fill) -> anyhow::Result<()> {
    let device = flags.ask.compute.device()?;
    let path = models::find(&flags.ask.model, BuiltIn::General)?;
    let model = Model::open(&path, &device, flags.ask.compute.dtype(), Want::MaskedLm).map_err(|error| {
        let misfit = matches!(error, InferError::Checkpoint(CheckpointError::DoesNotFit { .. }));
        let error = anyhow::Error::from(error);
        let hint = || output::needs_masked_lm("fill", &path);
        if misfit { error.context(hint()) } else { error }
    })?;
    output::warn_of_length(flags.ask.length.max_length, model.most_tokens());
    input::for_each(&flags.ask.texts, |texts, numbers| {
        let filled = model.fill(texts, flags.top, flags.ask.length.length());
        let filled = filled.map_err(|error| error.numbered(numbers))?;
        output::warn_cut(numbers, filled.iter().map(|f| f.dropped));
        texts.iter().zip(filled).try_for_each(|(text, filled)| print(text, filled, flags.ask.json))
    })
}

/// A token without the space before it; one that is nothing but white space is quoted.
fn readable(token: &str) -> String {
    match token.trim() {
        "" => format!("{token:?}"),
        text => text.to_owned(),
    }
}

fn print(text: &str, filled: Filled, as_json: bool) -> anyhow::Result<()> {
    if as_json {
        return output::json(&Line { text, filled: filled.in_characters(text) });
    }
    output::line(text)?;
    for (i, blank) in filled.blanks.iter().enumerate() {
        if filled.blanks.len() > 1 {
            output::line(&format!("  blank {}", i + 1))?;
        }
        if blank.candidates.is_empty() {
            output::line("    (in the part that was cut off)")?;
        }
        for c in &blank.candidates {
            let bar = "█".repeat((c.probability * 30.0).round() as usize);
            output::line(&format!("    {:>6.2}%  {:<16} {bar}", 100.0 * c.probability, readable(&c.text)))?;
        }
    }
    Ok(())
}
