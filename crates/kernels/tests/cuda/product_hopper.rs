//! Hopper's own products with GELU and with gates: against the naive product in f64, and against the kernels that they stand for.

use half::bf16;
use henson_kernels::cpu::activation::{Activation, reference};
use henson_kernels::cuda::matmul::{Finish, Matrix, product};
use henson_kernels::cuda::reduce::Sum;
use henson_kernels::cuda::{DType, Gpu, Result, activation, product_hopper};

use crate::check::{Checks, bits, exact, filled, numbers};
use crate::products::multiply;

/// m, n, k: rows that end anywhere in a tile or a pair of them, one step or many, one tile a block or several.
const SHAPES: [(usize, usize, usize); 3] = [(1409, 3072, 192), (16897, 256, 128), (2048, 2304, 64)];

/// The same for gates: one tile a block or several, columns that are no multiple of 256.
const GATES: [(usize, usize, usize, Activation, bool); 6] = [
    (4353, 1152, 64, Activation::Gelu, false),
    (1409, 2944, 192, Activation::Silu, true),
    (16897, 256, 128, Activation::GeluTanh, false),
    (8703, 640, 128, Activation::Relu, true),
    (4100, 1152, 64, Activation::Tanh, false),
    (34001, 128, 256, Activation::None, true),
];

pub(crate) fn product_hopper(checks: &mut Checks<'_>) -> Result<()> {
    if checks.gpu.capability() != (9, 0) {
        return Ok(());
    }
    let shapes = if checks.small { &SHAPES[..1] } else { &SHAPES[..] };
    for &(m, n, k) in shapes {
        forward(checks, m, n, k)?;
        gradient(checks, m, n, k)?;
    }
    let gates = if checks.small { &GATES[..2] } else { &GATES[..] };
    for &(m, n, k, activation, biased) in gates {
        gate(checks, [m, n, k], activation, biased)?;
        gate_gradient(checks, [m, n, k], activation, biased)?;
    }
    for (m, n, k) in [(4096, 768, 48), (65536, 192, 64), (256, 2816, 1024), (4096, 1152, 0)] {
        let fits =
            [product_hopper::fits_gate, product_hopper::fits_gate_gradient].map(|fits| fits(checks.gpu, m, n, k));
        checks.verify(|| format!("a gate of {m}×{n}×{k} is not for this kernel"), fits == [false; 2]);
    }
    for (m, n, k) in [(4096, 768, 48), (8192, 192, 64), (128, 3072, 768), (4096, 768, 0)] {
        checks.verify(|| format!("{m}×{n}×{k} is not for this kernel"), !product_hopper::fits(checks.gpu, m, n, k));
    }
    Ok(())
}

/// Weights so small that GELU is curved where its input lies.
fn weights(seed: u64, len: usize, k: usize) -> Vec<bf16> {
    let scale = 1.0 / (k as f32).sqrt();
    numbers::<f32>(seed, len).iter().map(|x| bf16::from_f32(x * scale)).collect()
}

fn transposed(x: &[f64], rows: usize, columns: usize) -> Vec<f64> {
    (0..x.len()).map(|i| x[i % rows * columns + i / rows]).collect()
}

fn forward(checks: &mut Checks<'_>, m: usize, n: usize, k: usize) -> Result<()> {
    let what = format!("GELU of a product {m}×{n}×{k}");
    let gpu = checks.gpu;
    let (x, w, b) = (numbers::<bf16>(1, m * k), weights(2, n * k, k), numbers::<bf16>(3, n));
    let (gx, gw, gb) = (checks.up(&x)?, checks.up(&w)?, checks.up(&b)?);
    let mut z = multiply(&exact(&x), &transposed(&exact(&w), n, k), m, n, k);
    let bias = exact(&b);
    z.iter_mut().enumerate().for_each(|(i, z)| *z += bias[i % n]);
    let (slope, y) = (checks.poisoned::<bf16>(m * n)?, checks.poisoned::<bf16>(m * n)?);
    let run = |slope, y| product_hopper::gelu(gpu, gx.view(), gw.view(), gb.view(), slope, y);
    run(Some(slope.view()), y.view())?;
    let expected: Vec<f64> = z.iter().map(|z| reference::forward(Activation::Gelu, *z)).collect();
    checks.close::<bf16>(&what, &y, &expected)?;
    let expected: Vec<f64> = z.iter().map(|z| reference::derivative(Activation::Gelu, *z)).collect();
    checks.close::<bf16>(&format!("{what}, slope"), &slope, &expected)?;
    // Two runs give the same bits, and so does one that keeps no slope.
    let first = (bits::<bf16>(gpu, &y)?, bits::<bf16>(gpu, &slope)?);
    let (slope, y, alone) =
        (checks.poisoned::<bf16>(m * n)?, checks.poisoned::<bf16>(m * n)?, checks.poisoned::<bf16>(m * n)?);
    run(Some(slope.view()), y.view())?;
    run(None, alone.view())?;
    let alone = bits::<bf16>(gpu, &alone)? == first.0;
    let same = first == (bits::<bf16>(gpu, &y)?, bits::<bf16>(gpu, &slope)?);
    checks.verify(|| format!("{what}: two runs differ"), same);
    checks.verify(|| format!("{what}: differs where no slope is kept"), alone);
    Ok(())
}

