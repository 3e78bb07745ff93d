//! Losses, optimizers, memory, faults, and a step that is recorded and played again.

use half::bf16;
use henson_kernels::cpu::dropout::{Dropout as CpuDropout, RowId};
use henson_kernels::cpu::loss::reference;
use henson_kernels::cpu::optimizer::{Segment, Settings, TwoPasses, reference as optimizer_reference};
use henson_kernels::cpu::reduce::CHUNK;
use henson_kernels::cpu::replace::reference as replace_reference;
use henson_kernels::cpu::sample::{Sampler, reference as sample_reference};
use henson_kernels::cpu::span::reference as span_reference;
use henson_kernels::cuda::loss::{self as kernels, Total};
use henson_kernels::cuda::optimizer::{self as optimizers, Control, FACTORS, NORM, Plan, Rule};
use henson_kernels::cuda::{
    Buffer, CudaError, DType, Dropout, Gpu, Result, Scalar, Step, View, embedding, reduce, replace as replacing, rows,
};

use crate::check::{Checks, Number, error, exact, indices, numbers, places, scalar, tolerance};

pub(crate) fn memory(checks: &mut Checks<'_>) -> Result<()> {
    let gpu = checks.gpu;
    let x = numbers::<f32>(1, 1000);
    let buffer = gpu.upload(&x)?;
    checks.verify(|| "what was written is not what is read".into(), gpu.read::<f32>(buffer.view())? == x);
    let copy = gpu.zeros(1000, DType::F32)?;
    gpu.copy(buffer.view().part(10, 100), copy.view().part(900, 100))?;
    let got = gpu.read::<f32>(copy.view())?;
    checks.verify(|| "copy".into(), got[900..] == x[10..110] && got[..900].iter().all(|x| *x == 0.0));
    drop((buffer, copy));

    // A step that asks for what the last one asked for holds nothing more.
    let step = || -> Result<()> {
        let some: Vec<Buffer> =
            [5000, 70_000, 5000, 123].iter().map(|n| gpu.empty(*n, DType::F32)).collect::<Result<_>>()?;
        rows::add(gpu, some[0].view(), some[2].view())
    };
    step()?;
    let held = gpu.pool().held();
    for _ in 0..5 {
        step()?;
    }
    checks.verify(|| format!("{held} bytes became {}", gpu.pool().held()), gpu.pool().held() == held);

    // A copy beside the work, which waits for it.
    let mut pinned = gpu.pinned(4096)?;
    // SAFETY: no copy has begun.
    unsafe { pinned.bytes_mut(64..4064) }.copy_from_slice(bytemuck::cast_slice(&x));
    let (target, sum, event) = (gpu.zeros(1000, DType::F32)?, gpu.zeros(1000, DType::F32)?, gpu.event()?);
    gpu.synchronise()?;
    // SAFETY: the pinned memory lives and stays as it is to the end of this function; the target is not used before.
    unsafe { gpu.copy_ahead(&pinned, 64, target.view(), &event)? };
    gpu.wait(&event)?;
    rows::add(gpu, target.view(), sum.view())?;
    checks.verify(|| "copy_ahead".into(), gpu.read::<f32>(sum.view())? == x);
    gpu.synchronise()?;

    // Tools that watch every call report a refused one as an error.
    if !checks.small {
        let refused = gpu.empty(1 << 50, DType::F32).err();
        checks.verify(|| format!("2^50 numbers: {refused:?}"), matches!(refused, Some(CudaError::OutOfMemory { .. })));
    }
    Ok(())
}

/// Draws of classes: those of the CPU's reference.
pub(crate) fn sample(checks: &mut Checks<'_>) -> Result<()> {
    for (rows, classes, padding) in [(1, 1, 0), (7, 3, 2), (33, 129, 7), (129, 1000, 0), (5, 30_522, 6)] {
        draws::<f32>(checks, rows, classes, padding)?;
        draws::<bf16>(checks, rows, classes, padding)?;
    }
    Ok(())
}

fn draws<E: Number>(checks: &mut Checks<'_>, rows: usize, classes: usize, padding: usize) -> Result<()> {
    let columns = classes + padding;
    let mut logits = numbers::<E>(1, rows * columns);
    for row in logits.chunks_mut(columns) {
        row[classes..].fill(E::nan());
    }
    // Each row of logits belongs to a token; the last to none.
    let tokens = places(2 * rows + 1);
    let mut own: Vec<u32> = (0..rows as u32).map(|i| 2 * i + 1).collect();
    if rows > 1 {
        own[rows - 1] = rows::NOWHERE;
    }
    let (glogits, gtokens, gown) = (checks.up(&logits)?, checks.up_places(&tokens)?, checks.up(&own)?);
    for temperature in [1.0, 0.3, 4.0] {
        let sampler = Sampler { seed: 77, step: 3, site: 5, temperature };
        let out = checks.up(&vec![u32::MAX; rows])?;
        let (x, to, step) = (glogits.view(), out.view(), checks.up(&[3_u32])?);
        // The step's number from the host, or from the device as a recorded pass reads it; there also with what is never drawn.
        let from_device = temperature != 1.0;
        let never = indices(2, rows, classes);
        let gnever = checks.up(&never)?;
        let (step, gnever) = match from_device {
            true => (Step::At(step.view()), Some(gnever.view())),
            false => (Step::Value(3), None),
        };
        kernels::sample(checks.gpu, &sampler, step, x, columns, classes, gtokens.view(), gown.view(), gnever, to)?;
        let got = checks.gpu.read::<u32>(out.view())?;
        let expected = |i: usize| match own[i] {
            rows::NOWHERE => 0,
            token => {
                let logits = exact(&logits[i * columns..][..classes]);
                let never = from_device.then_some(never[i]);
                sample_reference::sample(&sampler, tokens[token as usize], &logits, never) as u32
            }
        };
        let wrong = (0..rows).filter(|i| got[*i] != expected(*i)).count();
        checks.verify(|| format!("{wrong} of {rows} draws of {classes} classes, {:?}", E::DTYPE), wrong == 0);
    }
    Ok(())
}

