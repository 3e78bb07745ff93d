//! `henson plan`: what more processes would do for a pre-training run, by rates that were measured or are assumed. Nothing runs.

use std::path::Path;

use anyhow::Context;
use henson_models::{Model, ModelConfig};
use henson_tensor::{Builder, Cores};
use henson_train::scaling::{Levels, Rates, Sent, Times, Work, pays_up_to};
use henson_train::{Precision, Rank, ResolvedPhase, Workload};
use serde::{Deserialize, Serialize};

use super::bench::{config_of, round, training_flops};
use super::bench_exchange::Exchanged;
use super::pretrain;
use crate::flags::plan::Plan as Flags;
use crate::models;
use crate::output::{self, duration, thousands};

/// What a file of rates may have: a few lines that benchmarks printed.
const MOST_BYTES: u64 = 1 << 20;

/// Tokens of a step that a file of rates may have.
const MOST_TOKENS: usize = 1 << 24;

pub(crate) fn run(flags: &Flags) -> anyhow::Result<()> {
    let (name, workload) = workload(flags)?;
    let basis = Basis::new(flags, &workload)?;
    let plan = Planned::new(name, &workload, &basis, &counts(if basis.gpus { &flags.gpus } else { &flags.ranks }));
    if flags.json { output::json(&plan) } else { plan.print(&workload) }
}

fn workload(flags: &Flags) -> anyhow::Result<(String, Workload)> {
    let mut recipe = pretrain::read_recipe(flags.recipe.as_deref(), flags.settings.sets()?, None)?;
    if let Some(model) = &flags.model {
        recipe.model.clone_from(model);
    }
    if let Some(data) = &flags.data {
        recipe.data.clone_from(data);
    }
    recipe.dtype = flags.dtype.map_or(recipe.dtype, Precision::from);
    let name = recipe.model.clone();
    if !recipe.data.is_empty() {
        return Ok((name, pretrain::plan(recipe, Cores::of_this_process().threads())?.workload().clone()));
    }
    recipe.model = models::directory(Path::new(&name))?.display().to_string();
    Ok((name, Workload::without_data(recipe)?))
}

/// The numbers of ranks that a flag means.
fn counts(given: &[usize]) -> Vec<usize> {
    let mut all: Vec<usize> = match given {
        [most] => (0..).map(|power| 1 << power).take_while(|count| count < most).chain([*most]).collect(),
        several => several.to_vec(),
    };
    all.sort_unstable();
    all.dedup();
    all
}

/// A line of `bench train --json`.
#[derive(Deserialize)]
struct Trained {
    device: String,
    model: String,
    batch: usize,
    seq: usize,
    dtype: String,
    #[serde(default = "one")]
    ranks: usize,
    ms: f64,
    operations: Option<Vec<Operation>>,
}

/// Benchmarks of before knew one process alone.
fn one() -> usize {
    1
}

#[derive(Deserialize)]
struct Operation {
    kind: String,
    ms: f64,
}

/// What a prediction rests on.
struct Basis {
    gpus: bool,
    /// Those of the first phase; passes depend on the lengths of sequences.
    rates: Rates,
    passes: Vec<MeasuredPass>,
    measured: Vec<String>,
    assumed: Vec<String>,
}

/// Forward and backward of a batch.
struct MeasuredPass {
    tokens: f64,
    seconds: f64,
    /// Of a token, where it was measured; none where the rate is that of the recipe itself.
    flops: Option<f64>,
}

