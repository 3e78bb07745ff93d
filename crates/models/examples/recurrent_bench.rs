//! How long a training step of a stack of bidirectional LSTM layers takes: forward and backward, without an update.
//!
//!     cargo run --release -p henson-models --example recurrent_bench -- 512 2 12 34 7 …
//!
//! The arguments are the units of a direction, the number of layers, and the lengths of the sequences. It prints the least of several
//! times in milliseconds, and where the time of one step went.
#![allow(clippy::print_stdout, reason = "a tool for the terminal")]

use std::time::Instant;

use henson_models::recurrent::{RecurrentSettings, RecurrentStack};
use henson_tensor::{Builder, Cell, DType, Device, Directions, Layout, Pass, Tape, Tensor, TensorError, Training};

fn main() -> Result<(), TensorError> {
    let numbers: Vec<usize> = std::env::args().skip(1).filter_map(|argument| argument.parse().ok()).collect();
    let [hidden, layers, lengths @ ..] = &numbers[..] else {
        println!("usage: recurrent_bench UNITS LAYERS LENGTH...");
        return Ok(());
    };
    let Ok(device) = Device::cpu(None, Some(2)) else { return Ok(()) };
    let settings = RecurrentSettings {
        directions: Directions::Both,
        ..RecurrentSettings::new(Cell::Lstm, *hidden, *hidden, *layers)
    };
    let mut builder = Builder::new();
    let stack = RecurrentStack::build(&mut builder, settings);
    let mut parameters = builder.finish(&device, DType::F32)?;
    parameters.initialise(1)?;
    let (mut gradients, mut tape) = (parameters.gradients()?, Tape::new());
    let layout = Layout::new(&device, lengths, 0)?;
    let tokens: usize = lengths.iter().sum();
    let wave = |n: usize| -> Vec<f32> { (0..n).map(|i| (0.37 * i as f32).sin()).collect() };
    let x = Tensor::from_slice(&device, [tokens, *hidden], &wave(tokens * hidden))?;
    let weights = wave(tokens * 2 * hidden);
    let mut least = f64::INFINITY;
    for step in 0..20 {
        if step == 19 {
            device.start_profile();
        }
        let start = Instant::now();
        gradients.zero();
        let mut pass = Pass::training(&mut tape, &parameters, Training { seed: 1, step });
        let input = pass.input(&x)?;
        let y = stack.forward(&mut pass, input, &layout)?;
        pass.seed_gradient(&y, &weights)?;
        pass.backward(&mut gradients)?;
        least = least.min(start.elapsed().as_secs_f64());
    }
    println!("{:.1} ms a step of {tokens} tokens", 1e3 * least);
    for (kind, spent) in device.stop_profile() {
        println!(
            "{:24} {:8.2} ms  {:6.1} GFLOP/s",
            kind.name(),
            1e3 * spent.seconds,
            spent.flops / spent.seconds / 1e9
        );
    }
    Ok(())
}
