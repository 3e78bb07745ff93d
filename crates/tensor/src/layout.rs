//! How a flat batch of tokens is divided into sequences. There is no padding.

use std::sync::Arc;

use crate::{Device, Result, Tensor, TensorError};

/// B sequences with T tokens in all. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Layout(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    offsets: Vec<u32>,
    /// B: each sequence's number in the global batch, which dropout counts by.
    numbers: Tensor,
    /// T×2: (number of the sequence, place within it) of each token.
    tokens: Tensor,
    /// B×2: the same for the first token of each sequence.
    firsts: Tensor,
    /// B: where each sequence begins.
    starts: Tensor,
    /// T: each token's place within its sequence.
    positions: Tensor,
}

impl Layout {
    /// Sequences of these lengths; the first has the number `first_number` in the global batch.
    pub fn new(device: &Device, lengths: &[usize], first_number: u32) -> Result<Self> {
        if let Some(i) = lengths.iter().position(|length| *length == 0) {
            return Err(TensorError::Layout(format!(
                "sequence {i} of the batch is empty: each needs a token at least"
            )));
        }
        let total: usize = lengths.iter().sum();
        if u32::try_from(total).is_err() {
            return Err(TensorError::Layout(format!("a batch of {total} tokens is too large")));
        }
        let mut offsets = vec![0];
        let (mut tokens, mut positions) = (Vec::with_capacity(2 * total), Vec::with_capacity(total));
        let numbers: Vec<u32> = (0..lengths.len() as u32).map(|i| first_number + i).collect();
        for (length, number) in lengths.iter().zip(&numbers) {
            for position in 0..*length as u32 {
                tokens.extend([*number, position]);
                positions.push(position);
            }
            offsets.push(positions.len() as u32);
        }
        let b = lengths.len();
        let firsts: Vec<u32> = numbers.iter().flat_map(|n| [*n, 0]).collect();
        Ok(Self(Arc::new(Inner {
            numbers: Tensor::from_slice(device, [b], &numbers)?,
            tokens: Tensor::from_slice(device, [total, 2], &tokens)?,
            firsts: Tensor::from_slice(device, [b, 2], &firsts)?,
            starts: Tensor::from_slice(device, [b], &offsets[..b])?,
            positions: Tensor::from_slice(device, [total], &positions)?,
            offsets,
        })))
    }

    /// Where each sequence begins, and the end of the last.
    pub fn offsets(&self) -> &[u32] {
        &self.0.offsets
    }

    /// B.
    pub fn sequences(&self) -> usize {
        self.0.offsets.len() - 1
    }

    /// T.
    pub fn tokens(&self) -> usize {
        self.0.positions.shape().elements()
    }

    /// The rows of the first tokens: where the sequences begin.
    pub fn starts(&self) -> &Tensor {
        &self.0.starts
    }

    /// Each token's place within its sequence.
    pub fn positions(&self) -> &Tensor {
        &self.0.positions
    }

    pub(crate) fn numbers(&self) -> &Tensor {
        &self.0.numbers
    }

    pub(crate) fn token_rows(&self) -> &Tensor {
        &self.0.tokens
    }

    pub(crate) fn first_rows(&self) -> &Tensor {
        &self.0.firsts
    }
}