/// Rates of machines that nobody has measured.
struct Assumed {
    update: f64,
    add: f64,
    inside: f64,
    between: f64,
    latency: f64,
    values: f64,
    per_node: usize,
    why: [&'static str; 5],
}

const GPU: Assumed = Assumed {
    update: 0.96e-3 / 110e6,
    add: 0.3e-3 / 110e6,
    inside: 350e9,
    between: 42e9,
    latency: 1e-6,
    values: 0.0,
    per_node: 8,
    why: [
        "an optimizer at 0.96 ms for 110 million parameters (H200)",
        "additions at 0.3 ms for 110 million numbers (H200)",
        "350 GB/s each way between GPUs of a machine (NVLink, a guess)",
        "42 GB/s each way between machines for each GPU (a card of 400 Gbit/s for each)",
        "1 µs for every message; small values are sent ahead",
    ],
};

const CPU: Assumed = Assumed {
    update: 0.7e-9,
    add: 0.3e-9,
    inside: 4e9,
    between: 1.1e9,
    latency: 20e-6,
    values: 20e-6,
    per_node: 1,
    why: [
        "an optimizer at 0.7 ns for a parameter (two Zen 4 cores, an estimate)",
        "additions at 0.3 ns for a number (two Zen 4 cores, an estimate)",
        "4 GB/s each way between processes of a machine (a guess)",
        "1.1 GB/s each way between machines for each process (10 Gbit/s)",
        "20 µs for every message, and for every other process's small values (a guess)",
    ],
};

/// A training step of BERT-base on an H200: tokens and seconds (docs/performance.md).
const H200: (usize, f64) = (256 * 128, 35.22e-3);

impl Basis {
    fn new(flags: &Flags, workload: &Workload) -> anyhow::Result<Self> {
        let gpus = !flags.gpus.is_empty();
        let own = if gpus { GPU } else { CPU };
        let (mut trained, mut exchanged) = (Vec::new(), Vec::new());
        for path in &flags.rates {
            read_rates(path, &mut trained, &mut exchanged)?;
        }
        let rates = Rates {
            passes: Vec::new(),
            update: own.update,
            add: own.add,
            inside: own.inside,
            between: own.between,
            latency: own.latency,
            values: own.values,
            per_node: own.per_node,
            levels: if gpus { Levels::Two } else { Levels::One },
        };
        let mut basis = Self { gpus, rates, passes: Vec::new(), measured: Vec::new(), assumed: Vec::new() };
        let mut is_measured = [false; 5];
        for record in &exchanged {
            basis.take_exchange(record, &mut is_measured)?;
        }
        for record in &trained {
            basis.take_training(record, workload, &mut is_measured)?;
        }
        basis.take_flags(flags, &mut is_measured);
        basis.finish_passes(workload)?;
        let guesses = own.why.iter().zip(is_measured).filter(|(_, known)| !known).map(|(why, _)| (*why).to_owned());
        basis.assumed.extend(guesses);
        basis.assumed.push("every process as fast as every other, nothing overlapped".to_owned());
        basis.assumed.push("making batches, evaluations and checkpoints cost nothing".to_owned());
        if gpus {
            basis
                .assumed
                .push("an exchange within machines first and then between them; this version has one level".to_owned());
        }
        Ok(basis)
    }

    /// Transfers, additions and the optimizer, of several processes.
    fn take_exchange(&mut self, record: &Exchanged, is_measured: &mut [bool; 5]) -> anyhow::Result<()> {
        let Exchanged { model, ranks, hosts, parameters, engine, latency_us, values_us, transfers, update, .. } =
            record;
        let largest = transfers.iter().max_by_key(|transfer| transfer.bytes);
        let largest = largest.filter(|_| *ranks > 1 && *parameters > 0 && *hosts > 0);
        let largest = largest.context("a line of `bench exchange --json` has no transfers between processes")?;
        let (r, n) = (*ranks as f64, *parameters as f64);
        let rate = 2e3 * largest.sent_bytes as f64 / (largest.all_to_all_ms + largest.all_gather_ms);
        self.rates.update = (update.optimizer_ms + update.norm_ms) / 1e3 * r / n;
        self.rates.add = update.add_ms / 1e3 / (n * (r - 1.0) / r);
        self.rates.latency = latency_us / 1e6 / (r - 1.0);
        self.rates.values = values_us / 1e6 / (r - 1.0);
        let place = if *hosts == 1 { 2 } else { 3 };
        match place {
            2 => (self.rates.inside, self.rates.per_node) = (rate, *ranks),
            _ => (self.rates.between, self.rates.per_node) = (rate, ranks.div_ceil(*hosts)),
        }
        for known in [0, 1, 4, place] {
            is_measured[known] = true;
        }
        let sensible = [self.rates.update, self.rates.add, self.rates.latency, rate];
        anyhow::ensure!(
            sensible.iter().all(|value| value.is_finite() && *value > 0.0),
            "a line of `bench exchange --json` has times of 0 or below"
        );
        self.measured.push(format!(
            "exchange of {model} between {ranks} processes on {hosts} machines ({engine}): {:.2} GB/s each way, {latency_us} µs at least, \
             small values {values_us} µs, adding {:.2} ns a number, optimizer {:.2} ns a parameter",
            rate / 1e9,
            1e9 * self.rates.add,
            1e9 * self.rates.update
        ));
        Ok(())
    }

