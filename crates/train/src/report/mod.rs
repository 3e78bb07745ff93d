//! A run as people see it: one self-contained HTML page with the curves, the samples, the recipe and the numbers of one
//! run, or of several side by side.
//!
//! The page loads nothing, so that it can be mailed, archived and opened in ten years. Equal runs give equal bytes: it
//! holds no date. Names, recipes and samples are foreign text; all of it goes through `html::Text` or into a block of
//! JSON without any `<`, and the page itself allows no other script than its own.

mod figures;
mod html;
pub mod numbers;
mod page;
mod series;

use std::collections::BTreeMap;
use std::fs;
use std::io::{ErrorKind, Read};
use std::path::Path;

use henson_checkpoint::{Config, open_regular, read_json, write_atomic};
use henson_models::Model;
use henson_tensor::Builder;
use serde::Serialize;
use serde_json::Value;

use crate::metrics::{self, Eval, Line, Log, LogError, Train};

pub use figures::{FigurePage, Plot, Series, Table};
pub use page::render;

/// The largest small file (recipe, config, results) that is read.
const FILE_LIMIT: u64 = 64 << 20;

/// The most settings or results that are shown.
const FACTS: usize = 1000;

/// The most labels with their scores, and the most pairs of labels that were mistaken for each other.
const LABELS: usize = 50;
const CONFUSIONS: usize = 20;

/// The most held-out metrics in a headline or a table. A benchmark may have one for each of its parts.
const METRICS: usize = 12;

/// By this a page is recognised as ours. It stands near its beginning.
const MARK: &str = "<meta name=\"generator\" content=\"henson report\">";

/// What the page shows of one run.
#[derive(Clone, Debug, Default)]
pub struct Run {
    /// What to call it.
    pub name: String,
    /// The text of its recipe, TOML; empty where there is none.
    pub recipe: String,
    /// Its log.
    pub lines: Vec<Line>,
    /// Which lines of its log are damaged and were skipped, for people.
    pub skipped: Vec<String>,
    /// Its model: what, and how much of it.
    pub facts: Vec<(String, String)>,
    /// Further results, such as those of a task after pre-training.
    pub results: Vec<(String, String)>,
    /// What was taken for what most often.
    pub confusions: Vec<Confused>,
}

impl Run {
    /// Reads the directory of a run: `metrics.jsonl`, and `recipe.toml`, `config.json` and `results.json` where they
    /// are. The run may still be at work.
    pub fn open(directory: &Path) -> Result<Self, LogError> {
        let log = directory.join("metrics.jsonl");
        match fs::metadata(&log) {
            Err(error) if error.kind() == ErrorKind::NotFound && directory.is_dir() => {
                return Err(LogError::NotARun { directory: directory.to_owned() });
            }
            _ => {}
        }
        let Log { lines, skipped } = metrics::read(&log)?;
        let config: Option<Value> = read_if_there(&directory.join("config.json"))?;
        let mut results: Value = read_if_there(&directory.join("results.json"))?.unwrap_or_default();
        let confusions = take_confusions(&mut results);
        // `.` and `..` have no name of their own.
        let full = fs::canonicalize(directory).unwrap_or_else(|_| directory.to_owned());
        Ok(Self {
            name: full.file_name().unwrap_or(full.as_os_str()).to_string_lossy().into_owned(),
            recipe: read_text(&directory.join("recipe.toml"))?,
            lines,
            skipped,
            facts: config.map(facts_of).unwrap_or_default(),
            results: if results.is_null() { Vec::new() } else { flat(&results) },
            confusions,
        })
    }

    /// The run in a few numbers.
    pub fn summary(&self) -> Summary {
        let (train, evals) = (self.train(), self.evals());
        let last = train.last();
        let mut best = BTreeMap::new();
        for eval in &evals {
            for (name, value) in eval.metrics.iter().filter(|(_, value)| value.is_finite()) {
                let entry = best.entry(name.clone()).or_insert(Best { step: eval.step, value: *value });
                let better = if lower_is_better(name) { *value < entry.value } else { *value > entry.value };
                if better {
                    *entry = Best { step: eval.step, value: *value };
                }
            }
        }
        let (tokens, seconds) = last.map_or((0, 0.0), |line| (line.tokens, line.seconds));
        Summary {
            name: self.name.clone(),
            steps: self.lines.iter().map(Line::step).max().unwrap_or(0),
            tokens,
            seconds,
            tokens_per_s: (seconds > 0.0).then(|| tokens as f64 / seconds),
            train_loss: last.map(|line| line.loss),
            last: evals.last().map(|eval| eval.metrics.clone()).unwrap_or_default(),
            last_step: evals.last().map(|eval| eval.step),
            best,
        }
    }

    /// The lines of training, by step; where one stands twice, the later counts.
    fn train(&self) -> Vec<&Train> {
        by_step(
            self.lines.iter().filter_map(|line| if let Line::Train(line) = line { Some(line) } else { None }),
            |l| l.step,
        )
    }

