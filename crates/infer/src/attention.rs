//! What the tokens of a text look at: attention's probabilities of every layer and head, to be shown to people.

use crate::{Input, Model, Read, Result, text_windows};

/// The attention within one sequence of S tokens.
#[derive(Clone, Debug)]
pub struct AttentionMaps {
    /// The texts of the tokens, special ones included.
    pub tokens: Vec<String>,
    /// Where each stands in its text, in bytes; none for special tokens.
    pub offsets: Vec<Option<(usize, usize)>>,
    /// The segments: 0, and 1 for the second text of a pair.
    pub segments: Vec<u32>,
    /// A.
    pub heads: usize,
    /// One for each layer: A×S×S. Row i of a head says how much token i looks at each; it adds up to 1.
    pub layers: Vec<Vec<f32>>,
    /// Pieces that were cut off because the text was too long.
    pub dropped: usize,
}

impl AttentionMaps {
    /// S×S numbers of one head.
    pub fn head(&self, layer: usize, head: usize) -> Option<&[f32]> {
        let size = self.tokens.len() * self.tokens.len();
        self.layers.get(layer)?.chunks_exact(size).nth(head)
    }
}

impl Model {
    /// The attention within a text, or a pair, cut to `most` tokens or the model's limit: the numbers grow with the square
    /// of the length.
    pub fn attention(&self, input: Input<'_>, most: Option<usize>) -> Result<AttentionMaps> {
        let (mut windows, dropped) = text_windows(self.tokenizer(), input, self.length_within(most), false)?;
        let outputs = self.read_texts(&[&windows[..1]], |_, _| Read::Attention)?;
        let sequence = windows.remove(0);
        let heads = self.config().model.sizes().num_attention_heads;
        let maps = outputs.into_iter().flatten().flat_map(|output| output.numbers).collect::<Vec<f32>>();
        let layers = maps.chunks_exact(heads * sequence.len().pow(2)).map(<[f32]>::to_vec).collect();
        let token = |id: &u32| self.tokenizer().token(*id).unwrap_or_else(|| format!("<{id}>"));
        Ok(AttentionMaps {
            tokens: sequence.ids.iter().map(token).collect(),
            offsets: sequence.offsets,
            segments: sequence.segments,
            heads,
            layers,
            dropped,
        })
    }
}
