//! What the span-boundary objective of SpanBERT (Joshi and others, 2020, section 3.2) predicts: the pieces of each masked span,
//! from the two pieces around it and a place within the span.

use super::{Corruption, Instances};
use crate::Part;

/// The targets of a part of a batch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Boundaries {
    /// For each target two rows of the part: that before its span, and that behind it.
    pub ends: Vec<u32>,
    /// For each target its place within the span, from 0.
    pub places: Vec<u32>,
    /// Which pieces these are.
    pub targets: Vec<u32>,
}

impl Instances {
    /// The targets of a part: those of spans that have a piece on both sides which is not special; of long spans the first
    /// `most`. Spans are predicted pieces in a row, since those that touch are one.
    pub fn boundaries(&self, part: &Part, most: usize) -> Boundaries {
        let Corruption::Masks(masks) = &self.corruption else { return Boundaries::default() };
        let mut found = Boundaries::default();
        let (mut rows, mut targets) = (&part.rows[..], &part.targets[..]);
        let mut begin = 0;
        for length in &part.lengths {
            let end = begin + *length as u32;
            let is_text = |row: u32| (begin..end).contains(&row) && !masks.is_layout(part.ids[row as usize]);
            while let Some(first) = rows.first().copied().filter(|first| *first < end) {
                let within = rows.iter().zip(first..end).take_while(|(row, expected)| *row == expected);
                let count = within.count();
                let (before, behind) = (first.checked_sub(1), first + count as u32);
                if let Some(before) = before.filter(|before| is_text(*before) && is_text(behind)) {
                    let predicted = count.min(most);
                    found.ends.extend((0..predicted).flat_map(|_| [before, behind]));
                    found.places.extend(0..predicted as u32);
                    found.targets.extend_from_slice(&targets[..predicted]);
                }
                (rows, targets) = (&rows[count..], &targets[count..]);
            }
            begin = end;
        }
        found
    }
}