    /// A training step of one process, of which the optimizer's share is set apart.
    fn take_training(
        &mut self,
        record: &Trained,
        workload: &Workload,
        is_measured: &mut [bool; 5],
    ) -> anyhow::Result<()> {
        let Trained { device, model, batch, seq, dtype, ranks, ms, operations } = record;
        anyhow::ensure!(
            *ranks == 1,
            "--rates has a training step of {ranks} processes: expected `bench train` of one alone"
        );
        anyhow::ensure!(
            device.starts_with("cuda") == self.gpus,
            "--rates has a training step on {device}, and the plan is for {}: measure on such a machine, or plan with {}",
            if self.gpus { "GPUs" } else { "CPUs" },
            if self.gpus { "--ranks" } else { "--gpus" }
        );
        anyhow::ensure!(
            batch.saturating_mul(*seq) <= MOST_TOKENS,
            "--rates has a training step of {batch}×{seq} tokens: expected at most {MOST_TOKENS}, as `bench train` takes"
        );
        let config = config_of(model)?;
        let parameters = parameters_of(&config)? as f64;
        if let Some(operations) = operations {
            let own = operations.iter().filter(|one| ["optimizer", "gradient norm"].contains(&one.kind.as_str()));
            self.rates.update = own.map(|one| one.ms).sum::<f64>() / 1e3 / parameters;
            is_measured[0] = true;
        }
        let (tokens, seconds) = ((batch * seq) as f64, ms / 1e3 - self.rates.update * parameters);
        anyhow::ensure!(
            tokens > 0.0 && seconds > 0.0 && seconds.is_finite(),
            "--rates: a training step of {model} with {batch}×{seq} tokens cannot take {ms} ms, of which {:.3} are the optimizer's",
            1e3 * self.rates.update * parameters
        );
        let flops = Some(training_flops(&config, *batch, *seq) / tokens);
        self.passes.push(MeasuredPass { tokens, seconds, flops });
        self.measured.push(format!(
            "a training step of {model} with {batch}×{seq} tokens, {dtype} on {device}: {ms} ms, {:.2} of them the optimizer",
            1e3 * self.rates.update * parameters
        ));
        if *dtype != workload.dtype.to_string() {
            self.assumed.push(format!("{} as fast as {dtype}, in which was measured", workload.dtype));
        }
        Ok(())
    }

    fn take_flags(&mut self, flags: &Flags, is_measured: &mut [bool; 5]) {
        self.rates.per_node = flags.per_node.unwrap_or(self.rates.per_node);
        if let Some(rate) = flags.inside {
            (self.rates.inside, is_measured[2]) = (1e9 * rate, true);
            self.measured.push(format!("{rate} GB/s within a machine (--inside)"));
        }
        if let Some(rate) = flags.network {
            (self.rates.between, is_measured[3]) = (1e9 * rate, true);
            self.measured.push(format!("{rate} GB/s between machines (--network)"));
        }
        if let Some(rate) = flags.tokens_per_second {
            self.passes = vec![MeasuredPass { tokens: rate, seconds: 1.0, flops: None }];
            self.measured.push(format!("{rate} tokens/s of forward and backward (--tokens-per-second)"));
        }
    }

