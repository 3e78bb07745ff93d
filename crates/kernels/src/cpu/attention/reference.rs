//! The definition for one sequence and one head, in f64.

/// What [`forward`] gives.
pub struct Output {
    /// softmax(scale·q·kᵀ + bias), N×M, before dropout.
    pub probabilities: Vec<f64>,
    /// N×D.
    pub out: Vec<f64>,
}

/// What is added to the scores where a query sees itself and what stands before it: 0 or −∞, S×S.
pub fn causal(s: usize) -> Vec<f64> {
    (0..s * s).map(|i| if i % s > i / s { f64::NEG_INFINITY } else { 0.0 }).collect()
}

/// drop(softmax(scale·q·kᵀ + bias))·v; q N×D, k and v M×D; `bias` (N×M) is −∞ where a query does not see a key; `mask` holds 0
/// or dropout's scale for every probability. A query that sees nothing gives zeros.
pub fn forward(
    q: &[f64],
    k: &[f64],
    v: &[f64],
    d: usize,
    scale: f64,
    bias: Option<&[f64]>,
    mask: Option<&[f64]>,
) -> Output {
    let (n, m) = (q.len() / d, k.len() / d);
    let mut probabilities = vec![0.0; n * m];
    let mut out = vec![0.0; n * d];
    for i in 0..n {
        let row = &mut probabilities[i * m..(i + 1) * m];
        for j in 0..m {
            let product = (0..d).map(|c| q[i * d + c] * k[j * d + c]).sum::<f64>();
            row[j] = (scale * product + bias.map_or(0.0, |b| b[i * m + j])).exp();
        }
        let sum: f64 = row.iter().sum();
        if sum == 0.0 {
            continue;
        }
        for j in 0..m {
            row[j] /= sum;
            for c in 0..d {
                out[i * d + c] += row[j] * mask.map_or(1.0, |mask| mask[i * m + j]) * v[j * d + c];
            }
        }
    }
    Output { probabilities, out }
}

/// The gradients of [`forward`] with respect to q, k, v and the bias.
pub fn backward(
    q: &[f64],
    k: &[f64],
    v: &[f64],
    d: usize,
    scale: f64,
    output: &Output,
    mask: Option<&[f64]>,
    dout: &[f64],
) -> [Vec<f64>; 4] {
    let (n, m) = (q.len() / d, k.len() / d);
    let [mut dq, mut dk, mut dv] = [vec![0.0; n * d], vec![0.0; m * d], vec![0.0; m * d]];
    let mut dbias = vec![0.0; n * m];
    for i in 0..n {
        let p = &output.probabilities[i * m..(i + 1) * m];
        let kept = |j: usize| mask.map_or(1.0, |mask| mask[i * m + j]);
        let dp: Vec<f64> =
            (0..m).map(|j| kept(j) * (0..d).map(|c| dout[i * d + c] * v[j * d + c]).sum::<f64>()).collect();
        let mean: f64 = (0..m).map(|j| p[j] * dp[j]).sum();
        for j in 0..m {
            let ds = p[j] * (dp[j] - mean);
            dbias[i * m + j] = ds;
            for c in 0..d {
                dq[i * d + c] += scale * ds * k[j * d + c];
                dk[j * d + c] += scale * ds * q[i * d + c];
                dv[j * d + c] += p[j] * kept(j) * dout[i * d + c];
            }
        }
    }
    [dq, dk, dv, dbias]
}
