//! `henson bench generate`: tokens that a model with random weights writes per second, the reading of its prompts included.

use std::time::Instant;

use henson_infer::{GenerateSettings, Job, Writer, WriterLimits};
use henson_models::{Head, Model};
use henson_tensor::philox::Stream;
use henson_tensor::{Builder, Device, Isa, Kind, Parameters, Spent};
use serde::Serialize;

use super::bench::{config_of, median, round};
use super::generate::ids_of;
use crate::flags::generate::BenchGenerate;
use crate::{input, output};

#[derive(Serialize)]
struct Measured<'a> {
    mode: &'static str,
    device: String,
    model: &'a str,
    streams: usize,
    prompt_tokens: usize,
    new_tokens: usize,
    beams: usize,
    dtype: String,
    kernels: Option<String>,
    threads: usize,
    /// Of a whole run, prompts included.
    ms: f64,
    tokens_per_s: f64,
    /// Of a step in which every sequence gets a token.
    ms_per_token: f64,
    /// What such a step has to read, and what it reads a second.
    mb_per_token: f64,
    gb_per_s: f64,
    /// What the machine reads a second where it does nothing else.
    read_gb_per_s: f64,
    share_of_read: f64,
}

/// What a run took.
struct Run {
    seconds: f64,
    /// Of each step that had no prompt to read.
    steps: Vec<f64>,
}

pub(crate) fn run(flags: &BenchGenerate) -> anyhow::Result<()> {
    let device = flags.compute.device()?;
    let config = config_of(&flags.model)?;
    let head = [Head::Seq2Seq, Head::MaskedLm].into_iter().find(|head| config.family().has_head(*head));
    let mut builder = Builder::new();
    let model = Model::build(&mut builder, &config, head.unwrap_or(Head::Encoder))?;
    let mut parameters = builder.finish(&device, flags.compute.dtype())?;
    parameters.initialise(0)?;
    parameters.keep_packed();
    let prompts = prompts(flags, &model)?;
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
    let sizes = config.sizes();
    // A source is read by the encoder; what is written begins with one token.
    let begun = if model.decoder().is_some_and(|decoder| decoder.cache_sizes().source) { 1 } else { longest };
    anyhow::ensure!(
        begun.saturating_add(flags.new_tokens) <= sizes.max_tokens,
        "{} writes sequences of {} tokens: too few for {} new ones after {begun}; give a smaller --new-tokens or --prompt-length",
        flags.model,
        sizes.max_tokens,
        flags.new_tokens
    );
    let bench = Benched { flags, model: &model, parameters: &parameters, prompts: &prompts };
    // Weights are packed when they are first used.
    bench.run(2)?;
    let runs = (0..flags.rounds).map(|_| bench.run(flags.new_tokens)).collect::<anyhow::Result<Vec<Run>>>()?;
    let seconds = median(&mut runs.iter().map(|run| run.seconds).collect::<Vec<_>>());
    let step = median(&mut runs.iter().flat_map(|run| run.steps.iter().copied()).collect::<Vec<_>>());
    device.start_profile();
    bench.run(flags.new_tokens.min(8))?;
    let spent = device.stop_profile();
    let (bytes, read) = (bench.bytes_of_step(&device)?, device.read_bandwidth()?);
    let streams = prompts.len();
    let measured = Measured {
        mode: "generate",
        device: device.to_string(),
        model: &flags.model,
        streams,
        prompt_tokens: prompts.iter().map(Vec::len).sum(),
        new_tokens: flags.new_tokens,
        beams: flags.beams,
        dtype: flags.compute.dtype.to_string(),
        kernels: device.isa().map(|isa: Isa| isa.to_string()),
        threads: device.threads(),
        ms: round(seconds * 1e3, 3),
        tokens_per_s: round((streams * flags.new_tokens) as f64 / seconds, 1),
        ms_per_token: round(step * 1e3, 4),
        mb_per_token: round(bytes / 1e6, 2),
        gb_per_s: round(bytes / step / 1e9, 2),
        read_gb_per_s: round(read / 1e9, 2),
        share_of_read: round(bytes / step / read, 3),
    };
    if flags.json {
        return output::json(&measured);
    }
    let Measured { tokens_per_s, ms_per_token, gb_per_s, read_gb_per_s, share_of_read, .. } = &measured;
    output::line(&format!(
        "{} with {streams} prompts of up to {longest} tokens, {} new ones each, {} on {device}",
        flags.model, flags.new_tokens, flags.compute.dtype
    ))?;
    output::line(&format!("  {tokens_per_s:.1} tokens/s, prompts included (median of {} runs)", flags.rounds))?;
    output::line(&format!(
        "  {ms_per_token:.3} ms for a token of every sequence; its {:.1} MB are read at {gb_per_s:.1} GB/s, {:.0}% of the \
         {read_gb_per_s:.1} that this machine reads",
        bytes / 1e6,
        100.0 * share_of_read
    ))?;
    if flags.profile {
        spent.iter().try_for_each(|(kind, spent)| print_kind(*kind, spent))?;
    }
    Ok(())
}

