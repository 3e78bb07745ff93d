//! `henson fill`.

use anyhow::Context;
use henson_infer::{Filled, Model, Want};
use serde_json::json;

use crate::flags::Fill;
use crate::{input, models, output};

pub(crate) fn run(flags: &Fill) -> anyhow::Result<()> {
    anyhow::ensure!(flags.top > 0, "--top starts at 1");
    let device = flags.compute.device()?;
    let path = models::resolve(&flags.model.model, flags.model.download)?;
    let model = Model::open(&path, &device, flags.compute.dtype, Want::MaskedLm)
        .with_context(|| format!("cannot fill with {}: a model with a masked-LM head is needed", path.display()))?;
    input::for_each(&flags.texts, |texts, first| {
        let filled = model.fill(texts, flags.top, flags.length.length())?;
        output::warn_cut(first, filled.iter().map(|f| f.dropped));
        texts.iter().zip(&filled).try_for_each(|(text, filled)| print(text, filled, flags.json))
    })
}

fn print(text: &str, filled: &Filled, as_json: bool) -> anyhow::Result<()> {
    if as_json {
        let blanks: Vec<_> = filled
            .blanks
            .iter()
            .map(|blank| {
                let predictions: Vec<_> = blank
                    .candidates
                    .iter()
                    .map(|c| json!({"token": c.token, "id": c.id, "probability": c.probability}))
                    .collect();
                json!({"start": blank.start, "end": blank.end, "predictions": predictions})
            })
            .collect();
        return output::json(&json!({"text": text, "masks": blanks, "dropped": filled.dropped}));
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
            output::line(&format!("    {:>6.2}%  {:<16} {bar}", 100.0 * c.probability, c.token))?;
        }
    }
    Ok(())
}
