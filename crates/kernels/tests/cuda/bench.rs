//! How fast each kernel is on BERT-base's shapes, against the time in which the memory could move what it must move, or the
//! matrix units could multiply what it must multiply. Both are measured here first.
//!
//! Legend: T tokens, H hidden, I inner, V vocabulary (padded), P predicted rows. bf16 unless a line says otherwise.

use std::path::Path;

use henson_kernels::cpu::activation::Activation;
use henson_kernels::cpu::adafactor::Plan as Factored;
use henson_kernels::cpu::dropout::RowId;
use henson_kernels::cpu::optimizer::Segment;
use henson_kernels::cuda::loss::Total;
use henson_kernels::cuda::matmul::{Finish, Matrix, product};
use henson_kernels::cuda::optimizer::{Control, FACTORS, Plan, Rule};
use henson_kernels::cuda::reduce::Sum;
use henson_kernels::cuda::rows::Sorted;
use henson_kernels::cuda::{Buffer, DType, Dropout, Gpu, Result, Scalar, Step};
use henson_kernels::cuda::{activation, adafactor, cast, embedding, layer_norm, loss, optimizer, reduce, rows};

use crate::check::{filled, indices};

const T: usize = 32768;
const S: usize = 128;
const H: usize = 768;
const I: usize = 3072;
const V: usize = 30528;
const P: usize = 4915;
/// BERT-base's parameters, nearly.
const PARAMETERS: usize = 110_000_000;

/// What a line counts.
enum Work {
    /// Bytes that must be read and written.
    Bytes(usize),
    /// Multiply-adds, times two.
    Operations(usize),
}

struct Bench<'a> {
    gpu: &'a Gpu,
    only: Option<&'a str>,
    /// Bytes per second of a copy, and operations per second of a large product; measured first.
    bandwidth: f64,
    rate: f64,
}

impl Bench<'_> {
    /// Seconds of one run: the median of seven rounds, each a graph of some runs.
    fn time(&self, run: &dyn Fn() -> Result<()>) -> Result<f64> {
        // Compiles, searches and allocates.
        run()?;
        let (start, end) = (self.gpu.event()?, self.gpu.event()?);
        self.gpu.record(&start)?;
        run()?;
        self.gpu.record(&end)?;
        let once = end.seconds_since(&start)?;
        let runs = ((2e-3 / once.max(1e-6)) as usize).clamp(1, 50);
        let graph = self.gpu.capture(|| (0..runs).try_for_each(|_| run()))?;
        self.gpu.play(&graph)?;
        let mut times = Vec::new();
        for _ in 0..7 {
            self.gpu.record(&start)?;
            self.gpu.play(&graph)?;
            self.gpu.record(&end)?;
            times.push(end.seconds_since(&start)? / runs as f64);
        }
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    }

    fn line(&mut self, name: &str, work: Work, run: &dyn Fn() -> Result<()>) -> Result<f64> {
        if self.only.is_some_and(|only| !name.contains(only)) {
            return Ok(0.0);
        }
        let seconds = self.time(run)?;
        let us = seconds * 1e6;
        let text = match work {
            Work::Bytes(bytes) => {
                let floor = bytes as f64 / self.bandwidth;
                let gbs = bytes as f64 / seconds * 1e-9;
                format!(
                    "{name:<52} {us:>9.1} us {gbs:>8.0} GB/s     floor {:>8.1} us, {:>5.1}%",
                    floor * 1e6,
                    100.0 * floor / seconds
                )
            }
            Work::Operations(operations) => {
                let floor = operations as f64 / self.rate;
                let tera = operations as f64 / seconds * 1e-12;
                format!(
                    "{name:<52} {us:>9.1} us {tera:>8.0} TFLOP/s  floor {:>8.1} us, {:>5.1}%",
                    floor * 1e6,
                    100.0 * floor / seconds
                )
            }
        };
        println!("{text}");
        Ok(seconds)
    }
}

