//! Two henson binaries side by side: the same bits from fixed runs, and how fast each is.
//!
//! A redesign that keeps behaviour is checked by this: build the state before, keep its binary, and compare. Every setting
//! of the runs is explicit, so that changed defaults do not show. It is not part of `ci`: there is no old binary there.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::Result;
use crate::workspace::Workspace;

/// For the help text.
pub(crate) const WHAT: &str =
    "the same bits and speed as an older binary: OLD_BINARY NEW_BINARY [--speed] [--device cuda]";

/// How the step is called.
const USAGE: &str = "cargo xtask baseline OLD_BINARY NEW_BINARY [--speed] [--device cuda]";

/// Pairs of timings for each row of the table.
const PAIRS: usize = 9;

/// A fine-tuning: a name, the task, its file in tests-data/finetune, and the golden model that it starts from.
const FINE_TUNINGS: [(&str, &str, &str, &str); 9] = [
    ("classify", "classify", "classify.jsonl", "sequence"),
    ("pair", "pair", "pair.jsonl", "sequence"),
    ("regress", "regress", "regress.jsonl", "regression"),
    ("multilabel", "multilabel", "multilabel.jsonl", "multilabel"),
    ("tag", "tag", "tag.conll", "token"),
    ("qa", "qa", "qa.json", "qa"),
    ("choice", "choice", "choice.jsonl", "choice"),
    ("embed", "embed", "embed.jsonl", "model"),
    ("embed-scores", "embed", "embed-scores.jsonl", "model"),
];

/// A pre-training: a name and what it sets beside the common settings.
const PRE_TRAININGS: [(&str, &[&str]); 5] = [
    ("mlm-nsp", &["objective=mlm-nsp"]),
    ("mlm", &["objective=mlm"]),
    ("whole-words", &["objective=mlm", "masking=whole-words"]),
    ("causal", &["objective=causal"]),
    ("accumulated", &["objective=mlm-nsp", "accumulation=2"]),
];

/// What is timed: the arguments of `bench`.
const TIMINGS: [&[&str]; 8] = [
    &["train", "--model", "bert-tiny", "--dtype", "f32"],
    &["train", "--model", "bert-mini", "--dtype", "f32"],
    &["train", "--model", "bert-mini", "--dtype", "bf16"],
    &["train", "--model", "bert-small", "--dtype", "bf16", "--steps", "3", "--warmup", "1"],
    &["infer", "--model", "bert-mini", "--batch", "16", "--seq", "128", "--dtype", "f32"],
    &["infer", "--model", "bert-small", "--batch", "1", "--seq", "16", "--dtype", "bf16"],
    &["infer", "--model", "bert-small", "--batch", "16", "--seq", "128", "--dtype", "bf16"],
    &["infer", "--model", "bert-base", "--batch", "1", "--seq", "128", "--dtype", "bf16"],
];

struct Comparison {
    /// OLD and NEW.
    binaries: [PathBuf; 2],
    data: PathBuf,
    /// Where everything is written; emptied first.
    out: PathBuf,
    device: String,
}

/// Runs the comparison that the arguments ask for.
pub(crate) fn run(workspace: &Workspace, arguments: &[String]) -> Result {
    let (mut binaries, mut speed, mut device) = (Vec::new(), false, "cpu".to_owned());
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--speed" => speed = true,
            "--device" => device = arguments.next().ok_or(USAGE)?.clone(),
            path => binaries.push(PathBuf::from(path)),
        }
    }
    let Ok(binaries) = <[PathBuf; 2]>::try_from(binaries) else { return Err(format!("usage: {USAGE}")) };
    for binary in &binaries {
        if !binary.is_file() {
            return Err(format!("{} is not a file: expected a henson binary", binary.display()));
        }
    }
    let out = workspace.target.join("baseline");
    if out.exists() {
        fs::remove_dir_all(&out).map_err(|error| format!("cannot empty {}: {error}", out.display()))?;
    }
    fs::create_dir_all(&out).map_err(|error| format!("cannot make {}: {error}", out.display()))?;
    let comparison = Comparison { binaries, data: workspace.root.join("tests-data"), out, device };
    if speed { comparison.speed() } else { comparison.bits() }
}

impl Comparison {
    /// Every run by both binaries; an error where any weights differ.
    fn bits(&self) -> Result {
        let (tokenizer, shards) = (self.path("tokenizer"), self.path("shards"));
        let text = self.at("text/novels.txt");
        let kind = ["tokenizer", "train", "--kind", "wordpiece", "--vocab-size", "1000", "--out", &tokenizer, &text];
        self.henson(0, &kind)?;
        let held_out = ["--held-out", "0.2"];
        self.henson(
            0,
            &[&["data", "build", "--tokenizer", &tokenizer, "--out", &shards, &text][..], &held_out].concat(),
        )?;
        let (mut same, mut different) = (0, Vec::new());
        for dtype in ["f32", "bf16"] {
            for (name, settings) in PRE_TRAININGS {
                let found = self.pre_training(name, dtype, settings, &shards)?;
                if found { same += 1 } else { different.push(format!("pretrain {name} {dtype}")) }
            }
            for tuning in FINE_TUNINGS {
                let found = self.fine_tuning(tuning, dtype)?;
                if found { same += 1 } else { different.push(format!("finetune {} {dtype}", tuning.0)) }
            }
        }
        println!("{same} runs with the same weights, {} with others", different.len());
        if different.is_empty() { Ok(()) } else { Err(format!("other weights: {}", different.join(", "))) }
    }

