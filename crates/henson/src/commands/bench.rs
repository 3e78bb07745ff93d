//! Speed as users get it: whole steps through the same code as training and inference, medians of several runs.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context;
use henson_data::{Corpus, InstanceSettings, Instances, Loader, Part, Place, Split};
use henson_models::{Batch, Capture, Family, Head, Model, ModelConfig, Sequence, Sizes};
use henson_tensor::philox::Stream;
use henson_tensor::{Bits, Builder, DType, Device, Isa, Reading, Tensor};
use henson_train::Engine;
use henson_train::objective::{self, Masked, Scales};
use henson_train::replaced::{PerPrediction, ReplacedTokens};
use serde::Serialize;

use crate::built_in::BuiltIn;
use crate::flags::{Bench, BenchData, BenchGemm, BenchModel, BenchTokenize, BenchTrain, BenchWork};
use crate::launch::{self, Started, Together};
use crate::{input, models, output};

pub(crate) fn run(bench: Bench) -> anyhow::Result<()> {
    match bench {
        Bench::Train(flags) => train(&flags),
        Bench::Infer(flags) => model(&flags, &BenchWork::default(), Mode::Infer, 1, None),
        Bench::Generate(flags) => super::bench_generate::run(&flags),
        Bench::Gemm(flags) => gemm(&flags),
        Bench::Data(flags) => data(&flags),
        Bench::Tokenize(flags) => tokenize(&flags),
        Bench::Exchange(flags) => super::bench_exchange::run(&flags),
    }
}

/// Training steps, of one process or of several that share the update.
fn train(flags: &BenchTrain) -> anyhow::Result<()> {
    match launch::start(&flags.together, &flags.model.compute.machine)? {
        Started::Alone => model(&flags.model, &flags.work, Mode::Train, flags.parts, None),
        Started::Together(together) => {
            let ended = model(&flags.model, &flags.work, Mode::Train, flags.parts, Some(&together));
            together.end(ended)
        }
    }
}

/// The loader alone: pairs with next sentence and masks, as fast as they are taken.
fn data(flags: &BenchData) -> anyhow::Result<()> {
    let corpus = Arc::new(Corpus::open(&flags.data, Split::Train)?);
    let settings = InstanceSettings { sequence_length: flags.seq, ..InstanceSettings::default() };
    let template = super::data::tokenizer(&corpus)?.template().clone();
    let opened = Instant::now();
    let instances = Arc::new(Instances::new(corpus, template, settings, 0)?);
    let mut loader = Loader::new(instances, Place::default(), flags.batch, 1, flags.threads, 4)?;
    loader.next()?;
    let first_ms = opened.elapsed().as_secs_f64() * 1e3;
    let start = Instant::now();
    let mut tokens = 0;
    for _ in 0..flags.steps {
        tokens += loader.next()?.tokens;
    }
    let seconds = start.elapsed().as_secs_f64();
    let (ms, tokens_per_s) = (seconds * 1e3 / flags.steps as f64, tokens as f64 / seconds);
    if flags.json {
        let threads = flags.threads;
        return output::json(&serde_json::json!({
            "mode": "data", "batch": flags.batch, "seq": flags.seq, "threads": threads,
            "ms": round(ms, 4), "tokens_per_s": tokens_per_s.round(), "first_ms": round(first_ms, 1),
        }));
    }
    output::line(&format!("batches of {}×{} tokens by {} threads", flags.batch, flags.seq, flags.threads))?;
    output::line(&format!("  {ms:.3} ms each, {tokens_per_s:.0} tokens/s; the first after {first_ms:.0} ms"))
}

