//! `henson ablate`: runs the recipes of a set, one after the other, and tabulates what they gave. Variants that are
//! finished are not run again, so an interrupted set can be resumed.

mod tasks;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Context;
use henson_checkpoint::{is_temporary, write_atomic};
use henson_train::metrics::Line;
use henson_train::{Outcome, Recipe, report};
use serde::Serialize;

use crate::commands::eval::{blimp_accuracy, read_blimp};
use crate::commands::pretrain::{Options, Show, plan, pretrain};
use crate::flags::ablate::Ablate;
use crate::output::{self, thousands};

use tasks::{TaskScores, Tasks};

/// What a variant gave.
#[derive(Serialize)]
struct Row {
    variant: String,
    seed: u64,
    parameters: usize,
    steps: u64,
    tokens: u64,
    seconds: f64,
    /// The last evaluation on held-out text, by name, and `blimp`.
    #[serde(flatten)]
    metrics: BTreeMap<String, f64>,
    /// What fine-tuning gave, task by task.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    finetune: Vec<TaskScores>,
}

pub(crate) fn run(flags: &Ablate) -> anyhow::Result<()> {
    output::check_directory(&flags.out)?;
    check_content(&flags.out)?;
    let variants = variants(&flags.set)?;
    if let Some(seed) =
        flags.seeds.iter().enumerate().find_map(|(i, seed)| flags.seeds[..i].contains(seed).then_some(seed))
    {
        anyhow::bail!("--seeds has {seed} twice: expected seeds that differ");
    }
    let sets = flags.settings.sets()?;
    let device = flags.machine.device()?;
    let tasks = Tasks::new(flags)?;
    anyhow::ensure!(
        tasks.is_none() || !variants.contains_key(tasks::DIRECTORY),
        "a variant is named {}, which is where fine-tuned models go: rename {0}.toml",
        tasks::DIRECTORY
    );
    // All is read before the first recipe is run: a mistake in the last shall not show after hours.
    let mut plans = Vec::new();
    for (name, layers) in &variants {
        let layers: Vec<(&str, &str)> = layers.iter().map(|(text, place)| (text.as_str(), place.as_str())).collect();
        for &seed in &flags.seeds {
            let mut recipe = Recipe::parse_layers(&layers, &sets)?;
            // A variant's own data lies within that of the set: the same text with another tokenizer, for example.
            let own = std::mem::take(&mut recipe.data);
            let data = if own.is_empty() { PathBuf::from(&flags.data) } else { Path::new(&flags.data).join(own) };
            (recipe.data, recipe.seed) = (data.display().to_string(), seed);
            let directory = if flags.seeds.len() > 1 { format!("{name}-seed{seed}") } else { name.clone() };
            let plan = plan(recipe, device.threads()).with_context(|| format!("the variant {name}"))?;
            plans.push((name.clone(), flags.out.join(directory), plan));
        }
    }
    let pairs = flags.blimp.as_ref().map(|file| read_blimp(file, flags.blimp_limit, false)).transpose()?;
    let (mut rows, mut runs) = (Vec::new(), Vec::new());
    let count = plans.len();
    for (i, (variant, out, plan)) in plans.into_iter().enumerate() {
        let seed = plan.recipe.seed;
        output::message(&format!("{variant}, seed {seed} ({} of {count})", i + 1));
        let options = Options { stop_at: None, loader_threads: 1, show: Show::Bar };
        if let (Outcome::Interrupted, step) = pretrain(&plan, &device, &out, &options)? {
            return Err(output::Interrupted::saved(step).into());
        }
        let mut row = Row {
            variant,
            seed,
            parameters: plan.parameters(),
            steps: 0,
            tokens: 0,
            seconds: 0.0,
            metrics: BTreeMap::new(),
            finetune: Vec::new(),
        };
        let mut run = report::Run::open(&out)?;
        run.skipped.iter().for_each(|text| output::warn(text));
        for line in &run.lines {
            match line {
                Line::Train(line) => (row.steps, row.tokens, row.seconds) = (line.step, line.tokens, line.seconds),
                Line::Eval(line) => row.metrics = line.metrics.clone(),
                Line::Samples(_) | Line::Note(_) => {}
            }
        }
        if let Some(pairs) = &pairs {
            let accuracy = blimp_accuracy(&out, pairs, &device)?;
            row.metrics.insert("blimp".to_owned(), accuracy);
        }
        if let Some(tasks) = &tasks {
            row.finetune = tasks.run(&out, &flags.out, &device)?;
            run.results.extend(row.finetune.iter().map(TaskScores::written));
        }
        if flags.json {
            output::json(&row)?;
        }
        rows.push(row);
        runs.push(run);
    }
    let table = table(&rows);
    write_atomic(&flags.out.join("results.json"), &serde_json::to_vec_pretty(&rows)?)?;
    write_atomic(&flags.out.join("table.md"), table.as_bytes())?;
    report::write(&flags.out.join("report.html"), &runs)?;
    if !flags.json {
        output::line(table.trim_end())?;
    }
    output::message(&format!("table.md, results.json and report.html are in {}", flags.out.display()));
    Ok(())
}