pub(crate) fn run(gpu: &Gpu, only: Option<&str>, choices: Option<&Path>) -> Result<()> {
    if let Some(text) = choices.and_then(|path| std::fs::read_to_string(path).ok()) {
        let taken = gpu.blas()?.load_choices(gpu, &text)?;
        println!("choices of matrix products: {}", if taken { "taken" } else { "of another library or GPU, ignored" });
    }
    let mut bench = Bench { gpu, only, bandwidth: 0.0, rate: 0.0 };
    ceilings(&mut bench)?;
    normalisations(&mut bench)?;
    elements(&mut bench)?;
    losses(&mut bench)?;
    tables(&mut bench)?;
    optimizers(&mut bench)?;
    products(&mut bench)?;
    println!("memory held: {} MiB", gpu.pool().held() >> 20);
    if let Some(path) = choices {
        // A file that cannot be written costs the next run some seconds.
        let _ = std::fs::write(path, gpu.blas()?.choices(gpu));
    }
    Ok(())
}

fn bf16(gpu: &Gpu, seed: u64, len: usize) -> Result<Buffer> {
    filled(gpu, seed, len, DType::Bf16, 1.0)
}

fn f32s(gpu: &Gpu, seed: u64, len: usize) -> Result<Buffer> {
    filled(gpu, seed, len, DType::F32, 1.0)
}

fn ceilings(bench: &mut Bench<'_>) -> Result<()> {
    let gpu = bench.gpu;
    let n = 1 << 29;
    let (from, to) = (f32s(gpu, 1, n)?, gpu.empty(n, DType::F32)?);
    // The driver's own copy is slower in a graph than a kernel is.
    let driver = bench.time(&|| gpu.copy(from.view(), to.view()))?;
    let seconds = bench.time(&|| activation::forward(gpu, Activation::None, from.view(), None, to.view()))?;
    bench.bandwidth = (2 * 4 * n) as f64 / seconds;
    println!("copy by the driver in a graph: {:.0} GB/s", (2 * 4 * n) as f64 / driver * 1e-9);
    drop((from, to));
    gpu.pool().trim();
    let m = 8192;
    let (a, b, out) = (bf16(gpu, 1, m * m)?, bf16(gpu, 2, m * m)?, gpu.empty(m * m, DType::Bf16)?);
    let (ma, mb) = (Matrix::new(a.view(), m, m), Matrix::new(b.view(), m, m).transposed());
    let seconds = bench.time(&|| product(gpu, ma, mb, Matrix::new(out.view(), m, m), Finish::default()))?;
    bench.rate = (2 * m * m * m) as f64 / seconds;
    println!("copy {:.0} GB/s, 8192³ bf16 {:.0} TFLOP/s", bench.bandwidth * 1e-9, bench.rate * 1e-12);
    Ok(())
}

fn places(gpu: &Gpu) -> Result<Buffer> {
    let rows: Vec<RowId> = (0..T).map(|t| RowId { sequence: (t / S) as u32, position: (t % S) as u32 }).collect();
    gpu.upload::<u32>(bytemuck::cast_slice(&rows))
}