    fn pre_training(&self, name: &str, dtype: &str, settings: &[&str], shards: &str) -> Result<bool> {
        let common = [
            "steps=30",
            "batch_size=8",
            "sequence_length=64",
            "learning_rate=1e-3",
            "warmup_steps=5",
            "weight_decay=0.01",
            "checkpoint_every=0",
            "eval_every=15",
            "dropout=0.1",
        ];
        let set: Vec<&str> = common.iter().chain(settings).flat_map(|setting| ["--set", setting]).collect();
        self.both("pretrain", name, dtype, |out| {
            let fixed = ["pretrain", "--model", "bert-tiny", "--data", shards, "--out", out, "--seed", "7"];
            [&fixed[..], &set].concat().into_iter().map(str::to_owned).collect()
        })
    }

    fn fine_tuning(&self, (name, task, file, golden): (&str, &str, &str, &str), dtype: &str) -> Result<bool> {
        let model = self.path(&format!("model-{golden}"));
        fs::create_dir_all(&model).map_err(|error| format!("cannot make {model}: {error}"))?;
        let golden = format!("bert-golden/{golden}");
        for (from, to) in [
            (format!("{golden}/model.safetensors"), "model.safetensors"),
            (format!("{golden}/config.json"), "config.json"),
            ("likelihood/vocab.txt".to_owned(), "vocab.txt"),
        ] {
            let (from, to) = (self.at(&from), Path::new(&model).join(to));
            fs::copy(&from, to).map_err(|error| format!("cannot copy {from}: {error}"))?;
        }
        let file = self.at(&format!("finetune/{file}"));
        let settings = [
            "batch_size=3",
            "epochs=3",
            "max_length=40",
            "learning_rate=1e-3",
            "warmup=0.1",
            "dropout=0.1",
            "weight_decay=0.01",
            "evals_per_epoch=1",
        ];
        let set: Vec<&str> = settings.iter().flat_map(|setting| ["--set", setting]).collect();
        self.both("finetune", name, dtype, |out| {
            let fixed = ["finetune", "--task", task, "--model", &model, "--train", &file, "--dev", &file, "--out", out];
            [&fixed[..], &set].concat().into_iter().map(str::to_owned).collect()
        })
    }

    /// Runs a command with both binaries and compares the weights that they leave.
    fn both(&self, what: &str, name: &str, dtype: &str, command: impl Fn(&str) -> Vec<String>) -> Result<bool> {
        let mut hashes = Vec::new();
        for which in 0..2 {
            let out = self.path(&format!("{what}-{name}-{dtype}-{which}"));
            let command = command(&out);
            let mut arguments: Vec<&str> = command.iter().map(String::as_str).collect();
            arguments.extend(["--dtype", dtype, "--threads", "2", "--device", &self.device]);
            self.henson(which, &arguments)?;
            let weights = Path::new(&out).join("model.safetensors");
            let bytes = fs::read(&weights).map_err(|error| format!("cannot read {}: {error}", weights.display()))?;
            let digest = Sha256::digest(&bytes);
            hashes.push(digest[..8].iter().map(|byte| format!("{byte:02x}")).collect::<String>());
        }
        let same = hashes[0] == hashes[1];
        println!("{what:<9} {name:<13} {dtype:<5} {} {}", hashes[0], if same { "the same" } else { &hashes[1] });
        Ok(same)
    }

    /// Times both binaries, alternating; prints the ratio of each row and their geometric mean.
    fn speed(&self) -> Result {
        let mut product = 1.0;
        for timing in TIMINGS {
            let mut times = [Vec::new(), Vec::new()];
            for pair in 0..PAIRS {
                for which in [pair % 2, 1 - pair % 2] {
                    let line =
                        self.henson(which, &[&["bench"][..], timing, &["--json", "--device", &self.device]].concat())?;
                    let found = serde_json::from_str(&line).ok().and_then(|line: Value| line["ms"].as_f64());
                    times[which].push(found.ok_or_else(|| format!("no `ms` in what bench printed: {line}"))?);
                }
            }
            let [old, new] = times.map(median);
            product *= old / new;
            println!("{:<60} {old:9.2} ms {new:9.2} ms  {:.3}×", timing.join(" "), old / new);
        }
        println!("geometric mean {:.3}×", product.powf(1.0 / TIMINGS.len() as f64));
        Ok(())
    }

    /// Runs a binary; what it printed on standard output.
    fn henson(&self, which: usize, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new(&self.binaries[which]);
        let output = command.args(arguments).stdin(Stdio::null()).env_remove("HENSON_KERNELS").output();
        let output = output.map_err(|error| format!("cannot run {}: {error}", self.binaries[which].display()))?;
        if !output.status.success() {
            let message = String::from_utf8_lossy(&output.stderr);
            return Err(format!("{} {} failed:\n{message}", self.binaries[which].display(), arguments.join(" ")));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// A path in the output directory.
    fn path(&self, name: &str) -> String {
        self.out.join(name).to_string_lossy().into_owned()
    }

    /// A path in tests-data.
    fn at(&self, name: &str) -> String {
        self.data.join(name).to_string_lossy().into_owned()
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
