//! Adafactor: the reference against `transformers`, then every kernel set against the reference over several steps.

use crate::common::*;
use henson_kernels::bf16;
use henson_kernels::cpu::adafactor::{Moment, Plan, Rule, Settings, adafactor, reference};
use henson_kernels::cpu::cast::to_bf16;
use henson_kernels::cpu::optimizer::Segment;
use henson_kernels::cpu::{Cpu, Isa};

const SETTINGS: Settings = Settings { learning_rate: 0.1, step: 1, weight_decay: 0.2, gradient_scale: 1.0 };

fn segment(start: usize, len: usize, decay: bool, rate: f32) -> Segment {
    Segment { start, len, decay, rate }
}

/// What `Adafactor` of transformers 5.22 made of a matrix of 3×4 and of a vector of 5 in five steps, in f64
/// (tools/golden/adafactor.py), with steps that are relative to the parameters.
const SCALED: [f64; 17] = [
    0.5064048850081448,
    1.245240722818615,
    0.8528815639013175,
    -0.24414277896719358,
    -0.9042993619324611,
    -0.7665595116155325,
    -0.19674301047656334,
    0.3208392384111174,
    0.6853995085773216,
    0.7221713780929802,
    0.2508706179867722,
    -0.57026565847533,
    -0.0002434265939335835,
    -0.00047852822876207323,
    5.3374694038941655e-06,
    0.00042685014135516823,
    0.00024239730532175878,
];

/// The same with steps that are not, and with decay.
const DECAYED: [f64; 17] = [
    0.5230715622309066,
    1.2485655258216835,
    0.7751470657627738,
    -0.35346001967185714,
    -0.8712553287370283,
    -0.5853490757422479,
    -0.06428755480125534,
    0.23822642836131377,
    0.49142299095731645,
    0.6320734747591796,
    0.33702191244471874,
    -0.4356680364836771,
    -0.15197576533772228,
    -0.4132923076725721,
    -0.022738220240073853,
    0.3248385538552928,
    0.14630642611299757,
];

/// The means of rows and columns, and the moment of the vector.
const STATE: [f64; 12] = [
    0.006785122171972625,
    0.012292616760719343,
    0.018355371817169442,
    0.009917480031289576,
    0.011991879145222435,
    0.01342877275974819,
    0.014572682396888345,
    13765.805286080711,
    410.9469315918648,
    15565.838676651536,
    6066.933700303287,
    8880.796908246737,
];

#[test]
fn reference_is_transformers() {
    let segments = [(segment(0, 12, true, 1.0), Some([3, 4])), (segment(12, 5, true, 1.0), None)];
    for (scale_parameter, weight_decay, expected) in [(true, 0.0, SCALED), (false, 0.2, DECAYED)] {
        let rule = Rule { min_side: 1, scale_parameter, ..Rule::default() };
        let plan = Plan::new(rule, &segments, 17);
        let mut p: Vec<f64> =
            (0..17).map(|i| (f64::from(i) * 0.9 + 0.4).sin() * if i < 12 { 1.0 } else { 1e-4 }).collect();
        let mut state = vec![0.0; plan.state_len()];
        for step in 1..=5 {
            let gradient = |i: i32| {
                let wave = (f64::from(i) * 1.3 + f64::from(step) * 0.7).cos() * (0.1 + 0.01 * f64::from(i));
                if i < 12 { wave } else { wave * 4f64.powi(step) }
            };
            let g: Vec<f64> = (0..17).map(gradient).collect();
            let settings = Settings { step: step as u64, weight_decay, ..SETTINGS };
            reference::adafactor(&mut p, &g, &mut state, plan.tensors(), &rule, &settings);
        }
        assert!(p.iter().zip(expected).all(|(p, expected)| (p - expected).abs() < 1e-12), "{p:?}");
        let near = |(found, expected): (&f64, f64)| (found / expected - 1.0).abs() < 1e-10;
        assert!(state.iter().zip(STATE).all(near), "{state:?}");
    }
}

/// Segments, with the sides of those that are matrices.
type Segments = Vec<(Segment, Option<[usize; 2]>)>;