fn gradient(checks: &mut Checks<'_>, m: usize, n: usize, k: usize) -> Result<()> {
    let what = format!("GELU's gradient of a product {m}×{n}×{k}");
    let gpu = checks.gpu;
    let (dy, w) = (numbers::<bf16>(4, m * k), weights(5, n * k, k));
    let (slope, start) = (numbers::<bf16>(7, m * n), numbers::<f32>(8, n));
    let (gdy, gw, gslope) = (checks.up(&dy)?, checks.up(&w)?, checks.up(&slope)?);
    let mut expected = multiply(&exact(&dy), &exact(&w), m, n, k);
    let mut sums = exact(&start);
    for (i, (d, slope)) in expected.iter_mut().zip(exact(&slope)).enumerate() {
        *d *= slope;
        sums[i % n] += *d;
    }
    let run = |dz, sums| product_hopper::gelu_gradient(gpu, gdy.view(), gw.view(), gslope.view(), dz, Sum::add(sums));
    let (dz, gsums) = (checks.poisoned::<bf16>(m * n)?, checks.out(&start)?);
    run(dz.view(), gsums.view())?;
    checks.close::<bf16>(&what, &dz, &expected)?;
    // Each of the m numbers in a sum is off by half of a last place of bf16 at most, and they do not all err alike.
    checks.within::<f32>(&format!("{what}, sums"), &gsums, &sums, 5e-3)?;
    let first = (bits::<bf16>(gpu, &dz)?, bits::<f32>(gpu, &gsums)?);
    let (dz, gsums) = (checks.poisoned::<bf16>(m * n)?, checks.out(&start)?);
    run(dz.view(), gsums.view())?;
    let same = first == (bits::<bf16>(gpu, &dz)?, bits::<f32>(gpu, &gsums)?);
    checks.verify(|| format!("{what}: two runs differ"), same);
    Ok(())
}

fn gate(checks: &mut Checks<'_>, [m, n, k]: [usize; 3], activation: Activation, biased: bool) -> Result<()> {
    let what = format!("{activation:?} gate of a product {m}×{n}×{k}, bias {biased}");
    let gpu = checks.gpu;
    let (x, w, b) = (numbers::<bf16>(1, m * k), weights(2, 2 * n * k, k), numbers::<bf16>(3, 2 * n));
    let (gx, gw, gb) = (checks.up(&x)?, checks.up(&w)?, checks.up(&b)?);
    let z = multiply(&exact(&x), &transposed(&exact(&w), 2 * n, k), m, 2 * n, k);
    let bias = if biased { exact(&b) } else { vec![0.0; 2 * n] };
    let expected: Vec<f64> = (0..m * n)
        .map(|i| {
            let (row, column) = (&z[i / n * 2 * n..][..2 * n], i % n);
            reference::forward(activation, row[column] + bias[column]) * (row[n + column] + bias[n + column])
        })
        .collect();
    let given = biased.then(|| gb.view());
    let run = |kept, y| product_hopper::gate(gpu, activation, gx.view(), gw.view(), given, n, kept, y);
    let (kept, y) = (checks.poisoned::<bf16>(2 * m * n)?, checks.poisoned::<bf16>(m * n)?);
    run(Some(kept.view()), y.view())?;
    checks.close::<bf16>(&what, &y, &expected)?;
    checks.close::<bf16>(&format!("{what}, kept"), &kept, &z)?;
    let first = (bits::<bf16>(gpu, &y)?, bits::<bf16>(gpu, &kept)?);
    let (kept, y, alone) =
        (checks.poisoned::<bf16>(2 * m * n)?, checks.poisoned::<bf16>(m * n)?, checks.poisoned::<bf16>(m * n)?);
    run(Some(kept.view()), y.view())?;
    run(None, alone.view())?;
    let alone = bits::<bf16>(gpu, &alone)? == first.0;
    let same = first == (bits::<bf16>(gpu, &y)?, bits::<bf16>(gpu, &kept)?);
    checks.verify(|| format!("{what}: two runs differ"), same);
    checks.verify(|| format!("{what}: differs where nothing is kept"), alone);
    Ok(())
}

