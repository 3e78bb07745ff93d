//! Scores of numbers.

use super::mean;

/// Pearson's correlation; not a number where one side is constant.
pub fn pearson(expected: &[f64], predicted: &[f64]) -> f64 {
    let (mean_x, mean_y) = (mean(expected.iter().copied()), mean(predicted.iter().copied()));
    let (mut xy, mut xx, mut yy) = (0.0, 0.0, 0.0);
    for (x, y) in expected.iter().zip(predicted) {
        let (x, y) = (x - mean_x, y - mean_y);
        xy += x * y;
        xx += x * x;
        yy += y * y;
    }
    // Numbers that are all the same may differ from their own mean by a rounding.
    let constant = |values: &[f64]| values.windows(2).all(|two| two[0] == two[1]);
    if constant(expected) || constant(predicted) {
        return f64::NAN;
    }
    (xy / (xx.sqrt() * yy.sqrt())).clamp(-1.0, 1.0)
}

/// Spearman's correlation: Pearson's of the ranks, where equal numbers share the mean of their ranks.
pub fn spearman(expected: &[f64], predicted: &[f64]) -> f64 {
    pearson(&ranks(expected), &ranks(predicted))
}

/// The mean squared difference.
pub fn mean_squared_error(expected: &[f64], predicted: &[f64]) -> f64 {
    mean(expected.iter().zip(predicted).map(|(x, y)| (x - y) * (x - y)))
}

/// The mean difference, without its sign.
pub fn mean_absolute_error(expected: &[f64], predicted: &[f64]) -> f64 {
    mean(expected.iter().zip(predicted).map(|(x, y)| (x - y).abs()))
}

fn ranks(values: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[a].total_cmp(&values[b]));
    let mut ranks = vec![0.0; values.len()];
    let mut from = 0;
    for run in order.chunk_by(|&a, &b| values[a] == values[b]) {
        let rank = from as f64 + (run.len() as f64 + 1.0) / 2.0;
        run.iter().for_each(|&i| ranks[i] = rank);
        from += run.len();
    }
    ranks
}