/// Replaced tokens: those of the CPU's reference, bit by bit.
pub(crate) fn replace(checks: &mut Checks<'_>) -> Result<()> {
    for (tokens, every) in [(1, 1), (7, 2), (257, 3), (1000, 7), (40_000, 6)] {
        let ids = indices(1, tokens, 50);
        let mut own: Vec<u32> = (0..tokens as u32).filter(|t| t.is_multiple_of(every)).collect();
        own.push(rows::NOWHERE);
        let drawn = indices(2, own.len(), 50);
        let (gids, gown, gdrawn) = (checks.up(&ids)?, checks.up(&own)?, checks.up(&drawn)?);
        let (out, labels) = (checks.up(&vec![u32::MAX; tokens])?, checks.up(&vec![f32::NAN; tokens])?);
        replacing::replace(checks.gpu, gids.view(), gown.view(), gdrawn.view(), out.view(), labels.view())?;
        let (expected, expected_labels) = replace_reference::replace(&ids, &own, &drawn);
        checks.verify(|| format!("ids of {tokens} tokens"), checks.gpu.read::<u32>(out.view())? == expected);
        let got = checks.gpu.read::<f32>(labels.view())?;
        checks.verify(|| format!("labels of {tokens} tokens"), got == expected_labels);

        let (logits, weights) = (numbers::<f32>(3, tokens), weights(tokens));
        let (glogits, gweights) = (checks.up(&logits)?, checks.up(&weights)?);
        let counts = checks.up(&[0_u32; 3])?;
        replacing::found(checks.gpu, glogits.view(), labels.view(), gweights.view(), counts.view())?;
        let found = replace_reference::found(&logits, &expected_labels, &weights);
        let got = checks.gpu.read::<u32>(counts.view())?;
        checks.verify(|| format!("{got:?} for {found:?}"), got == [found.replaced, found.said, found.both]);
    }
    Ok(())
}

/// Every fourth row has the weight 0.
fn weights(rows: usize) -> Vec<f32> {
    (0..rows).map(|p| [1.0, 0.5, 0.0, 2.0][p % 4]).collect()
}

/// Answers of 0 and 1, and some between.
fn answers(n: usize) -> Vec<f32> {
    (0..n).map(|i| [0.0, 1.0, 0.25][i % 3]).collect()
}

pub(crate) fn cross_entropy(checks: &mut Checks<'_>) -> Result<()> {
    let mut shapes =
        vec![(129, 17, 2, 1.0), (2, 5011, 45, 3.0), (5, 40, 2, 300.0), (3, 30_522, 6, 2.0), (2, 15_000, 8, 2.0)];
    for rows in [1, 7, 33] {
        shapes.extend([(1, 0), (2, 1), (3, 0), (24, 8), (128, 0), (293, 7), (1100, 4)].map(|(c, p)| (rows, c, p, 1.0)));
    }
    shapes.extend([(3, 4000, 96, 2.0), (3, 8000, 192, 2.0), (2, 32_768, 0, 2.0), (2, 119_547, 5, 2.0)]);
    for (rows, classes, padding, stretch) in shapes {
        for smoothing in [0.0, 0.1] {
            softmax_loss::<f32>(checks, rows, classes, padding, stretch, smoothing)?;
            softmax_loss::<bf16>(checks, rows, classes, padding, stretch, smoothing)?;
        }
    }
    not_finite(checks, 70)?;
    not_finite(checks, 4096)
}

fn softmax_loss<E: Number>(
    checks: &mut Checks<'_>,
    rows: usize,
    classes: usize,
    padding: usize,
    stretch: f32,
    smoothing: f32,
) -> Result<()> {
    let what = format!("cross_entropy {rows}×{classes}+{padding}, smoothing {smoothing}");
    let columns = classes + padding;
    let mut logits: Vec<E> = numbers::<f32>(1, rows * columns).iter().map(|x| E::from_f32(x * stretch)).collect();
    // Whatever padding holds must not matter.
    for row in logits.chunks_mut(columns) {
        row[classes..].fill(E::nan());
    }
    let targets = indices(3, rows, classes);
    let gtargets = checks.up(&targets)?;
    let device_scale = checks.up(&[0.3f32])?;
    for weights in [None, Some(weights(rows))] {
        let exact_weights = weights.as_ref().map_or(vec![1.0; rows], |w| exact(w));
        let (loss, terms, gradient) = reference::smoothed_cross_entropy(
            &exact(&logits),
            columns,
            classes,
            &targets,
            &exact_weights,
            f64::from(smoothing),
            f64::from(0.3f32),
        );
        let gweights = weights.as_ref().map(|w| checks.up(w)).transpose()?;
        for (want_gradient, scale) in [(false, Scalar::Value(0.3)), (true, Scalar::At(device_scale.view()))] {
            let (x, losses, total) = (checks.out(&logits)?, checks.poisoned::<f32>(rows)?, scalar(checks.gpu)?);
            let to = Total { loss: total.view(), add: false };
            let weights = gweights.as_ref().map(Buffer::view);
            let (targets, losses_view) = (gtargets.view(), losses.view());
            kernels::cross_entropy(
                checks.gpu,
                x.view(),
                columns,
                classes,
                targets,
                weights,
                smoothing,
                scale,
                want_gradient,
                losses_view,
                to,
            )?;
            checks.loss(&what, &total, loss)?;
            checks.close::<f32>(&format!("losses of {what}"), &losses, &terms)?;
            if want_gradient {
                checks.close::<E>(&format!("gradient of {what}"), &x, &gradient)?;
            } else {
                let same = checks.read::<E>(&what, &x)?.iter().zip(&logits).all(|(x, l)| x == l || x.is_nan());
                checks.verify(|| format!("{what}: logits changed without need"), same);
            }
        }
    }
    let gx = checks.up(&logits)?;
    let out = checks.poisoned::<f32>(rows * classes)?;
    kernels::softmax(checks.gpu, gx.view(), columns, classes, out.view())?;
    checks.close::<f32>(&format!("softmax of {what}"), &out, &reference::softmax(&exact(&logits), columns, classes))?;
    kernels::log_softmax(checks.gpu, gx.view(), columns, classes, out.view())?;
    checks.close::<f32>(
        &format!("log_softmax of {what}"),
        &out,
        &reference::log_softmax(&exact(&logits), columns, classes),
    )
}

