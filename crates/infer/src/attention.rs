//! What the tokens of a text look at: attention's probabilities of every layer and head, to be shown to people.

use henson_text::Features;

use crate::{Input, Model, Read, Request, Result, text_windows};

/// The attention within one sequence of S tokens.
#[derive(Clone, Debug)]
pub struct AttentionMaps {
    /// The sequence.
    pub sequence: Features,
    /// A.
    pub heads: usize,
    /// L×A×S×S. Row i of a head says how much token i looks at each; it adds up to 1.
    pub numbers: Vec<f32>,
}

impl AttentionMaps {
    /// One for each layer: A×S×S numbers.
    pub fn layers(&self) -> impl Iterator<Item = &[f32]> {
        self.numbers.chunks_exact(self.heads * self.sequence.len().pow(2))
    }

    /// S×S numbers of one head.
    pub fn head(&self, layer: usize, head: usize) -> Option<&[f32]> {
        self.layers().nth(layer)?.chunks_exact(self.sequence.len().pow(2)).nth(head)
    }
}

impl Model {
    /// The attention within a text, or a pair, cut to `most` tokens or the model's limit: the numbers grow with the square
    /// of the length.
    pub fn attention(&self, input: Input<'_>, most: Option<usize>) -> Result<AttentionMaps> {
        self.run(self.prepare_attention(input, most)?)
    }

    /// [`attention`](Self::attention), to be run.
    pub fn prepare_attention(&self, input: Input<'_>, most: Option<usize>) -> Result<Request<AttentionMaps>> {
        let (windows, dropped) = text_windows(self.tokenizer(), input, self.length_within(most), false)?;
        let heads = self.config().model.sizes().num_attention_heads;
        Ok(Request::new(windows, Read::Attention, dropped, move |_, mut read| {
            // What is cut is one sequence.
            let (sequence, output) = read.swap_remove(0);
            AttentionMaps { sequence, heads, numbers: output.numbers }
        }))
    }
}
