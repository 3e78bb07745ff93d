//! The model card: what the model is, what it was trained on, how good it is, and how to use it, as a README.md that the
//! Hugging Face Hub shows.

use std::path::Path;

use super::plan::Plan;
use super::run::{FoldScores, Results};
use crate::score::Score;
use crate::task::TaskKind;

/// Mistakes that are shown.
const MISTAKES: usize = 5;

pub(super) fn write(plan: &Plan, results: &Results, score: Option<&Score>) -> String {
    let name = |path: &str| {
        let path = Path::new(path);
        path.file_name().map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned())
    };
    let recipe = &plan.recipe;
    let (pipeline, class, command) = match plan.task.kind {
        TaskKind::Classify | TaskKind::Multilabel => {
            ("text-classification", "AutoModelForSequenceClassification", "classify --model DIR 'A text.'")
        }
        TaskKind::Pair | TaskKind::Regress => (
            "text-classification",
            "AutoModelForSequenceClassification",
            "classify --model DIR --pair 'A text.' 'Another one.'",
        ),
        TaskKind::Tag => ("token-classification", "AutoModelForTokenClassification", "tag --model DIR 'A text.'"),
        TaskKind::Qa => (
            "question-answering",
            "AutoModelForQuestionAnswering",
            "answer --model DIR --question 'Who?' --passage 'A text.'",
        ),
        TaskKind::Choice => (
            "multiple-choice",
            "AutoModelForMultipleChoice",
            "choose --model DIR --context 'A beginning' 'an end' 'another end'",
        ),
        TaskKind::Embed => ("sentence-similarity", "SentenceTransformer", "embed --model DIR 'A text.'"),
    };
    let library = if plan.task.kind == TaskKind::Embed { "sentence-transformers" } else { "transformers" };
    let start = name(&recipe.model);
    let mut text = format!(
        "---\nlibrary_name: {library}\npipeline_tag: {pipeline}\ntags:\n- {}\n- henson\n---\n\n# {} for {}\n\n\
         Fine-tuned by henson from `{start}`: {} layers of {}. All settings are in recipe.toml, the course of the \
         training in metrics.jsonl and report.html.\n",
        plan.task.name, start, plan.task.name, plan.config.num_hidden_layers, plan.config.hidden_size
    );
    text += &format!("\n## Data\n\n- trained on `{}`: {} examples", name(&recipe.train), plan.train.examples.len());
    if plan.train.skipped > 0 {
        text += &format!(", without {} bad rows", plan.train.skipped);
    }
    text += "\n";
    match &plan.dev {
        Some(dev) if recipe.dev_rows > 0 => {
            text += &format!(
                "- chosen by {} more examples of it, held out (`split_seed` {})\n",
                dev.examples.len(),
                recipe.split_seed
            );
        }
        Some(dev) => text += &format!("- chosen by `{}`: {} examples\n", name(&recipe.dev), dev.examples.len()),
        None => {}
    }
    if !plan.config.id2label.is_empty() && plan.task.kind != TaskKind::Regress {
        let labels: Vec<String> = plan.config.label_names().iter().map(|label| format!("`{label}`")).collect();
        text += &format!("- labels: {}\n", labels.join(", "));
    }
    text += &format!(
        "\n## Recipe\n\nBatches of {}, {} epochs, learning rate {:e}, at most {} tokens, seed {}; {} updates, {:.0} s. The \
         best model was that after {} updates{}.\n",
        recipe.batch_size,
        recipe.epochs,
        recipe.learning_rate,
        recipe.length(plan.task, plan.config.max_position_embeddings),
        recipe.seed,
        results.steps,
        results.seconds,
        results.best_step,
        if results.stopped_early { "; training ended early, because nothing got better" } else { "" },
    );
    if let Some(folds) = &results.folds {
        text += &estimate(results, folds);
    }
    if let Some(score) = score {
        text += "\n## Scores\n\nOn the data that the model was chosen by, so rather too good than too bad.\n\n";
        text += "| score | value |\n|---|---|\n";
        for (name, value) in &score.metrics {
            text += &format!("| {name} | {value:.4} |\n");
        }
        if let Some(reason) = &results.degenerate {
            text += &format!(
                "\n**This model learnt nothing: it {reason}.** Try another seed, more epochs, or another learning rate.\n"
            );
        }
        if !score.mistakes.is_empty() {
            text += "\nSome of its worst mistakes:\n\n";
        }
        for mistake in score.mistakes.iter().take(MISTAKES) {
            text += &format!(
                "- {}: expected {}, predicted {}\n",
                plain(&mistake.text),
                plain(&mistake.expected),
                plain(&mistake.predicted)
            );
        }
    }
    let python = match plan.task.kind {
        TaskKind::Embed => format!("from sentence_transformers import {class}\nvectors = {class}(DIR).encode(TEXTS)"),
        _ => format!(
            "from transformers import AutoTokenizer, {class}\n\
             model, tokenizer = {class}.from_pretrained(DIR), AutoTokenizer.from_pretrained(DIR)"
        ),
    };
    text += &format!("\n## Use\n\n```sh\nhenson {command}\n```\n\n```python\n{python}\n```\n");
    text
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

/// Foreign text on one line, without anything that Markdown would take for its own.
fn plain(text: &str) -> String {
    let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if "\\`*_{}[]<>#|".contains(c) {
            out.push('\\');
        }
        out.push(c);
    }
    out
}
