//! What a masked language model would put into the blanks of a text.

use henson_text::{Features, window_with_most_context};

use crate::model::Prepared;
use crate::{InferError, Length, Model, Read, Result};

/// A text with its blanks filled.
#[derive(Clone, Debug)]
pub struct Filled {
    /// Its blanks, in order.
    pub blanks: Vec<Blank>,
    /// Pieces that were cut off because the text was too long.
    pub dropped: usize,
}

/// One blank.
#[derive(Clone, Debug)]
pub struct Blank {
    /// Where it begins in the text, in bytes.
    pub start: usize,
    /// Where it ends.
    pub end: usize,
    /// The likeliest tokens, the best first. Empty where the blank lay in the part that was cut off.
    pub candidates: Vec<Candidate>,
}

/// A token for a blank.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// Its id.
    pub id: u32,
    /// Its text.
    pub token: String,
    /// How likely it is.
    pub probability: f32,
}

impl Model {
    /// The `top` likeliest tokens for every mask in every text. A text without a mask is an error, as is
    /// a model that reads left to right.
    pub fn fill(&self, texts: &[&str], top: usize, length: Length) -> Result<Vec<Filled>> {
        let mask = self.tokenizer().special().mask.as_ref().ok_or(InferError::NoSpecial("mask"))?;
        if self.is_left_to_right() {
            return Err(InferError::CannotFill { mask: mask.text.clone() });
        }
        let prepared: Vec<Prepared> = texts.iter().map(|text| self.prepare(text, length)).collect::<Result<_>>()?;
        let mut filled = Vec::with_capacity(texts.len());
        // For each window of each text: the positions of masks that are read there, and which blanks those are.
        let mut places: Vec<Vec<(Vec<usize>, Vec<usize>)>> = Vec::with_capacity(texts.len());
        for (text, Prepared { pieces, windows, dropped }) in prepared.iter().enumerate() {
            let masks: Vec<usize> = (0..pieces.len()).filter(|i| pieces.ids[*i] == mask.id).collect();
            if masks.is_empty() {
                return Err(InferError::NoMask { text: text + 1, mask: mask.text.clone() });
            }
            let mut of_windows = vec![(Vec::new(), Vec::new()); windows.len()];
            for (blank, piece) in masks.iter().enumerate() {
                let Some(window) = window_with_most_context(windows, *piece) else { continue };
                if let Some(position) = windows[window].position_of_piece(*piece) {
                    of_windows[window].0.push(position);
                    of_windows[window].1.push(blank);
                }
            }
            places.push(of_windows);
            let blank = |piece: usize| {
                let (start, end) = pieces.offsets[piece];
                Blank { start, end, candidates: Vec::new() }
            };
            filled.push(Filled { blanks: masks.into_iter().map(blank).collect(), dropped: *dropped });
        }
        let windows: Vec<&[Features]> = prepared.iter().map(|p| p.windows.as_slice()).collect();
        let read = |text: usize, window: usize| Read::Masked { positions: places[text][window].0.clone(), top };
        let outputs = self.read_texts(&windows, read)?;
        let top = top.clamp(1, self.config().model.sizes().vocab_size);
        for ((filled, places), outputs) in filled.iter_mut().zip(&places).zip(outputs) {
            for ((_, blanks), output) in places.iter().zip(outputs) {
                let rows = output.ids.chunks(top).zip(output.numbers.chunks(top));
                for (blank, (ids, probabilities)) in blanks.iter().zip(rows) {
                    filled.blanks[*blank].candidates = self.candidates(ids, probabilities);
                }
            }
        }
        Ok(filled)
    }

    fn candidates(&self, ids: &[u32], probabilities: &[f32]) -> Vec<Candidate> {
        let token = |id: u32| self.tokenizer().token(id).unwrap_or_else(|| format!("<{id}>"));
        let both = ids.iter().zip(probabilities);
        both.map(|(id, probability)| Candidate { id: *id, token: token(*id), probability: *probability }).collect()
    }
}