/// A logit that is no number spoils its row, unless nobody counts it.
fn not_finite(checks: &mut Checks<'_>, columns: usize) -> Result<()> {
    let gtargets = checks.up(&[1u32, 2, 3])?;
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for place in [0, 17, 63, 69] {
            let mut logits = numbers::<f32>(1, 3 * columns);
            logits[columns + place] = bad;
            let gx = checks.up(&logits)?;
            let out = checks.poisoned::<f32>(3 * columns)?;
            kernels::softmax(checks.gpu, gx.view(), columns, columns, out.view())?;
            let got = checks.gpu.read::<f32>(out.view())?;
            let spoilt = got[columns..2 * columns].iter().all(|x| x.is_nan()) && got[0].is_finite();
            checks.verify(|| format!("softmax of {bad} at {place}"), spoilt);
            for (weights, spoils) in [(None, true), (Some([1.0f32, 0.0, 1.0]), false)] {
                let gweights = weights.map(|w| checks.up(&w)).transpose()?;
                let (x, losses, total) = (checks.out(&logits)?, checks.poisoned::<f32>(3)?, scalar(checks.gpu)?);
                kernels::cross_entropy(
                    checks.gpu,
                    x.view(),
                    columns,
                    columns,
                    gtargets.view(),
                    gweights.as_ref().map(Buffer::view),
                    0.0,
                    Scalar::Value(1.0),
                    true,
                    losses.view(),
                    Total { loss: total.view(), add: false },
                )?;
                let (loss, gradient) = (checks.gpu.read::<f32>(total.view())?[0], checks.gpu.read::<f32>(x.view())?);
                let good = if spoils {
                    loss.is_nan() && gradient[columns..2 * columns].iter().all(|x| x.is_nan())
                } else {
                    loss.is_finite() && gradient.iter().all(|x| x.is_finite())
                };
                checks.verify(|| format!("cross_entropy of {bad} at {place} of {columns}, spoils {spoils}"), good);
            }
        }
    }
    Ok(())
}

pub(crate) fn heads(checks: &mut Checks<'_>) -> Result<()> {
    for n in [1, 7, 66, 4096, 9001] {
        element_losses::<f32>(checks, n)?;
        element_losses::<bf16>(checks, n)?;
    }
    spans::<f32>(checks)?;
    spans::<bf16>(checks)?;
    likeliest::<f32>(checks)?;
    likeliest::<bf16>(checks)?;
    hits(checks)
}

/// Sums of exponentials and the largest numbers of rows: ties, padding that must not count, rows with what is not finite.
fn likeliest<E: Number>(checks: &mut Checks<'_>) -> Result<()> {
    for (rows, classes, columns) in [(1, 1, 1), (3, 7, 8), (2, 33, 40), (5, 1000, 1001), (2, 50_257, 50_264)] {
        let mut x = numbers::<E>(3, rows * columns);
        for row in x.chunks_mut(columns) {
            // Beyond the classes stands the largest, and among them two are equal.
            row[classes..].fill(E::from_f32(100.0));
            row[classes / 2] = E::from_f32(9.0);
            row[classes - 1] = E::from_f32(9.0);
        }
        let bad = rows > 2;
        if bad {
            x[2 * columns] = E::from_f32(f32::NAN);
            x[columns] = E::from_f32(f32::INFINITY);
        }
        let logits = checks.up(&x)?;
        let found = [DType::F32, DType::F32, DType::U32].map(|dtype| checks.gpu.empty(rows, dtype));
        let [sums, values, places] = found;
        let (sums, values, places) = (sums?, values?, places?);
        kernels::likeliest(checks.gpu, logits.view(), columns, classes, [sums.view(), values.view(), places.view()])?;
        let sums = checks.gpu.read::<f32>(sums.view())?;
        let (values, places) = (checks.gpu.read::<f32>(values.view())?, checks.gpu.read::<u32>(places.view())?);
        let expected = reference::log_sums(&exact(&x), columns, classes);
        for r in 0..rows {
            if bad && (r == 1 || r == 2) {
                checks.verify(|| format!("likeliest: the sum of row {r} is {}", sums[r]), !sums[r].is_finite());
                continue;
            }
            let near = (f64::from(sums[r]) - expected[r]).abs() <= 1e-5 * expected[r].abs().max(1.0);
            checks.verify(|| format!("likeliest: the sum of row {r} is {} instead of {}", sums[r], expected[r]), near);
            let right = values[r] == 9.0 && places[r] as usize == classes / 2;
            checks.verify(|| format!("likeliest: {} at {} of row {r} of {classes}", values[r], places[r]), right);
        }
    }
    Ok(())
}

