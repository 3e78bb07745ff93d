//! Adafactor: several steps against the CPU's reference, twice for the same bits, and what is not finite.

use half::bf16;
use henson_kernels::cpu::adafactor::{Moment, Plan as Tensors, Rule, Settings, reference};
use henson_kernels::cpu::optimizer::Segment;
use henson_kernels::cuda::adafactor::{Plan, adafactor};
use henson_kernels::cuda::optimizer::{Control, FACTORS, NORM};
use henson_kernels::cuda::{DType, Result};

use crate::check::*;

/// Segments, with the sides of those that are matrices.
type Segments = Vec<(Segment, Option<[usize; 2]>)>;

/// Out of order, with gaps: matrices of several tiles, whose rows begin at multiples of 16 bytes and do not, with sides of 1, 7, 33
/// and 129; vectors, one of several pieces; an empty one.
fn segments() -> (Segments, usize) {
    let shapes: [(Option<[usize; 2]>, usize, bool, f32); 11] = [
        (Some([129, 256]), 0, true, 1.0),
        (Some([257, 300]), 0, false, 0.5),
        (Some([130, 131]), 3, true, 1.0),
        (Some([1, 1]), 0, true, 1.0),
        (Some([3, 2001]), 1, false, 0.5),
        (Some([33, 129]), 0, true, 2.0),
        (Some([1000, 7]), 2, true, 1.0),
        (None, 17_001, false, 2.0),
        (None, 33, true, 1.0),
        (None, 0, true, 1.0),
        (Some([128, 64]), 0, true, 1.0),
    ];
    let (mut start, mut found) = (0, Vec::new());
    for (sides, more, decay, rate) in shapes {
        // Of a matrix the number is how far behind a multiple of four it begins.
        let (len, from) = sides.map_or((more, start), |[r, c]| (r * c, start + more));
        found.push((Segment { start: from, len, decay, rate }, sides));
        start = (from + len + 5).next_multiple_of(4);
    }
    found.reverse();
    (found, start)
}

const SETTINGS: Settings = Settings { learning_rate: 0.1, step: 1, weight_decay: 0.2, gradient_scale: 0.7 };

pub(crate) fn all(checks: &mut Checks<'_>) -> Result<()> {
    let plain = Rule { min_side: 1, scale_parameter: false, ..Rule::default() };
    for clip in [None, Some(3.0)] {
        steps(checks, Rule::default(), clip, true)?;
        steps(checks, plain, clip, false)?;
    }
    let all = Rule { min_side: 1, ..Rule::default() };
    let (first, again) = (steps(checks, all, None, true)?, steps(checks, all, None, true)?);
    checks.verify(|| "adafactor: other bits the second time".into(), first == again);
    skipped(checks)
}