/// The ids of every line of a file.
fn tokenize(flags: &BenchTokenize) -> anyhow::Result<()> {
    let tokenizer = henson_text::Tokenizer::open(&models::find(&flags.model, BuiltIn::General)?)?;
    let mut lines = input::Lines::open(Some(&flags.file))?;
    let mut texts = Vec::new();
    while let Some(line) = lines.next_line()? {
        texts.push(line);
    }
    anyhow::ensure!(!texts.is_empty(), "{} has no text: expected one per line", lines.name);
    let bytes: usize = texts.iter().map(String::len).sum();
    let mut times = Vec::new();
    let (mut encoder, mut ids) = (tokenizer.encoder(), Vec::new());
    for _ in 0..3 {
        let start = Instant::now();
        ids.clear();
        for text in &texts {
            encoder.encode(text, &mut ids)?;
        }
        times.push(start.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    let seconds = times[1];
    let (tokens_per_s, mb_per_s) = (ids.len() as f64 / seconds, bytes as f64 / 1e6 / seconds);
    if flags.json {
        return output::json(&serde_json::json!({
            "mode": "tokenize", "texts": texts.len(), "tokens": ids.len(),
            "ms": round(seconds * 1e3, 3), "tokens_per_s": tokens_per_s.round(), "mb_per_s": round(mb_per_s, 2),
        }));
    }
    output::line(&format!(
        "{} texts, {} tokens: {mb_per_s:.1} MB/s, {tokens_per_s:.0} tokens/s, one thread, median of 3",
        texts.len(),
        ids.len()
    ))
}

#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Mode {
    Train,
    Infer,
}

/// The result of a benchmark of a model.
#[derive(Serialize)]
struct Measured<'a> {
    mode: Mode,
    device: String,
    model: &'a str,
    batch: usize,
    /// Batches of a step of each process.
    parts: usize,
    seq: usize,
    /// Of each target, where there are targets.
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<usize>,
    dtype: String,
    kernels: Option<String>,
    threads: usize,
    /// Processes, each with a batch of its own.
    ranks: usize,
    ms: f64,
    /// Of a step that begins when the one before is done; the same on the CPU.
    ms_alone: f64,
    /// Sources and targets.
    tokens_per_s: f64,
    sequences_per_s: f64,
    /// None where a source and its target have different lengths, which `multiply_adds` does not know.
    tflops: Option<f64>,
    peak_tflops: f64,
    share_of_peak: Option<f64>,
    peak_mib: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    operations: Option<Vec<Operation>>,
}

/// What one kind of operation takes in a step.
#[derive(Serialize)]
struct Operation {
    kind: &'static str,
    calls: usize,
    ms: f64,
    /// The longer of what its multiply-adds and what its memory traffic take at the machine's measured best.
    floor_ms: f64,
    gflops: f64,
    gib_per_s: f64,
}

