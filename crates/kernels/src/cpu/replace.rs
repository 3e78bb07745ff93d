//! Replaced tokens (Clark et al. 2020): what another model drew is put into a text, and each token gets a label that says whether it
//! is still what stood there. And the count of what a detector finds of it.
//!
//! Legend: T tokens, P places where something was drawn.

use std::sync::atomic::{AtomicU32, Ordering};

use super::{Cpu, SharedMut};

/// The definition.
pub mod reference {
    use super::Found;

    /// The text with what was drawn at `rows` put in, and 1 for every token that is not what it was.
    pub fn replace(ids: &[u32], rows: &[u32], drawn: &[u32]) -> (Vec<u32>, Vec<f32>) {
        let mut out = ids.to_vec();
        rows.iter()
            .zip(drawn)
            .filter(|(row, _)| (**row as usize) < ids.len())
            .for_each(|(row, id)| out[*row as usize] = *id);
        let labels = out.iter().zip(ids).map(|(new, old)| if new == old { 0.0 } else { 1.0 }).collect();
        (out, labels)
    }

    /// Tokens of a weight above 0 that are replaced (a label above ½), that are said to be (a logit above 0), and both.
    pub fn found(logits: &[f32], labels: &[f32], weights: &[f32]) -> Found {
        let mut found = Found::default();
        for t in (0..labels.len()).filter(|t| weights[*t] > 0.0) {
            let (replaced, said) = (labels[t] > 0.5, logits[t] > 0.0);
            found.replaced += u32::from(replaced);
            found.said += u32::from(said);
            found.both += u32::from(replaced && said);
        }
        found
    }
}

/// How many replaced tokens a detector finds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Tokens that are replaced.
    pub replaced: u32,
    /// Tokens that are said to be.
    pub said: u32,
    /// Replaced tokens that are said to be.
    pub both: u32,
}

/// The least tokens that a thread is worth.
const LEAST: usize = 1 << 14;

/// `out` becomes `ids` with `drawn[i]` at `rows[i]`, `labels` 1 where the two differ and else 0. No row may be named twice; one
/// outside of the text stands for nothing.
pub fn replace(cpu: &Cpu, ids: &[u32], rows: &[u32], drawn: &[u32], out: &mut [u32], labels: &mut [f32]) {
    assert!(out.len() == ids.len() && labels.len() == ids.len(), "replace: one id and one label for each token");
    assert!(rows.len() == drawn.len(), "replace: one id for each row");
    let (shared_out, shared_labels) = (SharedMut::new(out), SharedMut::new(labels));
    cpu.for_ranges(ids.len(), LEAST, |_, range| {
        // SAFETY: ranges are disjoint.
        let (out, labels) =
            unsafe { (shared_out.slice(range.start, range.len()), shared_labels.slice(range.start, range.len())) };
        out.copy_from_slice(&ids[range]);
        labels.fill(0.0);
    });
    // Some hundreds in a batch.
    for (&row, &id) in rows.iter().zip(drawn) {
        if let Some(old) = ids.get(row as usize) {
            out[row as usize] = id;
            labels[row as usize] = f32::from(u8::from(id != *old));
        }
    }
}

/// How many tokens of a weight above 0 are replaced (a label above ½), are said to be (a logit above 0), and both.
pub fn found(cpu: &Cpu, logits: &[f32], labels: &[f32], weights: &[f32]) -> Found {
    assert!(logits.len() == labels.len() && labels.len() == weights.len(), "found: one of each for every token");
    let counts = [const { AtomicU32::new(0) }; 3];
    cpu.for_ranges(labels.len(), LEAST, |_, range| {
        let own = reference::found(&logits[range.clone()], &labels[range.clone()], &weights[range]);
        for (count, own) in counts.iter().zip([own.replaced, own.said, own.both]) {
            count.fetch_add(own, Ordering::Relaxed);
        }
    });
    let [replaced, said, both] = counts.map(AtomicU32::into_inner);
    Found { replaced, said, both }
}
