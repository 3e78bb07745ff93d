//! Several processes with a GPU each, all of them emulated: the libraries of `tools/emulator`, NCCL among them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use super::{Bench, signal};
use crate::Result;

/// A small model, so that the emulator is quick; heads of 32 and lengths of several kinds, so that parts differ in size.
const PRETRAIN: &str = "pretrain --model bert-tiny --data {in}/data --device cuda --set config.hidden_size=64 \
    --set config.num_attention_heads=2 --set config.intermediate_size=96 --set config.num_hidden_layers=1 \
    --set config.max_position_embeddings=64 --set steps=5 --set batch_size=8 --set accumulation=4 --set sequence_length=32 \
    --set learning_rate=1e-2 --set warmup_steps=2 --set checkpoint_every=2 --set eval_every=4 --set eval_sequences=8 --set log_every=1 \
    --lost-after 10";

/// Optimizers and dtypes, with the numbers of ranks that are tried for each where not all are.
const KINDS: [(&str, &str, &[usize]); 5] = [
    ("adamw", "f32", &[1, 2, 4]),
    ("adamw", "bf16", &[4]),
    ("lamb", "f32", &[4]),
    ("lamb", "bf16", &[2]),
    ("stable-adamw", "f32", &[2]),
];

struct Gpus<'a> {
    bench: &'a Bench,
    libraries: PathBuf,
}

pub(super) fn check(bench: &Bench, libraries: &Path, whole: bool, kills: usize) -> Result {
    let gpus = Gpus { bench, libraries: libraries.to_owned() };
    for (optimizer, dtype, ranks) in KINDS {
        let line = format!("{PRETRAIN} --set optimizer=\"{optimizer}\" --dtype {dtype}");
        let one = format!("gpu-one-{optimizer}-{dtype}");
        gpus.ends(&line, &one, &[], Some(0))?;
        for ranks in if whole { &[1, 2, 4] } else { ranks } {
            let begin = Instant::now();
            let several = format!("gpu-{ranks}-{optimizer}-{dtype}");
            gpus.ends(&several_of(&line, *ranks), &several, &[], Some(0))?;
            bench.equal(&one, &several)?;
            println!("{several}: the bits of one process, {:.1} s", begin.elapsed().as_secs_f64());
        }
    }
    gpus.killed(kills)?;
    gpus.through_the_host()?;
    gpus.refusals()
}

fn several_of(line: &str, ranks: usize) -> String {
    format!("{line} --ranks {ranks} --transport nccl")
}

impl Gpus<'_> {
    fn command(&self, line: &str, out: &str, variables: &[(&str, &str)]) -> Command {
        let mut command = Command::new(&self.bench.binary);
        command.args(self.bench.arguments(line, out)).env("LD_LIBRARY_PATH", &self.libraries);
        command.env("HENSON_EMULATOR_DEVICES", "4").env("XDG_CACHE_HOME", self.bench.place.join("cache"));
        command.envs(variables.iter().copied());
        command
    }

    fn ends(&self, line: &str, out: &str, variables: &[(&str, &str)], code: Option<i32>) -> Result<String> {
        self.bench.ends(self.command(line, out, variables), code, line)
    }

    /// A rank is killed: the others end by its name, and another number of ranks resumes to the same bits.
    fn killed(&self, kills: usize) -> Result {
        for number in 0..kills {
            let name = format!("gpu-killed-{number}");
            let ranks = [2, 4][number % 2];
            let child = self.bench.start(self.command(&several_of(PRETRAIN, ranks), &name, &[]))?;
            self.bench.wait_for_checkpoint(&name, 2)?;
            // The first is the one that has started the others.
            let processes = self.bench.processes(&name)?;
            let victim = processes.get(1..).and_then(|ranks| ranks.get((number + 1) % ranks.len().max(1)));
            signal("KILL", *victim.ok_or("no rank is running")?)?;
            let begin = Instant::now();
            let (code, said) = self.bench.wait(child)?;
            let seconds = begin.elapsed().as_secs_f64();
            self.bench.gone(&name, &said)?;
            let named = said.lines().find(|line| line.contains("was lost"));
            match (code, named) {
                (Some(75), Some(line)) if seconds < 12.0 => println!("{name}: {seconds:.1} s: {line}"),
                _ => return Err(format!("a rank was killed: ended with {code:?} after {seconds:.1} s:\n{said}")),
            }
            self.ends(&several_of(PRETRAIN, 6 - ranks), &name, &[], Some(0))?;
            self.bench.equal("gpu-one-adamw-f32", &name)?;
        }
        Ok(())
    }

    /// GPUs that exchange by way of their hosts, over MPI.
    fn through_the_host(&self) -> Result {
        let mut command = self.bench.mpirun(0, 2, &format!("{PRETRAIN} --transport mpi"), "gpu-host");
        command.env("LD_LIBRARY_PATH", &self.libraries).env("HENSON_EMULATOR_DEVICES", "2");
        command.env("XDG_CACHE_HOME", self.bench.place.join("cache"));
        self.bench.ends(command, Some(0), "through the host")?;
        self.bench.equal("gpu-one-adamw-f32", "gpu-host")?;
        println!("gpu-host: over MPI and the memory of hosts, the bits of one process");
        Ok(())
    }

    /// Two ranks on one GPU, and more than there are.
    fn refusals(&self) -> Result {
        let cases = [
            (
                format!("{} --device cuda:0", several_of(PRETRAIN, 2)).replace("--device cuda ", ""),
                "4",
                "have the same GPU",
            ),
            (several_of(PRETRAIN, 4), "2", "which has 2 GPUs"),
        ];
        for (line, devices, words) in cases {
            let said = self.ends(&line, "gpu-refused", &[("HENSON_EMULATOR_DEVICES", devices)], Some(1))?;
            if !said.contains(words) || said.contains("panicked") {
                return Err(format!("{line}\nexpected `{words}` in:\n{said}"));
            }
        }
        println!("two ranks on one GPU, and more ranks than GPUs, are refused");
        Ok(())
    }
}
