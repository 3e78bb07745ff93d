//! Layers of long short-term memory (LSTM) that read in both directions, with the backward pass written by hand.
//!
//! It stands on a frozen encoder (section 5.3 of the paper) and nowhere inside of one, so it is no operation of the tape: it
//! runs on the CPU, in f32. Nothing is padded: sequences go side by side from word to word, the longest first, and the
//! short ones leave. The two directions run beside each other, each on its own threads; the number of threads changes no bit.
//!
//! N sequences, T words of all of them together, I numbers of a word that a layer reads, H numbers of a direction's state.
//! Parameters and their names are those of `torch.nn.LSTM`, with its order of the gates: input, forget, cell, output.

use std::cmp::Reverse;
use std::ops::Range;

use henson_kernels::cpu::activation::{self, Activation};
use henson_kernels::cpu::dropout::{Dropout, RowId, row_mask};
use henson_kernels::cpu::gemm::{Finish, Matrix, Packed, Right, product};
use henson_kernels::cpu::reduce::column_sums;
use henson_kernels::cpu::{Cpu, Isa};
use henson_kernels::threads::both;

/// Threads for the two directions.
pub(crate) struct Pair {
    pub(crate) first: Cpu,
    second: Option<Cpu>,
}

impl Pair {
    pub(crate) fn new(isa: Isa, threads: usize) -> Self {
        let cpu = |threads: usize| Cpu::new(isa, threads).unwrap_or_else(|_| Cpu::detect());
        match threads {
            0 | 1 => Self { first: cpu(1), second: None },
            _ => Self { first: cpu(threads.div_ceil(2)), second: Some(cpu(threads / 2)) },
        }
    }

    /// Does two things, side by side where there are threads for it.
    fn both<A: Send, B: Send>(&self, a: impl FnOnce(&Cpu) -> A, b: impl FnOnce(&Cpu) -> B + Send) -> (A, B) {
        let Some(second) = &self.second else { return (a(&self.first), b(&self.first)) };
        both(|| a(&self.first), || b(second))
    }
}

/// Sequences of words that lie one after the other, and the order in which an LSTM comes to them.
pub(crate) struct Sequences {
    /// The first word of each sequence, and the number of all words.
    offsets: Vec<usize>,
    /// The first row of each step, and the number of all rows. Row r of a step belongs to the r-th longest sequence.
    steps: Vec<usize>,
    /// For each row of each step its word, from left to right and from right to left.
    words: [Vec<usize>; 2],
}

impl Sequences {
    pub(crate) fn new(lengths: &[usize]) -> Self {
        let mut offsets = vec![0];
        lengths.iter().for_each(|length| offsets.push(offsets[offsets.len() - 1] + length));
        let mut order: Vec<usize> = (0..lengths.len()).collect();
        order.sort_by_key(|i| Reverse(lengths[*i]));
        let (mut steps, mut words) = (vec![0], [Vec::new(), Vec::new()]);
        for step in 0..lengths.iter().copied().max().unwrap_or(0) {
            for i in order.iter().copied().take_while(|i| lengths[*i] > step) {
                words[0].push(offsets[i] + step);
                words[1].push(offsets[i + 1] - 1 - step);
            }
            steps.push(words[0].len());
        }
        Self { offsets, steps, words }
    }

    /// T.
    pub(crate) fn words(&self) -> usize {
        self.words[0].len()
    }

    /// The words of each sequence.
    pub(crate) fn ranges(&self) -> impl ExactSizeIterator<Item = Range<usize>> {
        self.offsets.windows(2).map(|ends| ends[0]..ends[1])
    }

    /// Drops numbers of each word's row: the same in both directions of a pass.
    pub(crate) fn drop(&self, isa: Isa, dropout: Option<Dropout>, rows: &mut [f32]) {
        let Some(dropout) = dropout else { return };
        let width = rows.len() / self.words().max(1);
        let mut kept = vec![false; width];
        for (sequence, words) in self.ranges().enumerate() {
            for (position, word) in words.enumerate() {
                let id = RowId { sequence: sequence as u32, position: position as u32 };
                row_mask(isa, &dropout, id, &mut kept);
                for (x, kept) in rows[word * width..][..width].iter_mut().zip(&kept) {
                    *x = if *kept { *x * dropout.scale() } else { 0.0 };
                }
            }
        }
    }

