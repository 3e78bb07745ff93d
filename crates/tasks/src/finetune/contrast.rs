//! Learning of vectors, of which there is one for each text.
//!
//! By contrast: of all second texts in a batch, a first text shall be most like its own (van den Oord et
//! al. 2018; the ranking loss with multiple negatives of Henderson et al. 2017). Texts that are said to mean something else
//! stand among those to choose from. Or by scores: the cosine of two texts' vectors shall be a given number.
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
///
/// Where only some pairs have others, these are filled up to one of few numbers with a short text that nobody may choose: a
/// GPU plays a pass again that had the same number of sequences.
pub(super) fn sequences<'a>(instances: &[&'a Instance]) -> Vec<Sequence<'a>> {
    let of = |place: usize| instances.iter().filter_map(move |instance| instance.sequences.get(place));
    let all = (0..3).flat_map(of).map(|(ids, segments)| Sequence { ids, segments });
    let mut all: Vec<Sequence<'a>> = all.collect();
    let others = all.len() - 2 * instances.len();
    let filled = others.next_multiple_of((instances.len() / 8).max(1));
    if let Some(short) = all.iter().min_by_key(|sequence| sequence.ids.len()).copied() {
        all.extend(std::iter::repeat_n(short, filled - others));
    }
    all
}

impl Alike {
    /// Each pair counts `scale`.
    pub(super) fn new(device: &Device, instances: &[&Instance], scale: f32) -> Result<Self> {
        let q = instances.len();
        let real = instances.iter().map(|instance| instance.sequences.len()).sum();
        let added = added(&sequences(instances), q, real);
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

/// What a part of a batch with scores needs beside its sequences.
pub(super) struct Cosines {
    /// Q.
    targets: Tensor,
    /// Q×Q zeros.
    zeros: Tensor,
    /// Q: where a pair's own cosine stands among those of all.
    own: Tensor,
}

impl Cosines {
    pub(super) fn new(device: &Device, targets: &[f32]) -> Result<Self> {
        let q = targets.len();
        let own: Vec<u32> = (0..q).map(|i| (i * (q + 1)) as u32).collect();
        Ok(Self {
            targets: Tensor::from_slice(device, [q], targets)?,
            zeros: Tensor::from_slice(device, [q, q], &vec![0.0; q * q])?,
            own: Tensor::from_slice(device, [q], &own)?,
        })
    }

    /// The loss from the encoder's output: scale·Σ (cosine − target)². The cosines of all with all are a small matter
    /// beside the encoder, and need nothing that is not there.
    pub(super) fn loss(&self, pass: &mut Pass<'_>, last: &Var, layout: &Layout, scale: f32) -> Result<Tensor> {
        let vectors = pass.unit_means(last, layout)?;
        let all = pass.similarities(&vectors, 1.0, &self.zeros)?;
        let all = all.reshape([all.tensor().shape().elements(), 1])?;
        let own = pass.gather(&all, &self.own)?;
        Ok(pass.squared_error(own, &self.targets, scale)?)
    }
}

/// Which texts may not be chosen: a pair's own texts, where they occur again, and the other partners of the same first text.
/// They are not wrong, only not asked for. Nor may those after the `real` ones.
fn added(sequences: &[Sequence<'_>], q: usize, real: usize) -> Vec<f32> {
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
        j != i && (own || first.get(j) == Some(&first[i]) || q + j >= real)
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
        let sequences_of = |all: &[Instance]| {
            let all: Vec<&Instance> = all.iter().collect();
            sequences(&all).iter().map(|sequence| sequence.ids[1]).collect::<Vec<u32>>()
        };
        assert_eq!(sequences_of(&all), [5, 8, 5, 11, 6, 9, 10, 5, 7, 6]);
        let added = added(&sequences(&all.iter().collect::<Vec<_>>()), 4, 10);
        let may: Vec<String> =
            added.chunks(6).map(|row| row.iter().map(|x| if *x == 0.0 { 'x' } else { '-' }).collect()).collect();
        assert_eq!(may, ["xx--x-", "xxxxxx", "-xx-xx", "xxxxxx"]);

        // 32 pairs, of which five have others: these become eight.
        let mut many: Vec<Instance> = (0..32).map(|i| instance(&[2 * i, 2 * i + 1])).collect();
        many.iter_mut().take(5).for_each(|pair| pair.sequences.push((vec![1, 99], vec![0, 0])));
        let many: Vec<&Instance> = many.iter().collect();
        assert_eq!((sequences(&many).len(), sequences(&many[5..]).len()), (64 + 8, 54));
        let added = super::added(&sequences(&many), 32, 64 + 5);
        assert!(added.chunks(40).all(|row| row[..37].iter().all(|x| *x == 0.0) && row[37..] == [NEVER; 3]));
    }
}