fn element_losses<E: Number>(checks: &mut Checks<'_>, n: usize) -> Result<()> {
    let (x, answers, weights) = (numbers::<E>(2, n), answers(n), weights(n));
    let (ganswers, gweights) = (checks.up(&answers)?, checks.up(&weights)?);
    let scale = f64::from(0.3f32);
    let squared = reference::mean_squared_error(&exact(&x), &exact(&answers), scale);
    let binary = |weights: &[f64]| reference::binary_cross_entropy(&exact(&x), &exact(&answers), weights, scale);
    for (what, weights, (loss, gradient)) in [
        ("mean_squared_error", None, squared),
        ("binary_cross_entropy", None, binary(&vec![1.0; n])),
        ("binary_cross_entropy with weights", Some(&gweights), binary(&exact(&weights))),
    ] {
        for want_gradient in [false, true] {
            let (after, total) = (checks.out(&x)?, checks.up(&[1.0f32])?);
            let to = Total { loss: total.view(), add: true };
            let (gpu, logits, answers, scale) = (checks.gpu, after.view(), ganswers.view(), Scalar::Value(0.3));
            match what {
                "mean_squared_error" => kernels::mean_squared_error(gpu, logits, answers, scale, want_gradient, to)?,
                _ => {
                    let weights = weights.map(|weights| weights.view());
                    kernels::binary_cross_entropy(gpu, logits, answers, weights, scale, want_gradient, to)?;
                }
            }
            checks.loss(&format!("{what} of {n}"), &total, loss + 1.0)?;
            let expected = if want_gradient { &gradient } else { &exact(&x) };
            checks.close::<E>(&format!("{what} of {n}, gradient {want_gradient}"), &after, expected)?;
        }
    }
    Ok(())
}

fn spans<E: Number>(checks: &mut Checks<'_>) -> Result<()> {
    let offsets: [u32; 5] = [0, 1, 8, 41, 400];
    let targets: [[u32; 2]; 4] = [[0, 0], [2, 6], [32, 0], [300, 358]];
    let weights: [[f32; 2]; 4] = [[1.0, 0.5], [0.0, 1.0], [1.0, 1.0], [2.0, 1.0]];
    let logits = numbers::<E>(1, 800);
    let (loss, gradient) =
        span_reference::loss(&exact(&logits), &offsets, &targets, &weights.map(|w| w.map(f64::from)), 0.25);
    let (goffsets, gtargets) = (checks.up(&offsets)?, checks.up(targets.as_flattened())?);
    let gweights = checks.up(weights.as_flattened())?;
    for want_gradient in [false, true] {
        let (x, total) = (checks.out(&logits)?, scalar(checks.gpu)?);
        let to = Total { loss: total.view(), add: false };
        let (offsets, targets, weights) = (goffsets.view(), gtargets.view(), gweights.view());
        let scale = Scalar::Value(0.25);
        kernels::span_cross_entropy(checks.gpu, x.view(), offsets, targets, weights, scale, want_gradient, to)?;
        checks.loss("span", &total, loss)?;
        let expected = if want_gradient { gradient.clone() } else { exact(&logits) };
        checks.close::<E>("gradient of span", &x, &expected)?;
    }
    Ok(())
}

fn hits(checks: &mut Checks<'_>) -> Result<()> {
    let logits = [
        [1.0, 3.0, 3.0, 9.0],
        [1.0, 3.0, 3.0, 9.0],
        [-5.0, -6.0, -7.0, 9.0],
        [-5.0, -6.0, -7.0, 9.0],
        [1.0, f32::NAN, 0.0, 9.0],
        [2.0, 1.0, 1.0, 9.0],
    ];
    let gx = checks.up(logits.as_flattened())?;
    let count = |checks: &Checks<'_>, targets: &[u32], weights: Option<&[f32]>| -> Result<(Vec<u32>, u32)> {
        let (gtargets, hits) = (checks.up(targets)?, checks.gpu.empty(targets.len(), DType::U32)?);
        let gweights = weights.map(|w| checks.up(w)).transpose()?;
        let total = checks.up(&[0u32])?;
        let (x, weights) = (gx.view().part(0, 4 * targets.len()), gweights.as_ref().map(Buffer::view));
        let (hits_to, count_to) = (Some(hits.view()), Some(total.view()));
        kernels::hits(checks.gpu, x, 4, 3, gtargets.view(), weights, hits_to, count_to)?;
        Ok((checks.gpu.read::<u32>(hits.view())?, checks.gpu.read::<u32>(total.view())?[0]))
    };
    let (each, all) = count(checks, &[1, 2, 0, 1, 0, 0], None)?;
    checks.verify(|| format!("hits: {each:?}, {all}"), each == [1, 0, 1, 0, 0, 1] && all == 3);
    let (_, some) = count(checks, &[1, 2, 0, 1, 0, 0], Some(&[1.0, 1.0, 0.0, 1.0, 1.0, 0.1]))?;
    checks.verify(|| format!("weighted hits: {some}"), some == 2);
    let (_, some) = count(checks, &[0, 1, 3], None)?;
    checks.verify(|| format!("hits of targets that are no class: {some}"), some == 1);
    for classes in [1003, 30_522] {
        for top in [0, 1, 63, 64, 99, 100, 1002] {
            let mut row = numbers::<f32>(1, classes);
            row[top as usize] = 50.0;
            let gx = checks.up(&row)?;
            for (target, expected) in [(top, 1), (top ^ 2, 0)] {
                let (gtarget, total) = (checks.up(&[target])?, checks.up(&[0u32])?);
                let count = Some(total.view());
                kernels::hits(checks.gpu, gx.view(), classes, classes, gtarget.view(), None, None, count)?;
                let got = checks.gpu.read::<u32>(total.view())?[0];
                checks.verify(|| format!("hit of {target} where {top} is the largest: {got}"), got == expected);
            }
        }
    }
    Ok(())
}