    fn step(&self, step: usize) -> Range<usize> {
        self.steps[step]..self.steps[step + 1]
    }
}

/// The sizes of a stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BiLstm {
    /// I of the first layer; the others read 2·H.
    pub(crate) input: usize,
    /// H.
    pub(crate) hidden: usize,
    pub(crate) layers: usize,
}

/// What a pass leaves for the backward pass.
pub(crate) struct Passed {
    /// What each layer read, T×I.
    inputs: Vec<Vec<f32>>,
    kept: Vec<[Kept; 2]>,
    /// T×2H.
    pub(crate) output: Vec<f32>,
}

/// One direction of one layer, in the order of the steps.
struct Kept {
    /// After their activations, T×4H.
    gates: Vec<f32>,
    /// T×H.
    cells: Vec<f32>,
    /// Their tanh, T×H.
    bounded: Vec<f32>,
    /// T×H.
    states: Vec<f32>,
}

impl BiLstm {
    /// The parameters in the order of the flat slice.
    pub(crate) fn entries(&self) -> Vec<(String, Vec<usize>)> {
        let mut entries = Vec::new();
        for layer in 0..self.layers {
            for side in ["", "_reverse"] {
                let gates = 4 * self.hidden;
                entries.push((format!("weight_ih_l{layer}{side}"), vec![gates, self.width(layer)]));
                entries.push((format!("weight_hh_l{layer}{side}"), vec![gates, self.hidden]));
                entries.push((format!("bias_ih_l{layer}{side}"), vec![gates]));
                entries.push((format!("bias_hh_l{layer}{side}"), vec![gates]));
            }
        }
        entries
    }

    /// How many numbers all parameters are.
    pub(crate) fn len(&self) -> usize {
        (0..self.layers).map(|layer| 2 * self.direction_len(layer)).sum()
    }

    /// I of a layer.
    fn width(&self, layer: usize) -> usize {
        if layer == 0 { self.input } else { 2 * self.hidden }
    }

    fn direction_len(&self, layer: usize) -> usize {
        4 * self.hidden * (self.width(layer) + self.hidden + 2)
    }

    /// x is T×I. `dropout` is what falls on the output of each layer but the last.
    pub(crate) fn forward(
        &self,
        pair: &Pair,
        parameters: &[f32],
        x: Vec<f32>,
        sequences: &Sequences,
        dropout: impl Fn(usize) -> Option<Dropout>,
    ) -> Passed {
        assert!(parameters.len() == self.len(), "{} parameters for an LSTM of {}", parameters.len(), self.len());
        let h = self.hidden;
        let (mut inputs, mut kept): (Vec<Vec<f32>>, Vec<[Kept; 2]>) = (Vec::new(), Vec::new());
        let (mut rest, mut x) = (parameters, x);
        for layer in 0..self.layers {
            let (left, others) = rest.split_at(self.direction_len(layer));
            let (right, others) = others.split_at(self.direction_len(layer));
            rest = others;
            let (left, right) =
                (Direction::new(left, self.width(layer), h), Direction::new(right, self.width(layer), h));
            let (left, right) = pair.both(
                |cpu| left.forward(cpu, &x, sequences, &sequences.words[0]),
                |cpu| right.forward(cpu, &x, sequences, &sequences.words[1]),
            );
            let mut output = vec![0.0; sequences.words() * 2 * h];
            for (side, kept) in [&left, &right].into_iter().enumerate() {
                for (row, word) in sequences.words[side].iter().enumerate() {
                    output[word * 2 * h + side * h..][..h].copy_from_slice(&kept.states[row * h..][..h]);
                }
            }
            if layer + 1 < self.layers {
                sequences.drop(pair.first.isa(), dropout(layer), &mut output);
            }
            kept.push([left, right]);
            inputs.push(std::mem::replace(&mut x, output));
        }
        Passed { inputs, kept, output: x }
    }