fn normalisations(bench: &mut Bench<'_>) -> Result<()> {
    let gpu = bench.gpu;
    let (x, residual, y) = (bf16(gpu, 1, T * H)?, bf16(gpu, 2, T * H)?, gpu.empty(T * H, DType::Bf16)?);
    let (dsum, dx) = (gpu.empty(T * H, DType::Bf16)?, gpu.empty(T * H, DType::Bf16)?);
    let statistics = gpu.empty(2 * T, DType::F32)?;
    let (gamma, beta) = (f32s(gpu, 3, H)?, f32s(gpu, 4, H)?);
    let sums = [f32s(gpu, 5, H)?, f32s(gpu, 6, H)?, f32s(gpu, 7, H)?];
    let places = places(gpu)?;
    let step = gpu.upload(&[1u32])?;
    let dropout = Dropout::new(0.1, 1, Step::At(step.view()), 1);
    let before = layer_norm::Drops { before: dropout, after: None, rows: Some(places.view()) };
    let none = layer_norm::Drops::default();
    let matrix = 2 * T * H;
    let norm = layer_norm::Norm { gamma: gamma.view(), beta: Some(beta.view()), epsilon: 1e-12, centred: true };
    let st = statistics.view();
    for (name, drops) in [("dropout + residual + LayerNorm", before), ("residual + LayerNorm", none)] {
        bench.line(&format!("{name}, forward"), Work::Bytes(4 * matrix), &|| {
            layer_norm::forward(gpu, x.view(), None, Some(residual.view()), norm, drops, y.view(), Some(st))
        })?;
    }
    bench.line("bias + dropout + residual + LayerNorm, forward", Work::Bytes(4 * matrix), &|| {
        let bias = Some(sums[0].view());
        layer_norm::forward(gpu, x.view(), bias, Some(residual.view()), norm, before, y.view(), Some(st))
    })?;
    layer_norm::forward(gpu, x.view(), None, None, norm, none, y.view(), Some(st))?;
    for with_bias in [false, true] {
        let name = if with_bias { ", with the bias' gradient" } else { "" };
        bench.line(&format!("dropout + residual + LayerNorm, backward{name}"), Work::Bytes(4 * matrix), &|| {
            let bias = with_bias.then(|| Sum::add(sums[2].view()));
            let (dgamma, dbeta) = (Sum::add(sums[0].view()), Sum::add(sums[1].view()));
            let wanted = Some(dx.view());
            layer_norm::backward(
                gpu,
                y.view(),
                None,
                x.view(),
                st,
                norm,
                before,
                dsum.view(),
                wanted,
                dgamma,
                Some(dbeta),
                bias,
            )
        })?;
    }
    bench.line("residual + LayerNorm, backward", Work::Bytes(3 * matrix), &|| {
        let (dgamma, dbeta) = (Sum::add(sums[0].view()), Sum::add(sums[1].view()));
        layer_norm::backward(
            gpu,
            y.view(),
            None,
            x.view(),
            st,
            norm,
            none,
            dsum.view(),
            None,
            dgamma,
            Some(dbeta),
            None,
        )
    })?;
    let wide = 4 * T * H;
    let (x32, r32, y32) = (f32s(gpu, 1, T * H)?, f32s(gpu, 2, T * H)?, gpu.empty(T * H, DType::F32)?);
    bench.line("dropout + residual + LayerNorm, forward, f32", Work::Bytes(4 * wide), &|| {
        layer_norm::forward(gpu, x32.view(), None, Some(r32.view()), norm, before, y32.view(), Some(st))
    })?;
    let (d32, dx32) = (gpu.empty(T * H, DType::F32)?, gpu.empty(T * H, DType::F32)?);
    bench.line("dropout + residual + LayerNorm, backward, f32", Work::Bytes(4 * wide), &|| {
        let (dgamma, dbeta, wanted) = (Sum::add(sums[0].view()), Sum::add(sums[1].view()), Some(dx32.view()));
        layer_norm::backward(
            gpu,
            y32.view(),
            None,
            x32.view(),
            st,
            norm,
            before,
            d32.view(),
            wanted,
            dgamma,
            Some(dbeta),
            None,
        )
    })?;
    Ok(())
}

