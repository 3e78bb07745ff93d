//! `henson report`: the page of one run or of several, and their numbers.

use std::path::{Path, PathBuf};

use henson_train::report::{Figure, Run, Summary, is_report, write};

use crate::flags::report::Report;
use crate::output;

pub(crate) fn run(flags: &Report) -> anyhow::Result<()> {
    let out = match (&flags.out, flags.runs.as_slice()) {
        (Some(out), _) if out.is_dir() => out.join("report.html"),
        (Some(out), _) => out.clone(),
        (None, [directory]) => directory.join("report.html"),
        (None, _) => PathBuf::from("report.html"),
    };
    let runs = open(&flags.runs)?;
    // A page that stands there was made by this command or by the run itself; anything else is somebody's work.
    anyhow::ensure!(
        flags.overwrite || !out.exists() || is_report(&out),
        "{} exists already, is not a report of henson and was not touched: choose another --out, or give --overwrite",
        out.display()
    );
    write(&out, &runs)?;
    let summaries: Vec<Summary> = runs.iter().map(Run::summary).collect();
    if flags.json {
        summaries.iter().try_for_each(output::json)?;
    } else {
        table(&summaries).iter().try_for_each(|line| output::line(line))?;
    }
    output::message(&format!("wrote {}", out.display()));
    Ok(())
}

/// Reads all runs. Those whose directories have the same name are called by their paths.
fn open(directories: &[PathBuf]) -> anyhow::Result<Vec<Run>> {
    if let Some(wrong) = directories.iter().find(|path| !path.is_dir()) {
        anyhow::bail!(
            "{} is not a directory: expected the --out of a run of `henson pretrain` or `finetune`",
            wrong.display()
        );
    }
    let mut runs = directories.iter().map(|path| Run::open(path)).collect::<Result<Vec<_>, _>>()?;
    runs.iter().flat_map(|run| &run.skipped).for_each(|text| output::warn(text));
    let names: Vec<String> = runs.iter().map(|run| run.name.clone()).collect();
    for ((run, name), path) in runs.iter_mut().zip(&names).zip(directories) {
        if names.iter().filter(|other| *other == name).count() > 1 {
            run.name = path_name(path);
        }
    }
    Ok(runs)
}

fn path_name(path: &Path) -> String {
    path.components().collect::<PathBuf>().display().to_string()
}

/// A row for each run, a column for each figure that any of them has.
fn table(summaries: &[Summary]) -> Vec<String> {
    let figures: Vec<Vec<Figure>> = summaries.iter().map(Summary::figures).collect();
    let mut labels: Vec<&str> = Vec::new();
    for figure in figures.iter().flatten() {
        if !labels.contains(&figure.label.as_str()) {
            labels.push(&figure.label);
        }
    }
    let mut rows: Vec<Vec<String>> =
        vec![std::iter::once("run").chain(labels.iter().copied()).map(str::to_owned).collect()];
    for (summary, figures) in summaries.iter().zip(&figures) {
        let cell =
            |label: &&str| figures.iter().find(|figure| figure.label == **label).map_or("–", |figure| &figure.text);
        rows.push(std::iter::once(summary.name.as_str()).chain(labels.iter().map(cell)).map(str::to_owned).collect());
    }
    // Escapes are wider than what they stand for.
    for text in rows.iter_mut().flatten() {
        *text = output::harmless(text).into_owned();
    }
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..=labels.len()).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).enumerate();
        let cells =
            cells.map(|(i, (text, width))| if i == 0 { format!("{text:<width$}") } else { format!("{text:>width$}") });
        cells.collect::<Vec<_>>().join("  ")
    };
    rows.iter().map(line).collect()
}
