//! What a masked language model would put into the blanks of a text.

use henson_models::Capture;
use henson_tensor::Tensor;
use henson_text::{Features, window_with_most_context};

use crate::model::Prepared;
use crate::{InferError, Length, Model, Result};

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

/// A blank's place: which text, which of its blanks, which sequence and which position there.
struct Place {
    text: usize,
    blank: usize,
    sequence: usize,
    position: usize,
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
        let mut sequences: Vec<&Features> = Vec::new();
        let mut places = Vec::new();
        for (text, prepared) in prepared.iter().enumerate() {
            let pieces = &prepared.pieces;
            let masks = (0..pieces.len()).filter(|i| pieces.ids[*i] == mask.id);
            let blanks: Vec<(usize, Blank)> = masks
                .map(|i| {
                    let (start, end) = pieces.offsets[i];
                    (i, Blank { start, end, candidates: Vec::new() })
                })
                .collect();
            if blanks.is_empty() {
                return Err(InferError::NoMask { text: text + 1, mask: mask.text.clone() });
            }
            for (blank, (piece, _)) in blanks.iter().enumerate() {
                let Some(window) = window_with_most_context(&prepared.windows, *piece) else { continue };
                if let Some(position) = prepared.windows[window].position_of_piece(*piece) {
                    places.push(Place { text, blank, sequence: sequences.len() + window, position });
                }
            }
            sequences.extend(&prepared.windows);
            let blanks = blanks.into_iter().map(|(_, blank)| blank).collect();
            filled.push(Filled { blanks, dropped: prepared.dropped });
        }
        let vocabulary = self.bert().config().vocab_size;
        self.encode(&sequences, Capture::default(), |pass, batch, encoded, range| {
            let inside: Vec<&Place> = places.iter().filter(|place| range.contains(&place.sequence)).collect();
            if inside.is_empty() {
                return Ok(());
            }
            let offsets = batch.layout.offsets();
            let rows: Vec<u32> =
                inside.iter().map(|place| offsets[place.sequence - range.start] + place.position as u32).collect();
            let rows = Tensor::from_slice(pass.device(), [rows.len()], &rows)?;
            let logits = self.bert().masked_logits(pass, &encoded.last, &rows)?;
            let probabilities = pass.softmax(&logits, vocabulary)?.to_vec::<f32>()?;
            for (place, row) in inside.iter().zip(probabilities.chunks(vocabulary)) {
                filled[place.text].blanks[place.blank].candidates = self.best(row, top);
            }
            Ok(())
        })?;
        Ok(filled)
    }

    /// The most probable tokens of a row, ties by id.
    fn best(&self, row: &[f32], top: usize) -> Vec<Candidate> {
        let mut ids: Vec<u32> = (0..row.len() as u32).collect();
        let order = |a: &u32, b: &u32| row[*b as usize].total_cmp(&row[*a as usize]).then(a.cmp(b));
        let top = top.min(ids.len());
        if top > 0 && top < ids.len() {
            ids.select_nth_unstable_by(top - 1, order);
        }
        ids.truncate(top);
        ids.sort_by(order);
        ids.into_iter()
            .map(|id| Candidate {
                id,
                token: self.tokenizer().token(id).unwrap_or_else(|| format!("<{id}>")),
                probability: row[id as usize],
            })
            .collect()
    }
}