/// Out of order, with gaps: a matrix of more than a chunk, one with more columns than one, one with a side that is too short, odd
/// ones, vectors, an empty one.
fn segments() -> (Segments, usize) {
    let shapes = [
        (Some([130, 257]), true, 1.0),
        (Some([1, 1]), true, 1.0),
        (Some([5, 20_001]), false, 0.5),
        (None, false, 2.0),
        (Some([3, 7]), true, 1.0),
        (Some([1000, 4]), true, 1.0),
        (None, true, 1.0),
    ];
    let lengths = [130 * 257, 1, 5 * 20_001, 17_001, 21, 4000, 0];
    let mut start = 3;
    let mut found = Vec::new();
    for ((sides, decay, rate), len) in shapes.into_iter().zip(lengths) {
        found.push((segment(start, len, decay, rate), sides));
        start += len + 5;
    }
    found.reverse();
    (found, start)
}

/// Three steps; returns what the kernel made of the parameters and the state.
fn check(cpu: &Cpu, rule: Rule, with_copy: bool) -> Vec<Vec<f32>> {
    let (segments, len) = segments();
    let plan = Plan::new(rule, &segments, len);
    let inside = |i: usize| segments.iter().any(|(s, _)| (s.start..s.start + s.len).contains(&i));
    // Padding holds NaN: what is read of it spoils the rest, and what is written to it shows.
    let padding: Vec<usize> = (0..len).filter(|i| !inside(*i)).collect();
    let spoil = |mut x: Vec<f32>| {
        padding.iter().for_each(|i| x[*i] = f32::NAN);
        x
    };
    let (mut p, mut state) = (spoil(numbers(1, len)), vec![0.0; plan.state_len()]);
    let mut copy = with_copy.then(|| poisoned::<bf16>(len));
    let (mut ep, mut es) = (exact(&p), exact(&state));
    for step in 1..=3 {
        let mut g = spoil(numbers::<f32>(1 + step, len));
        // One tensor without a gradient, and one whose gradients grow.
        let (still, growing) = (segments[1].0, segments[3].0);
        g[still.start..still.start + still.len].fill(0.0);
        g[growing.start..growing.start + growing.len].iter_mut().for_each(|g| *g *= 10f32.powi(step as i32));
        let settings = Settings { step, gradient_scale: 0.7, ..SETTINGS };
        adafactor(cpu, &plan, &mut p, &g, &mut state, &settings, copy.as_deref_mut());
        reference::adafactor(&mut ep, &exact(&g), &mut es, plan.tensors(), &rule, &settings);
    }
    for tensor in plan.tensors() {
        let range = tensor.segment.start..tensor.segment.start + tensor.segment.len;
        assert_close("parameters", cpu, &p[range.clone()], &ep[range]);
        let kept = match tensor.moment {
            Moment::Factored { rows, columns } => rows + columns,
            Moment::Whole => tensor.segment.len,
        };
        let range = tensor.state..tensor.state + kept;
        assert_close("state", cpu, &state[range.clone()], &es[range]);
    }
    assert!(padding.iter().all(|i| p[*i].is_nan()), "padding was touched on {cpu:?}");
    if let Some(copy) = copy {
        let mut expected = poisoned::<bf16>(len);
        to_bf16(cpu, &p, &mut expected);
        assert!((0..len).all(|i| copy[i] == expected[i] || !inside(i)), "copy on {cpu:?}");
        assert!(padding.iter().all(|i| copy[*i].is_nan()), "padding of the copy was touched on {cpu:?}");
    }
    vec![p, state]
}

#[test]
fn kernels_match_the_reference() {
    let plain = Rule { min_side: 1, scale_parameter: false, ..Rule::default() };
    for cpu in contexts() {
        check(&cpu, Rule::default(), true);
        check(&cpu, plain, false);
    }
}

#[test]
fn threads_do_not_change_a_bit() {
    let run = |threads| {
        let cpu = Cpu::new(Isa::best(), threads).unwrap();
        let rule = Rule { min_side: 4, ..Rule::default() };
        check(&cpu, rule, true).concat().into_iter().map(f32::to_bits).collect::<Vec<_>>()
    };
    assert_eq!(run(1), run(2));
    assert_eq!(run(1), run(3));
}

/// Of a matrix with sides from 128 on, rows and columns are all that is kept.
#[test]
fn state_is_small() {
    let kept = |rows: usize, columns: usize| {
        let all = [(segment(0, rows * columns, true, 1.0), Some([rows, columns]))];
        Plan::new(Rule::default(), &all, rows * columns).state_len()
    };
    assert_eq!(kept(32_128, 512), 32_128 + 512);
    assert_eq!(kept(128, 128), 256);
    assert_eq!(kept(127, 512), 127 * 512);
}
