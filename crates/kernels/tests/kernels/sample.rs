//! Draws from softmax distributions: equal to the definition on every kernel set, and distributed as they should be.

use crate::common::*;
use henson_kernels::cpu::dropout::RowId;
use henson_kernels::cpu::loss;
use henson_kernels::cpu::sample::{Sampler, reference, sample};
use henson_kernels::cpu::{Cpu, Element};

fn rows(n: usize) -> Vec<RowId> {
    (0..n as u32).map(|i| RowId { sequence: i / 7, position: i % 7 }).collect()
}

fn check<E: Element>(cpu: &Cpu, p: usize, classes: usize, padding: usize, temperature: f32) {
    let columns = classes + padding;
    let mut logits: Vec<E> = numbers::<f32>(1, p * columns).iter().map(|x| E::from_f32(x * 3.0)).collect();
    for row in logits.chunks_mut(columns) {
        // Padding is never drawn, whatever it holds.
        row[classes..].fill(E::from_f32(1e30));
    }
    let sampler = Sampler { seed: 9, step: 3, site: 5, temperature };
    let (rows, mut out) = (rows(p), vec![u32::MAX; p]);
    // Without, and with a class that would be drawn and may not be.
    let mut never: Option<Vec<u32>> = None;
    for _ in 0..2 {
        sample(cpu, &sampler, &logits, columns, classes, &rows, never.as_deref(), &mut out);
        for (i, out) in out.iter().enumerate() {
            let logits = exact(&logits[i * columns..][..classes]);
            let not_this = never.as_ref().map(|never| never[i]);
            let expected = reference::sample(&sampler, rows[i], &logits, not_this);
            assert_eq!(*out as usize, expected, "row {i} of {classes}, {not_this:?}, {cpu:?}");
            assert!(classes == 1 || not_this != Some(*out));
        }
        never = Some(out.clone());
    }
}

#[test]
fn kernels_match_the_reference() {
    for (p, classes, padding) in [(1, 1, 0), (7, 33, 0), (129, 3, 5), (33, 1000, 24)] {
        for temperature in [1.0, 0.3, 4.0] {
            for_all!(check(p, classes, padding, temperature));
        }
    }
}

#[test]
fn draws_follow_the_softmax() {
    let cpu = Cpu::detect();
    let (classes, n) = (5, 40_000);
    let logits = [1.0f32, -1.0, 0.0, 2.0, -3.0];
    let mut expected = vec![0.0; classes];
    loss::softmax(&cpu, &logits, classes, classes, &mut expected);
    let rows: Vec<RowId> = (0..n as u32).map(|i| RowId { sequence: i, position: 0 }).collect();
    let draw = |step| {
        let mut out = vec![0; n];
        let sampler = Sampler { seed: 1, step, site: 2, temperature: 1.0 };
        sample(&cpu, &sampler, &logits.repeat(n), classes, classes, &rows, None, &mut out);
        out
    };
    let out = draw(1);
    for class in 0..classes {
        let share = out.iter().filter(|c| **c as usize == class).count() as f32 / n as f32;
        // Five standard deviations of the binomial distribution.
        let bound = 5.0 * (expected[class] * (1.0 - expected[class]) / n as f32).sqrt();
        assert!((share - expected[class]).abs() < bound, "class {class}: {share} for {}", expected[class]);
    }
    assert_ne!(out, draw(2));
}

#[test]
fn threads_do_not_change_a_draw() {
    let logits = numbers::<f32>(1, 300 * 50);
    let run = |threads| {
        let cpu = Cpu::new(henson_kernels::cpu::Isa::best(), threads).unwrap();
        let mut out = vec![0; 300];
        let sampler = Sampler { seed: 1, step: 1, site: 2, temperature: 1.0 };
        sample(&cpu, &sampler, &logits, 50, 50, &rows(300), None, &mut out);
        out
    };
    assert_eq!(run(1), run(2));
    assert_eq!(run(1), run(3));
}