fn model(
    flags: &BenchModel,
    work: &BenchWork,
    mode: Mode,
    shares: usize,
    together: Option<&Together>,
) -> anyhow::Result<()> {
    let device = flags.compute.device_of(together)?;
    let config = config_of(&flags.model)?;
    check_model(&flags.model, &config, mode)?;
    let lengths = Lengths::new(flags, work, mode, &config)?;
    let mut bench = ModelBench::new(&device, &config, flags, work, &lengths)?;
    if let Some(together) = together {
        bench.engine.updater.share(&bench.engine.parameters, Arc::clone(&together.ranks))?;
    }
    if mode == Mode::Infer {
        bench.engine.parameters.keep_packed();
    }
    // Where batches differ, all of them are measured, as often as each other.
    let batches = bench.parts.len();
    let steps = flags.steps.next_multiple_of(batches);
    let mut step = |i: u32| {
        let results = match mode {
            Mode::Train => bench.train_step(i, shares),
            Mode::Infer => bench.infer(),
        };
        // Losses and flags go around once a step.
        together.inspect(|together| drop(together.ranks.gather(&[0; 32])));
        results
    };
    // On a GPU a pass runs once to see what it needs and once to be recorded.
    for i in 0..flags.warmup.max(3).max(3 * batches * usize::from(batches > 1)) {
        step(i as u32)?.wait()?;
    }
    // As the loop of training does: a few steps are under way before the first one's results are waited for.
    let (mut times, mut under_way, mut before) = (Vec::new(), VecDeque::new(), Instant::now());
    for i in 0..steps + device.ahead() {
        under_way.push_back(step(i as u32)?);
        if under_way.len() > device.ahead()
            && let Some(results) = under_way.pop_front()
        {
            results.wait()?;
            times.push(before.elapsed().as_secs_f64());
            before = Instant::now();
        }
    }
    for results in under_way {
        results.wait()?;
    }
    let seconds = typical(&mut times, batches);
    let mut times = Vec::new();
    for i in 0..steps {
        let start = Instant::now();
        step(i as u32)?.wait()?;
        times.push(start.elapsed().as_secs_f64());
    }
    let alone = typical(&mut times, batches);
    let peak_mib = match device {
        Device::Cpu(_) => peak_mib(),
        Device::Cuda(_) => device.held() as f64 / (1 << 20) as f64,
    };
    let peak = device.peak(flags.compute.dtype())? / 1e12;
    let tflops = lengths.flops(&config, mode).map(|flops| shares as f64 * flops / seconds / 1e12);
    let operations = match flags.profile {
        true => Some(profile(&device, peak * 1e12, steps, |i| step(i)?.wait())?),
        false => None,
    };
    if together.is_some_and(|together| !together.is_first()) {
        return Ok(());
    }
    let ranks = together.map_or(1, |together| together.ranks.size());
    let measured = Measured {
        mode,
        device: device.to_string(),
        model: &flags.model,
        batch: flags.batch,
        parts: shares,
        seq: lengths.longest,
        target: lengths.target,
        dtype: flags.compute.dtype.to_string(),
        kernels: device.isa().map(|isa: Isa| isa.to_string()),
        threads: device.threads(),
        ranks,
        ms: round(seconds * 1e3, 3),
        ms_alone: round(alone * 1e3, 3),
        tokens_per_s: round((ranks * shares) as f64 * lengths.tokens() / seconds, 0),
        sequences_per_s: round((ranks * shares * flags.batch) as f64 / seconds, 2),
        tflops: tflops.map(|tflops| round(tflops, 4)),
        peak_tflops: round(peak, 4),
        share_of_peak: tflops.map(|tflops| round(tflops / peak, 3)),
        peak_mib: round(peak_mib, 1),
        operations,
    };
    if flags.json {
        return output::json(&measured);
    }
    measured.print(steps, &device)
}

/// What a step takes: the median, and of batches that differ the mean, since each of them counts.
fn typical(times: &mut [f64], batches: usize) -> f64 {
    if batches > 1 { times.iter().sum::<f64>() / times.len() as f64 } else { median(times) }
}

/// How long the sequences of all batches are.
struct Lengths {
    /// Of every batch in turn.
    batches: Vec<Vec<usize>>,
    longest: usize,
    /// Of each target, where sequences are sources.
    target: Option<usize>,
}

impl Lengths {
    fn new(flags: &BenchModel, work: &BenchWork, mode: Mode, config: &ModelConfig) -> anyhow::Result<Self> {
        let batches = match &work.lengths {
            None => vec![vec![flags.seq; flags.batch]],
            Some(file) => {
                let lengths = read_lengths(file)?;
                let count = (lengths.len() / flags.batch).max(1);
                let mut round_and_round = lengths.iter().copied().cycle();
                (0..count).map(|_| round_and_round.by_ref().take(flags.batch).collect()).collect()
            }
        };
        let writes = mode == Mode::Train && config.family().pretraining_head() == Head::Seq2Seq;
        let written = config.targets().filter(|_| writes);
        anyhow::ensure!(
            written.is_some() || work.target.is_none(),
            "--target: {} writes nothing for a source",
            flags.model
        );
        anyhow::ensure!(
            written.is_none() || work.lengths.is_none(),
            "--lengths: {} needs targets as well, use --seq and --target",
            flags.model
        );
        let longest = batches.iter().flatten().copied().max().unwrap_or(0);
        let target = written.map(|_| work.target.unwrap_or(flags.seq));
        let (most, asked) = (config.sizes().max_tokens, longest.max(target.unwrap_or(0)));
        anyhow::ensure!(asked <= most, "{asked} tokens: {} has positions for {most}", flags.model);
        let tokens = |lengths: &Vec<usize>| lengths.iter().map(|length| length + target.unwrap_or(0)).sum::<usize>();
        anyhow::ensure!(batches.iter().map(tokens).max() <= Some(1 << 24), "a batch has at most {} tokens", 1 << 24);
        Ok(Self { batches, longest, target })
    }

