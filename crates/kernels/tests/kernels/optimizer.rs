//! Optimizers: the reference against PyTorch's form of the update and against what the papers promise, then every
//! kernel set against the reference over several steps.

use crate::common::*;
use henson_kernels::bf16;
use henson_kernels::cpu::cast::to_bf16;
use henson_kernels::cpu::optimizer::{
    Plan, Segment, Settings, TwoPasses, adagrad, adamw, first_pass, lamb, reference, second_pass, sgd, stable_adamw,
};
use henson_kernels::cpu::reduce::{CHUNK, squares_of_chunks, sum_of_squares};
use henson_kernels::cpu::{Cpu, Isa};

const SETTINGS: Settings = Settings {
    learning_rate: 0.1,
    beta1: 0.9,
    beta2: 0.999,
    epsilon: 1e-6,
    weight_decay: 0.3,
    bias_correction: None,
    gradient_scale: 0.7,
};

fn segment(start: usize, len: usize, decay: bool, rate: f32) -> Segment {
    Segment { start, len, decay, rate }
}

/// Out of order, with gaps before, between and behind; one longer than a chunk, one empty.
fn segments() -> (Vec<Segment>, usize) {
    let segments = vec![
        segment(400, 17_001, true, 1.0),
        segment(3, 1, false, 1.0),
        segment(8, 24, true, 0.5),
        segment(32, 300, false, 2.0),
        segment(340, 33, true, 1.0),
        segment(380, 0, true, 1.0),
    ];
    (segments, 17_410)
}

/// `_single_tensor_adamw` of torch/optim/adamw.py, line by line.
fn torch_adamw(p: &mut f64, g: f64, m: &mut f64, v: &mut f64, settings: &Settings, step: i32) {
    *p *= 1.0 - settings.learning_rate * settings.weight_decay;
    *m += (g - *m) * (1.0 - settings.beta1);
    *v = *v * settings.beta2 + g * g * (1.0 - settings.beta2);
    let step_size = settings.learning_rate / (1.0 - settings.beta1.powi(step));
    let denominator = v.sqrt() / (1.0 - settings.beta2.powi(step)).sqrt() + settings.epsilon;
    *p -= step_size * *m / denominator;
}

#[test]
fn gradient_descent_follows_its_reference() {
    let (segments, len) = segments();
    let (start, g) = (numbers::<f32>(1, len), numbers::<f32>(2, len));
    let mut expected = exact(&start);
    reference::sgd(&mut expected, &exact(&g), &segments, &SETTINGS);
    for cpu in &contexts() {
        let (mut p, mut copy) = (start.clone(), poisoned::<bf16>(len));
        sgd(cpu, &Plan::new(&segments, len), &mut p, &g, &SETTINGS, Some(&mut copy));
        assert_close("parameters", cpu, &p, &expected);
        for Segment { start, len, .. } in &segments {
            let all = *start..start + len;
            let rounded: Vec<bf16> = p[all.clone()].iter().map(|p| bf16::from_f32(*p)).collect();
            assert_eq!(copy[all], rounded);
        }
        assert!(copy[0].is_nan() && p[0] == start[0], "what lies in no segment is not touched");
    }
}

