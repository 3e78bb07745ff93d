//! From a head's logits to scores. Rows are short here, so this is done on the host.

/// Logits as probabilities: eˣ over the sum of all eˣ.
pub fn softmax(logits: &[f32]) -> Vec<f32> {
    let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let powers: Vec<f32> = logits.iter().map(|x| (x - highest).exp()).collect();
    let total: f32 = powers.iter().sum();
    powers.into_iter().map(|x| x / total).collect()
}

/// A logit as a probability of its own: 1 / (1 + e⁻ˣ).
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// The mean of the rows of a text's windows, by their numbers of tokens.
pub fn join_windows(parts: impl Iterator<Item = (usize, Vec<f32>)>) -> Vec<f32> {
    let mut parts: Vec<(usize, Vec<f32>)> = parts.collect();
    if let [(_, only)] = &mut parts[..] {
        return std::mem::take(only);
    }
    let total: usize = parts.iter().map(|(tokens, _)| tokens).sum();
    // In f64, where no product and no sum of finite numbers overflows.
    let mut joined = vec![0.0; parts.first().map_or(0, |(_, row)| row.len())];
    for (tokens, row) in parts {
        let share = tokens as f64 / total as f64;
        joined.iter_mut().zip(row).for_each(|(sum, x)| *sum += share * f64::from(x));
    }
    joined.into_iter().map(|x| x as f32).collect()
}

/// Gives a vector the length 1. In f64, since the squares of numbers beyond 10¹⁹ are too large for f32.
pub fn normalise(vector: &mut [f32]) {
    let length = vector.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>().sqrt().max(1e-12);
    vector.iter_mut().for_each(|x| *x = (f64::from(*x) / length) as f32);
}

/// The sum of products; the cosine of vectors that have the length 1.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}