fn elements(bench: &mut Bench<'_>) -> Result<()> {
    let gpu = bench.gpu;
    let (x, y, dy) = (bf16(gpu, 1, T * I)?, gpu.empty(T * I, DType::Bf16)?, bf16(gpu, 2, T * I)?);
    let (bias, sums) = (filled(gpu, 3, I, DType::Bf16, 1.0)?, f32s(gpu, 4, I)?);
    let matrix = 2 * T * I;
    bench.line("GELU (erf), forward", Work::Bytes(2 * matrix), &|| {
        activation::forward(gpu, Activation::Gelu, x.view(), None, y.view())
    })?;
    bench.line("bias + GELU (erf), forward", Work::Bytes(2 * matrix), &|| {
        activation::forward(gpu, Activation::Gelu, x.view(), Some(bias.view()), y.view())
    })?;
    bench.line("GELU (erf), backward", Work::Bytes(3 * matrix), &|| {
        activation::backward(gpu, Activation::Gelu, x.view(), None, dy.view(), y.view(), None)
    })?;
    bench.line("bias + GELU (erf), backward with bias' gradient", Work::Bytes(3 * matrix), &|| {
        let (bias, sums) = (Some(bias.view()), Some(Sum::add(sums.view())));
        activation::backward(gpu, Activation::Gelu, x.view(), bias, dy.view(), y.view(), sums)
    })?;
    bench.line("column sums, T×I", Work::Bytes(matrix), &|| {
        reduce::column_sums(gpu, x.view(), Sum::add(sums.view()))
    })?;
    bench.line("add, T×I", Work::Bytes(3 * matrix), &|| rows::add(gpu, x.view(), y.view()))?;
    bench.line("zero, T×I", Work::Bytes(matrix), &|| gpu.fill_zero(y.view()))?;
    let places = places(gpu)?;
    let Some(dropout) = Dropout::new(0.1, 1, Step::Value(1), 1) else { return Ok(()) };
    bench.line("dropout, T×H", Work::Bytes(4 * T * H), &|| {
        rows::drop(gpu, x.view().part(0, T * H), H, dropout, places.view())
    })?;
    let picked: Vec<u32> = (0..P as u32).map(|i| i * 6 + 1).collect();
    let (picked, few) = (gpu.upload(&picked)?, gpu.empty(P * H, DType::Bf16)?);
    bench.line("gather, P of T rows", Work::Bytes(4 * P * H), &|| {
        rows::gather(gpu, x.view().part(0, T * H), H, picked.view(), few.view())
    })?;
    bench.line("scatter with zeros, P of T rows", Work::Bytes(4 * P * H + 2 * T * H), &|| {
        rows::scatter_distinct(gpu, few.view(), H, picked.view(), y.view().part(0, T * H), true)
    })?;
    let wide = gpu.empty(T * I, DType::F32)?;
    bench.line("cast to f32, T×I", Work::Bytes(3 * matrix), &|| cast::to_f32(gpu, x.view(), wide.view()))?;
    bench.line("cast to bf16, T×I", Work::Bytes(3 * matrix), &|| cast::to_bf16(gpu, wide.view(), x.view()))?;
    Ok(())
}

fn losses(bench: &mut Bench<'_>) -> Result<()> {
    let gpu = bench.gpu;
    let classes = V - 6;
    let targets = gpu.upload(&indices(1, P, classes))?;
    let (losses, total) = (gpu.empty(P, DType::F32)?, gpu.upload(&[0.0f32])?);
    let to = Total { loss: total.view(), add: false };
    for (dtype, size) in [(DType::Bf16, 2), (DType::F32, 4)] {
        let logits = filled(gpu, 1, P * V, dtype, 1.0)?;
        let (x, t, l) = (logits.view(), targets.view(), losses.view());
        for (want, times) in [(true, 2), (false, 1)] {
            let name = format!("cross-entropy, P×V {dtype:?}{}", if want { " with gradient" } else { "" });
            bench.line(&name, Work::Bytes(times * size * P * V), &|| {
                loss::cross_entropy(gpu, x, V, classes, t, None, 0.0, Scalar::Value(1e-4), want, l, to)
            })?;
        }
        let count = gpu.upload(&[0u32])?;
        bench.line(&format!("hits, P×V {dtype:?}"), Work::Bytes(size * P * V), &|| {
            loss::hits(gpu, x, V, classes, t, None, None, Some(count.view()))
        })?;
    }
    gpu.pool().trim();
    Ok(())
}