const SETTINGS: Settings = Settings {
    learning_rate: 0.1,
    beta1: 0.9,
    beta2: 0.999,
    epsilon: 1e-6,
    weight_decay: 0.3,
    bias_correction: None,
    gradient_scale: 0.7,
};

fn rule() -> Rule {
    let Settings { beta1, beta2, epsilon, weight_decay, .. } = SETTINGS;
    Rule { beta1, beta2, epsilon, weight_decay }
}

fn segment(start: usize, len: usize, decay: bool, rate: f32) -> Segment {
    Segment { start, len, decay, rate }
}

/// Out of order, with gaps before, between and behind; one longer than a chunk, one empty, some not aligned.
fn segments() -> (Vec<Segment>, usize) {
    let segments = vec![
        segment(400, 17_001, true, 1.0),
        segment(3, 1, false, 1.0),
        segment(8, 24, true, 0.5),
        segment(32, 300, false, 2.0),
        segment(341, 33, true, 1.0),
        segment(380, 0, true, 1.0),
    ];
    (segments, 17_410)
}

type Kernel = fn(&Gpu, &Plan, View<'_>, View<'_>, View<'_>, View<'_>, View<'_>, Option<View<'_>>) -> Result<()>;
type Reference = fn(&mut [f64], &[f64], &mut [f64], &mut [f64], &[Segment], &Settings);

pub(crate) fn optimizer(checks: &mut Checks<'_>) -> Result<()> {
    for (corrected, with_copy) in [(true, true), (false, false)] {
        for clip in [None, Some(3.0)] {
            steps(checks, "adamw", optimizers::adamw, optimizer_reference::adamw, corrected, with_copy, clip)?;
            let (kernel, reference): (Kernel, Reference) =
                (optimizers::stable_adamw, optimizer_reference::stable_adamw);
            steps(checks, "stable_adamw", kernel, reference, corrected, with_copy, clip)?;
            steps(checks, "lamb", optimizers::lamb, optimizer_reference::lamb, corrected, with_copy, clip)?;
            // These keep fewer moments, or none; Adagrad's sums stand where the second one does.
            let kernel: Kernel =
                |gpu, plan, p, g, _, a, factors, copy| optimizers::adagrad(gpu, plan, p, g, a, factors, copy);
            let reference: Reference =
                |p, g, _, a, segments, settings| optimizer_reference::adagrad(p, g, a, segments, settings);
            steps(checks, "adagrad", kernel, reference, corrected, with_copy, clip)?;
            let kernel: Kernel = |gpu, plan, p, g, _, _, factors, copy| optimizers::sgd(gpu, plan, p, g, factors, copy);
            let reference: Reference =
                |p, g, _, _, segments, settings| optimizer_reference::sgd(p, g, segments, settings);
            steps(checks, "sgd", kernel, reference, corrected, with_copy, clip)?;
        }
    }
    skipped(checks)
}

