//! What the machine can do at most: a loop of multiply-adds that touches no memory. Benchmarks give their results as a
//! share of it.

use std::time::Instant;

use super::simd::{Element, Simd};
use super::{Cpu, SharedMut};
use crate::memory::Numbers;

/// Multiply-add chains that are under way at a time: enough to hide the latency, few enough for the registers.
const CHAINS: usize = 12;

/// Rounds of one measurement: some milliseconds.
const ROUNDS: usize = 2_000_000;

/// Floating-point operations per second of all threads together, in `E`'s arithmetic: the best of a few tries.
///
/// For bf16 without the dot product this is the f32 rate, since products are then computed in f32.
pub fn operations_per_second<E: Element>(cpu: &Cpu) -> f64 {
    let mut best = 0.0f64;
    // Many tries: other users of the machine disturb most of them.
    for _ in 0..25 {
        let start = Instant::now();
        let counts = std::sync::atomic::AtomicU64::new(0);
        cpu.for_each(cpu.threads(), |_| {
            let rounds = std::hint::black_box(ROUNDS);
            let tiles = cpu.isa().tiles().filter(|_| E::IS_BF16);
            // A product of tiles takes some 16 cycles, a vector's multiply-add half of one.
            let done = tiles.and_then(|tiles| tiles.chains(rounds / 16));
            let done = done.unwrap_or_else(|| chains::<E>(cpu.isa(), rounds));
            counts.fetch_add(done, std::sync::atomic::Ordering::Relaxed);
        });
        best = best.max(counts.into_inner() as f64 / start.elapsed().as_secs_f64());
    }
    best
}

/// Bytes per second that memory gives and takes together when a large buffer is copied by all threads.
pub fn bytes_per_second(cpu: &Cpu) -> f64 {
    const PART: usize = 1 << 20;
    let (from, mut to) = (vec![1u8; 96 * PART], vec![0u8; 96 * PART]);
    let mut best = 0.0f64;
    for _ in 0..4 {
        let start = Instant::now();
        let shared = SharedMut::new(&mut to);
        cpu.for_each(from.len() / PART, |i| {
            // SAFETY: every task has its own part.
            unsafe { shared.slice(i * PART, PART) }.copy_from_slice(&from[i * PART..(i + 1) * PART]);
        });
        best = best.max(2.0 * from.len() as f64 / start.elapsed().as_secs_f64());
    }
    std::hint::black_box(&to);
    best
}

/// Bytes per second that memory gives when all threads add up a large buffer.
pub fn bytes_read_per_second(cpu: &Cpu) -> f64 {
    const PART: usize = 1 << 18;
    let mut from = Numbers::<f32>::zeros(192 * PART);
    from.fill(1.0);
    let mut best = 0.0f64;
    for _ in 0..6 {
        let start = Instant::now();
        cpu.for_each(from.len() / PART, |i| {
            std::hint::black_box(sum(cpu.isa(), &from[i * PART..(i + 1) * PART]));
        });
        best = best.max(size_of_val(&from[..]) as f64 / start.elapsed().as_secs_f64());
    }
    best
}

dispatch! { fn sum(numbers: &[f32]) -> f32 = sum_body }

/// # Safety
/// The instruction set must be there.
#[inline(always)]
unsafe fn sum_body<S: Simd>(numbers: &[f32]) -> f32 {
    // SAFETY: all loads lie within a chunk.
    unsafe {
        let mut sums = [S::splat(0.0); 8];
        for chunk in numbers.chunks_exact(8 * S::LANES) {
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum = S::add(*sum, S::load(chunk.as_ptr().add(i * S::LANES)));
            }
        }
        sums.iter().fold(0.0, |total, sum| total + S::sum(*sum))
    }
}

dispatch! { fn chains<E>(rounds: usize) -> u64 = chains_body }

/// # Safety
/// The instruction set must be there.
#[inline(always)]
unsafe fn chains_body<S: Simd, E: Element>(rounds: usize) -> u64 {
    let pairs = E::IS_BF16 && S::BF16_DOT;
    // SAFETY: registers only.
    let sum = unsafe {
        // Not zero: multiplying zeros draws less power, and the clock would be higher than for real work.
        let x = S::splat(std::hint::black_box(0.73));
        let mut sums = [S::splat(0.0); CHAINS];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = if pairs { S::dot_pairs(*sum, x, x) } else { S::mul_add(x, x, *sum) };
            }
        }
        sums.iter().fold(0.0, |total, sum| total + S::sum(*sum))
    };
    std::hint::black_box(sum);
    (rounds * CHAINS * S::LANES * if pairs { 4 } else { 2 }) as u64
}
