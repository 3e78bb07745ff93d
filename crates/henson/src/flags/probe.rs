//! The flags of `henson probe`.

use std::path::PathBuf;

use clap::Args;
use henson_tasks::ProbeTask;
use henson_tensor::DType;

use super::labelled::Labelled;
use super::settings::{RecipeFlags, named};
use super::{Machine, ModelName, parse_count, parse_dtype};

#[derive(Args, Debug)]
#[command(after_help = "\
A probe is a small classifier of spans on an encoder that is left as it is (Tenney et al. 2019): layers 0 (the embeddings) to L are mixed with \
learned weights, tokens of a span are pooled by attention, and a perceptron predicts the labels. Reported are the micro-averaged F1, \
the mixing weights and their centre of gravity; the F1 of probes that read layers 0 to ℓ alone, and the layer expected from what each adds; \
the F1 of a control task, whose labels are random but fixed for the words of a span (Hewitt and Liang 2019), and the selectivity: by how much \
the real task is above it; with --random-encoder, the F1 on an encoder of the same shape with random weights.\n\n\
edges         FILE has one JSON object per line: text, and targets with span1, maybe span2 ([start, end] in words between spaces) and label \
(one or a list), as jiant's edge-probing files\n\
pos           a tag for each word: CoNLL-U (UPOS; --label-column 4 for XPOS), CoNLL columns, rows with lists\n\
entities      what kind each entity is of, from BIO tags in columns or rows; chunks is the same\n\
dependencies  the relation of each word to its head, from CoNLL-U\n\n\
--heads trains nothing: for each relation of a CoNLL-U file (--data) it finds the attention head whose strongest attention between words \
is most often the arc, in either direction, next to the best fixed offset (Clark et al. 2019).\n\n\
The same command resumes where a run was stopped, killed or interrupted. Keys for --set: dev_limit, cumulative, control, dropout, \
projection_size, hidden_size, max_length, patience, cache_mib, …; `henson help settings` lists all.\n\n\
Examples:\n  henson probe --model DIR --task pos --train en-ud-train.conllu --dev en-ud-dev.conllu --out pos\n  \
henson probe --model DIR --task entities --train train.txt --dev dev.txt --limit 2000 --random-encoder --out ner\n  \
henson probe --model DIR --train srl.train.json --dev srl.dev.json --out srl --json\n  \
henson probe --model DIR --heads --data en-ud-dev.conllu --limit 500")]
pub(crate) struct Probe {
    #[command(flatten)]
    pub(crate) model: ModelName,

    /// What to probe for
    #[arg(long, value_name = "TASK", value_parser = named::<ProbeTask>(&[]), default_value = "edges")]
    pub(crate) task: ProbeTask,

    /// The file that probes are trained on
    #[arg(long, value_name = "FILE", required_unless_present = "heads")]
    pub(crate) train: Option<PathBuf>,

    /// The file that they are scored on, and the best epoch is chosen by
    #[arg(long, value_name = "FILE", required_unless_present = "heads")]
    pub(crate) dev: Option<PathBuf>,

    /// The directory for results.json, report.html, and a run for each probe
    #[arg(long, value_name = "DIR", required_unless_present = "heads")]
    pub(crate) out: Option<PathBuf>,

    /// Train on N texts, evenly spaced; with --heads, read N sentences
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub(crate) limit: Option<usize>,

    /// Probe an encoder of the same shape with random weights, too
    #[arg(long)]
    pub(crate) random_encoder: bool,

    /// Compare attention heads with the arcs of --data
    #[arg(long, conflicts_with_all = ["train", "dev", "out", "random_encoder", "seed"], requires = "data")]
    pub(crate) heads: bool,

    /// --heads: a CoNLL-U file
    #[arg(long, value_name = "FILE", requires = "heads")]
    pub(crate) data: Option<PathBuf>,

    /// --heads: list relations with at least N arcs
    #[arg(long, value_name = "N", value_parser = parse_count, default_value_t = 100, requires = "heads")]
    pub(crate) min_count: usize,

    /// The seed of weights, order, dropout and control labels
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,

    #[command(flatten)]
    pub(crate) settings: RecipeFlags,

    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,

    /// The number type of the encoder: f32, or bf16 with f32 sums and statistics; probes are f32
    #[arg(long, default_value = "f32", value_parser = parse_dtype)]
    pub(crate) dtype: DType,

    #[command(flatten)]
    pub(crate) machine: Machine,

    #[command(flatten)]
    pub(crate) labelled: Labelled,
}