fn print_kind(kind: Kind, spent: &Spent) -> anyhow::Result<()> {
    let (ms, gb) = (spent.seconds * 1e3, spent.bytes / spent.seconds / 1e9);
    output::line(&format!("  {:<24} {:>6} calls {ms:>9.3} ms {gb:>7.1} GB/s", kind.name(), spent.calls))
}

/// Prompts of random tokens, or those of a file.
fn prompts(flags: &BenchGenerate, model: &Model) -> anyhow::Result<Vec<Vec<u32>>> {
    let Some(file) = &flags.prompts else {
        let (mut draws, vocabulary) = (Stream::new(0, 1, 0), model.config().sizes().vocab_size as u32);
        let mut prompt = || (0..flags.prompt_length).map(|_| draws.below(vocabulary)).collect();
        return Ok((0..flags.streams).map(|_| prompt()).collect());
    };
    let mut lines = input::Lines::open(Some(file))?;
    let mut prompts = vec![];
    while let Some(line) = lines.next_line()? {
        prompts.push(ids_of(&line)?);
    }
    anyhow::ensure!(!prompts.is_empty(), "{} has no prompt: expected token ids, one prompt per line", file.display());
    Ok(prompts)
}

struct Benched<'a> {
    flags: &'a BenchGenerate,
    model: &'a Model,
    parameters: &'a Parameters,
    prompts: &'a [Vec<u32>],
}

impl Benched<'_> {
    fn settings(&self, new_tokens: usize) -> GenerateSettings {
        GenerateSettings { max_new_tokens: Some(new_tokens), beams: self.flags.beams, ..GenerateSettings::default() }
    }

    fn writer(&self, new_tokens: usize) -> anyhow::Result<Writer<'_>> {
        let settings = self.settings(new_tokens);
        let lengths = self.prompts.iter().map(Vec::len);
        let room = (self.prompts.len() * self.flags.beams, usize::MAX);
        let limits = Writer::limits_for(self.model, self.parameters, lengths, &settings, room)?;
        let mut writer = Writer::new(self.model, self.parameters, WriterLimits { prefill: 4096, ..limits })?;
        for prompt in self.prompts {
            writer.enter(Job { prompt: prompt.clone(), start: vec![], settings: settings.clone(), stop: None })?;
        }
        Ok(writer)
    }

    fn run(&self, new_tokens: usize) -> anyhow::Result<Run> {
        let mut writer = self.writer(new_tokens)?;
        let (start, mut steps) = (Instant::now(), vec![]);
        let mut before = start;
        while !writer.is_idle() {
            let tokens = writer.step()?.len();
            let now = Instant::now();
            // Prompts are read in the first ones; a last step has ends beside tokens.
            if self.flags.beams > 1 || tokens == self.prompts.len() {
                steps.push((now - before).as_secs_f64());
            }
            before = now;
        }
        let seconds = start.elapsed().as_secs_f64();
        let first = steps.len().min(1);
        Ok(Run { seconds, steps: steps.split_off(first) })
    }

    /// The operands of all operations of a step without prompts.
    fn bytes_of_step(&self, device: &Device) -> anyhow::Result<f64> {
        let mut writer = self.writer(self.flags.new_tokens.max(4))?;
        // Until all prompts are read.
        let mut tokens = 0;
        while tokens < self.prompts.len() && self.flags.beams == 1 {
            tokens = writer.step()?.len();
        }
        writer.step()?;
        device.start_profile();
        writer.step()?;
        Ok(device.stop_profile().iter().map(|(_, spent)| spent.bytes).sum())
    }
}