    /// Of a batch, the mean.
    fn tokens(&self) -> f64 {
        let sequences: usize = self.batches.iter().map(Vec::len).sum();
        let sources: usize = self.batches.iter().flatten().sum();
        (sources + sequences * self.target.unwrap_or(0)) as f64 / self.batches.len() as f64
    }

    /// Floating-point operations of a batch, the mean: of [`training_flops`], or of the layers alone in inference.
    fn flops(&self, config: &ModelConfig, mode: Mode) -> Option<f64> {
        if self.target.is_some_and(|target| target != self.longest) {
            return None;
        }
        let of_sequence = |seq: &usize| match mode {
            Mode::Infer => 2.0 * *seq as f64 * config.multiply_adds(*seq),
            Mode::Train => training_flops(config, 1, *seq),
        };
        Some(self.batches.iter().flatten().map(of_sequence).sum::<f64>() / self.batches.len() as f64)
    }
}

/// One length per line.
fn read_lengths(file: &std::path::Path) -> anyhow::Result<Vec<usize>> {
    let (mut lines, mut lengths) = (input::Lines::open(Some(file))?, Vec::new());
    while let Some(line) = lines.next_line()? {
        let length = line.trim().parse().ok().filter(|length| *length > 0);
        lengths.push(length.with_context(|| format!("{}: `{line}` is not a length", lines.name))?);
    }
    anyhow::ensure!(!lengths.is_empty(), "{} has no length: expected one per line", lines.name);
    Ok(lengths)
}

impl Measured<'_> {
    fn print(&self, steps: usize, device: &Device) -> anyhow::Result<()> {
        let Self { model, batch, seq, dtype, ranks, ms, tokens_per_s, peak_tflops: peak, peak_mib, .. } = self;
        let what = if self.mode == Mode::Train { "a training step" } else { "a forward pass" };
        let each = if *ranks > 1 { format!(" in each of {ranks} processes") } else { String::new() };
        let targets = self.target.map(|target| format!(" → {target}")).unwrap_or_default();
        output::line(&format!("{what} of {model}, {batch}×{seq}{targets} tokens{each}, {dtype} on {device}"))?;
        let sequences = self.sequences_per_s;
        output::line(&format!("  {ms:.2} ms ({steps} steps), {tokens_per_s:.0} tokens/s, {sequences:.1} sequences/s"))?;
        if device.ahead() > 0 {
            output::line(&format!("  {:.2} ms where each step waits for the one before", self.ms_alone))?;
        }
        if let Some(tflops) = self.tflops {
            let share = 100.0 * tflops / peak;
            output::line(&format!(
                "  {tflops:.3} TFLOP/s, {share:.0}% of the {peak:.3} that multiply-adds alone reach here"
            ))?;
        }
        output::line(&format!("  {peak_mib:.0} MiB of memory at most"))?;
        let Some(operations) = &self.operations else { return Ok(()) };
        output::line("  operation                 calls        ms   floor ms   floor/ms    GFLOP/s     GiB/s")?;
        for o in operations {
            let Operation { kind, calls, ms, floor_ms, gflops, gib_per_s } = o;
            let share = 100.0 * floor_ms / ms;
            output::line(&format!(
                "  {kind:<24} {calls:>6} {ms:>9.3} {floor_ms:>10.3} {share:>9.0}% {gflops:>10.1} {gib_per_s:>9.1}"
            ))?;
        }
        let total: f64 = operations.iter().map(|o| o.ms).sum();
        let floor: f64 = operations.iter().map(|o| o.floor_ms).sum();
        output::line(&format!("  {:<24} {:>6} {total:>9.3} {floor:>10.3} {:>9.0}%", "all", "", 100.0 * floor / total))
    }
}

