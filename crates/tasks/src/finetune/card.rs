//! The model card: what the model is, what it was trained on, how good it is, and how to use it, as a README.md that the
//! Hugging Face Hub shows. It quotes nothing from the files: people publish such directories, and their texts may be private.

use std::path::Path;

use henson_models::Head;

use super::plan::Plan;
use super::run::{FoldScores, Results};
use crate::distil::DistilSettings;
use crate::forms::Form;
use crate::score::Score;

/// Labels that are listed.
const LABELS: usize = 50;

pub(super) fn write(plan: &Plan, results: &Results, score: Option<&Score>) -> String {
    let name = |path: &str| {
        let path = Path::new(path);
        path.file_name().map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned())
    };
    let recipe = &plan.recipe;
    let Form { library, pipeline, .. } = *plan.task.form;
    let pipeline = if plan.continues() { "text-generation" } else { pipeline };
    let library = if plan.config.model.in_transformers() { library } else { "henson" };
    let (start, sizes) = (name(&recipe.model), plan.config.model.sizes());
    let how = if recipe.is_from_scratch() {
        "Trained by henson from random weights, as"
    } else {
        "Fine-tuned by henson from"
    };
    let mut text = format!(
        "---\nlibrary_name: {library}\npipeline_tag: {pipeline}\ntags:\n- {}\n- henson\n---\n\n# {} for {}\n\n\
         {how} {}: {} layers of {}. All settings are in recipe.toml, the training \
         log in metrics.jsonl and report.html.\n",
        plan.task.name,
        plain(&start),
        plan.task.name,
        code(&start),
        sizes.num_hidden_layers,
        sizes.hidden_size
    );
    let trained_on = recipe.training_files().into_iter().map(|path| code(&name(path))).collect::<Vec<_>>().join(", ");
    text += &format!("\n## Data\n\n- trained on {trained_on}: {} examples", plan.train.examples.len());
    if plan.train.skipped > 0 {
        text += &format!(", without {} bad rows", plan.train.skipped);
    }
    text += "\n";
    if let Some(distil) = &recipe.distil {
        text += &distilled(plan, distil, &name);
    }
    match &plan.dev {
        Some(dev) if recipe.dev_rows > 0 => {
            text += &format!(
                "- chosen by {} more examples of it, held out (`split_seed` {})\n",
                dev.examples.len(),
                recipe.split_seed
            );
        }
        Some(dev) => text += &format!("- chosen by {}: {} examples\n", code(&name(&recipe.dev)), dev.examples.len()),
        None => {}
    }
    if plan.task.form.fewest_labels > 0 {
        text += &format!("- labels: {}\n", listed(&plan.config.task.label_names()));
    }
    text += &format!(
        "\n## Recipe\n\nBatches of {}, {} epochs, learning rate {:e}, at most {} tokens, seed {}; {} updates, {:.0} s. The \
         best model was that after {} updates{}.\n",
        recipe.batch_size,
        recipe.epochs,
        recipe.learning_rate,
        recipe.length(plan.task, &plan.config.model),
        recipe.seed,
        results.steps,
        results.seconds,
        results.best_step,
        if results.stopped_early { "; training stopped early, because the score no longer improved" } else { "" },
    );
    if recipe.average_checkpoints > 1 {
        text += &format!("\nThe weights are the mean of the last {} checkpoints.\n", recipe.average_checkpoints);
    }
    if let Some(linear) = results.linear_head.as_ref().filter(|linear| linear.kept) {
        text += &format!(
            "\nThe encoder is unchanged: a linear head on the mean of its vectors had {} {:.4}, fine-tuning {:.4}. The last layer is \
             one more than the encoder's and only averages, so that the head, which reads the first token, sees the mean.\n",
            results.metric,
            linear.value.unwrap_or(f64::NAN),
            linear.fine_tuned.unwrap_or(f64::NAN)
        );
    }
    if let Some(folds) = &results.folds {
        text += &estimate(results, folds);
    }
    if let Some(score) = score {
        text += "\n## Scores\n\nMeasured on the data that the model was selected by, so slightly optimistic.\n\n";
        text += "| score | value |\n|---|---|\n";
        for (name, value) in &score.metrics {
            text += &format!("| {name} | {value:.4} |\n");
        }
        if let Some(reason) = &results.degenerate {
            text += &format!(
                "\n**Training failed: the model {reason}.** Try another seed, more epochs, or another learning rate.\n"
            );
        }
    }
    text += &how_to_use(plan);
    if let Some(note) = plan.task.form.note() {
        text += &format!("\n{note}\n");
    }
    text
}