    /// The evaluations, by step.
    fn evals(&self) -> Vec<&Eval> {
        by_step(self.lines.iter().filter_map(|line| if let Line::Eval(line) = line { Some(line) } else { None }), |l| {
            l.step
        })
    }
}

/// Examples of one label that were taken for another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Confused {
    /// The right label.
    pub expected: String,
    /// The one that was predicted.
    pub predicted: String,
    /// How many.
    pub count: u64,
}

/// A run in a few numbers.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// The run.
    pub name: String,
    /// The last step that its log names.
    pub steps: u64,
    /// Tokens consumed.
    pub tokens: u64,
    /// Seconds of training.
    pub seconds: f64,
    /// Tokens a second, over the whole run.
    pub tokens_per_s: Option<f64>,
    /// The training loss of the last line.
    pub train_loss: Option<f64>,
    /// What the last evaluation gave.
    #[serde(rename = "final")]
    pub last: BTreeMap<String, f64>,
    /// The step of the last evaluation.
    #[serde(rename = "final_step")]
    pub last_step: Option<u64>,
    /// The best value of each metric.
    pub best: BTreeMap<String, Best>,
}

/// The best value of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Best {
    /// When it was reached first.
    pub step: u64,
    /// The value.
    pub value: f64,
}

/// One number of a [`Summary`], for people.
#[derive(Clone, Debug)]
pub struct Figure {
    /// What it is.
    pub label: String,
    /// How large.
    pub value: f64,
    /// The same, as people write it.
    pub text: String,
    /// For a metric that was better before: how good, and at which step.
    pub best: Option<(String, u64)>,
    /// Whether less of it is better; `None` where more is only more.
    pub lower_is_better: Option<bool>,
}

impl Summary {
    /// Whether the run has logged nothing that could be shown here.
    pub fn is_empty(&self) -> bool {
        self.train_loss.is_none() && self.last.is_empty()
    }

    /// The numbers that people look at first, held-out metrics before the rest.
    pub fn figures(&self) -> Vec<Figure> {
        let mut figures = Vec::new();
        for (name, value) in in_order(&self.last).take(METRICS) {
            let text = numbers::metric(name, *value);
            let best = self.best.get(name).map(|best| (numbers::metric(name, best.value), best.step));
            figures.push(Figure {
                label: format!("held-out {}", words(name)),
                value: *value,
                best: best.filter(|(best, _)| *best != text),
                text,
                lower_is_better: Some(lower_is_better(name)),
            });
        }
        let plain = |label: &str, value: f64, text: String, lower_is_better| {
            let label = label.to_owned();
            Figure { label, value, text, best: None, lower_is_better }
        };
        if let Some(loss) = self.train_loss {
            figures.push(plain("training loss", loss, numbers::metric("loss", loss), Some(true)));
        }
        figures.push(plain("steps", self.steps as f64, numbers::count(self.steps), None));
        figures.push(plain("tokens", self.tokens as f64, numbers::short(self.tokens as f64), None));
        figures.push(plain("time", self.seconds, numbers::duration(self.seconds), None));
        if let Some(rate) = self.tokens_per_s {
            figures.push(plain("tokens/s", rate, numbers::short(rate), None));
        }
        figures
    }
}

/// Writes the page for some runs, so that at every moment the old or the new one is there, complete. A directory gets a
/// `report.html`.
pub fn write(path: &Path, runs: &[Run]) -> Result<(), LogError> {
    let file = if path.is_dir() { path.join("report.html") } else { path.to_owned() };
    Ok(write_atomic(&file, render(runs).as_bytes())?)
}

/// Whether a file is a page that [`write()`] wrote.
pub fn is_report(path: &Path) -> bool {
    let Ok(file) = open_regular(path, "read") else { return false };
    let mut beginning = Vec::new();
    file.take(1024).read_to_end(&mut beginning).is_ok()
        && beginning.windows(MARK.len()).any(|window| window == MARK.as_bytes())
}

/// Losses, perplexities and error rates are better when lower, all other metrics when higher.
fn lower_is_better(name: &str) -> bool {
    ["loss", "perplexity", "error", "entropy", "unknown"].iter().any(|word| name.contains(word))
}

/// A metric's name as people say it.
pub fn words(name: &str) -> String {
    let words = name.split('_').map(|word| match word {
        "mlm" => "masked-LM",
        "nsp" => "next-sentence",
        "sop" => "sentence-order",
        "rtd" => "replaced-token",
        word => word,
    });
    words.collect::<Vec<_>>().join(" ")
}

/// Metrics in the order that people ask for them: the loss, what follows from it, then the others by name.
fn in_order<V>(metrics: &BTreeMap<String, V>) -> impl Iterator<Item = (&String, &V)> {
    const FIRST: [&str; 3] = ["loss", "perplexity", "accuracy"];
    let first = FIRST.iter().filter_map(|name| metrics.get_key_value(*name));
    first.chain(metrics.iter().filter(|(name, _)| !FIRST.contains(&name.as_str())))
}