/// The times of all kinds of operations, the mean over some steps.
fn profile(
    device: &Device,
    peak: f64,
    steps: usize,
    mut step: impl FnMut(u32) -> anyhow::Result<()>,
) -> anyhow::Result<Vec<Operation>> {
    let bandwidth = device.bandwidth()?;
    device.start_profile();
    for i in 0..steps {
        step(i as u32)?;
    }
    let n = steps as f64;
    let operations = device.stop_profile().into_iter().map(|(kind, spent)| Operation {
        kind: kind.name(),
        calls: spent.calls / steps,
        ms: round(spent.seconds / n * 1e3, 4),
        floor_ms: round((spent.flops / peak).max(spent.bytes / bandwidth) / n * 1e3, 4),
        gflops: round(spent.flops / spent.seconds / 1e9, 1),
        gib_per_s: round(spent.bytes / spent.seconds / (1u64 << 30) as f64, 1),
    });
    Ok(operations.collect())
}

/// The config of a named size or of a model directory.
pub(crate) fn config_of(model: &str) -> anyhow::Result<ModelConfig> {
    let path = models::directory(std::path::Path::new(model))?.join("config.json");
    if path.is_file() {
        let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let config = henson_checkpoint::Config::from_json(&text).with_context(|| format!("in {}", path.display()))?;
        return Ok(config.model);
    }
    Family::config_of_size(model).context("--model is neither a size nor a directory with config.json")
}

/// Networks are built as they are pre-trained, and trained on sequences that have nothing to do with each other.
fn check_model(model: &str, config: &ModelConfig, mode: Mode) -> anyhow::Result<()> {
    anyhow::ensure!(
        mode == Mode::Infer || config.characters().is_none(),
        "{model} reads running text as characters, which is not measured here; the progress of `henson pretrain recipes/elmo-tiny.toml` \
         shows its tokens per second"
    );
    let family = config.family();
    anyhow::ensure!(
        family.has_head(family.pretraining_head()),
        "{model} is never pre-trained, and has no head to measure; the progress of `henson finetune --model {model}` shows its tokens per second"
    );
    Ok(())
}

/// A model with random weights and batches of random tokens: 15% are predicted, of models that write all that follow another. Every step
/// takes its batch from the host.
struct ModelBench {
    engine: Engine,
    /// Whether it is a discriminator that learns together with its generator.
    joint: bool,
    /// The batches, in turn.
    parts: Vec<Part>,
    /// Of each sequence, whether its second segment followed.
    labels: Vec<u32>,
}

impl ModelBench {
    fn new(
        device: &Device,
        config: &ModelConfig,
        flags: &BenchModel,
        work: &BenchWork,
        lengths: &Lengths,
    ) -> anyhow::Result<Self> {
        let mut builder = Builder::new();
        let generator = config.generator(None, None).ok();
        let model = match &generator {
            Some(generator) => Model::build_with_generator(&mut builder, config, generator)?,
            None => Model::build(&mut builder, config, config.family().pretraining_head())?,
        };
        let mut parameters = builder.finish(device, flags.compute.dtype())?;
        parameters.initialise(flags.seed)?;
        let mut draws = Stream::new(flags.seed, 1, 0);
        let mut parts: Vec<Part> =
            lengths.batches.iter().map(|batch| random_part(config, batch, lengths.target, &mut draws)).collect();
        if generator.is_some() {
            for part in &mut parts {
                part.rows.iter().for_each(|row| part.ids[*row as usize] = 0);
            }
        }
        let labels: Vec<u32> = (0..flags.batch).map(|_| draws.below(2)).collect();
        let optimizer = work.optimizer.with([0.9, 0.999], 1e-6, 0.01, 1.0);
        let engine = Engine::new(model, parameters, optimizer, flags.seed)?;
        Ok(Self { engine, joint: generator.is_some(), parts, labels })
    }

