//! Contrastive learning of vectors: of all second texts in a batch, a first text shall be most like its own (van den Oord et
//! al. 2018; the ranking loss with multiple negatives of Henderson et al. 2017). Texts that are said to mean something else
//! stand among those to choose from.
//!
//! Legend: Q pairs in a part of a batch, C texts to choose from: Q second ones, then those that mean something else.

use std::collections::HashMap;

use henson_models::Sequence;
use henson_tensor::{Device, Layout, Pass, Tensor, Var};
use henson_train::Result;

use crate::prepare::Instance;

/// What is added to the similarity of a text that may not be chosen.
const NEVER: f32 = -1e9;

/// What a part of a batch needs beside its sequences.
pub(super) struct Alike {
    /// Q: the place of each first text's own partner.
    targets: Tensor,
    /// Q: what each counts.
    weights: Tensor,
    /// Q×C: 0, or [`NEVER`].
    added: Tensor,
}

/// The sequences of a part in the order of the legend: first texts, second ones, others.
pub(super) fn sequences<'a>(instances: &[&'a Instance]) -> Vec<Sequence<'a>> {
    let of = |place: usize| instances.iter().filter_map(move |instance| instance.sequences.get(place));
    let all = (0..3).flat_map(of);
    all.map(|(ids, segments)| Sequence { ids, segments }).collect()
}

impl Alike {
    /// Each pair counts `scale`.
    pub(super) fn new(device: &Device, instances: &[&Instance], scale: f32) -> Result<Self> {
        let q = instances.len();
        let added = added(&sequences(instances), q);
        let targets: Vec<u32> = (0..q as u32).collect();
        Ok(Self {
            targets: Tensor::from_slice(device, [q], &targets)?,
            weights: Tensor::from_slice(device, [q], &vec![scale; q])?,
            added: Tensor::from_slice(device, [q, added.len() / q.max(1)], &added)?,
        })
    }

    /// The loss from the encoder's output: Σ weight·(−ln of the softmax of cosine/temperature at the partner).
    pub(super) fn loss(&self, pass: &mut Pass<'_>, last: &Var, layout: &Layout, temperature: f32) -> Result<Tensor> {
        let vectors = pass.unit_means(last, layout)?;
        let scores = pass.similarities(&vectors, 1.0 / temperature, &self.added)?;
        let candidates = scores.tensor().columns();
        Ok(pass.cross_entropy(scores, candidates, &self.targets, Some(&self.weights), 1.0)?.0)
    }
}

/// Which texts may not be chosen: a pair's own texts, where they occur again, and the other partners of the same first text.
/// They are not wrong, only not asked for.
fn added(sequences: &[Sequence<'_>], q: usize) -> Vec<f32> {
    let mut numbers: HashMap<&[u32], usize> = HashMap::new();
    let texts: Vec<usize> = sequences
        .iter()
        .map(|sequence| {
            let next = numbers.len();
            *numbers.entry(sequence.ids).or_insert(next)
        })
        .collect();
    let (first, candidates) = texts.split_at(q);
    let never = |i: usize, j: usize| {
        let own = candidates[j] == first[i] || candidates[j] == candidates[i];
        j != i && (own || first.get(j) == Some(&first[i]))
    };
    let each = (0..q).flat_map(|i| (0..candidates.len()).map(move |j| (i, j)));
    each.map(|(i, j)| if never(i, j) { NEVER } else { 0.0 }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prepare::Wanted;

    #[test]
    fn only_texts_that_may_be_wrong_are_to_choose_from() {
        let instance = |texts: &[u32]| Instance {
            sequences: texts.iter().map(|text| (vec![1, *text], vec![0, 0])).collect(),
            wanted: Wanted::Alike,
        };
        // The first text of two pairs is the second one of the last.
        let all = [instance(&[5, 6, 7]), instance(&[8, 9]), instance(&[5, 10, 6]), instance(&[11, 5])];
        let sequences = sequences(&all.iter().collect::<Vec<_>>());
        let texts: Vec<u32> = sequences.iter().map(|sequence| sequence.ids[1]).collect();
        assert_eq!(texts, [5, 8, 5, 11, 6, 9, 10, 5, 7, 6]);
        let added = added(&sequences, 4);
        let may: Vec<String> =
            added.chunks(6).map(|row| row.iter().map(|x| if *x == 0.0 { 'x' } else { '-' }).collect()).collect();
        assert_eq!(may, ["xx--x-", "xxxxxx", "-xx-xx", "xxxxxx"]);
    }
}