/// How the model is used: from the command line, and where another library opens it, from Python.
fn how_to_use(plan: &Plan) -> String {
    let Form { library, command, .. } = *plan.task.form;
    // `transformers` finds one class for a task by itself, and the one with beams by its name alone.
    let own = plan.config.model.class(Head::BeamSpan);
    let class = match plan.recipe.beam_head {
        true => own.as_str(),
        false if plan.continues() => "AutoModelForCausalLM",
        false => plan.task.form.class,
    };
    let text = format!("\n## Use\n\n```sh\nhenson {command}\n```\n");
    if !plan.config.model.in_transformers() {
        return text;
    }
    let python = match library {
        "sentence-transformers" => {
            format!("from sentence_transformers import {class}\nvectors = {class}(DIR).encode(TEXTS)")
        }
        _ => format!(
            "from transformers import AutoTokenizer, {class}\n\
             model, tokenizer = {class}.from_pretrained(DIR), AutoTokenizer.from_pretrained(DIR)"
        ),
    };
    format!("{text}\n```python\n{python}\n```\n")
}

/// Whom the model learned from.
fn distilled(plan: &Plan, distil: &DistilSettings, name: &dyn Fn(&str) -> String) -> String {
    let listed = |paths: &[String]| paths.iter().map(|path| code(&name(path))).collect::<Vec<_>>().join(", ");
    let teachers = listed(&distil.teachers);
    match plan.first_phase() {
        Some(first) => format!(
            "- before that distilled from {teachers} on {}, {} texts without labels\n",
            listed(&distil.transfer.0),
            first.train.examples.len()
        ),
        None => {
            let share = distil.share(plan.train.is_labelled());
            format!(
                "- distilled from {teachers}, which have {share} of the loss (temperature {})\n",
                distil.temperature
            )
        }
    }
}

/// What folds say about the model.
fn estimate(results: &Results, folds: &FoldScores) -> String {
    let mut text = format!(
        "\n## Scores\n\nEstimated by {} folds: each part of the examples was scored by a model that was trained on the others. \
         This model was trained on all of them.\n\n| score | mean of the folds |\n|---|---|\n",
        folds.values.len()
    );
    for (name, value) in &results.scores {
        text += &format!("| {name} | {:.4} |\n", value.as_f64().unwrap_or(f64::NAN));
    }
    if let Some(deviation) = folds.standard_deviation {
        text += &format!("\nThe standard deviation of {} over the folds is {deviation:.4}.\n", results.metric);
    }
    text
}

/// Foreign text on one line, without anything that Markdown or HTML would take for its own.
pub(crate) fn plain(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            c if c.is_control() => out.push(' '),
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            c if "\\`*_{}[]#|~$".contains(c) => out.extend(['\\', c]),
            c => out.push(c),
        }
    }
    out
}

/// A name from outside as code where it is an ordinary one.
pub(crate) fn code(text: &str) -> String {
    match text.contains(|c: char| c.is_control() || "`<>&".contains(c)) {
        true => plain(text),
        false => format!("`{text}`"),
    }
}

/// Labels as a list, of which there may be very many.
pub(crate) fn listed(labels: &[String]) -> String {
    let mut text = labels.iter().take(LABELS).map(|label| code(label)).collect::<Vec<_>>().join(", ");
    if let Some(more) = labels.len().checked_sub(LABELS + 1) {
        text += &format!(" and {} more, which config.json has", more + 1);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_text_stays_text() {
        assert_eq!(plain("\x1b[31m<script>|"), " \\[31m&lt;script&gt;\\|");
        assert_eq!((code("a_b|c"), code("a`b")), ("`a_b|c`".to_owned(), "a\\`b".to_owned()));
        let labels: Vec<String> = (0..52).map(|i| i.to_string()).collect();
        assert!(listed(&labels).ends_with("`49` and 2 more, which config.json has"));
        assert_eq!(listed(&labels[..2]), "`0`, `1`");
    }
}