/// Three steps; the bits of what they left.
fn steps(checks: &mut Checks<'_>, rule: Rule, clip: Option<f64>, with_copy: bool) -> Result<Vec<u32>> {
    let gpu = checks.gpu;
    let (segments, len) = segments();
    let tensors = Tensors::new(rule, &segments, len);
    let plan = Plan::new(gpu, &tensors)?;
    let inside = |i: usize| segments.iter().any(|(s, _)| (s.start..s.start + s.len).contains(&i));
    // Padding holds NaN: what is read of it spoils the rest, and what is written to it shows.
    let spoil = |mut x: Vec<f32>| {
        (0..len).filter(|i| !inside(*i)).for_each(|i| x[i] = f32::NAN);
        x
    };
    let p = spoil(numbers(1, len));
    let (gp, gs) = (checks.out(&p)?, checks.out(&vec![0.0f32; tensors.state_len()])?);
    let (copy, factors) = (checks.poisoned::<bf16>(len)?, gpu.empty(FACTORS, DType::F32)?);
    let (mut ep, mut es) = (exact(&p), vec![0.0; tensors.state_len()]);
    for step in 1..=3 {
        let mut g = spoil(numbers::<f32>(1 + step, len));
        // One tensor without a gradient, and one whose gradients grow.
        let (still, growing) = (segments[2].0, segments[5].0);
        g[still.start..still.start + still.len].fill(0.0);
        g[growing.start..growing.start + growing.len].iter_mut().for_each(|g| *g *= 10f32.powi(step as i32));
        let squares: f64 = (0..len).filter(|i| inside(*i)).map(|i| f64::from(g[i]).powi(2)).sum();
        let norm = squares.sqrt() * SETTINGS.gradient_scale;
        let scale = SETTINGS.gradient_scale * clip.map_or(1.0, |most| (most / (norm + 1e-6)).min(1.0));
        let settings = Settings { step, gradient_scale: scale, ..SETTINGS };
        reference::adafactor(&mut ep, &exact(&g), &mut es, tensors.tensors(), &rule, &settings);

        let (learning_rate, gradient_scale) = (SETTINGS.learning_rate, SETTINGS.gradient_scale);
        let control = Control { learning_rate, bias_correction: Some(step), clip, gradient_scale };
        let (gg, control) = (checks.up(&g)?, checks.up(&control.numbers())?);
        let numbers = (control.view(), factors.view());
        let copy = with_copy.then(|| copy.view());
        adafactor(gpu, &plan, gp.view(), gg.view(), gs.view(), SETTINGS.weight_decay, numbers, copy)?;
        let told = f64::from(gpu.read::<f32>(factors.view())?[NORM]);
        checks.verify(|| format!("adafactor: norm {told} for {norm}"), error(&[told], &[norm]) < 1e-6);
    }
    let (p, state) = (checks.read::<f32>("adafactor", &gp)?, checks.read::<f32>("adafactor", &gs)?);
    for tensor in tensors.tensors() {
        let (segment, state_start) = (tensor.segment, tensor.state);
        let own = segment.start..segment.start + segment.len;
        let mut parts = vec![("parameters", exact(&p[own.clone()]), &ep[own])];
        let mut add = |what, start: usize, len: usize| {
            let kept = state_start + start..state_start + start + len;
            parts.push((what, exact(&state[kept.clone()]), &es[kept]));
        };
        match tensor.moment {
            Moment::Factored { rows, columns } => {
                add("rows", 0, rows);
                add("columns", rows, columns);
            }
            Moment::Whole => add("moment", 0, segment.len),
        }
        for (what, got, expected) in parts {
            // Of small numbers, too, relative to the largest of them.
            let most = expected.iter().fold(f64::MIN_POSITIVE, |most, x| most.max(x.abs()));
            let relative = |x: &[f64]| x.iter().map(|x| x / most).collect::<Vec<_>>();
            let error = error(&relative(&got), &relative(expected));
            checks.worst[0] = checks.worst[0].max(error);
            let place = format!("{what} of {:?} at {}", tensor.moment, segment.start);
            checks.verify(|| format!("adafactor, {place}: error {error:.2e}"), error <= tolerance::<f32>());
        }
    }
    checks.verify(|| "adafactor: padding was touched".into(), (0..len).all(|i| inside(i) || p[i].is_nan()));
    let copy = checks.read::<bf16>("adafactor", &copy)?;
    let good = |i: usize| if with_copy && inside(i) { copy[i] == bf16::from_f32(p[i]) } else { copy[i].is_nan() };
    checks.verify(|| "adafactor: the bf16 copy".into(), (0..len).all(good));
    Ok(p.iter().chain(&state).map(|x| x.to_bits()).collect())
}

/// Gradients that are not finite change nothing.
fn skipped(checks: &mut Checks<'_>) -> Result<()> {
    let gpu = checks.gpu;
    let (segments, len) = segments();
    let tensors = Tensors::new(Rule { min_side: 1, ..Rule::default() }, &segments, len);
    let plan = Plan::new(gpu, &tensors)?;
    let (p, state) = (numbers::<f32>(1, len), numbers::<f32>(2, tensors.state_len()));
    let control = Control { learning_rate: 0.1, bias_correction: Some(1), clip: Some(1.0), gradient_scale: 1.0 };
    let (control, factors) = (checks.up(&control.numbers())?, gpu.empty(FACTORS, DType::F32)?);
    for (tensor, bad) in [(0, f32::INFINITY), (3, f32::NAN)] {
        let mut g = numbers::<f32>(3, len);
        let segment = segments[tensor].0;
        g[segment.start + segment.len / 2] = bad;
        let (gp, gs, gg, copy) = (checks.up(&p)?, checks.up(&state)?, checks.up(&g)?, checks.poisoned::<bf16>(len)?);
        let numbers = (control.view(), factors.view());
        adafactor(gpu, &plan, gp.view(), gg.view(), gs.view(), 0.1, numbers, Some(copy.view()))?;
        let same = gpu.read::<f32>(gp.view())? == p && gpu.read::<f32>(gs.view())? == state;
        checks.verify(|| format!("adafactor: a gradient of {bad} changed something"), same);
        let copy = checks.read::<bf16>("adafactor", &copy)?;
        checks.verify(|| "adafactor: it changed the copy".into(), copy.iter().all(|x| x.is_nan()));
    }
    Ok(())
}