fn gate_gradient(checks: &mut Checks<'_>, [m, n, k]: [usize; 3], activation: Activation, biased: bool) -> Result<()> {
    let what = format!("{activation:?} gate's gradient of a product {m}×{n}×{k}, bias {biased}");
    let gpu = checks.gpu;
    let (dy, w) = (numbers::<bf16>(4, m * k), weights(5, n * k, k));
    let (kept, b) = (numbers::<bf16>(7, 2 * m * n), numbers::<bf16>(8, 2 * n));
    let (gdy, gw, gkept, gb) = (checks.up(&dy)?, checks.up(&w)?, checks.up(&kept)?, checks.up(&b)?);
    let bias = if biased { exact(&b) } else { vec![0.0; 2 * n] };
    let d = multiply(&exact(&dy), &exact(&w), m, n, k);
    let mut expected = exact(&kept);
    for (row, d) in expected.chunks_mut(2 * n).zip(d.chunks(n)) {
        let (gates, values) = row.split_at_mut(n);
        for (c, (gate, value)) in gates.iter_mut().zip(values).enumerate() {
            let (g, v) = (*gate + bias[c], *value + bias[n + c]);
            *gate = d[c] * v * reference::derivative(activation, g);
            *value = d[c] * reference::forward(activation, g);
        }
    }
    let given = biased.then(|| gb.view());
    let run = |kept, dz| product_hopper::gate_gradient(gpu, activation, gdy.view(), gw.view(), given, n, kept, dz);
    let dz = checks.poisoned::<bf16>(2 * m * n)?;
    run(gkept.view(), dz.view())?;
    checks.close::<bf16>(&what, &dz, &expected)?;
    // In place of what was kept, too.
    let first = bits::<bf16>(gpu, &dz)?;
    let place = checks.out(&kept)?;
    run(place.view(), place.view())?;
    checks.read::<bf16>(&what, &place)?;
    let same = first == bits::<bf16>(gpu, &place)?;
    checks.verify(|| format!("{what}: differs in place"), same);
    Ok(())
}

/// The products of feed-forward pairs beside cuBLASLt and the activation's kernels, in turns.
pub(crate) fn bench(gpu: &Gpu) -> Result<()> {
    if gpu.capability() != (9, 0) {
        return Ok(());
    }
    let shapes = [
        ("base", 32768, 768, 3072),
        ("large", 8192, 1024, 4096),
        ("small", 32768, 512, 2048),
        ("mini", 65536, 256, 1024),
    ];
    for (name, t, h, i) in shapes {
        let kept = filled(gpu, 1, t * i, DType::Bf16, 1.0)?;
        let weights = filled(gpu, 2, 2 * h * i + i, DType::Bf16, 0.04)?;
        let (x, dy) = (gpu.empty(t * h, DType::Bf16)?, gpu.empty(t * h, DType::Bf16)?);
        gpu.copy(kept.view().part(8, t * h), x.view())?;
        gpu.copy(kept.view().part(t * h, t * h), dy.view())?;
        let (up, down) = (weights.view().part(0, h * i), weights.view().part(h * i, h * i));
        let bias = weights.view().part(2 * h * i, i);
        let (z, y) = (gpu.empty(t * i, DType::Bf16)?, gpu.empty(t * i, DType::Bf16)?);
        let sums = gpu.zeros(i, DType::F32)?;
        let (mx, mdy, mz) = (Matrix::new(x.view(), t, h), Matrix::new(dy.view(), t, h), Matrix::new(z.view(), t, i));
        let (mup, mdown) = (Matrix::new(up, i, h).transposed(), Matrix::new(down, h, i));
        let add = || Sum::add(sums.view());
        let runs: [(&str, &dyn Fn() -> Result<()>); 7] = [
            ("x·W, cuBLASLt", &|| product(gpu, mx, mup, mz, Finish::default())),
            ("GELU of x·W, cuBLASLt and a kernel", &|| {
                product(gpu, mx, mup, mz, Finish::default())?;
                activation::forward(gpu, Activation::Gelu, z.view(), Some(bias), y.view())
            }),
            ("GELU of x·W", &|| product_hopper::gelu(gpu, x.view(), up, bias, Some(z.view()), y.view())),
            ("GELU of x·W, no slope kept", &|| product_hopper::gelu(gpu, x.view(), up, bias, None, y.view())),
            ("dy·W, cuBLASLt", &|| product(gpu, mdy, mdown, mz, Finish::default())),
            ("GELU's gradient, cuBLASLt and a kernel", &|| {
                product(gpu, mdy, mdown, mz, Finish::default())?;
                activation::backward(gpu, Activation::Gelu, kept.view(), Some(bias), z.view(), z.view(), Some(add()))
            }),
            ("GELU's gradient", &|| product_hopper::gelu_gradient(gpu, dy.view(), down, kept.view(), z.view(), add())),
        ];
        in_turns(gpu, name, 2 * t * h * i, &runs)?;
        gpu.pool().trim();
    }
    gates(gpu)
}