    /// Adds to the gradients of the parameters, and gives that of x where it is wanted. `dy` is T×2H.
    pub(crate) fn backward(
        &self,
        pair: &Pair,
        parameters: &[f32],
        passed: &Passed,
        dy: Vec<f32>,
        sequences: &Sequences,
        dropout: impl Fn(usize) -> Option<Dropout>,
        gradients: &mut [f32],
        wanted: bool,
    ) -> Option<Vec<f32>> {
        assert!(parameters.len() == self.len() && gradients.len() == self.len(), "gradients of another LSTM");
        let h = self.hidden;
        let (mut end, mut dy) = (self.len(), dy);
        for layer in (0..self.layers).rev() {
            let (len, width) = (self.direction_len(layer), self.width(layer));
            let all = end - 2 * len..end;
            end = all.start;
            let (left, right) = parameters[all.clone()].split_at(len);
            let (left, right) = (Direction::new(left, width, h), Direction::new(right, width, h));
            let (d_left, d_right) = gradients[all].split_at_mut(len);
            let (x, [kept_left, kept_right], dy_now) = (&passed.inputs[layer], &passed.kept[layer], &dy);
            let wanted = wanted || layer > 0;
            let (left, right) = pair.both(
                |cpu| left.backward(cpu, kept_left, x, dy_now, sequences, 0, d_left, wanted),
                |cpu| right.backward(cpu, kept_right, x, dy_now, sequences, 1, d_right, wanted),
            );
            let (Some(mut dx), Some(right)) = (left, right) else { return None };
            dx.iter_mut().zip(&right).for_each(|(dx, right)| *dx += right);
            if let Some(below) = layer.checked_sub(1) {
                sequences.drop(pair.first.isa(), dropout(below), &mut dx);
            }
            dy = dx;
        }
        Some(dy)
    }
}

/// The parameters of one direction.
struct Direction<'a> {
    /// 4H×I.
    from_input: &'a [f32],
    /// 4H×H.
    from_state: &'a [f32],
    /// 4H each; only their sum matters, but a file for `torch.nn.LSTM` has both.
    biases: [&'a [f32]; 2],
    width: usize,
    h: usize,
}

impl<'a> Direction<'a> {
    fn new(parameters: &'a [f32], width: usize, h: usize) -> Self {
        let (from_input, rest) = parameters.split_at(4 * h * width);
        let (from_state, rest) = rest.split_at(4 * h * h);
        let (first, second) = rest.split_at(4 * h);
        Self { from_input, from_state, biases: [first, second], width, h }
    }

    /// `words` names the word of each row.
    fn forward(&self, cpu: &Cpu, x: &[f32], sequences: &Sequences, words: &[usize]) -> Kept {
        let (t, h, width) = (sequences.words(), self.h, self.width);
        let bias: Vec<f32> = self.biases[0].iter().zip(self.biases[1]).map(|(a, b)| a + b).collect();
        // What the words say is the same for all steps: one product, T×4H.
        let mut said = vec![0.0; t * 4 * h];
        let weights = Right::Plain(Matrix::new(self.from_input, 4 * h, width).transposed());
        product(
            cpu,
            Matrix::new(x, t, width),
            weights,
            &mut said,
            4 * h,
            Finish { bias: Some(&bias), ..Finish::default() },
        );
        let mut gates = vec![0.0; t * 4 * h];
        for (row, word) in gates.chunks_exact_mut(4 * h).zip(words) {
            row.copy_from_slice(&said[word * 4 * h..][..4 * h]);
        }
        let weights = Packed::new(cpu, Matrix::new(self.from_state, 4 * h, h).transposed());
        let mut kept = Kept { gates, cells: vec![0.0; t * h], bounded: vec![0.0; t * h], states: vec![0.0; t * h] };
        // The rest of `said` is not needed any more, and serves as space.
        for step in 0..sequences.steps.len() - 1 {
            let rows = sequences.step(step);
            let before = step.checked_sub(1).map(|step| sequences.steps[step]);
            kept.step(cpu, &weights, rows, before, &mut said, h);
        }
        kept
    }

