//! The nearest vectors to others, exactly: all dot products, block by block, on all cores.
//!
//! Legend: Q vectors that ask, C vectors to choose among, H numbers of each.

use std::cmp::Ordering;

use henson_kernels::cpu::gemm::{Finish, Matrix, Right, product};
use henson_kernels::cpu::{Cpu, Isa};

/// Vectors that ask, and vectors to choose among, that are compared at once.
const ASK: usize = 128;
const CHOOSE: usize = 1024;

/// A vector that was found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Near {
    /// Which one.
    pub index: usize,
    /// Its dot product with the one that asked; of vectors with the length 1, the cosine.
    pub score: f32,
}

/// For each of the vectors that ask the `k` with the highest dot product, best first; of equal ones the first. Vectors lie one after
/// the other. `progress` is told how many of all pairs were compared, and may end it, which gives none.
pub fn nearest_of(
    asking: &[f32],
    among: &[f32],
    width: usize,
    k: usize,
    threads: usize,
    mut progress: impl FnMut(usize) -> bool,
) -> Option<Vec<Vec<Near>>> {
    let width = width.max(1);
    let cpu = Cpu::new(Isa::best(), threads).unwrap_or_else(|_| Cpu::detect());
    let mut found: Vec<Vec<Near>> = vec![Vec::with_capacity(k + 1); asking.len() / width];
    let (mut scores, mut done) = (vec![0.0_f32; ASK * CHOOSE], 0);
    for (q, asking) in asking.chunks(ASK * width).enumerate() {
        let rows = asking.len() / width;
        for (c, among) in among.chunks(CHOOSE * width).enumerate() {
            let columns = among.len() / width;
            let out = &mut scores[..rows * columns];
            let (a, b) = (Matrix::new(asking, rows, width), Matrix::new(among, columns, width).transposed());
            product(&cpu, a, Right::Plain(b), out, columns, Finish::default());
            for (row, found) in out.chunks(columns).zip(&mut found[q * ASK..]) {
                row.iter()
                    .enumerate()
                    .for_each(|(i, score)| keep(found, k, Near { index: c * CHOOSE + i, score: *score }));
            }
            done += rows * columns;
            if !progress(done) {
                return None;
            }
        }
    }
    Some(found)
}

/// Puts one into a list of the best, which stays sorted.
fn keep(best: &mut Vec<Near>, k: usize, near: Near) {
    // What is not a number is near to nothing.
    if near.score.is_nan() || k == 0 || (best.len() == k && best[k - 1].score >= near.score) {
        return;
    }
    let after = |other: &Near| other.score.partial_cmp(&near.score) != Some(Ordering::Less);
    best.insert(best.partition_point(after), near);
    best.truncate(k);
}

#[cfg(test)]
mod tests {
    use super::*;
    use henson_kernels::philox::Stream;

    /// Every block border, every k, any number of threads.
    #[test]
    fn the_nearest_are_found_exactly() {
        let mut stream = Stream::new(3, 0, 0);
        let mut vectors = |count: usize| -> Vec<f32> { (0..count * 9).map(|_| stream.normal()).collect() };
        let (asking, mut among) = (vectors(ASK + 5), vectors(CHOOSE + 300));
        // Two that are the same, in different blocks: the first comes first.
        let twin: Vec<f32> = among[..9].iter().map(|x| 10.0 * x).collect();
        among[..9].copy_from_slice(&twin);
        among[(CHOOSE + 7) * 9..][..9].copy_from_slice(&twin);
        let found = nearest_of(&asking, &among, 9, 20, 1, |_| true).unwrap();
        assert_eq!(nearest_of(&asking, &among, 9, 20, 3, |_| true).unwrap(), found);
        assert_eq!(nearest_of(&asking, &among, 9, 20, 3, |_| false), None);
        for (query, found) in asking.chunks(9).zip(&found) {
            let dot = |row: &[f32]| row.iter().zip(query).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum::<f64>();
            let mut all: Vec<(usize, f64)> = among.chunks(9).map(dot).enumerate().collect();
            all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
            assert_eq!(found.len(), 20);
            for (near, (index, score)) in found.iter().zip(&all) {
                assert!((f64::from(near.score) - score).abs() < 1e-5);
                // Two that are as near as rounding may change places.
                let same = (all.iter().find(|(i, _)| *i == near.index).unwrap().1 - score).abs() < 1e-5;
                assert!(near.index == *index || same);
            }
        }
        let few = nearest_of(&asking[..9], &among[..18], 9, 5, 1, |_| true).unwrap();
        assert_eq!((few.len(), few[0].len()), (1, 2));
        let twins = nearest_of(&twin, &among, 9, 2, 2, |_| true).unwrap();
        assert_eq!([twins[0][0].index, twins[0][1].index], [0, CHOOSE + 7]);
        assert!(nearest_of(&[f32::NAN; 9], &among, 9, 2, 1, |_| true).unwrap()[0].is_empty());
        assert_eq!(nearest_of(&[], &among, 9, 2, 1, |_| true), Some(Vec::new()));
    }
}