/// Runs in turns: each one's median, and what rate that is for so many operations.
fn in_turns(gpu: &Gpu, name: &str, operations: usize, runs: &[(&str, &dyn Fn() -> Result<()>)]) -> Result<()> {
    const REPEATS: usize = 10;
    let mut graphs = Vec::new();
    for (_, run) in runs {
        // Compiles, searches and allocates.
        run()?;
        graphs.push(gpu.capture(|| (0..REPEATS).try_for_each(|_| run()))?);
    }
    let mut times = vec![Vec::new(); runs.len()];
    let (start, end) = (gpu.event()?, gpu.event()?);
    for _ in 0..7 {
        for (graph, times) in graphs.iter().zip(&mut times) {
            gpu.record(&start)?;
            gpu.play(graph)?;
            gpu.record(&end)?;
            times.push(end.seconds_since(&start)? / REPEATS as f64);
        }
    }
    for ((what, _), times) in runs.iter().zip(&mut times) {
        times.sort_by(f64::total_cmp);
        let median = times[times.len() / 2];
        let rate = operations as f64 / median * 1e-12;
        println!("{name:<12} {what:<40} {:>8.1} us, {rate:>4.0} TFLOP/s", median * 1e6);
    }
    Ok(())
}

/// Gated pairs beside cuBLASLt and the gate's kernels: ModernBERT-base's and T5-large's (version 1.1).
fn gates(gpu: &Gpu) -> Result<()> {
    let shapes = [
        ("ModernBERT", 32768, 768, 1152, Activation::Gelu),
        ("T5 v1.1", 8192, 1024, 2816, Activation::GeluTanh),
        ("SwiGLU", 8192, 1024, 2816, Activation::Silu),
    ];
    for (name, t, h, i, activation) in shapes {
        let kept = filled(gpu, 1, 2 * t * i, DType::Bf16, 1.0)?;
        let weights = filled(gpu, 2, 3 * h * i, DType::Bf16, 0.04)?;
        let (x, dy) = (gpu.empty(t * h, DType::Bf16)?, gpu.empty(t * h, DType::Bf16)?);
        gpu.copy(kept.view().part(8, t * h), x.view())?;
        gpu.copy(kept.view().part(t * h, t * h), dy.view())?;
        let (up, down) = (weights.view().part(0, 2 * h * i), weights.view().part(2 * h * i, h * i));
        let (z, y) = (gpu.empty(2 * t * i, DType::Bf16)?, gpu.empty(t * i, DType::Bf16)?);
        let (mx, mz) = (Matrix::new(x.view(), t, h), Matrix::new(z.view(), t, 2 * i));
        let (mdy, my) = (Matrix::new(dy.view(), t, h), Matrix::new(y.view(), t, i));
        let (mup, mdown) = (Matrix::new(up, 2 * i, h).transposed(), Matrix::new(down, h, i));
        let forward: [(&str, &dyn Fn() -> Result<()>); 4] = [
            ("x·W, cuBLASLt", &|| product(gpu, mx, mup, mz, Finish::default())),
            ("gate of x·W, cuBLASLt and a kernel", &|| {
                product(gpu, mx, mup, mz, Finish::default())?;
                activation::gate(gpu, activation, z.view(), None, i, y.view())
            }),
            ("gate of x·W", &|| {
                product_hopper::gate(gpu, activation, x.view(), up, None, i, Some(z.view()), y.view())
            }),
            ("gate of x·W, nothing kept", &|| {
                product_hopper::gate(gpu, activation, x.view(), up, None, i, None, y.view())
            }),
        ];
        in_turns(gpu, name, 4 * t * h * i, &forward)?;
        let backward: [(&str, &dyn Fn() -> Result<()>); 3] = [
            ("dy·W, cuBLASLt", &|| product(gpu, mdy, mdown, my, Finish::default())),
            ("gate's gradient, cuBLASLt and a kernel", &|| {
                product(gpu, mdy, mdown, my, Finish::default())?;
                activation::gate_backward(gpu, activation, kept.view(), None, y.view(), i, z.view())
            }),
            ("gate's gradient", &|| {
                product_hopper::gate_gradient(gpu, activation, dy.view(), down, None, i, kept.view(), z.view())
            }),
        ];
        in_turns(gpu, name, 2 * t * h * i, &backward)?;
        gpu.pool().trim();
    }
    Ok(())
}