    /// Masked LM of the generator, its draws, and the discriminator's loss over all tokens.
    fn joint_step(engine: &mut Engine, part: &Part, step: u32) -> anyhow::Result<Results> {
        engine.gradients.zero();
        let objective = ReplacedTokens { temperature: Bits::from(1.0), disallow_correct: false };
        let per = PerPrediction { masked: 1.0 / part.rows.len() as f32, token: 50.0 / part.ids.len() as f32 };
        let loss = engine.learn_part(u64::from(step), objective, (part, per))?;
        let norm = engine.updater.step(&mut engine.parameters, &engine.gradients, 1e-4)?;
        Ok(Results(vec![loss, norm]))
    }

    fn train_step(&mut self, step: u32, shares: usize) -> anyhow::Result<Results> {
        let Self { engine, joint, parts, labels } = self;
        let part = &parts[step as usize % parts.len()];
        if *joint {
            anyhow::ensure!(shares == 1, "--parts is for models without a generator");
            return Self::joint_step(engine, part, step);
        }
        engine.gradients.zero();
        let scales = [part.rows.len(), labels.len()].map(|count| Bits::from(1.0 / (shares * count) as f32));
        // Where batches differ, each prediction's share of the loss is an input, as in pre-training: recorded passes fit several batches.
        let weight = (parts.len() > 1).then(|| scales[0].get());
        let scales = [weight.map_or(scales[0], |_| Bits::from(1.0)), scales[1]];
        let learn = |engine: &mut Engine| {
            engine.learn(
                u64::from(step),
                scales,
                |device, config| {
                    let masked = match weight {
                        Some(weight) => Masked::new(device, &part.rows, &part.targets, weight)?,
                        None => Masked {
                            rows: Tensor::from_slice(device, [part.rows.len()], &part.rows)?,
                            targets: Tensor::from_slice(device, [part.targets.len()], &part.targets)?,
                            weights: None,
                        },
                    };
                    Ok((batch(device, config, part)?, masked, Tensor::from_slice(device, [labels.len()], labels)?))
                },
                |[masked_scale, sequence], model, pass, (batch, masked, labels)| {
                    let scales = Scales { masked: masked_scale.get(), sequence: sequence.get() };
                    let labels = (model.head() == Head::PreTraining).then_some(labels);
                    let loss = objective::pre_training(model, pass, batch, masked, labels, scales)?;
                    Ok([Some(loss.masked), loss.next_sentence].into_iter().flatten().collect())
                },
            )
        };
        let mut results = engine.in_parts(u64::from(step), shares, |engine, _| Ok(vec![learn(engine)?]))?;
        results.push(engine.updater.step(&mut engine.parameters, &engine.gradients, 1e-4)?);
        Ok(Results(results))
    }

    fn infer(&mut self) -> anyhow::Result<Results> {
        let Self { engine, parts, .. } = self;
        let part = &parts[0];
        let done = engine.look(
            (),
            |device, config| Ok(batch(device, config, part)?),
            |(), model, pass, batch| {
                model.encode(pass, batch, Capture::default())?;
                Ok(Vec::new())
            },
        )?;
        Ok(Results(vec![done]))
    }
}

/// What a step will give.
struct Results(Vec<Reading>);

impl Results {
    fn wait(self) -> anyhow::Result<()> {
        for reading in self.0 {
            let numbers = reading.wait()?;
            anyhow::ensure!(
                numbers.iter().all(|x| x.is_finite()),
                "a loss or the gradients' norm is not finite: {numbers:?}"
            );
        }
        Ok(())
    }
}

