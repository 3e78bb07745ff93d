//! `henson data stats`.

use henson_data::{Corpus, Cut, Lengths, Split, Stats, stats};
use serde::Serialize;

use crate::flags::data::DataStats;
use crate::output::{self, Progress, thousands};

/// The lengths of sequences to show: BERT's two.
const SEQUENCE_LENGTHS: [usize; 2] = [128, 512];

/// What `--json` prints for a part.
#[derive(Serialize)]
struct Line<'a> {
    split: Split,
    digest: &'a str,
    vocabulary_size: u32,
    #[serde(flatten)]
    stats: &'a Stats,
}

pub(crate) fn run(flags: &DataStats) -> anyhow::Result<()> {
    for split in [Split::Train, Split::HeldOut] {
        let corpus = Corpus::open(&flags.data, split)?;
        if flags.verify {
            corpus.verify()?;
        }
        let tokenizer = super::tokenizer(&corpus)?;
        let unknown = tokenizer.special().unk.as_ref().map(|unknown| unknown.id);
        let mut progress = Progress::new("documents", Some(corpus.documents() as u64));
        let stats = stats(&corpus, tokenizer.template(), unknown, &SEQUENCE_LENGTHS, &mut |document| {
            progress.at(document as u64, document);
            true
        })?;
        progress.finish();
        if flags.json {
            let (digest, vocabulary_size) = (corpus.digest(), corpus.vocabulary().size);
            output::json(&Line { split, digest, vocabulary_size, stats: &stats })?;
        } else {
            show(&corpus, split, &stats)?;
        }
    }
    if flags.verify && !flags.json {
        output::line("all checksums are right")?;
    }
    Ok(())
}

fn show(corpus: &Corpus, split: Split, stats: &Stats) -> anyhow::Result<()> {
    match split {
        Split::Train => {
            let (size, digest) = (corpus.vocabulary().size, &corpus.digest()[..16]);
            output::line(&format!("vocabulary of {} tokens, digest {digest}\n\nTo train on", thousands(size)))?;
        }
        Split::HeldOut => output::line("Held out")?,
    }
    if stats.counts.documents == 0 {
        return output::line("  nothing\n");
    }
    let share = |unknown: Option<u64>, pieces: u64| match unknown {
        Some(unknown) => format!("{:.3}%", 100.0 * unknown as f64 / pieces.max(1) as f64),
        None => "-".to_owned(),
    };
    output::line(&format!(
        "  {:<16} {:>6} {:>12} {:>13} {:>16} {:>9}",
        "source", "weight", "documents", "sentences", "tokens", "unknown"
    ))?;
    let row = |name: &str, weight: String, counts: henson_data::Counts, unknown| {
        output::line(&format!(
            "  {name:<16} {weight:>6} {:>12} {:>13} {:>16} {:>9}",
            thousands(counts.documents),
            thousands(counts.sentences),
            thousands(counts.pieces),
            share(unknown, counts.pieces)
        ))
    };
    for source in &stats.sources {
        row(&source.name, source.weight.to_string(), source.counts, source.unknown)?;
    }
    if stats.sources.len() > 1 {
        row("all", String::new(), stats.counts, stats.unknown)?;
    }
    lengths("sentence", &stats.sentence_lengths)?;
    lengths("document", &stats.document_lengths)?;
    output::line(
        "\n  how full sequences would be, before random shortening\n    length  arrangement      sequences    full     cut",
    )?;
    for packing in &stats.packing {
        let name = match packing.cut {
            Cut::Pairs => "pairs",
            Cut::Documents => "documents",
            Cut::FullSentences => "full-sentences",
            Cut::Blocks => "blocks",
            Cut::Consecutive => "consecutive",
        };
        output::line(&format!(
            "    {:>6}  {name:<14} {:>11} {:>6.1}% {:>6.1}%",
            packing.sequence_length,
            thousands(packing.sequences),
            100.0 * packing.fullness,
            100.0 * packing.cut_off
        ))?;
    }
    output::line("")
}

fn lengths(what: &str, lengths: &Lengths) -> anyhow::Result<()> {
    let [p10, p50, p90, p99] = lengths.percentiles.map(thousands);
    output::line(&format!(
        "\n  tokens of a {what}: mean {:.1}, 10% up to {p10}, half up to {p50}, 90% up to {p90}, 99% up to {p99}, longest {}",
        lengths.mean,
        thousands(lengths.longest)
    ))?;
    let most = lengths.histogram.iter().copied().max().unwrap_or(0).max(1);
    let first = lengths.histogram.iter().position(|&count| count > 0).unwrap_or(0);
    for (place, &count) in lengths.histogram.iter().enumerate().skip(first) {
        let (from, to) = Lengths::bin(place).into_inner();
        let range = if from == to { from.to_string() } else { format!("{from}–{to}") };
        let bar = "█".repeat((40.0 * count as f64 / most as f64).round() as usize);
        output::line(format!("    {range:>15} {:>11} {bar}", thousands(count)).trim_end())?;
    }
    Ok(())
}