    /// Adds to this direction's gradients; gives what it has to say about x.
    fn backward(
        &self,
        cpu: &Cpu,
        kept: &Kept,
        x: &[f32],
        dy: &[f32],
        sequences: &Sequences,
        side: usize,
        gradients: &mut [f32],
        wanted: bool,
    ) -> Option<Vec<f32>> {
        let (t, h, width) = (sequences.words(), self.h, self.width);
        let words = &sequences.words[side];
        let most = sequences.steps.get(1).copied().unwrap_or(0);
        let weights = Packed::new(cpu, Matrix::new(self.from_state, 4 * h, h));
        // Before their activations, T×4H, in the order of the steps.
        let mut d_gates = vec![0.0; t * 4 * h];
        // Of the state and the cell that a step hands to the next; 0 for sequences that end there.
        let (mut d_state, mut d_cell) = (vec![0.0; most * h], vec![0.0; most * h]);
        for step in (0..sequences.steps.len() - 1).rev() {
            let rows = sequences.step(step);
            let before = step.checked_sub(1).map(|step| sequences.steps[step]);
            for (i, row) in rows.clone().enumerate() {
                let dy = &dy[words[row] * 2 * h + side * h..][..h];
                let cells = before.map(|start| &kept.cells[(start + i) * h..][..h]);
                let (d_state, d_cell) = (&d_state[i * h..][..h], &mut d_cell[i * h..][..h]);
                kept.row_backward(row, dy, cells, d_state, d_cell, &mut d_gates[row * 4 * h..][..4 * h], h);
            }
            if step > 0 {
                let now = Matrix::new(&d_gates[rows.start * 4 * h..rows.end * 4 * h], rows.len(), 4 * h);
                product(cpu, now, Right::Packed(&weights), &mut d_state[..rows.len() * h], h, Finish::default());
            }
        }

        let (d_from_input, rest) = gradients.split_at_mut(4 * h * width);
        let (d_from_state, rest) = rest.split_at_mut(4 * h * h);
        let (d_first, d_second) = rest.split_at_mut(4 * h);
        column_sums(cpu, &d_gates, d_first);
        column_sums(cpu, &d_gates, d_second);
        let add = || Finish { accumulate: true, ..Finish::default() };
        // The state before each row that has one: those after the first step.
        let mut states = Vec::with_capacity(t.saturating_sub(most) * h);
        for step in 1..sequences.steps.len() - 1 {
            let start = sequences.steps[step - 1];
            states.extend_from_slice(&kept.states[start * h..(start + sequences.step(step).len()) * h]);
        }
        let later = Matrix::new(&d_gates[most * 4 * h..], t - most, 4 * h).transposed();
        product(cpu, later, Right::Plain(Matrix::new(&states, t - most, h)), d_from_state, h, add());
        // In the order of the words.
        let mut said = vec![0.0; t * 4 * h];
        for (row, word) in d_gates.chunks_exact(4 * h).zip(words) {
            said[word * 4 * h..][..4 * h].copy_from_slice(row);
        }
        let said = Matrix::new(&said, t, 4 * h);
        product(cpu, said.transposed(), Right::Plain(Matrix::new(x, t, width)), d_from_input, width, add());
        wanted.then(|| {
            let mut dx = vec![0.0; t * width];
            let weights = Right::Plain(Matrix::new(self.from_input, 4 * h, width));
            product(cpu, said, weights, &mut dx, width, Finish::default());
            dx
        })
    }
}

