//! Attention: against the CPU's reference in f64, the masks bit by bit, and its time.

use half::bf16;
use henson_kernels::cpu::attention::reference;
use henson_kernels::cpu::dropout::{Dropout as CpuDropout, RowId};
use henson_kernels::cuda::attention::{self as kernels, Attention, Room};
use henson_kernels::cuda::{Buffer, DType, Dropout, Gpu, Result, Step};
use henson_kernels::philox::Stream;

use crate::check::{Checks, Number, bits, exact, filled, numbers};

const SEED: u64 = 0x0123_4567_89ab_cdef;
const STEP: u32 = 77;
const SITE: u32 = 5;

/// Where each sequence begins, and their numbers in a global batch.
struct Sequences {
    offsets: Vec<u32>,
    numbers: Vec<u32>,
}

impl Sequences {
    fn new(lengths: &[usize]) -> Self {
        let mut offsets = vec![0];
        lengths.iter().for_each(|n| offsets.push(offsets[offsets.len() - 1] + *n as u32));
        Self { offsets, numbers: (0..lengths.len() as u32).map(|i| 7 + 3 * i).collect() }
    }

    fn tokens(&self) -> usize {
        self.offsets.last().map_or(0, |end| *end as usize)
    }

    fn table(&self, gpu: &Gpu, room: Room) -> Result<Buffer> {
        let mut table = vec![u32::MAX; room.numbers()];
        kernels::write_table(&self.offsets, &self.numbers, room, &mut table);
        gpu.upload(&table)
    }
}

/// The same dropout on both sides.
fn both<'a>(p: f32, step: Step<'a>) -> (Option<CpuDropout>, Option<Dropout<'a>>) {
    (CpuDropout::new(p, SEED, STEP, SITE), Dropout::new(p, SEED, step, SITE))
}

pub(crate) fn attention(checks: &mut Checks<'_>) -> Result<()> {
    let all = [64, 1, 300, 2, 128, 7, 16, 129, 17, 31, 32, 63, 65, 512, 33, 127, 96, 5];
    let some = [65, 3, 128, 32, 200, 1];
    let mixed = if checks.small { &some[..] } else { &all };
    for causal in [false, true] {
        for p in [0.0, 0.1] {
            for (heads, d, lengths) in [
                (4, 64, mixed),
                (3, 64, &some),
                (2, 64, &some),
                (4, 32, mixed),
                (2, 96, mixed),
                (4, 128, mixed),
                (1, 128, &some),
                (3, 26, &some),
                (1, 256, &some),
            ] {
                case::<bf16>(checks, lengths, heads, d, causal, p)?;
            }
        }
    }
    if !checks.small {
        case::<bf16>(checks, &[1100, 513, 640], 2, 64, false, 0.1)?;
        case::<bf16>(checks, &[1024, 700], 1, 128, true, 0.1)?;
        // Of the longest, the backward is another.
        case::<bf16>(checks, &[300, 2100, 64], 1, 64, false, 0.1)?;
    }
    for d in [32, 64, 96, 128, 40] {
        masks::<bf16>(checks, &[7, 64, 129, 20, 300, 33], d)?;
    }
    Ok(())
}

/// In f32, on sequences that end anywhere in a tile.
pub(crate) fn attention_f32(checks: &mut Checks<'_>) -> Result<()> {
    let some: &[usize] = if checks.small { &[65, 3, 200, 1] } else { &[64, 1, 300, 128, 7, 129, 63, 65, 512, 33] };
    for causal in [false, true] {
        for p in [0.0, 0.1] {
            for (heads, d) in [(2, 64), (3, 32), (1, 96), (2, 128), (2, 26), (1, 250)] {
                case::<f32>(checks, some, heads, d, causal, p)?;
            }
        }
    }
    masks::<f32>(checks, &[7, 64, 129], 64)
}

/// What the reference gives for a batch.
struct Expected {
    out: Vec<f64>,
    log_sums: Vec<f64>,
    dqkv: Vec<f64>,
}