/// Three steps from sums of 1, as ELMo is trained: against the reference, which is `_single_tensor_adagrad` of torch/optim/adagrad.py
/// with TensorFlow's first sums.
#[test]
fn adagrad_follows_its_reference_and_torch() {
    let (segments, len) = segments();
    let (start, mut expected) = (numbers::<f32>(1, len), exact(&numbers::<f32>(1, len)));
    let mut sums = vec![1.0; len];
    let gradients: Vec<Vec<f32>> = (0..3).map(|step| numbers::<f32>(2 + step, len)).collect();
    for g in &gradients {
        reference::adagrad(&mut expected, &exact(g), &mut sums, &segments, &SETTINGS);
    }
    for cpu in &contexts() {
        let (plan, mut p, mut a) = (Plan::new(&segments, len), start.clone(), vec![1.0; len]);
        let mut copy = poisoned::<bf16>(len);
        for g in &gradients {
            adagrad(cpu, &plan, &mut p, g, &mut a, &SETTINGS, Some(&mut copy));
        }
        assert_close("parameters", cpu, &p, &expected);
        assert_close("sums of squares", cpu, &a, &sums);
        for Segment { start, len, .. } in &segments {
            let all = *start..start + len;
            let rounded: Vec<bf16> = p[all.clone()].iter().map(|p| bf16::from_f32(*p)).collect();
            assert_eq!(copy[all], rounded);
        }
        assert!(copy[0].is_nan() && p[0] == start[0] && a[0] == 1.0, "what lies in no segment is not touched");
    }
    let (mut p, mut a) = ([0.8], [1.0]);
    let settings = Settings { gradient_scale: 1.0, weight_decay: 0.0, ..SETTINGS };
    let (mut torch, mut sum) = (0.8, 1.0);
    for step in 1..=10 {
        let g = (f64::from(step) * 1.7).sin();
        reference::adagrad(&mut p, &[g], &mut a, &[segment(0, 1, true, 1.0)], &settings);
        sum += g * g;
        torch += -settings.learning_rate * g / (sum.sqrt() + settings.epsilon);
        assert!((p[0] - torch).abs() < 1e-12, "{} is not {torch}", p[0]);
    }
}

#[test]
fn reference_is_torch_and_the_paper() {
    let all = [segment(0, 1, true, 1.0)];
    let (mut a, mut b) = ([0.8, 0.0, 0.0], [0.8, 0.0, 0.0]);
    for step in 1..=10 {
        let g = (f64::from(step) * 1.7).sin();
        let settings = Settings { bias_correction: Some(step as u64), gradient_scale: 1.0, ..SETTINGS };
        let [p, m, v] = &mut a;
        let each = std::slice::from_mut;
        reference::adamw(each(p), &[g], each(m), each(v), &all, &settings);
        let [p, m, v] = &mut b;
        torch_adamw(p, g, m, v, &settings, step);
        assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-12), "{a:?} is not {b:?}");
    }

    // google-research/bert optimization.py: the first step without correction is (1−β₁)g/(√(1−β₂)|g| + ε) + decay·p.
    let (mut p, mut m, mut v) = ([0.8], [0.0], [0.0]);
    reference::adamw(&mut p, &[2.0], &mut m, &mut v, &all, &Settings { gradient_scale: 1.0, ..SETTINGS });
    let update = 0.1 * 2.0 / (0.001f64.sqrt() * 2.0 + 1e-6) + 0.3 * 0.8;
    assert!((p[0] - (0.8 - 0.1 * update)).abs() < 1e-12);

    // LAMB moves a tensor by the learning rate times its own length, a tensor of zeros or without decay like Adam.
    let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
    let all = [segment(0, 3, true, 1.0), segment(3, 2, true, 1.0), segment(5, 1, false, 1.0)];
    let old = [1.0, -2.0, 2.0, 0.0, 0.0, 4.0];
    let (mut p, g) = (old, [0.3, 0.1, -0.2, 0.5, -0.5, 1.0]);
    let settings = Settings { bias_correction: Some(1), ..SETTINGS };
    reference::lamb(&mut p, &g, &mut [0.0; 6], &mut [0.0; 6], &all, &settings);
    let moved: Vec<f64> = p.iter().zip(&old).map(|(p, old)| p - old).collect();
    assert!((norm(&moved[..3]) - 0.1 * 3.0).abs() < 1e-12, "{moved:?}");
    for (moved, expected) in moved[3..].iter().zip([-0.1, 0.1, -0.1]) {
        assert!((moved - expected).abs() < 1e-6, "{moved} is not {expected}");
    }
}

/// What `StableAdamW` of optimi 0.3.3 made of two tensors in five steps, in f64 (tools/golden/stable_adamw.py): the second one is
/// not decayed, and its gradients grow faster than the second moment follows.
const OPTIMI: [f64; 7] = [
    0.2370050592372223,
    1.253493719201889,
    0.9514235537508358,
    -0.15650170664934004,
    -1.037262069058119,
    -0.7019930378035335,
    -0.7450608368705276,
];