    /// Without a measured step, that of an H200; of CPUs nobody can say.
    fn finish_passes(&mut self, workload: &Workload) -> anyhow::Result<()> {
        if self.passes.is_empty() {
            anyhow::ensure!(
                self.gpus,
                "nothing says how fast one process is: `henson bench train --model M --batch B --profile --json > rates.jsonl` on such a \
                 machine with a part of the batch, then --rates rates.jsonl; or --tokens-per-second"
            );
            let config = config_of("bert-base")?;
            let (tokens, seconds) = (H200.0 as f64, H200.1 - GPU.update * parameters_of(&config)? as f64);
            self.passes.push(MeasuredPass { tokens, seconds, flops: Some(training_flops(&config, 256, 128) / tokens) });
            let why =
                "passes at the rate of BERT-base on an H200, 256×128 tokens in bf16: 35.22 ms (docs/performance.md)";
            self.assumed.push(why.to_owned());
        }
        self.passes.sort_by(|a, b| a.tokens.total_cmp(&b.tokens));
        self.passes.dedup_by(|later, earlier| later.tokens == earlier.tokens);
        let scaled =
            self.passes.iter().filter_map(|pass| pass.flops).any(|flops| {
                workload.phases.iter().any(|phase| (flops_of(workload, phase) / flops - 1.0).abs() > 1e-3)
            });
        if scaled {
            self.assumed
                .push("other models and lengths as fast per FLOP of their matmuls as what was measured".to_owned());
        }
        self.assumed.push("parts of other sizes than the measured ones in proportion to their tokens".to_owned());
        Ok(())
    }

    /// The rates for a phase.
    fn rates_for(&self, workload: &Workload, phase: &ResolvedPhase) -> Rates {
        let passes = self.passes.iter().map(|pass| {
            let factor = pass.flops.map_or(1.0, |flops| flops_of(workload, phase) / flops);
            (pass.tokens, factor * pass.seconds)
        });
        Rates { passes: passes.collect(), ..self.rates.clone() }
    }
}

/// Those of a token.
fn flops_of(workload: &Workload, phase: &ResolvedPhase) -> f64 {
    let length = phase.instances.sequence_length;
    training_flops(&workload.config, phase.batch_size, length) / (phase.batch_size * length) as f64
}

fn parameters_of(config: &ModelConfig) -> anyhow::Result<usize> {
    let mut builder = Builder::new();
    Model::build(&mut builder, config, config.family().pretraining_head())?;
    Ok(builder.entries().iter().map(|entry| entry.shape.elements()).sum())
}

/// Reads what benchmarks printed, an object on every line.
fn read_rates(path: &Path, trained: &mut Vec<Trained>, exchanged: &mut Vec<Exchanged>) -> anyhow::Result<()> {
    let name = path.display();
    let length = std::fs::metadata(path).with_context(|| format!("cannot read {name}"))?.len();
    anyhow::ensure!(
        length <= MOST_BYTES,
        "{name} has {length} bytes: expected lines of `bench train --json` and `bench exchange --json`"
    );
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {name}"))?;
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let place = || format!("{name}, line {}", number + 1);
        let value: serde_json::Value = serde_json::from_str(line).with_context(place)?;
        match value["mode"].as_str() {
            Some("train") => trained.push(serde_json::from_value(value).with_context(place)?),
            Some("exchange") => exchanged.push(serde_json::from_value(value).with_context(place)?),
            mode => anyhow::bail!(
                "{}: `mode` is {}: expected train or exchange, as `bench train --json` and `bench exchange --json` print it",
                place(),
                mode.map_or("missing".to_owned(), |mode| format!("`{mode}`"))
            ),
        }
    }
    Ok(())
}

