//! Times of attention's forms and of gated layers on the CPU, side by side in one run: machines are noisy, so only ratios count.
//!
//! `cargo run --release -p henson-kernels --example cpu_bench [THREADS]`
#![allow(clippy::print_stdout, reason = "a tool for the terminal")]

use std::time::Instant;

use henson_kernels::bf16;
use henson_kernels::cpu::activation::Activation;
use henson_kernels::cpu::attention::{
    Attention, Bias, Buckets, Gradients, Inputs, View, ViewMut, Window, backward, forward,
};
use henson_kernels::cpu::dropout::Dropout;
use henson_kernels::cpu::gemm::{Finish, Matrix, Right, product};
use henson_kernels::cpu::{Cpu, Element, Isa};
use henson_kernels::philox::Stream;

const HEADS: usize = 12;
const HEAD_SIZE: usize = 64;
const HIDDEN: usize = HEADS * HEAD_SIZE;

fn numbers<E: Element>(n: usize) -> Vec<E> {
    let mut stream = Stream::new(1, 0, 0);
    let some: Vec<E> = (0..4096).map(|_| E::from_f32(stream.normal() * 0.5)).collect();
    (0..n).map(|i| some[i % 4093]).collect()
}

/// What is timed, by its name.
type Run<'a> = (String, Box<dyn FnMut() + 'a>);

/// The shortest of some runs of each, in turns.
fn times(runs: &mut [Run<'_>]) -> Vec<f64> {
    let mut best = vec![f64::INFINITY; runs.len()];
    for _ in 0..15 {
        for (best, (_, run)) in best.iter_mut().zip(runs.iter_mut()) {
            let start = Instant::now();
            run();
            *best = best.min(start.elapsed().as_secs_f64());
        }
    }
    best
}

/// Prints the times of some runs, and how they compare with the first.
fn compare(what: &str, mut runs: Vec<Run<'_>>) {
    let best = times(&mut runs);
    println!("{what}");
    for ((name, _), time) in runs.iter().zip(&best) {
        println!("  {name:<44}{:>9.3} ms{:>8.3}×", time * 1e3, time / best[0]);
    }
}

/// Forward, or forward and backward, of sequences of `tokens`, `total` of them in all.
fn attention<'a, E: Element>(
    cpu: &'a Cpu,
    attention: Attention,
    (tokens, total): (usize, usize),
    cross: bool,
    train: bool,
) -> Box<dyn FnMut() + 'a> {
    let count = total / tokens;
    let offsets: Vec<u32> = (0..=count as u32).map(|i| i * tokens as u32).collect();
    let sequences: Vec<u32> = (0..count as u32).collect();
    let (qkv, dout) = (numbers::<E>(3 * total * HIDDEN), numbers::<E>(total * HIDDEN));
    let (mut out, mut log_sums) = (numbers::<E>(total * HIDDEN), vec![0.0; total * HEADS]);
    let (mut dqkv, bias) = (numbers::<E>(3 * total * HIDDEN), numbers::<f32>(attention.bias_size()));
    let mut dbias = vec![0.0; if matches!(attention.bias, Bias::Relative(_)) { bias.len() } else { 0 }];
    let p = if train { 0.1 } else { 0.0 };
    Box::new(move || {
        let [query, key, value] = match cross {
            true => {
                let (query, rest) = qkv.split_at(total * HIDDEN);
                let [key, value] = View::split(rest, [HIDDEN, HIDDEN]);
                [View::new(query, HIDDEN), key, value]
            }
            false => View::split(&qkv, [HIDDEN; 3]),
        };
        let (query_offsets, key_offsets) = (&offsets[..], &offsets[..]);
        let inputs = Inputs { query, key, value, query_offsets, key_offsets, bias: &bias };
        let dropout = Dropout::new(p, 1, 1, 1).map(|dropout| (dropout, &sequences[..]));
        forward(cpu, &attention, &inputs, dropout, &mut out, &mut log_sums);
        if train {
            let [query, key, value] = match cross {
                true => {
                    let (query, rest) = dqkv.split_at_mut(total * HIDDEN);
                    let [key, value] = ViewMut::split(rest, [HIDDEN, HIDDEN]);
                    [ViewMut::new(query, HIDDEN), key, value]
                }
                false => ViewMut::split(&mut dqkv, [HIDDEN; 3]),
            };
            let bias = (!dbias.is_empty()).then_some(&mut dbias[..]);
            let gradients = Gradients { query, key, value, bias };
            backward(cpu, &attention, &inputs, dropout, &log_sums, &dout, gradients);
        }
    })
}