fn expected(
    sequences: &Sequences,
    qkv: &[f64],
    dout: &[f64],
    (heads, d, causal): (usize, usize, bool),
    dropout: Option<CpuDropout>,
) -> Expected {
    let (t, h) = (sequences.tokens(), heads * d);
    let parts: Vec<(usize, usize)> =
        (0..sequences.numbers.len()).flat_map(|s| (0..heads).map(move |head| (s, head))).collect();
    let compute = |(sequence, head): (usize, usize)| {
        let start = sequences.offsets[sequence] as usize;
        let s = sequences.offsets[sequence + 1] as usize - start;
        let take = |from: &[f64], columns: usize, first: usize| -> Vec<f64> {
            (0..s).flat_map(|i| from[(start + i) * columns + first..][..d].to_vec()).collect()
        };
        let [q, k, v] = [0, 1, 2].map(|which| take(qkv, 3 * h, which * h + head * d));
        let mask: Option<Vec<f64>> = dropout.map(|dropout| {
            let dropout = dropout.at_head(head);
            let row = |i: usize| RowId { sequence: sequences.numbers[sequence], position: i as u32 };
            let keep = |i: usize| dropout.keeps(row(i / s), s, i % s);
            (0..s * s).map(|i| if keep(i) { f64::from(dropout.scale()) } else { 0.0 }).collect()
        });
        let (scale, hidden) = (1.0 / (d as f64).sqrt(), causal.then(|| reference::causal(q.len() / d)));
        let output = reference::forward(&q, &k, &v, d, scale, hidden.as_deref(), mask.as_deref());
        let dout = take(dout, h, head * d);
        let gradients = reference::backward(&q, &k, &v, d, scale, &output, mask.as_deref(), &dout);
        // The log-sum from any probability: the first key is seen by all.
        let log_sum = |i: usize| {
            let score: f64 = (0..d).map(|c| q[i * d + c] * k[c]).sum::<f64>() / (d as f64).sqrt();
            score - output.probabilities[i * s].ln()
        };
        let log_sums: Vec<f64> = (0..s).map(log_sum).collect();
        (start, head, output.out, log_sums, gradients)
    };
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    let results: Vec<_> = std::thread::scope(|scope| {
        let handles: Vec<_> = (0..workers)
            .map(|worker| {
                let (parts, compute) = (&parts, &compute);
                scope.spawn(move || -> Vec<_> {
                    parts.iter().skip(worker).step_by(workers).map(|part| compute(*part)).collect()
                })
            })
            .collect();
        handles.into_iter().flat_map(|handle| handle.join().unwrap_or_default()).collect()
    });
    let mut all =
        Expected { out: vec![f64::NAN; t * h], log_sums: vec![f64::NAN; heads * t], dqkv: vec![f64::NAN; 3 * t * h] };
    for (start, head, out, log_sums, gradients) in results {
        for (i, log_sum) in log_sums.iter().enumerate() {
            let token = start + i;
            all.log_sums[head * t + token] = *log_sum;
            all.out[token * h + head * d..][..d].copy_from_slice(&out[i * d..][..d]);
            for (which, gradient) in gradients.iter().take(3).enumerate() {
                all.dqkv[token * 3 * h + which * h + head * d..][..d].copy_from_slice(&gradient[i * d..][..d]);
            }
        }
    }
    all
}

fn case<E: Number>(
    checks: &mut Checks<'_>,
    lengths: &[usize],
    heads: usize,
    d: usize,
    causal: bool,
    p: f32,
) -> Result<()> {
    let what =
        |name: &str| format!("{name}: {heads} heads of {d}, causal {causal}, p = {p}, {} sequences", lengths.len());
    let gpu = checks.gpu;
    let sequences = Sequences::new(lengths);
    let (t, h) = (sequences.tokens(), heads * d);
    // Scores of some size, so that softmax is not flat.
    let qkv: Vec<E> = numbers::<f32>(1, t * 3 * h).iter().map(|x| E::from_f32(1.5 * x)).collect();
    let dout: Vec<E> = numbers(2, t * h);
    let step = checks.up(&[STEP])?;
    let (on_cpu, dropout) = both(p, Step::At(step.view()));
    let expected = expected(&sequences, &exact(&qkv), &exact(&dout), (heads, d, causal), on_cpu);

    let Room { longest, long, middle, short } = Room::of(&sequences.offsets);
    let room = Room { longest, long: long + 3, middle: middle + 1, short: short + 2 };
    let table = sequences.table(gpu, room)?;
    let shape = Attention { table: table.view(), room, tokens: t, heads, head_size: d, causal };
    let (qkv, dout) = (checks.up(&qkv)?, checks.up(&dout)?);
    let mut before = None;
    for _ in 0..2 {
        let (out, log_sums) = (checks.poisoned::<E>(t * h)?, checks.poisoned::<f32>(heads * t)?);
        let dqkv = checks.poisoned::<E>(t * 3 * h)?;
        kernels::forward(gpu, qkv.view(), shape, dropout, out.view(), log_sums.view())?;
        let (o, l) = (out.view(), log_sums.view());
        kernels::backward(gpu, qkv.view(), shape, dropout, o, l, dout.view(), dqkv.view())?;
        if before.is_none() {
            checks.close::<E>(&what("attention"), &out, &expected.out)?;
            checks.close::<f32>(&what("log-sums"), &log_sums, &expected.log_sums)?;
            // Queries, keys and values apart: they differ in size.
            let got = exact(&checks.read::<E>(&what("gradient"), &dqkv)?);
            for (which, name) in ["queries", "keys", "values"].into_iter().enumerate() {
                let part = |x: &[f64]| -> Vec<f64> { x.chunks(h).skip(which).step_by(3).flatten().copied().collect() };
                let error = crate::check::error(&part(&got), &part(&expected.dqkv));
                let worst = &mut checks.worst[usize::from(E::IS_BF16)];
                *worst = worst.max(error);
                let bound = crate::check::tolerance::<E>();
                checks.verify(|| format!("{} {:?}: error {error:.2e}", what(name), E::DTYPE), error <= bound);
            }
        }
        let all = [bits::<E>(gpu, &out)?, bits::<f32>(gpu, &log_sums)?, bits::<E>(gpu, &dqkv)?];
        let same = before.as_ref().is_none_or(|before| *before == all);
        checks.verify(|| format!("{}: another run gives other bits", what("attention")), same);
        before = Some(all);
    }
    Ok(())
}