#[test]
fn stable_adamw_is_that_of_optimi() {
    let all = [segment(0, 4, true, 1.0), segment(4, 3, false, 1.0)];
    let mut p: Vec<f64> = (0..7).map(|i| (f64::from(i) * 0.9 + 0.4).sin()).collect();
    let (mut m, mut v) = ([0.0; 7], [0.0; 7]);
    let plain = Settings { beta2: 0.98, gradient_scale: 1.0, ..SETTINGS };
    for step in 1..=5 {
        let gradient = |i: i32| match i {
            0..4 => (f64::from(i) * 1.3 + step as f64 * 0.7).cos() * 0.1,
            _ => (f64::from(i) * 2.1).sin() * 4f64.powi(step),
        };
        let g: Vec<f64> = (0..7).map(gradient).collect();
        let settings = Settings { bias_correction: Some(step as u64), ..plain };
        reference::stable_adamw(&mut p, &g, &mut m, &mut v, &all, &settings);
    }
    assert!(p.iter().zip(OPTIMI).all(|(p, expected)| (p - expected).abs() < 1e-12), "{p:?}");
}

type Kernel = fn(&Cpu, &Plan, &mut [f32], &[f32], &mut [f32], &mut [f32], &Settings, Option<&mut [bf16]>);
type Reference = fn(&mut [f64], &[f64], &mut [f64], &mut [f64], &[Segment], &Settings);

/// Three steps; returns what the kernel made of the parameters and the moments.
fn check(cpu: &Cpu, kernel: Kernel, reference: Reference, corrected: bool, with_copy: bool) -> Vec<Vec<f32>> {
    let (segments, len) = segments();
    let plan = Plan::new(&segments, len);
    let inside = |i: usize| segments.iter().any(|s| (s.start..s.start + s.len).contains(&i));
    // Padding holds NaN: what is read of it spoils the rest, and what is written to it shows.
    let spoil = |mut x: Vec<f32>| {
        (0..len).filter(|i| !inside(*i)).for_each(|i| x[i] = f32::NAN);
        x
    };
    let (mut p, mut m, mut v) = (spoil(numbers(1, len)), spoil(vec![0.0; len]), spoil(vec![0.0; len]));
    // One tensor starts at zero, where LAMB has no trust ratio.
    p[340..373].fill(0.0);
    let mut copy = with_copy.then(|| poisoned::<bf16>(len));
    let (mut ep, mut em, mut ev) = (exact(&p), exact(&m), exact(&v));
    for step in 1..=3 {
        let g = spoil(numbers(1 + step, len));
        let settings = Settings { bias_correction: corrected.then_some(step), ..SETTINGS };
        kernel(cpu, &plan, &mut p, &g, &mut m, &mut v, &settings, copy.as_deref_mut());
        reference(&mut ep, &exact(&g), &mut em, &mut ev, &segments, &settings);
    }
    for (what, got, expected) in [("parameters", &p, &ep), ("m", &m, &em), ("v", &v, &ev)] {
        for s in &segments {
            let range = s.start..s.start + s.len;
            assert_close(what, cpu, &got[range.clone()], &expected[range]);
        }
        assert!((0..len).all(|i| inside(i) || got[i].is_nan()), "{what}: padding was touched on {cpu:?}");
    }
    if let Some(copy) = copy {
        let mut expected = poisoned::<bf16>(len);
        to_bf16(cpu, &p, &mut expected);
        for i in 0..len {
            assert!(if inside(i) { copy[i] == expected[i] } else { copy[i].is_nan() }, "copy at {i} on {cpu:?}");
        }
    }
    vec![p, m, v]
}

#[test]
fn kernels_match_the_reference() {
    for cpu in contexts() {
        for (corrected, with_copy) in [(true, true), (false, false)] {
            check(&cpu, adamw, reference::adamw, corrected, with_copy);
            check(&cpu, lamb, reference::lamb, corrected, with_copy);
            check(&cpu, stable_adamw, reference::stable_adamw, corrected, with_copy);
        }
    }
}