impl Kept {
    /// The rows of one step; `before` is the first row of the step before. `space` has at least as many numbers as `gates`.
    fn step(
        &mut self,
        cpu: &Cpu,
        weights: &Packed,
        rows: Range<usize>,
        before: Option<usize>,
        space: &mut [f32],
        h: usize,
    ) {
        let n = rows.len();
        let gates = &mut self.gates[rows.start * 4 * h..rows.end * 4 * h];
        let (states, new_states) = self.states.split_at_mut(rows.start * h);
        let (cells, new_cells) = self.cells.split_at_mut(rows.start * h);
        if let Some(start) = before {
            let states = Matrix::new(&states[start * h..], n, h);
            let finish = Finish { accumulate: true, ..Finish::default() };
            product(cpu, states, Right::Packed(weights), gates, 4 * h, finish);
        }
        // σ(x) = ½ + ½·tanh(x/2): one kernel serves all four gates.
        let space = &mut space[..n * 4 * h];
        for (gate, (to, from)) in space.chunks_exact_mut(h).zip(gates.chunks_exact(h)).enumerate() {
            let factor = if gate % 4 == 2 { 1.0 } else { 0.5 };
            to.iter_mut().zip(from).for_each(|(to, from)| *to = factor * from);
        }
        activation::forward(cpu, Activation::Tanh, space, gates);
        for row in 0..n {
            let gates = &mut gates[row * 4 * h..][..4 * h];
            let (input, rest) = gates.split_at_mut(h);
            let (forget, rest) = rest.split_at_mut(h);
            let (new, output) = rest.split_at_mut(h);
            for gate in [&mut *input, &mut *forget, output] {
                gate.iter_mut().for_each(|x| *x = 0.5 + 0.5 * *x);
            }
            let cell = &mut new_cells[row * h..][..h];
            match before {
                Some(start) => {
                    let cells = &cells[(start + row) * h..][..h];
                    for k in 0..h {
                        cell[k] = forget[k] * cells[k] + input[k] * new[k];
                    }
                }
                None => (0..h).for_each(|k| cell[k] = input[k] * new[k]),
            }
        }
        let bounded = &mut self.bounded[rows.start * h..rows.end * h];
        activation::forward(cpu, Activation::Tanh, &new_cells[..n * h], bounded);
        for row in 0..n {
            let output = &gates[row * 4 * h + 3 * h..][..h];
            let (bounded, state) = (&bounded[row * h..][..h], &mut new_states[row * h..][..h]);
            (0..h).for_each(|k| state[k] = output[k] * bounded[k]);
        }
    }

    /// From what a row's output and what came after it ask for, to the gradients of its gates; `d_cell` becomes that of the
    /// cell before.
    fn row_backward(
        &self,
        row: usize,
        dy: &[f32],
        cells_before: Option<&[f32]>,
        d_state: &[f32],
        d_cell: &mut [f32],
        d_gates: &mut [f32],
        h: usize,
    ) {
        let gates = &self.gates[row * 4 * h..][..4 * h];
        let (input, forget, new, output) = (&gates[..h], &gates[h..2 * h], &gates[2 * h..3 * h], &gates[3 * h..]);
        let bounded = &self.bounded[row * h..][..h];
        let (d_input, rest) = d_gates.split_at_mut(h);
        let (d_forget, rest) = rest.split_at_mut(h);
        let (d_new, d_output) = rest.split_at_mut(h);
        for k in 0..h {
            let d_state = dy[k] + d_state[k];
            let d = d_cell[k] + d_state * output[k] * (1.0 - bounded[k] * bounded[k]);
            d_output[k] = d_state * bounded[k] * output[k] * (1.0 - output[k]);
            d_input[k] = d * new[k] * input[k] * (1.0 - input[k]);
            d_new[k] = d * input[k] * (1.0 - new[k] * new[k]);
            d_forget[k] = cells_before.map_or(0.0, |cells| d * cells[k] * forget[k] * (1.0 - forget[k]));
            d_cell[k] = d * forget[k];
        }
    }
}

/// The definition, in f64, one sequence after the other.
#[cfg(test)]
pub(crate) mod reference {
    use super::BiLstm;