/// The whole prediction.
#[derive(Serialize)]
struct Planned {
    model: String,
    parameters: usize,
    steps: u64,
    dtype: String,
    machines: &'static str,
    per_node: usize,
    measured: Vec<String>,
    assumed: Vec<String>,
    /// Numbers of ranks that can share every batch.
    allowed: Vec<usize>,
    rows: Vec<Row>,
    /// The last number whose successor turns at least half of what is added into speed; none where all do.
    pays_up_to: Option<usize>,
}

/// So many ranks.
#[derive(Serialize)]
struct Row {
    ranks: usize,
    #[serde(flatten)]
    predicted: Option<Predicted>,
    /// Why they cannot share a batch.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
}

/// Means over all steps of the run.
#[derive(Serialize)]
struct Predicted {
    step_ms: f64,
    passes_ms: f64,
    adding_ms: f64,
    exchange_ms: f64,
    update_ms: f64,
    seconds: f64,
    tokens_per_s: f64,
    efficiency: f64,
    memory_mib: f64,
    /// Of the process that writes checkpoints.
    first_memory_mib: f64,
    sent_mb: f64,
    network_mb: f64,
}

impl Planned {
    fn new(model: String, workload: &Workload, basis: &Basis, counts: &[usize]) -> Self {
        let alone = total(workload, basis, 1).map_or(f64::NAN, |(times, _)| times.step());
        let rows: Vec<Row> = counts
            .iter()
            .map(|ranks| match total(workload, basis, *ranks) {
                Ok((times, sent)) => {
                    let predicted = Some(predicted(workload, *ranks, times, sent, alone));
                    Row { ranks: *ranks, predicted, problem: None }
                }
                Err(error) => Row { ranks: *ranks, predicted: None, problem: Some(error.to_string()) },
            })
            .collect();
        let times: Vec<(usize, f64)> =
            rows.iter().filter_map(|row| Some((row.ranks, row.predicted.as_ref()?.seconds))).collect();
        let largest = workload.phases.iter().map(|phase| phase.batch_size).max().unwrap_or(0);
        let fits = |ranks: &usize| workload.phases.iter().all(|phase| Workload::parts(phase, *ranks).is_ok());
        Self {
            model,
            parameters: workload.parameters(),
            steps: workload.steps(),
            dtype: workload.dtype.to_string(),
            machines: if basis.gpus { "gpus" } else { "cpus" },
            per_node: basis.rates.per_node,
            measured: basis.measured.clone(),
            assumed: basis.assumed.clone(),
            allowed: (1..=largest).filter(fits).collect(),
            pays_up_to: pays_up_to(&times),
            rows,
        }
    }

    fn print(&self, workload: &Workload) -> anyhow::Result<()> {
        let Self { model, parameters, steps, dtype, .. } = self;
        let (parameters, steps) = (thousands(*parameters), thousands(*steps));
        output::line(&format!("{model}: {parameters} parameters, {steps} steps in {dtype}"))?;
        for (number, phase) in workload.phases.iter().enumerate() {
            let ResolvedPhase { steps, batch_size, accumulation, instances, .. } = phase;
            let parts = if *accumulation > 1 { accumulation.to_string() } else { "as many as ranks".to_owned() };
            output::line(&format!(
                "phase {number}: {steps} steps of {batch_size} sequences of {} tokens; parts: {parts}",
                instances.sequence_length
            ))?;
        }
        for (what, texts) in [("measured", &self.measured), ("assumed", &self.assumed)] {
            texts.iter().try_for_each(|text| output::line(&format!("{what:<8}  {text}")))?;
        }
        output::line(
            "   ranks   step ms    passes    adding  exchange    update          time  efficiency  GiB each (first)   MB sent (network)",
        )?;
        self.rows.iter().try_for_each(Row::print)?;
        let allowed: Vec<String> = self.allowed.iter().map(usize::to_string).collect();
        output::line(&format!("ranks that can share every batch: {}", allowed.join(", ")))?;
        match self.pays_up_to {
            Some(ranks) => output::line(&format!(
                "it pays up to {ranks}: with the next number, less than half of what is added turns into speed"
            )),
            None => output::line("it pays up to the last of these: at least half of what is added turns into speed"),
        }
    }
}

