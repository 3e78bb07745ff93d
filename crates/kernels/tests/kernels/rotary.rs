//! Rotary positions: finite differences check the reference, the reference checks every kernel set.

use crate::common::*;
use henson_kernels::cpu::rotary::{Pairing, Rotary, reference, rotate};
use henson_kernels::cpu::{Cpu, Element, Isa};

fn positions(t: usize) -> Vec<u32> {
    (0..t as u32).map(|i| i * 37 % 500).collect()
}

#[test]
fn reference_has_the_right_gradients() {
    let (t, d) = (3, 6);
    for pairing in [Pairing::Halves, Pairing::Neighbours] {
        let rotary = Rotary { theta: 100.0, size: 4, pairing };
        let x = exact(&numbers::<f32>(1, t * 2 * d));
        let w = exact(&numbers::<f32>(2, t * 2 * d));
        let gradient = reference::rotate(&rotary, &w, d, &positions(t), true);
        check_gradients("rotary", &[x], &[gradient], |x| {
            weighted(&reference::rotate(&rotary, &x[0], d, &positions(t), false), &w)
        });
    }
}

fn check<E: Element>(cpu: &Cpu, rotary: Rotary, t: usize, heads: usize, d: usize, stride: usize) {
    let (first, width) = (stride - heads * d, heads * d);
    let (x, positions, table) = (numbers::<E>(1, t * stride), positions(t), rotary.table(500));
    for opposite in [false, true] {
        let mut y = x.clone();
        rotate(cpu, &rotary, &table, &positions, &mut y, stride, first..stride, d, opposite);
        let rows: Vec<f64> = x.chunks(stride).flat_map(|row| exact(&row[first..])).collect();
        let rotated = reference::rotate(&rotary, &rows, d, &positions, opposite);
        // What stands before the rotated columns stays as it is.
        let expected: Vec<f64> = x
            .chunks(stride)
            .zip(rotated.chunks(width))
            .flat_map(|(row, rotated)| [&exact(&row[..first])[..], rotated].concat())
            .collect();
        let off = error(&exact(&y), &expected);
        // Angles of some hundreds are rounded to f32.
        assert!(off <= tolerance::<E>().max(1e-4), "{rotary:?}, {t}×{heads}×{d} of {stride}, {cpu:?}: error {off:e}");
    }
}

#[test]
fn kernels_match_the_reference() {
    for pairing in [Pairing::Halves, Pairing::Neighbours] {
        for (size, d) in [(2, 8), (16, 16), (64, 64), (24, 80)] {
            let rotary = Rotary { theta: 10_000.0, size, pairing };
            for t in [1, 7, 33, 129] {
                for_all!(check(rotary, t, 2, d, 2 * d));
            }
            for_all!(check(rotary, 33, 4, d, 6 * d));
        }
    }
    for_all!(check(Rotary { theta: 160_000.0, size: 64, pairing: Pairing::Halves }, 7, 3, 64, 192));
}

#[test]
fn threads_do_not_change_a_bit() {
    let rotary = Rotary { theta: 10_000.0, size: 16, pairing: Pairing::Halves };
    let run = |threads| {
        let cpu = Cpu::new(Isa::best(), threads).unwrap();
        let mut x = numbers::<f32>(1, 300 * 48);
        rotate(&cpu, &rotary, &rotary.table(500), &positions(300), &mut x, 48, 0..32, 16, false);
        x.into_iter().map(f32::to_bits).collect::<Vec<_>>()
    };
    assert_eq!(run(1), run(2));
    assert_eq!(run(1), run(3));
}