    /// One direction over one sequence. Gives states, and for the backward pass gates and cells, step by step.
    fn direction(p: &[f64], x: &[Vec<f64>], h: usize, reverse: bool) -> (Vec<Vec<f64>>, Vec<[Vec<f64>; 2]>) {
        let width = x[0].len();
        let (w, rest) = p.split_at(4 * h * width);
        let (u, b) = rest.split_at(4 * h * h);
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let (mut state, mut cell) = (vec![0.0; h], vec![0.0; h]);
        let (mut states, mut kept) = (vec![Vec::new(); x.len()], Vec::new());
        for step in 0..x.len() {
            let word = if reverse { x.len() - 1 - step } else { step };
            let gate = |g: usize| {
                let from_input: f64 = (0..width).map(|i| w[g * width + i] * x[word][i]).sum();
                let from_state: f64 = (0..h).map(|i| u[g * h + i] * state[i]).sum();
                let sum = from_input + from_state + b[g] + b[4 * h + g];
                if g / h == 2 { sum.tanh() } else { sigmoid(sum) }
            };
            let gates: Vec<f64> = (0..4 * h).map(gate).collect();
            cell = (0..h).map(|k| gates[h + k] * cell[k] + gates[k] * gates[2 * h + k]).collect();
            state = (0..h).map(|k| gates[3 * h + k] * cell[k].tanh()).collect::<Vec<f64>>();
            states[word] = state.clone();
            kept.push([gates, cell.clone()]);
        }
        (states, kept)
    }

    /// The backward pass through one direction: adds to the gradients of parameters and input.
    fn direction_backward(
        p: &[f64],
        x: &[Vec<f64>],
        h: usize,
        reverse: bool,
        dy: &[Vec<f64>],
        dp: &mut [f64],
        dx: &mut [Vec<f64>],
    ) {
        let width = x[0].len();
        let (states, kept) = direction(p, x, h, reverse);
        let word = |step: usize| if reverse { x.len() - 1 - step } else { step };
        let (mut d_state, mut d_cell) = (vec![0.0; h], vec![0.0; h]);
        for step in (0..x.len()).rev() {
            let [gates, cell] = &kept[step];
            let before = |k: usize| if step == 0 { 0.0 } else { kept[step - 1][1][k] };
            let mut d_gates = vec![0.0; 4 * h];
            for k in 0..h {
                let (i, f, g, o) = (gates[k], gates[h + k], gates[2 * h + k], gates[3 * h + k]);
                let d = dy[word(step)][k] + d_state[k];
                let c = cell[k].tanh();
                let dc = d_cell[k] + d * o * (1.0 - c * c);
                d_gates[k] = dc * g * i * (1.0 - i);
                d_gates[h + k] = dc * before(k) * f * (1.0 - f);
                d_gates[2 * h + k] = dc * i * (1.0 - g * g);
                d_gates[3 * h + k] = d * c * o * (1.0 - o);
                d_cell[k] = dc * f;
            }
            d_state = vec![0.0; h];
            for g in 0..4 * h {
                for i in 0..width {
                    dp[g * width + i] += d_gates[g] * x[word(step)][i];
                    dx[word(step)][i] += d_gates[g] * p[g * width + i];
                }
                for i in 0..h {
                    let at = 4 * h * width + g * h + i;
                    dp[at] += if step == 0 { 0.0 } else { d_gates[g] * states[word(step - 1)][i] };
                    d_state[i] += d_gates[g] * p[at];
                }
                let bias = 4 * h * (width + h) + g;
                dp[bias] += d_gates[g];
                dp[bias + 4 * h] += d_gates[g];
            }
        }
    }

    /// The outputs of all layers for one sequence, the input first.
    pub(crate) fn forward(lstm: &BiLstm, p: &[f64], x: &[Vec<f64>]) -> Vec<Vec<Vec<f64>>> {
        let mut layers = vec![x.to_vec()];
        let mut start = 0;
        for layer in 0..lstm.layers {
            let len = lstm.direction_len(layer);
            let x = &layers[layer];
            let (left, _) = direction(&p[start..start + len], x, lstm.hidden, false);
            let (right, _) = direction(&p[start + len..start + 2 * len], x, lstm.hidden, true);
            let both = left.into_iter().zip(right).map(|(left, right)| [left, right].concat()).collect();
            layers.push(both);
            start += 2 * len;
        }
        layers
    }

