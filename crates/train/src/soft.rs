//! Losses of what a teacher says: plain functions of a row or a vector with their gradients, on the host and in f64. Distillation for tasks and
//! in pre-training are both made of them. Their values are held against PyTorch where tasks use them (`henson_tasks::distil`).

/// scale·T²·KL(q ‖ softmax(z/T)) of a row of logits; adds to its gradient. T² keeps the gradient as large whatever T is (Hinton et al. 2015).
pub fn divergence(logits: &[f64], teacher: &[f32], temperature: f64, scale: f64, gradient: &mut [f64]) -> f64 {
    let (scale, mut loss) = (scale * temperature * temperature, 0.0);
    for ((q, own), back) in teacher.iter().zip(log_softmax(logits, temperature)).zip(gradient) {
        let q = f64::from(*q);
        if q > 0.0 {
            loss += scale * q * (q.ln() - own);
        }
        *back += scale * (own.exp() - q) / temperature;
    }
    loss
}

/// scale·(−ln softmax(z) at the label) of a row of logits; adds to its gradient.
pub fn cross_entropy(logits: &[f64], label: usize, scale: f64, gradient: &mut [f64]) -> f64 {
    let own = log_softmax(logits, 1.0);
    for (class, (own, back)) in own.iter().zip(gradient).enumerate() {
        *back += scale * (own.exp() - if class == label { 1.0 } else { 0.0 });
    }
    -scale * own[label]
}

/// scale·(1 − cosine) of two vectors; adds to the gradient of the first. A vector without a length has no cosine.
pub fn cosine_distance(vector: &[f64], teacher: &[f32], scale: f64, gradient: &mut [f64]) -> f64 {
    let both = || vector.iter().copied().zip(teacher.iter().map(|t| f64::from(*t)));
    let length = |sum: f64| sum.sqrt().max(1e-8);
    let (own, other) = (length(both().map(|(v, _)| v * v).sum()), length(both().map(|(_, t)| t * t).sum()));
    let cosine = both().map(|(v, t)| v * t).sum::<f64>() / (own * other);
    let slope = |(v, t): (f64, f64)| (t / other - cosine * v / own) / own;
    gradient.iter_mut().zip(both()).for_each(|(back, both)| *back -= scale * slope(both));
    scale * (1.0 - cosine)
}

/// Probabilities of logits at a temperature.
pub fn softened(logits: &[f32], temperature: f64) -> Vec<f32> {
    let logits: Vec<f64> = logits.iter().map(|x| f64::from(*x)).collect();
    log_softmax(&logits, temperature).into_iter().map(|x| x.exp() as f32).collect()
}

fn log_softmax(logits: &[f64], temperature: f64) -> Vec<f64> {
    let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let all = logits.iter().map(|z| ((z - most) / temperature).exp()).sum::<f64>().ln();
    logits.iter().map(|z| (z - most) / temperature - all).collect()
}