pub(crate) fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Sequences of random tokens of these lengths, and what is predicted in them.
fn random_part(config: &ModelConfig, lengths: &[usize], target: Option<usize>, draws: &mut Stream) -> Part {
    let sizes = config.sizes();
    let mut part = Part { lengths: lengths.to_vec(), ..Part::default() };
    let tokens: usize = lengths.iter().sum();
    part.ids = (0..tokens).map(|_| draws.below(sizes.vocab_size as u32)).collect();
    if let Some(target) = target {
        let tokens = lengths.len() * target;
        part.segments = vec![0; part.ids.len()];
        part.targets = (0..tokens).map(|_| draws.below(sizes.vocab_size as u32)).collect();
        part.rows = (0..tokens as u32).collect();
        part.target_lengths = Some(vec![target; lengths.len()]);
        return part;
    }
    let mut start = 0;
    for length in lengths {
        part.segments.extend((0..*length).map(|i| u32::from(i >= length / 2 && sizes.segments > 1)));
        let mut places: Vec<u32> = (0..*length as u32).collect();
        if sizes.causal {
            // The next token of each but the last.
            places.pop();
            part.targets.extend(&part.ids[start + 1..start + length]);
        } else {
            for i in 0..predicted(*length) {
                let j = i + draws.below((length - i) as u32) as usize;
                places.swap(i, j);
            }
            places.truncate(predicted(*length));
            places.sort_unstable();
            part.targets.extend(places.iter().map(|place| part.ids[start + *place as usize]));
        }
        part.rows.extend(places.iter().map(|place| place + start as u32));
        start += length;
    }
    part
}

fn batch(device: &Device, config: &ModelConfig, part: &Part) -> Result<Batch, henson_models::InputError> {
    let (mut sequences, mut start) = (Vec::with_capacity(part.lengths.len()), 0);
    for length in &part.lengths {
        let range = start..start + length;
        sequences.push(Sequence { ids: &part.ids[range.clone()], segments: &part.segments[range] });
        start += length;
    }
    match part.target_lengths.as_ref().and_then(|lengths| lengths.first()) {
        Some(target) => {
            let targets: Vec<&[u32]> = part.targets.chunks(*target).collect();
            Batch::pairs(device, config, &sequences, &targets, 0)
        }
        None => Batch::new(device, config, &sequences, 0),
    }
}

/// Predicted tokens of a sequence.
fn predicted(seq: usize) -> usize {
    ((seq as f64 * 0.15).round() as usize).max(1)
}

/// The multiplications and additions of matrix products in a training step, counted alike for all systems: for BERT 24·T·H² + 4·T·S·H a
/// layer, 2·P·(H² + H·V) for the vocabulary, three times that in training. Models that read left to right see half of a sequence on average
/// and have no H². Of a discriminator and its generator both count, with tables of E columns and 2·T·H² for the discriminator's head.
pub(super) fn training_flops(config: &ModelConfig, batch: usize, seq: usize) -> f64 {
    let Sizes { hidden_size: h, vocab_size: v, causal, .. } = config.sizes();
    let writes = config.family().pretraining_head() == Head::Seq2Seq;
    let predicted = match (writes, causal) {
        (true, _) => seq,
        (false, true) => seq.saturating_sub(1),
        (false, false) => predicted(seq),
    };
    let (t, p) = (batch * seq * if writes { 2 } else { 1 }, batch * predicted);
    let seen = if causal && !writes { seq.div_ceil(2) } else { seq };
    let encoder = |config: &ModelConfig| 2.0 * t as f64 * config.multiply_adds(seen);
    let transform = if causal || writes { 0 } else { h * h };
    match config.generator(None, None) {
        Err(_) => 3.0 * (encoder(config) + 2.0 * (p * (transform + h * v)) as f64),
        Ok(generator) => {
            let width = config.to_json().ok().and_then(|json| json.get("embedding_size")?.as_u64());
            let (of, e) = (generator.sizes().hidden_size, width.map_or(h, |width| width as usize));
            let projected = |h: usize| if h == e { 0 } else { t * e * h };
            let others = projected(h) + projected(of) + p * (of * e + e * v) + t * h * h;
            3.0 * (encoder(config) + encoder(&generator) + 2.0 * others as f64)
        }
    }
}