    /// Gradients of parameters and input, where `dy` is that of the output.
    pub(crate) fn backward(lstm: &BiLstm, p: &[f64], x: &[Vec<f64>], dy: &[Vec<f64>]) -> (Vec<f64>, Vec<Vec<f64>>) {
        let layers = forward(lstm, p, x);
        let (mut dp, mut dy, h) = (vec![0.0; p.len()], dy.to_vec(), lstm.hidden);
        let mut end = p.len();
        for layer in (0..lstm.layers).rev() {
            let (len, x) = (lstm.direction_len(layer), &layers[layer]);
            let mut dx = vec![vec![0.0; x[0].len()]; x.len()];
            for side in 0..2 {
                let range = end - (2 - side) * len..end - (1 - side) * len;
                let dy: Vec<Vec<f64>> = dy.iter().map(|row| row[side * h..][..h].to_vec()).collect();
                direction_backward(&p[range.clone()], x, h, side == 1, &dy, &mut dp[range], &mut dx);
            }
            end -= 2 * len;
            dy = dx;
        }
        (dp, dy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use henson_kernels::philox::Stream;

    const SMALL: BiLstm = BiLstm { input: 3, hidden: 2, layers: 2 };

    fn numbers(seed: u64, count: usize) -> Vec<f32> {
        let mut draws = Stream::new(seed, 1, 0);
        (0..count).map(|_| draws.normal() * 0.5).collect()
    }

    fn wide(x: &[f32]) -> Vec<f64> {
        x.iter().map(|x| f64::from(*x)).collect()
    }

    fn rows(x: &[f64], width: usize) -> Vec<Vec<f64>> {
        x.chunks(width).map(<[f64]>::to_vec).collect()
    }

    #[test]
    fn the_references_way_back_is_its_derivative() {
        let (p, x, w) = (wide(&numbers(1, SMALL.len())), wide(&numbers(2, 4 * 3)), wide(&numbers(3, 4 * 4)));
        let loss = |p: &[f64], x: &[f64]| -> f64 {
            let layers = reference::forward(&SMALL, p, &rows(x, 3));
            layers[2].iter().flatten().zip(&w).map(|(y, w)| y * w).sum()
        };
        let (dp, dx) = reference::backward(&SMALL, &p, &rows(&x, 3), &rows(&w, 4));
        let step = 1e-6;
        let moved = |x: &[f64], i: usize, by: f64| {
            let mut x = x.to_vec();
            x[i] += by;
            x
        };
        for i in 0..p.len() {
            let slope = (loss(&moved(&p, i, step), &x) - loss(&moved(&p, i, -step), &x)) / (2.0 * step);
            assert!((slope - dp[i]).abs() < 1e-8, "parameter {i}: {slope} and {}", dp[i]);
        }
        for (i, dx) in dx.iter().flatten().enumerate() {
            let slope = (loss(&p, &moved(&x, i, step)) - loss(&p, &moved(&x, i, -step))) / (2.0 * step);
            assert!((slope - dx).abs() < 1e-8, "input {i}: {slope} and {dx}");
        }
    }

    /// Output, gradients of the parameters, gradient of the input.
    fn run(lstm: &BiLstm, isa: Isa, threads: usize, lengths: &[usize], dropout: Option<Dropout>) -> [Vec<f32>; 3] {
        let (pair, sequences) = (Pair::new(isa, threads), Sequences::new(lengths));
        let t = sequences.words();
        let (p, x) = (numbers(1, lstm.len()), numbers(2, t * lstm.input));
        let passed = lstm.forward(&pair, &p, x, &sequences, |_| dropout);
        let (mut dp, dy) = (vec![0.0; lstm.len()], numbers(3, t * 2 * lstm.hidden));
        let dx = lstm.backward(&pair, &p, &passed, dy, &sequences, |_| dropout, &mut dp, true).unwrap();
        [passed.output, dp, dx]
    }

    #[test]
    fn as_the_reference_for_sequences_of_any_length() {
        let sizes = [(SMALL, vec![4]), (BiLstm { input: 7, hidden: 19, layers: 2 }, vec![3, 1, 9, 0, 9, 2])];
        for (lstm, lengths) in sizes {
            let sequences = Sequences::new(&lengths);
            let t = sequences.words();
            let (p, x, dy) = (numbers(1, lstm.len()), numbers(2, t * lstm.input), numbers(3, t * 2 * lstm.hidden));
            let (p, x, dy) = (wide(&p), rows(&wide(&x), lstm.input), rows(&wide(&dy), 2 * lstm.hidden));
            let mut expected = [Vec::new(), vec![0.0; p.len()], Vec::new()];
            for words in sequences.ranges().filter(|words| !words.is_empty()) {
                expected[0].extend(reference::forward(&lstm, &p, &x[words.clone()])[lstm.layers].concat());
                let (dp, dx) = reference::backward(&lstm, &p, &x[words.clone()], &dy[words]);
                expected[1].iter_mut().zip(&dp).for_each(|(sum, dp)| *sum += dp);
                expected[2].extend(dx.concat());
            }
            for isa in Isa::available() {
                for (got, expected) in run(&lstm, isa, 1, &lengths, None).iter().zip(&expected) {
                    assert_eq!(got.len(), expected.len());
                    let largest = expected.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
                    for (got, expected) in got.iter().zip(expected) {
                        let error = (f64::from(*got) - expected).abs();
                        assert!(error < 3e-6 * largest.max(1.0), "{isa}: {got} instead of {expected}");
                    }
                }
            }
        }
    }

    #[test]
    fn neither_threads_nor_company_change_a_bit() {
        let lstm = BiLstm { input: 20, hidden: 24, layers: 2 };
        let lengths = [5, 30, 1, 17, 30];
        let dropout = Dropout::new(0.4, 7, 3, 9);
        let one = run(&lstm, Isa::best(), 1, &lengths, dropout);
        for threads in [2, 3, 4] {
            assert_eq!(one, run(&lstm, Isa::best(), threads, &lengths, dropout), "{threads} threads");
        }
        assert_ne!(one[0], run(&lstm, Isa::best(), 1, &lengths, None)[0]);
        // The first sequence alone.
        let alone = run(&lstm, Isa::best(), 1, &lengths[..1], dropout);
        assert_eq!(one[0][..5 * 48], alone[0]);
    }

    #[test]
    fn dropout_falls_on_the_way_back_where_it_fell_before() {
        // With all but the dropped numbers equal, the loss moves along the gradient.
        let (pair, sequences) = (Pair::new(Isa::best(), 1), Sequences::new(&[4, 2]));
        let lstm = BiLstm { input: 3, hidden: 6, layers: 2 };
        let (p, dy, dropout) = (numbers(1, lstm.len()), numbers(3, 6 * 12), Dropout::new(0.5, 1, 2, 3));
        let loss = |p: &[f32]| -> f64 {
            let passed = lstm.forward(&pair, p, numbers(2, 18), &sequences, |_| dropout);
            passed.output.iter().zip(&dy).map(|(y, w)| f64::from(y * w)).sum()
        };
        let passed = lstm.forward(&pair, &p, numbers(2, 18), &sequences, |_| dropout);
        let mut dp = vec![0.0; lstm.len()];
        lstm.backward(&pair, &p, &passed, dy.clone(), &sequences, |_| dropout, &mut dp, false);
        let along = |by: f32| -> Vec<f32> { p.iter().zip(&dp).map(|(p, dp)| p + by * dp).collect() };
        let slope = (loss(&along(1e-3)) - loss(&along(-1e-3))) / 2e-3;
        let squares: f64 = dp.iter().map(|x| f64::from(*x).powi(2)).sum();
        assert!((slope / squares - 1.0).abs() < 1e-2, "{slope} and {squares}");
    }
}
