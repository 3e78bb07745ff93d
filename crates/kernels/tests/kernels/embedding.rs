//! Embedding: finite differences check the reference, the reference checks every kernel set.

use crate::common::*;
use henson_kernels::bf16;
use henson_kernels::cpu::embedding::{Lookup, backward, forward, reference};
use henson_kernels::cpu::{Cpu, Element, Isa};
use henson_kernels::philox::Stream;

/// Rows of the tables: words, positions, segments, one more.
const ROWS: [usize; 4] = [50, 17, 2, 1];

fn ids(table: usize, t: usize) -> Vec<u32> {
    let mut stream = Stream::new(8, table as u32, 0);
    (0..t).map(|_| stream.below(ROWS[table] as u32)).collect()
}

#[test]
fn reference_has_the_right_gradients() {
    let (t, h) = (30, 3);
    let tables: Vec<Vec<f64>> = (0..3).map(|i| exact(&numbers::<f32>(i, ROWS[i as usize] * h))).collect();
    let ids: Vec<Vec<u32>> = (0..3).map(|i| ids(i, t)).collect();
    let w = exact(&numbers::<f32>(9, t * h));
    let mut gradients: Vec<Vec<f64>> = tables.iter().map(|table| vec![0.0; table.len()]).collect();
    for i in 0..3 {
        reference::backward(&w, &ids[i], &mut gradients[i], h);
    }
    check_gradients("embedding", &tables, &gradients, |tables| {
        let lookups: Vec<(&[u32], &[f64])> = (0..3).map(|i| (&ids[i][..], &tables[i][..])).collect();
        weighted(&reference::forward(&lookups, h), &w)
    });
}

fn check_tables<E: Element, W: Element>(cpu: &Cpu, t: usize, h: usize, tables: usize) {
    let ids: Vec<Vec<u32>> = (0..tables).map(|i| ids(i, t)).collect();
    let values: Vec<Vec<W>> = (0..tables).map(|i| numbers::<W>(i as u64, ROWS[i] * h)).collect();
    let exact_values: Vec<Vec<f64>> = values.iter().map(|v| exact(v)).collect();
    let lookups: Vec<Lookup<'_, W>> = (0..tables).map(|i| Lookup { ids: &ids[i], table: &values[i] }).collect();
    let mut out = poisoned::<E>(t * h);
    forward(cpu, &lookups, h, &mut out);
    let lookups: Vec<(&[u32], &[f64])> = (0..tables).map(|i| (&ids[i][..], &exact_values[i][..])).collect();
    assert_close("embedding", cpu, &out, &reference::forward(&lookups, h));
}

fn check<E: Element>(cpu: &Cpu, t: usize, h: usize) {
    for tables in 1..=4 {
        check_tables::<E, f32>(cpu, t, h, tables);
        check_tables::<E, bf16>(cpu, t, h, tables);
    }
    let dy = numbers::<E>(7, t * h);
    for table in 0..3 {
        let (mut got, mut expected) = (vec![0.5f32; ROWS[table] * h], vec![0.5; ROWS[table] * h]);
        backward(cpu, &dy, &ids(table, t), &mut got, h);
        reference::backward(&exact(&dy), &ids(table, t), &mut expected, h);
        // f32 sums of exact numbers, for either kind of dy.
        assert_close("gradient of an embedding", cpu, &got, &expected);
    }
}

#[test]
fn kernels_match_the_reference() {
    for t in [1, 7, 33, 129] {
        for h in [3, 24, 128, 300] {
            for_all!(check(t, h));
        }
    }
}

#[test]
fn threads_do_not_change_a_bit() {
    let (t, h) = (129, 300);
    let run = |threads| {
        let cpu = Cpu::new(Isa::best(), threads).unwrap();
        let (ids, table) = (ids(1, t), numbers::<f32>(1, ROWS[1] * h));
        let (mut out, mut gradient) = (poisoned::<f32>(t * h), vec![0.0; table.len()]);
        forward(&cpu, &[Lookup { ids: &ids, table: &table }], h, &mut out);
        backward(&cpu, &numbers::<f32>(2, t * h), &ids, &mut gradient, h);
        [out, gradient].concat().into_iter().map(f32::to_bits).collect::<Vec<_>>()
    };
    assert_eq!(run(1), run(2));
    assert_eq!(run(1), run(3));
}

#[test]
#[should_panic(expected = "an id is outside of table 0's 2")]
fn an_id_outside_is_refused() {
    let (ids, table) = ([0, 2], [1.0f32; 6]);
    forward(&Cpu::detect(), &[Lookup { ids: &ids, table: &table }], 3, &mut [0.0f32; 6]);
}
