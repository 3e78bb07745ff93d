//! `henson bench exchange`: what processes that train together send each other, and how long that takes. Plain transfers by size, and an
//! update of a model by the code that training runs; nothing of the model is computed.

use std::sync::Arc;
use std::time::Instant;

use henson_models::Model;
use henson_ranks::Ranks;
use henson_tensor::bench::Transfers;
use henson_tensor::{Builder, Device, Kind};
use henson_train::{OptimizerSettings, Updater};
use serde::{Deserialize, Serialize};

use super::bench::{config_of, median, round};
use crate::flags::BenchExchange;
use crate::launch::{self, Started};
use crate::output;

/// Sizes of transfers that are measured besides that of the model.
const SIZES: [usize; 4] = [4 << 10, 64 << 10, 1 << 20, 16 << 20];

/// Bytes that are moved between two readings of the clock, at least: what a start costs, and who starts first, must not count.
const AT_ONCE: usize = 8 << 20;

/// Small values that are sent around in a row.
const VALUES: usize = 200;

pub(crate) fn run(flags: &BenchExchange) -> anyhow::Result<()> {
    let Started::Together(together) = launch::start(&flags.together, &flags.compute.machine)? else {
        anyhow::bail!(
            "bench exchange measures what processes send each other: start several, with --ranks 2 on one machine, or under mpirun or \
             srun on many"
        );
    };
    let measured = flags.compute.device_of(Some(&together)).and_then(|device| measure(flags, &device, &together.ranks));
    let ended = measured.and_then(|measured| match (together.is_first(), flags.json) {
        (false, _) => Ok(()),
        (true, true) => output::json(&measured),
        (true, false) => measured.print(flags.steps),
    });
    together.end(ended)
}

/// What is measured; `henson plan` reads it again.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Exchanged {
    mode: Mode,
    pub(crate) model: String,
    pub(crate) dtype: String,
    pub(crate) ranks: usize,
    /// Machines that they run on.
    pub(crate) hosts: usize,
    pub(crate) threads: usize,
    pub(crate) engine: String,
    pub(crate) parameters: usize,
    /// One small message from each to each.
    pub(crate) latency_us: f64,
    /// A small value from each to all, over TCP by way of rank 0, as every step of training has one.
    pub(crate) values_us: f64,
    pub(crate) transfers: Vec<Transfer>,
    pub(crate) update: UpdateTimes,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Mode {
    Exchange,
}

/// Buffers of one size that change hands.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Transfer {
    pub(crate) bytes: usize,
    /// Sent by each process, and received.
    pub(crate) sent_bytes: usize,
    /// Every process gives each other one its shard of the buffer.
    pub(crate) all_to_all_ms: f64,
    pub(crate) all_to_all_gb_per_s: f64,
    /// Every process gives all others its own shard.
    pub(crate) all_gather_ms: f64,
    pub(crate) all_gather_gb_per_s: f64,
}

/// An update of the model.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct UpdateTimes {
    pub(crate) ms: f64,
    pub(crate) all_to_all_ms: f64,
    pub(crate) add_ms: f64,
    pub(crate) norm_ms: f64,
    pub(crate) optimizer_ms: f64,
    pub(crate) all_gather_ms: f64,
}

fn measure(flags: &BenchExchange, device: &Device, ranks: &Arc<Ranks>) -> anyhow::Result<Exchanged> {
    let config = config_of(&flags.model)?;
    let mut builder = Builder::new();
    Model::build(&mut builder, &config, config.family().pretraining_head())?;
    let parameters: usize = builder.entries().iter().map(|entry| entry.shape.elements()).sum();
    let sizes = SIZES.into_iter().filter(|size| *size < 4 * parameters).chain([4 * parameters]);
    let transfers = sizes.map(|bytes| transfer(device, ranks, bytes, flags.steps));
    let transfers = transfers.collect::<anyhow::Result<Vec<Transfer>>>()?;
    let latency = one_byte(device, ranks, flags.steps)?;
    let update = update(flags, device, ranks, builder)?;
    let hosts: std::collections::BTreeSet<Vec<u8>> =
        ranks.gather(henson_ranks::host().as_bytes()).into_iter().collect();
    Ok(Exchanged {
        mode: Mode::Exchange,
        model: flags.model.clone(),
        dtype: flags.compute.dtype.to_string(),
        ranks: ranks.size(),
        hosts: hosts.len(),
        threads: device.threads(),
        engine: ranks.engine(),
        parameters,
        latency_us: round(1e6 * latency, 2),
        values_us: round(1e6 * values(ranks, flags.steps)?, 2),
        transfers,
        update,
    })
}