/// With queries and keys of zero all probabilities are 1/S; with values that are rows of the unit matrix the output
/// shows which weights were kept, and with such gradients the values' gradient does.
fn masks<E: Number>(checks: &mut Checks<'_>, lengths: &[usize], d: usize) -> Result<()> {
    let (gpu, heads, h) = (checks.gpu, 4, 4 * d);
    let sequences = Sequences::new(lengths);
    let t = sequences.tokens();
    let (room, p) = (Room::of(&sequences.offsets), 0.3);
    let table = sequences.table(gpu, room)?;
    let shape = Attention { table: table.view(), room, tokens: t, heads, head_size: d, causal: false };
    let (on_cpu, dropout) = both(p, Step::Value(STEP));
    let Some(on_cpu) = on_cpu else { return Ok(()) };
    let longest = lengths.iter().copied().max().unwrap_or(0);
    for window in (0..longest).step_by(d) {
        let (mut qkv, mut dout) = (vec![E::from_f32(0.0); t * 3 * h], vec![E::from_f32(0.0); t * h]);
        for (sequence, s) in lengths.iter().enumerate() {
            for position in window..(window + d).min(*s) {
                let token = sequences.offsets[sequence] as usize + position;
                for head in 0..heads {
                    qkv[token * 3 * h + 2 * h + head * d + position - window] = E::from_f32(1.0);
                    dout[token * h + head * d + position - window] = E::from_f32(1.0);
                }
            }
        }
        let (qkv, dout) = (checks.up(&qkv)?, checks.up(&dout)?);
        let (out, log_sums) = (checks.poisoned::<E>(t * h)?, checks.poisoned::<f32>(heads * t)?);
        let dqkv = checks.poisoned::<E>(t * 3 * h)?;
        kernels::forward(gpu, qkv.view(), shape, dropout, out.view(), log_sums.view())?;
        let (o, l) = (out.view(), log_sums.view());
        kernels::backward(gpu, qkv.view(), shape, dropout, o, l, dout.view(), dqkv.view())?;
        let (out, dqkv) = (checks.read::<E>("masks", &out)?, checks.read::<E>("masks", &dqkv)?);
        let (mut forward, mut backward) = (0, 0);
        for (sequence, s) in lengths.iter().enumerate() {
            for i in 0..*s {
                let token = sequences.offsets[sequence] as usize + i;
                for head in 0..heads {
                    let dropout = on_cpu.at_head(head);
                    let keeps = |query: usize, key: usize| {
                        let row = RowId { sequence: sequences.numbers[sequence], position: query as u32 };
                        dropout.keeps(row, *s, key)
                    };
                    for other in window..(window + d).min(*s) {
                        let c = head * d + other - window;
                        forward += usize::from(keeps(i, other) != (out[token * h + c].to_f32() > 0.0));
                        backward += usize::from(keeps(other, i) != (dqkv[token * 3 * h + 2 * h + c].to_f32() > 0.0));
                    }
                }
            }
        }
        let what = |name| format!("{name}'s mask, {:?}, head size {d}, from key {window} on", E::DTYPE);
        checks.verify(|| format!("{}: {forward} differ", what("forward")), forward == 0);
        checks.verify(|| format!("{}: {backward} differ", what("backward")), backward == 0);
    }
    Ok(())
}