fn by_step<'a, T>(lines: impl Iterator<Item = &'a T>, step: impl Fn(&T) -> u64) -> Vec<&'a T> {
    lines.map(|line| (step(line), line)).collect::<BTreeMap<_, _>>().into_values().collect()
}

fn read_text(path: &Path) -> Result<String, LogError> {
    if !path.exists() {
        return Ok(String::new());
    }
    let mut bytes = Vec::new();
    open_regular(path, "read")?.take(FILE_LIMIT).read_to_end(&mut bytes).map_err(LogError::io("read", path))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn read_if_there(path: &Path) -> Result<Option<Value>, LogError> {
    if path.exists() { Ok(Some(read_json(path, FILE_LIMIT)?)) } else { Ok(None) }
}

/// What a config says about its model. A family that is not known here gives less, and is no error: a report only
/// shows.
fn facts_of(config: Value) -> Vec<(String, String)> {
    let named = [
        ("layers", "num_hidden_layers"),
        ("hidden size", "hidden_size"),
        ("heads", "num_attention_heads"),
        ("inner size", "intermediate_size"),
        ("vocabulary", "vocab_size"),
        ("positions", "max_position_embeddings"),
        ("activation", "hidden_act"),
    ];
    let mut facts = Vec::new();
    if let Some(architecture) = config.pointer("/architectures/0").and_then(Value::as_str) {
        facts.push(("architecture".to_owned(), architecture.to_owned()));
    }
    for (label, key) in named {
        if let Some(value) = config.get(key) {
            facts.push((label.to_owned(), value.as_u64().map_or_else(|| plain(value), numbers::count)));
        }
    }
    // Nobody has so many labels, and the sum below would not hold their parameters.
    let mut builder = Builder::new();
    if let Ok(config) = Config::from_value(config)
        && config.task.labels() < 1 << 24
        && let head = config.head().unwrap_or(config.model.family().bare_head())
        && Model::build(&mut builder, &config.model, head).is_ok()
    {
        let parameters: usize = builder.entries().iter().map(|entry| entry.shape.elements()).sum();
        facts.insert(facts.len().min(1), ("parameters".to_owned(), numbers::count(parameters as u64)));
    }
    facts
}

/// Takes what was mistaken for what out of results.json, the most frequent first, and leaves only some of many labels, which
/// would hide all else. Version 0.1 kept a table of all labels by all labels.
fn take_confusions(results: &mut Value) -> Vec<Confused> {
    let Some(scores) = results.get_mut("scores").and_then(Value::as_object_mut) else { return Vec::new() };
    if let Some(labels) = scores.get_mut("labels").and_then(Value::as_object_mut)
        && labels.len() > LABELS
    {
        *labels = std::mem::take(labels).into_iter().take(LABELS).collect();
    }
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let mut confusions: Vec<Confused> = match (scores.remove("confusions"), scores.remove("confusion")) {
        (Some(Value::Array(pairs)), _) => {
            let read = |pair: &Value| {
                let (expected, predicted) = (text(&pair["expected"])?, text(&pair["predicted"])?);
                Some(Confused { expected, predicted, count: pair["count"].as_u64()? })
            };
            pairs.iter().filter_map(read).collect()
        }
        (_, Some(table)) => {
            let names: Vec<String> = table["labels"].as_array().into_iter().flatten().filter_map(text).collect();
            let rows = table["counts"].as_array().into_iter().flatten().zip(&names);
            let cells = rows.flat_map(|(row, expected)| {
                let cells = row.as_array().into_iter().flatten().zip(&names);
                cells.map(move |(count, predicted)| (expected, predicted, count.as_u64().unwrap_or(0)))
            });
            let wrong = cells.filter(|(expected, predicted, count)| expected != predicted && *count > 0);
            let owned = |(expected, predicted, count): (&String, &String, u64)| Confused {
                expected: expected.clone(),
                predicted: predicted.clone(),
                count,
            };
            wrong.map(owned).collect()
        }
        _ => Vec::new(),
    };
    confusions.sort_by_key(|confused| std::cmp::Reverse(confused.count));
    confusions.truncate(CONFUSIONS);
    confusions
}

/// The first leaves of a JSON value with the way to them: `a.b[0]`.
fn flat(value: &Value) -> Vec<(String, String)> {
    fn walk(path: String, value: &Value, out: &mut Vec<(String, String)>) {
        match value {
            Value::Object(map) => map.iter().for_each(|(key, value)| {
                walk(if path.is_empty() { key.clone() } else { format!("{path}.{key}") }, value, out);
            }),
            Value::Array(list) if list.iter().any(|value| value.is_object() || value.is_array()) => {
                list.iter().enumerate().for_each(|(i, value)| walk(format!("{path}[{i}]"), value, out));
            }
            leaf if out.len() < FACTS => out.push((path, plain(leaf))),
            _ => {}
        }
    }
    let mut out = Vec::new();
    walk(String::new(), value, &mut out);
    out
}

/// A value as people write it: text without quotation marks.
fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}