/// Ids as frequent as in text: Zipf's law over the vocabulary, an eighth of all masked.
fn word_ids() -> Vec<u32> {
    let uniform = indices(5, T, 1 << 24);
    let zipf = |u: u32| {
        let x = f64::from(u) / f64::from(1u32 << 24);
        ((V as f64 - 1000.0).powf(x) as u32 + 999).min(V as u32 - 7)
    };
    uniform.iter().enumerate().map(|(i, u)| if i % 8 == 3 { 103 } else { zipf(*u) }).collect()
}

fn tables(bench: &mut Bench<'_>) -> Result<()> {
    let gpu = bench.gpu;
    let ids = [word_ids(), (0..T).map(|t| (t % S) as u32).collect(), (0..T).map(|t| (t % S >= S / 2) as u32).collect()];
    let rows_of = [V, 512, 2];
    let gids = ids.iter().map(|ids| gpu.upload(ids)).collect::<Result<Vec<_>>>()?;
    let values = rows_of.iter().map(|n| bf16(gpu, 1, n * H)).collect::<Result<Vec<_>>>()?;
    let lookups: Vec<embedding::Lookup<'_>> =
        gids.iter().zip(&values).map(|(i, v)| embedding::Lookup { ids: i.view(), table: v.view() }).collect();
    let (sum, y) = (gpu.empty(T * H, DType::Bf16)?, gpu.empty(T * H, DType::Bf16)?);
    let statistics = gpu.empty(2 * T, DType::F32)?;
    let (gamma, beta, places) = (f32s(gpu, 3, H)?, f32s(gpu, 4, H)?, places(gpu)?);
    let dropout = Dropout::new(0.1, 1, Step::Value(1), 1).map(|d| (d, places.view()));
    // Two matrices out; what is read of the tables is small or in the cache.
    bench.line("embeddings + LayerNorm + dropout, forward", Work::Bytes(2 * 2 * T * H), &|| {
        let norm = layer_norm::Norm { gamma: gamma.view(), beta: Some(beta.view()), epsilon: 1e-12, centred: true };
        embedding::forward_layer_norm(gpu, &lookups, norm, dropout, sum.view(), y.view(), Some(statistics.view()))
    })?;
    for (i, name) in ["word", "position", "segment"].into_iter().enumerate() {
        let (keys, order) = (gpu.empty(T, DType::U32)?, gpu.empty(T, DType::U32)?);
        let sorted = Sorted { keys: keys.view(), order: order.view() };
        let mut distinct = ids[i].clone();
        distinct.sort_unstable();
        distinct.dedup();
        bench.line(&format!("sort of {name} ids"), Work::Bytes(3 * 4 * T), &|| {
            rows::sort(gpu, gids[i].view(), rows_of[i], sorted)
        })?;
        let dtable = gpu.zeros(rows_of[i] * H, DType::F32)?;
        rows::sort(gpu, gids[i].view(), rows_of[i], sorted)?;
        let bytes = 2 * T * H + 2 * 4 * distinct.len() * H;
        bench.line(&format!("gradient of the {name} table, {} rows", distinct.len()), Work::Bytes(bytes), &|| {
            rows::scatter_add(gpu, sum.view(), H, sorted, dtable.view(), false)
        })?;
    }
    Ok(())
}

