//! The definition for one sequence, in f64. Inputs and outputs are in the order of the steps: a reverse scan's begin at the end.

use super::{Cell, Scan};

/// What a scan reads.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// S×G·C: what each token has to say, the input's bias included.
    pub said: &'a [f64],
    /// G·C×P.
    pub recurrent: &'a [f64],
    /// G·C.
    pub bias: &'a [f64],
    /// P×C; none where P = C.
    pub projection: Option<&'a [f64]>,
    /// P and C: the state before the first token.
    pub initial: [&'a [f64]; 2],
}

/// What a scan gives.
#[derive(Clone, Debug, Default)]
pub struct Output {
    /// S×P.
    pub states: Vec<f64>,
    /// S×C; of an LSTM alone.
    pub cells: Vec<f64>,
    /// S×G·C, after their activations.
    pub gates: Vec<f64>,
    /// S×C: for an LSTM what is projected, for a GRU what the state says to the new value.
    inner: Vec<f64>,
}

/// Gradients, in the shapes of [`Inputs`].
#[derive(Clone, Debug)]
pub struct Gradients {
    /// S×G·C.
    pub said: Vec<f64>,
    /// G·C×P.
    pub recurrent: Vec<f64>,
    /// G·C.
    pub bias: Vec<f64>,
    /// P×C.
    pub projection: Vec<f64>,
    /// P and C.
    pub initial: [Vec<f64>; 2],
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// All states of a sequence.
pub fn forward(scan: &Scan, x: &Inputs<'_>) -> Output {
    let (c, p, width) = (scan.hidden, scan.width(), scan.gates());
    let mut out = Output::default();
    let [mut state, mut cell] = x.initial.map(<[f64]>::to_vec);
    for said in x.said.chunks(width) {
        let recurrent: Vec<f64> =
            (0..width).map(|g| x.bias[g] + (0..p).map(|i| x.recurrent[g * p + i] * state[i]).sum::<f64>()).collect();
        let sum = |g: usize| said[g] + recurrent[g];
        match scan.cell {
            Cell::Lstm => {
                let gates: Vec<f64> =
                    (0..width).map(|g| if g / c == 2 { sum(g).tanh() } else { sigmoid(sum(g)) }).collect();
                let new = |j: usize| gates[c + j] * cell[j] + gates[j] * gates[2 * c + j];
                let limit = f64::from(scan.clip_cell);
                cell = (0..c).map(|j| new(j).clamp(-limit, limit)).collect();
                let inner: Vec<f64> = (0..c).map(|j| gates[3 * c + j] * cell[j].tanh()).collect();
                let limit = f64::from(scan.clip_projection);
                state = match x.projection {
                    Some(w) => (0..p)
                        .map(|i| (0..c).map(|j| w[i * c + j] * inner[j]).sum::<f64>().clamp(-limit, limit))
                        .collect(),
                    None => inner.clone(),
                };
                out.cells.extend(&cell);
                out.inner.extend(inner);
                out.gates.extend(gates);
            }
            Cell::Gru => {
                let reset: Vec<f64> = (0..c).map(|j| sigmoid(sum(j))).collect();
                let update: Vec<f64> = (0..c).map(|j| sigmoid(sum(c + j))).collect();
                let new: Vec<f64> =
                    (0..c).map(|j| (said[2 * c + j] + reset[j] * recurrent[2 * c + j]).tanh()).collect();
                state = (0..c).map(|j| (1.0 - update[j]) * new[j] + update[j] * state[j]).collect();
                out.inner.extend(&recurrent[2 * c..]);
                [reset, update, new].iter().for_each(|gate| out.gates.extend(gate));
            }
            Cell::Tanh | Cell::Relu => {
                let apply = |x: f64| if scan.cell == Cell::Tanh { x.tanh() } else { x.max(0.0) };
                state = (0..c).map(|j| apply(sum(j))).collect();
                out.gates.extend(&state);
            }
        }
        out.states.extend(&state);
    }
    out
}

/// The gradients of a loss whose gradient with respect to the states is `dout` (S×P) and with respect to the last state (P) and
/// cell (C), besides that, is `dlast`.
pub fn backward(scan: &Scan, x: &Inputs<'_>, output: &Output, dout: &[f64], dlast: [&[f64]; 2]) -> Gradients {
    let (c, p, width) = (scan.hidden, scan.width(), scan.gates());
    let steps = x.said.len() / width;
    let [mut dstate, mut dcell] = dlast.map(<[f64]>::to_vec);
    let mut d = Gradients {
        said: vec![0.0; x.said.len()],
        recurrent: vec![0.0; x.recurrent.len()],
        bias: vec![0.0; width],
        projection: vec![0.0; x.projection.map_or(0, <[f64]>::len)],
        initial: [Vec::new(), Vec::new()],
    };
    for s in (0..steps).rev() {
        let before = |all: &[f64], initial: &[f64], n: usize| {
            if s == 0 { initial.to_vec() } else { all[(s - 1) * n..s * n].to_vec() }
        };
        let state_before = before(&output.states, x.initial[0], p);
        let gates = &output.gates[s * width..][..width];
        let mut dh: Vec<f64> = (0..p).map(|i| dout[s * p + i] + dstate[i]).collect();
        let said = &mut d.said[s * width..][..width];
        // What the sums with the state get: as what tokens say, but for the new value of a GRU.
        let mut dsum = vec![0.0; width];
        let mut direct = vec![0.0; p];
        match scan.cell {
            Cell::Lstm => {
                let (cells, inner) = (&output.cells[s * c..][..c], &output.inner[s * c..][..c]);
                let cell_before = before(&output.cells, x.initial[1], c);
                if let Some(w) = x.projection {
                    for i in 0..p {
                        let clipped = output.states[s * p + i].abs() >= f64::from(scan.clip_projection);
                        dh[i] = if clipped { 0.0 } else { dh[i] };
                        (0..c).for_each(|j| d.projection[i * c + j] += dh[i] * inner[j]);
                    }
                    dh = (0..c).map(|j| (0..p).map(|i| dh[i] * w[i * c + j]).sum()).collect();
                }
                for j in 0..c {
                    let [input, forget, new, out] = [0, 1, 2, 3].map(|g| gates[g * c + j]);
                    let bounded = cells[j].tanh();
                    let clipped = cells[j].abs() >= f64::from(scan.clip_cell);
                    let dc = if clipped { 0.0 } else { dcell[j] + dh[j] * out * (1.0 - bounded * bounded) };
                    dsum[j] = dc * new * input * (1.0 - input);
                    dsum[c + j] = dc * cell_before[j] * forget * (1.0 - forget);
                    dsum[2 * c + j] = dc * input * (1.0 - new * new);
                    dsum[3 * c + j] = dh[j] * bounded * out * (1.0 - out);
                    dcell[j] = dc * forget;
                }
                said.copy_from_slice(&dsum);
            }
            Cell::Gru => {
                for j in 0..c {
                    let [reset, update, new] = [0, 1, 2].map(|g| gates[g * c + j]);
                    let dnew = dh[j] * (1.0 - update) * (1.0 - new * new);
                    said[j] = dnew * output.inner[s * c + j] * reset * (1.0 - reset);
                    said[c + j] = dh[j] * (state_before[j] - new) * update * (1.0 - update);
                    said[2 * c + j] = dnew;
                    dsum[2 * c + j] = dnew * reset;
                    direct[j] = dh[j] * update;
                }
                dsum[..2 * c].copy_from_slice(&said[..2 * c]);
            }
            Cell::Tanh | Cell::Relu => {
                for j in 0..c {
                    let slope = if scan.cell == Cell::Tanh { 1.0 - gates[j] * gates[j] } else { gates[j].signum() };
                    dsum[j] = if gates[j] == 0.0 && scan.cell == Cell::Relu { 0.0 } else { dh[j] * slope };
                }
                said.copy_from_slice(&dsum);
            }
        }
        for g in 0..width {
            d.bias[g] += dsum[g];
            (0..p).for_each(|i| d.recurrent[g * p + i] += dsum[g] * state_before[i]);
        }
        dstate =
            (0..p).map(|i| direct[i] + (0..width).map(|g| dsum[g] * x.recurrent[g * p + i]).sum::<f64>()).collect();
    }
    d.initial = [dstate, dcell];
    d
}