/// What a set writes beside its runs.
const FILES: [&str; 3] = ["results.json", "table.md", "report.html"];

/// Refuses a directory that holds anything but runs and what a set wrote about them.
fn check_content(out: &Path) -> anyhow::Result<()> {
    let Ok(entries) = std::fs::read_dir(out) else { return Ok(()) };
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.map(|e| e.path())).collect::<Result<_, _>>()?;
    paths.retain(|path| !path.file_name().is_some_and(is_temporary));
    // An empty directory is a run that was killed in its first moment.
    let is_empty = |path: &Path| std::fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none());
    let is_run = |path: &Path| path.join("recipe.toml").is_file() || path.join("run.lock").is_file() || is_empty(path);
    let is_own = |path: &Path| {
        path.file_name().is_some_and(|name| name == tasks::DIRECTORY || FILES.iter().any(|file| name == *file))
    };
    let of_a_set = paths.iter().all(|path| is_run(path) || is_own(path)) && paths.iter().any(|path| is_run(path));
    anyhow::ensure!(
        paths.is_empty() || of_a_set,
        "{} exists already and holds other things than the runs of a set: choose another --out, or delete it",
        out.display()
    );
    Ok(())
}

/// A recipe's texts with the names of their files.
type Layers = Vec<(String, String)>;

/// The variants of a set by name, each with the texts that it is made of.
fn variants(set: &Path) -> anyhow::Result<BTreeMap<String, Layers>> {
    let read = |path: &Path| -> anyhow::Result<(String, String)> {
        let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok((text, path.display().to_string()))
    };
    let entries = std::fs::read_dir(set).with_context(|| format!("cannot read the set {}", set.display()))?;
    let paths: Vec<PathBuf> = entries.map(|entry| entry.map(|e| e.path())).collect::<Result<_, _>>()?;
    let base = set.join("base.toml");
    let base: Layers = if base.is_file() { vec![read(&base)?] } else { Vec::new() };
    let mut variants = BTreeMap::new();
    for path in paths.iter().filter(|path| path.extension().is_some_and(|e| e == "toml")) {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        if name != "base" {
            let mut layers = base.clone();
            layers.push(read(path)?);
            variants.insert(name, layers);
        }
    }
    anyhow::ensure!(!variants.is_empty(), "{} holds no variants: .toml files next to base.toml", set.display());
    Ok(variants)
}

/// A column of the table: the name in the metrics, the heading, and how a value is written.
type Column = (&'static str, &'static str, fn(f64) -> String);

const COLUMNS: [Column; 8] = [
    ("loss", "held-out loss", |x| format!("{x:.4}")),
    ("perplexity", "perplexity", |x| format!("{x:.1}")),
    ("accuracy", "accuracy", |x| format!("{:.1}%", 100.0 * x)),
    ("nsp_accuracy", "next sentence", |x| format!("{:.1}%", 100.0 * x)),
    ("sop_accuracy", "sentence order", |x| format!("{:.1}%", 100.0 * x)),
    ("mlm_accuracy", "generator's accuracy", |x| format!("{:.1}%", 100.0 * x)),
    ("rtd_f1", "replaced tokens, F1", |x| format!("{:.1}%", 100.0 * x)),
    ("blimp", "BLiMP", |x| format!("{:.1}%", 100.0 * x)),
];

