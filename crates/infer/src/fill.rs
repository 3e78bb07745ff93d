//! What a masked language model would put into the blanks of a text.

use henson_text::{code_point_offsets, window_with_most_context};
use serde::Serialize;

use crate::{InferError, Length, Model, Read, Request, Result};

/// The masks of BERT's and RoBERTa's relatives, which are easily confused.
const OTHER_MASKS: [&str; 2] = ["[MASK]", "<mask>"];

/// A text with its blanks filled.
#[derive(Clone, Debug, Serialize)]
pub struct Filled {
    /// Its blanks, in order.
    #[serde(rename = "masks")]
    pub blanks: Vec<Blank>,
    /// Pieces that were cut off because the text was too long.
    pub dropped: usize,
}

/// One blank.
#[derive(Clone, Debug, Serialize)]
pub struct Blank {
    /// Where it begins in the text, in bytes.
    pub start: usize,
    /// Where it ends.
    pub end: usize,
    /// The likeliest tokens, the best first. Empty where the blank lay in the part that was cut off.
    #[serde(rename = "predictions")]
    pub candidates: Vec<Candidate>,
}

/// A token for a blank.
#[derive(Clone, Debug, Serialize)]
pub struct Candidate {
    /// Its name in the vocabulary: `Ġthe` in byte-level BPE, `▁the` in SentencePiece.
    pub token: String,
    /// What it reads, with the space before it where that is part of it: ` the`.
    pub text: String,
    /// Its id.
    pub id: u32,
    /// How likely it is.
    pub probability: f32,
}

impl Filled {
    /// The same with the places of blanks in characters of the text, as JSON has them.
    #[must_use]
    pub fn in_characters(mut self, text: &str) -> Self {
        let bytes: Vec<(usize, usize)> = self.blanks.iter().map(|blank| (blank.start, blank.end)).collect();
        for (blank, place) in self.blanks.iter_mut().zip(code_point_offsets(text, &bytes)) {
            (blank.start, blank.end) = place;
        }
        self
    }
}

impl Model {
    /// The `top` likeliest tokens for every mask in every text. A text without a mask is an error, as is
    /// a model that reads left to right.
    pub fn fill(&self, texts: &[&str], top: usize, length: Length) -> Result<Vec<Filled>> {
        self.ask(texts, |text| self.prepare_fill(text, top, length))
    }

    /// [`fill`](Self::fill) for one text, to be run.
    pub fn prepare_fill(&self, text: &str, top: usize, length: Length) -> Result<Request<Filled>> {
        let mask = self.tokenizer().special().mask.as_ref().ok_or(InferError::NoSpecial("mask"))?;
        if self.is_left_to_right() {
            return Err(InferError::CannotFill { mask: mask.text.clone() });
        }
        let pieces = self.tokenizer().encode(text)?;
        let (windows, dropped) = self.windows_of(&pieces, length)?;
        let masks: Vec<usize> = (0..pieces.len()).filter(|i| pieces.ids[*i] == mask.id).collect();
        if masks.is_empty() {
            let other = OTHER_MASKS.into_iter().find(|other| *other != mask.text && text.contains(other));
            return Err(InferError::NoMask { other, text: 1, mask: mask.text.clone() });
        }
        // For each window: the positions of masks that are read there, and which blanks those are.
        let mut positions = vec![Vec::new(); windows.len()];
        let mut blanks_of = vec![Vec::new(); windows.len()];
        for (blank, piece) in masks.iter().enumerate() {
            let Some(window) = window_with_most_context(&windows, *piece) else { continue };
            if let Some(position) = windows[window].position_of_piece(*piece) {
                positions[window].push(position);
                blanks_of[window].push(blank);
            }
        }
        let blank = |piece: usize| {
            let (start, end) = pieces.offsets[piece];
            Blank { start, end, candidates: Vec::new() }
        };
        let mut blanks: Vec<Blank> = masks.into_iter().map(blank).collect();
        let read = Read::Masked { positions: Vec::new(), top };
        let mut request = Request::new(windows, read, dropped, move |model, read| {
            let top = top.clamp(1, model.config().model.sizes().vocab_size);
            for (numbers, (_, output)) in blanks_of.iter().zip(read) {
                let rows = output.ids.chunks(top).zip(output.numbers.chunks(top));
                for (blank, (ids, probabilities)) in numbers.iter().zip(rows) {
                    blanks[*blank].candidates = model.candidates(ids, probabilities);
                }
            }
            Filled { blanks, dropped }
        });
        for (sequence, positions) in request.sequences.iter_mut().zip(positions) {
            sequence.read = Read::Masked { positions, top };
        }
        Ok(request)
    }

    fn candidates(&self, ids: &[u32], probabilities: &[f32]) -> Vec<Candidate> {
        let both = ids.iter().zip(probabilities);
        both.map(|(&id, &probability)| {
            let token = self.name_of(id);
            let text = self.tokenizer().readable(id).unwrap_or_else(|| token.clone());
            Candidate { token, text, id, probability }
        })
        .collect()
    }
}