/// The slowest rank's time for one of `count` repetitions, the median of some rounds. All ranks begin at once.
fn time(
    ranks: &Ranks,
    rounds: usize,
    count: usize,
    mut act: impl FnMut() -> henson_tensor::Result<()>,
) -> anyhow::Result<f64> {
    act()?;
    let mut times = Vec::new();
    for _ in 0..rounds {
        ranks.gather(&[]);
        let start = Instant::now();
        (0..count).try_for_each(|_| act())?;
        times.push(start.elapsed().as_secs_f64() / count as f64);
    }
    Ok(slowest(ranks, median(&mut times)))
}

fn slowest(ranks: &Ranks, own: f64) -> f64 {
    let all = ranks.gather(&own.to_le_bytes());
    let times = all.iter().filter_map(|bytes| Some(f64::from_le_bytes(bytes.as_slice().try_into().ok()?)));
    times.fold(own, f64::max)
}

fn transfer(device: &Device, ranks: &Arc<Ranks>, bytes: usize, rounds: usize) -> anyhow::Result<Transfer> {
    let count = (AT_ONCE / bytes).max(1);
    let mut transfers = Transfers::new(device, ranks, bytes)?;
    let all_to_all = time(ranks, rounds, count, || transfers.all_to_all())?;
    let all_gather = time(ranks, rounds, count, || transfers.all_gather())?;
    // Shards differ by a byte at most.
    let sent = bytes - bytes / ranks.size();
    let rate = |seconds: f64| round(sent as f64 / 1e9 / seconds, 3);
    Ok(Transfer {
        bytes,
        sent_bytes: sent,
        all_to_all_ms: round(1e3 * all_to_all, 4),
        all_to_all_gb_per_s: rate(all_to_all),
        all_gather_ms: round(1e3 * all_gather, 4),
        all_gather_gb_per_s: rate(all_gather),
    })
}

/// One byte from each to each; of a GPU, four.
fn one_byte(device: &Device, ranks: &Arc<Ranks>, rounds: usize) -> anyhow::Result<f64> {
    let unit = if device.isa().is_some() { 1 } else { 4 };
    let mut transfers = Transfers::new(device, ranks, unit * ranks.size())?;
    time(ranks, rounds, VALUES, || transfers.all_gather())
}

fn values(ranks: &Ranks, rounds: usize) -> anyhow::Result<f64> {
    time(ranks, rounds, VALUES, || {
        ranks.gather(&[0; 64]);
        Ok(())
    })
}

/// Whole updates with gradients of zeros, which are as many bytes as others.
fn update(flags: &BenchExchange, device: &Device, ranks: &Arc<Ranks>, builder: Builder) -> anyhow::Result<UpdateTimes> {
    let mut parameters = builder.finish(device, flags.compute.dtype())?;
    parameters.initialise(0)?;
    let gradients = parameters.gradients()?;
    let mut updater = Updater::new(OptimizerSettings::default(), &parameters)?;
    updater.share(&parameters, Arc::clone(ranks))?;
    let mut updates = |times: usize| -> anyhow::Result<Vec<f64>> {
        let mut seconds = Vec::new();
        for _ in 0..times {
            ranks.gather(&[]);
            let start = Instant::now();
            updater.step(&mut parameters, &gradients, 1e-4)?.wait()?;
            seconds.push(start.elapsed().as_secs_f64());
        }
        Ok(seconds)
    };
    updates(2)?;
    let seconds = slowest(ranks, median(&mut updates(flags.steps)?));
    device.start_profile();
    updates(flags.steps)?;
    let spent = device.stop_profile();
    let of = |kind: Kind| {
        let seconds = spent.iter().find(|(other, _)| *other == kind).map_or(0.0, |(_, spent)| spent.seconds);
        round(1e3 * slowest(ranks, seconds / flags.steps as f64), 4)
    };
    Ok(UpdateTimes {
        ms: round(1e3 * seconds, 4),
        all_to_all_ms: of(Kind::AllToAll),
        add_ms: of(Kind::AddRanks),
        norm_ms: of(Kind::GradientNorm),
        optimizer_ms: of(Kind::Optimizer),
        all_gather_ms: of(Kind::AllGather),
    })
}

