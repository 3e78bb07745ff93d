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

/// The mean of the logits of a text's windows, by their numbers of tokens.
pub fn join_windows(parts: impl Iterator<Item = (usize, Vec<f32>)>) -> Vec<f32> {
    let parts: Vec<(usize, Vec<f32>)> = parts.collect();
    if let [(_, only)] = &parts[..] {
        return only.clone();
    }
    let total: usize = parts.iter().map(|(tokens, _)| tokens).sum();
    let mut joined = vec![0.0; parts.first().map_or(0, |(_, row)| row.len())];
    for (tokens, row) in parts {
        for (sum, x) in joined.iter_mut().zip(row) {
            *sum += x * tokens as f32 / total as f32;
        }
    }
    joined
}
