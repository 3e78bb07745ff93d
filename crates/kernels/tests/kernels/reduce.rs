//! Reductions: every kernel set against the reference.

use crate::common::*;
use henson_kernels::cpu::reduce::{all_finite, column_sums, max_abs, reference, sum_of_squares};
use henson_kernels::cpu::{Cpu, Element, Isa};

fn check<E: Element>(cpu: &Cpu, t: usize, h: usize) {
    let x = numbers::<E>(1, t * h);
    let (mut out, mut expected) = (vec![0.5f32; h], vec![0.5; h]);
    column_sums(cpu, &x, &mut out);
    reference::column_sums(&exact(&x), &mut expected);
    // The sums are f32 for either kind of input.
    assert_close("column_sums", cpu, &out, &expected);

    let x = numbers::<f32>(2, t * h);
    let (got, expected) = (sum_of_squares(cpu, &x), reference::sum_of_squares(&exact(&x)));
    assert!((got - expected).abs() <= 1e-6 * expected, "sum_of_squares on {cpu:?}: {got} for {expected}");
    assert_eq!(f64::from(max_abs(cpu, &x)), reference::max_abs(&exact(&x)), "max_abs on {cpu:?}");
    assert!(all_finite(cpu, &x));
}

#[test]
fn kernels_match_the_reference() {
    for t in [0, 1, 7, 33, 129] {
        for h in [1, 3, 24, 128, 300] {
            for_all!(check(t, h));
        }
    }
    for_all!(check(2500, 31));
}

#[test]
fn one_bad_number_is_found_wherever_it_is() {
    let n = 40_007;
    let mut x = numbers::<f32>(1, n);
    for cpu in contexts() {
        for i in [0, 5, 16_383, 16_384, 20_000, n - 1] {
            let old = x[i];
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                x[i] = bad;
                assert!(!all_finite(&cpu, &x), "{bad} at {i} on {cpu:?}");
                assert!(max_abs(&cpu, &x).is_nan() && !sum_of_squares(&cpu, &x).is_finite());
            }
            x[i] = -1e30;
            assert!(all_finite(&cpu, &x));
            assert_eq!(max_abs(&cpu, &x), 1e30);
            x[i] = old;
        }
        assert!(all_finite(&cpu, &[]) && max_abs(&cpu, &[]) == 0.0 && sum_of_squares(&cpu, &[]) == 0.0);
    }
}

#[test]
fn threads_do_not_change_a_bit() {
    let (t, h) = (1001, 100);
    let x = numbers::<f32>(1, t * h);
    let run = |threads| {
        let cpu = Cpu::new(Isa::best(), threads).unwrap();
        let mut out = vec![0.25; h];
        column_sums(&cpu, &x, &mut out);
        let out: Vec<u32> = out.into_iter().map(f32::to_bits).collect();
        (out, sum_of_squares(&cpu, &x).to_bits(), max_abs(&cpu, &x).to_bits())
    };
    assert_eq!(run(1), run(2));
    assert_eq!(run(1), run(3));
}