/// Times forward and backward, against the time that reading and writing their tensors once takes at 4.3 TB/s.
pub(crate) fn bench(gpu: &Gpu) -> Result<()> {
    let mut stream = Stream::new(1, 0, 0);
    let mut random = |least: u32, most: u32, tokens: usize| -> Vec<usize> {
        let mut all = Vec::new();
        while all.iter().sum::<usize>() < tokens {
            all.push((least + stream.below(most - least + 1)) as usize);
        }
        all
    };
    let cases = [
        ("base 256×128", 12, 64, vec![128; 256]),
        ("base 128×256", 12, 64, vec![256; 128]),
        ("base 64×512", 12, 64, vec![512; 64]),
        ("large 64×128", 16, 64, vec![128; 64]),
        ("mini 512×128", 4, 64, vec![128; 512]),
        ("base, 8 to 128", 12, 64, random(8, 128, 32768)),
        ("base, 8 to 48", 12, 64, random(8, 48, 32768)),
        ("base, 8 to 512", 12, 64, random(8, 512, 32768)),
        ("MiniLM 256×128", 12, 32, vec![128; 256]),
        ("d = 128, 256×128", 6, 128, vec![128; 256]),
    ];
    println!("attention, bf16: microseconds (times the floor), TFLOP/s");
    for (name, heads, d, lengths) in cases {
        bench_case(gpu, name, (heads, d), &lengths, DType::Bf16)?;
    }
    bench_f32(gpu)
}

/// The same in f32, which tensor cores have no part in.
pub(crate) fn bench_f32(gpu: &Gpu) -> Result<()> {
    let cases = [
        ("base 256×128", 12, 64, vec![128; 256]),
        ("base 64×512", 12, 64, vec![512; 64]),
        ("MiniLM 256×128", 12, 32, vec![128; 256]),
        ("d = 128, 64×512", 6, 128, vec![512; 64]),
    ];
    println!("attention, f32: microseconds (times the floor), TFLOP/s");
    for (name, heads, d, lengths) in cases {
        bench_case(gpu, name, (heads, d), &lengths, DType::F32)?;
    }
    Ok(())
}

fn bench_case(gpu: &Gpu, name: &str, (heads, d): (usize, usize), lengths: &[usize], dtype: DType) -> Result<()> {
    let sequences = Sequences::new(lengths);
    let (t, h) = (sequences.tokens(), heads * d);
    let room = Room::of(&sequences.offsets);
    let table = sequences.table(gpu, room)?;
    let shape = Attention { table: table.view(), room, tokens: t, heads, head_size: d, causal: false };
    let qkv = filled(gpu, 1, t * 3 * h, dtype, 1.0)?;
    let dout = filled(gpu, 2, t * h, dtype, 1.0)?;
    let out = gpu.empty(t * h, dtype)?;
    let (log_sums, dqkv) = (gpu.empty(heads * t, DType::F32)?, gpu.empty(t * 3 * h, dtype)?);
    let floor = (4 * dtype.size() * t * h) as f64 / 4.3e6;
    let flops = lengths.iter().map(|s| (4 * s * s * h) as f64).sum::<f64>();
    for p in [0.0, 0.1] {
        let dropout = Dropout::new(p, SEED, Step::Value(STEP), SITE);
        let forward = || kernels::forward(gpu, qkv.view(), shape, dropout, out.view(), log_sums.view());
        let backward = || {
            let (out, log_sums) = (out.view(), log_sums.view());
            kernels::backward(gpu, qkv.view(), shape, dropout, out, log_sums, dout.view(), dqkv.view())
        };
        let (forward, backward) = (time(gpu, forward)?, time(gpu, backward)?);
        println!(
            "{name:<17} p = {p:<3}  forward {forward:>6.1} ({:.2}), {:>3.0}  \
             backward {backward:>6.1} ({:.2}), {:>3.0}  sum {:>6.1}",
            forward / floor,
            flops / forward * 1e-6,
            backward / (2.0 * floor),
            2.5 * flops / backward * 1e-6,
            forward + backward,
        );
    }
    Ok(())
}

/// The median time of one call, in microseconds.
pub(crate) fn time(gpu: &Gpu, work: impl Fn() -> Result<()>) -> Result<f64> {
    let (start, end) = (gpu.event()?, gpu.event()?);
    for _ in 0..3 {
        work()?;
    }
    let mut times = Vec::new();
    for _ in 0..7 {
        gpu.record(&start)?;
        for _ in 0..10 {
            work()?;
        }
        gpu.record(&end)?;
        times.push(end.seconds_since(&start)? * 1e5);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}