/// The rows as a Markdown table; several seeds of a variant, and several runs of a task, as mean ± standard deviation.
fn table(rows: &[Row]) -> String {
    let columns: Vec<_> =
        COLUMNS.iter().filter(|(name, ..)| rows.iter().any(|r| r.metrics.contains_key(*name))).collect();
    let mut lines =
        vec![vec!["variant".to_owned(), "parameters".to_owned(), "tokens".to_owned(), "seconds".to_owned()]];
    lines[0].extend(columns.iter().map(|(_, heading, _)| (*heading).to_owned()));
    lines[0].extend(tasks::headings(rows.first().map_or(&[], |row| &row.finetune)));
    let mut groups: Vec<Vec<&Row>> = Vec::new();
    for row in rows {
        match groups.last_mut().filter(|group| group[0].variant == row.variant) {
            Some(group) => group.push(row),
            None => groups.push(vec![row]),
        }
    }
    for group in &groups {
        let n = group.len() as f64;
        let mean = |value: &dyn Fn(&Row) -> f64| group.iter().map(|row| value(row)).sum::<f64>() / n;
        let mut line = vec![
            group[0].variant.clone(),
            thousands(group[0].parameters),
            thousands(mean(&|row| row.tokens as f64) as usize),
            format!("{:.0}", mean(&|row| row.seconds)),
        ];
        for (name, _, write) in &columns {
            let values: Vec<f64> = group.iter().filter_map(|row| row.metrics.get(*name).copied()).collect();
            line.push(spread(&values, *write));
        }
        let finetuned: Vec<&[TaskScores]> = group.iter().map(|row| row.finetune.as_slice()).collect();
        line.extend(tasks::cells(&finetuned));
        lines.push(line);
    }
    let widths: Vec<usize> =
        (0..lines[0].len()).map(|i| lines.iter().map(|line| line[i].chars().count()).max().unwrap_or(0)).collect();
    let mut text = String::new();
    for (number, line) in lines.iter().enumerate() {
        let cells = line
            .iter()
            .zip(&widths)
            .enumerate()
            .map(|(i, (cell, &width))| if i == 0 { format!("{cell:<width$}") } else { format!("{cell:>width$}") });
        text += &format!("| {} |\n", cells.collect::<Vec<_>>().join(" | "));
        if number == 0 {
            let rules = widths
                .iter()
                .enumerate()
                .map(|(i, &width)| if i == 0 { "-".repeat(width + 2) } else { format!("{}:", "-".repeat(width + 1)) });
            text += &format!("|{}|\n", rules.collect::<Vec<_>>().join("|"));
        }
    }
    text
}

/// A value, or the mean of several with their deviation.
fn spread(values: &[f64], write: fn(f64) -> String) -> String {
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    match values {
        [] => "–".to_owned(),
        [one] => write(*one),
        _ => {
            let variance = values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (n - 1.0);
            format!("{} ± {}", write(mean), write(variance.sqrt()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_join_seeds_and_leave_gaps() {
        let row = |variant: &str, seed, metrics: &[(&str, f64)]| Row {
            variant: variant.to_owned(),
            seed,
            parameters: 1234,
            steps: 1,
            tokens: 5000,
            seconds: 2.0,
            metrics: metrics.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect(),
            finetune: Vec::new(),
        };
        let rows = [
            row("a", 0, &[("loss", 2.0), ("nsp_accuracy", 0.5)]),
            row("a", 1, &[("loss", 4.0), ("nsp_accuracy", 0.7)]),
            row("bc", 0, &[("loss", 3.0)]),
        ];
        let expected = "\
| variant | parameters | tokens | seconds |   held-out loss | next sentence |
|---------|-----------:|-------:|--------:|----------------:|--------------:|
| a       |      1,234 |  5,000 |       2 | 3.0000 ± 1.4142 | 60.0% ± 14.1% |
| bc      |      1,234 |  5,000 |       2 |          3.0000 |             – |
";
        assert_eq!(table(&rows), expected);
    }
}