/// Three steps.
fn steps(
    checks: &mut Checks<'_>,
    what: &str,
    kernel: Kernel,
    reference: Reference,
    corrected: bool,
    with_copy: bool,
    clip: Option<f64>,
) -> Result<()> {
    let gpu = checks.gpu;
    let (segments, len) = segments();
    let plan = Plan::new(gpu, rule(), &segments, len)?;
    let inside = |i: usize| segments.iter().any(|s| (s.start..s.start + s.len).contains(&i));
    // Padding of parameters and moments holds NaN: what is read of it spoils the rest, and what is written to it shows.
    let spoil = |mut x: Vec<f32>| {
        (0..len).filter(|i| !inside(*i)).for_each(|i| x[i] = f32::NAN);
        x
    };
    let mut p = spoil(numbers(1, len));
    // One tensor starts at zero, where LAMB has no trust ratio.
    p[341..374].fill(0.0);
    let zeros = spoil(vec![0.0; len]);
    let (mut ep, mut em, mut ev) = (exact(&p), exact(&zeros), exact(&zeros));
    let (gp, gm, gv) = (checks.out(&p)?, checks.out(&zeros)?, checks.out(&zeros)?);
    let copy = checks.poisoned::<bf16>(len)?;
    let (squares, factors) = (gpu.empty(1, DType::F64)?, gpu.empty(FACTORS, DType::F32)?);
    for step in 1..=3 {
        // The norm is that of all gradients, so their padding must be zero.
        let mut g: Vec<f32> = numbers(1 + step, len);
        (0..len).filter(|i| !inside(*i)).for_each(|i| g[i] = 0.0);
        let norm = exact(&g).iter().map(|g| g * g).sum::<f64>().sqrt() * SETTINGS.gradient_scale;
        let scale = SETTINGS.gradient_scale * clip.map_or(1.0, |most| (most / (norm + 1e-6)).min(1.0));
        let bias_correction = corrected.then_some(step);
        let settings = Settings { bias_correction, gradient_scale: scale, ..SETTINGS };
        reference(&mut ep, &exact(&g), &mut em, &mut ev, &segments, &settings);

        let control = Control {
            learning_rate: SETTINGS.learning_rate,
            bias_correction,
            clip,
            gradient_scale: SETTINGS.gradient_scale,
        };
        let (gg, control) = (checks.up(&g)?, checks.up(&control.numbers())?);
        reduce::sum_of_squares(gpu, gg.view(), squares.view())?;
        optimizers::prepare(gpu, &rule(), control.view(), Some(squares.view()), factors.view())?;
        let copy = with_copy.then(|| copy.view());
        kernel(gpu, &plan, gp.view(), gg.view(), gm.view(), gv.view(), factors.view(), copy)?;
        let told = f64::from(gpu.read::<f32>(factors.view())?[NORM]);
        checks.verify(|| format!("{what}: norm {told} for {norm}"), error(&[told], &[norm]) < 1e-6);
    }
    for (name, out, expected) in [("parameters", &gp, &ep), ("m", &gm, &em), ("v", &gv, &ev)] {
        let got = checks.read::<f32>(what, out)?;
        for s in &segments {
            let range = s.start..s.start + s.len;
            let error = error(&exact(&got[range.clone()]), &expected[range]);
            checks.worst[0] = checks.worst[0].max(error);
            let bound = tolerance::<f32>();
            checks
                .verify(|| format!("{what}, {name} of the segment at {}: error {error:.2e}", s.start), error <= bound);
        }
        let untouched = (0..len).all(|i| inside(i) || got[i].is_nan());
        checks.verify(|| format!("{what}, {name}: padding was touched"), untouched);
    }
    let (p, copy) = (checks.read::<f32>(what, &gp)?, checks.read::<bf16>(what, &copy)?);
    let good = |i: usize| if with_copy && inside(i) { copy[i] == bf16::from_f32(p[i]) } else { copy[i].is_nan() };
    checks.verify(|| format!("{what}: the bf16 copy"), (0..len).all(good));
    Ok(())
}

/// An update whose buffers are divided among several, each with a part, gives the bits of one; and what they have of a part is added in
/// the tree over their numbers.
pub(crate) fn shards(checks: &mut Checks<'_>) -> Result<()> {
    let gpu = checks.gpu;
    let segments = [
        segment(0, 100, true, 1.0),
        segment(112, 40_000, true, 0.5),
        segment(40_112, 7, false, 1.0),
        segment(50_000, 9_000, true, 2.0),
    ];
    let len = 59_008;
    let (p, mut g) = (numbers::<f32>(1, len), numbers::<f32>(2, len));
    // Nothing is known of what lies between.
    (0..len).filter(|i| !segments.iter().any(|s| (s.start..s.start + s.len).contains(i))).for_each(|i| g[i] = 0.0);
    let (gg, control) = (
        checks.up(&g)?,
        Control { learning_rate: 0.1, bias_correction: Some(1), clip: Some(1.0), gradient_scale: 1.0 },
    );
    let (control, factors) = (checks.up(&control.numbers())?, gpu.empty(FACTORS, DType::F32)?);
    let (whole, of_parts) = (gpu.empty(1, DType::F64)?, gpu.empty(1, DType::F64)?);
    reduce::sum_of_squares(gpu, gg.view(), whole.view())?;
    optimizers::prepare(gpu, &rule(), control.view(), Some(whole.view()), factors.view())?;
    let chunks = len.div_ceil(CHUNK);
    for ranks in [1, 2, 3, 4] {
        let parts: Vec<std::ops::Range<usize>> = (0..ranks)
            .map(|rank| (rank * chunks / ranks * CHUNK).min(len)..((rank + 1) * chunks / ranks * CHUNK).min(len))
            .collect();
        let squares = checks.up(&vec![f64::NAN; chunks])?;
        for part in &parts {
            let own = squares.view().part(part.start / CHUNK, part.len().div_ceil(CHUNK));
            reduce::squares_of_chunks(gpu, gg.view().part(part.start, part.len()), own)?;
        }
        reduce::add_squares(gpu, squares.view(), of_parts.view())?;
        let same = gpu.read::<f64>(whole.view())? == gpu.read::<f64>(of_parts.view())?;
        checks.verify(|| format!("the norm of {ranks} parts"), same);
        for (what, passes) in
            [("adamw", None), ("lamb", Some(TwoPasses::Lamb)), ("stable_adamw", Some(TwoPasses::StableAdamW))]
        {
            let fresh = |checks: &mut Checks<'_>| -> Result<[Buffer; 3]> {
                Ok([checks.up(&p)?, gpu.zeros(len, DType::F32)?, gpu.zeros(len, DType::F32)?])
            };
            let [p1, m1, v1] = fresh(checks)?;
            let plan = Plan::new(gpu, rule(), &segments, len)?;
            let kernel: Kernel = match passes {
                None => optimizers::adamw,
                Some(TwoPasses::Lamb) => optimizers::lamb,
                Some(TwoPasses::StableAdamW) => optimizers::stable_adamw,
            };
            kernel(gpu, &plan, p1.view(), gg.view(), m1.view(), v1.view(), factors.view(), None)?;
            let [p2, m2, v2] = fresh(checks)?;
            let plans = parts.iter().map(|part| Plan::of_range(gpu, rule(), &segments, len, part.clone()));
            let plans = plans.collect::<Result<Vec<Plan>>>()?;
            let sums = checks.up(&vec![f64::NAN; plan.sums()])?;
            // All first passes, for the second needs the sums of all.
            for pass in 0..2 {
                for (part, plan) in parts.iter().zip(&plans) {
                    let [p, g, m, v] = [&p2, &gg, &m2, &v2].map(|buffer| buffer.view().part(part.start, part.len()));
                    match (passes, pass) {
                        (None, 0) => optimizers::adamw(gpu, plan, p, g, m, v, factors.view(), None)?,
                        (None, _) => {}
                        (Some(passes), 0) => {
                            optimizers::first_pass(gpu, plan, passes, [p, g, m, v], factors.view(), sums.view())?;
                        }
                        (Some(passes), _) => {
                            optimizers::second_pass(gpu, plan, passes, [p, m, v], factors.view(), sums.view(), None)?;
                        }
                    }
                }
            }
            for (name, one, several) in [("parameters", &p1, &p2), ("m", &m1, &m2), ("v", &v1, &v2)] {
                let same = gpu.read::<f32>(one.view())? == gpu.read::<f32>(several.view())?;
                checks.verify(|| format!("{what}: {name} of {ranks} parts"), same);
            }
            let changed = gpu.read::<f32>(p1.view())? != p;
            checks.verify(|| format!("{what} changes nothing"), changed);
        }
    }
    for size in [1, 2, 3, 4, 5, 8, 11] {
        let n = 700;
        let all: Vec<Vec<f32>> = (0..size).map(|rank| numbers::<f32>(rank as u64, n)).collect();
        // ((0+1)+(2+3))+…, as `PartSums` does.
        let mut waiting: Vec<Vec<f32>> = Vec::new();
        for (rank, own) in all.iter().enumerate() {
            let mut sum = own.clone();
            for _ in 0..rank.trailing_ones() {
                let earlier = waiting.pop().unwrap_or_default();
                sum = earlier.iter().zip(&sum).map(|(a, b)| a + b).collect();
            }
            waiting.push(sum);
        }
        let mut expected = waiting.pop().unwrap_or_default();
        while let Some(earlier) = waiting.pop() {
            expected = earlier.iter().zip(&expected).map(|(a, b)| a + b).collect();
        }
        for rank in [0, size / 2, size - 1] {
            let others: Vec<f32> =
                (0..size).filter(|other| *other != rank).flat_map(|other| all[other].iter().copied()).collect();
            let (own, received) = (checks.up(&all[rank])?, checks.up(if size > 1 { &others } else { &all[0] })?);
            let received = received.view().part(0, n * (size - 1));
            reduce::add_shards(gpu, own.view(), received, rank, size)?;
            let got = gpu.read::<f32>(own.view())?;
            checks.verify(|| format!("shards of {size} ranks, added by rank {rank}"), got == expected);
        }
    }
    Ok(())
}