fn optimizers(bench: &mut Bench<'_>) -> Result<()> {
    let gpu = bench.gpu;
    let n = PARAMETERS;
    let (p, g) = (filled(gpu, 1, n, DType::F32, 0.02)?, filled(gpu, 2, n, DType::F32, 1e-3)?);
    let (m, v, copy) = (gpu.zeros(n, DType::F32)?, gpu.zeros(n, DType::F32)?, gpu.empty(n, DType::Bf16)?);
    // 200 tensors, a few of them large.
    let lengths = [vec![V * H], vec![H; 100], vec![H * H; 48], vec![H * I; 24]].concat();
    let (mut segments, mut matrices) = (Vec::new(), Vec::new());
    let mut start = 0;
    for len in lengths {
        let segment = Segment { start, len, decay: len > H, rate: 1.0 };
        segments.push(segment);
        matrices.push((segment, (len > H).then_some([len / H, H])));
        start += len;
    }
    let all = start;
    let rule = Rule { beta1: 0.9, beta2: 0.999, epsilon: 1e-6, weight_decay: 0.01 };
    let plan = Plan::new(gpu, rule, &segments, n)?;
    let control = Control { learning_rate: 1e-4, bias_correction: Some(10), clip: Some(1.0), gradient_scale: 1.0 };
    let control = gpu.upload(&control.numbers())?;
    let (squares, factors) = (gpu.empty(1, DType::F64)?, gpu.empty(FACTORS, DType::F32)?);
    bench.line("gradient norm, 110M", Work::Bytes(4 * n), &|| reduce::sum_of_squares(gpu, g.view(), squares.view()))?;
    reduce::sum_of_squares(gpu, g.view(), squares.view())?;
    optimizer::prepare(gpu, &rule, control.view(), Some(squares.view()), factors.view())?;
    let copy = Some(copy.view());
    bench.line(&format!("AdamW with bf16 copy, {:.0}M", all as f64 * 1e-6), Work::Bytes(30 * all), &|| {
        optimizer::adamw(gpu, &plan, p.view(), g.view(), m.view(), v.view(), factors.view(), copy)
    })?;
    let name = format!("StableAdamW with bf16 copy, {:.0}M", all as f64 * 1e-6);
    bench.line(&name, Work::Bytes((20 + 18) * all), &|| {
        optimizer::stable_adamw(gpu, &plan, p.view(), g.view(), m.view(), v.view(), factors.view(), copy)
    })?;
    bench.line(&format!("LAMB with bf16 copy, {:.0}M", all as f64 * 1e-6), Work::Bytes((24 + 18) * all), &|| {
        optimizer::lamb(gpu, &plan, p.view(), g.view(), m.view(), v.view(), factors.view(), copy)
    })?;
    let factored = Factored::new(Default::default(), &matrices, n);
    let (state, plan) = (gpu.zeros(factored.state_len(), DType::F32)?, adafactor::Plan::new(gpu, &factored)?);
    let numbers = (control.view(), factors.view());
    // Its norm of the gradients is counted in.
    bench.line(
        &format!("Adafactor with bf16 copy and norm, {:.0}M", all as f64 * 1e-6),
        Work::Bytes(26 * all),
        &|| adafactor::adafactor(gpu, &plan, p.view(), g.view(), state.view(), 0.0, numbers, copy),
    )?;
    bench.line("cast of parameters to bf16, 110M", Work::Bytes(6 * n), &|| match copy {
        Some(copy) => cast::to_bf16(gpu, p.view(), copy),
        None => Ok(()),
    })?;
    Ok(())
}

fn products(bench: &mut Bench<'_>) -> Result<()> {
    let layers =
        [("QKV", T, 3 * H, H), ("attention output", T, H, H), ("up", T, I, H), ("down", T, H, I), ("decoder", P, V, H)];
    let mut totals = [0.0; 2];
    for (name, t, n, k) in layers {
        let (forward, backward) = layer(bench, name, t, n, k)?;
        // Twelve layers and one decoder.
        let times = if name == "decoder" { 1.0 } else { 12.0 };
        totals[0] += times * forward;
        totals[1] += times * backward;
        bench.gpu.pool().trim();
    }
    println!("products of a step: forward {:.2} ms, backward {:.2} ms", totals[0] * 1e3, totals[1] * 1e3);
    let gpu = bench.gpu;
    let m = 4096;
    let (a, b, out) = (f32s(gpu, 1, m * m)?, f32s(gpu, 2, m * m)?, gpu.empty(m * m, DType::F32)?);
    for tf32 in [false, true] {
        let finish = Finish { tf32, ..Finish::default() };
        let (ma, mb) = (Matrix::new(a.view(), m, m), Matrix::new(b.view(), m, m).transposed());
        bench.line(&format!("4096³, f32, TF32 {tf32}"), Work::Operations(2 * m * m * m), &|| {
            product(gpu, ma, mb, Matrix::new(out.view(), m, m), finish)
        })?;
    }
    Ok(())
}