impl Row {
    fn print(&self) -> anyhow::Result<()> {
        let ranks = thousands(self.ranks);
        let Some(p) = &self.predicted else {
            return output::line(&format!("{ranks:>8}   {}", self.problem.as_deref().unwrap_or_default()));
        };
        let memory = format!("{:.2} ({:.2})", p.memory_mib / 1024.0, p.first_memory_mib / 1024.0);
        let sent = format!("{:.1} ({:.1})", p.sent_mb, p.network_mb);
        output::line(&format!(
            "{ranks:>8} {:>9.2} {:>9.2} {:>9.2} {:>9.2} {:>9.2} {:>13} {:>10.0}% {memory:>17} {sent:>19}",
            p.step_ms,
            p.passes_ms,
            p.adding_ms,
            p.exchange_ms,
            p.update_ms,
            duration(p.seconds),
            100.0 * p.efficiency
        ))
    }
}

/// Means over all steps of what so many ranks take and send.
fn total(workload: &Workload, basis: &Basis, ranks: usize) -> henson_train::Result<(Times, Sent)> {
    // Weights come as they are kept, whatever passes read.
    let weight_bytes = 4;
    let (mut times, mut sent) = (Times::default(), Sent::default());
    for phase in &workload.phases {
        let tokens = phase.batch_size * (phase.instances.sequence_length + phase.instances.longest_target());
        let parts = Workload::parts(phase, ranks)?;
        let work = Work { parameters: workload.parameters(), tokens, parts, weight_bytes };
        let rates = basis.rates_for(workload, phase);
        let (share, own, bytes) =
            (phase.steps as f64 / workload.steps() as f64, rates.times(work, ranks), rates.sent(work, ranks));
        times.passes += share * own.passes;
        times.adding += share * own.adding;
        times.exchange += share * own.exchange;
        times.update += share * own.update;
        sent.inside += share * bytes.inside;
        sent.between += share * bytes.between;
    }
    Ok((times, sent))
}

fn predicted(workload: &Workload, ranks: usize, times: Times, sent: Sent, alone: f64) -> Predicted {
    let mib = |is_first| round(workload.memory(Rank { ranks, is_first }) as f64 / (1 << 20) as f64, 0);
    let steps = workload.steps() as f64;
    let tokens = |phase: &ResolvedPhase| {
        phase.steps as f64
            * (phase.batch_size * (phase.instances.sequence_length + phase.instances.longest_target())) as f64
    };
    let tokens: f64 = workload.phases.iter().map(tokens).sum();
    let ms = |seconds: f64| round(1e3 * seconds, 4);
    Predicted {
        step_ms: ms(times.step()),
        passes_ms: ms(times.passes),
        adding_ms: ms(times.adding),
        exchange_ms: ms(times.exchange),
        update_ms: ms(times.update),
        seconds: round(steps * times.step(), 3),
        tokens_per_s: round(tokens / (steps * times.step()), 0),
        efficiency: round(alone / (ranks as f64 * times.step()), 4),
        memory_mib: mib(ranks == 1),
        first_memory_mib: mib(true),
        sent_mb: round((sent.inside + sent.between) / 1e6, 3),
        network_mb: round(sent.between / 1e6, 3),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_number_stands_for_those_below() {
        assert_eq!(counts(&[1]), [1]);
        assert_eq!(counts(&[8]), [1, 2, 4, 8]);
        assert_eq!(counts(&[12]), [1, 2, 4, 8, 12]);
        assert_eq!(counts(&[6, 3, 3]), [3, 6]);
    }
}
