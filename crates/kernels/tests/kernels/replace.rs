//! Replaced tokens: equal to the definition, for any number of threads, and what the definition itself says.

use henson_kernels::cpu::replace::{Found, found, reference, replace};
use henson_kernels::cpu::{Cpu, Isa};
use henson_kernels::philox::Stream;

const NOWHERE: u32 = u32::MAX;

#[test]
fn only_what_differs_is_replaced() {
    let (ids, rows, drawn) = ([7, 8, 9, 8], [3, 1, NOWHERE], [8, 5, 4]);
    // A draw that is right by luck leaves the label 0; what stands nowhere changes nothing.
    assert_eq!(reference::replace(&ids, &rows, &drawn), (vec![7, 5, 9, 8], vec![0.0, 1.0, 0.0, 0.0]));
    let (logits, labels) = ([1.0, 0.5, -1.0, -0.1, 3.0], [0.0, 1.0, 1.0, 0.0, 1.0]);
    let counted = reference::found(&logits, &labels, &[1.0, 2.0, 0.5, 1.0, 0.0]);
    assert_eq!(counted, Found { replaced: 2, said: 2, both: 1 });
}

#[test]
fn kernels_match_the_reference() {
    for tokens in [0, 1, 100, 70_001] {
        let mut draws = Stream::new(3, 0, tokens as u64);
        let ids: Vec<u32> = (0..tokens).map(|_| draws.below(9)).collect();
        let mut rows: Vec<u32> = (0..tokens as u32).filter(|t| t % 7 == 3).collect();
        rows.push(NOWHERE);
        let drawn: Vec<u32> = rows.iter().map(|_| draws.below(9)).collect();
        let logits: Vec<f32> = (0..tokens).map(|_| draws.normal()).collect();
        let weights: Vec<f32> = (0..tokens).map(|t| (t % 3) as f32).collect();
        let (expected, expected_labels) = reference::replace(&ids, &rows, &drawn);
        for threads in 1..=3 {
            let cpu = Cpu::new(Isa::best(), threads).unwrap();
            let (mut out, mut labels) = (vec![u32::MAX; tokens], vec![f32::NAN; tokens]);
            replace(&cpu, &ids, &rows, &drawn, &mut out, &mut labels);
            assert_eq!((&out, &labels), (&expected, &expected_labels));
            let counted = found(&cpu, &logits, &labels, &weights);
            assert_eq!(counted, reference::found(&logits, &labels, &weights));
            assert!(tokens < 1000 || counted.both > 0 && counted.both < counted.replaced);
        }
    }
}