/// The first layer of a feed-forward pair, and its backward, with as many multiplications for both kinds: n columns
/// gated, or 3n/2 plain with both layers counted.
fn feed_forward<'a, E: Element>(
    cpu: &'a Cpu,
    rows: usize,
    n: usize,
    gated: bool,
    train: bool,
) -> Box<dyn FnMut() + 'a> {
    let (inner, columns) = if gated { (n, 2 * n) } else { (3 * n / 2, 3 * n / 2) };
    let (x, up, down) = (numbers::<E>(rows * HIDDEN), numbers::<E>(columns * HIDDEN), numbers::<E>(HIDDEN * inner));
    let (mut hidden, mut kept, mut y) =
        (numbers::<E>(rows * inner), numbers::<E>(rows * columns), numbers::<E>(rows * HIDDEN));
    let (mut dz, mut dx) = (numbers::<E>(rows * columns), numbers::<E>(rows * HIDDEN));
    let (mut dup, mut ddown) = (vec![0.0f32; columns * HIDDEN], vec![0.0f32; HIDDEN * inner]);
    Box::new(move || {
        let derivative = train.then_some(&mut kept[..]);
        let finish = Finish { activation: Activation::Gelu, gated, derivative, ..Finish::default() };
        let weight = Right::Plain(Matrix::new(&up, columns, HIDDEN).transposed());
        product(cpu, Matrix::new(&x, rows, HIDDEN), weight, &mut hidden, inner, finish);
        let weight = Right::Plain(Matrix::new(&down, HIDDEN, inner).transposed());
        product(cpu, Matrix::new(&hidden, rows, inner), weight, &mut y, HIDDEN, Finish::default());
        if train {
            let (dy, inside) = (Matrix::new(&y, rows, HIDDEN), Right::Plain(Matrix::new(&hidden, rows, inner)));
            product(cpu, dy.transposed(), inside, &mut ddown, inner, Finish::default());
            let finish = match gated {
                true => Finish { gate_factors: Some(&kept[..]), ..Finish::default() },
                false => Finish { factor: Some(&kept[..]), ..Finish::default() },
            };
            product(cpu, dy, Right::Plain(Matrix::new(&down, HIDDEN, inner)), &mut dz, columns, finish);
            let (dz, x) = (Matrix::new(&dz, rows, columns), Right::Plain(Matrix::new(&x, rows, HIDDEN)));
            product(cpu, dz.transposed(), x, &mut dup, HIDDEN, Finish::default());
            product(cpu, dz, Right::Plain(Matrix::new(&up, columns, HIDDEN)), &mut dx, HIDDEN, Finish::default());
        }
    })
}

fn all<E: Element>(cpu: &Cpu) {
    let plain = Attention::new(HEADS, HEAD_SIZE);
    let buckets = Buckets { count: 32, max_distance: 128, bidirectional: true };
    let relative = Attention { bias: Bias::Relative(buckets), ..plain };
    for train in [false, true] {
        let how = if train { "forward and backward, dropout 0.1" } else { "forward" };
        for tokens in [128, 512] {
            let run = |name: &str, a, cross| (name.to_owned(), attention::<E>(cpu, a, (tokens, 1024), cross, train));
            let causal = Attention { window: Window::CAUSAL, ..plain };
            compare(
                &format!("attention, {tokens} tokens, {how}"),
                vec![
                    run("fused self-attention", plain, false),
                    run("causal", causal, false),
                    run("query apart, key and value side by side", plain, true),
                    run("relative bias", relative, false),
                    run("slopes", Attention { bias: Bias::Slopes, ..plain }, false),
                ],
            );
        }
        let windows = [1024, 2048, 4096, 8192].map(|tokens| {
            let a = Attention { window: Window::local(64), ..plain };
            (format!("{tokens} tokens, window of 64"), attention::<E>(cpu, a, (tokens, tokens), false, train))
        });
        compare(&format!("attention in a window, {how}"), windows.into());
        let pairs = [false, true].map(|gated| {
            let name = if gated { "gated, 1152 columns" } else { "plain, 1728 columns" };
            (name.to_owned(), feed_forward::<E>(cpu, 1024, 1152, gated, train))
        });
        compare(&format!("feed-forward pair, {how}"), pairs.into());
    }
}

fn main() {
    let cpu = match std::env::args().nth(1).and_then(|threads| threads.parse().ok()) {
        Some(threads) => Cpu::new(Isa::best(), threads).unwrap_or_else(|_| Cpu::detect()),
        None => Cpu::detect(),
    };
    println!("{cpu:?}, f32");
    all::<f32>(&cpu);
    println!("{cpu:?}, bf16");
    all::<bf16>(&cpu);
}