/// Forward with bias, both gradients; returns the best forward's and backward's seconds.
fn layer(bench: &mut Bench<'_>, name: &str, t: usize, n: usize, k: usize) -> Result<(f64, f64)> {
    let gpu = bench.gpu;
    let (x, dy) = (bf16(gpu, 1, t * k)?, bf16(gpu, 2, t * n)?);
    let (weight, bias) = (filled(gpu, 3, n * k, DType::Bf16, 0.02)?, bf16(gpu, 4, n)?);
    let (y, dx) = (gpu.empty(t * n, DType::Bf16)?, gpu.empty(t * k, DType::Bf16)?);
    let (dweight, dbias) = (gpu.zeros(n * k, DType::F32)?, gpu.zeros(n, DType::F32)?);
    let work = || Work::Operations(2 * t * n * k);
    let (mx, mdy, mw) = (Matrix::new(x.view(), t, k), Matrix::new(dy.view(), t, n), Matrix::new(weight.view(), n, k));
    let (my, mdx, mdw) = (Matrix::new(y.view(), t, n), Matrix::new(dx.view(), t, k), Matrix::new(dweight.view(), n, k));

    let plain = bench.line(&format!("{name} {t}×{n}×{k}, forward"), work(), &|| {
        product(gpu, mx, mw.transposed(), my, Finish::default())
    })?;
    let biased = bench.line(&format!("{name}, forward with bias"), work(), &|| {
        product(gpu, mx, mw.transposed(), my, Finish { bias: Some(bias.view()), ..Finish::default() })
    })?;
    if name == "up" {
        let kept = gpu.empty(t * n, DType::Bf16)?;
        bench.line("up, forward with bias and GELU (tanh)", work(), &|| {
            let finish = Finish { bias: Some(bias.view()), gelu_tanh: Some(kept.view()), ..Finish::default() };
            product(gpu, mx, mw.transposed(), my, finish)
        })?;
    }
    let input =
        bench.line(&format!("{name}, input gradient"), work(), &|| product(gpu, mdy, mw, mdx, Finish::default()))?;
    bench.line(&format!("{name}, input gradient, accumulated"), work(), &|| {
        product(gpu, mdy, mw, mdx, Finish { accumulate: true, ..Finish::default() })
    })?;
    if name == "down" {
        let kept = bf16(gpu, 5, t * k)?;
        bench.line("down, input gradient with GELU's (tanh)", work(), &|| {
            product(gpu, mdy, mw, mdx, Finish { gelu_tanh_gradient: Some(kept.view()), ..Finish::default() })
        })?;
    }
    let weight = bench.line(&format!("{name}, weight gradient f32"), work(), &|| {
        product(gpu, mdy.transposed(), mx, mdw, Finish::default())
    })?;
    bench.line(&format!("{name}, weight gradient f32, accumulated"), work(), &|| {
        product(gpu, mdy.transposed(), mx, mdw, Finish { accumulate: true, ..Finish::default() })
    })?;
    bench.line(&format!("{name}, weight gradient f32 with bias' gradient"), work(), &|| {
        let finish = Finish { row_sums: Some((dbias.view(), false)), ..Finish::default() };
        product(gpu, mdy.transposed(), mx, mdw, finish)
    })?;
    let short = gpu.empty(n * k, DType::Bf16)?;
    bench.line(&format!("{name}, weight gradient bf16"), work(), &|| {
        product(gpu, mdy.transposed(), mx, Matrix::new(short.view(), n, k), Finish::default())
    })?;
    // The biases of the others are added by the kernels that follow.
    Ok((if name == "QKV" || name == "decoder" { biased } else { plain }, input + weight))
}