/// The most memory that this process has had, from the kernel's count.
pub(super) fn peak_mib() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or("0 kB");
    line.trim().trim_end_matches(" kB").parse::<f64>().unwrap_or(0.0) / 1024.0
}

pub(crate) fn round(x: f64, digits: i32) -> f64 {
    let factor = 10f64.powi(digits);
    (x * factor).round() / factor
}

/// The result of a benchmark of one product.
#[derive(Serialize)]
struct Product {
    form: &'static str,
    m: usize,
    n: usize,
    k: usize,
    dtype: String,
    ms: f64,
    tflops: f64,
    share_of_peak: f64,
}

fn gemm(flags: &BenchGemm) -> anyhow::Result<()> {
    let device = flags.compute.device()?;
    let config = config_of(&flags.model)?;
    let dtype = flags.compute.dtype();
    let peak = device.peak(dtype)?;
    let sizes = config.sizes();
    let (h, i) = (sizes.hidden_size, sizes.intermediate_size);
    let shapes = [(3 * h, h), (h, h), (i, h), (h, i)];
    if !flags.json {
        output::line(&format!("matmuls of {} with {} tokens, {dtype} on {device}", flags.model, flags.tokens))?;
        output::line(&format!("multiply-adds alone reach {:.1} GFLOP/s here", peak / 1e9))?;
    }
    for (n, k) in shapes {
        for form in [Form::Forward, Form::InputGradient, Form::WeightGradient] {
            let seconds = time_product(&device, dtype, flags.tokens, n, k, form)?;
            let (m, n, k) = form.sizes(flags.tokens, n, k);
            let rate = 2.0 * (m * n * k) as f64 / seconds;
            if flags.json {
                output::json(&Product {
                    form: form.name(),
                    m,
                    n,
                    k,
                    dtype: flags.compute.dtype.to_string(),
                    ms: round(seconds * 1e3, 4),
                    tflops: round(rate / 1e12, 4),
                    share_of_peak: round(rate / peak, 3),
                })?;
            } else {
                let share = 100.0 * rate / peak;
                let (name, ms, rate) = (form.name(), seconds * 1e3, rate / 1e9);
                output::line(&format!(
                    "  {m:>5} × {n:>5} × {k:>5}  {name:<15} {ms:>9.3} ms {rate:>8.1} GFLOP/s {share:>4.0}%"
                ))?;
            }
        }
    }
    Ok(())
}

/// The three products of a linear layer.
#[derive(Clone, Copy)]
enum Form {
    Forward,
    InputGradient,
    WeightGradient,
}

impl Form {
    fn name(self) -> &'static str {
        match self {
            Form::Forward => "forward",
            Form::InputGradient => "input gradient",
            Form::WeightGradient => "weight gradient",
        }
    }

    /// m, n, k of the product, for a layer with `n` outputs and `k` inputs.
    fn sizes(self, tokens: usize, n: usize, k: usize) -> (usize, usize, usize) {
        match self {
            Form::Forward => (tokens, n, k),
            Form::InputGradient => (tokens, k, n),
            Form::WeightGradient => (n, k, tokens),
        }
    }
}

fn time_product(device: &Device, dtype: DType, tokens: usize, n: usize, k: usize, form: Form) -> anyhow::Result<f64> {
    let mut times = Vec::new();
    let mut product = henson_tensor::bench::Product::new(device, dtype, tokens, n, k)?;
    for round in 0..12 {
        let start = Instant::now();
        match form {
            Form::Forward => product.forward()?,
            Form::InputGradient => product.input_gradient()?,
            Form::WeightGradient => product.weight_gradient()?,
        }
        if round >= 3 {
            times.push(start.elapsed().as_secs_f64());
        }
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}