/// Gradients that are not finite change nothing.
fn skipped(checks: &mut Checks<'_>) -> Result<()> {
    let gpu = checks.gpu;
    let plan = Plan::new(gpu, rule(), &[segment(0, 1000, true, 1.0)], 1000)?;
    let (p, m) = (numbers::<f32>(1, 1000), numbers::<f32>(2, 1000));
    let mut g = numbers::<f32>(3, 1000);
    g[777] = f32::INFINITY;
    let control = Control { learning_rate: 0.1, bias_correction: Some(1), clip: Some(1.0), gradient_scale: 1.0 };
    let (control, gg) = (checks.up(&control.numbers())?, checks.up(&g)?);
    let (squares, factors) = (gpu.empty(1, DType::F64)?, gpu.empty(FACTORS, DType::F32)?);
    for (what, kernel) in [("adamw", optimizers::adamw as Kernel), ("lamb", optimizers::lamb as Kernel)] {
        let (gp, gm, gv) = (checks.up(&p)?, checks.up(&m)?, checks.up(&m)?);
        reduce::sum_of_squares(gpu, gg.view(), squares.view())?;
        optimizers::prepare(gpu, &rule(), control.view(), Some(squares.view()), factors.view())?;
        kernel(gpu, &plan, gp.view(), gg.view(), gm.view(), gv.view(), factors.view(), None)?;
        let same =
            gpu.read::<f32>(gp.view())? == p && gpu.read::<f32>(gm.view())? == m && gpu.read::<f32>(gv.view())? == m;
        checks.verify(|| format!("{what}: an infinite gradient changed something"), same);
    }
    Ok(())
}

