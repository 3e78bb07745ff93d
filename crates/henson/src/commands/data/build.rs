//! `henson data build`.

use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Instant;

use anyhow::Context;
use henson_data::{BuildOptions, BuildReport, Counts, DataError, Documents, Format, SourceFiles, build};
use henson_text::Tokenizer;
use serde::Serialize;

use crate::commands::bench::peak_mib;
use crate::flags::data::DataBuild;
use crate::output::{self, Progress, thousands};
use crate::{models, signals};

/// The name of FILES among the sources.
const FILES: &str = "files";

/// What `--json` prints.
#[derive(Serialize)]
struct Summary<'a> {
    out: &'a Path,
    files: usize,
    skipped_files: usize,
    bytes: u64,
    documents: u64,
    duplicates: u64,
    empty: u64,
    cut: u64,
    train: Counts,
    held_out: Counts,
    shards: usize,
    seconds: f64,
    mb_per_s: f64,
    tokens_per_s: f64,
    peak_mib: f64,
    digest: &'a str,
}

pub(crate) fn run(flags: &DataBuild) -> anyhow::Result<()> {
    let start = Instant::now();
    // A name that is not a directory: what ELMo reads needs no file.
    let bytes = flags.tokenizer.as_os_str() == "bytes" && !flags.tokenizer.exists();
    let tokenizer = match bytes {
        true => Tokenizer::of_bytes()?,
        false => Tokenizer::open(&models::directory(&flags.tokenizer)?)
            .with_context(|| format!("cannot open the tokenizer in {}", flags.tokenizer.display()))?,
    };
    let options = options(flags)?;
    // The first interruption cannot end a wait for standard input, the second can.
    let stop = signals::stop()?;
    let mut bar: Option<Progress> = None;
    let built = build(&tokenizer, &flags.out, &options, &mut |progress| {
        let bar = bar.get_or_insert_with(|| Progress::new("documents", progress.file_total));
        bar.show(progress.file_bytes, |seconds| {
            let Counts { documents, pieces, .. } = progress.written;
            let rate = progress.bytes as f64 / 1e6 / seconds;
            format!("{} documents, {} tokens, {rate:.1} MB/s", thousands(documents), thousands(pieces))
        });
        !stop.load(Ordering::Relaxed)
    });
    if let Some(bar) = bar {
        bar.finish();
    }
    let report = match built {
        Err(DataError::Stopped) => {
            output::message("interrupted; nothing was written");
            std::process::exit(130);
        }
        built => built?,
    };
    warn(&report);
    tell(flags, &report, start.elapsed().as_secs_f64())
}

/// What the flags mean.
fn options(flags: &DataBuild) -> anyhow::Result<BuildOptions> {
    let named = flags.files.iter().chain(flags.source.iter().flat_map(|source| &source.paths));
    if let Some(table) =
        named.chain(&flags.held_out_files).find(|path| flags.format.is_none() && Format::is_other_table(path))
    {
        anyhow::bail!(
            "{} is a table, whose cells would all be read as text: write the texts alone into a file, one per line (with \
             --document-per-line) or as JSON lines; --format text reads the table as it is",
            table.display()
        );
    }
    let mut sources: Vec<SourceFiles> = Vec::new();
    if !flags.files.is_empty() {
        sources.push(SourceFiles { name: FILES.to_owned(), weight: 1.0, paths: flags.files.clone() });
    }
    for source in &flags.source {
        match sources.iter_mut().find(|known| known.name == source.name) {
            Some(known) => {
                anyhow::ensure!(
                    known.weight == source.weight,
                    "source {} has two weights, {} and {}: give it the same each time",
                    source.name,
                    known.weight,
                    source.weight
                );
                known.paths.extend_from_slice(&source.paths);
            }
            None => sources.push(source.clone()),
        }
    }
    let default_share = if flags.held_out_files.is_empty() { 0.01 } else { 0.0 };
    Ok(BuildOptions {
        sources,
        held_out_files: flags.held_out_files.clone(),
        held_out: flags.held_out.unwrap_or(default_share),
        seed: flags.seed,
        format: flags.format,
        documents: match (flags.document_per_line, flags.document_per_file) {
            (true, _) => Documents::Lines,
            (_, true) => Documents::Files,
            _ => Documents::BetweenEmptyLines,
        },
        field: flags.field.clone(),
        column: flags.column.clone(),
        sentences: flags.sentences,
        lossy: flags.lossy,
        threads: flags.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from)),
        shard_size: (flags.shard_size as u64) << 20,
        overwrite: flags.overwrite,
    })
}

fn warn(report: &BuildReport) {
    if let Some(first) = report.skipped.first() {
        output::warn(&format!(
            "{} files in directories were skipped because of their names, such as {}; name them to read them{}",
            report.skipped.len(),
            first.display(),
            if report.skipped.iter().any(|path| path.extension().is_some_and(|ending| ending == "md")) {
                " (--document-per-file reads all .md)"
            } else {
                ""
            }
        ));
    }
    if report.cut > 0 {
        output::warn(&format!("documents over 8 MiB were cut: {} more of them than in the text", report.cut));
    }
    if report.held_out.documents == 0 {
        output::warn("no documents are held out: nothing to evaluate on while training; see --held-out");
    }
}

fn tell(flags: &DataBuild, report: &BuildReport, seconds: f64) -> anyhow::Result<()> {
    let pieces = report.train.pieces + report.held_out.pieces;
    let summary = Summary {
        out: &flags.out,
        files: report.files,
        skipped_files: report.skipped.len(),
        bytes: report.bytes,
        documents: report.documents,
        duplicates: report.duplicates,
        empty: report.empty,
        cut: report.cut,
        train: report.train,
        held_out: report.held_out,
        shards: report.shards,
        seconds,
        mb_per_s: report.bytes as f64 / 1e6 / seconds,
        tokens_per_s: pieces as f64 / seconds,
        peak_mib: peak_mib(),
        digest: &report.digest,
    };
    if flags.json {
        return output::json(&summary);
    }
    let line = |name: &str, text: String| output::line(&format!("{name:<12} {text}"));
    let counts = |counts: &Counts| {
        let Counts { documents, sentences, pieces } = *counts;
        format!("{} documents, {} sentences, {} tokens", thousands(documents), thousands(sentences), thousands(pieces))
    };
    line("read", format!("{:.1} MB of text in {} files", report.bytes as f64 / 1e6, report.files))?;
    let (documents, duplicates) = (thousands(report.documents), thousands(report.duplicates));
    line("documents", format!("{documents}, of which {duplicates} duplicates and {} empty", thousands(report.empty)))?;
    line("train", counts(&report.train))?;
    line("held out", counts(&report.held_out))?;
    line("shards", format!("{} in {}", report.shards, flags.out.display()))?;
    let Summary { mb_per_s, tokens_per_s, peak_mib, .. } = summary;
    let rate = thousands(tokens_per_s as u64);
    line("speed", format!("{seconds:.1} s: {mb_per_s:.1} MB/s, {rate} tokens/s; {peak_mib:.0} MiB of memory at most"))
}