#[test]
fn threads_do_not_change_a_bit() {
    let run = |threads| {
        let cpu = Cpu::new(Isa::best(), threads).unwrap();
        let a = check(&cpu, adamw, reference::adamw, true, true);
        let b = check(&cpu, lamb, reference::lamb, true, true);
        let c = check(&cpu, stable_adamw, reference::stable_adamw, true, true);
        [a, b, c].concat().concat().into_iter().map(f32::to_bits).collect::<Vec<_>>()
    };
    assert_eq!(run(1), run(2));
    assert_eq!(run(1), run(3));
}

#[test]
#[should_panic(expected = "overlap")]
fn overlapping_segments_are_refused() {
    Plan::new(&[segment(10, 5, true, 1.0), segment(0, 11, true, 1.0)], 20);
}

/// A step of one part after the other, with the sums of all in between, is the step of the whole, bit by bit: processes share an
/// update like this.
#[test]
fn parts_of_an_update_are_the_whole() {
    let len = 3 * CHUNK + 700;
    let segments = [
        segment(64, CHUNK + 9, true, 1.0),
        segment(CHUNK + 128, CHUNK, false, 0.5),
        segment(len - 701, 700, true, 2.0),
    ];
    let settings = Settings { bias_correction: Some(3), ..SETTINGS };
    let numbers =
        |seed: usize| -> Vec<f32> { (0..len).map(|i| ((i * 37 + seed * 11) % 101) as f32 / 57.0 - 0.9).collect() };
    let start = || [numbers(1), numbers(3), numbers(4).iter().map(|x| x.abs()).collect()];
    let (g, cpu) = (numbers(2), Cpu::new(Isa::best(), 2).unwrap());
    let whole_plan = Plan::new(&segments, len);
    for rule in [None, Some(TwoPasses::Lamb), Some(TwoPasses::StableAdamW)] {
        let kernel: Kernel = match rule {
            None => adamw,
            Some(TwoPasses::Lamb) => lamb,
            Some(TwoPasses::StableAdamW) => stable_adamw,
        };
        let [mut p, mut m, mut v] = start();
        kernel(&cpu, &whole_plan, &mut p, &g, &mut m, &mut v, &settings, None);
        let whole = [p, m, v];
        for borders in [vec![0, len], vec![0, CHUNK, len], vec![0, CHUNK, CHUNK, 3 * CHUNK, len]] {
            let [mut p, mut m, mut v] = start();
            let ranges: Vec<_> = borders.windows(2).map(|w| w[0]..w[1]).collect();
            let plans: Vec<_> = ranges.iter().map(|range| Plan::of_range(&segments, len, range.clone())).collect();
            let mut sums = vec![f64::NAN; whole_plan.sums()];
            for (plan, range) in plans.iter().zip(&ranges) {
                let (p, g) = (&mut p[range.clone()], &g[range.clone()]);
                let (m, v) = (&mut m[range.clone()], &mut v[range.clone()]);
                match rule {
                    None => adamw(&cpu, plan, p, g, m, v, &settings, None),
                    Some(rule) => first_pass(&cpu, plan, rule, p, g, m, v, &settings, &mut sums),
                }
            }
            for (plan, range) in plans.iter().zip(&ranges) {
                let (p, m, v) = (&mut p[range.clone()], &mut m[range.clone()], &mut v[range.clone()]);
                if let Some(rule) = rule {
                    second_pass(&cpu, plan, rule, p, m, v, &settings, &mut sums, None);
                }
            }
            assert!(whole == [p, m, v], "{rule:?} in {borders:?}");
        }
    }
    let mut sums = vec![0.0; len.div_ceil(CHUNK)];
    let (left, right) = sums.split_at_mut(2);
    squares_of_chunks(&cpu, &g[..2 * CHUNK], left);
    squares_of_chunks(&cpu, &g[2 * CHUNK..], right);
    assert_eq!(sums.iter().sum::<f64>().to_bits(), sum_of_squares(&cpu, &g).to_bits());
}
