//! XLNet's own head for answers (Yang et al. 2019; `XLNetForQuestionAnswering`): where an answer starts,
//! where it ends given where it starts, and whether there is one. Which starts are tried, and how pairs are ranked, is not here.
//!
//! Legend: T tokens in the flat batch, H hidden, N tokens that an answer may start or end at, B sequences.

use henson_tensor::{Activation, Builder, Init, Norm, Pass, Result, Tensor, Var};

use crate::layers::{Linear, layer_norm};

/// Three small networks on the last hidden states.
#[derive(Clone, Copy, Debug)]
pub struct BeamHead {
    /// Starts of a sequence whose ends are looked for (`start_n_top`).
    pub starts: usize,
    /// Ends that are kept for each of them (`end_n_top`).
    pub ends: usize,
    start: Linear,
    /// H×2H: a token next to the start.
    end: Linear,
    end_norm: Norm,
    end_out: Linear,
    /// H×2H: the start next to the classification token.
    answer: Linear,
    answer_out: Linear,
}

impl BeamHead {
    pub(crate) fn build(b: &mut Builder, h: usize, (starts, ends): (usize, usize), epsilon: f32, init: Init) -> Self {
        let start = b.at("start_logits", |b| Linear::build(b, "dense", h, 1, init));
        let (end, end_norm, end_out) = b.at("end_logits", |b| {
            let end = Linear::build(b, "dense_0", 2 * h, h, init);
            (end, layer_norm(b, "LayerNorm", h, epsilon), Linear::build(b, "dense_1", h, 1, init))
        });
        let (answer, answer_out) = b.at("answer_class", |b| {
            let weight = |b: &mut Builder| b.at("dense_1", |b| b.matrix("weight", 1, h, init));
            (Linear::build(b, "dense_0", 2 * h, h, init), Linear { weight: weight(b), bias: None })
        });
        Self { starts, ends, start, end, end_norm, end_out, answer, answer_out }
    }

    /// How well answers start at rows (N) of the last hidden states: N×1.
    pub fn start_logits(&self, pass: &mut Pass<'_>, last: &Var, rows: &Tensor) -> Result<Var> {
        let x = pass.gather(last, rows)?;
        self.start.logits(pass, &x)
    }

    /// How well answers end at a row that start at another: N×1. `pairs` (2N) has the row, then the start's.
    pub fn end_logits(&self, pass: &mut Pass<'_>, last: &Var, pairs: &Tensor) -> Result<Var> {
        let x = side_by_side(pass, last, pairs)?;
        let x = self.end.forward(pass, &x, Activation::Tanh)?;
        let x = pass.norm(x, &self.end_norm)?;
        self.end_out.logits(pass, &x)
    }

    /// How likely it is that there is no answer, given a start: B×1. `pairs` (2B) has the start's row, then that of the
    /// classification token.
    pub fn no_answer_logits(&self, pass: &mut Pass<'_>, last: &Var, pairs: &Tensor) -> Result<Var> {
        let x = side_by_side(pass, last, pairs)?;
        self.no_answer_logits_of(pass, &x)
    }

    /// The same from states: B×2H.
    pub fn no_answer_logits_of(&self, pass: &mut Pass<'_>, states: &Var) -> Result<Var> {
        let x = self.answer.forward(pass, states, Activation::Tanh)?;
        self.answer_out.logits(pass, &x)
    }
}

/// Every two rows as one.
fn side_by_side(pass: &mut Pass<'_>, last: &Var, pairs: &Tensor) -> Result<Var> {
    let (pairs_of, h) = (pairs.shape().elements() / 2, last.tensor().columns());
    pass.gather(last, pairs)?.reshape([pairs_of, 2 * h])
}