/// A bad index gives NaN where it stood, an error when asked, and nothing else.
pub(crate) fn faults(checks: &mut Checks<'_>) -> Result<()> {
    let gpu = checks.gpu;
    gpu.check_faults()?;
    let h = 16;
    let (table, ids) = (checks.up(&numbers::<f32>(1, 5 * h))?, checks.up(&[1u32, 5, 4])?);
    let told = |checks: &mut Checks<'_>, operation: &str| {
        let error = checks.gpu.check_faults().err();
        let named = matches!(&error, Some(CudaError::Index { operation: o }) if *o == operation);
        checks.verify(|| format!("{operation}: {error:?}"), named);
        let gone = checks.gpu.check_faults().is_ok();
        checks.verify(|| format!("{operation}: told twice"), gone);
    };
    let out = checks.poisoned::<f32>(3 * h)?;
    let lookup = embedding::Lookup { ids: ids.view(), table: table.view() };
    embedding::forward(gpu, &[lookup], h, out.view())?;
    told(checks, "embedding");
    let got = checks.read::<f32>("embedding", &out)?;
    checks.verify(|| "embedding: NaN in the wrong place".into(), (0..3 * h).all(|i| got[i].is_nan() == (i / h == 1)));

    rows::gather(gpu, table.view(), h, ids.view(), out.view())?;
    told(checks, "gather");
    let dx = checks.out(&vec![0.0f32; 5 * h])?;
    let dy = checks.up(&numbers::<f32>(2, 3 * h))?;
    rows::scatter_distinct(gpu, dy.view(), h, ids.view(), dx.view(), false)?;
    told(checks, "scatter_add");
    let (keys, order) = (gpu.empty(3, DType::U32)?, gpu.empty(3, DType::U32)?);
    let sorted = rows::Sorted { keys: keys.view(), order: order.view() };
    rows::sort(gpu, ids.view(), 5, sorted)?;
    rows::scatter_add(gpu, dy.view(), h, sorted, dx.view(), false)?;
    told(checks, "scatter_add");
    let _ = checks.read::<f32>("scatter_add", &dx)?;

    let (logits, losses, total) = (checks.out(&numbers::<f32>(1, 12))?, checks.poisoned::<f32>(3)?, scalar(gpu)?);
    let targets = checks.up(&[1u32, 4, 0])?;
    let to = Total { loss: total.view(), add: false };
    let (x, t) = (logits.view(), targets.view());
    kernels::cross_entropy(gpu, x, 4, 4, t, None, 0.0, Scalar::Value(1.0), true, losses.view(), to)?;
    told(checks, "cross_entropy");
    let got = checks.read::<f32>("losses", &losses)?;
    checks.verify(|| format!("losses with a bad target: {got:?}"), (0..3).all(|i| got[i].is_nan() == (i == 1)));
    checks.verify(|| "its loss".into(), gpu.read::<f32>(total.view())?[0].is_nan());
    Ok(())
}

/// A step of dropout, norm and optimizer, recorded once, played with other numbers in device memory: the same bits as the
/// same calls one by one.
pub(crate) fn graph(checks: &mut Checks<'_>) -> Result<()> {
    let gpu = checks.gpu;
    let (n, h) = (64 * 48, 48);
    let plan = Plan::new(gpu, rule(), &[segment(0, n, true, 1.0)], n)?;
    let places: Vec<RowId> = (0..64).map(|i| RowId { sequence: i / 8, position: i % 8 }).collect();
    let places = checks.up_places(&places)?;
    let (x, p) = (numbers::<f32>(1, n), numbers::<f32>(2, n));
    let (gx, step, control) = (checks.up(&x)?, gpu.upload(&[0u32])?, gpu.upload(&[0.0f64; 4])?);
    let (squares, factors, g) = (gpu.empty(1, DType::F64)?, gpu.empty(FACTORS, DType::F32)?, gpu.empty(n, DType::F32)?);
    let Some(dropout) = Dropout::new(0.3, 9, Step::At(step.view()), 2) else { return Ok(()) };
    let state =
        || -> Result<[Buffer; 3]> { Ok([gpu.upload(&p)?, gpu.zeros(n, DType::F32)?, gpu.zeros(n, DType::F32)?]) };
    let work = |[p, m, v]: &[Buffer; 3]| -> Result<()> {
        gpu.copy(gx.view(), g.view())?;
        rows::drop(gpu, g.view(), h, dropout, places.view())?;
        reduce::sum_of_squares(gpu, g.view(), squares.view())?;
        optimizers::prepare(gpu, &rule(), control.view(), Some(squares.view()), factors.view())?;
        optimizers::adamw(gpu, &plan, p.view(), g.view(), m.view(), v.view(), factors.view(), None)
    };
    let set = |number: u32| -> Result<()> {
        let learning_rate = 0.1 / f64::from(number);
        let (bias_correction, clip) = (Some(u64::from(number)), Some(1.0));
        let now = Control { learning_rate, bias_correction, clip, gradient_scale: 1.0 };
        gpu.write(control.view(), &now.numbers())?;
        gpu.write(step.view(), &[number])
    };
    let plain = state()?;
    for number in 1..=4 {
        set(number)?;
        work(&plain)?;
    }
    let played = state()?;
    let recorded = gpu.capture(|| work(&played))?;
    for number in 1..=4 {
        set(number)?;
        gpu.play(&recorded)?;
    }
    let read = |state: &[Buffer; 3]| -> Result<Vec<u32>> {
        let all = state.iter().map(|b| gpu.read::<f32>(b.view())).collect::<Result<Vec<_>>>()?.concat();
        Ok(all.into_iter().map(f32::to_bits).collect())
    };
    let (a, b) = (read(&plain)?, read(&played)?);
    checks.verify(|| "a graph gives other bits than its calls".into(), a == b);

    // What the last step dropped is what the CPU would drop.
    let Some(on_cpu) = CpuDropout::new(0.3, 9, 4, 2) else { return Ok(()) };
    let got = gpu.read::<f32>(g.view())?;
    let place = |i: usize| RowId { sequence: (i / h) as u32 / 8, position: (i / h) as u32 % 8 };
    let same = (0..n).all(|i| (got[i] != 0.0) == on_cpu.keeps(place(i), h, i % h));
    checks.verify(|| "the step in device memory gives another mask".into(), same);
    Ok(())
}