impl Exchanged {
    fn print(&self, steps: usize) -> anyhow::Result<()> {
        let Self { model, ranks, hosts, threads, engine, .. } = self;
        let machines = if *hosts == 1 { "one machine".to_owned() } else { format!("{hosts} machines") };
        output::line(&format!("{ranks} processes with {threads} threads each on {machines}, {engine}"))?;
        output::line("  buffer, bytes   sent by each    all-to-all, ms   GB/s   all-gather, ms   GB/s")?;
        for t in &self.transfers {
            let Transfer { all_to_all_ms, all_to_all_gb_per_s: out, all_gather_ms, all_gather_gb_per_s: back, .. } = t;
            let [bytes, sent] = [t.bytes, t.sent_bytes].map(output::thousands);
            output::line(&format!(
                "  {bytes:>13}  {sent:>13}  {all_to_all_ms:>16.3} {out:>6.2} {all_gather_ms:>16.3} {back:>6.2}"
            ))?;
        }
        output::line(&format!(
            "  a byte from each to each: {:.1} µs; a small value from each to all by way of rank 0: {:.1} µs",
            self.latency_us, self.values_us
        ))?;
        let UpdateTimes { ms, all_to_all_ms, add_ms, norm_ms, optimizer_ms, all_gather_ms } = &self.update;
        let parameters = output::thousands(self.parameters);
        output::line(&format!("an update of {model}, {parameters} parameters: {ms:.2} ms (median of {steps})"))?;
        output::line(&format!(
            "  gradients to shards {all_to_all_ms:.2} ms, adding {add_ms:.2}, norm {norm_ms:.2}, optimizer {optimizer_ms:.2}, weights \
             from shards {all_gather_ms:.2} (slowest rank, means)"
        ))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::flags::{Bench, Command, Flags};

    /// What three ranks that are threads measure.
    fn by_threads(model: &str) -> Vec<Exchanged> {
        let line = ["henson", "bench", "exchange", "--model", model, "--steps", "2"];
        let Command::Bench(Bench::Exchange(flags)) = Flags::parse_from(line).command else {
            panic!("other flags");
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = Ranks::in_threads(3)
                .into_iter()
                .map(|ranks| {
                    let flags = &flags;
                    scope.spawn(move || measure(flags, &Device::cpu(None, Some(1)).unwrap(), &Arc::new(ranks)).unwrap())
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn every_rank_knows_what_all_took() {
        let all = by_threads("bert-tiny");
        let first = &all[0];
        assert_eq!((first.ranks, first.hosts, first.threads), (3, 1, 1));
        // As `henson info bert-tiny` counts, 4 bytes each; two thirds of the shards are others'.
        assert_eq!(first.parameters, 4_433_468);
        let sizes: Vec<(usize, usize)> = first.transfers.iter().map(|t| (t.bytes, t.sent_bytes)).collect();
        let expected =
            [(4096, 2731), (65536, 43691), (1 << 20, 699_051), (16 << 20, 11_184_811), (17_733_872, 11_822_582)];
        assert_eq!(sizes, expected);
        for t in &first.transfers {
            let rate = t.sent_bytes as f64 / 1e6 / t.all_to_all_ms;
            assert!((t.all_to_all_gb_per_s - rate).abs() < 0.02 * rate + 1e-3, "{t:?}");
        }
        let UpdateTimes { ms, all_to_all_ms, add_ms, norm_ms, optimizer_ms, all_gather_ms } = first.update;
        let parts = [all_to_all_ms, add_ms, norm_ms, optimizer_ms, all_gather_ms];
        assert!(parts.iter().all(|part| *part > 0.0) && ms > 0.0, "{:?}", first.update);
        // The slowest rank's times, which all have been told.
        for other in &all {
            assert_eq!(other.update.all_gather_ms, all_gather_ms);
            assert_eq!(other.transfers.last().unwrap().all_to_all_ms, first.transfers[4].all_to_all_ms);
        }
    }

    #[test]
    fn what_is_printed_is_read_again() {
        let text = serde_json::to_string(&by_threads("bert-tiny")[1]).unwrap();
        let read: Exchanged = serde_json::from_str(&text).unwrap();
        assert_eq!(serde_json::to_string(&read).unwrap(), text);
        assert!(serde_json::from_str::<Exchanged>(&text.replace("\"exchange\"", "\"train\"")).is_err());
    }
}
