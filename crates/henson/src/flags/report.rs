//! The flags of `henson report`.

use std::path::PathBuf;

use clap::Args;

#[derive(Args, Debug)]
#[command(
    after_help = "Examples:\n  henson report runs/mini\n  henson report runs/mini runs/no-nsp --out compared.html\n  \
henson report --json runs/* | jq '.final.loss'\n\n\
A run may still be training. The page is one file that loads nothing: open it in any browser, send it to anybody."
)]
pub(crate) struct Report {
    /// Directories of runs: what was given to `--out` when they were trained
    #[arg(value_name = "DIR", required = true)]
    pub(crate) runs: Vec<PathBuf>,

    /// Where to write the page [default: DIR/report.html; for several runs report.html]
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,

    /// Replace FILE even if it is something else than a report
    #[arg(long)]
    pub(crate) overwrite: bool,

    /// Print one JSON object per run: steps, tokens, seconds, final and best metrics
    #[arg(long)]
    pub(crate) json: bool,
}
